# %% [markdown] id="title" claims="C0-16"
# # 7. FAQ: seven questions, tested
#
# Which batch size? bf16 or fp16? Does checkpointing change the results? Split the model or shard it? Can FlashAttention
# replace attention? Why is it slow though memory is fine? And how is mixed precision switched on? Everybody asks these
# seven sooner or later, and everybody has heard an answer. In this chapter an answer is a **hypothesis**: you say what
# you expect, a cell tests it, and what is left is what you can rely on.
#
# It begins with a step that fails, and with what its error message says; in between stands a list of myths, each with
# the issue it comes from and a test of a few lines; at the end you predict the peak of models that you have never seen,
# before they run.
#
# You need forward and backward, a bit of PyTorch, and what the chapters before have shown. Kernels in CUDA and the
# tuning of networks are left out; but whoever uses several cards pays in bytes sent, and those are counted here. "The
# article" is a widely read Chinese-language article for engineers on this subject; this course tests its statements.
# Questions in **bold** want a guess from you before you run the next cell.
#
# Plan three to four hours: the cells run in a minute, the rest is six exercises (10 points, checked at once; the bare
# number under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save this
# notebook under its own name, `07_faq.ipynb`.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import difflib
import inspect
import itertools
import os
import textwrap
import time
import warnings
from dataclasses import replace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import allocator, hardware, models, oom, plots, published, widgets
from memlab.exercises import faq
from memlab.techniques import attention, checkpointing, precision, processes, residual, sharding, tensor_parallel
from memlab.units import GIB, MIB, format_bytes, format_gb

lab = memlab.begin("07_faq", device=device, size=size, seed=seed)

# %% [markdown] id="fails"
# ## A step that doesn't fit
#
# GPT-2 medium, 355 million parameters, on a Tesla T4: 8 texts of 1,024 tokens, written as one would write it first.
# fp32, eager attention, dropout, AdamW. At 16 bytes per parameter the states are 5.7 GB, and the card has 15.8 GB.
# **Does it fit? If not: in which operator does it stop, and how large is the request that fails?**

# %% id="fails-run"
medium = replace(models.model("gpt2-medium"), layers=lab.pick(smallest=12, normal=24))
wish = memlab.Recipe(precision="fp32", micro_batch=8, sequence=1024, attention="eager", dropout=0.1)
message = ""
try:
    memlab.trace_step(medium, wish, gpu="T4")
except torch.OutOfMemoryError as error:
    message = str(error)
print(textwrap.fill(message, 96))

# %% [markdown] id="message"
# ## What the message says
#
# A virtual card wrote it, in the words of torch: six numbers and a hint, and the hint is there always, whatever the
# cause. (Only the last words are memlab's own: which operator asked, and where. On a real card the traceback tells
# that.) Before you follow the hint, do the arithmetic: **could the request be met if all that is "reserved but
# unallocated" were in one piece?** And **which tensor of this step has just that size?**

# %% id="message-run"
found = oom.read(message)
oom.name_tensors(found, medium, wish)
report = found.first
print(report)
scores = 4 * 8 * 16 * 1024**2
print(f"\n8 texts x 16 heads x 1,024 x 1,024 scores x 4 B = {format_bytes(scores)}")
assert report.requested == scores
assert lab.size == "smallest" or report.free < scores < report.free + report.unallocated

# %% [markdown] id="message-read"
# `memlab oom` does the same on the command line, for a message or a whole log. 512 MiB is a number with a face: batch x
# heads x tokens² x 4 bytes, one table of attention scores; the operator says which of several, dropout's copy of the
# weights. But is it fragmentation? Free and unallocated memory would be *just* enough together, so the message alone
# can't tell, and says so. What can: the prediction.

# %% id="predicted-run"
need = memlab.compute(medium, wish, "T4")
print(f"live tensors at the peak: {format_bytes(need.peak_bytes)} in {need.peak_phase}; the card has {format_bytes(hardware.gpu('T4').memory_bytes)}")
for consumer, held in need.consumers_at_peak().items():
    print(f"  {plots.word(consumer):18}{format_bytes(held):>12}")

# %% [markdown] id="predicted-read"
# More than three times what there is, so it is plain **capacity**, and no allocator setting will help. The failure came
# in the 8th of 24 blocks; had there been a bit more memory it would have come in the 9th. The report above still begins
# with the setting, since a line in the shell is cheap to try and it had nothing but the message. That is the lesson: a
# message says *that* memory ran out. Why, a prediction says, or a snapshot.
#
# Four more messages (their numbers are made up). **For each: is it capacity, fragmentation, somebody else, or a bug?**
# Guess from the numbers, then run.

# %% id="quiz-run"
sentence = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of 23.70 GiB of which {} is free. {}"
    "Including non-PyTorch memory, this process has {} memory in use. Of the allocated memory {} is allocated by "
    "PyTorch, and {} is reserved by PyTorch but unallocated."
)
quiz = {
    "A": sentence.format("2.00 GiB", "512.00 MiB", "", "23.10 GiB", "15.20 GiB", "7.40 GiB"),
    "B": sentence.format("2.00 GiB", "512.00 MiB", "", "23.10 GiB", "22.30 GiB", "300.00 MiB"),
    "C": sentence.format("2.00 GiB", "300.00 MiB", "Process 4242 has 18.00 GiB memory in use. ", "5.30 GiB", "4.60 GiB", "200.00 MiB"),
    "D": sentence.format("96.00 GiB", "20.00 GiB", "", "3.60 GiB", "3.00 GiB", "100.00 MiB"),
}  # fmt: skip
print(f"{'GiB':4}{'asked':>9}{'total':>9}{'free':>9}{'others':>9}{'own':>9}{'tensors':>9}{'cached':>9}")
for name, text in quiz.items():
    r = oom.read(text).first
    sizes = (r.requested, r.total, r.free, sum(r.other_processes), r.this_process, r.allocated, r.reserved_unallocated)
    print(f"{name:4}" + "".join(f"{n / GIB:>9.2f}" for n in sizes))

# %% id="quiz-answer"
for name, text in quiz.items():
    r = oom.read(text).first
    answer = f"{name}: {r.causes[0].label}. {r.causes[0].why}. To do: {r.actions[0]}."
    print(textwrap.fill(answer, 96, subsequent_indent="   "), end="\n\n")

# %% [markdown] id="quiz-read"
# D is the bug, or at least a shape that nobody meant: 96 GiB in *one* tensor, with 20 GiB free. Not the batch is to be
# looked at but the line that asked, and the shapes in it: two axes exchanged, a comparison of all with all, `x[:, None]
# - x`, an index that became a size.

# %% [markdown] id="q1" claims="C7-01"
# ## Question 1. Which batch size?
#
# *The answer one hears: there is no fixed one. Start with 1, add until memory is short, then accumulate.*
#
# Memory grows along a line, $M = S + A\,b$: what is held whatever the batch $b$ is, and activations in proportion to it
# (chapter 5). Two peaks give $S$ and $A$. **How many texts fit on the T4 with eager fp32, with a fused kernel, with
# fp16 autocast? And $S$: is it the 5.7 GB, 5.3 GiB, of 16 bytes per parameter?**

# %% id="line-run"
t4 = hardware.gpu("T4")
recipes = {
    "fp32, eager": wish,
    "fp32, fused": wish.replace(attention="sdpa"),
    "fp16 autocast, fused": wish.replace(attention="sdpa", precision="amp-fp16"),
}
counts = range(1, 11)
lines, largest = {}, {}
print(f"{'':24}{'S':>10}{'':19}{'A':>10}   largest b    the peak of b = 1")
for name, recipe in recipes.items():
    needs = [memlab.compute(medium, recipe.replace(micro_batch=b), "T4") for b in counts]
    peaks = [need.peak_bytes for need in needs]
    slope = (peaks[3] - peaks[1]) // 2  # from 2 and 4 texts
    states = peaks[1] - 2 * slope
    largest[name] = (t4.memory_bytes - states) // slope
    drawn = sum(peak < 2 * t4.memory_bytes for peak in peaks)
    lines[name] = (list(counts)[:drawn], peaks[:drawn])
    per_parameter = f"{states / medium.parameter_count:.0f} B a parameter"
    print(f"{name:24}{format_bytes(states):>10}, {per_parameter:17}{format_bytes(slope):>10}{largest[name]:>8}    {needs[0].peak_phase}")
    assert all(abs(states + slope * b - peak) < 0.02 * peak for b, peak in zip(counts, peaks, strict=True) if b > 1)

