"""The reference of the library: its pages, and its docstrings as reStructuredText.

Docstrings are written to be read in a terminal. Here and there they hold Markdown's shorter forms, which
`rst` turns into reStructuredText: an indented example after a sentence, a table of bars, `name: what it is`
lines for arguments.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

#: Floor by floor, as in ARCHITECTURE.md: what a reader of the library uses.
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Facts, without torch", ("units", "hardware", "models", "recipe", "published")),
    ("Compute, without torch", ("footprint", "planner", "engines", "oom")),
    ("Record and replay", ("trace", "allocator", "snapshot", "viewer", "doctor")),
    (
        "Trace and measure, with torch",
        ("report", "virtual", "meter", "step", "nets", "lora", "sharded", "built", "cuda_rules"),
    ),
    (
        "Levers, one file each",
        (
            "techniques",
            *(
                f"techniques.{name}"
                for name in (
                    "precision",
                    "accumulation",
                    "checkpointing",
                    "attention",
                    "sharding",
                    "tensor_parallel",
                    "processes",
                    "offload",
                    "freezing",
                    "residual",
                )
            ),
        ),
    ),
    ("In a notebook", ("chapter", "exercises", "plots", "widgets", "game")),
)
#: Floors that only the library itself stands on, and the command line, which has a page of its own.
INNER = ("__main__", "background", "cli", "files", "operations", "walk")
#: Where not everything is for readers: exercises also hold what scores them.
ONLY = {"exercises": ("check", "progress")}


def pages() -> dict[str, str]:
    """File name -> reStructuredText of the reference: an index and a page for each module."""
    import memlab

    floors = []
    for title, names in FLOORS:
        floors += [title, "-" * len(title), "", ".. list-table::", "   :widths: 25 75", ""]
        for name in names:
            first = _first_line(importlib.import_module(f"memlab.{name}"))
            floors += [f"   * - :py:mod:`memlab.{name}`", f"     - {first}"]
        floors.append("")
    top = [".. list-table::", "   :widths: 25 75", ""]
    for name in memlab.__all__:
        thing = getattr(memlab, name)
        top += [
            f"   * - :py:obj:`memlab.{name} <{thing.__module__}.{thing.__qualname__}>`",
            f"     - {_first_line(thing)}",
        ]
    modules = [name for _, names in FLOORS for name in names]
    index = [
        "The library",
        "===========",
        "",
        "``import memlab`` is all that a notebook or a script needs for these. It loads no torch; what needs "
        "torch loads it at first use.",
        "",
        *top,
        "",
        "Everything else stands in modules, here floor by floor: each imports only from floors above it.",
        "",
        *floors,
        ".. toctree::",
        "   :hidden:",
        "",
        *(f"   {name.rpartition('.')[2]} <memlab.{name}>" for name in modules),
        "",
    ]
    return {"index.rst": "\n".join(index), **{f"memlab.{name}.rst": _module_page(name) for name in modules}}


def _module_page(name: str) -> str:
    title = f"memlab.{name}"
    members = f" {', '.join(ONLY[name])}" if name in ONLY else ""
    return f"{title}\n{'=' * len(title)}\n\n.. automodule:: memlab.{name}\n   :members:{members}\n"


def _first_line(thing: Any) -> str:
    text = (inspect.getdoc(thing) or "").strip().partition("\n")[0]
    return text.removesuffix(":") + ("." if text.endswith(":") else "")


# --- docstrings ---------------------------------------------------------------------------------------------

_BULLET = re.compile(r"\s*([*-]|\d+\.)\s")
_NAME = r"\*{0,2}[a-z_]\w*"
_ARGUMENT = re.compile(rf"({_NAME}(?:, {_NAME})*): +")
_FIELD = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*) {2,}(?=\S)")
_RULER = re.compile(r"\s*={4,} ")
_STARS = re.compile(r"(?<![\w*`])(\*{1,2})(?=[a-z_]\w*\b(?!\*))")


def rst(lines: Sequence[str], arguments: Iterable[str] = ()) -> list[str]:
    """A docstring's lines as reStructuredText; `arguments` are the names that the object takes."""
    names = set(arguments)
    out: list[str] = []
    for block in _blocks(lines):
        indent = len(block[0]) - len(block[0].lstrip())
        before = next((line for line in reversed(out) if line.strip()), "")
        if block[0].lstrip().startswith("|") and all(line.lstrip().startswith("|") for line in block):
            out += _table(block)
        elif any(_RULER.match(line) for line in block):
            out += block if _fits(block) else _literal(block)
        elif indent >= 4 and before and _is_prose(out) and not before.rstrip().endswith("::"):
            out += [f".. code-block:: {_language(block)}", "", *block]
        elif indent:
            out += block
        elif _FIELD.match(block[0]):
            out += _items(block, _FIELD, None)
        elif any(_names(line, names) for line in block):
            out += _items(block, _ARGUMENT, names)
        else:
            out += [_STARS.sub(lambda m: m.group().replace("*", r"\*"), line) for line in block]
        out.append("")
    return out


