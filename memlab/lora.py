"""Adapters on a frozen model (LoRA), and frozen weights in 4 bits (nf4).

    y = x W^T + b + scaling (x A^T) B^T          W (out, in), b frozen; A (rank, in), B (out, rank)

`LoRALinear` and `LoRANF4Linear` do what peft's lora.Linear and lora.Linear4bit do, in their order, with
dropout 0 (Hu et al., arXiv:2106.09685; peft 0.20, tuners/lora/layer.py and bnb.py).

`NF4Linear` stands in for Linear4bit of bitsandbytes 0.50, which needs its CUDA library. It holds the same
tensors (`recipe.nf4_tensors`), makes its weight whole for each product and keeps nothing for the backward
but what it holds anyway. It computes: `quantize` and `dequantize` are nf4 from scratch (Dettmers et al.,
arXiv:2305.14314, section 3 and appendix E), each one operator, so that a meter sees what it would see of a
kernel: the result. Fake tensors take the shape rules beside them.

What differs from bitsandbytes: with 8-bit scales the 256 levels are evenly spaced here, its are denser near
0. Sizes are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab.recipe import BLOCK_4BIT, BLOCK_SCALES

__all__ = [
    "LEVELS",
    "LoRALinear",
    "LoRANF4Linear",
    "NF4Linear",
    "dequantize",
    "dequantize_scales",
    "quantize",
    "quantize_scales",
]

#: The 16 levels of nf4: quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


# -- 4 bits, from scratch ----------------------------------------------------------------------------------


@torch.library.custom_op("memlab::quantize_nf4", mutates_args=())
def quantize(weight: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """weight of n values, code (16,) -> two values a byte (ceil(n / 2), 1), fp32 scales (ceil(n / 64),).

    Each 64 values are divided by their largest magnitude and set to the nearest level.
    """
    blocks = _blocks(weight.float(), BLOCK_4BIT)
    absmax = blocks.abs().amax(1)
    scaled = blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    middles = (code[1:] + code[:-1]) / 2
    nearest = torch.bucketize(scaled, middles).flatten()[: weight.numel() + weight.numel() % 2]
    pairs = nearest.to(torch.uint8).view(-1, 2)
    return (pairs[:, 0] << 4 | pairs[:, 1])[:, None], absmax


@quantize.register_fake
def _(weight: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    count = weight.numel()
    packed = weight.new_empty(((count + 1) // 2, 1), dtype=torch.uint8)
    return packed, weight.new_empty(-(-count // BLOCK_4BIT), dtype=torch.float32)


@torch.library.custom_op("memlab::dequantize_nf4", mutates_args=())
def dequantize(
    packed: Tensor, absmax: Tensor, code: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """The way back: (rows, columns) in `dtype`. absmax is fp32."""
    values = code[torch.stack((packed >> 4, packed & 15), -1).flatten().long()]
    scaled = _blocks(values, BLOCK_4BIT) * absmax[:, None]
    count = rows * columns
    return scaled.flatten()[:count].view(rows, columns).to(dtype, copy=count < scaled.numel())


@dequantize.register_fake
def _(packed: Tensor, absmax: Tensor, code: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((rows, columns), dtype=dtype)


@torch.library.custom_op("memlab::quantize_scales", mutates_args=())
def quantize_scales(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 scales (b,) and code (256,) -> uint8 (b,), the scale of each 256 of them, and their mean ()."""
    offset = absmax.mean()
    blocks = _blocks(absmax - offset, BLOCK_SCALES)
    nested = blocks.abs().amax(1)
    scaled = blocks / nested.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    nearest = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2).flatten()[: absmax.numel()]
    return nearest.to(torch.uint8), nested, offset


