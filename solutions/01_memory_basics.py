# %% [markdown] id="title"
# # 1. Memory basics: where the bytes live
#
# Every out-of-memory error has three numbers behind it: how many bytes the card has, how many the program holds, and
# how many the allocator has put aside. People mix them up, in units that differ by 7%, and then guess.
#
# After this chapter you won't have to. You'll know what the label on a card promises and what CUDA sees of it, how fast
# bytes move on each level of the machine and when that matters, what "allocated", "reserved" and the number in
# `nvidia-smi` count, and you'll have written the instrument that the rest of the course measures with.
#
# You need no GPU. Where one is present, a cell near the end uses it. Questions in **bold** want a guess from you before
# you run the next cell: write it down, the distance to the result is what you learn.
#
# Plan three to four hours: the cells run in a minute, the rest is five exercises (10 points, checked at once by the cell
# below each, as often as you like) and one written answer (3 points, graded by a person). A check prints what is missing;
# the bare number under it is your points, for the grader. To hand in, save this notebook under its own name,
# `01_memory_basics.ipynb`, with your answers in it, and give in that file.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="begin"
import os
import time
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memlab
from memlab import hardware, plots, published, widgets
from memlab.allocator import Allocator, replay
from memlab.chapter import table
from memlab.exercises.limits import in_child
from memlab.meter import profiled
from memlab.units import GB, GIB, KIB, MIB, format_bytes, format_gb

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler would report its start and stop
lab = memlab.begin("01_memory_basics", device=device, size=size, seed=seed)

# %% [markdown] id="fails"
# ## A step that doesn't fit
#
# Here is a whole training step: eight layers `Linear(256, 256)` + `ReLU`, plain SGD, a batch of 16,384 rows. The weights
# are 8 x (256² + 256) x 4 bytes: 2 MiB.
#
# **A process that may take 96 MiB runs it. That is 48 times the weights. Does the step fit?**

# %% id="fails-run"
def training_step(batch=16_384, width=256, depth=8, device="cpu"):
    with torch.device(device):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(batch, width)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()


weights = 8 * (256 * 256 + 256) * 4
print(f"weights {format_bytes(weights)}, the limit is {96 * MIB / weights:.0f} times that\n")
training_step(batch=8)  # the libraries load before the limit holds
result = in_child(lambda: training_step() or {}, memory=96 * MIB)
print(result.get("error", "it fits (no limit could be set: the system has none, or a GPU is in use already)"))

# %% [markdown] id="fails-read"
# It doesn't. (The step ran in a child process with a limit on its memory. This kernel is unharmed, and all your
# experiments in this course may fail just as safely.)
#
# Look at what the message says and at what it doesn't. It names **one** tensor: the one that happened to be next.
# 16,777,216 bytes is 16 MiB, one sixth of the limit. Who held the rest? The message can't say, and that is why "reduce
# the batch size" is all the advice that it gets.
#
# The course's meter can. It watches every operator. With a budget it raises the same error, and it knows the rest.

# %% id="fails-meter"
batch = lab.pick(smallest=2_048, normal=16_384)
A = batch * 256 * 4  # bytes of one activation: float32, batch x 256

try:
    with lab.card(), memlab.Meter(budget=6 * A) as meter:
        training_step(batch, device=lab.device)
except torch.OutOfMemoryError as error:
    print(error, "\n")

for block in meter.trace.at_peak()[:7]:
    print(f"{format_bytes(block.bytes):>10}  {block.operator:<11} {block.module:>2}  {block.shape}")
assert meter.trace.peak_phase == "forward"

# %% [markdown] id="fails-meter-read"
# Six tensors of the same size, 16 MiB each: the batch, the results of three layers, and the `Linear` and `ReLU` of the
# fourth, the last of them one too many. Nothing is wrong with any of them, only one has a name in our code, and the
# backward hasn't even begun. By the end of this chapter you will know the whole curve of this step to the byte. First,
# what these bytes are stored in.

# %% [markdown] id="label" claims="C1-01 C0-01"
# ## 1.1 The label: capacity and bandwidth
#
# **Bandwidth** is a width times a rate. A memory bus has so many data wires, each carries so many gigabits per second,
# and eight bits are a byte. Nothing else goes into the peak that a datasheet prints.
#
# How many wires fit depends on where the memory sits:
#
# * **GDDR** chips are soldered on the board around the GPU, 32 wires each. An RTX 4090 has 12 of them: 384 wires, at 21
#   gigabits per second each.
# * **HBM** is stacked, and the stacks share one silicon interposer, inside one package, with the GPU. Wires that short
#   can be many: 1,024 for each stack. An A100 has 5 active stacks, 5,120 wires, slow ones at 3.186 gigabits per second.
#   (And an A100 or H100 in SXM form is a module that is screwed onto a server board: there is no card.)
#
# **Which of the two reads faster, and by which factor?**
#
# **Capacity** has a unit problem. A GB is 10⁹ bytes, and bandwidths and links are meant so. A GiB is 2³⁰ bytes, 7.4% more,
# and that is what PyTorch prints. Memory chips come in powers of two. **So when a box says 80 GB, which of the two is it?**

# %% [markdown] id="ex-1-1-text"
# ### Exercise 1.1 (2 points)
#
# Write both conversions, not rounded. The check uses chips that exist and some that don't.

# %% id="ex-1-1" exercise="1.1"
def bandwidth(bus_bits, gbps_per_pin):
    """Peak GB/s (10^9 bytes per second) of a bus of `bus_bits` pins at `gbps_per_pin` gigabits per second each."""
    # exercise 1.1
    ### BEGIN SOLUTION
    return bus_bits * gbps_per_pin / 8
    ### END SOLUTION


def visible(nbytes):
    """The same number of bytes in both units, as a pair: (GB, GiB)."""
    # exercise 1.1
    ### BEGIN SOLUTION
    return nbytes / 10**9, nbytes / 2**30
    ### END SOLUTION

# %% id="check-1-1" check="1.1"
memlab.check("1.1", bandwidth, visible)

