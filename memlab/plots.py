"""The figures of the course, with the same colour for a consumer everywhere.

Each function returns a `Figure` of its own: it shows itself once as the last line of a cell or through
`display`, it doesn't touch pyplot, and it carries a text alternative (`figure.memlab_alt`) that goes into the
PNG, the notebook and its HTML. Bytes go in; the axes carry KiB, MiB or GiB, whichever reads best.
"""

from __future__ import annotations

import base64
import html
import importlib
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MplFigure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from memlab import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memlab.footprint import Footprint
    from memlab.report import Comparison
    from memlab.trace import Trace

#: One colour per consumer: the hues of Okabe and Ito (2008, jfly.uni-koeln.de/color), the lightness of four
#: of them moved so that all five differ in grey too (a test holds the gaps of CIE lightness above 10).
COLOURS = {
    "parameters": "#00426B",
    "gradients": "#E69F00",
    "optimizer_states": "#007052",
    "activations": "#9AD3F5",
    "temporaries": "#C9689E",
}
INK, FAINT, LIMIT = "#222222", "#8A8A8A", "#B03A00"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "figure.titlesize": 12.5,
    "figure.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
}
_TOTAL, _LESS, _MORE = "#555555", "#56B4E9", "#D55E00"  # a waterfall's sums, what is freed, what is added
#: Colour and dash of a line, in order: dark, bright and middle hues in turn (Okabe and Ito's).
_LINES: tuple[tuple[str, Any], ...] = (
    ("#00426B", "-"),
    ("#D55E00", (0, (5, 1.6))),
    ("#009E73", (0, (1.2, 1.2))),
    ("#56B4E9", (0, (7, 1.5, 1.2, 1.5))),
    ("#C9689E", (0, (3, 1, 1, 1, 1, 1))),
)
#: A pattern over each colour in HTML, so that consumers differ for who sees colours otherwise, too.
_HATCHES = {
    "parameters": "",
    "gradients": "repeating-linear-gradient(45deg,rgba(0,0,0,.28) 0 2px,transparent 2px 7px)",
    "optimizer_states": "repeating-linear-gradient(90deg,rgba(255,255,255,.35) 0 2px,transparent 2px 8px)",
    "activations": "repeating-linear-gradient(-45deg,rgba(0,66,107,.35) 0 2px,transparent 2px 8px)",
    "temporaries": "repeating-linear-gradient(0deg,rgba(0,0,0,.28) 0 2px,transparent 2px 6px)",
}
_FILLS = (0.0, 0.45, 1.0)  # how much of its colour a column of a comparison has
_SHORT = {"setup": "", "forward": "fwd", "backward": "bwd", "optimizer": "opt"}  # where a phase is brief
_POINTS = 1000  # a longer trace is sampled: a notebook shows the plot on fewer pixels than this


class Figure(MplFigure):
    """A matplotlib figure that shows itself in a notebook without pyplot, with its text alternative."""

    memlab_alt: str = ""

    def png(self) -> bytes:
        """The PNG as shown, the text alternative in its 'Description'."""
        buffer = io.BytesIO()
        canvas: Any = FigureCanvasAgg(self)
        canvas.print_png(buffer, metadata={"Description": self.memlab_alt})  # savefig would lay it out twice
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        # Not _repr_png_: the inline backend registers its own printer for figures, which drops the text.
        bundle = {"image/png": base64.b64encode(self.png()).decode("ascii"), "text/plain": self.memlab_alt}
        # A narrow notebook scrolls a figure sideways: scaled to its width, the labels couldn't be read.
        metadata = {"image/png": {"alt": self.memlab_alt, "unconfined": True}}
        importlib.import_module("IPython.display").display(bundle, metadata=metadata, raw=True)


