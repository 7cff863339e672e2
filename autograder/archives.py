"""Reads folders, zips and tarballs within limits, in memory: nothing is unpacked, no link is followed.

Every fault belongs to one file or one archive and is said of it alone. An archive may lie in a folder, or in
the archive of a whole class; an archive inside a student's archive isn't opened.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import inspect
import io
import json
import lzma
import os
import re
import stat
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from time import mktime
from typing import IO, Any

from memlab.units import GIB, MIB, format_bytes

#: A notebook with all its figures is below 5 MiB; what is larger than `EAGER` is read by a child process.
MAX_NOTEBOOK = 128 * MIB
EAGER = 8 * MIB
_SMALL = MIB // 4
#: What remains of a large notebook without its outputs.
MAX_TEXT = 16 * MIB
MAX_FILES = 2_000
#: An archive on disk, all that is read out of one student's, one in another archive, all of a class's.
MAX_ARCHIVE = 4 * GIB
MAX_UNPACKED = 512 * MIB
MAX_INNER = 64 * MIB
MAX_CLASS = 64 * GIB
#: A zip's table of contents is read at once: about 150 bytes of memory for each of its bytes.
_MAX_DIRECTORY = 16 * MIB
_MAX_PATH = 1_000

#: What damaged, encrypted or exotic archives raise.
UNPACK_ERRORS = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError,
    EOFError, OSError, ValueError, struct.error, OverflowError, MemoryError,
)  # fmt: skip

_ZIP, _TAR = (".zip",), (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tbz", ".tar.xz", ".txz")
_REFUSED = (".7z", ".rar", ".gz", ".bz2", ".xz", ".zst", ".lha", ".cab", ".dmg", ".iso")


@dataclass(frozen=True)
class Entry:
    """One file (or empty folder) of a folder or an archive.

    `data` is read of notebooks and archives only; `fault` says why one couldn't be; `note` says what was left
    out of it. `modified` is in seconds since 1970, and `time_from` says whose word that is.
    """

    path: PurePosixPath
    modified: float = 0
    time_from: str = ""
    data: bytes = b""
    fault: str = ""
    note: str = ""
    folder: bool = False


class Limit(ValueError):
    """An archive that holds more than may be read."""


def suffix(name: str) -> str:
    """The archive suffix of a file name, in lower case and with both parts of '.tar.gz'; '' for any other."""
    lower = name.lower()
    return next(
        (s for s in sorted((*_ZIP, *_TAR, *_REFUSED), key=len, reverse=True) if lower.endswith(s)), ""
    )


def stem(name: str) -> str:
    """The name without its archive suffix."""
    return name[: len(name) - len(suffix(name))]


def is_notebook(path: PurePosixPath) -> bool:
    """By its name; browsers add .json or .txt to what they save."""
    return path.name.lower().endswith((".ipynb", ".ipynb.json", ".ipynb.txt")) and not is_hidden(path)


def is_hidden(path: PurePosixPath) -> bool:
    """Checkpoints, resource forks and the like: never a submission."""
    return any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in path.parts)


def _is_read(path: PurePosixPath) -> bool:
    return is_notebook(path) or (bool(suffix(path.name)) and not is_hidden(path))


# -- folders -----------------------------------------------------------------------------------------------


def in_folder(folder: Path) -> Iterator[Entry]:
    """The files below a folder, in order of their names."""
    number = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        odd = [f for f in folders if Path(root, f).is_symlink() or _is_read(PurePosixPath(f))]
        for name in sorted([*names, *odd]):
            path = Path(root, name)
            inner = PurePosixPath(path.relative_to(folder).as_posix())
            if is_hidden(inner):
                continue
            number += 1
            if number > MAX_FILES:
                yield Entry(inner, fault=f"more than {MAX_FILES:,} files; this one and the rest weren't read")
                return
            yield read_file(path, inner)


def read_file(path: Path, inner: PurePosixPath) -> Entry:
    """One file on disk, as an entry with the path `inner`."""
    try:
        about = path.lstat()
        entry = Entry(inner, about.st_mtime, "the file's time")
        if stat.S_ISLNK(about.st_mode):
            return _faulty(entry, "a link; links aren't followed")
        if not _is_read(inner):
            return entry
        if not stat.S_ISREG(about.st_mode):
            return _faulty(entry, "not a file, though its name says so")
        if about.st_size > (MAX_NOTEBOOK if is_notebook(inner) else MAX_UNPACKED):
            return _faulty(
                entry, too_large(about.st_size, MAX_NOTEBOOK if is_notebook(inner) else MAX_UNPACKED)
            )
        return _slim(entry, path.read_bytes())
    except OSError as error:
        return Entry(inner, fault=f"can't be read: {error.strerror}")


def _faulty(entry: Entry, fault: str) -> Entry:
    return Entry(entry.path, entry.modified, entry.time_from, fault=fault)


def too_large(size: int, limit: int = MAX_NOTEBOOK) -> str:
    return f"larger than {format_bytes(limit)} ({format_bytes(size)} or more)"


# -- archives ----------------------------------------------------------------------------------------------


def in_archive(
    stream: IO[bytes], name: str, limit: int = MAX_UNPACKED, files: int = MAX_FILES
) -> Iterator[Entry]:
    """The files of an archive. Raises one of UNPACK_ERRORS, with what is wrong, wherever it can't go on.

    What the first bytes say counts, not the suffix: many a "zip" is a tarball, or a web page.
    """
    end = suffix(name)
    stream.seek(0)
    head = stream.read(264 + 8)
    stream.seek(0)
    if not head:
        raise ValueError("the file is empty")
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        yield from _in_zip(stream, limit, files)
    elif head[:2] == b"\x1f\x8b":
        yield from _in_tar(gzip.GzipFile(fileobj=stream), limit, files)
    elif head[:3] == b"BZh":
        yield from _in_tar(bz2.BZ2File(stream), limit, files)
    elif head[:6] == b"\xfd7zXZ\x00":
        yield from _in_tar(lzma.LZMAFile(stream), limit, files)  # noqa: SIM115
    elif head[257:262] == b"ustar" or end == ".tar":
        yield from _in_tar(stream, limit, files)
    elif head[:6] == b"7z\xbc\xaf\x27\x1c" or head[:4] == b"Rar!" or end in _REFUSED:
        raise ValueError(f"{end or 'such'} archives aren't read here: make it a zip or a .tar.gz")
    elif end == ".zip":
        yield from _in_zip(stream, limit, files)  # an executable archive has its mark at the end
    else:
        raise ValueError("not an archive, though its name says so")


def _in_zip(stream: IO[bytes], limit: int, files: int) -> Iterator[Entry]:
    end: Any = zipfile._EndRecData(stream)  # type: ignore[attr-defined]
    if end and end[5] > _MAX_DIRECTORY:
        raise Limit(f"its table of contents is larger than {format_bytes(_MAX_DIRECTORY)}")
    with zipfile.ZipFile(stream) as archive:
        left = limit
        for number, info in enumerate(archive.infolist()):
            if number >= files:
                raise Limit(f"more than {files:,} files; the rest weren't read")
            path = PurePosixPath(_zip_name(info))
            try:
                modified = mktime((*info.date_time, 0, 0, -1))
            except (OverflowError, ValueError):
                modified = 0.0
            entry = Entry(path, modified, "the zip's entry, local time", folder=info.is_dir())
            if entry.folder or not _is_read(path):
                yield entry if len(str(path)) <= _MAX_PATH else _faulty(entry, "its path is too long")
                continue
            if stat.S_ISLNK(info.external_attr >> 16):
                yield _faulty(entry, "a link; links aren't followed")
                continue
            if info.flag_bits & 1:
                yield _faulty(entry, "encrypted: it has to be handed in without a password")
                continue
            try:
                with archive.open(info) as member:  # the declared size isn't believed
                    found = _member(entry, member, left)
            except UNPACK_ERRORS as error:
                found = _faulty(entry, f"can't be unpacked: {one_line(error)}")
            left -= max(info.file_size, len(found.data))
            if left < 0:
                raise Limit(f"more than {format_bytes(limit)} when unpacked; the rest wasn't read")
            yield found


def _zip_name(info: zipfile.ZipInfo) -> str:
    """The name, which many programs write in UTF-8 without saying so."""
    name = info.filename
    if not info.flag_bits & 0x800:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/")


def _in_tar(stream: Any, limit: int, files: int) -> Iterator[Entry]:
    counted = _Counted(stream, limit)
    with tarfile.open(fileobj=counted, mode="r|") as archive:
        for number, info in enumerate(archive):
            if number >= files:
                raise Limit(f"more than {files:,} files; the rest weren't read")
            path = PurePosixPath(info.name)
            entry = Entry(path, float(info.mtime), "the tarball's entry", folder=info.isdir())
            if len(str(path)) > _MAX_PATH:
                yield _faulty(entry, "its path is too long")
            elif info.issym() or info.islnk():
                yield _faulty(entry, "a link; links aren't followed")
            elif not info.isfile() or not _is_read(path):
                yield entry
            else:
                member = archive.extractfile(info)
                assert member is not None
                yield _member(entry, member, limit)


class _Counted(io.RawIOBase):
    """A stream of bytes that ends in Limit: decompressing must not go on for ever."""

    def __init__(self, stream: Any, limit: int) -> None:
        self._stream, self._left, self._limit = stream, limit, limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise Limit(f"more than {format_bytes(self._limit)} when unpacked; the rest wasn't read")
        return data


def _member(entry: Entry, member: IO[bytes], left: int) -> Entry:
    most = MAX_NOTEBOOK if is_notebook(entry.path) else MAX_INNER
    data = member.read(min(most, max(left, 0)) + 1)
    if len(data) > most:
        return _faulty(entry, too_large(len(data), most))
    return _slim(entry, data)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:160]
    return text or type(error).__name__


# -- large notebooks ---------------------------------------------------------------------------------------


def without_outputs(text: str) -> str:
    """A notebook's JSON without outputs, attachments and widgets' state. Raises what odd JSON raises."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if isinstance(cell, dict):
            cell.pop("outputs", None)
            cell.pop("attachments", None)
    notebook.get("metadata", {}).pop("widgets", None)
    return json.dumps(notebook)


