"""The checks of chapter 1: the solution earns all, the untouched version nothing, wrong answers less."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from memlab.exercises import collect, exercises, memory_basics, rate
from tests.exercises import evidence, mutant, score, solution
from tests.exercises.mutants_1 import CHAPTER, MUTANTS

IDS = list(exercises(1))
WRONG = [(exercise, name) for exercise, names in MUTANTS.items() for name in names]


@pytest.fixture(autouse=True)
def no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exercise 1.3 shows the student's function on this machine: seconds that no point depends on."""
    monkeypatch.setattr(memory_basics, "_here", lambda answer: "")


@pytest.mark.parametrize(
    ("exercise", "name", "points"),
    [
        ("1.1", "bits for bytes", 1),
        ("1.1", "GB for GiB", 1.5),
        ("1.1", "whole GB per second", 1),
        ("1.1", "the bandwidth rounded", 1),
        ("1.1", "the pair turned round", 1),
        ("1.2", "both directions summed", 1),
        ("1.2", "no link is an error", 1.5),
        ("1.3", "one direction", 0.6),
        ("1.3", "the mean", 0.6),
        ("1.3", "sizes in cache kept", 0.8),
        ("1.3", "GiB per second", 0.6),
        ("1.3", "the machine's clock", 0),
        ("1.4", "rounded down", 1.5),
        ("1.4", "one more than the whole part", 1.5),
        ("1.4", "the whole chip for one SM", 1),
        ("1.4", "GiB", 1),
        ("1.5", "counts nothing", 0),
        ("1.5", "counts what was there before", 2),
        ("1.5", "ends the process", 0),
        ("1.5", "exhausts memory", 0),
    ],
)
def test_what_is_right_in_a_wrong_answer_earns_its_part(exercise: str, name: str, points: float) -> None:
    assert score(CHAPTER, exercise, mutant(CHAPTER, exercise, MUTANTS[exercise][name])).points == points


def test_a_key_that_is_never_forgotten_is_told_the_fourth_trap() -> None:
    # where else an address comes back is the allocator's affair: other moments may fail too, and earlier
    found = score(CHAPTER, "1.5", mutant(CHAPTER, "1.5", MUTANTS["1.5"]["keys never forgotten"]))
    assert 0 < found.points <= 1.75
    assert any("the fourth trap" in message for message in found.messages)


@pytest.mark.parametrize(
    ("exercise", "name", "says"),
    [
        ("1.1", "whole GB per second", "don't round, and divide by / instead of //"),
        ("1.1", "the pair turned round", "you swapped the two"),
        ("1.1", "rounded", "GB is the right unit, but don't round"),
        ("1.1", "GB for GiB", "a GB is not a GiB"),
        ("1.4", "one more than the whole part", "what is whole already isn't rounded up"),
        ("1.2", "the row for the name", 'return its name, row["name"]'),
        ("1.2", "one order of the ends", "the ends may come in either order"),
        ("1.3", "exactly four times left out", "exactly 4 times the cache counts"),
        ("1.3", "sizes in cache kept", "isn't at least 4 times"),
        ("1.3", "GiB per second", "in GiB per second"),
        ("1.5", "a closure holds the storage", "not in a closure or lambda"),
        ("1.5", "holds every tensor", "something in your meter holds it"),
        ("1.5", "never counts off", "with minus, when it dies"),
    ],
)
def test_the_first_message_names_the_mistake(exercise: str, name: str, says: str) -> None:
    messages = score(CHAPTER, exercise, mutant(CHAPTER, exercise, MUTANTS[exercise][name])).messages
    assert says in messages[0]
    assert len(messages) == len(set(messages))
    assert not any("all three machines" in m or "{" in m for m in messages)  # a test's name, a cut dict


def test_a_meter_that_holds_storages_is_told_so_once() -> None:
    messages = score(CHAPTER, "1.5", mutant(CHAPTER, "1.5", MUTANTS["1.5"]["a closure holds the storage"]))
    assert not any("Hint" in m for m in messages.messages)


