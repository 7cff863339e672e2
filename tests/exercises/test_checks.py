"""The checks' frame: what a student reads, what a grader gets, and what can't earn points."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memlab
from memlab.exercises import (
    EXERCISES,
    Exercise,
    Score,
    call,
    check,
    close,
    collect,
    plain,
    rate,
)
from memlab.units import UnknownNameError


def toy(evidence: Any = lambda answer, seed: {"value": plain(answer)}, points: Any = 2) -> Exercise:
    def score(found: dict[str, Any], seed: int) -> Score:
        return Score(points if found["value"] == 4 else 0, ("4 is expected",))

    return Exercise("9.1", "toy", 2, evidence, score, "section 9")


class Agrees:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Four(int):
    pass


@pytest.mark.parametrize("answer", [Agrees(), Four(4), "4", [4], None, True, object])
def test_only_the_exact_type_counts(answer: object) -> None:
    assert rate(toy(), collect(toy(), answer, 0)).points == 0


def test_tensors_become_numbers() -> None:
    assert plain(torch.tensor([1.5, 2.0])) == [1.5, 2.0]
    assert plain(torch.nn.Parameter(torch.ones(1))) == [1.0]
    assert plain({"a": (1, float("nan"))}) == {"a": [1, "nan"]}
    assert not close(float("inf"), 1.0) and not close(True, 1) and close(1.001, 1.0)


class Two(NamedTuple):
    first: object
    second: object

    def __getitem__(self, key: Any) -> Any:
        return 4

    def __iter__(self) -> Any:
        return iter((4, 4))


class Said(dict[str, int]):
    def items(self) -> Any:
        return {"a": 4}.items()


def test_of_a_container_of_their_own_counts_what_it_holds() -> None:
    assert plain(Two(1, 2)) == [1, 2]
    assert plain(Two(Four(4), Agrees())) == [{"type": "Four"}, {"type": "Agrees"}]
    assert plain(Said(a=1)) == {"a": 1}
    assert plain(torch.ones(2).max(dim=0)) == [1.0, 0]


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text() | st.binary(), lambda x: st.lists(x)))
def test_evidence_is_always_json(value: object) -> None:
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)


def test_an_error_costs_the_points_and_says_where() -> None:
    def evidence(answer: Any, seed: int) -> dict[str, Any]:
        return {"value": answer()}

    names: dict[str, Any] = {}
    exec(compile("def answer():\n    return 1 / 0", "<student>", "exec"), names)
    found = collect(toy(evidence), names["answer"], 0)
    assert found == {"error": "ZeroDivisionError: division by zero (line 2 of your cell)"}
    assert rate(toy(), found).points == 0
    assert call(names["answer"]) == found


def test_not_written_is_zero_and_kind() -> None:
    def evidence(answer: Any, seed: int) -> dict[str, Any]:
        raise NotImplementedError("exercise 9.1")

    score = rate(toy(), collect(toy(evidence), None, 0))
    assert score.points == 0 and "not written yet" in score.messages[0]


@pytest.mark.parametrize("evidence", [{}, {"value": {"type": "Agrees"}}, {"other": 1}, {"error": "x"}])
def test_forged_or_malformed_evidence_earns_nothing(evidence: dict[str, Any]) -> None:
    assert rate(toy(), evidence).points == 0


def test_points_never_exceed_the_maximum() -> None:
    assert rate(toy(points=99), {"value": 4}).points == 2


def test_every_exercise_is_registered_once_and_chapters_have_their_points() -> None:
    totals: dict[str, int] = {}
    for name, exercise in EXERCISES.items():
        assert name == exercise.id and exercise.read and exercise.title
        totals[exercise.chapter] = totals.get(exercise.chapter, 0) + exercise.points
    course = {"1": 10, "2": 15, "3": 15, "4": 20, "5": 15, "6": 15, "7": 10}
    assert totals == {chapter: course[chapter] for chapter in totals}


def test_a_warning_is_a_note_and_stderr_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(bus: int, rate: float) -> float:
        warnings.warn("careful", stacklevel=1)
        print("to stderr", file=sys.stderr)
        return bus * rate / 8

    assert check("1.1", noisy, lambda n: (n / 10**9, n / 2**30)) == 2
    out, err = capsys.readouterr()
    assert err == "" and "note: UserWarning: careful" in out and "2 of 2 points. Right." in out


def test_progress_shows_the_latest_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEMLAB_HOME", str(tmp_path))
    check("1.1", lambda bus, rate: bus * rate / 8, lambda n: (n / 10**9, n / 2**30))
    check("1.1", lambda bus, rate: 0.0, lambda n: (0, 0))
    memlab.progress()
    assert "1.1    0 of  2  open" in capsys.readouterr().out
    (tmp_path / "progress.json").write_text("{broken")
    memlab.progress()


def test_an_untouched_copy_erases_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def untouched(*_: object) -> None:
        raise NotImplementedError("exercise 1.1")

    monkeypatch.setenv("MEMLAB_HOME", str(tmp_path))
    check("1.1", lambda bus, rate: bus * rate / 8, lambda n: (n / 10**9, n / 2**30))
    before = (tmp_path / "progress.json").read_text()
    assert check("1.1", untouched, untouched) == 0
    assert (tmp_path / "progress.json").read_text() == before


def test_being_graded_leaves_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLAB_HOME", str(tmp_path))
    monkeypatch.setenv("MEMLAB_GRADING", "1")
    check("1.1", lambda bus, rate: 0.0, lambda n: (0, 0))
    assert not list(tmp_path.iterdir())


def test_an_unknown_exercise_and_a_missing_answer_are_said() -> None:
    with pytest.raises(UnknownNameError, match="unknown exercise"):
        check("1.11", 3)
    with pytest.raises(TypeError, match="needs your answer"):
        check("1.1")
