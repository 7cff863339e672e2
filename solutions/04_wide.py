# %% [markdown] id="title" claims="C4-01"
# # 4. Too wide
#
# GPT-3 is 12,288 numbers wide. One of its 96 blocks has 1.8 billion parameters, and for each sequence it computes 96
# tables of every token against every other. How wide can a model be before a card gives up, and what do people do then?
#
# "Wide" hides two different things. The **width** $h$ (`hidden_dim`) makes weights grow with $h^2$ and activations with $h$.
# The **sequence** of $s$ tokens makes attention's scores grow with $s^2$, for each **head**, whatever the width. This
# chapter takes the two apart, and then takes them down with three levers: attention in tiles, a layer split over
# several cards, optimizer states split over several cards. You build a small one of each, and it is graded by the bytes that
# it takes.
#
# You need no GPU, and no second computer: several *ranks* run in this notebook. "The article" here and in the verdicts at
# the end is a widely read Chinese-language article for engineers on this subject; this course tests its statements.
#
# Plan five to six hours: the cells run in half a minute, the rest is six exercises (20 points, checked at once; the
# bare number under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save
# this notebook under its own name, `04_wide.ipynb`.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import ast
import itertools
import math
import os
import textwrap
import time
from dataclasses import replace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import hardware, models, plots, published
from memlab.exercises.wide import run_ranks
from memlab.techniques import attention, processes, sharding, tensor_parallel
from memlab.units import GB, MIB, format_bytes, format_count, format_gb

lab = memlab.begin("04_wide", device=device, size=size, seed=seed)

# %% [markdown] id="fails" claims="C0-14"
# ## 1. A step that doesn't fit
#
# Take GPT-3 and throw away 92 of its 96 blocks. What is left is shallow, and as wide as ever. **Does one training step fit
# on an A100 with 80 GB?** Four sequences of 2,048 tokens, 16-bit weights with fp32 master weights, AdamW, eager
# attention. Guess the four consumers before you run the cell: parameters, gradients, optimizer states, activations.

# %% id="fails-run"
layers = lab.pick(smallest=3, normal=4)
gpt3 = models.model("gpt3-175b")
slab = replace(gpt3, name=f"{layers} blocks of GPT-3", layers=layers)
a100 = hardware.gpu("A100-80GB")
plain = memlab.Recipe(
    precision="bf16-master", optimizer_impl="fused", micro_batch=4, sequence=2048, attention="eager"
)
print(f"{format_count(slab.parameter_count)} parameters; at 16 B each {format_gb(16 * slab.parameter_count)}\n")
try:
    memlab.trace_step(slab, plain, gpu="A100-80GB")
except torch.OutOfMemoryError as error:
    print(textwrap.fill(str(error), 96))

# %% id="picture-run"
step = memlab.trace_step(slab, plain)
print(f"peak: {format_bytes(step.peak_bytes)}, in {step.peak_phase}")
for consumer, held in step.consumer_peaks().items():
    print(f"{plots.word(consumer):18}{format_bytes(held):>12} at its own largest moment")
plots.timeline(step, budget=a100.memory_bytes)

# %% [markdown] id="picture-read"
# The card refused in its very first step, before Adam has moments: there it was the activations of the backward that no
# longer found room. The figure shows a step like all later ones, with the moments there from the beginning. Below lie the
# **states** of eight billion parameters, 16 bytes each: now too much for the card by themselves. On top of them stand two hills.
# The left one is made of **activations**, almost half of them attention's scores. The right one is the optimizer step: 4
# more bytes per parameter, while 16-bit gradients are turned into fp32 ones.
#
# So no single lever will do. **If attention kept no scores at all, by how much would the peak fall?**

# %% id="sdpa-run"
fused = memlab.trace_step(slab, plain.replace(attention="sdpa"))
for name, trace in {"eager attention": step, "fused attention": fused}.items():
    peaks = {phase: format_bytes(held) for phase, held in trace.phase_peaks().items() if phase != "setup"}
    print(f"{name}: peak in {trace.peak_phase}, {peaks}")
assert fused.peak_bytes == step.peak_bytes and step.peak_phase == "optimizer"

# %% [markdown] id="sdpa-read"
# By nothing: the peak is a maximum over phases, and it is on the other hill. Remember this step. Sections 2 and 3 measure
# its states, 4 and 5 its scores; 6 and 7 divide what is left among eight cards, and at the end it fits.

# %% [markdown] id="twelve" claims="C0-08 C4-02 C4-03 C4-08"
# ## 2. Twelve, not two
#
# A rule says: a transformer has $2Lh^2 + 2Lh$ parameters ($L$ layers), where the 2 stands for "weights and biases". **Test
# it: GPT-3 has $L = 96$ and $h = 12288$. What comes out?**
#
# Weights and biases are the $h^2$ and the $h$ of *one* matrix: a Linear from $m$ to $n$ has $mn + n$ parameters. The
# factor counts matrices. Here are those of one block.

# %% id="twelve-run"
print(f"{'tensor of block 0':30}{'shape':>16}{'/ h^2':>10}")
h = gpt3.hidden
matrices = 0
for p in gpt3.parameters():
    if p.name.startswith("blocks.0."):
        name = p.name.removeprefix("blocks.0.")
        print(f"{name:30}{p.shape!s:>16}{p.count / h**2:>10.4f}")
        matrices += p.count if len(p.shape) == 2 else 0
print(f"{'all matrices':46}{matrices / h**2:>10.4f}")
assert matrices == 12 * h**2

# %% [markdown] id="twelve-read"
# Queries, keys and values are $3h^2$, the attention's output $h^2$, and the MLP goes to $4h$ and back: $8h^2$. Together
# $12h^2$, and $13h$ of biases and norms. Around the blocks stand the embeddings of the vocabulary $V$ and of the
# positions, and a last norm:
#
# $$12Lh^2 + 13Lh + (V + \text{positions})\,h + 2h$$
#
# Newer models change the terms, not the method. LLaMA has no biases, norms of one vector (RMSNorm), no table of positions
# (they are rotations, computed) and a *gated* MLP of three matrices, $3 h f$, with a width $f$ of its own. In the
# larger ones several query heads share one head of keys and values (GQA): with $k$ such heads of $d$ numbers, queries and output
# stay $2h^2$, keys and values shrink to $2 h k d$.

# %% id="rules-run" claims="C4-02 C4-04 C4-05 C4-06 C4-07"
print(f"{'':14}{'L':>4}{'h':>8}{'2Lh^2 + 2Lh':>14}{'12Lh^2':>10}{'counted':>10}   counted / the rule of two")
for name in ("bert-large", "gpt2-xl", "gpt3-175b", "llama2-70b"):
    m = models.model(name)
    two, twelve = 2 * m.layers * m.hidden**2 + 2 * m.layers * m.hidden, 12 * m.layers * m.hidden**2
    row = "".join(f"{n / 1e9:>{w}.3f}" for n, w in ((two, 14), (twelve, 10), (m.parameter_count, 10)))
    print(f"{name:14}{m.layers:>4}{m.hidden:>8}{row} B {m.parameter_count / two:>6.1f}")
llama70 = models.model("llama2-70b")
one_block = sum(p.count for p in llama70.parameters() if p.name.startswith("blocks.0."))
print(f"\nLLaMA-2-70B exactly: {llama70.parameter_count:,}, {one_block / 1e6:.2f} M of them in each block")
assert llama70.parameter_count == 68_976_648_192
rule_of_two = 2 * llama70.layers * llama70.hidden**2
cards = [math.ceil(16 * n / a100.memory_bytes) for n in (rule_of_two, llama70.parameter_count)]
print(f"cards of 80 GB for 16 B each: {cards[0]} by the rule, {cards[1]} by the count")
assert cards == [3, 13]

