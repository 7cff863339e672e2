# %% [markdown] id="title"
# # 5. Too much data: batch, sequence, precision, accumulation, offload
#
# The model is small, the data isn't. A batch of 32 texts of 1024 tokens goes into GPT-2 small, 124 million parameters,
# and a card with 24 GB runs out of memory. You'll hear three pieces of advice: take bf16, "it halves memory"; take half
# the batch, "that saves a quarter"; offload. The first saves less than you think, the second more, the third is often
# aimed at the wrong tensors.
#
# "The article" in the tables below is a widely read Chinese-language article for engineers on this subject; this course
# tests its statements.
#
# This chapter puts a number on each of them. You'll fit the laws of length and batch to measured bytes, write an
# accumulation loop that equals the large batch exactly, a loss scaler and stochastic rounding from scratch, and a
# mixed-precision step as it's written today.
#
# You need no GPU. Stop at each question in **bold** and write your guess down before you run the next cell.
#
# Plan five to six hours: the cells run in a minute, the rest is six exercises (15 points, checked at once; the bare
# number under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save this
# notebook under its own name, `05_big_data.ipynb`.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import copy
import math
import os
import textwrap
import warnings

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import hardware, models, plots, published
from memlab.units import GB, format_bytes, format_gb

lab = memlab.begin("05_big_data", device=device, size=size, seed=seed)

# %% [markdown] id="fails"
# ## 1. A step that doesn't fit
#
# **GPT-2 small, 32 texts of 1024 tokens, fp32, AdamW, eager attention, on an RTX 4090. By how much does it miss?** The
# virtual card raises what CUDA would raise.

# %% id="fails-run"
from dataclasses import replace

layers, batch = lab.pick(smallest=(2, 64), normal=(12, 32))
gpt2 = replace(models.model("gpt2"), layers=layers)
card = hardware.gpu("RTX-4090")
plain = memlab.Recipe(precision="fp32", micro_batch=batch, sequence=1024, attention="eager")
try:
    memlab.trace_step(gpt2, plain, gpu=card)
except torch.OutOfMemoryError as error:
    print(textwrap.fill(str(error), 96))

# %% [markdown] id="advice"
# **Which helps more: bf16 autocast, or half the batch? By how many per cent each?** Here are closed forms of the whole
# step; nothing is run.

