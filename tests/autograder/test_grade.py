"""One class, graded once through the real command: honest, damaged and dishonest submissions together."""

from __future__ import annotations

import copy
import csv
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from autograder.course import Chapter
from tests.autograder.small_course import edit, hand_in, small_course, solved, untouched
from tests.exercises import mutants_1, mutants_2, mutants_3, mutants_4, mutants_5, mutants_6, mutants_7

CHAPTER = "01_memory_basics"
WARNS = "import sys, warnings; warnings.warn('careful'); print('careful', file=sys.stderr)\n"


FORGED = """
import os
from IPython.display import display

def bandwidth(bus_bits, gbps_per_pin):
    seed = int(os.environ["MEMLAB_CHECK_SEED"])
    evidence = {"exercise": "1.1", "seed": seed, "evidence": {"bandwidth": []}}
    display({"application/vnd.memlab.evidence+json": evidence}, raw=True)
    raise KeyboardInterrupt
"""


def command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autograder.cli", *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def without_metadata(notebook: Any) -> Any:
    """As an editor saves that knows nothing of nbgrader: no metadata, new ids."""
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        cell.id = f"colab{number}"
    return notebook


def twice(notebook: Any) -> Any:
    """A check cell and its exercise copied and pasted with all their metadata."""
    copies = [copy.deepcopy(cell) for cell in notebook.cells if cell.id in ("ex-1-1", "check-1-1")]
    for number, cell in enumerate(copies):
        cell.id = f"copy{number}"
    notebook.cells.extend(copies)
    return notebook


def class_of(root: Path, chapter: Chapter) -> Path:
    folder = root / "submissions"
    hand_in(folder, "right", chapter, solved(chapter))
    hand_in(folder, "untouched", chapter, untouched(chapter))
    hand_in(folder, "renamed", chapter, solved(chapter), f"Copy of {CHAPTER} (1).ipynb")
    hand_in(folder, "deeper", chapter, solved(chapter), f"work/notebooks/{CHAPTER}.ipynb")
    hand_in(folder, "broken", chapter, b'{"cells": [')
    hand_in(folder, "=1+1", chapter, solved(chapter))
    (folder / "nothing").mkdir()
    (folder / "notes.txt").write_text("not a submission")

    warned = solved(chapter)
    for cell in warned.cells:
        if cell.cell_type == "code" and not cell.id.startswith("check"):
            cell.source = WARNS + cell.source
    hand_in(folder, "warns", chapter, warned)

    hand_in(
        folder, "kills", chapter, edit(solved(chapter), "ex-1-2", lambda s: s + "\nimport os; os._exit(3)")
    )
    fake = "import memlab\nmemlab.check = lambda *answer: 2\n"
    hand_in(folder, "fakes", chapter, edit(solved(chapter), "ex-1-1", lambda s: fake + s))
    hand_in(folder, "answers", chapter, edit(solved(chapter), "check-1-1", lambda s: "2"))

    hand_in(folder, "stripped", chapter, without_metadata(solved(chapter)))
    hand_in(folder, "duplicates", chapter, twice(solved(chapter)))
    lost = solved(chapter)
    lost.cells = [cell for cell in lost.cells if cell.id != "check-1-1"]
    hand_in(folder, "deletes", chapter, lost)
    turned = solved(chapter)
    turned.cells.reverse()
    hand_in(folder, "turns", chapter, turned)

    other = solved(chapter)
    for cell in other.cells:
        if "exercise" in cell.metadata.get("memlab", {}):
            cell.id, cell.metadata, cell.source = cell.id.replace("-1-", "-9-"), {}, "print(9)"
    hand_in(folder, "other chapter", chapter, other)
    half = edit(solved(chapter), "ex-1-1", lambda s: s + "\n# \ud800")
    hand_in(folder, "surrogate", chapter, json.dumps(half).encode())
    hand_in(folder, "null", chapter, b'{"cells": null, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}')
    hand_in(folder, "unnamed", chapter, solved(chapter), "homework.ipynb")
    hand_in(folder, "exits", chapter, edit(solved(chapter), "ex-1-2", lambda s: s + "\nexit()"))
    huge = "\ndef visible(nbytes):\n    return 10**400, 10**400\n"
    hand_in(folder, "huge", chapter, edit(solved(chapter), "ex-1-1", lambda s: s + huge))
    hand_in(folder, "forges", chapter, edit(solved(chapter), "ex-1-1", lambda s: s + FORGED))

    path = hand_in(root / "aside", "zipped", chapter, solved(chapter))
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.write(path, f"../../etc/{CHAPTER}.ipynb")
    (folder / "bad.zip").write_bytes(b"PK\x03\x04 and then nothing")
    hand_in(folder, "older", chapter, solved(chapter))
    newer = hand_in(folder, "older", chapter, untouched(chapter), f"{CHAPTER} (2).ipynb")
    os.utime(newer, (4e9, 4e9))
    (folder / "linked").mkdir()
    (folder / "linked" / f"{CHAPTER}.ipynb").symlink_to(folder / "right" / f"{CHAPTER}.ipynb")
    return folder


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("course")
    [chapter] = small_course(root, CHAPTER)
    folder = class_of(root, chapter)
    before = sorted(path.name for path in folder.rglob("*"))
    result = command(root, "grade", "submissions", "--out", "graded")
    out = root / "graded"
    assert (out / "totals.csv").exists(), result.stderr
    return {
        "root": root,
        "out": out,
        "result": result,
        "untouched_input": before == sorted(path.name for path in folder.rglob("*")),
        "totals": {row["student"]: row for row in table(out / "totals.csv")},
        "grades": table(out / "grades.csv"),
        "reasons": joined(table(out / "reasons.csv")),
    }


