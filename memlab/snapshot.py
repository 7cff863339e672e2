"""A trace as a PyTorch memory snapshot: what `torch.cuda.memory._dump_snapshot` would have written.

The file opens on https://pytorch.org/memory_viz and with `python -m torch.cuda._memory_viz`. It holds plain
lists, dicts, strings and numbers, pickled with protocol 4: the newest that the page's own reader knows. This
module only writes; it unpickles nothing.

Addresses, segments and block sizes are the replay's. Each allocation has three frames: the operator with the
source line, the module, and the tensor (consumer, phase, shape, dtype). There are no time stamps: the order
of the events is all that is known.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.allocator import Replay, replay

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
    data = pickle.dumps(snapshot(trace, result), protocol=_PROTOCOL)
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


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
