"""The CUDA caching allocator's rules: what a stream of allocations makes PyTorch reserve, and where it fails.

`torch.cuda.memory_allocated` counts blocks, not requests, and `nvidia-smi` shows what the allocator has
reserved plus the CUDA context. `Allocator` follows PyTorch's native allocator block by block, so that both
numbers and the out-of-memory error come from its rules and not from an estimate:

* a request is rounded up to 512 bytes, or to a division of a power of two (`roundup_power2_divisions`);
* up to 1 MiB it is served from 2 MiB segments (the small pool), below 10 MiB from 20 MiB segments
  (`large_segment_size_mb`), above from a segment of its own, rounded up to 2 MiB;
* best fit by (size, address) among the free blocks of its pool; the rest is split off if it is at least 512
  bytes (small pool, expandable segments) or more than 1 MiB (large pool): 11.5 MiB occupy a block of 12 MiB;
* blocks of `max_split_size_mb` and more are never split, and serve only requests at least that large;
* a freed block merges with its free neighbours;
* when the card is full: release oversize blocks, then all unsplit cached blocks, try again, then fail.

Source: PyTorch 2.13, c10/core/AllocatorConfig.h (sizes and options) and c10/cuda/CUDACachingAllocator.cpp.
Left out: everything with more than one stream (`record_stream`, events), private pools (CUDA graphs,
`MemPool`), `backend:cudaMallocAsync`. Nothing here needs torch or a GPU.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memlab.units import GIB, KIB, MIB, TIB, unknown_name

MIN_BLOCK = 512  # kMinBlockSize: every block is a multiple of it
SMALL_SIZE = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: segments of the small pool, and the pages of its expandable segment
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE = 2 * MIB  # kRoundLarge: such segments are multiples of it
UNLIMITED = 1 << 62

#: Where the driver puts each new segment. Best fit takes the lowest address among equal sizes, so the order
#: of addresses decides which block is cut, and with it what is reserved. No document of NVIDIA's states it.
#: It is inferred from twenty published T4 runs whose reserved bytes are known: `split` reproduces all of
#: them, `pools` 19, `descending` 15, `ascending` 12 (worst -8.9 %). `replay_orders` gives the range over all
#: four.
ORDERS: Mapping[str, str] = {
    "split": "segments up to 20 MiB above the last one, larger ones below it",
    "pools": "segments of the small pool (2 MiB) above the last one, all others below it",
    "descending": "each segment below the last one",
    "ascending": "each segment above the last one",
}
_ASCENDING_UP_TO = {"split": 20 * MIB, "pools": 2 * MIB, "descending": 0, "ascending": UNLIMITED}

_SHIFT = 48  # a free block's key is size << 48 | address: ordered by size, then by address
_MIDDLE = 1 << 46  # ascending addresses start here, descending ones end here
_EXABYTE = 1 << 60  # PyTorch refuses such a request out of hand

_ALLOCATED, _FREE, _UNMAPPED, _GONE = range(4)


# --- options ------------------------------------------------------------------------------------------------

_INTERVALS = 16  # roundup_power2_divisions has one entry for each power of two from 1 MiB to 64 GiB
_OTHER_OPTIONS = frozenset({  # real options that change no byte of device memory on one stream
    "pinned_use_background_threads", "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_free_catch_all", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
})  # fmt: skip
_OPTIONS = (
    "max_split_size_mb", "max_non_split_rounding_mb", "expandable_segments", "roundup_power2_divisions",
    "garbage_collection_threshold", "large_segment_size_mb", "per_process_memory_fraction", "backend",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AllocatorConfig:
    """The options of `PYTORCH_ALLOC_CONF` that move device memory; the defaults are PyTorch's.

    `roundup_power2_divisions` holds one number of divisions for each power of two from 1 MiB to 64 GiB (0:
    off); an int stands for the same number everywhere. `garbage_collection_threshold` acts only together with
    `per_process_memory_fraction` < 1, as in PyTorch. Raises ValueError for what PyTorch refuses.
    """

    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None  # None: 20 MiB
    expandable_segments: bool = False
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float = 0.0
    large_segment_size_mb: int = 20
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.large_segment_size_mb * MIB <= MIN_LARGE:
            raise ValueError(
                f"large_segment_size_mb:{self.large_segment_size_mb} is too small: it must be above 10"
            )
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size_mb:
                raise ValueError(
                    f"{name}:{value} is too small: it must be at least {self.large_segment_size_mb}, "
                    "the size of a large segment in MiB"
                )
        threshold, fraction = self.garbage_collection_threshold, self.per_process_memory_fraction
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"garbage_collection_threshold:{threshold:g} isn't between 0.0 and 1.0")
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"per_process_memory_fraction:{fraction:g} isn't above 0.0 and up to 1.0")
        divisions = self.roundup_power2_divisions
        table = (divisions,) * _INTERVALS if isinstance(divisions, int) else tuple(divisions)
        if len(table) != _INTERVALS or any(n < 0 or n & (n - 1) for n in table):
            raise ValueError(
                "roundup_power2_divisions must be powers of two (0: off), "
                f"one number or {_INTERVALS} of them, not {divisions!r}"
            )
        object.__setattr__(self, "roundup_power2_divisions", table)

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Reads a `PYTORCH_ALLOC_CONF` string, such as 'expandable_segments:True,max_split_size_mb:128'.

        An empty string gives the defaults. Raises ValueError with one line that names the option.
        """
        values: dict[str, object] = {}
        rest = re.sub(r"\s+", "", text)
        while rest:
            match = re.match(r"([^:,\[\]]+):(\[[^\]]*\]|[^,\[\]]+)(?:,|$)", rest)
            if match is None:
                raise ValueError(f"can't read allocator options at {rest!r}: write option:value,option:value")
            name, value = match.groups()
            rest = rest[match.end() :]
            if name in ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"):
                values[name] = _whole(name, value)
            elif name == "expandable_segments":
                values[name] = _true_or_false(name, value)
            elif name in ("garbage_collection_threshold", "per_process_memory_fraction"):
                values[name] = _number(name, value)
            elif name == "roundup_power2_divisions":
                values[name] = _divisions(value)
            elif name == "backend":
                if value != "native":
                    raise ValueError(f"backend:{value} isn't modelled: the replay follows backend:native")
            elif name not in _OTHER_OPTIONS:
                raise unknown_name("allocator option", name, _OPTIONS)
        if values.get("garbage_collection_threshold") == 0.0:
            raise ValueError("garbage_collection_threshold:0 is refused by PyTorch: leave it out instead")
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The options that aren't PyTorch's defaults, as `PYTORCH_ALLOC_CONF` would hold them."""
        parts = []
        for name in _OPTIONS[:-1]:
            value = getattr(self, name)
            if value != getattr(_DEFAULT, name):
                if isinstance(value, tuple):
                    one = len(set(value)) == 1
                    value = value[0] if one else _divisions_text(value)
                parts.append(f"{name}:{value}")
        return ",".join(parts) or "defaults"

    def block_size(self, request: int) -> int:
        """The bytes that a request is rounded up to, before a block is chosen for it."""
        if request < MIN_BLOCK:
            return MIN_BLOCK
        index = min(max(request.bit_length() - 21, 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[index]  # type: ignore[index]
        if divisions > 1 and request > MIN_BLOCK * divisions:
            floor = 1 << (request.bit_length() - 1)
            step = floor // divisions
            return -(-request // step) * step
        return (request + MIN_BLOCK - 1) & -MIN_BLOCK

    def segment_size(self, block: int) -> int:
        """The bytes that are asked of the driver when no cached block serves a block of this size."""
        if block <= SMALL_SIZE:
            return SMALL_SEGMENT
        if block < MIN_LARGE:
            return self.large_segment_size_mb * MIB
        return -(-block // ROUND_LARGE) * ROUND_LARGE


_DEFAULT = AllocatorConfig()


def _whole(name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}:{value} isn't a whole number")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}:{value} isn't a number") from None


def _true_or_false(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name}:{value} must be True or False, spelled so")
    return value == "True"


def _divisions(value: str) -> int | tuple[int, ...]:
    """'4' or '[256:1,512:2,1024:4,>:8]' (upper bounds in MiB) -> the table, filled as PyTorch fills it."""
    name = "roundup_power2_divisions"
    if not value.startswith("["):
        divisions = _whole(name, value)
        if divisions == 0:
            raise ValueError(f"{name}:0 is refused by PyTorch: leave it out instead")
        return divisions
    table = [0] * _INTERVALS
    last: int | None = None
    for entry in filter(None, value[1:-1].split(",")):
        bound, colon, number = entry.partition(":")
        if not colon:
            raise ValueError(f"{name}: can't read {entry!r}, write for example [256:1,512:2,>:4]")
        divisions = _whole(name, number)
        if bound == ">":
            start = 1 if last is None else last + 1
            table[start:] = [divisions] * (_INTERVALS - start)
            continue
        megabytes = _whole(name, bound)
        if megabytes < 1 or megabytes & (megabytes - 1):
            raise ValueError(f"{name}: the bound {bound} (MiB) isn't a power of two")
        index = min(megabytes.bit_length() - 1, _INTERVALS - 1)
        if last is None:
            table[:index] = [divisions] * index
        table[index] = divisions
        last = index
    return tuple(table)


def _divisions_text(table: Sequence[int]) -> str:
    bounds = [f"{1 << i}:{n}" for i, n in enumerate(table[:-1])]
    return "[" + ",".join([*bounds, f">:{table[-1]}"]) + "]"


# --- out of memory ------------------------------------------------------------------------------------------


def format_size(n: int) -> str:
    """Bytes as PyTorch's messages print them: 1610612736 -> '1.50 GiB', 512 -> '512 bytes'."""
    for scale, suffix in ((KIB, "bytes"), (MIB, "KiB"), (GIB, "MiB")):
        if n <= scale:
            return f"{n} bytes" if suffix == "bytes" else f"{n / (scale // 1024):.2f} {suffix}"
    return f"{n / GIB:.2f} GiB"


