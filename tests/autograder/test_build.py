"""From a chapter's source to its notebooks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder import build, cli
from autograder.course import Chapter, CourseError, select, write_atomically
from memlab.units import UnknownNameError
from tests.autograder.conftest import FIXTURES, write_plain

POINTS = {"1.1": 2}


def tiny_source(root: Path) -> Path:
    return root / "solutions" / "01_tiny.py"


def released(root: Path) -> nbformat.NotebookNode:
    return build.build(select(root)[0]).release


# -- the student version -----------------------------------------------------------------------------------


def test_release_equals_the_golden_notebook(tiny: Path) -> None:
    """The whole file, byte for byte: what the fixture's source becomes on any machine."""
    build.release(select(tiny))
    assert (tiny / "notebooks/01_tiny.ipynb").read_bytes() == (
        FIXTURES / "notebooks/01_tiny.ipynb"
    ).read_bytes()


def test_release_is_byte_stable_in_another_process(tiny: Path) -> None:
    """Another hash seed and another working folder change nothing."""
    code = (
        "import sys; from pathlib import Path; from autograder import build, course;"
        "chapter = course.Chapter(Path(sys.argv[1]), '01_tiny');"
        "sys.stdout.write(build.to_text(build.build(chapter, {'1.1': 2}).release))"
    )
    repo = Path(build.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code, str(tiny)],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(repo), "PATH": "/usr/bin:/bin", "HOME": str(tiny)},
        cwd="/",
        capture_output=True,
        check=True,
    )
    assert run.stdout == build.to_text(released(tiny)).encode()


def test_release_twice_writes_once(tiny: Path) -> None:
    """A second release leaves the file alone, and --check agrees with it."""
    assert [p.name for p in build.release(select(tiny))] == ["01_tiny.ipynb"]
    before = (tiny / "notebooks/01_tiny.ipynb").stat().st_mtime_ns
    assert build.release(select(tiny)) == []
    assert (tiny / "notebooks/01_tiny.ipynb").stat().st_mtime_ns == before
    assert build.stale(select(tiny)) == []


def test_student_version_holds_no_answer_and_no_output(tiny: Path) -> None:
    """Neither the code nor the model answer; a stub that names the exercise stands there instead."""
    text = build.to_text(released(tiny))
    assert "width_of_a_float" not in text
    assert "Thirty-two bits" not in text
    assert "SOLUTION" not in text
    by_id = {cell.id: cell for cell in nbformat.reads(text, as_version=4).cells}
    assert by_id["ex-1-1"].source.endswith('    raise NotImplementedError("exercise 1.1")')
    assert '"""Bytes of n numbers in fp32."""' in by_id["ex-1-1"].source
    assert by_id["written-1-2"].source == "*Write your answer here.*"
    assert all(not cell.get("outputs") for cell in by_id.values())


def test_source_notebook_keeps_the_answers(tiny: Path) -> None:
    """nbgrader's source has what the student version hasn't: the negative control of the test above."""
    text = build.to_text(build.build(select(tiny)[0]).source)
    assert "width_of_a_float" in text
    assert "Thirty-two bits" in text


def test_nbgrader_metadata(tiny: Path) -> None:
    """Points come from the registry; checks are locked, answers aren't; plain cells aren't nbgrader's."""
    cells = {cell.id: cell.metadata.get("nbgrader") for cell in released(tiny).cells}
    assert cells["check-1-1"]["points"] == 2
    assert (cells["check-1-1"]["grade"], cells["check-1-1"]["locked"], cells["check-1-1"]["solution"]) == (
        True,
        True,
        False,
    )
    assert (cells["ex-1-1"]["grade"], cells["ex-1-1"]["locked"], cells["ex-1-1"]["solution"]) == (
        False,
        False,
        True,
    )
    assert cells["written-1-2"]["points"] == 3
    assert {name for name, value in cells.items() if value} == {"ex-1-1", "check-1-1", "written-1-2"}


def test_claims_reach_the_notebook(tiny: Path) -> None:
    """A citation is data in the notebook too."""
    assert released(tiny).cells[0].metadata.memlab.claims == "C1-01"


def test_magics_are_magics_only_in_the_notebook(tiny: Path) -> None:
    """`# %pip` in the source, `%pip` in the notebook."""
    install = next(cell for cell in released(tiny).cells if cell.id == "install")
    assert re.search(r"^\s+%pip install", install.source, re.MULTILINE)


def test_check_names_what_is_stale(tiny: Path) -> None:
    """A changed notebook, a missing one and one without a source."""
    chapters = select(tiny)
    assert build.stale(chapters) == ["notebooks/01_tiny.ipynb: missing"]
    build.release(chapters)
    notebook = tiny / "notebooks/01_tiny.ipynb"
    notebook.write_text(notebook.read_text() + "\n")
    (tiny / "notebooks/09_gone.ipynb").write_text("{}")
    assert build.stale(chapters) == [
        "notebooks/01_tiny.ipynb: differs from its source",
        "notebooks/09_gone.ipynb: no source in solutions/",
    ]


