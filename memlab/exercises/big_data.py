"""Exercises 5.1 to 5.6: length and batch, accumulation, loss scaling, stochastic rounding, AMP, offload.

Eleven of the fifteen points come from code that trains small models on the CPU: its gradients are compared
with the plain step's, its bytes are measured by `memlab.Meter`, and each check of bytes also measures a twin
that has to fail it. Hidden inputs come from the seed alone, so `score` knows what is right without torch.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from memlab.exercises import (
    NOT_WRITTEN,
    Evidence,
    Exercise,
    Score,
    Tally,
    answers_to,
    close,
    exactly,
    guarded,
    is_number,
    one_line,
    plain,
    several,
    stopped,
    unwritten,
)
from memlab.exercises.limits import contained
from memlab.units import GB, GIB, MB, MIB, format_bytes

if TYPE_CHECKING:
    import torch


def _random(exercise: str, seed: int) -> random.Random:
    return random.Random(f"{exercise}/{seed}")


def _shown(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type"}:
        return f"an object of type {value['type']}"
    return f"{value:,.6g}" if is_number(value) else repr(value)[:80]


def _watched(work: Callable[[], Evidence], borrowed: tuple[str, ...], seconds: float = 60) -> Evidence:
    """`contained`, watched: evidence tells when a Python function of the files `borrowed` was called."""

    def watched() -> Evidence:
        called: set[str] = set()

        def look(frame: FrameType, event: str, _: Any) -> None:
            if event == "call":
                name = frame.f_code.co_filename.replace("\\", "/")
                called.update(part for part in borrowed if part in name)

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            found = work()
        finally:
            sys.setprofile(before)
        return {"borrowed": sorted(called)} if called else found

    return contained(watched, seconds=seconds)


def _is_borrowed(evidence: Evidence) -> Score | None:
    """What to say when the student handed in a function of the library or of PyTorch."""
    if "borrowed" not in evidence:
        return None
    return Score(0, (f"your code calls {', '.join(evidence['borrowed'])}: write it yourself, from tensors",))


_TECHNIQUES = ("memlab/techniques",)


def _seeded(exercise: str, seed: int) -> int:
    return _random(exercise, seed).randrange(2**31)


def _largest_difference(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]) -> float:
    """Of all pairs, relative to the largest number of the second; inf where the first is missing."""
    worst = 0.0
    for own, right in pairs:
        if own is None or right is None or own.shape != right.shape:
            return math.inf
        scale = max(float(right.abs().max()), 1e-30)
        difference = float((own - right).abs().max()) / scale
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


# -- 5.1 linear and quadratic ------------------------------------------------------------------------------


class _Length(NamedTuple):
    """One hidden block: it saves linear x s + quadratic x s^2 bytes at the lengths measured."""

    label: str
    linear: int
    quadratic: int
    lengths: tuple[int, ...]
    scatter: tuple[float, ...] = ()  # of bytes / s, at each length

    def saved(self, s: int) -> int:
        """By the law."""
        return self.linear * s + self.quadratic * s * s

    def measured(self) -> list[int]:
        """By the law, and scattered."""
        scatter = self.scatter or (0.0,) * len(self.lengths)
        return [self.saved(s) + round(e * s) for s, e in zip(self.lengths, scatter, strict=True)]


def unfelt(lengths: tuple[int, ...], end: float, rng: random.Random) -> tuple[float, ...]:
    """Scatter of -end and +end at the shortest and longest length that a least-squares line doesn't feel.

    It is orthogonal to 1, s, s^2 and s^3, so both the line through bytes / s and A s + B s^2 fitted to the
    bytes find the law, whatever its size; a line through two of the points doesn't.
    """
    centre, half = (max(lengths) + min(lengths)) / 2, (max(lengths) - min(lengths)) / 2
    xs = [(s - centre) / half for s in lengths]
    basis: list[list[float]] = []
    for power in range(4):
        vector = [x**power for x in xs]
        for _ in range(2):  # twice: rounding
            vector = _without(vector, basis)
        norm = math.hypot(*vector)
        basis.append([v / norm for v in vector])
    wanted = [x if abs(x) == 1 else rng.uniform(-0.1, 0.1) for x in xs]
    scatter = _without(_without(wanted, basis), basis)
    ends = scatter[xs.index(1.0)] - scatter[xs.index(-1.0)]
    return tuple(2 * end * e / ends for e in scatter)


def _without(vector: list[float], basis: list[list[float]]) -> list[float]:
    for direction in basis:
        along = sum(v * d for v, d in zip(vector, direction, strict=True))
        vector = [v - along * d for v, d in zip(vector, direction, strict=True)]
    return vector


def block_law(h: int, a: int, b: int, itemsize: int) -> tuple[int, int]:
    """(A, B) of a block with dropout and eager attention: 34h and 5a in 16 bit, 66h and 9a in fp32, times b.

    Korthikanti et al., arXiv:2205.05198, section 4.1, with 4 bytes where it has 2; dropout masks stay 1 byte.
    """
    return b * h * (16 * itemsize + 2), b * a * (2 * itemsize + 1)


def _lengths_5_1(seed: int) -> list[_Length]:
    rng = _random("5.1", seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(96, 1025, 32), count))  # in no order

    cases = []
    for label, itemsize in (("a block in fp32", 4), ("a block in 16 bit", 2)):
        a, b = rng.randrange(3, 17), rng.randrange(1, 9)
        cases.append(_Length(label, *block_law(64 * a, a, b, itemsize), some(4)))
    a, b, step = rng.randrange(3, 17), rng.randrange(1, 9), rng.choice((48, 64, 80))
    twelve = tuple(rng.sample(range(96, 96 + 12 * step, step), 12))
    linear, quadratic = block_law(64 * a, a, b, 4)
    end = quadratic * (max(twelve) - min(twelve)) / 40  # the slope between the ends is 5% too high
    cases.append(_Length("measured with scatter", linear, quadratic, twelve, unfelt(twelve, end, rng)))
    a, b = rng.randrange(3, 17), rng.randrange(1, 9)
    return [*cases, _Length("a block with fused attention", block_law(64 * a, a, b, 2)[0], 0, some(5))]


def _evidence_5_1(answer: Any, seed: int) -> Evidence:
    fit, crossover = several(answer, "5.1", "fit", "crossover")
    cases = _lengths_5_1(seed)
    fits = [guarded(fit, list(c.lengths), c.measured()) for c in cases]
    crossings = [guarded(crossover, float(c.linear), float(c.quadratic)) for c in cases]
    if unwritten([*fits, *crossings]):
        raise NotImplementedError("exercise 5.1")
    return {"fits": fits, "crossings": crossings}


def _score_5_1(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    cases = _lengths_5_1(seed)
    found = [_fault_fit(case, entry) for case, entry in answers_to(cases, evidence["fits"])]
    tally.award(1, not any(found), next(filter(None, found), ""))
    crossed = [_fault_crossing(case, entry) for case, entry in answers_to(cases, evidence["crossings"])]
    tally.award(0.5, not any(crossed[:-1]), next(filter(None, crossed[:-1]), ""))
    tally.award(0.5, not any(crossed), crossed[-1])  # nothing is no crossing at all
    return Score(tally.points, tuple(dict.fromkeys(filter(None, tally.messages))))


def _fault_fit(case: _Length, entry: Evidence) -> str:
    if "error" in entry:
        return f"fit stopped with {entry['error']}"
    value = entry["value"]
    if type(value) is not list or len(value) != 2 or not all(map(is_number, value)):
        return f"fit returns two numbers, (A, B); you returned {_shown(value)}"
    s = 4096
    said, right = value[0] * s + value[1] * s * s, case.saved(s)
    if close(said, right, 0.02) and abs(value[1] - case.quadratic) * s * s <= 0.02 * right:
        return ""
    text = f"fit, {case.label}: your law gives {_shown(said)} B at s = {s}, {right:,} B are right: "
    for unit, size in (("GB", GB), ("GiB", GIB), ("MB", MB), ("MiB", MIB)):
        if close(said * size, right, 0.02):
            return text + f"that is the right size in {unit}; the bytes you were given need no unit"
    if close(value[0], case.quadratic, 0.02) and close(value[1], case.linear, 0.02):
        return text + "A and B are swapped: A belongs to s, B to s^2; return (A, B)"
    if value[1] == 0:
        return (
            text
            + "B = 0 says that twice the length takes twice the bytes; divide the bytes by s and look again"
        )
    if value[0] == 0:
        return text + "A = 0 says that all is quadratic; a block also keeps tensors of shape (b, s, h)"
    if case.scatter:
        return text + "measured bytes scatter: a line through two of the points isn't enough, take them all"
    return text + "bytes / s is A + B s, a straight line: fit that line; the lengths come in no order"


def _fault_crossing(case: _Length, entry: Evidence) -> str:
    if "error" in entry:
        hint = " (B is 0 there: return math.inf)" if "ZeroDivision" in entry["error"] else ""
        return f"crossover stopped with {entry['error']}{hint}"
    value, asked = entry["value"], f"crossover({case.linear}, {case.quadratic})"
    if case.quadratic == 0:
        if value == "inf" or (is_number(value) and value > 1e9):
            return ""
        return f"{asked}: nothing is quadratic there, so it is never overtaken: return math.inf"
    right = case.linear / case.quadratic
    if close(value, right, 0.005):
        return ""
    text = f"{asked}: you said {_shown(value)} tokens: "
    if close(value, 1 / right, 0.01):
        return text + "that is upside down: solve A s = B s^2 for s"
    if close(value, math.sqrt(right), 0.01):
        return text + "no root: one s cancels in A s = B s^2"
    return text + "the length at which A s = B s^2"


# -- 5.2 batch and resolution ------------------------------------------------------------------------------


def _batches_5_2(seed: int) -> list[tuple[int, int, int, int]]:
    """(S, A, b, k): fixed bytes, bytes per sample, batch, by what the batch is multiplied."""
    rng = _random("5.2", seed)
    heavy = (rng.randrange(10, 60) * GB, rng.randrange(10, 90) * MB, rng.randrange(1, 9), 2)
    light = (rng.randrange(1, 5) * GB, rng.randrange(1, 5) * GB, rng.randrange(16, 65), 2)
    return [heavy, light, (rng.randrange(1, 9) * GB, rng.randrange(1, 5) * GB, 3, rng.randrange(3, 9))]


def _rooms_5_2(seed: int) -> list[tuple[int, int, int]]:
    """(S, A, memory): one with room to spare, one that is filled to the byte, one where nothing fits."""
    rng = _random("5.2 room", seed)
    fixed, each, batch = rng.randrange(1, 9) * GB, rng.randrange(10**8, 10**9), rng.randrange(5, 60)
    return [
        (fixed, each, fixed + batch * each + each // 3),
        (fixed, each, fixed + batch * each),
        (fixed, each, fixed - 1),
    ]


def _images_5_2(seed: int) -> list[tuple[int, int, int]]:
    """(old side, new side, patch): both sides whole patches."""
    rng = _random("5.2 image", seed)
    patch = rng.choice([8, 14, 16])
    return [
        (14 * patch, 28 * patch, patch),
        (patch * rng.randrange(6, 12), patch * rng.randrange(13, 40), patch),
    ]


def _evidence_5_2(answer: Any, seed: int) -> Evidence:
    growth, largest, sides = several(answer, "5.2", "growth", "largest_batch", "resolution")
    found = {
        "growth": [guarded(growth, *case) for case in _batches_5_2(seed)],
        "largest": [guarded(largest, *case) for case in _rooms_5_2(seed)],
        "resolution": [guarded(sides, *case) for case in _images_5_2(seed)],
    }
    if unwritten(itertools.chain(*found.values())):
        raise NotImplementedError("exercise 5.2")
    return {**found}


def _score_5_2(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    rows: tuple[tuple[str, float, list[Any], Callable[[Any, Evidence], str]], ...] = (
        ("growth", 1, _batches_5_2(seed), _fault_growth),
        ("largest", 0.5, _rooms_5_2(seed), _fault_largest),
        ("resolution", 0.5, _images_5_2(seed), _fault_resolution),
    )
    for key, points, cases, fault in rows:
        found = [fault(case, entry) for case, entry in answers_to(cases, evidence[key])]
        tally.award(points, not any(found), next(filter(None, found), ""))
    return tally.score()


def _fault_growth(case: tuple[int, int, int, int], entry: Evidence) -> str:
    if "error" in entry:
        return f"growth stopped with {entry['error']}"
    fixed, each, batch, k = case
    value = entry["value"]
    right = each * batch * (k - 1) / (fixed + each * batch)
    if close(value, right, 0.002):
        return ""
    text = f"growth(S={fixed / GB:g}e9, A={each / GB:g}e9, b={batch}, k={k}): you said {_shown(value)}: "
    if close(value, 100 * right, 0.002):
        return text + "that is per cent; return the share, 0.94 for +94%"
    if close(value, right + 1, 0.002):
        return text + "that is new / old; the growth is what is added, so subtract 1"
    if close(value, k - 1, 0.002):
        return text + "only the activations are multiplied; S stays as it is"
    if close(value, right * (fixed + each * batch) / (fixed + k * each * batch), 0.002):
        return text + "divide by what it took before the change, not after"
    if close(value, each * (k - 1) / (fixed + each), 0.002):
        return text + "A is for one sample: the batch has b of them before, k b after"
    return text + "(S + A k b) / (S + A b) - 1: what grows, by all that was there"


def _fault_largest(case: tuple[int, int, int], entry: Evidence) -> str:
    if "error" in entry:
        return f"largest_batch stopped with {entry['error']}"
    fixed, each, memory = case
    value, right = entry["value"], max(0, (memory - fixed) // each)
    if type(value) is int and value == right:
        return ""
    text = f"largest_batch({fixed}, {each}, {memory}): you said {_shown(value)}: "
    if type(value) is float and math.floor(value) == right:
        return text + "a batch is a whole number of samples: return an int, rounded down (//)"
    if right == 0:
        return text + "not even S fits: return 0"
    if type(value) is int and value == right + 1:
        return text + "one more than fits: round down"
    if type(value) is int and value == right - 1:
        return text + "one more fits: M = memory exactly is enough"
    if is_number(value) and close(value, memory / each, 0.02):
        return text + "S is in memory too: subtract it first"
    return text + "the largest whole b with S + A b <= memory"


def _fault_resolution(case: tuple[int, int, int], entry: Evidence) -> str:
    if "error" in entry:
        return f"resolution stopped with {entry['error']}"
    old, new, patch = case
    value, square = entry["value"], (new / old) ** 2
    if type(value) is list and len(value) == 2 and close(value[0], square, 0.002):
        if close(value[1], square**2, 0.002):
            return ""
        hint = "tokens grow with the pixels, and scores with tokens squared"
        return (
            f"resolution({old}, {new}, {patch}): scores grow x {square**2:.4g}, you said "
            f"{_shown(value[1])}: {hint}"
        )
    text = f"resolution({old}, {new}, {patch}): you said {_shown(value)}: "
    if type(value) is list and len(value) == 2 and close(value[0], new / old, 0.002):
        return text + "an image has side x side pixels"
    if type(value) is list and len(value) == 2 and close(value[0], square**2, 0.002):
        return text + "swapped: return (convolutions, scores)"
    return text + "return two factors, (activations of a convnet, scores of a ViT)"


# -- 5.3 the accumulation loop -----------------------------------------------------------------------------

_WIDTH_3, _CLASSES_3, _DEPTH_3 = 32, 16, 6
_GRADIENTS_3 = 4 * (_WIDTH_3 + 1) * (_DEPTH_3 * _WIDTH_3 + _CLASSES_3)  # bytes


class _Group(NamedTuple):
    """One hidden run: sizes of the micro-batches, how many make a step, what a mean is over."""

    label: str
    sizes: tuple[int, ...]
    every: int
    tokens: bool  # some targets are padding, and the loss is a mean over those that aren't
    loss: str

    @property
    def steps(self) -> int:
        return math.ceil(len(self.sizes) / self.every)


def _groups_5_3(seed: int) -> dict[str, _Group]:
    rng = _random("5.3", seed)
    n, every = 32 * rng.randrange(2, 4), rng.randrange(4, 7)
    return {
        "mean": _Group("equal micro-batches, mean loss", (n,) * 2 * every, every, False, "mse"),
        "last": _Group(
            "the last group shorter", (n,) * (2 * every + 2) + (n // 2,), every, False, "cross entropy"
        ),
        "tokens": _Group("unequal counts of tokens", (n,) * (every + 2), every, True, "cross entropy"),
    }


def _micro_batches(group: _Group, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, targets); the padding is target -100. In 'tokens' one micro-batch is nothing but padding."""
    import torch

    generator = torch.Generator().manual_seed(_seeded(f"5.3 {group.label}", seed))
    found = []
    for index, n in enumerate(group.sizes):
        x = torch.randn(n, _WIDTH_3, generator=generator)
        if group.loss == "mse":
            found.append((x, torch.randn(n, _CLASSES_3, generator=generator)))
            continue
        y = torch.randint(_CLASSES_3, (n,), generator=generator)
        if group.tokens:
            real = (0, n, 2, n // 2)[(index + 3) % 4]  # the first has n // 2, the second none
            y[real:] = -100
        found.append((x, y))
    return found


def _evidence_5_3(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        return {
            **{name: _accumulated(answer, g, seed) for name, g in _groups_5_3(seed).items()},
        }

    return _watched(work, _TECHNIQUES)


def _accumulated(answer: Any, group: _Group, seed: int) -> Evidence:
    """The student's loop and the plain one over the same groups, each whole group as one batch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from memlab.meter import Meter

    torch.manual_seed(_seeded("5.3 model", seed))
    made = nn.Sequential(
        *itertools.chain(*((nn.Linear(_WIDTH_3, _WIDTH_3), nn.Tanh()) for _ in range(_DEPTH_3))),
        nn.Linear(_WIDTH_3, _CLASSES_3),
    )
    batches = _micro_batches(group, seed)
    model: nn.Module
    optimizer: Recorder

    class Recorder(torch.optim.SGD):
        """SGD that keeps a copy of the gradients of each step, as arrays, which no meter counts."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.05, foreach=False)
            self.seen: list[list[Any]] = []

        def step(self, closure: Any = None) -> Any:
            if len(self.seen) < 100:
                grads = [p.grad for p in self.param_groups[0]["params"]]
                self.seen.append([None if g is None else g.numpy().copy() for g in grads])
            return super().step(closure)

    def run(loop: Callable[..., Any]) -> tuple[Recorder, int]:
        """The loop on a fresh model, and its peak of live bytes beyond parameters and data."""
        nonlocal model, optimizer
        model = copy.deepcopy(made)
        optimizer = Recorder(model)
        with Meter(model) as meter:
            for x, y in batches:  # seen before, so that they count the same in each run
                x.view_as(x), y.view_as(y)
            before = meter.live_bytes
            loop()
        return optimizer, meter.trace.peak_bytes - before

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y) if group.loss == "mse" else F.cross_entropy(model(x), y)

    def count(batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        return int((batch[1] != -100).sum()) if group.tokens else len(batch[1])

    def whole() -> None:
        for start in range(0, len(batches), group.every):
            xs, ys = zip(*batches[start : start + group.every], strict=True)
            optimizer.zero_grad()
            loss_of((torch.cat(xs), torch.cat(ys))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def one() -> None:
        optimizer.zero_grad()
        loss_of(max(batches, key=lambda b: len(b[0]))).backward()  # type: ignore[no-untyped-call]

    plain_run, whole_bytes = run(whole)
    _, one_bytes = run(one)
    try:
        own, own_bytes = run(lambda: answer(loss_of, count, list(batches), optimizer, group.every))
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"error": one_line(error)}
    ratio = None
    if own.seen and all(g is not None for g in own.seen[0]):
        norms = [
            math.sqrt(sum(float((g.astype("f8") ** 2).sum()) for g in r.seen[0])) for r in (own, plain_run)
        ]
        ratio = plain(norms[0] / norms[1])

    def tensors(gradients: list[Any]) -> list[torch.Tensor | None]:
        return [None if g is None else torch.from_numpy(g) for g in gradients]

    errors = [
        plain(_largest_difference(zip(tensors(a), tensors(b), strict=True)))
        for a, b in zip(own.seen, plain_run.seen, strict=False)
    ]
    return {
        "steps": len(own.seen),
        "errors": errors,
        "ratio": ratio,
        "bytes": own_bytes,
        "one": one_bytes,
        "whole": whole_bytes,
    }


def _score_5_3(evidence: Evidence, seed: int) -> Score:
    if borrowed := _is_borrowed(evidence):
        return borrowed
    tally = Tally()
    groups = _groups_5_3(seed)
    mean = _fault_group(groups["mean"], evidence["mean"])
    right = tally.award(1, not mean, mean)
    for name in ("last", "tokens"):
        fault = _fault_group(groups[name], evidence[name])
        tally.award(0.5, not fault, fault)
    if right:
        run = evidence["mean"]
        most = 1.1 * run["one"] + _GRADIENTS_3
        tally.award(
            1,
            run["bytes"] <= most < run["whole"],
            f"bytes: at the peak {format_bytes(run['bytes'])} are alive beside parameters and data, at most "
            f"{format_bytes(round(most))} should be: one micro-batch's step "
            f"({format_bytes(run['one'])}) and the "
            f"gradients (all at once: {format_bytes(run['whole'])}): backward after each micro-batch, "
            "not at the end",
        )
    else:
        tally.messages.append(
            "the point for measured bytes counts once the gradients of equal micro-batches are right"
        )
    return tally.score()


def _fault_group(group: _Group, run: Evidence) -> str:
    where = f"{group.label} ({len(group.sizes)} micro-batches, {group.every} for a step)"
    if "error" in run:
        return f"{where}: train stopped with {run['error']}"
    if run["steps"] != group.steps:
        if run["steps"] == len(group.sizes):
            return f"{where}: one optimizer step after each micro-batch; step once for each group"
        if run["steps"] == len(group.sizes) // group.every:
            return (
                f"{where}: {run['steps']} steps instead of {group.steps}: what is left at the end "
                "is a group too"
            )
        return f"{where}: {run['steps']} optimizer steps, should be {group.steps}"
    errors = exactly(run["errors"], group.steps)
    index = next((i for i, e in enumerate(errors) if not (is_number(e) and e <= 1e-4)), None)
    if index is None:
        return ""
    ratio = run["ratio"]
    text = f"{where}: the gradient of step {index + 1} isn't that of the whole group: "
    if not is_number(ratio):
        return text + "a gradient is missing or NaN: one backward for each micro-batch, before the step"
    if index and group.label == "the last group shorter" and index == group.steps - 1:
        return (
            text + "it has fewer micro-batches, the last of them smaller: share = count / sum of its counts"
        )
    if index:
        return text + "the first step is right; zero the gradients at the start of each group"
    if close(ratio, group.every, 0.02) and not group.tokens:
        return (
            text + f"{ratio:.3g} times too long: a sum of means; multiply each loss by its share of the group"
        )
    if group.tokens and ratio < 2:
        return text + "a micro-batch's share is its tokens by the tokens of its group: count(batch) / total"
    if close(1 / ratio, group.every, 0.02):
        return text + f"{1 / ratio:.3g} times too short: divided once too often"
    if close(ratio * sum(group.sizes) / sum(group.sizes[: group.every]), 1, 0.02):
        return text + f"a factor of {ratio:.3g}: divide by the counts of this group, not of all batches"
    if ratio < 1:
        return text + f"a factor of {ratio:.3g}: gradients zeroed between the micro-batches of a group?"
    return text + f"a factor of {ratio:.3g}: share of a micro-batch = count / sum of its group's counts"


# -- 5.4 a dynamic loss scaler -----------------------------------------------------------------------------


class _Schedule(NamedTuple):
    """One hidden life of a scaler: its settings, and which steps have an inf or a nan in their gradients."""

    factor: float
    growth: float
    backoff: float
    interval: int
    bad: tuple[str, ...]  # "", "inf" or "nan" for each step

    def factors(self) -> list[float]:
        """The factor after each update."""
        factor, good, found = self.factor, 0, []
        for kind in self.bad:
            good = 0 if kind else good + 1
            if kind:
                factor *= self.backoff
            elif good == self.interval:
                factor, good = factor * self.growth, 0
            found.append(factor)
        return found


def _schedules_5_4(seed: int) -> list[_Schedule]:
    rng = _random("5.4", seed)
    interval = rng.randrange(3, 6)
    calm = ("",) * interval
    return [
        # nearly grown, then an overflow: the count starts again; grows twice; two overflows in a row
        _Schedule(
            2.0**12, 2.0, 0.5, interval, (*calm[1:], "inf", *calm[1:], "", *calm, "nan", "-inf", "", "")
        ),
        _Schedule(2.0 ** rng.randrange(8, 15), 4.0, 0.25, 2, ("", "nan", "", "", "", "inf", "", "", "")),
    ]


def _evidence_5_4(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        lives = [_life(answer, s, seed + i) for i, s in enumerate(_schedules_5_4(seed))]
        if any("error" in life for life in lives):
            return {"lives": lives}
        return {
            "lives": lives,
            **_clipped(answer, seed),
            **_scaler_bytes(answer, seed),
            **_fp16(answer, seed),
        }

    return _watched(work, (*_TECHNIQUES, "torch/amp/grad_scaler"))


def _life(answer: Any, schedule: _Schedule, seed: int) -> Evidence:
    """Steps by the student's scaler: each step's factor, whether it changed the weights, and how.

    Three parameters in two groups; what isn't finite stands in another one at each overflow.
    """
    import torch

    generator = torch.Generator().manual_seed(_seeded("5.4", seed))
    weights = [torch.nn.Parameter(torch.randn(6, 5, generator=generator)) for _ in range(3)]
    twins = [torch.nn.Parameter(w.detach().clone()) for w in weights]

    def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)

    optimizer, plain_optimizer = grouped(weights), grouped(twins)
    factors, changed, errors = [], [], []
    places = itertools.cycle((0, 2, 1))
    try:
        scaler = answer(schedule.factor, schedule.growth, schedule.backoff, schedule.interval)
        for kind in schedule.bad:
            gradients = [torch.randn(6, 5, generator=generator) for _ in weights]
            if not kind:
                for twin, gradient in zip(twins, gradients, strict=True):
                    twin.grad = gradient.clone()
                plain_optimizer.step()
            optimizer.zero_grad()
            losses = [(w * g).sum() for w, g in zip(weights, gradients, strict=True)]
            scaler.scale(torch.stack(losses).sum()).backward()
            if kind and (spoiled := weights[next(places)].grad) is not None:
                spoiled[1, 2] = float(kind)
            before = [w.detach().clone() for w in weights]
            scaler.step(optimizer)
            scaler.update()
            changed.append(any(not torch.equal(a, w) for a, w in zip(before, weights, strict=True)))
            apart = [(w.detach() - t.detach()).abs().max() for w, t in zip(weights, twins, strict=True)]
            errors.append(plain(float(torch.stack(apart).max())))
            factors.append(plain(float(scaler.scale(torch.tensor(1.0)))))
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"error": one_line(error)}
    return {"factors": factors, "changed": changed, "errors": errors}


def _clipped(answer: Any, seed: int) -> Evidence:
    """unscale_, clip, step: the scaler must not divide a second time. The third step overflows."""
    import torch

    weight = torch.nn.Parameter(torch.ones(_CLIPPED_4))
    unused = torch.nn.Parameter(torch.ones(3))  # never gets a gradient
    optimizer = torch.optim.SGD([unused, weight], lr=1.0, foreach=False)
    try:
        scaler = answer(2.0**10, 2.0, 0.5, 100)
        norms, moved = [], []
        for bad in (False, False, True):
            optimizer.zero_grad()
            scaler.scale((weight * 3.0).sum()).backward()
            assert weight.grad is not None
            if bad:
                weight.grad[1] = math.inf
            scaler.unscale_(optimizer)
            norms.append(plain(float(torch.nn.utils.clip_grad_norm_([weight], 1.0))))
            before = weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            moved.append(plain(float((before - weight.detach()).norm())))
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"clip": {"error": one_line(error)}}
    return {"clip": {"norm": norms[1], "moved": moved}}


