"""What an out-of-memory message says, what it can't say, and what to do next. No torch.

    print(read("CUDA out of memory. Tried to allocate 1.50 GiB ..."))

`read` takes a message, a traceback or a whole log. Real logs wrap lines inside sentences, put ranks and time
stamps before them, colour them, and repeat them from nested tracebacks. So the text is first scanned for a
few words; around each of them, what a launcher or logger adds is taken off, and **all white space is
removed**: a sentence that was broken anywhere is whole again. Each clause is then read on its own, in any
order.

The forms, by the version that brought them (collected from public reports and PyTorch's sources, torch 0.1 to
2.14):

=================== ========= ============================================================================
thc                 0.1       `cuda runtime error (2) : out of memory`; no sizes
cuda_no_sizes       0.4       `CUDA error: out of memory`; today for asynchronous and pinned-memory failures
cached              1.0       `(GPU 0; ... total capacity; ... already allocated; ... free; ... cached)`
reserved            1.4       `... reserved in total by PyTorch)`; includes the allocated
reserved_hint       1.11      and the hint at max_split_size_mb
process             2.1       sentences, with what processes hold; `reserved by PyTorch but unallocated`
process_pools       2.4       and private pools, or the hint at PYTORCH_CUDA_ALLOC_CONF=expandable_segments
process_class       2.5       and class `torch.OutOfMemoryError`, or the prefix `[rank3]:`
process_alloc_conf  2.9, 2.10 and the hint at PYTORCH_ALLOC_CONF
allowed             a cap     `... 1.05 GiB allowed; ...` (a memory fraction)
malloc_async        async     `Allocation on device 0 would exceed allowed memory` (cudaMallocAsync)
hip, xpu            others    as CUDA's
mps                 Apple     `MPS backend out of memory (MPS allocated: ...)`
masked              any       NVML's assertion: the reporter itself failed
host                any       the host's memory, not the card's
other               any       CUBLAS_STATUS_ALLOC_FAILED, JAX, NCCL, a request of more than 1 EB, ...
=================== ========= ============================================================================

Several can hold at once; the most specific is given. Sizes are printed with two decimals and a binary unit,
in old messages written KB, MB and GB: the nearest whole number of bytes is given.
"""

from __future__ import annotations

import gzip
import html
import io
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from memlab.allocator import AllocatorConfig, format_size
from memlab.units import GIB, KIB, MIB, TIB, format_bytes

if TYPE_CHECKING:
    from memlab.models import ConvConfig, TransformerConfig
    from memlab.recipe import Recipe
    from memlab.snapshot import SnapshotSummary

FORMS = (
    "thc", "cuda_no_sizes", "cached", "reserved", "reserved_hint", "process", "process_pools",
    "process_class", "process_alloc_conf", "allowed", "malloc_async", "hip", "xpu", "mps", "masked", "host",
    "other",
)  # fmt: skip
LABELS = (
    "single_request_exceeds_gpu", "int_overflow", "memory_cap", "other_process", "fragmentation", "capacity",
    "outside_allocator", "host_ram", "host_shm", "host_pinned", "masked_oom", "cannot_tell",
)  # fmt: skip
#: A log may hold more distinct messages than anybody reads; beyond these they are only counted.
MOST_REPORTS = 1000

_ERAS = {
    "thc": "torch 0.1 to 0.3",
    "cuda_no_sizes": "torch 0.4 or later",
    "cached": "torch 1.0 to 1.3",
    "reserved": "torch 1.4 to 1.10",
    "reserved_hint": "torch 1.11 to 2.0",
    "process": "torch 2.1 or later",
    "process_pools": "torch 2.4 or later",
    "process_class": "torch 2.5 to 2.9",
    "process_alloc_conf": "torch 2.9 or later",
}
_NUMBERS = (
    "requested", "total", "free", "allocated", "reserved", "reserved_unallocated", "this_process", "allowed",
    "private_pools",
)  # fmt: skip


# --- the answer ---------------------------------------------------------------------------------------------


class Cause(NamedTuple):
    """A label of `LABELS` and the arithmetic that supports it."""

    label: str
    why: str


