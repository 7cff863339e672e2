"""Each row of the source article is cited by a cell of its chapter; what is cited exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autograder.build import parse
from memlab.published import claim, claims, measurements, t4_runs
from memlab.units import UnknownNameError

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9][0-9]_*.py"))


def cited(chapter: str) -> set[str]:
    return {name for cell in parse(ROOT / "solutions" / f"{chapter}.py") for name in cell.claims}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_claim_of_a_chapter_is_cited(chapter: str) -> None:
    wanted = {name for name, row in claims().items() if row["notebook"] == chapter}
    assert wanted, f"claims.json has no row for {chapter}"
    assert not sorted(wanted - cited(chapter))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_what_a_chapter_cites_is_a_row(chapter: str) -> None:
    assert not sorted(cited(chapter) - set(claims()))


def test_each_row_belongs_to_a_chapter_and_says_what_is_right() -> None:
    assert len(claims()) == 157
    for row in claims().values():
        assert row["notebook"][:3] in {f"0{n}_" for n in range(1, 8)}
        assert row["verdict"] and row["right_statement"] and row["claim"]
        # A reader of the table doesn't see the rows' ids.
        assert not re.search(r"\b(C\d|S)-\d\d", row["claim"] + row["right_statement"]), row["id"]


def test_an_unknown_row_is_named() -> None:
    assert claim("C1-11")["verdict"] == "wrong"
    with pytest.raises(UnknownNameError, match="C1-09"):
        claim("C1-99")


def test_published_rows_say_where_they_come_from() -> None:
    assert len(measurements()) == 122
    assert all(row["source"] and row["url"] and row["evidence"] for row in measurements())


def test_process_memory_on_the_t4_is_reserved_and_context() -> None:
    runs = t4_runs()
    assert len(runs) == 40
    for run in runs:
        assert run["process"] == run["reserved"] + run["context"]
        assert run["allocated"] <= run["reserved"]
