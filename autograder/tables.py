"""The tables of a graded course, made of the records and of what was given by hand since.

    grades.csv      student,chapter,exercise,points,max_points,status
    totals.csv      student,chapter,points,max_points,manual_points,status
    reasons.csv     student,chapter,status,reason: a line for every repair, doubt and failure
    late.csv        student,chapter,submitted,time_from,deadline,days_late,policy,points,points_after
                    for chapters with a deadline; points include those by hand, before and after the policy

grades.csv and totals.csv hold what the work is worth, whenever it came; what lateness takes stands in
late.csv alone, and exports use it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autograder import late
from autograder.course import CourseError, write_atomically
from autograder.feedback import final_points, total
from autograder.gradebook import ByHand, by_hand
from autograder.records import (
    FAILED,
    MISSING,
    Record,
    exercise_points,
    nbgrader_ids,
    read_record,
    record_path,
)  # fmt: skip
from autograder.roster import shown
from autograder.submissions import Student


@dataclass(frozen=True)
class Member:
    """Who a student is to an LMS; `id` is the name in every table."""

    id: str
    nbgrader_id: str
    name: str = ""
    email: str = ""
    moodle: str = ""
    canvas: str = ""


@dataclass
class Course:
    """All that tables, exports and reports are made of."""

    out: Path
    members: dict[str, Member]
    records: list[Record]
    manual: Mapping[tuple[str, str], ByHand]
    policies: Mapping[str, late.Policy]

    def given(self, record: Record) -> ByHand | None:
        return self.manual.get((self.members[record.student].nbgrader_id, record.chapter))

    def chapters(self) -> list[str]:
        return sorted({record.chapter for record in self.records})

    def points_after(self, record: Record) -> float | None:
        """What counts: all points, after the policy for late work; None where there are none."""
        if record.status in (FAILED, MISSING):
            return None
        points = total(record, self.given(record))
        policy = self.policies.get(record.chapter)
        if policy is None or record.submitted is None:
            return points
        return policy.after(points, record.submitted)


def remember(out: Path, students: Sequence[Student], chapters: Sequence[str]) -> None:
    """Who was in this run: exports and reports need it, and other chapters' runs."""
    members, by_chapter = _read_class(out)
    ids = nbgrader_ids([student.id for student in students])
    for student, nbgrader_id in zip(students, ids, strict=True):
        members[student.id] = Member(
            student.id, nbgrader_id, student.name, student.email, student.moodle, student.canvas
        )
    for chapter in chapters:
        by_chapter[chapter] = [student.id for student in students]
    data = {"students": [asdict(m) for _, m in sorted(members.items())], "chapters": by_chapter}
    write_atomically(out / "class.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _read_class(out: Path) -> tuple[dict[str, Member], dict[str, list[str]]]:
    path = out / "class.json"
    try:
        data = json.loads(path.read_text("utf-8"))
        return {m["id"]: Member(**m) for m in data["students"]}, dict(data["chapters"])
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CourseError(f"{path} can't be read ({error}): delete it and grade again") from None


def course(out: Path) -> Course:
    """What was graded into `out`, by all runs. Raises CourseError where nothing was."""
    members, by_chapter = _read_class(out)
    if not by_chapter:
        raise CourseError(
            f"nothing was graded into {out}: first run `autograder grade SUBMISSIONS --out {out}`"
        )
    records = []
    for chapter, students in sorted(by_chapter.items()):
        for student in students:
            record = read_record(record_path(out, members[student].nbgrader_id, chapter))
            if record is not None and record.student == student:
                records.append(record)
    records.sort(key=lambda r: (r.student, r.chapter))
    return Course(out, members, records, by_hand(out), late.kept(out))


def write(found: Course) -> None:
    """All tables, each replaced as a whole."""
    grades: list[tuple[object, ...]] = []
    totals: list[tuple[object, ...]] = []
    reasons: list[tuple[object, ...]] = []
    times: list[tuple[object, ...]] = []
    for r in found.records:
        given, maximum = found.given(r), exercise_points(r.chapter)
        points = final_points(r, given)
        for number, top in maximum.items():
            grades.append((r.student, r.chapter, number, cell(points.get(number)), top, r.status))
        known = [p for p in points.values() if p is not None]
        sum_ = cell(round(sum(known), 6) if known else None)
        written = "" if given is None or r.status in (FAILED, MISSING) else cell(given.points)
        totals.append((r.student, r.chapter, sum_, sum(maximum.values()), written, r.status))
        reasons += [(r.student, r.chapter, r.status, reason) for reason in [*r.reasons, *r.doubts]]
        if given is not None:
            for number, by_person in given.corrected.items():
                text = (
                    f"exercise {number}: {by_person:g} points by hand, {cell(r.points.get(number))} computed"
                )
                reasons.append((r.student, r.chapter, r.status, text))
        policy = found.policies.get(r.chapter)
        if policy is not None and r.submitted is not None:
            before = None if r.status in (FAILED, MISSING) else total(r, given)
            times.append(
                (r.student, r.chapter, shown(r.submitted), r.time_from, shown(policy.deadline),
                 policy.days(r.submitted), policy.text, cell(before), cell(found.points_after(r)))
            )  # fmt: skip
    write_csv(found.out / "grades.csv", "student,chapter,exercise,points,max_points,status", grades)
    write_csv(found.out / "totals.csv", "student,chapter,points,max_points,manual_points,status", totals)
    write_csv(found.out / "reasons.csv", "student,chapter,status,reason", reasons)
    if found.policies:
        header = "student,chapter,submitted,time_from,deadline,days_late,policy,points,points_after"
        write_csv(found.out / "late.csv", header, times)


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def write_csv(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    write_atomically(path, csv_text([header.split(","), *rows]))


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_harmless(value) for value in row] for row in rows)
    return text.getvalue()


def _harmless(value: object) -> object:
    """A text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