class Match(NamedTuple):
    """A tensor of the recipe whose block has the size of the request."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # the tensor's own, not rounded


@dataclass
class Report:
    """One message. Sizes in bytes as printed (nearest integer), None where the message doesn't give them.

    `processes` are (pid, bytes) of the processes that it names by number; `itself` is the one of them that
    must be this process. `line` is where it starts in the input, `rank` the prefix that a launcher put before
    it, `count` how often the same message stands there (nested tracebacks repeat it). `where`, `code`,
    `deepest` and `phase` come from the traceback above it, if there is one.
    """

    form: str
    backend: str | None
    device: int | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    reserved_unallocated: int | None = None
    this_process: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    allowed: int | None = None
    private_pools: int | None = None
    causes: list[Cause] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    cannot_tell: list[str] = field(default_factory=list)
    line: int = 1
    rank: str = ""
    count: int = 1
    where: str = ""  # the deepest line that is the user's own
    code: str = ""  # what stands there
    deepest: str = ""  # the traceback's last frame, if that is a library's
    operator: str = ""  # memlab's own cards name it
    phase: str = ""
    own_pids: frozenset[int] = frozenset()  # what the launcher's lines around it call this rank's process
    itself: int | None = None
    pinned: bool = False  # that traceback goes through pinned memory
    matches: list[Match] = field(default_factory=list)
    note: str = ""  # what --model found or didn't
    style: str = ""  # the CUDA form beneath `allowed`, `hip`, `xpu`
    kind: str = ""  # which words began it
    option_name: str = ""  # the environment variable that its hint names
    printed: dict[str, str] = field(default_factory=dict)  # sizes as they stand there: '1.50 GiB'
    elsewhere: int | None = None  # MPS: other allocations
    text: str = ""  # without white space, in lower case

    @property
    def other_processes(self) -> list[int]:
        """Bytes of each process that the message names by number, as printed; `itself` may be one of them."""
        return [size for _, size in self.processes]

    @property
    def rivals(self) -> list[tuple[int, int]]:
        """(pid, bytes) of the named processes that are somebody else's, sizes beyond the card left out."""
        return [(pid, n) for pid, n in self.processes if pid != self.itself and _real(n, self.total)]

    @property
    def own_process(self) -> int | None:
        """What the driver counts for this process: printed, or named by a number that must be its own.

        None where the size isn't one: Windows and WSL don't count per process, and 2^64 bytes are printed.
        """
        own = dict(self.processes).get(self.itself) if self.itself is not None else self.this_process
        return own if own is not None and _real(own, self.total) else None

    @property
    def unallocated(self) -> int | None:
        """Reserved but not allocated: printed, or the difference of two printed sizes."""
        if self.reserved_unallocated is None and self.reserved is not None and self.allocated is not None:
            return max(self.reserved - self.allocated, 0)
        return self.reserved_unallocated

    @property
    def cached_total(self) -> int | None:
        """Reserved in total: printed, or the sum of two printed sizes."""
        if self.reserved is None and self.allocated is not None and self.reserved_unallocated is not None:
            return self.allocated + self.reserved_unallocated
        return self.reserved

    @property
    def version(self) -> str:
        """What the form says about the version of torch; '' if nothing."""
        if self.style == "process" and "totalcapacty" in self.text:
            return "torch 2.1 or 2.2"
        return _ERAS.get(self.style, "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sizes are whole bytes or None."""
        return {
            "form": self.form,
            "backend": self.backend,
            "device": self.device,
            "requested": self.requested,
            "total": self.total,
            "free": self.free,
            "allocated": self.allocated,
            "reserved": self.reserved,
            "reserved_unallocated": self.reserved_unallocated,
            "this_process": self.this_process,
            "other_processes": self.other_processes,
            "allowed": self.allowed,
            "private_pools": self.private_pools,
            "causes": [{"label": cause.label, "why": cause.why} for cause in self.causes],
            "actions": list(self.actions),
            "cannot_tell": list(self.cannot_tell),
        }

    def _numbers(self) -> Iterator[tuple[str, str, str]]:
        def row(name: str, size: int | None, note: str = "") -> Iterator[tuple[str, str, str]]:
            if size is not None:
                yield name, format_bytes(size), note

        block = "" if self.form in ("malloc_async", "mps", "host", "other") else "the block, not the tensor"
        yield from row("requested", self.requested, block)
        yield from row("total on the card" if self.backend != "cpu" else "total", self.total)
        yield from row("allowed", self.allowed, "no limit is set" if (self.allowed or 0) >= 1 << 60 else "")
        yield from row("free on the card", self.free)
        for pid, size in self.rivals:
            yield from row("another process", size, f"process {pid}")
        note = "tensors, cache, CUDA context, libraries" if self.backend == "cuda" else ""
        if self.itself is not None:
            note = f"named process {self.itself}, which must be this one"
        yield from row("this process", self.own_process, note)
        if self.this_process is not None and self.own_process is None:
            yield "this process", "not known", "what is printed is no size (Windows, WSL)"
        yield from row("  allocated", self.allocated, "blocks that hold tensors")
        yield from row("    private pools", self.private_pools, "of the allocated; e.g. CUDA graphs")
        yield from row("  reserved", self.reserved, "allocated and cached")
        if self.unallocated is not None:
            derived = "" if self.reserved_unallocated is not None else "reserved - allocated"
            yield from row("  not allocated", self.unallocated, derived or "reserved, in no tensor")
        if (outside := _outside(self)) is not None and outside > 0:
            yield from row("  outside", outside, "this process - reserved: context, libraries")
        elif (rest := _rest(self)) is not None and rest > 0:
            yield from row("outside or others", rest, "total - free - reserved: context, others")
        yield from row("other allocations", self.elsewhere, "Metal's, beside MPS tensors")

    def __str__(self) -> str:
        backend = {"cpu": "host memory", None: "no card named"}.get(self.backend, str(self.backend).upper())
        head = f"{backend}, form {self.form}"
        if self.version:
            head += f" ({self.version})"
        if self.device is not None:
            head += f", device {self.device}"
        lines = [head]
        if self.where:
            text = f"raised in {self.where}{f' ({self.phase})' if self.phase else ''}"
            lines += wrap(f"{text}: {self.code}" if self.code else text, 80, subsequent_indent="  ")
        if self.operator:
            lines += wrap(f"asked for by {self.operator} ({self.phase})", 80, subsequent_indent="  ")
        if self.deepest:
            lines += wrap(f"deepest frame: {self.deepest}", 80, subsequent_indent="  ")
        lines += [f"  {name:<19}{size:>12}  {note}".rstrip() for name, size, note in self._numbers()]
        if self.note:
            lines += ["", *wrap(self.note, 80)]
            for match in self.matches:
                shape = " x ".join(map(str, match.shape)) or "scalar"
                lines += wrap(
                    f"{match.name}: {shape} {match.dtype} = {format_bytes(match.bytes)}",
                    78, initial_indent="  ", subsequent_indent="    ",
                )  # fmt: skip
        lines += ["", "Likely causes, the likeliest first"]
        for cause in self.causes:
            lines += _item(f"{cause.label}: {cause.why}", "-")
        lines += ["", "What to do, in this order"]
        for number, action in enumerate(self.actions, 1):
            lines += _item(action, f"{number}.")
        if self.cannot_tell:
            lines += ["", "What the message can't tell, and what would decide"]
            for text in self.cannot_tell:
                lines += _item(text, "-")
        return "\n".join(lines)


@dataclass
class Reports:
    """All messages of an input, in order; the first is the one to read: later ones are often its echo.

    `unread` counts what stands behind the first `MOST_REPORTS`. `snapshot` is what a snapshot of the same
    process shows.
    """

    reports: list[Report] = field(default_factory=list)
    unread: int = 0
    not_memory: str = ""  # a CUDA error that isn't about memory
    snapshot: SnapshotSummary | None = None

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __getitem__(self, index: int) -> Report:
        return self.reports[index]

    @property
    def first(self) -> Report:
        """The first message; raises IndexError if there is none (a snapshot alone)."""
        return self.reports[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: `reports` in order; `found` says of each where it stands, and which is the first."""
        data: dict[str, Any] = {
            "reports": [report.to_dict() for report in self.reports],
            "found": [
                {
                    "first": i == 0,
                    "line": report.line,
                    "rank": report.rank or None,
                    "count": report.count,
                    "where": report.where or None,
                    "deepest": report.deepest or None,
                    "operator": report.operator or None,
                    "tensors": [match._asdict() for match in report.matches],
                }
                for i, report in enumerate(self.reports)
            ],
            "unread": self.unread,
        }
        if self.snapshot is not None:
            data["snapshot"] = self.snapshot.to_dict()
            if self.reports:
                data["verdict"] = verdict(self.first, self.snapshot) or None
        return data

    def __str__(self) -> str:
        parts = []
        if self.reports:
            parts.append(f"{self._place(self.first)}\n{self.first}")
        if len(self.reports) > 1:
            parts += self._table()
        if self.unread:
            parts.append(f"and {self.unread} more behind these, which weren't read")
        if self.snapshot is not None:
            parts.append(str(self.snapshot))
            if self.reports and (text := verdict(self.first, self.snapshot)):
                parts.append("\n".join(wrap(text, 80)))
        return "\n\n".join(parts)

    def _place(self, report: Report) -> str:
        place = self._where(report)
        if report.count > 1:
            place += f", {report.count} times (the same message; counted once)"
        return f"FIRST message 1 of {len(self.reports)}: {place}" if len(self.reports) > 1 else place

    def _table(self) -> Iterator[str]:
        """The other messages, a line each; what to do is said once for each cause."""
        shown, hidden = self.reports[: _ROWS + 1], len(self.reports) - _ROWS - 1
        lines = [
            f"All {len(self.reports)} distinct messages" if hidden <= 0 else f"The first {_ROWS + 1} of them"
        ]
        lines.append(
            f"{'line':>6} {'rank':<9}{'GPU':>3}{'asked':>11}{'free':>11}{'tensors':>11}  likely causes"
        )
        for report in shown:
            sizes = (report.requested, report.free, report.allocated)
            texts = ("-" if n is None else format_bytes(n) for n in sizes)
            labels = ", ".join(cause.label for cause in report.causes)
            lines.append(
                f"{report.line:>6} {report.rank[-8:]:<9}{'-' if report.device is None else report.device:>3}"
                + "".join(f"{text:>11}" for text in texts)
                + f"  {labels if len(labels) <= 26 else report.causes[0].label}"
            )
        if hidden > 0:
            lines.append(
                f"and {hidden} more distinct message{'s' if hidden > 1 else ''}; --json has each in full"
            )
        else:
            lines.append("--json has each in full")
        yield "\n".join(lines)
        said = {self.first.causes[0].label}
        known = set(self.first.actions)
        for report in self.reports:
            label = report.causes[0].label
            if label in said:
                continue
            said.add(label)
            lines = [f"Another cause: {self._where(report)}"]
            for cause in report.causes:
                lines += _item(f"{cause.label}: {cause.why}", "-")
            new = [action for action in report.actions if action not in known]
            known.update(new)
            for number, action in enumerate(new, 1):
                lines += _item(action, f"{number}.")
            yield "\n".join(lines)

    @staticmethod
    def _where(report: Report) -> str:
        return f"line {report.line}" + (f", {report.rank}" if report.rank else "")


_ROWS = 16  # messages in the table, beside the first


class NoMessageError(ValueError):
    """The input holds no out-of-memory message; the text says what it holds instead, if that is known."""


def _item(text: str, mark: str) -> list[str]:
    lines = wrap(text, 77 - len(mark), break_on_hyphens=False)
    indent = " " * (len(mark) + 1)
    return [f"{mark} {lines[0]}", *(indent + line for line in lines[1:])]


def read(source: str | bytes | os.PathLike[str] | IO[bytes]) -> Reports:
    """Reads a message, a log, or the file that holds one; a gzip-compressed one too.

    A str is text; if it is a single line and the path of a file, that file is read. Raises NoMessageError if
    there is no out-of-memory message in it, OSError if a file can't be read.
    """
    if isinstance(source, str) and "\n" not in source and len(source) < 4096 and _is_file(source):
        source = Path(source)
    if isinstance(source, str):
        found = _read(io.BytesIO(source.encode("utf-8", "replace")))
    elif isinstance(source, bytes | bytearray):
        found = _read(io.BytesIO(source))
    elif isinstance(source, os.PathLike):
        with Path(source).open("rb") as file:
            found = _read(file)
    else:
        found = _read(source)
    if not found.reports:
        raise NoMessageError(found.not_memory or _NOTHING)
    for report in found.reports:
        _explain(report)
    return found


_NOTHING = (
    "no out-of-memory message found: paste it from 'CUDA out of memory' to its end, with the traceback above "
    "if there is one"
)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


# --- from bytes to regions that may hold a message ----------------------------------------------------------

_CHUNK = 8 * MIB
_BEFORE, _AFTER, _OWN = 4 * KIB, 8 * KIB, 256 * KIB  # bytes around a word, and the most of one region
_MOST_UNPACKED = GIB  # of a gzip-compressed log

#: Words of which every message holds several: a line break can spoil only one of them. The first group stands
#: in nothing else; logs may be full of the second.
_ANCHORS = (
    b"tried to alloc", b"of mem", b"total capac", b"reserved in total", b"reserved by pytorch",
    b"exceed allowed", b"nvml_success", b"defaultcpualloc", b"outofmemory",
)  # fmt: skip
_MENTIONS = (
    b"cuda out", b"hip out", b"xpu out", b"backend out", b"cuda error", b"hip error", b"to allocate",
    b"allowed mem", b"assert failed", b"killed by signal", b"bus error", b"return code = -9",
    b"exitcode  : -9", b"exitcode: -9", b"exit code -9", b"(sigkill)", b"oom-kill", b"oom_kill", b"oomkill",
    b"alloc_failed", b"resource_exhausted", b"resourceexhausted", b"shared memory (shm)", b"cuda failure",
    b"cuda driver error", b"errormemoryallocation", b"memoryerror", b"bad_alloc", b"cannot allocate mem",
    b"exit code 137", b"illegaladdress", b"error_out_of_",
)  # fmt: skip


class _Budget:
    """Bytes around anchors and around mentions that are still read: a log full of them must not take forever.

    What lies behind is only counted, in `unread`.
    """

    def __init__(self) -> None:
        self.anchors, self.mentions = 8 * MIB, 4 * MIB
        self.unread = 0


class _Region(NamedTuple):
    text: bytes
    position: int  # of the first byte in the input
    line: int  # of the first byte
    own_from: int  # messages that start in [own_from, own_to) are this region's
    own_to: int


def _unpacked(stream: IO[bytes]) -> Iterator[bytes]:
    """Chunks of UTF-8 text from what may be gzip or, as Windows' shells write it, UTF-16."""
    head = stream.read(2)
    if head == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=_Rejoined(head, stream)) as packed:
                left = _MOST_UNPACKED
                while left > 0 and (chunk := packed.read(min(_CHUNK, left))):
                    left -= len(chunk)
                    yield chunk
        except (OSError, EOFError, ValueError) as error:
            raise NoMessageError(f"the compressed file is damaged: {error}") from None
        except Exception as error:  # zlib.error, which is no OSError
            raise NoMessageError(f"the compressed file is damaged: {error}") from None
        return
    if head in (b"\xff\xfe", b"\xfe\xff"):
        name = "utf-16-le" if head == b"\xff\xfe" else "utf-16-be"
        import codecs

        decoder = codecs.getincrementaldecoder(name)("replace")
        while chunk := stream.read(_CHUNK):
            yield decoder.decode(chunk).encode("utf-8", "replace")
        return
    first = head + stream.read(_CHUNK)
    while first:
        yield first
        first = stream.read(_CHUNK)


class _Rejoined(io.RawIOBase):
    """A stream with its first bytes put back."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self.head, self.rest = head, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self.head:
            data, self.head = self.head, b""
            return data
        return self.rest.read(size)


def _regions(stream: IO[bytes], budget: _Budget) -> Iterator[_Region]:
    """The parts of the input around the anchors; their `own` ranges don't overlap."""
    carry, line, position, done = b"", 1, 0, 0  # `done`: bytes of `carry` that have been owned
    chunks = _unpacked(stream)
    while True:
        chunk = next(chunks, b"")
        data, last = carry + chunk, not chunk
        limit = len(data) if last else max(len(data) - _AFTER, done)
        low = data.lower()
        # a message that starts before the limit may have its first anchor behind it
        window = max(done - 32, 0), min(limit + _BEFORE, len(data))
        hits = _hits(low, _ANCHORS, *window)
        spans = _spans(hits, done, limit)
        if budget.anchors <= 0:
            budget.unread += _mentioned(low, done, limit)
            spans = []
        elif budget.mentions > 0 and (more := _hits(low, _MENTIONS, *window)):
            size = sum(end - begin for begin, end in spans)
            spans = _spans(sorted(hits + more), done, limit)
            budget.mentions -= sum(end - begin for begin, end in spans) - size
        counted = 0
        for begin, end in spans:
            for own in range(begin, end, _OWN):
                stop = min(own + _OWN, end)
                start = max(own - _BEFORE, 0)
                line += _breaks(data, counted, start)
                counted = start
                if budget.anchors <= 0:
                    budget.unread += _mentioned(low, own, stop)
                    continue
                budget.anchors -= stop - own
                yield _Region(data[start : stop + _AFTER], position + start, line, own - start, stop - start)
        if last:
            return
        keep = max(limit - _BEFORE, 0)
        line += _breaks(data, counted, keep)
        carry, done, position = data[keep:], limit - keep, position + keep


def _mentioned(low: bytes, start: int, stop: int) -> int:
    """Messages, by what most of them hold once."""
    return max(low.count(words, start, stop) for words in (b"tried to alloc", b"out of memory"))


def _breaks(data: bytes, start: int, stop: int) -> int:
    """Line breaks from `start` to `stop`; negative when that is backwards."""
    return data.count(b"\n", start, stop) if start <= stop else -data.count(b"\n", stop, start)


def _hits(low: bytes, words: tuple[bytes, ...], start: int, stop: int) -> list[int]:
    """Positions of the words, thinned out: after a hit the next is sought where its region doesn't reach."""
    found = []
    for word in words:
        position = low.find(word, start, stop)
        while position >= 0:
            found.append(position)
            position = low.find(word, position + _BEFORE, stop)
    return sorted(found)


def _spans(hits: list[int], first: int, limit: int) -> list[tuple[int, int]]:
    """What lies around the hits, from `first` to `limit`; where it touches, in one."""
    spans: list[tuple[int, int]] = []
    for hit in hits:
        begin, end = max(hit - _BEFORE, first), min(hit + _AFTER, limit)
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        elif end > begin:
            spans.append((begin, end))
    return spans


# --- from a region to text without white space --------------------------------------------------------------

_ANSI = re.compile(
    r"(?:\x1b|\\x1b|\\033|\\u001b)(?:\[[0-9;:?]{0,40}[@-~]|\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|[@-Z\\-_])"
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,300}>")
_ESCAPED_BREAK = re.compile(r"\\[rn]")
_PREFIX = re.compile(
    r"""(?:\s++
    | [>|│┃▏]++
    | \[(?:rank|default)\d{1,6}\]:?
    | \[\d{1,6},\s?\d{1,6}\]<std(?:err|out)>:?
    | \((?:[\w.+-]{1,60}\s)?pid=\d{1,10}[^()]{0,80}\)
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\s]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|\s?[+-]\d\d:?\d\d|\sUTC)?\]?
    | \[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?(?=\s)
    | \d\d[-/]\d\d[-/]\d{2,4}(?=\s)
    | \d\d-\d\d(?=\s\d\d:)
    | (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d
      (?:\s[\w.-]{1,60}\s[\w./-]{1,60}(?:\[\d{1,10}\])?:)?
    | [IWEF]\d{4}\s\d\d:\d\d:\d\d\.\d{1,9}\s++\d{1,10}\s[^\s\]]{1,200}\]
    | (?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:?
    | std(?:err|out)\s[FP]\s
    | (?<=[\dZ\]]\s)[A-Za-z][\w.]{0,30}(?:-[\w.]{1,20}){0,4}-\d{1,5}(?:/\d{1,4})?(?=\s)
    | [A-Za-z][\w.]{0,30}(?:-[\w.]{1,20}){0,4}-\d{1,5}(?:/\d{1,4})?(?=\s\[?(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d))
    | \[[^\[\]]{1,80}\](?=[\s:]):?
    | [-:]\s
    )*+""",
    re.VERBOSE,
)
_HEAD_LABEL = re.compile(r"(\d{1,4}:|[\w.-]{0,38}[-_]\d{1,4}\s{0,20}\|)\s")  # srun -l, docker compose
_LABEL = re.compile(
    r"\[(?:rank|default)\d{1,6}\]|\[\d{1,6},\s?\d{1,6}\](?=<std)|(?:[\w.+-]{1,60}\s)?pid=\d{1,10}"
)
_PIECE = 2048  # bytes: longer lines are cut at multiples of it, counted from the start of the input


class _Stream:
    """What one rank wrote, without white space, and where each piece of it came from."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.parts: list[str] = []
        self.starts: list[int] = []  # in the joined text
        self.origins: list[tuple[int, int]] = []  # line, offset in the region
        self.length = 0

    def add(self, text: str, line: int, offset: int) -> None:
        packed = "".join(text.split())
        if packed:
            self.starts.append(self.length)
            self.origins.append((line, offset))
            self.parts.append(packed)
            self.length += len(packed)


def _pieces(region: _Region) -> Iterator[tuple[str, int, int, bool]]:
    """(text, line, offset, is it the start of its line)."""
    line, offset = region.line, 0
    for raw in region.text.split(b"\n"):
        if len(raw) <= _PIECE:
            yield raw.decode("utf-8", "ignore"), line, offset, True
        else:
            begin = 0
            while begin < len(raw):
                end = begin + _PIECE - (region.position + offset + begin) % _PIECE
                yield raw[begin:end].decode("utf-8", "ignore"), line, offset + begin, begin == 0
                begin = end
        line += 1
        offset += len(raw) + 1


def _streams(region: _Region) -> list[_Stream]:
    """The region's text by the rank that wrote it: lines of several ranks interleave."""
    streams: dict[str, _Stream] = {}
    label = ""
    for raw, line, offset, fresh in _pieces(region):
        lines = [raw]
        if "\x1b" in raw or "\\" in raw:
            plain = _ANSI.sub("", raw)
            lines = _ESCAPED_BREAK.split(plain.replace('\\"', '"')) if "\\" in plain else [plain]
        for number, piece in enumerate(lines):
            if "&" in piece:
                piece = html.unescape(html.unescape(piece))
            if "<" in piece and ("</" in piece or "<br" in piece or "<span" in piece or "<p" in piece):
                piece = _TAG.sub("", piece)
            end = 0
            if fresh or number:
                if head := _HEAD_LABEL.match(piece):
                    label, piece = head.group(1).rstrip("|: \t"), piece[head.end() :]
                end = _PREFIX.match(piece).end()  # type: ignore[union-attr]  # it matches '' at least
                if end and (found := _LABEL.search(piece, 0, end)):
                    label = found.group().strip("[]")
            stream = streams.get(label)
            if stream is None:
                stream = streams[label] = _Stream(label)
            stream.add(piece[end:].rstrip("│┃| \t\r"), line, offset)
    return list(streams.values())


# --- from text without white space to messages --------------------------------------------------------------

# A C++ locale may print 15,90. Of a number with thousands and decimals no tail is taken for the whole.
_SIZE = r"(?<!\d)(?<!\d[.,])(\d{1,20}(?:[.,]\d{1,9})?)(bytes?|[kmgtpe]i?b|b)"
_UNITS = {"b": 1, "byte": 1, "bytes": 1} | {
    letter + rest: 1 << 10 * power for power, letter in enumerate("kmgtpe", 1) for rest in ("b", "ib")
}

#: What begins a message, by kind. Only the first words: the clauses are read one by one.
_KINDS = {
    "gpu": r"(?:cuda|hip|xpu)outofmemory",
    "block": r"currentplatformcannotallocatememoryblockwithsizelargerthan\d{1,4}gb",
    "thc": r"cudaruntimeerror\(2\):outofmemory|thcudacheckfailfile=[^;]{1,300}?error=2:outofmemory",
    "nosize": r"(?:cuda|hip)error:outofmemory",
    "driver": r"cudadrivererror:outofmemory|cudaerrormemoryallocation",
    "mps": r"mpsbackendoutofmemory",
    "async": r"allocationondevice\d{0,3}wouldexceedallowedmemory",
    "masked": r"nvml_success==.{0,120}?internalassertfailed",
    "cpu": r"defaultcpuallocator:(?:can.{1,6}tallocatememory|notenoughmemory)",
    "numpy": rf"unabletoallocate(?={_SIZE}foranarray)",
    "shm": r"iskilledbysignal:buserror|insufficientsharedmemory\(shm\)",
    "killed": (
        r"iskilledbysignal:killed|exitswithreturncode=-9|exitcode:?-9(?!\d)|signal9\(sigkill\)"
        r"|outofmemory:killedprocess\d*|memorycgroupoutofmemory|oom[-_]kill(?:ed|er)?event|oomkilled"
    ),
    "cublas": r"cu(?:blas|dnn|solver|sparse|fft)_status_alloc_failed",
    "jax": r"resource_?exhausted(?:error)?(?=:|.{0,40}outofmem|.{0,80}oomwhen)",
    "nccl": r"cudafailure\d{0,4}:?'?outofmemory",
    "cupy": r"outofmemoryallocating[\d,]{1,30}bytes",
    "level_zero": r"ur_result_error_out_of_(?:device|host)_memory",
    "tried": rf"triedtoallocate(?={_SIZE}|morethan1eb)",
    "python": r"memoryerror(?=:|$|\W)|std::bad_alloc|cannotallocatememory|exitcode137",
}  # fmt: skip
_START = re.compile("|".join(f"(?P<{kind}>{words})" for kind, words in _KINDS.items()))
#: Literals one of which is in every start: they are found far faster than the expression runs.
_LITERALS = (
    "outofmemory", "memoryblock", "memoryallocation", "exceedallowed", "nvml_success", "defaultcpu",
    "unabletoallocate", "iskilledby", "returncode=-9", "exitcode", "sigkill", "oom-kill", "oom_kill",
    "oomkilled", "alloc_failed", "exhausted", "out_of_device", "out_of_host", "triedtoallocate",
    "memoryerror", "bad_alloc", "cannotallocate", "(shm)",
)  # fmt: skip
_WEAK = ("python",)  # reported only if the input holds nothing clearer
_LONGEST = 4000  # characters of one message, without white space
_NOT_MEMORY = re.compile(
    r"(?:cuda|hip)error:(anillegalmemoryaccesswasencountered|device-sideasserttriggered"
    r"|unspecifiedlaunchfailure|misalignedaddress|invaliddeviceordinal|nokernelimageisavailable)"
    r"|(cudaerrorillegaladdress)"
)

_CLAUSES = {
    "requested": (rf"triedtoallocate{_SIZE}", rf"requested:?{_SIZE}", rf"unabletoallocate{_SIZE}",
                  rf"outofmemory(?:whiletryingto)?allocat(?:e|ing){_SIZE}"),
    "total": (rf"{_SIZE}totalcapacity", rf"totalcapaci?tyof{_SIZE}", rf"devicelimit:?{_SIZE}"),
    "free": (rf"ofwhich{_SIZE}isfree", rf";{_SIZE}free[;)]", rf"free\(accordingtocuda\):?{_SIZE}"),
    "allocated": (rf"oftheallocatedmemory{_SIZE}isallocated", rf"{_SIZE}alreadyallocated",
                  rf"currentlyallocated:?{_SIZE}", rf"mpsallocated:{_SIZE}"),
    "reserved": (rf"{_SIZE}reservedintotal",),
    "reserved_unallocated": (rf"{_SIZE}isreservedbypytorchbut", rf"{_SIZE}cached\)"),
    "this_process": (rf"thisprocesshas{_SIZE}memoryinuse",),
    "allowed": (rf"{_SIZE}allowed;", rf"maxallowed:{_SIZE}", rf"memoryfraction\):?{_SIZE}"),
    "private_pools": (rf"with{_SIZE}allocatedinprivatepools",),
    "elsewhere": (rf"otherallocations:{_SIZE}",),
}  # fmt: skip
_READERS = {name: re.compile("|".join(ways)) for name, ways in _CLAUSES.items()}
_PROCESS = re.compile(rf"(?<!this)process(\d{{1,10}})has{_SIZE}memoryinuse")
_DEVICE = re.compile(r"\(gpu(\d{1,3});|gpu(\d{1,3})has|ondevice(\d{1,3})would")
_HOST_BYTES = re.compile(r"youtriedtoallocate(\d{1,30})bytes")
_CUPY_BYTES = re.compile(r"outofmemoryallocating([\d,]{1,30})bytes")
_OPTION = re.compile(r"pytorch_(?:cuda_|hip_)?alloc_conf")


def parse_size(number: str, unit: str) -> int:
    """'1.50', 'GiB' -> 1610612736: the nearest whole number of bytes. KB, MB, GB are binary here too.

    A comma is a decimal point: PyTorch prints no thousands.
    """
    whole, _, decimals = number.replace(",", ".").partition(".")
    scale: int = 10 ** len(decimals)
    return (2 * int(whole + decimals) * _UNITS[unit.lower()] + scale) // (2 * scale)


def _starts(low: str) -> list[tuple[int, int, str]]:
    """(start, end, kind) of what begins a message, in order."""
    if not any(word in low for word in _LITERALS):
        return []
    found = [(m.start(), m.end(), str(m.lastgroup)) for m in _START.finditer(low)]
    kept: list[tuple[int, int, str]] = []
    sized = -1  # the message whose "tried to allocate" has been read
    for start, end, kind in found:
        if kind == "tried" and kept and sized != len(kept) - 1 and start - kept[-1][1] < 240:
            sized = len(kept) - 1
            continue
        kept.append((start, end, kind))
        if kind == "tried":
            sized = len(kept) - 1
    return kept


def _read(stream: IO[bytes]) -> Reports:
    found = Reports()
    budget = _Budget()
    strong: dict[tuple[Any, ...], Report] = {}
    weak: dict[tuple[Any, ...], Report] = {}
    for region in _regions(stream, budget):
        for report in _messages(region, found):
            table = weak if report.kind in _WEAK or _bare(report) else strong
            key = (report.rank, report.kind if report.requested is None else "", *_values(report))
            known = table.get(key)
            if known is not None:
                known.count += report.count
                if FORMS.index(report.form) > FORMS.index(known.form) and report.backend == known.backend:
                    known.form, known.style = report.form, report.style  # a repeat that shows more
                    known.option_name = known.option_name or report.option_name
            elif len(table) < MOST_REPORTS:
                table[key] = report
            else:
                found.unread += report.count
                budget.anchors = budget.anchors if table is weak else 0
    found.unread += budget.unread
    found.reports = list((strong or weak).values())
    return found


def _bare(report: Report) -> bool:
    """'CUDA out of memory' and nothing more: a title, a comment, somebody's own words."""
    return report.kind == "gpu" and not report.printed and "1eb" not in report.text[:60]


def _values(report: Report) -> tuple[Any, ...]:
    return (report.device, report.processes, *(getattr(report, name) for name in _NUMBERS))


def _messages(region: _Region, found: Reports) -> list[Report]:
    reports: list[tuple[int, Report]] = []
    failed = [(int(rank), int(pid)) for rank, pid in _TORCHRUN.findall(region.text)]
    for stream in _streams(region):
        packed = "".join(stream.parts)
        low = packed.lower()
        if len(low) != len(packed):  # a letter whose lower case is longer, such as a dotted capital I
            low = "".join(c.lower() if len(c.lower()) == 1 else c for c in packed)
        starts = _starts(low)
        if not starts and not found.not_memory and (wrong := _NOT_MEMORY.search(low)):
            found.not_memory = _not_memory(wrong.group(1) or wrong.group(2))
        seen: dict[tuple[str, bool], Report] = {}
        for (start, _, kind), (stop, _, _) in pairwise([*starts, (len(low), 0, "")]):
            line, offset = stream.origins[bisect_right(stream.starts, start) - 1]
            if not region.own_from <= offset < region.own_to:
                continue
            text, head = low[start : min(stop, start + _LONGEST)], low[max(start - 30, 0) : start]
            if known := seen.get(same := (text, "outofmemoryerror" in head)):
                known.count += 1
                continue
            report = seen[same] = _message(kind, text, head, stream.label)
            report.line = line
            pids = {pid for rank, pid in failed if rank == report.device}
            if match := _LABEL_PID.search(stream.label):
                pids.add(int(match.group(1)))
            report.own_pids = frozenset(pids)
            _locate(report, region.text[max(offset - 6000, 0) : offset])
            asked = _ALLOCATION.search(region.text, offset, offset + 2000)
            if asked and "allocation:" in report.text:  # not the next message's
                operator, module, report.phase = (part.decode() if part else "" for part in asked.groups())
                report.operator = f"{operator} in {module}" if module else operator
            reports.append((offset, report))
    reports.sort(key=lambda pair: pair[0])
    return [report for _, report in reports]


def _message(kind: str, text: str, head: str, label: str) -> Report:
    backend = _BACKENDS.get(kind, "cuda")
    if kind in ("gpu", "nosize"):
        backend = text[:3] if text[:3] in ("hip", "xpu") else "cuda"
    elif kind == "block":
        backend = "xpu"
    report = Report("other", backend, kind=kind, text=text[:1500], rank=label)
    for name, pattern in _READERS.items():
        if match := pattern.search(text):
            number, unit = (group for group in match.groups() if group is not None)
            setattr(report, name, parse_size(number, unit))
            report.printed[name] = f"{number.replace(',', '.')} {unit}"
    if kind == "cpu" and (match := _HOST_BYTES.search(text)):
        report.requested = int(match.group(1))
    if kind == "cupy" and (match := _CUPY_BYTES.search(text)):
        report.requested = int(match.group(1).replace(",", "") or 0)
    report.processes = tuple(
        (int(pid), parse_size(number, unit)) for pid, number, unit in _PROCESS.findall(text)
    )
    if match := _DEVICE.search(text):
        report.device = int(next(group for group in match.groups() if group is not None))
    if match := _OPTION.search(text):
        report.option_name = match.group().upper()
    report.form, report.style = _form(report, head, label)
    return report


_BACKENDS: dict[str, str | None] = {
    "mps": "mps", "cpu": "cpu", "numpy": "cpu", "shm": "cpu", "killed": "cpu", "python": "cpu", "jax": None,
    "level_zero": "xpu",
}  # fmt: skip
_FORM_OF_KIND = {
    "thc": "thc", "nosize": "cuda_no_sizes", "mps": "mps", "async": "malloc_async", "masked": "masked",
    "cpu": "host", "numpy": "host", "shm": "host", "killed": "host", "python": "host", "block": "xpu",
    "level_zero": "xpu",
}  # fmt: skip


def _form(report: Report, head: str, label: str) -> tuple[str, str]:
    """(form, the CUDA form beneath it)."""
    text = report.text
    if report.kind not in ("gpu", "tried", "block"):
        form = _FORM_OF_KIND.get(report.kind, "other")
        return ("hip" if report.backend == "hip" else form), form
    sentences = (
        ("totalcapac" in text and "totalcapacity;" not in text)
        or report.processes
        or report.this_process is not None
        or "oftheallocatedmemory" in text
    )
    if "reservedintotal" in text:
        style = "reserved_hint" if "max_split_size_mb" in text else "reserved"
    elif sentences:
        if report.option_name == "PYTORCH_ALLOC_CONF":
            style = "process_alloc_conf"
        elif head.endswith(
            ("torch.outofmemoryerror:", 'torch.outofmemoryerror("', "torch.outofmemoryerror('")
        ) or label.startswith("rank"):
            style = "process_class"
        elif report.private_pools is not None or "expandable_segments" in text:
            style = "process_pools"
        else:
            style = "process"
    elif "reserved_unallocated" in report.printed:
        style = "cached"
    else:
        style = "cuda_no_sizes" if not report.printed and "1eb" not in text[:60] else "other"
    if report.backend in ("hip", "xpu"):
        return report.backend, style
    return ("allowed" if report.allowed is not None and sentences else style), style


#: torchrun: 'failed (exitcode: 1) local_rank: 2 (pid: 81230)', and its summary's 'rank : 2 (local_rank: 2)'
_TORCHRUN = re.compile(
    rb"local_rank: {0,4}(\d{1,4})\)? {0,4}(?:\n[^\n(]{0,120}exitcode[^\n(]{0,20})?\(pid: {0,4}(\d{1,10})\)"
)
#: The last words of memlab's own cards: 'Allocation: aten.mm in h.0.mlp (forward).'
_ALLOCATION = re.compile(
    rb"\bAllocation:\s{1,4}(\w[\w.:]{0,80})(?:\s{1,4}in\s{1,4}([\w.]{1,200}))?\s{1,4}"
    rb"\((forward|backward|optimizer)\)\."
)
_LABEL_PID = re.compile(r"pid=(\d{1,10})$")  # Ray, vLLM

_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,9}), in ([^\s,]{1,200})')
_LIBRARY = ("site-packages", "dist-packages", "/torch/", "\\torch\\", "<frozen", "lib/python")
_TORCH = ("/torch/", "\\torch\\")
_OPTIMIZER_STEP = re.compile(r"\bopt\w*\.step\(|optimizer\w*\.step\(")


