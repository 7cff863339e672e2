"""How a chapter begins: `lab = memlab.begin("02_four_consumers", device=device, size=size, seed=seed)`.

It settles where the chapter runs, how large its toys are and which seed they use, says so in one line, with
the versions, and gives the chapter a way to state its headline numbers so that a runner can collect them.

A chapter runs on the CPU, on a CUDA GPU, or on a virtual card (`device="virtual:T4"`): then what stands in
`with lab.card():` runs on fake tensors by that card's rules and is measured there, whatever its size. Fake
tensors hold no values, so numbers (losses, norms of gradients) are computed on `lab.device_for("losses")`.

A value is taken from, in this order: the argument, where it differs from its default (papermill's parameters
come this way); the environment (MEMLAB_DEVICE, MEMLAB_SIZE, MEMLAB_SEED); the default. While a submission is
being graded (MEMLAB_GRADING=1) the default size is 'smallest'.
"""

from __future__ import annotations

import gc
import html
import importlib
import math
import os
import platform
import random
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memlab import __version__, hardware, units

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SIZES = ("smallest", "normal")
DEFAULT_DEVICE, DEFAULT_SIZE, DEFAULT_SEED = "auto", "normal", 0
#: The oldest torch that memlab works with, as in pyproject.toml; on Colab pip doesn't check it (--no-deps).
OLDEST_TORCH = (2, 11)

#: MIME type of a headline number in a cell's outputs; its data is a JSON object.
HEADLINE_MIME = "application/vnd.memlab.headline+json"


