"""Formula, trace and measurement of one training step, side by side.

    print(compare("gpt2", micro_batch=4, sequence=512, precision="fp32"))

* formula: `footprint`, closed forms, no tensor is made;
* trace: the step on fake tensors (`virtual`), every allocation, no memory;
* measured: the step on real tensors on this machine (`meter`), and the allocator's own log of it.
"""

from __future__ import annotations

import gc
import html
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memlab import hardware, models, virtual
from memlab.footprint import Footprint, footprint
from memlab.hardware import GPU
from memlab.meter import AllocatorLog, Meter, profiled
from memlab.models import ConvConfig, TransformerConfig
from memlab.recipe import Recipe
from memlab.step import workload
from memlab.trace import Trace
from memlab.units import CONSUMERS, PHASES, format_bytes

__all__ = ["Comparison", "ComparisonRow", "compare", "measure_step", "trace_step"]

#: Where the last column of the table begins.
_GAP_AT = 18 + 3 * 13 + 2

Model = str | TransformerConfig | ConvConfig
#: Builds everything and returns the step: `def make(): model = ...; return step`.
Make = Callable[[], Callable[[], Any]]
#: What a real step needs beside its tensors: kernels' own caches and Python (a few hundred MB at most).
_HEADROOM = 512 * 2**20


def _resolve(model: Model, recipe: Recipe | None, fields: Mapping[str, Any]) -> tuple[Any, Recipe]:
    config = models.model(model) if isinstance(model, str) else model
    recipe = recipe or Recipe()
    recipe = recipe.replace(**fields) if fields else recipe
    return config, recipe.resolve(config)


def _prepare(model: Model | Make, recipe: Recipe | None, device: torch.device, fields: Any) -> _Prepared:
    """Build what is to be stepped; runs inside a meter or a virtual GPU."""
    if callable(model):
        if recipe is not None or fields:
            raise TypeError("a function that builds its own step takes no recipe")
        return _Prepared(model(), lambda: None)
    config, recipe = _resolve(model, recipe, fields)
    work = workload(config, recipe, device)

    def clear() -> None:
        if work.recipe.set_to_none:
            work.optimizer.zero_grad(set_to_none=True)

    return _Prepared(work.step, clear)


class _Prepared(NamedTuple):
    step: Callable[[], Any]
    clear: Callable[[], None]  # free the gradients


def _label(trace: Trace, model: Model | Make, recipe: Recipe | None, fields: Any) -> Trace:
    if not callable(model):
        config, recipe = _resolve(model, recipe, fields)
        trace.info |= {"model": config.name, "recipe": recipe.to_dict()}
    return trace


def trace_step(
    model: Model | Make,
    recipe: Recipe | None = None,
    *,
    gpu: str | GPU | None = None,
    limit: int | None = None,
    lines: bool = False,
    rank: int = 0,
    **fields: Any,
) -> Trace:
    """The trace of one training step without running it: fake tensors, no memory, any size.

    model: a name, a config, or a function that builds model and optimizer and returns the step to call.
    recipe, **fields: how it is trained; fields are those of `Recipe`.
    gpu: a card; a step that needs more than it holds raises `torch.OutOfMemoryError` where it would.
        None: this machine's CPU rules and no limit.
    limit: bytes in place of the card's capacity.
    lines: record the source line of each block.
    rank: whose step, where the recipe has a world_size above 1 (`sharded.trace_sharded` has more to choose).

    Two steps are run and the second is returned: optimizer states exist, as in every step but the first.
    Raises UnknownNameError and RecipeError for what isn't known or can't be run.
    """
    if not callable(model):
        config, resolved = _resolve(model, recipe, fields)
        if resolved.world_size > 1 or resolved.offload:
            from memlab.sharded import Sharding, trace_sharded

            return trace_sharded(
                config, resolved, sharding=Sharding(rank=rank), gpu=gpu, limit=limit, lines=lines
            )
    with torch.random.fork_rng(devices=[]):
        with virtual.VirtualGPU(gpu, limit=limit, lines=lines) as card:
            step, _ = _prepare(model, recipe, torch.device("cpu"), fields)
            for _ in range(2):
                step()
        del step
    return _label(card.trace.last_step(), model, recipe, fields)


