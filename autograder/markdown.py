"""Written answers as formgrader shows them: their own HTML is shown as text, and nothing is fetched.

Formgrader's pages have the rights of the instructor's Jupyter server, and nbconvert cleans outputs only.
"""

from __future__ import annotations

from html import escape
from typing import Any

from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath


class _Harmless(IPythonRenderer):
    def link(self, text: str, url: str, title: str | None = None) -> str:
        known = url.lower().startswith(("http://", "https://", "mailto:", "#"))
        return str(super().link(text, url, title)) if known else f"{text} ({escape(url)})"

    def image(self, text: str, url: str, title: str | None = None) -> str:
        shown = str(super().image(text, url, title))
        inside = url.startswith(("data:image/png;", "data:image/jpeg;", "attachment:"))
        return shown if inside else f"[{escape(text)}: {escape(url)}]"


def harmless(source: str) -> str:
    """Markdown → HTML, for `HTMLExporter.filters`."""
    renderer: Any = _Harmless(escape=True)
    return str(MarkdownWithMath(renderer=renderer).render(source))
