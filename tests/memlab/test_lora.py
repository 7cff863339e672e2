"""Adapters on a frozen model, and 4-bit weights: the arithmetic, the counts, formula = trace = measured."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memlab.footprint import footprint
from memlab.lora import (
    LEVELS,
    LoRALinear,
    LoRANF4Linear,
    NF4Linear,
    dequantize,
    dequantize_scales,
    quantize,
    quantize_scales,
)
from memlab.models import MODELS, TransformerConfig, model
from memlab.nets import build
from memlab.published import t4_runs
from memlab.recipe import Recipe, RecipeError, nf4_tensors
from memlab.report import measure_step, trace_step
from memlab.step import workload
from memlab.units import CONSUMERS, PHASES

torch.set_num_threads(1)

CODE = torch.tensor(LEVELS)
TRANSFORMERS = [config for config in MODELS.values() if isinstance(config, TransformerConfig)]


def small(name: str, **changes: Any) -> TransformerConfig:
    base = model(name)
    assert isinstance(base, TransformerConfig)
    kv = 2 if base.kv_heads < base.heads else 4
    sizes = {
        "layers": 3, "hidden": 48, "heads": 4, "kv_heads": kv, "head_dim": 12, "ffn": 100, "vocab": 60,
        "context": 32,
    }  # fmt: skip
    return replace(base, **sizes | changes)


# 4 bits


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 10))
@settings(deadline=None, max_examples=30)
def test_four_bits_and_back(rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.manual_seed(seed))
    packed, absmax = quantize(weight, CODE)
    sizes = {t.name: t for t in nf4_tensors((rows, columns), double=False)}
    for name, tensor in (("weight", packed), ("absmax", absmax), ("code", CODE)):
        assert (tuple(tensor.shape), tensor.nbytes) == (sizes[name].shape, sizes[name].bytes)
    back = dequantize(packed, absmax, CODE, rows, columns, torch.float32)
    assert back.untyped_storage().nbytes() == weight.nbytes
    # the widest gap between two levels is 0.304: no value is further off than half of it
    scale = absmax.repeat_interleave(64)[: weight.numel()].view_as(weight)
    assert ((back - weight).abs() <= 0.1525 * scale).all()


def test_levels_themselves_survive() -> None:
    weight = CODE.repeat(8).view(2, 64) * torch.tensor([[3.0], [0.5]])
    packed, absmax = quantize(weight, CODE)
    assert torch.equal(absmax, torch.tensor([3.0, 0.5]))
    assert torch.equal(dequantize(packed, absmax, CODE, 2, 64, torch.float32), weight)


def test_normal_weights_lose_a_tenth_and_uniform_levels_lose_more() -> None:
    weight = torch.randn(64, 256, generator=torch.manual_seed(0))

    def lost(code: Tensor) -> float:
        packed, absmax = quantize(weight, code)
        back = dequantize(packed, absmax, code, 64, 256, torch.float32)
        return ((back - weight).norm() / weight.norm()).item()

    assert 0.08 < lost(CODE) < 0.1 < lost(torch.linspace(-1, 1, 16))


def test_scales_in_eight_bits() -> None:
    absmax = torch.rand(1000, generator=torch.manual_seed(0)) + 1
    code = torch.linspace(-1, 1, 256)
    small_scales, nested, offset = quantize_scales(absmax, code)
    assert (small_scales.nbytes, nested.nbytes, offset.nbytes) == (1000, 16, 4)
    torch.testing.assert_close(
        dequantize_scales(small_scales, nested, code, offset), absmax, atol=3e-3, rtol=0.0
    )


@pytest.mark.parametrize("double", [False, True])
def test_a_four_bit_layer_is_its_whole_weight(double: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40)
    layer = NF4Linear(linear, torch.float32, double)
    held = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    assert {n: (tuple(t.shape), t.nbytes) for n, t in held.items() if n != "bias"} == {
        t.name: (t.shape, t.bytes) for t in nf4_tensors((40, 96), double)
    }
    x = torch.randn(5, 96, requires_grad=True)
    whole = layer.whole(torch.float32)
    expected = F.linear(x, whole, linear.bias)
    torch.testing.assert_close(layer(x), expected)
    (ours,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(ours, whole.sum(0).expand(5, 96))


@pytest.mark.parametrize("four_bits", [False, True])
def test_an_adapter_adds_its_product(four_bits: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 40)
    plain = linear(x := torch.randn(5, 64))
    layer: Any = LoRALinear(linear, 4, torch.float32)
    if four_bits:
        layer = LoRANF4Linear(linear, torch.float32, False, 4, torch.float32)
        plain = F.linear(x, layer.whole(torch.float32), linear.bias)
    torch.testing.assert_close(layer(x), plain)  # B begins at zero
    nn.init.normal_(layer.lora_B.weight)
    merged = 2.0 * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), plain + x @ merged.T)


# the model


@pytest.mark.parametrize("config", TRANSFORMERS, ids=lambda config: config.name)
@pytest.mark.parametrize("targets", ["attention", "attention-qv", "all-linear"])
def test_adapters_take_rank_times_in_plus_out(config: TransformerConfig, targets: str) -> None:
    rank, h, q = 8, config.hidden, config.heads * config.head_dim
    kv = config.kv_heads * config.head_dim
    if config.family == "gpt2":
        layers = [(h, 3 * q)] + ([] if targets == "attention-qv" else [(q, h)])
    else:
        layers = [(h, q), (h, kv)] if targets == "attention-qv" else [(h, q), (h, kv), (h, kv), (q, h)]
    if targets == "all-linear":
        layers += [(h, config.ffn), (config.ffn, h)] + ([(h, config.ffn)] if config.family == "llama" else [])
    expected = config.layers * rank * sum(a + b for a, b in layers)
    if targets == "all-linear" and config.family == "bert":
        expected += rank * 2 * h  # the pooler
    recipe = Recipe(lora_rank=rank, lora_targets=targets)
    assert sum(w.count for w in recipe.weights(config) if w.trained) == expected


def test_published_counts_of_trained_parameters() -> None:
    """LoRA of rank 8 on queries and values of Llama-2-7B: 4,194,304 (peft's own examples print it)."""
    result = footprint("llama2-7b", precision="bf16", lora_rank=8, lora_targets="attention-qv")
    assert result.trained_count == 4_194_304
    assert result.parameter_count == 6_738_415_616 + 4_194_304
    assert "(4.19 M trained)" in str(result)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "llama2-70b", "qwen2.5-1.5b"])
