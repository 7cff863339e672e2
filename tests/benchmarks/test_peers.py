"""The comparison with other estimators: which workloads, and how errors are judged."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from benchmarks import peers


def test_workloads_are_the_complete_training_runs_with_what_was_measured():
    works = peers.workloads()
    assert {w["group"] for w in works} == {
        "A6000, full training",
        "A6000, LoRA",
        "T4, fp16 LoRA",
        "T4, nf4 LoRA",
    }
    assert all(w["measured"]["allocated"] > 10**9 for w in works)
    assert json.loads(json.dumps(works)) == works
    assert all("class" not in w["config"] for w in works)


def test_each_peer_is_judged_on_what_it_claims():
    work = {
        "id": 7, "group": "T4", "about": "x", "quantity": "process",
        "measured": {"allocated": 1000, "process": 2000},
    }  # fmt: skip
    answers = {
        "vramcalc": 1100,
        "fitcheck": 1900,
        "accelerate": "no LoRA",
        "deepspeed": "no",
        "torchinfo": "no",
    }
    ours = {"rows": [{"id": 7, "quantity": "allocated", "predicted_bytes": 1001}]}
    (row,) = peers.compare([work], {"answers": [answers]}, ours)
    assert row["peers"]["memlab"]["error"] == pytest.approx(0.001)
    assert row["peers"]["vramcalc"]["error"] == pytest.approx(0.1)
    assert row["peers"]["fitcheck"]["error"] == pytest.approx(-0.05)
    assert row["peers"]["accelerate"] == {"quantity": "allocated", "why_not": "no LoRA"}
    text = peers.render([row])
    assert "+10.00%" in text
    assert "no answer" in text


def test_a_peers_interpreter_that_fails_is_one_line(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    with pytest.raises(SystemExit, match="exit code 3"):
        peers.ask(Path(broken), peers.workloads()[:1])


def test_the_stored_comparison_is_of_these_workloads():
    stored = json.loads((peers.HERE / "results" / "peers.json").read_text())
    assert [row["id"] for row in stored["rows"]] == [w["id"] for w in peers.workloads()]
    ours = [abs(row["peers"]["memlab"]["error"]) for row in stored["rows"]]
    assert max(ours) < 0.005
