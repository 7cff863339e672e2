# %% [markdown] id="title" claims="C0-15"
# # 3. Too deep: depth, vanishing gradients, checkpointing
#
# A layer costs almost nothing. A hundred layers in a row are another matter: each of them leaves something behind for
# the backward, and the backward may not reach the first of them with anything left.
#
# Depth is paid twice, in **bytes** and in **gradients**. This chapter measures both, and takes both apart: you'll count
# what a deep network keeps without running it, watch gradients vanish and find out what really cures them, write
# activation checkpointing yourself, choose its segments, and repair a snippet that saves nothing.
#
# "The article" in the tables below is a widely read Chinese-language article for engineers on this subject; this course
# tests its statements.
#
# You need no GPU. Questions in **bold** want a guess from you before you run the next cell: write it down, the distance
# to the result is what you learn.
#
# Plan four to five hours: the cells run in half a minute, the rest is six exercises (15 points, checked at once; the
# bare number under a check is for the grader) and one written answer (3 points, graded by a person). To hand in, save
# this notebook under its own name, `03_deep.ipynb`.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import math
import os
import warnings
from dataclasses import replace
from functools import partial

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would write its progress to stderr

import torch
from torch import nn

import memlab
from memlab import hardware, models, nets, plots, published, widgets
from memlab.chapter import table
from memlab.techniques import checkpointing, freezing, residual
from memlab.units import GB, format_bytes, format_count, format_gb

lab = memlab.begin("03_deep", device=device, size=size, seed=seed)

# %% [markdown] id="fails"
# ## A step that doesn't fit
#
# 64 layers, each `Linear(128, 128)` and a `ReLU`, a batch of 2,048 rows, plain SGD. The weights are 4 MiB. One
# activation, a tensor of batch x 128 floats, is 1 MiB. The budget is twice the weights and 20 activations: 28 MiB.
#
# **Does the step fit? If it doesn't: how many layers deep does it get?**

# %% id="fails-run"
DEPTH = 64
WIDTH, batch = lab.pick(smallest=(64, 1_024), normal=(128, 2_048))
unit = batch * WIDTH * 4  # bytes of one activation, fp32
weights = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
budget = 2 * weights + 20 * unit


def training_step(run, budget=None):
    """One step of the 64 layers; `run(layers, x)` is the forward. Returns its trace."""
    torch.manual_seed(lab.seed)
    with lab.card():
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
        model = nn.Sequential(*layers).to(lab.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(batch, WIDTH, device=lab.device)
        try:
            with memlab.Meter(model, optimizer, budget=budget) as meter:
                output = run(layers, x)
                output.sum().backward()
                optimizer.step()
        except torch.OutOfMemoryError as error:
            print(error)
    return meter.trace


def plain(layers, x):
    for layer in layers:
        x = layer(x)
    return x


print(f"weights {format_bytes(weights)}, one activation {format_bytes(unit)}, budget {format_bytes(budget)}\n")
failed = training_step(plain, budget)
kept = [block for block in failed.at_peak() if block.bytes == unit]
reached = max(int(block.module.partition(".")[0] or 0) for block in kept)
print(f"\nit reached layer {reached} of {DEPTH} (counted from 0), in {failed.peak_phase}")
assert failed.peak_phase == "forward"

# %% [markdown] id="fails-read" claims="C0-15"
# It dies in the forward, before half of the layers have run. Not one of the tensors is large. There are just too many of
# them, and each is alive for a reason: its layer's gradient needs it. (It gets a few layers further than the 20
# activations of the budget: the share that was meant for gradients is still unused in the forward.)
#
# Is 64 layers "deep"? There is no threshold. GPT-3 has 96 blocks, ResNet-152 has 152 layers, and what decides is bytes:
# how much one layer keeps, times the number of layers. **Two models with the same number of parameters, one four
# times as deep and half as wide: do they keep the same?**

# %% id="shape-run" claims="C0-15 C3-05"
def kept_by(config, micro_batch=4, tokens=128, **recipe):
    """What is alive when the forward of `config` has run, as blocks of a trace on the meta device (no memory)."""
    transformer = isinstance(config, models.TransformerConfig)
    steps = memlab.Recipe(precision="fp32", attention="eager" if transformer else "sdpa", **recipe)
    net = nets.build(config, steps, device="meta")
    if transformer:
        x = torch.empty(micro_batch, tokens, dtype=torch.int64, device="meta")
    else:
        x = torch.empty(micro_batch, 3, config.image, config.image, device="meta")
    with memlab.Meter(net, device="meta") as meter:
        output = net(x)
    alive = [meter.trace.block(i) for i in meter.trace.live_at(len(meter.trace))]
    assert output.device.type == "meta"
    return [block for block in alive if block.consumer == "activations"]


def bytes_of(blocks):
    return sum(block.bytes for block in blocks)


def gpt(layers, hidden, heads):
    """A GPT-2 of another shape, with a small vocabulary."""
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads, "ffn": 4 * hidden}
    return replace(models.model("gpt2"), name=f"gpt {layers} x {hidden}", vocab=1_000, **shape)


for layers, hidden in ((2, 512), (8, 256)):
    config = gpt(layers, hidden, hidden // 64)
    # What all depths have in common (embedding, logits) falls out of the difference of two depths.
    two = [bytes_of(kept_by(replace(config, layers=layers * factor))) for factor in (1, 2)]
    print(f"{layers} blocks of {hidden}: {format_count(12 * layers * hidden**2)} weights in blocks, {format_gb(two[1] - two[0])} kept")

# %% [markdown] id="depth"
# Twice as much: parameters go by $12Lh^2$, activations by $L\,h$. Depth is the expensive way to spend parameters.
#
# ## 3.1 What depth costs
#
# **Double the depth: what happens to the activations?** And how well does "one tensor of batch x length x width per
# layer" do?

# %% id="linear-run" claims="C3-05 C3-06"
depths = (6, 12, 24)
counted = [bytes_of(kept_by(gpt(layers, 256, 4), micro_batch=2)) for layers in depths]
one_tensor = 2 * 128 * 256 * 4
per_block = (counted[2] - counted[1]) / 12
for layers, nbytes in zip(depths, counted, strict=True):
    print(f"{layers:>2} blocks: {format_bytes(nbytes)}, {format_bytes(layers * one_tensor)} by one tensor a block")
print(f"\nslope: {format_bytes(round(per_block))} a block, {per_block / one_tensor:.1f} tensors")
assert counted[2] - counted[1] == 2 * (counted[1] - counted[0])  # linear to the byte

plots.curves(
    {
        "counted, eager attention": (depths, counted),
        "one tensor a block": (depths, [layers * one_tensor for layers in depths]),
    },
    f"Linear in depth, at {per_block / one_tensor:.0f} times one tensor a block",
    "transformer blocks (width 256, 2 x 128 tokens, fp32)", "kept for the backward", in_bytes=True,
)  # fmt: skip

# %% [markdown] id="linear-read" claims="C0-06 C3-01"
# Linear to the byte, and the slope isn't one tensor. A layer $\sigma(XW + b)$ keeps one. A transformer block is four to
# seven such matrix products, with attention and norms between them. **How many separate tensors does one block of BERT
# keep, with dropout? And ResNet-152, per layer?**

# %% id="storages-run" claims="C0-06 C3-01"
with lab.card():
    chain = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(8, 8), nn.ReLU()))).to(lab.device)
    with memlab.Meter(chain) as meter:
        output = chain(torch.randn(4, 8, device=lab.device))
