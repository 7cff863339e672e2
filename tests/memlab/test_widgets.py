import json
import subprocess
import sys

import pytest

from memlab import hardware, units, widgets
from memlab.footprint import footprint
from memlab.recipe import Recipe

EXPLORERS = {
    "memory_levels": widgets.memory_levels,
    "one_step": widgets.one_step,
    "four_consumers": widgets.four_consumers,
    "checkpoint_segments": widgets.checkpoint_segments,
    "zero_stages": widgets.zero_stages,
    "micro_batches": widgets.micro_batches,
    "seven_steps": widgets.seven_steps,
    "traffic": widgets.traffic,
}
STEPS = [name for name in EXPLORERS if name != "memory_levels"]


@pytest.fixture(params=list(EXPLORERS))
def explorer(request):
    return EXPLORERS[request.param]()


def live(explorer):
    """Its widgets by label, and what it shows."""
    made = widgets._Live(explorer)
    return made, {control.label: made.boxes[control.key] for control in explorer.controls}


def test_the_twin_is_a_table_and_a_figure(explorer):
    twin = explorer.twin
    assert twin.figure.memlab_alt and twin.figure._suptitle.get_text()
    tables = twin.tables()
    assert twin.html().count("<tr>") == sum(len(rows) + 1 for _, rows in tables) and tables
    assert "role=" not in twin.html()  # nothing in it moves
    assert str(explorer).startswith(twin.finding)
    assert all(len(row) == len(header) for header, rows in tables for row in rows)


def test_every_control_has_a_label_and_its_start_among_the_options(explorer):
    assert {c.key for c in explorer.controls} == set(explorer.start)
    for control in explorer.controls:
        assert control.label
        assert explorer.start[control.key] in [value for _, value in control.options]


def test_every_choice_gives_a_view_or_one_clear_line(explorer):
    for control in explorer.controls:
        given = 0
        for _, value in control.options:
            now = {**explorer.start, control.key: value}
            try:
                view = explorer.show(now, explorer.start)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 250
                continue
            given += 1
            assert view.status() and view.step_html() + view.lesson_html()
            assert (control.label in view.change) == (value != explorer.start[control.key])
        assert given > len(control.options) / 2, control.label


def test_controls_answer(explorer):
    made, boxes = live(explorer)
    for label, box in boxes.items():
        before = made.status.value, made.answer.value, made.lesson.value
        assert box.description == label
        values = [value for _, value in box.options]
        box.value = values[values.index(box.value) - 1]  # from the first to the last
        assert (made.status.value, made.answer.value, made.lesson.value) != before
    assert "role='img' aria-label=" in made.answer.value + made.lesson.value


def levels(**changed):
    explorer = widgets.memory_levels()
    return explorer.show({**explorer.start, **changed}, explorer.start if changed else None)


def test_memory_levels_are_bytes_over_bandwidth():
    view = levels()
    times = {row[0]: row[2] for row in view.rows}
    assert times["PCIe4"] == "2.54 s" and times["HBM2e of A100-80GB"] == "39.2 ms"
    assert view.finding.startswith("80.00 GB take 2.54 s by PCIe4")
    rates = [float(row[1].removesuffix(" GB/s").replace(",", "")) for row in view.rows]
    assert rates == sorted(rates, reverse=True)


def test_memory_levels_says_what_a_change_did():
    view = levels(size="1 GB")
    assert view.change == "Bytes to move 80 GB → 1 GB: 2.54 s → 31.7 ms."
    assert "NVLink3" not in {
        row[0] for row in levels(gpu="T4").rows
    }  # a T4 reaches its peers through the host
    assert levels(path=widgets._OWN).finding.endswith("in the HBM2e of A100-80GB")


def test_memory_levels_takes_any_size_and_path():
    explorer = widgets.memory_levels("rtx 4090", size="13 GiB", path="pcie3")
    assert explorer.start == {"gpu": "RTX-4090", "size": "13 GiB", "path": "PCIe3"}
    assert "13.96 GB take 886 ms by PCIe3" in explorer.twin.finding


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpu": "A100"}, "ambiguous"),
        ({"size": "many"}, "as a size"),
        ({"size": "0 GB"}, "at least 1 byte"),
        ({"path": "USB"}, "unknown link"),
    ],
)
def test_memory_levels_refuses(given, says):
    with pytest.raises(ValueError, match=says):
        widgets.memory_levels(**given)


def consumers(**changed):
    explorer = widgets.four_consumers("gpt2", "T4")
    return explorer.show({**explorer.start, **changed}, explorer.start)


def test_four_consumers_starts_in_what_the_card_can_do():
    assert widgets.four_consumers("gpt2", "T4").start["precision"] == "amp-fp16"
    assert widgets.four_consumers("gpt2", "L4").start["precision"] == "amp-bf16"


