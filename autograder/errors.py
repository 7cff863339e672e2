"""What may be told of an error of a student's code: an error's free text can spell what the code was given.

Told are its type, its line, and Python's own sentences with names that stand in the student's own code.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from typing import Any

from memlab.doctor import syntax_error

#: Python's and torch's own sentences; `@` is a name, `#` a small number.
_SENTENCES = (
    "name '@' is not defined", "name '@' is not defined. Did you mean: '@'?",
    "cannot access local variable '@' where it is not associated with a value",
    "cannot access free variable '@' where it is not associated with a value in enclosing scope",
    "'@' object has no attribute '@'", "'@' object has no attribute '@'. Did you mean: '@'?",
    "type object '@' has no attribute '@'", "module '@' has no attribute '@'",
    "module '@' has no attribute '@'. Did you mean: '@'?",
    "No module named '@'", "cannot import name '@' from '@'",
    "'@' object is not callable", "'@' object is not iterable", "'@' object is not subscriptable",
    "'@' object is not an iterator", "'@' object does not support item assignment",
    "'@' object cannot be interpreted as an integer", "object of type '@' has no len()",
    "cannot unpack non-iterable @ object", "argument of type '@' is not iterable", "unhashable type: '@'",
    "unsupported operand type(s) for ~: '@' and '@'", "'~' not supported between instances of '@' and '@'",
    "bad operand type for unary ~: '@'", "can only concatenate @ (not \"@\") to @",
    "list indices must be integers or slices, not @", "tuple indices must be integers or slices, not @",
    "string indices must be integers, not '@'", "must be real number, not @",
    "@() missing # required positional argument: '@'",
    "@() missing # required positional arguments: '@' and '@'",
    "@() missing # required keyword-only argument: '@'",
    "@() takes # positional argument but # were given", "@() takes # positional arguments but # were given",
    "@() takes # positional arguments but # was given", "@() got an unexpected keyword argument '@'",
    "@() got multiple values for argument '@'", "@() takes no arguments",
    "division by zero", "integer division or modulo by zero", "integer modulo by zero",
    "float division by zero",
    "float modulo", "list index out of range", "tuple index out of range", "string index out of range",
    "pop from empty list", "math domain error", "maximum recursion depth exceeded",
    "list.remove(x): x not in list",
    "maximum recursion depth exceeded in comparison", "dictionary changed size during iteration",
    "not enough values to unpack (expected #, got #)", "too many values to unpack (expected #)",
    "too many values to unpack (expected #, got #)", "max() iterable argument is empty",
    "min() iterable argument is empty", "generator raised StopIteration",
    "element # of tensors does not require grad and does not have a grad_fn",
    "grad can be implicitly created only for scalar outputs",
    "a leaf Variable that requires grad is being used in an in-place operation.",
    "write check(\"~\", @, @): it asks for both", "write check(\"~\", @, @, @): it asks for all three",
    "no answer within # s", "no result within # s", "more than # s",
    "the answer is larger than # MB as text",
)  # fmt: skip

#: Longer sentences of torch of which the beginning says it all.
_BEGINNINGS = (
    "mat1 and mat2 shapes cannot be multiplied", "The size of tensor a",
    "Expected all tensors to be on the same device",
    "Trying to backward through the graph a second time", "expected scalar type",
    "expected m1 and m2 to have the same dtype",
    "one of the variables needed for gradient computation has been modified by an inplace operation",
    "Boolean value of Tensor with more than one value is ambiguous",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory", "invalid literal for int()", "could not convert string to float",
)  # fmt: skip

_PARTS = {"@": r"([\w.]{1,80})", "#": r"\d{1,3}", "~": r"[^\w\s]{1,3}|\d\.\d"}
_KNOWN = [
    re.compile(
        "".join(f"(?:{_PARTS[p]})" if p in _PARTS else re.escape(p) for p in re.split("([@#~])", text))
    )
    for text in _SENTENCES
]
_TYPES = {name for name, value in vars(builtins).items() if isinstance(value, type)} | {
    "NoneType", "function", "module", "method", "generator", "Tensor", "Parameter",
    "builtin_function_or_method",
    "OutOfMemoryError",
}  # fmt: skip
_FRAME = re.compile(r"Cell In\[\d+\], line (\d+)")
_LINE = re.compile(r" \(line (\d{1,6}) of your cell\)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def told(error: str, source: str) -> str:
    """`NameError: name 'y' is not defined (line 3 of your cell)` as it may be told; free text becomes `…`.

    `source` is the student's code: no line beyond its end is told, and no name that isn't in it.
    """
    where = ""
    if match := _LINE.search(error):
        error = error[: match.start()]
        if int(match[1]) <= source.count("\n") + 1:
            where = match[0]
    name, _, text = error.partition(": ")
    own = set(re.findall(r"[^\W\d]\w*", source))
    kind = name if name in _TYPES or name in own else "…"
    return f"{kind}: {_sentence(text, own)}{where}" if text.strip() else f"{kind}{where}"


def _sentence(text: str, own: set[str]) -> str:
    text = re.sub(r"( from '[\w.]+') \(.*\)$", r"\1", text.strip())
    for known in _KNOWN:
        if match := known.fullmatch(text):
            for group in range(match.re.groups, 0, -1):
                names = match[group].split(".")
                if not all(n in own or n in _TYPES for n in names):
                    text = f"{text[: match.start(group)]}…{text[match.end(group) :]}"
            return text
    return next((f"{begin} …" for begin in _BEGINNINGS if text.startswith(begin)), "…")


def stopped(cell: Any) -> str:
    """'NameError in line 3: name 'y' is not defined' of a cell that ended in an error; '' for any other.

    An exercise that isn't written yet is no error, and a lost kernel is told elsewhere.
    """
    for name, text, traceback in _errors(cell):
        if name in ("NotImplementedError", "KernelDied"):
            continue
        if syntax := syntax_error(cell.source):
            return syntax
        line = _FRAME.search(_COLOUR.sub("", traceback))
        at = f" in line {line[1]}" if line and int(line[1]) <= cell.source.count("\n") + 1 else ""
        kind, _, sentence = told(f"{name}: {text}", cell.source).partition(": ")
        return f"{kind}{at}" + (f": {sentence}" if sentence not in ("", "…") else "")
    return ""


def _errors(cell: Any) -> Iterator[tuple[str, str, str]]:
    for output in cell.get("outputs", []):
        if output.get("output_type") == "error":
            yield output["ename"], output["evalue"], "\n".join(output.get("traceback", []))
