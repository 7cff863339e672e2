"""The process that graded kernels are forked from. It runs inside the sandbox, alone, without the autograder.

It imports torch, memlab and ipykernel once. For each submission, and again after a kernel's death, it forks

    zygote ── keeper ── init (pid 1 of its own process namespace) ── kernel (runs the student's code)

and each time everything is new: processes, /tmp, /dev/shm, the working folder. When init ends, the Linux
kernel ends every process that the submission started, whatever session it hid in. The kernel has no
privileges and its limits before a line of the submission runs; the folder of its sockets is read-only then.

The grader talks to it in JSON, one packet each, on a socket:

    ← {"ready": true, "memory": bytes}
    → {"start": {"connection": path, "environment": {…}, "limits": {…}, "run": path, …}}
    ← {"started": true}, later {"ended": "exit 0" | "signal 9" | "too much memory", "processor_seconds": …}
    → {"signal": "interrupt" | "kill"}
    → {"sweep": true}
    ← {"swept": how many processes beside the kernel itself were there, and are ended}
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

PACKET = 1 << 16

#: Loaded before the fork, since each costs a submission more than a few milliseconds.
PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.optim", "torch.utils.checkpoint", "torch.utils._python_dispatch", "torch.profiler",
    "numpy", "matplotlib.pyplot", "matplotlib_inline.backend_inline", "ipywidgets",
    "ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.debugger",
    "IPython.core.display_functions", "IPython.core.completer",
    "multiprocessing.connection", "concurrent.futures.thread",
)  # fmt: skip

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 36, 47, 4
_PR_SET_SECCOMP = 22

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serves the socket whose number is the first argument until the grader hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # without namespaces whatever loses its parent comes back to this process, and ends with its submission
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    _preload()
    control.send(json.dumps({"ready": True, "memory": _memory_of([os.getpid()])}).encode())
    keeper, limit, verdict, spent = 0, 0, "", 0.0
    while True:
        readable, _, _ = select.select([control], [], [], 0.1 if keeper else None)
        if readable:
            packet = control.recv(PACKET)
            if not packet:
                break
            request = json.loads(packet)
            if "start" in request:
                limit = request["start"]["limits"]["total_memory"]
                keeper, verdict = _fork_keeper(control, request["start"]), ""
                control.send(b'{"started": true}')
            elif "sweep" in request:
                control.send(json.dumps({"swept": _sweep(keeper) if keeper else 0}).encode())
            elif keeper:
                name = signal.SIGINT if request["signal"] == "interrupt" else signal.SIGTERM
                _send_signal(keeper, name)
        if keeper:
            ended, status = os.waitpid(keeper, os.WNOHANG)
            if ended:
                _end_everything()
                keeper, before = 0, spent
                spent = _processor_seconds()
                answer = {"ended": verdict or _read_status(status), "processor_seconds": spent - before}
                control.send(json.dumps(answer).encode())
            elif not verdict and _uses_more_than(limit, keeper):
                verdict = "too much memory"
                _send_signal(keeper, signal.SIGTERM)
    if keeper:
        _send_signal(keeper, signal.SIGTERM)
        os.waitpid(keeper, 0)
    _end_everything()


def _processor_seconds() -> float:
    """Of everything below this process that has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end_everything() -> None:
    """Kills what is left below this process; with namespaces there is nothing by now."""
    while left := _below(os.getpid())[1:]:
        for process in left:
            _send_signal(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _sweep(keeper: int) -> int:
    """Ends what the kernel started and left behind, so that the next exercise doesn't pay for it."""
    ended: set[int] = set()
    for _ in range(1_000):
        known = _processes()
        # init is the keeper's child, the kernel the eldest of init's, which adopts what loses its parent
        stays = [os.getpid(), keeper]
        while len(stays) < 4 and (own := [p for p, about in known.items() if about.parent == stays[-1]]):
            stays.append(min(own, key=lambda p: known[p].started))
        if len(stays) < 4:
            break  # it ends just now
        left = [p for p in _below(os.getpid()) if p not in stays and p in known and known[p].state != "Z"]
        if not left:
            break
        # what is stopped forks no more, and keeps its place from one that would; only then all are killed
        fresh = [process for process in left if process not in ended]
        for process in fresh or left:
            _send_signal(process, signal.SIGSTOP if fresh else signal.SIGKILL)
        ended.update(fresh)
        if not fresh:
            time.sleep(0.01)
    for process in ended:  # without namespaces those that lost their parent are this process's
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)
    return len(ended)


def _send_signal(process: int, name: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, name)


