"""What the calculator's page asks of memlab: JSON in, JSON out. Runs in the browser and in any Python.

Every number is memlab's own; here they are only chosen, put into words and given the command line that says
the same. A question that can't be answered gets {"error": one line}.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from memlab import engines, hardware, models, oom, planner
from memlab.footprint import footprint
from memlab.hardware import GPU
from memlab.models import ConfigError, ConvConfig, TransformerConfig
from memlab.recipe import Recipe
from memlab.units import CONSUMERS, PHASES, format_bytes, format_count, format_gb, parse_bytes

Config = TransformerConfig | ConvConfig

#: What a pasted config is called on the command line.
PASTED = "config.json"
#: Rows that a person reads; the JSON has all.
_TENSORS, _REPORTS = 15, 20


def ask(kind: str, question: str, data: Any = None) -> str:
    """The answer to a question of `kind` (a key of `_KINDS`). `data`: the bytes of a log file, for oom."""
    try:
        answer = _KINDS[kind](json.loads(question), data)
    except (ValueError, OSError) as error:
        answer = {"error": " ".join(str(error).split())}
    except Exception as error:
        answer = {
            "error": f"memlab itself failed ({type(error).__name__}: {' '.join(str(error).split())[:200]}): "
            "please report it with this page's link"
        }
    return json.dumps(answer)


# -- what was chosen ---------------------------------------------------------------------------------------


def _model(question: Mapping[str, Any]) -> Config:
    text = question.get("config")
    if text is None:
        return models.model(question["model"])
    if not text.strip():
        raise ConfigError("paste the text of a Hugging Face config.json: it begins with {")
    return models.from_hf(models.parse_config(text))


def _chosen(question: Mapping[str, Any]) -> tuple[Config, GPU, Recipe]:
    """The recipe isn't resolved: its sequence may be the model's own."""
    config, card = _model(question), hardware.gpu(question["gpu"])
    return config, card, Recipe.from_dict(question["recipe"])


def changed(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that differ from the defaults, as plain data."""
    plain = Recipe(optimizer=recipe.optimizer)
    values = {
        f.name: getattr(recipe, f.name)
        for f in fields(recipe)
        if f.name == "optimizer" or getattr(recipe, f.name) != getattr(plain, f.name)
    }
    if values["optimizer"] == Recipe().optimizer:
        del values["optimizer"]
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _flags(recipe: Recipe) -> Iterable[str]:
    for name, value in changed(recipe).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif name == "lora_targets":
            yield from (f"--{flag}", value if isinstance(value, str) else ",".join(value))
        else:
            for one in value if isinstance(value, list) else [value]:
                yield from (f"--{flag}", str(one))


def _name(question: Mapping[str, Any]) -> str:
    return question["model"] if question.get("config") is None else PASTED


# -- does it fit -------------------------------------------------------------------------------------------


