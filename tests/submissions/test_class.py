"""The short form of the stress run: a dozen cases of every kind, and what they could have harmed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autograder.sandbox import why_no_bubblewrap
from tests.submissions import CASES
from tests.submissions.harness import Listener, Run, deviations, grade, make_class, totals

SHORT = [case for case in CASES.values() if case.short]
HONEST = 2

pytestmark = pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap())


@dataclass
class Graded:
    run: Run
    wrong: dict[str, str]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Graded:
    root = tmp_path_factory.mktemp("class") / "c"
    with Listener() as listener:
        make_class(root, SHORT, HONEST, listener.port)
        run = grade(root, listener=listener)
    return Graded(run, deviations(root, run.out))


def test_there_are_at_least_120_cases_and_each_says_what_it_is() -> None:
    assert len(CASES) >= 120
    assert {case.kind for case in CASES.values()} == {
        "honest",
        "damage",
        "lms",
        "resources",
        "cheating",
        "attacks",
    }
    assert {case.kind for case in SHORT} == {case.kind for case in CASES.values()}


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_points_and_status(graded: Graded, case: object) -> None:
    name = case.name  # type: ignore[attr-defined]
    assert name not in graded.wrong, graded.wrong[name]


def test_honest_students_beside_them_get_all_their_points(graded: Graded) -> None:
    rows = totals(graded.run.out)
    honest = [row for name, row in rows.items() if name.startswith("honest-")]
    assert len(honest) == HONEST
    assert all((row["points"], row["status"]) == ("10", "graded") for row in honest)


def test_nothing_is_harmed(graded: Graded) -> None:
    assert graded.run.harm == []
