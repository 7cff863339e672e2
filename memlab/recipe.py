"""Every switch of a training step that moves memory, validated.

A `Recipe` says how a model is trained: precision, optimizer, batch, checkpointing, attention, sharding and
offload. It is frozen; wrong values and combinations that can't work are refused when it is made, those that
depend on the model by `Recipe.resolve(config)`. Every field is a flag of the command line and a key of a TOML
file.

What the values mean:

precision
    ======================  ==========  =========  ============  ===============  ==========================
    value                   parameters  gradients  master copy   optimizer state  matrix products, activations
    ======================  ==========  =========  ============  ===============  ==========================
    fp32                    fp32        fp32       none          fp32             fp32
    amp-bf16, amp-fp16      fp32        fp32       none          fp32             16-bit where autocast says
    bf16                    bf16        bf16       none          bf16             bf16
    bf16-master             bf16        bf16       fp32          fp32             bf16
    fp16                    a frozen model in fp16 (with lora_rank only), for cards without bf16
    ======================  ==========  =========  ============  ===============  ==========================

    The master copy counts as optimizer state. With amp-* autocast makes 16-bit copies of the weights in
    forward, which live until the autocast region ends: temporaries, except those that backward needs, which
    are kept until it has used them and count as activations.
checkpointing
    `full`: each block is one checkpoint; `every-K`: K consecutive blocks are one; `selective`: inside each
    block the outputs of linear layers and of a fused attention kernel are kept, all else (norms, activation
    functions, dropout, eager attention scores) is recomputed.
attention
    `eager`: scores and softmax are stored tensors; `sdpa`: torch's scaled_dot_product_attention, which picks
    a fused kernel where it can; `flash`: the flash kernel, or refused.
zero_stage, world_size, tensor_parallel
    world_size ranks = data_parallel * tensor_parallel; ZeRO shards over the data-parallel ranks: optimizer
    states (1), gradients too (2), parameters too (3).
offload
    ('optimizer_states:cpu', 'activations:nvme', ...): what leaves the GPU between its uses, and where it
    goes.
lora_rank, lora_targets
    The model is frozen, and each linear layer named by lora_targets gets an adapter of that rank, as peft
    makes them: A (rank, in) and B (out, rank), no dropout. `attention`: queries, keys, values and output;
    `attention-qv`: queries and values (GPT-2 has one layer for queries, keys and values: that one);
    `all-linear`: every linear layer but the head; or names of layers, as `query,mlp.up`. Adapters, their
    gradients and states are fp32, also where the model is in 16 bits (peft's autocast_adapter_dtype, its
    default); in 16 bits as the model only with zero_stage 2 and 3, where fully_shard wants one dtype. With
    checkpointing the token embedding's output requires a gradient (enable_input_require_grads, which peft
    calls).
base_weights
    `full`, or the frozen linear layers (not the head) in 4 bits: `nf4` blocks of 64 values with one fp32
    scale each, `nf4-double` with 8-bit scales (Dettmers et al., arXiv:2305.14314). Each product makes its
    weight whole for a moment in the precision's 16 bits (or fp32). All other parameters stay as the precision
    says.
"""

from __future__ import annotations

import math
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.files import read_up_to
from memlab.units import DTYPE_BYTES, unknown_name

if TYPE_CHECKING:
    from memlab.hardware import GPU
    from memlab.models import ConvConfig, TransformerConfig

PRECISIONS = ("fp32", "amp-bf16", "amp-fp16", "bf16", "bf16-master", "fp16")
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw-8bit", "adafactor")
OPTIMIZER_IMPLS = ("foreach", "fused", "for-loop")
CHECKPOINTING = ("none", "full", "every-K", "selective")
ATTENTION = ("eager", "sdpa", "flash")
OFFLOAD_WHAT = ("optimizer_states", "parameters", "gradients", "activations")
OFFLOAD_WHERE = ("cpu", "nvme")
BASE_WEIGHTS = ("full", "nf4", "nf4-double")
#: Names for sets of linear layers; (): all of them.
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "attention": ("attn.qkv", "attn.query", "attn.key", "attn.value", "attn.out"),
    "attention-qv": ("attn.qkv", "attn.query", "attn.value"),
    "all-linear": (),
}

