"""The checks of the exercises: the same for the student at once and for the grader later.

`check("2.1", answer)` runs the answer on inputs of its own, prints what to do next and returns the points.
Each exercise is two functions:

* `evidence(answer, seed)` runs the student's code and returns plain data (`plain`): what was answered and
  measured, and never what was asked or what is right;
* `score(evidence, seed)` is pure: it draws the same questions from the seed, knows what is right, and turns
  the answers into points and messages. It needs no torch and no student code, so a grader can call it in
  another process, with a seed of its own. Evidence without exactly one answer to each question is foreign.

One file per chapter (`memory_basics`, `four_consumers`, …), each with a tuple `EXERCISES`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memlab.files import write_whole
from memlab.units import unknown_name

#: Evidence travels to the grader as an output of this type (`{"exercise", "seed", "evidence"}`).
EVIDENCE_MIME = "application/vnd.memlab.evidence+json"

#: Chapter number -> module with its exercises.
CHAPTERS = {"1": "memory_basics", "2": "four_consumers", "3": "deep", "4": "wide", "5": "big_data",
            "6": "combined", "7": "faq"}  # fmt: skip

#: Characters of one text, of a key or a type's name, of one message, and of a check's evidence as JSON.
_MAX_TEXT, _MAX_NAME, _MAX_MESSAGE, _MAX_EVIDENCE = 10_000, 200, 2_000, 2_000_000

#: The error of an answer that isn't written yet, where an exercise asks for several.
NOT_WRITTEN = "not written yet"

Evidence = dict[str, Any]
Question = TypeVar("Question")


class Score(NamedTuple):
    """Points earned and what to tell the student, one line each, the first thing to mend first.

    `doubt` says what is odd about the evidence itself: `foreign` where no run of the check leaves such
    evidence, `malformed` where the score can't read it; both earn nothing.
    """

    points: float
    messages: tuple[str, ...] = ()
    doubt: str = ""


class ForeignEvidence(ValueError):
    """Evidence that doesn't hold exactly one answer to each question: no check hands that over."""


@dataclass(frozen=True)
class Exercise:
    """One automatically graded exercise. `read` says where the chapter explains what it asks."""

    id: str
    title: str
    points: int
    evidence: Callable[[Any, int], Evidence]
    score: Callable[[Evidence, int], Score]
    read: str

    @property
    def chapter(self) -> str:
        return self.id.partition(".")[0]


def exercises(chapter: str | int | None = None) -> dict[str, Exercise]:
    """All exercises by id, in the order of the course, or those of one chapter."""
    found: dict[str, Exercise] = {}
    for number, module in CHAPTERS.items():
        if chapter is None or str(chapter) == number:
            for exercise in importlib.import_module(f"memlab.exercises.{module}").EXERCISES:
                found[exercise.id] = exercise
    return found


# -- what evidence is made of ------------------------------------------------------------------------------


def plain(value: Any, depth: int = 6) -> Any:
    """`value` as plain data, by its exact type: what can't be vouched for becomes `{"type": name}`.

    An object whose `__eq__` always says yes, or a subclass of int, is never passed on as a number. A tensor
    or array becomes a list of numbers when it has at most 10,000 elements; nan and inf become text. Of a
    list, tuple or dict of another class (a namedtuple) counts what it holds, not what it says it holds.
    """
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return str(value)  # JSON has no nan
    if kind is int and value.bit_length() > 256:
        return {"type": "int of more than 256 bits"}
    if kind is Fraction or kind is Decimal:
        return plain(int(value) if value == int(value) else float(value))
    if value is None or kind in (bool, int, float):
        return value
    if kind is str:
        return value[:_MAX_TEXT]
    module = kind.__module__
    if depth > 0 and issubclass(kind, (list, tuple)) and module != "torch":
        items = list.__iter__(value) if issubclass(kind, list) else tuple.__iter__(value)
        return [plain(item, depth - 1) for item in itertools.islice(items, 10_000)]
    if depth > 0 and issubclass(kind, dict):
        pairs = itertools.islice(dict.items(value), 10_000)
        return {str(key)[:_MAX_NAME]: plain(item, depth - 1) for key, item in pairs}
    if (module == "torch" and kind.__name__ in ("Tensor", "Parameter")) or module == "torch.nn.parameter":
        return plain(value.detach().tolist(), depth) if value.numel() <= 10_000 else {"type": "large Tensor"}
    if module == "numpy" and hasattr(value, "tolist"):
        return plain(value.tolist(), depth) if value.size <= 10_000 else {"type": "large array"}
    if module == "torch" and kind.__name__ in ("dtype", "Size", "device"):
        return list(value) if kind.__name__ == "Size" else str(value)
    return {"type": str(kind.__name__)[:_MAX_NAME]}


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Calls the student's function: `{"value": plain data}` or `{"error": one line}`.

    `NotImplementedError` passes: an exercise that isn't written yet is no error of one input.
    """
    try:
        return {"value": plain(function(*args, **kwargs))}
    except NotImplementedError:
        raise
    except (Exception, SystemExit) as error:
        return {"error": one_line(error)}


def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`call`, but an answer of several that isn't written yet is evidence too."""
    try:
        return call(function, *args, **kwargs)
    except NotImplementedError:
        return {"error": NOT_WRITTEN}


