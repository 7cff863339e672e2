"""Sharded steps on a process group that isn't there equal those on gloo, to the byte and event by event."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memlab import virtual
from memlab.models import model
from memlab.recipe import Recipe, RecipeError
from memlab.sharded import Sharding, _Chunks, fake_process_group, trace_sharded
from memlab.trace import Trace
from memlab.units import PHASES
from tests.memlab.gloo import TINY, on_gloo

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo: no witness"
)


def events(trace: Trace) -> list[int]:
    """Sizes in order, freed ones negative, from the first forward to the end of the optimizer."""
    start = next(position for position, phase in trace.marks if phase == "forward")
    after = [position for position, phase in trace.marks if phase == "setup" and position > start]
    return [
        trace.sizes[e] if e >= 0 else -trace.sizes[~e] for e in trace.events[start : min(after, default=None)]
    ]


def phases(trace: Trace) -> dict[str, int]:
    return {phase: n for phase, n in trace.phase_peaks().items() if phase in PHASES}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fully_shard, 2 ranks": ("gpt", {"precision": "fp32", "zero_stage": 3, "world_size": 2}),
    "fully_shard, 4 ranks": ("gpt", {"precision": "fp32", "zero_stage": 3, "world_size": 4}),
    "weights kept, fp32 shards, checkpoints": (
        "llama", {"precision": "bf16-master", "zero_stage": 2, "world_size": 2, "checkpointing": "full"},
    ),
    "DistributedDataParallel": ("gpt", {"precision": "fp32", "world_size": 2}),
    "ZeroRedundancyOptimizer": ("gpt", {"precision": "fp32", "zero_stage": 1, "world_size": 2}),
    "tensor parallel": ("gpt", {"precision": "fp32", "tensor_parallel": 2, "world_size": 2}),
    "fully_shard and tensor parallel, 4 ranks": (
        "llama", {"precision": "bf16", "zero_stage": 3, "tensor_parallel": 2, "world_size": 4,
                  "optimizer_impl": "fused", "checkpointing": "every-2"},
    ),
}  # fmt: skip


def fakes(case: str) -> list[Trace]:
    """The trace of every rank of a case, without a group."""
    name, recipe = CASES[case]
    ranks = range(recipe["world_size"])
    return [trace_sharded(TINY[name], Recipe(**recipe), sharding=Sharding(rank=rank)) for rank in ranks]


@gloo
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_fake_group_equals_gloo(world: int, tmp_path: Path) -> None:
    left = [case for case in CASES if CASES[case][1]["world_size"] == world]
    faked = {case: fakes(case) for case in left}
    # A thread of gloo may let go of a tensor late; what is allocated, in which order, doesn't depend on it.
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        for case, (reals, losses) in zip(
            list(left), on_gloo(folder, world, [CASES[c] for c in left]), strict=True
        ):
            for rank, (fake, real) in enumerate(zip(faked[case], reals, strict=True)):
                expected = [n for n in events(real) if n > 0]
                assert [n for n in events(fake) if n > 0] == expected, f"{case}: rank {rank}"
            # They have really trained: a new model's loss is ln 210 = 5.35.
            assert all(4 < loss < 7 for loss in losses), case
            if all(events(fake) == events(real) for fake, real in zip(faked[case], reals, strict=True)):
                left.remove(case)
            for rank, (fake, real) in enumerate(zip(faked[case], reals, strict=True)):
                if case not in left or attempt == 2:
                    assert phases(fake) == phases(real), f"{case}: rank {rank}"
                    assert fake.consumers_at_peak() == real.consumers_at_peak(), f"{case}: rank {rank}"
        if not left:
            break


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fully_shard_keeps_its_share(world: int) -> None:
    """Closed form: P/N parameters, 2 P/N states; FSDP pads rows to a multiple of N."""
    trace = trace_sharded(
        TINY["llama"], precision="fp32", zero_stage=3, world_size=world, checkpointing="full"
    )
    whole = trace_sharded(TINY["llama"], precision="fp32")
    peaks, full = trace.consumer_peaks(), whole.consumer_peaks()
    buffers = 24  # the rotary frequencies: 6 fp32 numbers, on every rank
    padding = 4 * 48 * world * len(TINY["llama"].parameters())
    assert 0 <= peaks["parameters"] * world - full["parameters"] - buffers * (world - 1) <= padding
    assert 0 <= peaks["optimizer_states"] * world - full["optimizer_states"] <= 2 * padding


def test_first_step_left_out_changes_nothing() -> None:
    recipe = Recipe(precision="bf16-master", zero_stage=3, world_size=4, checkpointing="full")
    quick = trace_sharded(TINY["llama"], recipe)
    honest = trace_sharded(TINY["llama"], recipe, warm=False)
    assert events(quick) == events(honest)
    assert phases(quick) == phases(honest)
    assert quick.consumers_at_peak() == honest.consumers_at_peak()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("hosted", [False, True])
def test_flash_with_fp32_masters(stage: int, hosted: bool) -> None:
    """The optimizer works in fp32, which the flash kernel doesn't: that must not be refused."""
    recipe = Recipe(precision="bf16" if hosted else "bf16-master", zero_stage=stage, world_size=2)
    recipe = recipe.replace(offload=["optimizer_states:cpu"]) if hosted else recipe
    config = replace(TINY["llama"], layers=1)
    flash, plain = (trace_sharded(config, recipe, attention=name) for name in ("flash", "sdpa"))
    assert flash.consumer_peaks()["parameters"] == plain.consumer_peaks()["parameters"] > 0
    assert flash.consumer_peaks()["optimizer_states"] == plain.consumer_peaks()["optimizer_states"]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("count", [1, 2, 4, 7, 16])
