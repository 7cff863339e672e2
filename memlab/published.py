"""What others published: the source article's claims with verdicts, and memory measured on real GPUs.

Both files keep their own note on where they come from (`about` and `note`). Standard library only.
"""

from __future__ import annotations

import html
import json
import textwrap
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Verdicts:
    """Rows of the source article: shows itself as a table in a notebook, prints as text elsewhere."""

    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        lines: list[str] = []
        for row in self.rows:
            lines += textwrap.wrap(f"The article: “{row['claim']}”", 100)
            text = f"{_capital(row['verdict'])}. {row['right_statement']}"
            lines += [*textwrap.wrap(text, 100, initial_indent="   ", subsequent_indent="   "), ""]
        return "\n".join(lines).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        left = "style='text-align:left;vertical-align:top'"
        body = "".join(
            f"<tr title='{html.escape(row['id'])}'><td {left}>{html.escape(row['claim'])}</td>"
            f"<td {left}><strong>{html.escape(row['verdict'])}</strong></td>"
            f"<td {left}>{html.escape(row['right_statement'])}</td></tr>"
            for row in self.rows
        )
        heads = "".join(
            f"<th scope='col' {left}>{h}</th>" for h in ("the article says", "verdict", "what holds")
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def verdicts(*names: str) -> Verdicts:
    """Rows of the source article: what it says, the verdict, and what holds instead.

    Their ids stay out of sight (a hover in the notebook). Raises UnknownNameError for a row that isn't there.
    """
    return Verdicts(tuple(claim(name) for name in names))
