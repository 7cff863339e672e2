"""Runs jobs in long-lived worker processes: each loads torch once, inside its own sandbox.

A worker that dies, or overstays, costs only its submission, and that one is tried once more. Workers end with
the grader, however it ends, and their sandboxes end with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import nbformat

from autograder import answers, errors
from autograder.evidence import REVIEW, TAMPERED, Verdict, check_number, judge
from autograder.execution import MAX_DEATHS, Budget, execute
from autograder.look import suspicions
from autograder.records import CELL_STOPPED, Job, Outcome, exercise_points
from autograder.sandbox import START_TIMEOUT, Sandbox, SandboxError, Settings

_PR_SET_PDEATHSIG = 1


def run_job(job: Job, sandbox: Sandbox, budget: Budget | None = None) -> Outcome:
    """Runs one notebook in the sandbox and scores its evidence. Raises SandboxError."""
    submitted = nbformat.reads(job.submitted, 4)  # type: ignore[no-untyped-call]
    ran = execute(submitted, sandbox, job.seed, budget)
    outcome = Outcome(job.key, points=dict.fromkeys(exercise_points(job.chapter)), seconds=ran.seconds)
    for number, why in ran.tampered:
        outcome.doubts.append((TAMPERED, f"exercise {number}: {why}"))
    for number, why in ran.odd:
        outcome.doubts.append((REVIEW, f"exercise {number}: {why}"))
    broken: list[tuple[str, str]] = []
    for cell in ran.notebook.cells:
        died = [o["evalue"] for o in cell.get("outputs", []) if o.get("ename") == "KernelDied"]
        number = cell["metadata"].get("memlab", {}).get("exercise", "")
        where = f"exercise {number}" if number else name_of(cell)
        if died:
            outcome.doubts.append((REVIEW, f"{where}: {died[0]}"))
        if cell.cell_type == "code" and cell.get("id") in job.own:
            outcome.doubts += [(REVIEW, f"{where}: {why}") for why in suspicions(cell.source)]
            if why := errors.stopped(cell):
                broken.append((number, f"{where}: {CELL_STOPPED} {why}"))
        if check_number(cell):
            verdict = judge(cell, job.seed)
            outcome.points[verdict.exercise] = verdict.points
            if verdict.status:
                outcome.doubts.append((verdict.status, verdict.why))
            if sandbox.settings.mode == "landlock" and _refused(verdict):
                why = "it asked for what this sandbox can't give; bubblewrap can"
                outcome.doubts.append((REVIEW, f"exercise {verdict.exercise}: {why}"))
            messages = answers.write(cell, verdict)
            if messages:
                outcome.messages[verdict.exercise] = messages
    top = exercise_points(job.chapter)
    outcome.remarks = [text for number, text in broken if outcome.points.get(number) != top.get(number, -1)]
    outcome.executed = nbformat.writes(ran.notebook)  # type: ignore[no-untyped-call]
    return outcome


def name_of(cell: Any) -> str:
    """How a cell is called that is no exercise's: one that the student added, by how it begins."""
    name = str(cell.get("id", "?"))
    begin = " ".join(cell.source.split())[:40]
    return f'cell "{name}"' if not name.startswith("added-") else f'the added cell that begins "{begin}"'


def _refused(verdict: Verdict) -> bool:
    """Whether points were lost by a permission; the workers of a DataLoader need shared memory, for one."""
    messages = verdict.score.messages if verdict.score is not None else ()
    return any("Permission denied" in text or "Operation not permitted" in text for text in messages)


class Runner:
    """Runs one job after another in a sandbox of its own; one that fails is replaced once for each job."""

    def __init__(self, settings: Settings, budget: Budget | None = None) -> None:
        self._settings, self._budget = settings, budget
        self._sandbox: Sandbox | None = None

    def run(self, job: Job) -> Outcome:
        """The outcome; where nothing could be run, its `error` says why. Raises nothing."""
        error = ""
        for _ in range(2):
            try:
                self._sandbox = self._sandbox or Sandbox(self._settings)
                return run_job(job, self._sandbox, self._budget)
            except SandboxError as failed:
                error = f"the sandbox failed: {failed}"
                self.close()
            except Exception as failed:  # one submission must not end the class
                text = f"the grader stopped: {type(failed).__name__}: {failed}".splitlines()[0]
                return Outcome("", error=text)
        return Outcome("", error=error)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
        self._sandbox = None


class _Worker:
    """A worker process as the parent sees it."""

    def __init__(self, settings: Settings, budget: Budget) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, inside = context.Pipe()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
        try:
            self.process = context.Process(target=_work, args=(inside, settings, budget), daemon=True)
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        inside.close()
        self.job: Job | None = None
        self.until = 0.0

    def give(self, job: Job, seconds: float) -> None:
        self.job, self.until = job, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # a dead worker is noticed where its answer is awaited
            self.connection.send(job)

    def end(self) -> None:
        """At once, or in order where it is idle: then it puts its sandbox away."""
        self.connection.close()
        if self.job is None:
            self.process.join(10)
        self.process.kill()
        self.process.join()


def run_jobs(
    jobs: Sequence[Job], number: int, settings: Settings, budget: Budget | None = None
) -> Iterator[tuple[Job, Outcome]]:
    """The outcome of every job, in the order in which they end, from `number` workers."""
    budget = budget or Budget()
    # the last kernel may still run its cell when the notebook's time is over
    patience = START_TIMEOUT + budget.notebook_seconds + (MAX_DEATHS + 1) * budget.cell_seconds
    todo = deque(jobs)
    tries: Counter[Job] = Counter()
    workers = [_Worker(settings, budget) for _ in range(min(number, len(jobs)))]
    try:
        while True:
            for worker in workers:
                if worker.job is None and todo:
                    worker.give(todo.popleft(), patience)
            busy = {worker.connection: worker for worker in workers if worker.job is not None}
            if not busy:
                return
            done: list[tuple[Job, Outcome]] = []
            ready: set[Any] = set(wait(list(busy), 1))
            for connection, worker in busy.items():
                job, lost = worker.job, time.monotonic() > worker.until
                assert job is not None
                if connection in ready:
                    try:
                        done.append((job, connection.recv()))
                        worker.job = None
                        continue
                    except (EOFError, OSError):
                        lost = True
                if lost:
                    worker.end()
                    workers[workers.index(worker)] = _Worker(settings, budget)
                    tries[job] += 1
                    if tries[job] < 2:
                        todo.append(job)
                    else:
                        done.append((job, Outcome("", error="the grader stopped: its worker died twice")))
            for worker in workers:  # nobody waits while the gradebook is written
                if worker.job is None and todo:
                    worker.give(todo.popleft(), patience)
            yield from done
    finally:
        for worker in workers:
            worker.end()


def _work(connection: Connection, settings: Settings, budget: Budget) -> None:
    """A worker's life: jobs in, outcomes out."""
    _end_with_parent()
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # no output of a submission reaches the instructor's terminal
        os.dup2(quiet, descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    runner = Runner(settings, budget)
    with contextlib.closing(runner), contextlib.suppress(EOFError):
        while True:
            connection.send(runner.run(connection.recv()))


def _end_with_parent() -> None:
    """The Linux kernel kills this process when the grader is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
