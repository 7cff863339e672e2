"""Mixed precision: each part equals PyTorch's own, and saves and loses what its docstring says."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from memlab.meter import Meter
from memlab.step import valueless_reads
from memlab.techniques import precision as pr
from memlab.techniques.attention import eager
from memlab.units import UnknownNameError
from memlab.virtual import VirtualGPU
from tests.techniques.awkward import Batch, batches, differences, loss_of, make, train

SGD = partial(torch.optim.SGD, lr=0.1, foreach=False)


def steps(model: nn.Module, data: list[Batch], optimizer=None, **more) -> list[float]:
    """`pr.step` on each batch, with the dropout of `train`."""
    optimizer = optimizer or SGD(model.parameters())
    losses = []
    for i, batch in enumerate(data):
        torch.manual_seed(2 + i)
        losses.append(pr.step(partial(loss_of, model, batch), optimizer, **more).item())
    return losses


# -- autocast ------------------------------------------------------------------------------------------------


def test_a_step_without_levers_is_the_plain_step():
    plain, other = make(), make()
    assert train(plain, batches(4), SGD(plain.parameters())) == steps(other, batches(4))
    assert differences(plain, other) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_from_scratch_is_torchs_bitwise(dtype):
    models = {"torch": make(), "scratch": make()}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, batch in enumerate(batches(4)):
            torch.manual_seed(i)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype) if name == "torch" else pr.Autocast(dtype):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
    assert differences(*models.values()) == {}
    assert all(p.dtype == torch.float32 for p in models["scratch"].parameters())


def test_bf16_follows_fp32_and_is_not_it():
    plain, other = make(dropout=0.0), make(dropout=0.0)
    a, b = steps(plain, batches(5)), steps(other, batches(5), dtype=torch.bfloat16)
    assert a != b
    assert a == pytest.approx(b, rel=0.01)


class EagerBlock(nn.Module):
    """BERT's kind of block, whose scores are stored tensors: (B, T, C) -> (B, T, C)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = self.norm1(x + self.out(eager(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def block_bytes(autocast) -> int:
    """What two blocks of BERT-large's shape leave for the backward, without weights, copies and input."""
    with VirtualGPU(None) as gpu:
        model, x = nn.Sequential(*(EagerBlock(1024, 16) for _ in range(2))), torch.randn(2, 256, 1024)
        with autocast or nullcontext():
            y = model(x)
            live = gpu.trace.end_bytes
    assert y.shape == x.shape
    weights = sum(p.numel() * 4 for p in model.parameters())
    return live - weights - x.numel() * 4 - (pr.cast_bytes(model) if autocast else 0)


def test_a_card_saves_less_than_the_cpu_because_its_list_of_fp32_functions_is_longer():
    fp32 = block_bytes(None)
    cpu, cuda = (block_bytes(pr.Autocast(rules=rules)) for rules in ("cpu", "cuda"))
    assert cpu == block_bytes(torch.autocast("cpu", torch.bfloat16))
    assert cpu / fp32 == pytest.approx(0.625, abs=0.01)  # nowhere near a half: residuals and norms are fp32
    assert cuda / fp32 == pytest.approx(0.825, abs=0.01)  # softmax keeps fp32, its product a bf16 copy


@pytest.mark.parametrize("autocast", [lambda: torch.autocast("cpu", torch.bfloat16), pr.Autocast])
@pytest.mark.parametrize("virtual", [False, True])
def test_products_save_half_and_weight_copies_are_the_closed_form(autocast, virtual):
    width, rows, layers = 64, 512, 4
    live = {}
    for cast in (False, True):
        with VirtualGPU(None) if virtual else Meter() as meter:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
            x = torch.randn(rows, width)
            with autocast() if cast else nullcontext():
                y = model(x)
                live[cast] = meter.trace.end_bytes
            y.float().sum().backward()
    weights, unit = layers * width * (width + 1) * 4, rows * width
    assert pr.cast_bytes(model) == weights // 2
    assert live[False] == weights + (1 + layers) * unit * 4
    # the input in fp32 and once more in bf16, outputs in bf16, the copies
    assert live[True] == weights + unit * 4 + (1 + layers) * unit * 2 + pr.cast_bytes(model)


def test_tied_weights_are_cast_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert pr.cast_bytes(model) == 2 * 64
    with pr.Autocast() as autocast:
        model(torch.randn(2, 8))
        assert len(autocast.copies) == 1
    assert not autocast.copies


def test_the_states_do_not_shrink():
    bytes_of = {}
    for dtype in (None, torch.bfloat16):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        with Meter(model, optimizer) as meter:
            pr.step(partial(loss_of, model, batches(1)[0]), optimizer, dtype=dtype)
        peaks = meter.trace.consumer_peaks()
        bytes_of[dtype] = [peaks[c] for c in ("parameters", "gradients", "optimizer_states")]
    assert bytes_of[None] == bytes_of[torch.bfloat16]


