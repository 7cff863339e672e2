from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memlab import hardware
from memlab.meter import Meter
from memlab.sharded import fake_process_group
from memlab.trace import Trace
from memlab.virtual import VirtualGPU, device
from tests.memlab.test_meter import assert_clean, convolutions, transformer

torch.set_num_threads(1)


def steps(make: Callable[[], tuple[nn.Module, torch.Tensor]], autocast: bool, **options: Any) -> None:
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()


def allocations(trace: Trace) -> list[tuple[int, int, str]]:
    """(live bytes before, size, consumer) of each allocation. autocast frees its copies in no fixed order."""
    live, found = 0, []
    for event in trace.events:
        if event >= 0:
            block = trace.block(event)
            found.append((live, block.bytes, block.consumer))
            live += block.bytes
        else:
            live -= trace.sizes[~event]
    return found


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "amp"])
@pytest.mark.parametrize("make", [transformer, convolutions])
def test_fake_step_equals_the_real_one_event_by_event(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], autocast: bool, options: dict[str, bool]
) -> None:
    with Meter() as meter:
        steps(make, autocast, **options)
    with VirtualGPU() as gpu:
        steps(make, autocast, **options)
    assert gpu.trace.peak_bytes == meter.trace.peak_bytes
    assert gpu.trace.last_step().phase_peaks() == meter.trace.last_step().phase_peaks()
    assert allocations(gpu.trace) == allocations(meter.trace)


def test_negative_control_another_batch_gives_another_trace() -> None:
    def smaller() -> tuple[nn.Module, torch.Tensor]:
        model, x = transformer()
        return model, x[:3]

    with Meter() as meter:
        steps(transformer, False)
    with VirtualGPU() as gpu:
        steps(smaller, False)
    assert gpu.trace.last_step().peak_bytes < meter.trace.last_step().peak_bytes


def test_takes_no_memory() -> None:
    with VirtualGPU() as gpu:
        model = nn.Linear(2**20, 2**18, device=device())  # 1 TiB
        model(torch.ones(4, 2**20)).sum().backward()
    assert gpu.trace.consumer_peaks()["gradients"] == 4 * (2**38 + 2**18)


def test_device_is_the_cpu_inside() -> None:
    assert device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    with VirtualGPU("T4"):
        assert device().type == "cpu"
        with VirtualGPU("A100-80GB") as inner:
            assert inner.gpu is hardware.gpu("A100-80GB")
        assert device().type == "cpu"
    assert device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_card_that_is_too_small_says_so_in_cudas_words_and_leaves_all_clean() -> None:
    card = hardware.gpu("T4")
    layers = card.memory_bytes // 2**30 + 1
    with (
        pytest.raises(
            torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 1024\.00 M"
        ) as e,
        VirtualGPU("t4") as gpu,
    ):
        kept = [nn.Linear(2**14, 2**14, bias=False) for _ in range(layers)]
    assert "GPU 0 has a total capacity of" in str(e.value)
    assert "aten.empty" in str(e.value)
    assert len(gpu.trace.at_peak()) == layers - 1
    assert_clean(gpu._meter)
    assert type(torch.ones(1)) is torch.Tensor
    with VirtualGPU("t4", limit=2**40):
        kept = [nn.Linear(2**14, 2**14, bias=False) for _ in range(layers)]
    assert len(kept) == layers


@pytest.mark.parametrize("what", ["model", "batch"])
def test_a_real_tensor_inside_is_refused_in_one_line(what: str) -> None:
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with (
        pytest.raises(RuntimeError, match=r"a real tensor of shape .* make the model, the batch") as caught,
        VirtualGPU(),
    ):
        if what == "model":
            model(torch.ones(2, 3))
        else:
            nn.Linear(3, 3)(x)
    assert "\n" not in str(caught.value)
    assert torch.isfinite(model(x)).all()


def test_an_unknown_card_is_refused_with_near_ones() -> None:
    with pytest.raises(ValueError, match="A100-80GB"):
        VirtualGPU("A100-90GB")


@pytest.mark.parametrize("card", [None, "T4"])
def test_the_host_is_no_part_of_the_card(card: str | None) -> None:
    """What lies in main memory is in a trace of its own and counts against no limit, resized or not."""
    with VirtualGPU(card, limit=200 * 2**20) as gpu:
        with gpu.host():
            waits = torch.empty(2**26)
            waits.untyped_storage().resize_(2**29)
        also = torch.empty(2**26, device="meta")
        kept = torch.ones(1000)
        assert gpu.live_bytes == kept.nbytes
        if card is not None:
            assert torch.cuda.memory_allocated() == 4096
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**26)
    assert gpu.trace_of("card").peak_bytes == 4000
    assert gpu.trace_of("host").end_bytes == 2**29 + also.nbytes
    gpu.trace_of("host").validate()
    with pytest.raises(ValueError, match="host"):
        gpu.trace_of("hosts")


@pytest.mark.parametrize("card", [None, "A100-80GB"])
def test_waiting_for_a_collective_takes_nothing(card: str | None) -> None:
    import torch.distributed._functional_collectives as collectives

    with fake_process_group(2), VirtualGPU(card) as gpu:
        kept = torch.ones(1000)
        total = collectives.all_reduce(kept, "sum", [0, 1])
        assert gpu.live_bytes == kept.nbytes + total.nbytes


def test_phases_can_be_marked_by_hand() -> None:
    with VirtualGPU() as gpu:
        w = torch.zeros(10, requires_grad=True)
        w.sum().backward()
        with gpu.phase("optimizer"):
            moment = torch.zeros_like(w)
    assert gpu.trace.consumer_peaks()["optimizer_states"] == moment.nbytes
