"""Runs one function on several ranks: real processes on this machine, joined by the `gloo` backend.

    def hello(rank, world_size):
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    run(hello, 2)            # [2.0, 2.0]

One helper process imports torch and forks the ranks, so that they share its memory and start at once. (They
aren't forked from the caller: autograd refuses to run in the fork of a process that has run it.) Functions
and classes that were typed into a notebook travel by value, all others by name.

Every way to fail ends in one clear line within `timeout` seconds: `GlooUnavailable` where this machine can't
do it (no gloo, no local port), `RankFailed` where a rank raised, died or took too long.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import io
import marshal
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["GlooUnavailable", "RankFailed", "run", "unavailable"]


class GlooUnavailable(RuntimeError):
    """This machine can't run several ranks; the message says why."""


class RankFailed(RuntimeError):
    """A rank raised, died or didn't end in time; the message names the rank and the error."""


def unavailable() -> str | None:
    """Why several ranks can't run here, in one line; None where nothing speaks against it."""
    import torch.distributed as dist

    if not dist.is_available():
        return "this build of torch has no torch.distributed"
    if not dist.is_gloo_available():
        return "this build of torch.distributed has no gloo backend"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
    except OSError as error:
        return f"no local port can be opened ({error.strerror or error})"
    return None


def run(
    function: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
) -> list[Any]:
    """`function(rank, world_size, *args)` on every rank inside a gloo process group: the results by rank.

    Arguments and results are pickled; CPU tensors may be among them, and results are of types that can be
    imported (not of a class from a notebook). Each rank computes on the CPU, with one thread.
    What the ranks print is printed here; what they write to stderr is shown only when one fails.
    Raises GlooUnavailable, RankFailed, ValueError for a world size below 1 or what can't be pickled, and
    NotImplementedError where that is what a rank raised.
    """
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")
    reason = unavailable()
    if reason is not None:
        raise GlooUnavailable(f"can't start {world_size} ranks: {reason}")
    job = _pickled((function, args))
    with tempfile.TemporaryDirectory(prefix="memlab-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Linux forks all ranks from one helper; elsewhere a fork is unsafe and each rank is its own helper.
        teams = [range(world_size)] if sys.platform == "linux" else [[r] for r in range(world_size)]
        helpers = [_start(folder, list(ranks), world_size, timeout, job) for ranks in teams]
        deadline = time.monotonic() + timeout + 60  # importing torch is not the function's time
        try:
            for helper in helpers:
                helper.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for helper in helpers:
                helper.kill()
                helper.wait()
                if helper.stdin is not None:
                    helper.stdin.close()
        return _collected(folder, world_size, timeout)


def _start(
    folder: Path, ranks: list[int], world_size: int, timeout: float, job: bytes
) -> subprocess.Popen[bytes]:
    """A helper process. Its stdin stays open: should this process die, the helper sees it close and ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    order = pickle.dumps((str(folder), ranks, world_size, timeout, sys.path, job))
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as processes; processes._help()"
    with (folder / f"log{ranks[0]}").open("wb") as log:
        helper = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    assert helper.stdin is not None
    try:
        helper.stdin.write(len(order).to_bytes(8, "little") + order)
        helper.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once: its log says why
    return helper


def _collected(folder: Path, world_size: int, timeout: float) -> list[Any]:
    """The results that the ranks left in `folder`, or the most telling of their errors."""
    results: list[Any] = []
    failures: list[tuple[int, str, str]] = []
    silent: list[int] = []
    for rank in range(world_size):
        path = folder / f"result{rank}"
        if not path.exists():
            silent.append(rank)
            continue
        with path.open("rb") as file:
            kind, value, detail = pickle.load(file)
        if kind == "result":
            results.append(value)
        else:
            failures.append((rank, value, detail))
            if kind == "group":
                raise GlooUnavailable(f"gloo can't connect {world_size} ranks here: {value}")
    output = "".join(p.read_text("utf-8", "replace") for p in sorted(folder.glob("printed*")))
    if failures:
        # When one rank fails the others lose their connection to it: the first to fail is the cause.
        rank, value, detail = min(failures, key=lambda f: (folder / f"result{f[0]}").stat().st_mtime_ns)
        if value.startswith("NotImplementedError"):
            raise NotImplementedError(value.partition(": ")[2])  # an exercise that isn't written yet
        raise RankFailed(f"rank {rank} of {world_size}: {value}\n\n{detail}")
    if silent:
        log = "".join(p.read_text("utf-8", "replace")[-2000:] for p in sorted(folder.glob("log*"))).strip()
        which = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        raise RankFailed(
            f"{which} of {world_size}: no result within {timeout:g} s"
            " (it waits for a collective that another rank doesn't call, or it was killed)"
            + (f"\n\n{log}" if log else "")
        )
    if output:
        print(output, end="")
    return results


# In the helper


def _help() -> None:
    """Read the order, import torch, become the ranks, end with them."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    folder, ranks, world_size, timeout, path, job = pickle.loads(sys.stdin.buffer.read(size))
    sys.path[:] = path
    import torch.distributed  # noqa: F401  # once, for all ranks

    with contextlib.suppress(Exception):
        pickle.loads(job)  # so is what the function's own modules import; an error is each rank's to report

    if len(ranks) == 1:
        _rank(Path(folder), ranks[0], world_size, timeout, job)
        return
    children: set[int] = set()
    for rank in ranks:
        child = os.fork()
        if child == 0:
            try:
                _rank(Path(folder), rank, world_size, timeout, job)
            finally:
                os._exit(0)
        children.add(child)
    deadline = time.monotonic() + timeout
    orphaned = False
    while children and not orphaned and time.monotonic() < deadline:
        orphaned = bool(select.select([sys.stdin], [], [], 0.01)[0])
        for child in tuple(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _rank(folder: Path, rank: int, world_size: int, timeout: float, job: bytes) -> None:
    """One rank, from process group to result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    printed = (folder / f"printed{rank}").open("w", encoding="utf-8")
    sys.stdout = printed
    answer: tuple[str, Any, str]
    try:
        dist.init_process_group(
            "gloo",
            store=torch._C._distributed_c10d.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout + 60),  # the helper's own limit comes first
        )
        dist.barrier()
    except Exception as error:
        answer = ("group", _one_line(error), traceback.format_exc())
    else:
        try:
            function, args = pickle.loads(job)
            answer = ("result", function(rank, world_size, *args), "")
        except BaseException as error:
            answer = ("error", f"{type(error).__name__}: {_one_line(error)}", traceback.format_exc())
    printed.close()
    temporary = folder / f"writing{rank}"
    try:
        data = pickle.dumps(answer)
    except Exception as error:
        data = pickle.dumps(("error", f"its result can't be pickled: {_one_line(error)}", ""))
    temporary.write_bytes(data)
    temporary.rename(folder / f"result{rank}")
    if answer[0] == "result":
        dist.barrier()  # nobody closes a connection that another rank still reads from
        dist.destroy_process_group()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__


# Functions by value


def _pickled(thing: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _ByValue(buffer, protocol=5).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the function or its arguments can't be sent to another process: {error}"
        ) from error
    return buffer.getvalue()


class _ByValue(pickle.Pickler):
    """Pickles what another process can't import, functions and classes, with all that it refers to."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.ModuleType):
            return importlib.import_module, (thing.__name__,)
        if isinstance(thing, types.FunctionType) and not _importable(thing):
            code, cells = thing.__code__, thing.__closure__ or ()
            values = [cell.cell_contents for cell in cells]
            names = {n: thing.__globals__[n] for n in _globals_of(code) if n in thing.__globals__}
            state = (thing.__defaults__, thing.__kwdefaults__, thing.__dict__, values, names)
            shell = (marshal.dumps(code), thing.__module__, thing.__name__, len(cells))
            return _function, shell, state, None, None, _fill_function
        if isinstance(thing, type) and not _importable(thing):
            members = {n: v for n, v in vars(thing).items() if n not in ("__dict__", "__weakref__")}
            bare = (type(thing), thing.__name__, thing.__bases__, thing.__module__)
            return _class, bare, members, None, None, _fill_class
        return NotImplemented


def _importable(thing: Any) -> bool:
    if thing.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """The names that `code`, and the functions inside it, look up in the module."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)


_namespaces: dict[str, dict[str, Any]] = {}


def _function(code: bytes, module: str, name: str, cells: int) -> types.FunctionType:
    names = _namespaces.setdefault(module, {"__builtins__": __builtins__, "__name__": module})
    return types.FunctionType(
        marshal.loads(code), names, name, None, tuple(types.CellType() for _ in range(cells))
    )


def _fill_function(function: types.FunctionType, state: Sequence[Any]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes, values, names = state
    function.__dict__.update(attributes)
    for cell, value in zip(function.__closure__ or (), values, strict=True):
        cell.cell_contents = value
    function.__globals__.update(names)


def _class(kind: type, name: str, bases: tuple[type, ...], module: str) -> Any:
    return kind(name, bases, {"__module__": module})


def _fill_class(made: type, members: dict[str, Any]) -> None:
    for name, value in members.items():
        setattr(made, name, value)
