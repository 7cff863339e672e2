"""The command line of the course: `autograder release | run | grade | report | export | formgrader`.

Exit codes: 0 all well; 1 the work was done and something in it failed (a chapter, a stale notebook, a
submission that couldn't be graded); 2 the command couldn't be carried out, said in one line; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from autograder import course
from memlab.units import UnknownNameError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Build, run and grade the chapters of memlab.",
)

Chapters = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CHAPTER]...", help="2, 02_four_consumers, …; all when left out."),
]


@app.command(epilog="Example: autograder release 02_four_consumers")
def release(
    chapter: Chapters = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit 1 naming the notebooks that aren't up to date."),
    ] = False,
) -> None:
    """Generate the student notebooks (notebooks/) and nbgrader's source notebooks (build/source/)."""
    from autograder import build

    wanted = course.select(course.course_root(), chapter or [])
    if check:
        found = build.stale(wanted)
        for line in found:
            typer.echo(line, err=True)
        if found:
            typer.echo("run `autograder release` and commit the result", err=True)
            raise typer.Exit(1)
        typer.echo(f"{len(wanted)} notebooks match their sources")
        return
    changed = set(build.release(wanted))
    for item in wanted:
        name = item.notebook.relative_to(item.root)
        typer.echo(f"{name}: {'written' if item.notebook in changed else 'unchanged'}")


@app.command(epilog="Example: autograder run --out build/course --size smallest")
def run(
    chapter: Chapters = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; build/course (build/student with --student) when left out."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the toys run: auto, cpu, cuda, cuda:1, virtual:T4.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size of the toys: smallest or normal.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random numbers.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Chapters that run side by side.")] = 2,
    student: Annotated[
        bool, typer.Option("--student", help="Run the student version; only unwritten exercises may raise.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run chapters again that haven't changed.")] = False,
    cell_timeout: Annotated[int, typer.Option(min=1, help="Seconds that one cell may take.")] = 300,
) -> None:
    """Execute chapters with papermill: executed notebooks, pages, index.html and results.json."""
    from autograder import run as runner

    root = course.course_root()
    wanted = course.select(root, chapter or [])
    options = runner.Options(device, size, seed, jobs, student, force, cell_timeout)
    out = out or root / "build" / ("student" if student else "course")
    try:
        results = runner.run(wanted, out, options)
    except KeyboardInterrupt:
        typer.echo("interrupted: the kernels are gone, finished chapters are kept", err=True)
        raise typer.Exit(130) from None
    failed = [result for result in results if result.errors]
    for result in failed:
        for error in result.errors:
            where = f', cell "{error["cell"]}"' if error["cell"] else ""
            typer.echo(f"failed: {result.chapter}{where}: {error['message']}", err=True)
    typer.echo(str(out / "index.html"))
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example: autograder grade submissions --out graded --chapter 02_four_consumers")
def grade(
    submissions: Annotated[
        Path,
        typer.Argument(
            metavar="SUBMISSIONS",
            help="A folder with a folder or archive for each student, or the zip of Moodle or Canvas.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of grades.csv, totals.csv, feedback and the gradebook.")],
    chapter: Annotated[
        list[str] | None, typer.Option(help="Grade this chapter; may be given again. All when left out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Submissions graded side by side.")] = 2,
    seed: Annotated[
        str | None,
        typer.Option(help="Secret of the hidden inputs; that of OUT, or a new one, when left out."),
    ] = None,
    sandbox: Annotated[
        str,
        typer.Option(
            help="Where submissions run: auto, bubblewrap, landlock, or none (their code runs as you: "
            "only for submissions that you trust)."
        ),
    ] = "auto",
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the workers of this Dask scheduler.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds that one notebook may take; a cell may take 90 of them.")
    ] = 600,
    roster: Annotated[
        Path | None, typer.Option(help="CSV of all students: who is who, and who handed nothing in.")
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help='Names of loose files, like "{student}-hw*.ipynb".')
    ] = None,
    attempt: Annotated[str, typer.Option(help="Which of several files counts: latest or first.")] = "latest",
    deadline: Annotated[
        str | None,
        typer.Option(help="Like 2026-12-01T23:59+01:00; stays for these chapters until another is given."),
    ] = None,
    late: Annotated[
        str, typer.Option(help='What lateness takes, like "10%/day, at most 3 days"; see late.csv.')
    ] = "none",
    grace: Annotated[str, typer.Option(help="How long after the deadline nothing is late.")] = "0 min",
    show_hidden: Annotated[
        bool, typer.Option("--show-hidden", help="Feedback shows the inputs on which an answer failed.")
    ] = False,
) -> None:
    """Grade submissions with nbgrader: grades.csv, totals.csv, reasons.csv, late.csv and feedback."""
    from autograder.grade import Collecting, grade_folder
    from autograder.late import policy

    if deadline is None and (late != "none" or grace != "0 min"):
        raise course.CourseError("--late and --grace need --deadline: late after what?")
    agreed = policy(deadline, late, grace) if deadline is not None else None
    wanted = course.select(course.course_root(), chapter or [])
    try:
        records = grade_folder(
            submissions, out, wanted, jobs=jobs, seed=seed, sandbox=sandbox,
            scheduler=scheduler, seconds=seconds,
            collecting=Collecting(pattern, roster, attempt), deadline=agreed, show_hidden=show_hidden,
        )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("interrupted: what was graded is kept, and isn't graded again", err=True)
        raise typer.Exit(130) from None
    for record in records:
        if record.status not in ("graded", "missing") or (record.status == "missing" and record.reasons):
            reasons = "; ".join([*record.reasons, *record.doubts])
            typer.echo(f"{record.status}: {record.student}, {record.chapter}: {reasons}", err=True)
    counts = Counter(record.status for record in records)
    typer.echo(
        ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "nothing to grade"
    )
    typer.echo(str(out / "grades.csv"))
    if counts["failed"]:
        raise typer.Exit(1)


