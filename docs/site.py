"""Builds the site: the chapters as they ran, guides, reference and calculator, for a browser without network.

    python -m docs.site --out build/site        # `make site` runs the chapters first, where they are stale

What is written by hand lies in docs/pages; the rest is gathered into build/site-source from the executed
chapters (build/course), the guide for instructors, ARCHITECTURE.md, the docstrings and benchmarks/results.
Sphinx makes pages of it, and every warning is an error. The finished site takes the place of the old one only
when all of it is there. Needs the extra `site`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat

from autograder import build
from autograder.course import CourseError, chapters
from docs import reference
from docs.chapters import REPOSITORY, SiteError, headline_table, page, points
from docs.vendor import VendorError, fetch

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "build" / "course"
SOURCE = ROOT / "build" / "site-source"
DOCTREES = ROOT / "build" / "site-doctrees"

#: TeX in the browser, as SVG: one script, no fonts, no further requests (MathJax 4 asks for more).
MATHJAX = (
    "mathjax",
    "3.2.2",
    "sha512-Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
)

#: Files of the repository that are pages of the site.
GUIDES = {
    "autograder/README.md": "instructors.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}

#: Commands whose output the page for engineers shows; run while the site is built.
EXAMPLES = {
    "footprint": "memlab footprint llama2-70b --precision bf16 --checkpointing full",
    "plan": "memlab plan llama2-7b --gpu A100-80GB --count 8 --seq 4096 --effective-batch 64",
    "oom": "memlab oom train.log",
    "gpus": "memlab gpus",
    "models": "memlab models",
}
#: The message that the example of `memlab oom` reads.
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 0 has a total capacity of "
    "14.75 GiB of which 275.19 MiB is free. Including non-PyTorch memory, this process has 14.48 GiB memory "
    "in use. Of the allocated memory 14.12 GiB is allocated by PyTorch, and 222.50 MiB is reserved by "
    "PyTorch but unallocated.\n"
)


# --- the source ---------------------------------------------------------------------------------------------


def gather() -> dict[str, bytes]:
    """Every file of the site's source: path -> content. Raises SiteError where chapters haven't been run."""
    files: dict[str, bytes] = {}
    for path in sorted((ROOT / "docs" / "pages").rglob("*")):
        if path.is_file():
            files[path.relative_to(ROOT / "docs" / "pages").as_posix()] = path.read_bytes()
    files["images/timeline.png"] = (ROOT / "docs" / "images" / "timeline.png").read_bytes()
    files |= _chapters(files["chapters/index.md"].decode())
    for name, target in GUIDES.items():
        if (path := ROOT / name).exists():
            files[target] = _guide(path.read_text("utf-8"), Path(name)).encode()
        else:
            files["index.md"] = files["index.md"].replace(f"\n{Path(target).stem}\n".encode(), b"\n")
    for name, text in reference.pages().items():
        files[f"reference/{name}"] = text.encode()
    results = ROOT / "benchmarks" / "results"
    for path in sorted(results.glob("*.txt")):
        files[f"results/{path.name}"] = path.read_bytes()
    summary, rows = _accuracy((results / "accuracy.txt").read_text("utf-8"))
    files["results/accuracy-summary.txt"] = summary.encode()
    files["results/accuracy-rows.txt"] = rows.encode()
    for name, text in _examples().items():
        files[f"examples/{name}.txt"] = text.encode()
    return files


def _chapters(index: str) -> dict[str, bytes]:
    """The chapters' pages, their figures, the students' notebooks, and the `index` page with numbers in."""
    try:
        results = json.loads((COURSE / "results.json").read_text("utf-8"))
    except OSError:
        raise SiteError("no chapter has been run: `autograder run --out build/course` first") from None
    every = chapters(ROOT)
    ok = {chapter["chapter"] for chapter in results["chapters"] if chapter["status"] == "ok"}
    if lacking := [chapter.name for chapter in every if chapter.name not in ok]:
        raise SiteError(
            f"not run to the end: {', '.join(lacking)}: `autograder run --out build/course` first"
        )
    files: dict[str, bytes] = {}
    machine = results["machine"]["text"]
    worth: dict[str, str] = {}
    for built in build.build_all(every):
        name = built.chapter.name
        text = (COURSE / f"{name}.ipynb").read_text("utf-8")
        executed = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]
        worth[name] = points(built)
        shown, figures = page(built, executed, machine)
        files[f"chapters/{name}.ipynb"] = build.to_text(shown).encode()
        files[f"notebooks/{name}.ipynb"] = build.to_text(built.release).encode()
        for figure, png in figures.items():
            files[f"extra/figures/{figure}"] = png
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(chapter.name for chapter in every), "```", ""])
    index = index.replace("HEADLINES", headline_table(results, worth)).replace("MACHINE", machine)
    files["chapters/index.md"] = f"{index}\n{toctree}".encode()
    return files


def _guide(text: str, path: Path) -> str:
    """A guide of the repository as a page: links to files go to their page here, else to the repository."""

    def link(match: re.Match[str]) -> str:
        target, _, anchor = match.group(1).partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match.group(0)
        name = os.path.normpath(path.parent / target)
        if name in GUIDES and (ROOT / name).exists():
            return f"]({GUIDES[name]}{'#' + anchor if anchor else ''})"
        if name == "README.md":
            return "](index.md)"
        if re.fullmatch(r"notebooks/\w+\.ipynb", name):
            return f"](chapters/{Path(name).name})"
        if not (ROOT / name).exists():
            raise SiteError(f"{path}: links to {target}, which isn't there")
        kind = "tree" if (ROOT / name).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{name}{'#' + anchor if anchor else ''})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def _accuracy(text: str) -> tuple[str, str]:
    """benchmarks/results/accuracy.txt in two: what it comes to, and row by row."""
    parts = text.split("\n\n")
    rows = next((part for part in parts if re.match(r"\s*\d+  allocated", part)), "")
    if not rows or "skipped:" not in text:
        raise SiteError("benchmarks/results/accuracy.txt: not in the form that docs/site.py reads")
    rest = [part for part in parts if part is not rows and not part.startswith("skipped:")]
    return "\n\n".join(rest).strip() + "\n", rows + "\n"


def _examples() -> dict[str, str]:
    """What the commands of EXAMPLES print, and each command's help."""
    environment = dict(os.environ) | {"COLUMNS": "92", "NO_COLOR": "1", "TYPER_USE_RICH": "0", "TERM": "dumb"}
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "train.log").write_text(LOG)

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "memlab", *arguments],
                capture_output=True,
                text=True,
                cwd=scratch,
                env=environment | {"PYTHONPATH": str(ROOT)},
                timeout=300,
            )
            if done.returncode:
                raise SiteError(f"memlab {' '.join(arguments)} failed: {done.stderr.strip()[-300:]}")
            return done.stdout.rstrip() + "\n"

        for name, command in EXAMPLES.items():
            found[name] = f"$ {command}\n" + run(*command.split()[1:])
        commands = re.findall(r"^  ([a-z]+)  ", run("--help").partition("Commands:")[2], re.MULTILINE)
        found["help"] = "\n\n".join(run(command, "--help").rstrip() for command in commands) + "\n"
    return found


