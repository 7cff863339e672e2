"""Exercises 4.1 to 4.6: parameters, one Linear, scores, tiled attention, a split MLP, ZeRO.

Twelve of the twenty points come from bytes that are measured while the student's code runs on the CPU: the
live bytes of tiled attention, what each rank of a split MLP and of a sharded optimizer holds and sends. Each
such measurement also has a twin, the plain way, which has to fail it.

The ranks of 4.5 and 4.6 are threads of one process that meet in collectives (`Comm`), so no point depends on
a network or on the `gloo` backend.
"""

from __future__ import annotations

import gc
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.exercises import (
    NOT_WRITTEN,
    Evidence,
    Exercise,
    Score,
    Tally,
    answers_to,
    call,
    close,
    exactly,
    guarded,
    is_number,
    plain,
    several,
    stopped,
    unwritten,
    watched,
)
from memlab.exercises.limits import contained
from memlab.models import TransformerConfig
from memlab.models import model as any_model
from memlab.units import GB, GIB, KB, KIB, MB, MIB, format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.multiprocessing.reductions import StorageWeakRef


def _value(entry: Evidence) -> Any:
    return entry.get("value")


def _unit_slip(value: Any, expected: float) -> str:
    """'GB', 'MiB', … when `value` is `expected` in that unit, else ''."""
    for name, size in (("GB", GB), ("GiB", GIB), ("MB", MB), ("MiB", MIB), ("KB", KB), ("KiB", KIB)):
        if expected and is_number(value) and close(value * size, expected, 0.001):
            return name
    return ""


