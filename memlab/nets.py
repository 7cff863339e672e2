"""The models of `models` as plain modules: GPT-2, BERT, Llama and six convolutional networks.

`build(config, recipe)` gives a module whose parameters are exactly `config.parameters()`. Every model is
called as `model(inputs) -> logits` and scored by `model.loss(logits, targets) -> scalar`. The code runs
unchanged on a CPU, on CUDA, on the meta device and under fake tensors: nothing in it looks at a value.

What decides the memory is written out where a library would hide it:

* attention: `eager` stores the score matrix, `sdpa` and `flash` don't;
* RMSNorm and rotary positions are ordinary tensor operations, in the order of the published code;
* dropout with probability 0 is no operation at all;
* checkpointing wraps blocks, `use_reentrant=False`;
* with adapters (`lora`) all else is frozen: it has no gradients.

Shapes in comments: B micro-batch, T tokens, C hidden size, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memlab.lora import LoRALinear, LoRANF4Linear, NF4Linear
from memlab.models import ConvConfig, TransformerConfig
from memlab.recipe import Recipe

#: torch's name for each dtype of a recipe.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(
    config: TransformerConfig | ConvConfig,
    recipe: Recipe | None = None,
    device: torch.device | str | None = None,
) -> Net:
    """The module of `config`, as `recipe` trains it, with parameters of the recipe's dtype on `device`.

    `recipe` gives attention, dropout, checkpointing and precision (default: `Recipe()`); `device` is 'cpu',
    'cuda' or 'meta' (default: torch's default device). Under FakeTensorMode the parameters are fake and take
    no memory.
    Raises RecipeError for a recipe that this model can't run.
    """
    recipe = (recipe or Recipe()).resolve(config)
    with _default_dtype(DTYPES[recipe.parameter_dtype]), torch.device(device or torch.get_default_device()):
        net = _FAMILIES[config.family](config, recipe)
    if recipe.lora_rank is not None:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(".lora_" in name)
    return net


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- parts ---------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """y = x W^T + b, drawn from N(0, 0.02) as GPT-2, BERT and Llama are."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def linear(r: Recipe, name: str, inside: int, out: int, bias: bool = True) -> nn.Module:
    """A linear layer as the recipe trains it: whole, or frozen, perhaps in 4 bits, perhaps with an adapter.

    `name` is its own in its block ('attn.query'), by which the recipe chooses.
    """
    layer = Linear(inside, out, bias=bias)
    rank, dtype = r.lora_rank, DTYPES[r.adapter_dtype]
    if rank is None or not (r.quantized or r.adapts(name)):
        return layer
    if not r.quantized:
        return LoRALinear(layer, rank, dtype)
    compute, double = DTYPES[r.compute_dtype], r.base_weights == "nf4-double"
    if not r.adapts(name):
        return NF4Linear(layer, compute, double)
    return LoRANF4Linear(layer, compute, double, rank, dtype)


class Embedding(nn.Embedding):
    """One row per token or position, drawn from N(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and written out, as Llama's own code does it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm whose running statistics and arithmetic are fp32 in every precision."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, self.get_buffer(name).float())

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight, bias = (
            self.weight.float(),
            self.bias.float(),
        )  # kernels take 16-bit images with fp32 weights only
        return F.batch_norm(
            x, self.running_mean, self.running_var, weight, bias, self.training, momentum=0.1, eps=self.eps
        )


def Dropout(p: float) -> nn.Module:
    """Dropout, or nothing where p is 0: `nn.Dropout(0.0)` would still store a mask."""
    return nn.Dropout(p) if p > 0 else nn.Identity()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str,
    mask: Tensor | None = None,
    causal: bool,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, shapes (B, H, T, D); k and v may have fewer heads, each shared by a group.

    `kind` is 'eager' (the T x T scores are stored tensors), 'sdpa' (torch picks a kernel) or 'flash' (that
    kernel or an error, on CUDA). `mask` (T, T), True where a query must not look, serves 'eager'.
    """
    groups = q.size(1) // k.size(1)
    # No fused CUDA kernel takes grouped heads in fp32: there the shared heads have to be copied out.
    if groups > 1 and (kind == "eager" or q.dtype == torch.float32):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    if kind == "eager":
        scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, H, T, T)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        if dropout > 0:
            weights = F.dropout(weights, dropout)
        return weights @ v
    fused = partial(
        F.scaled_dot_product_attention, dropout_p=dropout, is_causal=causal, enable_gqa=groups > 1
    )
    if kind == "flash" and q.is_cuda:
        if find_spec("flash_attn") is not None:
            from flash_attn import flash_attn_func

            heads_last = (t.transpose(1, 2) for t in (q, k, v))  # that library wants (B, T, H, D)
            out: Tensor = flash_attn_func(*heads_last, dropout_p=dropout, causal=causal)
            return out.transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return fused(q, k, v)
    return fused(q, k, v)


def heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D), a view."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D); no copy where attention wrote its output token by token."""
    return x.transpose(1, 2).flatten(2)


# What `selective` keeps: the outputs of linear layers and of fused attention. Not bmm, which is eager
# attention: selective recomputation is there to lose its T x T scores (Korthikanti et al., arXiv:2205.05198).
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class Net(nn.Module):
    """What all models share: the recipe, the loss and checkpointed blocks."""

    def __init__(self, config: TransformerConfig | ConvConfig, recipe: Recipe) -> None:
        super().__init__()
        self.config, self.recipe = config, recipe

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in fp32, whatever the logits' dtype. logits (..., classes), targets (...)."""
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def causal_mask(self, tokens: Tensor) -> Tensor | None:
        """(T, T) bool, True above the diagonal, where a token must not look; None for kernels that know."""
        if self.recipe.attention != "eager":
            return None
        length = tokens.size(1)
        return torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)

    def run(self, blocks: Sequence[Callable[..., Tensor]], x: Tensor, *rest: Any) -> Tensor:
        """x through all blocks; the recipe's checkpointing decides what they keep for backward."""
        kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.recipe.dropout > 0}
        if self.recipe.checkpointing == "selective":
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, _KEPT)
        every = self.recipe.checkpoint_every or 1
        for start in range(0, len(blocks), every):
            segment = partial(_through, blocks[start : start + every])
            if self.recipe.checkpointing == "none":
                x = segment(x, *rest)
            else:
                x = checkpoint(segment, x, *rest, **kept)
        return x


def _through(blocks: Iterable[Callable[..., Tensor]], x: Tensor, *rest: Any) -> Tensor:
    for block in blocks:
        x = block(x, *rest)
    return x


# -- transformers: parts -------------------------------------------------------------------------------


class Embed(nn.Module):
    """Token plus learned position (plus type, plus norm: BERT). Tokens (B, T) -> (B, T, C)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.token = Embedding(c.vocab, c.hidden)
        self.position = Embedding(c.context, c.hidden) if c.positions == "learned" else None
        if c.type_vocab:
            self._modules["type"] = Embedding(
                c.type_vocab, c.hidden
            )  # `self.type` is a method of every module
        self.norm = nn.LayerNorm(c.hidden, c.norm_eps) if c.family == "bert" else None
        self.dropout = Dropout(r.dropout)
        self.input_gradients = r.lora_rank is not None and r.checkpointing != "none"

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.token(tokens)
        if self.input_gradients:  # what transformers calls enable_input_require_grads
            x.requires_grad_(True)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.size(1), device=tokens.device))
        if (of_type := self._modules.get("type")) is not None:
            x = x + of_type(torch.zeros_like(tokens))  # one segment: type 0
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x


class Rope(nn.Module):
    """The angles by which rotary positions turn queries and keys (Su et al., arXiv:2104.09864)."""

    inverse_frequency: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequency", theta**-exponent, persistent=False)

    def forward(self, tokens: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, D) fp32."""
        position = torch.arange(tokens, dtype=torch.float32, device=self.inverse_frequency.device)
        angle = torch.outer(position, self.inverse_frequency)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + D/2}) turned by its position's angle. x (B, H, T, D), cos and sin (T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """Two linear layers with GELU between."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.up = linear(r, "mlp.up", c.hidden, c.ffn)
        self.down = linear(r, "mlp.down", c.ffn, c.hidden)
        self.approximate = "tanh" if c.activation == "gelu_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return x


