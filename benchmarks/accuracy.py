"""Predictions against memory that others measured on real GPUs.

    python -m benchmarks.accuracy --measurements memlab/data/published_measurements.json [--json OUT]

Every row whose configuration is complete is traced on a virtual card with the script that its source used,
and replayed through the caching allocator. Printed: quantity, published, predicted, error = (predicted -
published) / published, or why a row was skipped; then median and worst by quantity, by attention and by
phase.

No row has a setting of its own. What a source fixes (card, library versions, attention kernel, order of the
script) stands in `benchmarks.workloads` and in `SESSIONS` below; where a source leaves something open, the
prediction has a range. Needs the extra `benchmarks` (transformers, peft).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memlab import hardware
from memlab.allocator import ORDERS, replay
from memlab.trace import Trace
from memlab.units import MIB, format_bytes

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
PHASES = ("forward", "backward", "optimizer")
#: The order of segment addresses that predictions use; the others give the range of reserved bytes.
ORDER = "split"


@dataclass(frozen=True)
class Entry:
    """One predicted quantity of one row, in bytes. low and high: where the source leaves something open."""

    id: Any
    quantity: str  # allocated | reserved | process | forward | backward | optimizer
    published: int
    predicted: int
    low: int | None = None
    high: int | None = None
    half_digit: int = 0  # half of the last published digit: closer than that is equal
    group: str = ""
    attention: str = ""
    about: str = ""
    unsaid: str = ""

    @property
    def error(self) -> float:
        return (self.predicted - self.published) / self.published

    @property
    def equal(self) -> bool:
        """To the byte, or to all digits that were published."""
        return abs(self.predicted - self.published) <= self.half_digit

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "quantity": self.quantity,
            "published_bytes": self.published,
            "predicted_bytes": self.predicted,
            "predicted_low_bytes": self.low,
            "predicted_high_bytes": self.high,
            "error": self.error,
        }


@dataclass(frozen=True)
class Skipped:
    id: Any
    why: str


class SkipError(Exception):
    """Why a row can't be predicted."""


# --- what sources fix ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """Software of a measuring session, as its archive states it, as far as bytes depend on it."""

    versions: str
    clears_cache: bool  # PEFT from 0.20 on empties the cache in prepare_model_for_kbit_training


#: FitCheck archive, data/measurements/manifest.json ("sessions"); told apart by the file in a row's url.
SESSIONS = {
    "t4-qlora-2026-09-01": Session("torch 2.10.0, transformers 5.0.0, peft 0.19.1", False),
    "t4-sweep-2026-09-15": Session("torch 2.14.0, transformers 5.17.0, peft 0.20.0", True),
    "t4-phase3-2026-09-16": Session("torch 2.10.0, transformers 5.0.0, peft 0.19.1", False),
    "final-t4-20260921": Session("torch 2.10.0, transformers 5.0.0, peft 0.19.1", False),
}
#: Where the file isn't known: PEFT as it is today.
UNKNOWN_SESSION = Session("not stated", True)

