"""The built site, as readers get it: links, secrets, no network, search, dark mode, small windows, axe."""

from __future__ import annotations

import functools
import json
import re
import threading
import zipfile
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from autograder import build
from autograder.course import select
from tests.browser import ROOT, Watched
from tests.browser.axe import violations
from tests.site.hidden import Hidden, squeeze, text_of

pytestmark = [pytest.mark.site, pytest.mark.long]

HOME, CHAPTER, MODULE = "index.html", "chapters/02_four_consumers.html", "reference/memlab.footprint.html"
NAMES = [chapter.name for chapter in select(ROOT)]


@pytest.fixture(scope="session")
def site() -> Path:
    folder = ROOT / "build" / "site"
    assert (folder / HOME).exists(), "there is no site: make site"
    return folder


class Page(HTMLParser):
    """What a page points to, and what can be pointed to in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.without_alt: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and "href" in given:
            self.loads.append(given["href"])
        self.loads += [given[name] for name in ("src", "data-src", "poster") if name in given]
        if tag == "img" and not given.get("alt"):
            self.without_alt.append(given.get("src", "?"))


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_chapter_guide_and_module_has_a_page(pages: dict[Path, Page], site: Path) -> None:
    there = {path.relative_to(site).as_posix() for path in pages}
    wanted = [HOME, MODULE, "engineers.html", "instructors.html", "accuracy.html", "calculator/index.html"]
    assert {*wanted, *(f"chapters/{name}.html" for name in NAMES)} <= there
    assert sum(name.startswith("reference/") for name in there) > 30


def test_links_and_anchors_within_the_site_resolve(pages: dict[Path, Page], site: Path) -> None:
    """What a fragment with `=` in it says to the calculator isn't an anchor."""

    def anchors(target: Path) -> set[str]:
        return {"", *pages[target].ids} if target in pages else {""}

    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("#", ""):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_relative_to(site) or not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}: no such file")
            elif unquote(parts.fragment) not in anchors(target) and "=" not in parts.fragment:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert not broken, "\n".join(broken)


def test_what_leads_outside_is_a_link_that_a_reader_clicks(pages: dict[Path, Page], site: Path) -> None:
    outside = {
        link
        for page in pages.values()
        for link in page.links
        if urlsplit(link).scheme or link.startswith("//")
    }
    assert len(outside) > 10
    for link in sorted(outside):
        assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/\S*)?", link), link
    loaded = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.loads
        if re.match(r"[a-z]+:|//", address) and not address.startswith("data:")
    ]
    assert not loaded
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s;]+)", sheet.read_text("utf-8")):
            assert not re.match(r"https?:|//", address), f"{sheet.name} loads {address}"


def test_no_line_of_a_solution_is_on_the_site(site: Path) -> None:
    hidden = Hidden(build.build_all(select(ROOT)))
    assert len(hidden.code) > 200 and len(hidden.prose) > 30
    found = []
    read = 0
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site)
        if path.suffix in (".html", ".ipynb", ".txt", ".md", ".rst", ".py"):
            found += [f"{name}: {line}" for line in hidden.found(text_of(path))]
            read += 1
        elif path.suffix in (".js", ".mjs", ".json", ".xml", ".svg"):
            found += [f"{name}: {line}" for line in hidden.found_anywhere(path.read_text("utf-8"))]
        elif path.suffix in (".zip", ".whl"):
            names = zipfile.ZipFile(path).namelist()
            assert not [inner for inner in names if re.search(r"solutions|\.ipynb|exercises/", inner)], name
    assert read > 60
    assert not found, "\n".join(found)


def test_a_solution_would_be_found(site: Path) -> None:
    """The same search finds what a student does get, so it would find what they don't."""
    hidden = Hidden([])
    hidden.code = {'optimizer: "sgd" (no momentum), "momentum", "adamw" or "adamw-8bit"'}
    hidden.prose = {
        squeeze("They go to four consumers: parameters, gradients, optimizer states and activations.")
    }
    assert len(hidden.found(text_of(site / CHAPTER))) == 2
    hidden.prose = {"fragment"}
    assert hidden.found_anywhere((site / "searchindex.js").read_text("utf-8"))


def test_evidence_and_hidden_inputs_are_not_on_the_site(site: Path) -> None:
    for path in [*site.glob("chapters/*"), *site.rglob("*.ipynb"), *site.glob("*.js")]:
        text = path.read_text("utf-8")
        assert "memlab.evidence" not in text and "BEGIN SOLUTION" not in text, path


@pytest.mark.parametrize("name", NAMES)
def test_a_chapter_has_all_its_figures_and_its_explorer(name: str, site: Path) -> None:
    executed = json.loads((ROOT / "build" / "course" / f"{name}.ipynb").read_text("utf-8"))
    outputs = [output for cell in executed["cells"] for output in cell.get("outputs", [])]
    figures = sum("image/png" in output.get("data", {}) for output in outputs)
    text = (site / "chapters" / f"{name}.html").read_text("utf-8")
    assert figures and len(re.findall(r'<img class="figure"', text)) == figures
    assert "widgets." in text and "widget-view" not in text


