"""`make lab` as a student meets it: start page, nbgrader's menu, a chapter worked through, explorers."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser import ROOT, Watched
from tests.browser.axe import violations
from tests.browser.server import TOKEN, home, jupyter

pytestmark = pytest.mark.browser
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
CHAPTER = "02_four_consumers"
WRONG = """def states(parameters, precision, optimizer, offload=False):
    return {"parameters": 4 * parameters, "gradients": 4 * parameters, "optimizer_states": 8 * parameters}
"""  # fp32 and AdamW, whatever was asked


#: What of an element lies right of the window and in nothing that scrolls.
STICKS_OUT = """root => [...root.querySelectorAll('*')].filter(e => {
  if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let up = e.parentElement; up && up !== root; up = up.parentElement)
    if (/auto|scroll/.test(getComputedStyle(up).overflowX)) return false;
  return true;
}).map(e => e.outerHTML.slice(0, 80))"""


#: Pixels that the chosen option of a menu lacks.
CUT_OFF = """menu => {
  const g = document.createElement('canvas').getContext('2d'), style = getComputedStyle(menu);
  g.font = style.font;
  return g.measureText(menu.selectedOptions[0].text).width
    - (menu.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}"""
#: What around an element is wider inside than outside.
SCROLLED = """e => {
  const found = [];
  for (let up = e.parentElement; up && !up.matches('.jp-Notebook'); up = up.parentElement) {
    const scrolls = getComputedStyle(up).overflowX !== 'visible';
    if (scrolls && up.scrollWidth > up.clientWidth) found.push(up.className);
  }
  return found;
}"""


class Student(Watched):
    """A browser in which one person works in JupyterLab."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        super().__init__(browser, address, address.replace("http", "ws"), **context)
        self.address = address

    def goto(self, path: str) -> None:
        self.page.goto(f"{self.address}/{path}?token={TOKEN}")

    def open(self, name: str, interface: str = "lab/tree") -> None:
        self.goto(f"{interface}/{name}.ipynb")
        self.ready(name)

    def ready(self, name: str) -> None:
        """Waits until the notebook has its kernel: the server knows, whatever a narrow page shows of it."""
        until = time.monotonic() + 60
        while True:
            sessions = self.page.request.get(f"{self.address}/api/sessions?token={TOKEN}").json()
            states = {session["path"]: session["kernel"]["execution_state"] for session in sessions}
            if states.get(f"{name}.ipynb") == "idle":
                break
            assert time.monotonic() < until, states
            self.page.wait_for_timeout(200)
        self.page.wait_for_timeout(1000)  # the page hears of it

    def menu(self, name: str, item: str) -> None:
        entry = self.page.locator(f".lm-Menu-itemLabel:text-is('{item}')")
        until = time.monotonic() + 30
        while not entry.is_visible():  # a page that still settles closes its menu again
            assert time.monotonic() < until, f"no {item} in the menu {name}"
            self.page.keyboard.press("Escape")
            self.page.click(f".lm-MenuBar-itemLabel:text-is('{name}')")
            self.page.wait_for_timeout(500)
        entry.click()

    def run_all(self, seconds: float) -> None:
        prompts = self.page.locator(".jp-NotebookPanel .jp-CodeCell .jp-InputPrompt")
        until = time.monotonic() + seconds
        while not any(re.match(r"\[[\d*]", prompt) for prompt in prompts.all_text_contents()):
            assert time.monotonic() < until, "nothing runs"
            self.menu("Run", "Run All Cells")  # nothing happens while the page isn't connected
            self.page.wait_for_timeout(2000)
        while not all(re.match(r"\[\d+\]", prompt) for prompt in prompts.all_text_contents()):
            assert time.monotonic() < until, f"not run in {seconds} s: {prompts.all_text_contents()}"
            self.page.wait_for_timeout(300)

    def cell(self, id_: str, name: str = CHAPTER) -> Any:
        """The cell with this id, on the screen."""
        cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
        place = next(number for number, cell in enumerate(cells) if cell.id == id_)
        found = self.page.locator(".jp-NotebookPanel .jp-Notebook .jp-Cell").nth(place)
        found.scroll_into_view_if_needed()
        return found

    def run(self, cell: Any, code: str | None = None, seconds: float = 60) -> None:
        """Runs a cell, with `code` typed in the place of what it holds, and waits for its end."""
        editor = cell.locator(".cm-content")
        editor.click()
        if code is not None:
            self.page.keyboard.press("Control+A")
            self.page.keyboard.insert_text(code)
        before = cell.locator(".jp-InputPrompt").inner_text()
        self.page.keyboard.press("Control+Enter")
        until = time.monotonic() + seconds
        while (prompt := cell.locator(".jp-InputPrompt").inner_text()) == before or "*" in prompt:
            assert time.monotonic() < until, f"the cell still says {prompt}"
            self.page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the notebooks, and one with each explorer as its chapter shows it, and the viewer."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns("START.md", ".*"))
    cells = [nbformat.v4.new_code_cell("import memlab\nfrom memlab import viewer, widgets")]
    for name in CHAPTERS:
        for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells:
            calls = re.findall(r"^widgets\.\w+\(.*\)$", cell.source, re.M)
            cells += map(nbformat.v4.new_code_cell, calls)
    assert len(cells) >= 1 + len(CHAPTERS), "each chapter has an explorer"
    step = 'step = memlab.trace_step("gpt2", micro_batch=1, sequence=128)\nviewer.show(step)'
    notebook = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell(step)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "notebooks" / "explorers.ipynb")
    return folder


