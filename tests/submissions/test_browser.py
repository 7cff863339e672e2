"""Feedback pages and formgrader in a headless browser: nothing of a submission runs, a grade arrives."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autograder.sandbox import why_no_bubblewrap
from tests.browser.server import TOKEN, jupyter
from tests.submissions.case import CHAPTER
from tests.submissions.harness import CASES, Listener, Run, command, environment, grade, make_class, totals

HOSTILE = (
    "script_in_outputs", "script_in_markdown", "script_in_code", "script_in_a_wrong_answer",
    "script_in_an_exception", "script_in_metadata", "script_in_attachments", "markup_as_a_name",
)  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap()),
]


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with Listener() as made:
        yield made


@pytest.fixture(scope="module")
def graded(chromium: Any, listener: Listener, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("browser") / "c"
    make_class(root, [CASES[name] for name in HOSTILE], port=listener.port)
    return grade(root)


class Watched:
    """A page of which every request, dialog and change of title is noted."""

    def __init__(self, browser: Any, allowed: tuple[str, ...]) -> None:
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.context = browser.new_context(viewport={"width": 1300, "height": 900})
        self.page = self.context.new_page()
        self.allowed = allowed
        self.page.on("request", self._request)
        self.page.on("dialog", self._dialog)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(self.allowed):
            self.requests.append(request.url)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def poke(self) -> None:
        """What a reader does: scrolls, and clicks links of the submission."""
        self.page.mouse.wheel(0, 5000)
        self.page.wait_for_timeout(300)
        for link in self.page.query_selector_all("a[href^='javascript']"):
            link.evaluate("e => e.click()")
        self.page.wait_for_timeout(200)


def test_no_script_of_a_submission_runs_in_a_feedback_page(
    chromium: Any, graded: Run, listener: Listener
) -> None:
    pages = sorted((graded.out / "feedback").rglob("*.html"))
    assert len(pages) >= len(HOSTILE)
    for path in pages:
        watched = Watched(chromium, ("file:", "data:", "about:"))
        watched.page.goto(path.as_uri())
        watched.poke()
        assert "PWNED" not in watched.page.title(), path
        assert watched.page.url.startswith("file:"), path
        assert watched.requests == [] and watched.dialogs == [], path
        watched.context.close()
    assert listener.heard() == []


# -- formgrader --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(graded: Run) -> Iterator[str]:
    """JupyterLab in the course's folder, as the guide says."""
    with environment() as variables:
        variables["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), variables["PATH"]))
        lab = ("-m", "jupyterlab", "--allow-root", "--LabApp.news_url=None")
        with jupyter(lab, graded.out / "course", graded.root / "jupyter.log", variables) as address:
            yield address


def _submissions(out: Path) -> dict[str, str]:
    """nbgrader's student → id of the submitted notebook, as in formgrader's addresses."""
    with closing(sqlite3.connect(out / "gradebook.db")) as book:
        rows = book.execute(
            "select s.student_id, n.id from submitted_notebook n "
            "join submitted_assignment s on n.assignment_id = s.id"
        ).fetchall()
    return dict(rows)


def test_formgrader_opens_on_the_course_and_takes_a_grade(
    chromium: Any, graded: Run, server: str, listener: Listener
) -> None:
    watched = Watched(chromium, (server, "data:", "about:", "blob:"))
    watched.page.goto(f"{server}/lab?token={TOKEN}")
    watched.page.goto(f"{server}/formgrader/gradebook/{CHAPTER}/{CHAPTER}")
    watched.page.wait_for_selector("table tbody tr a", timeout=30_000)
    found = _submissions(graded.out)
    watched.page.goto(f"{server}/formgrader/submissions/{found['right']}")
    watched.page.wait_for_selector(".nbgrader_cell .score:not([disabled])", timeout=30_000)
    fields = watched.page.query_selector_all("input.score")
    field = [f for f in fields if "/ 3" in f.evaluate("e => e.parentElement.innerText")][
        -1
    ]  # the written one
    watched.page.wait_for_load_state("networkidle")  # the points that there are have come
    with watched.page.expect_response(
        lambda answer: "/api/grade/" in answer.url and answer.request.method == "PUT", timeout=30_000
    ) as saved:
        field.fill("2.5")
        field.press("Tab")
    assert saved.value.ok
    watched.context.close()
    with environment() as variables:
        done = subprocess.run(
            command(graded.root), cwd=graded.root, env=variables, capture_output=True, text=True
        )
    row = totals(graded.out)["right"]
    assert (row["manual_points"], row["points"]) == ("2.5", "10"), done.stderr
    assert "12.5" in (graded.out / "feedback" / "right" / f"{CHAPTER}.html").read_text("utf-8")


def test_no_script_of_a_submission_runs_in_formgrader(
    chromium: Any, graded: Run, server: str, listener: Listener
) -> None:
    harmed = []
    for student, id_ in _submissions(graded.out).items():
        watched = Watched(chromium, (server, "data:", "about:", "blob:"))
        watched.page.goto(f"{server}/lab?token={TOKEN}")
        watched.page.goto(f"{server}/formgrader/submissions/{id_}")
        watched.poke()
        if "PWNED" in watched.page.title() or not watched.page.url.startswith(server) or watched.dialogs:
            harmed.append(student)
        mine = [url for url in watched.requests if f":{listener.port}/" in url]
        if mine:
            harmed.append(f"{student}: {mine[:2]}")
        watched.context.close()
    assert harmed == [] and listener.heard() == []
