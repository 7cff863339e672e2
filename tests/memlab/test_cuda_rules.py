from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memlab import hardware
from memlab.cuda_rules import (
    KERNELS,
    RULES,
    CudaRules,
    Emulation,
    choose_attention,
    cublas_workspace_bytes,
)
from memlab.trace import Trace
from memlab.units import KIB, MIB
from memlab.virtual import DataDependentError, VirtualGPU, device

torch.set_num_threads(1)


def names(trace: Trace) -> list[tuple[str, int]]:
    """(operator, bytes) of each allocation in order."""
    return [(b.operator, b.bytes) for b in (trace.block(e) for e in trace.events if e >= 0)]


def taken(trace: Trace, operator: str) -> list[int]:
    return [size for name, size in names(trace) if name == operator]


def test_every_rule_is_a_switch_and_says_where_it_was_read() -> None:
    assert {f.name for f in fields(CudaRules) if f.default is True} == set(RULES)
    for name, rule in RULES.items():
        assert rule.what, name
        assert ".cpp" in rule.source or ".cu" in rule.source or ".py" in rule.source or ".h" in rule.source
    assert not any(getattr(CudaRules.none(), name) for name in RULES)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="'flash3' isn't one of auto, flash, efficient, cudnn, math"):
        CudaRules(attention="flash3")


# --- dropout and softmax


def dropped(rules: CudaRules) -> Trace:
    with VirtualGPU("T4", rules=rules) as gpu:
        x = torch.zeros(1024, requires_grad=True)
        y = F.dropout(x, 0.1)
        y.sum().backward()
    return gpu.trace


def test_dropout_saves_a_byte_mask() -> None:
    assert 1024 in taken(dropped(CudaRules()), "aten.native_dropout")
    assert not taken(dropped(CudaRules(byte_dropout=False)), "aten.native_dropout")


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_dropout_that_drops_nothing_allocates_nothing(p: float) -> None:
    with VirtualGPU("T4") as gpu:
        x = torch.zeros(1024, requires_grad=True)
        kept = [F.dropout(x, p, training=p == 0.0)]
    assert names(gpu.trace) == [("aten.zeros", 4096)]
    assert kept[0].shape == x.shape


def softmaxed(rules: CudaRules, dtype: torch.dtype, asked: torch.dtype | None) -> list[tuple[str, int]]:
    with VirtualGPU("T4", rules=rules) as gpu:
        x = torch.zeros(8, 1024, dtype=dtype, requires_grad=True)
        y = torch.softmax(x, -1, dtype=asked)
    assert y.dtype == (asked or dtype)
    return names(gpu.trace)[1:]


def test_half_softmax_with_float_result_is_one_kernel() -> None:
    float32 = 8 * 1024 * 4
    fused = softmaxed(CudaRules(), torch.float16, torch.float32)
    assert fused == [("aten._softmax", float32)]
    copied = [("aten._to_copy", float32), ("aten._softmax", float32)]
    assert softmaxed(CudaRules(half_to_float_softmax=False), torch.float16, torch.float32) == copied
    assert softmaxed(CudaRules(), torch.bfloat16, torch.float32) == copied
    assert softmaxed(CudaRules(), torch.float32, None) == [("aten._softmax", float32)]


@pytest.mark.parametrize("on", [True, False])
def test_softmax_backward_copies_after_its_output(on: bool) -> None:
    with VirtualGPU("T4", rules=CudaRules(softmax_backward_copy=on)) as gpu:
        x = torch.zeros(8, 1024, requires_grad=True)
        y = torch.softmax(x, -1)
        before = len(names(gpu.trace))
        y.backward(torch.zeros_like(y))
    made = names(gpu.trace)[before + 1 :]
    scratch = [("softmax backward: grad * output", 8 * 1024 * 4)] if on else []
    assert made == [("aten._softmax_backward_data", 8 * 1024 * 4), *scratch]


def test_log_softmax_has_no_copy() -> None:
    with VirtualGPU("T4") as gpu:
        x = torch.zeros(8, 1024, requires_grad=True)
        torch.log_softmax(x, -1).sum().backward()
    assert not [n for n, _ in names(gpu.trace) if "grad * output" in n]


# --- matrix products


