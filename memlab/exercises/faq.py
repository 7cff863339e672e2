"""Exercises 7.1 to 7.6: batch search, what checkpointing changes, traffic, SDPA, a loader, the capstone.

Nine of the ten points come from what the answer does or from bytes that are measured while it runs: steps
that run out of memory, a module under checkpointing, the live bytes of attention, the processes of a loader,
the peak of models that nobody has seen. No point depends on a clock, a GPU or a network.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.exercises import (
    NOT_WRITTEN,
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
    stopped,
    unwritten,
)
from memlab.exercises.limits import contained, in_child
from memlab.units import GIB, format_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader


def _value(entry: Evidence) -> Any:
    return entry.get("value")


def _first(messages: Iterable[str]) -> str:
    return next((message for message in messages if message), "")


def _once(tally: Tally) -> Score:
    """The points, and each message once: an error is the same on every input."""
    return Score(round(tally.points, 6), tuple(dict.fromkeys(tally.messages)))


def _kind(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type"}:
        return f"an object of type {value['type']}"
    return "None" if value is None else f"a {type(value).__name__}"


# -- 7.1 the largest batch ---------------------------------------------------------------------------------


class _Search(NamedTuple):
    """A step that fits up to `sure`, never beyond `most`; in between it is a matter of luck."""

    sure: int
    most: int
    margin: float = 0.0
    limit: int = 4096

    def __str__(self) -> str:
        fits = f"up to {self.sure:,} samples fit" if self.sure else "no batch fits"
        luck = f", {self.sure + 1:,} to {self.most:,} at times" if self.most > self.sure else ""
        return f"{fits}{luck}; margin={self.margin:g}, limit={self.limit:,}"

    @property
    def asked(self) -> tuple[int, int]:
        """Smallest and largest right answer. Margins are powers of two, so the products are exact."""

        def less(largest: int) -> int:
            return max(min(largest, 1), int((1 - self.margin) * largest))

        most = min(self.most, self.limit)
        return less(min(self.sure, self.limit)), min(self.sure, less(most)) if self.sure else less(most)

    @property
    def calls(self) -> int:
        """Doubling takes log2 + 2 calls, bisection log2; one more for good measure."""
        return 1 if not self.most else 2 * (min(self.most, self.limit).bit_length() - 1) + 3


def _searches(seed: int) -> dict[str, list[_Search]]:
    rng = random.Random(f"7.1 {seed}")

    def exactly(n: int, **more: Any) -> _Search:
        return _Search(n, n, **more)

    power = 2 ** rng.randrange(4, 10)
    odd = rng.randrange(130, 2000)
    eighth = rng.randrange(300, 900)
    noisy = rng.randrange(800, 2500)
    return {
        "exact": [exactly(odd), exactly(power), exactly(power - 1), exactly(1)],
        "none": [exactly(0), exactly(0, margin=0.125)],
        "limit": [exactly(5000, limit=rng.randrange(60, 900)), exactly(5000, limit=power)],
        "margin": [exactly(eighth, margin=0.125), exactly(17, margin=0.25), exactly(1, margin=0.125)],
        "noise": [_Search(noisy, noisy + noisy // 9, margin=0.125), _Search(90, 98, margin=0.125)],
    }


def _search_case(answer: Any, case: _Search, seed: int) -> Evidence:
    import torch

    luck = random.Random(f"7.1 luck {seed}")
    tried: list[int] = []

    def step(b: int) -> None:
        if type(b) is not int or b < 1:
            raise ValueError(f"step({b!r}): a batch has at least one sample")
        tried.append(b)
        if len(tried) > 20_000:
            raise RuntimeError("more than 20,000 steps were tried")
        if b > case.most or (b > case.sure and luck.random() < 0.5):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = plain(answer(step, margin=case.margin, limit=case.limit))
    return {"found": found, "calls": len(tried), "most": max(tried, default=0)}


def _buggy(answer: Any) -> Evidence:
    """A step that fails for another reason than memory, from 3 samples on."""

    def step(b: int) -> None:
        if b > 2:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    return {"found": plain(answer(step, margin=0.0, limit=64))}


class _Real:
    """Training steps of a small model under a byte budget, as a search tries them one after the other."""

    def __init__(self, seed: int) -> None:
        import torch
        from torch import nn

        rng = random.Random(f"7.1 bytes {seed}")
        torch.manual_seed(seed % 2**32)
        width = 8 * rng.randrange(4, 9)
        self.model = nn.Sequential(nn.Linear(width, 8 * width), nn.ReLU(), nn.Linear(8 * width, width))
        self.width = width
        self.budget = 4 * (2 * 17 * width * width + width * rng.randrange(600, 1200))
        self.seen: list[weakref.ref[Tensor]] = []
        self.held = 0  # most bytes of earlier steps that are alive when a step begins

    def step(self, b: int) -> None:
        import torch

        alive = [t for ref in self.seen if (t := ref()) is not None]
        self.held = max(self.held, sum(t.nbytes for t in alive))
        del alive
        self.model.zero_grad()
        x = torch.randn(b, self.width)
        self.seen = [weakref.ref(x)]
        hidden = self.model[1](self.model[0](x))
        self.seen.append(weakref.ref(hidden))
        self.model[2](hidden).square().mean().backward()

    def truth(self) -> int:
        """The largest batch whose step, alone in the budget, fits."""
        import torch

        from memlab.meter import Meter

        def fits(b: int) -> bool:
            try:
                with Meter(self.model, budget=self.budget):
                    self.step(b)
            except torch.OutOfMemoryError:
                return False
            return True

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        self.model.zero_grad()
        self.held = 0
        return low


def _real_case(answer: Any, seed: int) -> Evidence:
    from memlab.meter import Meter

    real = _Real(seed)
    truth = real.truth()
    gc.collect()
    gc.disable()  # a kept traceback is a cycle: nobody collects it between two steps
    try:
        with Meter(real.model, budget=real.budget):
            found = plain(answer(real.step, margin=0.0, limit=4096))
    finally:
        gc.enable()
    return {"truth": truth, "found": found, "held": real.held, "budget": real.budget}


def _search_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        cases = {
            n: [call(_search_case, answer, c, seed) for c in group] for n, group in _searches(seed).items()
        }
        return {
            "cases": cases,
            "buggy": call(_buggy, answer),
            "real": call(_real_case, answer, seed),
        }

    return contained(work, memory=3 * GIB)


def _search_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    faults: dict[str, str] = {}
    calls = ""
    for name, group in _searches(seed).items():
        pairs = answers_to(group, evidence["cases"][name])
        faults[name] = _first(_search_fault(case, entry) for case, entry in pairs)
        calls = calls or _first(
            f"{case}: {_value(e)['calls']:,} steps were tried, {case.calls} are enough: double until it "
            "fails, then halve the gap"
            for case, e in pairs
            if "value" in e and name != "noise" and _value(e)["calls"] > case.calls
        )
    exact = tally.award(0.5, not faults["exact"], faults["exact"])
    tally.award(0.25, not faults["none"] and not faults["limit"], faults["none"] or faults["limit"])
    tally.award(
        0.25, exact and not calls, calls or "the number of steps is looked at once the batch is right"
    )
    tally.award(0.5, not faults["margin"] and not faults["noise"], faults["margin"] or faults["noise"])
    real = _real_fault(evidence["real"])
    tally.award(0.25, not real, real)
    error = evidence["buggy"].get("error", "")
    passed = type(error) is str and "cannot be multiplied" in error
    tally.award(0.25, passed, (
        "a step whose shapes are wrong was taken for one that doesn't fit: catch torch.OutOfMemoryError "
        "alone, everything else is a bug and has to come through"
        + (f" (it stopped with {error})" if error else "")
    ))  # fmt: skip
    return _once(tally)


def _search_fault(case: _Search, entry: Evidence) -> str:
    if "error" in entry:
        return f"{case}: it stopped with {entry['error']}"
    value = _value(entry)
    found, (low, high) = value["found"], case.asked
    if type(found) is not int:
        return f"{case}: return a number of samples, an int; you returned {_kind(found)}"
    if value["most"] > case.limit:
        return f"{case}: it tried {value['most']:,} samples, more than the limit"
    if low <= found <= high:
        return ""
    text = f"{case}: you said {found:,}, right is {low:,}" + (f" to {high:,}" if high > low else "")
    if not case.sure:
        return text + ": when step(1) doesn't fit the answer is 0"
    if found > case.sure:
        return text + ": that doesn't fit, or not always: leave the margin free"
    if found == 0:
        return text + ": one sample fits, so the answer is at least 1"
    if case.margin and found == min(case.sure, case.limit):
        return text + ": leave the margin free, that share of what fits"
    if case.margin and found in (high + 1, low + 1):
        return text + ": round down, the margin is at least that large"
    if found in (low - 1, low + 1):
        return text + ": one off: the gap between what fits and what doesn't must end at 1"
    if found & (found - 1) == 0:
        return text + ": a power of two: between the last that fits and the first that doesn't lie others"
    return text


def _real_fault(entry: Evidence) -> str:
    if "error" in entry:
        return f"a real model under a byte budget: it stopped with {entry['error']}"
    value = _value(entry)
    if value["found"] == value["truth"] and type(value["found"]) is int and not value["held"]:
        return ""
    text = (
        f"a real model under a budget of {format_bytes(value['budget'])}: {value['truth']} samples fit, "
        f"you said {value['found']}"
    )
    if value["held"]:
        return (
            f"{text}; {format_bytes(value['held'])} of a step that failed were alive when the next began: "
            "inside `except` the error holds its traceback, that its frames, those the tensors: leave it"
        )
    return text


# -- 7.2 what checkpointing changes ------------------------------------------------------------------------


def modules() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """The six candidates of exercise 7.2: name -> (what makes the module, options of `checkpoint`).

    Each maps (16, 32) to (16, 32), in training mode unless its name says otherwise.
    """
    import torch
    from torch import nn

    def mlp(*between: nn.Module) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), *[type(m)(*_size(m)) for m in between],
                                     nn.Linear(64, 32))  # fmt: skip

    def _size(m: nn.Module) -> tuple[Any, ...]:
        return (m.p,) if isinstance(m, nn.Dropout) else (64,)

    class Drawn(nn.Module):
        """Scales by a number from Python's own `random`, as stochastic depth often does."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x) * random.random())

    return {
        "Linear, GELU, Linear": (mlp(), {}),
        "with Dropout(0.3)": (mlp(nn.Dropout(0.3)), {}),
        "with Dropout(0.3), preserve_rng_state=False": (mlp(nn.Dropout(0.3)), {"preserve_rng_state": False}),
        "with BatchNorm": (mlp(nn.BatchNorm1d(64)), {}),
        "with BatchNorm, eval()": (lambda: mlp(nn.BatchNorm1d(64))().eval(), {}),
        "scaled by random.random()": (Drawn, {}),
    }