def unwritten(entries: Iterable[Evidence]) -> bool:
    """None of the answers is written yet."""
    return {entry.get("error") for entry in entries} == {NOT_WRITTEN}


def stopped(name: str, entry: Evidence) -> str:
    """What the error of one answer says, for a message."""
    error = entry["error"]
    return f"{name}: {error}" if error == NOT_WRITTEN else f"{name} stopped with {error}"


def several(answer: Any, exercise: str, *names: str) -> tuple[Any, ...]:
    """The answers of an exercise that asks for more than one."""
    if type(answer) is not tuple or len(answer) != len(names):
        count = {2: "both", 3: "all three"}[len(names)]
        raise TypeError(f'write check("{exercise}", {", ".join(names)}): it asks for {count}')
    return answer


def answers_to(questions: Iterable[Question], entries: Any) -> list[tuple[Question, Evidence]]:
    """Each question with what `call` gave for it. Raises ForeignEvidence unless each has exactly one."""
    asked = list(questions)
    if type(entries) is not list or len(entries) != len(asked):
        raise ForeignEvidence(f"{len(asked)} questions were asked")
    for entry in entries:
        if type(entry) is not dict or ("value" in entry) is ("error" in entry):
            raise ForeignEvidence("a question has no answer, or two")
    return list(zip(asked, entries, strict=True))


def exactly(entries: Any, number: int) -> list[Any]:
    """A list of `number` measurements. Raises ForeignEvidence where it isn't."""
    if type(entries) is not list or len(entries) != number:
        raise ForeignEvidence(f"{number} measurements were made")
    return entries


@contextlib.contextmanager
def watched(look: Callable[[Any, Any], None]) -> Iterator[None]:
    """Within the block, `look(operator, tensor)` for each tensor that an operator of this thread returns."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    look(func, leaf)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield


def one_line(error: BaseException) -> str:
    """'ZeroDivisionError: division by zero (line 4 of your code)'."""
    text = " ".join(str(error).split())[:300]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_student(f.filename)]
    where = f" (line {frames[-1].lineno} of your cell)" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _is_student(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith("<ipython-input") or filename == "<student>"


def is_number(value: Any) -> bool:
    """An int or float that is finite; a bool is no number."""
    return type(value) in (int, float) and math.isfinite(value)


def close(value: Any, expected: float, tolerance: float = 0.005) -> bool:
    """`value` is a number within `tolerance` (relative) of `expected`."""
    return is_number(value) and abs(value - expected) <= tolerance * abs(expected)


@dataclass
class Tally:
    """Adds up points: each criterion earns its share or leaves a message."""

    points: float = 0
    messages: list[str] = field(default_factory=list)

    def award(self, points: float, earned: bool, otherwise: str) -> bool:
        if earned:
            self.points += points
        else:
            self.messages.append(otherwise)
        return earned

    def score(self) -> Score:
        return Score(round(self.points, 6), tuple(self.messages))


# -- running a check ---------------------------------------------------------------------------------------


def check(exercise_id: str, *answer: Any) -> float:
    """Checks `answer` to one exercise, prints what to do next, and returns the points.

    While being graded it only hands over the evidence and returns nan: points are computed elsewhere.
    Works in any order and needs no GPU. Warnings and stderr of the answer are shown as plain text, since
    a graded cell that writes to stderr would lose its points.
    """
    known = exercises()
    if str(exercise_id) not in known:
        raise unknown_name("exercise", exercise_id, known)
    exercise = known[str(exercise_id)]
    if not answer:
        raise TypeError(f'check("{exercise.id}", …) needs your answer: the function or value to check')
    seed = _seed()
    with _stderr_to_stdout():
        evidence = collect(exercise, answer[0] if len(answer) == 1 else answer, seed)
    if os.environ.get("MEMLAB_GRADING"):
        _hand_over(exercise, seed, evidence)
        return math.nan
    score = rate(exercise, evidence, seed)
    print(report(exercise, score))
    if not evidence.get("not_written"):  # another, untouched copy erases nothing
        _remember(exercise, score)
    return int(score.points) if score.points == int(score.points) else score.points


def collect(exercise: Exercise, answer: Any, seed: int) -> Evidence:
    """Runs the answer. Whatever it raises becomes evidence; only an interrupt passes."""
    try:
        return exercise.evidence(answer, seed)
    except NotImplementedError as error:
        return {"not_written": True} if str(error).startswith("exercise") else {"error": one_line(error)}
    except (Exception, SystemExit) as error:
        return {"error": one_line(error)}


def rate(exercise: Exercise, evidence: Mapping[str, Any], seed: int = 0) -> Score:
    """Points for evidence collected with this seed, between 0 and the exercise's maximum.

    Raises nothing, whatever the evidence is: what can't be read earns 0, and `Score.doubt` says so.
    """
    if evidence.get("not_written") is True:
        return Score(
            0, (f"not written yet: replace `raise NotImplementedError` under `# exercise {exercise.id}`",)
        )
    if "error" in evidence:
        return Score(0, _short((f"your code stopped with {evidence['error']}",)))
    try:
        score = exercise.score(dict(evidence), seed)
        points = min(max(float(score.points), 0), exercise.points)
    except ForeignEvidence as error:
        return Score(0, ("this isn't what the check hands over",), f"foreign: {error}")
    except Exception as error:  # evidence of a hostile kernel may be anything
        why = f"malformed: {type(error).__name__}"
        return Score(0, ("the answer has the wrong form: read again what the exercise asks to return",), why)
    if math.isnan(points):
        return Score(0, (), "malformed: nan points")
    return Score(points, _short(score.messages))


def _short(messages: Iterable[str]) -> tuple[str, ...]:
    return tuple(message[:_MAX_MESSAGE] for message in messages)


def report(exercise: Exercise, score: Score) -> str:
    """The lines that a student reads after a check."""
    head = f"exercise {exercise.id} ({exercise.title}): {score.points:g} of {exercise.points} points"
    if score.points == exercise.points:
        return f"{head}. Right."
    lines = [head, *(f"  - {message}" for message in score.messages), f"  read again: {exercise.read}"]
    return "\n".join(lines)


def _seed() -> int:
    """0 for students; a grader sets a private one, so that hidden inputs aren't in the repository."""
    text = os.environ.get("MEMLAB_CHECK_SEED", "0")
    return int(text) if text.isdigit() else sum(text.encode()) * 7919


