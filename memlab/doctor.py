"""Mends a damaged notebook of a chapter by what its release knows, and never touches the student's answers.

The release decides the order, the checks, the prose and the grading metadata: they are restored. A cell of
the submission is recognised by its id, by nbgrader's grade id, by the comment `# exercise 2.1`, by the
functions that the exercise asks for, by the call `memlab.check("2.1"`, by unchanged text, and what is left by
its place between recognised neighbours. Code that the student wrote or changed is kept, wherever it stands.
Every repair is one line; what can't be repaired raises `Unreadable`.

Notebooks are plain dicts, as JSON gives them: this file needs the standard library alone.
"""

from __future__ import annotations

import ast
import copy
import difflib
import json
import re
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

_EXERCISE_COMMENT = re.compile(r"(?:^|(?<=\r))\s*#\s*exercise\s+(\d+\.\d+)\b", re.MULTILINE | re.IGNORECASE)
_DEFINES = re.compile(r"(?:^|(?<=\r))(?:async\s+)?(?:def|class)\s+(\w+)", re.MULTILINE)
_CHECK_CALL = re.compile(r"""\bcheck\(\s*["'](\d+\.\d+)["']""")
_OWN_ID = re.compile(r"(?:ex|check)-(\d+)-(\d+)")
_MAGIC = re.compile(r"^(\s*)(?:[%!?]|\w+\?$).*", re.MULTILINE)

#: What a written answer holds before the student writes it.
TEXT_STUB = "*Write your answer here.*"

#: How alike a cell and the exercise's stub must be to belong together by their place; another cell's text.
_ALIKE, _THE_SAME = 0.4, 0.8

Cell = dict[str, Any]
Notebook = dict[str, Any]


class Unreadable(ValueError):
    """A file that no repair can turn into the chapter's notebook: one line says why."""


class OtherChapter(Unreadable):
    """A notebook of another chapter of the course."""


# -- reading -----------------------------------------------------------------------------------------------


def read(data: bytes, said: list[str] | None = None) -> Notebook:
    """The notebook in `data`, with its cells in format 4; a line in `said` for what was odd about the file.

    Raises Unreadable.
    """
    said = [] if said is None else said
    if not data.strip(b" \t\r\n\0"):
        raise Unreadable("the file is empty")
    text = _decode(data, said)
    try:
        content = json.loads(text)
    except RecursionError:
        raise Unreadable("not a notebook: nested too deeply") from None
    except ValueError as error:
        if text.lstrip()[:1] == "<":
            raise Unreadable("not a notebook but a web page: download the file itself") from None
        raise Unreadable(_no_json(data, text, error)) from None
    if not isinstance(content, dict):
        raise Unreadable("not a notebook: there are no cells in it")
    version = content.get("nbformat")
    cells = content.get("cells")
    if not isinstance(cells, list):
        sheets = content.get("worksheets")
        if not isinstance(sheets, list):
            raise Unreadable("not a notebook: there are no cells in it")
        inner = [sheet.get("cells") for sheet in sheets if isinstance(sheet, dict)]
        cells = [cell for sheet in inner if isinstance(sheet, list) for cell in sheet]
        said.append("saved in notebook format 3 or older: read as format 4")
    elif version != 4:
        said.append(f"notebook format {str(version)[:20]!r} isn't known: read as format 4")
    content["cells"] = [_format_4(cell) for cell in cells if isinstance(cell, dict)]
    return content


def _no_json(data: bytes, text: str, error: ValueError) -> str:
    """What a file that isn't JSON is, for who handed it in."""
    kinds = {b"%PDF": "a PDF", b"PK\x03\x04": "a zip archive or an office document", b"\x89PNG": "a picture"}
    for begin, kind in kinds.items():
        if data.lstrip().startswith(begin):
            return f"not a notebook but {kind}: hand in the .ipynb file itself"
    if re.search(r"^<{7} ", text, re.MULTILINE):
        return "not a notebook: git's marks of a conflict (<<<<<<<) are in it: solve it and hand in again"
    at = error.pos if isinstance(error, json.JSONDecodeError) else 0
    cut = "Unterminated string" in str(error) or at >= len(text.rstrip())
    if cut and text.lstrip()[:1] == "{":
        return "the file was cut off in the middle: download or save it again"
    return f"not a notebook: broken JSON ({str(error)[:80]})"


