"""Run chapters with papermill, several side by side, and write what a reader needs to trust their numbers.

The output folder holds, for each chapter, the executed notebook and a page of it that needs no network, and

* `index.html`: the chapters with headline numbers, run time and peak memory, and the machine they ran on;
* `results.json`: the same for programs.

    {"schema": 1,
     "student": false,                          true after `--student`
     "machine": {"text", "python", "torch", "cpus", "memory_bytes", "gpus"},
     "chapters": [
       {"chapter": "02_four_consumers", "title", "status": "ok" | "failed",
        "seconds": 31.2,                        wall time, kernel start included
        "peak_resident_bytes": 612000000,       see `Memory`
        "cells": 58, "parameters": {"seed": 1}, only what was asked for
        "headlines": [{"name", "value", "unit", "includes", "text"}],
        "errors": [{"cell", "message"}],
        "notebook": "02_four_consumers.ipynb", "page": "02_four_consumers.html",
        "key": "…"}]}                           same key: the same run; it isn't done again

A chapter fails alone: the others finish. An interrupt kills the kernels and keeps the chapters already done.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

import memlab
from autograder import build, pages
from autograder.course import KERNEL, Chapter, CourseError, write_atomically
from memlab.chapter import HEADLINE_MIME, SIZES
from memlab.units import format_bytes, unknown_name

SCHEMA = 1


@dataclass(frozen=True)
class Options:
    """How chapters are run. None leaves a parameter to the environment (MEMLAB_…) and the default."""

    device: str | None = None
    size: str | None = None
    seed: int | None = None
    jobs: int = 2
    student: bool = False
    force: bool = False
    cell_timeout: int = 300  # seconds; a cell is written to take less than 10

    def parameters(self) -> dict[str, Any]:
        """What papermill injects."""
        given = {"device": self.device, "size": self.size, "seed": self.seed}
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class Result:
    """One chapter's run; the fields are those of results.json."""

    chapter: str
    title: str
    status: str
    key: str
    parameters: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    peak_resident_bytes: int = 0
    cells: int = 0
    headlines: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)
    notebook: str = ""
    page: str = ""


# --- one chapter ------------------------------------------------------------------------------------------


class Memory(threading.Thread):
    """The peak resident memory of a kernel, children included.

    The larger of two: the kernel's own high-water mark, as the system keeps it (VmHWM; exact), and the sum
    over the kernel and its child processes, sampled every quarter of a second. A page that several of them
    share counts once (proportional set size; on systems without it, in each).
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._stopped.wait(0.25):
            self.sample()

    def sample(self) -> None:
        """Take the peak to now into account; nothing once the kernel is gone."""
        with suppress(psutil.Error, OSError):
            kernel = psutil.Process(self.pid)
            self.peak = max(self.peak, _kib(f"/proc/{self.pid}/status", "VmHWM") or kernel.memory_info().rss)
            if children := kernel.children(recursive=True):
                self.peak = max(self.peak, sum(_resident(p) for p in (kernel, *children)))

    def stop(self) -> None:
        """No more samples."""
        self._stopped.set()


def _resident(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return _kib(f"/proc/{process.pid}/smaps_rollup", "Pss") or int(process.memory_info().rss)
    return 0


def _kib(path: str, name: str) -> int:
    """Bytes in the line `name: N kB` of a file of /proc; 0 where there is none."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