def measure_step(
    model: Model | Make,
    recipe: Recipe | None = None,
    *,
    device: str | torch.device | None = None,
    budget: int | None = None,
    lines: bool = False,
    **fields: Any,
) -> Trace:
    """The trace of one training step that really runs: the second of two, on `device` (CUDA or CPU).

    model, recipe, **fields, lines: as for `trace_step`.
    budget: bytes beyond which OutOfMemoryError is raised.
    Nothing here asks whether it fits: `compare` does.
    """
    return _measure(model, recipe, device, budget, lines, fields, log=False)[0]


def _measure(
    model: Model | Make,
    recipe: Recipe | None,
    device: str | torch.device | None,
    budget: int | None,
    lines: bool,
    fields: Any,
    log: bool,
) -> tuple[Trace, AllocatorLog | None]:
    where = virtual.device() if device is None else torch.device(device)
    allocator = None
    with torch.random.fork_rng():
        with Meter(budget=budget, lines=lines, device=where) as meter:
            prepared = _prepare(model, recipe, where, fields)
            prepared.step()
            gc.collect()
            if log:
                prepared.clear()
                base = meter.live_bytes
                relative = profiled(prepared.step)
                allocator = AllocatorLog(
                    base + relative.peak_bytes, base + relative.end_bytes, relative.events
                )
            else:
                prepared.step()
        del prepared
    trace = _label(meter.trace.last_step(), model, recipe, fields)
    return trace, allocator


class ComparisonRow(NamedTuple):
    """One line; bytes, or None where there is no figure."""

    name: str
    formula: int | None
    trace: int | None
    measured: int | None
    gap: str


