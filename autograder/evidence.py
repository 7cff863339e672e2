"""From an executed check cell to points: computed from the evidence that the check left in its outputs."""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from memlab.exercises import EVIDENCE_MIME, Score, exercises, rate
from memlab.exercises.limits import NoProcess, TamperedResult

REVIEW, TAMPERED = "needs_review", "tampered"

#: Evidence of checks stays far below: values, containers in containers, bits of an int, characters of a text.
_VALUES, _DEPTH, _BITS, _TEXT = 300_000, 24, 256, 20_000

#: Seconds that the score of one exercise may take; the longest takes one.
SCORE_SECONDS = 60.0

#: What a check's child process can end with that isn't the answer's error alone.
_IN_CHILD = {TamperedResult: TAMPERED, NoProcess: REVIEW}

Result = TypeVar("Result")


class Verdict(NamedTuple):
    """Points of one check cell; `status` and `why` where in doubt, `score` where there is evidence."""

    exercise: str
    points: float
    status: str = ""
    why: str = ""
    score: Score | None = None


def is_check(cell: Mapping[str, Any]) -> bool:
    """Whether the cell is an automatically graded one."""
    return cell["cell_type"] == "code" and bool(cell["metadata"].get("nbgrader", {}).get("grade"))


def check_number(cell: Mapping[str, Any]) -> str:
    """The exercise that a check cell grades; '' for any other cell."""
    return str(cell["metadata"]["memlab"]["exercise"]) if is_check(cell) else ""


def exercise_seed(seed: int, number: str) -> int:
    """The seed of one exercise's hidden inputs: a kernel that knows one doesn't know the next."""
    return _derived(seed, number)


def canary_seed(seed: int, number: str) -> int:
    """The seed of the inputs on which a wrong answer is tried."""
    return _derived(seed, f"canary {number}")


def _derived(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")


def judge(cell: Mapping[str, Any], seed: int) -> Verdict:
    """The verdict on an executed check cell, run with the hidden inputs of the course's `seed`.

    A graded kernel's `check` shows nan: any number shows that it was replaced.
    """
    number = check_number(cell)
    outputs = cell.get("outputs", [])
    refused = _refused(outputs)
    if refused:
        return Verdict(number, 0, REVIEW, f"exercise {number}: its evidence was refused: {refused}")
    evidence = evidence_of(outputs, number, exercise_seed(seed, number))
    shown = _shown_points(outputs)
    failed = any(output.get("output_type") == "error" for output in outputs)
    if evidence is not None and failed:
        # a check hands over its evidence last of all: nothing of it can fail afterwards
        return Verdict(number, 0, TAMPERED, f"exercise {number}: evidence, and then an error")
    if shown is not None and evidence is None:
        return Verdict(number, 0, TAMPERED, f"exercise {number}: {shown} points shown without evidence")
    if evidence is not None:
        error = str(evidence.get("error", ""))
        for kind, status in _IN_CHILD.items():
            if error.startswith(f"{kind.__name__}:"):
                return Verdict(number, 0, status, f"exercise {number}: {error[:300]}")
        score = scored(number, evidence, exercise_seed(seed, number))
        if score.doubt:
            status = TAMPERED if score.doubt.startswith("foreign") else REVIEW
            return Verdict(number, 0, status, f"exercise {number}: its evidence is {score.doubt}", score)
        if shown is None:
            return Verdict(number, score.points, score=score)
        why = f"exercise {number}: {shown} points shown, where a graded check shows none"
        return Verdict(number, 0, TAMPERED, why, score)
    if failed:
        return Verdict(number, 0)
    return Verdict(
        number, 0, REVIEW, f"exercise {number}: its check left no error and not one piece of evidence"
    )


def _refused(outputs: Iterable[Mapping[str, Any]]) -> str:
    """Why evidence was left out when it arrived."""
    for output in outputs:
        item = output.get("data", {}).get(EVIDENCE_MIME)
        if isinstance(item, dict) and "refused" in item:
            return str(item["refused"])[:200]
    return ""


def scored(number: str, evidence: Mapping[str, Any], seed: int) -> Score:
    """`rate`, which evidence made for it can't keep from coming back."""
    exercise = exercises(number.partition(".")[0])[number]
    try:
        return within(SCORE_SECONDS, lambda: rate(exercise, evidence, seed))
    except TimeoutError:
        return Score(0, (), f"malformed: its score took more than {SCORE_SECONDS:g} s")


class _TooLong(BaseException):
    """Nothing that catches Exception catches it."""


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """`work()`, of which nothing but Python code may take long. Raises TimeoutError, or what it raises."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooLong)
        )
        thread.join(5)
    if results:
        return results[0]
    if failures and not isinstance(failures[0], _TooLong):
        raise failures[0]
    raise TimeoutError(f"more than {seconds:g} s")


def unfit(data: Any) -> str:
    """Why this is no evidence, whoever made it: too large, too deep, or no plain data; '' where it may be."""
    left = [(data, 0)]
    for count in range(_VALUES):
        if not left:
            return ""
        value, depth = left.pop()
        kind = type(value)
        if kind in (dict, list) and depth == _DEPTH:
            return f"it is nested more than {_DEPTH} levels deep"
        if kind is dict:
            if any(type(key) is not str or len(key) > _TEXT for key in value):
                return "a key is no short text"
            left += [(item, depth + 1) for item in value.values()]
        elif kind is list:
            if len(value) > _VALUES - count:
                break
            left += [(item, depth + 1) for item in value]
        elif kind is int and value.bit_length() > _BITS:
            return f"a number has more than {_BITS} bits"
        elif kind is float and not math.isfinite(value):
            return "a number is nan or infinite"
        elif kind is str and len(value) > _TEXT:
            return f"a text has more than {_TEXT:,} characters"
        elif value is not None and kind not in (bool, int, float, str):
            return f"it holds a {kind.__name__}"
    return f"it holds more than {_VALUES:,} values"


def evidence_of(outputs: Iterable[Mapping[str, Any]], number: str, seed: int) -> dict[str, Any] | None:
    """The evidence for one exercise and seed; None when there isn't exactly one."""
    found = [o["data"][EVIDENCE_MIME] for o in outputs if EVIDENCE_MIME in o.get("data", {})]
    if len(found) != 1 or not isinstance(found[0], dict):
        return None
    item = found[0]
    fits = item.get("exercise") == number and item.get("seed") == seed
    evidence = item.get("evidence")
    if not fits or not isinstance(evidence, dict):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(evidence))  # nbformat makes dicts of a class of its own
    return plain


def _shown_points(outputs: Iterable[Mapping[str, Any]]) -> str | None:
    """The number that the cell's last expression showed, if it is one; nan isn't."""
    for output in outputs:
        if output.get("output_type") == "execute_result":
            text = "".join(output.get("data", {}).get("text/plain", "")).strip()
            if re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", text):
                return text
    return None
