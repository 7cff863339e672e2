"""Attention without the score matrix: tiles and an online softmax, as FlashAttention does it.

    out = tiled(q, k, v, causal=True)      # equals eager(q, k, v, causal=True)

Shapes: q (B, H, T, D); k and v (B, H or a divisor of H, S, D), each head of theirs shared by a group of
query heads; out (B, H, T, D). `causal`: query i sees keys 0..i, as in torch (flash_attn aligns the last query
with the last key; the same where T = S).

What it saves. `eager` makes scores of B*H*T*S elements, several times; at 8,192 tokens one head in fp32 takes
256 MiB for each. `tiled` holds a block x block tile of them at a time and O(T) beside it: the output and, for
each row, the logarithm of its sum of exponentials.

Why the parts can't simply be added: softmax needs the row's maximum and sum over *all* keys. The online
softmax keeps a running maximum m and sum l, and when a new tile raises the maximum, it scales what it has by
exp(m_old - m_new) (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135, algorithm 1).

Measured at 8,192 tokens, one head of 64, fp32, causal, forward + backward, with the output: eager 836 MiB,
tiled 8.75 MiB, SDPA 8.03 MiB; on one CPU thread 5.1, 1.3 and 1 times SDPA's time (benchmarks/attention.py).

What it costs. The backward computes each tile of scores again: 7 matrix products for each pair of tiles in
all instead of 6. A fused kernel keeps tiles in the chip's fast memory and is quicker than `eager`; here the
tiles are torch operations, and what they save is memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.units import unknown_name

__all__ = [
    "BACKENDS",
    "backend_that_ran",
    "eager",
    "eager_bytes",
    "flash",
    "flash_unavailable",
    "sdpa",
    "sdpa_bytes",
    "tiled",
    "tiled_bytes",
]

#: Names of torch's attention kernels; which of them can run depends on device, dtype and shape.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V as the formula reads: each intermediate a (B, H, T, S) tensor."""
    k, v = (t.repeat_interleave(_groups(q, k), dim=1) if _groups(q, k) > 1 else t for t in (k, v))
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out: Tensor = scores.softmax(-1) @ v
    return out


# -- PyTorch's mechanism -----------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, backend: str | None = None) -> Tensor:
    """torch's fused attention. backend: one of BACKENDS or an error, None lets torch choose.

    Raises UnknownNameError for another backend, torch's RuntimeError where the asked one can't run.
    """
    if backend is not None and backend not in BACKENDS:
        raise unknown_name("attention backend", backend, BACKENDS)
    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        shared = _groups(q, k) > 1
        out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
        return out


def backend_that_ran(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, backend: str | None = None
) -> str:
    """Runs `sdpa` and tells which kernel it was: 'flash', 'efficient', 'cudnn' or 'math'."""
    spy = _Spy()  # type: ignore[no-untyped-call]
    with spy:
        sdpa(q, k, v, causal, backend)
    return str(spy.ran)


class _Spy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    ran = "math"  # made of ordinary operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("flash", "efficient", "cudnn"):
            if f"_scaled_dot_product_{name}_attention" in str(func):
                self.ran = name
        return func(*args, **(kwargs or {}))


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """The flash_attn library's kernel, where it is installed and the card can run it.

    Raises RuntimeError, in one line, with the reason that `flash_unavailable` gives.
    """
    if reason := flash_unavailable(q):
        raise RuntimeError(f"flash_attn can't run: {reason}; use sdpa or tiled")
    if causal and q.size(-2) != k.size(-2):
        raise RuntimeError("flash_attn can't run: its causal mask aligns the last query with the last key")
    from flash_attn import flash_attn_func

    out: Tensor = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
    return out.transpose(1, 2)


def flash_unavailable(q: Tensor) -> str | None:
    """Why flash_attn can't take `q`, or None if it can. Source: flash_attn's README, version 2."""
    if find_spec("flash_attn") is None:
        return "it is not installed (pip install flash-attn)"
    if not q.is_cuda:
        return f"it needs CUDA and this is on {q.device.type}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"it needs Ampere or newer and this is {torch.cuda.get_device_name(q.device)}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes fp16 and bf16, not {q.dtype}"
    return None if q.size(-1) <= 256 else f"its heads have at most 256 elements, not {q.size(-1)}"


# -- from scratch ------------------------------------------------------------------------------------------