def _footprint(question: Mapping[str, Any], _: Any) -> dict[str, Any]:
    config, card, recipe = _chosen(question)
    found = footprint(config, recipe, card)
    judged = planner.judge(config, card, found)
    phase, state = judged.phase, judged.state
    left = card.memory_bytes - judged.context - judged.peak
    doubt = sum(size for _, size, _ in judged.doubt)
    needed = judged.peak + judged.context + doubt
    if state == "fits":
        headline = f"Fits: {format_bytes(left - doubt)} to spare"
    elif state == "no" and left < 0:
        headline = f"Doesn't fit: {format_bytes(-left)} too much"
    else:
        word = "Too close to say" if state == "tight" else "Doesn't fit for sure"
        rest = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
        headline = f"{word}: {rest}, less than a closed form is sure of: trace it (memlab plan)"
    account = [
        (f"the step's tensors in {phase}", found.phases[phase]["total"], found.moments[phase]),
        *((term.name, term.bytes[phase], term.why) for term in judged.terms),
        ("context", judged.context, judged.context_source),
        *((f"held back: {name}", size, why) for name, size, why in judged.doubt),
    ]
    host = [(name.replace("_", " "), format_bytes(n)) for name, n in found.host.items()]
    return {
        "state": state,
        "headline": headline,
        "heading": found._heading(),
        "recipe": found.recipe.describe(),
        "verdict": found._verdict(),
        "capacity": card.memory_bytes,
        "context": judged.context,
        "gpu": card.name,
        "peak_bytes": found.peak_bytes,
        "peak_phase": found.peak_phase,
        "moment": found.moments[found.peak_phase],
        "moments": dict(found.moments),
        "phases": {phase: dict(found.phases[phase]) for phase in PHASES},
        "consumers": dict(found.consumers),
        "table": [[name, *cells] for name, cells in found._rows()],
        "account": [[name, size, format_bytes(size), why] for name, size, why in account],
        "needed": [needed, format_bytes(needed)],
        "host": host,
        "includes": found.includes,
        "notes": found.recipe.notes(config, card),
        "tensors": [
            [t.name, t.consumer, _shape(t.shape, t.count), t.dtype, format_bytes(t.bytes), t.why]
            for t in sorted(found.tensors, key=lambda t: -t.bytes)[:_TENSORS]
        ],
        "tensor_count": len(found.tensors),
        "command": shlex.join(["memlab", "footprint", _name(question), "--gpu", card.name, *_flags(recipe)]),
        "batch": found.recipe.micro_batch * found.recipe.accumulation * found.recipe.data_parallel,
        "input": found.recipe.sequence or found.recipe.image,
    }


def _shape(shape: tuple[int, ...], count: int) -> str:
    text = " x ".join(f"{n:,}" for n in shape) or "scalar"
    return f"{count} of {text}" if count > 1 else text


def _footprint_json(question: Mapping[str, Any], _: Any) -> dict[str, Any]:
    """What `memlab footprint ... --json` prints."""
    config, card, recipe = _chosen(question)
    return {"json": _json(footprint(config, recipe, card).to_dict())}


def _json(data: object) -> str:
    """As the command line prints it. Text, for JavaScript's numbers would lose the last digits of FLOPs."""
    return json.dumps(data, indent=2)


# -- what should I change ----------------------------------------------------------------------------------


