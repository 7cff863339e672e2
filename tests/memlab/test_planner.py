"""The planner: its bytes are footprint's, its verdicts a virtual card's, its order the cost model's."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlab import cli, hardware, models
from memlab import planner as p
from memlab.footprint import footprint
from memlab.operations import in_proportion
from memlab.planner import plan
from memlab.recipe import Recipe, RecipeError
from memlab.units import CONSUMERS, GB, GIB, PHASES
from memlab.walk import ANY, Walk, largest

A100 = hardware.gpu("A100-80GB")


def planner(model="gpt2", card=A100, count=1, batch=None, **options):
    options = {"sequence": None, "start": None, "host_bytes": None, "nvme_bytes": None} | options
    return p._Planner(
        models.model(model), card, count, batch, options["sequence"], options["start"], options["host_bytes"],
        options["nvme_bytes"], p._assume(card, None, None, 0.4), options.get("allow") or {},
    )  # fmt: skip


def small_card(gib, name="A100-80GB"):
    return replace(hardware.gpu(name), memory_bytes=int(gib * GIB))


RECIPES = st.builds(
    dict,
    precision=st.sampled_from(("fp32", "amp-bf16", "bf16", "bf16-master")),
    optimizer=st.sampled_from(("sgd", "adamw", "adamw-8bit")),
    micro_batch=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    checkpointing=st.sampled_from(("none", "full", "every-4", "selective")),
    attention=st.sampled_from(("sdpa", "eager")),
    world_size=st.sampled_from((1, 4)),
    zero_stage=st.integers(0, 3),
    offload=st.sampled_from(((), ("optimizer_states:cpu",), ("activations:cpu",), ("gradients:cpu",))),
)


def recipe_of(fields):
    try:
        return Recipe(**fields, sequence=256).resolve(models.model("gpt2"))
    except RecipeError:
        return None


# bytes


@settings(max_examples=25, deadline=None)
@given(RECIPES)
def test_bytes_are_footprints_and_the_engines(fields):
    recipe = recipe_of(fields)
    if recipe is None:
        return
    whole = footprint("gpt2", recipe, A100)
    terms = p.engine_terms(models.model("gpt2"), recipe, A100)
    expected = {
        phase: whole.phases[phase]["total"] + sum(term.bytes[phase] for term in terms) for phase in PHASES
    }
    assert planner().bytes(recipe).totals == expected


@settings(max_examples=60, deadline=None)
@given(
    RECIPES,
    st.sampled_from(("gpt2", "bert-base", "tinyllama-1.1b", "llama2-7b", "resnet50", "resnet152", "vgg19")),
    st.sampled_from((None, (16, "full"), (16, "nf4"), (4, "nf4-double"))),
    st.sampled_from(("cuda", "cpu")),
    st.sampled_from((1, 2, 3, 64, 2**20)),
)
def test_one_walk_answers_for_every_micro_batch(fields, name, adapters, device, micro):
    """To the byte: peaks by phase and consumer, and what happens then."""
    config = models.model(name)
    if isinstance(config, models.TransformerConfig):
        fields = fields | {"sequence": 100}
    else:
        fields = fields | {"image": 64, "attention": "sdpa"}
    if adapters is not None:
        fields = fields | {"lora_rank": adapters[0], "base_weights": adapters[1]}
    try:
        recipe = Recipe(**fields).resolve(config)
    except RecipeError:
        return
    one = recipe.replace(micro_batch=micro)
    if not in_proportion(config, recipe) or not in_proportion(config, one):
        return
    every, walked = Walk(config, recipe, device, micro_batch=ANY), Walk(config, one, device)
    every.run()
    walked.run()
    assert largest(every.noted, micro) == (walked.peaks, walked.moments)
    assert sum(map(len, every.noted.values())) < 5000


def test_a_single_sample_may_need_a_walk_of_its_own():
    """It is spared copies per head (eager); learned positions have its shape."""
    config = models.model("bert-base")
    single = Recipe(attention="eager", checkpointing="full", precision="bf16", optimizer="sgd")
    assert not in_proportion(config, single) and in_proportion(config, single.replace(micro_batch=2))
    every, walked = Walk(config, single, "cpu", micro_batch=ANY), Walk(config, single, "cpu")
    every.run()
    walked.run()
    assert largest(every.noted, 1)[0] != walked.peaks


def test_engine_terms_say_why():
    recipe = Recipe(zero_stage=2, world_size=8, precision="bf16-master")
    terms = {term.name: term for term in p.engine_terms(models.model("gpt2"), recipe, A100)}
    assert set(terms) == {
        "cuBLAS workspaces", "shards beside whole weights", "fp32 shards are the master copy",
    }  # fmt: skip
    assert all(term.why for term in terms.values())
    (only,) = p.engine_terms(models.model("gpt2"), Recipe(zero_stage=1, world_size=8), A100)
    assert only.name == "cuBLAS workspaces"


# properties of a plan


@settings(max_examples=6, deadline=None)
@given(
    model=st.sampled_from(("gpt2", "bert-base", "resnet50")),
    gib=st.floats(1.5, 12),
    more=st.floats(0, 4),
    count=st.sampled_from((1, 2)),
    each=st.sampled_from((2, 6, 8)),
)
def test_more_memory_never_hurts(model, gib, more, count, each):
    small, large = (
        plan(model, small_card(g), count, effective_batch=count * each) for g in (gib, gib + more)
    )
    if small.fits:
        assert large.fits
    if small.best is not None:
        assert large.best is not None
        assert large.best.seconds <= small.best.seconds
    assert large.largest_micro_batch >= 1 or small.best is None


@settings(max_examples=6, deadline=None)
@given(
    model=st.sampled_from(("gpt2-medium", "bert-large", "resnet152")),
    gib=st.floats(2, 30),
    count=st.sampled_from((1, 2, 8)),
    each=st.sampled_from((1, 4, 12)),
    host=st.sampled_from((None, 4 * GB)),
)
def test_candidates_are_valid_fit_and_are_ranked(model, gib, count, each, host):
    card, config = small_card(gib), models.model(model)
    found = plan(model, card, count, effective_batch=count * each, host_bytes=host)
    ranks = [c.seconds for c in found.candidates]
    assert ranks == sorted(ranks)
    for c in (*found.candidates, *found.alternatives):
        recipe = c.recipe
        assert recipe.resolve(config, card) == recipe and recipe.world_size == count
        assert recipe.micro_batch * recipe.accumulation * recipe.data_parallel == count * each
        assert c.margin_bytes >= 0 and c.peak_bytes <= card.memory_bytes - p.ASSUMED_CONTEXT
        assert host is None or c.host_bytes <= host
        assert c.nvme_bytes == 0  # no budget was given
        assert c.seconds == pytest.approx(sum(c.cost.seconds.values()))
    if found.best is not None:
        assert found.best.seconds == min(c.seconds for c in found.candidates)
        assert found.nearest is None
    else:
        assert not found.alternatives and found.largest_micro_batch == 0


def test_search_agrees_with_brute_force():
    """No recipe that the search passes over is cheaper and fits."""
    made = planner("gpt2", small_card(4.5), batch=8)
    found = made.search()
    family, micro = found.candidates[0]
    best = family.rates.cost(micro, made._at(family, micro).accumulation).total
    for other in made._families():
        if other.severity > family.severity:
            continue
        for b in made._micro_batches(other.recipe):
            recipe = made._at(other, b)
            if other.rates.cost(b, recipe.accumulation).total < best * 0.999:
                assert not made.fits(recipe), recipe


def test_largest_micro_batch_and_longest_sequence():
    found = plan("gpt2", "T4", effective_batch=4, sequence=128)
    made = planner("gpt2", hardware.gpu("T4"), batch=4)
    n = found.largest_micro_batch
    assert made.fits(found.best.recipe.replace(micro_batch=n))
    assert not made.fits(found.best.recipe.replace(micro_batch=n + 1))
    assert found.limits(found.best.recipe) == (n, found.longest_sequence)
    assert found.longest_sequence == 1024  # learned positions
    rope = plan("smollm2-135m", "T4", effective_batch=1)
    made = planner("smollm2-135m", hardware.gpu("T4"))
    assert made.fits(rope.best.recipe.replace(sequence=rope.longest_sequence))
    assert not made.fits(rope.best.recipe.replace(sequence=rope.longest_sequence + 1))


# what it says


#: Printed often: bf16 with AdamW, everything sharded over eight cards, blocks checkpointed, one sequence.
PRINTED = Recipe(precision="bf16-master", zero_stage=3, world_size=8, checkpointing="full")


@pytest.fixture(scope="module")
def seventy():
    return plan(
        "llama2-70b", "A100-80GB", 8, effective_batch=1024, start=PRINTED, allow={"lora_rank": (None, 16)}
    )


def test_seventy_billion_on_eight(seventy):
    assert not seventy.fits and seventy.bound == "states"
    states = 16 * 68_976_648_192 / 8
    assert "(2 + 2 + 12) bytes" in seventy.arithmetic and "too much" in seventy.arithmetic
    assert "A100-80GB holds 85.20 GB" in seventy.arithmetic
    assert seventy.start_peak > states > 85e9
    assert len(seventy.candidates) >= 4
    assert len({c.way for c in seventy.candidates}) == len(seventy.candidates)
    assert all("optimizer_states:cpu" in c.recipe.offload for c in seventy.candidates)
    said = " ".join(word for c in seventy.alternatives for word in c.numerics)
    assert "8 bits" in said and "bf16" in said and "adapters of rank 16" in said


def test_host_memory_and_nvme_are_budgets():
    asked = {
        "effective_batch": 8,
        "start": PRINTED,
        "allow": {"checkpointing": ("full",), "tensor_parallel": (1,)},
    }
    less = plan("llama2-70b", "A100-80GB", 8, host_bytes=1000 * GB, **asked)
    assert all(c.host_bytes <= 1000 * GB for c in less.candidates)
    assert less.best is None or less.best.numerics  # states in fp32 need 1.1 TB
    nvme = plan("llama2-70b", "A100-80GB", 8, host_bytes=400 * GB, nvme_bytes=4000 * GB, **asked)
    assert "optimizer_states:nvme" in nvme.best.recipe.offload
    assert 0 < nvme.best.nvme_bytes <= 4000 * GB and "NVMe" in nvme.best.cost.seconds


def test_a_thousand_cards():
    found = plan("gpt3-175b", "A100-80GB", 1024, effective_batch=2048)
    assert not found.fits and len(found.candidates) >= 4
    assert "InfiniBand-HDR" in found.best.cost.bytes  # between machines


def test_many_recipes_few_walks():
    made = planner("llama2-70b", A100, 8, 1024)
    assert made.search().searched > 10_000
    assert len(made._walks) < 150


def test_the_seven_steps(seventy):
    names = ["1 micro-batch", "2 mixed precision", "3 accumulation", "4 checkpointing"]
    names += ["5 SDPA / flash attention", "6 sharding", "7 offload"]
    assert [step.name for step in seventy.steps] == names
    assert [s.name for s in seventy.steps if s.taken][-1] == "7 offload" and seventy.steps[-1].fits
    found = plan("bert-large", "T4", effective_batch=32, sequence=200)
    first, second, third, fourth, fifth, sixth, _ = found.steps
    assert first.taken and first.recipe.micro_batch < 32
    assert first.recipe.micro_batch * first.recipe.accumulation == 32
    assert second.taken and second.recipe.precision == "amp-fp16" and "loss scale" in second.price
    assert not sixth.taken and "one GPU" in sixth.why
    assert not fourth.taken and "not needed" in fourth.why
    for step in found.steps:
        assert sum(step.consumers.values()) == step.peak_bytes and step.why
        assert set(step.consumers) == set(CONSUMERS)
    assert fifth.recipe.attention == "sdpa" and third.name == "3 accumulation"


def test_checkpointing_has_a_price():
    start = Recipe(micro_batch=32, sequence=1024)
    found = plan("gpt2", small_card(6), start=start, allow={"attention": ("sdpa",)})
    made = planner("gpt2", small_card(6), start=start)
    full = made.cost(start.replace(checkpointing="full"))
    none = made.cost(start)
    assert none.recomputed == 0 and full.recomputed > 0
    assert 0.2 < full.recomputed / none.flops < 0.34
    assert full.flops == none.flops + full.recomputed
    assert found.assumptions.mfu == 0.4


def test_flops_are_six_per_weight_and_token():
    made = planner("llama2-7b", A100)
    cost = made.cost(Recipe(sequence=512))
    expected = 6 * (6_738_415_616 - 32000 * 4096) * 512  # the embedding is looked up
    assert expected < cost.flops < 1.05 * expected  # and attention


@pytest.mark.parametrize(
    ("model", "start", "bound"),
    [
        ("llama2-70b", {}, "states"),
        ("bert-large", {"precision": "fp32", "micro_batch": 32, "attention": "eager"}, "activations"),
        ("gpt2", {"micro_batch": 16, "checkpointing": "full"}, "logits"),
        ("gpt2-xl", {"sequence": 128}, "states"),
    ],
)
def test_bound(model, start, bound):
    found = plan(model, "A100-80GB", start=Recipe(**start))
    assert found.bound == bound and found.bound_why


def test_mfu_and_links_are_in_the_answer():
    slow = plan("gpt2", "A100-80GB", 2, mfu=0.2, intra_link="PCIe3", inter_link="infiniband-ndr")
    fast = plan("gpt2", "A100-80GB", 2, mfu=0.5)
    assert slow.best.cost.seconds["compute"] == pytest.approx(2.5 * fast.best.cost.seconds["compute"])
    assert "PCIe3" in slow.best.cost.bytes and "NVLink3" in fast.best.cost.bytes
    assert "20%" in slow.render() and "PCIe3 (16 GB/s)" in slow.render()
    assert slow.assumptions.inter_link.name == "InfiniBand-NDR"
    moved = {
        "start": Recipe(offload=("optimizer_states:cpu",)),
        "allow": {"offload": [("optimizer_states:cpu",)]},
    }
    own = plan("gpt2", "A100-80GB", **moved).best.cost.seconds
    other = plan("gpt2", "A100-80GB", host_link="PCIe3", host_memory_link="DDR5-desktop", **moved)
    half = other.best.cost.seconds
    assert half["offload"] == pytest.approx(2 * own["offload"], rel=0.01)
    assert half["CPU update"] == pytest.approx(4 * own["CPU update"])
    assert "host over PCIe3" in other.render() and "DDR5-desktop (77 GB/s)" in other.render()


def test_text_and_json(seventy):
    for found in (seventy, plan("resnet152", "T4", effective_batch=512), plan("gpt3-175b", "T4")):
        assert max(map(len, str(found).splitlines())) <= 100
        data = json.loads(json.dumps(found.to_dict()))
        assert data["capacity_bytes"] == found.gpu.memory_bytes
        assert [u["name"] for u in data["uncertainty"]][:3] == ["context", "formula", "allocator"]
        assert all(u["why"] for u in data["uncertainty"])
    assert found.best is None and found.nearest.peak_bytes > found.gpu.memory_bytes
    assert "none of" in str(found)


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (("gtp2", "T4"), {}, "unknown model 'gtp2'"),
        (("gpt2", "T5"), {}, "unknown GPU 'T5'"),
        (("gpt2", "T4", 0), {}, "count must be a whole number from 1"),
        (
            ("gpt2", "T4", 8),
            {"effective_batch": 12},
            "can't be divided among 8 GPUs: use a multiple of 8, say 16",
        ),
        (("gpt2", "T4"), {"sequence": 2048}, "1024 learned positions"),
        (("resnet50", "T4"), {"sequence": 128}, "leave sequence out"),
        (("gpt2", "T4"), {"mfu": 0}, "mfu must be above 0"),
        (("gpt2", "T4", 2), {"intra_link": "NVLink9"}, "unknown link 'NVLink9'"),
        (("gpt2", "T4"), {"allow": {"optimiser": ("sgd",)}}, "'optimiser' is no field of a Recipe"),
    ],
)
def test_errors_are_one_line(words, options, said):
    with pytest.raises(ValueError) as caught:
        plan(*words, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# a trace decides


def test_confirm_takes_the_first_that_runs():
    found = plan("gpt2", small_card(5), effective_batch=8)
    asked = []

    def trace(recipe):
        asked.append(recipe)
        return None if len(asked) == 1 else 1

    sure = found.confirm(trace)
    assert sure.best is not None and sure.best.recipe == asked[1]
    assert [peak for _, peak in sure.tried] == [None, 1]
    nothing = found.confirm(lambda recipe: None)
    assert nothing.best is None and nothing.render().startswith("nothing confirmed fits: ")
    assert len(nothing.tried) <= 8 and "--" not in nothing.render()
    assert max(map(len, sure.render().splitlines())) <= 100


def test_what_fits_at_most_belongs_to_the_confirmed_winner():
    found = plan("gpt2", small_card(3), effective_batch=8)
    last = found.candidates[-1]
    assert last.recipe != found.best.recipe
    sure = found.confirm(lambda recipe: 1 if recipe == last.recipe else None, most=20)
    assert sure.best == last
    made = planner("gpt2", small_card(3), batch=8)
    assert (sure.largest_micro_batch, sure.longest_sequence) == found.limits(last.recipe)
    assert made.fits(last.recipe.replace(micro_batch=sure.largest_micro_batch))
    assert not made.fits(last.recipe.replace(micro_batch=sure.largest_micro_batch + 1))
    assert f"largest micro-batch {sure.largest_micro_batch:,}" in " ".join(sure.render().split())
    assert "largest micro-batch" in found.render() and "largest micro-batch" not in found.render(limits=False)
    nothing = found.confirm(lambda recipe: None)
    assert nothing.largest_micro_batch == 0 and "largest micro-batch" not in nothing.render()
    if found.tight:  # a trace has shown that it runs: its own size is the least that is said
        tight = found.confirm(lambda recipe: 1)
        assert tight.largest_micro_batch >= tight.best.recipe.micro_batch
        assert tight.longest_sequence >= tight.best.recipe.sequence


def test_confirm_goes_on_to_the_largest_margins_and_says_why():
    found = plan("gpt2", small_card(3), effective_batch=8, allow={"lora_rank": (None, 16)})
    widest = max([*found.candidates, *found.alternatives], key=lambda c: c.margin_bytes)
    sure = found.confirm(lambda recipe: 1 if recipe == widest.recipe else None)
    assert sure.best is not None and sure.best.recipe == widest.recipe
    assert len(sure.reasons) == len(sure.tried) and all(sure.reasons)
    assert all(f"({why})"[:20] in sure.render() for why in sure.reasons)
    lines = sure.render().splitlines()
    full = found.confirm(lambda recipe: 1 if recipe.lora_rank is None else None)
    assert full.best is not None and full.best.recipe.lora_rank is None
    assert any("adapters" in why for why in full.reasons) == any(
        c.seconds < full.best.seconds for c in found.alternatives
    )
    assert lines[0].startswith("confirmed by ") and sum(line.endswith("runs") for line in lines) == 1


def test_the_machine_follows_the_card_and_equals_are_named():
    desktop = plan("gpt2", "RTX-4090").assumptions
    assert desktop.host_memory.name == "DDR5-desktop" and A100.memory_kind == "HBM2e"
    assert plan("gpt2", A100).assumptions.host_memory.name == "DDR5-server"
    assert any("count as equal" in line for line in desktop.lines())


@pytest.mark.parametrize(
    ("model", "gib", "count", "batch", "start"),
    [
        pytest.param("gpt2", 3.2, 1, 8, None, marks=pytest.mark.long),
        pytest.param("gpt2", 2.6, 4, 32, None, marks=pytest.mark.long),
        ("bert-base", 1.7, 2, 32, Recipe(precision="bf16", sequence=512, world_size=2)),
        ("resnet50", 1.9, 1, 32, None),
    ],
)
def test_verdicts_are_the_traces(model, gib, count, batch, start):
    """The short form of benchmarks/planner.py: start, best and the next cheaper one on a virtual card."""
    from benchmarks.planner import traced

    found = plan(
        model, small_card(gib), count, effective_batch=batch, sequence=start and 512, start=start,
        allow={"tensor_parallel": (1,)},
    )  # fmt: skip
    assert (traced(found, found.start) is not None) == found.fits
    sure = found.confirm(lambda recipe: traced(found, recipe))
    assert sure.best is not None
    assert len(sure.tried) > 1 and all(peak is None for _, peak in sure.tried[:-1])
    winner, peak = sure.tried[-1]
    blocks = planner(model, small_card(gib), count, batch)._block_weights(winner.recipe)
    assert abs(winner.peak_bytes - peak) <= 0.01 * peak + blocks * (winner.recipe.zero_stage >= 2)


# the command line


@pytest.fixture
def run(monkeypatch, capsys):
    def memlab(*words):
        monkeypatch.setattr(sys, "argv", ["memlab", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return memlab


def test_command(run, tmp_path):
    start = tmp_path / "start.toml"
    start.write_text('precision = "fp32"\nmicro_batch = 4\n')
    code, out, err = run(
        "plan", "gpt2", "--gpu", "t4", "--seq", 256, "--effective-batch", 16, "--recipe", start, "--lora",
        "--host-memory", "64 GiB", "--host-link", "pcie5", "--host-memory-link",
        "DDR5-desktop", "--nvme", "1TB", "--no-trace", "--export", "fsdp2",
        "--out", tmp_path / "o", "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["effective_batch"] == 16 and data["start"]["recipe"]["micro_batch"] == 4
    assert data["confirmed"] is None and data["export"]["engine"] == "fsdp2"
    assert data["assumptions"]["host_link"]["name"] == "PCIe5"
    assert data["assumptions"]["host_memory"]["name"] == "DDR5-desktop"
    assert (tmp_path / "o" / "train_fsdp2.py").exists()


def test_command_traces_the_winner(run):
    code, out, err = run("plan", "gpt2", "--gpu", "T4", "--seq", 64)
    assert code == 0 and "traced on the virtual card" in out and "runs" in out
    assert err.startswith("tracing ")
    assert (
        out.index("largest micro-batch") > out.index("confirmed by") and out.count("largest micro-batch") == 1
    )
    assert max(map(len, out.splitlines())) <= 100


def test_command_says_that_nothing_fits(run):
    code, out, _ = run("plan", "gpt3-175b", "--gpu", "T4", "--no-trace")
    assert code == 1 and "recipes fits" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "gpt2"), "--gpu"),
        (("plan", "gpt2", "--gpu", "T4", "--export", "megatron"), "unknown engine 'megatron'"),
        (("plan", "gpt2", "--gpu", "T4", "--host-memory", "much"), "can't read 'much' as a size"),
        (("plan", "gpt2", "--gpu", "T4", "--sequence", "0", "--no-trace"), "sequence"),
        (("plan", "gpt3-175b", "--gpu", "T4", "--export", "fsdp2", "--no-trace"), "nothing to export"),
    ],
)
def test_command_errors(run, words, said):
    code, _, err = run(*words)
    assert code == 2 and said in err and len(err.splitlines()) == 1


MODULE = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048))
    return net, lambda n: torch.randn(n, 1024, 2048)

def wrong():
    return 3
"""