@dataclass(frozen=True)
class Comparison:
    """Formula, trace and measurement of one step.

    `rows`: each consumer's own largest live bytes, each phase's peak, the peak of the step, and (measured on
    a CPU) what the allocator's log adds to it. `measured` and `allocator` are None when nothing was measured;
    `not_measured` then says why.
    """

    model: str
    recipe: Recipe
    rows: tuple[ComparisonRow, ...]
    formula: Footprint
    trace: Trace
    measured: Trace | None
    allocator: AllocatorLog | None
    not_measured: str
    machine: str

    def row(self, name: str) -> ComparisonRow:
        """The row of a consumer, a phase or 'peak'."""
        return next(row for row in self.rows if row.name == name)

    def columns(self) -> dict[str, dict[str, int]]:
        """{'formula': {consumer: bytes, …, 'peak': bytes}, 'trace': …, 'measured': …}, for plots."""
        wanted = (*CONSUMERS, "peak")
        columns: dict[str, dict[str, int]] = {}
        for column in ("formula", "trace", "measured"):
            values = {row.name: getattr(row, column) for row in self.rows if row.name in wanted}
            values = {name: value for name, value in values.items() if value is not None}
            if values:
                columns[column] = values
        return columns

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes are integers in bytes."""
        return {
            "model": self.model,
            "recipe": self.recipe.to_dict(),
            "machine": self.machine,
            "not_measured": self.not_measured,
            "rows": [
                {
                    "name": row.name,
                    "formula_bytes": row.formula,
                    "trace_bytes": row.trace,
                    "measured_bytes": row.measured,
                    "gap": row.gap,
                }
                for row in self.rows
            ],
            "peak_phase": {
                "formula": self.formula.peak_phase,
                "trace": self.trace.peak_phase,
                "measured": self.measured.peak_phase if self.measured is not None else None,
            },
        }

    def _heading(self) -> str:
        return f"{self.model}: {self.recipe.describe()}"

    def _notes(self) -> list[str]:
        notes = [
            "live tensor bytes; a consumer's row is its own largest, so the rows don't add up to the peak"
        ]
        return [*notes, f"measured: {self.not_measured or self.machine}"]

    def __str__(self) -> str:
        width = 100
        lines = textwrap.wrap(self._heading(), width)
        lines.append(f"{'':<18}{'formula':>13}{'trace':>13}{'measured':>13}  gap")
        for row in self.rows:
            sizes = "".join(f"{_cell(n):>13}" for n in row[1:4])
            first, *rest = textwrap.wrap(row.gap, width - _GAP_AT) or [""]
            lines.append(f"{row.name.replace('_', ' '):<18}{sizes}  {first}".rstrip())
            lines += [" " * _GAP_AT + more for more in rest]
            if row.name in (CONSUMERS[-1], PHASES[-1]):
                lines.append("")
        for note in self._notes():
            lines += textwrap.wrap(note, width)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th style='text-align:left'>{row.name.replace('_', ' ')}</th>"
            + "".join(f"<td>{_cell(n)}</td>" for n in row[1:4])
            + f"<td style='text-align:left'>{html.escape(row.gap)}</td></tr>"
            for row in self.rows
        )
        notes = "<br>".join(html.escape(note) for note in self._notes())
        return (
            f"<table><caption>{html.escape(self._heading())}</caption><tr><th></th><th>formula</th>"
            f"<th>trace</th><th>measured</th><th style='text-align:left'>gap</th></tr>{body}</table>"
            f"<p>{notes}</p>"
        )


def _cell(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)


def compare(
    model: Model,
    recipe: Recipe | None = None,
    *,
    gpu: str | GPU | None = None,
    measure: bool = True,
    **fields: Any,
) -> Comparison:
    """Put formula, trace and measurement of one step side by side, with the gaps named.

    model, recipe, **fields: as for `trace_step`. gpu: the card whose rules formula and trace follow.
    measure: run the step here too, on CUDA if there is one, else on the CPU. What wouldn't fit into the free
        memory isn't run, and the table says so.
    """
    config, recipe = _resolve(model, recipe, fields)
    card = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
    formula = footprint(config, recipe, card)
    # The comparison is about the whole step: a card that is too small is no reason to stop.
    trace = trace_step(config, recipe, gpu=card, limit=2**62)
    where = virtual.device()
    reason = _why_not(trace.peak_bytes, where) if measure else "not asked for"
    if recipe.world_size > 1 or recipe.offload:
        reason = reason or "sharded and offloaded steps are traced, not run, here"
    measured, log = None, None
    if not reason:
        measured, log = _measure(config, recipe, where, None, False, {}, log=where.type == "cpu")
    rows = _rows(formula, trace, measured, log, reason)
    machine = torch.cuda.get_device_name() if where.type == "cuda" else "this machine's CPU"
    return Comparison(config.name, recipe, rows, formula, trace, measured, log, reason, machine)


def _why_not(need: int, device: torch.device) -> str:
    """Why a step of `need` bytes shouldn't be run here; '' if it fits."""
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else free_memory()
    if need + _HEADROOM <= free:
        return ""
    return f"needs {format_bytes(need)}, {format_bytes(free)} are free here"