@pytest.fixture(scope="module")
def lab(chromium: Any, folder: Path) -> Iterator[str]:
    assert "python -m autograder.lab\n" in (ROOT / "Makefile").read_text("utf-8")
    command = (
        "-m", "autograder.lab", "--notebooks", str(folder / "notebooks"), "--out", str(folder / "out"),
    )  # fmt: skip
    with jupyter(command, ROOT, folder / "log", home(folder / "home")) as address:
        yield address


# -- short -------------------------------------------------------------------------------------------------


def test_it_opens_on_the_start_page(chromium: Any, lab: str) -> None:
    with Student(chromium, lab) as student:
        page = student.page
        student.goto("")  # where the server sends people
        page.wait_for_selector(".jp-MarkdownViewer h1", timeout=60_000)
        assert page.url.endswith("/lab/tree/START.md")
        links = page.locator(".jp-MarkdownViewer a[href*='.ipynb']").evaluate_all(
            "all => all.map(a => a.href)"
        )
        assert [name for name in CHAPTERS for link in links if f"/{name}.ipynb" in link] == CHAPTERS
        files = page.locator(".jp-DirListing-itemText")
        files.filter(has_text="START.md").wait_for()
        assert files.all_inner_texts() == [f"{name}.ipynb" for name in (*CHAPTERS, "explorers")] + [
            "START.md"
        ]
        student.picture("lab-start")

        student.menu("Nbgrader", "Assignment List")
        fetch = page.locator("#assignments").get_by_role("button", name="Fetch")
        fetch.nth(len(CHAPTERS) - 1).wait_for()
        assert fetch.count() == len(CHAPTERS)
        student.menu("Nbgrader", "Formgrader")
        grader = page.frame_locator("iframe")
        grader.locator("text=Manage Assignments >> nth=0").wait_for()
        grader.locator("text=No data available in table").wait_for()
        assert page.locator(".Toastify__toast, .jp-Dialog").count() == 0  # no news, no question
        assert student.complaints == []


# -- long --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_chapter_is_worked_through(chromium: Any, lab: str) -> None:
    with Student(chromium, lab) as student:
        page = student.page
        student.goto("lab/tree/START.md")
        page.click(".jp-MarkdownViewer a:has-text('The four consumers')")
        student.ready(CHAPTER)
        student.run_all(180)
        told = "run all: "
        assert page.locator("[data-mime-type='application/vnd.jupyter.error']").count() == 0, told
        assert "not tried  chapter 2" in page.locator(".jp-Notebook").inner_text()

        exercise, check = student.cell("ex-2-1"), student.cell("check-2-1")
        student.cell("picture-run")
        view(page)
        student.picture("lab-viewer-1280")
        student.run(exercise, WRONG)
        student.run(check)
        said = check.locator(".jp-OutputArea").inner_text()
        assert "0.25 of 3 points" in said and "plain SGD keeps nothing" in said
        student.picture("lab-wrong-answer")
        student.run(exercise, solution("ex-2-1"))
        student.run(check)
        said = check.locator(".jp-OutputArea").inner_text()
        assert "3 of 3 points" in said and "0.25" not in said
        student.picture("lab-right-answer")

        explore(student, student.cell("explore-run"))
        student.picture("lab-explorer-1280", page.locator(".memlab-explorer"))
        menus = page.locator(".memlab-explorer select")
        lefts = menus.evaluate_all("all => all.map(e => Math.round(e.getBoundingClientRect().x))")
        assert len(set(lefts)) <= 3 < len(lefts), lefts  # they stand in columns
        assert violations(page, ".memlab-explorer") == []

        page.click(".jp-NotebookPanel-toolbar >> text=Validate")
        result = page.locator(".jp-Dialog:has-text('Validation Results')")
        result.wait_for(timeout=180_000)
        said = result.inner_text()
        assert 'memlab.check("2.1"' not in said and 'memlab.check("2.2"' in said
        assert "You did not provide a response" in said  # the written answer
        student.picture("lab-validated")
        page.click(".jp-Dialog button:has-text('Ok')")
        assert student.complaints == []


