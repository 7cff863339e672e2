# %% [markdown] id="title" claims="C0-03"
# # 2. The four consumers
#
# GPT-2 small has 124 million parameters. In fp32 that is half a gigabyte, and a card with 16 GB refuses to train it.
# Where do the other fifteen go?
#
# They go to four consumers: **parameters**, **gradients**, **optimizer states** and **activations**. This chapter
# finds each of them, tensor by tensor, until you can predict what a training step takes before you run it. You'll
# also meet a fifth, the **temporaries**, which no one counts and which often decide.
#
# You need no GPU. Each idea comes three times: *computed* from a formula that you write, *traced* on a model of any
# size that takes no memory, and *measured* on real tensors on this machine. Stop at each question in **bold** and
# write your guess down before you run the next cell: the distance between guess and result is what you learn here.
#
# Plan four to five hours: the cells run in a minute, the rest is five exercises (15 points, checked at once; the bare number
# under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save this notebook under its own name,
# `02_four_consumers.ipynb`, with your answers in it, and give in that file.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import math
import os
import textwrap

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch
import torch.nn.functional as F
from torch import nn

import memlab
from memlab import hardware, models, plots, published, viewer
from memlab.units import GB, format_bytes, format_count, format_gb

lab = memlab.begin("02_four_consumers", device=device, size=size, seed=seed)

# %% [markdown] id="fails"
# ## 1. A step that doesn't fit
#
# **GPT-2 small, batch 8, 1024 tokens, fp32, on a Tesla T4. The weights are 3% of the card. Does one training step
# fit?** Plain settings: eager attention, AdamW, no dropout.
#
# You don't need a T4 to find out. The next cell runs that very step, forward, backward and optimizer, on a virtual
# one: tensors with shapes and dtypes but without storage, and a count that raises what CUDA would raise.

# %% id="fails-run"
from dataclasses import replace

layers, batch = lab.pick(smallest=(2, 24), normal=(12, 8))
gpt2 = replace(models.model("gpt2"), layers=layers)
t4 = hardware.gpu("T4")
plain = memlab.Recipe(precision="fp32", micro_batch=batch, sequence=1024, attention="eager")

weights = 4 * gpt2.parameter_count
share = weights / t4.memory_bytes
print(f"weights: {format_bytes(weights)}, {share:.1%} of {format_bytes(t4.memory_bytes)}\n")
try:
    memlab.trace_step(gpt2, plain, gpu="T4")
except torch.OutOfMemoryError as error:
    print(textwrap.fill(str(error), 96))

# %% [markdown] id="picture"
# It doesn't, and the message names an operator that you didn't write: the backward of the loss wanted room for one more tensor
# of the size of the logits, 8 x 1024 tokens x a vocabulary of 50,257 x 4 bytes (rounded up to whole 2 MiB, as CUDA's allocator
# does with large tensors). What would the step have taken? Without a limit the same trace runs to its end, and each allocation
# and each free is on record, with the consumer that it belongs to. (With a running kernel the record itself is below the
# figure: click on a moment to see what is alive then, layer by layer.)

# %% id="picture-run"
step = memlab.trace_step(gpt2, plain)
viewer.show(step, budget=t4.memory_bytes)

# %% [markdown] id="picture-read"
# This is the picture to keep in mind for the rest of the course. Time runs to the right, in allocations rather than
# seconds. Dark blue and green never leave: parameters and optimizer states. In the set-up `zero_grad` lets go of the last
# step's gradients. The forward piles up activations, twelve blocks like twelve stairs. The backward takes them down again
# and puts gradients in their place. The optimizer step comes last; what is left of the activations then are the logits,
# because a variable of the training loop still names them.
#
# So the peak isn't the sum of all consumers: it is a maximum over moments. When the activations are at their highest, not
# one gradient exists yet.

# %% id="picture-table"
print(f"peak: {format_bytes(step.peak_bytes)}, in {step.peak_phase}\n")
at_peak, own_peaks = step.consumers_at_peak(), step.consumer_peaks()
for consumer, held in at_peak.items():
    own = format_bytes(own_peaks[consumer])
    print(f"{consumer:18}{format_bytes(held):>12} at the peak {own:>12} at its own")
print(f"\nthe weights are {weights / step.peak_bytes:.1%} of the peak")
assert step.peak_bytes > t4.memory_bytes
assert at_peak["gradients"] == 0
logits = batch * 1024 * gpt2.vocab * 4
print(f"one tensor of logits: {format_bytes(logits)}")
print(f"temporaries at the peak: {at_peak['temporaries'] / logits:.1f} of them")

# %% [markdown] id="sixteen" claims="C2-01 C2-04 C2-12"
# ## 2. Sixteen bytes for every parameter
#
# Start with the floor. **How many tensors of the size of a weight matrix are alive after one AdamW step?**
#
# Take the first matrix of a GPT-2 block's MLP. In algebra it is $Y = XW + b$ with $W$ of shape (768, 3072). PyTorch
# stores the transpose, one row per *output*, and computes `x @ W.T + b`: the bytes are the same, but you'll meet the
# shape in every trace.

# %% id="sixteen-run"
up = nn.Linear(768, 3072)
adamw = torch.optim.AdamW(up.parameters())
up(torch.randn(4, 768)).square().mean().backward()
adamw.step()

state = adamw.state[up.weight]
print(f"{'tensor':12}{'shape':>14}  {'dtype':16}{'bytes':>12}{'per parameter':>15}")
for name, tensor in {"W": up.weight, "W.grad": up.weight.grad, **state}.items():
    shape, dtype, share = tuple(tensor.shape), str(tensor.dtype), tensor.nbytes / up.weight.numel()
    print(f"{name:12}{shape!s:>14}  {dtype:16}{tensor.nbytes:>12,}{share:>15.6f}")
assert up.weight.shape == (3072, 768)

# %% [markdown] id="sixteen-read"
# Four: the weight, its gradient, and the two running averages of Adam. `exp_avg` is the first moment, the mean of
# the gradients; `exp_avg_sq` the second, the mean of their *squares* (often called a variance; nothing is centred).
# `step` is a single number. An fp32 number takes 4 bytes, so each parameter costs $4 + 4 + 8 = 16$ bytes before a
# single token is seen.
#
# **What is 16 B per parameter for GPT-3, and which is the largest model whose states fit on an 80 GB card?**

