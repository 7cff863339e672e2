"""A training step with no memory: the same code on fake tensors, which have shapes and no storage.

    with VirtualGPU("A100-80GB") as gpu:
        work = workload("llama2-70b", Recipe(precision="bf16"), device())
        work.step()
    print(gpu.trace)

PyTorch's FakeTensorMode runs every operator's shape rule instead of its kernel; the meter records the
storages. Any size can be traced on any machine, and the CPU's own step gives the same trace to the byte.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memlab import hardware
from memlab.hardware import GPU
from memlab.meter import Meter, torch_size
from memlab.trace import Trace

__all__ = ["VirtualGPU", "device"]

_active: list[VirtualGPU] = []


def device() -> torch.device:
    """Where to put a model and its data: CUDA if the machine has it, else the CPU.

    Inside a `VirtualGPU` it is the CPU device, on which the fake tensors stand for those of the card.
    """
    return torch.device("cuda" if not _active and torch.cuda.is_available() else "cpu")


class VirtualGPU:
    """Inside it every new tensor is fake, and every allocation is recorded in `trace`.

    gpu: a card's name or a `hardware.GPU`; None stands for this machine's CPU rules and no limit.
    limit: bytes; live tensors beyond it raise `torch.OutOfMemoryError`. Default: the card's capacity.
    lines: also record the line of the caller's source for each block.

    Tensors made before can't be used inside: make the model, the batch and the optimizer in the same block.
    Raises UnknownNameError for a card that isn't known.
    """

    def __init__(
        self, gpu: str | GPU | None = None, *, limit: int | None = None, lines: bool = False
    ) -> None:
        self.gpu = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
        if limit is None and self.gpu is not None:
            limit = self.gpu.memory_bytes
        self._mode = _Mode()
        self._meter = _CardMeter(budget=limit, lines=lines, device="cpu")
        self._meter._rules |= CPU_RULES
        self._stack = ExitStack()

    def __enter__(self) -> VirtualGPU:
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            stack.enter_context(self._meter)
            _active.append(self)
            stack.callback(_active.remove, self)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def phase(self, name: str) -> Any:
        """Mark a phase by hand, as `Meter.phase`."""
        return self._meter.phase(name)

    @property
    def trace(self) -> Trace:
        """What was recorded (inside the block: so far)."""
        trace = self._meter.trace
        trace.info["device"] = self.gpu.name if self.gpu is not None else "cpu (fake)"
        if self.gpu is not None:
            note = (
                f"the operators are the CPU's: what {self.gpu.name} allocates beside or instead of them"
                " (library workspaces, byte-wide dropout masks, rounding to 512 B) is not in it yet"
            )
            if note not in trace.caveats:
                trace.caveats.append(note)
        return trace


def _batch_norm(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Statistics of a 16-bit batch are fp32 where weight or running mean are; the shape rule says 16-bit.

    Source: ATen/native/Normalization.cpp (is_mixed_type), checked against a real step.
    """
    out, *statistics = func(x, *args, **kwargs)
    if any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in args):
        statistics = [s.float() for s in statistics]
    return (out, *statistics)


#: Where PyTorch's shape rule for the CPU differs from what the kernel allocates: operator -> correction.
CPU_RULES = {"aten.native_batch_norm": _batch_norm}


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A deep copy of a fake model (nn.TransformerEncoder makes them) stays in the same mode."""

    def __deepcopy__(self, memo: object) -> _Mode:
        return self


class _CardMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter of fake tensors that speaks as CUDA does."""

    def _found(self, tensor: Tensor, owner: int = 4) -> Any:
        if not isinstance(tensor, FakeTensor):
            raise RuntimeError(
                f"a real tensor of shape {tuple(tensor.shape)} is used inside a VirtualGPU: make the model,"
                " the batch and the optimizer inside the same `with` block"
            )
        return super()._found(tensor, owner)

    def _out_of_memory(self, size: int, live: int, budget: int, where: str) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {torch_size(size)}."
            f" GPU 0 has a total capacity of {torch_size(budget)} of which"
            f" {torch_size(max(0, budget - live))} is free."
            f" Of the allocated memory {torch_size(live)} is allocated by PyTorch, and 0 bytes is reserved by"
            f" PyTorch but unallocated. Allocation: {where}."
        )
