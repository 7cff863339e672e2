"""Training a 70B model on eight cards: what one rank needs, and which of nine ways fit. No card, no cluster.

    python -m benchmarks.sharded [--model llama2-70b] [--gpu A100-80GB] [--quick] [--json OUT]

Three parts: the step in pure bf16 in its variants, with what is alive at the peak; the nine ways of chapter 6
under the card's rules and capacity; the time and resident memory of a trace on 8 and on 1024 ranks, as in
`benchmarks.speed`. `--quick` leaves the times out.

Every way: one sequence of 4096 tokens per rank and step, activation checkpointing of each block, SDPA.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.speed import measured
from memlab import hardware, models
from memlab.allocator import replay
from memlab.hardware import GPU
from memlab.models import TransformerConfig
from memlab.recipe import Recipe
from memlab.trace import Trace
from memlab.units import GB, GIB, MB, format_bytes, format_gb

#: What a CUDA context takes, in bytes: the least and the most that is published; the A100's own isn't.
CONTEXT = (140 * MB, 2 * GB)
COMMON: dict[str, Any] = {
    "micro_batch": 1,
    "sequence": 4096,
    "checkpointing": "full",
    "optimizer_impl": "fused",
}
EIGHT: dict[str, Any] = {**COMMON, "world_size": 8, "zero_stage": 3}


@dataclass(frozen=True)
class Way:
    """One way to train on these cards. `per_parameter`: bytes of parameters, gradients and states."""

    name: str
    per_parameter: str
    recipe: dict[str, Any]
    sharding: dict[str, Any] = field(default_factory=dict)


def add_lora(net: Any, rank: int = 16) -> None:
    """Freeze the model; every linear layer of its blocks gets an adapter of `rank` (arXiv:2106.09685)."""
    from torch import Tensor, nn

    class Adapted(nn.Module):
        """W x + B A x with W frozen."""

        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
            self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.base(x)
            y = y + self.up(self.down(x))
            return y

    net.requires_grad_(False)
    for block in net.blocks:
        for parent in list(block.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(parent, name, Adapted(module))


WAYS = (
    Way("fp32 master weights, AdamW", "16", {**EIGHT, "precision": "bf16-master"}),
    Way("the same, bf16 shards and fp32 gradients (DeepSpeed)", "18", {**EIGHT, "precision": "bf16"},
        {"fp32_gradients": True}),
    Way("fp32 master weights, 8-bit AdamW", "10",
        {**EIGHT, "precision": "bf16-master", "optimizer": "adamw-8bit", "optimizer_impl": "for-loop"}),
    Way("pure bf16, AdamW (fused)", "8", {**EIGHT, "precision": "bf16"}),
    Way("pure bf16, AdamW (foreach)", "8 + 2 in the step",
        {**EIGHT, "precision": "bf16", "optimizer_impl": "foreach"}),
    Way("pure bf16, 8-bit AdamW", "6",
        {**EIGHT, "precision": "bf16", "optimizer": "adamw-8bit", "optimizer_impl": "for-loop"}),
    Way("bf16, AdamW and master weights in host memory", "4 + 12 on the host",
        {**EIGHT, "precision": "bf16", "offload": ("optimizer_states:cpu",)}),
    Way("LoRA of rank 16 on a frozen bf16 model", "2", {**EIGHT, "precision": "bf16"}, {"prepare": add_lora}),
    Way("fp32 master weights, AdamW, 16 cards", "16",
        {**EIGHT, "precision": "bf16-master", "world_size": 16}),
    Way("tensor parallel over 8, fp32 master weights", "16 + 4 in the step",
        {**COMMON, "precision": "bf16-master", "world_size": 8, "tensor_parallel": 8}),
)  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "for-loop AdamW": {"optimizer_impl": "for-loop"},
    "fused AdamW": {},
    "foreach AdamW": {"optimizer_impl": "foreach"},
    "no checkpointing": {"checkpointing": "none"},
    "selective checkpointing": {"checkpointing": "selective"},
    "weights kept from forward to backward (zero_stage 2)": {"zero_stage": 2},
    "1024 ranks": {"world_size": 1024},
}


def _fits(trace: Trace, card: GPU) -> str:
    """'yes', 'no', or 'just': it depends on the size of the CUDA context."""
    works = [
        replay(trace.events, trace.sizes, capacity=card.memory_bytes, context=size).oom is None
        for size in CONTEXT
    ]
    return "yes" if works[1] else "just" if works[0] else "no"


def judge(way: Way, model: TransformerConfig, card: GPU) -> dict[str, Any]:
    """What a rank of `way` needs at its peak under the card's rules, and whether the card has it."""
    from memlab.sharded import Sharding, trace_sharded

    # The limit is beyond everything: the need is asked for, the verdict comes from the allocator's replay.
    recipe = Recipe(**{**way.recipe, "sequence": min(way.recipe["sequence"], model.context)})
    trace = trace_sharded(model, recipe, sharding=Sharding(**way.sharding), gpu=card, limit=2**62)
    reserved = replay(trace.events, trace.sizes).peak_reserved
    return {
        "way": way.name,
        "bytes_per_parameter": way.per_parameter,
        "world_size": way.recipe["world_size"],
        "peak_bytes": trace.peak_bytes,
        "peak_phase": trace.peak_phase,
        "reserved_bytes": reserved,
        "consumers_at_peak": trace.consumers_at_peak(),
        "host_bytes": trace.info.get("host", {}).get("peak_bytes", 0),
        "fits": _fits(trace, card),
    }


