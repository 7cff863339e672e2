"""Reads a submission's code for what no honest answer needs, and what beats checks that share its process.

A finding is a reason for a person to look, never a loss of points: code can be innocent and strange.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_TEXTS = {
    "vnd.memlab.evidence": "names the evidence that only a check may hand over",
    "MEMLAB_CHECK_SEED": "reads the seed of the hidden inputs",
    "MEMLAB_GRADING": "asks whether it is being graded",
}
_ATTRIBUTES = {
    "ast_transformers": "changes code before it runs",
    "input_transformers_post": "changes code before it runs",
    "input_transformers_cleanup": "changes code before it runs",
    "input_transformer_manager": "changes code before it runs",
    "set_custom_exc": "replaces how errors are shown",
    "showtraceback": "replaces how errors are shown",
    "displayhook": "replaces how results are shown",
    "display_pub": "replaces how results are shown",
    "run_cell": "replaces how cells are run",
    "_getframe": "looks into the frames of its caller",
    "currentframe": "looks into the frames of its caller",
    "f_back": "looks into the frames of its caller",
    "tb_frame": "looks into the frames of its caller",
    "gi_frame": "looks into the frames of its caller",
    "cr_frame": "looks into the frames of its caller",
    "f_locals": "looks into the frames of its caller",
    "f_globals": "looks into the frames of its caller",
    "_current_frames": "looks into the frames of its caller",
    "walk_stack": "looks into the frames of its caller",
    "getouterframes": "looks into the frames of its caller",
    "settrace": "watches every call in the kernel",
    "setprofile": "watches every call in the kernel",
    "get_objects": "searches the memory of the kernel",
    "get_referrers": "searches the memory of the kernel",
    "get_referents": "searches the memory of the kernel",
    "__subclasses__": "searches the memory of the kernel",
    "iopub_socket": "speaks for the kernel",
    "iopub_thread": "speaks for the kernel",
}
_CALLS = {"exec": "runs code out of a text", "eval": "runs code out of a text"}
_MODULES = {"ctypes": "reaches below Python", "cffi": "reaches below Python", "faulthandler": ""}
_OWN = ("memlab", "builtins", "sys")
_CODE = ("__code__", "__defaults__", "__kwdefaults__", "__globals__", "__closure__", "__builtins__")
_MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def suspicions(source: str) -> list[str]:
    """What a cell does that needs a look, each once, in the order of the code."""
    try:
        tree = ast.parse(_MAGIC.sub(r"\1pass", source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # it doesn't run as it is; what a magic makes of it is seen in its text alone
        return [why for text, why in _TEXTS.items() if text in source]
    return list(dict.fromkeys(why for why in _walk(tree) if why))


def _walk(tree: ast.AST) -> Iterator[str]:
    imported = {"memlab": "memlab", "builtins": "builtins", "sys": "sys"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _MODULES.get(alias.name.partition(".")[0], "")
                if alias.name.partition(".")[0] in _OWN:
                    imported[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            yield _MODULES.get((node.module or "").partition(".")[0], "")
            for alias in node.names:
                yield _ATTRIBUTES.get(alias.name, "")
                if (node.module or "").partition(".")[0] in _OWN and (alias.asname or alias.name).islower():
                    imported.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (why for text, why in _TEXTS.items() if text in node.value)
        elif isinstance(node, ast.Attribute):
            yield _ATTRIBUTES.get(node.attr, "")
            if node.attr == "__dict__" and _is_ours(node.value, imported):
                yield f"reaches into the names of {ast.unparse(node.value)}"
            if isinstance(node.ctx, ast.Store | ast.Del):
                if node.attr in _CODE:
                    yield f"replaces a function's {node.attr}"
                yield _replaced(node, imported)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if ast.unparse(node.value) in ("sys.modules", "modules"):
                yield "replaces a loaded module"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, first = node.func.attr, node.args[0] if node.args else None
            if name in ("__setattr__", "__delattr__") and not _is_super(node.func.value):
                yield "sets an attribute by a way around"
            if name == "stack" and ast.unparse(node.func.value) == "inspect":
                yield _ATTRIBUTES["_getframe"]
            if name == "import_module" and first is not None and _names_us(first):
                yield "imports by a text"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield _CALLS.get(node.func.id, "")
            yield from _reaches(node, imported)
        elif isinstance(node, ast.FunctionDef) and node.name in ("__eq__", "__instancecheck__"):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            if len(returns) == 1 and isinstance(returns[0], ast.Constant) and returns[0].value is True:
                yield "makes an object that equals everything"


def _reaches(node: ast.Call, imported: dict[str, str]) -> Iterator[str]:
    """Calls that reach a module or an attribute by another way than its written name."""
    if not isinstance(node.func, ast.Name) or not node.args:
        return
    name, first = node.func.id, node.args[0]
    if name in ("setattr", "delattr"):
        yield _replaced(ast.Attribute(first, "…", ast.Store()), imported)
    if name in ("getattr", "setattr", "delattr") and len(node.args) > 1 and _is_made(node.args[1]):
        yield "puts the name of an attribute together"
    if name == "vars" and _is_ours(first, imported):
        yield f"reaches into the names of {ast.unparse(first)}"
    if name == "__import__" and not (isinstance(first, ast.Constant) and not _names_us(first)):
        yield "imports by a text"


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def _is_made(node: ast.expr) -> bool:
    """A text that is put together, in place of one that is written down or comes from elsewhere."""
    return isinstance(node, ast.BinOp | ast.JoinedStr)


def _names_us(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(".")[0] in ("memlab", "builtins")
    )


def _is_ours(node: ast.expr, imported: dict[str, str]) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and imported.get(node.id, "").partition(".")[0] in _OWN


def _replaced(node: ast.Attribute, imported: dict[str, str]) -> str:
    """'replaces memlab.check' where an attribute of one of our modules is stored."""
    base: ast.expr = node.value
    while isinstance(base, ast.Attribute):
        base = base.value
    if isinstance(base, ast.Name) and imported.get(base.id, "").partition(".")[0] in ("memlab", "builtins"):
        return f"replaces {ast.unparse(node)}"
    return ""
