"""The checks of chapter 7: the solution earns all, the untouched version nothing, wrong answers less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from memlab import widgets
from memlab.exercises import collect, exercises, faq, rate, wide
from memlab.models import model
from tests.exercises import mutant, of_mutant, score, solution
from tests.exercises.mutants_7 import CHAPTER, MUTANTS

IDS = list(exercises(7))
WRONG = [(exercise, name) for exercise, names in MUTANTS.items() for name in names]


@pytest.mark.parametrize(
    ("exercise", "name", "words"),
    [
        ("7.1", "the article's one more each time", "then halve the gap"),
        ("7.1", "doubling alone", "a power of two"),
        ("7.1", "always at least one", "the answer is 0"),
        ("7.1", "no margin", "leave the margin free"),
        ("7.1", "rounded up", "round down"),
        ("7.1", "the limit forgotten", "more than the limit"),
        ("7.1", "every error is lack of memory", "catch torch.OutOfMemoryError alone"),
        ("7.1", "the errors kept", "holds its traceback"),
        ("7.1", "the search goes on inside except", "holds its traceback"),
        ("7.2", "batch norm stays", "5 of 6 hold"),
        ("7.2", "only torch seeded", "Python's random"),
        ("7.2", "no checkpoint", "twice under checkpoint"),
        ("7.2", "buffers before the backward", "after the backward"),
        ("7.3", "two all-reduces a layer", "there are four, two"),
        ("7.3", "gathered once", "once more"),
        ("7.3", "the article's two matrices", "12 h^2"),
        ("7.3", "the whole tensor sent", "(N-1)/N"),
        ("7.3", "pipeline times layers", "not times layers"),
        ("7.3", "elements", "times size"),
        ("7.3", "floats", "whole numbers"),
        ("7.4", "the article's code", "a score matrix has"),
        ("7.4", "the layout ignored", "attention over the heads"),
        ("7.4", "the mask upside down", "True means 'take part'"),
        ("7.4", "never causal", "pass is_causal"),
        ("7.4", "dropout in evaluation", "doesn't know model.eval()"),
        ("7.5", "the article's num_workers alone", "persistent_workers"),
        ("7.5", "no workers", "0 processes beside your own"),
        ("7.5", "collate_fn forgotten", "its collate_fn"),
        ("7.5", "drop_last forgotten", "keep drop_last"),
        ("7.6", "foreach forgotten", "one more tensor for each parameter"),
        ("7.6", "no scores", "scores a block"),
        ("7.6", "no logits", "their log-softmax"),
        ("7.6", "elements", "4 bytes"),
        ("7.6", "it runs the model", "predict, don't run it"),
    ],
)
def test_the_message_names_the_mistake(exercise: str, name: str, words: str) -> None:
    got = of_mutant(CHAPTER, exercise, name)[1]
    assert any(words in line for line in got.messages), got.messages


_EQUAL = "all(map(torch.equal, plain[part], again[part]))"

#: Exercise -> what is wrong -> edits: slips that one draw alone would not tell from a right answer.
SLIPS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "7.2": {
        "the input's gradient alone": [
            ("[x_in.grad, *(p.grad for p in module.parameters())]", "[x_in.grad]")
        ],
        "the parameters' gradients alone": [
            ("[x_in.grad, *(p.grad for p in module.parameters())]", "[p.grad for p in module.parameters()]")
        ],
        "the first parameter's": [
            ("*(p.grad for p in module.parameters())", "next(iter(module.parameters())).grad")
        ],
        "nearly equal": [("map(torch.equal,", "map(torch.allclose,")],
        "one is equal": [(_EQUAL, _EQUAL.replace("all(", "any(", 1) + " or not plain[part]")],
        "outputs always are": [(_EQUAL, f"{_EQUAL} or part == 'output'")],
        "buffers always are": [(_EQUAL, f"{_EQUAL} or part == 'buffers'")],
    },
}


@pytest.mark.parametrize("seed", [0, 1, 2, 20_261_130])
@pytest.mark.parametrize(("exercise", "slip"), [(e, s) for e, slips in SLIPS.items() for s in slips])
def test_no_draw_takes_a_slip_for_right(exercise: str, slip: str, seed: int) -> None:
    got = score(CHAPTER, exercise, mutant(CHAPTER, exercise, SLIPS[exercise][slip]), seed)
    assert got.points < exercises(7)[exercise].points and got.messages and not got.doubt


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("wrong", "points"),
    [
        ("the mask upside down", 1),
        ("no padding", 1),
        ("dropout in evaluation", 1),
        ("never dropout", 1.75),
        ("the article's code", 1.25),
    ],
)
def test_few_bytes_are_worth_nothing_where_the_values_are_wrong(wrong: str, points: float, seed: int) -> None:
    assert score(CHAPTER, "7.4", mutant(CHAPTER, "7.4", MUTANTS["7.4"][wrong]), seed).points == points


@pytest.mark.parametrize("answer", [True, None, "4", math.nan, [1], {}])
def test_only_plain_numbers_count(answer: object) -> None:
    for name in ("7.1", "7.6"):
        assert rate(exercises(7)[name], collect(exercises(7)[name], lambda *_, **__: answer, 0)).points == 0
    pair = (lambda *_: answer, lambda *_: answer)
    assert rate(exercises(7)["7.3"], collect(exercises(7)["7.3"], pair, 0)).points == 0


@pytest.mark.parametrize("exercise", ["7.2", "7.3"])
def test_one_of_two_answers_written(exercise: str) -> None:
    def unwritten(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"exercise {exercise}")

    names: dict[str, Any] = {}
    exec(compile(solution(CHAPTER, exercise), "<student>", "exec"), names)
    first, second = ("predictions", "unchanged") if exercise == "7.2" else ("comm", "break_even")
    known = exercises(7)[exercise]
    one = rate(known, collect(known, (names[first], unwritten), 0))
    two = rate(known, collect(known, (unwritten, names[second]), 0))
    assert one.points + two.points == known.points and one.points and two.points
    assert any("not written yet" in line for line in (*one.messages, *two.messages))
    assert "not written yet" in rate(known, collect(known, (unwritten, unwritten), 0)).messages[0]


def test_warnings_of_an_answer_cost_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    source = solution(CHAPTER, "7.4").replace(
        "    out = F.",
        '    import sys, warnings\n    warnings.warn("slow")\n    print("x", file=sys.stderr)\n    out = F.',
    )
    assert score(CHAPTER, "7.4", source, 1).points == 2
    capsys.readouterr()


# -- other right answers, and twins that must fail ----------------------------------------------------------


def recursive(step: Any, margin: float = 0.125, limit: int = 4096) -> int:
    """Another search: bisection by powers of two, the margin taken from the end."""

    def fits(b: int) -> bool:
        try:
            step(b)
        except torch.OutOfMemoryError:
            return False
        return True

    largest, jump = 0, 1
    while jump <= limit and fits(jump):
        largest, jump = jump, jump * 2
    jump //= 4
    while jump:
        if largest + jump <= limit and fits(largest + jump):
            largest += jump
        jump //= 2
    return max(int(largest * (1 - margin)), min(largest, 1))


@pytest.mark.parametrize("seed", range(4))
def test_another_search_is_right_too(seed: int) -> None:
    exercise = exercises(7)["7.1"]
    assert rate(exercise, collect(exercise, recursive, seed), seed) == (2, (), "")


def test_a_step_that_fails_leaves_nothing_behind_unless_its_error_is_kept() -> None:
    real = faq._Real(3)
    best = real.truth()
    for b, fits in ((best, True), (best + 1, False)):
        kept: list[Exception] = []
        try:
            with faq_meter(real):
                real.step(b)
        except torch.OutOfMemoryError as error:
            kept.append(error)
        assert (not kept) is fits
        real.step(1)
        assert (real.held > 0) is not fits


def faq_meter(real: Any) -> Any:
    from memlab.meter import Meter

    return Meter(real.model, budget=real.budget)


def test_the_six_predictions_are_what_torch_does() -> None:
    names: dict[str, Any] = {}
    exec(compile(solution(CHAPTER, "7.2"), "<student>", "exec"), names)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    found = {
        name: tuple(names["unchanged"](make, x, **o).values()) for name, (make, o) in faq.modules().items()
    }
    assert found == faq._STAYS
    assert names["predictions"]() == {name: all(parts) for name, parts in found.items()}


def test_traffic_is_what_the_ranks_send() -> None:
    tokens, h, n = 6, 8, 4

    def tensor_parallel(comm: wide.Comm) -> int:
        x = torch.ones(tokens, h, requires_grad=True)
        for _ in range(2):  # attention, MLP: one sum forward, one backward each
            x = comm.sum(comm.copy(x) * 2)
        x.sum().backward()  # type: ignore[no-untyped-call]
        return sum(comm.sent.values())

    def zero3(comm: wide.Comm) -> int:
        piece = torch.ones(12 * h * h // n)
        for _ in range(2):
            comm.all_gather(piece)
        comm.reduce_scatter(torch.ones(12 * h * h))
        return sum(comm.sent.values())

    assert set(wide.run_ranks(tensor_parallel, n)) == {faq.sent_expected("tp", tokens, h, n, 1, 4)}
    assert set(wide.run_ranks(zero3, n)) == {faq.sent_expected("zero3", tokens, h, n, 1, 4)}
    even = 36 * h // 8
    assert faq.sent_expected("tp", even, h, n, 3, 2) == faq.sent_expected("zero3", even, h, n, 3, 2)


def eager(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: str, padding: Any, dropout: float, training: bool
) -> Tensor:
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], -math.inf)
    out = F.dropout(scores.softmax(-1), dropout, training) @ v
    return out.transpose(1, 2) if layout == "bshd" else out


@pytest.mark.parametrize("seed", range(3))
def test_eager_attention_exceeds_the_bound_and_sdpa_stays_well_below(seed: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(solution(CHAPTER, "7.4"), "<student>", "exec"), names)
    for case in faq._long_attends(seed):
        assert faq._attend_peak(eager, case, seed)["peak"] > 2 * faq.attend_bound(case)
        assert faq._attend_peak(names["attend"], case, seed)["peak"] < 0.9 * faq.attend_bound(case)
    got = rate(exercises(7)["7.4"], collect(exercises(7)["7.4"], eager, seed), seed)
    assert got.points == 1.25


def by_hand(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """Each thing passed on by itself."""
    return DataLoader(
        loader.dataset, batch_size=loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last,
        collate_fn=loader.collate_fn, num_workers=workers, persistent_workers=True, prefetch_factor=4,
    )  # fmt: skip


def test_a_loader_put_together_by_hand_is_right_too() -> None:
    exercise = exercises(7)["7.5"]
    assert rate(exercise, collect(exercise, by_hand, 2), 2) == (1, (), "")


def test_a_shuffled_order_is_the_same_in_the_first_epoch_alone() -> None:
    """What the exercise promises: an order that is drawn stays a shuffle, not the same from epoch 2 on."""
    names: dict[str, Any] = {}
    exec(compile(solution(CHAPTER, "7.5"), "<student>", "exec"), names)

    def epochs(fast: bool) -> list[list[int]]:
        torch.manual_seed(0)
        loader: Any = DataLoader(faq.Slow(40), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        loader = names["faster"](loader, 2) if fast else loader
        return [[int(i) for batch in loader for i in batch[0]] for _ in range(2)]

    slow, fast = epochs(False), epochs(True)
    assert slow[0] == fast[0] and slow[1] != fast[1]
    assert all(sorted(epoch) == list(range(40)) for epoch in (*slow, *fast))


def test_a_loader_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faq, "LOADER_SECONDS", 1.0)

    def endless(loader: DataLoader[Any], workers: int) -> Any:
        while True:
            pass

    got = rate(exercises(7)["7.5"], collect(exercises(7)["7.5"], endless, 0))
    assert got.points == 0 and "no result within 1 s" in got.messages[0]


@pytest.mark.parametrize("seed", range(4))
def test_the_closed_form_of_the_capstone_is_within_five_percent(seed: int) -> None:
    for name, spec in faq._specs(seed).items():
        trace = faq.probe_trace(spec)
        assert abs(faq.probe_expected(spec) / trace.peak_bytes - 1) < 0.02, spec
        assert trace.peak_phase == ("optimizer" if name == "states" else "backward")


def test_a_measured_peak_that_no_model_has_earns_nothing() -> None:
    exercise = exercises(7)["7.6"]
    specs = faq._specs(0)
    forged = {"measured": [1000] * len(specs), "said": [{"value": {"said": 1000, "ran": 0}}] * len(specs)}
    assert rate(exercise, forged) == (
        0,
        ("this isn't what the check hands over",),
        "foreign: that isn't the peak of the model",
    )


# -- the explorer ----------------------------------------------------------------------------------------


def test_the_explorer_counts_as_the_exercise_does() -> None:
    explorer = widgets.traffic("llama2-70b", ranks=8)
    config = model("llama2-70b")
    sent = widgets._sent(config, 4096, 8)  # type: ignore[arg-type]
    assert sent["tensor parallel"] == faq.sent_expected("tp", 4096, 8192, 8, 80, 2)
    assert sent["pipeline"] == faq.sent_expected("pp", 4096, 8192, 8, 80, 2)
    assert sent["ZeRO-3"] == 3 * 2 * config.parameter_count * 7 // 8
    assert "tensor parallel sends" in explorer.twin.finding and "39,468 tokens" in explorer.twin.note
    # table, figure and link count in powers of ten
    assert [row[1] for row in explorer.twin.rows] == ["37.58 GB", "362.13 GB", "134.22 MB"]
    changed = explorer.show({**explorer.start, "micro_batch": 32}, explorer.start)
    assert "ZeRO-3 sends" in changed.finding and "1 → 32" in changed.note
    with pytest.raises(ValueError, match="no row of equal blocks"):
        widgets.traffic("resnet50")
    with pytest.raises(ValueError, match="at least 2"):
        widgets.traffic(ranks=1)