#: Models by the names that rows use: fields of their config.json on the Hugging Face hub.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "class": "LlamaConfig", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    },
    "Llama-3.2-3B": {
        "class": "LlamaConfig", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    },
    "Llama-3.1-8B": {
        "class": "LlamaConfig", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "Qwen2.5-1.5B": {
        "class": "Qwen2Config", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def config_of(arch: dict[str, Any], model: str) -> dict[str, Any]:
    """A row's own description of its model as a transformers config."""
    name = model.rpartition("/")[2].lower()
    kind = "Qwen2Config" if "qwen" in name else "MistralConfig" if "mistral" in name else "LlamaConfig"
    config = {
        "class": kind,
        "vocab_size": arch["vocab_size"],
        "hidden_size": arch["hidden_size"],
        "num_hidden_layers": arch["num_layers"],
        "num_attention_heads": arch["num_attention_heads"],
        "num_key_value_heads": arch["num_kv_heads"],
        "intermediate_size": arch["intermediate_size"],
        "tie_word_embeddings": arch["tie_word_embeddings"],
        "max_position_embeddings": 32768,
    }
    if kind != "Qwen2Config":
        config["head_dim"] = arch["head_dim"]
    if kind == "MistralConfig":
        config["sliding_window"] = None
    return config


# --- peaks of a trace ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """Bytes; `phases` may be of another step than the rest."""

    allocated: int
    reserved: int
    phases: dict[str, int]


def peaks(run: Any, order: str = ORDER) -> Peaks:
    """What torch.cuda would have reported for the measured steps of a `workloads.Run`."""
    trace: Trace = run.trace
    done = replay(
        trace.events,
        trace.sizes,
        marks=trace.marks,
        order=order,
        empty_cache=trace.info.get("empty_cache", ()),
    )
    step = [s for s in done.spans if run.headline[0] <= s.start < run.headline[1]]
    other = [s for s in done.spans if run.phases[0] <= s.start < run.phases[1]]
    return Peaks(
        max(s.allocated for s in step),
        max(s.reserved for s in step),
        {p: max((s.allocated for s in other if s.name == p), default=0) for p in PHASES},
    )


def bytes_of(value: float, unit: str) -> int:
    """A published number in bytes. Raises SkipError for a unit that isn't one."""
    word = unit.split()[0].strip("()")
    if "MiB" in unit:
        word = "MiB"
    if word not in UNITS:
        raise SkipError(f"unit {unit!r} isn't known")
    return round(value * UNITS[word])


def half_digit(value: float, unit: str) -> int:
    """Half of the last digit of a published number, in bytes: 0 where digits reach below one byte."""
    _, _, decimals = repr(float(value)).partition(".")
    return bytes_of(0.5 * 10.0 ** -len(decimals), unit) if decimals != "0" else 0


# --- sources ------------------------------------------------------------------------------------------------

_cache: dict[Any, Any] = {}


def _once(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _cache:
        _cache[key] = make()
    return _cache[key]


def _fitcheck_runs(row: dict[str, Any], limit: int = 1 << 50) -> list[Any]:
    """The runs of a FitCheck row: one, or for nf4 one for each order of loading, the predicted one first.

    limit: the card's bytes, heeded by fp16 rows.
    """
    from benchmarks import workloads as w

    config = row["config"]
    if config["optimizer"] != "adamw" or config["compute"] != "fp16":
        raise SkipError(f"{config['optimizer']} in {config['compute']}: its script isn't modelled")
    if config["quant"] not in ("none", "nf4"):
        raise SkipError(f"base weights in {config['quant']} aren't modelled")
    if config["attn_impl"] not in ("eager", "sdpa"):
        raise SkipError(f"attention {config['attn_impl']!r} isn't modelled")
    if not config.get("arch"):
        raise SkipError("the model's shape isn't in the row")
    sdpa = config["attn_impl"] == "sdpa"
    inputs = w.Inputs(
        card="T4", batch=config["batch"], sequence=config["seq"],
        base="fp16" if config["quant"] == "none" else "nf4", attention=config["attn_impl"],
        kernels=("efficient",) if sdpa else (), expanded=sdpa, checkpointing=config["grad_checkpoint"],
        lora=config["lora_rank"], targets=tuple(config["lora_targets"]),
        limit=limit,
    )  # fmt: skip
    model = config_of(config["arch"], config["model"])
    session = next((s for name, s in SESSIONS.items() if name in row["url"]), UNKNOWN_SESSION)
    if inputs.base == "fp16":
        return [w.fitcheck(model, inputs)]
    return w.fitcheck_nf4(model, inputs, w.Loading(cleared=session.clears_cache))


def fitcheck_rows(row: dict[str, Any]) -> Iterator[Entry]:
    """FitCheck's archive of a Tesla T4: LoRA on fp16 or nf4, allocated, reserved, process and phases."""
    config = row["config"]
    found, variants = _once(
        json.dumps([config, row["url"].partition("#")[0]]), lambda: _with_variants(_fitcheck_runs(row))
    )
    context = hardware.gpu("T4").context_bytes or 0
    quantised = config["quant"] != "none"
    about = {
        "group": "T4, nf4 LoRA" if quantised else "T4, fp16 LoRA",
        "attention": config["attn_impl"],
        "about": f"{config['model'].rpartition('/')[2]} b{config['batch']} s{config['seq']}",
        "unsaid": "in which order the loader's threads copy tensors" if quantised else "",
    }

    def entry(quantity: str, value: float, unit: str, of: Callable[[Peaks], int]) -> Entry:
        others = [of(v) for v in variants]
        half = half_digit(value, unit)
        return Entry(
            row["id"], quantity, bytes_of(value, unit), of(found), min(others), max(others), half, **about
        )

    yield entry("allocated", row["value"], row["unit"], lambda p: p.allocated)
    if row.get("reserved_mib"):
        yield entry("reserved", row["reserved_mib"], "MiB", lambda p: p.reserved)
    if row.get("process_mib"):
        yield entry("process", row["process_mib"], "MiB", lambda p: p.reserved + context)
    for phase, value in (row.get("phase_peaks_mib") or {}).items():
        if value is not None:
            yield entry(phase, value, "MiB", partial(_phase, phase))


def _phase(phase: str, found: Peaks) -> int:
    return found.phases[phase]


def _with_variants(runs: list[Any]) -> tuple[Peaks, list[Peaks]]:
    """The prediction, and what else the source leaves possible: orders of addresses, orders of loading."""
    found = peaks(runs[0])
    if len(runs) > 1:
        return found, [found, *map(peaks, runs[1:])]
    return found, [peaks(runs[0], order) for order in ORDERS]


def _vramcalc_run(row: dict[str, Any]) -> tuple[Any, str]:
    from benchmarks import workloads as w

    config = row["config"]
    if config["model"] not in CONFIGS:
        raise SkipError(f"the shape of {config['model']} isn't in the row and isn't known here")
    words = config["setting"].split()
    numbers = dict(word.split("=") for word in words if "=" in word)
    lora = next((int(word.removeprefix("lora")) for word in words if re.fullmatch(r"lora\d+", word)), None)
    attention = "eager" if "eager" in words else "sdpa"
    if "flash" in words:
        raise SkipError("the flash-attn package isn't modelled")
    inputs = w.Inputs(
        card="RTX-A6000", batch=int(numbers["b"]), sequence=int(numbers["s"]), base="bf16",
        attention=attention, kernels=("efficient", "flash") if attention == "sdpa" else (), masks="always",
        amp="bf16" if "amp" in words else None, checkpointing="ckpt" in words, lora=lora,
        training=config["mode"] == "train",
    )  # fmt: skip
    kind = "inference" if not inputs.training else "LoRA" if lora else "training"
    return w.vramcalc(CONFIGS[config["model"]], inputs), kind


def vramcalc_rows(row: dict[str, Any]) -> Iterator[Entry]:
    """vramcalc's validation table, RTX A6000: full training, LoRA and inference, allocated."""
    config = row["config"]
    run, kind = _vramcalc_run(row)
    yield Entry(
        row["id"], "allocated", bytes_of(row["value"], row["unit"]), peaks(run).allocated,
        half_digit=half_digit(row["value"], row["unit"]), group=f"A6000, {kind}",
        attention="eager" if "eager" in config["setting"] else "sdpa",
        about=f"{config['model']} {config['setting']}",
    )  # fmt: skip


def traced(row: dict[str, Any], limit: int = 1 << 50) -> Any:
    """The run that a row's prediction is read from. limit: the card's bytes (FitCheck's fp16 rows)."""
    return _fitcheck_runs(row, limit)[0] if "FitCheck" in row["source"] else _vramcalc_run(row)[0]


def torchinfo_rows(row: dict[str, Any]) -> Iterator[Entry]:
    """torchinfo issue 144: one Linear(1024, 1024) applied once or 100 times, allocated after the forward."""
    from benchmarks import workloads as w

    times = 1 if "once" in row["config"]["code"] else 100
    found = w.repeated_linear(times)
    yield Entry(
        row["id"], "allocated", bytes_of(row["value"], row["unit"]), found,
        half_digit=half_digit(row["value"], row["unit"]), group="other", about=f"Linear applied {times}x",
        unsaid="torch version and card; of the two rows one holds 8.0078 MiB of workspace, the other none",
    )  # fmt: skip


def bert_rows(row: dict[str, Any]) -> Iterator[Entry]:
    """Hugging Face's performance guide of January 2022: BERT-large on a V100, what NVML shows."""
    from benchmarks import workloads as w

    setting = row["config"]["setting"]
    batch, steps = (re.search(pattern, setting) for pattern in (r"b=(\d+)", r"ga(\d+)"))
    if batch is None:
        raise SkipError("it is the CUDA context itself, which predictions take as given")
    if "8-bit" in setting:
        raise SkipError("bitsandbytes' 8-bit Adam isn't modelled as a script")
    run = w.bert_trainer(
        int(batch[1]), int(steps[1]) if steps else 1, "ckpt" in setting or "checkpointing" in setting,
        "fp16" in setting, "Adafactor" in setting,
    )  # fmt: skip
    card = hardware.gpu("V100-16GB")
    reserved = [peaks(run, order).reserved + (card.context_bytes or 0) for order in ORDERS]
    yield Entry(
        row["id"], "process", bytes_of(row["value"], "MiB"), reserved[list(ORDERS).index(ORDER)],
        min(reserved), max(reserved), half_digit=MIB // 2, group="V100, BERT-large", attention="eager",
        about=setting, unsaid="versions of torch and transformers; what the Trainer keeps beside the step",
    )  # fmt: skip


def torchtune_rows(row: dict[str, Any]) -> Iterator[Entry]:
    """torchtune PR 389: full bf16 Llama-2-7B, AdamW one parameter at a time; the peak is in the optimizer."""
    from memlab.recipe import Recipe
    from memlab.report import trace_step

    recipe = Recipe(precision="bf16", optimizer_impl="for-loop", sequence=512, checkpointing="full")
    found = trace_step("llama2-7b", recipe, gpu="A100-80GB", limit=1 << 50)
    yield Entry(
        row["id"], "allocated", bytes_of(row["value"], row["unit"]), found.peak_bytes,
        half_digit=bytes_of(0.5, row["unit"]), group="other", about="Llama-2-7B bf16 full",
        unsaid="sequence length and checkpointing (512 and full are taken; the optimizer's peak has neither)",
    )  # fmt: skip


SOURCES: tuple[tuple[str, Callable[[dict[str, Any]], Iterator[Entry]]], ...] = (
    ("FitCheck", fitcheck_rows),
    ("vramcalc", vramcalc_rows),
    ("torchinfo issue", torchinfo_rows),
    ("HF Transformers docs", bert_rows),
    ("torchtune PR #389", torchtune_rows),
)


def predict(row: dict[str, Any]) -> list[Entry]:
    """All quantities of one row. Raises SkipError where it can't be predicted."""
    complete = row.get("config_complete")
    source = next((rows for name, rows in SOURCES if name in row.get("source", "")), None)
    if complete is False and not (source is fitcheck_rows and row["config"].get("arch")):
        raise SkipError("its configuration isn't complete")
    if source is None:
        detail = "" if complete is True else f" (configuration complete: {complete})"
        raise SkipError(f"no script for this source: {row.get('source', 'unnamed')[:60]}{detail}")
    try:
        return list(source(row))
    except KeyError as error:
        raise SkipError(f"the row has no {error.args[0]!r}") from error


# --- the report ---------------------------------------------------------------------------------------------


def _percent(entry: Entry) -> str:
    if entry.predicted == entry.published:
        return "0, equal to the byte"
    return f"{entry.error:+.4%}" + (", equal as rounded" if entry.equal else "")


def line(entry: Entry) -> str:
    """One line: id, quantity, published, predicted, error, range where there is one."""
    spread = ""
    if entry.low is not None and entry.high is not None and entry.low != entry.high:
        spread = f"  range {format_bytes(entry.low)} to {format_bytes(entry.high)}"
    return (
        f"{entry.id!s:>5}  {entry.quantity:<10}{format_bytes(entry.published):>13}"
        f"{format_bytes(entry.predicted):>13}  {_percent(entry):<28}{entry.about} {entry.attention}{spread}"
    )


def _summary(title: str, groups: dict[str, list[Entry]]) -> list[str]:
    lines = [title]
    for name, entries in groups.items():
        errors = [e.error for e in entries]
        equal = sum(e.equal for e in entries)
        median, worst = statistics.median(abs(e) for e in errors), max(errors, key=abs)
        lines.append(
            f"  {name:<34}{len(entries):>4} figures  median {median:.4%}  worst {worst:+.4%}  equal {equal}"
        )
    return lines


def _by(entries: Sequence[Entry], key: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def summary(entries: Sequence[Entry]) -> str:
    """Median and worst error by group and quantity, by attention and by phase."""
    lines = _summary("by group and quantity", _by(entries, lambda e: f"{e.group}: {e.quantity}"))
    lines += _summary("by quantity", _by(entries, lambda e: e.quantity))
    allocated = [e for e in entries if e.quantity == "allocated"]
    lines += _summary("allocated, by attention", _by(allocated, lambda e: e.attention or "none"))
    lines += _summary("by phase", _by([e for e in entries if e.quantity in PHASES], lambda e: e.quantity))
    return "\n".join(lines)


RESTS_ON = """\
Exactness rests on: the operators' order in the script and its libraries (transformers 5.17, peft 0.20
here); the attention kernel (pinned by the scripts); what stays alive (the output, through the optimizer
step); CUDA's rules (memlab.cuda_rules). `value` in the measurements is rounded; phase peaks carry all
digits. Reserved rests on the order of segment addresses too, which is inferred: the range is over four
orders (fp16), or over how far the loader runs ahead (nf4). Process is reserved and the card's context, a
constant of card and driver. RTX A6000 rows were measured with transformers 4.57, which always builds a
mask: that is emulated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when every row was predicted or skipped with a reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.split("\n")[0])
    parser.add_argument("--measurements", type=Path, required=True, metavar="FILE", help="published rows")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write rows and skipped here")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose source or model contains this")
    options = parser.parse_args(arguments)
    try:
        rows = json.loads(options.measurements.read_text("utf-8"))["entries"]
    except (OSError, ValueError, KeyError) as error:
        print(f"can't read measurements from {options.measurements}: {error}", file=sys.stderr)
        return 2
    try:
        from benchmarks.workloads import libraries

        libraries()
    except ImportError as error:
        print(f"{error}: install the extra: pip install 'memlab[benchmarks]'", file=sys.stderr)
        return 2

    import torch

    torch.set_num_threads(1)
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    wanted = options.only.lower()
    for row in rows:
        if wanted not in json.dumps([row.get("source"), row.get("config")]).lower():
            continue
        try:
            found = predict(row)
        except SkipError as reason:
            skipped.append(Skipped(row["id"], str(reason)))
            continue
        entries += found
        for entry in found:
            print(line(entry), flush=True)
    if entries:
        print(f"\n{summary(entries)}\n\n{RESTS_ON}")
    for text in sorted({f"{e.group}: {e.unsaid}" for e in entries if e.unsaid}):
        print(f"left unsaid by the source - {text}")
    print(f"\nskipped: {len(skipped)}")
    for skip in skipped:
        print(f"{skip.id!s:>5}  {skip.why}")
    if options.json is not None:
        data = {
            "rows": [entry.to_dict() for entry in entries],
            "skipped": [{"id": skip.id, "why": skip.why} for skip in skipped],
        }
        unfinished = options.json.with_name(options.json.name + ".part")
        unfinished.write_text(json.dumps(data, indent=1), "utf-8")
        unfinished.replace(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