def test_pieces_are_torchs(rows: int, count: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    tensor = torch.arange(rows * 3).view(rows, 3)
    expected = _chunk_with_empty(tensor, count, dim=0)
    for i in range(count):
        assert torch.equal(_Chunks(tensor, count, 0)[i], expected[i])


def test_ranks_differ_where_rows_do_not_divide() -> None:
    def parameters(rank: int) -> int:
        trace = trace_sharded(
            TINY["gpt"], zero_stage=1, world_size=4, precision="fp32", sharding=Sharding(rank=rank)
        )
        return trace.consumer_peaks()["optimizer_states"]

    assert len({parameters(rank) for rank in range(4)}) > 1


def test_gathered_weights_are_temporaries() -> None:
    kept = trace_sharded(TINY["llama"], precision="bf16", zero_stage=2, world_size=4, checkpointing="full")
    freed = trace_sharded(TINY["llama"], precision="bf16", zero_stage=3, world_size=4, checkpointing="full")
    assert kept.consumer_peaks()["parameters"] == freed.consumer_peaks()["parameters"]
    assert kept.consumer_peaks()["activations"] == freed.consumer_peaks()["activations"]
    assert kept.phase_peaks()["forward"] > freed.phase_peaks()["forward"]


def test_offload_moves_bytes_to_the_host() -> None:
    recipe = Recipe(precision="bf16", zero_stage=3, world_size=4, checkpointing="full")
    here = trace_sharded(TINY["llama"], recipe)
    states = trace_sharded(TINY["llama"], recipe.replace(offload=["optimizer_states:cpu"]))
    everything = trace_sharded(TINY["llama"], recipe.replace(offload=["parameters:cpu"]))
    activations = trace_sharded(
        TINY["llama"], recipe.replace(offload=["activations:cpu"], checkpointing="none")
    )
    stay = trace_sharded(TINY["llama"], recipe.replace(checkpointing="none"))
    assert states.consumer_peaks()["optimizer_states"] == 0
    assert states.consumer_peaks()["parameters"] == here.consumer_peaks()["parameters"]
    # fp32 copy and two moments of bf16 shards: 12 bytes for each 2.
    assert states.info["host"]["peak_bytes"] >= 6 * (here.consumer_peaks()["parameters"] - 24)
    peaks = everything.consumer_peaks()
    assert peaks["gradients"] == peaks["optimizer_states"] == 0
    assert peaks["parameters"] <= 24
    assert everything.info["host"]["peak_bytes"] > 0
    assert activations.consumer_peaks()["activations"] < stay.consumer_peaks()["activations"]


def test_fp32_gradients_are_18_bytes() -> None:
    recipe = Recipe(
        precision="bf16", zero_stage=3, world_size=2, checkpointing="full", optimizer_impl="fused"
    )
    trace = trace_sharded(TINY["llama"], recipe, sharding=Sharding(fp32_gradients=True))
    end = trace.consumer_peaks()
    parameters = end["parameters"] - 24
    assert end["gradients"] == 2 * parameters
    assert 6 * parameters <= end["optimizer_states"] <= 6 * parameters + 4 * len(TINY["llama"].parameters())


def test_out_of_memory_where_the_card_ends() -> None:
    recipe = Recipe(precision="fp32", zero_stage=3, world_size=4)
    need = trace_sharded(TINY["llama"], recipe).peak_bytes
    trace_sharded(TINY["llama"], recipe, limit=need)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate .*blocks\.\d"):
        trace_sharded(TINY["llama"], recipe, limit=need - 1)
    # Enough for the first forward and backward, not for the states that the first update makes.
    larger = recipe.replace(world_size=2, zero_stage=0, sequence=4)
    first = trace_sharded(TINY["llama"], larger.replace(optimizer="sgd")).peak_bytes
    with pytest.raises(torch.OutOfMemoryError, match=r"making the states of module\.\w+\.\w+"):
        trace_sharded(TINY["llama"], larger, limit=first)
    assert not dist.is_initialized(), "nothing of the group is left after the error"


def test_everything_is_undone() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    watched = [
        (dist, "Reducer"), (dist, "Logger"), (_fsdp_param, "_chunk_with_empty"), (DeviceMesh, "__init__"),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached"), (torch.UntypedStorage, "resize_"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in watched]
    rules, hook = dict(virtual.CPU_RULES), sys.excepthook
    with pytest.raises(ZeroDivisionError), fake_process_group(8, rank=3):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        assert [getattr(owner, name) for owner, name in watched[:5]] != before[:5]
        _ = 1 / 0
    assert not dist.is_initialized()
    assert [getattr(owner, name) for owner, name in watched] == before
    assert rules == virtual.CPU_RULES
    assert hook is sys.excepthook


def test_master_weights_under_tensor_parallel() -> None:
    """The gradient of an embedding split by vocabulary comes whole: the optimizer takes its rows."""
    trace = trace_sharded(TINY["llama"], precision="bf16-master", world_size=2, tensor_parallel=2)
    parameters = trace.consumer_peaks()["parameters"] - 24
    steps = 4 * len(TINY["llama"].parameters())
    assert trace.consumer_peaks()["optimizer_states"] == 6 * parameters + steps


SPLITS: list[tuple[int, int, int, dict[str, Any]]] = [
    (2, 2, 0, {"precision": "amp-bf16"}),
    (4, 4, 0, {"precision": "bf16-master", "accumulation": 2, "set_to_none": False}),
    (8, 8, 0, {"precision": "fp32", "optimizer": "adafactor"}),
    (2, 4, 3, {"precision": "bf16", "optimizer": "adamw-8bit"}),
    (8, 16, 2, {"precision": "bf16-master"}),
]
#: Each model and each split at least once; `make stress` runs all pairs.
QUICK = {("gpt2", 0), ("gpt2", 3), ("bert-base", 1), ("llama2-7b", 2), ("llama2-70b", 0), ("llama2-70b", 4)}


@pytest.mark.parametrize(
    ("name", "split", "world", "stage", "fields"),
    [
        pytest.param(name, *split, marks=() if (name, i) in QUICK else pytest.mark.long)
        for name in ("gpt2", "bert-base", "llama2-7b", "llama2-70b")
        for i, split in enumerate(SPLITS)
    ],
)
def test_every_model_under_tensor_parallel(
    name: str, split: int, world: int, stage: int, fields: dict[str, Any]
) -> None:
    """With and without fully_shard, with each optimizer that has its own way with split weights."""
    config = replace(
        model(name), layers=1, hidden=128, heads=16, kv_heads=8 if "70b" in name else 16, head_dim=8,
        ffn=256, vocab=320, context=16,
    )  # fmt: skip
    trace = trace_sharded(config, tensor_parallel=split, world_size=world, zero_stage=stage, **fields)
    trace.validate()
    whole = trace_sharded(config, **fields)
    assert trace.peak_bytes < whole.peak_bytes
    if stage == 0:
        # norms, biases of rows, positions and types are whole on every rank
        mine, all_ = trace.consumer_peaks()["parameters"], whole.consumer_peaks()["parameters"]
        assert all_ / split < mine < all_ / split + 0.1 * all_


def test_what_cannot_be_is_refused_in_a_line() -> None:
    with pytest.raises(ValueError, match="ranks are 0 to 3"), fake_process_group(4, rank=4):
        pass
    with (
        fake_process_group(2),
        pytest.raises(RuntimeError, match="exists already"),
        fake_process_group(2),
    ):
        pass
    refused = {
        "zero_stage to 2 or 3": {"tensor_parallel": 2, "world_size": 4},
        "zero_stage to 3": {"offload": ["parameters:cpu"]},
        "optimizer_states too": {"offload": ["gradients:cpu"]},
        "GradScaler": {"tensor_parallel": 2, "world_size": 2, "precision": "amp-fp16"},
    }
    for message, fields in refused.items():
        with pytest.raises(RecipeError, match=message):
            trace_sharded(TINY["gpt"], **{"precision": "bf16", **fields})


def test_users_own_code_runs_in_the_group() -> None:
    """fully_shard by hand, under a virtual card; shapes are those of rank 1 of 3."""
    from torch.distributed.fsdp import fully_shard

    with fake_process_group(3, rank=1), virtual.VirtualGPU() as card:
        model = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 4))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        assert tuple(model[0].weight.to_local().shape) == (3, 10)
        model(torch.randn(5, 10)).sum().backward()
        assert tuple(model[1].weight.grad.to_local().shape) == (2, 7)
    assert card.trace.peak_bytes > 0


