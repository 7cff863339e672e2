"""A damaged notebook is mended by what the release knows; the student's code is never changed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograder.doctor import Unreadable, read, repair


def cell(id_: str, source: str, *, check: bool = False, exercise: str = "") -> Any:
    nbgrader = {"grade": check, "solution": not check, "locked": check, "grade_id": id_, "schema_version": 3}
    metadata = {"nbgrader": nbgrader, "memlab": {"exercise": exercise}} if exercise else {}
    return new_code_cell(source, id=id_, metadata=metadata)


def release() -> Any:
    return new_notebook(
        cells=[
            new_markdown_cell("# title", id="title"),
            cell("begin", "import memlab"),
            cell("ex-1-1", '# exercise 1.1\nraise NotImplementedError("exercise 1.1")', exercise="1.1"),
            cell("check-1-1", 'memlab.check("1.1", a)', exercise="1.1", check=True),
            cell("ex-1-2", '# exercise 1.2\nraise NotImplementedError("exercise 1.2")', exercise="1.2"),
            cell("check-1-2", 'memlab.check("1.2", b)', exercise="1.2", check=True),
        ]
    )


def submission() -> Any:
    notebook = release()
    notebook.cells[2].source = "# exercise 1.1\na = 1"
    notebook.cells[4].source = "# exercise 1.2\nb = 2"
    return notebook


def sources(notebook: Any) -> list[str]:
    return [c.source for c in notebook.cells]


def test_a_good_submission_needs_no_repair() -> None:
    fixed, repairs = repair(submission(), release())
    assert repairs == [] and sources(fixed) == sources(submission())


def test_stripped_metadata_and_new_ids() -> None:
    stripped = submission()
    for number, c in enumerate(stripped.cells):
        c.metadata, c.id = {}, f"x{number}"
    fixed, _ = repair(stripped, release())
    by_id = {c.id: c for c in fixed.cells}
    assert by_id["ex-1-1"].source == "# exercise 1.1\na = 1"
    assert by_id["check-1-2"].metadata.nbgrader.grade


def test_cells_lost_moved_doubled_retyped_and_added() -> None:
    damaged = submission()
    c = damaged.cells
    damaged.cells = [c[4], c[5], new_code_cell("helper = 3"), c[2], copy.deepcopy(c[2])]
    damaged.cells[4].source = "# exercise 1.1\na = 99"
    damaged.cells[0].cell_type = "markdown"
    fixed, repairs = repair(damaged, release())
    assert [x.id for x in fixed.cells if not x.id.startswith("added")] == [x.id for x in release().cells]
    assert {"helper = 3", "# exercise 1.1\na = 1", "# exercise 1.1\na = 99", "# exercise 1.2\nb = 2"} <= set(
        sources(fixed)
    )
    assert next(x for x in fixed.cells if x.id == "ex-1-2").cell_type == "code"
    text = "\n".join(repairs)
    assert "put back" in text and "there twice" in text and "moved" in text and "made code again" in text


def test_a_changed_check_is_put_back_and_said() -> None:
    cheated = submission()
    cheated.cells[3].source = "3"
    fixed, repairs = repair(cheated, release())
    assert next(x for x in fixed.cells if x.id == "check-1-1").source == 'memlab.check("1.1", a)'
    assert repairs == ['check cell "check-1-1" was changed: put back']


def test_another_chapter_is_refused() -> None:
    with pytest.raises(Unreadable, match="another chapter"):
        repair(new_notebook(cells=[new_code_cell("print(1)")]), release())


@pytest.mark.parametrize("encode", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_encodings(encode: str) -> None:
    notebook = submission()
    notebook.cells[2].source += "  # größer"
    text = json.dumps(notebook, ensure_ascii=False)
    assert "größer" in read(text.encode(encode)).cells[2].source


def test_format_3() -> None:
    old = nbformat.v3.new_notebook(
        worksheets=[nbformat.v3.new_worksheet(cells=[nbformat.v3.new_code_cell("# exercise 1.1\na = 1")])]
    )
    fixed, _ = repair(read(json.dumps(old).encode()), release())
    assert "# exercise 1.1\na = 1" in sources(fixed)


@pytest.mark.parametrize(
    "data", [b"", b"  ", b"[]", b"null", b"{}", b"\x89PNG", b"[" * 100_000, b'{"cells": 3}']
)
def test_what_is_no_notebook_is_said_in_one_line(data: bytes) -> None:
    with pytest.raises(Unreadable) as caught:
        repair(read(data), release())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.data())
def test_mutated_notebooks_never_crash_and_never_lose_an_answer(data: st.DataObject) -> None:
    """Random damage: one clear refusal, or every answer that still stands in the file is in the result."""
    notebook = json.loads(json.dumps(submission()))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(rng.randrange(1, 5)):
        target: Any = rng.choice([notebook, *notebook["cells"]]) if notebook.get("cells") else notebook
        if isinstance(target, dict) and target:
            key = rng.choice(sorted(target))
            if key == "cells" and isinstance(target[key], list):
                rng.shuffle(target[key])
            elif key != "source":
                target[key] = data.draw(JSON)
        if not isinstance(notebook.get("cells"), list):
            break
    try:
        fixed, _ = repair(read(json.dumps(notebook).encode()), release())
    except Unreadable as error:
        assert "\n" not in str(error)
        return
    code = "\n".join(sources(fixed))
    for c in notebook["cells"]:
        if isinstance(c, dict) and c.get("source") in ("# exercise 1.1\na = 1", "# exercise 1.2\nb = 2"):
            assert c["source"] in code
    nbformat.validate(fixed)