def test_command_plans_a_built_module(run, tmp_path, monkeypatch):
    (tmp_path / "some_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("plan", "some_model:make", "--gpu", "T4", "--effective-batch", 2048, "--json")
    assert code == 0 and "tracing " in err
    data = json.loads(out)
    weights = 2 * 2048 * 4096 + 4096 + 2048
    products = 6 * 2 * 2048 * 4096 * 1024 * 2048  # two layers, the first without a gradient of its input
    assert data["flops_per_effective_batch"] == products * 5 // 6
    best = data["best"]
    assert best["precision"] == "amp-fp16" and 16 * weights < best["peak_bytes"] < 15.9e9
    assert 1 <= best["micro_batch"] < 2048
    for words, said in (
        (("some_model:wrong", "--gpu", "T4"), "must return (module, batch)"),
        (("some_model:nothing", "--gpu", "T4"), "has no attribute 'nothing'"),
        (("some_model:make", "--gpu", "T4", "--count", 2), "planned on one card"),
    ):
        code, _, err = run("plan", *words)
        assert code == 2 and said in err.splitlines()[-1]


def test_interrupt_while_tracing_is_quiet():
    memlab = [sys.executable, "-m", "memlab.cli", "plan", "llama2-13b", "--gpu", "A100-80GB"]
    process = subprocess.Popen(memlab, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("tracing ")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err


def test_adapters_on_whole_weights_may_become_adapters_on_nf4_where_adapters_are_asked_for():
    """Whoever has adapters already isn't told that nothing fits where it does for others."""
    start = Recipe(precision="bf16", sequence=8192, checkpointing="full")
    allow = {"lora_rank": (None, 16)}
    fresh = plan("llama3-8b", "RTX-4090", sequence=8192, start=start, allow=allow)
    having = plan("llama3-8b", "RTX-4090", sequence=8192, start=start.replace(lora_rank=16), allow=allow)
    assert fresh.best and having.best and having.best.recipe == fresh.best.recipe
    assert "the frozen weights are in nf4" in str(having.to_dict())
    assert "8.03 B parameters frozen in bf16, 13.63 M in adapters of rank 16 have gradients" in " ".join(
        having.render().split()
    )
