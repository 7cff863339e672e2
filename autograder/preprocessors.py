"""What nbgrader needs to get through a class: runs that survive their kernel, points that need evidence."""

from __future__ import annotations

import os
from typing import Any

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbgrader.preprocessors import Execute, SaveAutoGrades

from autograder.evidence import is_check, judge

#: Kernels that one submission may lose before the rest of it isn't run any more.
MAX_DEATHS = 3


class SurvivingExecute(Execute):  # type: ignore[misc]
    """Runs a notebook. A cell that kills its kernel, or can't be interrupted, becomes an error of that cell.

    The rest is then run again in a new kernel without that cell, so that one exercise loses its points and
    not the whole submission.
    """

    def preprocess(self, nb: Any, resources: Any = None, km: Any = None) -> Any:
        self.lost: dict[int, str] = {}
        while True:
            self.current = 0
            try:
                return super().preprocess(nb, resources, km=km)
            except DeadKernelError as error:
                asked = "exit" in str(error)
                self.lost[self.current] = (
                    "exit() was called" if asked else "the kernel died while this cell ran"
                )
            except CellTimeoutError:
                self.lost[self.current] = f"no answer within {self.timeout} s, and an interrupt didn't help"

    def on_cell_executed(self, **kwargs: Any) -> None:
        super().on_cell_executed(**kwargs)
        payload = kwargs["execute_reply"]["content"].get("payload", [])
        self.asked_to_exit = any(item.get("source") == "ask_exit" for item in payload)

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> Any:
        self.current = index
        self.asked_to_exit = False
        why = self.lost.get(index)
        if why is None and len(self.lost) >= MAX_DEATHS and index > max(self.lost):
            why = f"not run: {MAX_DEATHS} cells before it ended their kernel"
        if why is not None and cell.cell_type == "code":
            cell.outputs = [_error("KernelDied", why)]
            return cell, resources
        result = super().preprocess_cell(cell, resources, index)
        if self.asked_to_exit:  # the kernel will end in a moment, while another cell runs
            raise DeadKernelError("exit() was called")
        return result


class SaveEvidencePoints(SaveAutoGrades):  # type: ignore[misc]
    """Saves the points of a check cell from its evidence; nbgrader would believe any number it shows."""

    def _add_score(self, cell: Any, resources: Any) -> None:
        if not is_check(cell):
            super()._add_score(cell, resources)
            return
        grade = self.gradebook.find_grade(
            cell.metadata.nbgrader.grade_id, self.notebook_id, self.assignment_id, self.student_id
        )
        grade.auto_score = judge(cell, int(os.environ["MEMLAB_CHECK_SEED"])).points
        grade.needs_manual_grade = grade.manual_score is not None
        self.gradebook.db.commit()


def _error(name: str, text: str) -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])  # type: ignore[no-untyped-call]
