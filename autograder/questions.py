"""memlab as a graded kernel sees it: every exercise with its question, none with its answer.

An exercise is two functions: `evidence` runs the student's code, `score` knows what is right. Points are
computed outside the sandbox, so the copy inside holds the first alone: whoever forges evidence has to know
the answer, and then needs no forgery.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable
from pathlib import Path

import memlab


def make_library(folder: Path) -> None:
    """Writes the copy of memlab to `folder`/memlab, readable by everybody."""
    source = Path(memlab.__file__).parent
    target = folder / "memlab"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for path in (target / "exercises").glob("*.py"):
        if path.name not in ("__init__.py", "limits.py"):
            path.write_text(without_answers(path.read_text("utf-8")), "utf-8")
    for path in (folder, target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def without_answers(source: str) -> str:
    """The module without what only its `score` functions use, and without comments.

    Kept are imports, EXERCISES, the evidence functions and all that these refer to, however indirectly.
    """
    tree = ast.parse(source)
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _defines(statement):
            defined.setdefault(name, []).append(statement)
    table = [statement for statement in tree.body if "EXERCISES" in _defines(statement)]
    for statement in table:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Exercise":
                _forget_score(node)
    wanted = ["EXERCISES"]
    seen: set[str] = set()
    kept: set[int] = set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for statement in defined.get(name, []):
            kept.add(id(statement))
            wanted += _refers_to(statement)
    tree.body = [s for s in tree.body if id(s) in kept or not _defines(s)]
    _forget_methods(tree)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _forget_score(call: ast.Call) -> None:
    """`score` is the fifth argument of Exercise."""
    if len(call.args) > 4:
        call.args[4] = ast.Constant(None)
    for keyword in call.keywords:
        if keyword.arg == "score":
            keyword.value = ast.Constant(None)


def _forget_methods(tree: ast.Module) -> None:
    """Takes from hidden cases (NamedTuples) the methods that nothing here calls: they say what is right."""
    classes = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)]
    cases = [c for c in classes if any(ast.unparse(base) == "NamedTuple" for base in c.bases)]
    while True:
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        unused = [
            (case, item) for case in cases for item in case.body
            if isinstance(item, ast.FunctionDef) and not item.name.startswith("__") and item.name not in used
        ]  # fmt: skip
        if not unused:
            return
        for case, item in unused:
            case.body.remove(item)


def _defines(statement: ast.stmt) -> list[str]:
    """Names that a top-level statement gives a meaning, imports and blocks aside."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = (statement.target,)
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _refers_to(statement: ast.stmt) -> list[str]:
    names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    # annotations are text here, and dataclasses read them
    texts = [n.value for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return names + [text for text in texts if text.isidentifier()]
