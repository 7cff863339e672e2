"""What the tests of a chapter's exercises share: the cells of the source, and a check without a notebook."""

from __future__ import annotations

import ast
import importlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autograder.build import Cell, parse, release_notebook, source_notebook
from memlab.exercises import Evidence, Score, collect, exercises, rate

ROOT = Path(__file__).parents[2]


@cache
def source_cells(chapter: str) -> tuple[Cell, ...]:
    """The cells of solutions/`chapter`.py."""
    return tuple(parse(ROOT / "solutions" / f"{chapter}.py"))


def solution(chapter: str, exercise: str) -> str:
    """The solution's code for one exercise: its cells, joined."""
    return "\n\n".join(cell.source for cell in source_cells(chapter) if cell.exercise == exercise)


@cache
def _released(chapter: str) -> Any:
    points = {name: exercise.points for name, exercise in exercises(int(chapter[:2])).items()}
    return release_notebook(source_notebook(source_cells(chapter), points))


def untouched(chapter: str, exercise: str) -> str:
    """What the student finds in the exercise's cells."""
    wanted = {cell.id for cell in source_cells(chapter) if cell.exercise == exercise}
    return "\n\n".join(cell.source for cell in _released(chapter).cells if cell.id in wanted)


def mutant(chapter: str, exercise: str, edits: list[tuple[str, str]] | str) -> str:
    """The solution with each (old, new) applied; every old must be there. A text is the whole source."""
    if isinstance(edits, str):
        return edits
    source = solution(chapter, exercise)
    for old, new in edits:
        assert old in source, f"{exercise}: the solution has no {old!r}"
        source = source.replace(old, new)
    return source


def evidence(chapter: str, exercise: str, source: str, seed: int = 0) -> Evidence:
    """Runs `source` as the exercise's cell, then what the check cell passes on, and collects the evidence."""
    names: dict[str, Any] = {"math": math, "torch": torch}  # as the chapters' first cells import them
    exec(compile(source, "<student>", "exec"), names)
    check = next(cell.source for cell in source_cells(chapter) if cell.check == exercise)
    call = ast.parse(check).body[-1]
    assert isinstance(call, ast.Expr) and isinstance(call.value, ast.Call)
    answer = tuple(eval(ast.unparse(argument), names) for argument in call.value.args[1:])
    return collect(exercises(int(chapter[:2]))[exercise], answer[0] if len(answer) == 1 else answer, seed)


def score(chapter: str, exercise: str, source: str, seed: int = 0) -> Score:
    return rate(exercises(int(chapter[:2]))[exercise], evidence(chapter, exercise, source, seed), seed)


def wrong_answers(chapter: str) -> dict[str, dict[str, Any]]:
    """Exercise -> what is wrong -> edits of the solution, or the whole source."""
    found: dict[str, dict[str, Any]] = importlib.import_module(
        f"tests.exercises.mutants_{int(chapter[:2])}"
    ).MUTANTS
    return found


@cache
def of_mutant(chapter: str, exercise: str, name: str, seed: int = 5) -> tuple[Evidence, Score]:
    """Evidence and score of one wrong answer."""
    found = evidence(
        chapter, exercise, mutant(chapter, exercise, wrong_answers(chapter)[exercise][name]), seed
    )
    return found, rate(exercises(int(chapter[:2]))[exercise], found, seed)


@cache
def of_solution(chapter: str, exercise: str, seed: int) -> tuple[Evidence, Score]:
    """Evidence and score of the course's own solution."""
    found = evidence(chapter, exercise, solution(chapter, exercise), seed)
    return found, rate(exercises(int(chapter[:2]))[exercise], found, seed)
