"""Other memory estimators and ours against memory measured on real GPUs: whose error is what.

    python -m benchmarks.peers [--python PATH] [--limit N] [--json OUT]

The workloads are the published training runs with a complete configuration (RTX A6000 and Tesla T4) for
which `benchmarks.accuracy` has a prediction in benchmarks/results/accuracy.json. Each peer is asked for what
it claims: vramcalc, accelerate, DeepSpeed and torchinfo for allocated bytes, FitCheck for those of the whole
process where that was measured (elsewhere its total without its own overhead for the card). Error =
(predicted - measured) / measured. Where a peer has no answer the reason stands there.

FitCheck and vramcalc fitted constants to runs that are among these; accelerate, DeepSpeed and torchinfo leave
activations, respectively optimizer states, out by design.

The peers live in an environment of their own: without --python one is made in .venv-peers, from the package
index, with the versions of PINS.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy import CONFIGS, SkipError, bytes_of, config_of
from memlab import published
from memlab.units import format_bytes

HERE = Path(__file__).resolve().parent
#: What was asked; other versions answer otherwise.
PINS = (
    "torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "deepspeed==0.19.8", "torchinfo==1.8.0",
    "vramcalc==0.1.2", "fitcheck-llm==0.3.1",
)  # fmt: skip
PEERS = ("memlab", "vramcalc", "fitcheck", "accelerate", "deepspeed", "torchinfo")
TYPES = {"LlamaConfig": "llama", "Qwen2Config": "qwen2", "MistralConfig": "mistral"}


def workloads() -> list[dict[str, Any]]:
    """The published training runs as plain data for `peer_answers`, with what was measured, in bytes."""
    found = []
    for row in published.measurements():
        try:
            work = _workload(row)
        except SkipError:
            continue
        if work is not None:
            found.append(work)
    return found


def _workload(row: dict[str, Any]) -> dict[str, Any] | None:
    config = row["config"]
    if row["config_complete"] is not True:
        return None
    if "FitCheck" in row["source"]:
        if not config.get("arch") or config["quant"] not in ("none", "nf4"):
            return None
        shape = config_of(config["arch"], config["model"])
        measured = {"allocated": bytes_of(row["value"], row["unit"])}
        if row.get("process_mib"):
            measured["process"] = bytes_of(row["process_mib"], "MiB")
        work = {
            "card": "t4", "group": "T4, nf4 LoRA" if config["quant"] == "nf4" else "T4, fp16 LoRA",
            "batch": config["batch"], "sequence": config["seq"],
            "dtype": "fp16", "amp": False,  # the frozen base itself is fp16
            "lora": config["lora_rank"], "targets": config["lora_targets"], "quant": config["quant"],
            "checkpointing": config["grad_checkpoint"], "attention": config["attn_impl"],
        }  # fmt: skip
    elif "vramcalc" in row["source"]:
        words = config["setting"].split()
        if config["model"] not in CONFIGS or config["mode"] != "train" or "flash" in words:
            return None
        shape = dict(CONFIGS[config["model"]])
        measured = {"allocated": bytes_of(row["value"], row["unit"])}
        numbers = dict(word.split("=") for word in words if "=" in word)
        lora = next((int(word.removeprefix("lora")) for word in words if word.startswith("lora")), None)
        work = {
            "card": "a6000", "group": "A6000, LoRA" if lora else "A6000, full training",
            "batch": int(numbers["b"]), "sequence": int(numbers["s"]), "dtype": "bf16", "amp": "amp" in words,
            "lora": lora, "targets": None, "quant": "none",
            "checkpointing": "ckpt" in words, "attention": "eager" if "eager" in words else "sdpa",
        }  # fmt: skip
    else:
        return None
    kind = shape.pop("class")
    name = config["model"].rpartition("/")[2]
    about = f"{name} b{work['batch']} s{work['sequence']} {work['attention']}"
    return {
        **work, "id": row["id"], "model": name, "about": about, "type": TYPES[kind], "config": shape,
        "measured": measured, "quantity": "process" if "process" in measured else "allocated",
    }  # fmt: skip


def ask(python: Path, works: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The peers' answers, from their own interpreter."""
    done = subprocess.run(
        [str(python), str(HERE / "peer_answers.py")],
        input=json.dumps(works), stdout=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the peers' interpreter {python} stopped with exit code {done.returncode}")
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def environment() -> Path:
    """The interpreter of .venv-peers, made at the first call."""
    folder = HERE.parent / ".venv-peers"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"peers: making {folder} (once)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PINS], check=True)
        (folder / "made").touch()
    return python


def compare(
    works: Sequence[dict[str, Any]], found: dict[str, Any], ours: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row for each workload: measured bytes, and by peer its quantity, prediction and error."""
    predicted = {(row["id"], row["quantity"]): row["predicted_bytes"] for row in ours["rows"]}
    rows = []
    for work, answers in zip(works, found["answers"], strict=True):
        peers: dict[str, Any] = {}
        for name, answer in {"memlab": predicted.get((work["id"], "allocated")), **answers}.items():
            quantity = work["quantity"] if name == "fitcheck" else "allocated"
            if isinstance(answer, int):
                measured = work["measured"][quantity]
                peers[name] = {
                    "quantity": quantity,
                    "predicted_bytes": answer,
                    "error": (answer - measured) / measured,
                }
            else:
                peers[name] = {"quantity": quantity, "why_not": answer or "no prediction stored"}
        rows.append(
            {"id": work["id"], "group": work["group"], "about": work["about"], "measured": work["measured"],
             "peers": peers}
        )  # fmt: skip
    return rows


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Median |error| and worst error by group and peer, then every row."""
    lines = [f"{'':<24}{'runs':>5}  " + "".join(f"{name:>14}" for name in PEERS)]
    for group in dict.fromkeys(row["group"] for row in rows):
        of = [row for row in rows if row["group"] == group]
        errors = {
            name: [row["peers"][name]["error"] for row in of if "error" in row["peers"][name]]
            for name in PEERS
        }
        for title, pick in (("median |error|", _median), ("worst error", _worst)):
            head = f"{group if pick is _median else '':<24}{len(of) if pick is _median else '':>5}  "
            lines.append(head + "".join(f"{pick(errors[name]):>14}" for name in PEERS) + f"  {title}")
    lines += ["", f"{'id':>4} {'measured':>11}  {'':<46}" + "".join(f"{name:>12}" for name in PEERS)]
    for row in rows:
        cells = (row["peers"][name].get("error") for name in PEERS)
        lines.append(
            f"{row['id']:>4} {format_bytes(row['measured']['allocated']):>11}  {row['about']:<46.46}"
            + "".join(f"{'-' if error is None else f'{error:+.2%}':>12}" for error in cells)
        )
    return "\n".join(lines)


def _median(errors: Sequence[float]) -> str:
    return f"{statistics.median(map(abs, errors)):.2%}" if errors else "no answer"


def _worst(errors: Sequence[float]) -> str:
    return f"{max(errors, key=abs):+.2%}" if errors else ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="an interpreter that has the peers")
    parser.add_argument("--limit", type=int, help="only the first N workloads of each group")
    parser.add_argument("--accuracy", type=Path, default=HERE / "results" / "accuracy.json")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    works = workloads()
    if options.limit is not None:
        groups: dict[str, list[dict[str, Any]]] = {}
        for work in works:
            groups.setdefault(work["group"], []).append(work)
        works = [work for group in groups.values() for work in group[: options.limit]]
    found = ask(options.python or environment(), works)
    rows = compare(works, found, json.loads(options.accuracy.read_text("utf-8")))
    print(render(rows))
    print("\n" + ", ".join(f"{name} {number}" for name, number in found["versions"].items()))
    if options.json:
        part = options.json.with_name(options.json.name + ".part")
        part.write_text(json.dumps({"versions": found["versions"], "rows": rows}, indent=1) + "\n", "utf-8")
        part.replace(options.json)


if __name__ == "__main__":
    main()
