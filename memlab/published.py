"""What others published: the source article's claims with verdicts, and memory measured on real GPUs.

Both files keep their own note on where they come from (`about` and `note`). Standard library only.
"""

from __future__ import annotations

import json
import textwrap
from functools import cache
from importlib import resources
from typing import Any

from memlab.units import MIB, unknown_name


@cache
def _data(name: str) -> dict[str, Any]:
    text = resources.files("memlab").joinpath("data", name).read_text("utf-8")
    return dict(json.loads(text))


def claims() -> dict[str, dict[str, Any]]:
    """Rows of the source article by id ('C1-07'): paraphrased claim, verdict, right statement, sources."""
    return {row["id"]: row for row in _data("claims.json")["claims"]}


def claim(name: str) -> dict[str, Any]:
    """One row. Raises UnknownNameError."""
    known = claims()
    if name not in known:
        raise unknown_name("claim", name, known)
    return known[name]


def measurements(text: str = "") -> list[dict[str, Any]]:
    """Published measurements whose source or configuration contains `text` (any case); all when empty.

    Each row has `source`, `url`, `config`, `value`, `unit`, `quantity` and `evidence` (how it was read);
    nothing in it was measured by this project.
    """
    rows = _data("published_measurements.json")["entries"]
    wanted = text.lower()
    return [row for row in rows if wanted in f"{row['source']} {json.dumps(row['config'])}".lower()]


def t4_runs() -> list[dict[str, Any]]:
    """The runs on a Tesla T4 that state allocated, reserved and process memory of one training step.

    Rows of FitCheck's archive (MIT): LoRA fine-tuning with gradient checkpointing. Each has `id`, `model`,
    `attention`, `base` ('fp16', or 'nf4', quantised), `batch`, `sequence`, and bytes: `allocated` (peak of
    torch.cuda.max_memory_allocated), `reserved`, `process` (reserved + context) and `context`.
    """
    runs = []
    for row in measurements("Tesla T4"):
        config = row["config"]
        if row.get("process_mib") is None:
            continue
        runs.append(
            {
                "id": row["id"],
                "model": config["model"].partition("/")[2],
                "attention": config["attn_impl"],
                "base": "fp16" if config["quant"] == "none" else config["quant"],
                "batch": config["batch"],
                "sequence": config["seq"],
                "allocated": round(row["value"] * MIB),
                "reserved": round(row["reserved_mib"] * MIB),
                "process": round(row["process_mib"] * MIB),
                "context": round(row["cuda_context_mib"] * MIB),
            }
        )
    return runs


def verdicts(*names: str, width: int = 100) -> str:
    """Rows of the source article as text: what it says, the verdict, and what holds instead.

    Raises UnknownNameError for a row that isn't there.
    """
    lines = []
    for name in names:
        row = claim(name)
        lines += textwrap.wrap(f"{name}  the article: {row['claim']}", width, subsequent_indent=" " * 7)
        text = f"{row['verdict']}: {row['right_statement']}"
        indent = " " * 7
        lines += [*textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent), ""]
    return "\n".join(lines).rstrip()
