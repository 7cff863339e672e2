"""Event streams of benchmark runs in a small file, so that a test can replay them without transformers.

    python -m benchmarks.streams FOLDER ID...     writes FOLDER/ID.xz for rows of the published measurements

A stream holds sizes, the order of allocations and frees, phases, steps and emptied caches; no names. An
allocation is written as the index of its size, a free as how many blocks ago it was allocated: the layers
of a model then look alike, and compress.
"""

from __future__ import annotations

import json
import lzma
import sys
from array import array
from pathlib import Path
from typing import Any

from memlab.trace import Trace


def save(run: Any, path: Path) -> int:
    """Write a `workloads.Run`; returns the bytes of the file."""
    trace: Trace = run.trace
    sizes: dict[int, int] = {}
    number: dict[int, int] = {}
    codes: array[int] = array("i")
    for event in trace.events:
        if event >= 0:
            number[event] = len(number)
            codes.append(sizes.setdefault(trace.sizes[event], len(sizes)))
        else:
            codes.append(number[~event] - len(number))
    head = {
        "sizes": list(sizes),
        "marks": trace.marks,
        "empty_cache": list(trace.info.get("empty_cache", ())),
        "headline": run.headline,
        "phases": run.phases,
    }
    text = json.dumps(head).encode()
    data = lzma.compress(
        len(text).to_bytes(4, "little") + text + codes.tobytes(), preset=9 | lzma.PRESET_EXTREME
    )
    path.write_bytes(data)
    return len(data)


def load(path: Path) -> Stream:
    """Read what `save` wrote. Raises ValueError for anything else."""
    try:
        data = lzma.decompress(path.read_bytes())
        stop = 4 + int.from_bytes(data[:4], "little")
        head = json.loads(data[4:stop])
        codes: array[int] = array("i")
        codes.frombytes(data[stop:])
    except (lzma.LZMAError, ValueError, KeyError) as error:
        raise ValueError(f"{path.name} isn't an event stream: {error}") from error
    trace = Trace()
    for code in codes:
        if code >= 0:
            trace.events.append(len(trace.sizes))
            trace.sizes.append(head["sizes"][code])
        else:
            trace.events.append(~(len(trace.sizes) + code))
    trace.marks = [(position, name) for position, name in head["marks"]]
    trace.info["empty_cache"] = head["empty_cache"]
    return Stream(trace, tuple(head["headline"]), tuple(head["phases"]))


class Stream:
    """What `accuracy.peaks` needs of a run."""

    def __init__(self, trace: Trace, headline: tuple[int, ...], phases: tuple[int, ...]) -> None:
        self.trace, self.headline, self.phases = trace, headline, phases


def main(arguments: list[str]) -> int:
    """Trace rows of the published measurements anew and write their streams."""
    from benchmarks import accuracy
    from benchmarks.workloads import libraries
    from memlab.published import measurements

    folder, wanted = Path(arguments[0]), set(arguments[1:])
    libraries()
    folder.mkdir(parents=True, exist_ok=True)
    for row in measurements():
        if str(row["id"]) in wanted:
            run = accuracy.traced(row)
            print(row["id"], save(run, folder / f"{row['id']}.xz"), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
