"""The viewer: what the file holds, what a browser shows, what a notebook gets."""

from __future__ import annotations

import base64
import json
import re
import zlib
from array import array
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbclient import NotebookClient

from memlab.allocator import AllocatorConfig, Replay, replay
from memlab.plots import COLOURS
from memlab.trace import Trace
from memlab.units import CONSUMERS, MIB
from memlab.viewer import _frame, show, viewer_html, write_viewer
from tests.browser import ROOT, Watched
from tests.browser.axe import violations

WIDGETS = "application/vnd.jupyter.widget-state+json"
CODES = {"u1": "B", "u2": "H", "u4": "I", "i4": "i", "f8": "d"}


def training_trace(steps: int = 1, layers: int = 8) -> Trace:
    trace = Trace(info={"model": "a <small> model"})
    weights = [
        trace.allocate(
            (8 + k) * MIB,
            "parameters",
            module=f"h.{k}",
            operator="aten::empty",
            shape=(k + 1, 9),
            dtype="fp32",
        )
        for k in range(layers)
    ]
    states: list[int] = []
    for _ in range(steps):
        trace.begin_step()
        trace.mark("forward")
        saved = []
        for k in range(layers):
            saved.append(
                trace.allocate(
                    12 * MIB, "activations", module=f"h.{k}", operator="aten::mm", line="nets.py:7"
                )
            )
            trace.free(
                trace.allocate(3 * MIB + 100, "temporaries", module=f"h.{k}", operator="aten::softmax")
            )
        trace.mark("backward")
        grads = []
        for weight in reversed(weights):
            grads.append(trace.allocate(trace.sizes[weight], "gradients", operator="MmBackward0"))
            trace.free(saved.pop())
        trace.mark("optimizer")
        if not states:
            states = [trace.allocate(2 * trace.sizes[g], "optimizer_states") for g in grads]
        for grad in grads:
            trace.free(grad)
    return trace


def contents(page: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The data as the page's script reads them."""
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', page, re.S)
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.S)
    assert found and packed
    meta = json.loads(found[1])
    raw = zlib.decompress(base64.b64decode(packed[1]))
    columns = {}
    for entry in meta["arrays"]:
        assert entry["offset"] % 8 == 0
        column = array(CODES[entry["type"]])
        end = entry["offset"] + entry["length"] * column.itemsize
        column.frombytes(raw[entry["offset"] : end])
        columns[entry["name"]] = column.tolist()
    return meta, columns


def run(trace: Trace, options: str = "", **more: Any) -> Replay:
    return replay(trace.events, trace.sizes, AllocatorConfig.parse(options), marks=trace.marks, **more)


def test_everything_is_in_the_file() -> None:
    trace = training_trace()
    result = run(trace, context=300 * MIB)
    meta, columns = contents(viewer_html(trace, result))
    assert columns["events"] == trace.events.tolist() and columns["size"] == trace.sizes.tolist()
    assert [meta["consumers"][k] for k in columns["consumer"]] == [b.consumer for b in trace.blocks()]
    for name in ("module", "operator", "line", "phase", "dtype"):
        assert [meta["names"][i] for i in columns[name]] == [getattr(b, name) for b in trace.blocks()]
    assert [tuple(meta["shapes"][i]) for i in columns["shape"]] == trace.shapes
    assert columns["block"] == result.block_bytes.tolist() and columns["address"] == result.addresses.tolist()
    assert list(zip(columns["callEvent"], columns["callAddress"], columns["callSize"], strict=True)) == [
        (event, address, size) for event, _, address, size in result.driver_events
    ]
    assert meta["replay"]["peak_reserved"] == result.peak_reserved and meta["replay"]["context"] == 300 * MIB
    assert meta["phases"] == [list(mark) for mark in trace.marks] and meta["steps"] == trace.steps


def test_it_needs_no_network() -> None:
    page = viewer_html(training_trace())
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!data:)[^"'\s>]""", page)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\s*\(", page)
    assert "default-src 'none'" in page


def test_colours_are_those_of_the_figures() -> None:
    meta, _ = contents(viewer_html(training_trace()))
    assert meta["colours"] == [COLOURS[name] for name in CONSUMERS]


def test_names_cannot_leave_their_place() -> None:
    trace = Trace(info={"model": "</title><script>alert(1)</script>"})
    trace.allocate(5, module="</script><b>{{DATA}}", operator="{{TITLE}}")
    trace.caveats.append("<!-- </script>")
    page = viewer_html(trace)
    meta, columns = contents(page)
    assert meta["names"][columns["module"][0]] == "</script><b>{{DATA}}"
    assert "alert(1)</script>" not in page and "</script><b>" not in page
    assert "{{" not in re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S)
    assert "&lt;b&gt; &amp; more" in viewer_html(trace, title="<b> & more")


def test_out_of_memory_is_shown() -> None:
    trace = training_trace()
    result = run(trace, capacity=200 * MIB)
    assert result.oom is not None
    meta, columns = contents(viewer_html(trace, result))
    assert (
        meta["replay"]["stopped"] == result.stopped and meta["replay"]["oom"]["segment"] == result.oom.segment
    )
    assert any("CUDA out of memory" in note for note in meta["notes"])
    assert min(columns["address"]) == 0  # what was never allocated