def test_ways_are_judged_by_the_cards_allocator() -> None:
    from benchmarks.sharded import WAYS, judge
    from memlab import hardware

    card = hardware.gpu("A100-80GB")
    pure, lora = WAYS[3], next(way for way in WAYS if "LoRA" in way.name)
    rows = {way.name: judge(way, TINY["llama"], card) for way in (pure, lora)}
    assert all(row["fits"] == "yes" for row in rows.values())
    need, frozen = rows[pure.name]["consumers_at_peak"], rows[lora.name]["consumers_at_peak"]
    assert frozen["optimizer_states"] < need["optimizer_states"] < need["temporaries"]
    small = replace(card, memory_bytes=rows[pure.name]["reserved_bytes"] // 2)
    assert judge(pure, TINY["llama"], small)["fits"] == "no"


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_thousand_ranks_in_a_process_of_little_memory() -> None:
    """Setting up 1024 ranks must not cost 1024 times what one does: the resident memory says so."""
    program = (
        "import json; from dataclasses import replace; from pathlib import Path; from memlab import models;"
        "from memlab.sharded import trace_sharded; c = replace(models.model('llama2-70b'), layers=8);"
        "t = trace_sharded(c, precision='bf16', zero_stage=3, world_size=1024, checkpointing='full',"
        " sequence=256, optimizer_impl='fused');"
        "print(json.dumps([c.parameter_count, t.peak_bytes, t.consumer_peaks()['parameters'],"
        # ru_maxrss would be that of whoever started this process: Linux hands it on
        " int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    count, peak, parameters, resident = json.loads(done.stdout)
    assert 0 <= parameters - count * 2 // 1024 < 2**20  # a share, and the padding of the norms
    assert parameters < peak < 2**34
    assert resident < 500 * 1024, "KiB"
