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

import csv
import hashlib
import io
import json
import logging
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from autograder import build, doctor, submissions
from autograder.course import Chapter, CourseError, nbgrader_config, write_atomically
from autograder.evidence import REVIEW, TAMPERED, is_check, judge
from memlab.exercises import exercises

GRADED, FAILED, MISSING = "graded", "failed", "missing"

#: Seconds that one cell of a submission may take; the longest check allows an answer 60.
CELL_TIMEOUT = 90


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
    students, ignored = submissions.collect(folder, [c.name for c in chapters])
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
    try:
        records += _run(todo, jobs)
    finally:
        records.sort(key=lambda r: (r.student, r.chapter))
        write_tables(out, records, built)
    return records


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
    for item in built:
        name = item.chapter.name
        path = out / "course" / "source" / name / f"{name}.ipynb"
        text = build.to_text(item.source)
        if path.exists() and path.read_text("utf-8") == text and (out / "gradebook.db").exists():
            continue
        write_atomically(path, text)
        result = _api(out).generate_assignment(name, force=True, create=True)
        if not result["success"]:
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
    record = Record(student.id, name, MISSING, points=dict.fromkeys(_points(item)))
    found = student.notebooks.get(name, [])
    if not found:
        record.reasons = list(student.notes)
        return record
    notes = []
    chosen, notebook = None, None
    for candidate in sorted(found, key=_newest_first):
        try:
            if candidate.fault:
                raise doctor.Unreadable(candidate.fault)
            notebook, repairs = doctor.repair(doctor.read(candidate.data), item.release)
        except doctor.Unreadable as error:
            notes.append(f"{candidate.name}: {error}")
            continue
        chosen = candidate
        notes += repairs
        break
    if chosen is None or notebook is None:
        record.status, record.reasons = FAILED, notes
        return record
    if len(found) > 1:
        notes.append(
            f"{len(found)} files for this chapter: graded {chosen.name}, the latest that can be read"
        )
    text = build.to_text(notebook)
    key = hashlib.sha256("\0".join((text, build.to_text(item.source), str(seed), code)).encode()).hexdigest()
    known = _read_record(_record_path(out, nbgrader_id, name))
    if known is not None and known.key == key and known.student == student.id:
        return known
    return Job(
        student.id, nbgrader_id, name, text, build.to_text(item.release), str(out), seed, tuple(notes), key
    )


def _newest_first(found: submissions.Found) -> tuple[float, int, str]:
    """By time; of two equally old files (a download may lose the times) the one with more answers."""
    answers = 0
    if not found.fault:
        try:
            answers = doctor.answered(doctor.read(found.data))
        except doctor.Unreadable:
            answers = 0
    return (-found.modified, -answers, found.name)


def _points(item: build.Built) -> dict[str, int]:
    """The automatically graded exercises of a chapter and their points."""
    return {name: e.points for name, e in exercises(item.chapter.number).items()}


# -- the run -----------------------------------------------------------------------------------------------


def _run(todo: Sequence[Job], jobs: int) -> Iterator[Record]:
    """Grades in worker processes that load nbgrader once. One that dies costs only its submission."""
    if not todo:
        return
    bar = tqdm(total=len(todo), unit="submission", disable=not sys.stderr.isatty())
    context = multiprocessing.get_context("spawn")
    remaining = list(todo)
    with bar:
        while remaining:
            # a fresh pool after a worker's death: concurrent.futures gives up the old one
            pool = ProcessPoolExecutor(min(jobs, len(remaining)), mp_context=context)
            futures: dict[Future[Record], Job] = {pool.submit(grade_one, job): job for job in remaining}
            broken: list[Job] = []
            try:
                pending = set(futures)
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        if isinstance(error := future.exception(), Exception):
                            broken.append(futures[future])
                            if not _pool_died(error):
                                yield _lost(broken.pop(), error)
                                bar.update()
                        else:
                            yield future.result()
                            bar.update()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
            if broken and len(broken) == len(remaining):
                # nobody got through: the first of them is what kills the workers
                yield _lost(broken.pop(0), RuntimeError("the grading process died"))
                bar.update()
            remaining = broken


def _pool_died(error: BaseException) -> bool:
    return type(error).__name__ == "BrokenProcessPool"


def _lost(job: Job, error: BaseException) -> Record:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return Record(job.student, job.chapter, FAILED, [*job.repairs, f"the grader stopped: {why}"])


