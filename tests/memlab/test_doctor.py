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

from memlab import doctor
from memlab.doctor import OtherChapter, Unreadable, chapter_of, read, releases


def repair(submitted: Any, original: Any) -> tuple[Any, list[str]]:
    fixed, repairs = doctor.repair(submitted, original)
    return nbformat.from_dict(fixed), repairs


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


def ids(notebook: Any) -> list[str]:
    return [c.id for c in notebook.cells]


FUNCTIONS = {
    "2": "def f():\n    return 1\n\ndef g():\n    return 2\n# exercise 1.1",
    "4": "def h():\n    return 3\n# exercise 1.2",
}


def with_functions(stubs: bool) -> Any:
    """The release, or a submission of it, whose exercises ask for f and g, and for h."""
    notebook = release()
    for number, source in FUNCTIONS.items():
        stub = source.replace("return", "raise NotImplementedError #")
        notebook.cells[int(number)].source = stub if stubs else source
    notebook.cells[3].source = 'memlab.check("1.1", f, g)'
    notebook.cells[5].source = 'memlab.check("1.2", h)'
    return notebook


def values(notebook: Any) -> list[Any]:
    """What the check cells see when the notebook runs from top to bottom: the functions' values."""
    found: list[Any] = []

    class Lab:
        @staticmethod
        def check(number: str, *functions: Any) -> None:
            for function in functions:
                try:
                    found.append((number, function()))
                except NotImplementedError:
                    found.append((number, None))

    space: dict[str, Any] = {"memlab": Lab}
    for c in notebook.cells:
        if c.cell_type == "code" and c.source != "import memlab":
            exec(c.source, space)
    return found


RIGHT = [("1.1", 1), ("1.1", 2), ("1.2", 3)]


def strip(notebook: Any) -> Any:
    for number, c in enumerate(notebook.cells):
        c.metadata, c.id = {}, f"x{number}"
    return notebook


def split(notebook: Any) -> Any:
    first, second = FUNCTIONS["2"].split("\n\n")
    notebook.cells[2].source = first
    notebook.cells.insert(3, new_code_cell(second))
    return notebook


def split_without_marks(notebook: Any) -> Any:
    notebook.cells[2].source = "\n".join(FUNCTIONS["2"].splitlines()[:-1])
    notebook.cells.insert(2, new_code_cell("import math\n\nbase = 1"))
    return notebook


def merge_exercises(notebook: Any) -> Any:
    notebook.cells[2].source += "\n" + notebook.cells[4].source
    del notebook.cells[4]
    return notebook


def merge_with_check(notebook: Any) -> Any:
    notebook.cells[3].source = notebook.cells[2].source + "\n" + notebook.cells[3].source
    del notebook.cells[2]
    return notebook


def paste_over_another(notebook: Any) -> Any:
    notebook.cells[1].source = notebook.cells[4].source
    del notebook.cells[4]
    return notebook


def answer_below_the_stub(notebook: Any) -> Any:
    answer = notebook.cells[2].source
    notebook.cells[2] = with_functions(True).cells[2]
    notebook.cells.append(new_code_cell(answer))
    return notebook


def stub_copied_below(notebook: Any) -> Any:
    notebook.cells.insert(3, copy.deepcopy(with_functions(True).cells[2]))
    return notebook


def retype(notebook: Any) -> Any:
    notebook.cells[2].cell_type = "raw"
    notebook.cells[4].cell_type = "markdown"
    notebook.cells[5].cell_type = "markdown"
    return notebook


def odd_schema(notebook: Any) -> Any:
    notebook.cells[2].metadata["nbgrader"]["schema_version"] = 99
    notebook.cells[3].metadata["nbgrader"]["points"] = 1000
    notebook.cells[4].metadata["nbgrader"] = "what?"
    return notebook


