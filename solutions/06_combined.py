# %% [markdown] id="title" claims="C6-07 C6-13"
# # 6. The combined strategy: a memory budget that adds up
#
# You have met the levers one at a time: micro-batches, autocast, checkpoints, fused attention, ZeRO, offload. On the
# job you need all of them at once, and the question isn't "which is best?" but "which of my bytes is too many?".
#
# A widely read Chinese-language article for engineers ("the article" below) ends with two such plans: LLaMA-2-70B on
# eight A100s, and BERT-large on a 16 GB card. In this chapter you'll check both line by line. Then you build what an
# engineer uses: a budget, a step with all levers, an optimizer with 8-bit states, and a planner. At the end there is
# a game.
#
# You need no GPU. Stop at each question in **bold** and write your guess down before you run the next cell.
#
# Two units, as on the job. Text and tables are in GB, 10⁹ bytes, like parameter counts, bandwidths and prices. CUDA
# counts in GiB, 2³⁰ bytes, and so do the figures, the explorer and the game: a card of 85.2 GB has 79.35 GiB.
#
# Plan five to six hours: the cells run in a minute, the rest is six exercises (15 points, checked at once; the bare
# number under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save this
# notebook under its own name, `06_combined.ipynb`.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import os
import textwrap
from dataclasses import replace

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch

import memlab
from memlab import game, hardware, models, plots, published, widgets
from memlab.exercises import combined
from memlab.planner import plan as memlab_plan
from memlab.sharded import trace_sharded
from memlab.units import GB, format_bytes, format_gb

lab = memlab.begin("06_combined", device=device, size=size, seed=seed)

# %% [markdown] id="fails" claims="C0-12 C6-07"
# ## 1. A step that doesn't fit
#
# The article's plan for LLaMA-2-70B: eight A100s of 80 GB (640 GB in all), bf16, ZeRO-3, checkpointing,
# FlashAttention, micro-batch 1. All five techniques together; it arrives at some 70 GB on each card, which just fits.
# **Does it?** Here is one of the eight ranks, on a virtual card that raises what CUDA would raise. (Fewer layers on a
# smaller card at size `smallest`.)

# %% id="fails-run"
llama70, card = models.model("llama2-70b"), hardware.gpu("A100-80GB")
layers = lab.pick(smallest=4, normal=80)
mixed = memlab.Recipe(
    precision="bf16-master", optimizer_impl="fused", micro_batch=1, sequence=4096, checkpointing="full",
    attention="sdpa", zero_stage=3, world_size=8,
)  # fmt: skip
limit = lab.pick(smallest=14 * GB, normal=card.memory_bytes)
try:
    trace_sharded(replace(llama70, layers=layers), mixed, gpu=card, limit=limit)
    refused = False
except torch.OutOfMemoryError as error:
    refused = True
    print(textwrap.fill(str(error), 96))
assert refused

# %% [markdown] id="fails-read"
# It doesn't, and it isn't close: the optimizer hadn't even made the states of the seventeenth of 80 blocks when the
# card was full. So before anything else: where did the plan's numbers come from?

# %% [markdown] id="sums" claims="C6-08 C6-09 C6-14"
# ## 2. Bytes per parameter
#
# The article's sum goes: "bf16 takes the parameters from 1400 GB to 700 GB; ZeRO-3 divides them by eight, 87.5 GB;
# with checkpointing 70 GB". **Which bytes per parameter are 1400 GB? And 700?** List what each recipe really keeps:

# %% id="sums-run" claims="C6-08 C6-09"
P = llama70.parameter_count
kinds = {  # weights, gradients, master weights, two moments
    "fp32, Adam": (4, 4, 0, 8),
    "bf16 autocast (AMP)": (4, 4, 0, 8),
    "bf16 with fp32 master weights": (2, 2, 4, 8),
    "the same, fp32 gradients (DeepSpeed)": (2, 4, 4, 8),
    "bf16 and fp32 gradients both": (2, 6, 4, 8),
    "8-bit Adam, fp32 master weights": (2, 2, 4, 2),
    "pure bf16": (2, 2, 0, 4),
    "pure bf16, 8-bit Adam": (2, 2, 0, 2),
}
print(f"LLaMA-2-70B, {P / 1e9:.2f} billion parameters{'B each':>12}{'all':>12}{'one of 8':>12}")
for name, parts in kinds.items():
    each = sum(parts)
    print(f"  {name:38}{each:>15}{format_gb(each * P):>12}{format_gb(each * P // 8):>12}")
print(f"weights alone: {format_gb(4 * P)} in fp32, {format_gb(2 * P)} in bf16")
print(
    f"the article's 1400 GB are {1400e9 / 70e9:g} B per parameter, 700 are {700e9 / 70e9:g}, and 87.5 GB > 80"
)
assert sum(kinds["fp32, Adam"]) == sum(kinds["bf16 with fp32 master weights"]) == 16
assert 137.9e9 < 16 * P / 8 < 138e9

# %% [markdown] id="sums-read" claims="C6-01"
# bf16 doesn't halve the states. Autocast keeps fp32 weights and makes bf16 copies; "mixed precision" with master
# weights keeps a bf16 weight *and* an fp32 one. Both are 16 bytes per parameter, as in fp32: 1104 GB, 138 GB on each
# of eight cards. What gets half as large are matrix products' activations, and time. The article's 10 bytes exist
# (8-bit Adam with master weights), but aren't "bf16", and 87.5 GB is more than its own card has.
#
# Two more numbers of that plan, while we are here. **It says micro-batch 1 and accumulation 2048: how many tokens is
# one step? And how long would eight cards train LLaMA-2-70B?**

# %% id="batch-run" claims="C6-12 C6-13 C6-07"
tokens = 8 * 1 * 2048 * 4096
print(
    f"one step: {tokens / 1e6:.1f} million tokens; LLaMA-2 used 4 million, accumulation {4e6 / 4096 / 8:.0f}"
)
hours = 1_720_320  # A100 hours, LLaMA-2 paper, table 2
print(f"{hours:,} A100 hours are {hours / 8 / 8766:.1f} years on 8 cards")
print(f"8 cards: {format_gb(8 * card.memory_bytes)} as CUDA reports them; sold as {8 * 80} GB")
assert round(hours / 8 / 8766, 1) == 24.5

# %% [markdown] id="batch-read"
# So "this is how the industry does it" can't be meant for pretraining. Eight cards are for fine-tuning.

# %% [markdown] id="adds" claims="C6-10 C6-11"
# ## 3. A budget that adds up
#
# States are one item. The others are what the *step* needs. **How much does one block of 70B keep for its backward,
# at one text of 4096 tokens? And how much do 80 of them keep with checkpoints?** Two blocks, traced; their difference
# is one.


# %% id="block-run" claims="C6-10"
def kept(layers, **changes):
    """What the activations of a few blocks of LLaMA-2-70B hold at their highest."""
    recipe = memlab.Recipe(precision="bf16", micro_batch=1, sequence=4096, **changes)
    return memlab.compute(replace(llama70, layers=layers), recipe).consumer_peaks()["activations"]