def timeline(trace: Trace, budget: int | None = None, title: str | None = None) -> Figure:
    """Live bytes by consumer over the allocations and frees of a step, phases and peak marked.

    `budget` draws the bytes that there are. A long trace is drawn from samples that keep every maximum.
    Raises ValueError for an empty trace.
    """
    if not len(trace):
        raise ValueError("timeline() has nothing to draw: the trace holds no event")
    line = trace.timeline(_POINTS if len(trace) > 2 * _POINTS else None)
    x = np.asarray(line.events)
    first = min(trace.before, len(trace) - 1)
    step = slice(min(int(np.searchsorted(x, first)), len(x) - 1), None)  # without what was alive before it
    x, last = x[step] - first, len(trace) - first
    peak, where = trace.peak_bytes, phase(trace.peak_phase)
    at_peak = trace.consumers_at_peak()
    peak_x = max(trace.peak_event - first, 0)
    near = budget is not None and budget <= 3 * peak
    height = max(peak, budget if budget is not None and near else 0)
    scale, unit = _unit(min(peak, budget) if budget is not None and near else peak)

    with _figure(7, 4) as figure:
        ax = figure.subplots()
        edges = np.append(x, last)
        base = np.zeros(len(edges))
        for name in units.CONSUMERS:
            values = np.asarray(line.consumers[name])[step] / scale
            top = base + np.append(values, values[-1])
            ax.fill_between(edges, base, top, step="post", color=COLOURS[name], linewidth=0)
            base = top
        ax.step(edges, base, where="post", color=INK, linewidth=0.7)
        top_y = height / scale
        ax.set_ylim(0, top_y * 1.26 or 1)
        ax.set_xlim(0, last)
        begun = False
        for start, stop, name in trace.spans():
            start, stop = max(start - first, 0), stop - first
            if 0 < start < stop:
                ax.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
            begun = begun or name != "setup"
            shown = "end" if begun and name == "setup" else name  # what follows the step isn't its set-up
            room = (stop - start) / last  # a character takes 0.014 of the width
            label = next((n for n in (shown, _SHORT[name]) if room >= 0.014 * len(n) + 0.01), "")
            if label:
                ax.text((start + stop) / 2, top_y * 1.24, label, ha="center", va="top", fontsize=10.5)
        late = peak_x > last / 2
        _peak(ax, peak_x, peak / scale, f"peak {units.format_bytes(peak)}", late)
        limit = ""
        if budget is not None:
            limit = f" The budget is {units.format_bytes(budget)}."
            _limit(ax, budget / scale if near else None, f"budget {units.format_bytes(budget)}", left=late)
        largest = max(units.CONSUMERS, key=at_peak.__getitem__)
        share = at_peak[largest] / peak if peak else 0.0
        heading = title or f"Peak {units.format_bytes(peak)} in {where}, {share:.0%} {word(largest)}"
        _finish(ax, heading, "allocations and frees of the step, in order", f"live tensors ({unit})")
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.grid(axis="y")
        _legend(figure, _drawn(trace))
        told = f"At the peak, in {where}: {_listed(at_peak)}.{limit}"
        figure.memlab_alt = f"{heading}. Live memory of one step, stacked by consumer. {told}"
    return figure


