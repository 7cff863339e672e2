"""The checks of chapter 3: the solution earns all, the untouched version nothing, wrong answers less."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memlab import nets
from memlab.exercises import collect, deep, exercises, rate
from memlab.meter import Meter
from memlab.models import ConvConfig, model
from memlab.techniques.checkpointing import by_torch, recompute
from memlab.techniques.freezing import chain_units
from memlab.techniques.freezing import saved_bytes as saved
from tests.exercises import mutant, score
from tests.exercises.mutants_3 import CHAPTER, MUTANTS

IDS = list(exercises(3))
WRONG = [(exercise, name) for exercise, names in MUTANTS.items() for name in names]
SLOW = {"3.1"}  # ResNet-152 on the meta device takes two seconds each time


@pytest.mark.parametrize(
    ("exercise", "name", "points"),
    [
        ("3.1", "buffers counted with the activations", 0.5),
        ("3.1", "of a slice its numbers, not its storage", 0.5),
        ("3.1", "the hook returns t itself", 1.5),
        ("3.2", "the article's formula: g + dL/dF", 0),
        ("3.2", "the projection forgotten", 0.5),
        ("3.3", "the skip has no effect", 1.5),
        ("3.3", "a skip everywhere", 0),
        ("3.3", "Xavier with the default biases", 1),
        ("3.4", "the plain step", 0),
        ("3.4", "PyTorch's own", 0),
        ("3.4", "the course's own", 0),
        ("3.4", "the random state isn't restored", 3),
        ("3.4", "the generator is left behind", 3.5),
        ("3.4", "the graph of the first forward is kept", 0.5),
        ("3.4", "the second forward starts from x itself", 3.5),
        ("3.5", "the budget ignored", 2),
        ("3.5", "every block a segment", 0),
        ("3.6", "nothing checkpointed", 1),
        ("3.6", "the whole model in one segment", 2),
        ("3.6", "frozen layers keep nothing", 2),
    ],
)
def test_what_is_right_in_a_wrong_answer_earns_its_part(exercise: str, name: str, points: float) -> None:
    assert score(CHAPTER, exercise, mutant(CHAPTER, exercise, MUTANTS[exercise][name])).points == points


def test_one_function_where_two_are_asked_for() -> None:
    got = rate(exercises(3)["3.6"], collect(exercises(3)["3.6"], lambda *_: 1, 0))
    assert got.points == 0
    assert "run_repaired, saved_units" in got.messages[0]


# -- what the checks hold to be right ---


@pytest.mark.parametrize("name", ["resnet50", "resnet152"])
@settings(max_examples=2, deadline=None)
@given(batch=st.integers(2, 9), side=st.integers(1, 6))
def test_the_closed_form_of_a_resnet_is_what_autograd_saves(name: str, batch: int, side: int) -> None:
    config = model(name)
    assert isinstance(config, ConvConfig)
    net = nets.build(config, device="meta")
    images = torch.empty(batch, 3, 32 * side, 32 * side, device="meta")
    assert saved(lambda: net(images), net) == deep.resnet_saved_bytes(config.depths, batch, 32 * side)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_frozen_units_are_the_techniques_own(case: tuple[int, set[int]]) -> None:
    layers, trained = case
    assert deep.frozen_units(layers, trained) == chain_units(layers, trained)


@pytest.mark.parametrize("trained", [[0, 1], [1, 2], [3, 4], [0, 4]])
def test_frozen_units_are_what_a_chain_keeps_alive(trained: list[int]) -> None:
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)))
    for i, layer in enumerate(chain):
        layer.requires_grad_(i in trained)
    x = torch.randn(64, 8)
    assert saved(lambda: chain(x), chain) == deep.frozen_units(5, trained) * x.nbytes


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_uniform_segments_keep_to_the_budget(blocks: int, inside: int, extra: int) -> None:
    plan = deep.uniform_segments(blocks, 1, inside, extra)
    assert sum(plan) <= min(extra, blocks)
    assert all(length > 0 for length in plan)


def test_falling_segments_beat_equal_ones_and_earn_the_points() -> None:
    """Inputs of segments die as the backward passes: earlier segments may be longer (sqrt(2 N) in all)."""
    chain = deep._Chain(64, 0, 64)
    blocks = deep._blocks(chain)
    equal = deep._plan_peak(chain, blocks, deep.uniform_segments(64, 1, 1, 64))
    assert deep._plan_peak(chain, blocks, list(range(11, 1, -1))[:9]) < equal


# -- each check of bytes, and the twin that must fail it ---


@pytest.mark.parametrize("checkpoint", [by_torch, recompute])
def test_the_measured_bytes_tell_a_checkpoint_from_a_plain_step(checkpoint: object) -> None:
    segments = deep._segments(0.0, 0)
    x = torch.randn(deep._ROWS, deep._WIDTH)
    assert callable(checkpoint)

    def through(y: torch.Tensor) -> torch.Tensor:
        for segment in segments:
            y = checkpoint(segment, y)
        return y

    run, twin = deep._measured(segments, through, x), deep._measured(segments, nn.Sequential(*segments), x)
    unit = x.nbytes
    assert (run.kept, twin.kept) == ((deep._SEGMENTS + 1) * unit, (deep._SEGMENTS * deep._LAYERS + 1) * unit)
    assert run.peak < 0.55 * twin.peak
    assert run.calls == [2] * deep._SEGMENTS and twin.calls == [1] * deep._SEGMENTS
    assert run.left == twin.left == 0
    assert deep._difference(run.gradients, twin.gradients) == 0


def test_what_a_measurement_leaves_alive_is_seen() -> None:
    kept: list[torch.Tensor] = []

    def hoards(y: torch.Tensor) -> torch.Tensor:
        for segment in segments:
            y = segment(y)
            kept.append(y)
        return y

    segments = deep._segments(0.0, 0)
    run = deep._measured(segments, hoards, torch.randn(deep._ROWS, deep._WIDTH))
    assert run.left == deep._SEGMENTS * deep._ROWS * deep._WIDTH * 4


@pytest.mark.parametrize(("plan", "fits"), [([8] * 7, True), ([], False), ([1] * 64, False), ([64], False)])
def test_segments_of_one_and_of_all_are_no_better_than_none(plan: list[int], fits: bool) -> None:
    chain = deep._Chain(64, 0, 64)
    blocks = deep._blocks(chain)
    best = min(deep._plan_peak(chain, blocks, p) for p in deep._candidates(chain))
    assert (deep._plan_peak(chain, blocks, plan) <= 1.1 * best) is fits


def test_the_whole_model_in_one_segment_misses_a_quarter_of_the_peak() -> None:
    blocks = deep._transformer(0)
    x = torch.randn(deep._BATCH_6, deep._TOKENS_6, deep._HIDDEN_6)
    plain = deep._measured(blocks, nn.Sequential(*blocks), x).peak
    whole = deep._measured(blocks, lambda y: by_torch(nn.Sequential(*blocks), y), x).peak
    assert whole > 0.9 * plain


def test_the_meter_sees_no_memory_of_a_random_state() -> None:
    with Meter() as meter:
        state = torch.get_rng_state()
        assert meter.live_bytes <= state.nbytes


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([6, 6, 6], "the 24 plain blocks at the end are the peak"),
        ([5, 5, 5, 5], "the 22 plain blocks at the end are the peak"),
        ([1] * 23, "their 23 inputs and the 19 plain blocks"),
    ],
)
def test_the_hint_on_segments_names_the_plain_tail(plan: list[int], said: str) -> None:
    assert said in deep._plan_hint(deep._Chain(42, 0, 23), plan)


def test_a_repair_that_changes_the_callers_batch_loses_half_a_point() -> None:
    edits = [
        ("    for block in blocks:", "    x.requires_grad_()\n    for block in blocks:"),
        ("use_reentrant=False", "use_reentrant=True"),
    ]
    got = score(CHAPTER, "3.6", mutant(CHAPTER, "3.6", edits))
    assert got.points == 2.5
    assert "x in place" in got.messages[0]


# -- 3.3: numbers that a network gives ---


def by_backward(depth: int, skip: bool, norm: str | None, init: str, width: int = 64, batch: int = 64) -> Any:
    """All modules first, .backward(), and NumPy's norm of it."""
    x0 = torch.randn(batch, width, requires_grad=True)
    layers = [nn.Linear(width, width) for _ in range(depth)]
    for layer in layers:
        if init == "xavier":
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    x = x0
    for layer in layers:
        between = nn.LayerNorm(width) if norm else nn.Identity()
        y = nn.Sequential(layer, between, nn.Tanh())(x)
        x = y + x if skip else y
    x.sum().backward()  # type: ignore[no-untyped-call]
    assert x0.grad is not None
    return np.linalg.norm(x0.grad.numpy())


