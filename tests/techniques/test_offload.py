"""Offload against the plain step: bytes that leave, bytes that move, the same numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memlab.hardware import link
from memlab.meter import Meter
from memlab.techniques.offload import (
    DiskOptimizer,
    HostOptimizer,
    HostParameters,
    moved,
    offload_saved,
    seconds,
    torch_fsdp_offload,
    torch_offload_saved,
    touches,
)
from memlab.virtual import VirtualGPU

from ..memlab.witness import resident_peak
from .awkward import batches, loss_of, make, train

LAYERS, BATCH, WIDTH = 8, 512, 256
UNIT = BATCH * WIDTH * 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


# Equal to the plain step

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "saved to the host": lambda m: (adam(m.parameters()), offload_saved(m, "host", minimum=0)),
    "saved to disk": lambda m: (adam(m.parameters()), offload_saved(m, "disk", minimum=0)),
    "saved, torch's own": lambda m: (adam(m.parameters()), torch_offload_saved()),
    "states on the host": lambda m: (HostOptimizer(m.parameters(), adam), nullcontext()),
    "states on disk": lambda m: (DiskOptimizer(m.parameters(), adam), nullcontext()),
    "parameters on the host": lambda m: (HostParameters(m.blocks), nullcontext()),
}


@pytest.mark.parametrize("way", WAYS)
def test_five_steps_equal_the_plain_ones(way: str) -> None:
    plain = make()
    expected = train(plain, batches(5))
    model = make()
    optimizer, context = WAYS[way](model)
    if isinstance(optimizer, HostParameters):
        optimizer = adam(model.parameters())
    losses = []
    for number, batch in enumerate(batches(5)):
        torch.manual_seed(2 + number)
        optimizer.zero_grad()
        with context:
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


# Saved tensors


def forward_and_backward(meter: Any, how: str, minimum: int = 64 * 1024) -> tuple[int, int, Any]:
    """Bytes that the forward leaves on the device, the bytes at the end, and the context."""
    model = chain()
    x = torch.ones(BATCH, WIDTH)
    context: Any = nullcontext()
    if how == "torch":
        context = torch_offload_saved()
    elif how != "plain":
        context = offload_saved(model, how, minimum=minimum)
    before = meter.live_bytes
    with context:
        loss = model(x).sum()
    after = meter.live_bytes
    loss.backward()
    return after - before - 4, meter.live_bytes, context


@pytest.mark.parametrize("where", ["host", "disk"])
def test_saved_tensors_leave_and_come_back_once(where: str) -> None:
    """Layers + 1 activations are saved: the input, which the caller holds, and each ReLU's output."""
    with Meter() as plain:
        left, end, _ = forward_and_backward(plain, "plain")
    with Meter() as meter:
        left_now, end_now, offload = forward_and_backward(meter, where)
    assert left == LAYERS * UNIT  # the last output is saved by its ReLU, though nobody reads it
    assert left_now == 0
    assert end_now == end
    assert offload.out == offload.back == (LAYERS + 1) * UNIT
    peaks = [m.trace.phase_peaks()["forward"] for m in (plain, meter)]
    assert peaks[0] - peaks[1] == (LAYERS - 1) * UNIT  # one layer's input stays while it computes


def test_controls_that_must_save_nothing() -> None:
    """A minimum above every tensor, and torch's save_on_cpu where the tensors are on the CPU already."""
    for how, minimum in (("host", UNIT + 1), ("torch", 0)):
        with Meter() as meter:
            left, _, context = forward_and_backward(meter, how, minimum)
        assert left == LAYERS * UNIT
        if how == "host":
            assert context.out == context.back == 0


@pytest.mark.parametrize("where", ["host", "disk"])
def test_on_a_virtual_gpu(where: str) -> None:
    """The host is the 'meta' device there: it has what the device lost."""
    with VirtualGPU() as gpu:
        _, _, offload = forward_and_backward(gpu, where)
    assert offload.out == offload.back == (LAYERS + 1) * UNIT
    host = gpu.trace_of("host").peak_bytes
    assert host == (offload.out if where == "host" else 0)
    with Meter() as meter:
        forward_and_backward(meter, where)
    device = gpu.trace_of("card").phase_peaks()["forward"]
    assert device == meter.trace.phase_peaks()["forward"]


