"""Work in a child process always comes back with a result, whatever it does."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import stat
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.exercises import Evidence, limits
from memlab.exercises.limits import NoProcess, TamperedResult, functions, in_child
from memlab.units import MIB


def hungry() -> Evidence:
    return {"value": sum(bytearray(512 * MIB)[::4096])}


def looping() -> Evidence:
    while True:
        time.sleep(0.01)


def exits() -> Evidence:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (hungry, "MemoryError: more than 256.00 MiB"),
        (looping, "TimeoutError: no result within 1 s"),
        (exits, "SystemExit: 3"),
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os.kill(os.getpid(), 9), "SIGKILL"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_whatever_it_does_there_is_one_line(work: Callable[[], Any], message: str) -> None:
    result = in_child(work, seconds=1 if work is looping else 30, memory=256 * MIB)
    assert message in result["error"]


def test_a_result_comes_back_and_the_parent_is_untouched() -> None:
    seen: list[int] = []

    def work() -> Evidence:
        seen.append(1)
        x = torch.ones(64, requires_grad=True)
        (x * 2).sum().backward()
        return {"value": float(x.grad.sum()), "inside": in_child(lambda: {"nested": True})}

    assert in_child(work, memory=512 * MIB) == {"value": 128.0, "inside": {"nested": True}}
    assert seen == []


def test_an_exercise_not_written_is_told_apart_from_an_error() -> None:
    def work() -> Evidence:
        raise NotImplementedError("exercise 1.5")

    with pytest.raises(NotImplementedError, match=r"exercise 1\.5"):
        in_child(work)


def test_the_limit_does_not_stay() -> None:
    in_child(hungry, memory=256 * MIB)
    assert hungry()["value"] == 0


# -- a hostile answer in the child ---------------------------------------------------------------------------


def pipes() -> dict[int, int]:
    """Number of each open pipe -> its inode."""
    found = {}
    for number in range(3, 256):
        with contextlib.suppress(OSError):
            about = os.fstat(number)
            if stat.S_ISFIFO(about.st_mode):
                found[number] = about.st_ino
    return found


#: Pipes of whoever runs the tests: a word into pytest-xdist's would stop it for ever.
others: set[int] = set()


@pytest.fixture(autouse=True)
def of_others() -> None:
    others.clear()
    others.update(pipes().values())


def say(data: bytes) -> None:
    for number, inode in pipes().items():
        if inode not in others:
            with contextlib.suppress(OSError):
                os.write(number, data)


RIGHT = {"value": 42}
PICKLED = pickle.dumps(("evidence", RIGHT))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!i", len(PICKLED)) + PICKLED,
        json.dumps(["evidence", RIGHT]).encode() + b"\n",
        json.dumps(["0" * 32, "evidence", RIGHT]).encode() + b"\n",
        json.dumps([None, "evidence", RIGHT]).encode() + b"\n",
        b"[" * 20_000 + b"\n",
        b"\xff\n",
        b"\n",
    ],
)
@pytest.mark.parametrize("code", [0, 1, None])
def test_a_result_of_the_answers_own_is_found_out(data: bytes, code: int | None) -> None:
    def work() -> Evidence:
        say(data)
        if code is not None:
            os._exit(code)
        return {"value": 1}

    with pytest.raises(TamperedResult):
        evidence = in_child(work, seconds=20)
        if not data.endswith(b"\n") and code is not None:  # not even a whole message
            assert "ended by itself" in evidence["error"]
            raise TamperedResult


def test_words_before_the_result_and_after_it_are_found_out() -> None:
    def late() -> Evidence:
        if os.fork() == 0:
            for _ in range(100):
                say(b"x\n")
                time.sleep(0.01)
            os._exit(0)
        time.sleep(0.5)
        return {"value": 1}

    with pytest.raises(TamperedResult):
        in_child(late, seconds=20)


def test_the_answer_finds_no_token_in_its_process() -> None:
    def work() -> Evidence:
        process = multiprocessing.current_process()
        return {"value": [str(vars(process)), str(process._args)]}  # type: ignore[attr-defined]

    assert "[]" in in_child(work)["value"][1]


def test_functions_replaced_in_the_child_are_found_out() -> None:
    def by_an_alias() -> Evidence:
        other = limits
        other._limit_memory = other._death  # type: ignore[assignment]
        return {"value": 1}

    def by_code() -> Evidence:
        json.JSONEncoder.encode.__code__ = (lambda self, o: "1").__code__
        return {"value": 1}

    for work in (by_an_alias, by_code):
        with pytest.raises(TamperedResult, match=r"changed while|the check"):
            in_child(work)


def test_what_an_answer_leaves_running_ends_with_it() -> None:
    def work() -> Evidence:
        receiver, sender = os.pipe()
        if os.fork() == 0:
            os.close(receiver)
            os.write(sender, b"x")
            time.sleep(60)
            os._exit(0)
        os.read(receiver, 1)
        return {"value": os.getpgid(0)}

    began = time.monotonic()
    group = in_child(work)["value"]
    assert time.monotonic() - began < 20
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)
    raise AssertionError("a process is left")


def test_a_fork_that_comes_back_hands_nothing_over() -> None:
    def work() -> Evidence:
        os.fork()
        return {"value": 1}

    assert in_child(work) == {"value": 1}


def test_no_process_is_another_error_than_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(NoProcess, match="no process can be started"):
        in_child(dict)


def test_that_torch_wraps_the_step_of_an_optimizers_class_is_no_change_and_another_step_is() -> None:
    import torch

    from memlab import sharded

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    def looked() -> dict[str, tuple[int, ...]]:
        return dict(functions(()))

    Own.__module__, name = sharded.__name__, f"{sharded.__name__}.Own.step"
    sharded.Own = Own  # type: ignore[attr-defined]
    try:
        before = looked()
        Own([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        assert Own.step.hooked and looked()[name] == before[name]  # type: ignore[attr-defined]
        Own.step = torch.optim.Optimizer.profile_hook_step(lambda self, closure=None: None)  # type: ignore
        Own.step.__wrapped__ = before  # type: ignore[attr-defined]
        assert looked()[name] != before[name]
    finally:
        del sharded.Own  # type: ignore[attr-defined]