class Watch:
    """What is known of a running chapter: notebook, kernel, cell, memory. Shared with the main thread."""

    def __init__(self, student: bool, environment: dict[str, str], folder: Path, on_cell: Any) -> None:
        self.student = student
        self.environment = environment
        self.folder = folder
        self.on_cell = on_cell
        self.notebook: Any = None
        self.cell: Any = None
        self.process: Any = None
        self.memory: Memory | None = None
        self.stopped = False
        self.exited: Any = None  # the cell that called exit(): its kernel ends after it

    def start_cell(self, client: Any, cell: Any, index: int) -> None:
        """Before each cell; the first time also notes the kernel's process."""
        self.cell = cell
        self.on_cell(index, cell)
        if self.process is None:
            self.process = client.km.provisioner.process
            self.memory = Memory(self.process.pid)
            self.memory.start()
            if self.stopped:
                self.kill()

    def end_cell(self, cell: Any, reply: Any) -> None:
        """After each cell, with the kernel's reply."""
        if self.memory is not None:
            self.memory.sample()
        payload = reply.get("content", {}).get("payload") or []
        if any(item.get("source") == "ask_exit" for item in payload):
            self.exited = cell

    def kill(self) -> None:
        """End the kernel and what it started: its process group, and children that left the group."""
        self.stopped = True
        if self.process is None:
            return
        with suppress(psutil.Error):
            if self.process.poll() is None:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        child.kill()
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)  # the kernel leads a session of its own
            else:
                self.process.kill()

    def death(self) -> str:
        """How the kernel ended, for a message."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return "the kernel died"
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
            return f"the kernel was killed by {name}{hint}"
        return f"the kernel ended with exit code {code}"


class WatchedEngine(Engine):  # type: ignore[misc]
    """papermill's engine, with the kernel's process, environment and folder in our hands.

    The folder is the kernel's alone: papermill's own `cwd` moves this whole process, which threads share.
    """

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, watch: Any = None, execution_timeout: int = 300, **ignored: Any
    ) -> Any:
        """Execute every cell; in a student version errors don't stop the run."""
        watch.notebook = nb_man.nb
        client = PapermillNotebookClient(
            nb_man,
            timeout=execution_timeout,
            startup_timeout=120,
            kernel_name=kernel_name,
            allow_errors=watch.student,
            record_timing=False,
        )
        client.on_cell_start = lambda cell, cell_index: watch.start_cell(client, cell, cell_index)
        client.on_cell_executed = lambda cell, execute_reply, **_: watch.end_cell(cell, execute_reply)
        try:
            return client.execute(
                env=watch.environment,
                cwd=str(watch.folder),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            if watch.memory is not None:
                watch.memory.stop()


papermill_engines.register("memlab", WatchedEngine)


def execute(chapter: Chapter, notebook: Any, watch: Watch, options: Options, key: str) -> tuple[Result, Any]:
    """Run one chapter's notebook in a kernel of its own. Never raises for what happens inside the chapter."""
    result = Result(chapter.name, title(notebook), "ok", key, options.parameters())
    before = watch.folder / "input.ipynb"
    before.write_text(build.to_text(notebook), encoding="utf-8")
    started = time.monotonic()
    try:
        papermill.execute_notebook(
            str(before),
            None,
            parameters=options.parameters(),
            engine_name="memlab",
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            watch=watch,
            execution_timeout=options.cell_timeout,
        )
    except PapermillExecutionError as error:
        if not options.student:
            result.errors.append(
                _error(watch.cell, f"{error.ename}: {_last_line(error.evalue)}".rstrip(": "))
            )
    except CellTimeoutError:
        result.errors.append(_error(watch.cell, f"took longer than {options.cell_timeout} s"))
    except DeadKernelError:
        if watch.exited is None:
            result.errors.append(_error(watch.cell, watch.death()))
    except Exception as error:
        result.errors.append(_error(watch.cell, f"{type(error).__name__}: {_last_line(str(error))}"))
    finally:
        watch.kill()  # also what a chapter left running
    if watch.exited is not None:
        result.errors.append(_error(watch.exited, "exit() was called"))
    result.seconds = round(time.monotonic() - started, 2)
    result.peak_resident_bytes = watch.memory.peak if watch.memory is not None else 0
    executed = watch.notebook if watch.notebook is not None else copy.deepcopy(notebook)
    if options.student and not result.errors:
        result.errors = student_errors(executed)
    result.cells = sum(cell.cell_type == "code" for cell in executed.cells)
    result.headlines = headlines(executed)
    result.status = "failed" if result.errors else "ok"
    return result, _tidy(executed)


def _error(cell: Any, message: str) -> dict[str, str]:
    return {"cell": cell.get("id", "?") if cell is not None else "", "message": message}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def student_errors(executed: Any) -> list[dict[str, str]]:
    """What an executed student version mustn't show.

    Every cell has run, and the only errors are NotImplementedError("exercise N") in the cells of exercise N.
    """
    found = []
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        exercise = cell.metadata.get("memlab", {}).get("exercise", "")
        errors = [output for output in cell.outputs if output.output_type == "error"]
        for output in errors:
            text = f"{output.ename}: {_last_line(output.evalue)}"
            if not exercise:
                found.append(_error(cell, f"{text} (outside an exercise)"))
            elif text != f"NotImplementedError: exercise {exercise}":
                found.append(_error(cell, f'{text} (expected NotImplementedError("exercise {exercise}"))'))
        if cell.execution_count is None and cell.source.strip():
            found.append(_error(cell, "didn't run"))
    return found


def headlines(executed: Any) -> list[dict[str, Any]]:
    """The headline numbers that a chapter left in its outputs."""
    return [
        {name: data.get(name, "") for name in ("name", "value", "unit", "includes", "text")}
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if isinstance(data := output.get("data", {}).get(HEADLINE_MIME), dict)
    ]


def title(notebook: Any) -> str:
    """The text of the first heading."""
    for cell in notebook.cells:
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else []:
            if line.startswith("#"):
                return str(line.lstrip("#").strip())
    return ""


def _tidy(executed: Any) -> Any:
    """Without papermill's timestamps, paths and error banners; ids as in the source."""
    executed.metadata.pop("papermill", None)
    executed.cells = [
        c for c in executed.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])
    ]
    for cell in executed.cells:
        cell.metadata.pop("papermill", None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"
    executed.nbformat, executed.nbformat_minor = 4, 5
    return executed


# --- all chapters -----------------------------------------------------------------------------------------


def run(wanted: Sequence[Chapter], out: Path, options: Options) -> list[Result]:
    """Run these chapters, `options.jobs` at a time, into `out`; results in the order of the chapters.

    Raises CourseError before anything is run for a source with faults, a notebook that can't be read or a
    folder that can't be written; UnknownNameError for a size that isn't one; KeyboardInterrupt after an
    interrupt, with finished chapters written.
    """
    if options.size is not None and options.size not in SIZES:
        raise unknown_name("size", options.size, SIZES)
    out = out.resolve()
    _must_be_writable(out)
    if options.student:
        notebooks = {chapter: _student_notebook(chapter.notebook) for chapter in wanted}
    else:
        notebooks = {built.chapter: built.source for built in build.build_all(wanted)}
    library = _library_hash()
    keys = {chapter: run_key(build.to_text(nb), options, library) for chapter, nb in notebooks.items()}
    old = _read_results(out, options.student)
    machine = describe_machine()
    results: dict[str, Result] = dict(old)
    todo = []
    for chapter in wanted:
        before = old.get(chapter.name)
        if not options.force and before and before.status == "ok" and before.key == keys[chapter]:
            print(f"{chapter.name}: unchanged, {before.seconds:.1f} s as before (--force runs it again)")
        else:
            todo.append(chapter)

    lock = threading.Lock()

    def finished(result: Result, executed: Any) -> None:
        result.notebook, result.page = f"{result.chapter}.ipynb", f"{result.chapter}.html"
        page = pages.chapter_page(executed, result.title or result.chapter, result.errors)
        with lock:
            write_atomically(out / result.notebook, build.to_text(executed))
            write_atomically(out / result.page, page)
            results[result.chapter] = result
            _write_results(out, results, machine, options.student)

    with _Progress([(c.name, len(notebooks[c].cells)) for c in todo]) as progress, _scratch() as scratch:
        watches: dict[str, Watch] = {}
        interrupted = threading.Event()

        def work(chapter: Chapter) -> None:
            if interrupted.is_set():
                return
            folder = scratch / chapter.name
            folder.mkdir()
            watch = Watch(
                options.student,
                _environment(options, folder),
                folder,
                lambda index, cell: progress.cell(chapter.name, index, cell),
            )
            watches[chapter.name] = watch
            progress.start(chapter.name)
            result, executed = execute(chapter, notebooks[chapter], watch, options, keys[chapter])
            if interrupted.is_set():
                return
            finished(result, executed)
            progress.end(result)

        with ThreadPoolExecutor(max_workers=max(1, options.jobs)) as pool:
            waiting: set[Future[None]] = {pool.submit(work, chapter) for chapter in todo}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException:
                interrupted.set()
                for future in waiting:
                    future.cancel()
                for watch in list(watches.values()):
                    watch.kill()
                raise
    _write_results(out, results, machine, options.student)
    return [results[chapter.name] for chapter in wanted]


def _must_be_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CourseError(f"can't write into {out}: {error.strerror or error}") from None


def _student_notebook(path: Path) -> Any:
    """The file that students get, as it is."""
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(notebook)
    except FileNotFoundError:
        raise CourseError(f"{path} is missing: run `autograder release`") from None
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise CourseError(
            f"{path} isn't a notebook: {first[0][:200]}; `autograder release` rewrites it"
        ) from None
    return notebook


def run_key(notebook: str, options: Options, library: str) -> str:
    """A hash of all that a run depends on: notebook, parameters, environment, library, Python and torch."""
    environment = {k: v for k, v in os.environ.items() if k.startswith("MEMLAB_") and k != "MEMLAB_HOME"}
    parts = [notebook, options.parameters(), options.student, environment, library, sys.version, _torch()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _library_hash() -> str:
    digest = hashlib.sha256()
    package = Path(memlab.__file__).parent
    own = [Path(module.__file__ or "") for module in (build, pages)] + [Path(__file__), pages.STYLE]
    for path in [*sorted(package.rglob("*")), *own]:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _environment(options: Options, folder: Path) -> dict[str, str]:
    environment = dict(os.environ)
    for name, value in options.parameters().items():
        environment[f"MEMLAB_{name.upper()}"] = str(value)
    # Side by side, torch's own threads would fight for the same cores.
    cores = os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, options.jobs))))
    environment["MEMLAB_HOME"] = str(folder / "home")  # a reader's own progress stays theirs
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(Path(memlab.__file__).parent.parent), environment.get("PYTHONPATH", "")) if p
    )
    environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    return environment


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="memlab-run-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def describe_machine() -> dict[str, Any]:
    """What the numbers were made on: a line to print and its parts."""
    gpus: list[str] = []
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            gpus = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    memory = psutil.virtual_memory().total
    machine = {
        "python": platform.python_version(),
        "torch": _torch(),
        "cpus": os.cpu_count() or 1,
        "memory_bytes": memory,
        "gpus": gpus,
    }
    machine["text"] = (
        f"{platform.system()} {platform.machine()}, {machine['cpus']} CPU cores, "
        f"{format_bytes(memory)} memory, {', '.join(gpus) or 'no GPU'}; "
        f"Python {machine['python']}, torch {machine['torch']}"
    )
    return machine


