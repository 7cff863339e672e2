import io
import itertools
import json
import re
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from memlab import plots, units
from memlab.trace import Trace

MIB, GIB = 2**20, 2**30


def step(layers=4, per_layer=3):
    """A step by hand: each activation is freed by its backward, the update needs a copy of the gradients."""
    trace = Trace()
    weights = [trace.allocate(10 * MIB, "parameters") for _ in range(layers)]
    states = [trace.allocate(20 * MIB, "optimizer_states") for _ in range(layers)]
    trace.begin_step()
    trace.mark("forward")
    saved = [trace.allocate(8 * MIB, "activations") for _ in range(layers * per_layer)]
    trace.mark("backward")
    gradients = []
    for _ in range(layers):
        gradients.append(trace.allocate(10 * MIB, "gradients"))
        for _ in range(per_layer):
            scratch = trace.allocate(5 * MIB, "temporaries")
            trace.free(saved.pop())
            trace.free(scratch)
    trace.mark("optimizer")
    for block in [trace.allocate(10 * MIB, "temporaries") for _ in gradients] + gradients:
        trace.free(block)
    assert weights and states
    return trace.last_step()


ROWS = {
    "fp32, AdamW": dict(zip(units.CONSUMERS, (GIB, GIB, 2 * GIB, 14 * GIB, 0), strict=True)),
    "amp-bf16, micro-batch 1, checkpointing of every block": {"parameters": GIB, "temporaries": GIB},
}
RATES = [("PCIe 4.0 x16", 31.5e9), ("HBM2e, A100-80GB", 2.039e12), ("this machine", 11e9)]
COLUMNS = {
    "formula": {"parameters": GIB, "gradients": GIB, "activations": 800 * MIB, "peak": 4 * GIB},
    "trace": {
        "parameters": GIB,
        "gradients": GIB,
        "activations": 810 * MIB,
        "temporaries": 3,
        "peak": 4 * GIB,
    },
    "measured": {"parameters": GIB, "gradients": GIB, "activations": 811 * MIB, "peak": 4 * GIB + 5 * MIB},
}
LINES = {"plain": ([1, 2, 4, 8], [MIB, 2 * MIB, 4 * MIB, 8 * MIB]), "shared": ([1, 8], [MIB, 3 * MIB])}
FIGURES = {
    "curves": lambda: plots.curves(LINES, "One grows faster", "layers", "kept", in_bytes=True, log_x=2),
    "curves, steps": lambda: plots.curves(
        LINES,
        "Steps",
        "layers",
        "live",
        in_bytes=True,
        steps=True,
        notes=[(8, 8 * MIB, "top")],
        budget=9 * MIB,
    ),
    "comparison": lambda: plots.comparison(COLUMNS),
    "timeline": lambda: plots.timeline(step()),
    "timeline, near budget": lambda: plots.timeline(step(), budget=300 * MIB),
    "timeline, far budget": lambda: plots.timeline(step(), budget=80 * GIB),
    "consumers": lambda: plots.consumers(ROWS, capacity=15 * GIB),
    "consumers, one trace": lambda: plots.consumers({"toy": step()}, capacity=80 * GIB),
    "waterfall": lambda: plots.waterfall(
        ("BERT-large, batch 32", 20 * GIB), [("amp-bf16", -4 * GIB), ("copies", 200 * MIB)], capacity=15 * GIB
    ),
    "bandwidths": lambda: plots.bandwidths(RATES, measured=["this machine"]),
    "times": lambda: plots.times(
        [(n, 8e10 / r) for n, r in RATES], "80 GB take 2.54 s by PCIe 4", {RATES[0][0]: "by the link"}
    ),
    "times, ten decades": lambda: plots.times([("a load", 3e-9), ("a step", 30.0)], "A load and a step"),
}


@pytest.fixture(params=list(FIGURES))
def figure(request):
    return FIGURES[request.param]()


def linear(colour):
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Linear sRGB to CIE L*a*b* (D65)."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    x, y, z = (np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_consumer_has_a_colour_that_differs_in_grey():
    assert tuple(plots.COLOURS) == units.CONSUMERS
    lightness = sorted(lab(linear(colour))[0] for colour in plots.COLOURS.values())
    assert min(np.diff(lightness)) > 10


# Machado, Oliveira and Fernandes 2009, severity 1.0.
COLOUR_BLIND = {
    "protan": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deutan": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritan": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
}


