import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import hardware, units, widgets
from memlab.footprint import footprint
from memlab.recipe import Recipe
from memlab.report import trace_step

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


def said(box):
    return box.value.replace("\u00a0", " ")


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
        for i, (_, value) in enumerate(control.options):
            now = {**explorer.start, control.key: value}
            try:
                whole = i % 4 == 0  # the step alone takes a tenth of the time
                view = (None if whole else explorer.quick(now, explorer.start)) or explorer.show(
                    now, explorer.start
                )
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


# -- what the live part remembers ---


def test_the_last_of_many_changes_wins_and_is_counted_from_where_it_began():
    made, boxes = live(widgets.four_consumers("gpt2", "T4"))
    for value in (2, 4, 8, 64, 16):
        boxes["Micro-batch"].value = value
    assert "Micro-batch 1 → 16" in made.status.value and "micro-batch 16," in made.lesson.value
    boxes["Checkpointing"].value = "full"
    assert "Checkpointing none → full" in made.status.value and "Micro-batch" not in made.status.value


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_order_of_changes_ends_in_the_view_of_the_last_choices(data):
    explorer = widgets.four_consumers("gpt2", "T4")
    made, _ = live(explorer)
    for _ in range(data.draw(st.integers(1, 6))):
        control = data.draw(st.sampled_from(explorer.controls))
        made.boxes[control.key].value = data.draw(st.sampled_from([value for _, value in control.options]))
    now = {key: box.value for key, box in made.boxes.items()}
    try:
        step = widgets._step(now)
        expected = step.footprint
    except ValueError as error:
        if now != explorer.start:
            assert str(error).split("'")[0] in made.status.value
        return
    if made.valid == now and made.moving:
        assert units.format_bytes(expected.peak_bytes) in said(made.status)
        before = widgets._step(made.before).footprint
        assert widgets._signed(expected.peak_bytes - before.peak_bytes) in said(made.status)


def test_an_error_in_a_callback_is_a_line(monkeypatch):
    explorer = widgets.four_consumers("gpt2", "T4")
    made, boxes = live(explorer)
    monkeypatch.setattr(explorer, "show", lambda now, before: {}["lost"])
    boxes["Micro-batch"].value = 2
    assert "The explorer failed: KeyError: &#x27;lost&#x27;" in made.status.value and not made.answer.value


@pytest.mark.parametrize("name", STEPS)
def test_the_quick_part_of_a_view_is_that_of_the_whole(name):
    explorer = EXPLORERS[name]()
    for control in explorer.controls:
        for _, value in itertools.islice(control.options, 3):
            now = {**explorer.start, control.key: value}
            quick = explorer.quick(now, explorer.start)
            if quick is not None:
                whole = explorer.show(now, explorer.start)
                assert (quick.status(), quick.step_html()) == (whole.status(), whole.step_html())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"precision": "fp32"}, "step 2 of the seven, mixed precision"),
        ({"checkpointing": "full"}, "step 4 of the seven, checkpointing"),
        ({"attention": "eager"}, "step 5 of the seven, SDPA or flash"),
        ({"ranks": 8}, "data parallelism, which shares no memory"),
        ({"zero_stage": 3}, "ZeRO shards over ranks, and there is one"),
        ({"zero_stage": 3, "ranks": 8}, "ZeRO none → stage 3, Ranks 1 → 8"),
        ({"sequence": 4096}, "gpt2 has 1,024 positions and no more"),
        ({"optimizer": ("sgd", "foreach")}, "another optimizer, which changes training, none of the seven"),
        ({"optimizer": ("adamw", "fused")}, "the same update, carried out in another way, none of the seven"),
    ],
)
def test_a_change_names_its_step_of_the_seven(changed, says):
    assert says in consumers(**changed).change


# -- trace it ---


def trace(made):
    made._trace()
    run = made.run
    assert run is None or run.wait(120)
    return made


def test_trace_it_gives_the_trace_beside_the_formula():
    made, boxes = live(widgets.four_consumers("gpt2", "T4"))
    boxes["Sequence"].value = 128
    trace(made)
    expected = trace_step("gpt2", Recipe(precision="amp-fp16", sequence=128), gpu="T4", limit=2**62)
    formula = footprint("gpt2", Recipe(precision="amp-fp16", sequence=128), "T4")
    assert f"Traced: peak {units.format_bytes(expected.peak_bytes)} in" in said(made.traced)
    assert widgets._signed(formula.peak_bytes - expected.peak_bytes) in said(made.traced)
    assert f"{len(expected):,} allocations" in made.result.value
    assert made.button.description == "Trace it"
    boxes["Micro-batch"].value = 2
    assert not made.traced.value and not made.result.value  # it was another step's


def test_a_sharded_step_is_traced_too():
    explorer = widgets.zero_stages("gpt2", "T4", ranks=4)
    made = trace(widgets._Live(explorer))
    assert "Traced: peak" in made.traced.value and "fully_shard" in made.result.value


def test_cancel_ends_the_child_and_its_result_never_comes():
    made, boxes = live(widgets.four_consumers("llama2-70b", "H200"))
    made._trace()
    run = made.run
    assert "Tracing" in made.traced.value and made.button.description == "Cancel"
    made._trace()
    assert made.run is run  # one at a time
    made._cancel()
    assert "Trace cancelled" in made.traced.value and made.button.description == "Trace it"
    assert run.wait(20) and run.process.returncode != 0
    assert "Trace cancelled" in made.traced.value and not made.progress.value
    made._trace()
    run = made.run
    boxes["Micro-batch"].value = 2
    assert "a choice changed" in made.traced.value and run.wait(20)


