"""What a CUDA card allocates where the CPU's operators allocate something else.

A step under fake tensors runs the CPU's operators. Its bytes are a card's bytes only after the
corrections below. Each is a named switch of `CudaRules`, with what it does and where that was read in
`RULES`; `Emulation` puts them in force for one card and takes every patch back at its end.

Three ways to correct, all scoped:

* a kernel of the dispatcher (`torch.library`) where PyTorch chooses by device what an operator becomes, and
  so what autograd saves: softmax, dropout, attention, RMS norm; and where autocast chooses by device;
* a stand-in for an operator's shape rule, or scratch memory added to it (`Emulation.operators`), where the
  same operator allocates more, or in another type, on CUDA;
* a Python patch where torch's Python asks for the device: defaults of optimizers, `autocast("cuda")`.

What isn't known is a line in `caveats`. Rounding to 512 bytes and whole blocks are `memlab.allocator`'s.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memlab.hardware import GPU
from memlab.meter import composed_of_others
from memlab.units import KIB

__all__ = ["KERNELS", "RULES", "CudaRules", "Emulation", "Rule", "choose_attention"]

aten = torch.ops.aten
#: The kernels that scaled_dot_product_attention chooses from.
KERNELS = ("flash", "efficient", "cudnn", "math")


class Rule(NamedTuple):
    """What CUDA does, and where that stands."""

    what: str
    source: str


#: The switches of `CudaRules`, one entry each. Files are PyTorch's, as of 2.13 where not said otherwise.
RULES: dict[str, Rule] = {
    "byte_dropout": Rule(
        "dropout saves a mask of one byte per value; the CPU saves a scaled mask of the input's type",
        "ATen/native/Dropout.cpp: a CUDA input with 0 < p < 1 goes to native_dropout",
    ),
    "half_to_float_softmax": Rule(
        "softmax and log_softmax of fp16 with dtype=float32 are one kernel: no float copy of the input is"
        " made or saved; other types are converted first",
        "ATen/native/SoftMax.cpp: is_cuda, Half and dtype Float call _softmax(half_to_float=True)",
    ),
    "softmax_backward_copy": Rule(
        "the backward of softmax first makes grad * output, one tensor of the gradient's size",
        "ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: Tensor tmp = grad * output",
    ),
    "attention_kernel": Rule(
        "scaled_dot_product_attention runs flash, memory-efficient, cuDNN or plain attention, chosen by type,"
        " head size, mask, grouped heads and compute capability; each saves something else",
        "ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp",
    ),
    "attention_scratch": Rule(
        "the backward of a fused attention kernel takes accumulators beside its results; the forward of plain"
        " attention a mask and a second softmax",
        "ATen/native/transformers/cuda/attention_backward.cu (CUTLASS gradient accumulators),"
        " flash_attn/flash_api.cpp (softmax_d, dq_accum, expanded dk and dv); ATen/native/SoftMax.cpp,"
        " _safe_softmax",
    ),
    "autocast_lists": Rule(
        "autocast keeps softmax, norms, losses, sums, exp, log and pow in fp32; the CPU's list is shorter,"
        " and holds cross_entropy_loss and pooling in 3D, which CUDA's doesn't",
        "ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE) and autocast_mode.cpp",
    ),
    "cublas_workspace": Rule(
        "the first matrix product of a thread takes a cuBLAS workspace that is kept: 8320 KiB, 32 MiB from"
        " compute capability 9.0 on; the forward and the backward run in two threads",
        "ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; CUBLAS_WORKSPACE_CONFIG changes it",
    ),
    "cublaslt_workspace": Rule(
        "the first addmm with a bias vector of a thread takes a cuBLASLt workspace that is kept: 1 MiB",
        "ATen/cuda/CUDABlas.cpp, CUBLASLT_WORKSPACE_SIZE; two published T4 sessions (torch 2.10, 2.14) hold"
        " it beside the cuBLAS workspace",
    ),
    "float_statistics": Rule(
        "layer norm and batch norm of 16-bit inputs save mean and deviation in fp32; the CPU's shape rule"
        " says 16 bit",
        "ATen/native/cuda/layer_norm_kernel.cu: stats in acc_type; ATen/native/cudnn/BatchNorm.cpp",
    ),
    "fused_rms_norm": Rule(
        "F.rms_norm is one kernel that saves its input and one fp32 number per row; the CPU composes it",
        "ATen/native/layer_norm.cpp, rms_norm_symint, and cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda",
    ),
    "foreach_optimizers": Rule(
        "optimizers and clip_grad_norm_ left to their default work on lists of tensors (foreach)",
        "torch/optim/optimizer.py, _default_to_fused_or_foreach",
    ),
    "host_scalars": Rule(
        "step counters of an optimizer that is neither fused nor capturable, and the two random seeds of"
        " efficient attention without dropout, lie in main memory",
        "torch/optim/adamw.py, _init_group; ATen/native/transformers/cuda/attention.cu, seed and offset",
    ),
    "embedding_scratch": Rule(
        "the backward of an embedding with more than 3072 indices sorts them: four index tensors of scratch",
        "ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda",
    ),
    "unpadded_masks": Rule(
        "transformers reads masks and positions to see whether anything is padded or packed; here it is told"
        " that nothing is, as for a batch of whole sequences, so that SDPA gets no mask",
        "transformers 5.17, masking_utils.py, find_packed_sequence_indices and fast_all",
    ),
}


@dataclass(frozen=True, kw_only=True)
class CudaRules:
    """Which corrections are in force: one switch for each entry of `RULES`, all on.

    attention: 'auto' lets the card's own rule choose (torch.nn.attention.sdpa_kernel is obeyed), or one of
        `KERNELS`. cublas_workspace_bytes and cublaslt_workspace_bytes: None stands for the card's default.
    Raises ValueError for an attention kernel that isn't one.
    """

    byte_dropout: bool = True
    half_to_float_softmax: bool = True
    softmax_backward_copy: bool = True
    attention_kernel: bool = True
    attention_scratch: bool = True
    autocast_lists: bool = True
    cublas_workspace: bool = True
    cublaslt_workspace: bool = True
    float_statistics: bool = True
    fused_rms_norm: bool = True
    foreach_optimizers: bool = True
    host_scalars: bool = True
    embedding_scratch: bool = True
    unpadded_masks: bool = True
    attention: str = "auto"
    cublas_workspace_bytes: int | None = None
    cublaslt_workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.attention not in ("auto", *KERNELS):
            raise ValueError(f"attention {self.attention!r} isn't one of auto, {', '.join(KERNELS)}")

    @classmethod
    def none(cls) -> CudaRules:
        """Every correction off: the CPU's own operators."""
        off: dict[str, Any] = {f.name: False for f in fields(cls) if f.name in RULES}
        return cls(**off)


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS's workspace per thread: ':4096:2:16:8' (KiB times count), ':4096:8' from Hopper on."""
    return (32 * 1024 if capability[0] >= 9 else 2 * 4096 + 8 * 16) * KIB


