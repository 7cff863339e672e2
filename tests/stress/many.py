"""Five hundred submissions of one chapter in one run: how fast, how much memory, and whether it grows."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tests.submissions.harness import CASES, command, environment, make_class, progress, totals

NUMBER = int(os.environ.get("MEMLAB_STRESS_SUBMISSIONS", "500"))
JOBS = int(os.environ.get("MEMLAB_STRESS_JOBS", "2"))
#: Honest submissions of every form, again and again.
FORMS = (
    "half",
    "warns",
    "untouched",
    "numpy_numbers",
    "one_stub_left",
    "wrong_unit",
    "stripped",
    "duplicates",
)


class Watch:
    """Looks at the memory of a process and all below it, once a second."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._root, self._end = psutil.Process(process.pid), threading.Event()
        self.samples: list[dict[str, int]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(1):
            sample: dict[str, int] = defaultdict(int)
            with contextlib.suppress(psutil.Error):
                for process in [self._root, *self._root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        words = " ".join(process.cmdline())
                        kind = (
                            "sandbox"
                            if "zygote" in words
                            else "worker"
                            if "spawn_main" in words
                            else "grader"
                        )
                        sample[kind] += process.memory_full_info().pss
            self.samples.append(dict(sample))

    def end(self) -> None:
        self._end.set()
        self._thread.join()


def test_many(tmp_path: Path) -> None:
    root = tmp_path / "c"
    copies = NUMBER - len(FORMS) - 1
    make_class(root, [CASES[name] for name in FORMS], copies)
    with environment() as variables:
        began = time.monotonic()
        with (root / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                command(root, "--jobs", str(JOBS)), cwd=root, env=variables,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
            watch = Watch(process)
            arrived = []
            with progress(root / "graded"):
                while process.poll() is None:
                    time.sleep(2)
                    arrived.append(len(list((root / "graded" / "records").glob("*/*.json"))))
            watch.end()
        seconds = time.monotonic() - began
    rows = totals(root / "graded")
    assert process.returncode == 0, (root / "stderr").read_text()[-2000:]
    assert len(rows) == NUMBER and {row["status"] for row in rows.values()} == {"graded"}
    assert all(row["points"] == "10" for name, row in rows.items() if name.startswith("honest-"))
    print(f"\n{NUMBER} submissions, {JOBS} workers: {seconds:.0f} s, {60 * NUMBER / seconds:.1f} a minute")
    size = sum(p.stat().st_size for p in (root / "graded").rglob("*") if p.is_file())
    print(f"output {size / NUMBER / 1e3:.0f} kB a submission")
    quarter = max(len(watch.samples) // 4, 1)
    for kind in ("grader", "worker", "sandbox"):
        early = statistics.median(s.get(kind, 0) for s in watch.samples[quarter : 2 * quarter])
        late = statistics.median(s.get(kind, 0) for s in watch.samples[3 * quarter :])
        most = max(s.get(kind, 0) for s in watch.samples)
        print(
            f"{kind:<8} PSS in the second quarter {early / 1e6:,.0f} MB, in the last {late / 1e6:,.0f} MB, "
            f"most {most / 1e6:,.0f} MB"
        )
        assert late < 1.15 * early + 60e6, f"{kind} grows"
    second, last = (
        arrived[len(arrived) // 2] - arrived[len(arrived) // 4],
        arrived[-1] - arrived[3 * len(arrived) // 4],
    )
    print(f"graded in the second quarter of the time {second}, in the last {last}")