_TENSORS_4, _SIDE_4, _CLIPPED_4 = 12, 64, 50


def _scaler_bytes(answer: Any, seed: int) -> Evidence:
    """Peak of unscaling and testing 12 equal gradients, beyond them; the twin joins them first."""
    import torch

    from memlab.meter import Meter

    def gradients() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.ones(_SIDE_4, _SIDE_4)) for _ in range(_TENSORS_4)]
        for p in parameters:
            p.grad = torch.ones_like(p)
        return parameters, torch.optim.SGD(parameters, lr=0.1, foreach=False)

    def measured(work: Callable[[torch.optim.Optimizer, list[torch.nn.Parameter]], Any]) -> int:
        parameters, optimizer = gradients()
        optimizer.step()
        own = [p.grad for p in parameters]
        with Meter(torch.nn.ParameterList(parameters), optimizer) as meter:
            before = meter.live_bytes
            work(optimizer, parameters)
        replaced.append(sum(p.grad is not grad for p, grad in zip(parameters, own, strict=True)))
        return meter.trace.peak_bytes - before

    def joined(_: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
        torch.isfinite(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])).all().item()

    replaced: list[int] = []
    try:
        scaler = answer(8.0, 2.0, 0.5, 100)
        scaler.scale(torch.tensor(1.0))
        own = measured(lambda optimizer, _: scaler.unscale_(optimizer))
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"bytes": {"error": one_line(error)}}
    found = {"own": own, "twin": measured(joined), "replaced": replaced[0]}
    return {"bytes": found}