def _preload() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import memlab

    for found in pkgutil.walk_packages(memlab.__path__, "memlab."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(Exception):  # a submission that needs it says what is wrong
                importlib.import_module(found.name)
    for name in memlab.__all__:  # it loads them at first use, and the grader watches what is there
        with contextlib.suppress(Exception):
            getattr(memlab, name)
    gc.collect()
    gc.freeze()  # the forks share these pages as long as nobody writes to them


def _read_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"signal {code - 128}" if code > 128 else f"exit {code}"


# -- memory of a submission --------------------------------------------------------------------------------


class _About(NamedTuple):
    parent: int
    state: str
    started: int


def _processes() -> dict[int, _About]:
    """Every process that can be seen."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (entry / "stat").read_text("utf-8", "replace")
                words = stat.rpartition(")")[2].split()
                found[int(entry.name)] = _About(int(words[1]), words[0], int(words[19]))
    return found


def _below(root: int) -> list[int]:
    """`root`, and every process below it."""
    children: dict[int, list[int]] = {}
    for process, about in _processes().items():
        children.setdefault(about.parent, []).append(process)
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found


def _uses_more_than(limit: int, root: int) -> bool:
    """Whether `root` and what runs below it hold more bytes; pages shared with the zygote count in part."""
    found = _below(root)
    page = resource.getpagesize()
    total = 0
    for process in found:
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, resident, shared = Path(f"/proc/{process}/statm").read_text("ascii").split()[:3]
            total += (int(resident) - int(shared)) * page
    # only where the cheap upper bound is too high is the dear, exact number read
    return total > limit and _memory_of(found) > limit


def _memory_of(processes: list[int]) -> int:
    """Proportional set size, in bytes."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text("ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


# -- keeper, init, kernel ----------------------------------------------------------------------------------


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call(
        _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]),
        f"mount {kind} on {target}",
    )


def _fork_keeper(control: socket.socket, order: dict[str, Any]) -> int:
    """The parent of init: it passes interrupts on, kills it when told to, and ends once all of it is gone."""
    keeper = os.fork()
    if keeper:
        return keeper
    try:
        control.close()
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if order["namespaces"]:
            _call(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID), "unshare")
        init = os.fork()
        if init == 0:
            _init(order)
        _kill_on_request(init, signal.SIGTERM)
        _wait_for(init)
    except BaseException as error:
        _die(error)


def _kill_on_request(child: int, gentle: signal.Signals) -> None:
    """On SIGTERM: what `child` used is known only if it ends in order, so it has two seconds for that."""

    def end(*_: object) -> None:
        _send_signal(child, gentle)
        signal.alarm(2)

    signal.signal(signal.SIGALRM, lambda *_: _send_signal(child, signal.SIGKILL))
    signal.signal(signal.SIGTERM, end)


def _wait_for(child: int) -> NoReturn:
    """Ends as `child` ends, and reaps what lost its parent on the way."""
    signal.signal(signal.SIGINT, lambda *_: _send_signal(child, signal.SIGINT))
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _init(order: dict[str, Any]) -> NoReturn:
    """Pid 1: makes the kernel's world, starts it, closes the door behind it, and waits."""
    try:
        if order["namespaces"]:
            _make_world(order)
        from_kernel, to_init = os.pipe()
        from_init, to_kernel = os.pipe()
        kernel = os.fork()
        if kernel == 0:
            os.close(from_kernel)
            os.close(to_kernel)
            _kernel(order, to_init, from_init)
        os.close(to_init)
        os.close(from_init)
        os.read(from_kernel, 1)  # its sockets are bound
        if order["namespaces"]:
            flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
            _mount(None, order["run"], None, flags)
        _drop_privileges(order)
        _libc.prctl(_PR_SET_DUMPABLE, 0)  # the kernel, of the same user, can't look into this process
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _kill_on_request(kernel, signal.SIGKILL)
        os.close(to_kernel)
        os.close(from_kernel)
        _wait_for(kernel)
    except BaseException as error:
        _die(error)


def _die(error: BaseException) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"memlab zygote: {type(error).__name__}: {error}\n".encode())
    os._exit(125)