block = kept(3) - kept(2)
inputs = kept(3, checkpointing="full") - kept(2, checkpointing="full")
print(f"one block keeps {format_gb(block)}, 80 keep {format_gb(80 * block)}")
print(
    f"its input alone is {format_gb(inputs)}, 80 are {format_gb(80 * inputs)}; one block whole comes on top"
)
scores = 64 * 4096**2 * 2
print(f"one copy of its attention scores in bf16 would be {format_gb(scores)}; fused attention keeps none")
assert inputs == 2 * 4096 * 8192 and abs(scores / 2.147e9 - 1) < 0.001

# %% [markdown] id="block-read"
# Checkpointing doesn't halve activations here, it takes away all but a twentieth. And it takes nothing from the
# states. (You may meet other numbers for the same block: they depend on how its two norms are written. This one
# follows Llama's own code and keeps 6 bytes for each number that it normalises, an fp32 copy and a bf16 one; torch's
# `rms_norm` out of single kernels keeps 8, 1.76 GB a block; a fused norm keeps 2, 1.36 GB.) Both FlashAttention and checkpoints are right for this plan; they just aren't what's wrong with it.
#
# Now the whole bill of one card. Under ZeRO-3 a block's weights are *gathered* before it works: this block's and the
# next one's, fetched ahead of time; and its gradient is whole for a moment before it is reduced and scattered. The
# logits of a vocabulary of 32,000 exist in bf16, as an fp32 copy and once more as the loss's softmax: 2 + 4 + 4 bytes
# each.

# %% [markdown] id="ex-6-1-text"
# **Exercise 6.1** (2 points). Write the bill, item by item, in bytes on one card:
#
# * `parameters`, `gradients`, `optimizer_states`: whole or 1/N, by ZeRO's stage.
# * `gathered`: with stage 3 the weights of two blocks and the gradient of one, whole. Else 0.
# * `activations`: a block keeps `per_token` bytes for each token; with eager attention also `per_score` bytes for
#   each head and pair of tokens of a text. Without checkpoints every block does; with them each block keeps its
#   input, `hidden` numbers of 2 bytes per token, and one block is whole, the one that is being recomputed.
# * `logits`: 10 bytes for each token and word of the vocabulary.
# * `total`.


# %% id="ex-6-1" exercise="6.1"
def budget(m, each, N, stage, mb, s, ckpt, flash):
    """Bytes on one card, item by item, as a dict.

    m: parameters, block_parameters, layers, hidden, heads, vocab, per_token, per_score
    each: bytes per parameter of (weights, gradients, optimizer states); N cards, ZeRO stage 0 to 3
    mb texts of s tokens on each card; ckpt, flash: are they on?
    """
    weight, gradient, states = each
    items = {}
    # exercise 6.1
    ### BEGIN SOLUTION
    items["parameters"] = m.parameters * weight // (N if stage >= 3 else 1)
    items["gradients"] = m.parameters * gradient // (N if stage >= 2 else 1)
    items["optimizer_states"] = m.parameters * states // (N if stage >= 1 else 1)
    items["gathered"] = m.block_parameters * (2 * weight + gradient) if stage == 3 else 0
    scores = 0 if flash else mb * m.heads * s * s * m.per_score
    block = mb * s * m.per_token + scores
    inputs = m.layers * mb * s * m.hidden * 2
    items["activations"] = inputs + block if ckpt else m.layers * block
    items["logits"] = mb * s * m.vocab * (2 + 4 + 4)
    items["total"] = sum(items.values())
    ### END SOLUTION
    return items


# %% id="check-6-1" check="6.1"
memlab.check("6.1", budget)

# %% [markdown] id="bill"
# Here is that bill for the plan of the opening in pure bf16 (2 + 2 + 4 bytes, fused AdamW). **What does the sum say,
# and is the real peak above or below it?**

# %% id="bill-run"
shape = combined._plans(0)[0]
items = combined.budget_expected(*shape)
bars = [(name.replace("_", " "), round(items[name])) for name in combined.ITEMS[:-1]]
for name, held in bars:
    print(f"{name:18}{format_gb(held):>12}{format_bytes(held):>13}")
way = {w.name: w for w in combined.WAYS}["pure bf16, AdamW (fused)"]
whole = round(items["total"])
print(f"{'sum of the items':18}{format_gb(whole):>12}{format_bytes(whole):>13}")
print(f"{'traced peak':18}{format_gb(way.traced):>12}{format_bytes(way.traced):>13}   ({way.name})")
print(f"{'the card':18}{format_gb(card.memory_bytes):>12}{format_bytes(card.memory_bytes):>13}")
assert way.traced < items["total"] < 1.08 * way.traced
plots.waterfall(
    bars[0],
    bars[1:],
    capacity=card.memory_bytes,
    title="A bill that just fits: one of eight cards, pure bf16",
)

# %% [markdown] id="bill-read" claims="C6-14"
# The sum is a few GB above the traced peak, and it has to be: its items don't all exist at one moment. When the
# logits are there, hardly any gradient is; when the last gradients come, most checkpoints are gone. **A sum of items
# is an upper bound; the peak is a maximum over moments.** Near the edge of a card that is the difference between yes
# and no.

# %% [markdown] id="nine" claims="C0-12 C6-14 C6-06"
# ## 4. Nine ways to train 70B on eight cards
#
# So what *does* fit? Nine ways, one of them with two kinds of optimizer step. Each was traced on a virtual A100 with
# 80 layers, the card's rules and its caching allocator (`python -m benchmarks.sharded`; some 15 s each, so the numbers
# are stored). All with checkpoints and fused attention, one text of 4096 tokens per rank. **Guess for each
# whether it fits in 85.2 GB, before you run the cell.**

# %% id="nine-run"
for way in combined.WAYS:
    print(f"  {way.name:54}{way.given['cards']:>3} cards")

# %% [markdown] id="ex-6-2-text"
# **Exercise 6.2** (2 points). Compute the verdicts. In bytes per parameter:
#
# * bf16 weights are 2, gradients 2 (4 if `fp32_gradients`), master weights 4 (only `"bf16-master"`); AdamW's two
#   moments are 8 beside master weights, 4 in pure bf16, 2 if `"adamw-8bit"`. With LoRA (`adapters`) only those are
#   trained, in pure bf16.
# * `states_on_host`: master weights and moments lie in host memory. Else nothing does.
# * Everything is divided among the cards. `rest` (activations, gathered blocks, …) is there on each card in the
#   backward, and gone in the optimizer step.
# * In the step a `foreach` optimizer makes one more tensor of the moments' dtype for each parameter. (You'll be asked
#   for `foreach` only with AdamW's own moments on the card, not with 8-bit moments, adapters or states on the host.)
#   Under tensor parallelism with master weights every bf16 gradient also exists in fp32 (with ZeRO-3 the shards are
#   the fp32 weights themselves, and nothing is made).
#
# So there are two moments: the backward, states and `rest`; and the step, states and what it makes. The peak is the
# larger one. A way fits if 2 GB for the CUDA context are left.


