'''Chapters: from `solutions/NN_name.py` to nbgrader's source notebooks and to the student's notebooks.

The source format
=================

A chapter is a Python file in jupytext's percent format. Every cell starts with one line of metadata that
gives its `id` and, where it is graded, says for what; nbgrader's own metadata follows from that
(`nbgrader_metadata`), so points, grade ids and locks can't disagree with the checks.

    # %% [markdown] id="title" claims="C2-01 C2-07"     prose; cites rows of claims.json
    # # 2. The four consumers

    # %% id="parameters" tags=["parameters"]             papermill sets these; one plain assignment a line
    device = "auto"
    size = "normal"
    seed = 0

    # %% id="begin"                                      a plain cell: run by everybody, never graded
    import memlab
    lab = memlab.begin("02_four_consumers", device=device, size=size, seed=seed)

    # %% id="ex-2-1" exercise="2.1"                      the student's cell of exercise 2.1
    def states(P, recipe):
        """Bytes of parameters, gradients and optimizer states."""
        # What surrounds the markers is what the student gets.
        ### BEGIN SOLUTION
        return 16 * P
        ### END SOLUTION

    # %% id="check-2-1" check="2.1"                      graded by nbgrader; points from memlab.exercises
    memlab.check("2.1", states)

    # %% [markdown] id="written-2-7" manual="2.7" points=3   graded by hand; the text is the model answer
    # All of it is replaced by a stub for the student. The question and its rubric stand in the cell before.

Keys:

| key | on | means |
|---|---|---|
| `id` | every cell | stable, unique in the chapter, 2 to 64 of a-z 0-9 -; also nbgrader's grade id |
| `exercise="2.1"` | code | the student's cell; id `ex-2-1` (then `ex-2-1-b`); has a solution region |
| `check="2.1"` | code | the graded cell; id `check-2-1`; last line `memlab.check("2.1", …)`; just once |
| `manual="2.7" points=3` | markdown | a written answer, graded by hand; its points are outside the 100 |
| `claims="C2-01 C2-07"` | any | rows of claims.json that the cell treats |
| `tags=["parameters"]` | code | where papermill puts its parameters; exactly one such cell |

Other tags pass through untouched; `tags=["hide-input"]` leaves a cell's code out of `autograder run`'s HTML.

Two things make `autograder run --student` fail. Write instead:

* a solution at top level (`answer = ...` inside the markers) makes the check cell end in NameError: let the
  student write a function, or put `answer = None` before the region;
* a plain cell that calls the student's code raises outside an exercise: put that demonstration into the check
  cell, before its last line, or let it use memlab's own function.

The first code cell, "install", isn't in the source: `templates/first_cell.py` goes into every notebook, after
the opening text. It gives Colab memlab and does nothing elsewhere. (A source with a cell of that id keeps its
own, the only place for %pip.)

What release does, in this order
================================

1. parse and lint (`faults`: one line for each fault, with file and line; with a fault nothing is written);
2. fill in nbgrader's metadata, ids and kernelspec -> build/source/NN_name/NN_name.ipynb;
3. nbgrader's own preprocessors: LockCells, ClearSolutions (the stub is
   `raise NotImplementedError("exercise 2.1")`), ClearOutput, ClearHiddenTests, ClearMarkScheme,
   ComputeChecksums, CheckCellMetadata; no database;
4. search the result for solution text (`leaks`);
5. write notebooks/NN_name.ipynb atomically: format 4.5, stable ids, no outputs, nothing of this machine:
   the same bytes everywhere.
'''

from __future__ import annotations

import ast
import copy
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader.preprocessors import (
    CheckCellMetadata,
    ClearHiddenTests,
    ClearMarkScheme,
    ClearOutput,
    ClearSolutions,
    ComputeChecksums,
    LockCells,
)

from autograder.course import Chapter, CourseError, chapters, write_atomically
from memlab.doctor import TEXT_STUB

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
KEYS = frozenset({"id", "exercise", "check", "manual", "points", "claims", "tags"})
_DROPPED = frozenset({"lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_marker", "nbgrader"})
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}[a-z0-9]")
_EXERCISE = re.compile(r"\d+\.\d+")
_CLAIM = re.compile(r"[A-Z]\d*-\d+")
_MARKER = re.compile(r"(BEGIN|END) (SOLUTION|HIDDEN TESTS|MARK SCHEME)")
_PIP = re.compile(r"^\s*[%!]\s*(pip|conda|uv|apt)\b", re.MULTILINE)
_HEADER = re.compile(r"^# %%(?!%)(\s|$)")
FIRST_CELL = Path(__file__).parent / "templates" / "first_cell.py"


