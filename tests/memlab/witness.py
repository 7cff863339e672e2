"""Independent witnesses of memory for the tests: torch's MemTracker, the allocator's log, resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memlab.meter import AllocatorLog, profiled

__all__ = ["AllocatorLog", "memtracker_peak", "profiled", "resident_peak"]


def memtracker_peak(step: Callable[[], Any], *external: Any) -> int:
    """Peak of the second of two steps by torch's MemTracker; `external`: modules, optimizers, tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(*external)
    with tracker:
        step()
        tracker.reset_mod_stats()
        kept = step()
    del kept
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def resident_peak(program: str) -> dict[str, int]:
    """Run `program` in a fresh interpreter; it prints one JSON object, may call `reset()` and `high()`.

    `high()` is the resident high-water mark in bytes since `reset()`. malloc is told to give each large block
    its own pages and to return them: otherwise freed memory stays resident and the figure means nothing.
    """
    prelude = """
import json
def reset():
    open('/proc/self/clear_refs', 'w').write('5')
def high(key='VmHWM'):
    for line in open('/proc/self/status'):
        if line.startswith(key + ':'):
            return int(line.split()[1]) * 1024
def now():
    return high('VmRSS')
"""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", prelude + program],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result
