"""Pages of a course that was run: one for each chapter and the index. No scripts, nothing from the network.

Formulas are drawn as SVG by matplotlib's mathtext, so a page reads the same offline; one that mathtext
doesn't know stays as TeX. Widgets, which need a kernel, are left out: each has a static twin beside it.
"""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from traitlets.config import Config

from memlab.units import format_bytes

STYLE = Path(__file__).parent / "templates" / "page.css"

_LIVE = ("application/vnd.jupyter.widget-view+json", "application/javascript")
_REMOTE_IMAGE = re.compile(r'<img\b[^>]*\bsrc=["\'](?:https?:)?//[^>]*>', re.IGNORECASE)
_ALT = re.compile(r'\balt=["\']([^"\']*)["\']', re.IGNORECASE)


def chapter_page(notebook: Any, title: str, errors: Sequence[Mapping[str, str]] = ()) -> str:
    """An executed notebook as one HTML file; `errors` stand at its top, each with a link to its cell."""
    body, _ = _Exporter().from_notebook_node(_without_live_outputs(notebook))
    top = '<nav><a href="index.html">All chapters</a></nav>\n' + _errors(errors)
    return _page(title, f"{top}<main>{_local(body)}</main>", _code_css())


def _errors(errors: Sequence[Mapping[str, str]], page: str = "") -> str:
    items = "".join(
        f'<li><a href="{page}#cell-id={html.escape(error["cell"])}">{html.escape(error["cell"])}</a>: '
        f"{html.escape(error['message'])}</li>"
        for error in errors
    )
    return f'<ul class="errors">{items}</ul>\n' if items else ""


def index_page(data: Mapping[str, Any]) -> str:
    """The page of results.json's data: each chapter's headline numbers, time, memory and errors."""
    chapters = data["chapters"]
    failed = sum(chapter["status"] != "ok" for chapter in chapters)
    count = f"{len(chapters)} chapter{'s' * (len(chapters) != 1)}"
    version = "the student version, " if data["student"] else ""
    state = f"{failed} failed" if failed else "all of them ran to the end"
    lead = f"{count}, {version}{state}. The numbers below were made on this machine:"
    parts = [
        "<h1>Why training runs out of memory</h1>",
        f'<p class="lead">{html.escape(lead)}</p>',
        f'<p class="machine">{html.escape(data["machine"]["text"])}</p>',
        *(_chapter(chapter) for chapter in chapters),
    ]
    return _page("memlab: the course", "<main>" + "\n".join(parts) + "</main>")


def _chapter(chapter: Mapping[str, Any]) -> str:
    given = ", ".join(f"{name} {value}" for name, value in chapter["parameters"].items())
    facts = [
        f"{chapter['seconds']:.1f} s",
        f"{format_bytes(chapter['peak_resident_bytes'])} peak resident memory of its processes",
        f"{chapter['cells']} code cells",
        *([given] if given else []),
    ]
    page, notebook = html.escape(chapter["page"]), html.escape(chapter["notebook"])
    rows = "".join(
        '<tr><td class="value">{text}</td><td>{name}</td><td class="includes">{includes}</td></tr>'.format(
            **{key: html.escape(str(value)) for key, value in number.items()}
        )
        for number in chapter["headlines"]
    )
    title, status = html.escape(chapter["title"] or chapter["chapter"]), html.escape(chapter["status"])
    return (
        f'<section class="chapter"><header><h2><a href="{page}">{title}</a></h2>'
        f'<span class="status {status}">{status}</span></header>'
        f'<p class="facts">{html.escape(" · ".join(facts))} · <a href="{notebook}">notebook</a></p>'
        + (f'<table class="numbers">{rows}</table>' if rows else "")
        + _errors(chapter["errors"], page)
        + "</section>"
    )


def _page(title: str, body: str, css: str = "") -> str:
    style = STYLE.read_text(encoding="utf-8")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>\n{style}{css}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


@cache
def _code_css() -> str:
    light = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    clear = ".highlight { background: none !important; }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{clear}\n"


# --- notebooks to HTML ------------------------------------------------------------------------------------


def _without_live_outputs(notebook: Any) -> Any:
    notebook = copy.deepcopy(notebook)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        kept = []
        for output in cell.get("outputs", []):
            data = output.get("data")
            if data is not None:
                live = [data.pop(kind) for kind in _LIVE if kind in data]
                if live and set(data) <= {"text/plain"}:
                    continue
            kept.append(output)
        if "outputs" in cell:
            cell.outputs = kept
    return notebook


def _local(body: str) -> str:
    """Images from elsewhere become their text: a badge is still a link."""

    def text(match: re.Match[str]) -> str:
        alt = _ALT.search(match.group(0))
        return alt.group(1) if alt else ""

    return _REMOTE_IMAGE.sub(text, body)


class _Exporter(HTMLExporter):
    """nbconvert's HTML without its page around it: no prompts, no scripts, formulas drawn."""

    def __init__(self) -> None:
        config = Config()
        config.TagRemovePreprocessor.enabled = True
        config.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
        super().__init__(config=config, template_name="basic")  # type: ignore[no-untyped-call]
        self.exclude_input_prompt = self.exclude_output_prompt = True

    def default_filters(self) -> Any:
        """nbconvert's filters, with a Markdown that draws formulas."""
        yield from super().default_filters()  # type: ignore[no-untyped-call]
        yield ("markdown2html", _markdown)


def _markdown(source: str) -> str:
    return str(MarkdownWithMath(renderer=_Renderer(escape=False)).render(source))


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return formula(body)

    def block_math(self, body: str) -> str:
        return (
            f'<div class="math">{formula(body.replace(chr(92) + "frac", chr(92) + "dfrac"), size=19)}</div>'
        )

    def latex_environment(self, name: str, body: str) -> str:
        return "".join(
            self.block_math(row.replace("&", "")) for row in re.split(r"\\\\", body) if row.strip()
        )


def formula(tex: str, size: float = 16.5) -> str:
    """TeX as an inline SVG in the text's colour, `size` pixels to the em; as code where mathtext can't."""
    tex = " ".join(tex.split())
    drawn = re.sub(r"\\text\{([^}]*)\}", lambda m: r"\mathrm{" + m.group(1).replace(" ", r"\ ") + "}", tex)
    font = FontProperties(math_fontfamily="cm", size=size)
    try:
        width, height, depth, *_ = MathTextParser("path").parse(f"${drawn}$", dpi=72, prop=font)
        outline = TextPath((0, 0), f"${drawn}$", size=size, prop=font)
    except (ValueError, RuntimeError):
        return f"<code>{html.escape(tex)}</code>"
    label = html.escape(tex, quote=True)
    return (
        f'<svg class="math" role="img" aria-label="{label}" width="{width:.1f}" height="{height:.1f}" '
        f'viewBox="0 {depth - height:.2f} {width:.2f} {height:.2f}" style="vertical-align:{-depth:.1f}px">'
        f'<path d="{_svg_path(outline)}"/></svg>'
    )


def _svg_path(outline: Outline) -> str:
    letters = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C"}
    parts = []
    for points, code in outline.iter_segments(curves=True, simplify=False):
        if code == Outline.CLOSEPOLY:
            parts.append("Z")
        elif code in letters:
            numbers = [f"{-v if i % 2 else v:.2f}" for i, v in enumerate(points)]
            parts.append(letters[code] + " ".join(numbers))
    return "".join(parts)
