"""Notebooks that editors, merges, downloads and people have damaged."""

# ruff: noqa: E501 - students' lines are as long as they are

from __future__ import annotations

import copy
import json
from typing import Any

import nbformat

from tests.submissions.case import FULL, GRADED, REVIEW, Hand, between, case, exactly, no_points


def _plain(hand: Hand) -> Any:
    """The notebook as JSON data."""
    return json.loads(nbformat.writes(hand.nb))


# -- bytes and JSON ----------------------------------------------------------------------------------------


@case(FULL)
def byte_order_mark(hand: Hand) -> None:
    """UTF-8 with a byte-order mark."""
    hand.give(b"\xef\xbb\xbf" + nbformat.writes(hand.nb).encode())


@case(FULL)
def utf_16(hand: Hand) -> None:
    """Saved as UTF-16."""
    hand.give(nbformat.writes(hand.nb).encode("utf-16"))


@case(FULL)
def latin_1(hand: Hand) -> None:
    """Saved by an old editor."""
    hand.code("1.1", "# müde")
    text = nbformat.writes(hand.nb).encode("latin-1", "replace")
    hand.give(text)


@case(FULL)
def lone_surrogate(hand: Hand) -> None:
    """Half a character."""
    hand.code("1.1", "# \ud800")
    hand.give(json.dumps(hand.nb))


@case(FULL)
def pretty_printed(hand: Hand) -> None:
    """Reindented JSON, with carriage returns."""
    hand.give(json.dumps(_plain(hand), indent=8).replace("\n", "\r\n"))


@case(FULL)
def minified(hand: Hand) -> None:
    """JSON on one line, sources as strings."""
    hand.give(json.dumps(json.loads(json.dumps(hand.nb)), separators=(",", ":")))


