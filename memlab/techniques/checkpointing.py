"""Activation checkpointing: keep a segment's input, throw the rest away, compute it again in the backward.

    x = run(blocks, x, every=8)                        # torch.utils.checkpoint on segments of 8 blocks
    x = run(blocks, x, every=8, checkpoint=recompute)  # the same from scratch

What it saves. With segments of k of the N blocks, the forward keeps N/k inputs, and the backward holds
what *one* segment saves at a time:

    peak = N/k * boundary + k * inside          bytes, smallest at k = sqrt(N * boundary / inside)

`boundary` is what enters a block, `inside` what the block saves for its backward. For layers that save one
tensor (inside = boundary) the best is 2 sqrt(N) instead of N, with sqrt(N) segments (Chen et al.,
arXiv:1604.06174); k = 1 saves nothing there. A transformer block saves some 20 tensors: there k = 1 does.

Measured on 64 layers of Linear + Tanh, frozen, in units of one activation: 65 without, 16 with segments of 8;
Linear + ReLU, trained, batch and output counted too: 67 and 18; segments of 1 or 64: what it was without.

`every=len(blocks)` is the whole model in one segment, `checkpoint(model, x)`: the forward keeps nothing, but
the backward begins by recomputing everything with everything saved. The peak is the plain one.

What it costs: one more forward, 1/3 of forward + backward. `Operators` counts it, without a clock.
What it can't keep equal: whatever a forward changes beside its output. BatchNorm updates its running
statistics twice. Random numbers are put back, so dropout is the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

__all__ = [
    "KEEP",
    "Operators",
    "best_every",
    "budgeted",
    "by_torch",
    "peak_bytes",
    "recompute",
    "run",
    "selective",
    "selective_by_hand",
]

Block = Callable[[Tensor], Tensor]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


# -- PyTorch's mechanism -----------------------------------------------------------------------------------


def by_torch(function: Block, x: Tensor, context_fn: Callable[[], Contexts] | None = None) -> Tensor:
    """`torch.utils.checkpoint.checkpoint(function, x)` as it must be called today.

    The default is still the reentrant form, which warns, and whose output needs no gradient when `x` needs
    none: then the parameters inside get none either.
    """
    more: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    out: Tensor = torch_checkpoint(function, x, use_reentrant=False, **more)
    return out


def run(
    blocks: Sequence[Block],
    x: Tensor,
    every: int | None = 1,
    checkpoint: Callable[[Block, Tensor], Tensor] = by_torch,
) -> Tensor:
    """x through all blocks, `every` blocks to a segment, each segment checkpointed.

    every: 1 is each block for itself, len(blocks) the whole model at once, None no checkpointing, and
        `best_every(...)` what gives the lowest peak.
    checkpoint: `by_torch`, `recompute`, `selective()`, or your own: (function, x) -> function(x).
    """
    if every is None:
        return chain(blocks, x)
    if every < 1:
        raise ValueError(f"a segment has at least one block, not {every}")
    for start in range(0, len(blocks), every):
        x = checkpoint(Segment(blocks[start : start + every]), x)
    return x


class Segment(nn.Module):
    """Some neighbouring blocks as one function, whose parameters can be asked for. Copies nothing."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.functions = list(blocks)
        for i, block in enumerate(self.functions):
            if isinstance(block, nn.Module):
                self.add_module(str(i), block)

    def forward(self, x: Tensor) -> Tensor:
        return chain(self.functions, x)


