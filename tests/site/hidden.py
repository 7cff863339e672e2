"""What must not be found on the site: the lines of solutions and model answers that release removes."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from autograder.build import Built

_HEADS = ("import ", "from ", "#", "for ", "with ", "def ", "class ")  # as autograder.build.leaks counts


def squeeze(text: str) -> str:
    """`text` without white space: prose is found however a page breaks its lines."""
    return re.sub(r"\s+", "", text)


class Hidden:
    """Lines of 20 characters and more that no student notebook holds."""

    def __init__(self, chapters: Iterable[Built]) -> None:
        chapters = list(chapters)
        given = "\n".join(cell.source for built in chapters for cell in built.release.cells)
        lines = {line.strip() for line in given.splitlines()}
        code, prose = set(), set()
        for built in chapters:
            for cell in built.cells:
                for line in map(str.strip, cell.solution_lines()):
                    if len(line) >= 20 and not line.startswith(_HEADS):
                        (prose if cell.kind == "markdown" else code).add(line)
        self.code = code - lines
        self.prose = {line for line in map(squeeze, prose) if line not in squeeze(given)}

    def found(self, text: str) -> list[str]:
        """Those in a page's text: code as a whole line, prose anywhere."""
        lines = {line.strip() for line in text.splitlines()}
        text = squeeze(text)
        return sorted(self.code & lines) + sorted(line for line in self.prose if line in text)

    def found_anywhere(self, text: str) -> list[str]:
        """Those in what isn't laid out in lines, a script or an index."""
        text = squeeze(text.replace("\\n", "").replace('\\"', '"'))
        return sorted(line for line in {*map(squeeze, self.code), *self.prose} if line in text)


def text_of(path: Path) -> str:
    """What a reader sees of a file: a page without its tags, a notebook's cells and outputs."""
    text = path.read_text("utf-8")
    if path.suffix == ".html":
        return html.unescape(re.sub(r"<[^>]*>", "", text))
    if path.suffix == ".ipynb":
        return "\n".join(_strings(json.loads(text)))
    return text


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            yield "".join(value)
        else:
            for item in value:
                yield from _strings(item)
    elif isinstance(value, str):
        yield value