def linear(bias: bool, card: str = "T4", **rules: Any) -> Trace:
    with VirtualGPU(card, rules=CudaRules(**rules)) as gpu:
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=bias) for _ in range(3)))
        for _ in range(2):
            layers(torch.zeros(32, 64)).sum().backward()
    return gpu.trace


def test_one_cublas_workspace_for_each_thread() -> None:
    sizes = taken(linear(False), "cuBLAS workspace")
    assert sizes == [8320 * KIB] * 2
    assert [b.phase for b in linear(False).blocks() if b.operator == "cuBLAS workspace"] == [
        "forward",
        "backward",
    ]
    assert taken(linear(False, "H100-80GB"), "cuBLAS workspace") == [32 * MIB] * 2
    assert not taken(linear(False, cublas_workspace=False), "cuBLAS workspace")
    assert taken(linear(False, cublas_workspace_bytes=MIB), "cuBLAS workspace") == [MIB] * 2
    assert cublas_workspace_bytes((8, 6)) == 8320 * KIB


def test_the_output_is_there_before_the_workspace() -> None:
    order = [n for n, _ in names(linear(False)) if n in ("aten.mm", "cuBLAS workspace")]
    assert order[:2] == ["aten.mm", "cuBLAS workspace"]


def test_cublaslt_workspace_only_with_a_bias() -> None:
    assert taken(linear(True), "cuBLASLt workspace") == [MIB]
    assert not taken(linear(False), "cuBLASLt workspace")
    assert not taken(linear(True, cublaslt_workspace=False), "cuBLASLt workspace")


def test_inference_has_one_workspace_and_its_temporaries_are_seen() -> None:
    with VirtualGPU("T4") as gpu, torch.inference_mode():
        layer = nn.Linear(64, 64)
        F.dropout(torch.softmax(layer(torch.zeros(32, 64)), -1), 0.1)
    assert taken(gpu.trace, "cuBLAS workspace") == [8320 * KIB]
    assert taken(gpu.trace, "aten.native_dropout") == [8192, 2048]


# --- attention


def tensors(dtype: torch.dtype = torch.float16, size: int = 64, heads: int = 8, kv: int = 8) -> list[Any]:
    make = torch.zeros(1, 8, 128, size, dtype=dtype, requires_grad=True)
    return [make[:, :heads], make[:, :kv], make[:, :kv]]


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "kv", "mask", "expected"),
    [
        ((7, 5), torch.float16, 64, 8, False, "efficient"),  # flash needs 8.0
        ((8, 6), torch.float16, 64, 8, False, "flash"),
        ((8, 6), torch.bfloat16, 64, 8, False, "flash"),
        ((7, 5), torch.bfloat16, 64, 8, False, "math"),
        ((8, 6), torch.float32, 64, 8, False, "efficient"),
        ((8, 6), torch.bfloat16, 64, 8, True, "efficient"),  # flash takes no mask
        ((8, 6), torch.bfloat16, 64, 2, False, "flash"),  # grouped heads
        ((8, 6), torch.float32, 64, 2, False, "math"),
        ((7, 5), torch.float16, 64, 2, False, "math"),
        ((8, 0), torch.bfloat16, 320, 8, False, "efficient"),
        ((8, 0), torch.float32, 66, 8, False, "math"),  # not a multiple of 4
        ((8, 0), torch.bfloat16, 80, 8, False, "flash"),
        ((8, 6), torch.bfloat16, 256, 8, False, "efficient"),  # flash backward beyond 224 on 8.6
        ((8, 0), torch.bfloat16, 256, 8, False, "flash"),
        ((9, 0), torch.bfloat16, 64, 8, False, "cudnn"),
        ((9, 0), torch.float32, 64, 8, False, "efficient"),
    ],
)
def test_the_kernel_is_chosen_as_on_the_card(
    capability: tuple[int, int], dtype: torch.dtype, size: int, kv: int, mask: bool, expected: str
) -> None:
    q, k, v = tensors(dtype, size, kv=kv)
    bias = torch.zeros(128, 128, dtype=dtype) if mask else None
    assert choose_attention(q, k, v, bias, 0.0, not mask, kv != 8, capability) == expected
    assert expected in KERNELS


def test_sdpa_kernel_is_obeyed_and_nothing_usable_is_refused_as_by_torch() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = tensors(torch.bfloat16)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose_attention(q, k, v, None, 0.0, True, False, (8, 6)) == "efficient"
        with pytest.raises(RuntimeError, match="No available kernel"):
            choose_attention(q, k, v, None, 0.0, True, False, (7, 5))


