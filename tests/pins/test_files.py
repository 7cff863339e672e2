"""The short form, in `make test`: the first cell in a stub of Colab, and files that must agree."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types

import pytest
import torch

from autograder import build
from autograder.course import select
from memlab import chapter
from tests.pins.machines import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
FIRST_CELL = build.FIRST_CELL.read_text()
NUMBERS = re.compile(r"\d+")


def pins(file: str) -> dict[str, str]:
    """Name -> version of a file of pins, without '+cpu'."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s+]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in found}


def number(version: str) -> tuple[int, ...]:
    """'2.11' -> (2, 11)."""
    return tuple(map(int, NUMBERS.findall(version)))


# --- the first cell -----------------------------------------------------------------------------------------


@pytest.fixture
def colab(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stub: google.colab is imported, memlab can't be found until pip ran, which is only written down."""
    stub = types.SimpleNamespace(commands=[], fails="", there=False)
    find = importlib.util.find_spec

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        stub.commands.append(command)
        stub.there = not stub.fails
        return subprocess.CompletedProcess(command, bool(stub.fails), "", stub.fails)

    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "memlab" and not stub.there else find(name)
    )
    monkeypatch.setattr(subprocess, "run", pip)
    return stub


def test_on_colab_it_installs_memlab_alone_and_says_where_it_is(colab, capsys):
    """Twice is silent and asks pip nothing."""
    exec(FIRST_CELL, {})
    (command,) = colab.commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"] and "--no-deps" in command
    assert command[-1].startswith(f"{PROJECT['urls']['Repository']}/archive/")
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("\n") == 1
    for version in (torch.__version__, PROJECT["version"], ".".join(map(str, sys.version_info[:3]))):
        assert version in said.out
    exec(FIRST_CELL, {})
    assert len(colab.commands) == 1 and capsys.readouterr() == ("", "")


def test_an_install_that_fails_is_one_line_and_stops(colab):
    colab.fails = "  WARNING: Retrying\nERROR: Could not find it: no network\n  more\n"
    with pytest.raises(Exception, match="isn't installed") as caught:
        exec(FIRST_CELL, {})
    assert "no network" in str(caught.value) and caught.value._render_traceback_() == [str(caught.value)]
    assert "\n" not in str(caught.value)


