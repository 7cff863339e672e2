"""The scripts behind published measurements, run on a virtual card.

Each function is the measuring script's own order of operations: what is made where, what stays alive, how many
steps. That order, the attention kernel, the masks and the library versions are inputs (`Inputs`), because
exactness rests on them. Needs transformers and peft (extra `benchmarks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memlab.trace import Trace
from memlab.virtual import VirtualGPU

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a prediction rests on beside the model's shape.

    attention: 'eager' or 'sdpa' (transformers' names). kernel: what SDPA may run, as the script pins it.
    expanded: the script expands grouped keys and values before SDPA. masks: 'by need' (transformers 5: none for
    whole sequences under SDPA) or 'always' (transformers 4.57, whose find_packed_sequence_indices never returns
    None). base: 'fp16', 'bf16', 'fp32' or 'nf4'. amp: autocast's type or None. lora: rank or None.
    """

    card: str
    batch: int
    sequence: int
    base: str
    attention: str
    kernels: tuple[str, ...] = ()
    expanded: bool = False
    masks: str = "by need"
    amp: str | None = None
    checkpointing: bool = False
    lora: int | None = None
    targets: tuple[str, ...] = LORA_TARGETS
    training: bool = True


@dataclass(frozen=True)
class Run:
    """A trace, and where in its events the measured steps begin and end."""

    trace: Trace
    headline: tuple[int, int]  # the step whose peaks are reported
    phases: tuple[int, int]  # the step whose phases are reported


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def model_of(config: dict[str, Any], attention: str, dtype: torch.dtype) -> nn.Module:
    """A causal language model from a config alone, with fake weights and no initialisation."""
    import transformers
    from transformers.initialization import no_init_weights

    made = getattr(transformers, config["class"])(**{k: v for k, v in config.items() if k != "class"})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
    model.tie_weights()
    model.config.use_cache = False
    return model


def adapters(gpu: VirtualGPU, model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> nn.Module:
    """PEFT's LoRA: each adapter is made in main memory, moved in the base's type, and made fp32 at the end."""
    from peft import LoraConfig, get_peft_model

    with gpu.host():
        wrapped = get_peft_model(
            model,
            LoraConfig(
                r=inputs.lora,
                lora_alpha=2 * (inputs.lora or 0),
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
                target_modules=list(inputs.targets),
            ),
            autocast_adapter_dtype=False,
        )
    with torch.no_grad():
        for convert in (lambda w: torch.empty_like(w, dtype=dtype), lambda w: w.float()):
            for linear in _adapter_layers(wrapped):
                linear.weight = nn.Parameter(convert(linear.weight.detach()))
    return wrapped


def _adapter_layers(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "lora_A"):
            for pair in (module.lora_A, module.lora_B):
                yield from pair.values()  # type: ignore[operator]


@contextmanager
def expanded_keys() -> Iterator[None]:
    """The script's wrapper: grouped keys and values are repeated before SDPA, which then needs no grouping."""
    functional = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.size(-3) != query.size(-3):
            groups = query.size(-3) // key.size(-3)
            key = key.repeat_interleave(groups, dim=-3)
            value = value.repeat_interleave(groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        return original(query, key, value, *args, **kwargs)

    functional.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def pinned(kernels: tuple[str, ...]) -> AbstractContextManager[Any]:
    """torch.nn.attention.sdpa_kernel with the script's list, or nothing."""
    if not kernels:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    return sdpa_kernel([names[k] for k in kernels])


def fitcheck(config: dict[str, Any], inputs: Inputs) -> Run:
    """scripts/measure.py of fitcheck-llm 0.3.1: LoRA on a base that is fp16 or nf4, checkpointed, AdamW.

    A warm-up step; the peaks are reset; step 2 gives allocated and reserved; step 3 the phases. The output
    object lives until `one_step` returns, so the logits live through the optimizer step.
    """
    with VirtualGPU(inputs.card, limit=1 << 50) as gpu:
        with gpu.host():
            model = model_of(config, inputs.attention, torch.float16)
        gpu.put(model)
        model = adapters(gpu, model, inputs, torch.float16)
        if inputs.checkpointing:
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            model.enable_input_require_grads()  # type: ignore[operator]
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        batch = torch.randint(0, config["vocab_size"], (inputs.batch, inputs.sequence))

        def one_step() -> None:
            optimizer.zero_grad(set_to_none=True)
            out = model(input_ids=batch, labels=batch)
            out.loss.backward()
            optimizer.step()

        with pinned(inputs.kernels), expanded_keys() if inputs.expanded else nullcontext():
            for _ in range(3):
                one_step()
    steps = gpu.trace.steps
    return Run(gpu.trace, (steps[1], steps[2]), (steps[2], steps[3]))