# %% id="label-table" claims="C1-02 C1-03 C1-04 C1-06 C1-08"
rows = []
for card in hardware.GPUS.values():
    peak = card.bus_bits * card.gbps_per_pin / 8
    assert abs(peak * GB / card.bandwidth - 1) < 0.005  # the maker's number follows from wires and rate
    rows.append((card.name, card.memory_kind, f"{card.bus_bits} x {card.gbps_per_pin:g}", f"{peak:,.0f} GB/s",
                 format_gb(card.marketed_bytes), format_gb(card.memory_bytes), format_bytes(card.memory_bytes)))
table(("GPU", "memory", "wires x Gb/s", "peak", "on the box", "CUDA sees", "the same in GiB"), *rows)

a100, r4090 = hardware.gpu("A100-80GB"), hardware.gpu("RTX-4090")
print(f"\nA100 against RTX 4090: bandwidth {a100.bandwidth / r4090.bandwidth:.2f}x, "
      f"rate of a wire 1/{r4090.gbps_per_pin / a100.gbps_per_pin:.1f}; a GiB is {GIB / GB - 1:.1%} more than a GB")
seen = [card.memory_bytes / (card.marketed_bytes / GB * GIB) for card in hardware.GPUS.values()]
print(f"if the box means GiB, CUDA sees {min(seen):.1%} to {max(seen):.1%} of it")
assert all(0.9 < share < 1 for share in seen)
assert (r4090.bus_bits, a100.bus_bits) == (12 * 32, 5 * 1024)

# %% [markdown] id="label-read"
# Wires win: twice the bandwidth from wires that are 6.6 times slower. And the box means GiB, whatever it says, less what
# the driver and, on most GDDR server cards, error correction take: an "80 GB" card has 85.2 GB, which PyTorch prints as
# 79.35 GiB; a "16 GB" T4 has 15.8 GB or 14.75 GiB. **Never compare a number with a capacity before both have a unit.**
# The exact figure differs a little between machines, so read it on yours:
# `torch.cuda.get_device_properties(0).total_memory`.
#
# Such tables go round. Throughout this course we hold one source against the tensors: a Chinese-language article that
# explains GPU memory to engineers. It is quoted (in our words) because it says what many people believe, and says it in
# numbers. More than half of it is right, if often with a caveat, the rest isn't, and either can be measured. This is how its
# table comes out against ours:

# %% id="label-verdicts" claims="C0-01 C1-01 C1-02 C1-03 C1-04 C1-06 C1-08"
assert format_gb(a100.memory_bytes) == "85.20 GB" and format_bytes(a100.memory_bytes) == "79.35 GiB"
assert min(card.bandwidth for card in hardware.GPUS.values()) < 0.5e12  # 'TB/s class' isn't all GPUs
assert max(card.memory_bytes for card in hardware.GPUS.values()) > 2 * 80 * GB  # nor is 80 GB the end
published.verdicts("C0-01", "C1-01", "C1-02", "C1-03", "C1-04", "C1-06", "C1-08")

# %% [markdown] id="way-in" claims="C1-09 C1-10 C1-11"
# ## 1.2 The way in: links
#
# Before a GPU can compute on a byte, the byte must get there. Two kinds of traffic are easily mixed up:
#
# * Inside the GPU, the cores (SMs) load and store device memory through the L2 cache and memory controllers on the same
#   chip. The CPU does the same with its own RAM, through its own controllers. No PCIe is involved in either.
# * **Between** CPU and GPU, a DMA copy engine moves blocks over a link while both sides compute. On nearly every machine
#   with an x86 CPU that link is PCIe. NVLink joins GPUs with GPUs. Only boards whose CPU was made for it (Grace, and
#   POWER9 before) have an NVLink to the host.
#
# Datasheets print some links with both directions added up. Your bytes travel in one of them. Here are rows as a
# datasheet has them:

# %% id="link-rows"
LINK_ROWS = [
    {"name": "PCIe 3 x16", "gb_per_s": 15.75, "both_directions": False, "connects": ("cpu", "gpu")},
    {"name": "PCIe 4 x16", "gb_per_s": 31.5, "both_directions": False, "connects": ("cpu", "gpu")},
    {"name": "PCIe 5 x16", "gb_per_s": 63.0, "both_directions": False, "connects": ("cpu", "gpu")},
    {"name": "NVLink 3", "gb_per_s": 600.0, "both_directions": True, "connects": ("gpu", "gpu")},
    {"name": "NVLink 4", "gb_per_s": 900.0, "both_directions": True, "connects": ("gpu", "gpu")},
    {"name": "HBM2e", "gb_per_s": 2039.0, "both_directions": False, "connects": ("gpu", "hbm")},
]

# %% [markdown] id="ex-1-2-text"
# ### Exercise 1.2 (2 points)
#
# `transfer_time` turns a row and a number of bytes into seconds; `path` chooses the link that really joins two ends.
# **A guess first: the 140 GB of weights of a 70B model in bf16 are in host memory. How long until they are on an H200,
# which has room for them?**

# %% id="ex-1-2" exercise="1.2"
def transfer_time(nbytes, link):
    """Seconds in which `nbytes` bytes travel over `link`, a row as in LINK_ROWS, in one direction."""
    # exercise 1.2
    ### BEGIN SOLUTION
    one_way = link["gb_per_s"] / 2 if link["both_directions"] else link["gb_per_s"]
    return nbytes / (one_way * 1e9)
    ### END SOLUTION


def path(source, target, links):
    """The name of the fastest of `links` that joins `source` and `target` (in either order), or None."""
    # exercise 1.2
    ### BEGIN SOLUTION
    usable = [link for link in links if sorted(link["connects"]) == sorted([source, target])]
    return min(usable, key=lambda link: transfer_time(1, link))["name"] if usable else None
    ### END SOLUTION

# %% id="check-1-2" check="1.2"
memlab.check("1.2", transfer_time, path)

# %% id="links-times" claims="C1-10 C1-11"
def link_seconds(nbytes, name):
    """Bytes over peak bandwidth, one direction."""
    return nbytes / hardware.link(name).bandwidth


for row, name in zip(LINK_ROWS, ("PCIe3", "PCIe4", "PCIe5", "NVLink3", "NVLink4"), strict=False):
    one_way = row["gb_per_s"] / (1 + row["both_directions"]) * GB
    assert abs(hardware.link(name).bandwidth / one_way - 1) < 0.001  # memlab keeps links in one direction

