"""What axe-core, the usual checker of accessibility, finds wrong on a page. Pinned; from npm."""

from __future__ import annotations

import os
from typing import Any

import pytest

from docs.vendor import VENDOR, VendorError, fetch

VERSION = "4.14.1"
INTEGRITY = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="

#: axe's own names for what the levels A and AA of WCAG 2.0 to 2.2 ask.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def violations(page: Any, include: str | None = None, exclude: tuple[str, ...] = ()) -> list[str]:
    """A line for each serious or critical violation on `page`, or in the elements that `include` selects.

    `exclude` are selectors of what isn't ours. Where axe-core can't be had: fails in CI, else skips aloud.
    """
    try:
        script = (fetch("axe-core", VERSION, INTEGRITY, VENDOR) / "axe.min.js").read_text("utf-8")
    except VendorError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"accessibility wasn't checked: {error}")
    page.evaluate(script)
    context: dict[str, Any] = {"exclude": [[selector] for selector in exclude]}
    if include is not None:
        assert page.locator(include).count(), f"nothing on the page is {include}"
        context["include"] = [[include]]
    found = page.evaluate(
        "([context, rules]) => axe.run(context.include || context.exclude.length ? context : document, "
        "{runOnly: rules, resultTypes: ['violations']})",
        [context, RULES],
    )
    return [
        f"{violation['impact']} {violation['id']}: {violation['help']}: {node['html'][:200]} "
        f"({' '.join(map(str, node['target']))})"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]
