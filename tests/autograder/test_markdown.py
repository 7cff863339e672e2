"""What the instructor's browser is given of a hostile notebook: no script, nothing that is fetched."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from traitlets.config import Config

from autograder.gradebook import _FORMGRADER

MARK = "stolen"
_SCRIPT = f"<script>{MARK}()</script>"
HOSTILE = (
    _SCRIPT,
    f"<img src=x onerror={MARK}()>",
    f"<img src='https://example.org/{MARK}.png'>",
    f"<svg onload={MARK}()><script>{MARK}()</script></svg>",
    f"<a href='javascript:{MARK}()'>x</a>",
    f"<iframe srcdoc='{_SCRIPT}'></iframe>",
    f"<form action='https://example.org/{MARK}'><input autofocus onfocus={MARK}()></form>",
    f"<style>body {{ background: url(https://example.org/{MARK}) }}</style>",
    f"<div style='background: url(https://example.org/{MARK})' onclick='{MARK}()'>x</div>",
    f"</pre></div></script>{_SCRIPT}",
    f"<meta http-equiv=refresh content='0; url=https://example.org/{MARK}'>",
    f"<math><mtext></table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror={MARK}()&gt;'>",
)


class _Page(HTMLParser):
    """What a page would run or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.harm: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag if tag in ("script", "style") else ""
        for name, value in attrs:
            text = (value or "").strip().lower()
            fetched = name in ("src", "srcset", "data", "action", "style", "content", "srcdoc", "poster")
            if name.startswith("on") or (MARK in text and fetched and not text.startswith("data:image/")):
                self.harm.append(f"{tag} {name}={value}")
            if name in ("href", "xlink:href") and text.startswith(("javascript:", "data:", "vbscript:")):
                self.harm.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside and f"{MARK}(" in data and "application/" not in data:
            self.harm.append(f"{self.inside}: {data[:80]}")


def shown(notebook: Any) -> list[str]:
    """What would run or be fetched of a notebook that formgrader shows with the configuration it gets."""
    config = Config()
    exec(_FORMGRADER, {"get_config": lambda: config})
    page = _Page()
    page.feed(HTMLExporter(config=config, template_name="classic").from_notebook_node(notebook)[0])
    return page.harm


def hostile() -> Any:
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.title = f"</title>{_SCRIPT}"
    state = {"state": {"a": f"</script>{_SCRIPT}"}, "version_major": 2, "version_minor": 0}
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": state}
    for text in HOSTILE:
        notebook.cells.append(nbformat.v4.new_markdown_cell(text))
        notebook.cells.append(
            nbformat.v4.new_markdown_cell(f"[x](javascript:{MARK}()) ![x](https://x/{MARK})")
        )
        notebook.cells.append(nbformat.v4.new_raw_cell(text))
        data = dict.fromkeys(
            ("text/html", "text/markdown", "text/plain", "text/latex", "image/svg+xml"), text
        )
        cell = nbformat.v4.new_code_cell(f"# {text}")
        cell.outputs = [
            *(nbformat.v4.new_output("display_data", data={kind: text}) for kind in data),
            nbformat.v4.new_output("stream", name="stdout", text=f"\x1b[31m{text}"),
            nbformat.v4.new_output("error", ename=text, evalue=text, traceback=[text]),
        ]
        notebook.cells.append(cell)
    return notebook


def test_nothing_of_a_hostile_notebook_runs_or_is_fetched() -> None:
    assert shown(hostile()) == []


def test_the_page_would_show_it() -> None:
    """The negative control: the same notebook as nbconvert shows it without the configuration."""
    page = _Page()
    page.feed(HTMLExporter(template_name="classic").from_notebook_node(hostile())[0])
    assert len(page.harm) > 20
