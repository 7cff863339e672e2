"""Snapshots, judged by torch's own reader and by the opcodes that the memory_viz page knows."""

from __future__ import annotations

import pickle
import pickletools
import random
from pathlib import Path

import pytest

from memlab.allocator import AllocatorConfig, replay
from memlab.snapshot import snapshot, write_snapshot
from memlab.trace import Trace
from memlab.units import CONSUMERS, MIB

# read in MemoryViz.js (pytorch, torch/utils/viz): any other opcode stops its unpickler
KNOWN_OPCODES = {
    "PROTO",
    "FRAME",
    "MEMOIZE",
    "MARK",
    "STOP",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "SETITEM",
    "SETITEMS",
    "APPEND",
    "APPENDS",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "NEWTRUE",
    "NEWFALSE",
    "NONE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "BINGET",
    "LONG_BINGET",
    "BINPUT",
    "LONG_BINPUT",
    "LIST",
    "DICT",
}


def small_trace(steps: int = 60, seed: int = 0) -> Trace:
    rng = random.Random(seed)
    trace, live = Trace(), []
    for phase in ("forward", "backward", "optimizer"):
        trace.mark(phase)
        for _ in range(steps):
            if live and rng.random() < 0.45:
                trace.free(live.pop(rng.randrange(len(live))))
            else:
                size = rng.choice([4, 700, MIB, 3 * MIB, 12 * MIB + 1, 31 * MIB])
                line = rng.choice(["model.py:12", "", "C:\\x\\train.py:3", "<stdin>"])
                block = trace.allocate(
                    size,
                    rng.choice(CONSUMERS),
                    module="h.0.mlp",
                    operator="aten::mm",
                    shape=(size // 4,),
                    dtype="fp32",
                    line=line,
                )
                live.append(block)
    trace.allocate(0, "activations")
    return trace


@pytest.mark.parametrize("options", ["", "expandable_segments:True", "max_split_size_mb:20"])
def test_torchs_own_reader_accepts_it(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    trace = small_trace()
    result = replay(trace.events, trace.sizes, AllocatorConfig.parse(options))
    path = tmp_path / "snapshot.pickle"
    write_snapshot(trace, path, result)
    assert list(tmp_path.iterdir()) == [path]
    data = pickle.loads(path.read_bytes())
    assert data == snapshot(trace, result)

    total = sum(segment["total_size"] for segment in data["segments"])
    assert total == result.reserved
    assert sum(s["allocated_size"] for s in data["segments"]) == result.allocated
    assert sum(s["requested_size"] for s in data["segments"]) == trace.end_bytes
    assert f"total_reserved: {viz.Bytes(total)}" in viz.segsum(data)
    listing = viz.trace(data)
    assert listing.count("cudaMalloc") == sum(e[1] == "segment_alloc" for e in result.driver_events)
    html = viz.trace_plot(data) + viz.segment_plot(data) + viz.trace_plot(data, plot_segments=True)
    assert html.count("snapshot.pickle") == 3
    for lines in (viz.segments, viz.memory):
        text = lines(data, format_flamegraph=lambda flame: flame)
        assert "aten::mm" in text and "h.0.mlp" in text
    assert len(viz.filter_alloc_free_pairs(data)["device_traces"][0]) < len(trace.events)
    assert not capsys.readouterr().out


def test_only_opcodes_that_the_page_reads(tmp_path: Path) -> None:
    write_snapshot(small_trace(400), tmp_path / "s.pickle")
    raw = (tmp_path / "s.pickle").read_bytes()
    opcodes = list(pickletools.genops(raw))
    assert {op.name for op, _, _ in opcodes} <= KNOWN_OPCODES
    assert opcodes[0][1] == 4


def test_events_are_in_order_and_paired() -> None:
    trace = small_trace()
    data = snapshot(trace)
    live: dict[int, int] = {}
    mapped: list[tuple[int, int]] = []
    for event in data["device_traces"][0]:
        if event["action"] == "segment_alloc":
            mapped.append((event["addr"], event["addr"] + event["size"]))
        elif event["action"] == "alloc":
            assert event["addr"] not in live and event["category"] in CONSUMERS
            assert any(a <= event["addr"] and event["addr"] + event["size"] <= b for a, b in mapped)
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
    assert sum(live.values()) == trace.end_bytes
    active = {b["address"] for s in data["segments"] for b in s["blocks"] if b["state"] == "active_allocated"}
    assert active == set(live)
    # memory_viz can't do without this category once there are any
    assert any(e.get("category") == "unknown" for e in data["device_traces"][0])


def test_frames_name_line_module_and_tensor() -> None:
    trace = Trace()
    trace.mark("forward")
    trace.allocate(
        64, "activations", module="h.3", operator="aten::mm", shape=(4, 4), dtype="fp32", line="a/b.py:7"
    )
    trace.allocate(64)
    first, second = [e["frames"] for e in snapshot(trace)["device_traces"][0] if e["action"] == "alloc"]
    assert first == [
        {"filename": "a/b.py", "line": 7, "name": "aten::mm"},
        {"filename": "<module>", "line": 0, "name": "h.3"},
        {"filename": "<tensor>", "line": 0, "name": "activations of forward, 4x4 fp32"},
    ]
    assert second[0] == {"filename": "<operator>", "line": 0, "name": "allocation"}


def test_out_of_memory_ends_the_trace() -> None:
    trace = Trace()
    for _ in range(3):
        trace.allocate(20 * MIB)
    result = replay(trace.events, trace.sizes, capacity=50 * MIB, context=4 * MIB)
    data = snapshot(trace, result)
    last = data["device_traces"][0][-1]
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 20 * MIB, 6 * MIB)
    assert len(data["segments"]) == 2
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "raise OutOfMemoryError # 20.0MiB requested, 6.0MiB free in CUDA" in viz.trace(data)


def test_a_replay_of_another_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="has 0 blocks, the trace 1"):
        trace = Trace()
        trace.allocate(1)
        snapshot(trace, replay([], []))
