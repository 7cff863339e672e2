"""Does it fit, with what margin, and if not: the cheapest recipe that does. Closed forms only, no torch.

    print(plan("llama2-70b", "A100-80GB", 8, effective_batch=1024).render())

Three questions, answered apart:

* `steps`: the seven levers in their order, from the recipe you have: what each moves, what it costs, and why
  it was taken or not;
* `candidates`: every valid recipe, ranked by seconds per effective batch under a cost model that is all on
  view (`Assumptions`); `best` is the cheapest that fits;
* `bound`: which part stands in the way: states, activations or logits.

Bytes are `footprint`'s, plus what PyTorch's engines keep beside a step's own tensors (`engine_terms`). A
recipe `fits` when its peak and the stated uncertainty fit the card; between that and the card's capacity it
is `tight`: too close for a closed form, and a trace decides (`memlab plan` runs it).

Cost model. All parts are added, as if nothing overlapped: an upper bound, the same for every recipe.

* compute: FLOPs of forward (2 per weight and token, attention's two products), backward (twice that) and
  recomputation, at `mfu` of the card's dense peak in the recipe's dtype. Never less than a kernel launch for
  each operation.
* memory traffic: bytes that stored attention scores and selective recomputation move beyond the plain step.
* update: bytes that the optimizer reads and writes. foreach and for-loop pass over them 20 times where one
  fused kernel needs 7 (torch.optim.adamw, counted).
* data parallel: ring collectives, 2 (n-1)/n of the bytes for an all-reduce, half that for a gather or a
  reduce-scatter (Rajbhandari et al., arXiv:1910.02054, section 7). DDP once per batch, FSDP per micro-batch.
* tensor parallel: four all-reduces of the activations per layer, six with recomputation (Shoeybi et al.,
  arXiv:1909.08053), and one each for embedding and head.
* offload: bytes over the host link (or NVMe), and the CPU's update: 28 bytes per parameter through the host's
  memory (Ren et al., arXiv:2101.06840).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import product
from typing import Any

from memlab import hardware, models
from memlab.footprint import Footprint, footprint
from memlab.hardware import GPU, Link
from memlab.models import ConvConfig, TransformerConfig
from memlab.operations import Program, fuses, in_proportion
from memlab.recipe import MIN_8BIT, Recipe, RecipeError
from memlab.units import CONSUMERS, DTYPE_BYTES, GB, PHASES, format_count, format_gb
from memlab.walk import ANY, Holding, Moment, Walk, largest, leaving

__all__ = [
    "Assumptions",
    "Candidate",
    "Confirmed",
    "Cost",
    "EngineTerm",
    "Plan",
    "Step",
    "Verdict",
    "engine_terms",
    "judge",
    "plan",
]

Config = TransformerConfig | ConvConfig

#: Networks between machines, per GPU, by the generation of the card's host link.
NETWORKS = {
    "PCIe3": Link(name="Ethernet-100G", bandwidth=12_500_000_000, connects="one GPU and other machines",
                  source="100 Gb/s Ethernet, one port per GPU"),
    "PCIe4": Link(name="InfiniBand-HDR", bandwidth=25 * GB, connects="one GPU and other machines",
                  source="NVIDIA DGX A100 datasheet: eight 200 Gb/s HDR ports for eight GPUs"),
    "PCIe5": Link(name="InfiniBand-NDR", bandwidth=50 * GB, connects="one GPU and other machines",
                  source="NVIDIA DGX H100 datasheet: eight 400 Gb/s NDR ports for eight GPUs"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the cost model takes for granted. Every one is printed with the plan.

    mfu: share of the dense peak that a step's FLOPs reach. Large models on A100s publish 0.3 to 0.5 (PaLM,
        arXiv:2204.02311, table 3: 0.21 to 0.46).
    launch: seconds that one kernel takes at least.
    cpu_update: bytes that the CPU's Adam moves per parameter: weight, two moments read and written, gradient
        read, in fp32.
    """

    mfu: float
    intra_link: Link
    inter_link: Link
    host_link: Link
    nvme_link: Link
    host_memory: Link
    gpus_per_node: int = 8
    launch: float = 5e-6
    cpu_update: int = 28

    def lines(self) -> list[str]:
        """One sentence each."""
        return [
            f"{self.mfu:.0%} of the card's dense peak (mfu); parts are added, nothing overlaps",
            f"{self.gpus_per_node} GPUs a machine, joined by {_speed(self.intra_link)}; "
            f"machines by {_speed(self.inter_link)} a GPU",
            f"host over {_speed(self.host_link)} a GPU; a machine's memory {_speed(self.host_memory)}; one "
            f"{_speed(self.nvme_link)}",
            f"ways within {COST_DOUBT:.0%} of each other count as equal: mfu isn't the same for all, and "
            "some of the traffic overlaps with compute",
            f"{self.launch * 1e6:g} us a kernel at least",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            f.name: {"name": v.name, "bytes_per_second": v.bandwidth, "source": v.source}
            if isinstance(v := getattr(self, f.name), Link)
            else v
            for f in fields(self)
        }


def _speed(link: Link) -> str:
    return f"{link.name} ({link.bandwidth / 1e9:,.0f} GB/s)"


@dataclass(frozen=True)
class Cost:
    """What one effective batch costs on each GPU.

    seconds       {part: seconds}; they add up to `total`
    flops         of the GPU, recomputation included
    recomputed    of them, done a second time
    bytes         {link's name: bytes over it}
    """

    seconds: Mapping[str, float]
    flops: int
    recomputed: int
    bytes: Mapping[str, int]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds_per_effective_batch": self.total,
            "seconds": dict(self.seconds),
            "flops": self.flops,
            "recomputed_flops": self.recomputed,
            "bytes": dict(self.bytes),
        }


