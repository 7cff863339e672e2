"""What the grader writes into a check cell: points and messages, in place of what the kernel left there."""

from __future__ import annotations

from typing import Any

import nbformat

from autograder.evidence import Verdict
from memlab.exercises import exercises, report


def write(cell: Any, verdict: Verdict) -> None:
    """Replaces a judged check cell's outputs: an error stays, points and messages are ours.

    What the student's code printed while it was checked is left out: it saw the hidden inputs.
    """
    exercise = exercises(verdict.exercise.partition(".")[0])[verdict.exercise]
    outputs = [output for output in cell.outputs if output.output_type == "error"]
    if verdict.score is not None:
        score = verdict.score._replace(points=verdict.points)
        text = report(exercise, score) + "\n"
    else:
        text = f"exercise {exercise.id} ({exercise.title}): {verdict.points:g} of {exercise.points} points\n"
    if verdict.why:
        text += f"  - {verdict.why}\n"
    shown = nbformat.v4.new_output("stream", name="stdout", text=text)  # type: ignore[no-untyped-call]
    cell.outputs = [shown, *outputs]
