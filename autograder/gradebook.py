"""nbgrader, and the one process that writes its gradebook."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import signal
import sqlite3
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from autograder import build
from autograder.course import CourseError, nbgrader_config, write_atomically
from autograder.records import Job, Outcome

_FORMGRADER = """# Start `jupyter lab` in this folder: formgrader then shows the written answers.
c = get_config()
c.CourseDirectory.root = "."
c.CourseDirectory.course_id = "memlab"
c.CourseDirectory.db_url = "sqlite:///../gradebook.db"
c.HTMLExporter.sanitize_html = True
c.HTMLExporter.filters = {"markdown2html": "autograder.markdown.harmless"}  # answers can't script
"""


_TABLES = {
    "alembic_version", "student", "course", "assignment", "notebook", "submitted_assignment", "base_cell",
    "source_cell", "submitted_notebook", "grade_cells", "solution_cells", "task_cells", "grade", "comment",
}  # fmt: skip


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt after the block, in place of whatever it raises.

    nbgrader catches an interrupt and calls the submission faulty; and an entry is made whole or not at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    heard: list[int] = []
    before = {
        name: signal.signal(name, lambda number, frame: heard.append(number))
        for name in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        if heard:
            raise KeyboardInterrupt


@functools.lru_cache(maxsize=4)
def api(out: Path) -> Any:
    """nbgrader's API on the folders and the gradebook under `out`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbgrader.apps import NbGraderAPI
        from nbgrader.preprocessors import AssignLatePenalties, CheckCellMetadata

        from autograder.preprocessors import SavePoints, TakeOutputs

    config = nbgrader_config(out / "course")
    config.CourseDirectory.db_url = f"sqlite:///{out / 'gradebook.db'}"
    config.Autograde.autograde_preprocessors = [
        TakeOutputs, SavePoints, AssignLatePenalties, CheckCellMetadata
    ]  # fmt: skip
    here = str(Path(sys.executable).parent)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        # nbgrader calls `alembic` by its bare name when it makes a gradebook
        os.environ["PATH"] = os.pathsep.join((here, os.environ.get("PATH", "")))
    made = NbGraderAPI(config=config)
    made.log.setLevel(logging.ERROR)
    made.log.propagate = False
    made.log.addHandler(logging.NullHandler())  # errors are read from each result, not printed
    return made


def why(result: dict[str, Any]) -> str:
    """The most telling line of an nbgrader result: the last exception that isn't nbgrader's own."""
    lines = f"{result.get('log', '')}\n{result.get('error', '')}".splitlines()
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Entry)\b", line)]
    own = [line for line in errors if not line.startswith("nbgrader.")]
    return ([*errors, *own] or [line for line in lines if line.strip()] or ["no reason given"])[-1][:300]


def usable(out: Path) -> None:
    """Raises CourseError where OUT/gradebook.db is there and can't be used."""
    gradebook = out / "gradebook.db"
    if not gradebook.exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(gradebook)) as connection:
            found = {
                name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")
            }
            if not found <= _TABLES:  # a gradebook that a kill left half made is finished by `prepare`
                connection.execute("select count(*) from assignment")
    except sqlite3.Error as error:
        raise CourseError(
            f"{gradebook} can't be used ({error}): put back a copy, or move it away and points "
            "given by hand are lost with it"
        ) from None


def prepare(out: Path, built: Iterable[build.Built]) -> None:
    """nbgrader's source notebooks, the assignments in its gradebook, and what formgrader reads."""
    write_atomically(out / "course" / "nbgrader_config.py", _FORMGRADER)
    usable(out)
    gradebook = out / "gradebook.db"
    for item in built:
        name = item.chapter.name
        path = out / "course" / "source" / name / f"{name}.ipynb"
        text = build.to_text(item.source)
        # written last of all: after a kill in between the gradebook doesn't know the chapter yet
        released = out / "course" / f".{name}.released"
        stamp = hashlib.sha256(text.encode()).hexdigest()
        if (
            gradebook.exists()
            and path.exists()
            and released.exists()
            and released.read_text("utf-8") == stamp
        ):
            continue
        write_atomically(path, text)
        with interrupts_wait():
            result = api(out).generate_assignment(name, force=True, create=True)
        if not result["success"]:
            raise CourseError(f"nbgrader can't release {name}: {why(result)}")
        write_atomically(released, stamp)