# %% id="line-figure"
plots.curves(
    lines,
    f"The peak is a line in the batch: {', '.join(map(str, largest.values()))} texts fit",
    "micro-batch (texts of 1,024 tokens)", "live tensors at the peak", in_bytes=True, budget=t4.memory_bytes,
)  # fmt: skip

# %% [markdown] id="line-read"
# (The lines are drawn up to twice what the card has.) $S$ is not 16 bytes: at the peak, where the loss's backward
# begins, there are no gradients yet. It is 12 bytes per parameter, and 14 with autocast's 16-bit copies. The gradients
# come while activations go, and with one text there are so few activations that the optimizer step is the largest
# moment: that point lies above its line. So "until memory is short" needs a division and two runs **with more than one
# text each**, not fifty runs.
#
# But live tensors aren't all that a card has to hold. **Does the largest batch of the last line really run on the
# card?**

# %% id="margin-run"


def on_the_card(recipe, b):
    """What a virtual T4, with its context and its allocator, says to a step with b texts."""
    try:
        memlab.trace_step(medium, recipe.replace(micro_batch=b), gpu="T4")
    except torch.OutOfMemoryError as error:
        return str(error).partition(".")[0]
    return "runs"


best = largest["fp16 autocast, fused"]
said = {b: on_the_card(recipes["fp16 autocast, fused"], b) for b in ((best, best - 1) if lab.size == "normal" else ())}
for b, answer in said.items():
    print(f"{b} texts: {answer}")
assert not said or said[best] != "runs" == said[best - 1]
short, long = (
    memlab.compute(medium, recipes["fp32, fused"].replace(micro_batch=2, sequence=s), "T4").peak_bytes for s in (400, 1024)
)
print(f"\n2 texts of 400 tokens: {format_bytes(short)}; 2 texts of 1,024 tokens: {format_bytes(long)}")

# %% [markdown] id="margin-read"
# By the line six texts fit, and the card takes five. The line is that of live tensors; CUDA's context, the allocator's
# rounding and its cache come on top, texts of other lengths turn up (the longest decides, not the average), and cached
# blocks of the wrong sizes pile up over hours. Hence a **margin**: find the limit with the longest text there is, then
# stay an eighth below.
#
# And what is found is the *memory limit*, not the best batch. How many samples an update should see depends on how
# noisy the gradient is and on the learning rate (McCandlish et al., arXiv:1812.06162); accumulation brings any
# micro-batch to that number.
#
# A search that tries until it fails has to survive its own failures. **A step runs out of memory and you catch the
# error. When is the memory free again: inside `except`, or after it?**

# %% id="held-run"
def one_step(layer, b):
    x = torch.randn(b, 64, device=lab.device)
    hidden = layer[1](layer[0](x))
    layer[2](hidden).square().mean().backward()


with lab.card():
    layer = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(lab.device)
    with memlab.Meter(layer, budget=8 * MIB) as meter:
        before = meter.trace.end_bytes
        try:
            one_step(layer, b=4096)
        except torch.OutOfMemoryError as error:
            inside = meter.trace.end_bytes
            kept = error
        after = meter.trace.end_bytes
        kept = None
        let_go = meter.trace.end_bytes
for name, held in {"before the step": before, "inside except": inside, "after it, the error kept in a variable": after, "the error let go": let_go}.items():  # fmt: skip
    print(f"{name:42}{format_bytes(held):>12}")
assert inside == after > before + MIB > let_go

# %% [markdown] id="held-read"
# The error holds its traceback, the traceback holds the frames of the functions that were left, and the frames hold `x`
# and `hidden`. A notebook keeps the last error for you (`sys.last_value`): after an out-of-memory error in a cell,
# memory can stay full until another error takes its place ([pytorch
# 27600](https://github.com/pytorch/pytorch/issues/27600)). So leave `except` first, then try again.

# %% id="gpu"
if lab.device.type == "cuda":
    total = torch.cuda.get_device_properties(lab.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 6 * GIB / total), lab.device)
    try:
        for b in (2**i for i in range(10)):
            measured = memlab.measure_step("gpt2", precision="fp32", micro_batch=b, sequence=256, device=lab.device)
            print(f"{b:>4} texts of 256 tokens: peak {format_bytes(measured.peak_bytes)}")
    except torch.OutOfMemoryError as error:
        print(f"{b:>4} texts: {oom.read(str(error)).first.causes[0].label}: {str(error)[:100]}")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, lab.device)
else:
    print("no CUDA GPU here: a search that meets real out-of-memory errors, under a cap of 6 GiB, runs only on one")

# %% [markdown] id="ex-7-1-text"
# **Exercise 7.1** (2 points). Write the search: double until it fails, then halve the gap. Graded are the batch it
# finds, the number of steps it tries (at most $2 \log_2 b + 3$), that nothing of a failed step is alive when the next
# begins (measured with a real model under a byte budget), and what it does with any *other* error. Near the limit a
# step may fit at one time and not at another: with a margin, the answer must be one that always fits.


# %% id="ex-7-1" exercise="7.1"
import math

import torch


def largest_batch(step, margin=0.125, limit=4096):
    """The micro-batch to train with: an int, 0 if not even one sample fits.

    step(b): runs one training step with b samples; raises torch.OutOfMemoryError where they don't fit
    margin: the share of the largest batch that fits to leave free; round down, but not below 1
    limit: never try more samples than that
    """
    # exercise 7.1
    ### BEGIN SOLUTION

    def fits(b):
        try:
            step(b)
        except torch.OutOfMemoryError:
            return False
        return True

    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return max(min(low, 1), low - math.ceil(margin * low))
    ### END SOLUTION

# %% id="check-7-1" check="7.1"
memlab.check("7.1", largest_batch)

# %% [markdown] id="q2" claims="C7-02 C5-19"
# ## Question 2. bf16 or fp16?
#
# *The answer one hears: bf16; fp16 overflows, bf16 has fp32's exponent.*
#
# **Which of the two has more digits? Which of these four numbers survive in which of them: 70,000; 1e-8; 1.001; 257?**

# %% id="q2-run"
kinds = (torch.float32, torch.float16, torch.bfloat16)
print(f"{'':10}{'largest':>10}{'normal from':>13}{'step at 1':>11}" + "".join(f"{x:>12}" for x in ("70000", "1e-8", "1.001", "257")))
for kind in kinds:
    info = torch.finfo(kind)
    cast = torch.tensor([70_000.0, 1e-8, 1.001, 257.0]).to(kind).tolist()
    print(f"{str(kind)[6:]:10}{info.max:>10.3g}{info.tiny:>13.3g}{info.eps:>11.2g}" + "".join(f"{x:>12.6g}" for x in cast))
assert torch.finfo(torch.bfloat16).eps == 8 * torch.finfo(torch.float16).eps
without = [name for name, card in hardware.GPUS.items() if "bf16" not in card.dtypes]
print(f"\ncards here whose arithmetic has no bf16: {', '.join(without)}")

# %% [markdown] id="q2-read"
# bf16 for its range, where the card has it: no overflow, no lost gradients. fp16 has eight times finer steps, and it is
# what older cards have, the T4 of the opening among them. There it needs a **loss scaler** (chapter 5). Some put a
# scaler around bf16, too. **By how much do the weights differ after 30 steps?**

# %% id="scaler-run"