def test_views_of_one_storage_move_once_and_parameters_never() -> None:
    layer = nn.Linear(64, 192)
    x = torch.ones(256, 64, requires_grad=True)
    with offload_saved(layer, minimum=0) as away:
        q, k, v = layer(x).chunk(3, dim=-1)
        y = (q * k * v).sum()
    y.backward()
    # x, the storage of q, k and v, and the product of q and k
    assert away.out == away.back == 4 * (256 * 64 + 256 * 192 + 256 * 64)


def test_a_tensor_changed_in_place_moves_again() -> None:
    model = nn.Identity()
    x = torch.ones(4, requires_grad=True)
    with offload_saved(model, minimum=0) as away:
        a = x * 2
        b = a.exp()  # saves its result
        c = (b * b).sum()
        with torch.no_grad():
            a.zero_()  # nobody has saved `a`
        d = b.detach().mul_(1)  # a new version of b's storage
        e = (b * x).sum()
    assert torch.equal(d, b)
    (c + e).backward()
    plain = torch.ones(4, requires_grad=True)
    b = (plain * 2).exp()
    ((b * b).sum() + (b * plain).sum()).backward()
    assert torch.equal(x.grad, plain.grad)
    assert away.out > away._minimum


def test_files_go_with_the_tensors(tmp_path: Path) -> None:
    model = chain()
    with offload_saved(model, "disk", folder=tmp_path):
        loss = model(torch.ones(BATCH, WIDTH)).sum()
    assert len(list(tmp_path.iterdir())) == LAYERS + 1
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) == (LAYERS + 1) * UNIT
    loss.backward(retain_graph=True)
    loss.backward()  # a second time works too
    del loss
    gc.collect()
    assert not list(tmp_path.iterdir())


# Optimizer states and parameters


def two_steps(meter: Any, how: str) -> tuple[Any, int]:
    model = chain()
    numel = sum(p.numel() for p in model.parameters())
    mover: Any = None
    if how == "host":
        mover = optimizer = HostOptimizer(model.parameters(), adam)
    elif how == "disk":
        mover = optimizer = DiskOptimizer(model.parameters(), adam)
    elif how == "parameters":
        mover = HostParameters(model[i] for i in range(0, 2 * LAYERS, 2))
        optimizer = adam(model.parameters())
    else:
        optimizer = adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
    return mover, numel