def take_over(out: Path, job: Job, outcome: Outcome) -> str:
    """Enters a run notebook and its points into nbgrader: '' or what nbgrader says against it.

    Doing it twice does no harm. A written answer that was graded by hand and didn't change stays graded.
    """
    from autograder.preprocessors import SavePoints, TakeOutputs

    path = out / "course" / "submitted" / job.nbgrader_id / job.chapter / f"{job.chapter}.ipynb"
    before = written_answers(path)
    write_atomically(path, job.submitted)
    TakeOutputs.executed = nbformat.reads(outcome.executed, 4)  # type: ignore[no-untyped-call]
    SavePoints.points = outcome.points
    with warnings.catch_warnings(), interrupts_wait():
        warnings.simplefilter("ignore")  # SQLAlchemy's about nbgrader's models
        result = api(out).autograde(job.chapter, job.nbgrader_id, force=True, create=True)
        _settle_written(out, job, outcome, unchanged=before == written_answers(path))
    made = out / "course" / "autograded" / job.nbgrader_id / job.chapter / f"{job.chapter}.ipynb"
    return "" if result["success"] and made.exists() else why(result)


def written_answers(path: Path) -> dict[str, str]:
    """The hand-graded answers of a submitted notebook, by cell; empty where there is none."""
    if not path.exists():
        return {}
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    return {
        cell["id"]: cell["source"]
        for cell in notebook.cells
        if cell["cell_type"] == "markdown" and cell["metadata"].get("nbgrader", {}).get("grade")
    }


def _settle_written(out: Path, job: Job, outcome: Outcome, *, unchanged: bool) -> None:
    """An answer that was graded by hand and didn't change stays graded; of one that did a doubt is said."""
    from nbgrader.api import Gradebook, MissingEntry

    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
        gradebook.update_or_create_student(job.nbgrader_id)
        try:
            submission = gradebook.find_submission(job.chapter, job.nbgrader_id)
        except MissingEntry:
            return
        for grade in _written_grades(submission):
            if grade.manual_score is None:
                continue
            if unchanged:
                grade.needs_manual_grade = False
            elif grade.needs_manual_grade:
                text = f"{grade.name}: changed after it was graded by hand: read it again"
                outcome.doubts.append(("", f"{text} (it had {float(grade.manual_score):g} points)"))
        gradebook.db.commit()


def name_students(out: Path, names: Mapping[str, str]) -> None:
    """The students' names, by nbgrader id, for formgrader; it shows 'None' where there is no last name."""
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
        for student in gradebook.students:
            last, _, first = names.get(student.id, student.id).partition(",")
            if not first:
                first, _, last = last.strip().rpartition(" ")
            student.first_name, student.last_name = first.strip(), last.strip()
        gradebook.db.commit()


def _written_grades(submission: Any) -> list[Any]:
    """nbgrader's grades of the written answers of one submission."""
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    return [grade for grade in grades if grade.cell.cell_type == "markdown"]


class Answer(NamedTuple):
    """One written answer: points once it has been read, and the most it can earn."""

    points: float | None
    most: float


class ByHand(NamedTuple):
    """What a person gave in formgrader for one submission.

    `points` is the sum of the written answers once all have been read; `corrected` holds points that replace
    computed ones, by exercise; `written` and `comments` are by cell.
    """

    points: float | None
    written: dict[str, Answer]
    corrected: dict[str, float]
    comments: dict[str, str]


def by_hand(out: Path) -> dict[tuple[str, str], ByHand]:
    """(nbgrader id, chapter) -> what was given by hand."""
    if not (out / "gradebook.db").exists():
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
            return {
                (submission.student.id, assignment.name): _by_hand(submission)
                for assignment in gradebook.assignments
                for submission in gradebook.assignment_submissions(assignment.name)
            }


def _by_hand(submission: Any) -> ByHand:
    written, corrected = {}, {}
    for grade in (grade for notebook in submission.notebooks for grade in notebook.grades):
        if grade.cell.cell_type == "markdown":
            # an answer that nobody wrote gets its 0 from nbgrader
            points = None if grade.needs_manual_grade else float(grade.score)
            written[grade.name] = Answer(points, float(grade.max_score))
        elif grade.manual_score is not None and (match := re.fullmatch(r"check-(\d+)-(\d+)", grade.name)):
            corrected[f"{match[1]}.{match[2]}"] = float(grade.manual_score) + float(grade.extra_credit or 0)
    comments = {
        c.name: c.manual_comment  # nbgrader's own `No response.` is nobody's word
        for n in submission.notebooks
        for c in n.comments
        if c.manual_comment
    }
    known = [answer.points for answer in written.values() if answer.points is not None]
    complete = bool(written) and len(known) == len(written)
    return ByHand(sum(known) if complete else None, written, corrected, comments)