# %% id="ex-6-2" exercise="6.2"
def need(way, P, rest, capacity):
    """{"card": bytes on one card at its peak, "host": bytes in host memory in all, "fits": True or False}.

    way: way.precision "bf16" or "bf16-master", way.optimizer "adamw" or "adamw-8bit", way.impl "fused" or
        "foreach", way.fp32_gradients and way.states_on_host True or False, way.adapters (parameters of LoRA; 0:
        all are trained), way.cards, way.split "zero-3" or "tensor"
    P: parameters; rest: bytes on a card that aren't states, in the backward; capacity: bytes of a card
    """
    # exercise 6.2
    ### BEGIN SOLUTION
    master = 4 if way.precision == "bf16-master" else 0
    moments = 2 if way.optimizer == "adamw-8bit" else 8 if master else 4
    gradients = 4 if way.fp32_gradients else 2
    host = 0
    step = 0
    if way.adapters:
        states = 2 * P + (2 + moments) * way.adapters
    elif way.states_on_host:
        host = (master + moments) * P
        states = (2 + gradients) * P
    else:
        states = (2 + gradients + master + moments) * P
        if way.split == "tensor" and master:
            step = 4 * P
        elif way.impl == "foreach":
            step = moments // 2 * P
    card = max(states / way.cards + rest, (states + step) / way.cards)
    return {"card": card, "host": host, "fits": card + 2 * 10**9 <= capacity}
    ### END SOLUTION


# %% id="check-6-2" check="6.2"
memlab.check("6.2", need)

# %% [markdown] id="nine-picture"
# And this is what the trace says:

# %% id="nine-figure"
free = card.memory_bytes - combined.CONTEXT
for way in combined.WAYS:
    print(
        f"{way.name:54}{format_gb(way.traced):>11}{format_bytes(way.traced):>12}  "
        f"{'fits' if way.traced <= free else 'no'}"
    )
print(f"{'free without the context':54}{format_gb(free):>11}{format_bytes(free):>12}")
short = ["AdamW, masters", "DeepSpeed, 18 B", "8-bit, masters", "pure bf16, fused", "pure bf16, foreach",
         "pure bf16, 8-bit", "states on the host", "LoRA", "16 cards, masters", "tensor parallel"]  # fmt: skip
table = {}
for name, way in zip(short, combined.WAYS, strict=True):
    steady = {**way.given, "impl": "fused", "split": "zero-3"}
    held, states = (round(combined.way_expected(w, P, 0, 0)["card"]) for w in (way.given, steady))
    weights = 2 * P // way.given["cards"]
    gradients = 0 if way.given["adapters"] else weights * (2 if way.given["fp32_gradients"] else 1)
    table[name] = {
        "parameters": weights,
        "gradients": gradients,
        "optimizer_states": states - weights - gradients,
        "activations": way.traced - held,
        "temporaries": held - states,  # what the step makes, where the step is the peak
    }
fitting = sum(way.traced <= free for way in combined.WAYS)
assert fitting == 5
plots.consumers(
    table, capacity=card.memory_bytes, what="peak of one card, traced; light blue: gathered blocks, too",
    title=f"{fitting} of {len(table)} ways fit, and none of them is plain mixed precision",
)  # fmt: skip

# %% [markdown] id="nine-read" claims="C0-12 C6-14"
# What makes 70B fit isn't among the article's five techniques. It is *fewer bytes of state per card*: states on the
# host, no master weights, 8-bit moments, few trained parameters, or more cards. Each has its price:
#
# | way | price |
# |---|---|
# | states on the host | 828 GB of host memory (and up to 276 GB more while gradients are fp32 there), PCIe, a slow CPU step |
# | pure bf16 | an update smaller than 1/256 of its weight is lost (chapter 5) |
# | 8-bit moments | a little noise; only with pure bf16 weights is it enough |
# | LoRA | another model: weights stay as they are |
# | 16 cards | 16 cards |
#
# Note the pair in the middle. Pure bf16 fits with a *fused* AdamW and not with a *foreach* one. One word, 8 GB.

# %% [markdown] id="nine-edge"
# All of these are steps of *one* micro-batch. **What does a second one add, when gradients are accumulated?**

# %% id="nine-edge-run" claims="C6-02 C6-14"
pure = mixed.replace(precision="bf16")
one, two = (memlab.compute(llama70, pure.replace(accumulation=n), card).peak_bytes for n in (1, 2))
traces = (combined.WAYS[3].traced, 83_972_828_272)  # stored, as above
for n, counted, traced in zip((1, 2), (one, two), traces, strict=True):
    held = memlab.compute(llama70, pure.replace(accumulation=n), card).consumers_at_peak()
    print(
        f"accumulation {n}: closed form {format_gb(counted)}, traced {format_gb(traced)}; at the peak ",
        end="",
    )
    print(" and ".join(f"{format_gb(held[name])} of {name}" for name in ("gradients", "activations")))
print(f"free without the context: {format_gb(free)}")
assert max(one, traces[0]) < free < min(two, traces[1])

# %% [markdown] id="nine-edge-read"
# Why 5.6 GB and not all 17.2 GB of gradients? With one micro-batch the peak comes late in the backward: nearly all
# gradients are there, and nearly all checkpoints are gone. With two, all gradients are there from the start, so the
# peak moves to the beginning of the second backward, where all 5.4 GB of checkpoints still lie.
#
# And it doesn't fit any more: at the edge of a card even accumulation, "free", decides. Closed form and trace differ
# by 0.01 to 0.13 GB here. Where less than that is left, believe the trace, and leave the caching allocator some room.

# %% [markdown] id="bert" claims="C6-18 C6-22"
# ## 5. BERT-large, redone
#
# The article's second plan is a table: BERT-large (340M), batch 32. FP32 20 GB; with bf16 10 GB; with micro-batch 1
# and 32 accumulations still 10 GB; with checkpoints 8 GB. The length of the texts isn't stated. **Which of these
# three steps saves most? And is there any length at which 20 → 10 → 10 → 8 could be right?**

# %% id="bert-run" claims="C6-18 C6-19 C6-20 C6-21"
bert = models.model("bert-large")


def bert_step(s, row, **changes):
    recipe = memlab.Recipe(sequence=s, attention="eager", dropout=0.1, **combined.TABLE[row]).replace(
        **changes
    )
    return memlab.compute(bert, recipe, card)


print(f"{'peak (phase)':26}{'article':>9}" + "".join(f"{f'S = {s}':>22}" for s in (128, 200, 512)))
for row, said in zip(combined.TABLE, (20, 10, 10, 8), strict=True):
    cells = ""
    for s in (128, 200, 512):
        done = bert_step(s, row)
        cells += f"{f'{format_gb(done.peak_bytes)} ({done.peak_phase[:8]})':>22}"
    print(f"{row:26}{said:>6} GB{cells}")
