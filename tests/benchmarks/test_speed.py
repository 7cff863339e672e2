"""The speed benchmark runs and compares equal work. Its figures aren't tested: they are the machine's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import speed
from memlab.models import model

torch.set_num_threads(1)
SMALL = replace(model("llama2-7b"), layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=96, vocab=300)


def test_both_trackers_see_the_same_step() -> None:
    """Equal to the byte, else the ratio of their times would compare different work."""
    theirs, ours = speed.with_memtracker(SMALL), speed.traced(SMALL)
    assert theirs["peak_bytes"] == ours["peak_bytes"] > 0
    on_card = speed.traced(SMALL, checkpointing="full", card=speed.CARD)
    assert on_card["events"] > ours["events"]


def test_the_other_measures_run() -> None:
    whole, ranks = speed.whole_call(SMALL), speed.on_ranks(SMALL, world_size=4)
    assert 0 < ranks["peak_bytes"] < whole["peak_bytes"]
    real = speed.tracked(replace(SMALL, context=256), pairs=1)
    assert real["seconds"] > 0 and real["plain_seconds"] > 0


def test_a_measure_runs_in_a_process_of_its_own() -> None:
    figures = speed.measured("traced", "gpt2", layers=1)
    assert figures["seconds"] > 0 and figures["rss_mib"] >= 0
    with pytest.raises(RuntimeError, match=r"traced of gpt-two failed: .*unknown model"):
        speed.measured("traced", "gpt-two")


def test_the_report_has_the_keys_and_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(measure: str, name: str = "", layers: int | None = None, **options: Any) -> dict[str, float]:
        seconds = 30.0 if measure == "with_memtracker" else 2.0
        return {"seconds": seconds, "wall_seconds": seconds, "plain_seconds": 1.6, "peak_bytes": 7.0,
                "rss_mib": 300.0, "events_per_second": 1e6}  # fmt: skip

    monkeypatch.setattr(speed, "measured", measured)
    out = tmp_path / "speed.json"
    assert speed.main(["--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert set(speed.GOALS) <= set(data)
    assert data["trace_vs_memtracker_80_layers"] == data["trace_vs_memtracker_24_layers"] == 15
    assert data["tracked_vs_plain"] == 1.25
    assert len(data["raw"]["memtracker_24_layers"]) == 3
    assert list(tmp_path.iterdir()) == [out]
