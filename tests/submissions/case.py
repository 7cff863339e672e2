"""What a case is: a function that hands something in, and what must come of it."""

from __future__ import annotations

import copy
import io
import os
import tarfile
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from autograder.course import Chapter
from tests.autograder.small_course import solved, untouched

CHAPTER = "01_memory_basics"
TOP = 10

GRADED, REVIEW, TAMPERED, FAILED, MISSING = "graded", "needs_review", "tampered", "failed", "missing"
ANY = (GRADED, REVIEW, TAMPERED, FAILED, MISSING)
FLAGGED = (REVIEW, TAMPERED)


@dataclass(frozen=True)
class Expected:
    """Points from `low` to `high` with one of `status`; `empty` where there must be no points at all.

    `or_flagged`: a cheat may earn more, where a person is called (needs_review or tampered).
    """

    low: float
    high: float
    status: tuple[str, ...]
    empty: bool = False
    or_flagged: bool = False

    def fault(self, points: str, status: str) -> str:
        """What is wrong with a row of totals.csv; '' where nothing is."""
        if self.or_flagged and status in FLAGGED:
            return ""
        if status not in self.status:
            return f"status {status}, expected {' or '.join(self.status)}"
        if self.empty or not points:
            wanted = self.empty or status in (FAILED, MISSING)
            return "" if wanted and not points else f"points {points!r}, expected {self}"
        if not self.low <= float(points) <= self.high:
            return f"{points} points, expected {self.low:g} to {self.high:g}"
        return ""


def exactly(points: float, *status: str) -> Expected:
    return Expected(points, points, status or (GRADED,))


def between(low: float, high: float, *status: str) -> Expected:
    return Expected(low, high, status or (GRADED,))


def caught(high: float, low: float = 0) -> Expected:
    """A cheat in one exercise: it earns nothing by it, or a person is called."""
    return Expected(low, high, (GRADED, REVIEW, TAMPERED), or_flagged=True)


def no_points(*status: str) -> Expected:
    return Expected(0, 0, status or (FAILED,), empty=True)


FULL = exactly(TOP)


@dataclass
class World:
    """What attacks aim at: the course's folder, and a TCP and UDP port where somebody listens."""

    course: Path
    port: int = 9


@dataclass
class Hand:
    """The hand of one student, who begins with the solution of the chapter."""

    folder: Path
    name: str
    world: World
    _solved: Any
    _untouched: Any
    handed_in: bool = False
    students: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nb = copy.deepcopy(self._solved)

    @property
    def own(self) -> Path:
        path = self.folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    # -- editing the notebook ------------------------------------------------------------------------------

    def untouched(self) -> Any:
        return copy.deepcopy(self._untouched)

    def exercise(self, number: str) -> Any:
        return self._cell(f"ex-{number.replace('.', '-')}")

    def check(self, number: str) -> Any:
        return self._cell(f"check-{number.replace('.', '-')}")

    def written(self) -> Any:
        return next(c for c in self.nb.cells if c.id.startswith("written"))

    def _cell(self, id_: str) -> Any:
        return next(c for c in self.nb.cells if c.id == id_)

    def code(self, number: str, text: str) -> None:
        """Adds code at the end of an exercise's cell."""
        cell = self.exercise(number)
        cell.source = f"{cell.source}\n{flush(text)}"

    def first(self, number: str, text: str) -> None:
        """Adds code before an exercise's own."""
        cell = self.exercise(number)
        cell.source = f"{flush(text)}\n{cell.source}"

    def answer(self, number: str, text: str) -> None:
        """Replaces an exercise's cell."""
        self.exercise(number).source = f"# exercise {number}\n{flush(text)}"

    def cell(self, text: str, after: str = "", kind: str = "code") -> Any:
        """Adds a cell after an exercise's check, or at the very beginning."""
        make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        new = make(flush(text), id=f"own{len(self.nb.cells)}")
        index = self.nb.cells.index(self.check(after)) + 1 if after else 0
        self.nb.cells.insert(index, new)
        return new

    # -- handing in ----------------------------------------------------------------------------------------

    def give(self, content: Any = None, name: str | None = None, *, modified: float | None = None) -> Path:
        """Saves a notebook, text or bytes in the student's folder."""
        self.handed_in = True
        path = self.own / (name or f"{CHAPTER}.ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_bytes(self.nb if content is None else content))
        if modified is not None:
            os.utime(path, (modified, modified))
        return path

    def link(self, name: str, target: Path | str) -> None:
        self.handed_in = True
        path = self.own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def beside(self, name: str, content: bytes) -> None:
        """A file in the folder of all submissions, as an LMS puts it there."""
        self.handed_in = True
        (self.folder / name).write_bytes(content)

    def called(self, *names: str) -> None:
        """The names under which the student may appear, where the folder's isn't his."""
        self.students += names


def flush(text: str) -> str:
    """Code from a block of text in these files, which is indented."""
    return textwrap.dedent(text).strip("\n").rstrip()


def as_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    return (content if isinstance(content, str) else nbformat.writes(content)).encode(
        "utf-8", "surrogatepass"
    )


def zipped(files: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> bytes:
    """A zip with these files, by name, whatever the names are."""
    stream = io.BytesIO()
    pairs = files.items() if isinstance(files, Mapping) else files
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # the same name twice is meant
        for name, content in pairs:
            archive.writestr(zipfile.ZipInfo(name, (2026, 5, 4, 12, 0, 0)), as_bytes(content))
    return stream.getvalue()


def tarball(files: Mapping[str, Any], mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            data = as_bytes(content)
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_777_000_000
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@dataclass(frozen=True)
class Case:
    """One submission. `short` ones run in `make test` too; `slow` ones wait for a cell's time limit."""

    name: str
    kind: str
    function: Callable[[Hand], None]
    expected: Expected
    short: bool = False
    slow: bool = False

    @property
    def doc(self) -> str:
        return (self.function.__doc__ or "").strip()


CASES: dict[str, Case] = {}


def case(
    expected: Expected, *, short: bool = False, slow: bool = False
) -> Callable[[Callable[[Hand], None]], Callable[[Hand], None]]:
    """Registers a case under its function's name; its kind is its module's name."""

    def register(function: Callable[[Hand], None]) -> Callable[[Hand], None]:
        name, kind = function.__name__.strip("_"), function.__module__.rpartition(".")[2]
        assert name not in CASES and function.__doc__, name
        CASES[name] = Case(name, kind, function, expected, short, slow)
        return function

    return register


def hand_in(case: Case, folder: Path, world: World, chapter: Chapter, made: dict[str, Any]) -> list[str]:
    """Lets a case hand in; returns the names under which the student may appear. `made` keeps notebooks."""
    if not made:
        made.update(solved=solved(chapter), untouched=untouched(chapter))
    hand = Hand(folder, case.name, world, made["solved"], made["untouched"])
    case.function(hand)
    if not hand.handed_in:
        hand.give()
    return hand.students or [case.name]
