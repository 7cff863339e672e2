"""One training step: every recipe learns, the pieces written from scratch agree with torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memlab.models import TransformerConfig, model
from memlab.recipe import BLOCK_8BIT, MIN_8BIT, Recipe, RecipeError
from memlab.step import AdamW8bit, _from_bytes, _to_bytes, workload
from memlab.techniques.precision import MasterWeights

torch.set_num_threads(1)

SMALL = replace(
    model("gpt2"), layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=100, context=16
)
assert isinstance(SMALL, TransformerConfig)

OPTIMIZERS = [
    ("sgd", "foreach"), ("momentum", "for-loop"), ("momentum", "fused"), ("adam", "fused"),
    ("adamw", "foreach"), ("adamw", "for-loop"), ("adamw-8bit", "for-loop"),
    ("adafactor", "for-loop"), ("adafactor", "foreach"),
]  # fmt: skip


def losses(recipe: Recipe, steps: int = 20) -> list[float]:
    work = workload(SMALL, recipe)
    return [work.step().item() for _ in range(steps)]


@pytest.mark.parametrize(("optimizer", "impl"), OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
def test_every_optimizer_learns(optimizer: str, impl: str, precision: str) -> None:
    seen = losses(Recipe(precision=precision, optimizer=optimizer, optimizer_impl=impl, micro_batch=2))
    assert seen[-1] < seen[0] - 0.05


@pytest.mark.parametrize("precision", ["amp-bf16", "amp-fp16", "bf16", "bf16-master"])
def test_every_precision_learns_like_fp32(precision: str) -> None:
    plain, other = (losses(Recipe(precision=p, micro_batch=2)) for p in ("fp32", precision))
    assert other[-1] == pytest.approx(plain[-1], rel=0.02)
    assert other[-1] < other[0] - 0.05


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "bf16", "bf16-master"])
@pytest.mark.parametrize(("optimizer", "impl"), OPTIMIZERS)
def test_every_recipe_steps_on_fake_tensors(precision: str, optimizer: str, impl: str) -> None:
    with FakeTensorMode():
        work = workload(SMALL, Recipe(precision=precision, optimizer=optimizer, optimizer_impl=impl))
        assert [work.step().shape for _ in range(2)] == [(), ()]


def test_adafactor_steps_on_the_meta_device() -> None:
    assert workload(SMALL, Recipe(precision="bf16", optimizer="adafactor"), "meta").step().is_meta


def test_the_same_seed_gives_the_same_losses() -> None:
    recipe = Recipe(precision="fp32", micro_batch=2)
    assert losses(recipe, 3) == losses(recipe, 3)
    assert workload(SMALL, recipe, seed=1).step().item() != losses(recipe, 1)[0]


def test_phases_are_told_in_order() -> None:
    told: list[str] = []
    workload(SMALL, Recipe(precision="fp32", accumulation=2)).step(told.append)
    assert told == ["forward", "backward"] * 2 + ["optimizer"]


def test_accumulation_means_over_micro_batches() -> None:
    one, three = (workload(SMALL, Recipe(precision="fp32", accumulation=n)) for n in (1, 3))
    one.step()
    three.step()
    for a, b in zip(one.model.parameters(), three.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)  # the same micro-batch each time: the mean is itself


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_freed_or_zeroed(set_to_none: bool) -> None:
    work = workload(SMALL, Recipe(precision="fp32", set_to_none=set_to_none))
    work.step()
    first = {id(p): p.grad.data_ptr() for p in work.model.parameters() if p.grad is not None}
    alive = []

    def mark(phase: str) -> None:
        if phase == "forward":
            alive.extend(p.grad is not None for p in work.model.parameters())

    work.step(mark)
    assert set(alive) == {not set_to_none}
    if not set_to_none:
        assert first == {id(p): p.grad.data_ptr() for p in work.model.parameters() if p.grad is not None}


def test_master_weights_keep_what_bf16_loses() -> None:
    plain = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    kept = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    optimizers = [make([plain]), MasterWeights([kept], make)]
    for _ in range(20):
        plain.grad, kept.grad = torch.ones_like(plain), torch.ones_like(kept)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, torch.ones_like(plain))  # 1 - 0.001 rounds back to 1
    torch.testing.assert_close(kept.float(), torch.full((8,), 0.98), atol=4e-3, rtol=0.0)


def test_master_weights_equal_fp32_training() -> None:
    work = workload(SMALL, Recipe(precision="bf16-master", optimizer="momentum"))
    work.step()
    p = next(iter(work.model.parameters()))
    state = work.optimizer.state[p]
    assert state["master"].dtype == state["momentum_buffer"].dtype == torch.float32
    assert torch.equal(p, state["master"].bfloat16())


@pytest.mark.parametrize("size", [MIN_8BIT, MIN_8BIT + 1, 10_000])
def test_eight_bit_states_take_what_the_recipe_says(size: int) -> None:
    p = torch.nn.Parameter(torch.randn(size))
    optimizer = AdamW8bit([p])
    p.grad = torch.randn(size)
    optimizer.step()
    state = dict(optimizer.state[p])
    expected = Recipe(optimizer="adamw-8bit").state_tensors((size,))
    assert {name: (tuple(t.shape), t.nbytes) for name, t in state.items()} == {
        t.name: (t.shape, t.bytes) for t in expected
    }
    assert sum(t.nbytes for t in state.values()) == 2 * size + 8 * -(-size // BLOCK_8BIT)


def test_eight_bit_adam_stays_near_adam() -> None:
    torch.manual_seed(0)
    exact, small = (
        torch.nn.Parameter(torch.randn(64, 128, generator=torch.manual_seed(0))) for _ in range(2)
    )
    optimizers = [torch.optim.AdamW([exact], lr=1e-2), AdamW8bit([small], lr=1e-2)]
    start = exact.detach().clone()
    for _ in range(100):
        scale = torch.logspace(-1, 0, 128)  # columns of different size
        noise = 0.1 * torch.randn(64, 128)
        exact.grad = (exact.detach() + noise) * scale
        small.grad = (small.detach() + noise) * scale
        for optimizer in optimizers:
            optimizer.step()
    moved = (exact - start).norm()
    assert (exact - small).norm() < 0.1 * moved


def test_second_moments_in_eight_bits_are_rounded_to_the_nearest_and_never_to_zero() -> None:
    """Rounded up, they make every update of a small value smaller: training falls behind."""
    moments = torch.logspace(-14, 0, 16 * BLOCK_8BIT).view(BLOCK_8BIT, 16).T.contiguous()  # all sizes a block
    codes = torch.empty(moments.numel(), dtype=torch.uint8)
    scale = torch.empty(16)
    _to_bytes(moments.clone(), codes, scale, signed=False)
    back = _from_bytes(codes, scale, signed=False)
    assert (back > 0).all()
    levels = (moments / moments.amax(1, keepdim=True)) ** 0.25 * 255
    assert (codes.view(16, -1).float() - levels).abs()[levels > 1].max() <= 0.5001
    assert ((back / moments)[levels > 10].mean() - 1).abs() < 0.01


def test_small_tensors_are_updated_as_by_adamw() -> None:
    exact, other = (torch.nn.Parameter(torch.linspace(-1, 1, 100)) for _ in range(2))
    optimizers = [torch.optim.AdamW([exact], lr=1e-2), AdamW8bit([other], lr=1e-2)]
    for _ in range(5):
        exact.grad = other.grad = torch.cos(exact.detach())
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(exact, other)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"world_size": 4, "zero_stage": 3}, "zero_stage"),
        ({"world_size": 2, "tensor_parallel": 2}, "tensor_parallel"),
        ({"world_size": 2}, "world_size"),
        ({"offload": ("optimizer_states:cpu",)}, "offload"),
    ],
)
def test_what_one_process_can_not_run_is_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(RecipeError, match=f"so {what} can't be run here"):
        workload(SMALL, Recipe(**fields))


def test_autocast_and_fused_are_refused_on_the_meta_device() -> None:
    with pytest.raises(RecipeError, match="no autocast for the meta device"):
        workload(SMALL, Recipe(precision="amp-bf16"), "meta")
    with pytest.raises(RecipeError, match="no fused optimizers"):
        workload(SMALL, Recipe(precision="fp32", optimizer_impl="fused"), "meta")