def _kind(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type"}:
        return f"an object of type {value['type']}"
    return "None" if value is None else f"a {type(value).__name__}"


def _not_a_count(value: Any, expected: int, of: str = "bytes") -> str:
    """What is wrong with the form of a count, or ''."""
    if type(value) is int:
        unit = _unit_slip(value, expected) if of == "bytes" and value != expected else ""
        return f"that is the right size in {unit}; return bytes" if unit else ""
    if type(value) is float:
        if unit := _unit_slip(value, expected) if of == "bytes" else "":
            return f"that is the right size in {unit}; return bytes, a whole number"
        return (
            f"{of} are whole numbers, you returned the float {value:,.6g}: compute with ints, // instead of /"
        )
    return f"return an int, a number of {of}; you returned {_kind(value)}"


def _first(messages: Iterable[str]) -> str:
    return next((message for message in messages if message), "")


def _told(faults: Iterable[tuple[str, Sequence[str]] | None], otherwise: str) -> str:
    """The first fault, with the hint that explains every fault; '' without faults.

    A fault is what is wrong with one input, and all hints that would explain it: with b = 1 several do.
    """
    found = [fault for fault in faults if fault]
    if not found:
        return ""
    common = [hint for hint in found[0][1] if all(hint in hints for _, hints in found)]
    hint = next(iter(common or found[0][1]), otherwise)
    return f"{found[0][0]}: {hint}" if hint else found[0][0]


def _once(tally: Tally) -> Score:
    """The points, and each message once: an error is the same on every input."""
    return Score(round(tally.points, 6), tuple(dict.fromkeys(tally.messages)))


# -- 4.1 parameters, exactly -------------------------------------------------------------------------------

_FIELDS = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")


def model_config(name: str) -> TransformerConfig:
    config = any_model(name)
    assert isinstance(config, TransformerConfig)
    return config


def _configs(seed: int) -> dict[str, list[TransformerConfig]]:
    """The cases of each rule: printed ones, and models that exist nowhere."""
    rng = random.Random(f"4.1 {seed}")

    def odd(name: str, groups: int = 1, more: int = 0, **changes: Any) -> TransformerConfig:
        """`more`: the heads are that much wider than hidden / heads."""
        kv, size = rng.randrange(2, 9), 8 * rng.randrange(3, 17)
        hidden = kv * groups * size
        return replace(
            model_config(name), layers=rng.randrange(3, 90), hidden=hidden, heads=kv * groups, kv_heads=kv,
            head_dim=size + more, ffn=64 * rng.randrange(5, 200), vocab=rng.randrange(5_000, 150_000),
            context=32 * rng.randrange(4, 200), **changes,
        )  # fmt: skip

    return {
        "gpt2": [model_config("gpt2"), model_config("gpt2-xl"), odd("gpt2")],
        "bert": [model_config("bert-large"), odd("bert-large", type_vocab=rng.randrange(2, 6))],
        "llama": [model_config("llama2-7b"), odd("llama2-7b"), odd("llama2-7b", tied=True)],
        "llama, grouped queries": [
            model_config("llama2-70b"),
            odd("llama2-70b", groups=rng.randrange(3, 9)),
            odd("llama2-70b", groups=rng.randrange(2, 5), more=8 * rng.randrange(1, 5)),
        ],
    }


def _counted(config: TransformerConfig) -> SimpleNamespace:
    """What the answer is given: the fields that a count needs, without the library's own count."""
    fields = {name: getattr(config, name) for name in _FIELDS}
    return SimpleNamespace(**fields, type_vocab=config.type_vocab, tied=config.tied)


def _n_params_evidence(answer: Any, seed: int) -> Evidence:
    configs = _configs(seed)
    return {
        "answers": {name: [call(answer, _counted(c)) for c in cases] for name, cases in configs.items()},
    }


def _n_params_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    for name, configs in _configs(seed).items():
        answers = evidence["answers"][name]
        fault = _first(_count_fault(c, a) for c, a in answers_to(configs, answers))
        tally.award(0.5, not fault, fault)
    return _once(tally)


def _count_fault(config: TransformerConfig, entry: Evidence) -> str:
    if "error" in entry:
        return stopped("n_params", entry)
    said, right = _value(entry), config.parameter_count
    if type(said) is int and said == right:
        return ""
    c = config
    if type(said) not in (int, float):
        return f"n_params: {_not_a_count(said, right, 'parameters')}"
    what = f"{c.family} with L={c.layers}, h={c.hidden}, heads={c.heads}, kv_heads={c.kv_heads}, ffn={c.ffn}"
    if c.heads * c.head_dim != c.hidden:
        what += f", head_dim={c.head_dim}"
    if fault := _not_a_count(said, right, "parameters"):
        return f"{what}: {fault}"
    return f"{what}: it has {right:,} parameters, you said {said:,}: {_count_hint(config, said)}"


def _count_hint(c: TransformerConfig, said: int) -> str:
    """The group of tensors whose size is the difference, if there is one."""
    h, layers = c.hidden, c.layers
    if said in (2 * layers * h * h + 2 * layers * h, 2 * layers * h * h):
        return "2Lh^2 counts two matrices a block; attention has four of h x h and the MLP 2 x h x ffn"
    if said in (12 * layers * h * h, 12 * layers * h * h + 13 * layers * h):
        return "12Lh^2 are the blocks alone, with an MLP of 4h: use cfg.ffn, add embeddings and the last norm"

    def total(*marks: str, ends: str = "") -> int:
        return sum(
            p.count
            for p in c.parameters()
            if any(m in p.name or p.name.startswith(m.lstrip(".")) for m in marks) and p.name.endswith(ends)
        )

    biases = sum(p.count for p in c.parameters() if p.name.startswith("blocks") and p.name.endswith(".bias")
                 and ".norm" not in p.name)  # fmt: skip
    final = total(".norm.") if c.family != "bert" else 0
    missing = {
        "the head, its own matrix where `tied` is False": 0 if c.tied or c.family == "bert" else c.vocab * h,
        "the token embedding, vocab x hidden": c.vocab * h,
        "the position embedding, context x hidden": c.context * h if c.positions == "learned" else 0,
        "the token-type embedding, type_vocab x hidden": c.type_vocab * h,
        "the norm after the embeddings": 2 * h if c.family == "bert" else 0,
        "the norm after the last block": final,
        "the pooler, a Linear with bias": h * h + h if c.family == "bert" else 0,
        "the biases of the Linear layers": biases,
        "the norms of the blocks": sum(
            p.count for p in c.parameters() if p.name.startswith("blocks") and ".norm" in p.name
        ),
        "the attention's output matrix": layers * h * h,
        "one of the three matrices of a gated MLP": layers * h * c.ffn if c.family == "llama" else 0,
        "one of the two matrices of the MLP": layers * h * c.ffn if c.family != "llama" else 0,
    }
    surplus = {
        "a tied head is the token embedding: count it once": c.vocab * h,
        "rotary positions have no parameters": c.context * h,
        "key and value have kv_heads heads, not heads": 2 * layers * h * (c.heads - c.kv_heads) * c.head_dim,
        "an RMSNorm has a weight and no bias": (2 * layers + 1) * h,
        "its Linear layers have no biases": layers * (3 * h + 2 * c.ffn + 2 * h),
    }
    gap = c.parameter_count - said
    if alike := [name for name, size in missing.items() if size and size == gap]:
        return f"that is short by exactly {', or by '.join(alike)}" + (" (equal here)" if alike[1:] else "")
    for name, size in surplus.items():
        if size and size == -gap:
            return f"too many: {name}"
    for first, size in missing.items():
        for second, other in missing.items():
            if size and other and first < second and size + other == gap:
                return f"that is short by {first}, and by {second}"
    narrow = h // c.heads
    square, by_heads = 2 * layers * h * (c.heads * c.head_dim - h), 2 * layers * h * c.kv_heads
    if gap and gap in (square, square + by_heads * (c.head_dim - narrow)):
        return "the heads needn't make up h: queries and output are h x (heads * head_dim), see cfg.head_dim"
    if c.ffn != 4 * h and gap == layers * (c.ffn - 4 * h) * (3 * h if c.family == "llama" else 2 * h + 1):
        return "the MLP's width is cfg.ffn; it isn't always 4h"
    return f"the difference is {gap:+,}, that is {gap / h:+,.6g} rows of h: list the tensors of one block"


# -- 4.2 one Linear ----------------------------------------------------------------------------------------


def linear_expected(b: int, h_in: int, h_out: int, size: int) -> dict[str, int]:
    """Bytes of Linear(h_in, h_out) with bias on x of (b, h_in): see exercise 4.2."""
    return {
        "parameters": size * (h_in * h_out + h_out),
        "saved": size * b * h_in,
        "forward": size * b * h_out,
        "backward": size * (h_in * h_out + h_out + b * h_in),
    }


def _linears(seed: int) -> list[tuple[int, int, int, int]]:
    rng = random.Random(f"4.2 {seed}")
    odd = [(rng.randrange(2, 60), 8 * rng.randrange(3, 99), 8 * rng.randrange(100, 300)) for _ in range(2)]
    return [(1, 12288, 12288, 4), (7, 1024, 1024, 4), (*odd[0], 4), (*odd[1], 2)]


def _linear_evidence(answer: Any, seed: int) -> Evidence:
    return {"answers": [call(answer, *case) for case in _linears(seed)]}


def _linear_score(evidence: Evidence, seed: int) -> Score:
    cases, answers = _linears(seed), evidence["answers"]
    for entry in answers:
        if "error" in entry:
            return Score(0, (stopped("linear_bytes", entry),))
        if type(_value(entry)) is not dict or not set(linear_expected(1, 1, 1, 1)) <= set(_value(entry)):
            return Score(
                0, ("return a dict with the keys parameters, saved, forward and backward (values in bytes)",)
            )
    tally = Tally()
    for key in linear_expected(1, 1, 1, 1):
        faults = [_linear_fault(key, c, entry["value"][key]) for c, entry in answers_to(cases, answers)]
        fault = _told(faults, "name the tensors that it counts, and their shapes")
        tally.award(0.5, not fault, fault)
    return _once(tally)


def _linear_fault(key: str, case: tuple[int, int, int, int], said: Any) -> tuple[str, list[str]] | None:
    b, i, o, size = case
    right = linear_expected(*case)[key]
    if type(said) is int and said == right:
        return None
    what = f"{key}, linear_bytes(b={b}, h_in={i}, h_out={o}, size={size})"
    if fault := _not_a_count(said, right):
        return what, [fault]
    weight = i * o
    known = {
        "parameters": {
            "the bias is missing, h_out numbers": weight,
            "the bias has h_out numbers, not h_in": weight + i,
            "parameters don't depend on the batch": b * (weight + o),
        },
        "saved": {
            "autograd keeps the input; the output belongs to whoever uses it": b * (i + o),
            "autograd keeps the layer's input, not its output": b * o,
            "the weight is counted with the parameters: what else does the backward need?": weight,
            "the input is enough: the weight is counted with the parameters": b * i + weight,
        },
        "forward": {
            "the forward makes one new tensor, the output; the input was there before": b * (i + o),
            "the output has h_out columns, not h_in": b * i,
            "that is the weight, which was there before": weight,
        },
        "backward": {
            "x needs a gradient too: it has the shape of x": weight + o,
            "the bias has a gradient, too": weight + b * i,
            "the gradient of x has h_in columns": weight + o + b * o,
            "the output's gradient was there before; new are those of weight, bias and x": (
                weight + o + b * i + b * o
            ),
        },
    }[key]
    hints = [text for text, count in known.items() if count * size == said]
    if said == b * weight * size:
        hints.append("no tensor has b x h_in x h_out elements: a matrix product adds up in registers")
    if said == right // size:
        hints.append("that is elements: times `size` bytes")
    if said == right // size * 4:
        hints.append("that is 4 bytes for every number: use `size`")
    return f"{what}: you said {said:,} B, it is {right:,} B", hints


# -- 4.3 scores --------------------------------------------------------------------------------------------

_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}


def score_expected(b: int, heads: int, s: int, layers: int, dtype: str, dropout: bool) -> int:
    """Bytes of (b, heads, s, s) tensors that eager attention keeps: softmax's output, with dropout also its
    mask (one byte each) and its output (Korthikanti et al., arXiv:2205.05198, section 4.1)."""
    size = _SIZES[dtype]
    return layers * b * heads * s * s * (2 * size + 1 if dropout else size)


def _score_cases(seed: int) -> dict[str, list[tuple[int, int, int, int, str, bool]]]:
    rng = random.Random(f"4.3 {seed}")

    def odd() -> tuple[int, int, int, int]:
        return rng.randrange(2, 30), rng.randrange(2, 100), 32 * rng.randrange(3, 300), rng.randrange(2, 100)

    return {
        "fp32": [(1, 1, 4096, 1, "fp32", False), (1, 96, 4096, 96, "fp32", False), (*odd(), "fp32", False)],
        "16 bit": [(*odd(), "bf16", False), (*odd(), "fp16", False)],
        "16 bit, dropout": [(*odd(), "bf16", True), (*odd(), "fp16", True)],
        "fp32, dropout": [(*odd(), "fp32", True)],
    }


def _scores_evidence(answer: Any, seed: int) -> Evidence:
    cases = _score_cases(seed)
    return {"answers": {n: [call(answer, *c) for c in group] for n, group in cases.items()}}