class GatedMLP(nn.Module):
    """SwiGLU: a gate decides how much of `up` passes (Shazeer, arXiv:2002.05202)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.gate = linear(r, "mlp.gate", c.hidden, c.ffn, bias=False)
        self.up = linear(r, "mlp.up", c.hidden, c.ffn, bias=False)
        self.down = linear(r, "mlp.down", c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        return x


# -- GPT-2 ---------------------------------------------------------------------------------------------


class GPT2Attention(nn.Module):
    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.head_dim, self.kind, self.p = c.head_dim, r.attention, r.dropout
        width = c.heads * c.head_dim
        self.qkv = linear(r, "attn.qkv", c.hidden, 3 * width)  # queries, keys and values in one product
        self.out = linear(r, "attn.out", width, c.hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (heads(t, self.head_dim) for t in self.qkv(x).chunk(3, dim=-1))
        p = self.p if self.training else 0.0
        x = self.out(merge(attend(q, k, v, kind=self.kind, mask=mask, causal=True, dropout=p)))
        return x


class GPT2Block(nn.Module):
    """A norm before each half, an untouched sum through all blocks (pre-LN)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden, c.norm_eps)
        self.attn = GPT2Attention(c, r)
        self.norm2 = nn.LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c, r)
        self.dropout = Dropout(r.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), mask))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT2(Net):
    """GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020). Tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.embed = Embed(c, r)
        self.blocks = nn.ModuleList(GPT2Block(c, r) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden, c.norm_eps)
        self.head = Linear(c.hidden, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run(list(self.blocks), self.embed(tokens), self.causal_mask(tokens))
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- BERT ----------------------------------------------------------------------------------------------


class BertAttention(nn.Module):
    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.head_dim, self.kind, self.p = c.head_dim, r.attention, r.dropout
        width = c.heads * c.head_dim
        self.query = linear(r, "attn.query", c.hidden, width)
        self.key = linear(r, "attn.key", c.hidden, width)
        self.value = linear(r, "attn.value", c.hidden, width)
        self.out = linear(r, "attn.out", width, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(layer(x), self.head_dim) for layer in (self.query, self.key, self.value))
        p = self.p if self.training else 0.0
        x = self.out(merge(attend(q, k, v, kind=self.kind, causal=False, dropout=p)))
        return x


class BertBlock(nn.Module):
    """A norm after each half (post-LN)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.attn = BertAttention(c, r)
        self.norm1 = nn.LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c, r)
        self.norm2 = nn.LayerNorm(c.hidden, c.norm_eps)
        self.dropout = Dropout(r.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attn(x)))
        x = self.norm2(x + self.dropout(self.mlp(x)))
        return x