def _plan(question: Mapping[str, Any], _: Any) -> dict[str, Any]:
    config, card, recipe = _chosen(question)
    asked = question["plan"]
    mine = asked["start"] == "mine"
    count, batch = recipe.world_size, asked["effective_batch"]
    sizes = {name: parse_bytes(asked[name]) if asked[name] else None for name in ("host_memory", "nvme")}
    sequence = None if mine else recipe.sequence
    found = planner.plan(
        config, card, count, effective_batch=batch, sequence=sequence, start=recipe if mine else None,
        host_bytes=sizes["host_memory"], nvme_bytes=sizes["nvme"],
        intra_link=asked["link"] or None, inter_link=asked["inter_link"] or None, mfu=asked["mfu"],
        allow={"lora_rank": (None, 16)} if asked["lora"] else None,
    )  # fmt: skip
    words = ["memlab", "plan", _name(question), "--gpu", card.name]
    words += ["--count", str(count)] * (count > 1)
    words += ["--sequence", str(sequence)] * (sequence is not None)
    words += ["--effective-batch", str(batch)] * (batch is not None)
    words += ["--recipe", "recipe.toml"] * mine
    words += ["--lora"] * asked["lora"]
    for name in ("host_memory", "nvme", "link", "inter_link"):
        if asked[name]:
            words += ["--" + name.replace("_", "-"), asked[name]]
    if asked["mfu"] != 0.4:
        words += ["--mfu", f"{asked['mfu']:g}"]
    command = shlex.join([*words, "--no-trace"])
    if mine:
        lines = [f"{name} = {json.dumps(value)}" for name, value in changed(recipe).items()]
        command = "\n".join(["cat > recipe.toml <<'END'", *lines, "END", command])
    best = found.best
    return {
        "json": _json({**found.to_dict(), "confirmed": None, "export": None}),
        "fits": found.fits,
        "heading": f"{found.model} ({format_count(found.parameter_count)} parameters) on {found.count:,} x "
        f"{card.name}, effective batch {found.effective_batch:,}"
        + (f" x {found.start.sequence:,} tokens" if found.start.sequence else ""),
        "start": planner.brief(found.start),
        "start_consumers": dict(found.start_consumers),
        "start_peak": [found.start_peak, format_gb(found.start_peak), found.start_phase],
        "arithmetic": found.arithmetic,
        "bound": f"{found.bound}-bound: {found.bound_why}",
        "capacity": found.capacity,
        "context": found.capacity - _usable(found),
        "gpu": card.name,
        "steps": [
            {
                "name": step.name, "taken": step.taken, "fits": step.fits, "why": step.why,
                "price": step.price, "peak": [step.peak_bytes, format_gb(step.peak_bytes), step.peak_phase],
                "consumers": dict(step.consumers), "recipe": step.recipe.to_dict(),
            }
            for step in found.steps
        ],
        "headline": f"Fastest of {found.searched:,} recipes that fits: {planner.brief(best.recipe)}"
        if best
        else f"None of {found.searched:,} recipes fits",
        "best": _way(best) if best else None,
        "parts": [[part, planner._seconds(s)] for part, s in best.cost.seconds.items()] if best else [],
        "nearest": _way(found.nearest) if found.nearest else None,
        "candidates": [_way(one) for one in found.candidates],
        "alternatives": [_way(one) for one in sorted(found.alternatives, key=lambda one: one.seconds)],
        "tight": [_way(one) for one in found.tight],
        "largest": f"{'With the fastest' if best else 'With the starting recipe'} and nothing else changed: "
        f"largest micro-batch {found.largest_micro_batch:,}"
        + (f", longest sequence {found.longest_sequence:,}" if found.start.sequence else ""),
        "assumptions": found.assumptions.lines(),
        "held": [f"{format_gb(size)} {name}: {why}" for name, size, why in found.uncertainty],
        "notes": list(found.notes),
        "gpus_per_node": found.assumptions.gpus_per_node,
        "command": command,
    }  # fmt: skip


def _usable(found: planner.Plan) -> int:
    """What the context leaves of the card."""
    return found.capacity - next(size for name, size, _ in found.uncertainty if name == "context")


def _way(candidate: planner.Candidate) -> dict[str, Any]:
    beside = []
    if candidate.host_bytes:
        beside.append(f"host memory {format_gb(candidate.host_bytes)} per machine")
    if candidate.nvme_bytes:
        beside.append(f"NVMe {format_gb(candidate.nvme_bytes)} per machine")
    return {
        "brief": planner.brief(candidate.recipe),
        "recipe": candidate.recipe.to_dict(),
        "peak": format_gb(candidate.peak_bytes),
        "phase": candidate.peak_phase,
        "left": format_gb(candidate.margin_bytes),
        "seconds": planner._seconds(candidate.seconds),
        "changes": list(candidate.numerics),
        "beside": beside,
    }


def _export(question: Mapping[str, Any], _: Any) -> dict[str, Any]:
    config = _model(question)
    made = engines.export(
        question["engine"], config, Recipe.from_dict(question["winner"]),
        gpus_per_node=question["gpus_per_node"], source=_name(question),
    )  # fmt: skip
    return {"files": dict(made.files), "command": made.command, "notes": list(made.notes)}


# -- an out-of-memory message ------------------------------------------------------------------------------


