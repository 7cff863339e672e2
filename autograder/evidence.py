"""From an executed check cell to points: computed from the evidence that the check left in its outputs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from memlab.exercises import EVIDENCE_MIME, Score, exercises, rate

REVIEW, TAMPERED = "needs_review", "tampered"


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
    evidence = evidence_of(outputs, number, exercise_seed(seed, number))
    shown = _shown_points(outputs)
    failed = any(output.get("output_type") == "error" for output in outputs)
    if evidence is not None and failed:
        # a check hands over its evidence last of all: nothing of it can fail afterwards
        return Verdict(number, 0, TAMPERED, f"exercise {number}: evidence, and then an error")
    if shown is not None and evidence is None:
        return Verdict(number, 0, TAMPERED, f"exercise {number}: {shown} points shown without evidence")
    if evidence is not None:
        score = rate(exercises(number.partition(".")[0])[number], evidence)
        if shown is None:
            return Verdict(number, score.points, score=score)
        why = f"exercise {number}: {shown} points shown, where a graded check shows none"
        return Verdict(number, 0, TAMPERED, why, score)
    if failed:
        return Verdict(number, 0)
    return Verdict(
        number, 0, REVIEW, f"exercise {number}: its check left no error and not one piece of evidence"
    )


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