def timelines(traces: Mapping[str, Trace], title: str) -> Figure:
    """Several steps side by side on one scale of bytes: what shrinks from one to the next and what doesn't.

    Each label -> trace is drawn as `timeline` draws it. Raises ValueError for no trace, more than three, or
    an empty one.
    """
    if not 0 < len(traces) <= 3 or not all(len(trace) for trace in traces.values()):
        raise ValueError(f"timelines() draws 1 to 3 traces that hold events, not {len(traces)}")
    scale, unit = _unit(max(trace.peak_bytes for trace in traces.values()))
    told = []
    with _figure(7, 4) as figure:
        axes = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
        for ax, (label, trace) in zip(axes, traces.items(), strict=True):
            line = trace.timeline(_POINTS if len(trace) > 2 * _POINTS else None)
            x = np.asarray(line.events)
            first = min(trace.before, len(trace) - 1)
            step = slice(min(int(np.searchsorted(x, first)), len(x) - 1), None)
            edges = np.append(x[step] - first, len(trace) - first)
            base = np.zeros(len(edges))
            for name in units.CONSUMERS:
                values = np.asarray(line.consumers[name])[step] / scale
                top = base + np.append(values, values[-1])
                ax.fill_between(edges, base, top, step="post", color=COLOURS[name], linewidth=0)
                base = top
            ax.step(edges, base, where="post", color=INK, linewidth=0.7)
            ax.set_xlim(0, len(trace) - first)
            ax.set_xticks([])
            peak = units.format_bytes(trace.peak_bytes)
            ax.set_title(f"{label}\npeak {peak}", fontsize=10.5)
            ax.grid(axis="y")
            told.append(
                f"{label}: peak {peak} in {phase(trace.peak_phase)}, {_listed(trace.consumers_at_peak())}."
            )
        axes[0].set_ylim(bottom=0)
        axes[len(axes) // 2].set_xlabel("allocations and frees of the step, in order")
        _finish(axes[0], title, None, f"live tensors ({unit})")
        _legend(figure, _drawn(*traces.values()))
        figure.memlab_alt = f"{title}. Live memory of one step each, stacked by consumer. {' '.join(told)}"
    return figure


def consumers(
    bars: Mapping[str, Footprint | Trace | Mapping[str, int]],
    capacity: int | None = None,
    title: str | None = None,
    what: str = "live tensors at the peak",
) -> Figure:
    """One stacked bar per label: what each consumer holds at the peak (or the bytes given), in bytes.

    `capacity` draws the bytes that the card has and marks the bars that don't fit; `what` names the bytes on
    the axis. The legend has the consumers that hold something. Raises ValueError for no bars, or for a name
    that isn't a consumer.
    """
    if not bars:
        raise ValueError("consumers() has nothing to draw: give at least one label and its bytes")
    rows = {label: _held(label, bar) for label, bar in bars.items()}
    totals = {label: sum(row.values()) for label, row in rows.items()}
    largest = max(totals.values())
    off_scale = capacity is not None and capacity > 6 * largest
    extent = largest if capacity is None or off_scale else max(largest, capacity)
    scale, unit = _unit(extent if capacity is None or off_scale else min(extent, capacity))

    with _figure(7, max(2.2, 1.25 + 0.52 * len(rows))) as figure:
        ax = figure.subplots()
        right = extent / scale if capacity is None or off_scale else 1.05 * capacity / scale
        labels, character = _labels(rows, 22)
        notes = {}
        for label, total in totals.items():
            over = capacity is not None and total > capacity
            notes[label] = _in(total, scale, unit) + (" doesn't fit" if over else "")
            right = max(right, total / scale / (1 - character * (len(notes[label]) + 1.5)))
        for y, (label, row) in enumerate(rows.items()):
            left = 0.0
            for name in units.CONSUMERS:
                width = row[name] / scale
                ax.barh(
                    y, width, left=left, height=0.66, color=COLOURS[name], edgecolor="white", linewidth=0.6
                )
                text = f"{width:.3g}" if width < 100 else f"{width:,.0f}"
                if width > right * character * (len(text) + 1.5):
                    ax.text(
                        left + width / 2, y, text, ha="center", va="center", fontsize=10,
                        color=_on(COLOURS[name]), bbox={"facecolor": COLOURS[name], "linewidth": 0, "pad": 1},
                    )  # fmt: skip
                left += width
            over = capacity is not None and totals[label] > capacity
            ax.text(
                left + extent / scale * 0.01, y, notes[label], va="center", fontsize=10.5, fontweight="bold",
                color=LIMIT if over else INK, zorder=4,  # above the line of the capacity
                bbox={"facecolor": "white", "linewidth": 0, "pad": 0.8},
            )  # fmt: skip
        ax.set_yticks(range(len(rows)), labels)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.set_xlim(0, right or 1)
        limit = ""
        if capacity is not None:
            limit = f" Capacity {units.format_bytes(capacity)}."
            at = None if off_scale else capacity / scale
            _limit(ax, at, f"capacity {units.format_bytes(capacity)}", upright=True)
        finding = _bars_finding(rows, totals, capacity)
        _finish(ax, title or finding, f"{what} ({unit})", None)
        ax.grid(axis="x")
        held = [name for name in units.CONSUMERS if any(row[name] for row in rows.values())]
        _legend(figure, held or units.CONSUMERS)
        figure.memlab_alt = f"{title or finding}.{limit} " + " ".join(
            f"{label}: {units.format_bytes(totals[label])} "
            f"({_listed({name: row[name] for name in held or units.CONSUMERS})})."
            for label, row in rows.items()
        )
    return figure


def html_bars(
    bars: Mapping[str, Footprint | Trace | Mapping[str, int]],
    capacity: int,
    card: str,
    notes: Mapping[str, str] | None = None,
    small: bool = False,
) -> str:
    """`consumers` as HTML: text stays text, it is there in a millisecond and fits any width.

    One stacked bar per label against the `capacity` of `card`, colours and patterns as `swatch` names them.
    notes: what else is said beside a label. small: thin bars without numbers in them. Raises as `consumers`.
    """
    if not bars:
        raise ValueError("html_bars() has nothing to draw: give at least one label and its bytes")
    rows = {label: _held(label, bar) for label, bar in bars.items()}
    totals = {label: sum(row.values()) for label, row in rows.items()}
    largest = max(totals.values())
    off_scale = capacity > 6 * largest
    extent = (largest if off_scale else max(largest, capacity)) or 1
    at = 100 * capacity / extent
    scale, unit = _unit(largest)
    limit = f"capacity of {card}: {units.format_bytes(capacity)}"
    height = "0.8em" if small else "2.1em"
    line = ""
    if not off_scale:
        line = (
            f"<span style='position:absolute;left:calc({min(at, 100):.2f}% - 3px);top:-3px;bottom:-3px;"
            f"border-left:3px dashed {LIMIT}'></span>"
        )
    parts = []
    for label, row in rows.items():
        pieces = []
        for name, size in row.items():
            if not size:
                continue
            text = f"{size / scale:.3g}"
            # An empty item first: where the number doesn't fit beside it, it wraps out of sight.
            number = (
                ""
                if small
                else (
                    "<span style='height:100%'></span>"
                    f"<span style='background:{COLOURS[name]};color:{_on(COLOURS[name])};padding:0 3px;"
                    "position:relative;z-index:1'>"
                    f"{text}</span>"
                )
            )
            pieces.append(
                f"<span style='flex:0 0 {100 * size / extent:.3f}%;height:100%;box-sizing:border-box;"
                "border-right:1px solid #fff;display:flex;flex-wrap:wrap;align-items:center;"
                f"justify-content:center;overflow:hidden;{_painted(name)}'>{number}</span>"
            )
        said = f"<b>{html.escape(label)}</b> {units.format_bytes(totals[label])}"
        if notes and notes.get(label):
            said += f", {html.escape(notes[label])}"
        parts.append(
            f"<div style='margin-top:{'2px' if small else '6px'}'>{said}</div>"
            f"<div style='position:relative;height:{height};background:rgba(128,128,128,.2);"
            "outline:1px solid #888'>"
            f"<div style='display:flex;height:100%;overflow:hidden'>{''.join(pieces)}</div>{line}</div>"
        )
    if off_scale:
        parts.append(f"<div style='text-align:right'>{html.escape(limit)}, off the scale &#8594;</div>")
    else:
        side = (
            f"margin-left:{at:.2f}%"
            if at < 50
            else f"margin-right:{100 - min(at, 100):.2f}%;text-align:right"
        )
        parts.append(f"<div style='{side};padding-top:3px'>{html.escape(limit)}</div>")
    if not small:
        parts.append(f"<div style='opacity:.8'>numbers in the bars: {unit}</div>")
    told = " ".join(
        f"{label}: {units.format_bytes(totals[label])} ({_listed({n: b for n, b in row.items() if b})})."
        for label, row in rows.items()
    )
    alt = html.escape(f"Stacked bars, {limit}. {told}", quote=True)
    return f"<div role='img' aria-label=\"{alt}\">{''.join(parts)}</div>"


def html_log_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """(label, value, value in words) as thin bars over powers of ten: HTML. Raises ValueError as `times`."""
    for label, value, _ in rows:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{label!r}: {value!r} has no place on a log axis; give a number above 0")
    floor = math.floor(math.log10(min(value for _, value, _ in rows)) - 0.15)
    decades = math.log10(max(value for _, value, _ in rows)) - floor
    parts = [
        f"<div style='margin-top:2px'><b>{html.escape(label)}</b> {html.escape(words)}</div>"
        f"<div style='height:0.8em;width:{100 * (math.log10(value) - floor) / decades:.2f}%;"
        f"background:{_TOTAL};forced-color-adjust:none'></div>"
        for label, value, words in rows
    ]
    alt = html.escape(", ".join(f"{label}: {words}" for label, _, words in rows), quote=True)
    return (
        f"<div role='img' aria-label=\"Bars on a log scale. {alt}\">{''.join(parts)}"
        "<div style='opacity:.8'>lengths on a log scale: each power of ten is as long as the next</div></div>"
    )


def swatch(consumer: str) -> str:
    """The colour and pattern of a consumer in `html_bars`, for the legend: HTML."""
    return (
        "<span aria-hidden='true' style='display:inline-block;width:1em;height:1em;border:1px solid #888;"
        f"vertical-align:-0.15em;margin-right:0.4em;{_painted(consumer)}'></span>"
    )


def _painted(consumer: str) -> str:
    hatch = f"background-image:{_HATCHES[consumer]};" if _HATCHES[consumer] else ""
    return f"background-color:{COLOURS[consumer]};{hatch}forced-color-adjust:none"


def comparison(compared: Comparison | Mapping[str, Mapping[str, int]], title: str | None = None) -> Figure:
    """Formula, trace and measurement side by side, a group of bars per consumer and one for the peak.

    `compared` is what `memlab.compare` returns, or a mapping of a column's name to its bytes per consumer and
    'peak'; what a column lacks isn't drawn. Columns are told apart by the fill: outline, light, full. Raises
    ValueError for no column, more than three, or a row that is neither a consumer nor 'peak'.
    """
    columns = compared if isinstance(compared, Mapping) else compared.columns()
    if not 0 < len(columns) <= len(_FILLS):
        raise ValueError(f"comparison() draws one to {len(_FILLS)} columns, not {len(columns)}")
    groups = (*units.CONSUMERS, "peak")
    for column, row in columns.items():
        for name in row:
            if name not in groups:
                raise units.unknown_name(f"row of {column!r}:", name, groups)
    extent = max((size for row in columns.values() for size in row.values()), default=0)
    scale, unit = _unit(extent)
    height = 0.8 / len(columns)

    with _figure(7, 1.4 + 0.155 * len(groups) * (len(columns) + 0.8)) as figure:
        ax = figure.subplots()
        for i, group in enumerate(groups):
            colour = COLOURS.get(group, _TOTAL)
            for j, (row, fill) in enumerate(zip(columns.values(), _FILLS[-len(columns) :], strict=True)):
                if group not in row:
                    continue
                y = i - 0.4 + (j + 0.5) * height
                ax.barh(y, row[group] / scale, height * 0.86, color=_fill(colour, fill), edgecolor=colour)
                ax.text(
                    row[group] / scale + extent / scale * 0.012, y, _in(row[group], scale, unit), va="center",
                    fontsize=9,
                )  # fmt: skip
        ax.set_yticks(range(len(groups)), [word(group) for group in groups])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(groups) - 0.45, -0.55)
        ax.set_xlim(0, extent / scale * 1.22 or 1)
        heading = title or _comparison_finding(columns)
        _finish(ax, heading, f"most live bytes in the step, row by row ({unit})", None)
        ax.grid(axis="x")
        handles = [
            Patch(facecolor=_fill(_TOTAL, fill), edgecolor=_TOTAL, label=column)
            for column, fill in zip(columns, _FILLS[-len(columns) :], strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=1.1)
        told = " ".join(f"{column}: {_listed(row)}." for column, row in columns.items())
        figure.memlab_alt = f"{heading}. {told}"
    return figure


def waterfall(
    start: tuple[str, int],
    changes: Sequence[tuple[str, int]],
    capacity: int | None = None,
    title: str | None = None,
) -> Figure:
    """From `start` (label, bytes) through each change (label, bytes; negative frees) to what is left.

    The last bar is `left`; `in all` where a change adds.

    Raises ValueError if a change frees more than there is.
    """
    steps: list[tuple[str, int, int]] = []  # label, from, to
    level = start[1]
    for label, delta in changes:
        if level + delta < 0:
            raise ValueError(
                f"waterfall(): {label!r} frees {-delta} B of {level} B; check its sign and its unit"
            )
        steps.append((label, level, level + delta))
        level += delta
    extent = max([start[1], capacity or 0, *(after for _, _, after in steps)])
    scale, unit = _unit(extent)

    with _figure(7, 1.35 + 0.42 * (len(steps) + 2)) as figure:
        ax = figure.subplots()
        end = len(steps) + 1
        pad = extent / scale * 0.012
        above: dict[str, Any] = {  # the line of the capacity
            "zorder": 4, "bbox": {"facecolor": "white", "linewidth": 0, "pad": 0.8},
        }  # fmt: skip
        for y, amount in ((0, start[1]), (end, level)):
            ax.barh(y, amount / scale, height=0.66, color=_TOTAL)
            ax.text(
                amount / scale + pad, y, _in(amount, scale, unit), va="center", fontsize=10.5,
                fontweight="bold", **above,
            )  # fmt: skip
        for y, (_, before, after) in enumerate(steps, start=1):
            low, high = min(before, after) / scale, max(before, after) / scale
            ax.barh(y, high - low, left=low, height=0.66, color=_LESS if after < before else _MORE)
            sign = "−" if after < before else "+" if after > before else "±"
            ax.text(
                high + pad, y, f"{sign}{_in(abs(after - before), scale, unit)}", va="center", fontsize=10.5,
                **above,
            )  # fmt: skip
            ax.plot([before / scale] * 2, [y - 0.67, y - 0.33], color=FAINT, linewidth=0.8)
        ax.plot([level / scale] * 2, [end - 0.67, end - 0.33], color=FAINT, linewidth=0.8)
        outcome = "in all" if any(after > before for _, before, after in steps) else "left"
        labels, character = _labels([start[0], *(label for label, _, _ in steps), outcome], 26)
        ax.set_yticks(range(len(labels)), labels)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(end + 0.5, -0.5)
        ax.set_xlim(0, extent / scale / (1 - 12 * character) or 1)
        if capacity is not None:
            _limit(ax, capacity / scale, f"capacity {units.format_bytes(capacity)}", upright=True)
        saved = max(steps, key=lambda step: step[1] - step[2], default=None)
        finding = f"{units.format_bytes(start[1])} become {units.format_bytes(level)}"
        if saved is not None and saved[2] < saved[1]:
            finding += f"; {saved[0]} frees most"
        _finish(ax, title or finding, f"memory ({unit})", None)
        ax.grid(axis="x")
        told = " ".join(
            f"{label}: {'minus' if after < before else 'plus'} {units.format_bytes(abs(after - before))}."
            for label, before, after in steps
        )
        figure.memlab_alt = f"{title or finding}. {start[0]}: {units.format_bytes(start[1])}. {told}"
    return figure


def bandwidths(
    rows: Sequence[tuple[str, float]], measured: Sequence[str] = (), title: str | None = None
) -> Figure:
    """Bytes per second of memories and links as bars on a log axis, fastest first.

    `measured` names the labels that were measured here: they are drawn dark and say so.
    """
    ordered = sorted(rows, key=lambda row: -row[1])
    finding = "Each level of memory is far slower than the one above it"
    if len(ordered) > 1:
        ratio = ordered[0][1] / ordered[-1][1]
        finding = f"{ordered[0][0]} is {ratio:,.3g} times as fast as {ordered[-1][0]}"
    return _log_bars(
        [
            (label, value / units.GB, _rate(value) + (", measured here" if label in measured else ""))
            for label, value in ordered
        ],
        measured, title or finding, "GB/s (10⁹ bytes per second, log scale)", lambda value: f"{value:,.15g}",
    )  # fmt: skip


def times(rows: Sequence[tuple[str, float]], title: str, dark: Mapping[str, str] | None = None) -> Figure:
    """Seconds per label as bars on a log axis, in the order given.

    `dark` has the labels that stand out, each with the words that say why.
    """
    why = dark or {}
    return _log_bars(
        [
            (label, value, seconds(value) + (f", {why[label]}" if why.get(label) else ""))
            for label, value in rows
        ],
        tuple(why), title, "time (ns to seconds, log scale)", seconds,
    )  # fmt: skip


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    x: str,
    y: str,
    *,
    in_bytes: bool = False,
    log_x: int | None = None,
    log_y: bool = False,
    steps: bool = False,
    notes: Sequence[tuple[float, float, str]] = (),
    budget: int | None = None,
) -> Figure:
    """Lines over a common axis, each label -> (xs, ys), named in the legend, told apart by their dashes.

    x, y: what the axes show, with the unit; with `in_bytes` y is without it: KiB, MiB or GiB is chosen.
    log_x: the base (2 or 10), or None; log_y: powers of ten. steps: values hold until the next x. notes:
    (x, y, text) at points worth a word, y as given. budget: the bytes that there are. Raises ValueError for
    no line, an empty one, xs and ys of different lengths, or more lines than there are dashes.
    """
    if not 0 < len(lines) <= len(_LINES):
        raise ValueError(f"curves() draws 1 to {len(_LINES)} lines, not {len(lines)}")
    for label, (xs, ys) in lines.items():
        if not len(xs) or len(xs) != len(ys):
            raise ValueError(f"{label!r}: {len(xs)} xs and {len(ys)} ys; give as many of both, at least one")
    largest = max([budget or 0, *(max(ys) for _, ys in lines.values())])
    scale, unit = _unit(largest) if in_bytes else (1, "")

    with _figure(7, 4) as figure:
        ax = figure.subplots()
        for (label, (xs, ys)), (colour, dash) in zip(lines.items(), _LINES, strict=False):
            values = np.asarray(ys, float) / scale
            drawn: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 2, "label": label}
            if steps:
                ax.step(xs, values, where="post", **{**drawn, "linewidth": 1.3})
            else:
                ax.plot(xs, values, marker="o" if len(xs) <= 16 else "", markersize=5, **drawn)
        if log_x is not None:
            ax.set_xscale("log", base=log_x)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.12g}"))
        else:
            whole = all(float(v).is_integer() for xs, _ in lines.values() for v in xs)
            ax.xaxis.set_major_locator(MaxNLocator(7, integer=whole))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.12g}"))
        if log_y:
            ax.set_yscale("log")
        else:
            top = largest / scale * 1.2 or 1
            ax.set_ylim(0, top)
            ax.set_yticks([tick for tick in ax.get_yticks() if tick <= top])
        ax.minorticks_off()
        ends = [float(v) for xs, _ in lines.values() for v in (min(xs), max(xs))]
        low, high = min(ends), max(ends)
        middle = math.sqrt(low * high) if log_x is not None else (low + high) / 2
        for at, height, text in notes:
            _peak(ax, at, height / scale, text, at > middle)
        if budget is not None:
            _limit(ax, budget / scale, f"budget {units.format_bytes(budget)}")
        _finish(ax, title, x, f"{y} ({unit})" if in_bytes else y)
        ax.grid(axis="y")
        if len(lines) > 1:
            figure.legend(loc="outside lower center", ncols=min(len(lines), 3), handlelength=2.6)

        def shown(value: float) -> str:
            return units.format_bytes(round(value)) if in_bytes else f"{value:.3g}"

        told = " ".join(
            f"{label}: from {shown(ys[0])} at {xs[0]:,.6g} to {shown(ys[-1])} at {xs[-1]:,.6g}, "
            f"lowest {shown(min(ys))}, highest {shown(max(ys))}."
            for label, (xs, ys) in lines.items()
        )
        figure.memlab_alt = f"{title}. {y} over {x}. {told}"
    return figure


