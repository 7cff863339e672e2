"""What an import loads: the library answers without torch, and quickly."""

import subprocess
import sys

import pytest

# These rooms use the standard library only: they must answer in milliseconds.
TORCH_FREE = [
    "memlab",
    "memlab.units",
    "memlab.doctor",
    "memlab.hardware",
    "memlab.models",
    "memlab.recipe",
    "memlab.footprint",
    "memlab.engines",
    "memlab.oom",
    "memlab.planner",
    "memlab.snapshot",
    "memlab.trace",
    "memlab.exercises",
]

PRINT_FOREIGN = """
import sys
import sysconfig

before = set(sys.modules)
import {module}

foreign = set()
for name in set(sys.modules) - before:
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names and top != "memlab":
        foreign.add(top)
print(*sorted(foreign))
"""


def python(code: str) -> str:
    # -I: no user site, no PYTHONPATH; the package is installed in the environment
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", TORCH_FREE)
def test_these_rooms_import_the_standard_library_only(module):
    assert python(PRINT_FOREIGN.format(module=module)) == ""


def test_the_test_sees_a_foreign_import():
    assert "typer" in python(PRINT_FOREIGN.format(module="memlab.cli")).split()


def test_the_command_line_loads_no_torch_before_it_must():
    assert "torch" not in python(PRINT_FOREIGN.format(module="memlab.cli")).split()


def test_import_memlab_runs_little():
    # A clock would depend on the machine: count modules instead. typing and importlib bring some 60.
    code = "import sys; before = len(sys.modules); import memlab; print(len(sys.modules) - before)"
    assert int(python(code)) < 100


def test_every_name_of_the_top_level_exists_and_a_wrong_one_does_not():
    code = """
import memlab
assert set(memlab.__all__) <= set(dir(memlab))
from memlab import Recipe
assert Recipe is memlab.Recipe
try:
    memlab.recipee
except AttributeError as error:
    print(error)
"""
    assert "has no attribute 'recipee'" in python(code)
