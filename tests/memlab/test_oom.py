"""Out-of-memory messages: written here by the forms' grammar, wrapped as real logs do, and read back."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import textwrap
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlab import oom
from memlab.allocator import OutOfMemory, format_size
from memlab.models import model
from memlab.oom import FORMS, LABELS, NoMessageError, Report, read
from memlab.recipe import Recipe
from memlab.units import GIB, KIB, MIB

KEYS = {
    "form", "backend", "device", "requested", "total", "free", "allocated", "reserved",
    "reserved_unallocated", "this_process", "other_processes", "allowed", "private_pools", "causes",
    "actions", "cannot_tell",
}  # fmt: skip
SCALE = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": KIB, "MB": MIB, "GB": GIB}
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- the forms, written down a second time ------------------------------------------------------------------


@st.composite
def sizes(draw: st.DrawFn, units: tuple[str, ...] = ("KiB", "MiB", "GiB")) -> tuple[str, int]:
    """(as printed, bytes)."""
    if draw(st.integers(0, 11)) == 0:
        n = draw(st.integers(0, 1023))
        return f"{n} bytes", n
    unit, hundredths = draw(st.sampled_from(units)), draw(st.integers(0, 99_999))
    return f"{hundredths // 100}.{hundredths % 100:02} {unit}", round(Fraction(hundredths * SCALE[unit], 100))


OLD_HINT = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
HINT = (
    " If reserved but unallocated memory is large try setting {} to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
BRACKETS = ("cached", "reserved", "reserved_hint")
SENTENCES = ("process", "process_pools", "process_class", "process_alloc_conf", "allowed", "hip", "xpu")


@st.composite
def messages(draw: st.DrawFn, form: str | None = None) -> tuple[str, dict[str, Any]]:
    """(text, the numbers that it holds) of one form."""
    form = form or draw(st.sampled_from((*BRACKETS, *SENTENCES, "malloc_async", "mps", "host")))
    values: dict[str, Any] = dict.fromkeys(
        ("device", "requested", "total", "free", "allocated", "reserved", "reserved_unallocated",
         "this_process", "allowed", "private_pools"), None,
    )  # fmt: skip
    values["other_processes"] = []

    def size(name: str, units: tuple[str, ...] = ("KiB", "MiB", "GiB")) -> str:
        text, values[name] = draw(sizes(units))
        return text

    device = draw(st.integers(0, 15))
    if form in BRACKETS:
        values["device"] = device
        text = (
            f"RuntimeError: CUDA out of memory. Tried to allocate {size('requested')} (GPU {device}; "
            f"{size('total')} total capacity; {size('allocated')} already allocated; {size('free')} free; "
        )
        if form == "cached":
            text += f"{size('reserved_unallocated')} cached)"
        else:
            text += f"{size('reserved')} reserved in total by PyTorch)"
        text += OLD_HINT if form == "reserved_hint" else ""
    elif form in SENTENCES:
        values["device"] = device
        vendor = {"hip": "HIP", "xpu": "XPU"}.get(form, "CUDA")
        name = "torch.OutOfMemoryError" if form == "process_class" else "torch.cuda.OutOfMemoryError"
        spelled = draw(st.sampled_from(("capacty", "capacity"))) if form == "process" else "capacity"
        text = (
            f"{name}: {vendor} out of memory. Tried to allocate {size('requested')}. GPU {device} has a "
            f"total {spelled} of {size('total')} of which {size('free')} is free."
        )
        clauses = []
        for _ in range(draw(st.integers(0, 3))):
            printed, other = draw(sizes())
            values["other_processes"].append(other)
            clauses.append(f" Process {draw(st.integers(1, 4_000_000))} has {printed} memory in use.")
        if draw(st.booleans()):
            mine = f" Including non-PyTorch memory, this process has {size('this_process')} memory in use."
            clauses.insert(draw(st.integers(0, len(clauses))), mine)
        text += "".join(clauses)
        if form == "allowed":
            text += f" {size('allowed')} allowed;"
        text += f" Of the allocated memory {size('allocated')} is allocated by PyTorch,"
        if form == "process_pools" or (form != "process" and draw(st.booleans())):
            text += f" with {size('private_pools')} allocated in private pools (e.g., CUDA Graphs),"
        text += f" and {size('reserved_unallocated')} is reserved by PyTorch but unallocated."
        if form == "process":
            text += HINT.format("max_split_size_mb")
        elif form == "process_alloc_conf":
            text += HINT.format("PYTORCH_ALLOC_CONF=expandable_segments:True")
        elif form == "xpu":
            text += " Please use `empty_cache` to release all unoccupied cached memory."
        else:
            name = "PYTORCH_HIP_ALLOC_CONF" if form == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
            text += HINT.format(f"{name}=expandable_segments:True")
    elif form == "malloc_async":
        values["device"] = device
        text = (
            f"torch.OutOfMemoryError: Allocation on device {device} would exceed allowed memory. (out of "
            f"memory)\nCurrently allocated     : {size('allocated')}\nRequested               : "
            f"{size('requested')}\nDevice limit            : {size('total')}\nFree (according to CUDA): "
            f"{size('free')}\nPyTorch limit (set by user-supplied memory fraction)\n"
            f"                        : {size('allowed')}"
        )
    elif form == "mps":
        units = draw(st.sampled_from((("MB", "GB"), ("MiB", "GiB"))))
        other, _ = draw(sizes(units))
        pool = draw(st.sampled_from(("private", "shared")))
        text = (
            f"RuntimeError: MPS backend out of memory (MPS allocated: {size('allocated', units)}, other "
            f"allocations: {other}, max allowed: {size('allowed', units)}). Tried to allocate "
            f"{size('requested', units)} on {pool} pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
            "upper limit for memory allocations (may cause system failure)."
        )
    else:
        n = values["requested"] = draw(st.integers(1, 2**63))
        words = draw(st.sampled_from(("can't allocate memory", "not enough memory")))
        text = (
            f"RuntimeError: [enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: {words}: you "
            f"tried to allocate {n} bytes."
        )
    return text, {"form": form, **values}


def agrees(report: Report, wanted: dict[str, Any]) -> None:
    data = report.to_dict()
    assert {key: data[key] for key in wanted} == wanted
    assert set(data) == KEYS
    assert data["causes"] and data["actions"]
    assert all(cause["label"] in LABELS and cause["why"] for cause in data["causes"])
    json.dumps(data)
    assert max(map(len, str(report).splitlines())) <= 80


# --- what surrounds them ------------------------------------------------------------------------------------

COLOUR = "\x1b[1;31m"
NOISE = [
    "step 120 loss 2.31 lr 1e-4 mem 31.2GiB 3 out of 10",
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 88, in main',
    "    loss.backward()",
    "During handling of the above exception, another exception occurred:",
    "| 0  NVIDIA A100   On | 00000000:07:00.0 Off |   0 |",
    "größer als vorher — naïve",
    "",
]


def wrapped(text: str, width: int, soft: bool) -> str:
    """A terminal breaks anywhere, an editor at spaces."""
    lines = []
    for line in text.split("\n"):
        while len(line) > width:
            cut = line.rfind(" ", 20, width) if soft else width
            cut = cut if cut > 0 else width
            lines.append(line[:cut])
            line = line[cut:]
        lines.append(line)
    return "\n".join(lines)


def before_each(prefix: str) -> Any:
    return lambda text: "\n".join(prefix + line for line in text.split("\n"))


DECORATIONS = {
    "plain": lambda text: text,
    "default": before_each("[default0]:"),
    "slurm": before_each("3: "),
    "mpi": before_each("[1,3]<stderr>:"),
    "compose": before_each("trainer-1  | "),
    "ray": before_each("(TrainWorker pid=4711, ip=10.0.0.3) "),
    "iso": before_each("2026-04-29T01:46:33.4647732Z "),
    "logging": before_each("2026-05-01 12:00:00,123 - ERROR - "),
    "glog": before_each("E0501 12:00:00.123000 4711 torch/elastic/api.py:826] "),
    "vllm": before_each("(Worker_TP0 pid=548) ERROR 07-29 21:48:54 [multiproc_executor.py:962] "),
    "kubernetes": before_each("2026-05-01T12:00:00.123456789Z stderr F "),
    "colour": lambda text: f"{COLOUR}{text}\x1b[0m",
    "colour inside": lambda text: text.replace(" of ", f" {COLOUR}of\x1b[0m "),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "quoted": before_each("> "),
    "html": lambda text: "<pre>" + text.replace("&", "&amp;").replace(">", "&gt;").replace("\n", "<br>\n"),
    "json": lambda text: json.dumps({"level": "error", "message": f"failed\n{text}"}),
}


@quick
@given(messages(), st.integers(40, 200), st.booleans(), st.sampled_from(sorted(DECORATIONS)), st.data())
def test_every_form_survives_what_logs_do_to_it(
    pair: tuple[str, dict[str, Any]], width: int, soft: bool, how: str, data: st.DataObject
) -> None:
    text, wanted = pair
    before = data.draw(st.lists(st.sampled_from(NOISE), max_size=6))
    after = data.draw(st.lists(st.sampled_from(NOISE), max_size=6))
    if how != "json":
        text = wrapped(text, width, soft)
    text = "\n".join([*before, DECORATIONS[how](text), *after])
    found = read(text.encode())
    assert len(found) == 1
    agrees(found.first, wanted)


@pytest.mark.parametrize("form", (*BRACKETS, *SENTENCES, "malloc_async", "mps", "host"))
def test_each_form_at_least_a_few_times(form: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(messages(form))
    def once(pair: tuple[str, dict[str, Any]]) -> None:
        agrees(read(pair[0] + "\n").first, pair[1])

    once()


@quick
@given(st.lists(messages(), min_size=1, max_size=6), st.data())
def test_several_messages_come_in_order_and_the_first_is_marked(
    pairs: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    lines: list[str] = []
    at = []
    for text, _ in pairs:
        lines += data.draw(st.lists(st.sampled_from(NOISE), max_size=3))
        at.append(len(lines) + 1)
        lines += text.split("\n")
    found = read("\n".join(lines) + "\n")
    distinct: list[dict[str, Any]] = []
    first_at: list[int] = []
    keys: list[object] = []
    for (text, wanted), line in zip(pairs, at, strict=True):
        # other processes are another message, even where all sizes are equal
        key = (_numbers(wanted), re.findall(r"Process \d+", text))
        if key not in keys:
            keys.append(key)
            distinct.append(wanted)
            first_at.append(line)
    assert len(found) == len(distinct)
    for report, wanted in zip(found, distinct, strict=True):
        assert _numbers(report.to_dict()) == _numbers(wanted)
    marks = found.to_dict()["found"]
    assert [mark["first"] for mark in marks] == [True] + [False] * (len(distinct) - 1)
    assert [mark["line"] for mark in marks] == first_at
    assert sum(mark["count"] for mark in marks) == len(pairs)


def _numbers(data: dict[str, Any]) -> list[Any]:
    return [data[key] for key in sorted(KEYS - {"form", "causes", "actions", "cannot_tell", "backend"})]


def test_interleaved_ranks_are_kept_apart() -> None:
    text = process(requested="1.50 GiB", free="310.50 MiB")
    other = process(requested="2.50 GiB", free="10.50 MiB").replace("GPU 0", "GPU 1")
    ones, twos = (wrapped(t, 70, soft=False).split("\n") for t in (text, other))
    lines = []
    for i in range(max(len(ones), len(twos))):
        lines += [f"[rank0]: {ones[i]}"] if i < len(ones) else []
        lines += [f"[rank1]: {twos[i]}"] if i < len(twos) else []
    found = read("\n".join(lines) + "\n")
    assert [(r.rank, r.requested, r.device) for r in found] == [
        ("rank0", 3 * GIB // 2, 0),
        ("rank1", 5 * GIB // 2, 1),
    ]
    assert {r.form for r in found} == {"process_class"}


def process(**sizes: str) -> str:
    values = {
        "requested": "1.50 GiB", "total": "15.78 GiB", "free": "310.50 MiB", "this": "15.40 GiB",
        "allocated": "14.80 GiB", "unallocated": "100.10 MiB", "others": "", "allowed": "",
    } | sizes  # fmt: skip
    return (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested}. GPU 0 has a total "
        "capacity of {total} of which {free} is free. {others}Including non-PyTorch memory, this process has "
        "{this} memory in use. {allowed}Of the allocated memory {allocated} is allocated by PyTorch, and "
        "{unallocated} is reserved by PyTorch but unallocated."
    ).format(**values)


# --- forms without sizes, and the rest ----------------------------------------------------------------------

OTHERS = [
    ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCStorage.cu:58",
     "thc", "cuda", "cannot_tell"),
    ("THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of memory",
     "thc", "cuda", "cannot_tell"),
    ("RuntimeError: CUDA error: out of memory", "cuda_no_sizes", "cuda", "cannot_tell"),
    ("torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
     "cuda_no_sizes", "cuda", "cannot_tell"),
    ('Traceback (most recent call last):\n  File "a/torch/utils/data/_utils/pin_memory.py", line 60, in '
     "do_one_step\nRuntimeError: CUDA error: out of memory", "cuda_no_sizes", "cuda", "host_pinned"),
    ('RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, '
     "please report a bug to PyTorch.", "masked", "cuda", "masked_oom"),
    ("RuntimeError: DataLoader worker (pid 1234) is killed by signal: Bus error. It is possible that "
     "dataloader's workers are out of shared memory.", "host", "cpu", "host_shm"),
    ("RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.", "host", "cpu", "host_ram"),
    ("[ERROR] [launch.py:321] [...] exits with return code = -9", "host", "cpu", "host_ram"),
    ("kernel: Out of memory: Killed process 4242 (python) total-vm:1kB", "host", "cpu", "host_ram"),
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.", "host", "cpu", "host_ram"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "other", "cuda", "cannot_tell"),
    ("RuntimeError: CUDA driver error: out of memory", "other", "cuda", "cannot_tell"),
    ("torch.distributed.DistBackendError: NCCL error ... Last error:\nCuda failure 2 'out of memory'",
     "other", "cuda", "cannot_tell"),
    ("RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
     "other", "cuda", "int_overflow"),
    ("jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3234826240 bytes.",
     "other", None, "cannot_tell"),
    ("RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
     "xpu", "xpu", "cannot_tell"),
    ("RuntimeError: HIP error: out of memory", "hip", "hip", "cannot_tell"),
    ("my script: CUDA out of memory", "cuda_no_sizes", "cuda", "cannot_tell"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "form", "backend", "label"), OTHERS)
def test_other_forms(text: str, form: str, backend: str | None, label: str) -> None:
    found = read(text)
    assert len(found) == 1
    report = found.first
    assert (report.form, report.backend, report.causes[0].label) == (form, backend, label)
    assert report.actions and form in FORMS


def test_sizes_of_other_forms() -> None:
    jax = read("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3234826240 bytes.").first
    assert jax.requested == 3234826240
    xpu = read(
        "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to "
        "allocate 6.85 GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in "
        "total by PyTorch)"
    )
    assert len(xpu) == 1 and xpu.first.form == xpu.first.backend == "xpu"
    assert xpu.first.total == round(Fraction(1556 * GIB, 100)) and xpu.first.allocated == 0
    short = read(
        "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 GiB. Of the "
        "allocated memory 1.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated."
    ).first
    assert (short.form, short.free, short.reserved_unallocated) == ("xpu", None, 0)
    cupy = read("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes").first
    assert (cupy.form, cupy.requested) == ("other", GIB)


def test_a_decimal_comma_is_a_point_and_no_tail_of_a_number_is_taken() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 20{0}50 MiB (GPU 0; {1} GiB total capacity; "
        "14{0}75 GiB already allocated; 16{0}75 MiB free; 14{0}83 GiB reserved in total by PyTorch)"
    )
    [point], [comma] = (read(text.format(sign, f"15{sign}90").encode()) for sign in ".,")
    assert point.to_dict() == comma.to_dict()
    [odd] = read(text.format(".", "1,234.56").encode())
    assert odd.total is None and odd.requested == point.requested


def test_more_free_than_the_card_has_is_said() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.90 GiB total capacity; 14.75 GiB already "
        "allocated; 200.00 GiB free; 14.83 GiB reserved in total by PyTorch)"
    )
    assert any("isn't the message as it was printed" in line for line in read(text.encode())[0].cannot_tell)


def test_what_is_no_message_is_said_in_one_line() -> None:
    for text in ("", "hello\nworld", "loss 1.0\n" * 100, "\x80\x04."):
        with pytest.raises(NoMessageError, match="no out-of-memory message found") as caught:
            read(text)
        assert "\n" not in str(caught.value)
    for text, words in (
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal memory access"),
        ("cudaErrorIllegalAddress", "illegal memory access"),
        ("RuntimeError: CUDA error: device-side assert triggered", "device-side assert"),
    ):
        with pytest.raises(NoMessageError, match=words):
            read(text)


def test_the_message_of_memlabs_own_card_is_read() -> None:
    error = OutOfMemory(
        requested=1500 * MIB + 7, segment=1502 * MIB, capacity=16 * GIB, context=300 * MIB,
        allocated=14 * GIB, reserved=15 * GIB, allowed=15 * GIB, others={77: 200 * MIB}, device=2,
    )  # fmt: skip
    report = read(str(error)).first
    assert (report.form, report.device, report.other_processes) == ("allowed", 2, [200 * MIB])
    for name, value in (("requested", error.segment), ("total", error.capacity), ("allowed", error.allowed)):
        assert format_size(getattr(report, name)) == format_size(value)
    text = f"{error} Allocation: aten.mm in h.0.mlp (forward)."
    report = read(text).first
    assert report.allocated == 14 * GIB
    assert (report.operator, report.phase) == ("aten.mm in h.0.mlp", "forward")
    assert [r.operator for r in read(f"{process()}\n{text}\n")] == ["", "aten.mm in h.0.mlp"]
    assert "asked for by aten.mm in h.0.mlp (forward)" in str(report) and "phase" not in " ".join(
        report.cannot_tell
    )


# --- causes -------------------------------------------------------------------------------------------------

CASES = [
    ({}, ["capacity"]),
    ({"requested": "20.00 GiB"}, ["single_request_exceeds_gpu"]),
    ({"requested": "2048.00 GiB"}, ["int_overflow", "single_request_exceeds_gpu"]),
    ({"unallocated": "3.00 GiB", "allocated": "11.90 GiB"}, ["fragmentation"]),
    ({"free": "2.00 GiB", "this": "13.70 GiB", "allocated": "13.00 GiB"}, ["cannot_tell"]),
    ({"free": "2.00 GiB", "this": "1.40 GiB", "allocated": "900.00 MiB", "allowed": "2.00 GiB allowed; "},
     ["memory_cap"]),
    ({"this": "3.00 GiB", "allocated": "2.40 GiB", "others": "Process 7 has 12.40 GiB memory in use. "},
     ["other_process"]),
    ({"this": "3.00 GiB", "allocated": "2.40 GiB"}, ["other_process"]),  # total - free - own
    ({"this": "11.40 GiB", "allocated": "10.80 GiB", "others": "Process 7 has 4.00 GiB memory in use. "},
     ["capacity", "other_process"]),
    ({"allocated": "5.00 GiB"}, ["outside_allocator"]),
    ({"allocated": "10.00 GiB"}, ["capacity", "outside_allocator"]),
    ({"unallocated": "1.40 GiB", "allocated": "13.50 GiB"}, ["cannot_tell"]),  # enough in sum, by a part each
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "labels"), CASES)
def test_causes_follow_the_arithmetic(sizes: dict[str, str], labels: list[str]) -> None:
    report = read(process(**sizes)).first
    assert [cause.label for cause in report.causes] == labels
    first = report.causes[0]
    assert "GiB" in first.why or "TiB" in first.why


def test_bracket_forms_have_causes_too() -> None:
    def labels(text: str) -> list[str]:
        return [cause.label for cause in read(text).first.causes]

    head = "CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.78 GiB total capacity; "
    assert labels(head + "11.20 GiB already allocated; 1.10 GiB free; 2.40 GiB cached)") == ["fragmentation"]
    assert labels(head + "14.20 GiB already allocated; 0.10 GiB free; 0.40 GiB cached)") == ["capacity"]
    # 'reserved in total' includes the allocated: 0.2 GiB are free in it, not 14.4
    assert labels(
        head + "14.20 GiB already allocated; 0.10 GiB free; 14.40 GiB reserved in total by PyTorch)"
    ) == ["capacity"]
    assert labels(
        head + "1.20 GiB already allocated; 0.10 GiB free; 1.40 GiB reserved in total by PyTorch)"
    ) == ["other_process"]
    mps = (
        "MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max allowed: 32.00 "
        "GB). Tried to allocate 129.21 MB on private pool."
    )
    assert labels(mps) == ["memory_cap"]


# --- what a message says of processes, and when that can't be true ------------------------------------------


def nameless(*others: tuple[int, str], **sizes: str) -> str:
    """As in a container: the process can't find its own number in the driver's list, so nothing is 'this'."""
    named = "".join(f"Process {pid} has {size} memory in use. " for pid, size in others)
    text = process(**sizes, others=named)
    start = text.index("Including")
    return text[:start] + text[text.index("Of the allocated") :]


FULL_CARD = {"total": "79.10 GiB", "free": "1.04 GiB", "allocated": "75.20 GiB", "unallocated": "1.35 GiB"}


def test_in_a_container_the_process_that_the_message_names_is_this_one() -> None:
    report = read(nameless((81228, "78.05 GiB"), requested="2.50 GiB", **FULL_CARD)).first
    assert [cause.label for cause in report.causes] == ["capacity"]
    assert report.itself == 81228 and report.rivals == []
    assert report.to_dict()["this_process"] is None and len(report.other_processes) == 1  # as printed
    text = " ".join(str(report).split())
    assert "named process 81228, which must be this one" in text and "container" in text
    assert "end it" not in text
    # three processes, of which one is this
    report = read(
        nameless(
            (1, "3.86 GiB"), (2, "4.29 GiB"), (3, "31.20 GiB"), requested="1.02 GiB", total="39.38 GiB",
            free="25.38 MiB", allocated="30.21 GiB", unallocated="500.12 MiB",
        )
    ).first  # fmt: skip
    assert report.itself == 3 and [pid for pid, _ in report.rivals] == [1, 2]
    assert [cause.label for cause in report.causes] == ["capacity", "other_process"]
    assert "process 1 or 2" in " ".join(report.actions)


def test_a_named_process_that_fits_beside_this_one_is_somebody_else() -> None:
    report = read(
        nameless((7, "12.40 GiB"), free="310.50 MiB", allocated="2.00 GiB", unallocated="100.00 MiB")
    ).first
    assert report.itself is None and report.causes[0].label == "other_process"
    # both fit on this card: nothing in the numbers says which it is
    report = read(nameless((81228, "78.05 GiB"), **FULL_CARD | {"total": "179.10 GiB"})).first
    assert report.itself is None


@pytest.mark.parametrize(
    "launcher",
    [
        "E0501 12:00:00.123000 4711 torch/distributed/elastic/multiprocessing/api.py:833] failed "
        "(exitcode: 1) local_rank: 2 (pid: 81228) of binary: /usr/bin/python",
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-05-01_12:00:00\n  rank      : 2 "
        "(local_rank: 2)\n  exitcode  : 1 (pid: 81228)\n  error_file: <N/A>",
    ],
)
def test_torchruns_lines_say_which_process_is_the_rank(launcher: str) -> None:
    message = nameless((81228, "78.05 GiB"), **FULL_CARD | {"total": "179.10 GiB"}).replace("GPU 0", "GPU 2")
    assert read(f"{message}\n{launcher}\n").first.itself == 81228
    another = launcher.replace("local_rank: 2", "local_rank: 1")
    assert read(f"{message}\n{another}\n").first.itself is None


def test_windows_sizes_that_are_none() -> None:
    report = read(
        process(
            requested="32.00 MiB", total="8.00 GiB", free="0 bytes", this="17179869184.00 GiB",
            allocated="12.15 GiB", unallocated="200.00 MiB",
        )
    ).first  # fmt: skip
    assert [cause.label for cause in report.causes] == ["capacity"]
    assert "more than the card's 8.00 GiB" in report.causes[0].why and "WSL" in report.causes[0].why
    text = str(report)
    assert "TiB" not in text and "NCCL" not in text and "Sysmem Fallback" in text
    # the same for a process by number, and where all fits on the card
    report = read(
        process(
            requested="1.50 GiB", total="8.00 GiB", free="0 bytes", this="17179869184.00 GiB",
            allocated="7.15 GiB", unallocated="200.00 MiB",
            others="Process 5 has 17179869184.00 GiB memory in use. ",
        )
    ).first  # fmt: skip
    assert [cause.label for cause in report.causes] == ["capacity"] and "TiB" not in str(report)


@pytest.mark.parametrize(
    "message",
    [
        process(
            requested="20.00 MiB", total="23.69 GiB", free="12.00 MiB", this="23.60 GiB",
            allocated="23.10 GiB", unallocated="120.00 MiB",
        ),
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; 21.95 GiB already "
        "allocated; 12.00 MiB free; 22.11 GiB reserved in total by PyTorch)",
    ],
)  # fmt: skip
def test_a_full_card_is_no_matter_of_fragmentation_alone(message: str) -> None:
    report = read(message).first
    assert [cause.label for cause in report.causes] == ["fragmentation", "capacity"]
    assert "the card is full" in report.causes[1].why
    first = next(i for i, action in enumerate(report.actions) if "micro-batch" in action)
    setting = [i for i, action in enumerate(report.actions) if action.startswith("set PYTORCH")]
    assert all(first < i for i in setting)
    assert all("wins at most" in report.actions[i] for i in setting)


def test_the_old_form_shows_what_is_outside() -> None:
    report = read(
        "CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 23.69 GiB total capacity; 21.95 GiB already "
        "allocated; 12.00 MiB free; 22.11 GiB reserved in total by PyTorch)"
    ).first
    row = next(line for line in str(report).splitlines() if "outside or others" in line)
    assert "1.57 GiB" in row


def test_a_hint_alone_supports_no_cause() -> None:
    hint = HINT.format("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert [c.label for c in read(process() + hint).first.causes] == ["capacity"]


@pytest.mark.parametrize(
    ("form", "wanted", "unwanted"),
    [
        ("cached", "empty_cache", "ALLOC_CONF"),
        ("reserved", "max_split_size_mb", "expandable_segments:True"),
        ("reserved_hint", "max_split_size_mb", "expandable_segments:True"),
        ("process", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "max_split_size_mb:"),
        ("process_class", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "max_split_size_mb:"),
        ("process_alloc_conf", "set PYTORCH_ALLOC_CONF=expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_advice_fits_the_version(form: str, wanted: str, unwanted: str) -> None:
    @settings(max_examples=5, deadline=None)
    @given(messages(form))
    def once(pair: tuple[str, dict[str, Any]]) -> None:
        report = read(pair[0]).first
        advice = " ".join(oom._against_fragmentation(report))
        assert wanted in advice and unwanted not in advice

    once()


# --- repeats, tracebacks, tensors ---------------------------------------------------------------------------

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 88, in main
    loss.backward()
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 630, in backward
    torch.autograd.backward(
  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward
    return Variable._execution_engine.run_backward(
"""


