"""docs/chapters.py and docs/reference.py: executed chapters without solutions, docstrings as pages."""

import base64
import copy
import struct
import zlib

import pytest
from nbformat.v4 import new_output

from autograder import build
from autograder.course import Chapter
from docs import chapters as pages
from docs import reference
from docs.site import ROOT, _guide, accessible
from tests.site.hidden import Hidden

SOURCE = '''# %% [markdown] id="title"
# # 1. A chapter
#
# What it is about.

# %% id="parameters" tags=["parameters"]
device = "auto"
size = "normal"
seed = 0

# %% id="ex-1-1" exercise="1.1"
def states(parameters):
    """Bytes of the states."""
    ### BEGIN SOLUTION
    return 16 * parameters + the_part_that_is_secret
    ### END SOLUTION

# %% id="check-1-1" check="1.1"
import memlab

memlab.check("1.1", states)

# %% [markdown] id="written-1-2" manual="1.2" points=3
# The model answer, which no student may read before handing in.
'''


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("course")
    (root / "solutions").mkdir()
    (root / "solutions" / "01_small.py").write_text(SOURCE)
    return build.build(Chapter(root, "01_small"), {"1.1": 2})


def _png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(width) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _ran(built, **outputs):
    """The chapter as a runner leaves it: papermill's injected cell, and outputs by cell id."""
    executed = copy.deepcopy(built.source)
    executed.metadata["widgets"] = {"state": {"secret": 1}}
    for cell in executed.cells:
        if cell.cell_type == "code":
            cell.outputs = outputs.get(cell.id.replace("-", "_"), [])
    injected = copy.deepcopy(executed.cells[1])
    injected["id"] = "injected-parameters"
    executed.cells.insert(2, injected)
    return executed


def test_a_page_has_no_solution_and_says_where_to_run_it(built):
    shown, _ = pages.page(built, _ran(built), "a machine")
    text = "\n".join(cell.source for cell in shown.cells)
    assert "the_part_that_is_secret" not in text
    assert "model answer" not in text
    assert 'raise NotImplementedError("exercise 1.1")' in text
    title = shown.cells[0].source
    assert title.startswith("# 1. A chapter\n") and title.rstrip().endswith("What it is about.")
    assert f"{pages.COLAB}/01_small.ipynb" in title and f"{pages.BINDER}/01_small.ipynb" in title
    assert "widgets" not in shown.metadata
    assert [cell.id for cell in shown.cells] == [cell.id for cell in built.source.cells]
    assert not [cell for cell in shown.cells if "nbgrader" in cell.metadata]


