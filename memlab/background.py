"""A trace in a process of its own: the notebook stays free while it runs, and it can be cancelled.

    run = Background("gpt2", Recipe(), "T4", told=print, done=print)
    run.cancel()

A thread can't be stopped, and a virtual card replaces functions of torch for everybody in its process: hence
a child. It ends with the one who started it (its standard input closes). The parent needs no torch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from memlab.recipe import Recipe

_TICK = 0.5  # seconds between two signs of life


class Background:
    """`report.compare` of one recipe, without measuring, in a child process.

    told(fraction, stage) is called as the trace goes on and every half second, done(outcome) once at its end
    unless it was cancelled; both from another thread. An outcome is {'rows': [[name, formula, trace, gap],
    …], 'peak_bytes', 'peak_phase', 'events', 'seconds'}, as `report.Comparison` has them, or {'error': one
    line}.
    """

    def __init__(
        self,
        model: str,
        recipe: Recipe,
        gpu: str | None,
        told: Callable[[float, str], None],
        done: Callable[[dict[str, Any]], None],
    ) -> None:
        self._told, self._done = told, done
        self._cancelled = False
        self._started = time.monotonic()
        here = str(Path(__file__).resolve().parent.parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from memlab import background; background._child()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupted notebook cell isn't meant for the trace
        )
        assert self.process.stdin is not None
        order = {"model": model, "recipe": recipe.to_dict(), "gpu": gpu}
        with suppress(OSError):  # dead already: how it ended is said when its output is read
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        self._thread = threading.Thread(target=self._follow, name="memlab trace", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def cancel(self) -> None:
        """Ends the child; `done` isn't called any more. Harmless when it has ended."""
        self._cancelled = True
        self.process.kill()

    def wait(self, seconds: float | None = None) -> bool:
        """Has it ended (within so many seconds), and is `done` through?"""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _follow(self) -> None:
        lines: queue.Queue[bytes | None] = queue.Queue()
        assert self.process.stdout is not None
        threading.Thread(target=_read, args=(self.process.stdout, lines), daemon=True).start()
        fraction, stage = 0.0, "loading PyTorch"
        outcome: dict[str, Any] | None = None
        while not self._cancelled:
            self._told(fraction, stage)
            try:
                line = lines.get(timeout=_TICK)
            except queue.Empty:
                continue
            if line is None:
                break
            message = json.loads(line)
            if "stage" in message:
                fraction, stage = message["fraction"], message["stage"]
            else:
                outcome = message
        if self._cancelled:
            self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if not self._cancelled:
            if outcome is None:
                outcome = {"error": f"the process of the trace ended without a result ({_ended(code)})"}
            self._done({**outcome, "seconds": self.seconds})


def _read(pipe: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(None)


def _ended(code: int) -> str:
    return "killed: out of memory?" if code == -9 else f"exit code {code}"


# -- in the child ------------------------------------------------------------------------------------------


def _child() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print isn't for the pipe

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        say(**_compared(order, lambda fraction, stage: say(fraction=fraction, stage=stage)))
    except Exception as error:
        say(error=" ".join(f"{type(error).__name__}: {error}".split()))
    out.flush()
    os._exit(0)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _compared(order: dict[str, Any], tell: Callable[[float, str], None]) -> dict[str, Any]:
    import torch

    from memlab import report, step

    torch.set_num_threads(1)
    recipe = Recipe.from_dict(order["recipe"])
    plain = step.Workload.step
    steps = 0
    phases = ["forward", "backward"] * recipe.accumulation + ["optimizer"]

    def followed(self: Any, mark: Callable[[str], None] = lambda phase: None) -> Any:
        nonlocal steps
        steps += 1
        begun = 0

        def both(phase: str) -> None:
            nonlocal begun
            share = (steps - 1 + begun / len(phases)) / 2
            begun += 1
            tell(0.1 + 0.9 * min(share, 1.0), f"step {steps}, {phase}")
            mark(phase)

        return plain(self, both)

    step.Workload.step = followed  # type: ignore[method-assign]
    tell(0.1, "building the model")
    compared = report.compare(order["model"], recipe, gpu=order["gpu"], measure=False)
    trace = compared.trace
    return {
        "rows": [[row.name, row.formula, row.trace, row.gap] for row in compared.rows],
        "peak_bytes": trace.peak_bytes,
        "peak_phase": trace.peak_phase,
        "events": len(trace),
    }
