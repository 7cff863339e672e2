"""Grades a folder of submissions: nbgrader inside, evidence and a record of every submission around it.

    OUT/grades.csv      student,chapter,exercise,points,max_points,status
    OUT/totals.csv      student,chapter,points,max_points,manual_points,status
    OUT/reasons.csv     student,chapter,status,reason: a line for every repair, doubt and failure
    OUT/feedback/STUDENT/CHAPTER.html
    OUT/gradebook.db    nbgrader's; points given by hand in formgrader are read from it again at every run
    OUT/course/         nbgrader's folders: source/, submitted/, autograded/, feedback/
    OUT/records/        one JSON file for each graded submission: a second run is quick, a kill harmless

Points are computed here from the evidence that the checks leave in the notebook's outputs, and compared with
the points that nbgrader read from the same cells; where the two differ the submission is `tampered`.

Status, the same words in every table:
`graded`; `needs_review` (graded, and a person should look: the reason says why); `failed` (could not be
graded: its points are empty, not 0); `tampered` (points appeared without evidence); `missing` (nothing was
handed in).
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import secrets
import signal
import sqlite3
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from autograder import build, doctor, submissions
from autograder.course import Chapter, CourseError, nbgrader_config, write_atomically
from autograder.evidence import REVIEW, TAMPERED, is_check, judge
from memlab.exercises import exercises

GRADED, FAILED, MISSING = "graded", "failed", "missing"

#: Seconds that one cell of a submission may take; the longest check allows an answer 60.
CELL_TIMEOUT = 90


_NO_SCRIPTS = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "img-src data:; font-src data:; style-src 'unsafe-inline'\">"
)

_FORMGRADER = """# Start `jupyter lab` in this folder: formgrader then shows the written answers.
c = get_config()
c.CourseDirectory.root = "."
c.CourseDirectory.course_id = "memlab"
c.CourseDirectory.db_url = "sqlite:///../gradebook.db"
c.HTMLExporter.sanitize_html = True
"""


@dataclass
class Record:
    """The outcome for one student and one chapter; None for an exercise that couldn't be graded."""

    student: str
    chapter: str
    status: str
    reasons: list[str] = field(default_factory=list)
    points: dict[str, float | None] = field(default_factory=dict)
    key: str = ""
    by_hand: str = ""


@dataclass(frozen=True)
class Job:
    """All that a worker needs to grade one notebook; plain data, for it runs in another process."""

    student: str
    nbgrader_id: str
    chapter: str
    submitted: str
    release: str
    out: str
    seed: int
    repairs: tuple[str, ...]
    key: str


def grade_folder(
    folder: Path, out: Path, chapters: Sequence[Chapter], *, jobs: int = 2, seed: str | None = None
) -> list[Record]:
    """Grades every submission in `folder` for these chapters, and writes the tables and feedback to `out`.

    A submission that was graded before, and hasn't changed since, is taken from its record. Raises
    CourseError where nothing can be graded at all (no such folder, nowhere to write).
    """
    out = out.resolve()  # nbgrader's database URL needs it
    students, ignored = submissions.collect(folder, [c.name for c in chapters], out)
    built = build.build_all(chapters)
    _make_folders(out)
    _prepare_nbgrader(out, built)
    number = _course_seed(out, seed)
    code = _code_hash()
    records: list[Record] = []
    todo: list[Job] = []
    for student, nbgrader_id in zip(students, _nbgrader_ids([s.id for s in students]), strict=True):
        for item in built:
            outcome = _admit(student, nbgrader_id, item, out, number, code)
            if isinstance(outcome, Job):
                todo.append(outcome)
            else:
                records.append(outcome)
    for line in ignored:
        print(f"left out: {line}", file=sys.stderr)
    done: set[tuple[str, str]] = set()
    try:
        for record in _run(todo, jobs):
            records.append(record)
            done.add((record.student, record.chapter))
    finally:
        records += [_interrupted(job) for job in todo if (job.student, job.chapter) not in done]
        everything = records + _of_other_chapters(out, chapters)
        everything.sort(key=lambda r: (r.student, r.chapter))
        _renew_feedback(out, everything)
        write_tables(out, everything)
    return sorted(records, key=lambda r: (r.student, r.chapter))


def _interrupted(job: Job) -> Record:
    why = "not graded yet: interrupted; the same command goes on from here"
    return Record(
        job.student, job.chapter, FAILED, [*job.repairs, why], dict.fromkeys(_exercises(job.chapter))
    )


