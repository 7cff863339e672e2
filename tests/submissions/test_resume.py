"""What a kill can leave of a gradebook is finished by the next run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autograder import build
from autograder.course import CourseError
from autograder.gradebook import prepare
from tests.autograder.small_course import small_course
from tests.submissions.case import CHAPTER


def _chapters(out: Path) -> int:
    with closing(sqlite3.connect(out / "gradebook.db")) as book:
        query = "select count(*) from assignment a join notebook n on n.assignment_id = a.id join base_cell b"
        return int(book.execute(f"{query} on b.notebook_id = n.id").fetchone()[0])


@pytest.mark.parametrize("left", ["nothing in it", "some tables", "tables without a chapter"])
def test_a_gradebook_that_was_being_made(tmp_path: Path, left: str) -> None:
    [chapter] = small_course(tmp_path / "c", CHAPTER)
    out, built = tmp_path / "graded", [build.build(chapter)]
    out.mkdir()
    prepare(out, built)
    whole = _chapters(out)
    assert whole > 5
    (out / "course" / f".{CHAPTER}.released").unlink()
    with closing(sqlite3.connect(out / "gradebook.db")) as book:
        tables = [name for (name,) in book.execute("select name from sqlite_master where type = 'table'")]
        for name in tables:
            if left == "tables without a chapter":
                book.execute(f"delete from {name}")
            elif left == "nothing in it" or name in ("assignment", "grade", "base_cell"):
                book.execute(f"drop table {name}")
        book.commit()
    prepare(out, built)
    assert _chapters(out) == whole


def test_a_file_that_is_no_gradebook_is_refused(tmp_path: Path) -> None:
    [chapter] = small_course(tmp_path / "c", CHAPTER)
    out = tmp_path / "graded"
    out.mkdir()
    with closing(sqlite3.connect(out / "gradebook.db")) as book:
        book.execute("create table somebody_elses (x)")
        book.commit()
    with pytest.raises(CourseError, match="can't be used"):
        prepare(out, [build.build(chapter)])