def write(files: dict[str, bytes], into: Path) -> None:
    """Make `into` hold these files and no others; one that hasn't changed keeps its time for Sphinx."""
    for name, content in files.items():
        path = into / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in into.rglob("*"):
        if path.is_file() and path.relative_to(into).as_posix() not in files:
            path.unlink()


# --- the pages as built -------------------------------------------------------------------------------------

_SUMMARY = re.compile(r"(<a [^>]*>([^<]*)</a><details[^>]*><summary)>")
_SEARCH = re.compile(r'(<button class="btn search-button-field [^>]*) aria-label="Search"')
_SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)


def accessible(page: str) -> str:
    """A built page, with what screen readers miss in the theme's and Sphinx's HTML put right.

    The sidebar's arrows get a name. The search button is called what it shows. The lines of a signature are
    no list of definitions, which `dl` with nothing but `dd` in it would be.
    """
    page = _SUMMARY.sub(r'\1 aria-label="Pages of \2">', page)
    page = _SEARCH.sub(r"\1", page)

    def lines(match: re.Match[str]) -> str:
        text = re.sub(r"<(/?)dd>", r"<\1div>", match.group())
        return text.replace("<dl>", '<div class="sig-lines">').replace("</dl>", "</div>")

    return _SIGNATURE.sub(lines, page)


# --- the site -----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site; 0 when it is there, 1 with a line that says why not."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="the site's folder")
    out: Path = parser.parse_args(arguments).out.resolve()
    try:
        from sphinx.cmd.build import main as sphinx
    except ImportError:
        print("the site needs Sphinx: pip install 'memlab[site]'", file=sys.stderr)
        return 1
    try:
        mathjax = fetch(*MATHJAX) / "es5" / "tex-svg.js"
        files = gather()
    except (SiteError, VendorError, CourseError) as error:
        print(error, file=sys.stderr)
        return 1
    files["extra/_static/mathjax/tex-svg.js"] = mathjax.read_bytes()
    write(files, SOURCE)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        fresh = Path(scratch) / "site"
        options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(ROOT / "docs"), "-d", str(DOCTREES)]
        if code := sphinx([*options, str(SOURCE), str(fresh)]):
            return int(code)
        for path in fresh.rglob("*.html"):
            path.write_text(accessible(path.read_text("utf-8")), "utf-8")
        for path in [*(fresh / "_static").rglob("*.map"), *(fresh / "_static").rglob("*macros.html")]:
            path.unlink()  # 3.5 MB for whoever debugs the theme, and its templates
        made = subprocess.run(
            [sys.executable, "-m", "docs.calculator.build", str(fresh / "calculator")],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        if made.returncode:
            return made.returncode
        (fresh / ".buildinfo").unlink(missing_ok=True)
        if out.exists():
            out.rename(Path(scratch) / "old")
        fresh.rename(out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    pages = sum(1 for _ in out.rglob("*.html"))
    print(f"{out}: {pages} pages, {size / 10**6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
