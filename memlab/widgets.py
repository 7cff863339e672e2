"""Explorers: change one thing, see what it does to memory. Each has a static twin.

Each function returns an `Explorer`. Where a cell shows it, its twin, a table and a figure of the starting
point, is always there; under it come live controls where ipywidgets can be shown (not while grading, not
without a kernel). Everything is computed by closed forms: an answer is there at once.
"""

from __future__ import annotations

import base64
import html
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memlab import footprint, hardware, models, plots, recipe, units

Choices = Mapping[str, Any]


@dataclass(frozen=True)
class Control:
    """One thing to choose: its key in the choices, the label beside it, (shown, value) pairs."""

    key: str
    label: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class View:
    """What an explorer says about one set of choices."""

    finding: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    figure: plots.Figure | None = None

    def html(self) -> str:
        """The table and the note; before them the finding, unless the figure has it as its title."""
        parts = [] if self.figure else [f"<p role='status'><strong>{html.escape(self.finding)}</strong></p>"]
        if self.rows:
            head = "".join(f"<th scope='col'>{html.escape(cell)}</th>" for cell in self.header)
            body = "".join(
                f"<tr><th scope='row' style='text-align:left'>{html.escape(first)}</th>"
                + "".join(f"<td style='text-align:right'>{html.escape(cell)}</td>" for cell in rest)
                + "</tr>"
                for first, *rest in self.rows
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        if self.note:
            parts.append(f"<p role='status'>{html.escape(self.note)}</p>")
        return "".join(parts)

    def __str__(self) -> str:
        table = [self.header, *self.rows] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        return "\n".join([self.finding, *lines, *([self.note] if self.note else [])])


class Explorer:
    """Choices, what follows from them, and the controls that change them.

    `show(now, before)` is a plain function: the view of the choices `now`; where `before` is given, it also
    says what the change from there did. A ValueError from it is shown in place of a view.
    """

    def __init__(
        self, show: Callable[[Choices, Choices | None], View], controls: Sequence[Control], start: Choices
    ) -> None:
        self.show, self.controls, self.start = show, tuple(controls), dict(start)
        self.twin = show(self.start, None)

    def __str__(self) -> str:
        return str(self.twin)

    def live(self) -> Any:
        """The controls and their answer as one ipywidgets box. Raises ImportError without ipywidgets."""
        widgets = importlib.import_module("ipywidgets")
        answer = widgets.HTML(value="<p role='status'>Change a control to see what it does.</p>")
        boxes = {
            control.key: widgets.Dropdown(
                options=control.options,
                value=self.start[control.key],
                description=control.label,
                style={"description_width": "8.5em"},
                layout={"width": "24em", "max_width": "100%"},
            )
            for control in self.controls
        }
        before = self.start

        def changed(_: object) -> None:
            nonlocal before
            now = {key: box.value for key, box in boxes.items()}
            try:
                view = self.show(now, before)
            except ValueError as error:
                view = View(str(error))
            else:
                before = now
            answer.value = view.html() + (_image(view.figure) if view.figure else "")

        for box in boxes.values():
            box.observe(changed, names="value")
        controls = widgets.Box(
            list(boxes.values()), layout={"display": "flex", "flex_flow": "row wrap", "width": "100%"}
        )
        return widgets.VBox([controls, answer])

    def _ipython_display_(self) -> None:
        display = importlib.import_module("IPython.display").display
        display({"text/html": self.twin.html(), "text/plain": str(self.twin)}, raw=True)
        if self.twin.figure is not None:
            display(self.twin.figure)
        if _can_be_live():
            display(self.live())


def _can_be_live() -> bool:
    """Controls need a kernel to answer them and ipywidgets; a grader has no one to move them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return (
        os.environ.get("MEMLAB_GRADING") != "1"
        and getattr(shell, "kernel", None) is not None
        and importlib.util.find_spec("ipywidgets") is not None
    )


def _image(figure: plots.Figure) -> str:
    # An <img> and not an Image widget: only this one carries the text alternative.
    data = base64.b64encode(figure.png()).decode("ascii")
    alt = html.escape(figure.memlab_alt)
    return f"<img style='max-width:100%' alt='{alt}' src='data:image/png;base64,{data}'>"


def _names(names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, name) for name in names)


# -- chapter 1: the levels of memory ---

_SIZES = ("4 KB", "1 MB", "100 MB", "1 GB", "16 GB", "80 GB", "1 TB")
_OWN = "the card's own memory"


def memory_levels(gpu: str = "A100-80GB", size: str = "80 GB", path: str | None = None) -> Explorer:
    """How long `size` bytes take along each path that this card has: its memory, links, host memory, drive.

    `path` (a name in `hardware.LINKS`, or None for the card's host link) is drawn dark. Times are bytes over
    peak bandwidth. Raises ValueError for a card, link or size that it can't read.
    """
    card = hardware.gpu(gpu)
    chosen = hardware.link(path or card.host_link).name
    units.parse_bytes(size)
    sizes = _SIZES if size in _SIZES else (size, *_SIZES)
    controls = [
        Control("gpu", "GPU", _names(tuple(hardware.GPUS))),
        Control("size", "Bytes to move", _names(sizes)),
        Control("path", "Path", _names((_OWN, *hardware.LINKS))),
    ]
    return Explorer(_levels_view, controls, {"gpu": card.name, "size": size, "path": chosen})


def _levels_view(now: Choices, before: Choices | None = None) -> View:
    card, size = hardware.gpu(now["gpu"]), units.parse_bytes(now["size"])
    if size == 0:
        raise ValueError("0 bytes take no time: choose at least 1 byte")
    own = f"{card.memory_kind} of {card.name}"
    names = [card.peer_link, "DDR5-server", "DDR5-desktop", card.host_link, "NVMe"]
    if now["path"] != _OWN and now["path"] not in names:
        names.append(now["path"])
    links = [hardware.link(name) for name in names if name]
    paths = sorted(
        [(own, card.bandwidth), *((link.name, link.bandwidth) for link in links)], key=lambda p: -p[1]
    )
    seconds = {label: size / rate for label, rate in paths}
    chosen = own if now["path"] == _OWN else now["path"]
    amount = units.format_gb(size)
    finding = f"{amount} take {plots.seconds(seconds[chosen])} by {chosen}"
    if chosen == own:
        finding = f"{amount} take {plots.seconds(seconds[own])} in the {own}"
    else:
        ratio = seconds[chosen] / seconds[own]
        finding += f": {ratio:.3g} times {card.memory_kind}'s time"
    rows = tuple(
        (
            label,
            f"{rate / units.GB:,.4g} GB/s",
            plots.seconds(seconds[label]),
            f"{seconds[label] / seconds[own]:.3g}x",
        )
        for label, rate in paths
    )
    note = "Bytes over peak bandwidth, links in one direction; the delay before the first byte isn't counted."
    if before is not None:
        note = _levels_change(now, before, seconds[chosen]) + note
    figure = plots.times(
        [(label, seconds[label]) for label, _ in paths], finding, {chosen: "the path chosen"}
    )
    header = ("path", "bandwidth", f"time for {amount}", f"against {card.memory_kind}")
    return View(finding, header, rows, note, figure)


def _levels_change(now: Choices, before: Choices, seconds: float) -> str:
    card = hardware.gpu(before["gpu"])
    rate = card.bandwidth if before["path"] == _OWN else hardware.link(before["path"]).bandwidth
    was = units.parse_bytes(before["size"]) / rate
    changes = ", ".join(f"{before[key]} → {now[key]}" for key in now if now[key] != before[key])
    return f"{changes}: {plots.seconds(was)} → {plots.seconds(seconds)}. " if changes else ""


# -- chapter 2: the consumers ---

_OWN_SEQUENCE = "the model's own"
_OPTIMIZERS = (
    ("SGD", ("sgd", "foreach")),
    ("SGD with momentum", ("momentum", "foreach")),
    ("AdamW, foreach", ("adamw", "foreach")),
    ("AdamW, fused", ("adamw", "fused")),
    ("AdamW, for-loop", ("adamw", "for-loop")),
    ("8-bit AdamW", ("adamw-8bit", "for-loop")),
    ("Adafactor", ("adafactor", "for-loop")),
)


def four_consumers(model: str = "gpt2", gpu: str = "T4") -> Explorer:
    """What one training step of `model` holds at its peak, against the capacity of `gpu`, by closed forms.

    Starts from the default recipe (AdamW foreach, micro-batch 1, the model's own context), in amp-bf16, or in
    amp-fp16 on a card without bf16. Raises ValueError for a model or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    controls = [
        Control("model", "Model", _names(tuple(models.MODELS))),
        Control("gpu", "Card", _names(tuple(hardware.GPUS))),
        Control("precision", "Precision", _names(recipe.PRECISIONS)),
        Control("optimizer", "Optimizer", _OPTIMIZERS),
        Control("micro_batch", "Micro-batch", tuple((str(n), n) for n in (1, 2, 4, 8, 16, 32, 64, 128))),
        Control(
            "sequence",
            "Sequence",
            ((_OWN_SEQUENCE, None), *((f"{n:,} tokens", n) for n in (128, 256, 512, 1024, 2048, 4096, 8192))),
        ),
        Control(
            "checkpointing", "Checkpointing", _names(("none", "selective", "every-2", "every-4", "full"))
        ),
        Control("attention", "Attention", _names(recipe.ATTENTION)),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "precision": "amp-bf16" if "bf16" in card.dtypes else "amp-fp16",
        "optimizer": ("adamw", "foreach"),
        "micro_batch": 1,
        "sequence": None,
        "checkpointing": "none",
        "attention": "sdpa",
    }

    def show(now: Choices, before: Choices | None = None) -> View:
        return _consumers_view(now, before, controls)

    return Explorer(show, controls, start)


def _steps(choices: Choices) -> recipe.Recipe:
    name, implementation = choices["optimizer"]
    return recipe.Recipe(
        precision=choices["precision"],
        optimizer=name,
        optimizer_impl=implementation,
        micro_batch=choices["micro_batch"],
        sequence=choices["sequence"],
        checkpointing=choices["checkpointing"],
        attention=choices["attention"],
    )


def _footprint(choices: Choices) -> footprint.Footprint:
    return footprint.footprint(choices["model"], _steps(choices), choices["gpu"])


def _consumers_view(now: Choices, before: Choices | None, controls: Sequence[Control]) -> View:
    card, current = hardware.gpu(now["gpu"]), _footprint(now)
    peak, capacity = current.peak_bytes, card.memory_bytes
    room = f"{units.format_bytes(abs(capacity - peak))} {'free' if peak <= capacity else 'too much'}"
    where = plots.phase(current.peak_phase)
    finding = f"{now['model']}: peak {units.format_bytes(peak)} in {where}, {room} on {card.name}"
    with_what = " ".join(_steps(now).resolve(models.model(now["model"])).describe().split())
    note = (
        f"One step of {now['model']}: {with_what}. Live tensors at its peak; the allocator's cache and the "
        "driver's context come on top."
    )
    held = {**current.consumers_at_peak(), "all": peak}
    rows: list[tuple[str, ...]]
    if before is None:
        header: tuple[str, ...] = ("consumer", "at the peak")
        rows = [(plots.word(name), units.format_bytes(size)) for name, size in held.items()]
        bars = {now["model"]: current}
    else:
        earlier = _footprint(before)
        was = {**earlier.consumers_at_peak(), "all": earlier.peak_bytes}
        header = ("consumer", "before", "now", "change")
        rows = [
            (
                plots.word(name),
                units.format_bytes(was[name]),
                units.format_bytes(size),
                _signed(size - was[name]),
            )
            for name, size in held.items()
        ]
        bars = {"before": earlier, "now": current}
        changes = ", ".join(
            f"{control.label} {_shown(control, before)} → {_shown(control, now)}"
            for control in controls
            if before[control.key] != now[control.key]
        )
        moved = ""
        if earlier.peak_phase != current.peak_phase:
            moved = f", which moves from {plots.phase(earlier.peak_phase)} to {where}"
        note = f"{changes or 'No change'}: {_signed(peak - earlier.peak_bytes)} at the peak{moved}. {note}"
    return View(finding, header, tuple(rows), note, plots.consumers(bars, capacity=capacity, title=finding))


def _shown(control: Control, choices: Choices) -> str:
    return next(shown for shown, value in control.options if value == choices[control.key])


def _signed(size: int) -> str:
    return f"{'−' if size < 0 else '+' if size > 0 else '±'}{units.format_bytes(abs(size))}"


# -- chapter 3: how long a checkpointed segment ---


def checkpoint_segments(model: str = "llama2-7b", gpu: str = "A100-80GB") -> Explorer:
    """Activations and peak of a step of `model` by the number of blocks in a checkpointed segment.

    Starts from weights, gradients and moments in bf16 and one sequence of the model's own length. Raises
    ValueError for a model without blocks (a convnet's aren't equal) or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if not isinstance(config, models.TransformerConfig):
        raise ValueError(f"{config.name} has no row of equal blocks; choose a transformer, such as gpt2")
    names = tuple(n for n, c in models.MODELS.items() if isinstance(c, models.TransformerConfig))
    controls = [
        Control("model", "Model", _names(names)),
        Control("gpu", "Card", _names(tuple(hardware.GPUS))),
        Control("micro_batch", "Micro-batch", tuple((str(n), n) for n in (1, 2, 4, 8, 16, 32))),
        Control("attention", "Attention", _names(("sdpa", "eager"))),
        Control("optimizer", "Optimizer", _OPTIMIZERS),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "micro_batch": 4,
        "attention": "sdpa",
        "optimizer": ("adamw", "fused"),
    }
    return Explorer(_segments_view, controls, start)


def _segments_view(now: Choices, before: Choices | None = None) -> View:
    config, card = models.model(now["model"]), hardware.gpu(now["gpu"])
    assert isinstance(config, models.TransformerConfig)
    name, implementation = now["optimizer"]
    step = recipe.Recipe(
        precision="bf16",
        optimizer=name,
        optimizer_impl=implementation,
        micro_batch=now["micro_batch"],
        attention=now["attention"],
    )
    lengths = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < config.layers] + [
        config.layers
    ]
    found = {n: footprint.footprint(config, step.replace(checkpointing=f"every-{n}"), card) for n in lengths}
    plain = footprint.footprint(config, step, card)
    kept = {n: f.consumer_peaks()["activations"] for n, f in found.items()}
    plain_kept = plain.consumer_peaks()["activations"]
    best = min(lengths, key=kept.__getitem__)
    peak = found[best]
    fits = "fits" if peak.peak_bytes <= card.memory_bytes else "doesn't fit"
    finding = (
        f"{config.name}: {units.format_bytes(plain_kept)} of activations become "
        f"{units.format_bytes(kept[best])} with {best} block{'s' if best > 1 else ''} a segment"
    )
    rows = [
        (
            "none",
            units.format_bytes(plain_kept),
            units.format_bytes(plain.peak_bytes),
            plain.peak_phase,
            "1.00",
        )
    ]
    for n, f in found.items():
        label = f"{n}, the whole model" if n == config.layers else str(n)
        rows.append(
            (label, units.format_bytes(kept[n]), units.format_bytes(f.peak_bytes), f.peak_phase, "1.33")
        )
    note = (
        f"With {best} the step {fits} in {units.format_bytes(card.memory_bytes)}. Activations at their own "
        "largest moment; the peak is that of all live tensors. Arithmetic: a backward counts as two forwards."
    )
    if before is not None:
        changes = ", ".join(f"{before[key]} → {now[key]}" for key in now if now[key] != before[key])
        note = f"{changes or 'No change'}. {note}"
    lines = {
        "activations": (lengths, list(kept.values())),
        "peak of the step": (lengths, [f.peak_bytes for f in found.values()]),
        "activations without checkpointing": ([lengths[0], lengths[-1]], [plain_kept] * 2),
    }
    figure = plots.curves(
        lines, finding, "blocks in a checkpointed segment (log scale)", "live bytes", in_bytes=True, log_x=2
    )
    header = ("blocks a segment", "activations at most", "peak of the step", "in", "arithmetic")
    return View(finding, header, tuple(rows), note, figure)


# -- chapter 4: what each stage of ZeRO leaves ---

#: Bytes per parameter of (parameters, gradients, optimizer_states).
_STATES = (("16 bit, fp32 master: 2 + 2 + 12", (2, 2, 12)), ("fp32 or autocast: 4 + 4 + 8", (4, 4, 8)))
_STAGES = ("none", "stage 1", "stage 2", "stage 3")


def zero_stages(model: str = "llama2-70b", gpu: str = "A100-80GB", ranks: int = 8) -> Explorer:
    """What parameters, gradients and AdamW's states take on each of N ranks, by stage of ZeRO, closed form.

    Raises ValueError for a model or a card that isn't known, or for less than one rank.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if ranks < 1:
        raise ValueError(f"a world has at least one rank, not {ranks}")
    counts = sorted({ranks, *(2**i for i in range(11))})
    controls = [
        Control("model", "Model", _names(tuple(models.MODELS))),
        Control("gpu", "Card", _names(tuple(hardware.GPUS))),
        Control("ranks", "Ranks", tuple((f"{n:,}", n) for n in counts)),
        Control("each", "Training", _STATES),
    ]
    start = {"model": config.name, "gpu": card.name, "ranks": ranks, "each": _STATES[0][1]}
    return Explorer(_stages_view, controls, start)


def _stage_bytes(parameters: int, ranks: int, stage: int, each: tuple[int, int, int]) -> dict[str, int]:
    first_sharded = {"parameters": 3, "gradients": 2, "optimizer_states": 1}
    return {
        name: -(-parameters * size // (ranks if stage >= first else 1))
        for (name, first), size in zip(first_sharded.items(), each, strict=True)
    }


def _gib(size: int) -> str:
    return f"{size / units.GIB:,.2f} GiB"


def _stages_view(now: Choices, before: Choices | None = None) -> View:
    config, card = models.model(now["model"]), hardware.gpu(now["gpu"])
    count, ranks, each = config.parameter_count, now["ranks"], now["each"]
    held = {name: _stage_bytes(count, ranks, stage, each) for stage, name in enumerate(_STAGES)}
    totals = {name: sum(row.values()) for name, row in held.items()}
    fitting = [name for name in _STAGES if totals[name] <= card.memory_bytes]
    cards = f"{ranks:,} {card.name}"
    finding = f"{config.name}, {cards}: no stage's states fit"
    if fitting:
        finding = f"{config.name}, {cards}: {fitting[0]} leaves room beside the states"
        if fitting[0] == "none":
            finding = f"{config.name}, {cards}: the states fit without sharding"
    rows = tuple(
        (name, *(_gib(size) for size in row.values()), _gib(totals[name]),
         f"{totals[name] / totals['none']:.1%}")
        for name, row in held.items()
    )  # fmt: skip
    least = -(-count * sum(each) // card.memory_bytes)
    note = (
        "States only: activations, gathered layers and buffers come on top. "
        f"Stage 3 needs at least {least:,} {card.name} for the states."
    )
    if before is not None:
        was = sum(_stage_bytes(models.model(before["model"]).parameter_count, before["ranks"], 3,
                               before["each"]).values())  # fmt: skip
        note = f"Stage 3: {_gib(was)} → {_gib(totals['stage 3'])} a rank. {note}"
    figure = plots.consumers(held, capacity=card.memory_bytes, title=finding, what="states of one rank")
    header = ("ZeRO", *(plots.word(name) for name in held["none"]), "all", "of unsharded")
    return View(finding, header, rows, note, figure)


# -- chapter 5: the largest micro-batch ---

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def micro_batches(model: str = "gpt2", gpu: str = "RTX-4090", batch: int = 256) -> Explorer:
    """The largest micro-batch of `model` that fits on `gpu`, and how often to accumulate it, by closed forms.

    batch: samples for one optimizer step. Raises ValueError for a model or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    lengths = ((_OWN_SEQUENCE, None), *((f"{n:,} tokens", n) for n in (128, 512, 1024, 2048, 4096)))
    controls = [
        Control("model", "Model", _names(tuple(models.MODELS))),
        Control("gpu", "Card", _names(tuple(hardware.GPUS))),
        Control("batch", "Batch", tuple((str(n), n) for n in sorted({32, 64, 256, 1024, batch}))),
        Control("sequence", "Sequence", lengths),
        Control("precision", "Precision", _names(recipe.PRECISIONS)),
        Control("attention", "Attention", _names(recipe.ATTENTION)),
        Control("checkpointing", "Checkpointing", _names(("none", "selective", "full"))),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "batch": batch,
        "sequence": None,
        "precision": "fp32",
        "attention": "eager",
        "checkpointing": "none",
    }

    def show(now: Choices, before: Choices | None = None) -> View:
        return _micro_batch_view(now, before, controls)

    return Explorer(show, controls, start)


def _micro_batch_peak(now: Choices, micro_batch: int, accumulation: int = 2) -> int:
    """Two micro-batches are enough: from the second on, the gradients are there in the forward."""
    steps = recipe.Recipe(
        micro_batch=micro_batch,
        accumulation=accumulation,
        **{key: now[key] for key in ("sequence", "precision", "attention", "checkpointing")},
    )
    return footprint.footprint(now["model"], steps, now["gpu"]).peak_bytes


def _largest_micro_batch(now: Choices) -> int:
    """Samples; 0 if not one fits. A whole batch at once needs no gradients in its forward."""
    capacity = hardware.gpu(now["gpu"]).memory_bytes
    if _micro_batch_peak(now, now["batch"], 1) <= capacity:
        return int(now["batch"])
    low, high = 0, now["batch"]  # low fits, high doesn't: memory grows with the micro-batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _micro_batch_peak(now, middle) <= capacity else (low, middle)
    return int(low)


def _micro_batch_view(now: Choices, before: Choices | None, controls: Sequence[Control]) -> View:
    card, batch = hardware.gpu(now["gpu"]), now["batch"]
    largest = _largest_micro_batch(now)
    sizes = [n for n in _MICRO_BATCHES if n <= batch]
    peaks = [_micro_batch_peak(now, n, 1 if n == batch else 2) for n in sizes]
    rows = []
    for n, peak in zip(sizes, peaks, strict=True):
        room = card.memory_bytes - peak
        fits = "fits" if room >= 0 else f"{units.format_bytes(-room)} too much"
        rows.append((f"{n}", units.format_bytes(peak), f"{-(-batch // n)}", fits))
    finding = f"{now['model']} on {card.name}: not even one sample fits"
    if largest:
        times = -(-batch // largest)
        takes = "fits at once" if times == 1 else f"takes {times} micro-batches"
        finding = f"{now['model']} on {card.name}: {largest} samples fit, a batch of {batch} {takes}"
    if before is not None:
        changes = ", ".join(
            f"{control.label} {_shown(control, before)} → {_shown(control, now)}"
            for control in controls
            if before[control.key] != now[control.key]
        )
        note = f"{changes or 'No change'}: from {_largest_micro_batch(before)} samples to {largest}. "
    else:
        note = ""
    note += "Live tensors of one step, gradients kept between micro-batches; cache and context come on top."
    figure = plots.curves(
        {"peak of the step": (sizes, peaks)},
        f"{largest} samples fit on {card.name}",
        "micro-batch (samples)",
        "live tensors at the peak",
        in_bytes=True,
        budget=card.memory_bytes,
    )
    return View(
        finding, ("micro-batch", "peak", "micro-batches a step", "on the card"), tuple(rows), note, figure
    )


# -- chapter 6: seven steps ---

_BATCHES = (8, 32, 128, 1024)


def seven_steps(
    model: str = "llama2-7b", gpu: str = "A100-80GB", cards: int = 8, batch: int = 32
) -> Explorer:
    """Seven levers, one after the other, in the usual order: each one's peak on a card, by closed forms.

    It starts from fp32 with eager attention. batch: samples of one optimizer step on all cards together.
    Raises ValueError for a model or a card that isn't known, or for less than one card.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if cards < 1 or batch < cards:
        raise ValueError(f"give at least one card and one sample for each, not {cards} and {batch}")
    lengths = ((_OWN_SEQUENCE, None), *((f"{n:,} tokens", n) for n in (128, 200, 512, 1024, 2048, 4096)))
    controls = [
        Control("model", "Model", _names(tuple(models.MODELS))),
        Control("gpu", "Card", _names(tuple(hardware.GPUS))),
        Control("cards", "Cards", tuple((str(n), n) for n in sorted({1, 2, 4, 8, cards}))),
        Control("batch", "Batch", tuple((f"{n:,}", n) for n in sorted({*_BATCHES, batch}))),
        Control("sequence", "Sequence", lengths),
        Control("impl", "AdamW's step", _names(("foreach", "fused"))),
    ]
    start = {
        "model": config.name, "gpu": card.name, "cards": cards, "batch": batch, "sequence": None,
        "impl": "foreach",
    }  # fmt: skip
    return Explorer(_seven_view, controls, start)


def _seven_recipes(now: Choices) -> dict[str, recipe.Recipe]:
    cards, batch = now["cards"], now["batch"]
    config = models.model(now["model"])
    attends = isinstance(config, models.TransformerConfig)
    each = max(1, batch // cards)
    held = recipe.Recipe(
        precision="fp32", optimizer_impl=now["impl"], micro_batch=each, world_size=cards,
        sequence=now["sequence"] if attends else None, attention="eager" if attends else "sdpa",
    )  # fmt: skip
    chain = {"as it is": held}

    def then(name: str, **changes: Any) -> None:
        chain[name] = list(chain.values())[-1].replace(**changes)

    then("1 micro-batch of 1", micro_batch=1)
    then("2 bf16 autocast", precision="amp-bf16" if "bf16" in hardware.gpu(now["gpu"]).flops else "amp-fp16")
    then("3 accumulation", accumulation=each)
    then("4 checkpoints", checkpointing="full")
    then("5 SDPA", attention="sdpa")
    then("6 ZeRO-3", zero_stage=3 if cards > 1 else 0)
    then("7 states on the host", offload=("optimizer_states:cpu",))
    return chain


def _seven_view(now: Choices, before: Choices | None = None) -> View:
    config, card = models.model(now["model"]), hardware.gpu(now["gpu"])
    steps = {name: footprint.footprint(config, each, card) for name, each in _seven_recipes(now).items()}
    peaks = {name: step.peak_bytes for name, step in steps.items()}
    fitting = next((name for name, size in peaks.items() if size <= card.memory_bytes), None)
    many = f"{now['cards']} x {card.name}" if now["cards"] > 1 else card.name
    finding = f"{config.name} on {many}: none of the seven steps makes it fit"
    if fitting == "as it is":
        finding = f"{config.name} on {many}: it fits as it is"
    elif fitting:
        finding = f"{config.name} on {many}: it first fits at step {fitting}"
    rows, last = [], None
    for name, step in steps.items():
        change = "" if last is None else _signed(step.peak_bytes - last)
        fits = "fits" if step.peak_bytes <= card.memory_bytes else "doesn't fit"
        rows.append((name, units.format_bytes(step.peak_bytes), change, plots.phase(step.peak_phase), fits))
        last = step.peak_bytes
    note = "Closed forms: live tensors of one card; context and cache come on top."
    if before is not None:
        earlier = _seven_recipes(before).values()
        was = [footprint.footprint(before["model"], r, before["gpu"]).peak_bytes for r in earlier]
        note = f"After all seven: {units.format_bytes(was[-1])} → {units.format_bytes(last or 0)}. {note}"
    names = list(peaks)
    changes = [(b, peaks[b] - peaks[a]) for a, b in itertools.pairwise(names)]
    figure = plots.waterfall(("as it is", peaks["as it is"]), changes, card.memory_bytes, finding)
    return View(finding, ("step", "peak", "change", "in", "on the card"), tuple(rows), note, figure)


# -- chapter 7: what three ways to use many cards send ---

_TRAFFIC = ("tensor parallel", "ZeRO-3", "pipeline")


def traffic(model: str = "llama2-70b", ranks: int = 8) -> Explorer:
    """Bytes that one rank sends for one micro-batch of `model`, 16 bit: tensor parallel, ZeRO-3, pipeline.

    By the ring algorithm, forward and backward (see exercise 7.3); for the pipeline, a stage in the middle.
    Raises ValueError for a model that isn't known or has no blocks, or for less than two ranks.
    """
    config = models.model(model)
    if not isinstance(config, models.TransformerConfig):
        raise ValueError(f"{config.name} has no row of equal blocks; choose a transformer, such as gpt2")
    if ranks < 2:
        raise ValueError(f"one rank sends nothing: give at least 2, not {ranks}")
    names = tuple(n for n, c in models.MODELS.items() if isinstance(c, models.TransformerConfig))
    links = tuple(n for n, link in hardware.LINKS.items() if "GPU" in link.connects)
    controls = [
        Control("model", "Model", _names(names)),
        Control("ranks", "Ranks", tuple((str(n), n) for n in sorted({2, 4, 8, 16, 64, ranks}))),
        Control("micro_batch", "Micro-batch", tuple((str(n), n) for n in (1, 2, 4, 8, 16, 32))),
        Control("link", "Link", _names(links)),
    ]
    start = {"model": config.name, "ranks": ranks, "micro_batch": 1, "link": "NVLink3"}
    return Explorer(_traffic_view, controls, start)


def _sent(config: models.TransformerConfig, tokens: int, ranks: int) -> dict[str, int]:
    activation, weights = 2 * tokens * config.hidden, 2 * config.parameter_count  # bytes
    sums = 4 * 2 * activation * config.layers
    ring = (sums * (ranks - 1) // ranks, 3 * weights * (ranks - 1) // ranks, 2 * activation)
    return dict(zip(_TRAFFIC, ring, strict=True))


def _traffic_view(now: Choices, before: Choices | None = None) -> View:
    config, link, ranks = models.model(now["model"]), hardware.link(now["link"]), now["ranks"]
    assert isinstance(config, models.TransformerConfig)
    tokens = now["micro_batch"] * config.context
    sent = _sent(config, tokens, ranks)
    even = 3 * config.parameter_count // (4 * 2 * config.layers * config.hidden)
    less, more = sorted(_TRAFFIC[:2], key=sent.__getitem__)
    finding = (
        f"{config.name}, {tokens:,} tokens a micro-batch: {less} sends {sent[more] / sent[less]:.1f} times "
        f"less than {more}"
    )
    rows = tuple(
        (name, units.format_gb(size), plots.seconds(size / link.bandwidth), waits)
        for (name, size), waits in zip(
            sent.items(), ("4 times a layer, all wait", "can run ahead", "at stage borders"), strict=True
        )
    )
    note = (
        f"Sent by one of {ranks} ranks for one micro-batch, forward and backward, 16 bit; {link.name} "
        f"has {link.bandwidth / units.GB:,.0f} GB/s. Tensor parallel and ZeRO-3 send the same at {even:,} "
        f"tokens, for each token trained at {even // ranks:,}: tensor parallel ranks share a micro-batch, "
        "the others have one each."
    )
    if before is not None:
        changes = ", ".join(f"{before[key]} → {now[key]}" for key in now if now[key] != before[key])
        note = f"{changes or 'No change'}. {note}"
    counts = sorted({2**i for i in range(9, 19)} | {tokens})
    lines = {name: (counts, [_sent(config, n, ranks)[name] / units.GB for n in counts]) for name in _TRAFFIC}
    figure = plots.curves(
        lines,
        finding,
        "tokens in a micro-batch (log scale)",
        "sent by a rank (GB, log scale)",
        log_x=2,
        log_y=True,
        notes=[(even, _sent(config, even, ranks)["ZeRO-3"] / units.GB, f"{even:,}")],
    )
    return View(finding, ("way", "sent", f"at {link.name}", "when"), rows, note, figure)