chain_kept = sum(meter.trace.block(i).consumer == "activations" for i in meter.trace.live_at(len(meter.trace)))
print(f"100 x Linear + ReLU: {chain_kept} storages, the batch among them")

bert = models.model("bert-large")
found = [len(kept_by(replace(bert, layers=n), dropout=0.1)) for n in (2, 3)]
block = nets.build(replace(bert, layers=1), device="meta").blocks[0]
products = sum(isinstance(module, nn.Linear) for module in block.modules())
print(f"one BERT block: {found[1] - found[0]} storages for {products} linear layers")

resnet = models.model("resnet152")
in_resnet = kept_by(resnet, micro_batch=32)
print(f"ResNet-152: {len(in_resnet) - 1} storages for 152 layers, and the logits")

# %% [markdown] id="storages-read" claims="C3-03 C3-04"
# "100 layers, 100 tensors" is exact for a plain chain and for nothing else. So before a depth means anything, ask
# what was counted as a layer. Here are famous depths, and what is in each network:

# %% id="famous-run" claims="C3-03 C3-04"
famous = (
    ("LeNet-5", 1998, 7, "lenet5"), ("AlexNet", 2012, 8, "alexnet"), ("VGG-19", 2014, 19, "vgg19"),
    ("ResNet-152", 2015, 152, "resnet152"), ("DenseNet-264", 2016, 264, "densenet264"),
    ("BERT-large", 2018, 24, "bert-large"), ("GPT-3", 2020, 96, "gpt3-175b"),
)  # fmt: skip
rows = []
for label, year, named, name in famous:
    net = nets.build(models.model(name), device="meta")
    products = sum(isinstance(module, (nn.Linear, nn.Conv2d)) for module in net.modules())
    side = sum(isinstance(module, nets.Shortcut) for module in net.modules())
    rows.append((label, year, named, products - side, format_count(sum(p.numel() for p in net.parameters()))))
table(("", "year", "depth by name", "matrices and filters", "parameters"), *rows)
assert {row[0]: row[3] for row in rows}["ResNet-152"] == 152

# %% [markdown] id="famous-read"
# AlexNet, VGG and ResNet count layers with weights (the four projections on ResNet's shortcuts left out). The
# transformers count **blocks**, with four to six matrices in each: GPT-3's 96 are 384 matrices and an output layer.
# LeNet's 7 include two pooling layers that had a few trainable numbers then. DenseNet's paper says 264 where its own
# rule of counting, exact for its three smaller models, gives 265; the year is that of the preprint.
#
# A number of layers isn't a size, then. The bytes are, and counting them costs nothing: on the **meta device**
# tensors have shapes and no storage, and autograd saves them as always.

# %% id="meta-run"
images = torch.empty(32, 3, 224, 224, device="meta")
filtered = nn.Conv2d(3, 64, 7, stride=2, padding=3, device="meta")(images)
print(f"{tuple(filtered.shape)}, {format_bytes(filtered.nbytes)} if it existed; its graph: {filtered.grad_fn.name()}")
print(f"addresses: {filtered.data_ptr()} and {images.data_ptr()}; storages: ", end="")
print(f"{'the same' if filtered.untyped_storage()._cdata == images.untyped_storage()._cdata else 'two'} by ._cdata")

# %% [markdown] id="ex-3-1-text" claims="C3-07"
# ### Exercise 3.1 (2 points)
#
# A well-known estimate for ResNet-152: 152 layers, 32 images, 1 MB a layer and image, 4.9 GB. Count instead.
#
# `count` gets a model and its input, on the meta device, and returns the number of parameters and the bytes that autograd
# saves. As in exercise 2.3: `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`, each storage once and whole (a
# saved slice keeps all of it), weights and buffers left out. The pack hook returns `t.detach()`: with `t` itself an
# operator that saves its own result would hold itself alive. What worked there, telling storages apart by
# `data_ptr()`, can't work here: you saw why.

# %% id="ex-3-1" exercise="3.1"
import torch


def count(model, images):
    """(parameters, saved bytes) of model(images), both ints; model and images may be on the meta device.

    Saved: the unique storages that autograd keeps, without those of parameters and buffers.
    """
    # exercise 3.1
    ### BEGIN SOLUTION
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    found = {}

    def remember(t):
        storage = t.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda t: t):
        output = model(images)  # alive until the count is done: no address is used twice
    del output
    return sum(p.numel() for p in model.parameters()), sum(found.values())
    ### END SOLUTION

# %% id="check-3-1" check="3.1"
memlab.check("3.1", count)

# %% id="resnet-run" claims="C3-07 C3-08"
stages = {}
for block in in_resnet:
    stage = ".".join(block.module.split(".")[:2]) if block.module.startswith("stages") else block.module.split(".")[0] or "batch"
    stage = {"ResNet": "mean over pixels", "fc": "logits"}.get(stage, stage)
    stages[stage] = stages.get(stage, 0) + block.bytes
table(("part of ResNet-152, 32 images", "kept"), *((k, f"{v / 1e6:,.1f} MB") for k, v in stages.items()))
whole = sum(stages.values()) - stages["logits"]  # they are alive, but nobody saves them
print(f"\n{format_gb(whole)}: {whole / 32 / 1e6:.0f} MB an image, {whole / 32 / 152 / 1e6:.2f} MB a layer; 152 x 32 x 1 MB = {format_gb(152 * 32 * 10**6)}")

for what, size_of in {"weights": 4, "gradients": 4, "Adam's moments": 8}.items():
    print(f"{what:16} {format_gb(size_of * resnet.parameter_count)}")
step = memlab.compute("resnet152", memlab.Recipe(precision="fp32", micro_batch=32))
print(f"peak of an AdamW step by the closed form: {format_gb(step.peak_bytes)}, in {step.peak_phase}")
assert format_gb(whole) == "5.68 GB"

# %% [markdown] id="resnet-read"
# The estimate was a lucky one: 1.17 MB a layer, and states that really are 0.24, 0.24 and 0.48 GB. Two things to
# note. The early stages have the pixels, the third has the layers: both cost. And states and activations are never
# all alive at once, so the peak isn't their sum (chapter 2).

# %% id="depth-verdicts" claims="C0-06 C0-15 C3-01 C3-03 C3-04 C3-05 C3-06 C3-07 C3-08"
published.verdicts("C0-15", "C0-06", "C3-01", "C3-03", "C3-04", "C3-05", "C3-06", "C3-07", "C3-08")