def test_four_consumers_agrees_with_the_footprint():
    expected = footprint("gpt2", Recipe(precision="fp32", micro_batch=1), "T4")
    view = consumers(precision="fp32")
    ((_, rows),) = view.tables()
    now = {row[0]: row[2] for row in rows}
    assert now["all"] == units.format_bytes(expected.peak_bytes)
    assert now["parameters"] == units.format_bytes(expected.consumers_at_peak()["parameters"])
    assert view.change.startswith("Precision amp-fp16 → fp32: ") and "step 2 of the seven" in view.change


def test_four_consumers_says_what_does_not_fit():
    capacity = hardware.gpu("T4").memory_bytes
    view = consumers(micro_batch=128)
    assert f"too much on {hardware.gpu('T4').name}" in view.finding
    assert units.format_bytes(capacity) in view.figure.memlab_alt and "Micro-batch 1 → 128: +" in view.change
    assert "free on T4" in consumers(micro_batch=2).finding


def test_a_combination_that_cannot_work_is_said_and_left_behind():
    made, boxes = live(widgets.four_consumers("gpt2", "T4"))
    boxes["Attention"].value = "flash"
    assert "compute capability" in made.status.value and not made.answer.value
    boxes["Attention"].value = "sdpa"
    boxes["Micro-batch"].value = 4
    assert "Micro-batch 1 → 4" in made.status.value and made.answer.value


def test_four_consumers_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="did you mean"):
        widgets.four_consumers("gpt3-175", "T4")
    with pytest.raises(ValueError, match="unknown GPU"):
        widgets.four_consumers("gpt2", "T5000")


SHOW = """
import json, os, types
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
if {kernel}:
    shell.kernel = types.SimpleNamespace()
from IPython.utils.capture import capture_output
from memlab import widgets
widgets.Explorer.live = lambda self: types.SimpleNamespace(_repr_mimebundle_=lambda **kw: {{"live": 1}})
with capture_output() as got:
    shell.run_cell("from memlab import widgets; widgets.memory_levels()")
print(json.dumps([sorted(o.data) for o in got.outputs]))
"""


@pytest.mark.parametrize(
    ("kernel", "grading", "live"), [(True, "0", True), (True, "1", False), (False, "0", False)]
)
def test_the_twin_always_shows_and_the_controls_where_someone_can_move_them(
    kernel, grading, live, monkeypatch
):
    monkeypatch.setenv("MEMLAB_GRADING", grading)
    script = SHOW.format(kernel=kernel)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown[:2] == [["text/html", "text/plain"], ["image/png", "text/plain"]]
    assert (len(shown) == 3) == live


def test_checkpoint_segments_agree_with_the_footprint():
    explorer = widgets.checkpoint_segments("gpt2", "T4")
    recipe = Recipe(precision="bf16", optimizer_impl="fused", micro_batch=4, checkpointing="every-3")
    peaks = {row[0]: row[2] for row in explorer.twin.rows}
    assert peaks["3"] == units.format_bytes(footprint("gpt2", recipe, "T4").peak_bytes)
    assert peaks["12, the whole model"]


def test_checkpoint_segments_refuses_a_convnet():
    with pytest.raises(ValueError, match="equal blocks"):
        widgets.checkpoint_segments("resnet50")


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    now = {**widgets.micro_batches().start, "sequence": 128}
    largest = widgets._largest_micro_batch(now)
    capacity = hardware.gpu(now["gpu"]).memory_bytes
    assert 1 < largest < now["batch"]
    assert widgets._micro_batch_peak(now, largest) <= capacity < widgets._micro_batch_peak(now, largest + 1)
    assert widgets._largest_micro_batch({**now, "model": "llama2-70b"}) == 0


def test_the_seven_steps_agree_with_the_footprint():
    explorer = widgets.seven_steps("bert-large", "T4", cards=1, batch=32)
    peaks = {row[0]: row[1] for row in explorer.twin.rows}
    assert len(peaks) == 8
    recipe = Recipe(precision="amp-fp16", attention="sdpa", accumulation=2, checkpointing="full")
    assert peaks["5 SDPA"] == units.format_bytes(footprint("bert-large", recipe, "T4").peak_bytes)
    assert peaks["6 ZeRO-3"] == peaks["5 SDPA"]  # one card
    more = explorer.show({**explorer.start, "optimizer": ("adamw", "fused")}, explorer.start)
    assert "AdamW, foreach → AdamW, fused" in more.change and more.figure is not None


def test_the_seven_steps_refuse_fewer_samples_than_cards():
    with pytest.raises(ValueError, match="one sample for each"):
        widgets.seven_steps("gpt2", "T4", cards=8, batch=4)
