"""The closed forms: equal to the trace of the same step, to sums of their tensors, to known figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memlab.footprint import Footprint, footprint
from memlab.models import MODELS, ConvConfig, TransformerConfig, model
from memlab.recipe import Recipe, RecipeError
from memlab.report import trace_step
from memlab.units import CONSUMERS, GIB, PHASES, UnknownNameError

torch.set_num_threads(1)

EXAMPLES = int(os.environ.get("MEMLAB_EXAMPLES", "15"))  # of the random comparisons: each runs two steps
RANDOM: dict[str, Any] = {
    "deadline": None,
    "derandomize": "MEMLAB_EXAMPLES" not in os.environ,
    "phases": (Phase.explicit, Phase.generate),  # shrinking would trace for minutes
    "suppress_health_check": [HealthCheck.too_slow],
}
EXACT = ("parameters", "gradients", "optimizer_states")


def near(a: int, b: int, share: float = 0.03) -> bool:
    """Within 3 %, and a few scalars that matter only in toys."""
    return abs(a - b) <= share * b + 64


def agrees(config: str | TransformerConfig | ConvConfig, recipe: Recipe, share: float) -> None:
    formula, trace = footprint(config, recipe), trace_step(config, recipe)
    computed, traced = formula.consumer_peaks(), trace.consumer_peaks()
    for name in EXACT:
        assert computed[name] == traced[name], name
    assert near(computed["activations"], traced["activations"], share), "activations"
    for phase, size in trace.phase_peaks().items():
        if phase in PHASES:
            assert near(formula.phase_peaks()[phase], size, share), (
                phase,
                formula.phase_peaks()[phase],
                size,
            )
    assert near(formula.peak_bytes, trace.peak_bytes, share)


# at full size, where fake tensors cost nothing


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {"micro_batch": 4, "sequence": 512, "precision": "fp32"}),
        ("gpt2", {"micro_batch": 4, "sequence": 512, "precision": "fp32", "checkpointing": "full"}),
        ("gpt2", {"micro_batch": 4, "sequence": 512, "attention": "eager", "dropout": 0.1}),
        ("bert-base", {"micro_batch": 8, "precision": "fp32"}),
        ("bert-base", {"micro_batch": 8, "checkpointing": "full"}),
        ("resnet50", {"micro_batch": 8, "precision": "fp32"}),
        ("resnet50", {"micro_batch": 8, "precision": "amp-bf16"}),
        ("llama2-7b", {"precision": "fp32", "optimizer": "sgd"}),
        ("llama2-7b", {"precision": "amp-bf16", "optimizer": "sgd", "attention": "eager", "sequence": 1024}),
        ("llama2-7b", {"precision": "bf16", "checkpointing": "full", "optimizer_impl": "fused"}),
    ],
)
def test_formula_is_the_trace_of_known_models(name: str, fields: dict[str, Any]) -> None:
    agrees(name, Recipe(**fields), share=0.01)


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_the_batch_outlives_each_micro_batch(precision: str) -> None:
    """The images stay with the script while the second micro-batch runs, and in the update."""
    recipe = Recipe(precision=precision, micro_batch=4, accumulation=2, image=64, optimizer="sgd")
    traced = trace_step("resnet50", recipe).phase_peaks()
    for phase, size in footprint("resnet50", recipe).phase_peaks().items():
        assert abs(size - traced[phase]) <= (20_000 if phase == "backward" else 8), phase


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tinyllama-1.1b", {"precision": "amp-fp16"}),
        ("tinyllama-1.1b", {"precision": "bf16", "micro_batch": 1}),
        ("tinyllama-1.1b", {"precision": "amp-fp16", "checkpointing": "selective"}),
        ("tinyllama-1.1b", {"precision": "fp32"}),  # its heads are repeated: a fused kernel runs
        ("gpt2", {"precision": "bf16", "dropout": 0.1}),
        ("bert-base", {"precision": "amp-bf16", "checkpointing": "full"}),
        ("gpt2", {"precision": "amp-fp16"}),
    ],
)
def test_cards_without_a_kernel_store_the_scores(name: str, fields: dict[str, Any]) -> None:
    """Before Ampere: no bf16, and no shared heads in 16 bits. All that is missing are cuBLAS' workspaces."""
    config = replace(model(name), layers=4)
    recipe = Recipe(**{"sequence": 256, "micro_batch": 2, "optimizer": "sgd"} | fields)
    formula, trace = footprint(config, recipe, "T4"), trace_step(config, recipe, gpu="T4")
    computed, traced = (x.consumer_peaks()["activations"] for x in (formula, trace))
    assert near(computed, traced, share=0.001)
    for phase in PHASES:
        missing = trace.phase_peaks()[phase] - formula.phase_peaks()[phase]
        assert -200_000 <= missing - 2 * (2 * 4096 + 8 * 16) * 1024 <= 0.005 * trace.peak_bytes, (
            phase,
            missing,
        )


