"""Chapter 2's checks: solutions earn everything, an empty cell nothing, each planted mistake loses points."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autograder.build import BEGIN, END, parse
from memlab.exercises import Score, collect, exercises, rate
from memlab.exercises.four_consumers import (
    EXERCISES,
    IMPLEMENTATIONS,
    STATES,
    _build,
    _case_2_3,
    _dims_2_3,
    _models_2_2,
    adam_step_peak,
    block_activation_bytes,
    saved_by,
    state_bytes,
)
from memlab.recipe import Recipe
from tests.exercises.mutants_2 import MUTANTS

CHAPTER = Path(__file__).parents[2] / "solutions" / "02_four_consumers.py"
ANSWERS = {
    "2.1": ("states",),
    "2.2": ("measure_states", "step_peak"),
    "2.3": ("saved_bytes",),
    "2.4": ("act_bytes",),
    "2.5": ("min_cards", "train_days"),
}
IDS = [exercise.id for exercise in EXERCISES]
SEEDS = (0, 20_261_130)


def answer(exercise: str, source: str) -> Any:
    """What the student's check cell would pass on."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<student>", "exec"), names)
    found = tuple(names[name] for name in ANSWERS[exercise])
    return found[0] if len(found) == 1 else found


def student_cells(solved: bool) -> dict[str, str]:
    """The exercise cells of the chapter, with their solutions or as released."""
    cells: dict[str, str] = {}
    for cell in parse(CHAPTER):
        if not cell.exercise:
            continue
        lines, inside = [], False
        for line in cell.source.splitlines():
            if BEGIN in line:
                inside = True
                if not solved:
                    indent = line[: len(line) - len(line.lstrip())]
                    lines.append(f'{indent}raise NotImplementedError("exercise {cell.exercise}")')
            elif END in line:
                inside = False
            elif solved or not inside:
                lines.append(line)
        cells[cell.exercise] = cells.get(cell.exercise, "") + "\n".join(lines) + "\n"
    return cells


def points(exercise: str, source: str, seed: int = 0) -> Score:
    found = exercises("2")[exercise]
    evidence = collect(found, answer(exercise, source), seed)
    assert json.loads(json.dumps(evidence)) == evidence, "evidence is plain data"
    return rate(found, evidence)


@pytest.mark.parametrize("exercise", ["2.1", "2.4", "2.5"])
def test_no_seed_lets_a_mistake_pass(exercise: str) -> None:
    for seed in range(1000, 1060):
        for mistake, source in MUTANTS[exercise].items():
            assert points(exercise, source, seed)[0] < exercises("2")[exercise].points, (mistake, seed)


def test_a_dict_may_hold_more_than_is_asked_for() -> None:
    more = MUTANTS["2.2"]["the naive sum over tensors"].replace("return {", 'return {"total": 0, ', 1)
    assert points("2.2", more)[0] == points("2.2", MUTANTS["2.2"]["the naive sum over tensors"])[0]
    given = exercises("2")["2.1"]
    found = collect(given, lambda *recipe: {**state_bytes(*recipe), "total": 0}, 4)
    assert rate(given, found, 4).points == 3


