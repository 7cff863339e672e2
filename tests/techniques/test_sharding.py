"""ZeRO and tensor parallelism against the plain step: shares to the byte, losses, bytes sent."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # once here, before the ranks are forked, not once in each
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from memlab.meter import Meter
from memlab.sharded import fake_process_group
from memlab.techniques import processes
from memlab.techniques.processes import GlooUnavailable, RankFailed, run
from memlab.techniques.sharding import Traffic, Zero, sent, share, states, torch_fsdp, torch_zero1
from memlab.techniques.tensor_parallel import (
    MLP,
    Attention,
    Column,
    mlp_bytes,
    mlp_sent,
    split_attention,
    split_mlp,
    torch_parallel,
)
from memlab.virtual import VirtualGPU

from .awkward import Batch, batches, loss_of, make, train

STEPS = 5


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The ranks compute with one thread; the plain step has to add in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# On real ranks


def steps(model: nn.Module, zero: Any, data: list[Batch], rank: int, size: int) -> Any:
    """Losses (of the whole batch) of `STEPS` steps; bytes held in the last one; its calls and bytes sent."""
    losses = []
    for number, batch in enumerate(data):
        mine = Batch(*(t.chunk(size)[rank] for t in batch)) if size > 1 else batch
        torch.manual_seed(2 + number)
        with Traffic() as traffic:
            zero.zero_grad()
            loss = loss_of(model, mine)
            loss.backward()
            held = zero.held() if isinstance(zero, Zero) else {}
            zero.step()
        loss = loss.detach().clone()
        if size > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / size)
    if isinstance(zero, Zero):
        held["optimizer_states"] = zero.held()["optimizer_states"]
    return losses, held, dict(traffic.calls), dict(traffic.sent)


def on_rank(rank: int, size: int) -> dict[str, Any]:
    data, out = batches(STEPS), {}
    for stage in (1, 2, 3):
        model = make(blocks=2, dropout=0.0)  # a slice of the batch on each rank
        zero = Zero(model, adam, stage, units=model.blocks)
        out[f"scratch {stage}"] = steps(model, zero, data, rank, size)
        if size == 2:
            model = make(blocks=2)  # with dropout, the same batch on every rank
            zero = Zero(model, adam, stage, units=model.blocks)
            out[f"same {stage}"] = steps(model, zero, data, 0, 1)[0], zero.full_parameters()
    model = make(blocks=2, dropout=0.0)
    ddp, optimizer = torch_zero1(
        model, torch.optim.AdamW, find_unused_parameters=True, lr=1e-2, foreach=False
    )
    out["torch 1"] = steps(ddp, optimizer, data, rank, size)
    mesh = init_device_mesh("cpu", (size,))
    for stage in (2, 3):
        model = make(blocks=2, dropout=0.0)
        torch_fsdp(model, model.blocks, stage, mesh)
        out[f"torch {stage}"] = steps(model, adam(model.parameters()), data, rank, size)
    out["mlp"] = layer(MLP(32), split_mlp, {"up": "column", "down": "row"}, mesh)
    out["attention"] = layer(Attention(32, 4), split_attention, {"qkv": "column", "out": "row"}, mesh)
    return out


def layer(full: nn.Module, split: Any, plan: dict[str, str], mesh: Any) -> dict[str, Any]:
    """Five steps of one layer: whole, split from scratch, split by DTensor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for p in full.parameters():
            nn.init.normal_(p, std=0.1)
        x = torch.randn(2, 8, 32)
    scratch = split(copy.deepcopy(full))
    theirs = torch_parallel(copy.deepcopy(full), plan, mesh)
    out = {}
    for name, module in (("plain", full), ("scratch", scratch), ("torch", theirs)):
        optimizer, losses = adam(module.parameters()), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            with Traffic() as traffic:
                loss = module(inputs).pow(2).mean()
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        out[name] = losses, inputs.grad, dict(traffic.calls), dict(traffic.sent)
    columns = Column(copy.deepcopy(full.get_submodule(next(iter(plan)))), gather=True)
    with Traffic() as traffic:
        columns(x)
    out["column only"] = dict(traffic.calls)
    return out


