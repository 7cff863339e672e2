from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from memlab import hardware, models, report
from memlab.models import TransformerConfig
from memlab.recipe import Recipe
from memlab.report import Comparison, compare, measure_step, trace_step
from memlab.units import CONSUMERS, PHASES, UnknownNameError

torch.set_num_threads(1)


def small(name: str) -> TransformerConfig:
    """A named model, two layers of 64 wide, 512 tokens in its vocabulary."""
    config = models.model(name)
    assert isinstance(config, TransformerConfig)
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "vocab": 512, "context": 64, "name": "small"}
    if config.kv_heads < config.heads:
        sizes["kv_heads"] = 2
    elif hasattr(config, "kv_heads"):
        sizes["kv_heads"] = 4
    known = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{k: v for k, v in sizes.items() if k in known})


RECIPES: list[dict[str, Any]] = [
    {"precision": "fp32"},
    {"precision": "fp32", "attention": "eager", "dropout": 0.1},
    {"precision": "amp-bf16", "accumulation": 2, "set_to_none": False},
    {"precision": "bf16-master", "optimizer_impl": "for-loop"},
    {"precision": "bf16", "optimizer": "adafactor"},
    {"precision": "amp-fp16", "optimizer": "adamw-8bit"},
    {"precision": "fp32", "optimizer": "momentum", "checkpointing": "full"},
    {"precision": "amp-bf16", "optimizer_impl": "fused", "checkpointing": "selective"},
]


@pytest.mark.parametrize("fields", RECIPES, ids=lambda f: " ".join(map(str, f.values())))
def test_trace_equals_measurement_to_the_byte(fields: dict[str, Any]) -> None:
    config = small("gpt2")
    fields = {"micro_batch": 2, "sequence": 32, **fields}
    traced, measured = trace_step(config, **fields), measure_step(config, device="cpu", **fields)
    assert traced.phase_peaks() == measured.phase_peaks()
    assert traced.consumer_peaks() == measured.consumer_peaks()
    assert traced.consumers_at_peak() == measured.consumers_at_peak()
    assert set(PHASES) <= set(traced.phase_peaks())


@pytest.mark.parametrize("name", ["bert-base", "llama3-8b", "qwen2.5-1.5b"])
def test_every_family_traces_as_it_runs(name: str) -> None:
    fields = {"micro_batch": 2, "sequence": 32, "precision": "amp-bf16"}
    traced = trace_step(small(name), **fields)
    measured = measure_step(small(name), device="cpu", **fields)
    assert traced.phase_peaks() == measured.phase_peaks()


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
@pytest.mark.parametrize("name", ["lenet5", "resnet50"])
def test_convolutional_nets_trace_as_they_run(name: str, precision: str) -> None:
    fields: dict[str, Any] = {"micro_batch": 2, "precision": precision}
    if name == "resnet50":
        fields["image"] = 32
    traced, measured = trace_step(name, **fields), measure_step(name, device="cpu", **fields)
    assert traced.phase_peaks() == measured.phase_peaks()
    assert traced.consumer_peaks() == measured.consumer_peaks()


def test_static_consumers_of_gpt2_are_exact_at_any_size() -> None:
    count = models.model("gpt2").parameter_count
    trace = trace_step("gpt2", micro_batch=4, sequence=512, precision="fp32")
    own = trace.consumer_peaks()
    assert (own["parameters"], own["gradients"]) == (4 * count, 4 * count)
    assert own["optimizer_states"] == 8 * count + 4 * 148  # and one step counter for each of 148 tensors
    assert trace.info["model"] == "gpt2"
    assert trace.info["recipe"]["micro_batch"] == 4


def test_a_card_too_small_raises_where_it_would() -> None:
    fields: dict[str, Any] = {"precision": "fp32", "micro_batch": 64, "attention": "eager"}
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory") as caught:
        trace_step("gpt2", gpu="T4", **fields)
    assert "blocks." in str(caught.value) or "h." in str(caught.value)
    assert trace_step("gpt2", gpu="T4", limit=2**50, **fields).peak_bytes > hardware.gpu("T4").memory_bytes


