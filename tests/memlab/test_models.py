"""Architectures: parameter counts against published numbers and against formulas written another way."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab.models import MODELS, ConfigError, ConvConfig, TransformerConfig, from_hf, model, parse_config
from memlab.units import UnknownNameError

# Published or counted elsewhere: transformers (GPT-2, BERT with pooler, Llama, Qwen2.5, SmolLM2, TinyLlama,
# Mistral), torchvision (AlexNet, VGG-19, ResNets); DenseNet-264 has no released weights, its count is that of
# the paper's table.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "lenet5": 61_706,
    "alexnet": 61_100_840,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "densenet264": 33_337_704,
}


def gpt2_count(layers, h, vocab, context):
    return layers * (12 * h * h + 13 * h) + (vocab + context) * h + 2 * h


def test_every_model_has_its_published_count():
    assert {
        name: config.parameter_count for name, config in MODELS.items() if name != "gpt3-175b"
    } == PUBLISHED


def test_gpt3_is_the_papers_formula():
    assert model("gpt3-175b").parameter_count == gpt2_count(96, 12288, 50257, 2048) == 174_604_259_328


@pytest.mark.parametrize("config", MODELS.values(), ids=lambda config: config.name)
def test_names_are_unique_and_counts_add_up(config):
    names = [tensor.name for tensor in config.parameters()] + [buffer.name for buffer in config.buffers()]
    assert len(names) == len(set(names))
    assert config.parameter_count == sum(tensor.count for tensor in config.parameters())
    assert config.source


def test_a_tied_head_appears_once():
    names = [tensor.name for tensor in model("gpt2").parameters()]
    assert "embed.token.weight" in names and "head.weight" not in names
    assert "head.weight" in [tensor.name for tensor in model("llama2-7b").parameters()]


def test_batch_norm_keeps_three_buffers_a_layer():
    buffers = model("resnet50").buffers()
    assert len(buffers) == 53 * 3
    assert sum(buffer.bytes for buffer in buffers) == 2 * 26_560 * 4 + 53 * 8  # 26,560 channels in all
    assert model("vgg19").buffers() == ()


sizes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 6),
        "heads": st.integers(1, 8),
        "width": st.integers(1, 32).map(lambda n: 2 * n),
        "vocab": st.integers(1, 1000),
        "context": st.integers(1, 512),
        "ffn": st.integers(1, 400),
        "tied": st.booleans(),
    }
)


@given(sizes)
def test_gpt2_count_in_closed_form(s):
    h = s["heads"] * s["width"]
    config = from_hf(
        {"model_type": "gpt2", "n_embd": h, "n_head": s["heads"], "n_layer": s["layers"],
         "vocab_size": s["vocab"], "n_positions": s["context"]}
    )  # fmt: skip
    assert config.parameter_count == gpt2_count(s["layers"], h, s["vocab"], s["context"])


@given(sizes, st.integers(1, 8), st.sampled_from(["llama", "mistral", "qwen2"]))
def test_llama_count_in_closed_form(s, kv_heads, kind):
    heads, width = s["heads"] * kv_heads, s["width"]
    h = heads * width
    config = from_hf(
        {"model_type": kind, "hidden_size": h, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
         "num_hidden_layers": s["layers"], "intermediate_size": s["ffn"], "vocab_size": s["vocab"],
         "max_position_embeddings": s["context"], "tie_word_embeddings": s["tied"]}
    )  # fmt: skip
    kv = kv_heads * width
    block = 2 * h * h + 2 * h * kv + 3 * h * s["ffn"] + 2 * h + (h + 2 * kv if kind == "qwen2" else 0)
    heads_of_vocabulary = 1 if s["tied"] else 2
    assert config.parameter_count == s["layers"] * block + heads_of_vocabulary * s["vocab"] * h + h


def test_names_in_any_spelling():
    for typed in ("llama2-7b", "LLaMA-2-7B", "Llama_2 7b"):
        assert model(typed).name == "llama2-7b"
    assert model("GPT2-XL").name == "gpt2-xl"
    assert model("ResNet-152").name == "resnet152"
    assert model("bert-large-uncased").name == "bert-large"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("gtp2", "did you mean gpt2"),
        ("resnet51", "did you mean resnet"),
        ("", "known:"),
        (7, "unknown model"),
    ],
)
def test_unknown_names(typed, said):
    with pytest.raises(UnknownNameError, match=said) as error:
        model(typed)
    assert "\n" not in str(error.value)


# -- config.json ------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize(("values", "name"), [(LLAMA, "llama2-70b"), (GPT2, "gpt2"), (BERT, "bert-large")])
def test_a_config_json_gives_the_model_that_we_know(values, name, tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for source in (folder, folder / "config.json", str(folder / "config.json"), values):
        config = from_hf(source)
        ours = model(name)
        assert config.parameters() == ours.parameters()
        assert isinstance(ours, TransformerConfig)
        same = (
            "activation",
            "context",
            "tied",
            "norm",
            "norm_eps",
            "positions",
            "rope_theta",
            "qkv_bias",
            "family",
        )
        assert all(getattr(config, key) == getattr(ours, key) for key in same)
    assert model(str(folder / "config.json")).name == "some-model"


def test_qwen_has_biases_and_a_head_width_of_its_own_is_kept():
    config = from_hf(LLAMA | {"model_type": "qwen2", "head_dim": 64})
    shapes = {tensor.name: tensor.shape for tensor in config.parameters()}
    assert shapes["blocks.0.attn.query.bias"] == (64 * 64,)
    assert shapes["blocks.0.attn.out.weight"] == (8192, 64 * 64)
    assert "blocks.0.attn.out.bias" not in shapes


def test_dropout_and_what_is_ignored_are_kept_for_the_notes():
    asked = GPT2 | {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0}
    assert from_hf(asked).asked_dropout == 0.2
    assert not from_hf(GPT2).asked_dropout and not from_hf(LLAMA | {"sliding_window": None}).ignored
    [head] = from_hf(LLAMA | {"architectures": ["LlamaForSequenceClassification"]}).ignored
    assert head == "the head of LlamaForSequenceClassification isn't counted; the language model's is."
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "BertModel"):
        assert not from_hf(LLAMA | {"architectures": [name]}).ignored
    window = LLAMA | {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False}
    assert not from_hf(window).ignored  # Qwen2's configs name a window that they don't use


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000, "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60]
)
def test_deep_nesting_ends_before_the_stack(text):
    with pytest.raises(ConfigError, match=r"^c\.json: lists and objects in each other"):
        parse_config(text, "c.json")


def test_brackets_in_strings_are_text():
    assert parse_config(json.dumps({"[" * 99: '\\"{' * 99, "b": {}})) == {"[" * 99: '\\"{' * 99, "b": {}}


def test_newer_configs_keep_theta_among_the_rope_parameters():
    values = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert from_hf(values | {"rope_parameters": {"rope_theta": 500000.0}}).rope_theta == 500_000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "t5"}, "model type 't5' isn't supported here: gpt2, bert, llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, "isn't supported"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
        (LLAMA | {"hidden_size": -1}, "hidden_size must be a whole number from 1"),
        (LLAMA | {"hidden_size": "8192"}, "hidden_size must be a whole number"),
        (LLAMA | {"num_attention_heads": 60}, "60 heads"),
        (LLAMA | {"num_key_value_heads": 7}, "num_key_value_heads 7"),
        (LLAMA | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (GPT2 | {"n_head": 7}, "7 heads"),
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_a_config_that_is_no_model_of_ours_is_refused(values, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=said) as error:
        from_hf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1]", '"llama"', "\x00", "{} {}", "[" * 100_000])
def test_bad_json_is_one_line(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        from_hf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        model(str(tmp_path / "none.json"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not"):
        from_hf(tmp_path)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*LLAMA, *GPT2})),
        st.one_of(st.none(), st.integers(-2, 64), st.text(max_size=4), st.booleans()),
    ),
    st.sampled_from(["gpt2", "bert", "llama", "qwen2"]),
)
def test_any_config_is_a_model_or_a_one_line_error(values, kind):
    try:
        config = from_hf(values | {"model_type": kind})
    except ConfigError as error:
        assert str(error).startswith("config: ")
    else:
        assert config.parameter_count > 0


def test_conv_shapes_are_only_for_plain_stacks():
    vgg = model("vgg19")
    assert isinstance(vgg, ConvConfig)
    assert len(vgg.conv_shapes()) == 16 and vgg.conv_shapes()[0] == (3, 64, 3)
    assert vgg.blocks == 5 and model("resnet152").blocks == 50 and model("alexnet").blocks == 0
