"""Points for a learning management system, in the very file that it exported.

    canvas      the gradebook that Canvas exported: its columns for the students, and the chapters' columns
    moodle      the grading worksheet of one assignment: its column `Grade`
    nbgrader    the columns of nbgrader's own exporter; no template

Points are those that count: corrected and given by hand, after the policy for late work. Nothing is written
where there are no points, so a grade that stands in the template stays; everything left out is said.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from autograder.course import CourseError, write_atomically
from autograder.evidence import REVIEW, TAMPERED
from autograder.feedback import total
from autograder.gradebook import ByHand
from autograder.records import FAILED, MISSING, Record, exercise_points
from autograder.roster import Person, Roster, key, people_of, read_table, shown
from autograder.tables import Course, Member, cell, write_csv

FORMATS = ("canvas", "moodle", "nbgrader")
_CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Root Account", "Section")
_NBGRADER = (
    "assignment,duedate,timestamp,student_id,last_name,first_name,email,raw_score,"
    "late_submission_penalty,score,max_score"
)


def export(
    course: Course,
    kind: str,
    to: Path,
    *,
    template: Path | None = None,
    chapters: Sequence[str] = (),
    column: str | None = None,
) -> list[str]:
    """Writes the file, and returns a line for everything that a person should know about it.

    `column` names the template's column where it can't be told by the chapter's name. Raises CourseError.
    """
    if kind not in FORMATS:
        raise CourseError(f"unknown format {kind!r}: one of {', '.join(FORMATS)}")
    wanted = [name for name in course.chapters() if not chapters or name in chapters]
    missing = [name for name in chapters if name not in wanted]
    if missing or not wanted:
        what = f"{missing[0]} wasn't" if missing else "nothing was"
        there = f": {', '.join(course.chapters())} was" if missing else ""
        raise CourseError(f"{what} graded into {course.out}{there}")
    said = _said(course, wanted)
    if kind == "nbgrader":
        _nbgrader(course, wanted, to)
        return said
    if template is None:
        what = (
            "gradebook that Canvas exported" if kind == "canvas" else "grading worksheet that Moodle exported"
        )
        raise CourseError(f"--format {kind} needs --template: the {what}, for it holds the LMS's own names")
    if (kind == "moodle" or column is not None) and len(wanted) > 1:
        raise CourseError(f"which chapter? say --chapter, one of {', '.join(wanted)}")
    rows, names = read_table(template)
    said += _fill(course, kind, wanted, rows, names, column, template)
    kept = names
    if kind == "canvas":
        filled = {_canvas_column(names, chapter, column) for chapter in wanted}
        kept = [name for name in names if name.strip() in _CANVAS or name in filled]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, kept, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(to, text.getvalue())
    return said


def _said(course: Course, chapters: Sequence[str]) -> list[str]:
    """Whose points aren't what they seem."""
    said = []
    unread: dict[str, list[str]] = {}
    for record in (r for r in course.records if r.chapter in chapters):
        given = course.given(record)
        if record.status == FAILED or _undecided(record, given):
            said.append(f"left out: {record.student}, {record.chapter}: {record.status}, see reasons.csv")
        elif record.status == REVIEW:
            said.append(f"look again: {record.student}, {record.chapter}: needs review, see reasons.csv")
        if (
            record.status not in (FAILED, MISSING, TAMPERED)
            and given
            and given.written
            and given.points is None
        ):
            unread.setdefault(record.chapter, []).append(record.student)
    for chapter, students in unread.items():
        names = ", ".join(students[:3]) + (", …" if len(students) > 3 else "")
        said.append(
            f"incomplete: {chapter}: written answers of {len(students)} students aren't graded ({names})"
        )
    return said


def maximum(course: Course, chapter: str) -> float:
    """The most that a chapter can earn, in checks and in words."""
    given = (course.given(record) for record in course.records if record.chapter == chapter)
    written = (sum(answer.most for answer in each.written.values()) for each in given if each is not None)
    return sum(exercise_points(chapter).values()) + max(written, default=0.0)


def points(course: Course, record: Record) -> str:
    """What is exported; '' where a person has to decide first, or nothing was handed in."""
    return "" if _undecided(record, course.given(record)) else cell(course.points_after(record))


def _undecided(record: Record, given: ByHand | None) -> bool:
    """Tampered with, and nobody has entered points for an exercise since."""
    return record.status == TAMPERED and not (given is not None and given.corrected)


