"""Recipes: what is refused, with which words, and what follows from the fields."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.hardware import gpu
from memlab.models import MODELS, from_hf, model
from memlab.recipe import (
    ATTENTION,
    BLOCK_8BIT,
    LORA_TARGETS,
    MIN_8BIT,
    OFFLOAD_WHAT,
    OFFLOAD_WHERE,
    OPTIMIZERS,
    PRECISIONS,
    Recipe,
    RecipeError,
)


def test_the_default_is_the_one_that_the_course_prints():
    said = Recipe().describe()
    for part in ("amp-bf16", "AdamW foreach", "micro-batch 1", "sdpa", "checkpointing none", "one GPU"):
        assert part in said
    resolved = Recipe().resolve(model("gpt2"))
    assert resolved.sequence == 1024
    assert "sequence 1024" in str(resolved)
    assert "image 224x224" in Recipe().resolve(model("resnet50")).describe()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8': did you mean fp32"),
        ({"precision": "bf-16"}, "did you mean bf16"),
        ({"optimizer": "adamx"}, "did you mean adam or adamw"),
        ({"optimizer_impl": "loop"}, "for-loop"),
        ({"optimizer": "adamw-8bit", "optimizer_impl": "fused"}, "adamw-8bit has no fused implementation"),
        ({"optimizer": "adafactor", "optimizer_impl": "fused"}, "adafactor has no fused implementation"),
        ({"micro_batch": 0}, "micro_batch must be at least 1, not 0"),
        ({"micro_batch": -4}, "micro_batch must be at least 1, not -4"),
        ({"micro_batch": 2.0}, "micro_batch must be a whole number"),
        ({"micro_batch": True}, "micro_batch must be a whole number"),
        ({"accumulation": 0}, "accumulation must be at least 1"),
        ({"sequence": 0}, "sequence must be at least 1"),
        ({"image": -224}, "image must be at least 1"),
        ({"checkpointing": "every-0"}, "K a whole number from 1"),
        ({"checkpointing": "every-K"}, "K a whole number from 1"),
        ({"checkpointing": "every-²"}, "K a whole number from 1"),
        ({"checkpointing": "some"}, "unknown checkpointing 'some'"),
        ({"checkpointing": True}, "checkpointing must be a word"),
        ({"attention": "xformers"}, "unknown attention"),
        ({"attention": "flash", "precision": "fp32"}, "16 bits only"),
        ({"dropout": 1.0}, "below 1"),
        ({"dropout": -0.1}, "at least 0"),
        ({"dropout": math.nan}, "at least 0"),
        ({"dropout": "0.1"}, "dropout must be a number"),
        ({"set_to_none": 1}, "set_to_none must be true or false"),
        ({"zero_stage": 4, "world_size": 8}, "0, 1, 2 or 3"),
        ({"zero_stage": 3}, "world_size must be above 1"),
        ({"zero_stage": 1, "world_size": 8, "tensor_parallel": 8}, "takes all 8 GPUs"),
        ({"tensor_parallel": 2}, "must divide world_size 1"),
        ({"tensor_parallel": 3, "world_size": 8}, "must divide world_size 8"),
        ({"offload": "optimizer_states:cpu"}, "offload must be a list"),
        ({"offload": ("optimizer_states",)}, "WHAT:WHERE"),
        ({"offload": ("weights:cpu",)}, "unknown thing to offload"),
        ({"offload": ("optimizer_states:disk",)}, "unknown place to offload to"),
        ({"offload": ("gradients:cpu", "gradients:nvme")}, "gradients twice"),
        ({"offload": 5}, "offload must be a list"),
        ({"offload": (1,)}, "offload must be a list"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_reason(fields, said):
    with pytest.raises(RecipeError) as error:
        Recipe(**fields)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("gpt2", {"sequence": 2048}, "longer than the 1024 learned positions"),
        ("gpt2", {"image": 224}, "image is for convnets"),
        ("gpt2", {"checkpointing": "every-13"}, "at most 12"),
        ("gpt2", {"tensor_parallel": 8, "world_size": 8}, "doesn't divide gpt2's 12 heads"),
        ("llama2-70b", {"tensor_parallel": 16, "world_size": 16}, "doesn't divide llama2-70b's 8 kv_heads"),
        ("llama2-7b", {"dropout": 0.1}, "has no dropout layers"),
        ("resnet50", {"sequence": 128}, "sequence is for transformers"),
        ("resnet50", {"attention": "eager"}, "has no attention"),
        ("resnet50", {"checkpointing": "selective"}, "is for transformer blocks"),
        ("resnet50", {"tensor_parallel": 2, "world_size": 2}, "tensor_parallel splits transformer layers"),
        ("resnet50", {"image": 16}, "too small"),
        ("resnet50", {"image": 32}, "one value per channel"),
        ("resnet50", {"dropout": 0.5}, "has no dropout layers"),
        ("alexnet", {"checkpointing": "full"}, "no repeated blocks"),
        ("lenet5", {"image": 28}, "exactly 32 pixels"),
        ("vgg19", {"checkpointing": "every-6"}, "at most 5"),
    ],
    ids=str,
)
def test_what_a_model_cannot_do_is_refused_with_the_reason(name, fields, said):
    with pytest.raises(RecipeError) as error:
        Recipe(**fields).resolve(model(name))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_flash_needs_narrow_heads_and_ampere():
    wide = from_hf(
        {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 2, "num_hidden_layers": 1,
         "intermediate_size": 64, "vocab_size": 10, "max_position_embeddings": 64}
    )  # fmt: skip
    with pytest.raises(RecipeError, match="at most 256 wide"):
        Recipe(attention="flash").resolve(wide)
    with pytest.raises(RecipeError, match=r"T4 has 7\.5"):
        Recipe(attention="flash").resolve(model("gpt2"), gpu("t4"))
    assert Recipe(attention="flash").resolve(model("gpt2"), gpu("a100-80gb")).attention == "flash"


def test_what_is_allowed_and_worth_saying():
    rope = model("llama2-7b")
    assert (
        Recipe(sequence=8192)
        .resolve(rope)
        .notes(rope)[0]
        .startswith("sequence 8192 is beyond the context of 4096")
    )
    assert Recipe().resolve(rope).notes(rope) == []
    assert "T4 has no bf16 arithmetic" in Recipe().notes(rope, gpu("t4"))[0]
    assert Recipe(precision="amp-fp16").notes(rope, gpu("t4")) == []


@pytest.mark.parametrize("config", MODELS.values(), ids=lambda config: config.name)
def test_the_default_recipe_suits_every_model(config):
    recipe = Recipe().resolve(config)
    assert (recipe.sequence is None) != (recipe.image is None)
    assert recipe.resolve(config) == recipe


def test_implementations_follow_the_optimizer_unless_chosen():
    assert Recipe().optimizer_impl == "foreach"
    assert Recipe(optimizer="adafactor").optimizer_impl == "for-loop"  # torch's own default for it
    assert Recipe(optimizer="adafactor", optimizer_impl="foreach").optimizer_impl == "foreach"
    assert Recipe().replace(optimizer="adamw-8bit").optimizer_impl == "for-loop"
    assert Recipe(optimizer="adafactor").replace(optimizer="sgd").optimizer_impl == "foreach"
    with pytest.raises(RecipeError, match="has no fused"):
        Recipe(optimizer_impl="fused").replace(optimizer="adamw-8bit")


# -- bytes per parameter ----------------------------------------------------------------------------------


def bytes_per_parameter(recipe, shape=(4096, 4096)):
    of = {"fp32": 4, "bf16": 2}
    states = sum(tensor.bytes for tensor in recipe.state_tensors(shape)) / math.prod(shape)
    return of[recipe.parameter_dtype], of[recipe.gradient_dtype], states


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"precision": "fp32"}, (4, 4, 8)),
        ({"precision": "amp-bf16"}, (4, 4, 8)),  # mixed precision halves no state
        ({"precision": "amp-fp16"}, (4, 4, 8)),
        ({"precision": "bf16"}, (2, 2, 4)),
        ({"precision": "bf16-master"}, (2, 2, 12)),
        ({"precision": "fp32", "optimizer": "sgd"}, (4, 4, 0)),
        ({"precision": "fp32", "optimizer": "momentum"}, (4, 4, 4)),
        ({"precision": "fp32", "optimizer": "adam"}, (4, 4, 8)),
        ({"precision": "bf16", "optimizer": "adamw-8bit"}, (2, 2, 2 + 8 / BLOCK_8BIT)),
        ({"precision": "bf16-master", "optimizer": "sgd"}, (2, 2, 4)),
        ({"precision": "fp32", "optimizer": "adafactor"}, (4, 4, 2 * 4 * 4096 / 4096**2)),
    ],
    ids=str,
)
def test_bytes_per_parameter(fields, expected):
    assert bytes_per_parameter(Recipe(**fields)) == pytest.approx(expected)


def test_state_tensors_have_torchs_names():
    assert [t.name for t in Recipe(optimizer_impl="fused").state_tensors((3,))] == [
        "step",
        "exp_avg",
        "exp_avg_sq",
    ]
    assert [t.name for t in Recipe(precision="bf16-master", optimizer="momentum").state_tensors((3,))] == [
        "master",
        "momentum_buffer",
    ]
    assert [t.shape for t in Recipe(optimizer="adafactor").state_tensors((8, 4, 3, 3))] == [
        (8, 4, 3, 1),
        (8, 4, 1, 3),
    ]
    assert [t.name for t in Recipe(optimizer="adafactor").state_tensors((8,))] == ["variance"]
    small, large = (Recipe(optimizer="adamw-8bit").state_tensors((n,)) for n in (MIN_8BIT - 1, MIN_8BIT + 1))
    assert {t.dtype for t in small} == {"fp32"}
    assert sum(t.bytes for t in large) == 2 * (MIN_8BIT + 1) + 2 * 4 * (MIN_8BIT // BLOCK_8BIT + 1)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adamw-8bit"}))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_tensors_are_what_torch_keeps(optimizer, dtype):
    import torch

    recipe = Recipe(precision=dtype, optimizer=optimizer)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }[optimizer]
    for shape in [(5,), (3, 4), (2, 3, 5, 5)]:
        p = torch.nn.Parameter(
            torch.ones(shape, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        )
        p.grad = torch.ones_like(p)
        live = make([p])
        live.step()
        # Adam's and Adafactor's step counter lives on the CPU, whatever the device: not the GPU's memory
        kept = {k: t for k, t in live.state[p].items() if torch.is_tensor(t) and k != "step"}
        ours = {t.name: t for t in recipe.state_tensors(shape)}
        assert kept.keys() == ours.keys()
        for name, tensor in kept.items():
            assert tuple(tensor.shape) == ours[name].shape
            assert tensor.nbytes == ours[name].bytes


# -- in and out -------------------------------------------------------------------------------------------


@st.composite
def recipes(draw):
    tensor_parallel = draw(st.sampled_from([1, 2, 4]))
    data_parallel = draw(st.sampled_from([1, 3, 8]))
    lora_rank = None if tensor_parallel > 1 else draw(st.none() | st.integers(1, 512))
    without = {"fp16"} if lora_rank is None else {"bf16-master"}
    precision = draw(st.sampled_from(sorted(set(PRECISIONS) - without)))
    targets = st.sampled_from([*LORA_TARGETS, ("query", "mlp.up")])
    what = draw(st.lists(st.sampled_from(OFFLOAD_WHAT), unique=True))
    return Recipe(
        precision=precision,
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        micro_batch=draw(st.integers(1, 64)),
        accumulation=draw(st.integers(1, 64)),
        sequence=draw(st.none() | st.integers(1, 10**6)),
        checkpointing=draw(st.sampled_from(["none", "full", "selective", "every-1", "every-7"])),
        attention=draw(st.sampled_from([a for a in ATTENTION if a != "flash" or precision != "fp32"])),
        dropout=draw(st.floats(0, 0.99)),
        set_to_none=draw(st.booleans()),
        zero_stage=draw(st.integers(0, 3)) if data_parallel > 1 else 0,
        world_size=data_parallel * tensor_parallel,
        tensor_parallel=tensor_parallel,
        offload=tuple(f"{item}:{draw(st.sampled_from(OFFLOAD_WHERE))}" for item in what),
        lora_rank=lora_rank,
        lora_targets="attention" if lora_rank is None else draw(targets),
    )


@given(recipes())
def test_recipes_survive_being_written_out(recipe):
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.replace() == recipe
    assert replace(recipe) == recipe
    assert recipe.data_parallel * recipe.tensor_parallel == recipe.world_size
    assert max(map(len, recipe.describe().splitlines())) <= 80


def toml(values):
    def text(value):
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return "[" + ", ".join(map(text, value)) + "]"
        return f'"{value}"' if isinstance(value, str) else str(value)

    return "\n".join(f"{key} = {text(value)}" for key, value in values.items() if value is not None)


@given(recipe=recipes())
def test_every_field_is_a_toml_key(recipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("toml") / "recipe.toml"
    path.write_text(toml(recipe.to_dict()), encoding="utf-8")
    assert Recipe.from_toml(path) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("micro_bach = 4", "unknown recipe field 'micro_bach': did you mean micro_batch"),
        ("micro_batch = '4'", "micro_batch must be a whole number, not '4'"),
        ("micro_batch = 4\nmicro_batch = 5", "not valid TOML"),
        ("precision = 16", "unknown precision"),
        ("precision = ['fp32']", "unknown precision"),
        ("[recipe]\nmicro_batch = 4", "unknown recipe field 'recipe'"),
        ("offload = 'optimizer_states:cpu'", "offload must be a list"),
        ("sequence = 2024-01-01", "sequence must be a whole number"),
        ("zero_stage = 3", "world_size must be above 1"),
        ("dropout = [0.1]", "dropout must be a number"),
        ("{", "not valid TOML"),
    ],
)
def test_a_toml_file_that_is_wrong_is_one_line_with_its_path(text, said, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        Recipe.from_toml(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_toml_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.toml: can't read the recipe"):
        Recipe.from_toml(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="can't read the recipe"):
        Recipe.from_toml(tmp_path)
    (tmp_path / "r.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="isn't UTF-8"):
        Recipe.from_toml(tmp_path / "r.toml")


def test_every_field_says_what_it_is():
    assert all(field.metadata.get("help") for field in fields(Recipe))


def test_offloaded():
    recipe = Recipe(offload=("optimizer_states:cpu", "activations:nvme"))
    assert recipe.offloaded("optimizer_states") == "cpu"
    assert recipe.offloaded("activations") == "nvme"
    assert recipe.offloaded("parameters") is None


def test_what_follows_from_the_precision():
    assert Recipe().autocast and not Recipe().grad_scaler
    assert Recipe(precision="amp-fp16").grad_scaler
    assert not Recipe(precision="bf16").autocast
    assert Recipe(checkpointing="full").checkpoint_every == 1
    assert Recipe(checkpointing="every-3").checkpoint_every == 3
    assert Recipe(checkpointing="selective").checkpoint_every is None
