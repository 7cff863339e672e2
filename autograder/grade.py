"""Grades a folder of submissions: nbgrader inside, evidence and a record of every submission around it.

    OUT/grades.csv      student,chapter,exercise,points,max_points,status
    OUT/totals.csv      student,chapter,points,max_points,manual_points,status
    OUT/reasons.csv     student,chapter,status,reason: a line for every repair, doubt and failure
    OUT/late.csv        with a deadline: points before and after the policy for late work (`late.py`)
    OUT/feedback/STUDENT/CHAPTER.html
    OUT/gradebook.db    nbgrader's; points given by hand in formgrader are read from it again at every run
    OUT/course/         nbgrader's folders: source/, submitted/, autograded/; formgrader opens there
    OUT/class.json      who handed in, and what an LMS calls them; deadlines.json: what was agreed
    OUT/records/        one JSON file for each graded submission: a second run is quick, a kill harmless

Points are computed here from the evidence that the checks leave in the notebook's outputs, and compared with
the points that nbgrader read from the same cells; where the two differ the submission is `tampered`.

Status, the same words in every table:
`graded`; `needs_review` (graded, and a person should look: the reason says why); `failed` (could not be
graded: its points are empty, not 0); `tampered` (points appeared without evidence); `missing` (nothing was
handed in).
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import nbformat
from tqdm import tqdm

from autograder import build, late, submissions, tables
from autograder.course import Chapter, CourseError, write_atomically
from autograder.evidence import REVIEW, TAMPERED
from autograder.execution import Budget
from autograder.feedback import write_pages
from autograder.gradebook import name_students, prepare, take_over
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
from autograder.roster import read_roster
from autograder.sandbox import Settings, choose, weaker
from autograder.workers import run_jobs
from memlab import doctor


@dataclass(frozen=True)
class Collecting:
    """How submissions are found and which of several counts.

    `pattern` names loose files, `roster` is the instructor's CSV, `attempt` is `latest` or `first`.
    """

    pattern: str | None = None
    roster: Path | None = None
    attempt: str = "latest"


def grade_folder(
    folder: Path,
    out: Path,
    chapters: Sequence[Chapter],
    *,
    jobs: int = 2,
    seed: str | None = None,
    sandbox: str = "auto",
    scheduler: str | None = None,
    seconds: float | None = None,
    collecting: Collecting = Collecting(),
    deadline: late.Policy | None = None,
    show_hidden: bool = False,
) -> list[Record]:
    """Grades every submission in `folder` for these chapters, and writes the tables and feedback to `out`.

    `folder` may be an archive. A `deadline` given once stays for its chapters. A submission that was graded
    before, and hasn't changed since, is taken from its record. Raises CourseError where nothing can be graded
    at all (no such folder, nowhere to write, another grader at work in `out`).

    `jobs` workers run here, or those of the Dask `scheduler`; a notebook may take `seconds`.
    """
    budget = Budget() if seconds is None else Budget(notebook_seconds=seconds)
    if scheduler is not None:
        from autograder.cluster import run_on_cluster

        def run(waiting: list[Job]) -> Iterator[tuple[Job, Outcome]]:
            return run_on_cluster(waiting, scheduler, sandbox, budget)
    else:
        mode = choose(sandbox)

        def run(waiting: list[Job]) -> Iterator[tuple[Job, Outcome]]:
            return run_jobs(waiting, jobs, Settings(mode), budget)

    out = out.resolve()  # nbgrader's database URL needs it
    if collecting.attempt not in ("latest", "first"):
        raise CourseError(f"unknown attempt {collecting.attempt!r}: latest or first")
    roster = read_roster(collecting.roster) if collecting.roster is not None else None
    for line in roster.said if roster is not None else ():
        print(line, file=sys.stderr)
    names = [c.name for c in chapters]
    students, ignored = submissions.collect(folder, names, out, pattern=collecting.pattern, roster=roster)
    built = build.build_all(chapters)
    _not_anothers(out)
    _make_folders(out)
    lock = _alone(out)
    if scheduler is None and weaker(mode):
        print(weaker(mode), file=sys.stderr)
    prepare(out, built)
    tables.remember(out, students, names)
    policies = late.kept(out)
    if deadline is not None:
        policies |= dict.fromkeys(names, deadline)
        late.keep(out, policies)
    number = _course_seed(out, seed)
    code = _code_hash()
    records: list[Record] = []
    todo: list[Job] = []
    for student, nbgrader_id in zip(students, nbgrader_ids([s.id for s in students]), strict=True):
        for item in built:
            policy = policies.get(item.chapter.name)
            outcome = _admit(student, nbgrader_id, item, out, number, code, collecting.attempt, policy)
            if isinstance(outcome, Job):
                todo.append(outcome)
            else:
                records.append(outcome)
    for line in ignored:
        print(f"left out: {line}", file=sys.stderr)
    done: set[tuple[str, str]] = set()
    try:
        for record in _run(todo, out, run):
            records.append(record)
            done.add((record.student, record.chapter))
    finally:
        waiting = {(job.student, job.chapter) for job in todo} - done
        if waiting:
            print(f"{len(done)} of {len(todo)} submissions are done", file=sys.stderr)
        records += [_interrupted(job) for job in todo if (job.student, job.chapter) in waiting]
        everything = records + _of_other_chapters(out, chapters)
        everything.sort(key=lambda r: (r.student, r.chapter))
        graded = replace(tables.course(out), records=everything)
        ids = {name: member.nbgrader_id for name, member in graded.members.items()}
        name_students(out, {m.nbgrader_id: m.name or m.id for m in graded.members.values()})
        settled = [r for r in everything if (r.student, r.chapter) not in waiting]
        write_pages(out, settled, ids, graded.manual, policies, show_hidden=show_hidden)
        tables.write(graded)
        lock.close()
    return sorted(records, key=lambda r: (r.student, r.chapter))


def _interrupted(job: Job) -> Record:
    why = "not graded yet: interrupted; the same command goes on from here"
    points: dict[str, float | None] = dict.fromkeys(exercise_points(job.chapter))
    return Record(job.student, job.chapter, FAILED, [*job.repairs, why], points=points)


def _of_other_chapters(out: Path, chapters: Sequence[Chapter]) -> list[Record]:
    """What earlier runs for other chapters left: the tables go on holding the whole course."""
    now = {chapter.name for chapter in chapters}
    found = [read_record(path) for path in sorted((out / "records").glob("*/*.json")) if path.stem not in now]
    return [record for record in found if record is not None]


# -- before the run ----------------------------------------------------------------------------------------


#: What is in a folder that somebody else uses; nothing of ours begins with it.
_FOREIGN = (
    "nbgrader_config.py",
    "source",
    "release",
    "submitted",
    "autograded",
    "solutions",
    "pyproject.toml",
    ".git",
)


def _not_anothers(out: Path) -> None:
    """Raises CourseError where `out` is used for something else: its gradebook would be ours."""
    if not out.is_dir() or submissions.is_graders(out):
        return
    there = [name for name in _FOREIGN if (out / name).exists()]
    if there or ((out / "gradebook.db").exists() and not (out / "records").is_dir()):
        what = there[0] if there else "gradebook.db"
        raise CourseError(f"{out} isn't the grader's: {what} is in it; choose another --out, one that is new")


def _make_folders(out: Path) -> None:
    try:
        for name in ("course/source", "course/submitted", "records", "feedback"):
            (out / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CourseError(f"can't write to {out}: {error.strerror}; choose another --out") from None


def _alone(out: Path) -> IO[str]:
    """One grader at a time writes to `out`. The lock is the open file's, and gone with its process."""
    file = (out / "lock").open("w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows: nothing but this message would be gained
    except OSError:
        file.close()
        raise CourseError(
            f"another grader is at work in {out}: wait for it, or choose another --out"
        ) from None
    return file


def _course_seed(out: Path, given: str | None) -> int:
    """The seed of the hidden inputs: given, or made once for this output folder; either is kept in it."""
    path = out / "check_seed"
    if given is not None:
        number = int.from_bytes(hashlib.sha256(given.encode()).digest()[:4], "big")
        if path.exists() and path.read_text("utf-8").strip() != str(number):
            print(f"{path}: another seed from now on, so every submission is graded anew", file=sys.stderr)
        _keep_seed(path, number)
        return number
    if not path.exists():
        _keep_seed(path, secrets.randbelow(2**31))
    text = path.read_text("utf-8").strip()
    if not text.isdigit():
        raise CourseError(f"{path} should hold one number; delete it and every submission is graded anew")
    return int(text)


def _keep_seed(path: Path, number: int) -> None:
    write_atomically(path, f"{number}\n")
    path.chmod(0o600)


def _code_hash() -> str:
    """Changes when memlab or the grader does: records made by other code aren't used again."""
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    for package in (here, here.parent / "memlab"):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _admit(
    student: submissions.Student,
    nbgrader_id: str,
    item: build.Built,
    out: Path,
    seed: int,
    code: str,
    attempt: str,
    policy: late.Policy | None,
) -> Record | Job:
    """A record where the outcome is known already, else the job."""
    name = item.chapter.name
    record = Record(student.id, name, MISSING, [*student.notes, *student.remarks], list(student.doubts))
    record.points = dict.fromkeys(exercise_points(name))
    named = student.notebooks.get(name, [])
    chosen, notebook, notes = _first_readable(named, item.release, attempt)
    if notebook is None and not named:
        # what is plainly another chapter's is none of this one: a folder may hold the whole course
        chosen, notebook, unfit = _first_readable(student.unnamed, item.release, attempt)
        if chosen is not None:
            notes = [
                f"{chosen.name}: recognised by its exercises, the name doesn't say which chapter it is",
                *unfit,
            ]
        elif student.unnamed:
            record.reasons += unfit
            elsewhere = all(_other_chapters(found) for found in student.unnamed)
            only = not any(student.notebooks.values()) and not elsewhere
            record.status = FAILED if only or student.notes else MISSING
            return _kept(out, nbgrader_id, record)
        else:
            record.status = FAILED if student.notes else MISSING
            return _kept(out, nbgrader_id, record)
    if chosen is None:
        record.status = FAILED
        record.reasons += notes
        return _kept(out, nbgrader_id, record)
    if len(named) > 1:
        outer = f" of {chosen.outer}" if len({found.outer for found in named}) > 1 else ""
        which = f"graded {chosen.name}{outer}, the {attempt} that can be read"
        notes.append(f"{len(named)} files for this chapter: {which}")
    submitted, time_from = chosen.modified, chosen.time_from
    if student.submitted is not None:
        submitted, time_from = student.submitted, "the roster"
    text = build.to_text(notebook)
    key = hashlib.sha256("\0".join((text, build.to_text(item.source), str(seed), code)).encode()).hexdigest()
    doubts = list(student.doubts)
    if policy is not None and student.odd_time:
        doubts.append(f"its time in the roster isn't understood: {student.odd_time[:60]!r}; see late.csv")
    if chosen.late and policy is not None and not policy.lateness(submitted):
        doubts.append(f"Canvas says late, its time says in time ({time_from}): see late.csv")
    known = read_record(record_path(out, nbgrader_id, name))
    if known is not None and known.key == key and known.student == student.id:
        new = [doubt for doubt in doubts if doubt not in known.doubts]
        if (known.submitted, known.time_from) != (submitted, time_from) or new:
            known.submitted, known.time_from = submitted, time_from
            known.doubts += new
            known.status = REVIEW if new and known.status == GRADED else known.status
            write_record(out, nbgrader_id, known)
        return known
    notes = [*student.notes, *student.remarks, *notes]
    if chosen.late:
        notes.append("Canvas marked it as late")
    known_cells = {cell.id: cell.source for cell in item.release.cells}
    own = tuple(c.id for c in notebook.cells if c.cell_type == "code" and c.source != known_cells.get(c.id))
    return Job(
        student.id,
        nbgrader_id,
        name,
        text,
        seed,
        tuple(notes),
        key,
        own=own,
        doubts=tuple(doubts),
        submitted_at=submitted,
        time_from=time_from,
    )


def _first_readable(
    found: Sequence[submissions.Found], release: Any, attempt: str
) -> tuple[submissions.Found | None, Any, list[str]]:
    """The latest (or first) file that is this chapter's notebook, the notebook to grade, and a line for each
    repair and each file that is none. None where there isn't one."""
    notes: list[str] = []
    for candidate in sorted(found, key=_newest_first if attempt == "latest" else _oldest_first):
        try:
            if candidate.fault:
                raise doctor.Unreadable(candidate.fault)
            said: list[str] = []
            mended, repairs = doctor.repair(doctor.read(candidate.data, said), release)
            notebook = nbformat.from_dict(mended)  # type: ignore[no-untyped-call]
            build.to_text(notebook)
        except doctor.Unreadable as error:
            notes.append(f"{candidate.name}: {error}")
        except Exception as error:  # one student's file must not end the class
            notes.append(f"{candidate.name}: can't be repaired ({type(error).__name__}: {str(error)[:100]})")
        else:
            about = [f"{candidate.name}: {text}" for text in (candidate.note, *said) if text]
            return candidate, notebook, [*notes, *about, *repairs]
    return None, None, notes


def _other_chapters(found: submissions.Found) -> bool:
    """Whether the file's name says another chapter of the course."""
    return submissions.chapter_of(found.name, list(doctor.releases())) is not None


def _kept(out: Path, nbgrader_id: str, record: Record) -> Record:
    """A record that needs no grading."""
    write_record(out, nbgrader_id, record)
    return record


def _newest_first(found: submissions.Found) -> tuple[int, float, int, str]:
    """By the LMS's attempt, then by time; of equally old files (a download may lose the times) the one with
    more answers."""
    return -found.attempt, -found.modified, -_answers(found), found.name


def _oldest_first(found: submissions.Found) -> tuple[int, float, int, str]:
    return found.attempt, found.modified, -_answers(found), found.name


def _answers(found: submissions.Found) -> int:
    if found.fault:
        return 0
    try:
        return doctor.answered(doctor.read(found.data))
    except Exception:
        return 0


# -- the run -----------------------------------------------------------------------------------------------


def _run(
    todo: Sequence[Job], out: Path, run: Callable[[list[Job]], Iterator[tuple[Job, Outcome]]]
) -> Iterator[Record]:
    """Runs the jobs and enters what they return into the gradebook, which nobody else writes."""
    # a terminal that doesn't know its width (0) would get an empty bar
    width = min(shutil.get_terminal_size().columns, 100)
    bar = tqdm(
        total=len(todo), desc="grading", unit="submission", ncols=width, disable=not sys.stderr.isatty()
    )
    waiting: list[Job] = []
    with bar:
        for job in todo:
            outcome = kept_outcome(out, job)
            if outcome is None:
                waiting.append(job)
                continue
            yield _enter(out, job, outcome)
            bar.update()
        if not waiting:
            return
        for job, outcome in run(waiting):
            if not outcome.error:
                keep_outcome(out, job, outcome)
            yield _enter(out, job, outcome)
            bar.update()


def _enter(out: Path, job: Job, outcome: Outcome) -> Record:
    """The record of a run notebook, with its place in the gradebook."""
    record = Record(job.student, job.chapter, GRADED, list(job.repairs), list(job.doubts), key=job.key)
    record.submitted, record.time_from = job.submitted_at, job.time_from
    error = outcome.error
    if not error:
        problem = take_over(out, job, outcome)
        error = f"nbgrader couldn't grade it: {problem}" if problem else ""
    if error:
        record.status, record.key = FAILED, ""  # tried again at the next run
        record.points = dict.fromkeys(exercise_points(job.chapter))
        record.reasons.append(error)
    else:
        record.points, record.messages, record.seconds = outcome.points, outcome.messages, outcome.seconds
        record.reasons += outcome.remarks
        record.doubts = list(dict.fromkeys([*record.doubts, *(text for _, text in outcome.doubts)]))
        doubts = {status for status, _ in outcome.doubts} | ({REVIEW} if job.doubts else set())
        record.status = next((s for s in (TAMPERED, REVIEW) if s in doubts), GRADED)
    write_record(out, job.nbgrader_id, record)
    if record.status == GRADED:
        forget_outcome(out, job)
    return record