# %% id="gpt3" claims="C0-02 C0-04 C2-09 C2-15"
gpt3 = 175 * 10**9
card = 80 * GB
for name, per_parameter in {"parameters": 4, "gradients": 4, "optimizer states": 8, "together": 16}.items():
    print(f"GPT-3, {name:17}{per_parameter:>3} B x 175e9 = {format_gb(per_parameter * gpt3):>9}")
print(f"in 80 GB cards: {16 * gpt3 / card:.1f}")

a100 = hardware.gpu("A100-80GB")
print(f"\n{a100.name}: CUDA reports {a100.memory_bytes:,} B = {format_gb(a100.memory_bytes)}")
print(f"largest model whose states fit: {card / 16 / 1e9:.1f} B parameters by the name, ", end="")
print(f"{a100.memory_bytes / 16 / 1e9:.1f} B by the bytes")
small = 6_200_000_000
print(f"a model of 6.2 B: {format_gb(16 * small)} to train, {format_gb(2 * small)} of bf16 weights to run")

# %% [markdown] id="gpt3-read"
# "A large model needs many cards" is true of *full training with Adam*. The same 6.2 B model answers questions on a
# single 16 GB card, and adapters change the bill as well: QLoRA (Dettmers et al., 2023, arXiv:2305.14314) reports a 65 B model
# fine-tuned on one card of 48 GB. Always ask: which consumers are there at all?
#
# It won't get easier by waiting. Between 2018 and 2022 the largest models grew about 410-fold every two years, the
# memory of an accelerator about 2-fold (Gholami et al., *AI and Memory Wall*, arXiv:2403.14123).

# %% [markdown] id="recipes"
# ### Does half precision halve it?
#
# **You switch from fp32 to bf16 autocast. What happens to the 16 bytes?** Ask the tensors.