def attended(kernel: str, card: str = "T4", dtype: torch.dtype = torch.float16, **rules: Any) -> Trace:
    with VirtualGPU(card, rules=CudaRules(attention=kernel, **rules)) as gpu:
        q, k, v = (torch.zeros(2, 4, 96, 64, dtype=dtype, requires_grad=True) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    return gpu.trace


def test_efficient_attention_saves_padded_logsumexp_and_keeps_its_seeds_on_the_host() -> None:
    name = "aten._scaled_dot_product_efficient_attention"
    assert taken(attended("efficient"), name) == [2 * 96 * 4 * 64 * 2, 2 * 4 * 96 * 4]
    with_seeds = taken(attended("efficient", host_scalars=False), name)
    assert with_seeds == [2 * 96 * 4 * 64 * 2, 2 * 4 * 96 * 4, 8, 8]


def test_efficient_backward_takes_delta_and_accumulators() -> None:
    made = dict(names(attended("efficient")))
    assert made["efficient attention backward: delta"] == 2 * 4 * 96 * 4
    assert made["efficient attention backward: accumulators"] == 2 * 4 * 2 * (4 * 64 * 64 + 16)
    off = attended("efficient", attention_scratch=False)
    assert not [n for n, _ in names(off) if n.startswith("efficient attention backward")]


def test_flash_saves_its_seed_and_takes_an_accumulator() -> None:
    trace = attended("flash", "RTX-A6000", torch.bfloat16)
    forward = taken(trace, "aten._scaled_dot_product_flash_attention")
    assert forward == [2 * 96 * 4 * 64 * 2, 2 * 4 * 96 * 4, 16, 8]
    scratch = dict(names(trace))["flash attention backward: softmax_d, dq_accum, expanded dk and dv"]
    assert scratch == 2 * 4 * 128 * 4 + 2 * 128 * 4 * 64 * 4


def test_plain_attention_holds_the_scores() -> None:
    trace, scores = attended("math", dtype=torch.float32), 2 * 4 * 96 * 96
    assert taken(trace, "aten._safe_softmax") == [scores * 4]
    assert taken(trace, "plain attention: x == -inf") == [scores]
    assert not taken(attended("efficient"), "aten._safe_softmax")


def test_a_boolean_mask_becomes_an_additive_one_for_each_call() -> None:
    with VirtualGPU("RTX-A6000") as gpu:
        q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
        for _ in range(3):
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert taken(gpu.trace, "aten.where") == [64 * 64 * 2] * 3


# --- autocast


def kept_dtypes(function: Any, **rules: Any) -> torch.dtype:
    with VirtualGPU("T4", rules=CudaRules(**rules)):
        x = torch.ones(4, 8, dtype=torch.float16, requires_grad=True)
        with torch.autocast("cuda"):
            return function(x).dtype  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (8,)),
        torch.exp,
        lambda x: x.pow(2),
        lambda x: x.sum(),
        lambda x: x.cumsum(0),
        lambda x: F.mse_loss(x, x),
        lambda x: torch.logsumexp(x, 0),
    ],
)
def test_cudas_autocast_keeps_these_in_fp32(function: Any) -> None:
    assert kept_dtypes(function) == torch.float32


@pytest.mark.parametrize("function", [torch.relu, lambda x: x + x, lambda x: x @ x.T, F.silu])
def test_and_these_in_16_bit(function: Any) -> None:
    assert kept_dtypes(function) == torch.float16


def test_without_the_rule_autocast_is_the_cpus() -> None:
    assert kept_dtypes(lambda x: x.softmax(-1), autocast_lists=False) == torch.float16


def test_cross_entropy_isnt_in_cudas_list_but_its_parts_are() -> None:
    with VirtualGPU("T4") as gpu:
        logits = torch.zeros(4, 8, dtype=torch.float16, requires_grad=True)
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert taken(gpu.trace, "aten._log_softmax") == [4 * 8 * 2]


def test_autocast_keeps_one_copy_of_each_weight() -> None:
    with VirtualGPU("T4") as gpu:
        layer = nn.Linear(64, 64, bias=False)
        x = torch.zeros(2, 64)
        with torch.autocast("cuda", torch.float16):
            kept = [layer(x), layer(x)]
    assert len(kept) == 2
    assert taken(gpu.trace, "aten._to_copy").count(64 * 64 * 2) == 1


