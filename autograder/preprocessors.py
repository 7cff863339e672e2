"""What nbgrader needs to get through a class: a notebook run that survives the death of its kernel."""

from __future__ import annotations

from typing import Any

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbgrader.preprocessors import Execute

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
            except DeadKernelError:
                self.lost[self.current] = "the kernel died while this cell ran"
            except CellTimeoutError:
                self.lost[self.current] = f"no answer within {self.timeout} s, and an interrupt didn't help"

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> Any:
        self.current = index
        why = self.lost.get(index)
        if why is None and len(self.lost) >= MAX_DEATHS and index > max(self.lost):
            why = f"not run: {MAX_DEATHS} cells before it ended their kernel"
        if why is not None and cell.cell_type == "code":
            cell.outputs = [_error("KernelDied", why)]
            return cell, resources
        return super().preprocess_cell(cell, resources, index)


def _error(name: str, text: str) -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[f"{name}: {text}"])  # type: ignore[no-untyped-call]
