"""A recipe as configuration for the engines people train with. No torch.

    export("deepspeed", "llama2-7b", recipe).write("out/")

* `fsdp2`: a script of PyTorch's own fully_shard, DDP and tensor parallel, with its torchrun line. It runs as
  written, on gloo too.
* `accelerate`: an FSDP (version 2) config for `accelerate launch`.
* `deepspeed`: the JSON of `deepspeed.initialize`.
* `torchtitan`: a Python module with a config function, for `--module` and `--config`.

What an engine can't do is refused in one line (`EngineError`), never approximated. `check` finds what the
engines' own parsers let through: unknown keys, values that mean nothing, degrees of -5, a launch that doesn't
shard. Written for accelerate 1.15, deepspeed 0.19, torchtitan 0.3 and torch 2.11 and later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlab import models
from memlab.files import write_whole
from memlab.models import ConvConfig, TransformerConfig
from memlab.recipe import Recipe
from memlab.units import unknown_name

__all__ = ["ENGINES", "EngineError", "Export", "check", "export"]

ENGINES = ("fsdp2", "accelerate", "deepspeed", "torchtitan")


class EngineError(ValueError):
    """What an engine can't do, or a configuration that means something else than it says."""


@dataclass(frozen=True)
class Export:
    """Files by name, the command that uses them, and what they don't say."""

    engine: str
    files: Mapping[str, str]
    command: str
    notes: tuple[str, ...] = ()

    def write(self, folder: str | Path) -> list[Path]:
        """Write the files into `folder`, which is made if need be; returns their paths."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, text in self.files.items():
            path = folder / name
            write_whole(path, text)
            written.append(path)
        return written


def export(
    engine: str,
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe,
    *,
    gpus_per_node: int = 8,
    source: str | None = None,
) -> Export:
    """`recipe` for `model` as `engine` wants it.

    gpus_per_node: GPUs of one machine, for the launch lines. source: what a script should name the model by
    (a config.json's path); default: its name.
    Raises UnknownNameError for an engine that isn't known, EngineError for what it can't do.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    config = models.model(model) if isinstance(model, str) else model
    if source is None:
        source = model if isinstance(model, str) else config.name
    recipe = recipe.resolve(config)
    if recipe.world_size > gpus_per_node and recipe.world_size % gpus_per_node:
        raise EngineError(
            f"{recipe.world_size} GPUs aren't whole machines of {gpus_per_node}: set gpus_per_node"
        )
    if getattr(recipe, "lora_rank", None):
        raise EngineError(
            f"{engine}: adapters (LoRA) are the model's, not the engine's: wrap it with peft first"
        )
    write: dict[str, Callable[[Any, Recipe, int, str], Export]] = {
        "fsdp2": _fsdp2, "accelerate": _accelerate, "deepspeed": _deepspeed, "torchtitan": _torchtitan,
    }  # fmt: skip
    return write[engine](config, recipe, gpus_per_node, source)


def _nodes(recipe: Recipe, each: int) -> tuple[int, int]:
    """(machines, GPUs of one)."""
    return (1, recipe.world_size) if recipe.world_size <= each else (recipe.world_size // each, each)


def _torchrun(recipe: Recipe, each: int, script: str) -> str:
    nodes, gpus = _nodes(recipe, each)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {gpus} {script}"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {gpus} --rdzv-backend c10d "
        f"--rdzv-endpoint $HEAD:29500 {script}  # on each machine"
    )


def _hosted(recipe: Recipe) -> bool:
    """Optimizer states on the host, weights not."""
    return recipe.offloaded("optimizer_states") is not None and recipe.offloaded("parameters") is None


# -- PyTorch -----------------------------------------------------------------------------------------------

_SPLIT = '''

def split(net, mesh):
    """Tensor parallel, as Megatron-LM splits a transformer: columns, then rows; the vocabulary."""
    plan = {}
    for name, module in net.named_modules():
        last = name.rpartition(".")[2]
        if name == "embed.token":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif name == "head":
            plan[name] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        elif isinstance(module, torch.nn.Linear) and last in ("qkv", "query", "key", "value", "up", "gate"):
            plan[name] = ColwiseParallel()
        elif isinstance(module, torch.nn.Linear) and last in ("out", "down"):
            plan[name] = RowwiseParallel()
    parallelize_module(net, mesh, plan)
    if getattr(net.config, "tied", False):
        net.get_submodule("head").weight = net.get_parameter("embed.token.weight")
'''

_HOST_OPTIMIZER = '''

class HostAdamW:
    """AdamW on fp32 masters in host memory, stepped by the CPU. Gradients go there{early}."""

    def __init__(self, parameters, **options):
        self.parameters = list(parameters)
        self.masters = {{p: self.copy(local(p).detach()) for p in self.parameters}}
        self.inner = torch.optim.AdamW(list(self.masters.values()), fused=True, **options)
{hooks}
    @staticmethod
    def copy(tensor):
        host = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        return host.copy_(tensor)

    def collect(self, p):
        grad, master = self.copy(local(p.grad)), self.masters[p]
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            if p.grad is not None:
                self.collect(p)
        self.inner.step()
        for p, master in self.masters.items():
            local(p).copy_(master)
'''

_EARLY = """        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.collect)
"""


def _fsdp2(config: Any, r: Recipe, each: int, source: str) -> Export:
    """A script of at most 150 lines; only what this recipe needs is in it."""
    fully = r.zero_stage >= 2
    offload = r.offloaded("parameters")
    _refuse_fsdp2(r, fully)
    transformer = isinstance(config, TransformerConfig)
    # fully_shard keeps fp32 shards and casts as it gathers: they are the masters.
    stored = "fp32" if r.master_dtype else r.precision
    attention = "sdpa" if r.attention == "flash" else r.attention
    shape = {
        "precision": stored, "attention": attention, "dropout": r.dropout, "checkpointing": r.checkpointing,
        "sequence": r.sequence, "image": r.image, "micro_batch": r.micro_batch,
    }  # fmt: skip
    plain = Recipe()
    kept = ", ".join(f"{k}={v!r}" for k, v in shape.items() if v != getattr(plain, k))
    command = _torchrun(r, each, "train_fsdp2.py")

    imports = ["import json", "import os", "from dataclasses import replace"] if transformer else [
        "import json", "import os"
    ]  # fmt: skip
    torch_imports = ["import torch", "import torch.distributed as dist"]
    torch_imports.append("from torch.distributed.device_mesh import init_device_mesh")
    if fully:
        policies = ["CPUOffloadPolicy"] * bool(offload) + ["MixedPrecisionPolicy"] * bool(r.master_dtype)
        torch_imports.append(f"from torch.distributed.fsdp import {', '.join([*policies, 'fully_shard'])}")
    if r.zero_stage == 1:
        torch_imports.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if r.tensor_parallel > 1:
        torch_imports += [
            "from torch.distributed.tensor import Replicate, Shard",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel,"
            " parallelize_module",
        ]
    if r.optimizer == "adamw-8bit":
        torch_imports.append("from torchao.optim import AdamW8bit")

    out = [f'"""{config.name}, {r.world_size} GPUs. {command}', "", *r.describe().splitlines(), '"""', ""]
    out += [
        *imports,
        "",
        *torch_imports,
        "",
        "from memlab.models import model",
        "from memlab.nets import build",
    ]
    out += ["from memlab.recipe import Recipe", ""]
    out += [
        f"MODEL = {source!r}",
        f"SHAPE = Recipe({kept})  # what shapes the module",
        f"DATA_PARALLEL, TENSOR_PARALLEL = {r.data_parallel}, {r.tensor_parallel}",
        f"MICRO_BATCH, ACCUMULATION = {r.micro_batch}, {r.accumulation}",
        'STEPS = int(os.environ.get("STEPS", "10"))',
        "",
        "",
        "def local(tensor):",
        '    """This rank\'s part of a DTensor; a plain tensor as it is."""',
        '    return tensor.to_local() if hasattr(tensor, "to_local") else tensor',
        "",
        "",
        "def batches(config, device):",
        '    """Random ones: put your data loader here, a part of its own for each data-parallel rank."""',
        "    while True:",
    ]
    if transformer:
        out += [
            f"        tokens = torch.randint(config.vocab, (MICRO_BATCH, {r.sequence}), device=device)",
            "        yield tokens, " + (
                "torch.randint(config.hidden, (MICRO_BATCH,), device=device)" if config.family == "bert"
                else "tokens.roll(-1, 1)"
            ),
        ]  # fmt: skip
    else:
        dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[Recipe(precision=stored).parameter_dtype]
        size = f"(MICRO_BATCH, {config.channels}, {r.image}, {r.image})"
        out += [
            f"        images = torch.randn({size}, dtype={dtype}, device=device)",
            f"        yield images, torch.randint({config.classes}, (MICRO_BATCH,), device=device)",
        ]
    out += [
        "",
        "",
        "def initialise(net, config):",
        '    """Weights from nothing, made shard by shard: load your checkpoint here instead."""',
        "    for module in net.modules():",
        '        if hasattr(module, "reset_parameters"):',
        "            module.reset_parameters()",
        "        else:",
        "            for weight in module.parameters(recurse=False):",
        "                torch.nn.init.ones_(weight)  # norms",
    ]
    if transformer:
        out += [
            '    small = build(replace(config, layers=1, vocab=64), SHAPE, "cpu")  # has the same buffers',
            "    for name, buffer in net.named_buffers():",
            "        buffer.copy_(small.get_buffer(name))",
        ]
    text = "\n".join(out)
    if r.tensor_parallel > 1:
        text += "\n" + _SPLIT.rstrip("\n")
    if _hosted(r):
        early = r.offloaded("gradients") is not None
        text += "\n" + _HOST_OPTIMIZER.format(
            hooks=_EARLY if early else "", early=" once reduced" if early else " at the step"
        ).rstrip("\n")
    text += "\n\n\n" + "\n".join(_main(config, r)) + "\n"
    notes = ["batches() and initialise() are where your data and checkpoint go"]
    if r.master_dtype and fully:
        notes.append(
            "reduce_dtype=torch.float32 sums gradients more exactly, for twice one block's gradients"
        )
    return Export("fsdp2", {"train_fsdp2.py": text}, command, tuple(notes))


def _refuse_fsdp2(r: Recipe, fully: bool) -> None:
    if "nvme" in {item.partition(":")[2] for item in r.offload}:
        raise EngineError("fsdp2: PyTorch doesn't offload to NVMe: use deepspeed")
    if r.offloaded("parameters") and not (r.offloaded("gradients") and r.offloaded("optimizer_states")):
        raise EngineError(
            "fsdp2: CPUOffloadPolicy moves parameters, gradients and optimizer states together: name all"
        )
    if r.offloaded("parameters") and not fully:
        raise EngineError("fsdp2: CPUOffloadPolicy belongs to fully_shard: set zero_stage to 3")
    if r.offloaded("gradients") and not r.offloaded("optimizer_states"):
        raise EngineError(
            "fsdp2: gradients go to the host with the optimizer only: offload optimizer_states too"
        )
    if r.master_dtype and not fully:
        raise EngineError(
            "fsdp2: bf16 weights with fp32 masters are fully_shard's (zero_stage 2 or 3): use amp-bf16"
        )
    if fully and r.autocast:
        raise EngineError(
            "fsdp2: fully_shard casts by its own policy: use precision bf16-master in place of amp"
        )
    if _hosted(r) and r.optimizer != "adamw":
        raise EngineError(f"fsdp2: the script's host optimizer is AdamW, not {r.optimizer}")
    if _hosted(r) and r.grad_scaler:
        raise EngineError("fsdp2: a loss scale looks at gradients that are on the host: use bf16")
    if r.optimizer == "adafactor" and (fully or r.tensor_parallel > 1):
        raise EngineError("fsdp2: torch's Adafactor doesn't work on sharded tensors: use adamw")
    if r.zero_stage == 1 and r.optimizer == "adamw-8bit":
        raise EngineError(
            "fsdp2: ZeroRedundancyOptimizer doesn't take 8-bit states: set zero_stage to 2 or 3"
        )
    if r.tensor_parallel > 1 and r.data_parallel > 1 and not fully:
        raise EngineError(
            "fsdp2: PyTorch combines tensor parallel with fully_shard only: set zero_stage to 2 or 3"
        )


def _main(config: Any, r: Recipe) -> list[str]:
    fully, offload = r.zero_stage >= 2, r.offloaded("parameters")
    alone, where = r.data_parallel == 1, '"cpu"' if offload else "device"
    body = [
        "def main():",
        "    cuda = torch.cuda.is_available()",
        '    dist.init_process_group("nccl" if cuda else "gloo")',
        f"    if dist.get_world_size() != {r.world_size}:",
        f'        raise SystemExit(f"start {r.world_size} processes, not {{dist.get_world_size()}}")',
        '    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")',
        "    if cuda:",
        "        torch.cuda.set_device(device)",
        '    names = ("data", "tensor")',
        "    mesh = init_device_mesh(device.type, (DATA_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=names)",
        "    torch.manual_seed(0)",
        "    config = model(MODEL)",
        '    net = build(config, SHAPE, "meta")',
    ]
    if r.tensor_parallel > 1:
        body.append('    split(net, mesh["tensor"])')
    if fully:
        options = ['mesh=mesh["data"]', f"reshard_after_forward={r.zero_stage == 3}"]
        if r.master_dtype:
            options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
        if offload:
            options.append("offload_policy=CPUOffloadPolicy(pin_memory=cuda)")
        blocks = (
            "net.blocks" if isinstance(config, TransformerConfig)
            else "[block for stage in net.stages for block in stage]"
        )  # fmt: skip
        body += [
            f"    for part in (*{blocks}, net):",
            f"        fully_shard(part, {', '.join(options)})",
        ]
    body += [
        f"    net.to_empty(device={where})",
        "    with torch.no_grad():",
        "        initialise(net, config)",
        "    trained = net",
    ]
    if offload:
        body[-1:-1] = [
            "    for part in net.modules():  # shards stay on the host, buffers don't",
            "        for name, buffer in part.named_buffers(recurse=False):",
            "            part.register_buffer(name, buffer.to(device))",
        ]
    if not fully and not alone:
        body += [
            "    devices = [device] if cuda else None",
            "    trained = torch.nn.parallel.DistributedDataParallel(net, device_ids=devices)",
        ]
    body += _optimizer(r)
    if r.grad_scaler:
        body.append("    scaler = torch.amp.GradScaler(device.type)")
    body += [
        "    torch.manual_seed(1 + mesh.get_local_rank(0))",
        "    data = batches(config, device)",
        "    if cuda:",
        "        torch.cuda.reset_peak_memory_stats()",
        "    for _ in range(STEPS):",
        "        optimizer.zero_grad(set_to_none=True)",
        "        for turn in range(ACCUMULATION):",
        "            inputs, targets = next(data)",
    ]
    if not fully and not alone:
        body.append(
            "            trained.require_backward_grad_sync = turn == ACCUMULATION - 1  # all-reduce once"
        )
    around = []
    if r.autocast:
        around.append(
            f"torch.autocast(device.type, torch.{'bfloat16' if r.compute_dtype == 'bf16' else 'float16'})"
        )
    if r.offloaded("activations"):
        around.append("torch.autograd.graph.save_on_cpu(pin_memory=cuda)")
    whole = ["loss_parallel()"] if r.tensor_parallel > 1 else []
    indent = " " * 12
    if whole:
        body.append(f"{indent}with {whole[0]}:")
        indent += "    "
    inner = indent
    if around:
        body.append(f"{indent}with {', '.join(around)}:")
        inner += "    "
    body.append(f"{inner}loss = net.loss(trained(inputs), targets) / ACCUMULATION")
    backward = "scaler.scale(loss).backward()" if r.grad_scaler else "loss.backward()"
    body.append(f"{indent}{backward}")
    body += ["        scaler.step(optimizer)", "        scaler.update()"] if r.grad_scaler else [
        "        optimizer.step()"
    ]  # fmt: skip
    body += [
        "    peak = torch.cuda.max_memory_allocated() if cuda else None",
        "    mine = sum(local(p).numel() for p in net.parameters())",
        '    print(json.dumps({"rank": dist.get_rank(), "loss": float(local(loss)) * ACCUMULATION,',
        '                      "parameters": sum(p.numel() for p in net.parameters()), "mine": mine,',
        '                      "peak_bytes": peak}))',
        "    dist.destroy_process_group()",
        "",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return body


_CLASSES = {"sgd": "SGD", "momentum": "SGD", "adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor"}


def _optimizer(r: Recipe) -> list[str]:
    parameters = "net.parameters()"
    lines = []
    if r.tensor_parallel > 1 and r.optimizer_impl != "for-loop" and not _hosted(r):
        lines = [
            "    meshes = {}  # operators on lists of tensors take one mesh at a time",
            "    for p in net.parameters():",
            '        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)',
        ]
        parameters = '[{"params": group} for group in meshes.values()]'
    options = "lr=1e-4" + (", momentum=0.9" if r.optimizer == "momentum" else "")
    if r.optimizer == "adamw-8bit":
        return [*lines, f"    optimizer = AdamW8bit({parameters}, {options})"]
    if _hosted(r):
        return [f"    optimizer = HostAdamW(net.parameters(), {options})"]
    impl = {"foreach": ", foreach=True", "fused": ", fused=True", "for-loop": ", foreach=False"}[
        r.optimizer_impl
    ]
    name = f"torch.optim.{_CLASSES[r.optimizer]}"
    if r.zero_stage == 1:
        return [
            "    optimizer = ZeroRedundancyOptimizer(",
            f"        {parameters}, optimizer_class={name}, {options}{impl}",
            "    )",
        ]
    return [*lines, f"    optimizer = {name}({parameters}, {options}{impl})"]


# -- Accelerate ---------------------------------------------------------------------------------------------

_LAYERS = {"gpt2": "GPT2Block", "bert": "BertLayer", "llama": "LlamaDecoderLayer"}


def _layer_class(config: TransformerConfig) -> str:
    """The block's class in `transformers`."""
    for start, name in (("mistral", "MistralDecoderLayer"), ("qwen2", "Qwen2DecoderLayer")):
        if config.name.lower().startswith(start):
            return name
    return _LAYERS[config.family]


def _accelerate(config: Any, r: Recipe, each: int, source: str) -> Export:
    if not isinstance(config, TransformerConfig):
        raise EngineError(
            "accelerate: this config wraps transformer layers by class, and the model is a convnet"
        )
    if r.tensor_parallel > 1:
        raise EngineError(
            "accelerate: tensor parallel needs the model's own tp_plan: use fsdp2 or torchtitan"
        )
    if r.zero_stage == 1:
        raise EngineError("accelerate: FSDP has no ZeRO-1: set zero_stage to 2, or use deepspeed")
    if r.checkpointing not in ("none", "full"):
        raise EngineError(
            f"accelerate: checkpoints every layer or none, not {r.checkpointing}: set checkpointing to full"
        )
    if r.offload and not (r.offloaded("parameters") and r.offloaded("optimizer_states")):
        raise EngineError(
            "accelerate: fsdp_offload_params moves parameters, gradients and optimizer states together, and "
            "nothing else: use deepspeed"
        )
    if "nvme" in {item.partition(":")[2] for item in r.offload}:
        raise EngineError("accelerate: FSDP doesn't offload to NVMe: use deepspeed")
    if r.offloaded("activations"):
        raise EngineError("accelerate: has no switch to offload activations: use fsdp2")
    if r.master_dtype and r.zero_stage == 0:
        raise EngineError("accelerate: bf16 weights with fp32 masters need FSDP or DeepSpeed: use amp-bf16")
    nodes, _ = _nodes(r, each)
    mixed = "bf16" if r.precision in ("amp-bf16", "bf16-master") else "fp16" if r.grad_scaler else "no"
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if r.zero_stage else "MULTI_GPU" if r.world_size > 1 else "NO",
        "mixed_precision": mixed,
        "num_machines": nodes,
        "num_processes": r.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }
    if r.zero_stage:
        values["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": r.zero_stage == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": _layer_class(config),
            "fsdp_activation_checkpointing": r.checkpointing == "full",
            "fsdp_offload_params": r.offloaded("parameters") is not None,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
        }
    check("accelerate", values)
    notes = [
        f"in your script: Accelerator(gradient_accumulation_steps={r.accumulation}), "
        f"batch size {r.micro_batch}, "
        f"{_optimizer_words(r)}",
        "without GPUs `accelerate launch` starts the processes and doesn't shard: test with torchrun",
    ]
    if r.precision == "bf16":
        notes.append("pure bf16: load the model with dtype=torch.bfloat16")
    if r.checkpointing == "full" and not r.zero_stage:
        notes.append("call model.gradient_checkpointing_enable()")
    if nodes > 1:
        notes.append("set machine_rank, main_process_ip and main_process_port on each machine")
    return Export(
        "accelerate", {"accelerate.yaml": _yaml(values)},
        "accelerate launch --config_file accelerate.yaml YOUR_SCRIPT.py", tuple(notes),
    )  # fmt: skip


def _optimizer_words(r: Recipe) -> str:
    if r.optimizer == "adamw-8bit":
        return "torchao.optim.AdamW8bit"
    flag = {"foreach": "foreach=True", "fused": "fused=True", "for-loop": "foreach=False"}[r.optimizer_impl]
    return f"torch.optim.{_CLASSES[r.optimizer]}({flag})"


def _yaml(values: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings of words, numbers and booleans."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            shown = (
                str(value).lower()
                if isinstance(value, bool)
                else f"'{value}'"
                if value in ("no", "NO")
                else value
            )
            lines.append(f"{indent}{key}: {shown}\n")
    return "".join(lines)


# -- DeepSpeed ----------------------------------------------------------------------------------------------


def _deepspeed(config: Any, r: Recipe, each: int, source: str) -> Export:
    if r.tensor_parallel > 1:
        raise EngineError(
            "deepspeed: tensor parallel is for inference and AutoTP models: use fsdp2 or torchtitan"
        )
    if r.optimizer not in ("adam", "adamw", "sgd", "momentum"):
        raise EngineError(f"deepspeed: has no {r.optimizer}: pass your own optimizer, or use adamw")
    if r.offloaded("activations"):
        raise EngineError("deepspeed: moves activations only through its own checkpoint function: use fsdp2")
    if r.offloaded("parameters") and r.zero_stage != 3:
        raise EngineError("deepspeed: offloads parameters with zero_stage 3 only")
    if r.offloaded("gradients") and not r.offloaded("optimizer_states"):
        raise EngineError(
            "deepspeed: gradients go to the host with the optimizer only: offload optimizer_states too"
        )
    if r.offloaded("optimizer_states") and r.zero_stage == 0:
        raise EngineError("deepspeed: offloads optimizer states from zero_stage 1 on")
    values: dict[str, Any] = {
        "train_batch_size": r.micro_batch * r.accumulation * r.data_parallel,
        "train_micro_batch_size_per_gpu": r.micro_batch,
        "gradient_accumulation_steps": r.accumulation,
        "gradient_clipping": 1.0,
    }
    notes = []
    if r.autocast:
        dtype = "bfloat16" if r.compute_dtype == "bf16" else "float16"
        values["torch_autocast"] = {"enabled": True, "dtype": dtype}
    elif r.precision == "bf16" and not r.offloaded("optimizer_states"):
        values["bf16"] = {
            "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
        }  # fmt: skip
    elif r.precision != "fp32":
        values["bf16"] = {"enabled": True}
    momentum = {"momentum": 0.9} if r.optimizer == "momentum" else {}
    name = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "momentum": "SGD"}[r.optimizer]
    values["optimizer"] = {"type": name, "params": {"lr": 1e-4, **momentum}}
    zero: dict[str, Any] = {"stage": r.zero_stage}
    if r.zero_stage >= 2:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    for what, key in (("optimizer_states", "offload_optimizer"), ("parameters", "offload_param")):
        where = r.offloaded(what)
        if where:
            zero[key] = {"device": where, "pin_memory": True}
            if where == "nvme":
                zero[key]["nvme_path"] = "/local_nvme"
                notes.append("nvme_path is /local_nvme: set your drive's mount point")
    if r.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    values["zero_optimization"] = zero
    check("deepspeed", values, world_size=r.data_parallel)
    if r.precision == "bf16-master":
        notes.append("DeepSpeed may keep fp32 gradients beside bf16 weights: 18 bytes per parameter, not 16")
    if r.checkpointing != "none":
        notes.append(
            f"checkpointing is the model's: gradient_checkpointing_enable() (the recipe: {r.checkpointing})"
        )
    nodes, gpus = _nodes(r, each)
    hosts = f"--hostfile hosts --num_nodes {nodes} " if nodes > 1 else ""
    command = (
        f"deepspeed {hosts}--num_gpus {gpus} YOUR_SCRIPT.py --deepspeed --deepspeed_config deepspeed.json"
    )
    return Export("deepspeed", {"deepspeed.json": json.dumps(values, indent=2) + "\n"}, command, tuple(notes))


