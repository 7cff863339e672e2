"""Damages notebooks at random and looks at what the doctor makes of them.

    python -m tests.submissions.fuzz 20000 --seed 0 --keep /tmp/faults

Every code cell of the submission carries a mark. Whatever the damage, the doctor answers within seconds, with
`Unreadable` and one line, or with a notebook in which every cell of code that can still be read in the
file stands as it stood there, and every check is the release's.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from autograder.evidence import is_check
from memlab import doctor
from memlab.doctor import Unreadable, read
from tests.autograder.small_course import small_course, solved, untouched
from tests.submissions.case import CHAPTER

#: Processor seconds within which a notebook of a hundred cells must be mended.
PATIENCE = 10

_MARK = re.compile(r"# mark \d+\b")

Json = Any
Cells = list[Any]


def base() -> tuple[Json, Any]:
    """A marked submission as JSON data, and the release."""
    with tempfile.TemporaryDirectory() as folder:
        [chapter] = small_course(Path(folder), CHAPTER)
        notebook, release = solved(chapter), untouched(chapter)
    for index in (2, 5):
        notebook.cells.insert(index, nbformat.v4.new_code_cell(f"helper{index} = {index}", id=f"own{index}"))
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and not is_check(cell):
            cell.source += f"\n# mark {number}"
    return json.loads(nbformat.writes(notebook)), release


# -- damage ------------------------------------------------------------------------------------------------


def _junk(rng: random.Random, depth: int = 2) -> Json:
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [_junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {
            rng.choice(["a", "id", "nbgrader", "source", ""]): _junk(rng, depth - 1)
            for _ in range(rng.randrange(4))
        }
    return [None, True, -1, 1e308, "x" * rng.randrange(50), "", "\ud800\x00\u202e"][kind]


def _cells(notebook: Json) -> Cells:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    return cells if isinstance(cells, list) else []


def _one(notebook: Json, rng: random.Random) -> Json:
    found = [cell for cell in _cells(notebook) if isinstance(cell, dict)]
    return rng.choice(found) if found else {}


def _text(cell: Json) -> str:
    source = cell.get("source", "") if isinstance(cell, dict) else ""
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _delete(notebook: Json, rng: random.Random) -> None:
    if cells := _cells(notebook):
        del cells[rng.randrange(len(cells))]


def _delete_many(notebook: Json, rng: random.Random) -> None:
    _cells(notebook)[:] = [cell for cell in _cells(notebook) if rng.random() < 0.5]


def _double(notebook: Json, rng: random.Random) -> None:
    if cells := _cells(notebook):
        cells.insert(rng.randrange(len(cells) + 1), copy.deepcopy(rng.choice(cells)))


def _move(notebook: Json, rng: random.Random) -> None:
    if cells := _cells(notebook):
        cells.insert(rng.randrange(len(cells)), cells.pop(rng.randrange(len(cells))))


def _shuffle(notebook: Json, rng: random.Random) -> None:
    rng.shuffle(_cells(notebook))


def _split(notebook: Json, rng: random.Random) -> None:
    cell = _one(notebook, rng)
    lines = _lines(_text(cell))
    if len(lines) > 1:
        at = rng.randrange(1, len(lines))
        index = next(i for i, c in enumerate(_cells(notebook)) if c is cell)
        cell["source"] = "".join(lines[:at])
        rest = {**copy.deepcopy(cell), "source": lines[at:]}
        rest.pop("id", None)
        if rng.random() < 0.7:
            rest["metadata"] = {}
        _cells(notebook).insert(index + 1, rest)


def _merge(notebook: Json, rng: random.Random) -> None:
    cells = _cells(notebook)
    if len(cells) > 1:
        at = rng.randrange(len(cells) - 1)
        a, b = cells[at], cells[at + 1]
        if isinstance(a, dict) and isinstance(b, dict) and a.get("cell_type") == b.get("cell_type"):
            a["source"] = _text(a) + "\n" + _text(b)
            del cells[at + 1]


def _retype(notebook: Json, rng: random.Random) -> None:
    _one(notebook, rng)["cell_type"] = rng.choice(["code", "markdown", "raw", "heading", "", None, 3])


def _strip(notebook: Json, rng: random.Random) -> None:
    for number, cell in enumerate(_cells(notebook)):
        if isinstance(cell, dict):
            cell["metadata"] = {}
            if rng.random() < 0.5:
                cell["id"] = f"c{number}"
            else:
                cell.pop("id", None)


def _lose_metadata(notebook: Json, rng: random.Random) -> None:
    _one(notebook, rng)["metadata"] = rng.choice([{}, None, [], 7])


def _swap(notebook: Json, rng: random.Random) -> None:
    """Two cells exchange what names them."""
    a, b = _one(notebook, rng), _one(notebook, rng)
    for key in rng.choice([("id",), ("metadata",), ("id", "metadata")]):
        a[key], b[key] = b.get(key), a.get(key)


def _same_id(notebook: Json, rng: random.Random) -> None:
    _one(notebook, rng)["id"] = _one(notebook, rng).get("id")


def _nbgrader(notebook: Json, rng: random.Random) -> None:
    cell = _one(notebook, rng)
    metadata = cell.get("metadata")
    found = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if isinstance(found, dict) and found:
        key = rng.choice(sorted(found))
        found[key] = rng.choice([_junk(rng), not found[key], "check-1-1", "ex-1-2"])


def _key(notebook: Json, rng: random.Random) -> None:
    """Any key of any cell or of the notebook gets another value, or goes."""
    target = rng.choice([notebook, _one(notebook, rng)])
    keys = [key for key in target if key not in ("cells", "source")] if isinstance(target, dict) else []
    if keys:
        key = rng.choice(keys)
        if rng.random() < 0.3:
            del target[key]
        else:
            target[key] = _junk(rng)


def _junk_cell(notebook: Json, rng: random.Random) -> None:
    cells = _cells(notebook)
    cells.insert(rng.randrange(len(cells) + 1), _junk(rng, 3))


def _source_form(notebook: Json, rng: random.Random) -> None:
    cell = _one(notebook, rng)
    text = _text(cell)
    cell["source"] = rng.choice([text, _lines(text), list(text), [text, None], [text]])


def _line_ends(notebook: Json, rng: random.Random) -> None:
    cell = _one(notebook, rng)
    cell["source"] = _text(cell).replace("\n", rng.choice(["\r\n", "\r", "\n\n"]))


def _lose_comment(notebook: Json, rng: random.Random) -> None:
    cell = _one(notebook, rng)
    cell["source"] = re.sub(r"(?m)^\s*# exercise.*\n?", "", _text(cell))


def _foreign(notebook: Json, rng: random.Random) -> None:
    """A line of somebody's in some cell."""
    cell = _one(notebook, rng)
    line = rng.choice(
        [
            "# exercise 1.2",
            'memlab.check("1.3", x)',
            "def bandwidth(): pass",
            "%%bash",
            "<<<<<<< HEAD",
            "\x00",
        ]
    )
    lines = _lines(_text(cell))
    lines.insert(rng.randrange(len(lines) + 1), line + "\n")
    cell["source"] = "".join(lines)