class Bert(Net):
    """BERT's encoder and pooler (Devlin et al. 2018), no padding. Tokens (B, T) -> pooled vector (B, C).

    The pooled vector serves as logits, one target in [0, C) per sequence: a loss that reaches every
    parameter, without a head that published counts leave out.
    """

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.embed = Embed(c, r)
        self.blocks = nn.ModuleList(BertBlock(c, r) for _ in range(c.layers))
        self.pooler = linear(r, "pooler", c.hidden, c.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run(list(self.blocks), self.embed(tokens))
        return torch.tanh(self.pooler(x[:, 0]))  # the first token speaks for the sequence


# -- Llama ---------------------------------------------------------------------------------------------


class LlamaAttention(nn.Module):
    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.head_dim, self.kind = c.head_dim, r.attention
        width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.query = linear(r, "attn.query", c.hidden, width, bias=c.qkv_bias)
        self.key = linear(r, "attn.key", c.hidden, kv_width, bias=c.qkv_bias)
        self.value = linear(r, "attn.value", c.hidden, kv_width, bias=c.qkv_bias)
        self.out = linear(r, "attn.out", width, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (heads(layer(x), self.head_dim) for layer in (self.query, self.key, self.value))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = self.out(merge(attend(q, k, v, kind=self.kind, mask=mask, causal=True)))
        return x


class LlamaBlock(nn.Module):
    """GPT-2's order of norms, with RMSNorm, rotary positions, SwiGLU and no dropout."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__()
        self.norm1 = RMSNorm(c.hidden, c.norm_eps)
        self.attn = LlamaAttention(c, r)
        self.norm2 = RMSNorm(c.hidden, c.norm_eps)
        self.mlp = GatedMLP(c, r)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        x = x + self.mlp(self.norm2(x))
        return x


class Llama(Net):
    """Llama 2 and 3, Mistral, Qwen2.5, SmolLM2 (Touvron et al. 2023). Tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, c: TransformerConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.embed = Embed(c, r)
        self.rope = Rope(c.head_dim, c.rope_theta or 10_000.0)
        self.blocks = nn.ModuleList(LlamaBlock(c, r) for _ in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.head = Linear(c.hidden, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rope(tokens.size(1))
        x = self.run(list(self.blocks), self.embed(tokens), cos, sin, self.causal_mask(tokens))
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- convolutional networks ------------------------------------------------------------------------------


def classifier(widths: Sequence[int]) -> nn.ModuleList:
    """Linear layers of these widths, one after the other."""
    return nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))


class LeNet5(Net):
    """LeCun et al. 1998. Images (B, 1, 32, 32) -> logits (B, 10)."""

    def __init__(self, c: ConvConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k) for a, b, k in c.conv_shapes())
        self.fcs = classifier((c.widths[-1] * c.pooled**2, *c.fcs, c.classes))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.avg_pool2d(torch.tanh(conv(x)), 2)
        x = x.flatten(1)
        for fc in self.fcs[:-1]:
            x = torch.tanh(fc(x))
        x = self.fcs[-1](x)
        return x


class AlexNet(Net):
    """Krizhevsky 2014, one tower. Images (B, 3, 224, 224) -> logits (B, 1000)."""

    def __init__(self, c: ConvConfig, r: Recipe) -> None:
        super().__init__(c, r)
        strides, paddings = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, stride, padding)
            for (a, b, k), stride, padding in zip(c.conv_shapes(), strides, paddings, strict=True)
        )
        self.fcs = classifier((c.widths[-1] * c.pooled**2, *c.fcs, c.classes))
        self.dropout = Dropout(r.dropout)
        self.pooled = c.pooled

    def forward(self, x: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x), inplace=True)
            if i in (0, 1, 4):
                x = F.max_pool2d(x, 3, 2)
        x = F.adaptive_avg_pool2d(x, self.pooled).flatten(1)
        for fc in self.fcs[:-1]:
            x = F.relu(fc(self.dropout(x)), inplace=True)
        x = self.fcs[-1](x)
        return x


class VGG(Net):
    """VGG-19 (Simonyan and Zisserman 2014). Images (B, 3, 224, 224) -> logits (B, 1000)."""

    def __init__(self, c: ConvConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, padding=1) for a, b, k in c.conv_shapes())
        self.fcs = classifier((c.widths[-1] * c.pooled**2, *c.fcs, c.classes))
        self.dropout = Dropout(r.dropout)
        self.depths, self.pooled = c.depths, c.pooled

    def forward(self, x: Tensor) -> Tensor:
        ends = accumulate(self.depths, initial=0)
        stages = [partial(self._stage, list(self.convs)[a:b]) for a, b in pairwise(ends)]
        x = F.adaptive_avg_pool2d(self.run(stages, x), self.pooled).flatten(1)
        for fc in self.fcs[:-1]:
            x = self.dropout(F.relu(fc(x), inplace=True))
        x = self.fcs[-1](x)
        return x

    @staticmethod
    def _stage(convs: Sequence[nn.Module], x: Tensor) -> Tensor:
        for conv in convs:
            x = F.relu(conv(x), inplace=True)
        return F.max_pool2d(x, 2)


