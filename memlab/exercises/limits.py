"""Runs an answer in a child process with limits: it may exhaust memory, loop or exit, the parent goes on.

It runs in place, without limits, where there is no fork (Windows), inside a child already, and once this
process has used a GPU: neither CUDA nor the backward's threads work in a fork of such a process.

The answer shares the child with what reports its result, so a result counts only as the check leaves it: one
line of JSON with the parent's token, from a process in which no function of ours was replaced, that ends with
the agreed code. Nothing of it is unpickled.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from memlab.exercises import Evidence, one_line
from memlab.units import GIB, format_bytes

#: Bytes of the longest result; evidence is far below.
_LONGEST = 64 * 1000**2

#: Modules beside memlab's own whose functions, and whose classes' methods, no answer replaces.
WATCHED = (
    "builtins", "json", "json.encoder", "random", "math", "time", "gc", "io", "os", "contextlib", "weakref",
    "traceback", "warnings", "multiprocessing.context", "multiprocessing.connection",
    "torch", "torch.nn.functional", "torch.utils._python_dispatch", "torch.overrides", "torch.autograd.graph",
    "numpy",
)  # fmt: skip

_inside = False


class TamperedResult(RuntimeError):
    """A child handed over what its check didn't write."""


class NoProcess(RuntimeError):
    """No child process could be started: others use up what this machine allows."""


def in_child(work: Callable[[], Evidence], *, seconds: float = 60, memory: int | None = None) -> Evidence:
    """`work()` in a forked child: its evidence, or `{"error": …}` when it dies, takes too long or too much.

    `memory` bounds what the child may allocate on top of what it inherits (bytes of address space).
    `NotImplementedError` is raised again here. Whatever the child started ends with it.
    """
    torch = sys.modules.get("torch")
    if _inside or not hasattr(os, "fork") or (torch is not None and torch.cuda.is_initialized()):
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    token, agreed = secrets.token_hex(16), 64 + secrets.randbelow(64)
    # emptied by the child: the answer finds neither in its process's arguments
    errand = [work, sender, memory, seconds, token, agreed]
    child = context.Process(target=_run, args=(errand,), daemon=True)
    until = time.monotonic() + seconds
    try:
        _start(child)
        sender.close()
        text = _line(receiver, child, until)
        _wait(child, 30 if text else 5)
    except TimeoutError:
        return {"error": f"TimeoutError: no result within {seconds:g} s"}
    finally:
        _end(child)
        rest = os.read(receiver.fileno(), 1) if sender.closed and receiver.poll(0) else b""
        receiver.close()
    if not text.endswith(b"\n"):
        return {"error": _death(child.exitcode)}
    return _opened(text, token, honest=child.exitcode == agreed and not rest)


def _start(child: BaseProcess) -> None:
    """Starts it, and waits a little where there are too many processes: some may just be ending."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads; this child starts none
        for pause in (0.1, 0.5, 2.0, None):
            try:
                return child.start()
            except OSError as error:
                if pause is None:
                    raise NoProcess(f"no process can be started: {error}") from None
                time.sleep(pause)


def _line(receiver: Connection, child: BaseProcess, until: float) -> bytes:
    """What the child wrote, to the end of its first line, or of the child. Raises TimeoutError."""
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < _LONGEST:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if receiver.poll(min(left, 0.1)):
            piece = os.read(receiver.fileno(), 1 << 16)
            if not piece:
                break
            found += piece
        elif not child.is_alive() and not receiver.poll(0):
            break  # what it started itself may hold the other end open
    return bytes(found)


def _end(child: BaseProcess) -> None:
    """Kills the child and all that it started."""
    if child.pid is None:
        return
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.is_alive():
        child.kill()
    _wait(child, 5)


def _wait(child: BaseProcess, seconds: float) -> None:
    """`join` waits for what the child started, too, where that left the child's group."""
    until, pause = time.monotonic() + seconds, 0.001
    while child.is_alive() and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _opened(text: bytes, token: str, *, honest: bool) -> Evidence:
    """The result in the child's line. Raises NotImplementedError as it did, and TamperedResult."""
    try:
        said, kind, value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        said, kind, value = "", "", ""
    if not honest or not isinstance(said, str) or not secrets.compare_digest(said.encode(), token.encode()):
        raise TamperedResult("its child process handed over what the check didn't write")
    if kind == "changed":
        raise TamperedResult(f"changed while it ran: {value}")
    if kind == "not written":
        raise NotImplementedError(value)
    return dict(value)


