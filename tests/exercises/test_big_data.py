"""Chapter 5's checks: solutions earn everything, an empty cell nothing, each planted mistake loses points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memlab import models, nets
from memlab.exercises import big_data
from memlab.exercises.big_data import (
    EXERCISES,
    _lengths_5_1,
    _neighbours,
    _offloads_5_6,
    _schedules_5_4,
    block_law,
)
from memlab.meter import Meter
from memlab.recipe import Recipe
from memlab.techniques import precision
from memlab.techniques.offload import touches
from memlab.virtual import VirtualGPU, device
from tests import exercises as shared
from tests.exercises.mutants_5 import CHAPTER, MUTANTS

IDS = [exercise.id for exercise in EXERCISES]
SEEDS = (0, 20_261_130)
FUNCTIONS = {"5.1": 2, "5.2": 3, "5.3": 1, "5.4": 1, "5.5": 1, "5.6": 2}


def score(exercise: str, source: str, seed: int = 0) -> Any:
    prelude = "import math\nimport torch\n"
    return shared.score(CHAPTER, exercise, prelude + source, seed)


def mutant(exercise: str, mistake: str) -> str:
    return shared.mutant(CHAPTER, exercise, MUTANTS[exercise][mistake])


@pytest.mark.parametrize(
    ("exercise", "mistake", "points", "says"),
    [
        ("5.1", "swapped", 1, "A and B are swapped"),
        ("5.1", "GB", 1, "right size in GB"),
        ("5.1", "upside down", 1, "upside down"),
        ("5.1", "through the end points", 1, "take them all"),
        ("5.1", "divided by zero", 1.5, "math.inf"),
        ("5.2", "per cent", 1, "that is per cent"),
        ("5.2", "new by old", 1, "subtract 1"),
        ("5.2", "rounded up", 1.5, "round down"),
        ("5.2", "the states forgotten", 1.5, "subtract it first"),
        ("5.3", "the article's loop: no division", 0, "times too long: a sum of means"),
        ("5.3", "what is left at the end is dropped", 2, "a group too"),
        ("5.3", "never zeroed", 0, "zero the gradients at the start of each group"),
        ("5.3", "one backward at the end", 2, "backward after each micro-batch"),
        ("5.3", "divided once too often", 0, "divided once too often"),
        ("5.3", "by the epoch's total", 0, "not of all batches"),
        ("5.4", "nan passes", 1.5, "gradient of nan and changed the weights"),
        ("5.4", "unscaled twice", 2.5, "must not divide again"),
        ("5.4", "all gradients joined", 2.5, "nothing joined"),
        ("5.4", "a new gradient for each", 2.5, "12 of 12 gradients into new tensors"),
        ("5.4", "ready once", 0.5, "ready for the next step"),
        ("5.5", "plain bf16", 1, "all elements went the same way"),
        ("5.5", "half the noise", 1, "0 to 65535"),
        ("5.5", "in place", 0, "changed its input"),
        ("5.6", "the article's: a scaler for bf16 too", 2.5, "needs no scaler"),
        ("5.6", "the article's: torch.cuda.amp", 1, "torch.amp.autocast(device, dtype=dtype)"),
        ("5.6", "clipped before unscaling", 2.5, "unscale_(optimizer) comes before clipping"),
        ("5.6", "zeroed at the end", 2.5, "comes first in a step, not last"),
        ("5.6", "no update", 1.5, "scaler.update()"),
        ("5.6", "by bytes alone", 2.5, "the price of a byte is its touches"),
    ],
)
def test_a_message_names_the_likeliest_mistake(exercise: str, mistake: str, points: float, says: str) -> None:
    earned, messages, _ = score(exercise, mutant(exercise, mistake))
    assert earned == points
    assert any(says in message for message in messages), messages


_UNSCALED = """        self.overflow = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 / self.factor)
                    if not p.grad.isfinite().all():
                        self.overflow = True