class Stem(nn.Module):
    """What ResNet and DenseNet begin with: from (B, 3, S, S) to (B, 64, S/4, S/4)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.norm = BatchNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 3, stride=2, padding=1)


class Shortcut(nn.Module):
    """The residual path where the shape changes: a strided 1x1 convolution and its norm."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width_out, 1, stride, bias=False)
        self.norm = BatchNorm(width_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (with the stride, as in torchvision), 1x1 up to four times the width, plus the input."""

    def __init__(self, width_in: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.norm1 = BatchNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = BatchNorm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.norm3 = BatchNorm(4 * width)
        self.shortcut = Shortcut(width_in, 4 * width, stride) if first else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(Net):
    """ResNet-50 and -152 (He et al. 2015). Images (B, 3, 224, 224) -> logits (B, 1000)."""

    def __init__(self, c: ConvConfig, r: Recipe) -> None:
        super().__init__(c, r)
        self.stem = Stem(c.channels, c.widths[0])
        self.stages = nn.ModuleList()
        self.blocks: list[Bottleneck] = []  # the same blocks in one row: a plain list registers nothing
        width_in = c.widths[0]
        for s, (width, depth) in enumerate(zip(c.widths, c.depths, strict=True)):
            stage = []
            for b in range(depth):
                stage.append(Bottleneck(width_in, width, stride=2 if s > 0 and b == 0 else 1, first=b == 0))
                width_in = 4 * width
            self.stages.append(nn.ModuleList(stage))
            self.blocks += stage
        self.fc = nn.Linear(width_in, c.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.blocks, self.stem(x))
        x = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return x


class DenseLayer(nn.Module):
    """All channels so far in, the same channels and `growth` new ones out (no memory-saving tricks)."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1 = BatchNorm(width)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.norm2 = BatchNorm(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x), inplace=True))
        y = self.conv2(F.relu(self.norm2(y), inplace=True))
        return torch.cat((x, y), dim=1)


class Transition(nn.Module):
    """Half the channels, a quarter of the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = BatchNorm(width)
        self.conv = nn.Conv2d(width, width // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.norm(x), inplace=True)), 2)


class DenseNet(Net):
    """DenseNet-264 (Huang et al. 2016). Images (B, 3, 224, 224) -> logits (B, 1000)."""

    def __init__(self, c: ConvConfig, r: Recipe) -> None:
        super().__init__(c, r)
        width = c.widths[0]
        self.stem = Stem(c.channels, width)
        self.stages = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for s, depth in enumerate(c.depths):
            self.stages.append(
                nn.ModuleList(DenseLayer(width + b * c.growth, c.growth) for b in range(depth))
            )
            width += depth * c.growth
            if s < len(c.depths) - 1:
                self.transitions.append(Transition(width))
                width //= 2
        self.norm = BatchNorm(width)
        self.fc = nn.Linear(width, c.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for s, stage in enumerate(self.stages):
            x = self.run(list(stage.children()), x)
            if s < len(self.transitions):
                x = self.transitions[s](x)
        x = F.relu(self.norm(x), inplace=True)
        x = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return x


_FAMILIES: dict[str, Callable[[Any, Recipe], Net]] = {
    "gpt2": GPT2,
    "bert": Bert,
    "llama": Llama,
    "lenet": LeNet5,
    "alexnet": AlexNet,
    "vgg": VGG,
    "resnet": ResNet,
    "densenet": DenseNet,
}
