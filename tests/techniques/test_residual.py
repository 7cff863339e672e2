"""The identity path: right derivative, measured gradients, and what else cures them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from memlab.meter import Meter
from memlab.techniques.freezing import saved_bytes
from memlab.techniques.residual import Stack, gradient_norms, residual_gradient, skip_units
from memlab.virtual import VirtualGPU


def test_the_derivative_is_one_plus_the_jacobian_s() -> None:
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    x, g = torch.randn(3, 5), torch.randn(3, 5)
    inputs = x.clone().requires_grad_()
    (inputs + branch(inputs)).backward(g)
    assert inputs.grad is not None
    torch.testing.assert_close(residual_gradient(branch, x, g), inputs.grad, rtol=0, atol=1e-6)
    # dL/dout + dL/dF is 2 g: the twin that must fail
    assert (2 * g - inputs.grad).abs().max() > 0.1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 3.46e-11),
        ({"skip": True}, 712),
        ({"init": "xavier"}, 4.6),
        ({"init": "xavier", "skip": True}, 2.5e3),
        ({"norm": "layer"}, 515),
        ({"norm": "batch"}, 3.9e3),
        ({"init": "large"}, 6.3e4),
    ],
)
def test_gradient_at_the_input_of_50_layers(options: dict[str, object], expected: float) -> None:
    norms = gradient_norms(50, 64, **options)  # type: ignore[arg-type]
    assert len(norms) == 51
    assert norms[-1] == 64  # 64 x 64 ones
    assert norms[0] == pytest.approx(expected, rel=0.3)  # rounding differs between builds, by little


def test_vanishing_is_exponential_in_depth() -> None:
    """Halving the depth gives about the square root; a skip has nothing of that."""
    deep, half = (gradient_norms(depth)[0] / 64 for depth in (50, 25))
    assert 0.3 < torch.log(torch.tensor(half)) / torch.log(torch.tensor(deep)) < 0.7
    norms = gradient_norms(50)
    assert all(a < b for a, b in pairwise(norms[:-5]))  # smaller at every layer below
    skips = [gradient_norms(depth, skip=True)[0] for depth in (25, 50)]
    assert skips[1] / skips[0] < 10


@pytest.mark.parametrize("skip", [False, True])
def test_a_skip_costs_one_activation_per_layer(skip: bool) -> None:
    stack = Stack(10, 64, skip=skip)
    unit = 32 * 64 * 4
    assert saved_bytes(lambda: stack(torch.ones(32, 64)), stack) == skip_units(10, skip) * unit
    lives = []
    for recorder in (Meter(), VirtualGPU()):
        with recorder:
            stack = Stack(10, 64, skip=skip)
            x = torch.ones(32, 64)
            before = recorder.live_bytes
            y = stack(x)
            lives.append(recorder.live_bytes - before)
            del y
    # the input isn't new; with skips the output is new and isn't saved
    assert lives[0] == lives[1] == (skip_units(10, skip) - 1 + skip) * unit


def test_five_steps_with_the_derivative_written_out() -> None:
    """A stack trained by `residual_gradient`, layer by layer, equals autograd's."""
    torch.manual_seed(0)
    stack, ours = Stack(4, 16, skip=True), Stack(4, 16, skip=True)
    ours.load_state_dict(stack.state_dict())
    optimizers = [torch.optim.SGD(s.parameters(), lr=0.1, foreach=False) for s in (stack, ours)]
    for _ in range(5):
        x = torch.randn(8, 16)
        optimizers[0].zero_grad()
        stack(x).pow(2).sum().backward()
        with torch.no_grad():
            states = [x, *ours.outputs(x)]
        g = 2 * states[-1]
        for layer, before in reversed(list(zip(ours.layers, states[:-1], strict=True))):
            out = torch.tanh(layer(before))
            layer.weight.grad, layer.bias.grad = torch.autograd.grad(out, [layer.weight, layer.bias], g)
            g = residual_gradient(lambda h, layer=layer: torch.tanh(layer(h)), before, g)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(stack.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_seeded_and_without_side_effects() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    assert gradient_norms(5) == gradient_norms(5) != gradient_norms(5, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"unknown norm 'layr': did you mean layer\?"):
        Stack(1, norm="layr")
    with pytest.raises(ValueError, match="unknown init 'he'"):
        Stack(1, init="he")
