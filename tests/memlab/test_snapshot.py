"""Snapshots, judged by torch's own reader and by the opcodes that the memory_viz page knows."""

from __future__ import annotations

import gzip
import pickle
import pickletools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.allocator import AllocatorConfig, replay
from memlab.snapshot import (
    SnapshotError,
    plain_pickle,
    read_snapshot,
    snapshot,
    summarise,
    summarise_trace,
    trace_of,
    write_snapshot,
)
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


# --- reading ----------------------------------------------------------------------------------------------


class Evil:
    """Unpickled by the usual way it would write a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_strangers_pickle_is_never_executed(tmp_path: Path, protocol: int) -> None:
    path, target = tmp_path / "evil.pickle", tmp_path / "executed"
    path.write_bytes(pickle.dumps({"segments": [Evil(target)]}, protocol))
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path)
    assert not target.exists() and "\n" not in str(caught.value)
    pickle.loads(path.read_bytes())  # the negative control: here it runs
    assert target.exists()


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner)
    ),
)


@given(plain, st.integers(2, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_read_as_pickle_would(data: object, protocol: int) -> None:
    assert plain_pickle(pickle.dumps(data, protocol)) == data


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_in_one_line(raw: bytes) -> None:
    for start in (b"", b"\x80\x04", b"\x80\x04}\x94(\x8c\x08segments\x94]\x94"):
        try:
            data = plain_pickle(start + raw)
        except SnapshotError as error:
            assert "\n" not in str(error)
        else:
            if isinstance(data, dict):
                summarise(data)


HOSTILE = {
    "a huge memo": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a huge name": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f" + b"x.",
    "a deep tuple": b"\x80\x04" + b")" + b"\x85" * 200_000 + b".",
    "a deep tuple as a key": b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",
    "a doubled tuple as a key": b"\x80\x04})" + b"\x94h\x00" * 1 + b"\x86" + b"q\x01h\x01\x86" * 60 + b"Ns.",
    "no stop": b"\x80\x04}",
    "an empty stack": b"\x80\x04.",
    "marks": b"\x80\x04" + b"(" * 100_000 + b"t.",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_end_in_one_line(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(raw)
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(path)
    assert "\n" not in str(caught.value)


def test_lists_that_unfold_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlab.snapshot._MOST_VISITS", 100_000)
    block = {"address": 0, "size": 512, "state": "inactive"}
    blocks = [block] * 1000
    data = {"segments": [{"device": 0, "total_size": 1, "blocks": blocks}] * 1000, "device_traces": []}
    with pytest.raises(SnapshotError, match="unfold"):
        summarise(plain_pickle(pickle.dumps(data, 4)))


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
def test_what_was_written_is_read(options: str, tmp_path: Path) -> None:
    trace = small_trace()
    result = replay(trace.events, trace.sizes, AllocatorConfig.parse(options))
    write_snapshot(trace, tmp_path / "s.pickle", result)
    data = read_snapshot(tmp_path / "s.pickle")
    assert data == pickle.loads((tmp_path / "s.pickle").read_bytes())
    summary = summarise(data)
    assert (summary.reserved, summary.allocated) == (result.reserved, result.allocated)
    assert summary.requested == trace.end_bytes
    assert sum(row.bytes for row in summary.live) == result.allocated
    free = [b.size for s in result.segments for b in s.blocks if not b.allocated]
    assert (summary.largest_free, summary.unallocated) == (max(free), sum(free))
    assert max(map(len, summary.render().splitlines())) <= 100

    again = trace_of(data)
    again.validate()
    assert again.peak_bytes == trace.peak_bytes and again.end_bytes == trace.end_bytes
    assert again.consumers_at_peak() == trace.consumers_at_peak()
    assert again.peak_phase == trace.peak_phase
    at_end = summarise_trace(trace, at_peak=False)
    assert (at_end.requested, at_end.reserved) == (
        trace.end_bytes,
        replay(trace.events, trace.sizes).reserved,
    )


def test_a_real_snapshots_shape() -> None:
    """As PyTorch writes it: C++ frames, a history cut at its start, a block that waits for a stream."""
    frames = [
        {"filename": "??", "line": 0, "name": "torch::autograd::THPVariable"},
        {"filename": "/venv/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
        {"filename": "/home/me/model.py", "line": 41, "name": "forward"},
    ]
    data = {
        "segments": [{
            "device": 1, "address": 4096, "total_size": 20 * MIB, "blocks": [
                {"size": 2 * MIB, "requested_size": 2 * MIB - 8, "state": "active_allocated",
                 "frames": frames},
                {"size": 4 * MIB, "requested_size": 4 * MIB, "state": "active_pending_free",
                 "frames": frames},
                {"size": 14 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }],
        "device_traces": [[], [
            {"action": "free_completed", "addr": 99, "size": 512, "frames": frames},
            {"action": "oom", "size": 16 * MIB, "device_free": 5, "frames": frames},
        ]],
    }  # fmt: skip
    summary = summarise(data)
    assert (summary.device, summary.waiting, summary.largest_free) == (1, 4 * MIB, 14 * MIB)
    assert summary.live[0].frames[0] == "me/model.py:41 forward"
    assert summary.ooms[0][:2] == (16 * MIB, 5)
    trace = trace_of(data)
    assert trace.before == 2 and trace.end_bytes == 2 * MIB - 8
    assert any("doesn't know consumers" in text for text in trace.caveats)


def test_a_compressed_snapshot_is_read_and_a_damaged_one_named(tmp_path):
    whole = {"total_size": 2048, "blocks": [{"size": 1024, "state": "active_allocated"}]}
    data = {"segments": [whole], "device_traces": []}
    packed = gzip.compress(pickle.dumps(data))
    file = tmp_path / "dump.pickle.gz"
    file.write_bytes(packed)
    assert read_snapshot(file) == data
    file.write_bytes(packed[:-9])
    with pytest.raises(SnapshotError, match=r"dump.pickle.gz: the compressed file is damaged"):
        read_snapshot(file)


@pytest.mark.parametrize(
    "segment",
    [
        [], "text", {"total_size": "x"}, {"total_size": -5}, {"total_size": float("nan")},
        {"total_size": 2**70}, {"total_size": True},
        {"total_size": 512, "blocks": [{"size": 1024, "state": "active_allocated"}]},
        {"total_size": 512, "blocks": {"size": 1}}, {"total_size": 512, "blocks": [[]]},
    ],
)  # fmt: skip
def test_a_damaged_snapshot_is_named_and_gives_no_numbers(segment, tmp_path):
    whole = {"total_size": 2048, "blocks": [{"size": 1024, "state": "active_allocated"}]}
    file = tmp_path / "damaged.pickle"
    file.write_bytes(pickle.dumps({"segments": [whole, segment], "device_traces": []}))
    with pytest.raises(SnapshotError, match="is damaged: segment 1 "):
        read_snapshot(file)
