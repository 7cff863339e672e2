"""The allocator against rules worked out by hand, a second, naive version of it, and torch's own parser."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab.allocator import (
    ORDERS,
    Allocator,
    AllocatorConfig,
    OutOfMemory,
    format_size,
    replay,
    replay_orders,
    smallest_capacity,
)
from memlab.units import GIB, KIB, MIB

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def mib(x: float) -> int:
    return round(x * MIB)


# --- each rule by hand


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, mib(2)),
        (513, 1024, mib(2)),
        (MIB, MIB, mib(2)),  # the largest request of the small pool
        (MIB + 1, MIB + 512, mib(20)),
        (mib(10) - 512, mib(10) - 512, mib(20)),
        (mib(10), mib(10), mib(10)),  # from 10 MiB on a segment of its own
        (mib(10.5), mib(10.5), mib(12)),  # 1.5 MiB left: split off
        (mib(11), mib(12), mib(12)),  # exactly 1 MiB left: not split off
        (mib(11.5), mib(12), mib(12)),
        (mib(11) - 512, mib(11) - 512, mib(12)),
    ],
)
def test_first_allocation(request_bytes: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    block = allocator.malloc(request_bytes)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (
        allocated,
        reserved,
        request_bytes,
    )
    assert block.size == allocated
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    allocator.check()


def test_zero_bytes_take_nothing() -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(0))
    assert allocator.reserved == 0 and not allocator.segments()


def test_best_fit_takes_the_smallest_block_that_serves() -> None:
    allocator = Allocator()
    blocks = [allocator.malloc(mib(size)) for size in (30, 24, 40)]
    for block in blocks:
        allocator.free(block)
    block = allocator.malloc(mib(22))
    assert block.address == blocks[1].address and allocator.reserved == mib(94)


def test_equal_sizes_are_decided_by_address() -> None:
    for order, winner in {"ascending": 0, "descending": 1, "pools": 1, "split": 1}.items():
        allocator = Allocator(order=order)
        blocks = [allocator.malloc(mib(30)) for _ in range(2)]
        for block in blocks:
            allocator.free(block)
        assert allocator.malloc(mib(30)).address == blocks[winner].address, order
    # up to 20 MiB the default places upwards
    allocator = Allocator()
    first, second = allocator.malloc(mib(20)), allocator.malloc(mib(20))
    assert first.address < second.address


def test_neighbours_merge() -> None:
    allocator = Allocator()
    a, b, c, d = (allocator.malloc(mib(5)) for _ in range(4))
    assert allocator.reserved == mib(20)
    allocator.free(a)
    allocator.free(c)
    assert [(s.size, s.allocated, len(s.blocks)) for s in allocator.segments()] == [(mib(20), mib(10), 4)]
    allocator.free(b)
    assert len(allocator.segments()[0].blocks) == 2
    assert allocator.malloc(mib(15)).address == a.address and allocator.reserved == mib(20)
    allocator.free(d)
    allocator.check()


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    allocator = Allocator(AllocatorConfig(max_split_size_mb=128))
    big = allocator.malloc(mib(200))
    allocator.free(big)
    allocator.malloc(mib(100))
    assert allocator.reserved == mib(300)
    block = allocator.malloc(mib(190))  # oversize itself, and 200 < 190 + 20
    assert (block.size, allocator.reserved) == (mib(200), mib(300))
    allocator.free(block)
    assert allocator.malloc(mib(170)).size == mib(170)  # 200 >= 170 + 20
    allocator.check()


def test_oversize_blocks_are_released_before_anything_else() -> None:
    allocator = Allocator(AllocatorConfig(max_split_size_mb=128), capacity=mib(400))
    for block in [allocator.malloc(mib(size)) for size in (60, 150, 150)]:
        allocator.free(block)
    allocator.malloc(mib(250))
    # the cached 60 MiB stayed
    assert (allocator.reserved, allocator.retries, allocator.driver_frees) == (mib(310), 0, 2)


def test_a_full_card_releases_its_cache_and_tries_again() -> None:
    allocator = Allocator(capacity=mib(40))
    allocator.free(allocator.malloc(mib(30)))
    allocator.malloc(mib(35))
    assert (allocator.reserved, allocator.retries, allocator.ooms) == (mib(36), 1, 0)


def test_a_block_in_a_segment_in_use_cannot_be_released() -> None:
    allocator = Allocator(capacity=mib(40))
    keep = allocator.malloc(mib(2))
    rest = allocator.malloc(mib(18))  # together one 20 MiB segment
    allocator.free(rest)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(21))
    assert (caught.value.reserved, caught.value.allocated) == (mib(20), mib(2))
    allocator.free(keep)  # the allocator goes on after the error
    allocator.malloc(mib(21))
    allocator.check()


def test_power_of_two_divisions() -> None:
    config = AllocatorConfig(roundup_power2_divisions=4)
    assert config.block_size(mib(10.5)) == mib(12)  # 8, 10, 12, 14, 16
    assert config.block_size(mib(10)) == mib(10)
    assert config.block_size(mib(64)) == mib(64)
    assert config.block_size(1200) == 1536  # at most 512 x 4: only 512 bytes
    assert config.block_size(2049) == 2560
    config = AllocatorConfig.parse("roundup_power2_divisions:[64:8,256:4,>:1]")
    assert config.block_size(mib(33)) == mib(36)  # below 64 MiB eighths: 32, 36, 40
    assert config.block_size(mib(130) + 1) == mib(130) + 512  # 128 isn't named: no rounding
    assert config.block_size(mib(257)) == mib(320)  # from 256 MiB quarters: 256, 320
    assert config.block_size(mib(600) + 1) == mib(600) + 512


def test_garbage_collection_needs_a_memory_fraction() -> None:
    for fraction, reserved in ((0.5, mib(74)), (1.0, mib(98))):
        config = AllocatorConfig(garbage_collection_threshold=0.6, per_process_memory_fraction=fraction)
        allocator = Allocator(config, capacity=mib(200))
        allocator.free(allocator.malloc(mib(24)))
        allocator.malloc(mib(44))
        allocator.malloc(mib(30))  # above 60 % of 100 MiB the idle 24 MiB go back first
        assert (allocator.reserved, allocator.retries) == (reserved, 0)


def test_a_memory_fraction_limits_the_process() -> None:
    allocator = Allocator(AllocatorConfig(per_process_memory_fraction=0.25), capacity=mib(400))
    allocator.malloc(mib(80))
    with pytest.raises(
        OutOfMemory, match=r"320.00 MiB is free.*in use. 100.00 MiB allowed; Of the allocated"
    ):
        allocator.malloc(mib(30))


def test_expandable_segments_grow_by_pages() -> None:
    allocator = Allocator(EXPANDABLE)
    a = allocator.malloc(mib(30))
    assert (allocator.allocated, allocator.reserved) == (mib(30), mib(40))
    b = allocator.malloc(mib(10))
    assert allocator.reserved == mib(40)
    c = allocator.malloc(mib(5))
    small = allocator.malloc(1000)
    assert (allocator.allocated, allocator.reserved) == (mib(45) + KIB, mib(62))
    assert (b.address, c.address) == (a.address + mib(30), a.address + mib(40))
    for block in (a, c, b, small):
        allocator.free(block)
    allocator.check()
    allocator.malloc(mib(55))  # one merged block of 60 MiB
    assert allocator.reserved == mib(62)
    assert [(s.size, s.expandable, s.small) for s in allocator.segments()] == [
        (mib(60), True, False),
        (mib(2), True, True),
    ] or [s.size for s in allocator.segments()] == [mib(2), mib(60)]


def test_expandable_segments_give_back_whole_pages_when_the_card_is_full() -> None:
    allocator = Allocator(EXPANDABLE, capacity=mib(80))
    a, b, c = (allocator.malloc(mib(20)) for _ in range(3))
    allocator.free(b)
    d = allocator.malloc(mib(30))  # 40 MiB to map, 20 left: the hole's page is unmapped first
    assert (allocator.reserved, allocator.retries) == (mib(80), 1)
    assert d.address == c.address + mib(20)
    assert [s.size for s in allocator.segments()] == [mib(20), mib(60)]
    allocator.check()
    with pytest.raises(OutOfMemory):
        allocator.malloc(mib(20))
    for block in (a, c, d):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.segments()


def test_large_segments_can_be_larger() -> None:
    allocator = Allocator(AllocatorConfig(large_segment_size_mb=64))
    allocator.malloc(mib(5))
    assert allocator.reserved == mib(64)


# --- out of memory


def test_the_message_is_pytorchs() -> None:
    allocator = Allocator(
        capacity=15 * GIB, context=mib(106.25), others={4242: mib(1024)}, device=0, order="ascending"
    )
    allocator.malloc(10 * GIB)
    keep = [allocator.malloc(mib(3)) for _ in range(6)]
    allocator.free(keep[0])
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(mib(4500.5))
    error = caught.value
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 4.40 GiB. GPU 0 has a total capacity of 15.00 GiB of which "
        "3.88 GiB is free. Process 4242 has 1024.00 MiB memory in use. Including non-PyTorch memory, this "
        "process has 10.12 GiB memory in use. Of the allocated memory 10.01 GiB is allocated by PyTorch, and "
        "5.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    assert (error.requested, error.segment) == (mib(4500.5), mib(4502))
    assert error.process == 10 * GIB + mib(20) + mib(106.25) and error.position is None
    assert error.free == 15 * GIB - error.process - GIB


def test_sizes_as_pytorch_prints_them() -> None:
    sizes = {0: "0 bytes", 1024: "1024 bytes", 1025: "1.00 KiB", MIB: "1024.00 KiB", GIB: "1024.00 MiB"}
    assert {n: format_size(n) for n in sizes} == sizes
    assert format_size(3 * GIB // 2) == "1.50 GiB"


def test_an_absurd_request() -> None:
    allocator = Allocator()
    allocator.free(allocator.malloc(mib(30)))
    with pytest.raises(OutOfMemory, match="more than 1EB"):
        allocator.malloc(1 << 61)
    assert allocator.reserved == mib(30) and allocator.retries == 0  # refused before the cache is touched


def test_the_cache_can_be_emptied_any_number_of_times() -> None:
    for config in (EXPANDABLE, AllocatorConfig()):
        allocator = Allocator(config)
        for _ in range(200):
            allocator.free(allocator.malloc(mib(30)))
            allocator.empty_cache()
        assert allocator.reserved == 0


def test_a_replay_stops_at_the_allocation_that_fails() -> None:
    sizes = [mib(20), mib(20), mib(20)]
    result = replay([0, 1, ~0, 2], sizes, capacity=mib(50), context=mib(10))
    assert result.oom is None and result.process_peak == mib(50)
    result = replay([0, 1, 2, ~0], sizes, capacity=mib(50), context=mib(10))
    assert result.oom is not None and result.stopped == result.oom.position == 2
    assert result.oom.allocated == mib(40) and list(result.addresses)[2] == -1


def test_smallest_capacity() -> None:
    events, sizes = [0, ~0, 1], [mib(30), mib(36)]
    assert replay(events, sizes).peak_reserved == mib(66)
    assert smallest_capacity(events, sizes, context=mib(100)) == mib(136)  # with one retry
    assert smallest_capacity([], []) == 0
    config = AllocatorConfig(per_process_memory_fraction=0.5)
    assert smallest_capacity(events, sizes, config) == mib(72)


# --- replays


def test_spans_and_phases() -> None:
    sizes = [mib(20), mib(11.5), mib(40)]
    marks = [(1, "forward"), (3, "backward"), (5, "forward")]
    result = replay([0, 1, ~1, 2, ~2, ~0], sizes, marks=marks)
    assert [(s.name, s.start, s.stop, s.allocated, s.requested) for s in result.spans] == [
        ("setup", 0, 1, mib(20), mib(20)),
        ("forward", 1, 3, mib(32), mib(31.5)),
        ("backward", 3, 5, mib(60), mib(60)),
        ("forward", 5, 6, mib(20), mib(20)),
    ]
    phases = result.phases()
    assert list(phases) == ["setup", "forward", "backward"] and phases["forward"].allocated == mib(32)
    assert phases["backward"].reserved == result.peak_reserved == mib(72)
    assert result.fragmentation == pytest.approx(12 / 72)
    assert [size for _, _, _, size in result.driver_events] == [mib(20), mib(12), mib(40)]


@pytest.mark.parametrize(
    ("events", "message"),
    [([0, 0], "event 1 allocates block 0"), ([~0], "frees block 0"), ([1], "only 1"), ([-5], "only 1")],
)
def test_broken_events(events: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(events, [512])


def test_misuse() -> None:
    allocator = Allocator()
    block = allocator.malloc(5)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed before"):
        allocator.free(block)
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.malloc(-1)
    with pytest.raises(ValueError, match="did you mean descending"):
        Allocator(order="descnding")


# --- options

GOOD = [
    "", "max_split_size_mb:40", "expandable_segments:True", "expandable_segments:False,",
    " max_split_size_mb : 40 ", "roundup_power2_divisions:[64:8,>:1]", "roundup_power2_divisions:[4:0]",
    "roundup_power2_divisions:8", "garbage_collection_threshold:0.8", "large_segment_size_mb:33",
    "large_segment_size_mb:64,max_split_size_mb:64", "pinned_use_background_threads:True", "backend:native",
]  # fmt: skip
BAD = [
    "max_split_size_mb:10", "max_split_size_mb:x", "max_split_size_mb:", "max_split_size_mb=40",
    "expandable_segments:true", "roundup_power2_divisions:3", "roundup_power2_divisions:0",
    "roundup_power2_divisions:[63:8]", "roundup_power2_divisions:[64:3]", "roundup_power2_divisions:[64:8",
    "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "large_segment_size_mb:10",
    "max_split_size_mb:40,large_segment_size_mb:64", "garbage_collection_threshold:often",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_options_are_read(text: str) -> None:
    config = AllocatorConfig.parse(text)
    again = str(config)
    assert AllocatorConfig.parse("" if again == "defaults" else again) == config


@pytest.mark.parametrize("text", [*BAD, "max_spilt_size_mb:40", "backend:cudaMallocAsync"])
def test_bad_options_get_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        AllocatorConfig.parse(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 160


def test_a_misspelt_option_gets_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean max_split_size_mb"):
        AllocatorConfig.parse("max_spilt_size_mb:40")


def test_torchs_own_parser_agrees() -> None:
    torch = pytest.importorskip("torch")
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None:
        pytest.skip("this torch has no allocator settings to compare with")
    fresh = "large_segment_size_mb:20,max_non_split_rounding_mb:20,expandable_segments:False"

    def accepted(text: str) -> bool:
        parse(fresh)
        try:
            parse(text)
        except (ValueError, RuntimeError, IndexError):
            return False
        return True

    try:
        assert [t for t in GOOD if not accepted(t)] == []
        assert [t for t in BAD if accepted(t)] == []
    finally:
        parse(fresh)


# --- a second allocator, written from the same rules with none of the same data structures


@dataclass(eq=False)
class Piece:
    address: int
    size: int
    kind: str  # 'used', 'free', 'hole' (unmapped)
    born: int = 0


class Naive:
    """Segments as plain lists of pieces; every search looks at everything."""

    def __init__(self, config: AllocatorConfig, capacity: int | None, order: str) -> None:
        self.c, self.capacity, self.order = config, capacity, order
        self.pools: dict[bool, list[list[Piece]]] = {True: [], False: []}
        self.calls = {True: 0, False: 0}
        self.up = self.down = 1 << 46
        self.reserved = self.retries = 0
        self.spare: dict[int, list[int]] = {}
        self.split = config.max_split_size_mb * MIB if config.max_split_size_mb else None
        fraction = config.per_process_memory_fraction
        self.allowed = int(capacity * fraction) if capacity is not None and fraction < 1 else None
        self.gc = config.garbage_collection_threshold if self.allowed is not None else 0.0

    def free_pieces(self, small: bool) -> list[tuple[Piece, list[Piece]]]:
        found = [(p, s) for s in self.pools[small] for p in s if p.kind == "free"]
        return sorted(found, key=lambda f: (f[0].size, f[0].address))

    def malloc(self, size: int) -> Piece:
        need = self.c.block_size(size)
        small = need <= MIB
        self.calls[small] += bool(self.gc)
        found = self.find(small, need)
        if found is None:
            if self.gc:
                self.collect()
            ask = self.c.segment_size(need)
            found = self.new(small, need, ask)
            if found is None and self.release_oversize(small, need):
                found = self.new(small, need, ask)
            if found is None:
                self.release(False)
                self.release(True)
                self.retries += 1
                found = self.new(small, need, ask)
            if found is None:
                raise MemoryError
        piece, segment = found
        rest = piece.size - need
        if small or self.c.expandable_segments:
            cut = rest >= 512
        else:
            cut = (self.split is None or need < self.split) and rest > MIB
        if cut:
            i = segment.index(piece)
            segment.insert(i + 1, Piece(piece.address + need, rest, "free", self.calls[small]))
            piece.size = need
        piece.kind = "used"
        return piece

    def find(self, small: bool, need: int) -> tuple[Piece, list[Piece]] | None:
        fits = [f for f in self.free_pieces(small) if f[0].size >= need]
        if not fits:
            return None
        if self.c.expandable_segments:
            while len(fits) > 1 and self.growable(*fits[1]) < self.growable(*fits[0]):
                fits.pop(0)
        size = fits[0][0].size
        if self.split is not None:
            if need < self.split <= size:
                return None
            if need >= self.split and size >= need + 20 * MIB:
                return None
        return fits[0]

    def growable(self, piece: Piece, segment: list[Piece]) -> int:
        after = segment[segment.index(piece) + 1 :][:1]
        return piece.size + (after[0].size if after and after[0].kind == "hole" else 0)

    def place(self, size: int) -> int:
        up = {"split": 20 * MIB, "pools": 2 * MIB, "ascending": 1 << 60, "descending": 0}[self.order]
        if size <= up:
            self.up += size
            return self.up - size
        self.down -= size
        return self.down

    def new(self, small: bool, need: int, ask: int) -> tuple[Piece, list[Piece]] | None:
        if self.allowed is not None and self.reserved + ask > self.allowed:
            return None
        if self.c.expandable_segments:
            return self.grow(small, need)
        if self.capacity is not None and self.reserved + ask > self.capacity:
            return None
        self.reserved += ask
        piece = Piece(self.place(ask), ask, "free")
        self.pools[small].append([piece])
        return piece, self.pools[small][-1]

    def grow(self, small: bool, need: int) -> tuple[Piece, list[Piece]] | None:
        page = 2 * MIB if small else self.c.large_segment_size_mb * MIB
        holes = sorted(
            ((p, s) for s in self.pools[small] for p in s if p.kind == "hole"), key=lambda h: h[0].address
        )
        for hole, segment in holes:
            i = segment.index(hole)
            if i and segment[i - 1].kind == "free":
                i -= 1
            run = 0
            for piece in segment[i:]:
                if piece.kind == "used" or run >= need:
                    break
                run += piece.size
            if run >= need:
                start = segment[i].address
                break
        else:
            pages = -(-(self.capacity * 9 // 8) // page) if self.capacity is not None else (1 << 40) // page
            size = max(pages, 1, -(-need // page)) * page
            spare = self.spare.get(size)
            start = spare.pop(spare.index(min(spare))) if spare else self.place(size)
            segment = [Piece(start, size, "hole")]
            self.pools[small].append(segment)
        while True:
            i = next(k for k, p in enumerate(segment) if p.address == start)
            piece = segment[i]
            if piece.kind == "free" and piece.size >= need:
                return piece, segment
            j = i if piece.kind == "hole" else i + 1
            missing = min(need - (0 if j == i else piece.size), segment[j].size)
            size = -(-missing // page) * page
            if self.capacity is not None and self.reserved + size > self.capacity:
                return None
            self.reserved += size
            self.cut(segment, segment[j], segment[j].address, segment[j].address + size, "free")
            self.merge(segment, self.calls[small])

    def cut(self, segment: list[Piece], piece: Piece, start: int, stop: int, kind: str) -> None:
        i = segment.index(piece)
        end = piece.address + piece.size
        parts = [(piece.address, start, piece.kind), (start, stop, kind), (stop, end, piece.kind)]
        segment[i : i + 1] = [Piece(a, b - a, k, piece.born) for a, b, k in parts if b > a]

    def merge(self, segment: list[Piece], born: int) -> None:
        i = 0
        while i + 1 < len(segment):
            a, b = segment[i], segment[i + 1]
            if a.kind == b.kind and a.kind != "used":
                a.size += b.size
                a.born = born
                del segment[i + 1]
            else:
                i += 1

    def free(self, piece: Piece) -> None:
        for small, segments in self.pools.items():
            for segment in segments:
                if piece in segment:
                    piece.kind, piece.born = "free", self.calls[small]
                    self.merge(segment, self.calls[small])
                    return

    def release(self, small: bool) -> None:
        page = 2 * MIB if small else self.c.large_segment_size_mb * MIB
        for segment in list(self.pools[small]):
            if not self.c.expandable_segments:
                if [p.kind for p in segment] == ["free"]:
                    self.drop(small, segment)
                continue
            base, given_back = segment[0].address, False
            for piece in [p for p in segment if p.kind == "free"]:
                start = base + -(-(piece.address - base) // page) * page
                stop = base + (piece.address + piece.size - base) // page * page
                if stop > start:
                    self.reserved -= stop - start
                    given_back = True
                    self.cut(segment, piece, start, stop, "hole")
            self.merge(segment, self.calls[small])
            if given_back and [p.kind for p in segment] == ["hole"]:
                self.pools[small].remove(segment)
                self.spare.setdefault(segment[0].size, []).append(base)

    def drop(self, small: bool, segment: list[Piece]) -> None:
        self.reserved -= sum(p.size for p in segment)
        self.pools[small] = [s for s in self.pools[small] if s is not segment]

    def release_oversize(self, small: bool, need: int) -> bool:
        if self.split is None:
            return False
        need = max(need, self.split)
        pieces = self.free_pieces(small)
        fits = [f for f in pieces if f[0].size >= need]
        if fits and not self.c.expandable_segments:
            self.drop(small, fits[0][1])
            return True
        released = 0
        for piece, segment in reversed([f for f in pieces if f[0].size < need]):
            if released >= need or piece.size < self.split:
                break
            if not self.c.expandable_segments:
                released += piece.size
                self.drop(small, segment)
        return released >= need

    def collect(self) -> None:
        assert self.allowed is not None
        target = self.reserved - int(self.gc * self.allowed)
        done, more = 0, True
        whole = [f for f in self.free_pieces(False) if len(f[1]) == 1]
        ages = sum(self.calls[False] - p.born for p, _ in whole)
        count = len(whole)
        while target > 0 and done < target and more and count:
            limit, more = ages / count, False
            for piece, segment in whole:
                age = self.calls[False] - piece.born
                if any(s is segment for s in self.pools[False]) and age >= limit and piece in segment:
                    more = True
                    done, ages, count = done + piece.size, ages - age, count - 1
                    self.drop(False, segment)


CONFIGS = [
    AllocatorConfig(),
    EXPANDABLE,
    AllocatorConfig(expandable_segments=True, large_segment_size_mb=32),
    AllocatorConfig(max_split_size_mb=24),
    AllocatorConfig(roundup_power2_divisions=4),
    AllocatorConfig(garbage_collection_threshold=0.3, per_process_memory_fraction=0.8),
    AllocatorConfig(max_split_size_mb=32, garbage_collection_threshold=0.5, per_process_memory_fraction=0.9),
]
REQUESTS = st.one_of(
    st.sampled_from([512, MIB, mib(2), mib(10), mib(11.5), mib(20), mib(30), mib(36)]),
    st.integers(1, mib(2)),
    st.integers(1, mib(48)),
)
STEPS = st.one_of(REQUESTS.map(lambda n: ("malloc", n)), st.integers(0, 99).map(lambda n: ("free", n)))
PROGRAMS = st.one_of(st.lists(STEPS, max_size=12), st.lists(STEPS, min_size=25, max_size=70))


@settings(deadline=None, max_examples=300)
@given(
    PROGRAMS,
    st.sampled_from(CONFIGS),
    st.sampled_from([None, mib(64), mib(151)]),
    st.sampled_from(list(ORDERS)),
)
def test_the_two_allocators_agree(
    program: list[tuple[str, int]], config: AllocatorConfig, capacity: int | None, order: str
) -> None:
    allocator, naive = Allocator(config, capacity=capacity, order=order), Naive(config, capacity, order)
    live = []
    for verb, n in program:
        if verb == "malloc":
            try:
                expected = naive.malloc(n)
            except MemoryError:
                with pytest.raises(OutOfMemory):
                    allocator.malloc(n)
            else:
                block = allocator.malloc(n)
                live.append((block, expected))
                assert (block.address, block.size) == (expected.address, expected.size)
        elif live:
            block, piece = live.pop(n % len(live))
            allocator.free(block)
            naive.free(piece)
        allocator.check()
        assert (allocator.reserved, allocator.retries) == (naive.reserved, naive.retries)
    for block, _ in live:
        allocator.free(block)
    allocator.check()
    assert allocator.allocated == allocator.requested == 0
    if not config.expandable_segments:
        assert all(len(s.blocks) == 1 for s in allocator.segments())
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator.segments()


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    events: list[int] = []
    sizes: list[int] = []
    live: list[int] = []
    for allocates, pick, size in draw(st.lists(st.tuples(st.booleans(), st.integers(0, 99), REQUESTS))):
        if allocates or not live:
            live.append(len(sizes))
            events.append(len(sizes))
            sizes.append(size)
        else:
            events.append(~live.pop(pick % len(live)))
    return events, sizes


@settings(deadline=None)
@given(streams(), st.sampled_from(CONFIGS[:5]))
def test_replays(stream: tuple[list[int], list[int]], config: AllocatorConfig) -> None:
    events, sizes = stream
    result = replay(events, sizes, config)
    again = replay(events, sizes, config)
    assert (result.addresses, result.driver_events) == (again.addresses, again.driver_events)
    assert result.peak_requested <= result.peak_allocated <= result.peak_reserved
    # a card of exactly the reserved peak changes nothing
    if result.peak_reserved and not config.expandable_segments:
        enough = replay(events, sizes, config, capacity=result.peak_reserved)
        assert enough.oom is None and enough.retries == 0 and enough.peak_reserved == result.peak_reserved
    # one that can't hold the tensors fails
    if result.peak_requested:
        assert replay(events, sizes, config, capacity=result.peak_requested - 1).oom is not None
    for one in replay_orders(events, sizes, config).values():
        assert one.peak_requested == result.peak_requested


@settings(deadline=None, max_examples=40)
@given(streams(), st.sampled_from(CONFIGS[:5]))
def test_smallest_capacity_runs_and_less_does_not(
    stream: tuple[list[int], list[int]], config: AllocatorConfig
) -> None:
    events, sizes = stream
    smallest = smallest_capacity(events, sizes, config, context=mib(7))
    assert replay(events, sizes, config, capacity=smallest, context=mib(7)).oom is None
    if events:
        less = replay(events, sizes, config, capacity=smallest - mib(2), context=mib(7))
        assert less.oom is not None and less.oom.context == mib(7)