#: Block of the 8-bit optimizer states that shares one fp32 scale, and the smallest tensor that is quantized;
#: smaller ones keep fp32 states (bitsandbytes: blocksize 256, min_8bit_size 4096).
BLOCK_8BIT = 256
MIN_8BIT = 4096
#: 4-bit weights: values that share a scale, and scales that share one if they are quantized themselves
#: (bitsandbytes 0.50, functional.py: quantize_4bit, blocksize 64; compress_statistics, blocksize 256).
BLOCK_4BIT = 64
BLOCK_SCALES = 256

# (parameters, gradients, master copy, optimizer state, compute)
_DTYPES: dict[str, tuple[str, str, str | None, str, str]] = {
    "fp32": ("fp32", "fp32", None, "fp32", "fp32"),
    "amp-bf16": ("fp32", "fp32", None, "fp32", "bf16"),
    "amp-fp16": ("fp32", "fp32", None, "fp32", "fp16"),
    "bf16": ("bf16", "bf16", None, "bf16", "bf16"),
    "bf16-master": ("bf16", "bf16", "fp32", "fp32", "bf16"),
    "fp16": ("fp16", "fp16", None, "fp16", "fp16"),
}

# Which implementations an optimizer has; the first is the default. torch.optim tries foreach first on CUDA,
# except Adafactor, which takes the loop to save memory (torch/optim/_adafactor.py); 8-bit Adam updates tensor
# by tensor.
_IMPLS: dict[str, tuple[str, ...]] = {
    "sgd": ("foreach", "fused", "for-loop"),
    "momentum": ("foreach", "fused", "for-loop"),
    "adam": ("foreach", "fused", "for-loop"),
    "adamw": ("foreach", "fused", "for-loop"),
    "adamw-8bit": ("for-loop",),
    "adafactor": ("for-loop", "foreach"),
}

_SHOWN = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam", "adamw": "AdamW",
          "adamw-8bit": "8-bit AdamW", "adafactor": "Adafactor"}  # fmt: skip


class RecipeError(ValueError):
    """A recipe that can't be trained as written; the message says why and what to change."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor that the optimizer keeps for one parameter, on the GPU: name, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Weight:
    """One tensor of the model on the GPU: name, shape, dtype, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]


