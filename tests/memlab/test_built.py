"""A plan for somebody's own module: what their code raises is one line, and says that it is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from memlab import built
from memlab.hardware import gpu

FAULTS = {
    "raising": (lambda: 1 / 0, "raising failed: ZeroDivisionError: division by zero (test_built.py, line"),
    "needs": (lambda x: x, "needs failed: TypeError: "),
    "quits": (lambda: exit(0), "quits failed: SystemExit: 0 (test_built.py, line"),
    "batch": (lambda: (nn.Linear(3, 4), lambda n: [][n]), "batch failed: IndexError: "),
    "shape": (lambda: (nn.Linear(3, 4), lambda n: torch.randn(n, 5)), "shape failed: RuntimeError: "),
    "form": (lambda: 3, "form() must return (module, batch)"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_users_code_raises_is_one_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    function, says = FAULTS[name]
    with pytest.raises(ValueError) as caught:
        built.plan_built(name, function, gpu("T4"), 4)  # type: ignore[arg-type]
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # torch logs a shape error of its own


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(0)", "SystemExit: 0 (somebodys.py, line 2)"),
        ("raise RuntimeError('no weights')", "RuntimeError: no weights (somebodys.py, line 1)"),
        ("x = 1", "AttributeError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebodys.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "somebodys", raising=False)
    with pytest.raises(ValueError) as caught:
        built.load("somebodys:f")
    assert str(caught.value).startswith(f"somebodys:f: can't be imported: {says}")
