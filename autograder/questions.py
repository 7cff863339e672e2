"""memlab as a graded kernel sees it: every exercise with its question, none with its answer.

An exercise is two functions: `evidence` runs the student's code, `score` knows what is right. Points are
computed outside the sandbox, so the copy inside holds the first alone: whoever forges evidence has to know
the answer, and then needs no forgery.
"""

from __future__ import annotations

import ast
import shutil
import symtable
from collections.abc import Iterable, Iterator
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

    Kept are imports, EXERCISES, the evidence functions and all that these reach, however indirectly:
    functions and classes by their names, methods of hidden cases (NamedTuples) by theirs.
    """
    tree = ast.parse(source)
    for statement in tree.body:
        if "EXERCISES" in defines(statement):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Exercise":
                    _forget_score(node)
    kept = reached(tree, ["EXERCISES"])
    tree.body = [s for s in tree.body if id(s) in kept or not defines(s)]
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            gone = [item for item in _methods(statement) if id(item) not in kept]
            statement.body = [item for item in statement.body if item not in gone] or [ast.Pass()]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def reached(tree: ast.Module, names: Iterable[str]) -> set[int]:
    """The ids of the top-level statements and methods that these names of a module reach."""
    defined: dict[str, list[ast.stmt]] = {}
    methods: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in defines(statement):
            defined.setdefault(name, []).append(statement)
        for method in _methods(statement):
            methods.setdefault(method.name, []).append(method)
    found: set[int] = set()
    seen: set[tuple[str, str]] = set()
    wanted = [("name", name) for name in names]
    while wanted:
        word = wanted.pop()
        if word in seen:
            continue
        seen.add(word)
        for statement in (defined if word[0] == "name" else methods).get(word[1], []):
            found.add(id(statement))
            wanted += _refers_to(statement)
    return found


def _forget_score(call: ast.Call) -> None:
    """`score` is the fifth argument of Exercise."""
    if len(call.args) > 4:
        call.args[4] = ast.Constant(None)
    for keyword in call.keywords:
        if keyword.arg == "score":
            keyword.value = ast.Constant(None)


def _methods(statement: ast.stmt) -> list[ast.FunctionDef]:
    """Methods of a hidden case that run where their name is written; Python itself calls those with __.

    Other classes are part of the question: an answer may call any of their methods.
    """
    if not isinstance(statement, ast.ClassDef) or "NamedTuple" not in map(ast.unparse, statement.bases):
        return []
    return [i for i in statement.body if isinstance(i, ast.FunctionDef) and not i.name.startswith("__")]


def defines(statement: ast.stmt) -> list[str]:
    """Names that a top-level statement gives a meaning, imports and blocks aside."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = (statement.target,)
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _refers_to(statement: ast.stmt) -> list[tuple[str, str]]:
    """Names of the module and of attributes in a statement; those of a case without its methods'."""
    methods = _methods(statement)
    if methods and isinstance(statement, ast.ClassDef):
        left = [item for item in statement.body if item not in methods] or [ast.Pass()]
        statement = ast.ClassDef(**{**dict(ast.iter_fields(statement)), "body": left})
    table = symtable.symtable(ast.unparse(statement), "<exercise>", "exec")
    attributes = [node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)]
    return [("name", name) for name in _globals(table)] + [("attribute", name) for name in attributes]


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """What the code looks up in its module: a local variable of the same name isn't."""
    for symbol in table.get_symbols():
        if symbol.is_global() or table.get_type() == "module":
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _globals(inner)
