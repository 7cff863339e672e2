"""Mixed precision: which numbers may have 16 bits, and what keeps the others right.

    step(lambda: loss_of(batch), optimizer, dtype=torch.bfloat16)                          # autocast
    step(lambda: loss_of(batch), optimizer, dtype=torch.float16, scaler=LossScaler())

| part | what it does | bytes |
|---|---|---|
| autocast | inputs of matrix products cast down, of sums and exponentials up | see below |
| loss scaling | multiplies the loss, since fp16 gradients under 3e-8 are 0; fp16 only | none |
| master weights | 16-bit weights and gradients; the optimizer has an fp32 copy | 2 + 2 + 4 + states |
| stochastic rounding | 16-bit weights, no copy; no update is lost on average | 2 + 2 + states |

Autocast saves 2 of 4 bytes of what products save for the backward, and costs 2 for each weight element, the
cast copies, which live until the backward has used them (`cast_bytes`). It does not touch the states:
weights, gradients and Adam's two moments stay fp32, 16 bytes a parameter, as without it.

The price is digits. bf16 has fp32's range and 8 bits of mantissa: 1 + 1/256 is 1 again. fp16 has 11 bits and
a range from 6e-8 to 65504. (Micikevicius et al., arXiv:1710.03740, sections 3.1 to 3.3.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from memlab.units import unknown_name

__all__ = [
    "HIGH",
    "LOW",
    "Autocast",
    "LossScaler",
    "MasterWeights",
    "Scaler",
    "cast_bytes",
    "master_bytes",
    "step",
    "stochastic_add_",
    "stochastic_round",
]


class Scaler(Protocol):
    """What a step asks of a loss scaler: `torch.amp.GradScaler` and `LossScaler` have it."""

    def scale(self, outputs: Tensor, /) -> Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer, /) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer, /) -> Any: ...
    def update(self) -> None: ...


def step(
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    dtype: torch.dtype | None = None,
    scaler: Scaler | None = None,
    max_norm: float | None = None,
    device: str = "cpu",
) -> Tensor:
    """One training step as torch.amp is used today; returns the loss.

    Autocast surrounds forward and loss only: the backward runs each operator in its forward's type by
    itself. fp16 needs a scaler, bf16 needs none. Gradients are unscaled before they are clipped.
    """
    optimizer.zero_grad(set_to_none=True)
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        loss = loss_of()
    (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
    if max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip_grad_norm_(_parameters(optimizer), max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# -- autocast from scratch ---------------------------------------------------------------------------------

#: Functions whose inputs autocast casts to 16 bits: matrix products. (ATen/autocast_mode.h,
#: AT_FORALL_LOWER_PRECISION_FP, also lists recurrent cells.)
LOW = frozenset({
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
})  # fmt: skip
_LOSSES = frozenset({
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits",
})  # fmt: skip
#: Functions whose 16-bit inputs it casts to fp32. CUDA's list is the longer one: that is why a card's
#: autocast saves fewer bytes than the CPU's. (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE.)
HIGH = {
    "cpu": _LOSSES,
    "cuda": _LOSSES | {
        "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "exp", "log", "pow", "__pow__",
        "rsqrt", "reciprocal", "softplus", "logsumexp", "sum", "prod", "cumsum", "norm",
    },
}  # fmt: skip


class Autocast(TorchFunctionMode):
    """`torch.autocast` in 25 lines, with the CPU's lists or CUDA's, wherever it runs:

        with Autocast(torch.bfloat16, rules="cuda"):
            loss = loss_of(batch)

    It stands above autograd, so a cast is part of the graph and gradients arrive in the parameter's type.
    A weight is cast once: the copy is kept until the context ends. Of Python functions that aren't listed it
    doesn't see the inside (`multi_head_attention_forward`); torch.autocast does.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rules: str = "cpu") -> None:
        super().__init__()
        if rules not in HIGH:
            raise unknown_name("autocast rules", rules, HIGH)
        self.dtype, self.high = dtype, HIGH[rules]
        self.copies: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        cast = self._down if name in LOW else self._up if name in self.high else None
        if cast is not None:
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        self.copies.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _down(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dtype in (self.dtype, torch.float64):
            return x
        if not (x.is_leaf and x.requires_grad and torch.is_grad_enabled()):
            return x.to(self.dtype)
        if id(x) not in self.copies:
            self.copies[id(x)] = x.to(self.dtype)
        return self.copies[id(x)]

    def _up(self, x: Tensor) -> Tensor:
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# -- loss scaling from scratch -----------------------------------------------------------------------------


class LossScaler:
    """Dynamic loss scaling, step for step what `torch.amp.GradScaler` does.

    The loss is multiplied by `factor`, the gradients are divided by it before the step. A step whose
    gradients hold inf or NaN is left out and the factor becomes `backoff` times it; after `interval` good
    steps in a row it becomes `growth` times it. Powers of two: multiplying by them rounds nothing. Holds no
    tensor. Reads one number from the device for each step; fake tensors have none, so no overflow.
    """

    def __init__(
        self, factor: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        if not (factor > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ValueError("a loss scaler needs factor > 0, growth > 1, 0 < backoff < 1 and interval >= 1")
        self.factor, self.growth, self.backoff, self.interval = factor, growth, backoff, interval
        self.good_steps = 0  # since the factor last changed
        self.skipped = 0
        self._overflow: bool | None = None  # of the step in work; None: not unscaled yet

    def get_scale(self) -> float:
        return self.factor

    def scale(self, outputs: Tensor) -> Tensor:
        # an fp32 factor: times a number, an fp16 loss would stay fp16, whose largest is 65504
        return outputs * torch.tensor(self.factor, dtype=torch.float32, device=outputs.device)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the factor, in place: before anything that looks at them, as clipping."""
        if self._overflow is not None:
            raise RuntimeError("the gradients are unscaled already: call unscale_ once for each step")
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        for g in gradients:
            if g.dtype == torch.float16:
                raise ValueError(
                    "fp16 gradients can't be unscaled: they would be 0 again; keep fp32 parameters"
                )
            g.mul_(1 / self.factor)
        self._overflow = _overflowed(gradients)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._overflow is None:
            self.unscale_(optimizer)
        if self._overflow:
            self.skipped += 1
        else:
            optimizer.step()

    def update(self) -> None:
        if self._overflow is None:
            raise RuntimeError("no step to learn from: call step(optimizer) before update()")
        if self._overflow:
            self.factor *= self.backoff
            self.good_steps = 0
        else:
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.factor *= self.growth
                self.good_steps = 0
        self._overflow = None


def _overflowed(gradients: list[Tensor]) -> bool:
    """Is an inf or NaN among them: a reduction for each, which makes no tensor of their size."""
    if not gradients or is_fake(gradients[0]) or gradients[0].is_meta:
        return False
    largest = [torch.linalg.vector_norm(g, float("inf")) for g in gradients]
    return not torch.stack(largest).isfinite().all().item()


# -- master weights ----------------------------------------------------------------------------------------


class MasterWeights(torch.optim.Optimizer):
    """16-bit parameters and gradients, and an optimizer that works on an fp32 copy of each parameter.

    parameters: bf16 (or fp16) tensors. make: the optimizer of the copies, for example
        MasterWeights(model.parameters(), lambda copies: torch.optim.AdamW(copies, lr=1e-4))

    A bf16 update below 1/256 of the weight would be lost, and most are; the copy gathers them until they
    count. During `step` the gradients exist a second time in fp32. The opposite arrangement of the same
    numbers is autocast: fp32 parameters and 16-bit copies for the time of the forward and backward.
    """

    def __init__(
        self, parameters: Iterable[Tensor], make: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self.parameters: list[Tensor] = [p for p in _parameters(self) if p.requires_grad]
        for p in self.parameters:
            self.state[p]["master"] = p.detach().float()
        self.inner = make([self.state[p]["master"] for p in self.parameters])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.parameters:
            self.state[p]["master"].grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p in self.parameters:
            master = self.state[p]["master"]
            master.grad = None
            p.copy_(master)  # rounds to nearest
            self.state[p].update(self.inner.state[master])


# -- stochastic rounding -----------------------------------------------------------------------------------


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 -> bf16, up or down to a neighbour, so that the *mean* over many roundings is x.

    A bf16 number is the upper half of an fp32 number's bits. Adding a random lower half carries into the
    upper one with the probability that the lower half stands for; then it is cut off. Infinities and NaN
    stay. Takes two more tensors of x's bytes for a moment, and a mask.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"stochastic rounding is from fp32 to bf16: this is {x.dtype}")
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16))
    return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def stochastic_add_(weight: Tensor, update: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """weight += update, in place, for bf16: 1 + 1000 x 0.001 is 2 on average, and 1 by `weight.add_`."""
    with torch.no_grad():
        return weight.copy_(stochastic_round(weight.float() + update, generator))


# -- bytes -------------------------------------------------------------------------------------------------


def cast_bytes(model: nn.Module, itemsize: int = 2) -> int:
    """Bytes of autocast's weight copies: every weight and bias of a Linear or convolution, tied ones once.

    They live to the end of the `with` block, and those of weights further to their use in the backward,
    where the input's gradient is asked for.
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    cast = {id(p): p for m in model.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)}
    return itemsize * sum(p.numel() for p in cast.values())


def master_bytes(parameters: int, states: int = 2, itemsize: int = 2) -> dict[str, int]:
    """Bytes by consumer with `MasterWeights` for so many parameters; states: the optimizer's fp32 tensors
    for each (AdamW 2, momentum 1). `temporaries` are the fp32 gradients of the step."""
    return {
        "parameters": itemsize * parameters,
        "gradients": itemsize * parameters,
        "optimizer_states": (4 + 4 * states) * parameters,
        "temporaries": 4 * parameters,
    }
