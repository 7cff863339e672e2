"""Puts a submitted notebook back into a form that can be graded, without touching the student's answers.

The release decides what is graded: its order, its checks, its prose and nbgrader's metadata are restored. A
cell of the submission is recognised by its id, by nbgrader's grade id, by the comment `# exercise 2.1` or the
call `memlab.check("2.1"`, by the functions that the exercise asks for, or by unchanged text. Code that the
student wrote or changed is kept: in an exercise cell, in a plain cell, in a cell that the student added.
Every repair is one line; what can't be repaired raises `Unreadable`.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from typing import Any

import nbformat

_EXERCISE_COMMENT = re.compile(r"^\s*#\s*exercise\s+(\d+\.\d+)\b", re.MULTILINE | re.IGNORECASE)
_DEFINES = re.compile(r"^(?:def|class)\s+(\w+)", re.MULTILINE)
_CHECK_CALL = re.compile(r"""\bcheck\(\s*["'](\d+\.\d+)["']""")


class Unreadable(Exception):
    """A submission that no repair can turn into a notebook: one line says why."""


def read(data: bytes) -> Any:
    """The notebook in `data`, in format 4. Raises Unreadable."""
    if not data.strip():
        raise Unreadable("the file is empty")
    text = _decode(data)
    try:
        content = json.loads(text)
    except RecursionError:
        raise Unreadable("not a notebook: nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"not a notebook: broken JSON ({str(error)[:80]})") from None
    if not isinstance(content, dict) or not any(
        isinstance(content.get(name), list) for name in ("cells", "worksheets")
    ):
        raise Unreadable("not a notebook: there are no cells in it")
    version = content.get("nbformat")
    if not (isinstance(version, int) and 1 <= version <= 4):
        raise Unreadable(
            f"notebook format {str(version)[:20]} isn't known: save it again in Jupyter or Colab"
        )
    try:
        notebook: Any = nbformat.from_dict(content)  # type: ignore[no-untyped-call]
        if version != 4:
            notebook = nbformat.convert(notebook, 4)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise Unreadable(
            f"not a notebook that can be read ({type(error).__name__}: {str(error)[:80]})"
        ) from None
    return notebook


def _decode(data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return data.decode("latin-1")  # every byte is a character there


def answered(notebook: Any) -> int:
    """How many exercise cells hold more than the stub: to choose between two files of equal age."""
    sources = [_source(cell) for cell in notebook.get("cells", []) if isinstance(cell, dict)]
    return sum(1 for s in sources if _EXERCISE_COMMENT.search(s) and "raise NotImplementedError(" not in s)


def repair(submitted: Any, release: Any) -> tuple[Any, list[str]]:
    """The notebook to grade, made of `release` and the student's code, and a line for each repair.

    Raises Unreadable when not one exercise of the release is in the submission.
    """
    by_key = _keys(release)
    slots: dict[int, Any] = {}
    added: dict[int, list[Any]] = defaultdict(list)  # after which cell of the release the student added it
    repairs: list[str] = []
    last = -1
    order: list[int] = []
    for cell in submitted.get("cells", []):
        if not isinstance(cell, dict):
            continue
        index = _recognise(cell, by_key)
        if index is None or index in slots:
            if index is not None and _source(cell).strip() != _source(slots[index]).strip():
                repairs.append(f'cell "{release.cells[index].id}" is there twice: the first counts, both run')
            if index is None or _source(cell).strip() != _source(slots[index]).strip():
                added[last].append(_plain(cell))
            continue
        slots[index] = cell
        order.append(index)
        last = index
    if not any(release.cells[index].metadata.get("memlab", {}).get("exercise") for index in slots):
        raise Unreadable("no exercise of this chapter is in it: is it the notebook of another chapter?")
    _find_written(release, slots, added, repairs)
    if order != sorted(order):
        repairs.append("cells were moved: put back in the order of the chapter")
    cells = list(added[-1])
    for index, original in enumerate(release.cells):
        cells.append(_merged(original, slots.get(index), repairs))
        cells.extend(added[index])
    for number, cell in enumerate(own for group in added.values() for own in group):
        cell.id = f"added-{number}"  # not random: the same submission gives the same notebook again
    notebook = copy.deepcopy(release)
    notebook.cells = cells
    return notebook, repairs


def _find_written(
    release: Any, slots: dict[int, Any], added: dict[int, list[Any]], repairs: list[str]
) -> None:
    """A written answer without any mark: the text that stands where the answer belongs."""
    for index, cell in enumerate(release.cells):
        if cell.cell_type != "markdown" or not cell.metadata.get("nbgrader") or index in slots:
            continue
        before = max((i for i in slots if i < index), default=-1)
        texts = [own for own in added[before] if own.cell_type == "markdown" and own.source.strip()]
        if texts and before == index - 1:
            slots[index] = {"source": "\n\n".join(own.source for own in texts), "cell_type": "markdown"}
            added[before] = [own for own in added[before] if own not in texts]
            repairs.append(f'the text after cell "{release.cells[before].id}" is taken as "{cell.id}"')


def _keys(release: Any) -> dict[tuple[str, str], int]:
    """What a cell of the release can be recognised by -> its index."""
    keys: dict[tuple[str, str], int] = {}
    for index, cell in enumerate(release.cells):
        keys["id", cell.id] = index
        keys.setdefault(("text", cell.source.strip()), index)
        number = cell.metadata.get("memlab", {}).get("exercise")
        if number and cell.cell_type == "code":
            if cell.metadata.nbgrader.grade:
                keys["check", number] = index
            else:
                keys.setdefault(("exercise", number), index)
                for name in _DEFINES.findall(cell.source):
                    keys.setdefault(("defines", name), index)
    return keys


def _recognise(cell: Any, keys: dict[tuple[str, str], int]) -> int | None:
    """The index of the cell of the release that this one is, or None."""
    source = _source(cell)
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    tries: list[tuple[str, Any]] = [
        ("id", cell.get("id")),
        ("id", nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None),
        ("id", metadata.get("id") if isinstance(metadata, dict) else None),  # where Colab keeps it
        *(("check", number) for number in _CHECK_CALL.findall(source)[:1]),
        *(("exercise", number) for number in _EXERCISE_COMMENT.findall(source)[:1]),
        *(("defines", name) for name in _DEFINES.findall(source)),
        ("text", source.strip()),
    ]
    for kind, name in tries:
        if isinstance(name, str) and (kind, name) in keys:
            return keys[kind, name]
    return None


def _merged(original: Any, own: Any, repairs: list[str]) -> Any:
    """The cell of the release with the student's code in it, where there is any."""
    cell = copy.deepcopy(original)
    nbgrader = cell.metadata.get("nbgrader", {})
    if own is None:
        lost = nbgrader.get("solution")
        repairs.append(f'cell "{cell.id}" is missing: ' + ("counted as not written" if lost else "put back"))
    elif nbgrader.get("locked"):
        if _source(own).strip() != cell.source.strip():
            repairs.append(f'check cell "{cell.id}" was changed: put back')
    elif nbgrader.get("solution") or (cell.cell_type == "code" and own.get("cell_type") == "code"):
        cell.source = _source(own)
        if own.get("cell_type") != cell.cell_type:
            repairs.append(f'cell "{cell.id}" had become {own.get("cell_type")}: made {cell.cell_type} again')
    return cell


def _plain(cell: Any) -> Any:
    """A cell that the student added: its source and nothing else."""
    make: Any = (
        nbformat.v4.new_code_cell if cell.get("cell_type") == "code" else nbformat.v4.new_markdown_cell
    )
    return make(source=_source(cell))


def _source(cell: Any) -> str:
    """A cell's text; half a character (a lone surrogate) can't be saved and becomes a question mark."""
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    return source.encode("utf-8", "replace").decode("utf-8") if isinstance(source, str) else ""