@pytest.mark.parametrize("kind", list(COLOUR_BLIND))
def test_colours_stay_apart_for_colour_blind_readers(kind):
    matrix = np.array(COLOUR_BLIND[kind].split(), float).reshape(3, 3)
    seen = [lab(np.clip(matrix @ linear(c), 0, 1)) for c in plots.COLOURS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def test_a_figure_is_small_and_says_what_it_shows(figure):
    png = figure.png()
    assert len(png) < 100_000
    image = Image.open(io.BytesIO(png))
    assert image.text["Description"] == figure.memlab_alt
    assert figure.memlab_alt.count(".") >= 2 and image.size[0] == 770


def test_axes_carry_units_and_nothing_is_cut_off(figure):
    figure.png()
    (ax,) = figure.axes
    assert any(unit in ax.get_xlabel() + ax.get_ylabel() for unit in ("iB)", "GB/s", "seconds,"))
    assert figure._suptitle.get_text()
    width, height = figure.get_size_inches() * figure.dpi
    texts = [
        *figure.texts, *ax.texts, ax.xaxis.label, ax.yaxis.label, *ax.get_yticklabels(),
        *(text for legend in figure.legends for text in legend.get_texts()),
    ]  # fmt: skip
    for text in texts:
        box = text.get_window_extent()
        if text.get_text():
            assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text


def test_figures_leave_no_global_state():
    before = dict(mpl.rcParams)
    plots.timeline(step())
    assert dict(mpl.rcParams) == before
    script = (
        "import sys; from memlab import plots; plots.bandwidths([('a', 1e9)]).png()\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_figure_shows_once_with_its_text_even_beside_the_inline_backend():
    script = """
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic("matplotlib", "inline")
from IPython.utils.capture import capture_output
with capture_output() as got:
    shell.run_cell("from memlab import plots; plots.bandwidths([('PCIe', 3e10), ('HBM', 2e12)])")
import json
assert all(o.metadata["image/png"]["unconfined"] for o in got.outputs)  # a narrow page scrolls it
print(json.dumps([[sorted(o.data), o.metadata["image/png"]["alt"]] for o in got.outputs]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((kinds, alt),) = json.loads(done.stdout.splitlines()[-1])
    assert kinds == ["image/png", "text/plain"] and "HBM" in alt


def heights(figure):
    """Upper edge of the stack's highest layer."""
    return max(float(c.get_paths()[0].vertices[:, 1].max()) for c in figure.axes[0].collections)


def test_timeline_marks_the_peak_of_the_trace():
    trace = step()
    figure = plots.timeline(trace)
    assert f"peak {units.format_bytes(trace.peak_bytes)}" in [t.get_text() for t in figure.axes[0].texts]
    assert (
        f"Peak {units.format_bytes(trace.peak_bytes)} in {plots.phase(trace.peak_phase)}, "
        in figure.memlab_alt
    )
    assert heights(figure) == pytest.approx(trace.peak_bytes / MIB)
    for phase in units.PHASES:
        assert phase in [t.get_text() for t in figure.axes[0].texts]
    dot = figure.axes[0].lines[-1]
    assert dot.get_xdata()[0] == trace.peak_event - trace.before


def test_timeline_of_a_long_trace_keeps_its_one_spike_and_few_points():
    trace = Trace()
    trace.mark("forward")
    base = trace.allocate(GIB, "parameters")
    for k in range(60_000):
        size = 3 * GIB if k == 31_234 else MIB
        trace.free(trace.allocate(size, "temporaries"))
    trace.free(base)
    figure = plots.timeline(trace)
    assert heights(figure) == pytest.approx(4)
    assert all(len(c.get_paths()[0].vertices) < 10_000 for c in figure.axes[0].collections)
    assert len(figure.png()) < 100_000


def test_timeline_of_nothing():
    with pytest.raises(ValueError, match="no event"):
        plots.timeline(Trace())


def test_consumers_draws_the_bytes_given():
    figure = plots.consumers(ROWS, capacity=15 * GIB)
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    given = [row.get(name, 0) / GIB for row in ROWS.values() for name in units.CONSUMERS]
    assert widths == pytest.approx(given)
    texts = [t.get_text() for t in figure.axes[0].texts]
    assert "18.00 GiB doesn't fit" in texts and "2.00 GiB" in texts
    assert figure._suptitle.get_text() == "1 of 2 fits in 15.00 GiB"


def test_consumers_takes_a_trace_at_its_peak():
    trace = step()
    figure = plots.consumers({"toy": trace})
    assert sum(p.get_width() for p in figure.axes[0].patches) == pytest.approx(trace.peak_bytes / MIB)


@pytest.mark.parametrize(
    ("bars", "says"),
    [
        ({}, "nothing to draw"),
        ({"a": {"gradient": 1}}, "did you mean gradients"),
        ({"a": {"gradients": -1}}, "can't be -1 bytes"),
    ],
)
def test_consumers_refuses(bars, says):
    with pytest.raises(ValueError, match=says):
        plots.consumers(bars)


def test_comparison_draws_what_each_column_has():
    figure = plots.comparison(COLUMNS)
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    groups = (*units.CONSUMERS, "peak")
    assert widths == pytest.approx([c[g] / GIB for g in groups for c in COLUMNS.values() if g in c])
    assert figure._suptitle.get_text() == "Peak: formula and measured differ by 5.00 MiB (0.12%)"
    same = plots.comparison({"formula": {"peak": 7}, "trace": {"peak": 7}})
    assert "agree to the byte" in same.memlab_alt


@pytest.mark.parametrize("columns", [{}, {name: {"peak": 1} for name in "abcd"}, {"trace": {"peaks": 1}}])
def test_comparison_refuses(columns):
    with pytest.raises(ValueError, match=r"draws one to 3 columns|did you mean peak"):
        plots.comparison(columns)


def test_waterfall_adds_up_and_refuses_to_free_more_than_there_is():
    figure = plots.waterfall(("start", 10 * GIB), [("less", -4 * GIB), ("more", 1 * GIB)])
    start, left, less, more = (p.get_width() for p in figure.axes[0].patches)
    assert (start, less, more, left) == pytest.approx((10, 4, 1, 7))
    assert "10.00 GiB become 7.00 GiB; less frees most" in figure.memlab_alt
    with pytest.raises(ValueError, match="check its sign"):
        plots.waterfall(("start", 10), [("less", -11)])


@pytest.mark.parametrize(("changes", "last"), [([-4, -1], "left"), ([4, 1], "in all"), ([-4, 1], "in all")])
def test_waterfall_says_what_its_last_bar_is(changes, last):
    figure = plots.waterfall(("start", 10), [(str(i), n) for i, n in enumerate(changes)])
    assert figure.axes[0].get_yticklabels()[-1].get_text() == last


def test_bandwidths_are_fastest_first_and_say_what_was_measured():
    figure = plots.bandwidths(RATES, measured=["this machine"])
    texts = [t.get_text().strip() for t in figure.axes[0].texts]
    assert texts == ["2,039 GB/s", "31.5 GB/s", "11 GB/s, measured here"]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_log_axis_has_no_place_for(value):
    with pytest.raises(ValueError, match="log axis"):
        plots.times([("a", value)], "title")


def test_seconds_read_well():
    assert [plots.seconds(v) for v in (2.54, 0.039, 2e-6, 3e-9)] == ["2.54 s", "39 ms", "2 µs", "3 ns"]
    assert [plots.seconds(v) for v in (86_400, 1, 10**-3)] == ["86,400 s", "1 s", "1 ms"]


def drawn(figure):
    """The labels of the x axis that lie on it, left to right, with their places in pixels."""
    figure.png()
    (ax,) = figure.axes
    low, high = ax.get_xlim()
    marks = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    return [(t.get_text(), t.get_window_extent()) for at, t in marks if low <= at <= high]


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith(("times", "bandwidths"))])
def test_labels_of_a_log_axis_never_touch(name):
    labels = drawn(FIGURES[name]())
    assert len(labels) >= 2
    assert all(left.x1 < right.x0 for (_, left), (_, right) in itertools.pairwise(labels))