# %% id="recipes-run"
def train_once(dtype, autocast):
    """Bytes per parameter that a weight, its gradient and its moments take after one step; prints the dtypes."""
    layer = nn.Linear(512, 512, dtype=dtype)
    adam = torch.optim.AdamW(layer.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = layer(torch.randn(8, 512, dtype=dtype))
    y.float().square().mean().backward()
    adam.step()
    w, moments = layer.weight, adam.state[layer.weight]
    tensors = (w, w.grad, moments["exp_avg"], moments["exp_avg_sq"])
    print(f"   result {y.dtype}; weight, gradient, moments {[str(t.dtype)[6:] for t in tensors]}")
    return sum(t.nbytes for t in tensors) / w.numel()


for name, dtype, autocast in (
    ("fp32", torch.float32, False),
    ("bf16 autocast", torch.float32, True),
    ("a bf16 model", torch.bfloat16, False),
):
    print(f"{name}: {train_once(dtype, autocast):g} B per parameter")

# %% [markdown] id="recipes-read" claims="C2-01"
# Autocast changes the dtype of what *flows*, not of what *stays*: weights, gradients and moments are fp32 as before.
# It even adds to the peak: while the forward runs it keeps a bf16 copy of the weights, up to 2 bytes per parameter.
# What it shrinks are the activations (chapter 5).
#
# The four precisions of a recipe in `memlab`, and what each of them keeps:
#
# | precision | weight | gradient | each moment | fp32 master copy |
# |---|---|---|---|---|
# | `fp32` | fp32 | fp32 | fp32 | no |
# | `amp-bf16`, autocast | fp32 | fp32 | fp32 | no |
# | `bf16`, the whole model | bf16 | bf16 | bf16 | no |
# | `bf16-master`, as Megatron and DeepSpeed do | bf16 | bf16 | fp32 | fp32 |
#
# The master copy is there because a bf16 weight can't take small updates: $1 + 0.001$ is 1 in bf16. It belongs to the
# optimizer and is counted with its states. An 8-bit optimizer stores each moment in one byte, whatever the precision
# (its block-wise scales, 1.6% more, are left out in the exercise). Offloading moves the optimizer states, master copy
# included, to host memory: not a byte of them stays on the card.

# %% id="recipes-check"
with lab.card():
    layer = nn.Linear(512, 512, device=lab.device)
    x = torch.randn(8, 512, device=lab.device)
    with memlab.Meter(layer) as meter, torch.autocast(lab.device.type, dtype=torch.bfloat16):
        layer(x)
made = [block for block in meter.trace.blocks() if block.dtype == "bfloat16" and block.shape == (512, 512)]
copy = sum(block.bytes for block in made) / layer.weight.numel()
print(f"autocast's copy of the weight: {copy:g} B per parameter, while the forward runs")

print(f"1 + 0.001 in bf16: {(torch.tensor(1.0, dtype=torch.bfloat16) + 0.001).item()}")
print(f"an 8-bit moment and its share of a block's scale: 1 + 4/256 = {1 + 4 / 256:.3f} B")

# %% [markdown] id="ex-2-1-text"
# ### Exercise 2.1 (3 points)
#
# Write that table as a function. Bytes are whole numbers, so compute with ints.


# %% id="ex-2-1" exercise="2.1"
def states(parameters, precision, optimizer, offload=False):
    """Bytes on the card of each consumer that grows with the model, as ints.

    precision: "fp32", "amp-bf16", "bf16" or "bf16-master"
    optimizer: "sgd" (no momentum), "momentum", "adamw" or "adamw-8bit"
    offload: the optimizer states, the master copy among them, are in host memory
    """
    # exercise 2.1: set `weight`, `gradient` and `kept` (by the optimizer), in bytes per parameter
    ### BEGIN SOLUTION
    weight = 4 if precision in ("fp32", "amp-bf16") else 2
    gradient = weight
    moment = 1 if optimizer == "adamw-8bit" else (2 if precision == "bf16" else 4)
    moments = {"sgd": 0, "momentum": 1, "adamw": 2, "adamw-8bit": 2}[optimizer]
    master = 4 if precision == "bf16-master" else 0
    kept = 0 if offload else moments * moment + master
    ### END SOLUTION
    return {
        "parameters": parameters * weight,
        "gradients": parameters * gradient,
        "optimizer_states": parameters * kept,
    }


# %% id="check-2-1" check="2.1"
memlab.check("2.1", states)

# %% [markdown] id="recipes-figure"
# Seven recipes for a real 7 B model, from the library's own formulas: the four precisions of the table, 8-bit Adam in two of
# them, and offloading. Only what grows with the parameters is drawn, no activations. The first three rows are the point:
# **mixed precision is as tall as fp32**.

# %% id="recipes-figure-run"
recipes = {
    "fp32": {"precision": "fp32"},
    "bf16 autocast": {"precision": "amp-bf16"},
    "bf16, fp32 master": {"precision": "bf16-master"},
    "8-bit Adam, autocast": {"precision": "amp-bf16", "optimizer": "adamw-8bit"},
    "bf16": {"precision": "bf16"},
    "bf16, 8-bit Adam": {"precision": "bf16", "optimizer": "adamw-8bit"},
    "bf16, states offloaded": {
        "precision": "bf16-master",
        "offload": ("optimizer_states:cpu",),
    },
}
llama = models.model("llama2-7b")


def states_of(**recipe):
    """Bytes of each consumer that grows with the parameters, exact for every tensor of Llama-2-7B."""
    r = memlab.Recipe(**recipe)
    size = {"fp32": 4, "bf16": 2}
    kept = 0 if r.offload else sum(t.bytes for p in llama.parameters() for t in r.state_tensors(p.shape))
    return {
        "parameters": llama.parameter_count * size[r.parameter_dtype],
        "gradients": llama.parameter_count * size[r.gradient_dtype],
        "optimizer_states": kept,
    }


held = {name: states_of(**recipe) for name, recipe in recipes.items()}
per_parameter = {name: sum(row.values()) / llama.parameter_count for name, row in held.items()}
assert per_parameter["fp32"] == per_parameter["bf16 autocast"] == per_parameter["bf16, fp32 master"] == 16
for name, b in per_parameter.items():
    print(f"{name:24}{b:6.2f} B per parameter")
scales = held["bf16, 8-bit Adam"]["optimizer_states"] - 2 * llama.parameter_count
print(f"the 8-bit rows count the scales, too: {format_bytes(scales)}, {scales / llama.parameter_count:.2f} B per parameter")
print(f"the line: {a100.name} has {format_gb(a100.memory_bytes)} = {format_bytes(a100.memory_bytes)}")
plots.consumers(
    held,
    capacity=a100.memory_bytes,
    title="Llama-2-7B: mixed precision keeps as many bytes as fp32",
    what="parameters, gradients and optimizer states",
)

# %% [markdown] id="live" claims="C2-02 C2-13"
# ## 3. Ask the optimizer
#
# A formula is a claim, `optimizer.state` is a fact. **Is Adam really twice as expensive as SGD?** Here is what five
# optimizers hold for one weight of 512 x 512, the weight and its gradient included.


# %% id="live-run"
def held_for_one_weight(make, *shape):
    weight = nn.Parameter(torch.randn(shape))
    optimizer = make([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = {name: t.nbytes for name, t in optimizer.state[weight].items() if torch.is_tensor(t)}
    return (weight.nbytes + weight.grad.nbytes + sum(kept.values())) / weight.numel(), list(kept)


makers = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
}
bytes_per_parameter = {}
for name, make in makers.items():
    bytes_per_parameter[name], kept = held_for_one_weight(make, 512, 512)
    print(f"{name:20}{bytes_per_parameter[name]:>10.5f} B per parameter   {', '.join(kept)}")
print()
for name in ("SGD", "SGD with momentum"):
    print(f"Adam / {name}: {bytes_per_parameter['Adam'] / bytes_per_parameter[name]:.2f}")

# %% [markdown] id="live-read" claims="C2-14"
# Twice, against SGD *without* momentum; a third more against the SGD that people train with. "Adam doubles it" also
# needs to say what: its two moments are twice the parameters, or as much as parameters and gradients together.
# And all of that is about states: activations don't change with the optimizer.
#
# Adafactor keeps a row and a column of averages instead of a matrix. What that saves depends on the shape. **What does it
# hold for a bias?**

# %% id="live-bias" claims="C2-02"
for shape in ((512, 512), (4096, 64), (512,)):
    held_bytes, kept = held_for_one_weight(torch.optim.Adafactor, *shape)
    print(f"Adafactor, {shape!s:11} {held_bytes - 8:.4f} B of states per parameter   {', '.join(kept)}")

# %% [markdown] id="live-bias-read"
# A bias has no rows and columns, so it gets a full `variance`, 4 bytes per parameter like a momentum (and the counter). And of
# two matrices with equally many numbers the square one is cheapest.

# %% [markdown] id="step-peak" claims="C2-02"
# ## 4. The step itself
#
# **During `optimizer.step()`, is 16 bytes per parameter all there is?** `memlab.Meter` records each allocation of
# real tensors. Eight equal weights, three implementations of the same AdamW.


# %% id="step-peak-run"
def adamw_step(**implementation):
    """The trace of one AdamW step, with gradients and moments already there."""
    numbers = lab.pick(smallest=50_000, normal=1_000_000)
    with lab.card():
        weights = nn.ParameterList(torch.randn(numbers, device=lab.device) for _ in range(8))
        optimizer = torch.optim.AdamW(weights.parameters(), **implementation)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()  # the first step makes the moments
        with memlab.Meter(weights, optimizer) as meter:
            optimizer.step()
    return meter.trace, 8 * numbers


implementations = {
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
    "fused": {"fused": True},
}
step_peaks = {}
for name, implementation in implementations.items():
    trace, numbers = adamw_step(**implementation)
    step_peaks[name] = trace.peak_bytes / numbers
    print(f"{name:9}{step_peaks[name]:8.2f} B per parameter at the peak of step()")
assert [round(b, 1) for b in step_peaks.values()] == [20, 17.5, 16]

# %% [markdown] id="step-peak-read"
# All three do the same arithmetic. The *for-loop* updates one parameter at a time: it holds $\sqrt{v}$ and a scaled copy
# of it for the tensor it is at, twice the size of the largest one. And a third shows up: the scaled copy of the tensor
# *before* it, which the loop's variable keeps until it is overwritten. Memory is held by names. (Here all eight are equal, so
# $16 + 3 \cdot 4 / 8 = 17.5$. Where a large matrix follows a bias, the third is small.)
# *Foreach* does each operation on all tensors at once, because few large kernels are faster than many small ones:
# $\sqrt{v}$ exists for **all** parameters. *Fused* does the whole update in one kernel, in place.
#
# On CUDA, foreach is what you get when you don't ask. The documentation of `torch.optim.AdamW` says it: "uses ~
# sizeof(params) more peak memory than the for-loop version". So training with Adam takes 20 bytes per parameter at that
# moment, and if the batch is small, that is the peak of the whole step.


# %% id="phases-run"
def trace_of(tokens, implementation="foreach"):
    recipe = memlab.Recipe(precision="fp32", micro_batch=1, sequence=tokens, optimizer_impl=implementation)
    return memlab.trace_step(one_sequence, recipe)


one_sequence = replace(gpt2, vocab=lab.pick(smallest=5_000, normal=gpt2.vocab))
short, long, fused = trace_of(128), trace_of(1024), trace_of(128, "fused")
for label, trace in (("128 tokens", short), ("1,024 tokens", long), ("128 tokens, fused", fused)):
    most = [f"{phase} {format_bytes(n)}" for phase, n in trace.phase_peaks().items() if phase != "setup"]
    print(f"{label:>17}: peak in {trace.peak_phase:9} ({', '.join(most)})")
assert [trace.peak_phase for trace in (short, long, fused)] == ["optimizer", "backward", "backward"]

numbers = one_sequence.parameter_count
print(f"20 B x {format_count(numbers)} parameters = {format_bytes(20 * numbers)}")
embedding = 4 * one_sequence.vocab * one_sequence.hidden
print(f"\nalive at the peak of the fused step, of the embedding's size ({format_bytes(embedding)}), made in the backward:")
of_its_size = [b for b in fused.at_peak() if b.bytes == embedding and b.phase == "backward"]
for block in of_its_size:
    print(f"  by {block.operator.removeprefix('aten.')}, {block.module}")
assert {block.module for block in of_its_size} == {"head", "embed.token"}
plots.timeline(short)

# %% [markdown] id="phases-read"
# With 128 tokens the mountain of activations is a molehill, and the pink peak of the optimizer step towers over it. A shorter
# text or recomputed activations would flatten the molehill and change nothing at the peak. `fused=True` takes the pink away,
# and then the peak moves: it is the narrow spike at the end of the backward. **A peak is a maximum over phases: first find
# out which phase it is in, then choose what to do, and look again.**
#
# What is that spike, and the thin pink band that leads to it? GPT-2 ties its output layer to its embedding: one weight, used
# twice, so its gradient is the sum of two. The output layer's half is ready first and waits through the whole backward: the
# band. The embedding's half comes last, and for a moment both and their sum are alive, three tensors of the size of the
# largest matrix: the spike.

# %% [markdown] id="ex-2-2-text"
# ### Exercise 2.2 (4 points)
#
# `measure_states` counts what a live model and its optimizer hold. The check gives you models with tied weights, frozen
# parameters, parameters that no optimizer has, buffers (saved with the model or not) and bf16; weights, gradients and moments that are views of one large buffer, padding included, as
# sharding libraries keep them; and optimizers that you haven't written, with a list in their state. So don't assume, count:
# each *storage* once and in full (`t.untyped_storage()`, as in chapter 1), in bytes. Buffers count with the parameters; in
# `optimizer.state` every tensor counts, the `step` counters and those inside a list, too.
#
# `step_peak` predicts: bytes alive at the peak of an fp32 Adam step, gradients and moments included, within 1%. In the
# for-loop, $\sqrt{v}$ and its scaled copy both count, for the largest tensor. What is left of the tensor *before* it in the
# list you may count, with that tensor's size, or leave out.


# %% id="ex-2-2" exercise="2.2"
from torch.utils._pytree import tree_leaves  # every leaf of a nest of lists, tuples and dicts


def measure_states(model, optimizer):
    """{"parameters": …, "gradients": …, "optimizer_states": …}: bytes held now, as ints."""

    # exercise 2.2
    ### BEGIN SOLUTION
    def total(tree):
        """Bytes of all storages behind the tensors of `tree`, a nest of lists and dicts: each once, in full."""
        tensors = [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    return {
        "parameters": total([*model.parameters(), *model.buffers()]),
        "gradients": total([p.grad for p in model.parameters()]),
        "optimizer_states": total(list(optimizer.state.values())),
    }
    ### END SOLUTION


def step_peak(sizes, implementation):
    """Peak bytes of an fp32 Adam step over tensors of `sizes` elements: "foreach", "for-loop" or "fused"."""
    # exercise 2.2
    ### BEGIN SOLUTION
    temporaries = {"foreach": sum(sizes), "for-loop": 2 * max(sizes), "fused": 0}
    return 16 * sum(sizes) + 4 * temporaries[implementation]
    ### END SOLUTION


# %% id="check-2-2" check="2.2"
memlab.check("2.2", measure_states, step_peak)

# %% [markdown] id="saved" claims="C2-06"
# ## 5. What autograd keeps
#
# Now the mountain. Activations exist because backward needs them: each operator keeps what its own derivative asks
# for, and nothing else. **Which of these keep their input, which their output, and which keep nothing: Linear, ReLU,
# GELU, softmax, LayerNorm, an addition, dropout?**
#
# PyTorch lets you watch: `saved_tensors_hooks` calls a function of yours for each tensor that is kept.


# %% id="saved-run"
def watch(module, x):
    """The output of `module(x)` and every tensor that autograd kept, as the hook was given it."""
    kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return module(x), kept


class Native(nn.Module):
    """Dropout as CUDA does it: the mask is one byte per element."""

    def forward(self, x):
        return torch.native_dropout(x, 0.1, True)[0]


class Add(nn.Module):
    def forward(self, x):
        return x + 2 * x


operators = {
    "Linear": nn.Linear(256, 256),
    "ReLU": nn.ReLU(),
    "GELU": nn.GELU(),
    "softmax": nn.Softmax(dim=-1),
    "tanh": nn.Tanh(),
    "LayerNorm": nn.LayerNorm(256),
    "add, scale": Add(),
    "dropout, CPU": nn.Dropout(0.1),
    "dropout, as on CUDA": Native(),
}
print(f"{'operator':21}{'in inputs':>9}   keeps")
for name, module in operators.items():
    x = torch.randn(64, 256, requires_grad=True)
    y, kept = watch(module, x)
    known = {x.data_ptr(): "its input", y.data_ptr(): "its output"}
    known |= {p.data_ptr(): "a parameter" for p in module.parameters()}
    labels = [known.get(t.data_ptr(), f"{tuple(t.shape)} {str(t.dtype)[6:]}") for t in kept]
    size = sum(t.nbytes for t, label in zip(kept, labels, strict=True) if label != "a parameter")
    print(f"{name:21}{size / x.nbytes:>9.3f}   {', '.join(labels) or 'nothing'}")

# %% [markdown] id="saved-read"
# So "every layer saves its input and its output" is nearly never what happens. A Linear keeps its input (its weight
# is needed too, but is there anyway). ReLU, softmax and tanh can write their derivative in terms of their *output*.
# GELU needs its input. LayerNorm keeps its input and two numbers per row. Addition and scaling keep nothing at all.
#
# Dropout is a trap for anyone who measures on a CPU: there it keeps a float mask, as large as the input. On CUDA the mask
# is one byte per element, a quarter of it in fp32. `torch.native_dropout` does on a CPU what CUDA does.
#
# **Two operators that keep the same tensor: is it kept twice?** What the hook is told isn't what memory holds.

# %% id="shared-run" claims="C2-06 C2-07"
b, h = 64, 256
chain = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(h, h), nn.ReLU())])
x = torch.randn(b, h)
y, kept = watch(chain, x)
parameters = {p.data_ptr() for p in chain.parameters()}
told = [t for t in kept if t.data_ptr() not in parameters]