# %% [markdown] id="down" claims="C3-09 C3-10"
# ## 3.2 The way down: gradients
#
# Memory aside, can the first of many layers learn at all? Its gradient is a product with one factor per layer. With
# $h_{i} = F_i(h_{i-1})$ and the Jacobians $J_i = \partial F_i/\partial h_{i-1}$,
#
# $$\frac{\partial L}{\partial h_0} = J_1^T J_2^T \cdots J_n^T \, \frac{\partial L}{\partial h_n}.$$
#
# People say: it vanishes if the factors are less than 1, it explodes if they are more. But the factors are matrices.
# **Can a product of matrices of norm 5 each vanish?**

# %% id="norm-run" claims="C3-10"
A = torch.tensor([[0.1, 5.0], [0.0, 0.1]], dtype=torch.float64)  # stretches one direction fiftyfold, and shrinks it next time
g = torch.ones(2, dtype=torch.float64)
for n in (1, 2, 10, 50):
    print(f"{n:>2} factors of norm {torch.linalg.matrix_norm(A, 2):.1f}: |gradient| = {(torch.linalg.matrix_power(A.T, n) @ g).norm():.1e}")

# %% [markdown] id="norm-read" claims="C3-11 C3-12"
# It can. A largest singular value below 1 in **every** factor is enough to vanish; one above 1 is no proof that it
# explodes. What matters is what the factors do one after the other, and that is set by initialisation, activation and
# norms.
#
# A **residual block** adds its input: $y = x + F(x)$, which needs equal shapes, or a projection: $y = Px + F(x)$. The
# story goes that the gradient is then $\partial L/\partial y + \partial L/\partial F$. **What is $\partial L/\partial
# F$ for $y = x + F$? What would that sum be?**
#
# ### Exercise 3.2 (1 point)
#
# Write the gradient with respect to the block's input. `J` is $\partial F/\partial x$, with one row per output.

# %% id="ex-3-2" exercise="3.2"
def residual_vjp(J, g, P=None):
    """dL/dx of y = x + F(x), or of y = P x + F(x) where the shapes differ.

    J: dF/dx, shape (outputs, inputs). g: dL/dy, shape (outputs,). P: (outputs, inputs), or None for the identity.
    """
    # exercise 3.2
    ### BEGIN SOLUTION
    skip = g if P is None else P.T @ g
    return skip + J.T @ g
    ### END SOLUTION

# %% id="check-3-2" check="3.2"
memlab.check("3.2", residual_vjp)

# %% id="vjp-run" claims="C3-12"
torch.manual_seed(lab.seed)
W, x = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
g = torch.randn(5, dtype=torch.float64)


def branch(x):
    return torch.tanh(W @ x)


truth = torch.autograd.functional.vjp(lambda x: x + branch(x), x, g)[1]
print(f"autograd                {[round(v, 3) for v in truth.tolist()]}")
print(f"g + dL/dF = 2 g: off by {(2 * g - truth).norm():.3g}")
print(f"(I + J^T) g:     off by {(residual.residual_gradient(branch, x, g) - truth).norm():.1g}")
published.verdicts("C3-10", "C3-11", "C3-12")

# %% [markdown] id="vanish" claims="C3-09 C3-13 C0-07"
# The sum would be $2g$ whatever the block computes: it can't be right. With $(I + J^T)g$ the gradient has one path
# that no layer touches, and a second through the layer. That is what keeps it alive.
#
# But is the skip **the** cure? To find out, change one thing at a time.
#
# ### Exercise 3.3 (2 points)
#
# Build the experiment: `depth` tanh layers of width 64, and the norm of the gradient that arrives at the input.

# %% id="ex-3-3" exercise="3.3"
import torch
from torch import nn


def input_grad_norm(depth, skip, norm, init, width=64, batch=64):
    """The norm of dL/dx at the input of `depth` layers, L = sum of the last layer's output. A float.

    A layer: x -> tanh(norm(Linear(x))); with `skip`: x -> x + tanh(norm(Linear(x))).
    norm: None or "layer" (nn.LayerNorm). init: "default" (nn.Linear's own) or "xavier"
    (nn.init.xavier_normal_ for the weight, zeros for the bias).
    """
    x0 = x = torch.randn(batch, width, requires_grad=True)
    for _ in range(depth):
        linear = nn.Linear(width, width)
        # exercise 3.3: initialise, normalise, activate, skip; `x` is the layer's output
        ### BEGIN SOLUTION
        if init == "xavier":
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
        y = linear(x)
        if norm == "layer":
            y = nn.LayerNorm(width)(y)
        y = torch.tanh(y)
        x = x + y if skip else y
        ### END SOLUTION
    # exercise 3.3: the norm of the gradient at x0
    ### BEGIN SOLUTION
    (gradient,) = torch.autograd.grad(x.sum(), x0)
    return gradient.norm().item()
    ### END SOLUTION

# %% id="check-3-3" check="3.3"
memlab.check("3.3", input_grad_norm)

# %% [markdown] id="norms-text"
# **Fifty layers, and a gradient of norm 64 at the output. Guess the norm at the input: nothing special; Xavier
# initialisation; LayerNorm; BatchNorm; a skip.**

# %% id="norms-run" claims="C0-07 C3-09 C3-13"
setups = {
    "nothing special": {},
    "Xavier": {"init": "xavier"},
    "LayerNorm": {"norm": "layer"},
    "BatchNorm": {"norm": "batch"},
    "skip": {"skip": True},
    "skip and Xavier": {"skip": True, "init": "xavier"},
    "weights twice as large as Xavier's": {"init": "large"},
}
where = lab.device_for("norms of gradients")
norms = {name: residual.gradient_norms(50, seed=lab.seed, device=where, **setup) for name, setup in setups.items()}
for name, values in norms.items():
    print(f"{name:36}{values[0]:>10.1e} at the input, {values[-1]:.0f} at the output")
assert norms["nothing special"][0] < 1e-9
assert all(1 < norms[name][0] < 1e4 for name in ("Xavier", "LayerNorm", "BatchNorm", "skip", "skip and Xavier"))

# %% id="norms-figure" claims="C0-07 C3-09"
drawn = ("nothing special", "Xavier", "LayerNorm", "skip", "weights twice as large as Xavier's")
plots.curves(
    {name: (range(51), norms[name]) for name in drawn},
    "Default weights, no norm, no skip: the gradient vanishes",
    "layer (0 is the input)", "norm of dL/dh (log scale)", log_y=True,
)  # fmt: skip

# %% [markdown] id="norms-read" claims="C3-02 C3-13"
# The skip brings back thirteen powers of ten. So do a better initialisation and either norm, **without** a skip. The
# gradient vanishes only with PyTorch's default weights (variance $1/(3h)$, a factor of $1/\sqrt 3$ per layer) and
# neither norm nor skip: the skip is one cure of several. He et al. say so in the ResNet paper: their plain networks had batch norm and healthy gradients. Their
# problem was another one, **degradation**: a deeper plain network reaches a *higher training* loss. See whether you
# get that, too:

# %% id="degrade-run" claims="C3-02 C3-13"
def training_loss(depth, skip, scale, steps, where):
    """Loss of a ReLU network on 256 points after `steps` Adam steps; weights: He et al.'s init times `scale`."""
    torch.manual_seed(lab.seed)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layer.weight.data *= scale
        nn.init.zeros_(layer.bias)
    net = nn.ModuleList([*layers, nn.Linear(32, 1)]).to(where)
    x = torch.randn(256, 32).to(where)
    target = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        h = x
        for layer in layers:
            h = h + torch.relu(layer(h)) if skip else torch.relu(layer(h))
        loss = (net[-1](h) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


steps = lab.pick(smallest=3, normal=100)
where = lab.device_for("losses")
rows = []
for depth, skip, scale in ((8, False, 1.0), (40, False, 1.0), (40, False, 0.1), (40, True, 0.1)):
    loss = training_loss(depth, skip, scale, steps, where)
    rows.append((f"{depth} layers, {'skips' if skip else 'plain'}, weights x {scale:g}", f"{loss:.1e}"))
table(("", f"training loss after {steps} steps"), *rows)

# %% [markdown] id="degrade-read"
# The plain network of 40 layers *contains* the one of 8 (the other 32 would only have to pass their input on) and
# trains far worse, at an init made for ReLU. With skips and weights a tenth as large, a layer starts by doing almost
# nothing. The last two rows have those same small weights: the plain network is ruined by them and learns nothing, the
# one with skips reaches the lowest loss of all. So: skips make deep networks **easy to
# optimise**; the vanishing is cured by several things. In the first ResNet a ReLU after the sum is still in the way,
# later ones keep the path clear.
#
# **And in memory, what does a skip cost?** tanh and ReLU keep their output, which is the next layer's input: one
# tensor. With a skip, output and next input are two:

# %% id="skip-units" claims="C3-11 C3-13"
for skip in (False, True):
    with lab.card():
        stack = residual.Stack(50, 64, skip=skip).to(lab.device)
        x = torch.randn(64, 64, device=lab.device, requires_grad=True)
        kept = freezing.saved_bytes(partial(stack, x), stack) / x.nbytes
    named = "an input and a tanh for each layer, 2 x 50" if skip else "50 outputs and the batch"
    print(f"50 tanh layers, {'skips' if skip else 'plain'}: {kept:.0f} activations kept, {residual.skip_units(50, skip)} by the closed form: {named}")
published.verdicts("C0-07", "C3-02", "C3-09", "C3-13")

# %% [markdown] id="forget" claims="C3-14"
# ## 3.3 Forget and recompute
#
# Back to the bytes. A saved activation is a *cached result*: it can be computed again from the layer's input.
# **Activation checkpointing** keeps the input of a segment of layers, forgets everything inside, and when the
# backward arrives, runs the segment a second time, with a graph, just before it is needed.
#
# ```
# forward     x ──[ segment 1 ]── a ──[ segment 2 ]── b ──[ segment 3 ]── y       kept: x, a, b
# backward                                         b ──[ again ]── y  → gradients, then forget
#                              a ──[ again ]── b                       → gradients, then forget
#           x ──[ again ]── a                                          → gradients, then forget
# ```
#
# Look at which input each one starts from: segment 2 from `a`, the **output of segment 1**. A picture in which a
# segment is recomputed from its own output is off by one: from there, there is nothing left to compute.
#
# ### How to write it
#
# `torch.autograd.Function` lets you say what the forward keeps and what the backward does. A small one, with its rules:

# %% id="function-example"
class Scale(torch.autograd.Function):
    """factor * x^2 + shift. Each rule of a Function in one place."""

    @staticmethod
    def forward(ctx, factor, x, shift):
        ctx.factor = factor  # what isn't a tensor goes on ctx
        ctx.save_for_backward(x)  # tensors go here: freed with the graph, checked for in-place changes
        return factor * x**2 + shift  # a Function's forward builds no graph by itself

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert not torch.is_grad_enabled()  # nor does its backward, unless you say torch.enable_grad()
        return None, 2 * ctx.factor * x * gradient, gradient  # one for each input of forward, None where there is none


x, shift = torch.ones(3), torch.ones(3, requires_grad=True)
y = Scale.apply(2.0, x, shift)
y.sum().backward()
print(f"y requires grad because a tensor given to apply does: {y.requires_grad}; x.grad {x.grad}, shift.grad {shift.grad}")

# %% [markdown] id="ex-3-4-text" claims="C3-14"
# ### Exercise 3.4 (4 points, by measured bytes)
#
# Write `Checkpoint`. Five things decide whether it is right, and the check measures each of them:
#
# * When the forward has run, **only the segments' inputs** are alive (and the output). No graph of the inside.
# * The module runs exactly **twice**: in the forward, and in the backward, with gradients enabled, on a detached `x` that
#   requires a gradient if the real one does (on `x` itself, hooks that somebody has set on it would run a second time).
#   `torch.autograd.grad(y, tensors, gradient)` then gives the gradients.
# * The **weights** get gradients, even where `x` needs none, as a batch does. A Function only knows the tensors that it was
#   given: that is why `my_checkpoint` hands the parameters over. Return one gradient for each, in the same order.
# * With **dropout** the second forward draws the same numbers: `torch.get_rng_state()`, `torch.set_rng_state(state)`. (On a GPU its
#   generator has a state of its own. The check runs on the CPU.)
# * After the backward the random generator stands where a plain step would have left it: `torch.random.fork_rng(devices=[])` is
#   a context that puts it back.
#
# PyTorch's checkpoint and the one in `memlab.techniques` are for later: the check wants your Function.

# %% id="ex-3-4" exercise="3.4"
import torch


class Checkpoint(torch.autograd.Function):
    """module(x), of which the forward keeps x alone."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        # exercise 3.4: save what the second forward needs, and return module(x) without a graph
        ### BEGIN SOLUTION
        ctx.module = module
        ctx.rng_state = torch.get_rng_state()
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        # exercise 3.4: the second forward, with a graph; then one gradient for each input of `forward`
        ### BEGIN SOLUTION
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.rng_state)
            y = ctx.module(x)
        wanted = [t for t in (x, *parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, gradient))
        return None, *(next(found) if t.requires_grad else None for t in (x, *parameters))
        ### END SOLUTION


def my_checkpoint(module, x):
    """The output of module(x), checkpointed."""
    return Checkpoint.apply(module, x, *module.parameters())

# %% id="check-3-4" check="3.4"
memlab.check("3.4", my_checkpoint)

# %% [markdown] id="over-time-text"
# Now the same on the opening step. `memlab.techniques.checkpointing` has `run(layers, x, every=k)`, which wraps each
# `k` layers into one `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`. **Segments of 8: sketch live
# bytes over the step before you look.**

# %% id="over-time-run" claims="C3-14"
def in_segments(every):
    return lambda layers, x: checkpointing.run(layers, x, every=every)


without, with_8 = training_step(plain), training_step(in_segments(8))
lines, peaks = {}, []
for label, trace in (("plain", without), ("8 segments of 8", with_8)):
    line = trace.timeline(600)
    shown = [(event - trace.before, held) for event, held in zip(line.events, line.total, strict=True) if event >= trace.before]
    lines[label] = tuple(zip(*shown, strict=True))  # without the weights and the batch, which were there before
    peaks.append((trace.peak_event - trace.before, trace.peak_bytes, format_bytes(trace.peak_bytes)))
plots.curves(
    lines, f"Eight hills for one mountain: {format_bytes(without.peak_bytes)} become {format_bytes(with_8.peak_bytes)}",
    "allocations and frees of the step, in order", "live tensors", in_bytes=True, steps=True, budget=budget,
    notes=peaks,
)  # fmt: skip

# %% [markdown] id="over-time-read"
# The plain step is one mountain. With checkpointing the forward rises by one input per segment, and the backward has
# eight small hills, each a segment recomputed, used and forgotten. The step is longer, and it is under the budget.
#
# ### The price
#
# Count operators, not seconds: that is exact, and the same on every machine.

# %% id="price-run" claims="C3-14 C3-16"
def products_of(*order):
    """Matrix products in the forward and in the recomputation of 64 such layers, in segments of 8."""
    layers = [nn.Sequential(*(make() for make in order)) for _ in range(DEPTH)]
    with checkpointing.Operators() as operators:
        checkpointing.run(layers, torch.randn(8, 16, requires_grad=True), every=8).sum().backward()
    return operators.forward["addmm"], operators.recomputed["addmm"]


def linear():
    return nn.Linear(16, 16)


for label, order in (("Linear, ReLU", (linear, nn.ReLU)), ("ReLU, Linear", (nn.ReLU, linear))):
    once, again = products_of(*order)
    more = again / (3 * once)  # a backward is two matrix products for the forward's one
    print(f"layers of {label}: {once} products in the forward, {again} recomputed: {more:.0%} more arithmetic")
    assert (once, again) == (DEPTH, {"Linear, ReLU": 64, "ReLU, Linear": 56}[label])
most = DEPTH / (3 * DEPTH)

# %% [markdown] id="price-read" claims="C3-15"
# At most one more forward, a third of forward + backward: the "30% more time" that people quote comes from here. It
# may be a little less, because PyTorch stops a recomputation as soon as it has the last tensor that the backward
# needs. Where a segment ends in a Linear, its product isn't one of them, and 64 + 56 = 120 forwards are enough.
#
# Where does each recomputation start? Ask the layers:

# %% id="starts-run" claims="C3-15"
order = []
layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6)]
for i, layer in enumerate(layers, start=1):
    layer.register_forward_pre_hook(lambda *_, i=i: order.append(i))
output = checkpointing.run(layers, torch.randn(2, 4), every=2)
first = len(order)
output.sum().backward()
print(f"forward: layers {order[:first]}\nbackward: layers {order[first:]}")
assert order[first:] == [5, 6, 3, 4, 1, 2]

# %% [markdown] id="equal-text"
# Layers 3 and 4 start from the output of 2, layers 1 and 2 from the batch.
#
# ### What stays equal
#
# **Is training with checkpointing the same, bit by bit? With dropout? With BatchNorm?**

# %% id="equal-run" claims="C3-14"
where = lab.device_for("gradients")


def gradients(module, wrap):
    """Gradients of all weights, from the same start."""
    torch.manual_seed(lab.seed)
    x = torch.randn(64, 32, device=where)
    module.zero_grad()
    wrap(module, x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def forgetful(module, x):
    return checkpointing.recompute(module, x, preserve_rng=False)


dropping = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 32)).to(where)
true = gradients(dropping, lambda module, x: module(x))
for label, wrap in (("by PyTorch", checkpointing.by_torch), ("random state not restored", forgetful)):
    print(f"dropout, {label}: largest difference {(gradients(dropping, wrap) - true).abs().max():.3g} of {true.abs().max():.3g}")

norm = nn.BatchNorm1d(32).to(where)
for label, wrap in (("plain", lambda module, x: module(x)), ("checkpointed", checkpointing.by_torch)):
    norm.reset_running_stats()
    gradients(norm, wrap)
    print(f"BatchNorm, {label}: batches counted: {norm.num_batches_tracked}, mean of running_mean {norm.running_mean.mean():.4f}")

# %% [markdown] id="equal-read"
# Gradients are equal to the bit, dropout included, if the random state is restored. What a forward *changes* is
# changed twice: BatchNorm's running statistics move two steps instead of one. (For one batch the gradients don't
# notice, evaluation does.)
#
# ## 3.4 How long a segment?
#
# **For our 64 layers: which segment length gives the lowest peak, and what do segments of 1 and of 64 save?**

# %% id="u-run" claims="C3-16"
def live_units(trace):
    """The most that activations and temporaries together take at any moment, in units of one activation."""
    held = trace.timeline().consumers
    return max(a + b for a, b in zip(held["activations"], held["temporaries"], strict=True)) / unit


lengths = (1, 2, 4, 8, 16, 32, 64)
measured = {every: live_units(with_8 if every == 8 else training_step(in_segments(every))) for every in lengths}
plain_units = live_units(without)
rule = [math.ceil(DEPTH / k) + k for k in lengths]
table(("layers a segment", "measured, units", "64/k + k", "left to explain"),
      *((k, f"{measured[k]:.2f}", r, f"{measured[k] - r:.2f}") for k, r in zip(lengths, rule, strict=True)))
print(f"plain: {plain_units:.2f}")
assert all(abs(measured[k] - r - 2) < 0.05 for k, r in zip(lengths, rule, strict=True)) and abs(plain_units - measured[64]) < 0.05

# %% id="u-figure" claims="C3-16"
best = measured[8]
plots.curves(
    {"measured": (lengths, list(measured.values())), "64/k + k": (lengths, rule), "plain": ([1, 64], [plain_units] * 2)},
    f"Segments of 8: {plain_units:.0f} units become {best:.0f}; 1 and 64 save nothing",
    "k, layers in a segment (log scale)", "units at most", log_x=2,
    notes=[(8, best, f"{best:.0f}")],
)  # fmt: skip

# %% [markdown] id="u-read" claims="C3-16"
# A U. With segments of $k$ of the $N$ layers the forward keeps $N/k$ inputs, and the backward holds what **one**
# segment saves:
#
# $$\text{peak} \approx \frac{N}{k}\cdot\text{boundary} + k\cdot\text{inside}$$
#
# *boundary* is what enters a layer, *inside* what a layer saves. What is left to explain has names, two in every row:
# the output, which a variable of the training loop still holds, and the gradient on its way down. For Linear + ReLU
# both are one unit and the best is $k = \sqrt N$: $2\sqrt N$ instead of $N$. Both ends of the U are useless, for
# opposite reasons: with $k = 1$ the inputs *are* the activations, with $k = N$ one segment is recomputed **with
# everything saved**.
#
# That is the whole secret of $O(\sqrt N)$: it is a choice of segments, not a property of checkpointing.
#
# Three things to think about before the exercise:
#
# * **A transformer block saves 16 to 20 tensors of the boundary's size. What is the best $k$ then?**
# * **The backward begins at the last segment. Is there anything to gain from checkpointing that one?**
# * **What if you can afford to recompute only a part of the layers?**
#
# ### Exercise 3.5 (3 points, by measured bytes)
#
# `best_segments` returns the lengths of the checkpointed segments, from the first block on; what comes after them runs plain.
# The check runs your segments on chains of its own, with PyTorch's checkpoint, and your measured peak may be at most 1.1
# times the lowest of equal segments. Mind what is alive at the worst moment: all inputs of segments, and whatever is *larger*, one segment's
# inside or the plain tail's.

# %% id="ex-3-5" exercise="3.5"
def best_segments(blocks, boundary, inside, extra):
    """Lengths of the checkpointed segments, from the first block on, with a peak as low as possible. A list of ints.

    blocks: how many equal blocks; those after the last segment run plain.
    boundary: bytes of what enters a block. inside: bytes that a block saves for its backward.
    extra: how many blocks at most may lie in segments, and so run forward twice.
    """
    # exercise 3.5
    ### BEGIN SOLUTION
    plans = []
    for length in range(1, blocks + 1):
        for tail in range(max(blocks - extra, 0), blocks + 1):
            full, rest = divmod(blocks - tail, length)
            plans.append([length] * full + [rest] * (rest > 0))

    def peak(plan):
        tail = blocks - sum(plan)
        return len(plan) * boundary + max([tail, *plan]) * inside

    return min(plans, key=peak)
    ### END SOLUTION

# %% id="check-3-5" check="3.5"
memlab.check("3.5", best_segments)

# %% [markdown] id="falling-text"
# Can one do better than equal segments? **When the backward reaches an early segment, what has become of the later
# inputs?** They are gone. So an early segment may be longer: let the lengths fall by one from each to the next.

# %% id="falling-run" claims="C3-16"
def in_lengths(lengths):
    def run(layers, x):
        start = 0
        for length in lengths:
            x = checkpointing.by_torch(checkpointing.Segment(layers[start : start + length]), x)
            start += length
        return plain(layers[start:], x)

    return run


for label, segments in (
    ("8 x 8", [8] * 8),
    ("7 x 8, the last 8 plain", [8] * 7),
    ("11, 10, 9, ... 4, the last 4 plain", list(range(11, 3, -1))),
):
    trace = training_step(in_lengths(segments))
    print(f"{label:36} {live_units(trace):5.1f} units, {sum(segments)} layers in segments")

# %% [markdown] id="blocks-text" claims="C3-16 C3-22"
# The last segment is free to be plain: the same peak for less arithmetic. And falling lengths hold less than equal
# ones, for many layers about $\sqrt{2N}$ inputs and insides instead of $2\sqrt N$.
#
# Now a block that saves much. **12 transformer blocks: what is the best segment?**

# %% id="blocks-define"
class Block(nn.Module):
    """A pre-norm transformer block with eager attention. x: (batch, tokens, width)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.mT / math.sqrt(h // self.heads), dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(b, s, h))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def block_step(run):
    """The most that activations and temporaries take in a forward and backward of 12 blocks, bytes."""
    torch.manual_seed(lab.seed)
    with lab.card():
        blocks = nn.ModuleList(Block(128, 4) for _ in range(12)).to(lab.device)
        x = torch.randn(lab.pick(smallest=2, normal=8), 64, 128, device=lab.device)
        with memlab.Meter(blocks) as meter:
            output = run(list(blocks), x)  # held, as a training loop does
            output.sum().backward()
    held = meter.trace.timeline().consumers
    return max(a + b for a, b in zip(held["activations"], held["temporaries"], strict=True))


# %% id="blocks-run" claims="C3-16 C3-22"
plain_blocks = block_step(plain)
by_length = {k: block_step(in_segments(k)) for k in (1, 2, 3, 4, 6, 12)}
print(f"plain                    {format_bytes(plain_blocks):>10}")
for k, nbytes in by_length.items():
    print(f"{k:>2} block{'s' if k > 1 else ' '} a segment     {format_bytes(nbytes):>10}  {nbytes / plain_blocks:.0%}")
assert by_length[1] == min(by_length.values()) < 0.25 * plain_blocks and by_length[12] > 0.95 * plain_blocks

# %% [markdown] id="blocks-read" claims="C3-22"
# One block a segment. It stays $O(N)$, strictly speaking, with one small tensor per block instead of twenty: for a
# transformer the constant is what you want, and this is what "activation checkpointing" means in every training
# library. $\sqrt{N\cdot\text{boundary}/\text{inside}}$ is below 1 here.
#
# ## 3.5 A snippet that saves nothing
#
# The last row is a warning. It is what this line does, which you find in many a tutorial:
#
# ```python
# output = checkpoint(model, x)
# ```
#
# The memory at the end of the forward is small indeed: one input. **At the peak, 12 blocks a segment is the plain
# step.** And as it stands, the line does worse than save nothing:

# %% id="snippet-run" claims="C3-21"
from torch.utils.checkpoint import checkpoint as torch_checkpoint

tiny = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    output = torch_checkpoint(tiny, torch.randn(4, 8))  # as it stands in tutorials
for warning in caught:
    print("warning:", str(warning.message).partition(". ")[0])
try:
    output.sum().backward()
except RuntimeError as error:
    print("error:", str(error))
assert caught and not output.requires_grad

# %% [markdown] id="snippet-read" claims="C3-21"
# The default is still the old, *reentrant* form. It is a `Function` like yours, but it hands over its arguments only,
# and not the weights. A batch needs no gradient, so the output needs none, so there is nothing to go backward
# through. Had the input needed one, no error would have come: that is how this line survives in tutorials. The form
# to use is `use_reentrant=False`, which finds the weights by itself.
#
# ## 3.6 Freezing: which layers?
#
# Another way to save is not to train everything: start shallow, freeze, add layers, thaw. **In a chain of five Linear
# + ReLU you train the first two layers and freeze the other three. How many activations are saved? And if you train
# the last two?** Think about what a gradient must pass to reach a layer:
#
# * A Linear keeps its input if its weight trains. A frozen Linear keeps nothing: for $W^T g$ it needs no activation.
# * A ReLU keeps its output if a gradient passes it.
# * The gradient passes everything from the loss down to the **lowest layer that trains**.
#
# Count tensors, not layers: a ReLU's output and the next layer's input are the same one.
#
# ### Exercise 3.6 (3 points)
#
# Repair the snippet (`run_repaired`, by measured bytes: a peak below 25% of the plain one for transformer blocks, no
# warning, equal gradients, a batch that needs no gradient and stays as it is), and write the count for frozen chains. Here you may use
# PyTorch's `checkpoint`.

# %% id="ex-3-6" exercise="3.6"
import torch
from torch.utils.checkpoint import checkpoint


def run_repaired(blocks, x):
    """x through all blocks, as `checkpoint(nn.Sequential(*blocks), x)` was meant to: less than 25% of the peak."""
    # exercise 3.6
    ### BEGIN SOLUTION
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x
    ### END SOLUTION


def saved_units(layers, trained):
    """Activations saved by a chain of `layers` x (Linear + ReLU) of which only the layers in `trained` train. An int.

    Layers are numbered from 0, `trained` is a list of numbers; a unit is one (batch, width) tensor.
    `trained` may be empty: then nothing is saved.
    """
    # exercise 3.6
    ### BEGIN SOLUTION
    return layers - min(trained) + 1 if trained else 0
    ### END SOLUTION

# %% id="check-3-6" check="3.6"
memlab.check("3.6", run_repaired, saved_units)

# %% id="frozen-run" claims="C3-17 C3-18 C3-19 C3-20"
def measured_units(make, trained, *shape):
    """Activations saved by five layers of which only `trained` train, in units of their input of that shape."""
    with lab.card():
        layers = nn.Sequential(*(make() for _ in range(5))).to(lab.device)
        x = torch.randn(shape, device=lab.device)
        for i, layer in enumerate(layers):
            layer.requires_grad_(i in trained)
        return freezing.saved_bytes(lambda: layers(x), layers) / x.nbytes


tokens, width, heads = 160, 64, 2  # scores of heads x tokens / width = 5 units a block
rows = []
for label, trained in (("all", range(5)), ("{0, 1}", {0, 1}), ("{1, 2}", {1, 2}), ("{3, 4}", {3, 4})):
    chain_units = measured_units(lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()), trained, 32, width)
    block_units = measured_units(lambda: Block(width, heads), trained, 2, tokens, width)
    closed = freezing.block_units(5, trained, scores=heads * tokens / width)
    states = freezing.state_bytes(5, len(set(trained)))
    rows.append((label, f"{chain_units:.0f}", f"{block_units:.1f}", f"{closed:.0f}", f"{sum(states.values()) / 5:.1f}"))
    assert chain_units == freezing.chain_units(5, trained) and abs(block_units / closed - 1) < 0.02
table(("trained", "Linear + ReLU, units", "blocks, units", "by the closed form", "states, B/param"), *rows)

# %% [markdown] id="frozen-read" claims="C3-17 C3-18 C3-19 C3-20"
# Freezing the deep layers and training the shallow ones saves **no** activation of a chain, and a fifth of a
# transformer's: a frozen block on the way still keeps what its norms, its attention and its GELU need. Freeze the
# **bottom**, and the activations below are gone. What freezing always saves are gradients and Adam's moments, 12 of
# 16 bytes per frozen parameter.
#
# "Progressive training" in the literature stacks *new top layers* on trained ones. It saves time in the early stages.
# Its last stage trains everything, with the memory of the full model: it never was a cure for running out of it. A
# picture of such stages in circulation has another flaw, to be found by counting: its second stage trains two of five
# layers, just as its first.

# %% id="deep-verdicts" claims="C3-14 C3-15 C3-16 C3-17 C3-18 C3-19 C3-20 C3-21 C3-22"
published.verdicts("C3-14", "C3-15", "C3-16", "C3-21", "C3-22", "C3-17", "C3-18", "C3-19", "C3-20")

# %% [markdown] id="size-text"
# ## 3.7 At size
#
# **Llama-2-7B, everything in bf16 with fused AdamW, 4 sequences of 4,096 tokens, on an A100 with 80 GB. Does it fit,
# and with which checkpointing?** Selective recomputation is a third way: keep the outputs of the matrix products,
# dear to compute, and recompute what is cheap between them.

# %% id="size-run" claims="C3-16"
a100 = hardware.gpu("A100-80GB")
llama = models.model("llama2-7b")
base = memlab.Recipe(precision="bf16", optimizer_impl="fused", micro_batch=4)
ways = {"none": "no checkpointing", "selective": "selective", "full": "every block", "every-6": "6 blocks a segment", "every-32": "the whole model"}
found = {label: memlab.compute(llama, base.replace(checkpointing=way), a100) for way, label in ways.items()}
plots.consumers(found, capacity=a100.memory_bytes, title="Llama-2-7B, 4 x 4,096 tokens: every block a segment is best")

# %% [markdown] id="size-trace"
# It fits with every block a segment of its own, and with 6 blocks a segment, which holds more. It doesn't fit without
# checkpointing, nor with the whole model as one segment, nor with the selective way: that brings the activations from
# 94.56 GiB to 53.00 GiB, and with weights, moments and temporaries the peak is 94.56 GiB again (by chance the same
# number), above the card's 79.35 GiB.
#
# Closed forms are claims. The trace of the real step on a virtual card is the check, here for two and four of the 32
# blocks.

# %% id="size-trace-run"
small = lab.pick(smallest=(1, 2), normal=(2, 4))
for way in ("none", "full"):
    recipe = base.replace(checkpointing=way, micro_batch=1)
    traces = [memlab.trace_step(replace(llama, layers=n), recipe, gpu=a100) for n in small]
    formulas = [memlab.compute(replace(llama, layers=n), recipe, a100) for n in small]
    by_hand, traced = (two[1].peak_bytes - two[0].peak_bytes for two in (formulas, traces))
    gap = traces[1].peak_bytes - formulas[1].peak_bytes
    workspace = sum(block.bytes for block in traces[1].at_peak() if "workspace" in block.operator)
    print(f"{ways[way]:17} {small[1]} blocks: formula {format_bytes(formulas[1].peak_bytes)}, trace {format_bytes(traces[1].peak_bytes)}; "
          f"gap {gap:,} B, {workspace:,} B of it cuBLAS's workspaces, residual {gap - workspace:,} B")
    print(f"{'':17} {small[1] - small[0]} blocks more: formula {by_hand:,} B, trace {traced:,} B")
    assert abs(gap - workspace) < 1024

# %% [markdown] id="explorer"
# Which segment is best for *your* model? Two questions to take along: for which model is one block a segment *not*
# the best? And when does the length of a segment stop mattering, because the peak is in another phase? *Trace it* checks
# the formula against the step that you chose.

# %% id="explorer-run"
widgets.checkpoint_segments("llama2-7b", "A100-80GB")

# %% [markdown] id="published-text"
# ### Real cards
#
# Published figures, none of them measured by this course. The LOMO paper states the activations of a LLaMA-7B step
# without checkpointing, Chen et al. planned a ResNet of 1,000 layers with and without, and Hugging Face read a
# BERT-large step off `nvidia-smi`.

# %% id="published-run" claims="C3-16"
rows = {row["id"]: row for row in published.measurements()}
lomo, chen = rows[259], rows[260]
for attention in ("eager", "sdpa"):
    recipe = memlab.Recipe(precision="amp-bf16", micro_batch=8, sequence=512, attention=attention)
    predicted = memlab.compute(llama, recipe).consumer_peaks()["activations"]
    print(f"LLaMA-7B, 8 x 512, mixed precision, {attention:5}: {format_gb(predicted)} by the closed form, "
          f"{lomo['value']} GB published, residual {lomo['value'] * GB / predicted - 1:+.1%}")
    assert abs(lomo["value"] * GB / predicted - 1) < 0.1
print(f"ResNet of 1,000 layers: {chen['config']['before']} GB become {chen['value']} GB, {chen['config']['before'] / chen['value']:.1f} times less\n")

context = next(row for row in published.measurements("tiny tensor only"))["value"] * 2**20
own = memlab.Recipe(precision="fp32", sequence=512, attention="eager", dropout=0.1, optimizer_impl="for-loop")
for row, micro_batch, way in ((101, 4, "none"), (103, 1, "full")):
    step = memlab.compute("bert-large", own.replace(micro_batch=micro_batch, checkpointing=way))
    shown = rows[row]["value"] * 2**20
    print(f"BERT-large, {micro_batch} x 512, {ways[way]}: {format_bytes(step.peak_bytes)} in {step.peak_phase} and {format_bytes(context)} of context; "
          f"nvidia-smi {format_bytes(shown)}, residual {shown / (step.peak_bytes + context) - 1:+.1%}")
    assert way == "none" or abs(shown / (step.peak_bytes + context) - 1) < 0.05

# %% [markdown] id="published-read"
# The paper doesn't say which attention kernel ran; the published figure lies between the two. BERT's residual at batch 4 is what
# `nvidia-smi` can't tell apart from tensors: the allocator's cache, large where large tensors come and go. At batch 1 with checkpointing the peak is in
# the **optimizer step**: activations no longer matter there, and no shorter segment would help. Look for the phase of the peak
# before you pay for recomputation.
#
# Have you got a GPU? Then time and peak of the opening step for each segment length:

# %% id="gpu-run" claims="C3-16"
def on_this_gpu():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(lab.device) for _ in range(DEPTH)]
    x = torch.randn(16 * batch, WIDTH, device=lab.device)
    for every in (None, *lengths):
        for _ in range(2):  # the first run warms up
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            checkpointing.run(layers, x, every=every).sum().backward()
            stop.record()
            torch.cuda.synchronize()
        print(f"{every or 'plain':>5}: {format_bytes(torch.cuda.max_memory_allocated())} at the peak, {start.elapsed_time(stop):.1f} ms")