def free_memory() -> int:
    """Bytes of main memory that a new program could take, by the system and by the container's limit."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit():
            found.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except OSError:
        pass
    if not found:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(found))


# naming the gaps


def _rows(
    formula: Footprint, trace: Trace, measured: Trace | None, log: AllocatorLog | None, reason: str
) -> tuple[ComparisonRow, ...]:
    missing = f"not measured: {reason}" if reason else ""
    rows = []

    def add(name: str, computed: int | None, traced: int, real: int | None, why: str = "") -> None:
        gaps = [_difference("formula", computed, traced, why), _difference("measured", real, traced, "")]
        text = "; ".join(gap for gap in gaps if gap)
        if not text:
            text = "equal" if real is not None or not reason else "formula equals trace"
        rows.append(ComparisonRow(name, computed, traced, real, text))

    by_formula, by_trace = formula.consumer_peaks(), trace.consumer_peaks()
    by_meter = measured.consumer_peaks() if measured is not None else {}
    for name in CONSUMERS:
        why = _unmatched(formula, trace, name) if by_formula[name] != by_trace[name] else ""
        add(name, by_formula[name], by_trace[name], by_meter.get(name), why)
    in_formula, in_trace = formula.phase_peaks(), trace.phase_peaks()
    in_meter = measured.phase_peaks() if measured is not None else {}
    for phase in PHASES:
        computed = in_formula.get(phase)
        why = _consumers_differ(formula, trace, phase) if computed != in_trace.get(phase) else ""
        add(phase, computed, in_trace.get(phase, 0), in_meter.get(phase), why)
    add("peak", formula.peak_bytes, trace.peak_bytes, measured.peak_bytes if measured is not None else None)
    last = rows[-1]
    gap = f"{last.gap}; in {trace.peak_phase}" + (f"; {missing}" if missing else "")
    rows[-1] = last._replace(gap=gap)
    if log is not None and measured is not None:
        scratch = log.peak_bytes - measured.peak_bytes
        rows.append(
            ComparisonRow(
                "operator scratch",
                None,
                None,
                scratch,
                "taken and given back inside one operator: seen only by the allocator, whose own log has its"
                f" peak at {format_bytes(log.peak_bytes)}",
            )
        )
    return tuple(rows)


def _difference(name: str, value: int | None, traced: int, why: str) -> str:
    if value is None or value == traced:
        return ""
    size, share = value - traced, (value - traced) / traced if traced else 0
    text = f"{name} {'+' if size > 0 else ''}{format_bytes(size)}"
    if abs(share) >= 0.00005:
        text += f" ({share:+.2%})"
    return text + (f": {why}" if why else "")


def _consumers_differ(formula: Footprint, trace: Trace, phase: str) -> str:
    """By which consumers formula and trace differ at the largest moment of a phase."""
    line = trace.timeline()
    moments = [k for a, b, name in trace.spans() if name == phase for k in range(max(a - 1, 0), b)]
    if not moments:
        return ""
    k = max(moments, key=line.total.__getitem__)
    differ = {name: formula.phases[phase][name] - line.consumers[name][k] for name in CONSUMERS}
    return ", ".join(
        f"{name.replace('_', ' ')} {'+' if n > 0 else ''}{format_bytes(n)}" for name, n in differ.items() if n
    )


def _unmatched(formula: Footprint, trace: Trace, consumer: str, shown: int = 2) -> str:
    """Which tensors only one of the two has, when the consumer is at its largest: matched by size.

    '' where the formula's list isn't that of one moment (recomputation).
    """
    if sum(tensor.bytes for tensor in formula.of(consumer)) != formula.consumer_peaks()[consumer]:
        return ""
    line = trace.timeline()
    values = line.consumers[consumer]
    moment = max(range(len(values)), key=values.__getitem__, default=0)
    only: Counter[int] = Counter()
    names: dict[tuple[int, bool], str] = {}
    for block in map(trace.block, trace.live_at(line.events[moment]) if values else ()):
        if block.consumer == consumer:
            only[block.bytes] += 1
            names.setdefault((block.bytes, True), block.operator.removeprefix("aten.") or "input")
    for tensor in formula.of(consumer):
        only[tensor.bytes // tensor.count] -= tensor.count
        names.setdefault((tensor.bytes // tensor.count, False), tensor.name)
    rest = sorted(((n, size) for size, n in only.items() if n), key=lambda item: -abs(item[0] * item[1]))
    parts = []
    for count, size in rest[:shown]:
        traced = count > 0
        where = "trace" if traced else "formula"
        parts.append(f"{abs(count)} x {format_bytes(size)} {names[size, traced]} only in the {where}")
    residual = abs(sum(n * size for n, size in rest[shown:]))
    if residual:
        parts.append(f"residual {format_bytes(residual)}")
    return ", ".join(parts)