def grade_one(job: Job) -> Record:
    """Grades one notebook through nbgrader, scores its evidence, writes feedback and the record."""
    out = Path(job.out)
    record = Record(job.student, job.chapter, GRADED, list(job.repairs), key=job.key)
    record.points = dict.fromkeys(exercises(int(job.chapter[:2])))
    folder = out / "course" / "submitted" / job.nbgrader_id / job.chapter
    write_atomically(folder / f"{job.chapter}.ipynb", job.submitted)
    with (
        tempfile.TemporaryDirectory(prefix="memlab-grading-") as scratch,
        _environment(job, scratch),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # SQLAlchemy's about nbgrader's models
        result = _api(out).autograde(job.chapter, job.nbgrader_id, force=True, create=True)
    path = out / "course" / "autograded" / job.nbgrader_id / job.chapter / f"{job.chapter}.ipynb"
    if not result["success"] or not path.exists():
        record.status = FAILED
        record.reasons.append(f"nbgrader couldn't grade it: {_why(result)}")
        record.key = ""  # tried again at the next run
    else:
        _score(record, json.loads(path.read_text("utf-8")), job.seed)
    _feedback(record, job, graded=path.exists() and record.status != FAILED)
    _write_record(_record_path(out, job.nbgrader_id, job.chapter), record)
    return record


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


def _feedback(record: Record, job: Job, *, graded: bool) -> None:
    """nbgrader's feedback page, or a page with the reason where there is none."""
    out = Path(job.out)
    target = out / "feedback" / job.nbgrader_id / f"{job.chapter}.html"
    page = ""
    if graded:
        result = _api(out).generate_feedback(job.chapter, job.nbgrader_id, force=True)
        made = out / "course" / "feedback" / job.nbgrader_id / job.chapter / f"{job.chapter}.html"
        if result["success"] and made.exists():
            page = made.read_text("utf-8")
    if not page:
        page = _plain_page(record)
    write_atomically(target, page)


def _plain_page(record: Record) -> str:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in record.reasons)
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(record.chapter)}</title>"
        f"<h1>{escape(record.chapter)}</h1><p>This notebook could not be graded. It counts as not graded, "
        f"not as 0 points; your instructor will look at it.</p><ul>{reasons}</ul>"
    )


def write_tables(out: Path, records: Sequence[Record], built: Sequence[build.Built]) -> None:
    """grades.csv, totals.csv and reasons.csv, each replaced as a whole."""
    maximum = {item.chapter.name: _points(item) for item in built}
    manual = _manual_points(out)
    names = list(dict.fromkeys(r.student for r in records))
    ids = dict(zip(names, _nbgrader_ids(names), strict=True))
    grades, totals, reasons = [], [], []
    for r in records:
        for number, top in maximum[r.chapter].items():
            grades.append((r.student, r.chapter, number, _cell(r.points.get(number)), top, r.status))
        known = [p for p in r.points.values() if p is not None]
        total = _cell(round(sum(known), 6) if known else None)
        by_hand = _cell(manual.get((ids[r.student], r.chapter)))
        totals.append((r.student, r.chapter, total, sum(maximum[r.chapter].values()), by_hand, r.status))
        reasons += [(r.student, r.chapter, r.status, reason) for reason in r.reasons]
    _write_csv(out / "grades.csv", "student,chapter,exercise,points,max_points,status", grades)
    _write_csv(out / "totals.csv", "student,chapter,points,max_points,manual_points,status", totals)
    _write_csv(out / "reasons.csv", "student,chapter,status,reason", reasons)


def _manual_points(out: Path) -> dict[tuple[str, str], float]:
    """(nbgrader id, chapter) -> points given by hand; absent until every written answer has been read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbgrader.api import Gradebook

        with Gradebook(f"sqlite:///{out / 'gradebook.db'}", "memlab") as gradebook:
            points: dict[tuple[str, str], float] = {}
            for assignment in gradebook.assignments:
                for submission in gradebook.assignment_submissions(assignment.name):
                    by_hand = [
                        grade
                        for notebook in submission.notebooks
                        for grade in notebook.grades
                        if grade.cell.cell_type == "markdown"
                    ]
                    if by_hand and not any(grade.needs_manual_grade for grade in by_hand):
                        points[submission.student.id, assignment.name] = sum(g.score for g in by_hand)
            return points


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