def weights_after(scaled, steps=30):
    torch.manual_seed(lab.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    for _ in range(steps):
        x = torch.randn(16, 32)
        precision.step(lambda x=x: model(x).square().mean(), adamw, dtype=torch.bfloat16, scaler=scaler)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


difference = (weights_after(True) - weights_after(False)).abs().max().item()
print(f"30 steps under bf16 autocast, with and without a scaler: largest difference of a weight {difference}")
assert difference == 0

# %% [markdown] id="q3" claims="C7-03"
# ## Question 3. Does checkpointing change results?
#
# *The answer one hears: no, it is exactly equivalent, and about 30% slower.*
#
# Checkpointing runs a forward a second time, inside the backward. It is equivalent as long as the second time gives the
# same numbers and the first has left no traces. **For each of these six, in training: do the output, all gradients and
# all buffers stay equal to the last bit?**

# %% id="q3-run"
for name, (make, options) in faq.modules().items():
    module = make()
    shown = ", ".join(type(m).__name__ for m in module.modules() if not list(m.children()))
    print(f"{name!r:48}{shown:34}{options or ''}")

# %% [markdown] id="ex-7-2-text"
# **Exercise 7.2** (2 points). Two things. `predictions`: your six answers, `True` where all stays equal. `unchanged`:
# the test, for any module, in the three parts separately; it will be run on modules that you haven't seen. `make()`
# draws the weights, so both runs have to begin from the same random numbers, torch's and Python's. Then add a cell of
# your own below the check, and use it on the six:
#
#     for name, (make, options) in faq.modules().items():
#         print(name, unchanged(make, torch.randn(16, 32), **options))


# %% id="ex-7-2" exercise="7.2"
import random

import torch
from torch.utils.checkpoint import checkpoint


def predictions():
    """For each of the six: do output, gradients and buffers all stay equal under checkpointing?"""
    stays = {
        "Linear, GELU, Linear": True,
        "with Dropout(0.3)": None,
        "with Dropout(0.3), preserve_rng_state=False": None,
        "with BatchNorm": None,
        "with BatchNorm, eval()": None,
        "scaled by random.random()": None,
    }
    # exercise 7.2
    ### BEGIN SOLUTION
    stays["with Dropout(0.3)"] = True
    stays["with Dropout(0.3), preserve_rng_state=False"] = False
    stays["with BatchNorm"] = False
    stays["with BatchNorm, eval()"] = True
    stays["scaled by random.random()"] = False
    return stays
    ### END SOLUTION


def unchanged(make, x, **options):
    """Runs a module plainly and under checkpointing: {"output": …, "gradients": …, "buffers": …}, each a bool.

    make(): a new module; x: its input; options: for checkpoint(…, use_reentrant=False, **options)
    output: are both outputs equal to the bit; gradients: those of x and of every parameter, of the loss
    y.square().sum(); buffers: all buffers after the backward
    """

    # exercise 7.2
    ### BEGIN SOLUTION
    def run(checkpointed):
        torch.manual_seed(0)
        random.seed(0)
        module, x_in = make(), x.clone().requires_grad_()
        y = checkpoint(module, x_in, use_reentrant=False, **options) if checkpointed else module(x_in)
        y.square().sum().backward()
        gradients = [x_in.grad, *(p.grad for p in module.parameters())]
        return {"output": [y], "gradients": gradients, "buffers": list(module.buffers())}

    plain, again = run(False), run(True)
    return {part: all(map(torch.equal, plain[part], again[part])) for part in plain}
    ### END SOLUTION

# %% id="check-7-2" check="7.2"
memlab.check("7.2", predictions, unchanged)

# %% [markdown] id="q3-price"
# ### By how much, and at what price
#
# Two of the causes in numbers: dropout's mask drawn anew, and BatchNorm's running mean. (Inputs with mean 3 and
# momentum 0.1: after one forward it is 0.3.) **What is it after a checkpointed one? And how many more matrix products
# are 30%?**

# %% id="q3-numbers"
torch.manual_seed(lab.seed)
norm = nn.BatchNorm1d(8)
x = torch.randn(512, 8)
x = (x - x.mean(0) + 3).requires_grad_()
norm(x)
once = norm.running_mean.mean().item()
norm.reset_running_stats()
torch.utils.checkpoint.checkpoint(norm, x, use_reentrant=False).sum().backward()
twice = norm.running_mean.mean().item()
print(f"running mean after one forward: {once:.3f}, under checkpointing: {twice:.3f}")


def first_gradient(**options):
    torch.manual_seed(lab.seed)
    module = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(16, 32, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False, **options) if options else module(x)
    y.square().mean().backward()
    return module[0].weight.grad


plain = first_gradient()
for keep in (True, False):
    gap = (first_gradient(preserve_rng_state=keep) - plain).abs().max() / plain.abs().max()
    print(f"dropout, preserve_rng_state={keep}: a gradient differs by {gap:.3f} of the largest one")
assert [round(once, 3), round(twice, 3)] == [0.3, 0.57]

# %% id="q3-count"
deep = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16))
counted = {}
for every in (0, 4):
    with checkpointing.Operators() as count:
        x = torch.randn(32, 64, requires_grad=True)
        for i in range(0, 16, every or 16):
            segment = nn.Sequential(*deep[i : i + (every or 16)])
            x = torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=False) if every else segment(x)
        x.sum().backward()
    products = sum(n for part in (count.forward, count.backward, count.recomputed) for o, n in part.items() if o in ("addmm", "mm"))
    counted[every] = products
    print(f"{'no checkpoint' if not every else f'segments of {every}':16}{products} matrix products, {products / counted[0]:.2f} of the plain step")

# %% [markdown] id="q3-read"
# Equivalent **if** the forward can be repeated: torch restores its own random numbers, and nothing else. Python's,
# NumPy's, a generator of your own, a statistic, a counter, a file that is read: each of them sees two forwards.
# (BatchNorm outside the segment, or a smaller `momentum`, is the usual cure.) A forward is a third of a step's
# arithmetic (a backward counts twice), so one forward more is a third more, and "about 30% slower" is the right size.

# %% [markdown] id="q4" claims="C7-04 C0-16"
# ## Question 4. Split the model or shard it?
#
# *The answer one hears: model parallelism needs splitting by hand and communicates little; ZeRO-3 is automatic and
# communicates much.*
#
# Count. A block has $12h^2$ weights and works on $b s$ tokens of $h$ numbers. For one micro-batch, forward and
# backward:
#
# * **tensor parallel** (TP): attention and MLP end in one all-reduce of $(bs, h)$ each, and so does the backward of
#   each: 4. An all-reduce is a reduce-scatter and an all-gather.
# * **ZeRO-3**: the block's weights are all-gathered for the forward, again for the backward, and their gradients
#   reduce-scattered.
# * **pipeline** (PP): a stage hands $(bs, h)$ on to the next, and gets its gradient back.
#
# By the ring algorithm, a reduce-scatter or an all-gather of a tensor over $N$ ranks sends $\tfrac{N-1}{N}$ of it from
# each rank.
#
# **At 4,096 tokens and $h = 8192$, who sends more, and how many times?** Count it first on two real processes, with a
# block of width 64. (They are started for this cell and end with it.)

