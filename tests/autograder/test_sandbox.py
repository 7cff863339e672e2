"""Attacks from inside a graded kernel: on files, network, processes, memory, and on the grader outside."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

import memlab
from autograder import build, questions
from autograder.course import CourseError, select
from autograder.evidence import is_check, judge
from autograder.execution import Budget, Executed, execute
from autograder.questions import without_answers
from autograder.sandbox import Limits, Sandbox, Settings, choose, why_no_bubblewrap, why_no_landlock
from memlab.units import MIB

ROOT = Path(__file__).resolve().parent.parent.parent

if why_no_bubblewrap() and os.environ.get("CI"):
    pytest.fail(f"CI must test the sandbox: {why_no_bubblewrap()}")
pytestmark = pytest.mark.skipif(bool(why_no_bubblewrap()), reason=why_no_bubblewrap())

#: Small, so that an attack meets them in seconds.
LIMITS = Limits(
    address_space=3 << 30,
    total_memory=700 * MIB,
    file_size=8 * MIB,
    folder=16 * MIB,
    processes=40,
    cpu_seconds=20,
)
BUDGET = Budget(cell_seconds=3, notebook_seconds=60, grace_seconds=1, flood=4_000_000)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    folder.parent.chmod(0o755)
    questions.make_library(folder)
    return folder


@pytest.fixture(scope="module")
def sandbox(library: Path) -> Iterator[Sandbox]:
    with Sandbox(Settings("bubblewrap", str(library), LIMITS)) as made:
        yield made


def run(sandbox: Sandbox, *cells: str, budget: Budget = BUDGET) -> Executed:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return execute(notebook, sandbox, 7, budget)


def printed(executed: Executed, index: int = -1) -> str:
    outputs = executed.notebook.cells[index].outputs
    return "".join(o.get("text", "") or f"{o.get('ename')}: {o.get('evalue')}" for o in outputs)


def error(executed: Executed, index: int = -1) -> str:
    return next(
        (o.ename + ": " + o.evalue for o in executed.notebook.cells[index].outputs if "ename" in o), ""
    )


def alive(word: str) -> list[str]:
    """Processes of this machine that have `word` in their command line or name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "comm").read_bytes()
            except OSError:
                continue
            if word.encode() in text:
                found.append(entry.name)
    return found


# -- files -------------------------------------------------------------------------------------------------


def test_nothing_of_the_course_or_the_machine_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "gradebook.db"
    secret.write_text("secret")
    places = [
        secret,
        ROOT / "solutions",
        ROOT / "tests",
        ROOT / ".git",
        ROOT / "autograder",
        Path("/etc/shadow"),
    ]
    places += [
        Path.home() / ".ssh",
        Path("/var/log"),
        Path("/home"),
        Path("/etc/hostname"),
        Path("/etc/passwd"),
    ]
    code = f"from pathlib import Path\nprint([p for p in {[str(p) for p in places]!r} if Path(p).exists()])"
    assert printed(run(sandbox, code)) == "[]\n"


def test_nothing_outside_its_own_folders_can_be_written(sandbox: Sandbox) -> None:
    code = """
import os, sys, site
for place in ("/", "/etc", "/usr", "/dev", "/dev/pts", "/sys", "/proc", "/proc/sys/kernel", "/memlab",
              "/memlab/library/memlab", "/memlab/run", "/memlab/runs",
              sys.prefix, sys.base_prefix, *site.getsitepackages()):
    for name in ("x", "memlab.pth"):
        try:
            open(os.path.join(place, name), "w")
            print("written", place)
        except OSError:
            pass
for name in os.listdir("/memlab/run"):
    try:
        os.unlink("/memlab/run/" + name)
        print("removed", name)
    except OSError:
        pass
open("/tmp/ok", "w"); open("ok", "w")
print("done")
"""
    assert printed(run(sandbox, code)) == "done\n"


