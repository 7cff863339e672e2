"""Code of the grader that runs in the graded kernel, around every check, and looks for tampering.

Student code shares the kernel's process, so nothing here is a proof: it is a row of tripwires. What it can't
see is bounded from outside, since evidence can only be forged by who knows the answer (`questions.py`).

* the functions that a check rests on are the ones that the kernel began with;
* an assertion that must fail does;
* a wrong answer, drawn at random, doesn't earn full points.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
from collections.abc import Callable
from typing import Any

from autograder.evidence import canary_seed, evidence_of, scored
from memlab.exercises import exercises, limits

Ask = Callable[[str, str], tuple[str, str, list[Any]]]

_WATCHED = (*limits.WATCHED, "IPython.core.display_functions")

_LOOK = (
    "from __future__ import annotations\nimport sys\n"
    + inspect.getsource(limits.step_hooks)
    + inspect.getsource(limits.functions)
    + """
seen = {name: list(ids) for name, ids in functions(watched)}
tensor = sys.modules.get("torch")
if tensor is not None:
    for name, value in list(vars(tensor.Tensor).items()) + list(vars(tensor.Tensor.__mro__[1]).items()):
        seen["torch.Tensor." + name] = [id(value)]
shell = sys.modules["IPython"].get_ipython()
seen["hooks"] = [len(shell.ast_transformers), len(shell.input_transformers_post),
                 len(shell.input_transformer_manager.line_transforms),
                 len(shell.input_transformer_manager.token_transformers), len(shell.custom_exceptions),
                 id(type(shell)), id(type(shell).run_cell), id(type(shell.kernel).do_execute)]
digest = sys.modules["zlib"].crc32(repr(sorted(seen.items())).encode())
"""
)


def _expression(result: str, arguments: dict[str, Any]) -> str:
    """Evaluates `_LOOK` with a namespace of its own: no name of the student's can get in its way."""
    return (
        f"(lambda space: (__import__('builtins').exec({_LOOK!r}, space), {result})[1])"
        f"(__import__('builtins').dict({arguments!r}))"
    )


_ARGUMENTS = {"watched": _WATCHED}
_DIGEST = _expression("space['digest']", _ARGUMENTS)
_FULL = _expression("__import__('json').dumps(space['seen'])", _ARGUMENTS)


class Watch:
    """Looks at one kernel, through `ask`: code and expression → (status, text, outputs)."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._digest = ""
        self._first: dict[str, Any] = {}

    def begin(self) -> None:
        """Before the first cell: what an untouched kernel looks like."""
        _, self._digest, _ = self._ask("", _DIGEST)
        self._first = self._everything()

    def before(self, seed: int) -> list[str]:
        """Before a check, whose hidden inputs come from `seed`: the kernel learns it only now."""
        status, digest, _ = self._ask(_SET_SEED.format(seed), _DIGEST)
        found = [] if status == "ok" else ["an assertion that must fail doesn't"]
        return found + self._compare(digest)

    def after(self, number: str, source: str, seed: int) -> list[str]:
        """After a check: a wrong answer to the same exercise, through the kernel's own check, and a look."""
        own = canary_seed(seed, number)
        wrong = random.Random(own).choice(_WRONG)
        answers = ", ".join([wrong] * _answers(source))
        _, digest, outputs = self._ask(_CANARY.format(own, number, answers), _DIGEST)
        found = self._compare(digest)
        evidence = evidence_of(outputs, number, own)
        exercise = exercises(number.partition(".")[0])[number]
        if evidence is not None and scored(number, evidence, own).points >= exercise.points:
            found.append(f"a wrong answer ({wrong}) earns full points")
        return found

    def _compare(self, digest: str) -> list[str]:
        if digest == self._digest and digest:
            return []
        now = self._everything()
        changed = [name for name, ids in self._first.items() if now.get(name) != ids]
        if not changed and now:
            # names were added, by an import for instance: from here on they belong to the picture
            self._first, self._digest = now, digest
            return []
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        return [f"changed in the kernel: {shown or 'it can not be looked at any more'}"]

    def _everything(self) -> dict[str, Any]:
        _, text, _ = self._ask("", _FULL)
        try:
            found = json.loads(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return {}
        return found if isinstance(found, dict) else {}


_SET_SEED = """
try:
    assert 1 == 2
except AssertionError:
    __import__("os").environ["MEMLAB_CHECK_SEED"] = "{}"
else:
    raise AssertionError
"""
_CANARY = """
__import__("os").environ["MEMLAB_CHECK_SEED"] = "{}"
try:
    __import__("memlab").check("{}", {})
except BaseException:
    pass
finally:
    __import__("os").environ["MEMLAB_CHECK_SEED"] = "0"
"""

#: Answers that are right for no exercise.
_WRONG = ("None", "'?'", "lambda *a, **k: None")


def _answers(source: str) -> int:
    """How many answers the check takes: `memlab.check("1.1", bandwidth, visible)` takes two."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check":
            return max(len(node.args) - 1, 1)
    return 1
