import json
import random
import subprocess
import sys

import pytest
import torch

from memlab import chapter


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in ("MEMLAB_DEVICE", "MEMLAB_SIZE", "MEMLAB_SEED", "MEMLAB_GRADING"):
        monkeypatch.delenv(name, raising=False)


def begin(**given):
    return chapter.begin("02_four_consumers", **given)


def test_one_line_says_where_it_runs(capsys):
    lab = begin(device="cpu", seed=7)
    out = capsys.readouterr()
    assert lab.device == torch.device("cpu") and (lab.size, lab.seed) == ("normal", 7)
    assert out.out.count("\n") == 1 and out.err == ""
    assert "02_four_consumers on " in out.out and "CPU core" in out.out and torch.__version__ in out.out


def test_auto_takes_the_gpu_where_there_is_one():
    assert begin().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_virtual_card_measures_bytes_and_the_cpu_computes_values(capsys):
    lab = begin(device="virtual:t4")
    assert "on a virtual T4, values on " in capsys.readouterr().out
    assert (lab.virtual, lab.device) == ("T4", torch.device("cpu"))
    with lab.card():
        x = torch.empty(2**30, device=lab.device)  # 4 GiB that are nowhere
        assert torch.cuda.memory_allocated() == x.nbytes == 4 * 2**30
    assert torch.ones(2, device=lab.device_for("sums")).sum().item() == 2
    assert capsys.readouterr().out.startswith("(sums: the tensors of a virtual T4 hold no values")


def test_without_a_virtual_card_nothing_changes(capsys):
    lab = begin(device="cpu")
    capsys.readouterr()
    with lab.card():
        assert torch.ones(2, device=lab.device_for("sums")).sum().item() == 2
    assert (lab.virtual, capsys.readouterr().out) == ("", "")


def test_same_seed_same_numbers():
    def draw(seed):
        begin(seed=seed)
        return random.random(), torch.rand(1).item()

    assert draw(3) == draw(3) != draw(4)


def test_threads_never_exceed_the_cores_allowed(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(chapter, "_cores", lambda: 1)
    try:
        torch.set_num_threads(2)
        begin()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_environment_gives_the_defaults_and_an_explicit_parameter_wins(monkeypatch):
    monkeypatch.setenv("MEMLAB_DEVICE", "cpu")
    monkeypatch.setenv("MEMLAB_SIZE", "smallest")
    monkeypatch.setenv("MEMLAB_SEED", "11")
    lab = begin()
    assert (lab.device.type, lab.size, lab.seed) == ("cpu", "smallest", 11)
    assert begin(seed=5).seed == 5
    monkeypatch.setenv("MEMLAB_SIZE", "normal")
    assert begin(size="smallest").size == "smallest"


def test_grading_is_small_unless_told(monkeypatch):
    monkeypatch.setenv("MEMLAB_GRADING", "1")
    assert begin().size == "smallest"
    monkeypatch.setenv("MEMLAB_SIZE", "normal")
    assert begin().size == "normal"


def test_pick():
    assert begin(size="smallest").pick(smallest=1, normal=2) == 1
    assert begin().pick(smallest=1, normal=2) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "gpu"}, "device 'gpu': write 'auto', 'cpu', 'cuda'"),
        ({"device": "cpu:1"}, "device 'cpu:1'"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"device": "virtual:T5"}, "T5"),
        ({"device": "virtual"}, "unknown GPU"),
        ({"size": "huge"}, "size 'huge': write 'smallest' or 'normal'"),
        ({"seed": -1}, "seed -1: write a whole number"),
        ({"seed": 1.5}, "seed 1.5"),
        ({"seed": True}, "seed True"),
    ],
)
def test_a_bad_value_is_one_clear_line(given, says):
    with pytest.raises(ValueError) as caught:
        begin(**given)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("MEMLAB_SEED", "x")
    with pytest.raises(ValueError, match="MEMLAB_SEED 'x'"):
        begin()