def test_disks_are_small_and_empty_for_the_next_submission(sandbox: Sandbox) -> None:
    fill = """
import os
for place in ("/tmp", "/dev/shm", "."):
    total = 0
    try:
        for n in range(10):
            with open(f"{place}/{n}", "wb") as f:
                total += f.write(bytes(4 << 20))
    except OSError as error:
        print(place, total >> 20, error.strerror)
for n in range(10):
    if os.path.exists(f"{n}"): os.unlink(f"{n}")
try:
    open("large", "wb").write(bytes(9 << 20))
except OSError as error:
    print(error.strerror)
"""
    text = printed(run(sandbox, fill))
    assert text.count("No space left on device") == 3 and "File too large" in text
    python = {Path(sys.prefix).parts[2]} if Path(sys.prefix).is_relative_to("/tmp") else set()
    look = "import os; import glob; print(os.listdir('/tmp'), os.listdir('/dev/shm'), glob.glob('*'))"
    assert printed(run(sandbox, look)) == f"{list(python)} [] []\n"


def test_links_lead_nowhere(sandbox: Sandbox) -> None:
    code = f"""
import os
os.symlink({str(ROOT)!r} + "/solutions", "link")
print(os.path.exists("link"))
os.symlink("/proc/1/root", "root")
try:
    print(os.listdir("root"))
except OSError as error:
    print(error.strerror)
"""
    assert printed(run(sandbox, code)) == "False\nPermission denied\n"


def test_no_hidden_case_knows_its_answer() -> None:
    """Nothing is left of what is right, in any chapter: neither as a function nor as a method of a case."""
    for path in sorted(Path(memlab.__file__).parent.glob("exercises/[a-z]*.py")):
        if path.name == "limits.py":
            continue
        kept = without_answers(path.read_text("utf-8"))
        defined = [n.name for n in ast.walk(ast.parse(kept)) if isinstance(n, ast.FunctionDef)]
        assert not {"right", "expected", "state_bound", "sent_bound"} & set(defined), path.name
        assert not [name for name in defined if name.endswith(("_score", "_right", "_expected"))], path.name


def test_the_questions_are_there_and_the_answers_are_not(sandbox: Sandbox) -> None:
    code = """
import inspect
from memlab.exercises import exercises
import memlab.exercises.memory_basics as module
print([e.score for e in exercises("1").values()] == [None] * 5, hasattr(module, "fastest"))
print("score" in inspect.getsource(module))
"""
    assert printed(run(sandbox, code)) == "True False\nFalse\n"


# -- network -----------------------------------------------------------------------------------------------


def test_no_connection_leaves(sandbox: Sandbox) -> None:
    listeners = [socket.socket(), socket.socket(socket.AF_UNIX)]
    listeners[0].bind(("127.0.0.1", 0))
    listeners[1].bind("\0memlab-test")
    for listener in listeners:
        listener.listen()
    code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {listeners[0].getsockname()[1]})),
                        (socket.AF_UNIX, "\\0memlab-test"), (socket.AF_INET, ("1.1.1.1", 80))):
    with socket.socket(family) as s:
        s.settimeout(1)
        try:
            s.connect(address)
            print("connected", address)
        except OSError:
            pass
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    try:
        s.sendto(b"x", ("1.1.1.1", 53))
        print("sent")
    except OSError:
        pass
with socket.socket() as a, socket.socket() as b:  # distributed exercises talk to themselves
    a.bind(("127.0.0.1", 0)); a.listen(); b.connect(a.getsockname())
print("done")
"""
    try:
        assert printed(run(sandbox, code)) == "done\n"
    finally:
        for listener in listeners:
            listener.close()


# -- processes ---------------------------------------------------------------------------------------------


def test_no_process_outlives_its_submission(sandbox: Sandbox) -> None:
    code = """