with memlab.Meter(chain) as meter:
    y = chain(x)
alive = meter.trace.consumers_at_peak()["activations"]
unit = b * h * 4
print(f"the hook was given {len(told)} activations, {sum(t.nbytes for t in told) / unit:.0f} x b*h*4 bytes")
print(f"alive when backward begins: {alive / unit:.0f} x b*h*4 bytes, the input and one tensor per layer")

part = torch.randn(1000, 1000)[:, :10]
print(f"\na slice of shape {tuple(part.shape)} keeps {format_bytes(part.untyped_storage().nbytes())} alive")

# %% [markdown] id="shared-read"
# A ReLU's output is the next Linear's input: two operators, one tensor, kept once. For a chain of Linear and ReLU the
# rule of thumb *layers x batch x width x 4 bytes* is therefore exact, give or take the input. Remember that it
# holds here: the next section is about where it doesn't.
#
# The other trap is the view. A slice, a transpose or one of the three chunks of a QKV projection keeps its whole storage
# alive. **Memory is held by storages: count those, once each, in full.**

# %% [markdown] id="ex-2-3-text"
# ### Exercise 2.3 (4 points)
#
# Count exactly: the bytes that autograd keeps while `module(*inputs)` runs. Unique storages; parameters and buffers of the
# module don't count, they're on another account; inputs do, if they're kept.
#
# A trap that has cost people days: the pack hook must return `t.detach()`. If it returns `t` itself and `t` is the
# operator's own output, the graph holds the output and the output holds the graph, out of the garbage collector's
# sight: it is never freed. For the same reason remember numbers in the hook, not tensors.


