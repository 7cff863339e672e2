"""Points into an LMS's own file, the tables, and the class report."""

from __future__ import annotations

import csv
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from autograder import late, tables
from autograder.course import CourseError
from autograder.export import export
from autograder.gradebook import Answer, ByHand
from autograder.records import FAILED, GRADED, MISSING, Record, exercise_points
from autograder.report import html, summaries, text
from autograder.roster import read_roster
from autograder.submissions import Student
from autograder.tables import Course, Member

CHAPTER = "01_memory_basics"
RULE = late.policy("2026-12-01T23:59+01:00", "10%/day, at most 3 days")

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Chapter 1: memory basics (4711),Essay (12)
    Points Possible,,,,,13,5
"Ek, Anna",11,s101,aek,A,1,3
"Li, Bo",12,s102,bli,A,,4
"Øst, Cy",13,s103,cy,A,7,
"Student, Test",99,,,A,,
"""
MOODLE = """Identifier,Full name,Email address,Status,Grade,Maximum grade,Feedback comments
Participant 101,Anna Ek,a@x.org,Submitted,,13.00,
Participant 102,Bo Li,b@x.org,Submitted,5.00,13.00,
Participant 103,Somebody Blind,c@x.org,Submitted,,13.00,
"""


def course(out: Path) -> Course:
    """Anna: 9 and 2 by hand; Bo: 10, two days late; Cy: failed; Di: in no list; Ed: nothing handed in."""
    full = dict(exercise_points(CHAPTER))
    in_time, too_late = RULE.deadline - 5, RULE.deadline + 100_000
    records = [
        Record(
            "Anna Ek", CHAPTER, GRADED, points=full | {"1.1": 1}, submitted=in_time, time_from="the roster"
        ),
        Record("Bo Li", CHAPTER, GRADED, points=full, submitted=too_late, time_from="the file's time"),
        Record("Cy Ost", CHAPTER, FAILED, ["broken"], points=dict.fromkeys(full)),
        Record("Di", CHAPTER, "needs_review", doubts=["died"], points=full | {"1.1": 0}),
        Record("Ed", CHAPTER, MISSING, points=dict.fromkeys(full)),
    ]
    records[0].messages = {"1.1": ["bandwidth(77777, 3) isn't 4 GB/s"]}
    records[3].messages = {"1.1": ["bandwidth(12345, 9) isn't 8 GB/s"]}
    records[1].seconds = 4
    members = {
        r.student: Member(r.student, r.student, r.student, "", str(101 + n)) for n, r in enumerate(records)
    }
    manual = {
        ("Anna Ek", CHAPTER): ByHand(2, {"written-1-6": Answer(2, 3)}, {}, {}),
        ("Bo Li", CHAPTER): ByHand(None, {"written-1-6": Answer(None, 3)}, {}, {}),
    }
    return Course(out, members, records, manual, {CHAPTER: RULE})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_canvas(tmp_path: Path) -> None:
    (tmp_path / "gradebook.csv").write_text(CANVAS, "utf-8")
    said = export(course(tmp_path), "canvas", tmp_path / "o.csv", template=tmp_path / "gradebook.csv")
    found = rows(tmp_path / "o.csv")
    assert list(found[0]) == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section",
                              "Chapter 1: memory basics (4711)"]  # fmt: skip
    assert [row["Chapter 1: memory basics (4711)"] for row in found] == ["13", "11", "8", "7", ""]
    assert [row["ID"] for row in found] == ["", "11", "12", "13", "99"]
    assert [line.partition(":")[0] for line in said] == ["left out", "look again", "incomplete", "left out"]
    assert "Di isn't in it" in said[3]


def test_moodle(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("\ufeff" + MOODLE, "utf-8")
    export(course(tmp_path), "moodle", tmp_path / "o.csv", template=tmp_path / "sheet.csv")
    assert [row["Grade"] for row in rows(tmp_path / "o.csv")] == ["11", "8", ""]
    assert list(rows(tmp_path / "o.csv")[0]) == MOODLE.splitlines()[0].split(",")


def test_nbgraders_columns(tmp_path: Path) -> None:
    export(course(tmp_path), "nbgrader", tmp_path / "o.csv")
    anna, bo, cy, _, ed = rows(tmp_path / "o.csv")
    assert (anna["raw_score"], anna["score"], anna["max_score"]) == ("11", "11", "13")
    assert (bo["raw_score"], bo["late_submission_penalty"], bo["score"]) == ("10", "2", "8")
    assert cy["score"] == "" and ed["score"] == ""


def test_another_maximum_is_said(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(CANVAS.replace(",13,5", ",100,5"), "utf-8")
    said = export(course(tmp_path), "canvas", tmp_path / "o.csv", template=tmp_path / "g.csv")
    assert any("has 100 points there and 13 here" in line for line in said)


@pytest.mark.parametrize(
    ("kind", "template", "column", "message"),
    [
        ("excel", None, None, "unknown format"),
        ("canvas", None, None, "needs --template"),
        (
            "canvas",
            CANVAS.replace("Chapter 1: memory basics", "Week 3"),
            None,
            "no column for 01_memory_basics",
        ),
        ("canvas", CANVAS.replace("Essay", "Chapter 1: memory basics, again"), None, "several columns"),
        ("moodle", CANVAS, None, "no column 'Grade'"),
        ("moodle", "Grade,x\n1,2\n", None, "no students in it"),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path, kind: str, template: str | None, column: str | None, message: str
) -> None:
    path = None
    if template is not None:
        path = tmp_path / "t.csv"
        path.write_text(template, "utf-8")
    with pytest.raises(CourseError, match=message):
        export(course(tmp_path), kind, tmp_path / "o.csv", template=path, column=column)
    assert not (tmp_path / "o.csv").exists()


def test_a_column_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(CANVAS, "utf-8")
    export(course(tmp_path), "canvas", tmp_path / "o.csv", template=tmp_path / "g.csv", column="Essay (12)")
    assert [row["Essay (12)"] for row in rows(tmp_path / "o.csv")][1:3] == ["11", "8"]


def test_tables_hold_points_before_and_after(tmp_path: Path) -> None:
    tables.write(course(tmp_path))
    totals = {row["student"]: row for row in rows(tmp_path / "totals.csv")}
    assert totals["Bo Li"]["points"] == "10" and totals["Anna Ek"]["manual_points"] == "2"
    found = {row["student"]: row for row in rows(tmp_path / "late.csv")}
    assert (found["Bo Li"]["points"], found["Bo Li"]["points_after"]) == ("10", "8")
    assert found["Bo Li"]["days_late"] == "2" and found["Bo Li"]["time_from"] == "the file's time"
    assert found["Anna Ek"]["points_after"] == "11" and "Ed" not in found


def test_a_correction_by_hand_counts_and_is_said(tmp_path: Path) -> None:
    made = course(tmp_path)
    manual = {("Di", CHAPTER): ByHand(None, {}, {"1.1": 2}, {})}
    tables.write(replace(made, manual=manual))
    assert {r["student"]: r["points"] for r in rows(tmp_path / "totals.csv")}["Di"] == "10"
    reasons = [row["reason"] for row in rows(tmp_path / "reasons.csv") if row["student"] == "Di"]
    assert reasons == ["died", "exercise 1.1: 2 points by hand, 0 computed"]


def test_what_was_tampered_with_is_exported_once_a_person_decided(tmp_path: Path) -> None:
    made = course(tmp_path)
    made.records[3].status = "tampered"
    assert any("left out: Di" in line for line in export(made, "nbgrader", tmp_path / "o.csv"))
    assert rows(tmp_path / "o.csv")[3]["score"] == ""
    decided = replace(made, manual={("Di", CHAPTER): ByHand(None, {}, {"1.1": 0.5}, {})})
    assert not any("Di" in line for line in export(decided, "nbgrader", tmp_path / "o.csv"))
    assert rows(tmp_path / "o.csv")[3]["score"] == "8.5"


def test_who_is_who_is_kept(tmp_path: Path) -> None:
    tables.remember(tmp_path, [Student("s1", name="Anna", moodle="101")], [CHAPTER])
    tables.remember(tmp_path, [Student("s2", name="Bo", canvas="12")], ["02_four_consumers"])
    found = tables.course(tmp_path)
    assert found.members["s1"].moodle == "101" and found.members["s2"].canvas == "12"
    with pytest.raises(CourseError, match="nothing was graded"):
        tables.course(tmp_path / "elsewhere")


def test_the_report_counts_and_groups_wrong_answers(tmp_path: Path) -> None:
    found = summaries(course(tmp_path))
    row = found[0].rows[0]
    assert (row.full, row.part, row.none) == (1, 1, 1) and row.mean == 1
    assert len(row.wrong) == 1 and row.wrong[0].students == ["Anna Ek", "Di"]
    shown = text(found)
    assert (
        "2 graded, 1 needs_review, 1 failed, 1 missing, 1 late" in shown and "needs_review: Di: died" in shown
    )
    assert "77777" not in shown and max(map(len, shown.splitlines())) < 130
    assert "Anna Ek" in html(found) and "default-src 'none'" in html(found)


def test_a_chapter_that_was_not_graded_is_said(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=r"03_deep wasn't graded into .*: 01_memory_basics was"):
        export(course(tmp_path), "nbgrader", tmp_path / "x.csv", chapters=["03_deep"])


GERMAN = """ID,Vollständiger Name,E-Mail-Adresse,Status,Bewertung,Bestwertung,Zuletzt geändert (Abgabe)
Teilnehmer/in101,Anna Ek,a@x.org,Abgegeben,,13.00,"Montag, 30. März 2026, 23:03"
Teilnehmer/in102,Bo Li,b@x.org,Abgegeben,,13.00,-
"""


def test_a_german_worksheet_and_one_in_any_language(tmp_path: Path) -> None:
    template = tmp_path / "worksheet.csv"
    template.write_text(GERMAN, "utf-8")
    [anna, bo] = read_roster(template).people
    assert (anna.id, anna.number, anna.email, bo.submitted) == ("Anna Ek", "101", "a@x.org", None)
    assert anna.submitted == datetime(2026, 3, 30, 23, 3).timestamp()
    to = tmp_path / "moodle.csv"
    export(course(tmp_path), "moodle", to, template=template, chapters=[CHAPTER])
    assert [row["Bewertung"] for row in csv.DictReader(to.read_text("utf-8").splitlines())] == ["11", "8"]
    template.write_text(MOODLE.replace("Grade", "Piste", 1), "utf-8")
    with pytest.raises(CourseError, match="--column NAME, one of"):
        export(course(tmp_path), "moodle", to, template=template, chapters=[CHAPTER])
    export(course(tmp_path), "moodle", to, template=template, chapters=[CHAPTER], column="Piste")
    assert [row["Piste"] for row in csv.DictReader(to.read_text("utf-8").splitlines())][:2] == ["11", "8"]


def test_a_template_of_another_class_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "worksheet.csv"
    template.write_text("Identifier,Full name,Grade\nParticipant 900,Zoe Zu,\n", "utf-8")
    with pytest.raises(CourseError, match="none of its students"):
        export(course(tmp_path), "moodle", tmp_path / "x.csv", template=template, chapters=[CHAPTER])
    assert not (tmp_path / "x.csv").exists()