def test_times_are_labelled_as_times_and_a_dark_bar_says_why():
    figure = plots.times([("cache", 3e-9), ("RAM", 9e-8)], "title", {"RAM": "the walk"})
    assert [text for text, _ in drawn(figure)] == ["1 ns", "10 ns", "100 ns"]
    assert [t.get_text().strip() for t in figure.axes[0].texts] == ["3 ns", "90 ns, the walk"]


def test_a_log_axis_ends_where_its_bars_end():
    labels = drawn(
        plots.times([("tokens", 1e-6), ("states of a large model", 2.67)], "t", {"tokens": "words " * 6})
    )
    assert labels[-1][0] in ("1 s", "10 s")


def test_what_follows_the_step_is_not_its_set_up():
    trace = Trace()
    weights = [trace.allocate(MIB, "parameters") for _ in range(40)]
    trace.mark("forward")
    saved = [trace.allocate(MIB, "activations") for _ in range(40)]
    trace.mark("backward")
    for block in saved:
        trace.free(block)
    trace.mark("setup")
    for block in weights:
        trace.free(block)
    shown = [t.get_text() for t in plots.timeline(trace).axes[0].texts]
    assert shown[:4] == ["setup", "forward", "backward", "end"]


def test_the_legend_and_the_axis_name_what_the_bars_hold():
    held = {"fp32": {"parameters": GIB, "gradients": GIB, "optimizer_states": 2 * GIB}}
    figure = plots.consumers(held, what="states of the model")
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["parameters", "gradients", "optimizer states"]
    assert (
        figure.axes[0].get_xlabel() == "states of the model (GiB)" and "activations" not in figure.memlab_alt
    )