def contained(work: Callable[[], Evidence], *, seconds: float = 60, memory: int = 2 * GIB) -> Evidence:
    """`in_child` for work that trains: on one thread, and in place where autograd can't run in a fork."""
    import torch
    import torch._dynamo
    import torch.utils.checkpoint  # both are loaded at first use: before the fork, not in each child

    def quick() -> Evidence:
        gc.freeze()  # what is there already needn't be searched at each gc.collect()
        try:
            return work()
        finally:
            gc.unfreeze()

    evidence = in_child(quick, seconds=seconds, memory=memory)
    if "fork-based multiprocessing" in str(evidence):  # autograd's threads have used a GPU
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return quick()
        finally:
            torch.set_num_threads(threads)
    return evidence


def _run(errand: list[Any]) -> None:
    global _inside
    _inside = True
    work, sender, memory, seconds, token, agreed = errand
    errand.clear()
    own = os.getpid()
    os.setpgid(0, 0)  # the parent ends the whole group
    signal.alarm(int(seconds) + 30)  # whatever becomes of the parent
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)  # OpenMP's threads don't survive a fork
    write, leave, dumps, look, process = os.write, os._exit, json.dumps, functions, os.getpid
    still, collects = gc.disable, gc.isenabled()
    still()  # thousands of tuples would set off a collection of all that torch brought
    before = dict(look(WATCHED))
    if collects:
        gc.enable()
    if memory is not None:
        _limit_memory(memory)
    try:
        text = dumps([token, "evidence", work()])
    except NotImplementedError as error:
        text = dumps([token, "not written", str(error)])
    except MemoryError:
        limit = "" if memory is None else f": more than {format_bytes(memory)}"
        text = dumps([token, "evidence", {"error": f"MemoryError{limit}"}])
    except (Exception, SystemExit) as error:
        text = dumps([token, "evidence", {"error": one_line(error)}])
    if process() != own:
        leave(1)  # a fork that the answer made: its result is nobody's
    changed: list[str] = []
    with contextlib.suppress(MemoryError):
        changed = ["it can't be looked at"]
        still()
        after = dict(look(WATCHED))
        changed = [name for name, ids in before.items() if after.get(name) != ids]
    if changed:
        text = dumps([token, "changed", ", ".join(changed[:3])])
    left = text.encode() + b"\n"
    while left:
        left = left[write(sender.fileno(), left) :]
    leave(agreed)


def functions(watched: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each function of memlab's modules and of these, methods included, with what tells it from another."""
    hooks = step_hooks()
    for module_name, module in list(sys.modules.items()):
        ours = module_name == "memlab" or module_name.startswith("memlab.")
        if module is None or not (ours or module_name in watched):
            continue
        for name, value in list(vars(module).items()):
            where = f"{module_name}.{name}"
            kind = type(value).__name__
            if kind == "function":
                defaults = id(value.__defaults__), id(value.__kwdefaults__)
                yield where, (id(value), id(value.__code__), *defaults)
            elif kind == "builtin_function_or_method":
                yield where, (id(value),)
            elif isinstance(value, type):
                yield where, (id(value),)
                for key, item in list(vars(value).items()) if value.__module__ == module_name else ():
                    function = getattr(item, "__func__", getattr(item, "fget", item))
                    if type(function).__name__ == "function":
                        if id(function.__code__) in hooks:
                            place = function.__code__.co_freevars.index("func")
                            function = function.__closure__[place].cell_contents
                        yield f"{where}.{key}", (id(function), id(function.__code__))


def step_hooks() -> set[int]:
    """Of the code in which torch wraps the `step` of an optimizer's class when the first one is made."""
    optimizer = getattr(getattr(sys.modules.get("torch"), "optim", None), "Optimizer", None)
    hook = getattr(getattr(optimizer, "profile_hook_step", None), "__code__", None)
    return {id(code) for code in getattr(hook, "co_consts", ())}


def _limit_memory(memory: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"the process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"the process ended by itself (exit code {code}) before there was a result"