def test_it_is_compact(tmp_path: Path) -> None:
    trace = training_trace(steps=60, layers=40)
    write_viewer(trace, tmp_path / "v.html", run(trace))
    page = (tmp_path / "v.html").stat().st_size
    empty = len(viewer_html(Trace()))
    assert (page - empty) / len(trace.events) < 16 and list(tmp_path.iterdir()) == [tmp_path / "v.html"]


def test_a_replay_of_another_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 blocks"):
        viewer_html(training_trace(), replay([], []))


@given(st.lists(st.integers(0, 1 << 52), max_size=30))
def test_sizes_survive(sizes: list[int]) -> None:
    trace = Trace()
    for size in sizes:
        trace.allocate(size)
    assert contents(viewer_html(trace))[1]["size"] == sizes


# --- in a notebook

CELL = """
import sys; sys.path.insert(0, {root!r})
from memlab.viewer import show
from tests.memlab.test_viewer import run, training_trace
trace = training_trace(steps={steps}, layers={layers})
show(trace, run(trace), title="A <step>")
"""


def executed(steps: int = 1, layers: int = 8) -> tuple[list[Any], list[str]]:
    """The outputs of a cell that shows a trace, and the HTML of the widgets that it left."""
    cell = nbformat.v4.new_code_cell(CELL.format(root=str(ROOT), steps=steps, layers=layers))
    notebook = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3").execute()
    widgets = notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    return notebook.cells[0].outputs, [w.state.value for w in widgets.values() if "value" in w.state]


def test_a_notebook_gets_the_figure_and_a_widget() -> None:
    (figure, view), [frame] = executed()
    assert "peak" in figure.metadata["image/png"]["alt"] and "text/html" not in figure.data
    assert "application/vnd.jupyter.widget-view+json" in view.data and len(json.dumps(view)) < 1000
    assert 'sandbox="allow-scripts"' in frame and "A &lt;step&gt;: the viewer" in frame


def test_a_grader_gets_the_figure_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLAB_GRADING", "1")
    [figure], frames = executed()
    assert "image/png" in figure.data and frames == []


def test_a_notebook_is_not_made_heavy() -> None:
    (figure, line), frames = executed(steps=300, layers=300)
    assert "image/png" in figure.data and "MiB, too much for a notebook" in line.text and frames == []


def test_outside_a_notebook_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show(training_trace())
    assert "At the peak, in the " in capsys.readouterr().out
    with pytest.raises(ValueError, match="has 0 blocks"):
        show(training_trace(), replay([], []))


# --- in a browser


