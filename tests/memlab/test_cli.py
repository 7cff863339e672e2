"""The command line: what it prints, and how it fails."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from memlab import cli
from memlab.recipe import Recipe


@pytest.fixture
def run(monkeypatch, capsys):
    """memlab(*words) -> (exit code, stdout, stderr), in this process."""

    def memlab(*words):
        monkeypatch.setattr(sys, "argv", ["memlab", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return memlab


@pytest.mark.parametrize("command", ["footprint", "trace", "compare"])
def test_every_recipe_field_is_a_flag(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    for field in Recipe().to_dict():
        assert "--" + field.replace("_", "-") in out
    assert f"memlab {command} " in out  # the example
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("words", [(), ("--help",), ("gpus", "--help"), ("models", "--help")])
def test_help(run, words):
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: memlab") and max(map(len, out.splitlines())) <= 80


def test_version(run):
    assert run("--version")[:2] == (0, "memlab 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("footprint", "gtp2"), "unknown model 'gtp2': did you mean gpt2"),
        (("footprint", "gpt2", "--gpu", "A100-81GB"), "unknown GPU 'A100-81GB': did you mean A100-80GB"),
        (("footprint", "gpt2", "--gpu", "a100"), "ambiguous: A100-40GB or A100-80GB"),
        (("footprint", "gpt2", "--micro-batch", "-4"), "micro_batch must be at least 1, not -4"),
        (("footprint", "gpt2", "--micro-batch", "four"), "--micro-batch"),
        (("footprint", "gpt2", "--sequence", "4096"), "1024 learned positions"),
        (("footprint", "gpt2", "--precision", "fp8"), "unknown precision 'fp8'"),
        (("footprint", "gpt2", "--offload", "weights:cpu"), "unknown thing to offload"),
        (("footprint", "gpt2", "--base-weights", "nf4"), "can't be trained: set lora_rank"),
        (("footprint", "resnet50", "--lora-rank", "8"), "resnet50 is a convnet"),
        (("footprint", "gpt2", "--lora-rank", "8", "--lora-targets", "query"), "has no such layer"),
        (("footprint", "gpt2", "--batch", "4"), "No such option: --batch"),
        (("footprint",), "MODEL"),
        (("footprint", "gpt2", "--recipe", "/nowhere/r.toml"), "/nowhere/r.toml: can't read the recipe"),
        (("footprint", "/nowhere/config.json"), "/nowhere/config.json: can't read the model's config"),
        (("fotprint", "gpt2"), "No such command 'fotprint'"),
        (("gpus", "a100"), "ambiguous"),
        (("models", "gtp2"), "did you mean gpt2"),
        (("trace", "gtp2"), "did you mean gpt2"),
        (("compare", "gtp2"), "did you mean gpt2"),
        (("footprint", "gpt2", "--optimizer-impl", ""), "--optimizer-impl has no value"),
        (("footprint", "mine:build"), "only plan takes a module's function: memlab plan mine:build"),
        (("trace", "gpt2", "--out", "step.txt"), "step.txt: end the name in .json.gz"),
        (("plan", "gpt2", "--gpu", "t4", "--out", "."), "say for which engine"),
        (
            ("plan", "gpt2", "--gpu", "t4", "--export", "fsdp2", "--out", f"{__file__}/x"),
            "test_cli.py isn't a folder",
        ),
        (("footprint", "/dev/zero"), "/dev/zero has more than 16.00 MiB: that is no config.json"),
        (
            ("footprint", "gpt2", "--recipe", "/dev/zero"),
            "/dev/zero has more than 1.00 MiB: that is no recipe",
        ),
        (("snapshot", __file__, "--html", ""), "isn't a regular file: choose a file's name to write to"),
        (("trace", "gpt2", "--out", "/nowhere/s.html"), "/nowhere/s.html: there is no such folder"),
        (("plan", "resnet50", "--gpu", "t4", "--lora"), "resnet50 is a convnet"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(run, words, said):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("memlab: ") and said in err
    assert err.count("\n") == 1


# -- footprint --------------------------------------------------------------------------------------------


def test_footprint_prints_recipe_and_peak(run):
    code, out, err = run("footprint", "gpt2", "--micro-batch", 4, "--sequence", 512, "--precision", "fp32")
    assert (code, err) == (0, "")
    assert "fp32" in out and "AdamW foreach" in out and "sequence 512" in out and "peak" in out
    assert max(map(len, out.splitlines())) <= 80


def test_footprint_as_json_holds_integers(run):
    code, out, _ = run("footprint", "llama2-70b", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["parameter_count"] == 68_976_648_192
    assert isinstance(data["peak_bytes"], int) and data["peak_bytes"] > 16 * 68_976_648_192
    assert data["peak_phase"] in ("forward", "backward", "optimizer")


def test_adapters_and_four_bits_are_flags(run):
    words = ("--lora-rank", 16, "--lora-targets", "query,value", "--base-weights", "nf4-double")
    code, out, _ = run("footprint", "llama2-7b", "--json", "--precision", "bf16", *words)
    data = json.loads(out)
    assert code == 0
    assert data["recipe"]["lora_targets"] == ["query", "value"]
    assert data["trained_count"] == 32 * 16 * 4 * 4096
    assert data["consumers"]["parameters"] < 4.1 * 2**30  # 7 billion in 4 bits, embedding and head in 16
    code, out, _ = run("footprint", "gpt2", "--lora-rank", 8)
    assert "LoRA 8 on attention" in out and "trained)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_flags_win_over_the_file_and_the_file_over_the_defaults(run, tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('precision = "bf16"\nmicro_batch = 8\nset_to_none = false\n', encoding="utf-8")
    data = json.loads(run("footprint", "gpt2", "--json", "--recipe", file, "--micro-batch", 2)[1])
    recipe = data["recipe"]
    assert (recipe["precision"], recipe["micro_batch"], recipe["set_to_none"]) == ("bf16", 2, False)
    words = ("footprint", "gpt2", "--json", "--recipe", file, "--set-to-none", "--offload", "gradients:cpu")
    recipe = json.loads(run(*words)[1])["recipe"]
    assert (recipe["set_to_none"], recipe["offload"]) == (True, ["gradients:cpu"])


def test_a_config_json_is_a_model(run, tmp_path, monkeypatch):
    from tests.memlab.test_models import GPT2

    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2), encoding="utf-8")
    ours, theirs = (json.loads(run("footprint", name, "--json")[1]) for name in ("gpt2", file))
    assert ours["peak_bytes"] == theirs["peak_bytes"]
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("footprint", ".", "--json")[1]) == theirs  # the folder of the file


def test_what_a_config_asks_for_and_no_figure_holds_is_said(run, tmp_path):
    from tests.memlab.test_models import LLAMA

    file = tmp_path / "config.json"
    asks = {"quantization_config": {"bits": 4}, "attention_dropout": 0.1, "sliding_window": 1024}
    file.write_text(json.dumps(LLAMA | asks), encoding="utf-8")
    out = " ".join(run("footprint", file)[1].split())
    assert "quantization_config isn't read" in out and "sliding window of 1,024 isn't modelled" in out
    assert "asks for dropout 0.1" in out


def test_what_is_worth_saying_is_printed(run):
    assert "note: T4 has no bf16 arithmetic" in run("footprint", "gpt2", "--gpu", "t4")[1]
    out = run("footprint", "llama2-7b", "--sequence", 8192)[1]
    assert "note: sequence 8192 is beyond" in out and max(map(len, out.splitlines())) <= 80


# -- trace and compare ------------------------------------------------------------------------------------

SMALL = ("lenet5", "--micro-batch", 4, "--precision", "fp32")


def test_trace_prints_the_recipe_and_saves(run, tmp_path):
    from memlab.trace import Trace

    file = tmp_path / "lenet.json.gz"
    code, out, err = run("trace", *SMALL, "--out", file)
    assert (code, err) == (0, "")
    assert out.startswith("lenet5, one training step\nfp32, AdamW foreach, micro-batch 4, image 32x32")
    assert Trace.load(file).peak_bytes > 3 * 4 * 61_706
    mask = os.umask(0o022)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask  # as any new file
    assert list(tmp_path.iterdir()) == [file]


def test_trace_writes_the_viewer_where_a_page_is_asked_for(run, tmp_path):
    code, out, _ = run("trace", *SMALL, "--out", tmp_path / "step.html")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert (tmp_path / "step.html").read_text("utf-8").lower().startswith("<!doctype html>")


def test_a_step_that_is_too_large_for_the_card_is_the_answer_and_exit_code_1(run):
    code, out, err = run("trace", "gpt2", "--micro-batch", 64, "--gpu", "t4", "--precision", "amp-fp16")
    assert (code, out) == (1, "")
    assert err.startswith("memlab: CUDA out of memory") and err.count("\n") == 1
    assert err.endswith("Without --gpu the whole step is traced, whatever it takes.\n")


def test_what_a_trace_cannot_run_is_refused(run, tmp_path):
    code, _, err = run("trace", "gpt2", "--world-size", 4, "--tensor-parallel", 2, "--zero-stage", 1)
    assert code == 2 and err.count("\n") == 1
    code, _, err = run("trace", *SMALL, "--micro-batch", 10**20)
    assert code == 2 and "micro_batch" in err and err.count("\n") == 1
    (tmp_path / "pipe").mkdir()
    code, _, err = run("trace", *SMALL, "--out", tmp_path / "pipe")
    assert code == 2 and "isn't a regular file" in err and err.count("\n") == 1
    code, _, err = run("trace", *SMALL, "--out", tmp_path / "none" / "t.json.gz")
    assert code == 2 and "no such folder" in err and err.count("\n") == 1


def test_compare(run):
    code, out, err = run("compare", *SMALL)
    assert (code, err) == (0, "")
    assert "fp32" in out and "measured" in out
    data = json.loads(run("compare", *SMALL, "--json", "--no-measure")[1])
    exact = {row["name"]: row for row in data["rows"]}["parameters"]
    assert exact["formula_bytes"] == exact["trace_bytes"] == 4 * 61_706
    assert exact["measured_bytes"] is None


# -- lists ------------------------------------------------------------------------------------------------


def test_gpus(run):
    code, out, _ = run("gpus")
    assert code == 0 and "A100-80GB" in out and "PCIe4" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run("gpus", "a100-80gb")
    assert "85,198,045,184 B" in out and "deviceQuery" in out
    assert max(map(len, out.splitlines())) <= 80
    assert json.loads(run("gpus", "t4", "--json")[1])["gpus"][0]["memory_bytes"] == 15_835_660_288


def test_models(run):
    code, out, _ = run("models")
    assert code == 0 and "68,976,648,192" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "kv_heads      8" in run("models", "llama2-70b")[1]
    assert "growth        32" in run("models", "densenet264")[1]
    assert json.loads(run("models", "resnet152", "--json")[1])[0]["parameter_count"] == 60_192_808


# -- messages, snapshots, completion ------------------------------------------------------------------------

MESSAGE = (
    "CUDA out of memory. Tried to allocate 786.00 MiB (GPU 1; 14.76 GiB total capacity; 13.60 GiB already "
    "allocated; 310.50 MiB free; 13.90 GiB reserved in total by PyTorch)\n"
)


def test_oom_reads_a_file_or_standard_input(run, tmp_path, monkeypatch):
    file = tmp_path / "log.txt"
    file.write_text("noise\n" + MESSAGE, encoding="utf-8")
    code, out, err = run("oom", file, "--model", "gpt2", "--micro-batch", 4, "--gpu", "t4")
    assert (code, err) == (0, "") and "capacity:" in out and "log-softmax" in out
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    data = json.loads(run("oom", "--json")[1])
    assert data["reports"][0]["requested"] == 786 * 2**20
    assert data["found"][0]["first"] is True


def test_oom_says_in_one_line_what_is_missing(run, tmp_path):
    file = tmp_path / "log.txt"
    file.write_text("all is well\n", encoding="utf-8")
    for words in (("oom", file), ("oom", tmp_path / "none"), ("oom", file, "--micro-batch", 4)):
        code, out, err = run(*words)
        assert (code, out) == (2, "") and err.count("\n") == 1


def test_snapshot_shows_traces_and_pickles(run, tmp_path):
    from memlab.snapshot import write_snapshot
    from memlab.trace import Trace

    trace = Trace()
    trace.mark("forward")
    big = trace.allocate(32 * 2**20, "activations", module="h.0", operator="aten.mm", shape=(8, 2**20))
    trace.allocate(5 * 2**20, "parameters")
    trace.free(big)
    trace.save(tmp_path / "t.json.gz")
    write_snapshot(trace, tmp_path / "s.pickle")
    code, out, _ = run("snapshot", tmp_path / "t.json.gz", "--html", tmp_path / "v.html")
    assert (
        code == 0 and "at the peak" in out and "h.0 aten.mm" in out and (tmp_path / "v.html").stat().st_size
    )
    data = json.loads(run("snapshot", tmp_path / "s.pickle", "--json")[1])
    assert data["allocated"] == 5 * 2**20 and data["reserved"] == 52 * 2**20
    assert (
        json.loads(run("snapshot", tmp_path / "s.pickle", "--json", "--at", "peak")[1])["live"][0]["count"]
        == 1
    )
    found = json.loads(run("oom", tmp_path / "s.pickle", "--json")[1])
    assert found["reports"] == [] and found["snapshot"]["largest_free_block"] == 32 * 2**20
    code, out, err = run("snapshot", tmp_path / "v.html")
    assert (code, out) == (2, "") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("memlab footprint llama2", "llama2-7b"),
        ("memlab oom --gpu a100", "a100-80gb"),
        ("memlab footprint gpt2 --precision amp", "amp-bf16"),
        ("memlab snap", "snapshot"),
    ],
)
def test_completion_answers_without_torch(words, wanted):
    code = (
        "import sys, atexit, memlab.cli as cli\n"
        "atexit.register(lambda: print('torch' in sys.modules))\nsys.argv = ['memlab']\ncli.main()\n"
    )
    environment = os.environ | {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_MEMLAB_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    lines = done.stdout.split()
    assert wanted in lines and lines[-1] == "False"


# -- as a process -----------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m memlab.cli models | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_ctrl_c_ends_quietly_with_130():
    code = (
        "import sys, time, memlab.__main__ as command\n"
        "import memlab.models\n"
        "def slow(name):\n    print('started', flush=True)\n    time.sleep(60)\n"
        "memlab.models.model = slow\n"
        "sys.argv = ['memlab', 'models', 'gpt2']\n"
        "command.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("command", ["snapshot", "doctor"])
def test_what_is_no_regular_file_is_not_read_to_its_end(run, command):
    code, out, err = run(command, "/dev/zero")
    assert (code, out) == (2, "") and "/dev/zero isn't a regular file" in err and err.count("\n") == 1


def test_a_device_is_no_log(run):
    code, out, err = run("oom", "/dev/zero")
    assert (code, out) == (2, "") and "/dev/zero is a device" in err


def test_a_recipe_nested_too_deeply_is_one_line(run, tmp_path):
    (tmp_path / "deep.toml").write_text("x=" + "[" * 5000)
    code, out, err = run("footprint", "gpt2", "--recipe", tmp_path / "deep.toml")
    assert (code, out) == (2, "") and "nested too deeply" in err and err.count("\n") == 1
