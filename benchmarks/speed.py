"""How fast the tracer is: against torch's MemTracker, against a plain step, and on 70 billion parameters.

    python -m benchmarks.speed [--quick] [--json FILE]

Every figure is the median of several runs (one where a run takes a minute or is a median in itself), each in
a process of its own with one thread. Seconds are
processor time of that process, which on an idle machine is the time on the clock (also kept). Importing torch
isn't counted, nor, where not said otherwise, is building the model. `--quick` runs each once on small models:
to see that it runs, not to quote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.models import TransformerConfig, model
from memlab.recipe import Recipe

Figures = dict[str, float]
#: One sequence, pure bf16, fused AdamW, SDPA: the step that is traced.
STEP: dict[str, Any] = {"precision": "bf16", "optimizer_impl": "fused", "micro_batch": 1}
CARD = "A100-80GB"


class Clock:
    """Processor and wall seconds since it was made."""

    def __init__(self) -> None:
        self.processor, self.wall = time.process_time(), time.perf_counter()

    def read(self) -> Figures:
        return {
            "seconds": time.process_time() - self.processor,
            "wall_seconds": time.perf_counter() - self.wall,
        }


def resident_mib() -> float:
    """The resident high-water mark of this process, libraries included; Linux only, else 0."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# what is measured: each runs alone in a fresh process


def with_memtracker(config: TransformerConfig, **_: Any) -> Figures:
    """The first step of a fake model under torch's MemTracker."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memlab.step import workload

    with FakeTensorMode():  # type: ignore[no-untyped-call]
        work = workload(config, Recipe(**STEP))
        tracker = MemTracker()
        tracker.track_external(work.model, work.optimizer, work.inputs, work.targets)
        clock = Clock()
        with tracker:
            work.step()
        figures = clock.read()
    peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    return {**figures, "peak_bytes": peak}


def traced(config: TransformerConfig, checkpointing: str = "none", card: str | None = None) -> Figures:
    """The first step of the same model, traced, and its trace read. `card`: with that card's rules."""
    from memlab.step import workload
    from memlab.virtual import VirtualGPU

    with VirtualGPU(card, limit=None if card is None else 2**62) as gpu:
        work = workload(config, Recipe(**STEP, checkpointing=checkpointing))
        clock = Clock()
        work.step()
    peak = gpu.trace.peak_bytes
    return {**clock.read(), "peak_bytes": peak, "events": len(gpu.trace), "rss_mib": resident_mib()}


def whole_call(config: TransformerConfig, checkpointing: str = "none", card: str | None = None) -> Figures:
    """`trace_step` from beginning to end: the model built, two steps, the second one's trace."""
    from memlab.report import trace_step

    clock = Clock()
    recipe = Recipe(**STEP, checkpointing=checkpointing)
    trace = trace_step(config, recipe, gpu=card, limit=None if card is None else 2**62)
    return {**clock.read(), "peak_bytes": trace.peak_bytes, "rss_mib": resident_mib()}


def on_ranks(config: TransformerConfig, world_size: int) -> Figures:
    """One rank's step under fully_shard with checkpointing: group, model, sharding, step, trace."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    from memlab.sharded import trace_sharded

    assert torch.distributed.is_available()
    clock = Clock()
    recipe = Recipe(**STEP, checkpointing="full", zero_stage=3, world_size=world_size)
    trace = trace_sharded(config, recipe)
    return {**clock.read(), "peak_bytes": trace.peak_bytes, "rss_mib": resident_mib()}


def tracked(config: TransformerConfig, pairs: int = 5) -> Figures:
    """Real steps on the CPU in fp32, by turns plain and under a meter."""
    from memlab.meter import Meter
    from memlab.step import workload

    work = workload(config, Recipe(precision="fp32", sequence=256))
    plain: list[float] = []
    metered: list[float] = []
    for _ in range(pairs + 1):
        clock = Clock()
        work.step()
        plain.append(clock.read()["seconds"])
        clock = Clock()
        with Meter(work.model, work.optimizer):
            work.step()
        metered.append(clock.read()["seconds"])
    # the first pair makes the optimizer's states
    return {"plain_seconds": statistics.median(plain[1:]), "seconds": statistics.median(metered[1:])}


def allocator() -> Figures:
    """Replay of a long stream by the caching allocator's rules, default options."""
    from benchmarks.allocator_speed import events_per_second

    return {"events_per_second": events_per_second()}


MEASURES: dict[str, Callable[..., Figures]] = {
    f.__name__: f for f in (with_memtracker, traced, whole_call, on_ranks, tracked, allocator)
}  # fmt: skip


