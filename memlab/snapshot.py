"""PyTorch's memory snapshots: written from a trace, and read from anybody.

A written file opens on https://pytorch.org/memory_viz and with `python -m torch.cuda._memory_viz`. It holds
plain lists, dicts, strings and numbers, pickled with protocol 4: the newest that the page's own reader knows.

A file from a stranger is read without `pickle`: unpickling can run any program. `plain_pickle` knows the
opcodes of plain data and no other, with limits on size and number; nothing can be executed by it.

Addresses, segments and block sizes are the replay's. Each allocation has three frames: the operator with the
source line, the module, and the tensor (consumer, phase, shape, dtype). There are no time stamps: the order
of the events is all that is known.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.allocator import AllocatorConfig, Replay, replay
from memlab.files import read_up_to, unpack_up_to, write_whole
from memlab.units import CONSUMERS, GIB, PHASES, format_bytes

if TYPE_CHECKING:
    from memlab.trace import Block, Trace

_PROTOCOL = 4
_DEVICE = 0
_SEGMENT_FRAMES: list[dict[str, Any]] = []


def snapshot(trace: Trace, result: Replay | None = None) -> dict[str, Any]:
    """The snapshot as `torch.cuda.memory._snapshot()` returns it: `segments`, `device_traces`, settings.

    `result` is the replay of this trace (None: PyTorch's default options, no limit). The segments show the
    state after its last event; a replay that ran out of memory ends with an `oom` entry.
    Raises ValueError if `result` comes from another trace.
    """
    if result is None:
        result = replay(trace.events, trace.sizes, marks=trace.marks)
    if len(result.addresses) != len(trace.sizes):
        raise ValueError(
            f"the replay has {len(result.addresses)} blocks, the trace {len(trace.sizes)}: "
            "replay this trace before writing its snapshot"
        )
    cache: dict[tuple[Any, ...], list[dict[str, Any]]] = {}  # equal frames once: the file is far smaller
    frames = [
        cache[block[2:]] if block[2:] in cache else cache.setdefault(block[2:], _frames(block))
        for block in trace.blocks()
    ]
    return {
        "segments": _segments(trace, result, frames),
        "device_traces": [_events(trace, result, frames)],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": str(result.allocator.config)},
        "external_annotations": [],
    }


def write_snapshot(trace: Trace, path: str | os.PathLike[str], result: Replay | None = None) -> None:
    """Writes the snapshot; whole or not at all. For memory_viz the name should end in .pickle."""
    write_whole(path, pickle.dumps(snapshot(trace, result), protocol=_PROTOCOL))


def _frames(block: Block) -> list[dict[str, Any]]:
    """Innermost first, as PyTorch orders them."""
    name, _, line = block.line.rpartition(":")
    known = line.isdecimal()
    shape = "x".join(map(str, block.shape)) or "scalar"
    tensor = f"{block.consumer} of {block.phase}, {shape} {block.dtype}".rstrip()
    return [
        {
            "filename": (name if known else block.line) or "<operator>",
            "line": int(line) if known else 0,
            "name": block.operator or "allocation",
        },
        {"filename": "<module>", "line": 0, "name": block.module or "(outside the model)"},
        {"filename": "<tensor>", "line": 0, "name": tensor},
    ]


def _segments(trace: Trace, result: Replay, frames: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    owner = {
        result.addresses[block]: block
        for block in trace.live_at(result.stopped - 1)
        if result.block_bytes[block]
    }
    segments = []
    for segment in result.segments:
        blocks: list[dict[str, Any]] = []
        for piece in segment.blocks:
            block: dict[str, Any] = {
                "address": piece.address,
                "size": piece.size,
                "requested_size": piece.requested,
                "state": "active_allocated" if piece.allocated else "inactive",
                "frames": frames[owner[piece.address]] if piece.allocated else [],
            }
            blocks.append(block)
        segments.append({
            "device": _DEVICE,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": segment.allocated,
            "active_size": segment.allocated,
            "requested_size": sum(piece.requested for piece in segment.blocks),
            "stream": 0,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": segment.expandable,
            "frames": _SEGMENT_FRAMES,
            "blocks": blocks,
        })  # fmt: skip
    return segments


def _events(trace: Trace, result: Replay, frames: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    driver = iter(result.driver_events)
    call = next(driver, None)
    out: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int, where: list[dict[str, Any]]) -> dict[str, Any]:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "frames": where}
        out.append(entry)
        return entry

    for position in range(result.stopped + (result.oom is not None)):
        event = trace.events[position]
        block = event if event >= 0 else ~event
        while call is not None and call[0] == position:
            # memory_viz fails on a snapshot with categories of which none is 'unknown': segments carry it
            add(call[1], call[2], call[3], frames[block])["category"] = "unknown"
            call = next(driver, None)
        if result.oom is not None and position == result.stopped:
            entry = add("oom", 0, result.oom.requested, frames[block])
            entry["device_free"] = result.oom.free
        elif not result.block_bytes[block]:
            continue  # zero bytes: the allocator never sees it
        elif event >= 0:
            entry = add("alloc", result.addresses[block], trace.sizes[block], frames[block])
            entry["category"] = trace.block(block).consumer
        else:
            for action in ("free_requested", "free_completed"):
                add(action, result.addresses[block], trace.sizes[block], frames[block])
    return out


# --- reading ------------------------------------------------------------------------------------------------

_LARGEST_FILE = GIB
_MOST_OPCODES = 50_000_000
_MOST_CONTAINERS = 10_000_000
_MOST_VISITS = 20_000_000  # of blocks, events and frames: shared lists can unfold to far more than the file


class SnapshotError(ValueError):
    """The file isn't a snapshot, is damaged, or holds what a snapshot doesn't; nothing of it was executed."""


@dataclass(frozen=True)
class LiveRow:
    """Live blocks with the same frames: how many, and the bytes of their blocks."""

    bytes: int
    count: int
    largest: int
    frames: tuple[str, ...]  # innermost first, those of the user before the library's


@dataclass(frozen=True)
class SnapshotSummary:
    """What a snapshot shows at its end, for the device that reserves the most. All sizes in bytes.

    `allocated` counts blocks in use, `requested` what was asked for in them; `waiting` are freed blocks that
    another stream may still use. `largest_free` is the largest block that a request could get; `free_blocks`
    how many free blocks there are. `ooms` are (requested, free on the device, frames) of recorded failures.
    """

    device: int
    segments: int
    reserved: int
    allocated: int
    requested: int
    waiting: int
    largest_free: int
    free_blocks: int
    expandable: bool
    events: int
    live: tuple[LiveRow, ...]
    ooms: tuple[tuple[int, int | None, tuple[str, ...]], ...]
    other_devices: dict[int, int]  # device -> reserved
    settings: str
    moment: str = "at its end"

    @property
    def unallocated(self) -> int:
        """Reserved, in no block that is in use or waits for another stream."""
        return self.reserved - self.allocated - self.waiting

    @property
    def fragmentation(self) -> float:
        """The share of the unallocated bytes that isn't in the largest free block, 0 to 1."""
        return 1 - self.largest_free / self.unallocated if self.unallocated else 0.0

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "moment": self.moment,
            "device": self.device,
            "segments": self.segments,
            "reserved": self.reserved,
            "allocated": self.allocated,
            "requested": self.requested,
            "waiting_for_other_streams": self.waiting,
            "reserved_unallocated": self.unallocated,
            "largest_free_block": self.largest_free,
            "free_blocks": self.free_blocks,
            "fragmentation": round(self.fragmentation, 6),
            "expandable": self.expandable,
            "events": self.events,
            "settings": self.settings or None,
            "other_devices": {str(device): size for device, size in self.other_devices.items()},
            "oom": [{"requested": size, "free": free, "frames": list(f)} for size, free, f in self.ooms],
            "live": [
                {"bytes": row.bytes, "count": row.count, "largest": row.largest, "frames": list(row.frames)}
                for row in self.live[:top]
            ],
        }

    def render(self, top: int = 12) -> str:
        """At most 100 columns: sizes, fragmentation, the live list."""
        size = format_bytes
        lines = [
            f"device {self.device} {self.moment}: {self.segments:,} segments, {self.events:,} events",
            f"  reserved       {size(self.reserved):>12}",
            f"  allocated      {size(self.allocated):>12}  asked for: {size(self.requested)}",
            f"  not allocated  {size(self.unallocated):>12}  in {self.free_blocks:,} free blocks, "
            f"the largest {size(self.largest_free)}",
        ]
        if self.waiting:
            lines.append(f"  waiting        {size(self.waiting):>12}  freed, but another stream may use it")
        if self.unallocated:
            lines.append(
                f"  fragmentation  {self.fragmentation:>12.1%}  of the unallocated isn't in the largest block"
            )
        if self.settings:
            lines += textwrap.wrap(f"settings: {self.settings}", 78, initial_indent="  ")
        for device, reserved in self.other_devices.items():
            lines.append(f"  device {device} reserves {size(reserved)} more; not shown here")
        for requested, free, frames in self.ooms[-3:]:
            room = "" if free is None else f", {size(free)} free on the card"
            lines += ["", f"out of memory: {size(requested)} asked for{room}"]
            lines += [_cut(f"    {frame}") for frame in frames[:4]]
        lines += ["", f"{'live bytes':>12}{'blocks':>8}{'largest':>13}  allocated at"]
        for row in self.live[:top]:
            where = row.frames or ("(no frames recorded)",)
            head = f"{size(row.bytes):>12}{row.count:>8,}{size(row.largest):>13}  "
            lines.append(_cut(head + where[0]))
            lines += [_cut(" " * len(head) + frame) for frame in where[1:3]]
        if (rest := self.live[top:]) and top >= 0:
            total = sum(row.bytes for row in rest)
            count = sum(row.count for row in rest)
            lines.append(f"{size(total):>12}{count:>8,}{'':>13}  {len(rest)} more places; --top N shows them")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def _cut(line: str, width: int = 100) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain data of a snapshot that `torch.cuda.memory._dump_snapshot` or `write_snapshot` wrote, also
    one that was compressed with gzip since.

    Nothing in the file is executed: it is read by an interpreter that knows only the opcodes of numbers,
    strings, lists, tuples and dicts, and refuses every other one. Raises SnapshotError for what isn't such a
    snapshot, OSError if the file can't be read.
    """
    file = Path(path)
    if file.exists() and not file.is_file():  # a device or a pipe has no size to hold against the limit
        raise SnapshotError(f"{path} isn't a regular file: save the snapshot to one")
    try:
        raw = read_up_to(path, _LARGEST_FILE)
        if raw[:2] == b"\x1f\x8b":
            raw = unpack_up_to(path, _LARGEST_FILE)
    except ValueError as error:
        fewer = "record fewer events, with _record_memory_history(max_entries=100000)"
        raise SnapshotError(f"{error}: {fewer}" if "more than" in str(error) else str(error)) from None
    try:
        data = plain_pickle(raw)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from None
    if not (isinstance(data, dict) and isinstance(data.get("segments"), list)):
        raise SnapshotError(f"{path} isn't a memory snapshot: it has no list of segments")
    for number, segment in enumerate(data["segments"]):
        if fault := _fault(segment):
            raise SnapshotError(f"{path} is damaged: segment {number} {fault}")
    return data


def _fault(segment: Any) -> str:
    """What no segment of a real snapshot has; '' where it may be one."""
    if type(segment) is not dict:
        return "is no table of fields"
    blocks = segment.get("blocks", [])
    if type(blocks) is not list or not all(type(block) is dict for block in blocks):
        return "has no list of blocks"
    total = segment.get("total_size", 0)
    for size in (total, *(block.get("size", 0) for block in blocks)):
        if type(size) is not int or not 0 <= size < 2**63:
            return f"has a size that is no number of bytes: {str(size)[:40]!r}"
    if "total_size" in segment and sum(block.get("size", 0) for block in blocks) > total:
        return "is smaller than its blocks"
    return ""


def plain_pickle(raw: bytes) -> Any:
    """What a pickle of plain data holds. Raises SnapshotError at the first opcode that isn't plain data."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at, end, containers = 0, len(raw), 0

    def take(size: int) -> bytes:
        nonlocal at
        if size < 0 or at + size > end:
            raise SnapshotError("the pickle ends in the middle of a value")
        at += size
        return raw[at - size : at]

    def popped() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def fill(target: Any, items: list[Any]) -> None:
        if type(target) is not dict or len(items) % 2:
            raise SnapshotError("damaged: key and value pairs for something else than a dict")
        for i in range(0, len(items), 2):
            if type(items[i]) not in (str, int, float, bool, NoneType):
                raise SnapshotError("a key of a dict is neither a name nor a number")
            target[items[i]] = items[i + 1]

    try:
        for _ in range(_MOST_OPCODES):
            code = raw[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x68:  # BINGET
                stack.append(memo[raw[at]])
                at += 1
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(take(4), "little")])
            elif code == 0x8C:  # SHORT_BINUNICODE
                size = raw[at]
                at += 1
                stack.append(take(size).decode("utf-8", "surrogatepass"))
            elif code == 0x4A:  # BININT
                stack.append(int.from_bytes(take(4), "little", signed=True))
            elif code == 0x4B:  # BININT1
                stack.append(raw[at])
                at += 1
            elif code == 0x4D:  # BININT2
                stack.append(int.from_bytes(take(2), "little"))
            elif code == 0x8A:  # LONG1
                size = raw[at]
                at += 1
                stack.append(int.from_bytes(take(size), "little", signed=True))
            elif code == 0x28:  # MARK
                marks.append(len(stack))
            elif code == 0x75:  # SETITEMS
                items = popped()
                fill(stack[-1], items)
            elif code == 0x73:  # SETITEM
                value = stack.pop()
                key = stack.pop()
                fill(stack[-1], [key, value])
            elif code in (0x65, 0x61):  # APPENDS, APPEND
                items = popped() if code == 0x65 else [stack.pop()]
                if type(stack[-1]) is not list:
                    raise SnapshotError("damaged: values for something else than a list")
                stack[-1].extend(items)
            elif code in (0x7D, 0x5D, 0x29, 0x6C, 0x64, 0x74, 0x85, 0x86, 0x87):  # dicts, lists and tuples
                containers += 1
                if containers > _MOST_CONTAINERS:
                    raise SnapshotError(f"more than {_MOST_CONTAINERS:,} lists and dicts: not read")
                if code in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
                    size = code - 0x84
                    if len(stack) < size:
                        raise SnapshotError("damaged: a tuple of values that aren't there")
                    items = stack[-size:]
                    del stack[-size:]
                    stack.append(tuple(items))
                elif code == 0x64:  # DICT
                    made: dict[Any, Any] = {}
                    fill(made, popped())
                    stack.append(made)
                elif code in (0x6C, 0x74):  # LIST, TUPLE
                    items = popped()
                    stack.append(items if code == 0x6C else tuple(items))
                else:
                    stack.append({} if code == 0x7D else [] if code == 0x5D else ())
            elif code in (0x58, 0x8D):  # BINUNICODE, BINUNICODE8
                size = int.from_bytes(take(4 if code == 0x58 else 8), "little")
                stack.append(take(size).decode("utf-8", "surrogatepass"))
            elif code in (0x88, 0x89, 0x4E):  # NEWTRUE, NEWFALSE, NONE
                stack.append(None if code == 0x4E else code == 0x88)
            elif code == 0x47:  # BINFLOAT
                stack.append(struct.unpack(">d", take(8))[0])
            elif code in (0x71, 0x72):  # BINPUT, LONG_BINPUT
                memo[int.from_bytes(take(1 if code == 0x71 else 4), "little")] = stack[-1]
            elif code in (0x80, 0x95):  # PROTO, FRAME
                take(1 if code == 0x80 else 8)
            elif code == 0x2E:  # STOP
                return stack.pop()
            else:
                raise SnapshotError(_refusal(code, at - 1))
    except (IndexError, KeyError):
        raise SnapshotError("not a pickle, or a damaged one") from None
    except UnicodeDecodeError:
        raise SnapshotError("damaged: a name isn't text") from None
    raise SnapshotError(f"more than {_MOST_OPCODES:,} values: record fewer events (max_entries)")


