"""Exports: the script really shards; each configuration passes its engine's own parser, and our check."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from memlab import engines, models
from memlab.engines import EngineError, check, export
from memlab.recipe import Recipe

#: Another Python that has the engines, where this one doesn't: MEMLAB_ENGINES_PYTHON=/path/to/bin/python.
ENGINES_PYTHON = os.environ.get("MEMLAB_ENGINES_PYTHON")

TINY = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "vocab_size": 210, "max_position_embeddings": 32,
}  # fmt: skip
FSDP = Recipe(precision="bf16-master", zero_stage=3, world_size=8, accumulation=4, optimizer_impl="fused")
HOSTED = FSDP.replace(precision="bf16", offload=("optimizer_states:cpu", "gradients:cpu"))
ALL_AWAY = FSDP.replace(offload=("parameters:cpu", "gradients:cpu", "optimizer_states:cpu"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


# PyTorch's own


def launch(folder, tiny, recipe):
    """Each rank's report of two steps in as many gloo processes as the recipe has ranks."""
    made = export("fsdp2", str(tiny), recipe)
    (script,) = made.write(folder)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(recipe.world_size), str(script)],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "STEPS": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    decoder, text, ranks = json.JSONDecoder(), done.stdout.strip(), []
    while text:  # two ranks may share a line
        report, end = decoder.raw_decode(text)
        ranks.append(report)
        text = text[end:].strip()
    return sorted(ranks, key=lambda report: report["rank"])


