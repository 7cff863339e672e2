"""A class larger than one machine: the same jobs on the workers of a Dask scheduler, as on a SLURM cluster.

The workers need this package installed and a sandbox of their own. The gradebook stays with the grader: what
travels is plain data, a job there and an outcome back. A job of a worker that dies is run by another.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from autograder.course import CourseError
from autograder.execution import Budget
from autograder.records import Job, Outcome
from autograder.sandbox import Settings, choose
from autograder.workers import Runner

_own = threading.local()


def run_on_cluster(
    jobs: Sequence[Job], address: str, mode: str, budget: Budget | None = None
) -> Iterator[tuple[Job, Outcome]]:
    """The outcome of every job, in the order in which they end.

    Raises CourseError where the scheduler can't be reached or Dask isn't installed.
    """
    try:
        import distributed
    except ImportError:
        raise CourseError("--scheduler needs Dask: pip install 'memlab[cluster]'") from None
    try:
        module: Any = distributed
        client = module.Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise CourseError(f"no Dask scheduler at {address}: {error}") from None
    with client:
        tasks: dict[Any, Job] = {}
        for job in jobs:
            tasks[client.submit(run_here, job, mode, budget or Budget(), pure=False)] = job
        for task in module.as_completed(tasks, loop=client.loop):
            failed = task.exception()
            if failed is None:
                yield tasks[task], task.result()
            else:
                text = f"{type(failed).__name__}: {failed}".splitlines()[0]
                yield tasks[task], Outcome("", error=f"the grader stopped: {text}")


def run_here(job: Job, mode: str, budget: Budget) -> Outcome:
    """One job, in the sandbox of this worker's thread."""
    if getattr(_own, "runner", None) is None:
        try:
            _own.runner = Runner(Settings(choose(mode)), budget)
        except CourseError as error:
            return Outcome("", error=f"this worker has no sandbox: {error}")
        atexit.register(_own.runner.close)
    outcome: Outcome = _own.runner.run(job)
    return outcome