# --- norms, optimizers, the rest


@pytest.mark.parametrize(("on", "size"), [(True, 4), (False, 2)])
def test_layer_norm_statistics_are_fp32(on: bool, size: int) -> None:
    with VirtualGPU("T4", rules=CudaRules(float_statistics=on)) as gpu:
        nn.LayerNorm(64, dtype=torch.float16)(torch.zeros(32, 64, dtype=torch.float16))
    assert taken(gpu.trace, "aten.native_layer_norm") == [32 * 64 * 2, 32 * size, 32 * size]


def test_rms_norm_is_one_kernel() -> None:
    def run(on: bool) -> Trace:
        with VirtualGPU("T4", rules=CudaRules(fused_rms_norm=on)) as gpu:
            norm = nn.RMSNorm(64, dtype=torch.float16)
            norm(torch.zeros(32, 64, dtype=torch.float16, requires_grad=True)).sum().backward()
        return gpu.trace

    fused = [size for _, size in names(run(True))]
    assert 32 * 64 * 4 not in fused  # no fp32 copy
    assert 32 * 4 in fused
    assert 32 * 64 * 4 in [size for _, size in names(run(False))]


def adam(rules: CudaRules, **options: Any) -> Trace:
    with VirtualGPU("T4", rules=rules) as gpu:
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        optimizer = torch.optim.AdamW(layers.parameters(), **options)
        for _ in range(2):
            optimizer.zero_grad()
            layers(torch.zeros(2, 64)).sum().backward()
            optimizer.step()
    return gpu.trace


def test_optimizers_are_foreach_by_default() -> None:
    weights = 4 * 64 * 64 * 4

    def above(trace: Trace) -> int:
        step = trace.last_step()
        return step.phase_peaks()["optimizer"] - step.end_bytes

    assert above(adam(CudaRules())) == weights
    assert above(adam(CudaRules())) == above(adam(CudaRules(), foreach=True))
    assert above(adam(CudaRules(foreach_optimizers=False))) < weights


def test_step_counters_lie_on_the_host_unless_fused() -> None:
    def small(trace: Trace) -> int:
        return sum(trace.sizes[b] == 4 for b in trace.live_at(len(trace.events) - 1))

    # torch's gradient of sum() leaves no 4-byte tensor
    assert small(adam(CudaRules())) == 0
    assert small(adam(CudaRules(host_scalars=False))) == 4
    assert small(adam(CudaRules(), fused=True)) == 4


def test_embedding_backward_sorts_many_indices() -> None:
    def run(count: int) -> list[int]:
        with VirtualGPU("T4") as gpu:
            nn.Embedding(10, 8)(torch.zeros(count, dtype=torch.long)).sum().backward()
        return taken(gpu.trace, "embedding backward: sorted indices")

    assert run(3072) == []
    assert run(3073) == [4 * 8 * 3073]


def test_convolutions_are_a_caveat() -> None:
    with VirtualGPU("T4") as gpu:
        nn.Conv2d(3, 4, 3)(torch.zeros(1, 3, 8, 8))
    assert any("cuDNN" in note for note in gpu.trace.caveats)
    with VirtualGPU("T4") as gpu:
        torch.zeros(3)
    assert not any("cuDNN" in note for note in gpu.trace.caveats)


# --- what reads values


def test_a_step_that_reads_a_value_is_refused_with_its_line() -> None:
    with VirtualGPU("T4"):
        loss = torch.zeros(3).sum()
        with pytest.raises(DataDependentError) as caught:
            print(float(loss))
    text = str(caught.value)
    assert "test_cuda_rules.py:" in text
    assert "\n" not in text
    assert "leave that out of the step" in text


@pytest.mark.parametrize("read", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: bool(x.any())])
def test_so_are_other_ways_of_reading(read: Any) -> None:
    refused = pytest.raises(DataDependentError, match=r"test_cuda_rules.py:\d+ reads a tensor's value")
    with VirtualGPU("T4"), refused:
        read(torch.zeros(3))


# --- a clean interpreter