def _fp16(answer: Any, seed: int) -> Evidence:
    """Shares of zero gradients of a small MLP in fp16 autocast, with and without the scaler."""
    import torch
    from torch import nn

    def zeros(scaler: Any) -> Any:
        torch.manual_seed(_seeded("5.4 fp16", seed))
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(32, 128)).square().mean() * 1e-3
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        g = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return plain(float((g == 0).float().mean()))

    try:
        return {"zeros": {"own": zeros(answer(2.0**16, 2.0, 0.5, 2000)), "none": zeros(None)}}
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"zeros": {"error": one_line(error)}}


def _score_5_4(evidence: Evidence, seed: int) -> Score:
    if borrowed := _is_borrowed(evidence):
        return borrowed
    tally = Tally()
    lives = exactly(evidence["lives"], len(_schedules_5_4(seed)))
    for life in lives:
        if "error" in life:
            return Score(
                0, (f"a scaler's life (scale, backward, step, update) stopped with {life['error']}",)
            )
    pairs = list(zip(_schedules_5_4(seed), lives, strict=True))
    found = [_fault_weights(s, life) for s, life in pairs]
    weights = next(filter(None, found), "")
    good = tally.award(0.5, not weights, weights)
    found = [_fault_skips(s, life) for s, life in pairs]
    skips = next(filter(None, found), "") if good else ""
    tally.award(0.5, good and not skips, skips)
    found = [_fault_factors(s, life) for s, life in pairs]
    tally.award(1, not any(found), next(filter(None, found), ""))
    clip = _fault_clip(evidence["clip"])
    tally.award(0.5, not clip, clip)
    small = _fault_bytes(evidence["bytes"], evidence["zeros"])
    if good:
        tally.award(0.5, not small, small)
    return Score(tally.points, tuple(dict.fromkeys(filter(None, tally.messages))))