def _language(block: Sequence[str]) -> str:
    if block[0].strip().startswith(("memlab ", "python -m", "$ ", "autograder ")):
        return "console"
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
    except SyntaxError:
        return "text"
    return "python"


def _fits(block: Sequence[str]) -> bool:
    """Whether all cells of a table of equals signs stay in their columns; docutils takes no other."""
    ruler = next(line for line in block if _RULER.match(line))
    gaps = [match.span() for match in re.finditer(r"(?<==) +(?==)", ruler)]
    return all(not line[start:stop].strip() for line in block for start, stop in gaps)


def _literal(block: Sequence[str]) -> list[str]:
    """Such a table as it stands, with what it is called before it."""
    first = next(i for i, line in enumerate(block) if _RULER.match(line))
    indent = block[first][: -len(block[first].lstrip())]
    return [*block[:first], f"{indent}.. code-block:: text", "", *(f"   {line}" for line in block[first:])]


def _blocks(lines: Sequence[str]) -> list[list[str]]:
    """Paragraphs; an indented example with blank lines in it is one."""
    blocks: list[list[str]] = []
    gap = True
    for line in lines:
        if not line.strip():
            gap = True
        elif gap and blocks and line.startswith("    ") and blocks[-1][0].startswith("    "):
            blocks[-1] += ["", line]
            gap = False
        elif gap:
            blocks.append([line])
            gap = False
        else:
            blocks[-1].append(line)
    return blocks


def _is_prose(out: Sequence[str]) -> bool:
    """Whether a paragraph at the left margin was written last: what is indented below it is an example."""
    blocks = _blocks(out)
    last = blocks[-1] if blocks else [" "]
    return all(line and not line.startswith(" ") for line in last) and not _BULLET.match(last[0])


def _names(line: str, names: set[str]) -> bool:
    match = _ARGUMENT.match(line)
    return match is not None and {name.lstrip("*") for name in match.group(1).split(", ")} <= names


def _items(block: Sequence[str], start: re.Pattern[str], names: set[str] | None) -> list[str]:
    """Lines `name: what it is`, or `name   what it is`, as a list; other lines go on with the last."""
    out: list[str] = []
    listed = False
    for line in block:
        match = start.match(line)
        if match and (names is None or _names(line, names)):
            if not listed and out:
                out.append("")
            listed = True
            head = ", ".join(f"``{name}``" for name in match.group(1).split(", "))
            out.append(f"* {head}: {line[match.end() :]}")
        elif listed and re.match(r"(Raises|Returns)\b", line):
            listed = False
            out += ["", line]
        else:
            out.append(f"  {line.strip()}" if listed else line)
    return out


def _table(block: Sequence[str]) -> list[str]:
    """A table of bars as a list-table."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block]
    rows = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    out = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        out += [f"   {'* -' if i == 0 else '  -'} {cell}".rstrip() for i, cell in enumerate(row)]
    return out