hbm = 80 * GB / a100.bandwidth
print(f"80 GB by PCIe 4: {link_seconds(80 * GB, 'PCIe4'):.2f} s; read from the A100's own memory: {hbm * 1000:.0f} ms")
h200 = hardware.gpu("H200")
assert 140 * GB < h200.memory_bytes and h200.host_link == "PCIe5" and h200.peer_link == "NVLink4"
print(f"140 GB of weights to an H200 by PCIe 5: {link_seconds(140 * GB, 'PCIe5'):.1f} s "
      f"(a host with PCIe 4: {link_seconds(140 * GB, 'PCIe4'):.1f} s)")
print(f"from another H200 by NVLink 4: {link_seconds(140 * GB, 'NVLink4'):.2f} s")
print(f"NVLink 4, in one direction: {hardware.link('NVLink4').bandwidth / GB:.0f} GB/s, not 900")

lab.headline("80 GB by PCIe 4 against the A100's own memory", link_seconds(80 * GB, "PCIe4") / hbm, "times as long",
             "peak bandwidths, one direction")

# %% [markdown] id="bottleneck" claims="C1-12 C1-13"
# So the way in is 65 times slower than the memory behind it, and real copies get about 25 of PCIe 4's 31.5 GB/s, from
# pinned host memory; less from ordinary pageable memory, which must be copied to a pinned buffer first.
#
# **Is the link then what training waits for?** Count what crosses it in a step before you answer: the batch. Take 4,096
# tokens (int64), 32 images (224 x 224 x 3, fp32), and, for contrast, the Adam states of a 7B model that somebody keeps
# in host memory (fp32 master weights and two moments, 12 bytes per parameter).

# %% id="bottleneck-run" claims="C1-12 C1-13"
tokens, images, states = 4096 * 8, 32 * 3 * 224 * 224 * 4, 7 * 10**9 * 12
crossing = [("4,096 tokens", tokens), ("32 images", images), ("Adam states of a 7B model", states)]
for label, nbytes in crossing:
    print(f"{label:<26} {format_gb(nbytes):>9} by PCIe 4: {plots.seconds(link_seconds(nbytes, 'PCIe4'))}")
assert tokens == 32 * KIB and 0.0005 < link_seconds(images, "PCIe4") < 0.0007

compute = 6 * 7e9 * 4096 / (0.4 * a100.flops["bf16"])  # 6 FLOP per parameter and token; 40% of the peak is assumed
print(f"4,096 tokens through a 7B model: {compute:.1f} s of arithmetic on an A100")
plots.times([(f"{label}, {format_gb(n)}", link_seconds(n, "PCIe4")) for label, n in crossing],
            "A batch crosses PCIe 4 in no time, offloaded states don't",
            {crossing[2][0] + ", 84.00 GB": "only if offloaded"})

# %% [markdown] id="bottleneck-read"
# The tokens take a microsecond to arrive and more than a second to compute on. Images take well under a millisecond, and
# their copy can run beside the step before. The link becomes the bottleneck when something big crosses it in **every**
# step, which is what offloading does (chapter 5). What ordinary training waits for is arithmetic, device memory
# bandwidth, the network between GPUs, or the data loader.

# %% id="links-verdicts" claims="C1-09 C1-10 C1-11 C1-12 C1-13"
published.verdicts("C1-09", "C1-10", "C1-11")

# %% [markdown] id="explorer"
# Try other cards and paths. Two questions to take along: **on which card is the drive closest to the GPU's own memory,
# and what does moving from PCIe 4 to PCIe 5 change for 4 KB?**

# %% id="explorer-run"
widgets.memory_levels("A100-80GB", "80 GB", "PCIe4")

# %% id="explorer-answers"
drive = hardware.link("NVMe").bandwidth
closest = min(hardware.GPUS.values(), key=lambda card: card.bandwidth)
print(f"{closest.name}: its memory is {closest.bandwidth / drive:.0f} times as fast as the drive, "
      f"an {a100.name}'s {a100.bandwidth / drive:.0f} times")
print(f"4 KB by PCIe 4: {plots.seconds(link_seconds(4000, 'PCIe4'))}, by PCIe 5: {plots.seconds(link_seconds(4000, 'PCIe5'))}")
assert closest.name == "L4"

# %% [markdown] id="explorer-read"
# The slowest memory is closest to the drive, of course: the L4's. And for 4 KB, bytes over bandwidth halve and nothing
# changes: any transfer over PCIe waits about a microsecond before its first byte, far longer than both numbers.

# %% [markdown] id="copy"
# ## 1.3 Measure a copy
#
# Peaks are promises. What does **your** machine deliver? A copy is the plainest test: `target.copy_(source)` reads each
# byte once and writes it once, so it moves twice its size. Three things spoil such a measurement, and all three make it
# into published numbers:
#
# * the first copy touches pages that the system has yet to provide, and any copy may be disturbed: take the **best** of
#   several;
# * a small copy never leaves the cache: use arrays **at least four times the last-level cache** (the rule of the STREAM
#   benchmark);
# * half the traffic is forgotten, or a GiB is taken for a GB.
#
# ### Exercise 1.3 (1 point)
#
# Write the benchmark. `copy` and `clock` are given to you, so the check can hand in a clock of its own: your points
# depend on the method and never on how busy this machine is. The check also shows what your function says about this
# machine.

# %% id="ex-1-3" exercise="1.3"
def copy_bandwidth(sizes, cache_bytes, copy, clock):
    """{bytes: GB/s} of memory traffic, for the sizes that are at least 4 times the cache.

    `copy(nbytes)` copies that many bytes, once; `clock()` is the time in seconds.
    """
    # exercise 1.3
    ### BEGIN SOLUTION
    rates = {}
    for nbytes in sizes:
        if nbytes < 4 * cache_bytes:
            continue
        best = float("inf")
        for _ in range(7):
            start = clock()
            copy(nbytes)
            best = min(best, clock() - start)
        rates[nbytes] = 2 * nbytes / best / 1e9
    return rates
    ### END SOLUTION

# %% id="check-1-3" check="1.3"
memlab.check("1.3", copy_bandwidth)

# %% [markdown] id="copy-guess"
# **Your guess: how many GB/s does this machine's RAM give to one `copy_`? And a copy of 1 MiB, which stays in cache?**