if lab.device.type == "cuda":
    on_this_gpu()
else:
    print("skipped: no CUDA GPU here. Nothing else in this chapter needs one.")

# %% [markdown] id="again-text"
# ## The step again
#
# The opening step, the same layers, batch and budget:

# %% id="again-run"
fitted = training_step(in_segments(8), budget)
print(f"fits: peak {format_bytes(fitted.peak_bytes)} in {fitted.peak_phase}, budget {format_bytes(budget)}, plain {format_bytes(without.peak_bytes)}")
assert fitted.peak_bytes <= budget < without.peak_bytes
plots.timeline(fitted, budget=budget)

# %% [markdown] id="written-question"
# ### Exercise 3.7, in writing (3 points, graded by hand)
#
# A colleague trains 96 equal blocks. Each saves 1 GiB for its backward, what enters a block is 64 MiB, and 12 GiB are
# left for activations. They wrote `checkpoint(model, x, use_reentrant=False)`, saw memory drop at the end of the
# forward, and ran out in the backward. Then they read about $\sqrt N$ and took segments of 10 blocks. It fits,
# barely, and they ask you whether there is more to gain, and what it does to their training, which has dropout and
# BatchNorm.
#
# Answer in five to ten sentences. 1. Why did the first attempt fail, in GiB? 2. What do segments of 10 hold at the
# peak, which length is best, and why isn't it 10? 3. What does it cost in arithmetic, and what changes in the
# results?
#
# *One point for each: (1) the reason, with the number; (2) both numbers, with the formula they come from; (3) the cost,
# as a share of a step's arithmetic, and what stays equal and what doesn't. Half a point where the reason is missing.*