def variants(model: TransformerConfig) -> list[dict[str, Any]]:
    """The pure bf16 step, CPU rules, no rounding: tensors only."""
    from memlab.sharded import trace_sharded

    rows = []
    for name, changes in VARIANTS.items():
        fields = {**EIGHT, "precision": "bf16", **changes, "sequence": min(4096, model.context)}
        trace = trace_sharded(model, Recipe(**fields))
        rows.append({"variant": name, "peak_bytes": trace.peak_bytes, "peak_phase": trace.peak_phase,
                     "consumers_at_peak": trace.consumers_at_peak(), "live": live(trace)})  # fmt: skip
    return rows


def live(trace: Trace, shown: int = 20) -> list[dict[str, Any]]:
    """The largest groups of equal blocks alive at the peak."""
    groups: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for block in trace.at_peak():
        where = ".".join("*" if part.isdigit() else part for part in block.module.split("."))
        groups[block.consumer, f"{where} {block.operator}".strip(), block.shape, block.bytes] += 1
    largest = sorted(groups.items(), key=lambda item: -item[0][3] * item[1])[:shown]
    return [
        {"consumer": c, "what": w, "shape": list(s), "blocks": n, "bytes": n * b}
        for (c, w, s, b), n in largest
    ]


def refusal(model: TransformerConfig, card: GPU) -> str:
    """What the card says to the first way."""
    import torch

    from memlab.sharded import trace_sharded

    fields = {**WAYS[0].recipe, "sequence": min(4096, model.context)}
    try:
        trace_sharded(model, Recipe(**fields), gpu=card)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank's memory in nine ways to train a large model.")
    parser.add_argument("--model", default="llama2-70b")
    parser.add_argument("--gpu", default="A100-80GB")
    parser.add_argument("--quick", action="store_true", help="leave the times out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    model, card = models.model(options.model), hardware.gpu(options.gpu)
    if not isinstance(model, TransformerConfig):
        parser.error(f"{model.name} isn't a transformer")
    say = partial(print, flush=True)
    say(f"{model.name}, {model.parameter_count:,} parameters, per rank")
    say("\npure bf16 on 8 ranks, fully_shard, checkpointing, 1 x 4096 tokens: live tensors, no rounding")
    rows = variants(model)
    for row in rows:
        say(f"  {row['variant']:<54}{row['peak_bytes'] / GIB:>9.3f} GiB  in {row['peak_phase']}")
    say(f"\nalive at the peak of the first ({rows[0]['variant']})")
    for item in rows[0]["live"]:
        each = format_bytes(item["bytes"] // item["blocks"])
        say(f"  {item['blocks']:>5} x {each:>11}  {item['consumer']:<17} {item['what']}")
    say(
        f"\nthe ways, by {card.name}'s rules and its {format_gb(card.memory_bytes)}; 'just' depends on the"
        f" CUDA context, {format_gb(CONTEXT[0])} to {format_gb(CONTEXT[1])}; no NCCL buffers"
    )
    say(f"  {'':<54}{'B/param':>20}{'cards':>7}{'peak':>12}{'reserved':>12}{'host':>12}  fits")
    ways = []
    for way in WAYS:
        row = judge(way, model, card)
        ways.append(row)
        host = format_gb(row["host_bytes"]) if row["host_bytes"] else "-"
        sizes = f"{format_gb(row['peak_bytes']):>12}{format_gb(row['reserved_bytes']):>12}{host:>12}"
        say(
            f"  {row['way']:<54}{row['bytes_per_parameter']:>20}{row['world_size']:>7}{sizes}"
            f"  {row['fits']} (peak in {row['peak_phase']})"
        )
    message = refusal(model, card)
    say(f"\nthe card's answer to the first way: {message or 'it fits'}")
    data: dict[str, Any] = {
        "model": model.name,
        "gpu": card.name,
        "variants": rows,
        "ways": ways,
        "refusal": message,
    }
    if not options.quick:
        say()
        for ranks in (8, 1024):
            figures = measured("on_ranks", model.name, world_size=ranks)
            data[f"{ranks}_ranks"] = figures
            say(
                f"trace on {ranks} ranks, set-up included: {figures['seconds']:.1f} s of processor time"
                f" ({figures['wall_seconds']:.1f} s), {figures['rss_mib']:.0f} MiB resident"
            )
    if options.json:
        unfinished = options.json.with_name(options.json.name + ".part")
        unfinished.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        unfinished.replace(options.json)


if __name__ == "__main__":
    main()