# %% id="ex-2-3" exercise="2.3"
def saved_bytes(module, *inputs):
    """Bytes of the unique storages that autograd saves in `module(*inputs)`, without parameters and buffers."""
    # exercise 2.3
    ### BEGIN SOLUTION
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    found = {}

    def remember(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        output = module(*inputs)  # alive until the count is done: no address is used twice
    del output
    return sum(found.values())
    ### END SOLUTION


# %% id="check-2-3" check="2.3"
memlab.check("2.3", saved_bytes)

# %% [markdown] id="block" claims="C0-05 C2-03 C2-07"
# ## 6. One block, tensor by tensor
#
# A common estimate says: activations = layers x batch x sequence x hidden x bytes, one tensor per layer. It was
# exact for Linear and ReLU. **By what factor is it off for a transformer block?**
#
# Here is a block in twenty lines: eager attention, dropout as on CUDA, 16 bit. The meter lists what is alive when it has
# run, each tensor in bytes per element of the residual stream, that is, divided by $s \cdot b \cdot h$.


# %% id="block-define"
class Block(nn.Module):
    """A transformer block that writes out what it keeps. x: (b, s, h)."""

    def __init__(self, h, heads, **options):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(h, **options), nn.LayerNorm(h, **options)
        self.qkv, self.out = nn.Linear(h, 3 * h, **options), nn.Linear(h, h, **options)
        self.up, self.down = nn.Linear(h, 4 * h, **options), nn.Linear(4 * h, h, **options)
        self.drop = Native()

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)  # (b, heads, s, s)
        attended = (self.drop(scores) @ v).transpose(1, 2).reshape(b, s, h)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def alive_after(h, heads, s, b, dtype):
    """What is alive after a Block's forward on the meta device, without its parameters and its output."""
    with torch.device("meta"):
        block = Block(h, heads, dtype=dtype)
        x = torch.empty(b, s, h, dtype=dtype)
    with memlab.Meter(block, device="meta") as meter:
        y = block(x)
    trace = meter.trace
    alive = [trace.block(i) for i in trace.live_at(len(trace))]
    alive = [a for a in alive if a.consumer == "activations"]
    assert alive[-1].shape == tuple(y.shape)
    return alive[:-1]  # the output belongs to the next block


# %% id="block-run"
h, heads, s, b = 1024, 16, 512, 32  # BERT-large
element = s * b * h
kept = alive_after(h, heads, s, b, torch.bfloat16)
print(f"{'module':8}{'operator':26}{'shape':24}{'dtype':10}{'bytes / sbh':>12}")
for t in kept:
    operator = t.operator.removeprefix("aten.") or "(the input)"
    print(f"{t.module:8}{operator:26}{t.shape!s:24}{t.dtype:10}{t.bytes / element:>12.3f}")
print(f"{'':68}{sum(t.bytes for t in kept) / element:>12.3f}")
scores = sum(t.bytes for t in kept if t.shape[-2:] == (s, s))
stream = sum(t.bytes for t in kept if t.shape[-1] != 1) - scores  # without the norms' statistics
print(f"\nscores: {scores / (b * heads * s * s):g} B for each of them; all else: {stream / element:g} B per element")
assert (scores, stream) == (5 * b * heads * s * s, 34 * element)