# at random


@st.composite
def transformers(draw: st.DrawFn) -> TransformerConfig:
    base = model(draw(st.sampled_from(["gpt2", "bert-base", "llama2-70b", "qwen2.5-1.5b"])))
    assert isinstance(base, TransformerConfig)
    heads = draw(st.sampled_from([2, 4]))
    head_dim = 2 * draw(st.integers(2, 12))
    return replace(
        base,
        layers=draw(st.integers(1, 7)),
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, heads])) if base.family == "llama" else heads,
        head_dim=head_dim,
        hidden=heads * head_dim,
        ffn=draw(st.integers(8, 200)),
        vocab=draw(st.integers(10, 400)),
        context=64,
        tied=draw(st.booleans()) if base.family == "llama" else base.tied,
    )


@st.composite
def recipes(draw: st.DrawFn, config: TransformerConfig) -> Recipe:
    optimizer, impl = draw(
        st.sampled_from(
            [("sgd", "foreach"), ("momentum", "for-loop"), ("adam", "fused"), ("adamw", "foreach"),
             ("adamw", "for-loop"), ("adafactor", "for-loop"), ("adafactor", "foreach")]
        )
    )  # fmt: skip
    every = f"every-{draw(st.integers(1, config.layers))}"
    return Recipe(
        precision=draw(st.sampled_from(["fp32", "amp-bf16", "bf16", "bf16-master"])),
        optimizer=optimizer,
        optimizer_impl=impl,
        micro_batch=draw(st.integers(1, 4)),
        accumulation=draw(st.sampled_from([1, 1, 3])),
        sequence=draw(st.integers(2, 64)),
        checkpointing=draw(st.sampled_from(["none", "none", "full", "selective", every])),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        dropout=draw(st.sampled_from([0.0, 0.1])) if config.has_dropout else 0.0,
        set_to_none=draw(st.booleans()),
    )


@settings(**RANDOM, max_examples=EXAMPLES)
@given(st.data())
def test_formula_is_the_trace_of_random_transformers(data: st.DataObject) -> None:
    config = data.draw(transformers())
    recipe = data.draw(recipes(config))
    agrees(config, recipe, share=0.03)


