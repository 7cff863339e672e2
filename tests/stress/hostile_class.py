"""Every case, mixed into fifty honest students, graded in one run."""

from __future__ import annotations

import os

import pytest

from tests.submissions.harness import CASES, Listener, Run, deviations, grade, make_class, totals

HONEST = int(os.environ.get("MEMLAB_STRESS_HONEST", "50"))
#: Every so many cases; 1 is all of them.
EVERY = int(os.environ.get("MEMLAB_STRESS_EVERY", "1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("hostile") / "c"
    with Listener() as listener:
        cases = list(CASES.values())[::EVERY]
        make_class(root, cases, HONEST, listener.port)
        graded = grade(root, *os.environ.get("MEMLAB_STRESS_OPTIONS", "").split(), listener=listener)
    rate = 60 * (len(cases) + HONEST) / graded.seconds
    print(
        f"\n{len(cases)} cases and {HONEST} honest: {graded.seconds:.0f} s, {rate:.1f} submissions a minute"
    )
    return graded


def test_every_case_comes_out_as_expected(run: Run) -> None:
    assert deviations(run.root, run.out) == {}


def test_every_honest_student_gets_all_points(run: Run) -> None:
    rows = [row for name, row in totals(run.out).items() if name.startswith("honest-")]
    assert len(rows) == HONEST
    assert [r for r in rows if (r["points"], r["status"]) != ("10", "graded")] == []


def test_nothing_is_harmed(run: Run) -> None:
    assert run.harm == []


def test_a_second_run_grades_nobody_again_and_says_the_same(run: Run) -> None:
    records = {p: p.stat().st_mtime_ns for p in (run.out / "records").rglob("*.json")}
    before = (run.out / "grades.csv").read_text("utf-8")
    again = grade(run.root)
    assert (again.out / "grades.csv").read_text("utf-8") == before
    graded = {p for p, time in records.items() if p.stat().st_mtime_ns == time}
    assert len(graded) > 0.7 * len(records)  # the others couldn't be read, and are looked at each time
    assert again.seconds < run.seconds / 2
