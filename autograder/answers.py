"""What the grader writes into a check cell: points and messages, in place of what the kernel left there."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from typing import Any

import nbformat

from autograder.evidence import Verdict
from memlab.exercises import CHAPTERS, Score, exercises, report

_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def write(cell: Any, verdict: Verdict, *, hidden: bool = False) -> list[str]:
    """Replaces a judged check cell's outputs by points and messages of ours; returns the messages.

    What the student's code printed while it was checked is left out, and of an error the first words stay,
    for the code saw the hidden inputs. Messages show them with `hidden` alone; without, each number that
    isn't the exercise's own becomes `…`.
    """
    exercise = exercises(verdict.exercise.partition(".")[0])[verdict.exercise]
    errors = [f"{o.ename}: {o.evalue}"[:100] for o in cell.outputs if o.output_type == "error"]
    messages = list(verdict.score.messages) if verdict.score is not None else errors
    if not hidden and verdict.score is not None:
        messages = [without_hidden(message, _own_texts(exercise.chapter)) for message in messages]
    text = report(exercise, Score(verdict.points, tuple(messages))) + "\n"
    if verdict.why:
        text += f"  - {verdict.why}\n"
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]  # type: ignore[no-untyped-call]
    cell.outputs += [_error(*error.split(": ", 1)) for error in errors]
    return messages


def _error(name: str, text: str) -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])  # type: ignore[no-untyped-call]


def without_hidden(message: str, known: str) -> str:
    """The message, with `…` for every number that doesn't stand in the texts of its checks."""
    own = set(_NUMBER.findall(known))
    return _NUMBER.sub(lambda found: found[0] if found[0] in own else "…", message)


@functools.cache
def _own_texts(chapter: str) -> str:
    """The texts in the source of a chapter's checks: numbers in them are nobody's secret."""
    source = inspect.getsource(importlib.import_module(f"memlab.exercises.{CHAPTERS[chapter]}"))
    texts = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))