def _locate(report: Report, before: bytes) -> None:
    """The user's own line in the traceback above, and the phase that functions and source lines betray."""
    text = before[before.rfind(b"Traceback (most recent call last)") + 1 :].decode("utf-8", "replace")
    if report.rank:  # other ranks' lines stand between
        text = "\n".join(line for line in text.split("\n") if report.rank in line)
    found = list(_FRAME.finditer(text))
    if not found or len(text) - found[-1].end() > 1500:
        return
    frames = [(*match.groups(), _source(text, match.end())) for match in found]
    own = [frame for frame in frames if not any(part in frame[0] for part in _LIBRARY)]
    file, line, function, report.code = (own or frames)[-1]
    report.where = f"{file}:{line} in {function}"
    names = {name for _, _, name, _ in frames}
    if names & {"backward", "_engine_run_backward"} or any(".backward(" in code for *_, code in frames):
        report.phase = "backward"
    elif any(
        ("optim" in file and ("step" in name or "adam" in name)) or _OPTIMIZER_STEP.search(code)
        for file, _, name, code in frames
    ):
        report.phase = "optimizer"
    elif names & {"forward", "_call_impl", "_forward_impl"}:
        report.phase = "forward"
    file, line, function, code = frames[-1]
    inside = report.phase == "backward" and any(part in file for part in _TORCH)  # the engine: no operator
    if frames[-1] != (own or frames)[-1] and not inside:
        short = "/".join(file.replace("\\", "/").split("/")[-3:])
        report.deepest = f"{short}:{line} in {function}" + (f": {code}" if code else "")
    report.pinned = any(word in text for word in ("pin_memory", "cudaHostAlloc", "offload"))


