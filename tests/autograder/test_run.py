"""Chapters executed: results, pages, failures, interrupts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from autograder import build, pages, run
from autograder.course import CourseError, select
from tests.autograder.conftest import write_plain
from tests.autograder.test_build import command

REPO = Path(build.__file__).parents[1]
MEBI = 2**20

# -- a course in which much goes wrong ---------------------------------------------------------------------

GOOD = """
# %% id="numbers"
from IPython.display import display

for name, value in (("seed", seed), ("size", size)):
    data = {"name": name, "value": value, "unit": "", "includes": "<all>", "text": str(value)}
    display({"text/plain": name, "application/vnd.memlab.headline+json": data}, raw=True)
"""
BAD = """
# %% id="fine"
x = 1

# %% id="broken"
raise ValueError("first line\\nthe batch can't be negative")

# %% id="never"
y = 2
"""
DEAD = """
# %% id="dies"
import os, signal

os.kill(os.getpid(), signal.SIGKILL)
"""
SLOW = """
# %% id="sleeps"
import time

time.sleep(60)
"""
LARGE = f"""
# %% id="large"
import subprocess, sys, time

hold = "import time; block = b'x' * {200 * MEBI}; time.sleep(1.5)"
subprocess.run([sys.executable, "-c", hold], check=True)
"""
EXITS = """
# %% id="leaves"
exit()

# %% id="innocent"
y = 2
"""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[run.Result]]:
    """The output folder and results of six chapters run side by side: two are sound, four end badly."""
    root = tmp_path_factory.mktemp("troubled")
    (root / "solutions").mkdir()
    for number, cells in enumerate((GOOD, BAD, DEAD, SLOW, LARGE, EXITS), 91):
        write_plain(root, f"{number}_chapter", cells)
    options = run.Options(size="smallest", seed=7, jobs=2, cell_timeout=8)
    return root / "out", run.run(select(root), root / "out", options)


def test_one_failing_chapter_stops_no_other(troubled: tuple[Path, list[run.Result]]) -> None:
    """An error, a dead kernel and a timeout, each with its cell; the others are ok."""
    _, results = troubled
    assert [result.status for result in results] == ["ok", "failed", "failed", "failed", "ok", "failed"]
    errors = [error for result in results for error in result.errors]
    assert errors == [
        {"cell": "broken", "message": "ValueError: the batch can't be negative"},
        {
            "cell": "dies",
            "message": "the kernel was killed by SIGKILL; the system may have run out of memory",
        },
        {"cell": "sleeps", "message": "took longer than 8 s"},
        {"cell": "leaves", "message": "exit() was called"},
    ]


def test_parameters_reach_the_chapter(troubled: tuple[Path, list[run.Result]]) -> None:
    """papermill's parameters, seen in what the chapter printed."""
    _, results = troubled
    assert [(h["name"], h["value"]) for h in results[0].headlines] == [("seed", 7), ("size", "smallest")]


def test_a_chapter_runs_on_a_virtual_card(tmp_path: Path) -> None:
    """The same notebook: bytes are measured on a T4 that isn't there, values are computed on the CPU."""
    results = run.run(
        select(REPO, ["4"]), tmp_path, run.Options(device="virtual:T4", size="smallest", jobs=1)
    )
    assert [(result.status, result.errors) for result in results] == [("ok", [])]
    said = {
        cell.id: "".join(output.get("text", "") for output in cell.outputs)
        for cell in nbformat.read(tmp_path / "04_wide.ipynb", 4).cells
        if cell.cell_type == "code"
    }
    assert said["begin"].startswith("04_wide on a virtual T4, values on ")
    assert "values of attention: the tensors of a virtual T4 hold no values" in said["naive-run"]
    assert "on a virtual T4 no kernel runs" in said["fused-run"]


def test_memory_of_child_processes_counts(troubled: tuple[Path, list[run.Result]]) -> None:
    """200 MiB held by a child are in the peak; the chapter that holds nothing is the negative control."""
    _, results = troubled
    small, large = results[0].peak_resident_bytes, results[4].peak_resident_bytes
    assert 20 * MEBI < small < 200 * MEBI
    assert large > small + 180 * MEBI


