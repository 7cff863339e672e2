"""Runs an answer in a child process with limits: it may exhaust memory, loop or exit, the parent goes on.

It runs in place, without limits, where there is no fork (Windows), inside a child already, and once this
process has used a GPU: neither CUDA nor the backward's threads work in a fork of such a process.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memlab.exercises import Evidence, one_line
from memlab.units import GIB, format_bytes

_inside = False


def in_child(work: Callable[[], Evidence], *, seconds: float = 60, memory: int | None = None) -> Evidence:
    """`work()` in a forked child: its evidence, or `{"error": …}` when it dies, takes too long or too much.

    `memory` bounds what the child may allocate on top of what it inherits (bytes of address space).
    `NotImplementedError` is raised again here.
    """
    torch = sys.modules.get("torch")
    if _inside or not hasattr(os, "fork") or (torch is not None and torch.cuda.is_initialized()):
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(work, sender, memory), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads; this child starts none
        child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return {"error": f"TimeoutError: no result within {seconds:g} s"}
        kind, value = receiver.recv()
    except EOFError:
        child.join(5)
        return {"error": _death(child.exitcode)}
    finally:
        receiver.close()
        if child.is_alive():
            child.kill()
        child.join(5)
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


def _run(work: Callable[[], Evidence], sender: Connection, memory: int | None) -> None:
    global _inside
    _inside = True
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)  # OpenMP's threads don't survive a fork
    if memory is not None:
        _limit_memory(memory)
    try:
        result: tuple[str, Any] = ("evidence", work())
    except NotImplementedError as error:
        result = ("not written", str(error))
    except MemoryError:
        limit = "" if memory is None else f": more than {format_bytes(memory)}"
        result = ("evidence", {"error": f"MemoryError{limit}"})
    except (Exception, SystemExit) as error:
        result = ("evidence", {"error": one_line(error)})
    sender.send(result)
    sender.close()
    os._exit(0)


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
