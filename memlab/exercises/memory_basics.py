"""Exercises 1.1 to 1.5: bandwidth and capacity, links, a copy benchmark, Little's law, a meter.

The points need no GPU and no clock: the copy benchmark of 1.3 meets a clock that the check itself moves.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memlab.exercises import (
    Evidence,
    Exercise,
    Score,
    Tally,
    answers_to,
    call,
    close,
    exactly,
    is_number,
    plain,
    several,
)
from memlab.exercises.limits import contained
from memlab.units import GB, GIB, MIB, format_bytes

Link = dict[str, Any]


def _value(case: Evidence) -> Any:
    return case.get("value")


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if is_number(value) else repr(value)[:80]


def _stopped(cases: Sequence[Evidence]) -> str:
    """What the first failing call said, for a message; '' when none failed."""
    return next((f"; it stopped with {case['error']}" for case in cases if "error" in case), "")


# -- 1.1 bandwidth and capacity ----------------------------------------------------------------------------


def _chips(seed: int) -> list[tuple[int, float]]:
    """Bus bits and Gb/s per pin: A100 80 and 40 GB, H100, RTX 4090, and three chips that exist nowhere."""
    rng = random.Random(f"1.1 {seed}")
    hidden = [(64 * rng.randint(2, 120), round(rng.uniform(3, 33), 2)) for _ in range(3)]
    return [(5120, 3.186), (5120, 2.43), (5120, 5.234), (384, 21.0), *hidden]


def _sizes(seed: int) -> list[int]:
    rng = random.Random(f"1.1 sizes {seed}")
    return [85_198_045_184, *(rng.randrange(4 * GIB, 300 * GIB) for _ in range(3))]


def _capacity_evidence(answer: Any, seed: int) -> Evidence:
    bandwidth, visible = several(answer, "1.1", "bandwidth", "visible")
    return {
        "bandwidth": [call(bandwidth, *chip) for chip in _chips(seed)],
        "visible": [call(visible, n) for n in _sizes(seed)],
    }


def _capacity_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    chips = answers_to(_chips(seed), evidence["bandwidth"])
    seen = answers_to(_sizes(seed), evidence["visible"])
    wrong = [(chip, c) for chip, c in chips if not close(_value(c), chip[0] * chip[1] / 8, 1e-6)]
    text = ""
    if wrong:
        (bits, rate), case = wrong[0]
        text = f"bandwidth({bits}, {rate}) isn't {bits * rate / 8:,.0f} GB/s"
        text += _stopped([c for _, c in wrong])
        if close(_value(case), bits * rate):
            text = "bandwidth: that is gigabits per second; the bus is counted in bits, the answer in bytes"
        elif close(_value(case), bits * rate / 8 / 1.024**3) or close(_value(case), bits * rate / 8.192):
            text = "bandwidth: a vendor's GB is 10^9 bytes; don't divide by powers of 1024"
        elif is_number(_value(case)) and abs(_value(case) - bits * rate / 8) <= 1:
            text = f"bandwidth({bits}, {rate}) is {bits * rate / 8:,.10g} GB/s, you return {_value(case)!r}: "
            text += "don't round, and divide by / instead of //"
        elif "error" not in case:
            text += f" but you return {_value(case)!r}: every pin carries `gbps_per_pin` gigabits per second"
    tally.award(1, not wrong, text)

    pairs = [(n, _value(c)) for n, c in seen]
    shaped = all(isinstance(v, list) and len(v) == 2 for _, v in pairs)
    if not shaped:
        return Score(
            tally.points,
            (*tally.messages, "visible returns two numbers: (GB, GiB)" + _stopped([c for _, c in seen])),
        )
    if all(_is(v, (n / GIB, n / GB)) for n, v in pairs):
        return Score(
            tally.points, (*tally.messages, "visible: you swapped the two: GB comes first, then GiB")
        )
    for place, unit, size in ((0, "GB", GB), (1, "GiB", GIB)):
        hint = f"the {('first', 'second')[place]} number is {unit}, {('10^9', '2^30')[place]} bytes"
        if all(close(v[place], n / size, 0.02) for n, v in pairs):
            hint = f"{unit} is the right unit, but don't round: return the number as it is"
        elif all(close(v[place], n / (GB + GIB - size), 1e-6) for n, v in pairs):
            hint += ": a GB is not a GiB"
        tally.award(0.5, all(close(v[place], n / size, 1e-6) for n, v in pairs), f"visible: {hint}")
    return tally.score()


def _is(value: Any, expected: Sequence[float]) -> bool:
    return all(close(v, e, 1e-6) for v, e in zip(value, expected, strict=True))


# -- 1.2 links ---------------------------------------------------------------------------------------------


def one_direction(link: Link) -> float:
    """GB/s of a datasheet row in one direction."""
    rate = float(link["gb_per_s"])
    return rate / 2 if link["both_directions"] else rate


def fastest(ends: Sequence[str], links: Sequence[Link]) -> str | None:
    """The name of the fastest link that joins the two ends, in either order; None where there is none."""
    usable = [link for link in links if sorted(link["connects"]) == sorted(ends)]
    return str(max(usable, key=one_direction)["name"]) if usable else None


def _row(name: str, rate: float, both: bool, *ends: str) -> Link:
    return {"name": name, "gb_per_s": rate, "both_directions": both, "connects": list(ends)}


def _machines(seed: int) -> list[list[Link]]:
    """An x86 server, a Grace-Hopper board, and one whose larger datasheet number is the slower link."""
    rng = random.Random(f"1.2 {seed}")
    x86 = [
        _row("HBM2e", 2039.0, False, "gpu", "hbm"),
        _row("NVLink 3", 600.0, True, "gpu", "gpu"),
        _row("PCIe 4 x16", 31.5, False, "cpu", "gpu"),
    ]
    grace = [
        _row("PCIe 5 x16", 63.0, False, "gpu", "cpu"),
        _row("NVLink-C2C", 900.0, True, "cpu", "gpu"),
        _row("NVLink 4", 900.0, True, "gpu", "gpu"),
    ]
    slow = round(rng.uniform(20, 60), 1)
    own = [
        _row("twin bus", round(slow * rng.uniform(1.3, 1.9), 1), True, "cpu", "gpu"),
        _row("plain bus", slow, False, "gpu", "cpu"),
        _row("mesh", round(rng.uniform(100, 900), 1), True, "gpu", "gpu"),
    ]
    return [x86, grace, own]


def _transfers(seed: int) -> list[tuple[int, Link]]:
    """Bytes, and the row of a datasheet that they take."""
    rng = random.Random(f"1.2 bytes {seed}")
    rows = [link for links in _machines(seed) for link in links]
    return [(rng.choice([80, 140, 7]) * GB + rng.randrange(GB), link) for link in rows]


def _ways(seed: int) -> list[tuple[tuple[str, str], list[Link]]]:
    ends = (("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu"), ("cpu", "nvme"))
    return [(pair, links) for links in _machines(seed) for pair in ends]


def _links_evidence(answer: Any, seed: int) -> Evidence:
    transfer_time, path = several(answer, "1.2", "transfer_time", "path")
    return {
        "times": [call(transfer_time, n, _copy(link)) for n, link in _transfers(seed)],
        "paths": [call(path, *ends, [_copy(row) for row in links]) for ends, links in _ways(seed)],
    }


def _copy(link: Link) -> Link:
    return {**link, "connects": tuple(link["connects"])}  # an answer that changes its own changes nothing


def _links_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    times = answers_to(_transfers(seed), evidence["times"])
    paths = answers_to(_ways(seed), evidence["paths"])

    def expected(asked: tuple[int, Link]) -> float:
        return asked[0] / GB / one_direction(asked[1])

    plain_rows = [(asked, c) for asked, c in times if not asked[1]["both_directions"]]
    bad = next(((asked, c) for asked, c in plain_rows if not close(_value(c), expected(asked))), None)
    hint = ""
    if bad is not None:
        (n, link), case = bad
        right = expected(bad[0])
        hint = f"transfer_time: {n:,} B over {link['name']} take {right:.4g} s"
        if close(_value(case), right * 8):
            hint += "; gb_per_s counts bytes, not bits"
        elif close(_value(case), right * GB / GIB, 0.001):
            hint += "; a link's GB is 10^9 bytes"
        elif "error" not in case:
            hint += f", not {_shown(_value(case))}"
        hint += _stopped([c for _, c in plain_rows])
    tally.award(0.5, bad is None, hint)
    tally.award(
        0.5,
        bad is None and all(close(_value(c), expected(asked)) for asked, c in times),
        "transfer_time: a row with both_directions sums two directions; your bytes travel in one of them"
        if bad is None
        else "transfer_time: then treat the rows that sum both directions",
    )

    def found(ends: Sequence[str], links: Sequence[Link], case: Evidence) -> bool:
        return "error" not in case and _value(case) == fastest(ends, links)

    # An answer for a pair that nothing joins is checked together with the pairs that are joined.
    wrong = [(ends, links, case) for (ends, links), case in paths if not found(ends, links, case)]
    joined = [w for w in wrong if fastest(*w[:2]) is not None]
    on_x86 = next((w for w in joined if any(row["name"] == "HBM2e" for row in w[1])), None)
    tally.award(0.5, on_x86 is None, _wrong_path(on_x86))
    if on_x86 is not None:
        return tally.score()  # the first mistake first
    hint = "path: where no link joins the two ends, return None" + _stopped([c for _, c in paths])
    tally.award(0.5, not wrong, _wrong_path(joined[0]) if joined else hint)
    return tally.score()


def _wrong_path(wrong: tuple[Sequence[str], Sequence[Link], Evidence] | None) -> str:
    """What is wrong with one answer of `path`."""
    if wrong is None:
        return ""
    ends, links, case = wrong
    names, value = [row["name"] for row in links], _value(case)
    text = f"path{tuple(ends)!r} among {', '.join(names)} is {fastest(ends, links)!r}"
    if "error" in case:
        return text + _stopped([case])
    if isinstance(value, dict) and value.get("name") in names:
        return 'path: you return the whole row: return its name, row["name"]'
    if value is None:
        return text + ", and you found no link: the ends may come in either order"
    if value not in names:
        return text + f", not {_shown(value)}: return the link's name"
    chosen = next(row for row in links if row["name"] == value)
    if sorted(chosen["connects"]) == sorted(ends):
        return text + f", not {value!r}: compare one direction with one direction"
    return text + f", not {value!r}: that joins {' and '.join(chosen['connects'])}"


# -- 1.3 a copy benchmark ----------------------------------------------------------------------------------


class _Bench:
    """A clock that only `copy` moves, by a script of durations, so that the right answer is known exactly."""

    def __init__(self, seed: int, sizes: Sequence[int]) -> None:
        rng = random.Random(f"1.3 {seed}")
        self.now = rng.uniform(10, 1000)
        self.spent: dict[int, list[float]] = {n: [] for n in sizes}
        self.script: dict[int, list[float]] = {}
        for n in sizes:
            base = n / (rng.uniform(4, 40) * GB)
            later = [base * rng.uniform(1.05, 1.4) for _ in range(97)]
            # Slow first (its pages are touched for the first time), fastest third, never again as fast.
            self.script[n] = [base * rng.uniform(2, 4), base * 1.25, base, *later]

    def clock(self) -> float:
        return self.now

    def copy(self, nbytes: int) -> None:
        done = self.spent.get(nbytes)
        if done is None:
            raise ValueError(f"copy({nbytes}) was not asked for: the sizes are {sorted(self.spent)}")
        if len(done) >= 100:
            raise RuntimeError("more than 100 copies of one size: 3 to 20 are enough")
        duration = self.script[nbytes][len(done)]
        done.append(duration)
        self.now += duration


def _benches(seed: int) -> list[tuple[int, list[int], _Bench]]:
    """Bytes of a cache, the sizes that are asked for, and the bench."""
    rng = random.Random(f"1.3 sizes {seed}")
    found = []
    for cache in (rng.choice([8, 12, 24]) * MIB, rng.choice([32, 36, 105]) * MIB):
        sizes = [cache // 8, cache * 2, cache * 4, cache * 8, cache * 16]
        rng.shuffle(sizes)
        found.append((cache, sizes, _Bench(rng.randrange(2**30), sizes)))
    return found


def _copy_evidence(answer: Any, seed: int) -> Evidence:
    runs = []
    for cache, sizes, bench in _benches(seed):
        result = call(answer, list(sizes), cache, bench.copy, bench.clock)
        runs.append({"copies": [len(bench.spent[n]) for n in sizes], **result})
    print(_here(answer))
    return {"runs": runs}


def _here(answer: Callable[..., Any]) -> str:
    """The student's function on this machine's RAM. Shown, and never worth a point."""
    import torch

    buffers: dict[int, tuple[Any, Any]] = {}

    def copy(nbytes: int) -> None:
        if nbytes not in buffers:
            buffers.clear()
            buffers[nbytes] = (torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8))
        source, target = buffers[nbytes]
        target.copy_(source)

    sizes = [64 * MIB, 128 * MIB]
    result = call(answer, sizes, 16 * MIB, copy, time.perf_counter)
    value = result.get("value")
    rates = list(value.values()) if isinstance(value, dict) else []
    if not rates or not all(is_number(rate) and 0.1 < rate < 10_000 for rate in rates):
        return (
            "on this machine your function gave no rate between 0.1 and 10,000 GB/s (no points depend on it)"
        )
    shown = ", ".join(f"{format_bytes(n)}: {rate:.1f} GB/s" for n, rate in zip(sizes, rates, strict=False))
    spread = max(rates) / min(rates) - 1
    note = (
        "" if spread <= 0.3 else f"; they differ by {spread:.0%}: the machine is busy, or a size is too small"
    )
    return f"your function on this machine's RAM (no points depend on it): {shown}{note}"


def _copy_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    runs = answers_to(_benches(seed), evidence["runs"])
    if any("error" in run for _, run in runs):
        return Score(0, ("copy_bandwidth" + _stopped([run for _, run in runs])[2:],))
    for (_, sizes, _), run in runs:
        if not isinstance(_value(run), dict) or not _value(run):
            return Score(0, ("copy_bandwidth returns a dict: {bytes: GB/s} for the sizes that count",))
        for name in _value(run):
            if name not in map(str, sizes):
                return Score(0, (f"copy_bandwidth was asked for the sizes {sizes}, not for {name}",))
    traffic = timed = best = enough = True
    unit_hint = ""
    for (_, sizes, bench), run in runs:
        copies = dict(zip(sizes, exactly(run["copies"], len(sizes)), strict=True))
        for name, rate in _value(run).items():
            durations = bench.script[int(name)][: copies[int(name)]]
            unit = int(name) / GB
            if not durations:
                return Score(
                    0, (f"the size {name} was never copied: call copy(nbytes) between two clock() calls",)
                )
            # some copy a few times before they begin to time: the shortest of at least three after that
            shortest = {min(durations[before:]) for before in range(max(len(durations) - 2, 1))}
            ways = (*shortest, statistics.mean(durations), statistics.median(durations), durations[0],
                    durations[-1], statistics.mean(durations[1:] or durations), sum(durations))  # fmt: skip
            moved = [k * unit / t for t in ways for k in (1, 2)]
            scale = 1.0
            for size, word in ((GIB / GB, "GiB per second"), (1 / GB, "bytes per second")):
                if is_number(rate) and any(close(rate * size, value, 1e-6) for value in moved):
                    unit_hint, scale = f"traffic: that is in {word}: return GB, 10^9 bytes, per second", size
            value = rate * scale if is_number(rate) else rate
            traffic &= scale == 1 and any(close(value, right, 1e-6) for right in moved[1::2])
            timed &= any(close(value, right, 1e-6) for right in moved)
            best &= any(close(value, k * unit / t, 1e-6) for t in shortest for k in (1, 2))
            enough &= len(durations) >= 3
    if not timed:
        return Score(
            0, ("copy_bandwidth: time copy(nbytes) by the clock() that you are given, and by nothing else",)
        )
    expected = [{n for n in sizes if n >= 4 * cache} for (cache, sizes, _), _ in runs]
    kept = [{int(n) for n in _value(run)} for _, run in runs]
    tally.award(
        0.4,
        traffic,
        unit_hint
        or "traffic: a copy reads every byte once and writes it once: 2 x bytes, in GB of 10^9, per second",
    )
    tally.award(
        0.4,
        best and enough,
        "time each size at least 3 times and keep the shortest: the first touches new pages",
    )
    hint = "sizes: leave out what isn't at least 4 times the cache: such a copy measures the cache"
    if all(found == {n for n in found if n > 4 * asked[0]} and found < right
           for found, right, (asked, _) in zip(kept, expected, runs, strict=True)):  # fmt: skip
        hint = "sizes: exactly 4 times the cache counts as well"
    tally.award(0.2, kept == expected, hint)
    return tally.score()


# -- 1.4 Little's law --------------------------------------------------------------------------------------


def _flight(gb_per_s: float, cycles: float, ghz: float) -> float:
    return gb_per_s * cycles / ghz  # 1e9 B/s x 1e-9 s = B


#: GB/s, cycles, GHz, SMs and bytes of which a whole number of threads comes, in every order of operations.
WHOLE = (
    (1248.0, 620, 2.5, 78, 4), (556.0, 539, 1.75, 139, 2), (1860.0, 427, 1.75, 155, 4),
    (5680.0, 540, 2.5, 142, 8), (2880.0, 580, 2.5, 60, 8), (330.0, 371, 1.75, 55, 2),
    (344.0, 530, 2.5, 43, 2), (2232.0, 325, 1.25, 93, 8), (900.0, 640, 2.0, 90, 2),
    (408.0, 585, 2.25, 102, 2), (640.0, 650, 2.5, 64, 2), (88.0, 350, 1.75, 44, 2),
    (2416.0, 399, 1.75, 151, 8), (1420.0, 666, 2.25, 71, 4), (3120.0, 408, 2.0, 156, 4),
    (2272.0, 592, 2.0, 71, 8), (584.0, 536, 2.0, 73, 4), (616.0, 290, 1.25, 154, 4),
    (1440.0, 464, 2.0, 45, 8), (5080.0, 760, 2.5, 127, 8), (368.0, 300, 1.5, 46, 8),
    (1056.0, 511, 1.75, 88, 4), (1908.0, 270, 1.25, 159, 4), (1824.0, 800, 2.5, 76, 8),
)  # fmt: skip


def _cards(seed: int) -> list[tuple[float, int, float, int, int]]:
    """GB/s, cycles, GHz, SMs, and bytes that a thread loads: two cards and four that exist nowhere.

    The last one's bytes are divided without a rest.
    """
    rng = random.Random(f"1.4 {seed}")
    cards = [(2039.0, 400, 1.41, 108), (3350.0, 400, 1.755, 132)]
    for _ in range(3):
        card = (
            round(rng.uniform(300, 8000), 1),
            rng.randint(250, 800),
            round(rng.uniform(1.1, 2.6), 3),
            rng.randint(40, 160),
        )
        cards.append(card)
    loads = [4, 16, *(rng.choice([2, 4, 8, 16]) for _ in range(3))]
    return [*((*card, load) for card, load in zip(cards, loads, strict=True)), rng.choice(WHOLE)]


def _flight_evidence(answer: Any, seed: int) -> Evidence:
    in_flight, threads = several(answer, "1.4", "bytes_in_flight", "threads_per_sm")
    return {
        "bytes": [call(in_flight, *card[:3]) for card in _cards(seed)],
        "threads": [call(threads, *card) for card in _cards(seed)],
    }


def _flight_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    flights = answers_to(_cards(seed), evidence["bytes"])
    threads = answers_to(_cards(seed), evidence["threads"])
    wrong = [(card, c) for card, c in flights if not close(_value(c), _flight(*card[:3]))]
    text = ""
    if wrong:
        (rate, cycles, ghz, *_), case = wrong[0]
        expected, got = _flight(rate, cycles, ghz), _value(case)
        text = f"bytes_in_flight({rate}, {cycles}, {ghz}) isn't {expected:,.0f} B"
        text += _stopped([c for _, c in wrong])
        if close(got, rate * cycles * ghz):
            text = "bytes_in_flight: cycles x GHz is no time; a cycle lasts 1 / GHz nanoseconds"
        elif is_number(got) and got and math.isclose(abs(math.log10(expected / got)) % 3, 0, abs_tol=0.01):
            text = "bytes_in_flight: a power of 1000 is wrong: GB/s is 10^9 bytes per second, GHz 10^9 cycles"
        elif is_number(got):
            text += f" but you return {got:,.4g}: bandwidth x latency"
    tally.award(1, not wrong, text)

    def expected_threads(position: int) -> list[float]:
        """From the right bytes, and from the student's own: one mistake costs its points once."""
        (*flow, sms, load), case = flights[position]
        own = _value(case)
        flows = [_flight(*flow), own] if is_number(own) and own > 0 else [_flight(*flow)]
        return [flow / (sms * load) for flow in flows]

    answers = [(_value(case), expected_threads(k)) for k, (_, case) in enumerate(threads)]
    rounded = all(is_number(n) and any(abs(n - m) <= 1 for m in wanted) for n, wanted in answers)
    exact = all(type(n) is int and n in map(math.ceil, wanted) for n, wanted in answers)
    near = tally.award(
        0.5,
        rounded,
        "threads_per_sm: divide the bytes in flight among the SMs, then by what one thread has on the way"
        + _stopped([case for _, case in threads]),
    )
    if near:
        hint = "threads_per_sm: return an int, rounded up: half a thread loads nothing"
        *card, sms, load = _cards(seed)[-1]
        said, right = answers[-1][0], round(_flight(*card) / (sms * load))
        if said == right + 1:
            hint = (
                f"threads_per_sm: {_flight(*card):,.0f} B among {sms} SMs, {load} B for each thread, are "
                f"exactly {right} threads, not {said}: what is whole already isn't rounded up (math.ceil)"
            )
        tally.award(0.5, exact, hint)
    return tally.score()