Graded = Annotated[Path, typer.Argument(metavar="OUT", help="The folder that `autograder grade` wrote.")]


@app.command(epilog="Example: autograder export graded --format canvas --template gradebook.csv")
def export(
    out: Graded,
    format_: Annotated[str, typer.Option("--format", help="canvas, moodle or nbgrader.")],
    template: Annotated[
        Path | None,
        typer.Option(help="The gradebook (Canvas) or grading worksheet (Moodle) that you exported."),
    ] = None,
    chapter: Annotated[list[str] | None, typer.Option(help="This chapter only; may be given again.")] = None,
    column: Annotated[
        str | None, typer.Option(help="The template's column, if its name isn't enough.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="The file to write; OUT/FORMAT.csv when left out.")] = None,
) -> None:
    """Write points for an LMS, with those given by hand until now and after the policy for late work."""
    from autograder import export as room
    from autograder import tables

    found = tables.course(out.resolve())
    names = [item.name for item in course.select(course.course_root(), chapter)] if chapter else []
    to = to or out / f"{format_}.csv"
    for line in room.export(found, format_, to, template=template, chapters=names, column=column):
        typer.echo(line, err=True)
    tables.write(found)
    typer.echo(str(to))


@app.command(epilog="Example: autograder report graded")
def report(out: Graded) -> None:
    """Print how a class did and write OUT/report.html: distribution, wrong answers, what to look at."""
    from autograder import report as room
    from autograder import tables

    found = tables.course(out.resolve())
    tables.write(found)
    summaries = room.summaries(found)
    typer.echo(room.text(summaries))
    course.write_atomically(out / "report.html", room.html(summaries))
    typer.echo(str(out / "report.html"))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: autograder formgrader graded --no-browser --port 8899",
)
def formgrader(context: typer.Context, out: Graded) -> None:
    """Open JupyterLab on a graded course: menu Nbgrader, Formgrader. Further options are JupyterLab's."""
    from autograder import tables
    from autograder.gradebook import usable

    folder = out / "course"
    if not (folder / "nbgrader_config.py").exists():
        raise course.CourseError(f"nothing was graded into {out}: first `autograder grade … --out {out}`")
    usable(out)
    tables.course(out.resolve())
    os.chdir(folder)  # nbgrader reads its configuration from here
    command = [sys.executable, "-m", "jupyter", "lab", "--ServerApp.root_dir=.", *context.args]
    os.execv(sys.executable, command)


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run a command; a fault that a person can mend is one line and exit code 2."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except (course.CourseError, UnknownNameError) as error:
        typer.echo(f"autograder: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