rows = [bert_step(200, row).phase_peaks() for row in combined.TABLE]
assert [round(max(r["forward"], r["backward"]) / GB, 1) for r in rows] == [19.0, 14.8, 6.3, 6.0]
assert all(round(r["optimizer"] / GB, 1) == 6.7 for r in rows)

# %% [markdown] id="bert-read" claims="C6-18 C6-19 C6-20 C6-21"
# At 200 tokens the first row is right: so 20 GB *means* about 200 tokens. Then bf16 takes 22% and not half, since 5.4
# GB of states stay fp32. Micro-batches, "unchanged" in the article, are the step that saves most. And the last row is
# the strangest: checkpoints lower *nothing*. **Why?** Look at the phase in brackets.

# %% id="bert-phases" claims="C6-20 C6-21"
print(f"{'S = 200':26}{'forward/backward':>18}{'foreach step':>14}{'fused step':>12}")
for row in combined.TABLE:
    foreach, fused = bert_step(200, row), bert_step(200, row, optimizer_impl="fused")
    high = max(foreach.phase_peaks()[p] for p in ("forward", "backward"))
    steps = [f.phase_peaks()["optimizer"] for f in (foreach, fused)]
    print(f"{row:26}{format_gb(high):>18}{format_gb(steps[0]):>14}{format_gb(steps[1]):>12}")
large = bert_step(200, "fp32, batch 32", set_to_none=False)
print(
    f"\ngradients kept between steps: {format_gb(large.peak_bytes)} in place of {format_gb(bert_step(200, 'fp32, batch 32').peak_bytes)}"
)
single = bert_step(200, "micro-batch 1, 32 times", precision="fp32")
print(f"micro-batch 1, 32 times, without bf16: {format_gb(single.peak_bytes)}, in {single.peak_phase}")
assert single.peak_bytes < 16 * GB
alone = bert_step(200, "fp32, batch 32", checkpointing="full", optimizer_impl="fused")
print(f"checkpoints at batch 32, fp32, fused: {format_gb(alone.peak_bytes)}, in {alone.peak_phase}")
traces, shallow = {}, replace(bert, layers=lab.pick(smallest=2, normal=24))
for row in ("fp32, batch 32", "bf16 autocast", "checkpoints"):
    fields = {**combined.TABLE[row], "accumulation": min(2, combined.TABLE[row].get("accumulation", 1))}
    traces[row] = memlab.trace_step(
        shallow, memlab.Recipe(sequence=200, attention="eager", dropout=0.1, **fields), gpu=card
    )
plots.timelines(traces, "BERT-large at 200 tokens: the peak moves into the step")

# %% [markdown] id="bert-phases-read" claims="C6-22"
# The default AdamW on a GPU (`foreach`) makes one more fp32 tensor for every parameter while it steps: 4 + 4 + 8 + 4
# = 20 bytes each, 6.7 GB. Once the activations are below that hill, no lever on activations moves the peak.
# `fused=True` makes it 16 bytes, and then checkpoints count again, a little. (In the last panel the hills before the
# step are temporaries: what a block computes again lives for that block alone.) The conclusion stands: a 16 GB card
# trains BERT-large, at 200 tokens with micro-batch 1 even without bf16. Its numbers don't.

# %% [markdown] id="bert-real"
# No GPU at hand? Others had one. Hugging Face's guide measured BERT-large (512 tokens, with a small head) on a V100,
# in 2022: what `nvidia-smi` shows, which is the process's whole reservation.

# %% id="bert-real-run" claims="C6-19 C6-22"
runs = {
    run["config"]["setting"]: run["value"] for run in published.measurements("bert-large-uncased + 2-class")
}
context = next(mib for setting, mib in runs.items() if "context" in setting)
base = next(mib for setting, mib in runs.items() if "fp32 AdamW" in setting)
for setting, mib in runs.items():
    if mib != context:
        print(
            f"{setting:34}{mib:>7,} MiB, {mib / base - 1:+5.0%}; {mib - context:>6,} without the CUDA context"
        )
amp = next(mib for setting, mib in runs.items() if setting.endswith("fp16 AMP"))
assert -0.08 < amp / base - 1 < -0.06
assert all(mib < 16 * 1024 for mib in runs.values())

# %% [markdown] id="bert-real-read"
# Real cards agree with the sums: 16-bit autocast saves 7%, a smaller micro-batch with checkpoints more than half, and
# 8-bit states 6 of fp32 Adam's 8 bytes, 12% of this step.

# %% [markdown] id="ex-6-3-text"
# **Exercise 6.3** (2 points). Both hills, for fp32 weights or autocast (4 B of weights, 4 of gradients, 8 of moments;
# `kept` includes autocast's copies). Ask at each moment whether gradients are alive:
#
# * they are when a micro-batch isn't the first of its step, and always when `zero_grad` only fills them with zeros
#   (`freed` is False);
# * when they are freed and there is a single micro-batch, the forward has none, but at the *end* of the backward all
#   are there, beside what one block needs.


# %% id="ex-6-3" exercise="6.3"
def peaks(P, kept, block, parts, freed, foreach):
    """{"backward": bytes, "optimizer": bytes, "phase": "backward" or "optimizer", the higher one}.

    P: parameters, all fp32, with AdamW's two moments
    kept: what one micro-batch's forward holds at its highest; block: what one block's backward needs
    parts: micro-batches of a step; freed: does zero_grad free the gradients?; foreach: or fused
    """
    # exercise 6.3
    ### BEGIN SOLUTION
    if parts > 1 or not freed:
        backward = 16 * P + kept
    else:
        backward = max(12 * P + kept, 16 * P + block)
    optimizer = (20 if foreach else 16) * P
    phase = "backward" if backward >= optimizer else "optimizer"
    return {"backward": backward, "optimizer": optimizer, "phase": phase}
    ### END SOLUTION


# %% id="check-6-3" check="6.3"
memlab.check("6.3", peaks)

# %% [markdown] id="levers" claims="C6-02 C6-03 C6-04 C6-05 C6-15 C6-16 C6-17 C6-23 S-01 S-03 C0-11"
# ## 6. Levers, their order and their price
#
# The article gives every technique stars, and an order: bf16, accumulation, checkpoints, FlashAttention, ZeRO,
# offload. **Is there a best lever? Try each alone, on two jobs.**

