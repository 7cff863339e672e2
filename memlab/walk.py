"""Walks through a training step's operations and counts what is alive, moment by moment. No torch.

The rule is autograd's: a tensor lives until its last user is done, where users are operations to come, the
backward of operations that saved it, checkpoints, autocast's cache of weight copies and the script's
variables. Backward runs the operations in reverse; a gradient lives until it has been read. `Walk.run()`
leaves in `peaks` the largest moment of each phase, by consumer, and in `tensors()` what is kept, by name.

Sources: torch.optim (what an update allocates); ZeRO: Rajbhandari et al., arXiv:1910.02054; whole tensors
dealt out in ZeRO-1: torch.distributed.optim.ZeroRedundancyOptimizer; tensor parallelism: Shoeybi et al.,
arXiv:1909.08053, as DTensor does it; prefetch and reduce-scatter of sharded weights: torch.distributed.fsdp
(FSDP2).
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from memlab.hardware import GPU
from memlab.models import ConvConfig, TransformerConfig
from memlab.operations import Op, Program, Store, Unit, Value, streams
from memlab.recipe import BLOCK_8BIT, MIN_8BIT, Recipe, StateTensor, Weight
from memlab.units import CONSUMERS, DTYPE_BYTES, PHASES


@dataclass(frozen=True)
class Tensor:
    """A named tensor of the step, or `count` equal ones ('blocks.*.…' stands for every block).

    `phases` are those in which it is alive; `why` says why it is kept.
    """

    name: str
    consumer: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    phases: tuple[str, ...]
    why: str

    @property
    def bytes(self) -> int:
        """All `count` together."""
        return self.count * math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient while backward runs; `refs` operations are still to read it."""

    bytes: int
    refs: int = 1