# %% id="q4-run" claims="C7-04"
def two_ranks(rank, world_size):
    torch.manual_seed(7)
    h, tokens, found = 64, 96, {}
    x = torch.randn(2, tokens // 2, h, requires_grad=True)

    split = nn.Sequential(tensor_parallel.Attention(h, 4), tensor_parallel.MLP(h))
    tensor_parallel.split_attention(split[0])
    tensor_parallel.split_mlp(split[1])
    with sharding.Traffic() as traffic:
        split(x).sum().backward()
    found["tensor parallel"] = dict(traffic.calls), traffic.total

    block = nn.Sequential(tensor_parallel.Attention(h, 4), tensor_parallel.MLP(h))
    model = nn.Sequential(block, nn.Identity())
    sharding.torch_fsdp(model, list(block))
    with sharding.Traffic() as traffic:
        model(x).sum().backward()
    found["ZeRO-3"] = dict(traffic.calls), traffic.total

    received = torch.empty(tokens, h)
    if rank == 0:  # the activation goes on, and its gradient comes back
        dist.send(x.detach(), 1)
        dist.recv(received, 1)
    else:
        dist.recv(received, 0)
        dist.send(received, 0)
    found["pipeline"] = {"send": 1}, received.nbytes
    return found


reason = "the smallest size starts no processes" if lab.size == "smallest" else processes.unavailable()
try:
    on_ranks = [] if reason else processes.run(two_ranks, 2, timeout=30)
except (processes.GlooUnavailable, processes.RankFailed) as error:
    on_ranks, reason = [], str(error).splitlines()[0]
if reason:
    print(f"not run here: {reason}. The chapter goes on; nothing below depends on it.")
for name, (calls, sent) in on_ranks[0].items() if on_ranks else ():
    print(f"{name:17}{sent:>9,} B sent by rank 0 of 2: {', '.join(f'{n} {call}' for call, n in calls.items())}")
if on_ranks:
    print(f"\n4 all-reduces of 96 x 64 numbers, 4 B each, 2 x 1/2 of them sent: {4 * 96 * 64 * 4:,} B")
    weights = 12 * 64 * 64
    print(f"2 all-gathers and a reduce-scatter of {weights:,} weights, 1/2 sent: {3 * weights * 4 // 2:,} B, and the biases'")
    assert on_ranks[0]["tensor parallel"][1] == 4 * 96 * 64 * 4

# %% [markdown] id="ex-7-3-text"
# **Exercise 7.3** (1 point). The three counts in closed form, and the number of tokens at which the first two are
# equal. Whole numbers of bytes; (tokens, h) is the activation, a block has exactly $12 h^2$ weights (no biases here).


# %% id="ex-7-3" exercise="7.3"
def comm(kind, tokens, h, ranks, layers, size):
    """Bytes that one rank sends for one micro-batch, forward and backward, by the ring algorithm: an int.

    kind: "tp", "zero3" or "pp" (a stage in the middle); tokens: batch times sequence; size: bytes of a number
    """
    # exercise 7.3
    ### BEGIN SOLUTION
    if kind == "pp":
        return 2 * tokens * h * size
    whole = 4 * 2 * tokens * h if kind == "tp" else 3 * 12 * h * h
    return layers * whole * size * (ranks - 1) // ranks
    ### END SOLUTION


def break_even(h):
    """Tokens in a micro-batch at which tensor parallelism and ZeRO-3 send the same."""
    # exercise 7.3
    ### BEGIN SOLUTION
    return 36 * h * h / (8 * h)
    ### END SOLUTION

# %% id="check-7-3" check="7.3"
memlab.check("7.3", comm, break_even)

# %% [markdown] id="q4-explore"
# Now with real models. The weights of a block aren't always $12h^2$, and the embeddings are sharded, too. **How many
# texts of 4,096 tokens does LLaMA-2-70B need in a micro-batch before ZeRO-3 sends less than tensor parallelism?** And
# what does each way leave on a card: its step is in the bars, and *Trace it* runs PyTorch's own.

# %% id="q4-explore-run"
widgets.traffic(model="llama2-70b")

# %% [markdown] id="q4-read" claims="C7-05"
# Ten. What ZeRO-3 sends doesn't depend on the tokens, what tensor parallelism sends is in proportion to them, so the
# factor at one text of 4,096 tokens is also the number of texts at which they meet: 39,468 / 4,096 = 9.6. So "little"
# and "much" have no answer without the number of tokens. Two more things that bytes don't show. Tensor parallel ranks
# share *one* micro-batch while ZeRO-3 ranks have one each, so for each token *trained* the two meet at $4.5h/N$ tokens.
# And tensor parallelism sends in the middle of each layer while all wait (hence NVLink, and one server), ZeRO-3 can
# fetch weights ahead of time. Really small is only the pipeline, whose price is idle stages.
#
# *One also hears: ZeRO-3 suits evenly spread parameters, model parallelism a layer larger than a card.* Shards are cut
# from flat tensors, evenness doesn't matter. What matters is **the largest piece that has to be gathered in full**.
# **Which piece is that in these models?**

# %% id="q4-largest" claims="C7-05"
print(f"{'':14}{'states / 8, 16 B':>18}{'one block, 4 B':>16}{'embedding, 4 B':>16}   largest")
for name in ("gpt2-xl", "llama2-7b", "llama3-8b", "llama2-70b", "gpt3-175b"):
    config = models.model(name)
    block = sum(p.count for p in config.parameters() if p.name.startswith("blocks.0."))
    embedding = config.vocab * config.hidden
    row = (16 * config.parameter_count / 8, 4 * block, 4 * embedding)
    larger = "block" if block > embedding else "embedding"
    print(f"{name:14}" + "".join(f"{format_gb(round(n)):>{w}}" for n, w in zip(row, (18, 16, 16), strict=True)) + f"   {larger}")
print("4 B: a gathered weight and its gradient, 16 bit; while it is at work, the piece isn't divided by anything")

# %% [markdown] id="q4-largest-read"
# In a small model, or with a large vocabulary (128,256 words for LLaMA-3), the embedding; else a block. All of them are
# far below the states' share of eight cards, so ZeRO-3 isn't kept from any of these by a layer that is too large.

# %% [markdown] id="q5" claims="C7-06 C7-07"
# ## Question 5. Can FlashAttention replace attention?
#
# *The answer one hears: yes, it is mathematically equivalent. It needs special instructions, such as Tensor Cores.*
#
# **Same inputs, eager and fused: equal to the last bit? To six digits? And does a fused kernel run on this machine, if
# it has no GPU?**

# %% id="q5-run"
torch.manual_seed(lab.seed)
where = lab.device_for("values of attention")
q, k, v = (torch.randn(2, 4, 256, 32, device=where, requires_grad=True) for _ in range(3))
written = attention.eager(q, k, v)
fused = F.scaled_dot_product_attention(q, k, v)
gap = (written - fused).abs().max().item()
print(f"torch.equal: {torch.equal(written, fused)}, largest difference {gap:.1e}")
print(f"on {where.type} the fused one is {fused.grad_fn.name()}")
print(f"by the tiles of chapter 4, in Python: off by {(attention.tiled(q, k, v) - written).abs().max():.1e}")
print(f"the package flash_attn: {attention.flash_unavailable(q) or 'can run here'}")
assert gap < 1e-4

# %% [markdown] id="q5-read"
# Exact in real arithmetic; in floating point another order of sums, another last digit. (The backward of the CUDA
# package even adds up in an order that changes from run to run, unless `deterministic=True`.) And it is an algorithm:
# it runs on CPUs, and in a dozen lines of Python. Only the *package* `flash_attn` needs an Ampere GPU or newer and
# 16-bit inputs; a V100 has Tensor Cores and isn't supported. `scaled_dot_product_attention` chooses what there is.
#
# What replacing really costs: no attention weights to look at, fewer kinds of masks, and three traps. Layouts differ:
# SDPA wants (batch, heads, tokens, d), `flash_attn_func` (batch, tokens, heads, d), and the wrong one **runs**. In a
# boolean mask `True` means *take part* here, and *leave out* in `nn.MultiheadAttention`. And a function doesn't know
# `model.eval()`: `dropout_p` is applied whenever it isn't 0.

# %% id="trap-run"
x = torch.randn(2, 8, 8, 16)  # 8 heads, 8 tokens: nothing in the shape tells them apart
as_heads = F.scaled_dot_product_attention(x, x, x)
as_tokens = F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3).transpose(1, 2)
print(f"same shape, another layout: {as_heads.shape == as_tokens.shape}, off by {(as_heads - as_tokens).abs().max():.2f}")
drops = [F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) for _ in range(2)]
print(f"dropout_p=0.5, called twice, nothing in training mode: equal {torch.equal(*drops)}")

