"""A trace: every allocation and free of a piece of training, in order.

This is the one data structure of the library. A real step on a CPU, a real step on a GPU and a step on a GPU
that isn't there all give a `Trace`, and everything that is shown is derived from it.

A **block** is one tensor storage: bytes, consumer, module, operator, phase, shape, dtype, source line.
An **event** is an integer: `i` allocates block `i`, `~i` (that is, `-i - 1`) frees it. A **mark** is a pair
(position in the event list, phase): from that event on, the phase is the one named. Columns are arrays, not
one object per event, so that millions of events stay cheap. Sizes are as requested: no allocator rounding.
"""

from __future__ import annotations

import gzip
import html
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memlab.files import unpack_up_to, write_whole
from memlab.units import CONSUMERS, PHASES, format_bytes, unknown_name

_LARGEST = 2**30  # of a saved trace, unpacked: some 20 million events
FORMAT = "memlab.trace/1"
#: What happens before the first forward and between two steps.
SETUP = "setup"
ALL_PHASES = (SETUP, *PHASES)

_CONSUMER_INDEX = {name: i for i, name in enumerate(CONSUMERS)}
_TEXT_COLUMNS = ("module", "operator", "phase", "dtype", "line")


class Block(NamedTuple):
    """One storage. `bytes` is what the tensor library asked for; `line` is 'file.py:12' or ''."""

    id: int
    bytes: int
    consumer: str
    module: str
    operator: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    line: str


class Row(NamedTuple):
    """One line of a table by operator or by module."""

    name: str
    blocks: int  # how many blocks it allocated
    allocated_bytes: int  # their sum, over the whole trace
    live_bytes: int  # what of it is alive at the peak


@dataclass(frozen=True)
class Timeline:
    """Live bytes after single events: `total[k]`, `consumers[name][k]` hold after event `events[k]`.

    `phases` holds (first k, phase) in order; `peak` is the k of the maximum.
    """

    events: array[int]
    total: array[int]
    consumers: dict[str, array[int]]
    phases: tuple[tuple[int, str], ...]
    peak: int

    def __len__(self) -> int:
        return len(self.events)


@dataclass
class _Summary:
    peak: int
    peak_event: int  # -1: nothing was ever allocated
    at_peak: list[int]  # bytes per consumer at the peak
    consumer_peaks: list[int]
    phase_peaks: dict[str, int]
    end: int