@pytest.mark.parametrize(
    ("recipe", "shards"),
    [
        (FSDP.replace(world_size=2, checkpointing="full", accumulation=2), True),
        pytest.param(
            HOSTED.replace(world_size=2, zero_stage=2, accumulation=1), True, marks=pytest.mark.long
        ),
        (Recipe(world_size=2, accumulation=2, micro_batch=2), False),  # DDP: the twin that must not shard
    ],
    ids=["ZeRO-3", "states on the host", "DDP"],
)
def test_the_script_shards(tmp_path, tiny, recipe, shards):
    whole = models.model(str(tiny)).parameter_count
    ranks = launch(tmp_path, tiny, recipe)
    assert [report["rank"] for report in ranks] == [0, 1]
    for report in ranks:
        assert report["parameters"] == whole
        assert report["mine"] == (whole // 2 if shards else whole)
        assert 0 < report["loss"] < 10


def test_torchrun_line():
    assert (
        export("fsdp2", "llama2-7b", FSDP).command
        == "torchrun --standalone --nproc-per-node 8 train_fsdp2.py"
    )
    two = export("fsdp2", "llama2-7b", FSDP.replace(world_size=16)).command
    assert "--nnodes 2 --nproc-per-node 8" in two and "--rdzv-endpoint" in two


@pytest.mark.parametrize(
    ("model", "recipe", "words"),
    [
        ("llama2-7b", FSDP, ["fully_shard(part", "reshard_after_forward=True", "MixedPrecisionPolicy"]),
        ("llama2-7b", FSDP.replace(zero_stage=2), ["reshard_after_forward=False"]),
        ("llama2-7b", FSDP.replace(tensor_parallel=2), ["parallelize_module", "loss_parallel()"]),
        ("llama2-7b", ALL_AWAY, ["CPUOffloadPolicy(pin_memory=cuda)", 'to_empty(device="cpu")']),
        ("llama2-7b", HOSTED, ["class HostAdamW", "register_post_accumulate_grad_hook"]),
        ("gpt2", Recipe(precision="amp-fp16"), ["GradScaler", "torch.float16"]),
        (
            "gpt2",
            Recipe(zero_stage=1, world_size=2),
            ["ZeroRedundancyOptimizer", "require_backward_grad_sync"],
        ),
        ("gpt2", Recipe(optimizer="adamw-8bit"), ["from torchao.optim import AdamW8bit"]),
        ("gpt2", Recipe(offload=("activations:cpu",)), ["save_on_cpu"]),
        ("resnet50", Recipe(world_size=2, zero_stage=3, precision="bf16", micro_batch=2), ["net.stages"]),
    ],
)
def test_scripts_are_python_and_hold_what_is_needed(model, recipe, words):
    made = export("fsdp2", model, recipe)
    text = made.files["train_fsdp2.py"]
    compile(text, "train_fsdp2.py", "exec")
    for word in words:
        assert word in text
    if recipe.zero_stage < 2:
        assert "fully_shard" not in text.split('"""', 2)[2]


# the engines' own parsers


def parsed(engine, code, *words):
    """Run `code` where the engine is installed; skips aloud where it isn't."""
    python = sys.executable if importlib.util.find_spec(engine) else ENGINES_PYTHON
    if python is None:
        pytest.skip(f"{engine} isn't installed: pip install 'memlab[engines]', or set MEMLAB_ENGINES_PYTHON")
    done = subprocess.run(
        [python, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=240,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if "triton" in done.stderr and done.returncode:
        pytest.skip(f"{engine} needs triton, which isn't installed")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


ACCELERATE = """
import json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
config = load_config_from_file(sys.argv[1])
os.environ["ACCELERATE_USE_FSDP"] = "true"
for key, value in config.fsdp_config.items():
    name = key.upper().replace("LAYER_CLS", "CLS")  # as `accelerate launch` names it
    os.environ[name] = str(value).lower() if isinstance(value, bool) else str(value)
from accelerate.utils import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
print(json.dumps({"processes": config.num_processes, "mixed": config.mixed_precision,
    "version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward,
    "checkpointing": plugin.activation_checkpointing, "offload": type(plugin.cpu_offload).__name__,
    "layers": plugin.transformer_cls_names_to_wrap, "type": str(config.distributed_type)}))
"""


@pytest.mark.parametrize("recipe", [FSDP, FSDP.replace(zero_stage=2, checkpointing="full"), ALL_AWAY])
def test_accelerate_reads_it(tmp_path, recipe):
    (path,) = export("accelerate", "llama2-7b", recipe).write(tmp_path)
    read = parsed("accelerate", ACCELERATE, path)
    assert read["processes"] == 8 and read["mixed"] == "bf16" and read["version"] == 2
    assert read["type"] == "DistributedType.FSDP" and read["layers"] == ["LlamaDecoderLayer"]
    assert read["reshard"] is (recipe.zero_stage == 3)
    assert read["checkpointing"] is (recipe.checkpointing == "full")
    assert read["offload"] == ("CPUOffloadPolicy" if recipe.offload else "OffloadPolicy")


DEEPSPEED = """
import json, sys
import deepspeed.runtime.config as c
c.dist.get_rank = lambda *a, **k: 0
c.dist.get_world_size = lambda *a, **k: int(sys.argv[2])
config = c.DeepSpeedConfig(sys.argv[1])
zero = config.zero_config
device = lambda part: getattr(part.device, "value", part.device)
print()
print(json.dumps({"batch": config.train_batch_size, "micro": config.train_micro_batch_size_per_gpu,
    "turns": config.gradient_accumulation_steps, "stage": int(zero.stage),
    "optimizer": device(zero.offload_optimizer) if zero.offload_optimizer else None,
    "parameters": device(zero.offload_param) if zero.offload_param else None,
    "bf16": config.bfloat16_config.enabled}))
"""


@pytest.mark.parametrize(
    "recipe",
    [
        FSDP,
        HOSTED,
        FSDP.replace(precision="bf16", zero_stage=2),
        Recipe(precision="amp-bf16", zero_stage=1, world_size=8),
        FSDP.replace(offload=("parameters:nvme", "gradients:cpu", "optimizer_states:nvme")),
    ],
)
def test_deepspeed_reads_it(tmp_path, recipe):
    (path,) = export("deepspeed", "llama2-7b", recipe).write(tmp_path)
    read = parsed("deepspeed", DEEPSPEED, path, recipe.data_parallel)
    assert read["batch"] == recipe.micro_batch * recipe.accumulation * 8
    assert (read["micro"], read["turns"]) == (recipe.micro_batch, recipe.accumulation)
    assert read["stage"] == recipe.zero_stage
    assert read["optimizer"] == recipe.offloaded("optimizer_states")
    assert read["parameters"] == recipe.offloaded("parameters")
    assert read["bf16"] is (not recipe.autocast)


TORCHTITAN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
config = ConfigManager().parse_args(["--module", "memlab_plan", "--config", "plan"])
p, t = config.parallelism, config.training
dims = ParallelDims(dp_replicate=p.data_parallel_replicate_degree, cp=1,
                    dp_shard=p.data_parallel_shard_degree, tp=p.tensor_parallel_degree, pp=1, ep=1,
                    world_size=int(sys.argv[2]))
print(json.dumps({"shard": dims.dp_shard, "tensor": dims.tp, "micro": t.local_batch_size,
    "batch": t.global_batch_size, "tokens": t.seq_len, "dtype": t.dtype, "offload": t.enable_cpu_offload,
    "reshard": p.fsdp_reshard_after_forward, "ac": type(config.activation_checkpoint).__qualname__}))
"""


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        (FSDP.replace(checkpointing="full", sequence=4096), "FullAC.Config"),
        (FSDP.replace(checkpointing="selective", tensor_parallel=2, zero_stage=2), "SelectiveAC.Config"),
        (ALL_AWAY, "NoneType"),
    ],
)
def test_torchtitan_reads_it(tmp_path, recipe, kind):
    (path,) = export("torchtitan", "llama3-8b", recipe).write(tmp_path)
    compile(path.read_text(), str(path), "exec")
    read = parsed("torchtitan", TORCHTITAN, tmp_path, 8)
    assert (read["shard"], read["tensor"]) == (recipe.data_parallel, recipe.tensor_parallel)
    assert read["batch"] == recipe.micro_batch * recipe.accumulation * recipe.data_parallel
    assert read["tokens"] == (recipe.sequence or 8192) and read["dtype"] == "float32"
    assert read["reshard"] == ("never" if recipe.zero_stage == 2 else "always")
    assert read["offload"] is (recipe.offloaded("parameters") is not None) and read["ac"] == kind


# what the parsers let through


def accelerate(**changes):
    import re

    text = export("accelerate", "llama2-7b", FSDP).files["accelerate.yaml"]
    values, fsdp = {}, {}
    words = {"true": True, "false": False}
    for key, value in re.findall(r"^ *(\w+): (.+)$", text, re.M):
        value = words.get(value, int(value) if value.isdigit() else value.strip("'"))
        (fsdp if key.startswith("fsdp_") else values)[key] = value
    values["fsdp_config"] = fsdp
    for key, value in changes.items():
        (fsdp if key.startswith("fsdp_") else values)[key] = value
    return values


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fsdp_wibble": 1}, "unknown key 'fsdp_wibble'"),
        ({"fsdp_reshard_after_forward": "maybe"}, "fsdp_reshard_after_forward must be a bool"),
        ({"fsdp_version": 3}, "fsdp_version must be 1 or 2"),
        ({"fsdp_state_dict_type": "WIBBLE"}, "fsdp_state_dict_type must be one of"),
        ({"mixed_precision": "fp12"}, "mixed_precision 'fp12'"),
        ({"num_processes": "eight"}, "num_processes must be a whole number"),
        ({"use_cpu": True}, "doesn't shard"),
        ({"fsdp_transformer_layer_cls_to_wrap": ""}, "may wrap the whole model"),
        ({"distributed_type": "MULTI_GPU"}, "fsdp_config does nothing"),
    ],
)
def test_traps_of_accelerate(changes, said):
    check("accelerate", accelerate())
    with pytest.raises(EngineError, match=said):
        check("accelerate", accelerate(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
        ({"train_batch_size": 31}, "isn't 1 per GPU x 4 x 8 GPUs"),
        ({"fp16": {"enabled": True}}, "choose one"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "below stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "needs an nvme_path"),
    ],
)
def test_traps_of_deepspeed(changes, said):
    values = json.loads(export("deepspeed", "llama2-7b", FSDP).files["deepspeed.json"])
    check("deepspeed", values, world_size=8)
    with pytest.raises(EngineError, match=said):
        check("deepspeed", values | changes, world_size=8)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tensor_parallel_degree": 0}, "must be a whole number from 1"),
        ({"tensor_parallel_degree": -5}, "must be a whole number from 1"),
        ({"data_parallel_shard_degree": 4}, "multiply to 4, and there are 8"),
        ({"data_parallel_shard_degree": -1, "tensor_parallel_degree": 3}, "don't divide 8"),
    ],
)
def test_traps_of_torchtitan(degrees, said):
    check("torchtitan", {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2}, world_size=8)
    with pytest.raises(EngineError, match=said):
        check("torchtitan", degrees, world_size=8)


# what an engine can't do


@pytest.mark.parametrize(
    ("engine", "model", "recipe", "said"),
    [
        ("fsdp2", "gpt2", FSDP.replace(offload=("optimizer_states:nvme",)), "NVMe"),
        ("fsdp2", "gpt2", Recipe(zero_stage=3, world_size=8), "bf16-master in place of amp"),
        ("fsdp2", "gpt2", FSDP.replace(world_size=12), "whole machines"),
        ("accelerate", "gpt2", HOSTED, "together"),
        ("accelerate", "gpt2", FSDP.replace(checkpointing="every-2"), "every layer or none"),
        ("accelerate", "gpt2", FSDP.replace(tensor_parallel=2), "tp_plan"),
        ("accelerate", "resnet50", Recipe(zero_stage=3, world_size=2, precision="bf16"), "convnet"),
        ("deepspeed", "gpt2", FSDP.replace(tensor_parallel=2), "AutoTP"),
        ("deepspeed", "gpt2", FSDP.replace(optimizer="adamw-8bit", optimizer_impl=""), "adamw-8bit"),
        ("deepspeed", "gpt2", FSDP.replace(offload=("activations:cpu",)), "checkpoint function"),
        ("torchtitan", "llama2-70b", FSDP, "has no llama2-70b"),
        ("torchtitan", "llama3-8b", HOSTED, "all or none"),
        ("torchtitan", "llama3-8b", Recipe(lora_rank=8), "peft"),
    ],
)
def test_what_an_engine_cannot_do_is_one_line(engine, model, recipe, said):
    with pytest.raises(EngineError) as caught:
        export(engine, model, recipe)
    message = str(caught.value)
    assert said in message and "\n" not in message
    assert message.startswith(engine) or "machines" in message


def test_unknown_engine_and_a_config_by_another_name():
    with pytest.raises(ValueError, match="unknown engine 'megatron'"):
        export("megatron", "gpt2", FSDP)
    config = replace(models.model("qwen2.5-7b"), name="Qwen2.5-7B-Instruct")
    assert "Qwen2DecoderLayer" in export("accelerate", config, FSDP).files["accelerate.yaml"]
    assert engines.ENGINES == ("fsdp2", "accelerate", "deepspeed", "torchtitan")
