"""What the grader writes into a check cell: points and messages, in place of what the kernel left there."""

from __future__ import annotations

from typing import Any

import nbformat

from autograder.evidence import Verdict
from memlab.exercises import Score, exercises, report


def write(cell: Any, verdict: Verdict) -> list[str]:
    """Replaces a judged check cell's outputs by points and messages of ours; returns the messages.

    What the student's code printed while it was checked is left out, and of an error the first words stay,
    for the code saw the hidden inputs. The messages name them too: they are for the instructor as they are.
    """
    exercise = exercises(verdict.exercise.partition(".")[0])[verdict.exercise]
    errors = [f"{o.ename}: {o.evalue}"[:100] for o in cell.outputs if o.output_type == "error"]
    messages = list(verdict.score.messages) if verdict.score is not None else errors
    text = report(exercise, Score(verdict.points, tuple(messages))) + "\n"
    if verdict.why:
        text += f"  - {verdict.why}\n"
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]  # type: ignore[no-untyped-call]
    cell.outputs += [_error(*error.split(": ", 1)) for error in errors]
    return messages


def _error(name: str, text: str = "") -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])  # type: ignore[no-untyped-call]