# -- 1.5 the meter -----------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What a meter must show at one place of a script. `fault`: the mistake that a wrong number points at."""

    what: str
    live: int
    peak: int
    fault: str = ""  # a key of `_METER_HINTS`
    most: int = 0  # where the peak of a backward depends on the order in which autograd frees: its bounds


class _Log:
    """Notes the meter's two numbers, and nothing of what they must be."""

    def __init__(self, meter: Any) -> None:
        self.meter, self.steps, self.freed = meter, list[list[Any]](), True

    def note(self) -> None:
        self.steps.append([plain(self.meter.live_bytes), plain(self.meter.peak_bytes)])

    def found(self) -> Evidence:
        return {"steps": self.steps, "freed": self.freed}


class _Sizes(NamedTuple):
    """What a script draws from the seed; each script has its own use for the numbers."""

    a: int
    b: int
    c: int

    @classmethod
    def of(cls, name: str, seed: int) -> _Sizes:
        rng = random.Random(f"1.5 {name} {seed}")
        if name == "a forward and a backward":
            return cls(rng.randrange(2, 6), 8 * rng.randrange(4, 12), 4 * rng.randrange(2, 16))
        if name == "views and shared storage":
            return cls(rng.randrange(6, 60), 0, 0)
        return cls(*(4 * rng.randrange(10, 3000) for _ in range(3)))