@case(no_points(), short=True)
def truncated(hand: Hand) -> None:
    """A download that broke off."""
    text = nbformat.writes(hand.nb)
    hand.give(text[: len(text) // 2])


@case(no_points())
def empty_file(hand: Hand) -> None:
    """Nothing in it."""
    hand.give(b"")


@case(no_points())
def zeros(hand: Hand) -> None:
    """A file of zero bytes, as after a power cut."""
    hand.give(bytes(20_000))


@case(no_points())
def a_list(hand: Hand) -> None:
    """JSON, but no notebook."""
    hand.give(b"[]")


@case(no_points())
def null_cells(hand: Hand) -> None:
    """Cells that are null."""
    hand.give(b'{"cells": null, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}')


@case(no_points())
def login_page(hand: Hand) -> None:
    """An HTML page under the notebook's name."""
    hand.give(b"<!doctype html><title>Sign in</title><p>Please sign in")


@case(no_points())
def merge_conflict_in_json(hand: Hand) -> None:
    """git's marks between the lines of JSON."""
    lines = nbformat.writes(hand.nb).splitlines()
    lines[40:40] = ["<<<<<<< HEAD"]
    hand.give("\n".join(lines))


@case(no_points())
def nested_too_deep(hand: Hand) -> None:
    """A million brackets."""
    hand.give("[" * 1_000_000)


@case(no_points())
def deep_metadata(hand: Hand) -> None:
    """Valid JSON, a notebook, with metadata nested 100,000 deep."""
    text = nbformat.writes(hand.nb)
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    hand.give(text.replace('"metadata": {', f'"metadata": {{"deep": {deep},', 1))


@case(no_points(), short=True)
def another_chapter(hand: Hand) -> None:
    """The right name on the notebook of something else."""
    hand.give(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('hello')")]))


# -- formats -----------------------------------------------------------------------------------------------


@case(FULL)
def format_3(hand: Hand) -> None:
    """Converted to notebook format 3, in worksheets and without metadata."""
    hand.give(json.dumps(nbformat.convert(hand.nb, 3)))


@case(FULL)
def format_4_0(hand: Hand) -> None:
    """Format 4.0: no ids of cells."""
    plain = _plain(hand)
    plain["nbformat_minor"] = 0
    for cell in plain["cells"]:
        del cell["id"]
    hand.give(json.dumps(plain))


@case(FULL)
def no_ids(hand: Hand) -> None:
    """Format 4.5 without the ids that it asks for."""
    plain = _plain(hand)
    for cell in plain["cells"]:
        del cell["id"]
    hand.give(json.dumps(plain))


@case(FULL)
def format_4_99(hand: Hand) -> None:
    """A minor version of tomorrow, with fields of tomorrow."""
    plain = _plain(hand)
    plain["nbformat_minor"], plain["tomorrow"] = 99, {"x": 1}
    plain["cells"][0]["tomorrow"] = True
    hand.give(json.dumps(plain))


@case(between(0, 10, "failed", GRADED, REVIEW))
def format_5(hand: Hand) -> None:
    """A major version that doesn't exist yet."""
    hand.nb.nbformat = 5
    hand.give(json.dumps(hand.nb))


@case(between(0, 10, "failed", GRADED, REVIEW))
def format_as_text(hand: Hand) -> None:
    """`"nbformat": "4"`."""
    hand.nb.nbformat = "4"
    hand.give(json.dumps(hand.nb))


@case(FULL)
def same_ids(hand: Hand) -> None:
    """All cells have the same id, as after a bad script."""
    for cell in hand.nb.cells:
        cell.id = "same"
    hand.give(json.dumps(hand.nb))


@case(FULL)
def odd_ids(hand: Hand) -> None:
    """Ids that are no text."""
    for number, cell in enumerate(hand.nb.cells):
        cell.id = [None, 7, {"a": 1}, ["x"], "", "x" * 500][number % 6]
    hand.give(json.dumps(hand.nb))


# -- metadata ----------------------------------------------------------------------------------------------


@case(FULL, short=True)
def stripped(hand: Hand) -> None:
    """No metadata, new ids."""
    for number, cell in enumerate(hand.nb.cells):
        cell.metadata, cell.id = {}, f"x{number}"


@case(FULL)
def null_metadata(hand: Hand) -> None:
    """Metadata that is null, a list, a number."""
    plain = _plain(hand)
    for number, cell in enumerate(plain["cells"]):
        cell["metadata"] = [None, [], 3][number % 3]
    plain["metadata"] = None
    hand.give(json.dumps(plain))


def _nbgrader(hand: Hand, **changes: Any) -> None:
    for cell in hand.nb.cells:
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.update(changes)


@case(FULL)
def schema_2(hand: Hand) -> None:
    """An old schema version in every cell."""
    _nbgrader(hand, schema_version=2)


@case(FULL)
def schema_99(hand: Hand) -> None:
    """A schema version of tomorrow."""
    _nbgrader(hand, schema_version=99)


@case(FULL)
def nothing_is_graded(hand: Hand) -> None:
    """grade=false, solution=true everywhere."""
    _nbgrader(hand, grade=False, solution=True, locked=False)


@case(FULL)
def everything_is_graded(hand: Hand) -> None:
    """grade=true everywhere, 100 points each."""
    _nbgrader(hand, grade=True, points=100)


@case(FULL)
def no_points_in_metadata(hand: Hand) -> None:
    """points removed, checksums wrong."""
    for cell in hand.nb.cells:
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.pop("points", None)
            cell.metadata.nbgrader["checksum"] = "0"


@case(FULL)
def same_grade_id(hand: Hand) -> None:
    """One grade id for all."""
    _nbgrader(hand, grade_id="check-1-1")


@case(FULL)
def swapped_grade_ids(hand: Hand) -> None:
    """The metadata of the first two checks exchanged."""
    a, b = hand.check("1.1"), hand.check("1.2")
    a.metadata, b.metadata = b.metadata, a.metadata


@case(FULL)
def no_kernel(hand: Hand) -> None:
    """Neither kernelspec nor language."""
    hand.nb.metadata = {}


@case(FULL)
def kernel_of_r(hand: Hand) -> None:
    """Says that it is written in R."""
    hand.nb.metadata = {"kernelspec": {"name": "ir", "language": "R", "display_name": "R"}}


# -- cells -------------------------------------------------------------------------------------------------


@case(FULL, short=True)
def duplicates(hand: Hand) -> None:
    """An exercise and its check copied and pasted, with all metadata."""
    for number, cell in enumerate((hand.exercise("1.1"), hand.check("1.1"))):
        again = copy.deepcopy(cell)
        again.id = f"copy{number}"
        hand.nb.cells.append(again)


@case(FULL)
def whole_notebook_twice(hand: Hand) -> None:
    """Select all, copy, paste."""
    more = copy.deepcopy(hand.nb.cells)
    for number, cell in enumerate(more):
        cell.id = f"again{number}"
    hand.nb.cells += more


@case(FULL)
def second_try_below(hand: Hand) -> None:
    """The stub stays, the answer stands in a cell of its own before the check."""
    cell = hand.exercise("1.1")
    index = hand.nb.cells.index(cell)
    source = cell.source.replace("# exercise 1.1", "# my answer")
    hand.nb.cells.insert(index + 1, nbformat.v4.new_code_cell(source, id="mine"))
    cell.source = next(c.source for c in hand.untouched().cells if c.id == cell.id)


@case(FULL)
def split_cell(hand: Hand) -> None:
    """One exercise's cell split in two between its functions."""
    cell = hand.exercise("1.1")
    first, second = cell.source.split("\n\n\n", 1)
    cell.source = first
    hand.nb.cells.insert(hand.nb.cells.index(cell) + 1, nbformat.v4.new_code_cell(second, id="second-half"))


@case(FULL)
def split_cell_without_metadata(hand: Hand) -> None:
    """The same in an editor that knows nothing of nbgrader."""
    split_cell(hand)
    stripped(hand)


@case(FULL)
def merged_cells(hand: Hand) -> None:
    """Two exercises merged into the first one's cell."""
    one, two = hand.exercise("1.1"), hand.exercise("1.2")
    one.source += "\n\n\n" + two.source
    hand.nb.cells.remove(two)


@case(FULL)
def merged_with_check(hand: Hand) -> None:
    """An exercise and its check merged into one cell."""
    hand.exercise("1.1").source += "\n" + hand.check("1.1").source
    hand.nb.cells.remove(hand.check("1.1"))


@case(FULL)
def merged_with_check_without_metadata(hand: Hand) -> None:
    """The same in an editor that knows nothing of nbgrader."""
    merged_with_check(hand)
    stripped(hand)


@case(FULL)
def check_merged_with_next(hand: Hand) -> None:
    """A check merged with the exercise below it, whose cell is gone."""
    hand.check("1.1").source += "\n" + hand.exercise("1.2").source
    hand.nb.cells.remove(hand.exercise("1.2"))


@case(FULL)
def check_deleted(hand: Hand) -> None:
    """A check is gone."""
    hand.nb.cells.remove(hand.check("1.1"))


@case(FULL)
def all_checks_deleted(hand: Hand) -> None:
    """Only answers are left."""
    hand.nb.cells = [c for c in hand.nb.cells if not c.id.startswith("check")]


@case(exactly(8, GRADED, REVIEW))
def exercise_deleted(hand: Hand) -> None:
    """An exercise is gone: counted as not written."""
    hand.nb.cells.remove(hand.exercise("1.2"))


@case(FULL)
def setup_deleted(hand: Hand) -> None:
    """The set-up is gone."""
    hand.nb.cells = [c for c in hand.nb.cells if c.id not in ("begin", "parameters")]


@case(FULL)
def setup_broken(hand: Hand) -> None:
    """The set-up doesn't work any more: imports removed, another course's first cell."""
    for cell in hand.nb.cells:
        if cell.id == "begin":
            cell.source = "import os, time, weakref\nimport memlab\nfrom torch import nn\nimport torch\nraise OSError('drive')"


@case(FULL)
def text_deleted(hand: Hand) -> None:
    """No prose at all, not even the written answer."""
    hand.nb.cells = [c for c in hand.nb.cells if c.cell_type == "code"]


@case(FULL)
def upside_down(hand: Hand) -> None:
    """All cells in reverse order."""
    hand.nb.cells.reverse()


@case(FULL)
def check_above_answer(hand: Hand) -> None:
    """A check moved above its exercise."""
    check = hand.check("1.1")
    hand.nb.cells.remove(check)
    hand.nb.cells.insert(hand.nb.cells.index(hand.exercise("1.1")), check)


@case(FULL)
def answers_at_the_end(hand: Hand) -> None:
    """All answers moved below all checks."""
    answers = [c for c in hand.nb.cells if c.id.startswith("ex-")]
    hand.nb.cells = [c for c in hand.nb.cells if c not in answers] + answers


def _retype(hand: Hand, prefix: str, kind: str) -> None:
    plain = _plain(hand)
    for cell in plain["cells"]:
        if cell["id"].startswith(prefix):
            cell["cell_type"] = kind
            if kind != "code":
                cell.pop("outputs", None)
                cell.pop("execution_count", None)
    hand.give(json.dumps(plain))


@case(FULL)
def checks_are_markdown(hand: Hand) -> None:
    """Check cells turned into Markdown."""
    _retype(hand, "check", "markdown")


@case(FULL)
def answers_are_raw(hand: Hand) -> None:
    """Exercise cells turned into raw cells."""
    _retype(hand, "ex-", "raw")


@case(FULL)
def answers_are_markdown(hand: Hand) -> None:
    """Exercise cells turned into Markdown."""
    _retype(hand, "ex-", "markdown")


@case(FULL)
def written_is_code(hand: Hand) -> None:
    """The written answer turned into code."""
    _retype(hand, "written", "code")


@case(FULL)
def unknown_cell_types(hand: Hand) -> None:
    """Cells of a type that nobody knows, and cells that aren't objects."""
    plain = _plain(hand)
    plain["cells"][2:2] = [{"cell_type": "heading", "source": "x", "metadata": {}}, None, 7, "text", [], {},
                           {"cell_type": "sql", "source": "select 1", "metadata": {}, "id": "sql"},
                           {"cell_type": None, "source": None}]  # fmt: skip
    hand.give(json.dumps(plain))


@case(FULL)
def odd_sources(hand: Hand) -> None:
    """Sources that are null, numbers, lists of lists, missing."""
    plain = _plain(hand)
    for source in (None, 3, [["x"]], {"a": 1}, [None, "y"]):
        plain["cells"].append(
            {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        )
    plain["cells"].append({"cell_type": "code"})
    hand.give(json.dumps(plain))


@case(FULL)
def odd_outputs(hand: Hand) -> None:
    """Outputs of every wrong form."""
    plain = _plain(hand)
    odd = [None, 3, [], [None], [{"output_type": "what"}], [{"output_type": "stream", "text": 3}], {"a": 1}]
    for number, cell in enumerate(c for c in plain["cells"] if c["cell_type"] == "code"):
        cell["outputs"], cell["execution_count"] = odd[number % 7], "three"
    hand.give(json.dumps(plain))


@case(FULL)
def exercise_comment_lost(hand: Hand) -> None:
    """No metadata, and the comments that mark the exercises removed."""
    for cell in hand.nb.cells:
        lines = cell.source.splitlines()
        cell.source = "\n".join(line for line in lines if not line.strip().lower().startswith("# exercise"))
    stripped(hand)


@case(FULL)
def formatted(hand: Hand) -> None:
    """Black, with other quotes and line lengths, and no metadata."""
    for cell in hand.nb.cells:
        if cell.cell_type == "code":
            cell.source = (
                cell.source.replace("memlab.check(", "memlab.check(\n    ").replace('"', "'") + "\n\n"
            )
    stripped(hand)


@case(FULL)
def attachments(hand: Hand) -> None:
    """A picture pasted into the written answer."""
    hand.written().attachments = {"image.png": {"image/png": "iVBORw0KGgo="}}


@case(FULL)
def large_outputs(hand: Hand) -> None:
    """100 MB of saved outputs."""
    text = "a line of output that was printed in a loop\n" * 24_000
    cell = hand.exercise("1.1")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text) for _ in range(95)]


@case(FULL)
def long_lines(hand: Hand) -> None:
    """A comment of a megabyte."""
    hand.code("1.1", "#" + "x" * 1_000_000)


@case(FULL)
def many_cells(hand: Hand) -> None:
    """Two thousand empty cells."""
    hand.nb.cells += [nbformat.v4.new_code_cell("", id=f"e{n}") for n in range(2_000)]
