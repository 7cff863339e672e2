"""What holds for the exercises of every chapter: points, solutions, empty cells, planted mistakes, forgeries.

An answer is collected once for all tests that look at it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.exercises import Evidence, collect, exercises, memory_basics, rate
from tests.exercises import of_mutant, of_solution, score, untouched, wrong_answers

#: Chapter -> points of its exercises, and how many wrong answers at least and at most each is tested with.
CHAPTERS: dict[str, tuple[list[int], int, int]] = {
    "01_memory_basics": ([2, 2, 1, 2, 3], 3, 20),
    "02_four_consumers": ([3, 4, 4, 2, 2], 3, 20),
    "03_deep": ([2, 1, 2, 4, 3, 3], 3, 12),
    "04_wide": ([2, 2, 2, 5, 4, 5], 3, 10),
    "05_big_data": ([2, 2, 3, 3, 2, 3], 3, 12),
    "06_combined": ([2, 2, 2, 3, 3, 3], 3, 10),
    "07_faq": ([2, 2, 1, 2, 1, 2], 3, 10),
}
SEEDS = (0, 20_261_130)
EXERCISES = [(chapter, name) for chapter in CHAPTERS for name in exercises(int(chapter[:2]))]
WRONG = [(c, name, wrong) for c, name in EXERCISES for wrong in wrong_answers(c)[name]]
#: Chapters whose wrong answers are tried with both public seeds, for a mistake may be right by accident.
TWICE = ("01_memory_basics", "02_four_consumers", "05_big_data")
#: What is measured in these doesn't depend on the seed but for the numbers in the tensors.
ALIKE = {"3.3", "3.4", "3.6", "4.4", "4.5", "5.3", "5.4", "5.5", "5.6", "6.4", "6.5", "7.2", "7.4", "2.3"}


@pytest.fixture(autouse=True)
def no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exercise 1.3 shows the student's function on this machine: seconds that no point depends on."""
    monkeypatch.setattr(memory_basics, "_here", lambda answer: "")


def seeds(chapter: str) -> tuple[int, ...]:
    """With which wrong answers are tried."""
    return SEEDS if chapter in TWICE else (5,)


def known(chapter: str, name: str) -> Any:
    return exercises(int(chapter[:2]))[name]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_points_are_those_of_the_course(chapter: str) -> None:
    points, least, most = CHAPTERS[chapter]
    assert [exercise.points for exercise in exercises(int(chapter[:2])).values()] == points
    assert all(least <= len(wrong) <= most for wrong in wrong_answers(chapter).values())
    assert list(wrong_answers(chapter)) == list(exercises(int(chapter[:2])))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