@dataclass(frozen=True)
class Cell:
    """One cell of a source file. `line` is that of its `# %%`; the other fields are the format's keys."""

    line: int
    kind: str
    source: str
    id: str = ""
    exercise: str = ""
    check: str = ""
    manual: str = ""
    points: float | None = None
    claims: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        """The exercise that this cell belongs to, or ''."""
        return self.exercise or self.check or self.manual

    def solution_lines(self) -> list[str]:
        """The lines that the student must not see."""
        if self.manual and BEGIN not in self.source:
            return self.source.splitlines()
        hidden, inside = [], False
        for line in self.source.splitlines():
            if BEGIN in line or END in line:
                inside = BEGIN in line
            elif inside:
                hidden.append(line)
        return hidden


def points_registry() -> dict[str, float]:
    """Exercise id -> points, as memlab's checks give them."""
    from memlab.exercises import exercises

    return {name: exercise.points for name, exercise in exercises().items()}


# --- parsing ------------------------------------------------------------------------------------------------


def parse(path: Path) -> list[Cell]:
    """The cells of a source file. Raises CourseError where the file can't be read as percent format."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CourseError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CourseError(f"can't read {path}: it isn't UTF-8") from None
    try:
        notebook = jupytext.reads(text, fmt="py:percent")
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CourseError(f"{path}: jupytext can't read it: {first}") from None
    cells = [
        _cell(cell, line) for cell, line in zip(notebook.cells, _lines(text, notebook.cells), strict=True)
    ]
    if not cells:
        raise CourseError(
            f"{path}: no cells; a chapter starts with a line like '# %% [markdown] id=\"title\"'"
        )
    return cells


def _lines(text: str, cells: list[Any]) -> list[int]:
    """The line of each cell's `# %%`; jupytext doesn't keep it. A `# %%` inside a string isn't a cell."""
    headers = [(n, line) for n, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    if len(headers) == len(cells):
        return [n for n, _ in headers]
    return [next((n for n, h in headers if f'id="{c.metadata.get("id")}"' in h), 1) for c in cells]


def _cell(cell: Any, line: int) -> Cell:
    given = {k: v for k, v in cell.metadata.items() if k not in _DROPPED}
    if "nbgrader" in cell.metadata:
        given["nbgrader"] = True  # reported as an unknown key: build writes it
    points = given.get("points")
    return Cell(
        line=line,
        kind=cell.cell_type,
        source=cell.source,
        id=str(given.get("id", "")),
        exercise=str(given.get("exercise", "")),
        check=str(given.get("check", "")),
        manual=str(given.get("manual", "")),
        points=points if isinstance(points, int | float) and not isinstance(points, bool) else None,
        claims=tuple(str(given.get("claims", "")).replace(",", " ").split()),
        tags=tuple(given.get("tags", ())),
        unknown_keys=tuple(sorted(set(given) - KEYS)),
    )


# --- lint ---------------------------------------------------------------------------------------------------


def faults(chapter: Chapter, cells: list[Cell], points: Mapping[str, float]) -> list[str]:
    """What is wrong with a chapter's source, one line each (`solutions/02_x.py:41: cell "ex-2-1": …`)."""
    where = chapter.source.relative_to(chapter.root)

    def at(cell: Cell, text: str) -> str:
        name = f'cell "{cell.id}"' if cell.id else f"the {cell.kind} cell"
        return f"{where}:{cell.line}: {name}: {text}"

    found = [at(cell, text) for cell in cells for text in _cell_faults(cell, chapter, points)]

    for name, times in Counter(cell.id for cell in cells if cell.id).items():
        if times > 1:
            found += [at(cell, "the same id as an earlier cell") for cell in cells if cell.id == name][1:]
    code = [cell for cell in cells if cell.kind == "code"]
    found += [
        at(cell, "%pip outside the first code cell; installing belongs there, where it is safe to run twice")
        for cell in code[1:]
        if _PIP.search(cell.source)
    ]
    parameters = [cell for cell in cells if "parameters" in cell.tags]
    if len(parameters) != 1:
        found.append(
            f'{where}: {len(parameters)} cells with tags=["parameters"]; papermill needs exactly one'
        )

    checks = Counter(cell.check for cell in code if cell.check)
    found += [
        at(cell, f"exercise {cell.check} is checked {checks[cell.check]} times; it must be once")
        for cell in code
        if checks[cell.check] > 1
    ]
    first_seen: dict[str, int] = {}
    for position, cell in enumerate(cells):
        if cell.exercise:
            first_seen.setdefault(cell.exercise, position)
            if cell.exercise not in checks:
                found.append(at(cell, f'exercise {cell.exercise} has no cell with check="{cell.exercise}"'))
        elif cell.check and cell.check not in first_seen:
            found.append(at(cell, f'no cell with exercise="{cell.check}" comes before this check'))
    for number in points:
        if number.partition(".")[0] == str(chapter.number) and number not in checks:
            found.append(f"{where}: exercise {number} of memlab.exercises has no check cell in this chapter")
    return sorted(found, key=_line_number)


def _line_number(fault: str) -> int:
    match = re.search(r":(\d+): ", fault)
    return int(match.group(1)) if match else 0


def _cell_faults(cell: Cell, chapter: Chapter, points: Mapping[str, float]) -> Iterator[str]:
    if not cell.id:
        yield 'no id; write one on its first line, for example # %% id="peak-plot"'
    elif not _ID.fullmatch(cell.id):
        yield "an id has 2 to 64 characters of a-z, 0-9 and -"
    for key in cell.unknown_keys:
        if key == "nbgrader":
            yield "nbgrader metadata is written by the build; say exercise=, check= or manual= instead"
        else:
            yield f"unknown key {key!r}; known: {', '.join(sorted(KEYS))}"
    roles = [role for role in (cell.exercise, cell.check, cell.manual) if role]
    if len(roles) > 1:
        yield "a cell is one of exercise, check and manual"
        return
    for claim in cell.claims:
        if not _CLAIM.fullmatch(claim):
            yield f"{claim!r} isn't a claim's id (C2-07, S-02)"
    if cell.number and not (
        _EXERCISE.fullmatch(cell.number) and cell.number.startswith(f"{chapter.number}.")
    ):
        yield f"exercise {cell.number!r} doesn't belong to chapter {chapter.number}"
        return
    slug = cell.number.replace(".", "-")
    if cell.exercise and not (cell.id == f"ex-{slug}" or cell.id.startswith(f"ex-{slug}-")):
        yield f'the id of an exercise cell is "ex-{slug}" (or "ex-{slug}-b", …)'
    if cell.check and cell.id != f"check-{slug}":
        yield f'the id of a check cell is "check-{slug}"'
    if (cell.exercise or cell.check) and cell.kind != "code":
        yield "an exercise and its check are code cells"
    if cell.manual and cell.kind != "markdown":
        yield "a written answer is a markdown cell"
    yield from _marker_faults(cell)
    if cell.check:
        if cell.check not in points:
            yield f"check of exercise {cell.check}, which memlab.exercises doesn't have"
        if not _ends_in_check(cell.source, cell.check):
            yield f'the last line must be memlab.check("{cell.check}", …): its value is the points'
    if cell.manual:
        if cell.points is None or cell.points <= 0:
            yield "a written answer needs points=…, a positive number"
        if cell.manual in points:
            yield f"exercise {cell.manual} has an automatic check in memlab.exercises; take another number"
    elif cell.points is not None:
        known = points.get(cell.number)
        if known is None or known != cell.points:
            yield f"points={cell.points:g}, but memlab.exercises says {known}"
    if "parameters" in cell.tags:
        yield from _parameter_faults(cell)
    if cell.kind == "code" and not cell.source.strip():
        yield "an empty code cell"


def _marker_faults(cell: Cell) -> Iterator[str]:
    inside = False
    regions = 0
    for line in cell.source.splitlines():
        match = _MARKER.search(line)
        if not match:
            continue
        if match.group(2) != "SOLUTION":
            yield f"{match.group(0)}: hidden inputs belong into memlab.exercises"
        elif line.strip() not in (BEGIN, END):
            yield f"a marker stands alone on its line, as {BEGIN} or {END}"
        elif inside == (match.group(1) == "BEGIN"):
            yield f"unbalanced solution markers at {line.strip()!r}"
            return
        else:
            inside = not inside
            regions += inside
    if inside:
        yield f"unbalanced solution markers: {END} is missing"
    if regions and not (cell.exercise or cell.manual):
        yield "solution markers outside an exercise cell"
    if cell.exercise and not regions:
        yield f"no solution: put it between {BEGIN} and {END}"


def _ends_in_check(source: str, number: str) -> bool:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return False
    last = body[-1] if body else None
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and last.value.args):
        return False
    name, first = last.value.func, last.value.args[0]
    called = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
    return called == "check" and isinstance(first, ast.Constant) and first.value == number