def test_outputs_stay_but_for_what_a_machine_reads(built):
    figure = new_output(
        "display_data",
        data={"image/png": base64.b64encode(_png(7, 4)).decode(), "text/plain": "alternative"},
        metadata={"image/png": {"alt": 'What "it" shows'}},
    )
    said = [
        new_output("stream", name="stdout", text="exercise 1.1: 2 of 2 points. Right.\n"),
        new_output("display_data", data={"application/vnd.memlab.evidence+json": {"answer": 42}}),
        new_output(
            "display_data",
            data={"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "VBox()"},
        ),
        new_output("display_data", data={"text/html": "<table></table>", "text/plain": "table"}),
        figure,
        new_output("execute_result", data={"text/plain": "2"}, execution_count=1),
    ]
    shown, figures = pages.page(built, _ran(built, check_1_1=said), "a machine")
    kept = next(cell for cell in shown.cells if cell.id == "check-1-1").outputs
    assert [output.output_type for output in kept] == ["stream", "display_data", "display_data"]
    assert kept[1].data["text/html"] == "<table></table>"
    html = kept[2].data["text/html"]
    assert 'width="7" height="4"' in html and 'alt="What &quot;it&quot; shows"' in html
    (name,) = figures
    assert f'src="../figures/{name}"' in html and figures[name] == _png(7, 4)


def test_a_traceback_is_left_without_the_lines_that_raised_it(built):
    error = new_output(
        "error", ename="ValueError", evalue="no", traceback=["    return the_part_that_is_secret", "no"]
    )
    shown, _ = pages.page(built, _ran(built, ex_1_1=[error]), "a machine")
    cell = next(cell for cell in shown.cells if cell.id == "ex-1-1")
    assert cell.outputs[0].traceback == ["ValueError: no"]


@pytest.mark.parametrize("cell_id", ["ex-1-1", "title"])
def test_a_run_of_another_source_is_refused(built, cell_id):
    executed = _ran(built)
    next(cell for cell in executed.cells if cell.id == cell_id).source += "\n# edited since"
    with pytest.raises(pages.SiteError, match="isn't this source"):
        pages.page(built, executed, "a machine")


def test_hidden_lines_are_found_and_given_ones_are_not(built):
    hidden = Hidden([built])
    assert hidden.code == {"return 16 * parameters + the_part_that_is_secret"}
    assert hidden.prose == {"Themodelanswer,whichnostudentmayreadbeforehandingin."}
    assert hidden.found(build.to_text(built.release)) == []
    assert (
        len(
            hidden.found(
                "The model answer, which no student may\nread before handing in.\n    " + min(hidden.code)
            )
        )
        == 2
    )
    assert hidden.found_anywhere('"def f():\\n    return 16 * parameters + the_part_that_is_secret\\n"')


def test_points_in_words(built):
    assert pages.points(built) == "2 points, and 3 for a written answer"


def test_links_of_a_guide_go_to_pages_or_to_the_repository():
    from pathlib import Path

    text = "[a](#here) [b](https://x.org/) [c](../ARCHITECTURE.md#benchmarks) [d](build.py) [e](../README.md)"
    assert _guide(text, Path("autograder/README.md")) == (
        "[a](#here) [b](https://x.org/) [c](architecture.md#benchmarks) "
        f"[d]({pages.REPOSITORY}/blob/main/autograder/build.py) [e](index.md)"
    )
    with pytest.raises(pages.SiteError, match="isn't there"):
        _guide("[x](no_such_file.py)", Path("autograder/README.md"))


# --- docstrings ---------------------------------------------------------------------------------------------


def _rst(text, *arguments):
    return "\n".join(reference.rst(text.strip("\n").split("\n"), arguments)).rstrip()


def test_an_indented_example_becomes_code():
    assert _rst("What it does.\n\n    x = f(1)\n\n    y = 2\n\nMore.") == (
        "What it does.\n\n.. code-block:: python\n\n    x = f(1)\n\n    y = 2\n\nMore."
    )
    assert ".. code-block:: console" in _rst("Run:\n\n    memlab gpus")
    assert ".. code-block:: text" in _rst("So:\n\n    not python at all")


def test_lists_and_literal_blocks_stay():
    for text in ("Names::\n\n    a  b", "* one\n  more\n* two", "term\n    what it is"):
        assert _rst(text) == text


def test_arguments_and_fields_become_lists():
    assert _rst(
        "Does it.\n\na, **rest: what\n    they are\nnote: this\nb: one.\nRaises E.", "a", "b", "rest"
    ) == ("Does it.\n\n* ``a``, ``**rest``: what\n  they are\n  note: this\n* ``b``: one.\n\nRaises E.")
    assert _rst("fits      does it\nbytes     what\n          it takes") == (
        "* ``fits``: does it\n* ``bytes``: what\n  it takes"
    )
    assert _rst("note: not an argument", "a") == "note: not an argument"


def test_tables_of_bars_become_tables_and_stars_stay_stars():
    assert _rst("| a | b |\n|---|---|\n| `x` | |").split("\n")[3:] == [
        "   * - a",
        "     - b",
        "   * - `x`",
        "     -",
    ]
    assert _rst("Takes *args and **fields, *emphasis* too.") == (
        r"Takes \*args and \*\*fields, *emphasis* too."
    )


def test_every_module_of_the_library_is_in_the_reference_or_said_not_to_be():
    listed = {name for _, names in reference.FLOORS for name in names}
    own = {path.stem for path in (ROOT / "memlab").glob("*.py")} - {"__init__"}
    levers = {f"techniques.{path.stem}" for path in (ROOT / "memlab" / "techniques").glob("*.py")}
    flat = {name for name in listed if "." not in name} - {"techniques", "exercises"}
    assert own - set(reference.INNER) == flat, "put a new module into FLOORS or INNER of docs/reference.py"
    assert levers - {"techniques.__init__"} == {name for name in listed if "." in name}


def test_signatures_and_sidebar_can_be_read_aloud():
    signature = (
        '<dt class="sig sig-object py" id="f"><dl>\n<dd><em>x</em>, </dd>\n</dl>\n</dt>'
        "<dd><dl><dd>y</dd></dl></dd>"
    )
    assert accessible(signature) == (
        '<dt class="sig sig-object py" id="f"><div class="sig-lines">\n<div><em>x</em>, </div>\n</div>\n</dt>'
        "<dd><dl><dd>y</dd></dl></dd>"
    )
    assert 'aria-label="Pages of The chapters"' in accessible(
        '<a class="reference internal" href="#">The chapters</a><details open="open"><summary><span>'
    )
