"""Where submissions run: a kernel without network, that sees no file of the course and leaves nothing behind.

    with Sandbox(settings) as sandbox:        # one long-lived process that has torch loaded (`zygote.py`)
        with sandbox.kernel(environment) as kernel:
            kernel.connection                 # what a Jupyter client needs to talk to it

Four ways (`settings.mode`):

bubblewrap   processes, files, network, IPC and user of its own; the strongest
landlock     where bubblewrap or namespaces are refused, as in many containers
none         no protection at all: for submissions that the instructor trusts

`choose` picks one for `auto`, or raises `CourseError` where nothing protects and nobody said `none`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autograder import questions, zygote
from autograder.course import CourseError
from memlab.units import GIB, MIB

MODES = ("auto", "bubblewrap", "landlock", "none")

#: Seconds until the zygote has loaded torch; a machine under load needs many of them.
START_TIMEOUT = 180
#: Seconds until a forked kernel answers.
KERNEL_TIMEOUT = 60

_ZYGOTE = Path(__file__).with_name("zygote.py")

# Paths inside the sandbox.
_HOME = "/memlab"
_LIBRARY, _WORK, _RUNS, _RUN = (f"{_HOME}/{name}" for name in ("library", "work", "runs", "run"))

_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "fonts", "alternatives", "mime.types")


@dataclass(frozen=True)
class Limits:
    """What one submission may use. `address_space` and `cpu_seconds` hold for each of its processes."""

    address_space: int = 6 * GIB
    total_memory: int = 4 * GIB
    file_size: int = 256 * MIB
    folder: int = 512 * MIB
    processes: int = 128
    cpu_seconds: int = 900
    open_files: int = 1024

    def plain(self) -> dict[str, int]:
        """As the zygote reads them."""
        return {
            "AS": self.address_space,
            "FSIZE": self.file_size,
            "NPROC": self.processes,
            "CPU": self.cpu_seconds,
            "NOFILE": self.open_files,
            "CORE": 0,
            "total_memory": self.total_memory,
            "folder": self.folder,
        }


@dataclass(frozen=True)
class Settings:
    """How to build a sandbox; plain data, for a worker builds it in another process or on another machine.

    `library` is a folder that `questions.make_library` filled; without one the sandbox makes its own.
    """

    mode: str = "bubblewrap"
    library: str = ""
    limits: Limits = field(default_factory=Limits)


class SandboxError(RuntimeError):
    """The sandbox itself failed: the submission is not to blame."""


# -- which one ---------------------------------------------------------------------------------------------


def choose(mode: str = "auto") -> str:
    """The mode to use for a wish. Raises CourseError, with what to do, where it can't be had."""
    if mode not in MODES:
        raise CourseError(f"unknown sandbox {mode!r}: one of {', '.join(MODES)}")
    if mode == "none":
        return mode
    reasons = []
    for name, why in (("bubblewrap", why_no_bubblewrap), ("landlock", why_no_landlock)):
        if mode in ("auto", name):
            reasons.append(why())
            if not reasons[-1]:
                return name
    raise CourseError(
        f"no sandbox for the submissions: {'; '.join(reasons)}. Install it (apt install bubblewrap), or say "
        "--sandbox none if you trust every submission: its code then runs as you, with your files and network"
    )


