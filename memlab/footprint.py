"""What one training step holds, computed from named tensors. No torch, no tensor is made.

    print(footprint("gpt2", Recipe(micro_batch=4, sequence=512, precision="fp32")))

How it works. The models of `nets` are written down here a second time, as lists of operations with shapes: what each
one produces, what autograd saves of it and why, which gradients its backward makes. `_Machine` then walks through the
step as PyTorch does (forward, loss, backward in reverse, update), counts what is alive by the rule that a tensor lives
until its last user is done, and keeps the largest moment of every phase. So each byte of the answer belongs to a
tensor with a name, a shape and a reason; nothing is fitted. Equal blocks are walked once and multiplied.

Consumers, as the meter counts them: activations are what the forward leaves for the backward (saved tensors, logits,
the batch, autocast's saved copies of the weights) and what recomputation leaves; temporaries are all the rest that
isn't a parameter, gradient or optimizer state. Bytes are those of the tensors, not rounded as an allocator does.

Sources: PyTorch's derivatives.yaml (what is saved), torch.optim (what an update allocates), autocast's operator lists;
ZeRO: Rajbhandari et al., arXiv:1910.02054; tensor parallelism: Shoeybi et al., arXiv:1909.08053; selective
recomputation: Korthikanti et al., arXiv:2205.05198. `tests/memlab/test_footprint.py` compares with the trace.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from memlab import hardware, models
from memlab.hardware import GPU
from memlab.models import ConvConfig, ParameterSpec, TransformerConfig
from memlab.recipe import BLOCK_8BIT, MIN_8BIT, Recipe, StateTensor
from memlab.units import CONSUMERS, DTYPE_BYTES, PHASES, format_bytes, format_count, unknown_name

DEVICES = ("cpu", "cuda")


# -- the answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A named tensor of the step, or `count` equal ones ('blocks.*.…' stands for every block).

    `phases` are those in which it is alive; `why` says why it is kept.
    """

    name: str
    consumer: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    phases: tuple[str, ...]
    why: str

    @property
    def bytes(self) -> int:
        """All `count` together."""
        return self.count * math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Footprint:
    """Bytes of one training step, by consumer and by phase. All integers; see `includes`.

    consumers   {consumer: its own largest bytes in the step}; these moments differ, so they don't add up to the peak
    phases      {phase: {consumer: bytes, ..., 'total': bytes}} at the largest moment of that phase
    moments     {phase: what is happening then}
    host        {consumer: bytes kept in CPU memory or on NVMe instead} (offload)
    tensors     what the step keeps: parameters, gradients, optimizer states, activations saved for the backward,
                and the temporaries of the optimizer step
    """

    model: str
    recipe: Recipe
    device: str
    gpu: GPU | None
    parameter_count: int
    consumers: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    moments: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    includes: str
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_phase(self) -> str:
        """The phase of the peak; the earlier one of equals."""
        return max(PHASES, key=lambda phase: self.phases[phase]["total"])

    @property
    def peak_bytes(self) -> int:
        """The maximum over the phases: live tensor bytes, per GPU."""
        return self.phases[self.peak_phase]["total"]

    def consumers_at_peak(self) -> dict[str, int]:
        """{consumer: bytes} at the peak; these add up to `peak_bytes`."""
        return {name: self.phases[self.peak_phase][name] for name in CONSUMERS}

    def consumer_peaks(self) -> dict[str, int]:
        """{consumer: its own largest bytes in the step}."""
        return dict(self.consumers)

    def phase_peaks(self) -> dict[str, int]:
        """{phase: its largest live bytes}."""
        return {phase: self.phases[phase]["total"] for phase in PHASES}

    def of(self, consumer: str) -> list[Tensor]:
        """The tensors of one consumer, largest first."""
        if consumer not in CONSUMERS:
            raise unknown_name("consumer", consumer, CONSUMERS)
        return sorted((t for t in self.tensors if t.consumer == consumer), key=lambda t: -t.bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; every size an integer of bytes."""
        return {
            "model": self.model,
            "recipe": self.recipe.to_dict(),
            "device": self.device,
            "gpu": self.gpu.name if self.gpu else None,
            "parameter_count": self.parameter_count,
            "consumers": dict(self.consumers),
            "phases": {phase: dict(row) for phase, row in self.phases.items()},
            "moments": dict(self.moments),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "host": dict(self.host),
            "includes": self.includes,
            "tensors": [
                {
                    "name": t.name, "consumer": t.consumer, "shape": list(t.shape), "dtype": t.dtype,
                    "count": t.count, "bytes": t.bytes, "phases": list(t.phases), "why": t.why,
                }
                for t in self.tensors
            ],
        }  # fmt: skip

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        for name in (*CONSUMERS, "total"):
            cells = [format_bytes(self.phases[phase][name]) for phase in PHASES]
            own = "" if name == "total" else format_bytes(self.consumers[name])
            yield name.replace("_", " "), [*cells, own]

    def _heading(self) -> str:
        each = "" if self.recipe.world_size == 1 else " per GPU"
        return f"{self.model}: {format_count(self.parameter_count)} parameters, one training step{each}"

    def _verdict(self) -> str:
        text = f"peak {format_bytes(self.peak_bytes)}, in {self.peak_phase}: {self.moments[self.peak_phase]}"
        if self.gpu is not None:
            room = self.gpu.memory_bytes - self.peak_bytes
            fits = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
            text += f"\n{self.gpu.name} holds {format_bytes(self.gpu.memory_bytes)}: {fits}"
        if self.host:
            kept = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.host.items())
            text += f"\noutside the GPU: {kept}"
        return text

    def __str__(self) -> str:
        lines = [self._heading(), *self.recipe.describe().splitlines(), ""]
        lines.append(f"{'':<17}" + "".join(f"{word:>15}" for word in (*PHASES, "own largest")))
        lines += [f"{name:<17}" + "".join(f"{cell:>15}" for cell in cells) for name, cells in self._rows()]
        return "\n".join([*lines, "", self._verdict(), *_wrapped(self.includes)])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{word}</th>" for word in (*PHASES, "own largest"))
        body = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            + "".join(f"<td style='text-align:right'>{cell}</td>" for cell in cells)
            + "</tr>"
            for name, cells in self._rows()
        )
        recipe = html.escape(self.recipe.describe()).replace("\n", "<br>")
        verdict = html.escape(self._verdict()).replace("\n", "<br>")
        return (
            f"<div><b>{html.escape(self._heading())}</b><br>{recipe}<table><tr><th></th>{head}</tr>{body}</table>"
            f"{verdict}<br><small>{html.escape(self.includes)}</small></div>"
        )


def _wrapped(text: str, width: int = 80) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def footprint(
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe | None = None,
    gpu: str | GPU | None = None,
    *,
    device: str | None = None,
    **fields: Any,
) -> Footprint:
    """The memory of one training step, after the first (the optimizer has its states).

    `fields` are fields of a Recipe, given in place of one or to change one. `device` says whose kernels: 'cuda', or
    'cpu' to be compared with a step on the CPU; by default those of `gpu` if a card is named, else the CPU's. They
    differ in what they save: dropout masks (a byte on CUDA, a full element on the CPU), the softmax under autocast (fp32
    on CUDA), attention with dropout (the CPU's SDPA falls back to stored scores). With sharding all bytes are one
    GPU's.

    Raises UnknownNameError for a model or card, RecipeError for a recipe this model can't run.
    """
    config = models.model(model) if isinstance(model, str) else model
    recipe = recipe or Recipe()
    card = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
    recipe = (recipe.replace(**fields) if fields else recipe).resolve(config, card)
    device = device or ("cpu" if card is None else "cuda")
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    machine = _Machine(config, recipe, device)
    machine.run()
    return Footprint(
        model=config.name,
        recipe=recipe,
        device=device,
        gpu=card,
        parameter_count=config.parameter_count,
        consumers=machine.largest,
        phases={phase: {**row, "total": sum(row.values())} for phase, row in machine.peaks.items()},
        moments=machine.moments,
        tensors=tuple(machine.tensors()),
        includes=_includes(recipe, device),
        host=machine.host,
    )


def _includes(recipe: Recipe, device: str) -> str:
    kernels = "CUDA's" if device == "cuda" else "the CPU's"
    text = (
        f"Counts the live tensors of a step with {kernels} operators, unrounded; buffers count as parameters, the "
        "batch, the logits and autocast's saved weight copies as activations. Not in it: library workspaces, the "
        "allocator's cache, the driver's context"
    )
    if recipe.data_parallel > 1 or recipe.tensor_parallel > 1:
        text += ", communication buckets"
    return text + "."


# -- tensors and operations ---------------------------------------------------------------------------------


class _Store:
    """Memory of one tensor: alive while `refs` (users to come, saved by, held by) is above 0."""

    __slots__ = ("bytes", "consumer", "dtype", "name", "refs", "saved", "shape", "why")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        self.refs = 0
        self.saved = False
        self.consumer = "temporaries"
        self.why = ""


class _Value:
    """A tensor as an operation sees it: its own shape, and a store that it may share (views, in-place results)."""

    __slots__ = ("bytes", "dtype", "key", "shape", "store")

    def __init__(self, shape: tuple[int, ...], dtype: str, store: _Store, key: object = None) -> None:
        self.shape, self.dtype, self.store = shape, dtype, store
        self.bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        self.key = key or self  # whose gradient it is: a reshaped tensor has that of the original


@dataclass(slots=True, eq=False)
class _Op:
    """One operation. Backward: a new gradient for each of `grads`, unless `passes` (addition: the same one goes on).

    `slices`: the gradients are views of the incoming one (concatenation).
    `params`: (name, values) of the weights it gives gradients to, in `param_dtype`; `casts`: autocast's 16-bit copies.
    `linear`: what `selective` checkpointing keeps.
    """

    name: str
    ins: list[_Value]
    outs: list[_Value]
    saves: list[_Store]
    made: list[_Store]  # stores that begin here: results that aren't views, statistics, masks
    grads: list[_Value]
    passes: bool = False
    slices: bool = False
    scratch: int = 0  # bytes inside the forward
    back: int = 0  # bytes inside the backward
    params: list[tuple[str, int]] = field(default_factory=list)
    param_dtype: str = "fp32"
    casts: list[_Store] = field(default_factory=list)
    linear: bool = False


@dataclass(slots=True, eq=False)
class _Unit:
    """A run of operations that is checkpointed as a whole or not at all; `times` equal ones stand in a row."""

    label: str
    ops: list[_Op]
    entry: _Value | None
    exit: _Value
    times: int = 1
    blocks: int = 1  # that it consists of
    checkpointed: bool = False
    held: list[_Store] = field(default_factory=list)  # other arguments that a checkpoint keeps


class _Tape:
    """Writes down operations with their shapes, in the dtypes that the recipe's precision gives them."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.recipe, self.device = recipe, device
        self.compute, self.stored = recipe.compute_dtype, recipe.parameter_dtype
        self.cuda = device == "cuda"
        self.ops: list[_Op] = []
        self.where = ""

    def store(self, name: str, shape: tuple[int, ...], dtype: str) -> _Store:
        return _Store(f"{self.where}{name}", shape, dtype)

    def op(
        self,
        name: str,
        ins: Sequence[_Value],
        shape: tuple[int, ...],
        dtype: str,
        *,
        saves: Sequence[_Value | _Store] = (),
        result: bool = False,
        extra: Sequence[_Store] = (),
        inplace: _Value | None = None,
        why: str = "",
        **rest: Any,
    ) -> _Value:
        """Append an operation with one result. It saves `saves`, its result if `result`, and `extra`, which it makes."""
        store = inplace.store if inplace else self.store(name, shape, dtype)
        out = _Value(shape, dtype, store)
        kept = [s.store if isinstance(s, _Value) else s for s in saves]
        if result:
            kept.append(store)
        kept += extra
        for one in kept:
            one.saved = True
            one.why = one.why or why or f"{name}: its backward needs it"
        made = [*extra] if inplace else [store, *extra]
        grads = rest.pop("grads", list(ins))
        self.ops.append(_Op(self.where + name, list(ins), [out], kept, made, list(grads), **rest))
        return out

    def view(self, x: _Value, shape: tuple[int, ...]) -> _Value:
        """The same tensor under another shape: nothing is made, nor is its gradient."""
        return _Value(shape, x.dtype, x.store, x.key)

    def make(self, stores: list[_Store], name: str) -> None:
        """Constants of a block, without a gradient."""
        self.ops.append(_Op(self.where + name, [], [], [], stores, []))

    def keep(self, x: _Value) -> None:
        """The variable that holds `x` is replaced only by the last operation's result: `x` lives till then."""
        self.ops[-1].ins.append(x)

    def unit(self, label: str, entry: _Value | None, exit: _Value, **rest: Any) -> _Unit:
        ops, self.ops = self.ops, []
        return _Unit(label, ops, entry, exit, **rest)

    # operations that several models use

    def cast(self, x: _Value, dtype: str, name: str) -> _Value:
        if x.dtype == dtype:
            return x
        return self.op(name, [x], x.shape, dtype)

    def autocast(self, x: _Value, name: str) -> _Value:
        """What a linear layer or convolution reads: a 16-bit copy under autocast."""
        return self.cast(x, self.compute, f"{name} input in {self.compute}")

    def weights(
        self, op: dict[str, Any], name: str, weight: tuple[int, ...], bias: tuple[int, ...] | None
    ) -> None:
        """Parameters of a matrix product: their gradients, and autocast's copies of them."""
        names = [("weight", weight)] + ([("bias", bias)] if bias else [])
        op["params"] = [(f"{self.where}{name}.{kind}", math.prod(shape)) for kind, shape in names]
        op["param_dtype"] = self.compute
        if self.compute != self.stored and not streams(self.recipe):
            op["casts"] = [
                self.store(f"{name}.{kind} in {self.compute}", s, self.compute) for kind, s in names
            ]

    def linear(self, x: _Value, out: int, name: str, bias: bool = True) -> _Value:
        x = self.autocast(x, name)
        rest: dict[str, Any] = {"linear": True}
        self.weights(rest, name, (out, x.shape[-1]), (out,) if bias else None)
        return self._product(x, (*x.shape[:-1], out), name, rest)

    def conv(
        self, x: _Value, shape: tuple[int, ...], name: str, weight: tuple[int, ...], bias: bool
    ) -> _Value:
        rest: dict[str, Any] = {"grads": []} if x.store.name == "images" else {}
        x = self.autocast(x, name)
        self.weights(rest, name, weight, (weight[0],) if bias else None)
        return self._product(x, shape, name, rest)

    def _product(self, x: _Value, shape: tuple[int, ...], name: str, rest: dict[str, Any]) -> _Value:
        kept: list[_Value | _Store] = [x]
        if rest.get("casts"):
            kept.append(rest["casts"][0])
            rest["casts"][0].why = f"{name}: the gradient of its input needs the weight that was used"
        return self.op(
            f"{name} output", [x], shape, self.compute, saves=kept,
            why=f"{name}: the gradient of its weight needs its input", **rest,
        )  # fmt: skip

    def layernorm(self, x: _Value, name: str) -> _Value:
        statistic = "fp32" if self.cuda else x.dtype
        rows = (*x.shape[:-1], 1)
        extra = [self.store(f"{name} {what}", rows, statistic) for what in ("mean", "rstd")]
        width = x.shape[-1]
        return self.op(
            f"{name} output", [x], x.shape, x.dtype, saves=[x], extra=extra, param_dtype=self.stored,
            params=[(f"{self.where}{name}.weight", width), (f"{self.where}{name}.bias", width)],
            why=f"{name}: its backward needs its input and its statistics",
        )  # fmt: skip

    def rmsnorm(self, x: _Value, name: str) -> _Value:
        """Written out, in fp32: x, 1/rms and the normalized value are saved."""
        x32 = self.cast(x, "fp32", f"{name} input in fp32")
        rows = (*x.shape[:-1], 1)
        rms = self.op(
            f"{name} 1/rms", [x32], rows, "fp32", saves=[x32], result=True, scratch=x32.bytes, back=x32.bytes
        )
        normal = self.op(f"{name} normalized", [x32, rms], x.shape, "fp32", saves=[x32, rms], back=x32.bytes)
        normal = self.cast(normal, x.dtype, f"{name} normalized in {x.dtype}")
        return self.op(
            f"{name} output", [normal], x.shape, x.dtype, saves=[normal], back=normal.bytes,
            params=[(f"{self.where}{name}.weight", x.shape[-1])], param_dtype=self.stored,
            why=f"{name}: the gradient of its weight needs the normalized input",
        )  # fmt: skip

    def dropout(self, x: _Value, name: str) -> _Value:
        if self.recipe.dropout == 0:
            return x
        mask = self.store(f"{name} dropout mask", x.shape, "bool" if self.cuda else x.dtype)
        return self.op(
            f"{name} after dropout", [x], x.shape, x.dtype, extra=[mask], why="dropout: which were kept"
        )

    def add(self, x: _Value, y: _Value, name: str, inplace: bool = False) -> _Value:
        """The wider dtype wins. Nothing is saved, and both sides get the same gradient (summed or cast if need be)."""
        dtype = "fp32" if "fp32" in (x.dtype, y.dtype) else x.dtype
        return self.op(name, [x, y], x.shape, dtype, passes=True, inplace=x if inplace else None)

    def copy(self, x: _Value, name: str, shape: tuple[int, ...] | None = None) -> _Value:
        return self.op(name, [x], shape or x.shape, x.dtype, passes=True)

    def split(self, x: _Value, parts: int, name: str) -> list[_Value]:
        """Equal views along the last axis; backward puts their gradients together in a new tensor."""
        shape = (*x.shape[:-1], x.shape[-1] // parts)
        outs = [_Value(shape, x.dtype, x.store) for _ in range(parts)]
        self.ops.append(_Op(self.where + name, [x], outs, [], [], [x]))
        return outs

    def relu(self, x: _Value, name: str) -> _Value:
        why = "relu: its backward needs its result"
        return self.op(f"{name} after relu", [x], x.shape, x.dtype, inplace=x, result=True, why=why)

    # attention

    def attention(self, q: _Value, k: _Value, v: _Value, heads: int, causal: _Store | None) -> _Value:
        """q, k, v (B, T, heads * D) of `heads` and fewer heads -> (B, T, heads * D)."""
        r = self.recipe
        if k.bytes < q.bytes and (r.attention == "eager" or q.dtype == "fp32"):
            k, v = (self._repeat(x, q, name) for x, name in ((k, "keys"), (v, "values")))
        batch, tokens, width = q.shape
        scores = (batch, heads, tokens, tokens)
        if r.attention == "eager":
            return self._eager(q, k, v, scores, causal)
        if r.dropout > 0 and not self.cuda:
            return self._math(q, k, v, scores)
        lse = self.store("attn log-sum-exp", (batch, heads, tokens), "fp32")
        back = 0
        if self.cuda and q.dtype != "fp32":
            # flash_attn's mha_bwd: an fp32 accumulator for dQ, a row sum; dK and dV of all heads if they are shared
            back = batch * tokens * (width + heads) * 4 + (2 * q.bytes if k.bytes < q.bytes else 0)
        return self.op(
            "attn output", [q, k, v], q.shape, q.dtype, saves=[q, k, v], result=True, extra=[lse], back=back,
            linear=True, why="fused attention: its backward computes the scores again from these",
        )  # fmt: skip

    def _repeat(self, x: _Value, like: _Value, name: str) -> _Value:
        return self.op(f"{name} repeated for every head", [x], like.shape, x.dtype)

    def _per_head(self, x: _Value, name: str, repeated: bool) -> _Value:
        """Batched products want (B * heads, ...) in one piece: a copy, unless B is 1 or it lies so already."""
        return x if x.shape[0] == 1 or repeated else self.copy(x, f"{name} copied per head")

    def _eager(
        self, q: _Value, k: _Value, v: _Value, scores: tuple[int, ...], causal: _Store | None
    ) -> _Value:
        repeated = "repeated" in k.store.name
        shape, dtype = q.shape, q.dtype
        q = self._per_head(q, "queries", False)
        k = self._per_head(k, "keys", repeated)
        why = "matrix product: each factor's gradient needs the other"
        x = self.op("scores", [q, k], scores, dtype, saves=[q, k], why=why)
        x = self.op("scaled scores", [x], scores, dtype)
        if causal is not None:
            x = self.op("masked scores", [x], scores, dtype, saves=[causal])
        if self.cuda and self.recipe.autocast:
            x = self.cast(x, "fp32", "scores in fp32")
        # CUDA's softmax backward multiplies gradient and result first (aten/native/cuda/SoftMax.cu)
        back = math.prod(scores) * DTYPE_BYTES[x.dtype] if self.cuda else 0
        why_softmax = "softmax: its backward needs its result"
        x = self.op("attention weights", [x], scores, x.dtype, result=True, back=back, why=why_softmax)
        x = self.dropout(x, "attention weights")
        x = self.cast(x, dtype, f"attention weights in {dtype}")
        v = self._per_head(v, "values", repeated)
        x = self.op("attn output per head", [x, v], shape, dtype, saves=[x, v], why=why)
        return self.copy(x, "attn output")

    def _math(self, q: _Value, k: _Value, v: _Value, scores: tuple[int, ...]) -> _Value:
        """What the CPU's SDPA does with dropout: the scores are stored, in fp32."""
        shape, dtype = q.shape, q.dtype
        q, k, v = (
            self.cast(x, "fp32", f"{n} in fp32") for x, n in ((q, "queries"), (k, "keys"), (v, "values"))
        )
        q, k = (self.op(f"{n} scaled", [x], x.shape, "fp32") for x, n in ((q, "queries"), (k, "keys")))
        q, k = self._per_head(q, "queries", False), self._per_head(k, "keys", False)
        why = "matrix product: each factor's gradient needs the other"
        x = self.op("scores", [q, k], scores, "fp32", saves=[q, k], why=why)
        x = self.op(
            "attention weights",
            [x],
            scores,
            "fp32",
            result=True,
            why="softmax: its backward needs its result",
        )
        x = self.dropout(x, "attention weights")
        v = self._per_head(v, "values", False)
        x = self.op("attn output per head", [x, v], shape, "fp32", saves=[x, v], why=why)
        return self.copy(self.cast(x, dtype, f"attn output in {dtype}"), "attn output")

    # the loss

    def loss(self, logits: _Value) -> _Unit:
        """Cross entropy in fp32 over (N, classes)."""
        self.where = "loss."
        fp32 = x = self.cast(logits, "fp32", "logits in fp32")
        x = self.op(
            "log-softmax", [x], x.shape, "fp32", result=True, why="log-softmax: its backward needs it"
        )
        weight = self.store("total weight", (), "fp32")
        loss = self.op("mean", [x], (), "fp32", saves=[x], extra=[weight])
        self.keep(fp32)
        loss.store.saved, loss.store.why = True, "the script's variable `loss`"
        return self.unit("loss", logits, loss)


# -- the models as operations ----------------------------------------------------------------------------------


def streams(recipe: Recipe) -> bool:
    """Are whole weights on the GPU only while a block uses them (ZeRO-3, offloaded parameters)?"""
    return recipe.zero_stage == 3 or recipe.offloaded("parameters") is not None


class _Program:
    """A model's units in forward order, its logits, and tensors that belong to the whole forward."""

    def __init__(self, config: TransformerConfig | ConvConfig, recipe: Recipe, device: str) -> None:
        self.config, self.recipe = config, recipe
        self.tape = _Tape(recipe, device)
        self.units: list[_Unit] = []
        self.batch: list[_Store] = []
        self.shared: list[_Store] = []  # angles and mask: made once per forward
        if isinstance(config, TransformerConfig):
            self._transformer(config)
        else:
            self._convnet(config)

    def _append(self, label: str, entry: _Value | None, exit: _Value, **rest: Any) -> _Value:
        self.units.append(self.tape.unit(label, entry, exit, **rest))
        return exit

    def _finish(self, logits: _Value) -> None:
        logits.store.saved, logits.store.why = True, "the script's variable `logits`"
        self.logits = logits.store
        self.seed = _Store("gradient of the loss", (), "fp32")
        self.seed.why = "where backward starts: 1"
        self.units.append(self.tape.loss(logits))

    # transformers

    def _transformer(self, c: TransformerConfig) -> None:
        r, tape = self.recipe, self.tape
        batch, tokens, share = r.micro_batch, r.sequence or c.context, r.tensor_parallel
        self.rows = (batch, tokens)
        self.width, self.kv_width = c.heads * c.head_dim // share, c.kv_heads * c.head_dim // share
        self.heads, self.ffn, self.vocab = c.heads // share, c.ffn // share, math.ceil(c.vocab / share)
        self.batch = [_Store("tokens", self.rows, "int64")]
        targets = (batch,) if c.family == "bert" else self.rows
        self.batch.append(_Store("targets", targets, "int64"))
        self.angles: list[_Store] = []
        self.mask = None
        if c.positions == "rope":
            self.angles = [_Store(f"rope {f}", (tokens, c.head_dim), "fp32") for f in ("cos", "sin")]
        if r.attention == "eager" and c.causal:
            self.mask = _Store("causal mask", (tokens, tokens), "bool")
        self.shared = [*self.angles, *([self.mask] if self.mask else [])]

        x = self._append("embed", None, self._embed(c))
        for count, times in _repeats(c.layers, r):
            x = self._segment(c, x, count, times)
        tape.where = ""
        if c.family == "bert":
            first = tape.op("first token", [x], (batch, c.hidden), x.dtype, passes=True, inplace=x)
            y = tape.linear(first, c.hidden, "pooler")
            logits = tape.op(
                "pooled", [y], y.shape, y.dtype, result=True, why="tanh: its backward needs its result"
            )
        else:
            y = tape.layernorm(x, "norm") if c.norm == "layernorm" else tape.rmsnorm(x, "norm")
            name = "embed.token" if c.tied else "head"
            logits = tape.linear(y, self.vocab, name, bias=False)
            logits.store.name = "logits"
        self._finish(self._append("head", x, logits))

    def _embed(self, c: TransformerConfig) -> _Value:
        tape, h = self.tape, c.hidden
        tape.where = "embed."

        def look_up(name: str, table: int, rows: tuple[int, ...], index: _Store | None) -> _Value:
            saves: list[_Value | _Store] = [self.batch[0]] if index is None else []
            return tape.op(
                f"{name} output", [], (*rows, h), tape.stored, saves=saves, extra=[index] if index else [],
                params=[(f"embed.{name}.weight", table * h)], param_dtype=tape.stored,
                why="embedding: its backward needs the indices",
            )  # fmt: skip

        x = look_up("token", self.vocab, self.rows, None)
        if c.positions == "learned":
            index = tape.store("positions", self.rows[1:], "int64")
            x = tape.add(x, look_up("position", c.context, self.rows[1:], index), "token + position")
        if c.type_vocab:
            index = tape.store("types", self.rows, "int64")
            x = tape.add(x, look_up("type", c.type_vocab, self.rows, index), "token + position + type")
        if c.family == "bert":
            x = tape.layernorm(x, "norm")
        return tape.dropout(x, "embedding")

    def _segment(self, c: TransformerConfig, x: _Value, count: int, times: int) -> _Value:
        """`count` blocks that are checkpointed together (or 1 of them), standing for `times` such segments."""
        entry = x
        self.tape.where = "blocks.*."
        angles = self.angles
        for _ in range(count):
            x = {"gpt2": self._gpt2, "bert": self._bert, "llama": self._llama}[c.family](c, x, angles)
        checkpointed = self.recipe.checkpointing != "none"
        held = self.shared if checkpointed else []
        return self._append(
            "block", entry, x, times=times, blocks=count, checkpointed=checkpointed, held=held
        )

    def _mlp(self, x: _Value, h: int) -> _Value:
        tape = self.tape
        x = tape.linear(x, self.ffn, "mlp.up")
        x = tape.op("gelu", [x], x.shape, x.dtype, saves=[x], why="gelu: its backward needs its input")
        return tape.linear(x, h, "mlp.down")

    def _gpt2(self, c: TransformerConfig, x: _Value, angles: object) -> _Value:
        tape = self.tape
        y = tape.linear(tape.layernorm(x, "norm1"), 3 * self.width, "attn.qkv")
        q, k, v = tape.split(y, 3, "queries, keys, values")
        y = tape.linear(tape.attention(q, k, v, self.heads, self.mask), c.hidden, "attn.out")
        x = tape.add(x, tape.dropout(y, "attn.out"), "residual 1")
        y = tape.dropout(self._mlp(tape.layernorm(x, "norm2"), c.hidden), "mlp.down")
        return tape.add(x, y, "residual 2")

    def _bert(self, c: TransformerConfig, x: _Value, angles: object) -> _Value:
        tape = self.tape
        q, k, v = (tape.linear(x, self.width, f"attn.{name}") for name in ("query", "key", "value"))
        y = tape.linear(tape.attention(q, k, v, self.heads, None), c.hidden, "attn.out")
        x = tape.layernorm(tape.add(x, tape.dropout(y, "attn.out"), "residual 1"), "norm1")
        y = tape.dropout(self._mlp(x, c.hidden), "mlp.down")
        return tape.layernorm(tape.add(x, y, "residual 2"), "norm2")

    def _llama(self, c: TransformerConfig, x: _Value, angles: Sequence[_Store]) -> _Value:
        tape = self.tape
        y = tape.rmsnorm(x, "norm1")
        q = tape.linear(y, self.width, "attn.query", c.qkv_bias)
        k, v = (tape.linear(y, self.kv_width, f"attn.{name}", c.qkv_bias) for name in ("key", "value"))
        if q.dtype != "fp32":
            angles = [tape.store(f"{angle.name} in {q.dtype}", angle.shape, q.dtype) for angle in angles]
            tape.make(angles, "rotary angles")
        q, k = self._rotate(q, angles, "queries"), self._rotate(k, angles, "keys")
        y = tape.linear(tape.attention(q, k, v, self.heads, self.mask), c.hidden, "attn.out", bias=False)
        x = tape.add(x, y, "residual 1")
        y = tape.rmsnorm(x, "norm2")
        gate = tape.linear(y, self.ffn, "mlp.gate", bias=False)
        gate = tape.op(
            "silu", [gate], gate.shape, gate.dtype, saves=[gate], why="silu: its backward needs its input"
        )
        up = tape.linear(y, self.ffn, "mlp.up", bias=False)
        why = "product: each factor's gradient needs the other"
        y = tape.op("silu(gate) * up", [gate, up], up.shape, up.dtype, saves=[gate, up], why=why)
        return tape.add(x, tape.linear(y, c.hidden, "mlp.down", bias=False), "residual 2")

    def _rotate(self, x: _Value, angles: Sequence[_Store], name: str) -> _Value:
        tape = self.tape
        cos, sin = angles
        why = "rotary positions: the gradient of queries and keys needs the angles"
        half = (*x.shape[:-1], x.shape[-1] // 2)
        straight = tape.op(f"{name} * cos", [x], x.shape, x.dtype, saves=[cos], why=why)
        low, high = tape.split(x, 2, f"halves of {name}")
        high = tape.op(f"second half of -{name}", [high], half, x.dtype)
        turned = _Value(x.shape, x.dtype, tape.store(f"{name} turned", x.shape, x.dtype))
        tape.ops.append(
            _Op(
                tape.where + turned.store.name,
                [high, low],
                [turned],
                [],
                [turned.store],
                [high, low],
                slices=True,
            )
        )
        turned = tape.op(f"{name} turned * sin", [turned], x.shape, x.dtype, saves=[sin], why=why)
        return tape.add(straight, turned, f"{name} with positions")

    # convolutional networks

    def _convnet(self, c: ConvConfig) -> None:
        r = self.recipe
        size = r.image or c.image
        images = _Store("images", (r.micro_batch, c.channels, size, size), r.parameter_dtype)
        self.batch = [images, _Store("targets", (r.micro_batch,), "int64")]
        x = _Value(images.shape, images.dtype, images)
        walk = {"lenet": self._lenet, "alexnet": self._alexnet, "vgg": self._vgg,
                "resnet": self._resnet, "densenet": self._densenet}[c.family]  # fmt: skip
        self._finish(walk(c, x))

    def _conv(
        self,
        x: _Value,
        out: int,
        kernel: int,
        name: str,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
    ) -> _Value:
        batch, inside, rows, columns = x.shape
        size = [(n + 2 * padding - kernel) // stride + 1 for n in (rows, columns)]
        return self.tape.conv(x, (batch, out, *size), name, (out, inside, kernel, kernel), bias)

    def _norm(self, x: _Value, name: str) -> _Value:
        tape, width = self.tape, x.shape[1]
        extra = [tape.store(f"{name} {what}", (width,), "fp32") for what in ("mean", "1/std")]
        if tape.stored != "fp32":
            extra += [tape.store(f"{name}.weight in fp32", (width,), "fp32")]
        return tape.op(
            f"{name} output", [x], x.shape, x.dtype, saves=[x], extra=extra, param_dtype=tape.stored,
            params=[(f"{tape.where}{name}.weight", width), (f"{tape.where}{name}.bias", width)],
            why=f"{name}: its backward needs its input and its statistics",
        )  # fmt: skip

    def _pool(self, x: _Value, kind: str, kernel: int, stride: int, padding: int = 0) -> _Value:
        batch, width, rows, columns = x.shape
        shape = (batch, width, *((n + 2 * padding - kernel) // stride + 1 for n in (rows, columns)))
        name = f"{kind} pooling"
        extra = [self.tape.store(f"{name} indices", shape, "int64")] if kind == "max" else []
        return self.tape.op(f"{name} output", [x], shape, x.dtype, saves=[x], extra=extra)

    def _adaptive(self, x: _Value, size: int) -> _Value:
        return self.tape.op("adaptive pooling output", [x], (*x.shape[:2], size, size), x.dtype, saves=[x])

    def _global(self, x: _Value) -> _Value:
        """A mean over all pixels: saves nothing, its gradient is as large as its input."""
        return self.tape.op("mean over pixels", [x], x.shape[:2], x.dtype)

    def _tanh(self, x: _Value, name: str) -> _Value:
        why = "tanh: its backward needs its result"
        return self.tape.op(f"{name} after tanh", [x], x.shape, x.dtype, result=True, why=why)

    def _flat(self, x: _Value) -> _Value:
        return self.tape.view(x, (x.shape[0], math.prod(x.shape[1:])))

    def _lenet(self, c: ConvConfig, x: _Value) -> _Value:
        tape, entry = self.tape, x
        for i, (_, out, kernel) in enumerate(c.conv_shapes()):
            x = self._tanh(self._conv(x, out, kernel, f"convs.{i}", bias=True), f"convs.{i}")
            x = self._pool(x, "average", 2, 2)
        x = self._flat(x)
        for i, out in enumerate(c.fcs):
            x = self._tanh(tape.linear(x, out, f"fcs.{i}"), f"fcs.{i}")
        return self._append("all", entry, tape.linear(x, c.classes, f"fcs.{len(c.fcs)}"))

    def _alexnet(self, c: ConvConfig, x: _Value) -> _Value:
        tape, entry = self.tape, x
        for i, (_, out, kernel) in enumerate(c.conv_shapes()):
            stride, padding = (4, 2) if i == 0 else (1, kernel // 2)
            x = tape.relu(self._conv(x, out, kernel, f"convs.{i}", stride, padding, bias=True), f"convs.{i}")
            if i in (0, 1, 4):
                x = self._pool(x, "max", 3, 2)
        x = self._flat(self._adaptive(x, c.pooled))
        for i, out in enumerate(c.fcs):
            x = tape.relu(tape.linear(tape.dropout(x, f"fcs.{i} input"), out, f"fcs.{i}"), f"fcs.{i}")
        return self._append("all", entry, tape.linear(x, c.classes, f"fcs.{len(c.fcs)}"))

    def _vgg(self, c: ConvConfig, x: _Value) -> _Value:
        tape, i = self.tape, 0
        for count, group in _groups(c.depths, self.recipe):
            entry = x
            for stage in range(group, group + count):
                for _ in range(c.depths[stage]):
                    x = self._conv(x, c.widths[stage], 3, f"convs.{i}", padding=1, bias=True)
                    x = tape.relu(x, f"convs.{i}")
                    i += 1
                x = self._pool(x, "max", 2, 2)
            x = self._append("stage", entry, x, checkpointed=self.recipe.checkpointing != "none")
        entry = x
        x = self._flat(self._adaptive(x, c.pooled))
        for i, out in enumerate(c.fcs):
            x = tape.dropout(tape.relu(tape.linear(x, out, f"fcs.{i}"), f"fcs.{i}"), f"fcs.{i}")
        return self._append("classifier", entry, tape.linear(x, c.classes, f"fcs.{len(c.fcs)}"))

    def _stem(self, c: ConvConfig, x: _Value) -> _Value:
        self.tape.where = "stem."
        entry = x
        x = self.tape.relu(self._norm(self._conv(x, c.widths[0], 7, "conv", 2, 3), "norm"), "norm")
        return self._append("stem", entry, self._pool(x, "max", 3, 2, 1))

    def _resnet(self, c: ConvConfig, x: _Value) -> _Value:
        tape = self.tape
        x = self._stem(c, x)
        blocks = [(s, b) for s, depth in enumerate(c.depths) for b in range(depth)]
        for count, start in _groups(blocks, self.recipe):
            entry = x
            for s, b in blocks[start : start + count]:
                tape.where = f"stages.{s}.{b}."
                x = self._bottleneck(x, c.widths[s], 2 if s > 0 and b == 0 else 1, b == 0)
            x = self._append("block", entry, x, checkpointed=self.recipe.checkpointing != "none")
        tape.where, entry = "", x
        return self._append("head", entry, tape.linear(self._global(x), c.classes, "fc"))

    def _bottleneck(self, x: _Value, width: int, stride: int, first: bool) -> _Value:
        tape = self.tape
        y = tape.relu(self._norm(self._conv(x, width, 1, "conv1"), "norm1"), "norm1")
        y1, y = y, self._norm(self._conv(y, width, 3, "conv2", stride, 1), "norm2")
        tape.keep(y1)
        y2 = tape.relu(y, "norm2")
        y = self._norm(self._conv(y2, 4 * width, 1, "conv3"), "norm3")
        tape.keep(y2)
        if first:
            x = self._norm(self._conv(x, 4 * width, 1, "shortcut.conv", stride), "shortcut.norm")
        return tape.relu(tape.add(y, x, "residual", inplace=True), "block")

    def _densenet(self, c: ConvConfig, x: _Value) -> _Value:
        tape = self.tape
        x = self._stem(c, x)
        for s, depth in enumerate(c.depths):
            for count, start in _groups(range(depth), self.recipe):
                entry = x
                for b in range(start, start + count):
                    tape.where = f"stages.{s}.{b}."
                    x = self._dense(x, c.growth)
                x = self._append("block", entry, x, checkpointed=self.recipe.checkpointing != "none")
            if s < len(c.depths) - 1:
                tape.where, entry = f"transitions.{s}.", x
                y = self._conv(tape.relu(self._norm(x, "norm"), "norm"), x.shape[1] // 2, 1, "conv")
                x = self._append("transition", entry, self._pool(y, "average", 2, 2))
        tape.where, entry = "", x
        y = self._global(tape.relu(self._norm(x, "norm"), "norm"))
        return self._append("head", entry, tape.linear(y, c.classes, "fc"))

    def _dense(self, x: _Value, growth: int) -> _Value:
        tape = self.tape
        y = self._conv(tape.relu(self._norm(x, "norm1"), "norm1"), 4 * growth, 1, "conv1")
        y1, y = y, self._conv(tape.relu(self._norm(y, "norm2"), "norm2"), growth, 3, "conv2", padding=1)
        tape.keep(y1)
        shape = (x.shape[0], x.shape[1] + growth, *x.shape[2:])
        return tape.op("all channels", [x, y], shape, x.dtype, slices=True)


def _repeats(layers: int, recipe: Recipe) -> list[tuple[int, int]]:
    """(blocks of a segment, how many such segments it stands for) in forward order.

    The second segment stands for all in the middle: first and last are walked on their own, since live bytes change
    from one equal segment to the next by an equal amount, so that the largest moment is at one of the ends.
    """
    every = recipe.checkpoint_every or 1
    whole, rest = divmod(layers, every)
    segments = [(every, 1)] * whole if whole <= 3 else [(every, 1), (every, whole - 2), (every, 1)]
    return segments + ([(rest, 1)] if rest else [])


def _groups(blocks: Sequence[Any], recipe: Recipe) -> Iterator[tuple[int, int]]:
    """(count, start) of each run of blocks that is checkpointed together."""
    every = recipe.checkpoint_every or 1
    for start in range(0, len(blocks), every):
        yield min(every, len(blocks) - start), start


# -- walking through the step ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Gradient:
    """A gradient while backward runs; `refs` operations are still to read it."""

    bytes: int
    refs: int = 1


class _Machine:
    """Counts what is alive, operation by operation, and keeps the largest moment of each phase."""

    def __init__(self, config: TransformerConfig | ConvConfig, recipe: Recipe, device: str) -> None:
        self.config, self.recipe, self.device = config, recipe, device
        self.program = _Program(config, recipe, device)
        self.specs = [_on_rank(spec, recipe.tensor_parallel) for spec in config.parameters()]
        self.live = dict.fromkeys(CONSUMERS, 0)
        self.largest = dict.fromkeys(CONSUMERS, 0)
        self.total = 0
        self.phase, self.now = "", ""
        self.tops = {"": 0}
        self.peaks: dict[str, dict[str, int]] = {}
        self.moments: dict[str, str] = {}
        self.host: dict[str, int] = {}

        units = self.program.units
        self.saved: list[tuple[_Store, int]] = []  # what the forward leaves, and how often
        self.extra = [0] * len(units)  # activations of the equal units that a unit stands for
        self.moved = [0] * len(units)  # activations of a unit that wait outside the GPU
        self.root = 0  # whole weights outside the blocks, where weights are streamed
        self.cached: list[_Store] = []  # autocast's copies of the weights, and those of the equal units
        self.cached_extra = 0
        self.pending: dict[object, _Gradient] = {}  # value -> its gradient
        self.tied = 0  # the head's gradient of a tied embedding, until the embedding's own is added
        self.whole: list[tuple[int, int]] = []  # (bytes, values) of gradients not scattered or moved out yet

        self.streams = streams(recipe)
        self.scatters = recipe.zero_stage >= 2 or recipe.offloaded("gradients") is not None
        self.have_gradients = not recipe.set_to_none
        self.gradient_size = DTYPE_BYTES[recipe.gradient_dtype]

    # what is alive

    def take(self, consumer: str, size: int) -> None:
        self.live[consumer] += size
        self.total += size
        if self.live[consumer] > self.largest[consumer]:
            self.largest[consumer] = self.live[consumer]
        if self.total > self.tops[self.phase]:
            self._note()

    def give(self, consumer: str, size: int) -> None:
        self.live[consumer] -= size
        self.total -= size

    def briefly(self, size: int) -> None:
        self.take("temporaries", size)
        self.give("temporaries", size)

    def hold(self, store: _Store, consumer: str) -> None:
        store.consumer = consumer
        self.take(consumer, store.bytes)

    def release(self, store: _Store) -> None:
        store.refs -= 1
        if store.refs == 0:
            self.give(store.consumer, store.bytes)

    def _begin(self, phase: str) -> None:
        self.phase, self.now = phase, "its beginning"
        if self.total > self.tops.setdefault(phase, 0):
            self._note()

    def _note(self) -> None:
        self.tops[self.phase] = self.total
        self.peaks[self.phase] = dict(self.live)
        self.moments[self.phase] = self.now

    # the step

    def run(self) -> None:
        self._settle()
        turns = min(self.recipe.accumulation, 2)  # the third micro-batch is like the second
        variables = [self.program.logits, self.program.units[-1].exit.store]
        for turn in range(turns):
            self._forward(stale=sum(v.bytes for v in variables) if turn else 0)
            self._backward()
            self.have_gradients = True
            if turn < turns - 1:
                for variable in variables:
                    self.release(variable)
        self._begin("optimizer")
        self.now = "the update"
        if not self.recipe.offloaded("optimizer_states"):
            self.briefly(sum(t.bytes for t in self._update()))
        self.peaks.pop("")
        self.moments.pop("")

    def _settle(self) -> None:
        """What stays through the whole step."""
        for what, size in (
            ("parameters", self._rank_bytes(3, self.recipe.parameter_dtype)),
            ("optimizer_states", sum(t.bytes * n for t, n in self._states())),
        ):
            if self.recipe.offloaded(what):
                self.host[what] = size
            else:
                self.take(what, size)
        self.take("parameters", sum(b.bytes for b in self.config.buffers()))
        gradients = self._rank_bytes(2, self.recipe.gradient_dtype)
        if self.recipe.offloaded("gradients"):
            self.host["gradients"] = gradients
        elif self.have_gradients:
            self.take("gradients", gradients)
        for store in self.program.batch:
            store.refs = 2  # for the script, and as the first unit's input
            self.hold(store, "activations")

    def _rank_bytes(self, stage: int, dtype: str) -> int:
        return sum(self._share(spec.count, stage) for spec in self.specs) * DTYPE_BYTES[dtype]

    def _share(self, count: int, stage: int) -> int:
        """Values of one tensor that a GPU keeps, if ZeRO shards its kind from `stage` on."""
        return -(-count // self.recipe.data_parallel) if self.recipe.zero_stage >= stage else count

    # forward

    def _forward(self, stale: int) -> None:
        """`stale`: the last micro-batch's logits and loss, which the script's variables hold until they're replaced."""
        self.take("activations", stale)
        self._begin("forward")
        self.root = sum(self._weights(unit) for unit in self.program.units if unit.label not in _STREAMED)
        self.take("temporaries", self.root)
        for store in self.program.shared:
            store.refs = 1
            kept = store.saved or self.recipe.checkpointing != "none"
            self.hold(store, "activations" if kept else "temporaries")
        for i, unit in enumerate(self.program.units):
            if unit.label == "loss":
                self.give("activations", stale)
                for store in self.program.shared:  # the model's own variables
                    self.release(store)
            window = self._window(unit)
            self.take("temporaries", window)
            activations, temporaries = self.live["activations"], self.live["temporaries"]
            self._run(unit, i)
            if unit.checkpointed:
                for store in self._inputs(unit):
                    store.refs += 1
            if unit.entry is not None:
                self.release(unit.entry.store)
            grown = self.live["activations"] - activations
            copies = (self.live["temporaries"] - temporaries) * (unit.times - 1)
            if unit.label in _STREAMED and self.recipe.offloaded("activations"):
                self.host["activations"] = self.host.get("activations", 0) * bool(i) + grown * unit.times
                self.moved[i] = grown
                self.give("activations", grown)
            else:
                self.extra[i] = grown * (unit.times - 1)
            self.take("activations", self.extra[i])
            self.take("temporaries", copies)
            self.cached_extra += copies
            self.give("temporaries", window)
        self._end_autocast()
        self.now = "the loss's own gradient, 1"
        self.program.seed.refs = 1
        self.hold(self.program.seed, "activations")
        self._list_saved()

    def _run(self, unit: _Unit, i: int, again: bool = False) -> None:
        """A unit's forward. `again`: recomputed in backward, up to the last operation that saves something."""
        save = again or not unit.checkpointed
        ops = unit.ops
        if again:
            ops = ops[: 1 + max(n for n, op in enumerate(ops) if op.saves)]
        else:
            unit.exit.store.refs += 1  # for the unit that follows, or the script's variable
            if unit.exit.store is self.program.logits:
                unit.exit.store.refs += 1
        follows = i + 1 < len(self.program.units) and self.program.units[i + 1].checkpointed
        for op in ops:
            for x in op.ins:
                x.store.refs += 1
            for store in op.made if not op.outs else ():
                store.refs += 1  # constants: until the unit ends
        saved_here = {id(store) for op in ops for store in op.saves}
        for op in ops:
            self.now = f"recomputing {op.name}" if again else op.name
            kept = op.linear and unit.checkpointed and self.recipe.checkpointing == "selective"
            for store in op.casts:
                store.refs += 1
                self.cached.append(store)
                self.hold(store, "activations" if save and store in op.saves else "temporaries")
            for store in () if again and kept else op.made:
                stays = kept or (save and id(store) in saved_here)
                if store is unit.exit.store and not again:
                    stays = stays or store.saved or follows
                self.hold(store, "activations" if stays else "temporaries")
            self.briefly(op.scratch)
            if save:
                for store in op.saves:
                    store.refs += 1
            for store in op.made:
                if kept:
                    store.refs += -1 if again else 1
                if store.refs == 0:
                    self.give(store.consumer, store.bytes)
            for x in op.ins:
                self.release(x.store)
        for op in ops:
            for store in op.made if not op.outs else ():
                self.release(store)

    def _end_autocast(self) -> None:
        for store in self.cached:
            self.release(store)
        self.cached.clear()
        self.give("temporaries", self.cached_extra)
        self.cached_extra = 0

    def _inputs(self, unit: _Unit) -> list[_Store]:
        """What a checkpoint keeps in place of the saved tensors."""
        assert unit.entry is not None
        return [unit.entry.store, *unit.held]

    def _list_saved(self) -> None:
        self.saved = [(store, 1) for store in self._standing() if store.refs > 0]
        seen: set[int] = set()
        for unit in self.program.units:
            for op in unit.ops:
                for store in (*op.made, *op.casts):
                    if store.refs > 0 and id(store) not in seen:
                        seen.add(id(store))
                        self.saved.append((store, unit.times))

    def _standing(self) -> list[_Store]:
        return [*self.program.batch, *self.program.shared, self.program.seed]

    # weights that are whole only while they're used

    def _weights(self, unit: _Unit) -> int:
        if not self.streams:
            return 0
        counts = {name: count for op in unit.ops for name, count in op.params}
        return sum(counts.values()) * DTYPE_BYTES[self.recipe.compute_dtype]

    def _window(self, unit: _Unit) -> int:
        """The block at work and the next one, whose weights are fetched meanwhile (FSDP's prefetch of one)."""
        return 2 * self._weights(unit) if unit.label in _STREAMED else 0

    # backward

    def _backward(self) -> None:
        self._begin("backward")
        units = self.program.units
        self.pending[units[-1].exit.key] = _Gradient(0)
        for i in reversed(range(len(units))):
            unit = units[i]
            window = self._window(unit)
            self.take("temporaries", window)
            self.take("activations", self.moved[i])
            gradients = self.live["gradients"]
            self._back(unit, i)
            self.give("activations", self.extra[i])
            self.take("gradients", (self.live["gradients"] - gradients) * (unit.times - 1))
            self.give("temporaries", window)
        self.give("temporaries", self.root)
        self.release(self.program.seed)

    def _back(self, unit: _Unit, i: int) -> None:
        there = not unit.checkpointed
        for n in reversed(range(len(unit.ops))):
            op = unit.ops[n]
            if op.saves and not there:  # the first saved tensor that is asked for
                self._run(unit, i, again=True)
                self._end_autocast()
                there = True
            self._back_op(op)
            if n % (len(unit.ops) // unit.blocks) == 0:
                self._scatter()
        if unit.checkpointed:
            for store in self._inputs(unit):
                self.release(store)

    def _back_op(self, op: _Op) -> None:
        incoming = [self.pending.pop(out.key) for out in op.outs if out.key in self.pending]
        self.now = f"backward of {op.name}"
        made: list[tuple[_Value, _Gradient]] = []
        params = op.params if incoming else []
        if incoming:
            first = incoming[0]
            for x in op.grads:
                if (op.passes and x.bytes == first.bytes) or op.slices:
                    first.refs += 1
                    made.append((x, first))
                else:
                    made.append((x, self._gradient(x.bytes)))
        lasting = (
            op.param_dtype == self.recipe.gradient_dtype and not self.have_gradients and not self.scatters
        )
        for name, count in params:
            whose = "gradients" if lasting and not self._shared(name) else "temporaries"
            self.take(whose, count * DTYPE_BYTES[op.param_dtype])
        if incoming:
            self.briefly(op.back)
        for gradient in incoming:
            self._drop(gradient)
        for store in op.saves:
            self.release(store)
        for x, gradient in made:
            self._deliver(x, gradient)
        for name, count in params:
            self._accumulate(op, name, count, lasting)

    def _gradient(self, size: int) -> _Gradient:
        self.take("temporaries", size)
        return _Gradient(size)

    def _drop(self, gradient: _Gradient) -> None:
        gradient.refs -= 1
        if gradient.refs == 0:
            self.give("temporaries", gradient.bytes)

    def _deliver(self, x: _Value, gradient: _Gradient) -> None:
        """A second gradient of a value is added to the first: autograd makes a third tensor for the sum."""
        if x.key in self.pending:
            old = self.pending[x.key]
            self.pending[x.key] = self._gradient(x.bytes)
            self._drop(old)
            self._drop(gradient)
        else:
            self.pending[x.key] = gradient

    def _accumulate(self, op: _Op, name: str, count: int, lasting: bool) -> None:
        """A weight's gradient, just made, goes to `.grad`: as it is, cast to fp32, added, or on its way out."""
        size, final = count * DTYPE_BYTES[op.param_dtype], count * self.gradient_size
        if self.scatters:
            self.whole.append((size, count))
            return
        if (
            not lasting and op.param_dtype != self.recipe.gradient_dtype
        ):  # autocast: the copy's, then the weight's
            self.take("temporaries" if self.have_gradients or self._shared(name) else "gradients", final)
            self.give("temporaries", size)
            size = final
        if self._shared(name):
            if not self.tied:
                self.tied = size  # the head's gradient waits for the embedding's
                return
            self.take(
                "temporaries" if self.have_gradients else "gradients", size
            )  # their sum is a third tensor
            self.give("temporaries", size + self.tied)
            self.tied = 0
        if self.have_gradients:
            self.give("temporaries", size)

    def _shared(self, name: str) -> bool:
        return (
            name == "embed.token.weight" and isinstance(self.config, TransformerConfig) and self.config.tied
        )

    def _scatter(self) -> None:
        """ZeRO-2 and 3: each GPU keeps its part of a block's gradients; offload: none."""
        for size, count in self.whole:
            if not self.have_gradients and not self.recipe.offloaded("gradients"):
                self.take("gradients", self._share(count, 2) * self.gradient_size)
            self.give("temporaries", size)
        self.whole.clear()

    # the optimizer

    def _states(self) -> Iterator[tuple[StateTensor, int]]:
        """(state tensor, how many of it): what one GPU keeps."""
        shapes: dict[tuple[int, ...], int] = {}
        for spec in self.specs:
            shape = self._shard(spec)
            shapes[shape] = shapes.get(shape, 0) + 1
        # torch keeps step counters in CPU memory, which a step on the CPU counts
        counters = (
            self.recipe.optimizer in ("adam", "adamw", "adafactor") and self.recipe.optimizer_impl != "fused"
        )
        for shape, n in shapes.items():
            for tensor in self.recipe.state_tensors(shape):
                yield tensor, n
            if counters and self.device == "cpu":
                yield StateTensor("step", (), "fp32"), n

    def _shard(self, spec: ParameterSpec) -> tuple[int, ...]:
        """The part of a parameter that this GPU updates: a flat run of values; whole rows for Adafactor."""
        if self.recipe.zero_stage == 0:
            return spec.shape
        if self.recipe.optimizer == "adafactor":
            return (self._share(spec.shape[0], 1), *spec.shape[1:])
        return (self._share(spec.count, 1),)

    def _update(self) -> list[Tensor]:
        """The temporaries of `optimizer.step()` at its worst moment."""
        r = self.recipe
        shapes = [self._shard(spec) for spec in self.specs]
        counts = [math.prod(shape) for shape in shapes]
        found = []

        def add(name: str, values: int, why: str, dtype: str = r.state_dtype) -> None:
            if values:
                found.append(Tensor(name, "temporaries", (values,), dtype, 1, ("optimizer",), why))

        if r.master_dtype:
            add(
                "fp32 gradients",
                sum(counts),
                "the optimizer works on master weights: all gradients are cast at once",
            )
        if r.optimizer in ("adam", "adamw"):
            name, why = "sqrt(exp_avg_sq)", "the denominator of the update"
            if r.optimizer_impl == "foreach":
                add(name, sum(counts), f"{why}, of all parameters at once")
            elif r.optimizer_impl == "for-loop":
                worst = max(before + 2 * now for before, now in pairwise((0, *counts)))
                add(name, worst, f"{why}: the last parameter's, this one's and its square root")
        elif r.optimizer == "adafactor":
            name = "variance estimate"
            if r.optimizer_impl == "foreach":
                add(name, sum(counts), "row times column statistics, of all parameters at once")
            else:
                each = [
                    (n, n * (1 if len(shape) > 1 else 2)) for n, shape in zip(counts, shapes, strict=True)
                ]
                worst = max(before + now for (before, _), (_, now) in pairwise(((0, 0), *each)))
                add(name, worst, "row times column statistics: the last parameter's and this one's")
        elif r.optimizer == "adamw-8bit":
            large = max((n for n in counts if n >= MIN_8BIT), default=0)
            blocks = -(-large // BLOCK_8BIT) * BLOCK_8BIT
            why = "the largest parameter's moments in fp32 and its update"
            add("exp_avg, exp_avg_sq, update", 3 * blocks, why, "fp32")
            if r.gradient_dtype != "fp32" and not r.master_dtype:
                add("fp32 gradient", large, "the largest parameter's", "fp32")
        return found

    # what there is, by name

    def tensors(self) -> Iterator[Tensor]:
        r = self.recipe
        always, later = PHASES, PHASES if self.have_before() else ("backward", "optimizer")
        shards = r.zero_stage
        rows: dict[tuple[Any, ...], int] = {}

        def count(*key: Any, n: int = 1) -> None:
            rows[key] = rows.get(key, 0) + n

        for spec in self.specs:
            name = _any_block(spec.name)
            if not r.offloaded("parameters"):
                part = spec.shape if shards < 3 else (self._share(spec.count, 3),)
                count(name, "parameters", part, r.parameter_dtype, always, "trained")
            if not r.offloaded("gradients"):
                part = spec.shape if shards < 2 else (self._share(spec.count, 2),)
                count(f"{name}.grad", "gradients", part, r.gradient_dtype, later, "the update needs it")
            if not r.offloaded("optimizer_states"):
                for state in self._of(self._shard(spec)):
                    why = f"{r.optimizer} keeps it from step to step"
                    count(f"{name} {state.name}", "optimizer_states", state.shape, state.dtype, always, why)
        for buffer in self.config.buffers():
            count(
                _any_block(buffer.name),
                "parameters",
                buffer.shape,
                buffer.dtype,
                always,
                "a buffer, not trained",
            )
        variables = [self.program.logits, self.program.units[-1].exit.store]
        for store, n in self.saved:
            stays = store in self.program.batch or store in variables
            phases = always if stays else ("forward", "backward")
            why = "the batch" if store in self.program.batch else store.why or "the input of a checkpoint"
            count(_any_block(store.name), "activations", store.shape, store.dtype, phases, why, n=n)
        for (name, consumer, shape, dtype, phases, why), n in rows.items():
            yield Tensor(name, consumer, shape, dtype, n, phases, why)
        if not r.offloaded("optimizer_states"):
            yield from self._update()

    def have_before(self) -> bool:
        return not self.recipe.set_to_none or self.recipe.accumulation > 1

    def _of(self, shape: tuple[int, ...]) -> list[StateTensor]:
        states = list(self.recipe.state_tensors(shape))
        return states


#: Units whose weights and activations come and go, where they are sharded or offloaded.
_STREAMED = ("block", "stage", "transition")

_SPLIT_ROWS = re.compile(r"attn\.(qkv|query|key|value)\.|mlp\.(up|gate)\.|^embed\.token|^head\.")
_SPLIT_COLUMNS = re.compile(r"(attn\.out|mlp\.down)\.weight")


def _on_rank(spec: ParameterSpec, share: int) -> ParameterSpec:
    """The part of a parameter on one of `share` tensor-parallel GPUs, as Megatron splits a transformer."""
    if share > 1 and _SPLIT_ROWS.search(spec.name):
        return ParameterSpec(spec.name, (-(-spec.shape[0] // share), *spec.shape[1:]))
    if share > 1 and _SPLIT_COLUMNS.search(spec.name):
        return ParameterSpec(spec.name, (spec.shape[0], spec.shape[1] // share))
    return spec


def _any_block(name: str) -> str:
    """'blocks.7.attn.out.weight' -> 'blocks.*.attn.out.weight'."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
