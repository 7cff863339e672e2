"""The models as lists of operations: what each makes, what autograd saves of it, and why. No torch.

This is `nets` written down a second time. `Program(config, recipe, device).units` holds the operations of
one forward pass in order; `walk` goes through them. Equal blocks stand here once, with the number of times
they are repeated.

Sources: PyTorch's derivatives.yaml (what is saved), the operator lists of autocast, and for what CUDA's
kernels allocate beside that aten/native/cuda/SoftMax.cu and flash_attn's mha_bwd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from memlab.hardware import GPU
from memlab.models import ConvConfig, TransformerConfig
from memlab.recipe import BLOCK_4BIT, Recipe
from memlab.units import DTYPE_BYTES


class Store:
    """Memory of one tensor: alive while `refs` (users to come, saved by, held by) is above 0."""

    __slots__ = ("bytes", "consumer", "dtype", "name", "refs", "saved", "shape", "why")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype
        self.bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        self.refs = 0
        self.saved = False
        self.consumer = "temporaries"
        self.why = ""


class Value:
    """A tensor as an operation sees it: a shape of its own, and a store that views share.

    `needs`: a gradient is asked for.
    """

    __slots__ = ("bytes", "dtype", "key", "needs", "shape", "store")

    def __init__(
        self, shape: tuple[int, ...], dtype: str, store: Store, needs: bool, key: object = None
    ) -> None:
        self.shape, self.dtype, self.store, self.needs = shape, dtype, store, needs
        self.bytes = math.prod(shape) * DTYPE_BYTES[dtype]
        self.key = key or object()  # whose gradient it is: a reshaped tensor has that of the original


@dataclass(slots=True, eq=False)
class Op:
    """One operation. Backward makes a gradient for each of `grads`, or `passes` its own on (addition).

    `slices`: the gradients are views of the incoming one (concatenation).
    `params`: (name, values) of its weights; it gives them gradients in `param_dtype` if it `trains`. `casts`:
    autocast's 16-bit copies, kept for the next use; `copies`: those of frozen weights, made anew. `packs`: it
    saves a tensor, one of `saves` or a weight. `linear`: what `selective` checkpointing keeps.
    """

    name: str
    ins: list[Value]
    outs: list[Value]
    saves: list[Store]
    made: list[Store]  # stores that begin here: results that aren't views, statistics, masks
    grads: list[Value]
    passes: bool = False
    slices: bool = False
    scratch: int = 0  # bytes inside the forward
    back: int = 0  # bytes inside the backward
    params: list[tuple[str, int]] = field(default_factory=list)
    param_dtype: str = "fp32"
    casts: list[Store] = field(default_factory=list)
    copies: list[Store] = field(default_factory=list)
    linear: bool = False
    trains: bool = True
    packs: bool = False

    @property
    def computes(self) -> bool:
        """Must it run to give what it saves? Its statistics, yes; its input was there before."""
        return len(self.made) > 1 and any(x.store in self.saves for x in self.ins)


@dataclass(slots=True, eq=False)
class Unit:
    """Operations that are checkpointed as a whole or not at all; `times` equal ones stand in a row."""

    label: str
    ops: list[Op]
    entry: Value | None
    exit: Value
    times: int = 1
    blocks: int = 1  # that it consists of
    checkpointed: bool = False
    held: list[Store] = field(default_factory=list)  # other arguments that a checkpoint keeps

    @property
    def inputs(self) -> list[Store]:
        """What a checkpoint keeps in place of the saved tensors."""
        assert self.entry is not None
        return [self.entry.store, *self.held]


class Tape:
    """Writes down operations with their shapes, in the dtypes that the recipe's precision gives them."""

    def __init__(self, recipe: Recipe, device: str, fused: bool = True, causal: bool = False) -> None:
        self.recipe, self.device, self.fused, self.causal = recipe, device, fused, causal
        self.compute, self.stored = recipe.compute_dtype, recipe.parameter_dtype
        self.cuda = device == "cuda"
        self.frozen = recipe.lora_rank is not None
        self.ops: list[Op] = []
        self.where = ""

    def store(self, name: str, shape: tuple[int, ...], dtype: str) -> Store:
        return Store(f"{self.where}{name}", shape, dtype)

    def op(
        self,
        name: str,
        ins: Sequence[Value],
        shape: tuple[int, ...],
        dtype: str,
        *,
        saves: Sequence[Value | Store] = (),
        result: bool = False,
        extra: Sequence[Store] = (),
        inplace: Value | None = None,
        why: str = "",
        **rest: Any,
    ) -> Value:
        """An operation with one result; it saves `saves`, the result if `result`, and `extra`, made by it.

        Nothing is saved if no gradient is asked for: of none of `ins`, and it trains no weight.
        """
        store = inplace.store if inplace else self.store(name, shape, dtype)
        trains = rest.setdefault("trains", not self.frozen) and bool(rest.get("params"))
        out = Value(shape, dtype, store, trains or any(x.needs for x in ins))
        kept = [s.store if isinstance(s, Value) else s for s in saves] if out.needs else []
        if out.needs and result:
            kept.append(store)
        if out.needs:
            kept += extra
        for one in kept:
            one.saved = True
            one.why = one.why or why or f"{name}: its backward needs it"
        made = [*([] if inplace else [store]), *extra]
        grads = rest.pop("grads", [x for x in ins if x.needs])
        rest["packs"] = bool(kept) or (rest.get("packs", False) and out.needs)
        self.ops.append(
            Op(self.where + name, list(ins), [out], kept, made, grads if out.needs else [], **rest)
        )
        return out

    def view(self, x: Value, shape: tuple[int, ...]) -> Value:
        """The same tensor under another shape: nothing is made, nor is its gradient."""
        return Value(shape, x.dtype, x.store, x.needs, x.key)

    def make(self, stores: list[Store], name: str) -> None:
        """Constants of a block, without a gradient."""
        self.ops.append(Op(self.where + name, [], [], [], stores, []))

    def keep(self, *held: Value) -> None:
        """Variables of the model hold these until the last operation is done."""
        self.ops[-1].ins.extend(held)

    def unit(self, label: str, entry: Value | None, exit: Value, **rest: Any) -> Unit:
        ops, self.ops = self.ops, []
        return Unit(label, ops, entry, exit, **rest)

    # operations that several models use

    def cast(self, x: Value, dtype: str, name: str) -> Value:
        if x.dtype == dtype:
            return x
        return self.op(name, [x], x.shape, dtype)

    def autocast(self, x: Value, name: str) -> Value:
        """What a matrix product reads: a 16-bit copy under autocast."""
        return self.cast(x, self.compute, f"{name} input in {self.compute}") if self.recipe.autocast else x

    def weights(
        self, op: dict[str, Any], name: str, weight: tuple[int, ...], bias: tuple[int, ...] | None
    ) -> None:
        """Parameters of a matrix product: their gradients, and autocast's copies of them."""
        names = [("weight", weight)] + ([("bias", bias)] if bias else [])
        op["params"] = [(f"{self.where}{name}.{kind}", math.prod(shape)) for kind, shape in names]
        op["param_dtype"] = self.compute
        if self.recipe.autocast and not streams(self.recipe):
            op["casts"] = [
                self.store(f"{name}.{kind} in {self.compute}", s, self.compute) for kind, s in names
            ]

    def linear(self, x: Value, out: int, name: str, bias: bool = True) -> Value:
        layer = f"{self.where}{name}".removeprefix("blocks.*.")
        if not self.frozen or layer in ("head", "embed.token"):
            y = self._linear(self.autocast(x, name), out, name, bias)
            self.keep(x)  # the layer's argument
            return y
        if self.recipe.quantized:
            y = self._nf4(x, out, name, bias)
        else:
            y = self._linear(self.autocast(x, name), out, name, bias)
            self.keep(x)
        if not self.recipe.adapts(layer):
            return y
        # peft's lora.Linear casts the sum, its Linear4bit the adapter's part (and nothing under autocast)
        kind, cast, quantized = y.dtype, self.recipe.adapter_dtype, self.recipe.quantized
        if quantized:
            y = self.copy(y, f"{name} output cloned")
            cast = x.dtype if self.recipe.autocast else cast
        entry, x = x, self.cast(x, cast, f"{name} input in {cast}")
        z = x
        assert self.recipe.lora_rank is not None
        for part, width in ((f"{name}.lora_A", self.recipe.lora_rank), (f"{name}.lora_B", out)):
            z = self._linear(self.autocast(z, part), width, part, False, trains=True)
        z = self.op(f"{name} adapter * scaling", [z], z.shape, z.dtype)
        if quantized and not self.recipe.autocast:
            z = self.cast(z, kind, f"{name} adapter in {kind}")
        y = self.add(y, z, f"{name} adapted")
        y = y if quantized else self.cast(y, kind, f"{name} adapted in {kind}")
        self.keep(entry, x)  # arguments and variables, until the layer is done
        return y

    def _linear(self, x: Value, out: int, name: str, bias: bool, **more: Any) -> Value:
        rest: dict[str, Any] = {"linear": True, **more}
        self.weights(rest, name, (out, x.shape[-1]), (out,) if bias else None)
        rest["param_dtype"] = x.dtype
        return self._product(x, (*x.shape[:-1], out), name, rest)

    def _nf4(self, x: Value, out: int, name: str, bias: bool) -> Value:
        """Linear4bit: the weight is whole for the product, in backward again, and nothing is saved for it."""
        kind, values, held = x.dtype, out * x.shape[-1], [x]
        x = self.cast(x, self.compute, f"{name} input in {self.compute}")
        held.append(x)
        if bias and self.compute != self.stored:
            held.append(self.op(f"{name}.bias in {self.compute}", [], (out,), self.compute))
        whole = values * DTYPE_BYTES[self.compute]
        # 8-bit scales are made fp32 before the weight is made, and go as it is there
        scales = -(-values // BLOCK_4BIT) * 4 if self.recipe.base_weights == "nf4-double" else 0
        result = math.prod(x.shape[:-1]) * out * DTYPE_BYTES[self.compute]
        y = self.op(
            f"{name} output", [x], (*x.shape[:-1], out), self.compute, linear=True,
            scratch=whole + max(0, scales - result), back=whole + max(0, scales - x.bytes),
        )  # fmt: skip
        y = self.cast(y, kind, f"{name} output in {kind}")
        self.keep(*held)
        return y

    def conv(self, x: Value, shape: tuple[int, ...], name: str, weight: tuple[int, ...], bias: bool) -> Value:
        rest: dict[str, Any] = {}
        x = self.autocast(x, name)
        self.weights(rest, name, weight, (weight[0],) if bias else None)
        return self._product(x, shape, name, rest)

    def _product(self, x: Value, shape: tuple[int, ...], name: str, rest: dict[str, Any]) -> Value:
        trains = rest.get("trains", not self.frozen)
        kept: list[Value | Store] = [x] if trains else []
        copies = rest.get("casts", [])
        if copies and x.needs:
            copies[0].why = f"{name}: the gradient of its input needs the weight that was used"
            kept.append(copies[0])
        if not trains:  # autocast keeps copies of trained weights only for the next use
            rest["copies"], rest["casts"] = copies, []
        return self.op(
            f"{name} output", [x], shape, x.dtype, saves=kept, packs=True,
            why=f"{name}: the gradient of its weight needs its input", **rest,
        )  # fmt: skip

    def layernorm(self, x: Value, name: str) -> Value:
        statistic = "fp32" if self.cuda else x.dtype
        rows = (*x.shape[:-1], 1)
        extra = [self.store(f"{name} {what}", rows, statistic) for what in ("mean", "rstd")]
        width = x.shape[-1]
        return self.op(
            f"{name} output", [x], x.shape, x.dtype, saves=[x], extra=extra, param_dtype=self.stored,
            params=[(f"{self.where}{name}.weight", width), (f"{self.where}{name}.bias", width)],
            why=f"{name}: its backward needs its input and its statistics",
        )  # fmt: skip

    def rmsnorm(self, x: Value, name: str) -> Value:
        """Written out, in fp32: x, 1/rms and the normalized value are saved."""
        x32 = self.cast(x, "fp32", f"{name} input in fp32")
        rows = (*x.shape[:-1], 1)
        rms = self.op(
            f"{name} 1/rms",
            [x32],
            rows,
            "fp32",
            saves=[x32],
            result=True,
            scratch=x32.bytes,
            back=3 * x32.bytes,
        )
        normal = self.op(f"{name} normalized", [x32, rms], x.shape, "fp32", saves=[x32, rms], back=x32.bytes)
        normal = self.cast(normal, x.dtype, f"{name} normalized in {x.dtype}")
        return self.op(
            f"{name} output", [normal], x.shape, x.dtype, saves=[] if self.frozen else [normal],
            back=0 if self.frozen else normal.bytes,
            params=[(f"{self.where}{name}.weight", x.shape[-1])], param_dtype=self.stored, packs=True,
            why=f"{name}: the gradient of its weight needs the normalized input",
        )  # fmt: skip

    def dropout(self, x: Value, name: str) -> Value:
        if self.recipe.dropout == 0:
            return x
        mask = self.store(f"{name} dropout mask", x.shape, "bool" if self.cuda else x.dtype)
        return self.op(
            f"{name} after dropout", [x], x.shape, x.dtype, extra=[mask], why="dropout: which were kept"
        )

    def add(self, x: Value, y: Value, name: str, inplace: bool = False) -> Value:
        """The wider dtype wins. Nothing is saved; both get the same gradient (summed or cast if need be)."""
        dtype = "fp32" if "fp32" in (x.dtype, y.dtype) else x.dtype
        return self.op(name, [x, y], x.shape, dtype, passes=True, inplace=x if inplace else None)

    def factors(self, x: Value, y: Value) -> list[Value]:
        """What a product saves: each factor, if a gradient of the other is asked for."""
        return [*([x] if y.needs else []), *([y] if x.needs else [])]

    def copy(self, x: Value, name: str, shape: tuple[int, ...] | None = None) -> Value:
        return self.op(name, [x], shape or x.shape, x.dtype, passes=True)

    def split(self, x: Value, parts: int, name: str) -> list[Value]:
        """Equal views along the last axis; backward puts their gradients together in a new tensor."""
        shape = (*x.shape[:-1], x.shape[-1] // parts)
        outs = [Value(shape, x.dtype, x.store, x.needs) for _ in range(parts)]
        self.ops.append(Op(self.where + name, [x], outs, [], [], [x] if x.needs else []))
        return outs

    def relu(self, x: Value, name: str) -> Value:
        why = "relu: its backward needs its result"
        return self.op(f"{name} after relu", [x], x.shape, x.dtype, inplace=x, result=True, why=why)

    # attention

    def attention(self, q: Value, k: Value, v: Value, heads: int, causal: Store | None) -> Value:
        """q, k, v (B, T, heads * D) of `heads` and fewer heads -> (B, T, heads * D)."""
        r = self.recipe
        if k.bytes < q.bytes and (r.attention == "eager" or q.dtype == "fp32"):
            k, v = (self._repeat(x, q, name) for x, name in ((k, "keys"), (v, "values")))
        q, k, v = (
            self.autocast(x, n) for x, n in ((q, "queries"), (k, "keys"), (v, "values"))
        )  # no copies, unless 4-bit layers gave back fp32
        batch, tokens, width = q.shape
        scores = (batch, heads, tokens, tokens)
        if r.attention == "eager":
            return self._eager(q, k, v, scores, causal)
        if self.cuda and not self.fused:
            return self._plain(q, k, v, scores)
        if r.dropout > 0 and not self.cuda:
            return self._math(q, k, v, scores)
        lse = self.store("attn log-sum-exp", (batch, heads, tokens), "fp32")
        back = 0
        if self.cuda and q.dtype != "fp32":
            # flash_attn's mha_bwd: an fp32 accumulator for dQ, a row sum; dK and dV of all heads if they
            # are shared
            back = batch * tokens * (width + heads) * 4 + (2 * q.bytes if k.bytes < q.bytes else 0)
        return self.op(
            "attn output", [q, k, v], q.shape, q.dtype, saves=[q, k, v], result=True, extra=[lse], back=back,
            grads=[q, k, v], linear=True,
            why="fused attention: its backward computes the scores again from these",
        )  # fmt: skip

    def _repeat(self, x: Value, like: Value, name: str) -> Value:
        return self.op(f"{name} repeated for every head", [x], like.shape, x.dtype)

    def _per_head(self, x: Value, name: str, repeated: bool) -> Value:
        """Batched products want (B * heads, ...) in one piece: a copy, unless B is 1 or it is so already."""
        return x if x.shape[0] == 1 or repeated else self.copy(x, f"{name} copied per head")

    def _eager(self, q: Value, k: Value, v: Value, scores: tuple[int, ...], causal: Store | None) -> Value:
        repeated = "repeated" in k.store.name
        shape, dtype = q.shape, q.dtype
        q = self._per_head(q, "queries", False)
        k = self._per_head(k, "keys", repeated)
        why = "matrix product: each factor's gradient needs the other"
        x = self.op("scores", [q, k], scores, dtype, saves=self.factors(q, k), why=why)
        x = self.op("scaled scores", [x], scores, dtype)
        if causal is not None:
            x = self.op("masked scores", [x], scores, dtype, saves=[causal])
        if self.cuda and self.recipe.autocast:
            x = self.cast(x, "fp32", "scores in fp32")
        before_softmax, keys = x, k
        # CUDA's softmax backward multiplies gradient and result first (aten/native/cuda/SoftMax.cu)
        back = math.prod(scores) * DTYPE_BYTES[x.dtype] if self.cuda else 0
        why_softmax = "softmax: its backward needs its result"
        x = self.op("attention weights", [x], scores, x.dtype, result=True, back=back, why=why_softmax)
        x = self.dropout(x, "attention weights")
        x = self.cast(x, dtype, f"attention weights in {dtype}")
        v = self._per_head(v, "values", repeated)
        x = self.op("attn output per head", [x, v], shape, dtype, saves=self.factors(x, v), why=why)
        self.keep(before_softmax, *([keys] if repeated else []))
        return self.copy(x, "attn output")

    def _math(self, q: Value, k: Value, v: Value, scores: tuple[int, ...]) -> Value:
        """What the CPU's SDPA does with dropout: the scores are stored, in fp32."""
        shape, dtype = q.shape, q.dtype
        q, k, v = (
            self.cast(x, "fp32", f"{n} in fp32") for x, n in ((q, "queries"), (k, "keys"), (v, "values"))
        )
        held = [q, k]
        q, k = (self.op(f"{n} scaled", [x], x.shape, "fp32") for x, n in ((q, "queries"), (k, "keys")))
        held.append(q)
        q, k = self._per_head(q, "queries", False), self._per_head(k, "keys", False)
        why = "matrix product: each factor's gradient needs the other"
        x = self.op("scores", [q, k], scores, "fp32", saves=self.factors(q, k), why=why)
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
        x = self.op("attn output per head", [x, v], shape, "fp32", saves=self.factors(x, v), why=why)
        self.keep(*held)
        return self.copy(self.cast(x, dtype, f"attn output in {dtype}"), "attn output")

    def _plain(self, q: Value, k: Value, v: Value, scores: tuple[int, ...]) -> Value:
        """_scaled_dot_product_attention_math on CUDA: the scores are stored, in fp32 for 16-bit inputs."""
        shape, dtype, grouped = q.shape, q.dtype, k.bytes < q.bytes
        held = [self.cast(x, "fp32", f"{n} in fp32") for x, n in ((q, "queries"), (k, "keys"), (v, "values"))]
        q, k, v = held
        q = self.op("queries scaled", [q], shape, "fp32")
        held.append(q)
        if self.causal:
            held.append(self.op("causal mask in fp32", [], scores[2:], "fp32", trains=False))
        if grouped:
            k, v = (self._repeat(x, q, name) for x, name in ((k, "keys"), (v, "values")))
            held += [k, v]
        k = self._per_head(self.op("keys scaled", [k], shape, "fp32"), "keys", grouped)
        q = self._per_head(q, "queries", False)
        why = "matrix product: each factor's gradient needs the other"
        x = self.op("scores", [q, k], scores, "fp32", saves=self.factors(q, k), why=why)
        if self.causal:
            x = self.op("masked scores", [x], scores, "fp32", passes=True, inplace=x)
        # _safe_softmax: the softmax, where it is -inf, and a result without those rows
        x = self.op(
            "attention weights", [x], scores, "fp32", result=True, scratch=x.bytes + math.prod(scores),
            back=x.bytes, why="softmax: its backward needs its result",
        )  # fmt: skip
        x = self.dropout(x, "attention weights")
        v = self._per_head(v, "values", grouped)
        held.append(self.cast(x, dtype, f"attention weights in {dtype}"))  # its second result, unused
        x = self.op("attn output per head", [x, v], shape, "fp32", saves=self.factors(x, v), why=why)
        x = self.cast(x, dtype, f"attn output in {dtype}")
        self.keep(*held)
        return self.copy(x, "attn output")

    # the loss

    def loss(self, logits: Value, split: bool = False) -> Unit:
        """Cross entropy in fp32 over (N, classes).

        split: each tensor-parallel rank has some of the classes; the shifted logits, and in backward their
        exponential, are then tensors (torch.distributed.tensor.parallel.loss).
        """
        self.where = "loss."
        fp32 = x = self.cast(logits, "fp32", "logits in fp32")
        x = self.op(
            "log-softmax", [x], x.shape, "fp32", result=True, why="log-softmax: its backward needs it",
            scratch=x.bytes * split, back=x.bytes * split,
        )  # fmt: skip
        weight = self.store("total weight", (), "fp32")
        loss = self.op("mean", [x], (), "fp32", saves=[x], extra=[weight])
        self.keep(fp32)
        loss.store.saved, loss.store.why = True, "the script's variable `loss`"
        return self.unit("loss", logits, loss)


# -- the models as operations
# ----------------------------------------------------------------------------------


def streams(recipe: Recipe) -> bool:
    """Are whole weights on the GPU only while a block uses them (ZeRO-3, offloaded parameters)?"""
    return recipe.zero_stage == 3 or recipe.offloaded("parameters") is not None


def fuses(config: TransformerConfig | ConvConfig, recipe: Recipe, gpu: GPU | None) -> bool:
    """Has this card an attention kernel that stores no scores? None: a card from Ampere on.

    Before, bf16 and 16-bit heads that share keys go without (aten/native/transformers/cuda/sdp_utils.cpp).
    """
    if recipe.attention == "eager" or gpu is None or gpu.compute_capability >= (8, 0):
        return recipe.attention != "eager"
    shared = isinstance(config, TransformerConfig) and config.kv_heads < config.heads
    return recipe.compute_dtype == "fp32" or (recipe.compute_dtype == "fp16" and not shared)


def in_proportion(config: TransformerConfig | ConvConfig, recipe: Recipe, gpu: GPU | None = None) -> bool:
    """Does each tensor of this micro-batch belong to all samples alike, or hold as much for each?

    Then one list of operations serves all such micro-batches. A single sample is spared some copies, and what
    all samples share has its shape.
    """
    if recipe.base_weights == "nf4-double":  # the scales are there before the result takes their place
        return False
    if recipe.micro_batch > 1 or not isinstance(config, TransformerConfig):
        return True
    return config.positions == "rope" and not config.type_vocab and fuses(config, recipe, gpu)


class Program:
    """A model's units in forward order, its logits, and tensors that belong to the whole forward."""

    def __init__(
        self,
        config: TransformerConfig | ConvConfig,
        recipe: Recipe,
        device: str,
        gpu: GPU | None = None,
        micro_batch: int = 0,
    ) -> None:
        self.config, self.recipe = config, recipe
        self.micro_batch = micro_batch or recipe.micro_batch
        self.tape = Tape(recipe, device, fuses(config, recipe, gpu), getattr(config, "causal", False))
        self.units: list[Unit] = []
        self.batch: list[Store] = []
        self.leaf: Value | None = None  # whose gradient nobody asked for, and yet is kept
        self.shared: list[Store] = []  # angles and mask: made once per forward
        if isinstance(config, TransformerConfig):
            self._transformer(config)
        else:
            self._convnet(config)

    def _append(self, label: str, entry: Value | None, exit: Value, **rest: Any) -> Value:
        self.units.append(self.tape.unit(label, entry, exit, **rest))
        return exit

    def _finish(self, logits: Value) -> None:
        logits.store.saved, logits.store.why = True, "the script's variable `logits`"
        self.logits = logits.store
        self.seed = Store("gradient of the loss", (), "fp32")
        self.seed.why = "where backward starts: 1"
        split = self.recipe.tensor_parallel > 1 and getattr(self.config, "causal", False)
        self.units.append(self.tape.loss(logits, split))
        self.variables = [self.logits, self.units[-1].exit.store]
        if self.recipe.accumulation > 1:
            self.variables.append(Store("loss / accumulation", (), "fp32"))

    # transformers

    def _transformer(self, c: TransformerConfig) -> None:
        r, tape = self.recipe, self.tape
        batch, tokens, share = self.micro_batch, r.sequence or c.context, r.tensor_parallel
        self.rows = (batch, tokens)
        self.width, self.kv_width = c.heads * c.head_dim // share, c.kv_heads * c.head_dim // share
        self.heads, self.ffn, self.vocab = c.heads // share, c.ffn // share, math.ceil(c.vocab / share)
        self.batch = [Store("tokens", self.rows, "int64")]
        targets = (batch,) if c.family == "bert" else self.rows
        self.batch.append(Store("targets", targets, "int64"))
        self.angles: list[Store] = []
        self.mask = None
        if c.positions == "rope":
            self.angles = [Store(f"rope {f}", (tokens, c.head_dim), "fp32") for f in ("cos", "sin")]
        if r.attention == "eager" and c.causal:
            self.mask = Store("causal mask", (tokens, tokens), "bool")
        self.shared = [*self.angles, *([self.mask] if self.mask else [])]

        x = self._append("embed", None, self._embed(c))
        every = r.checkpoint_every or 1
        for _, times in _repeats(c.layers // every):
            x = self._segment(c, x, every, times)
        if rest := c.layers % every:
            x = self._segment(c, x, rest, 1)
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

    def _embed(self, c: TransformerConfig) -> Value:
        tape, h, r = self.tape, c.hidden, self.recipe
        tape.where = "embed."

        def look_up(name: str, table: int, rows: tuple[int, ...], index: Store | None) -> Value:
            saves: list[Value | Store] = [self.batch[0]] if index is None else []
            return tape.op(
                f"{name} output", [], (*rows, h), tape.stored, saves=saves, extra=[index] if index else [],
                params=[(f"embed.{name}.weight", table * h)], param_dtype=tape.stored,
                why="embedding: its backward needs the indices",
            )  # fmt: skip

        x = look_up("token", self.vocab, self.rows, None)
        if r.lora_rank is not None and r.checkpointing != "none":
            x.needs, self.leaf = True, x
            x.store.saved, x.store.why = True, "enable_input_require_grads: a leaf of autograd's graph"
        if c.positions == "learned":
            index = tape.store("positions", self.rows[1:], "int64")
            x = tape.add(x, look_up("position", c.context, self.rows[1:], index), "token + position")
        if c.type_vocab:
            index = tape.store("types", self.rows, "int64")
            x = tape.add(x, look_up("type", c.type_vocab, self.rows, index), "token + position + type")
        if c.family == "bert":
            x = tape.layernorm(x, "norm")
        return tape.dropout(x, "embedding")

    def _segment(self, c: TransformerConfig, x: Value, count: int, times: int) -> Value:
        """`count` blocks that are checkpointed together (or one), standing for `times` such segments."""
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

    def _mlp(self, x: Value, h: int) -> Value:
        tape, entry = self.tape, x
        x = tape.linear(x, self.ffn, "mlp.up")
        x = tape.op("gelu", [x], x.shape, x.dtype, saves=[x], why="gelu: its backward needs its input")
        x = tape.linear(x, h, "mlp.down")
        tape.keep(entry)
        return x

    def _gpt2(self, c: TransformerConfig, x: Value, angles: object) -> Value:
        tape = self.tape
        entry = tape.layernorm(x, "norm1")
        y = tape.linear(entry, 3 * self.width, "attn.qkv")
        q, k, v = tape.split(y, 3, "queries, keys, values")
        y = tape.linear(tape.attention(q, k, v, self.heads, self.mask), c.hidden, "attn.out")
        tape.keep(entry, q, k, v)
        block = x
        x = tape.add(x, tape.dropout(y, "attn.out"), "residual 1")
        y = tape.dropout(self._mlp(tape.layernorm(x, "norm2"), c.hidden), "mlp.down")
        x = tape.add(x, y, "residual 2")
        tape.keep(block)
        return x

    def _bert(self, c: TransformerConfig, x: Value, angles: object) -> Value:
        tape = self.tape
        q, k, v = (tape.linear(x, self.width, f"attn.{name}") for name in ("query", "key", "value"))
        y = tape.linear(tape.attention(q, k, v, self.heads, None), c.hidden, "attn.out")
        tape.keep(q, k, v)
        y = tape.layernorm(tape.add(x, tape.dropout(y, "attn.out"), "residual 1"), "norm1")
        block, x = x, y
        y = tape.dropout(self._mlp(x, c.hidden), "mlp.down")
        y = tape.layernorm(tape.add(x, y, "residual 2"), "norm2")
        tape.keep(block, x)
        return y

    def _llama(self, c: TransformerConfig, x: Value, angles: Sequence[Store]) -> Value:
        tape = self.tape
        entry = tape.rmsnorm(x, "norm1")
        q = tape.linear(entry, self.width, "attn.query", c.qkv_bias)
        k, v = (tape.linear(entry, self.kv_width, f"attn.{name}", c.qkv_bias) for name in ("key", "value"))
        if q.dtype != "fp32":
            angles = [tape.store(f"{angle.name} in {q.dtype}", angle.shape, q.dtype) for angle in angles]
            tape.make(angles, "rotary angles")
        straight = (q, k)
        q, k = self._rotate(q, angles, "queries"), self._rotate(k, angles, "keys")
        tape.keep(*straight)
        y = tape.linear(tape.attention(q, k, v, self.heads, self.mask), c.hidden, "attn.out", bias=False)
        tape.keep(entry, q, k, v)
        block = x
        x = tape.add(x, y, "residual 1")
        entry = tape.rmsnorm(x, "norm2")
        gate = tape.linear(entry, self.ffn, "mlp.gate", bias=False)
        why = "silu: its backward needs its input"
        gate = tape.op("silu", [gate], gate.shape, gate.dtype, saves=[gate], why=why)
        up = tape.linear(entry, self.ffn, "mlp.up", bias=False)
        why = "product: each factor's gradient needs the other"
        y = tape.op("silu(gate) * up", [gate, up], up.shape, up.dtype, saves=tape.factors(gate, up), why=why)
        y = tape.linear(y, c.hidden, "mlp.down", bias=False)
        tape.keep(entry)
        x = tape.add(x, y, "residual 2")
        tape.keep(block)
        return x

    def _rotate(self, x: Value, angles: Sequence[Store], name: str) -> Value:
        tape = self.tape
        cos, sin = angles
        why = "rotary positions: the gradient of queries and keys needs the angles"
        half = (*x.shape[:-1], x.shape[-1] // 2)
        straight = tape.op(f"{name} * cos", [x], x.shape, x.dtype, saves=[cos], why=why)
        low, high = tape.split(x, 2, f"halves of {name}")
        high = tape.op(f"second half of -{name}", [high], half, x.dtype)
        turned = Value(x.shape, x.dtype, tape.store(f"{name} turned", x.shape, x.dtype), x.needs)
        tape.ops.append(
            Op(
                tape.where + turned.store.name,
                [high, low],
                [turned],
                [],
                [turned.store],
                [high, low] if x.needs else [],
                slices=True,
            )
        )
        turned = tape.op(f"{name} turned * sin", [turned], x.shape, x.dtype, saves=[sin], why=why)
        return tape.add(straight, turned, f"{name} with positions")

    # convolutional networks

    def _convnet(self, c: ConvConfig) -> None:
        r = self.recipe
        size = r.image or c.image
        images = Store("images", (self.micro_batch, c.channels, size, size), r.parameter_dtype)
        self.batch = [images, Store("targets", (self.micro_batch,), "int64")]
        x = Value(images.shape, images.dtype, images, needs=False)
        walk = {"lenet": self._lenet, "alexnet": self._alexnet, "vgg": self._vgg,
                "resnet": self._resnet, "densenet": self._densenet}[c.family]  # fmt: skip
        self._finish(walk(c, x))

    def _conv(
        self,
        x: Value,
        out: int,
        kernel: int,
        name: str,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
    ) -> Value:
        batch, inside, rows, columns = x.shape
        size = [(n + 2 * padding - kernel) // stride + 1 for n in (rows, columns)]
        return self.tape.conv(x, (batch, out, *size), name, (out, inside, kernel, kernel), bias)

    def _norm(self, x: Value, name: str) -> Value:
        tape, width = self.tape, x.shape[1]
        extra = [tape.store(f"{name} {what}", (width,), "fp32") for what in ("mean", "1/std")]
        if tape.stored != "fp32":
            extra += [tape.store(f"{name}.weight in fp32", (width,), "fp32")]
        return tape.op(
            f"{name} output", [x], x.shape, x.dtype, saves=[x], extra=extra, param_dtype=tape.stored,
            params=[(f"{tape.where}{name}.weight", width), (f"{tape.where}{name}.bias", width)],
            why=f"{name}: its backward needs its input and its statistics",
        )  # fmt: skip

    def _pool(self, x: Value, kind: str, kernel: int, stride: int, padding: int = 0) -> Value:
        batch, width, rows, columns = x.shape
        shape = (batch, width, *((n + 2 * padding - kernel) // stride + 1 for n in (rows, columns)))
        name = f"{kind} pooling"
        extra = [self.tape.store(f"{name} indices", shape, "int64")] if kind == "max" else []
        return self.tape.op(f"{name} output", [x], shape, x.dtype, saves=[x], extra=extra)

    def _adaptive(self, x: Value, size: int) -> Value:
        return self.tape.op("adaptive pooling output", [x], (*x.shape[:2], size, size), x.dtype, saves=[x])

    def _global(self, x: Value) -> Value:
        """A mean over all pixels: saves nothing, its gradient is as large as its input."""
        return self.tape.op("mean over pixels", [x], x.shape[:2], x.dtype)

    def _tanh(self, x: Value, name: str) -> Value:
        why = "tanh: its backward needs its result"
        return self.tape.op(f"{name} after tanh", [x], x.shape, x.dtype, result=True, why=why)

    def _flat(self, x: Value) -> Value:
        return self.tape.view(x, (x.shape[0], math.prod(x.shape[1:])))

    def _lenet(self, c: ConvConfig, x: Value) -> Value:
        tape, entry = self.tape, x
        for i, (_, out, kernel) in enumerate(c.conv_shapes()):
            x = self._tanh(self._conv(x, out, kernel, f"convs.{i}", bias=True), f"convs.{i}")
            x = self._pool(x, "average", 2, 2)
        x = self._flat(x)
        for i, out in enumerate(c.fcs):
            x = self._tanh(tape.linear(x, out, f"fcs.{i}"), f"fcs.{i}")
        return self._append("all", entry, tape.linear(x, c.classes, f"fcs.{len(c.fcs)}"))

    def _alexnet(self, c: ConvConfig, x: Value) -> Value:
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

    def _vgg(self, c: ConvConfig, x: Value) -> Value:
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

    def _stem(self, c: ConvConfig, x: Value) -> Value:
        self.tape.where = "stem."
        entry = x
        x = self.tape.relu(self._norm(self._conv(x, c.widths[0], 7, "conv", 2, 3), "norm"), "norm")
        return self._append("stem", entry, self._pool(x, "max", 3, 2, 1))

    def _resnet(self, c: ConvConfig, x: Value) -> Value:
        tape = self.tape
        x = self._stem(c, x)
        blocks = [(s, b) for s, depth in enumerate(c.depths) for b in range(depth)]
        groups = (blocks[start : start + count] for count, start in _groups(blocks, self.recipe))
        for _, run in groupby(groups, key=lambda group: [(s, b == 0) for s, b in group]):
            alike = list(run)
            for i, times in _repeats(len(alike)):
                entry = x
                for s, b in alike[i]:
                    tape.where = f"stages.{s}.{b}."
                    x = self._bottleneck(x, c.widths[s], 2 if s > 0 and b == 0 else 1, b == 0)
                checkpointed = self.recipe.checkpointing != "none"
                x = self._append("block", entry, x, times=times, checkpointed=checkpointed)
        tape.where, entry = "", x
        return self._append("head", entry, tape.linear(self._global(x), c.classes, "fc"))

    def _bottleneck(self, x: Value, width: int, stride: int, first: bool) -> Value:
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

    def _densenet(self, c: ConvConfig, x: Value) -> Value:
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

    def _dense(self, x: Value, growth: int) -> Value:
        tape = self.tape
        y = self._conv(tape.relu(self._norm(x, "norm1"), "norm1"), 4 * growth, 1, "conv1")
        y1, y = y, self._conv(tape.relu(self._norm(y, "norm2"), "norm2"), growth, 3, "conv2", padding=1)
        tape.keep(y1)
        shape = (x.shape[0], x.shape[1] + growth, *x.shape[2:])
        return tape.op("all channels", [x, y], shape, x.dtype, slices=True)


def _repeats(count: int) -> list[tuple[int, int]]:
    """(which, how many it stands for) of `count` equal units in a row, in forward order.

    The second stands for all in the middle: first and last are walked on their own, since live bytes change
    from one equal unit to the next by an equal amount, so that the largest moment is at one of the ends.
    """
    return [(i, 1) for i in range(count)] if count <= 3 else [(0, 1), (1, count - 2), (count - 1, 1)]


def _groups(blocks: Sequence[Any], recipe: Recipe) -> Iterator[tuple[int, int]]:
    """(count, start) of each run of blocks that is checkpointed together."""
    every = recipe.checkpoint_every or 1
    for start in range(0, len(blocks), every):
        yield min(every, len(blocks) - start), start
