"""What a student may read, and what not."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from autograder.evidence import REVIEW, TAMPERED
from autograder.feedback import final_points, masked, page, total
from autograder.gradebook import Answer, ByHand
from autograder.late import policy
from autograder.records import FAILED, GRADED, Record, exercise_points
from memlab.exercises import exercises

CHAPTER = "01_memory_basics"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def record(status: str = GRADED, **points: float) -> Record:
    made = Record("anna", CHAPTER, status, points=dict(exercise_points(CHAPTER)))
    made.points |= {number.replace("_", "."): value for number, value in points.items()}
    return made


def cells(code: str = "x = 1", text: str = "my answer") -> list[Any]:
    written = {"grade": True, "solution": True}
    return [
        new_code_cell(code, id="ex-1-1", metadata={"memlab": {"exercise": "1.1"}}),
        new_markdown_cell(
            text, id="written-1-6", metadata={"memlab": {"exercise": "1.6"}, "nbgrader": written}
        ),
    ]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def test_no_text_of_a_submission_becomes_markup() -> None:
    made = record(**{"1_1": 0})
    made.reasons = [f"{SCRIPT}.ipynb: odd"]
    made.messages = {"1.1": [SCRIPT]}
    given = ByHand(1, {"written-1-6": Answer(1, 3)}, {}, {"written-1-6": SCRIPT, "ex-1-1": SCRIPT})
    text = page(made, cells(SCRIPT, SCRIPT), given, show_hidden=True)
    tags = Tags(text).found
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "link", "a", "form", "object"}
    assert not [name for _, names in tags for name in names if name.startswith("on")]
    assert text.count("&lt;script&gt;") == 6  # seen six times, run not once
    assert "default-src 'none'" in text.split("<style>")[0]


def test_what_failed_and_where_to_read_again() -> None:
    made = record(**{"1_1": 1})
    made.messages = {"1.1": ["bandwidth: that is gigabits per second"], "1.2": ["not shown, it is right"]}
    text = page(made, cells())
    assert "that is gigabits per second" in text and "1 of 2 points" in text
    assert f"Read again: {exercises(1)['1.1'].read}." in text and "not shown" not in text
    assert "x = 1" in text and "my answer" in text and "not read yet" in text


def test_hand_grades_comments_and_corrections() -> None:
    given = ByHand(2.5, {"written-1-6": Answer(2.5, 3)}, {"1.1": 1.5}, {"written-1-6": "Well put."})
    made = record(REVIEW, **{"1_1": 0})
    text = page(made, cells(), given)
    assert final_points(made, given)["1.1"] == 1.5 and total(made, given) == 12
    assert "Well put." in text and "2.5 of 3 points" in text and "<strong>12 points</strong>" in text
    assert "given by hand" in text


def test_doubts_are_for_the_instructor() -> None:
    made = record(TAMPERED)
    made.doubts = ["exercise 1.1: fits several students of the roster (bert, cleo)"]
    text = page(made, cells())
    assert "bert" not in text and "Your instructor looks at this submission" in text


def test_lateness_is_said() -> None:
    rule = policy("2026-12-01T23:59+01:00", "10%/day")
    made = record()
    made.submitted, made.time_from = rule.deadline + 90_000, "the roster"
    assert "2 days late: 8 points count (10%/day)" in page(made, cells(), None, rule)


def test_what_could_not_be_graded() -> None:
    made = Record("anna", CHAPTER, FAILED, ["hw.zip: not a readable zip"])
    text = page(made, [])
    assert "could not be graded" in text and "hw.zip" in text and "points" in text


def test_numbers_and_names_of_the_hidden_inputs_are_masked() -> None:
    told = masked("bandwidth(3456, 12.71) isn't 5,490.7 GB/s but you return 'secret7'", "1.1")
    assert told == "bandwidth(…) isn't … GB/s but you return '…'"
    assert (
        masked("your code stopped with ValueError: x5120y", "1.1") == "your code stopped with ValueError: …"
    )


@pytest.mark.parametrize("number", ["1.1", "2.1", "3.1", "5.1"])
def test_no_message_of_a_check_shows_what_its_seed_drew(number: str) -> None:
    """Two seeds, one wrong answer: what differs between the messages is hidden, and masking takes it out."""
    exercise = exercises()[number]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{args} {kwargs}")

    said = set()
    for seed in random.Random(number).sample(range(10**6), 3):
        answer: Any = (wrong, wrong) if number in ("1.1", "5.1") else wrong
        try:
            evidence = exercise.evidence(answer, seed)
        except Exception:
            pytest.skip("this check wants another form of answer")
        said.add(tuple(masked(m, number) for m in exercise.score(evidence, seed).messages))
    assert len(said) == 1


SOURCE = "def act_bytes(n):\n    return nothing.size\n"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("NameError: name 'nothing' is not defined (line 2 of your cell)", None),
        ("NameError: name 'act_bytes' is not defined", None),
        ("AttributeError: 'NoneType' object has no attribute 'size' (line 2 of your cell)", None),
        ("TypeError: act_bytes() takes 1 positional argument but 2 were given", None),
        ("TimeoutError: no result within 60 s", None),
        ("ZeroDivisionError: division by zero (line 2 of your cell)", None),
        # names that the code doesn't hold, lines behind its end, and free text are no sentence of Python's
        ("NameError: name 'x5120y' is not defined", "NameError: name '…' is not defined"),
        (
            "ZeroDivisionError: division by zero (line 907 of your cell)",
            "ZeroDivisionError: division by zero",
        ),
        ("ValueError: autocast master autocast (line 2 of your cell)", "ValueError: … (line 2 of your cell)"),
        ("autocast_master: autocast", "…: …"),
        ("KeyError: 'forward'", "KeyError: …"),
    ],
)
def test_errors_tell_what_python_says_and_not_what_the_code_says(message: str, told: str | None) -> None:
    for before in ("act_bytes stopped with ", "your code stopped with "):
        assert masked(before + message, "2.1", SOURCE) == before + (told or message)


def test_an_answer_cannot_spell_hidden_inputs_in_the_words_of_the_checks() -> None:
    words = "autocast master autocast weights gradients master"
    for shown in (
        repr(words),
        repr(words.split()),
        repr(dict.fromkeys(words.split(), "master")),
        f"({words!r},)",
    ):
        assert "master" not in masked(f"that isn't right but you return {shown}: read again", "2.1")


def test_a_cell_that_did_not_run_is_told_in_its_exercise() -> None:
    made = record(**{"1_1": 0})
    made.reasons = ["exercise 1.1: your cell stopped with SyntaxError in line 11: '(' was never closed"]
    text = page(made, cells())
    assert "<li>your cell stopped with SyntaxError in line 11: &#x27;(&#x27; was never closed</li>" in text
    assert "What was noticed" not in text