class Page:
    """One page, offline, and whatever went wrong on it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.complaints: list[str] = []
        self.page = browser.new_context(
            offline=True, viewport={"width": 1300, "height": 900}, **context
        ).new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("file:", "data:")) else self.complaints.append(request.url)
            ),
        )
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]", timeout=20_000)
        self.page.wait_for_timeout(400)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


@pytest.mark.browser
@pytest.mark.parametrize(
    ("options", "scheme"), [("", "light"), ("expandable_segments:True", "dark"), (None, "light")]
)
def test_in_a_browser(chromium: Any, tmp_path: Path, options: str | None, scheme: str) -> None:
    trace = training_trace(steps=2)
    path = tmp_path / "v.html"
    result = None if options is None else run(trace, options)
    write_viewer(trace, path, result)
    shown = Page(chromium, path, color_scheme=scheme)
    page = shown.page
    peak = f"{trace.peak_bytes / MIB:.2f} MiB"
    assert peak in shown.text("#facts") and page.title().endswith("a <small> model")
    assert page.get_attribute("html", "data-theme") == scheme
    assert f"Alive at the peak, in {trace.peak_phase}" in shown.text("#listTitle")
    assert shown.text("#listSum") == f"{len(trace.at_peak())} tensors, {peak}"
    largest = trace.at_peak()[0]
    assert f"{largest.bytes / MIB:.2f} MiB" in shown.text("#rows tr.item >> nth=0")

    box = page.locator("#over").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.8
    page.mouse.move(x, y)
    assert "alive" in shown.text("#tip") and "parameters" in shown.text("#tip")
    before = page.evaluate("[memlabViewer.view.a, memlabViewer.view.b]")
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(100)
    zoomed = page.evaluate("[memlabViewer.view.a, memlabViewer.view.b]")
    assert zoomed[1] - zoomed[0] < before[1] - before[0]
    page.mouse.down()
    page.mouse.move(x - 80, y)
    page.mouse.up()
    assert page.evaluate("memlabViewer.view.a") > zoomed[0]
    page.mouse.click(x, y)
    assert "Alive at event" in shown.text("#listTitle")
    page.keyboard.press("0")
    page.keyboard.press("p")
    page.keyboard.press("+")
    page.keyboard.press("]")
    assert f"event {trace.peak_event + 1}" in shown.text("#listTitle")
    page.keyboard.press("p")
    page.fill("#filter", "parameters h.3")
    assert shown.text("#listSum").startswith("1 tensors, 11.00 MiB")
    page.fill("#filter", "")
    page.select_option("#group", "consumer")
    assert "parameters" in shown.text("#rows")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") != scheme
    if result is None:
        assert page.locator("#mapPanel").count() == 0
    else:
        segments = replay(trace.events[: trace.peak_event + 1], trace.sizes, result.allocator.config).segments
        assert shown.text("#mapSum").startswith(f"{len(segments)} segments")
    assert shown.complaints == []


@pytest.mark.browser
def test_in_a_browser_out_of_memory_and_empty(chromium: Any, tmp_path: Path) -> None:
    trace = training_trace()
    write_viewer(trace, tmp_path / "oom.html", run(trace, capacity=200 * MIB, context=20 * MIB))
    shown = Page(chromium, tmp_path / "oom.html")
    assert "out of memory" in shown.text("#facts") and "when memory ran out" in shown.text("#mapTitle")
    assert shown.complaints == []
    write_viewer(Trace(), tmp_path / "empty.html", replay([], []))
    shown = Page(chromium, tmp_path / "empty.html")
    assert "no events" in shown.text("#facts") and shown.complaints == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_within_a_page_it_leaves_the_wheel_to_the_page(chromium: Any, width: int) -> None:
    trace = training_trace()
    frame = _frame(viewer_html(trace, run(trace)), "A step", 640)
    with Watched(chromium, width=width) as seen:
        start = "<!DOCTYPE html><html lang=en><title>t</title><body>"
        seen.page.set_content(f"{start}<main>{frame}</main><div style='height:3000px'>")
        inner = seen.page.frame_locator("iframe")
        inner.locator("html[data-ready=true]").wait_for()
        assert f"{trace.peak_bytes / MIB:.2f} MiB" in inner.locator("#facts").inner_text()
        plot = inner.locator("#over")
        plot.scroll_into_view_if_needed()
        plot.hover()

        def span() -> float:
            return float(plot.evaluate("() => memlabViewer.view.b - memlabViewer.view.a"))

        before = span()
        seen.page.mouse.wheel(0, -100)
        seen.page.wait_for_timeout(150)
        assert span() == before
        seen.page.keyboard.down("Control")
        seen.page.mouse.wheel(0, -100)
        seen.page.keyboard.up("Control")
        seen.page.wait_for_timeout(150)
        assert span() < before
        assert inner.locator("html").evaluate("e => e.scrollWidth <= e.clientWidth") and seen.overflow() <= 0
        for part in ("#filter", "#all", "#toPeak"):
            cut = "e => e.getBoundingClientRect().right - e.closest('.panel').getBoundingClientRect().right"
            assert inner.locator(part).evaluate(cut) < 0, part
        help_ = inner.locator(".hint .note").bounding_box()
        assert help_ is not None and help_["width"] > 0.7 * min(width, 420)
        assert violations(seen.page) == [] and seen.complaints == []
        seen.picture(f"viewer-in-a-page-{width}")


@pytest.mark.browser
def test_the_budget_and_where_the_step_begins_are_shown(chromium: Any, tmp_path: Path) -> None:
    trace = training_trace(steps=2).last_step()
    peak = trace.peak_bytes
    colour = """([budget]) => {
        const canvas = document.querySelector('#plot'), g = canvas.getContext('2d'), ratio = devicePixelRatio;
        const v = memlabViewer.view, y = canvas.height / ratio - 34
            - budget / v.y1 * (canvas.height / ratio - 24 - 34);
        const row = g.getImageData(0, Math.round((y - 2) * ratio), canvas.width, Math.ceil(5 * ratio)).data;
        let red = 0;
        for (let i = 0; i < row.length; i += 4) red += row[i] > 150 && row[i + 1] < 90 && row[i + 2] < 40;
        return red;
    }"""
    for budget, factor in ((None, 0.8), (int(0.8 * peak), 0.8), (int(1.4 * peak), 1.4)):
        write_viewer(trace, tmp_path / "v.html", budget=budget)
        shown = Page(chromium, tmp_path / "v.html", color_scheme="light")
        assert ("budget" in shown.text("#facts")) == (budget is not None)
        red = shown.page.evaluate(colour, [int(factor * peak)])
        assert (red > 500) == (budget is not None), (budget, red)
        assert f"before {trace.before:,} stand for what was alive" in shown.text("#lead")
        assert shown.complaints == []
    write_viewer(training_trace(), tmp_path / "v.html")
    assert Page(chromium, tmp_path / "v.html").text("#lead") == ""  # all of it is the step


@pytest.mark.browser
def test_a_column_of_lines_is_there_if_lines_were_recorded(chromium: Any, tmp_path: Path) -> None:
    trace = training_trace()
    for lines in (True, False):
        if not lines:
            trace.columns["line"] = array("l", [0] * len(trace.sizes))
        write_viewer(trace, tmp_path / "v.html")
        page = Page(chromium, tmp_path / "v.html").page
        assert page.locator("#heads button:text-is('line')").count() == lines
        assert page.locator("#group option[value=line]").count() == lines
        assert ("line" in page.get_attribute("#filter", "placeholder")) == lines