def test_what_cannot_be_traced_is_one_clear_line(monkeypatch):
    made, boxes = live(widgets.four_consumers("gpt2", "T4"))
    boxes["Attention"].value = "flash"
    assert "Not traced: attention flash needs" in trace(made).traced.value
    boxes["Attention"].value = "sdpa"
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended without a result (exit code 1)" in trace(made).traced.value
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "Not traced: The explorer failed: FileNotFoundError" in trace(made).traced.value


def test_a_refusal_in_the_child_is_a_line():
    made, boxes = live(widgets.seven_steps("gpt2", "T4", cards=2))
    boxes["6 ZeRO"].value, boxes["7 Offload"].value = 1, ("optimizer_states:cpu",)
    assert "Not traced: RecipeError: " in trace(made).traced.value


def test_the_child_ends_with_who_started_it():
    script = (
        "import time; from memlab.background import Background; from memlab.recipe import Recipe\n"
        "run = Background('llama2-70b', Recipe(), None, lambda *a: None, lambda o: None)\n"
        "print(run.process.pid, flush=True); time.sleep(1.5); import os; os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    child = int(done.stdout)
    end = time.monotonic() + 20
    while _alive(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("name", "key"),
    [("checkpoint_segments", "segment"), ("micro_batches", "micro_batch"), ("zero_stages", "zero_stage")],
)
def test_the_choice_is_marked_among_the_bars(name, key):
    explorer = getattr(widgets, name)()
    [control] = [control for control in explorer.controls if control.key == key]
    for _, value in control.options:
        view = explorer.show({**explorer.start, key: value}, None)
        assert view.chosen in view.bars


# -- what is shown is what is computed ---


def test_a_micro_batch_is_at_most_the_batch_and_its_slider_follows():
    made, boxes = live(widgets.micro_batches("gpt2", "RTX-4090", batch=1024))
    boxes["Micro-batch"].value = 128
    boxes["Batch"].value = 32
    assert "a micro-batch is at most the batch, 32 samples. This is step 1 of the seven" in made.status.value
    assert boxes["Micro-batch"].value == 32 and made.valid["micro_batch"] == 32
    assert "1 micro-batch of 32: 32 samples a step." in made.lesson.value
    boxes["Micro-batch"].value = 48
    assert "±0 B at the peak: a micro-batch is at most the batch" in said(made.status)
    assert boxes["Micro-batch"].value == 32
    boxes["Micro-batch"].value = 3
    assert "Micro-batch 32 → 3: " in made.status.value
    assert "11 micro-batches of 3: 33 samples a step, more than the batch of 32." in made.lesson.value


def test_a_micro_batch_is_at_most_a_cards_share_of_the_batch():
    made, boxes = live(widgets.seven_steps("gpt2", "T4", cards=2, batch=32))
    boxes["1 Micro-batch"].value = 96
    assert "at most a card&#x27;s share of the batch, 16 samples" in made.status.value
    assert boxes["1 Micro-batch"].value == 16
    boxes["Cards"].value = 64
    assert boxes["1 Micro-batch"].value == 1
    assert "64 samples a step, more than the batch of 32." in made.lesson.value


@pytest.mark.parametrize(
    ("name", "moves", "slider", "stands", "says"),
    [
        ("one_step", (("Model", "densenet264"), ("Sequence", 32768), ("Model", "gpt2")), "Sequence", 1024,
         "gpt2 has 1,024 positions and no more"),
        ("checkpoint_segments", (("Segment", 96),), "Segment", 32, "llama2-7b has 32 blocks and no more"),
        ("checkpoint_segments", (("Segment", 24), ("Model", "gpt2")), "Segment", 12, "gpt2 has 12 blocks"),
        ("one_step", (("Model", "bert-large"),), "Sequence", 512, "bert-large has 512 positions"),
    ],
)  # fmt: skip
def test_a_slider_above_what_counts_moves_back(name, moves, slider, stands, says):
    made, boxes = live(EXPLORERS[name]())
    for label, value in moves:
        boxes[label].value = value
    assert boxes[slider].value == stands and says in made.status.value


def test_numbers_are_written_in_one_style():
    view = widgets.micro_batches("gpt2", "RTX-4090", batch=1024).twin
    assert view.rows[0][2] == "1,024" and "sequence 1,024" in view.note
    step = widgets.Step("gpt2", Recipe(sequence=128), "T4")
    peak = step.footprint.peak_bytes + units.MIB
    outcome = {"peak_bytes": peak, "peak_phase": "backward", "rows": (), "events": 1, "seconds": 1.0}
    assert f"−1.00 MiB (−{units.MIB / peak:.2%})" in widgets._traced(step, outcome)[0]


def test_no_line_ends_between_a_number_and_its_unit(explorer):
    made, _ = live(explorer)
    for shown in (made.status, made.answer, made.lesson):
        assert not re.search(r"\d ([KMGT]i?)?B\b", shown.value)
    assert not re.search(r"\d ([KMGT]i?)?B\b", explorer.twin.html())


@pytest.mark.parametrize("name", STEPS)
def test_the_note_says_where_the_seven_steps_come_from(name):
    assert "(chapter 6 takes one after the other)" in EXPLORERS[name]().twin.note


def test_one_button_traces_and_cancels_but_not_by_a_double_click():
    made, _ = live(widgets.four_consumers("llama2-70b", "H200"))
    made._pressed(None)
    run = made.run
    made._pressed(None)
    assert made.run is run and made.button.description == "Cancel"
    time.sleep(0.4)
    made._pressed(None)
    assert made.run is None and "Trace cancelled" in made.traced.value and run.wait(20)