def _outputs(notebook: Json, rng: random.Random) -> None:
    _one(notebook, rng)["outputs"] = rng.choice([_junk(rng, 3), [_junk(rng, 3)] * 3])


def _format(notebook: Json, rng: random.Random) -> None:
    notebook["nbformat_minor"] = rng.choice([0, 2, 5, 9, "5", None])
    if rng.random() < 0.2:
        notebook["nbformat"] = rng.choice([3, 4.0, "4", 5, None, True])


DAMAGE: tuple[Callable[[Json, random.Random], None], ...] = (
    _delete, _delete_many, _double, _move, _shuffle, _split, _merge, _retype, _strip, _lose_metadata,
    _swap, _same_id, _nbgrader, _key, _junk_cell, _source_form, _line_ends, _lose_comment, _foreign,
    _outputs, _format,
)  # fmt: skip


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Damage that knows nothing of JSON."""
    kind, at = rng.randrange(6), rng.randrange(len(data) or 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randrange(8)) + data[at:]
    if kind == 3:
        end = rng.randrange(at, min(len(data), at + 400) + 1)
        return data[:at] + data[end:]
    if kind == 4:
        end = rng.randrange(at, min(len(data), at + 400) + 1)
        return data[:end] + data[at:end] * rng.randrange(1, 4) + data[end:]
    return rng.choice(
        [data + data, b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), data + b"\x00" * 9, data[::-1]]
    )


def damaged(notebook: Json, rng: random.Random) -> tuple[bytes, list[str]]:
    """A file, and what was done to it."""
    broken, done = copy.deepcopy(notebook), []
    for _ in range(rng.choice([1, 1, 2, 3, 5, 8])):
        damage = rng.choice(DAMAGE)
        damage(broken, rng)
        done.append(damage.__name__.strip("_"))
    data = json.dumps(broken, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        data = _bytes(data, rng)
        done.append("bytes")
    return data, done


# -- looking -----------------------------------------------------------------------------------------------


class Hang(Exception):
    """The doctor used too much processor time."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def repair(notebook: Any, release: Any) -> tuple[Any, list[str]]:
    fixed, repairs = doctor.repair(notebook, release)
    return nbformat.from_dict(fixed), repairs


