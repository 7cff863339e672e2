"""The witness of the sharded steps: the same step in as many processes as there are ranks, on gloo.

    python -m tests.memlab.gloo RANK WORLD_SIZE PORT MODEL RECIPE SHARDING OUT

RECIPE and SHARDING are JSON objects of fields. Real tensors, a real meter. Each rank writes the trace of its
last step to OUT.<rank> and prints its loss.
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
_SIZE = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "vocab": 210, "context": 32}
TINY = {
    "gpt": replace(model("gpt2"), name="tiny-gpt", ffn=192, **_SIZE),
    "llama": replace(model("llama2-7b"), name="tiny-llama", ffn=64, **_SIZE),
}


def run(rank: int, world: int, port: int, name: str, recipe: Any, sharding: Any) -> tuple[Trace, float]:
    """One rank: the trace of the last of three steps, and its loss."""
    import torch
    import torch.distributed as dist

    from memlab.meter import GRADIENTS
    from memlab.recipe import Recipe
    from memlab.sharded import RankMeter, Sharding, sharded_workload

    class PatientMeter(RankMeter):
        """gloo's threads hold a tensor for a moment after its collective is done: give them that moment."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
                time.sleep(0.002)
            return out

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    try:
        work = sharded_workload(TINY[name], Recipe(**recipe), sharding=Sharding(**sharding))
        buckets: dict[int, torch.Tensor] = {}
        if hasattr(work.model, "register_comm_hook"):
            # Buckets are made in C++: the hook of the all-reduce shows them.
            def average(state: Any, bucket):  # type: ignore[no-untyped-def]
                flat = buckets[bucket.index()] = bucket.buffer()
                flat.div_(world)
                sent = dist.all_reduce(flat, async_op=True).get_future()
                return sent.then(lambda future: future.value()[0])  # type: ignore[no-any-return]

            work.model.register_comm_hook(None, average)
        for _ in range(2):
            work.step()
        with PatientMeter(work.model, work.optimizer, device="cpu") as meter:
            for bucket in buckets.values():
                meter._own(bucket, GRADIENTS)
            loss = float(work.step())
        return meter.trace.last_step(), loss
    finally:
        dist.destroy_process_group()


def on_gloo(
    folder: Path, world: int, name: str, recipe: dict[str, Any], sharding: dict[str, Any] | None = None
) -> tuple[list[Trace], list[float]]:
    """Traces and losses of all ranks. Raises RuntimeError with a rank's output when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "trace"
    common = [str(world), str(port), name, json.dumps(recipe), json.dumps(sharding or {}), str(out)]
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
    losses = [float(text.split()[-1]) for text in said]
    return [Trace.load(f"{out}.{rank}") for rank in range(world)], losses


def main() -> None:
    rank, world, port, name, recipe, sharding, out = sys.argv[1:]
    trace, loss = run(int(rank), int(world), int(port), name, json.loads(recipe), json.loads(sharding))
    trace.save(f"{out}.{rank}")
    print(loss)


if __name__ == "__main__":
    main()
