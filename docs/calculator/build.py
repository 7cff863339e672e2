"""Puts the calculator together: python -m docs.calculator.build OUT

OUT then holds all that the page needs, for any static server, without a network: the page, its two scripts
and its style, five files of Pyodide (from npm, pinned) and memlab's torch-free modules from this tree as one
zip.

Pyodide 0.29 is the last with CPython 3.13, the newest that memlab supports; 314 has 3.14.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from docs.calculator import answers
from docs.vendor import VENDOR, VendorError, fetch
from memlab import __version__
from memlab.plots import COLOURS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

PYODIDE = "0.29.5"
INTEGRITY = "sha512-TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw=="
FILES = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
OWN = ("calculator.js", "worker.js", "style.css")

#: Those that the worker fetches and counts, for the progress bar.
_COUNTED = ("pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def modules() -> list[str]:
    """memlab's modules that `answers` needs, as a fresh Python loads them. Raises RuntimeError for torch."""
    code = (
        "import docs.calculator.answers, sys; "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('memlab', 'torch', 'numpy')))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found = said.stdout.split()
    if foreign := [name for name in found if not name.startswith("memlab")]:
        raise RuntimeError(f"the calculator's half of memlab imports what no browser has: {foreign[0]}")
    return found


def build(out: Path, vendor: Path = VENDOR) -> Path:
    """Write the page into `out`, which is made if need be; returns the page's path. Raises VendorError."""
    package = fetch("pyodide", PYODIDE, INTEGRITY, vendor)
    (out / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(package / name, out / "pyodide" / name)
    for name in OWN:
        shutil.copyfile(HERE / name, out / name)
    with zipfile.ZipFile(out / "memlab.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in modules():
            path = Path(*name.split("."))
            path = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
            _add(archive, str(path), (ROOT / path).read_bytes())
        _add(archive, "answers.py", (HERE / "answers.py").read_bytes())
    counted = [out / "pyodide" / name for name in _COUNTED] + [out / "memlab.zip"]
    data = {
        **answers.choices(),
        "colours": COLOURS,
        "bytes": sum(path.stat().st_size for path in counted),
        "version": f"memlab {__version__}, Pyodide {PYODIDE}",
    }
    page = (HERE / "index.html").read_text(encoding="utf-8")
    # "<" would let a name close the script element
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    (out / "index.html").write_text(page.replace("{{CHOICES}}", text), encoding="utf-8")
    return out / "index.html"


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """The same tree gives the same zip: no time of day in it."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m docs.calculator.build OUT")
    try:
        page = build(Path(sys.argv[1]))
    except VendorError as error:
        sys.exit(f"calculator: {error}")
    size = sum(path.stat().st_size for path in page.parent.rglob("*") if path.is_file())
    print(f"{page}: {size / 1e6:.1f} MB; serve it with: python -m http.server --directory {page.parent}")


if __name__ == "__main__":
    main()
