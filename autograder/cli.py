"""The command line of the course: `autograder release | run | grade`.

Exit codes: 0 all well; 1 the work was done and something in it failed (a chapter, a stale notebook, a submission
that couldn't be graded); 2 the command couldn't be carried out, said in one line; 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autograder import course

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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


def main() -> None:
    """Run a command; a fault that a person can mend is one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except (course.CourseError, ValueError) as error:
        typer.echo(f"autograder: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("autograder: interrupted", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