def _make_world(order: dict[str, Any]) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    owner = f"uid={order['uid']},gid={order['uid']}"
    size = order["limits"]["folder"]
    python = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in order["python_in_tmp"]}
    for folder, mode in (("/tmp", "1777"), ("/dev/shm", "1777"), (order["work"], "0700")):
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode={mode},{owner}")
    for place, descriptor in python.items():  # a new /tmp covers a Python that lies there
        Path(place).mkdir(mode=0o755, parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", place, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
    # of the folders of sockets this kernel sees its own alone
    _mount(order["own_run"], order["run"], None, _MS_BIND)
    _mount("tmpfs", order["all_runs"], "tmpfs", _MS_RDONLY, "size=4k,mode=0755")
    os.chown(order["run"], order["uid"], order["uid"])


def _drop_privileges(order: dict[str, Any]) -> None:
    """Another user where there is one, no capability, and no way to get one back."""
    if order["uid"] != os.getuid():
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        for capability in range(64):
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        os.setresuid(order["uid"], order["uid"], order["uid"])
    elif order["protected"]:
        for capability in range(64):
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    if order["protected"]:
        _libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        _call(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        _call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


# Access rights of Landlock's file systems rules, by the version that brought them.
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, list folders
_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def landlock_version() -> int:
    """The version of Landlock that this Linux kernel offers; 0 where there is none."""
    return max(int(_libc.syscall(444, None, 0, 1)), 0)


def _landlock(readable: list[str], writable: list[str]) -> None:
    """From here on this process and its children reach no other file, no TCP port, no process outside."""
    _call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    version = landlock_version()
    rights = sum(bits for since, bits in _RIGHTS.items() if since <= version)
    ruleset = _Ruleset(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = int(_libc.syscall(444, ctypes.byref(ruleset), ctypes.c_size_t(size), 0))
    _call(min(rules, 0), "landlock_create_ruleset")
    for allowed, paths in ((_READ, readable), (rights, writable)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
                of_files = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
                fit = allowed & rights if Path(path).is_dir() else allowed & rights & of_files
                rule = _Beneath(fit, folder)
                _call(int(_libc.syscall(445, rules, 1, ctypes.byref(rule), 0)), f"landlock_add_rule {path}")
                os.close(folder)
    _call(int(_libc.syscall(446, rules, 0)), "landlock_restrict_self")
    os.close(rules)


# By machine: its number in seccomp's records, the calls no submission needs, then clone, clone3, socket.
# The calls: ptrace, mount, umount2, pivot_root, chroot, unshare, setns, process_vm_readv and _writev, keyctl,
# add_key, request_key, bpf, perf_event_open, userfaultfd, (f)init_module, delete_module, kexec_(file_)load,
# open_by_handle_at; then those with the same number everywhere: io_uring, open_tree, move_mount, fsopen, …
_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442)
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (101, 165, 166, 155, 161, 272, 308, 310, 311, 250, 248, 249, 321, 298, 323, 175, 313, 176, 246, 320,
         304),
        (56, 435, 41),
    ),
    "aarch64": (
        0xC00000B7,
        (117, 40, 39, 41, 51, 97, 268, 270, 271, 219, 217, 218, 280, 241, 282, 105, 273, 106, 104, 294, 265),
        (220, 435, 198),
    ),
}  # fmt: skip
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020080


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def _seccomp(*, network: bool) -> None:
    """Refuses system calls that no submission needs and that widen what it can attack; without `network` also
    every socket but local ones. Machines that aren't in the table go without."""
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return
    machine, refused, (clone, clone3, socket_) = known
    load, equal, at_least, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, _KILL), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, _REFUSE | errno.ENOSYS)]  # x86's second table
    for number in (*refused, *_EVERYWHERE):
        steps += [(equal, 0, 1, number), (give, 0, 0, _REFUSE | errno.EPERM)]
    # glibc falls back to clone, whose flags can be read here
    steps += [(equal, 0, 1, clone3), (give, 0, 0, _REFUSE | errno.ENOSYS)]
    steps += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_of, 0, 1, _NEW_NAMESPACES)]
    steps += [(give, 0, 0, _REFUSE | errno.EPERM), (give, 0, 0, _ALLOW)]
    if not network:
        steps += [(equal, 0, 4, socket_), (load, 0, 0, 16), (equal, 1, 0, int(socket.AF_UNIX))]
        steps += [(give, 0, 0, _REFUSE | errno.EACCES), (give, 0, 0, _ALLOW)]
    steps.append((give, 0, 0, _ALLOW))
    program = _Program(len(steps), (_Instruction * len(steps))(*(_Instruction(*step) for step in steps)))
    _call(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _limit(limits: dict[str, int]) -> None:
    for name in ("AS", "FSIZE", "NPROC", "CPU", "NOFILE", "CORE"):
        if name in limits:
            # past the soft limit of processor time comes SIGXCPU, which says why, then SIGKILL
            hard = limits[name] + 5 if name == "CPU" else limits[name]
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limits[name], hard))


def _kernel(order: dict[str, Any], to_init: int, from_init: int) -> NoReturn:
    """Becomes the kernel that runs the submission."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["work"])
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    if order["landlock"]:
        _landlock(*order["landlock"])
    _drop_privileges(order)
    if order["protected"]:
        _seccomp(network=order["namespaces"])
    _limit(order["limits"])
    del sys.argv[1:]
    sys.path[:] = ["", *(path for path in sys.path if path != str(Path(__file__).parent))]
    sys.modules["__main__"].__dict__.pop("__file__", None)
    from ipykernel.kernelapp import IPKernelApp

    if order["landlock"]:
        from ipykernel.iostream import IOPubThread

        # prints of forked processes would come by TCP, and libzmq aborts where that is refused
        threads: Any = IOPubThread
        threads._setup_pipe_in = lambda thread: setattr(thread, "_pipe_flag", False)
    app: Any = IPKernelApp.instance()
    app.initialize(
        ["-f", order["connection"], "--HistoryManager.enabled=False", "--IPKernelApp.log_level=50"]
    )
    os.close(to_init)
    os.read(from_init, 1)  # returns once the folder of the sockets is read-only
    os.close(from_init)
    gc.collect()
    for name, seed in (("random", "seed"), ("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # the same numbers in every kernel, for code that forgot to say so
            getattr(sys.modules[name], seed)(0)
    app.start()
    os._exit(0)


if __name__ == "__main__":
    main()
