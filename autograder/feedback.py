"""What a student reads: one page for each chapter, that no script can run on and nothing is fetched for.

Every text of a submission is escaped, none is rendered, outputs aren't shown at all. A message of a check
tells the inputs on which the answer failed; they are hidden, so words and numbers that aren't the check's own
become `…` unless the instructor shows them. `memlab.check` tells a student more, on inputs of its own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat

from autograder.course import write_atomically
from autograder.errors import told
from autograder.gradebook import ByHand
from autograder.late import Policy
from autograder.records import CELL_STOPPED, FAILED, GRADED, MISSING, Record, exercise_points
from autograder.roster import shown
from memlab.exercises import exercises

STYLE = Path(__file__).parent / "templates" / "page.css"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_path(out: Path, record: Record) -> Path:
    return out / "feedback" / record.student / f"{record.chapter}.html"


def write_pages(
    out: Path,
    records: Iterable[Record],
    ids: Mapping[str, str],
    manual: Mapping[tuple[str, str], ByHand],
    policies: Mapping[str, Policy],
    *,
    show_hidden: bool = False,
) -> None:
    """The page of every record, but for what was never handed in; one that wouldn't change isn't touched."""
    for record in records:
        if record.status == MISSING:
            continue
        given = manual.get((ids[record.student], record.chapter))
        submitted = (
            out / "course" / "submitted" / ids[record.student] / record.chapter / f"{record.chapter}.ipynb"
        )
        text = page(record, _cells(submitted), given, policies.get(record.chapter), show_hidden=show_hidden)
        path = page_path(out, record)
        if not path.exists() or path.read_bytes() != text.encode():
            write_atomically(path, text)


def _cells(path: Path) -> list[Any]:
    """The cells that were graded; none where nothing could be."""
    if not path.exists():
        return []
    notebook = nbformat.read(path, 4)  # type: ignore[no-untyped-call]
    return list(notebook.cells)


def document(title: str, body: str, css: str = "") -> str:
    """An HTML page of ours: it may hold styles and nothing else that acts."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE.read_text('utf-8')}{css}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


_CSS = """
section { border-top: 1px solid var(--line); margin-top: 1.6rem; padding-top: 0.4rem; }
section h2 { margin: 0.8rem 0 0.4rem; font-size: 1.15rem; display: flex; gap: 1rem; }
section h2 { justify-content: space-between; }
.points { white-space: nowrap; } .full { color: var(--good); } .short { color: var(--bad); }
pre.code, blockquote.text { background: var(--panel); padding: 0.7rem 0.9rem; border-radius: 5px; }
blockquote.text { white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink); max-width: none; }
summary { cursor: pointer; color: var(--soft); font-size: 0.85rem; }
"""


def page(
    record: Record,
    cells: Sequence[Any],
    given: ByHand | None = None,
    late: Policy | None = None,
    *,
    show_hidden: bool = False,
) -> str:
    """The whole page of one record. `cells` are those of the graded notebook."""
    parts = [f"<h1>{escape(record.chapter)}</h1>", f"<p>{_heading(record, given, late)}</p>"]
    noticed = [reason for reason in record.reasons if not _of_exercise(reason)]
    if noticed:
        notes = "".join(f"<li>{escape(reason)}</li>" for reason in noticed)
        parts.append(f"<p>What was noticed:</p><ul>{notes}</ul>")
    if record.status != FAILED:
        known = exercises(int(record.chapter[:2]))
        parts += [_exercise(record, known[number], cells, given, show_hidden) for number in record.points]
        parts += [_written(cell, given) for cell in cells if _is_written(cell)]
    return document(record.chapter, "\n".join(parts), _CSS)


def _of_exercise(reason: str) -> str:
    """The exercise whose section tells this reason: that its cell stopped; else ''."""
    match = re.match(rf"exercise (\d+\.\d+): {CELL_STOPPED} ", reason)
    return match[1] if match else ""


