"""Does the planner's closed form judge as a trace on a virtual card does? No card, no cluster.

    python -m benchmarks.planner [--json benchmarks/results/planner.json] [--only NAME]

For each pair of model and cards: the verdict on the plain script by formula and by trace; the recommended
recipe, which must run on the card; and the next cheaper one, which must not. The formula's error at each
traced recipe is the planner's FORMULA_RESIDUAL. LLaMA-2-70B on eight cards starts from the recipe that is
often printed for it: bf16 with fp32 masters, checkpointing, SDPA, ZeRO-3, one sequence at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab import models
from memlab.planner import Plan, plan
from memlab.recipe import Recipe
from memlab.units import format_gb


@dataclass(frozen=True)
class Pair:
    """`start`: fields of the recipe to begin with; none for the plain script."""

    model: str
    gpu: str
    count: int
    effective_batch: int
    start: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}, {self.count:,} x {self.gpu}"


_PRINTED = (
    ("precision", "bf16-master"), ("zero_stage", 3), ("checkpointing", "full"),
    ("micro_batch", 1),
)  # fmt: skip

PAIRS = (
    Pair("gpt2-xl", "T4", 1, 8),
    Pair("gpt2-xl", "RTX-3090", 4, 64),
    Pair("bert-large", "T4", 1, 32),
    Pair("bert-large", "A100-80GB", 8, 4096),
    Pair("resnet152", "T4", 1, 256),
    Pair("resnet152", "RTX-3090", 8, 1024),
    Pair("llama2-7b", "RTX-3090", 8, 64),
    Pair("llama2-7b", "H100-80GB", 1, 32),
    Pair("llama2-13b", "A100-80GB", 8, 256),
    Pair("llama2-70b", "A100-80GB", 8, 1024, _PRINTED),
    Pair("llama2-70b", "H100-80GB", 64, 1024),
    Pair("gpt3-175b", "A100-80GB", 1024, 2048),
)


def traced(found: Plan, recipe: Recipe) -> int | None:
    """The peak that a trace on the plan's virtual card gives; None where its memory ends."""
    import torch

    from memlab.report import trace_step

    recipe = recipe.replace(accumulation=min(recipe.accumulation, 2))  # the third is like the second
    try:
        return trace_step(models.model(found.model), recipe, gpu=found.gpu, limit=found.limit).peak_bytes
    except torch.OutOfMemoryError:
        return None


def judge(pair: Pair) -> dict[str, Any]:
    """One pair: plan, traces, and whether they agree."""
    start = None
    if pair.start:
        start = Recipe(world_size=pair.count, **dict(pair.start))
    begun = time.process_time()
    found = plan(pair.model, pair.gpu, pair.count, effective_batch=pair.effective_batch, start=start)
    planned = time.process_time() - begun
    plain = traced(found, found.start)
    sure = found.confirm(lambda recipe: traced(found, recipe))
    before = sure.tried[:-1]
    return {
        "pair": pair.name,
        "effective_batch": pair.effective_batch,
        "searched": found.searched,
        "plan_seconds": planned,
        "bound": found.bound,
        "start_fits_by_formula": found.fits,
        "start_runs_by_trace": plain is not None,
        "start_formula_bytes": found.start_peak,
        "arithmetic": found.arithmetic,
        "best": sure.best.to_dict() if sure.best else None,
        "best_traced_bytes": sure.tried[-1][1] if sure.tried else None,
        "tried": sure.to_dict()["tried"],
        "cheaper_fails": bool(before) and all(peak is None for _, peak in before),
        "nothing_cheaper": found.next_cheaper is None and not found.tight,
        "ways": [c.to_dict() for c in (*found.candidates, *found.alternatives)],
    }


def agrees(row: dict[str, Any]) -> bool:
    """The verdict is the trace's, the recommended recipe runs, and nothing cheaper does."""
    return (
        row["start_fits_by_formula"] == row["start_runs_by_trace"]
        and row["best_traced_bytes"] is not None
        and (row["cheaper_fails"] or row["nothing_cheaper"])
    )


def line(row: dict[str, Any]) -> str:
    best = row["best"]
    if best is None:
        return f"{row['pair']:<30} nothing runs"
    error = best["peak_bytes"] / row["best_traced_bytes"] - 1
    cheaper = (
        "none cheaper" if row["nothing_cheaper"] else f"cheaper {'fails' if row['cheaper_fails'] else 'RUNS'}"
    )
    return (
        f"{row['pair']:<30} start {'fits' if row['start_fits_by_formula'] else 'no':<5} "
        f"best {format_gb(best['peak_bytes']):>9} traced {format_gb(row['best_traced_bytes']):>9} "
        f"{error:+.2%}  "
        f"{cheaper}, {len(row['tried'])} traced, {row['searched']:,} recipes in {row['plan_seconds']:.1f} s  "
        f"{'agrees' if agrees(row) else 'DIFFERS'}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--only", metavar="NAME", default="", help="only pairs whose name holds NAME")
    options = parser.parse_args(words)
    warnings.simplefilter("ignore")
    rows = []
    for pair in PAIRS:
        if options.only in pair.name:
            rows.append(judge(pair))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(map(agrees, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