def _fault_weights(schedule: _Schedule, life: Evidence) -> str:
    for number, (kind, error) in enumerate(zip(schedule.bad, life["errors"], strict=True), 1):
        if kind:
            return ""  # what comes after a bad step is another point
        if is_number(error) and error <= 1e-5:
            continue
        if number > 1:
            return (
                f"step 1 is right, step {number} isn't: update() must make the scaler ready for the "
                "next step, "
                "which has gradients to unscale again"
            )
        return (
            f"step 1: the weights differ from those of SGD without a scaler by {_shown(error)}: scale "
            "multiplies "
            "the loss by the factor, step divides the gradients by the same factor before the update"
        )
    return ""


def _fault_skips(schedule: _Schedule, life: Evidence) -> str:
    for number, (kind, changed, error) in enumerate(
        zip(schedule.bad, life["changed"], life["errors"], strict=True), 1
    ):
        if kind and changed:
            return f"step {number} has a gradient of {kind} and changed the weights: leave the whole step out"
        if not kind and not changed:
            return (
                f"step {number} has finite gradients and changed nothing: only inf and nan leave a step out"
            )
        if not (is_number(error) and error <= 1e-4):
            return f"step {number}: after a step left out the weights differ from those of SGD without it"
    return ""


def _fault_factors(schedule: _Schedule, life: Evidence) -> str:
    good = 0
    for number, (kind, said, right) in enumerate(
        zip(schedule.bad, life["factors"], schedule.factors(), strict=True), 1
    ):
        good = 0 if kind else good + 1
        if close(said, right, 1e-6):
            good = 0 if good == schedule.interval else good
            continue
        text = f"after step {number} ({kind or 'finite'}) the factor is {_shown(said)}, should be {right:g}: "
        if kind:
            return text + "an overflow multiplies it by backoff, at the update of that step"
        if good == schedule.interval:
            return (
                text
                + f"{schedule.interval} good steps in a row multiply it by growth, and the count starts again"
            )
        if said == 1:
            return text + "scale(1.0) shows the factor: multiply by it"
        if is_number(said) and said > right:
            return (
                text + f"it grows after {schedule.interval} good steps in a row, here are {good}: "
                "an overflow, and a growth, set the count back to 0"
            )
        return text + "it changes at an overflow and at the interval, and otherwise stays"
    return ""


