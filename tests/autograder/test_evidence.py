"""What a hostile kernel may hand over in place of evidence: refused, in time, with a reason."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import nbformat
import pytest

from autograder.evidence import REVIEW, TAMPERED, exercise_seed, judge, unfit, within
from autograder.execution import Budget, _Sink
from autograder.workers import _refused
from memlab.exercises import EVIDENCE_MIME, collect, exercises
from tests.exercises import of_solution

NUMBER, SEED = "1.4", 77


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (deep(5_000), "levels deep"),
        ({"a": 10**100}, "bits"),
        ({"a": 10**4_000}, "bits"),
        ([[0] * 1_000] * 1_000, "values"),
        ([0] * 10**7, "values"),
        ({"a": float("nan")}, "nan"),
        ({"a": [float("-inf")]}, "infinite"),
        ({"a": "x" * 10**6}, "characters"),
        ({"x" * 10**6: 1}, "key"),
        ({"a": b"x"}, "bytes"),
    ],
)
def test_what_is_no_evidence_is_refused(data: Any, why: str) -> None:
    began = time.process_time()
    assert why in unfit({"exercise": NUMBER, "evidence": data})
    assert time.process_time() - began < 5


def test_real_evidence_is_far_from_every_limit() -> None:
    for chapter, number in (
        ("01_memory_basics", "1.5"),
        ("02_four_consumers", "2.4"),
        ("06_combined", "6.2"),
    ):
        assert not unfit({"evidence": of_solution(chapter, number, 0)[0]})
    large = collect(exercises(1)["1.3"], lambda *_: [0.5] * 10**6, 0)
    assert not unfit(large) and len(json.dumps(large)) < 2_000_000


def test_work_that_takes_too_long_is_ended() -> None:
    def endless() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0)

    with pytest.raises(TimeoutError, match="more than"):
        within(0.2, endless)
    assert within(60, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0)


def cell(*evidence: Any, number: str = NUMBER) -> Any:
    """An executed check cell that left these pieces of evidence."""
    made = nbformat.v4.new_code_cell("memlab.check(...)")
    made.metadata.update(nbgrader={"grade": True}, memlab={"exercise": number})
    sink = _Sink(100_000, Budget())
    for item in evidence:
        payload = {"exercise": number, "seed": exercise_seed(SEED, number), "evidence": item}
        sink.add("display_data", {"data": {EVIDENCE_MIME: payload}})
    made.outputs = sink.outputs()
    return made


def test_the_verdict_on_evidence() -> None:
    right = of_solution("01_memory_basics", NUMBER, exercise_seed(SEED, NUMBER))[0]
    assert judge(cell(right), SEED)[:3] == (NUMBER, 2, "")
    for forged in ({"bytes": [], "threads": []}, {"bytes": right["bytes"][:1], "threads": right["threads"]}):
        verdict = judge(cell(forged), SEED)
        assert (verdict.points, verdict.status) == (0, TAMPERED) and "foreign" in verdict.why
    for forged in ({}, {"bytes": right["bytes"]}, deep(5_000), {"bytes": float("nan")}):
        assert judge(cell(forged), SEED)[1:3] == (0, REVIEW)
    assert judge(cell(right, right), SEED)[1:3] == (0, REVIEW)
    assert "levels deep" in judge(cell(deep(5_000)), SEED).why


def test_a_cell_keeps_few_errors_and_few_pieces_of_evidence() -> None:
    sink = _Sink(1_000, Budget())
    for _ in range(1_000):
        sink.add("error", {"ename": ["x"], "evalue": {"deep": deep(500)}, "traceback": ["y" * 5_000]})
        sink.add("display_data", {"data": {EVIDENCE_MIME: {"evidence": {}}}})
    assert len(sink.outputs()) < 10
    sink = _Sink(1_000, Budget(), evidence=False)
    sink.add("display_data", {"data": {EVIDENCE_MIME: {"evidence": {}}}})
    assert sink.outputs() == []


def test_points_lost_for_lack_of_a_permission_are_seen() -> None:
    found = {"cases": [{"error": "PermissionError: [Errno 13] Permission denied"}] * 2}
    assert _refused(judge(cell(found, number="7.5"), SEED))
    assert not _refused(judge(cell({"bytes": [], "threads": []}), SEED))
