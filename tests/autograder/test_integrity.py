"""Wrong answers that try to look right: by changing what checks them, or by showing what they didn't earn."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest

from autograder import build
from autograder.course import chapters, select
from autograder.evidence import exercise_seed
from autograder.execution import Budget
from autograder.look import suspicions
from autograder.records import Job, Outcome
from autograder.sandbox import Sandbox, why_no_bubblewrap
from autograder.workers import run_job

ROOT = Path(__file__).resolve().parent.parent.parent
SEED = 5

if why_no_bubblewrap() and os.environ.get("CI"):
    pytest.fail(f"CI must test the sandbox: {why_no_bubblewrap()}")
sandboxed = pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap())

WRONG = "def bandwidth(bus_bits, gbps_per_pin):\n    return 1.0\ndef visible(nbytes):\n    return 1.0, 2.0\n"
RIGHT = (
    "def bandwidth(bus_bits, gbps_per_pin):\n    return bus_bits * gbps_per_pin / 8\n"
    "def visible(nbytes):\n    return nbytes / 10**9, nbytes / 2**30\n"
)

ATTACKS = {
    "check replaced": "import memlab\nmemlab.check = lambda *a: 2\n",
    "check shows nan": "import memlab\nmemlab.check = lambda *a: float('nan')\n",
    "code of check replaced": (
        "import memlab\ndef fake(exercise_id, *answer): return 2.0\nmemlab.check.__code__ = fake.__code__\n"
    ),
    "evidence function replaced": """
import dataclasses, memlab.exercises.memory_basics as m
def right(answer, seed, old=m._capacity_evidence):
    return old((lambda b, r: b * r / 8, lambda n: (n / 10**9, n / 2**30)), seed)
m.EXERCISES = (dataclasses.replace(m.EXERCISES[0], evidence=right), *m.EXERCISES[1:])
""",
    "a helper of the check replaced": """
import memlab.exercises.memory_basics as m
m.call = lambda f, *a: {"value": a[0] * a[1] / 8 if len(a) == 2 else [a[0] / 10**9, a[0] / 2**30]}
""",
    "assertions removed": """
