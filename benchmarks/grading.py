"""Grades the same honest submissions with plain `nbgrader autograde` and with this grader, on one machine.

    python -m benchmarks.grading [--number 40] [--chapter 2] [--jobs 2] [--rounds 1] [--json FILE]

Wall time decides how long an instructor waits; processor time holds on a busy machine too. Both are of the
whole command, from start to gradebook: for ours that includes loading the workers, scoring and the feedback
pages, for nbgrader neither. Plain nbgrader runs the chapter at its normal size, as it would without us, and
again with MEMLAB_SIZE=smallest: so the gain of small demonstrations is told from that of the workers.

Memory is the sum of proportional set sizes (pages that processes share count once), sampled twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from autograder import build
from autograder.course import Chapter, course_root, select

_PLAIN = """c = get_config()
c.CourseDirectory.root = "."
c.CourseDirectory.course_id = "memlab"
c.Execute.timeout = 600
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = "(?s).*"
"""


class _Watch(threading.Thread):
    """Samples a process and all below it: processor seconds by process, and proportional memory."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(process)
        self.used: dict[tuple[int, float], float] = {}
        self.memory: list[int] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            total = 0
            try:
                family = [self.root, *self.root.children(recursive=True)]
            except psutil.Error:
                break
            for process in family:
                try:
                    times = process.cpu_times()
                    self.used[process.pid, process.create_time()] = times.user + times.system
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.memory.append(total)


def _timed(command: list[str], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    began = time.monotonic()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        watch = _Watch(process.pid)
        watch.start()
        code = process.wait()
    watch.done.set()
    watch.join()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{(folder / 'output').read_text()[-2000:]}")
    half = len(watch.memory) // 2
    return {
        "wall_seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(sum(watch.used.values()), 1),
        "memory_peak_bytes": max(watch.memory, default=0),
        "memory_peak_first_half_bytes": max(watch.memory[:half], default=0),
        "memory_peak_second_half_bytes": max(watch.memory[half:], default=0),
    }


def _hand_in(folder: Path, chapter: Chapter, number: int, *, nested: bool) -> None:
    [item] = build.build_all([chapter])
    text = build.to_text(item.source)
    for n in range(number):
        place = folder / f"student{n:03}" / chapter.name if nested else folder / f"student{n:03}"
        place.mkdir(parents=True)
        (place / f"{chapter.name}.ipynb").write_text(text, "utf-8")


def plain(root: Path, chapter: Chapter, number: int, size: str) -> dict[str, Any]:
    """`nbgrader autograde`, with the one setting without which a warning makes an answer worth 0."""
    source = root / "source" / chapter.name
    source.mkdir(parents=True)
    [item] = build.build_all([chapter])
    (source / f"{chapter.name}.ipynb").write_text(build.to_text(item.source), "utf-8")
    (root / "nbgrader_config.py").write_text(_PLAIN, "utf-8")
    _hand_in(root / "submitted", chapter, number, nested=True)
    environment = {**os.environ, "MEMLAB_SIZE": size, "OMP_NUM_THREADS": "1", "MEMLAB_HOME": str(root)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    nbgrader = str(Path(sys.executable).parent / "nbgrader")
    made = [nbgrader, "generate_assignment", chapter.name, "--create"]
    subprocess.run(made, cwd=root, env=environment, check=True, capture_output=True)
    return _timed([nbgrader, "autograde", chapter.name], root, environment)


def ours(root: Path, chapter: Chapter, number: int, jobs: int) -> dict[str, Any]:
    """`autograder grade`."""
    _hand_in(root / "submissions", chapter, number, nested=False)
    command = [sys.executable, "-m", "autograder.cli", "grade", "submissions", "--out", "graded"]
    command += ["--chapter", str(chapter.number), "--jobs", str(jobs)]
    (root / "solutions").mkdir()
    (root / "solutions" / chapter.source.name).write_bytes(chapter.source.read_bytes())
    result = _timed(command, root, {**os.environ, "OMP_NUM_THREADS": "1"})
    rows = (root / "graded" / "totals.csv").read_text("utf-8").splitlines()[1:]
    if len(rows) != number or not all(row.endswith(",graded") for row in rows):
        raise SystemExit(f"not every honest submission was graded: {rows[:3]}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--chapter", default="2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="how often each is run; the quickest counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    [chapter] = select(course_root(), [options.chapter])
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "plain": [], "plain_smallest": []}
    load = os.getloadavg()[0]
    for _ in range(options.rounds):
        for name, kept in runs.items():
            with tempfile.TemporaryDirectory(prefix="grading-") as folder:
                root = Path(folder)
                if name == "ours":
                    kept.append(ours(root, chapter, options.number, options.jobs))
                else:
                    size = "normal" if name == "plain" else "smallest"
                    kept.append(plain(root, chapter, options.number, size))
            print(name, kept[-1], flush=True)
    best = {name: min(kept, key=lambda run: run["wall_seconds"]) for name, kept in runs.items()}
    result = {
        "chapter": chapter.name,
        "submissions": options.number,
        "workers": options.jobs,
        "rounds": options.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "python": platform.python_version(),
        "runs": best,
        "times_faster_wall": round(best["plain"]["wall_seconds"] / best["ours"]["wall_seconds"], 2),
        "times_faster_wall_same_size": round(
            best["plain_smallest"]["wall_seconds"] / best["ours"]["wall_seconds"], 2
        ),
        "times_less_processor": round(
            best["plain"]["processor_seconds"] / best["ours"]["processor_seconds"], 2
        ),
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.json:
        unfinished = options.json.with_name(options.json.name + ".part")
        unfinished.write_text(text, "utf-8")
        unfinished.replace(options.json)


if __name__ == "__main__":
    main()