def _heading(record: Record, given: ByHand | None, late: Policy | None) -> str:
    if record.status == FAILED:
        return (
            "This notebook could not be graded. It counts as not graded, not as 0 points; "
            "your instructor will look at it."
        )
    points, top = total(record, given), sum(exercise_points(record.chapter).values())
    text = f"<strong>{points:g} points</strong>, of {top} for the exercises that are checked automatically"
    if given is not None and given.written:
        worth = sum(answer.most for answer in given.written.values())
        text += f" and {worth:g} for what you wrote"
        if given.points is None:
            text += " (not read yet)"
    text += "."
    if record.status != GRADED:
        text += " Your instructor looks at this submission; points may change."
    if late is not None and record.submitted is not None and late.lateness(record.submitted):
        days = late.days(record.submitted)
        after = late.after(points, record.submitted)
        text += (
            f" Handed in {shown(record.submitted)} ({escape(record.time_from)}), "
            f"{days} day{'s' * (days != 1)} late: {after:g} points count ({escape(late.text)})."
        )
    return text


def total(record: Record, given: ByHand | None) -> float:
    """Automatic points, as corrected by hand, and those of the written answers that have been read."""
    known = [p for p in final_points(record, given).values() if p is not None]
    return round(sum(known) + (given.points or 0 if given else 0), 6)


def final_points(record: Record, given: ByHand | None) -> dict[str, float | None]:
    """Points of each exercise: what a person entered in formgrader counts more than what was computed."""
    if given is None or record.status in (FAILED, MISSING):
        return record.points
    return {number: given.corrected.get(number, points) for number, points in record.points.items()}


def _exercise(
    record: Record, exercise: Any, cells: Sequence[Any], given: ByHand | None, show_hidden: bool
) -> str:
    number = exercise.id
    points = final_points(record, given).get(number) or 0
    full = points >= exercise.points
    head = _section_head(f"{number} {exercise.title}", points, exercise.points, full)
    own = [
        c for c in cells if c.cell_type == "code" and _number(c) == number and not c.id.startswith("check-")
    ]
    text = ""
    if not full:
        messages = list(record.messages.get(number, ()))
        if not show_hidden:
            source = "\n".join(c.source for c in own)
            messages = [masked(message, number, source) for message in messages]
        stops = [r.partition(": ")[2] for r in record.reasons if _of_exercise(r) == number]
        messages = [*stops, *messages]
        text += "".join(f"<li>{escape(message)}</li>" for message in messages)
        text = (f"<ul>{text}</ul>" if text else "") + f"<p>Read again: {escape(exercise.read)}.</p>"
    if given is not None and number in given.corrected:
        text += "<p>These points were given by hand.</p>"
    text += "".join(_comment(given, cell.id) for cell in cells if _number(cell) == number)
    if own:
        code = "\n\n".join(cell.source for cell in own)
        text += f'<details><summary>Your code</summary><pre class="code">{escape(code)}</pre></details>'
    return f"<section>{head}{text}</section>"


def _section_head(title: str, points: float, most: float, full: bool) -> str:
    kind = "full" if full else "short"
    return (
        f"<h2><span>{escape(title)}</span> "
        f'<span class="points {kind}">{points:g} of {most:g} points</span></h2>'
    )


def _written(cell: Any, given: ByHand | None) -> str:
    number = _number(cell)
    answer = given.written.get(cell.id) if given is not None else None
    if answer is None or answer.points is None:
        head = f"<h2><span>{number} in writing</span> <span class=points>not read yet</span></h2>"
    else:
        head = _section_head(f"{number} in writing", answer.points, answer.most, answer.points >= answer.most)
    text = f'<blockquote class="text">{escape(cell.source)}</blockquote>'
    return f"<section>{head}{_comment(given, cell.id)}{text}</section>"


def _comment(given: ByHand | None, cell_id: str) -> str:
    text = given.comments.get(cell_id) if given is not None else None
    return f"<p><strong>Your instructor:</strong> {escape(text)}</p>" if text else ""