def test_check_on_the_command_line(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1 and the names, nothing written; exit 0 after a release."""
    assert command(monkeypatch, "release", "--check") == 1
    assert "notebooks/01_tiny.ipynb: missing" in capsys.readouterr().err
    assert not (tiny / "notebooks").exists()
    assert command(monkeypatch, "release") == 0
    assert command(monkeypatch, "release", "--check") == 0


# -- faults ------------------------------------------------------------------------------------------------

CHECK = 'tiny_checks.check("1.1", float_bytes)'

FAULTS = [
    ('# %% [markdown] id="ask-1-1"', "# %% [markdown]", "no id"),
    ('id="ask-1-1"', 'id="Ask_1"', "a-z, 0-9 and -"),
    ('id="ask-1-2"', 'id="ask-1-1"', "the same id as an earlier cell"),
    ('id="ask-1-1"', 'id="ask-1-1" colour="red"', "unknown key 'colour'"),
    ('id="ask-1-1"', 'id="ask-1-1" nbgrader={"grade": false}', "written by the build"),
    ('id="title" claims="C1-01"', 'id="title" claims="one"', "isn't a claim's id"),
    ('exercise="1.1"', "", "no cell with exercise"),
    ('exercise="1.1"', 'exercise="2.1"', "doesn't belong to chapter 1"),
    ('exercise="1.1"', 'exercise="1.1" check="1.1"', "one of exercise, check and manual"),
    ('id="ex-1-1"', 'id="first"', 'the id of an exercise cell is "ex-1-1"'),
    ('id="check-1-1"', 'id="test"', 'the id of a check cell is "check-1-1"'),
    ('check="1.1"', "", 'no cell with check="1.1"'),
    ('check="1.1"', "", "has no check cell in this chapter"),
    ('check="1.1"', 'check="1.1" points=5', "points=5, but memlab.exercises says 2"),
    (CHECK, f"points = {CHECK}", "the last line must be"),
    (CHECK, CHECK.replace("1.1", "1.2"), "the last line must be"),
    (CHECK, f'{CHECK}\n\n# %% id="check-1-1" check="1.1"\n{CHECK}', "is checked 2 times"),
    ("points=3", "", "needs points="),
    ("points=3", "points=-3", "a positive number"),
    ('[markdown] id="written-1-2"', 'id="written-1-2"', "a markdown cell"),
    ("    ### BEGIN SOLUTION\n", "", "unbalanced solution markers"),
    ("    ### END SOLUTION\n", "", "### END SOLUTION is missing"),
    ("    ### BEGIN SOLUTION\n", "    # BEGIN SOLUTION\n", "alone on its line"),
    ("    ### BEGIN SOLUTION\n", "    ### BEGIN HIDDEN TESTS\n", "hidden inputs belong"),
    ("# Safe to run twice.", "### BEGIN SOLUTION\n### END SOLUTION", "markers outside an exercise cell"),
    ('    """Bytes of n', '    # %pip install x\n    """Bytes of n', "%pip outside the first code cell"),
    ('tags=["parameters"]', "", "0 cells with tags"),
    ("seed = 0", "", "need a default each: seed"),
    ('size = "normal"', 'size, more = "normal", 1', "need a default each: size"),
    (f"{CHECK}", "", "the last line must be"),
]


@pytest.mark.parametrize(("old", "new", "says"), FAULTS, ids=[says[:30] for *_, says in FAULTS])
def test_each_fault_is_one_line(tiny: Path, old: str, new: str, says: str) -> None:
    """A fault names the file, the line and what to do; nothing is written."""
    source = tiny_source(tiny)
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new, 1))
    with pytest.raises(CourseError) as caught:
        build.release(select(tiny))
    lines = str(caught.value).splitlines()
    assert any(says in line for line in lines), lines
    assert all(line.startswith("solutions/01_tiny.py:") for line in lines)
    assert not (tiny / "notebooks").exists()


def test_the_fixture_itself_has_no_fault(tiny: Path) -> None:
    """The negative control of the table above."""
    chapter = select(tiny)[0]
    assert build.faults(chapter, build.parse(chapter.source), POINTS) == []


def test_fault_gives_the_right_line(tiny: Path) -> None:
    """Also where a string holds what looks like a cell's start."""
    source = tiny_source(tiny)
    text = source.read_text().replace("# Safe to run twice.", 'text = """\n# %% inside\n"""')
    source.write_text(text.replace('id="ex-1-1"', 'id="first"'))
    line = 1 + text.splitlines().index('# %% id="ex-1-1" exercise="1.1"')
    with pytest.raises(CourseError, match=rf"^solutions/01_tiny\.py:{line}: "):
        build.build(select(tiny)[0])