def test_nested_tracebacks_count_once() -> None:
    nested = (
        TRACEBACK + process() + "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    found = read(
        nested + TRACEBACK + process().replace("torch.OutOfMemoryError: ", "RuntimeError: failed: ") + "\n"
    )
    assert len(found) == 1 and found.first.count == 2
    assert found.first.form == "process_class"
    assert "2 times" in str(found) and found.to_dict()["found"][0]["count"] == 2
    assert (found.first.where, found.first.phase) == ("/home/me/train.py:88 in main", "backward")


FORWARD = """Traceback (most recent call last):
  File "/home/me/train.py", line 188, in <module>
    out = model(**batch)
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1501, in _call_impl
    return forward_call(*args, **kwargs)
  File "/venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py", line 824, in forward
    logits = logits.float()
             ^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "2026-05-01 12:00:00,123 - ERROR - "])
def test_the_traceback_gives_the_phase_and_the_deepest_frame(prefix: str) -> None:
    def of(text: str) -> Report:
        return read("".join(f"{prefix}{line}\n" for line in (text + process()).split("\n"))).first

    report = of(FORWARD)
    assert (report.phase, report.code) == ("forward", "out = model(**batch)")
    assert report.deepest == "models/llama/modeling_llama.py:824 in forward: logits = logits.float()"
    assert "logits = logits.float()" in " ".join(str(report).split())
    # the source line alone
    for line, phase in (("loss.backward()", "backward"), ("optimizer.step()", "optimizer"), ("go()", "")):
        report = of(f'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    {line}\n')
        assert (report.where, report.code, report.phase, report.deepest) == (
            "t.py:9 in <module>",
            line,
            phase,
            "",
        )
        questions = " ".join(report.cannot_tell)
        assert ("lines don't say" in questions) is (not phase) and "traceback above" not in questions
    assert of(TRACEBACK).deepest == ""  # autograd's engine tells nothing


def test_several_ranks_get_the_advice_once() -> None:
    one = process(requested="20.00 MiB", total="23.69 GiB", this="23.60 GiB", allocated="23.55 GiB")
    lines = [f"[rank{i}]: {one}".replace("GPU 0", f"GPU {i}").replace("310.50", f"1{i}.00") for i in range(4)]
    text = str(read("\n".join(lines) + "\n"))
    assert text.count("smaller micro-batch") == 1
    assert [row.split()[1] for row in text.splitlines() if "MiB  " in row and "rank" in row] == [
        "rank0", "rank1", "rank2", "rank3",
    ]  # fmt: skip
    # another cause is explained, with the advice that is new
    other = process(this="3.00 GiB", allocated="2.40 GiB", others="Process 7 has 12.40 GiB memory in use. ")
    text = str(read("\n".join([*lines, f"[rank4]: {other}"]) + "\n"))
    assert "Another cause: line 5, rank4" in text and text.count("nvidia-smi on the host") == 1
    assert max(map(len, text.splitlines())) <= 80
    assert "and 1 more distinct message;" in str(
        read("".join(process(free=f"{i}.00 MiB") for i in range(18)))
    )


def test_the_tensor_that_was_asked_for_is_named() -> None:
    config, recipe = model("gpt2"), Recipe(micro_batch=4, sequence=1024, precision="fp32")
    found = read(process(requested="786.00 MiB"))
    oom.name_tensors(found, config, recipe)
    shapes = {match.shape for match in found.first.matches}
    assert shapes == {(4, 1024, 50257)} or shapes == {(4096, 50257)}
    assert "log-softmax" in str(found)
    # what the message says of phase and operator narrows it down
    eager = recipe.replace(attention="eager", dropout=0.1)
    asked = read(process(requested="192.00 MiB"))
    oom.name_tensors(asked, config, eager)
    assert any(match.name.startswith("gradient of") for match in asked.first.matches)
    asked = read(
        process(requested="192.00 MiB") + " Allocation: aten.native_dropout in blocks.7.attn (forward)."
    )
    oom.name_tensors(asked, config, eager)
    assert [match.name for match in asked.first.matches] == ["blocks.*.attention weights after dropout"]
    assert "aten.native_dropout makes this" in asked.first.note
    small = read(process(requested="2.00 MiB"))
    oom.name_tensors(small, config, recipe)
    assert not small.first.matches and "up to 1 MiB" in small.first.note
    odd = read(process(requested="1.23 GiB"))
    oom.name_tensors(odd, config, recipe)
    assert not odd.first.matches and "Nearest" in odd.first.note


@given(st.integers(1, 64 * GIB))
def test_a_request_lies_in_the_range_that_its_print_gives(size: int) -> None:
    rounding = oom.AllocatorConfig()
    printed = format_size(rounding.segment_size(rounding.block_size(size)))
    span = oom.request_range(read(process(requested=printed, total="99.00 GiB")).first)
    assert span is not None and span[0] <= size <= span[1]


# --- size, speed, hostility ---------------------------------------------------------------------------------


#: Seconds of this process alone. Linear work takes about one; under load, on slow cores, a few. Sought
#: is quadratic work, which takes minutes; how long a log really takes is a benchmark's matter.
LINEAR = 30


def test_a_log_of_50_mb_is_read_to_its_end() -> None:
    line = (
        b"2026-05-01 12:00:00,123 - INFO - step %d loss 2.31 mem 31.2GiB 3 out of 10 memory tokens/s 12345\n"
    )
    log = b"".join(line % i for i in range(500_000)) + f"[rank3]: {process()}\n".encode()
    assert len(log) > 50_000_000
    begin = time.process_time()
    found = read(io.BytesIO(log))
    assert time.process_time() - begin < LINEAR
    assert (found.first.line, found.first.rank) == (500_001, "rank3")


def test_a_log_full_of_messages_is_counted_to_its_end() -> None:
    many = "".join(process(free=f"{i // 100}.{i % 100:02} MiB") + "\n" for i in range(3000))
    begin = time.process_time()
    found = read(many)
    assert time.process_time() - begin < LINEAR
    assert len(found) == oom.MOST_REPORTS
    assert found.unread == 2000
    assert "2000 more behind these" in str(found)


def test_messages_without_sizes_that_were_not_read_are_counted() -> None:
    found = read(b"CUDA out of memory.\n" * 500_000)
    assert sum(report.count for report in found) + found.unread == pytest.approx(500_000, rel=1e-3)


@pytest.mark.parametrize("at", [0, 8 * MIB - 300, 8 * MIB - 8 * KIB, 8 * MIB - 5, 8 * MIB + 10])
def test_messages_on_the_borders_of_chunks(at: int) -> None:
    noise = b"no news today\n" * (at // 14)
    found = read(noise + process().encode() + b"\n" + b"x" * 9 * MIB)
    assert (len(found), found.first.line, found.first.count) == (1, at // 14 + 1, 1)


def test_one_endless_line() -> None:
    found = read(b"x" * (9 * MIB) + process().encode() + b" y" * MIB)
    assert len(found) == 1 and found.first.requested == 3 * GIB // 2


def test_compressed_and_utf_16(tmp_path: Path) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(f"{process()}\n".encode()))
    assert read(tmp_path / "log.gz").first.requested == 3 * GIB // 2
    (tmp_path / "log.txt").write_text(process(), encoding="utf-16")  # as PowerShell's > writes it
    assert read(str(tmp_path / "log.txt")).first.requested == 3 * GIB // 2
    with pytest.raises(NoMessageError, match="damaged"):
        read(gzip.compress(process().encode())[:-20])


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_do_no_harm(raw: bytes) -> None:
    with contextlib.suppress(NoMessageError):
        str(read(raw))


MUTATIONS = [
    b"", b"9" * 40, b"\x00", b"\x1b[", b"&#x1b;", b"\xff", b"GiB", b"-", b"\\n", b"0.00 bytes", b"\xc4\xb0",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(messages(), st.data())
def test_mutated_messages_do_no_harm(pair: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    raw = bytearray(pair[0].encode())
    for _ in range(data.draw(st.integers(1, 12))):
        where = data.draw(st.integers(0, len(raw)))
        cut = data.draw(st.integers(0, 30))
        raw[where : where + cut] = data.draw(st.sampled_from(MUTATIONS))
    try:
        found = read(bytes(raw))
    except NoMessageError:
        return
    str(found)
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "unit",
    [b"tried to allocate ", b"cuda out of memory ", b"9", b"nvml_success==", b"\x1b[", b"&amp;", b"<a", b"[",
     b"thcudacheck fail file=", b"(", b"out of memory", b"\\u001b["],
)  # fmt: skip
def test_repetition_takes_linear_time(unit: bytes) -> None:
    begin = time.process_time()
    with contextlib.suppress(NoMessageError):
        str(read(b"CUDA out of memory. Tried to allocate " + unit * (2 * MIB // len(unit))))
    assert time.process_time() - begin < LINEAR


def test_absurd_numbers() -> None:
    report = read(process(requested="99999999999999999999.99 GiB")).first
    assert report.causes[0].label == "int_overflow"
    report = read(process(total="0 bytes", this="0 bytes", allocated="900.00 GiB")).first
    assert report.causes
    host = read(
        "DefaultCPUAllocator: not enough memory: you tried to allocate 9223372036854775807 bytes."
    ).first
    assert [c.label for c in host.causes] == ["int_overflow", "host_ram"]


@pytest.mark.parametrize(
    "prefix", ["2026-11-30T10:11:12.123Z worker-0 ", "node-1/0 12:00:00 ", "gpu-a-12 2026-11-30 10:11:12 "]
)
@pytest.mark.parametrize("width", [40, 47, 60, 72])
def test_a_host_and_a_time_before_every_wrapped_line(prefix: str, width: int) -> None:
    """A launcher's prefix that breaks 'CUDA out of / memory' apart doesn't make it the host's memory."""
    text = (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 101.06 MiB is free. Including non-PyTorch memory, this process "
        "has 23.54 GiB memory in use. Of the allocated memory 22.91 GiB is allocated by PyTorch, and "
        "183.90 MiB is reserved by PyTorch but unallocated."
    )
    whole, wrapped = (
        read(t).first.to_dict()
        for t in (text, "".join(f"{prefix}{line}\n" for line in textwrap.wrap(text, width)))
    )
    names = (
        "form",
        "backend",
        "requested",
        "total",
        "free",
        "allocated",
        "reserved_unallocated",
        "this_process",
    )
    assert {name: wrapped[name] for name in names} == {name: whole[name] for name in names}