# %% [markdown] id="block-read"
# Add up the column in two groups.
#
# * Everything of shape $(b, s, h)$ or a multiple of it: the inputs and the outputs of the two norms (8; `Block add` is the
#   second one's input), Q, K and V (6), what attention returns (2), two dropout masks of one byte (2), and the MLP with twice
#   $4h$ (16). Together **34 bytes**.
# * Everything of shape $(b, a, s, s)$, with $a$ heads: the softmax's output (2 bytes), its dropout mask (1) and the dropped
#   scores (2). **5 bytes per score**, and there are $b\,a\,s^2$ of them: $5as/h$ per element.
#
# $$\text{bytes per block} = s\,b\,h \left(34 + \frac{5\,a\,s}{h}\right)$$
#
# That is the formula of Korthikanti et al. (2022, arXiv:2205.05198, section 4). What the table shows beyond it, a
# hundredth of a byte, are the statistics of the norms.


# %% id="block-check" claims="C0-05 C2-07"
def element_bytes(s, h=h, heads=heads):
    return 34 + 5 * heads * s / h


print(f"{'s':>5}{'counted, 24 layers':>20}{'34 + 5as/h':>13}{'fp32, counted / one tensor per layer':>40}")
for s in (128, 256, 512):
    counted = 24 * sum(t.bytes for t in alive_after(h, heads, s, b, torch.bfloat16))
    formula = 24 * element_bytes(s) * s * b * h
    in_fp32 = sum(t.bytes for t in alive_after(h, heads, s, b, torch.float32)) / (4 * s * b * h)
    print(f"{s:>5}{format_gb(counted):>20}{format_gb(round(formula)):>13}{in_fp32:>40.1f}")
    assert abs(counted / formula - 1) < 0.003

gpt3_block = element_bytes(2048, 12288, 96)
print(f"\nGPT-3: {gpt3_block:.0f} B per element instead of 2, {gpt3_block / 2:.0f} times as much")
elements = 2048 * 12288 * 96  # one sequence, all layers
print(f"GPT-3, one sequence of 2048: {format_gb(round(gpt3_block * elements))} of activations, ", end="")
print(f"{format_gb(2 * elements)} by one 16-bit tensor per layer")

# %% [markdown] id="block-levers" claims="C2-05 C2-08"
# The estimate with one tensor per layer is 21 to 35 times too low for BERT-large in fp32 and 57 times for GPT-3 in 16
# bit: the factor isn't a constant, it grows with the sequence. Activations are the hardest consumer to estimate, because
# they depend on batch, length, width, depth and heads, and also on *how* the operators are written. **Two models with
# equal parameters: equal activations? And what if attention never stored its scores?**