def test_results_json(troubled: tuple[Path, list[run.Result]]) -> None:
    """The documented fields, and files that exist."""
    out, results = troubled
    data = json.loads((out / "results.json").read_text())
    assert data["schema"] == run.SCHEMA
    assert set(data["machine"]) == {"text", "python", "torch", "cpus", "memory_bytes", "gpus"}
    assert [run.Result(**entry) for entry in data["chapters"]] == results
    for entry in data["chapters"]:
        assert (out / entry["page"]).is_file()
        assert entry["parameters"] == {"size": "smallest", "seed": 7}
        notebook = nbformat.read(out / entry["notebook"], as_version=4)
        assert "papermill" not in notebook.metadata
    assert sorted(p.name for p in out.iterdir() if p.name.startswith(".")) == []


def test_executed_notebook_shows_where_it_stopped(troubled: tuple[Path, list[run.Result]]) -> None:
    """The error is in its cell; the next one didn't run."""
    out, _ = troubled
    cells = {cell.id: cell for cell in nbformat.read(out / "92_chapter.ipynb", as_version=4).cells}
    assert cells["broken"].outputs[0].ename == "ValueError"
    assert cells["never"].execution_count is None
    assert cells["injected-parameters"].source.startswith("# Parameters\n")


def test_index_shows_every_chapter(troubled: tuple[Path, list[run.Result]]) -> None:
    """Headlines, escaped; errors, with a link to their cell; the machine."""
    out, results = troubled
    index = (out / "index.html").read_text()
    assert index.count('<section class="chapter">') == len(results)
    assert "&lt;all&gt;" in index
    assert "<all>" not in index
    assert '<a href="92_chapter.html#cell-id=broken">broken</a>' in index
    assert 'id="cell-id=broken"' in (out / "92_chapter.html").read_text()
    assert f"Python {sys.version.split()[0]}" in index


def test_pages_fetch_nothing(troubled: tuple[Path, list[run.Result]]) -> None:
    """No script, style sheet, image or font from anywhere else."""
    out, _ = troubled
    for page in out.glob("*.html"):
        assert fetches(page.read_text()) == []


def fetches(page: str) -> list[str]:
    """What a browser would load for this page."""
    return re.findall(r"<script|<link|<iframe|@import|url\(|\bsrc=[\"'](?!data:)[^\"']*", page)


# -- work not done twice, student version ------------------------------------------------------------------