_TIMES = 8  # one new storage may happen to get an address of its own, not all of these


def _allocations(make: Callable[[], Any], sizes: _Sizes) -> Evidence:
    """Fresh tensors that come and go; the allocator hands the same address out again."""
    import weakref

    import torch

    a, b, c = sizes
    with make() as meter:
        log = _Log(meter)
        x = torch.empty(a, dtype=torch.uint8)
        log.note()
        y = torch.zeros(b // 4)
        log.note()
        gone = weakref.ref(x.untyped_storage())
        del x
        log.note()
        log.freed = gone() is None
        z = torch.ones(c // 4)
        log.note()
        del y, z
        for _ in range(_TIMES):
            w = torch.empty(a, dtype=torch.uint8)
            log.note()
            del w
        log.note()
        values, indices = torch.full((b // 4, 2), 1.0).max(dim=1)
        log.note()
        del values, indices
    return log.found()


def _allocations_right(sizes: _Sizes) -> list[_Step]:
    a, b, c = sizes
    peak = max(a + b, b + c)
    return [
        _Step(f"after x = torch.empty({a} bytes)", a, a),
        _Step(f"after y = torch.zeros({b} bytes)", a + b, a + b),
        _Step("after del x", b, a + b),
        _Step(f"after z = torch.ones({c} bytes)", b + c, peak, "key"),
        *(_Step(f"after w = torch.empty({a} bytes), once more", a, peak, "key") for _ in range(_TIMES)),
        _Step(f"after {_TIMES} times w = torch.empty({a} bytes); del w", 0, peak, "key"),
        _Step("after an operator with two results, values and indices", 3 * b, max(peak, 5 * b)),
    ]


def _views(make: Callable[[], Any], sizes: _Sizes) -> Evidence:
    """Several tensors, one storage."""
    import torch

    rows = sizes.a
    with make() as meter:
        log = _Log(meter)
        x = torch.ones(rows, rows)
        flat, part, turned = x.view(-1), x[1:3], x.t()
        pieces = x.chunk(3)
        log.note()
        del x, flat, turned, pieces
        log.note()
        grown = part.expand(2, 2, rows)
        log.note()
        solid = grown.contiguous()
        log.note()
        del part, grown
        log.note()
        del solid
    return log.found()


def _views_right(sizes: _Sizes) -> list[_Step]:
    size, copy = 4 * sizes.a**2, 4 * 4 * sizes.a
    return [
        _Step("after x and four kinds of views of it", size, size),
        _Step("after del of all but a slice: a slice keeps the whole storage", size, size),
        _Step("after part.expand(...)", size, size),
        _Step("after .contiguous() of it, a real copy", size + copy, size + copy),
        _Step("after del of the last view", copy, size + copy),
    ]


def _in_place(make: Callable[[], Any], sizes: _Sizes) -> Evidence:
    """In-place operators, `out=`, and tensors that are older than the meter."""
    import torch

    n = sizes.a // 4
    old, target = torch.ones(n), torch.empty(n)
    with make() as meter:
        log = _Log(meter)
        new = torch.zeros(n)
        new.add_(old).mul_(2)
        log.note()
        old.mul_(3)
        seen = old.view(1, -1)
        log.note()
        torch.add(old, new, out=target)
        log.note()
        both = old + seen[0]
        log.note()
        del both, seen
        log.note()
        del new
    return log.found()


def _in_place_right(sizes: _Sizes) -> list[_Step]:
    size = sizes.a
    return [
        _Step("after new = torch.zeros(...); new.add_(old).mul_(2)", size, size),
        _Step("after old.mul_(3) and a view of old, which was there before the meter", size, size),
        _Step("after torch.add(old, new, out=target), target there before the meter", size, size),
        _Step("after both = old + seen[0]", 2 * size, 2 * size),
        _Step("after del both", size, 2 * size),
    ]


def _training(make: Callable[[], Any], sizes: _Sizes) -> Evidence:
    """A forward and a backward of Linear+ReLU layers without bias: every live byte is known."""
    import torch

    depth, width, batch = sizes
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    x = torch.ones(batch, width)
    with make() as meter:
        log = _Log(meter)
        for layer in layers:
            x = torch.relu(layer(x))
        log.note()
        loss = x.sum()
        del x
        loss.backward()  # type: ignore[no-untyped-call]
        log.note()
    log.note()
    return log.found()


def _training_right(sizes: _Sizes) -> list[_Step]:
    depth, width, batch = sizes
    act, weight = 4 * batch * width, 4 * width * width
    forward, left = (depth + 1) * act, depth * weight + 4
    low, most = max(forward, left), forward + depth * weight + 3 * act + weight + 64
    what = f"after {depth} x Linear({width}, {width}) + ReLU, batch {batch}"
    return [
        _Step(what, depth * act, forward),
        _Step("after backward(): the gradients and the loss are left", left, low, most=most),
        _Step("after the end of the with block", left, low, most=most),
    ]


def _leaving(make: Callable[[], Any], sizes: _Sizes) -> Evidence:
    """Nothing is kept alive, nothing is counted after the end, what dies later is still counted off."""
    import weakref

    import torch

    n = sizes.a
    with make() as meter:
        log = _Log(meter)
        kept = torch.empty(n, dtype=torch.uint8)
        dead = torch.empty(2 * n, dtype=torch.uint8)
        gone = weakref.ref(dead)
        del dead
        gc.collect()
        log.freed = gone() is None
    log.note()
    other = torch.empty(7 * n, dtype=torch.uint8)
    log.note()
    del other, kept
    gc.collect()
    log.note()
    with make() as again:
        log.meter = again
        second = torch.empty(n, dtype=torch.uint8)
        log.note()
        del second
    return log.found()


def _leaving_right(sizes: _Sizes) -> list[_Step]:
    n = sizes.a
    return [
        _Step("after the end of the with block, one tensor alive", n, 3 * n),
        _Step("after torch.empty(...) outside the block: not counted", n, 3 * n),
        _Step("after del of the last tensor, outside the block", 0, 3 * n),
        _Step("in a second meter: it starts at 0", n, n),
    ]


_SCRIPTS: dict[str, Callable[[Callable[[], Any], _Sizes], Evidence]] = {
    "allocate and free": _allocations,
    "views and shared storage": _views,
    "in place": _in_place,
    "a forward and a backward": _training,
    "leaving the block": _leaving,
}
_RIGHT: dict[str, tuple[float, Callable[[_Sizes], list[_Step]]]] = {
    "allocate and free": (0.75, _allocations_right),
    "views and shared storage": (0.75, _views_right),
    "in place": (0.5, _in_place_right),
    "a forward and a backward": (0.5, _training_right),
    "leaving the block": (0.5, _leaving_right),
}


def _meter_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        return {"scripts": [call(run, answer, _Sizes.of(name, seed)) for name, run in _SCRIPTS.items()]}

    return contained(work)


def _step_fault(step: _Step, got: Any) -> str:
    """What is wrong at one place, or ''."""
    live, peak = exactly(got, 2)
    if type(live) is not int or type(peak) is not int:
        return f"live_bytes and peak_bytes must be ints, not {type(live).__name__} and {type(peak).__name__}"
    if live != step.live:
        return f"{step.what}: live_bytes is {live:,}, should be {step.live:,}"
    if step.most:
        right = step.peak <= peak <= step.most
        low = f"a peak of {peak:,} bytes can't be, nor can one below {step.peak:,}"
        return "" if right else f"{step.what}: {low}"
    return "" if peak == step.peak else f"{step.what}: peak_bytes is {peak:,}, should be {step.peak:,}"


_METER_HINTS = {
    "allocate and free": "count a storage once when it is first seen, and again, with minus, when it dies",
    "key": "the fourth trap: a dead storage's key came back for a new one, and your meter takes it for the "
    "old one. Forget the key in `ended`",
    "views and shared storage": "views share a storage: count storages, by untyped_storage(), not tensors",
    "in place": "a result may be a tensor that was there before: only storages that no argument has are new",
    "a forward and a backward": "weights are older than the meter; what autograd keeps is alive, too",
    "leaving the block": "let super().__exit__ end the mode: what is made after the block isn't counted, "
    "what dies after it is",
}
_HOLDS = (
    "a deleted tensor stayed alive: something in your meter holds it. Keep no tensor and no storage, not in "
    "a list, and not in a closure or lambda that you give to weakref.finalize: give it numbers"
)


def _meter_score(evidence: Evidence, seed: int) -> Score:
    cases = answers_to(_RIGHT, evidence["scripts"])
    errors = {case.get("error") for _, case in cases}
    if len(errors) == 1 and None not in errors:
        return Score(0, (f"your meter stopped with {errors.pop()}",))
    tally = Tally()
    holds = any(case["value"]["freed"] is not True for _, case in cases if "error" not in case)
    forgets = False
    for name, case in cases:
        points, right = _RIGHT[name]
        if "error" in case:
            tally.award(points, False, f"{name}: it stopped with {case['error']}")
            continue
        steps = right(_Sizes.of(name, seed))
        noted = exactly(case["value"]["steps"], len(steps))
        faults = [
            (step, text) for step, got in zip(steps, noted, strict=True) if (text := _step_fault(step, got))
        ]
        first, fault = faults[0] if faults else (None, "")
        if not fault and case["value"]["freed"] is not True:
            fault = "a deleted tensor stayed alive"
        key = (first.fault if first else "") or (name if not forgets else "key")
        forgets = forgets or (key == "key" and bool(fault))
        hint = "" if holds else f". Hint: {_METER_HINTS[key]}"
        tally.award(points, not fault, f"{name}: {fault}{hint}")
    if holds:
        tally.messages.insert(0, _HOLDS)
    return tally.score()


EXERCISES = (
    Exercise("1.1", "bandwidth and capacity", 2, _capacity_evidence, _capacity_score, "1.1 The label"),
    Exercise("1.2", "the way to the GPU", 2, _links_evidence, _links_score, "1.2 The way in"),
    Exercise("1.3", "time a copy", 1, _copy_evidence, _copy_score, "1.3 Measure a copy"),
    Exercise("1.4", "bytes in flight", 2, _flight_evidence, _flight_score, "1.4 Latency"),
    Exercise("1.5", "write the meter", 3, _meter_evidence, _meter_score, "1.5 A meter of live bytes"),
)
