"""The identity path: y = x + F(x). It keeps gradients alive, and it isn't the only thing that does.

A layer multiplies the gradient by its Jacobian: J^T g. In a deep stack the product of Jacobians shrinks or
grows by some factor a layer, so by its power over the depth. With an identity path a layer multiplies by
(I + J^T): the gradient has a way that no layer touches (`residual_gradient`).

But the factor is also set by the initialisation, and reset by a norm. Of 50 tanh layers of width 64, the norm
of the gradient at the input, where it is 64 at the output (`gradient_norms`, batch 64, seed 0):

                                 no skip    skip
    nn.Linear's default init     3.5e-11    7.1e+02    weights of variance 1/(3 h): without a skip it vanishes
    Xavier init                  4.6e+00    2.5e+03    variance 1/h: cured without a skip
    default init, LayerNorm      5.2e+02               cured without a skip
    default init, BatchNorm      3.9e+03               cured without a skip
    variance 4/h                 6.3e+04    3.4e+04    it explodes, and the skip doesn't help

He et al. say so themselves: their plain nets with batch norm do not suffer from vanishing gradients; what
residuals cure is that deeper plain nets train worse.

What it costs (`skip_units`): nothing in parameters, one sum in time; in memory, one activation per layer in a
plain tanh or ReLU stack. There the activation's output is the next layer's input, and is stored once; with a
skip these are two tensors. What it saves: nothing.

Source: He et al., Deep Residual Learning, arXiv:1512.03385, section 4.1; Identity Mappings, arXiv:1603.05027.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from memlab.units import unknown_name

__all__ = ["Stack", "gradient_norms", "residual_gradient", "skip_units"]

INITS = ("default", "xavier", "orthogonal", "large")
NORMS = ("none", "layer", "batch")


def residual_gradient(branch: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    """dL/dx of y = x + branch(x) from g = dL/dy: (I + J^T) g. Same shape as x.

    Not g + dL/dF: dL/dF is g itself, and the sum would be 2 g whatever the branch does.
    """
    inputs = x.detach().requires_grad_()
    with torch.enable_grad():
        (through,) = torch.autograd.grad(branch(inputs), inputs, g)
    return g + through


class Stack(nn.Module):
    """`depth` layers x -> tanh(norm(W x + b)), or x -> x + tanh(norm(W x + b)) with `skip`. (B, h) -> (B, h).

    init: 'default' (nn.Linear's own), 'xavier' (normal, variance 1/h, biases 0), 'orthogonal', or 'large'
        (variance 4/h: gradients explode). norm: 'none', 'layer' or 'batch'.
    activation: default tanh.
    """

    def __init__(
        self,
        depth: int,
        width: int = 64,
        *,
        skip: bool = False,
        norm: str = "none",
        init: str = "default",
        activation: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise unknown_name("norm", norm, NORMS)
        if init not in INITS:
            raise unknown_name("init", init, INITS)
        self.skip, self.activation = skip, activation
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(depth):
            layer = nn.Linear(width, width)
            if init == "orthogonal":
                nn.init.orthogonal_(layer.weight)
            elif init != "default":
                nn.init.xavier_normal_(layer.weight, gain=2.0 if init == "large" else 1.0)
            if init != "default":
                nn.init.zeros_(layer.bias)
            self.layers.append(layer)
            self.norms.append(
                {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[norm](width)
            )

    def forward(self, x: Tensor) -> Tensor:
        for y in self.outputs(x):
            x = y
        return x

    def outputs(self, x: Tensor) -> list[Tensor]:
        """The output of every layer, in order."""
        out = []
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = self.activation(norm(layer(x)))
            x = x + y if self.skip else y
            out.append(x)
        return out


def gradient_norms(
    depth: int = 50,
    width: int = 64,
    *,
    batch: int = 64,
    seed: int = 0,
    skip: bool = False,
    norm: str = "none",
    init: str = "default",
    device: torch.device | str = "cpu",
) -> list[float]:
    """Norm of dL/dh at the input and after each layer of a `Stack`: depth + 1 numbers, L the sum of outputs.

    The whole (batch, width) gradient's norm. The last is sqrt(batch x width), so all cases end alike, and the
    first divided by the last says what the stack does to a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(batch, width).to(device).requires_grad_()
        stack = Stack(depth, width, skip=skip, norm=norm, init=init).to(device)
    states = [x, *stack.outputs(x)]
    gradients = torch.autograd.grad(states[-1].sum(), states)
    return [float(g.norm()) for g in gradients]


def skip_units(depth: int, skip: bool) -> int:
    """Activations that a `Stack` without norms saves, in units of (batch, width).

    tanh saves its output, a Linear its input. Without skips they are the same tensors: depth + 1, with the
    stack's input. With them each layer has both: 2 depth.
    """
    return 2 * depth if skip else depth + 1
