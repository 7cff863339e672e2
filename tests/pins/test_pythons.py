"""Python 3.12 and 3.13, which Colab has: syntax, the torch-free half and its tests, figures and widgets.

torch itself isn't there: PyPI has only its CUDA builds for these Pythons (5 GB installed). Where a machine
has no such Python, Pyodide under Node is one: it runs what `core.py` asks, not the tests.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from docs.calculator.build import INTEGRITY, PYODIDE
from docs.vendor import VendorError, fetch
from tests.pins.machines import PINS, ROOT, environment, find_python, missing, run

pytestmark = pytest.mark.long

VERSIONS = ("3.12", "3.13")
HERE = Path(__file__).parent
CORE = HERE / "core.py"
#: Pyodide's releases for these Pythons: 0.27.7 is CPython 3.12.7, 0.29.5 (the calculator's) 3.13.2.
PYODIDES = {
    "3.12": (
        "0.27.7",
        "sha512-RUSVJlhQdfWfgO9hVHCiXoG+nVZQRS5D9FzgpLJ/VcgGBLSAKoPL8kTiOikxbHQm1kRISeWUBdulEgO26qpSRA==",
    ),
    "3.13": (PYODIDE, INTEGRITY),
}
#: Test files of which at least something runs without torch; what needs it is skipped.
TESTS = """
units hardware models recipe trace allocator snapshot oom planner doctor doctor_command cli engines plots
imports
""".split()  # noqa: SIM905
#: They start a Python of their own that needs torch, so the plugin doesn't see why they fail.
NEED_TORCH = (
    "the_script_shards or inline_backend or loads_no_torch_before or import_memlab_runs or name_of_the_top "
    "or interrupt_while_tracing"
)
SOURCES = ("memlab", "autograder", "benchmarks", "docs", "solutions", "tests")

NODE = """
import { loadPyodide } from "FOLDER/pyodide.mjs";
import { readFileSync } from "fs";
const asked = `
import contextlib, io, platform, sys
sys.path.insert(0, "/home/pyodide/tree")
out = io.StringIO()
with contextlib.redirect_stdout(out):
    exec(compile(code, "core.py", "exec"), {"__name__": "__main__"})
platform.python_version() + " " + out.getvalue()
`;
try {
  const python = await loadPyodide({ indexURL: "FOLDER/" });
  python.unpackArchive(readFileSync(process.argv[2]).buffer, "zip", { extractDir: "/home/pyodide/tree" });
  python.globals.set("code", readFileSync(process.argv[3], "utf8"));
  console.log(python.runPython(asked));
} catch (error) {
  console.error(String(error));  // Node would print a line of Pyodide's, of a megabyte
  process.exit(1);
}
"""


def native(version: str) -> Path | None:
    """An environment of that Python with Colab's pins, less torch, and pytest; None where there is none."""
    python = find_python(version)
    if python is None:
        return None
    pins = (HERE / "colab.txt").read_text()
    wanted = re.findall(
        r"^(?:ipykernel|ipython|ipywidgets|jupyter_client|matplotlib|nbformat|numpy|tqdm|traitlets|typer)==.+",
        pins,
        re.M,
    )
    made = environment(f"python{version}", python, [*wanted, "pytest==9.2.0", "hypothesis==6.170.17"])
    run(
        [
            made,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--force-reinstall",
            ROOT,
        ]
    )
    return made


def asked(python: Path) -> dict[str, object]:
    """What `core.py` answers there; warnings are errors."""
    return json.loads(
        run([python, "-W", "error", "-X", "utf8", CORE], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    )


def in_pyodide(version: str) -> tuple[str, dict[str, object]]:
    """The version that it says it is, and what `core.py` answers in it."""
    node = shutil.which("node")
    if node is None:
        missing(f"neither a Python {version} nor node, which could run Pyodide's, is on this machine")
    release, integrity = PYODIDES[version]
    try:
        folder = fetch("pyodide", release, integrity)
    except VendorError as error:
        missing(f"no Python {version} here and no Pyodide: {error}")
    work = PINS / f"pyodide{version}"
    work.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(work / "memlab.zip", "w") as archive:
        for path in sorted((ROOT / "memlab").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT))
    (work / "run.mjs").write_text(NODE.replace("FOLDER", folder.as_posix()))
    said = run([node, work / "run.mjs", work / "memlab.zip", CORE]).strip().splitlines()[-1]
    found, _, answer = said.partition(" ")
    return found, json.loads(answer)


@pytest.fixture(scope="session", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Path:
    """An environment of each version; aloud skipped (in CI: failed) where the machine has no such Python."""
    found = native(request.param)
    if found is None:
        missing(f"no Python {request.param} on this machine (Pyodide's stands in for it where there is node)")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_pyodide_says_the_same(version: str) -> None:
    """Every figure of the core, to the byte, as this Python has it."""
    found, answer = in_pyodide(version)
    print(f"\nPyodide {PYODIDES[version][0]}: Python {found}")
    assert found.startswith(f"{version}.")
    assert answer == asked(Path(sys.executable))


def test_the_core_says_the_same(python: Path) -> None:
    """And no deprecation is met on the way."""
    assert asked(python) == asked(Path(sys.executable))


def test_the_explorers_are_made(python: Path) -> None:
    """With Colab's ipywidgets and matplotlib; their twins, too."""
    code = (
        "from memlab import widgets\n"
        "for name in ('memory_levels', 'four_consumers', 'checkpoint_segments', 'micro_batches'):\n"
        "    twin = getattr(widgets, name)().twin; assert twin.html().strip() and twin.figure\n"
    )
    settings = {"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(PINS / "matplotlib"), "MPLBACKEND": "agg"}
    run([python, "-W", "error::DeprecationWarning:memlab", "-c", code], cwd=ROOT, env=settings)


def test_every_file_compiles_without_a_warning(python: Path) -> None:
    """Syntax that a newer Python drops or warns of (escapes, `is` with literals, return in finally)."""
    names = run(["git", "-C", ROOT, "ls-files", "--", *[f"{name}/*.py" for name in SOURCES]]).split()
    assert len(names) > 100
    code = "import sys\nfor name in sys.argv[1:]: compile(open(name, encoding='utf-8').read(), name, 'exec')"
    run(
        [
            python,
            "-W",
            "error",
            "-c",
            code,
            *[n for n in names if (ROOT / n).exists() and "fixtures" not in n],
        ],
        cwd=ROOT,
    )


def test_what_needs_no_torch_passes(python: Path) -> None:
    """memlab's own tests, with Colab's matplotlib, numpy, ipywidgets and typer's."""
    files = [f"tests/memlab/test_{name}.py" for name in TESTS]
    command = [
        *(python, "-W", "error::DeprecationWarning:memlab", "-W", "error::SyntaxWarning"),
        *("-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.pins.without_torch", "--noconftest"),
        *("-m", "not long and not browser", "-k", f"not ({NEED_TORCH})", *files),
    ]
    said = run(command, cwd=ROOT).strip().splitlines()[-1]
    print(f"\n{python.parent.parent.name}: {said}")
    assert int(re.search(r"(\d+) passed", said)[1]) > 600
