"""Bytes, element types and the words that every other file uses.

Bytes are integers. KiB, MiB and GiB are powers of 1024; KB, MB and GB are powers of 1000.
Nothing in the library prints a number without one of these units.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

#: The five consumers of GPU memory, in the order in which tables and figures show them.
CONSUMERS = ("parameters", "gradients", "optimizer_states", "activations", "temporaries")

#: The phases of one training step. A peak is the maximum over them.
PHASES = ("forward", "backward", "optimizer")

#: Bytes of one element.
DTYPE_BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

_BINARY = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_DECIMAL = (("TB", TB), ("GB", GB), ("MB", MB), ("KB", KB))
_SCALES = {
    "": 1, "b": 1, "byte": 1, "bytes": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": KB, "mb": MB, "gb": GB, "tb": TB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:[._,][0-9]+)*(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


class UnknownNameError(ValueError):
    """A model, card, link or option name that the library doesn't hold."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that isn't known: says what is near it, else what there is."""
    names = list(known)
    near = difflib.get_close_matches(str(name).lower(), [n.lower() for n in names], n=3, cutoff=0.5)
    by_lower = {n.lower(): n for n in names}
    if near:
        hint = "did you mean " + " or ".join(by_lower[n] for n in near) + "?"
    else:
        hint = "known: " + ", ".join(names)
    return UnknownNameError(f"unknown {kind} {str(name)!r}: {hint}")


def _scaled(n: int, scales: tuple[tuple[str, int], ...]) -> str:
    sign, size = ("-", -n) if n < 0 else ("", n)
    for suffix, scale in scales:
        if size >= scale:
            return f"{sign}{size / scale:,.2f} {suffix}"
    return f"{n} B"


def format_bytes(n: int) -> str:
    """`n` bytes with a binary unit and two decimals: 1610612736 -> '1.50 GiB', 12 -> '12 B'."""
    return _scaled(n, _BINARY)


def format_gb(n: int) -> str:
    """`n` bytes with a decimal unit and two decimals: 85198045184 -> '85.20 GB'."""
    return _scaled(n, _DECIMAL)


def format_count(n: int) -> str:
    """A number of things, three digits or so: 124439808 -> '124.4 M', 68976648192 -> '68.98 B'."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= scale:
            value = n / scale
            return f"{value:.1f} {suffix}" if value >= 100 else f"{value:.2f} {suffix}"
    return str(n)


def parse_bytes(text: str | int) -> int:
    """'80 GB' -> 80000000000, '1.5GiB' -> 1610612736, '512' -> 512 (bytes).

    Raises ValueError, naming the units, for anything else; a size can't be negative.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size can't be negative: {text}")
        return text
    match = _SIZE.fullmatch(str(text))
    scale = _SCALES.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"can't read {str(text)!r} as a size: write for example 512 MiB, 1.5 GiB or 80 GB")
    number = match.group(1).replace("_", "").replace(",", "")
    try:
        return round(float(number) * scale) if not number.isdigit() else int(number) * scale
    except (ValueError, OverflowError):
        raise ValueError(f"can't read {str(text)!r} as a size: write for example 1.5 GiB") from None


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` ('fp32', 'bf16', …). Raises UnknownNameError."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        raise unknown_name("dtype", dtype, DTYPE_BYTES) from None