@pytest.mark.parametrize("how", ["plain", "host", "parameters"])
def test_states_on_the_host_of_a_virtual_gpu(how: str) -> None:
    """Bytes per parameter on the device by consumer; the host has the rest."""
    with VirtualGPU() as gpu:
        mover, numel = two_steps(gpu, how)
    device = gpu.trace_of("card").consumer_peaks()
    expected = {
        "plain": {"parameters": 4, "gradients": 4, "optimizer_states": 8},
        "host": {"parameters": 4, "gradients": 4, "optimizer_states": 0},
        "parameters": {"parameters": 0, "gradients": 0, "optimizer_states": 0},
    }[how]
    for consumer, each in expected.items():
        assert device[consumer] == pytest.approx(each * numel, rel=0.02, abs=200)
    if how == "host":
        assert gpu.trace_of("host").peak_bytes >= 16 * numel  # masters, gradients, moments
        assert {"out": mover.out // 2, "back": mover.back // 2} == moved(numel, "optimizer")
    if how == "parameters":
        most = moved(numel, "parameters")
        assert mover.out // 2 == most["out"]
        # twice all weights, without the biases and the first weight, whose input wants no gradient
        spared = 4 * (LAYERS * WIDTH + WIDTH * WIDTH)
        assert mover.back // 2 == most["back"] - spared


def test_states_on_disk_are_here_one_parameter_at_a_time(tmp_path: Path) -> None:
    with Meter() as plain:
        two_steps(plain, "plain")
    with Meter() as meter:
        mover, numel = two_steps(meter, "disk")
    largest = WIDTH * WIDTH * 4
    assert plain.trace.consumer_peaks()["optimizer_states"] == pytest.approx(8 * numel, rel=0.02)
    assert meter.trace.consumer_peaks()["optimizer_states"] == pytest.approx(2 * largest, rel=0.02)
    assert meter.trace.peak_bytes < 0.65 * plain.trace.peak_bytes
    assert mover.out == 2 * moved(numel, "states")["out"]
    assert mover.back == moved(numel, "states")["back"]  # the first step has none to fetch
    folder = Path(mover._temporary.name)
    assert sum(f.stat().st_size for f in folder.iterdir()) == 8 * numel


def test_16_bit_parameters_keep_fp32_masters_on_the_host() -> None:
    """2 B down and 2 B up per parameter; a small step isn't lost in rounding."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    optimizer = HostOptimizer(layer.parameters(), lambda p: torch.optim.SGD(p, lr=1e-3, foreach=False))
    lost = layer.weight.detach().clone()
    for _ in range(10):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        lost -= 1e-3
    assert {"out": optimizer.out // 10, "back": optimizer.back // 10} == moved(
        64 * 64, "optimizer", parameter=2, gradient=2
    )
    assert layer.weight[0, 0].item() == pytest.approx(0.99, abs=0.004)
    assert lost[0, 0].item() == 1.0  # the plain bf16 step: 1 - 0.001 rounds to 1


def test_fsdp_s_policy_runs_on_one_rank() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plain = make()
    expected = train(plain, batches(3))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = make()
        torch_fsdp_offload(model, model.blocks)
        assert train(model, batches(3)) == pytest.approx(expected, rel=1e-5)
    finally:
        dist.destroy_process_group()


# Closed forms


def test_seconds_over_a_link() -> None:
    """70 billion parameters' fp32 gradients down and weights up, by PCIe 4: 9 s each way."""
    way = moved(70 * 10**9, "optimizer")
    assert seconds(way["out"], link("pcie4").bandwidth) == pytest.approx(8.9, abs=0.1)
    with pytest.raises(ValueError, match="positive number of bytes per second"):
        seconds(1, 0)


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_optimizer_states_are_touched_least(parameters: int, accumulation: int) -> None:
    by_touch = touches(accumulation)
    assert list(by_touch) == ["optimizer_states", "gradients", "parameters", "activations"]
    assert by_touch["optimizer_states"] == min(by_touch.values()) == 1
    assert by_touch["gradients"] <= by_touch["parameters"]
    way = moved(parameters, "parameters", accumulation=accumulation)
    assert way["back"] == 2 * way["out"] == 8 * parameters * accumulation


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"unknown place to offload to 'dsk': did you mean disk\?"):
        offload_saved(nn.Identity(), "dsk")
    with pytest.raises(ValueError, match="unknown offload 'everything'"):
        moved(1, "everything")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
def test_resident_memory_agrees() -> None:
    """After the forward: all units plain; none with files; with a host buffer, on a CPU, all of them."""
    program = """
import sys, torch
from torch import nn
from memlab.techniques.offload import offload_saved
torch.set_num_threads(1)
layers, unit = 8, 2**20
result = {}
for where in ("plain", "host", "disk"):
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(256, 256), nn.ReLU())))
    x = torch.ones(1024, 256)
    for turn in ("warm", "measured"):
        loss = None
        before = now()
        if where == "plain":
            loss = model(x).sum()
        else:
            with offload_saved(model, where):
                loss = model(x).sum()
        result[where] = now() - before
        loss.backward()
        model.zero_grad(set_to_none=False)
print(json.dumps(result))
"""
    unit = 2**20
    left = resident_peak(program)
    assert left["plain"] == pytest.approx(LAYERS * unit, rel=0.1)
    assert left["host"] == pytest.approx((LAYERS + 1) * unit, rel=0.1)
    assert left["disk"] < unit