def test_elsewhere_it_does_nothing(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran something"))
    exec(FIRST_CELL, {})
    assert capsys.readouterr() == ("", "")


def test_every_notebook_begins_with_it():
    for each in select(ROOT):
        cells = json.loads(each.notebook.read_text())["cells"]
        first = next(cell for cell in cells if cell["cell_type"] == "code")
        assert (first["id"], "".join(first["source"])) == ("install", FIRST_CELL.rstrip("\n")), each.name


# --- what Colab and Binder have -----------------------------------------------------------------------------


def test_colabs_versions_are_enough():
    """No floor of pyproject.toml is above what Colab has: pip would replace it, and the session restart."""
    have = {**pins("tests/pins/colab.txt"), "torch": "2.11.0"}
    for line in PROJECT["dependencies"]:
        name, floor = re.fullmatch(r"([a-z]+)>=([\d.]+)", line).groups()
        assert number(have[name]) >= number(floor), line
    floor = next(line for line in PROJECT["dependencies"] if line.startswith("torch>="))
    assert number(floor) == chapter.OLDEST_TORCH


def test_binder_has_what_memlab_needs_as_tested():
    """Each dependency, in the version of constraints.txt; its torch is the CPU build."""
    lines = (ROOT / "binder/requirements.txt").read_text()
    have, tested = pins("binder/requirements.txt"), pins("constraints.txt")
    assert {re.split(r"[>=]", line)[0] for line in PROJECT["dependencies"]} <= set(have)
    assert {name: tested[name] for name in have} == have
    assert re.search(r"^torch==[\d.]+\+cpu$", lines, re.M) and "https://download.pytorch.org/whl/cpu" in lines


def test_binder_files_are_those_that_repo2docker_reads():
    python = re.fullmatch(r"python-(\d+\.\d+)\n", (ROOT / "binder/runtime.txt").read_text())[1]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    build_script = ROOT / "binder/postBuild"
    assert os.access(build_script, os.X_OK) and build_script.read_text().startswith("#!/bin/bash\nset -e\n")
    known = {"apt.txt", "environment.yml", "postBuild", "requirements.txt", "runtime.txt", "start"}
    assert {path.name for path in (ROOT / "binder").iterdir()} <= known
    assert not (ROOT / ".binder").exists()


def test_badges_open_a_notebook_of_this_repository():
    repository = PROJECT["urls"]["Repository"].removeprefix("https://github.com/")
    opened = re.findall(rf"/github/{repository}/blob/main/([^)\s]+)", README)
    opened += re.findall(rf"mybinder\.org/v2/gh/{repository}/main\?urlpath=lab/tree/([^)\s]+)", README)
    assert len(opened) >= 2
    for path in opened:
        assert (ROOT / path).is_file(), path


def test_what_runs_on_a_gpu_knows_cards_without_bf16():
    """A cell that measures 16 bits on the student's GPU asks `lab.half` which: a T4 only emulates bf16."""
    for each in select(ROOT):
        for cell in build.parse(each.source):
            if 'lab.device.type == "cuda":' in cell.source and re.search(r"bfloat16|amp-bf16", cell.source):
                assert "lab.half" in cell.source, (
                    f"{each.name}, cell {cell.id}: takes bf16 whatever the GPU is"
                )


# --- torch, from its oldest version on ----------------------------------------------------------------------

#: torch's private names that memlab uses. A new one needs a look at whether torch 2.11, Colab's, has it.
PRIVATE = """
torch._C.DispatchKey.ADInplaceOrView
torch._C.DispatchKey.AutocastCPU
torch._C.DispatchKey.CompositeImplicitAutograd
torch._C.DispatchKeySet
torch._C._ExcludeDispatchKeyGuard
torch._C._SetExcludeDispatchKeyGuard
torch._C._clear_DTensor_sharding_propagator_cache
torch._C._current_autograd_node
torch._C._current_graph_task_id
torch._C._dispatch_has_kernel_for_dispatch_key
torch._C._distributed_c10d.FileStore
torch._C._distributed_c10d._resolve_process_group
torch._C._profiler._EventType
torch._dynamo
torch._functorch.config
torch._subclasses.fake_tensor.DataDependentOutputException
torch._subclasses.fake_tensor.DynamicOutputShapeException
torch._subclasses.fake_tensor.FakeTensor
torch._subclasses.fake_tensor.FakeTensorMode
torch._subclasses.fake_tensor.is_fake
torch.autograd._get_sequence_nr
torch.distributed._compute_bucket_assignment_by_size
torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam
torch.distributed.tensor._sharding_prop.ShardingPropagator
torch.distributed.tensor.placement_types._StridedShard
torch.ops.aten._local_scalar_dense.default
torch.ops.aten._scaled_dot_product_attention_math
torch.ops.aten._scaled_dot_product_cudnn_attention.default
torch.ops.aten._scaled_dot_product_efficient_attention.default
torch.ops.aten._scaled_dot_product_flash_attention.default
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
torch.testing._internal.distributed.fake_pg.FakeStore
torch.utils._foreach_utils
torch.utils._python_dispatch.TorchDispatchMode
torch.utils._python_dispatch._disable_current_modes
torch.utils._pytree.tree_leaves
torch.utils._pytree.tree_map_only
""".split()  # noqa: SIM905
#: Used only where `hasattr` finds it.
OPTIONAL = {"torch._C._clear_DTensor_sharding_propagator_cache"}


def private_names() -> set[str]:
    """Dotted names below `torch` with a part that begins with '_', as memlab imports or reads them."""
    found = set()
    for path in sorted((ROOT / "memlab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
            elif isinstance(node, ast.Attribute):
                parts: list[str] = []
                inner: ast.expr = node
                while isinstance(inner, ast.Attribute):
                    parts.insert(0, inner.attr)
                    inner = inner.value
                roots = {"torch": "torch", "dist": "torch.distributed", "aten": "torch.ops.aten"}
                if isinstance(inner, ast.Name) and inner.id in roots:
                    found.add(".".join([roots[inner.id], *parts]))
    return {name for name in found if re.search(r"\._(?!_)", name)}


def longest(names: set[str]) -> set[str]:
    """Without those that another one begins with."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def test_torch_names():
    """Those listed are those used, and this torch has them."""
    used = longest(private_names())
    assert used == set(PRIVATE), f"new: {sorted(used - set(PRIVATE))}; gone: {sorted(set(PRIVATE) - used)}"
    for name in set(PRIVATE) - OPTIONAL:
        thing: object = torch
        path = "torch"
        for part in name.split(".")[1:]:
            path = f"{path}.{part}"
            if not hasattr(thing, part):
                importlib.import_module(path)
            thing = getattr(thing, part)