def test_unchanged_chapters_are_not_run_again(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same source, parameters and library: nothing is executed. A change of any of them runs it."""
    write_plain(plain, "91_one", "")
    executed: list[str] = []

    def execute(chapter, notebook, watch, options, key):  # type: ignore[no-untyped-def]
        executed.append(chapter.name)
        status = "failed" if options.seed == 9 else "ok"
        return run.Result(chapter.name, "t", status, key, options.parameters()), notebook

    monkeypatch.setattr(run, "execute", execute)
    monkeypatch.setattr(run, "_library_hash", lambda: "1")

    def times(options: run.Options) -> int:
        executed.clear()
        run.run(select(plain), plain / "out", options)
        return len(executed)

    assert times(run.Options()) == 1
    assert times(run.Options()) == 0
    assert "91_one: unchanged" in capsys.readouterr().out
    assert times(run.Options(force=True)) == 1
    assert times(run.Options(seed=3)) == 1
    monkeypatch.setenv("MEMLAB_SIZE", "smallest")
    assert times(run.Options(seed=3)) == 1
    monkeypatch.setattr(run, "_library_hash", lambda: "2")
    assert times(run.Options(seed=3)) == 1
    write_plain(plain, "91_one", '# %% id="more"\nx = 1')
    assert times(run.Options(seed=3)) == 1
    assert times(run.Options(seed=3)) == 0
    assert times(run.Options(seed=9)) == 1  # fails
    assert times(run.Options(seed=9)) == 1
    (plain / "out/91_one.html").unlink()
    assert times(run.Options(seed=3)) == 1
    (plain / "out/results.json").write_text("{")
    assert times(run.Options(seed=3)) == 1


def test_a_run_of_one_chapter_keeps_the_others(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index still shows what was run before."""
    for name in ("91_one", "92_two"):
        write_plain(plain, name, "")
    monkeypatch.setattr(
        run,
        "execute",
        lambda chapter, nb, watch, options, key: (run.Result(chapter.name, "t", "ok", key), nb),
    )
    run.run(select(plain), plain / "out", run.Options())
    run.run(select(plain, ["92"]), plain / "out", run.Options(force=True))
    data = json.loads((plain / "out/results.json").read_text())
    assert [entry["chapter"] for entry in data["chapters"]] == ["91_one", "92_two"]


def test_student_version_raises_only_for_unwritten_exercises(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny chapter passes; an answer at top level, which ends in NameError at its check, is reported."""
    assert command(monkeypatch, "release") == 0
    assert command(monkeypatch, "run", "--student") == 0
    data = json.loads((tiny / "build/student/results.json").read_text())
    assert data["student"] is True
    cells = nbformat.read(tiny / "build/student/01_tiny.ipynb", as_version=4).cells
    seen = {
        cell.id: out.evalue for cell in cells for out in cell.get("outputs", []) if out.output_type == "error"
    }
    assert seen == {"check-1-1": "exercise 1.1"}

    source = tiny / "solutions/01_tiny.py"
    text = source.read_text()
    start, end = text.index("def float_bytes"), text.index('# %% id="check-1-1"')
    answer = f"{build.BEGIN}\nfloat_bytes = lambda n: 4 * n\n{build.END}\n\n"
    source.write_text(text[:start] + answer + text[end:])
    assert command(monkeypatch, "release") == 0
    capsys.readouterr()
    assert command(monkeypatch, "run", "--student") == 1
    assert (
        "failed: 01_tiny, cell \"check-1-1\": NameError: name 'float_bytes' is not defined "
        '(expected NotImplementedError("exercise 1.1"))'
    ) in capsys.readouterr().err


def executed(
    cell_id: str, error: tuple[str, str] | None, exercise: str = "", count: int | None = 1
) -> object:
    """A code cell after a run."""
    outputs = [new_output("error", ename=error[0], evalue=error[1], traceback=[])] if error else []
    metadata = {"memlab": {"exercise": exercise}} if exercise else {}
    return new_code_cell("x", id=cell_id, outputs=outputs, metadata=metadata, execution_count=count)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (executed("a", None), None),
        (executed("a", ("NotImplementedError", "exercise 1.1"), "1.1"), None),
        (executed("a", ("NotImplementedError", "exercise 1.1")), "outside an exercise"),
        (executed("a", ("NotImplementedError", "exercise 1.2"), "1.1"), "expected"),
        (executed("a", ("NotImplementedError", ""), "1.1"), "expected"),
        (executed("a", ("NameError", "exercise 1.1"), "1.1"), "expected"),
        (executed("a", None, count=None), "didn't run"),
    ],
)
def test_student_errors(cell: object, says: str | None) -> None:
    """What a student version may show and what it mayn't."""
    found = run.student_errors(new_notebook(cells=[cell, new_markdown_cell("text")]))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]["message"]


# -- faults of the call ------------------------------------------------------------------------------------


def test_unwritable_output_folder(plain: Path) -> None:
    """One line, before anything is run."""
    write_plain(plain, "91_one", "")
    (plain / "file").touch()
    with pytest.raises(CourseError, match=r"^can't write into .*/file/out: Not a directory$"):
        run.run(select(plain), plain / "file" / "out", run.Options())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 3}', '{"nbformat": 4, "nbformat_minor": 5}'])
