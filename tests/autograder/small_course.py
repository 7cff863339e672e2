"""A course with the real exercises and none of the prose: what grading is tested on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat

from autograder import build
from autograder.course import Chapter, select

ROOT = Path(__file__).parents[2]


def small_course(root: Path, *names: str) -> list[Chapter]:
    """Writes solutions/ under `root`: the set-up, exercise, check and written cells of these chapters."""
    (root / "solutions").mkdir(parents=True)
    for name in names:
        kept: list[str] = []
        keep = True
        for line in (ROOT / "solutions" / f"{name}.py").read_text("utf-8").splitlines():
            if line.startswith("# %%"):
                keep = any(k in line for k in ('"parameters"', ' exercise="', ' check="', ' manual="'))
                keep = keep or any(f'id="{k}"' in line for k in ("begin", "imports", "setup"))
            if keep:
                kept.append(line)
        (root / "solutions" / f"{name}.py").write_text("\n".join(kept) + "\n", "utf-8")
    return select(root, names)


def solved(chapter: Chapter) -> Any:
    """The submission of a student who does everything right."""
    built = build.build(chapter)
    notebook = copy.deepcopy(built.release)
    for cell, original in zip(notebook.cells, built.source.cells, strict=True):
        lines = original.source.splitlines()
        cell.source = "\n".join(line for line in lines if line.strip() not in (build.BEGIN, build.END))
    return notebook


def untouched(chapter: Chapter) -> Any:
    return copy.deepcopy(build.build(chapter).release)


def hand_in(folder: Path, student: str, chapter: Chapter, notebook: Any, name: str | None = None) -> Path:
    """Saves a notebook (or raw bytes) as a student would; returns the file."""
    path = folder / student / (name or f"{chapter.name}.ipynb")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(notebook if isinstance(notebook, bytes) else nbformat.writes(notebook).encode())
    return path


def edit(notebook: Any, cell_id: str, change: Callable[[str], str]) -> Any:
    cell = next(c for c in notebook.cells if c.id == cell_id)
    cell.source = change(cell.source)
    return notebook