class Trace:
    """Allocations and frees in order; see the module's text for the columns.

    `before` counts the leading events that stand for what was alive before recording began (or, in a slice,
    before the slice). `steps` holds the event positions at which a training step begins. `caveats` says what
    the trace doesn't know. `info` is plain data about where it comes from: model, recipe, device, and for a
    real CUDA run the allocator's own figures.

    A trace can be written by hand: `mark`, `allocate`, `free`, `begin_step`.
    """

    def __init__(self, *, info: Mapping[str, Any] | None = None) -> None:
        self.sizes: array[int] = array("q")
        self.consumers_of: bytearray = bytearray()  # index into CONSUMERS
        self.shapes: list[tuple[int, ...]] = []
        self.columns: dict[str, array[int]] = {name: array("l") for name in _TEXT_COLUMNS}  # index into names
        self.names: list[str] = [""]
        self.events: array[int] = array("q")
        self.marks: list[tuple[int, str]] = [(0, SETUP)]
        self.steps: list[int] = []
        self.before = 0
        self.caveats: list[str] = []
        self.info: dict[str, Any] = dict(info or {})
        self._name_index: dict[str, int] = {"": 0}
        self._cached: _Summary | None = None

    # writing

    def intern(self, text: str) -> int:
        """The index of `text` in `names`, added when new."""
        index = self._name_index.get(text)
        if index is None:
            index = self._name_index[text] = len(self.names)
            self.names.append(text)
        return index

    def allocate(
        self,
        size: int,
        consumer: str = "temporaries",
        *,
        module: str = "",
        operator: str = "",
        shape: Sequence[int] = (),
        dtype: str = "",
        line: str = "",
    ) -> int:
        """Append the allocation of a new block of `size` bytes; returns its id.

        Raises ValueError for a negative size and UnknownNameError for a consumer that isn't one of the five.
        """
        if size < 0:
            raise ValueError(f"a block can't have {size} bytes")
        if consumer not in _CONSUMER_INDEX:
            raise unknown_name("consumer", consumer, CONSUMERS)
        block = len(self.sizes)
        self.sizes.append(size)
        self.consumers_of.append(_CONSUMER_INDEX[consumer])
        self.shapes.append(tuple(shape))
        for name, text in (
            ("module", module),
            ("operator", operator),
            ("phase", self.marks[-1][1]),
            ("dtype", dtype),
            ("line", line),
        ):
            self.columns[name].append(self.intern(text))
        self.events.append(block)
        self._cached = None
        return block

    def free(self, block: int) -> None:
        """Append the free of `block`. Whether it is alive is checked by `validate`, not here."""
        if not 0 <= block < len(self.sizes):
            raise ValueError(f"block {block} doesn't exist: the trace has {len(self.sizes)}")
        self.events.append(~block)
        self._cached = None

    def mark(self, phase: str) -> None:
        """From the next event on, the phase is `phase` ('setup', 'forward', 'backward', 'optimizer')."""
        if phase not in ALL_PHASES:
            raise unknown_name("phase", phase, ALL_PHASES)
        if self.marks[-1][1] == phase:
            return
        self.marks.append((len(self.events), phase))
        self._cached = None

    def begin_step(self) -> None:
        """A training step begins with the next event."""
        if not self.steps or self.steps[-1] != len(self.events):
            self.steps.append(len(self.events))

    def relabel(self, block: int, consumer: str) -> None:
        """Change the consumer of a block, e.g. when a buffer of the backward pass is kept as a gradient."""
        self.consumers_of[block] = _CONSUMER_INDEX[consumer]
        self._cached = None

    # reading

    def block(self, block: int) -> Block:
        column, names = self.columns, self.names
        return Block(
            block,
            self.sizes[block],
            CONSUMERS[self.consumers_of[block]],
            names[column["module"][block]],
            names[column["operator"][block]],
            names[column["phase"][block]],
            self.shapes[block],
            names[column["dtype"][block]],
            names[column["line"][block]],
        )

    def blocks(self) -> Iterator[Block]:
        """Every block, in order of allocation."""
        return (self.block(i) for i in range(len(self.sizes)))

    def __len__(self) -> int:
        """How many events there are."""
        return len(self.events)

    def phase_at(self, position: int) -> str:
        """The phase in which the event at `position` happens."""
        return self.marks[bisect_right(self.marks, position, key=lambda mark: mark[0]) - 1][1]

    def spans(self) -> list[tuple[int, int, str]]:
        """(first event, one past the last event, phase) in order.

        A phase of the step may be empty (a fused optimizer allocates nothing); an empty 'setup' is left out.
        """
        ends = [position for position, _ in self.marks[1:]] + [len(self.events)]
        spans = [(a, b, phase) for (a, phase), b in zip(self.marks, ends, strict=True)]
        return [(a, b, phase) for a, b, phase in spans if b > a or phase != SETUP]

    @property
    def _summary(self) -> _Summary:
        if self._cached is None:
            self._cached = self._summarise()
        return self._cached

    def _summarise(self) -> _Summary:
        sizes, owner = self.sizes, self.consumers_of
        live, highest, total = [0] * 5, [0] * 5, 0
        # As much can be alive between steps as at the end of one: the step's own moment goes first.
        peaks = {True: (0, -1, [0] * 5), False: (0, -1, [0] * 5)}
        phase_peaks: dict[str, int] = {}
        for start, stop, phase in self.spans():
            # What was alive when the phase began counts.
            top = max(phase_peaks.get(phase, 0), total)
            peak = peaks[phase == SETUP][0]
            for position in range(start, stop):
                event = self.events[position]
                if event >= 0:
                    size, who = sizes[event], owner[event]
                    total += size
                    now = live[who] = live[who] + size
                    if now > highest[who]:
                        highest[who] = now
                    if total > top:
                        top = total
                    if total > peak:
                        peak = total
                        peaks[phase == SETUP] = (total, position, live.copy())
                else:
                    size, who = sizes[~event], owner[~event]
                    total -= size
                    live[who] -= size
            phase_peaks[phase] = top
        outside, inside = peaks[True], peaks[False]
        found = inside if inside[0] >= outside[0] and inside[1] >= 0 else outside
        return _Summary(*found, highest, phase_peaks, total)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at once."""
        return self._summary.peak

    @property
    def peak_event(self) -> int:
        """Position of the event that first reaches the peak, in a step if it can; -1 if there is none."""
        return self._summary.peak_event

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak is first reached; 'setup' in an empty trace."""
        event = self._summary.peak_event
        return self.phase_at(event) if event >= 0 else SETUP

    @property
    def end_bytes(self) -> int:
        """What is alive after the last event."""
        return self._summary.end

    def live_at(self, position: int) -> list[int]:
        """Ids of the blocks alive after the event at `position`, in order of allocation."""
        alive: dict[int, None] = {}
        for event in self.events[: position + 1]:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
        return list(alive)

    def at_peak(self) -> list[Block]:
        """The blocks alive at the peak, largest first."""
        alive = [self.block(i) for i in self.live_at(self.peak_event)]
        return sorted(alive, key=lambda block: (-block.bytes, block.id))

    def consumers_at_peak(self) -> dict[str, int]:
        """Live bytes of each consumer at the moment of the peak; they sum to `peak_bytes`."""
        return dict(zip(CONSUMERS, self._summary.at_peak, strict=True))

    def consumer_peaks(self) -> dict[str, int]:
        """Each consumer's own largest live bytes. They needn't coincide: their sum isn't the peak."""
        return dict(zip(CONSUMERS, self._summary.consumer_peaks, strict=True))

    def phase_peaks(self) -> dict[str, int]:
        """The most bytes alive during each phase that occurs, in the order of a step."""
        found = self._summary.phase_peaks
        return {phase: found[phase] for phase in ALL_PHASES if phase in found}

    def timeline(self, points: int | None = None) -> Timeline:
        """Live bytes per consumer after every event.

        With `points`, at most that many samples: each stands for a run of events and is taken where the
        total is highest in it, so that the peak is never lost.
        """
        if points is not None and points < 1:
            raise ValueError(f"points must be at least 1, not {points}")
        width = 1 if points is None else -(-len(self.events) // points)
        sizes, owner = self.sizes, self.consumers_of
        live, total = [0] * 5, 0
        kept: array[int] = array("q")
        totals: array[int] = array("q")
        parts: list[array[int]] = [array("q") for _ in CONSUMERS]
        best, best_live, best_at = -1, live, 0
        for position, event in enumerate(self.events):
            if event >= 0:
                total += sizes[event]
                live[owner[event]] += sizes[event]
            else:
                total -= sizes[~event]
                live[owner[~event]] -= sizes[~event]
            if total > best:
                best, best_live, best_at = total, live.copy(), position
            if (position + 1) % width == 0 or position + 1 == len(self.events):
                kept.append(best_at)
                totals.append(best)
                for part, value in zip(parts, best_live, strict=True):
                    part.append(value)
                best = -1
        phases: list[tuple[int, str]] = []
        for k, position in enumerate(kept):
            phase = self.phase_at(position)
            if not phases or phases[-1][1] != phase:
                phases.append((k, phase))
        peak = max(range(len(totals)), key=totals.__getitem__, default=0)
        return Timeline(kept, totals, dict(zip(CONSUMERS, parts, strict=True)), tuple(phases), peak)

    def by_operator(self) -> list[Row]:
        """What each operator allocated, the largest share of the peak first."""
        return self._table("operator", lambda name: name)

    def by_module(self, depth: int | None = None) -> list[Row]:
        """What each module's blocks take; `depth` cuts the dotted path ('h.0.mlp' is 'h.0' at depth 2)."""

        def cut(name: str) -> str:
            return name if depth is None else ".".join(name.split(".")[:depth])

        return self._table("module", cut)

    def _table(self, column: str, key: Callable[[str], str]) -> list[Row]:
        indices, short = self.columns[column], [key(name) for name in self.names]
        count: dict[str, int] = {}
        summed: dict[str, int] = {}
        alive: dict[str, int] = {}
        for index, size in zip(indices, self.sizes, strict=True):
            name = short[index]
            count[name] = count.get(name, 0) + 1
            summed[name] = summed.get(name, 0) + size
        for block in self.live_at(self.peak_event):
            name = short[indices[block]]
            alive[name] = alive.get(name, 0) + self.sizes[block]
        rows = [Row(name, count[name], summed[name], alive.get(name, 0)) for name in count]
        return sorted(rows, key=lambda row: (-row.live_bytes, -row.allocated_bytes, row.name))

    # new traces from this one

    def slice(self, start: int, stop: int | None = None) -> Trace:
        """The events from `start` up to `stop`, led by what was alive before (counted by `before`)."""
        stop = len(self.events) if stop is None else stop
        if not 0 <= start <= stop <= len(self.events):
            raise ValueError(f"no events {start} to {stop}: the trace has {len(self.events)}")
        part = Trace(info=self.info)
        part.caveats = list(self.caveats)
        part.names, part._name_index = list(self.names), dict(self._name_index)
        alive = self.live_at(start - 1)
        renamed: dict[int, int] = {}
        for event in (*alive, *self.events[start:stop]):
            if event >= 0:
                renamed[event] = len(part.sizes)
                part.sizes.append(self.sizes[event])
                part.consumers_of.append(self.consumers_of[event])
                part.shapes.append(self.shapes[event])
                for name in _TEXT_COLUMNS:
                    part.columns[name].append(self.columns[name][event])
                part.events.append(renamed[event])
            else:
                part.events.append(~renamed[~event])
        part.before = len(alive)
        shift = len(alive) - start
        part.marks = [(0, SETUP)]
        inside = [(a + shift, phase) for a, phase in self.marks if start < a <= stop]
        for position, phase in [(len(alive), self.phase_at(start)), *inside]:
            if phase != part.marks[-1][1]:
                part.marks.append((position, phase))
        part.steps = [position + shift for position in self.steps if start <= position < stop]
        return part

    def last_step(self) -> Trace:
        """The last training step, led by what was alive before it. The trace itself, if it has no steps."""
        starts = [position for position in self.steps if position < len(self.events)]
        # A boundary with no forward after it only closes the step before it: locals that die, a model let go.
        worked = [b for a, b, phase in self.spans() if phase != SETUP and b > a]
        while starts and not any(b > starts[-1] for b in worked):
            starts.pop()
        return self.slice(starts[-1]) if starts else self

    def resized(self, size: Callable[[int], int]) -> Trace:
        """The same events with every block's bytes replaced by `size(bytes)`, e.g. rounded up to 512."""
        other = self.slice(0)
        other.before = self.before
        other.sizes = array("q", map(size, self.sizes))
        return other

    # checking, keeping, showing

    def validate(self) -> None:
        """Raises ValueError unless each block is allocated once and freed at most once, after that."""
        state = bytearray(len(self.sizes))
        lengths = {len(self.consumers_of), len(self.shapes), *map(len, self.columns.values())}
        if lengths != {len(self.sizes)}:
            raise ValueError("the trace is broken: its columns differ in length")
        for position, event in enumerate(self.events):
            block = event if event >= 0 else ~event
            if block >= len(state) or state[block] != (0 if event >= 0 else 1):
                what = "allocated twice" if event >= 0 else "freed when it isn't alive"
                raise ValueError(f"the trace is broken: event {position}: block {block} is {what} or unknown")
            state[block] += 1
        if not all(state):
            raise ValueError(f"the trace is broken: block {state.index(0)} is never allocated")
        if not self.marks or self.marks[0][0] != 0 or self.marks != sorted(self.marks, key=lambda m: m[0]):
            raise ValueError("the trace is broken: its phases aren't in order from event 0")
        if any(phase not in ALL_PHASES for _, phase in self.marks):
            raise ValueError(f"the trace is broken: phases are {', '.join(ALL_PHASES)}")
        if any(owner >= len(CONSUMERS) for owner in self.consumers_of):
            raise ValueError("the trace is broken: a block has an unknown consumer")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write gzip-compressed JSON, whole or not at all. Raises as `files.write_whole`."""
        shape_index: dict[tuple[int, ...], int] = {}
        shapes = [shape_index.setdefault(shape, len(shape_index)) for shape in self.shapes]
        data = {
            "format": FORMAT,
            "bytes": self.sizes.tolist(),
            "consumer": list(self.consumers_of),
            "shape": shapes,
            "shapes": [list(shape) for shape in shape_index],
            **{name: self.columns[name].tolist() for name in _TEXT_COLUMNS},
            "names": self.names,
            "events": self.events.tolist(),
            "marks": self.marks,
            "steps": self.steps,
            "before": self.before,
            "caveats": self.caveats,
            "info": self.info,
        }
        text = json.dumps(data, separators=(",", ":"))
        # A fixed time stamp: the same trace gives the same bytes.
        write_whole(path, gzip.compress(text.encode(), mtime=0))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` wrote. Raises ValueError, naming the file, when it is something else or broken."""
        try:
            data = json.loads(unpack_up_to(path, _LARGEST))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} isn't a saved trace: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path} isn't a saved trace of this version: expected format {FORMAT!r}")
        trace = cls(info=data.get("info"))
        try:
            trace.sizes = array("q", data["bytes"])
            trace.consumers_of = bytearray(data["consumer"])
            shapes = [tuple(shape) for shape in data["shapes"]]
            trace.shapes = [shapes[i] for i in data["shape"]]
            trace.columns = {name: array("l", data[name]) for name in _TEXT_COLUMNS}
            trace.names = list(data["names"])
            trace._name_index = {name: i for i, name in enumerate(trace.names)}
            trace.events = array("q", data["events"])
            trace.marks = [(position, phase) for position, phase in data["marks"]]
            trace.steps, trace.before = list(data["steps"]), data["before"]
            trace.caveats = list(data["caveats"])
            if any(i >= len(trace.names) or i < 0 for c in trace.columns.values() for i in c):
                raise ValueError("the trace is broken: a name is missing")
            trace.validate()
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} holds a broken trace: {error}") from None
        return trace

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the events: integers in bytes."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "consumers_at_peak": self.consumers_at_peak(),
            "consumer_peaks": self.consumer_peaks(),
            "phase_peaks": self.phase_peaks(),
            "blocks": len(self.sizes),
            "events": len(self.events),
            "caveats": list(self.caveats),
            "info": dict(self.info),
        }

    def _rows(self) -> list[tuple[str, int, int]]:
        at_peak, own = self.consumers_at_peak(), self.consumer_peaks()
        return [(name, at_peak[name], own[name]) for name in CONSUMERS]

    def __str__(self) -> str:
        lines = [
            f"peak {format_bytes(self.peak_bytes)} of live tensors in {self.peak_phase}"
            f" ({len(self.sizes)} blocks, {len(self.events)} events)",
            f"{'consumer':<18}{'at the peak':>14}{'own largest':>14}",
        ]
        lines += [f"{n:<18}{format_bytes(a):>14}{format_bytes(o):>14}" for n, a, o in self._rows()]
        lines.append("phases: " + ", ".join(f"{p} {format_bytes(b)}" for p, b in self.phase_peaks().items()))
        lines += [f"note: {text}" for text in self.caveats]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Trace: peak {format_bytes(self.peak_bytes)} in {self.peak_phase}, {len(self.events)} events>"
        )

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{n}</th><td>{format_bytes(a)}</td><td>{format_bytes(o)}</td></tr>"
            for n, a, o in self._rows()
        )
        phases = ", ".join(f"{p} {format_bytes(b)}" for p, b in self.phase_peaks().items())
        notes = "".join(f"<br>note: {html.escape(text)}" for text in self.caveats)
        return (
            f"<table><caption>Live tensors: peak {format_bytes(self.peak_bytes)}"
            f" in {self.peak_phase}</caption>"
            f"<tr><th>consumer</th><th>at the peak</th><th>own largest</th></tr>{cells}</table>"
            f"<p>phases: {phases}{notes}</p>"
        )


def from_events(sizes: Iterable[int], phase: str = "forward") -> Trace:
    """A trace from signed sizes, for examples: `+n` allocates n bytes, `-n` frees the oldest live block of n.

    Raises ValueError when nothing of that size is alive.
    """
    trace = Trace()
    trace.mark(phase)
    alive: dict[int, list[int]] = {}
    for size in sizes:
        if size >= 0:
            alive.setdefault(size, []).append(trace.allocate(size))
        elif alive.get(-size):
            trace.free(alive[-size].pop(0))
        else:
            raise ValueError(f"can't free {-size} bytes: no block of that size is alive")
    return trace
