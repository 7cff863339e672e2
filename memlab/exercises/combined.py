"""Exercises 6.1 to 6.6: a budget, nine ways to train 70B, BERT's phases, four levers, 8-bit Adam, a planner.

Nine of the fifteen points come from code whose bytes are measured: a step with four levers and an 8-bit
optimizer run on the CPU under `memlab.Meter`, and what the reader's planner chose is traced by a card's
rules. Each of these checks has a twin, the step without the lever, that has to fail it. Hidden inputs come
from the seed alone, so `score` knows what is right without torch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab import hardware
from memlab.exercises import (
    Evidence,
    Exercise,
    ForeignEvidence,
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
    unwritten,
)
from memlab.exercises.limits import contained
from memlab.footprint import footprint
from memlab.hardware import GPU
from memlab.models import TransformerConfig
from memlab.models import model as any_model
from memlab.recipe import Recipe
from memlab.units import GB, GIB, KIB, format_bytes, format_gb

if TYPE_CHECKING:
    from torch import Tensor, nn


def _random(exercise: str, seed: int) -> random.Random:
    return random.Random(f"{exercise}/{seed}")


def _first(messages: Iterable[str]) -> str:
    return next((message for message in messages if message), "")


def _shown(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type"}:
        return f"an object of type {value['type']}"
    return f"{value:,.6g}" if is_number(value) else repr(value)[:80]


def _size(value: Any) -> str:
    return format_gb(round(value)) if is_number(value) else _shown(value)


def _once(tally: Tally) -> Score:
    """The points, and each message once: an error is the same on every input."""
    return Score(round(tally.points, 6), tuple(dict.fromkeys(tally.messages)))


def transformer(name: str) -> TransformerConfig:
    config = any_model(name)
    assert isinstance(config, TransformerConfig)
    return config


def _watched(work: Callable[[], Evidence], borrowed: Sequence[str]) -> Callable[[], Evidence]:
    """`work` that also tells when a Python function of the files `borrowed` was called."""

    def watched() -> Evidence:
        used = ""

        def watch(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal used
            if event == "call" and not used and frame.f_code.co_filename.endswith(tuple(borrowed)):
                used = f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}"

        sys.setprofile(watch)
        try:
            evidence = work()
        finally:
            sys.setprofile(None)
        return {**evidence, "used": used}

    return watched


# -- 6.1 a budget that adds up -----------------------------------------------------------------------------

#: What a block of LLaMA-2-70B keeps for its backward, per token, with fused attention (its footprint).
PER_TOKEN_70B = 398_120

ITEMS = ("parameters", "gradients", "optimizer_states", "gathered", "activations", "logits", "total")


class Plan(NamedTuple):
    """One call of `budget`."""

    model: SimpleNamespace
    each: tuple[int, int, int]
    N: int
    stage: int
    micro_batch: int
    sequence: int
    checkpointing: bool
    flash: bool


def budget_expected(
    m: Any, each: tuple[int, int, int], N: int, stage: int, mb: int, s: int, ckpt: bool, flash: bool
) -> dict[str, float]:
    """Bytes on one card, item by item: see exercise 6.1."""
    weight, gradient, states = each
    block = mb * s * m.per_token + (0 if flash else mb * m.heads * s * s * m.per_score)
    items = {
        "parameters": m.parameters * weight / (N if stage == 3 else 1),
        "gradients": m.parameters * gradient / (N if stage >= 2 else 1),
        "optimizer_states": m.parameters * states / (N if stage >= 1 else 1),
        "gathered": m.block_parameters * (2 * weight + gradient) if stage == 3 else 0,
        "activations": m.layers * mb * s * m.hidden * 2 + block if ckpt else m.layers * block,
        "logits": mb * s * m.vocab * 10,
    }
    return {**items, "total": sum(items.values())}


def _plans(seed: int) -> list[Plan]:
    rng = _random("6.1", seed)
    big = transformer("llama2-70b")
    block = sum(p.count for p in big.parameters() if p.name.startswith("blocks.0."))
    llama = SimpleNamespace(
        parameters=big.parameter_count, block_parameters=block, layers=big.layers, hidden=big.hidden,
        heads=big.heads, vocab=big.vocab, per_token=PER_TOKEN_70B, per_score=2,
    )  # fmt: skip

    def odd() -> SimpleNamespace:
        heads, layers = rng.randrange(8, 97), rng.randrange(13, 97)
        hidden = heads * 8 * rng.randrange(6, 17)
        block = 12 * hidden**2 + rng.randrange(10**6)
        vocab = rng.randrange(20_000, 150_000)
        return SimpleNamespace(
            parameters=layers * block + vocab * hidden, block_parameters=block, layers=layers, hidden=hidden,
            heads=heads, vocab=vocab, per_token=rng.randrange(28, 70) * hidden,
            per_score=rng.choice((2, 5, 9)),
        )  # fmt: skip

    def size() -> tuple[int, int, int]:
        return rng.randrange(2, 9), rng.randrange(2, 9), 128 * rng.randrange(3, 40)

    return [
        Plan(llama, (2, 2, 4), 8, 3, 1, 4096, True, True),
        *(
            Plan(odd(), each, N, stage, mb, s, ckpt, flash)
            for each, stage, ckpt, flash in (
                ((2, 2, 12), 3, True, False), ((4, 4, 8), 2, False, True), ((2, 4, 12), 1, False, False),
                ((2, 2, 4), 0, True, True), ((2, 2, 2), 3, False, False),
            )
            for N, mb, s in (size(),)
        ),
    ]  # fmt: skip


def _budget_evidence(answer: Any, seed: int) -> Evidence:
    return {"answers": [call(answer, *plan) for plan in _plans(seed)]}


def _budget_score(evidence: Evidence, seed: int) -> Score:
    plans, answers = _plans(seed), evidence["answers"]
    for entry in answers:
        if "error" in entry:
            return Score(0, (f"budget stopped with {entry['error']}",))
        if type(entry["value"]) is not dict or set(entry["value"]) != set(ITEMS):
            return Score(0, (f"return a dict with the keys {', '.join(ITEMS)}; values in bytes",))
    tally = Tally()
    for item in ITEMS:
        tally.award(0.25, *_item(item, plans, answers))
    tally.award(0.25, *_adds_up(answers))
    return _once(tally)


def _item(item: str, plans: Sequence[Plan], answers: Sequence[Evidence]) -> tuple[bool, str]:
    for plan, entry in answers_to(plans, answers):
        right, said = budget_expected(*plan)[item], entry["value"][item]
        if not (close(said, right) if right else said == 0 and is_number(said)):
            m = plan.model
            what = (
                f"{item}: stage {plan.stage} on {plan.N} cards, {plan.micro_batch} x {plan.sequence} tokens, "
                f"{'checkpoints' if plan.checkpointing else 'no checkpoints'}, "
                f"{'flash' if plan.flash else 'eager'}: {_size(right)}, you said {_size(said)}"
            )
            return False, f"{what}: {_item_hint(item, plan, said, right, m)}"
    return True, ""


def _item_hint(item: str, plan: Plan, said: Any, right: float, m: Any) -> str:
    weight, gradient, _ = plan.each
    block = plan.micro_batch * plan.sequence * m.per_token
    scores = 0 if plan.flash else plan.micro_batch * m.heads * plan.sequence**2 * m.per_score
    edges = m.layers * plan.micro_batch * plan.sequence * m.hidden * 2
    if not is_number(said):
        return "return a number of bytes"
    known = {
        "that is 1/N of it: this stage keeps it whole": right / plan.N,
        "that is N times too much: this stage shards it": right * plan.N,
        "half of it is what 'bf16 halves' would give: count the bytes in `each`": right / 2,
    }
    if item == "gathered":
        known = {
            "only stage 3 gathers weights": m.block_parameters * (2 * weight + gradient),
            "two blocks are gathered, the next one ahead of time": m.block_parameters * (weight + gradient),
            "the block's gradient is whole until it is reduced": m.block_parameters * 2 * weight,
            "gathered tensors are whole: not divided by N": right / plan.N,
        }
    if item == "activations":
        known |= {
            "one block is whole while it is recomputed: add it": edges,
            "with checkpoints only the blocks' inputs are kept, and one block": m.layers * (block + scores),
            "scores are there for each head": (block + scores / m.heads) * (
                1 if plan.checkpointing else m.layers
            ) + (edges if plan.checkpointing else 0),
            "flash keeps no scores, eager does": (block + (0 if scores else plan.micro_batch * m.heads
                * plan.sequence**2 * m.per_score)) * (1 if plan.checkpointing else m.layers)
                + (edges if plan.checkpointing else 0),
            "that is one block: how many keep theirs?": block + scores,
            "the batch is split over the cards already: mb is per card": right / plan.N,
        }  # fmt: skip
    if item == "logits":
        known |= {
            "logits in 16 bit, their fp32 copy and the softmax: 2 + 4 + 4 bytes": right * 0.4,
            "fp32 copies come on top of the 16-bit logits": right * 0.2,
            "each token has `vocab` logits, in each sequence": right / plan.micro_batch,
        }
    if item == "total":
        return "it is the sum of the six items"
    return next(
        (hint for hint, value in known.items() if value != right and close(said, value, 0.001)),
        "read its line in the list above once more",
    )


def _adds_up(answers: Sequence[Evidence]) -> tuple[bool, str]:
    for entry in answers:
        items = entry["value"]
        parts = [items[name] for name in ITEMS[:-1]]
        if not all(map(is_number, parts)) or not close(items["total"], sum(parts), 1e-6):
            return False, "total: the items don't add up to it"
    return True, ""


# -- 6.2 nine ways to train 70B ----------------------------------------------------------------------------

#: What is left free for the CUDA context: the most that is published.
CONTEXT = 2 * GB


class Way(NamedTuple):
    """One way to train on several cards; `traced`: its peak on one card, `rest`: what isn't states there.

    Figures: `python -m benchmarks.sharded --quick` (llama2-70b, A100-80GB, 1 x 4096 tokens, each block
    checkpointed), rounded to 0.01 GB.
    """

    name: str
    given: Mapping[str, Any]
    traced: int
    rest: int


_BASE = {"precision": "bf16", "optimizer": "adamw", "impl": "fused", "fp32_gradients": False,
         "states_on_host": False, "adapters": 0, "cards": 8, "split": "zero-3"}  # fmt: skip
_REST = 9_300_000_000


def _way(name: str, traced: float, rest: int = _REST, **changes: Any) -> Way:
    return Way(name, {**_BASE, **changes}, round(traced * GB), rest)


WAYS = (
    _way("fp32 master weights, AdamW", 146.66, precision="bf16-master"),
    _way("bf16 weights, fp32 gradients and masters (DeepSpeed)", 163.91, precision="bf16-master",
         fp32_gradients=True),
    _way("fp32 master weights, 8-bit AdamW", 95.20, precision="bf16-master", optimizer="adamw-8bit"),
    _way("pure bf16, AdamW (fused)", 78.25),
    _way("pure bf16, AdamW (foreach)", 86.50, impl="foreach"),
    _way("pure bf16, 8-bit AdamW", 61.27, optimizer="adamw-8bit"),
    _way("bf16, masters and AdamW's states on the host", 43.76, precision="bf16-master",
         states_on_host=True),
    _way("LoRA of rank 16, frozen bf16 model", 29.57, 12_300_000_000, adapters=207_093_760),
    _way("fp32 master weights, AdamW, 16 cards", 78.25, precision="bf16-master", cards=16),
    _way("fp32 master weights, tensor parallel", 173.04, precision="bf16-master", split="tensor"),
)  # fmt: skip


def way_expected(way: Mapping[str, Any], P: int, rest: int, capacity: int) -> dict[str, Any]:
    """Bytes on one card at its peak, bytes on the host for all cards, and whether it fits: exercise 6.2."""
    N = way["cards"]
    master = 4 if way["precision"] == "bf16-master" else 0
    moments = 2 if way["optimizer"] == "adamw-8bit" else 8 if master else 4
    gradients = 4 if way["fp32_gradients"] else 2
    host = 0
    step = 0
    if way["adapters"]:
        states = 2 * P + way["adapters"] * (2 + moments)
    else:
        states = P * (2 + gradients + moments + master)
        if way["states_on_host"]:
            host = P * (master + moments)
            states -= host
        if way["split"] == "tensor" and master:
            step = 4 * P  # bf16 gradients become fp32 ones
        elif way["impl"] == "foreach":
            step = (4 if master else 2) * P
    card = max(states / N + rest, (states + step) / N)
    return {"card": card, "host": host, "fits": card + CONTEXT <= capacity}


#: Ways that nobody traced: what the rules say of settings that the ten have only in other company.
_UNTRACED = (
    _way("fp32 master weights, AdamW (foreach)", 0, precision="bf16-master", impl="foreach"),
    _way("pure bf16, AdamW's states on the host", 0, states_on_host=True),
    _way("fp32 gradients, 8-bit AdamW, states on the host", 0, precision="bf16-master",
         optimizer="adamw-8bit", fp32_gradients=True, states_on_host=True),
    _way("pure bf16, tensor parallel", 0, split="tensor"),
)  # fmt: skip
HIDDEN = (*WAYS, *_UNTRACED)

#: By how much cards are larger than what the answer says is needed: so close that 2 GB are told from none and
#: from 2 GiB. Of its own figure, for the evidence is drawn without knowing the right one.
_SPARE = (70_000_000, -70_000_000, 10 * GB, -GB)


def _hidden_ways(seed: int) -> list[tuple[Mapping[str, Any], int, int, int]]:
    """(way, P, rest, spare) of each hidden case."""
    rng = _random("6.2", seed)
    cases: list[tuple[Mapping[str, Any], int, int, int]] = []
    for way, spare in zip(HIDDEN, itertools.cycle(rng.sample(_SPARE, len(_SPARE))), strict=False):
        cards = rng.choice([n for n in (4, 6, 12, 24, 32, 64) if n != way.given["cards"]])
        P = rng.randrange(6, 30) * cards * 10**8
        adapters = P // rng.randrange(3, 8) if way.given["adapters"] else 0  # so many that each byte shows
        given = {**way.given, "cards": cards, "adapters": adapters}
        rest = rng.randrange(2, 20) * GB // 2
        if way in _UNTRACED or way.given["split"] == "tensor":  # the step is the higher moment, or would be
            rest = P // cards
        elif way.given["impl"] == "foreach":  # and here it isn't
            rest = 3 * P // cards
        cases.append((given, P, rest, spare))
    return cases


def _edge(entry: Evidence, spare: int) -> int:
    """The capacity of a card on which what the answer counted leaves `spare`."""
    value = entry.get("value")
    card = value.get("card") if isinstance(value, dict) else None
    if card is None or not is_number(card) or not 0 <= card < 10**18:
        return CONTEXT
    needed: int = round(card)
    return needed + CONTEXT + spare


def _known_ways() -> list[tuple[Mapping[str, Any], int, int, int]]:
    P = transformer("llama2-70b").parameter_count
    capacity = hardware.gpu("A100-80GB").memory_bytes
    return [(way.given, P, way.rest, capacity) for way in WAYS]


def _ways_evidence(answer: Any, seed: int) -> Evidence:
    def asked(cases: Iterable[tuple[Mapping[str, Any], int, int, int]]) -> list[Evidence]:
        return [call(answer, SimpleNamespace(**way), P, rest, capacity) for way, P, rest, capacity in cases]

    cases, capacity = _hidden_ways(seed), hardware.gpu("A100-80GB").memory_bytes
    hidden = asked((way, P, rest, capacity) for way, P, rest, _ in cases)
    edges = [
        (way, P, rest, _edge(entry, spare))
        for (way, P, rest, spare), entry in zip(cases, hidden, strict=True)
    ]
    return {"known": asked(_known_ways()), "hidden": hidden, "edges": asked(edges)}


def _ways_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    known, hidden, edges = evidence["known"], evidence["hidden"], evidence["edges"]
    cases = _hidden_ways(seed)
    answers_to(WAYS, known), answers_to(cases, hidden), answers_to(cases, edges)
    for entry in (*known, *hidden, *edges):
        if "error" in entry:
            return Score(0, (f"need stopped with {entry['error']}",))
        value = entry["value"]
        if type(value) is not dict or set(value) != {"card", "host", "fits"}:
            return Score(0, ("return a dict with the keys card, host (bytes) and fits (True or False)",))
        if type(value["fits"]) is not bool:
            return Score(0, (f"fits is True or False, not {_shown(value['fits'])}",))
    for way, (_, P, _, _), entry in zip(WAYS, _known_ways(), known, strict=True):
        said = entry["value"]["card"]
        tally.award(
            0.1, close(said, way.traced, 0.03),
            f"{way.name}: a card has {format_gb(way.traced)} in the trace, you said {_size(said)}: "
            f"{_way_hint(way, P, said)}",
        )  # fmt: skip
    verdicts = [
        (way.name, entry["value"]["fits"], way.traced + CONTEXT <= hardware.gpu("A100-80GB").memory_bytes)
        for way, entry in zip(WAYS, known, strict=True)
    ]
    wrong = [name for name, said, right in verdicts if said is not right]
    tally.award(
        0.5, not wrong,
        f"fits: {', '.join(wrong)}: compare card + 2 GB for the context with the capacity",
    )  # fmt: skip
    faults = [
        _hidden_fault(way, case, entry, edge)
        for way, case, entry, edge in zip(HIDDEN, cases, hidden, edges, strict=True)
    ]
    tally.award(0.5, not any(faults), _first(faults))
    return _once(tally)


def _way_hint(way: Way, P: int, said: Any) -> str:
    if not is_number(said):
        return "return bytes, a number"
    N = way.given["cards"]
    per = (said - way.rest) * N / P
    steady = way_expected({**way.given, "impl": "fused", "split": "zero-3"}, P, way.rest, 0)["card"]
    step = way_expected(way.given, P, 0, 0)["card"]
    if step + way.rest > 1.01 * max(steady, step) and close(said, step + way.rest, 0.01):
        return "`rest` is gone in the step: the peak is the larger of two moments, not their sum"
    if close(said + way.rest * (N - 1) / N, steady, 0.02):
        return "what isn't states is there on each card"
    if way.given["impl"] == "foreach" and close(said, steady, 0.02):
        return "foreach makes one more tensor of every parameter's size in the step, when `rest` is gone"
    if said > 0.6 * N * steady:
        return "divide by the number of cards"
    if way.given["split"] == "tensor":
        return (
            "in the step every bf16 gradient also exists in fp32, and `rest` is gone: take the larger moment"
        )
    if way.given["adapters"]:
        return "frozen weights have no gradient and no state: only adapters do, 2 + 2 + 4 bytes of each"
    if way.given["states_on_host"]:
        return "masters and moments are on the host, weights and gradients in bf16 stay"
    return f"without `rest` that is {per:.3g} bytes per parameter: list weight, gradient, master, moments"


def _hidden_fault(
    way: Way, case: tuple[Mapping[str, Any], int, int, int], entry: Evidence, edge: Evidence
) -> str:
    given, P, rest, spare = case
    right, said = way_expected(given, P, rest, 0), entry["value"]
    what = f"{way.name}, {P / 1e9:g} billion parameters on {given['cards']} cards"
    if not close(said["card"], right["card"], 0.002):
        slip = _way_hint(way._replace(given=given, rest=rest, traced=round(right["card"])), P, said["card"])
        return f"{what}: {_size(right['card'])} on a card, you said {_size(said['card'])}: {slip}"
    if not (close(said["host"], right["host"], 0.01) if right["host"] else said["host"] == 0):
        return (
            f"{what}: {_size(right['host'])} on the host, you said {_size(said['host'])}: masters and moments"
            " of all cards, or nothing"
        )
    if edge["value"]["fits"] is (spare > 0):
        return ""
    return (
        f"{what}: fits should be {spare > 0}: {_size(said['card'])} and 2 GB for the context, on a card of "
        f"{format_gb(_edge(entry, spare))}"
    )


# -- 6.3 BERT-large, phase by phase ------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of the table: what is trained, and how."""

    name: str
    model: TransformerConfig
    recipe: Recipe

    @property
    def kept(self) -> int:
        """What one micro-batch holds at its highest beyond weights, gradients and moments: by the formula."""
        peaks = self.step(accumulation=1, set_to_none=False).phase_peaks()
        return int(max(peaks["forward"], peaks["backward"]) - 16 * self.model.parameter_count)

    @property
    def block(self) -> int:
        """What one block keeps for its backward; with checkpoints, once it is recomputed."""
        forward = self.step(accumulation=1, set_to_none=True, checkpointing="none").phases["forward"]
        return int((forward["activations"] + forward["temporaries"]) // self.model.layers)

    def step(self, **changes: Any) -> Any:
        return footprint(self.model, self.recipe.replace(**changes), "A100-80GB")


#: The four rows of the article's table, and checkpoints alone.
TABLE: dict[str, dict[str, Any]] = {
    "fp32, batch 32": {"precision": "fp32", "micro_batch": 32},
    "bf16 autocast": {"precision": "amp-bf16", "micro_batch": 32},
    "micro-batch 1, 32 times": {"precision": "amp-bf16", "micro_batch": 1, "accumulation": 32},
    "checkpoints": {
        "precision": "amp-bf16", "micro_batch": 1, "accumulation": 32, "checkpointing": "full",
    },
}  # fmt: skip
_ALONE = {"precision": "fp32", "micro_batch": 32, "checkpointing": "full"}


def _rows(seed: int) -> list[Row]:
    rng = _random("6.3", seed)
    large = transformer("bert-large")
    width = 64 * rng.randrange(10, 25)
    other = replace(
        large, name=f"BERT of width {width}", layers=rng.randrange(10, 30), hidden=width, heads=width // 64,
        kv_heads=width // 64, ffn=4 * width,
    )  # fmt: skip
    rows = []
    for config, s in ((large, 200), (large, 8 * rng.randrange(30, 64)), (other, 8 * rng.randrange(14, 40))):
        for name, fields in {**TABLE, "checkpoints alone": _ALONE}.items():
            impl = rng.choice(("foreach", "fused"))
            recipe = Recipe(
                **fields, sequence=s, attention="eager", dropout=0.1, optimizer_impl=impl,
                # where gradients are freed, the backward's own end may be its highest moment: always asked
                set_to_none=rng.random() < 0.5 or "micro" in name or name == "checkpoints alone",
            )  # fmt: skip
            rows.append(Row(name, config, recipe))
    return rows


def _phases_evidence(answer: Any, seed: int) -> Evidence:
    answers = []
    for row in _rows(seed):
        r = row.recipe
        foreach = r.optimizer_impl == "foreach"
        P = row.model.parameter_count
        answers.append(call(answer, P, row.kept, row.block, r.accumulation, r.set_to_none, foreach))
    return {"answers": answers}


def _phases_score(evidence: Evidence, seed: int) -> Score:
    rows, answers = _rows(seed), evidence["answers"]
    for entry in answers:
        if "error" in entry:
            return Score(0, (f"peaks stopped with {entry['error']}",))
        if type(entry["value"]) is not dict or set(entry["value"]) != {"backward", "optimizer", "phase"}:
            return Score(0, ('return {"backward": bytes, "optimizer": bytes, "phase": the higher one}',))
    tally = Tally()
    points = {"backward": 1, "optimizer": 0.5, "phase": 0.5}
    for key, worth in points.items():
        fault = _first(_phase_fault(key, row, e["value"]) for row, e in answers_to(rows, answers))
        tally.award(worth, not fault, fault)
    return _once(tally)


def _phase_fault(key: str, row: Row, said: Mapping[str, Any]) -> str:
    step, r = row.step().phase_peaks(), row.recipe
    right = {"backward": max(step["forward"], step["backward"]), "optimizer": step["optimizer"]}
    how = f"{row.model.name} at {r.sequence} tokens, {row.name}, {r.optimizer_impl}, gradients "
    how += "freed" if r.set_to_none else "kept"
    if key == "phase":
        high = max(right, key=lambda name: right[name])
        clear = abs(right["backward"] / right["optimizer"] - 1) > 0.05
        if clear and said["phase"] != high:
            return f"phase, {how}: it is {high!r}, you said {_shown(said['phase'])}: it is the larger one"
        return ""
    value = said[key]
    if close(value, right[key], 0.05):
        return ""
    text = f"{key}, {how}: {_size(right[key])}, you said {_size(value)}: "
    if not is_number(value):
        return text + "return bytes, a number"
    return text + _phase_hint(key, row, value, right[key])


def _phase_hint(key: str, row: Row, value: float, right: float) -> str:
    P, r = row.model.parameter_count, row.recipe
    gap = (value - right) / P
    if key == "optimizer":
        if abs(gap + 4) < 0.5:
            return "foreach makes one more fp32 tensor of every parameter's size"
        if abs(gap - 4) < 0.5:
            return "fused makes no tensor of the parameters' size"
        return "in the step no activation is left: weights, gradients, two moments, and what Adam makes"
    always = r.accumulation > 1 or not r.set_to_none
    if abs(gap + 4) < 0.7 or (always and -5 < gap < 0):
        return "when are gradients alive? From the second micro-batch on, always if kept, and at the end"
    if abs(gap - 4) < 0.7 or (not always and 0 < gap < 5):
        return "freed gradients aren't there when the forward of a single micro-batch is highest"
    return "4 B of weights, 8 B of moments, 4 B of gradients where they are alive, and `kept`"


# -- 6.4 four levers, one step -----------------------------------------------------------------------------

LEVERS = tuple(
    {"amp": amp, "parts": parts, "checkpointing": ckpt, "sdpa": sdpa}
    for amp, parts, ckpt, sdpa in itertools.product((False, True), (1, 4), (False, True), (False, True))
)


class Shape(NamedTuple):
    """A small causal transformer and its batch of `rows` texts of `tokens` tokens."""

    layers: int
    width: int
    heads: int
    rows: int
    tokens: int
    vocab: int = 32


def lever_name(levers: Mapping[str, Any]) -> str:
    """'bf16 + 4 parts', 'nothing', …"""
    words = {"amp": "bf16", "parts": "4 parts", "checkpointing": "checkpoints", "sdpa": "sdpa"}
    return " + ".join(words[key] for key in _on(levers)) or "nothing"


def _on(levers: Mapping[str, Any]) -> list[str]:
    return [key for key, value in levers.items() if (value > 1 if key == "parts" else value)]


def toy(shape: Shape, seed: int = 0, device: Any = "cpu") -> nn.Module:
    """The model of exercise 6.4: `embed(x)`, `blocks` to be called as block(h, attention), `head(h)`.

    `model.eager(q, k, v)` is causal attention that keeps its scores; q, k, v are (rows, heads, tokens, d).
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = _toy_class()(shape).to(device)
        return made


@cache
def _toy_class() -> Callable[[Shape], nn.Module]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, h: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
            b, s, h = x.shape
            q, k, v = (
                t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
            )
            x = x + self.out(attention(q, k, v).transpose(1, 2).reshape(b, s, h))
            result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
            return result

    class Toy(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab, shape.width)
            self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
            self.head = nn.Linear(shape.width, shape.vocab)

        @staticmethod
        def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            hidden = torch.ones(q.size(-2), q.size(-2), dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(hidden, -math.inf)
            return torch.softmax(scores, dim=-1) @ v

    return Toy


def batch_of(shape: Shape, seed: int = 0, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (rows, tokens)."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    pair = torch.randint(shape.vocab, (2, shape.rows, shape.tokens), generator=draw).to(device)
    return pair[0], pair[1]


def reference_step(
    model: Any, x: Tensor, y: Tensor, *, amp: bool, parts: int, checkpointing: bool, sdpa: bool
) -> None:
    """Gradients of the mean loss of the batch, with the levers: what the check compares bytes with."""
    import torch
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    attention = fused if sdpa else model.eager
    for rows, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            h = model.embed(rows)
            for block in model.blocks:
                h = (
                    checkpoint(block, h, attention, use_reentrant=False)
                    if checkpointing
                    else block(h, attention)
                )
            loss = F.cross_entropy(model.head(h).flatten(0, 1), targets.flatten()) / parts
        loss.backward()  # type: ignore[no-untyped-call]
        del h, loss


def _shapes(seed: int) -> tuple[Shape, Shape]:
    """Short texts, where the linear layers' activations rule, and long ones, where the scores do."""
    rng = _random("6.4", seed)
    short = Shape(3, 64, 2, 4 * rng.randrange(4, 6), 8 * rng.randrange(4, 6))
    long = Shape(3, 32, 4, 4, 16 * rng.randrange(12, 15))
    return short, long


def measured_levers(
    step: Callable[..., Any], shape: Shape, seed: int, device: Any = "cpu"
) -> list[dict[str, Any]]:
    """Each of the 16 combinations, run: bytes beyond the weights at the highest moment, and the gradients."""
    from memlab.meter import Meter

    found = []
    for levers in LEVERS:
        model = toy(shape, seed, device)
        x, y = batch_of(shape, seed + 1, device)
        before = sum(p.nbytes for p in model.parameters()) + x.nbytes + y.nbytes
        with Meter(model, device=x.device) as meter:
            step(model, x, y, **levers)
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        gradient = None if missing else _joined(model)
        found.append(
            {"bytes": meter.trace.peak_bytes - before, "missing": "".join(missing[:1]), "gradient": gradient}
        )
    return found


def _joined(model: nn.Module) -> Tensor:
    import torch

    gradients = [p.grad.detach().flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).float()


def _levers_evidence(answer: Any, seed: int) -> Evidence:
    step, rank = several(answer, "6.4", "step", "predict")

    def work() -> Evidence:
        found: Evidence = {"measured": [], "reference": [], "ranks": []}
        for shape in _shapes(seed):
            right = measured_levers(reference_step, shape, seed % 2**31)
            entry = guarded(_measured_plain, step, shape, seed % 2**31, right[0]["gradient"])
            found["measured"].append(entry)
            found["reference"].append([item["bytes"] for item in right])
            found["ranks"].append(
                [guarded(rank, SimpleNamespace(**shape._asdict()), **levers) for levers in LEVERS]
            )
        return found

    evidence = contained(work, seconds=90)
    if "measured" in evidence and unwritten(
        [*evidence["measured"], *(e for each in evidence["ranks"] for e in each)]
    ):
        raise NotImplementedError("exercise 6.4")
    return evidence


def _measured_plain(step: Any, shape: Shape, seed: int, right: Tensor) -> list[dict[str, Any]]:
    rows = []
    for item in measured_levers(step, shape, seed):
        gradient = item["gradient"]
        error = cosine = scale = None
        if gradient is not None:
            error = plain(((gradient - right).abs().max() / right.abs().max()).item())
            scale = plain((gradient.norm() / right.norm()).item())
            cosine = plain((gradient @ right / gradient.norm() / right.norm()).item())
        rows.append(
            {
                "bytes": item["bytes"],
                "missing": item["missing"],
                "error": error,
                "scale": scale,
                "cosine": cosine,
            }
        )
    return rows


def _levers_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    shapes = _shapes(seed)
    rows = [entry for _, entry in answers_to(shapes, evidence["measured"])]
    references = [exactly(each, len(LEVERS)) for each in exactly(evidence["reference"], len(shapes))]
    ranks = exactly(evidence["ranks"], len(shapes))
    stopped = _first(f"step stopped with {row['error']}" for row in rows if "error" in row)
    if stopped:
        tally.messages.append(stopped)
    else:
        fault = _first(_gradient_fault(row["value"]) for row in rows)
        equal = tally.award(1, not fault, fault)
        fault = _first(
            _lever_fault(shape, row["value"], right)
            for shape, row, right in zip(shapes, rows, references, strict=True)
        )
        bytes_fault = fault or ("" if equal else "bytes: looked at once the gradients are right")
        tally.award(1, not bytes_fault, bytes_fault)
    for shape, said, right in zip(shapes, ranks, references, strict=True):
        fault = _rank_fault(shape, said, right)
        tally.award(0.5, not fault, fault)
    return _once(tally)


def _gradient_fault(rows: Sequence[Mapping[str, Any]]) -> str:
    for levers, row in zip(LEVERS, rows, strict=True):
        name = lever_name(levers)
        if row["missing"]:
            return f"{name}: {row['missing']} has no gradient"
        if not is_number(row["error"]):
            return f"{name}: a gradient is {row['error']}"
        if levers["parts"] > 1 and close(row["scale"], levers["parts"], 0.1):
            n = levers["parts"]
            return f"{name}: gradients {n} times too large: divide each part's mean loss by `parts`"
        if levers["parts"] > 1 and row["cosine"] < 0.95:
            return f"{name}: the gradients point elsewhere: does every row of the batch count, once?"
        if levers["amp"] and not (row["cosine"] > 0.99 and close(row["scale"], 1, 0.05)):
            return f"{name}: gradients are off by more than bf16 explains (cosine {row['cosine']:.3f})"
        if not levers["amp"] and row["error"] > 1e-4:
            off = f"{row['error']:.2%}"
            return f"{name}: gradients are off by {off} from the plain step's: only bf16 may change them"
        if levers["amp"] and row["error"] < 1e-6:
            return f"{name}: gradients equal fp32's to the last digit: is autocast on?"
    return ""


def _lever_fault(shape: Shape, rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> str:
    for levers, row, bound in zip(LEVERS, rows, right, strict=True):
        if row["bytes"] > 1.08 * bound + 16 * KIB:
            without = [key for key in _on(levers) if row["bytes"] > 0.9 * right[_less(levers, key)]]
            hint = f"is {' or '.join(without)} really on?" if without else "what outlives its micro-batch?"
            return (
                f"{lever_name(levers)}, {shape.rows} x {shape.tokens} tokens: "
                f"{format_bytes(row['bytes'])} beyond the weights, {format_bytes(bound)} are enough: {hint}"
            )
    return ""


def _less(levers: Mapping[str, Any], key: str) -> int:
    return LEVERS.index({**levers, key: 1 if key == "parts" else False})


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; equal values share their mean rank; 0 where one side is constant."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    both = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    apart = math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))
    return both / apart if apart else 0.0


def _rank_fault(shape: Shape, said: list[Evidence], right: Sequence[int]) -> str:
    entries = [entry for _, entry in answers_to(LEVERS, said)]
    if stopped := _first(f"predict stopped with {e['error']}" for e in entries if "error" in e):
        return stopped
    values = [entry["value"] for entry in entries]
    if not all(map(is_number, values)):
        return "predict returns a number of bytes for each combination"
    together = spearman(values, right)
    if together >= 0.9:
        return ""
    wrong = max(
        itertools.combinations(range(len(LEVERS)), 2),
        key=lambda pair: abs(math.log(right[pair[0]] / right[pair[1]]))
        if (values[pair[0]] - values[pair[1]]) * (right[pair[0]] - right[pair[1]]) <= 0 else 0,
    )  # fmt: skip
    less, more = sorted(wrong, key=lambda i: right[i])
    return (
        f"predict, {shape.rows} x {shape.tokens} tokens, width {shape.width}, {shape.heads} heads: rank "
        f"correlation {together:.2f} with what was measured, 0.9 is asked; for instance "
        f"'{lever_name(LEVERS[less])}' takes less than '{lever_name(LEVERS[more])}', "
        f"{format_bytes(right[less])} against {format_bytes(right[more])}"
    )


# -- 6.5 8-bit Adam ----------------------------------------------------------------------------------------

BLOCK = 256


def _values(seed: int) -> dict[str, Tensor]:
    """Moments to be packed: smooth ones, one with an outlier in its first block, odd lengths."""
    import torch

    draw = torch.Generator().manual_seed(seed % 2**31)
    sizes = _counts(seed)
    smooth = torch.randn(sizes["smooth"], generator=draw) * 1e-3
    outlier = smooth.clone()
    outlier[seed % BLOCK] = 50.0
    odd = torch.randn(sizes["of odd length"], generator=draw)  # its padding is more than a tenth of it
    return {"smooth": smooth, "with one outlier": outlier, "of odd length": odd}


def _counts(seed: int) -> dict[str, int]:
    """Numbers in each of `_values`."""
    return {"smooth": 8 * BLOCK, "with one outlier": 8 * BLOCK, "of odd length": 5 * BLOCK + 1 + seed % 100}


def _packing(pack: Any, unpack: Any, seed: int) -> Evidence:
    import torch

    rows = []
    for x in _values(seed).values():
        for signed in (True, False):
            given = x if signed else x.square()
            packed = pack(given.clone(), signed)
            if type(packed) is not tuple or len(packed) != 2 or not all(map(torch.is_tensor, packed)):
                raise TypeError("pack returns two tensors, the codes and the scales")
            codes, scales = packed
            back = unpack(codes, scales, signed)
            if back.shape != given.shape:
                raise ValueError(
                    f"unpack returned the shape {tuple(back.shape)}, packed was {tuple(given.shape)}"
                )
            padded = torch.nn.functional.pad(given, (0, -len(given) % BLOCK)).view(-1, BLOCK)
            top = padded.abs().amax(1).repeat_interleave(BLOCK)[: len(given)]
            rows.append({
                "bytes": codes.untyped_storage().nbytes() + scales.untyped_storage().nbytes(),
                "error": plain(((back - given).abs() / top).max().item()),
                "lost": int(((given > 0) & (back <= 0)).sum()) if not signed else 0,
                "sign": int((back * given < 0).sum()),
            })  # fmt: skip
    return {"rows": rows}


def _problem(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A regression with noise: its loss has a floor, so that two optimizers can be compared at it."""
    import torch
    from torch import nn

    torch.manual_seed(seed % 2**31)
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 4))
    x = torch.randn(4096, 32)
    x *= torch.logspace(-2, 0.3, 32)  # features of very different size give gradients of different size
    y = torch.tanh(x @ torch.randn(32, 4)) + 0.3 * torch.randn(4096, 4)
    return model, x, y


def _trained(make: Callable[..., Any], seed: int, steps: int = 300) -> float:
    import torch

    model, x, y = _problem(seed)
    optimizer = make(list(model.parameters()), lr=3e-3)
    draw = torch.Generator().manual_seed(seed % 2**31)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,), generator=draw)
        for p in model.parameters():
            p.grad = None
        loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(x), y))


def _first_move(make: Callable[..., Any], seed: int) -> Any:
    """Mean size of the first step / the learning rate: 1 for Adam, which begins with the gradient's sign.

    For two parameters of one optimizer: the second one's gradients are so small that an eps inside the root,
    or a step counted for each parameter, would show.
    """
    import torch

    draw = torch.Generator().manual_seed(seed % 2**31)
    weights = [torch.nn.Parameter(torch.zeros(100, 64)) for _ in range(2)]
    for weight, size in zip(weights, (1.0, 1e-4), strict=True):
        weight.grad = size * torch.randn(100, 64, generator=draw)
    make(weights, lr=1e-2).step()
    return [plain((weight.detach().abs().mean() / 1e-2).item()) for weight in weights]


def _width(seed: int) -> int:
    """Inputs and outputs of the model in `state_bytes`: Linear(w, 2w) and Linear(2w, w) without bias."""
    return 64 * (5 + seed % 4)


def state_bytes(make: Callable[..., Any], seed: int) -> Evidence:
    """What stays alive after two steps beyond weights, and the most that a step adds to it."""
    import torch
    from torch import nn

    from memlab.meter import Meter

    width = _width(seed)
    torch.manual_seed(seed % 2**31)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False))
    parameters = list(model.parameters())
    gradients = [torch.randn_like(p) for p in parameters]
    before = sum(p.nbytes for p in parameters) + sum(g.nbytes for g in gradients)
    gc.collect()
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    with Meter(model) as meter:
        optimizer = make(parameters, lr=1e-3)
        optimizer.step()
        optimizer.step()
        gc.collect()
        after = meter.live_bytes - before
    kept = [p.grad is not None and torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True)]
    del optimizer
    return {
        "kept": after,
        "extra": meter.trace.peak_bytes - before - after,
        "gradients_changed": not all(kept),
    }


def _eight_evidence(answer: Any, seed: int) -> Evidence:
    pack, unpack, make = several(answer, "6.5", "pack", "unpack", "Adam8bit")

    import torch

    def work() -> Evidence:
        found: Evidence = {}
        found["packing"] = guarded(_packing, pack, unpack, seed)
        found["bytes"] = guarded(state_bytes, make, seed)
        found["loss"] = guarded(_trained, make, seed)
        found["first"] = guarded(_first_move, make, seed)
        found["adam"] = _trained(torch.optim.Adam, seed) if "value" in found["loss"] else None
        return found

    evidence = contained(_watched(work, ("memlab/step.py",)), seconds=90)
    if "packing" in evidence and unwritten([evidence[name] for name in ("packing", "bytes", "loss")]):
        raise NotImplementedError("exercise 6.5")
    return evidence


def _eight_score(evidence: Evidence, seed: int) -> Score:
    if evidence["used"]:
        return Score(0, (f"write it yourself: {evidence['used']} of memlab did it for you",))
    tally = Tally()
    fault = _packing_fault(evidence["packing"], seed)
    tally.award(1, not fault, fault)
    fault = _state_fault(evidence["bytes"], _width(seed))
    bytes_right = tally.award(1, not fault, fault)
    fault = _loss_fault(evidence["loss"], evidence["adam"], evidence["first"])
    if not fault and not bytes_right:
        fault = "loss: it counts once the states have 8 bits"
    tally.award(1, not fault, fault)
    return _once(tally)


def _packing_fault(entry: Evidence, seed: int) -> str:
    if "error" in entry:
        return f"pack and unpack: {entry['error']}"
    asked = list(itertools.product(_counts(seed).items(), ("signed", "squares")))
    rows = exactly(entry["value"]["rows"], len(asked))
    for ((kind, count), sign), row in zip(asked, rows, strict=True):
        name, each = f"{kind}, {sign}", row["bytes"] / count
        if each > 1.05:
            return (
                f"pack, values {name}: the tensors hold {each:.2f} bytes a value, one"
                f" byte each and a scale for {BLOCK} of them are {1 + 4 / BLOCK:.2f}: {_storage_hint(each)}"
            )
        if row["sign"] != 0:
            return f"unpack, values {name}: {row['sign']} values came back with the other sign"
        if row["lost"] != 0:
            return (
                f"unpack, values {name}: {row['lost']} squares that aren't 0 came back as 0: Adam divides by"
                " their root"
            )
        if not is_number(row["error"]) or row["error"] > 0.02:
            error = f"{row['error']:.1%}" if is_number(row["error"]) else row["error"]
            why = (
                "is there one scale for each block of 256?"
                if "outlier" in name
                else "is it 127 or 255 levels?"
            )
            return f"unpack, values {name}: off by up to {error} of the block's largest, 2% is asked: {why}"
    return ""


def _storage_hint(each: float) -> str:
    if each < 1.9:
        return "a slice keeps the whole storage that it was cut from, padding too: .clone() it"
    return "is the dtype of the codes uint8, are there scales for blocks alone?"


def _state_fault(entry: Evidence, width: int) -> str:
    if "error" in entry:
        return f"Adam8bit, states: it stopped with {entry['error']}"
    row = entry["value"]
    if row["gradients_changed"] is not False:
        return "Adam8bit: the step changed the gradients; they aren't yours"
    per = row["kept"] / (4 * width**2 + 2 * width)
    most = 7 * 4 * 2 * width**2
    if per > 2.1:
        return (
            f"states: {per:.2f} bytes a parameter stay alive after a step, 2.1 are asked (fp32 Adam has 8):"
            " what is kept in fp32, or twice?"
        )
    if per < 1.5:
        return f"states: only {per:.2f} bytes a parameter stay alive: Adam has two moments"
    if row["extra"] > most:
        return (
            f"step: {format_bytes(row['extra'])} more than between steps, seven fp32 copies of the largest"
            f" tensor ({format_bytes(most)}) are allowed: unpack one parameter at a time"
        )
    return ""


def _loss_fault(entry: Evidence, adam: Any, first: Evidence) -> str:
    if "error" in entry or "error" in first:
        return f"Adam8bit, training: it stopped with {entry.get('error') or first['error']}"
    loss, (moved, small) = entry["value"], exactly(first["value"], 2)
    if not close(moved, 1, 0.05):
        return (
            f"Adam8bit: its first step moves a weight by {_shown(moved)} learning rates, Adam's by 1:"
            " are both moments divided by 1 - beta^t, with t from 1?"
        )
    if not close(small, 1, 0.05):
        return (
            f"Adam8bit: its first step moves a second weight, with gradients of 1e-4, by {_shown(small)}"
            " learning rates, Adam's by 1: eps is added after the root, and t counts steps, not parameters"
        )
    if not is_number(loss):
        return f"training: the loss is {_shown(loss)} after 300 steps, Adam's is {adam:.4f}"
    if loss <= 1.05 * adam:
        return ""
    return (
        f"training: the loss is {loss:.4f} after 300 steps, Adam's {adam:.4f}; 5% more is allowed: does a"
        " second moment become 0, does a sign get lost?"
    )


# -- 6.6 a planner -----------------------------------------------------------------------------------------

#: Share of a card's peak FLOPS that training reaches in the cost model: what well-tuned runs report.
UTILISATION = 0.4


def step_seconds(model: TransformerConfig, recipe: Recipe, card: GPU) -> float:
    """Seconds of one optimizer step by exercise 6.6's cost model: arithmetic, network and host, added.

    Not in it: tensor parallel, how small micro-batches lower the utilisation, and any overlap.
    """
    P, N, m = model.parameter_count, recipe.world_size, recipe.accumulation
    tokens = recipe.micro_batch * m * (recipe.sequence or model.context)
    flops = (8 if recipe.checkpointing == "full" else 6) * P * tokens
    seconds = flops / (UTILISATION * card.flops[recipe.compute_dtype])
    if N > 1:
        times = {0: 2, 1: 2, 2: m + 1, 3: 3 * m}[recipe.zero_stage]  # of 16-bit weights or gradients
        seconds += times * 2 * P * (N - 1) / N / hardware.link(card.peer_link or card.host_link).bandwidth
    if recipe.offloaded("optimizer_states"):
        share = N if recipe.zero_stage else 1
        seconds += 4 * P / share / hardware.link(card.host_link).bandwidth
    return seconds


def candidates(batch: int, sequence: int, cards: int) -> list[Recipe]:
    """Every recipe that a planner of exercise 6.6 may choose."""
    return [
        Recipe(
            precision="bf16", optimizer_impl="fused", micro_batch=micro, sequence=sequence,
            accumulation=batch // (cards * micro), checkpointing=checkpointing, offload=offload,
            zero_stage=3 if cards > 1 else 0, world_size=cards,
        )
        for micro in (1, 2, 4, 8, 16, 32, 64)
        if batch % (cards * micro) == 0
        for checkpointing in ("none", "full")
        for offload in ((), ("optimizer_states:cpu",))
    ]  # fmt: skip


class Task(NamedTuple):
    """What the planner is asked."""

    name: str
    model: TransformerConfig
    card: GPU
    cards: int
    batch: int
    sequence: int
    budget: int


#: A recipe closer to the budget isn't demanded: a planner leaves room for what its formula leaves out.
MARGIN = 0.12

#: Less than cuBLAS's workspaces of a step on an A100 (forward's thread and backward's, 8.5 MB each).
SLACK = 8_000_000


@cache
def _tasks(seed: int) -> tuple[Task, ...]:
    rng = _random("6.6", seed)
    a100, base = hardware.gpu("A100-80GB"), transformer("llama2-7b")

    def llama(hidden: int, layers: int, vocab: int) -> TransformerConfig:
        heads = hidden // 128
        return replace(
            base, name=f"a LLaMA of {layers} x {hidden}", layers=layers, hidden=hidden, heads=heads,
            kv_heads=heads, ffn=256 * round(hidden * 8 / 3 / 256), vocab=vocab,
        )  # fmt: skip

    def task(
        name: str, model: TransformerConfig, cards: int, batch: int, s: int, per: float, texts: float
    ) -> Task:
        """A budget of `per` bytes a parameter, and of the activations of `texts` texts."""
        one = footprint(model, candidates(cards, s, cards)[0], a100).consumer_peaks()["activations"]
        return Task(name, model, a100, cards, batch, s, round(per * model.parameter_count + texts * one))

    wide = llama(128 * rng.randrange(34, 40), 3, 8000 + 128 * rng.randrange(30))
    thin = llama(1024, rng.randrange(4, 6), 2000 + 128 * rng.randrange(9))
    tempting = next(
        r for r in candidates(32, 1024, 4)
        if (r.micro_batch, r.checkpointing, r.offload) == (4, "none", ())
    )  # fmt: skip
    # Its closed form is just below this budget, its trace just above: cuBLAS's workspaces decide.
    edge = footprint(wide, tempting, a100).peak_bytes + SLACK
    return (
        task("states too large", wide, 1, 8, 1024, 6.2, 1.5),
        task("activations too large", thin, 1, 8, 2048, 9, 1.5),
        task("not one text's activations fit", thin, 1, 8, 4096, 8.5, 0.8),
        Task("states of four cards", wide, a100, 4, 32, 1024, edge),
        task("no recipe fits", wide, 1, 4, 1024, 2.5, 0.2),
    )


@lru_cache(100)
def _best(task: Task, share: float) -> float | None:
    """Seconds of the cheapest candidate that stays below this share of the budget; None without one."""
    seconds = [
        step_seconds(task.model, recipe, task.card)
        for recipe in candidates(task.batch, task.sequence, task.cards)
        if footprint(task.model, recipe, task.card).peak_bytes <= share * task.budget
    ]
    return min(seconds, default=None)


def _priced(seed: int) -> list[tuple[TransformerConfig, Recipe, GPU]]:
    rng = _random("6.6 price", seed)
    model, cases = transformer("llama2-7b"), []
    for card, cards in itertools.product(("A100-80GB", "H100"), (1, 8)):
        pool = [r for r in candidates(64, 2048, cards) if r.accumulation > 1]
        for checkpointing, host in itertools.product(("none", "full"), (False, True)):
            alike = [r for r in pool if r.checkpointing == checkpointing and bool(r.offload) is host]
            cases.append((model, rng.choice(alike), hardware.gpu(card)))
    return cases


def _planner_evidence(answer: Any, seed: int) -> Evidence:
    seconds, plan = several(answer, "6.6", "seconds", "plan")
    priced = [guarded(seconds, *case) for case in _priced(seed)]

    def work() -> Evidence:
        with _without("memlab.planner", "memlab.game"):
            answers = [guarded(_chosen, plan, task) for task in _tasks(seed)]
        for task, entry in zip(_tasks(seed), answers, strict=True):
            if entry.get("value", {}).get("recipe") and "form" not in entry["value"]:
                recipe = Recipe.from_dict(entry["value"]["recipe"])
                entry["value"]["peak"] = traced_peak(task.model, recipe, task.card)
        return {"answers": answers}

    evidence = contained(work, seconds=120, memory=3 * GIB)
    if "answers" in evidence and unwritten([*priced, *evidence["answers"]]):
        raise NotImplementedError("exercise 6.6")
    return {"priced": priced, **evidence}


@contextlib.contextmanager
def _without(*modules: str) -> Iterator[None]:
    """These modules can't be imported for a while, nor reached through `memlab`."""
    import memlab

    before = {name: sys.modules.get(name) for name in modules}
    names = [name.partition(".")[2] for name in modules] + ["plan"]
    kept = {name: vars(memlab).pop(name) for name in names if name in vars(memlab)}
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        vars(memlab).update(kept)


def _chosen(plan: Any, task: Task) -> dict[str, Any]:
    """The recipe that the student's planner chose."""
    chosen = plan(task.model, task.card, task.cards, task.batch, task.sequence, task.budget)
    if chosen is None:
        return {"recipe": None}
    if type(chosen) is not Recipe:
        return {"form": f"return a Recipe or None, not an object of type {type(chosen).__name__}"}
    allowed = candidates(task.batch, task.sequence, task.cards)
    if chosen not in allowed:
        return {"recipe": chosen.to_dict(), "form": _not_allowed(chosen, task)}
    return {"recipe": chosen.to_dict()}


def traced_peak(model: TransformerConfig, recipe: Recipe, card: GPU) -> int:
    """The peak of one card's step by the trace under the card's rules; two micro-batches stand for more."""
    from memlab.sharded import trace_sharded

    brief = recipe.replace(accumulation=min(recipe.accumulation, 2))
    return trace_sharded(model, brief, gpu=card, limit=2**62).peak_bytes


def _not_allowed(chosen: Recipe, task: Task) -> str:
    texts = chosen.world_size * chosen.micro_batch * chosen.accumulation
    if texts != task.batch:
        return f"cards x micro_batch x accumulation is {texts}, the batch has {task.batch} texts"
    likely = candidates(task.batch, task.sequence, task.cards)[0].to_dict()
    free = {"micro_batch", "accumulation", "checkpointing", "zero_stage", "offload"}
    fixed = {k: v for k, v in likely.items() if k not in free and chosen.to_dict().get(k) != v}
    return f"not one of the candidates: {', '.join(f'{k}={v!r}' for k, v in fixed.items()) or 'see the list'}"


def _planner_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    fault = _first(_price_fault(case, e) for case, e in answers_to(_priced(seed), evidence["priced"]))
    tally.award(1, not fault, fault)
    tasks = _tasks(seed)
    entries = answers_to(tasks, evidence["answers"])
    faults = [_plan_fault(task, entry) for task, entry in entries]
    none = [
        not fault and entry["value"]["recipe"] is None
        for fault, (_, entry) in zip(faults, entries, strict=True)
    ]
    planned = any(not fault and not found_none for fault, found_none in zip(faults, none, strict=True))
    for (task, _), fault, found_none in zip(entries, faults, none, strict=True):
        if found_none and not planned:  # who always returns None is right here by accident
            fault = f"plan, {task.name}: none fits, right, and it counts once a plan of yours is right"
        tally.award(2 / len(tasks), not fault, fault)
    return _once(tally)


def _price_fault(case: tuple[TransformerConfig, Recipe, GPU], entry: Evidence) -> str:
    model, recipe, card = case
    right = step_seconds(*case)
    if "error" in entry:
        return f"seconds stopped with {entry['error']}"
    if close(said := entry["value"], right, 0.01):
        return ""
    what = f"seconds: {model.name}, stage {recipe.zero_stage} on {recipe.world_size} cards, "
    what += f"{recipe.micro_batch} x {recipe.accumulation} texts, checkpointing {recipe.checkpointing}, "
    what += f"{'states on the host, ' if recipe.offload else ''}{card.name}: {right:.3f} s, you said "
    what += f"{_shown(said)}: "
    if not is_number(said):
        return what + "return a number"
    whole = {"micro_batch": recipe.micro_batch * recipe.accumulation, "accumulation": 1}
    ways = {
        "full checkpoints run the forward a second time: 8 P T": recipe.replace(checkpointing="none"),
        "nothing is recomputed without checkpoints": recipe.replace(checkpointing="full"),
        "weights are gathered twice and gradients reduced once for each micro-batch": recipe.replace(**whole),
        "gradients go to the host and weights come back": recipe.replace(offload=()),
        "one card has no network": recipe.replace(world_size=2, zero_stage=3),
    }
    hint = next(
        (text for text, r in ways.items() if r != recipe and close(said, step_seconds(model, r, card))), ""
    )
    return what + (hint or "compare arithmetic, network and host link one at a time")


def _plan_fault(task: Task, entry: Evidence) -> str:
    where = f"plan, {task.name} ({task.model.name}, {task.cards} x {format_gb(task.budget)})"
    if "error" in entry:
        return f"{where}: it stopped with {entry['error']}"
    value = entry["value"]
    best = _best(task, 1 - MARGIN)
    if "form" in value:
        return f"{where}: {value['form']}"
    if value["recipe"] is None:
        return f"{where}: you found none, and one takes {best:.2f} s" if best is not None else ""
    recipe = Recipe.from_dict(value["recipe"])
    counted = footprint(task.model, recipe, task.card).peak_bytes
    if recipe not in candidates(task.batch, task.sequence, task.cards) or not close(
        value["peak"], counted, 0.3
    ):
        raise ForeignEvidence("no recipe of the list has such a peak")
    if value["peak"] > task.budget:
        close_call = f"; the formula said {format_gb(counted)}: leave room for what it leaves out, a tenth"
        return (
            f"{where}: traced, your recipe has {format_gb(value['peak'])} at its peak: micro-batch "
            f"{recipe.micro_batch}, checkpointing {recipe.checkpointing}, stage {recipe.zero_stage}, "
            f"{'states on the host' if recipe.offload else 'nothing on the host'}"
            f"{close_call if counted <= task.budget else ''}"
        )
    seconds = step_seconds(task.model, recipe, task.card)
    if best is None or seconds <= 1.1 * best:
        return ""
    return f"{where}: your recipe takes {seconds:.2f} s, another that fits {best:.2f} s: sort by seconds"


EXERCISES = (
    Exercise("6.1", "a budget that adds up", 2, _budget_evidence, _budget_score, "section 3"),
    Exercise("6.2", "nine ways to train 70B", 2, _ways_evidence, _ways_score, "section 4"),
    Exercise("6.3", "BERT-large, phase by phase", 2, _phases_evidence, _phases_score, "section 5"),
    Exercise("6.4", "four levers in one step", 3, _levers_evidence, _levers_score, "section 6"),
    Exercise("6.5", "8-bit Adam", 3, _eight_evidence, _eight_score, "section 7"),
    Exercise("6.6", "a planner", 3, _planner_evidence, _planner_score, "section 8"),
)
