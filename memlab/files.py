"""Files written whole or not at all, and read up to a limit."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from pathlib import Path

from memlab.units import format_bytes


def read_up_to(path: str | os.PathLike[str], most: int) -> bytes:
    """What `path` holds. Raises ValueError, naming it, beyond `most` bytes: a device never ends."""
    with Path(path).open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {format_bytes(most)}")
    return data


def unpack_up_to(path: str | os.PathLike[str], most: int) -> bytes:
    """What the gzip-compressed `path` holds, unpacked. Raises as `read_up_to`, ValueError also for damage."""
    try:
        with gzip.open(path) as packed:
            data = packed.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged: {error}") from None
    if len(data) > most:
        raise ValueError(f"{path} unpacks to more than {format_bytes(most)}")
    return data


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data`, text as UTF-8, to a temporary name beside `path` and rename it into place.

    A reader finds the old file or the new one, never a part, also after a kill. Its mode is any new file's. A
    link stays, and what it leads to is replaced. Raises ValueError for a folder, a device or a pipe, which a
    rename would put a file in place of, OSError where the folder isn't there or can't be written.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"{path or 'an empty name'} isn't a regular file: choose a file's name to write to")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".part")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