@quantize_scales.register_fake
def _(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bytes_ = torch.empty_like(absmax, dtype=torch.uint8)
    return bytes_, absmax.new_empty(-(-absmax.numel() // BLOCK_SCALES)), absmax.new_empty(())


@torch.library.custom_op("memlab::dequantize_scales", mutates_args=())
def dequantize_scales(absmax: Tensor, nested: Tensor, code: Tensor, offset: Tensor) -> Tensor:
    """The way back: (b,) fp32."""
    scaled = _blocks(code[absmax.long()], BLOCK_SCALES) * nested[:, None]
    return scaled.flatten()[: absmax.numel()] + offset


@dequantize_scales.register_fake
def _(absmax: Tensor, nested: Tensor, code: Tensor, offset: Tensor) -> Tensor:
    return torch.empty_like(absmax, dtype=torch.float32)


def _blocks(x: Tensor, size: int) -> Tensor:
    """(n,) -> (ceil(n / size), size), the last block filled up with zeros."""
    x = x.flatten()
    return F.pad(x, (0, -x.numel() % size)).view(-1, size)


# -- layers ------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: the weight is made whole for each product, in forward and in backward.

    The packed one is kept as an attribute and not by save_for_backward, so checkpointing doesn't see it: a
    recomputation stops earlier than it would.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.whole(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return torch.matmul(gradient, ctx.layer.whole(gradient.dtype)), None, None


class NF4Linear(nn.Module):
    """A frozen linear layer in 4 bits: stands in for Linear4bit of bitsandbytes.

    linear: the layer whose weight is quantized; its bias stays as it is. compute: dtype of the product.
    """

    absmax: Tensor
    code: Tensor
    nested_absmax: Tensor
    nested_code: Tensor
    offset: Tensor

    def __init__(self, linear: nn.Linear, compute: torch.dtype, double: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute, self.nested = compute, double
        with torch.no_grad():
            whole = linear.weight.detach()
            code = torch.tensor(LEVELS, dtype=torch.float32, device=whole.device)
            packed, absmax = quantize(whole, code)
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.bias = linear.bias
            if double:
                levels = torch.linspace(-1, 1, 256, dtype=torch.float32, device=whole.device)
                absmax, nested, offset = quantize_scales(absmax, levels)
            self.register_buffer("absmax", absmax)
            self.register_buffer("code", code)
            if double:
                self.register_buffer("nested_absmax", nested)
                self.register_buffer("nested_code", levels)
                self.register_buffer("offset", offset)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The weight (out, in) in `dtype`: a new tensor."""
        absmax = self.absmax
        if self.nested:
            absmax = dequantize_scales(absmax, self.nested_absmax, self.nested_code, self.offset)
        weight: Tensor = dequantize(
            self.weight, absmax, self.code, self.out_features, self.in_features, dtype
        )
        return weight

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(self.compute)
        result: Tensor = _Product.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return result.to(kind)


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter beside it: peft's lora.Linear. `linear` gives weight and bias."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(self, linear: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = _add_adapter(self, linear.in_features, linear.out_features, rank, dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = F.linear(x, self.weight, self.bias)
        kind = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(x)) * self.scaling
        adapted: Tensor = result.to(kind)
        return adapted


class LoRANF4Linear(NF4Linear):
    """The same on 4 bits: peft's lora.Linear4bit, which clones the base result first."""

    lora_A: nn.Linear
    lora_B: nn.Linear

    def __init__(
        self, linear: nn.Linear, compute: torch.dtype, double: bool, rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__(linear, compute, double)
        self.scaling = _add_adapter(self, linear.in_features, linear.out_features, rank, dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x).clone()
        converts = not torch.is_autocast_enabled(x.device.type)
        if converts:
            x = x.to(self.lora_A.weight.dtype)
        output: Tensor = self.lora_B(self.lora_A(x)) * self.scaling
        if converts:
            output = output.to(result.dtype)
        return result + output


def _add_adapter(layer: nn.Module, inside: int, out: int, rank: int, dtype: torch.dtype) -> float:
    """A as nn.Linear draws it, B zero. Returns alpha / rank, with alpha 2 rank."""
    layer.lora_A = nn.Linear(inside, rank, bias=False, dtype=dtype)
    layer.lora_B = nn.Linear(rank, out, bias=False, dtype=dtype)
    nn.init.zeros_(layer.lora_B.weight)
    return 2.0
