"""The scripts behind published measurements, run on a virtual card.

Each function is the measuring script's own order of operations: what is made where, what stays alive, how
many steps. That order, the attention kernel, the masks and the library versions are inputs (`Inputs`),
because exactness rests on them. Needs transformers and peft (extra `benchmarks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memlab.cuda_rules import CudaRules
from memlab.step import valueless_reads
from memlab.trace import Trace
from memlab.virtual import VirtualGPU

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a prediction rests on beside the model's shape.

    attention: 'eager' or 'sdpa' (transformers' names). kernel: what SDPA may run, as the script pins it.
    expanded: the script expands grouped keys and values before SDPA. masks: 'by need' (transformers 5: none
    for whole sequences under SDPA) or 'always' (transformers 4.57, whose find_packed_sequence_indices never
    returns None). base: 'fp16', 'bf16', 'fp32' or 'nf4'. amp: autocast's type or None. lora: rank or None.
    limit: the card's bytes; more than any step needs unless it is asked whether it runs.
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
    limit: int = 1 << 50


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
    """PEFT's LoRA: each adapter is made in main memory, moved in the base's type, made fp32 at the end."""
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
    """The script's wrapper: grouped keys and values are repeated before SDPA: no grouping there."""
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


def libraries() -> None:
    """Import before a virtual card is entered: what modules make at import must be real."""
    import peft  # noqa: F401
    import transformers
    import transformers.masking_utils
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mistral import modeling_mistral  # noqa: F401
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401

    transformers.logging.set_verbosity_error()


def fitcheck(config: dict[str, Any], inputs: Inputs) -> Run:
    """scripts/measure.py of fitcheck-llm 0.3.1: LoRA on a base that is fp16 or nf4, checkpointed, AdamW.

    A warm-up step; the peaks are reset; step 2 gives allocated and reserved; step 3 the phases. The output
    object lives until `one_step` returns, so the logits live through the optimizer step.
    """
    with VirtualGPU(inputs.card, limit=inputs.limit) as gpu:
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


def vramcalc(config: dict[str, Any], inputs: Inputs) -> Run:
    """bench.py of vramcalc 0.1.2. Training: gradients are zeroed after the step, not freed; the output
    is deleted before the optimizer step; the cache is emptied before each measured step. Inference: one
    forward with use_cache under inference_mode.
    """
    weights = torch.float32 if inputs.amp else DTYPES[inputs.base]
    with VirtualGPU(inputs.card, limit=1 << 50) as gpu:
        with gpu.host():
            model = model_of(config, inputs.attention, weights)
        gpu.put(model)
        if inputs.lora is not None:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            model = adapters(gpu, model, inputs, weights)
        ids = torch.randint(0, config["vocab_size"], (inputs.batch, inputs.sequence))
        mask = _causal_mask if inputs.masks == "always" and inputs.attention == "sdpa" else lambda _: None
        attention = partial(pinned, inputs.kernels)
        if not inputs.training:
            model.eval()
            torch.cuda.empty_cache()
            with torch.inference_mode(), attention(), gpu.phase("forward"):
                out = model(input_ids=ids, use_cache=True)
            del out
            end = len(gpu.trace.events)
            return Run(gpu.trace, (gpu.trace.marks[1][0], end), (gpu.trace.marks[1][0], end))
        model.train()
        if inputs.checkpointing:
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-5, foreach=True)

        def step() -> None:
            with attention():
                with torch.autocast("cuda", DTYPES[inputs.amp]) if inputs.amp else nullcontext():
                    out = model(input_ids=ids, labels=ids, attention_mask=mask(ids), use_cache=False)
                    loss = out.loss
                loss.backward()
            del out, loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        step()
        torch.cuda.empty_cache()
        step()
    steps = gpu.trace.steps
    return Run(gpu.trace, (steps[1], steps[2]), (steps[1], steps[2]))


def _causal_mask(ids: Tensor) -> Tensor:
    """The boolean mask that transformers 4.57 builds once for each forward."""
    length = ids.shape[1]
    return torch.ones(ids.shape[0], 1, length, length, dtype=torch.bool).tril_()


# --- 4-bit base weights -------------------------------------------------------------------------------------


