"""Makes a class, grades it through the real command, and counts what came out otherwise, and harm."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.autograder.small_course import small_course
from tests.submissions import CASES
from tests.submissions.case import CHAPTER, FULL, TOP, Case, Expected, Hand, World, hand_in

ROOT = Path(__file__).parents[2]

#: Stands in every honest student's work, followed by the number: nobody else may see it.
TOKEN = "written by honest student number "


# -- making a class ----------------------------------------------------------------------------------------


def make_class(root: Path, cases: Iterable[Case], honest: int = 0, port: int = 9) -> dict[str, Any]:
    """Writes a course and a class under `root`, and expected.json; returns what is in it."""
    [chapter] = small_course(root, CHAPTER)
    folder = root / "submissions"
    folder.mkdir()
    world, made = World(root, port), dict[str, Any]()
    expected: dict[str, Any] = {}
    chosen = dict.fromkeys([CASES["right"], *cases])  # others' links lead to `right`
    for case in chosen:
        names = hand_in(case, folder, world, chapter, made)
        expected[case.name] = {"students": names, "expected": asdict(case.expected), "kind": case.kind}
    for number in range(honest):
        hand = Hand(folder, f"honest-{number:03}", world, made["solved"], made["untouched"])
        hand.written().source += f"\n\n{TOKEN}{number:03}."
        hand.code("1.1", f"# {TOKEN}{number:03}.")
        hand.give()
        expected[hand.name] = {"students": [hand.name], "expected": asdict(FULL), "kind": "right"}
    (root / "expected.json").write_text(json.dumps(expected, indent=1), "utf-8")
    return expected


# -- grading it --------------------------------------------------------------------------------------------


def command(root: Path, *options: str, out: str = "graded") -> list[str]:
    return [sys.executable, "-m", "autograder.cli", "grade", "submissions", "--out", out, *options]


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables of a home and a folder for temporary files that nobody else uses."""
    place = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    (place / "h").mkdir()
    (place / "t").mkdir()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    try:
        yield {**os.environ, "HOME": str(place / "h"), "TMPDIR": str(place / "t"), "PYTHONPATH": path}
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def progress(out: Path, seconds: float = 30) -> Iterator[None]:
    """Prints, every so often, how many records there are: long runs are watched (`pytest -s`)."""
    end, began = threading.Event(), time.monotonic()

    def look() -> None:
        while not end.wait(seconds):
            count = len(list((out / "records").glob("*/*.json")))
            print(f"{out.name}: {count} records after {time.monotonic() - began:.0f} s", flush=True)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@dataclass
class Run:
    """One graded class. `harm` holds a line for everything that was harmed."""

    root: Path
    out: Path
    returncode: int
    stderr: str
    seconds: float
    cpu_seconds: float
    seed: str | None = None
    harm: list[str] = field(default_factory=list)


def grade(root: Path, *options: str, out: str = "graded", listener: Listener | None = None) -> Run:
    """Grades the class in `root`, and looks at everything that a submission could have harmed."""
    _adopt_orphans()
    before, mine = _files(root, root / out), _children()
    planted = _planted()
    with environment() as variables:
        began, used = time.monotonic(), _cpu()
        with progress(root / out):
            done = subprocess.run(
                command(root, *options, out=out), cwd=root, env=variables, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, errors="replace",
            )  # fmt: skip
        elapsed = time.monotonic() - began
        time.sleep(0.5)
        left = _children() - mine
        run = Run(root, root / out, done.returncode, done.stderr, elapsed, _cpu() - used)
        run.seed = options[options.index("--seed") + 1] if "--seed" in options else None
        run.harm += [f"a process is left: {p}" for p in left]
        for name in ("TMPDIR", "HOME"):
            run.harm += [f"left in {name}: {p.name}" for p in Path(variables[name]).iterdir()]
    after = _files(root, root / out)
    run.harm += [
        f"changed: {p}" for p in sorted(before.keys() | after.keys()) if before.get(p) != after.get(p)
    ]
    run.harm += [f"planted: {path}" for path in _planted() - planted]
    if not (run.out / "totals.csv").exists():
        raise RuntimeError(f"nothing was graded: {run.stderr[-3000:]}")
    if "Traceback" in run.stderr:
        run.harm.append(f"the grader stopped: {run.stderr[-500:]}")
    if listener is not None:
        run.harm += [f"a connection: {what}" for what in listener.heard()]
    with contextlib.closing(sqlite3.connect(run.out / "gradebook.db")) as book:
        given = book.execute("select count(*) from grade where manual_score is not null").fetchone()[0]
    if given:
        run.harm.append(f"{given} grades were changed by hand, and nobody did")
    run.harm += secrets_in_feedback(run)
    return run


