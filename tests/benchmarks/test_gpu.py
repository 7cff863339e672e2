"""The GPU benchmark in its small form on the CPU, and the parts that need no GPU at all."""

from __future__ import annotations

import json

from benchmarks import gpu
from memlab import hardware, models
from memlab.allocator import replay
from memlab.recipe import Recipe


def test_small_form_writes_formula_trace_and_measurement_equal_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    gpu.main(["--small", "--json", str(out)])
    result = json.loads(out.read_text())
    assert set(result["rows"]) == set(gpu.workloads(small=True))
    for name, row in result["rows"].items():
        assert row["formula"]["allocated"] == row["trace"]["allocated"] == row["measured"]["allocated"], name
        measured = {phase: peaks["allocated"] for phase, peaks in row["measured"]["phases"].items()}
        assert row["trace"]["phases"] == measured
    assert "lenet5" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.part"))


def test_a_step_that_gives_no_answer_costs_only_its_row(monkeypatch):
    monkeypatch.setattr(gpu, "_child", lambda *_, **__: {"failed": "RuntimeError: no such device"})
    result = gpu.run(60, small=True)
    assert all("failed" in row["measured"] for row in result["rows"].values())
    assert "no such device" in gpu.render(result)


def test_no_time_left_is_said():
    result = gpu.run(1, small=True)
    assert "no time left" in gpu.render(result)


def test_every_workload_is_a_model_and_recipe_that_exist():
    names = gpu.workloads(small=False)
    assert len(names) >= 25
    for model, fields in names.values():
        Recipe(**fields).resolve(models.model(model))


def test_recorded_events_become_a_replay():
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 2 << 20},
        {"action": "alloc", "addr": 0, "size": 1000},
        {"action": "alloc", "addr": 1024, "size": 512},
        {"action": "free_requested", "addr": 0, "size": 1000},
        {"action": "free_completed", "addr": 0, "size": 1000},
        {"action": "free_completed", "addr": 77, "size": 8},  # allocated before recording began
        {"action": "alloc", "addr": 0, "size": 700},
    ]
    events, sizes = gpu.events_of(history)
    assert (events, sizes) == ([0, 1, ~0, 2], [1000, 512, 700])
    assert replay(events, sizes).peak_allocated == 1024 + 512


def test_the_card_of_a_device_name():
    assert gpu.card_of("NVIDIA A100-SXM4-80GB", (8, 0))[0].name.startswith("A100")
    assert gpu.card_of("Tesla T4", (7, 5)) == (hardware.gpu("T4"), "")
    near, note = gpu.card_of("NVIDIA Unheard 9000", (9, 0))
    assert near.compute_capability == (9, 0)
    assert "isn't in memlab.hardware" in note
