"""On how small a card do published steps still run? The virtual card and the allocator's replay must agree.

    python -m benchmarks.capacity [--rows ID...] [--json FILE]

For each unquantised row measured on a T4 the script of its source is traced on a virtual T4 with the card's
own capacity and context: it must run, as it did. Then the smallest capacity is found twice by bisection: by
replaying the recorded events, and by running the script itself on virtual cards of less and less memory. One
step of 2 MiB below it both must refuse, at the same allocation with the same numbers. Needs the extra
`benchmarks` (transformers, peft); `--rows` takes some rows only (a row takes minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memlab import hardware
from memlab.allocator import ROUND_LARGE, Replay, replay, smallest_capacity
from memlab.cuda_rules import CudaRules
from memlab.trace import Trace
from memlab.units import format_bytes
from memlab.virtual import VirtualGPU

CARD = hardware.gpu("T4")
CONTEXT = CARD.context_bytes or 0


def replayed(trace: Trace, capacity: int) -> Replay:
    """The trace by the allocator's rules on a card of `capacity` bytes with the T4's context."""
    emptied = trace.info.get("empty_cache", ())
    return replay(trace.events, trace.sizes, capacity=capacity, context=CONTEXT, empty_cache=emptied)


def smallest_by_replay(trace: Trace) -> int:
    """Bytes of the smallest card on which the trace's events run."""
    emptied = trace.info.get("empty_cache", ())
    return smallest_capacity(trace.events, trace.sizes, context=CONTEXT, empty_cache=emptied)


def smallest_by_running(refusal: Callable[[int], str], trace: Trace) -> int:
    """The same by bisection of what runs; `refusal(capacity)` is the card's message, '' where it runs."""
    least = replayed(trace, 1 << 50)
    low, high = least.peak_requested // ROUND_LARGE - 1, -(-least.peak_reserved // ROUND_LARGE)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if refusal(middle * ROUND_LARGE + CONTEXT) else (low, middle)
    return high * ROUND_LARGE + CONTEXT


def played(trace: Trace, capacity: int) -> str:
    """Make tensors of the trace's sizes on a virtual T4 of `capacity` bytes: its refusal, '' if it runs."""
    emptied = set(trace.info.get("empty_cache", ()))
    alive: dict[int, torch.Tensor] = {}
    try:
        with VirtualGPU(CARD, limit=capacity, rules=CudaRules.none()):
            for position, event in enumerate(trace.events):
                if position in emptied:
                    torch.cuda.empty_cache()
                if event >= 0:
                    alive[event] = torch.empty(trace.sizes[event], dtype=torch.uint8)
                else:
                    del alive[~event]
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def run(row: dict[str, Any], capacity: int) -> str:
    """The row's own script on a virtual T4 of `capacity` bytes: its refusal, '' where it runs."""
    from benchmarks.accuracy import traced

    try:
        traced(row, capacity)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """One row: does it run on a T4, and on how small a card, by both ways. Bytes."""
    from benchmarks.accuracy import traced

    trace = traced(row).trace
    whole = replayed(trace, 1 << 50)
    smallest, found = smallest_by_replay(trace), smallest_by_running(lambda size: run(row, size), trace)
    below = smallest - ROUND_LARGE
    refused, said = replayed(trace, below).oom, run(row, below)
    return {
        "id": row["id"],
        "model": row["config"]["model"],
        "process_bytes": whole.process_peak,
        "capacity_bytes": CARD.memory_bytes,
        "runs_on_the_card": run(row, CARD.memory_bytes) == ""
        and replayed(trace, CARD.memory_bytes).oom is None,
        "smallest_by_replay_bytes": smallest,
        "smallest_by_running_bytes": found,
        "refused_at_event": refused.position if refused is not None else None,
        "same_refusal": refused is not None and said.startswith(str(refused)),
        "refusal": said,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every row runs on the card and both ways agree."""
    from benchmarks.workloads import libraries
    from memlab.published import measurements

    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", metavar="ID", help="only these rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        libraries()
    except ImportError as error:
        print(f"{error}: install the extra: pip install 'memlab[benchmarks]'", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    rows = []
    for row in measurements():
        config = row.get("config")
        if not isinstance(config, dict) or config.get("quant") != "none" or "FitCheck" not in row["source"]:
            continue
        if options.rows and str(row["id"]) not in options.rows:
            continue
        found = judge(row)
        rows.append(found)
        sizes = [format_bytes(found[f"{key}_bytes"]) for key in ("process", "smallest_by_replay")]
        agree = found["smallest_by_replay_bytes"] == found["smallest_by_running_bytes"]
        print(
            f"row {found['id']:>4}  {found['model']:<40} runs on a T4: {found['runs_on_the_card']}"
            f"  needs {sizes[0]}, at least {sizes[1]}; both ways agree: {agree and found['same_refusal']}",
            flush=True,
        )
    if options.json:
        unfinished = options.json.with_name(options.json.name + ".part")
        unfinished.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")
        unfinished.replace(options.json)
    equal = "smallest_by_replay_bytes", "smallest_by_running_bytes"
    good = all(r["runs_on_the_card"] and r["same_refusal"] and r[equal[0]] == r[equal[1]] for r in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