def _source(text: str, end: int) -> str:
    """The line of code beneath a traceback's 'File' line, without what a launcher puts before it."""
    begin = text.find("\n", end) + 1
    if not begin or begin - end > 40:
        return ""
    stop = text.find("\n", begin)
    line = _ANSI.sub("", text[begin : stop if stop >= 0 else begin + 400])
    line = line[_PREFIX.match(line).end() :].strip()  # type: ignore[union-attr]  # it matches '' at least
    if not line or line.startswith(("File ", "^", "~", "Traceback")) or "outofmemory" in line.lower():
        return ""
    return line if len(line) <= 70 else f"{line[:67]}..."


def _not_memory(words: str) -> str:
    known = {
        "anillegalmemoryaccesswasencountered": "an illegal memory access",
        "cudaerrorillegaladdress": "an illegal memory access",
        "device-sideasserttriggered": "a device-side assert (often an index out of range)",
    }
    what = known.get(words, words)
    return (
        f"no out-of-memory message found: the CUDA error in it, {what}, isn't about how much memory "
        "there is; run again with CUDA_LAUNCH_BLOCKING=1 and read the traceback's last own line"
    )


# --- from numbers to causes ---------------------------------------------------------------------------------

#: A CUDA context with its libraries takes 0.14 GiB (T4) to 1.3 GiB (V100, older CUDA) in published runs; what
#: is outside the allocator beyond this belongs to something else.
_CONTEXT = 3 * GIB // 2
_ABSURD = TIB  # on one card: no GPU has as much, so the shape or the arithmetic is wrong
_ABSURD_ON_HOST = 16 * TIB
_MARGIN = 1.05  # free + unallocated must exceed the request by this for fragmentation to be the likely cause