CUBLASLT_WORKSPACE = 1024 * KIB


# --- which attention kernel ---------------------------------------------------------------------------------


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """minimum_gemm_alignment: by how many values a head's size must divide for the efficient kernel."""
    half = dtype in (torch.float16, torch.bfloat16)
    least = 4 if capability[0] >= 8 else 1
    tensor_cores = capability[0] >= 8 or (capability[0] == 7 and half)
    return max(least, 8 if half else 4) if tensor_cores else least


def _permitted() -> dict[str, bool]:
    cuda: Any = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def choose_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
    capability: tuple[int, int],
) -> str:
    """The kernel that PyTorch would run on a card of this compute capability, one of `KERNELS`.

    query, key, value: (batch, heads, length, head size). grouped: enable_gqa. The switches of
    torch.backends.cuda and of torch.nn.attention.sdpa_kernel are obeyed.
    Raises RuntimeError, as PyTorch does, when no permitted kernel can run these inputs.
    """
    permitted = _permitted()
    order = ["flash", "efficient", "math", "cudnn"]
    if capability[0] in (9, 10):
        order.insert(0, order.pop())  # cuDNN first there, from cuDNN 9.15.1 on
    half = query.dtype in (torch.float16, torch.bfloat16)
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    four = query.dim() == key.dim() == value.dim() == 4
    same_heads = four and query.shape[1] == key.shape[1] == value.shape[1]
    heads = same_heads or (four and grouped and key.shape[1] == value.shape[1])
    dense = all(t.stride(-1) == 1 for t in (query, key, value)) and all(
        t.shape[-2] for t in (query, key, value)
    )

    def flash() -> bool:
        wide = sizes[0] > 224 or (sizes[0] > 192 and dropout > 0)
        if wide and trains and (capability[0] == 12 or (8, 6) <= capability <= (8, 9)):
            return False
        square = not causal or query.shape[-2] == key.shape[-2]
        types = query.dtype == torch.float16 or (query.dtype == torch.bfloat16 and capability[0] >= 8)
        return (
            capability[0] >= 8 and types and mask is None and heads and dense and square
            and len(set(sizes)) == 1 and sizes[0] <= 256
        )  # fmt: skip

    def efficient() -> bool:
        step = _alignment(query.dtype, capability)
        types = query.dtype in (torch.float16, torch.float32)
        types = types or (query.dtype == torch.bfloat16 and capability[0] >= 8)
        return (
            capability[0] >= 5 and types and same_heads and dense
            and sizes[0] == sizes[1] and not any(n % step or not n for n in sizes)
        )  # fmt: skip

    def cudnn() -> bool:
        limit = 256 if capability[0] == 9 and not trains else 128
        return (
            capability[0] >= 8 and half and heads and dense
            and not any(n % 8 or n > limit for n in sizes)
            and not (mask is not None and mask.requires_grad)
        )  # fmt: skip

    able: dict[str, Callable[[], bool]] = {
        "flash": flash,
        "efficient": efficient,
        "cudnn": cudnn,
        "math": lambda: True,
    }
    for name in order:
        if permitted[name] and able[name]():
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


