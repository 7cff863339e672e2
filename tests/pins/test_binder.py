"""Binder, as far as it goes without its service: the image's recipe, its packages, its 2 GB, its start.

repo2docker's own parsing gives the Dockerfile. What that file does to the notebook environment is then done
to a virtual environment: the packages of repo2docker's base in the versions of its lock file (from PyPI;
Binder takes conda-forge's), `pip install -r` of ours, postBuild. Its command starts the server, and all
chapters run beside it, in normal size, within 2 GiB together. Not done: the image itself, and the service.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from autograder import build
from autograder.course import select
from tests.pins import machines
from tests.pins.machines import (
    MIB,
    PINS,
    ROOT,
    checkout,
    environment,
    find_python,
    installed,
    kernel_environment,
    run,
)
from tests.pins.test_colab import check

pytestmark = pytest.mark.long

REPO2DOCKER = "jupyter-repo2docker==2026.4.0"
LIMIT = 2 * 2**30  # mybinder.org: "up to 2 GB"; a kernel above is restarted
EXECUTE = Path(__file__).parent / "execute.py"
CHAPTERS = [chapter.name for chapter in select(ROOT)]
# The dependencies of repo2docker's environment.yml, by their names on PyPI.
BASE = {
    "ipywidgets": "ipywidgets",
    "jupyter-offlinenotebook": "jupyter-offlinenotebook",
    "jupyter-resource-usage": "jupyter-resource-usage",
    "jupyter_server": "jupyter_server",
    "jupyterhub-singleuser": "jupyterhub",
    "jupyterlab": "jupyterlab",
    "notebook": "notebook",
}


@pytest.fixture(scope="session")
def tool() -> Path:
    """The Python of an environment with repo2docker."""
    return environment("repo2docker", machines.THIS_PYTHON, [REPO2DOCKER])


@pytest.fixture(scope="session")
def dockerfile(tool: Path) -> str:
    """What repo2docker makes of the repository."""
    tree = checkout(PINS / "binder-repo")
    done = subprocess.run(
        [tool.parent / "jupyter-repo2docker", "--no-build", "--debug", str(tree)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_repo2docker_reads_every_file(dockerfile: str) -> None:
    """runtime.txt, requirements.txt and postBuild leave traces; mistakes in them may pass in silence."""
    python = (ROOT / "binder/runtime.txt").read_text().strip().removeprefix("python-")
    assert f"environment-2epy-2d{python.replace('.', '-2e')}-2d" in dockerfile
    assert (
        "-m pip install" in dockerfile
        or 'pip install --no-cache-dir -r "binder/requirements.txt"' in dockerfile
    )
    assert "RUN ./binder/postBuild" in dockerfile
    assert "apt-get -qq install" in dockerfile and not (ROOT / "binder/apt.txt").exists()


def base_pins(tool: Path, python: str) -> list[str]:
    """The versions of repo2docker's lock file for that Python, as requirements from PyPI."""
    folder = run([tool, "-c", "import repo2docker; print(repo2docker.__path__[0])"]).strip()
    lock = (Path(folder) / "buildpacks/conda" / f"environment.py-{python}-linux-64.lock").read_text()
    pins = []
    for conda, name in BASE.items():
        found = re.search(rf"/{conda}-(\d[^-/]*)-[^-/]+\.conda", lock)
        assert found, f"{conda} isn't in repo2docker's lock file for Python {python}"
        pins.append(f"{name}=={found[1]}")
    return pins


def reachable(address: str) -> bool:
    """Does a name resolve and its port answer?"""
    try:
        host = re.match(r"https://([^/]+)", address)[1]
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def binder(tool: Path, dockerfile: str) -> Path:
    """The Python of an environment made as the Dockerfile makes Binder's."""
    version = (ROOT / "binder/runtime.txt").read_text().strip().removeprefix("python-")
    python = find_python(version)
    if python is None:
        machines.missing(f"no Python {version}, which binder/runtime.txt asks for, on this machine")
    requirements = (ROOT / "binder/requirements.txt").read_text()
    index = re.search(r"^--extra-index-url (\S+)$", requirements, re.MULTILINE)[1]
    if reachable(index):
        print(f"\nrequirements.txt as it is, from {index}")
    else:
        requirements = re.sub(r"^--extra-index-url.*$", "", requirements, flags=re.MULTILINE).replace(
            "+cpu", ""
        )
        print(f"\n{index} isn't reachable from here: torch from where this machine's pip looks, no '+cpu'")
    file = PINS / "binder-requirements.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(requirements)
    base = base_pins(tool, version)
    print(f"repo2docker's base: {', '.join(base)}")
    made = environment("binder", python, base, ["--no-cache-dir", "-r", str(file)], key=requirements)
    home = checkout(PINS / "binder-repo")
    run([home / "binder/postBuild"], cwd=home, env=kernel_environment(made, "normal"))
    return made


