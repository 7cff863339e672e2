"""Freezing: saved units by layer kind, states, and the trap of freezing in the middle of training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from memlab.meter import Meter
from memlab.techniques.freezing import (
    block_units,
    chain_units,
    freeze,
    progressive,
    saved_bytes,
    state_bytes,
)
from memlab.virtual import VirtualGPU

from .awkward import batches, loss_of, make, train


class Block(nn.Module):
    """Pre-norm, no dropout; eager or SDPA."""

    def __init__(self, h: int, heads: int, eager: bool) -> None:
        super().__init__()
        self.heads, self.eager = heads, eager
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.eager:
            y = F.softmax(q @ k.transpose(-2, -1) * q.size(-1) ** -0.5, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(5)))


SETS = [range(5), {0, 1}, {1, 2}, {3, 4}, set()]


@pytest.mark.parametrize(("trained", "expected"), list(zip(SETS, (6, 5 + 1, 5, 3, 0), strict=True)))
def test_chain(trained: Any, expected: int) -> None:
    model = chain()
    freeze(model, [model[i] for i in trained])
    assert saved_bytes(lambda: model(torch.ones(32, 64)), model) == expected * 32 * 64 * 4
    assert chain_units(5, trained) == expected


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("trained", "eager_units", "sdpa_units"),
    list(zip(SETS, (105, 84, 70, 42, 0), (80, 62, 52, 32, 0), strict=True)),
)
def test_blocks(trained: Any, eager_units: int, sdpa_units: int, eager: bool) -> None:
    h, heads, tokens = 64, 4, 80  # heads x tokens / h = 5 units of scores
    model = nn.Sequential(*(Block(h, heads, eager) for _ in range(5)))
    freeze(model, [model[i] for i in trained])
    expected = eager_units if eager else sdpa_units
    assert block_units(5, trained, 5 if eager else 0) == expected
    # The exact count has statistics too: 4 floats a token for the norms, a log-sum-exp a head for SDPA.
    measured = saved_bytes(lambda: model(torch.randn(2, tokens, h)), model) / (2 * tokens * h * 4)
    if trained:
        statistics = (4 / h + (0 if eager else heads / h)) * (5 - min(trained))
        assert measured - statistics == pytest.approx(expected, rel=0.001)
    else:
        assert measured == 0


def test_the_meter_agrees_and_so_does_a_virtual_gpu() -> None:
    def live_after_forward(meter: Any) -> int:
        model = chain()
        freeze(model, [model[3], model[4]])
        x = torch.ones(32, 64)
        before = meter.live_bytes
        y = model(x)
        after = meter.live_bytes
        del y
        return after - before

    with Meter() as meter:
        real = live_after_forward(meter)
    with VirtualGPU() as gpu:
        fake = live_after_forward(gpu)
    assert real == fake == chain_units(5, {3, 4}) * 32 * 64 * 4


def test_trained_layers_learn_as_in_the_plain_step() -> None:
    """Against an optimizer that is given the trained parameters only, all gradients computed."""
    plain = make()
    chosen = {id(p) for block in plain.blocks[2:] for p in block.parameters()}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if id(p) in chosen], lr=1e-2, foreach=False)
    # `blocks.0.down.bias` is frozen in the plain model and below the trained ones here
    losses = train(plain, batches(5), optimizer)
    frozen = make()
    names = freeze(frozen, frozen.blocks[2:])
    assert set(names) == {n for n, p in plain.named_parameters() if id(p) in chosen}
    assert train(frozen, batches(5)) == losses
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), frozen.parameters(), strict=True))
    assert all(p.grad is None for n, p in frozen.named_parameters() if n not in names)


def test_freezing_in_the_middle_frees_states_and_stops_the_weights() -> None:
    model = make(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, batches(2), optimizer)
    names = freeze(model, [model.blocks[3]], optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, batches(1), optimizer)
    trained = sum(p.numel() for n, p in model.named_parameters() if n in names)
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    expected = state_bytes(sum(p.numel() for p in model.parameters()), trained)
    assert held == expected["optimizer_states"]
    assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == expected["gradients"]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name not in names)


def test_switching_off_gradients_alone_frees_nothing() -> None:
    """The twin that must fail: gradients and moments stay, and the frozen weights go on moving."""
    model = make(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, batches(2), optimizer)
    states = len(optimizer.state)
    weight = model.blocks[0].up.weight.requires_grad_(False)
    before = weight.clone()
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert weight.grad is not None
    assert len(optimizer.state) == states
    assert not torch.equal(weight, before)


def test_progressive_stages() -> None:
    model = make(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    data = iter(batches(5))

    def step() -> set[str]:
        optimizer.zero_grad()
        loss_of(model, next(data)).backward()
        optimizer.step()
        return {n.split(".")[1] for n, p in model.named_parameters() if p.grad is not None}

    stages = [([model.blocks[3]], 2), ([model.blocks[2], model.blocks[3]], 3)]
    assert progressive(model, stages, optimizer, step) == [[{"3"}] * 2, [{"2", "3"}] * 3]


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_units_grow_with_the_trained_set_and_with_the_path(case: tuple[int, set[int]]) -> None:
    layers, trained = case
    assert chain_units(layers, trained) <= chain_units(layers, range(layers)) == layers + 1
    assert block_units(layers, trained) <= block_units(layers, range(layers)) == 16 * layers
    if trained:
        assert chain_units(layers, trained) >= layers - min(trained) + 1
        assert chain_units(layers, {min(trained)}) <= chain_units(layers, trained)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"the layers are 0 to 4: \[5\] aren't"):
        chain_units(5, {4, 5})
    with pytest.raises(ValueError, match="3 of 2 parameters"):
        state_bytes(2, 3)
    assert math.isclose(sum(state_bytes(100, 25).values()), 100 * 4 + 25 * 12)