# %% [markdown] id="ex-7-4-text"
# **Exercise 7.4** (2 points). Replace this, as the article has it (with its `K^T` written in Python):
#
#     scores = Q @ K.transpose(-2, -1) / math.sqrt(d)
#     attention = softmax(scores) @ V
#
# Graded are the values in both layouts, causal or with padding, what happens in evaluation, and the live bytes of
# forward *and* backward: ten tensors of q's size at most, a score matrix would be seen.


# %% id="ex-7-4" exercise="7.4"
import torch.nn.functional as F


def attend(q, k, v, causal=False, layout="bhsd", padding=None, dropout=0.0, training=False):
    """Attention without a score matrix; the output has the shape and layout of q.

    layout: "bhsd" for (batch, heads, tokens, d), "bshd" for (batch, tokens, heads, d)
    padding: None, or (batch, tokens) of bools, True at padding: no query may see those keys (not with causal)
    dropout: its probability while training; without training nothing is dropped
    """
    # exercise 7.4
    ### BEGIN SOLUTION
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if padding is None else ~padding[:, None, None, :]
    p = dropout if training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal)
    return out.transpose(1, 2) if layout == "bshd" else out
    ### END SOLUTION

# %% id="check-7-4" check="7.4"
memlab.check("7.4", attend)

# %% [markdown] id="q6" claims="C7-08"
# ## Question 6. Memory is fine, but it is slow
#
# *The answer one hears: look at GPU utilisation, then at `num_workers`, `pin_memory`, and the CPU.*
#
# A good first look, if one knows what the number says. **A card shows 100% utilisation. It trains a 7 B model at 1,000
# tokens a second. What share of an A100's arithmetic is in use?** (About 6 operations per parameter and token.)

# %% id="mfu-run"
a100 = hardware.gpu("A100-80GB")
seven = models.model("llama2-7b").parameter_count
for tokens_per_second in (1_000, 3_500):
    mfu = 6 * seven * tokens_per_second / a100.flops["bf16"]
    print(f"{tokens_per_second:>6,} tokens/s: {6 * seven * tokens_per_second / 1e12:.0f} of {a100.flops['bf16'] / 1e12:.0f} TFLOP/s, MFU {mfu:.0%}")

# %% [markdown] id="mfu-read"
# Utilisation, as `nvidia-smi` shows it, is the share of *time* in which some kernel ran. One kernel on one of 108
# processors counts as 100%. The share of the arithmetic is the **model FLOPs utilisation** (MFU), and above 40% is
# good.
#
# When utilisation itself is low, somebody waits, most often for data. Here a dataset whose items take 10 ms each to
# make (it sleeps, as a slow disk would make it), and a model that takes 20 ms for a batch of four. **How long do 16
# batches take without workers, and with two?** Times differ from machine to machine; nothing is graded by them.

# %% id="loader-run"


def epoch(workers):
    """Seconds until the first batch, for the rest, and the seconds that the model waited for data."""
    dataset = faq.Slow(lab.pick(smallest=8, normal=64), seconds=0.01)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=workers, timeout=20 if workers else 0)
    waited, arrived, begin = 0.0, [], time.perf_counter()
    for _ in loader:
        arrived.append(time.perf_counter())
        waited += arrived[-1] - (arrived[-2] + 0.02 if len(arrived) > 1 else begin)
        time.sleep(0.02)  # the model
    return arrived[0] - begin, time.perf_counter() - arrived[0], waited


for workers in (0, 2):
    try:
        first, rest, waited = epoch(workers)
        print(f"{workers} workers: first batch after {first:.2f} s, the rest in {rest:.2f} s; the model waited {waited:.2f} s in all")
    except RuntimeError as error:
        print(f"{workers} workers: not run here: {str(error).splitlines()[0][:90]}")

# %% [markdown] id="loader-read"
# Without workers the two take turns. With them the next batches are made while the model works (two for each worker are
# kept ready: `prefetch_factor`), in processes of their own, since Python runs one thread at a time. Starting a process
# costs, so they should stay for the next epoch. `pin_memory=True` lets the copy to a GPU run beside the computation;
# without a GPU it does nothing but warn.

# %% [markdown] id="ex-7-5-text"
# **Exercise 7.5** (1 point). Speed up somebody's loader without changing what it delivers. It may have a sampler, a
# `collate_fn` or `drop_last`. Graded: the batches and their order in two epochs, that the items come from other
# processes, as many as asked for, and that the second epoch has the same processes. Not the time.
#
# An order that the sampler computes stays what it is. One that it *draws* (`shuffle=True`) is drawn again: from the
# same seed the first epoch is the same, the second is a shuffle too, but another one. (A loader draws a seed for its
# workers in each epoch; where the workers stay, it does so once.)


# %% id="ex-7-5" exercise="7.5"
import torch
from torch.utils.data import DataLoader


def faster(loader, workers):
    """A DataLoader with the same batches in the same order, its items made by `workers` processes that stay.

    loader: a DataLoader without workers; it may have a sampler, a collate_fn or drop_last of its own. An order
    drawn at random stays random, but isn't the same from the second epoch on
    """
    # exercise 7.5
    ### BEGIN SOLUTION
    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )
    ### END SOLUTION

# %% id="check-7-5" check="7.5"
memlab.check("7.5", faster)

# %% [markdown] id="q7" claims="C7-09 C7-10"
# ## Question 7. Mixed precision in three lines?
#
# *The answer one hears: use `torch.cuda.amp`, change three lines.* The article's snippet: `with autocast():` around the
# forward, `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`. **How many lines does it take?
# Which 16-bit type is a bare `autocast()`? Does its import still run without a word?**

