"""The checks of chapter 6: the solution earns all, the untouched version nothing, wrong answers less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from memlab.exercises import collect, combined, exercises, rate
from memlab.footprint import footprint
from memlab.hardware import gpu
from memlab.recipe import Recipe
from memlab.units import GB
from tests.exercises import mutant, of_mutant, score, solution
from tests.exercises.mutants_6 import CHAPTER, MUTANTS

IDS = list(exercises(6))
WRONG = [(exercise, name) for exercise, names in MUTANTS.items() for name in names]


@pytest.mark.parametrize(
    ("exercise", "name", "words"),
    [
        ("6.1", "the article's bf16 halves all", "'bf16 halves'"),
        ("6.1", "stage 1 shards gradients", "this stage keeps it whole"),
        ("6.1", "one block gathered", "ahead of time"),
        ("6.1", "the recomputed block forgotten", "while it is recomputed"),
        ("6.1", "one head's scores", "for each head"),
        ("6.1", "logits in 16 bit alone", "fp32 copies"),
        ("6.1", "the total without the logits", "sum of the six"),
        ("6.2", "a foreach step is free", "foreach makes one more tensor"),
        ("6.2", "phases added", "is gone in the step"),
        ("6.2", "tensor parallel's step is free", "also exists in fp32"),
        ("6.2", "no master weights", "list weight, gradient, master"),
        ("6.2", "frozen weights have gradients", "no gradient and no state"),
        ("6.2", "rest divided too", "is there on each card"),
        ("6.2", "marketed bytes and no context", "2 GB for the context"),
        ("6.3", "accumulation changes nothing", "From the second micro-batch on"),
        ("6.3", "gradients always there", "aren't there when the forward"),
        ("6.3", "foreach takes 16", "one more fp32 tensor"),
        ("6.3", "fused takes 20", "fused makes no tensor"),
        ("6.3", "activations in the step", "no activation is left"),
        ("6.3", "always the backward", "it is the larger one"),
        ("6.4", "parts not divided", "divide each part's mean loss"),
        ("6.4", "the first part alone", "does every row"),
        ("6.4", "no checkpoints", "checkpointing really on"),
        ("6.4", "eager for sdpa", "sdpa really on"),
        ("6.4", "never bf16", "is autocast on"),
        ("6.4", "one backward for all parts", "parts really on"),
        ("6.4", "predict: no scores", "rank correlation"),
        ("6.5", "one scale for all", "each block of 256"),
        ("6.5", "evenly spaced squares", "came back as 0"),
        ("6.5", "signed values as if positive", "the other sign"),
        ("6.5", "codes of 16 bits", "dtype of the codes"),
        ("6.5", "a slice of padded codes", ".clone() it"),
        ("6.5", "the moments also in fp32", "kept in fp32"),
        ("6.5", "no bias correction", "are both moments divided"),
        ("6.5", "all unpacked at once", "one parameter at a time"),
        ("6.6", "no budget", "traced, your recipe has"),
        ("6.6", "no room left", "leave room"),
        ("6.6", "always checkpoints", "sort by seconds"),
        ("6.6", "never on the host", "you found none"),
        ("6.6", "recomputation is free", "a second time"),
        ("6.6", "the article: a smaller batch in its place", "the batch has"),
    ],
)
def test_the_message_names_the_mistake(exercise: str, name: str, words: str) -> None:
    got = of_mutant(CHAPTER, exercise, name)[1]
    assert any(words in line for line in got.messages), got.messages


#: Exercise -> what is wrong -> edits: slips that one draw alone would not tell from a right answer.
SLIPS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "6.2": {
        "no context": [("card + 2 * 10**9 <= capacity", "card <= capacity")],
        "2 GiB of context": [("card + 2 * 10**9", "card + 2**31")],
        "always this card": [("+ 2 * 10**9 <= capacity", "+ 2 * 10**9 <= 85 * 10**9")],
        "adapters need nothing": [("2 * P + (2 + moments) * way.adapters", "2 * P")],
        "adapters without weights": [("2 * P + (2 + moments)", "2 * P + moments")],
        "adapters without moments": [("2 * P + (2 + moments)", "2 * P + 2")],
        "adapters in fp32": [("2 * P + (2 + moments)", "2 * P + (4 + 4 + 8)")],
        "foreach tensors always in bf16": [("moments // 2 * P", "2 * P")],
        "all masters have moments of 8 bytes": [("host = (master + moments) * P", "host = 12 * P")],
        "gradients of 2 bytes beside the host": [("states = (2 + gradients) * P", "states = 4 * P")],
        "tensor parallel casts without masters too": [('"tensor" and master', '"tensor"')],
    },
    "6.5": {
        "eps inside the root": [(".sqrt_().add_(self.eps)", ".add_(self.eps).sqrt_()")],
        "a step for each parameter": [
            ("        self.t += 1\n", ""),
            ("            g = p.grad.flatten", "            self.t += 1\n            g = p.grad.flatten"),
        ],
    },
}


@pytest.mark.parametrize("seed", [0, 1, 2, 20_261_130])
@pytest.mark.parametrize(("exercise", "slip"), [(e, s) for e, slips in SLIPS.items() for s in slips])
def test_no_draw_takes_a_slip_for_right(exercise: str, slip: str, seed: int) -> None:
    got = score(CHAPTER, exercise, mutant(CHAPTER, exercise, SLIPS[exercise][slip]), seed)
    assert got.points < exercises(6)[exercise].points and got.messages and not got.doubt


@pytest.mark.parametrize("seed", range(20))
def test_one_byte_more_or_less_is_no_fault_of_6_2(seed: int) -> None:
    """Whole bytes, rounded either way, are as right as fractions, however close the card."""
    for rounded in ("math.ceil(card)", "int(card)", "-(-int(card) // 1024) * 1024"):
        source = solution(CHAPTER, "6.2").replace("    return {", f"    card = {rounded}\n    return {{")
        assert score(CHAPTER, "6.2", source, seed).points == 2


@pytest.mark.parametrize("answer", [True, None, "4", math.nan, [1], {}])
def test_only_numbers_count(answer: object) -> None:
    for name, keys in (("6.1", combined.ITEMS), ("6.3", ("backward", "optimizer", "phase"))):
        given = dict.fromkeys(keys, answer)
        assert rate(exercises(6)[name], collect(exercises(6)[name], lambda *_, g=given: g, 0)).points == 0


def test_warnings_of_the_answer_do_no_harm() -> None:
    noisy = "import warnings\n" + solution(CHAPTER, "6.3").replace(
        "if parts > 1", 'warnings.warn("a note", stacklevel=1)\n    if parts > 1'
    )
    assert score(CHAPTER, "6.3", noisy).points == 2


def test_memlabs_own_optimizer_is_no_answer() -> None:
    borrowed = solution(CHAPTER, "6.5") + "\nfrom memlab.step import AdamW8bit as Adam8bit\n"
    got = score(CHAPTER, "6.5", borrowed)
    assert got.points == 0 and "memlab.step" in got.messages[0]


def test_memlabs_planner_is_no_answer() -> None:
    borrowed = solution(CHAPTER, "6.6") + "\ndef plan(*task):\n    import memlab.planner\n"
    assert score(CHAPTER, "6.6", borrowed).points == 1  # the cost model alone


# -- what is right by the library -----------------------------------------------------------------------


def test_the_budget_of_70b_is_an_upper_bound_of_its_trace() -> None:
    total = combined.budget_expected(*combined._plans(0)[0])["total"]
    traced = next(way.traced for way in combined.WAYS if way.name == "pure bf16, AdamW (fused)")
    assert traced < total < 1.08 * traced


def test_the_ways_are_those_of_the_benchmark() -> None:
    from benchmarks import sharded

    assert len(combined.WAYS) == len(sharded.WAYS)
    assert [way.given["cards"] for way in combined.WAYS] == [w.recipe["world_size"] for w in sharded.WAYS]


def test_one_way_traced_again_on_few_layers() -> None:
    """The stored figures are of 80 layers; eight say the same of what each layer adds."""
    from dataclasses import replace

    from memlab.sharded import trace_sharded

    model = combined.transformer("llama2-70b")
    recipe = Recipe(
        precision="bf16", optimizer_impl="fused", micro_batch=1, sequence=4096, checkpointing="full",
        world_size=8, zero_stage=3,
    )  # fmt: skip
    few = replace(model, layers=8)
    peak = trace_sharded(few, recipe, gpu="A100-80GB", limit=2**62).peak_bytes
    way = next(way for way in combined.WAYS if way.name == "pure bf16, AdamW (fused)")
    rest = peak - few.parameter_count  # 8 B on 8 cards
    assert abs(rest - way.rest) < 0.1 * GB


def test_the_rows_are_what_a_card_traces() -> None:
    """BERT-large at 200 tokens: 19.0, 14.8, 6.3 and 6.0 GB, and 6.7 in a foreach step (C6-18 to C6-21)."""
    large = combined.transformer("bert-large")
    seen = []
    for fields in combined.TABLE.values():
        recipe = Recipe(**fields, sequence=200, attention="eager", dropout=0.1)
        step = footprint(large, recipe, gpu("A100-80GB"))
        seen.append(round(max(step.phase_peaks()["forward"], step.phase_peaks()["backward"]) / GB, 1))
        assert round(step.phase_peaks()["optimizer"] / GB, 1) == 6.7
    assert seen == [19.0, 14.8, 6.3, 6.0]


def test_the_levers_reference_takes_less_with_each_lever() -> None:
    for shape in combined._shapes(1):
        found = [row["bytes"] for row in combined.measured_levers(combined.reference_step, shape, 1)]
        for i, levers in enumerate(combined.LEVERS):
            for key in combined._on(levers):
                without = found[combined._less(levers, key)]
                assert found[i] < 1.3 * without, (shape, levers, key)
        nothing = found[0]
        for one in ("parts", "checkpointing"):
            levers = {"amp": False, "parts": 1, "checkpointing": False, "sdpa": False}
            levers[one] = 4 if one == "parts" else True
            assert found[combined.LEVERS.index(levers)] < 0.7 * nothing


def test_the_two_shapes_rank_sdpa_differently() -> None:
    short, long = combined._shapes(1)
    saved = []
    for shape in (short, long):
        found = [row["bytes"] for row in combined.measured_levers(combined.reference_step, shape, 1)]
        saved.append(1 - found[1] / found[0])  # sdpa alone
    assert saved[1] > saved[0] + 0.15


def test_plain_adam_fails_the_bytes_of_6_5() -> None:
    def wrapped(parameters: Any, lr: float) -> Any:
        return torch.optim.Adam(parameters, lr=lr)

    row = combined.state_bytes(wrapped, 1)
    width = combined._width(1)
    assert 7.9 < row["kept"] / (4 * width**2 + 2 * width) < 8.1
    assert "2.1 are asked" in combined._state_fault({"value": row}, width)


def test_the_loss_of_6_5_tells_optimizers_apart() -> None:
    def sgd(parameters: Any, lr: float) -> Any:
        return torch.optim.SGD(parameters, lr=lr)

    assert combined._trained(sgd, 3) > 1.5 * combined._trained(torch.optim.Adam, 3)


def test_what_a_block_of_70b_keeps_is_the_footprints() -> None:
    from dataclasses import replace

    def kept(layers: int) -> int:
        few = replace(combined.transformer("llama2-70b"), layers=layers)
        step = footprint(few, Recipe(precision="bf16", micro_batch=1, sequence=4096))
        return step.consumer_peaks()["activations"]

    assert abs((kept(3) - kept(2)) / 4096 / combined.PER_TOKEN_70B - 1) < 1e-3


def test_spearman() -> None:
    assert combined.spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert combined.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert combined.spearman([1, 1, 1], [3, 2, 1]) == 0


def test_planner_tasks_ask_for_different_levers() -> None:
    for seed in range(3):
        best = {}
        for task in combined._tasks(seed):
            fitting = [
                r for r in combined.candidates(task.batch, task.sequence, task.cards)
                if footprint(task.model, r, task.card).peak_bytes <= (1 - combined.MARGIN) * task.budget
            ]  # fmt: skip
            key = lambda r, t=task: combined.step_seconds(t.model, r, t.card)  # noqa: E731
            best[task.name] = min(fitting, key=key) if fitting else None
        assert best["states too large"] and best["states too large"].offload
        long = best["not one text's activations fit"]
        assert long and long.checkpointing == "full"
        assert best["activations too large"] and not best["activations too large"].offload
        assert best["activations too large"].checkpointing == "none"
        assert best["states of four cards"] and best["states of four cards"].micro_batch > 1
        assert best["no recipe fits"] is None