# %% [markdown] id="rules-read"
# The names on the box (340M, 1.5B, 175B, 70B) are rounded, but right. The rule of two is six to seven times short: it
# would sell you three cards where LLaMA-2-70B's states need thirteen. And $12Lh^2$ is good to 10%, as long as the MLP is $4h$ wide and
# the vocabulary is small beside the blocks.
#
# One more piece of width: the **heads**. They cut $h$ into $a$ slices. **Twice the heads at the same $h$: how many more
# parameters, how many more bytes of activations?**

# %% id="heads-run" claims="C4-01"
tokens = 512
for heads in (2, 4, 8):
    narrow = replace(
        models.model("gpt2"), name="one block", layers=1, hidden=256, heads=heads, kv_heads=heads,
        head_dim=256 // heads, ffn=1024, vocab=64,
    )  # fmt: skip
    block = sum(p.count for p in narrow.parameters() if p.name.startswith("blocks."))
    traced = memlab.trace_step(narrow, precision="fp32", micro_batch=1, sequence=tokens, attention="eager")
    kept = traced.consumer_peaks()["activations"]
    print(f"{heads} heads: {block:,} parameters in the block, {kept / 1e6:.1f} MB of activations")

# %% [markdown] id="heads-read"
# Not one parameter more, and the matrix products take as many multiplications as before; but each head has scores of its
# own, and they are what grows.

# %% [markdown] id="ex-4-1-text"
# **Exercise 4.1** (2 points). Count exactly, for all three families. `cfg` says what you need; use `cfg.ffn` for the
# MLP's width. What each has beside its blocks:
#
# * `gpt2`: token and position embeddings, a last LayerNorm; the head is the token embedding (tied).
# * `bert`: token, position and type embeddings, a LayerNorm after them; no last norm; a *pooler*, a Linear from $h$ to $h$. No head.
# * `llama`: a token embedding, a last RMSNorm, and a head with its own matrix, unless `cfg.tied`. Its `heads` of `head_dim`
#   needn't make up $h$ (Gemma-7B has 16 of 256 at $h$ = 3072): queries and output are $h \times$ `heads * head_dim`.
#
# A LayerNorm has a weight and a bias, $2h$; an RMSNorm only a weight, $h$. Blocks of all three have two norms. All Linear
# layers of `gpt2` and `bert` have biases, none of `llama`.


# %% id="ex-4-1" exercise="4.1"
def n_params(cfg):
    """The number of parameters of a GPT-2, BERT or LLaMA model, exactly.

    cfg.family "gpt2", "bert" or "llama"; cfg.layers, hidden, heads, kv_heads, head_dim, ffn, vocab, context,
    type_vocab (BERT), tied (is the head the token embedding?)
    """
    # exercise 4.1
    ### BEGIN SOLUTION
    h, L = cfg.hidden, cfg.layers
    if cfg.family == "llama":
        width, kv_width = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        attention = 2 * h * width + 2 * h * kv_width
        block = attention + 3 * h * cfg.ffn + 2 * h
        return cfg.vocab * h * (1 if cfg.tied else 2) + L * block + h
    attention = 4 * h * h + 4 * h
    mlp = 2 * h * cfg.ffn + cfg.ffn + h
    block = attention + mlp + 2 * 2 * h
    around = (cfg.vocab + cfg.context) * h + 2 * h
    if cfg.family == "bert":
        around += cfg.type_vocab * h + h * h + h
    return around + L * block
    ### END SOLUTION


# %% id="check-4-1" check="4.1"
memlab.check("4.1", n_params)

# %% [markdown] id="width" claims="C0-09 C4-09 C4-10 C4-11 C4-12 C4-29"
# ## 3. Double the width
#
# $X$ of (1, 12288) times $W$ of (12288, 12288) is $Y$ of (1, 12288). Some say that this product needs an *intermediate* of
# $b \times h \times h$ numbers, 600 MB, and that with twice the width everything grows four times. **Which tensors does
# `nn.Linear(h, h)` make, and how many bytes do they have?** Let the meter list them.


# %% id="width-run"
def linear_measured(h, b=1):
    """Bytes of Linear(h, h) on x of (b, h): the parameters, the tensors made in the forward, those saved."""
    with lab.card():
        layer = nn.Linear(h, h, device=lab.device)
        x = torch.randn(b, h, device=lab.device, requires_grad=True)
        own = {p.untyped_storage()._cdata for p in layer.parameters()}
        saved = []

        def pack(t):
            if t.untyped_storage()._cdata not in own:
                saved.append(t.nbytes)
            return t.detach()

        with memlab.Meter(layer) as meter, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = layer(x)
    made = [block for block in meter.trace.blocks() if block.operator]
    assert y.shape == (b, h)
    return sum(p.nbytes for p in layer.parameters()), made, sum(saved)


weights, made, saved = linear_measured(1024)
for block in made:
    print(f"made in the forward: {block.bytes:>9,} B, {block.shape} by {block.operator}")
print(f"saved for the backward: {saved:>6,} B, the input")
print(f"b x h x h numbers:   {4 * 1024 * 1024:>9,} B, that is the weight, which was there before")
assert max(block.bytes for block in made) == saved == 4 * 1024

# %% [markdown] id="width-read"
# No such intermediate. Each number of $Y$ is a sum of $h$ products, and a sum is kept in a register until it is done. The only
# tensor of $h \times h$ numbers is $W$; it doesn't depend on the batch. At GPT-3's width $W$ has 604 MB, $Y$ 49 KB.
#
# So **what grows four times when the width doubles, what twice, and what not at all?**