DAMAGE = [
    strip, split, split_without_marks, merge_exercises, merge_with_check, paste_over_another,
    answer_below_the_stub, stub_copied_below, retype, odd_schema,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("stripped", [False, True], ids=["", "stripped"])
def test_damage_costs_no_answer(damage: Any, stripped: bool) -> None:
    damaged = damage(with_functions(False))
    fixed, repairs = repair(strip(damaged) if stripped else damaged, with_functions(True))
    assert list(dict.fromkeys(values(fixed))) == RIGHT, "\n---\n".join(sources(fixed))
    assert (repairs or damage is split_without_marks) and all("\n" not in line for line in repairs)
    assert [i for i in ids(fixed) if not i.startswith("added")] == ids(release())
    nbformat.validate(fixed)


def test_an_answer_without_any_mark_is_found_by_its_place() -> None:
    damaged = strip(submission())
    damaged.cells[2].source = "a = 1"
    fixed, repairs = repair(damaged, release())
    assert next(c for c in fixed.cells if c.id == "ex-1-1").source == "a = 1"
    assert any("by its text and its place" in line for line in repairs)


def test_odd_metadata_is_said_in_one_line_each() -> None:
    _, repairs = repair(odd_schema(with_functions(False)), with_functions(True))
    assert repairs == [
        "grading metadata of 1 cell was lost: put back", "grading metadata of 2 cells was changed: put back"
    ]  # fmt: skip


def test_a_written_answer_below_its_cell_or_in_the_question_is_kept() -> None:
    original = release()
    metadata = {"nbgrader": {"grade": True, "solution": True, "locked": False, "grade_id": "written"}}
    original.cells.append(new_markdown_cell("The question.", id="question"))
    original.cells.append(new_markdown_cell("*Write*", id="written", metadata=metadata))
    below = copy.deepcopy(original)
    below.cells.append(new_markdown_cell("my answer"))
    assert next(c for c in repair(below, original)[0].cells if c.id == "written").source == "my answer"
    within = copy.deepcopy(original)
    within.cells[-2].source += "\nmy answer"
    fixed, repairs = repair(within, original)
    assert "my answer" in sources(fixed) and any("is kept" in line for line in repairs)


def test_of_a_check_copied_as_markdown_and_as_code_the_codes_lines_are_kept() -> None:
    damaged = with_functions(True)
    text = 'b = 2\nmemlab.check("1.1", f, g)\nmemlab.check("1.1", f, g)'
    damaged.cells = [new_code_cell("a = 1"), new_markdown_cell(text), new_code_cell(text)]
    assert text in sources(repair(read(json.dumps(damaged).encode()), with_functions(True))[0])


LINES = st.lists(
    st.sampled_from(
        ["a = 1", "b = 2", "# exercise 1.1", "# exercise 1.2", "def f():", "    return 7", "", "def h():",
         'memlab.check("1.1", f, g)', "import memlab", "x = [\"ü\"]", 'raise NotImplementedError("x")']
    ),
    min_size=1, max_size=5,
).map("\n".join)  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.sampled_from(["code", "code", "markdown"]), LINES), max_size=8),
    st.booleans(),
)
def test_every_line_of_code_survives(cells: list[tuple[int, str, str]], stripped: bool) -> None:
    """Whatever stands in whichever cell, in any order: no line of code of the student's is lost."""
    original = with_functions(True)
    damaged = new_notebook()
    for index, kind, source in cells:
        c = copy.deepcopy(original.cells[index]) if index >= 0 else new_code_cell("")
        if not (c.get("metadata", {}).get("nbgrader") and kind == "markdown" and index in (2, 4)):
            c.cell_type = kind
        c.source = source
        damaged.cells.append(c)
    if stripped:
        strip(damaged)
    try:
        fixed, _ = repair(read(json.dumps(damaged).encode()), original)
    except Unreadable:
        return
    kept = "\n".join(c.source for c in fixed.cells if c.cell_type == "code").splitlines()
    released = {line.strip() for c in original.cells for line in c.source.splitlines()}
    for c in damaged.cells:
        if c.cell_type == "code":
            for line in c.source.splitlines():
                assert line in kept or line.strip() in released
    nbformat.validate(fixed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nbformat": 5}, "notebook format '5' isn't known"),
        ({"nbformat": "4"}, "isn't known"),
        ({}, ""),
    ],
)
def test_unknown_formats_are_read_and_said(change: dict[str, Any], said: str) -> None:
    lines: list[str] = []
    fixed, _ = repair(read(json.dumps({**submission(), **change}).encode(), lines), release())
    assert "# exercise 1.1\na = 1" in sources(fixed)
    assert said in "".join(lines) and (said != "") == bool(lines)


def test_the_releases_lie_beside_the_package() -> None:
    found = releases()
    assert found and all(path.suffix == ".ipynb" for path in found.values())
    name, path = next(iter(found.items()))
    notebook = read(path.read_bytes())
    assert chapter_of(notebook) == name and chapter_of(notebook, f"Copy of {name} (1).ipynb") == name
    fixed, repairs = doctor.repair(notebook, json.loads(path.read_bytes()) | {"cells": notebook["cells"]})
    assert repairs == [] and len(fixed["cells"]) == len(notebook["cells"])


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
    assert "größer" in read(text.encode(encode))["cells"][2]["source"]


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


@pytest.mark.parametrize("strip", [False, True])
def test_a_notebook_of_another_chapter_is_not_made_one_of_this(strip: bool) -> None:
    known = {name: read(path.read_bytes()) for name, path in releases().items()}
    for name, notebook in known.items():
        if strip:
            notebook = {**notebook, "cells": [{**c, "id": "", "metadata": {}} for c in notebook["cells"]]}
        for other, release in known.items():
            if other != name:
                with pytest.raises(OtherChapter, match=rf"chapter {int(name[:2])} \({name}\), not"):
                    repair(notebook, release)
        assert repair(notebook, known[name])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"%PDF-1.7 ...", "but a PDF"),
        (b"PK\x03\x04....", "but a zip archive"),
        (b'{"cells": [{"source": "x', "cut off in the middle"),
        (b'{"cells": [', "cut off in the middle"),
        (b'{\n<<<<<<< HEAD\n "cells": []}', "marks of a conflict"),
        (b'{"cells": nothing}', "broken JSON"),
    ],
)
def test_a_file_that_is_no_notebook_is_called_by_its_name(data: bytes, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        read(data)