def _scores_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    for name, cases in _score_cases(seed).items():
        answers = evidence["answers"][name]
        fault = _told(
            (_score_fault(case, entry) for case, entry in answers_to(cases, answers)),
            "which tensors have the shape (b, heads, s, s), and how wide are their numbers?",
        )
        tally.award(0.5, not fault, fault)
    return _once(tally)


def _score_fault(case: tuple[int, int, int, int, str, bool], entry: Evidence) -> tuple[str, list[str]] | None:
    if "error" in entry:
        return stopped("score_bytes", entry), [""]
    b, heads, s, layers, dtype, dropout = case
    said, right = _value(entry), score_expected(*case)
    if type(said) is int and said == right:
        return None
    what = f"b={b}, heads={heads}, s={s}, layers={layers}, {dtype}, dropout={dropout}"
    if type(said) not in (int, float):
        return "score_bytes", [_not_a_count(said, right)]
    if fault := _not_a_count(said, right):
        return what, [fault]
    size, scores = _SIZES[dtype], layers * b * heads * s * s
    per = f"you said {said / scores:,.4g} B per score, it is {right // scores}"
    return f"{what}: {per}", _score_hints(case, said, size)


def _score_hints(case: tuple[int, int, int, int, str, bool], said: int, size: int) -> list[str]:
    """Each forgotten or doubled factor, alone or with wrong bytes per score, that explains what was said."""
    b, heads, s, layers, _, dropout = case
    scores = layers * b * heads * s * s
    widths = {2 * size + 1 if dropout else size: ""}
    if dropout:
        widths |= {
            size: "that is softmax's output alone: dropout keeps its mask and output, too",
            2 * size: "the mask of dropout is missing, one byte per score",
            3 * size: "the mask of dropout takes one byte per score, not a number's size",
            size + 1: "that is softmax's output and the mask; dropout's output is kept, too",
        }
    else:
        widths |= {
            2 * size + 1: "without dropout only softmax's output is kept",
            2 * size: "softmax keeps its output; the scores before it aren't needed any more"
            if size == 4
            else "a number of fp16 or bf16 has 2 bytes",
        }
    for width, hint in ((4, "a number of fp16 or bf16 has 2 bytes"), (5, "5 bytes per score are for 16 bit"),
                        (2, "an fp32 number has 4 bytes")):  # fmt: skip
        widths.setdefault(width, hint)
    factors = {
        "": 1,
        "every head has scores of its own (times heads)": heads,
        "every layer keeps its scores until its backward (times layers)": layers,
        "times heads and times layers": heads * layers,
        "every sequence has scores of its own (times b)": b,
        "there is a score for each pair of tokens: s x s": s,
        "times b, heads and layers": b * heads * layers,
    }
    hints = [
        "; ".join(filter(None, (factor, width)))
        for width_bytes, width in widths.items()
        for factor, missing in factors.items()
        if said * missing == scores * width_bytes
    ]
    if said == scores * (2 * size + 1 if dropout else size) * heads:
        hints.append("heads is in it twice")
    return hints


# -- 4.4 tiled attention -----------------------------------------------------------------------------------


class _Attention(NamedTuple):
    b: int
    heads: int
    s: int
    d: int
    block: int
    causal: bool = False
    scale: float = 1.0  # of the queries: 1 is ordinary, 60 has scores far above exp's range

    def __str__(self) -> str:
        large = ", large scores" if self.scale > 1 else ""
        shape = (self.b, self.heads, self.s, self.d)
        return f"q, k, v of {shape}, block={self.block}, causal={self.causal}{large}"


def _attentions(seed: int) -> dict[str, list[_Attention]]:
    rng = random.Random(f"4.4 {seed}")

    def odd(**more: Any) -> _Attention:
        b, heads, block = rng.randrange(1, 3), rng.randrange(2, 4), rng.randrange(9, 20)
        return _Attention(b, heads, block * 4 + rng.randrange(1, 8), 4 * rng.randrange(2, 9), block, **more)

    return {
        "equal": [odd(), odd()._replace(s=7, block=16)],
        "large": [odd(scale=60.0), odd(scale=200.0)],
        "causal": [odd(causal=True), odd(causal=True, scale=60.0)],
    }


def _long(seed: int) -> tuple[_Attention, _Attention, _Attention]:
    """Three lengths whose bytes are measured: s, 2s, and 2s with the causal mask. One head."""
    rng = random.Random(f"4.4 bytes {seed}")
    short = _Attention(1, 1, 16 * rng.randrange(38, 46), 32, 64)
    return short, short._replace(s=2 * short.s), short._replace(s=2 * short.s, causal=True)


def _numbered(seed: int) -> _Attention:
    """One head whose keys are told apart by their scores; a block is no multiple of d."""
    rng = random.Random(f"4.4 keys {seed}")
    return _Attention(1, 1, rng.randrange(300, 500), 16, rng.randrange(18, 31))


def tiles_bound(case: _Attention) -> int:
    """Bytes beyond q, k and v that tiled attention may hold: six tiles of s x block, six outputs of s x d.

    Room for a tile of all queries by one block of keys, its exponentials and copies; eager needs 2 s^2.
    """
    return 4 * case.b * case.heads * case.s * 6 * (case.block + case.d)


def _inputs(case: _Attention, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed % 2**32 + case.s)
    shape = (case.b, case.heads, case.s, case.d)
    q, k, v = (torch.randn(*shape, generator=generator) for _ in range(3))
    return q * case.scale, k, v


