"""Twenty thousand damaged notebooks for the doctor, in two processes."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

from tests.submissions.fuzz import campaign

NUMBER = int(os.environ.get("MEMLAB_STRESS_FUZZ", "20000"))


def test_no_crash_no_hang_no_changed_answer() -> None:
    parts = 20
    results = []
    with ProcessPoolExecutor(2) as pool:
        for found in pool.map(campaign, [-(-NUMBER // parts)] * parts, range(1, parts + 1)):
            results.append(found)
            print(f"{sum(sum(counts.values()) for _, counts in results):,} inputs", flush=True)
    faults = [fault for found, _ in results for fault in found]
    assert sum(sum(counts.values()) for _, counts in results) >= NUMBER
    assert faults == [], f"{len(faults)} faults, the first: {faults[:10]}"
