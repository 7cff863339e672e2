"""JupyterLab on the chapters: `make lab`, or `python -m autograder.lab [options of JupyterLab]`.

It opens on START.md, a page made from the README beside the chapters, rendered. nbgrader's menu works without
anything to set up: Validate runs a notebook as a grader would, and the assignment list has an exchange of its
own under build/lab, which holds the seven chapters (Fetch gives a fresh copy). Where the machine has an
nbgrader configuration (an instructor's exchange), that one is used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jupyter_core.paths import jupyter_config_path

from autograder import course

START = "START.md"

_PAGE = """# Why training runs out of GPU memory

{lead}

Open a chapter here or in the list of files at the left, and run its cells with <kbd>Shift</kbd>
<kbd>Enter</kbd>. You need no GPU.

{chapters}

Automatic points, and those of one written answer graded by hand.

- **After each exercise** `memlab.check(…)` says at once what is right, what to do next, and how many points
  that is; `memlab.progress()` shows the points so far.
- **After a restart of the kernel**, or when you come back, run from the top: menu *Run*,
  *Run All Above Selected Cell*. Until then a cell ends in `NameError: name 'lab' is not defined`.
- **Validate**, above each notebook, runs all of it from the top in a fresh kernel, as a grader does: one to
  two minutes. It lists every check that doesn't give all its points, an exercise you left untouched as
  "Partial credit", too; the check's own lines say why. Do it before you hand in.
- **To hand in**, give in the notebook under its own name with your answers in it.
- **To start a chapter over**, take menu *Nbgrader*, *Assignment List*, *Fetch*: it puts a fresh copy in a
  folder of its own.
- **Instructors** grade with `autograder grade`, and written answers with `autograder formgrader`, which opens
  JupyterLab on the graded class.
"""

_NBGRADER = """c = get_config()
c.CourseDirectory.course_id = "memlab"
c.CourseDirectory.root = {folder!r}
c.CourseDirectory.db_url = {gradebook!r}
c.Exchange.root = {exchange!r}
c.IgnorePattern.enabled = True  # a warning isn't a wrong answer
c.IgnorePattern.pattern = "(?s).*"
c.Execute.timeout = 180  # seconds a cell may take when it is validated
"""

#: JupyterLab's own question about news, and how it opens a Markdown file.
_LABCONFIG = {
    "page_config.json": {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}},
    "default_setting_overrides.json": {
        "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}}
    },
}


def start_page(readme: str, names: Sequence[str]) -> str:
    """START.md for the chapters `names`: the README's first words, and its row for each of them."""
    lead = next((p for p in readme.split("\n\n") if p.strip() and not p.startswith(("#", "!", "[!"))), "")
    rows = {match[1]: match[0] for match in re.finditer(r"^\|.*\(notebooks/(\w+)\.ipynb\).*$", readme, re.M)}
    missing = [name for name in names if name not in rows]
    if missing:
        raise course.CourseError(f"README.md: its table of chapters has no row for {', '.join(missing)}")
    table = ["| | | points |", "|---|---|---:|", *(rows[name] for name in names)]
    return _PAGE.format(lead=lead.strip(), chapters="\n".join(table).replace("](notebooks/", "]("))


def prepare(folder: Path, out: Path) -> dict[str, str]:
    """Writes the start page and the configuration; returns the environment that JupyterLab needs.

    Raises CourseError where `folder` holds no chapter or something can't be written.
    """
    root = course.course_root()
    names = [c.name for c in course.chapters(root) if (folder / f"{c.name}.ipynb").is_file()]
    if not names:
        raise course.CourseError(f"no chapters in {folder}: `make release` writes them")
    course.write_atomically(folder / START, start_page((root / "README.md").read_text("utf-8"), names))
    config = out / "config"
    for name, content in _LABCONFIG.items():
        course.write_atomically(config / "labconfig" / name, json.dumps(content, indent=1) + "\n")
    ours = config / "nbgrader_config.py"
    others = [Path(p) for p in jupyter_config_path() if (Path(p) / "nbgrader_config.py").is_file()]
    if set(others) - {config}:
        ours.unlink(missing_ok=True)
    else:
        exchange = out / "exchange"
        text = _NBGRADER.format(
            folder=str(folder), gradebook=f"sqlite:///{out / 'gradebook.db'}", exchange=str(exchange)
        )
        course.write_atomically(ours, text)
        for name in names:
            released = exchange / "memlab" / "outbound" / name / f"{name}.ipynb"
            course.write_atomically(released, (root / "notebooks" / released.name).read_text("utf-8"))
        (exchange / "memlab" / "inbound").mkdir(exist_ok=True)
    before = os.environ.get("JUPYTER_CONFIG_PATH", "")
    here = str(Path(sys.executable).parent)  # nbgrader calls alembic by its bare name
    return {
        **os.environ,
        "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, (str(config), before))),
        "PATH": os.pathsep.join((here, os.environ.get("PATH", ""))),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Becomes JupyterLab. A fault that a person can mend is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m autograder.lab", description="Further options are JupyterLab's.", allow_abbrev=False
    )
    parser.add_argument("--notebooks", type=Path, help="the folder of the chapters (default: notebooks)")
    parser.add_argument("--out", type=Path, help="what nbgrader and JupyterLab keep (default: build/lab)")
    options, more = parser.parse_known_args(arguments)
    root = course.course_root()
    folder = (options.notebooks or root / "notebooks").resolve()
    out = (options.out or root / "build" / "lab").resolve()
    try:
        environment = prepare(folder, out)
    except course.CourseError as error:
        print(f"autograder: {error}", file=sys.stderr)
        sys.exit(2)
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    command.append(f"--LabApp.default_url=/lab/tree/{START}")
    command.append(f"--LabApp.workspaces_dir={out / 'workspaces'}")  # not the open tabs of other folders
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in more:
        print("You are root: JupyterLab is started with --allow-root.", file=sys.stderr)
        command.append("--allow-root")
    os.execve(sys.executable, [*command, *more], environment)


if __name__ == "__main__":
    main()
