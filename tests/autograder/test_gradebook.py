"""What the writer of the gradebook owes to a run that is interrupted."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from autograder.gradebook import _settle_written, api, by_hand, interrupts_wait, name_students
from autograder.records import Job, Outcome


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_an_entry_is_made(name: signal.Signals) -> None:
    done = []
    before = signal.getsignal(name)
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        try:
            os.kill(os.getpid(), name)
            done.append("entered")
        except KeyboardInterrupt:  # as nbgrader does
            done.append("faulty")
    assert done == ["entered"]
    assert signal.getsignal(name) is before


def test_an_interrupt_is_told_in_place_of_what_it_broke() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("a child process was interrupted too")


def test_other_threads_and_quiet_blocks_change_nothing() -> None:
    def work() -> None:
        with interrupts_wait():
            ran.append(True)

    ran: list[bool] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert ran == [True, True]


def test_names_and_comments_of_formgrader(tmp_path: Path) -> None:
    """nbgrader shows 'None' for a name it doesn't have, and its own comment isn't the instructor's."""
    api(tmp_path)  # finds what makes a gradebook
    with Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}", "memlab") as gradebook:
        gradebook.add_assignment("01")
        gradebook.add_notebook("01", "01")
        gradebook.add_solution_cell("written-1-6", "01", "01")
        for name in ("s1", "s2", "s3"):
            gradebook.add_student(name)
        gradebook.add_submission("01", "s1")
        [comment] = gradebook.find_submission("01", "s1").notebooks[0].comments
        comment.auto_comment = "No response."
        gradebook.db.commit()
        name_students(tmp_path, {"s1": "Anna Maria Ek", "s2": "Li, Bo"})
        assert by_hand(tmp_path)["s1", "01"].comments == {}
        comment.manual_comment = "Well put."
        gradebook.db.commit()
    assert by_hand(tmp_path)["s1", "01"].comments == {"written-1-6": "Well put."}
    with Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}", "memlab") as gradebook:
        found = {s.id: (s.last_name, s.first_name) for s in gradebook.students}
    assert found == {"s1": ("Ek", "Anna Maria"), "s2": ("Li", "Bo"), "s3": ("s3", "")}


def test_points_of_an_answer_that_changed_do_not_vanish_without_a_word(tmp_path: Path) -> None:
    api(tmp_path)
    chapter = "01_memory_basics"
    job, outcome = Job("Anna", "anna", chapter, "", 0, (), ""), Outcome("")
    with Gradebook(f"sqlite:///{tmp_path / 'gradebook.db'}", "memlab") as gradebook:
        gradebook.add_assignment(chapter)
        gradebook.add_notebook(chapter, chapter)
        gradebook.add_grade_cell("written-1-6", chapter, chapter, max_score=3, cell_type="markdown")
        gradebook.add_student("anna")
        gradebook.add_submission(chapter, "anna")
        [grade] = gradebook.find_submission(chapter, "anna").notebooks[0].grades
        grade.manual_score, grade.needs_manual_grade = 2, True
        gradebook.db.commit()
    _settle_written(tmp_path, job, outcome, unchanged=False)
    [(status, text)] = outcome.doubts
    assert status == "" and "changed after it was graded by hand" in text and "it had 2 points" in text
