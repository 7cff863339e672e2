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
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from autograder import build, doctor, questions, submissions
from autograder.course import Chapter, CourseError, write_atomically
from autograder.evidence import REVIEW, TAMPERED
from autograder.gradebook import api, by_hand, prepare, take_over
from autograder.records import (
    FAILED,
    GRADED,
    MISSING,
    Job,
    Outcome,
    Record,
    exercise_points,
    forget_outcome,
    keep_outcome,
    kept_outcome,
    nbgrader_ids,
    read_record,
    record_path,
    write_record,
)
from autograder.sandbox import Settings, choose, weaker
from autograder.workers import run_jobs

_NO_SCRIPTS = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "img-src data:; font-src data:; style-src 'unsafe-inline'\">"
)


def grade_folder(
    folder: Path,
    out: Path,
    chapters: Sequence[Chapter],
    *,
    jobs: int = 2,
    seed: str | None = None,
    sandbox: str = "auto",
) -> list[Record]:
    """Grades every submission in `folder` for these chapters, and writes the tables and feedback to `out`.

    A submission that was graded before, and hasn't changed since, is taken from its record. Raises
    CourseError where nothing can be graded at all (no such folder, nowhere to write).
    """
    mode = choose(sandbox)
    if weaker(mode):
        print(weaker(mode), file=sys.stderr)
    out = out.resolve()  # nbgrader's database URL needs it
    students, ignored = submissions.collect(folder, [c.name for c in chapters], out)
    built = build.build_all(chapters)
    _make_folders(out)
    prepare(out, built)
    number = _course_seed(out, seed)
    code = _code_hash()
    records: list[Record] = []
    todo: list[Job] = []
    for student, nbgrader_id in zip(students, nbgrader_ids([s.id for s in students]), strict=True):
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
        for record in _run(todo, out, jobs, mode):
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
        job.student, job.chapter, FAILED, [*job.repairs, why], dict.fromkeys(exercise_points(job.chapter))
    )


def _of_other_chapters(out: Path, chapters: Sequence[Chapter]) -> list[Record]:
    """What earlier runs for other chapters left: the tables go on holding the whole course."""
    now = {chapter.name for chapter in chapters}
    found = [read_record(path) for path in sorted((out / "records").glob("*/*.json")) if path.stem not in now]
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


def _admit(
    student: submissions.Student, nbgrader_id: str, item: build.Built, out: Path, seed: int, code: str
) -> Record | Job:
    """A record where the outcome is known already, else the job."""
    name = item.chapter.name
    record = Record(student.id, name, MISSING, list(student.notes), dict.fromkeys(exercise_points(name)))
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
    known = read_record(record_path(out, nbgrader_id, name))
    if known is not None and known.key == key and known.student == student.id:
        return known
    notes = [*student.notes, *notes]
    released = {cell.id: cell.source for cell in item.release.cells}
    own = tuple(cell.id for cell in notebook.cells if cell.source != released.get(cell.id))
    return Job(student.id, nbgrader_id, name, text, seed, tuple(notes), key, own)


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
    write_record(out, nbgrader_id, record)
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


# -- the run -----------------------------------------------------------------------------------------------


def _run(todo: Sequence[Job], out: Path, jobs: int, mode: str) -> Iterator[Record]:
    """Runs the jobs in sandboxes and enters what they return into the gradebook, which nobody else writes."""
    bar = tqdm(total=len(todo), unit="submission", disable=not sys.stderr.isatty())
    waiting: list[Job] = []
    with bar, tempfile.TemporaryDirectory(prefix="memlab-questions-") as library:
        for job in todo:
            outcome = kept_outcome(out, job)
            if outcome is None:
                waiting.append(job)
                continue
            yield _enter(out, job, outcome)
            bar.update()
        if not waiting:
            return
        questions.make_library(Path(library))
        for job, outcome in run_jobs(waiting, jobs, Settings(mode, library)):
            if not outcome.error:
                keep_outcome(out, job, outcome)
            yield _enter(out, job, outcome)
            bar.update()


def _enter(out: Path, job: Job, outcome: Outcome) -> Record:
    """The record of a run notebook, with its place in the gradebook and its feedback page."""
    record = Record(job.student, job.chapter, GRADED, list(job.repairs), key=job.key)
    error = outcome.error
    if not error:
        problem = take_over(out, job, outcome)
        error = f"nbgrader couldn't grade it: {problem}" if problem else ""
    if error:
        record.status, record.key = FAILED, ""  # tried again at the next run
        record.points = dict.fromkeys(exercise_points(job.chapter))
        record.reasons.append(error)
    else:
        record.points = outcome.points
        record.reasons += [text for _, text in outcome.doubts]
        doubts = {status for status, _ in outcome.doubts}
        record.status = next((s for s in (TAMPERED, REVIEW) if s in doubts), GRADED)
    _write_page(out, job.nbgrader_id, record)
    write_record(out, job.nbgrader_id, record)
    if record.status == GRADED:
        forget_outcome(out, job)
    return record


# -- feedback, tables ---------------------------------------------------------------------------------------


def _page_path(out: Path, record: Record) -> Path:
    return out / "feedback" / record.student / f"{record.chapter}.html"


def _write_page(out: Path, nbgrader_id: str, record: Record) -> None:
    """nbgrader's feedback page, or a page with the reason where there is none."""
    page = ""
    if record.status != FAILED:
        result = api(out).generate_feedback(record.chapter, nbgrader_id, force=True)
        made = out / "course" / "feedback" / nbgrader_id / record.chapter / f"{record.chapter}.html"
        if result["success"] and made.exists():
            # no script runs on it, whatever a submission wrote into its cells, and nothing is fetched
            page = made.read_text("utf-8").replace("<head>", f"<head>{_NO_SCRIPTS}", 1)
    write_atomically(_page_path(out, record), page or _plain_page(record))


def _renew_feedback(out: Path, records: Sequence[Record]) -> None:
    """Writes the pages again whose points or comments by hand have changed since."""
    ids = dict(zip(names := _students(records), nbgrader_ids(names), strict=True))
    now = by_hand(out)
    for record in records:
        given = now.get((ids[record.student], record.chapter))
        if given is not None and record.by_hand != given.signature and record.status not in (FAILED, MISSING):
            record.by_hand = given.signature
            _write_page(out, ids[record.student], record)
            write_record(out, ids[record.student], record)


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
    manual = by_hand(out)
    ids = dict(zip(names := _students(records), nbgrader_ids(names), strict=True))
    grades, totals, reasons = [], [], []
    for r in records:
        maximum = exercise_points(r.chapter)
        for number, top in maximum.items():
            grades.append((r.student, r.chapter, number, _cell(r.points.get(number)), top, r.status))
        known = [p for p in r.points.values() if p is not None]
        total = _cell(round(sum(known), 6) if known else None)
        given = manual.get((ids[r.student], r.chapter))
        written = "" if given is None or r.status in (FAILED, MISSING) else _cell(given.points)
        totals.append((r.student, r.chapter, total, sum(maximum.values()), written, r.status))
        reasons += [(r.student, r.chapter, r.status, reason) for reason in r.reasons]
    _write_csv(out / "grades.csv", "student,chapter,exercise,points,max_points,status", grades)
    _write_csv(out / "totals.csv", "student,chapter,points,max_points,manual_points,status", totals)
    _write_csv(out / "reasons.csv", "student,chapter,status,reason", reasons)


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