# %% id="copy-run"
def copy_rate(nbytes, seconds, threads=1):
    """GB/s that a copy of `nbytes` moves, read and write: best of 7, and of more while `seconds` last."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    before, times, until = torch.get_num_threads(), [], time.perf_counter() + seconds
    torch.set_num_threads(threads)
    while len(times) < 7 or time.perf_counter() < until:
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * nbytes / min(times) / GB


largest = lab.pick(smallest=64 * MIB, normal=256 * MIB)
patience = lab.pick(smallest=0.05, normal=0.15)
for nbytes in (MIB, 4 * MIB, 16 * MIB, largest // 2, largest):
    one_core = copy_rate(nbytes, patience)
    print(f"copy of {format_bytes(nbytes):>10}, one core: {one_core:6.1f} GB/s")
cores = torch.get_num_threads()
ram = max(one_core, copy_rate(largest, patience, threads=cores))
print(f"the last one, {'one core' if cores == 1 else f'at best of 1 and {cores} cores'}: {ram:6.1f} GB/s")
assert ram > 0

# %% id="copy-plot" claims="C1-05"
levels = [(f"{c.memory_kind} of {c.name}", c.bandwidth) for c in map(hardware.gpu, ("H100-80GB", "A100-80GB", "RTX-4090", "T4"))]
levels += [(name, hardware.link(name).bandwidth) for name in ("DDR5-server", "DDR5-desktop", "PCIe4", "NVMe")]
here = f"RAM here, copy of {format_bytes(largest)}"
times_server = a100.bandwidth / hardware.link("DDR5-server").bandwidth
figure = plots.bandwidths([*levels, (here, ram * GB)], measured=[here],
                          title=f"An A100 has {times_server:.1f} times the peak of a server's DDR5, not 20")
lab.headline("RAM bandwidth of this machine", ram, "GB/s", f"reads and writes of a {format_bytes(largest)} copy, best of several")
figure

# %% [markdown] id="copy-read" claims="C1-05"
# If the small copies came out several times faster, you have measured your caches: numbers that no large tensor will see.
# And one core alone seldom draws all the bandwidth that a machine has.
#
# Divide 2 or 3.35 TB/s by "about 100 GB/s" of DDR5, and a GPU comes out 20 to 34 times as fast: that is a data-centre GPU
# against a desktop. A server socket has eight channels of DDR5 (the bar above: 307 GB/s, about 250 of them in practice)
# or twelve (461). From the best case to the worst an A100 has 4 to 8 times as much and an H100 7 to 13. Still the reason
# to buy one, and little enough that the host's memory is worth using: offloading (chapter 5) lives on that.

# %% id="copy-check" claims="C1-05"
channel = 4.8 * 8  # DDR5-4800: 4.8 billion transfers a second, 8 bytes each, in GB/s
assert round(8 * channel) == 307 and round(12 * channel) == 461
for card in (a100, hardware.gpu("H100-80GB")):
    print(f"{card.name}: {card.bandwidth / GB / 461:.1f} to {card.bandwidth / GB / 250:.1f} times a server socket")

# %% [markdown] id="latency" claims="C1-07"
# ## 1.4 Latency, and why it rarely hurts
#
# Bandwidth says how many bytes arrive per second. Latency says how long the first one takes. You can measure it with a
# chain of loads in which each address is known only when the one before has arrived: a walk through a table in random
# order. Python is slow, but equally slow for every table, so the difference between a table in cache and one in RAM is
# the memory.
#
# **A guess: how many nanoseconds more does a step take when the table is in RAM?**

# %% id="latency-run"
def random_cycle(nbytes, region=MIB):
    """A table in which `at = table[at]` visits each cache line once, in random order within a region.

    Regions keep the address translation cheap: without them the walk would measure page tables, too.
    """
    region = min(region, nbytes)
    lines = torch.arange(nbytes // 64).view(nbytes // region, -1)
    order = lines.gather(1, torch.rand(lines.shape).argsort(dim=1)).flatten() * 8
    steps = torch.zeros(nbytes // 8, dtype=torch.int64)
    steps[order] = order.roll(-1)
    return memoryview(steps.numpy())


def step_time(table, steps=50_000):
    """Seconds for one step of the walk, best of five; each goes on where the last one ended."""
    best, at = float("inf"), 0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            at = table[at]
        best = min(best, time.perf_counter() - start)
    return best / steps


sizes = (4 * KIB, MIB, lab.pick(smallest=32 * MIB, normal=64 * MIB))
walk = {nbytes: step_time(random_cycle(nbytes)) for nbytes in sizes}
more = (walk[sizes[-1]] - walk[sizes[0]]) * 1e9
plots.times([(f"table of {format_bytes(n)}", s) for n, s in walk.items()],
            f"A load from RAM here takes {more:.0f} ns more than one from cache",
            {f"table of {format_bytes(sizes[-1])}": "in RAM"})

# %% id="latency-gpu" claims="C1-07"
print(f"RAM here: about {more:.0f} ns (idle servers: 60 to 100 ns; the rest of a step is Python's own time)")
for name, ghz in (("A100", 1.41), ("H100", 1.755)):
    print(f"{name}: 400 cycles at {ghz} GHz = {400 / ghz:.0f} ns for a load from device memory")

# %% [markdown] id="latency-read" claims="C1-07"
# Loads from a GPU's own memory take about 400 cycles: 284 ns on an A100. That is 2 to 5 times a CPU's 60 to 100 ns and
# not the 1 µs that the article has, which is nearer to a round trip over PCIe. (A busy machine adds queueing to both.
# You may just have seen it.)
#
# Should the GPU's slower answer worry you? **Little's law**: what is on its way = arrival rate x time on the way. To keep
# a bus of so many bytes per second busy at a latency of so many seconds, bandwidth x latency bytes must be in flight at
# any moment. A CPU core can keep a handful of loads in flight. A GPU has thousands of threads: while some wait, others
# ask.
#
# ### Exercise 1.4 (2 points)
#
# How many bytes, and how many threads on each SM is that? **Guess for the A100: 108 SMs, 4 bytes per thread.**

# %% id="ex-1-4" exercise="1.4"
import math


def bytes_in_flight(gb_per_s, cycles, ghz):
    """Bytes that must be on their way at any moment to keep `gb_per_s` busy at a latency of `cycles` at `ghz`."""
    # exercise 1.4
    ### BEGIN SOLUTION
    latency = cycles / (ghz * 1e9)
    return gb_per_s * 1e9 * latency
    ### END SOLUTION


def threads_per_sm(gb_per_s, cycles, ghz, sms, bytes_per_thread):
    """Threads each of `sms` SMs must have waiting, an int, if each has `bytes_per_thread` bytes on their way."""
    # exercise 1.4
    ### BEGIN SOLUTION
    return math.ceil(bytes_in_flight(gb_per_s, cycles, ghz) / (sms * bytes_per_thread))
    ### END SOLUTION

# %% id="check-1-4" check="1.4"
memlab.check("1.4", bytes_in_flight, threads_per_sm)

# %% id="flight" claims="C1-07"
for name, gb_per_s, ghz, sms in (("A100", 2039, 1.41, 108), ("H100", 3350, 1.755, 132)):
    in_flight = gb_per_s * 400 / ghz  # 10⁹ B/s x 10⁻⁹ s
    print(f"{name}: {in_flight / 1000:.0f} KB in flight; per SM {in_flight / sms / 1000:.1f} KB, "
          f"which is {in_flight / sms / 4:.0f} threads with one float each, or {in_flight / sms / 16:.0f} with four")
assert round(2039 * 400 / 1.41 / 1000) == 578 and 2039 * 400 / 1.41 / 108 / 4 < 2048

# %% [markdown] id="flight-read"
# An SM of an A100 holds up to 2,048 threads. So 284 ns are hidden as long as two thirds of them wait for one float each,
# or a sixth of them for four floats: which is why kernels load 16 bytes at a time. Latency becomes visible when there
# isn't enough to do at once: a batch of 1, many tiny kernels, the last layer of a small model.

# %% [markdown] id="storage"
# ## 1.5 A meter of live bytes
#
# Now to the second number: what the program holds. A PyTorch tensor is a small object, a shape and strides, that points
# at a **storage**: the bytes. Several tensors may point at the same one. Memory is taken when a storage is made and
# given back when the last tensor on it dies.
#
# **`x` has 1,024 x 1,024 floats, 4 MiB. Keep `row = x[0]`, 4 KiB, and delete `x`. How much memory is still taken?**

# %% id="storage-run"
x = torch.ones(1024, 1024)
row, copied = x[0], x[0].clone()
del x
for label, tensor in (("row = x[0]", row), ("x[0].clone()", copied)):
    print(f"{label:<13} shape {tuple(tensor.shape)}: {format_bytes(tensor.nbytes)}, "
          f"holds a storage of {format_bytes(tensor.untyped_storage().nbytes())}")

# %% [markdown] id="storage-read"
# All of it. A view keeps the whole storage, which is how "I only keep the first token of each batch" fills a card: keep
# a `.clone()` instead. So a meter must count storages and not tensors.
#
# How do you see them come? Every operator that PyTorch runs, in forward, backward and optimizer, passes a *dispatch
# mode* if one is active. This one only prints:

# %% id="spy"
class Spy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        print(f"{func!s:<20} shape {tuple(result.shape)!s:<8} storage {storage._cdata & 0xFFFFFF:06x}, {storage.nbytes()} B")
        return result


with Spy():
    x = torch.ones(3, 4)
    y = x @ x.t()
    y.mul_(2)

# %% [markdown] id="spy-read"
# Four operators, but only two storages: the transpose is a view, `mul_` works in place. And how do you see a storage go?
# By a **weak** reference: `weakref.finalize(storage, function, *arguments)` calls the function when the storage dies and
# doesn't keep it alive.

# %% id="finalize"
weakref.finalize(y.untyped_storage(), print, "36 bytes are free again")
view = y.view(9)
del y
print("y is gone, a view of it is left")
del view

# %% [markdown] id="ex-1-5-text"
# ### Exercise 1.5 (3 points)
#
# That is all you need for the course's meter. Count each storage that is made inside the `with` block once, and count it
# off when it dies. Four traps: views, in-place operators, tensors that are older than the block, and keys: a dead
# storage's key (its address) may come back for a new one.

# %% id="ex-1-5" exercise="1.5"
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(tree):
    """{key: storage} of all tensors in `tree`, a nest of lists, tuples and dicts; one storage has one key."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside the `with` block, while they live.

    live_bytes: int, alive now; it goes on falling after the block, as tensors die.
    peak_bytes: int, the largest that live_bytes has been.
    """

    def __init__(self):
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # exercise 1.5: which storages of `result` are new? Count them, and arrange for `ended` to be called.
        ### BEGIN SOLUTION
        older = storages((args, kwargs))
        for key, storage in storages(result).items():
            if key in older or key in self.known:
                continue
            nbytes = storage.nbytes()
            self.known.add(key)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self.ended, key, nbytes)
        ### END SOLUTION
        return result

    def ended(self, key, nbytes):
        # exercise 1.5: a storage is gone. Its key may come back for another one.
        ### BEGIN SOLUTION
        self.known.discard(key)
        self.live_bytes -= nbytes
        ### END SOLUTION

# %% id="check-1-5" check="1.5"
memlab.check("1.5", LiveBytes)

# %% [markdown] id="predict" claims="S-02"
# ### Predict, trace, measure, explain
#
# Back to the step that failed. Write `W` for the weights and `A` for one activation (batch x 256 floats). `Linear` needs
# its **input** for the gradient of its weight; `ReLU` keeps its **output**, which is the next layer's input: one tensor,
# counted once. So each layer leaves one `A` behind and the batch itself is another: at the end of the forward
#
# $$W + (8 + 1)\,A$$
#
# **What is the peak of the whole step, and in which phase?** The gradients are as large as the weights, 2 MiB, and plain
# SGD has no states.

# %% id="trace-run"
with lab.card(), memlab.Meter() as meter:
    training_step(batch, device=lab.device)
trace = meter.trace
predicted = weights + 9 * A

for label, nbytes in (
    ("predicted at the end of the forward", predicted),
    (f"traced peak, in the {trace.peak_phase}", trace.peak_bytes),
    ("gap", trace.peak_bytes - predicted),
):
    print(f"{label:<36}{nbytes:>13,} B = {format_bytes(nbytes):>10} = {nbytes / A:5.2f} A")
plots.timeline(trace, budget=6 * A)

# %% [markdown] id="trace-read"
# The forward climbs in steps of one `A`, with a spike of one more while a `Linear` result waits for its `ReLU`. Our
# prediction holds for what the forward **leaves behind**. The peak is higher, and it comes at the very start of the
# backward. Who is there then? (What the figure calls "end" is the optimizer step, in which plain SGD needs no memory of its
# own, and then the return of the function, when everything dies.)

# %% id="gap-run"
at_peak = trace.at_peak()
for label, blocks in (
    ("kept by the forward", [b for b in at_peak if b.bytes == A and b.phase != "backward"]),
    ("made by the backward", [b for b in at_peak if b.bytes == A and b.phase == "backward"]),
    ("weights and scalars", [b for b in at_peak if b.bytes != A]),
):
    operators = ", ".join(dict.fromkeys(b.operator.removeprefix("aten.") for b in blocks))
    print(f"{label:<21} {len(blocks):>2} blocks, {format_bytes(sum(b.bytes for b in blocks)):>10}: {operators}")

extra = trace.peak_bytes - predicted
assert trace.peak_phase == "backward" and trace.peak_bytes > 2 * 6 * A
print(f"temporaries: {4 * A / trace.peak_bytes:.0%} of the peak")
if lab.device.type == "cpu":  # CUDA may compute the gradient of square() by other operators
    assert extra == 4 * A + 2 * 4

# %% [markdown] id="gap-read"
# The gap has a name. The gradient of `x.square().mean()` is 2x / n, and PyTorch computes it in four steps (`div`, `pow`,
# `mul`, `mul`), each with a result as large as the activations, and all four are alive for a moment. What is left over
# are two scalars, the loss and its gradient. **Temporaries** like these are in no textbook formula, and here they are
# 30% of the peak. The course shows them as a consumer of their own.
#
# A trace says what tensors there are. Is it true? An independent witness: the log of PyTorch's own CPU allocator, from
# its profiler.

# %% id="measure-run"
log = profiled(lambda: training_step(batch))
with memlab.Meter() as again:
    training_step(batch)
print(f"meter:            {again.trace.peak_bytes:>13,} B")
print(f"allocator's log:  {log.peak_bytes:>13,} B, {log.events} calls")
print(f"difference:       {log.peak_bytes - again.trace.peak_bytes:>13,} B (scratch inside operators)")
assert abs(log.peak_bytes - again.trace.peak_bytes) < 0.001 * log.peak_bytes
lab.headline("peak of the opening step", again.trace.peak_bytes, "B", "all live tensors at the largest moment, in the backward")

# %% [markdown] id="virtual"
# Counting needs no bytes at all. Inside a virtual GPU tensors have shapes and no storage, and the same code is traced on
# a card that you don't have, at any size. **Our step with 64 times the batch, on a 16 GB T4: does it fit?**

# %% id="virtual-run"
def virtual_peak(gpu, factor):
    try:
        with memlab.VirtualGPU(gpu) as card:
            training_step(16_384 * factor)
    except torch.OutOfMemoryError as error:
        return "doesn't fit. " + str(error).partition(" Of the")[0]
    return f"fits, peak {format_bytes(card.trace.peak_bytes)}"


for factor in (32, 64, 128):
    print(f"T4, batch {16_384 * factor:>9,}: {virtual_peak('T4', factor)}")
print(f"A100, batch {16_384 * 128:>7,}: {virtual_peak('A100-80GB', 128)}")

# %% [markdown] id="virtual-read"
# Each of the 64-fold activations is 1 GiB, and thirteen of them, nine that the forward kept and four temporaries,
# fit. Not one of these tensors existed, and nobody had to rent a card. Chapter 2 does the same with real models.

# %% [markdown] id="reserved" claims="S-02"
# ## 1.6 Allocated, reserved, and what nvidia-smi shows
#
# Asking the driver for memory is slow, so PyTorch asks for large **segments**, cuts **blocks** from them, and keeps what
# is freed for the next tensor. That gives three different numbers for one program:
#
# | number | counts | read by |
# |---|---|---|
# | **allocated** | blocks of live tensors | `torch.cuda.memory_allocated()`, peak: `max_memory_allocated()` |
# | **reserved** | segments: blocks in use and the cache of free ones | `torch.cuda.memory_reserved()` |
# | **process** | reserved, plus the CUDA context: driver, kernels, libraries | `nvidia-smi` |
#
# memlab follows the allocator's rules without a GPU. **Make a tensor of 1 GB on a T4, delete it. What do the three say?**

# %% id="reserved-run"
t4 = hardware.gpu("T4")
allocator = Allocator(capacity=t4.memory_bytes, context=t4.context_bytes)
rows = [("at the start", allocator.allocated, allocator.reserved, allocator.process)]
block = allocator.malloc(GB)
rows.append(("with 1 GB", allocator.allocated, allocator.reserved, allocator.process))
allocator.free(block)
rows.append(("after del", allocator.allocated, allocator.reserved, allocator.process))
idle = allocator.process
allocator.empty_cache()
rows.append(("after empty_cache()", allocator.allocated, allocator.reserved, allocator.process))
table(("", "allocated", "reserved", "nvidia-smi"), *[(label, *map(format_bytes, numbers)) for label, *numbers in rows])

assert rows[2][1] == 0 and rows[2][2] >= GB
lab.headline("shown by nvidia-smi after a 1 GB tensor was deleted", idle, "B", "reserved cache and the T4's context; no tensor is alive")

# %% [markdown] id="reserved-read" claims="S-02"
# (1 GB is 954 MiB: the unit trap again.) After `del` not one tensor is alive, and `nvidia-smi` shows more than 1 GB. It
# isn't a leak: the next tensor gets that memory at no cost. `empty_cache()` gives it back to the driver, which helps
# **other** processes; your own would have got it anyway, since PyTorch releases its cache and tries again before it
# raises an out-of-memory error.
#
# Now the whole step from above, as a T4's allocator would serve it:

# %% id="replay-run"
cuda = replay(trace.events, trace.sizes, capacity=t4.memory_bytes, context=t4.context_bytes)
table(
    ("the step on a T4", "bytes", ""),
    ("live tensors, peak", f"{trace.peak_bytes:,}", format_bytes(trace.peak_bytes)),
    ("allocated, peak", f"{cuda.peak_allocated:,}", format_bytes(cuda.peak_allocated)),
    ("reserved, peak", f"{cuda.peak_reserved:,}", format_bytes(cuda.peak_reserved)),
    ("nvidia-smi, peak", f"{cuda.process_peak:,}", format_bytes(cuda.process_peak)),
    ("allocated, afterwards", f"{cuda.allocated:,}", format_bytes(cuda.allocated)),
    ("nvidia-smi, afterwards", f"{cuda.reserved + t4.context_bytes:,}", format_bytes(cuda.reserved + t4.context_bytes)),
)
assert trace.peak_bytes <= cuda.peak_allocated <= cuda.peak_reserved < cuda.process_peak

# %% [markdown] id="real"
# ### On real cards
#
# You needn't believe a simulation. These are published runs on a Tesla T4 (FitCheck's archive, LoRA fine-tuning, batch x
# tokens; the rows are in `memlab/data`). All state the peaks of the three numbers. **Two runs of one model that differ
# only in the attention kernel: which of the numbers differs most? And what is the same in every row?**

# %% id="real-table"
runs = [run for run in published.t4_runs() if run["base"] == "fp16"]
for run in runs:
    run["label"] = f"{run['model']}, {run['attention']}, {run['batch']} x {run['sequence']}"
table(
    ("Tesla T4, peaks of a step", "allocated", "reserved", "process", "context", "reserved / allocated"),
    *[(run["label"], *(format_bytes(run[k]) for k in ("allocated", "reserved", "process", "context")),
       f"{run['reserved'] / run['allocated']:.2f}") for run in runs],
)
contexts = {run["context"] for run in runs}
assert contexts == {t4.context_bytes} and format_bytes(t4.context_bytes) == "140.88 MiB"

# %% id="real-plot" tags=["hide-input"]
def parts_figure(runs):
    """Stacked bars of what a process holds: allocated, cached, context. Greys: these aren't consumers."""
    figure = plots.Figure(figsize=(8, 1.3 + 0.42 * len(runs)), dpi=110, layout="constrained")
    ax = figure.subplots()
    left = [0.0] * len(runs)
    parts = {
        "allocated (tensors)": ([run["allocated"] for run in runs], "#3C3C3C", ""),
        "reserved, not allocated (cache)": ([run["reserved"] - run["allocated"] for run in runs], "#B9B9B9", "///"),
        "context": ([run["context"] for run in runs], "#FFFFFF", "..."),
    }
    for label, (values, colour, hatch) in parts.items():
        gib = [value / GIB for value in values]
        ax.barh(range(len(runs)), gib, left=left, height=0.66, label=label, color=colour, hatch=hatch, edgecolor="#222222", linewidth=0.6)
        left = [a + b for a, b in zip(left, gib, strict=True)]
    ax.set_yticks(range(len(runs)), [run["label"] for run in runs])
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("peak memory of the process on a Tesla T4 (GiB)")
    worst = max(runs, key=lambda run: run["reserved"] / run["allocated"])
    more = worst["reserved"] / worst["allocated"] - 1
    title = f"Cache alone: up to {more:.0%} on top of the tensors ({worst['model']}, {worst['attention']})"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.memlab_alt = title + ". " + " ".join(
        f"{run['label']}: allocated {format_bytes(run['allocated'])}, reserved {format_bytes(run['reserved'])}." for run in runs
    )
    return figure