import os, subprocess, sys, time
for n in range(5):
    loop = "import time\\nwhile True: time.sleep(1)  # orphan-of-a-test"
    subprocess.Popen([sys.executable, "-S", "-c", loop], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/proc/self/comm", "w").write("orphan-of-a-test")
        time.sleep(1000)
    os._exit(0)
time.sleep(0.5)
print("started")
"""
    assert printed(run(sandbox, code)) == "started\n"
    assert alive("orphan-of-a-test") == []


def test_it_sees_and_signals_no_process_but_its_own(sandbox: Sandbox) -> None:
    code = """
import os, signal
print(max(int(p) for p in os.listdir("/proc") if p.isdigit()) < 20)
for target in (1, os.getppid()):
    try:
        os.kill(target, signal.SIGKILL)
        os.kill(target, signal.SIGSTOP)
    except OSError:
        pass
for name in ("environ", "mem", "fd"):
    try:
        os.listdir("/proc/1/fd") if name == "fd" else open("/proc/1/" + name, "rb").read(1)
        print("read", name)
    except OSError:
        pass
files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
print([os.readlink(f) for f in files if os.path.lexists(f) and "/memlab-" in os.readlink(f)])
"""
    assert printed(run(sandbox, code)) == "True\n[]\n"
    result = run(sandbox, "import os; os.kill(0, 9)", "print('next')")
    assert "KernelDied" in error(result, 0) and printed(result) == "next\n"


def test_it_has_no_privileges_and_gets_none(sandbox: Sandbox) -> None:
    code = """
import os, ctypes, subprocess
status = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
caps = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
print({status[k].strip().strip("0") for k in caps}, status["NoNewPrivs"].strip())
libc = ctypes.CDLL(None, use_errno=True)
print([libc.mount(b"proc", b"/tmp", b"proc", 0, None), libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0)])
print(libc.setuid(0) if os.getuid() else -1)
"""
    assert printed(run(sandbox, code)) == "{''} 1\n[-1, -1, -1]\n-1\n"


def test_a_fork_bomb_meets_its_limit(sandbox: Sandbox) -> None:
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError as error:
    print(error.strerror, made < 60)
"""
    assert printed(run(sandbox, code)) == "Resource temporarily unavailable True\n"
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run(sandbox, bomb, "print('next')")
    assert "KernelDied" in error(result, 0) or "KeyboardInterrupt" in error(result, 0)
    assert printed(result) == "next\n"


def test_memory_is_limited_for_one_process_and_for_all_together(sandbox: Sandbox) -> None:
    result = run(sandbox, "x = bytearray(4 << 30)", "print('same kernel')")
    assert "MemoryError" in error(result, 0) and result.kernels == 1
    together = """
import os, time
for n in range(10):
    if os.fork() == 0:
        x = bytearray(os.urandom(1 << 20)) * 200
        time.sleep(1000)
time.sleep(3)
"""
    result = run(sandbox, together, "print('next')")
    assert "more memory than a submission may" in error(result, 0)
    assert printed(result) == "next\n" and result.kernels == 2


def test_processor_time_is_limited(library: Path) -> None:
    limits = Limits(cpu_seconds=2)
    with Sandbox(Settings("bubblewrap", str(library), limits)) as own:
        result = run(own, "while True: pass", "print('next')", budget=Budget(cell_seconds=20))
    assert "its processor time was used up" in error(result, 0) and printed(result) == "next\n"


# -- cells that don't come back ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: pass", "KeyboardInterrupt"),
        (
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "an interrupt didn't help",
        ),
        ("import itertools\nall(itertools.repeat(1))", "no answer within 3 s"),
        ("import os\nos.closerange(3, 1000)", "KernelDied"),
        ("import os\nos._exit(3)", "the kernel died"),
        ("import ctypes\nctypes.string_at(0)", "the kernel died"),
        ("exit()", "exit() was called"),
        ("import sys\nsys.exit(3)", "SystemExit"),
        ("input()", "StdinNotImplementedError"),
        ("def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()", "KernelDied"),
    ],
)
def test_a_lost_cell_costs_itself_alone(sandbox: Sandbox, code: str, said: str) -> None:
    result = run(sandbox, "kept = 1", code, "print(kept + 1)")
    assert said in error(result, 1)
    assert printed(result) == "2\n"


