"""Reads a submission's code for what no honest answer needs, and what beats checks that share its process.

A finding is a reason for a person to look, never a loss of points: code can be innocent and strange.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import memlab

_TEXTS = {
    "vnd.memlab.evidence": "names the evidence that only a check may hand over",
    "MEMLAB_CHECK_SEED": "reads the seed of the hidden inputs",
    "MEMLAB_GRADING": "asks whether it is being graded",
    "/proc/self": "looks into its own process",
    "/dev/fd": "looks into its own process",
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
_BELOW = "reaches below Python"
_MODULES = {
    "ctypes": _BELOW, "_ctypes": _BELOW, "cffi": _BELOW, "posix": _BELOW, "faulthandler": "",
    "_posixsubprocess": _BELOW, "_multiprocessing": _BELOW, "_testcapi": _BELOW, "_xxsubinterpreters": _BELOW,
    "_interpreters": _BELOW,
}  # fmt: skip
_PIPES = "speaks on pipes and files by their numbers"
#: Of these modules, what only serves to speak for the check, to end before it does, or to change it.
_OF_MODULES = {
    "os": {
        **dict.fromkeys(
            ("write", "writev", "pwrite", "fdopen", "fstat", "dup", "dup2", "sendfile", "splice", "pipe"),
            _PIPES,
        ),
        **dict.fromkeys(("_exit", "abort"), "ends the process of its check"),
        **dict.fromkeys(("fork", "forkpty"), "forks the process of its check"),
    },
    "io": {"FileIO": _PIPES}, "_io": {"FileIO": _PIPES},
    "multiprocessing": {"connection": _PIPES},
    "concurrent": {"interpreters": _BELOW},
    "sys": {"modules": "reaches modules by a list of them", "monitoring": "watches every call in the kernel"},
}  # fmt: skip
_OWN = ("memlab", "builtins", "sys")
#: Settings that a script may change; any other attribute of a module is somebody's function.
_SETTINGS = ("torch.backends", "torch._dynamo.config", "matplotlib", "IPython")
_CHECKS = "memlab.exercises"
#: What the chapters themselves show of it.
_SHOWN = f"{_CHECKS}.limits.in_child"
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
    imported = _imported(tree)
    asked = {id(node.comparators[-1]) for node in ast.walk(tree) if isinstance(node, ast.Compare)}
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_MODULES.get(alias.name.partition(".")[0], "") for alias in node.names)
            yield from (_of_module(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield _MODULES.get((node.module or "").partition(".")[0], "")
            for alias in node.names:
                yield _ATTRIBUTES.get(alias.name, "")
                yield _of_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (why for text, why in _TEXTS.items() if text in node.value)
            yield from (_HIDDEN.get(word, "") for word in node.value.split("."))
        elif isinstance(node, ast.Attribute):
            yield _ATTRIBUTES.get(node.attr, "")
            if id(node) not in asked:  # "google.colab" in sys.modules
                yield _of_module(_origin(node, imported))
            if node.attr == "__dict__" and _origin(node.value, imported):
                yield f"reaches into the names of {ast.unparse(node.value)}"
            if isinstance(node.ctx, ast.Store | ast.Del):
                if node.attr in _CODE:
                    yield f"replaces a function's {node.attr}"
                yield _replaced(node, imported)
        elif isinstance(node, ast.Name) and id(node) not in bases and isinstance(node.ctx, ast.Load):
            if _is_module_of_ours(imported.get(node.id, "")):
                yield f"hands {node.id} itself on"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, first = node.func.attr, node.args[0] if node.args else None
            if name in ("__setattr__", "__delattr__", "__getattribute__") and not _is_super(node.func.value):
                yield "sets an attribute by a way around"
            if name == "stack" and ast.unparse(node.func.value) == "inspect":
                yield _ATTRIBUTES["_getframe"]
            if name == "import_module" and (not isinstance(first, ast.Constant) or _names_us(first)):
                yield "imports by a text"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield _CALLS.get(node.func.id, "")
            yield from _reaches(node, imported)
        elif isinstance(node, ast.FunctionDef) and node.name in ("__eq__", "__instancecheck__"):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            if len(returns) == 1 and isinstance(returns[0], ast.Constant) and returns[0].value is True:
                yield "makes an object that equals everything"


#: Attributes that a text may name too (`getattr(frame, "f_back")`): those that mean nothing else.
_HIDDEN = {name: why for name, why in _ATTRIBUTES.items() if "_" in name} | dict.fromkeys(
    _CODE, "names what a function is made of"
)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Each name that stands for a module, or for what was imported from one: where it comes from."""
    found = {"memlab": "memlab", "builtins": "builtins", "sys": "sys"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for _ in range(3):  # other names for them: m = memlab.units
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.NamedExpr | ast.AnnAssign) and node.value is not None:
                origin = _origin(node.value, found)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if origin and isinstance(target, ast.Name):
                        found.setdefault(target.id, origin)
    return found