# -- torchtitan ---------------------------------------------------------------------------------------------

#: Models that torchtitan 0.3 has a config function for: (module, function).
_TITAN = {"llama3-8b": ("llama3", "llama3_8b"), "llama3-70b": ("llama3", "llama3_70b")}


def _torchtitan(config: Any, r: Recipe, each: int, source: str) -> Export:
    if config.name not in _TITAN:
        raise EngineError(
            f"torchtitan: has no {config.name}, only {' and '.join(_TITAN)} of the models here: use fsdp2"
        )
    if r.precision == "fp32":
        mixed, dtype = "float32", "float32"
    elif r.precision == "bf16":
        mixed, dtype = "bfloat16", "bfloat16"
    elif r.grad_scaler:
        raise EngineError("torchtitan: trains in bf16 or fp32, not fp16: use bf16-master")
    else:
        mixed, dtype = "bfloat16", "float32"
    if r.zero_stage == 1:
        raise EngineError("torchtitan: FSDP has no ZeRO-1: set zero_stage to 2 or 3")
    if r.master_dtype and r.zero_stage == 0 and r.world_size > 1:
        raise EngineError(
            "torchtitan: fp32 masters under DDP are autocast's: use amp-bf16, or zero_stage 2 or 3"
        )
    if r.checkpoint_every not in (None, 1):
        raise EngineError(f"torchtitan: checkpoints each layer or by operator, not {r.checkpointing}")
    if r.optimizer not in ("adam", "adamw") or r.optimizer_impl == "":
        raise EngineError(f"torchtitan: its optimizers are Adam and AdamW, not {r.optimizer}")
    if r.offload and not r.offloaded("parameters"):
        raise EngineError(
            "torchtitan: enable_cpu_offload moves parameters, gradients and optimizer states, all or none"
        )
    if "nvme" in {item.partition(":")[2] for item in r.offload} or r.offloaded("activations"):
        raise EngineError("torchtitan: offloads to host memory, and no activations: use deepspeed or fsdp2")
    module, function = _TITAN[config.name]
    shard = r.data_parallel if r.zero_stage >= 2 else 1
    degrees = {
        "data_parallel_replicate_degree": r.data_parallel // shard,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": r.tensor_parallel,
    }
    check("torchtitan", degrees, world_size=r.world_size)
    kinds = {"none": None, "full": "FullAC", "every-1": "FullAC", "selective": "SelectiveAC"}
    kind = kinds[r.checkpointing]
    batch = r.micro_batch * r.accumulation * r.data_parallel
    lines = [
        f'"""{config.name} on {r.world_size} GPUs for torchtitan 0.3.',
        "",
        *r.describe().splitlines(),
        '"""',
        "",
    ]
    if kind:
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {kind}")
    lines += [
        f"from torchtitan.models.{module}.config_registry import {function}",
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def plan() -> Trainer.Config:",
        f"    config = {function}()",
        f"    config.training.local_batch_size = {r.micro_batch}",
        f"    config.training.global_batch_size = {batch}",
        f"    config.training.seq_len = {r.sequence}",
        f'    config.training.dtype = "{dtype}"',
        f'    config.training.mixed_precision_param = "{mixed}"',
        f"    config.training.enable_cpu_offload = {r.offloaded('parameters') is not None}",
        *(f"    config.parallelism.{key} = {value}" for key, value in degrees.items()),
        f'    config.parallelism.fsdp_reshard_after_forward = "{"never" if r.zero_stage == 2 else "always"}"',
        f"    config.activation_checkpoint = {f'{kind}.Config()' if kind else 'None'}",
        "    for group in config.optimizer.param_groups:",
        f'        group.optimizer_name = "{_CLASSES[r.optimizer]}"',
        f'    config.optimizer.implementation = "{r.optimizer_impl}"',
        "    return config",
    ]
    command = _torchrun(r, each, "-m torchtitan.train --module memlab_plan --config plan")
    notes = (
        "put memlab_plan.py where Python finds it (PYTHONPATH=.)",
        "torchtitan computes the loss in chunks: logits take less than planned",
    )
    return Export("torchtitan", {"memlab_plan.py": "\n".join(lines) + "\n"}, command, notes)


