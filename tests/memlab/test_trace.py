from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.trace import ALL_PHASES, Trace, from_events
from memlab.units import CONSUMERS


def written_step() -> Trace:
    """Two steps by hand: 100 B of weights, 40 B kept for backward, 100 B of gradients, 200 B of states."""
    trace = Trace(info={"model": "toy"})
    trace.allocate(100, "parameters", module="fc", operator="empty", shape=(25,), dtype="float32")
    trace.begin_step()
    for step in range(2):
        trace.mark("forward")
        saved = trace.allocate(40, "activations", module="fc", operator="mm", shape=(10,), dtype="float32")
        trace.mark("backward")
        grad = trace.allocate(100, "gradients", module="fc", operator="mm", shape=(25,), dtype="float32")
        trace.free(saved)
        trace.mark("optimizer")
        if step == 0:
            trace.allocate(200, "optimizer_states", operator="zeros_like", shape=(2, 25), dtype="float32")
        scratch = trace.allocate(10 + step, "temporaries", operator="sqrt")
        trace.free(scratch)
        trace.mark("setup")
        trace.begin_step()
        trace.free(grad)
    return trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    trace, alive = Trace(), []
    for _ in range(draw(st.integers(0, 60))):
        what = draw(st.integers(0, 9))
        if what == 0:
            trace.mark(draw(st.sampled_from(ALL_PHASES)))
        elif what == 1:
            trace.begin_step()
        elif what < 5 and alive:
            trace.free(alive.pop(draw(st.integers(0, len(alive) - 1))))
        else:
            size, who = draw(st.integers(0, 10**13)), draw(st.sampled_from(CONSUMERS))
            alive.append(trace.allocate(size, who, module=draw(st.sampled_from(("", "a", "a.b")))))
    return trace


def replay(trace: Trace) -> list[dict[str, int]]:
    """The plainest reference: live bytes per consumer after every event."""
    alive: set[int] = set()
    out = []
    for event in trace.events:
        if event >= 0:
            alive.add(event)
        else:
            alive.remove(~event)
        live = dict.fromkeys(CONSUMERS, 0)
        for block in alive:
            live[CONSUMERS[trace.consumers_of[block]]] += trace.sizes[block]
        out.append(live)
    return out


@given(traces())
def test_every_figure_follows_from_the_events(trace: Trace) -> None:
    trace.validate()
    states = replay(trace)
    totals = [sum(state.values()) for state in states]
    assert trace.peak_bytes == max(totals, default=0)
    assert trace.end_bytes == (totals[-1] if totals else 0)
    assert trace.consumer_peaks() == {n: max((s[n] for s in states), default=0) for n in CONSUMERS}
    assert sum(trace.consumers_at_peak().values()) == trace.peak_bytes
    assert sum(block.bytes for block in trace.at_peak()) == trace.peak_bytes
    if trace.peak_bytes:
        assert totals[trace.peak_event] == trace.peak_bytes
        assert trace.phase_peaks()[trace.peak_phase] == trace.peak_bytes
    by_phase: dict[str, int] = {}
    for position, total in enumerate(totals):
        phase = trace.phase_at(position)
        entered = totals[position - 1] if position and trace.phase_at(position - 1) != phase else 0
        by_phase[phase] = max(by_phase.get(phase, 0), total, entered)
    for start, stop, phase in trace.spans():
        if start == stop:  # nothing is allocated in it, but what is alive counts
            by_phase[phase] = max(by_phase.get(phase, 0), totals[start - 1] if start else 0)
    assert trace.phase_peaks() == by_phase
    line = trace.timeline()
    assert list(line.total) == totals
    assert all(list(line.consumers[n]) == [s[n] for s in states] for n in CONSUMERS)
    assert sum(row.live_bytes for row in trace.by_module()) == trace.peak_bytes
    assert sum(row.blocks for row in trace.by_operator()) == len(trace.sizes)


@given(traces(), st.integers(1, 20))
def test_a_short_timeline_keeps_the_peak(trace: Trace, points: int) -> None:
    line = trace.timeline(points)
    assert len(line) <= points
    assert max(line.total, default=0) == trace.peak_bytes
    for k in range(len(line)):
        assert sum(part[k] for part in line.consumers.values()) == line.total[k]


@given(traces(), st.data())
def test_a_slice_keeps_the_totals_of_its_events(trace: Trace, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(trace)))
    stop = data.draw(st.integers(start, len(trace)))
    part = trace.slice(start, stop)
    part.validate()
    assert list(part.timeline().total)[part.before :] == list(trace.timeline().total)[start:stop]
    for position in range(start, stop):
        assert part.phase_at(position - start + part.before) == trace.phase_at(position)