# %% id="levers-run" claims="C6-23 S-01 S-03"
jobs = {
    "BERT-large, 32 x 200": (bert, memlab.Recipe(precision="fp32", micro_batch=32, sequence=200, attention="eager",
                                                 dropout=0.1, optimizer_impl="fused")),
    "LLaMA-2-7B, 1 x 1024": (models.model("llama2-7b"), memlab.Recipe(precision="fp32", sequence=1024,
                             attention="eager", optimizer_impl="fused")),
}  # fmt: skip
levers = {
    "bf16 autocast": {"precision": "amp-bf16"},
    "micro-batch 1, accumulated": {"micro_batch": 1, "accumulation": 32},
    "SDPA": {"attention": "sdpa"},
    "checkpoints": {"checkpointing": "full"},
    "ZeRO-3 on 8 cards": {"zero_stage": 3, "world_size": 8},
    "states on the host": {"offload": ("optimizer_states:cpu",)},
}
saved = {name: {} for name in levers}
print(f"{'peak falls by':30}" + "".join(f"{job:>24}" for job in jobs))
for name, change in levers.items():
    for job, (config, base) in jobs.items():
        peak = memlab.compute(config, base, card).peak_bytes
        saved[name][job] = 1 - memlab.compute(config, base.replace(**change), card).peak_bytes / peak
    print(f"{name:30}" + "".join(f"{share:>23.0%} " for share in saved[name].values()))
first, second = (max(saved, key=lambda name, job=job: saved[name][job]) for job in jobs)
print(f"\nthe best: {first}; {second}")
assert first != second

# %% [markdown] id="levers-read" claims="C0-11 C6-15 C6-16 C6-17 S-01"
# The ranking turns over. (LLaMA's micro-batch is 1 already; accumulating only lets the gradients stay.) A lever moves
# its own term and no other, so ask first which term is too large, then choose:
#
# | too large | lever, cheapest first | price |
# |---|---|---|
# | activations | micro-batch and accumulation | none in arithmetic; tiny matrix products use a card badly, ZeRO-3 gathers again for each |
# | scores (long texts) | SDPA / FlashAttention | none: exact, faster |
# | activations, still | checkpoints: selective, then full | some per cent; up to a third more arithmetic |
# | states | fused step, ZeRO-1/2 | none; no more traffic than data parallelism |
# | states, still | 8-bit moments, LoRA | numerics; another model |
# | states, still | ZeRO-3 | 1.5 times the traffic, or more with accumulation |
# | all else fails | offload | the host's link and memory |
#
# Two places differ from the article's order. Fused attention comes *before* checkpoints: it is exact and takes away
# what you would recompute. And bf16 is a lever for time first; on cards without it (V100, T4, RTX 20) it isn't one.
# The prices, computed:

# %% id="price-run" claims="C6-02 C6-04 C6-05 C6-06"
seven = models.model("llama2-7b")
every_step = memlab.Recipe(precision="bf16", sequence=4096, micro_batch=1, accumulation=16)
prices = {
    "one card": every_step,
    "checkpoints": every_step.replace(checkpointing="full"),
    "states on the host": every_step.replace(offload=("optimizer_states:cpu",)),
    "8 cards, data parallel": every_step.replace(world_size=8),
    "8 cards, ZeRO-3, 16 x 1": every_step.replace(world_size=8, zero_stage=3),
    "8 cards, ZeRO-3, 1 x 16": every_step.replace(world_size=8, zero_stage=3, micro_batch=16, accumulation=1),
}
base = combined.step_seconds(seven, every_step, card)
for name, recipe in prices.items():
    time_ = combined.step_seconds(seven, recipe, card)
    print(f"{name:26}{time_:>8.2f} s a step, {time_ / base - 1:+.1%}")
link = hardware.link(card.host_link)
print(
    f"70B's gradients in bf16, 138 GB, over one {link.name} link: {2 * P / link.bandwidth:.1f} s, once per step"
)

# %% [markdown] id="price-read"
# LLaMA-2-7B, 64 Ki tokens per card and step, by the cost model of section 8. Full checkpoints cost their third.
# Offloading the states once per step costs less than that here, because 16 micro-batches share it. ZeRO-3 with 16
# micro-batches gathers weights 32 times: accumulation isn't free of charge there.
#
# Enough tables. **Build the step with all levers.**

# %% [markdown] id="ex-6-4-text" claims="S-04"
# **Exercise 6.4** (3 points). Four switches in one step, sixteen combinations. The check runs all of them for real on
# two small models (short texts, long texts) and measures the bytes of each: 1 point if the gradients are those of the
# plain step, up to rounding with `amp`; 1 if every combination takes as few bytes as it should. And 1 for `predict`:
# before anything runs, say how the sixteen rank (Spearman's rank correlation of 0.9).
#
# A block of the model is a pre-norm transformer block with 4h MLP and no dropout; 12 h² parameters.


# %% id="ex-6-4" exercise="6.4"
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def step(model, x, y, *, amp, parts, checkpointing, sdpa):
    """Add the gradients of the mean loss of the whole batch to .grad; x, y: (rows, tokens).

    h = model.embed(x); h = block(h, attention) for each of model.blocks; logits = model.head(h)
    attention: model.eager, or one of your own with the arguments (q, k, v): causal, (rows, heads, tokens, d)
    """
    # exercise 6.4
    ### BEGIN SOLUTION
    attention = model.eager
    if sdpa:
        attention = partial(F.scaled_dot_product_attention, is_causal=True)
    for rows, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            h = model.embed(rows)
            for block in model.blocks:
                if checkpointing:
                    h = checkpoint(block, h, attention, use_reentrant=False)
                else:
                    h = block(h, attention)
            loss = F.cross_entropy(model.head(h).flatten(0, 1), targets.flatten()) / parts
        loss.backward()
        del h, loss
    ### END SOLUTION


def predict(shape, *, amp, parts, checkpointing, sdpa):
    """Bytes beyond the weights at the highest moment, roughly: only the order of the 16 counts.

    shape: layers, width, heads, rows, tokens, vocab
    """
    # exercise 6.4
    ### BEGIN SOLUTION
    size = 2 if amp else 4
    tokens = shape.rows * shape.tokens // parts
    parameters = 12 * shape.layers * shape.width**2
    scores = 0 if sdpa else shape.rows // parts * shape.heads * shape.tokens**2 * (2 * size + 1)
    block = tokens * 18 * shape.width * size + scores
    kept = shape.layers * block
    if checkpointing:
        kept = shape.layers * tokens * shape.width * size + block
    copies = 2 * parameters if amp else 0
    return 4 * parameters * (parts > 1) + copies + kept
    ### END SOLUTION


# %% id="check-6-4" check="6.4"
memlab.check("6.4", step, predict)

# %% [markdown] id="grid"
# The sixteen, measured on this machine with a step of memlab's own:

# %% id="grid-run" claims="C6-16 S-04 C0-11"
depth = lab.pick(smallest=2, normal=3)
shapes = {
    "short texts": combined.Shape(depth, 64, 2, 16, 32),
    "long texts": combined.Shape(depth, 32, 4, 4, 224),
}
grid = {}
for name, shape in shapes.items():
    measured = combined.measured_levers(combined.reference_step, shape, lab.seed, lab.device)
    grid[name] = {
        combined.lever_name(levers): row["bytes"]
        for levers, row in zip(combined.LEVERS, measured, strict=True)
    }
