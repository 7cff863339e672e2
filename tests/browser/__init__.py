"""Pages in a headless browser: JupyterLab, the explorers, the viewer, the site and its calculator.

Short tests run in `make test`; those marked `long` in `make browser`. Pictures of what they saw lie in
build/browser/.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "browser"


def missing() -> str:
    """What a browser's test lacks on this machine; empty if nothing."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright isn't installed (pip install playwright)"
    return "" if CHROMIUM else "there is no Chromium on this machine (apt-get install chromium)"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The machine's own Chromium, started once. Without one: CI fails, elsewhere a skip says why."""
    if lack := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI looks at every page in a browser, but {lack}")
        pytest.skip(f"not looked at in a browser: {lack}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page in a context of its own, and everything that it complained of.

    `allowed` are the beginnings of addresses that it may ask for; any other request is a complaint, too.
    """

    def __init__(
        self, browser: Any, *allowed: str, width: int = 1280, height: int = 900, **context: Any
    ) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": height}, **context)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("request", lambda request: self._request(request.url, allowed))

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _request(self, url: str, allowed: tuple[str, ...]) -> None:
        if not url.startswith((*allowed, "data:", "blob:", "about:")):
            self.complaints.append(f"request: {url}")

    def picture(self, name: str, of: Any = None, **options: Any) -> Path:
        """A screenshot of the page, or of the element `of`, as build/browser/NAME.png."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        (of or self.page).screenshot(path=str(path), **options)
        return path

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.picture("failed")
        self.context.close()