def seconds(value: float) -> str:
    """0.039 -> '39 ms', 2.54 -> '2.54 s', 86400 -> '86,400 s'."""
    if value >= 1000:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale * (1 - 1e-9):
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _log_bars(
    rows: Sequence[tuple[str, float, str]],
    dark: Sequence[str],
    heading: str,
    axis: str,
    tick: Callable[[float], str],
) -> Figure:
    if not rows:
        raise ValueError("nothing to draw: give at least one (label, value)")
    for label, value, _ in rows:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{label!r}: {value!r} has no place on a log axis; give a number above 0")
    floor = math.floor(math.log10(min(value for _, value, _ in rows)) - 0.15)
    with _figure(7, 1.25 + 0.36 * len(rows)) as figure:
        ax = figure.subplots()
        for y, (label, value, text) in enumerate(rows):
            stands_out = label in dark
            ax.barh(y, value, height=0.66, color=_TOTAL if stands_out else _LESS)
            weight = "bold" if stands_out else "normal"
            ax.text(value, y, f" {text}", va="center", fontsize=10.5, fontweight=weight)
        ax.set_xscale("log")
        labels, character = _labels([label for label, _, _ in rows], 28)
        decades = max(
            (math.log10(value) - floor) / (1 - character * (len(text) + 2)) for _, value, text in rows
        )
        ax.set_xlim(10**floor, 10 ** (floor + decades))
        ax.set_yticks(range(len(rows)), labels)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        top = math.ceil(math.log10(max(value for _, value, _ in rows)))  # beyond it are only words
        every = math.ceil((top - floor + 1) / 7)  # more labels would touch each other
        ax.set_xticks([10.0**k for k in range(floor, top + 1, every) if k <= floor + decades])
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tick(v)))
        ax.minorticks_off()
        _finish(ax, heading, axis, None)
        ax.grid(axis="x")
        told = ", ".join(f"{label}: {text}" for label, _, text in rows)
        figure.memlab_alt = f"{heading}. {told}."
    return figure