# -- what parsers let through --------------------------------------------------------------------------------

_ACCELERATE_KEYS = {
    "compute_environment", "debug", "distributed_type", "downcast_bf16", "enable_cpu_affinity", "fsdp_config",
    "gpu_ids", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "mixed_precision", "num_machines", "num_processes", "parallelism_config", "rdzv_backend", "same_network",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu",
}  # fmt: skip
_FSDP_KEYS = {
    "fsdp_activation_checkpointing": bool, "fsdp_auto_wrap_policy": str, "fsdp_backward_prefetch": str,
    "fsdp_cpu_ram_efficient_loading": bool, "fsdp_forward_prefetch": bool, "fsdp_ignored_modules": str,
    "fsdp_min_num_params": int, "fsdp_offload_params": bool, "fsdp_reshard_after_forward": bool,
    "fsdp_sharding_strategy": str, "fsdp_state_dict_type": str, "fsdp_sync_module_states": bool,
    "fsdp_transformer_layer_cls_to_wrap": str, "fsdp_use_orig_params": bool, "fsdp_version": int,
}  # fmt: skip
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_DEEPSPEED_KEYS = {
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dataloader_drop_last", "disable_allgather", "dump_state", "elasticity",
    "flops_profiler", "fp16", "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor",
    "memory_breakdown", "optimizer", "pipeline", "prescale_gradients", "scheduler", "sparse_attention",
    "sparse_gradients", "steps_per_print", "tensorboard", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip


def check(engine: str, values: Mapping[str, Any], *, world_size: int | None = None) -> None:
    """Refuse what an engine's own parser would accept, and then not do.

    values: accelerate's YAML, DeepSpeed's JSON, or torchtitan's parallelism section, as a mapping.
    world_size: data-parallel ranks for DeepSpeed, all ranks for torchtitan.
    Raises EngineError, one line, naming the key.
    """
    checks = {"accelerate": _check_accelerate, "deepspeed": _check_deepspeed, "torchtitan": _check_torchtitan}
    if engine not in checks:
        raise unknown_name("engine to check", engine, checks)
    checks[engine](values, world_size)


def _known(engine: str, values: Mapping[str, Any], keys: Any) -> None:
    for key in values:
        if key not in keys:
            raise EngineError(f"{engine}: " + str(unknown_name("key", key, sorted(keys))))


def _check_accelerate(values: Mapping[str, Any], world_size: int | None) -> None:
    _known("accelerate", values, _ACCELERATE_KEYS)
    kind = values.get("distributed_type")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise EngineError(f"accelerate: distributed_type {kind!r} isn't FSDP, MULTI_GPU or NO")
    if values.get("mixed_precision", "no") not in ("no", "fp16", "bf16", "fp8"):
        raise EngineError(
            f"accelerate: mixed_precision {values['mixed_precision']!r} isn't no, fp16, bf16 or fp8"
        )
    for key in ("num_processes", "num_machines"):
        n = values.get(key, 1)
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise EngineError(f"accelerate: {key} must be a whole number from 1, not {n!r}")
    if values.get("num_processes", 1) % values.get("num_machines", 1):
        raise EngineError("accelerate: num_processes counts all machines, so num_machines must divide it")
    fsdp = values.get("fsdp_config", {})
    if kind == "FSDP" and not fsdp:
        raise EngineError("accelerate: distributed_type FSDP needs an fsdp_config")
    if fsdp and kind != "FSDP":
        raise EngineError(f"accelerate: fsdp_config does nothing with distributed_type {kind}")
    if kind == "FSDP" and values.get("use_cpu"):
        raise EngineError("accelerate: use_cpu true starts the processes and doesn't shard: set it to false")
    _known("accelerate", fsdp, _FSDP_KEYS)
    for key, value in fsdp.items():
        wanted = _FSDP_KEYS[key]
        if type(value) is not wanted:
            raise EngineError(f"accelerate: {key} must be a {wanted.__name__}, not {value!r}")
    if fsdp and fsdp.get("fsdp_version") not in (1, 2):
        raise EngineError(f"accelerate: fsdp_version must be 1 or 2, not {fsdp.get('fsdp_version')!r}")
    if fsdp.get("fsdp_state_dict_type", "FULL_STATE_DICT") not in _STATE_DICTS:
        raise EngineError(f"accelerate: fsdp_state_dict_type must be one of {', '.join(_STATE_DICTS)}")
    if fsdp.get("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP" and not fsdp.get(
        "fsdp_transformer_layer_cls_to_wrap"
    ):
        raise EngineError(
            "accelerate: TRANSFORMER_BASED_WRAP without fsdp_transformer_layer_cls_to_wrap may wrap the "
            "whole model as one block"
        )


def _check_deepspeed(values: Mapping[str, Any], world_size: int | None) -> None:
    _known("deepspeed", values, _DEEPSPEED_KEYS)
    micro, turns = values.get("train_micro_batch_size_per_gpu"), values.get("gradient_accumulation_steps", 1)
    batch = values.get("train_batch_size")
    if world_size and micro and batch and micro * turns * world_size != batch:
        raise EngineError(
            f"deepspeed: train_batch_size {batch} isn't {micro} per GPU x {turns} x {world_size} GPUs"
        )
    if values.get("bf16", {}).get("enabled") and values.get("fp16", {}).get("enabled"):
        raise EngineError("deepspeed: fp16 and bf16 are both enabled: choose one")
    zero = values.get("zero_optimization", {})
    if zero.get("offload_param", {}).get("device", "none") != "none" and zero.get("stage") != 3:
        raise EngineError("deepspeed: offload_param does nothing below stage 3")
    for key in ("offload_param", "offload_optimizer"):
        part = zero.get(key, {})
        if part.get("device") == "nvme" and not part.get("nvme_path"):
            raise EngineError(f"deepspeed: {key} to nvme needs an nvme_path")


def _check_torchtitan(values: Mapping[str, Any], world_size: int | None) -> None:
    sizes = []
    for key, value in values.items():
        if re.fullmatch(r"\w+_degree", key) is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            left = " (-1, what is left, is data_parallel_shard_degree's alone)" if value == -1 else ""
            if value == -1 and key == "data_parallel_shard_degree":
                continue
            raise EngineError(f"torchtitan: {key} must be a whole number from 1, not {value!r}{left}")
        sizes.append(value)
    product = math.prod(sizes)
    if world_size and values.get("data_parallel_shard_degree") == -1:
        if world_size % product:
            raise EngineError(f"torchtitan: degrees of {product} don't divide {world_size} GPUs")
    elif world_size and product != world_size:
        raise EngineError(f"torchtitan: the degrees multiply to {product}, and there are {world_size} GPUs")
