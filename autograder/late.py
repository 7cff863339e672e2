"""Deadlines: how late something was, and what that takes.

A policy is words: `10%/day, at most 3 days`, `2 points/hour`, `5%/day, at most 50%`, `none`. A started day
(hour) counts as a whole one; percent are of the points earned; `at most 3 days`: what comes later earns 0;
`at most 50%`: no more is taken. Within the grace period nothing is late; beyond it lateness counts from the
deadline. Points before and after stand side by side in OUT/late.csv; grades.csv and totals.csv hold what the
work is worth, before.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from autograder.course import CourseError, write_atomically

_UNITS = {"hour": 3600, "day": 86_400, "week": 604_800}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(%|percent|points?)\s*(?:/|per|a|each)\s*(hour|day|week)s?")
_MOST = re.compile(r"at most\s+(\d+(?:\.\d+)?)\s*(%|percent|points?|hours?|days?|weeks?)")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|minutes?|h|hours?|d|days?)")


@dataclass(frozen=True)
class Policy:
    """What was agreed for one chapter: times in seconds, `rate` in percent or points per started unit."""

    deadline: float
    text: str
    grace: float = 0
    rate: float = 0
    percent: bool = True
    unit: int = 86_400
    most: float | None = None
    last: float | None = None

    def lateness(self, submitted: float) -> float:
        """Seconds after the deadline; 0 in time or within the grace period."""
        over = submitted - self.deadline
        return over if over > self.grace else 0.0

    def days(self, submitted: float) -> int:
        """Started days after the deadline."""
        return math.ceil(self.lateness(submitted) / 86_400)

    def after(self, points: float, submitted: float) -> float:
        """What remains of `points`."""
        late = self.lateness(submitted)
        if not late:
            return points
        if self.last is not None and late > self.last:
            return 0.0
        taken = self.rate * math.ceil(late / self.unit)
        if self.most is not None:
            taken = min(taken, self.most)
        if self.percent:
            taken = points * taken / 100
        return round(max(points - taken, 0.0), 6)


def policy(deadline: str, words: str = "none", grace: str = "0 min") -> Policy:
    """Raises CourseError for words that don't say one clear thing."""
    made = Policy(_deadline(deadline), words.strip() or "none", _grace(grace))
    if made.text.lower() == "none":
        return made
    rate: float | None = None
    percent, unit = True, 86_400
    most: float | None = None
    last: float | None = None
    for part in (p.strip().lower() for p in words.split(",")):
        if (match := _RATE.fullmatch(part)) and rate is None:
            rate, unit = float(match[1]), _UNITS[match[3]]
            percent = not match[2].startswith("point")
        elif (match := _MOST.fullmatch(part)) and match[2].rstrip("s") in _UNITS and last is None:
            last = float(match[1]) * _UNITS[match[2].rstrip("s")]
        elif (match := _MOST.fullmatch(part)) and match[2].rstrip("s") not in _UNITS and most is None:
            most = float(match[1])
            if match[2].startswith("point") == percent:
                raise CourseError(f"late policy {words!r}: a rate and its limit are in the same unit")
        else:
            raise _unclear(words)
    if rate is None:
        raise _unclear(words)
    if percent and max(rate, most or 0) > 100:
        raise CourseError(f"late policy {words!r}: more than 100% can't be taken")
    return Policy(made.deadline, made.text, made.grace, rate, percent, unit, most, last)


def _unclear(words: str) -> CourseError:
    return CourseError(
        f"late policy {words!r} isn't understood: write it like '10%/day, at most 3 days', "
        "'2 points/hour, at most 8 points' or 'none'"
    )


def _deadline(text: str) -> float:
    try:
        at = datetime.fromisoformat(text.strip())
        if at.tzinfo is not None:
            return at.timestamp()
        problem = "say its zone, for the students' clocks and this machine's may differ"
    except (ValueError, OverflowError):
        problem = "isn't a time"
    raise CourseError(f"deadline {text!r}: {problem}; write it like 2026-12-01T23:59+01:00")


def _grace(text: str) -> float:
    match = _SPAN.fullmatch(text.strip().lower())
    if not match:
        raise CourseError(f"grace {text!r} isn't a time span: write it like '15 min' or '2 hours'")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2][0]]


def keep(out: Path, policies: dict[str, Policy]) -> None:
    text = json.dumps({name: asdict(each) for name, each in sorted(policies.items())}, indent=1) + "\n"
    write_atomically(out / "deadlines.json", text)


def kept(out: Path) -> dict[str, Policy]:
    """The policies of earlier runs, by chapter. Raises CourseError where the file was damaged."""
    path = out / "deadlines.json"
    try:
        return {name: Policy(**fields) for name, fields in json.loads(path.read_text("utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CourseError(f"{path} can't be read ({error}): delete it and give --deadline again") from None
