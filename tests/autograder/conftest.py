"""A course of one tiny chapter, whose checks need no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autograder import build

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