@dataclass(frozen=True)
class Holding:
    """The weights on one rank before ZeRO shards them, in the module's order, and how many of each kind.

    kinds: (a weight, how many have its shape and dtype and are trained as it is).
    """

    all: tuple[Weight, ...]
    trained: tuple[Weight, ...]
    kinds: tuple[tuple[Weight, int], ...]

    @staticmethod
    def of(config: TransformerConfig | ConvConfig, recipe: Recipe) -> Holding:
        r = recipe
        kept = r.parameter_dtype, r.adapter_dtype, r.lora_rank, r.lora_targets, r.base_weights
        key = (config, r.tensor_parallel, *kept)
        if key not in _HOLDINGS:
            if len(_HOLDINGS) >= 64:
                _HOLDINGS.clear()
            _HOLDINGS[key] = Holding.made([_on_rank(w, r.tensor_parallel) for w in r.weights(config)])
        return _HOLDINGS[key]

    @staticmethod
    def made(weights: Iterable[Weight]) -> Holding:
        held = tuple(weights)
        kinds: dict[tuple[Any, ...], list[Weight]] = {}
        for weight in held:
            kinds.setdefault((weight.shape, weight.dtype, weight.trained), []).append(weight)
        return Holding(
            held, tuple(w for w in held if w.trained), tuple((w[0], len(w)) for w in kinds.values())
        )

    @cached_property
    def trained_counts(self) -> tuple[int, ...]:
        return tuple(weight.count for weight in self.trained)

    def dealt(self, ranks: int) -> Holding:
        """Of the trained ones, those whose states the fullest rank keeps in ZeRO-1.

        ZeroRedundancyOptimizer gives whole tensors to ranks: the largest first, each to the emptiest rank.
        """
        if ranks not in self._dealt:
            hands: list[list[Weight]] = [[] for _ in range(min(ranks, len(self.trained)))]
            loads = [(0, i) for i in range(len(hands))]
            for weight in sorted(self.trained, key=lambda w: -w.count):
                load, i = loads[0]
                hands[i].append(weight)
                heapq.heapreplace(loads, (load + weight.count, i))
            self._dealt[ranks] = Holding.made(hands[max(loads)[1]])
        return self._dealt[ranks]

    @cached_property
    def _dealt(self) -> dict[int, Holding]:
        return {}

    def shared_by(self, ranks: int) -> int:
        """Trained values on one of `ranks` that divide each weight."""
        return sum(n * -(-kind.count // ranks) for kind, n in self.kinds if kind.trained)

    @cached_property
    def values(self) -> int:
        """Of all weights, frozen ones included."""
        return sum(n * kind.count for kind, n in self.kinds)

    @cached_property
    def bytes(self) -> int:
        return sum(n * kind.bytes for kind, n in self.kinds)


_HOLDINGS: dict[tuple[Any, ...], Holding] = {}


@lru_cache(maxsize=64)
def _buffers(config: TransformerConfig | ConvConfig) -> int:
    return sum(buffer.bytes for buffer in config.buffers())


def leaving(program: Program) -> int:
    """Bytes that go to the host where saved tensors do: once for every operation that saves them.

    Small ones stay. A checkpoint's inputs go in their place.
    """
    total = 0
    for unit in program.units:
        for stores in [unit.inputs] if unit.checkpointed else [op.saves for op in unit.ops]:
            sizes = {id(store): store.bytes for store in stores if store.bytes >= 1024}
            total += unit.times * sum(sizes.values())
    return total


#: A micro-batch that stands for any: `bytes // ANY` are those of each sample, `bytes % ANY` are there once.
ANY = 1 << 64
#: `bytes % ONE` are those of a micro-batch of one, since ANY % ONE is 1.
ONE = ANY - 1


@dataclass(slots=True, frozen=True)
class Moment:
    """Something that was the largest so far, for some micro-batch."""

    total: int
    live: dict[str, int]
    name: str


def largest(
    noted: Mapping[str, list[Moment]], micro_batch: int
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """({phase: {consumer: bytes}}, {phase: what happens then}) at the largest moment of each phase."""
    rows, names = {}, {}
    for phase in PHASES:
        most = max(noted[phase], key=lambda moment: _bytes(moment.total, micro_batch))
        rows[phase] = {consumer: _bytes(size, micro_batch) for consumer, size in most.live.items()}
        names[phase] = most.name
    return rows, names


def _bytes(size: int, micro_batch: int) -> int:
    return size % ANY + size // ANY * micro_batch


class Walk:
    """Counts what is alive, operation by operation, and keeps the largest moments of each phase.

    gpu: whose attention kernels run. micro_batch: the recipe's, or `ANY`: then `noted` holds the `largest`
    of all that are `in_proportion`.
    """

    def __init__(
        self,
        config: TransformerConfig | ConvConfig,
        recipe: Recipe,
        device: str,
        gpu: GPU | None = None,
        micro_batch: int = 0,
    ) -> None:
        self.config, self.recipe, self.device, self.gpu = config, recipe, device, gpu
        self.micro_batch = micro_batch or recipe.micro_batch
        self.holding = Holding.of(config, recipe)
        self.held, self.specs = self.holding.all, self.holding.trained
        #: those that this rank updates
        self.own = self.holding.dealt(recipe.data_parallel) if recipe.zero_stage == 1 else self.holding
        self.live = dict.fromkeys(CONSUMERS, 0)
        self.largest = dict.fromkeys(CONSUMERS, 0)
        self.total = 0
        self.now = ""
        self.noted: dict[str, list[Moment]] = {}
        self._begin("setup")
        self.host: dict[str, int] = {}

        self.saved: list[tuple[Store, int]] = []  # what the forward leaves, and how often
        self.extra: list[int] = []  # activations of the equal units that a unit stands for
        self.away = recipe.offloaded("activations") is not None  # saved tensors wait outside the GPU
        self.root = 0  # whole weights outside the blocks, where weights are streamed
        self.cached: list[Store] = []  # autocast's copies of the weights, and those of the equal units
        self.cached_extra = 0
        self.left: list[Store] = []  # outputs that selective checkpointing kept in vain
        self.pending: dict[object, Gradient] = {}  # value -> its gradient
        self.tied = 0  # the head's gradient of a tied embedding, until the embedding's own is added
        self.rooted: list[tuple[int, int]] = []  # the same of weights outside the blocks (fully_shard's root)
        self.sent = 0  # the last reduce-scatter's input, kept until the next
        self.whole: list[tuple[int, int]] = []  # (bytes, values) of gradients not scattered or moved out yet

        self.streams = streams(recipe)
        self.scatters = recipe.zero_stage >= 2 or recipe.offloaded("gradients") is not None
        #: With accumulation the second micro-batch is walked, alone: it holds what the first does, and the
        #: gradients, the last logits and loss besides. The third is like it.
        self.again = recipe.accumulation > 1
        self.have_gradients = self.again or not recipe.set_to_none
        self.states: dict[tuple[int, ...], list[StateTensor]] = {}  # by the shape of what is updated
        self.gradient_size = DTYPE_BYTES[recipe.gradient_dtype]

    # what is alive

    def take(self, consumer: str, size: int) -> None:
        live = self.live[consumer] = self.live[consumer] + size
        self.total += size
        if live > self.largest[consumer]:
            self.largest[consumer] = live
        if self.total > self.top or self.total % ONE > self.one:
            self._note()

    def give(self, consumer: str, size: int) -> None:
        self.live[consumer] -= size
        self.total -= size

    def briefly(self, size: int) -> None:
        if size:
            self.take("temporaries", size)
            self.give("temporaries", size)

    def hold(self, store: Store, consumer: str) -> None:
        store.consumer = consumer
        self.take(consumer, store.bytes)

    def release(self, store: Store) -> None:
        store.refs -= 1
        if store.refs == 0:
            self.give(store.consumer, store.bytes)

    def _begin(self, phase: str) -> None:
        self.now, self.top, self.one = "its beginning", -1, -1
        self.current: list[Moment] = []
        self.noted[phase] = self.current
        self._note()

    def _note(self) -> None:
        """No moment before is as large for one sample and for many: this one is the largest for some."""
        total, one = self.total, self.total % ONE
        if total > self.top:
            self.top, self.one = total, one
        while self.current and self.current[-1].total <= total and self.current[-1].total % ONE < one:
            self.current.pop()
        self.current.append(Moment(total, dict(self.live), self.now))

    # the step

    def run(self) -> None:
        """The whole step."""
        self.program = Program(self.config, self.recipe, self.device, self.gpu, self.micro_batch)
        self.extra = [0] * len(self.program.units)
        if self.away:
            self.host["activations"] = leaving(self.program)
        self._settle()
        for store in self.program.batch:
            store.refs = 2  # for the script, and as the first unit's input
            self.hold(store, "activations")
        self._forward()
        self._backward()
        self._step()
        self.peaks, self.moments = largest(self.noted, 1)

    def update(self) -> dict[str, int]:
        """The update's largest moment alone, {consumer: bytes}, without the batch, logits and loss."""
        self._settle()
        if not self.have_gradients and not self.recipe.offloaded("gradients"):
            self.take("gradients", self._gradients())
        self._step()
        return max(self.noted["optimizer"], key=lambda m: m.total).live

    def _step(self) -> None:
        self._begin("optimizer")
        self.now = "the update"
        if not self.recipe.offloaded("optimizer_states"):
            self.briefly(sum(t.bytes for t in self._update()))

    def _gradients(self) -> int:
        values = sum(n * self._share(kind.count, 2) for kind, n in self.holding.kinds if kind.trained)
        if self.stays_wide:
            assert isinstance(self.config, TransformerConfig)
            c = self.config
            values += (c.vocab - -(-c.vocab // self.recipe.tensor_parallel)) * c.hidden
        return values * self.gradient_size

    def _settle(self) -> None:
        """What stays through the whole step."""
        kinds = self.holding.kinds
        for what, size in (
            ("parameters", sum(n * self._share(w.count, 3) * DTYPE_BYTES[w.dtype] for w, n in kinds)),
            (
                "optimizer_states",
                sum(n * t.bytes for kind, n in self.own.kinds if kind.trained for t in self._states(kind)),
            ),
        ):
            if self.recipe.offloaded(what):
                self.host[what] = size
            else:
                self.take(what, size)
        self.take("parameters", _buffers(self.config))
        gradients = self._gradients()
        if self.recipe.buckets:
            self.take("gradients", gradients)
        if self.recipe.offloaded("gradients"):
            self.host["gradients"] = gradients
        elif self.have_gradients:
            self.take("gradients", gradients)

    def _share(self, count: int, stage: int) -> int:
        """Values of one tensor that a GPU keeps, if ZeRO shards its kind from `stage` on."""
        return -(-count // self.recipe.data_parallel) if self.recipe.zero_stage >= stage else count

    # forward

    def _forward(self) -> None:
        # the last micro-batch's logits and loss, which variables hold until they're replaced
        stale = [variable.bytes for variable in self.program.variables] if self.again else []
        leaf = self.program.leaf.bytes if self.again and self.program.leaf is not None else 0
        self.take("activations", sum(stale) + leaf)
        self.take("temporaries", leaf)  # its gradient
        self._begin("forward")
        self.root = self._weights(*(unit for unit in self.program.units if unit.label not in _STREAMED))
        self.take("temporaries", self.root)
        gathered = self.root  # what was gathered last, in one piece: kept until the next has been cut up
        if self.program.leaf is not None:
            self.program.leaf.store.refs = 1
        for store in self.program.shared:
            store.refs = 1
            kept = store.saved or self.recipe.checkpointing != "none"
            self.hold(store, "activations" if kept else "temporaries")
        for i, unit in enumerate(self.program.units):
            if unit.label == "loss":
                self.give("activations", sum(stale[:1]))
                for store in self.program.shared:  # the model's own variables
                    self.release(store)
            window = self._window(unit)
            self.take("temporaries", window)
            if window and self.recipe.zero_stage == 3:
                self.now = "all-gather"
                self.briefly(gathered)
                gathered = window // 2
            activations, temporaries = self.live["activations"], self.live["temporaries"]
            self._run(unit, i)
            if unit.checkpointed:
                for store in unit.inputs if not self.away else ():
                    store.refs += 1
            if unit.entry is not None:
                self.release(unit.entry.store)
            grown = self.live["activations"] - activations
            copies = (self.live["temporaries"] - temporaries) * (unit.times - 1)
            if self.away:
                grown = self._cached_outputs(unit)
            self.extra[i] = grown * (unit.times - 1)
            self.take("activations", self.extra[i])
            self.take("temporaries", copies)
            self.cached_extra += copies
            self.give("temporaries", window)
        self._end_autocast()
        self.give("activations", sum(stale[1:2]))
        self.now = "the loss's own gradient, 1"
        old_share = sum(stale[2:])
        self.give("temporaries", leaf)  # the last micro-batch's graph went with the variables
        self.give("activations", leaf)
        for store in (*self.program.variables[2:], self.program.seed):
            store.refs = 1
            store.why = store.why or "the script's variable"
            self.hold(store, "activations")
            self.give("activations", old_share)
            old_share = 0
        self._list_saved()

    def _run(self, unit: Unit, i: int, again: bool = False) -> None:
        """A unit's forward. `again`: recomputed in backward, up to the last operation that saves."""
        save = again or not (unit.checkpointed or self.away)
        ops: list[Op] = unit.ops
        waiting: list[Store] = []
        stop: Op | None = None
        if again:
            last = max(n for n, op in enumerate(ops) if op.packs)
            stop = ops[last]
            # what the operations left out would have read is in the model's variables until it stops
            made = {id(store) for op in ops[:last] for store in op.made}
            waiting = [x.store for op in ops[last + 1 :] for x in op.ins if id(x.store) in made]
            if self.recipe.checkpointing == "selective":
                self.left += [store for op in ops[last + 1 :] if op.linear for store in op.made]
            ops = ops[: last + 1]
            for store in waiting:
                store.refs += 1
        else:
            unit.exit.store.refs += 1  # for the unit that follows, or the script's variable
            if unit.exit.store is self.program.logits:
                unit.exit.store.refs += 1
        leaf = self.program.leaf and self.program.leaf.store
        follows = i + 1 < len(self.program.units) and self.program.units[i + 1].checkpointed
        for op in ops:
            for x in op.ins:
                x.store.refs += 1
            for store in op.made if not op.outs else ():
                store.refs += 1  # constants: until the unit ends
        stay = {id(store) for op in ops for store in op.saves} if save else set()
        if again:
            stay |= {id(store) for store in waiting} | {id(x.store) for x in ops[-1].ins}
        for op in ops:
            self.now = f"recomputing {op.name}" if again else op.name
            kept = op.linear and unit.checkpointed and self.recipe.checkpointing == "selective"
            for store in op.casts:
                store.refs += 1
                self.cached.append(store)
                self.hold(store, "activations" if save and store in op.saves else "temporaries")
            made_now = [] if again and kept else op.made
            if op is stop and not op.computes:  # recomputation stops as its last saved tensor is there
                made_now = [store for store in made_now if store in op.saves]
            made_now = [*op.copies, *made_now]
            for store in made_now:
                stays = (kept and store not in op.copies) or id(store) in stay or store is leaf
                if store is unit.exit.store and not again:
                    stays = stays or store.saved or follows or self.away
                self.hold(store, "activations" if stays else "temporaries")
            self.briefly(op.scratch)
            if save:
                for store in op.saves:
                    store.refs += 1
            if kept and not again:
                for store in op.made:
                    store.refs += 1
            for store in made_now:
                if store.refs == 0:
                    self.give(store.consumer, store.bytes)
            if kept and again:
                for store in op.made:
                    if op is stop:
                        self.left.append(store)  # nobody takes it out of the cache
                    else:
                        self.release(store)
            for x in op.ins:
                self.release(x.store)
        for op in ops:
            for store in op.made if not op.outs else ():
                self.release(store)
        for store in waiting:
            self.release(store)

    def _cached_outputs(self, unit: Unit) -> int:
        """Bytes in selective checkpointing's own cache: no hook on saved tensors moves them out."""
        if self.recipe.checkpointing != "selective" or not unit.checkpointed:
            return 0
        made = {id(store): store for op in unit.ops if op.linear for store in op.made}
        return sum(store.bytes for store in made.values())

    def _end_autocast(self) -> None:
        for store in self.cached:
            self.release(store)
        self.cached.clear()
        self.give("temporaries", self.cached_extra)
        self.cached_extra = 0

    def _list_saved(self) -> None:
        self.saved = [(store, 1) for store in self._standing() if store.refs > 0]
        seen: set[int] = set()
        for unit in self.program.units:
            for op in unit.ops:
                for store in (*op.made, *op.casts, *op.copies):
                    if store.refs > 0 and id(store) not in seen:
                        seen.add(id(store))
                        self.saved.append((store, unit.times))

    def _standing(self) -> list[Store]:
        program = self.program
        return [*program.batch, *program.shared, *program.variables[2:], program.seed]

    # weights that are whole only while they're used

    def _weights(self, *units: Unit) -> int:
        """Whole weights of units; one that two of them use is there once."""
        if not self.streams:
            return 0
        counts = {name: count for unit in units for op in unit.ops for name, count in op.params}
        return sum(counts.values()) * DTYPE_BYTES[self.recipe.compute_dtype]

    def _window(self, unit: Unit) -> int:
        """The block at work and the next one, whose weights are fetched meanwhile (FSDP2 does so)."""
        return 2 * self._weights(unit) if unit.label in _STREAMED else 0

    # backward

    def _backward(self) -> None:
        self._begin("backward")
        units = self.program.units
        self.pending[units[-1].exit.key] = Gradient(0)
        for i in reversed(range(len(units))):
            unit = units[i]
            window = self._window(unit)
            self.take("temporaries", window)
            gradients = self.live["gradients"]
            self._back(unit, i, window)
            self.give("activations", self.extra[i])
            self.take("gradients", (self.live["gradients"] - gradients) * (unit.times - 1))
            self.give("temporaries", window)
        self.whole += self.rooted
        self.rooted.clear()
        self.give("temporaries", self.root)
        self._scatter()
        self.give("temporaries", self.sent)
        self.sent = 0
        self.release(self.program.seed)

    def _back(self, unit: Unit, i: int, window: int) -> None:
        there = not unit.checkpointed
        for n in reversed(range(len(unit.ops))):
            op = unit.ops[n]
            if op.packs and not there:  # the first saved tensor that is asked for
                for store in unit.inputs if self.away else ():
                    if store.refs == 0:
                        self.hold(store, "activations")
                    store.refs += 1
                self._run(unit, i, again=True)
                self._end_autocast()
                for store in unit.inputs if self.away else ():
                    self.release(store)
                there = True
            self._back_op(op, fetch=self.away and not unit.checkpointed)
            if n % (len(unit.ops) // unit.blocks) == 0:
                if self.recipe.zero_stage >= 2 and unit.label not in _STREAMED:
                    self.rooted += self.whole  # one group with all that isn't in a block: the last to go
                    self.whole.clear()
                own = window // 2  # freed before its gradients go, the next one's are there
                self.give("temporaries", own)
                self._scatter()
                self.take("temporaries", own)
        if unit.checkpointed:
            for store in (*(unit.inputs if not self.away else ()), *self.left):
                self.release(store)
            self.left.clear()

    def _back_op(self, op: Op, fetch: bool = False) -> None:
        """`fetch`: what it saved comes back from the host for as long as it runs."""
        fetched = sum({id(store): store.bytes for store in op.saves}.values()) if fetch else 0
        self.take("activations", fetched)
        incoming = [self.pending.pop(out.key) for out in op.outs if out.key in self.pending]
        self.now = f"backward of {op.name}"
        made: list[tuple[Value, Gradient]] = []
        params = op.params if incoming and op.trains else []
        if incoming:
            first = incoming[0]
            for x in op.grads:
                if (op.passes and x.bytes == first.bytes) or op.slices:
                    first.refs += 1
                    made.append((x, first))
                else:
                    made.append((x, self._gradient(x.bytes)))
        lasting = (
            op.param_dtype == self.recipe.gradient_dtype and not self.have_gradients and not self.scatters
        )
        for name, count in params:
            whose = "gradients" if lasting and not self._shared(name) else "temporaries"
            self.take(whose, count * DTYPE_BYTES[op.param_dtype])
        wide = self._wide(op) if params else 0
        if wide and self.stays_wide:
            wide -= params[0][1] * DTYPE_BYTES[op.param_dtype]
            if lasting:
                self.take("gradients", wide)
                wide = 0
        self.take("temporaries", wide)
        if incoming:
            self.briefly(op.back)
        if self.program.leaf is not None and self.program.leaf in op.outs:
            incoming = []  # becomes its `.grad`, which lives as long as autograd's graph
        for gradient in incoming:
            self._drop(gradient)
        for store in op.saves if not fetch else ():
            self.release(store)
        self.give("activations", fetched)
        for x, gradient in made:
            self._deliver(x, gradient)
        for name, count in params:
            self._accumulate(op, name, count)
        self.give("temporaries", wide)

    def _wide(self, op: Op) -> int:
        """Bytes of the gradient of an embedding split by vocabulary, which DTensor makes for all of it.

        The rank's rows are cut out where it is reduced, or added to that of a tied head; else at the update.
        """
        c = self.config
        split = self.recipe.tensor_parallel > 1 and isinstance(c, TransformerConfig) and not op.ins
        if not split or op.params[0][0] != "embed.token.weight":
            return 0
        assert isinstance(c, TransformerConfig)
        return c.vocab * c.hidden * DTYPE_BYTES[op.param_dtype]

    @property
    def stays_wide(self) -> bool:
        tied = isinstance(self.config, TransformerConfig) and self.config.tied
        return self.recipe.tensor_parallel > 1 and not self.scatters and not tied

    def _gradient(self, size: int) -> Gradient:
        self.take("temporaries", size)
        return Gradient(size)

    def _drop(self, gradient: Gradient) -> None:
        gradient.refs -= 1
        if gradient.refs == 0:
            self.give("temporaries", gradient.bytes)

    def _deliver(self, x: Value, gradient: Gradient) -> None:
        """A second gradient of a value is added to the first: autograd makes a third tensor for the sum."""
        if not x.needs:  # a kernel that makes all of its gradients
            self._drop(gradient)
        elif x.key in self.pending:
            old = self.pending[x.key]
            self.pending[x.key] = self._gradient(x.bytes)
            self._drop(old)
            self._drop(gradient)
        else:
            self.pending[x.key] = gradient

    def _accumulate(self, op: Op, name: str, count: int) -> None:
        """A weight's gradient goes to `.grad`: as it is, cast to fp32, added, or on its way out."""
        size = count * DTYPE_BYTES[op.param_dtype]
        stays = "temporaries" if self.have_gradients or self.scatters else "gradients"
        if not self.scatters and op.param_dtype != self.recipe.gradient_dtype:  # autocast: first the copy's
            final = count * self.gradient_size
            self.take("temporaries" if self._shared(name) else stays, final)
            self.give("temporaries", size)
            size = final
        if self._shared(name):
            if not self.tied:
                self.tied = size  # the head's gradient waits for the embedding's
                return
            self.take(stays, size)  # their sum is a third tensor
            self.give("temporaries", size + self.tied)
            self.tied = 0
        if self.scatters:
            self.whole.append((size, count))
            if self.recipe.zero_stage < 2:
                self._scatter()
        elif self.have_gradients:
            self.give("temporaries", size)

    def _shared(self, name: str) -> bool:
        return (
            name == "embed.token.weight" and isinstance(self.config, TransformerConfig) and self.config.tied
        )

    def _scatter(self) -> None:
        """ZeRO-2 and 3: each GPU keeps its part of a block's gradients; offload: none."""
        if self.recipe.zero_stage >= 2 and self.whole:
            self.now = "reduce-scatter"
            self.give("temporaries", self.sent)
            # its input: a copy of the block's gradients in one piece
            self.sent = sum(size for size, _ in self.whole)
            self.take("temporaries", self.sent)
        for size, count in self.whole:
            if not self.have_gradients and not self.recipe.offloaded("gradients"):
                self.take("gradients", self._share(count, 2) * self.gradient_size)
            self.give("temporaries", size)
        self.whole.clear()

    # the optimizer

    def _states(self, spec: Weight) -> list[StateTensor]:
        """What one GPU keeps for a parameter."""
        shape = self._shard(spec)
        if shape not in self.states:
            states = list(self.recipe.state_tensors(shape))
            counted = self.recipe.optimizer in ("adam", "adamw", "adafactor")
            # torch keeps step counters in CPU memory, unless the update is fused
            if counted and self.device == "cpu" and self.recipe.optimizer_impl != "fused":
                states.append(StateTensor("step", (), "fp32"))
            self.states[shape] = states
        return self.states[shape]

    def _shard(self, spec: Weight) -> tuple[int, ...]:
        """The part of a parameter that this GPU updates: a flat run of values; whole rows for Adafactor."""
        if self.recipe.zero_stage <= 1:
            return spec.shape
        if self.recipe.optimizer == "adafactor":
            return (self._share(spec.shape[0], 1), *spec.shape[1:])
        return (self._share(spec.count, 1),)

    def _update(self) -> list[Tensor]:
        """The temporaries of `optimizer.step()` at its worst moment."""
        r = self.recipe
        kinds = [(self._shard(kind), n) for kind, n in self.own.kinds if kind.trained]
        values = sum(n * math.prod(shape) for shape, n in kinds)
        found = []

        def add(name: str, count: int, why: str, dtype: str = r.state_dtype) -> None:
            if count:
                found.append(Tensor(name, "temporaries", (count,), dtype, 1, ("optimizer",), why))

        if r.master_dtype:
            add(
                "fp32 gradients",
                values,
                "the optimizer works on master weights: all gradients are cast at once",
            )
        if r.optimizer in ("adam", "adamw"):
            name, why = "sqrt(exp_avg_sq)", "the denominator of the update"
            if r.optimizer_impl == "foreach":
                add(name, values, f"{why}, of all parameters at once")
            elif r.optimizer_impl == "for-loop":
                counts = (0, *(math.prod(self._shard(spec)) for spec in self.own.trained))
                worst = max(before + 2 * now for before, now in pairwise(counts))
                add(name, worst, f"{why}: the last parameter's, this one's and its square root")
        elif r.optimizer == "adafactor":
            name = "variance estimate"
            if r.optimizer_impl == "foreach":
                add(name, values, "row times column statistics, of all parameters at once")
            else:
                worst = means = before = 0
                for shape in map(self._shard, self.own.trained):
                    now = math.prod(shape)
                    if len(shape) > 1:
                        means = now // shape[-1] + now // shape[-2]
                    worst = max(worst, before + means + now * (1 if len(shape) > 1 else 2))
                    before = now
                why = "row times column statistics (the last parameter, this one), and means"
                add(name, worst, why)
        elif r.optimizer == "adamw-8bit":
            sizes = [math.prod(shape) for shape, _ in kinds]
            large = max((n for n in sizes if n >= MIN_8BIT), default=0)
            blocks = -(-large // BLOCK_8BIT) * BLOCK_8BIT
            why = "the largest parameter's moments in fp32 and its update"
            add("exp_avg, exp_avg_sq, update", 3 * blocks, why, "fp32")
            if r.gradient_dtype != "fp32" and not r.master_dtype:
                add("fp32 gradient", large, "the largest parameter's", "fp32")
        return found

    # what there is, by name

    def tensors(self) -> Iterator[Tensor]:
        """What the step keeps on the GPU, equal tensors of all blocks together; the update's temporaries."""
        r = self.recipe
        always = PHASES
        later = PHASES[1:] if r.set_to_none and r.accumulation == 1 else PHASES
        rows: dict[tuple[Any, ...], int] = {}

        def count(*key: Any, n: int = 1) -> None:
            rows[key] = rows.get(key, 0) + n

        for weight in self.held if not r.offloaded("parameters") else ():
            part = weight.shape if r.zero_stage < 3 else (self._share(weight.count, 3),)
            why = "trained" if weight.trained else "frozen"
            count(_any_block(weight.name), "parameters", part, weight.dtype, always, why)
        for spec in self.specs:
            name = _any_block(spec.name)
            if not r.offloaded("gradients"):
                part = spec.shape if r.zero_stage < 2 else (self._share(spec.count, 2),)
                if self.stays_wide and name == "embed.token.weight":
                    part = (self.config.vocab, *part[1:])  # type: ignore[union-attr]
                count(f"{name}.grad", "gradients", part, r.gradient_dtype, later, "the update needs it")
            if r.buckets:
                why = "DistributedDataParallel's buckets, where gradients are reduced"
                count(f"{name}.grad in its bucket", "gradients", spec.shape, r.gradient_dtype, always, why)
        for spec in self.own.trained if not r.offloaded("optimizer_states") else ():
            name, why = _any_block(spec.name), f"{r.optimizer} keeps it from step to step"
            for state in self._states(spec):
                count(f"{name} {state.name}", "optimizer_states", state.shape, state.dtype, always, why)
        for buffer in self.config.buffers():
            name, why = _any_block(buffer.name), "a buffer, not trained"
            count(name, "parameters", buffer.shape, buffer.dtype, always, why)
        for store, n in self.saved:
            stays = store in self.program.batch or store in self.program.variables
            phases = always if stays else ("forward", "backward")
            why = "the batch" if store in self.program.batch else store.why or "the input of a checkpoint"
            count(_any_block(store.name), "activations", store.shape, store.dtype, phases, why, n=n)
        for (name, consumer, shape, dtype, phases, why), n in rows.items():
            yield Tensor(name, consumer, shape, dtype, n, phases, why)
        if not r.offloaded("optimizer_states"):
            yield from self._update()


#: Units whose weights and activations come and go, where they are sharded or offloaded.
_STREAMED = ("block", "stage", "transition")

_SPLIT_ROWS = re.compile(r"attn\.(qkv|query|key|value)\.|mlp\.(up|gate)\.|^embed\.token|^head\.")
_SPLIT_COLUMNS = re.compile(r"(attn\.out|mlp\.down)\.weight")


def _on_rank(weight: Weight, share: int) -> Weight:
    """The part of a parameter on one of `share` tensor-parallel GPUs, as Megatron splits a transformer."""
    if share > 1 and _SPLIT_ROWS.search(weight.name):
        return replace(weight, shape=(-(-weight.shape[0] // share), *weight.shape[1:]))
    if share > 1 and _SPLIT_COLUMNS.search(weight.name):
        return replace(weight, shape=(weight.shape[0], weight.shape[1] // share))
    return weight


def _any_block(name: str) -> str:
    """'blocks.7.attn.out.weight' -> 'blocks.*.attn.out.weight'."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
