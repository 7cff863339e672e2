"""Executed chapters as pages of the site: what ran stays, solutions go.

An executed chapter has the solutions in it. Its page has each exercise's cell as a student gets it
(nbgrader's preprocessors make it, as for `notebooks/`) and the outputs of the run, without what only a
machine reads: the evidence for the grader, widgets that need a kernel, the bare points under a check.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import re
from collections.abc import Mapping
from typing import Any

from autograder.build import Built, leaks

#: What an output may hold on a page, the best first. A widget is left out: its static twin stands beside it.
SHOWN = ("text/html", "text/markdown", "text/latex", "text/plain")

REPOSITORY = "https://github.com/memlab-course/memlab"
COLAB = "https://colab.research.google.com/github/memlab-course/memlab/blob/main/notebooks"
BINDER = "https://mybinder.org/v2/gh/memlab-course/memlab/main?urlpath=lab/tree/notebooks"


class SiteError(Exception):
    """What keeps the site from being built: one line that says what to do."""


def page(built: Built, executed: Any, machine: str) -> tuple[Any, dict[str, bytes]]:
    """The notebook to show for a chapter that ran, and its figures: file name in `figures/` -> PNG.

    It is `executed` without solutions, with links at its top. Figures stand beside the page, each with its
    text alternative and its size, so that a page is light and nothing jumps while it loads.
    """
    name = built.chapter.name
    source = {cell.id: cell for cell in built.source.cells}
    released = {cell.id: cell for cell in built.release.cells}
    shown = copy.deepcopy(executed)
    shown.metadata = {
        key: shown.metadata[key] for key in ("kernelspec", "language_info") if key in shown.metadata
    }
    shown.cells = [cell for cell in shown.cells if cell.id in source]
    ran = [(cell.id, cell.source) for cell in shown.cells]
    if ran != [(cell.id, cell.source) for cell in built.source.cells]:
        raise SiteError(
            f"{name}: the executed chapter isn't this source: run `autograder run --out build/course`"
        )
    figures: dict[str, bytes] = {}
    for cell in shown.cells:
        check = bool(cell.metadata.get("nbgrader", {}).get("grade")) and cell.cell_type == "code"
        cell.source = released[cell.id].source
        cell.metadata = {"tags": list(cell.metadata.get("tags", []))}
        if cell.cell_type == "code":
            kept = (_output(output, check, figures) for output in cell.outputs)
            cell.outputs = [output for output in kept if output is not None]
    found = [line for line in leaks(built.cells, shown) if not line.endswith("has outputs")]
    if found:
        raise SiteError("\n".join(f"{name}: {line}" for line in found))
    _links(shown, name, machine)
    return shown, figures


def _output(output: Any, check: bool, figures: dict[str, bytes]) -> Any:
    """An output as the page shows it, or None. Under a check the points stand in its message already."""
    output = copy.deepcopy(output)
    if output.output_type == "error":
        output.traceback = [f"{output.ename}: {output.evalue}"]  # without the lines that raised it
    if output.output_type in ("stream", "error"):
        return output
    if check and output.output_type == "execute_result":
        return None
    if "application/vnd.jupyter.widget-view+json" in output.data:
        return None
    if "image/png" in output.data:
        png = base64.b64decode(output.data["image/png"])
        alternative = output.metadata.get("image/png", {}).get("alt") or output.data.get("text/plain", "")
        output.data = {"text/html": _figure(png, alternative, figures)}
    output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
    output.metadata = {}
    return output if output.data else None


def _figure(png: bytes, alternative: str, figures: dict[str, bytes]) -> str:
    name = f"{hashlib.sha256(png).hexdigest()[:16]}.png"
    figures[name] = png
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # the header, IHDR
    return (
        f'<img class="figure" src="../figures/{name}" width="{width}" height="{height}" loading="lazy" '
        f'alt="{html.escape(alternative, quote=True)}">'
    )


def _links(shown: Any, name: str, machine: str) -> None:
    """Under the title: where to run the chapter, and what the reader sees here."""
    heading, _, rest = shown.cells[0].source.partition("\n")
    if not heading.startswith("# "):
        raise SiteError(f"{name}: its first cell doesn't begin with a title")
    shown.cells[0].source = "\n".join(
        [
            heading,
            "",
            ":::{container} run-it",
            f"[Open in Colab]({COLAB}/{name}.ipynb) [Open in Binder]({BINDER}/{name}.ipynb) "
            f"{{download}}`Download the notebook <../notebooks/{name}.ipynb>`",
            ":::",
            "",
            ":::{container} as-run",
            f"This page shows the chapter as it ran on {machine}. Solutions are left out: an exercise's cell "
            "is as you get it, and the message of the check under it is that of a right answer. An explorer "
            "shows where it starts; its controls need a running notebook.",
            ":::",
            "",
            rest.lstrip("\n"),
        ]
    )


def points(built: Built) -> str:
    """What a chapter's exercises are worth, in words."""
    graded = [cell for cell in built.release.cells if "points" in cell.metadata.get("nbgrader", {})]
    worth = {
        kind: sum(cell.metadata["nbgrader"]["points"] for cell in graded if cell.cell_type == kind)
        for kind in ("code", "markdown")
    }
    return f"{worth['code']:g} points, and {worth['markdown']:g} for a written answer"


def headline_table(results: Mapping[str, Any], points: Mapping[str, str]) -> str:
    """Markdown: the chapters of results.json with the numbers that each states, and their `points`."""
    parts = []
    for chapter in results["chapters"]:
        name = chapter["chapter"]
        parts += [
            f"## [{chapter['title']}]({name}.ipynb)",
            "",
            f"{points[name]}. Runs in {chapter['seconds']:.0f} s. "
            f"[Colab]({COLAB}/{name}.ipynb), [Binder]({BINDER}/{name}.ipynb), "
            f"{{download}}`notebook <../notebooks/{name}.ipynb>`.",
            "",
        ]
        if chapter["headlines"]:
            parts += ["| | number | what it includes |", "|---|---:|---|"]
            parts += [
                "| {name} | {text} | {includes} |".format(
                    **{key: _cell(str(number[key])) for key in ("name", "text", "includes")}
                )
                for number in chapter["headlines"]
            ]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Plain text in a cell of a Markdown table."""
    return re.sub(r"([\\|*_`\[\]$<])", r"\\\1", text)