import ast
class Remove(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
get_ipython().ast_transformers.append(Remove())
""",
    "input rewritten": """
def rewrite(lines):
    return [line.replace("bandwidth, visible", "lambda b, r: b * r / 8, lambda n: (n / 10**9, n / 2**30)")
            for line in lines]
get_ipython().input_transformers_post.append(rewrite)
""",
    "result shown by hand": "import sys\nsys.displayhook(2)\n",
    "evidence of another seed": """
from IPython.display import display
display({"application/vnd.memlab.evidence+json": {"exercise": "1.1", "seed": 0, "evidence": {}}}, raw=True)
""",
    "an update of the check's output": """
import threading, time
from IPython.display import display
handle = display({"text/plain": "x"}, raw=True, display_id="later")
def later():
    time.sleep(1)
    handle.update({"text/plain": "2.0"}, raw=True)
threading.Thread(target=later, daemon=True).start()
""",
    "randomness replaced": "import random\nrandom.Random.randint = lambda self, a, b: a\n",
    "builtins replaced": "import builtins\nbuiltins.abs = lambda x: 0\n",
}


def submit(sandbox: Sandbox, answer: str, after: str = "") -> Outcome:
    """Exercise 1.1 of chapter 1 alone."""
    [item] = build.build_all(select(ROOT, ["1"]))
    notebook = nbformat.reads(build.to_text(item.source), 4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in ("ex-1-1", "check-1-1")]
    notebook.cells[0].source = answer
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import memlab"))
    if after:
        notebook.cells.append(nbformat.v4.new_code_cell(after))
    job = Job("s", "s", "01_memory_basics", nbformat.writes(notebook), SEED, (), "key", ("ex-1-1",))
    return run_job(job, sandbox, Budget(cell_seconds=20))


@sandboxed
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wrong_answer_stays_wrong_or_is_found_out(sandbox: Sandbox, attack: str) -> None:
    outcome = submit(sandbox, WRONG + ATTACKS[attack])
    found = {status for status, _ in outcome.doubts}
    assert not outcome.points["1.1"] or "tampered" in found, outcome.doubts


@sandboxed
@pytest.mark.parametrize(
    "attack",
    [
        "check replaced",
        "code of check replaced",
        "assertions removed",
        "input rewritten",
        "randomness replaced",
        "builtins replaced",
    ],
)
def test_tampering_is_named(sandbox: Sandbox, attack: str) -> None:
    outcome = submit(sandbox, WRONG + ATTACKS[attack])
    assert "tampered" in {status for status, _ in outcome.doubts}, outcome.doubts
    assert any(word in why for _, why in outcome.doubts for word in ("changed in the kernel", "assertion"))


@sandboxed
def test_an_honest_answer_raises_no_doubt_whatever_its_names_are(sandbox: Sandbox) -> None:
    odd = "sum = len = print = dict = exec = json = os = None\nimport numpy, torch.nn.functional as F\n"
    outcome = submit(sandbox, RIGHT + odd)
    assert outcome.points["1.1"] == 2 and outcome.doubts == []


@sandboxed
def test_what_a_check_shows_is_the_graders_and_not_what_the_code_saw(sandbox: Sandbox) -> None:
    spy = (
        "import os\ndef bandwidth(a, b):\n    print('spied', os.environ['MEMLAB_CHECK_SEED'])\n    return 0\n"
    )
    outcome = submit(sandbox, WRONG + spy, "import os\nprint(os.environ.get('MEMLAB_CHECK_SEED'))")
    cells = nbformat.reads(outcome.executed, 4).cells
    check = next(cell for cell in cells if cell.id == "check-1-1")
    assert [output.output_type for output in check.outputs] == ["stream"]
    assert check.outputs[0].text.startswith("exercise 1.1 (bandwidth and capacity): 0 of 2 points")
    shown = str([cell.outputs for cell in cells])
    assert "spied" not in shown and str(exercise_seed(SEED, "1.1")) not in shown
    assert cells[-1].outputs[0].text == "0\n"


# -- reading the code --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.modules['memlab'] = None",
        "del sys.modules['torch']",
        "import memlab\nmemlab.check = print",
        "from memlab import exercises\nexercises.rate = None",
        "import memlab.exercises as e\nsetattr(e, 'check', 1)",
        "f.__code__ = g.__code__",
        "mime = 'application/vnd.memlab.evidence+json'",
        "import os\nos.environ['MEMLAB_CHECK_SEED']",
        "get_ipython().ast_transformers.append(x)",
        "import ctypes",
        "from gc import get_objects",
        "import sys\nsys._getframe(1).f_locals",
        "class A:\n    def __eq__(self, other):\n        return True",
        "exec('x = 1')",
        "%matplotlib inline\nimport sys\nsys.displayhook = print",
        "from memlab.exercises import deep as D\ndef f():\n    D._measured = f",
        "from memlab.exercises.deep import uniform_segments as best_segments",
        "import memlab\nmemlab.exercises.big_data.block_law",
        "from memlab.exercises.limits import TamperedResult",
        "import sys\nm = sys.modules['memlab.exercises.deep']\nm.x = 1",
        "import sys\nfor m in sys.modules.values(): m.x = 1",
        "import sys\ngetattr(sys, '_getframe')()",
        "getattr(f, 'f_back')",
        "from operator import attrgetter\nattrgetter('f_back.f_locals')",
        "import memlab.units as D\nsetattr(D, 'x', 1)",
        "import memlab.units as D\nvars(D)['x'] = 1",
        "from memlab import units as D\nD.__dict__['x'] = 1",
        "from memlab import units as D\ndef patch(m): m.x = 1\npatch(D)",
        "from memlab import Meter as M\nM.live_bytes = 0",
        "import json as j\nj.dumps = print",
        "from torch import nn\nnn.Linear.forward = f",
        "import os as o\no._exit(0)",
        "from os import _exit as bye\nbye(0)",
        "import os\nos.write(5, b'x')",
        "import os\ngetattr(os, 'write')(5, b'x')",
        "w = __import__('os').write",
        "import os\nos.fstat(5)",
        "import os\nwhile True: os.fork()",
        "open('/proc/self/fd/7', 'wb')",
        "from multiprocessing.connection import Connection as C",
        "import importlib as i\ni.import_module('mem' + 'lab')",
        "import sys\nsys.monitoring.use_tool_id(1, 'x')",
        "from concurrent import interpreters",
    ],
)
def test_code_that_no_honest_answer_needs_is_named(source: str) -> None:
    assert suspicions(source)


def test_code_that_honest_answers_may_hold_is_not() -> None:
    for source in (
        "import sys\nif 'google.colab' in sys.modules: pass",
        "from memlab.exercises.limits import in_child",
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import os\nos.environ['A'] = 'b'\nprint(os.getpid(), os.path.exists('x'))",
        "from torch import nn\nlayer = nn.Linear(1, 1)\nlayer.weight.requires_grad = False\nlayer.own = 1",
        "import memlab\nm = memlab.Meter\nprint(memlab.__version__)\nmap(memlab.units.format_bytes, [1])",
        "from memlab import units\nunits.format_bytes(3)",
        "import pickle, struct\nstruct.pack('f', 1.0)\npickle.dumps(1)",
        "getattr(x, name)\nsetattr(self, 'x', 1)\nvars(self)",
    ):
        assert suspicions(source) == [], source


def test_chapters_themselves_raise_no_suspicion() -> None:
    for item in build.build_all(chapters(ROOT)):
        exercise_cells = [c for c in item.source.cells if c.id.startswith("ex-")]
        assert [suspicions(c.source) for c in exercise_cells if suspicions(c.source)] == []
        assert suspicions("%pip install torch\n!ls\nx = 1") == []
    assert suspicions("def broken(:") == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("def bandwidth(a, b):\n    return (1,\n", "SyntaxError in line 2: '(' was never closed"),
        ("x = 1\nimport nosuchthing\n", "ModuleNotFoundError in line 2: No module named 'nosuchthing'"),
        ("x = 1\nraise ValueError('autocast master')\n", "ValueError in line 2"),
    ],
)
def test_a_cell_that_stops_is_said_to_student_and_instructor(
    sandbox: Sandbox, answer: str, said: str
) -> None:
    assert submit(sandbox, answer).remarks == [f"exercise 1.1: your cell stopped with {said}"]


def test_an_exercise_that_is_not_written_is_no_error(sandbox: Sandbox) -> None:
    assert submit(sandbox, 'raise NotImplementedError("exercise 1.1")').remarks == []
