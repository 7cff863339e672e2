"""From an executed check cell to points: computed from the evidence that the check left in its outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from memlab.exercises import EVIDENCE_MIME, exercises, rate

REVIEW, TAMPERED = "needs_review", "tampered"


class Verdict(NamedTuple):
    """Points of one check cell; `status` and `why` where they are in doubt."""

    exercise: str
    points: float
    status: str = ""
    why: str = ""


def is_check(cell: Mapping[str, Any]) -> bool:
    """Whether the cell is an automatically graded one."""
    return cell["cell_type"] == "code" and bool(cell["metadata"].get("nbgrader", {}).get("grade"))


def judge(cell: Mapping[str, Any], seed: int) -> Verdict:
    """The verdict on an executed check cell, run with the hidden inputs of `seed`.

    What the cell shows as its points is compared with what its evidence gives: a kernel in which `check` was
    replaced shows points and has no evidence for them.
    """
    number = str(cell["metadata"]["memlab"]["exercise"])
    outputs = cell.get("outputs", [])
    evidence = _evidence(outputs, number, seed)
    shown = _shown_points(outputs)
    failed = any(output.get("output_type") == "error" for output in outputs)
    if evidence is not None and failed:
        # a check hands over its evidence last of all: nothing of it can fail afterwards
        return Verdict(number, 0, TAMPERED, f"exercise {number}: evidence, and then an error")
    if evidence is not None:
        earned = rate(exercises(number.partition(".")[0])[number], evidence).points
        if shown is None or shown == earned:
            return Verdict(number, earned)
        why = f"exercise {number}: {shown:g} points shown, the evidence gives {earned:g}"
        return Verdict(number, min(earned, shown), TAMPERED, why)
    if shown:
        return Verdict(number, 0, TAMPERED, f"exercise {number}: {shown:g} points shown without evidence")
    if failed:
        return Verdict(number, 0)
    return Verdict(
        number, 0, REVIEW, f"exercise {number}: its check left no error and not one piece of evidence"
    )


def _evidence(outputs: Iterable[Mapping[str, Any]], number: str, seed: int) -> dict[str, Any] | None:
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


def _shown_points(outputs: Iterable[Mapping[str, Any]]) -> float | None:
    """The number that the cell's last expression showed, as nbgrader would take it for partial credit."""
    for output in outputs:
        if output.get("output_type") == "execute_result":
            try:
                return float("".join(output.get("data", {}).get("text/plain", "")))
            except ValueError:
                return None
    return None