# %% id="advice-run"
before = memlab.compute(gpt2, plain, card)
print(f"the card has    {format_bytes(card.memory_bytes):>11}")
tries = {
    "as it is": {},
    "bf16 autocast": {"precision": "amp-bf16"},
    "half the batch": {"micro_batch": batch // 2},
}
for name, change in tries.items():
    after = memlab.compute(gpt2, plain.replace(**change), card)
    share = after.peak_bytes / before.peak_bytes - 1
    print(f"{name:16}{format_bytes(after.peak_bytes):>11} at the peak, {share:+.1%}")

# %% [markdown] id="advice-read"
# Autocast saves a few per cent, half the batch almost half of everything. Both pieces of advice were wrong, in opposite
# directions, and both for one reason: nobody had asked *which* bytes grow with the batch, and which have 16 bits. So
# let's ask, one tensor at a time.

# %% [markdown] id="scores" claims="C0-10 C5-05"
# ## 2. Twice the length
#
# Attention compares each token with each other one: the scores of one head are a matrix $s \times s$. **How many bytes
# do the scores of one head have at 4096 tokens in fp32? And of all 96 heads of GPT-3?**

# %% id="scores-run"
for s in lab.pick(smallest=(512, 1024), normal=(512, 1024, 2048, 4096)):
    with lab.card():
        q, k = (torch.randn(s, 64, device=lab.device) for _ in range(2))
        with memlab.Meter(device=lab.device) as meter:
            weights = torch.softmax(q @ k.mT / 8, dim=-1)
    print(f"{s:>5} tokens: {format_bytes(meter.live_bytes - q.nbytes - k.nbytes):>10} alive after softmax")
    assert weights.nbytes == 4 * s**2
del weights

# %% [markdown] id="scores-read" claims="C5-20"
# Each doubling takes four times as much: 1, 4, 16, 64 MiB, and 8192 tokens will take 256. That is *per head*. You may
# read "6 GB per head" somewhere; 6 GiB are the scores of GPT-3's 96 heads together, for one layer and one text of 4096
# tokens.

# %% id="scores-all" claims="C4-16"
head = 4 * 4096**2
print(f"one head, 4096 tokens: {format_bytes(head)}; 96 heads: {format_bytes(96 * head)}")
assert head == 64 * 2**20 and 4 * 8192**2 == 256 * 2**20 and 96 * head == 6 * 2**30

from memlab.nets import BertBlock
from memlab.virtual import VirtualGPU


def kept(s, b=1, width=256, heads=4, *, blocks=1, autocast=False, attention="eager", dropout=0.1):
    """Bytes that BERT blocks keep for their backward, the input among them, on a virtual A100."""
    shape = replace(
        models.model("bert-large"),
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=4 * width,
    )
    recipe = memlab.Recipe(attention=attention, dropout=dropout)
    with VirtualGPU("A100-80GB") as virtual:
        where = memlab.device()
        chain = nn.Sequential(*(BertBlock(shape, recipe) for _ in range(blocks))).to(where)
        x = torch.randn(b, s, width, device=where)
        with torch.autocast(where.type, torch.bfloat16, enabled=autocast):
            loss = chain(x).sum()
        loss.backward()
    return virtual.trace.consumer_peaks()["activations"]


print("\nfour heads, 512 tokens: what eager attention keeps beyond a fused one")
for width in (256, 512):
    scores = kept(512, width=width) - kept(512, width=width, attention="sdpa")
    print(f"  width {width}: {format_bytes(scores)} = {scores / (4 * 512**2):.2f} B per score")

# %% [markdown] id="width-read"
# Twice the width, the same scores. They come from the length and the number of heads; the width doesn't enter. So this
# is a problem of long texts, not of wide models. The 9 bytes are two fp32 tensors, what softmax and dropout return, and
# a mask of one byte (a few are missing: the fused kernel keeps something as well).
#
# **A whole block: does twice the length take twice the bytes, or four times?**

# %% id="length-run" claims="C5-02"
lengths = lab.pick(smallest=(128, 512, 2048), normal=(128, 256, 512, 1024, 2048))
saved = [kept(s) for s in lengths]
for s, n, last in zip(lengths, saved, [0, *saved], strict=False):
    law = 66 * 256 * s + 9 * 4 * s**2
    times = f"x {n / last:.2f}" if last else ""
    print(f"{s:>5} tokens: {n / 1e6:7.2f} MB {times:7}   66 h s + 9 a s^2 = {law / 1e6:7.2f} MB")
    assert abs(n / law - 1) < 0.002

# %% [markdown] id="length-read"
# Neither. Here it is 2.4 to 3.4 times, on its way to 4: $A s + B s^2$, two laws in one. In fp32 a block with dropout
# keeps $66\,h$ bytes per token that don't depend on the length, and 9 bytes per head and pair of tokens; with all
# activations in 16 bit, softmax's result too, these are $34\,h$ and 5 (chapter 2). They are equal at $s = A/B$:
# $66h/(9a)$, or $34h/(5a)$. Autocast on a GPU keeps softmax in fp32 and follows neither law (section 5).

# %% id="length-figure"
large = models.model("bert-large")
h, a = large.hidden, large.heads
cross = {"BERT-large, fp32": 66 * h / (9 * a), "BERT-large, 16 bit": 34 * h / (5 * a)}
cross["GPT-3, 16 bit"] = 34 * 12288 / (5 * 96)
for name, s in cross.items():
    print(f"{name}: the scores overtake the rest at {s:.0f} tokens")

xs = list(range(64, 833, 64))
linear, quadratic = [66 * h * s for s in xs], [9 * a * s**2 for s in xs]
here = cross["BERT-large, fp32"]
plots.curves(
    {
        "both": (xs, [x + y for x, y in zip(linear, quadratic, strict=True)]),
        "linear part, 66 h s": (xs, linear),
        "quadratic part, 9 a s²": (xs, quadratic),
    },
    "Short texts pay for tokens, long ones for pairs of them",
    "tokens (one text, BERT-large, fp32)",
    "kept by one block",
    in_bytes=True,
    notes=[(here, 2 * 66 * h * here, f"equal parts at {here:.0f}")],
)

# %% [markdown] id="length-price"
# So "memory is quadratic in the length" is true beyond a few hundred tokens and with eager attention. A fused kernel
# keeps no scores: $B = 0$, linear for ever, and the *arithmetic* stays quadratic (chapter 4).

# %% [markdown] id="ex-5-1-text"
# **Exercise 5.1** (2 points). You get bytes measured at some lengths, in no order. Find $A$ and $B$. The trick is to
# divide by $s$: $A + B s$ is a straight line, and a least-squares line is two lines of code. Take all points, since
# measured bytes may scatter. Don't use the formula above: the check's blocks have sizes of their own.


# %% id="ex-5-1" exercise="5.1"
def fit(lengths, saved):
    """(A, B) with saved = A s + B s^2. lengths: tokens, in no order; saved: bytes measured at each."""
    # exercise 5.1
    ### BEGIN SOLUTION
    slopes = [n / s for s, n in zip(lengths, saved, strict=True)]  # A + B s, a straight line
    s_mean, slope_mean = sum(lengths) / len(lengths), sum(slopes) / len(slopes)
    above = sum((s - s_mean) * (y - slope_mean) for s, y in zip(lengths, slopes, strict=True))
    B = above / sum((s - s_mean) ** 2 for s in lengths)
    return slope_mean - B * s_mean, B
    ### END SOLUTION


def crossover(A, B):
    """Tokens at which the quadratic part overtakes the linear one; math.inf where B is 0."""
    # exercise 5.1
    ### BEGIN SOLUTION
    return A / B if B else math.inf
    ### END SOLUTION


# %% id="check-5-1" check="5.1"
memlab.check("5.1", fit, crossover)

# %% [markdown] id="batch" claims="C5-01"
# ## 3. Twice the batch
#
# Samples don't know of each other, so activations are simply proportional to their number. **To the byte?**

# %% id="batch-run"
one = kept(128)
for b in lab.pick(smallest=(2, 8), normal=(1, 2, 4, 8)):
    print(f"batch {b}: {kept(128, b) / 1e6:6.2f} MB, {kept(128, b) / one:.3f} times one sample")

# %% [markdown] id="batch-read" claims="C5-06 C5-07"
# To the byte. But a *step* also holds what doesn't depend on the batch: $M = S + A\,b$. Take an example with round
# numbers: 2 GB of parameters, 1 GB of gradients, 1 GB of optimizer states, and 2 GB of activations for each sample.
# **By how many per cent does the step grow from 1 sample to 2? From 32 to 64? How large may the batch be on 80 GB?**

# %% id="batch-example"
S, A = 4 * GB, 2 * GB
for b in (1, 2, 32, 64):
    print(f"batch {b:>2}: {format_gb(S + A * b):>9}   activations {A * b / (S + A * b):.0%} of it")
print(f"1 to 2: {A / (S + A):+.0%};  32 to 64: {32 * A / (S + 32 * A):+.0%}")
print(f"on 80 GB: {(80 * GB - S) // A} samples, with nothing left for anything else")
assert [(S + A * b) // GB for b in (1, 32, 64)] == [6, 68, 132]

# %% [markdown] id="batch-rule"
# You may have read that twice the batch adds "20 to 30%". The rise is the share that the activations have before, $A b
# / (S + A b)$: 33% here at batch 1, 94% at batch 32. It is 20 to 30% only where activations are 20 to 30% of the step.
# Two real steps, measured on this machine:

# %% id="batch-measured"


def measured_peak(width, layers, rows):
    """Peak of live bytes of one AdamW step of an MLP on `rows` samples."""
    with lab.card():
        layers = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers).to(lab.device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(rows, width, device=lab.device)
        for _ in range(2):
            with memlab.Meter(model, optimizer, device=lab.device) as meter:
                model.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    return meter.trace.peak_bytes


growths = {}
for name, width, depth, rows in (
    ("wide, few samples", 512, lab.pick(smallest=2, normal=4), 64),
    ("narrow, many samples", 64, 12, lab.pick(smallest=2048, normal=4096)),
):
    small, double = measured_peak(width, depth, rows), measured_peak(width, depth, 2 * rows)
    growths[name] = double / small - 1
    print(f"{name:21} {format_bytes(small):>10} to {format_bytes(double):>10}: {growths[name]:+.1%}")
assert growths["wide, few samples"] < 0.1 and growths["narrow, many samples"] > 0.9

# %% [markdown] id="pixels" claims="C5-03 C5-04"
# Images are data too. **Twice the side: how much more for a ResNet-50, and how much for a vision transformer?**

# %% id="pixels-run"
last = 0
for side in (112, 224, 448):
    step = memlab.compute("resnet50", precision="fp32", micro_batch=8, image=side)
    held = step.consumer_peaks()["activations"]
    print(
        f"ResNet-50, batch 8, {side} pixels: {held / 1e6:7.0f} MB"
        + (f"  x {held / last:.2f}" if last else "")
    )
    last = held
blocks = [kept((side // 16) ** 2, 8, 768, 12, dropout=0.0) for side in (224, 448)]
copies = [4 * 8 * 12 * (side // 16) ** 4 for side in (224, 448)]
print(
    f"ViT-B block, 224 to 448: {blocks[0] / 1e6:.1f} to {blocks[1] / 1e6:.1f} MB, x {blocks[1] / blocks[0]:.1f}"
)
print(
    f"   one copy of its scores: {copies[0] / 1e6:.2f} to {copies[1] / 1e6:.1f} MB, x {copies[1] / copies[0]:.0f}"
)
assert copies[1] == 16 * copies[0]

wide, wider = (nn.Linear(h, h, bias=False).weight.numel() for h in (256, 512))
print(f"width 256 to 512: parameters x {wider / wide:.0f}, ", end="")
print(f"activations x {(512 * 34) / (256 * 34):.0f} (34 h bytes per token in 16 bit)")

# %% [markdown] id="pixels-read"
# A convnet keeps something for each pixel, so twice the side is four times the bytes. A ViT makes a token of each
# patch, four times as many tokens, and *their* pairs are sixteen times as many. The width of the features isn't data at
# all: twice the width takes four times the parameters and only twice the activations.

# %% [markdown] id="ex-5-2-text"
# **Exercise 5.2** (2 points). Three short functions. Sides are whole numbers of patches, and the ViT has no class
# token.


# %% id="ex-5-2" exercise="5.2"
def growth(S, A, b, k):
    """By what share a step grows when the batch goes from b to k b samples: 0.94 means 94% more.

    S: bytes that don't depend on the batch; A: bytes of activations for one sample
    """
    # exercise 5.2
    ### BEGIN SOLUTION
    return (S + A * k * b) / (S + A * b) - 1
    ### END SOLUTION


def largest_batch(S, A, memory):
    """The most samples that fit into `memory` bytes, an int; 0 if none does."""
    # exercise 5.2
    ### BEGIN SOLUTION
    return max(0, (memory - S) // A)
    ### END SOLUTION


def resolution(old, new, patch):
    """Factors (activations of a convnet, scores of a ViT with patches of `patch` pixels), side old -> new."""
    # exercise 5.2
    ### BEGIN SOLUTION
    tokens = (new // patch) ** 2 / (old // patch) ** 2
    return (new / old) ** 2, tokens**2
    ### END SOLUTION


# %% id="check-5-2" check="5.2"
memlab.check("5.2", growth, largest_batch, resolution)

# %% [markdown] id="accumulation" claims="C5-08 C5-09"
# ## 4. A large batch in parts
#
# Activations are proportional to the batch, but *gradients* of different samples only add up, and `.backward()` adds to
# `.grad` anyway. So run micro-batches one after the other and step once. Memory of the small batch, update of the large
# one. The loop that you find in articles:
#
#     for i in range(256):
#         loss = criterion(model(data[i]), labels[i])
#         loss.backward()
#     optimizer.step()
#
# **What's wrong with it? By what factor, with SGD? And with Adam?**

# %% id="accumulation-run"
parts = lab.pick(smallest=32, normal=256)
where = lab.device_for("steps of the optimizer")
x, y = torch.randn(parts, 16, device=where), torch.randn(parts, 1, device=where)
start = nn.Linear(16, 1).to(where)


def moved_by(make, gradient):
    """How far one step of an optimizer moves the weights."""
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    gradient(model)
    optimizer.step()
    return (model.weight - start.weight).norm().item()


def whole_batch(model):
    F.mse_loss(model(x), y).backward()


def articles_loop(model):
    for i in range(parts):
        F.mse_loss(model(x[i : i + 1]), y[i : i + 1]).backward()


def divided(model):
    for i in range(parts):
        (F.mse_loss(model(x[i : i + 1]), y[i : i + 1]) / parts).backward()


for name, make in (
    ("SGD", lambda p: torch.optim.SGD(p, lr=0.01)),
    ("Adam", lambda p: torch.optim.Adam(p, lr=0.01)),
):
    right = moved_by(make, whole_batch)
    undivided, divided_step = (moved_by(make, way) / right for way in (articles_loop, divided))
    print(
        f"{name:5} step, {parts} micro-batches / whole batch: undivided {undivided:7.2f}, divided {divided_step:.6f}"
    )

# %% [markdown] id="accumulation-read" claims="C5-10"
# `criterion` returns a *mean*, and a sum of 256 means is 256 times the mean: SGD steps 256 times too far. Adam divides
# by the gradient's own size and hides it, until clipping, weight decay by L2, or `eps` bring it to light. Divide each
# loss by the number of micro-batches.
#
# Two more things. `data[i]` takes *one* sample and drops the batch axis, unless `data` is a list of batches. And a
# micro-batch of 1 leaves a GPU idle: take the largest that fits, then accumulate.

# %% id="accumulation-shapes"
data = torch.randn(8, 3, 32, 32)
print(f"data {tuple(data.shape)}, data[0] {tuple(data[0].shape)}, data[0:4] {tuple(data[0:4].shape)}")

means, counts = torch.tensor([4.0, 2.0]), torch.tensor([3.0, 100.0])
per_token = (means * counts).sum() / counts.sum()
print(
    f"3 tokens of mean loss 4 and 100 of mean loss 2: mean of all {per_token:.3f}, mean of means {means.mean():.1f}"
)

# %% [markdown] id="accumulation-shares"
# Equal shares are right for equal micro-batches only. Texts differ in length, and a mean over 3 tokens would weigh as
# much as a mean over 100. The general rule has one line: **each mean loss times its share of what the whole mean is
# over**, samples or tokens that aren't padding. So the share depends on the *group*, and the last group of an epoch may
# be shorter.
#
# What no share can mend is BatchNorm, which normalises with the statistics of the micro-batch.

# %% id="accumulation-bn"
torch.manual_seed(lab.seed)
where = lab.device_for("gradients")
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)).to(where)
x, y = torch.randn(256, 16, device=where), torch.randn(256, 1, device=where)


def gradient_of(model, rows):
    """The gradient of the mean loss of 256 samples, in micro-batches of `rows`."""
    model.zero_grad()
    for i in range(0, 256, rows):
        (F.mse_loss(model(x[i : i + rows]), y[i : i + rows]) * rows / 256).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


for name, model in (("with BatchNorm", net), ("without", nn.Sequential(net[0], *net[2:]))):
    large_batch, parts_of_8 = gradient_of(model, 256), gradient_of(model, 8)
    off = ((parts_of_8 - large_batch).norm() / large_batch.norm()).item()
    print(f"{name:15} 32 x 8 against 256: gradient off by {off:.2g}")
try:
    net(x[:1])
except ValueError as error:
    print("a micro-batch of 1:", error)

# %% [markdown] id="accumulation-memory" claims="C5-21 C0-13"
# **Does accumulation take any extra memory?** Look for gradients during a forward.

# %% id="accumulation-figure"
depth, width, vocab, tokens = lab.pick(smallest=(2, 128, 2_000, 64), normal=(6, 256, 4_000, 256))
mini = replace(
    models.model("gpt2"),
    name="gpt2-mini",
    layers=depth,
    hidden=width,
    heads=width // 64,
    kv_heads=width // 64,
    ffn=4 * width,
    vocab=vocab,
)
accumulated = memlab.trace_step(mini, precision="fp32", micro_batch=4, accumulation=4, sequence=tokens)
plots.timeline(accumulated, title="Activations come and go, gradients stay")

# %% id="accumulation-bytes"
for micro, times in lab.pick(smallest=((4, 1), (1, 4)), normal=((16, 1), (4, 4), (1, 16))):
    step = memlab.trace_step(mini, precision="fp32", micro_batch=micro, accumulation=times, sequence=tokens)
    in_forward = step.consumers_at_peak()["gradients"]
    peaks = step.consumer_peaks()
    print(
        f"{times:>2} x {micro:>2}: peak {format_bytes(step.peak_bytes):>10} in {step.peak_phase:9} "
        f"activations {format_bytes(peaks['activations']):>10}, gradients at the peak {format_bytes(in_forward):>9}"
    )

# %% [markdown] id="accumulation-memory-read"
# It does: the gradients, which a plain step frees before its forward, must live from the first backward to the step.
# That is 4 bytes per parameter, small against the activations that it saves. With sharded data parallelism it isn't
# small: FSDP's `no_sync` keeps the *unsharded* gradients between micro-batches.

# %% id="batch-verdicts" claims="C0-10 C4-16 C5-02 C5-04 C5-07 C5-09 C5-20 C5-21"
published.verdicts("C0-10", "C4-16", "C5-02", "C5-04", "C5-07", "C5-09", "C5-20", "C5-21")

# %% [markdown] id="ex-5-3-text"
# **Exercise 5.3** (3 points). Write the loop. The check trains three small models with it and compares the gradients of
# each step with those of the whole group in one batch, then measures bytes. A step that builds all graphs before the
# first backward gives the right gradient and saves nothing: it loses the point for bytes. A micro-batch may hold
# nothing but padding; its share is 0.


# %% id="ex-5-3" exercise="5.3"
def train(loss_of, count, batches, optimizer, every):
    """One epoch of gradient accumulation: `every` micro-batches for each optimizer step.

    loss_of(batch): the mean loss of one micro-batch, a scalar with a graph
    count(batch): how many things that mean is over (samples, or tokens that aren't padding)
    batches: a list of micro-batches; the last group may be shorter than `every`
    """
    # exercise 5.3
    ### BEGIN SOLUTION
    for start in range(0, len(batches), every):
        group = batches[start : start + every]
        total = sum(count(batch) for batch in group)
        optimizer.zero_grad()
        for batch in group:
            (loss_of(batch) * (count(batch) / total)).backward()
        optimizer.step()
    ### END SOLUTION


# %% id="check-5-3" check="5.3"
memlab.check("5.3", train)

# %% [markdown] id="precision" claims="C5-12"
# ## 5. What half precision halves
#
# Four formats, told apart by their range and by how finely they step. Below the smallest *normal* number a format
# still has a few *subnormal* ones, with fewer and fewer digits.

# %% id="precision-formats"
print(f"{'':26}{'smallest':>10}{'smallest':>11}")
print(f"{'format':10}{'bytes':>6}{'largest':>10}{'normal':>10}{'subnormal':>11}{'step after 1':>14}")
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    info = torch.finfo(dtype)
    name = str(dtype)[6:]
    subnormal = info.smallest_normal * info.eps
    ends = f"{info.max:>10.3g}{info.smallest_normal:>10.2g}{subnormal:>11.2g}"
    print(f"{name:10}{dtype.itemsize:>6}{ends}{info.eps:>14.2g}")

# %% [markdown] id="precision-formats-read" claims="C0-13 C5-11"
# fp16 has few exponents, bf16 few digits: 16 bits don't suffice for both. And "mixed" precision isn't a format, it is a
# rule: **autocast casts the inputs of matrix products to 16 bits, and leaves alone what stays.** What stays after a
# step?

# %% id="precision-states"
with lab.card():
    layer = nn.Linear(256, 256, bias=False).to(lab.device)
    adam = torch.optim.AdamW(layer.parameters())
    with torch.amp.autocast(lab.device.type, dtype=torch.bfloat16):
        y = layer(torch.randn(8, 256, device=lab.device))
    y.float().square().mean().backward()
    adam.step()
state = adam.state[layer.weight]
tensors = {"result": y, "weight": layer.weight, "gradient": layer.weight.grad}
tensors |= {name: t for name, t in state.items() if t.dim()}
for name, t in tensors.items():
    print(f"{name:12}{str(t.dtype)[6:]:10}{t.nbytes / layer.weight.numel():6.2f} B per parameter")
after_autocast = sum(t.nbytes for name, t in tensors.items() if name != "result") / layer.weight.numel()
print(f"weight, gradient and moments: {after_autocast:.1f} B per parameter")
assert after_autocast == 16

# %% [markdown] id="precision-block"
# 16 bytes per parameter, as in fp32. Only activations can shrink. **To a half?** Here is one BERT-large block inside a
# chain, 8 texts, by CUDA's casting rules on a virtual A100: what a second block adds to a first.


# %% id="precision-block-run"
def one_block(s, **how):
    """Bytes that one block of BERT-large adds to a chain of them, 8 texts of s tokens."""
    return kept(s, 8, h, a, blocks=2, **how) - kept(s, 8, h, a, blocks=1, **how)


weights_of_block = 12 * h * h + 9 * h  # the Linear layers, biases included; norms aren't cast
sizes = lab.pick(smallest=(64, 128), normal=(128, 256, 512, 1024, 2048))
factors, per_score = {}, {}
print(f"{'':30}with the bf16 copies of the weights    without")
for dropout in (0.1, 0.0):
    full, half = ([one_block(s, dropout=dropout, autocast=cast) for s in sizes] for cast in (False, True))
    for s, wide, narrow in zip(sizes, full, half, strict=True):
        factors[s, dropout] = (narrow - 2 * weights_of_block) / wide
        with_copies = f"{wide / 1e6:.1f} to {narrow / 1e6:.1f} MB, x {narrow / wide:.2f}"
        print(f"{s:>4} tokens, dropout {dropout}: {with_copies:>37}{factors[s, dropout]:>14.2f}")
    for name, kept_at in (("fp32", full), ("autocast", [n - 2 * weights_of_block for n in half])):
        slope = kept_at[-1] / sizes[-1] - kept_at[-2] / sizes[-2]  # of A + B s
        per_score[name, dropout] = slope / (sizes[-1] - sizes[-2]) / (8 * a)
print()
for (name, dropout), each in per_score.items():
    print(f"{name:9} dropout {dropout}: {each:.2f} B for each score")
assert min(factors.values()) > 0.6  # nowhere near a half

# %% [markdown] id="precision-block-read"
# Not to a half. On a GPU softmax and layer norm run in fp32, and what they return is kept in fp32; the next product
# casts it, and keeps the cast copy *as well*. Look at one score. In fp32 the block keeps softmax's result, 4 B. Under
# autocast it keeps that and a bf16 copy for the product with $V$: 6 B, **more than before**. With dropout it was 4 + 4
# + 1 (the mask), and becomes 4 + 2 + 1. So the factors that are quoted, 0.67 to 0.71, hold with dropout and up to 512
# tokens; without it, as most large models are trained today, autocast saves less the longer the text, and past about
# 770 tokens (here, with eager attention) it costs bytes.
#
# On top of that come 16-bit copies of the weights, up to 2 bytes per parameter, for as long as the graph lives: with a
# small batch they outweigh what was saved. Your step of section 1 had no dropout, eager attention, 1024 tokens, and
# logits that the loss wants in fp32. Hence the few per cent.
#
# A CPU can't stand in for a GPU here: its autocast runs softmax and layer norm in bf16.

# %% id="precision-cpu"
from memlab.techniques import precision

width = lab.pick(smallest=256, normal=h)
shape = replace(large, hidden=width, heads=width // 64, kv_heads=width // 64, ffn=4 * width)
block = BertBlock(shape, memlab.Recipe(attention="eager", dropout=0.1))
from_below = torch.randn(2, 128, width, requires_grad=True)
held = {}
for name, context in (
    ("fp32", torch.autocast("cpu", enabled=False)),
    ("the CPU's autocast", torch.autocast("cpu", torch.bfloat16)),
    ("CUDA's rules, by hand", precision.Autocast(torch.bfloat16, rules="cuda")),
):
    with memlab.Meter(block, device="cpu") as meter:
        with context:
            loss = block(from_below * 1).float().mean()  # the input is a tensor of the forward, as in a chain
        loss.backward()
    copies_of_weights = 0 if name == "fp32" else precision.cast_bytes(block)
    held[name] = meter.trace.consumer_peaks()["activations"] - copies_of_weights
    print(
        f"{name:22}{format_bytes(held[name]):>10}, x {held[name] / held['fp32']:.2f} (weight copies taken out)"
    )
    block.zero_grad()

# %% [markdown] id="precision-figure"
# What does shrink everything that is there is a model *in* bf16. **Which colours of the step change from the left to
# the right?**

# %% id="precision-figure-run"
steps = {
    name: memlab.trace_step(
        mini, precision=way, micro_batch=8, sequence=tokens, attention="eager", gpu="A100-80GB"
    )
    for name, way in (("fp32", "fp32"), ("bf16 autocast", "amp-bf16"), ("a bf16 model", "bf16"))
}
plots.timelines(steps, "Autocast shrinks activations only, and not by half")

# %% id="precision-speed"
a100 = hardware.gpu("A100-80GB")
peak_speeds = {name: a100.flops[name] / 1e12 for name in ("fp32", "tf32", "bf16")}
print(
    f"{a100.name}, TFLOP/s at best: " + ", ".join(f"{name} {speed:g}" for name, speed in peak_speeds.items())
)

# %% [markdown] id="precision-read"
# In autocast's picture parameters, gradients and optimizer states stand as high as before. The reason to use it is
# speed, an A100 multiplies 16 times as fast in bf16 as in fp32 (twice as fast as in TF32), and the memory is a welcome
# extra. The third picture halves weights, gradients and moments; the spike at the top, the loss in fp32, stands equally
# high above the activations in all three. Its price is in section 7.

# %% [markdown] id="fp16" claims="C5-13"
# ## 6. fp16 and its scaler
#
# fp16 ends at 65,504, so large numbers overflow. In training the small ones are the problem. **Which of these gradients
# survive a cast to fp16?**

# %% id="fp16-run"
small = torch.tensor([1e-4, 1e-6, 1e-7, 2e-8, 1e-8])
print("as they are   ", small.half().tolist())
print("times 65,536  ", (small * 2**16).half().float().div(2**16).tolist())
print("and the largest", torch.tensor([65_504.0, 65_520.0]).half().tolist())


def zeros(scaler):
    """Share of gradients that are 0 in an MLP of width 256 under fp16 autocast, with a loss made small."""
    torch.manual_seed(lab.seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(64, 256)).float().square().mean() * 1e-3  # an fp16 loss can't hold 65,536
    (loss if scaler is None else scaler.scale(loss)).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert gradients.isfinite().all()
    return gradients.eq(0).float().mean().item()


shares = zeros(None), zeros(precision.LossScaler())
print(
    f"\ngradients that are 0: {shares[0]:.1%} without loss scaling, {shares[1]:.1%} with a factor of 65,536"
)

# %% [markdown] id="fp16-read"
# Half of fp16's smallest subnormal number, 6.0e-8, is the end: what is below 3.0e-8 becomes 0. The cure is one multiplication. **Scale
# the loss**, and by the chain rule every gradient is scaled; divide before the step. How large a factor? As large as
# nothing overflows, which changes during training. So it is found by trying:
#
# * multiply the loss by `factor`; after the backward divide the gradients by it, *in place*;
# * is one of them inf or nan? Leave the step out, multiply `factor` by `backoff`;
# * else step; after `interval` good steps *in a row* multiply `factor` by `growth`, and count again from 0.
#
# With powers of 2 the scaling rounds nothing. `unscale_` may be called before `step`, by somebody who wants to clip the
# true gradients; then `step` must not divide a second time. After `update` the scaler is ready for the next step.

# %% [markdown] id="ex-5-4-text"
# **Exercise 5.4** (3 points). Write it; `optimizer.param_groups` is a list of dicts, the parameters stand under
# `"params"`. There may be several groups, and parameters without a gradient. The check lets the scaler live through
# overflows of both kinds, compares the weights with training without a scaler, looks at every factor, and measures what
# unscaling takes: twelve gradients joined into one tensor would be a copy of all of them, for nothing.


# %% id="ex-5-4" exercise="5.4"
class Scaler:
    """Dynamic loss scaling: scale, (unscale_), step, update, as torch.amp.GradScaler does it."""

    def __init__(self, factor=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.factor, self.growth, self.backoff, self.interval = factor, growth, backoff, interval
        self.good = 0  # steps in a row without overflow
        self.overflow = None  # of the step in work; None: its gradients aren't unscaled yet

    def scale(self, loss):
        """The loss times the factor."""
        # exercise 5.4
        ### BEGIN SOLUTION
        return loss * self.factor
        ### END SOLUTION

    def unscale_(self, optimizer):
        """Divides the gradients by the factor in place, and finds out whether one is inf or nan."""
        # exercise 5.4
        ### BEGIN SOLUTION
        self.overflow = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 / self.factor)
                    if not p.grad.isfinite().all():
                        self.overflow = True
        ### END SOLUTION

    def step(self, optimizer):
        """Unscales if that isn't done yet; then optimizer.step(), or nothing after an overflow."""
        # exercise 5.4
        ### BEGIN SOLUTION
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
        ### END SOLUTION

    def update(self):
        """The factor of the next step: smaller after an overflow, larger after `interval` good steps."""
        # exercise 5.4
        ### BEGIN SOLUTION
        if self.overflow:
            self.factor *= self.backoff
            self.good = 0
        else:
            self.good += 1
            if self.good == self.interval:
                self.factor *= self.growth
                self.good = 0
        self.overflow = None
        ### END SOLUTION


# %% id="check-5-4" check="5.4"
memlab.check("5.4", Scaler)

# %% [markdown] id="fp16-torch"
# Its place in PyTorch is `torch.amp.GradScaler`. Here the library's own scaler lives beside it, with an overflow every
# fifth step.

# %% id="fp16-torch-run"
ours, theirs = (
    precision.LossScaler(interval=3),
    torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3),
)
lives = []
for scaling in (ours, theirs):
    torch.manual_seed(lab.seed)
    model = nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for i in range(10):
        model.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean() * (math.inf if i % 5 == 4 else 1)
        scaling.scale(loss).backward()
        scaling.step(sgd)
        scaling.update()
        scales.append(scaling.get_scale())
    lives.append((scales, model.weight.detach()))
print("factors:", [f"2^{math.log2(f):.0f}" for f in lives[0][0]])
print(
    "equal to torch's, factors and weights:",
    lives[0][0] == lives[1][0],
    torch.equal(lives[0][1], lives[1][1]),
)

# %% [markdown] id="bf16" claims="C5-14"
# ## 7. bf16 and its digits
#
# bf16 has fp32's range, so no gradient is lost and no scaler needed. Its price is digits: 8 bits of them. **A weight is
# 1.0 and each of 1000 steps adds 0.001. What is it afterwards, in fp32 and in bf16?**

# %% id="bf16-run"
torch.manual_seed(lab.seed)
exact, rounded = torch.tensor(1.0), torch.tensor(1.0, dtype=torch.bfloat16)
by_chance = torch.ones(lab.pick(smallest=1_000, normal=20_000), dtype=torch.bfloat16)
for _ in range(1000):
    exact += 0.001
    rounded += 0.001
    by_chance = precision.stochastic_round(by_chance.float() + 0.001)
print(
    f"fp32 {exact:.4f}, bf16 {rounded:.4f}, bf16 rounded by chance {by_chance.float().mean():.4f} on average"
)
print(f"the next number after 1 in bf16: {1 + torch.finfo(torch.bfloat16).eps}")
assert rounded == 1.0

# %% [markdown] id="bf16-read"
# It never moves: half a step of bf16 at 1 is 0.0039, and an update below that is rounded away, a thousand times. Two
# cures, and their bytes per parameter with AdamW:
#
# * an fp32 **master** copy that gathers the updates: 2 + 2 + 4 + 8 = 16;
# * **stochastic rounding**, up or down by chance, so that the mean is right: 2 + 2 + 4 = 8.
#
# A bf16 number is the upper half of the 32 bits of an fp32 number. So: take fp32's bits as an integer
# (`x.view(torch.int32)`), add a random integer from 0 to 65,535 (of 32 bits too: `torch.randint(…, dtype=torch.int32)`),
# and set the lower 16 bits to 0 (`& -(2**16)`). The carry rounds up exactly as often as it should: a number that lies 30% of the way to its neighbour goes up in 30% of
# all cases.

# %% [markdown] id="ex-5-5-text"
# **Exercise 5.5** (2 points). Write it for tensors of any shape. What bf16 holds exactly must stay, and so must
# infinities and NaN: a NaN may have all bits set, and wraps round to a number when noise is added.


# %% id="ex-5-5" exercise="5.5"
def stochastic_round(x):
    """fp32 -> bf16: up or down to a neighbour, by chance, so that the mean over many calls is x."""
    # exercise 5.5
    ### BEGIN SOLUTION
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device)
    bits = (x.view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).bfloat16()
    ### END SOLUTION


# %% id="check-5-5" check="5.5"
memlab.check("5.5", stochastic_round)

# %% [markdown] id="amp" claims="C5-17 C5-18"
# ## 8. The step as it's written today
#
# Many snippets begin with `from torch.cuda.amp import autocast, GradScaler`. **Does that still run? And which dtype
# does a bare `autocast()` use?**

# %% id="amp-run"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from torch.cuda.amp import GradScaler, autocast

    autocast(enabled=False)
    GradScaler(enabled=False)
for text in sorted({str(w.message).split(". ")[0] for w in seen if w.category is FutureWarning}):
    print("FutureWarning:", text)
for kind in ("cuda", "cpu"):
    print(f"torch.amp.autocast({kind!r}) without a dtype: {torch.get_autocast_dtype(kind)}")

# %% [markdown] id="amp-read" claims="C5-19"
# It runs and warns. The dtype is the one you give; without one it is fp16 on CUDA, so that *a bare `autocast()` needs a
# scaler*, and bf16 on a CPU. Snippets often have a scaler around bf16 "against underflow". **What does it change
# there?**

# %% id="amp-scaler"


def trained(with_scaler):
    torch.manual_seed(lab.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaling = torch.amp.GradScaler("cpu", enabled=with_scaler)
    for _ in range(30):
        x = torch.randn(16, 32)
        model.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scaled = scaling.scale(loss)
        scaled.backward()
        scaling.step(adamw)
        scaling.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


with_it, without = trained(True), trained(False)
difference = (with_it - without).abs().max().item()
print(f"30 steps in bf16, with and without a scaler: largest difference of a weight {difference}")
assert difference == 0

# %% [markdown] id="amp-rules"
# Nothing, to the bit: the factor is a power of 2. It only costs a look at every gradient. (If the *model* is in bf16 on
# CUDA, unscaling raises instead: not implemented for BFloat16, an open issue.) So:
#
# 1. `torch.amp.autocast(device, dtype=…)` around forward and loss, not around the backward, which runs each operator in
#    its forward's type by itself;
# 2. a scaler for fp16 only;
# 3. clip the *true* gradient: `scale(loss).backward()`, `unscale_`, clip, `step`, `update`;
# 4. zero the gradients before the forward, so that no old ones are alive at its peak.

# %% [markdown] id="offload" claims="C5-15 C5-16"
# ## 9. What to offload
#
# The last resort: bytes that aren't needed just now wait in host memory, or on a drive, and come back over a link. A
# common table says: keep parameters, gradients and optimizer states on the GPU, "hot"; move "rarely used parameters"
# out. **How often does a step touch each of the three? Which are the coldest bytes?**

# %% id="offload-touches"
from memlab.techniques import offload

weights_70b = 70 * 10**9
kinds = {"parameters": 2, "gradients": 2, "optimizer_states": 12}  # bf16, fp32 master and moments
micro_batches = 4
touched = offload.touches(micro_batches)
print(f"70 B parameters, {micro_batches} micro-batches for a step")
for name, each in sorted(kinds.items(), key=lambda item: touched[item[0]]):
    total = each * weights_70b
    a_step = format_gb(total * touched[name])
    times = "once" if touched[name] == 1 else f"{touched[name]} times"
    print(f"{plots.word(name):17}{format_gb(total):>11}, touched {times:>7}: {a_step:>12} a step")
on_8 = sum(kinds.values()) * weights_70b // 8
left = (kinds["parameters"] + kinds["gradients"]) * weights_70b // 8
print(
    f"\non each of 8 cards (ZeRO-3): {format_gb(on_8)}; with the optimizer states in host memory {format_gb(left)}"
)

# %% [markdown] id="offload-read"
# The step itself touches each of the three once. Before it each of the 4 backwards adds to the gradients, 4 + 1 = 5, and
# each forward and each backward reads the parameters, 2 x 4 + 1 = 9. In a dense model every parameter is used: nothing is colder than the optimizer states,
# 12 of 16 bytes, touched once a step. What you win is bytes, what you pay in each step is bytes times touches; so **the
# price of a byte is its touches**. Optimizer states first, then gradients, parameters last. And if the *step itself*
# runs on the host (ZeRO-Offload), the states never travel: only gradients go down, 2 B, and new parameters come up, 2
# B.

# %% id="offload-time"
moved = offload.moved(weights_70b // 8, "optimizer", parameter=2, gradient=2)
through = offload.moved(weights_70b // 8, "states", states=12)
pcie, nvme = hardware.link("PCIe4"), hardware.link("NVMe")
seconds = offload.seconds(moved["out"], pcie.bandwidth) + offload.seconds(moved["back"], pcie.bandwidth)
print(
    f"step on the host: {format_gb(moved['out'])} down, {format_gb(moved['back'])} up: {seconds:.1f} s over {pcie.name}"
)
seconds = offload.seconds(through["out"] + through["back"], nvme.bandwidth)
print(
    f"states on a drive, in and out: {format_gb(sum(through.values()))}: {seconds:.0f} s over {nvme.name} at its ceiling"
)
print("each of 8 cards, one step, nothing overlapped")

# %% id="offload-measured"
width = lab.pick(smallest=64, normal=256)
rows = {}
for name in ("on the device", "states on the host"):
    with VirtualGPU("T4") as virtual:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(memlab.device())
        if name == "on the device":
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            optimizer = offload.HostOptimizer(
                model.parameters(), lambda ps: torch.optim.AdamW(ps, fused=False)
            )
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(4, width, device=memlab.device())).sum().backward()
            optimizer.step()
    count = 8 * (width * width + width)
    rows[name] = virtual.trace.consumer_peaks()["optimizer_states"] / count
    print(f"{name:20}{rows[name]:5.2f} B per parameter of optimizer states on the card")
print(f"moved in 2 steps: {format_bytes(optimizer.out)} down, {format_bytes(optimizer.back)} up")
assert rows["states on the host"] < 0.01 and optimizer.out == optimizer.back == 2 * 4 * count

# %% id="precision-verdicts" claims="C0-13 C5-11 C5-13 C5-14 C5-16 C5-17 C5-18 C5-19"
published.verdicts("C0-13", "C5-11", "C5-13", "C5-14", "C5-16", "C5-17", "C5-18", "C5-19")

# %% [markdown] id="ex-5-6-text"
# **Exercise 5.6** (3 points). The step of section 8 (2 points), and the order of offloading (1 point). The parameters
# stand in `optimizer.param_groups`, a list of dicts with the key `"params"`; `torch.nn.utils.clip_grad_norm_` clips.
# Warnings count as errors. The check's scaler writes down who calls it, in which order, and the weights are compared
# with a step by hand.


# %% id="ex-5-6" exercise="5.6"
def amp_step(loss_of, optimizer, dtype, scaler, max_norm, device):
    """One training step in mixed precision; returns the loss, without its graph.

    loss_of(): forward and loss; dtype: torch.bfloat16 or torch.float16; device: "cuda" or "cpu"
    scaler: a torch.amp.GradScaler, to be used for float16 only
    max_norm: the gradient is clipped to this norm
    """
    # exercise 5.6
    ### BEGIN SOLUTION
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    with torch.amp.autocast(device, dtype=dtype):
        loss = loss_of()
    if dtype == torch.float16:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    return loss.detach()
    ### END SOLUTION


def offload_plan(tensors, need):
    """Names of what goes to host memory, first to last, until at least `need` bytes are free.

    tensors: {name: (bytes, how often a step touches them)}. The cheapest bytes leave first; of two equally
    cheap tensors the larger one.
    """
    # exercise 5.6
    ### BEGIN SOLUTION
    plan, freed = [], 0
    for name, (size, _) in sorted(tensors.items(), key=lambda item: (item[1][1], -item[1][0])):
        if freed >= need:
            break
        plan.append(name)
        freed += size
    return plan
    ### END SOLUTION


# %% id="check-5-6" check="5.6"
memlab.check("5.6", amp_step, offload_plan)

# %% [markdown] id="predict"
# ## 10. Two measurements predict the third
#
# $M = S + A\,b$ has two unknowns, so two measurements tell all. **Take the measured peaks at micro-batch 2 and 4 and
# predict the one at 8.** The next cell solves for $S$ and $A$, the one after it measures.

# %% id="predict-run"
where = lab.device_for("steps that really run")
peaks = {
    b: memlab.measure_step(mini, precision="fp32", micro_batch=b, sequence=tokens, device=where)
    for b in (2, 4)
}
each = (peaks[4].peak_bytes - peaks[2].peak_bytes) // 2
fixed = peaks[2].peak_bytes - 2 * each
predicted = fixed + 8 * each
for b, trace in peaks.items():
    print(f"micro-batch {b}: {format_bytes(trace.peak_bytes)} in {trace.peak_phase}")
print(f"A = {format_bytes(each)}, S = {format_bytes(fixed)}; predicted for 8: {format_bytes(predicted)}")

# %% id="predict-measure"
comparison = memlab.compare(mini, precision="fp32", micro_batch=8, sequence=tokens)
print(comparison)
measured = comparison.measured.peak_bytes
print(
    f"\npredicted from two measurements {format_bytes(predicted)}, measured {format_bytes(measured)}: ",
    end="",
)
print(f"{predicted / measured - 1:+.2%}")

# %% [markdown] id="predict-read"
# If all three steps have their peak in the same phase, the line is exact; what is left over stands above. Had the
# smallest one its peak in the optimizer step, the line would bend, and $S$ would tell you so. **What should $S$ be
# here, in bytes per parameter?** At the start of the backward, where the peaks are, the weights and
# Adam's moments are there, and hardly a gradient.

# %% id="predict-fixed"
print(f"S is {fixed / mini.parameter_count:.1f} B per parameter; phases of the peaks: ", end="")
print({b: trace.peak_phase for b, trace in peaks.items()} | {8: comparison.measured.peak_phase})

# %% [markdown] id="published-text"
# ### Real cards
#
# Published measurements, none of them ours. LitGPT reports fine-tuning of Llama-2-7B with LoRA on an A100, bf16,
# micro-batches of 1 and 2. Two measurements: so we know $S$, and it should be what doesn't depend on the batch, the
# bf16 weights. And torchao reports a ViT of 1.1 B parameters, all in bf16, without and with the optimizer's two moments
# in host memory: 4 B per parameter should be gone.

# %% id="published-run"
reported = {row["id"]: row for row in published.measurements()}
single, double = (reported[i]["value"] for i in (183, 186))
sample = double - single
weights_7b = 2 * models.model("llama2-7b").parameter_count / 1e9
print(f"LitGPT: {single} and {double} GB, so A = {sample:.2f} GB and S = {single - sample:.2f} GB; ", end="")
print(f"bf16 weights {weights_7b:.2f} GB, residual {single - sample - weights_7b:+.2f} GB")
print(f"   twice the batch: {double / single - 1:+.0%}, by A/(S + A) {sample / single:+.0%}")
plain_run, moved_run = (reported[i]["value"] for i in (220, 221))
gone = plain_run - moved_run
print(
    f"torchao: {plain_run} and {moved_run} GB, {gone:.2f} GB gone; 4 B x 1.1 B = 4.40 GB, residual {gone - 4.4:+.2f} GB"
)

# %% [markdown] id="published-read"
# The intercept of two published numbers is the model's weights, to within half a per cent: nobody had to say so.
# (Adapters and their states are in the residual; the parameters of the ViT are rounded in its name.)
#
# Have you got a GPU? Then here is what autocast does to peak and speed on it, and what a bf16 model says to a scaler.

# %% id="gpu"
if lab.device.type == "cuda":
    ways = ("fp32", "amp-bf16") if lab.half == torch.bfloat16 else ("fp32", "amp-fp16", "amp-bf16")  # emulated last
    for way in ways:
        trace = memlab.measure_step("gpt2", precision=way, micro_batch=4, sequence=512, device=lab.device)
        print(f"{way:9} peak {format_bytes(trace.peak_bytes)}")
    for way in ways:
        half = torch.float16 if way == "amp-fp16" else torch.bfloat16
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        square = torch.randn(4096, 4096, device=lab.device)
        with torch.amp.autocast("cuda", dtype=half, enabled=way != "fp32"):
            square @ square
            first.record()
            for _ in range(10):
                square @ square
            last.record()
        torch.cuda.synchronize()
        print(
            f"{way:9} {10 * 2 * 4096**3 / first.elapsed_time(last) / 1e9:.0f} TFLOP/s in a product of 4096 x 4096"
        )
    model = nn.Linear(8, 8, device=lab.device, dtype=torch.bfloat16)
    sgd, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    try:
        scaler.scale(model(torch.randn(2, 8, device=lab.device, dtype=torch.bfloat16)).sum()).backward()
        scaler.step(sgd)
        print("a bf16 model and a scaler: runs in this version")
    except NotImplementedError as error:
        print("a bf16 model and a scaler:", str(error).splitlines()[0][:90])
else:
    print("no CUDA GPU here, so nothing is measured on one")

# %% [markdown] id="fits"
# ## 11. The same step, fitting
#
# Back to 32 texts of 1024 tokens. **Which levers, in which order?** The batch is what the memory is made of, so
# accumulate it: 4 micro-batches of 8 alone are enough. A fused kernel makes room for larger micro-batches, for the
# scores are gone; and with them goes what autocast keeps in fp32 *and* in bf16. So the advice of section 1 depends on
# the attention: a few per cent with eager attention, a quarter (44 to 33 GiB) with a fused one, speed with both. The trace below
# runs 2 of the 4 micro-batches with all levers on the virtual card; from the second on they are alike.

# %% id="fits-run"
levers = {
    "as it was": {},
    "bf16 autocast only": {"precision": "amp-bf16"},
    "4 micro-batches only": {"micro_batch": batch // 4, "accumulation": 4},
    "fused attention": {"attention": "sdpa"},
    "and bf16 autocast": {"attention": "sdpa", "precision": "amp-bf16"},
    "and 4 micro-batches": {
        "attention": "sdpa",
        "precision": "amp-bf16",
        "micro_batch": batch // 4,
        "accumulation": 4,
    },
}
for name, change in levers.items():
    peak = memlab.compute(gpt2, plain.replace(**change), card).peak_bytes
    share = f"{peak / before.peak_bytes - 1:+.0%}"
    print(
        f"{name:22}{format_bytes(peak):>11}{share:>6}   {'fits' if peak <= card.memory_bytes else 'does not fit'}"
    )

recipe = plain.replace(**{**levers["and 4 micro-batches"], "accumulation": 2})
fits = memlab.trace_step(gpt2, recipe, gpu=card)
print(f"\ntraced on the virtual {card.name}: {format_bytes(fits.peak_bytes)} in {fits.peak_phase}")

# %% id="fits-figure"
plots.timeline(fits, budget=card.memory_bytes, title="Two of the four micro-batches: the step fits")

# %% [markdown] id="explore"
# ## 12. Your own model
#
# Which micro-batch is the largest that fits, and how often must it run for one step? Change the card, the length, the
# attention. *Trace it* checks the formula against the step that you chose. Without a running kernel you see the starting
# point.

# %% id="explore-run"
from memlab import widgets

widgets.micro_batches(model="gpt2", gpu="RTX-4090")

# %% [markdown] id="written-text"
# ## 13. In your own words
#
# **Exercise 5.7** (3 points, graded by hand, at most eight sentences). A colleague trains a 1 B model with AdamW in
# fp32 on a card of 24 GB: batch 16, 512 tokens, eager attention, no dropout. Weights, gradients and moments take 16 GB,
# the activations 1.7 GB for each text. They turn on bf16 autocast "to halve memory" and, when that fails, plan to move "rarely used
# parameters" to the host. Explain, with a number each, what autocast changes and what it doesn't, why the plan won't
# help, and which change you would make instead so that the step, still of 16 texts, fits; say what makes it exact.
#
# *Rubric.* 1 point: what autocast leaves as it is, what it shrinks and what it adds, with a number for each. 1 point:
# how often a dense model uses its parameters, and which bytes are the coldest instead. 1 point: a change that fits,
# with the sum at the peak in GB, and what makes it exact.

# %% [markdown] id="written-5-7" manual="5.7" points=3
# Autocast changes what flows, not what stays: weights, gradients and moments are fp32 as before, 16 B per parameter, 16
# GB. Activations don't halve: they fall from 16 x 1.7 = 27 GB to about three quarters, 21 GB (0.7 to 0.9 are right),
# since without dropout each score takes 6 bytes instead of 4, and up to 2 GB of bf16 copies of the weights come on top:
# 43 GB before, 39 after. In a dense model every parameter is used in each forward and each backward, so there are no
# rarely used ones to move; what is touched least are the optimizer states, once a step, and they are 8 of the 16 GB.
# I'd accumulate: 16 micro-batches of one text hold 1.7 GB of activations, so the peak is 16 + 1.7 = 17.7 GB (the
# gradients, which stay between micro-batches, are in the 16), and 20 GB in a foreach AdamW step. It is exact if each
# mean loss is multiplied by its share of the group, 1/16 for equal texts, tokens by tokens else, and if nothing like
# BatchNorm looks at the whole batch.

# %% [markdown] id="wall"
# ## To pin to the wall
#
# * Bytes kept by a block: $A s + B s^2$. Equal at $66h/(9a)$ tokens in fp32, $34h/(5a)$ in 16 bit: 469 and 435 for
#   BERT-large (16 bit: softmax's result too, which autocast keeps in fp32). With fused attention $B = 0$.
# * A step: $M = S + A\,b$. Twice the batch adds $A b / (S + A b)$, nothing else. Two measurements give $S$ and $A$.
# * Twice the side of an image: x 4 for a convnet, x 16 for a ViT's scores.
# * Accumulate with **shares**: each mean loss times its count by the group's count. Gradients stay alive; BatchNorm
#   isn't the same.
# * Autocast keeps 16 B per parameter. A BERT-large block's activations fall to 0.67 to 0.75 with dropout; without it
#   (eager attention) to 0.9 at 512 tokens, and rise past about 770. bf16 copies of the weights cost up to 2 B per
#   parameter.
# * fp16 underflows: scale the loss. bf16 doesn't, and loses digits: master copy or stochastic rounding.
# * unscale, *then* clip. A scaler for fp16 only.
# * Offload what is touched least: optimizer states, gradients, parameters, in this order.

# %% id="wall-run"
lab.headline(
    "peak of the opening step",
    before.peak_bytes,
    "B",
    f"GPT-2, {batch} x 1024, fp32, eager: live tensors, computed",
)
lab.headline(
    "the same batch, fitting",
    fits.peak_bytes,
    "B",
    "fused attention, autocast, micro-batches: live tensors, traced",
)
lab.headline("crossover, BERT-large fp32", here, "tokens", "eager attention with dropout, computed")
worst = max(factors.values())
included = "BERT-large block, eager, no dropout, CUDA's rules, weight copies left out, computed"
lab.headline(f"autocast's factor at worst, up to {sizes[-1]} tokens", worst, "", included)
lab.headline(
    "under autocast", after_autocast, "B per parameter", "weight, gradient, AdamW's moments, measured"
)
assert round(here) == 469 and round(cross["BERT-large, 16 bit"]) == 435
memlab.progress()

# %% [markdown] id="read-on"
# ### Where to read on
#
# * Micikevicius et al., *Mixed Precision Training*, arXiv:1710.03740, sections 3.1 to 3.3: master weights, loss
#   scaling.
# * Korthikanti et al., arXiv:2205.05198, section 4.1: the 34 and the 5.
# * Ren et al., *ZeRO-Offload*, arXiv:2101.06840, section 3: which tensors go to the host, and why.
# * Rajbhandari et al., *ZeRO-Infinity*, arXiv:2104.07857, section 4: bandwidths that offloading needs.
# * PyTorch, *Automatic Mixed Precision package*, "Op-specific behavior": the two lists of operators; and the AMP
#   examples on accumulation and clipping.
#
# Next: **6. Combined**, all levers at once, and a memory budget that adds up.