_ROUNDING = 32 * MIB  # several sizes of two decimals in GiB, added
_FULL = 20  # a cache below a 20th of the tensors: the tensors fill the card, whatever shape its pieces have


def _real(size: int, total: int | None) -> bool:
    """Can a process hold that much of this card?"""
    return not total or size <= total


def _itself(report: Report) -> int | None:
    """The number of the named process that must be this one; None if there is none.

    In a container the driver's numbers of processes aren't the container's, so PyTorch doesn't find itself in
    the driver's list and names itself as another. Then the sum of all is more than the card has.
    """
    if report.this_process is not None or not report.processes:
        return None
    for pid, _ in report.processes:
        if pid in report.own_pids:
            return pid
    held = report.cached_total if report.cached_total is not None else report.allocated
    if held is None or report.total is None or report.free is None:
        return None
    if sum(report.other_processes) + held + report.free <= report.total + _ROUNDING:
        return None
    large = [(n, pid) for pid, n in report.processes if held <= n + _ROUNDING and _real(n, report.total)]
    return min(large)[1] if large else None


def _outside(report: Report) -> int | None:
    """Bytes of this process that its allocator doesn't hold."""
    if report.own_process is None or report.cached_total is None:
        return None
    return report.own_process - report.cached_total


def _rest(report: Report) -> int | None:
    """Bytes of the card that are neither free nor reserved, where the message doesn't say whose they are."""
    if report.own_process is not None or report.processes or report.backend not in ("cuda", "hip", "xpu"):
        return None
    if report.total is None or report.free is None or report.cached_total is None:
        return None
    return report.total - report.free - report.cached_total


