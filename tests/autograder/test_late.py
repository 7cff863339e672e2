"""What lateness takes, from words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder.course import CourseError
from autograder.late import keep, kept, policy

AT = "2026-12-01T23:59+01:00"
DAY, HOUR = 86_400, 3600


@pytest.mark.parametrize(
    ("words", "late", "after"),
    [
        ("none", 9 * DAY, 10),
        ("10%/day, at most 3 days", -1, 10),
        ("10%/day, at most 3 days", 1, 9),
        ("10%/day, at most 3 days", DAY, 9),
        ("10%/day, at most 3 days", DAY + 1, 8),
        ("10%/day, at most 3 days", 3 * DAY, 7),
        ("10%/day, at most 3 days", 3 * DAY + 1, 0),
        ("25% per day, at most 50%", 9 * DAY, 5),
        ("2 points/hour", HOUR + 1, 6),
        ("2 points a day, at most 5 points", 9 * DAY, 5),
        ("40%/week", 1, 6),
        ("60%/day", 2 * DAY, 0),
    ],
)
def test_points_after(words: str, late: float, after: float) -> None:
    rule = policy(AT, words)
    assert rule.after(10, rule.deadline + late) == after


def test_grace_forgives_all_or_nothing() -> None:
    rule = policy(AT, "10%/day", "15 min")
    assert rule.after(10, rule.deadline + 900) == 10 and rule.days(rule.deadline + 900) == 0
    assert rule.after(10, rule.deadline + 901) == 9 and rule.days(rule.deadline + 901) == 1


def test_the_zone_counts() -> None:
    assert policy("2026-12-01T23:59+01:00").deadline + HOUR == policy("2026-12-01T23:59+00:00").deadline


@given(st.floats(0, 100), st.floats(0, 1e7), st.floats(0, 1e7))
def test_later_never_earns_more_and_never_less_than_nothing(points: float, one: float, other: float) -> None:
    rule = policy(AT, "7%/hour, at most 2 weeks, at most 80%")
    early, late = sorted((one, other))
    assert points + 1e-6 >= rule.after(points, rule.deadline + early)
    assert rule.after(points, rule.deadline + early) >= rule.after(points, rule.deadline + late) >= 0


@pytest.mark.parametrize(
    "words",
    ["ten percent", "10%", "10%/day, 5%/day", "10%/day, at most 3 points", "at most 3 days", "-1%/day"],
)
def test_unclear_words_are_refused_in_one_line(words: str) -> None:
    with pytest.raises(CourseError, match="late policy") as caught:
        policy(AT, words)
    assert "\n" not in str(caught.value)


def test_a_deadline_needs_a_zone_and_a_grace_a_unit() -> None:
    with pytest.raises(CourseError, match="zone"):
        policy("2026-12-01T23:59")
    with pytest.raises(CourseError, match="isn't a time"):
        policy("tomorrow")
    with pytest.raises(CourseError, match="grace"):
        policy(AT, "none", "15")


def test_policies_are_kept(tmp_path: Path) -> None:
    rules = {"a": policy(AT, "10%/day, at most 3 days", "1 h")}
    keep(tmp_path, rules)
    assert kept(tmp_path) == rules and kept(tmp_path / "nowhere") == {}
    (tmp_path / "deadlines.json").write_text("[1]")
    with pytest.raises(CourseError, match="give --deadline again"):
        kept(tmp_path)


@pytest.mark.parametrize("words", ["150%/day", "10%/day, at most 120%"])
def test_more_than_everything_cannot_be_taken(words: str) -> None:
    with pytest.raises(CourseError, match="more than 100%"):
        policy(AT, words)
    assert policy(AT, "150 points/day").rate == 150
