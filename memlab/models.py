"""Architectures as data, with every parameter by name and shape: no weights, no torch.

`model("gpt2")` gives a `TransformerConfig` or a `ConvConfig`; `config.parameters()` lists what is trained, in
the module's order, `config.buffers()` what isn't trained but lives on the GPU. `memlab.nets` builds modules
whose `named_parameters()` and `named_buffers()` have exactly these names and shapes. A tied tensor appears
once. Linear weights are (out, in), convolutions (out, in, rows, columns), embeddings (vocabulary, hidden).

The names (i counts blocks from 0)::

    gpt2   embed.token.weight  embed.position.weight
           blocks.i.norm1.{weight,bias}     blocks.i.attn.qkv.{weight,bias}   blocks.i.attn.out.{weight,bias}
           blocks.i.norm2.{weight,bias}     blocks.i.mlp.up.{weight,bias}     blocks.i.mlp.down.{weight,bias}
           norm.{weight,bias}               (head: the token embedding, tied)
    bert   embed.token.weight  embed.position.weight  embed.type.weight  embed.norm.{weight,bias}
           blocks.i.attn.{query,key,value,out}.{weight,bias}   blocks.i.norm1.{weight,bias}  (after attention)
           blocks.i.mlp.{up,down}.{weight,bias}                blocks.i.norm2.{weight,bias}  (after the MLP)
           pooler.{weight,bias}
    llama  embed.token.weight
           blocks.i.norm1.weight   blocks.i.attn.{query,key,value,out}.weight  (three biases: Qwen2)
           blocks.i.norm2.weight   blocks.i.mlp.{gate,up,down}.weight
           norm.weight             head.weight (unless tied)           buffer: rope.inverse_frequency
    lenet, alexnet, vgg   convs.i.{weight,bias}   fcs.i.{weight,bias}
    resnet    stem.conv.weight  stem.norm.{weight,bias}
              stages.s.b.conv1.weight  .norm1.{weight,bias}  .conv2.weight  .norm2…  .conv3.weight  .norm3…
              stages.s.b.shortcut.conv.weight  .shortcut.norm.{weight,bias}   (first block of a stage)
              fc.{weight,bias}
    densenet  stem.conv.weight  stem.norm.{weight,bias}
              stages.s.b.norm1.{weight,bias}  .conv1.weight  .norm2.{weight,bias}  .conv2.weight
              transitions.s.norm.{weight,bias}  transitions.s.conv.weight   (after every stage but the last)
              norm.{weight,bias}   fc.{weight,bias}
    every batch norm: buffers .running_mean, .running_var (fp32), .num_batches_tracked (int64)

What is trained: gpt2 and llama families predict the next token (logits over the vocabulary, cross entropy).
BERT is the encoder with its pooler, the model that published counts mean (bert-large: 335,141,888): no
masked-language head. Its loss is a cross entropy over the pooled vector, one target per sequence, the pooled
vector serving as the logits: every parameter gets a gradient and no head is added. Convnets classify (cross
entropy).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from memlab.files import read_up_to
from memlab.units import DTYPE_BYTES, unknown_name


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's name in the module and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferSpec:
    """A tensor that is part of the model and isn't trained; its dtype doesn't follow the precision."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class ConfigError(ValueError):
    """A config.json that can't be read as one of the known architectures."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A dense transformer of the GPT-2, BERT or Llama family (Mistral and Qwen2 are of the last).

    `positions` is 'learned' (an embedding, the context is a hard limit) or 'rope'. `head_dim` is the width of
    one head; query is (heads * head_dim, hidden), key and value are (kv_heads * head_dim, hidden).
    """

    name: str
    family: str  # 'gpt2', 'bert', 'llama'
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    tied: bool  # the output head is the token embedding (BERT has no head)
    qkv_bias: bool
    activation: str  # 'gelu_tanh' (GPT-2's gelu_new), 'gelu', 'silu' (gated: silu(gate) * up)
    norm: str  # 'layernorm', 'rmsnorm'
    norm_eps: float
    positions: str  # 'learned', 'rope'
    rope_theta: float | None = None
    type_vocab: int = 0
    asked_dropout: float = 0.0  # of its config.json; what counts is the recipe's
    ignored: tuple[str, ...] = ()  # what its config.json asks for and no figure holds, one sentence each
    source: str = ""

    @property
    def blocks(self) -> int:
        """Blocks that activation checkpointing can wrap."""
        return self.layers

    @property
    def has_dropout(self) -> bool:
        """GPT-2 and BERT were published with dropout 0.1, the Llama family has none."""
        return self.family != "llama"

    @property
    def causal(self) -> bool:
        return self.family != "bert"

    @cached_property
    def _parameters(self) -> tuple[ParameterSpec, ...]:
        walk = {"gpt2": self._gpt2, "bert": self._bert, "llama": self._llama}[self.family]
        return tuple(ParameterSpec(name, shape) for name, shape in walk())

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Every trained tensor once, in the module's order."""
        return self._parameters

    @cached_property
    def linear_layers(self) -> frozenset[str]:
        """Names of the linear layers, without the head: what LoRA can adapt and 4 bits can hold."""
        inside = ("attn", "mlp")
        names = (p.name.removesuffix(".weight") for p in self._parameters if p.name.endswith(".weight"))
        return frozenset(n for n in names if n == "pooler" or n.split(".")[-2:-1] in ([i] for i in inside))

    def buffers(self) -> tuple[BufferSpec, ...]:
        if self.positions == "rope":
            return (BufferSpec("rope.inverse_frequency", (self.head_dim // 2,), "fp32"),)
        return ()

    @cached_property
    def parameter_count(self) -> int:
        return sum(p.count for p in self._parameters)

    def _gpt2(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, width = self.hidden, self.heads * self.head_dim
        yield "embed.token.weight", (self.vocab, h)
        yield "embed.position.weight", (self.context, h)
        for i in range(self.layers):
            block = f"blocks.{i}."
            yield from _norm(block + "norm1", h)
            yield from _linear(block + "attn.qkv", h, 3 * width)
            yield from _linear(block + "attn.out", width, h)
            yield from _norm(block + "norm2", h)
            yield from _linear(block + "mlp.up", h, self.ffn)
            yield from _linear(block + "mlp.down", self.ffn, h)
        yield from _norm("norm", h)
        if not self.tied:
            yield "head.weight", (self.vocab, h)

    def _bert(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, width = self.hidden, self.heads * self.head_dim
        yield "embed.token.weight", (self.vocab, h)
        yield "embed.position.weight", (self.context, h)
        yield "embed.type.weight", (self.type_vocab, h)
        yield from _norm("embed.norm", h)
        for i in range(self.layers):
            block = f"blocks.{i}."
            for part in ("query", "key", "value"):
                yield from _linear(f"{block}attn.{part}", h, width)
            yield from _linear(block + "attn.out", width, h)
            yield from _norm(block + "norm1", h)
            yield from _linear(block + "mlp.up", h, self.ffn)
            yield from _linear(block + "mlp.down", self.ffn, h)
            yield from _norm(block + "norm2", h)
        yield from _linear("pooler", h, h)

    def _llama(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h, width, kv_width = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "embed.token.weight", (self.vocab, h)
        for i in range(self.layers):
            block = f"blocks.{i}."
            yield block + "norm1.weight", (h,)
            for part, out in (("query", width), ("key", kv_width), ("value", kv_width)):
                yield from _linear(f"{block}attn.{part}", h, out, bias=self.qkv_bias)
            yield from _linear(block + "attn.out", width, h, bias=False)
            yield block + "norm2.weight", (h,)
            yield from _linear(block + "mlp.gate", h, self.ffn, bias=False)
            yield from _linear(block + "mlp.up", h, self.ffn, bias=False)
            yield from _linear(block + "mlp.down", self.ffn, h, bias=False)
        yield "norm.weight", (h,)
        if not self.tied:
            yield "head.weight", (self.vocab, h)


@dataclass(frozen=True, kw_only=True)
class ConvConfig:
    """An image classifier. `widths` and `depths` are per stage; what they mean depends on the family:

    lenet      widths of the convolutions; fcs the hidden widths of the classifier
    alexnet    the same
    vgg        stage s: `depths[s]` 3x3 convolutions of `widths[s]`, then a 2x2 maximum; fcs as above
    resnet     stage s: `depths[s]` bottleneck blocks of inner width `widths[s]`, outer 4 * `widths[s]`
    densenet   stage s: `depths[s]` layers that add `growth` channels each; `widths` holds the stem's width
    """

    name: str
    family: str  # 'lenet', 'alexnet', 'vgg', 'resnet', 'densenet'
    image: int
    channels: int
    classes: int
    widths: tuple[int, ...]
    depths: tuple[int, ...] = ()
    fcs: tuple[int, ...] = ()
    growth: int = 0
    min_image: int = 32
    source: str = ""

    @property
    def blocks(self) -> int:
        """Blocks that activation checkpointing can wrap: VGG stages, residual blocks, dense layers, or 0."""
        if self.family == "vgg":
            return len(self.depths)
        return sum(self.depths)

    @property
    def has_dropout(self) -> bool:
        """AlexNet and VGG drop out in their classifier (0.5 as published), the others nowhere."""
        return self.family in ("alexnet", "vgg")

    @property
    def linear_layers(self) -> frozenset[str]:
        """None that LoRA would adapt: those of a convnet are its classifier."""
        return frozenset()

    @property
    def batch_norm(self) -> bool:
        return self.family in ("resnet", "densenet")

    @property
    def fixed_image(self) -> bool:
        """LeNet-5's classifier fits one image size; the others pool to a fixed size first."""
        return self.family == "lenet"

    @cached_property
    def _tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        walk = {"lenet": self._plain, "alexnet": self._plain, "vgg": self._plain,
                "resnet": self._resnet, "densenet": self._densenet}[self.family]  # fmt: skip
        return tuple(walk())

    @cached_property
    def _parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(ParameterSpec(name, shape) for name, shape in self._tensors)

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """Every trained tensor once, in the module's order."""
        return self._parameters

    def buffers(self) -> tuple[BufferSpec, ...]:
        """The running statistics of every batch norm."""
        found = []
        if self.batch_norm:
            for name, shape in self._tensors:
                layer, _, kind = name.rpartition(".")
                if kind == "weight" and layer.rpartition(".")[2].startswith("norm"):
                    found += [
                        BufferSpec(layer + ".running_mean", shape, "fp32"),
                        BufferSpec(layer + ".running_var", shape, "fp32"),
                        BufferSpec(layer + ".num_batches_tracked", (), "int64"),
                    ]
        return tuple(found)

    @cached_property
    def parameter_count(self) -> int:
        return sum(p.count for p in self._parameters)

    def conv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(in, out, kernel) of each convolution of the families without branches (lenet, alexnet, vgg)."""
        kernels: tuple[int, ...]
        if self.family == "vgg":
            outs = [w for w, d in zip(self.widths, self.depths, strict=True) for _ in range(d)]
            kernels = (3,) * len(outs)
        else:
            outs = list(self.widths)
            kernels = (5, 5) if self.family == "lenet" else (11, 5, 3, 3, 3)
        return tuple(zip([self.channels, *outs[:-1]], outs, kernels, strict=True))

    @property
    def pooled(self) -> int:
        """Pixels per side that the classifier of lenet, alexnet and vgg reads."""
        return {"lenet": 5, "alexnet": 6, "vgg": 7}[self.family]

    def _plain(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for i, (inside, out, kernel) in enumerate(self.conv_shapes()):
            yield f"convs.{i}.weight", (out, inside, kernel, kernel)
            yield f"convs.{i}.bias", (out,)
        inside = self.widths[-1] * self.pooled**2
        for i, out in enumerate((*self.fcs, self.classes)):
            yield from _linear(f"fcs.{i}", inside, out)
            inside = out

    def _resnet(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        stem = self.widths[0]
        yield "stem.conv.weight", (stem, self.channels, 7, 7)
        yield from _norm("stem.norm", stem)
        inside = stem
        for s, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            outside = 4 * width
            for b in range(depth):
                block = f"stages.{s}.{b}."
                yield block + "conv1.weight", (width, inside, 1, 1)
                yield from _norm(block + "norm1", width)
                yield block + "conv2.weight", (width, width, 3, 3)
                yield from _norm(block + "norm2", width)
                yield block + "conv3.weight", (outside, width, 1, 1)
                yield from _norm(block + "norm3", outside)
                if b == 0:
                    yield block + "shortcut.conv.weight", (outside, inside, 1, 1)
                    yield from _norm(block + "shortcut.norm", outside)
                inside = outside
        yield from _linear("fc", inside, self.classes)

    def _densenet(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width = self.widths[0]
        bottleneck = 4 * self.growth
        yield "stem.conv.weight", (width, self.channels, 7, 7)
        yield from _norm("stem.norm", width)
        last = len(self.depths) - 1
        stages: list[tuple[str, tuple[int, ...]]] = []
        transitions: list[tuple[str, tuple[int, ...]]] = []
        for s, depth in enumerate(self.depths):
            for b in range(depth):
                layer = f"stages.{s}.{b}."
                stages += _norm(layer + "norm1", width)
                stages.append((layer + "conv1.weight", (bottleneck, width, 1, 1)))
                stages += _norm(layer + "norm2", bottleneck)
                stages.append((layer + "conv2.weight", (self.growth, bottleneck, 3, 3)))
                width += self.growth
            if s != last:
                transitions += _norm(f"transitions.{s}.norm", width)
                transitions.append((f"transitions.{s}.conv.weight", (width // 2, width, 1, 1)))
                width //= 2
        yield from stages
        yield from transitions
        yield from _norm("norm", width)
        yield from _linear("fc", width, self.classes)


def _linear(name: str, inside: int, out: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (out, inside)
    if bias:
        yield name + ".bias", (out,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (width,)
    yield name + ".bias", (width,)


# -- the models -------------------------------------------------------------------------------------------


def _gpt2(
    name: str, layers: int, hidden: int, heads: int, context: int = 1024, source: str = ""
) -> TransformerConfig:
    return TransformerConfig(
        name=name, family="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=4 * hidden, vocab=50257, context=context, tied=True, qkv_bias=True,
        activation="gelu_tanh", norm="layernorm", norm_eps=1e-5, positions="learned",
        source=source or f"config.json of openai-community/{name}",
    )  # fmt: skip


def _bert(name: str, layers: int, hidden: int, heads: int) -> TransformerConfig:
    return TransformerConfig(
        name=name, family="bert", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, ffn=4 * hidden, vocab=30522, context=512, tied=False, qkv_bias=True,
        activation="gelu", norm="layernorm", norm_eps=1e-12, positions="learned", type_vocab=2,
        source=f"config.json of google-bert/{name}-uncased",
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int,
    *, tied: bool = False, qkv_bias: bool = False, eps: float = 1e-5, theta: float = 10_000.0, source: str,
) -> TransformerConfig:  # fmt: skip
    return TransformerConfig(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=hidden // heads, ffn=ffn, vocab=vocab, context=context, tied=tied, qkv_bias=qkv_bias,
        activation="silu", norm="rmsnorm", norm_eps=eps, positions="rope", rope_theta=theta, source=source,
    )  # fmt: skip


def _resnet(name: str, depths: tuple[int, ...]) -> ConvConfig:
    return ConvConfig(
        name=name, family="resnet", image=224, channels=3, classes=1000, widths=(64, 128, 256, 512),
        depths=depths,
        source="He et al., arXiv:1512.03385, table 1; stride in the 3x3 convolution, as torchvision",
    )  # fmt: skip


_ALL: tuple[TransformerConfig | ConvConfig, ...] = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    _gpt2("gpt3-175b", 96, 12288, 96, context=2048,
          source="Brown et al., arXiv:2005.14165, table 2.1; dense attention in every layer (the paper "
          "alternates dense and sparse), GPT-2's vocabulary of 50257"),
    _bert("bert-base", 12, 768, 12),
    _bert("bert-large", 24, 1024, 16),
    _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096,
           source="config.json of meta-llama/Llama-2-7b-hf"),
    _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096,
           source="config.json of meta-llama/Llama-2-13b-hf"),
    _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096,
           source="config.json of meta-llama/Llama-2-70b-hf"),
    _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, theta=500_000.0,
           source="config.json of meta-llama/Meta-Llama-3-8B"),
    _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, theta=500_000.0,
           source="config.json of meta-llama/Meta-Llama-3-70B"),
    _llama("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, 32768, tied=True, qkv_bias=True, eps=1e-6,
           theta=1_000_000.0, source="config.json of Qwen/Qwen2.5-1.5B-Instruct"),
    _llama("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 32768, qkv_bias=True, eps=1e-6, theta=1_000_000.0,
           source="config.json of Qwen/Qwen2.5-7B-Instruct"),
    _llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000, 2048,
           source="config.json of TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    _llama("smollm2-135m", 30, 576, 9, 3, 1536, 49152, 8192, tied=True, theta=100_000.0,
           source="config.json of HuggingFaceTB/SmolLM2-135M"),
    _llama("smollm2-360m", 32, 960, 15, 5, 2560, 49152, 8192, tied=True, theta=100_000.0,
           source="config.json of HuggingFaceTB/SmolLM2-360M"),
    _llama("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, 8192, tied=True, theta=130_000.0,
           source="config.json of HuggingFaceTB/SmolLM2-1.7B"),
    _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 32768, theta=1_000_000.0,
           source="config.json of mistralai/Mistral-7B-Instruct-v0.2 (v0.1 has the same shapes and a sliding "
           "window of 4096)"),
    ConvConfig(
        name="lenet5", family="lenet", image=32, channels=1, classes=10, widths=(6, 16), fcs=(120, 84),
        source="LeCun et al. 1998, as taught today: plain average pooling without coefficients, C3 connected "
        "to all of S2, ten linear outputs (61,706 parameters; the paper's has 60,000)",
    ),
    ConvConfig(
        name="alexnet", family="alexnet", image=224, channels=3, classes=1000,
        widths=(64, 192, 384, 256, 256), fcs=(4096, 4096), min_image=63,
        source="Krizhevsky, arXiv:1404.5997 (one tower, no local response normalization), as torchvision",
    ),
    ConvConfig(
        name="vgg19", family="vgg", image=224, channels=3, classes=1000, widths=(64, 128, 256, 512, 512),
        depths=(2, 2, 4, 4, 4), fcs=(4096, 4096),
        source="Simonyan and Zisserman, arXiv:1409.1556, configuration E",
    ),
    _resnet("resnet50", (3, 4, 6, 3)),
    _resnet("resnet152", (3, 8, 36, 3)),
    ConvConfig(
        name="densenet264", family="densenet", image=224, channels=3, classes=1000, widths=(64,),
        depths=(6, 12, 64, 48), growth=32,
        source="Huang et al., arXiv:1608.06993, table 1, growth rate 32; no weights were released",
    ),
)  # fmt: skip

#: Every model the library knows, by name.
MODELS: dict[str, TransformerConfig | ConvConfig] = {config.name: config for config in _ALL}


def _key(name: str) -> str:
    """'Llama-2_7B' and 'llama2-7b' are the same name; a dot is not dropped, 2.5 isn't 25."""
    return "".join(c for c in name.lower() if c not in "-_ ")


_BY_KEY = {_key(name): name for name in MODELS} | {
    _key(alias): name
    for alias, name in {
        "gpt2-small": "gpt2",
        "gpt3": "gpt3-175b",
        "bert-base-uncased": "bert-base",
        "bert-large-uncased": "bert-large",
        "tinyllama": "tinyllama-1.1b",
        "lenet": "lenet5",
    }.items()
}


def model(name: str) -> TransformerConfig | ConvConfig:
    """The config of a known model, in any case and with hyphens anywhere; or of a `config.json` given by its
    path.

    Raises UnknownNameError with near matches, or ConfigError for a file that can't be read.
    """
    if not isinstance(name, str):
        raise unknown_name("model", name, MODELS)
    known = _BY_KEY.get(_key(name))
    if known is not None:
        return MODELS[known]
    if name.endswith(".json") or "/" in name or "\\" in name or Path(name, "config.json").is_file():
        return from_hf(name)
    raise unknown_name("model", name, MODELS)


# -- config.json of Hugging Face --------------------------------------------------------------------------

_ACTIVATIONS = {
    "gpt2": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    "bert": {"gelu": "gelu"},
    "llama": {"silu": "silu", "swish": "silu"},
}
_HF_FAMILY = {"gpt2": "gpt2", "bert": "bert", "llama": "llama", "mistral": "llama", "qwen2": "llama"}


_LAYERS = ("n_layer", "num_hidden_layers")


class _Keys:
    """Reads one config's keys; every error names the file and the key."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number from 1 on, under the first of `names` that is there and not null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{self.where}: {name} must be a whole number from 1, not {value!r}")
            if value > 2**24 or (name in _LAYERS and value > 10_000):
                raise ConfigError(f"{self.where}: {name} = {value} is beyond any model")
            return value
        if default is None:
            raise ConfigError(f"{self.where}: {names[0]} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{self.where}: {name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false, not {value!r}")
        return value

    def activation(self, family: str, name: str, default: str) -> str:
        value = self.values.get(name, default)
        known = _ACTIVATIONS[family]
        if value not in known:
            raise ConfigError(f"{self.where}: {name} {value!r} isn't supported here: {', '.join(known)}")
        return known[value]


def _read_config(path: str | Path) -> tuple[str, Mapping[str, Any]]:
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        text = read_up_to(file, _LARGEST).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: can't read the model's config: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a JSON text") from None
    except ValueError as error:
        raise ConfigError(f"{error}: that is no config.json") from None
    return str(file), parse_config(text, str(file))


_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{}]')
_DEEPEST, _LARGEST = 50, 2**24


def parse_config(text: str, where: str = "config") -> dict[str, Any]:
    """The object that the text of a `config.json` holds. Raises ConfigError, a line that begins with `where`.

    Nesting is bounded before json reads it: where a browser's Python runs out of stack, it is gone.
    """
    depth = 0
    for mark in _MARKS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark.group(), 0)
        if depth > _DEEPEST:
            raise ConfigError(f"{where}: lists and objects in each other, more than {_DEEPEST} deep")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: a config.json holds one object, this one a {type(values).__name__}")
    return values


def from_hf(source: str | Path | Mapping[str, Any]) -> TransformerConfig:
    """A transformer from a Hugging Face `config.json`: its path, its folder, or its content.

    Knows the model types gpt2, bert, llama, mistral and qwen2. Keys that a config leaves out take the
    defaults of `transformers`; sizes must be there. Raises ConfigError, one line with the file and the key,
    for any other type, for missing or impossible values and for bad JSON. What isn't modelled (a sliding
    window, quantized weights) is in `ignored`.
    """
    where, values = ("config", source) if isinstance(source, Mapping) else _read_config(source)
    kind = values.get("model_type")
    if kind is None:
        raise ConfigError(f"{where}: model_type is missing, so this is no Hugging Face model config")
    if not isinstance(kind, str) or kind not in _HF_FAMILY:
        raise ConfigError(f"{where}: model type {kind!r} isn't supported here: {', '.join(_HF_FAMILY)}")
    family = _HF_FAMILY[kind]
    keys = _Keys(where, values)
    named = values.get("_name_or_path") or values.get("name_or_path")
    fallback = Path(where).resolve().parent.name or kind if where != "config" else kind
    name = named.rstrip("/").rpartition("/")[2] if isinstance(named, str) and named.strip("/") else fallback
    if family == "gpt2":
        config = _hf_gpt2(name, keys)
    elif family == "bert":
        config = _hf_bert(name, keys)
    else:
        config = _hf_llama(name, kind, keys)
    dropout = max((keys.number(key, 0.0) for key in _DROPOUTS if keys.values.get(key)), default=0.0)
    return replace(config, asked_dropout=dropout, ignored=tuple(_ignored(keys, config)))


_DROPOUTS = (
    "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)  # fmt: skip


def _ignored(keys: _Keys, config: TransformerConfig) -> Iterator[str]:
    if keys.values.get("quantization_config") is not None:
        yield (
            "its quantization_config isn't read: weights are counted in the recipe's precision. Frozen 4-bit "
            "weights under adapters are lora_rank with base_weights nf4."
        )
    named = keys.values.get("architectures")
    wanted = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "Model"
    if not wanted.endswith(("Model", "ForCausalLM")):
        counted = "the encoder with its pooler" if config.family == "bert" else "the language model's"
        yield f"the head of {wanted} isn't counted; {counted} is."
    window = (
        keys.size("sliding_window", default=config.context) if config.family == "llama" else config.context
    )
    if window < config.context and keys.flag("use_sliding_window", True):
        yield f"its sliding window of {window:,} isn't modelled: attention is over the whole sequence."


def _split(keys: _Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(f"{keys.where}: {heads} heads don't divide the hidden size {hidden}")
    return hidden // heads


def _hf_gpt2(name: str, keys: _Keys) -> TransformerConfig:
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    return TransformerConfig(
        name=name, family="gpt2", layers=keys.size("n_layer"), hidden=hidden, heads=heads, kv_heads=heads,
        head_dim=_split(keys, hidden, heads), ffn=keys.size("n_inner", default=4 * hidden),
        vocab=keys.size("vocab_size"), context=keys.size("n_positions", "n_ctx"),
        tied=keys.flag("tie_word_embeddings", True), qkv_bias=True,
        activation=keys.activation("gpt2", "activation_function", "gelu_new"), norm="layernorm",
        norm_eps=keys.number("layer_norm_epsilon", 1e-5), positions="learned", source=keys.where,
    )  # fmt: skip


def _hf_bert(name: str, keys: _Keys) -> TransformerConfig:
    if (kind := keys.values.get("position_embedding_type", "absolute")) != "absolute":
        raise ConfigError(f"{keys.where}: position_embedding_type {kind!r} isn't supported here: absolute")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return TransformerConfig(
        name=name, family="bert", layers=keys.size("num_hidden_layers"), hidden=hidden, heads=heads,
        kv_heads=heads, head_dim=_split(keys, hidden, heads), ffn=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        context=keys.size("max_position_embeddings"), tied=False, qkv_bias=True,
        activation=keys.activation("bert", "hidden_act", "gelu"), norm="layernorm",
        norm_eps=keys.number("layer_norm_eps", 1e-12), positions="learned",
        type_vocab=keys.size("type_vocab_size", default=2), source=keys.where,
    )  # fmt: skip


def _hf_llama(name: str, kind: str, keys: _Keys) -> TransformerConfig:
    for biased in ("attention_bias", "mlp_bias"):
        if keys.flag(biased, False):
            raise ConfigError(f"{keys.where}: {biased} isn't supported here")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"{keys.where}: num_key_value_heads {kv_heads} doesn't divide the {heads} heads")
    head_dim = keys.size("head_dim", default=0) or _split(keys, hidden, heads)
    if head_dim % 2:
        raise ConfigError(f"{keys.where}: rotary positions need an even head_dim, not {head_dim}")
    rope = keys.values.get("rope_parameters")
    theta = _Keys(keys.where, rope).number("rope_theta", 10_000.0) if isinstance(rope, dict) else 10_000.0
    return TransformerConfig(
        name=name, family="llama", layers=keys.size("num_hidden_layers"), hidden=hidden, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, ffn=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        context=keys.size("max_position_embeddings"), tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2", activation=keys.activation("llama", "hidden_act", "silu"), norm="rmsnorm",
        norm_eps=keys.number("rms_norm_eps", 1e-6), positions="rope",
        rope_theta=keys.number("rope_theta", theta), source=keys.where,
    )  # fmt: skip