def _fault_clip(run: Evidence) -> str:
    if "error" in run:
        hint = ": a parameter may have no gradient (p.grad is None)" if "NoneType" in run["error"] else ""
        return f"unscale_, clip, step, update: it stopped with {run['error']}{hint}"
    right = 3.0 * math.sqrt(_CLIPPED_4)
    if not close(run["norm"], right, 1e-3):
        by = run["norm"] / right if is_number(run["norm"]) else 0
        return (
            f"after unscale_ the gradient's norm is {by:,.6g} times the true one: unscale_ divides the "
            "gradients by the factor, in place"
        )
    *moved, bad = exactly(run["moved"], 3)
    if not all(close(each, 1.0, 1e-3) for each in moved):
        return (
            f"after unscale_ and clipping to 1, SGD moved by {_shown(moved)} instead of 1 and "
            "1: step must not "
            "divide again what unscale_ has divided, and update makes it ready for the next step"
        )
    if bad != 0:
        return "unscale_ met an inf, and the step after it changed the weights: leave it out here too"
    return ""


def _fault_bytes(run: Evidence, zeros: Evidence) -> str:
    for part in (run, zeros):
        if "error" in part:
            return f"unscale_ alone stopped with {part['error']}"
    if not (is_number(zeros["own"]) and zeros["own"] < 1e-3 < 0.01 < zeros["none"]):
        return (
            f"fp16: {_shown(zeros['own'])} of the gradients are 0 with your scaler, "
            f"{_shown(zeros['none'])} without"
        )
    if run["replaced"] != 0:
        return (
            f"unscale_ put {run['replaced']} of {_TENSORS_4} gradients into new tensors: divide in place "
            "(p.grad.mul_(…)), as its name says; who else holds a gradient would keep the scaled one"
        )
    one = 4 * _SIDE_4**2
    if run["own"] <= 4 * one < run["twin"]:
        return ""
    return (
        f"bytes: unscale_ takes {format_bytes(run['own'])} beside {_TENSORS_4} gradients of "
        f"{format_bytes(one)}, "
        f"at most {format_bytes(4 * one)} is allowed: in place (mul_), one gradient after the "
        "other, nothing joined"
    )