def measured(measure: str, name: str = "", layers: int | None = None, **options: Any) -> Figures:
    """Run one measure on a named model, cut to `layers` if given, in a fresh process with one thread."""
    request = json.dumps({"measure": measure, "model": name, "layers": layers, "options": options})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed", "--request", request],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{measure} of {name} failed: {done.stderr.strip().splitlines()[-1]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _answer(request: str) -> None:
    asked = json.loads(request)
    options = asked["options"]
    if asked["model"]:
        config = model(asked["model"])
        if asked["layers"]:
            config = replace(config, layers=asked["layers"])
        options["config"] = config
    import torch

    torch.set_num_threads(1)
    print(json.dumps(MEASURES[asked["measure"]](**options)))


# the report


def report(quick: bool = False, say: Callable[[str], None] = print) -> dict[str, Any]:
    """All figures: the issue's keys, and under "raw" every run of each measure."""
    raw: dict[str, list[Figures]] = {}

    def several(key: str, measure: str, name: str = "", runs: int = 3, **options: Any) -> Figures:
        runs = 1 if quick else runs
        layers = 2 if quick and name != "gpt2" else None
        raw[key] = [measured(measure, name, layers, **options) for _ in range(runs)]
        middle = {figure: statistics.median(run[figure] for run in raw[key]) for figure in raw[key][0]}
        say(f"{key:<34}" + ", ".join(f"{n:,.2f} {figure}" for figure, n in middle.items()))
        return middle

    data: dict[str, Any] = {}
    for layers, name in ((24, "gpt2-medium"), (80, "llama2-70b")):
        # a minute for 80 layers: once is enough to compare with seconds
        theirs = several(
            f"memtracker_{layers}_layers", "with_memtracker", name, runs=3 if layers == 24 else 1
        )
        ours = several(f"trace_{layers}_layers", "traced", name)
        data[f"trace_vs_memtracker_{layers}_layers"] = theirs["seconds"] / ours["seconds"]
        data[f"memtracker_peak_minus_trace_{layers}_layers_bytes"] = theirs["peak_bytes"] - ours["peak_bytes"]
    both = several("tracked_step", "tracked", "gpt2", runs=1)  # a median of pairs in itself
    data["tracked_vs_plain"] = both["seconds"] / both["plain_seconds"]
    for key, checkpointing in (("trace_70b", "none"), ("trace_70b_checkpointed", "full")):
        options = {"checkpointing": checkpointing, "card": CARD}
        step = several(key, "traced", "llama2-70b", **options)
        call = several(f"{key}_whole_call", "whole_call", "llama2-70b", **options)
        data[f"{key}_seconds"] = step["seconds"]
        data[f"{key}_rss_mib"] = max(step["rss_mib"], call["rss_mib"])
        data[f"{key}_whole_call_seconds"] = call["seconds"]
    for ranks in (8, 1024):
        one = several(f"trace_70b_{ranks}_ranks", "on_ranks", "llama2-70b", world_size=ranks)
        data[f"trace_70b_{ranks}_ranks_seconds"] = one["seconds"]
        data[f"trace_70b_{ranks}_ranks_rss_mib"] = one["rss_mib"]
    data["allocator_events_per_second"] = several("allocator", "allocator")["events_per_second"]
    return {**data, "quick": quick, "raw": raw}


#: What issue and README promise: key -> (bound, whether the figure must be above it).
GOALS: dict[str, tuple[float, bool]] = {
    "trace_vs_memtracker_80_layers": (8, True),
    "tracked_vs_plain": (1.2, False),
    "trace_70b_seconds": (6, False),
    "trace_70b_checkpointed_seconds": (10, False),
    "trace_70b_rss_mib": (500, False),
    "trace_70b_8_ranks_seconds": (10, False),
    "trace_70b_1024_ranks_seconds": (20, False),
    "allocator_events_per_second": (500_000, True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one run each, on small models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--request", help=argparse.SUPPRESS)  # what a child process is asked
    options = parser.parse_args(arguments)
    if options.request:
        _answer(options.request)
        return 0
    import torch

    data = report(options.quick, lambda text: print(text, flush=True))
    data |= {"torch": torch.__version__, "python": sys.version.split()[0]}
    print()
    for key, value in data.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            bound, above = GOALS.get(key, (None, False))
            goal = "" if bound is None else f"  ({'>=' if above else '<'} {bound:,})"
            print(f"{key:<50}{value:>16,.2f}{goal}")
    if options.json:
        unfinished = options.json.with_name(options.json.name + ".part")
        unfinished.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        unfinished.replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