ranked = sorted(grid["short texts"], key=grid["short texts"].get, reverse=True)
print(f"{'    bytes beyond the weights':40}" + "".join(f"{name:>14}" for name in shapes))
for row, levers in enumerate(ranked, 1):
    print(f"{row:>2}  {levers:36}" + "".join(f"{format_bytes(grid[name][levers]):>14}" for name in shapes))
for lever, other, pair in (
    ("sdpa", "checkpoints", "checkpoints + sdpa"),
    ("checkpoints", "sdpa", "checkpoints + sdpa"),
    ("bf16", "4 parts", "bf16 + 4 parts"),
):
    print(f"{lever + ' takes':18}", end="")
    for name, held in grid.items():
        first_, then = 1 - held[lever] / held["nothing"], 1 - held[pair] / held[other]
        print(f" {name}: alone {first_:.0%}, after {other} {then:.0%}.", end="")
    print()
together = combined.spearman(*(list(grid[name].values()) for name in shapes))
print(f"rank correlation between the two models: {together:.2f}")
for name in shapes:
    assert grid[name]["checkpoints"] < grid[name]["nothing"] and grid[name]["4 parts"] < grid[name]["nothing"]
assert grid["long texts"]["sdpa"] < 0.4 * grid["long texts"]["nothing"]
assert grid["short texts"]["sdpa"] > 0.9 * grid["short texts"]["nothing"]
assert grid["short texts"]["bf16 + 4 parts"] > 0.75 * grid["short texts"]["4 parts"]
plots.curves(
    {
        name: (range(1, 17), [grid[name][levers] / grid[name]["nothing"] for levers in ranked])
        for name in shapes
    },
    "Short and long texts rank the combinations differently",
    "combination: the row of the table above",
    "share of the bytes without levers",
)

# %% [markdown] id="grid-read" claims="S-04"
# With long texts SDPA alone takes away 70%, with short ones 5%. Both SDPA and checkpoints deal with scores, and still
# the second of the two finds as much to do as the first: checkpoints leave one block whole, scores and all, while it
# is recomputed, and that block is what SDPA makes small. Not so bf16 with short texts: alone it takes 38%, after four
# micro-batches 20%, because by then a large share of what is left are gradients in fp32, which it doesn't touch.
# Combining pays where levers act on *different* bytes.

# %% [markdown] id="eight" claims="C6-17"
# ## 7. States in eight bits
#
# Adam's two moments are half of all state bytes. **Could a byte each be enough?** A byte has 256 levels, and moments
# span many powers of ten. Three ideas make it work (Dettmers et al., arXiv:2110.02861): a scale for each *block* of
# 256 values, so that one outlier spoils only its own block; levels that lie denser near zero; and a second moment
# that is never rounded to zero, since Adam divides by its root.

# %% id="eight-run"
from memlab.step import AdamW8bit

draws = torch.randn(256, generator=torch.Generator().manual_seed(lab.seed)).square() * 1e-4
levels = {
    "evenly spaced": (draws / draws.max() * 255).round() / 255 * draws.max(),
    "fourth root": ((draws / draws.max()) ** 0.25 * 255).round().clamp(min=1).div(255) ** 4 * draws.max(),
}
for name, back in levels.items():
    lost = int((back == 0).sum())
    worst = ((back - draws).abs() / draws).median()
    print(f"256 squares in 8 bits, {name:14}: {lost:>3} became 0, median error {worst:.2%} of the value")
weight = torch.nn.Parameter(torch.randn(512, 512, device=lab.device))
weight.grad = torch.randn_like(weight)
for make in (torch.optim.AdamW, AdamW8bit):
    optimizer = make([weight], lr=1e-3)
    optimizer.step()
    held = sum(t.nbytes for t in optimizer.state[weight].values() if t.dim())
    print(f"{make.__name__:10}{held / weight.numel():.3f} B of state per parameter")

# %% [markdown] id="ex-6-5-text"
# **Exercise 6.5** (3 points). Write it. `pack` and `unpack` may use any 256 levels; what counts is the error (2% of
# the block's largest value), that squares stay positive, one byte per value and one fp32 scale per 256. Then
# `Adam8bit`, measured: at most 2.1 bytes per parameter stay alive after a step, and the step unpacks one parameter at
# a time. After 300 steps its loss must be within 5% of Adam's. Use torch's tensor functions, and not memlab's
# optimizer.


# %% id="ex-6-5" exercise="6.5"
import torch
from torch.nn.functional import pad


def pack(x, signed):
    """(n,) fp32 -> codes (n,) uint8, and scales, fp32, one for each 256 values; the last block may be shorter.

    signed: x may be negative (first moments); else all x >= 0, and what isn't 0 must not become 0
    """
    # exercise 6.5
    ### BEGIN SOLUTION
    blocks = pad(x, (0, -len(x) % 256)).view(-1, 256)
    scales = blocks.abs().amax(dim=1)
    share = blocks / scales.clamp(min=1e-38)[:, None]
    if signed:
        codes = share.abs().sqrt().copysign(share).mul(127).add(128).round()
    else:
        codes = share.sqrt().sqrt().mul(255).round().clamp(min=1) * (share > 0)
    return codes.flatten()[: len(x)].to(torch.uint8), scales
    ### END SOLUTION


def unpack(codes, scales, signed):
    """The values again, (n,) fp32."""
    # exercise 6.5
    ### BEGIN SOLUTION
    x = codes.float()
    if signed:
        x = (x - 128) / 127
        x = x * x.abs()
    else:
        x = (x / 255) ** 4
    return x * scales.repeat_interleave(256)[: len(x)]
    ### END SOLUTION