def _oom(question: Mapping[str, Any], data: Any) -> dict[str, Any]:
    # As bytes: one line of text would be looked up as a file's name.
    source = bytes(data) if data is not None else question["text"].encode("utf-8", "replace")
    if not source.strip():
        raise ValueError("paste an out-of-memory message, with the traceback above it, or choose a log file")
    found = oom.read(source)
    words = ["memlab", "oom", question.get("file") or "message.txt"]
    if question["named"]:
        config, _, recipe = _chosen(question)
        oom.name_tensors(found, config, recipe.resolve(config))
        words += ["--model", _name(question), *_flags(recipe)]
    return {
        "reports": [_report(report) for report in found.reports[:_REPORTS]],
        "count": len(found.reports),
        "unread": found.unread,
        "json": _json(found.to_dict()),
        "command": shlex.join(words),
    }


def _report(report: oom.Report) -> dict[str, Any]:
    head, *_ = str(report).splitlines()
    place = f"line {report.line}" + (f", {report.rank}" if report.rank else "")
    if report.count > 1:
        place += f", {report.count} times (the same message; counted once)"
    raised = [f"raised in {report.where}" + (f" ({report.phase})" if report.phase else "")] * bool(
        report.where
    )
    raised += [f"asked for by {report.operator} ({report.phase})"] * bool(report.operator)
    raised += [f"deepest frame: {report.deepest}"] * bool(report.deepest)
    return {
        "head": head,
        "place": place,
        "raised": raised,
        "code": report.code,
        "numbers": [[name.strip(), size, note] for name, size, note in report._numbers()],
        "card": _card_map(report),
        "note": report.note,
        "tensors": [
            [m.name, " x ".join(map(str, m.shape)) or "scalar", m.dtype, format_bytes(m.bytes)]
            for m in report.matches
        ],
        "causes": [[cause.label, cause.why] for cause in report.causes],
        "actions": list(report.actions),
        "cannot_tell": list(report.cannot_tell),
    }


def _card_map(report: oom.Report) -> dict[str, Any] | None:
    """Who held the card when the request failed; None where the message doesn't give enough of it."""
    if not report.total or report.allocated is None or report.free is None:
        return None
    own, cached = report.own_process, report.cached_total
    parts = [
        ("tensors", report.allocated),
        ("cached, in no tensor", report.unallocated or 0),
        ("context and libraries", max(own - cached, 0) if own is not None and cached is not None else 0),
        ("other processes", sum(size for _, size in report.rivals)),
        ("free", report.free),
    ]
    rest = report.total - sum(size for _, size in parts)
    if rest < -report.total // 50:
        return None
    parts.insert(4, ("context or others", max(rest, 0)))
    return {
        "total": report.total,
        "requested": report.requested,
        "parts": [[name, size, format_bytes(size)] for name, size in parts if size],
    }


_KINDS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "footprint": _footprint,
    "footprint_json": _footprint_json,
    "plan": _plan,
    "export": _export,
    "oom": _oom,
}


def choices() -> dict[str, Any]:
    """What can be chosen, for the page's form: written into it when it is built."""
    from memlab import recipe as recipes

    return {
        "models": [
            {
                "name": config.name,
                "text": f"{config.name} ({format_count(config.parameter_count)})",
                "images": isinstance(config, ConvConfig),
                "size": config.image if isinstance(config, ConvConfig) else config.context,
            }
            for config in models.MODELS.values()
        ],
        "gpus": [
            {"name": card.name, "text": f"{card.name} ({format_bytes(card.memory_bytes)})"}
            for card in hardware.GPUS.values()
        ],
        "precision": list(recipes.PRECISIONS),
        "optimizer": list(recipes.OPTIMIZERS),
        "optimizer_impl": list(recipes.OPTIMIZER_IMPLS),
        "attention": list(recipes.ATTENTION),
        "base_weights": list(recipes.BASE_WEIGHTS),
        "lora_targets": list(recipes.LORA_TARGETS),
        "link": list(hardware.LINKS),
        "inter_link": [network.name for network in planner.NETWORKS.values()],
        "engines": list(engines.ENGINES),
        "consumers": list(CONSUMERS),
        "phases": list(PHASES),
        "defaults": Recipe().to_dict(),
    }