def _number(cell: Any) -> str:
    return str(cell.metadata.get("memlab", {}).get("exercise", ""))


def _is_written(cell: Any) -> bool:
    return cell.cell_type == "markdown" and bool(cell.metadata.get("nbgrader", {}).get("grade"))


# -- hidden inputs -----------------------------------------------------------------------------------------

_WORD = re.compile(r"[^\W\d_][\w]*(?:\.[^\W\d_]\w*)*|\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|_\w+", re.UNICODE)


#: Behind these words of a check stands what the student's code raised.
_RAISED = re.compile(r"^|stopped with |a deprecated call: ")
_ERROR = re.compile(r"\w*(?:Error|Exception|Exit|Interrupt|Warning)\b")
#: Texts of several words, lists and calls: whoever chose them is the student.
_OTHERS = re.compile(
    r"""\[[^\[\]]*\]|\{[^{}]*\}|\([^()]*['"][^()]*\)|(?<!\w)(?:'(?:[^'\\]|\\.)*\s(?:[^'\\]|\\.)*'(?!\w)|"[^"]*\s[^"]*")"""
)


def masked(message: str, number: str, source: str = "") -> str:
    """The message with what isn't the check's own made `…`: inputs, answers, the student's names.

    A word stays that the check's texts have; a number, only beside the word that it has there (`10^9 bytes`).
    Of what the student's code raised stays what `errors.told` tells, with names of its `source`.
    An answer that spells a hidden input in single words of the check gets through: a few bits, at most.
    """
    words, pairs, ends = _vocabulary(number.partition(".")[0])
    for match in _RAISED.finditer(message):
        if match[0] or _ERROR.match(message):
            head, raised = message[: match.end()], message[match.end() :]
            end = max((end for end in ends if raised.endswith(end)), key=len, default="")
            return _masked(head, number, words, pairs) + told(raised.removesuffix(end), source) + end
    return _masked(message, number, words, pairs)


def _masked(message: str, number: str, words: frozenset[str], pairs: frozenset[tuple[str, str]]) -> str:
    message = _OTHERS.sub(lambda m: f"{m[0][0]}…{m[0][-1]}", message)
    found = [(match[0].lower(), *match.span()) for match in _WORD.finditer(message)]
    text, at = "", 0
    for n, (word, start, end) in enumerate(found):
        near = [(found[n - 1][0], word)] if n else []
        near += [(word, found[n + 1][0])] if n + 1 < len(found) else []
        known = word == number or (any(p in pairs for p in near) if word[0].isdigit() else word in words)
        text += message[at:start] + (message[start:end] if known else "…")
        at = end
    return re.sub(r"…(?:[\s.,:'\"_*/+=-]*…)+", "…", text + message[at:])


@functools.lru_cache(maxsize=16)
def _vocabulary(chapter: str) -> tuple[frozenset[str], frozenset[tuple[str, str]], frozenset[str]]:
    """Words of the texts in which a chapter's checks speak, in small letters, and which follow each other;
    and whole texts, that may stand behind an error."""
    from memlab.exercises import CHAPTERS

    words = {name.lower() for name, value in vars(builtins).items() if isinstance(value, type)}
    pairs: set[tuple[str, str]] = set()
    ends: set[str] = set()
    for module in ("memlab.exercises", f"memlab.exercises.{CHAPTERS[chapter]}", "memlab.units"):
        path = importlib.import_module(module).__file__
        assert path is not None
        tree = ast.parse(Path(path).read_text("utf-8"))
        nodes = list(ast.walk(tree))
        silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # documentation
        for node in nodes:
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                silent |= {id(part) for part in ast.walk(node.format_spec)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                said = [match[0].lower() for match in _WORD.finditer(node.value)]
                words.update(said)
                pairs.update(pairwise(said))
                if len(said) > 2 and node.value[:1] in (":", ";", ",", "…"):
                    ends.add(node.value)
    return frozenset(words), frozenset(pairs), frozenset(ends)