class Adam8bit:
    """Adam with two packed moments for each parameter; the update itself is in fp32."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.t = 0
        self.moments = {}

    @torch.no_grad()
    def step(self):
        # exercise 6.5
        ### BEGIN SOLUTION
        self.t += 1
        first, second = self.betas
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                continue
            g = p.grad.flatten().float()
            if i in self.moments:
                m, v = (unpack(*self.moments[i][k], signed=not k) for k in (0, 1))
            else:
                m, v = torch.zeros_like(g), torch.zeros_like(g)
            m.mul_(first).add_(g, alpha=1 - first)
            v.mul_(second).addcmul_(g, g, value=1 - second)
            root = (v / (1 - second**self.t)).sqrt_().add_(self.eps)
            p.sub_((m / root).mul_(self.lr / (1 - first**self.t)).view_as(p))
            del root
            self.moments[i] = pack(m, True), pack(v, False)
        ### END SOLUTION


# %% id="check-6-5" check="6.5"
memlab.check("6.5", pack, unpack, Adam8bit)

# %% [markdown] id="planner" claims="C6-15 C6-17"
# ## 8. A planner of your own
#
# Last, the machine that makes plans. It needs two things: bytes for a recipe (`memlab.compute` gives them in
# milliseconds) and seconds. A cost model that fits on a napkin, with $P$ parameters, $T$ tokens per card and step,
# $N$ cards and $m$ micro-batches:
#
# * arithmetic: $6PT$ FLOPs, with full checkpoints $8PT$ (the forward again), at 40% of the card's bf16 peak;
# * network ($N > 1$, ZeRO-3): each micro-batch gathers the bf16 weights twice and reduces the bf16 gradients once,
#   $3m \cdot 2P\,(N-1)/N$ bytes over the link named `card.peer_link`;
# * host: with the states there, this card's bf16 gradients go down and its weights come back once per step, $4P/N$
#   bytes over the link named `card.host_link`;
# * one after the other: add them. A link's bytes per second are `hardware.link(name).bandwidth`.
#
# What it leaves out is stated: the overlap of the three, tiny matrix products, the CPU's own time.

# %% [markdown] id="ex-6-6-text"
# **Exercise 6.6** (3 points). `seconds` is the cost model (1 point). `plan` (2 points) finds the cheapest recipe
# below a budget of bytes, for models that you haven't seen, among these: `precision="bf16"`,
# `optimizer_impl="fused"`; `micro_batch` 1, 2, 4, … 64 with `accumulation` so that cards × micro_batch × accumulation
# = batch; `checkpointing` `"none"` or `"full"`; `offload` `()` or `("optimizer_states:cpu",)`; on several cards
# `zero_stage=3`, `world_size=cards`. `None` if none fits.
#
# Here `precision="bf16"` has no master weights on the card: with the states on the card it is pure bf16; with them on
# the host they are fp32, a master copy among them.
#
# The check *traces* what you choose, and one of its budgets lies between what the formula says and what the trace
# finds: the closed form leaves out cuBLAS's workspaces, for instance. So leave it room: keep to nine tenths of the
# budget. A recipe within 10% of the best seconds counts. memlab's own planner is away while yours is checked.


# %% id="ex-6-6" exercise="6.6"
import memlab
from memlab import hardware


def seconds(model, recipe, card):
    """Seconds of one optimizer step, by the cost model above.

    model.parameter_count; recipe: a memlab.Recipe; card.flops["bf16"] (FLOPs per second);
    hardware.link(card.peer_link).bandwidth and hardware.link(card.host_link).bandwidth (bytes per second)
    """
    # exercise 6.6
    ### BEGIN SOLUTION
    P, N, m = model.parameter_count, recipe.world_size, recipe.accumulation
    tokens = m * recipe.micro_batch * recipe.sequence
    arithmetic = (8 if recipe.checkpointing == "full" else 6) * P * tokens / (0.4 * card.flops["bf16"])
    network = host = 0
    if N > 1:
        network = 3 * m * 2 * P * (N - 1) / N / hardware.link(card.peer_link).bandwidth
    if recipe.offload:
        host = 4 * P / N / hardware.link(card.host_link).bandwidth
    return arithmetic + network + host
    ### END SOLUTION


def plan(model, card, cards, batch, sequence, budget):
    """The cheapest recipe whose peak stays below `budget` bytes on each card, or None.

    batch: texts of `sequence` tokens of one optimizer step, on all cards together
    """
    # exercise 6.6
    ### BEGIN SOLUTION
    best, least = None, float("inf")
    for micro_batch in (1, 2, 4, 8, 16, 32, 64):
        if batch % (cards * micro_batch):
            continue
        for checkpointing in ("none", "full"):
            for offload in ((), ("optimizer_states:cpu",)):
                recipe = memlab.Recipe(
                    precision="bf16", optimizer_impl="fused", micro_batch=micro_batch, sequence=sequence,
                    accumulation=batch // (cards * micro_batch), checkpointing=checkpointing, offload=offload,
                    zero_stage=3 if cards > 1 else 0, world_size=cards,
                )  # fmt: skip
                cost = seconds(model, recipe, card)
                if cost < least and memlab.compute(model, recipe, card).peak_bytes <= 0.9 * budget:
                    best, least = recipe, cost
    return best
    ### END SOLUTION


# %% id="check-6-6" check="6.6"
memlab.check("6.6", seconds, plan)

# %% [markdown] id="memlabs"
# memlab has a larger one (`memlab plan` on the command line). It walks the seven steps in their order, with the price
# of each, then searches every valid recipe, with tensor parallelism, stages, 8-bit states, memory traffic and kernels
# in its cost model. **Which of the nine ways will it find for 70B on eight cards?**

# %% id="memlabs-run" claims="C0-12 C6-14"
if lab.size == "normal":
    found = memlab_plan("llama2-70b", "A100-80GB", 8, effective_batch=1024, sequence=4096)
else:
    found = memlab_plan("gpt2-xl", "RTX-3090", 1, effective_batch=32, sequence=1024)
print(f"{found.model}: {found.bound}-bound; {found.searched:,} recipes\n")
print(f"{'the seven steps':26}{'peak of a card':>16}")
for step_ in found.steps:
    print(f"{step_.name:26}{format_gb(step_.peak_bytes):>16}  {'taken' if step_.taken else 'not taken'}")
    print(f"{'':28}{step_.why}")
print("\ncheapest first:")
for candidate in found.candidates[:5]:
    way = candidate.recipe
    how = f"{way.precision}, {way.optimizer}, ZeRO-{way.zero_stage}, tensor parallel {way.tensor_parallel}, "
    how += f"checkpoints {way.checkpointing}, off the card: {', '.join(way.offload) or 'nothing'}"
    print(f"  {format_gb(candidate.peak_bytes):>9}, {candidate.seconds / 60:5.1f} min a batch: {how}")
assert found.candidates and not found.fits
if lab.size == "normal":
    assert all(candidate.recipe.offloaded("optimizer_states") for candidate in found.candidates[:5])

# %% [markdown] id="memlabs-read"
# States on the host lead: bf16 on the card, masters and moments off it. The planner adds what the table of nine didn't
# try, selective checkpoints and groups of two to eight cards in tensor parallel, because they save time.
#
# It takes a step for its bytes *or* for its time. Mixed precision makes this peak higher: bf16 copies of the weights are
# 138 GB more, and eager attention keeps its weights in fp32 *and* in bf16, 172 GB more, while what halves is 95 GB. It
# is taken because a batch then takes minutes and not hours. SDPA changes nothing at the peak, which
# lies in the optimizer step by then, and is taken because it is faster. And a batch of 1024 texts leaves plenty of
# micro-batches to share the cost of moving the states.

# %% [markdown] id="explore"
# ## 9. The seven steps, for any model
#
# Choose a model, cards, a batch and a length, and watch the article's seven steps one after the other against the
# card. The numbered controls are the same steps, for you to take in any order. **Find a job in which bf16 makes the peak
# higher, and one in which only the last step helps.** *Trace it* checks the formula against the step that you chose.

# %% id="explore-run"
widgets.seven_steps(model="llama2-7b", gpu="A100-80GB", cards=8)

# %% [markdown] id="game"
# ## 10. The fitting game
#
# Four levels, from a T4 to eight A100s. Each names a model, the bytes of a card and a **target loss**. You move with
# a `Recipe`. Its bytes are traced by the card's rules; its loss is that of a small twin, trained for real with your
# precision and your optimizer (plain SGD saves bytes, and doesn't get there); its time is counted by the cost model.
# 1000 points are a step that computes nothing twice and sends nothing anywhere. The best moves are kept in a file on
# your machine.

# %% id="game-run"
for level in game.LEVELS:
    print(level)
first_try = memlab.Recipe(precision="fp32", micro_batch=8, accumulation=4, sequence=1024)
better = memlab.Recipe(
    precision="amp-fp16", micro_batch=1, accumulation=32, sequence=1024, checkpointing="full"
)
for recipe in lab.pick(smallest=(), normal=(first_try, better)):
    print()
    print(game.play(1, recipe, player="the chapter"))

# %% [markdown] id="game-read"
# The second move fits, and pays for it: recomputation. Is it needed? Play: `print(game.play(1, memlab.Recipe(...),
# player="your name"))`, then `print(game.leaderboard())`.

# %% [markdown] id="fits" claims="C0-12 C6-14"
# ## 11. 70B on eight cards: it fits
#
# Back to the step of the opening. Keep everything, and move the optimizer's states, master weights among them, to
# host memory. The recipe then says `bf16` and not `bf16-master`: the *card* has no masters any more. The host keeps
# them in fp32, with both moments, so no update is lost, as it may be in pure bf16. **How many bytes does a card have
# left?**

# %% id="fits-run"
hosted = mixed.replace(precision="bf16", offload=("optimizer_states:cpu",))
fitted = trace_sharded(replace(llama70, layers=layers), hosted, gpu=card, limit=limit, warm=True)
print(
    f"{layers} layers: peak {format_gb(fitted.peak_bytes)} in {fitted.peak_phase}, limit {format_gb(limit)}"
)
on_host = fitted.info["host"]["peak_bytes"]
print(f"host memory at its highest: {format_gb(on_host)} a rank, {format_gb(8 * on_host)} for the machine")
assert fitted.peak_bytes < limit
plots.timeline(fitted, budget=limit, title="The step of the opening, states on the host: it fits")

# %% [markdown] id="fits-read"
# Half of the card is free; the bill went to the host, which needs more than a terabyte while the gradients are there
# in fp32. If it hasn't got that, pure bf16 with 8-bit moments takes 61.3 GB of each card, and you'd watch the loss.
#
# ## 12. In your own words
#
# **Exercise 6.7** (3 points, graded by hand, at most eight sentences). A colleague fine-tunes a 13 B model (bf16
# autocast, foreach AdamW, eager attention, batch 16 of 2048 tokens, no checkpoints) and has four cards of 80 GB with
# plain data parallelism. It runs out of memory. They plan: "1. checkpoints, 2. bf16 weights, that halves everything,
# 3. offload". What do you answer? Say which term is too large, what each of the three would change in bytes on a
# card, and the plan that you'd make.
#
# *Rubric.* 1 point: the states in bytes per parameter and in GB, against the card, before any activation. 1 point:
# each of the three steps judged by the term that it moves (with "halves everything" put right). 1 point: a plan that
# fits, in an order with a reason, with its price and with the moment of its peak.

# %% [markdown] id="written-6-7" manual="6.7" points=3
# Under autocast with AdamW the states are 4 + 4 + 8 = 16 B per parameter: 208 GB for 13 B parameters on every card,
# and the foreach step adds 4 B, 52 GB. The card has 85 GB, so it fails before there is a single activation: the job
# is states-bound. Checkpoints move only activations: they may be needed later, now they change nothing. "bf16
# weights" as mixed precision with fp32 masters is 2 + 2 + 12 = 16 B again; only pure bf16 is 8 B, 104 GB, still too
# much, and small updates are lost. Offloading the states of this job leaves fp32 weights and gradients, 8 B, 104 GB;
# only together with bf16 on the card are 4 B left, 52 GB, and that works, at the price of PCIe and a CPU step. First
# I'd use the four cards: ZeRO-3 takes 16/4 = 4 B, 52 GB of each card (ZeRO-2 with masters 2 + 14/4 = 5.5 B, 72 GB,
# leaves too little), for 1.5 times the traffic; then a fused step, so that the peak isn't the optimizer's (foreach:
# 4/4 = 1 B more, 65 GB); then SDPA, which is free and takes the scores, and micro-batch 1 or 2 with accumulation to
# keep the batch of 16. What's left is one or two texts' activations beside 52 GB, so checkpoints come last, selective
# before full, if the backward's peak is still above 83 GB.

# %% [markdown] id="wall"
# ## To pin to the wall
#
# * First ask: states, activations or scores? A lever moves its own term.
# * 16 B per parameter, in fp32, autocast *and* with masters. Pure bf16 8, 8-bit Adam 10 or 6, states on the host 4,
#   LoRA 2.
# * A sum of items is an upper bound; the peak is a maximum over moments.
# * foreach AdamW's step: one more tensor per parameter. `fused=True` before any other lever on states.
# * Micro-batch, SDPA, checkpoints, in this order. Fused step, ZeRO-1/2, 8-bit or LoRA, ZeRO-3, offload, in this
#   order.
# * 70B on eight A100s: 138 GB of states a card. Not five techniques, but fewer state bytes make it fit.
# * Plan with a formula, leave it room, confirm with a trace.

# %% id="wall-run"
lab.headline(
    "70B on 8 cards, mixed precision", combined.WAYS[0].traced, "B", "peak of one card, traced (stored)"
)
lab.headline(
    "70B on 8 cards, states on the host", combined.WAYS[6].traced, "B", "peak of one card, traced (stored)"
)
lab.headline(
    "BERT-large's foreach step",
    bert_step(200, "checkpoints").peak_bytes,
    "B",
    "weights, gradients, moments and one copy",
)
lab.headline("8-bit Adam", 2 + 2 * 4 / 256, "B per parameter", "two moments and their scales")
memlab.progress()

# %% [markdown] id="verdicts-text"
# The verdicts on nine of the article's statements:

# %% id="verdicts"
published.verdicts("C0-12", "C6-08", "C6-09", "C6-10", "C6-14", "C6-16", "C6-19", "C6-20", "C6-23")

# %% [markdown] id="read-on"
# ### Where to read on
#
# * Rajbhandari et al., *ZeRO*, arXiv:1910.02054, section 3: where the 16 bytes come from; Ren et al., *ZeRO-Offload*,
#   arXiv:2101.06840: what goes to the host, and why the optimizer does.
# * Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, arXiv:2110.02861, section 2.
# * Korthikanti et al., *Reducing Activation Recomputation*, arXiv:2205.05198: why selective comes before full.
# * PyTorch's documentation of `torch.optim`: which implementation is the default, and what `foreach` costs.
# * Touvron et al., *Llama 2*, arXiv:2307.09288, table 2: the GPU hours.
