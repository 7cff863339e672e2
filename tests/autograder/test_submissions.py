"""What was handed in is found, and what can't be read costs only itself."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from autograder.course import CourseError
from autograder.submissions import chapter_of, collect

CHAPTERS = ["01_memory_basics", "02_four_consumers"]


@pytest.mark.parametrize(
    ("name", "chapter"),
    [
        ("02_four_consumers.ipynb", "02_four_consumers"),
        ("Copy of 02_four_consumers (1).ipynb", "02_four_consumers"),
        ("anna-02-four-consumers-final.IPYNB", "02_four_consumers"),
        ("homework.ipynb", None),
    ],
)
def test_a_chapter_is_recognised_by_its_name_in_the_file_name(name: str, chapter: str | None) -> None:
    assert chapter_of(name, CHAPTERS) == chapter


def archive(path: Path, damage: bool = False, method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as stream:
        stream.writestr("02_four_consumers.ipynb", "x" * 5000)
        stream.writestr("__MACOSX/02_four_consumers.ipynb", "fork")
        stream.writestr(".ipynb_checkpoints/02_four_consumers-checkpoint.ipynb", "old")
    if damage:
        data = bytearray(path.read_bytes())
        data[60:75] = b"\xff" * 15
        path.write_bytes(data)


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
@pytest.mark.parametrize("damage", [False, True])
def test_archives_of_every_kind_whole_or_damaged(tmp_path: Path, method: int, damage: bool) -> None:
    archive(tmp_path / "anna.zip", damage, method)
    [student], ignored = collect(tmp_path, CHAPTERS)
    assert ignored == [] and student.id == "anna"
    [found] = student.notebooks["02_four_consumers"]
    assert (found.fault != "") == damage and (found.data == b"x" * 5000) != damage


def test_odd_entries_are_said_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "anna").mkdir()
    (tmp_path / "loose.ipynb").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "anna")
    os.mkfifo(tmp_path / "pipe.zip")
    (tmp_path / "out").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/M\xfcller\nB")).mkdir()
    students, ignored = collect(tmp_path, CHAPTERS, tmp_path / "out")
    assert sorted(s.id for s in students) == ["M\ufffdller B", "anna"]
    assert len(ignored) == 3
    for student in students:
        student.id.encode("utf-8")


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("02_four_consumers.ipynb", b"0" * (65 << 20))
    [student], _ = collect(tmp_path, CHAPTERS)
    assert "larger than 64.00 MiB" in student.notebooks["02_four_consumers"][0].fault


def test_no_folder_and_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no folder"):
        collect(tmp_path / "nowhere", CHAPTERS)
    with pytest.raises(CourseError, match="no submissions"):
        collect(tmp_path, CHAPTERS)