def _labels(labels: Iterable[str], width: int) -> tuple[list[str], float]:
    """Labels beside the axes, wrapped; and the share of the axes' width that a character in them takes."""
    wrapped = [textwrap.fill(label, width) for label in labels]
    longest = max(len(line) for label in wrapped for line in label.split("\n"))
    return wrapped, 9.5 / (740 - 10 * longest)  # pixels of this type in a figure of 7 in at 110 dpi


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in the course's style; text and axes take it when they are made."""
    with mpl.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def _unit(largest: float) -> tuple[int, str]:
    """The unit in which the largest value is at least 1."""
    for scale, unit in ((units.TIB, "TiB"), (units.GIB, "GiB"), (units.MIB, "MiB"), (units.KIB, "KiB")):
        if largest >= scale:
            return scale, unit
    return 1, "bytes"


def _in(size: int, scale: int, unit: str) -> str:
    """In the unit of the axis, unless two decimals of it would show nothing."""
    return f"{size / scale:,.2f} {unit}" if 100 * size >= scale > 1 else units.format_bytes(size)


def _rate(value: float) -> str:
    return f"{value / units.GB:,.0f} GB/s" if value >= 100 * units.GB else f"{value / units.GB:.3g} GB/s"


def word(consumer: str) -> str:
    """A consumer's name as figures and tables print it."""
    return consumer.replace("_", " ")