#: output, gradients and buffers of the six: are they equal?
_STAYS = {
    "Linear, GELU, Linear": (True, True, True),
    "with Dropout(0.3)": (True, True, True),
    "with Dropout(0.3), preserve_rng_state=False": (True, False, True),
    "with BatchNorm": (True, True, False),
    "with BatchNorm, eval()": (True, True, True),
    "scaled by random.random()": (True, False, True),
}
_PARTS = ("output", "gradients", "buffers")


def _hidden_modules(seed: int) -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[bool, ...]]]:
    """Modules that the student hasn't seen, with what is right."""
    import torch
    from torch import nn

    rng = random.Random(f"7.2 {seed}")
    width = 4 * rng.randrange(2, 6)
    p = rng.choice((0.2, 0.3, 0.5))

    class Own(nn.Module):
        """Noise from a generator of its own, which checkpoint doesn't know."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.noise = nn.Linear(width, width), torch.Generator().manual_seed(seed % 2**32)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x) * torch.randn(x.shape, generator=self.noise))

    class Drawn(nn.Module):
        """Scales by a number from Python's own generator."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x) * (1 + random.random()))

    class Counts(nn.Module):
        """Counts its forwards in a buffer of whole numbers."""

        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(width, width)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.body(x))

    class Moves(nn.Module):
        """A factor that is another one at each forward reaches one gradient alone: a weight's, or x's.

        Nothing is summed up on the way to that gradient, so it moves by the share `step` in each element.
        """

        def __init__(self, part: str, step: float) -> None:
            super().__init__()
            self.body = nn.Linear(width, width)
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(16, width))])  # the last one
            self.part, self.step, self.count = part, step, 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            factor = torch.tensor(1 + self.step * self.count)
            scale: Tensor = self.scales[0]
            moved = (scale if self.part == "weight" else x) * factor
            y: Tensor = self.body(x) + moved + scale
            return y

    class Unseeded(nn.Module):
        """Noise from the operating system, which nobody can seed."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x) * (1 + random.SystemRandom().random()))

    def dropped() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Dropout(p), nn.Tanh(), nn.Linear(width, width))

    return {
        "Linear and Tanh": (
            lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()), {}, (True, True, True),
        ),
        f"Dropout({p})": (dropped, {}, (True, True, True)),
        f"Dropout({p}), preserve_rng_state=False": (
            dropped, {"preserve_rng_state": False}, (True, False, True),
        ),
        "BatchNorm": (
            lambda: nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()),
            {}, (True, True, False),
        ),
        "noise from its own torch.Generator": (Own, {}, (True, False, True)),
        "a factor from Python's random": (Drawn, {}, (True, False, True)),
        "a buffer that counts forwards": (Counts, {}, (True, True, False)),
        "a factor that reaches a weight's gradient alone": (
            lambda: Moves("weight", 0.5), {}, (True, False, True),
        ),
        "a factor that reaches x's gradient alone": (lambda: Moves("x", 0.5), {}, (True, False, True)),
        "a gradient that moves by a millionth": (
            lambda: Moves("weight", 2.0**-20), {}, (True, False, True),
        ),
        "noise from the operating system": (Unseeded, {}, (False, False, True)),
    }  # fmt: skip


def _unchanged_case(answer: Any, name: str, seed: int) -> Evidence:
    import torch

    make, options, _ = _hidden_modules(seed)[name]
    forwards: list[int] = []

    def counted() -> nn.Module:
        module = make()
        module.register_forward_pre_hook(lambda *_: forwards.append(1))
        return module

    width = next(p for p in make().parameters() if p.dim() == 2).shape[1]
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(seed % 2**32 + 7))
    torch.manual_seed(seed % 2**32 + 1)
    random.seed(seed + 1)
    return {"said": plain(answer(counted, x, **options)), "forwards": len(forwards)}


def _equal_evidence(answer: Any, seed: int) -> Evidence:
    predictions, unchanged = several(answer, "7.2", "predictions", "unchanged")
    said = guarded(predictions)

    def work() -> Evidence:
        return {"ran": [guarded(_unchanged_case, unchanged, n, seed) for n in _hidden_modules(seed)]}

    ran = contained(work, memory=3 * GIB)
    if "ran" in ran and unwritten([said, *ran["ran"]]):
        raise NotImplementedError("exercise 7.2")
    return {"said": said, "ran": ran.get("ran") or [ran] * len(_hidden_modules(seed))}


def _equal_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    said = evidence["said"]
    if "error" in said:
        tally.messages.append(stopped("predictions", said))
    elif type(_value(said)) is not dict or set(_value(said)) != set(_STAYS):
        tally.messages.append(f"predictions: return a dict with the keys {', '.join(map(repr, _STAYS))}")
    elif odd := _first(_kind(v) for v in _value(said).values() if type(v) is not bool):
        tally.messages.append(f"predictions: each value is True or False, you have {odd}")
    else:
        right = sum(_value(said)[name] == all(parts) for name, parts in _STAYS.items())
        tally.points += {6: 1.0, 5: 0.5}.get(right, 0.0)
        if right < 6:
            tally.messages.append(
                f"predictions: {right} of 6 hold; run unchanged() on modules() and compare; True means that "
                "output, gradients and buffers all stay equal"
            )
    faults = {n: _unchanged_fault(n, parts, e) for (n, (_, _, parts)), e in
              answers_to(_hidden_modules(seed).items(), evidence["ran"])}  # fmt: skip
    same = [n for n, (_, _, parts) in _hidden_modules(seed).items() if all(parts)]
    rest = [n for n in faults if n not in same]
    fault = _first(faults[n] for n in same)
    tally.award(
        0.25, not fault and not all(faults[n] for n in rest), fault or _first(faults[n] for n in rest)
    )
    fault = _first(faults[n] for n in rest)
    tally.award(
        0.75, not fault and not all(faults[n] for n in same), fault or _first(faults[n] for n in same)
    )
    return _once(tally)


def _unchanged_fault(name: str, parts: tuple[bool, ...], entry: Evidence) -> str:
    if "error" in entry:
        where = "unchanged" if entry["error"] == NOT_WRITTEN else f"unchanged, {name}: it"
        return stopped(where, entry)
    said, forwards = _value(entry)["said"], _value(entry)["forwards"]
    if type(said) is not dict or set(said) != set(_PARTS) or any(type(v) is not bool for v in said.values()):
        return f"unchanged: return a dict of three bools, {', '.join(_PARTS)}"
    if forwards < 3:
        return (
            f"unchanged, {name}: the module ran {forwards} times: once plainly, twice under checkpoint(…), "
            "the second time in its backward"
        )
    wrong = [part for part, right in zip(_PARTS, parts, strict=True) if said[part] != right]
    if not wrong:
        return ""
    part = wrong[0]
    text = (
        f"unchanged, {name}: you said {part} {'equal' if said[part] else 'not equal'}, and it's the other way"
    )
    if parts[0] and not said["output"]:
        return (
            text
            + ": seed torch, and Python's random, to the same value before make() and again before each run"
        )
    if part == "buffers":
        return text + ": compare all buffers after the backward: the forward runs again in it"
    if part == "output":
        return text + ": compare the outputs of both runs with torch.equal"
    return text + ": compare the gradients of the input and of every parameter with torch.equal"


# -- 7.3 traffic -------------------------------------------------------------------------------------------

KINDS = ("tp", "zero3", "pp")


def sent_expected(kind: str, tokens: int, h: int, ranks: int, layers: int, size: int) -> int:
    """Bytes that one rank sends for one micro-batch, forward and backward, by the ring algorithm.

    tp: 4 all-reduces of (tokens, h) a layer, 2 (N-1)/N of the tensor each (Megatron, arXiv:1909.08053,
    section 3). zero3: a layer's 12 h^2 weights gathered for forward and backward, their gradients
    reduce-scattered, (N-1)/N each (ZeRO, arXiv:1910.02054, section 7.2). pp: a stage in the middle sends one
    (tokens, h) on and one gradient back.
    """
    if kind == "pp":
        return 2 * tokens * h * size
    whole = 8 * tokens * h if kind == "tp" else 36 * h * h
    return layers * whole * size * (ranks - 1) // ranks


class _Sent(NamedTuple):
    tokens: int
    h: int
    ranks: int
    layers: int
    size: int

    def __str__(self) -> str:
        return (
            f"tokens={self.tokens:,}, h={self.h:,}, ranks={self.ranks}, layers={self.layers}, "
            f"size={self.size}"
        )


def _sents(seed: int) -> list[_Sent]:
    """One rank's share is whole: widths are multiples of the ranks."""
    rng = random.Random(f"7.3 {seed}")

    def odd(ranks: int, size: int) -> _Sent:
        h = ranks * 64 * rng.randrange(3, 20)
        return _Sent(rng.randrange(300, 9000), h, ranks, rng.randrange(3, 100), size)

    return [_Sent(4096, 8192, 8, 1, 2), odd(2, 4), odd(rng.choice((3, 5, 6)), 2), odd(64, 2)]