@settings(**RANDOM, max_examples=EXAMPLES // 3)
@given(st.data())
def test_formula_is_the_trace_of_random_convnets(data: st.DataObject) -> None:
    config = model(data.draw(st.sampled_from(["lenet5", "alexnet", "vgg19", "resnet50", "densenet264"])))
    assert isinstance(config, ConvConfig)
    config = replace(config, classes=data.draw(st.integers(2, 50)), fcs=tuple(16 for _ in config.fcs))
    if config.batch_norm:
        config = replace(config, depths=tuple(data.draw(st.integers(1, 3)) for _ in config.depths))
    checkpointing = data.draw(st.sampled_from(["none", "full", "every-2"])) if config.blocks > 1 else "none"
    recipe = Recipe(
        precision=data.draw(st.sampled_from(["fp32", "amp-bf16", "bf16"])),
        optimizer="momentum",
        micro_batch=data.draw(st.integers(2, 4)),
        image=None if config.fixed_image else data.draw(st.integers(64, 96)),
        checkpointing=checkpointing,
        dropout=data.draw(st.sampled_from([0.0, 0.5])) if config.has_dropout else 0.0,
    )
    agrees(config, recipe, share=0.03)


# the parts and their sums


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_config(name: str) -> None:
    config = MODELS[name]
    result = footprint(config, precision="fp32")
    trained = sum(t.bytes for t in result.of("parameters") if t.why == "trained")
    assert trained == 4 * config.parameter_count == 4 * result.parameter_count
    assert sum(t.bytes for t in result.of("gradients")) == result.consumers["gradients"]
    assert sum(t.bytes for t in result.of("gradients")) == 4 * config.parameter_count


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_consumers_are_the_sums_of_their_tensors(data: st.DataObject) -> None:
    config = data.draw(transformers())
    result = footprint(config, data.draw(recipes(config)))
    for name in EXACT:
        assert sum(t.bytes for t in result.of(name)) == result.consumers[name]
    left = sum(t.bytes for t in result.of("activations"))  # what the forward leaves
    assert left <= result.consumers["activations"]
    if result.recipe.checkpointing == "none" and result.recipe.accumulation == 1:
        assert left == result.consumers["activations"]
    for phase in PHASES:
        row = result.phases[phase]
        assert sum(row[name] for name in CONSUMERS) == row["total"] <= result.peak_bytes
        assert all(0 <= row[name] <= result.consumers[name] for name in CONSUMERS)
    assert result.peak_bytes == max(result.phase_peaks().values())


def test_known_figures() -> None:
    states = 124_439_808 * 8
    result = footprint("gpt2", micro_batch=4, sequence=512, precision="fp32", gpu="A100-80GB")
    assert result.consumers["optimizer_states"] == states  # no step counters: on CUDA they're in CPU memory
    assert footprint("gpt2", precision="fp32").consumers["optimizer_states"] == states + 148 * 4
    assert footprint("llama2-70b").parameter_count == 68_976_648_192
    # a block of GPT-2 with fused attention keeps 16 values per token and channel, and its statistics
    saved = sum(t.bytes for t in result.of("activations") if t.name.startswith("blocks.*"))
    rows, per_block = 4 * 512, saved / 12
    assert per_block == pytest.approx(rows * 768 * 16 * 4 + rows * 4 * 4 + rows * 12 * 4, rel=1e-3)
    # logits and log-softmax in fp32
    assert {t.name: t.bytes for t in result.of("activations")}["logits"] == rows * 50257 * 4


def test_34_bytes_per_value_of_korthikanti() -> None:
    """Equal in 16 bits with dropout, byte masks and stored scores; far off where attention is fused."""
    s, b, h, a, layers = 512, 8, 1024, 16, 24
    rule = s * b * h * layers * (34 + 5 * a * s / h)
    eager = footprint(
        "bert-large",
        micro_batch=b,
        sequence=s,
        precision="bf16",
        attention="eager",
        dropout=0.1,
        device="cuda",
    )
    blocks = sum(t.bytes for t in eager.of("activations") if t.name.startswith("blocks"))
    assert blocks == pytest.approx(rule, rel=0.01)
    fused = footprint("bert-large", micro_batch=b, sequence=s, precision="bf16", device="cuda")
    assert rule > 1.2 * fused.consumers["activations"]


def test_each_lever_moves_what_it_should() -> None:
    plain = footprint("gpt2", micro_batch=8, precision="fp32")

    def change(**fields: Any) -> Footprint:
        return footprint("gpt2", plain.recipe, **fields)

    assert change(checkpointing="full").consumers["activations"] < plain.consumers["activations"] / 2
    selective = change(checkpointing="selective").consumers["activations"]
    assert change(checkpointing="full").consumers["activations"] < selective < plain.consumers["activations"]
    assert change(attention="eager").consumers["activations"] > 1.3 * plain.consumers["activations"]
    assert change(optimizer_impl="fused").phases["optimizer"]["temporaries"] == 0
    copy = change(optimizer_impl="foreach").phases["optimizer"]["temporaries"]
    assert copy == 4 * plain.parameter_count
    assert change(optimizer="adamw-8bit").consumers["optimizer_states"] < 2.2 * plain.parameter_count
    amp = change(precision="amp-bf16")
    assert all(amp.consumers[name] == plain.consumers[name] for name in EXACT)
    assert amp.consumers["activations"] < plain.consumers["activations"]
    assert change(set_to_none=False).phases["forward"]["gradients"] == 4 * plain.parameter_count
    assert change(accumulation=2).peak_bytes > plain.peak_bytes


def test_masks_of_dropout_take_a_byte_on_cuda_and_an_element_on_the_cpu() -> None:
    fields: dict[str, Any] = {"precision": "fp32", "attention": "eager", "dropout": 0.1}
    cpu, cuda = (footprint("gpt2", device=device, **fields) for device in ("cpu", "cuda"))
    masks = [
        sum(t.bytes for t in f.of("activations") if "mask" in t.name and "causal" not in t.name)
        for f in (cpu, cuda)
    ]
    assert masks[0] == 4 * masks[1] > 0


# several GPUs and CPU memory


def test_zero_shards_one_kind_after_the_other() -> None:
    one = footprint("gpt2", precision="fp32")
    for stage in range(4):
        result = footprint("gpt2", precision="fp32", world_size=8, zero_stage=stage)
        for name, first in (("optimizer_states", 1), ("gradients", 2), ("parameters", 3)):
            share: float = 8 if stage >= first else 1
            if name == "gradients" and stage < first:
                share = 0.5  # DistributedDataParallel's buckets lie beside them
            if name == "optimizer_states" and stage == 1:
                embedding = 8 * 50257 * 768  # whole tensors are dealt out: one rank has this, more than 1/8
                assert embedding <= result.consumers[name] < embedding + 2000
                continue
            assert result.consumers[name] == pytest.approx(one.consumers[name] / share, rel=1e-3)


@pytest.mark.parametrize(
    ("world", "impl", "traced"), [(8, "for-loop", 72.781), (8, "foreach", 80.302), (1024, "foreach", 14.276)]
)
def test_zero_3_is_near_a_trace_of_fsdp2(world: int, impl: str, traced: float) -> None:
    """Traced once with fake tensors and a fake process group (torch 2.13, fully_shard), GiB per rank."""
    result = footprint(
        "llama2-70b",
        precision="bf16",
        checkpointing="full",
        zero_stage=3,
        world_size=world,
        optimizer_impl=impl,
    )
    assert result.peak_bytes / GIB == pytest.approx(traced, rel=0.005)


def test_zero_3_where_weights_outweigh_activations() -> None:
    """Traced once as above: the forward to the byte, the backward 0.3 % higher."""
    result = footprint("llama2-7b", precision="bf16", sequence=128, zero_stage=3, world_size=8)
    assert result.phase_peaks()["forward"] == 7_535_670_668
    assert result.phase_peaks()["backward"] == pytest.approx(9_022_967_188, rel=0.004)


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b"])  # a tied head, and one of its own
@pytest.mark.parametrize(
    "fields",
    [
        {"zero_stage": 1},
        {"zero_stage": 3},
        {"zero_stage": 3, "tensor_parallel": 2},
        {"tensor_parallel": 4},
        {"tensor_parallel": 4, "precision": "amp-bf16"},
    ],
)
def test_ranks_hold_what_torch_gives_them(name: str, fields: dict[str, Any]) -> None:
    """Where the vocabulary weighs most: whole tensors of ZeRO-1, whole gradients of a split embedding."""
    config = model(name)
    assert isinstance(config, TransformerConfig)
    config = replace(
        config, layers=3, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=8001, context=256
    )
    recipe = Recipe(**({"precision": "fp32", "world_size": 4} | fields))
    formula, trace = footprint(config, recipe, device="cuda"), trace_step(config, recipe, gpu="A100-80GB")
    workspaces = 2 * (2 * 4096 + 8 * 16) * 1024  # cuBLAS, one for each of autograd's two threads
    for phase in PHASES:
        expected = formula.phase_peaks()[phase] + workspaces
        # where layers have a bias, cuBLASLt's own workspace of 1 MiB; padding of shards
        assert trace.phase_peaks()[phase] == pytest.approx(expected, rel=0.01, abs=2**20 + 2**14), phase


@pytest.mark.parametrize("fields", [{}, {"lora_rank": 4, "lora_targets": "all-linear"}])
def test_data_parallel_buckets_are_those_of_the_trace(fields: dict[str, Any]) -> None:
    config = model("gpt2")
    assert isinstance(config, TransformerConfig)
    config = replace(config, layers=2, vocab=500)
    recipe = Recipe(precision="fp32", sequence=64, world_size=4, **fields)
    formula, trace = footprint(config, recipe), trace_step(config, recipe)
    assert formula.consumer_peaks() == trace.consumer_peaks()
    assert formula.phase_peaks() == {phase: trace.phase_peaks()[phase] for phase in PHASES}
    assert formula.consumers["gradients"] == 2 * 4 * formula.trained_count


def test_tensor_parallel_splits_the_blocks() -> None:
    one = footprint("llama2-7b", precision="bf16")
    four = footprint("llama2-7b", precision="bf16", world_size=4, tensor_parallel=4)
    assert four.consumers["parameters"] == pytest.approx(one.consumers["parameters"] / 4, rel=1e-3)
    shapes = {t.name: t.shape for t in four.of("parameters")}
    assert shapes["blocks.*.attn.query.weight"] == (1024, 4096)
    assert shapes["blocks.*.attn.out.weight"] == (4096, 1024)
    assert shapes["blocks.*.norm1.weight"] == (4096,)
    quarter = one.consumers["activations"] / 4
    assert (
        quarter < four.consumers["activations"] < 2.5 * quarter
    )  # norms and the residual stream aren't split


def test_offload_moves_bytes_out() -> None:
    one = footprint("gpt2", precision="fp32")
    away = footprint("gpt2", precision="fp32", offload=("optimizer_states:cpu", "activations:cpu"))
    assert away.consumers["optimizer_states"] == 0
    assert away.host["optimizer_states"] == one.consumers["optimizer_states"]
    assert away.consumers["activations"] + away.host["activations"] >= one.consumers["activations"]
    assert away.consumers["activations"] < one.consumers["activations"]
    assert away.phases["optimizer"]["temporaries"] == 0  # the update runs where its states are
    all_away = footprint("gpt2", precision="fp32", offload=("parameters:nvme", "gradients:cpu"))
    assert all_away.consumers["parameters"] == all_away.consumers["gradients"] == 0
    assert all_away.host == {
        "parameters": one.consumers["parameters"],
        "gradients": one.consumers["gradients"],
    }


#: cuBLAS's on Hopper, two threads: the trace has them, the formula adds none.
WORKSPACES = 64 * 2**20


@pytest.mark.parametrize("checkpointing", ["none", "full", "every-2", "selective"])
@pytest.mark.parametrize("name", ["llama3-8b", "gpt2"])
def test_offloaded_activations_are_a_traces(name: str, checkpointing: str) -> None:
    """Saved tensors leave and come back one by one; selective checkpointing's cache never leaves."""
    config = replace(model(name), layers=3, vocab=512)
    recipe = Recipe(
        precision="bf16", micro_batch=8, sequence=512, checkpointing=checkpointing,
        offload=("activations:cpu", "gradients:cpu", "optimizer_states:cpu"),
    )  # fmt: skip
    found = footprint(config, recipe, gpu="H200")
    trace = trace_step(config, recipe, gpu="H200")
    for phase in ("forward", "backward"):
        peak = trace.phase_peaks()[phase]
        assert found.phases[phase]["total"] == pytest.approx(peak - WORKSPACES, rel=0.005, abs=2**22), phase
    alone = footprint(config, recipe.replace(offload=recipe.offload[1:]), gpu="H200")
    assert found.peak_bytes < alone.peak_bytes


# shown and refused


def test_the_table_fits_80_columns_and_says_what_it_includes() -> None:
    text = str(footprint("llama2-70b", checkpointing="full", gpu="A100-80GB"))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "too much" in text and "workspaces" in text and "GiB" in text
    assert "<table>" in footprint("gpt2")._repr_html_()


def test_to_dict_is_json_of_whole_numbers() -> None:
    data = json.loads(json.dumps(footprint("llama2-70b").to_dict()))
    assert data["parameter_count"] == 68_976_648_192
    assert data["peak_bytes"] == data["phases"][data["peak_phase"]]["total"]
    sizes = [*data["consumers"].values(), *(n for row in data["phases"].values() for n in row.values())]
    assert all(isinstance(n, int) for n in sizes)
    assert {t["consumer"] for t in data["tensors"]} <= set(CONSUMERS)
    one = data["tensors"][0]
    assert one["bytes"] == one["count"] * math.prod(one["shape"]) * 4


def test_what_is_not_known_is_refused_in_one_line() -> None:
    with pytest.raises(UnknownNameError, match="did you mean gpt2"):
        footprint("gpt22")
    with pytest.raises(UnknownNameError, match="RTX-4090"):
        footprint("gpt2", gpu="RTX-4091")
    with pytest.raises(UnknownNameError, match="cuda"):
        footprint("gpt2", device="cudaa")
    with pytest.raises(RecipeError, match="1024 learned positions"):
        footprint("gpt2", sequence=4096)
    with pytest.raises(UnknownNameError, match="activations"):
        footprint("gpt2").of("activation")


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; import memlab.footprint as f; f.footprint('llama2-70b'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