def joined(rows: list[dict[str, str]]) -> dict[str, str]:
    """All reasons of each student."""
    found: dict[str, str] = {}
    for row in rows:
        found[row["student"]] = f"{found.get(row['student'], '')}{row['reason']}\n"
    return found


FULL = {"points": "10", "max_points": "10", "status": "graded"}
EXPECTED = {
    "right": FULL,
    "renamed": FULL,
    "deeper": FULL,
    "warns": FULL,
    "zipped": FULL,
    "stripped": FULL,
    "duplicates": FULL,
    "deletes": FULL,
    "turns": FULL,
    "answers": FULL,
    "'=1+1": FULL,
    "untouched": {"points": "0", "status": "graded"},
    "older": {"points": "0", "status": "graded"},
    "broken": {"points": "", "status": "failed"},
    "linked": {"points": "", "status": "failed"},
    "bad": {"points": "", "status": "failed"},
    "nothing": {"points": "", "status": "missing"},
    "kills": {"points": "8", "status": "needs_review"},
    "exits": {"points": "8", "status": "needs_review"},
    "huge": {"points": "9", "status": "graded"},
    "forges": {"points": "8", "status": "tampered"},
    "other chapter": {"points": "", "status": "failed"},
    "surrogate": FULL,
    "null": {"points": "", "status": "failed"},
    "unnamed": FULL,
    "fakes": {"points": "0", "status": "tampered"},
}


@pytest.mark.parametrize("student", EXPECTED)
def test_points_and_status(graded: dict[str, Any], student: str) -> None:
    row = graded["totals"][student]
    assert {key: row[key] for key in EXPECTED[student]} == EXPECTED[student], graded["reasons"].get(student)


def test_nobody_is_left_out(graded: dict[str, Any]) -> None:
    assert set(graded["totals"]) == set(EXPECTED)
    assert {row["exercise"] for row in graded["grades"]} == {"1.1", "1.2", "1.3", "1.4", "1.5"}
    assert len(graded["grades"]) == 5 * len(EXPECTED)
    assert list(graded["grades"][0]) == ["student", "chapter", "exercise", "points", "max_points", "status"]
    assert "left out: notes.txt" in graded["result"].stderr


