"""Sphinx's configuration; `docs.site` gathers the pages and calls it."""

from __future__ import annotations

import builtins
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docutils import nodes  # noqa: E402
from sphinx.addnodes import pending_xref, pending_xref_condition  # noqa: E402

import memlab  # noqa: E402
from docs import reference  # noqa: E402
from docs.chapters import REPOSITORY  # noqa: E402

project = "memlab"
author = "the memlab authors"
copyright = "the memlab authors, BSD-3-Clause"
release = version = memlab.__version__
language = "en"
smartquotes = False  # a quote in a docstring may be code

extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["extra", "notebooks", "examples", "results"]
default_role = "py:obj"  # a name of the library becomes a link, anything else code

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, Any] = {}
nb_render_markdown_format = "myst"
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "attrs_block"]
myst_heading_anchors = 3
myst_dmath_double_inline = True
mathjax_path = "mathjax/tex-svg.js"

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 78
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "memlab"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = [str(ROOT / "build" / "site-source" / "extra")]
html_copy_source = False  # a chapter's notebook, to download, is the student's
html_context = {"default_mode": "auto"}
html_show_sphinx = False
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "sbt-sidebar-nav.html"]}
html_theme_options: dict[str, Any] = {
    "repository_url": REPOSITORY,
    "use_repository_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "search_bar_text": "Search",
    "toc_title": "On this page",
    "show_toc_level": 2,
    "logo": {"text": "memlab"},
}


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    arguments: list[str] = []
    if what in ("function", "method", "class"):
        try:
            arguments = list(inspect.signature(thing).parameters)
        except (TypeError, ValueError):
            arguments = []
    lines[:] = reference.rst(lines, arguments)


def _skip(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """What a module only imports is documented where it is written."""
    written = getattr(thing, "__module__", None)
    if isinstance(written, str) and written and not written.startswith("memlab"):
        return True
    here = app.env.current_document.autodoc_module if hasattr(app.env, "current_document") else ""
    if what == "module" and here and isinstance(written, str) and written != here:
        return True
    return None


def _signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A dataclass's default made by a function isn't Python, and Sphinx would then set nothing in it."""
    return (signature.replace("<factory>", "...") if signature else signature), returns


def _builtins(app: Any, doctree: Any) -> None:
    """Python's own names aren't links: `bytes` would be taken for some class's attribute of that name."""
    for node in list(doctree.findall(pending_xref)):
        if node.get("refdomain") == "py" and node["reftarget"] in vars(builtins):
            resolved = isinstance(node.children[0], pending_xref_condition)
            node.replace_self([nodes.Text(node["reftarget"])] if resolved else node.children)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-read", _builtins)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-skip-member", _skip)