parts_figure(runs)

# %% [markdown] id="real-read"
# The context is the same in every row. Now look at the two runs of SmolLM2-135M at 1 x 4096. Their tensors differ by 1%.
# What PyTorch reserved for them differs by 1.16 GiB: eager attention makes huge short-lived score matrices whose sizes
# don't fit into each other's holes. (SmolLM2-360M, the worst row, has 49% on top, but there the tensors differ as well.)
# That is **fragmentation**, and it is why a step can fail with "free" memory on the card. An out-of-memory error is about
# reserved memory; a formula for tensors only gives the dark part of the bar.
#
# That context is small here, 140.9 MiB. It depends on card, driver and CUDA version: Hugging Face once measured 1,343 MiB
# on a V100 whose driver loaded every kernel at once. Measure it on your card, once, before you make a budget.

# %% id="real-check"
eager, sdpa = (next(r for r in runs if r["model"] == "SmolLM2-135M" and r["attention"] == a) for a in ("eager", "sdpa"))
print(f"allocated: {eager['allocated'] / sdpa['allocated'] - 1:.1%} apart; reserved: {format_bytes(eager['reserved'] - sdpa['reserved'])} apart")
v100 = next(row for row in published.measurements("tiny tensor only"))
print(f"context on a V100 in 2022: {v100['value']:,} MiB ({v100['source']})")
worst = max(runs, key=lambda run: run["reserved"] / run["allocated"])
assert worst["model"] == "SmolLM2-360M" and f"{worst['reserved'] / worst['allocated'] - 1:.0%}" == "49%"
assert v100["value"] == 1343 and format_bytes(eager["reserved"] - sdpa["reserved"]) == "1.16 GiB"