def test_what_could_not_be_graded_says_why(graded: dict[str, Any]) -> None:
    assert "cut off in the middle" in graded["reasons"]["broken"]
    assert "a link" in graded["reasons"]["linked"]
    assert "not a readable zip" in graded["reasons"]["bad"]
    assert "exercise 1.2: the kernel died" in graded["reasons"]["kills"]
    assert "exercise 1.2: exit() was called" in graded["reasons"]["exits"]
    assert "of chapter 9, not of chapter 1" in graded["reasons"]["other chapter"]
    assert "without evidence" in graded["reasons"]["fakes"]
    assert graded["result"].returncode == 1
    assert "failed: broken" in graded["result"].stderr
    assert "Traceback" not in graded["result"].stderr


def assert_gradebook_agrees(out: Path, chapter: str) -> None:
    from nbgrader.api import Gradebook

    totals = {row["student"]: row["points"] for row in table(out / "totals.csv")}
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
        for submission in gradebook.assignment_submissions(chapter):
            grades = [g for n in submission.notebooks for g in n.grades if g.cell.cell_type == "code"]
            if totals.get(submission.student.first_name):
                assert sum(g.auto_score or 0 for g in grades) == float(totals[submission.student.first_name])


def test_gradebook_and_table_agree(graded: dict[str, Any]) -> None:
    assert_gradebook_agrees(graded["out"], CHAPTER)


def test_feedback_for_everybody_graded_and_no_script_of_theirs(graded: dict[str, Any]) -> None:
    page = (graded["out"] / "feedback" / "right" / f"{CHAPTER}.html").read_text("utf-8")
    assert "check" in page and "exercise 1.1" in page
    assert "Content-Security-Policy" in page.split("<script")[0]
    for student, row in graded["totals"].items():
        made = graded["out"] / "feedback" / student.lstrip("'") / f"{CHAPTER}.html"
        assert made.exists() == (row["status"] != "missing"), student


def test_submissions_are_not_changed(graded: dict[str, Any]) -> None:
    assert graded["untouched_input"]


def test_a_second_run_grades_nothing_again_and_says_the_same(graded: dict[str, Any]) -> None:
    records = graded["out"] / "records" / "right" / f"{CHAPTER}.json"
    before, time = (graded["out"] / "grades.csv").read_bytes(), records.stat().st_mtime_ns
    command(graded["root"], "grade", "submissions", "--out", "graded")
    assert (graded["out"] / "grades.csv").read_bytes() == before
    assert records.stat().st_mtime_ns == time


