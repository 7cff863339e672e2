"""Explorers: change one thing, see what it does to memory. Each has a static twin.

Each function returns an `Explorer`. Where a cell shows it, its twin, a table and a figure of the starting
point, is always there; under it come live controls where ipywidgets can be shown (not while grading, not
without a kernel). A change is answered at once, by closed forms; "Trace it" runs the same recipe on fake
tensors, in a process of its own, and puts formula and trace side by side.

Everything here works with ipywidgets 7.7 (Colab's) and 8.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import itertools
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from memlab import footprint, hardware, models, plots, recipe, units
from memlab.background import Background

Choices = Mapping[str, Any]


@dataclass(frozen=True)
class Control:
    """One thing to choose: its key in the choices, its label, (shown, value) pairs; sizes are on a slider."""

    key: str
    label: str
    options: tuple[tuple[str, Any], ...]
    slider: bool = False

    def shown(self, choices: Choices) -> str:
        """What is chosen, as the reader sees it."""
        return next(shown for shown, value in self.options if value == choices[self.key])


@dataclass(frozen=True)
class Step:
    """One training step of a model (a name) on a card, as the choices have it."""

    model: str
    recipe: recipe.Recipe
    gpu: str

    @property
    def footprint(self) -> footprint.Footprint:
        return _footprint(self.model, self.recipe, self.gpu)

    @property
    def capacity(self) -> int:
        return hardware.gpu(self.gpu).memory_bytes

    def finding(self) -> str:
        """The peak, its phase and what it leaves of the card."""
        peak = self.footprint.peak_bytes
        room = units.format_bytes(abs(self.capacity - peak))
        room += " free" if peak <= self.capacity else " too much"
        each = f" each of {self.recipe.world_size:,}" if self.recipe.world_size > 1 else ""
        where = plots.phase(self.footprint.peak_phase)
        return f"{self.model}: peak {units.format_bytes(peak)} in {where}, {room} on{each} {self.gpu}"

    def levers(self) -> str:
        """Which of the seven steps the recipe takes, and which are open."""
        r = self.recipe
        attends = isinstance(models.model(self.model), models.TransformerConfig)
        taken = {
            1: r.micro_batch == 1,
            2: r.compute_dtype != "fp32",
            3: r.accumulation > 1,
            4: r.checkpointing != "none",
            5: not attends or r.attention != "eager",
            6: r.zero_stage > 0 or r.tensor_parallel > 1,
            7: bool(r.offload),
        }
        if not attends:
            del taken[5]

        def listed(state: bool) -> str:
            return (
                ", ".join(f"{n} {_SEVEN[n]}" for n, is_taken in taken.items() if is_taken is state) or "none"
            )

        return (
            "Of the seven steps that make training fit (chapter 6 takes one after the other) it takes "
            f"{listed(True)}; open: {listed(False)}."
        )

    def note(self) -> str:
        with_what = " ".join(self.footprint.recipe.describe().split())
        with_what = re.sub(r"\b\d{4,}\b", lambda number: f"{int(number[0]):,}", with_what)
        return (
            f"One step of {self.model}: {with_what}. {self.levers()} Live tensors at its peak; the "
            "allocator's cache and the driver's context come on top."
        )


@lru_cache(maxsize=512)
def _footprint(model: str, steps: recipe.Recipe, gpu: str) -> footprint.Footprint:
    return footprint.footprint(model, steps, gpu)


#: The seven steps in their usual order, and the control that is each.
_SEVEN = {
    1: "micro-batch", 2: "mixed precision", 3: "accumulation", 4: "checkpointing", 5: "SDPA or flash",
    6: "sharding", 7: "offload",
}  # fmt: skip
_LEVER_OF = {
    "micro_batch": 1, "precision": 2, "accumulation": 3, "checkpointing": 4, "segment": 4, "attention": 5,
    "zero_stage": 6, "ranks": 6, "way": 6, "batch": 3, "offload": 7,
}  # fmt: skip
_NO_LEVER = {
    "model": "another model", "gpu": "another card", "sequence": "another job",
    "optimizer": "another optimizer, which changes training",
    "ranks": "data parallelism, which shares no memory",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """What an explorer says about one set of choices.

    finding, header, rows, note: the lesson of the chapter, with a table. change: what the last change did.
    now, before: the step and the one before the change. bars: more steps to compare, {label: {consumer:
    bytes}}; chosen: the label of the one chosen. log_bars: (label, value, value in words), to compare over
    powers of ten. draw: makes the figure of the static twin.
    """

    finding: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    draw: Callable[[], plots.Figure] | None = None
    change: str = ""
    now: Step | None = None
    before: Step | None = None
    bars: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    chosen: str = ""
    log_bars: tuple[tuple[str, float, str], ...] = ()

    @property
    def figure(self) -> plots.Figure | None:
        """The figure of the twin, drawn when it is asked for."""
        return self.draw() if self.draw else None

    def tables(self) -> list[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]]:
        """Header and rows: the consumers of the step and what the change did to each; the chapter's own."""
        found = []
        if self.now is not None:
            found.append(_consumer_table(self.now.footprint, self.before.footprint if self.before else None))
        if self.rows:
            found.append((self.header, self.rows))
        return found

    def status(self) -> str:
        """What to say when something changed: what it did, and what holds now."""
        said = [self.change, self.now.finding() if self.now else self.finding]
        return " ".join(text.rstrip(".") + "." for text in said if text)

    def html(self) -> str:
        """The static twin: tables and note. The finding is the title of its figure, where it has one."""
        parts = [] if self.draw else [f"<p><strong>{html.escape(self.finding)}</strong></p>"]
        parts += [_table(header, rows) for header, rows in self.tables()]
        if self.note:
            parts.append(f"<p>{html.escape(self.note)}</p>")
        return _unbroken("".join(parts))

    def step_html(self) -> str:
        """Live: the step's bars against its card, and its consumers; '' without a step."""
        if self.now is None:
            return ""
        drawn: dict[str, Any] = {"before": self.before.footprint} if self.before else {}
        drawn["now" if self.before else self.now.model] = self.now.footprint
        where = {label: f"in {plots.phase(held.peak_phase)}" for label, held in drawn.items()}
        bars = plots.html_bars(drawn, self.now.capacity, self.now.gpu, where)
        return bars + _table(*self.tables()[0])

    def lesson_html(self) -> str:
        """Live: the chapter's own finding with its bars and table, and the note."""
        parts = []
        if self.bars or self.log_bars or self.rows:
            parts.append(f"<p style='margin:0.8em 0 0.2em'><b>{html.escape(self.finding)}</b></p>")
        if self.bars and self.now is not None:
            parts.append(
                plots.html_bars(
                    self.bars, self.now.capacity, self.now.gpu, {self.chosen: "chosen"}, small=True
                )
            )
        if self.log_bars:
            parts.append(plots.html_log_bars(self.log_bars))
        if self.rows:
            parts.append(_table(self.header, self.rows))
        if self.note:
            parts.append(f"<p style='margin:0.6em 0'>{html.escape(self.note)}</p>")
        return "".join(parts)

    def __str__(self) -> str:
        lines = [self.finding]
        for header, rows in self.tables():
            table = [header, *rows]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += [
                "  ".join(
                    c.ljust(w) if i == 0 else c.rjust(w)
                    for i, (c, w) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
                for row in table
            ]
            lines.append("")
        return "\n".join([*lines, self.note]).rstrip()


#: Columns that a narrow page does without (see _STYLE).
_WIDE = (
    "before", "arithmetic", "bandwidth", "when", "micro-batches a step", "in", "parameters", "gradients",
    "optimizer states",
)  # fmt: skip


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    words = {plots.word(name): name for name in units.CONSUMERS}
    wide = ["memlab-wide" if cell in _WIDE else "" for cell in header]
    head = "".join(
        f"<th scope='col' class='{name}' style='text-align:{'right' if i else 'left'};padding:2px 4px'>"
        f"{html.escape(cell)}</th>"
        for i, (cell, name) in enumerate(zip(header, wide, strict=True))
    )
    body = "".join(
        "<tr>"
        + _row_name(first, words)
        + "".join(
            f"<td class='{name}' style='text-align:right;padding:2px 4px'>{html.escape(cell)}</td>"
            for cell, name in zip(rest, wide[1:], strict=True)
        )
        + "</tr>"
        for first, *rest in rows
    )
    return (
        "<table style='border-collapse:collapse;margin:0.4em 0;font-size:0.95em'>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row_name(name: str, words: Mapping[str, str]) -> str:
    """A row's first cell; a consumer's name keeps beside its swatch, on every line of it."""
    if name not in words:
        return f"<th scope='row' style='text-align:left;padding:2px 4px'>{html.escape(name)}</th>"
    first, space, rest = name.partition(" ")
    return (
        "<th scope='row' style='text-align:left;padding:2px 4px 2px calc(1.4em + 6px);text-indent:-1.4em'>"
        f"<span style='white-space:nowrap'>{plots.swatch(words[name])}{html.escape(first)}</span>"
        f"{space}{html.escape(rest)}</th>"
    )


def _consumer_table(
    now: footprint.Footprint, before: footprint.Footprint | None
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    held = {**now.consumers_at_peak(), "all": now.peak_bytes}
    if before is None:
        rows = tuple((plots.word(name), units.format_bytes(size)) for name, size in held.items())
        return ("consumer", "at the peak"), rows
    was = {**before.consumers_at_peak(), "all": before.peak_bytes}
    return ("at the peak", "before", "now", "change"), tuple(
        (
            plots.word(name), units.format_bytes(was[name]), units.format_bytes(size),
            _signed(size - was[name]),
        )
        for name, size in held.items()
    )  # fmt: skip


def _changed(controls: Sequence[Control], now: Choices, before: Choices | None) -> list[Control]:
    return [c for c in controls if before is not None and before[c.key] != now[c.key]]


def _change(controls: Sequence[Control], now: Choices, before: Choices | None) -> str:
    """Which controls moved, from what to what."""
    if before is None:
        return ""
    moved = _changed(controls, now, before)
    return ", ".join(f"{c.label} {c.shown(before)} → {c.shown(now)}" for c in moved) or "No change"


def _step_change(
    controls: Sequence[Control], now: Choices, before: Choices | None, step: Step, earlier: Step | None
) -> str:
    """What a change did to the peak, in words and signed bytes, and which of the seven steps it is."""
    if before is None or earlier is None:
        return ""
    new, old = step.footprint, earlier.footprint
    held, was = new.consumers_at_peak(), old.consumers_at_peak()
    most = max(held, key=lambda name: abs(held[name] - was[name]))
    difference = new.peak_bytes - old.peak_bytes
    said = f"{_change(controls, now, before)}: {_signed(difference)} at the peak"
    if held[most] != was[most]:
        said += f" ({plots.word(most)} {_signed(held[most] - was[most])})"
    if now.get("zero_stage") and step.recipe.world_size == 1:
        said += ": ZeRO shards over ranks, and there is one"
    for _, why in _limits(now).values():
        said += f": {why}"
    if old.peak_phase != new.peak_phase:
        said += f", which moves from {plots.phase(old.peak_phase)} to {plots.phase(new.peak_phase)}"
    moved = _changed(controls, now, before)
    if len(moved) != 1:
        return said + "."
    key, r = moved[0].key, step.recipe
    lever = _LEVER_OF.get(key)
    if key == "ranks" and not (r.zero_stage or r.tensor_parallel > 1):
        lever = None
    if key in ("batch", "ranks") and lever != 6 and r.micro_batch != earlier.recipe.micro_batch:
        lever = 1  # it takes a smaller micro-batch along
    if lever:
        return f"{said}. This is step {lever} of the seven, {_SEVEN[lever]}."
    what = _NO_LEVER.get(key, "another job")
    if key == "optimizer" and now[key][0] == before[key][0]:
        what = "the same update, carried out in another way"
    return f"{said}. This is {what}, none of the seven steps."


def _signed(size: int) -> str:
    return f"{_sign(size)}{units.format_bytes(abs(size))}"


def _sign(number: int) -> str:
    return "−" if number < 0 else "+" if number > 0 else "±"


class Explorer:
    """Choices, what follows from them, and the controls that change them.

    `show(now, before)` is a plain function: the view of the choices `now`; where `before` is given, it also
    says what the change from there did. A ValueError from it is shown in place of a view. `step` gives the
    training step of some choices, which can then be traced.
    """

    def __init__(
        self,
        show: Callable[[Choices, Choices | None], View],
        controls: Sequence[Control],
        start: Choices,
        step: Callable[[Choices], Step] | None = None,
    ) -> None:
        self.show, self.controls, self.start, self.step = show, tuple(controls), dict(start), step
        self.twin = show(self.start, None)

    def __str__(self) -> str:
        return str(self.twin)

    def quick(self, now: Choices, before: Choices | None) -> View | None:
        """The part of a view that is about the step alone, many times as fast; None without a step."""
        if self.step is None:
            return None
        try:
            step, earlier = self.step(now), self.step(before) if before is not None else None
            change = _step_change(self.controls, now, before, step, earlier)
        except ValueError:
            return None  # the whole view says what is wrong
        return View(step.finding(), change=change, now=step, before=earlier)

    def live(self) -> Any:
        """The controls and their answer as one ipywidgets box. Raises ImportError without ipywidgets."""
        return _Live(self).box

    def _ipython_display_(self) -> None:
        display = importlib.import_module("IPython.display").display
        display({"text/html": self.twin.html(), "text/plain": str(self.twin)}, raw=True)
        if self.twin.draw is not None:
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


#: ipywidgets gives the handle of a slider no name, reads out an index, lets a readout be edited and ignores
#: what is typed, and has no live region; a notebook in command mode takes arrows and letters from a control
#: (a cell further, a new cell). This mends the explorer that it stands in, with version 8 and with 7
#: (jQuery's handle). Elsewhere it does nothing.
_NAMES = """
(function begin(start, left) {
  var root = start.closest('.memlab-explorer');
  if (!root) {
    if (left) { setTimeout(function () { begin(start, left - 1); }, 50); }
    return;
  }
  function set(node, name, value) {
    if (node.getAttribute(name) !== value) { node.setAttribute(name, value); }
  }
  function mend() {
    root.querySelectorAll('.noUi-handle, .ui-slider-handle').forEach(function (handle) {
      var slider = handle.closest('.widget-slider, .widget-hslider');
      var label = slider && slider.querySelector('.widget-label');
      var readout = slider && slider.querySelector('.widget-readout');
      if (!label || !readout) { return; }
      var shown = readout.textContent.trim();
      set(handle, 'aria-label', label.textContent.trim());
      set(handle, 'aria-valuetext', shown);
      if (handle.classList.contains('ui-slider-handle')) {
        set(handle, 'role', 'slider');
        set(handle, 'aria-valuenow', String(parseFloat(shown.replace(/,/g, '')) || 0));
      }
    });
    root.querySelectorAll('.widget-readout').forEach(function (readout) {
      set(readout, 'contenteditable', 'false');
    });
    root.querySelectorAll('.memlab-status').forEach(function (node) { set(node, 'role', 'status'); });
    root.querySelectorAll('select, button, .noUi-handle').forEach(function (node) {
      set(node, 'data-lm-suppress-shortcuts', 'true');
    });
  }
  mend();
  new MutationObserver(mend).observe(root, {
    subtree: true, childList: true, characterData: true, attributes: true,
    attributeFilter: ['aria-valuetext', 'contenteditable']
  });
})(this, 100);
"""
_STYLE = """
.memlab-explorer td { white-space: nowrap; }
@media (max-width: 640px) {
  .memlab-explorer .memlab-wide { display: none; }
  .memlab-explorer table { font-size: 12px !important; }
  .memlab-explorer td { white-space: normal; }
}
"""
_PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


class _Live:
    """An explorer's widgets and what they remember."""

    def __init__(self, explorer: Explorer) -> None:
        widgets = importlib.import_module("ipywidgets")
        self.explorer = explorer
        self.valid: Choices = explorer.start  # the last choices that gave a view
        self.before: Choices | None = None  # where the control that moves now began to move
        self.moving = ""
        self.settling = False
        self.run: Background | None = None
        self.lock = threading.RLock()

        def text(value: str = "", name: str = "") -> Any:
            made = widgets.HTML(value=value, layout={"width": "auto", "margin": "2px 0", "max_width": "100%"})
            if name:
                made.add_class(name)
            return made

        script = html.escape(" ".join(_NAMES.split()), quote=True)
        names = widgets.HTML(
            value=f"<style>{_STYLE}</style><img alt='' width='1' src='{_PIXEL}' onload=\"{script}\">",
            layout={"height": "1px", "margin": "0", "overflow": "hidden"},
        )
        self.boxes = {control.key: self._control(widgets, control) for control in explorer.controls}
        self.status = text(_said("Change a control to see what it does."), "memlab-status")
        self.answer = text(_page(explorer.twin.step_html()), "memlab-answer")
        self.lesson = text(_page(explorer.twin.lesson_html()), "memlab-lesson")
        children = [
            widgets.Box(
                list(self.boxes.values()),
                layout={
                    "display": "grid",
                    "width": "auto",
                    "align_items": "center",
                    "grid_template_columns": "repeat(auto-fit, minmax(min(100%, 20em), 1fr))",
                },
            ),
            self.status,
            self.answer,
        ]
        if explorer.step is not None:
            self.button = widgets.Button(description="Trace it", icon="play")
            self.progress, self.traced = text(), text("", "memlab-status")
            self.result = text("", "memlab-traced")
            self.button.on_click(self._pressed)
            buttons = widgets.Box(
                [self.button, self.progress],
                layout={"display": "flex", "flex_flow": "row wrap", "align_items": "center", "margin": "0"},
            )
            children += [buttons, self.traced, self.result]
        self.box = widgets.VBox(
            [*children, self.lesson, names], layout={"width": "auto", "max_width": "60em"}
        )
        self.box.add_class("memlab-explorer")
        for key, box in self.boxes.items():
            box.observe(lambda _, key=key: self._moved(key), names="value")

    def _control(self, widgets: Any, control: Control) -> Any:
        kind = widgets.SelectionSlider if control.slider else widgets.Dropdown
        return kind(
            options=control.options,
            value=self.explorer.start[control.key],
            description=control.label,
            style={"description_width": "8em"},
            layout={"min_width": "0", "width": "auto"},
        )

    def _moved(self, key: str) -> None:
        with self.lock:
            if self.settling:
                return
            try:
                self._forget_trace()
                now = {name: box.value for name, box in self.boxes.items()}
                if key != self.moving:
                    self.before, self.moving = self.valid, key
                if (quick := self.explorer.quick(now, self.before)) is not None:
                    self.status.value = _said(quick.status())
                    self.answer.value = _page(quick.step_html())
                view = self.explorer.show(now, self.before)
                self.valid = self._settled(now)
                shown = (view.status(), view.step_html(), view.lesson_html())
            except ValueError as error:
                shown = (f"This can't be: {error}", "", "")
            except Exception as error:
                shown = (_failure(error), "", "")
            self.status.value = _said(shown[0])
            self.answer.value, self.lesson.value = _page(shown[1]), _page(shown[2])

    def _settled(self, now: Choices) -> Choices:
        """Moves back each slider that stands above what counts, to the next of its sizes."""
        settled = dict(now)
        for key, (most, _) in (_limits(now) if self.explorer.step is not None else {}).items():
            settled[key] = min(value for _, value in self.boxes[key].options if value >= most)
        self.settling = True
        try:
            for key, value in settled.items():
                if value != now[key]:
                    self.boxes[key].value = value
        finally:
            self.settling = False
        return settled

    # the trace

    def _trace(self) -> None:
        with self.lock:
            if self.run is not None:
                return
            self.result.value = ""
            try:
                assert self.explorer.step is not None
                step = self.explorer.step({name: box.value for name, box in self.boxes.items()})
                _ = step.footprint  # refuses what can't be
                self.run = Background(step.model, step.recipe, step.gpu, self._told, self._done)
            except Exception as error:
                line = str(error) if isinstance(error, ValueError) else _failure(error)
                self.traced.value = _said(f"Not traced: {line}")
                return
            self.tracing = step
            self.traced.value = _said(f"Tracing a step of {step.model} on fake tensors.")
            self._running(True)

    def _pressed(self, _: object) -> None:
        """One button for both, so that it keeps the keyboard's focus."""
        with self.lock:
            if self.run is None:
                self._trace()
            elif self.run.seconds > 0.3:  # else a double click
                self._cancel()

    def _running(self, runs: bool) -> None:
        self.button.description, self.button.icon = ("Cancel", "stop") if runs else ("Trace it", "play")
        if not runs:
            self.progress.value = ""

    def _told(self, fraction: float, stage: str) -> None:
        with self.lock:
            if self.run is not None:
                bar = (
                    f"<progress aria-label='Progress of the trace' max='1' value='{fraction:.2f}'></progress>"
                )
                self.progress.value = f"{bar} {html.escape(stage)}, {self.run.seconds:.0f} s"

    def _done(self, outcome: dict[str, Any]) -> None:
        with self.lock:
            if self.run is None:
                return
            self.run = None
            self._running(False)
            try:
                status, page = _traced(self.tracing, outcome)
            except Exception as error:
                status, page = _failure(error), ""
            self.traced.value, self.result.value = _said(status), _page(page)

    def _cancel(self, why: str = "Trace cancelled") -> None:
        with self.lock:
            run, self.run = self.run, None
            if run is not None:
                run.cancel()
                self._running(False)
                self.traced.value = _said(why)

    def _forget_trace(self) -> None:
        """A trace of earlier choices doesn't belong beside the new ones."""
        if self.explorer.step is not None:
            self.traced.value = self.result.value = ""
            self._cancel(why="Trace cancelled: a choice changed")


def _said(line: str) -> str:
    return _page(f"<b>{html.escape(line)}</b>") if line else ""


def _page(content: str) -> str:
    return f"<div style='line-height:1.45'>{_unbroken(content)}</div>" if content else ""


def _unbroken(content: str) -> str:
    """No line ends between a number and its unit."""
    return re.sub(r"(?<=\d) (?=([KMGT]i?)?B(/s)?\b|[mµn]?s\b)", "\u00a0", content)


def _failure(error: BaseException) -> str:
    return " ".join(f"The explorer failed: {type(error).__name__}: {error}".split())


def _traced(step: Step, outcome: Mapping[str, Any]) -> tuple[str, str]:
    """Status line and page of a trace's outcome, beside the closed form."""
    if "error" in outcome:
        return f"Not traced: {outcome['error']}", ""
    formula, peak = step.footprint, outcome["peak_bytes"]
    gap = formula.peak_bytes - peak
    apart = "equal to the byte" if not gap else f"{_signed(gap)} ({_sign(gap)}{abs(gap) / peak:.2%})"
    fits = "fits on" if peak <= step.capacity else "doesn't fit on"
    status = (
        f"Traced: peak {units.format_bytes(peak)} in {plots.phase(outcome['peak_phase'])}, "
        f"{fits} {step.gpu}; "
        f"formula {units.format_bytes(formula.peak_bytes)} in {plots.phase(formula.peak_phase)}, {apart}"
    )
    rows, reasons = [], []
    for name, computed, traced, words in outcome["rows"]:
        gap = computed - traced
        rows.append(
            (
                plots.word(name),
                units.format_bytes(computed),
                units.format_bytes(traced),
                _signed(gap) if gap else "equal",
            )
        )
        if gap:
            reason = f"{plots.word(name)}: {words.split('; not measured')[0]}"
            reasons.append(f"<li>{html.escape(reason)}</li>")
    note = (
        f"{outcome['events']:,} allocations and frees of {step.model}'s second step, by the rules of "
        f"{step.gpu}; {outcome['seconds']:.1f} s. A consumer's row is its own largest: the rows don't add up "
        "to the peak. The gap is formula − trace."
    )
    if step.recipe.master_dtype and step.recipe.zero_stage >= 2:
        note += (
            " The formula is ZeRO's: 16-bit shards beside fp32 masters; PyTorch's fully_shard, as traced, "
            "has the fp32 shards alone."
        )
    why = ""
    if reasons:
        listed = "".join(reasons)
        why = f"<details><summary>Where they differ, by tensors</summary><ul>{listed}</ul></details>"
    page = _table(("", "formula", "trace", "gap"), rows) + why + f"<p>{html.escape(note)}</p>"
    return status, page


def _names(names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, name) for name in names)


# -- what several explorers let you choose ---

_OPTIMIZERS = (
    ("SGD", ("sgd", "foreach")),
    ("SGD with momentum", ("momentum", "foreach")),
    ("AdamW, foreach", ("adamw", "foreach")),
    ("AdamW, fused", ("adamw", "fused")),
    ("AdamW, for-loop", ("adamw", "for-loop")),
    ("8-bit AdamW", ("adamw-8bit", "for-loop")),
    ("Adafactor", ("adafactor", "for-loop")),
)
_PRECISIONS = tuple(name for name in recipe.PRECISIONS if name != "fp16")  # it trains adapters only
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CHECKPOINTING = ("none", "selective", "every-2", "every-4", "full")
_STAGE_NAMES = (("none", 0), ("stage 1", 1), ("stage 2", 2), ("stage 3", 3))


def _sizes(key: str, label: str, values: Sequence[int], start: int | None = None, unit: str = "") -> Control:
    """A slider over whole numbers, the start among them."""
    wanted = sorted({*values, *([start] if start is not None else [])})
    return Control(key, label, tuple((f"{n:,}{unit}", n) for n in wanted), slider=True)


def _model_control(transformers: bool = False) -> Control:
    known = [
        n for n, c in models.MODELS.items() if not transformers or isinstance(c, models.TransformerConfig)
    ]
    return Control("model", "Model", _names(known))


def _card_control() -> Control:
    return Control("gpu", "Card", _names(tuple(hardware.GPUS)))


def _context(config: models.TransformerConfig | models.ConvConfig) -> int:
    return config.context if isinstance(config, models.TransformerConfig) else 1024


def _limits(choices: Choices) -> dict[str, tuple[int, str]]:
    """What is chosen larger than it can be: the most that counts, and why."""
    config, found = models.model(choices["model"]), {}
    transformer = isinstance(config, models.TransformerConfig)
    if isinstance(config, models.TransformerConfig) and config.positions == "learned":
        found["sequence"] = config.context, f"{config.name} has {config.context:,} positions and no more"
    if transformer:
        found["segment"] = config.blocks, f"{config.name} has {config.blocks} blocks and no more"
    if "batch" in choices:
        share = _share(choices)
        whole = "the batch" if choices.get("ranks", 1) == 1 else "a card's share of the batch"
        found["micro_batch"] = share, f"a micro-batch is at most {whole}, {_many(share, 'sample')}"
    return {key: limit for key, limit in found.items() if choices.get(key, 0) > limit[0]}


def _limited(choices: Choices) -> Choices:
    """The choices with each at most at its limit: what is computed."""
    return {**choices, **{key: most for key, (most, _) in _limits(choices).items()}}


def _share(choices: Choices) -> int:
    """Samples of the batch for each card, one at least."""
    return int(-(-choices["batch"] // choices.get("ranks", 1)))


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _recipe(choices: Choices, **fixed: Any) -> recipe.Recipe:
    """The recipe of the choices: what isn't chosen is at its default, or `fixed`.

    What is chosen counts up to its limit; a convnet has neither sequence nor attention; one rank has nobody
    to share with, whatever the stage of ZeRO.
    """
    config, choices = models.model(choices["model"]), _limited(choices)
    taken = {
        key: choices[key]
        for key in (
            "precision",
            "micro_batch",
            "sequence",
            "checkpointing",
            "attention",
            "zero_stage",
            "offload",
        )
        if key in choices
    }
    if "optimizer" in choices:
        taken["optimizer"], taken["optimizer_impl"] = choices["optimizer"]
    if "ranks" in choices:
        taken["world_size"] = choices["ranks"]
    taken |= fixed
    if taken.get("world_size", 1) == 1:
        taken.pop("zero_stage", None)
    if not isinstance(config, models.TransformerConfig):
        taken.pop("sequence", None)
        taken.pop("attention", None)
    return recipe.Recipe(**taken)


def _step(choices: Choices, **fixed: Any) -> Step:
    return Step(choices["model"], _recipe(choices, **fixed), choices["gpu"])


def _step_view(controls: Sequence[Control], now: Choices, before: Choices | None) -> View:
    """The view of an explorer that is about the step itself."""
    step, earlier = _step(now), _step(before) if before is not None else None
    finding = step.finding()
    return View(
        finding,
        note=step.note(),
        draw=lambda: plots.consumers({step.model: step.footprint}, capacity=step.capacity, title=finding),
        change=_step_change(controls, now, before, step, earlier),
        now=step,
        before=earlier,
    )


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
        _card_control(),
        Control("size", "Bytes to move", _names(sizes), slider=True),
        Control("path", "Path", _names((_OWN, *hardware.LINKS))),
    ]
    start = {"gpu": card.name, "size": size, "path": chosen}
    return Explorer(lambda now, before: _levels_view(controls, now, before), controls, start)


def _levels_view(controls: Sequence[Control], now: Choices, before: Choices | None = None) -> View:
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
    change = _levels_change(controls, now, before, seconds[chosen]) if before is not None else ""
    timed = [(label, seconds[label]) for label, _ in paths]
    header = ("path", "bandwidth", f"time for {amount}", f"against {card.memory_kind}")
    return View(
        finding, header, rows, note,
        lambda: plots.times(timed, finding, {chosen: "the path chosen"}),
        change=change,
        log_bars=tuple(
            (label + (", the path chosen" if label == chosen else ""), value, plots.seconds(value))
            for label, value in timed
        ),
    )  # fmt: skip


def _levels_change(controls: Sequence[Control], now: Choices, before: Choices, seconds: float) -> str:
    card = hardware.gpu(before["gpu"])
    rate = card.bandwidth if before["path"] == _OWN else hardware.link(before["path"]).bandwidth
    was = units.parse_bytes(before["size"]) / rate
    return f"{_change(controls, now, before)}: {plots.seconds(was)} → {plots.seconds(seconds)}."


def one_step(model: str = "gpt2", gpu: str = "T4") -> Explorer:
    """Does one training step of `model` fit on `gpu`? The few controls that need no theory, by closed forms.

    Starts in fp32, AdamW, micro-batch 1, the model's own context. Raises ValueError for a model or a card
    that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    controls = [
        _model_control(),
        _card_control(),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES),
        _sizes("sequence", "Sequence", _LENGTHS, _context(config)),
        Control("precision", "Precision", _names(_PRECISIONS[:3])),
    ]
    start = {
        "model": config.name, "gpu": card.name, "micro_batch": 1, "sequence": _context(config),
        "precision": "fp32",
    }  # fmt: skip
    return Explorer(lambda now, before: _step_view(controls, now, before), controls, start, _step)


# -- chapter 2: the consumers ---


def four_consumers(model: str = "gpt2", gpu: str = "T4") -> Explorer:
    """What one training step of `model` holds at its peak, against the capacity of `gpu`.

    Starts from the default recipe (AdamW foreach, micro-batch 1, the model's own context), in amp-bf16, or in
    amp-fp16 on a card without bf16. Raises ValueError for a model or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    controls = [
        _model_control(),
        _card_control(),
        Control("precision", "Precision", _names(_PRECISIONS)),
        Control("optimizer", "Optimizer", _OPTIMIZERS),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES),
        _sizes("sequence", "Sequence", _LENGTHS, _context(config)),
        Control("checkpointing", "Checkpointing", _names(_CHECKPOINTING)),
        Control("attention", "Attention", _names(recipe.ATTENTION)),
        Control("zero_stage", "ZeRO", _STAGE_NAMES),
        _sizes("ranks", "Ranks", _RANKS),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "precision": "amp-bf16" if "bf16" in card.dtypes else "amp-fp16",
        "optimizer": ("adamw", "foreach"),
        "micro_batch": 1,
        "sequence": _context(config),
        "checkpointing": "none",
        "attention": "sdpa",
        "zero_stage": 0,
        "ranks": 1,
    }

    def show(now: Choices, before: Choices | None = None) -> View:
        return _step_view(controls, now, before)

    return Explorer(show, controls, start, _step)


# -- chapter 3: how long a checkpointed segment ---


def checkpoint_segments(model: str = "llama2-7b", gpu: str = "A100-80GB") -> Explorer:
    """Activations and peak of a step of `model` by the number of blocks in a checkpointed segment.

    Starts from weights, gradients and moments in bf16 and one sequence of the model's own length. Raises
    ValueError for a model without blocks (a convnet's aren't equal) or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if not isinstance(config, models.TransformerConfig):
        raise ValueError(f"{config.name} has no row of equal blocks; choose a transformer, such as gpt2")
    lengths = (("none", 0), *((f"{n} block{'s' * (n > 1)}", n) for n in _SEGMENTS))
    controls = [
        _model_control(transformers=True),
        _card_control(),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES, 4),
        Control("segment", "Segment", lengths, slider=True),
        Control("attention", "Attention", _names(("sdpa", "eager"))),
        Control("optimizer", "Optimizer", _OPTIMIZERS),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "micro_batch": 4,
        "segment": 0,
        "attention": "sdpa",
        "optimizer": ("adamw", "fused"),
    }

    def show(now: Choices, before: Choices | None = None) -> View:
        return _segments_view(controls, now, before)

    return Explorer(show, controls, start, _segments_step)


_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96)


def _segments_step(choices: Choices, segment: int | None = None) -> Step:
    length = _limited(choices)["segment"] if segment is None else segment
    return _step(choices, precision="bf16", checkpointing=f"every-{length}" if length else "none")


def _segmented(length: int) -> str:
    return f"{length} a segment:" if length else "no segments:"


def _segments_view(controls: Sequence[Control], now: Choices, before: Choices | None = None) -> View:
    config, card = models.model(now["model"]), hardware.gpu(now["gpu"])
    assert isinstance(config, models.TransformerConfig)
    lengths = [n for n in _SEGMENTS if n < config.layers] + [config.layers]
    found = {n: _segments_step(now, n).footprint for n in lengths}
    plain = _segments_step(now, 0).footprint
    kept = {n: f.consumer_peaks()["activations"] for n, f in found.items()}
    plain_kept = plain.consumer_peaks()["activations"]
    best = min(lengths, key=kept.__getitem__)
    peak = found[best]
    fits = "fits" if peak.peak_bytes <= card.memory_bytes else "doesn't fit"
    finding = (
        f"{config.name}: {units.format_bytes(plain_kept)} of activations become "
        f"{units.format_bytes(kept[best])} with {best} block{'s' if best > 1 else ''} a segment"
    )
    rows = []
    for n, f, most in ((0, plain, plain_kept), *((n, found[n], kept[n]) for n in lengths)):
        label = "none" if not n else f"{n}, the whole model" if n == config.layers else str(n)
        cells = (units.format_bytes(most), units.format_bytes(f.peak_bytes), f.peak_phase)
        rows.append((label, *cells, "1.33" if n else "1.00"))
    note = (
        f"With {best} the step {fits} in {units.format_bytes(card.memory_bytes)}. Activations at their own "
        "largest moment; the peak is that of all live tensors. Arithmetic: a backward counts as two forwards."
    )
    step, earlier = _segments_step(now), _segments_step(before) if before is not None else None

    def draw() -> plots.Figure:
        lines = {
            "activations": (lengths, list(kept.values())),
            "peak of the step": (lengths, [f.peak_bytes for f in found.values()]),
            "activations without checkpointing": ([lengths[0], lengths[-1]], [plain_kept] * 2),
        }
        return plots.curves(
            lines, finding, "blocks in a checkpointed segment (log scale)", "live bytes", in_bytes=True,
            log_x=2,
        )  # fmt: skip

    header = ("blocks a segment", "activations at most", "peak of the step", "in", "arithmetic")
    return View(
        finding, header, tuple(rows), f"{step.note()} {note}", draw,
        change=_step_change(controls, now, before, step, earlier), now=step, before=earlier,
        chosen=_segmented(_limited(now)["segment"]),
        bars={
            _segmented(n): f.consumers_at_peak() for n, f in ((0, plain), *found.items())
        },
    )  # fmt: skip


# -- chapter 4: what each stage of ZeRO leaves ---

#: Bytes per parameter of (parameters, gradients, optimizer_states).
_STATES = (("16 bit: 2 + 2 + 12", (2, 2, 12)), ("autocast: 4 + 4 + 8", (4, 4, 8)))
_STAGES = ("none", "stage 1", "stage 2", "stage 3")


def zero_stages(model: str = "llama2-70b", gpu: str = "A100-80GB", ranks: int = 8) -> Explorer:
    """A step on each of N ranks; what parameters, gradients and AdamW's states take there, by stage of ZeRO.

    Starts in stage 3, 16 bit with an fp32 master, one checkpointed sequence a rank. Raises ValueError for a
    model or a card that isn't known, or for less than one rank.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if ranks < 1:
        raise ValueError(f"a world has at least one rank, not {ranks}")
    controls = [
        _model_control(),
        _card_control(),
        _sizes("ranks", "Ranks", _RANKS, ranks),
        Control("zero_stage", "ZeRO", _STAGE_NAMES),
        Control("each", "Training", _STATES),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES),
        Control("checkpointing", "Checkpointing", _names(_CHECKPOINTING)),
    ]
    start = {
        "model": config.name, "gpu": card.name, "ranks": ranks, "zero_stage": 3, "each": _STATES[0][1],
        "micro_batch": 1, "checkpointing": "full" if config.blocks else "none",
    }  # fmt: skip

    def show(now: Choices, before: Choices | None = None) -> View:
        return _stages_view(controls, now, before)

    return Explorer(show, controls, start, _stages_step)


def _stages_step(choices: Choices) -> Step:
    precision = "bf16-master"
    if choices["each"] == _STATES[1][1]:
        precision = "amp-bf16" if "bf16" in hardware.gpu(choices["gpu"]).dtypes else "amp-fp16"
    return _step(choices, precision=precision)


def _stage_bytes(parameters: int, ranks: int, stage: int, each: tuple[int, int, int]) -> dict[str, int]:
    first_sharded = {"parameters": 3, "gradients": 2, "optimizer_states": 1}
    return {
        name: -(-parameters * size // (ranks if stage >= first else 1))
        for (name, first), size in zip(first_sharded.items(), each, strict=True)
    }


def _gib(size: int) -> str:
    return f"{size / units.GIB:,.2f} GiB"


def _stages_view(controls: Sequence[Control], now: Choices, before: Choices | None = None) -> View:
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
    header = ("ZeRO", *(plots.word(name) for name in held["none"]), "all", "of unsharded")
    step, earlier = _stages_step(now), _stages_step(before) if before is not None else None
    return View(
        finding, header, rows, f"{note} {step.note()}",
        lambda: plots.consumers(held, capacity=card.memory_bytes, title=finding, what="states of one rank"),
        change=_step_change(controls, now, before, step, earlier), now=step, before=earlier,
        chosen=f"states, {_STAGES[step.recipe.zero_stage]}:",
        bars={f"states, {name}:": row for name, row in held.items()},
    )  # fmt: skip


# -- chapter 5: the largest micro-batch ---


def micro_batches(model: str = "gpt2", gpu: str = "RTX-4090", batch: int = 256) -> Explorer:
    """The largest micro-batch of `model` that fits on `gpu`, and how often to accumulate it, by closed forms.

    batch: samples for one optimizer step. Raises ValueError for a model or a card that isn't known.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    controls = [
        _model_control(),
        _card_control(),
        _sizes("batch", "Batch", (32, 64, 128, 256, 512, 1024), batch),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES),
        _sizes("sequence", "Sequence", _LENGTHS, _context(config)),
        Control("precision", "Precision", _names(_PRECISIONS)),
        Control("attention", "Attention", _names(recipe.ATTENTION)),
        Control("checkpointing", "Checkpointing", _names(("none", "selective", "full"))),
    ]
    start = {
        "model": config.name,
        "gpu": card.name,
        "batch": batch,
        "micro_batch": 1,
        "sequence": _context(config),
        "precision": "fp32",
        "attention": "eager",
        "checkpointing": "none",
    }

    def show(now: Choices, before: Choices | None = None) -> View:
        return _micro_batch_view(controls, now, before)

    return Explorer(show, controls, start, _accumulated)


def _accumulated(choices: Choices, micro_batch: int | None = None) -> Step:
    """Two micro-batches stand for all: from the second on, the gradients are there in the forward."""
    size = _limited(choices)["micro_batch"] if micro_batch is None else micro_batch
    turns = -(-choices["batch"] // (size * choices.get("ranks", 1)))
    return _step({**choices, "micro_batch": size}, accumulation=min(turns, 2))


def _samples(choices: Choices) -> str:
    """How the batch is worked off, in words."""
    ranks, size, batch = choices.get("ranks", 1), _limited(choices)["micro_batch"], choices["batch"]
    turns = -(-batch // (size * ranks))
    said = f"{turns:,} micro-batch{'es' if turns > 1 else ''} of {size:,}" + (
        f" on each of {ranks:,} cards" if ranks > 1 else ""
    )
    said += f": {_many(turns * size * ranks, 'sample')} a step"
    said += f", more than the batch of {batch:,}." if turns * size * ranks > batch else "."
    return said + (" Two stand for all: the peak is the same." if turns > 2 else "")


def _micro_batch_peak(now: Choices, micro_batch: int) -> int:
    return _accumulated(now, micro_batch).footprint.peak_bytes


def _largest_micro_batch(now: Choices) -> int:
    """Samples; 0 if not one fits. A whole batch at once needs no gradients in its forward."""
    capacity = hardware.gpu(now["gpu"]).memory_bytes
    if _micro_batch_peak(now, now["batch"]) <= capacity:
        return int(now["batch"])
    low, high = 0, now["batch"]  # low fits, high doesn't: memory grows with the micro-batch
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _micro_batch_peak(now, middle) <= capacity else (low, middle)
    return int(low)


def _fitting(samples: int) -> str:
    return f"{_many(samples, 'sample')} fit{'s' if samples == 1 else ''}"


def _micro_batch_view(controls: Sequence[Control], now: Choices, before: Choices | None) -> View:
    card, batch, chosen = hardware.gpu(now["gpu"]), now["batch"], _limited(now)["micro_batch"]
    step, earlier = _accumulated(now), _accumulated(before) if before is not None else None
    largest = _largest_micro_batch(now)
    sizes = sorted({chosen, *(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= batch)})
    held = {n: _accumulated(now, n).footprint for n in sizes}
    rows = []
    for n, found in held.items():
        room = card.memory_bytes - found.peak_bytes
        fits = "fits" if room >= 0 else f"{units.format_bytes(-room)} too much"
        rows.append((f"{n:,}", units.format_bytes(found.peak_bytes), f"{-(-batch // n):,}", fits))
    finding = f"{now['model']} on {card.name}: not even one sample fits"
    if largest:
        times = -(-batch // largest)
        takes = "fits at once" if times == 1 else f"takes {times:,} micro-batches"
        finding = f"{now['model']} on {card.name}: {_fitting(largest)}, a batch of {batch:,} {takes}"
    note = f"{step.note()} {_samples(now)} Gradients are kept between micro-batches."
    if before is not None:
        note = f"Samples that fit: {_largest_micro_batch(before):,} → {largest:,}. {note}"

    def draw() -> plots.Figure:
        return plots.curves(
            {"peak of the step": (sizes, [found.peak_bytes for found in held.values()])},
            f"{_fitting(largest)} on {card.name}",
            "micro-batch (samples)",
            "live tensors at the peak",
            in_bytes=True,
            budget=card.memory_bytes,
        )

    header = ("micro-batch", "peak", "micro-batches a step", "on the card")
    return View(
        finding, header, tuple(rows), note, draw,
        change=_step_change(controls, now, before, step, earlier), now=step, before=earlier,
        chosen=f"micro-batch {chosen:,}:",
        bars={f"micro-batch {n:,}:": found.consumers_at_peak() for n, found in held.items()},
    )  # fmt: skip


# -- chapter 6: seven steps ---

_OFFLOADS = (
    ("nothing", ()),
    ("optimizer states", ("optimizer_states:cpu",)),
    ("activations", ("activations:cpu",)),
)


def seven_steps(
    model: str = "llama2-7b", gpu: str = "A100-80GB", cards: int = 8, batch: int = 32
) -> Explorer:
    """A step with every lever; the seven in their usual order, by closed forms: each one's peak on a card.

    It starts from fp32 with eager attention. batch: samples of one optimizer step on all cards together.
    Raises ValueError for a model or a card that isn't known, or for less than one card.
    """
    config, card = models.model(model), hardware.gpu(gpu)
    if cards < 1 or batch < cards:
        raise ValueError(f"give at least one card and one sample for each, not {cards} and {batch}")
    each = max(1, batch // cards)
    controls = [
        _model_control(),
        _card_control(),
        _sizes("ranks", "Cards", _RANKS, cards),
        _sizes("batch", "Batch", (8, 32, 128, 256, 1024), batch),
        _sizes("sequence", "Sequence", (*_LENGTHS, 200), _context(config)),
        Control("optimizer", "Optimizer", _OPTIMIZERS),
        _sizes("micro_batch", "1 Micro-batch", _MICRO_BATCHES, each),
        Control("precision", "2 Precision", _names(_PRECISIONS)),
        Control("checkpointing", "4 Checkpoints", _names(_CHECKPOINTING)),
        Control("attention", "5 Attention", _names(recipe.ATTENTION)),
        Control("zero_stage", "6 ZeRO", _STAGE_NAMES),
        Control("offload", "7 Offload", _OFFLOADS),
    ]
    start = {
        "model": config.name, "gpu": card.name, "ranks": cards, "batch": batch,
        "sequence": _context(config), "optimizer": ("adamw", "foreach"), "micro_batch": each,
        "precision": "fp32", "checkpointing": "none", "attention": "eager", "zero_stage": 0, "offload": (),
    }  # fmt: skip

    def show(now: Choices, before: Choices | None = None) -> View:
        return _seven_view(controls, now, before)

    return Explorer(show, controls, start, _accumulated)


def _seven_recipes(now: Choices) -> dict[str, recipe.Recipe]:
    """From fp32 and eager attention on: what each of the seven steps changes, the ones before it included."""
    cards = now["ranks"]
    each = max(1, now["batch"] // cards)
    held = _recipe(
        {key: now[key] for key in ("model", "sequence", "optimizer", "ranks")},
        precision="fp32", micro_batch=each, attention="eager",
    )  # fmt: skip
    chain = {"as it is": held}

    def then(name: str, **changes: Any) -> None:
        chain[name] = list(chain.values())[-1].replace(**changes)

    then("1 micro-batch of 1", micro_batch=1)
    then("2 bf16 autocast", precision="amp-bf16" if "bf16" in hardware.gpu(now["gpu"]).flops else "amp-fp16")
    then("3 accumulation", accumulation=min(each, 2))  # two stand for all
    then("4 checkpoints", checkpointing="full" if models.model(now["model"]).blocks else "none")
    then("5 SDPA", attention="sdpa")
    then("6 ZeRO-3", zero_stage=3 if cards > 1 else 0)
    then("7 states on the host", offload=("optimizer_states:cpu",))
    return chain


def _seven_view(controls: Sequence[Control], now: Choices, before: Choices | None = None) -> View:
    config, card = models.model(now["model"]), hardware.gpu(now["gpu"])
    chosen, earlier = _accumulated(now), _accumulated(before) if before is not None else None
    steps = {name: _footprint(config.name, each, card.name) for name, each in _seven_recipes(now).items()}
    peaks = {name: step.peak_bytes for name, step in steps.items()}
    fitting = next((name for name, size in peaks.items() if size <= card.memory_bytes), None)
    many = f"{now['ranks']:,} x {card.name}" if now["ranks"] > 1 else card.name
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
    names = list(peaks)
    changes = [(b, peaks[b] - peaks[a]) for a, b in itertools.pairwise(names)]
    changed = _step_change(controls, now, before, chosen, earlier)
    note = f"{_samples(now)} The table takes the seven steps one after the other, each with those before it."
    return View(
        finding, ("step", "peak", "change", "in", "on the card"), tuple(rows), f"{chosen.note()} {note}",
        lambda: plots.waterfall(("as it is", peaks["as it is"]), changes, card.memory_bytes, finding),
        change=changed, now=chosen, before=earlier,
        bars={f"{name}:": step.consumers_at_peak() for name, step in steps.items()},
    )  # fmt: skip


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
    links = tuple(n for n, link in hardware.LINKS.items() if "GPU" in link.connects)
    controls = [
        _model_control(transformers=True),
        _card_control(),
        _sizes("ranks", "Ranks", (2, 4, 8, 16, 32, 64), ranks),
        _sizes("micro_batch", "Micro-batch", _MICRO_BATCHES),
        Control("way", "Way", _WAYS),
        Control("checkpointing", "Checkpointing", _names(("none", "selective", "full"))),
        Control("link", "Link", _names(links)),
    ]
    start = {
        "model": config.name, "gpu": "A100-80GB", "ranks": ranks, "micro_batch": 1, "way": "ZeRO-3",
        "checkpointing": "full", "link": "NVLink3",
    }  # fmt: skip

    def show(now: Choices, before: Choices | None = None) -> View:
        return _traffic_view(controls, now, before)

    return Explorer(show, controls, start, _way_step)


_WAYS = (("ZeRO-3", "ZeRO-3"), ("tensor parallel", "tensor parallel"), ("data parallel", "data parallel"))


def _way_step(choices: Choices) -> Step:
    """On all ranks, 16 bit with an fp32 master."""
    fixed: dict[str, Any] = {"precision": "bf16-master", "world_size": choices["ranks"]}
    if choices["way"] == "tensor parallel":
        fixed["tensor_parallel"] = choices["ranks"]
    elif choices["way"] == "ZeRO-3":
        fixed["zero_stage"] = 3
    return _step(choices, **fixed)


def _step_or_why(choices: Choices) -> tuple[Step | None, str]:
    """Some ranks can't split some models: the rest of the view still holds."""
    try:
        step = _way_step(choices)
        _ = step.footprint
    except ValueError as error:
        return None, f"No step to draw: {error}. "
    return step, ""


def _sent(config: models.TransformerConfig, tokens: int, ranks: int) -> dict[str, int]:
    activation, weights = 2 * tokens * config.hidden, 2 * config.parameter_count  # bytes
    sums = 4 * 2 * activation * config.layers
    ring = (sums * (ranks - 1) // ranks, 3 * weights * (ranks - 1) // ranks, 2 * activation)
    return dict(zip(_TRAFFIC, ring, strict=True))


def _traffic_view(controls: Sequence[Control], now: Choices, before: Choices | None = None) -> View:
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
    step, why = _step_or_why(now)
    earlier = _step_or_why(before)[0] if before is not None else None
    change = _change(controls, now, before)
    if step is not None and earlier is not None:
        change = _step_change(controls, now, before, step, earlier)
    note = why + (f"{step.note()} " if step else "") + note
    if change and before is not None:
        note = f"{_change(controls, now, before)}. {note}"
    counts = sorted({2**i for i in range(9, 19)} | {tokens})

    def draw() -> plots.Figure:
        lines = {
            name: (counts, [_sent(config, n, ranks)[name] / units.GB for n in counts]) for name in _TRAFFIC
        }
        return plots.curves(
            lines,
            finding,
            "tokens in a micro-batch (log scale)",
            "sent by a rank (GB, log scale)",
            log_x=2,
            log_y=True,
            notes=[(even, _sent(config, even, ranks)["ZeRO-3"] / units.GB, f"{even:,}")],
        )

    header = ("way", "sent", f"at {link.name}", "when")
    return View(
        finding, header, rows, note, draw, change=change, now=step, before=earlier if step else None,
        log_bars=tuple((f"{name}, sent", size, units.format_gb(size)) for name, size in sent.items()),
    )  # fmt: skip