def _parameter_faults(cell: Cell) -> Iterator[str]:
    try:
        body = ast.parse(cell.source).body
    except SyntaxError as error:
        yield f"not valid Python: {error.msg}"
        return
    names = {
        target.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    missing = {"device", "size", "seed"} - names
    if missing:
        yield f"papermill's parameters need a default each: {', '.join(sorted(missing))}"


# --- notebooks ----------------------------------------------------------------------------------------------


def nbgrader_metadata(cell: Cell, points: Mapping[str, float]) -> dict[str, Any] | None:
    """What nbgrader wants to know about a cell; None for a plain one.

    Plain cells aren't locked: to put back a missing cell nbgrader looks for the one before it among graded
    and solution cells only, and a read-only one there would end in KeyError.
    """
    if not cell.number:
        return None
    graded = bool(cell.check or cell.manual)
    metadata: dict[str, Any] = {
        "cell_type": cell.kind,
        "grade": graded,
        "grade_id": cell.id,
        "locked": bool(cell.check),
        "schema_version": 3,
        "solution": bool(cell.exercise or cell.manual),
        "task": False,
    }
    if graded:
        value = cell.points if cell.manual else points[cell.check]
        assert value is not None
        metadata["points"] = int(value) if float(value).is_integer() else value
    return metadata


def with_first_cell(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with "install", the same in every chapter, before the first code cell."""
    if any(cell.id == "install" for cell in cells):
        return list(cells)
    at = next((n for n, cell in enumerate(cells) if cell.kind == "code"), len(cells))
    text = FIRST_CELL.read_text(encoding="utf-8").rstrip("\n")
    return [*cells[:at], Cell(line=0, kind="code", source=text, id="install"), *cells[at:]]


def source_notebook(cells: Iterable[Cell], points: Mapping[str, float]) -> Any:
    """nbgrader's source notebook: solutions in, nothing of this machine in its metadata."""
    notebook = new_notebook(  # type: ignore[no-untyped-call]
        metadata={
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
        }
    )
    for cell in cells:
        make: Any = new_code_cell if cell.kind == "code" else new_markdown_cell
        metadata: dict[str, Any] = {}
        if cell.tags:
            metadata["tags"] = list(cell.tags)
        memlab = {"exercise": cell.number} if cell.number else {}
        if cell.claims:
            memlab["claims"] = " ".join(cell.claims)
        if memlab:
            metadata["memlab"] = memlab
        if (nbgrader := nbgrader_metadata(cell, points)) is not None:
            metadata["nbgrader"] = nbgrader
        notebook.cells.append(make(source=cell.source, id=cell.id, metadata=metadata))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


class StubSolutions(ClearSolutions):  # type: ignore[misc]
    """nbgrader's ClearSolutions with a stub that names the exercise that isn't done."""

    def preprocess_cell(self, cell: Any, resources: Any, cell_index: int) -> Any:
        number = cell.metadata.get("memlab", {}).get("exercise", "")
        self.code_stub = {"python": f'raise NotImplementedError("exercise {number}")'}
        self.text_stub = TEXT_STUB
        return super().preprocess_cell(cell, resources, cell_index)


def release_notebook(source: Any) -> Any:
    """The student version of a source notebook, by the preprocessors of nbgrader's generate_assignment."""
    notebook: Any = copy.deepcopy(source)
    resources: dict[str, Any] = {}
    for step in (
        LockCells,
        StubSolutions,
        ClearOutput,
        ClearHiddenTests,
        ClearMarkScheme,
        ComputeChecksums,
        CheckCellMetadata,
    ):
        preprocessor = step()
        preprocessor.log = logging.getLogger("autograder.release")
        notebook, resources = preprocessor.preprocess(notebook, resources)
    return notebook


def leaks(cells: Iterable[Cell], released: Any) -> list[str]:
    """Lines of a solution that the student version still holds, each as "cell "x" shows … of exercise 2.1".

    A line counts from 20 characters on, unless it is an import, a comment or the head of a block.
    """
    shown = {
        line.strip(): cell.id for cell in released.cells for line in cell.source.splitlines() if line.strip()
    }
    found = []
    for cell in cells:
        for line in map(str.strip, cell.solution_lines()):
            telling = len(line) >= 20 and not line.startswith(
                ("import ", "from ", "#", "for ", "with ", "def ", "class ")
            )
            if telling and line in shown:
                found.append(f'cell "{shown[line]}" shows the solution of exercise {cell.number}: {line}')
    found += [f'cell "{c.id}" has a marker' for c in released.cells if _MARKER.search(c.source)]
    found += [f'cell "{c.id}" has outputs' for c in released.cells if c.get("outputs")]
    return found


def to_text(notebook: Any) -> str:
    """The bytes of a notebook file: format 4.5, keys sorted, one final newline."""
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook, version=nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    return text.rstrip("\n") + "\n"


@dataclass(frozen=True)
class Built:
    """A chapter's two notebooks, as nbformat objects."""

    chapter: Chapter
    cells: list[Cell]
    source: Any
    release: Any


def build(chapter: Chapter, points: Mapping[str, float] | None = None) -> Built:
    """Both notebooks of a chapter, in memory. Raises CourseError: one line for each fault of the source."""
    points = points_registry() if points is None else points
    cells = parse(chapter.source)
    found = faults(chapter, cells, points)
    if found:
        raise CourseError("\n".join(found))
    source = source_notebook(with_first_cell(cells), points)
    released = release_notebook(source)
    found = leaks(cells, released)
    if found:
        where = chapter.source.relative_to(chapter.root)
        raise CourseError("\n".join(f"{where}: {line}" for line in found))
    return Built(chapter, cells, source, released)


def build_all(wanted: Iterable[Chapter], points: Mapping[str, float] | None = None) -> list[Built]:
    """`build` for several chapters; all faults of all of them in one CourseError."""
    points = points_registry() if points is None else points
    built, found = [], []
    for chapter in wanted:
        try:
            built.append(build(chapter, points))
        except CourseError as error:
            found.append(str(error))
    if found:
        raise CourseError("\n".join(found))
    return built


def release(wanted: Iterable[Chapter], points: Mapping[str, float] | None = None) -> list[Path]:
    """Write both notebooks of these chapters; returns the student notebooks whose bytes changed."""
    changed = []
    for item in build_all(wanted, points):
        _write_if_new(item.chapter.nbgrader_source, to_text(item.source))
        if _write_if_new(item.chapter.notebook, to_text(item.release)):
            changed.append(item.chapter.notebook)
    return changed


def stale(wanted: Iterable[Chapter], points: Mapping[str, float] | None = None) -> list[str]:
    """One line for each notebook that isn't what release would write, or has no source. Writes nothing."""
    wanted = list(wanted)
    found = []
    for item in build_all(wanted, points):
        path = item.chapter.notebook
        name = path.relative_to(item.chapter.root)
        if not path.exists():
            found.append(f"{name}: missing")
        elif path.read_bytes() != to_text(item.release).encode():
            found.append(f"{name}: differs from its source")
    for root in {chapter.root for chapter in wanted}:
        every = chapters(root)
        if set(every) <= set(wanted):
            names = {chapter.name for chapter in every}
            extra = [p for p in (root / "notebooks").glob("*.ipynb") if p.stem not in names]
            found += [f"{p.relative_to(root)}: no source in solutions/" for p in sorted(extra)]
    return found


def _write_if_new(path: Path, text: str) -> bool:
    if path.exists() and path.read_bytes() == text.encode():
        return False
    write_atomically(path, text)
    return True
