"""All chapters with Colab's versions, memlab installed by the first cell as Colab would.

Colab has torch 2.11, whose Linux wheel on PyPI is a CUDA build of 531 MB that wants 2 GB of CUDA libraries,
too. So this runs with the torch that `make setup` takes, and `test_torch_names` watches which of torch's
private names are used. Not seen here: Colab's own front end, a T4.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from autograder import build
from autograder.course import select
from autograder.run import headlines, student_errors
from tests.pins import machines
from tests.pins.machines import (
    PINS,
    ROOT,
    THIS_PYTHON,
    checkout,
    environment,
    installed,
    kernel_environment,
    run,
)

pytestmark = pytest.mark.long

COLAB = Path(__file__).parent / "colab.txt"
EXECUTE = Path(__file__).parent / "execute.py"
CHAPTERS = [chapter.name for chapter in select(ROOT)]
FIRST_CELL = build.FIRST_CELL.read_text()
ADDRESS = re.search(r'address = "([^"]+)"', FIRST_CELL)[1]
# Colab's kernel has imported google.colab before the first cell runs; its pip asks nobody but PyPI.
PRETEND = (
    "google-colab.pth",
    "import sys, types; sys.modules.setdefault('google.colab', types.ModuleType('google.colab'))\n",
)


@pytest.fixture(scope="session")
def colab() -> Path:
    """The Python of an environment with Colab's pins, in which `google.colab` is imported."""
    pins = COLAB.read_text()
    index = ["--index-url", os.environ["TORCH_INDEX"]] if os.environ.get("TORCH_INDEX") else []
    torch = re.search(r"^torch==\S+$", pins, re.MULTILINE)[0]
    python = environment("colab", THIS_PYTHON, [torch, *index], ["-r", str(COLAB)], key=pins)
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    (Path(site) / PRETEND[0]).write_text(PRETEND[1])
    return python


@pytest.fixture(scope="session")
def archive() -> Iterator[str]:
    """This working tree as the zip that GitHub would give, on a server of ours: its address."""
    served = PINS / "archive"
    served.mkdir(parents=True, exist_ok=True)
    tree = checkout(PINS / "checkout")
    with zipfile.ZipFile(served / "main.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(p for p in tree.rglob("*") if p.is_file()):
            file.write(path, Path("memlab-main") / path.relative_to(tree))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/main.zip"
        server.shutdown()


def outputs(python: Path, *cells: str) -> list[list[dict]]:
    """What each cell gives, in one kernel of that environment."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    folder = PINS / "first-cell"
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / "in.ipynb")
    run([python, EXECUTE, folder / "in.ipynb", folder / "out"], env=kernel_environment(python, "smallest"))
    return [cell.outputs for cell in nbformat.read(folder / "out" / "in.ipynb", as_version=4).cells]


@pytest.fixture(scope="session")
def with_memlab(colab: Path, archive: str) -> Path:
    """memlab gone, then installed by the first cell: nothing else moves, a second run is silent."""
    run([colab, "-m", "pip", "uninstall", "--quiet", "--yes", "memlab"])
    before = installed(colab)
    cell = FIRST_CELL.replace(ADDRESS, archive)
    first, again, after = outputs(colab, cell, cell, "import memlab; print(memlab.__file__)")
    assert [output.output_type for output in first] == ["stream"] and first[0].name == "stdout"
    print(f"\nfirst cell, first run: {first[0].text.strip()}")
    assert re.fullmatch(r".*CPU core.*; memlab \S+, torch \S+, Python \S+\n", first[0].text)
    assert again == []
    assert str(colab.parent.parent) in after[0].text
    changed = installed(colab) ^ before
    assert len(changed) == 1 and changed.pop().startswith("memlab @ ")
    run([colab, "-m", "pip", "check"])
    return colab


def test_the_first_cell_installs_memlab_and_nothing_else(with_memlab: Path) -> None:
    """See the fixture, on which all others depend."""


def test_the_versions_are_colabs(with_memlab: Path) -> None:
    """No pin was moved by installing."""
    have = {line.split("+")[0] for line in installed(with_memlab)}
    assert {line for line in COLAB.read_text().split("\n") if "==" in line} <= have


def test_no_network_and_a_wrong_address_are_one_line_each(colab: Path, archive: str) -> None:
    """With memlab out of the way: its folder isn't looked at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    hide = (
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'memlab' else find(name, *rest)"
    )
    for address, said in (
        (archive.replace("main", "mian"), "404"),
        (f"http://127.0.0.1:{closed}/main.zip", "refused"),
    ):
        _, told = outputs(colab, hide, FIRST_CELL.replace(ADDRESS, address))
        assert [output.output_type for output in told] == ["error"]
        print(f"\n{told[0].traceback[0]}")
        assert len(told[0].traceback) == 1 and "\n" not in told[0].traceback[0]
        assert address in told[0].traceback[0] and said in told[0].traceback[0]


@pytest.mark.parametrize("form", ["solved", "student"])
@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs(with_memlab: Path, name: str, form: str) -> None:
    """Solved: no error at all; as given out: only the exercises that aren't done."""
    (chapter,) = select(ROOT, [name])
    built = build.build(chapter)
    notebook = built.source if form == "solved" else built.release
    folder = PINS / "runs" / f"colab-{form}"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.ipynb"
    source.write_text(build.to_text(notebook))
    ran = machines.within(
        [with_memlab, EXECUTE, source, folder / "out"], env=kernel_environment(with_memlab, "smallest")
    )
    assert ran.code == 0, ran.output
    done = nbformat.read(folder / "out" / source.name, as_version=4)
    print(f"\nColab's pins, {form}: {name} {ran.seconds:.0f} s, peak {ran.peak / machines.MIB:,.0f} MiB")
    if form == "student":
        assert student_errors(done) == []
        return
    check(done)


def check(done: nbformat.NotebookNode) -> None:
    """No error, nothing on stderr, every check passed in full, headline numbers and figures are there."""
    failed = [
        f"{cell.id}: {output.get('ename', output.get('name'))}: {output.get('evalue', output.get('text'))}"
        for cell in done.cells
        for output in cell.get("outputs", [])
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert failed == []
    for cell in done.cells:
        if cell.get("metadata", {}).get("nbgrader", {}).get("points") and cell.cell_type == "code":
            points = json.loads(cell.outputs[-1].data["text/plain"])
            assert points == cell.metadata.nbgrader.points, cell.id
    assert headlines(done)
    kinds = {
        kind for cell in done.cells for output in cell.get("outputs", []) for kind in output.get("data", {})
    }
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= kinds
