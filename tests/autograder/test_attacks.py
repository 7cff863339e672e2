"""Attacks on checks that run an answer in a child process: no points by them, or a person is called."""

from __future__ import annotations

import nbformat
import pytest

from autograder.execution import Budget
from autograder.records import Job, Outcome
from autograder.sandbox import Sandbox, why_no_bubblewrap
from autograder.workers import run_job
from tests.autograder.small_course import small_course, solved

pytestmark = pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap())

#: Forges what the parent of a check's child reads, as far as an answer can know it.
FORGE = """
import os, stat, struct, pickle, json
def forge(evidence):
    old = pickle.dumps(("evidence", evidence))
    new = json.dumps(["0" * 32, "evidence", evidence]).encode() + b"\\n"
    for data in (struct.pack("!i", len(old)) + old, new):
        for number in range(3, 256):
            try:
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, data)
            except OSError:
                pass
    os._exit(0)
"""

#: Exercise, the cell, and the status that must come; None where points alone decide.
ATTACKS: dict[str, tuple[str, str, str]] = {
    "forged norms": ("3.3", FORGE + "def input_grad_norm(*a):\n    forge({'norms': []})\n", "tampered"),
    "a forged run": ("3.4", FORGE + "def my_checkpoint(*a, **k):\n    forge({'runs': []})\n", "tampered"),
    "the measure replaced by an alias": (
        "3.4",
        "from memlab.exercises import deep as D\n"
        "def my_checkpoint(function, *args):\n"
        "    D._measured = lambda *a, **k: {}\n"
        "    return function(*args)\n",
        "tampered",
    ),
    "the scorer's own answer": (
        "3.5",
        "from memlab.exercises.deep import uniform_segments as best_segments\n",
        "needs_review",
    ),
    "a subinterpreter": (
        "3.3",
        "import os\ndef input_grad_norm(*a):\n    import _interpreters\n    os._exit(0)\n",
        "needs_review",
    ),
}


@pytest.fixture(scope="module")
def chapter_3(tmp_path_factory: pytest.TempPathFactory) -> str:
    [chapter] = small_course(tmp_path_factory.mktemp("course"), "03_deep")
    return nbformat.writes(solved(chapter))


def submit(sandbox: Sandbox, text: str, number: str, source: str, *numbers: str) -> Outcome:
    """The solved chapter with another answer to one exercise; only it and these others are checked."""
    notebook = nbformat.reads(text, 4)
    checked = {f"{word}-{n.replace('.', '-')}" for n in (number, *numbers) for word in ("ex", "check")}
    notebook.cells = [c for c in notebook.cells if c.id in checked or not c.id.startswith(("ex-", "check-"))]
    own = f"ex-{number.replace('.', '-')}"
    next(cell for cell in notebook.cells if cell.id == own).source = source
    job = Job("s", "s", "03_deep", nbformat.writes(notebook), 5, (), "key", (own,))
    return run_job(job, sandbox, Budget(cell_seconds=45))


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_earns_nothing_unseen(sandbox: Sandbox, chapter_3: str, attack: str) -> None:
    number, source, status = ATTACKS[attack]
    outcome = submit(sandbox, chapter_3, number, source)
    assert not outcome.points[number] or attack == "the scorer's own answer"
    assert status in {found for found, _ in outcome.doubts}, (outcome.doubts, outcome.messages)


@pytest.mark.parametrize(("number", "name"), [("3.2", "residual_vjp"), ("3.3", "input_grad_norm")])
def test_a_fork_bomb_costs_its_exercise_alone(
    sandbox: Sandbox, chapter_3: str, number: str, name: str
) -> None:
    """3.2 is asked in the kernel itself, 3.3 in a child of it."""
    bomb = "while True: os.fork()"
    outcome = submit(sandbox, chapter_3, number, f"import os\ndef {name}(*a, **k):\n    {bomb}\n", "3.4")
    assert (outcome.points[number], outcome.points["3.4"]) == (0, 4), (outcome.doubts, outcome.messages)
    assert "needs_review" in {found for found, _ in outcome.doubts}