@dataclass(frozen=True)
class EngineTerm:
    """What an engine holds beside (or in place of) the step's own tensors: bytes by phase, and why."""

    name: str
    bytes: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Candidate:
    """A recipe with its bytes and its cost.

    peak_bytes    per GPU, engine terms included
    margin_bytes  what the card has left beyond peak and uncertainty; negative where it doesn't fit for sure
    numerics      what differs from training as it was asked for; empty where only rounding does
    host_bytes, nvme_bytes   per machine
    """

    recipe: Recipe
    peak_bytes: int
    peak_phase: str
    margin_bytes: int
    cost: Cost
    numerics: tuple[str, ...] = ()
    host_bytes: int = 0
    nvme_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Per effective batch."""
        return self.cost.total

    @property
    def way(self) -> tuple[Any, ...]:
        """What kind of recipe it is, whatever its micro-batch and checkpointing."""
        return _way(self.recipe)

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "margin_bytes": self.margin_bytes,
            "numerics": list(self.numerics),
            "host_bytes_per_machine": self.host_bytes,
            "nvme_bytes_per_machine": self.nvme_bytes,
            "cost": self.cost.to_dict(),
        }


@dataclass(frozen=True)
class Step:
    """One of the seven levers: the recipe with it, whether it was taken, and why.

    consumers: bytes at the peak with it (engine terms under temporaries). price: what it costs, in words.
    """

    name: str
    recipe: Recipe
    peak_bytes: int
    peak_phase: str
    consumers: Mapping[str, int]
    taken: bool
    fits: bool
    why: str
    price: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "taken": self.taken, "fits": self.fits, "why": self.why, "price": self.price,
            "peak_bytes": self.peak_bytes, "peak_phase": self.peak_phase, "consumers": dict(self.consumers),
            "recipe": self.recipe.to_dict(),
        }  # fmt: skip


@dataclass(frozen=True)
class Confirmed:
    """What traces said: `best` runs; `tried` are (candidate, traced peak or None: out of memory).

    reasons: why each was traced. left: ways that fit by closed form and weren't traced.
    largest_micro_batch, longest_sequence: with `best` and nothing else changed, by closed form, and at least
    what its trace has shown; 0: nothing runs, or images have no sequence.
    """

    best: Candidate | None
    tried: tuple[tuple[Candidate, int | None], ...]
    reasons: tuple[str, ...] = ()
    left: int = 0
    largest_micro_batch: int = 0
    longest_sequence: int = 0

    def render(self, width: int = 100) -> str:
        """The headline, then what was traced, fastest first, in lines of at most `width` columns."""
        count = f"{len(self.tried)} trace{'s' * (len(self.tried) != 1)}"
        if self.best is None:
            rest = f"; {self.left} more ways weren't traced" * (self.left > 0)
            lines = _wrap(f"nothing confirmed fits: {count}, each out of memory{rest}", width)
        else:
            peak = next(peak for candidate, peak in self.tried if candidate is self.best) or 0
            lines = _wrap(
                f"confirmed by {count}: {brief(self.best.recipe)}; traced peak {format_gb(peak)}, "
                f"{_seconds(self.best.seconds)} a batch", width,
            )  # fmt: skip
            if self.best.numerics:
                lines += _wrap("changes training: " + "; ".join(self.best.numerics), width)
            most = _limits("with it", self.largest_micro_batch, self.longest_sequence)
            lines += _wrap(f"{most} (closed form)", width)
        lines.append(f"{'traced on the virtual card':<{width - 40}}"
                     f"{'formula GB':>12}{'trace GB':>10}{'a batch':>10}{'':>8}".rstrip())  # fmt: skip
        rows = zip(self.tried, self.reasons or ("",) * len(self.tried), strict=True)
        for (candidate, traced), reason in sorted(rows, key=lambda row: row[0][0].seconds):
            first, *rest_of_it = _wrap(brief(candidate.recipe), width - 43)
            said = "no memory" if traced is None else f"{traced / GB:.2f}"
            numbers = f"{candidate.peak_bytes / GB:>12.2f}{said:>10}{_seconds(candidate.seconds):>10}"
            lines.append(
                f"{'  ' + first:<{width - 40}}{numbers}{'runs' if traced is not None else '':>8}".rstrip()
            )
            lines += ["      " + more for more in (*rest_of_it, f"({reason})" if reason else "") if more]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.to_dict() if self.best else None,
            "largest_micro_batch": self.largest_micro_batch,
            "longest_sequence": self.longest_sequence,
            "not_traced": self.left,
            "tried": [
                {
                    "recipe": c.recipe.to_dict(),
                    "formula_bytes": c.peak_bytes,
                    "traced_bytes": peak,
                    "why": why,
                }
                for (c, peak), why in zip(self.tried, self.reasons, strict=True)
            ],
        }


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes are per GPU unless a name says otherwise.

    fits                 does the starting recipe fit
    steps                the seven levers, in order
    candidates           what fits, cheapest first: one recipe for each way (precision, optimizer, sharding,
                         offload), all with the least change of numerics that has a fit
    alternatives         ways that fit and change more than that, cheapest first
    tight                recipes cheaper than `best`, too close to the card's end for a closed form
    next_cheaper         the dearest recipe that is cheaper than `best` and doesn't fit
    nearest              the recipe with the smallest peak, where nothing fits
    bound                'states', 'activations' or 'logits': what stands in the way of the start
    largest_micro_batch, longest_sequence   with `best` (else the start) and nothing else changed; 0: none
    limits               the same for another recipe
    searched             how many recipes were ranked
    """

    model: str
    gpu: GPU
    count: int
    effective_batch: int
    start: Recipe
    start_peak: int
    start_phase: str
    start_consumers: Mapping[str, int]
    fits: bool
    arithmetic: str
    steps: tuple[Step, ...]
    candidates: tuple[Candidate, ...]
    alternatives: tuple[Candidate, ...]
    tight: tuple[Candidate, ...]
    next_cheaper: Candidate | None
    nearest: Candidate | None
    bound: str
    bound_why: str
    largest_micro_batch: int
    longest_sequence: int
    searched: int
    assumptions: Assumptions
    uncertainty: tuple[tuple[str, int, str], ...]
    notes: tuple[str, ...]
    parameter_count: int
    limits: Callable[[Recipe], tuple[int, int]] = field(repr=False, compare=False)

    @property
    def best(self) -> Candidate | None:
        """The cheapest candidate; None where nothing fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def capacity(self) -> int:
        """total_memory of the card."""
        return self.gpu.memory_bytes

    @property
    def limit(self) -> int | None:
        """Bytes for a trace on the card (`trace_step(limit=...)`): less where the context is assumed."""
        return None if self.gpu.context_bytes is not None else self.capacity - ASSUMED_CONTEXT

    def confirm(self, trace: Callable[[Recipe], int | None], most: int = 8) -> Confirmed:
        """Let at most `most` traces decide; a few more show what lies below the winner.

        trace(recipe): the traced peak in bytes, or None where the card's memory ended. Half of the traces go
        to the cheapest of the `tight` recipes and the candidates, then to the largest margins of all that is
        left, alternatives too, until one runs. Where the first one runs, the next cheaper recipe is traced to
        show that it doesn't; where adapters were allowed, so are up to three faster ways with them.
        """
        tried: list[tuple[Candidate, int | None]] = []
        reasons: list[str] = []
        ranked = sorted([*self.tight, *self.candidates], key=lambda c: c.seconds)
        left = [*ranked, *self.alternatives]
        winner: Candidate | None = None
        while left and winner is None and len(tried) < most:
            early = len(tried) < max(most // 2, 1) and any(c in ranked for c in left)
            candidate = left[0] if early else max(left, key=lambda c: c.margin_bytes)
            left.remove(candidate)
            peak = trace(candidate.recipe)
            tried.append((candidate, peak))
            if not early:
                reasons.append("of those left, the largest margin")
            elif candidate in self.tight:
                reasons.append("faster than what surely fits, too close for a closed form")
            else:
                reasons.append("the fastest left that fits by closed form")
            winner = candidate if peak is not None else None
        if winner is None:
            return Confirmed(None, tuple(tried), tuple(reasons), len(left))
        if len(tried) == 1 and self.next_cheaper and self.next_cheaper.seconds <= winner.seconds:
            tried.insert(0, (self.next_cheaper, trace(self.next_cheaper.recipe)))
            reasons.insert(0, "the next faster recipe, which shouldn't run")
        if winner.recipe.lora_rank is None:
            adapters = [c for c in left if c.recipe.lora_rank is not None and c.seconds < winner.seconds]
            fastest = min(adapters, key=lambda c: c.seconds, default=None)
            widest = sorted(adapters, key=lambda c: (c is not fastest, -c.margin_bytes))
            for candidate in widest[:3]:
                peak = trace(candidate.recipe)
                tried.insert(0, (candidate, peak))
                faster = "the fastest" if candidate is fastest else "of the faster ones, the largest margin"
                reasons.insert(0, f"adapters, which are another training: {faster}")
                left.remove(candidate)
                if peak is not None:
                    break
        # a trace may run where the closed form is unsure
        most, longest = self.limits(winner.recipe)
        return Confirmed(
            winner, tuple(tried), tuple(reasons), len(left), max(most, winner.recipe.micro_batch),
            max(longest, winner.recipe.sequence or 0),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sizes are integers in bytes."""
        return {
            "model": self.model,
            "parameter_count": self.parameter_count,
            "gpu": self.gpu.name,
            "capacity_bytes": self.capacity,
            "count": self.count,
            "effective_batch": self.effective_batch,
            "start": {
                "recipe": self.start.to_dict(), "fits": self.fits, "peak_bytes": self.start_peak,
                "peak_phase": self.start_phase, "consumers": dict(self.start_consumers),
                "arithmetic": self.arithmetic,
            },
            "bound": self.bound,
            "bound_why": self.bound_why,
            "steps": [step.to_dict() for step in self.steps],
            "best": self.best.to_dict() if self.best else None,
            "candidates": [c.to_dict() for c in self.candidates],
            "alternatives": [c.to_dict() for c in self.alternatives],
            "tight": [c.to_dict() for c in self.tight],
            "next_cheaper": self.next_cheaper.to_dict() if self.next_cheaper else None,
            "nearest": self.nearest.to_dict() if self.nearest else None,
            "largest_micro_batch": self.largest_micro_batch,
            "longest_sequence": self.longest_sequence,
            "searched": self.searched,
            "assumptions": self.assumptions.to_dict(),
            "uncertainty": [{"name": n, "bytes": b, "why": w} for n, b, w in self.uncertainty],
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        return self.render()

    def render(self, width: int = 100, limits: bool = True) -> str:
        """The whole plan as text of at most `width` columns.

        limits: with what the best recipe fits at most; left to `Confirmed` where traces are still to decide
        which recipe that is.
        """
        return "\n".join(_page(self, width, limits))


# -- the question ----------------------------------------------------------------------------------------


#: Held back where no report of the card's context is known. Reports run from 0.14 GB (T4, CUDA 12, which
#: loads kernels when they're used) to 1.4 GB (V100, CUDA 11.2, which loaded all of them).
ASSUMED_CONTEXT = 512 * 2**20

#: Assumptions, chosen after looking at stored residuals, not bounds. Formula: against the traced peaks of the
#: recommended recipes in benchmarks/results/planner.json the closed form lies within 0.01 %, against random
#: small ones in tests/memlab/test_footprint.py within 3 %. Allocator: of 35 published `reserved` figures in
#: benchmarks/results/accuracy.json 24 are at most 1.5 % above what the replay gives, and the worst 12 %. So
#: near a card's end only a trace with the allocator's rules decides, then a real run.
FORMULA_RESIDUAL = 0.01
ALLOCATOR_RESIDUAL = 0.015

#: Seconds closer than this are no difference: published mfu of one kind of card differs by more (PaLM,
#: arXiv:2204.02311, table 3), and no part is known to be hidden behind another.
COST_DOUBT = 0.10

#: Ways listed of the least change of numerics, and of each further one.
_WAYS, _MORE_WAYS = 8, 4

_BF16_ROUNDING = "weights and moments in bf16, rounded to 3 digits: small updates are lost"
_8BIT = "optimizer states in 8 bits"


def plan(
    model: str | Config,
    gpu: str | GPU,
    count: int = 1,
    *,
    effective_batch: int | None = None,
    sequence: int | None = None,
    start: Recipe | None = None,
    host_bytes: int | None = None,
    nvme_bytes: int | None = None,
    intra_link: str | Link | None = None,
    inter_link: str | Link | None = None,
    host_link: str | Link | None = None,
    host_memory_link: str | Link | None = None,
    mfu: float = 0.4,
    allow: Mapping[str, Sequence[Any]] | None = None,
) -> Plan:
    """Plan `model` on `count` cards `gpu`.

    effective_batch: sequences or images of one optimizer step over all GPUs; default: what `start` says, else
        one per GPU. sequence: tokens (images keep the model's size).
    start: the recipe you have. Default: the plain script, fp32 with eager attention and the whole batch at
        once. Its world_size becomes `count`.
    host_bytes, nvme_bytes: what a machine has for offload. None: host memory isn't limited, NVMe not used.
    intra_link, inter_link: between GPUs of one machine, and of two; by default the card's own and `NETWORKS`.
    host_link, host_memory_link: what offload goes over: between a GPU and its host, a CPU and its memory; by
        default the card's own, and what stands beside cards of its kind.
    mfu: see `Assumptions`.
    allow: {field of Recipe: values that may be used}, to narrow the search, or to widen it:
        {"lora_rank": (None, 16)}.

    Raises ValueError, one line, for names, counts and combinations that can't be.
    """
    config = models.model(model) if isinstance(model, str) else model
    card = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
    for name, value in (("count", count), ("effective_batch", effective_batch), ("sequence", sequence)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number from 1, not {value!r}")
    if count > 2**20:
        raise ValueError(f"count must be at most {2**20:,}, not {count}")
    if isinstance(config, ConvConfig) and any((allow or {}).get("lora_rank", ())):
        raise ValueError(f"adapters are for transformers here, and {config.name} is a convnet")
    if isinstance(mfu, bool) or not isinstance(mfu, int | float) or not 0 < mfu <= 1:
        raise ValueError(f"mfu must be above 0 and at most 1, not {mfu!r}")
    return _Planner(
        config, card, count, effective_batch, sequence, start, host_bytes, nvme_bytes,
        _assume(card, intra_link, inter_link, float(mfu), host_link, host_memory_link), allow or {},
    ).plan()  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Whether one recipe fits, and what was reckoned with: bytes per GPU.

    state        'fits'; 'tight': only a trace decides; 'no'
    peak, phase  of the step's tensors and `terms`
    terms        what the engine holds in that phase
    context      of CUDA, and where its figure is from
    doubt        (name, bytes, why) of what is held back
    """

    state: str
    peak: int
    phase: str
    terms: tuple[EngineTerm, ...]
    context: int
    context_source: str
    doubt: tuple[tuple[str, int, str], ...]


def judge(config: Config, gpu: GPU, found: Footprint) -> Verdict:
    """What `plan` says of the recipe of `found`, the footprint of `config` on `gpu`, as it is."""
    recipe = found.recipe
    rows = {phase: {c: found.phases[phase][c] for c in CONSUMERS} for phase in PHASES}
    terms = _terms(recipe, Holding.of(config, recipe), rows, gpu)
    for term in terms:
        for phase, size in term.bytes.items():
            rows[phase]["temporaries"] += size
    whole = _Bytes(rows, found.moments)
    assumed = _assume(gpu, None, None, 0.4)
    one = _Planner(config, gpu, recipe.world_size, None, None, recipe, None, None, assumed, {})
    return Verdict(
        one._state(recipe, whole), whole.peak, whole.peak_phase,
        tuple(term for term in terms if term.bytes[whole.peak_phase]), one.context, one.context_source,
        tuple(one.uncertainty(recipe, whole.peak)),
    )  # fmt: skip


#: Memory of cards for desktops (GeForce); the others stand in servers.
_DESKTOP = ("GDDR6X", "GDDR7")


def _assume(
    card: GPU,
    intra: str | Link | None,
    inter: str | Link | None,
    mfu: float,
    host: str | Link | None = None,
    memory: str | Link | None = None,
) -> Assumptions:
    def named(link: str | Link) -> Link:
        networks = {network.name.lower(): network for network in NETWORKS.values()}
        found = networks.get(link.lower()) if isinstance(link, str) else None
        return found or hardware.link(link)

    return Assumptions(
        mfu=mfu,
        intra_link=named(intra or card.peer_link or card.host_link),
        inter_link=named(inter) if inter else NETWORKS[card.host_link],
        host_link=named(host or card.host_link),
        nvme_link=hardware.link("NVMe"),
        host_memory=named(memory or ("DDR5-desktop" if card.memory_kind in _DESKTOP else "DDR5-server")),
    )


# -- bytes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bytes:
    """A recipe's live bytes at each phase's largest moment, engine terms included."""

    phases: Mapping[str, Mapping[str, int]]
    moments: Mapping[str, str]

    @cached_property
    def totals(self) -> dict[str, int]:
        return {phase: sum(row.values()) for phase, row in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        return max(PHASES, key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        return self.totals[self.peak_phase]


def engine_terms(config: Config, recipe: Recipe, gpu: GPU) -> list[EngineTerm]:
    """What PyTorch's engine for this recipe (`sharded`) holds beside the tensors of `footprint`.

    Per GPU and phase. A negative term is what an engine does without. `footprint` counts ZeRO-2 and master
    weights as ZeRO's authors and Megatron keep them; FSDP2 differs by the terms here.
    """
    walk = Walk(config, recipe.resolve(config), "cuda", gpu)
    walk.run()
    return _terms(recipe, walk.holding, walk.peaks, gpu)


def _terms(
    recipe: Recipe, sizes: Holding, rows: Mapping[str, Mapping[str, int]], gpu: GPU
) -> list[EngineTerm]:
    found = [
        EngineTerm(
            "cuBLAS workspaces",
            dict.fromkeys(PHASES, 2 * _cublas(gpu)),
            "two threads that multiply matrices, one each (ATen/cuda/CublasHandlePool.cpp)",
        )
    ]
    n = recipe.data_parallel
    shard = sizes.shared_by(n)
    if recipe.zero_stage == 2:
        kept = sizes.bytes // n
        found.append(
            EngineTerm(
                "shards beside whole weights",
                {"forward": kept, "backward": kept, "optimizer": kept - sizes.bytes},
                "fully_shard(reshard_after_forward=False) keeps its shard beside the whole weights, and "
                "frees these before the update; at most so in backward, where blocks are freed one by one",
            )
        )
    if recipe.zero_stage >= 2 and recipe.master_dtype and not recipe.offloaded("parameters"):
        less = -shard * DTYPE_BYTES[recipe.parameter_dtype]
        found.append(
            EngineTerm(
                "fp32 shards are the master copy",
                {
                    "forward": less + rows["forward"]["gradients"],
                    "backward": less + rows["backward"]["gradients"],
                    "optimizer": less + rows["optimizer"]["gradients"] - 4 * shard,
                },
                "fully_shard's MixedPrecisionPolicy gathers in bf16 from fp32 shards and keeps fp32 "
                "gradients: no second copy, no cast",
            )
        )
    return found


def _cublas(gpu: GPU) -> int:
    """':4096:2:16:8' (KiB times count), ':4096:8' from Hopper on (parseChosenWorkspaceSize)."""
    return (32 * 1024 if gpu.compute_capability >= (9, 0) else 2 * 4096 + 8 * 16) * 1024


# -- the work of a micro-batch ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """FLOPs, bytes and kernels of one sample's forward on one GPU, inside and outside the blocks."""

    flops: int
    fused: int  # of them in a fused attention kernel, whose backward computes the scores again
    block_flops: int
    traffic: int  # bytes of operations other than matrix products
    block_traffic: int
    kernels: int
    block_kernels: int


#: No adapters. Theirs are small products beside the frozen ones: under 1 % at rank 16.
_WHOLE: dict[str, Any] = {"lora_rank": None, "lora_targets": "attention", "base_weights": "full"}


def _work(config: Config, recipe: Recipe, gpu: GPU | None) -> _Work:
    """Counted over `operations.Program`, whose list of operations `footprint` walks through."""
    micro = 2 if isinstance(config, ConvConfig) else 1
    plain = recipe.replace(
        precision="bf16" if recipe.precision == "fp16" else recipe.precision,  # the same bytes
        micro_batch=micro, accumulation=1, checkpointing="none", zero_stage=0, offload=(),
        world_size=recipe.tensor_parallel, **_WHOLE,
    )  # fmt: skip
    total = dict.fromkeys(("flops", "fused", "block_flops", "traffic", "block_traffic"), 0)
    kernels = {"kernels": 0, "block_kernels": 0}
    for unit in Program(config, plain.resolve(config), "cuda", gpu).units:
        block = unit.label in ("block", "stage", "transition")
        for op in unit.ops:
            if not op.outs:
                continue
            out = op.outs[0]
            flops = traffic = fused = 0
            channel = out.shape[1] if len(out.shape) == 4 and op.params else out.shape[-1] if out.shape else 1
            elements = math.prod(out.shape)
            if op.ins and op.params and op.params[0][1] > channel:
                flops = 2 * op.params[0][1] * elements // channel
            elif op.name.endswith("attn output") and len(op.ins) == 3:
                batch, tokens, width = out.shape
                flops = fused = 4 * batch * tokens * tokens * width
            elif op.name.endswith("scores") and len(op.ins) == 2:
                flops = 2 * elements * (op.ins[0].shape[-1] // op.outs[0].shape[1])
            elif op.name.endswith("attn output per head"):
                batch, tokens, width = out.shape
                flops = 2 * batch * tokens * tokens * width
            if not flops or op.name.endswith(("scores", "attn output per head")):
                traffic = sum(x.bytes for x in op.ins) + sum(s.bytes for s in op.made)
            total["flops"] += flops * unit.times
            total["fused"] += fused * unit.times
            total["traffic"] += traffic * unit.times
            kernels["kernels"] += unit.times
            if block:
                total["block_flops"] += flops * unit.times
                total["block_traffic"] += traffic * unit.times
                kernels["block_kernels"] += unit.times
    return _Work(**{name: n // micro for name, n in total.items()}, **kernels)


#: Passes of the update over the tensors, beside a fused kernel's: AdamW's eight operators against one.
_UPDATE_PASSES = {"fused": 1.0, "foreach": 20 / 7, "for-loop": 20 / 7}
#: Kernels of one parameter's update in a loop.
_LOOP_KERNELS = 12


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds and bytes over links: per sample, per micro-batch, per step; `floor` per micro-batch."""

    sample: Mapping[str, float]
    micro: Mapping[str, float]
    step: Mapping[str, float]
    floor: float
    flops: int
    recomputed: int
    moved: tuple[Mapping[str, int], Mapping[str, int], Mapping[str, int]]  # per sample, micro-batch, step

    def totals(self) -> tuple[float, float, float, float]:
        compute = self.sample["compute"]
        return compute, sum(self.sample.values()) - compute, sum(self.micro.values()), sum(self.step.values())

    def cost(self, micro: int, turns: int) -> Cost:
        seconds: dict[str, float] = {"compute": turns * max(micro * self.sample["compute"], self.floor)}
        for times, parts in ((micro * turns, self.sample), (turns, self.micro), (1, self.step)):
            for name, each in parts.items():
                if name != "compute":
                    seconds[name] = seconds.get(name, 0.0) + times * each
        moved: dict[str, int] = {}
        for times, links in zip((micro * turns, turns, 1), self.moved, strict=True):
            for name, size in links.items():
                moved[name] = moved.get(name, 0) + times * size
        seconds = {name: value for name, value in seconds.items() if value > 0}
        moved = {name: size for name, size in moved.items() if size}
        return Cost(seconds, micro * turns * self.flops, micro * turns * self.recomputed, moved)


class _Family:
    """Recipes that differ in micro-batch (and accumulation) only."""

    __slots__ = ("dominated", "known", "most", "numerics", "rates", "recipe", "severity", "way")

    def __init__(self, recipe: Recipe, numerics: tuple[str, ...], severity: int, rates: _Rates) -> None:
        self.recipe, self.numerics, self.severity, self.rates = recipe, numerics, severity, rates
        self.way = _way(recipe)
        self.dominated = False  # another family is cheaper and smaller at every micro-batch
        self.most: int | None = None  # the largest micro-batch that isn't hopeless; 0: none
        self.known: dict[int, _Bytes] = {}


def _way(recipe: Recipe) -> tuple[Any, ...]:
    adapters = recipe.lora_rank, recipe.base_weights
    return (
        recipe.precision, recipe.optimizer, recipe.zero_stage, recipe.tensor_parallel, recipe.offload,
        *adapters,
    )  # fmt: skip


@dataclass
class _Found:
    """What a search found, as (family, micro-batch)."""

    searched: int
    families: list[_Family] = field(default_factory=list)
    candidates: list[tuple[_Family, int]] = field(default_factory=list)
    alternatives: list[tuple[_Family, int]] = field(default_factory=list)
    tight: list[tuple[_Family, int]] = field(default_factory=list)
    before: tuple[_Family, int] | None = None  # the last before the first that fits, and doesn't


def _impls(optimizer: str) -> tuple[str, ...]:
    found = []
    for impl in ("fused", "foreach", "for-loop"):
        try:
            found.append(Recipe(optimizer=optimizer, optimizer_impl=impl).optimizer_impl)
        except RecipeError:
            continue
    return tuple(found)


class _Planner:
    def __init__(
        self,
        config: Config,
        card: GPU,
        count: int,
        effective_batch: int | None,
        sequence: int | None,
        start: Recipe | None,
        host_bytes: int | None,
        nvme_bytes: int | None,
        assumptions: Assumptions,
        allow: Mapping[str, Sequence[Any]],
    ) -> None:
        self.config, self.card, self.count, self.assumptions = config, card, count, assumptions
        self.host_bytes, self.nvme_bytes = host_bytes, nvme_bytes
        known = {f.name for f in fields(Recipe)}
        for name in allow:
            if name not in known:
                raise ValueError(f"allow: {name!r} is no field of a Recipe")
        self.allow = {name: tuple(values) for name, values in allow.items()}
        self.transformer = isinstance(config, TransformerConfig)
        if sequence is not None and not self.transformer:
            raise ValueError(f"{config.name} reads images: leave sequence out")
        per_gpu = None
        if start is not None:
            batch = effective_batch or start.micro_batch * start.accumulation * count // start.tensor_parallel
            self.effective = batch
        else:
            self.effective = effective_batch or count
            if self.effective % count:
                raise ValueError(self._uneven())
            per_gpu = self.effective // count
            start = Recipe(
                precision="fp32", micro_batch=min(per_gpu, 2**24),
                attention="eager" if self.transformer else "sdpa",
            )  # fmt: skip
        changes: dict[str, Any] = {"world_size": count}
        if count == 1:
            changes |= {"zero_stage": 0, "tensor_parallel": 1}
        if sequence is not None:
            changes["sequence"] = sequence
        elif self.transformer and start.sequence is None:
            changes["sequence"] = config.context  # type: ignore[union-attr]
        start = start.replace(**changes)
        if self.effective % start.data_parallel:
            raise ValueError(self._uneven())
        share = self.effective // start.data_parallel
        if start.micro_batch * start.accumulation != share:
            micro = math.gcd(start.micro_batch, share) if start.micro_batch <= share else share
            start = start.replace(micro_batch=micro, accumulation=share // micro)
        self.start = start.resolve(config, card)
        self._walks: dict[Recipe, Mapping[str, list[Moment]]] = {}
        self._works: dict[tuple[Any, ...], _Work] = {}
        self._updates: dict[Recipe, dict[str, int]] = {}
        self._leaving: dict[tuple[Any, ...], int] = {}
        self._blocks: int | None = None

    def _uneven(self) -> str:
        return (
            f"an effective batch of {self.effective} can't be divided among {self.count} GPUs: "
            f"use a multiple of {self.count}, say {-(-self.effective // self.count) * self.count}"
        )

    # bytes

    @property
    def context(self) -> int:
        return ASSUMED_CONTEXT if self.card.context_bytes is None else self.card.context_bytes

    @property
    def context_source(self) -> str:
        return self.card.context_source or "assumed: 0.14 GB (T4) to 1.4 GB (V100, CUDA 11) are reported"

    @property
    def usable(self) -> int:
        """Bytes that the allocator can take of the driver."""
        return self.card.memory_bytes - self.context

    def bytes(self, recipe: Recipe) -> _Bytes:
        """What `footprint` says, from parts that many recipes share, and the engine's terms.

        The optimizer's kind moves states, which stay all step long, and the update's temporaries: one walk
        without either serves all optimizers, one walk of a single sample all micro-batches.
        """
        rest = tuple(item for item in recipe.offload if not item.startswith("optimizer_states"))
        key = recipe.replace(
            optimizer="sgd", optimizer_impl="foreach", offload=rest, accumulation=min(recipe.accumulation, 2),
            precision="bf16" if recipe.precision == "bf16-master" else recipe.precision,  # masters are states
            zero_stage=0 if recipe.zero_stage == 1 else recipe.zero_stage,  # it shards states alone
        )  # fmt: skip
        rows, moments = self._walk(key)
        update = self._updating(recipe)
        states = update["optimizer_states"]
        own = rows["optimizer"]["optimizer_states"]
        for row in rows.values():
            row["optimizer_states"] += states - own
        rows["optimizer"]["temporaries"] = update["temporaries"]
        for term in _terms(recipe, self._sizes(recipe), rows, self.card):
            for phase, size in term.bytes.items():
                rows[phase]["temporaries"] += size
        return _Bytes(rows, moments)

    def _updating(self, recipe: Recipe) -> dict[str, int]:
        """States and update, whatever the forward is."""
        key = recipe.replace(
            micro_batch=1, accumulation=1, checkpointing="none", attention="sdpa", dropout=0.0, sequence=None,
            image=None, offload=tuple(item for item in recipe.offload if not item.startswith("activations")),
        )  # fmt: skip
        if key not in self._updates:
            self._updates[key] = Walk(self.config, key, "cuda").update()
        return self._updates[key]

    def _walk(self, recipe: Recipe) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
        """Rows and names of the largest moments; one walk serves all micro-batches if it can."""
        alike = in_proportion(self.config, recipe, self.card)
        key = recipe.replace(micro_batch=2) if alike else recipe
        if key not in self._walks:
            walk = Walk(self.config, key.resolve(self.config), "cuda", self.card, ANY if alike else 0)
            walk.run()
            self._walks[key] = walk.noted  # not its operations, which would fill the memory
        return largest(self._walks[key], recipe.micro_batch)

    # cost

    def _work_of(self, recipe: Recipe, fused: bool = False) -> _Work:
        """`fused`: as if its attention ran in a kernel that stores no scores."""
        attention, card = ("sdpa", None) if fused else (recipe.attention, self.card)
        key = (
            recipe.precision, attention, fused, recipe.dropout, recipe.sequence, recipe.image,
            recipe.tensor_parallel,
        )  # fmt: skip
        if key not in self._works:
            self._works[key] = _work(self.config, recipe.replace(attention=attention), card)
        return self._works[key]

    def _rates(self, recipe: Recipe) -> _Rates:
        """The cost model; see the module's text."""
        r, a, card = recipe, self.assumptions, self.card
        work = self._work_of(r)
        checkpointed = r.checkpoint_every is not None
        again = work.block_flops if checkpointed else 0
        # a frozen weight needs no gradient: its backward is one product, not two
        passes = 3 if r.lora_rank is None else 2
        flops = passes * (work.flops - work.fused) + work.fused * 7 // 2 + again
        peak = card.flops.get(r.compute_dtype) or card.flops["fp32"]
        launches = work.kernels * 3 + (work.block_kernels if r.checkpointing != "none" else 0)
        sample: dict[str, float] = {"compute": flops / (peak * a.mfu)}
        if self.transformer:
            extra = 3 * (work.traffic - self._work_of(r, fused=True).traffic)
            if r.checkpointing == "selective":
                extra += work.block_traffic
            sample["memory traffic"] = max(extra, 0) / card.bandwidth
        micro: dict[str, float] = {}
        step: dict[str, float] = {}
        if r.quantized:  # each product makes its weight whole in 16 bits: 0.5 bytes read, 2 written, 2 read
            whole = 4.5 * self._sizes(r).values * (3 if r.checkpointing != "none" else 2)
            micro["memory traffic"] = whole / card.bandwidth
        moved: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})

        def send(part: str, size: float, link: Link, when: int, share: int = 1) -> None:
            """`size` bytes over `link`, which `share` GPUs have in common."""
            seconds = (sample, micro, step)[when]
            seconds[part] = seconds.get(part, 0.0) + size * share / link.bandwidth
            moved[when][link.name] = moved[when].get(link.name, 0) + round(size)

        self._data_parallel(r, send)
        if r.tensor_parallel > 1:
            c, t = self.config, r.tensor_parallel
            assert isinstance(c, TransformerConfig)
            sums = c.layers * (4 + 2 * checkpointed) + 2
            size = (r.sequence or c.context) * c.hidden * DTYPE_BYTES[r.compute_dtype]
            link = a.intra_link if t <= a.gpus_per_node else a.inter_link
            send("tensor parallel", sums * 2 * (t - 1) / t * size, link, 0)
        self._update(r, step, send)
        if r.offloaded("activations"):
            link = a.host_link if r.offloaded("activations") == "cpu" else a.nvme_link
            share = 1 if r.offloaded("activations") == "cpu" else self._neighbours
            send("offload", 2 * self._moved(r), link, 0, share)
        return _Rates(sample, micro, step, launches * a.launch, flops, again, moved)

    @property
    def _neighbours(self) -> int:
        """GPUs of one machine."""
        return min(self.count, self.assumptions.gpus_per_node)

    def _sizes(self, recipe: Recipe) -> Holding:
        """The weights on one rank, before ZeRO shards them."""
        return Holding.of(self.config, recipe)

    def _values(self, recipe: Recipe) -> int:
        """Values that one GPU updates."""
        whole = self._sizes(recipe).shared_by(1)
        return -(-whole // recipe.data_parallel) if recipe.zero_stage >= 1 else whole

    def _data_parallel(self, r: Recipe, send: Any) -> None:
        n = r.data_parallel
        if n == 1:
            return
        a = self.assumptions
        sizes = self._sizes(r)
        values = sizes.shared_by(1)
        link = a.intra_link if self.count <= a.gpus_per_node else a.inter_link
        once = (n - 1) / n
        compute, stored, graded = (
            DTYPE_BYTES[d] for d in (r.compute_dtype, r.parameter_dtype, r.gradient_dtype)
        )
        if r.zero_stage < 2:
            size = values * (2 * graded + (stored if r.zero_stage else 0))
            send("data parallel", once * size, link, 2)
        else:  # gathered in forward, and again in backward where it was freed; one reduce-scatter
            gathers = 1 if r.zero_stage == 2 else 2
            send("data parallel", once * compute * (gathers * sizes.values + values), link, 1)

    def _update(self, r: Recipe, step: dict[str, float], send: Any) -> None:
        a, near = self.assumptions, self._neighbours
        values = self._values(r)
        master = 4 if r.master_dtype and r.zero_stage >= 2 else 0  # FSDP's shards are fp32
        stored, graded = master or DTYPE_BYTES[r.parameter_dtype], master or DTYPE_BYTES[r.gradient_dtype]
        parameters, states = r.offloaded("parameters"), r.offloaded("optimizer_states")
        if not states:
            held = sum(t.bytes for t in r.state_tensors((values,)))
            size = (values * (2 * stored + graded) + 2 * held) * _UPDATE_PASSES[r.optimizer_impl]
            step["update"] = size / self.card.bandwidth
            if r.optimizer_impl == "for-loop":
                step["update"] += len(self._sizes(r).trained) * _LOOP_KERNELS * a.launch
            return
        if parameters:
            send("offload", values * (2 * stored + graded), a.host_link, 1)
        else:
            when = 1 if r.offloaded("gradients") else 2
            send("offload", values * graded, a.host_link, when)
            send("offload", values * stored, a.host_link, 2)
        send("CPU update", values * a.cpu_update, a.host_memory, 2, near)
        for what, where in (("optimizer_states", states), ("parameters", parameters)):
            if where == "nvme":
                size = values * (12 if what == "optimizer_states" else stored)
                send("NVMe", 2 * size, a.nvme_link, 2, near)

    def _moved(self, r: Recipe) -> int:
        """Bytes of one sample's activations that leave the card."""
        key = (
            r.compute_dtype, r.autocast, r.checkpointing, r.attention, r.sequence, r.image, r.tensor_parallel,
            r.lora_rank,
            r.base_weights,
        )  # fmt: skip
        if key not in self._leaving:
            micro = 1 if self.transformer else 2
            plain = r.replace(
                micro_batch=micro, accumulation=1, zero_stage=0, world_size=r.tensor_parallel,
                optimizer="sgd", optimizer_impl="foreach", offload=("activations:cpu",),
            )  # fmt: skip
            program = Program(self.config, plain.resolve(self.config), "cuda", self.card)
            self._leaving[key] = leaving(program) // micro
        return self._leaving[key]

    def _outside(self, r: Recipe) -> tuple[int, int]:
        """(host, NVMe) bytes of one machine."""
        places = {"cpu": 0, "nvme": 0}
        values = self._values(r)
        if r.offloaded("optimizer_states") and not r.offloaded("parameters"):
            # fp32 masters and moments there, and the gradients that the update reads
            places[r.offloaded("optimizer_states") or "cpu"] += values * 12
            places["cpu"] += values * 4
        elif r.offloaded("parameters"):
            states = sum(t.bytes for t in r.state_tensors((values,)))
            places[r.offloaded("optimizer_states") or "cpu"] += states
            places[r.offloaded("parameters") or "cpu"] += self._sizes(r).bytes // r.data_parallel
            places[r.offloaded("gradients") or "cpu"] += values * DTYPE_BYTES[r.gradient_dtype]
        if where := r.offloaded("activations"):
            places[where] += self._moved(r) * r.micro_batch
        return places["cpu"] * self._neighbours, places["nvme"] * self._neighbours

    # the verdict on one recipe

    def uncertainty(self, recipe: Recipe, peak: int) -> list[tuple[str, int, str]]:
        """(name, bytes, why) of what lies between this peak and the card's end."""
        found = [
            ("formula", round(peak * FORMULA_RESIDUAL), "assumed: closed form against traced peak"),
            (
                "allocator",
                round(peak * ALLOCATOR_RESIDUAL),
                "assumed: segments that a full card can't give back",
            ),
        ]
        if recipe.zero_stage >= 2:
            found.append(
                (
                    "gather buffers",
                    self._block_weights(recipe),
                    "fully_shard holds up to one block's weights more",
                )
            )
        return found

    def _block_weights(self, recipe: Recipe) -> int:
        """Bytes of the largest block's weights as they are gathered."""
        if self._blocks is None:
            sizes: dict[str, int] = {}
            for spec in self.config.parameters():
                parts = spec.name.split(".")
                if parts[0] in ("blocks", "stages"):
                    name = ".".join(parts[: 2 if parts[0] == "blocks" else 3])
                    sizes[name] = sizes.get(name, 0) + spec.count
            self._blocks = max(sizes.values(), default=0)
        return self._blocks // recipe.tensor_parallel * DTYPE_BYTES[recipe.compute_dtype]

    def _state(self, recipe: Recipe, found: _Bytes) -> str:
        """'fits', 'tight' or 'no'."""
        doubt = sum(size for _, size, _ in self.uncertainty(recipe, found.peak))
        if found.peak + doubt <= self.usable:
            return "fits"
        less = doubt - round(found.peak * ALLOCATOR_RESIDUAL)
        return "tight" if found.peak - less <= self.usable else "no"

    def _outside_fits(self, recipe: Recipe) -> bool:
        if not recipe.offload:
            return True
        host, nvme = self._outside(recipe)
        return (self.host_bytes is None or host <= self.host_bytes) and nvme <= (self.nvme_bytes or 0)

    def _candidate(self, family: _Family, micro: int) -> Candidate:
        recipe = self._at(family, micro)
        found = family.known.get(micro) or self.bytes(recipe)
        doubt = sum(size for _, size, _ in self.uncertainty(recipe, found.peak))
        host, nvme = self._outside(recipe)
        return Candidate(
            recipe.resolve(self.config, self.card), found.peak, found.peak_phase,
            self.usable - found.peak - doubt, family.rates.cost(micro, recipe.accumulation), family.numerics,
            host, nvme,
        )  # fmt: skip

    # every valid recipe

    def _at(self, family: _Family, micro: int) -> Recipe:
        share = self.effective // family.recipe.data_parallel
        return family.recipe.replace(micro_batch=micro, accumulation=share // micro)

    def _families(self) -> Iterator[_Family]:
        scores = self._options("attention", ("sdpa",))
        for recipe in self._recipes():
            numerics, severity = self._numerics(recipe)
            family = _Family(recipe, numerics, severity, self._rates(recipe))
            impls = self._options("optimizer_impl", _impls(recipe.optimizer))
            # Stored scores are slower and larger than none; so are more passes of the update.
            others = (recipe.replace(attention=a) for a in scores if recipe.attention == "eager" != a)
            family.dominated = any(fuses(self.config, other, self.card) for other in others) or (
                recipe.optimizer_impl != "fused" and "fused" in impls
            )
            yield family

    def _options(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        return self.allow.get(name, tuple(values))

    def _recipes(self) -> Iterator[Recipe]:
        start = self.start
        sixteen = "amp-bf16" if "bf16" in self.card.dtypes else "amp-fp16"
        precisions = self._options(
            "precision", dict.fromkeys((sixteen, "bf16-master", "bf16", "fp32", start.precision))
        )
        optimizers = [start.optimizer]
        if start.optimizer in ("adam", "adamw"):
            optimizers.append("adamw-8bit")
        attention = self._options(
            "attention", dict.fromkeys(("sdpa", "eager", start.attention)) if self.transformer else ("sdpa",)
        )
        every = [f"every-{k}" for k in (2, 4, 8) if k < max(self.config.blocks, 1)]
        checkpointing = self._options("checkpointing", dict.fromkeys(("none", "selective", "full", *every)))
        micro = 1 if self.transformer else 2
        for adapters in self._adapters():
            frozen = adapters["lora_rank"] is not None
            for optimizer in self._options("optimizer", optimizers):
                impls = self._options("optimizer_impl", _impls(optimizer))
                if frozen and optimizer == "adamw-8bit" != start.optimizer:
                    continue  # their states are small as they are
                half = ("fp16",) if frozen and "bf16" not in self.card.dtypes else ()
                for precision in (*precisions, *half):
                    for tensor, stage in self._layouts(precision):
                        offloads = [*self._offloads(precision, stage, optimizer)]
                        if tensor > 1:  # each rank would move activations that all hold alike
                            offloads = [o for o in offloads if "activations:cpu" not in o]
                        if frozen:  # adapters' states are small: nothing to move but activations
                            offloads = [o for o in offloads if o in ((), ("activations:cpu",))]
                        for offload, kept, scores in product(offloads, checkpointing, attention):
                            if "activations:cpu" in offload and scores == "eager":
                                continue
                            hosted = any(item.startswith("optimizer_states") for item in offload)
                            for impl in ("fused",) if hosted else impls:
                                try:
                                    yield start.replace(
                                        optimizer=optimizer, optimizer_impl=impl, precision=precision,
                                        tensor_parallel=tensor, zero_stage=stage, offload=offload,
                                        checkpointing=kept, attention=scores, micro_batch=micro,
                                        accumulation=1, **adapters,
                                    ).resolve(self.config, self.card)  # fmt: skip
                                except RecipeError:
                                    continue

    def _adapters(self) -> Iterator[dict[str, Any]]:
        """Fields of adapters: the start's, and what `allow` adds."""
        start = self.start
        ranks = self._options("lora_rank", (start.lora_rank,))
        for rank in ranks:
            if rank is None:
                yield dict(_WHOLE)
                continue
            targets = start.lora_targets if start.lora_rank is not None else "attention"
            asked = self._options("lora_targets", (targets,))
            kept = start.lora_rank is not None and rank == start.lora_rank and "lora_rank" not in self.allow
            bases = self._options("base_weights", (start.base_weights,) if kept else ("full", "nf4"))
            for target, base in product(asked, bases):
                yield {"lora_rank": rank, "lora_targets": target, "base_weights": base}

    def _layouts(self, precision: str) -> Iterator[tuple[int, int]]:
        """(tensor_parallel, zero_stage) that PyTorch combines: tensor parallel goes with fully_shard."""
        share = 1
        while share <= min(self.count, self.assumptions.gpus_per_node):
            split = share == 1 or self.transformer
            if split and self.count % share == 0 and self.effective % (self.count // share) == 0:
                if self.count == share:
                    stages: tuple[int, ...] = (0,)
                else:
                    stages = (0, 1, 2, 3) if share == 1 else (2, 3)
                for stage in stages:
                    # fully_shard casts by its own policy (bf16-master), not by autocast
                    if not (stage >= 2 and precision.startswith("amp-")) and (
                        stage in self._options("zero_stage", (0, 1, 2, 3))
                        and share in self._options("tensor_parallel", (share,))
                    ):
                        yield share, stage
            share *= 2

    def _offloads(self, precision: str, stage: int, optimizer: str) -> Iterator[tuple[str, ...]]:
        if "offload" in self.allow:
            yield from (tuple(items) for items in self.allow["offload"])
            return
        yield ()
        if stage == 1:
            return
        yield ("activations:cpu",)
        where = ["cpu"] + (["nvme"] if self.nvme_bytes else [])
        # A GradScaler looks for infinities in gradients that a host's optimizer no longer has.
        if optimizer not in ("adam", "adamw") or precision == "amp-fp16":
            return
        for place in where:
            # The host keeps fp32 masters: bf16 on the card is enough.
            if precision != "bf16-master":
                yield (f"optimizer_states:{place}",)
                yield (f"optimizer_states:{place}", "gradients:cpu")
                yield (f"optimizer_states:{place}", "gradients:cpu", "activations:cpu")
            if stage == 3:
                yield (f"parameters:{place}", "gradients:cpu", f"optimizer_states:{place}")
                yield (f"parameters:{place}", "gradients:cpu", f"optimizer_states:{place}", "activations:cpu")

    def _numerics(self, recipe: Recipe) -> tuple[tuple[str, ...], int]:
        """What training differs in beyond rounding, and how much."""
        found, severity = [], 0
        if recipe.optimizer == "adamw-8bit" != self.start.optimizer:
            found.append(_8BIT)
            severity += 1
        masters = recipe.offloaded("optimizer_states") and not recipe.offloaded("parameters")
        adapters = recipe.lora_rank is not None
        if recipe.precision == "bf16" != self.start.precision and not masters and not adapters:
            found.append(_BF16_ROUNDING)
            severity += 2
        if adapters and self.start.lora_rank is None:
            frozen = f", on frozen weights in {recipe.base_weights}" * recipe.quantized
            found.append(f"only adapters of rank {recipe.lora_rank} are trained{frozen}")
            severity += 4 + recipe.quantized
        elif adapters and recipe.base_weights != self.start.base_weights:
            found.append(f"the frozen weights are in {recipe.base_weights}")
            severity += recipe.quantized
        return tuple(found), severity

    # the search

    def _micro_batches(self, recipe: Recipe) -> list[int]:
        """Powers of two, and the whole, that divide a rank's part of the batch."""
        share = self.effective // recipe.data_parallel
        found = [b for k in range(share.bit_length()) if share % (b := 2**k) == 0]
        if share not in found:
            found.append(share)
        if recipe.image is not None and getattr(self.config, "batch_norm", False) and recipe.image <= 32:
            found = [b for b in found if b > 1]
        return [b for b in found if b in self._options("micro_batch", (b,))]

    def search(self) -> _Found:
        families = list(self._families())
        ranked: list[tuple[int, float, int, int, int]] = []
        for i, family in enumerate(families):
            share = self.effective // family.recipe.data_parallel
            compute, sample, micro, step = family.rates.totals()
            floor = family.rates.floor
            for b in self._micro_batches(family.recipe):
                turns = share // b
                seconds = turns * (max(b * compute, floor) + micro) + share * sample + step
                ranked.append((family.severity, seconds, -b, i, b))
        ranked.sort()
        found = _Found(len(ranked))
        ways: set[tuple[Any, ...]] = set()
        count = at = 0
        least: int | None = None
        first: float | None = None  # seconds of the cheapest that fits
        spared = False  # it needs no offload
        for severity, seconds, _, i, b in ranked:
            if severity != at:
                at, count = severity, 0
                if least is None:
                    found.tight, found.before = [], None
            other = least not in (None, severity)
            if count >= (_MORE_WAYS if other else _WAYS):
                continue
            family = families[i]
            if family.dominated or family.most == 0 or (family.way in ways and least is not None):
                continue
            # Another training is offered to save time or to spare an offload, not beside it.
            if other and (family.recipe.offload or (spared and first is not None and seconds > first)):
                continue
            if family.most is None:
                self._bound_family(family)
            state = "no" if b > family.most else self._judge(family, b)  # type: ignore[operator]
            if state == "fits":
                if least is None:
                    least, first, spared = severity, seconds, not family.recipe.offload
                ways.add(family.way)
                count += 1
                (found.candidates if severity == least else found.alternatives).append((family, b))
            elif least is None:
                if state == "tight":
                    found.tight.append((family, b))
                else:
                    found.before = (family, b)
        found.families = families
        return found

    def _judge(self, family: _Family, micro: int) -> str:
        recipe = self._at(family, micro)
        if not self._outside_fits(recipe):
            return "no"
        if micro not in family.known:
            family.known[micro] = self.bytes(recipe)
        return self._state(recipe, family.known[micro])

    def _bound_family(self, family: _Family) -> None:
        """The largest micro-batch that isn't hopeless: peaks grow with it."""
        recipe = family.recipe
        least = self._least(recipe)
        if least > self.usable:
            family.most = 0
            return
        sizes = self._micro_batches(recipe)
        low, high = 0, len(sizes)
        if sizes and self._judge(family, sizes[0]) == "no":
            high = 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._judge(family, sizes[middle]) == "no" else (middle, high)
        family.most = sizes[low] if high else 0

    def _least(self, recipe: Recipe) -> int:
        """Bytes that no micro-batch gets below: what one GPU keeps when the update begins."""
        n = recipe.data_parallel
        whole, held, kept = self._sizes(recipe).shared_by(1), self._sizes(recipe).bytes, 0
        if not recipe.offloaded("gradients") and not recipe.offloaded("parameters"):
            kept += DTYPE_BYTES[recipe.gradient_dtype] * (whole // n if recipe.zero_stage >= 2 else whole)
        if not recipe.offloaded("optimizer_states"):
            each = sum(t.bytes for t in recipe.state_tensors((2**20,))) / 2**20
            kept += int(each * (whole // n if recipe.zero_stage >= 1 else whole))
        if not recipe.offloaded("parameters"):
            kept += held // n if recipe.zero_stage >= 2 else held
        return kept

    def _nearest(self, families: Sequence[_Family]) -> Candidate | None:
        """Where nothing fits: the smallest peak among those that could be smallest."""
        small = [f for f in families if f.recipe.checkpointing not in ("none", "selective")]
        held = {(*f.way, f.recipe.optimizer_impl): f.recipe for f in small}
        order = sorted(held, key=lambda key: sum(self._updating(held[key]).values()))[:6]
        tried = [
            (self.bytes(self._at(f, sizes[0])).peak, k, f, sizes[0])
            for k, f in enumerate(small)
            if (*f.way, f.recipe.optimizer_impl) in order and f.recipe.attention != "eager"
            and (sizes := self._micro_batches(f.recipe))
        ]  # fmt: skip
        if not tried:
            return None
        _, _, family, micro = min(tried, key=lambda item: item[:2])
        return self._candidate(family, micro)

    # the seven steps

    def cost(self, recipe: Recipe) -> Cost:
        return self._rates(recipe).cost(recipe.micro_batch, recipe.accumulation)

    def fits(self, recipe: Recipe) -> bool:
        found = self.bytes(recipe)
        return self._state(recipe, found) == "fits" and self._outside_fits(recipe)

    def _resized(self, recipe: Recipe, micro: int, **changes: Any) -> Recipe:
        changed = recipe.replace(micro_batch=micro, **changes)
        return changed.replace(accumulation=max(1, self.effective // changed.data_parallel // micro))

    def steps(self) -> tuple[Step, ...]:
        now = self.start
        taken: list[Step] = []
        for name, options, nothing in (
            ("1 micro-batch", self._smaller, "one sample at a time already"),
            ("2 mixed precision", self._mixed, "matrix products are in 16 bits already"),
            ("3 accumulation", self._larger, "no larger micro-batch fits, and none smaller is left"),
            ("4 checkpointing", self._checkpointed, "blocks are checkpointed already"),
            ("5 SDPA / flash attention", self._fused, "no stored scores to get rid of"),
            ("6 sharding", self._sharded, "one GPU: there is nobody to share with"),
            ("7 offload", self._offloaded, "nothing more to move out"),
        ):
            proposals = [*_checked(self.config, self.card, options(now))]
            step = self._step(name, now, proposals, nothing)
            taken.append(step)
            if step.taken:
                now = step.recipe
        return tuple(taken)

    def _step(self, name: str, now: Recipe, proposals: list[Recipe], nothing: str) -> Step:
        """Choose among proposals: the first (cheapest) that fits, else the smallest."""
        before = self.bytes(now)
        fitted = self.fits(now)
        raising = name.startswith("3")
        if not proposals:
            return self._stepped(name, now, False, nothing, "")
        if raising:
            good = [r for r in proposals if fitted and self.fits(r)]
            if not good:
                return self._stepped(name, now, False, nothing, "")
            why = f"{_micro(good[0])} fits: fewer passes, the same batch"
            return self._stepped(name, good[0], True, why, self._price(now, good[0]))
        chosen = next((r for r in proposals if self.fits(r)), None)
        if chosen is None:
            chosen = min(proposals, key=lambda r: self.bytes(r).peak)
        after = self.bytes(chosen)
        price = self._price(now, chosen)
        what = _difference(now, chosen)
        faster = self.cost(chosen).total < self.cost(now).total
        grown = after.peak - before.peak
        if faster and name[0] in "25" and (self.fits(chosen) or not fitted):
            moved = f"{format_gb(abs(grown))} {'more' if grown > 0 else 'less'}"
            return self._stepped(name, chosen, True, f"{what}: faster, and {moved}", price)
        if fitted:
            left = self.usable - before.peak
            return self._stepped(
                name, chosen, False, f"not needed: {format_gb(left)} are left without {what}", price
            )
        if after.peak >= before.peak:
            why = f"{what} doesn't lower the peak, which stands in {before.peak_phase}"
            return self._stepped(name, chosen, False, why, price)
        if not self._outside_fits(chosen):
            host, nvme = self._outside(chosen)
            need = f"{format_gb(host)} of host memory" + (f" and {format_gb(nvme)} of NVMe" if nvme else "")
            return self._stepped(name, chosen, False, f"{what} needs {need} per machine, not there", price)
        saved = before.peak - after.peak
        why = f"{what}: {format_gb(saved)} less" + (", and it fits" if self.fits(chosen) else "")
        return self._stepped(name, chosen, True, why, price)

    def _stepped(self, name: str, recipe: Recipe, taken: bool, why: str, price: str) -> Step:
        found = self.bytes(recipe)
        return Step(
            name, recipe, found.peak, found.peak_phase, dict(found.phases[found.peak_phase]), taken,
            self.fits(recipe), why, price,
        )  # fmt: skip

    def _smaller(self, now: Recipe) -> Iterator[Recipe]:
        sizes = [b for b in self._micro_batches(now) if b < now.micro_batch]
        for b in reversed(sizes):
            yield self._resized(now, b)

    def _larger(self, now: Recipe) -> Iterator[Recipe]:
        for b in reversed([b for b in self._micro_batches(now) if b > now.micro_batch]):
            yield self._resized(now, b)

    def _mixed(self, now: Recipe) -> Iterator[Recipe]:
        if now.compute_dtype == "fp32":
            sixteen = "amp-bf16" if "bf16" in self.card.dtypes else "amp-fp16"
            yield now.replace(precision="bf16-master" if now.zero_stage >= 2 else sixteen)

    def _checkpointed(self, now: Recipe) -> Iterator[Recipe]:
        if now.checkpointing == "none":
            if self.transformer:
                yield now.replace(checkpointing="selective")
            # all of these compute the blocks once more: the one with the smallest peak
            same = [now.replace(checkpointing=c) for c in ("full", "every-2", "every-4", "every-8")]
            valid = [*_checked(self.config, self.card, same)]
            yield from sorted(valid, key=lambda r: self.bytes(r).peak)[:1]
        elif now.checkpointing != "full":
            yield now.replace(checkpointing="full")

    def _fused(self, now: Recipe) -> Iterator[Recipe]:
        if self.transformer and now.attention == "eager":
            yield now.replace(attention="sdpa")

    def _sharded(self, now: Recipe) -> Iterator[Recipe]:
        if self.count == 1:
            return
        found = []
        masters = now.precision.replace("amp-fp16", "bf16-master").replace("amp-bf16", "bf16-master")
        for tensor, stage in self._layouts(masters):
            precision = masters if stage >= 2 else now.precision
            if (stage, tensor) != (now.zero_stage, now.tensor_parallel) and stage >= now.zero_stage:
                changes = {"zero_stage": stage, "tensor_parallel": tensor, "precision": precision}
                found += [
                    self._resized(now, b, **changes)
                    for b in (now.micro_batch,)
                    if self.effective // (self.count // tensor) % b == 0
                ]
        valid = [*_checked(self.config, self.card, found)]
        yield from sorted(valid, key=lambda r: self.cost(r).total)

    def _offloaded(self, now: Recipe) -> Iterator[Recipe]:
        found: list[Recipe] = []
        for stage in dict.fromkeys((2 if now.zero_stage == 1 else now.zero_stage, 3)):
            if stage and now.data_parallel == 1:
                continue
            plain = "fp32" if now.precision == "bf16-master" else now.precision
            for offload in self._offloads(plain, stage, now.optimizer):
                if not offload:
                    continue
                precision = now.precision
                hosted = offload[0].startswith("optimizer_states")
                if precision == "bf16-master" and hosted:
                    precision = "bf16"  # the masters are on the host
                elif stage >= 2 and precision.startswith("amp-"):
                    precision = "bf16" if hosted else "bf16-master"
                impl = "fused" if any("optimizer" in item for item in offload) else now.optimizer_impl
                try:
                    found.append(
                        now.replace(
                            offload=offload, zero_stage=stage, precision=precision, optimizer_impl=impl
                        )
                    )
                except RecipeError:
                    continue
        valid = [*_checked(self.config, self.card, found)]
        yield from sorted(valid, key=lambda r: self.cost(r).total)

    def _price(self, before: Recipe, after: Recipe) -> str:
        old, new = self.cost(before), self.cost(after)
        parts = []
        if new.recomputed > old.recomputed:
            share = (new.recomputed - old.recomputed) / max(new.flops - new.recomputed, 1)
            parts.append(f"{_flops(new.recomputed)} computed twice ({share:+.0%})")
        links = {
            "data parallel": "data parallel", "tensor parallel": "tensor parallel", "offload": "host link",
            "CPU update": "CPU update", "NVMe": "NVMe", "memory traffic": "memory traffic",
        }  # fmt: skip
        for name, shown in links.items():
            more = new.seconds.get(name, 0) - old.seconds.get(name, 0)
            if more > 0.001 * new.total:
                parts.append(f"{shown} {_seconds(more)} more")
        sent = {k: v - old.bytes.get(k, 0) for k, v in new.bytes.items() if v > old.bytes.get(k, 0)}
        parts += [f"{format_gb(size)} over {name}" for name, size in sent.items()]
        if before.compute_dtype != after.compute_dtype:
            scale = ", a loss scale" if after.grad_scaler else ""
            parts.append(f"products rounded to {after.compute_dtype}{scale}")
        for word in self._numerics(after)[0]:
            if word not in self._numerics(before)[0]:
                parts.append(word)
        if after.attention != before.attention:
            parts.append("the same result up to rounding")
        parts.append(f"a batch {_seconds(old.total)} -> {_seconds(new.total)}")
        return ", ".join(parts)

    # what stands in the way

    def bound(self) -> tuple[str, str]:
        recipe = self.start
        rows = self.bytes(recipe)
        full = footprint(self.config, recipe, self.card)
        at = rows.phases[rows.peak_phase]
        own = self._updating(recipe)
        states = sum(own[name] for name in ("parameters", "gradients", "optimizer_states"))
        if states > self.usable:
            return "states", (
                f"parameters, gradients and optimizer states alone are {format_gb(states)}, the card holds "
                f"{format_gb(self.usable)}: share, shrink or move them; no micro-batch is small enough"
            )
        logits = sum(t.bytes for t in full.tensors if _of_logits(t.name))
        moment = rows.moments.get(rows.peak_phase, "")
        if "loss." in moment or _of_logits(moment):
            logits += at["temporaries"]
        kept = at["activations"] + at["temporaries"]
        resident = at["parameters"] + at["gradients"] + at["optimizer_states"]
        if rows.peak_phase == "optimizer" or resident >= kept:
            update = f"; the update's temporaries {format_gb(at['temporaries'])}" * (
                rows.peak_phase == "optimizer"
            )
            return "states", (
                f"at the peak ({rows.peak_phase}) states are {format_gb(resident)} of {format_gb(rows.peak)}"
                f"{update}: sharding, a smaller optimizer or offload move it, a smaller micro-batch hardly"
            )
        if logits * 2 > kept:
            return "logits", (
                f"logits, their softmax and gradients are {format_gb(logits)} of {format_gb(kept)} that a "
                "micro-batch makes: fewer tokens at a time or a split vocabulary help, checkpointing doesn't"
            )
        return "activations", (
            f"at the peak ({rows.peak_phase}) activations and temporaries are {format_gb(kept)} of "
            f"{format_gb(rows.peak)}: a smaller micro-batch, checkpointing and SDPA help, sharding states "
            "doesn't"
        )

    def arithmetic(self) -> str:
        r, found = self.start, self.bytes(self.start)
        row = found.phases[found.peak_phase]
        parts = " + ".join(f"{format_gb(row[c])} {c.replace('_', ' ')}" for c in CONSUMERS if row[c])
        left = self.usable - found.peak
        whole, context = format_gb(self.card.memory_bytes), format_gb(self.context)
        card = f"{self.card.name} holds {whole}, {context} of it context"
        verdict = f"{format_gb(-left)} too much" if left < 0 else f"{format_gb(left)} left"
        each = sum(t.bytes for t in r.state_tensors((MIN_8BIT * 256,))) / (MIN_8BIT * 256)
        p, g = DTYPE_BYTES[r.parameter_dtype], DTYPE_BYTES[r.gradient_dtype]
        shared = f", shared by {r.data_parallel} (ZeRO-{r.zero_stage})" if r.zero_stage else ""
        shared += f", split by {r.tensor_parallel} (tensor parallel)" if r.tensor_parallel > 1 else ""
        count = format_count(self.config.parameter_count)
        if r.lora_rank is None:
            states = (
                f"{count} parameters x ({p} + {g} + {each:.3g}) bytes of weights, gradients, optimizer states"
            )
        else:
            trained = format_count(footprint(self.config, r, self.card).trained_count)
            states = f"{count} parameters frozen in {r.base_weights if r.quantized else r.parameter_dtype}, "
            states += f"{trained} in adapters of rank {r.lora_rank} have gradients and optimizer states"
        return (
            f"{states}{shared}; at the peak ({found.peak_phase}): {parts} = {format_gb(found.peak)}; "
            f"{card}: {verdict}"
        )

    # limits

    def limits(self, recipe: Recipe) -> tuple[int, int]:
        """(largest micro-batch, longest sequence) that fit with nothing else changed; 0: none."""
        longest = 0
        if isinstance(self.config, TransformerConfig):
            most = self.config.context if self.config.positions == "learned" else 2**22
            longest = self._largest(recipe, "sequence", most)
        return self._largest(recipe, "micro_batch", 2**20), longest

    def _largest(self, recipe: Recipe, name: str, most: int) -> int:
        """The largest value of a field with which the recipe fits: doubling, then bisection."""

        def good(value: int) -> bool:
            try:
                return self.fits(recipe.replace(**{name: value}).resolve(self.config, self.card))
            except RecipeError:
                return False

        least = 1 if self.transformer or not good(2) or good(1) else 2
        if not good(least):
            return 0
        low = least
        while low * 2 <= most and good(low * 2):
            low *= 2
        high = min(low * 2, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if good(middle) else (low, middle)
        return low

    # the answer

    def plan(self) -> Plan:
        start = self.bytes(self.start)
        found = self.search()
        candidates = tuple(self._candidate(*one) for one in found.candidates)
        base = candidates[0].recipe if candidates else self.start
        bound, why = self.bound()
        largest_micro_batch, longest_sequence = self.limits(base)
        chosen = candidates[0].peak_bytes if candidates else start.peak
        doubt = self.uncertainty(base, chosen)
        notes = list(self.start.notes(self.config, self.card))
        for candidate in candidates[:1]:
            notes += [n for n in candidate.recipe.notes(self.config, self.card) if n not in notes]
            if candidate.host_bytes and self.host_bytes is None:
                notes.append(
                    f"the best recipe takes {format_gb(candidate.host_bytes)} of host memory per machine: "
                    "no limit was given (host_bytes, --host-memory)"
                )
        return Plan(
            model=self.config.name,
            gpu=self.card,
            count=self.count,
            effective_batch=self.effective,
            start=self.start,
            start_peak=start.peak,
            start_phase=start.peak_phase,
            start_consumers=dict(start.phases[start.peak_phase]),
            fits=self.fits(self.start),
            arithmetic=self.arithmetic(),
            steps=self.steps(),
            candidates=candidates,
            alternatives=tuple(self._candidate(*one) for one in found.alternatives),
            tight=tuple(self._candidate(*one) for one in found.tight),
            next_cheaper=self._candidate(*found.before) if found.before else None,
            nearest=None if candidates else self._nearest(found.families),
            bound=bound,
            bound_why=why,
            largest_micro_batch=largest_micro_batch,
            longest_sequence=longest_sequence,
            limits=self.limits,
            searched=found.searched,
            assumptions=self.assumptions,
            uncertainty=(("context", self.context, self.context_source), *doubt),
            notes=tuple(notes),
            parameter_count=self.config.parameter_count,
        )


def _checked(config: Config, card: GPU, recipes: Any) -> Iterator[Recipe]:
    """Those of `recipes` that this model and card can run."""
    for recipe in recipes:
        try:
            yield recipe.resolve(config, card)
        except RecipeError:
            continue


def _of_logits(name: str) -> bool:
    return name.startswith("loss.") or "logits" in name


def _micro(recipe: Recipe) -> str:
    return f"micro-batch {recipe.micro_batch} x {recipe.accumulation}"


def _difference(before: Recipe, after: Recipe) -> str:
    """What a lever changes, in words."""
    parts = []
    if after.micro_batch != before.micro_batch:
        parts.append(_micro(after))
    for name in ("precision", "optimizer", "attention"):
        if getattr(after, name) != getattr(before, name):
            parts.append(str(getattr(after, name)))
    if after.checkpointing != before.checkpointing:
        parts.append(f"checkpointing {after.checkpointing}")
    if after.zero_stage != before.zero_stage:
        parts.append(f"ZeRO-{after.zero_stage}")
    if after.tensor_parallel != before.tensor_parallel:
        parts.append(f"tensor parallel {after.tensor_parallel}")
    if after.offload != before.offload:
        parts.append("offload " + " ".join(after.offload))
    return ", ".join(parts)


# -- as text ---------------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:,.3g} min" if value < 7200 else f"{value / 3600:,.3g} h"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _flops(value: int) -> str:
    for suffix, scale in (("E", 10**18), ("P", 10**15), ("T", 10**12)):
        if value >= scale:
            return f"{value / scale:.3g} {suffix}FLOP"
    return f"{value / 10**9:.3g} GFLOP"


def brief(recipe: Recipe) -> str:
    """A recipe in one short line."""
    name = "" if recipe.optimizer == "adamw" else recipe.optimizer
    impl = recipe.optimizer_impl if len(_impls(recipe.optimizer)) > 1 else ""
    parts = [recipe.precision, " ".join(filter(None, (name, impl)))]
    parts.append(f"{recipe.micro_batch} x {recipe.accumulation}")
    if recipe.attention == "eager":
        parts.append("eager")
    if recipe.checkpointing != "none":
        parts.append(f"ckpt {recipe.checkpointing}")
    if recipe.zero_stage:
        parts.append(f"ZeRO-{recipe.zero_stage}")
    if recipe.tensor_parallel > 1:
        parts.append(f"TP {recipe.tensor_parallel}")
    if recipe.lora_rank is not None:
        parts.append(f"LoRA {recipe.lora_rank}" + f" on {recipe.base_weights}" * recipe.quantized)
    if recipe.offload:
        places: dict[str, list[str]] = {}
        for item in recipe.offload:
            what, _, where = item.partition(":")
            places.setdefault(where, []).append(_SHORT[what])
        parts += [f"{' '.join(names)} to {where}" for where, names in places.items()]
    return ", ".join(parts)


_SHORT = {
    "optimizer_states": "states", "gradients": "gradients", "parameters": "weights",
    "activations": "activations",
}  # fmt: skip


def _machinery(recipe: Recipe) -> float:
    """How much has to be set up and can go wrong: tensor parallelism rewrites layers, sharding wraps them."""
    sharding = 1.0 if recipe.zero_stage >= 2 else 0.5 * (recipe.zero_stage == 1)
    return 3 * (recipe.tensor_parallel > 1) + len(recipe.offload) + sharding


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _limits(whose: str, micro_batch: int, sequence: int) -> str:
    longest = f", longest sequence {sequence:,}" if sequence else ""
    return f"{whose} and nothing else changed: largest micro-batch {micro_batch:,}{longest}"


def _page(plan: Plan, width: int, limits: bool) -> list[str]:
    def wrapped(text: str, indent: str = "") -> list[str]:
        return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ",
                             break_on_hyphens=False)  # fmt: skip

    cards = "1 card" if plan.count == 1 else f"{plan.count:,} cards"
    lines = wrapped(
        f"{plan.model} ({format_count(plan.parameter_count)} parameters) on {cards} {plan.gpu.name}, "
        f"effective batch {plan.effective_batch:,}"
        + (f" x {plan.start.sequence:,} tokens" if plan.start.sequence else "")
    )
    lines += ["", *wrapped(f"start: {brief(plan.start)}"), *wrapped(plan.arithmetic, "  ")]
    lines += wrapped(f"{'fits' if plan.fits else 'does not fit'}; {plan.bound}-bound: {plan.bound_why}", "  ")

    head = "".join(f"{name:>10}" for name in ("params", "grads", "states", "activ.", "temp.", "peak"))
    lines += ["", f"{'the seven steps (GB per GPU at the peak)':<40}{head}"]
    lines.append(_consumer_row("  start", plan.start_consumers, plan.start_peak))
    for step in plan.steps:
        mark = "+ " if step.taken else "  "
        shown = step.name if step.taken or not step.price else f"({step.name})"
        lines.append(_consumer_row(mark + shown, step.consumers, step.peak_bytes))
        lines += wrapped(step.why, "      ")
        if step.price:
            lines += wrapped(f"costs: {step.price}", "      ")
    lines.append("  (in brackets: not taken; its bytes are those it would lead to)")

    lines.append("")
    if plan.best is not None:
        lines += wrapped(f"best of {plan.searched:,} recipes by closed form: {brief(plan.best.recipe)}")
        parts = ", ".join(f"{name} {_seconds(value)}" for name, value in plan.best.cost.seconds.items())
        lines += wrapped(
            f"peak {format_gb(plan.best.peak_bytes)} in {plan.best.peak_phase}, "
            f"{format_gb(plan.best.margin_bytes)} left beyond the uncertainty; "
            f"{_seconds(plan.best.seconds)} a batch: {parts}", "  ",
        )  # fmt: skip
        for c in sorted(plan.candidates[1:], key=lambda c: _machinery(c.recipe))[:1]:
            near = c.seconds <= plan.best.seconds * (1 + COST_DOUBT)
            if near and _machinery(c.recipe) < _machinery(plan.best.recipe):
                lines += wrapped(
                    f"as fast within {COST_DOUBT:.0%} and simpler: {brief(c.recipe)}, {_seconds(c.seconds)} "
                    f"a batch, peak {format_gb(c.peak_bytes)}", "  ",
                )  # fmt: skip
        if plan.best.numerics:
            lines += wrapped("changes training: " + "; ".join(plan.best.numerics), "  ")
        if plan.best.host_bytes or plan.best.nvme_bytes:
            nvme = f", NVMe {format_gb(plan.best.nvme_bytes)}" if plan.best.nvme_bytes else ""
            lines += wrapped(f"per machine: host memory {format_gb(plan.best.host_bytes)}{nvme}", "  ")
    else:
        lines.append(f"none of {plan.searched:,} recipes fits")
        if plan.nearest is not None:
            lines += wrapped(
                f"the smallest: {brief(plan.nearest.recipe)}, peak {format_gb(plan.nearest.peak_bytes)}, "
                f"host memory {format_gb(plan.nearest.host_bytes)} per machine", "  ",
            )  # fmt: skip
    if plan.candidates:
        lines += ["", _rank_row("ways that fit, cheapest first", "peak GB", "left GB", "a batch", width)]
        lines += [line for c in plan.candidates for line in _ranked(c, width)]
    if plan.alternatives:
        lines += ["", _rank_row("ways that also change training", "peak GB", "left GB", "a batch", width)]
        for c in sorted(plan.alternatives, key=lambda c: c.seconds):
            lines += [*_ranked(c, width), *wrapped("; ".join(c.numerics), "      ")]
    if plan.tight:
        lines += [
            "",
            _rank_row("cheaper, too close for a closed form: trace", "peak GB", "left GB", "a batch", width),
        ]
        lines += [line for c in plan.tight for line in _ranked(c, width)]
    lines.append("")
    if limits:
        whose = "with the best recipe" if plan.best else "with the starting recipe"
        lines += wrapped(_limits(whose, plan.largest_micro_batch, plan.longest_sequence))
    lines.append("assumed:")
    for line in plan.assumptions.lines():
        lines += wrapped(line, "  ")
    lines.append("held back:")
    for name, size, why in plan.uncertainty:
        lines += wrapped(f"{format_gb(size)} {name}: {why}", "  ")
    for note in plan.notes:
        lines += wrapped(f"note: {note}")
    return lines


def _consumer_row(name: str, row: Mapping[str, int], peak: int) -> str:
    return f"{name:<40}" + "".join(f"{row[c] / GB:>10.2f}" for c in CONSUMERS) + f"{peak / GB:>10.2f}"


def _rank_row(what: str, peak: str, left: str, seconds: str, width: int) -> str:
    return f"{what:<{width - 30}}{peak:>10}{left:>10}{seconds:>10}"


def _ranked(candidate: Candidate, width: int) -> list[str]:
    first, *rest = _wrap(brief(candidate.recipe), width - 33)
    numbers = f"{candidate.peak_bytes / GB:.2f}", f"{candidate.margin_bytes / GB:.2f}"
    row = _rank_row("  " + first, *numbers, _seconds(candidate.seconds), width)
    return [row, *("      " + more for more in rest)]