@pytest.mark.parametrize("exercise", ["1.1", "1.2", "1.3", "1.4"])
def test_another_seed_asks_for_something_else(exercise: str) -> None:
    first, second = (evidence(CHAPTER, exercise, solution(CHAPTER, exercise), seed) for seed in (0, 1))
    assert first != second


class Agreeable(float):
    """Claims to equal everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


@pytest.mark.parametrize("answer", [Agreeable(1), True, None, "2039", float("nan")])
def test_only_plain_numbers_count(answer: object) -> None:
    exercise = exercises(1)["1.1"]
    found = exercise.evidence((lambda *_: answer, lambda _: (answer, answer)), 0)
    assert rate(exercise, found).points == 0


@pytest.mark.parametrize("warm", [0, 1, 4])
def test_copies_that_are_not_timed_cost_no_points(warm: int) -> None:
    def copy_bandwidth(sizes: Any, cache: int, copy: Any, clock: Any) -> Any:
        def seconds(nbytes: int) -> float:
            start = clock()
            copy(nbytes)
            return float(clock() - start)

        rates = {}
        for nbytes in (n for n in sizes if n >= 4 * cache):
            for _ in range(warm):
                copy(nbytes)
            rates[nbytes] = 2 * nbytes / min(seconds(nbytes) for _ in range(5)) / 1e9
        return rates

    for seed in range(5):
        assert rate(exercises(1)["1.3"], collect(exercises(1)["1.3"], copy_bandwidth, seed), seed).points == 1


class Pair(NamedTuple):
    gb: float
    gib: float


@pytest.mark.parametrize("pair", [tuple, list, lambda two: Pair(*two), torch.tensor])
def test_a_pair_may_be_of_any_kind(pair: Any) -> None:
    def visible(nbytes: int) -> Any:
        kind = {"dtype": torch.float64} if pair is torch.tensor else {}
        return pair((nbytes / 10**9, nbytes / 2**30), **kind)

    exercise = exercises(1)["1.1"]
    found = exercise.evidence((lambda bits, rate: bits * rate / 8, visible), 3)
    assert rate(exercise, found, 3).points == 2


def test_one_function_where_two_are_asked_for() -> None:
    got = rate(exercises(1)["1.2"], collect(exercises(1)["1.2"], lambda *_: 1, 0))
    assert got.points == 0
    assert "transfer_time, path" in got.messages[0]


@pytest.mark.parametrize("name", ["one direction", "bytes per second", "sizes in cache kept"])
def test_this_machine_is_shown_and_never_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    names: dict[str, Any] = {}
    exec(mutant(CHAPTER, "1.3", MUTANTS["1.3"][name]), names)
    assert "no points depend on it" in memory_basics._here(names["copy_bandwidth"])


def _in_floats(gb: float, cycles: int, ghz: float, sms: int, load: int) -> set[float]:
    """What the likely ways to write bytes in flight / (SMs x bytes of a thread) give in floats."""
    rate, hertz = gb * 1e9, ghz * 1e9
    times = [
        cycles / hertz,
        cycles / ghz * 1e-9,
        cycles / ghz / 1e9,
        cycles * (1 / hertz),
        cycles * 1e-9 / ghz,
    ]
    flows = [gb * cycles / ghz, gb * (cycles / ghz), gb / ghz * cycles, rate * cycles / hertz]
    flows += [rate / hertz * cycles, rate * cycles / ghz / 1e9, rate * cycles / ghz * 1e-9]
    flows += [n for t in times for n in (rate * t, gb * t * 1e9)]
    return {n for f in flows for n in (f / (sms * load), f / sms / load, f / load / sms)}


def test_a_whole_number_of_threads_is_whole_in_every_order_of_the_operations() -> None:
    for row in memory_basics.WHOLE:
        (threads,) = _in_floats(*row)
        assert threads.is_integer()