def test_an_unknown_list_of_rules():
    with pytest.raises(UnknownNameError, match="did you mean cuda"):
        pr.Autocast(rules="cudaa")


# -- loss scaling --------------------------------------------------------------------------------------------


@given(
    overflows=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
)
def test_the_scaler_is_torchs_step_for_step(overflows, interval, growth, backoff):
    """The same scales, the same skipped steps, the same weights."""
    mine = pr.LossScaler(2.0**8, growth, backoff, interval)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=2.0**8, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    skipped = 0
    for overflow in overflows:
        before = weights[0].detach().clone()
        for scaler, weight in zip((mine, theirs), weights, strict=True):
            optimizer = SGD([weight])
            optimizer.zero_grad()
            factor = math.inf if overflow else 0.01
            scaler.scale((weight * torch.tensor([1.0, factor, 2.0])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert mine.get_scale() == theirs.get_scale()
        assert torch.equal(*weights)
        skipped += overflow
        assert torch.equal(before, weights[0]) is overflow
    assert mine.skipped == skipped


def test_both_scalers_train_the_awkward_model_alike_in_fp16():
    models = [make(), make()]
    scalers = [pr.LossScaler(2.0**20, interval=2), torch.amp.GradScaler("cpu", 2.0**20, growth_interval=2)]
    scales = []
    for model, scaler in zip(models, scalers, strict=True):
        optimizer, seen = SGD(model.parameters()), []
        for i, batch in enumerate(batches(12)):
            torch.manual_seed(i)
            pr.step(
                partial(loss_of, model, batch), optimizer, dtype=torch.float16, scaler=scaler, max_norm=1.0
            )
            seen.append(scaler.get_scale())
        scales.append(seen)
    assert scales[0] == scales[1]
    assert scalers[0].skipped > 0
    assert len(set(scales[0])) > 2
    for model in models:
        model.zero_grad()  # the last step may have been one that was left out
    assert differences(*models) == {}


def test_fp16_loses_small_gradients_without_a_scaler_and_none_with_it():
    def zeros(scaler) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(64, 256)).square().mean() * 1e-3
        (scaler.scale(loss) if scaler else loss).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        return (gradients == 0).float().mean().item()

    assert zeros(None) > 0.05
    assert zeros(pr.LossScaler()) < 1e-4


def test_bf16_needs_no_scaler():
    plain, scaled = make(), make()
    steps(plain, batches(5), dtype=torch.bfloat16)
    steps(scaled, batches(5), dtype=torch.bfloat16, scaler=pr.LossScaler())
    assert differences(plain, scaled) == {}


def test_the_scaler_is_used_in_order():
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = SGD([weight]), pr.LossScaler()
    with pytest.raises(RuntimeError, match="no step to learn from"):
        scaler.update()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="unscaled already"):
        scaler.unscale_(optimizer)
    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    half.sum().backward()
    with pytest.raises(ValueError, match="keep fp32 parameters"):
        pr.LossScaler().unscale_(SGD([half]))
    with pytest.raises(ValueError, match="backoff < 1"):
        pr.LossScaler(backoff=2)


def test_an_fp16_loss_is_scaled_in_fp32():
    loss = torch.tensor(3.0, dtype=torch.float16)
    assert pr.LossScaler().scale(loss).item() == 3 * 2**16


# -- master weights ------------------------------------------------------------------------------------------


def test_master_weights_are_fp32_weights_cast_in_the_forward():
    """The same numbers in another place: fp32 leaves, cast by a differentiable operator."""
    leaves, low = make(), make().bfloat16()
    leaves.load_state_dict(low.state_dict())  # both begin at numbers that bf16 has
    a = torch.optim.AdamW(leaves.parameters(), lr=1e-2, foreach=False)
    b = pr.MasterWeights(low.parameters(), lambda copies: torch.optim.AdamW(copies, lr=1e-2, foreach=False))
    for i, batch in enumerate(batches(6)):
        torch.manual_seed(i)
        a.zero_grad()
        cast = {n: p.bfloat16() for n, p in leaves.named_parameters()}
        logits = functional_call(leaves, cast, batch.tokens)
        F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten()).backward()
        a.step()
        torch.manual_seed(i)
        pr.step(partial(loss_of, low, batch), b)
    for name, p in low.named_parameters():
        expected = dict(leaves.named_parameters())[name]
        assert torch.equal(p, expected.bfloat16()), name
        if p.requires_grad:
            assert torch.equal(b.state[p]["master"], expected), name


def test_without_masters_small_updates_are_lost():
    moved = {}
    for masters in (False, True):
        weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        make_sgd = partial(torch.optim.SGD, lr=1e-3)
        optimizer = pr.MasterWeights([weight], make_sgd) if masters else make_sgd([weight])
        for _ in range(100):
            pr.step(lambda w=weight: -w.sum(), optimizer)
        moved[masters] = weight[0].item()
    assert moved == {False: 1.0, True: pytest.approx(1.1, abs=0.004)}