def _sent_evidence(answer: Any, seed: int) -> Evidence:
    comm, even = several(answer, "7.3", "comm", "break_even")
    widths = [8192, *(case.h for case in _sents(seed))]
    said = {kind: [guarded(comm, kind, *case) for case in _sents(seed)] for kind in KINDS}
    evens = [guarded(even, h) for h in widths]
    if unwritten([*evens, *(e for g in said.values() for e in g)]):
        raise NotImplementedError("exercise 7.3")
    return {"said": said, "even": evens}


def _sent_score(evidence: Evidence, seed: int) -> Score:
    cases = _sents(seed)
    tally = Tally()
    for kind in KINDS:
        faults = [_sent_fault(kind, c, e) for c, e in answers_to(cases, evidence["said"][kind])]
        wrong = [fault for fault in faults if fault]
        hint = next((h for h in (wrong[0][1] if wrong else []) if all(h in hints for _, hints in wrong)), "")
        tally.award(0.25, not wrong, f"{wrong[0][0]}: {hint}" if hint else wrong[0][0] if wrong else "")
    widths = [8192, *(case.h for case in cases)]
    fault = _first(_even_fault(h, e) for h, e in answers_to(widths, evidence["even"]))
    tally.award(0.25, not fault, fault)
    return _once(tally)