# -- 5.5 stochastic rounding -------------------------------------------------------------------------------

_DRAWS = 40_000
_SIX_SIGMA = 0.015


def _values_5_5(seed: int) -> list[float]:
    """Numbers between two bf16 neighbours, of all sizes and both signs."""
    rng = _random("5.5", seed)
    return [
        sign * rng.uniform(1.01, 1.99) * 2.0**exponent for exponent in (-20, -3, 0, 1, 12) for sign in (1, -1)
    ]


def _evidence_5_5(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        import torch

        torch.manual_seed(_seeded("5.5", seed))
        found: Evidence = {"rounded": []}
        for value in _values_5_5(seed):
            x = torch.full((_DRAWS,), value, dtype=torch.float32)
            kept = x.clone()
            y = answer(x)
            if not isinstance(y, torch.Tensor) or y.dtype != torch.bfloat16 or y.shape != x.shape:
                kind = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
                hint = ""
                if isinstance(y, torch.Tensor) and y.numel() == 2 * x.numel():
                    hint = "; twice the length comes from int64 noise: torch.randint(..., dtype=torch.int32)"
                return {
                    "error": f"TypeError: stochastic_round returned {kind}, not a bfloat16 tensor of "
                    f"x's shape {tuple(x.shape)}{hint}"
                }
            _, low, high = _neighbours(value)
            wide = y.double()
            outside = (wide != low) & (wide != high)
            found["rounded"].append({
                "untouched": torch.equal(x, kept),
                "outside": float(outside.double().mean()),
                "upper": plain(float((wide == high).double().mean())),
            })  # fmt: skip
        full = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)  # a NaN with all bits set
        special = torch.tensor([0.0, 1.0, -2.5, 0.0078125, math.inf, -math.inf, math.nan, full]).repeat(200)
        found["special"] = plain(int(_changed_specials(special, answer(special.clone()))))
        weight = torch.ones(512, dtype=torch.bfloat16)
        for _ in range(1000):
            weight = answer(weight.float() + 0.001)
        found["mean"] = plain(float(weight.double().mean()))
        found["shape"] = list(answer(torch.randn(3, 4, 5)).shape)
        return found

    return _watched(work, _TECHNIQUES)