# %% id="smi-verdict" claims="S-02"
published.verdicts("S-02")

# %% [markdown] id="gpu"
# ### On your GPU (optional)
#
# With a CUDA GPU the next cell shows the same three numbers on it, the bandwidth of its memory, and what a copy from the
# host takes, pinned and pageable. Compare with your predictions: 90% of the peak or so is normal for device memory.

# %% id="gpu-run" claims="C1-02 C1-03 C1-10 S-02"
def best_seconds(work, repeats=5):
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def three_numbers(label):
    free, total = torch.cuda.mem_get_info(lab.device)  # of the whole card, all processes, as nvidia-smi
    held = torch.cuda.memory_allocated(lab.device), torch.cuda.memory_reserved(lab.device), total - free
    return label, *map(format_bytes, held)


def on_this_gpu():
    torch.cuda.empty_cache()
    n = 256 * MIB
    source, target = (torch.ones(n, dtype=torch.uint8, device=lab.device) for _ in range(2))
    print(f"device memory: {2 * n / best_seconds(lambda: target.copy_(source)) / GB:,.0f} GB/s, read and write")
    for label, host in (("pageable", torch.ones(n, dtype=torch.uint8)), ("pinned", torch.ones(n, dtype=torch.uint8).pin_memory())):
        print(f"host to device, {label}: {n / best_seconds(lambda host=host: target.copy_(host, non_blocking=True)) / GB:.1f} GB/s")
    del source, target
    torch.cuda.empty_cache()
    rows = [three_numbers("at the start")]
    block = torch.empty(GB, dtype=torch.uint8, device=lab.device)
    rows.append(three_numbers("with 1 GB"))
    del block
    rows.append(three_numbers("after del"))
    torch.cuda.empty_cache()
    rows.append(three_numbers("after empty_cache()"))
    table(("", "allocated", "reserved", "card in use"), *rows)