def test_the_solution_earns_everything(chapter: str, name: str, seed: int) -> None:
    evidence, got = of_solution(chapter, name, seed)
    assert got == (known(chapter, name).points, (), "")
    assert json.loads(json.dumps(evidence, allow_nan=False)) == evidence, "evidence is plain data"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_checks_pass_in_any_order(chapter: str) -> None:
    order = [name for name in exercises(int(chapter[:2])) if name not in ("3.1", "6.6")]  # seconds each
    order *= 2
    random.Random(chapter).shuffle(order)
    for name in order[: len(order) // 2 + 2]:
        got = of_solution.__wrapped__(chapter, name, 7)[1]
        assert got == (known(chapter, name).points, (), ""), (name, order)


@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
def test_the_untouched_version_earns_nothing(chapter: str, name: str) -> None:
    got = score(chapter, name, untouched(chapter, name))
    assert got.points == 0
    assert "not written yet" in got.messages[0]


@pytest.mark.parametrize(("chapter", "name", "wrong"), WRONG)
def test_a_wrong_answer_earns_less_and_says_why(chapter: str, name: str, wrong: str) -> None:
    for seed in seeds(chapter):
        got = of_mutant(chapter, name, wrong, seed)[1]
        assert 0 <= got.points < known(chapter, name).points
        assert got.messages and all(len(line) > 20 for line in got.messages)
        assert not got.doubt


@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
@pytest.mark.parametrize("seed", [0, 7])
def test_nonsense_earns_nothing(chapter: str, name: str, seed: int) -> None:
    for value in (None, -1, float("nan"), "text", [1, 2], {"a": True}, {}, object()):
        for count in (1, 2, 3):
            answer: Any = lambda *_, value=value, **__: value  # noqa: E731
            found = collect(known(chapter, name), answer if count == 1 else (answer,) * count, seed)
            assert rate(known(chapter, name), found, seed).points == 0, value
    for found in (collect(known(chapter, name), "text", seed), {}, {"seed": seed}):
        assert rate(known(chapter, name), found, seed).points == 0


# -- forged evidence ---------------------------------------------------------------------------------------


Path = tuple[Any, ...]


def containers(data: Any, path: Path = ()) -> Iterator[Path]:
    """Every list and dict in evidence, but for those that are an answer themselves."""
    items = data.items() if type(data) is dict else enumerate(data) if type(data) is list else ()
    if (
        type(data) in (dict, list)
        and not (type(data) is list and path[-1:] == ("value",))
        and path[-1:] != ("recipe",)
    ):
        yield path
        for key, item in items:
            yield from containers(item, (*path, key))


def at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def damaged(evidence: Evidence, path: Path) -> Iterator[tuple[str, Evidence]]:
    """Copies in which one list or dict holds less, or more, or isn't there."""

    def copied() -> tuple[Any, Any]:
        new = copy.deepcopy(evidence)
        return new, at(new, path)

    new, part = copied()
    if part:
        part.clear()
        yield "emptied", new
    if type(part) is list:
        size = len(at(evidence, path))
        for keep in {1, size // 2, size - 1} & set(range(1, size)):
            new, part = copied()
            del part[keep:]
            yield f"cut to {keep}", new
        new, part = copied()
        if part and type(part[0]) is dict:
            part.extend(part)
            yield "doubled", new
    else:
        for key, item in at(evidence, path).items():
            if key == "value" or any(containers(item)):  # a number that is left out needn't matter
                new, part = copied()
                del part[key]
                yield f"without {key}", new
    if path:
        new, _ = copied()
        parent = at(new, path[:-1])
        parent[path[-1]] = None
        yield "None", new
        new, _ = copied()
        del at(new, path[:-1])[path[-1]]
        yield "left out", new


def spoiled(evidence: Evidence, path: Path) -> Evidence:
    """A copy in which every answer in this part stopped with an error."""

    def spoil(data: Any) -> Any:
        if type(data) is dict and "value" in data:
            return {**{k: v for k, v in data.items() if k != "value"}, "error": "TypeError: wrong"}
        if type(data) is dict:
            return {key: spoil(item) for key, item in data.items()}
        return [spoil(item) for item in data] if type(data) is list else data

    if not path:
        return dict(spoil(evidence))
    new = copy.deepcopy(evidence)
    at(new, path[:-1])[path[-1]] = spoil(at(evidence, path))
    return new


@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
def test_evidence_without_its_questions_earns_no_more_than_wrong_answers(chapter: str, name: str) -> None:
    for seed in SEEDS:
        evidence = of_solution(chapter, name, seed)[0]
        for path in containers(evidence):
            bad = spoiled(evidence, path)
            if bad == evidence:
                continue
            most = rate(known(chapter, name), bad, seed).points
            for how, forged in damaged(evidence, path):
                got = rate(known(chapter, name), forged, seed).points
                assert got <= most, (path, how)


@pytest.mark.parametrize(("chapter", "name", "wrong"), WRONG)
def test_no_gap_in_the_evidence_of_a_wrong_answer_earns_points(chapter: str, name: str, wrong: str) -> None:
    seed = seeds(chapter)[0]
    evidence, honest = of_mutant(chapter, name, wrong, seed)
    paths = list(containers(evidence))
    random.Random(wrong).shuffle(paths)
    for path in paths[:20]:
        for how, forged in damaged(evidence, path):
            got = rate(known(chapter, name), forged, seed).points
            assert got <= honest.points, (path, how)


@pytest.mark.parametrize(("chapter", "name"), EXERCISES)
def test_every_level_emptied_at_once_earns_nothing(chapter: str, name: str) -> None:
    evidence = of_solution(chapter, name, 0)[0]

    def emptied(data: Any, levels: int) -> Any:
        if type(data) in (dict, list) and not levels:
            return type(data)()
        if type(data) is dict:
            return {key: emptied(item, levels - 1) for key, item in data.items()}
        return [emptied(item, levels - 1) for item in data] if type(data) is list else data

    entries = [path for path in containers(evidence) if "value" in at(evidence, path)]
    for levels in range(1 + max(map(len, entries), default=0)):
        assert rate(known(chapter, name), emptied(evidence, levels), 0).points == 0, levels


@pytest.mark.parametrize(("chapter", "name"), [e for e in EXERCISES if e[1] not in ALIKE])
def test_the_answers_to_other_questions_are_wrong(chapter: str, name: str) -> None:
    evidence = of_solution(chapter, name, SEEDS[1])[0]
    assert rate(known(chapter, name), evidence, SEEDS[1]).points == known(chapter, name).points
    for claimed in (evidence, {**evidence, "seed": SEEDS[1]}, {**evidence, "questions": SEEDS[1]}):
        assert rate(known(chapter, name), claimed, SEEDS[0]).points < known(chapter, name).points


_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**255), 2**255), st.floats(), st.text(max_size=5),
    st.sampled_from(["nan", "inf", "-inf", "1e999", "2039.04"]), st.just([]), st.just({}), st.just([[]]),
    st.just({"value": None}), st.just({"type": "int"}),
)  # fmt: skip


@pytest.mark.parametrize(("chapter", "name"), [e for e in EXERCISES if e[1] != "6.6"])  # a second each
def test_no_evidence_stops_the_score(chapter: str, name: str) -> None:
    evidence = of_solution(chapter, name, 0)[0]
    paths = [(*path, key) for path in containers(evidence)
             for key in (at(evidence, path) if type(at(evidence, path)) is dict
                         else range(len(at(evidence, path))))]  # fmt: skip

    @settings(deadline=None)  # of a busy machine
    @given(st.lists(st.tuples(st.sampled_from(paths), _ODD), min_size=1, max_size=3))
    def run(changes: list[tuple[Path, Any]]) -> None:
        forged = copy.deepcopy(evidence)
        for path, value in changes:
            try:
                at(forged, path[:-1])[path[-1]] = value
            except (LookupError, TypeError):
                continue  # an earlier change took its place
        got = rate(known(chapter, name), forged, 0)
        assert 0 <= got.points <= known(chapter, name).points

    run()