def _own(report: Report) -> int | None:
    """What this process holds: counted, or at least what its allocator has reserved or allocated."""
    for size in (report.own_process, report.cached_total):
        if size is not None:
            return size
    return report.allocated


def _others(report: Report, own: int) -> tuple[int, str] | None:
    """Bytes of the card that others hold, and how that is known."""
    rivals = report.rivals
    named = sum(size for _, size in rivals)
    if report.total is not None and report.free is not None:
        rest = report.total - report.free - own
        if report.own_process is None:
            rest -= _CONTEXT  # of this process, which the message doesn't count
        if rest > named or (rest == named and not named):
            mine = "this process" if report.own_process is not None else "own reserved"
            text = f"total {_b(report.total)} - free {_b(report.free)} - {mine} {_b(own)}"
            if report.own_process is None:
                text += f" - a context of up to {_b(_CONTEXT)}"
            return rest, f"{text} = {_b(rest)}"
    if rivals:
        return named, " + ".join(f"process {pid}: {_b(size)}" for pid, size in rivals)
    return None


def _spilled(report: Report) -> bool:
    """Do its tensors have more than the card? Windows' driver then moves memory to the host."""
    return bool(report.total) and report.allocated is not None and report.allocated > (report.total or 0)


def _beside(report: Report) -> str:
    return f"; yet little beside the {_b(report.allocated or 0)} in tensors" if _full(report) else ""


def _full(report: Report) -> bool:
    """Is the cache so small beside the tensors that one free piece more would only move the failure?"""
    if report.allocated is None or report.unallocated is None:
        return False
    return report.unallocated * _FULL <= report.allocated or _spilled(report)


def _b(size: int) -> str:
    return format_bytes(size)


def _explain(report: Report) -> None:
    """Fills causes, actions and cannot_tell."""
    report.itself = _itself(report)
    report.causes = list(_causes(report))
    labels = [cause.label for cause in report.causes]
    if _full(report) and "capacity" in labels and "fragmentation" in labels:
        labels.sort(key=lambda label: label == "fragmentation")  # what helps first, however it is called
    report.actions = list(dict.fromkeys(action for label in labels for action in _ACTIONS[label](report)))
    report.cannot_tell = list(_open_questions(report))


def _causes(report: Report) -> Iterator[Cause]:
    request = report.requested
    if report.kind == "masked":
        yield Cause(
            "masked_oom",
            "the code that was to report the error failed itself, at a question to NVML: memory ran out (or "
            "the device is wrong), but the numbers are lost",
        )
    elif report.kind == "shm":
        yield Cause("host_shm", "a DataLoader worker found /dev/shm full: the host's memory, not the GPU's")
    elif report.kind == "killed":
        yield Cause(
            "host_ram",
            "a process was killed with signal 9: the kernel or a container's limit on the host's memory does "
            "that, and PyTorch has no time for a message",
        )
    elif report.backend == "cpu":
        if request is not None and request >= _ABSURD_ON_HOST:
            yield Cause("int_overflow", f"{request:,} bytes of the host: a wrong shape or an overflow")
        asked = "ran out" if request is None else f"could not give {_b(request)} ({request:,} bytes)"
        yield Cause("host_ram", f"the host's memory {asked}; the GPU isn't involved")
    elif request is None:
        yield from _without_sizes(report)
    else:
        yield from list(_with_sizes(report, request)) or [_undecided(report, request)]


def _without_sizes(report: Report) -> Iterator[Cause]:
    if "1eb" in report.text[:60]:
        yield Cause("int_overflow", "more than 1 EB was asked for: a size overflowed or went negative")
        return
    if report.kind == "level_zero" and "host_memory" in report.text:
        yield Cause("host_ram", "the driver names the host's memory")
        return
    if report.kind == "nosize" and report.pinned:
        yield Cause("host_pinned", "the traceback goes through pinned memory: the host's, locked in place")
    yield Cause("cannot_tell", "the message has no sizes")


def _with_sizes(report: Report, request: int) -> Iterator[Cause]:
    total, free, unallocated = report.total, report.free, report.unallocated
    if request >= _ABSURD:
        text = f"{_b(request)} in one piece on one GPU: a wrong shape or an overflow, no batch needs that"
        yield Cause("int_overflow", text)
    if total is not None and request > total:
        text = f"one request of {_b(request)} is more than the whole card, {_b(total)}, whatever else is held"
        yield Cause("single_request_exceeds_gpu", text)
        return
    if request >= _ABSURD:
        return
    yield from _cap(report, request)
    within = free or 0  # what the driver would still give
    if report.allowed is not None and report.cached_total is not None:
        within = min(within, max(report.allowed - report.cached_total, 0))
    own = _own(report)
    if free is None or own is None or within >= request:
        return  # not known, or there was room: then nothing below is the reason
    broken = unallocated is not None and unallocated >= request and within + unallocated >= request * _MARGIN
    if broken and not _spilled(report):
        yield Cause(
            "fragmentation",
            f"{_b(unallocated or 0)} are reserved but in no tensor, and {_b(request)} were asked for: enough "
            f"in sum, but not in one piece{_beside(report)}",
        )
    if free >= request:
        return  # only the limit was in the way: what else is on the card doesn't matter
    holders = sorted(_holders(report, request, own, within, broken), key=lambda pair: -pair[0])
    yield from (cause for _, cause in holders)


def _cap(report: Report, request: int) -> Iterator[Cause]:
    allowed, total, free = report.allowed, report.total, report.free
    if allowed is None or (total is not None and allowed >= total):
        return
    held = report.cached_total if report.cached_total is not None else report.allocated
    if held is not None:
        held += report.elsewhere or 0
        if held + request < allowed * 0.995 and free is not None and free < request:
            return  # the card was full before the limit was reached
    card = "" if total is None else f" of the card's {_b(total)}"
    sums = "" if held is None else f": held {_b(held)} + request {_b(request)} = {_b(held + request)}"
    yield Cause("memory_cap", f"this process may use {_b(allowed)}{card}{sums}")