@pytest.mark.parametrize("seed", range(30))
def test_whole_days_are_no_days(seed: int) -> None:
    def days(parameters: int, tokens: int, cards: int, flops: float, recompute: bool) -> float:
        return (8 if recompute else 6) * parameters * tokens / (cards * flops) / 86_400

    def cards(parameters: int, each: int, card: int) -> int:
        return -(-parameters * each // card)

    given = exercises("2")["2.5"]
    assert rate(given, collect(given, (cards, days), seed), seed).points == 2
    for rounded in (math.floor, math.ceil, round):
        found = collect(given, (cards, lambda *run, whole=rounded: whole(days(*run))), seed)
        got = rate(given, found, seed)
        assert got.points == 1 and "don't round" in got.messages[0]


def test_a_mistake_keeps_the_points_of_what_is_right() -> None:
    assert points("2.1", MUTANTS["2.1"]["only one Adam moment"])[0] == 0.25  # SGD and momentum
    assert points("2.1", MUTANTS["2.1"]["autocast halves everything"])[0] == 1
    assert points("2.2", MUTANTS["2.2"]["only the first function written"])[0] == 2.5
    assert points("2.2", MUTANTS["2.2"]["the naive sum over tensors"])[0] == 2.5
    assert points("2.3", MUTANTS["2.3"]["the pack hook returns the tensor itself"])[0] == 3.5
    assert points("2.4", MUTANTS["2.4"]["fused without its statistic"])[0] == 1
    assert points("2.4", MUTANTS["2.4"]["the formula of the text, whatever is asked"])[0] == 0
    assert points("2.5", MUTANTS["2.5"]["seconds"])[0] == 1


@pytest.mark.parametrize("exercise", IDS)
def test_messages_name_what_is_missing(exercise: str) -> None:
    expected = {
        ("2.1", "only one Adam moment"): "which second tensor is missing",
        ("2.1", "GB instead of bytes"): "right size in GB",
        ("2.1", "no master copy"): "fp32 master copy",
        ("2.1", "the master is a parameter"): "the master copy belongs to the optimizer states",
        ("2.1", "a wrong key"): "yours has gradients, optimizer, parameters",
        ("2.2", "the naive sum over tensors"): "views keep their whole storage alive",
        ("2.2", "a shared storage counted for each view"): "count each storage once",
        ("2.2", "the list in the state overlooked"): "its tensors lie in a list",
        ("2.2", "the step counters left out"): "the `step` counters too",
        ("2.2", "two moments assumed, not measured"): "plain SGD keeps nothing",
        ("2.2", "a step needs no temporaries"): "which temporary",
        ("2.2", "the loop keeps three of the largest"): "has that one's size",
        ("2.3", "a shared storage counted twice"): "count its storage once",
        ("2.3", "the pack hook returns the tensor itself"): "t.detach()",
        ("2.3", "the input, frozen or not"): "no gradient of the weight is asked for",
        ("2.3", "always nothing"): "counts only when the Linear passes",
        ("2.4", "the article's formula: one 16-bit tensor per layer"): "go through the rows",
        ("2.4", "without dropout only the mask goes"): "softmax's output is what the product with V keeps",
        ("2.4", "one layer"): "multiply by L",
        ("2.4", "a fraction cut off"): "does a // cut a fraction off",
        ("2.4", "the MLP is always 4h"): "which rows have f",
        ("2.4", "fused without its statistic"): "one fp32 number per row and head",
        ("2.4", "GB instead of bytes"): "right size in GB",
        ("2.5", "rounded down"): "round up",
        ("2.5", "only the forward"): "forward alone",
    }
    for (owner, mistake), text in expected.items():
        if owner == exercise:
            _, messages, _ = points(exercise, MUTANTS[exercise][mistake])
            assert any(text in message for message in messages), messages


@pytest.mark.parametrize("exercise", ANSWERS)
@pytest.mark.parametrize("value", [None, "many", 1.5, {}, {"parameters": 1}])
def test_one_mistake_is_told_once(exercise: str, value: Any) -> None:
    given: Any = lambda *_: value  # noqa: E731
    found = exercises("2")[exercise]
    _, messages, _ = rate(found, collect(found, given if len(ANSWERS[exercise]) == 1 else (given, given), 0))
    assert len(messages) <= (1 if len(ANSWERS[exercise]) == 1 and exercise != "2.3" else 6), messages
    assert len([m for m in messages if "you returned" in m]) <= 4


def test_plain_sgd_is_not_told_of_step_counters() -> None:
    source = MUTANTS["2.2"]["two moments assumed, not measured"]
    _, messages, _ = points("2.2", source)
    assert not any("counters" in message for message in messages if "sgd" in message)


def test_an_answer_that_takes_all_memory_is_stopped_and_the_check_goes_on() -> None:
    source = """
def saved_bytes(module, *inputs):
    return torch.empty(2**30).numel()
"""
    earned, messages, _ = points("2.3", source)
    assert earned == 0 and messages


# -- what the checks hold to be right agrees with torch and with the library ---------------------------------


class _Live(TorchDispatchMode):
    """Peak of live bytes, told apart from memlab's own meter."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(item, torch.Tensor):
                self.add(item)
        return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [[20_000] * 8, [5_000, 90_000, 20_000, 400]])
def test_step_peak_is_what_torch_takes(implementation: str, sizes: list[int]) -> None:
    parameters = [nn.Parameter(torch.ones(n)) for n in sizes]
    options = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
    optimizer = torch.optim.Adam(parameters, **options[implementation])
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [t for p in parameters for t in (p, p.grad, *optimizer.state[p].values())]
    with _Live(held) as live:
        optimizer.step()
    assert live.peak == pytest.approx(adam_step_peak(sizes, implementation, exact=True), rel=0.001)


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_states_are_those_of_live_optimizers(seed: int) -> None:
    for _, group in _models_2_2(seed):
        for case in group:
            model, optimizer = _build(case)
            tensors = {
                "parameters": [*model.parameters(), *model.buffers()],
                "gradients": [p.grad for p in model.parameters() if p.grad is not None],
                "optimizer_states": list(optimizer.state.values()),
            }
            for consumer in STATES:
                found = [t for t in tree_leaves(tensors[consumer]) if torch.is_tensor(t)]
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
                assert sum(storages.values()) == case.expected()[consumer], (case.label, consumer)
                unique = {id(t): t.nbytes for t in found}
                assert sum(unique.values()) == case.viewed()[consumer], (case.label, consumer)


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_saved_bytes_are_those_that_the_profiler_of_autograd_sees(seed: int) -> None:
    for name, dims in _dims_2_3(seed).items():
        module, x = _case_2_3(name, *dims)
        own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
        saved: dict[int, int] = {}

        def pack(t: torch.Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in own:
                saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = module(x)
        assert sum(saved.values()) == saved_by(name, *dims), name
        del output


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "bf16", "bf16-master"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adamw-8bit"])
def test_states_agree_with_the_recipe(precision: str, optimizer: str) -> None:
    recipe = Recipe(precision=precision, optimizer=optimizer)
    shape = (4096, 1024)
    n = 4096 * 1024
    states = sum(t.bytes for t in recipe.state_tensors(shape) if not t.name.endswith("scale"))
    right = state_bytes(n, precision, optimizer)
    assert right["optimizer_states"] == states
    assert right["parameters"] == n * (4 if recipe.parameter_dtype == "fp32" else 2)
    assert right["gradients"] == n * (4 if recipe.gradient_dtype == "fp32" else 2)


def test_act_bytes_of_known_models() -> None:
    bert_large = [block_activation_bytes(s, 32, 1024, 16, 24) for s in (128, 256, 512)]
    assert [round(n / 1e9, 2) for n in bert_large] == [4.43, 10.87, 29.80]
    assert round(block_activation_bytes(2048, 1, 12288, 96, 96) / 1e9) == 275  # GPT-3, one sequence


class _Block(nn.Module):
    """A transformer block of each kind that exercise 2.4 asks for."""

    def __init__(self, h: int, heads: int, f: int, dropout: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if self.dropout else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:  # on a CPU without dropout: a GPU's kernel draws its mask again in backward
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = self.drop(torch.softmax(q @ k.mT, dim=-1)) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_act_bytes_is_what_a_block_keeps(dropout: bool, fused: bool) -> None:
    s, b, h, a, f = 48, 2, 96, 3, 208
    block = _Block(h, a, f, dropout, fused).bfloat16()
    x = torch.zeros(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own and t.shape[-1] != 1:  # the norms' statistics
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = block(x)
    assert sum(kept.values()) == block_activation_bytes(s, b, h, a, 1, f, dropout, fused)
    del output