def _decode(data: bytes, said: list[str]) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        said.append("saved in UTF-16: read as such")
        return data.decode("utf-16", "replace")
    if data[:3] == b"\xef\xbb\xbf":
        said.append("the file begins with a byte-order mark: left out")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        said.append("not saved in UTF-8: read as Latin-1")
        return data.decode("latin-1")  # every byte is a character there


def _format_4(cell: Cell) -> Cell:
    """The cell with its text in `source` and one of today's types; its outputs are left behind."""
    text = next((cell[key] for key in ("source", "input", "code", "text") if key in cell), "")
    kind = cell.get("cell_type")
    new = {key: value for key, value in cell.items() if key in ("id", "metadata")}
    new["source"] = _text(text)
    if kind == "heading":
        level = cell.get("level")
        new["source"] = (
            "#" * (level if isinstance(level, int) and 1 <= level <= 6 else 1) + " " + new["source"]
        )
    new["cell_type"] = kind if kind in ("code", "raw") else "markdown"
    return new


def _text(value: Any) -> str:
    """A cell's text; half a character (a lone surrogate) can't be saved and becomes a question mark."""
    if isinstance(value, list):
        value = "".join(part for part in value if isinstance(part, str))
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else ""


def answered(notebook: Notebook) -> int:
    """How many exercise cells hold more than the stub: to choose between two files of equal age."""
    sources = [_text(cell.get("source")) for cell in notebook.get("cells", []) if isinstance(cell, dict)]
    return sum(1 for s in sources if _EXERCISE_COMMENT.search(s) and "raise NotImplementedError(" not in s)


def state(mended: Notebook) -> str:
    """'5 of 6 exercises written, missing: 2.4; the written answer is there'."""
    cells: dict[str, list[str]] = defaultdict(list)
    texts: list[str] = []
    for cell in mended["cells"]:
        nbgrader = _nbgrader(cell)
        if nbgrader.get("solution") and cell["cell_type"] == "code":
            cells[_exercise(cell)].append(cell["source"])
        elif nbgrader.get("solution"):
            texts.append(cell["source"].strip())
    stubs = [n for n, sources in cells.items() if any("raise NotImplementedError" in s for s in sources)]
    line = f"{len(cells) - len(stubs)} of {len(cells)} exercises written"
    if stubs:
        line += f", open: {', '.join(sorted(stubs))}"
    empty = sum(text in ("", TEXT_STUB) for text in texts)
    if texts:
        line += f"; {len(texts) - empty} of {len(texts)} answers in words"
    return line


def broken(mended: Notebook) -> list[str]:
    """A line for each cell that Python can't even read, so that nothing in it will run."""
    lines = []
    for index, cell in enumerate(mended["cells"], 1):
        why = syntax_error(cell["source"]) if cell["cell_type"] == "code" else ""
        if why:
            number = _exercise(cell)
            where = f"the cell of exercise {number}" if number else f"cell {index}"
            lines.append(f"{where} can't run: {why}. Nothing in it counts until you mend it")
    return lines