@pytest.mark.long
def test_explorers_on_a_phone(chromium: Any, lab: str) -> None:
    """Each chapter's explorer, 400 pixels wide, in the one-column interface; and the viewer."""
    with Student(chromium, lab, width=400, height=860) as student:
        page = student.page
        student.open("explorers", "notebooks")
        student.complaints.clear()  # Notebook 7.6 starts with errors of its own, and lacks a font of its own
        student.run_all(120)
        explorers = page.locator(".memlab-explorer")
        assert explorers.count() >= len(CHAPTERS)
        wide = {}
        for number, explorer in enumerate(explorers.all(), 1):
            explorer.scroll_into_view_if_needed()
            student.picture(f"explorer-{number}-400", explorer)
            wide[number] = explorer.evaluate(STICKS_OUT)
            for label in explorer.locator(".widget-label").all():
                assert label.evaluate("e => e.scrollWidth - e.clientWidth") <= 0, label.inner_text()
            for menu in explorer.locator("select").all():
                assert menu.evaluate(CUT_OFF) <= 0, menu.evaluate("e => e.selectedOptions[0].text")
            for control in explorer.locator("select, .noUi-handle, button:visible").all():
                control.focus()
                box = control.bounding_box()
                assert box["x"] >= 0 and box["x"] + box["width"] <= 401, control.evaluate("e => e.outerHTML")
        assert not any(wide.values()), wide
        assert student.overflow() <= 0
        figure = page.locator(".jp-RenderedImage img").first
        assert figure.evaluate("e => e.width >= e.naturalWidth")  # legible: it scrolls, it isn't scaled down
        explore(student, page.locator(".jp-CodeCell").filter(has_text="four_consumers("))
        student.picture("explorer-traced-400")
        assert violations(page, ".memlab-explorer") == []
        view(page)
        student.picture("viewer-400")
        assert [said for said in student.complaints if "/static/notebook/" not in said] == []


def solution(id_: str, name: str = CHAPTER) -> str:
    """The code of a solution's cell."""
    source = (ROOT / "solutions" / f"{name}.py").read_text("utf-8")
    [code] = re.findall(rf'^# %% id="{id_}"[^\n]*\n(.*?)(?=^# %%)', source, re.M | re.S)
    return "\n".join(line for line in code.rstrip().split("\n") if not line.strip().startswith("###"))


def view(page: Any) -> None:
    """Sees the viewer draw."""
    shown = page.locator("iframe[title$='viewer']").first
    shown.scroll_into_view_if_needed()
    frame = shown.content_frame
    frame.locator("html[data-ready=true]").wait_for()
    frame.locator("#facts").get_by_text("peak of live tensors").wait_for()
    page.wait_for_timeout(500)
    assert shown.evaluate(SCROLLED) == []  # all of the frame's width is there
    colours = """canvas => new Set(new Uint32Array(
        canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"""
    assert frame.locator("#plot").evaluate(colours) > 5


def explore(student: Student, cell: Any) -> None:
    """Moves a slider by keyboard, sees another answer; traces, sees its result; cancels a trace."""
    page, explorer = student.page, cell.locator(".memlab-explorer")
    explorer.scroll_into_view_if_needed()
    answer, status = explorer.locator(".memlab-answer"), explorer.get_by_role("status")
    slider = explorer.get_by_role("slider", name="Micro-batch")
    before = answer.text_content()
    assert "GiB" in before
    slider.focus()
    page.wait_for_timeout(300)  # the notebook makes its cell the active one
    assert slider.evaluate("handle => handle === document.activeElement")
    page.keyboard.press("ArrowRight")
    status.filter(has_text="Micro-batch 1 → 2").wait_for(timeout=10_000)
    page.wait_for_timeout(200)
    assert answer.text_content() != before
    assert slider.get_attribute("aria-valuetext") == "2"
    readout = explorer.locator(".widget-slider", has=page.get_by_role("slider", name="Micro-batch")).locator(
        ".widget-readout"
    )
    readout.click()  # it takes no number: the slider would ignore it
    page.keyboard.type("8")
    page.keyboard.press("Tab")
    assert readout.inner_text().strip() == "2"
    assert explorer.locator(".widget-readout[contenteditable='true']").count() == 0

    cells = page.locator(".jp-Notebook .jp-Cell").count()
    optimizer = explorer.get_by_role("combobox", name="Optimizer", exact=True)
    optimizer.focus()
    page.wait_for_timeout(300)
    page.keyboard.press("ArrowDown")  # to a notebook in command mode: the next cell; "a": a new one
    status.filter(has_text="Optimizer AdamW, foreach → AdamW, fused").wait_for(timeout=10_000)
    page.keyboard.press("a")
    page.wait_for_timeout(300)
    assert page.locator(".jp-Notebook .jp-Cell").count() == cells

    button = explorer.locator("button")
    button.focus()
    page.keyboard.press("Enter")
    status.filter(has_text="Traced:").wait_for(timeout=90_000)
    said = status.filter(has_text="Traced:").inner_text()
    assert re.match(r"Traced: peak [\d.]+\sGiB in .*; formula [\d.]+\sGiB", said), said
    explorer.get_by_role("button", name="Trace it").click()
    explorer.get_by_role("button", name="Cancel").wait_for()
    assert button.evaluate("it => it === document.activeElement")
    page.wait_for_timeout(400)  # sooner would be a double click
    explorer.get_by_role("button", name="Cancel").click()
    status.filter(has_text="Trace cancelled").wait_for(timeout=10_000)
    assert button.evaluate("it => it === document.activeElement")
