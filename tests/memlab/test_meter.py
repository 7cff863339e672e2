from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from memlab.meter import Meter, profiled, torch_size
from tests.memlab import witness

torch.set_num_threads(1)


class Mlp(nn.Module):
    def __init__(self, width: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))
        if tied:
            self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


def mlp_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], Any]:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_mlp(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp(**options)
    return model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(32, 64)


WEIGHTS = 4 * 2 * (64 * 64 + 64)
BUFFER = 4 * 64


@pytest.mark.parametrize("inside", [False, True], ids=["made before", "made inside"])
@pytest.mark.parametrize("named", [False, True], ids=["found", "named"])
def test_the_five_consumers_of_a_step_are_exact(inside: bool, named: bool) -> None:
    if inside:
        with Meter() as meter:
            step = mlp_step(*make_mlp())
            step()
            step()
    else:
        model, optimizer, x = make_mlp()
        step = mlp_step(model, optimizer, x)
        with Meter(*((model, optimizer) if named else ())) as meter:
            step()
            step()
    trace = meter.trace
    trace.validate()
    step_trace = trace.last_step()
    own = step_trace.consumer_peaks()
    assert own["parameters"] == WEIGHTS + BUFFER
    assert own["gradients"] == WEIGHTS
    assert own["optimizer_states"] == 2 * WEIGHTS + 4 * 4  # and a step counter each
    # x, relu's output, and the result, which the square keeps; scale has no gradient: its factor isn't kept
    kept = 4 * 32 * 64
    assert own["activations"] == 3 * kept + 2 * 4  # the loss, and the gradient that backward starts from
    assert own["temporaries"] >= WEIGHTS  # foreach: one copy of all parameters
    assert set(step_trace.phase_peaks()) == {"setup", "forward", "backward", "optimizer"}
    assert len(trace.steps) == 3


def test_blocks_know_module_operator_phase_and_line() -> None:
    model, optimizer, x = make_mlp()
    with Meter(model, optimizer, lines=True) as meter:
        mlp_step(model, optimizer, x)()
    blocks = list(meter.trace.blocks())
    (relu,) = [b for b in blocks if b.operator == "aten.relu"]
    assert (relu.module, relu.phase, relu.shape, relu.dtype) == ("Mlp", "forward", (32, 64), "float32")
    assert relu.line.startswith("test_meter.py:")
    gradients = [(b.module, b.bytes) for b in blocks if b.consumer == "gradients"]
    assert sorted(gradients) == [(name, 4 * n) for name in ("down", "up") for n in (64, 64 * 64)]
    backward = [b for b in blocks if b.operator == "aten.threshold_backward"]
    assert [b.module for b in backward] == ["Mlp"]
    assert backward[0].line == relu.line


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU"))])  # fmt: skip
def test_cuda_figures_stand_beside_the_trace(device: str) -> None:
    with Meter(device=device) as meter:
        held = torch.ones(1000, device=device)
    assert meter.trace.end_bytes == held.nbytes
    assert ("cuda" in meter.trace.info) == (device == "cuda")
    if device == "cuda":
        assert meter.trace.info["cuda"]["allocated_peak_bytes"] >= held.nbytes


# totals against other witnesses


def transformer(attention: bool = True) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 32, 64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return model, torch.randn(8, 3, 32, 32)


def second_step_peaks(make: Callable[[], tuple[nn.Module, torch.Tensor]], autocast: bool) -> tuple[int, int]:
    """Peak of the second step: by the meter, and by the allocator's log on top of what was alive before."""
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with Meter(model, optimizer) as meter:
        step()
        optimizer.zero_grad()
        base = meter.live_bytes
        log = profiled(step)
    return meter.trace.last_step().peak_bytes, base + log.peak_bytes


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp"])
def test_total_equals_the_allocators_log_but_for_scratch(autocast: bool) -> None:
    metered, logged = second_step_peaks(transformer, autocast)
    assert 0 <= logged - metered <= (64 if not autocast else 2**20)  # 4-byte scalars; oneDNN's bf16 scratch


def test_convolutions_take_scratch_that_only_the_allocator_sees() -> None:
    metered, logged = second_step_peaks(convolutions, autocast=False)
    assert 0 <= logged - metered < 0.1 * metered


def test_negative_control_the_log_sees_a_block_that_is_hidden_from_the_meter() -> None:
    """The comparison can fail: one hidden megabyte is found."""
    with Meter() as meter:
        kept = torch.ones(10)
        base = meter.live_bytes

        def step() -> torch.Tensor:
            with _disable_current_modes():
                return torch.ones(2**18)

        log = profiled(step)
    assert base + log.peak_bytes - meter.trace.peak_bytes == 2**20
    assert kept is not None


def test_equals_torchs_own_memtracker() -> None:
    model, optimizer, x = make_mlp()
    step = mlp_step(model, optimizer, x)
    with Meter(model, optimizer) as meter:
        step()
        kept = step()
    del kept
    assert witness.memtracker_peak(step, model, optimizer, x) == meter.trace.last_step().peak_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_of_the_process_agrees() -> None:
    result = witness.resident_peak("""
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from memlab.meter import Meter
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(4096, 512)
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
step()
with Meter(model, optimizer) as meter:
    step()
    optimizer.zero_grad()
    reset(); base, live = now(), meter.live_bytes
    step()
print(json.dumps({'meter': meter.trace.last_step().peak_bytes - live, 'system': high() - base}))
""")
    assert result["meter"] > 60 * 2**20
    assert abs(result["system"] - result["meter"]) < 0.05 * result["meter"]


# what counts and what doesn't


def live_after(make: Callable[[], Any]) -> int:
    with Meter() as meter:
        kept = make()
    del kept
    return meter.trace.end_bytes


def test_views_slices_and_expansions_cost_nothing() -> None:
    assert live_after(lambda: torch.ones(1000, 1000)[:, :10]) == 4_000_000
    assert live_after(lambda: torch.ones(1000).expand(50, 1000)) == 4000
    assert live_after(lambda: [torch.ones(10)] * 3) == 40
    assert live_after(lambda: torch.ones(10).view(2, 5).T.unsqueeze(0)) == 40


def test_in_place_operators_and_out_arguments() -> None:
    assert live_after(lambda: torch.ones(1000).add_(1).mul_(2)) == 4000
    x = torch.ones(1000)
    with Meter() as meter:
        torch.add(x, 1, out=x)
        grown = torch.empty(0)
        torch.add(x, 1, out=grown)
    assert meter.trace.end_bytes == 8000


def test_resizing_a_storage_and_a_tensor() -> None:
    with Meter() as meter:
        x = torch.ones(1000)
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(4000)
        assert meter.live_bytes == 4000
        x.resize_(3000)
        assert meter.live_bytes == 12_000
    trace = meter.trace
    trace.validate()
    assert trace.peak_bytes == 16_000  # the new memory is taken before the old is given back
    assert trace.end_bytes == 12_000


def test_a_storage_that_comes_back_is_where_it_was() -> None:
    """Fake storages say that they are on the meta device; what was shrunk to nothing is still known."""
    with FakeTensorMode(), Meter() as meter:
        x = torch.ones(1000, device="cuda")
        storage = x.untyped_storage()
        storage.resize_(0)
        storage.resize_(4000)
        assert storage.device.type == "meta"
        kept = torch.ones(10)
    assert (meter.trace_of("cuda").end_bytes, meter.trace_of("cpu").end_bytes) == (4000, 40)
    assert kept is not None


class Pair(torch.Tensor):
    """A wrapper: two tensors that are one to the outside."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Pair:
        pair: Pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)
        pair.parts = (left, right)
        return pair

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [func(*(a.parts[i] if isinstance(a, Pair) else a for a in args)) for i in range(2)]
        return Pair(*parts)


def test_wrappers_have_no_memory_their_parts_do() -> None:
    with Meter() as meter:
        pair = Pair(torch.ones(100), torch.ones(100))
        pair = pair + 1
        assert isinstance(pair, Pair)
    assert meter.trace.end_bytes == 800
    assert meter.trace.peak_bytes == 1600


def test_set_data_and_set_change_who_holds_the_storage() -> None:
    with Meter() as meter:
        x = torch.ones(1000)
        x.data = torch.ones(10)
        assert meter.live_bytes == 40
        y = torch.ones(500)
        x.set_(y.untyped_storage(), 0, (500,), (1,))
        assert meter.live_bytes == 2000
        del y
        assert meter.live_bytes == 2000
        del x
        assert meter.live_bytes == 0


def test_numpy_memory_counts_once() -> None:
    array = np.ones(1000, dtype=np.float32)
    with Meter() as meter:
        x = torch.from_numpy(array)
        y = x + 1
    assert meter.trace.end_bytes == x.nbytes + y.nbytes
    assert live_after(lambda: torch.tensor([1.0, 2.0])) == 8


def test_tied_weights_count_once() -> None:
    model, optimizer, x = make_mlp(tied=True)
    with Meter() as meter:
        mlp_step(model, optimizer, x)()
    own = meter.trace.consumer_peaks()
    tied = 4 * (64 * 64 + 2 * 64)
    assert (own["parameters"], own["gradients"]) == (tied + BUFFER, tied)


def test_memory_made_in_another_thread_is_found_at_its_use_and_said() -> None:
    found: list[torch.Tensor] = []
    model, optimizer, x = make_mlp()
    step = mlp_step(model, optimizer, x)
    with Meter() as meter:
        step()
        worker = threading.Thread(target=lambda: found.append(torch.ones(2**18)))
        worker.start()
        worker.join()
        kept = found[0] + 1
        step()
    assert any("1.00 MiB" in text for text in meter.trace.caveats)
    assert meter.trace.end_bytes >= 2 * 2**20
    del kept


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.integers(1, 50)), max_size=40))
def test_any_sequence_of_operators_against_a_count_of_storages(actions: list[tuple[int, int, int]]) -> None:
    tensors: list[torch.Tensor] = []

    def storages() -> int:
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    highest = 0
    with Meter() as meter:
        for what, index, size in actions:
            chosen = tensors[index % len(tensors)] if tensors else None
            if what in (0, 1) or chosen is None:
                tensors.append(torch.zeros(size))
            elif what == 2:
                tensors.append(chosen[: max(1, chosen.numel() // 2)])
            elif what == 3:
                chosen.add_(1)
            elif what == 4:
                tensors.append(chosen + 1)
            elif what == 5:
                tensors.append(chosen.detach().view(-1))
            else:
                tensors.pop(index % len(tensors))
            del chosen
            assert meter.live_bytes == storages()
            highest = max(highest, storages())
    meter.trace.validate()
    assert (meter.trace.end_bytes, meter.trace.peak_bytes) == (storages(), highest)


# phases and consumers


def test_a_step_without_modules_or_optimizer_is_found_too() -> None:
    with Meter() as meter:
        w = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(32, 64)
        for _ in range(2):
            (x @ w).relu().sum().backward()
            with meter.phase("optimizer"):
                with torch.no_grad():
                    w -= 0.1 * w.grad
                w.grad = None
    step = meter.trace.last_step()
    own = step.consumer_peaks()
    assert (own["parameters"], own["gradients"]) == (64 * 64 * 4, 64 * 64 * 4)
    assert list(step.phase_peaks()) == ["setup", "forward", "backward", "optimizer"]
    assert own["activations"] == 32 * 64 * 4 * 2 + 2 * 4  # x, relu's output; the product was let go


def test_states_of_an_optimizer_written_by_hand() -> None:
    w = torch.randn(100, requires_grad=True)
    with Meter() as meter:
        (w * 2).sum().backward()
        with meter.phase("optimizer"):
            moment = torch.zeros_like(w)
            scratch = moment + 1
            del scratch
    blocks = {b.operator: b.consumer for b in meter.trace.blocks() if b.phase == "optimizer"}
    assert blocks == {"aten.zeros_like": "optimizer_states", "aten.add": "temporaries"}
    assert moment is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_less_and_recomputes_activations(reentrant: bool) -> None:
    def peaks(use: bool) -> dict[str, int]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
        x = torch.randn(256, 64, requires_grad=True)
        with Meter(layers) as meter:
            for _ in range(2):
                y = x
                for layer in layers:
                    y = checkpoint(layer, y, use_reentrant=reentrant) if use else layer(y)
                y.sum().backward()
                with meter.phase("optimizer"):
                    for p in layers.parameters():
                        p.grad = None
        recomputed = [
            b for b in meter.trace.blocks() if b.phase == "backward" and b.consumer == "activations"
        ]
        assert bool(recomputed) == use
        return meter.trace.last_step().consumer_peaks()

    plain, saved = peaks(False), peaks(True)
    layer = 256 * 64 * 4
    assert plain["activations"] - saved["activations"] < layer  # Linear keeps its input, Tanh its output
    assert plain["gradients"] <= saved["gradients"] <= plain["gradients"] + layer


def test_accumulation_goes_forward_again_within_one_step() -> None:
    model, optimizer, x = make_mlp()
    with Meter(model, optimizer) as meter:
        for _ in range(2):
            for _ in range(3):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(meter.trace.steps) == 3
    step = meter.trace.last_step()
    assert [p for _, _, p in step.spans() if p != "setup"] == ["forward", "backward"] * 3 + ["optimizer"]
    assert step.consumer_peaks()["gradients"] == WEIGHTS


def test_two_optimizers_one_after_the_other_end_one_step() -> None:
    model, _, x = make_mlp()
    first = torch.optim.SGD(model.up.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model.down.parameters())
    with Meter() as meter:
        for _ in range(2):
            model(x).square().mean().backward()
            first.step()
            second.step()
    assert len(meter.trace.steps) == 3
    assert meter.trace.last_step().consumer_peaks()["optimizer_states"] == 3 * WEIGHTS // 2 + 2 * 4


def test_autocasts_weight_copies_are_activations_if_the_backward_needs_them() -> None:
    model, optimizer, x = make_mlp()
    with Meter(model, optimizer) as meter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    copies = {
        b.module: b.consumer
        for b in meter.trace.blocks()
        if (b.operator, b.shape, b.dtype, b.phase) == ("aten._to_copy", (64, 64), "bfloat16", "forward")
    }
    # The batch needs no gradient, so nothing asks for the first layer's weight again.
    assert copies == {"up": "temporaries", "down": "activations"}


def test_inference_keeps_nothing_but_its_output() -> None:
    model, _, x = make_mlp()
    with Meter(model) as meter, torch.no_grad():
        y = model(x)
    assert meter.trace.consumers_at_peak()["gradients"] == 0
    assert meter.trace.end_bytes == WEIGHTS + BUFFER + x.nbytes + y.nbytes


def test_meta_tensors_count_as_if_they_had_memory() -> None:
    with torch.device("meta"):
        model = Mlp()
        x = torch.empty(8, 64)
        with Meter(model) as meter:
            y = model(x)
    assert meter.trace.consumer_peaks()["parameters"] == WEIGHTS + BUFFER
    assert y.is_meta


# the budget


def test_budget_raises_in_pytorchs_form_and_leaves_all_clean() -> None:
    model, optimizer, x = make_mlp()
    step = mlp_step(model, optimizer, x)
    with Meter(model, optimizer) as free:
        step()
        step()
    need = free.trace.last_step().peak_bytes
    with Meter(model, optimizer, budget=need) as meter:
        step()
    assert meter.trace.peak_bytes <= need
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"^out of memory. Tried to allocate \d") as caught,
        Meter(model, optimizer, budget=need - 1) as meter,
    ):
        step()
    assert "The budget has a total capacity of" in str(caught.value)
    assert "(optimizer)" in str(caught.value)
    assert_clean(meter)
    step()  # everything still works


def test_budget_refuses_before_the_operator_runs_when_it_can() -> None:
    huge = 2**50
    for call in (lambda: torch.empty(huge), lambda: torch.zeros(huge // 2, 2), lambda: torch.randn(huge)):
        with (
            pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 41"),
            Meter(budget=2**20) as meter,
        ):
            call()
        assert meter.trace.peak_bytes == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1.00 MiB"), Meter(budget=2**20):
        torch.ones(2**17).new_empty(2**18)


def test_budget_counts_the_metered_device_only() -> None:
    """Main memory beside it: neither refused before an operator, nor counted after it, nor at a resize."""
    with Meter(budget=2**20, device="meta") as meter:
        kept = [torch.ones(2**20), torch.ones(2**20) + 1]
        kept[0].untyped_storage().resize_(2**23)
        kept.append(torch.ones(2**18, device="meta"))
        assert meter.live_bytes == 2**20
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1, device="meta")
    assert meter.trace_of("cpu").end_bytes == 2**23 + 2**22


def test_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        Meter(budget=0)


def test_sizes_as_pytorch_writes_them() -> None:
    assert [torch_size(n) for n in (10, 2048, 3 * 2**20, 5 * 2**29)] == [
        "10 bytes", "2.00 KiB", "3.00 MiB", "2.50 GiB",
    ]  # fmt: skip


# nothing is left behind


def assert_clean(meter: Meter) -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert not module._global_forward_hooks and not module._global_forward_pre_hooks
    assert not module._global_forward_hooks_always_called
    assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in torch.UntypedStorage.__dict__
    assert not meter._alive and meter._model is None


class Broken(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up(x)
        raise RuntimeError("on purpose")


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward", "optimizer"])
def test_leaves_no_patch_no_hook_no_reference(where: str) -> None:
    model = Broken() if where == "forward" else Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 64)
    if where == "optimizer":
        optimizer.param_groups[0]["lr"] = "no number"

    meter = Meter()
    try:
        with meter:
            y = model(x)
            if where == "backward":
                y.register_hook(lambda grad: 1 / 0)
            y.sum().backward()
            optimizer.step()
    except Exception:
        assert where != "nowhere"
    else:
        assert where == "nowhere"
    assert_clean(meter)
    gone = weakref.ref(model), weakref.ref(optimizer)
    y = None
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    meter.trace.validate()
    with pytest.raises(RuntimeError, match="measures once"), meter:
        pass


def test_model_let_go_inside_is_seen_to_go() -> None:
    with Meter() as meter:
        model, optimizer, x = make_mlp()
        mlp_step(model, optimizer, x)()
        del model, optimizer, x
        gc.collect()
    assert meter.trace.end_bytes == 0


def test_the_numbers_that_come_out_don_t_change() -> None:
    def weights(metered: bool) -> list[torch.Tensor]:
        model, optimizer, x = make_mlp()
        step = mlp_step(model, optimizer, x)
        if metered:
            with Meter():
                step()
        else:
            step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_the_trace_can_be_read_while_metering() -> None:
    with Meter() as meter:
        x = torch.ones(100)
        assert meter.trace.end_bytes == 400
        y = F.relu(x)
        assert meter.trace.end_bytes == 800
    assert meter.trace.peak_bytes == x.nbytes + y.nbytes


def test_an_unknown_phase_is_refused() -> None:
    with Meter() as meter, pytest.raises(ValueError, match="did you mean forward"):
        meter.phase("foreward")