def chain(blocks: Iterable[Block], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


# -- from scratch ------------------------------------------------------------------------------------------


def recompute(function: Block, *inputs: Tensor, preserve_rng: bool = True) -> Tensor:
    """function(*inputs), of which the forward keeps the inputs alone: activation checkpointing in 30 lines.

    The parameters of `function` (an nn.Module) are handed to autograd as inputs too. So they get their
    gradients even when no input needs one, and `torch.autograd.grad` works: where the reentrant form of
    torch.utils.checkpoint fails. Plain functions of tensors have no parameters to be found.
    preserve_rng=False draws new random numbers in the second forward: with dropout the gradients are wrong.

    It holds two boundary tensors more than `by_torch`: a backward inside the backward keeps the segment's
    output and the gradient that came in until it ends. `by_torch` puts saved tensors back one by one.
    """
    parameters = (
        [p for p in function.parameters() if p.requires_grad] if isinstance(function, nn.Module) else []
    )
    out: Tensor = _Recompute.apply(  # type: ignore[no-untyped-call]
        function, preserve_rng, len(inputs), *inputs, *parameters
    )
    return out


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Block, preserve_rng: bool, n: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.n = function, n
        ctx.save_for_backward(*tensors)  # references: the parameters live anyway
        ctx.conditions = _conditions(tensors[0], preserve_rng)
        with torch.no_grad(), _uncached_autocast(tensors[0].device.type):
            return function(*tensors[:n])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, parameters = ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
        # detached: the second forward has a graph of its own, which begins here
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad(), ctx.conditions():
            out = ctx.function(*inputs)
        sources = [t for t in (*inputs, *parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(out, sources, gradient, allow_unused=True))
        return None, None, None, *(next(found) if t.requires_grad else None for t in (*inputs, *parameters))


def _conditions(x: Tensor, preserve_rng: bool) -> Callable[[], AbstractContextManager[None]]:
    """Remembers random states and autocast; what it returns is a context that brings them back."""
    kind = x.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    preserve_rng = preserve_rng and not is_fake(x)  # fake tensors draw nothing
    cpu = torch.get_rng_state() if preserve_rng else None
    cuda = torch.cuda.get_rng_state(x.device) if preserve_rng and x.is_cuda else None

    @contextmanager
    def again() -> Iterator[None]:
        with (
            torch.random.fork_rng([x.device] if cuda is not None else [], enabled=preserve_rng),
            nullcontext() if cast is None else torch.autocast(kind, cast),
        ):
            if cpu is not None:
                torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, x.device)
            yield

    return again


def _uncached_autocast(kind: str) -> AbstractContextManager[Any]:
    """Weight casts made without a graph must not stay in autocast's cache: a later layer would reuse them."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


# -- selective, by operator --------------------------------------------------------------------------------

#: What is worth keeping: outputs of linear layers and of fused attention, dear to compute for their size.
#: Not bmm, which is eager attention with its T x T scores (Korthikanti et al., arXiv:2205.05198, section 5).
KEEP = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def selective(keep: Sequence[Any] = KEEP) -> Callable[[Block, Tensor], Tensor]:
    """A checkpoint that keeps the outputs of the operators `keep` and recomputes the others: for `run`."""
    return partial(by_torch, context_fn=partial(create_selective_checkpoint_contexts, list(keep)))


def selective_by_hand(keep: Sequence[Any] = KEEP) -> Callable[[Block, Tensor], Tensor]:
    """The same from scratch: one dispatch mode notes what the forward computes, another reads it out."""

    def contexts() -> Contexts:
        kept: list[Any] = []
        return _Keep(keep, kept), _Reuse(keep, kept)

    return partial(by_torch, context_fn=contexts)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, keep: Sequence[Any], kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep, self.kept = frozenset(keep), kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.keep:
            # detached: the output itself would hold the graph, which holds this list
            kept = tree_map_only(Tensor, _detached, out)
            self.kept.append((kept, _versions(kept)))
        return out


class _Reuse(_Keep):  # type: ignore[no-untyped-call]
    """Operators come in the forward's order, so the first output kept is the next one asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.keep:
            return func(*args, **(kwargs or {}))
        out, versions = self.kept.pop(0)
        if versions != _versions(out):
            raise RuntimeError(
                f"a kept output of {func} was changed in place (ReLU(inplace=True)?): keep less"
            )
        return out


def _detached(x: Tensor) -> Tensor:
    # below autograd a detached tensor has a version counter of its own, unless this key is let through
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def _versions(value: Any) -> list[int]:
    return [t._version for t in tree_leaves(value) if isinstance(t, Tensor)]


# -- chosen by the compiler --------------------------------------------------------------------------------


def budgeted(function: Callable[..., Any], budget: float, backend: str = "aot_eager") -> Callable[..., Any]:
    """`function` compiled so that what it saves is `budget` (0 to 1) of what it would save: 1 keeps all.

    The partitioner looks for the cheapest operators to repeat: no segments to be chosen. 'aot_eager' needs
    no C++ compiler and fuses nothing. The first call takes seconds. It cuts what lives after the forward; at
    0 the backward recomputes everything first, as with `every=len(blocks)`, and the peak is the plain one.
    """
    if not 0 <= budget <= 1:
        raise ValueError(f"a budget is a share of the saved bytes, 0 to 1, not {budget}")
    compiled = torch.compile(function, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):  # read when the first call compiles
            return compiled(*args, **kwargs)

    return call


# -- what it saves and costs -------------------------------------------------------------------------------


def peak_bytes(layers: int, every: int | None, *, boundary: int, inside: int) -> int:
    """Peak activation bytes of `layers` equal layers in segments of `every` (None: no checkpointing).

    boundary: bytes that enter a layer; inside: bytes that one layer saves for its backward. Counted at the
    peak: the segments' inputs but for the batch, which is the caller's; what the segment in work saves; one
    gradient of the boundary's size. Not counted: what a layer's forward or backward needs for itself, the
    gradients of parameters. Exact for layers that save one tensor, within 3 % for segments of transformer
    blocks; an upper bound where a segment is so small that the parameters' gradients set the peak.
    """
    if every is None:
        return layers * inside + boundary
    every = min(every, layers)
    return math.ceil(layers / every) * boundary + every * inside


def best_every(layers: int, *, boundary: int = 1, inside: int = 1) -> int:
    """The segment length with the lowest `peak_bytes`; of equals the longest, which recomputes no more."""
    lengths = range(layers, 0, -1)
    return min(lengths, key=lambda k: peak_bytes(layers, k, boundary=boundary, inside=inside))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run: `forward`, `backward` and `recomputed`, each operator name -> calls.

        with Operators() as count:
            model(x).sum().backward()
        count.forward["addmm"], count.recomputed["addmm"]      # 64, 56

    Recomputed is what runs inside the backward with gradients enabled: autograd's own work runs without.
    (Compiled code and double backward know no such difference: all is `backward`.) Views aren't counted.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile does nothing inside the mode

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            inside_backward = torch._C._current_graph_task_id() != -1
            where = self.forward if not inside_backward else self.backward
            if inside_backward and torch.is_grad_enabled():
                where = self.recomputed
            where[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