def tiled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block: int = 256) -> Tensor:
    """The same attention, `block` queries by `block` keys at a time, forward and backward.

    Any head size, any lengths, any floating dtype: tiles are computed in fp32 (fp64 for fp64). No dropout.
    """
    if block < 1:
        raise ValueError(f"a tile has at least one row, not {block}")
    if not k.size(-2):
        raise ValueError("attention needs at least one key")
    groups = _groups(q, k)  # (B, K*G, T, D) -> (B, K, G, T, D): G query heads for each of K
    grouped = q.unflatten(1, (k.size(1), groups))  # type: ignore[no-untyped-call]
    out: Tensor = _Tiled.apply(grouped, k, v, causal, block)  # type: ignore[no-untyped-call]
    return out.flatten(1, 2)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, block: int) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)  # log of each row's sum of exponentials
        for rows in _tiles(q.size(-2), block):
            queries = _tile(q, rows).to(dtype) * q.size(-1) ** -0.5
            top = queries.new_full((*queries.shape[:-1], 1), float("-inf"))  # m: the largest score so far
            total = torch.zeros_like(top)  # l: the sum of exponentials so far, in units of exp(m)
            summed = torch.zeros_like(queries)  # the output so far, in the same units
            for columns in _tiles(min(k.size(-2), rows.stop) if causal else k.size(-2), block):
                keys, values = k[..., columns, :].to(dtype), v[..., columns, :].to(dtype)
                scores = _scores(queries, keys, rows, columns, causal)
                raised = torch.maximum(top, scores.amax(-1, keepdim=True))
                shrink = (top - raised).exp_()
                p = scores.sub_(raised).exp_()
                total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                summed.mul_(shrink).add_(p @ values)
                top = raised
            _put(out, rows, summed.div_(total))
            _put(lse.unsqueeze(-1), rows, top.add_(total.log_()))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.block, ctx.dtype = causal, block, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        causal, block, dtype, scale = ctx.causal, ctx.block, ctx.dtype, q.size(-1) ** -0.5
        # softmax's Jacobian needs sum_j p_ij dp_ij for each row, which is the row's <output, gradient>
        delta = torch.empty_like(lse)
        for rows in _tiles(q.size(-2), block):
            outputs = _tile(out, rows).to(dtype)
            _put(delta.unsqueeze(-1), rows, (outputs * _tile(gradient, rows)).sum(-1, keepdim=True))
        del outputs
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for columns in _tiles(k.size(-2), block):
            keys, values = k[..., columns, :].to(dtype), v[..., columns, :].to(dtype)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
            for rows in _tiles(q.size(-2), block, columns.start if causal else 0):
                queries, g = _tile(q, rows).to(dtype) * scale, _tile(gradient, rows).to(dtype)
                p = _scores(queries, keys, rows, columns, causal)
                p.sub_(_tile(lse.unsqueeze(-1), rows)).exp_()
                dvalues.add_(p.transpose(-2, -1) @ g)
                dscores = (g @ values.transpose(-2, -1)).sub_(_tile(delta.unsqueeze(-1), rows)).mul_(p)
                del p
                dkeys.add_(dscores.transpose(-2, -1) @ queries)
                part = dq[..., rows, :]
                part.add_((dscores @ keys).view(part.shape))
                del dscores
            dk[..., columns, :], dv[..., columns, :] = dkeys, dvalues
        return dq.mul_(scale).to(q.dtype), dk, dv, None, None


def _tiles(length: int, block: int, first: int = 0) -> list[slice]:
    """Neighbouring slices of `block`, the last one shorter, from the one that holds `first`."""
    return [slice(i, min(i + block, length)) for i in range(first // block * block, length, block)]


def _tile(x: Tensor, rows: slice) -> Tensor:
    """(B, K, G, T, C) -> (B, K, G*rows, C): the queries of a group ask the same keys, in one product."""
    return x[..., rows, :].flatten(2, 3)


def _put(x: Tensor, rows: slice, tile: Tensor) -> None:
    part = x[..., rows, :]
    part.copy_(tile.view(part.shape))


def _scores(queries: Tensor, keys: Tensor, rows: slice, columns: slice, causal: bool) -> Tensor:
    """One tile of Q K^T, (B, K, G*rows, columns); -inf where a query must not look."""
    scores = queries @ keys.transpose(-2, -1)
    if causal and columns.stop > rows.start + 1:
        row = torch.arange(rows.start, rows.stop, device=scores.device)
        column = torch.arange(columns.start, columns.stop, device=scores.device)
        grouped = scores.view(*scores.shape[:2], -1, len(row), len(column))
        grouped.masked_fill_(column > row[:, None], float("-inf"))
    return scores


def _groups(q: Tensor, k: Tensor) -> int:
    """How many query heads share a head of k."""
    if q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} query heads can't share {k.size(1)} key heads evenly")
    return q.size(1) // k.size(1)


# -- what it saves -----------------------------------------------------------------------------------------


def eager_bytes(
    tokens: int,
    head: int = 64,
    *,
    causal: bool = False,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    itemsize: int = 4,
) -> int:
    """Peak bytes of forward + backward of `eager`, T = S = tokens, beyond q, k, v and the output's gradient.

    In the backward: the weights, their gradient, the scores' gradient, the mask (1 byte); the gradient of v
    and the output, which the next layer holds. Where a group of heads shares k and v, also k's copy for each
    query head.
    """
    scores = batch * heads * tokens * tokens
    values = batch * heads * tokens * head
    copies = 0 if kv_heads in (None, heads) else values
    return (3 * scores + 2 * values + copies) * itemsize + (tokens * tokens if causal else 0)


def sdpa_bytes(
    tokens: int,
    head: int = 64,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    itemsize: int = 4,
) -> int:
    """The same of a fused kernel: output, three gradients, one fp32 number for each row. No workspace."""
    kv = kv_heads or heads
    return batch * tokens * (2 * (heads + kv) * head * itemsize + heads * 4)


def tiled_bytes(
    tokens: int,
    head: int = 64,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    itemsize: int = 4,
    block: int = 256,
) -> int:
    """The same of `tiled`: what `sdpa_bytes` counts, a second number for each row, and tiles.

    Tiles: two of scores, one of queries, the gradients of one of keys and values; 16-bit tensors and shared
    heads have more tiles copied, and the gradient of 16-bit queries is summed in fp32.
    """
    kv, block, wide = kv_heads or heads, min(block, tokens), max(itemsize, 4)
    low, shared = itemsize < wide, kv != heads
    rows = batch * heads * tokens
    kept = rows * head * itemsize + 2 * rows * wide + 2 * batch * kv * tokens * head * itemsize
    queries, keys = (batch * n * block * head * wide for n in (heads, kv))
    copies = queries + 2 * keys + (queries if low or shared else 0) + (2 * keys if low else 0)
    scores = 2 * batch * heads * block * block * wide + (batch * heads * block * wide if shared else 0)
    rounded = rows * head * itemsize if low else 0  # the queries' gradient once more, at the end
    return kept + rows * head * wide + copies + max(scores, rounded)