# %% [markdown] id="written-3-7" manual="3.7" points=3
# (1) At the end of the forward only the model's input was kept. But the backward began by running the whole model
# again with everything saved: 96 blocks of 1 GiB are 96 GiB, the same as without checkpointing.
#
# (2) Segments of 10 hold 10 inputs of 64 MiB and one segment of 10 GiB: 10.6 GiB. The $\sqrt N$ rule is for layers
# whose inside is as large as their input. Here the inside is 16 times the boundary, and the best length is near
# $\sqrt{96/16} \approx 2.4$: segments of 2 hold 48 inputs, 3 GiB, and 2 GiB inside: 5 GiB, and so do segments of 3.
# The last segment may run plain.
#
# (3) Each block in a segment runs forward once more, whatever the length: at most a third more arithmetic of forward
# + backward. Gradients are equal to the bit, with dropout too, since the random state is restored. BatchNorm's
# running statistics are updated twice per step, which changes evaluation: lower its momentum, or leave it out of the
# segments.

# %% [markdown] id="wall" claims="C3-23"
# ## To pin to the wall
#
# | | |
# |---|---|
# | depth | activations are linear in it: layers x what **one layer keeps** (1 tensor for Linear + ReLU, some 20 for a block) |
# | gradients | a product of Jacobians. Init, norms and skips each keep it alive; skips make depth trainable |
# | skip | $(I + J^T)g$, never $2g$ |
# | checkpointing | keep inputs of segments, recompute inside: $\frac Nk\,$boundary $+\ k\,$inside at the peak |
# | segment length | $k = \sqrt{N\,\text{boundary}/\text{inside}}$: $\sqrt N$ for thin layers, 1 for transformer blocks, **never the whole model** |
# | price | at most one more forward: a third of forward + backward. Gradients equal; BatchNorm's statistics move twice |
# | in code | `checkpoint(block, x, use_reentrant=False)`, block by block |
# | freezing | saves states anywhere, activations only **below** the lowest layer that trains |
# | first of all | find the phase of the peak. In an optimizer step recomputation saves nothing |

