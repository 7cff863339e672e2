"""A course of one tiny chapter, whose checks need no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autograder import build, questions
from autograder.sandbox import Sandbox, Settings

FIXTURES = Path(__file__).parent / "fixtures"

#: A chapter without exercises: cells are put in its middle. Its number has no exercises in memlab.
PLAIN = """\
# %% [markdown] id="title"
# # A plain chapter

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

{cells}
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A worker's sandbox with its limits, where bubblewrap works."""
    folder = tmp_path_factory.mktemp("library")
    questions.make_library(folder)
    with Sandbox(Settings("bubblewrap", str(folder))) as made:
        yield made


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a copy of the fixture course, made the current folder; only exercise 1.1 is registered."""
    root = tmp_path / "course"
    shutil.copytree(FIXTURES, root, ignore=shutil.ignore_patterns("__pycache__", "notebooks"))
    monkeypatch.setattr(build, "points_registry", lambda: {"1.1": 2})
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a course without chapters, made the current folder; `write_plain` adds them."""
    root = tmp_path / "plain"
    (root / "solutions").mkdir(parents=True)
    monkeypatch.chdir(root)
    return root


def write_plain(root: Path, name: str, cells: str) -> None:
    """Add a chapter made of PLAIN and these cells."""
    (root / "solutions" / f"{name}.py").write_text(PLAIN.format(cells=cells), encoding="utf-8")
