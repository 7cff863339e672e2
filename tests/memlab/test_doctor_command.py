"""`memlab doctor`, as a student types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memlab.cli import app
from memlab.doctor import releases

RUNNER = CliRunner()


@pytest.fixture
def handed_out(tmp_path: Path) -> Path:
    """A copy of a chapter, renamed."""
    path = tmp_path / "Copy of homework (1).ipynb"
    path.write_bytes(next(iter(releases().values())).read_bytes())
    return path


def test_an_untouched_chapter_needs_nothing(handed_out: Path) -> None:
    result = RUNNER.invoke(app, ["doctor", str(handed_out)])
    assert result.exit_code == 0
    assert "0 of 5 exercises written, open: 1.1" in result.output and "nothing to mend" in result.output


def test_a_damaged_one_is_mended_into_a_new_file(handed_out: Path) -> None:
    notebook = json.loads(handed_out.read_text("utf-8"))
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        cell.pop("id")
    notebook["cells"] = [c for c in notebook["cells"] if "memlab.check(" not in "".join(c["source"])]
    handed_out.write_text(json.dumps(notebook), "utf-8")
    out = handed_out.with_name("mended.ipynb")
    result = RUNNER.invoke(app, ["doctor", str(handed_out), "--out", str(out)])
    assert 'cell "check-1-1" is missing: put back' in result.output
    ids = [cell["id"] for cell in json.loads(out.read_text("utf-8"))["cells"]]
    original = json.loads(next(iter(releases().values())).read_text("utf-8"))
    assert ids == [cell["id"] for cell in original["cells"]]
    again = RUNNER.invoke(app, ["doctor", str(out), "--release", str(out)])
    assert "nothing to mend" in again.output
    refused = RUNNER.invoke(app, ["doctor", str(handed_out), "--out", str(out)])
    assert refused.exit_code and "there already" in str(refused.exception)


def test_what_is_no_notebook_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "page.ipynb"
    path.write_text("<!doctype html>")
    result = RUNNER.invoke(app, ["doctor", str(path)])
    assert result.exit_code and "web page" in str(result.exception)


def test_the_chapter_is_told_by_the_exercises_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "02_four_consumers.ipynb"
    path.write_bytes(releases()["03_deep"].read_bytes())
    result = RUNNER.invoke(app, ["doctor", str(path)])
    assert result.exit_code == 0 and "is 03_deep: " in result.output and "nothing to mend" in result.output


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("\nx = (1,\n", "SyntaxError in line"),
        ("\nreturn 1\n", "'return' outside function"),
        ("\n      y = 1\n", "IndentationError in line"),
        ("\n%timeit 1\nif True:\n    !ls\nawait f()\n", "nothing to mend"),
    ],
)
def test_a_cell_that_cannot_run_is_named(handed_out: Path, added: str, said: str) -> None:
    notebook = json.loads(handed_out.read_text("utf-8"))
    [cell] = [c for c in notebook["cells"] if c["id"] == "ex-1-2"]
    cell["source"] = "".join(cell["source"]) + added
    handed_out.write_text(json.dumps(notebook), "utf-8")
    result = RUNNER.invoke(app, ["doctor", str(handed_out)])
    assert said in result.output
    assert ("the cell of exercise 1.2 can't run" in result.output) == ("nothing" not in said)
