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
from typing import Any

from memlab.exercises import Evidence, Exercise, Score, Tally, call, close, is_number
from memlab.exercises.limits import contained
from memlab.units import GB, GIB, MIB, format_bytes

Link = dict[str, Any]


def _pair(answer: Any, first: str, second: str) -> tuple[Any, Any]:
    """The two functions that a check asks for."""
    if type(answer) is not tuple or len(answer) != 2:
        raise TypeError(f"give the check both functions: {first} and {second}")
    return answer


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


def _capacity_evidence(answer: Any, seed: int) -> Evidence:
    bandwidth, visible = _pair(answer, "bandwidth", "visible")
    rng = random.Random(f"1.1 sizes {seed}")
    sizes = [85_198_045_184, *(rng.randrange(4 * GIB, 300 * GIB) for _ in range(3))]
    return {
        "bandwidth": [{"args": [b, r], **call(bandwidth, b, r)} for b, r in _chips(seed)],
        "visible": [{"args": [n], **call(visible, n)} for n in sizes],
    }


def _capacity_score(evidence: Evidence) -> Score:
    tally = Tally()
    chips = evidence["bandwidth"]
    wrong = [c for c in chips if not close(_value(c), c["args"][0] * c["args"][1] / 8)]
    text = ""
    if wrong:
        bits, rate = wrong[0]["args"]
        text = f"bandwidth({bits}, {rate}) isn't {bits * rate / 8:,.0f} GB/s" + _stopped(wrong)
        if close(_value(wrong[0]), bits * rate):
            text = "bandwidth: that is gigabits per second; the bus is counted in bits, the answer in bytes"
        elif close(_value(wrong[0]), bits * rate / 8 / 1.024**3) or close(
            _value(wrong[0]), bits * rate / 8.192
        ):
            text = "bandwidth: a vendor's GB is 10^9 bytes; don't divide by powers of 1024"
        elif "error" not in wrong[0]:
            text += (
                f" but you return {_value(wrong[0])!r}: every pin carries `gbps_per_pin` gigabits per second"
            )
    tally.award(1, not wrong, text)

    pairs = [(c["args"][0], _value(c)) for c in evidence["visible"]]
    shaped = all(isinstance(v, list) and len(v) == 2 for _, v in pairs)
    if not shaped:
        return Score(
            tally.points,
            (*tally.messages, "visible returns two numbers: (GB, GiB)" + _stopped(evidence["visible"])),
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


def _links_evidence(answer: Any, seed: int) -> Evidence:
    transfer_time, path = _pair(answer, "transfer_time", "path")
    rng = random.Random(f"1.2 bytes {seed}")
    times, paths = [], []
    for links in _machines(seed):
        for link in links:
            n = rng.choice([80, 140, 7]) * GB + rng.randrange(GB)
            times.append({"bytes": n, "link": link, **call(transfer_time, n, _copy(link))})
        for ends in (("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu"), ("cpu", "nvme")):
            paths.append(
                {"ends": list(ends), "links": links, **call(path, *ends, [_copy(row) for row in links])}
            )
    return {"times": times, "paths": paths}


def _copy(link: Link) -> Link:
    return {**link, "connects": tuple(link["connects"])}  # the answer may not change what the score reads


def _links_score(evidence: Evidence) -> Score:
    tally = Tally()
    times, paths = evidence["times"], evidence["paths"]

    def right(case: Evidence) -> bool:
        return close(_value(case), case["bytes"] / GB / one_direction(case["link"]))

    plain = [c for c in times if not c["link"]["both_directions"]]
    summed = [c for c in times if c["link"]["both_directions"]]
    plain_right, summed_right = all(map(right, plain)), all(map(right, summed))
    bad = next((c for c in plain if not right(c)), plain[0])
    expected = bad["bytes"] / GB / one_direction(bad["link"])
    hint = f"transfer_time: {bad['bytes']:,} B over {bad['link']['name']} take {expected:.4g} s"
    if close(_value(bad), expected * 8):
        hint += "; gb_per_s counts bytes, not bits"
    elif close(_value(bad), expected * GB / GIB, 0.001):
        hint += "; a link's GB is 10^9 bytes"
    elif "error" not in bad:
        hint += f", not {_shown(_value(bad))}"
    tally.award(0.5, plain_right, hint + _stopped(plain))
    tally.award(
        0.5,
        summed_right and plain_right,
        "transfer_time: a row with both_directions sums two directions; your bytes travel in one of them"
        if plain_right
        else "transfer_time: then treat the rows that sum both directions",
    )

    def found(case: Evidence) -> bool:
        return "error" not in case and _value(case) == fastest(case["ends"], case["links"])

    # An answer for a pair that nothing joins is checked together with the pairs that are joined.
    joined = [c for c in paths if fastest(c["ends"], c["links"]) is not None]
    x86 = [c for c in joined if any(row["name"] == "HBM2e" for row in c["links"])]
    others = [c for c in joined if c not in x86]
    on_x86, elsewhere = (next((c for c in some if not found(c)), None) for some in (x86, others))
    tally.award(0.5, on_x86 is None, _wrong_path(on_x86))
    if on_x86 is not None:
        return tally.score()  # the first mistake first
    nowhere = next((c for c in paths if not found(c)), None) if elsewhere is None else None
    hint = "path: where no link joins the two ends, return None" + _stopped(paths)
    tally.award(0.5, elsewhere is None and nowhere is None, _wrong_path(elsewhere) or hint)
    return tally.score()


def _wrong_path(case: Evidence | None) -> str:
    """What is wrong with one answer of `path`."""
    if case is None:
        return ""
    ends, names, value = case["ends"], [row["name"] for row in case["links"]], _value(case)
    text = f"path{tuple(ends)!r} among {', '.join(names)} is {fastest(ends, case['links'])!r}"
    if "error" in case:
        return text + _stopped([case])
    if isinstance(value, dict) and value.get("name") in names:
        return 'path: you return the whole row: return its name, row["name"]'
    if value is None:
        return text + ", and you found no link: the ends may come in either order"
    if value not in names:
        return text + f", not {_shown(value)}: return the link's name"
    chosen = next(row for row in case["links"] if row["name"] == value)
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


def _copy_evidence(answer: Any, seed: int) -> Evidence:
    rng = random.Random(f"1.3 sizes {seed}")
    runs = []
    for cache in (rng.choice([8, 12, 24]) * MIB, rng.choice([32, 36, 105]) * MIB):
        sizes = [cache // 8, cache * 2, cache * 4, cache * 8, cache * 16]
        rng.shuffle(sizes)
        bench = _Bench(rng.randrange(2**30), sizes)
        result = call(answer, list(sizes), cache, bench.copy, bench.clock)
        runs.append(
            {"sizes": sizes, "cache": cache, "spent": [[n, d] for n, d in bench.spent.items()], **result}
        )
    here = _here(answer)
    print(here)
    return {"runs": runs, "here": here}


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


def _copy_score(evidence: Evidence) -> Score:
    tally = Tally()
    runs = evidence["runs"]
    if any("error" in run for run in runs):
        return Score(0, ("copy_bandwidth" + _stopped(runs)[2:],))
    if not all(isinstance(_value(run), dict) and _value(run) for run in runs):
        return Score(0, ("copy_bandwidth returns a dict: {bytes: GB/s} for the sizes that count",))
    traffic = timed = best = enough = True
    unit_hint = ""
    for run in runs:
        spent = dict(run["spent"])
        for name, rate in _value(run).items():
            durations = spent[int(name)]
            unit = int(name) / GB
            if not durations:
                return Score(
                    0, (f"the size {name} was never copied: call copy(nbytes) between two clock() calls",)
                )
            ways = (min(durations), statistics.mean(durations), statistics.median(durations), durations[0],
                    durations[-1], statistics.mean(durations[1:] or durations), sum(durations))  # fmt: skip
            moved = [k * unit / t for t in ways for k in (1, 2)]
            scale = 1.0
            for size, word in ((GIB / GB, "GiB per second"), (1 / GB, "bytes per second")):
                if is_number(rate) and any(close(rate * size, value, 1e-6) for value in moved):
                    unit_hint, scale = f"traffic: that is in {word}: return GB, 10^9 bytes, per second", size
            value = rate * scale if is_number(rate) else rate
            traffic &= scale == 1 and any(close(value, right, 1e-6) for right in moved[1::2])
            timed &= any(close(value, right, 1e-6) for right in moved)
            best &= any(close(value, k * unit / min(durations), 1e-6) for k in (1, 2))
            enough &= len(durations) >= 3
    if not timed:
        return Score(
            0, ("copy_bandwidth: time copy(nbytes) by the clock() that you are given, and by nothing else",)
        )
    expected = [{n for n in run["sizes"] if n >= 4 * run["cache"]} for run in runs]
    kept = [{int(n) for n in _value(run)} for run in runs]
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
    sizes = "sizes: leave out what isn't at least 4 times the cache: such a copy measures the cache"
    if all(found == {n for n in found if n > 4 * run["cache"]} and found < right
           for found, right, run in zip(kept, expected, runs, strict=True)):  # fmt: skip
        sizes = "sizes: exactly 4 times the cache counts as well"
    tally.award(0.2, kept == expected, sizes)
    return tally.score()


# -- 1.4 Little's law --------------------------------------------------------------------------------------


def _flight(gb_per_s: float, cycles: float, ghz: float) -> float:
    return gb_per_s * cycles / ghz  # 1e9 B/s x 1e-9 s = B


def _flight_evidence(answer: Any, seed: int) -> Evidence:
    in_flight, threads = _pair(answer, "bytes_in_flight", "threads_per_sm")
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
    return {
        "bytes": [{"args": list(c[:3]), **call(in_flight, *c[:3])} for c in cards],
        "threads": [
            {"args": [*c, load], **call(threads, *c, load)} for c, load in zip(cards, loads, strict=True)
        ],
    }  # fmt: skip


def _flight_score(evidence: Evidence) -> Score:
    tally = Tally()
    wrong = [c for c in evidence["bytes"] if not close(_value(c), _flight(*c["args"]))]
    text = ""
    if wrong:
        rate, cycles, ghz = wrong[0]["args"]
        expected, got = _flight(rate, cycles, ghz), _value(wrong[0])
        text = f"bytes_in_flight({rate}, {cycles}, {ghz}) isn't {expected:,.0f} B" + _stopped(wrong)
        if close(got, rate * cycles * ghz):
            text = "bytes_in_flight: cycles x GHz is no time; a cycle lasts 1 / GHz nanoseconds"
        elif is_number(got) and got and math.isclose(abs(math.log10(expected / got)) % 3, 0, abs_tol=0.01):
            text = "bytes_in_flight: a power of 1000 is wrong: GB/s is 10^9 bytes per second, GHz 10^9 cycles"
        elif is_number(got):
            text += f" but you return {got:,.4g}: bandwidth x latency"
    tally.award(1, not wrong, text)

    def expected_threads(position: int) -> list[float]:
        """From the right bytes, and from the student's own: one mistake costs its points once."""
        *flow, sms, load = threads[position]["args"]
        own = _value(evidence["bytes"][position])
        flows = [_flight(*flow), own] if is_number(own) and own > 0 else [_flight(*flow)]
        return [flow / (sms * load) for flow in flows]

    threads = evidence["threads"]
    answers = [(_value(case), expected_threads(k)) for k, case in enumerate(threads)]
    rounded = all(is_number(n) and any(abs(n - m) <= 1 for m in wanted) for n, wanted in answers)
    exact = all(type(n) is int and n in map(math.ceil, wanted) for n, wanted in answers)
    near = tally.award(
        0.5,
        rounded,
        "threads_per_sm: divide the bytes in flight among the SMs, then by what one thread has on the way"
        + _stopped(threads),
    )
    if near:
        exactly = "threads_per_sm: return an int, rounded up: half a thread loads nothing"
        tally.award(0.5, exact, exactly)
    return tally.score()


# -- 1.5 the meter -----------------------------------------------------------------------------------------

Step = dict[str, Any]


class _Log:
    """Notes the meter's two numbers beside what they must be."""

    def __init__(self, meter: Any) -> None:
        self.meter, self.steps = meter, list[Step]()

    def note(self, what: str, live: int, peak: int, *, fault: str = "") -> None:
        """`fault` names the mistake that a wrong number points at here (a key of `_METER_HINTS`)."""
        from memlab.exercises import plain

        got = {"live": plain(self.meter.live_bytes), "peak": plain(self.meter.peak_bytes)}
        self.steps.append({"what": what, "live": live, "peak": peak, "got": got, "fault": fault})


def _allocations(make: Callable[[], Any], rng: random.Random) -> list[Step]:
    """Fresh tensors that come and go; the allocator hands the same address out again."""
    import weakref

    import torch

    a, b, c = (rng.randrange(2, 3000) * 4 for _ in range(3))
    with make() as meter:
        log = _Log(meter)
        x = torch.empty(a, dtype=torch.uint8)
        log.note(f"after x = torch.empty({a} bytes)", a, a)
        y = torch.zeros(b // 4)
        log.note(f"after y = torch.zeros({b} bytes)", a + b, a + b)
        gone = weakref.ref(x.untyped_storage())
        del x
        log.note("after del x", b, a + b)
        log.steps[-1]["freed"] = gone() is None
        z = torch.ones(c // 4)
        peak = max(a + b, b + c)
        log.note(f"after z = torch.ones({c} bytes)", b + c, peak, fault="key")
        del y, z
        for _ in range(5):
            w = torch.empty(a, dtype=torch.uint8)
            del w
        log.note(f"after 5 times w = torch.empty({a} bytes); del w", 0, peak, fault="key")
        values, indices = torch.full((b // 4, 2), 1.0).max(dim=1)
        held, peak = b + 2 * b, max(peak, 2 * b + b + 2 * b)
        log.note("after an operator with two results, values and indices", held, peak)
        del values, indices
    return log.steps


def _views(make: Callable[[], Any], rng: random.Random) -> list[Step]:
    """Several tensors, one storage."""
    import torch

    rows = rng.randrange(6, 60)
    size = rows * rows * 4
    with make() as meter:
        log = _Log(meter)
        x = torch.ones(rows, rows)
        flat, part, turned = x.view(-1), x[1:3], x.t()
        pieces = x.chunk(3)
        log.note("after x and four kinds of views of it", size, size)
        del x, flat, turned, pieces
        log.note("after del of all but a slice: a slice keeps the whole storage", size, size)
        grown = part.expand(2, 2, rows)
        log.note("after part.expand(...)", size, size)
        solid = grown.contiguous()
        log.note("after .contiguous() of it, a real copy", size + 4 * rows * 4, size + 4 * rows * 4)
        del part, grown
        log.note("after del of the last view", 4 * rows * 4, size + 4 * rows * 4)
        del solid
    return log.steps


def _in_place(make: Callable[[], Any], rng: random.Random) -> list[Step]:
    """In-place operators, `out=`, and tensors that are older than the meter."""
    import torch

    n = rng.randrange(10, 3000)
    size = 4 * n
    old, target = torch.ones(n), torch.empty(n)
    with make() as meter:
        log = _Log(meter)
        new = torch.zeros(n)
        new.add_(old).mul_(2)
        log.note("after new = torch.zeros(...); new.add_(old).mul_(2)", size, size)
        old.mul_(3)
        seen = old.view(1, -1)
        log.note("after old.mul_(3) and a view of old, which was there before the meter", size, size)
        torch.add(old, new, out=target)
        log.note("after torch.add(old, new, out=target), target there before the meter", size, size)
        both = old + seen[0]
        log.note("after both = old + seen[0]", 2 * size, 2 * size)
        del both, seen
        log.note("after del both", size, 2 * size)
        del new
    return log.steps


def _training(make: Callable[[], Any], rng: random.Random) -> list[Step]:
    """A forward and a backward of Linear+ReLU layers without bias: every live byte is known."""
    import torch

    depth, width, batch = rng.randrange(2, 6), 8 * rng.randrange(4, 12), 4 * rng.randrange(2, 16)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(depth)]
    x = torch.ones(batch, width)
    act, weight = 4 * batch * width, 4 * width * width
    with make() as meter:
        log = _Log(meter)
        for layer in layers:
            x = torch.relu(layer(x))
        forward = (depth + 1) * act
        log.note(f"after {depth} x Linear({width}, {width}) + ReLU, batch {batch}", depth * act, forward)
        loss = x.sum()
        del x
        loss.backward()  # type: ignore[no-untyped-call]
        last = {"live": meter.live_bytes, "peak": meter.peak_bytes}
    log.note("after backward(): the gradients and the loss are left", depth * weight + 4, last["peak"])
    # The peak of a backward depends on the order in which autograd frees; its bounds don't.
    low = max(forward, depth * weight + 4)
    log.steps[-1].update(peak_low=low, peak_high=forward + depth * weight + 3 * act + weight + 64)
    return log.steps


def _leaving(make: Callable[[], Any], rng: random.Random) -> list[Step]:
    """Nothing is kept alive, nothing is counted after the end, what dies later is still counted off."""
    import weakref

    import torch

    n = 4 * rng.randrange(10, 3000)
    with make() as meter:
        log = _Log(meter)
        kept = torch.empty(n, dtype=torch.uint8)
        dead = torch.empty(2 * n, dtype=torch.uint8)
        gone = weakref.ref(dead)
        del dead
        gc.collect()
        freed = gone() is None
    log.note("after the end of the with block, one tensor alive", n, 3 * n)
    other = torch.empty(7 * n, dtype=torch.uint8)
    log.note("after torch.empty(...) outside the block: not counted", n, 3 * n)
    del other, kept
    gc.collect()
    log.note("after del of the last tensor, outside the block", 0, 3 * n)
    log.steps[-1]["freed"] = freed
    with make() as again:
        log.meter = again
        second = torch.empty(n, dtype=torch.uint8)
        log.note("in a second meter: it starts at 0", n, n)
        del second
    return log.steps


_SCRIPTS: tuple[tuple[str, Callable[[Callable[[], Any], random.Random], list[Step]], float], ...] = (
    ("allocate and free", _allocations, 0.75),
    ("views and shared storage", _views, 0.75),
    ("in place", _in_place, 0.5),
    ("a forward and a backward", _training, 0.5),
    ("leaving the block", _leaving, 0.5),
)


def _meter_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        return {name: call(run, answer, random.Random(f"1.5 {name} {seed}")) for name, run, _ in _SCRIPTS}

    return contained(work)


def _step_fault(step: Step) -> str:
    """What is wrong with one noted step, or ''."""
    live, peak = step["got"]["live"], step["got"]["peak"]
    if type(live) is not int or type(peak) is not int:
        return f"live_bytes and peak_bytes must be ints, not {type(live).__name__} and {type(peak).__name__}"
    if live != step["live"]:
        return f"{step['what']}: live_bytes is {live:,}, should be {step['live']:,}"
    if "peak_low" in step:
        right = step["peak_low"] <= peak <= step["peak_high"]
        return (
            ""
            if right
            else f"{step['what']}: a peak of {peak:,} bytes can't be, nor can one below {step['peak_low']:,}"
        )
    return (
        "" if peak == step["peak"] else f"{step['what']}: peak_bytes is {peak:,}, should be {step['peak']:,}"
    )


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


def _meter_score(evidence: Evidence) -> Score:
    errors = {evidence[name].get("error") for name, _, _ in _SCRIPTS}
    if len(errors) == 1 and None not in errors:
        return Score(0, (f"your meter stopped with {errors.pop()}",))
    tally = Tally()
    ran = [evidence[name] for name, _, _ in _SCRIPTS if "error" not in evidence[name]]
    holds = any(step.get("freed") is False for case in ran for step in _value(case))
    forgets = False
    for name, _, points in _SCRIPTS:
        case = evidence[name]
        if "error" in case:
            tally.award(points, False, f"{name}: it stopped with {case['error']}")
            continue
        steps = _value(case)
        first = next((step for step in steps if _step_fault(step)), Step())
        fault = _step_fault(first) if first else ""
        if not fault and any(step.get("freed") is False for step in steps):
            fault = "a deleted tensor stayed alive"
        key = first.get("fault") or (name if not forgets else "key")
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