if lab.device.type == "cuda":
    on_this_gpu()
else:
    print("skipped: no CUDA GPU here. Nothing else in this chapter needs one.")

# %% [markdown] id="written-question"
# ### Exercise 1.6, in writing (3 points, graded by hand)
#
# A colleague calls: "My notebook is idle, no cell is running, and `nvidia-smi` says the T4 is full. There must be a leak.
# I'll call `empty_cache()` before each step from now on." This is what they read off:

# %% id="written-numbers"
allocated, reserved = round(2.10 * GIB), round(14.30 * GIB)
table(
    ("read off", "", "by"),
    ("in use", f"{(reserved + t4.context_bytes) // MIB:,} MiB", "nvidia-smi"),
    ("free", f"{(t4.memory_bytes - reserved - t4.context_bytes) // MIB:,} MiB", "torch.cuda.mem_get_info()"),
    ("allocated", format_bytes(allocated), "torch.cuda.memory_allocated()"),
    ("allocated, peak", format_bytes(round(9.80 * GIB)), "torch.cuda.max_memory_allocated()"),
    ("reserved", format_bytes(reserved), "torch.cuda.memory_reserved()"),
)

# %% [markdown] id="written-rubric"
# Answer in five to ten sentences. 1. Split what `nvidia-smi` shows into its parts, with numbers. 2. Their next operation
# makes a tensor of 4 GiB: does it have to fail? And a second process that wants 3 GiB? 3. What do you say about calling
# `empty_cache()` before each step, and which number should they watch to know how close a step comes to the limit?
#
# *One point for each: (1) all three parts, right numbers, which is tensors and which isn't; (2) both cases with the
# reason; (3) the price or uselessness of `empty_cache()` for one's own process, and a peak of the allocator in place of
# a sampled `nvidia-smi`. Half a point where the reason is missing.*