# --- kernels put into the dispatcher ------------------------------------------------------------------------

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def compose(op: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own C++ composition of an operator; `op.decompose` may run a Python one that differs."""
    return op._op_dk(_COMPOSITE, *args, **kwargs)


_active: list[Emulation] = []
_library: list[Any] = []


def _emulation(tensor: Any) -> Emulation | None:
    """Who is in force for this tensor: real ones elsewhere in the process are left alone."""
    return _active[-1] if _active and isinstance(tensor, FakeTensor) else None


def _softmax(name: str, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    plain = getattr(aten, "_" + name)
    emulation = _emulation(x)
    fused = emulation is not None and emulation.rules.half_to_float_softmax
    if fused and x.dtype == torch.float16 and dtype == torch.float32:
        return plain(x, dim, True)
    return plain(x if dtype is None else x.to(dtype), dim, False)


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    emulation = _emulation(x)
    if emulation is not None and emulation.rules.byte_dropout and train and 0 < p < 1 and x.numel():
        return aten.native_dropout(x, p, train)[0]
    return compose(aten.dropout.default, x, p, train)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    emulation = _emulation(query)
    if emulation is None or not emulation.rules.attention_kernel:
        return compose(
            aten.scaled_dot_product_attention.default,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # convert_boolean_attn_mask: an additive mask of the query's type is made for each call
        low = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, torch.zeros_like(low), low)
    kernel = emulation.rules.attention
    if kernel == "auto":
        kernel = choose_attention(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, emulation.capability
        )
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if attn_mask is not None and kernel in ("efficient", "cudnn"):
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if kernel == "flash":
        size = query.shape[-1]
        if size % 8:
            pad = 8 - size % 8
            query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
            scale = size**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :size] if size % 8 else out
    if kernel == "efficient":
        if attn_mask is not None and attn_mask.shape[-1] % 16:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 16 - attn_mask.shape[-1] % 16))
            attn_mask = attn_mask[..., : key.shape[2]]
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
        )[0]
    if kernel == "cudnn":
        emulation.caveat("cuDNN attention's own workspace isn't counted")
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, saves, dropout_p, is_causal, False, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


class _RMSNorm(torch.autograd.Function):
    """What _fused_rms_norm saves and returns; values don't matter on fake tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: tuple[int, ...]) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = torch.empty(rows, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return dx, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


def _rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    emulation = _emulation(x)
    if emulation is None or not emulation.rules.fused_rms_norm:
        return compose(aten.rms_norm.default, x, normalized_shape, weight, eps)
    if weight is not None and weight.dtype != x.dtype:
        return compose(aten.rms_norm.default, x, normalized_shape, weight, eps)
    kept = x.dim() - len(normalized_shape)
    rows = (*x.shape[:kept], *(1 for _ in normalized_shape))
    apply: Any = _RMSNorm.apply
    return apply(x if x.is_contiguous() else x.contiguous(), weight, rows)


#: Operators that PyTorch composes of others, by device: name in the dispatcher -> what CUDA composes.
COMPOSED: dict[str, Callable[..., Any]] = {
    "softmax.int": partial(_softmax, "softmax"),
    "log_softmax.int": partial(_softmax, "log_softmax"),
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}

# AT_FORALL_FP32 and its likes, less what the CPU's list treats in the same way.
_TO_FLOAT = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "dist", "renorm", "logsumexp", "rms_norm", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d",
    "upsample_trilinear3d",
)  # fmt: skip
_TO_FLOAT_BY_DTYPE = (
    "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
# AT_FORALL_LOWER_PRECISION_FP and AT_FORALL_PROMOTE, less what the CPU's list treats in the same way. Weights
# aren't cached in these.
_TO_LOW = ("addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum")
_TO_WIDEST = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "tensordot", "scatter_add")
# What the CPU's list makes fp32 and CUDA's leaves alone.
_LEFT_ALONE = (
    "cross_entropy_loss", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "grid_sampler_2d", "grid_sampler_3d", "index_copy", "trace",
)  # fmt: skip
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _eligible(value):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype) for v in value)
    return value


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _float32(_: Any) -> torch.dtype:
    return torch.float32