"""

#: Exercise -> what is wrong -> edits: slips that one draw alone would not tell from a right answer.
SLIPS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "5.4": {
        "the last parameter wins": [
            (
                "if not p.grad.isfinite().all():\n                        self.overflow = True",
                "self.overflow = not p.grad.isfinite().all()",
            )
        ],
        "the first parameter alone is tested": [
            ("if not p.grad", "first = optimizer.param_groups[0]['params'][0]\n                    "
             "if p is first and not p.grad")
        ],
        "the first of each group is tested": [("if not p.grad", "if p is group['params'][0] and not p.grad")],
        "the first group alone": [("in optimizer.param_groups:", "in optimizer.param_groups[:1]:")],
        "the last group alone": [("in optimizer.param_groups:", "in optimizer.param_groups[-1:]:")],
        "every parameter has a gradient": [("if p.grad is not None:", "if True:")],
        "a negative inf passes": [
            ("not p.grad.isfinite().all()", "(p.grad.isnan() | (p.grad == math.inf)).any()")
        ],
        "only step looks for an overflow": [
            (_UNSCALED, "        self.overflow = False\n" + _UNSCALED[30:].replace(
                "                    if not p.grad.isfinite().all():\n"
                "                        self.overflow = True\n", "")),
            (
                "            self.unscale_(optimizer)\n",
                "            self.unscale_(optimizer)\n"
                "            every = [p.grad for g in optimizer.param_groups for p in g['params']]\n"
                "            self.overflow = not all(g.isfinite().all() for g in every if g is not None)\n",
            ),
        ],
    },
    "5.6": {
        "by touches a byte": [("(item[1][1], -item[1][0])", "item[1][1] / item[1][0]")],
        "by bytes moved": [("(item[1][1], -item[1][0])", "item[1][1] * item[1][0]")],
        "of equals the smaller": [("(item[1][1], -item[1][0])", "(item[1][1], item[1][0])")],
        "as they come": [("(item[1][1], -item[1][0])", "item[1][1]")],
        "the first group is clipped": [
            ("for group in optimizer.param_groups for p", "for group in optimizer.param_groups[:1] for p")
        ],
        "the last group is clipped": [
            ("for group in optimizer.param_groups for p", "for group in optimizer.param_groups[-1:] for p")
        ],
        "each group is clipped by itself": [
            (
                "torch.nn.utils.clip_grad_norm_(parameters, max_norm)",
                "[torch.nn.utils.clip_grad_norm_(g['params'], max_norm) for g in optimizer.param_groups]",
            )
        ],
        "each gradient is clipped by itself": [
            (
                "torch.nn.utils.clip_grad_norm_(parameters, max_norm)",
                "[torch.nn.utils.clip_grad_norm_([p], max_norm) for p in parameters]",
            )
        ],
        "a norm of 1": [("(parameters, max_norm)", "(parameters, 1.0)")],
    },
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2, 20_261_130])
@pytest.mark.parametrize(("exercise", "slip"), [(e, s) for e, slips in SLIPS.items() for s in slips])
def test_no_draw_takes_a_slip_for_right(exercise: str, slip: str, seed: int) -> None:
    full = next(e.points for e in EXERCISES if e.id == exercise)
    got = score(exercise, shared.mutant(CHAPTER, exercise, SLIPS[exercise][slip]), seed)
    assert got.points < full and got.messages and not got.doubt


@pytest.mark.parametrize("seed", range(40))
def test_the_scatter_tells_a_fit_from_a_line_through_two_points(seed: int) -> None:
    case = next(c for c in big_data._lengths_5_1(seed) if c.scatter)
    lengths = torch.tensor(case.lengths, dtype=torch.float64)
    saved = torch.tensor(case.measured(), dtype=torch.float64)
    assert max(abs(n / case.saved(s) - 1) for s, n in zip(case.lengths, case.measured(), strict=True)) < 0.15

    def fault(law: torch.Tensor) -> str:
        return big_data._fault_fit(case, {"value": law.tolist()})

    both = torch.stack([lengths, lengths**2], 1)
    assert not fault(torch.linalg.lstsq(both, saved[:, None]).solution[:, 0])
    assert not fault(torch.linalg.lstsq(both / lengths[:, None], (saved / lengths)[:, None]).solution[:, 0])
    ends = torch.stack([lengths.argmin(), lengths.argmax()])
    assert "take them all" in fault(torch.linalg.solve(both[ends], saved[ends]))


def test_int64_noise_is_told_by_its_shape() -> None:
    edits = [
        (", dtype=torch.int32, device=x.device)", ")"),
        ("torch.where(x.isfinite(), bits.view(torch.float32), x)", "bits.view(torch.float32)"),
    ]
    earned, messages, _ = score("5.5", shared.mutant(CHAPTER, "5.5", edits))
    assert earned == 0 and "dtype=torch.int32" in messages[0]


def test_only_the_students_own_calls_of_the_scaler_are_listed() -> None:
    edits = [("        scaler.unscale_(optimizer)\n", "")]  # torch's step calls it then
    earned, messages, _ = score("5.6", shared.mutant(CHAPTER, "5.6", edits))
    assert earned == 2.5 and any(m.endswith("your calls: scale, clip, step, update") for m in messages)


@pytest.mark.parametrize(
    ("exercise", "source"),
    [
        ("5.4", "from memlab.techniques.precision import LossScaler as Scaler"),
        ("5.4", "Scaler = lambda f, g, b, i: torch.amp.GradScaler('cpu', f, g, b, i)"),
        ("5.5", "from memlab.techniques.precision import stochastic_round"),
        (
            "5.3",
            "from memlab.techniques import accumulation\n"
            "def train(loss_of, count, batches, optimizer, every):\n"
            "    for group in accumulation.groups(batches, every):\n"
            "        accumulation.step(loss_of, group, optimizer, weights=[count(b) for b in group])\n",
        ),
    ],
)
def test_what_the_library_wrote_is_not_the_students(exercise: str, source: str) -> None:
    earned, messages, _ = score(exercise, source)
    assert earned == 0 and "write it yourself" in messages[0]


def test_doing_nothing_earns_nothing() -> None:
    assert score("5.3", "def train(*_):\n    pass\n").points == 0
    assert (
        score(
            "5.6", "amp_step = lambda loss_of, *_: loss_of().detach()\noffload_plan = lambda *_: None"
        ).points
        == 0
    )


# -- what the checks hold to be right agrees with torch and with the library ---------------------------------


@pytest.mark.parametrize("tokens", [64, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law_of_length_is_what_a_block_keeps(tokens: int, dtype: torch.dtype) -> None:
    h, a, b = 64, 2, 2
    config = replace(models.model("bert-large"), hidden=h, heads=a, kv_heads=a, head_dim=32, ffn=4 * h)
    with VirtualGPU("A100-80GB") as card:
        block = nets.BertBlock(config, Recipe(attention="eager", dropout=0.1)).to(device(), dtype)
        block(torch.randn(b, tokens, h, device=device(), dtype=dtype)).sum().backward()
    linear, quadratic = block_law(h, a, b, dtype.itemsize)
    kept = card.trace.consumer_peaks()["activations"]
    assert kept == pytest.approx(linear * tokens + quadratic * tokens**2, rel=0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_hidden_blocks_are_never_all_linear_or_all_quadratic(seed: int) -> None:
    for case in _lengths_5_1(seed)[:2]:
        assert max(case.lengths) / 20 < case.linear / case.quadratic < 20 * min(case.lengths)
        assert len(set(case.lengths)) == len(case.lengths)


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_factors_are_those_of_torch(seed: int) -> None:
    for schedule in _schedules_5_4(seed):
        scaler = torch.amp.GradScaler(
            "cpu", schedule.factor, schedule.growth, schedule.backoff, schedule.interval
        )
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        factors = []
        for kind in schedule.bad:
            optimizer.zero_grad()
            scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
            if kind:
                assert weight.grad is not None
                weight.grad[0] = float(kind)
            scaler.step(optimizer)
            scaler.update()
            factors.append(scaler.get_scale())
        assert factors == schedule.factors()
        assert {"inf", "nan"} <= set(schedule.bad)


def test_neighbours_are_those_of_bf16() -> None:
    for value in (1.2, -0.3, 3e-6, 70_000.0):
        x, low, high = _neighbours(value)
        assert low < x < high and x == float(torch.tensor(value))
        near = float(torch.tensor(value).bfloat16())
        assert near in (low, high)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dense_case_has_the_librarys_touches_and_the_known_order(seed: int) -> None:
    offloads = _offloads_5_6(seed)
    dense = offloads["dense"]
    accumulation = dense.tensors["gradients"][1] - 1
    assert {name: t for name, (_, t) in dense.tensors.items()} == {
        name: t for name, t in touches(accumulation).items() if name != "activations"
    }
    assert dense.expected() == ["optimizer_states", "gradients", "parameters"]
    assert offloads["enough"].expected() == ["optimizer_states"] and offloads["nothing"].expected() == []


def test_the_scaler_of_the_library_takes_no_more_than_the_check_allows() -> None:
    parameters = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(12)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with Meter(torch.nn.ParameterList(parameters), optimizer) as meter:
        before = meter.live_bytes
        precision.LossScaler().unscale_(optimizer)
    assert meter.trace.peak_bytes - before <= 4 * 64 * 64 * 4