def test_points_given_by_hand_have_a_column_of_their_own(graded: dict[str, Any], tmp_path: Path) -> None:
    from nbgrader.api import Gradebook

    out = shutil.copytree(graded["out"], tmp_path / "graded")
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
        submission = gradebook.find_submission(CHAPTER, "right")
        written = [g for n in submission.notebooks for g in n.grades if g.cell.cell_type == "markdown"]
        if not written:
            pytest.skip("this chapter has no written answer")
        for grade in written:
            grade.manual_score, grade.needs_manual_grade = 2, False
        gradebook.db.commit()
    result = command(graded["root"], "grade", "submissions", "--out", str(out))
    rows = {row["student"]: row for row in table(out / "totals.csv")}
    assert result.returncode == 1  # the broken one still is
    assert rows["right"]["manual_points"] == "2" and rows["right"]["points"] == "10"
    assert rows["renamed"]["manual_points"] == ""
    assert "12 points" in (out / "feedback" / "right" / f"{CHAPTER}.html").read_text("utf-8")

    # graded anew because something else changed: what a person gave for the same text stays
    (out / "records" / "right" / f"{CHAPTER}.json").unlink()
    command(graded["root"], "grade", "submissions", "--out", str(out))
    rows = {row["student"]: row for row in table(out / "totals.csv")}
    assert rows["right"]["manual_points"] == "2" and rows["right"]["points"] == "10"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("grade", "nowhere", "--out", "x"), "no folder nowhere"),
        (("grade", "submissions", "--out", "/proc/grades"), "can't write to /proc/grades"),
        (("grade", "submissions", "--out", "x", "--chapter", "9"), "unknown chapter '9'"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_so_in_one_line(
    graded: dict[str, Any], words: tuple[str, ...], message: str
) -> None:
    result = command(graded["root"], *words)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1


# -- every planted wrong answer, through nbgrader ----------------------------------------------------------


def mutated(chapter: Chapter, mutants: Any, number: int) -> tuple[Any, set[str]]:
    """The right submission with the `number`-th mutant of every exercise that has so many."""
    notebook, changed = solved(chapter), set()
    for exercise, wrong in mutants.MUTANTS.items():
        if number < len(wrong):
            change = list(wrong.values())[number]
            cell = next(c for c in notebook.cells if c.id == f"ex-{exercise.replace('.', '-')}")
            if isinstance(change, str):
                cell.source = change
            else:
                for old, new in change:
                    assert old in cell.source
                    cell.source = cell.source.replace(old, new)
            changed.add(exercise)
    return notebook, changed


@pytest.mark.parametrize(
    "mutants",
    [mutants_1, mutants_2, mutants_3, mutants_4, mutants_5, mutants_6, mutants_7],
    ids=["chapter 1", "chapter 2", "chapter 3", "chapter 4", "chapter 5", "chapter 6", "chapter 7"],
)
def test_every_planted_wrong_answer_loses_points_through_nbgrader(mutants: Any, tmp_path: Path) -> None:
    name = {
        mutants_1: CHAPTER,
        mutants_2: "02_four_consumers",
        mutants_3: "03_deep",
        mutants_4: "04_wide",
        mutants_5: "05_big_data",
        mutants_6: "06_combined",
        mutants_7: "07_faq",
    }[mutants]
    [chapter] = small_course(tmp_path, name)
    expected = {}
    for number in range(max(len(wrong) for wrong in mutants.MUTANTS.values())):
        notebook, expected[f"m{number}"] = mutated(chapter, mutants, number)
        hand_in(tmp_path / "submissions", f"m{number}", chapter, notebook)
    hand_in(tmp_path / "submissions", "right", chapter, solved(chapter))
    expected["right"] = set()
    command(tmp_path, "grade", "submissions", "--out", "graded")
    for row in table(tmp_path / "graded" / "grades.csv"):
        full = float(row["points"]) == float(row["max_points"])
        assert full == (row["exercise"] not in expected[row["student"]]), row
    assert_gradebook_agrees(tmp_path / "graded", chapter.name)


def test_a_notebook_of_another_chapter_earns_no_zero(tmp_path: Path) -> None:
    """By its name the whole course may lie there: missing. Renamed, it is the wrong file: failed."""
    first, second = small_course(tmp_path, CHAPTER, "02_four_consumers")
    hand_in(tmp_path / "in", "kim", first, untouched(first))
    hand_in(tmp_path / "in", "lou", first, solved(first), f"{second.name}.ipynb")
    result = command(tmp_path, "grade", "in", "--out", "graded", "--chapter", "2")
    assert result.returncode == 1 and "1 failed, 1 missing" in result.stdout
    rows = {row["student"]: row for row in table(tmp_path / "graded" / "totals.csv")}
    assert (rows["kim"]["status"], rows["kim"]["points"]) == ("missing", "")
    assert (rows["lou"]["status"], rows["lou"]["points"]) == ("failed", "")
    for student in ("kim", "lou"):
        assert f"{student}, 02_four_consumers: " in result.stderr
    assert result.stderr.count("this is the notebook of chapter 1 (01_memory_basics), not of chapter 2") == 2