def syntax_error(source: str) -> str:
    """'SyntaxError in line 3: '(' was never closed', or '' where a kernel can run the cell."""
    if source.lstrip().startswith("%%"):
        return ""
    plain = _MAGIC.sub(r"\1pass", source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(plain, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        return f"{type(error).__name__}{line}: {error.msg}"[:200]
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return ""
    return ""


def to_text(notebook: Notebook) -> str:
    """The bytes of a notebook file, as Jupyter writes them."""
    lines = {**notebook, "cells": [{**c, "source": c["source"].splitlines(True)} for c in notebook["cells"]]}
    return json.dumps(lines, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


# -- which chapter -----------------------------------------------------------------------------------------


def releases() -> dict[str, Path]:
    """Chapter -> its student notebook: those in memlab's package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "notebooks", here.parent / "notebooks"):
        found = {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
        if found:
            return found
    return {}


def chapter_of(notebook: Notebook, filename: str = "") -> str:
    """The chapter of a notebook: by its exercises, and by its file name where they leave it open.

    Raises Unreadable.
    """
    known = releases()
    plain = re.sub(r"[^a-z0-9]+", "_", Path(filename).stem.lower())
    named = next((name for name in known if name in plain), None)
    by_number = {int(name[:2]): name for name in known}
    counts = {number: count for number, count in _exercises_of(notebook).items() if number in by_number}
    if named is not None and not _of_another(counts, int(named[:2])):
        return named
    if not counts:
        raise Unreadable("no exercise of any chapter is in it, and its name names none")
    return by_number[max(counts, key=lambda number: counts[number])]


def _exercises_of(notebook: Notebook) -> dict[int, int]:
    """Chapter number -> how many of its exercises are in the notebook, by any mark that they bear."""
    seen: set[str] = set()
    for cell in notebook["cells"]:
        source, metadata = _text(cell.get("source")), cell.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        nbgrader = metadata.get("nbgrader")
        names = [cell.get("id"), nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None]
        for name in names:
            if isinstance(name, str) and (match := _OWN_ID.fullmatch(name)):
                seen.add(f"{match[1]}.{match[2]}")
        seen.update(_EXERCISE_COMMENT.findall(source), _CHECK_CALL.findall(source))
    return dict(Counter(int(number.partition(".")[0]) for number in seen))


def _of_another(counts: dict[int, int], own: int) -> int:
    """The chapter that a notebook is plainly of, where that isn't chapter `own`; else 0."""
    most = max(counts, key=lambda number: counts[number], default=own)
    return most if counts.get(most, 0) > 2 * counts.get(own, 0) else 0


# -- repairing ---------------------------------------------------------------------------------------------


def repair(submitted: Notebook, release: Notebook) -> tuple[Notebook, list[str]]:
    """The notebook to grade, made of `release` and the student's code, and a line for each repair.

    Raises OtherChapter for a notebook of another chapter, whatever its name, and Unreadable when not one
    exercise of the release is in the submission.
    """
    own = {int(number.partition(".")[0]) for number in map(_exercise, release["cells"]) if number}
    cells = [cell for cell in submitted.get("cells", []) if isinstance(cell, dict)]
    other = _of_another(_exercises_of({"cells": cells}), min(own)) if own else 0
    if other:
        name = next((f" ({name})" for name in releases() if int(name[:2]) == other), "")
        raise OtherChapter(f"this is the notebook of chapter {other}{name}, not of chapter {min(own)}")
    return _Repair(submitted, release).result()


class _Repair:
    def __init__(self, submitted: Notebook, release: Notebook) -> None:
        self.cells: list[Cell] = [
            {**cell, "source": _text(cell.get("source"))}
            for cell in submitted.get("cells", [])
            if isinstance(cell, dict)
        ]
        self.release = release
        self.originals: list[Cell] = release["cells"]
        self.said: list[str] = []
        self.slots: dict[int, Cell] = {}
        #: Cells that the student added, by the recognised cell of the release before them.
        self.added: dict[int, list[Cell]] = defaultdict(list)
        #: Functions and classes that the student's cells define.
        self.defined: set[str] = set()

    def result(self) -> tuple[Notebook, list[str]]:
        self._recognise_all()
        self._align()
        if not any(_exercise(self.originals[index]) for index in self.slots):
            raise Unreadable("no exercise of this chapter is in it: is it the notebook of another chapter?")
        self._find_written()
        self._compare_metadata()
        kept = [*self.slots.values(), *(cell for group in self.added.values() for cell in group)]
        self.defined = {name for cell in kept for name in _DEFINES.findall(cell["source"])}
        cells = [*map(_plain, self.added[-1])]
        for index, original in enumerate(self.originals):
            before, merged, after = self._merged(original, self.slots.get(index))
            cells += [*map(_plain, before), merged, *map(_plain, [*after, *self.added[index]])]
        number = 0
        for cell in cells:
            if "id" not in cell:
                cell["id"] = f"added-{number}"  # not random: the same submission gives the same notebook
                number += 1
        notebook = {**copy.deepcopy({k: v for k, v in self.release.items() if k != "cells"}), "cells": cells}
        return notebook, self.said

    # what a cell is

    def _recognise_all(self) -> None:
        keys = self._keys()
        found: dict[int, list[Cell]] = defaultdict(list)
        indices = [self._recognise(cell, keys) for cell in self.cells]
        for cell, index in zip(self.cells, indices, strict=True):
            if index is not None:
                found[index].append(cell)
        for index, same in found.items():
            untouched, kind = self.originals[index]["source"].strip(), self.originals[index]["cell_type"]
            same.sort(key=lambda cell: cell["cell_type"] != kind)  # of equal texts, code is kept as code
            written = [cell for cell in same if cell["source"].strip() != untouched]
            locked = _nbgrader(self.originals[index]).get("locked")
            self.slots[index] = same[0] if locked or not written else written[0]
            self._say_copies(index, same, len({cell["source"].strip() for cell in written}))
        last = -1
        order = []
        for cell, index in zip(self.cells, indices, strict=True):
            if index is not None and self.slots[index] is cell:
                last = index
                order.append(index)
            elif index is None or not self._says_nothing_new(cell, index):
                if index is not None and _nbgrader(self.originals[index]).get("solution"):
                    cell["cell_type"] = self.originals[index]["cell_type"]
                self.added[last].append(cell)
        if order != sorted(order):
            self.said.append("cells were moved: put back in the order of the chapter")

    def _say_copies(self, index: int, same: list[Cell], written: int) -> None:
        name = self.originals[index].get("id", "?")
        if written > 1:
            self.said.append(f'cell "{name}" is there twice or was split: all its parts run, in their order')
        elif len(same) > 1:
            self.said.append(f'cell "{name}" is there twice: the copy was left out')

    def _says_nothing_new(self, cell: Cell, index: int) -> bool:
        text = cell["source"].strip()
        return text in (self.slots[index]["source"].strip(), self.originals[index]["source"].strip())

    def _keys(self) -> dict[tuple[str, str], int]:
        """What a cell of the release can be recognised by -> its index."""
        keys: dict[tuple[str, str], int] = {}
        for index, cell in enumerate(self.originals):
            keys["id", str(cell.get("id"))] = index
            keys.setdefault(("text", cell["source"].strip()), index)
            number = _exercise(cell)
            if number and cell["cell_type"] == "code":
                if _nbgrader(cell).get("grade"):
                    keys["check", number] = index
                else:
                    keys.setdefault(("exercise", number), index)
                    for name in _DEFINES.findall(cell["source"]):
                        keys.setdefault(("defines", name), index)
        return keys

    def _recognise(self, cell: Cell, keys: dict[tuple[str, str], int]) -> int | None:
        """The index of the cell of the release that this one is, or None."""
        source = cell["source"]
        metadata = cell.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        nbgrader = metadata.get("nbgrader")
        names: list[Any] = [
            cell.get("id"),
            nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None,
            metadata.get("id"),  # where Colab keeps it
        ]
        marks = [
            *(("exercise", number) for number in _EXERCISE_COMMENT.findall(source)),
            *(("defines", name) for name in _DEFINES.findall(source)),
        ]
        marked = [keys[mark] for mark in marks if mark in keys]
        told = marked[0] if marked else None
        exact = keys.get(("text", source.strip()))
        for name in names:
            index = keys.get(("id", name)) if isinstance(name, str) else None
            if index is None:
                continue
            original = self.originals[index]
            if source.strip() == original["source"].strip():
                return index
            if exact is not None:
                return exact  # its id was taken from another cell
            if marked and index not in marked:
                return told  # an exercise that was merged into another cell, or pasted over it
            is_code = original["cell_type"] == "code"
            if not marked and is_code != (cell["cell_type"] == "code") and is_code != _parses(source):
                continue  # another kind of cell, whose text can't be of the kind that was there
            return index
        calls = [("check", number) for number in _CHECK_CALL.findall(source)[:1]]
        by_call = next((keys[call] for call in calls if call in keys), None)
        return next((index for index in (told, by_call, exact) if index is not None), None)

    def _align(self) -> None:
        """Code whose cell bears no mark any more: by the text, among what stands in the same place."""
        for index, original in enumerate(self.originals):
            nbgrader = _nbgrader(original)
            if index in self.slots or original["cell_type"] != "code" or nbgrader.get("locked"):
                continue
            before = max((i for i in self.slots if i < index), default=-1)
            following = min((i for i in self.slots if i > index), default=len(self.originals))
            own = [cell for cell in self.added[before] if cell["source"].strip()]
            if nbgrader:
                own = [cell for cell in own if cell["cell_type"] == "code"]
            rivals = [
                i
                for i in range(before + 1, following)
                if _nbgrader(self.originals[i]).get("solution") and self.originals[i]["cell_type"] == "code"
            ]
            alike = [
                difflib.SequenceMatcher(None, original["source"][:4000], cell["source"][:4000], False).ratio()
                for cell in own[:20]
            ]
            best = max(alike, default=0)
            alone = bool(nbgrader) and len(own) == len(rivals) == 1 and before == index - 1
            if best < (_ALIKE if nbgrader else _THE_SAME) and not alone:
                continue
            chosen = own[alike.index(best)]
            at = next(n for n, cell in enumerate(self.added[before]) if cell is chosen)
            everything = self.added[before]
            self.slots[index] = chosen
            self.added[before], self.added[index] = everything[:at], everything[at + 1 :] + self.added[index]
            name = original.get("id", "?")
            self.said.append(f'a cell without any mark is taken as "{name}": by its text and its place')

    def _find_written(self) -> None:
        """A written answer without any mark: the text that stands where the answer belongs."""
        for index, cell in enumerate(self.originals):
            if cell["cell_type"] != "markdown" or not _nbgrader(cell).get("solution"):
                continue
            own = self.slots.get(index)
            if own is not None and own["source"].strip() not in ("", cell["source"].strip()):
                continue
            before = index if own is not None else max((i for i in self.slots if i < index), default=-1)
            texts = [c for c in self.added[before] if c["cell_type"] != "code" and c["source"].strip()]
            if texts and before >= index - 1:
                self.slots[index] = {
                    "source": "\n\n".join(c["source"] for c in texts),
                    "cell_type": "markdown",
                }
                self.added[before] = [c for c in self.added[before] if all(c is not t for t in texts)]
                name = self.originals[before].get("id", "?")
                self.said.append(f'the text after cell "{name}" is taken as "{cell.get("id", "?")}"')

    def _compare_metadata(self) -> None:
        lost = changed = 0
        for index, own in self.slots.items():
            wanted = _nbgrader(self.originals[index])
            if not wanted or "metadata" not in own:
                continue
            there = own["metadata"].get("nbgrader") if isinstance(own["metadata"], dict) else None
            if not isinstance(there, dict) or not there:
                lost += 1
            elif {**there, "checksum": 0} != {**wanted, "checksum": 0}:
                changed += 1
        for number, what in ((lost, "lost"), (changed, "changed")):
            if number:
                cells = "cell" if number == 1 else "cells"
                self.said.append(f"grading metadata of {number} {cells} was {what}: put back")

    # what becomes of it

    def _merged(self, original: Cell, own: Cell | None) -> tuple[list[Cell], Cell, list[Cell]]:
        """The cell of the release with the student's code in it, and what stands before and after it."""
        cell = copy.deepcopy(original)
        name, nbgrader = cell.get("id", "?"), _nbgrader(cell)
        if own is None:
            names = _DEFINES.findall(cell["source"])
            if names and set(names) <= self.defined:
                cell["source"] = f"# exercise {_exercise(cell)}"  # its stub would undo them
                self.said.append(f'cell "{name}" is missing: its functions are defined in other cells')
            elif nbgrader.get("solution"):
                self.said.append(f'cell "{name}" is missing: counted as not written')
            elif nbgrader or cell["cell_type"] == "code":
                self.said.append(f'cell "{name}" is missing: put back')
            return [], cell, []
        source, kind = own["source"], own["cell_type"]
        same = source.strip() == cell["source"].strip()
        if kind != cell["cell_type"] and (nbgrader or cell["cell_type"] == "code"):
            self.said.append(f'cell "{name}" had become {kind}: made {cell["cell_type"]} again')
        if nbgrader.get("locked"):
            if same:
                return [], cell, []
            self.said.append(f'check cell "{name}" was changed: put back')
            if kind == "code" and _new_lines(source, cell["source"]):
                return [own], cell, []
            return [], cell, []
        is_code = kind == "code" or (cell["cell_type"] == "code" and _parses(source))
        if nbgrader.get("solution") or (cell["cell_type"] == "code" and is_code):
            cell["source"] = source
            return [], cell, []
        if same or not (new := _new_lines(source, cell["source"])):
            return [], cell, []
        # the student wrote into the course's prose, or turned it into code
        if kind == "code":
            return [], cell, [own]
        self.said.append(f'what was written into cell "{name}" is kept below it')
        return [], cell, [{"cell_type": "markdown", "source": new}]


def _exercise(cell: Cell) -> str:
    return str(cell.get("metadata", {}).get("memlab", {}).get("exercise") or "")


def _nbgrader(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = cell.get("metadata", {}).get("nbgrader") or {}
    return found


def _new_lines(source: str, original: str) -> str:
    """The lines of `source` that aren't in `original`."""
    old = {line.strip() for line in original.splitlines()}
    return "\n".join(line for line in source.splitlines() if line.strip() and line.strip() not in old)


def _parses(source: str) -> bool:
    """Whether a text is Python that does something: then it was code before its cell was made a text."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)


def _plain(cell: Cell) -> Cell:
    """A cell that the student added: its source and nothing else."""
    new: Cell = {"cell_type": "markdown", "metadata": {}, "source": cell["source"]}
    if cell["cell_type"] == "code":
        new |= {"cell_type": "code", "execution_count": None, "outputs": []}
    return new