def _sent_fault(kind: str, case: _Sent, entry: Evidence) -> tuple[str, list[str]] | None:
    """What is wrong with one answer, and all hints that would explain it."""
    if "error" in entry:
        return stopped("comm", entry), []
    said, right = _value(entry), sent_expected(kind, *case)
    if type(said) is int and said == right:
        return None
    if type(said) is float and close(said, right, 1e-9):
        return "comm: bytes are whole numbers: // instead of /", []
    if type(said) not in (int, float):
        return f"comm: return a number of bytes, an int; you returned {_kind(said)}", []
    halves = {
        "tp": "an all-reduce is a reduce-scatter and an all-gather; there are four, two of them backward",
        "zero3": "weights are gathered twice, and their gradients reduce-scattered",
        "pp": "the activation goes on, its gradient comes back",
    }
    share = (case.ranks - 1) / case.ranks
    known = {
        "that is elements: times size": right / case.size,
        "the ring sends (N-1)/N of that: a rank keeps its own part": right / share,
        f"that is half of it: {halves[kind]}": right / 2,
        f"that is a quarter of it: {halves[kind]}": right / 4,
        "the backward gathers the weights once more": right * 2 / 3,
        "gradients are reduce-scattered, not all-reduced": right * 4 / 3,
        "a block has 12 h^2 weights, not 2 h^2": right / 6,
        "one border a stage, however many layers it has: not times layers": right * case.layers,
        "every layer sends: times layers": right / case.layers,
        "one border a stage: every rank but the ends sends the same, whatever N is": right * share,
    }
    hints = [text for text, value in known.items() if close(said, value, 1e-6)]
    return f'comm("{kind}", {case}): you said {said:,} B, it is {right:,} B', hints


def _even_fault(h: int, entry: Evidence) -> str:
    if "error" in entry:
        return stopped("break_even", entry)
    said = _value(entry)
    if close(said, 4.5 * h, 1e-6):
        return ""
    if not is_number(said):
        return f"break_even: return a number of tokens; you returned {_kind(said)}"
    return (
        f"break_even({h}): you said {said:,}, it is {4.5 * h:,}: set the two formulas equal, for one layer "
        "and micro-batch"
    )


# -- 7.4 SDPA ----------------------------------------------------------------------------------------------


class _Attend(NamedTuple):
    b: int
    heads: int
    s: int
    d: int
    causal: bool = False
    layout: str = "bhsd"
    padding: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        more = ", padding" * self.padding + f", dropout={self.dropout:g}" * bool(self.dropout)
        shape = (
            (self.b, self.heads, self.s, self.d)
            if self.layout == "bhsd"
            else (self.b, self.s, self.heads, self.d)
        )
        return f"q, k, v of {shape}, layout={self.layout!r}, causal={self.causal}{more}"