@pytest.mark.parametrize("virtual", [False, True])
def test_bytes_of_master_weights(virtual):
    with VirtualGPU(None) if virtual else Meter() as meter:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
        optimizer = pr.MasterWeights(
            model.parameters(), lambda copies: torch.optim.AdamW(copies, foreach=False, fused=True)
        )
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        for _ in range(2):
            pr.step(lambda: model(x).sum(), optimizer)
    peaks = meter.trace.last_step().consumer_peaks()
    for consumer, said in pr.master_bytes(4 * 64 * 65).items():
        assert peaks[consumer] == pytest.approx(said, rel=0.02), consumer


# -- stochastic rounding -------------------------------------------------------------------------------------


def test_a_thousand_thousandths():
    plain, rounded = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        plain.add_(0.001)
        pr.stochastic_add_(rounded, torch.full((4096,), 0.001), generator)
    assert set(plain.tolist()) == {1.0}
    assert rounded.float().mean().item() == pytest.approx(2.0, abs=1e-3 * 3)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_rounds_to_a_neighbour_with_the_right_mean(value):
    assume(abs(value) < 3e38)
    x = torch.full((4000,), value)
    generator = torch.Generator().manual_seed(0)
    found = pr.stochastic_round(x, generator)
    assert found.dtype == torch.bfloat16
    values = found.double().unique()
    assert len(values) <= 2
    exact = torch.tensor(value, dtype=torch.float32).double()
    assert values.min() <= exact <= values.max()
    gap = (values.max() - values.min()).item()
    assert abs(found.double().mean().item() - exact.item()) <= 0.04 * gap  # 5 standard deviations


def test_bf16_numbers_infinities_and_nan_stay():
    special = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, 3.3895e38]).bfloat16()
    assert torch.equal(pr.stochastic_round(special.float()), special)
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert pr.stochastic_round(nans).isnan().all()
    with pytest.raises(ValueError, match=r"this is torch\.float16"):
        pr.stochastic_round(torch.ones(1, dtype=torch.float16))


def test_bf16_training_with_small_steps_follows_fp32_only_when_rounded_stochastically():
    def trained(dtype, stochastic=False):
        model = make(dropout=0.0).to(dtype)
        generator = torch.Generator().manual_seed(0)
        batch = batches(1)[0]
        for _ in range(60):
            model.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None and stochastic:
                        pr.stochastic_add_(p, -2e-3 * p.grad.float(), generator)
                    elif p.grad is not None:
                        p.sub_(2e-3 * p.grad)
        return model.norm.weight.float() - 1, loss.item()

    exact, exact_loss = trained(torch.float32)
    plain, plain_loss = trained(torch.bfloat16)
    rounded, rounded_loss = trained(torch.bfloat16, stochastic=True)
    assert plain.abs().max() == 0  # weights of 1.0 do not move at all
    assert exact.abs().max() > 1e-3
    assert abs(rounded_loss - exact_loss) < abs(plain_loss - exact_loss)
    assert rounded.abs().max() > 0


# -- elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [pr.LossScaler, partial(torch.amp.GradScaler, "cpu")])
def test_a_scaled_step_in_the_virtual_gpu(scaler):
    peaks = {}
    for virtual in (False, True):
        with VirtualGPU(None) if virtual else Meter() as meter:
            tokens = torch.zeros(4, 8, dtype=torch.int64)
            model, scale = make(), scaler()
            optimizer = SGD(model.parameters())
            for _ in range(2):
                # torch's scaler reads a number, which a fake tensor hasn't; ours knows
                reads = nullcontext() if isinstance(scale, pr.LossScaler) else valueless_reads()
                with reads:
                    pr.step(
                        partial(loss_of, model, Batch(tokens, tokens)),
                        optimizer,
                        dtype=torch.float16,
                        scaler=scale,
                        max_norm=1.0,
                    )
        peaks[virtual] = meter.trace.peak_bytes
    assert peaks[True] == pytest.approx(peaks[False], rel=0.001)


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(make(), batches(1), dtype=torch.float16, scaler=pr.LossScaler(), max_norm=1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_autocast_from_scratch_is_torchs_on_cuda():
    models = [make(dropout=0.0).cuda(), make(dropout=0.0).cuda()]
    batch = Batch(*(t.cuda() for t in batches(1)[0]))
    for model, autocast in zip(
        models, (torch.autocast("cuda", torch.bfloat16), pr.Autocast(rules="cuda")), strict=True
    ):
        with autocast:
            loss = loss_of(model, batch)
        loss.backward()
    assert differences(*models, tolerance=1e-3) == {}