@given(traces())
def test_save_and_load_round_trip(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("t") / "step.trace"
    trace.caveats.append("made by hand")
    trace.save(path)
    again = Trace.load(path)
    assert list(again.blocks()) == list(trace.blocks())
    assert (again.events, again.marks, again.steps) == (trace.events, trace.marks, trace.steps)
    assert again.to_dict() == trace.to_dict()
    again.save(path.with_suffix(".again"))
    assert path.read_bytes() == path.with_suffix(".again").read_bytes()


def test_phases_and_peak_of_a_written_step() -> None:
    trace = written_step()
    assert (trace.peak_bytes, trace.peak_phase) == (440, "backward")
    assert trace.phase_peaks() == {"setup": 400, "forward": 340, "backward": 440, "optimizer": 411}
    step = trace.last_step()
    assert step.before == 3  # weights, states, and the gradient that this step begins by freeing
    assert step.phase_peaks() == {"setup": 400, "forward": 340, "backward": 440, "optimizer": 411}
    assert step.consumers_at_peak()["temporaries"] == 0 < step.consumer_peaks()["temporaries"]


def test_last_step_ignores_a_boundary_with_nothing_after_it() -> None:
    trace = written_step()
    assert trace.last_step().events[trace.last_step().before :] != trace.events[:0]
    assert sum(1 for b in trace.last_step().blocks() if b.consumer == "activations") == 1
    assert from_events([5, -5]).last_step().peak_bytes == 5  # no steps: the whole


def test_an_optimizer_that_allocates_nothing_still_ends_its_step() -> None:
    trace = Trace()
    for _ in range(2):
        trace.begin_step()
        trace.mark("forward")
        loss = trace.allocate(50, "activations")
        trace.mark("backward")
        trace.allocate(7, "gradients")
        trace.mark("optimizer")
        trace.mark("setup")
    trace.begin_step()
    trace.free(loss)
    step = trace.last_step()
    assert step.phase_peaks() == {"setup": 114, "forward": 107, "backward": 114, "optimizer": 114}
    assert (step.peak_bytes, step.peak_phase) == (114, "backward")


def test_a_tie_between_steps_and_within_goes_to_the_step() -> None:
    trace = Trace()
    grad = trace.allocate(9, "gradients")
    trace.begin_step()
    trace.free(grad)
    trace.mark("forward")
    trace.allocate(9, "activations")
    assert (trace.peak_bytes, trace.peak_phase) == (9, "forward")


def test_tables_name_who_holds_the_peak() -> None:
    trace = written_step()
    top = trace.by_operator()[0]
    assert (top.name, top.live_bytes) == ("zeros_like", 200)
    assert {row.name for row in trace.by_module(depth=1)} == {"fc", ""}
    assert "peak" in str(trace) and "<table>" in trace._repr_html_()


def test_resized_rounds_every_block() -> None:
    trace = from_events([1, 513, -1])
    assert trace.resized(lambda n: -(-n // 512) * 512).peak_bytes == 512 + 1024


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.allocate(-1), "can't have -1 bytes"),
        (lambda t: t.allocate(1, "gradient"), "did you mean gradients"),
        (lambda t: t.mark("backwards"), "did you mean backward"),
        (lambda t: t.free(7), "block 7 doesn't exist"),
        (lambda t: t.timeline(0), "at least 1"),
        (lambda t: t.slice(3, 1), "no events 3 to 1"),
    ],
)
def test_bad_input_is_one_clear_line(call: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        call(Trace())  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_double_free_is_found() -> None:
    trace = from_events([5, -5])
    trace.free(0)
    with pytest.raises(ValueError, match="freed when it isn't alive"):
        trace.validate()
    with pytest.raises(ValueError, match="no block of that size"):
        from_events([5, -6])


def test_a_broken_file_is_refused_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    path.write_text("no")
    with pytest.raises(ValueError, match="isn't a saved trace"):
        Trace.load(path)
    path.write_bytes(gzip.compress(json.dumps({"format": "other"}).encode()))
    with pytest.raises(ValueError, match="isn't a saved trace of this version"):
        Trace.load(path)
    from_events([5]).save(path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["events"] = [0, 0]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(ValueError, match="allocated twice"):
        Trace.load(path)
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none")
    before = path.read_bytes()
    bad = from_events([5])
    bad.info["model"] = object()
    with pytest.raises(TypeError):
        bad.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.trace"]


def test_needs_no_torch() -> None:
    code = "import sys, memlab.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