@dataclass(frozen=True)
class Lab:
    """Where and how large this run of a chapter is. Made by `begin`."""

    chapter: str
    device: torch.device
    size: str
    seed: int
    virtual: str = (
        ""  # name of the virtual card; `device` is then the CPU's, on which fake tensors say they lie
    )

    def card(self) -> AbstractContextManager[object]:
        """Where bytes are measured: nothing changes on a CPU or GPU; else all inside is on the virtual card.

        Models, batches and optimizers are made inside, and none of their values may be read.
        """
        if not self.virtual:
            return nullcontext()
        from memlab.virtual import VirtualGPU

        return VirtualGPU(self.virtual)

    def device_for(self, values: str) -> torch.device:
        """The device for tensors whose values are read: `device`; a virtual card can't, and says so.

        `values` names what is read: "losses", "norms of gradients".
        """
        if self.virtual:
            print(f"({values}: the tensors of a virtual {self.virtual} hold no values; computed on the CPU)")
        return self.device

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type to measure kernels with: bf16, or fp16 on a GPU older than Ampere (T4, V100).

        Those only emulate bf16: matrix products are slow, and no fused attention kernel takes it.
        """
        import torch

        return torch.float16 if _lacks_bf16(self.device) else torch.bfloat16

    def pick(self, *, smallest: T, normal: T) -> T:
        """The value for this run's size: small enough to be graded in seconds, or worth looking at."""
        return smallest if self.size == "smallest" else normal

    def headline(self, name: str, value: int | float, unit: str, includes: str) -> None:
        """Show one number that the chapter stands for, and leave it in the cell's outputs for a runner.

        `unit` 'B' prints as KiB/MiB/GiB (the data keeps the bytes); '' is for a plain ratio or count.
        `includes` says what the number covers ("allocated by all tensors of one step, cache excluded").
        Raises ValueError for a value that isn't a finite number, or for an empty name or `includes`.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"headline {name!r}: {value!r} isn't a finite number; pass an int or a float")
        if not name.strip() or not includes.strip():
            raise ValueError("a headline needs a name and a word on what it includes")
        if unit == "B":
            value = round(value)
            shown = units.format_bytes(value)
        else:
            number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
            shown = f"{number} {unit}".rstrip()
        data = {
            "chapter": self.chapter,
            "name": name,
            "value": value,
            "unit": unit,
            "includes": includes,
            "text": shown,
        }
        plain = f"{name}: {shown} ({includes})"
        rich = f"<p><strong>{html.escape(name)}: {html.escape(shown)}</strong> ({html.escape(includes)})</p>"
        _display({"text/plain": plain, "text/html": rich, HEADLINE_MIME: data})


def table(header: Sequence[str], *rows: Sequence[object]) -> None:
    """Print rows in columns, the first one to the left, the others to the right."""
    shown = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    for row in shown:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(row[0].ljust(widths[0]), *rest, sep="  ")


def begin(
    chapter: str, device: str = DEFAULT_DEVICE, size: str = DEFAULT_SIZE, seed: int = DEFAULT_SEED
) -> Lab:
    """Start a chapter: pick the device, seed `random` and torch, print one line about this machine.

    `device` is 'auto' (CUDA where torch sees a GPU, else the CPU), 'cpu', 'cuda', 'cuda:N' or 'virtual:CARD';
    `size` is 'normal' or 'smallest'. Raises ValueError, in one line, for anything else, and ImportError for a
    torch older than `OLDEST_TORCH`.
    """
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", chapter):
        raise ValueError(f"chapter {chapter!r} isn't a chapter's name; write it as in '02_four_consumers'")
    grading = os.environ.get("MEMLAB_GRADING") == "1"
    chosen_device, device_from = _choose("device", device, DEFAULT_DEVICE, DEFAULT_DEVICE)
    chosen_size, size_from = _choose("size", size, DEFAULT_SIZE, "smallest" if grading else DEFAULT_SIZE)
    chosen_seed, seed_from = _choose("seed", seed, DEFAULT_SEED, DEFAULT_SEED)
    _new_enough()
    if chosen_size not in SIZES:
        raise ValueError(f"{size_from} {chosen_size!r}: write 'smallest' or 'normal'")
    virtual = _virtual(chosen_device)
    where = _device("cpu" if virtual else chosen_device, device_from)
    lab = Lab(chapter, where, chosen_size, _seed(chosen_seed, seed_from), virtual)

    import torch

    random.seed(lab.seed)
    torch.manual_seed(lab.seed)
    gc.freeze()  # measurements collect garbage: what the imports made needn't be searched each time
    # torch counts the host's cores; a container may be allowed fewer, and too many threads crawl.
    if torch.get_num_threads() > _cores():
        torch.set_num_threads(_cores())
    machine = _machine(lab.device)
    if virtual:
        machine = f"a virtual {virtual}, values on {machine}"
    print(f"{lab.chapter} on {machine}; {_packages()}; size {lab.size}, seed {lab.seed}")
    return lab


def versions() -> str:
    """One line: the device that 'auto' takes here, and the versions of memlab, torch and Python."""
    _new_enough()
    return f"{_machine(_device('auto', 'device'))}; {_packages()}"


def _packages() -> str:
    import torch

    return f"memlab {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _new_enough() -> None:
    """Raises ImportError for a torch older than `OLDEST_TORCH`."""
    import torch

    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"memlab needs torch {oldest} or newer and this is {torch.__version__}; on Colab choose the "
            f"latest runtime version (Runtime, Change runtime type), elsewhere: pip install 'torch>={oldest}'"
        )


def _lacks_bf16(device: torch.device) -> bool:
    """Is this a GPU without bf16 arithmetic? torch emulates it there, so `is_bf16_supported` says yes."""
    if device.type != "cuda":
        return False
    import torch

    return torch.cuda.get_device_capability(device) < (8, 0)


def _choose(name: str, given: object, default: object, fallback: object) -> tuple[Any, str]:
    """The value to use, and the name under which an error speaks of it."""
    variable = f"MEMLAB_{name.upper()}"
    if given == default and os.environ.get(variable, "").strip():
        return os.environ[variable].strip(), variable
    return (given if given != default else fallback), name


def _virtual(text: object) -> str:
    """The full name of the card in 'virtual:T4'; '' for any other device. Raises UnknownNameError."""
    kind, _, name = str(text).strip().partition(":")
    if kind.lower() != "virtual":
        return ""
    return hardware.gpu(name.strip()).name


def _device(text: object, named: str) -> torch.device:
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", str(text).strip().lower())
    if match is None or (match[2] and match[1] != "cuda"):
        raise ValueError(f"{named} {text!r}: write 'auto', 'cpu', 'cuda', 'cuda:0' or 'virtual:T4'")
    import torch

    count = torch.cuda.device_count() if match[1] != "cpu" and torch.cuda.is_available() else 0
    if match[1] == "cpu" or (match[1] == "auto" and count == 0):
        return torch.device("cpu")
    index = int(match[2] or 0)
    if index >= count:
        seen = f"torch sees {count} CUDA GPU{'s' if count != 1 else ''} here"
        raise ValueError(f"{named} {text!r}: {seen}; write 'auto' to take what there is, or 'cpu'")
    return torch.device("cuda", index)


def _seed(value: object, named: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{named} {value!r}: write a whole number from 0 to 2^63 - 1")
    return value


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        import torch

        card = torch.cuda.get_device_properties(device)
        older = "; older than Ampere: bf16 only emulated, no FlashAttention-2" if _lacks_bf16(device) else ""
        return f"{card.name} ({units.format_bytes(card.total_memory)} as CUDA reports it{older})"
    cores, memory = _cores(), _memory()
    text = f"{cores} CPU core{'s' if cores != 1 else ''}"
    return f"{text}, {units.format_bytes(memory)} of RAM" if memory else text


def _cores() -> int:
    """Cores that this process may use: the affinity mask, then a container's quota (cgroup v2)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    quota, _, period = _cgroup("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def _memory() -> int | None:
    """Bytes of RAM that this process may use, or None where the system doesn't say (Windows)."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limit = _cgroup("memory.max")
    return min(memory, int(limit)) if limit.isdigit() else memory


def _cgroup(file: str) -> str:
    try:
        return (Path("/sys/fs/cgroup") / file).read_text().strip()
    except OSError:
        return ""


def _display(bundle: dict[str, Any]) -> None:
    """Show a MIME bundle in a notebook; elsewhere print its plain text. IPython isn't needed."""
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(bundle["text/plain"])
    else:
        importlib.import_module("IPython.display").display(bundle, raw=True)
