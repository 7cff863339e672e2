"""What reading the code alone says: nothing against an honest student, something against quiet cheats."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from autograder.look import suspicions
from tests.autograder.small_course import small_course
from tests.exercises import mutant, solution, wrong_answers
from tests.exercises.test_every_chapter import CHAPTERS
from tests.submissions import CASES
from tests.submissions.case import CHAPTER, World, hand_in

#: They leave no trace in the kernel before or after a check: only their text shows them.
QUIET = (
    "hands_over_nothing", "hands_over_easy_questions", "log_patched_quietly", "frame_read_quietly",
    "frame_read_by_a_made_up_name", "reads_the_callers_frame", "searches_all_objects",
    "patches_the_log_while_checked", "traces_the_check",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case → suspicions, of the honest and the cheating ones that hand in a plain notebook."""
    root = tmp_path_factory.mktemp("look")
    [chapter] = small_course(root / "c", CHAPTER)
    folder, made, read = root / "s", {}, {}
    folder.mkdir()
    for case in CASES.values():
        if case.kind in ("honest", "cheating"):
            hand_in(case, folder, World(root / "c"), chapter, made)
            path = folder / case.name / f"{CHAPTER}.ipynb"
            if path.is_file() and not path.is_symlink():
                read[case.name] = _suspicions(path)
    return read


def _suspicions(path: Path) -> list[str]:
    cells = nbformat.read(path, 4).cells
    return [why for cell in cells if cell.cell_type == "code" for why in suspicions(cell.source)]


def test_nothing_is_said_of_an_honest_student(found: dict[str, list[str]]) -> None:
    honest = {name: why for name, why in found.items() if CASES[name].kind == "honest"}
    assert len(honest) > 40 and {name: why for name, why in honest.items() if why} == {}


def test_nothing_is_said_of_solutions_and_of_honest_mistakes() -> None:
    """Of every exercise of the course, and of each planted wrong answer but those that do what cheats do."""
    told = {}
    for chapter, exercises in ((chapter, wrong_answers(chapter)) for chapter in CHAPTERS):
        for exercise, wrong in exercises.items():
            told[exercise, ""] = suspicions(solution(chapter, exercise))
            for name, edits in wrong.items():
                told[exercise, name] = suspicions(mutant(chapter, exercise, edits))
    assert len(told) > 350
    assert [key for key, why in told.items() if why] == [
        ("1.5", "ends the process"),
        ("2.1", "an object that equals everything"),
        ("7.6", "it runs the model"),
    ]


@pytest.mark.parametrize("name", QUIET)
def test_a_quiet_cheat_is_seen(found: dict[str, list[str]], name: str) -> None:
    assert found[name]