def fingerprint() -> list[Any]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    x = torch.ones(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        kinds = [torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype, x.exp().dtype]
    registered = [
        torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key)
        for op, key in (("softmax.int", "AutocastCPU"), ("exp", "AutocastCPU"), ("mv", "AutocastCPU"))
    ]
    return [
        *kinds, *registered,
        type(F.dropout(x, 0.5)), F.softmax(x, 0).grad_fn is not None,
        optimizer._get_foreach_kernels_supported_devices, len(optimizer._foreach_supported_types),
        _foreach_utils._get_foreach_kernels_supported_devices, len(_foreach_utils._foreach_supported_types),
        torch.autocast.__init__, torch.amp.GradScaler.__init__, nn.Module._apply,
        torch.cuda.memory_allocated, torch.cuda.empty_cache, torch.cuda.mem_get_info,
    ]  # fmt: skip


def test_everything_is_undone_after_errors_and_nesting() -> None:
    before = fingerprint()
    with VirtualGPU("T4"):
        with VirtualGPU("H100-80GB") as inner:
            linear_layer = nn.Linear(8, 8)
            linear_layer(torch.zeros(2, 8))
        assert taken(inner.trace, "cuBLAS workspace") == [32 * MIB]
        assert torch.zeros(4, 8, dtype=torch.float16).softmax(-1, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ZeroDivisionError), VirtualGPU("T4"):
        1 / 0  # noqa: B018
    with pytest.raises(torch.OutOfMemoryError), VirtualGPU("T4"):
        torch.zeros(2**40)
    assert fingerprint() == before
    assert not math.isnan(float(torch.softmax(torch.zeros(3), 0).sum()))


def test_real_tensors_elsewhere_are_left_alone() -> None:
    with Emulation(hardware.gpu("T4")):
        x = torch.zeros(2, 4, dtype=torch.float16, requires_grad=True)
        y = torch.softmax(x, -1, dtype=torch.float32)
        assert type(y) is torch.Tensor
        assert torch.allclose(y, torch.full((2, 4), 0.25))
        out = F.scaled_dot_product_attention(*(torch.ones(1, 1, 4, 8) for _ in range(3)))
        assert torch.allclose(out, torch.ones(1, 1, 4, 8))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.ones(3, dtype=torch.bfloat16).softmax(0).dtype == torch.bfloat16
            loss = F.cross_entropy(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long))
            assert loss.dtype == torch.float32


# --- a script that measures itself


def test_torch_cuda_answers_for_the_card() -> None:
    with VirtualGPU("T4") as gpu:
        kept = torch.zeros(2**20, device=device())
        assert torch.cuda.memory_allocated() == 4 * MIB
        assert torch.cuda.memory_reserved() == 20 * MIB
        del kept
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        free, total = torch.cuda.mem_get_info()
        assert total - free == hardware.gpu("T4").context_bytes
        torch.zeros(10)
    replay = gpu.replay()
    assert replay.peak_reserved == 20 * MIB
    assert replay.reserved == 2 * MIB
    assert replay.process_peak == 20 * MIB + (hardware.gpu("T4").context_bytes or 0)


def test_main_memory_isnt_counted_and_put_moves_in_the_order_of_cuda() -> None:
    with VirtualGPU("T4") as gpu:
        with gpu.host():
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
            model.tied = model[0].weight
        assert gpu.trace.peak_bytes == 0
        gpu.put(model)
    sizes = [gpu.trace.sizes[e] for e in gpu.trace.events if e >= 0]
    assert sizes == [4 * 8 * 4, 8 * 4, 8 * 4, 8 * 4, 8 * 4, 8 * 4, 8]


def test_half_and_to_work_on_a_fake_module() -> None:
    with VirtualGPU("T4"):
        model = nn.Linear(4, 8)
        model(torch.zeros(1, 4)).sum().backward()
        model.half()
        assert model.weight.dtype == torch.float16
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == torch.float16


def test_out_of_memory_names_the_layer_in_pytorchs_words() -> None:
    with VirtualGPU("T4", limit=512 * MIB) as gpu:
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(torch.zeros(2**16, 1024))
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of")
    assert "reserved by PyTorch but unallocated" in text
    assert "Allocation: aten.addmm in 0 (forward)" in text
    gpu.trace.validate()


def test_initialisers_may_look_at_their_draws() -> None:
    with VirtualGPU("T4"):
        assert nn.init.trunc_normal_(torch.empty(8, 8)).shape == (8, 8)
