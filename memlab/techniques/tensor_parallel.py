"""Tensor parallelism: one layer's weights split over N ranks, each computes a part of every token.

    column split   y_i = x W_i^T     W_i: h_out/N rows of W; the rank has a slice of the output's features
    row split      y = sum x_i W_i^T  W_i: h_in/N columns of W; the rank has one term of the sum

Megatron pairs them: column first, row second, and the slice that lies between never has to be put together.
An MLP, or an attention layer split by heads, needs one all-reduce in the forward and one in the backward.
Column splits alone need an all-gather after each layer: `Column(..., gather=True)`.

What it saves: weights, gradients, optimizer states and the activations between the two layers, all by N
(`mlp_bytes`). What it doesn't: the layer's input, its output and everything between two such layers (norms,
residuals) stay whole on every rank. What it costs: the two all-reduces, 2 b s h elements each way and layer,
in the middle of the computation (`mlp_sent`): it wants NVLink.

`Column`, `Row`, `split_mlp` and `split_attention` are the from-scratch version. `torch_parallel` is PyTorch's
own, which keeps each weight as a DTensor that knows its split.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MLP",
    "Attention",
    "Column",
    "Row",
    "mlp_bytes",
    "mlp_sent",
    "split_attention",
    "split_mlp",
    "torch_parallel",
]


# torch 2.13 renamed them.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Closed forms


def mlp_bytes(tokens: int, h: int, hidden: int, world_size: int = 1, each: int = 4) -> dict[str, int]:
    """Bytes per rank of an `MLP` on b s = `tokens` tokens; `hidden` a multiple of `world_size`.

    parameters: up's rows and bias and down's columns over N, down's bias whole. activations: what is saved
    for the backward: the input (whole), and GELU's input and output (over N). `each`: bytes of an element.
    """
    part = hidden // world_size
    return {
        "parameters": each * (2 * h * part + part + h),
        "activations": each * tokens * (h + 2 * part),
    }


def mlp_sent(tokens: int, h: int, world_size: int, each: int = 4) -> int:
    """Bytes that a rank sends per step for one MLP or attention: two all-reduces of (tokens, h), by ring."""
    return 2 * (2 * each * tokens * h * (world_size - 1) // world_size)


# The layers, whole


class MLP(nn.Module):
    """(…, h) -> (…, h) through `hidden` features (default 4 h) and GELU."""

    def __init__(self, h: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * h if hidden is None else hidden
        self.up, self.down = nn.Linear(h, hidden), nn.Linear(hidden, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention, (B, T, h) -> (B, T, h).

    The features of `qkv` are ordered by head first, (heads, 3, head size), so that a slice of them is some
    whole heads; the forward takes as many heads as it finds, and runs unchanged on a rank that has a part.
    """

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        if h % heads:
            raise ValueError(f"{h} features can't be shared out to {heads} heads")
        self.head_size = h // heads
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, -1, 3, self.head_size).permute(3, 0, 2, 1, 4)  # (B, heads, T, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


# From scratch


class _Copy(torch.autograd.Function):
    """Megatron's f. Forward: x, which every rank has. Backward: each rank knows a part of dL/dx; sum them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Megatron's g. Forward: the sum over ranks. Backward: every term has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Join(torch.autograd.Function):
    """Forward: all ranks' slices of the last dimension, in order. Backward: this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.width = dist.get_rank(group), x.size(-1)
        n = dist.get_world_size(group)
        rows = torch.empty(n, *x.shape, dtype=x.dtype, device=x.device)
        _all_gather(rows.view(-1), x.contiguous().view(-1), group)
        return torch.cat(rows.unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].narrow(-1, ctx.rank * ctx.width, ctx.width), None  # a view: nothing is sent


_copy = cast("Callable[[Tensor, dist.ProcessGroup | None], Tensor]", _Copy.apply)
_sum = cast("Callable[[Tensor, dist.ProcessGroup | None], Tensor]", _Sum.apply)
_join = cast("Callable[[Tensor, dist.ProcessGroup | None], Tensor]", _Join.apply)


class Column(nn.Module):
    """This rank's h_out/N rows of a Linear: (…, h_in) -> (…, h_out/N), or (…, h_out) with `gather`."""

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup | None = None, gather: bool = False) -> None:
        super().__init__()
        self.group, self.gather = group, gather
        self.weight = _mine(full.weight, 0, group)
        self.bias = None if full.bias is None else _mine(full.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(_copy(x, self.group), self.weight, self.bias)
        return _join(y, self.group) if self.gather else y


class Row(nn.Module):
    """This rank's h_in/N columns of a Linear: (…, h_in/N) -> (…, h_out), the sum over all ranks.

    The bias is whole on every rank, and added after the sum: once, not N times.
    """

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _mine(full.weight, 1, group)
        self.bias = None
        if full.bias is not None:
            self.bias = nn.Parameter(full.bias.detach().clone(), full.bias.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        y = _sum(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


def _mine(full: Tensor, dim: int, group: dist.ProcessGroup | None) -> nn.Parameter:
    n = dist.get_world_size(group)
    if full.size(dim) % n:
        raise ValueError(f"{full.size(dim)} features can't be split over {n} ranks")
    part = full.detach().chunk(n, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, full.requires_grad)


def split_mlp(mlp: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace `mlp.up` and `mlp.down` by this rank's part of them: one all-reduce each way. In place."""
    mlp.up, mlp.down = Column(cast(nn.Linear, mlp.up), group), Row(cast(nn.Linear, mlp.down), group)
    return mlp


def split_attention(attention: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Keep this rank's heads: `attention.qkv` by columns, `attention.out` by rows. In place.

    ValueError where the heads can't be shared out evenly.
    """
    qkv, n = cast(nn.Linear, attention.qkv), dist.get_world_size(group)
    heads = qkv.out_features // 3 // cast(int, attention.head_size)
    if heads % n:
        raise ValueError(f"{heads} heads can't be split over {n} ranks")
    attention.qkv, attention.out = Column(qkv, group), Row(cast(nn.Linear, attention.out), group)
    return attention


# PyTorch's own


def torch_parallel(module: nn.Module, plan: Mapping[str, str], mesh: Any) -> nn.Module:
    """`parallelize_module` with a plan {submodule name: 'column' or 'row'} on a one-dimensional DeviceMesh.

    For `MLP`: {'up': 'column', 'down': 'row'}; for `Attention`: {'qkv': 'column', 'out': 'row'}.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    wrong = {how for how in plan.values() if how not in styles}
    if wrong:
        raise ValueError(f"a layer is split by 'column' or by 'row', not by {', '.join(sorted(wrong))}")
    return parallelize_module(module, mesh, {name: styles[how]() for name, how in plan.items()})