def nf4_tensors(shape: tuple[int, ...], double: bool) -> tuple[StateTensor, ...]:
    """What a card holds of a weight of `shape` in 4 bits, as Linear4bit of bitsandbytes 0.50.

    weight: two values a byte; absmax: the scale of each 64; code: the 16 levels. With `double` the scales are
    8 bits, themselves in blocks of 256: nested_absmax, their 256 levels nested_code, and offset, their mean.
    """
    count = math.prod(shape)
    blocks = -(-count // BLOCK_4BIT)
    packed = StateTensor("weight", ((count + 1) // 2, 1), "uint8")
    code = StateTensor("code", (16,), "fp32")
    if not double:
        return packed, StateTensor("absmax", (blocks,), "fp32"), code
    return (
        packed,
        StateTensor("absmax", (blocks,), "uint8"),
        code,
        StateTensor("nested_absmax", (-(-blocks // BLOCK_SCALES),), "fp32"),
        StateTensor("nested_code", (256,), "fp32"),
        StateTensor("offset", (), "fp32"),
    )


def _choice(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RecipeError(str(unknown_name(key, value, known)))


#: Beyond any run on record, and small enough that a tensor's bytes stay below 2^63.
_MOST = 2**24


def _whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RecipeError(f"{key} must be a whole number, not {value!r}")
    if value < least:
        raise RecipeError(f"{key} must be at least {least}, not {value}")
    if value > _MOST:
        raise RecipeError(f"{key} must be at most {_MOST:,}, not {value}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one training step runs. Raises RecipeError (a ValueError), one line, for what can't work.

    >>> Recipe(precision="fp32", micro_batch=4, sequence=512).optimizer
    'adamw'
    """

    precision: str = field(default="amp-bf16", metadata={"help": "|".join(PRECISIONS)})
    optimizer: str = field(default="adamw", metadata={"help": "|".join(OPTIMIZERS)})
    #: Left empty it becomes the optimizer's own default: foreach; for-loop for adafactor and adamw-8bit.
    optimizer_impl: str = field(
        default="",
        metadata={"help": "|".join(OPTIMIZER_IMPLS) + " [foreach; for-loop for adafactor and adamw-8bit]"},
    )
    micro_batch: int = field(
        default=1, metadata={"help": "sequences or images of one forward pass, per rank"}
    )
    accumulation: int = field(default=1, metadata={"help": "micro-batches before one optimizer step"})
    sequence: int | None = field(default=None, metadata={"help": "tokens (default: the model's context)"})
    image: int | None = field(default=None, metadata={"help": "pixels per side (default: the model's own)"})
    checkpointing: str = field(
        default="none", metadata={"help": "none|full|every-K (every-2, ...)|selective"}
    )
    attention: str = field(default="sdpa", metadata={"help": "|".join(ATTENTION)})
    dropout: float = field(
        default=0.0, metadata={"help": "probability; 0.1 is what GPT-2 and BERT published"}
    )
    set_to_none: bool = field(default=True, metadata={"help": "zero_grad frees the gradients, as torch does"})
    zero_stage: int = field(
        default=0, metadata={"help": "0|1|2|3: what ZeRO shards over data-parallel ranks"}
    )
    world_size: int = field(default=1, metadata={"help": "GPUs in all"})
    tensor_parallel: int = field(default=1, metadata={"help": "GPUs that share each layer"})
    offload: tuple[str, ...] = field(
        default=(), metadata={"help": "WHAT:WHERE, repeatable; optimizer_states:cpu, activations:nvme, ..."}
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "freeze the model, train adapters of this rank"}
    )
    lora_targets: tuple[str, ...] | str = field(
        default="attention", metadata={"help": "|".join(LORA_TARGETS) + "|layers, as query,mlp.up"}
    )
    base_weights: str = field(default="full", metadata={"help": "|".join(BASE_WEIGHTS) + ": frozen, 4 bits"})

    def __post_init__(self) -> None:
        _choice("precision", self.precision, PRECISIONS)
        _choice("optimizer", self.optimizer, OPTIMIZERS)
        impls = _IMPLS[self.optimizer]
        if self.optimizer_impl == "":
            object.__setattr__(self, "optimizer_impl", impls[0])
        _choice("optimizer_impl", self.optimizer_impl, OPTIMIZER_IMPLS)
        if self.optimizer_impl not in impls:
            raise RecipeError(
                f"{self.optimizer} has no {self.optimizer_impl} implementation: use {' or '.join(impls)}"
            )
        _whole("micro_batch", self.micro_batch, 1)
        _whole("accumulation", self.accumulation, 1)
        if self.sequence is not None:
            _whole("sequence", self.sequence, 1)
        if self.image is not None:
            _whole("image", self.image, 1)
        _choice("attention", self.attention, ATTENTION)
        self._check_checkpointing()
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float):
            raise RecipeError(f"dropout must be a number, not {self.dropout!r}")
        if not 0 <= self.dropout < 1:
            raise RecipeError(f"dropout must be at least 0 and below 1, not {self.dropout}")
        object.__setattr__(self, "dropout", float(self.dropout))
        if not isinstance(self.set_to_none, bool):
            raise RecipeError(f"set_to_none must be true or false, not {self.set_to_none!r}")
        self._check_sharding()
        self._check_offload()
        self._check_adapters()
        if self.attention == "flash" and self.compute_dtype == "fp32":
            raise RecipeError(
                "attention flash runs in 16 bits only: use precision amp-bf16 (or another), or attention sdpa"
            )

    def _check_checkpointing(self) -> None:
        value = self.checkpointing
        if not isinstance(value, str):
            raise RecipeError(f"checkpointing must be a word such as full or every-2, not {value!r}")
        if value.startswith("every-"):
            blocks = value.removeprefix("every-")
            if not (blocks.isascii() and blocks.isdigit() and int(blocks) >= 1):
                raise RecipeError(
                    f"checkpointing {value!r}: write every-K with K a whole number from 1, as every-2"
                )
        else:
            _choice("checkpointing", value, CHECKPOINTING)

    def _check_sharding(self) -> None:
        _whole("world_size", self.world_size, 1)
        _whole("tensor_parallel", self.tensor_parallel, 1)
        _whole("zero_stage", self.zero_stage, 0)
        if self.zero_stage > 3:
            raise RecipeError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage}")
        if self.world_size % self.tensor_parallel:
            raise RecipeError(
                f"tensor_parallel {self.tensor_parallel} must divide world_size {self.world_size}: "
                f"set world_size to a multiple of {self.tensor_parallel}"
            )
        if self.zero_stage > 0 and self.world_size == 1:
            raise RecipeError(f"zero_stage {self.zero_stage} shards over GPUs: world_size must be above 1")
        if self.zero_stage > 0 and self.data_parallel == 1:
            raise RecipeError(
                f"zero_stage {self.zero_stage} shards over data-parallel ranks, and tensor_parallel "
                f"{self.tensor_parallel} takes all {self.world_size} GPUs: raise world_size"
            )

    def _check_offload(self) -> None:
        items: object = self.offload  # TOML and JSON give lists, callers anything
        if not isinstance(items, tuple | list) or not all(isinstance(item, str) for item in items):
            raise RecipeError(
                f"offload must be a list such as ['optimizer_states:cpu'], not {self.offload!r}"
            )
        object.__setattr__(self, "offload", tuple(items))
        seen: set[str] = set()
        for item in self.offload:
            what, colon, where = item.partition(":")
            if not colon:
                raise RecipeError(f"offload {item!r}: write WHAT:WHERE, as optimizer_states:cpu")
            _choice("thing to offload", what, OFFLOAD_WHAT)
            _choice("place to offload to", where, OFFLOAD_WHERE)
            if what in seen:
                raise RecipeError(f"offload names {what} twice: choose one place")
            seen.add(what)

    def _check_adapters(self) -> None:
        targets: object = self.lora_targets
        if isinstance(targets, str) and targets not in LORA_TARGETS:
            targets = [name.strip() for name in targets.split(",")]
        if not isinstance(targets, str):
            named = isinstance(targets, tuple | list) and all(isinstance(t, str) and t for t in targets)
            if not named or not targets:
                raise RecipeError(
                    f"lora_targets must be {', '.join(LORA_TARGETS)} or names of layers, "
                    f"not {self.lora_targets!r}"
                )
            object.__setattr__(self, "lora_targets", tuple(targets))  # type: ignore[arg-type]
        _choice("base_weights", self.base_weights, BASE_WEIGHTS)
        if self.lora_rank is None:
            if self.base_weights != "full":
                raise RecipeError(
                    f"base_weights {self.base_weights} can't be trained: set lora_rank, for adapters"
                )
            if self.precision == "fp16":
                raise RecipeError(
                    "precision fp16 is for a frozen model (lora_rank): small gradients would become zero; "
                    "train with amp-fp16, which scales the loss"
                )
            if self.lora_targets != "attention":
                raise RecipeError("lora_targets without adapters: set lora_rank too")
            return
        _whole("lora_rank", self.lora_rank, 1)
        if self.master_dtype is not None:
            raise RecipeError(
                f"precision {self.precision} keeps an fp32 copy of what is trained, and adapters are fp32: "
                "use precision bf16"
            )
        if self.tensor_parallel > 1:
            raise RecipeError("adapters aren't split between GPUs here: set tensor_parallel to 1")
        if self.quantized and self.zero_stage >= 2:
            raise RecipeError(
                f"zero_stage {self.zero_stage} shards whole layers (fully_shard), and packed 4-bit weights "
                "aren't sharded here: use zero_stage 0 or 1, or base_weights full"
            )
        if self.quantized and self.offloaded("parameters"):
            raise RecipeError("4-bit weights stay on the GPU here: leave parameters out of offload")

    # -- what follows from the fields ------------------------------------------------------------------

    @property
    def parameter_dtype(self) -> str:
        """dtype of the parameters that the model holds (not of its adapters, nor of 4-bit weights)."""
        return _DTYPES[self.precision][0]

    @property
    def adapter_dtype(self) -> str:
        """dtype of LoRA's adapters: fp32; that of the model where fully_shard puts both into one group."""
        return self.parameter_dtype if self.zero_stage >= 2 else "fp32"

    @property
    def quantized(self) -> bool:
        """Are the frozen linear layers in 4 bits?"""
        return self.base_weights != "full"

    @property
    def gradient_dtype(self) -> str:
        return _DTYPES[self.precision][1] if self.lora_rank is None else self.adapter_dtype

    @property
    def master_dtype(self) -> str | None:
        """dtype of the second, exact copy of the parameters that the optimizer updates; None without one."""
        return _DTYPES[self.precision][2]

    @property
    def state_dtype(self) -> str:
        """dtype of momentum and variance (except 8-bit ones)."""
        return _DTYPES[self.precision][3] if self.lora_rank is None else self.adapter_dtype

    @property
    def compute_dtype(self) -> str:
        """dtype of matrix products and of the activations they make."""
        return _DTYPES[self.precision][4]

    @property
    def autocast(self) -> bool:
        return self.precision.startswith("amp-")

    @property
    def grad_scaler(self) -> bool:
        """fp16 needs a loss scale, or small gradients become zero; bf16 has the exponent range of fp32."""
        return self.precision == "amp-fp16"

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.tensor_parallel

    @property
    def buckets(self) -> bool:
        """Are gradients reduced by DistributedDataParallel? It keeps buckets of all of them beside them."""
        return self.data_parallel > 1 and self.zero_stage <= 1

    @property
    def checkpoint_every(self) -> int | None:
        """Blocks per checkpoint: 1 for full, K for every-K, None for none and selective."""
        if self.checkpointing == "full":
            return 1
        if self.checkpointing.startswith("every-"):
            return int(self.checkpointing.removeprefix("every-"))
        return None

    def offloaded(self, what: str) -> str | None:
        """Where `what` ('optimizer_states', ...) goes: 'cpu', 'nvme', or None if it stays on the GPU."""
        for item in self.offload:
            name, _, where = item.partition(":")
            if name == what:
                return where
        return None

    def state_tensors(self, shape: tuple[int, ...]) -> tuple[StateTensor, ...]:
        """What the optimizer keeps on the GPU for one parameter of `shape`, the master copy included.

        Names are torch's (`torch.optim`), where torch has the optimizer. The step counters of Adam, AdamW and
        Adafactor are CPU tensors and not listed, except with `fused`, where they are fp32 scalars on the
        device.
        """
        tensors = [StateTensor("master", shape, self.master_dtype)] if self.master_dtype else []
        dtype = self.state_dtype
        count = math.prod(shape)
        if self.optimizer == "momentum":
            tensors.append(StateTensor("momentum_buffer", shape, dtype))
        elif self.optimizer in ("adam", "adamw") or (self.optimizer == "adamw-8bit" and count < MIN_8BIT):
            # bitsandbytes makes the states of small tensors fp32 whatever the parameter's dtype is
            small = "fp32" if self.optimizer == "adamw-8bit" else dtype
            if self.optimizer_impl == "fused":
                tensors.append(StateTensor("step", (), "fp32"))
            tensors += [StateTensor("exp_avg", shape, small), StateTensor("exp_avg_sq", shape, small)]
        elif self.optimizer == "adamw-8bit":
            blocks = (-(-count // BLOCK_8BIT),)
            tensors += [
                StateTensor("exp_avg", shape, "uint8"),
                StateTensor("exp_avg_sq", shape, "uint8"),
                StateTensor("exp_avg_scale", blocks, "fp32"),
                StateTensor("exp_avg_sq_scale", blocks, "fp32"),
            ]
        elif self.optimizer == "adafactor":
            if len(shape) > 1:
                tensors += [
                    StateTensor("row_var", (*shape[:-1], 1), dtype),
                    StateTensor("col_var", (*shape[:-2], 1, shape[-1]), dtype),
                ]
            else:
                tensors.append(StateTensor("variance", shape, dtype))
        return tuple(tensors)

    def adapts(self, layer: str) -> bool:
        """Does the linear layer of this name ('blocks.0.attn.query', or without the block) get an adapter?"""
        return self.lora_rank is not None and _targeted(layer, self.lora_targets)

    def weights(self, config: TransformerConfig | ConvConfig) -> tuple[Weight, ...]:
        """The model's parameters as this recipe holds them, in the module's order: whole, packed, adapters.

        The scales and levels of 4-bit weights follow their weight.
        """
        return _weights(
            config, self.parameter_dtype, self.adapter_dtype, self.lora_rank, self.lora_targets,
            self.base_weights,
        )  # fmt: skip

    # -- against a model and a card --------------------------------------------------------------------

    def resolve(self, config: TransformerConfig | ConvConfig, gpu: GPU | None = None) -> Recipe:
        """The same recipe with `sequence` (transformers) or `image` (convnets) filled in.

        Raises RecipeError, with the reason, for what this model or this card can't do.
        """
        from memlab.models import TransformerConfig

        recipe = (
            self._for_transformer(config)
            if isinstance(config, TransformerConfig)
            else self._for_convnet(config)
        )
        if self.dropout > 0 and not config.has_dropout:
            raise RecipeError(f"{config.name} has no dropout layers: leave dropout at 0")
        every = self.checkpoint_every
        if every is not None and every > max(config.blocks, 1):
            raise RecipeError(
                f"checkpointing {self.checkpointing}: {config.name} has {config.blocks} blocks, "
                f"so K can be at most {config.blocks}"
            )
        if self.lora_rank is not None and not any(self.adapts(layer) for layer in config.linear_layers):
            known = sorted({".".join(layer.split(".")[-2:]) for layer in config.linear_layers})
            raise RecipeError(
                f"lora_targets {self._targets()}: {config.name} has no such layer; it has {', '.join(known)}"
            )
        if gpu is not None and self.attention == "flash" and gpu.compute_capability < (8, 0):
            raise RecipeError(
                f"attention flash needs compute capability 8.0 (Ampere) or later, and {gpu.name} has "
                f"{gpu.compute_capability[0]}.{gpu.compute_capability[1]}: use attention sdpa"
            )
        return recipe

    def _for_transformer(self, config: TransformerConfig) -> Recipe:
        if self.image is not None:
            raise RecipeError(f"image is for convnets, and {config.name} reads tokens: set sequence")
        sequence = config.context if self.sequence is None else self.sequence
        if sequence > config.context and config.positions == "learned":
            raise RecipeError(
                f"sequence {sequence} is longer than the {config.context} learned positions of "
                f"{config.name}: use at most {config.context}"
            )
        if self.attention == "flash" and config.head_dim > 256:
            raise RecipeError(
                f"attention flash needs heads of at most 256 wide, and those of {config.name} have "
                f"{config.head_dim}: use attention sdpa"
            )
        if self.tensor_parallel > 1:
            sizes = {
                "heads": config.heads,
                "kv_heads": config.kv_heads,
                "hidden": config.hidden,
                "ffn": config.ffn,
            }
            for what, size in sizes.items():
                if size % self.tensor_parallel:
                    raise RecipeError(
                        f"tensor_parallel {self.tensor_parallel} doesn't divide {config.name}'s {size} {what}"
                    )
        return self.replace(sequence=sequence)

    def _for_convnet(self, config: ConvConfig) -> Recipe:
        if self.sequence is not None:
            raise RecipeError(f"sequence is for transformers, and {config.name} reads images: set image")
        if self.attention != "sdpa":
            raise RecipeError(f"{config.name} has no attention: leave attention at its default")
        if self.tensor_parallel > 1:
            raise RecipeError(
                f"tensor_parallel splits transformer layers, and {config.name} is a convnet: set it to 1"
            )
        if self.checkpointing == "selective":
            raise RecipeError(
                f"checkpointing selective is for transformer blocks, and {config.name} is a convnet: use full"
            )
        if self.checkpointing != "none" and config.blocks == 0:
            raise RecipeError(
                f"{config.name} has no repeated blocks to checkpoint: set checkpointing to none"
            )
        if self.lora_rank is not None:
            raise RecipeError(
                f"lora_rank is for transformers here, and {config.name} is a convnet: leave it out"
            )
        image = config.image if self.image is None else self.image
        if config.fixed_image and image != config.image:
            raise RecipeError(
                f"{config.name} reads images of exactly {config.image} pixels per side, not {image}"
            )
        if image < config.min_image:
            raise RecipeError(f"image {image} is too small for {config.name}: at least {config.min_image}")
        if config.batch_norm and self.micro_batch == 1 and image <= 32:
            raise RecipeError(
                f"batch norm in {config.name} sees one value per channel at image {image} and micro_batch 1: "
                "raise either"
            )
        return self.replace(image=image)

    def notes(self, config: TransformerConfig | ConvConfig, gpu: GPU | None = None) -> list[str]:
        """What is allowed and yet worth saying: one sentence each."""
        from memlab.models import TransformerConfig

        said = []
        if (
            isinstance(config, TransformerConfig)
            and self.sequence is not None
            and self.sequence > config.context
            and config.positions == "rope"
        ):
            said.append(
                f"sequence {self.sequence} is beyond the context of {config.context} that {config.name} "
                "was made for: the memory is right, the model may not be."
            )
        if isinstance(config, TransformerConfig):
            said += [f"{config.name}: {what}" for what in config.ignored]
            if config.asked_dropout and not self.dropout:
                counts = f"dropout {config.asked_dropout:g} in the recipe counts it"
                said.append(
                    f"{config.name} asks for dropout {config.asked_dropout:g}, which this recipe leaves out: "
                    + (f"{counts}." if config.has_dropout else "its family isn't modelled with any.")
                )
        if gpu is not None and self.compute_dtype not in gpu.dtypes:
            said.append(
                f"{gpu.name} has no {self.compute_dtype} arithmetic: torch emulates it, in the same bytes."
            )
        return said

    # -- in and out ------------------------------------------------------------------------------------

    def describe(self) -> str:
        """The whole recipe in lines of at most 80 columns, as every command prints it."""
        size = []
        if self.sequence is not None:
            size.append(f"sequence {self.sequence}")
        if self.image is not None:
            size.append(f"image {self.image}x{self.image}")
        if not size:
            size.append("the model's own input size")
        first = [
            self.precision,
            f"{_SHOWN[self.optimizer]} {self.optimizer_impl}",
            f"micro-batch {self.micro_batch}" + (f" x {self.accumulation}" if self.accumulation > 1 else ""),
            *size,
        ]
        second = [f"checkpointing {self.checkpointing}", f"dropout {self.dropout:g}"]
        if self.image is None:
            second.insert(0, f"attention {self.attention}")
        if not self.set_to_none:
            second.append("gradients kept")
        if self.world_size == 1:
            second.append("one GPU")
        else:
            second.append(f"{self.world_size} GPUs")
            if self.tensor_parallel > 1:
                second.append(f"tensor parallel {self.tensor_parallel}")
            second.append(f"ZeRO-{self.zero_stage}" if self.zero_stage else "no ZeRO")
        if self.offload:
            second.append("offload " + " ".join(self.offload))
        if self.lora_rank is not None:
            second.append(f"LoRA {self.lora_rank} on {self._targets()}")
            second.append(f"base weights {self.base_weights}")
        return textwrap.fill(", ".join(first + second), 80, break_on_hyphens=False)

    def _targets(self) -> str:
        return self.lora_targets if isinstance(self.lora_targets, str) else " ".join(self.lora_targets)

    def __str__(self) -> str:
        return self.describe()

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, validated again.

        An `optimizer_impl` that was only the old optimizer's default follows a new optimizer.
        """
        values = vars(self) | changes
        if (
            "optimizer" in changes
            and "optimizer_impl" not in changes
            and self.optimizer_impl == _IMPLS[self.optimizer][0]
        ):
            values["optimizer_impl"] = ""
        return Recipe.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data (offload as a list)."""
        return {f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain data; missing fields take their defaults, unknown ones are refused by name."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                raise RecipeError(str(unknown_name("recipe field", key, known)))
        return cls(**values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """A recipe from a TOML file with fields as top-level keys.

        Raises RecipeError, one line that begins with the path, for a file that can't be read or is wrong.
        """
        try:
            text = read_up_to(path, 2**20).decode("utf-8")
            return cls.from_dict(tomllib.loads(text))
        except OSError as error:
            raise RecipeError(f"{path}: can't read the recipe: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: the recipe isn't UTF-8 text") from None
        except tomllib.TOMLDecodeError as error:
            raise RecipeError(f"{path}: not valid TOML: {error}") from None
        except RecursionError:
            raise RecipeError(f"{path}: nested too deeply for a recipe") from None
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None
        except ValueError as error:
            raise RecipeError(f"{error}: that is no recipe") from None


def _targeted(layer: str, chosen: tuple[str, ...] | str) -> bool:
    if layer == "head":
        return False
    targets = LORA_TARGETS[chosen] if isinstance(chosen, str) else chosen
    return not targets or any(f".{layer}".endswith(f".{target}") for target in targets)


@lru_cache(maxsize=256)
def _weights(
    config: TransformerConfig | ConvConfig,
    dtype: str,
    adapter_dtype: str,
    rank: int | None,
    targets: tuple[str, ...] | str,
    base: str,
) -> tuple[Weight, ...]:
    """`Recipe.weights`, once for all recipes that hold them alike: a search asks thousands of times."""
    if rank is None:
        return tuple(Weight(p.name, p.shape, dtype, True) for p in config.parameters())
    found: list[Weight] = []
    waiting: list[Weight] = []  # an adapter stands after its layer's bias
    for p in config.parameters():
        layer, _, kind = p.name.rpartition(".")
        if kind == "weight":
            found += waiting
            waiting = []
        if layer in config.linear_layers and kind == "weight":
            if base != "full":
                packed = nf4_tensors(p.shape, base == "nf4-double")
                found += [Weight(f"{layer}.{t.name}", t.shape, t.dtype, False) for t in packed]
            else:
                found.append(Weight(p.name, p.shape, dtype, False))
            if _targeted(layer, targets):
                out, inside = p.shape
                for name, shape in (("lora_A", (rank, inside)), ("lora_B", (out, rank))):
                    waiting.append(Weight(f"{layer}.{name}.weight", shape, adapter_dtype, True))
        else:
            found.append(Weight(p.name, p.shape, dtype, False))
    return (*found, *waiting)