def test_the_whole_notebook_has_its_time(sandbox: Sandbox) -> None:
    slow = "import time; time.sleep(3)"
    result = run(sandbox, slow, slow, slow, "print(1)", budget=Budget(cell_seconds=5, notebook_seconds=4))
    assert "the whole notebook may take 4 s" in error(result)


def test_too_many_dead_kernels_end_it(sandbox: Sandbox) -> None:
    result = run(sandbox, *["import os; os._exit(1)"] * 4, "print(1)")
    assert result.kernels == 4 and "3 cells before it ended their kernel" in error(result)


# -- what it sends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 100_000_000)",
        "for n in range(1_000_000): print(n)",
        "while True: print('flood')",
        "from IPython.display import HTML, display\nfor n in range(100): display(HTML('y' * 1_000_000))",
        "import sys\nwhile True: sys.stderr.write('z' * 100_000)",
        "import sys\nraise ValueError('v' * 50_000_000)",
    ],
)
def test_a_flood_is_cut_while_it_comes(sandbox: Sandbox, code: str) -> None:
    result = run(sandbox, code, "print('next')")
    assert len(nbformat.writes(result.notebook)) < 1_000_000
    assert printed(result) == "next\n"


def test_a_notebook_keeps_two_megabytes(sandbox: Sandbox) -> None:
    result = run(sandbox, *["print('x' * 190_000)"] * 20)
    assert len(nbformat.writes(result.notebook)) < 2_200_000
    assert "left out" in printed(result)


def test_messages_for_other_cells_and_of_wrong_form_are_not_believed(sandbox: Sandbox) -> None:
    first = (
        "from IPython.display import display\nh = display({'text/plain': 'first'}, raw=True, display_id='d')"
    )
    later = """
h.update({"text/plain": "changed"}, raw=True)
import json
kernel = get_ipython().kernel
for content in ({"name": "stdout", "text": 3}, {"name": [], "text": "x"}, 7, None, {"data": "no"},
                {"data": {"text/plain": 3}}):
    for kind in ("stream", "display_data", "execute_result", "error", "clear_output"):
        try:
            kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())
        except Exception:
            pass
deep = []
for n in range(100_000):
    deep = [deep]
kernel.iopub_socket.send_multipart([b"x", b"y"])
"""
    result = run(sandbox, first, later, "print('next')")
    assert result.notebook.cells[0].outputs[0].data["text/plain"] == "first"
    nbformat.validate(nbformat.from_dict(result.notebook))
    assert printed(result) == "next\n"


def test_scripts_are_not_kept(sandbox: Sandbox) -> None:
    code = "from IPython.display import Javascript, display\ndisplay(Javascript('alert(1)'))"
    outputs = run(sandbox, code).notebook.cells[0].outputs
    assert all("application/javascript" not in o.get("data", {}) for o in outputs)


# -- the same again ----------------------------------------------------------------------------------------


def test_a_new_kernel_knows_nothing_of_the_last(sandbox: Sandbox) -> None:
    spoil = "import memlab, os, torch\nmemlab.check = torch.ones = None\nos.environ['X'] = '1'"
    numbers = (
        "import os, random, torch, memlab\n"
        "print(memlab.check is None, 'X' in os.environ, random.random(), torch.rand(1))"
    )
    first = printed(run(sandbox, numbers))
    run(sandbox, spoil)
    assert printed(run(sandbox, numbers)) == first
    assert first.startswith("False False")