def _read_results(out: Path, student: bool) -> dict[str, Result]:
    """The results of earlier runs that are still of use; anything unreadable is as good as none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        data = json.loads((out / "results.json").read_text(encoding="utf-8"))
        if data["schema"] == SCHEMA and data["student"] == student:
            results = [Result(**entry) for entry in data["chapters"]]
            return {
                r.chapter: r for r in results if (out / r.page).is_file() and (out / r.notebook).is_file()
            }
    return {}


def _write_results(out: Path, results: dict[str, Result], machine: dict[str, Any], student: bool) -> None:
    ordered = [asdict(results[name]) for name in sorted(results)]
    data = {"schema": SCHEMA, "student": student, "machine": machine, "chapters": ordered}
    write_atomically(out / "results.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_atomically(out / "index.html", pages.index_page(data))


# --- progress ---------------------------------------------------------------------------------------------


class _Progress:
    """A bar for each chapter on a terminal, a line at the start and end of each elsewhere."""

    def __init__(self, chapters: Sequence[tuple[str, int]]) -> None:
        self.bars: dict[str, Any] = {}
        if sys.stderr.isatty():
            width = max((len(name) for name, _ in chapters), default=0)
            layout = "{desc} {bar:20} {n_fmt:>3}/{total_fmt} cells {elapsed}{postfix}"
            for position, (name, cells) in enumerate(chapters):
                self.bars[name] = tqdm(
                    total=cells,
                    desc=name.ljust(width),
                    position=position,
                    bar_format=layout,
                    postfix="waiting",
                )

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        for bar in self.bars.values():
            bar.close()

    def start(self, name: str) -> None:
        if bar := self.bars.get(name):
            bar.reset()
            bar.set_postfix_str("starting the kernel")
        else:
            print(f"{name}: started", flush=True)

    def cell(self, name: str, index: int, cell: Any) -> None:
        if bar := self.bars.get(name):
            bar.set_postfix_str(cell.get("id", ""), refresh=False)
            bar.update(index - bar.n)

    def end(self, result: Result) -> None:
        summary = f"{result.status}, {result.seconds:.1f} s, peak {format_bytes(result.peak_resident_bytes)}"
        if bar := self.bars.get(result.chapter):
            if result.status == "ok":
                bar.n = bar.total
            bar.set_postfix_str(summary)
        else:
            print(f"{result.chapter}: {summary}", flush=True)