# %% [markdown] id="written-1-6" manual="1.6" points=3
# (1) Tensors hold 2.10 GiB. 14.30 - 2.10 = 12.20 GiB are PyTorch's cache: reserved segments, free for its next tensors.
# The rest, 14,784 MiB less 14.30 GiB, is about 141 MiB of CUDA context, which no PyTorch call can free. Nothing here
# shows a leak: memory that is cached isn't lost. A leak would show in `memory_allocated` growing from step to step.
#
# (2) The 4 GiB tensor doesn't have to fail: the allocator looks for a free block of that size in its 12.20 GiB of cache,
# and if the holes are too small it releases all segments without a live block and asks the driver again. It fails only
# if live blocks are scattered so that no 4 GiB can be put together (fragmentation). The second process can't use that
# cache. It sees the 317 MiB that the driver has left, so it fails until the first process calls `empty_cache()` or ends.
#
# (3) `empty_cache()` before each step doesn't give the step more memory, because the allocator does the same by itself
# before it raises an error. It costs time: each segment must be asked from the driver again, with a synchronisation. It
# makes sense once, to leave room for another process. Watch `max_memory_allocated()` and `max_memory_reserved()` after
# `reset_peak_memory_stats()`: exact peaks of one step. `nvidia-smi` samples, counts the cache and the context, and all
# processes on the card.

# %% [markdown] id="step"
# ## 1.7 Does a step of a real model fit?
#
# Everything so far was about bytes in general. This is the question of the course: one training step of a model that you
# know, on a card that you choose. Move one control at a time: the lines say what the change did, signed and in bytes.
# *Trace it* runs the step on tensors without storage, counts every allocation as section 1.5 did, and puts what it
# counted beside the formula. **With how many texts at once does GPT-2 fill a T4, and what doesn't change when you double
# them?** (Without a running kernel you see the starting point.)

# %% id="step-run"
widgets.one_step("gpt2", "T4")

# %% id="step-answer"
recipe = memlab.Recipe(precision="fp32")
one, two = (memlab.compute("gpt2", recipe.replace(micro_batch=n), gpu="T4") for n in (1, 2))
room = hardware.gpu("T4").memory_bytes
each = two.peak_bytes - one.peak_bytes
print(f"1 text: {format_bytes(one.peak_bytes)} at the peak; each further one {format_bytes(each)}; "
      f"{1 + (room - one.peak_bytes) // each} fit in {format_bytes(room)}")
same = [name for name, held in one.consumer_peaks().items() if held == two.consumer_peaks()[name]]
print("the same with two:", ", ".join(name.replace("_", " ") for name in same))
assert same[0] == "parameters" and "activations" not in same

# %% [markdown] id="wall"
# ## To pin to the wall
#
# | | |
# |---|---|
# | capacity | 80 "GB" = 85.2 GB = 79.35 GiB. Say the unit, or don't say the number |
# | bandwidth | wires x Gb/s / 8. HBM: many slow wires in the package. GDDR: few fast ones on the board |
# | links | one direction counts. Host to GPU is PCIe (32 or 63 GB/s); NVLink joins GPUs |
# | a copy | moves 2 x its bytes; best of several; 4 x the cache or more |
# | latency | 300 ns, hidden by 600 KB in flight |
# | tensors | memory belongs to storages. A view keeps all of it, in-place takes none |
# | peak | a maximum over moments. Temporaries count |
# | allocated ≤ reserved < process | tensors; + the allocator's cache; + the context. `nvidia-smi` shows the last |
#
# **Read on.** The caching allocator: PyTorch's notes "CUDA semantics, memory management" and "Understanding CUDA memory
# usage" (snapshots by `torch.cuda.memory._record_memory_history`). Bandwidth as the limit: Gholami et al., *AI and Memory
# Wall*, arXiv:2403.14123, section 2. Copies as a benchmark: McCalpin's STREAM, its run rules. What a real training step
# holds, in four parts: chapter 2.

# %% id="progress"
memlab.progress()