def test_nothing_is_missing_or_moved(binder: Path) -> None:
    """`pip check`; every line of requirements.txt holds after postBuild; memlab is the tree's."""
    run([binder, "-m", "pip", "check"])
    have = {line.split("+")[0].lower() for line in installed(binder)}
    wanted = [line.split("+")[0] for line in (ROOT / "binder/requirements.txt").read_text().splitlines()]
    assert {line.lower() for line in wanted if "==" in line} <= have
    assert any(line.startswith("memlab @ ") for line in have)


@dataclass
class Server:
    """A running server of the environment: its process, its address, the seconds until its first page."""

    pid: int
    address: str
    seconds: float
    cgroup: machines.Cgroup


@pytest.fixture(scope="session")
def server(binder: Path, dockerfile: str) -> Iterator[Server]:
    """The Dockerfile's own command, in the repository's folder, in a control group of 2 GiB."""
    command = json.loads(re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)[-1])
    assert command[0] == "jupyter"
    cgroup = machines.Cgroup(LIMIT)
    print(
        f"\n2 GiB are enforced by sampling and by {cgroup.path or 'no control group: none may be made here'}"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--ip=127.0.0.1", f"--port={port}", "--no-browser", "--ServerApp.token=binder", "--allow-root"]
    shell = [binder.parent / "jupyter", *command[1:2], *options]
    log = (PINS / "binder-server.log").open("w")
    started = time.monotonic()
    child = subprocess.Popen(
        list(map(str, shell)),
        cwd=PINS / "binder-repo",
        env=kernel_environment(binder, "normal"),
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=cgroup.join,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{address}/api/status?token=binder"):
            assert child.poll() is None and time.monotonic() - started < 120, (
                f"{shlex.join(map(str, shell))}: no answer; see {log.name}"
            )
            time.sleep(0.1)
        yield Server(child.pid, address, time.monotonic() - started, cgroup)
    finally:
        child.terminate()
        child.wait(20)
        log.close()
        cgroup.remove()


def answers(address: str) -> bytes:
    """The page, or nothing."""
    try:
        with urllib.request.urlopen(address, timeout=10) as page:
            return bytes(page.read())
    except OSError:
        return b""


def test_the_links_open_a_chapter(server: Server) -> None:
    """README's badge: the path that it opens is a page of this server, and the file is there."""
    print(f"\nthe server answers after {server.seconds:.1f} s")
    (path,) = re.findall(r"mybinder\.org/v2/gh/[^?)]+\?urlpath=([^)\s]+)", (ROOT / "README.md").read_text())
    assert b"jupyterlab" in answers(f"{server.address}/{path}?token=binder").lower()
    where = path.removeprefix("lab/tree/")
    content = json.loads(answers(f"{server.address}/api/contents/{where}?token=binder"))
    kinds = {"notebook": "nbformat", "file": "", "directory": ""}
    assert content["type"] in kinds and kinds[content["type"]] in json.dumps(content["content"])


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_runs_within_2_gib(binder: Path, server: Server, name: str) -> None:
    """Normal size, beside the server: both together stay below, and nothing fails."""
    (chapter,) = select(ROOT, [name])
    folder = PINS / "runs" / "binder"
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    source = folder / name / f"{name}.ipynb"
    source.write_text(build.to_text(build.build(chapter).source))
    ran = machines.within(
        [binder, EXECUTE, source, folder / name / "out"],
        LIMIT,
        server.cgroup,
        beside=[server.pid],
        env=kernel_environment(binder, "normal"),
    )
    print(f"\nBinder: {name} {ran.seconds:.0f} s, peak {ran.peak / MIB:,.0f} MiB with the server")
    assert not ran.over, f"more than {LIMIT / MIB:,.0f} MiB"
    assert ran.code == 0, ran.output
    check(nbformat.read(folder / name / "out" / source.name, as_version=4))


def test_the_limit_ends_what_is_above_it() -> None:
    """Its control: a process of 2.5 GiB doesn't finish, by the control group nor by sampling."""
    greedy = "b = bytearray(5 << 29)\nfor i in range(0, len(b), 4096): b[i] = 1\nimport time; time.sleep(3)"
    cgroup = machines.Cgroup(LIMIT)
    try:
        assert machines.within([machines.THIS_PYTHON, "-c", greedy], LIMIT).over
        if cgroup.path is not None:
            assert machines.within([machines.THIS_PYTHON, "-c", greedy], cgroup=cgroup).code != 0
    finally:
        cgroup.remove()
    assert os.environ.get("CI") != "true" or cgroup.path is not None, "CI enforces by a control group"
