"""Virtual environments made from pins, Pythons of other versions, commands within a limit of memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "build" / "pins"
MIB = 2**20


def missing(what: str) -> NoReturn:
    """Skip, saying what this machine lacks; where CI is set that is a failure."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{what}; CI must have it", pytrace=False)
    pytest.skip(what)


# --- Pythons and environments -------------------------------------------------------------------------------


def find_python(version: str) -> Path | None:
    """An interpreter of that version ('3.13') that runs and can make environments: of PATH, then pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [shutil.which(f"python{version}"), *sorted(root.glob(f"{version}.*/bin/python"), reverse=True)]
    wanted = (
        f"import ensurepip, sys, venv; assert sys.version_info[:2] == {tuple(map(int, version.split('.')))}"
    )
    for path in filter(None, found):
        if subprocess.run([path, "-c", wanted], capture_output=True).returncode == 0:
            return Path(path)
    return None


def environment(name: str, python: Path, *steps: Sequence[str], key: str = "") -> Path:
    """The Python of build/pins/NAME, made by `pip install STEP` for each step; kept until they change.

    `key` is what else makes it old: the text of files that a step names.
    """
    folder = PINS / name
    said = hashlib.sha256(repr((str(python), steps, key)).encode()).hexdigest()
    stamp, inside = folder / "made-from", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == said:
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    run([python, "-m", "venv", folder])
    for step in steps:
        run([inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step])
    stamp.write_text(said)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink()) // MIB
    print(f"\n{folder.relative_to(ROOT)}: made in {time.monotonic() - started:.0f} s, {size:,} MiB")
    return inside


def run(command: Sequence[object], **how: Any) -> str:
    """What the command prints; fails the test with its last lines when it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **how)
    if done.returncode:
        text = "\n".join([*done.stdout.splitlines()[-25:], *done.stderr.splitlines()[-25:]])
        pytest.fail(
            f"{' '.join(map(str, command))[:300]}\nended with {done.returncode}:\n{text}", pytrace=False
        )
    return str(done.stdout)


def installed(python: Path) -> set[str]:
    """`pip freeze`, as a set."""
    return set(run([python, "-m", "pip", "--disable-pip-version-check", "freeze"]).splitlines())


def checkout(into: Path) -> Path:
    """A copy of the files that git would commit: what Colab and Binder get to see."""
    listed = run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    shutil.rmtree(into, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, into / name)
    return into


# --- memory -------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """How a command ended: its code, wall seconds, the peak of its tree's memory, what it printed."""

    code: int
    seconds: float
    peak: int
    output: str
    over: bool


class Tree(threading.Thread):
    """Samples what processes and all that they started hold (proportional set size); above a limit it kills.

    A page that several processes share counts once, split among them.
    """

    def __init__(self, roots: Sequence[int], limit: int | None) -> None:
        super().__init__(daemon=True)
        self.roots, self.limit = roots, limit
        self.peak, self.over = 0, False
        self._stopped = threading.Event()

    def processes(self) -> list[psutil.Process]:
        """The roots and their descendants, those alive."""
        found = []
        for pid in self.roots:
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                found += [root, *root.children(recursive=True)]
        return found

    def held(self) -> int:
        """Bytes, now."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                full = process.memory_full_info()
                total += getattr(full, "pss", full.rss)
        return total

    def run(self) -> None:
        """Sample five times a second until `stop`."""
        while not self._stopped.wait(0.2):
            self.peak = max(self.peak, self.held())
            if self.limit is not None and self.peak > self.limit and not self.over:
                self.over = True
                for process in reversed(self.processes()):
                    with suppress(psutil.Error):
                        process.kill()

    def stop(self) -> None:
        """No more samples."""
        self._stopped.set()


class Cgroup:
    """A control group with a limit of memory, by version 2 or 1; `path` is None where none may be made."""

    def __init__(self, limit: int) -> None:
        self.path: Path | None = None
        base = Path("/sys/fs/cgroup")
        for parent, file in ((base, "memory.max"), (base / "memory", "memory.limit_in_bytes")):
            path = parent / f"memlab-pins-{os.getpid()}-{id(self)}"
            if self.path is not None or not parent.is_dir():
                continue
            try:
                path.mkdir()
                with (path / file).open(
                    "r+"
                ) as setting:  # the kernel made it, unless that controller isn't here
                    setting.write(str(limit))
                self.path = path
            except OSError:
                with suppress(OSError):
                    path.rmdir()

    def join(self) -> None:
        """For a child process, before it becomes the command: it and all that it starts are inside."""
        if self.path is not None:
            (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Once the processes are gone; the system takes a moment to notice."""
        for _ in range(50):
            try:
                if self.path is not None:
                    self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def within(
    command: Sequence[object],
    limit: int | None = None,
    cgroup: Cgroup | None = None,
    beside: Sequence[int] = (),
    timeout: float = 1800,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ran:
    """Run a command; its tree and those of the processes `beside` it may hold `limit` bytes together."""
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        child = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=cgroup.join if cgroup is not None else None,
        )
        tree = Tree([child.pid, *beside], limit)
        tree.start()
        try:
            code = child.wait(timeout)
        finally:
            tree.stop()
            with suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        output.seek(0)
        return Ran(code, time.monotonic() - started, tree.peak, output.read(), tree.over)


def kernel_environment(python: Path, size: str) -> dict[str, str]:
    """For a student's kernel: that environment's programs first, nobody's settings, a chapter's size."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("MEMLAB_", "JUPYTER", "PYTHON", "VIRTUAL_ENV"))
    }
    return {
        **kept,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "MEMLAB_SIZE": size,
        "MEMLAB_HOME": str(PINS / "home"),
        "JUPYTER_PATH": str(python.parent.parent / "share" / "jupyter"),
        "IPYTHONDIR": str(PINS / "ipython"),
        "MPLCONFIGDIR": str(PINS / "matplotlib"),
    }


THIS_PYTHON = Path(sys.executable)