def test_a_chapter_has_a_chapters_name():
    with pytest.raises(ValueError, match="02_four_consumers"):
        chapter.begin("four consumers")


def test_a_headline_reads_well_without_ipython(capsys):
    lab = begin()
    capsys.readouterr()
    lab.headline("Peak of one step", 3 * 2**29, "B", "allocated by all tensors")
    lab.headline("Saving", 1.23456, "times", "activations only")
    assert capsys.readouterr().out == (
        "Peak of one step: 1.50 GiB (allocated by all tensors)\nSaving: 1.235 times (activations only)\n"
    )


def test_a_headline_reaches_a_runner_through_the_outputs(monkeypatch):
    shown = []
    monkeypatch.setattr(chapter, "_display", shown.append)
    begin().headline("Peak <of> a step", 2**20, "B", "allocated")
    (bundle,) = shown
    data = bundle[chapter.HEADLINE_MIME]
    assert json.loads(json.dumps(data)) == {
        "chapter": "02_four_consumers", "name": "Peak <of> a step", "value": 2**20, "unit": "B",
        "includes": "allocated", "text": "1.00 MiB",
    }  # fmt: skip
    assert "&lt;of&gt;" in bundle["text/html"]


def test_a_headline_is_a_display_in_ipython():
    script = (
        "from IPython.testing.globalipapp import start_ipython; start_ipython()\n"
        "from IPython.utils.capture import capture_output\n"
        "from memlab import chapter\n"
        "lab = chapter.begin('01_memory_basics', device='cpu')\n"
        "with capture_output() as got: lab.headline('a', 1, 'B', 'b')\n"
        "assert got.outputs[0].data[chapter.HEADLINE_MIME]['value'] == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "12", None, True])
def test_a_headline_is_a_number(value):
    with pytest.raises(ValueError, match="isn't a finite number"):
        begin().headline("a", value, "B", "b")


def test_a_headline_says_what_it_includes():
    with pytest.raises(ValueError, match="what it includes"):
        begin().headline("a", 1, "B", " ")


def test_a_containers_limits_are_seen(monkeypatch):
    monkeypatch.setattr(chapter, "_cgroup", {"cpu.max": "150000 100000", "memory.max": str(2**29)}.get)
    assert chapter._cores() <= 2
    assert chapter._memory() == 2**29
    monkeypatch.setattr(chapter, "_cgroup", {"cpu.max": "max 100000", "memory.max": "max"}.get)
    assert chapter._memory() > 2**29


def test_importing_it_loads_no_torch():
    script = "import sys, memlab.chapter; assert 'torch' not in sys.modules and 'IPython' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


class OlderCard:
    """What torch says of a Tesla T4."""

    name, total_memory = "Tesla T4", 15_835_660_288


def test_a_card_older_than_ampere_is_named_and_measured_in_fp16(monkeypatch):
    t4 = chapter.Lab("02_four_consumers", torch.device("cuda", 0), "normal", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: OlderCard)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert t4.half == torch.float16
    assert chapter._machine(t4.device) == (
        "Tesla T4 (14.75 GiB as CUDA reports it; older than Ampere: bf16 only emulated, no FlashAttention-2)"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert t4.half == torch.bfloat16 and "Ampere" not in chapter._machine(t4.device)
    assert begin(device="cpu").half == torch.bfloat16


@pytest.mark.parametrize(("version", "enough"), [("2.10.1+cu128", False), ("2.11.0", True), ("3.0a0", True)])
def test_an_old_torch_is_refused_in_one_line(monkeypatch, version, enough):
    monkeypatch.setattr(torch, "__version__", version)
    if enough:
        assert f"torch {version}" in chapter.versions()
        return
    for call in (begin, chapter.versions):
        with pytest.raises(
            ImportError, match=r"needs torch 2.11 or newer and this is 2.10.1\+cu128"
        ) as error:
            call()
        assert "\n" not in str(error.value)