def _adopt_orphans() -> None:
    """Whatever loses its parent becomes this process's child, and is seen."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _children() -> set[str]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            else:
                found.add(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def _cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _files(root: Path, out: Path) -> dict[str, Any]:
    """Every file below `root` but for `out`: its size, time and, if small, content."""
    found: dict[str, Any] = {}
    for base, folders, names in os.walk(root):
        folders[:] = [f for f in folders if Path(base, f) != out and f != "__pycache__"]
        for name in (*names, *folders):
            path = Path(base, name)
            about = path.lstat()
            small = path.is_file() and not path.is_symlink() and about.st_size < 10_000_000
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
            found[str(path.relative_to(root))] = (about.st_mode, about.st_size if small else 0, digest)
    return found


def _planted() -> set[str]:
    """Files with which cases try to reach whoever runs Python or reads a folder next."""
    import site

    places = [Path("/"), Path("/tmp"), Path("/etc"), Path(), Path(sys.prefix), Path(os.__file__).parent]
    places += map(Path, site.getsitepackages())
    names = ("PLANTED", "planted.pth", "sitecustomize.py", "nbgrader.py", "FROM_THE_ONE_BEFORE")
    return {str(place / name) for place in places for name in names if (place / name).exists()}


class Listener:
    """Listens on one port, TCP and UDP, and remembers who came."""

    def __init__(self) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", self.port))
        self._heard: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._end.is_set():
            for ready in select.select([self.tcp, self.udp], [], [], 0.2)[0]:
                if ready is self.tcp:
                    with self.tcp.accept()[0] as connection:
                        connection.settimeout(0.2)
                        with contextlib.suppress(OSError):
                            self._heard.append(f"TCP {connection.recv(60)!r}")
                            continue
                        self._heard.append("TCP")
                else:
                    self._heard.append(f"UDP {self.udp.recv(60)!r}")

    def heard(self) -> list[str]:
        return list(self._heard)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self.tcp.close()
        self.udp.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- looking at what came out ------------------------------------------------------------------------------


def totals(out: Path) -> dict[str, dict[str, str]]:
    with (out / "totals.csv").open(newline="", encoding="utf-8") as stream:
        return {row["student"]: row for row in csv.DictReader(stream)}


def reasons(out: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with (out / "reasons.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            found.setdefault(row["student"], []).append(row["reason"])
    return found


def deviations(root: Path, out: Path) -> dict[str, str]:
    """Case → what came out otherwise than expected."""
    expected = json.loads((root / "expected.json").read_text("utf-8"))
    rows, why = totals(out), reasons(out)
    found = {}
    for name, about in expected.items():
        row = next((rows[s] for s in about["students"] if s in rows), None)
        if row is None:
            found[name] = f"no row in totals.csv among {about['students']}"
            continue
        wanted = {**about["expected"], "status": tuple(about["expected"]["status"])}
        fault = Expected(**wanted).fault(row["points"], row["status"])
        if fault:
            found[name] = f"{fault} ({'; '.join(why.get(row['student'], []))[:300]})"
    return found


def _hidden(run: Run) -> set[str]:
    """Numbers of the hidden inputs of 1.1 and 1.4, as a page would show them."""
    from autograder.evidence import exercise_seed
    from autograder.grade import _course_seed
    from memlab.exercises import exercises

    kept = run.out / "check_seed"
    seed = int(kept.read_text("utf-8")) if kept.exists() else _course_seed(run.out, run.seed)
    known = exercises("1")
    found = {str(seed)}

    for number in ("1.1", "1.4"):
        hidden, public = (_asked(known[number], s) for s in (exercise_seed(seed, number), 0))
        found |= {text for text in hidden - public if len(text) >= 5}
    return found


def _asked(exercise: Any, seed: int) -> set[str]:
    """The numbers that a check asks its two functions about."""
    asked: set[str] = set()

    def answer(*given: Any) -> float:
        asked.update(map(str, given))
        return 0.0

    exercise.evidence((answer, answer), seed)
    return asked


def secrets_in_feedback(run: Run) -> list[str]:
    """A line for each page that shows what its reader may not see."""
    faults = []
    hidden = _hidden(run)
    untouched = {"bus_bits * gbps_per_pin / 8", "link[&quot;gb_per_s&quot;] / 2 if"}
    for page in sorted((run.out / "feedback").rglob("*")):
        if not page.is_file():
            continue
        student, text = page.relative_to(run.out / "feedback").parts[0], page.read_text("utf-8", "replace")
        for number in set(re.findall(TOKEN + r"(\d{3})", text)):
            if student != f"honest-{number}":
                faults.append(f"feedback of {student} shows work of honest-{number}")
        if any(word in text for word in hidden):
            shown = [word for word in hidden if word in text]
            faults.append(f"feedback of {student} shows hidden inputs: {shown[:3]}")
        plain = re.sub(r"<[^>]*>", "", text)
        if student in ("untouched", "cheats_everywhere") and any(word in plain for word in untouched):
            faults.append(f"feedback of {student} shows the solution")
        for secret in ("root:x:", "root:*:", "BEGIN OPENSSH", str(run.out / "gradebook.db")):
            if secret in text:
                faults.append(f"feedback of {student} shows {secret}")
    return faults


def grades_of(out: Path) -> str:
    return (out / "grades.csv").read_text("utf-8")


def kill_tree(process: subprocess.Popen[Any], name: signal.Signals = signal.SIGKILL) -> None:
    """The grader alone is killed: its workers have to end by themselves."""
    process.send_signal(name)
    process.wait()


__all__ = ["CASES", "TOP", "Listener", "Run", "Sequence", "deviations", "environment", "grade", "make_class"]