def test_solution_shown_elsewhere_is_a_leak(tiny: Path) -> None:
    """The answer in a hint of another cell stops the release."""
    source = tiny_source(tiny)
    hint = '# %% id="hint"\nn = width_of_a_float = 3\n\n# %% [markdown] id="ask-1-1"'
    text = source.read_text().replace("return width_of_a_float * n", "n = width_of_a_float = 3\n    return n")
    source.write_text(text.replace('# %% [markdown] id="ask-1-1"', hint))
    with pytest.raises(CourseError, match='cell "hint" shows the solution of exercise'):
        build.release(select(tiny))


def test_faults_of_all_chapters_come_together(plain: Path) -> None:
    """An author sees them at once."""
    for name in ("91_one", "92_two"):
        write_plain(plain, name, "# %%\nx = 1")
    with pytest.raises(CourseError) as caught:
        build.release(select(plain), {})
    assert [line[:19] for line in str(caught.value).splitlines()] == [
        "solutions/91_one.py",
        "solutions/92_two.py",
    ]


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff\xfe", "isn't UTF-8"), (b"", "no cells"), (b'# %% id="a', "no id")]
)
def test_unreadable_source(tiny: Path, content: bytes, says: str) -> None:
    """One line, whatever the file holds."""
    tiny_source(tiny).write_bytes(content)
    with pytest.raises(CourseError, match=says):
        build.build(select(tiny)[0])


# -- properties --------------------------------------------------------------------------------------------

LINE = st.sampled_from(["shown", "secret", "blank", "begin", "end"])


@given(lines=st.lists(LINE, max_size=25), indent=st.integers(0, 8))
def test_what_is_marked_is_hidden_and_nothing_else(lines: list[str], indent: int) -> None:
    """Balanced markers of any number: each hidden line is gone, each other line is there, in order."""
    source, shown, hidden, inside = [], [], [], False
    for number, kind in enumerate([*lines, "end"]):
        if kind == "begin" and not inside:
            source.append(" " * indent + build.BEGIN)
            inside = True
        elif kind == "end" and inside:
            source.append(" " * indent + build.END)
            inside = False
        elif kind in ("shown", "secret", "blank"):
            line = "" if kind == "blank" else f"{' ' * indent}line_{number} = {number}"
            source.append(line)
            (hidden if inside else shown).append(line)
    cell = build.Cell(line=1, kind="code", source="\n".join(source), id="ex-1-1", exercise="1.1")
    student = build.release_notebook(build.source_notebook([cell], POINTS)).cells[0].source
    regions = sum(line.strip() == build.BEGIN for line in source)
    stub = 'raise NotImplementedError("exercise 1.1")'
    assert [line for line in student.splitlines() if stub not in line and line] == (
        [line for line in shown if line] if regions else []
    )
    assert student.count(stub) == max(1, regions)
    assert cell.solution_lines() == hidden


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp"))).map(str.strip))
def test_prose_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Any line of prose comes out of the percent format as it went in."""
    root = tmp_path_factory.mktemp("prose")
    (root / "solutions").mkdir()
    path = root / "solutions" / "91_prose.py"
    path.write_text(f'# %% [markdown] id="prose"\n# a\n# {text}\n# z\n', encoding="utf-8")
    assert build.parse(path)[0].source.split("\n") == ["a", text, "z"]


# -- course ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word", ["2", "02", "02_two", "two", "solutions/02_two.py", "notebooks/02_two.ipynb"]
)
def test_chapter_by_any_of_its_names(tmp_path: Path, word: str) -> None:
    """As people type it."""
    (tmp_path / "solutions").mkdir()
    for name in ("01_one", "02_two", "notes"):
        (tmp_path / "solutions" / f"{name}.py").touch()
    assert select(tmp_path, [word]) == [Chapter(tmp_path, "02_two")]
    assert len(select(tmp_path)) == 2


def test_unknown_chapter_says_what_is_near(tiny: Path) -> None:
    """A typing error is answered with the right name."""
    with pytest.raises(UnknownNameError, match="did you mean 01_tiny"):
        select(tiny, ["01_tinny"])


def test_no_chapters(tmp_path: Path) -> None:
    """A folder without solutions isn't a course."""
    with pytest.raises(CourseError, match="no chapters"):
        select(tmp_path)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a file nor a temporary one is left."""
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(CourseError, match=r"can't write .*file: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_notebook_is_format_4_5(tiny: Path) -> None:
    """With ids in every cell, valid, and one final newline."""
    text = build.to_text(released(tiny))
    data = json.loads(text)
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])
    assert set(data["metadata"]) == {"kernelspec", "language_info"}
    assert text.endswith("}\n")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `autograder ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["autograder", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return int(done.value.code or 0)
