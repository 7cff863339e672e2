"""Where a course lives on disk, its chapters, and nbgrader's configuration: shared by build, run and grade.

    solutions/NN_name.py                    the only source (format: `autograder.build`)
    notebooks/NN_name.ipynb                 the student version, generated, committed
    build/source/NN_name/NN_name.ipynb      nbgrader's source notebook: solutions, points and grade ids in it
    build/course/                           executed chapters, index.html, results.json

A chapter's name (`02_four_consumers`) is its nbgrader assignment and its nbgrader notebook.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traitlets.config import Config

from memlab.doctor import TEXT_STUB
from memlab.files import write_whole
from memlab.units import unknown_name

KERNEL = "python3"
CHAPTER_FILE = re.compile(r"(\d\d)_[a-z0-9_]+\.py")


class CourseError(Exception):
    """A fault that a person can mend: one line for each, no traceback."""


@dataclass(frozen=True)
class Chapter:
    """One chapter of the course rooted at `root`, named after its source file."""

    root: Path
    name: str

    @property
    def number(self) -> int:
        return int(self.name[:2])

    @property
    def source(self) -> Path:
        """What the instructor edits: solutions/NN_name.py."""
        return self.root / "solutions" / f"{self.name}.py"

    @property
    def notebook(self) -> Path:
        """The student version: notebooks/NN_name.ipynb."""
        return self.root / "notebooks" / f"{self.name}.ipynb"

    @property
    def nbgrader_source(self) -> Path:
        """What nbgrader reads: build/source/NN_name/NN_name.ipynb."""
        return self.root / "build" / "source" / self.name / f"{self.name}.ipynb"


def course_root() -> Path:
    """The folder of the course: the current one if it has `solutions/`, else the checkout this file is in."""
    here = Path.cwd()
    if (here / "solutions").is_dir():
        return here
    return Path(__file__).resolve().parent.parent


def chapters(root: Path) -> list[Chapter]:
    """The chapters of `root`, in order. Raises CourseError where there is none."""
    folder = root / "solutions"
    names = sorted(p.stem for p in folder.glob("*.py") if CHAPTER_FILE.fullmatch(p.name))
    if not names:
        raise CourseError(f"no chapters: {folder} holds no file named like 01_memory_basics.py")
    return [Chapter(root, name) for name in names]


def select(root: Path, wanted: Sequence[str] = ()) -> list[Chapter]:
    """The chapters meant by `2`, `02`, `02_four_consumers`, `four_consumers` or a path; all when empty.

    Raises memlab.units.UnknownNameError, with near matches, for anything else.
    """
    every = chapters(root)
    by_key: dict[str, Chapter] = {}
    for chapter in every:
        for key in (chapter.name, chapter.name[3:], chapter.name[:2], str(chapter.number)):
            by_key[key] = chapter
    chosen: list[Chapter] = []
    for word in wanted:
        key = Path(word).stem
        if key not in by_key:
            raise unknown_name("chapter", word, [c.name for c in every])
        if by_key[key] not in chosen:
            chosen.append(by_key[key])
    return chosen or every


def nbgrader_config(root: Path) -> Config:
    """nbgrader's configuration for a gradebook and folders under `root` (source/, release/, submitted/, …).

    Without `IgnorePattern` one warning on stderr makes a right answer worth 0; without `add_missing_cells`
    one damaged submission ends the grading of every later one.
    """
    config = Config()
    config.CourseDirectory.root = str(root)
    config.CourseDirectory.course_id = "memlab"
    config.CourseDirectory.db_url = f"sqlite:///{root / 'gradebook.db'}"
    config.IgnorePattern.enabled = True
    config.IgnorePattern.pattern = r"(?s).*"
    config.OverwriteCells.add_missing_cells = True
    config.ClearSolutions.text_stub = TEXT_STUB
    config.ExecutePreprocessor.kernel_name = KERNEL
    config.Execute.kernel_name = KERNEL
    config.HTMLExporter.sanitize_html = True
    return config


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never a part of it.

    Raises CourseError, naming the folder, where it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise CourseError(f"can't write {path}: {error.strerror or error}") from None