# %% id="levers-run"
for layers, width in ((24, 1024), (6, 2048)):
    counted = layers * sum(t.bytes for t in alive_after(width, width // 64, 512, 8, torch.bfloat16))
    numbers = format_count(12 * layers * width**2)
    print(f"{layers:>2} layers of {width}: {numbers} parameters, {format_gb(counted)} of activations")


def saved_by_attention(attend, s):
    """Bytes of activations that one head of 64 keeps in fp32, without Q, K and V."""
    with lab.card():
        q, k, v = (torch.randn(1, 1, s, 64, device=lab.device, requires_grad=True) for _ in range(3))
        with memlab.Meter() as meter:
            out = attend(q, k, v)
    return meter.trace.end_bytes - q.nbytes - k.nbytes - v.nbytes, out


s = lab.pick(smallest=512, normal=4096)
eager, _ = saved_by_attention(lambda q, k, v: torch.softmax(q @ k.mT / 8, dim=-1) @ v, s)
fused, _ = saved_by_attention(F.scaled_dot_product_attention, s)
print(f"\none head of 64, {s} tokens, fp32: eager keeps {format_bytes(eager)}, ", end="")
print(f"scaled_dot_product_attention {format_bytes(fused)} (output included: {format_bytes(4 * 64 * s)})")

# %% [markdown] id="levers-read"
# Deep and narrow keeps twice as much as shallow and wide, at the same number of parameters. And the scores needn't be
# stored at all: a fused kernel recomputes them in backward and keeps the output and one number per row (chapter 4 builds
# one). The $5as/h$ disappears; the 34 stays.

# %% [markdown] id="ex-2-4-text"
# ### Exercise 2.4 (2 points)
#
# $s\,b\,h\,(34 + 5as/h)$ is right for one kind of block. Write the bytes of four kinds, $L$ blocks in 16 bit, exactly: the
# MLP is $f$ wide instead of $4h$, dropout may be off, and attention may be fused. Leave out the statistics of the norms.
#
# Go through the table row by row. Which rows have the width of the MLP? Which ones does dropout make, and what does the
# product with $V$ keep where there is none? A fused kernel keeps its Q, K, V and its output, as before, and one fp32 number
# for each row and head. It keeps no mask either: in backward it draws the same random numbers again.


# %% id="ex-2-4" exercise="2.4"
def act_bytes(s, b, h, a, f, L, dropout, fused):
    """Bytes, an int, that L transformer blocks keep for backward, in 16 bit, without the norms' statistics.

    s tokens, micro-batch b, width h, a heads, an MLP of width f; dropout: True or False; fused: attention is
    a fused kernel (True) or writes its scores out (False).
    """
    # exercise 2.4
    ### BEGIN SOLUTION
    stream = 18 if dropout else 16  # two norms' inputs and outputs 8, Q, K, V 6, attention 2; two masks 2
    mlp = 4 * f  # before and after GELU
    if fused:
        scores = 4 * a * s * b
    else:
        scores = (5 if dropout else 2) * a * s * s * b
    return L * (s * b * (stream * h + mlp) + scores)
    ### END SOLUTION


# %% id="check-2-4" check="2.4"
memlab.check("2.4", act_bytes)

# %% [markdown] id="predict" claims="C0-03"
# ## 7. Predict, trace, measure
#
# You have all parts. Here is a GPT-2 in miniature that fits on any machine: 6 layers of width 384, a vocabulary of 8,000, 14
# million parameters. **Predict the peak of one fp32 AdamW step (foreach) with one sequence of 128 tokens. Which phase is
# it in, and which consumers are alive?** Write down a number in MiB.
#
# `memlab.compare` sets three numbers side by side: the *formula* is closed forms, no tensor is made; the *trace* is every
# allocation of the step on tensors without storage; *measured* is the same step with real tensors on this machine.

# %% id="predict-run"
layers, width, vocab = lab.pick(smallest=(2, 256, 5_000), normal=(6, 384, 8_000))
mini = replace(
    gpt2,
    name="gpt2-mini",
    layers=layers,
    hidden=width,
    heads=width // 64,
    kv_heads=width // 64,
    ffn=4 * width,
    vocab=vocab,
)
comparison = memlab.compare(mini, precision="fp32", micro_batch=1, sequence=128)
print(comparison)

# %% [markdown] id="gap"
# With so few tokens the optimizer step is the peak, and the rule of section 4 gives it: 20 B per parameter. **By how much does
# it miss, and what is that?** A gap needs a name. Ask the measured trace what else was alive.

# %% id="gap-run"
rule = 20 * mini.parameter_count
peak = comparison.measured.peak_bytes
print(f"20 B x {format_count(mini.parameter_count)} = {format_bytes(rule)}, ", end="")
print(f"measured {format_bytes(peak)}: {peak - rule:,} B more")
alive = comparison.measured.at_peak()
rest = [block for block in alive if block.consumer == "activations"]
for block in rest:
    where = block.module or "the training loop"
    print(f"{block.bytes:>12,} B  {block.shape!s:12} {block.dtype:8} by {block.operator}, {where}")
counters = [block for block in alive if block.consumer == "optimizer_states" and block.shape == ()]
print(f"{4 * len(counters):>12,} B  AdamW's {len(counters)} step counters")
residual = peak - rule - sum(block.bytes for block in rest + counters)
print(f"{residual:>12,} B  residual")
assert residual == 0 or torch.cuda.is_available()  # a GPU's kernels may add something of their own

# %% [markdown] id="gap-read"
# On a CPU the miss is accounted for to the byte: the logits, the batch and the loss, which the training loop still names,
# and the step counters (on a GPU those stay in host memory). That is what "explaining the gap" means in this course: a
# difference has a name, or it is printed as a residual.
#
# And the list of consumers isn't complete even so. Beside the tensors there are the allocator's cache and its fragmentation,
# the libraries' workspaces, communication buffers when several cards work together, and the CUDA context, between 0.1 and
# 2 GB before the first tensor. `nvidia-smi` shows the sum of it all. Chapter 1 takes it apart.

# %% [markdown] id="published-text"
# ### Real cards
#
# You may not have a GPU here, others did. These are published measurements; nothing of it was measured by this course.
# Each of them isolates something that you can now compute:
#
# * one Linear layer applied 100 times: weights, input and one saved tensor per application;
# * a step with activation checkpointing and foreach AdamW in mixed precision: if its peak is in the optimizer step, it is 20 B
#   per parameter;
# * a pure bf16 step with the for-loop, where the authors say that the peak is in the optimizer step: 8 B per parameter, and two
#   temporaries of the largest tensor;
# * the same training with AdamW and with 8-bit AdamW: all else cancels in the *difference*, $8 - 2 = 6$ B per parameter, less
#   the scales of the 8-bit blocks.

# %% id="published-run"
reported = {row["id"]: row for row in published.measurements()}
llama_1b = replace(  # config.json of meta-llama/Llama-3.2-1B
    models.model("llama3-8b"),
    name="llama3.2-1b",
    layers=16,
    hidden=2048,
    head_dim=64,
    ffn=8192,
    tied=True,
)
largest = max(p.count for p in llama.parameters())
eight_bit = 8 - 2 * (1 + 4 / 256)  # bytes per parameter that 8-bit AdamW saves
bert_large = models.model("bert-large").parameter_count
predicted = {
    "Linear 1024 x 1024, 100 times": 4 * (1024**2 + 1024 + 101 * 10_240 * 1024),
    "Llama-3.2-1B, AMP, foreach": 20 * llama_1b.parameter_count,
    "Llama-2-7B, bf16, for-loop": 8 * llama.parameter_count + 2 * 2 * largest,
    "ViT-H, AdamW - 8-bit AdamW": eight_bit * 630e6,
    "BERT-large, the same": eight_bit * bert_large,
}
found = (
    (reported[223]["value"] * 2**20, 223),
    (reported[10]["value"] * GB, 10),
    (reported[173]["value"] * GB, 173),
    ((reported[208]["value"] - reported[209]["value"]) * GB, 208),
    ((reported[101]["value"] - reported[108]["value"]) * 2**20, 101),
)
print(f"{'what':32}{'predicted':>10}{'published':>11}{'residual':>10}   source")
for (what, expected), (value, row) in zip(predicted.items(), found, strict=True):
    sizes = f"{format_gb(round(expected)):>10}{format_gb(round(value)):>11}{value / expected - 1:>+10.1%}"
    print(f"{what:32}{sizes}   {reported[row]['source'].partition(' (')[0]}")
assert found[0][0] == predicted["Linear 1024 x 1024, 100 times"]

# %% [markdown] id="published-read"
# The first is exact to the byte. The others come from libraries, models and versions that we didn't run; the last one is from
# `nvidia-smi`, context and cache included, and only a difference. What is left over is shown as what it is: a residual.
#
# Have you got a GPU? Then the next cell sets CUDA's own count beside the prediction.

# %% id="gpu"
if lab.device.type == "cuda":
    on_card = memlab.compare(gpt2, precision="fp32", micro_batch=4, sequence=512)
    print(on_card)
    print(f"\ntorch.cuda.max_memory_allocated(): {format_bytes(torch.cuda.max_memory_allocated())}")
else:
    print("no CUDA GPU here, so nothing is measured on one; the rows above are what others measured")

# %% [markdown] id="cards" claims="C2-10 C2-11"
# ## 8. How many cards, how many days
#
# Back to GPT-3: 2.8 TB of states. **How many A100 cards of 80 GB at least, and is that why such models are trained on a
# thousand?**
#
# The first is a division, rounded up, and a lower bound: it needs each state to lie on *one* card, sharded as ZeRO-3 and FSDP
# do (chapter 4). With plain data parallelism every card holds all of it, and no number of cards is enough.
#
# The second is a matter of time. Forward takes 2 floating-point operations per parameter and token (a multiplication and an
# addition), backward twice that, recomputed activations one more forward: 8 in all. An A100 sustains about 140 TFLOP/s
# in such a run (Narayanan et al., 2021, arXiv:2104.04473).

# %% id="cards-run"
states_gpt3 = 16 * gpt3
print(f"cards that hold the states: {math.ceil(states_gpt3 / card)} by the name, ", end="")
print(f"{math.ceil(states_gpt3 / a100.memory_bytes)} by the bytes that CUDA reports")
print(f"140 TFLOP/s are {140e12 / a100.flops['bf16']:.0%} of what an {a100.name} can do at best")
operations = 8 * gpt3 * 300 * 10**9  # 300 billion tokens
for count in (35, 128, 512, 1024, 4096):
    seconds = operations / (count * 140e12)
    print(f"{count:>5} cards: {seconds / 86_400:8.1f} days = {seconds / 86_400 / 365.25:5.2f} years")

# %% [markdown] id="cards-read"
# 35 cards would hold the states and train for almost three years; 1024 finish in about a month. It isn't the activations
# that ask for a thousand cards, since those can be recomputed, but the arithmetic. (Both counts are for a model of GPT-3's
# size on A100s; GPT-3 itself was trained on V100s.)

# %% [markdown] id="ex-2-5-text"
# ### Exercise 2.5 (2 points)
#
# Both as functions, for any model and card.


# %% id="ex-2-5" exercise="2.5"
def min_cards(parameters, bytes_per_parameter, card_bytes):
    """The least number of cards whose memory holds the states, perfectly sharded: an int."""
    # exercise 2.5
    ### BEGIN SOLUTION
    needed = parameters * bytes_per_parameter
    return -(-needed // card_bytes)
    ### END SOLUTION


def train_days(parameters, tokens, cards, flops_per_second=140e12, recompute=True):
    """Days of training, not rounded, on `cards` cards that sustain `flops_per_second` each."""
    # exercise 2.5
    ### BEGIN SOLUTION
    per_token = 8 if recompute else 6
    work = per_token * parameters * tokens
    return work / (cards * flops_per_second) / 86_400
    ### END SOLUTION


# %% id="check-2-5" check="2.5"
memlab.check("2.5", min_cards, train_days)

# %% [markdown] id="explore"
# ## 9. Your own model
#
# Change one thing at a time and watch which consumer answers, and when the peak moves to another phase. All of it is
# computed, at once; *Trace it* runs the step that you chose on tensors without storage and shows how far the formula is
# from it. Without a running kernel you see the starting point: the table and the figure.

# %% id="explore-run"
from memlab import widgets

widgets.four_consumers(model="gpt2", gpu="T4")

# %% [markdown] id="written-text"
# ## 10. In your own words
#
# ### Exercise 2.6, in writing (3 points, graded by hand)
#
# Answer in at most eight sentences. A colleague trains a 1.3 B model with AdamW on a 24 GB card, micro-batch 1, 256 tokens. It
# runs out of memory in `optimizer.step()`. They switched from fp32 to bf16 autocast "to halve everything", then turned on
# activation checkpointing, and it still fails at the same line. Explain what each of the two changes did to the four
# consumers, why the step still fails, and what you would change instead. Give a number for each.
#
# *Rubric.* 1 point: which of the four consumers each of the two changes touched and which it didn't, in bytes per parameter.
# 1 point: the phase that sets the peak, and what is alive in it, as a number of GB. 1 point: a change that brings that phase
# below the card's capacity, and the number of GB at which it arrives.

# %% [markdown] id="written-2-6" manual="2.6" points=3
# Both changes act on activations only: autocast makes them 16-bit, checkpointing recomputes them. Weights, gradients and
# both moments stay fp32, 16 B per parameter, which is 20.8 GB for 1.3 B parameters, and with 256 tokens the
# activations were small from the start. The peak of a step is the maximum over its phases: in `optimizer.step()` the
# activations are gone, but the foreach implementation holds one more copy of the parameters, 20 B per parameter or 26.0 GB,
# more than the card has. So I'd first pass `fused=True`: no temporaries, a peak of 20.8 GB in that phase,
# and the card has 24. If that is too tight, 8-bit AdamW keeps 4 + 4 + 2 = 10 B per parameter,
# 13 GB, and updates one tensor at a time; offloading the states leaves 8 B, 10.4 GB.

# %% [markdown] id="wall"
# ## To pin to the wall
#
# * **Parameters** 4 B, **gradients** 4 B, **Adam** 8 B: 16 B per parameter in fp32, and 16 with mixed precision.
# * These states: GPT-3 2.8 TB, Llama-2-7B 107.8 GB = 100.4 GiB. An A100-80GB, with 85.2 GB = 79.35 GiB, holds those of 5.3 B.
# * A foreach Adam step peaks at 20 B per parameter, a fused one at 16, a for-loop at 16 and twice the largest tensor.
# * **Activations** are what operators keep: Linear its input, ReLU and softmax their output, additions nothing; each
#   storage once.
# * A transformer block keeps $s\,b\,h\,(34 + 5as/h)$ bytes in 16 bit; a fused attention kernel takes away the $5as/h$.
# * The peak is a **maximum over phases**, not a sum over consumers. Find the phase, then choose the lever.
# * Memory sets the least number of cards, arithmetic the number you need.

# %% id="wall-run"
opening = f"GPT-2, batch {batch} x 1024, fp32, eager attention: all live tensors, traced"
lab.headline("peak of the opening step", step.peak_bytes, "B", opening)
lab.headline("the weights' share of it", round(100 * weights / step.peak_bytes, 1), "%", "fp32 weights / that peak")
held = "weights, gradients, moments and temporaries at the peak of step(), measured"
lab.headline("AdamW step, foreach", step_peaks["foreach"], "B per parameter", held)
lab.headline("AdamW step, fused", step_peaks["fused"], "B per parameter", held)
lab.headline("GPT-3's block", gpt3_block, "B per element", "activations kept, 16 bit, eager, 2048 tokens")
states_7b = 16 * llama.parameter_count  # the summary's numbers
assert (format_gb(states_7b), format_bytes(states_7b)) == ("107.81 GB", "100.41 GiB")
assert (format_gb(a100.memory_bytes), f"{a100.memory_bytes / 16e9:.1f}") == ("85.20 GB", "5.3")
memlab.progress()

# %% [markdown] id="read-on"
# ### Where to read on
#
# * Rajbhandari et al., *ZeRO*, arXiv:1910.02054, section 3: where the memory goes, 16 bytes per parameter, and who
#   else could hold them.
# * Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, arXiv:2205.05198, section 4: the
#   formula of section 6, term by term.
# * Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   arXiv:2104.04473, section 5: what 1024 cards sustain.
# * PyTorch, *Autograd mechanics*, "Saved tensors", and `torch.optim.AdamW`, the parameters `foreach` and `fused`.
#
# Next: **3. Deep**, what depth does to the mountain, and how to pay for it with time instead of memory.
