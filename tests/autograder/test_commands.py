"""From an LMS's zip to an LMS's file, through the real commands. Nothing in it needs a kernel."""

from __future__ import annotations

import contextlib
import csv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autograder.cli import app
from autograder.course import CourseError
from tests.autograder.small_course import small_course

CHAPTER = "01_memory_basics"
WORKSHEET = """Identifier,Full name,Email address,Grade,Maximum grade,Last modified (submission)
Participant 101,Anna Ek,a@x.org,4,10.00,"Tuesday, 1 December 2026, 8:00 PM"
Participant 102,Bo Li,b@x.org,,10.00,"Tuesday, 1 December 2026, 8:00 PM"
Participant 103,Cy Roy,c@x.org,,10.00,-
"""


def command(root: Path, *words: str) -> Any:
    """Runs a command in this process: each new one would load nbgrader first."""
    with contextlib.chdir(root):
        return CliRunner().invoke(app, words)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A course, a Moodle download in which nothing can be run, and its grading worksheet; graded once."""
    root = tmp_path_factory.mktemp("moodle")
    small_course(root, CHAPTER)
    with zipfile.ZipFile(root / "download.zip", "w") as archive:
        archive.writestr("Anna Ek_101_assignsubmission_onlinetext_/onlinetext.html", "hello")
        archive.writestr(f"Bo Li_102_assignsubmission_file_/{CHAPTER}.ipynb", "{broken")
        archive.writestr("Eve_999_assignsubmission_file_/hw.rar", "Rar!")
    (root / "worksheet.csv").write_text(WORKSHEET, "utf-8")
    return root


@pytest.fixture(scope="module")
def graded(root: Path) -> Any:
    return command(
        root, "grade", "download.zip", "--out", "graded", "--roster", "worksheet.csv",
        "--deadline", "2026-12-01T23:59+01:00", "--late", "10%/day", "--sandbox", "none",
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_everybody_of_the_roster_has_a_row(root: Path, graded: Any) -> None:
    assert graded.exit_code == 1, graded.stderr
    status = {row["student"]: row["status"] for row in rows(root / "graded" / "totals.csv")}
    assert status == {"Anna Ek": "failed", "Bo Li": "failed", "Cy Roy": "missing", "Eve": "failed"}
    assert "time of submission from 'Last modified (submission)'" in graded.stderr
    assert "'Eve' isn't in the roster" in graded.stderr and "Traceback" not in graded.stderr
    reasons = " ".join(row["reason"] for row in rows(root / "graded" / "reasons.csv"))
    assert (
        "typed into Moodle" in reasons and "broken JSON" in reasons and ".rar archives aren't read" in reasons
    )
    assert (root / "graded" / "deadlines.json").exists() and (root / "graded" / "late.csv").exists()
    page = (root / "graded" / "feedback" / "Eve" / f"{CHAPTER}.html").read_text("utf-8")
    assert "could not be graded" in page and "roster" not in page


def test_report_and_export(root: Path, graded: Any) -> None:
    assert graded.exit_code == 1
    result = command(root, "report", "graded")
    assert result.exit_code == 0 and "3 failed, 1 missing" in result.stdout
    assert "Eve" in (root / "graded" / "report.html").read_text("utf-8")
    result = command(root, "export", "graded", "--format", "moodle", "--template", "worksheet.csv")
    assert result.exit_code == 0 and "left out: Eve" in result.stderr
    assert [row["Grade"] for row in rows(root / "graded" / "moodle.csv")] == ["4", "", ""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("grade", "download.zip", "--out", "x", "--late", "10%/day"), "--late and --grace need --deadline"),
        (("grade", "download.zip", "--out", "x", "--deadline", "2026-12-01"), "say its zone"),
        (("grade", "download.zip", "--out", "x", "--attempt", "best"), "latest or first"),
        (("grade", "download.zip", "--out", "x", "--pattern", "hw*"), "say where the name stands"),
        (("grade", "download.zip", "--out", "x", "--roster", "solutions/none.csv"), "can't read"),
        (("grade", "worksheet.csv", "--out", "x"), "neither a folder nor an archive"),
        (("export", "nowhere", "--format", "canvas"), "nothing was graded"),
        (("export", "graded", "--format", "canvas"), "needs --template"),
        (("formgrader", "nowhere"), "nothing was graded"),
        (("formgrader", "odd/class"), "class.json can't be read"),
        (("formgrader", "odd/gradebook"), "gradebook.db can't be used"),
        (("grade", "download.zip", "--out", "odd/nbgrader"), "isn't the grader's"),
    ],
)
def test_one_line_for_what_cannot_be_done(
    root: Path, graded: Any, words: tuple[str, ...], message: str
) -> None:
    for name, file in (("class", "class.json"), ("gradebook", "gradebook.db"), ("nbgrader", "gradebook.db")):
        (root / "odd" / name / "course").mkdir(parents=True, exist_ok=True)
        (root / "odd" / name / "course" / "nbgrader_config.py").touch()
        (root / "odd" / name / file).write_bytes(b"garbage" * 400)
    result = command(root, *words)
    assert isinstance(result.exception, CourseError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
    assert not (root / "x").exists()


def test_a_seed_is_kept(root: Path, graded: Any, tmp_path: Path) -> None:
    kept = root / "graded" / "check_seed"
    words = ("grade", "download.zip", "--out", "graded")
    assert "another seed" in command(root, *words, "--seed", "one").stderr
    first = kept.read_text("utf-8")
    assert "another seed" not in command(root, *words).stderr and kept.read_text("utf-8") == first
    assert "another seed" not in command(root, *words, "--seed", "one").stderr
    assert "another seed" in command(root, *words, "--seed", "two").stderr