def test_every_picture_has_a_text(pages: dict[Path, Page], site: Path) -> None:
    assert not {path.name: page.without_alt for path, page in pages.items() if page.without_alt}
    largest = max((path.stat().st_size, path.name) for path in site.glob("figures/*.png"))
    assert largest[0] < 300_000, largest


def test_the_site_is_small(site: Path) -> None:
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    ours = size - sum(path.stat().st_size for path in (site / "calculator").rglob("*") if path.is_file())
    assert ours < 20 * 10**6, f"{ours:,} bytes without the calculator"


# --- in a browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def address(site: Path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *arguments: object) -> None:
            """A page that is left while it loads isn't worth a traceback."""

    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def watch(chromium, address: str):
    """Opens a page of the site; at the end it must have complained of nothing and asked nobody else."""
    opened: list[Watched] = []

    def at(path: str, **options) -> Watched:
        watched = Watched(chromium, address, **options)
        opened.append(watched)
        watched.page.goto(address + path)
        watched.page.wait_for_load_state("networkidle")
        return watched

    yield at
    for watched in opened:
        watched.context.close()
        assert not watched.complaints


@pytest.mark.parametrize(
    "path", [HOME, "chapters/index.html", CHAPTER, MODULE, "instructors.html", "accuracy.html"]
)
def test_pages_ask_nobody_else_and_are_accessible_by_day_and_night(watch, path: str) -> None:
    watched = watch(path)
    assert violations(watched.page) == []
    _mode(watched.page, "dark")
    assert violations(watched.page) == []


def _mode(page, wanted: str) -> None:
    """Choose light or dark as a reader does."""
    page.get_by_role("button", name="Color mode").click()
    page.get_by_role("button", name=wanted.capitalize(), exact=True).click()
    assert page.evaluate("document.documentElement.dataset.theme") == wanted
    page.wait_for_function("document.getAnimations().every(each => each.playState !== 'running')")


def test_dark_mode_is_kept_from_page_to_page_and_figures_stay_on_white(watch) -> None:
    watched = watch(HOME)
    page = watched.page
    background = "getComputedStyle(document.body).backgroundColor"
    _mode(page, "light")
    light = page.evaluate(background)
    _mode(page, "dark")
    assert page.evaluate(background) != light
    watched.picture("site-home-dark")
    page.get_by_role("link", name="memory basics").click()
    page.wait_for_load_state("networkidle")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    white = "getComputedStyle(document.querySelector('img.figure')).backgroundColor"
    assert page.evaluate(white) == "rgb(255, 255, 255)"


def test_search_finds_a_word_and_leads_to_it(watch) -> None:
    watched = watch(HOME)
    page = watched.page
    page.keyboard.press("Control+k")
    page.keyboard.type("fragmentation")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a")
    results = page.locator("#search-results li a")
    assert results.count() >= 3
    watched.picture("site-search")
    results.first.click()
    page.wait_for_load_state("networkidle")
    assert "fragment" in page.locator("main").inner_text().lower()


@pytest.mark.parametrize(
    "path", [HOME, "chapters/index.html", *(f"chapters/{name}.html" for name in NAMES), MODULE,
             "reference/memlab.recipe.html", "engineers.html", "accuracy.html", "instructors.html"],
)  # fmt: skip
def test_a_phone_scrolls_down_and_not_sideways(watch, path: str) -> None:
    watched = watch(path, width=400, height=800)
    assert watched.overflow() <= 0
    if path == HOME:
        watched.picture("site-home-phone")


def test_formulas_are_drawn_without_a_network(watch) -> None:
    page = watch(CHAPTER).page
    page.wait_for_selector("mjx-container svg")
    assert page.locator("mjx-container").count() > 10
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0


def test_the_home_page_says_in_one_screen_what_it_is_and_for_whom(watch) -> None:
    page = watch(HOME).page
    for name in ("Students", "Engineers", "Instructors"):
        box = page.locator(".card-of", has_text=name).first.bounding_box()
        assert box and box["y"] + box["height"] <= 900, name
    picture = page.locator("img.hero").bounding_box()
    assert picture and picture["y"] < 400
    page.get_by_role("link", name="The calculator").last.click()
    page.wait_for_url("**/calculator/index.html")


def test_a_chapters_notebook_downloads_as_the_student_gets_it(watch) -> None:
    page = watch(CHAPTER).page
    with page.expect_download() as download:
        page.get_by_role("link", name="Download the notebook").click()
    given = Path(download.value.path()).read_bytes()
    assert given == build.to_text(build.build(select(ROOT, ["2"])[0]).release).encode()