def _of_other_chapters(out: Path, chapters: Sequence[Chapter]) -> list[Record]:
    """What earlier runs for other chapters left: the tables go on holding the whole course."""
    now = {chapter.name for chapter in chapters}
    found = [
        _read_record(path) for path in sorted((out / "records").glob("*/*.json")) if path.stem not in now
    ]
    return [record for record in found if record is not None]


# -- before the run ----------------------------------------------------------------------------------------


def _make_folders(out: Path) -> None:
    try:
        for name in ("course/source", "course/submitted", "records", "feedback"):
            (out / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CourseError(f"can't write to {out}: {error.strerror}; choose another --out") from None


def _prepare_nbgrader(out: Path, built: Iterable[build.Built]) -> None:
    """nbgrader's source notebooks, the assignments in its gradebook, and what formgrader reads."""
    write_atomically(out / "course" / "nbgrader_config.py", _FORMGRADER)
    gradebook = out / "gradebook.db"
    if gradebook.exists():
        try:
            with contextlib.closing(sqlite3.connect(gradebook)) as connection:
                connection.execute("select count(*) from assignment")
        except sqlite3.Error as error:
            raise CourseError(
                f"{gradebook} can't be used ({error}): put back a copy, or move it away and points "
                "given by hand are lost with it"
            ) from None
    for item in built:
        name = item.chapter.name
        path = out / "course" / "source" / name / f"{name}.ipynb"
        text = build.to_text(item.source)
        if path.exists() and path.read_text("utf-8") == text and gradebook.exists():
            continue
        write_atomically(path, text)
        result = _api(out).generate_assignment(name, force=True, create=True)
        if not result["success"]:
            path.unlink(missing_ok=True)
            raise CourseError(f"nbgrader can't release {name}: {_why(result)}")


def _course_seed(out: Path, given: str | None) -> int:
    """The seed of the hidden inputs: given, or made once for this output folder and kept in it."""
    if given is not None:
        return int.from_bytes(hashlib.sha256(given.encode()).digest()[:4], "big")
    path = out / "check_seed"
    if not path.exists():
        write_atomically(path, f"{secrets.randbelow(2**31)}\n")
        path.chmod(0o600)
    text = path.read_text("utf-8").strip()
    if not text.isdigit():
        raise CourseError(f"{path} should hold one number; delete it and every submission is graded anew")
    return int(text)


def _code_hash() -> str:
    """Changes when memlab or the grader does: records made by other code aren't used again."""
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    for package in (here, here.parent / "memlab"):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _nbgrader_ids(names: Sequence[str]) -> list[str]:
    """Names that nbgrader can use as a folder and in a URL, unique, and the student's own where possible."""
    ids: list[str] = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "student"
        if safe != name or safe in ids:
            safe = f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
        ids.append(safe)
    return ids


def _admit(
    student: submissions.Student, nbgrader_id: str, item: build.Built, out: Path, seed: int, code: str
) -> Record | Job:
    """A record where the outcome is known already, else the job."""
    name = item.chapter.name
    record = Record(student.id, name, MISSING, list(student.notes), dict.fromkeys(_points(item)))
    named = student.notebooks.get(name, [])
    chosen, notebook, notes = _first_readable(named, item.release)
    if notebook is None and not named:
        chosen, notebook, unfit = _first_readable(student.unnamed, item.release)
        if notebook is not None:
            notes = [
                f"{chosen}: recognised by its exercises, the name doesn't say which chapter it is",
                *unfit,
            ]
        elif student.unnamed:
            notes = [f"{found.name}: the name holds no chapter's name" for found in student.unnamed]
            only = not any(student.notebooks.values())
            record.reasons += notes
            record.status = FAILED if only or student.notes else MISSING
            return _kept(out, nbgrader_id, record)
        else:
            record.status = FAILED if student.notes else MISSING
            return _kept(out, nbgrader_id, record)
    if notebook is None:
        record.status = FAILED
        record.reasons += notes
        return _kept(out, nbgrader_id, record)
    if len(named) > 1:
        notes.append(f"{len(named)} files for this chapter: graded {chosen}, the latest that can be read")
    text = build.to_text(notebook)
    key = hashlib.sha256("\0".join((text, build.to_text(item.source), str(seed), code)).encode()).hexdigest()
    known = _read_record(_record_path(out, nbgrader_id, name))
    if known is not None and known.key == key and known.student == student.id:
        return known
    notes = [*student.notes, *notes]
    return Job(
        student.id, nbgrader_id, name, text, build.to_text(item.release), str(out), seed, tuple(notes), key
    )


def _first_readable(found: Sequence[submissions.Found], release: Any) -> tuple[str, Any, list[str]]:
    """The latest file that is this chapter's notebook: its name, the notebook to grade, and a line for each
    repair and each file that is none. The notebook is None where there isn't one."""
    notes: list[str] = []
    for candidate in sorted(found, key=_newest_first):
        try:
            if candidate.fault:
                raise doctor.Unreadable(candidate.fault)
            notebook, repairs = doctor.repair(doctor.read(candidate.data), release)
            build.to_text(notebook)
        except doctor.Unreadable as error:
            notes.append(f"{candidate.name}: {error}")
        except Exception as error:  # one student's file must not end the class
            notes.append(f"{candidate.name}: can't be repaired ({type(error).__name__}: {str(error)[:100]})")
        else:
            return candidate.name, notebook, notes + repairs
    return "", None, notes


def _kept(out: Path, nbgrader_id: str, record: Record) -> Record:
    """A record that needs no grading, with the page that tells the student why."""
    _write_record(_record_path(out, nbgrader_id, record.chapter), record)
    if record.status == FAILED:
        write_atomically(_page_path(out, record), _plain_page(record))
    return record


def _newest_first(found: submissions.Found) -> tuple[float, int, str]:
    """By time; of two equally old files (a download may lose the times) the one with more answers."""
    answers = 0
    if not found.fault:
        try:
            answers = doctor.answered(doctor.read(found.data))
        except Exception:
            answers = 0
    return (-found.modified, -answers, found.name)


def _points(item: build.Built) -> dict[str, int]:
    """The automatically graded exercises of a chapter and their points."""
    return _exercises(item.chapter.name)


def _exercises(chapter: str) -> dict[str, int]:
    return {name: e.points for name, e in exercises(int(chapter[:2])).items()}


# -- the run -----------------------------------------------------------------------------------------------


def _run(todo: Sequence[Job], jobs: int) -> Iterator[Record]:
    """Grades in worker processes that load nbgrader once. One that dies costs only its submission."""
    bar = tqdm(total=len(todo), unit="submission", disable=not sys.stderr.isatty())
    remaining = list(todo)
    with bar:
        while remaining:
            # a fresh pool after a worker's death: concurrent.futures gives up the old one
            broken: list[Job] = []
            with _workers(min(jobs, len(remaining))) as pool:
                futures = _submit(pool, remaining)
                pending = set(futures)
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        error = future.exception()
                        if error is None:
                            yield future.result()
                        elif isinstance(error, BrokenProcessPool):
                            broken.append(futures[future])
                            continue
                        else:
                            yield _lost(futures[future], error)
                        bar.update()
            if broken and len(broken) == len(remaining):
                # nobody got through: the first of them is what kills the workers
                yield _lost(broken.pop(0), RuntimeError("the grading process died"))
                bar.update()
            remaining = broken


@contextlib.contextmanager
def _workers(number: int) -> Iterator[ProcessPoolExecutor]:
    """A pool that an interrupt ends at once: its workers, and with them their kernels."""
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _submit(pool: ProcessPoolExecutor, jobs: Sequence[Job]) -> dict[Future[Record], Job]:
    """Starts the workers deaf to Ctrl-C: the parent hears it and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return {pool.submit(grade_one, job): job for job in jobs}
    finally:
        signal.signal(signal.SIGINT, before)


def _begin_worker() -> None:
    """No output of a submission reaches the instructor's terminal, and no worker outlives the grader."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _lost(job: Job, error: BaseException) -> Record:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    reasons = [*job.repairs, f"the grader stopped: {why}"]
    return Record(job.student, job.chapter, FAILED, reasons, dict.fromkeys(_exercises(job.chapter)))


def grade_one(job: Job) -> Record:
    """Grades one notebook through nbgrader, scores its evidence, writes feedback and the record."""
    out = Path(job.out)
    record = Record(job.student, job.chapter, GRADED, list(job.repairs), key=job.key)
    record.points = dict.fromkeys(_exercises(job.chapter))
    path = out / "course" / "submitted" / job.nbgrader_id / job.chapter / f"{job.chapter}.ipynb"
    before = _written_answers(path)
    write_atomically(path, job.submitted)
    with (
        tempfile.TemporaryDirectory(prefix="memlab-grading-") as scratch,
        _environment(job, scratch),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # SQLAlchemy's about nbgrader's models
        result = _api(out).autograde(job.chapter, job.nbgrader_id, force=True, create=True)
        _settle_written(out, job, unchanged=before == _written_answers(path))
    path = out / "course" / "autograded" / job.nbgrader_id / job.chapter / f"{job.chapter}.ipynb"
    if not result["success"] or not path.exists():
        record.status = FAILED
        record.reasons.append(f"nbgrader couldn't grade it: {_why(result)}")
        record.key = ""  # tried again at the next run
    else:
        _score(record, json.loads(path.read_text("utf-8")), job.seed)
    _write_page(out, job.nbgrader_id, record)
    _write_record(_record_path(out, job.nbgrader_id, job.chapter), record)
    return record


def _written_answers(path: Path) -> dict[str, str]:
    """The hand-graded answers of a submitted notebook, by cell; empty where there is none."""
    if not path.exists():
        return {}
    return {
        cell["id"]: "".join(cell["source"])
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if cell["cell_type"] == "markdown" and cell["metadata"].get("nbgrader", {}).get("grade")
    }


def _settle_written(out: Path, job: Job, *, unchanged: bool) -> None:
    """Names the student in formgrader; an answer that was graded by hand and didn't change stays graded."""
    from nbgrader.api import Gradebook, MissingEntry

    with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
        gradebook.update_or_create_student(job.nbgrader_id, first_name=job.student)
        try:
            submission = gradebook.find_submission(job.chapter, job.nbgrader_id)
        except MissingEntry:
            return
        for grade in _by_hand(submission):
            if unchanged and grade.manual_score is not None:
                grade.needs_manual_grade = False
        gradebook.db.commit()


def _by_hand(submission: Any) -> list[Any]:
    """nbgrader's grades of the written answers of one submission."""
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    return [grade for grade in grades if grade.cell.cell_type == "markdown"]


class _environment:
    """The environment of a graded kernel, which it inherits from this process."""

    def __init__(self, job: Job, scratch: str) -> None:
        self.wanted = {
            "MEMLAB_GRADING": "1",
            "MEMLAB_SIZE": "smallest",
            "MEMLAB_DEVICE": "cpu",
            "MEMLAB_CHECK_SEED": str(job.seed),
            "MEMLAB_HOME": scratch,
            "IPYTHONDIR": scratch,
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.wanted}
        os.environ.update(self.wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _api(out: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbgrader.apps import NbGraderAPI
        from nbgrader.preprocessors import (
            AssignLatePenalties,
            CheckCellMetadata,
            IgnorePattern,
            LimitOutput,
        )

        from autograder.preprocessors import SaveEvidencePoints, SurvivingExecute

    config = nbgrader_config(out / "course")
    config.CourseDirectory.db_url = f"sqlite:///{out / 'gradebook.db'}"
    config.Autograde.autograde_preprocessors = [
        SurvivingExecute,
        IgnorePattern,
        LimitOutput,
        SaveEvidencePoints,
        AssignLatePenalties,
        CheckCellMetadata,
    ]
    config.SurvivingExecute.timeout = CELL_TIMEOUT
    config.SurvivingExecute.extra_arguments = ["--log-level=ERROR"]  # ipykernel 7 warns at every start
    config.SurvivingExecute.kernel_name = config.Execute.kernel_name
    here = str(Path(sys.executable).parent)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        # nbgrader calls `alembic` by its bare name when it makes a gradebook
        os.environ["PATH"] = os.pathsep.join((here, os.environ.get("PATH", "")))
    api = NbGraderAPI(config=config)
    api.log.setLevel(logging.ERROR)
    api.log.propagate = False
    api.log.addHandler(logging.NullHandler())  # errors are read from each result, not printed
    return api


def _why(result: dict[str, Any]) -> str:
    """The most telling line of an nbgrader result: the last exception that isn't nbgrader's own."""
    lines = f"{result.get('log', '')}\n{result.get('error', '')}".splitlines()
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Entry)\b", line)]
    own = [line for line in errors if not line.startswith("nbgrader.")]
    return ([*errors, *own] or [line for line in lines if line.strip()] or ["no reason given"])[-1][:300]


def _score(record: Record, notebook: dict[str, Any], seed: int) -> None:
    """Points from the evidence in the executed notebook, and what speaks against believing it."""
    doubts: list[tuple[str, str]] = []
    for cell in notebook["cells"]:
        died = [o["evalue"] for o in cell.get("outputs", []) if o.get("ename") == "KernelDied"]
        if died:
            number = cell["metadata"].get("memlab", {}).get("exercise", "")
            where = f"exercise {number}" if number else f'cell "{cell.get("id", "?")}"'
            doubts.append((REVIEW, f"{where}: {died[0]}"))
        if is_check(cell):
            verdict = judge(cell, seed)
            record.points[verdict.exercise] = verdict.points
            if verdict.status:
                doubts.append((verdict.status, verdict.why))
    for status in (TAMPERED, REVIEW):
        if any(s == status for s, _ in doubts):
            record.status = status
            break
    record.reasons += [text for _, text in doubts]


# -- records, feedback, tables -----------------------------------------------------------------------------


def _record_path(out: Path, nbgrader_id: str, chapter: str) -> Path:
    return out / "records" / nbgrader_id / f"{chapter}.json"


def _write_record(path: Path, record: Record) -> None:
    write_atomically(path, json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")


def _read_record(path: Path) -> Record | None:
    try:
        return Record(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _page_path(out: Path, record: Record) -> Path:
    return out / "feedback" / record.student / f"{record.chapter}.html"


def _write_page(out: Path, nbgrader_id: str, record: Record) -> None:
    """nbgrader's feedback page, or a page with the reason where there is none."""
    page = ""
    if record.status != FAILED:
        result = _api(out).generate_feedback(record.chapter, nbgrader_id, force=True)
        made = out / "course" / "feedback" / nbgrader_id / record.chapter / f"{record.chapter}.html"
        if result["success"] and made.exists():
            # no script runs on it, whatever a submission wrote into its cells, and nothing is fetched
            page = made.read_text("utf-8").replace("<head>", f"<head>{_NO_SCRIPTS}", 1)
    write_atomically(_page_path(out, record), page or _plain_page(record))


def _renew_feedback(out: Path, records: Sequence[Record]) -> None:
    """Writes the pages again whose points or comments by hand have changed since."""
    ids = dict(zip(names := _students(records), _nbgrader_ids(names), strict=True))
    now = _manual(out)
    for record in records:
        given = now.get((ids[record.student], record.chapter))
        if given is not None and record.by_hand != given.signature and record.status not in (FAILED, MISSING):
            record.by_hand = given.signature
            _write_page(out, ids[record.student], record)
            _write_record(_record_path(out, ids[record.student], record.chapter), record)


def _students(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.student for record in records))


def _plain_page(record: Record) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in record.reasons)
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(record.chapter)}</title>"
        f"<h1>{escape(record.chapter)}</h1><p>This notebook could not be graded. It counts as not graded, "
        f"not as 0 points; your instructor will look at it.</p><ul>{reasons}</ul>"
    )


def write_tables(out: Path, records: Sequence[Record]) -> None:
    """grades.csv, totals.csv and reasons.csv, each replaced as a whole."""
    manual = _manual(out)
    ids = dict(zip(names := _students(records), _nbgrader_ids(names), strict=True))
    grades, totals, reasons = [], [], []
    for r in records:
        maximum = _exercises(r.chapter)
        for number, top in maximum.items():
            grades.append((r.student, r.chapter, number, _cell(r.points.get(number)), top, r.status))
        known = [p for p in r.points.values() if p is not None]
        total = _cell(round(sum(known), 6) if known else None)
        given = manual.get((ids[r.student], r.chapter))
        by_hand = "" if given is None or r.status in (FAILED, MISSING) else _cell(given.points)
        totals.append((r.student, r.chapter, total, sum(maximum.values()), by_hand, r.status))
        reasons += [(r.student, r.chapter, r.status, reason) for reason in r.reasons]
    _write_csv(out / "grades.csv", "student,chapter,exercise,points,max_points,status", grades)
    _write_csv(out / "totals.csv", "student,chapter,points,max_points,manual_points,status", totals)
    _write_csv(out / "reasons.csv", "student,chapter,status,reason", reasons)


class _ByHand(NamedTuple):
    """What was given by hand: points once all answers have been read; the signature tells a change."""

    points: float | None
    signature: str


def _manual(out: Path) -> dict[tuple[str, str], _ByHand]:
    """(nbgrader id, chapter) -> what was given by hand."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
            found: dict[tuple[str, str], _ByHand] = {}
            for assignment in gradebook.assignments:
                for submission in gradebook.assignment_submissions(assignment.name):
                    grades = _by_hand(submission)
                    comments = [c.manual_comment for n in submission.notebooks for c in n.comments]
                    given = [g.manual_score for g in grades]
                    if grades and any(x is not None for x in (*given, *comments)):
                        open_ = any(g.needs_manual_grade for g in grades)
                        points = None if open_ else sum(g.score for g in grades)
                        key = submission.student.id, assignment.name
                        found[key] = _ByHand(points, repr((given, comments)))
                    elif grades and not any(g.needs_manual_grade for g in grades):
                        # nothing was written: nbgrader gives 0 by itself
                        found[submission.student.id, assignment.name] = _ByHand(0, "")
            return found


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _write_csv(path: Path, header: str, rows: Iterable[tuple[object, ...]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header.split(","))
    writer.writerows([_harmless(value) for value in row] for row in rows)
    write_atomically(path, text.getvalue())


def _harmless(value: object) -> object:
    """A text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