def _neighbours(value: float) -> tuple[float, float, float]:
    """The number in fp32, and the bf16 numbers below and above: its upper 16 bits, and those plus one."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]

    def number(bits: int) -> float:
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])

    toward = bits & 0xFFFF0000
    low, high = sorted((number(toward), number(toward + 2**16)))
    return number(bits), low, high


def _changed_specials(special: torch.Tensor, rounded: torch.Tensor) -> int:
    import torch

    wide = rounded.float()
    same = (wide == special) | (torch.isnan(wide) & torch.isnan(special))
    return int((~same).sum())


def _share(x: float, low: float, high: float) -> float:
    """Of the way from the lower neighbour to the upper: how often a right rounding goes up."""
    return (x - low) / (high - low)


def _score_5_5(evidence: Evidence, seed: int) -> Score:
    if borrowed := _is_borrowed(evidence):
        return borrowed
    tally = Tally()
    values = [_neighbours(value) for value in _values_5_5(seed)]
    rows = list(zip(values, exactly(evidence["rounded"], len(values)), strict=True))
    if not all(row["untouched"] is True for _, row in rows):
        return Score(0, ("stochastic_round changed its input: work on a copy (+ and &, not add_ and &=)",))
    outside = next(((value, row) for value, row in rows if row["outside"] != 0), None)
    if outside is not None:
        (x, low, high), row = outside
        text = (
            f"{row['outside']:.0%} of the roundings of {x:g} are neither {low:g} nor {high:g}, its bf16 "
            "neighbours: add at most 2**16 - 1 to the fp32 bits, then cut the lower 16 bits off (&); "
            ".bfloat16() alone rounds what is left there once more"
        )
        return Score(0, (text, "the other points count once every result is a neighbour"))
    tally.award(0.5, True, "")
    off = [(value, row["upper"]) for value, row in rows if abs(row["upper"] - _share(*value)) > _SIX_SIGMA]
    biased, mean = "", evidence["mean"]
    if off:
        (x, low, high), upper = off[0]
        same = all(row["upper"] in (0.0, 1.0) for _, row in rows)
        hint = (
            "all elements went the same way: draw noise for each of them (x.shape), anew at each call"
            if same
            else "the noise must be uniform over all 2**16 values, 0 to 65535"
        )
        biased = (
            f"{x:g} lies {_share(x, low, high):.3f} of the way from {low:g} to {high:g}, and went up in "
            f"{upper:.3f} of {_DRAWS:,} roundings, so the mean is off: {hint}"
        )
    elif not (is_number(mean) and abs(mean - 2) < 0.02):
        biased = f"1 + 1000 x 0.001 became {_shown(mean)} on average instead of 2.00: draw anew at each call"
    tally.award(1, not biased, biased)
    tally.award(
        0.5,
        evidence["special"] == 0 and evidence["shape"] == [3, 4, 5],
        f"{evidence['special']} of 1,600 numbers that have to stay were changed: what bf16 holds "
        "exactly, inf and "
        "NaN, also the NaN whose bits are all set: with noise added it wraps round "
        "(torch.where(x.isnan(), x, …))",
    )
    return tally.score()


# -- 5.6 the AMP step and the order of offloading ----------------------------------------------------------


class _Offload(NamedTuple):
    tensors: dict[str, tuple[int, int]]  # name -> (bytes, touches in a step)
    need: int

    def expected(self) -> list[str]:
        found: list[str] = []
        freed = 0
        coldest = sorted(self.tensors.items(), key=lambda item: (item[1][1], -item[1][0]))
        for name, (size, _) in coldest:
            if freed >= self.need:
                break
            found.append(name)
            freed += size
        return found


def _offloads_5_6(seed: int) -> dict[str, _Offload]:
    rng = _random("5.6", seed)
    n, a = rng.randrange(10**9, 10**11), rng.randrange(2, 9)
    dense = {
        "parameters": (2 * n, 2 * a + 1),
        "gradients": (2 * n, a + 1),
        "optimizer_states": (12 * n, 1),
    }
    other = {
        "small and hot": (n // 100, 50),
        "small and coldest": (n // 100, 1),  # costs more a byte freed only if touches are divided by bytes
        "large and cold": (9 * n, 2),
        "larger, as cold": (10 * n, 2),
        "middle": (3 * n, 4),
    }
    return {
        "dense": _Offload(dense, 15 * n),
        "enough": _Offload(dense, 12 * n),
        "other": _Offload(other, 20 * n),
        "nothing": _Offload(other, 0),
    }


_CALLS = ("unscale_", "step", "update")


def _evidence_5_6(answer: Any, seed: int) -> Evidence:
    amp_step, plan = several(answer, "5.6", "amp_step", "offload_plan")
    plans = [guarded(plan, dict(o.tensors), o.need) for o in _offloads_5_6(seed).values()]

    def work() -> Evidence:
        runs = {
            name: _amp(amp_step, seed, dtype, bad=bad)
            for name, dtype, bad in (
                ("bf16", "bfloat16", 0),
                ("fp16", "float16", 0),
                ("overflow", "float16", 1),
            )
        }
        runs["old"] = _amp(amp_step, seed, "bfloat16", bad=0, old=True)
        return {"runs": runs}

    try:
        run = _watched(work, _TECHNIQUES)
    except NotImplementedError:
        if unwritten(plans):
            raise NotImplementedError("exercise 5.6") from None
        run = {"error": NOT_WRITTEN}
    return {"plans": plans, "run": run}


def _amp(answer: Any, seed: int, dtype_name: str, bad: int, old: bool = False) -> Evidence:
    """Two steps by the student's function on a small model, with spies; the same by the plain recipe.

    bad: the second loss is infinite. old: gradients of somebody's earlier backward are there at the start.
    """
    import torch
    from torch import nn

    dtype = getattr(torch, dtype_name)
    torch.manual_seed(_seeded("5.6", seed))
    made = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))
    x, y = torch.randn(16, 24), torch.randn(16, 8)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: torch.Tensor, seen: list[bool]) -> torch.Tensor:
            ctx.seen = seen
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *grad: torch.Tensor) -> Any:
            ctx.seen.append(torch.is_autocast_enabled("cpu"))
            return grad[0], None

    seen: Evidence = {"cast": [], "backward": [], "calls": [], "gradients alive": []}

    def prepare() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = copy.deepcopy(made)
        first, *_, last = model.children()
        groups = [{"params": list(part.parameters())} for part in (first, last)]
        optimizer = torch.optim.SGD(groups, lr=0.5, foreach=False)
        calls = seen["calls"]
        inside: list[bool] = []  # torch's step calls unscale_ itself: that isn't the student's call

        class Spy(torch.amp.GradScaler):
            def scale(self, outputs: Any) -> Any:
                calls.append("scale")
                return super().scale(outputs)

            def unscale_(self, optimizer: Any) -> None:
                if not inside:
                    calls.append("unscale_")
                super().unscale_(optimizer)

            def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append("step")
                inside.append(True)
                try:
                    return super().step(optimizer, *args, **kwargs)
                finally:
                    inside.clear()

            def update(self, new_scale: Any = None) -> None:
                calls.append("update")
                super().update(new_scale)

        return model, optimizer, Spy("cpu", init_scale=2.0**10)

    def loss_of() -> torch.Tensor:
        seen["cast"].append(
            str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"
        )
        seen["gradients alive"].append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
        error = model(x).float() - y
        loss = error.square().mean() * (math.inf if bad and len(seen["cast"]) == 2 else 1.0)
        return Backward.apply(loss, seen["backward"])  # type: ignore[no-any-return,no-untyped-call]

    clip = torch.nn.utils.clip_grad_norm_

    def clipped(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen["calls"].append("clip")
        return clip(*args, **kwargs)

    model, optimizer, scaler = prepare()
    if old:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    with warnings.catch_warnings(), patch.object(torch.nn.utils, "clip_grad_norm_", clipped):
        warnings.simplefilter("error")
        try:
            results, after = [], []
            for _ in range(2):
                results.append(answer(loss_of, optimizer, dtype, scaler, 0.25, "cpu"))
                after.append([p.detach().clone() for p in model.parameters()])
        except NotImplementedError:
            raise
        except (Exception, SystemExit) as error:
            return {"error": one_line(error)}
    own = after[1]
    returned = results[0]
    found = {
        "graph": isinstance(returned, torch.Tensor) and returned.requires_grad,
        "loss": plain(returned),
        "factor": plain(float(scaler.get_scale())),
        "calls": ", ".join(seen["calls"]),
        **{key: list(seen[key]) for key in ("cast", "backward", "gradients alive")},
    }

    # The same by the book. Clipping bites: the gradient's norm is above 0.25.
    model, optimizer, _ = prepare()
    steps = 1 if bad else 2
    for index in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(x).float() - y).square().mean()
        (loss * 2.0**10).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 2.0**10
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        if index == 0:
            found["first loss"] = float(loss.detach())
        optimizer.step()
    right = [p.detach() for p in model.parameters()]
    start = [p.detach() for p in made.parameters()]
    way = _distance(right, start)
    distance, moved = _distance(own, right), _distance(own, start)
    return {
        **found,
        "off": plain(distance / way),
        "moved": plain(moved / way),
        "second": plain(_distance(*after) / way),
    }


def _distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(first, second, strict=True)))


def _score_5_6(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    run = evidence["run"]
    if borrowed := _is_borrowed(run):
        tally.messages.extend(borrowed.messages)
    elif "error" in run:
        tally.messages.append(f"amp_step: {run['error']}")
    else:
        runs = run["runs"]
        bf16, fp16, overflow = (runs[name] for name in ("bf16", "fp16", "overflow"))
        for points, fault in (
            (0.5, _fault_cast(bf16, "bf16") or _fault_cast(fp16, "fp16") or _fault_old(runs["old"])),
            (0.5, _fault_bf16(bf16)),
            (0.5, _fault_fp16(fp16)),
            (0.5, _fault_overflow(overflow)),
        ):
            tally.award(points, not fault, fault)
    offloads = _offloads_5_6(seed)
    plans = answers_to(offloads.items(), evidence["plans"])
    found = {name: _fault_plan(offload, entry) for (name, offload), entry in plans}
    for names in (("dense", "other"), ("enough", "nothing")):
        wrong = next((found[name] for name in names if found[name]), "")
        # A list that stops too late or too early is in the right order if it begins or goes on so.
        tally.award(0.5, not wrong, wrong)
    return Score(tally.points, tuple(dict.fromkeys(filter(None, tally.messages))))


def _stopped(run: Evidence) -> str:
    """What stopped amp_step, in the same words for each dtype."""
    text = run["error"]
    if "deprecated" in text or "FutureWarning" in text:
        return f"a deprecated call: {text[:110]}…: use torch.amp.autocast(device, dtype=dtype)"
    hint = ": end each fp16 step with scaler.update()" if "called after step()" in text else ""
    return f"amp_step stopped with {text}{hint}"


def _fault_cast(run: Evidence, name: str) -> str:
    if "error" in run:
        return _stopped(run)
    wanted = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[name]
    if run["cast"] != [wanted, wanted]:
        return (
            f"{name}: loss_of() must run once in each step, under autocast in {wanted}; it ran "
            f"{len(run['cast'])} "
            f"times in 2 steps under {sorted(set(run['cast']))}: autocast takes the dtype that it is given"
        )
    if run["backward"] != [False, False]:
        if len(run["backward"]) != 2:
            return f"{name}: {len(run['backward'])} backwards in 2 steps, should be one in each"
        return f"{name}: the backward ran under autocast: only forward and loss belong into the `with` block"
    if any(exactly(run["gradients alive"], 2)):
        size = max(run["gradients alive"])
        return (
            f"{name}: {format_bytes(size)} of old gradients are alive in the forward of the second "
            "step, 0 B should be: "
            "optimizer.zero_grad() comes first"
        )
    if run["graph"] is not False or not close(run["loss"], run["first loss"], 0.01):
        return (
            f"{name}: return the loss as a tensor without graph and without the scaler's factor: "
            "loss.detach()"
        )
    return ""


def _fault_old(run: Evidence) -> str:
    if "error" in run:
        return _stopped(run)
    if run["gradients alive"][0]:
        return (
            f"{format_bytes(run['gradients alive'][0])} of gradients from before the step are alive "
            "in its forward, and are added to: optimizer.zero_grad() comes first in a step, not last"
        )
    return ""


def _called(run: Evidence) -> list[str]:
    return str(run["calls"]).split(", ") if run["calls"] else []


def _fault_bf16(run: Evidence) -> str:
    if "error" in run:
        return _stopped(run)
    calls = [name for name in _called(run) if name != "clip"]
    if calls:
        return (
            "bf16 has fp32's range and needs no scaler: leave it alone there (you called "
            f"{', '.join(calls[:3])})"
        )
    return _fault_step(run, "bf16")


def _fault_fp16(run: Evidence) -> str:
    if "error" in run:
        return _stopped(run)
    calls = _called(run)
    if not set(calls) - {"clip"}:
        return (
            "fp16: gradients below 6e-8 are 0: scaler.scale(loss).backward(), then unscale_, clip, "
            "step, update"
        )
    half = calls[: len(calls) // 2]
    for name in ("scale", "unscale_", "step", "update"):
        if half.count(name) != 1 and not (name == "unscale_" and half.count(name) > 1):
            why = " before clipping" if name == "unscale_" else ""
            return f"fp16: in each step call scaler.{name} once{why}; your calls: {', '.join(half)}"
    order = [half.index(name) for name in ("scale", "unscale_", "clip", "step", "update") if name in half]
    if order != sorted(order):
        why = "; scaler.unscale_(optimizer) comes before clipping" if half[:2] == ["scale", "clip"] else ""
        return f"fp16: the order is scale, unscale_, clip, step, update; yours: {', '.join(half)}{why}"
    return _fault_step(run, "fp16")


def _fault_step(run: Evidence, name: str) -> str:
    off, moved = run["off"], run["moved"]
    if is_number(off) and off <= 0.01:
        return ""
    text = f"{name}: after 2 steps the weights "
    if is_number(moved) and moved > 1.05:
        return (
            text + f"went {moved:.3g} times too far: clip_grad_norm_ comes between the backward and the step"
        )
    if is_number(moved) and moved < 0.5:
        way = f"went {moved:.3g} of the way: scaled gradients were clipped; "
        return text + way + "scaler.unscale_(optimizer) comes before clipping"
    return (
        text
        + f"are off by {_shown(off)} of the way: zero, forward, backward, clip, step, each once in a step"
    )


def _fault_overflow(run: Evidence) -> str:
    if "error" in run:
        return _stopped(run)
    if run["second"] != 0:
        return (
            "fp16: a step with an infinite loss changed the weights: let scaler.step(optimizer) "
            "decide, not optimizer.step()"
        )
    if run["factor"] != 2.0**9:
        return (
            f"fp16: after an overflow the factor is {_shown(run['factor'])} instead of 512: "
            "scaler.update() ends each step"
        )
    return ""


def _fault_plan(offload: _Offload, entry: Evidence) -> str:
    if "error" in entry:
        return stopped("offload_plan", entry)
    value, right = entry["value"], offload.expected()
    if value == right:
        return ""
    sizes = {name: offload.tensors[name] for name in offload.tensors}
    asked = f"offload_plan({sizes}, need={offload.need})"
    if type(value) is not list or any(type(name) is not str or name not in sizes for name in value):
        return f"{asked}: return a list of names of tensors; you returned {_shown(value)}"
    text = f"{asked}: you said {value}, should be {right}: "
    if offload.need == 0:
        return text + "nothing has to be freed, so nothing leaves"
    if value[: len(right)] == right:
        return text + "stop as soon as `need` bytes are free"
    if value == right[: len(value)]:
        return text + "these free less than `need`: go on"
    return (
        text + "each step pays bytes x touches and frees bytes, so the price of a byte is its touches: "
        "fewest first, of equals the larger"
    )


EXERCISES = (
    Exercise("5.1", "fit, crossover", 2, _evidence_5_1, _score_5_1, "section 2, 'Twice the length'"),
    Exercise(
        "5.2",
        "growth, largest_batch, resolution",
        2,
        _evidence_5_2,
        _score_5_2,
        "section 3, 'Twice the batch'",
    ),
    Exercise(
        "5.3", "the accumulation loop", 3, _evidence_5_3, _score_5_3, "section 4, 'A large batch in parts'"
    ),
    Exercise("5.4", "a loss scaler", 3, _evidence_5_4, _score_5_4, "section 6, 'fp16 and its scaler'"),
    Exercise("5.5", "stochastic rounding", 2, _evidence_5_5, _score_5_5, "section 7, 'bf16 and its digits'"),
    Exercise("5.6", "amp_step, offload_plan", 3, _evidence_5_6, _score_5_6, "sections 8 and 9"),
)