class _Dequantised(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: the weight is made fp16 for each product; only the packed one is kept.

    It is kept as an attribute, not by save_for_backward, so checkpointing doesn't see it: the recomputation
    stops earlier than it would.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.dequantised(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return torch.matmul(gradient, ctx.layer.dequantised().to(gradient.dtype)), None, None


class NF4Linear(nn.Module):
    """Linear4bit of bitsandbytes 0.50: 4-bit values in blocks of 64 with one fp32 scale, and a table of 16.

    in main memory: weight (out, in) and bias as loaded. `quantise` makes what the card holds: packed (n/2,)
    uint8, absmax (n/64,) fp32, code (16,) fp32; the bias becomes fp32 with the norms, fp16 in each product.
    """

    packed: Tensor
    absmax: Tensor
    code: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def quantise(self, weight: Tensor) -> None:
        count = weight.numel()
        self.absmax = torch.empty(-(-count // 64), dtype=torch.float32)
        self.packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8)
        self.code = torch.empty(16, dtype=torch.float32)

    def dequantised(self) -> Tensor:
        return torch.empty(self.out_features, self.in_features, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.to(torch.float16)
        bias = None if self.bias is None else self.bias.to(torch.float16)
        return _Dequantised.apply(x, self, bias).to(kind)


class NF4Lora(nn.Module):
    """PEFT's lora.Linear4bit without autocast: clone of the base result, then the adapter in fp32."""

    def __init__(self, base: NF4Linear, rank: int, scaling: float) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x).clone()
        kind = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        output = self.lora_B(self.lora_A(x)) * self.scaling
        return result + output.to(kind)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How from_pretrained brings a quantised model to the card, as far as it isn't fixed by the script.

    window: how many fp16 tensors the loader's threads have copied ahead of the one that is quantised: their
    timing decides, so it is a range and not a number. cleared: prepare_model_for_kbit_training empties the
    cache (PEFT 0.20 on). warmup: transformers takes one block as large as the quantised model first.
    """

    window: int = 4
    cleared: bool = True
    warmup: bool = True


#: How far the loader may run ahead, in tensors: none, one, its four worker threads, four each.
WINDOWS = (0, 1, 4, 16)


def fitcheck_nf4(config: dict[str, Any], inputs: Inputs, loading: Loading) -> list[Run]:
    """scripts/measure.py of fitcheck-llm 0.3.1 with --quant nf4.

    The first run is the one of `loading`; the others differ in the loader's order alone (`WINDOWS`).
    """
    with VirtualGPU(inputs.card, limit=1 << 50) as gpu:
        model = _on_host_nf4(gpu, config, inputs)
        _load_nf4(model, loading)
        loaded = len(gpu.trace.events)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.dtype == torch.float16:
                parameter.data = parameter.data.float()
        if loading.cleared:
            torch.cuda.empty_cache()
        rank = inputs.lora or 0
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, NF4Linear) and name in inputs.targets:
                    setattr(parent, name, NF4Lora(child, rank, 2.0))
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
    runs = [Run(gpu.trace, (steps[1], steps[2]), (steps[2], steps[3]))]
    for window in WINDOWS:
        if window != loading.window:
            with VirtualGPU(inputs.card, limit=1 << 50) as other:
                model = _on_host_nf4(other, config, inputs)
                _load_nf4(model, replace(loading, window=window))
            runs.append(_with_loading(runs[0], loaded, other.trace))
    return runs


def _on_host_nf4(gpu: VirtualGPU, config: dict[str, Any], inputs: Inputs) -> nn.Module:
    with gpu.host():
        model = model_of(config, inputs.attention, torch.float16)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and name != "lm_head":
                    layer = NF4Linear(child)
                    layer.weight = child.weight
                    setattr(parent, name, layer)
    return model


def _with_loading(run: Run, loaded: int, loading: Trace) -> Run:
    """The same run after another loading: what is alive when loading ends is matched by shape, in order."""
    trace = run.trace
    left: dict[Any, list[int]] = {}
    for block in loading.live_at(len(loading.events) - 1):
        left.setdefault((loading.sizes[block], loading.shapes[block]), []).append(block)
    rename: dict[int, int] = {}
    for block in trace.live_at(loaded - 1):
        rename[block] = left[trace.sizes[block], trace.shapes[block]].pop(0)
    result = Trace(info=trace.info)
    result.sizes.extend(loading.sizes)
    result.sizes.extend(trace.sizes)
    shift, first = len(loading.events) - loaded, len(loading.sizes)
    result.events.extend(loading.events)
    for event in trace.events[loaded:]:
        block = event if event >= 0 else ~event
        block = rename.get(block, block + first)
        result.events.append(block if event >= 0 else ~block)
    result.marks = [(max(0, position + shift) if position else 0, name) for position, name in trace.marks]
    result.info["empty_cache"] = [p + shift for p in trace.info.get("empty_cache", ())]
    headline, phases = run.headline, run.phases
    return Run(result, (headline[0] + shift, headline[1] + shift), (phases[0] + shift, phases[1] + shift))


def _load_nf4(model: nn.Module, loading: Loading) -> None:
    """Tensor by tensor in the order of the modules: fp16 to the card, quantised, the fp16 copy freed."""
    owners: list[tuple[nn.Module, str, Tensor]] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                owners.append((module, name, tensor))
    if loading.warmup:
        total = sum(
            t.numel() // 2 if isinstance(m, NF4Linear) and n == "weight" else t.nbytes for m, n, t in owners
        )
        torch.empty(total // 2, dtype=torch.float16)
    ahead: list[Tensor] = []
    with torch.no_grad():
        for at, (module, name, tensor) in enumerate(owners):
            while len(ahead) <= min(loading.window, len(owners) - 1 - at):
                ahead.append(torch.empty_like(owners[at + len(ahead)][2], requires_grad=False))
            loaded = ahead.pop(0)
            if isinstance(module, NF4Linear) and name == "weight":
                module.quantise(loaded)
                del module._parameters[name]
            else:
                shared = [(m, n) for m in model.modules() for n, t in m._parameters.items() if t is tensor]
                parameter = nn.Parameter(loaded, requires_grad=False)
                for owner, key in shared:
                    owner._parameters[key] = parameter
            del loaded
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer)


# --- small ones ---------------------------------------------------------------------------------------------


def repeated_linear(times: int) -> int:
    """torchinfo issue 144: Linear(1024, 1024) applied `times` times to zeros(10240, 1024) in fp32; its bytes.

    The issue is of a time when cuBLAS kept its workspace to itself, outside of PyTorch's allocator.
    """
    with VirtualGPU("T4", rules=CudaRules(cublas_workspace=False, cublaslt_workspace=False)) as gpu:
        layer = nn.Linear(1024, 1024)
        x = torch.zeros(10240, 1024)
        for _ in range(times):
            x = layer(x)
        live = torch.cuda.memory_allocated()
    assert gpu.trace.events
    return live


def bert_trainer(
    batch: int, accumulation: int, checkpointing: bool, amp: bool, adafactor: bool, card: str = "V100-16GB"
) -> Run:
    """Hugging Face's Trainer of early 2022 on bert-large-uncased with two classes, sequence 512, dropout 0.1.

    Eager attention, gradients clipped, AdamW one parameter at a time (transformers' own had no foreach);
    gradients are zeroed and kept (the default of torch before 2.0).
    """
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    with VirtualGPU(card, limit=1 << 50) as gpu:
        with gpu.host():
            model = transformers.BertForSequenceClassification(config)
        gpu.put(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.train()
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer = (
            torch.optim.Adafactor(parameters, foreach=False)
            if adafactor
            else torch.optim.AdamW(parameters, foreach=False)
        )
        scaler = torch.amp.GradScaler("cuda", enabled=amp)

        def step() -> None:
            for _ in range(accumulation):
                ids = torch.randint(100, 30000, (batch, 512))
                labels = torch.zeros(batch, dtype=torch.long)
                with torch.autocast("cuda", torch.float16, enabled=amp):
                    loss = model(input_ids=ids, labels=labels).loss / accumulation
                scaler.scale(loss).backward()
            with valueless_reads():
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
                scaler.step(optimizer)
                scaler.update()
            model.zero_grad(set_to_none=False)

        for _ in range(2):
            step()
    steps = gpu.trace.steps
    return Run(gpu.trace, (steps[0], steps[2]), (steps[1], steps[2]))
