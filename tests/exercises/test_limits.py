"""Work in a child process always comes back with a result, whatever it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memlab.exercises import Evidence
from memlab.exercises.limits import in_child
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