# %% id="double-run" claims="C0-09 C4-10 C4-29"
widths = (256, 512, 1024, 2048) if lab.size == "normal" else (256, 512, 1024)
batch, heads, tokens = 32, 4, 256
grown = {"weights": [], "saved by one Linear, 32 rows": [], "scores, 4 heads, 256 tokens": []}
for width in widths:
    parameters, _, kept = linear_measured(width, batch)
    with lab.card():
        q = torch.randn(1, heads, tokens, width // heads, device=lab.device)
        with memlab.Meter() as meter:
            attention.eager(q, q, q)
    scores = max(b.bytes for b in meter.trace.blocks() if b.shape == (1, heads, tokens, tokens))
    for values, value in zip(grown.values(), (parameters, kept, scores), strict=True):
        values.append(value)
for name, values in grown.items():
    print(f"{name:30}", " ".join(f"x{b / a:.3f}" for a, b in itertools.pairwise(values)))
assert [round(v[-1] / v[-2]) for v in grown.values()] == [4, 2, 1]
plots.curves(
    {name: (widths, values) for name, values in grown.items()},
    "Twice the width: weights x 4, activations x 2, scores x 1",
    "width h (log scale)", "bytes, fp32, log scale", in_bytes=True, log_x=2, log_y=True,
)  # fmt: skip

# %% [markdown] id="double-read"
# "Four times" is true of weights, and of all that has their shape: gradients, moments. Activations follow $h$, scores
# follow $s^2$ and the heads. (x 3.99 and not 4: the bias follows $h$.)
#
# **And does one matrix of 604 MB exceed a card?**

# %% id="card-run" claims="C0-14 C4-18"
matrix = 4 * 12288**2
block = sum(p.count for p in gpt3.parameters() if p.name.startswith("blocks.0."))
print(f"one 12288 x 12288 matrix, fp32: {format_gb(matrix)}, {matrix / a100.memory_bytes:.1%} of an {a100.name}")
print(f"a block of GPT-3: {format_gb(4 * block)} of weights, {format_gb(16 * block)} with gradients and moments")
print(f"96 blocks: {format_gb(96 * 16 * block)}")

# %% [markdown] id="card-read"
# Far from it. A card holds more than a hundred such matrices, or the states of two blocks; what doesn't fit is 96 of them.

# %% [markdown] id="ex-4-2-text"
# **Exercise 4.2** (2 points). One Linear, four numbers. In the backward three tensors are made: the gradients of the weight, of
# the bias and of $x$. The output's gradient comes from the next layer and isn't counted.


# %% id="ex-4-2" exercise="4.2"
def linear_bytes(b, h_in, h_out, size):
    """Bytes of y = Linear(h_in, h_out)(x) and its backward; x is (b, h_in), a number takes `size` bytes.

    "parameters": weight and bias
    "saved": what autograd keeps for the backward, parameters not counted
    "forward": the new bytes alive at the highest moment of the forward
    "backward": the new tensors that backward() makes (x needs a gradient, too)
    """
    # exercise 4.2
    ### BEGIN SOLUTION
    weight, bias = h_in * h_out, h_out
    return {
        "parameters": size * (weight + bias),
        "saved": size * b * h_in,
        "forward": size * b * h_out,
        "backward": size * (weight + bias + b * h_in),
    }
    ### END SOLUTION


# %% id="check-4-2" check="4.2"
memlab.check("4.2", linear_bytes)

# %% [markdown] id="scores" claims="C4-13 C4-14 C4-15 C4-24 C4-30"
# ## 4. Every pair of tokens
#
# Attention compares each query with each key: a table of $s \times s$ scores for every sequence, head and layer. **4,096
# tokens in fp32: how much is one table? How much are GPT-3's 96 heads, and its 96 layers?**


# %% id="scores-run"
def table_bytes(s, heads=1, layers=1):
    return 4 * layers * heads * s * s


one_head, one_layer, all_layers = (table_bytes(4096, *n) for n in ((1, 1), (96, 1), (96, 96)))
print(f"{4096**2:,} scores of one head: {format_bytes(one_head)}")
print(f"96 heads, one layer: {format_bytes(one_layer)} = {format_gb(one_layer)}")
print(f"96 layers: {format_bytes(all_layers)} = {format_gb(all_layers)}, for a single sequence")
print(f"GPT-3's own 2,048 tokens: {format_bytes(table_bytes(2048, 96))} a layer")
assert (one_head, one_layer) == (64 * MIB, 6 * 1024 * MIB)

# %% [markdown] id="scores-read"
# 64 MiB for each *head*, 6 GiB for the 96 heads of a *layer*: two numbers that are easily mixed up. And training keeps
# more than one such table until the backward. **Which ones, with and without dropout?**


# %% id="kept-run" claims="C4-13"
def kept_by_attention(dtype, dropout, s=256):
    """Shapes and dtypes of the (b, heads, s, s) tensors that eager attention keeps for its backward."""
    kept = {}

    def pack(t):
        if t.shape[-2:] == (s, s):
            kept[t.untyped_storage()._cdata] = (t.dtype, t.untyped_storage().nbytes())
        return t.detach()

    with lab.card(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        q = torch.randn(1, 2, s, 32, dtype=dtype, device=lab.device, requires_grad=True)
        p = torch.softmax(q @ q.mT / 32**0.5, dim=-1)
        if dropout:
            p = torch.native_dropout(p, 0.1, True)[0]  # its mask is one byte per score, as on CUDA
        out = p @ q
    del out
    return [(str(kind)[6:], nbytes / (2 * s * s)) for kind, nbytes in kept.values()]


for dtype in (torch.float32, torch.bfloat16):
    for dropout in (False, True):
        tables = kept_by_attention(dtype, dropout)
        total = sum(nbytes for _, nbytes in tables)
        print(f"{str(dtype)[6:]:9} dropout {dropout!s:6}{total:>4g} B per score: {tables}")

# %% [markdown] id="kept-read"
# Softmax keeps its output, which is also what the product with $V$ keeps: one tensor. Dropout adds its mask, a byte per score, and
# its own output, which takes softmax's place in the product. In 16 bit that is the $2 + 1 + 2 = 5$ of chapter 2's
# $5as/h$ (Korthikanti et al., 2022, arXiv:2205.05198).

# %% [markdown] id="ex-4-3-text"
# **Exercise 4.3** (2 points). The scores' share of a training step, for any model.


# %% id="ex-4-3" exercise="4.3"
def score_bytes(b, heads, s, layers, dtype, dropout):
    """Bytes of (b, heads, s, s) tensors kept for the backward by eager attention in all layers: an int.

    dtype: "fp32", "bf16" or "fp16"; dropout: is there dropout after the softmax?
    """
    # exercise 4.3
    ### BEGIN SOLUTION
    size = 4 if dtype == "fp32" else 2
    per_score = size + 1 + size if dropout else size
    return layers * b * heads * s * s * per_score
    ### END SOLUTION


# %% id="check-4-3" check="4.3"
memlab.check("4.3", score_bytes)

# %% [markdown] id="code" claims="C4-28"
# ### A formula isn't code
#
# Attention is $\operatorname{softmax}(QK^T/\sqrt{d})\,V$. Written down as it is read, `softmax(Q @ K^T / sqrt(d)) @ V`, it even
# parses. **What will Python make of `K^T`?**

# %% id="code-run"
typed = "softmax(Q @ K^T / sqrt(d)) @ V"
inside = ast.parse(typed, mode="eval").body.left.args[0]
print(f"{typed}: inside the softmax, {type(inside.op).__name__} of ({ast.unparse(inside.left)}) "
      f"and ({ast.unparse(inside.right)})\n")  # fmt: skip
for shape in ((1, 5, 3), (2, 2)):
    Q, K, V = (torch.randn(shape) for _ in range(3))
    known = {"Q": Q, "K": K, "V": V, "d": shape[-1], "sqrt": math.sqrt, "softmax": torch.softmax}
    try:
        eval(typed, known)
    except (RuntimeError, NameError) as error:
        print(f"tensors of {shape}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
Q, K, V = (torch.randn(1, 5, 3) for _ in range(3))
written = torch.softmax(Q @ K.transpose(-2, -1) / 3**0.5, dim=-1) @ V
print("torch.softmax(Q @ K.transpose(-2, -1) / d**0.5, dim=-1) @ V:", tuple(written.shape))

# %% [markdown] id="tiles" claims="C4-25 C4-31"
# ## 5. Tile by tile
#
# The output of attention has $s \times d$ numbers, its inputs have three times as many. Only the scores in between are
# $s \times s$. So don't keep them: take a *block* of keys and values at a time, compute its scores, use them, forget them.
# That is FlashAttention's idea (Dao et al., 2022, arXiv:2205.14135), and it is an algorithm before it is a kernel.
#
# The obvious way: softmax of each block times its values, added up. **How wrong is that?**

# %% id="naive-run"
where = lab.device_for("values of attention")
q, k, v = (torch.randn(1, 1, 512, 64, device=where) for _ in range(3))
right = attention.eager(q.double(), k.double(), v.double()).float()
parts = [attention.eager(q, k[..., i : i + 128, :], v[..., i : i + 128, :]) for i in range(0, 512, 128)]
naive, mean = sum(parts), sum(parts) / 4
online = attention.tiled(q, k, v, block=128)
for name, out in {"sum of the blocks": naive, "mean of the blocks": mean, "online softmax": online}.items():
    print(f"{name:20} off by {(out - right).abs().max().item():.1e} (the largest value is {right.abs().max():.2f})")

# %% [markdown] id="naive-read"
# A softmax divides by the sum over *all* keys, and a block knows only its own. What can be added up are numerators and
# denominators: $\sum_j e^{x_j} v_j$ and $\sum_j e^{x_j}$. But $e^{89}$ is already infinite in fp32, so every
# softmax first subtracts the row's maximum, and the maximum over all keys isn't known yet either.
#
# The way out is the **online softmax** (Milakov and Gimelshein, 2018, arXiv:1805.02867). Keep three things for each query: the
# largest score so far $m$, the sum so far $l$, and the output so far $o$ (not yet divided), both in units of $e^m$. When
# a block brings a larger maximum $m'$, shrink what you have by $e^{m - m'}$ and go on:
#
# $$l \leftarrow l\,e^{m-m'} + \sum_j e^{x_j - m'} \qquad o \leftarrow o\,e^{m-m'} + \sum_j e^{x_j - m'} v_j \qquad m \leftarrow m'$$
#
# At the end the output is $o/l$, and $m + \log l$ is the *log-sum-exp* (lse) of the row: with it a backward can compute any tile
# of the softmax again, $p_{ij} = e^{x_{ij} - \text{lse}_i}$. Hence $O(s)$ memory: one number per query, instead of $s$.

# %% [markdown] id="ex-4-4-text"
# **Exercise 4.4** (5 points). Write it. `block` keys at a time; also in blocks of queries, if you like: the bound is
# six tiles of $s \times$ `block` and six tensors of $s \times d$ at any moment, and no tensor with the scores of all keys,
# not even of a few queries. The last block may be shorter. With
# `causal=True` query $i$ sees the keys $0$ to $i$. No gradient is asked for (the check runs under `no_grad`), and
# torch's fused kernels are off limits: the check looks.
#
# *Hint.* $e^{-\infty}$ is 0, but $-\infty - (-\infty)$ is nan: with a causal mask, no row may begin with a block that it doesn't see.


# %% id="ex-4-4" exercise="4.4"
def tiled_attention(q, k, v, block, causal=False):
    """Attention in tiles of `block` keys: (out, lse).

    q, k, v: (b, heads, s, d). out: (b, heads, s, d). lse: (b, heads, s), the logarithm of each row's sum of
    exponentials, which is all that a backward needs beside q, k, v and out.
    """
    import torch

    s, d = q.shape[-2:]
    # exercise 4.4
    ### BEGIN SOLUTION
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    for i in range(0, s, block):
        rows = torch.arange(i, min(i + block, s), device=q.device)[:, None]
        queries = q[..., i : i + block, :] / d**0.5
        top = torch.full_like(queries[..., :1], float("-inf"))
        total, summed = torch.zeros_like(top), torch.zeros_like(queries)
        for j in range(0, i + block if causal else s, block):
            scores = queries @ k[..., j : j + block, :].mT
            if causal:
                columns = torch.arange(j, j + scores.shape[-1], device=q.device)
                scores = scores.masked_fill(columns > rows, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shrink = torch.exp(top - new_top)
            p = torch.exp(scores - new_top)
            total = total * shrink + p.sum(-1, keepdim=True)
            summed = summed * shrink + p @ v[..., j : j + block, :]
            top = new_top
        out[..., i : i + block, :] = summed / total
        lse[..., i : i + block] = (top + torch.log(total))[..., 0]
    return out, lse
    ### END SOLUTION


# %% id="check-4-4" check="4.4"
memlab.check("4.4", tiled_attention)

# %% [markdown] id="lengths"
# ### What it is worth
#
# `memlab.techniques.attention.tiled` is the same idea with its backward. Here are forward *and* backward of one causal head of
# 64, measured, and the closed forms for lengths beyond.


# %% id="lengths-run" claims="C4-24 C4-25"
def attention_peak(attend, s):
    """Peak bytes of forward + backward beyond q, k, v and the output's gradient; seconds."""
    with lab.card():
        q, k, v = (torch.randn(1, 1, s, 64, device=lab.device, requires_grad=True) for _ in range(3))
        gradient = torch.randn(1, 1, s, 64, device=lab.device)
        begin = time.perf_counter()
        with memlab.Meter() as meter:
            out = attend(q, k, v, causal=True)
            out.backward(gradient)
            if lab.device.type == "cuda":
                torch.cuda.synchronize()  # kernels run on after the call that started them
        took = time.perf_counter() - begin
    given = sum(block.bytes for block in meter.trace.blocks() if not block.operator)  # q, k, v
    return meter.trace.peak_bytes - given, took


lengths = lab.pick(smallest=(512, 1024), normal=(512, 1024, 2048, 4096, 8192))
largest_eager = lengths[-2]  # the next would be four times as much
ways = {"eager": attention.eager, "tiles": attention.tiled, "torch's fused kernel": attention.sdpa}
peaks, seconds = {}, {}
for name, attend in ways.items():
    for s in lengths:
        if name != "eager" or s <= largest_eager:
            peaks[name, s], seconds[name, s] = attention_peak(attend, s)
print(f"{'tokens':>8}" + "".join(f"{name:>23}" for name in ways))
for s in lengths:
    print(f"{s:>8}" + "".join(f"{format_bytes(peaks[n, s]) if (n, s) in peaks else '-':>23}" for n in ways))
for (name, s), measured in peaks.items():
    form = {"eager": attention.eager_bytes(s, causal=True), "tiles": attention.tiled_bytes(s)}.get(name)
    if form and lab.device.type == "cpu":
        assert abs(measured / form - 1) < 0.02, (name, s, measured, form)

# %% id="lengths-figure"
beyond = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

factor = attention.eager_bytes(8192, causal=True) / attention.tiled_bytes(8192)
table = [(s, 4 * s * s) for s in beyond]
plots.curves(
    {
        "eager": (beyond, [attention.eager_bytes(s, causal=True) for s in beyond]),
        "the score matrix alone": tuple(zip(*table, strict=True)),
        "tiles of 256": (beyond, [attention.tiled_bytes(s) for s in beyond]),
    },
    f"At 8,192 tokens tiles take {factor:.0f} times less than eager attention, and the gap grows with the length",
    "tokens (log scale); head of 64, fp32, both passes; black: measured", "peak, log scale",
    in_bytes=True, log_x=2, log_y=True,
    notes=[(s, p, "") for (n, s), p in peaks.items() if s == largest_eager and n != "torch's fused kernel"],
)  # fmt: skip

# %% [markdown] id="fused-read" claims="C4-26 C4-27"
# The slope is what counts: eager gets four times higher with each doubling. Tiles approach twice from below (in the table
# less, as long as the tiles themselves, which don't grow, are much of the sum).
#
# What does it cost? The backward computes every tile of scores again. On a GPU a fused kernel is nevertheless *faster*, since it keeps
# the tiles in the chip's fast memory and moves fewer bytes. "2 to 4 times faster" is said of the attention operator
# on the cards that the kernel was written for; a whole training step gained 15% (BERT-large) to 3 times (GPT-2) in the
# paper. Your machine's times, on which nothing depends:

# %% id="fused-run" claims="C4-26 C4-27"
s = largest_eager
for name in ways:
    print(f"{name:22}{s} tokens: {seconds[name, s] * 1e3:8.1f} ms, {seconds[name, s] / seconds['eager', s]:.2f} of eager")
if lab.virtual:
    print(f"(these are the times of bookkeeping: on a virtual {lab.virtual} no kernel runs)")
q = torch.randn(1, 1, 256, 64, device=lab.device, requires_grad=True)
print(f"\ntorch.nn.functional.scaled_dot_product_attention chose: {attention.backend_that_ran(q, q, q)}, ", end="")
print(F.scaled_dot_product_attention(q, q, q).grad_fn.name())
print(f"flash_attn's own function here: {attention.flash_unavailable(q) or 'it can run'}")

# %% [markdown] id="fused-layout"
# Two interfaces, two layouts: `scaled_dot_product_attention(q, k, v)` is part of PyTorch, takes (batch, heads, tokens, d) and
# runs on CPUs, too; `flash_attn_func(q, k, v)` is a library, takes (batch, tokens, heads, d), fp16 or bf16, and needs an
# Ampere GPU or newer. Call the first and let it choose.
#
# ### Real cards
#
# Others have measured the same training step with both (fine-tuning of adapters on a Tesla T4, with
# activation checkpointing, so that the scores of *one* layer are alive at a time; allocated bytes, FitCheck's archive).
# **In some of these pairs eager attention costs gigabytes, in others nothing. Why?**

# %% id="t4-run"
runs = {}
for run in published.t4_runs():
    key = (run["model"], run["base"], run["batch"], run["sequence"])
    runs.setdefault(key, {}).setdefault(run["attention"], run["allocated"])
published_heads = {"TinyLlama-1.1B-Chat-v1.0": 32, "SmolLM2-360M": 15, "SmolLM2-1.7B": 32, "SmolLM2-135M": 9,
                   "Qwen2.5-1.5B-Instruct": 12, "Qwen2.5-Coder-1.5B-Instruct": 12}  # fmt: skip
print(f"{'model':28}{'base':6}{'batch x tokens':>15}{'eager':>11}{'sdpa':>11}{'more':>11}   per score of one layer")
for (name, base, b, s), pair in sorted(runs.items()):
    if {"eager", "sdpa"} <= set(pair):
        more = pair["eager"] - pair["sdpa"]
        per_score = more / (b * published_heads[name] * s * s)
        shown = "".join(f"{format_bytes(n):>11}" for n in (pair["eager"], pair["sdpa"], more))
        print(f"{name:28}{base:6}{f'{b} x {s:,}':>15}{shown}   {per_score:.1f} B")

# %% [markdown] id="t4-read"
# Where attention was the peak, eager costs about 5 to 9 bytes for each score of a layer, as softmax in fp32, its copy in fp16 and
# gradients of both come and go. Where the peak was elsewhere (Qwen and SmolLM2-135M have large vocabularies for their size, and the
# logits of the loss decide), the fused kernel saves next to nothing. It is the same lesson as in section 1: a lever works on
# the peak or not at all.

# %% id="gpu"
if lab.device.type == "cuda":
    for s in (1024, 2048, 4096, 8192):
        for name in ("eager", "sdpa"):
            q, k, v = (torch.randn(1, 16, s, 64, device=lab.device, dtype=lab.half, requires_grad=True)
                       for _ in range(3))  # fmt: skip
            attend = ways["eager"] if name == "eager" else attention.sdpa
            for _ in range(2):  # the first call loads the kernels
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                attend(q, k, v, causal=True).sum().backward()
                torch.cuda.synchronize()
            took, peak = time.perf_counter() - begin, torch.cuda.max_memory_allocated()
            print(f"{s:>6} tokens, {name:6}{took * 1e3:8.2f} ms, peak {format_bytes(peak)}")
else:
    print("no CUDA GPU here: eager against fused at 1k to 8k tokens runs only on one")

# %% [markdown] id="split" claims="C4-17 C4-19"
# ## 6. Split the layer
#
# Now the weights. A matrix can be cut in two ways. **By columns**, that is by *outputs*: $Y_i = X W_i$, every rank needs
# all of $X$ and gets some columns of $Y$. **By rows**, by *inputs*: $Y = \sum_i X_i W_i$, a rank needs its columns of $X$
# and gets one term of a sum. Four-way, a 12288 x 12288 matrix becomes four of 12288 x 3072, 151 MB each.
#
# An MLP is two matrices with GELU between. Cut both by columns, and the slices have to be put together after each: two
# all-gathers. **Is there a cut with less to send?**

# %% id="split-run"
shards, width = 4, 256
up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
x = torch.randn(64, width)
whole = down(F.gelu(up(x)))
terms = [
    F.gelu(x @ up_rows.T) @ down_columns.T
    for up_rows, down_columns in zip(up.weight.chunk(shards, 0), down.weight.chunk(shards, 1), strict=True)
]
apart = (sum(terms) - whole).abs().max().item()
print(f"{shards} shards, columns first and rows second: the terms' sum is off by {apart:.1e}")
quarter = 4 * 12288 * 12288 // 4
print(f"a quarter of a 12288 x 12288 matrix: {format_gb(quarter)}; its input, whole on every rank: {4 * 12288:,} B a token")

# %% [markdown] id="split-read"
# Columns first, then rows: the slice that a rank gets from the first is exactly what its part of the second wants. GELU acts on
# each number alone and doesn't care. Nothing needs to be put together but one sum, an **all-reduce**, at the end.
# That is Megatron's split (Shoeybi et al., 2019, arXiv:1909.08053); attention is split the same way, by heads. In the
# backward it is the mirror image: the gradient of $X$ is a sum over ranks.
#
# (PyTorch stores a Linear's weight as (outputs, inputs): "columns of $W$" are rows of `up.weight`.)
#
# What a rank sends in one pass over GPT-3's MLP, 2,048 tokens in 16 bit, by the ring algorithm (an all-reduce of $S$ bytes over
# $N$ ranks sends $2S(N-1)/N$ from each, an all-gather $S(N-1)/N$):

# %% id="sent-run" claims="C4-17"
n, tokens, h = 8, 2048, 12288
output, hidden = 2 * tokens * h, 2 * tokens * 4 * h  # bytes
paired = tensor_parallel.mlp_sent(tokens, h, n, each=2) // 2  # the forward's half
columns_only = (hidden + output) * (n - 1) // n
held = tensor_parallel.mlp_bytes(tokens, h, 4 * h, n, each=2)
alone = tensor_parallel.mlp_bytes(tokens, h, 4 * h, 1, each=2)
print(f"forward, columns then rows: one all-reduce, {format_bytes(paired)} sent by each of {n} ranks")
print(f"forward, columns only: two all-gathers, {format_bytes(columns_only)}")
for name in held:
    print(f"{name}: {format_bytes(alone[name])} on one card, {format_bytes(held[name])} on each of {n}")

# %% [markdown] id="split-price"
# Weights shrink $N$ times, and with them gradients and moments; activations between the two matrices, too. The input doesn't:
# **every rank has all of $X$**, and everything between two such layers, norms and residuals. And the price is paid in the middle of
# the computation, twice per layer and direction, while everybody waits: this wants NVLink, and rarely leaves one server.
#
# ### Ranks in a notebook
#
# For the exercises each rank is a thread, with its own tensors and a `comm` to talk to the others. They run for real, and every
# byte sent is counted.
#
# | call | gives | in the backward |
# |---|---|---|
# | `comm.rank`, `comm.world_size` | who am I, of how many | |
# | `comm.all_reduce(t)` | the sum of all ranks' `t` | stops autograd |
# | `comm.reduce_scatter(t)` | this rank's part of that sum (cut along the first dimension) | stops autograd |
# | `comm.all_gather(t)` | all ranks' `t`, joined along the first dimension | stops autograd |
# | `comm.sum(t)` | the sum of all ranks' `t` | the gradient as it is |
# | `comm.copy(t)` | `t` | the sum of all ranks' gradients |
# | `comm.join(t)` | all ranks' `t`, joined along the last dimension | this rank's slice |


# %% id="ranks-run"
def hello(comm):
    mine = torch.full((4,), float(comm.rank + 1))
    total, part = comm.all_reduce(mine), comm.reduce_scatter(mine)
    return f"all_reduce {total.tolist()}, reduce_scatter {part.tolist()}, sent {dict(comm.sent)} B"


for rank, said in enumerate(run_ranks(hello, 2)):
    print(f"rank {rank}: {said}")

# %% [markdown] id="ex-4-5-text"
# **Exercise 4.5** (4 points). One rank's part of the MLP, with biases. Graded are the output and the gradients (those of the
# whole MLP), the bytes that a rank holds and saves, and what is sent: one all-reduce each way.
#
# *Three traps.* A bias that is added on every rank is summed $N$ times. A slice is a view, and a view keeps the whole
# storage alive: `clone()` it. And `comm.all_reduce` knows nothing of autograd: use `comm.copy` and `comm.sum`.
#
# To try it in a cell of your own:
#
#     up, down = nn.Linear(8, 32), nn.Linear(32, 8)
#     run_ranks(lambda comm: SplitMLP(up, down, comm)(torch.ones(1, 8)), 2)   # both ranks: down(F.gelu(up(ones)))


# %% id="ex-4-5" exercise="4.5"
import torch
import torch.nn.functional as F
from torch import nn


class SplitMLP(nn.Module):
    """One rank's part of down(gelu(up(x))): y is whole, and the same, on every rank.

    up, down: the whole nn.Linear layers, with biases; comm: this rank's collectives
    """

    def __init__(self, up, down, comm):
        super().__init__()
        self.comm = comm
        # exercise 4.5
        ### BEGIN SOLUTION
        n, r = comm.world_size, comm.rank
        self.up_weight = nn.Parameter(up.weight.detach().chunk(n, 0)[r].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(n, 0)[r].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(n, 1)[r].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x):
        # exercise 4.5
        ### BEGIN SOLUTION
        x = self.comm.copy(x)
        slice_of_hidden = F.gelu(F.linear(x, self.up_weight, self.up_bias))
        part = F.linear(slice_of_hidden, self.down_weight)
        return self.comm.sum(part) + self.down_bias
        ### END SOLUTION


# %% id="check-4-5" check="4.5"
memlab.check("4.5", SplitMLP)

# %% [markdown] id="processes"
# ### The same on real processes
#
# Two operating-system processes, PyTorch's `gloo` backend, the library's own `split_mlp`. In the same go they train a small model
# with ZeRO-1 and with PyTorch's `fully_shard`; section 7 will read those numbers.


# %% id="processes-run" claims="C4-17 C4-21 C4-23"
def two_ranks(rank, world_size):
    torch.manual_seed(0)
    found = {}
    mlp, x = tensor_parallel.MLP(256), torch.randn(64, 256, requires_grad=True)
    whole = mlp(x)
    part = tensor_parallel.split_mlp(mlp)
    with sharding.Traffic() as traffic:
        y = part(x)
        y.sum().backward()
    found["off"] = (y - whole).abs().max().item()
    found["weights"], found["calls"] = sum(p.nbytes for p in part.parameters()), dict(traffic.calls)

    def states(model, optimizer):
        """Bytes on this rank of parameters, gradients and optimizer states."""
        groups = [
            list(model.parameters()),
            [p.grad for p in model.parameters()],
            [t for state in optimizer.state.values() for t in state.values()],
        ]
        return [sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in group) for group in groups]

    for name in ("ZeRO-1", "fully_shard"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        batch = torch.randn(8, 512)
        with sharding.Traffic() as traffic:
            if name == "ZeRO-1":
                zero = sharding.Zero(model, torch.optim.AdamW, stage=1)
                model(batch).square().mean().backward()
                zero.step()
                held = list(zero.held().values())
            else:
                sharding.torch_fsdp(model, list(model))
                optimizer = torch.optim.AdamW(model.parameters())
                model(batch).square().mean().backward()
                optimizer.step()
                held = states(model, optimizer)
        found[name] = [n / (4 * 512 * 512) for n in held], traffic.total / (4 * 4 * 512 * 512)
    return found


reason = processes.unavailable()
if lab.size == "smallest":
    reason = "the smallest size starts no processes"
try:
    on_ranks = [] if reason else processes.run(two_ranks, 2)
except (processes.GlooUnavailable, processes.RankFailed) as error:
    on_ranks, reason = [], str(error).splitlines()[0]
if reason:
    print(f"not run here: {reason}. The chapter goes on; nothing below depends on it.")
for rank, found in enumerate(on_ranks):
    print(f"rank {rank}: output off by {found['off']:.1e}, {found['weights']:,} B of weights, {found['calls']}")
if on_ranks:
    whole_mlp = 4 * (2 * 256 * 1024 + 1024 + 256)
    print(f"the whole MLP: {whole_mlp:,} B of weights")

# %% [markdown] id="zero" claims="C4-20 C4-21 C4-22 C4-23 C4-31"
# ## 7. Split the states
#
# Data parallelism is the simplest way to use $N$ cards: everyone has the whole model, takes other sequences, and the gradients
# are averaged. It divides the work and not one byte of the states: $N$ cards hold $N$ copies of 16 bytes per parameter.
#
# ZeRO (Rajbhandari et al., 2019, arXiv:1910.02054) asks what is needed when. Adam's moments: only in the step, and each for its own
# parameter. So let each rank own one $N$-th of the parameters and keep the moments for those (**stage 1**). Gradients: only the
# owner needs the sum (**stage 2**). Parameters: only while their layer runs, gathered before and dropped after (**stage 3**,
# which PyTorch calls `fully_shard`, FSDP).
#
# In 16-bit training a parameter takes 2 bytes, its gradient 2, the optimizer 12 (master copy and two moments). Often one reads:
# "stage 1 leaves 25%, stage 2 12.5%, stage 3 $1/N$". **On how many cards is that so?**

# %% id="zero-run" claims="C4-20 C4-21 C4-22 C4-23"
print(f"{'':8}" + "".join(f"{f'stage {stage}':>22}" for stage in (1, 2, 3)))
for n in (2, 8, 64, 1024):
    cells = []
    for stage in (1, 2, 3):
        mixed = sum(sharding.states(16 * 1024, n, stage).values()) / (16 * 16 * 1024)
        fp32 = sum(sharding.states(16 * 1024, n, stage, (4, 4, 8)).values()) / (16 * 16 * 1024)
        cells.append(f"{mixed:.1%} ({fp32:.1%})")
    print(f"N = {n:<4}" + "".join(f"{cell:>22}" for cell in cells))
print("of 16 B per parameter, 2 + 2 + 12; in brackets fp32, 4 + 4 + 8")

# %% id="zero-figure"
ranks = [2**i for i in range(11)]
paper = 7_500_000_000  # the ZeRO paper's example, its figure 1: 120, 31.4, 16.6 and 1.9 GB on 64 cards


def per_rank(n, stage):
    return sum(sharding.states(paper, n, stage).values()) / GB


reported = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}
for stage, value in reported.items():
    assert round(per_rank(64, stage), 1) == value
plots.curves(
    {f"stage {stage}: {value:g} GB": (ranks, [per_rank(n, stage) for n in ranks]) for stage, value in reported.items()},
    "25% and 12.5% are limits that stages 1 and 2 approach; only stage 3 goes on falling",
    "ranks (log scale); 7.5 B parameters; black, GB: the paper, 64 ranks", "states per rank (GB, log scale)",
    log_x=2, log_y=True,
    notes=[(64, value, "") for value in reported.values()],
)  # fmt: skip

# %% [markdown] id="zero-read"
# The percentages are limits for very many cards: what isn't sharded yet, $4/16$ and $2/16$, stays whole however many there
# are. On 8 cards stage 1 leaves 34%, in fp32 even 56%. Stage 3 is $1/N$ for all $N$, but of *states*: activations aren't
# sharded, and the layer that is at work has to be gathered in full.
#
# The price, per rank and step, for $P$ bytes of parameters: data parallelism sends an all-reduce of the gradients, $2P$. An
# all-reduce *is* a reduce-scatter and an all-gather, so stages 1 and 2 cost nothing extra: reduce-scatter the gradients,
# update your part, all-gather the parameters. Stage 3 gathers them twice, for forward and backward: $3P$.

# %% id="zero-measured" claims="C4-21 C4-23"
if on_ranks:
    print("one of 2 ranks, fp32, AdamW: bytes per parameter; bytes sent in a step / P\n")
    print(f"{'':14}{'parameters':>12}{'gradients':>12}{'states':>10}{'sent / P':>12}")
for name in ("ZeRO-1", "fully_shard") if on_ranks else ():
    held, sent = on_ranks[0][name]
    print(f"{name:14}{held[0]:>12.2f}{held[1]:>12.2f}{held[2]:>10.2f}{sent:>12.2f}")
if on_ranks:
    assert [round(b, 3) for b in on_ranks[0]["fully_shard"][0]] == [2, 2, 4]
    assert [round(b, 3) for b in on_ranks[0]["ZeRO-1"][0]] == [4, 4, 4]
else:
    print(f"not run here: {reason}")

# %% [markdown] id="zero-measured-read"
# By the formula: 4 + 4 + 8 bytes, the moments halved by ZeRO-1, everything halved by `fully_shard`. With two ranks an all-reduce
# would send $2P \cdot \tfrac12 = P$; ZeRO-1 sends the same $P$. `fully_shard` sends $3P \cdot \tfrac12 = 1.5P$.
#
# Recorded on real cards: one and two A100s, a 3 B model under `fully_shard` (torch-xpu-ops issue 1792; G as printed there,
# it isn't said whether of $10^9$ or $2^{30}$ bytes). **How many bytes per parameter are sharded?**

# %% id="zero-published"
rows = {row["id"]: row for row in published.measurements("torch-xpu-ops")}
one, two = rows[271]["value"], rows[272]["value"]
print(f"one card {one} G, two cards {two} G: {one - two:.2f} G less on each, that is half of what is sharded")
print(f"so {2 * (one - two):.1f} G of states are sharded and {one - 2 * (one - two):.1f} G are not: activations, context, the rest")
print(f"of 3 B parameters: about {2 * (one - two) / 3:.1f} B each, {2 * (one - two) / 3 * 1.074:.1f} B if G is GiB")

# %% [markdown] id="zero-published-read"
# Not 16. The thread says neither the number format nor the exact count of parameters. With everything in 16 bit, moments
# too and no master copy, it would be 2 + 2 + 4 = 8 bytes; 2 + 2 + 12 doesn't fit these numbers. And a difference
# of two peaks counts only what is alive at both of them.

# %% [markdown] id="ex-4-6-text"
# **Exercise 4.6** (5 points). `zero`: the table for any model, number of ranks, stage and recipe. `Zero1`: the mechanism.
#
# Work on one flat vector of all parameters, padded to a multiple of $N$: each rank owns one $N$-th of it. In `step()`
# reduce-scatter the gradients (it sums; what is wanted is the mean), give your piece its gradient, let the optimizer update it, all-gather
# the pieces and copy them back into the parameters. Graded are the parameters after three steps, the bytes of optimizer states on
# each rank, that your piece keeps no copy of all parameters alive (a slice is a view here, too), and the bytes sent:
# $2P(N-1)/N$ a step and no more. (`make_optimizer` makes SGD or AdamW; both update each number by
# itself, so a piece can be updated without the rest.)


# %% id="ex-4-6" exercise="4.6"
import torch
import torch.nn.functional as F


def zero(parameters, world_size, stage, each):
    """Bytes per rank: {"parameters": …, "gradients": …, "optimizer_states": …}, as ints.

    each: bytes per parameter of the three, (2, 2, 12) or (4, 4, 8); stage: 0 (nothing is sharded) to 3.
    `parameters` can be divided by `world_size`.
    """
    # exercise 4.6
    ### BEGIN SOLUTION
    whole = [parameters * size for size in each]
    return {
        "parameters": whole[0] // (world_size if stage >= 3 else 1),
        "gradients": whole[1] // (world_size if stage >= 2 else 1),
        "optimizer_states": whole[2] // (world_size if stage >= 1 else 1),
    }
    ### END SOLUTION


class Zero1:
    """An optimizer whose states are sharded over the ranks.

    parameters: nn.Parameters, the same on every rank; before step() each has this rank's own gradient
    make_optimizer(pieces): makes an ordinary optimizer for a list of tensors; call it with what this rank owns
    """

    def __init__(self, parameters, make_optimizer, comm):
        self.parameters, self.comm = list(parameters), comm
        # exercise 4.6
        ### BEGIN SOLUTION
        self.sizes = [p.numel() for p in self.parameters]
        missing = -sum(self.sizes) % comm.world_size
        self.flat = lambda tensors: F.pad(torch.cat([t.flatten() for t in tensors]), (0, missing))
        flat = self.flat([p.detach() for p in self.parameters])
        self.piece = flat.chunk(comm.world_size)[comm.rank].clone()
        self.optimizer = make_optimizer([self.piece])
        ### END SOLUTION

    def step(self):
        """Every rank's parameters after one step of the plain optimizer with the ranks' mean gradient."""
        # exercise 4.6
        ### BEGIN SOLUTION
        gradient = self.flat([p.grad for p in self.parameters])
        self.piece.grad = self.comm.reduce_scatter(gradient) / self.comm.world_size
        self.optimizer.step()
        whole = self.comm.all_gather(self.piece)[: sum(self.sizes)]
        with torch.no_grad():
            for p, values in zip(self.parameters, whole.split(self.sizes), strict=True):
                p.copy_(values.view_as(p))
        ### END SOLUTION


# %% id="check-4-6" check="4.6"
memlab.check("4.6", zero, Zero1)

# %% [markdown] id="explore"
# ## 8. Your own model
#
# Choose a model, a card and a number of ranks, and see what each stage leaves. **What is the least number of A100s for
# LLaMA-2-70B?** (States alone: leave room for activations and the gathered layer.) The bars on top are the whole step of
# the stage chosen. *Trace it* runs PyTorch's own sharding of it, one rank of all.

# %% id="explore-run"
from memlab import widgets

widgets.zero_stages(model="llama2-70b", gpu="A100-80GB")

# %% [markdown] id="fits" claims="C4-31"
# ## 9. The same step, on eight cards
#
# Back to the four blocks of GPT-3. Each bar is one rank's peak in a traced step of PyTorch's own DDP, `fully_shard` and DTensor;
# every rank works on four sequences of its own, except under tensor parallelism, where the eight share four. (Stage 2 is
# `fully_shard` told to keep a layer's weights from forward to backward. Buckets and gathered layers are in the bars.)
#
# All but the first two bars are of eight cards. Their parts aren't section 7's 2 + 2 + 12: the shards of `fully_shard` are the
# fp32 master weights and are filed under parameters, gathered layers and 16-bit copies under temporaries. The rank is rank 0.
# That matters for ZeRO-1: PyTorch deals out whole tensors, so rank 0 has 8.6 GiB of optimizer states, the average rank
# 11.0, and the heaviest more.

# %% id="fits-run"
sdpa = plain.replace(attention="sdpa")
levers = {
    "ZeRO-1, fused": sdpa.replace(zero_stage=1, world_size=8),
    "ZeRO-2, fused": sdpa.replace(zero_stage=2, world_size=8),
    "ZeRO-3, eager": plain.replace(zero_stage=3, world_size=8),
    "tensor split, fused": sdpa.replace(tensor_parallel=8, world_size=8),
}
if lab.size == "smallest":
    levers = {}
traces = {"1 card, eager": step, "1 card, fused": fused}
traces |= {name: memlab.trace_step(slab, recipe) for name, recipe in levers.items()}
fitted = memlab.trace_step(slab, sdpa.replace(zero_stage=3, world_size=8), gpu="A100-80GB")
traces["ZeRO-3, fused"] = fitted
print(f"{'peak of one rank':28}{'forward':>12}{'backward':>12}{'optimizer':>12}")
for name, trace in traces.items():
    held = trace.phase_peaks()
    print(f"{name:28}" + "".join(f"{format_bytes(held[p]):>12}" for p in ("forward", "backward", "optimizer")))
if lab.size == "normal":
    peaks_of = {name: trace.peak_bytes for name, trace in traces.items()}
    assert peaks_of["ZeRO-3, eager"] - fitted.peak_bytes > 15 * 2**30
    assert min(peaks_of, key=peaks_of.get) == "tensor split, fused"
plots.consumers(traces, capacity=a100.memory_bytes, title="The states had to be divided first; then attention counts")

# %% [markdown] id="fits-read"
# On one card, fused attention changes nothing at the peak. With ZeRO-1 the step fits already, and its peak is still in the
# optimizer step, hardly higher than the backward's. ZeRO-3 moves the peak to the backward, and there the same lever takes away
# more than 15 GiB. Levers aren't good or bad; each works on one hill, and it has to be
# the highest.
#
# Tensor parallelism leaves the least, since it divides activations, too, but eight cards then share one batch and talk in the
# middle of every layer. ZeRO-3 sends whole weights and can do so ahead of time. The last bar was traced on a virtual A100,
# which would have refused what doesn't fit. Here is that step from beginning to end:

# %% id="fits-card"
print(f"peak of a rank: {format_bytes(fitted.peak_bytes)} of {format_bytes(a100.memory_bytes)}, in {fitted.peak_phase}")
assert fitted.peak_bytes < a100.memory_bytes < step.peak_bytes
plots.timeline(fitted, budget=a100.memory_bytes, title="The step of the opening, one of eight ranks: it fits")

# %% [markdown] id="written-text"
# ## 10. In your own words
#
# **Exercise 4.7** (3 points, graded by hand, at most eight sentences). A colleague trains a 7 B model (16-bit weights and gradients,
# fp32 master weights and AdamW) on four cards of 40 GB with data parallelism. It runs out of memory before the first step is done. They
# have read that ZeRO-1 "saves four times" and FlashAttention "turns $O(N^2)$ into $O(N)$", and turn on both. Does it
# fit now? Say what each of the two changes did, in bytes on a card, what is left, and which stage you would choose.
#
# *Rubric.* 1 point: what ZeRO-1 leaves on each of *four* cards, in bytes per parameter and in GB, and what you say to "four
# times". 1 point: what FlashAttention changes here and what it doesn't. 1 point: a stage that fits, with its number of GB, and
# what it costs.

# %% [markdown] id="written-4-7" manual="4.7" points=3
# Without sharding each card would hold 16 B x 7 B = 112 GB of states, so it failed whatever the activations. ZeRO-1 divides only the
# optimizer's 12 B: on four ranks 4 + 12/4 = 7 B per parameter remain, 49 GB, which is 44% and not 25%: a quarter is the limit for
# very many ranks, because weights and gradients stay whole. 49 GB is still more than 40. FlashAttention removes the scores, which
# grow with the square of the length; it touches no state, and the other activations, linear in the length, stay. ZeRO-2
# leaves 2 + 14/4 = 5.5 B, 38.5 GB, and no room for activations. ZeRO-3 leaves 16/4 = 4 B, 28 GB, and
# 12 GB for activations and the gathered layer, at the price of sending three times the parameters' bytes per step
# instead of twice. So: ZeRO-3, keep the fused attention, and recompute activations if 12 GB is too little.

# %% [markdown] id="wall"
# ## To pin to the wall
#
# * A block has $12h^2 + 13h$ parameters, not $2h^2$. Heads change none of them.
# * Twice the width: weights, gradients, moments **x 4**; activations **x 2**; scores **x 1**.
# * A matrix product makes its output and nothing else. 604 MB is the weight.
# * Scores: $b\,a\,s^2$ numbers a layer. At 4,096 tokens in fp32: 64 MiB a head, 6 GiB for 96.
# * Attention in tiles needs a running maximum and sum; it keeps one number per query instead of $s$.
# * Split an MLP by columns, then by rows: one all-reduce each way. $X$ is whole on every rank.
# * ZeRO, 16 bit: $4 + 12/N$, $2 + 14/N$, $16/N$ bytes per parameter. 25% and 12.5% are limits.
# * The lever that isn't at the peak saves nothing.

# %% id="wall-run"
opening = f"{slab.name}, 4 x 2,048 tokens, eager: all live tensors of one card, traced"
lab.headline("peak of the opening step", step.peak_bytes, "B", opening)
lab.headline("the same on one of eight ranks", fitted.peak_bytes, "B", "ZeRO-3 and fused attention, traced")
one_layer_bytes = "96 heads of one layer, one sequence of 4,096, fp32"
lab.headline("scores of a GPT-3 layer", one_layer, "B", one_layer_bytes)
of_peaks = "closed forms of the peak of forward + backward, one causal head of 64, fp32"
lab.headline("eager / tiles at 8,192 tokens", factor, "times", of_peaks)
zero8 = sum(sharding.states(8, 8, 1).values()) / 8
lab.headline("ZeRO-1 on 8 ranks", zero8, "B per parameter", "weights, gradients and states, 2 + 2 + 12 / 8")
memlab.progress()

# %% [markdown] id="verdicts-text"
# The verdicts on eight of the article's statements. (The errors 1.5 and 1.2e-7 in the one on FlashAttention are of other inputs
# than section 5's, which is why other numbers are printed there.)

# %% id="verdicts"
published.verdicts("C4-02", "C4-12", "C4-18", "C4-21", "C4-22", "C4-25", "C4-29", "C4-30")

# %% [markdown] id="read-on"
# ### Where to read on
#
# * Dao et al., *FlashAttention*, arXiv:2205.14135, section 3 and algorithm 1: the tiles, and what a memory hierarchy has to do
#   with them.
# * Milakov and Gimelshein, *Online normalizer calculation for softmax*, arXiv:1805.02867: two pages that explain $m$ and $l$.
# * Shoeybi et al., *Megatron-LM*, arXiv:1909.08053, section 3: the split of MLP and attention.
# * Rajbhandari et al., *ZeRO*, arXiv:1910.02054, sections 5 (memory) and 7 (communication).
# * `memlab/techniques/attention.py`, `tensor_parallel.py` and `sharding.py`: what you have written, with backward, any head size and
#   PyTorch's own beside it.
#
# Next: **5. Big data**, what the batch, the sequence and the number format do, and how to pay later.
