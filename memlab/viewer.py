"""A trace as one HTML file that opens offline: timeline by consumer, segments, what is alive at any moment.

The file holds everything: no network, no other file, no server. The data are little-endian arrays, compressed
with zlib and written in base64, 5 to 10 bytes an event; the browser unpacks them (Chrome 80, Firefox 113,
Safari 16.4 or newer). Colours are those of `memlab.plots`.

    memlab.viewer.show(trace)                        # in a notebook: the figure, and the viewer if it is live
    memlab.viewer.write_viewer(trace, "step.html")   # as a file
"""

from __future__ import annotations

import base64
import html
import importlib
import importlib.resources
import importlib.util
import json
import os
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from memlab.files import write_whole
from memlab.units import CONSUMERS, MIB, format_bytes

if TYPE_CHECKING:
    from memlab.allocator import Replay
    from memlab.trace import Trace

_CALLS = ("segment_alloc", "segment_map", "segment_free", "segment_unmap")
_MOST = MIB  # what a notebook is given at once
_CODES = {"u1": "B", "u2": "H", "u4": "I", "i4": "i", "f8": "d"}


def viewer_html(
    trace: Trace, replay: Replay | None = None, title: str | None = None, budget: int | None = None
) -> str:
    """The page as a string. `replay`, of the same trace, adds reserved bytes, segments and block sizes.

    `budget` (bytes) is drawn as a line, as `plots.timeline` draws it.

    Raises ValueError if `replay` comes from another trace.
    """
    if replay is not None and len(replay.addresses) != len(trace.sizes):
        raise ValueError(
            f"the replay has {len(replay.addresses)} blocks, the trace {len(trace.sizes)}: "
            "replay this trace before showing it"
        )
    from memlab.plots import COLOURS

    meta, data = _pack(trace, replay)
    meta["budget"] = budget
    meta["colours"] = [COLOURS[name] for name in CONSUMERS]
    page = importlib.resources.files("memlab").joinpath("data/viewer.html").read_text(encoding="utf-8")
    # "<" would let a name close the script element
    values = {
        "{{META}}": json.dumps(meta, separators=(",", ":")).replace("<", "\\u003c"),
        "{{DATA}}": base64.b64encode(zlib.compress(data, 6)).decode(),
        "{{TITLE}}": html.escape(title or _title(trace)),
    }
    head, rest = page.split("{{META}}")
    middle, tail = rest.split("{{DATA}}")
    head = head.replace("{{TITLE}}", values["{{TITLE}}"])
    return head + values["{{META}}"] + middle + values["{{DATA}}"] + tail


def write_viewer(
    trace: Trace,
    path: str | os.PathLike[str],
    replay: Replay | None = None,
    title: str | None = None,
    budget: int | None = None,
) -> None:
    """Writes the page of `viewer_html`; whole or not at all."""
    write_whole(path, viewer_html(trace, replay, title, budget))


def show(
    trace: Trace,
    replay: Replay | None = None,
    *,
    title: str | None = None,
    budget: int | None = None,
    height: int = 640,
) -> None:
    """Show a trace in a notebook: always its timeline as a figure, and the viewer if it is live.

    The viewer is a frame, `height` pixels high (its lower corner can be dragged), that may run its own script
    and nothing else. It comes as a widget: what is saved, printed or handed in holds the figure alone, and so
    does what a grader executes. `replay` is as in `viewer_html`, `budget` (bytes) as in `plots.timeline`. A
    trace whose viewer would take more than 1 MiB gets a line in its place that says how to write a file.
    Outside a notebook the figure's text is printed. Raises ValueError for an empty trace or another's replay.
    """
    from memlab import plots

    figure = plots.timeline(trace, budget, title)
    page = viewer_html(trace, replay, title, budget)
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        print(figure.memlab_alt)
        return
    display = importlib.import_module("IPython.display").display
    display(figure)
    live = getattr(shell, "kernel", None) is not None and os.environ.get("MEMLAB_GRADING") != "1"
    if not live or importlib.util.find_spec("ipywidgets") is None:
        return
    frame = _frame(page, title or _title(trace), height)
    if len(frame) > _MOST:
        size = f"these {len(trace.events):,} events takes {format_bytes(len(frame))}"
        print(
            f"The viewer of {size}, too much for a notebook. As a page of its own: "
            'memlab.viewer.write_viewer(trace, "step.html")'
        )
        return
    widgets = importlib.import_module("ipywidgets")
    display(widgets.HTML(value=frame, layout={"width": "auto", "margin": "0"}))