def _nbgrader(course: Course, chapters: Sequence[str], to: Path) -> None:
    rows = []
    for record in (r for r in course.records if r.chapter in chapters):
        member, given = course.members[record.student], course.given(record)
        raw = total(record, given) if points(course, record) else None
        after = course.points_after(record)
        penalty = None if raw is None or after is None else round(raw - after, 6)
        most = maximum(course, record.chapter)
        policy = course.policies.get(record.chapter)
        rows.append(
            (record.chapter, shown(policy.deadline) if policy else "",
             shown(record.submitted) if record.submitted is not None else "", record.student, "", member.name,
             member.email, cell(raw), cell(penalty), points(course, record), cell(most))
        )  # fmt: skip
    write_csv(to, _NBGRADER, rows)


def _fill(
    course: Course,
    kind: str,
    chapters: Sequence[str],
    rows: list[dict[str, str]],
    names: Sequence[str],
    column: str | None,
    template: Path,
) -> list[str]:
    people = people_of(rows, names)
    listed = Roster([person for person in people if person is not None], [])
    if not listed.people:
        raise CourseError(f"{template}: no students in it, or no column that names them")
    said: list[str] = []
    fitting = 0
    for chapter in chapters:
        target = (
            _canvas_column(names, chapter, column)
            if kind == "canvas"
            else _moodle_column(names, template, column)
        )
        most = maximum(course, chapter)
        said += _other_maximum(rows, people, names, target, most, kind)
        for record in (r for r in course.records if r.chapter == chapter):
            found = _find(listed, course.members[record.student])
            if len(found) != 1:
                fits = "fits several rows" if found else "isn't in it"
                if record.status != MISSING:
                    said.append(f"left out: {record.student} {fits}: {template.name}")
                continue
            fitting += 1
            value = points(course, record)
            if value:
                row = next(n for n, person in enumerate(people) if person is found[0])
                rows[row][target] = value
    if not fitting:
        raise CourseError(
            f"{template}: none of its students was graded into {course.out}: is it another class's?"
        )
    return said


def _find(listed: Roster, member: Member) -> list[Person]:
    return listed.match(member.moodle, member.canvas, member.id, member.email, member.name)


def _canvas_column(names: Sequence[str], chapter: str, column: str | None) -> str:
    """The column of a chapter: named, or the only one whose name holds the chapter's name or number."""
    own = [name for name in names if name.strip() not in _CANVAS]
    if column is not None:
        fits = [name for name in own if name == column] or [n for n in own if key(column) in key(n)]
    else:
        fits = [name for name in own if key(chapter[3:]) in key(name)]
        number = int(chapter[:2])
        fits = fits or [n for n in own if re.search(rf"\bchapter\s*0*{number}\b", n, re.IGNORECASE)]
    if len(fits) == 1:
        return fits[0]
    what = "several columns" if fits else "no column"
    raise CourseError(
        f"{what} for {chapter}: say --column NAME, one of {', '.join(map(repr, (fits or own)[:8]))}"
    )


#: Moodle's column of grades, in the languages that we know.
_GRADE, _MAXIMUM = ("grade", "bewertung"), ("maximumgrade", "bestwertung")


def _moodle_column(names: Sequence[str], template: Path, column: str | None) -> str:
    for name in names:
        if key(name) == key(column) if column is not None else key(name) in _GRADE:
            return name
    raise CourseError(
        f"{template}: no column {column or 'Grade'!r}: is it the assignment's grading worksheet? In another "
        f"language than English or German say --column NAME, one of {', '.join(map(repr, names[:10]))}"
    )


def _other_maximum(
    rows: Sequence[dict[str, str]],
    people: Sequence[Person | None],
    names: Sequence[str],
    target: str,
    most: float,
    kind: str,
) -> list[str]:
    """A line where the LMS reckons with another maximum than the chapter has."""
    if kind == "canvas":
        texts = [row[target] for row, person in zip(rows, people, strict=True) if person is None]
    else:
        texts = [row[name] for row in rows[:1] for name in names if key(name) in _MAXIMUM]
    for text in texts:
        try:
            there = float(text)
        except ValueError:
            continue
        if there != most:
            return [f"{target!r} has {there:g} points there and {most:g} here: nothing was rescaled"]
    return []