def by_transform(
    depth: int, skip: bool, norm: str | None, init: str, width: int = 64, batch: int = 64
) -> Any:
    """The weights as tensors, torch.func's gradient, the root of the sum of squares."""
    found = []
    for _ in range(depth):
        layer = nn.Linear(width, width)
        if init == "xavier":
            nn.init.xavier_normal_(layer.weight)
        found.append((layer.weight, layer.bias * 0 if init == "xavier" else layer.bias))

    def loss(x: torch.Tensor) -> torch.Tensor:
        for weight, bias in found:
            y = x @ weight.T + bias
            y = nn.functional.layer_norm(y, (width,)) if norm else y
            x = x * skip + y.tanh()
        return x.sum()

    gradient = torch.func.grad(loss)(torch.randn(batch, width))
    return float(gradient.square().sum().sqrt())


@pytest.mark.parametrize("answer", [by_backward, by_transform])
@pytest.mark.parametrize("seed", [0, 6])
def test_other_ways_to_a_gradient_are_right_too(answer: Any, seed: int) -> None:
    assert rate(exercises(3)["3.3"], collect(exercises(3)["3.3"], answer, seed), seed) == (2, (), "")


@pytest.mark.parametrize("seed", range(6))
def test_numbers_without_a_network_earn_nothing(seed: int) -> None:
    def middle(depth: int, skip: bool, norm: str | None, init: str) -> float:
        low, high = deep._norm_bounds((depth, skip, norm, init))
        return math.sqrt(low * high)

    got = rate(exercises(3)["3.3"], collect(exercises(3)["3.3"], middle, seed), seed)
    assert got.points == 0 and "no tensor that was computed has that norm" in got.messages[0]
    table = {kind: middle(*kind) for kind in deep._stacks(seed + 100).values()}
    known = collect(exercises(3)["3.3"], lambda *kind: table[kind], seed)
    assert rate(exercises(3)["3.3"], known, seed).points == 0