#: The same in a process of its own, with 2 GiB of address space.
_IN_A_CHILD = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
{inspect.getsource(without_outputs)}
sys.stdout.write(without_outputs(sys.stdin.buffer.read().decode("utf-8-sig")))
"""


def _slim(entry: Entry, data: bytes) -> Entry:
    """The entry with its content; a notebook of some size without its outputs, which grading makes anew.

    A large one is read by a child process with little memory, for JSON can need 30 times its size.
    """
    found = Entry(entry.path, entry.modified, entry.time_from, data)
    if len(data) <= _SMALL or not is_notebook(entry.path):
        return found
    if len(data) <= EAGER:
        try:
            return replace(found, data=without_outputs(data.decode("utf-8-sig")).encode())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return found  # the doctor says what is wrong with it
    command = [sys.executable, "-I", "-S", "-c", _IN_A_CHILD]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return _faulty(entry, f"{format_bytes(len(data))} that can't be read within a minute")
    if done.returncode or len(done.stdout) > MAX_TEXT:
        room = format_bytes(MAX_TEXT)
        return _faulty(entry, f"{format_bytes(len(data))}, and no notebook below {room} without its outputs")
    note = f"its outputs ({format_bytes(len(data) - len(done.stdout))}) were left out"
    return replace(found, data=done.stdout, note=note)


def readable(text: str) -> str:
    """A file name as text that can be written anywhere: one line, in valid Unicode."""
    plain = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    plain = re.sub(r"[\x00-\x1f\x7f\u202a-\u202e\u2066-\u2069]+", " ", plain)
    return " ".join(plain.split())[:200] or "student"