def phase(name: str) -> str:
    """A phase's name inside a sentence."""
    return "the optimizer step" if name == "optimizer" else name


def _listed(row: Mapping[str, int]) -> str:
    return ", ".join(f"{word(name)} {units.format_bytes(size)}" for name, size in row.items())


def _held(label: str, bar: Footprint | Trace | Mapping[str, int]) -> dict[str, int]:
    row = dict(bar) if isinstance(bar, Mapping) else bar.consumers_at_peak()
    for name, size in row.items():
        if name not in units.CONSUMERS:
            raise units.unknown_name(f"consumer of {label!r}:", name, units.CONSUMERS)
        if size < 0:
            raise ValueError(f"{label!r}: {name} can't be {size} bytes")
    return {name: row.get(name, 0) for name in units.CONSUMERS}


def _fill(colour: str, share: float) -> tuple[float, float, float]:
    """`share` of the colour, the rest white."""
    r, g, b = (1 - share * (1 - int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return r, g, b


def _comparison_finding(columns: Mapping[str, Mapping[str, int]]) -> str:
    names = list(columns)
    known, judged = names[-1], names[0]
    if len(names) > 1 and columns[known].get("peak") and "peak" in columns[judged]:
        gap = abs(columns[judged]["peak"] - columns[known]["peak"])
        share = gap / columns[known]["peak"]
        size = units.format_bytes(gap) + (f" ({share:.2%})" if share >= 0.0001 else "")
        off = f"differ by {size}" if gap else "agree to the byte"
        return f"Peak: {judged} and {known} {off}"
    return " and ".join(names) + " per consumer"


def _bars_finding(
    rows: Mapping[str, Mapping[str, int]], totals: Mapping[str, int], capacity: int | None
) -> str:
    if capacity is not None and len(rows) > 1:
        fit = sum(total <= capacity for total in totals.values())
        count = "All" if fit == len(rows) else "None" if not fit else f"{fit}"
        return f"{count} of {len(rows)} {'fits' if fit == 1 else 'fit'} in {units.format_bytes(capacity)}"
    label, row = max(rows.items(), key=lambda item: totals[item[0]])
    largest = max(row, key=row.__getitem__)
    share = row[largest] / totals[label] if totals[label] else 0.0
    if capacity is not None:
        fits = "fits in" if totals[label] <= capacity else "doesn't fit in"
        return f"{label} {fits} {units.format_bytes(capacity)}: {share:.0%} {word(largest)}"
    return f"{label} needs {units.format_bytes(totals[label])}, {share:.0%} {word(largest)}"


def _on(colour: str) -> str:
    """Black or white, whichever reads better on `colour` (WCAG relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return "white" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.18 else "black"


def _peak(ax: Axes, x: float, y: float, text: str, leftwards: bool) -> None:
    ax.plot([x], [y], "o", color=INK, markersize=5, clip_on=False, zorder=5)
    ax.annotate(
        text, (x, y), xytext=(-6 if leftwards else 6, 4), textcoords="offset points",
        ha="right" if leftwards else "left", va="bottom", fontweight="bold", zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
    )  # fmt: skip


def _limit(ax: Axes, at: float | None, text: str, *, upright: bool = False, left: bool = False) -> None:
    """The line of what there is; where it lies far off the scale, words in a corner."""
    across: dict[str, Any] = {"fontsize": 10, "color": LIMIT, "va": "bottom"}
    if at is None:
        ax.text(1, 1, f"{text}, off the scale", transform=ax.transAxes, ha="right", **across)
    elif upright:
        ax.axvline(at, color=LIMIT, linewidth=1.6, linestyle="--")
        ax.text(at, 1.01, text, transform=ax.get_xaxis_transform(), ha="center", **across)
    else:
        ax.axhline(at, color=LIMIT, linewidth=1.6, linestyle="--")
        x, align = (0.01, "left") if left else (0.99, "right")
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        where = ax.get_yaxis_transform()
        ax.annotate(
            text, (x, at), xycoords=where, xytext=(0, 4), textcoords="offset points", ha=align, bbox=box,
            **across,
        )  # fmt: skip


def _finish(ax: Axes, heading: str, x: str | None, y: str | None) -> None:
    ax.figure.suptitle(textwrap.fill(heading, 60), x=0.01, ha="left", color=INK)
    if x:
        ax.set_xlabel(x)
    if y:
        ax.set_ylabel(y)


def _drawn(*traces: Trace) -> list[str]:
    """The consumers that hold something in one of the traces: plain SGD has no optimizer states to name."""
    peaks = [trace.consumer_peaks() for trace in traces]
    return [name for name in units.CONSUMERS if any(peak[name] for peak in peaks)]


def _legend(figure: Figure, names: Sequence[str] = units.CONSUMERS) -> None:
    handles = [Patch(color=COLOURS[name], label=word(name)) for name in names]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.0, handlelength=0.9,
        handletextpad=0.4,
    )  # fmt: skip
