"""The same grades with any number of workers, in any order, on other machines, and through any death."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from autograder import build, workers
from autograder.course import CourseError, select
from autograder.execution import Budget
from autograder.records import Job, Outcome
from autograder.sandbox import Settings, why_no_bubblewrap
from tests.autograder.small_course import hand_in, small_course, solved, untouched

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTER = "01_memory_basics"
SETTINGS = Settings("bubblewrap")

if why_no_bubblewrap() and os.environ.get("CI"):
    pytest.fail(f"CI must test the sandbox: {why_no_bubblewrap()}")
pytestmark = pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap())

ANSWERS = {
    "right": "return bus_bits * gbps_per_pin / 8",
    "wrong": "return bus_bits * gbps_per_pin",
    "random": "import random, torch\n    return random.random() + float(torch.rand(1))",
    "dies": "import os\n    os._exit(1)",
    "exits": "raise SystemExit",
}


def job(name: str, answer: str) -> Job:
    """Exercise 1.1 alone."""
    [item] = build.build_all(select(ROOT, ["1"]))
    notebook = nbformat.reads(build.to_text(item.source), 4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in ("ex-1-1", "check-1-1")]
    notebook.cells[0].source = (
        f"import memlab\ndef bandwidth(bus_bits, gbps_per_pin):\n    {answer}\n"
        "def visible(nbytes):\n    return nbytes / 10**9, nbytes / 2**30\n"
    )
    return Job(name, name, CHAPTER, nbformat.writes(notebook), 3, (), f"key of {name}")


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return [job(name, answer) for name, answer in ANSWERS.items()]


def plain(found: Iterator[tuple[Job, Outcome]]) -> dict[str, Any]:
    return {j.student: (o.points, o.doubts, o.messages, o.error) for j, o in found}


@pytest.fixture(scope="module")
def alone(jobs: list[Job]) -> dict[str, Any]:
    return plain(workers.run_jobs(jobs, 1, SETTINGS))


def test_each_outcome_is_the_expected_one(alone: dict[str, Any]) -> None:
    assert {name: outcome[0]["1.1"] for name, outcome in alone.items()} == {
        "right": 2, "wrong": 1, "random": 1, "dies": 0, "exits": 1,
    }  # fmt: skip
    assert [name for name, outcome in alone.items() if outcome[1]] == ["dies"]


def test_number_and_order_change_nothing(jobs: list[Job], alone: dict[str, Any]) -> None:
    shuffled = random.Random(1).sample(jobs, len(jobs))
    assert plain(workers.run_jobs(shuffled, 3, SETTINGS)) == alone


def test_a_killed_worker_loses_nothing(jobs: list[Job], alone: dict[str, Any]) -> None:
    running = workers.run_jobs(jobs, 2, SETTINGS)
    first = next(running)
    for child in psutil.Process().children():
        if any("spawn_main" in word for word in child.cmdline()):
            child.kill()
    assert plain(iter([first, *running])) == alone


def test_a_job_that_never_ends_is_given_up(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT", 1)
    monkeypatch.setattr(workers, "MAX_DEATHS", 0)
    budget = Budget(cell_seconds=0, notebook_seconds=0)
    [(_, outcome)] = workers.run_jobs(jobs[:1], 1, SETTINGS, budget)
    assert "worker died twice" in outcome.error


def commands() -> list[str]:
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def test_no_process_and_no_folder_is_left_after_a_run(jobs: list[Job]) -> None:
    folders = set(Path(tempfile.gettempdir()).glob("memlab-*"))
    list(workers.run_jobs(jobs[:2], 2, SETTINGS))
    new = {f.name for f in set(Path(tempfile.gettempdir()).glob("memlab-*")) - folders}
    mine = [name for name in new if not Path("/proc", name.split("-")[1]).exists()]
    assert mine == [] and not [
        c for c in commands() for name in new if name in c and "/runs" in c and name in mine
    ]


# -- the whole grader, killed ------------------------------------------------------------------------------


def grade(root: Path, out: str) -> list[str]:
    return [sys.executable, "-m", "autograder.cli", "grade", "submissions", "--out", out, "--seed", "s"]


def test_a_grader_killed_at_any_moment_goes_on_where_it_was(tmp_path: Path) -> None:
    [chapter] = small_course(tmp_path, CHAPTER)
    for name in ("a", "b", "c", "d"):
        hand_in(
            tmp_path / "submissions", name, chapter, solved(chapter) if name in "ac" else untouched(chapter)
        )
    subprocess.run(grade(tmp_path, "undisturbed"), cwd=tmp_path, check=True, capture_output=True)
    kept: dict[str, int] = {}
    records = tmp_path / "killed" / "records"
    for wanted in (0, 1, 3):  # records there when the blow falls
        grader = subprocess.Popen(
            grade(tmp_path, "killed"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while grader.poll() is None and len(list(records.glob("*/*.json"))) < wanted:
            time.sleep(0.02)
        if not wanted:
            time.sleep(3)
        grader.send_signal(signal.SIGKILL)
        grader.wait()
        kept |= {str(p): p.stat().st_mtime_ns for p in records.glob("*/*.json") if str(p) not in kept}
    done = subprocess.run(grade(tmp_path, "killed"), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kept and all(Path(path).stat().st_mtime_ns == time_ for path, time_ in kept.items())
    for table in ("grades.csv", "totals.csv", "reasons.csv"):
        assert (tmp_path / "killed" / table).read_text() == (tmp_path / "undisturbed" / table).read_text()
    assert not [command for command in commands() if str(tmp_path) in command]


def test_two_graders_do_not_write_to_one_folder(tmp_path: Path) -> None:
    from autograder.grade import _alone

    with _alone(tmp_path), pytest.raises(CourseError, match="another grader is at work"):
        _alone(tmp_path)
    _alone(tmp_path).close()


# -- other machines ----------------------------------------------------------------------------------------


def test_two_dask_workers_give_the_same_grades_and_one_killed_midway_loses_nothing(
    jobs: list[Job], alone: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("distributed")
    from autograder.cluster import run_on_cluster

    dask = shutil.which("dask", path=str(Path(sys.executable).parent)) or "dask"
    address = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": str(ROOT)}
    started = [
        subprocess.Popen(
            [
                dask,
                "scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--no-dashboard",
                "--scheduler-file",
                str(address),
            ],
            **quiet,
        )
    ]
    try:
        for _ in range(2):
            started.append(
                subprocess.Popen(
                    [dask, "worker", "--scheduler-file", str(address), "--nthreads", "1", "--no-dashboard",
                     "--local-directory", str(tmp_path), "--no-nanny"],
                    **quiet,
                )
            )  # fmt: skip
        until = time.monotonic() + 60
        while not address.exists() and time.monotonic() < until:
            time.sleep(0.1)
        import json

        where = json.loads(address.read_text())["address"]
        running = run_on_cluster(jobs * 2, where, "bubblewrap")
        found = [next(running)]
        started[1].kill()
        found += running
        assert len(found) == 2 * len(jobs)
        assert plain(iter(found[: len(jobs)])) | plain(iter(found[len(jobs) :])) == alone
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_scheduler_that_is_not_there_is_said() -> None:
    pytest.importorskip("distributed")
    from autograder import cluster

    with pytest.raises(CourseError, match="no Dask scheduler at"):
        list(cluster.run_on_cluster([], "tcp://127.0.0.1:9", "bubblewrap", None))