def _holders(
    report: Report, request: int, own: int, within: int, broken: bool
) -> Iterator[tuple[int, Cause]]:
    """(bytes, cause) of what holds the memory that is missing, where that is enough to matter."""
    missing = request - (report.free or 0)
    largest = 0
    if (others := _others(report, own)) is not None and others[0] >= missing:
        size, how = others
        # a little is always taken: by the driver, a desktop, this process's own context
        if size >= own or size >= max(_CONTEXT, (report.total or 0) // 5):
            largest = size
            text = f"others hold {_b(size)} ({how}); {_b(missing)} are missing, this process holds {_b(own)}"
            yield size, Cause("other_process", text)
    if (outside := _outside(report)) is not None and outside - _CONTEXT >= max(missing, GIB // 2):
        largest = max(largest, outside - _CONTEXT)
        text = f"this process holds {_b(outside)} outside its allocator; a CUDA context takes up to 1.3 GiB"
        yield outside - _CONTEXT, Cause("outside_allocator", text)
    unallocated = report.unallocated
    held = report.cached_total if report.cached_total is not None else own
    reachable = within + (unallocated or 0)
    if held < largest or (reachable >= request and not (broken and _full(report))):
        return
    if _spilled(report):
        text = (
            f"{_b(report.allocated or 0)} are in tensors, more than the card's {_b(report.total or 0)}: the "
            f"driver has moved memory to the host (Windows and WSL do), and {_b(request)} more weren't found"
        )
        yield held, Cause("capacity", text)
        return
    if reachable >= request:
        text = (
            f"{_b(report.allocated or 0)} are in tensors and only {_b(unallocated or 0)} in the cache: in "
            "one piece it would serve this request, but the card is full, and one of the next would fail"
        )
        yield held, Cause("capacity", text)
        return
    parts = f"free {_b(within)}"
    if unallocated is not None:
        parts += f" + unallocated {_b(unallocated)} = {_b(reachable)}"
    text = (
        f"{parts}, {_b(request)} asked for: {_b(request - reachable)} are missing even without any "
        f"fragmentation, and this process holds {_b(held)} itself"
    )
    yield held, Cause("capacity", text)


def _undecided(report: Report, request: int) -> Cause:
    free, unallocated = report.free, report.unallocated
    if free is not None and free >= request:
        text = f"{_b(free)} were free, {_b(request)} asked for: room enough, and no limit is named"
        if report.backend == "xpu" and request >= 4 * GIB:
            text += "; Intel's driver refuses single allocations above 4 GiB by default"
    elif free is not None and unallocated is not None and free + unallocated >= request:
        text = (
            f"free {_b(free)} + unallocated {_b(unallocated)} = {_b(free + unallocated)}, {_b(request)} "
            "asked for: enough in sum, in no part alone; between fragmentation and a card that is simply full"
        )
    else:
        text = f"{_b(request)} were asked for; the message doesn't say what holds the memory"
    return Cause("cannot_tell", text)


# --- what to do ---------------------------------------------------------------------------------------------


def allocator_option(report: Report) -> str:
    """The allocator's setting against fragmentation that this version of torch reads; '' if there is none."""
    style = report.style or report.form
    if report.backend not in ("cuda", "hip") or style in ("thc", "cached", "malloc_async"):
        return ""
    usual = "PYTORCH_HIP_ALLOC_CONF" if report.backend == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
    name = report.option_name or usual
    if style == "reserved":
        return f"{name}=max_split_size_mb:128 (read by torch 1.10; before it there is no allocator option)"
    if style == "reserved_hint":
        return f"{name}=max_split_size_mb:128 (expandable_segments needs torch 2.1)"
    if style in ("process", "process_pools", "process_class", "process_alloc_conf"):
        newer = "" if report.option_name else "; from torch 2.9 or 2.10 on PYTORCH_ALLOC_CONF"
        return f"{name}=expandable_segments:True (Linux; never together with max_split_size_mb{newer})"
    return ""


_SENTENCES = ("process", "process_pools", "process_class", "process_alloc_conf")


def _record(report: Report) -> Iterator[str]:
    if report.style in _SENTENCES and report.backend in ("cuda", "hip", "xpu"):
        module = "torch.xpu" if report.backend == "xpu" else "torch.cuda"
        yield (
            f"record a snapshot ({module}.memory._record_memory_history(), _dump_snapshot() in the except "
            "block); `memlab snapshot` shows its largest free piece and what lies beside it"
        )


def _against_fragmentation(report: Report) -> Iterator[str]:
    if option := allocator_option(report):
        gain = f": cheap to try, but it wins at most {_b(report.unallocated or 0)}" if _full(report) else ""
        yield f"set {option} before torch is imported{gain}"
    elif report.style in ("thc", "cached"):
        yield "this version has no allocator option: call torch.cuda.empty_cache() between phases"
    yield "avoid shapes that change from step to step: pad to a few lengths, drop a ragged last batch"
    yield from _record(report)


def _against_capacity(report: Report) -> Iterator[str]:
    yield (
        "ask first whether it failed at the first step; if later, look for what grows: a loss kept with its "
        "graph, outputs appended to a list, retain_graph, evaluation without no_grad"
    )
    if _spilled(report):
        yield (
            "to fail at once and not run slowly from the host's memory: on Windows, NVIDIA's setting 'CUDA - "
            "Sysmem Fallback Policy', prefer none"
        )
    yield "a smaller micro-batch, with accumulation so that the effective batch stays"
    yield "16-bit autocast, then activation checkpointing (every k-th block or selective before full)"
    old = report.style in ("thc", "cached", "reserved", "reserved_hint")
    yield "scaled_dot_product_attention in place of eager attention" + (" (torch 2.0)" if old else "")
    yield "sharding (FSDP, ZeRO) over more GPUs, then offload"
    yield "`memlab plan MODEL --gpu CARD` finds the cheapest of these that fits"
    yield "not empty_cache() in an except block: the allocator had released its free blocks and tried again"


def _against_others(report: Report) -> Iterator[str]:
    yield "run nvidia-smi on the host (in a container too) and see who holds the card"
    if report.rivals:
        pids = " or ".join(str(pid) for pid, _ in report.rivals)
        yield f"if process {pids} is a leftover of yours (a dead run's worker, a notebook), end it"
    yield "choose a free card with CUDA_VISIBLE_DEVICES, or wait; check that no two ranks share one"


def _against_outside(report: Report) -> Iterator[str]:
    yield "look for what allocates beside PyTorch: NCCL with many groups, JAX or TensorFlow in the process"
    yield "then cuBLAS, cuDNN and kernel workspaces, CUDA graphs, libraries that call cudaMalloc themselves"
    yield "compare nvidia-smi with torch.cuda.memory_reserved() before the model is built and after a step"


def _against_cap(report: Report) -> Iterator[str]:
    if report.backend == "mps":
        yield "close other programs first: Macs share one memory between the system and the GPU"
        yield "PYTORCH_MPS_HIGH_WATERMARK_RATIO moves the limit (0.0 removes it; the system may then fail)"
    else:
        yield (
            "find who sets the limit: torch.cuda.set_per_process_memory_fraction, the allocator option "
            "per_process_memory_fraction, or a serving engine's setting"
        )
    yield "if the limit is meant, make the step smaller: micro-batch, 16-bit, checkpointing, in this order"


def _against_one_request(report: Report) -> Iterator[str]:
    yield "print the shapes at the traceback's last own line: one tensor alone is too large"
    yield "batch x heads x sequence^2 attention scores: scaled_dot_product_attention or flash attention"
    yield "tokens x vocabulary logits: compute the loss in chunks"
    yield "else a smaller micro-batch or shorter sequences; `memlab oom --model NAME` names the tensor"


def _against_overflow(report: Report) -> Iterator[str]:
    yield "print the shapes at the traceback's last own line: a wrong dimension, an n x n broadcast, or < 0"
    yield "don't shrink the batch for it: a size like this isn't meant"


def _for_host(report: Report) -> Iterator[str]:
    yield "watch the host's memory: free -h, the container's limit, dmesg for the kernel's killer"
    yield "fewer DataLoader workers, a smaller prefetch_factor, data read lazily and not kept in lists"
    yield "load weights with mmap=True or on the meta device, once per host and not once per rank"


def _for_shm(report: Report) -> Iterator[str]:
    yield "give the container more shared memory: docker run --shm-size=8g, or --ipc=host"
    yield "or fewer workers (num_workers=0 needs none), or the 'file_system' sharing strategy"


def _for_pinned(report: Report) -> Iterator[str]:
    yield "try pin_memory=False, or offload without pinned buffers; look at ulimit -l and free -h"


def _for_masked(report: Report) -> Iterator[str]:
    yield "check the device index and CUDA_VISIBLE_DEVICES; on a MIG slice NVML can't answer"
    yield "print torch.cuda.memory_summary() before the line that fails: it doesn't ask NVML"
    yield "make the step smaller and try again: if that helps, it was memory"


def _for_unknown(report: Report) -> Iterator[str]:
    smaller = "make the step smaller (micro-batch) and see whether the point of failure moves"
    if report.form in ("cuda_no_sizes", "thc"):
        yield "look at nvidia-smi: is the card taken by somebody, or is it another card than you think?"
        yield "run with CUDA_LAUNCH_BLOCKING=1: the error may belong to an earlier call than it names"
        yield "if pin_memory or offload is on, try without: it can be the host's pinned memory"
    elif report.kind == "cublas":
        yield "the library found no room for its workspace: print torch.cuda.mem_get_info() before the line"
        yield "an index out of range can look the same: run once with CUDA_LAUNCH_BLOCKING=1"
    elif report.kind == "jax":
        yield "JAX takes 75 % of the card at its start: XLA_PYTHON_CLIENT_PREALLOCATE=false shows its use"
    elif report.kind == "nccl":
        yield "NCCL's buffers are outside PyTorch's cache: leave room for them, or use fewer process groups"
    elif report.free is not None and report.requested is not None and report.free >= report.requested:
        yield "look for who else used the card just then (nvidia-smi in a loop), or a MIG or container limit"
        if report.backend == "xpu":
            yield "on Intel cards UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 allows more than 4 GiB in one piece"
    elif report.free is not None and report.unallocated and (option := allocator_option(report)):
        yield f"set {option} before torch is imported: cheap to try"
    yield smaller
    yield from _record(report)


_ACTIONS = {
    "single_request_exceeds_gpu": _against_one_request, "int_overflow": _against_overflow,
    "memory_cap": _against_cap, "other_process": _against_others, "fragmentation": _against_fragmentation,
    "capacity": _against_capacity, "outside_allocator": _against_outside, "host_ram": _for_host,
    "host_shm": _for_shm, "host_pinned": _for_pinned, "masked_oom": _for_masked, "cannot_tell": _for_unknown,
}  # fmt: skip


def _open_questions(report: Report) -> Iterator[str]:
    if report.backend == "cpu":
        yield "who else uses the host's memory: free -h and dmesg at that moment"
        return
    if report.total is not None and report.free is not None and report.free > report.total:
        yield "what was free: more than the card has can't be, so this isn't the message as it was printed"
    if report.requested is None:
        yield "how much was asked for, held and free: torch.cuda.memory_summary() or a snapshot before it"
    yield "whether memory grew from step to step (a leak): a step counter; did it fail at the first or later?"
    if not report.phase:
        where = "the traceback's lines don't say" if report.where else "the traceback above the message"
        yield f"in which phase of the step it failed: {where}"
    if report.requested is not None:
        yield "which tensors hold the memory: a snapshot; which one was asked for: `memlab oom --model NAME`"
    if report.itself is not None:
        total = "" if report.total is None else f" (else they would sum to more than {_b(report.total)})"
        known = " by the launcher's lines" if report.itself in report.own_pids else total
        yield (
            f"that process {report.itself} is this one: taken so here{known}; in a container the message "
            "can't know itself. nvidia-smi on the host decides"
        )
    elif report.rivals:
        yield "whether the process it names is somebody else (in a container it can be this one): nvidia-smi"
    elif report.this_process is None and report.backend != "mps":
        yield "what other processes hold: nvidia-smi"
    if report.style in (*_SENTENCES, "reserved_hint") and report.unallocated:
        yield "whether its hint at fragmentation (always printed) applies: a snapshot's largest free block"


# --- which tensor -------------------------------------------------------------------------------------------


def request_range(report: Report) -> tuple[int, int] | None:
    """The tensors' sizes, in bytes, from the smallest to the largest, whose request prints as this one does.

    The native allocator prints the segment it asks of the driver: up to 1 MiB that is 2 MiB, below 10 MiB
    20 MiB, else rounded up to 2 MiB. cudaMallocAsync, MPS and the host print the tensor's bytes.
    """
    if report.requested is None:
        return None
    text = report.printed.get("requested", "")
    number, _, unit = text.partition(" ")
    half = _UNITS[unit] / 2 / 10 ** len(number.partition(".")[2]) if "." in number else 0
    low, high = int(report.requested - half), int(report.requested + half) + 1
    if report.backend not in _ROUNDED or report.form == "malloc_async":
        return (low, high) if half else (report.requested, report.requested)
    step = 2 * MIB
    if report.requested <= step:
        return 1, MIB
    if abs(report.requested - 20 * MIB) <= half:
        return MIB + 1, 20 * MIB  # also what is rounded up from 18 MiB
    return max(-(-low // step) * step - step + 1, 1), high // step * step


def name_tensors(
    reports: Reports, config: TransformerConfig | ConvConfig, recipe: Recipe, limit: int = 8
) -> None:
    """Fills `matches` and `note` of each report: the tensors of the recipe's step with the request's size."""
    tensors = _tensors(config, recipe)
    for report in reports:
        _name(report, config.name, tensors, limit)


def _name(report: Report, model: str, tensors: list[Match], limit: int) -> None:
    span = request_range(report)
    if span is None or report.requested is None:
        report.note = f"{model}: the message has no size, so no tensor can be named"
        return
    low, high = span
    printed = report.printed.get("requested", "")
    if high == MIB:
        report.note = (
            f"{model}: a request printed as {printed} is any tensor of up to 1 MiB: the card was full to the "
            "brim, and which tensor came last says little"
        )
        return
    rounding = AllocatorConfig()

    def prints_alike(size: int) -> bool:
        if report.backend not in _ROUNDED or report.form == "malloc_async":
            return low <= size <= high
        # memlab's own budget prints the tensor itself
        blocks = (rounding.segment_size(rounding.block_size(size)), size)
        return any(_same(format_size(n), printed) for n in blocks)

    alike = [match for match in tensors if prints_alike(match.bytes)]
    if report.phase == "forward":
        alike = [match for match in alike if not match.name.startswith("gradient of")]
    words = [word for word in re.split(r"[._]", report.operator.partition(" ")[0]) if len(word) > 4]
    made = [match for match in alike if any(word in match.name for word in words)]
    report.matches = (made or alike)[:limit]
    between = f"{low:,} to {high:,} bytes" if low != high else f"{low:,} bytes"
    report.note = f"{model}: the request is a tensor of {between}; "
    if report.matches:
        report.cannot_tell = [text.partition("; which one")[0] for text in report.cannot_tell]
        report.note += "in a step of this recipe "
        report.note += (
            f"{report.operator.partition(' ')[0]} makes this:" if made else "these have such a size:"
        )
    else:
        wanted = report.requested
        near = sorted(tensors, key=lambda match: abs(match.bytes - wanted))[:3]
        names = "; ".join(f"{match.name} {_b(match.bytes)}" for match in near)
        report.note += f"no tensor of this recipe has such a size. Nearest: {names}"


_ROUNDED = ("cuda", "hip", "xpu")


def verdict(report: Report, snapshot: SnapshotSummary) -> str:
    """What a snapshot of the same failure decides: fragmentation or not. '' without a size."""
    if report.requested is None:
        return ""
    unallocated, largest = snapshot.unallocated, snapshot.largest_free
    sizes = f"{_b(unallocated)} are unallocated, the largest free block has {_b(largest)}"
    asked = f"{_b(report.requested)} were asked for"
    if unallocated < report.requested:
        return f"The snapshot decides: {sizes}; {asked}: not fragmentation, the tensors themselves fill it."
    if largest < report.requested:
        return f"The snapshot decides: {sizes}; {asked}: fragmentation."
    return f"The snapshot doesn't fit the message: {sizes}; {asked}, which would have been served."


def _same(ours: str, printed: str) -> bool:
    """The same size? '20.00 MiB' and '20.00 MB' (old messages) are, '1.00 GiB' and '1024.00 MiB' too."""
    (a, a_unit), (b, b_unit) = ours.lower().split(), printed.lower().split()
    return parse_size(a, a_unit) == parse_size(b, b_unit)


def _tensors(config: TransformerConfig | ConvConfig, recipe: Recipe) -> list[Match]:
    """Every tensor of a step by name, largest first: parameters, states, results, gradients of both."""
    from memlab.footprint import footprint
    from memlab.operations import Program
    from memlab.units import DTYPE_BYTES
    from memlab.walk import _any_block

    rows: dict[tuple[str, tuple[int, ...], str], int] = {}

    def add(name: str, shape: tuple[int, ...], dtype: str) -> None:
        size = DTYPE_BYTES[dtype]
        for n in shape:
            size *= n
        rows.setdefault((name, shape, dtype), size)

    recipe = recipe.resolve(config)
    whole = footprint(config, recipe, device="cuda")
    for tensor in whole.tensors:
        if tensor.phases != ("optimizer",):  # those are sums over all parameters, not one allocation
            add(tensor.name, tensor.shape, tensor.dtype)
        if tensor.consumer == "parameters" and recipe.optimizer in ("adam", "adamw"):
            add(f"{tensor.name} sqrt(exp_avg_sq), in the update", tensor.shape, recipe.state_dtype)
    for unit in Program(config, recipe, "cuda").units:
        for op in unit.ops:
            for store in (*op.made, *op.casts):
                add(_any_block(store.name), store.shape, store.dtype)
            for value in op.grads:
                add(f"gradient of {_any_block(value.store.name)}", value.shape, value.dtype)
    found = [Match(name, shape, dtype, size) for (name, shape, dtype), size in rows.items()]
    return sorted(found, key=lambda match: (-match.bytes, match.name))