@functools.cache
def why_no_bubblewrap() -> str:
    """'' where bubblewrap can build all that is needed here, else the reason."""
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}"
    path = shutil.which("bwrap")
    if path is None:
        return "bubblewrap (bwrap) isn't installed"
    probe = (
        "import ctypes, os, sys; c = ctypes.CDLL(None, use_errno=True)\n"
        "if c.unshare(0x28020000): sys.exit(os.strerror(ctypes.get_errno()))\n"
        "p = os.fork()\n"
        "if p == 0:\n"
        "    c.mount(None, b'/', None, ctypes.c_ulong(0x44000), None)\n"
        "    os._exit(1 if c.mount(b'proc', b'/proc', b'proc', ctypes.c_ulong(14), None) else 0)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))"
    )
    command = [*_isolation(path), *_visible_system(), sys.executable, "-I", "-S", "-c", probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap can't be run ({error})"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return f"bubblewrap is refused here ({lines[-1] if lines else 'no new /proc'})"
    return ""


@functools.cache
def why_no_landlock() -> str:
    """'' where Landlock can keep a kernel from other files, else the reason."""
    if sys.platform != "linux" or zygote.landlock_version() < 1:
        return "this Linux kernel offers no Landlock"
    return ""


def weaker(mode: str) -> str:
    """What a mode doesn't protect from, in one line; '' for bubblewrap."""
    if mode == "none":
        return "no sandbox: the submissions' code runs as you, with your files and your network"
    if mode == "landlock":
        lacks = ["the list of this machine's processes can be seen", "the disk can be filled"]
        lacks.append("workers of a DataLoader (exercise 7.5) have no shared memory")
        if zygote.landlock_version() < 6:
            lacks.append("processes of yours can be ended")
        return f"sandbox without namespaces (Landlock): {', '.join(lacks)}; bubblewrap is stronger"
    return ""


# -- what is visible ---------------------------------------------------------------------------------------


def _isolation(bwrap: str) -> list[str]:
    """Namespaces. Root keeps the machine's users, for a limit on processes doesn't bind root or a mapped
    root; the kernel then runs as another user. Anybody else gets a namespace with himself in it alone."""
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv"]
    if os.getuid() != 0:
        command.append("--unshare-user")
    return [*command, "--cap-add", "ALL"]


def _visible_system() -> list[str]:
    """System libraries and Python with its packages, read-only, and nothing else of this machine."""
    command = ["--perms", "1777", "--tmpfs", "/tmp"]  # first, for Python itself may lie in it
    made = {Path("/tmp")}
    for place in _python_folders():
        for parent in reversed(place.parents[:-1]):
            if parent not in made:  # bubblewrap would make them readable by their owner alone
                made.add(parent)
                command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(place), str(place)]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--perms", "0755", "--dir", "/etc"]
    for name in _ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    command += ["--ro-bind-try", "/sys/devices/system/cpu", "/sys/devices/system/cpu"]
    return [*command, "--proc", "/proc", "--dev", "/dev"]


def _python_folders() -> list[Path]:
    shown: list[Path] = []
    for place in (
        Path("/usr"), Path(sys.base_prefix), Path(sys.base_exec_prefix), Path(sys.prefix),
        Path(sys.executable).resolve().parent, *map(Path, _site_packages()),
    ):  # fmt: skip
        if place.is_dir() and not any(place.is_relative_to(parent) for parent in shown):
            shown.append(place)
    return shown


def _landlock_rules(library: str, own: str) -> tuple[list[str], list[str]]:
    """Readable and writable paths of a kernel that has no namespaces."""
    system = ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sys/devices/system/cpu"]
    system += [f"/etc/{name}" for name in _ETC]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    return [*map(str, _python_folders()), *system, library], [own, *devices]


def _site_packages() -> list[str]:
    """Folders of installed packages on this interpreter's path, and never one that holds a course."""
    return [path for path in site.getsitepackages() if path in sys.path]


def _masked() -> list[str]:
    """Installed copies of the library and the grader, hidden behind empty folders."""
    command: list[str] = []
    for path in _site_packages():
        for name in ("memlab", "autograder"):
            if Path(path, name).is_dir():
                command += ["--tmpfs", str(Path(path, name)), "--remount-ro", str(Path(path, name))]
    return command


