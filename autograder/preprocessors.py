"""What nbgrader needs so that it can take over a notebook that was run in the sandbox and scored outside."""

from __future__ import annotations

from typing import Any

from nbgrader.preprocessors import NbGraderPreprocessor, SaveAutoGrades

from autograder.evidence import check_number, is_check


class TakeOutputs(NbGraderPreprocessor):  # type: ignore[misc]
    """In place of nbgrader's Execute: the outputs of the executed notebook, cell by cell."""

    #: The notebook that the sandbox ran; set before each call of `autograde`.
    executed: Any = None

    def preprocess(self, nb: Any, resources: Any) -> Any:
        ran = TakeOutputs.executed
        if [c.source for c in nb.cells] != [c.source for c in ran.cells]:
            raise ValueError("nbgrader changed a cell after it was run")
        for cell, done in zip(nb.cells, ran.cells, strict=True):
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = done.outputs, done.execution_count
        return nb, resources


class SavePoints(SaveAutoGrades):  # type: ignore[misc]
    """Saves the points that were computed from evidence; nbgrader would believe any number a cell shows."""

    #: Points by exercise; set before each call of `autograde`.
    points: dict[str, float | None]

    def _add_score(self, cell: Any, resources: Any) -> None:
        if not is_check(cell):
            super()._add_score(cell, resources)
            return
        grade = self.gradebook.find_grade(
            cell.metadata.nbgrader.grade_id, self.notebook_id, self.assignment_id, self.student_id
        )
        grade.auto_score = SavePoints.points.get(check_number(cell)) or 0
        grade.needs_manual_grade = grade.manual_score is not None
        self.gradebook.db.commit()