@cache
def ranks(size: int) -> list[dict[str, Any]]:
    try:
        return run(on_rank, size, timeout=150)
    except GlooUnavailable as reason:
        pytest.skip(f"no ranks here: {reason}")


sizes = pytest.mark.parametrize("size", [2, 4])


@sizes
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_holds_its_share_to_the_byte(size: int, stage: int) -> None:
    model = make(blocks=2)
    whole = [p.numel() for p in model.parameters()]
    trained = [p.numel() for n, p in model.named_parameters() if p.requires_grad and n != "unused"]
    for result in ranks(size):
        held = result[f"scratch {stage}"][1]
        assert held["parameters"] == share(whole, size, stage)["parameters"]
        assert held["gradients"] == share(trained, size, stage)["gradients"]
        assert held["optimizer_states"] == share(trained, size, stage)["optimizer_states"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_the_plain_step_bit_by_bit(stage: int) -> None:
    """With dropout and the same batch on two ranks: g + g and its half are exact."""
    plain = make(blocks=2)
    expected = train(plain, batches(STEPS))
    for result in ranks(2):
        losses, parameters = result[f"same {stage}"]
        assert losses == expected
        assert all(torch.equal(p, parameters[name]) for name, p in plain.named_parameters())


@sizes
@pytest.mark.parametrize("who", [f"{who} {stage}" for who in ("scratch", "torch") for stage in (1, 2, 3)])
def test_ranks_with_a_slice_of_the_batch_have_the_plain_losses(size: int, who: str) -> None:
    expected = train(make(blocks=2, dropout=0.0), batches(STEPS))
    for result in ranks(size):
        assert result[who][0] == pytest.approx(expected, abs=1e-5)


@sizes
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends_what_the_formula_says(size: int, stage: int) -> None:
    model = make(blocks=2)
    trained = [p for n, p in model.named_parameters() if p.requires_grad and n != "unused"]
    padded = sum(4 * size * math.ceil(p.numel() / size) for p in trained)
    for result in ranks(size):
        calls, traffic = result[f"scratch {stage}"][2:]
        assert traffic["reduce_scatter"] == sent(padded, size, 1) // 2
        assert calls["reduce_scatter"] == len(trained)
        if stage < 3:
            assert sum(traffic.values()) == sent(padded, size, stage)
        else:  # biases aren't needed by the backward, so they are fetched once
            assert 0.97 * sent(padded, size, 3) < sum(traffic.values()) < 1.001 * sent(padded, size, 3)


@sizes
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_tensor_parallel_equals_the_whole_layer(size: int, kind: str) -> None:
    for result in ranks(size):
        losses, gradient, *_ = result[kind]["plain"]
        for who in ("scratch", "torch"):
            their_losses, their_gradient, calls, traffic = result[kind][who]
            assert their_losses == pytest.approx(losses, rel=1e-5)
            torch.testing.assert_close(their_gradient, gradient, rtol=1e-4, atol=1e-7)
            assert calls == {"all_reduce": 2}
            assert traffic == {"all_reduce": mlp_sent(16, 32, size)}
        assert result[kind]["column only"] == {"all_gather": 1}  # what the row split after it saves


# Any world size, without sending anything


def tower(width: int = 64, layers: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


@pytest.mark.parametrize("size", [3, 8, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_any_world_size(size: int, stage: int) -> None:
    with fake_process_group(size, rank=size - 1):
        model = tower()
        numels = [p.numel() for p in model.parameters()]
        zero = Zero(model, adam, stage, units=model)
        with Meter(model, zero.optimizer) as meter:
            for _ in range(2):
                zero.zero_grad()
                model(torch.ones(4, 64)).mean().backward()
                held = zero.held()
                zero.step()
        held["optimizer_states"] = zero.held()["optimizer_states"]
        assert held == share(numels, size, stage)
        measured = meter.trace.consumer_peaks()
        for consumer in ("parameters", "optimizer_states"):
            assert measured[consumer] == pytest.approx(held[consumer], rel=0.02)
        # Beside what it keeps, stage 2 and 3 hold the one gradient that is being reduced, and pad it.
        spare = 0 if stage == 1 else max(numels) * 4
        own = held["gradients"] * (1 + 1 / size if stage == 1 else 1)
        assert own <= measured["gradients"] <= 1.02 * own + 2 * spare


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_billion_parameters_on_virtual_ranks(size: int, stage: int) -> None:
    """Sixteen Linear(8192, 8192) on fake tensors: the peak is the share, and what is whole for a moment."""
    with fake_process_group(size), VirtualGPU() as gpu:
        model = tower(8192, 16)
        zero = Zero(model, adam, stage, units=model)
        for _ in range(3):
            zero.zero_grad()
            with Traffic() as traffic:
                model(torch.ones(4, 8192)).mean().backward()
                zero.step()
    numels = [o.shape.numel() for o in zero.owned]
    layer = 4 * max(numels)
    # Stage 3 peaks at the second layer, when it and the first one have no piece of a gradient yet; the first
    # layer's weight isn't fetched again, since its input wants no gradient.
    whole = {1: sum(numels) * 4 // size, 2: layer, 3: 2 * layer - 2 * layer // size}[stage]
    expected = sum(share(numels, size, stage).values()) + whole
    assert gpu.trace.last_step().peak_bytes == pytest.approx(expected, rel=0.02)
    # Nor are the biases, which the backward doesn't need.
    once = [max(numels), *(n for n in numels if n < max(numels))] if stage == 3 else []
    padding_free = sent(4 * sum(numels), size, stage) - sent(4 * sum(once), size, 1) // 2
    assert traffic.total == padding_free


def test_units_decide_what_is_whole_at_once() -> None:
    """The twin that must fail: with the whole model as one unit, stage 3 gathers all of it."""
    peaks = {}
    with fake_process_group(64):
        for name in ("units", "one unit"):
            model = tower(layers=16)
            whole = sum(p.numel() for p in model.parameters()) * 4
            zero = Zero(
                model, lambda p: torch.optim.SGD(p, lr=0.1), 3, units=model if name == "units" else ()
            )
            with Meter(model, zero.optimizer) as meter, torch.no_grad():
                model(torch.ones(4, 64))
            peaks[name] = meter.trace.peak_bytes
    assert peaks["units"] < 0.25 * whole
    assert peaks["one unit"] > whole


def test_16_bit_parameters_get_fp32_masters() -> None:
    """B per parameter: 2 + 2 + 12/N in stage 1, 2 + (4 + 12)/N in stage 2 (fp32 means), 16/N in stage 3."""
    size, numel = 8, 64 * 64
    for stage, expected in ((1, 2 + 2 + 12 / size), (2, 2 + 16 / size), (3, 16 / size)):
        with fake_process_group(size):
            model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            zero = Zero(model, adam, stage)
            model(torch.ones(4, 64, dtype=torch.bfloat16)).mean().backward()
            gradients = zero.held()["gradients"]
            zero.step()
            held = zero.held() | {"gradients": gradients}
        assert sum(held.values()) == pytest.approx(numel * expected, rel=0.001)


def test_a_parameter_of_two_units_is_refused() -> None:
    model = tower(layers=2)
    model[1].weight = model[0].weight
    with fake_process_group(2), pytest.raises(ValueError, match="shared by two units"):
        Zero(model, adam, 3, units=model)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20), st.integers(1, 512))
def test_shares_add_up_to_the_whole(numels: list[int], size: int) -> None:
    whole = share(numels, size, 0)
    for stage in (1, 2, 3):
        part = share(numels, size, stage)
        for consumer, first in (("parameters", 3), ("gradients", 2), ("optimizer_states", 1)):
            if stage >= first:
                padding = 8 * size * len(numels) + 4 * len(numels) * size
                assert whole[consumer] <= part[consumer] * size <= whole[consumer] + padding


def test_the_paper_s_numbers() -> None:
    """7.5 billion parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB (figure 1); 34.4, 23.4, 12.5 % for 8."""
    for stage, expected in enumerate((120, 31.4, 16.6, 1.9)):
        assert sum(states(7_500_000_000, 64, stage).values()) / 1e9 == pytest.approx(expected, abs=0.05)
    for stage, expected in ((1, 0.344), (2, 0.234), (3, 0.125)):
        assert sum(states(10**9, 8, stage).values()) / 16e9 == pytest.approx(expected, abs=0.0005)
    assert sum(states(10**9, 8, 1, (4, 4, 8)).values()) / 16e9 == pytest.approx(0.5625)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_split_mlp_stores_what_the_formula_says(size: int) -> None:
    with fake_process_group(size):
        mlp = split_mlp(MLP(64))
        x = torch.randn(128, 64)
        with Meter(mlp) as meter:
            loss = mlp(x).sum()
            live = meter.live_bytes
        expected = mlp_bytes(128, 64, 256, size)
        assert sum(p.numel() * 4 for p in mlp.parameters()) == expected["parameters"]
        # the loss's graph also holds nothing of the output: sum() needs only its shape
        assert live - expected["parameters"] - 4 == pytest.approx(expected["activations"], rel=0.02)
        del loss


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="stages 0"):
        states(1, 1, 4)
    with pytest.raises(ValueError, match="at least one rank"):
        share([1], 0, 1)
    with pytest.raises(ValueError, match="stages 1, 2 and 3"):
        Zero(tower(), adam, 0)
    with pytest.raises(ValueError, match="2 if asked"):
        torch_fsdp(tower(), stage=1)
    with fake_process_group(3), pytest.raises(ValueError, match="4 heads can't be split over 3"):
        split_attention(Attention(12, 4))
    with fake_process_group(3), pytest.raises(ValueError, match="256 features can't be split over 3"):
        split_mlp(MLP(64))
    with pytest.raises(ValueError, match="'column' or by 'row'"):
        torch_parallel(MLP(8), {"up": "diagonal"}, None)


# Processes


def test_functions_from_a_notebook_travel_by_value() -> None:
    """A cell's function, what it refers to and a class with super(): none of them can be imported."""
    cell = """
import torch
FACTOR = 3
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * FACTOR
def helper(depth):
    return depth if depth == 0 else helper(depth - 1)
def work(rank, size, offset=1):
    y = Scaled(2, 2)(torch.ones(1, 2)).sum()
    y.backward()   # autograd runs, though it has run in the caller too
    print("rank", rank)
    return rank + offset * FACTOR + helper(3)
"""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)
    torch.ones(1, requires_grad=True).sum().backward()
    try:
        assert run(names["work"], 2, 10) == [30, 31]
    except GlooUnavailable as reason:
        pytest.skip(str(reason))


def test_a_rank_that_fails_or_hangs_is_named() -> None:
    def fails(rank: int, size: int) -> None:
        if rank == 1:
            raise KeyError("no such layer")
        dist.barrier()

    def hangs(rank: int, size: int) -> None:
        if rank == 0:
            dist.barrier()
        time.sleep(100)

    def unwritten(rank: int, size: int) -> None:
        raise NotImplementedError("exercise 4.6")

    if (reason := processes.unavailable()) is not None:
        pytest.skip(reason)
    with pytest.raises(RankFailed, match="rank 1 of 2: KeyError: 'no such layer'"):
        run(fails, 2)
    with pytest.raises(RankFailed, match="of 2: no result within 1 s"):
        run(hangs, 2, timeout=1)
    with pytest.raises(NotImplementedError, match=r"exercise 4\.6"):
        run(unwritten, 1)


def test_without_gloo_or_a_port_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(GlooUnavailable, match=r"gloo can't connect 2 ranks here: .*nowhere0"):
        run(lambda rank, size: rank, 2)

    class NoPort:
        def __enter__(self) -> NoPort:
            raise OSError(1, "Operation not permitted")

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(processes.socket, "socket", NoPort)
    with pytest.raises(GlooUnavailable, match=r"no local port can be opened \(Operation not permitted\)"):
        run(lambda rank, size: rank, 2)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(GlooUnavailable, match="no gloo backend"):
        run(lambda rank, size: rank, 2)
    with pytest.raises(ValueError, match="at least one rank"):
        run(lambda rank, size: rank, 0)