def test_no_line_crosses_a_number():
    figure = plots.consumers({"just below": {"parameters": 14 * GIB}}, capacity=15 * GIB)
    (note,) = [t for t in figure.axes[0].texts if t.get_text() == "14.00 GiB"]
    (line,) = figure.axes[0].lines
    assert note.zorder > line.zorder and note.get_bbox_patch().get_facecolor()[:3] == (1, 1, 1)


@pytest.mark.parametrize(
    "lines", [{}, {"a": ([], [])}, {"a": ([1, 2], [1])}, {str(i): ([1], [1]) for i in range(9)}]
)
def test_curves_refuse_what_they_cannot_draw(lines):
    with pytest.raises(ValueError, match=r"curves|give as many"):
        plots.curves(lines, "title", "x", "y")


def test_curves_say_what_they_show_and_differ_without_colour():
    figure = plots.curves(LINES, "One grows faster", "layers", "kept", in_bytes=True)
    (ax,) = figure.axes
    assert ax.get_ylabel() == "kept (MiB)"
    assert "plain: from 1.00 MiB at 1 to 8.00 MiB at 8" in figure.memlab_alt
    assert len({line.get_linestyle() for line in ax.lines}) == 2


def test_timelines_share_one_scale_and_refuse_what_they_cannot_draw():
    figure = plots.timelines({"large": step(8), "small": step(2)}, "One is larger")
    tops = [ax.get_ylim() for ax in figure.axes]
    assert tops[0] == tops[1] and "large: peak" in figure.memlab_alt and "small: peak" in figure.memlab_alt
    for traces in ({}, dict.fromkeys("abcd", step()), {"empty": Trace()}):
        with pytest.raises(ValueError, match="timelines"):
            plots.timelines(traces, "nothing")


# -- bars as HTML ---

HELD = {"before": {"parameters": GIB}, "now": {"parameters": GIB, "activations": 3 * GIB}}


def test_html_bars_are_to_scale_and_say_in_words_what_they_show():
    page = plots.html_bars(HELD, 2 * GIB, "T4", {"now": "in <backward>"})
    widths = [float(width) for width in re.findall(r"flex: ?0 0 ([\d.]+)%", page)]
    assert widths == [25, 25, 75]  # of the larger bar, 4 GiB
    assert "left:calc(50.00% - 3px)" in page  # the capacity
    (alt,) = re.findall(r'role=.img. aria-label="([^"]*)"', page)
    assert (
        "capacity of T4: 2.00 GiB" in alt
        and "now: 4.00 GiB (parameters 1.00 GiB, activations 3.00 GiB)" in alt
    )
    assert "in &lt;backward&gt;" in page and "<script" not in page and "<backward>" not in page


def test_html_bars_of_a_card_far_too_large_are_still_seen():
    page = plots.html_bars(HELD, 100 * GIB, "B200")
    assert "off the scale" in page and "left:calc" not in page


def test_small_html_bars_have_no_numbers_inside_and_zeros_are_bars_too():
    assert "numbers in the bars" not in plots.html_bars(HELD, GIB, "T4", small=True)
    assert "0 B" in plots.html_bars({"nothing": {}}, GIB, "T4")


def test_consumers_differ_in_html_without_their_colours():
    hatches = [plots._HATCHES[name] for name in units.CONSUMERS]
    assert len(set(hatches)) == len(units.CONSUMERS)
    assert all(plots._HATCHES[name] in plots.swatch(name) for name in units.CONSUMERS)


@pytest.mark.parametrize(
    ("bars", "says"), [({}, "nothing to draw"), ({"a": {"weights": 1}}, "consumer of 'a'")]
)
def test_html_bars_refuse_what_they_cannot_draw(bars, says):
    with pytest.raises(ValueError, match=says):
        plots.html_bars(bars, GIB, "T4")


def test_html_log_bars_are_as_long_as_the_power_of_ten():
    page = plots.html_log_bars([("fast", 1e-3, "1 ms"), ("slow & far", 1e1, "10 s")])
    short, long = (float(width) for width in re.findall(r"width: ?([\d.]+)%", page))
    assert long == 100 and short == pytest.approx(20)
    assert "fast: 1 ms, slow &amp; far: 10 s" in page
    with pytest.raises(ValueError, match="log axis"):
        plots.html_log_bars([("none", 0, "0 s")])
