"""What `make lab` prepares; tests/browser/test_lab.py opens it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autograder import course, lab
from autograder.course import CourseError

README = "# x\n\n[![badge](b)](c)\n\nThe lead.\n\n| 1 | [One](notebooks/01_one.ipynb): first | 10 |\n"
NAMES = [chapter.name for chapter in course.chapters(course.course_root())]


@pytest.fixture
def notebooks(tmp_path: Path) -> Path:
    return Path(shutil.copytree(course.course_root() / "notebooks", tmp_path / "notebooks"))


def test_the_start_page_has_the_readmes_rows() -> None:
    page = lab.start_page(README, ["01_one"])
    assert (
        "| 1 | [One](01_one.ipynb): first | 10 |" in page and "\nThe lead.\n" in page and "badge" not in page
    )
    assert "*Run All Above Selected Cell*" in page and '"Partial credit"' in page
    with pytest.raises(CourseError, match="no row for 02_two"):
        lab.start_page(README, ["01_one", "02_two"])


def test_what_jupyterlab_is_given(notebooks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "jupyter_config_path", list)
    out = tmp_path / "out"
    (notebooks / f"{NAMES[0]}.ipynb").write_text("{}")  # a student's work
    environment = lab.prepare(notebooks, out)
    assert environment["JUPYTER_CONFIG_PATH"].startswith(str(out / "config"))
    page = (notebooks / lab.START).read_text("utf-8")
    assert all(f"({name}.ipynb)" in page for name in NAMES) and "](notebooks/" not in page
    settings = json.loads((out / "config" / "labconfig" / "page_config.json").read_text())
    assert settings["disabledExtensions"]["@jupyterlab/apputils-extension:announcements"] is True
    released = out / "exchange" / "memlab" / "outbound"
    assert sorted(path.name for path in released.iterdir()) == NAMES
    fresh = released / NAMES[0] / f"{NAMES[0]}.ipynb"
    assert fresh.read_bytes() == (course.course_root() / "notebooks" / fresh.name).read_bytes()
    assert str(out / "exchange") in (out / "config" / "nbgrader_config.py").read_text("utf-8")


def test_an_instructors_nbgrader_configuration_is_left_alone(
    notebooks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "jupyter_config_path", lambda: [str(tmp_path / "etc")])
    lab.prepare(notebooks, tmp_path / "out")
    ours = tmp_path / "out" / "config" / "nbgrader_config.py"
    assert ours.exists()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / ours.name).touch()
    lab.prepare(notebooks, tmp_path / "out")
    assert not ours.exists()


def test_a_folder_without_chapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        lab.main(["--notebooks", str(tmp_path), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"autograder: no chapters in {tmp_path}: `make release` writes them\n"