@pytest.mark.parametrize("base", ["full", "nf4", "nf4-double"])
def test_modules_hold_what_the_recipe_says(name: str, base: str) -> None:
    config = small(name)
    recipe = Recipe(precision="bf16", lora_rank=4, lora_targets="query,qkv,mlp.up", base_weights=base)
    net = build(config, recipe)
    held = {n: (tuple(t.shape), t.nbytes, t.requires_grad) for n, t in net.named_parameters()}
    buffers = {n: (tuple(t.shape), t.nbytes, False) for n, t in net.named_buffers() if "rope" not in n}
    assert held | buffers == {w.name: (w.shape, w.bytes, w.trained) for w in recipe.weights(config)}
    names = [w.name for w in recipe.weights(config) if w.name in held]
    assert list(held) == names  # in the module's order
    assert any("lora_A" in n for n in held)


@pytest.mark.parametrize("base", ["full", "nf4", "nf4-double"])
def test_only_adapters_learn(base: str) -> None:
    work = workload(
        small("llama2-70b"), Recipe(precision="fp32", lora_rank=8, base_weights=base, micro_batch=2)
    )
    for group in work.optimizer.param_groups:
        group["lr"] = 0.01
    before = {n: p.clone() for n, p in work.model.named_parameters()}
    losses = [work.step().item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05
    moved = {n for n, p in work.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n}


# formula, trace, measurement


def same(config: TransformerConfig, recipe: Recipe, *, measured: bool = False) -> None:
    formula, trace = footprint(config, recipe), trace_step(config, recipe)
    assert formula.consumer_peaks() == trace.consumer_peaks()
    assert formula.phase_peaks() == {phase: trace.phase_peaks()[phase] for phase in PHASES}
    if measured:
        real = measure_step(config, recipe)
        assert real.consumer_peaks() == trace.consumer_peaks()
        assert real.phase_peaks() == trace.phase_peaks()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {}),
        ("gpt2", {"checkpointing": "selective", "lora_targets": "all-linear"}),
        ("bert-base", {"lora_targets": "mlp.up,attn.out", "attention": "eager"}),
        ("llama2-70b", {"checkpointing": "full"}),
        ("llama2-70b", {"lora_targets": "key,mlp.gate", "accumulation": 2}),
        ("llama2-70b", {"base_weights": "nf4", "attention": "eager"}),
        ("qwen2.5-1.5b", {"base_weights": "nf4-double", "checkpointing": "every-2", "accumulation": 3}),
    ],
)
def test_formula_trace_and_measurement_are_equal_in_fp32(name: str, fields: dict[str, Any]) -> None:
    recipe = Recipe(precision="fp32", micro_batch=2, lora_rank=4, **fields)
    same(small(name), recipe, measured=True)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tinyllama", {"sequence": 128}),
        ("tinyllama", {"sequence": 256, "checkpointing": "full", "base_weights": "nf4-double"}),
        ("gpt2", {"sequence": 256, "micro_batch": 2, "lora_targets": "all-linear", "base_weights": "nf4"}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_formula_is_the_trace_of_known_models(name: str, precision: str, fields: dict[str, Any]) -> None:
    config = model(name)
    assert isinstance(config, TransformerConfig)
    config = replace(config, layers=4)  # a fifth block is like the fourth
    formula = footprint(config, precision=precision, lora_rank=16, **fields)
    trace = trace_step(config, precision=precision, lora_rank=16, **fields)
    for computed, traced in (
        (formula.consumer_peaks(), trace.consumer_peaks()),
        (formula.phase_peaks(), {phase: trace.phase_peaks()[phase] for phase in PHASES}),
    ):
        for key, value in computed.items():
            assert value == pytest.approx(traced[key], rel=0 if precision == "fp32" else 0.002), key


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    return Recipe(
        precision=draw(st.sampled_from(["fp32", "amp-bf16", "bf16"])),
        micro_batch=draw(st.integers(1, 3)),
        sequence=draw(st.integers(4, 32)),
        accumulation=draw(st.sampled_from([1, 1, 3])),
        checkpointing=draw(st.sampled_from(["none", "full", "every-2", "selective"])),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        optimizer=draw(st.sampled_from(["sgd", "adamw", "adamw-8bit"])),
        lora_rank=draw(st.integers(1, 9)),
        lora_targets=draw(st.sampled_from(["attention", "all-linear", "qkv,query", "mlp.down"])),
        base_weights=draw(st.sampled_from(["full", "nf4", "nf4-double"])),
    )


FAMILIES = st.sampled_from(["gpt2", "bert-base", "llama2-70b", "qwen2.5-1.5b"])


@settings(
    deadline=None, max_examples=8, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(FAMILIES, recipes())
def test_formula_is_the_trace_at_random(name: str, recipe: Recipe) -> None:
    config = small(name, layers=4)
    formula, trace = footprint(config, recipe), trace_step(config, recipe)
    for phase in PHASES:
        assert formula.phase_peaks()[phase] == pytest.approx(trace.phase_peaks()[phase], rel=0.03)


@settings(deadline=None, max_examples=40)
@given(FAMILIES, recipes())
def test_footprints_add_up_and_frozen_is_less_than_trained(name: str, recipe: Recipe) -> None:
    config = small(name, layers=4, hidden=96, head_dim=24, ffn=384)
    result = footprint(config, recipe)
    for kind in ("parameters", "gradients", "optimizer_states"):
        assert sum(t.bytes for t in result.of(kind)) == result.consumers[kind]
    for phase in PHASES:
        row = result.phases[phase]
        assert sum(row[name] for name in CONSUMERS) == row["total"]
    trained = Recipe.from_dict(
        recipe.to_dict() | {"lora_rank": None, "lora_targets": "attention", "base_weights": "full"}
    )
    full = footprint(config, trained)
    assert result.consumers["gradients"] < full.consumers["gradients"]
    assert result.consumers["optimizer_states"] <= full.consumers["optimizer_states"]
    if recipe.quantized:
        whole = footprint(config, recipe.replace(base_weights="full"))
        assert result.consumers["parameters"] < whole.consumers["parameters"]


def test_what_is_frozen_saves_no_input() -> None:
    names = {t.name for t in footprint("llama2-7b", precision="bf16", lora_rank=8).of("activations")}
    full = {t.name for t in footprint("llama2-7b", precision="bf16").of("activations")}
    assert "blocks.*.silu(gate) * up" in full - names  # the input of mlp.down
    assert "blocks.*.attn.query input in fp32" in names - full  # an adapter reads fp32


# published


def test_published_runs_by_the_plain_api() -> None:
    """The formula against T4 runs that the names of `models` cover: LoRA 32, checkpointed, fp16 or nf4.

    Rest: their scripts are Hugging Face's. 16.25 MiB of cuBLAS workspaces aren't in the formula, nor blocks
    of an allocator. fp16 with eager attention is left out: transformers' softmax is fp32 there (-13 to
    -24 %). Its keys are repeated for all heads before SDPA, so a fused kernel runs on a T4, too: no card is
    named, since there our own models' shared heads go without one.
    """
    names = {
        "TinyLlama-1.1B-Chat-v1.0": "tinyllama", "SmolLM2-1.7B": "smollm2-1.7b",
        "SmolLM2-135M": "smollm2-135m", "SmolLM2-360M": "smollm2-360m",
        "Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b", "Qwen2.5-7B-Instruct": "qwen2.5-7b",
    }  # fmt: skip
    seen = 0
    for run in t4_runs():
        sixteen = run["base"] == "fp16"
        if run["model"] not in names or (sixteen and run["attention"] == "eager"):
            continue
        result = footprint(
            names[run["model"]],
            device="cuda",
            precision="fp16" if sixteen else "fp32",  # around 4-bit weights all is fp32 in that script
            base_weights="full" if sixteen else "nf4",
            lora_rank=32,
            micro_batch=run["batch"],
            sequence=run["sequence"],
            attention=run["attention"],
            checkpointing="full",
        )
        assert result.peak_bytes == pytest.approx(run["allocated"], rel=0.025), run
        seen += 1
    assert seen >= 20


@pytest.mark.parametrize(
    ("name", "base", "precision", "sequence", "published"),
    [
        pytest.param("smollm2-1.7b", "nf4", "fp32", 2048, 3_508_279_443, marks=pytest.mark.long),
        ("smollm2-1.7b", "full", "fp16", 2048, 5_218_743_878),
    ],
)
def test_a_traced_step_on_a_virtual_t4_is_near_the_published_peak(
    name: str, base: str, precision: str, sequence: int, published: int
) -> None:
    trace = trace_step(
        name, gpu="T4", precision=precision, base_weights=base, lora_rank=32, sequence=sequence,
        checkpointing="full",
    )  # fmt: skip
    assert trace.peak_bytes == pytest.approx(published, rel=0.0005)


# refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base_weights": "nf4"}, "set lora_rank"),
        ({"base_weights": "int8", "lora_rank": 8}, "unknown base_weights 'int8'"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"lora_targets": "all-linear"}, "set lora_rank too"),
        ({"lora_rank": 8, "lora_targets": ()}, "lora_targets must be"),
        ({"lora_rank": 8, "lora_targets": 5}, "lora_targets must be"),
        ({"lora_rank": 8, "lora_targets": "query,,key"}, "lora_targets must be"),
        ({"lora_rank": 8, "precision": "bf16-master"}, "use precision bf16"),
        ({"precision": "fp16"}, "train with amp-fp16"),
        ({"lora_rank": 8, "world_size": 2, "tensor_parallel": 2}, "set tensor_parallel to 1"),
        ({"lora_rank": 8, "base_weights": "nf4", "world_size": 2, "zero_stage": 3}, "use zero_stage 0 or 1"),
        ({"lora_rank": 8, "base_weights": "nf4", "offload": ("parameters:cpu",)}, "4-bit weights stay"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)) as error:
        Recipe(**fields)
    assert "\n" not in str(error.value)


def test_what_a_model_cannot_do_is_refused() -> None:
    with pytest.raises(RecipeError, match="resnet50 is a convnet"):
        Recipe(lora_rank=8).resolve(model("resnet50"))
    with pytest.raises(RecipeError, match=r"gpt2 has no such layer; it has attn\.out, attn\.qkv"):
        Recipe(lora_rank=8, lora_targets="query").resolve(model("gpt2"))


def test_adapters_are_fp32_unless_fully_shard_wants_one_dtype() -> None:
    one = Recipe(precision="bf16", lora_rank=8)
    assert (one.adapter_dtype, one.gradient_dtype, one.state_dtype) == ("fp32", "fp32", "fp32")
    assert one.parameter_dtype == one.compute_dtype == "bf16"
    assert one.replace(world_size=8, zero_stage=3).adapter_dtype == "bf16"