def test_a_step_of_ones_own() -> None:
    def make() -> Any:
        model = nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 100)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    traced, measured = trace_step(make, lines=True), measure_step(make, device="cpu")
    assert traced.phase_peaks() == measured.phase_peaks()
    assert traced.consumer_peaks()["optimizer_states"] == 4 * 1010
    assert any(block.line.startswith("test_report.py:") for block in traced.blocks())
    with pytest.raises(TypeError, match="takes no recipe"):
        trace_step(make, Recipe())


def test_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    trace_step(small("gpt2"), sequence=16)
    measure_step(small("gpt2"), sequence=16, precision="fp32", device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_budget_of_a_measured_step() -> None:
    fields: dict[str, Any] = {"sequence": 32, "precision": "fp32", "device": "cpu"}
    need = measure_step(small("gpt2"), **fields).peak_bytes
    assert measure_step(small("gpt2"), budget=need, **fields).peak_bytes == need
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        measure_step(small("gpt2"), budget=need - 1, **fields)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare(small("gpt2"), micro_batch=2, sequence=32, precision="fp32")


def test_three_columns_agree_and_the_gap_has_a_name(comparison: Comparison) -> None:
    for name in ("parameters", "gradients", "optimizer_states"):
        row = comparison.row(name)
        assert row.formula == row.trace == row.measured
        assert row.gap == "equal"
    for row in comparison.rows:
        if row.trace is not None:
            assert row.trace == row.measured
    activations = comparison.row("activations")
    assert activations.formula is not None and activations.trace is not None
    assert abs(activations.formula / activations.trace - 1) < 0.03
    scratch = comparison.row("operator scratch")
    assert scratch.formula is scratch.trace is None
    assert 0 <= (scratch.measured or 0) < 2**20
    assert "seen only by the allocator" in scratch.gap


def test_the_table_fits_a_hundred_columns_and_is_plain_data_too(comparison: Comparison) -> None:
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 100
    for name in ("parameters", "optimizer states", "forward", "peak", "operator scratch"):
        assert name in text
    assert comparison._repr_html_().count("<tr>") == len(comparison.rows) + 1
    data = json.loads(json.dumps(comparison.to_dict()))
    assert [row["name"] for row in data["rows"]] == [row.name for row in comparison.rows]
    assert all(isinstance(row["trace_bytes"], int | None) for row in data["rows"])
    assert set(comparison.columns()) == {"formula", "trace", "measured"}
    assert set(comparison.columns()["trace"]) == {*CONSUMERS, "peak"}


def test_what_does_not_fit_is_not_run_and_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "free_memory", lambda: 2**30)
    result = compare("gpt2", sequence=64, precision="fp32")
    assert result.measured is None and result.allocator is None
    assert all(row.measured is None for row in result.rows)
    assert "needs 2.3" in result.not_measured and "1.00 GiB are free here" in result.not_measured
    assert "not measured" in result.row("peak").gap
    assert max(map(len, str(result).splitlines())) <= 100
    assert set(result.columns()) == {"formula", "trace"}


def test_measuring_can_be_left_out() -> None:
    result = compare(small("gpt2"), sequence=16, measure=False)
    assert result.measured is None and result.not_measured == "not asked for"


def test_free_memory_is_a_size_of_this_machine() -> None:
    assert 2**20 < report.free_memory() < 2**50


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: trace_step("gtp2"), "did you mean gpt2"),
        (lambda: trace_step("gpt2", gpu="T44"), "did you mean T4"),
        (lambda: trace_step("gpt2", micro_batch=-1), "micro_batch"),
        (lambda: measure_step("gpt2", zero_stage=3, world_size=8), "one process"),
    ],
)
def test_bad_input_is_one_clear_line(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UnknownNameError | ValueError)