def _attends(seed: int) -> dict[str, list[_Attend]]:
    rng = random.Random(f"7.4 {seed}")

    def odd(**more: Any) -> _Attend:
        heads = rng.randrange(2, 5)
        return _Attend(
            rng.randrange(2, 4), heads, heads + rng.randrange(5, 30), 4 * rng.randrange(2, 7), **more
        )

    return {
        "equal": [odd(), odd(causal=True)],
        "layout": [odd(layout="bshd"), odd(layout="bshd", causal=True)],
        "padding": [odd(padding=True), odd(padding=True, layout="bshd")],
        "eval": [odd(dropout=0.5)],
    }


def _long_attends(seed: int) -> list[_Attend]:
    rng = random.Random(f"7.4 bytes {seed}")
    s = 32 * rng.randrange(14, 20)
    return [_Attend(1, 2, s, 16), _Attend(1, 2, s, 16, causal=True), _Attend(1, 2, s, 16, layout="bshd")]


def attend_bound(case: _Attend) -> int:
    """Bytes beyond q, k, v and the output's gradient: ten tensors of their size, forward and backward."""
    return 10 * 4 * case.b * case.heads * case.s * case.d


def _attend_inputs(case: _Attend, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    import torch

    generator = torch.Generator().manual_seed(seed % 2**32 + 1000 * case.s + case.d)
    shape = (
        (case.b, case.heads, case.s, case.d)
        if case.layout == "bhsd"
        else (case.b, case.s, case.heads, case.d)
    )
    q, k, v = (2 * torch.randn(shape, generator=generator) for _ in range(3))
    padding = None
    if case.padding:
        lengths = torch.randint(case.s // 3, case.s, (case.b,), generator=generator)
        padding = torch.arange(case.s) >= lengths[:, None]
    return q, k, v, padding


def _plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    import torch

    scores = q.double() @ k.double().mT / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
    out: Tensor = (scores.softmax(-1) @ v.double()).float()
    return out


def _call_attend(
    answer: Any, case: _Attend, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, **more: Any
) -> Any:
    return answer(q, k, v, causal=case.causal, layout=case.layout, padding=padding, **more)


def _attend_case(answer: Any, case: _Attend, seed: int) -> Evidence:
    import torch

    q, k, v, padding = _attend_inputs(case, seed)
    swap = case.layout == "bshd"
    a, b, c = (t.transpose(1, 2) if swap else t for t in (q, k, v))
    right = _plainly(a, b, c, case.causal, padding)
    unmasked = _plainly(a, b, c, not case.causal, None)
    inverted = None if padding is None else _plainly(a, b, c, case.causal, ~padding)
    over_heads = _plainly(q, k, v, case.causal, None).transpose(1, 2) if swap and padding is None else None
    with torch.no_grad():
        got = _call_attend(answer, case, q, k, v, padding, dropout=case.dropout, training=False)
        trained = None
        if case.dropout:
            trained = _call_attend(answer, case, q, k, v, padding, dropout=case.dropout, training=True)
    if type(got) is not torch.Tensor:
        return {"form": f"return one tensor; you returned a {type(got).__name__}"}
    if got.shape != q.shape:
        return {
            "form": f"the output has the shape {tuple(got.shape)}, q has {tuple(q.shape)}: they must be equal"
        }
    keep = torch.ones(case.b, case.s, dtype=torch.bool) if padding is None else ~padding
    if swap:
        got = got.transpose(1, 2)

    def off(a: Tensor, b: Tensor) -> Any:
        a, b = a.transpose(1, 2)[keep], b.transpose(1, 2)[keep]  # what stands at padding doesn't matter
        return plain(((a - b).abs().max() / b.abs().max()).item())

    def same(b: Tensor | None) -> bool:
        if b is None:
            return False
        apart = off(got, b)
        return is_number(apart) and apart < 1e-4

    if swap and trained is not None:
        trained = trained.transpose(1, 2)
    return {
        "off": off(got, right), "unmasked": same(unmasked), "inverted": same(inverted),
        "over_heads": same(over_heads), "exact": bool(torch.equal(got, right)),
        "dropped": None if trained is None else off(trained, right),
    }  # fmt: skip


def _attend_peak(answer: Any, case: _Attend, seed: int) -> Evidence:
    """Live bytes of forward and backward beyond what is given, at the highest; the largest new tensor."""
    import torch

    from memlab.meter import Meter

    q, k, v, _ = _attend_inputs(case, seed)
    for t in (q, k, v):
        t.requires_grad_()
    gradient = torch.randn_like(q)
    gc.collect()
    with Meter() as meter:
        out = _call_attend(answer, case, q, k, v, None, dropout=0.0, training=True)
        out.backward(gradient)
    del out
    trace = meter.trace
    given = sum(b.bytes for b in trace.blocks() if not b.operator)
    largest = max((b for b in trace.blocks() if b.operator), key=lambda b: b.bytes, default=None)
    return {
        "peak": trace.peak_bytes - given,
        "largest": "" if largest is None else f"{tuple(largest.shape)} by {largest.operator}",
        "gradients": q.grad is not None and k.grad is not None and v.grad is not None,
    }


def _attend_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        found: Evidence = {}
        for name, cases in _attends(seed).items():
            found[name] = [call(_attend_case, answer, case, seed) for case in cases]
        found["bytes"] = [call(_attend_peak, answer, case, seed) for case in _long_attends(seed)]
        return found

    return contained(work, memory=3 * GIB)


def _attend_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    groups = _attends(seed)
    faults = {
        n: _first(_attend_fault(c, e) for c, e in answers_to(cases, evidence[n]))
        for n, cases in groups.items()
    }
    if not tally.award(0.5, not faults["equal"], faults["equal"]):
        tally.messages.append(
            "layouts, padding, dropout and the bytes are looked at once the output is right"
        )
        return _once(tally)
    for name in ("layout", "padding", "eval"):
        tally.award(0.25, not faults[name], faults[name])
    faulty = [_attend_bytes_fault(c, e) for c, e in answers_to(_long_attends(seed), evidence["bytes"])]
    if not any(faulty) and any(_attends_wrongly(e) for name in groups for e in evidence[name]):
        faulty = ["the bytes count once layouts, padding and evaluation give the right values"]
    tally.award(0.75, not any(faulty), _first(faulty))
    return _once(tally)


def _attends_wrongly(entry: Evidence) -> bool:
    """Other values than attention's: few bytes are nothing worth then. That nothing is dropped is no such."""
    value = entry.get("value", {})
    return not (is_number(value.get("off")) and value["off"] < 1e-4)


def _attend_fault(case: _Attend, entry: Evidence) -> str:
    if "error" in entry:
        return f"{case}: it stopped with {entry['error']}"
    value = _value(entry)
    if "form" in value:
        return f"{case}: {value['form']}"
    right = is_number(value["off"]) and value["off"] < 1e-4
    if right and (value["dropped"] is None or (is_number(value["dropped"]) and value["dropped"] > 1e-3)):
        return ""
    if right:
        return f"{case}: with training=True nothing is dropped: pass dropout_p on"
    if case.dropout:
        return (
            f"{case}: with training=False it drops all the same: a function doesn't know model.eval(), "
            "pass 0.0"
        )
    if value["over_heads"]:
        return (
            f"{case}: that is attention over the heads: the kernel wants (b, heads, s, d); transpose(1, 2), "
            "and back"
        )
    if value["inverted"]:
        return f"{case}: that attends to the padding alone: in attn_mask True means 'take part'"
    if value["unmasked"]:
        return f"{case}: " + (
            "the padding takes part: pass attn_mask"
            if case.padding
            else "that is as without the mask: pass is_causal"
            if case.causal
            else "it masks without being asked"
        )
    off = format(value["off"], ".1%") if is_number(value["off"]) else value["off"]
    return f"{case}: off by {off} of its largest value"


def _attend_bytes_fault(case: _Attend, entry: Evidence) -> str:
    if "error" in entry:
        return f"{case}: with a backward it stopped with {entry['error']}"
    value, bound = _value(entry), attend_bound(case)
    if not value["gradients"]:
        return f"{case}: q, k and v get no gradients: don't detach them"
    if value["peak"] <= bound:
        return ""
    return (
        f"{case}: forward and backward hold {format_bytes(value['peak'])} beyond their inputs, ten tensors "
        f"of q's size are {format_bytes(bound)}; the largest new one is {value['largest']}: a score matrix "
        f"has {format_bytes(4 * case.b * case.heads * case.s**2)}"
    )


# -- 7.5 a loader ------------------------------------------------------------------------------------------


#: How long the loaders may take before they count as hanging; none of them sleeps.
LOADER_SECONDS = 60.0


class Slow:
    """A dataset whose every item takes a while to make: (i, i squared, id of the process that made it).

    `seconds` is the time that one item sleeps, as a JPEG to decode or a page to fetch would take.
    """

    def __init__(self, items: int, seconds: float = 0.0) -> None:
        self.items, self.seconds = items, seconds

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> tuple[int, int, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return i, i * i, os.getpid()


class Odd:
    """An order that no flag of a DataLoader gives: odd items first, another start each epoch."""

    def __init__(self, items: int, start: int) -> None:
        self.items, self.start, self.epoch = items, start, 0

    def __len__(self) -> int:
        return self.items

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = sorted(range(self.items), key=lambda i: (i % 2 == 0, i))
        shift = self.start * self.epoch % self.items
        return iter(order[shift:] + order[:shift])


def joined(items: list[tuple[int, int, int]]) -> dict[str, Any]:
    """A collate_fn: the largest item of the batch, all items, and the processes."""
    return {
        "largest": max(i for i, _, _ in items),
        "items": [i for i, _, _ in items],
        "pids": [p for _, _, p in items],
    }


class _Loading(NamedTuple):
    name: str
    items: int
    batch: int
    start: int
    own: bool  # a sampler and a collate_fn of its own, the last partial batch dropped

    def expected(self) -> list[list[Any]]:
        """Both epochs' batches without process ids, as plain data."""
        order = Odd(self.items, self.start) if self.own else range(self.items)
        epochs: list[list[Any]] = []
        for _ in range(2):
            items = list(order)
            batches = [items[i : i + self.batch] for i in range(0, self.items, self.batch)]
            if self.own:
                full = [b for b in batches if len(b) == self.batch]
                epochs.append([{"largest": max(b), "items": b} for b in full])
            else:
                epochs.append([[b, [i * i for i in b]] for b in batches])
        return epochs

    def loader(self) -> DataLoader[Any]:
        from torch.utils.data import DataLoader

        dataset: Any = Slow(self.items)
        if not self.own:
            return DataLoader(dataset, batch_size=self.batch)
        order: Any = Odd(self.items, self.start)
        return DataLoader(dataset, batch_size=self.batch, sampler=order, collate_fn=joined, drop_last=True)


def _loadings(seed: int) -> list[_Loading]:
    rng = random.Random(f"7.5 {seed}")
    batch = rng.randrange(3, 6)
    return [
        _Loading("in order, the last batch smaller", batch * 3 + 1, batch, 0, False),
        _Loading(
            "its own sampler and collate_fn, drop_last", batch * 4 + 2, batch, rng.randrange(2, 9), True
        ),
    ]


def _content(batch: Any) -> tuple[Any, list[int]]:
    """A batch without the process ids, as plain data, and those ids."""
    if isinstance(batch, dict):
        return plain({k: v for k, v in batch.items() if k != "pids"}), [int(p) for p in batch["pids"]]
    return plain(list(batch[:-1])), [int(p) for p in batch[-1]]


def _load_case(answer: Any, case: _Loading) -> Evidence:
    from torch.utils.data import DataLoader

    fast = answer(case.loader(), 2)
    if not isinstance(fast, DataLoader):
        return {"form": f"return a DataLoader; you returned {_kind(plain(fast))}"}
    epochs, pids = [], []
    for _ in range(2):
        pairs = [_content(batch) for batch in fast]
        epochs.append([content for content, _ in pairs])
        pids.append(sorted({p for _, ids in pairs for p in ids}))
    return {
        "epochs": epochs, "main": os.getpid(), "pids": pids,
        "workers": plain(fast.num_workers), "prefetch": plain(fast.prefetch_factor),
    }  # fmt: skip


def _load_evidence(answer: Any, seed: int) -> Evidence:
    import torch.utils.data  # noqa: F401  # before the fork, once

    def work() -> Evidence:
        # The child is a daemon, so that it can't outlive this process; its own workers end with it.
        with contextlib.suppress(AttributeError, TypeError):
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        return {"cases": [call(_load_case, answer, case) for case in _loadings(seed)]}

    return in_child(work, seconds=LOADER_SECONDS)


def _load_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    pairs = answers_to(_loadings(seed), evidence["cases"])
    order = _first(_order_fault(case, e) for case, e in pairs)
    tally.award(0.5, not order, order)
    workers = _first(_workers_fault(case, e) for case, e in pairs)
    tally.award(0.25, not workers, workers)
    staying = _first(_staying_fault(case, e) for case, e in pairs)
    tally.award(0.25, not staying and not workers, staying or "processes that stay: first have some")
    return _once(tally)


def _load_fault(case: _Loading, entry: Evidence) -> str:
    if "error" in entry:
        return f"{case.name}: it stopped with {entry['error']}"
    return f"{case.name}: {_value(entry)['form']}" if "form" in _value(entry) else ""


def _order_fault(case: _Loading, entry: Evidence) -> str:
    if fault := _load_fault(case, entry):
        return fault
    value = _value(entry)
    for epoch, (got, right) in enumerate(zip(exactly(value["epochs"], 2), case.expected(), strict=True), 1):
        if len(got) != len(right):
            return (
                f"{case.name}: epoch {epoch} has {len(got)} batches, the slow loader has {len(right)}: "
                "keep drop_last"
            )
        if got != right:
            at = next(i for i, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
            return (
                f"{case.name}: batch {at} of epoch {epoch} is {str(got[at])[:70]}, the slow loader's "
                f"{str(right[at])[:70]}: keep its batch_sampler and its collate_fn"
            )
    return ""


def _workers_fault(case: _Loading, entry: Evidence) -> str:
    if fault := _load_fault(case, entry):
        return fault
    value = _value(entry)
    exactly(value["pids"], 2)
    made = [p for p in value["pids"][0] if p != value["main"]]
    if len(made) >= 2 and value["main"] not in value["pids"][0]:
        return ""
    return (
        f"{case.name}: {len(made)} processes beside your own made the items, 2 were asked for (num_workers "
        f"is {value['workers']})"
    )


def _staying_fault(case: _Loading, entry: Evidence) -> str:
    if fault := _load_fault(case, entry):
        return fault
    first, second = _value(entry)["pids"]
    if first == second:
        return ""
    return f"{case.name}: the second epoch started new processes: persistent_workers keeps those of the first"


# -- 7.6 the capstone --------------------------------------------------------------------------------------

OPTIMIZERS = ("sgd", "momentum", "adamw-foreach", "adamw-fused")


class Spec(NamedTuple):
    """A model and its training step, as the capstone describes them. Everything is fp32."""

    batch: int
    tokens: int
    hidden: int
    heads: int
    ffn: int
    blocks: int
    classes: int
    activation: str  # "relu" or "gelu"
    attention: str  # "eager" or "sdpa"
    checkpoint: bool  # every block under activation checkpointing
    optimizer: str  # one of OPTIMIZERS

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(self._fields, self, strict=True))


def probe(spec: Spec) -> nn.Module:
    """The model of a spec: x of (batch, tokens, hidden) to logits of (batch, tokens, classes)."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    h = spec.hidden

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.qkv, self.out = nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.norm2, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, spec.ffn), nn.Linear(spec.ffn, h)

        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            d = h // spec.heads
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, spec.heads, d).permute(2, 0, 3, 1, 4)
            if spec.attention == "sdpa":
                attended = F.scaled_dot_product_attention(q, k, v)
            else:
                attended = torch.softmax(q @ k.mT / d**0.5, dim=-1) @ v
            x = x + self.out(attended.transpose(1, 2).reshape(b, t, h))
            activation = F.gelu if spec.activation == "gelu" else F.relu
            down: Tensor = self.down(activation(self.up(self.norm2(x))))
            return x + down

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(spec.blocks))
            self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, spec.classes)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if spec.checkpoint else block(x)
            logits: Tensor = self.head(self.norm(x))
            return logits

    return Probe()


def probe_trace(spec: Spec, seed: int = 0) -> Any:
    """The Trace of the second training step of a spec on the CPU: the optimizer's states are there already.

    Gradients are freed before the forward (zero_grad's default); logits and loss aren't kept.
    """
    import torch
    from torch.nn import functional as F

    from memlab.meter import Meter

    torch.manual_seed(seed)
    model = probe(spec)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if spec.optimizer.startswith("adamw"):
        foreach = spec.optimizer == "adamw-foreach"
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach, fused=not foreach)
    else:
        momentum = 0.9 if spec.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=momentum, foreach=True)
    x = torch.randn(spec.batch, spec.tokens, spec.hidden)
    y = torch.randint(spec.classes, (spec.batch, spec.tokens))

    def step(phase: Callable[[str], Any]) -> None:
        optimizer.zero_grad()
        with phase("forward"):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        with phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with phase("optimizer"):
            optimizer.step()

    step(lambda name: contextlib.nullcontext())
    with Meter(model, optimizer) as meter:
        step(meter.phase)
    return meter.trace


def probe_expected(spec: Spec) -> int:
    """Closed form of the peak, in bytes: within a few percent of `probe_trace`.

    The largest of five moments: the loss's backward begins; the last block's MLP and its attention are at
    work; the first block's backward ends; the optimizer step.
    """
    n, h, f, v = spec.batch * spec.tokens, spec.hidden, spec.ffn, spec.classes
    weights = spec.blocks * (4 * h * h + 2 * h * f + 9 * h + f) + 2 * h + h * v + v
    held = weights * {"sgd": 1, "momentum": 2}.get(spec.optimizer, 3)
    scores = spec.batch * spec.heads * spec.tokens
    scores *= spec.tokens if spec.attention == "eager" else 1
    mlp = n * f * (2 if spec.activation == "gelu" else 1)
    inside = 8 * n * h + 4 * n + mlp + scores  # what one block keeps
    kept = spec.blocks * (n * h if spec.checkpoint else inside)
    begins = held + kept + 2 * n * h + 3 * n * v
    at_work = held + kept + (inside if spec.checkpoint else 0) + h * v + n * h
    attends = at_work - mlp - 2 * n * h + 2 * h * f + (2 * scores if spec.attention == "eager" else 3 * n * h)
    ends = held + weights + inside
    steps = held + weights + (weights if spec.optimizer == "adamw-foreach" else 0) + n * h
    return 4 * max(begins, at_work + n * h + n * f, attends, ends, steps)


def _specs(seed: int) -> dict[str, Spec]:
    """Three models: bound by states, by activations, by logits under checkpointing."""
    rng = random.Random(f"7.6 {seed}")
    d = rng.choice((16, 24, 32))
    heads = rng.choice((4, 8))
    h = 32 * rng.randrange(6, 9)
    states = Spec(
        1, 16 * rng.randrange(2, 5), h, 4, h * rng.choice((3, 4)), rng.randrange(4, 7),
        10 * rng.randrange(1, 20), rng.choice(("relu", "gelu")), "sdpa", rng.random() < 0.5, "adamw-foreach",
    )  # fmt: skip
    scores = Spec(
        rng.randrange(1, 4), 32 * rng.randrange(8, 13), 4 * d, 4, 4 * d * rng.choice((2, 4)),
        rng.randrange(4, 8), 10 * rng.randrange(1, 10), rng.choice(("relu", "gelu")), "eager", False,
        rng.choice(("sgd", "momentum", "adamw-fused")),
    )  # fmt: skip
    logits = Spec(
        rng.randrange(2, 5), 32 * rng.randrange(3, 7), heads * 16, heads, heads * 16 * rng.choice((2, 4)),
        rng.randrange(4, 9), 100 * rng.randrange(25, 50), rng.choice(("relu", "gelu")), "sdpa", True,
        rng.choice(("sgd", "momentum", "adamw-fused")),
    )  # fmt: skip
    return {"states": states, "scores": scores, "logits": logits}


def _given(spec: Spec) -> SimpleNamespace:
    return SimpleNamespace(**spec._asdict())


def _predicted(answer: Any, spec: Spec) -> Evidence:
    """The prediction, and how many bytes it allocated to make it."""
    from memlab.meter import Meter

    with Meter() as meter:
        said = plain(answer(_given(spec)))
    return {"said": said, "ran": meter.trace.peak_bytes}


def _capstone_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        specs = _specs(seed).values()
        return {
            "said": [call(_predicted, answer, spec) for spec in specs],
            "measured": [probe_trace(spec, seed % 2**32).peak_bytes for spec in specs],
        }

    return contained(work, memory=3 * GIB)


def _capstone_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    points = {"states": 0.5, "scores": 0.75, "logits": 0.75}
    said = answers_to(_specs(seed).items(), evidence["said"])
    for ((name, spec), entry), measured in zip(said, exactly(evidence["measured"], len(said)), strict=True):
        if type(measured) is not int or not close(measured, probe_expected(spec), 0.05):
            raise ForeignEvidence("that isn't the peak of the model")
        fault = _capstone_fault(spec, entry, measured)
        tally.award(points[name], not fault, fault)
    return _once(tally)


def _capstone_fault(spec: Spec, entry: Evidence, measured: int) -> str:
    if "error" in entry:
        return f"predict_peak stopped with {entry['error']}"
    said = _value(entry)["said"]
    if not is_number(said):
        return f"predict_peak: return a number of bytes; you returned {_kind(said)}"
    if _value(entry)["ran"] > measured // 10:
        ran = format_bytes(_value(entry)["ran"])
        return f"{spec}: the prediction itself allocated {ran}: predict, don't run it"
    if abs(said - measured) <= 0.1 * measured:
        return ""
    return (
        f"{spec}: you predict {format_bytes(round(said))}, measured are {format_bytes(measured)} "
        f"({said / measured - 1:+.0%}): {_capstone_hint(spec, said, measured)}"
    )


def _capstone_hint(spec: Spec, said: float, measured: int) -> str:
    n, v = spec.batch * spec.tokens, spec.classes
    weights = 4 * (spec.blocks * (4 * spec.hidden**2 + 2 * spec.hidden * spec.ffn) + spec.hidden * v)
    if close(4 * said, measured, 0.1):
        return "is that in elements? An fp32 number has 4 bytes"
    if said > measured:
        return "the peak is the largest moment, not the sum of all: which of your terms are alive together?"
    if spec.attention == "eager":
        return "eager attention keeps batch x heads x tokens^2 scores a block, its backward makes two more"
    if spec.optimizer == "adamw-foreach" and close(said, measured - weights, 0.12):
        return "a foreach AdamW step holds one more tensor for each parameter, all at once"
    if spec.checkpoint and n * v > spec.blocks * n * spec.hidden:
        return "the loss has logits, their log-softmax and a gradient, each (batch x tokens, classes)"
    return "which phase has the peak: the forward's end, the backward's begin or end, or the optimizer step?"


EXERCISES: tuple[Exercise, ...] = (
    Exercise("7.1", "largest batch", 2, _search_evidence, _search_score, "question 1, 'Which batch size?'"),
    Exercise(
        "7.2",
        "equal to the bit",
        2,
        _equal_evidence,
        _equal_score,
        "question 3, 'Does checkpointing change results?'",
    ),
    Exercise("7.3", "traffic", 1, _sent_evidence, _sent_score, "question 4, 'Split the model or shard it?'"),
    Exercise(
        "7.4",
        "SDPA",
        2,
        _attend_evidence,
        _attend_score,
        "question 5, 'Can FlashAttention replace attention?'",
    ),
    Exercise(
        "7.5",
        "a faster loader",
        1,
        _load_evidence,
        _load_score,
        "question 6, 'Memory is fine, but it is slow'",
    ),
    Exercise("7.6", "the capstone", 2, _capstone_evidence, _capstone_score, "the capstone"),
)
