"""Finds submissions: one folder or zip per student, a notebook of a chapter recognised by its file name.

The student is the outer name (the folder's, or the zip's without `.zip`); nothing inside an archive is
believed. Nothing is unpacked: notebooks are read from an archive in memory, with limits on size and number.
"""

from __future__ import annotations

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from time import mktime

from autograder.course import CourseError
from memlab.units import MIB, format_bytes

#: A notebook with all its figures is below 5 MiB; one of 100 MiB holds a flood of outputs.
MAX_NOTEBOOK = 64 * MIB
MAX_FILES = 2_000

#: What damaged, encrypted or exotic archives raise.
_UNPACK_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError, EOFError, OSError,
    ValueError, struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One notebook file: `data` is its content, or empty with the reason why it can't be read in `fault`."""

    name: str
    modified: float
    data: bytes = b""
    fault: str = ""


@dataclass
class Student:
    """What one student handed in.

    `id` is the name in every table; `unnamed` are notebooks whose name holds no chapter's name; `notes` say
    what couldn't be read.
    """

    id: str
    notebooks: dict[str, list[Found]] = field(default_factory=dict)
    unnamed: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect(
    folder: Path, chapters: Sequence[str], out: Path | None = None
) -> tuple[list[Student], list[str]]:
    """The students of a folder, by name, and a line for each thing in it that was left out.

    `out` is where the results go: it isn't a student, should it lie in the folder.

    Raises CourseError where there is no such folder or nothing in it.
    """
    if not folder.is_dir():
        raise CourseError(f"no folder {folder}: give the folder that holds one folder or zip per student")
    students: dict[str, Student] = {}
    ignored = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            continue
        if out is not None and entry.resolve() == out.resolve():
            continue
        if entry.is_symlink():
            ignored.append(f"{entry.name}: a link; links aren't followed")
        elif entry.is_dir():
            name = readable(entry.name)
            student = students.setdefault(name, Student(name))
            _sort_in(student, _in_folder(entry), chapters)
        elif entry.suffix.lower() == ".zip" and entry.is_file():
            name = readable(entry.stem)
            student = students.setdefault(name, Student(name))
            _sort_in(student, _in_zip(entry, student), chapters)
        else:
            ignored.append(f"{entry.name}: neither a folder nor a zip; each student needs one")
    if not students:
        hint = f" ({ignored[0]})" if ignored else ""
        raise CourseError(f"no submissions in {folder}{hint}: it should hold one folder or zip per student")
    return list(students.values()), ignored


def readable(name: str) -> str:
    """A file name as text that can be written anywhere: one line, in valid Unicode."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return " ".join(text.split()) or "student"


def chapter_of(filename: str, chapters: Sequence[str]) -> str | None:
    """The chapter named in a file name: 'Copy of 02_four_consumers (1).ipynb' -> '02_four_consumers'."""
    plain = re.sub(r"[^a-z0-9]+", "_", PurePosixPath(filename).stem.lower())
    return next((chapter for chapter in chapters if chapter in plain), None)


def _sort_in(student: Student, files: Iterator[Found], chapters: Sequence[str]) -> None:
    for found in files:
        found = replace(found, name=readable(found.name))
        chapter = chapter_of(found.name, chapters)
        if chapter is None:
            student.unnamed.append(found)
        else:
            student.notebooks.setdefault(chapter, []).append(found)


def _is_notebook(path: PurePosixPath) -> bool:
    hidden = any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)
    return path.suffix.lower() == ".ipynb" and not hidden


def _in_folder(folder: Path) -> Iterator[Found]:
    for number, path in enumerate(sorted(folder.rglob("*"))):
        name = path.relative_to(folder).as_posix()
        if number >= MAX_FILES:
            yield Found(name, 0, fault=f"more than {MAX_FILES} files; this one and the rest weren't read")
            return
        if not _is_notebook(PurePosixPath(name)):
            continue
        try:
            modified = path.lstat().st_mtime
            if path.is_symlink() or any(
                p.is_symlink() for p in path.parents if p != folder and folder in p.parents
            ):
                yield Found(name, modified, fault="a link; links aren't followed")
            elif not path.is_file():
                yield Found(name, modified, fault="a folder with the name of a notebook")
            elif path.stat().st_size > MAX_NOTEBOOK:
                yield Found(name, modified, fault=_too_large(path.stat().st_size))
            else:
                yield Found(name, modified, path.read_bytes())
        except OSError as error:
            yield Found(name, 0, fault=f"can't be read: {error.strerror}")


def _in_zip(path: Path, student: Student) -> Iterator[Found]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_FILES:
                student.notes.append(f"{path.name}: more than {MAX_FILES} files; the rest weren't read")
            for entry in entries[:MAX_FILES]:
                if entry.is_dir() or not _is_notebook(PurePosixPath(entry.filename)):
                    continue
                try:
                    yield _member(archive, entry)
                except _UNPACK_ERRORS as error:
                    yield Found(entry.filename, 0, fault=f"can't be unpacked: {error}")
    except _UNPACK_ERRORS as error:
        student.notes.append(f"{path.name}: not a readable zip ({error})")


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Found:
    modified = mktime((*entry.date_time, 0, 0, -1))
    with archive.open(entry) as stream:  # the declared size isn't believed either
        data = stream.read(MAX_NOTEBOOK + 1)
    if len(data) > MAX_NOTEBOOK:
        return Found(entry.filename, modified, fault=_too_large(len(data)))
    return Found(entry.filename, modified, data)


def _too_large(size: int) -> str:
    return f"larger than {format_bytes(MAX_NOTEBOOK)} ({format_bytes(size)} or more)"
