"""SIGKILL of the grader at twenty random moments, and then the same command again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.submissions.harness import (
    CASES,
    _adopt_orphans,
    _children,
    command,
    environment,
    grade,
    make_class,
)

KILLS = int(os.environ.get("MEMLAB_STRESS_KILLS", "20"))
NAMES = (
    "half",
    "warns",
    "os_exit",
    "truncated",
    "nothing",
    "check_replaced",
    "stripped",
    "zip_file",
    "syntax_error",
)
HONEST = int(os.environ.get("MEMLAB_STRESS_HONEST", "30"))
TABLES = ("grades.csv", "totals.csv", "reasons.csv")
OPTIONS = ("--seed", "a seed for both runs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("killed") / "c"
    make_class(made, [CASES[name] for name in NAMES], HONEST)
    return made


def _records(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (out / "records").rglob("*.json")}


def _killed_run(root: Path, out: str, seconds: float) -> bool:
    """Starts the grader and kills it, and it alone, after some seconds; False when it was done by then."""
    with environment() as variables:
        process = subprocess.Popen(
            command(root, *OPTIONS, out=out), cwd=root, env=variables,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        return False


def _gone(mine: set[str]) -> set[str]:
    """What is still there of a killed run after ten seconds."""
    until = time.monotonic() + 10
    while (left := _children() - mine) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def test_killed_twenty_times_and_resumed(root: Path) -> None:
    _adopt_orphans()
    whole = grade(root, *OPTIONS, out="whole")
    rng = random.Random(os.environ.get("MEMLAB_STRESS_SEED", "1"))
    mine, kills, rounds = _children(), 0, 0
    while kills < KILLS:
        rounds += 1
        out = root / f"killed{rounds}"
        while kills < KILLS:
            before = _records(out)
            # early ones meet the start, late ones the work; none gets through all of it
            if not _killed_run(
                root, out.name, rng.choice([rng.uniform(0.1, 6), rng.uniform(4, whole.seconds / 3)])
            ):
                break
            kills += 1
            print(f"kill {kills} of {KILLS}: {len(_records(out))} records", flush=True)
            assert _gone(mine) == set()
            assert not list(out.rglob(".*.json.*"))[10:], "unfinished files pile up"
            after = _records(out)
            twice = [p.parent.name for p in before if after.get(p) != before[p] and not _unread(p)]
            assert twice == [], "graded again"
        before = _records(out)
        resumed = grade(root, *OPTIONS, out=out.name)
        assert resumed.harm == []
        for table in reversed(TABLES):  # the reasons tell most
            now, then = ((o / table).read_text("utf-8").splitlines() for o in (out, whole.out))
            assert sorted(set(now) ^ set(then)) == [], table
        again = [p.parent.name for p in before if p.stat().st_mtime_ns != before[p] and not _unread(p)]
        assert again == [], "graded again"
        _gradebook_is_whole(out)
    print(f"\n{kills} kills in {rounds} rounds of {HONEST + len(NAMES) + 1} submissions: the same grades")


def _unread(path: Path) -> bool:
    """Records of what couldn't be read are written at each run: nothing was graded for them."""
    return '"key": ""' in path.read_text("utf-8")


def _gradebook_is_whole(out: Path) -> None:
    with contextlib.closing(sqlite3.connect(out / "gradebook.db", timeout=1)) as book:
        assert book.execute("pragma integrity_check").fetchone() == ("ok",)
        twice = book.execute(
            "select student_id, assignment_id, count(*) from submitted_assignment "
            "group by 1, 2 having count(*) > 1"
        ).fetchall()
        assert twice == []
        book.execute("begin immediate")  # no lock is left
        book.rollback()


def test_interrupted_and_terminated_runs_end_by_themselves(root: Path) -> None:
    _adopt_orphans()
    mine = _children()
    for name, code in ((signal.SIGINT, 130), (signal.SIGTERM, 130)):
        with environment() as variables:
            process = subprocess.Popen(
                command(root, *OPTIONS, out=f"ended{name}"), cwd=root, env=variables,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            out = root / f"ended{name}"
            until = time.monotonic() + 120
            while not list(out.rglob("records/*/*.json"))[8:] and time.monotonic() < until:
                time.sleep(0.2)
            process.send_signal(name)
            _, said = process.communicate(timeout=60)
        assert process.returncode == code and "kept" in said, said
        assert _gone(mine) == set()
        assert not psutil.pid_exists(process.pid)