def fault(data: bytes, release: Any) -> str:
    """What is wrong with the doctor's answer; '' where nothing is."""
    try:
        with patience(PATIENCE):
            fixed, repairs = repair(read(data), release)
            again, said_again = repair(read(data), release)
    except Unreadable as error:
        return (
            ""
            if str(error) and "\n" not in str(error) and len(str(error)) < 500
            else f"says {str(error)[:200]!r}"
        )
    except Hang as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    try:
        text = nbformat.writes(fixed)
        nbformat.validate(fixed)
        text.encode("utf-8")
    except Exception as error:
        return f"makes no valid notebook: {type(error).__name__}: {str(error)[:200]}"
    if text != nbformat.writes(again) or repairs != said_again:
        return "says another thing the second time"
    if any("\n" in line for line in repairs):
        return "a repair on two lines"
    return _checks(fixed, release) or _lost(data, fixed)


def _checks(fixed: Any, release: Any) -> str:
    wanted = {c.id: (c.source, c.metadata.get("nbgrader")) for c in release.cells if is_check(c)}
    found = {c.id: (c.source, c.metadata.get("nbgrader")) for c in fixed.cells if is_check(c)}
    return "" if found == wanted else f"the checks are {sorted(found)}"


def _lost(data: bytes, fixed: Any) -> str:
    """Code with a mark that can be read in the file, and doesn't stand in the result as it stood there."""
    submitted = _as_json(data)
    kept = "\n\0\n".join(_plain(c.source) for c in fixed.cells if c.cell_type == "code")
    everything = "\n\0\n".join(_plain(c.source) for c in fixed.cells)
    for cell in _cells(submitted):
        text = _plain(_text(cell))
        if not _MARK.search(text) or not isinstance(cell, dict):
            continue
        if cell.get("cell_type") != "code" and "# exercise" not in text:
            continue  # a helper that was made a text is a text
        # a heading of format 3, and what took a written answer's id, is kept as text, and that is told
        as_text = cell.get("cell_type") == "heading" or str(cell.get("id", "")).startswith("written-")
        if text.strip() and text.strip() not in (everything if as_text else kept):
            return f"changed or lost: {text[:120]!r}"
    return ""


def _plain(text: str) -> str:
    """As the doctor may save it: half characters become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _as_json(data: bytes) -> Json:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return json.loads(data.decode(encoding))
    except (ValueError, RecursionError):
        return None


def campaign(number: int, seed: int, keep: Path | None = None) -> tuple[list[str], Counter[str]]:
    """`number` damaged notebooks: the faults, and how many were mended or refused."""
    notebook, release = base()
    faults: list[str] = []
    counts: Counter[str] = Counter()
    for n in range(number):
        data, done = damaged(notebook, random.Random(f"{seed} {n}"))
        found = fault(data, release)
        counts["wrong" if found else "right"] += 1
        if found:
            faults.append(f"{n} ({', '.join(done)}): {found}")
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{seed}-{n}.ipynb").write_bytes(data)
    return faults, counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Damages notebooks at random; prints what the doctor does wrong."
    )
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the notebooks that show a fault")
    options = parser.parse_args()
    began = time.process_time()
    faults, counts = campaign(options.number, options.seed, options.keep)
    for line in faults[:50]:
        print(line)
    rate = options.number / max(time.process_time() - began, 1e-9)
    print(f"{options.number:,} notebooks, {counts['wrong']} faults, {rate:.0f} per second of processor time")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