@contextlib.contextmanager
def _stderr_to_stdout() -> Iterator[None]:
    caught = io.StringIO()
    with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stderr(caught):
        warnings.simplefilter("always")
        yield
    for warning in {f"{w.category.__name__}: {w.message}": None for w in seen}:
        print("note:", warning.splitlines()[0][:200])
    if caught.getvalue().strip():
        print(caught.getvalue()[-2000:].rstrip())


def _hand_over(exercise: Exercise, seed: int, evidence: Evidence) -> None:
    """Leaves the evidence in the cell's outputs, for the grader."""
    if len(json.dumps(evidence)) > _MAX_EVIDENCE:
        evidence = {"error": f"ValueError: the answer is larger than {_MAX_EVIDENCE // 10**6} MB as text"}
    with contextlib.suppress(ImportError):
        from IPython.display import display

        payload = {"exercise": exercise.id, "seed": seed, "evidence": evidence}
        display({EVIDENCE_MIME: payload, "text/plain": f"evidence {exercise.id}"}, raw=True)  # type: ignore[no-untyped-call]


# -- progress ----------------------------------------------------------------------------------------------


def _progress_file() -> Path:
    return Path(os.environ.get("MEMLAB_HOME", Path.home() / ".memlab")) / "progress.json"


def _read_progress() -> dict[str, float]:
    try:
        data = json.loads(_progress_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {key: value for key, value in data.items() if isinstance(key, str) and is_number(value)}


_points: dict[str, float] = {}


def _remember(exercise: Exercise, score: Score) -> None:
    """Keeps the latest points of each exercise, across kernels."""
    _points[exercise.id] = score.points
    path = _progress_file()
    with contextlib.suppress(OSError):  # a read-only home loses the record, not the check
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({**_read_progress(), **_points}))


def progress() -> None:
    """Prints which exercises are done and the points so far (hand-graded answers not included).

    A chapter of which nothing was tried takes one line.
    """
    points = {**_read_progress(), **_points}
    total = earned = 0.0
    for number in CHAPTERS:
        known = exercises(number)
        top = sum(exercise.points for exercise in known.values())
        total += top
        if not points.keys() & known.keys():
            print(f"{number:>2}.*         {top:>2}  not tried  chapter {number}")
            continue
        for exercise in known.values():
            got = points.get(exercise.id)
            earned += got or 0
            mark = "      " if got is None else f"{got:g}".rjust(3) + " of"
            state = "not tried" if got is None else ("done" if got == exercise.points else "open")
            print(f"{exercise.id:>4}  {mark} {exercise.points:>2}  {state:<9}  {exercise.title}")
    print(f"      {earned:g} of {total:g} points; one written answer per chapter is graded by hand")
    print("      the latest check of each exercise on this machine, in any notebook")


def __getattr__(name: str) -> Any:
    if name == "EXERCISES":
        return exercises()
    raise AttributeError(name)