def test_corrupt_student_notebook(
    tiny: Path, content: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says which file and what to do; exit 2."""
    (tiny / "notebooks").mkdir()
    (tiny / "notebooks/01_tiny.ipynb").write_text(content)
    assert command(monkeypatch, "run", "--student") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "01_tiny.ipynb isn't a notebook" in lines[0]
    assert "autograder release" in lines[0]


def test_missing_student_notebook_and_unknown_chapter(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each, exit 2."""
    assert command(monkeypatch, "run", "--student") == 2
    assert "01_tiny.ipynb is missing: run `autograder release`" in capsys.readouterr().err
    assert command(monkeypatch, "run", "01_tinny") == 2
    assert capsys.readouterr().err == "autograder: unknown chapter '01_tinny': did you mean 01_tiny?\n"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_kills_the_kernels_and_keeps_what_was_done(plain: Path, number: signal.Signals) -> None:
    """The finished chapter is in results.json, the sleeping one's kernel and its child are gone; exit 130."""
    write_plain(plain, "91_done", "")
    mark = plain / "started"
    write_plain(
        plain,
        "92_sleeps",
        '# %% id="sleeps"\nimport os, pathlib, subprocess\n\nchild = subprocess.Popen(["sleep", "120"])\n'
        f'pathlib.Path({str(mark)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")\nchild.wait()',
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from autograder.cli import main; main()",
            "run",
            "--out",
            "out",
            "--jobs",
            "1",
        ],
        cwd=plain,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()) and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "interrupted: the kernels are gone, finished chapters are kept\n"
    assert [not _alive(int(pid)) for pid in mark.read_text().split()] == [True, True]
    chapters = json.loads((plain / "out/results.json").read_text())["chapters"]
    assert [(entry["chapter"], entry["status"]) for entry in chapters] == [("91_done", "ok")]


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# -- progress and pages ------------------------------------------------------------------------------------


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar for each chapter, with the cell it is at; lines elsewhere (seen in the other tests)."""
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", screen)
    with run._Progress([("91_one", 4), ("92_two", 3)]) as progress:
        progress.start("91_one")
        progress.cell("91_one", 2, {"id": "peak-plot"})
        progress.end(run.Result("91_one", "", "ok", "", seconds=3.2, peak_resident_bytes=5 * MEBI))
    assert "92_two" in screen.getvalue()
    assert "waiting" in screen.getvalue()
    assert "4/4 cells" in screen.getvalue()
    assert "ok, 3.2 s, peak 5.00 MiB" in screen.getvalue()


def test_page_of_a_notebook_reads_offline() -> None:
    """Formulas are drawn, a badge becomes its text, a widget goes, what stands beside it stays."""
    badge = (
        "[![Open in Colab](https://colab.research.google.com/badge.svg)](https://colab.research.google.com/x)"
    )
    view = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
        "text/plain": "interactive(children=())",
    }
    notebook = new_notebook(
        cells=[
            new_markdown_cell(f"# Title\n\n{badge}\n\n$16\\,P$ bytes\n\n$$\\frac{{a}}{{b}}$$"),
            new_code_cell("secret_input = 1", metadata={"tags": ["hide-input"]}),
            new_code_cell(
                "show()",
                outputs=[
                    new_output("display_data", data=view),
                    new_output("display_data", data={"text/html": "<p>the static twin</p>"}),
                    new_output("stream", name="stdout", text="a < b\n"),
                ],
            ),
        ]
    )
    page = pages.chapter_page(notebook, "A & B", [{"cell": "x", "message": "<b>"}])
    assert fetches(page) == []
    assert "Open in Colab</a>" in page
    assert len(re.findall(r'<svg [^>]*class="math"', page)) == 2
    assert "interactive(children" not in page
    assert "the static twin" in page
    assert "a &lt; b" in page
    assert "secret_input" not in page
    assert "<title>A &amp; B</title>" in page
    assert "&lt;b&gt;" in page
    assert 'aria-label="16\\,P"' in page


@pytest.mark.parametrize("tex", ["\\notacommand{x}", "\\begin{x}", "\\frac{1"])
def test_formula_that_cannot_be_drawn_stays_readable(tex: str) -> None:
    """As code, escaped."""
    assert pages.formula(f"{tex} < 1").startswith("<code>")
    assert "&lt; 1" in pages.formula(f"{tex} < 1")


def test_machine_line() -> None:
    """Says what the numbers were made on, with a unit."""
    machine = run.describe_machine()
    assert re.search(r"\d CPU cores?, [\d.]+ GiB memory", machine["text"])
    assert machine["memory_bytes"] > 0
