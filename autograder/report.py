"""A class at a glance: distribution of each exercise, most frequent wrong answers, time, what to look at.

For the instructor: it names students. `report.html` opens offline and runs nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from autograder.evidence import REVIEW, TAMPERED
from autograder.feedback import document, final_points, masked
from autograder.records import FAILED, GRADED, MISSING, Record
from autograder.tables import Course
from memlab.exercises import exercises

_STATUSES = (GRADED, REVIEW, TAMPERED, FAILED, MISSING)
_SHOWN = 3


class Wrong(NamedTuple):
    """One kind of wrong answer: the message with its numbers taken out, and who got it."""

    message: str
    students: list[str]


class Row(NamedTuple):
    """One exercise: how many earned all, some and none of its points, and why not."""

    number: str
    title: str
    most: float
    full: int
    part: int
    none: int
    mean: float
    wrong: list[Wrong]


class Summary(NamedTuple):
    """One chapter."""

    chapter: str
    statuses: dict[str, int]
    rows: list[Row]
    totals: list[float]
    seconds: list[float]
    late: int
    unread: int
    attention: list[Record]


def summaries(course: Course) -> list[Summary]:
    return [_summary(course, chapter) for chapter in course.chapters()]


def _summary(course: Course, chapter: str) -> Summary:
    records = [record for record in course.records if record.chapter == chapter]
    graded = [record for record in records if record.status not in (FAILED, MISSING)]
    rows = []
    for exercise in exercises(int(chapter[:2])).values():
        points = {r.student: final_points(r, course.given(r)).get(exercise.id) or 0 for r in graded}
        full = sum(p >= exercise.points for p in points.values())
        none = sum(p <= 0 for p in points.values())
        by_message: dict[str, list[str]] = defaultdict(list)
        for record in graded:
            if points[record.student] < exercise.points:
                for message in record.messages.get(exercise.id, ())[:1]:
                    by_message[masked(message, exercise.id)].append(record.student)
        wrong = sorted(by_message.items(), key=lambda item: (-len(item[1]), item[0]))
        mean = statistics.fmean(points.values()) if points else 0
        rows.append(
            Row(exercise.id, exercise.title, exercise.points, full, len(points) - full - none, none, mean,
                [Wrong(*item) for item in wrong[:_SHOWN]])
        )  # fmt: skip
    policy = course.policies.get(chapter)
    late = 0
    if policy is not None:
        late = sum(bool(r.submitted is not None and policy.lateness(r.submitted)) for r in records)
    written = [course.given(record) for record in graded]
    return Summary(
        chapter,
        dict(Counter(record.status for record in records)),
        rows,
        sorted(after for r in graded if (after := course.points_after(r)) is not None),
        [record.seconds for record in graded if record.seconds],
        late,
        sum(bool(given is not None and given.written and given.points is None) for given in written),
        [record for record in records if record.status in (REVIEW, TAMPERED, FAILED)],
    )


def text(found: Sequence[Summary]) -> str:
    """For a terminal of 80 columns or more."""
    lines: list[str] = []
    for summary in found:
        lines += [summary.chapter, f"  {_counts(summary)}"]
        if summary.totals:
            lines.append(f"  {_spread(summary)}")
        for row in summary.rows:
            bar = _bar(row)
            lines.append(f"  {row.number:>4}  {bar}  {row.mean:4.1f} of {row.most:g}  {row.title}")
            lines += [f"        {len(w.students):>3} x {_short(w.message)}" for w in row.wrong]
        for record in summary.attention:
            why = "; ".join([*record.doubts, *record.reasons][:2])
            lines.append(f"  {record.status}: {record.student}: {_short(why)}")
        lines.append("")
    lines.append("bars: # all points, + some, . none")
    return "\n".join(lines)


def _bar(row: Row, width: int = 24) -> str:
    everybody = row.full + row.part + row.none
    if not everybody:
        return " " * width
    full, some = (round(width * n / everybody) for n in (row.full, row.full + row.part))
    return "#" * full + "+" * (some - full) + "." * (width - some)


def _counts(summary: Summary) -> str:
    parts = [f"{summary.statuses[s]} {s}" for s in _STATUSES if summary.statuses.get(s)]
    if summary.late:
        parts.append(f"{summary.late} late")
    if summary.unread:
        parts.append(f"{summary.unread} with a written answer to read")
    return ", ".join(parts)


def _spread(summary: Summary) -> str:
    values = summary.totals
    line = (
        f"points that count: median {statistics.median(values):g}, lowest {values[0]:g}, "
        f"highest {values[-1]:g}"
    )
    if summary.seconds:
        line += (
            f"; a notebook ran {statistics.median(summary.seconds):.0f} s in the median, "
            f"{max(summary.seconds):.0f} s at most"
        )
    return line


def _short(message: str, width: int = 100) -> str:
    return message if len(message) <= width else message[: width - 1] + "…"


_CSS = """
.bar { display: flex; height: 0.9rem; width: 14rem; border-radius: 3px; overflow: hidden; }
.bar .full { background: #0072b2; } .bar .part { background: #56b4e9; } .bar .none { background: #d9c9a8; }
td.number { text-align: right; white-space: nowrap; } td .wrong { color: var(--soft); }
"""


def html(found: Sequence[Summary]) -> str:
    """report.html."""
    parts = ["<h1>Class report</h1>"]
    for summary in found:
        parts.append(f"<h2>{escape(summary.chapter)}</h2><p>{escape(_counts(summary))}.</p>")
        if summary.totals:
            parts.append(f"<p>{escape(_spread(summary))}.</p>")
        rows = "".join(_html_row(row) for row in summary.rows)
        parts.append(
            "<table><tr><th>exercise<th>all, some, none of the points<th>mean<th>most frequent wrong answers"
            f"</tr>{rows}</table>"
        )
        if summary.attention:
            items = "".join(
                f"<li><strong>{escape(r.status)}</strong> {escape(r.student)}: "
                f"{escape('; '.join([*r.doubts, *r.reasons]))}</li>"
                for r in summary.attention
            )
            parts.append(f"<h3>To look at</h3><ul>{items}</ul>")
    return document("Class report", "\n".join(parts), _CSS)


def _html_row(row: Row) -> str:
    everybody = max(row.full + row.part + row.none, 1)
    spans = "".join(
        f'<span class="{name}" style="width: {100 * number / everybody:.1f}%"></span>'
        for name, number in (("full", row.full), ("part", row.part), ("none", row.none))
        if number
    )
    wrong = "".join(
        f"<div>{len(w.students)} × {escape(w.message)} "
        f'<span class="wrong">({_names(w.students)})</span></div>'
        for w in row.wrong
    )
    return (
        f"<tr><td>{row.number} {escape(row.title)}</td>"
        f'<td><div class="bar">{spans}</div>{row.full}, {row.part}, {row.none}</td>'
        f'<td class="number">{row.mean:.1f} of {row.most:g}</td><td>{wrong}</td></tr>'
    )


def _names(students: Sequence[str]) -> str:
    return escape(", ".join(students[:4])) + (", …" if len(students) > 4 else "")
