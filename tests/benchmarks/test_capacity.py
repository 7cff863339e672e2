"""A virtual T4 runs what ran on a T4, and refuses what doesn't fit where the replay refuses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import capacity, streams
from benchmarks.capacity import CARD, CONTEXT, played, replayed, smallest_by_replay, smallest_by_running
from memlab.allocator import ROUND_LARGE
from memlab.published import measurements
from memlab.trace import Trace

from .test_accuracy import STORED, STREAMS, needs_transformers

torch.set_num_threads(1)
RESULTS = Path(capacity.__file__).with_name("results")


def trace(name: str) -> Trace:
    return streams.load(STREAMS / f"{name}.xz").trace


@pytest.mark.parametrize("name", STORED)
def test_a_t4_runs_what_ran_on_a_t4(name: str) -> None:
    """With the card's own capacity and context; nothing has to be given back to the driver for it."""
    found = replayed(trace(name), CARD.memory_bytes)
    assert found.oom is None and found.retries == 0
    assert found.process_peak <= CARD.memory_bytes
    smallest = smallest_by_replay(trace(name))
    assert found.peak_requested + CONTEXT <= smallest <= found.process_peak


def test_no_published_t4_step_is_refused() -> None:
    """What is reserved without a limit, at worst, and the context: within the card nothing can be refused."""
    rows = {row["id"] for row in measurements() if "FitCheck" in row["source"] and row.get("process_mib")}
    predicted = json.loads((RESULTS / "accuracy.json").read_text())["rows"]
    needs = {
        entry["id"]: max(entry["predicted_bytes"], entry["predicted_high_bytes"] or 0)
        for entry in predicted
        if entry["quantity"] == "process" and entry["id"] in rows
    }
    assert len(needs) >= 30
    assert max(needs.values()) <= CARD.memory_bytes


@pytest.mark.parametrize("name", ["37", "40"])
def test_the_card_itself_refuses_where_the_replay_does(name: str) -> None:
    """Tensors of a stored run's sizes, made on a virtual T4: it runs there, and on no less than by replay."""
    stream = trace(name)
    assert played(stream, CARD.memory_bytes) == ""
    smallest = smallest_by_replay(stream)
    assert played(stream, smallest) == ""
    for less in (1, 40):
        size = smallest - less * ROUND_LARGE
        refused = replayed(stream, size).oom
        assert refused is not None
        assert played(stream, size).startswith(str(refused))
        assert refused.reserved + refused.segment + CONTEXT > size


def test_bisection_of_what_runs_finds_the_replays_card() -> None:
    stream = trace("39")
    found = smallest_by_running(lambda size: played(stream, size), stream)
    assert found == smallest_by_replay(stream)


@needs_transformers
def test_the_published_script_on_cards_that_are_too_small() -> None:
    """The step of a published row itself, with transformers and peft, at the boundary."""
    from benchmarks.accuracy import traced
    from benchmarks.workloads import libraries

    libraries()
    row = next(r for r in measurements() if str(r["id"]) == "39")
    recorded = traced(row).trace
    smallest = smallest_by_replay(recorded)
    assert capacity.run(row, CARD.memory_bytes) == capacity.run(row, smallest) == ""
    refused = replayed(recorded, smallest - ROUND_LARGE).oom
    assert refused is not None
    assert capacity.run(row, smallest - ROUND_LARGE).startswith(str(refused))


def test_without_transformers_the_script_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    if not needs_transformers.args[0]:
        pytest.skip("transformers and peft are installed")
    assert capacity.main([]) == 2
    assert "memlab[benchmarks]" in capsys.readouterr().err