def _environment() -> dict[str, str]:
    """What the zygote itself needs; a kernel gets this and what its submission adds."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": _WORK,
        "LANG": "C.UTF-8",
        "PYTHONPATH": _LIBRARY,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "MPLCONFIGDIR": "/tmp/matplotlib",
        "IPYTHONDIR": f"{_WORK}/.ipython",
        "OMP_NUM_THREADS": "1",
        "MEMLAB_GRADING": "1",
        "MEMLAB_SIZE": "smallest",
        "MEMLAB_DEVICE": "cpu",
        "MEMLAB_HOME": f"{_WORK}/.memlab",
    }


# -- the sandbox -------------------------------------------------------------------------------------------


class Sandbox:
    """One zygote and the kernels forked from it, one at a time. Close it, or use it in a `with`."""

    def __init__(self, settings: Settings) -> None:
        self._folder = scratch_folder()
        if not settings.library:
            (self._folder / "library").mkdir()
            questions.make_library(self._folder / "library")
            settings = replace(settings, library=str(self._folder / "library"))
        self.settings = settings
        self._number = 0
        self._uid = _kernel_uid()
        self._process: subprocess.Popen[bytes] | None = None
        #: Proportional memory of the loaded zygote, bytes.
        self.zygote_memory = 0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-s", "-P", str(_ZYGOTE), str(inside.fileno())]
        environment = _environment()
        environment["PYTHONPATH"] = self._library()
        if self.settings.mode == "bubblewrap":
            command = self._wrapped(inside.fileno(), environment)
        else:
            environment |= {name: str(self._folder) for name in ("HOME", "MPLCONFIGDIR", "IPYTHONDIR")}
        self._errors = (self._folder / "errors").open("w+b")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(inside.fileno(),),
            env=environment,
            cwd=self._folder,
        )
        inside.close()
        self.zygote_memory = int(self._expect("ready", START_TIMEOUT)["memory"])

    def _wrapped(self, descriptor: int, environment: Mapping[str, str]) -> list[str]:
        (self._folder / "runs").mkdir()
        (self._folder / "runs").chmod(0o755)
        zygote = f"{_HOME}/zygote.py"
        command = [*_isolation(shutil.which("bwrap") or "bwrap"), *_visible_system(), *_masked()]
        for name in (_HOME, _WORK, _RUNS, _RUN):
            command += ["--perms", "0755", "--dir", name]
        command += ["--ro-bind", self.settings.library, _LIBRARY, "--ro-bind", str(_ZYGOTE), zygote]
        command += ["--bind", str(self._folder / "runs"), _RUNS]
        for name, value in environment.items():
            command += ["--setenv", name, value]
        # what bubblewrap made belongs to the user that runs it, and would outlive a submission
        command += ["--remount-ro", "/dev", "--remount-ro", "/"]
        return [*command, "--chdir", "/", sys.executable, "-s", "-P", zygote, str(descriptor)]

    def _library(self) -> str:
        return _LIBRARY if self.settings.mode == "bubblewrap" else self.settings.library

    @contextlib.contextmanager
    def kernel(self, environment: Mapping[str, str]) -> Iterator[Kernel]:
        """A new kernel with nothing of an earlier one; all that it started is gone at the end."""
        self._number += 1
        name = f"k{self._number}"
        wrapped = self.settings.mode == "bubblewrap"
        outside = self._folder / "runs" / name if wrapped else self._folder / name
        outside.mkdir()
        inside = _RUN if wrapped else str(outside)
        work = _WORK if wrapped else str(outside / "work")
        if not wrapped:
            Path(work).mkdir()
        connection = {
            "transport": "ipc",
            "ip": f"{inside}/s",
            "key": secrets.token_hex(16),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "python3",
            **{f"{channel}_port": n for n, channel in enumerate(CHANNELS, 1)},
        }
        file = outside / "connection.json"
        file.write_text(json.dumps(connection), "utf-8")
        landlock = self.settings.mode == "landlock"
        order: dict[str, Any] = {
            "namespaces": wrapped,
            "protected": wrapped or landlock,
            "landlock": _landlock_rules(self.settings.library, str(outside)) if landlock else None,
            "uid": self._uid if wrapped else os.getuid(),
            "connection": f"{inside}/connection.json",
            "own_run": f"{_RUNS}/{name}",
            "run": _RUN,
            "all_runs": _RUNS,
            "python_in_tmp": [str(place) for place in _python_folders() if place.is_relative_to("/tmp")],
            "work": work,
            "limits": self.settings.limits.plain()
            if wrapped
            else _without_process_limit(self.settings.limits),
            "environment": {**_environment(), "PYTHONPATH": self._library(), **environment},
        }
        if not wrapped:
            order["environment"] |= {
                "TMPDIR": work,
                "HOME": work,
                "MEMLAB_HOME": work,
                "IPYTHONDIR": work,
                "MPLCONFIGDIR": work,
            }
        try:
            self._send({"start": order})
            self._expect("started", KERNEL_TIMEOUT)
            kernel = Kernel(self, {**connection, "ip": str(outside / "s")})
            try:
                yield kernel
            finally:
                if kernel.ended is None:
                    self._send({"signal": "kill"})
                    kernel.wait(KERNEL_TIMEOUT)
        finally:
            shutil.rmtree(outside, ignore_errors=True)

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            self._control.send(json.dumps(request).encode())
        except OSError:
            raise SandboxError(self._last_words()) from None

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """The next packet of the zygote; None when none comes in time."""
        readable, _, _ = select.select([self._control], [], [], max(seconds, 0))
        if not readable:
            return None
        packet = self._control.recv(1 << 16)
        if not packet:
            raise SandboxError(self._last_words())
        answer: dict[str, Any] = json.loads(packet)
        return answer

    def _expect(self, word: str, seconds: float) -> dict[str, Any]:
        answer = self._receive(seconds)
        if answer is None:
            raise SandboxError(f"the sandbox didn't answer within {seconds:g} s")
        if word not in answer:
            raise SandboxError(f"the sandbox answered {answer} instead of {word}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
        return f"the sandbox ended: {lines[-1] if lines else 'it said nothing'}"

    def close(self) -> None:
        """Ends the zygote and with it whatever is left of a submission."""
        with contextlib.suppress(AttributeError, OSError):
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
        with contextlib.suppress(AttributeError, OSError):
            self._errors.close()
        shutil.rmtree(self._folder, ignore_errors=True)


CHANNELS = ("shell", "iopub", "stdin", "control", "hb")


class Kernel:
    """A running kernel. `ended` says how it ended: 'exit 3', 'signal 9', 'too much memory'."""

    def __init__(self, sandbox: Sandbox, connection: dict[str, Any]) -> None:
        self._sandbox = sandbox
        self.connection = connection
        self.ended: str | None = None
        #: Of all that it started; known once it has ended.
        self.processor_seconds = 0.0

    def poll(self, seconds: float = 0) -> str | None:
        """How it ended, or None while it runs; waits at most `seconds`."""
        until = time.monotonic() + seconds
        while self.ended is None:
            answer = self._sandbox._receive(until - time.monotonic())
            if answer is None:
                break
            self.ended = answer.get("ended")
            self.processor_seconds = float(answer.get("processor_seconds", 0))
        return self.ended

    def wait(self, seconds: float) -> str:
        """How it ended. Raises SandboxError when it doesn't."""
        ended = self.poll(seconds)
        if ended is None:
            raise SandboxError(f"a kernel didn't end within {seconds:g} s")
        return ended

    def sweep(self) -> int:
        """Ends every process that it started and that still runs; how many there were."""
        if self.ended is not None:
            return 0
        self._sandbox._send({"sweep": True})
        until = time.monotonic() + KERNEL_TIMEOUT
        while (answer := self._sandbox._receive(until - time.monotonic())) is not None:
            if "swept" in answer:
                return int(answer["swept"])
            self.ended = answer.get("ended")
            self.processor_seconds = float(answer.get("processor_seconds", 0))
        raise SandboxError(f"what a kernel left running didn't end within {KERNEL_TIMEOUT:g} s")

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        if self.ended is None:
            self._sandbox._send({"signal": "interrupt"})

    def kill(self) -> str:
        """Ends it, and all that it started."""
        if self.poll() is None:
            self._sandbox._send({"signal": "kill"})
        return self.wait(KERNEL_TIMEOUT)


def scratch_folder() -> Path:
    """A new folder of this process; the path of a socket in it must stay below 108 bytes. Those that a killed
    grader left behind are removed."""
    place = tempfile.gettempdir()
    if len(place) > 50:
        place = "/tmp"
    for left in Path(place).glob("memlab-*-*") if Path("/proc/self").exists() else ():
        owner = left.name.split("-")[1]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not Path(f"/proc/{owner}").exists() and left.stat().st_uid == os.getuid():
                shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"memlab-{os.getpid()}-", dir=place))


def _kernel_uid() -> int:
    """The user of graded kernels: one that owns nothing, and not the same for two workers of root."""
    return 0x6D000000 + os.getpid() % 0x400000 if os.getuid() == 0 else os.getuid()


def _without_process_limit(limits: Limits) -> dict[str, int]:
    """Without a user of its own a submission would be counted together with the instructor's processes."""
    return {name: value for name, value in limits.plain().items() if name != "NPROC"}