def _frame(page: str, title: str, height: int) -> str:
    """The page within another: its own origin, no network, no reach to what is around it."""
    source = page.replace("&", "&amp;").replace('"', "&quot;")
    return (
        f'<iframe title="{html.escape(title)}: the viewer" sandbox="allow-scripts" srcdoc="{source}" '
        f'style="width:100%;height:{int(height)}px;border:0;resize:vertical;display:block"></iframe>'
    )


def _title(trace: Trace) -> str:
    model = trace.info.get("model")
    return f"Memory of a training step: {model}" if isinstance(model, str) else "Memory of a training step"


def _pack(trace: Trace, replay: Replay | None) -> tuple[dict[str, Any], bytes]:
    """What the page reads: plain data for JSON, and the arrays in one piece, each from a multiple of 8."""
    shapes: dict[tuple[int, ...], int] = {}
    shape_of = [shapes.setdefault(shape, len(shapes)) for shape in trace.shapes]
    columns: dict[str, tuple[str, Iterable[int]]] = {
        "events": ("i4", trace.events),
        "size": (_width(trace.sizes), trace.sizes),
        "consumer": ("u1", trace.consumers_of),
        "shape": (_width(shape_of), shape_of),
    }
    for name in ("module", "operator", "phase", "dtype", "line"):
        columns[name] = (_width(trace.columns[name]), trace.columns[name])
    meta: dict[str, Any] = {
        "consumers": CONSUMERS,
        "names": trace.names,
        "shapes": [list(shape) for shape in shapes],
        "phases": trace.marks,
        "steps": trace.steps,
        "before": trace.before,
        "subtitle": _subtitle(trace),
        "notes": _notes(trace, replay),
        "replay": None,
    }
    if replay is not None:
        allocator = replay.allocator
        calls = replay.driver_events
        addresses = [max(a, 0) for a in replay.addresses]
        columns |= {
            "block": (_width(replay.block_bytes), replay.block_bytes),
            "address": ("f8", addresses),
            "callEvent": ("u4", [call[0] for call in calls]),
            "callKind": ("u1", [_CALLS.index(call[1]) for call in calls]),
            "callAddress": ("f8", [call[2] for call in calls]),
            "callSize": ("f8", [call[3] for call in calls]),
        }
        oom = replay.oom
        meta["replay"] = {
            "peak_allocated": replay.peak_allocated,
            "peak_reserved": replay.peak_reserved,
            "fragmentation": replay.fragmentation,
            "retries": replay.retries,
            "context": allocator.context,
            "capacity": allocator.capacity,
            "others": sum(allocator.others.values()),
            "stopped": replay.stopped,
            "oom": None if oom is None else {"segment": oom.segment, "message": str(oom)},
        }
    data = bytearray()
    meta["arrays"] = arrays = []
    for name, (kind, values) in columns.items():
        column = array(_CODES[kind], values)
        if sys.byteorder == "big":
            column.byteswap()
        data.extend(bytes(-len(data) % 8))
        arrays.append({"name": name, "type": kind, "offset": len(data), "length": len(column)})
        data.extend(column.tobytes())
    return meta, bytes(data)


def _width(values: Iterable[int]) -> str:
    """The narrowest type that holds whole numbers from 0; beyond 2^32 doubles, exact up to 2^53."""
    largest = max(values, default=0)
    return next((kind for kind, top in (("u1", 8), ("u2", 16), ("u4", 32)) if largest < 1 << top), "f8")


def _subtitle(trace: Trace) -> str:
    parts = [
        f"{key}: {value}"
        for key, value in trace.info.items()
        if isinstance(value, str | int | float) and value != ""
    ]
    return " · ".join(parts)


def _notes(trace: Trace, replay: Replay | None) -> list[str]:
    notes = [
        "Live tensors: the bytes each tensor's storage asked for, without rounding, cache or CUDA context. "
        "In a column of pixels that covers several events, the event with the most live bytes is drawn.",
    ]
    if replay is not None:
        from memlab.allocator import ORDERS

        allocator = replay.allocator
        notes += [
            "Reserved bytes (dashed), segments and block sizes come from a replay through the rules of "
            f"PyTorch's caching allocator. Options: {allocator.config}.",
            f"Order of segment addresses: {ORDERS[allocator.order]}. It is inferred, not documented by "
            "NVIDIA, and moves the reserved bytes.",
            "One CUDA stream is assumed; private pools of CUDA graphs are left out.",
        ]
        if replay.oom is not None:
            notes.append(str(replay.oom))
    return notes + [f"Note: {caveat}" for caveat in trace.caveats]
