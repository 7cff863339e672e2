"""The witness of the sharded steps: the same steps in as many processes as there are ranks, on gloo.

    python -m tests.memlab.gloo RANK WORLD_SIZE PORT CASES OUT

CASES is a JSON list of [model, recipe's fields]. Real tensors, a real meter. Each rank writes the trace of
the last of three steps of case i to OUT.i.RANK and its losses, as a JSON list, to its standard output.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from memlab.models import model
from memlab.trace import Trace

TIMEOUT = 120  # seconds

#: Small enough for two cores, uneven where that matters: rows that 4 doesn't divide, three blocks.
_SIZE: dict[str, Any] = {
    "layers": 3, "hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "vocab": 210, "context": 32,
}  # fmt: skip
TINY: dict[str, Any] = {
    "gpt": replace(model("gpt2"), name="tiny-gpt", ffn=192, **_SIZE),
    "llama": replace(model("llama2-7b"), name="tiny-llama", ffn=64, **_SIZE),
}


def run(rank: int, world: int, port: int, cases: list[tuple[str, dict[str, Any]]], out: str) -> list[float]:
    """One rank: runs all cases, writes their traces, returns their last losses."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    losses = []
    try:
        for i, (name, recipe) in enumerate(cases):
            trace, loss = measured(name, recipe, world)
            trace.save(f"{out}.{i}.{rank}")
            losses.append(loss)
    finally:
        dist.destroy_process_group()
    return losses


def measured(name: str, recipe: dict[str, Any], world: int) -> tuple[Trace, float]:
    """The trace of the third step on this rank, and its loss."""
    import torch
    import torch.distributed as dist

    from memlab.meter import GRADIENTS, Meter
    from memlab.recipe import Recipe
    from memlab.sharded import sharded_workload

    class PatientMeter(Meter):  # type: ignore[no-untyped-call]
        """gloo's threads hold a tensor for a moment after its collective is done: give them that moment."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
                time.sleep(0.002)
            return out

    work = sharded_workload(TINY[name], Recipe(**recipe))
    step: Any = work.model
    buckets: dict[int, torch.Tensor] = {}
    if hasattr(step, "register_comm_hook"):
        # Buckets are made in C++: the hook of the all-reduce shows them.
        def average(state: Any, bucket):  # type: ignore[no-untyped-def]
            flat = buckets[bucket.index()] = bucket.buffer()
            flat.div_(world)
            sent = dist.all_reduce(flat, async_op=True).get_future()
            return sent.then(lambda future: future.value()[0])

        step.register_comm_hook(None, average)
    for _ in range(2):
        work.step()
    with PatientMeter(work.model, work.optimizer, device="cpu") as meter:
        for bucket in buckets.values():
            meter._own(bucket, GRADIENTS)
        loss = float(work.step())
    return meter.trace.last_step(), loss


def on_gloo(
    folder: Path, world: int, cases: list[tuple[str, dict[str, Any]]]
) -> list[tuple[list[Trace], list[float]]]:
    """Traces and losses of all ranks, case by case. RuntimeError: what a failed rank said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "trace"
    common = [str(world), str(port), json.dumps(cases), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.memlab.gloo", str(rank), *common],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=TIMEOUT)[0] for process in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    for rank, (process, text) in enumerate(zip(ranks, said, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} of {world} failed:\n{text}")
    losses = [json.loads(text.splitlines()[-1]) for text in said]
    return [
        ([Trace.load(f"{out}.{i}.{rank}") for rank in range(world)], [each[i] for each in losses])
        for i in range(len(cases))
    ]


def main() -> None:
    rank, world, port, cases, out = sys.argv[1:]
    print(json.dumps(run(int(rank), int(world), int(port), json.loads(cases), out)))


if __name__ == "__main__":
    main()