def _wrong_ways(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool) -> dict[str, Tensor]:
    """What the likeliest mistakes return, by what to say about them."""
    import torch

    scores = q @ k.mT / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    parts = list(zip(torch.split(scores, block, -1), torch.split(v, block, -2), strict=True))
    softmaxes = [torch.nan_to_num(part.softmax(-1)) @ values for part, values in parts]
    rising = torch.full_like(scores[..., :1], -math.inf)
    unscaled, scaled = torch.zeros_like(q), torch.zeros_like(q)
    wrong_total, total = torch.zeros_like(rising), torch.zeros_like(rising)
    for part, values in parts:
        before, rising = rising, torch.maximum(rising, part.amax(-1, keepdim=True))
        shrink, p = torch.nan_to_num((before - rising).exp()), torch.nan_to_num((part - rising).exp())
        unscaled, scaled = unscaled + p @ values, scaled * shrink + p @ values
        wrong_total, total = wrong_total + p.sum(-1, keepdim=True), total * shrink + p.sum(-1, keepdim=True)
    return {
        "the softmaxes of single blocks can't be added: each divides by its own sum; keep a running "
        "maximum and sum for each row": sum(softmaxes[1:], softmaxes[0]),
        "the mean of the blocks' softmaxes isn't the softmax: a block counts by its sum of exponentials": (
            sum(softmaxes[1:], softmaxes[0]) / len(parts)
        ),
        "when the running maximum rises, what was summed before must be scaled by exp(old - new): the output "
        "so far and the sum so far": unscaled / wrong_total,
        "when the maximum rises, the sum is scaled by exp(old - new), the output so far is not": (
            unscaled / total
        ),
        "when the maximum rises, the output so far is scaled by exp(old - new), the sum is not": (
            scaled / wrong_total
        ),
        "divide the scores by sqrt(d)": (q * q.size(-1) ** 0.5 @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v,
        "that is as without the mask: with causal=True query i sees the keys 0 to i": (
            (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        ),
        "the output isn't divided by the row's sum of exponentials": (
            (scores - scores.amax(-1, keepdim=True)).exp() @ v
        ),
    }  # fmt: skip


def _tiled_case(answer: Any, case: _Attention, seed: int) -> Evidence:
    import torch

    q, k, v = _inputs(case, seed)
    scores = (q.double() @ k.double().mT) / case.d**0.5
    if case.causal:
        scores = scores.masked_fill(torch.ones(case.s, case.s).triu(1).bool(), -math.inf)
    right, logs = (scores.softmax(-1) @ v.double()).float(), scores.logsumexp(-1).float()
    if case.causal:
        with torch.no_grad():
            got = answer(q, k, v, case.block, causal=True)
    else:
        with torch.no_grad():
            got = answer(q, k, v, case.block)
    pair = isinstance(got, (tuple, list))
    if not pair or len(got) != 2 or not all(type(t) is torch.Tensor for t in got):
        found = f"a {type(got).__name__}" + (f" of {len(got)}" if pair else "")
        return {"form": f"return two tensors, (out, lse); you returned {found}"}
    out, lse = got
    if out.shape != q.shape:
        return {"form": f"out has the shape {tuple(out.shape)}, q has {tuple(q.shape)}: they must be equal"}
    ways = _wrong_ways(q, k, v, case.block, case.causal)
    full = case.s // case.block * case.block
    if 0 < full < case.s and not case.causal:
        shorter = scores[..., :full].softmax(-1) @ v.double()[..., :full, :]
        ways["the last block is shorter than `block`, and its keys are left out"] = shorter.float()
    told = [text for text, way in ways.items() if _same(out, way)]
    return {
        "error_out": _apart(out, right),
        "error_lse": _apart(lse, logs) if lse.shape == logs.shape else str(tuple(lse.shape)),
        "nan": bool(torch.isnan(out).any()),
        "told": told[:1],
        "rows": 0 < full < case.s and _same(out[..., :full, :], right[..., :full, :]),
    }


def _same(a: Tensor, b: Tensor) -> bool:
    apart = _apart(a, b)
    return is_number(apart) and apart < 1e-4


def _apart(a: Tensor, b: Tensor) -> Any:
    """Largest difference, relative to the largest value."""
    return plain(((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item())


def _peak(answer: Any, case: _Attention, seed: int) -> Evidence:
    """Live bytes beyond q, k and v at the highest, and the operators that ran."""
    import torch

    from memlab.meter import Meter

    q, k, v = _inputs(case, seed)
    gc.collect()
    with torch.no_grad(), Meter() as meter:
        got = answer(q, k, v, case.block, causal=True) if case.causal else answer(q, k, v, case.block)
    del got
    trace = meter.trace
    given = sum(b.bytes for b in trace.blocks() if not b.operator)  # q, k, v, and what was there before
    largest = max((b for b in trace.blocks() if b.operator), key=lambda b: b.bytes, default=None)
    fused = any("scaled_dot_product" in b.operator or "attention" in b.operator for b in trace.blocks())
    return {
        "peak": trace.peak_bytes - given,
        "largest": "" if largest is None else f"{tuple(largest.shape)} by {largest.operator}",
        "fused": fused,
    }


def _most_keys(answer: Any, case: _Attention) -> Evidence:
    """Of how many keys a single tensor holds the scores, or what is made of them, at most.

    All queries are the same, and so are all values; a key is its number in binary, and its score is that
    number. So every other tensor has few different numbers, one of scores as many as it has keys, whatever
    its layout.
    """
    import torch

    number, bit = torch.arange(case.s)[:, None], torch.arange(case.d)
    k = (number >> bit & 1).float()[None, None]
    q = (2.0**bit * (bit < 9) * (8 * case.d**0.5 / 512)).expand(1, 1, case.s, case.d).contiguous()
    v = torch.ones(1, 1, case.s, case.d)
    most, where = 0, ""

    def look(operator: Any, t: Tensor) -> None:
        nonlocal most, where
        name = str(operator).removeprefix("aten.").partition(".")[0]
        if operator.is_view or "empty" in name or not t.is_floating_point():  # nothing new, or nothing yet
            return
        values = t[torch.isfinite(t)].flatten().sort().values
        apart = values.diff() > 5e-4 * torch.maximum(values[1:].abs(), values[:-1].abs())
        if (count := int(apart.sum()) + 1) > most:
            most, where = count, f"{tuple(t.shape)} by {name}"

    with torch.no_grad(), watched(look):
        answer(q, k, v, case.block)
    return {"keys": most, "where": where}


def _tiled_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        found: Evidence = {}
        for name, cases in _attentions(seed).items():
            found[name] = [call(_tiled_case, answer, case, seed) for case in cases]
        right = all(is_number(_value(e).get("error_out")) and _value(e)["error_out"] <= 1e-4
                    for e in found["equal"] if "value" in e)  # fmt: skip
        found["bytes"] = [call(_peak, answer, case, seed) for case in _long(seed)] if right else []
        found["keys"] = call(_most_keys, answer, _numbered(seed)) if right else {}
        return found

    return contained(work, seconds=90, memory=3 * GIB)


def _tiled_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    faults = {
        name: _first(
            _tiled_fault(case, entry) for case, entry in answers_to(cases, evidence[name])
        )
        for name, cases in _attentions(seed).items()
    }  # fmt: skip
    if any(_value(e)["fused"] is not False for e in evidence["bytes"] if "error" not in e):
        return Score(
            0, ("scaled_dot_product_attention does it for you: write the loop over the tiles yourself",)
        )
    equal = tally.award(1, not faults["equal"], faults["equal"])
    if not equal:
        tally.messages.append("large scores, the mask and the bytes are looked at once the output is right")
        return _once(tally)
    tally.award(1, not faults["large"], faults["large"])
    causal = tally.award(0.5, not faults["causal"], faults["causal"])
    logs = _first(
        _lse_fault(case, entry)
        for name in ("equal", "large")
        for case, entry in answers_to(_attentions(seed)[name], evidence[name])
    )
    first = "lse: first make the output of large scores right" if faults["large"] else ""
    tally.award(0.5, not first and not logs, first or logs)
    cases = _long(seed)
    measured = [_bytes_fault(c, e, evidence) for c, e in answers_to(cases, evidence["bytes"])]
    ((case, entry),) = answers_to([_numbered(seed)], [evidence["keys"]])
    measured[0] = measured[0] or _keys_fault(case, entry)
    tally.award(1.5, not any(measured[:2]), _first(measured[:2]))
    tally.award(0.5, causal and not any(measured), measured[2] or "causal: then its bytes are looked at")
    return _once(tally)


def _tiled_fault(case: _Attention, entry: Evidence) -> str:
    if "error" in entry:
        return f"{case}: it stopped with {entry['error']}"
    value = _value(entry)
    if "form" in value:
        return f"{case}: {value['form']}"
    error = value["error_out"]
    if is_number(error) and error <= 1e-4:
        return ""
    if value["told"]:
        return f"{case}: {value['told'][0]}"
    if value["nan"]:
        why = "exp of a large score is inf: subtract the running maximum first" if case.scale > 1 else (
            "is a row's running maximum still -inf when you subtract it? -inf - -inf is nan"
        )  # fmt: skip
        return f"{case}: the output has nan: {why}"
    if value["rows"]:
        return f"{case}: the last rows are wrong: the last block of queries is shorter than `block`"
    hint = "compare with torch.softmax(q @ k.mT / d**0.5, -1) @ v, first for block = s, then for two blocks"
    return f"{case}: out is off by {_percent(error)} of its largest value: {hint}"


def _percent(error: Any) -> str:
    return f"{error:.2%}" if is_number(error) else str(error)


def _lse_fault(case: _Attention, entry: Evidence) -> str:
    if "error" in entry or "form" in _value(entry):
        return f"{case}: lse is looked at once out is right"
    error = _value(entry)["error_lse"]
    if type(error) is str and error.startswith("("):
        return f"{case}: lse has the shape {error}; it is one number for each query: (b, heads, s)"
    if is_number(error) and error <= 1e-4:
        return ""
    return f"{case}: lse is off by {_percent(error)}: the logarithm of the row's sum is maximum + log(sum)"


def _bytes_fault(case: _Attention, entry: Evidence, evidence: Evidence) -> str:
    """What is too much in one measured call, or ''."""
    if "error" in entry:
        return f"{case}: it stopped with {entry['error']}"
    value, bound, eager = _value(entry), tiles_bound(case), 2 * 4 * case.s * case.s
    if value["peak"] <= bound:
        return ""
    text = f"{case}: at its highest it holds {format_bytes(value['peak'])} beyond q, k and v, at most "
    text += f"{format_bytes(bound)} is asked (six tiles of s x block and six outputs), eager takes "
    text += f"{format_bytes(eager)}; the largest new tensor is {value['largest']}"
    if value["peak"] >= 0.9 * 4 * case.s * case.s:
        return text + ": something of the size s x s is still there: a tile, the mask or a list of tiles"
    return text + ": free a tile before the next is made, don't collect them in a list"


def _keys_fault(case: _Attention, entry: Evidence) -> str:
    """What is wrong where a tensor holds the scores of more keys than a block has, or ''."""
    if "error" in entry:
        return f"{case}: it stopped with {entry['error']}"
    keys = _value(entry)["keys"]
    if keys <= 2 * case.block:
        return ""
    return (
        f"{case}: scores of {keys} keys are in one tensor, {_value(entry)['where']}: tiles of queries alone "
        "aren't enough. Take `block` keys at a time, k[..., j : j + block, :]; keep a running maximum and sum"
    )


# -- ranks in one process ----------------------------------------------------------------------------------


class Comm:
    """The collectives of one rank. Each rank calls them in the same order; all wait for each other.

    rank, world_size: who am I, of how many.
    all_reduce(t): the sum over all ranks, on each of them.
    reduce_scatter(t): this rank's part of that sum; the first dimension is divided among the ranks.
    all_gather(t): what all ranks gave, joined along the first dimension, on each of them.

    These three ignore autograd. For a forward whose backward matters:
    sum(t): forward all_reduce; backward: the gradient as it is.
    copy(t): forward t as it is; backward all_reduce of the gradient.
    join(t): forward joined along the last dimension; backward this rank's slice of the gradient.

    calls[name], sent[name]: how often, and the bytes sent by the ring algorithm: (N-1)/N of the whole tensor
    for reduce_scatter and all_gather, twice that for all_reduce.
    """

    def __init__(self, rank: int, world_size: int, meet: Callable[[int, str, Tensor], list[Tensor]]) -> None:
        self.rank, self.world_size, self._meet = rank, world_size, meet
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _exchange(self, name: str, tensor: Tensor, whole: int) -> list[Tensor]:
        self.calls[name] += 1
        self.sent[name] += (
            (2 if name == "all_reduce" else 1) * whole * (self.world_size - 1) // self.world_size
        )
        return self._meet(self.rank, name, tensor.detach())

    def all_reduce(self, t: Tensor) -> Tensor:
        terms = self._exchange("all_reduce", t, t.nbytes)
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        return total

    def reduce_scatter(self, t: Tensor) -> Tensor:
        n = self.world_size
        if t.size(0) % n:
            raise ValueError(f"reduce_scatter: {t.size(0)} rows can't be divided among {n} ranks: pad them")
        terms = self._exchange("reduce_scatter", t, t.nbytes)
        mine = terms[0].chunk(n)[self.rank].clone()
        for term in terms[1:]:
            mine += term.chunk(n)[self.rank]
        return mine

    def all_gather(self, t: Tensor) -> Tensor:
        import torch

        return torch.cat(self._exchange("all_gather", t, t.nbytes * self.world_size))

    def sum(self, t: Tensor) -> Tensor:
        return _apply(self, "sum", t)

    def copy(self, t: Tensor) -> Tensor:
        return _apply(self, "copy", t)

    def join(self, t: Tensor) -> Tensor:
        return _apply(self, "join", t)


def _apply(comm: Comm, name: str, tensor: Tensor) -> Tensor:
    import torch

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            if name == "sum":
                return comm.all_reduce(t)
            if name == "copy":
                return t.view_as(t)
            parts = comm._exchange("all_gather", t, t.nbytes * comm.world_size)
            return torch.cat(parts, dim=-1)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (gradient,) = gradients
            if name == "sum":
                return gradient
            if name == "copy":
                return comm.all_reduce(gradient)
            width = gradient.size(-1) // comm.world_size
            return gradient.narrow(-1, comm.rank * width, width)

    result: Tensor = Collective.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def run_ranks(function: Callable[[Comm], Any], world_size: int = 2, wait: float = 20) -> list[Any]:
    """`function(comm)` on each rank, a thread of this process each: the results by rank.

    Raises what the first failing rank raised; RuntimeError where ranks call different collectives, or where
    one waits longer than `wait` seconds for the others.
    """
    barrier = threading.Barrier(world_size)
    given: list[tuple[str, Tensor] | None] = [None] * world_size
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []
    finished: list[int] = []

    def alone(rank: int, name: str) -> RuntimeError:
        return RuntimeError(
            f"rank {rank} waits in {name}, which not every rank calls: all must call the same collectives in "
            "the same order"
        )

    def meet(rank: int, name: str, tensor: Tensor) -> list[Tensor]:
        if finished:  # it makes no call any more
            raise alone(rank, name)
        given[rank] = (name, tensor)
        try:
            barrier.wait(wait)
            entries = [entry for entry in given if entry is not None]
            barrier.wait(wait)
        except threading.BrokenBarrierError:
            raise alone(rank, name) from None
        called = {(what, tuple(t.shape)) for what, t in entries}
        if len(called) > 1:
            told = " and ".join(f"{what} of {shape}" for what, shape in sorted(called))
            raise RuntimeError(f"the ranks meet with different calls, {told}: all must make the same call")
        return [t for _, t in entries]

    def body(rank: int) -> None:
        try:
            results[rank] = function(Comm(rank, world_size, meet))
        except BaseException as error:
            failures.append((rank, error))
            barrier.abort()
        else:
            finished.append(rank)
            while len(finished) + len(failures) < world_size:  # whoever waits now would wait for ever
                if barrier.n_waiting:
                    barrier.abort()
                time.sleep(0.002)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        own = [f for f in failures if not str(f[1]).startswith("rank ")]  # the others only lost their partner
        raise (own or failures)[0][1]
    return results


def _expired(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# -- 4.5 an MLP on k ranks ---------------------------------------------------------------------------------


class _Split(NamedTuple):
    ranks: int
    tokens: int
    h: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, x of {(self.tokens, self.h)}, hidden {self.hidden}"

    @property
    def held(self) -> int:
        """Weight bytes of one rank: its part of both matrices and of up's bias, down's bias whole."""
        part = self.hidden // self.ranks
        return 4 * (2 * self.h * part + part + self.h)

    @property
    def saved(self) -> int:
        """Bytes saved for the backward on one rank: x whole, GELU's input and output of its part."""
        return 4 * self.tokens * (self.h + 2 * self.hidden // self.ranks)


def _splits(seed: int) -> list[_Split]:
    rng = random.Random(f"4.5 {seed}")

    def one(ranks: int) -> _Split:
        h = 4 * ranks * rng.randrange(3, 7)
        return _Split(ranks, rng.randrange(30, 60), h, 4 * ranks * rng.randrange(18, 30))

    return [one(2), one(rng.choice((3, 4)))]


def _split_case(answer: Any, case: _Split, seed: int) -> Evidence:
    import torch
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(seed % 2**32 + case.h)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    whole = {"up.weight": draw(case.hidden, case.h), "up.bias": draw(case.hidden),
             "down.weight": draw(case.h, case.hidden), "down.bias": draw(case.h)}  # fmt: skip
    x, g = draw(case.tokens, case.h), draw(case.tokens, case.h)

    def layers() -> tuple[nn.Linear, nn.Linear]:
        up, down = nn.Linear(case.h, case.hidden), nn.Linear(case.hidden, case.h)
        with torch.no_grad():
            for name, layer in (("up", up), ("down", down)):
                layer.weight.copy_(whole[f"{name}.weight"])
                layer.bias.copy_(whole[f"{name}.bias"])
        return up, down

    up, down = layers()
    own = x.clone().requires_grad_()
    right: Tensor = down(F.gelu(up(own)))
    right.backward(g)  # type: ignore[no-untyped-call]
    trained = {
        f"{name}.{n}": p for name, layer in (("up", up), ("down", down)) for n, p in layer.named_parameters()
    }
    squares = {name: float(p.grad.square().sum()) for name, p in trained.items() if p.grad is not None}
    bias = whole["down.bias"]
    k = case.ranks
    ways = {
        "down's bias is added on every rank, so the sum has it more than once: add it after the sum": right
        + (k - 1) * bias,
        "down's bias is missing": right - bias,
        "that is the mean over the ranks; the parts are terms of a sum": (right - bias) / k + bias,
    }

    def rank(comm: Comm) -> Evidence:
        mine, other = layers()
        sizes: dict[
            StorageWeakRef, int
        ] = {}  # of what is given and of what is made (a Meter isn't for threads)

        def note(_: Any, t: Tensor) -> None:
            sizes[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()  # type: ignore[no-untyped-call]

        for layer in (mine, other):
            for p in layer.parameters():
                note(None, p)
        with watched(note):
            part = answer(mine, other, comm)
        del mine, other, layer, p
        gc.collect()
        held = sum(size for storage, size in sizes.items() if not _expired(storage))
        if not isinstance(part, nn.Module):
            raise TypeError(f"SplitMLP(up, down, comm) must be an nn.Module, not {_kind(plain(part))}")
        parameters = list(part.parameters())
        loose = [t for m in part.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
        given = sum(p.nbytes for p in parameters)
        known = {t.untyped_storage()._cdata for t in (*parameters, *part.buffers(), *loose)}
        saved: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage.nbytes()
            return t.detach()

        own = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = part(own)
        if not isinstance(y, torch.Tensor) or y.shape != right.shape:
            shape = tuple(y.shape) if isinstance(y, torch.Tensor) else _kind(plain(y))
            return {
                "form": f"forward returned {shape}; every rank returns the whole output, {tuple(x.shape)}"
            }
        forward, sent = dict(comm.calls), sum(comm.sent.values())
        told = [text for text, way in ways.items() if _same(y.detach(), way)]
        alone = not forward
        y.backward(g)  # type: ignore[no-untyped-call]
        total = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
        return {
            "output": _apart(y.detach(), right), "told": told[:1], "alone": alone, "held": held,
            "given": given, "saved": sum(saved.values()),
            "forward": forward, "sent": sent, "all": dict(comm.calls),
            "squares": plain(total), "missing": sum(p.grad is None for p in parameters),
            "input": None if own.grad is None else _apart(own.grad, truth),
            "input_norm": None if own.grad is None else plain((own.grad.norm() / truth.norm()).item()),
        }  # fmt: skip

    assert own.grad is not None
    truth = own.grad
    return {"ranks": run_ranks(rank, case.ranks), "squares": squares}


def _split_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        # NotImplementedError passes through `call` and ends the check: not written yet
        return {"cases": [call(_split_case, answer, case, seed) for case in _splits(seed)]}

    return contained(work, seconds=90, memory=3 * GIB)


def _split_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    pairs = answers_to(_splits(seed), evidence["cases"])
    for case, e in pairs:
        exactly(e["value"]["ranks"] if "value" in e else [0] * case.ranks, case.ranks)
    failed = _first(f"{case}: it stopped with {e['error']}" for case, e in pairs if "error" in e)
    if "cannot be multiplied" in failed:
        failed += "; nn.Linear stores (outputs, inputs): a rank has rows of up.weight, columns of down.weight"
    if failed:
        return Score(0, (failed,))
    outputs = _first(_output_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    if not tally.award(1, not outputs, outputs):
        tally.messages.append("gradients, bytes and messages are looked at once the output is right")
        return _once(tally)
    gradients = _first(_gradient_fault(case, _value(e)) for case, e in pairs)
    tally.award(1, not gradients, gradients)
    held = _first(_held_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    tally.award(0.5, not held, held)
    saved = _first(_saved_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    tally.award(0.5, not saved and not held, saved or "activations: first let go of the whole weights")
    sent = _first(_sent_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    cut = any(rank["input"] is None for _, e in pairs for rank in _value(e)["ranks"])  # said above
    tally.award(1, not sent, gradients if cut and "the backward makes no all_reduce" in sent else sent)
    return _once(tally)


def _output_fault(case: _Split, rank: Evidence) -> str:
    if "form" in rank:
        return f"{case}: {rank['form']}"
    if is_number(rank["output"]) and rank["output"] <= 1e-5:
        return ""
    text = f"{case}: the output is off by {_percent(rank['output'])} of its largest value"
    if rank["told"]:
        return f"{case}: {rank['told'][0]}"
    if rank["alone"]:
        return (
            text + ": no collective was called, and a rank's part is only one term of the sum: comm.sum(part)"
        )
    return text + ": up gives rank r its r-th slice of the outputs, down takes that slice as inputs; "\
        "sum the parts, then add down's bias"  # fmt: skip


def _gradient_fault(case: _Split, value: Evidence) -> str:
    ranks = value["ranks"]
    if any(rank["input"] is None for rank in ranks):
        return f"{case}: x got no gradient: comm.all_reduce stops autograd, comm.sum doesn't"
    if any(rank["missing"] for rank in ranks):
        return f"{case}: a parameter got no gradient: one that the forward doesn't use shouldn't be kept"
    if any(rank["given"] > 1.5 * case.held for rank in ranks):
        return f"{case}: a rank has gradients of more than its part of the weights: give it its slices only"
    squares = value["squares"]
    weights = sum(v for name, v in squares.items() if name.endswith("weight"))
    total = sum(rank["squares"] for rank in ranks)
    # a bias may be cut, or whole on one rank or on all of them
    off = min(
        abs(total - weights - n * squares["up.bias"] - m * squares["down.bias"])
        for n in (1, case.ranks)
        for m in (1, case.ranks)
    )
    wrong = next((rank for rank in ranks if not (is_number(rank["input"]) and rank["input"] <= 1e-4)), None)
    if wrong is not None:
        times = wrong["input_norm"]
        hint = "each rank has only its part of dL/dx, and the parts must be summed: start with comm.copy(x)"
        if close(times, case.ranks, 1e-3):
            hint = f"it is {case.ranks} times too large: it was summed once too often"
        elif sum(wrong["all"].values()) > sum(wrong["forward"].values()):
            hint = f"it is {_times(times)} as large, although its parts are summed: what else scales it?"
        return f"{case}: the gradient of x isn't that of the whole MLP: {hint}"
    if off > 1e-3 * total:
        return (
            f"{case}: the gradients of the weights differ from the whole MLP's by a factor of about "
            f"{math.sqrt(total / sum(squares.values())):.3g}: is each part used once, and summed once?"
        )
    return ""


def _times(value: Any) -> str:
    return f"{value:.3g} times" if is_number(value) else str(value)


def _held_fault(case: _Split, rank: Evidence) -> str:
    if rank["held"] <= case.held * 1.02:
        return ""
    whole = 4 * (2 * case.h * case.hidden + case.hidden + case.h)
    text = f"{case}: a rank holds {rank['held']:,} B of weights, its part is {case.held:,} B"
    if rank["given"] >= 0.98 * whole:
        return text + ": the whole layers are among its parameters; keep neither `up` nor `down`, only slices"
    if rank["held"] >= 0.98 * whole:
        return (
            text + ": the whole `up` and `down` are alive. A slice is a view and keeps the whole storage: "
            "clone() it, and keep neither layer, in no list either"
        )
    return text + ": one N-th of up's weight and bias and of down's weight, and down's bias"


def _saved_fault(case: _Split, rank: Evidence) -> str:
    if rank["saved"] <= case.saved * 1.1:
        return ""
    text = f"{case}: {rank['saved']:,} B are saved for the backward on a rank, {case.saved:,} B are needed"
    return text + ": x, and GELU's input and output of this rank's slice; nothing between needs to be whole"


def _sent_fault(case: _Split, rank: Evidence) -> str:
    once = 2 * 4 * case.tokens * case.h * (case.ranks - 1) // case.ranks
    if rank["forward"] == {"all_reduce": 1} and rank["sent"] == once and rank["all"] == {"all_reduce": 2}:
        return ""
    text = f"{case}: the forward makes {_listed(rank['forward'])} and sends {rank['sent']:,} B"
    if not rank["forward"]:
        return (
            f"{case}: the ranks send nothing, each does all the work: each should do its part, then comm.sum"
        )
    if "all_gather" in rank["forward"]:
        return (
            text
            + ": don't join the slices: down can take rank r's slice as it is, one sum at the end is enough"
        )
    if rank["forward"] == {"all_reduce": 1} and rank["sent"] == once:
        if rank["all"] == rank["forward"]:
            return f"{case}: the backward makes no all_reduce: the gradient of x is a sum over the ranks, too"
        return f"{case}: forward and backward make {_listed(rank['all'])}: one all_reduce each way is enough"
    return text + f": one all_reduce of the output is enough, {once:,} B"


def _listed(calls: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in calls.items()) or "no collective"


# -- 4.6 ZeRO ----------------------------------------------------------------------------------------------

_ZERO_KEYS = ("parameters", "gradients", "optimizer_states")


def zero_expected(parameters: int, world_size: int, stage: int, each: Sequence[int]) -> dict[str, int]:
    """Bytes per rank: stage 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    firsts = (3, 2, 1)
    return {
        name: parameters * size // (world_size if stage >= first else 1)
        for name, size, first in zip(_ZERO_KEYS, each, firsts, strict=True)
    }


def _zeros(seed: int) -> dict[str, list[tuple[int, int, int, tuple[int, int, int]]]]:
    """Cases by rule; the parameters are a multiple of the ranks, so every share is whole."""
    rng = random.Random(f"4.6 {seed}")

    def odd(stage: int, each: tuple[int, int, int]) -> tuple[int, int, int, tuple[int, int, int]]:
        ranks = rng.randrange(3, 200)
        return ranks * rng.randrange(10**6, 10**9), ranks, stage, each

    mixed, fp32 = (2, 2, 12), (4, 4, 8)
    return {
        "stages 0 and 1": [(7_500_000_000, 8, 0, mixed), (7_500_000_000, 64, 1, mixed), odd(1, mixed)],
        "stage 2": [(7_500_000_000, 64, 2, mixed), odd(2, mixed)],
        "stage 3": [(7_500_000_000, 64, 3, mixed), odd(3, mixed)],
        "fp32": [odd(stage, fp32) for stage in (1, 2, 3)],
    }


class _Sharded(NamedTuple):
    ranks: int
    shapes: tuple[tuple[int, ...], ...]
    optimizer: str

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {self.total:,} parameters in {len(self.shapes)} tensors, {self.optimizer}"
        )

    @property
    def total(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def moments(self) -> int:
        return 2 if self.optimizer == "AdamW" else 1

    @property
    def state_bound(self) -> int:
        """Bytes of states that a rank may hold: one N-th of each moment, padding, counters."""
        padded = self.total + self.ranks * len(self.shapes)
        return 4 * self.moments * padded // self.ranks + 8 * len(self.shapes)

    @property
    def sent_bound(self) -> int:
        """Bytes sent in one step: a reduce-scatter and an all-gather of all parameters, padded."""
        return 2 * 4 * (self.total + self.ranks * len(self.shapes)) * (self.ranks - 1) // self.ranks


def _shardeds(seed: int) -> list[_Sharded]:
    rng = random.Random(f"4.6 ranks {seed}")

    def shapes() -> tuple[tuple[int, ...], ...]:
        h = rng.randrange(20, 40)
        return (h, 3 * h), (3 * h,), (3 * h, h + 1), (h + 1,), (5,)

    return [_Sharded(2, shapes(), "SGD with momentum"), _Sharded(rng.choice((3, 4, 5)), shapes(), "AdamW")]


def _make(name: str, parameters: Any) -> torch.optim.Optimizer:
    import torch

    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _sharded_case(answer: Any, case: _Sharded, seed: int) -> Evidence:
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed % 2**32 + case.total)
    begin = [torch.randn(shape, generator=generator) for shape in case.shapes]
    steps = 3
    gradients = [
        [[torch.randn(shape, generator=generator) for shape in case.shapes] for _ in range(case.ranks)]
        for _ in range(steps)
    ]
    plainly = [nn.Parameter(t.clone()) for t in begin]
    reference = _make(case.optimizer, plainly)
    summed = [nn.Parameter(t.clone()) for t in begin]
    sums = _make(case.optimizer, summed)
    for step in gradients:
        for i in range(len(begin)):
            total = torch.stack([rank[i] for rank in step]).sum(0)
            plainly[i].grad, summed[i].grad = total / case.ranks, total
        for optimizer in (reference, sums):
            optimizer.step()

    def rank(comm: Comm) -> Evidence:
        parameters = [nn.Parameter(t.clone()) for t in begin]
        made: list[torch.optim.Optimizer] = []

        def make(pieces: Any) -> torch.optim.Optimizer:
            made.append(_make(case.optimizer, pieces))
            return made[-1]

        zero = answer(parameters, make, comm)
        sent = []
        for step in gradients:
            for p, g in zip(parameters, step[comm.rank], strict=True):
                p.grad = g.clone()
            before = sum(comm.sent.values())
            zero.step()
            sent.append(sum(comm.sent.values()) - before)
        states = [
            t for o in made for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        ]
        given = {p.untyped_storage()._cdata for p in parameters}
        owned = [t for o in made for group in o.param_groups for t in group["params"]]
        pieces = _storage_bytes(t for t in owned if t.untyped_storage()._cdata not in given)
        flat = torch.cat([p.detach().flatten() for p in parameters])

        def off(expected: Sequence[Tensor]) -> Any:
            return _apart(flat, torch.cat([p.detach().flatten() for p in expected]))

        return {
            "off": off(plainly), "summed": off(summed), "still": off(begin),
            "made": len(made), "states": _storage_bytes(states), "pieces": pieces, "sent": max(sent),
            "calls": dict(comm.calls),
        }  # fmt: skip

    return {"ranks": run_ranks(rank, case.ranks)}


def _zero_evidence(answer: Any, seed: int) -> Evidence:
    zero, sharded = several(answer, "4.6", "zero", "Zero1")
    shares = {name: [guarded(zero, *case) for case in cases] for name, cases in _zeros(seed).items()}

    def work() -> Evidence:
        return {"cases": [guarded(_sharded_case, sharded, case, seed) for case in _shardeds(seed)]}

    ran = contained(work, seconds=90, memory=3 * GIB)
    entries = [*(e for group in shares.values() for e in group), *ran.get("cases", [])]
    if unwritten(entries):
        raise NotImplementedError("exercise 4.6")
    return {"shares": shares, **({"cases": [ran] * 2} if "error" in ran else ran)}


def _zero_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    for name, cases in _zeros(seed).items():
        fault = _first(_share_fault(case, e) for case, e in answers_to(cases, evidence["shares"][name]))
        tally.award(0.5, not fault, fault)
    pairs = answers_to(_shardeds(seed), evidence["cases"])
    for case, e in pairs:
        exactly(e["value"]["ranks"] if "value" in e else [0] * case.ranks, case.ranks)
    failed = _first(
        stopped("Zero1" if e["error"] == NOT_WRITTEN else f"Zero1, {case}: it", e)
        for case, e in pairs
        if "error" in e
    )
    if "leaf Variable" in failed:
        failed += "; change parameters under torch.no_grad()"
    if failed:
        tally.messages.append(failed)
        return _once(tally)
    right = _first(_zero1_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    if not tally.award(1, not right, right):
        tally.messages.append("Zero1: bytes held and sent are looked at once the parameters are right")
        return _once(tally)
    held = _first(_states_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    tally.award(1, not held, held)
    sent = _first(_traffic_fault(case, rank) for case, e in pairs for rank in _value(e)["ranks"])
    tally.award(1, not sent, sent)
    return _once(tally)


def _share_fault(case: tuple[int, int, int, tuple[int, int, int]], entry: Evidence) -> str:
    parameters, ranks, stage, each = case
    what = f"zero({parameters:,}, {ranks}, stage={stage}, each={each})"
    if "error" in entry:
        return stopped("zero", entry)
    value, right = _value(entry), zero_expected(*case)
    if type(value) is not dict or not set(_ZERO_KEYS) <= set(value):
        return f"zero: return a dict with the keys {', '.join(_ZERO_KEYS)} (bytes per rank)"
    for name in _ZERO_KEYS:
        said, expected = value[name], right[name]
        if type(said) is int and said == expected:
            continue
        if fault := _not_a_count(said, expected):
            return f"{what}, {name}: {fault}"
        first = {"optimizer_states": 1, "gradients": 2, "parameters": 3}[name]
        whole = parameters * each[_ZERO_KEYS.index(name)]
        if said == whole and stage >= first:
            hint = f"stage {stage} shards them: each rank has one {ranks}-th"
        elif said == whole // ranks and stage < first:
            hint = f"stage {stage} doesn't shard them yet, stage {first} does: every rank has them whole"
        elif said in (whole // 4, whole // 8):
            hint = "4 and 8 times are limits for very many ranks; with N ranks a shard is one N-th"
        elif said * each[_ZERO_KEYS.index(name)] == expected or said == whole // each[_ZERO_KEYS.index(name)]:
            hint = "that is elements: times the bytes in `each`"
        else:
            hint = f"{parameters:,} x {each[_ZERO_KEYS.index(name)]} B" + (
                f" / {ranks}" if stage >= first else ", whole on every rank"
            )
        return f"{what}, {name}: you said {said:,} B, it is {expected:,} B: {hint}"
    return ""


def _zero1_fault(case: _Sharded, rank: Evidence) -> str:
    if is_number(rank["off"]) and rank["off"] <= 1e-5:
        return ""
    text = f"Zero1, {case}: after three steps the parameters aren't those of the plain optimizer"
    if is_number(rank["still"]) and rank["still"] < 1e-9:
        return (
            text
            + ": they haven't changed: is the optimizer made for your piece, and are the gathered values "
            "copied into them, p.copy_(…) under torch.no_grad()?"
        )
    if is_number(rank["summed"]) and rank["summed"] <= 1e-4:
        return text + ": reduce_scatter sums, data parallel takes the mean: divide by the number of ranks"
    if not {"reduce_scatter", "all_reduce"} & set(rank["calls"]):
        return text + ": each rank used its own gradient alone: reduce_scatter them first"
    if "all_gather" not in rank["calls"]:
        return text + ": each rank has updated its own part only: all_gather the parts after the step"
    return (
        text
        + f", off by {_percent(rank['off'])}: is the part of the gradient the same as that of the weights?"
    )


def _states_fault(case: _Sharded, rank: Evidence) -> str:
    if not rank["made"]:
        return f"Zero1, {case}: the optimizer must be made by make_optimizer(pieces), which was never called"
    if rank["states"] <= case.state_bound:
        pieces = rank["pieces"]
        if pieces <= case.state_bound // case.moments:
            return ""
        return (
            f"Zero1, {case}: the tensors of the optimizer keep {pieces:,} B alive, a piece has "
            f"{4 * -(-case.total // case.ranks):,} B: a slice is a view of the whole vector; clone() it"
        )
    whole = 4 * case.moments * case.total
    text = f"Zero1, {case}: a rank keeps {rank['states']:,} B of optimizer states, one N-th is "
    text += f"{whole // case.ranks:,} B"
    if rank["states"] >= 0.98 * whole:
        return (
            text + ": they are whole on every rank: give make_optimizer this rank's piece, not all parameters"
        )
    return text + ": give make_optimizer one piece of ceil(P / N) elements"


def _traffic_fault(case: _Sharded, rank: Evidence) -> str:
    worst = rank["sent"]
    if worst <= case.sent_bound:
        return ""
    text = f"Zero1, {case}: a step sends {worst:,} B ({_listed(rank['calls'])} in three steps), "
    enough = 2 * 4 * -(-case.total // case.ranks) * (case.ranks - 1)
    text += f"{enough:,} B are enough"
    if rank["calls"].get("all_reduce"):
        return (
            text + ": all_reduce brings the whole sum to every rank; one needs only its piece: reduce_scatter"
        )
    return text + ": one reduce_scatter of the gradients and one all_gather of the parameters"


EXERCISES: tuple[Exercise, ...] = (
    Exercise("4.1", "n_params", 2, _n_params_evidence, _n_params_score, "section 2, 'Twelve, not two'"),
    Exercise("4.2", "linear_bytes", 2, _linear_evidence, _linear_score, "section 3, 'Double the width'"),
    Exercise("4.3", "score_bytes", 2, _scores_evidence, _scores_score, "section 4, 'Every pair of tokens'"),
    Exercise("4.4", "tiled attention", 5, _tiled_evidence, _tiled_score, "section 5, 'Tile by tile'"),
    Exercise("4.5", "an MLP on k ranks", 4, _split_evidence, _split_score, "section 6, 'Split the layer'"),
    Exercise("4.6", "ZeRO", 5, _zero_evidence, _zero_score, "section 7, 'Split the states'"),
)