# %% id="wall-run" claims="C3-23"
lab.headline("peak of the opening step, plain", without.peak_bytes, "B", "all live tensors of one step of 64 layers")
lab.headline("the same with 8 segments of 8", with_8.peak_bytes, "B", "all live tensors of that step, checkpointed")
lab.headline("activations, plain against segments of 8", round(plain_units / best, 1), "times less", "activations and temporaries at their largest moment")
lab.headline("arithmetic for it", round(1 + most, 2), "times the plain step's", "matrix products; a backward counts as two forwards")
lab.headline("12 blocks as one segment", round(100 * by_length[12] / plain_blocks), "% of the plain peak", "activations and temporaries")
lab.headline("input gradient after 50 tanh layers", norms["nothing special"][0], "", "default init, norm 64 at the output")

assert without.peak_bytes > 1.5 * with_8.peak_bytes and plain_units > 3 * best
published.verdicts("C3-23")

# %% [markdown] id="read-on"
# **Read on.** Checkpointing: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, arXiv:1604.06174, section
# 4 (and the recursive form in 4.3, with $O(\log N)$ memory for more time). Selective recomputation: Korthikanti et
# al., arXiv:2205.05198, section 5. Residuals: He et al., arXiv:1512.03385, section 4.1, on degradation and why it
# isn't vanishing; *Identity Mappings*, arXiv:1603.05027, section 2. Progressive stacking: Gong et al., *Efficient
# Training of BERT by Progressively Stacking*, ICML 2019. The documentation of `torch.utils.checkpoint`, and
# `memlab/techniques/checkpointing.py`, where the from-scratch version is the size of yours.
#
# Next: **4. Wide**, where a layer itself becomes too large.

# %% id="progress"
memlab.progress()