def _refusal(code: int, at: int) -> str:
    names = {op.code: op.name for op in pickletools.opcodes}
    name = names.get(chr(code))
    if name is None:
        return "not a pickle, or a damaged one"
    return (
        f"byte {at:,} holds the opcode {name}: a snapshot holds only numbers, names, lists and dicts, never "
        "objects or calls; not read"
    )


_LIBRARY = ("site-packages", "dist-packages", "/torch/", "\\torch\\", "lib/python", "<frozen", "??")


class _Written(NamedTuple):
    """What `_frames` wrote of a block."""

    operator: str
    line: str
    module: str
    consumer: str
    phase: str
    shape: tuple[int, ...]
    dtype: str


_TENSOR = re.compile(r"(\w{1,40}) of (\w{1,40}), (scalar|\d{1,15}(?:x\d{1,15}){0,15}) ?(\w{0,40})")


def _written(frames: Any) -> _Written | None:
    """The inverse of `_frames`; None for what memlab didn't write."""
    if not (isinstance(frames, list) and len(frames) == 3 and all(isinstance(f, dict) for f in frames)):
        return None
    if [frame.get("filename") for frame in frames[1:]] != ["<module>", "<tensor>"]:
        return None
    operator, module, tensor = (str(frame.get("name"))[:200] for frame in frames)
    match = _TENSOR.fullmatch(tensor)
    if match is None or match.group(1) not in CONSUMERS or match.group(2) not in (*PHASES, "setup"):
        return None
    consumer, phase, dims, dtype = match.groups()
    shape = () if dims == "scalar" else tuple(map(int, dims.split("x")))
    file, number = frames[0].get("filename"), frames[0].get("line")
    line = "" if not isinstance(file, str) or file == "<operator>" else file[:200]
    if line and isinstance(number, int) and number:
        line += f":{number}"
    outside = module == "(outside the model)"
    return _Written(operator, line, "" if outside else module, consumer, phase, shape, dtype)