def test_the_grader_takes_its_kernels_along_when_it_is_killed(library: Path) -> None:
    script = f"""
import sys, time
from autograder.sandbox import Sandbox, Settings
with Sandbox(Settings("bubblewrap", {str(library)!r})) as s:
    with s.kernel({{"MARK": "killed-grader"}}) as kernel:
        print(s._folder, flush=True)
        time.sleep(1000)
"""
    grader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert grader.stdout is not None
    folder = Path(grader.stdout.readline().strip())
    assert alive(str(folder))
    grader.kill()
    grader.wait()
    until = time.monotonic() + 10
    while alive(str(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(str(folder)) == []
    shutil.rmtree(folder)


# -- without namespaces ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fallback(library: Path) -> Iterator[Sandbox]:
    if why_no_landlock():
        pytest.skip(why_no_landlock())
    with Sandbox(Settings("landlock", str(library), LIMITS)) as made:
        yield made


def test_landlock_hides_the_course_and_cuts_the_network(fallback: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "gradebook.db").write_text("secret")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        code = f"""
import os, socket, memlab, torch
for path in ({str(tmp_path)!r} + "/gradebook.db", {str(ROOT)!r} + "/solutions/01_memory_basics.py",
             "/etc/passwd", "/proc/1/environ"):
    try:
        open(path).read()
        print("read", path)
    except OSError:
        pass
for path in ({str(tmp_path)!r}, memlab.__path__[0], "/tmp", "/usr", "/dev/shm",
             os.path.dirname(torch.__file__)):
    try:
        open(path + "/x", "w")
        print("written", path)
    except OSError:
        pass
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        socket.socket(socket.AF_INET, kind).connect(("127.0.0.1", {listener.getsockname()[1]}))
        print("connected")
    except OSError:
        pass
try:
    os.kill({os.getpid()}, 0)
    print("signalled")
except OSError:
    pass
open("own", "w").write("x")
print("done")
"""
        assert printed(run(fallback, code)) == "done\n"


def test_landlock_leaves_no_process_and_survives_lost_kernels(fallback: Sandbox) -> None:
    code = """
import subprocess, sys, time
for n in range(5):
    wait = "import time\\ntime.sleep(1000)  # orphan-of-landlock"
    subprocess.Popen([sys.executable, "-S", "-c", wait], start_new_session=True)
time.sleep(0.3)
"""
    result = run(fallback, code, "import os; os._exit(1)", "while True: pass", "print('next')")
    assert "the kernel died" in error(result, 1) and "KeyboardInterrupt" in error(result, 2)
    assert printed(result) == "next\n"
    assert alive("orphan-of-landlock") == []


def test_no_sandbox_runs_too_for_who_asks_for_it(library: Path) -> None:
    with Sandbox(Settings("none", str(library))) as own:
        assert printed(run(own, "print(1)")) == "1\n"


# -- refusals ----------------------------------------------------------------------------------------------


def test_without_a_sandbox_it_refuses_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from autograder import sandbox as module

    monkeypatch.setattr(module, "why_no_bubblewrap", lambda: "bubblewrap (bwrap) isn't installed")
    monkeypatch.setattr(module, "why_no_landlock", lambda: "no Landlock")
    with pytest.raises(CourseError, match="--sandbox none"):
        choose("auto")
    assert choose("none") == "none"
    monkeypatch.setattr(module, "why_no_landlock", lambda: "")
    assert choose("auto") == choose("landlock") == "landlock"
    with pytest.raises(CourseError, match="unknown sandbox"):
        choose("docker")


# -- honest work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", ["1", "2"])
def test_a_chapter_of_right_answers_raises_no_alarm(library: Path, chapter: str) -> None:
    [item] = build.build_all(select(ROOT, [chapter]))
    notebook = nbformat.reads(build.to_text(item.source), 4)
    with Sandbox(Settings("bubblewrap", str(library))) as own:
        ran = execute(notebook, own, 11)
    verdicts = [judge(cell, 11) for cell in ran.notebook.cells if is_check(cell)]
    assert ran.tampered == [] and ran.kernels == 1
    assert all(v.status == "" and v.score is not None and not v.score.messages for v in verdicts)