class OutOfMemory(RuntimeError):
    """The allocation that the card can't serve. `str()` is PyTorch's own message; the numbers are attributes.

    All in bytes: `requested` (the tensor), `segment` (what was asked of the driver, which the message names),
    `capacity`, `context`, `free` (on the card), `allocated`, `reserved` (after all that could be released
    was), `allowed` (None without a memory fraction). `others` maps the id of each other process to what it
    holds. `position` is the index of the event when a replay raised it.
    """

    def __init__(
        self,
        *,
        requested: int,
        segment: int,
        capacity: int,
        context: int,
        allocated: int,
        reserved: int,
        allowed: int | None = None,
        others: Mapping[int, int] | None = None,
        device: int = 0,
        position: int | None = None,
    ) -> None:
        self.requested, self.segment, self.capacity, self.context = requested, segment, capacity, context
        self.allocated, self.reserved, self.allowed, self.device = allocated, reserved, allowed, device
        self.others = dict(others or {})
        self.position = position
        super().__init__(requested, segment)

    @property
    def process(self) -> int:
        """What `nvidia-smi` shows for this process: reserved bytes and the context."""
        return self.reserved + self.context

    @property
    def free(self) -> int:
        """Bytes of the card that nobody holds."""
        return max(self.capacity - self.process - sum(self.others.values()), 0)

    def __str__(self) -> str:
        if self.requested >= _EXABYTE:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        others = "".join(
            f"Process {pid} has {format_size(n)} memory in use. " for pid, n in self.others.items()
        )
        allowed = f"{format_size(self.allowed)} allowed; " if self.allowed is not None else ""
        return (
            f"CUDA out of memory. Tried to allocate {format_size(self.segment)}. "
            f"GPU {self.device} has a total capacity of {format_size(self.capacity)} "
            f"of which {format_size(self.free)} is free. {others}"
            f"Including non-PyTorch memory, this process has {format_size(self.process)} memory in use. "
            f"{allowed}Of the allocated memory {format_size(self.allocated)} is allocated by PyTorch, and "
            f"{format_size(self.reserved - self.allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  "
            "See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


# --- the allocator ------------------------------------------------------------------------------------------


class Block:
    """A piece of a segment. `malloc` hands one out; `address`, `size` and `requested` (bytes) may be read."""

    __slots__ = ("address", "age", "next", "pool", "prev", "requested", "segment", "size", "state")

    address: int
    size: int
    requested: int
    state: int
    pool: _Pool
    segment: _Expandable | None
    prev: Block | None
    next: Block | None
    age: int  # the pool's search count when the block was freed; for garbage collection

    def __init__(self, address: int, size: int, state: int, pool: _Pool, segment: _Expandable | None) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.pool = pool
        self.segment = segment
        self.requested = self.age = 0
        self.prev = self.next = None


class _Expandable:
    """Address space of an expandable segment; memory is mapped into it page by page."""

    __slots__ = ("base", "page", "size")

    def __init__(self, base: int, size: int, page: int) -> None:
        self.base, self.size, self.page = base, size, page


class _Pool:
    """The free blocks of one pool, ordered by (size, address), and its unmapped ranges, by address."""

    __slots__ = ("blocks", "keys", "least_rest", "page", "searches", "small", "split_below", "unmapped")

    def __init__(self, small: bool, config: AllocatorConfig) -> None:
        self.small = small
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        self.searches = 0
        self.page = SMALL_SEGMENT if small else config.large_segment_size_mb * MIB
        whole = small or config.expandable_segments
        self.least_rest = MIN_BLOCK if whole else SMALL_SIZE + 1
        self.split_below = (
            UNLIMITED if whole or not config.max_split_size_mb else config.max_split_size_mb * MIB
        )

    def add(self, block: Block) -> None:
        block.state = _FREE
        block.age = self.searches
        key = block.size << _SHIFT | block.address
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.blocks.insert(i, block)

    def remove(self, block: Block) -> None:
        i = bisect_left(self.keys, block.size << _SHIFT | block.address)
        del self.keys[i], self.blocks[i]


@dataclass(frozen=True)
class BlockState:
    """One block of a segment: bytes; `requested` is 0 for a free block."""

    address: int
    size: int
    requested: int
    allocated: bool


@dataclass(frozen=True)
class Segment:
    """Memory got from the driver in one piece (or mapped side by side), with its blocks in address order."""

    address: int
    size: int
    small: bool
    expandable: bool
    blocks: tuple[BlockState, ...]

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use."""
        return sum(b.size for b in self.blocks if b.allocated)


class Allocator:
    """The caching allocator of one card on one stream.

    `capacity` is the card's memory as CUDA reports it (bytes, None: no limit), `context` what the driver and
    the CUDA context take of it, `others` what other processes hold (id -> bytes). `order` is one of `ORDERS`.
    `allocated`, `requested` and `reserved` are the bytes now, with `peak_` since the last `reset_peaks()`:
    they are what `torch.cuda.memory_allocated`, `memory_stats()['requested_bytes.all.current']` and
    `memory_reserved` return. A segment's addresses aren't used again after its release: where the driver
    reuses a freed range isn't known.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        capacity: int | None = None,
        context: int = 0,
        others: Mapping[int, int] | None = None,
        order: str = "split",
        device: int = 0,
    ) -> None:
        if order not in ORDERS:
            raise unknown_name("segment address order", order, ORDERS)
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity can't be negative: {capacity} bytes")
        self.config = config = config or _DEFAULT
        self.capacity, self.context, self.order, self.device = capacity, context, order, device
        self.others = dict(others or {})
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self.retries = self.ooms = 0
        self.driver_allocs = self.driver_frees = 0  # cudaMalloc / cudaFree, or map / unmap
        #: (action, address, bytes) of each call to the driver, in the snapshot's words; a replay empties it.
        self.driver_log: list[tuple[str, int, int]] = []

        self._limit = UNLIMITED if capacity is None else capacity - context - sum(self.others.values())
        fraction = config.per_process_memory_fraction
        self._allowed = int(fraction * capacity) if capacity is not None and fraction < 1.0 else None
        self._collects = bool(config.garbage_collection_threshold) and self._allowed is not None
        self._expandable = config.expandable_segments
        self._max_split = (config.max_split_size_mb or UNLIMITED // MIB) * MIB
        self._slack = (config.max_non_split_rounding_mb or 20) * MIB
        self._plain_rounding = not any(config.roundup_power2_divisions)  # type: ignore[arg-type]
        # best fit is a plain lookup unless one of these options is set
        self._plain_fit = not (self._expandable or self._collects or config.max_split_size_mb)
        self._small, self._large = _Pool(True, config), _Pool(False, config)
        self._heads: dict[int, Block] = {}  # the first block of each segment; it stays first for life
        self._spare: dict[int, list[int]] = {}  # addresses of expandable segments given back, by size
        self._top = self._bottom = _MIDDLE

    # -- what a program does

    def malloc(self, size: int) -> Block:
        """Serves a request of `size` bytes (0: an empty block that counts nothing).

        Raises OutOfMemory, after which the allocator can be used on, and ValueError for a negative size.
        """
        if size <= 0:
            if size:
                raise ValueError(f"can't allocate {size} bytes")
            return Block(0, 0, _ALLOCATED, self._small, None)
        need = (size + 511) & -512 if self._plain_rounding else self.config.block_size(size)
        pool = self._small if need <= SMALL_SIZE else self._large
        keys = pool.keys
        if self._plain_fit:
            i = bisect_left(keys, need << _SHIFT)
            if i < len(keys):
                del keys[i]
                block = pool.blocks.pop(i)
            else:
                block = self._from_driver(pool, need, size)
        else:
            block = self._fit(pool, need) or self._from_driver(pool, need, size)

        rest = block.size - need
        if rest >= pool.least_rest and need < pool.split_below:
            block.size = need
            right = Block(block.address + need, rest, _FREE, pool, block.segment)
            right.age = pool.searches
            after = right.next = block.next
            if after is not None:
                after.prev = right
            right.prev = block
            block.next = right
            key = rest << _SHIFT | right.address
            i = bisect_left(keys, key)
            keys.insert(i, key)
            pool.blocks.insert(i, right)
        else:
            need = block.size
        block.state = _ALLOCATED
        block.requested = size
        total = self.allocated = self.allocated + need
        if total > self.peak_allocated:
            self.peak_allocated = total
        total = self.requested = self.requested + size
        if total > self.peak_requested:
            self.peak_requested = total
        return block

    def free(self, block: Block) -> None:
        """Gives a block back. Raises ValueError if it isn't in use."""
        if block.state != _ALLOCATED:
            raise ValueError("this block isn't in use: it was freed before")
        size = block.size
        if not size:
            return
        self.allocated -= size
        self.requested -= block.requested
        block.requested = 0
        pool = block.pool
        keys, blocks = pool.keys, pool.blocks
        # The left block of a merge lives on, so that the first block of a segment never changes.
        right = block.next
        if right is not None and right.state == _FREE:
            i = bisect_left(keys, right.size << _SHIFT | right.address)
            del keys[i], blocks[i]
            right.state = _GONE
            size = block.size = size + right.size
            right = block.next = right.next
            if right is not None:
                right.prev = block
        left = block.prev
        if left is not None and left.state == _FREE:
            i = bisect_left(keys, left.size << _SHIFT | left.address)
            del keys[i], blocks[i]
            block.state = _GONE
            size = left.size = left.size + size
            left.next = right
            if right is not None:
                right.prev = left
            block = left
        else:
            block.state = _FREE
        block.age = pool.searches
        key = size << _SHIFT | block.address
        i = bisect_left(keys, key)
        keys.insert(i, key)
        blocks.insert(i, block)

    def empty_cache(self) -> None:
        """Returns to the driver what isn't in use, as `torch.cuda.empty_cache()` does."""
        self._release(self._large)
        self._release(self._small)

    def reset_peaks(self) -> None:
        """Starts the peaks anew from what is held now, as `torch.cuda.reset_peak_memory_stats()` does."""
        self.peak_allocated, self.peak_requested = self.allocated, self.requested
        self.peak_reserved = self.reserved

    # -- what can be seen

    @property
    def process(self) -> int:
        """What `nvidia-smi` shows for this process now: reserved bytes and the context."""
        return self.reserved + self.context

    def segments(self) -> list[Segment]:
        """All segments in address order. An expandable one counts its mapped part only."""
        result = []
        for head in sorted(self._heads.values(), key=lambda b: b.address):
            run: list[Block] = []
            block: Block | None = head
            while block is not None:
                if block.state != _UNMAPPED:
                    run.append(block)
                after = block.next
                # memory mapped in several places of one expandable segment shows as several segments
                if run and (after is None or block.state == _UNMAPPED or after.state == _UNMAPPED):
                    result.append(_segment_of(run))
                    run = []
                block = after
        return result

    def check(self) -> None:
        """Asserts the invariants: no gap or overlap, free neighbours merged, sums equal to the counters."""
        allocated = requested = reserved = 0
        free: list[tuple[bool, int, int]] = []
        spans = []
        for address, head in self._heads.items():
            assert head.address == address and head.prev is None
            block: Block | None = head
            while block is not None:
                assert block.size > 0 and block.size % MIN_BLOCK == 0
                assert (block.segment is not None) == self._expandable
                spans.append((block.address, block.address + block.size))
                if block.state == _ALLOCATED:
                    allocated += block.size
                    requested += block.requested
                    assert 0 < block.requested <= block.size
                elif block.state == _FREE:
                    free.append((block.pool.small, block.size, block.address))
                else:
                    assert block.state == _UNMAPPED and block in block.pool.unmapped
                if block.state != _UNMAPPED:
                    reserved += block.size
                after = block.next
                if after is not None:
                    assert after.prev is block and after.address == block.address + block.size
                    assert block.state == _ALLOCATED or after.state != block.state, (
                        "free neighbours not merged"
                    )
                block = after
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "segments overlap"
        pooled = [(p.small, b.size, b.address) for p in (self._small, self._large) for b in p.blocks]
        assert sorted(free) == sorted(pooled)
        for pool in (self._small, self._large):
            assert pool.keys == sorted(b.size << _SHIFT | b.address for b in pool.blocks)
        assert (allocated, requested, reserved) == (self.allocated, self.requested, self.reserved)
        assert self.reserved <= self._limit
        assert self.peak_reserved >= self.peak_allocated >= self.peak_requested

    # -- finding a block

    def _fit(self, pool: _Pool, need: int) -> Block | None:
        """get_free_block: best fit where options restrict or reorder the choice."""
        if self._collects:
            pool.searches += 1
        i = bisect_left(pool.keys, need << _SHIFT)
        blocks = pool.blocks
        if i == len(blocks):
            return None
        if self._expandable:
            # A block that can still grow counts with the room it can grow into: a later one may be better.
            while i + 1 < len(blocks) and _room(blocks[i + 1]) < _room(blocks[i]):
                i += 1
        size = blocks[i].size
        if need < self._max_split:
            if size >= self._max_split:
                return None
        elif size >= need + self._slack:
            return None
        del pool.keys[i]
        return blocks.pop(i)

    def _from_driver(self, pool: _Pool, need: int, size: int) -> Block:
        if self._collects:
            self._collect()
        segment = self.config.segment_size(need)
        block = self._new(pool, need, segment) if size < _EXABYTE else None
        if block is None and size < _EXABYTE and self._release_oversize(pool, need):
            block = self._new(pool, need, segment)
        if block is None and size < _EXABYTE:
            self.empty_cache()
            self.retries += 1
            block = self._new(pool, need, segment)
        if block is None:
            self.ooms += 1
            raise OutOfMemory(
                requested=size, segment=segment, capacity=self.capacity or 0, context=self.context,
                allocated=self.allocated, reserved=self.reserved, allowed=self._allowed, others=self.others,
                device=self.device,
            )  # fmt: skip
        return block

    def _new(self, pool: _Pool, need: int, segment: int) -> Block | None:
        """alloc_block: a new segment, or None if neither the card nor the process's fraction has room."""
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self._expandable:
            return self._grow(pool, need)
        if self.reserved + segment > self._limit:
            return None
        block = Block(self._place(segment), segment, _FREE, pool, None)
        self._heads[block.address] = block
        self._reserve(segment, "segment_alloc", block.address)
        return block

    def _place(self, size: int) -> int:
        """The address of a new segment, by the order chosen."""
        up = size <= _ASCENDING_UP_TO[self.order]
        address = self._top if up else self._bottom - size
        if address < 0 or address + size > 2 * _MIDDLE:
            raise RuntimeError("the replay has used up 64 TiB of addresses: segments are released too often")
        if up:
            self._top += size
        else:
            self._bottom -= size
        return address

    def _reserve(self, size: int, action: str, address: int) -> None:
        """Counts `size` bytes got from the driver (negative: given back)."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if size > 0:
            self.driver_allocs += 1
        else:
            self.driver_frees += 1
        self.driver_log.append((action, address, abs(size)))

    # -- expandable segments

    def _grow(self, pool: _Pool, need: int) -> Block | None:
        """try_allocate_expandable_block: maps pages where the lowest room is. None: the card is full."""
        block = self._lowest_room(pool, need)
        if block.state == _UNMAPPED and not self._map(block, min(block.size, need)):
            return None
        while block.size < need:
            following = block.next
            assert following is not None  # _lowest_room saw enough room
            if not self._map(following, min(need - block.size, following.size)):
                return None
        pool.remove(block)
        return block

    def _lowest_room(self, pool: _Pool, need: int) -> Block:
        for unmapped in pool.unmapped:
            start = unmapped
            if start.prev is not None and start.prev.state == _FREE:
                start = start.prev
            room, block = 0, start if start else None
            while block is not None and room < need and block.state != _ALLOCATED:
                room += block.size
                block = block.next
            if room >= need:
                return start
        # PyTorch reserves address space for 1 1/8 of the card; without a capacity, more than any card has.
        pages = -(-(self.capacity + self.capacity // 8) // pool.page) if self.capacity is not None else 0
        size = max(pages, 1) * pool.page if self.capacity is not None else TIB // pool.page * pool.page
        size = max(size, -(-need // pool.page) * pool.page)
        spare = self._spare.get(size)
        segment = _Expandable(spare.pop(0) if spare else self._place(size), size, pool.page)
        block = Block(segment.base, size, _UNMAPPED, pool, segment)
        self._heads[block.address] = block
        pool.unmapped.append(block)
        pool.unmapped.sort(key=_address)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Backs the first `size` bytes (rounded up to pages) of an unmapped range with memory; merges it."""
        pool, segment = block.pool, block.segment
        assert segment is not None
        size = -(-size // segment.page) * segment.page
        if self.reserved + size > self._limit:
            return False
        pool.unmapped.remove(block)
        address = block.address
        if size < block.size:
            rest = Block(address + size, block.size - size, _UNMAPPED, pool, segment)
            _link(block, rest)
            block.size = size
            insort(pool.unmapped, rest, key=_address)
        block.state = _FREE
        block = _merge_free(block, pool)
        pool.add(block)
        self._reserve(size, "segment_map", address)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives back the whole pages inside a free block."""
        pool, segment = block.pool, block.segment
        assert segment is not None
        page = segment.page
        start = segment.base + -(-(block.address - segment.base) // page) * page
        end = segment.base + (block.address + block.size - segment.base) // page * page
        if start >= end:
            return
        pool.remove(block)
        after = block.address + block.size - end
        if after:
            tail = Block(end, after, _FREE, pool, segment)
            _link(block, tail)
            pool.add(tail)
        if start > block.address:
            middle = Block(start, end - start, _UNMAPPED, pool, segment)
            _link(block, middle)
            block.size = start - block.address
            pool.add(block)
            block = middle
        else:
            block.size = end - start
            block.state = _UNMAPPED
        for left, right in ((block, block.next), (block.prev, block)):
            if left is not None and right is not None and left.state == right.state == _UNMAPPED:
                other = right if left is block else left
                pool.unmapped.remove(other)
                left.size += right.size
                _unlink(right)
                block = left
        insort(pool.unmapped, block, key=_address)
        self._reserve(start - end, "segment_unmap", start)
        if block.prev is None and block.next is None:
            pool.unmapped.remove(block)
            del self._heads[block.address]
            insort(self._spare.setdefault(segment.size, []), segment.base)

    # -- giving back to the driver

    def _release(self, pool: _Pool) -> None:
        """release_blocks: every free block that is a whole segment, or whole pages of an expandable one."""
        for block in list(pool.blocks):
            if block.segment is not None:
                self._unmap(block)
            elif block.prev is None and block.next is None:
                self._release_block(block)

    def _release_block(self, block: Block) -> None:
        block.pool.remove(block)
        block.state = _GONE
        del self._heads[block.address]
        self._reserve(-block.size, "segment_free", block.address)

    def _release_oversize(self, pool: _Pool, need: int) -> bool:
        """release_available_cached_blocks: the oversize block that fits best, else the largest ones."""
        if self._max_split >= UNLIMITED // MIB * MIB:
            return False
        need = max(need, self._max_split)
        i = bisect_left(pool.keys, need << _SHIFT)
        if i < len(pool.blocks) and pool.blocks[i].segment is None:
            self._release_block(pool.blocks[i])
            return True
        released = 0
        for block in pool.blocks[:i][::-1]:
            if released >= need or block.size < self._max_split:
                break
            if block.segment is None:
                released += block.size
                self._release_block(block)
        return released >= need

    def _collect(self) -> None:
        """garbage_collect_cached_blocks: above the threshold, frees unsplit blocks older than average."""
        assert self._allowed is not None
        threshold = int(self.config.garbage_collection_threshold * self._allowed)
        target = self.reserved - threshold
        if target <= 0:
            return
        pool = self._large
        whole = [b for b in pool.blocks if b.prev is None and b.next is None]
        total, count, reclaimed, freed = sum(pool.searches - b.age for b in whole), len(whole), 0, True
        while reclaimed < target and freed and count > 0:
            average, freed = total / count, False
            for block in list(pool.blocks):
                age = pool.searches - block.age
                if block.prev is None and block.next is None and block.segment is None and age >= average:
                    freed = True
                    reclaimed += block.size
                    total -= age
                    count -= 1
                    self._release_block(block)


def _address(block: Block) -> int:
    return block.address


def _room(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == _UNMAPPED else 0)


def _link(left: Block, right: Block) -> None:
    """Puts `right` behind `left` in its segment."""
    right.prev, right.next = left, left.next
    if right.next is not None:
        right.next.prev = right
    left.next = right


def _unlink(block: Block) -> None:
    """Takes a block that was merged into its left neighbour out of its segment."""
    left, right = block.prev, block.next
    assert left is not None
    left.next = right
    if right is not None:
        right.prev = left
    block.state = _GONE


def _merge_free(block: Block, pool: _Pool) -> Block:
    """Merges a mapped, free block that isn't in the pool with its free neighbours; the left one lives on."""
    right = block.next
    if right is not None and right.state == _FREE:
        pool.remove(right)
        block.size += right.size
        _unlink(right)
    left = block.prev
    if left is not None and left.state == _FREE:
        pool.remove(left)
        left.size += block.size
        _unlink(block)
        block = left
    return block


def _segment_of(run: Sequence[Block]) -> Segment:
    blocks = tuple(BlockState(b.address, b.size, b.requested, b.state == _ALLOCATED) for b in run)
    first = run[0]
    return Segment(
        first.address, sum(b.size for b in run), first.pool.small, first.segment is not None, blocks
    )


# --- replays ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The peaks between two marks, in bytes; what was held at the start counts."""

    name: str
    start: int  # index of the first event
    stop: int  # index after the last
    allocated: int
    requested: int
    reserved: int


@dataclass(frozen=True)
class Replay:
    """What the allocator did with a stream of events. All sizes in bytes.

    `peak_allocated` counts blocks as `torch.cuda.max_memory_allocated` does, `peak_requested` the tensors
    themselves, `peak_reserved` what `max_memory_reserved` returns. `oom` is set when an allocation failed:
    the replay ends there, before event `stopped`.
    """

    allocator: Allocator  # in its state after the last event
    peak_allocated: int
    peak_requested: int
    peak_reserved: int
    spans: tuple[Span, ...]
    stopped: int
    oom: OutOfMemory | None
    addresses: array[int] = field(repr=False)  # of each trace block; -1: never allocated
    block_bytes: array[int] = field(repr=False)  # size of the block that served each trace block; 0: none
    #: (event index, action, address, bytes) of each call to the driver, in order.
    driver_events: tuple[tuple[int, str, int, int], ...] = field(repr=False)

    @property
    def allocated(self) -> int:
        """Bytes in use after the last event."""
        return self.allocator.allocated

    @property
    def reserved(self) -> int:
        """Bytes reserved after the last event."""
        return self.allocator.reserved

    @property
    def retries(self) -> int:
        """How often all cached blocks were released and the allocation tried again (`num_alloc_retries`)."""
        return self.allocator.retries

    @property
    def process_peak(self) -> int:
        """The largest figure `nvidia-smi` would show for this process: peak reserved and the context."""
        return self.peak_reserved + self.allocator.context

    @property
    def fragmentation(self) -> float:
        """The share of the reserved peak that the allocated peak didn't need, 0 to 1."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0

    @property
    def segments(self) -> list[Segment]:
        """All segments after the last event, in address order."""
        return self.allocator.segments()

    def phases(self) -> dict[str, Span]:
        """For each name of a mark, the largest of its spans, quantity by quantity."""
        result: dict[str, Span] = {}
        for span in self.spans:
            old = result.get(span.name, span)
            result[span.name] = Span(
                span.name, old.start, span.stop, max(old.allocated, span.allocated),
                max(old.requested, span.requested), max(old.reserved, span.reserved),
            )  # fmt: skip
        return result


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    config: AllocatorConfig | None = None,
    *,
    marks: Iterable[tuple[int, str]] = (),
    capacity: int | None = None,
    context: int = 0,
    others: Mapping[int, int] | None = None,
    order: str = "split",
    empty_cache: Iterable[int] = (),
) -> Replay:
    """Runs a trace through the allocator.

    `events` holds block numbers in order: `b` allocates block b, `~b` (that is -b-1) frees it; `sizes[b]` is
    its size in bytes, not rounded. `marks` are (event index, name): the span of that name starts before that
    event. `empty_cache` are the event indices before which the program gives its cached segments back
    (`torch.cuda.empty_cache()`). For the rest see `Allocator`. Raises ValueError if an event frees what
    isn't allocated or allocates twice.
    """
    allocator = Allocator(config, capacity=capacity, context=context, others=others, order=order)
    count = len(sizes)
    events = events.tolist() if isinstance(events, array) else events
    if len(events) and not (max(events) < count and min(events) >= -count):
        raise ValueError(f"the events name a block that has no size: there are only {count}")
    live: list[Block | None] = [None] * count
    addresses, block_bytes = array("q", [-1]) * count, array("q", [0]) * count
    driver_events: list[tuple[int, str, int, int]] = []
    spans: list[Span] = []
    oom: OutOfMemory | None = None
    stopped = len(events)
    malloc, free, log = allocator.malloc, allocator.free, allocator.driver_log
    named = sorted(((max(0, min(p, stopped)), name) for p, name in marks), key=lambda m: m[0])
    if not named or named[0][0] > 0:
        named.insert(0, (0, "setup"))
    emptied = {max(0, min(p, stopped)) for p in empty_cache}
    for position in sorted(emptied - {p for p, _ in named}):
        at = bisect_right(named, position, key=lambda m: m[0])
        named.insert(at, (position, named[at - 1][1]))
    for (start, name), (stop, _) in pairwise([*named, (stopped, "")]):
        if start in emptied:
            emptied.discard(start)
            allocator.empty_cache()
        allocator.reset_peaks()
        position = start
        try:
            for position in range(start, stop):
                block = events[position]
                if block >= 0:
                    if live[block] is not None:
                        raise ValueError(
                            f"event {position} allocates block {block}, which is allocated already"
                        )
                    live[block] = got = malloc(sizes[block])
                    addresses[block] = got.address
                    block_bytes[block] = got.size
                    if log:
                        driver_events.extend((position, *call) for call in log)
                        log.clear()
                else:
                    got_back = live[~block]
                    if got_back is None:
                        raise ValueError(f"event {position} frees block {~block}, which isn't allocated")
                    live[~block] = None
                    free(got_back)
        except OutOfMemory as error:
            error.position = position
            oom, stopped = error, position
            driver_events.extend((position, *call) for call in log)
            log.clear()
        spans.append(
            Span(
                name, start, min(stop, stopped),
                allocator.peak_allocated, allocator.peak_requested, allocator.peak_reserved,
            )
        )  # fmt: skip
        if oom is not None:
            break
    return Replay(
        allocator,
        peak_allocated=max(span.allocated for span in spans),
        peak_requested=max(span.requested for span in spans),
        peak_reserved=max(span.reserved for span in spans),
        spans=tuple(spans),
        stopped=stopped,
        oom=oom,
        addresses=addresses,
        block_bytes=block_bytes,
        driver_events=tuple(driver_events),
    )


def replay_orders(
    events: Sequence[int],
    sizes: Sequence[int],
    config: AllocatorConfig | None = None,
    *,
    marks: Iterable[tuple[int, str]] = (),
    capacity: int | None = None,
    context: int = 0,
    others: Mapping[int, int] | None = None,
    empty_cache: Iterable[int] = (),
) -> dict[str, Replay]:
    """The replay under each order of segment addresses: the honest range of the reserved bytes."""
    marks, empty_cache = tuple(marks), tuple(empty_cache)
    return {
        order: replay(
            events,
            sizes,
            config,
            marks=marks,
            capacity=capacity,
            context=context,
            others=others,
            order=order,
            empty_cache=empty_cache,
        )
        for order in ORDERS
    }


def smallest_capacity(
    events: Sequence[int],
    sizes: Sequence[int],
    config: AllocatorConfig | None = None,
    *,
    context: int = 0,
    order: str = "split",
    empty_cache: Iterable[int] = (),
) -> int:
    """The smallest card (bytes as CUDA reports them) on which the events run, by bisection in steps of 2 MiB.

    The result runs and 2 MiB less doesn't. With retries the allocator isn't strictly monotone (what is
    released changes where later blocks go), so a smaller card that happens to run can't be excluded.
    """
    emptied = tuple(empty_cache)
    free_run = replay(events, sizes, config, order=order, empty_cache=emptied)

    def runs(steps: int) -> bool:
        limited = replay(
            events, sizes, config, capacity=steps * ROUND_LARGE + context, context=context, order=order,
            empty_cache=emptied,
        )  # fmt: skip
        return limited.oom is None

    low, high = free_run.peak_requested // ROUND_LARGE - 1, -(-free_run.peak_reserved // ROUND_LARGE)
    while not runs(high):  # only where a memory fraction is set
        low, high = high, max(high * 2, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high * ROUND_LARGE + context