# %% id="q7-run"
plain_loop = """
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
fp16_loop = """
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.amp.autocast("cuda", dtype=torch.float16):
        loss = loss_of(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
bf16_loop = plain_loop.replace(
    "    loss = loss_of", '    with torch.amp.autocast("cuda", dtype=torch.bfloat16):\n        loss = loss_of'
)
for name, loop in {"fp16": fp16_loop, "bf16": bf16_loop}.items():
    changed = [s for s in difflib.ndiff(plain_loop.splitlines(), loop.splitlines()) if s.startswith("+ ")]
    print(f"{name}: {len(changed)} lines are new or changed")
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    torch.cuda.amp.autocast(enabled=False)
    torch.cuda.amp.GradScaler(enabled=False)
for warned in sorted({str(w.message).split(". ")[0] for w in seen if w.category is FutureWarning}):
    print("FutureWarning:", warned)
print("a bare autocast on CUDA is", torch.get_autocast_dtype("cuda"))

# %% [markdown] id="q7-order"
# Seven lines for fp16, clipping included, two for bf16. And the snippet's bare `autocast()` is the former, against the
# article's own advice to take bf16. So there the scaler *is* needed. What the snippet leaves out: `zero_grad`, and
# **unscaling before clipping**. **What becomes of the gradient if one clips to norm 1 while it is still multiplied by
# 65,536? And how many gradients are 0 without a scaler?**

# %% id="q7-clip"


def scaled_gradients(scaler, factor):
    """An MLP with gradients under fp16 autocast, not yet unscaled; factor: how large the loss is."""
    torch.manual_seed(lab.seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    with torch.amp.autocast("cpu", dtype=torch.float16):
        y = model(torch.randn(64, 256))
    loss = y.float().square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    return model


lost = {name: torch.cat([p.grad.flatten() for p in scaled_gradients(scaler, 1e-3).parameters()]).eq(0).float().mean().item()
        for name, scaler in {"no scaler": None, "scaler": precision.LossScaler()}.items()}  # fmt: skip
print("a small loss, gradients that are 0: " + ", ".join(f"{name} {share:.1%}" for name, share in lost.items()))
seen_by_step = {}
for order in ("clip, then unscale", "unscale, then clip"):
    scaler = precision.LossScaler()
    model = scaled_gradients(scaler, 20)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    if order == "unscale, then clip":
        scaler.unscale_(sgd)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if order == "clip, then unscale":
        scaler.unscale_(sgd)
    seen_by_step[order] = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    print(f"a gradient of norm 1.1, {order}: the step sees norm {seen_by_step[order]:.6f}")
assert lost["scaler"] == 0 < lost["no scaler"]
assert round(seen_by_step["unscale, then clip"] / seen_by_step["clip, then unscale"] / 65_536, 2) == 1

# %% [markdown] id="q7-read"
# Clipped while scaled, every gradient is cut to norm 1 and then divided by 65,536: training with SGD all but stops, and
# no error says so. (Adam divides by the gradient's own size and hides it, until epsilon is as large.) The order is:
# scale the loss, backward, **unscale, clip**, step, update.

# %% [markdown] id="myths"
# ## Myths
#
# Nine sentences that people wrote in issues, or acted on. **True, false, or does it depend?** Each has its test.
#
# **1. "The optimizer state of Adam is 8 bytes per parameter, so a step takes 16."** ([pytorch
# 97712](https://github.com/pytorch/pytorch/issues/97712))

# %% id="myth-foreach"
count = models.model("gpt2-xl").parameter_count
for how in ("for-loop", "fused", "foreach"):
    phases = memlab.compute("gpt2-xl", gpu="A100-80GB", precision="fp32", sequence=64, optimizer_impl=how).phase_peaks()
    print(f"{how:10}peak of the optimizer step: {phases['optimizer'] / count:.1f} B per parameter")

# %% [markdown] id="myth-foreach-read"
# It depends on how the step is written. `foreach`, the default on CUDA, holds one more tensor for *every* parameter at
# once: 20. `fused=True` doesn't.
#
# **2. "Mixed precision halves the memory."** ([pytorch 61173](https://github.com/pytorch/pytorch/issues/61173) and
# [pytorch 48049](https://github.com/pytorch/pytorch/issues/48049): more than fp32)

# %% id="myth-amp"
cases = [("gpt2", 1, 128, "sdpa", "none"), ("gpt2", 8, 1024, "sdpa", "none"), ("gpt2", 8, 1024, "eager", "none"),
         ("bert-large", 8, 512, "eager", "full")]  # fmt: skip
for name, b, s, how, every in cases:
    switches = {"micro_batch": b, "sequence": s, "attention": how, "checkpointing": every, "optimizer_impl": "fused"}
    fp32, amp = (
        memlab.compute(name, gpu="A100-80GB", precision=p, **switches).peak_bytes for p in ("fp32", "amp-bf16")
    )
    print(f"{name:11}{b} x {s:>4} {how:6}checkpointing {every:5}{format_bytes(fp32):>10} -> {format_bytes(amp):>10}, {amp / fp32:.2f}")

# %% [markdown] id="myth-amp-read"
# False. The states stay at 16 bytes, autocast keeps 16-bit copies of the weights on top, and eager attention keeps its
# softmax in both formats. Where neither activations nor logits decide, nothing is saved.
#
# **3. "`model.eval()` saves the memory of the activations."** ([torchinfo
# 149](https://github.com/TylerYep/torchinfo/issues/149): 50 GB computed, 15 seen in evaluation)

# %% id="myth-eval"
for name in ("train()", "eval()", "eval() and no_grad()"):
    with lab.card():
        chain = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(20))).to(lab.device)
        chain.train(name == "train()")
        x = torch.randn(1024, 256, device=lab.device)
        with torch.set_grad_enabled("no_grad" not in name), memlab.Meter(chain) as meter:
            y = chain(x)
    print(f"{name:22}peak {format_bytes(meter.trace.peak_bytes)}")

# %% [markdown] id="myth-eval-read"
# False. `eval()` changes what Dropout and BatchNorm do. Whether activations are kept is a question of `no_grad` or
# `inference_mode`.
#
# **4. "A layer that is used twice costs once."** ([torchinfo 144](https://github.com/TylerYep/torchinfo/issues/144):
# 130 MB computed, 4,044 MB seen)

# %% id="myth-reuse"
for times in (1, 10, 30):
    with lab.card():
        shared = nn.Sequential(nn.Linear(256, 256), nn.Tanh()).to(lab.device)
        y = torch.randn(1024, 256, device=lab.device)
        with memlab.Meter(shared) as meter:
            for _ in range(times):
                y = shared(y)
    weights = sum(p.nbytes for p in shared.parameters())
    print(f"used {times:>2} times: {format_bytes(weights)} of weights, {format_bytes(meter.trace.peak_bytes)} at the peak")

# %% [markdown] id="myth-reuse-read"
# Half true: weights, gradients and moments once, activations every time.
#
# **5. "Selective recomputation cuts activations to a third."** ([Megatron-LM
# 1225](https://github.com/NVIDIA/Megatron-LM/issues/1225): 25.52 GB became 24.94)

# %% id="myth-selective"
for how in ("eager", "sdpa"):
    switches = {"attention": how, "dropout": 0.1, "micro_batch": 4}
    kept = {c: memlab.compute("gpt2-xl", gpu="A100-80GB", checkpointing=c, **switches).consumer_peaks()["activations"]
            for c in ("none", "selective")}  # fmt: skip
    print(f"{how:6}" + ", ".join(f"{c} {format_bytes(n)}" for c, n in kept.items()) + f": {kept['selective'] / kept['none']:.2f}")

# %% [markdown] id="myth-selective-read"
# It depends on what there is to drop. With eager attention that is the scores. A fused kernel never made them; what
# still goes here are norms, GELUs and dropout masks (memlab keeps the results of linear layers and of attention).
# Megatron's drops the attention's core alone, and with a fused kernel that is nearly nothing.
#
# **6. "Logits are small change."** ([GaLore 57](https://github.com/jiaweizzhao/GaLore/issues/57): where are the 31 GB
# of logits?)

# %% id="myth-logits"
for name in ("gpt2", "llama2-7b", "llama3-8b"):
    vocabulary = models.model(name).vocab
    print(f"{name:10}16,384 tokens x {vocabulary:>7,} words x 4 B = {format_bytes(4 * 16384 * vocabulary)}")
step = memlab.trace_step("gpt2", precision="bf16", micro_batch=4, checkpointing="full", optimizer_impl="fused")
passing = [b for b in step.at_peak() if b.consumer in ("activations", "temporaries")]
of_words = [b for b in passing if b.shape and b.shape[-1] == models.model("gpt2").vocab]
print(f"\nGPT-2, 4 x 1,024 tokens, every block checkpointed: {format_bytes(step.peak_bytes)} at the peak, {format_bytes(sum(b.bytes for b in passing))} of them")
print(f"aren't states, and {format_bytes(sum(b.bytes for b in of_words))} of those are {len(of_words)} tensors of tokens x words")

# %% [markdown] id="myth-logits-read"
# False for a large vocabulary, and they come in several copies: the logits, their log-softmax, a gradient of each. With
# every block checkpointed they are what is left.
#
# **7. "`nvidia-smi` shows what my tensors take."** ([pytorch 37250](https://github.com/pytorch/pytorch/issues/37250))
# Recorded on real T4s (FitCheck's archive): **what is missing between the two?**