def _places(frames: Any) -> tuple[str, ...]:
    """'file.py:12 name', the innermost first; frames of the user's own files before those of libraries."""
    if not isinstance(frames, list | tuple):
        return ()
    if ours := _written(frames):
        shape = "x".join(map(str, ours.shape)) or "scalar"
        what = f"{ours.consumer} of {ours.phase}, {shape} {ours.dtype}".rstrip()
        return tuple(filter(None, (what, f"{ours.module} {ours.operator}".strip(), ours.line)))
    own: list[str] = []
    library: list[str] = []
    for frame in frames[:64]:
        if not isinstance(frame, dict):
            continue
        file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
        file = file if isinstance(file, str) else ""
        number = f":{line}" if isinstance(line, int) and line else ""
        words = (name if isinstance(name, str) else "")[:200]
        short = "/".join(file.replace("\\", "/").split("/")[-2:])[:200]
        text = f"{short}{number} {words}".strip()
        python = file.endswith(".py") or file.startswith("<")
        (own if python and not any(part in file for part in _LIBRARY) else library).append(text)
    return tuple("".join(c if c.isprintable() else "?" for c in text) for text in own + library)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _rows(value: Any) -> list[dict[str, Any]]:
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


class _Visits:
    """Stops at shared lists that unfold to more than any real snapshot."""

    def __init__(self) -> None:
        self.left = _MOST_VISITS

    def __call__(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise SnapshotError("its shared lists unfold to far more than a snapshot holds; not read")


def _device_rows(data: dict[str, Any], visit: _Visits) -> tuple[int, dict[int, int], list[dict[str, Any]]]:
    """(the device that reserves the most, reserved bytes of all, its segments)."""
    segments = _rows(data.get("segments"))
    visit(len(segments))
    reserved: dict[int, int] = {}
    for segment in segments:
        device = _whole(segment.get("device"))
        reserved[device] = reserved.get(device, 0) + _whole(segment.get("total_size"))
    traces = _list(data.get("device_traces"))
    longest = max(range(len(traces)), key=lambda i: len(_list(traces[i])), default=0)
    device = max(reserved, key=lambda d: reserved[d], default=longest)
    return device, reserved, [s for s in segments if _whole(s.get("device")) == device]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _device_events(data: dict[str, Any], device: int, visit: _Visits) -> list[dict[str, Any]]:
    traces = _list(data.get("device_traces"))
    events = _rows(traces[device]) if device < len(traces) else []
    visit(len(events))
    return events


def summarise(data: dict[str, Any]) -> SnapshotSummary:
    """The live list and the fragmentation of a snapshot, as `read_snapshot` returns it.

    Raises SnapshotError if it unfolds to more than any real one. Values of a wrong type count as absent.
    """
    visit = _Visits()
    device, reserved, segments = _device_rows(data, visit)
    allocated = requested = waiting = largest_free = free_blocks = 0
    groups: dict[tuple[str, ...], list[int]] = {}
    places: dict[int, tuple[str, ...]] = {}

    def where(frames: Any) -> tuple[str, ...]:
        if id(frames) not in places:  # `data` keeps them alive, so that ids stay unique
            visit(len(_list(frames)[:64]))
            places[id(frames)] = _places(frames)
        return places[id(frames)]

    for segment in segments:
        blocks = _rows(segment.get("blocks"))
        visit(len(blocks) + 1)
        for block in blocks:
            size, state = _whole(block.get("size")), block.get("state")
            if state == "active_allocated":
                allocated += size
                requested += _whole(block.get("requested_size", size))
                row = groups.setdefault(where(_block_frames(block)), [0, 0, 0])
                row[0] += size
                row[1] += 1
                row[2] = max(row[2], size)
            elif isinstance(state, str) and state.startswith("active"):
                waiting += size
            else:
                free_blocks += 1
                largest_free = max(largest_free, size)
    events = _device_events(data, device, visit)
    ooms = []
    for event in events:
        if event.get("action") == "oom":
            free = event.get("device_free")
            found = (_whole(event.get("size")), free if isinstance(free, int) else None)
            ooms.append((*found, where(event.get("frames"))))
    live = sorted(
        (LiveRow(a, n, b, f) for f, (a, n, b) in groups.items()), key=lambda r: (-r.bytes, r.frames)
    )
    settings = data.get("allocator_settings")
    options = (
        settings.get("PYTORCH_ALLOC_CONF", settings.get("PYTORCH_CUDA_ALLOC_CONF"))
        if isinstance(settings, dict)
        else None
    )
    return SnapshotSummary(
        device=device,
        segments=len(segments),
        reserved=reserved.get(device, 0),
        allocated=allocated,
        requested=requested,
        waiting=waiting,
        largest_free=largest_free,
        free_blocks=free_blocks,
        expandable=any(segment.get("is_expandable") is True for segment in segments),
        events=len(events),
        live=tuple(live),
        ooms=tuple(ooms),
        other_devices={d: n for d, n in sorted(reserved.items()) if d != device and n},
        settings=options if isinstance(options, str) else "",
    )


def _block_frames(block: dict[str, Any]) -> Any:
    """Where a block was allocated; before torch 2.1 the frames stood in the block's history."""
    if "frames" in block:
        return block["frames"]
    history = _rows(block.get("history"))
    return history[-1].get("frames") if history else None


def trace_of(data: dict[str, Any]) -> Trace:
    """A snapshot's recorded events as a trace, led by what was alive before the recording began.

    Only a snapshot that memlab wrote knows consumers and phases: in any other every block counts as a
    temporary of the set-up phase, and a caveat says so. Raises SnapshotError if nothing was recorded.
    """
    from memlab.trace import Trace

    visit = _Visits()
    device, _, segments = _device_rows(data, visit)
    events = _device_events(data, device, visit)
    trace = Trace(info={"source": "snapshot", "device": device})
    completed = any(event.get("action") == "free_completed" for event in events)
    last = "free_completed" if completed else "free"
    labelled = False
    places: dict[int, tuple[tuple[str, ...], _Written | None]] = {}

    def make(size: int, frames: Any, category: Any) -> int:
        nonlocal labelled
        if id(frames) not in places:
            visit(len(_list(frames)[:64]))
            places[id(frames)] = _places(frames), _written(frames)
        at, ours = places[id(frames)]
        if ours is not None:
            labelled = True
            trace.mark(ours.phase)
            return trace.allocate(
                size, ours.consumer, module=ours.module, operator=ours.operator, shape=ours.shape,
                dtype=ours.dtype, line=ours.line,
            )  # fmt: skip
        consumer = category if category in CONSUMERS else "temporaries"
        labelled = labelled or category in CONSUMERS
        line, _, name = (at[0] if at else "").partition(" ")
        return trace.allocate(size, consumer, operator=name, line=line, module=at[1] if len(at) > 1 else "")

    # what was alive before: freed in the record or alive at its end, but never allocated in it
    known: set[int] = set()
    first: dict[int, tuple[int, Any, Any]] = {}
    for event in events:
        address, action = _whole(event.get("addr")), event.get("action")
        if action == "alloc":
            known.add(address)
        elif action == last and address not in known:
            known.add(address)
            first[address] = (_whole(event.get("size")), event.get("frames"), event.get("category"))
    for segment in segments:
        blocks = _rows(segment.get("blocks"))
        visit(len(blocks) + 1)
        address = _whole(segment.get("address"))
        for block in blocks:
            address = _whole(block.get("address", address))
            if block.get("state") == "active_allocated" and address not in known:
                size = _whole(block.get("requested_size", block.get("size")))
                first[address] = (size, _block_frames(block), None)
            address += _whole(block.get("size"))
    live = {address: make(*rest) for address, rest in first.items()}
    trace.before = len(live)
    trace.marks = [(0, "setup")]
    for event in events:
        address, action = _whole(event.get("addr")), event.get("action")
        if action == "alloc":
            if address in live:  # its free is missing from the record
                trace.free(live.pop(address))
            live[address] = make(_whole(event.get("size")), event.get("frames"), event.get("category"))
        elif action == last and address in live:
            trace.free(live.pop(address))
    if not len(trace):
        raise SnapshotError(
            "the snapshot holds no allocations: call _record_memory_history() before the step"
        )
    if not labelled:
        trace.caveats.append("a snapshot doesn't know consumers: every block is shown as a temporary")
        trace.caveats.append("a snapshot doesn't know the phases of a step")
    return trace


def summarise_trace(
    trace: Trace, at_peak: bool = True, config: AllocatorConfig | None = None
) -> SnapshotSummary:
    """The same summary of a trace, at its peak or its end; segments as a replay up to there leaves them."""
    position = trace.peak_event if at_peak else len(trace.events) - 1
    result = replay(trace.events[: position + 1], trace.sizes, config)
    groups: dict[tuple[str, ...], list[int]] = {}
    allocated = requested = 0
    for number in trace.live_at(position):
        block = trace.block(number)
        size = result.block_bytes[number]
        shape = "x".join(map(str, block.shape)) or "scalar"
        what = f"{block.consumer} of {block.phase}, {shape} {block.dtype}".rstrip()
        if trace.info.get("source") == "snapshot" and not block.shape:
            at = (f"{block.line} {block.operator}".strip(), block.module, "")
        else:
            at = (what, f"{block.module} {block.operator}".strip(), block.line)
        row = groups.setdefault(tuple(filter(None, at)), [0, 0, 0])
        row[0] += size
        row[1] += 1
        row[2] = max(row[2], size)
        allocated += size
        requested += block.bytes
    free = [b.size for s in result.segments for b in s.blocks if not b.allocated]
    rows = (LiveRow(total, count, largest, at) for at, (total, count, largest) in groups.items())
    return SnapshotSummary(
        device=_DEVICE,
        segments=len(result.segments),
        reserved=result.reserved,
        allocated=allocated,
        requested=requested,
        waiting=0,
        largest_free=max(free, default=0),
        free_blocks=len(free),
        expandable=result.allocator.config.expandable_segments,
        events=len(trace.events),
        live=tuple(sorted(rows, key=lambda row: (-row.bytes, row.frames))),
        ooms=(),
        other_devices={},
        settings=str(result.allocator.config),
        moment=f"at the peak, in {trace.peak_phase}" if at_peak else "at the end",
    )
