"""What is known about every submission: one JSON file each, replaced as a whole, so that a kill is harmless.

OUT/records/STUDENT/CHAPTER.json     the outcome; a run that finds it with the same key goes on
OUT/executed/STUDENT/CHAPTER.json    what the sandbox returned: written before the gradebook hears of it, and
                                     kept, as evidence, where the status isn't `graded`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autograder.course import write_atomically
from memlab.exercises import exercises

GRADED, FAILED, MISSING = "graded", "failed", "missing"

#: How the reason begins, behind `exercise 2.1: `, of a cell that ended in an error.
CELL_STOPPED = "your cell stopped with"


@dataclass
class Record:
    """The outcome for one student and one chapter; None for an exercise that couldn't be graded.

    `reasons` are for the student too, `doubts` for the instructor alone. `submitted` is in seconds since
    1970, and `time_from` says whose word that is; `seconds` is how long the notebook ran.
    """

    student: str
    chapter: str
    status: str
    reasons: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    points: dict[str, float | None] = field(default_factory=dict)
    messages: dict[str, list[str]] = field(default_factory=dict)
    key: str = ""
    submitted: float | None = None
    time_from: str = ""
    seconds: float = 0


@dataclass(frozen=True)
class Job:
    """All that a worker needs to run one notebook; plain data, for it runs in another process or machine.

    `own` are the ids of the cells that the student wrote or changed.
    """

    student: str
    nbgrader_id: str
    chapter: str
    submitted: str
    seed: int
    repairs: tuple[str, ...]
    key: str
    own: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    submitted_at: float | None = None
    time_from: str = ""


@dataclass
class Outcome:
    """What a worker returns: plain data. `error` says why nothing could be run; then the rest is empty.

    `remarks` are worth knowing for student and instructor, and no doubt.
    """

    key: str
    executed: str = ""
    points: dict[str, float | None] = field(default_factory=dict)
    doubts: list[tuple[str, str]] = field(default_factory=list)
    messages: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0
    error: str = ""
    remarks: list[str] = field(default_factory=list)


def exercise_points(chapter: str) -> dict[str, int]:
    """The automatically graded exercises of a chapter and their points."""
    return {name: e.points for name, e in exercises(int(chapter[:2])).items()}


def record_path(out: Path, nbgrader_id: str, chapter: str) -> Path:
    return out / "records" / nbgrader_id / f"{chapter}.json"


def write_record(out: Path, nbgrader_id: str, record: Record) -> None:
    text = json.dumps(asdict(record), indent=1, sort_keys=True) + "\n"
    write_atomically(record_path(out, nbgrader_id, record.chapter), text)


def read_record(path: Path) -> Record | None:
    """The record in a file; None where there is none that can be read."""
    try:
        return Record(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _executed_path(out: Path, job: Job) -> Path:
    return out / "executed" / job.nbgrader_id / f"{job.chapter}.json"


def keep_outcome(out: Path, job: Job, outcome: Outcome) -> None:
    write_atomically(_executed_path(out, job), json.dumps(asdict(outcome)) + "\n")


def kept_outcome(out: Path, job: Job) -> Outcome | None:
    """What the sandbox returned for this very job before the grader was killed."""
    try:
        found = Outcome(**json.loads(_executed_path(out, job).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    found.doubts = [(status, why) for status, why in found.doubts]
    return found if found.key == job.key and not found.error else None


def forget_outcome(out: Path, job: Job) -> None:
    path = _executed_path(out, job)
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def nbgrader_ids(names: Sequence[str]) -> list[str]:
    """Names that nbgrader can use as a folder and in a URL, unique, and the student's own where possible."""
    ids: list[str] = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "student"
        if safe != name or safe in ids:
            safe = f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        ids.append(safe)
    return ids