# %% id="myth-smi"
runs_on_t4 = sorted(published.t4_runs(), key=lambda run: run["process"] - run["allocated"])
for run in (runs_on_t4[0], runs_on_t4[len(runs_on_t4) // 2], runs_on_t4[-1]):
    parts = {"tensors": run["allocated"], "cache": run["reserved"] - run["allocated"], "context": run["context"]}
    print(f"{run['model']:30}" + ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items()) + f"; the process {format_bytes(run['process'])}")

# %% [markdown] id="myth-smi-read"
# False. `nvidia-smi` sees what the process has taken from the driver: tensors, the allocator's cache, and CUDA's
# context.
#
# **8. "Out of memory? Call `torch.cuda.empty_cache()`."** (PyTorch documents [what it does and what it
# doesn't](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html).) A card of 100 MiB, 60 of
# them in tensors and 30 in cached blocks; a request for 50.

# %% id="myth-cache"
card = allocator.Allocator(capacity=100 * MIB)
tensors = [card.malloc(20 * MIB) for _ in range(3)]
cached = [card.malloc(size * MIB) for size in (20, 10)]
for block in cached:
    card.free(block)
print(f"allocated {format_bytes(card.allocated)}, reserved {format_bytes(card.reserved)}")
for attempt in ("a request for 50 MiB", "the same after empty_cache()"):
    try:
        card.malloc(50 * MIB)
    except allocator.OutOfMemory:
        print(f"{attempt}: out of memory, with {format_bytes(card.reserved)} reserved")
    card.empty_cache()
assert card.reserved == 60 * MIB and card.ooms == 2

# %% [markdown] id="myth-cache-read" claims="C0-07"
# False, in the program that failed: before it raises, the allocator has given its free blocks back to the driver and
# tried again. (It does help *another* process on the card.)
#
# **9. "Vanishing gradients are solved by residual connections."** (the article) 50 tanh layers:

# %% id="myth-skip" claims="C0-07"
cures = {"no cure": {}, "skips": {"skip": True}, "Xavier init alone": {"init": "xavier"}, "LayerNorm alone": {"norm": "layer"},
         "BatchNorm alone": {"norm": "batch"}}  # fmt: skip
for name, cure in cures.items():
    print(f"{name:20}gradient at the input: {residual.gradient_norms(lab.pick(smallest=20, normal=50), **cure)[0]:.1e}")

# %% [markdown] id="myth-skip-read"
# Half true. Skips keep gradients from vanishing; so does an init or a norm alone. (Some of them now *grow* with depth,
# to hundreds and thousands; clipping, warm-up, or scaling the branches down takes care of that.) What He et al. solved
# with skips was that deeper plain networks *with* BatchNorm trained worse.

# %% [markdown] id="capstone" claims="S-05"
# ## The capstone
#
# *After reading this you can find the source of any memory bottleneck*, the article ends. With its formulas one can't:
# they miss activations by 21 to 57 times and parameters by 6 to 7. With yours?
#
# The models are of this kind, all fp32:

# %% id="probe-source"
source = inspect.getsource(faq.probe)
print(textwrap.dedent(source[source.index("    class Block") : source.index("    return Probe()")]).rstrip())

# %% [markdown] id="probe-text"
# A spec gives the sizes and the switches. Here is one, traced in its second step (the moments are there; gradients are
# freed before the forward). **Before you run it: its parameters? Its peak? Which phase?**

# %% id="probe-run"
spec = faq.Spec(batch=4, tokens=160, hidden=128, heads=4, ffn=512, blocks=6, classes=1000, activation="gelu", attention="eager",
                checkpoint=False, optimizer="momentum")  # fmt: skip
traced = faq.probe_trace(spec)
print(f"{sum(p.numel() for p in faq.probe(spec).parameters()):,} parameters; peak {format_bytes(traced.peak_bytes)} in {traced.peak_phase}")
plots.timeline(traced)

# %% [markdown] id="kept-text"
# The article would say: $2Lh^2$ parameters, 16 bytes each, and one activation a layer. **By how much is it off here?
# And which tensors does one block really keep?** ($n$ = batch x tokens, $h$ = hidden, $f$ = ffn.)

# %% id="kept-run" claims="S-05"
n, h, f = spec.batch * spec.tokens, spec.hidden, spec.ffn
article = 16 * 2 * spec.blocks * h * h + 4 * spec.blocks * n * h
print(f"by the article's formulas {format_bytes(article)}, measured {format_bytes(traced.peak_bytes)}: {traced.peak_bytes / article:.1f} times as much\n")


def kept_by_a_block(spec):
    """Elements of each tensor that autograd keeps of one block, parameters left out."""
    block, kept = faq.probe(spec).blocks[0], {}
    own = {p.untyped_storage()._cdata for p in block.parameters()}

    def pack(t):
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t, t.untyped_storage().nbytes() // 4
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(torch.randn(spec.batch, spec.tokens, spec.hidden, requires_grad=True))
    assert y.requires_grad
    return [elements for _, elements in kept.values()]


heads = spec.batch * spec.heads
names = {n * h: "n h", 3 * n * h: "3 n h", n * f: "n f", heads * spec.tokens**2: "batch heads tokens^2",
         heads * spec.tokens: "batch heads tokens", n: "n"}  # fmt: skip
for other in (spec, spec._replace(attention="sdpa", activation="relu")):
    sizes = kept_by_a_block(other)
    counts = {name: sizes.count(elements) for elements, name in names.items()}
    text = " + ".join(f"{count} x ({name})" for name, count in counts.items() if count)
    print(f"{other.attention}, {other.activation}: {text} = {format_bytes(4 * sum(sizes))}")
    assert sum(elements * counts[name] for elements, name in names.items()) == sum(sizes)

# %% [markdown] id="kinds-text"
# Three specs for practice, one of each kind: bound by states, by scores, by logits. **In which phase is the peak of
# each?**

# %% id="kinds-run"
practice = {
    "states": faq.Spec(1, 32, 224, 4, 896, 5, 100, "gelu", "sdpa", False, "adamw-foreach"),
    "scores": faq.Spec(2, 320, 96, 4, 384, 5, 50, "relu", "eager", False, "sgd"),
    "logits": faq.Spec(3, 160, 128, 8, 256, 6, 4000, "gelu", "sdpa", True, "momentum"),
}
kinds = {}
for name, case in list(practice.items())[: lab.pick(smallest=1, normal=3)]:
    kinds[name] = faq.probe_trace(case)
    print(f"{name}: Spec({', '.join(map(repr, case))})")
    print(f"    peak {kinds[name].peak_bytes:,} B, in {kinds[name].peak_phase}")
plots.consumers(kinds, title="Three models, three bottlenecks: what is alive at the peak")

# %% [markdown] id="ex-7-6-text"
# **Exercise 7.6** (2 points). Predict the peak of any spec from its numbers, within 10% of what is measured. Three
# hidden models are run: one bound by its states, one by attention's scores, one by its logits. Nothing may be run for
# it: the prediction is made under a meter.
#
# *Hints.* The peak is the largest of four moments, not a sum. *When the loss's backward begins*, everything kept is
# alive, the final norm's two tensors of (n, h), and three of (n, classes): log-softmax, and two gradients. *In the last
# block's backward* nearly everything kept still is; eager attention makes two more tables of scores there, and a
# checkpointed block, of which only the input was kept, has everything again. *When the first block's backward ends*,
# all gradients are there, and what one block keeps. *In the optimizer step* a foreach AdamW has one more tensor for
# each parameter.


# %% id="ex-7-6" exercise="7.6"
def predict_peak(spec):
    """The peak of live bytes in a training step of probe(spec), from its numbers alone.

    spec.batch, tokens, hidden, heads, ffn, blocks, classes; activation "relu" or "gelu"; attention "eager" or
    "sdpa"; checkpoint True or False; optimizer "sgd", "momentum", "adamw-foreach" or "adamw-fused"
    """
    # exercise 7.6
    ### BEGIN SOLUTION
    n, h, f, v = spec.batch * spec.tokens, spec.hidden, spec.ffn, spec.classes
    block = 4 * h * h + 2 * h * f + 9 * h + f
    weights = spec.blocks * block + 2 * h + h * v + v
    moments = {"sgd": 0, "momentum": 1, "adamw-foreach": 2, "adamw-fused": 2}[spec.optimizer] * weights
    always = weights + moments
    eager = spec.attention == "eager"
    scores = spec.batch * spec.heads * spec.tokens * (spec.tokens if eager else 1)
    mlp = (2 if spec.activation == "gelu" else 1) * n * f
    inside = 8 * n * h + mlp + scores
    kept = spec.blocks * (n * h if spec.checkpoint else inside)
    again = inside if spec.checkpoint else 0
    loss = always + kept + 3 * n * v
    last_block = always + kept + again + (2 * scores if eager else 0)
    first_block = always + weights + inside
    step = always + weights + (weights if spec.optimizer == "adamw-foreach" else 0)
    return 4 * max(loss, last_block, first_block, step)
    ### END SOLUTION

# %% id="check-7-6" check="7.6"
memlab.check("7.6", predict_peak)

# %% [markdown] id="fits" claims="S-05"
# ## The same step, fitting
#
# Back to GPT-2 medium on the T4, 8 texts of 1,024 tokens, 35 GiB too much. The message named the largest tensors:
# scores. So a fused kernel (question 5). Then the 16 bits that this card has, fp16 with a scaler (2 and 7). What is
# left is a line in the batch: an eighth of margin below its limit (1), the rest by accumulation. No checkpointing (3),
# no second card (4), until they are needed. **Which of the three saves most?**

# %% id="fits-run"
fused_step = wish.replace(attention="sdpa")
half = fused_step.replace(precision="amp-fp16")
small = half.replace(micro_batch=4, accumulation=2)
steps = {"as it was": wish, "fused attention": fused_step, "fp16 autocast": half, "4 texts, twice": small}
peaks = {name: memlab.compute(medium, recipe, "T4") for name, recipe in steps.items()}
for name, peak in peaks.items():
    print(f"{name:18}{format_bytes(peak.peak_bytes):>11}, peak in {peak.peak_phase}")
levels = [(name, peak.peak_bytes) for name, peak in peaks.items()]
changes = [(name, after - before) for (_, before), (name, after) in itertools.pairwise(levels)]
plots.waterfall(levels[0], changes, capacity=t4.memory_bytes, title="Scores, then 16 bits, then the batch: 8 texts fit")

# %% id="fits-card"
last = memlab.trace_step(medium, small, gpu="T4")
print(f"ran on a virtual T4: peak {format_bytes(last.peak_bytes)} of {format_bytes(t4.memory_bytes)}, in {last.peak_phase}")
assert last.peak_bytes < 0.9 * t4.memory_bytes < peaks["as it was"].peak_bytes
plots.timeline(last, budget=t4.memory_bytes, title="8 texts in two micro-batches: it fits, with room to spare")

# %% [markdown] id="written-text"
# ## In your own words
#
# **Exercise 7.7** (3 points, graded by hand, at most ten sentences). A colleague sends you this, from a card of 24 GB,
# in the third epoch:
#
# > CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 23.70 GiB of which 250.00 MiB is free.
# > Including non-PyTorch memory, this process has 23.40 GiB memory in use. Of the allocated memory 22.40 GiB is
# > allocated by PyTorch, and 450.00 MiB is reserved by PyTorch but unallocated.
#
# They propose, in this order: `expandable_segments:True`, because the message says so; `empty_cache()` after every
# step; checkpointing, though they fear for the accuracy of their model, which has Dropout and BatchNorm. What do you
# tell them?
#
# *Rubric.* 1 point: the cause, with the arithmetic, and what the message can't tell. 1 point: what each of the three
# proposals does and doesn't do here. 1 point: what you would do first, what next, each with its price, and one
# measurement that would decide.

# %% [markdown] id="written-7-7" manual="7.7" points=3
# It is capacity: even with all unallocated memory in one piece there would be 250 + 450 = 700 MiB, and 1,024 are asked
# for, while 22.4 of 23.7 GiB are in tensors. So expandable_segments, which mends fragmentation, can't help, and the
# hint is printed whatever the cause. empty_cache() gives back blocks that the allocator had given back already before
# it raised, and in every step it only costs time. Checkpointing would help and doesn't change gradients: Dropout's mask
# is drawn again from restored random numbers; BatchNorm's running statistics are updated twice, so leave those layers
# outside the segments or adjust the momentum. What the message can't tell: why in the third epoch. A leak (the loss or
# predictions kept with their graph) looks the same, and so does one longest text. So first print the peak after each
# step (max_memory_allocated): if it rises from step to step, look for what is kept; if it jumps, look at the length of
# that batch. If it is neither, first halve the micro-batch and accumulate twice (same gradient when the losses are
# averaged, except for BatchNorm, a bit slower), then a fused attention kernel if the 1.00 GiB is a table of scores,
# then checkpoint the blocks for a third more arithmetic.

# %% [markdown] id="wall"
# ## To pin to the wall
#
# * Read the message before its hint: free + unallocated < request is **capacity**. The request has a face: batch x
#   heads x tokens², tokens x vocabulary, h x 4h.
# * $M = S + A b$: two runs and a division. Then an eighth of margin, the longest text, and accumulation. Leave `except`
#   before you try again.
# * bf16 for range, fp16 for digits and old cards, a scaler for fp16 alone.
# * Checkpointing repeats the forward: equal if it can be repeated. torch's random numbers are restored, nothing else
#   is.
# * For a layer and micro-batch: TP $8bsh$, ZeRO-3 $36h^2$, equal at $bs = 4.5h$ ($4.5h/N$ for each token trained). A
#   pipeline sends $2bsh$ a stage.
# * SDPA: (batch, heads, tokens, d); `True` takes part; `dropout_p` knows no `eval()`. Close, not equal.
# * Utilisation is time, MFU is arithmetic. Waiting for data: processes that stay, the same batches.
# * scale, backward, **unscale, clip**, step, update.
# * The peak is the largest of a few moments. Predict it before you run it.

# %% id="wall-run"
opening = "GPT-2 medium, 8 x 1,024, fp32, eager, dropout: live tensors, computed"
lab.headline("peak of the opening step", peaks["as it was"].peak_bytes, "B", opening)
lab.headline("the same 8 texts, fitting", last.peak_bytes, "B", "fused attention, fp16 autocast, two micro-batches: live tensors, traced")
lab.headline("largest micro-batch by the line", best, "texts", "fp16 autocast, fused attention, T4; one less runs on the card")
lab.headline("TP and ZeRO-3 send the same at", 36 * 8192 // 8, "tokens", "h = 8,192, 12 h^2 weights a block, one micro-batch")
lab.headline("gradients lost without a scaler", 100 * lost["no scaler"], "%", "fp16 autocast, a toy with a small loss")
lab.headline("measured / the article's formulas", traced.peak_bytes / article, "times", "peak of the practice model of the capstone")
memlab.progress()

# %% [markdown] id="verdicts-text"
# The article's answers and what is left of them. (Some numbers in the right column were measured on other inputs than
# those above.)

# %% id="verdicts"
published.verdicts("C7-01", "C7-02", "C7-03", "C7-04", "C7-05", "C7-06", "C7-07", "C7-08", "C7-09", "C7-10", "S-05")

# %% [markdown] id="read-on"
# ### Where to read on
#
# * McCandlish et al., *An Empirical Model of Large-Batch Training*, arXiv:1812.06162, section 2: the gradient noise
#   scale, or which batch is large enough.
# * PyTorch, *torch.utils.checkpoint*: what is restored and what isn't; *Reproducibility*: what stays non-deterministic.
# * Shoeybi et al., arXiv:1909.08053, section 3, and Rajbhandari et al., arXiv:1910.02054, section 7: the counts of
#   question 4.
# * Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters*, arXiv:2104.04473, sections 2 and
#   3: how the three are combined.
# * PyTorch, *Understanding CUDA Memory Usage*: the snapshot that decides what a message can't tell; `memlab snapshot`
#   reads it.
# * Chowdhery et al., *PaLM*, arXiv:2204.02311, section 4.1 and appendix B: MFU.
#
# This is the last chapter. `memlab plan`, `memlab oom` and `memlab trace` go with you to work.