def _origin(node: ast.expr, imported: dict[str, str]) -> str:
    """'memlab.exercises.deep' for what is reached by names from an import; '' for anything else."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _origin(node.value, imported)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        name = node.args[-1]
        if node.func.id == "__import__" and isinstance(name, ast.Constant):
            return str(name.value)
        if node.func.id == "getattr" and isinstance(name, ast.Constant) and isinstance(name.value, str):
            base = _origin(node.args[0], imported)
            return base and f"{base}.{name.value}"
    return ""


def _of_module(path: str) -> str:
    """What reaching this name of a module is good for, where no answer needs it."""
    if path.startswith(_CHECKS) and path != _SHOWN and not _SHOWN.startswith(f"{path}."):
        return "reaches into the checks themselves"
    parts = path.split(".")
    for count in range(1, len(parts)):
        why = _OF_MODULES.get(".".join(parts[:count]), {}).get(parts[count], "")
        if why:
            return why
    return ""


def _is_module_of_ours(path: str) -> bool:
    """Whether this is memlab, or a module in it: a function of it may be handed on as it likes."""
    parts = path.split(".")
    place = Path(memlab.__file__).parent.joinpath(*parts[1:])
    return parts[0] == "memlab" and (place.is_dir() or place.with_suffix(".py").is_file())


def _reaches(node: ast.Call, imported: dict[str, str]) -> Iterator[str]:
    """Calls that reach a module or an attribute by another way than its written name."""
    if not isinstance(node.func, ast.Name) or not node.args:
        return
    name, first = node.func.id, node.args[0]
    if name in ("setattr", "delattr"):
        yield _replaced(ast.Attribute(first, "…", ast.Store()), imported)
    if name in ("getattr", "setattr", "delattr") and len(node.args) > 1 and _is_made(node.args[1]):
        yield "puts the name of an attribute together"
    if name == "getattr":
        yield _of_module(_origin(node, imported))
    if name == "vars" and _origin(first, imported):
        yield f"reaches into the names of {ast.unparse(first)}"
    if name == "__import__" and not (isinstance(first, ast.Constant) and not _names_us(first)):
        yield "imports by a text"
    if name == "__import__" and isinstance(first, ast.Constant):
        yield _MODULES.get(str(first.value).partition(".")[0], "")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def _is_made(node: ast.expr) -> bool:
    """A text that is put together, in place of one that is written down or comes from elsewhere."""
    return isinstance(node, ast.BinOp | ast.JoinedStr)


def _names_us(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.partition(".")[0] in _OWN
    )


def _replaced(node: ast.Attribute, imported: dict[str, str]) -> str:
    """'replaces memlab.check' where an attribute of a module, or of a class in one, is stored."""
    origin = _origin(node.value, imported)
    if not origin or origin.startswith(_SETTINGS):
        return ""
    return f"replaces {ast.unparse(node)}"