def _low(_: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(args: Any) -> torch.dtype:
    wide = any(t.dtype == torch.float32 for t in _tensors(args) if _eligible(t))
    return torch.float32 if wide else torch.get_autocast_dtype("cpu")


def _autocast_to(name: str, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            emulation = _emulation(next(_tensors(args), None))
            if emulation is not None and emulation.rules.autocast_lists:
                dtype = choose(args)
                args = tuple(_cast(a, dtype) for a in args)
                kwargs = {k: _cast(v, dtype) for k, v in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def _autocast_by_dtype(name: str) -> Callable[..., Any]:
    """The result's type is an argument: fp32 is filled in where the caller left it out."""
    op = _overload(name)
    place = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")
    by_keyword = op._schema.arguments[place].kwarg_only

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            emulation = _emulation(args[0])
            if emulation is not None and emulation.rules.autocast_lists and _eligible(args[0]):
                if by_keyword or len(args) <= place:
                    if kwargs.get("dtype") is None:
                        kwargs["dtype"] = torch.float32
                elif args[place] is None:
                    args = (*args[:place], torch.float32, *args[place + 1 :])
            return op(*args, **kwargs)

    return kernel


def _left_alone(name: str) -> Callable[..., Any]:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        emulation = _emulation(next(_tensors(args), None))
        if emulation is not None and emulation.rules.autocast_lists:
            return (
                compose(op, *args, **kwargs)
                if composed_of_others(op)
                else _below_autocast(op, *args, **kwargs)
            )
        return _below_autocast(op, *_cast(args, torch.float32), **kwargs)

    return kernel


def _below_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
        return op(*args, **kwargs)


def _register() -> Any:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in COMPOSED.items():
        library.impl(name, kernel, "AutogradCPU")
    for names, choose in ((_TO_FLOAT, _float32), (_TO_LOW, _low), (_TO_WIDEST, _widest)):
        for name in names:
            library.impl(name, _autocast_to(name, choose), "AutocastCPU")
    for name in _TO_FLOAT_BY_DTYPE:
        library.impl(name, _autocast_by_dtype(name), "AutocastCPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced is meant
        for name in _LEFT_ALONE:
            library.impl(name, _left_alone(name), "AutocastCPU", allow_override=True)
    return library


# --- Python patches -----------------------------------------------------------------------------------------


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _foreach_by_default() -> Iterator[None]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    devices = _foreach_utils._get_foreach_kernels_supported_devices
    with ExitStack() as stack:
        for module in (optimizer, _foreach_utils):
            patch = _patched(module, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"])
            stack.enter_context(patch)
            kinds: list[Any] = module._foreach_supported_types
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        yield


@contextmanager
def _cuda_means_the_card() -> Iterator[None]:
    """`torch.autocast("cuda")` and `GradScaler("cuda")` act on the fake tensors, whose device is the CPU."""
    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
    begin, begin_scaler = autocast.__init__, scaler.__init__

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **more: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        begin(self, device_type, dtype, *args, **more)

    def init_scaler(self: Any, device: str = "cuda", *args: Any, **more: Any) -> None:
        begin_scaler(self, "cpu" if device == "cuda" else device, *args, **more)

    with _patched(autocast, "__init__", init), _patched(scaler, "__init__", init_scaler):
        yield


@contextmanager
def _nothing_padded(emulation: Emulation) -> Iterator[None]:
    """transformers decides by values which mask it builds; fake tensors have none."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        yield
        return
    tracing, packed = masks.is_tracing, masks.find_packed_sequence_indices

    def is_tracing(tensor: Any = None) -> Any:
        return tracing(None) if isinstance(tensor, FakeTensor) else tracing(tensor)

    def unpacked(position_ids: Any) -> Any:
        if not isinstance(position_ids, FakeTensor):
            return packed(position_ids)
        emulation.caveat("transformers was told that no sequence is packed or padded (rule unpadded_masks)")
        changes = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        indices = (changes != 1).cumsum(-1)
        (indices[:, -1] == 0).all()
        return None

    def all_true(tensor: Any) -> Any:
        return True if isinstance(tensor, FakeTensor) else tensor.sum() == tensor.numel()

    with ExitStack() as stack:
        stack.enter_context(_patched(masks, "is_tracing", is_tracing))
        stack.enter_context(_patched(masks, "find_packed_sequence_indices", unpacked))
        if hasattr(masks, "fast_all"):
            stack.enter_context(_patched(masks, "fast_all", all_true))
        yield


# --- one card's rules in force ------------------------------------------------------------------------------


class Recorder(Protocol):
    """What a meter offers to rules."""

    def scratch(self, size: int, name: str) -> None:
        """Memory that an operator takes and gives back."""

    def workspace(self, size: int, name: str) -> int:
        """Memory that a library takes and keeps; returns its block."""

    def release(self, block: int) -> None:
        """Give such a block back."""

    def seen(self, tensor: Tensor, operator: str) -> None:
        """Record an output before what follows it."""

    def on_host(self, tensor: Tensor) -> None:
        """This tensor lies in main memory."""

    @property
    def in_backward(self) -> bool: ...


#: Operators that run in cuBLAS.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_addmm_activation")


def _uses_lt(bias: Tensor, left: Tensor, right: Tensor, beta: float = 1, **_: Any) -> bool:
    """addmm_out_cuda_impl, useLtInterface: a bias vector, and matrices with more than one row and column."""
    return (
        bias.dim() == 1 and bias.is_contiguous() and beta == 1 and min(*left.shape, *right.shape) > 1
    )  # fmt: skip


class Emulation:
    """The rules of one card, in force between `with` and its end; can be nested, the innermost counts.

    `operators(recorder)` gives what a meter must call in place of operators.
    """

    def __init__(self, card: GPU, rules: CudaRules | None = None) -> None:
        self.card, self.rules = card, rules or CudaRules()
        self.capability = card.compute_capability
        self.caveats: list[str] = []
        self._stack = ExitStack()
        self._handles: set[tuple[str, bool]] = set()

    def caveat(self, text: str) -> None:
        """Something that the trace doesn't know; said once."""
        if text not in self.caveats:
            self.caveats.append(text)

    def __enter__(self) -> Emulation:
        with ExitStack() as stack:
            if not _active:
                _library.append(_register())
            _active.append(self)
            stack.callback(self._leave)
            if self.rules.foreach_optimizers:
                stack.enter_context(_foreach_by_default())
            if self.rules.unpadded_masks:
                stack.enter_context(_nothing_padded(self))
            stack.enter_context(_cuda_means_the_card())
            self._stack = stack.pop_all()
        return self

    def _leave(self) -> None:
        _active.remove(self)
        if not _active:
            _library.pop()._destroy()

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    # what stands for an operator

    def operators(self, recorder: Recorder) -> dict[str, Callable[..., Any]]:
        """Operator ('aten.mm') -> what to call in its place: `rule(op, *args, **kwargs)`."""
        rules = self.rules
        found: dict[str, Callable[..., Any]] = {}
        if rules.cublas_workspace:
            for name in _PRODUCTS:
                found[f"aten.{name}"] = partial(self._product, recorder, name)
        if rules.softmax_backward_copy:
            found["aten._softmax_backward_data"] = partial(self._softmax_backward, recorder)
        if rules.attention_scratch:
            found["aten._safe_softmax"] = partial(self._safe_softmax, recorder)
        if rules.host_scalars:
            found["aten._scaled_dot_product_efficient_attention"] = partial(self._efficient, recorder)
        if rules.attention_scratch:
            for kernel in ("efficient", "flash", "cudnn"):
                found[f"aten._scaled_dot_product_{kernel}_attention_backward"] = partial(
                    getattr(self, f"_{kernel}_backward"), recorder
                )
        if rules.float_statistics:
            found["aten.native_layer_norm"] = self._layer_norm
            found["aten.native_batch_norm"] = self._batch_norm
        if rules.embedding_scratch:
            found["aten.embedding_dense_backward"] = partial(self._embedding_backward, recorder)
        for name in ("convolution", "convolution_backward"):
            found[f"aten.{name}"] = self._convolution
        return found

    def _product(self, recorder: Recorder, name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        backward = recorder.in_backward
        first = ("cublas", backward) not in self._handles
        lt = name in ("addmm", "_addmm_activation") and ("cublasLt", backward) not in self._handles
        if first or (lt and self.rules.cublaslt_workspace and _uses_lt(*args[:3], **kwargs)):
            recorder.seen(out, f"aten.{name}")  # the output is there before the library is asked
        if first:
            self._handles.add(("cublas", backward))
            size = self.rules.cublas_workspace_bytes
            recorder.workspace(
                cublas_workspace_bytes(self.capability) if size is None else size, "cuBLAS workspace"
            )
        if lt and self.rules.cublaslt_workspace and _uses_lt(*args[:3], **kwargs):
            self._handles.add(("cublasLt", backward))
            size = self.rules.cublaslt_workspace_bytes
            recorder.workspace(CUBLASLT_WORKSPACE if size is None else size, "cuBLASLt workspace")
        return out

    def _softmax_backward(self, recorder: Recorder, op: Any, grad: Tensor, *args: Any) -> Any:
        out = op(grad, *args)
        recorder.seen(out, "aten._softmax_backward_data")
        recorder.scratch(grad.numel() * grad.element_size(), "softmax backward: grad * output")
        return out

    def _safe_softmax(self, recorder: Recorder, op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """softmax, then rows that are masked as a whole become 0: a mask and a second result."""
        out = op(x, *args, **kwargs)
        held = [
            recorder.workspace(out.numel() * out.element_size(), "plain attention: softmax"),
            recorder.workspace(x.numel(), "plain attention: x == -inf"),
        ]
        recorder.seen(out, "aten._safe_softmax")
        for block in held:
            recorder.release(block)
        return out

    def _efficient(self, recorder: Recorder, op: Any, *args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        dropout = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
        if not dropout:
            recorder.on_host(result[2])
            recorder.on_host(result[3])
        return result

    def _efficient_backward(self, recorder: Recorder, op: Any, *args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        for gradient in result:
            if isinstance(gradient, Tensor):
                recorder.seen(gradient, "aten._scaled_dot_product_efficient_attention_backward")
        query, key = args[1], args[2]
        batch, heads, length, size = query.shape
        if query.dtype == torch.float32:
            name = "efficient attention backward: grad_out * out"
            recorder.scratch(batch * heads * length * size * 4, name)
        block = 64 if size <= 64 or query.dtype == torch.float32 else 128
        strips = -(-key.shape[2] // block) * -(-size // block)
        recorder.scratch(batch * heads * length * 4, "efficient attention backward: delta")
        recorder.scratch(
            batch * heads * strips * (4 * block * block + 16), "efficient attention backward: accumulators"
        )
        return result

    def _flash_backward(self, recorder: Recorder, op: Any, *args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        for gradient in result:
            if isinstance(gradient, Tensor):
                recorder.seen(gradient, "aten._scaled_dot_product_flash_attention_backward")
        query, key = args[1], args[2]
        batch, heads, length, size = query.shape
        length = -(-length // 128) * 128
        size = -(-size // 32) * 32
        scratch = batch * heads * length * 4 + batch * length * heads * size * 4
        if key.shape[1] != heads:
            scratch += 2 * batch * key.shape[2] * heads * query.shape[-1] * query.element_size()
        recorder.scratch(scratch, "flash attention backward: softmax_d, dq_accum, expanded dk and dv")
        return result

    def _cudnn_backward(self, recorder: Recorder, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.caveat("cuDNN attention's own workspace isn't counted")
        return op(*args, **kwargs)

    def _layer_norm(self, op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, mean, rstd = op(x, *args, **kwargs)
        if mean.dtype in (torch.float16, torch.bfloat16):
            mean, rstd = mean.float(), rstd.float()
        return out, mean, rstd

    def _batch_norm(self, op: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, *statistics = op(x, *args, **kwargs)
        return (out, *(s.float() for s in statistics))

    def _embedding_backward(
        self, recorder: Recorder, op: Any, grad: Tensor, indices: Tensor, *args: Any
    ) -> Any:
        count = indices.numel()
        if count > 3072:
            recorder.scratch(count * indices.element_size() * 4, "embedding backward: sorted indices")
        return op(grad, indices, *args)

    def _convolution(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.caveat(
            "cuDNN chooses its algorithm and workspace at run time (up to some hundred MiB, given back after"
            " each convolution): not counted"
        )
        return op(*args, **kwargs)
