"""What other estimators say. Runs in their own environment (`benchmarks.peers` makes it), without memlab.

Reads a JSON list of workloads on standard input, writes one answer for each on standard output: bytes by
peer, or why a peer has none. Each peer is asked through its documented Python functions; nothing is fitted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

MIB = 2**20
#: torchinfo runs the model for real; outputs are linear in tokens, so a short text is scaled up.
TORCHINFO_TOKENS = 64


class NoAnswerError(Exception):
    """Why a peer can't answer for a workload."""


def accelerate(work: dict[str, Any]) -> int:
    """`accelerate estimate-memory`: "Training using Adam", the largest of its categories."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if work["lora"]:
        raise NoAnswerError("no LoRA")
    total, _ = calculate_maximum_sizes(_model(work, "meta").float())
    # it has rows for fp32 and for half precision, which it takes to be mixed
    row = "float32" if work["dtype"] == "fp32" else "float16"
    return int(max(estimate_training_usage(int(total), row).values()))


def deepspeed(work: dict[str, Any]) -> int:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs` for one GPU: states alone."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if work["lora"]:
        raise NoAnswerError("no LoRA")
    parameters = sum(p.numel() for p in _model(work, "meta").parameters())
    _, gpu = estimate_zero2_model_states_mem_needs(
        parameters, num_gpus_per_node=1, num_nodes=1, cpu_offload=False, additional_buffer_factor=1.0
    )
    return int(gpu)


def torchinfo(work: dict[str, Any]) -> int:
    """torchinfo's `total_output_bytes + total_param_bytes`, scaled to the batch's tokens."""
    import torch
    from torchinfo import summary

    if work["lora"]:
        raise NoAnswerError("no LoRA")
    model = _model(work, "cpu")
    tokens = min(TORCHINFO_TOKENS, work["sequence"])
    found = summary(model, input_data=torch.zeros(1, tokens, dtype=torch.long), verbose=0)
    scale = work["batch"] * work["sequence"] / tokens
    return int(found.total_param_bytes + found.total_output_bytes * scale)


def vramcalc(work: dict[str, Any]) -> int:
    """vramcalc's `estimate(...).total`, which claims allocated bytes."""
    from vramcalc import estimate

    if work["quant"] != "none":
        raise NoAnswerError("no 4-bit weights")
    config = {"model_type": work["type"], **work["config"]}
    return int(
        estimate(
            config,
            mode="train",
            dtype=work["dtype"],
            batch=work["batch"],
            seq_len=work["sequence"],
            lora_rank=work["lora"],
            grad_checkpoint=work["checkpointing"],
            precision="amp" if work["amp"] else "pure",
            attn_impl=work["attention"],
        ).total
    )


def fitcheck(work: dict[str, Any]) -> int:
    """FitCheck's `estimate(...)`: its total, without its overhead where allocated bytes are asked."""
    from fitcheck.config_parser import ModelConfig
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import GPU_DB

    config = work["config"]
    heads = config["num_attention_heads"]
    shape = ModelConfig(
        name=work["model"],
        num_params=sum(p.numel() for p in _model(work, "meta").parameters()),
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        tie_word_embeddings=config["tie_word_embeddings"],
    )
    training = TrainingConfig(
        precision=work["dtype"],
        quantization=work["quant"],
        optimizer_dtype="bf16"
        if work["dtype"] == "bf16" and not work["amp"] and not work["lora"]
        else "fp32",
        batch_size=work["batch"],
        seq_len=work["sequence"],
        lora_rank=work["lora"],
        grad_checkpoint=work["checkpointing"],
        flash_attn=work["attention"] == "sdpa",
        **({"lora_targets": work["targets"]} if work["targets"] else {}),
    )
    report = estimate(shape, training, GPU_DB[work["card"]])
    without = 0.0 if work["quantity"] == "process" else report.overhead_mib
    return int((report.total_mib - without) * MIB)


PEERS: dict[str, tuple[str, Callable[[dict[str, Any]], int]]] = {
    "accelerate": ("accelerate", accelerate),
    "deepspeed": ("deepspeed", deepspeed),
    "torchinfo": ("torchinfo", torchinfo),
    "vramcalc": ("vramcalc", vramcalc),
    "fitcheck": ("fitcheck-llm", fitcheck),
}


def _model(work: dict[str, Any], device: str) -> Any:
    import torch
    import transformers

    name = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[work["type"]]
    config = getattr(transformers, f"{name}Config")(**work["config"], use_cache=False)
    with torch.device(device):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(torch.float32 if work["amp"] or work["dtype"] == "fp32" else torch.bfloat16)


def main() -> None:
    answers = []
    works = json.load(sys.stdin)
    for number, work in enumerate(works, 1):
        print(f"peers: {number} of {len(works)}, {work['about']}", file=sys.stderr, flush=True)
        found: dict[str, Any] = {}
        for name, (_, ask) in PEERS.items():
            try:
                found[name] = ask(work)
            except NoAnswerError as error:
                found[name] = str(error)
            except Exception as error:  # a peer's failure is a result, not ours to stop at
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        answers.append(found)
    versions = {name: version(package) for name, (package, _) in PEERS.items()}
    json.dump({"versions": versions, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
