"""A training step with no memory: the same code on fake tensors, which have shapes and no storage.

    with VirtualGPU("A100-80GB") as gpu:
        work = workload("llama2-70b", Recipe(precision="bf16"), device())
        work.step()
    print(gpu.trace)

PyTorch's FakeTensorMode runs every operator's shape rule instead of its kernel; the meter records the
storages. Any size can be traced on any machine, and the CPU's own step gives the same trace to the byte.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import hardware
from memlab.allocator import Allocator, AllocatorConfig, OutOfMemory, Replay, replay
from memlab.allocator import Block as BlockOf
from memlab.cuda_rules import COMPOSED, CudaRules, Emulation
from memlab.hardware import GPU
from memlab.meter import Meter, composed_of_others, torch_size
from memlab.trace import Trace
from memlab.units import unknown_name

__all__ = ["DataDependentError", "VirtualGPU", "device"]

# torch logs the traceback of a shape error that it raises as well.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(
    lambda record: not str(record.msg).startswith("failed while attempting to run meta")
)

_active: list[VirtualGPU] = []


def device() -> torch.device:
    """Where to put a model and its data: CUDA if the machine has it, else the CPU.

    Inside a `VirtualGPU` it is the CPU device, on which the fake tensors stand for those of the card.
    """
    return torch.device("cuda" if not _active and torch.cuda.is_available() else "cpu")


class VirtualGPU:
    """Inside it every new tensor is a fake one on that card, and every allocation is recorded in `trace`.

    gpu: a card's name or a `hardware.GPU`; None stands for this machine's CPU rules and no limit.
    limit: bytes in place of the card's capacity (without a card: bytes of live tensors).
    rules: which of CUDA's corrections are applied (`cuda_rules.CudaRules`; default: all).
    config: the caching allocator's options, as `allocator.AllocatorConfig` or `PYTORCH_ALLOC_CONF` has them.
    lines: also record the line of the caller's source for each block.

    A card's caching allocator runs along, with its blocks, segments and capacity: the allocation that the
    card couldn't serve raises `torch.OutOfMemoryError` in PyTorch's words. `replay()` gives what it reserved.

    Tensors made before can't be used inside: make the model, the batch and the optimizer in the same block.
    What a program keeps in main memory is made in `with gpu.host():` and moved by `gpu.put(module)`.
    Raises UnknownNameError for a card that isn't known, ValueError for options that PyTorch refuses.
    """

    def __init__(
        self,
        gpu: str | GPU | None = None,
        *,
        limit: int | None = None,
        rules: CudaRules | None = None,
        config: AllocatorConfig | str | None = None,
        lines: bool = False,
    ) -> None:
        self.gpu = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
        self.config = AllocatorConfig.parse(config) if isinstance(config, str) else config
        self._mode = _Mode()
        self._stack = ExitStack()
        self._emulation: Emulation | None = None
        if self.gpu is None:
            self._meter = _CardMeter(budget=limit, lines=lines, device="cpu")
            self._meter._rules |= RULES | CPU_RULES
            return
        self.capacity = self.gpu.memory_bytes if limit is None else limit
        self._emulation = Emulation(self.gpu, rules)
        self._meter = _CardMeter(lines=lines, device="cpu")
        self._meter._allocator = Allocator(self.config, capacity=self.capacity, context=self.context_bytes)
        self._meter._host_scalars = self._emulation.rules.host_scalars
        self._meter._rules |= RULES | CPU_RULES | self._emulation.operators(self._meter)
        for name, kernel in COMPOSED.items():
            self._meter._composed[f"aten.{name.partition('.')[0]}"] = kernel

    def __enter__(self) -> VirtualGPU:
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            if self._emulation is not None:
                stack.enter_context(self._emulation)
            stack.enter_context(self._meter)
            stack.enter_context(_fake_modules_move())
            if self.gpu is not None:
                stack.enter_context(_cuda_functions(self))
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

    @contextmanager
    def host(self) -> Iterator[None]:
        """What is made inside lies in main memory: `trace_of("host")` counts it, `trace` doesn't."""
        before, self._meter._hosting = self._meter._hosting, True
        try:
            yield
        finally:
            self._meter._hosting = before

    def put(self, module: nn.Module) -> nn.Module:
        """Move a module made in `host()` to the card, tensor by tensor in the order of `module.cuda()`.

        Children come first, then a module's own parameters, then its buffers; a shared tensor moves once.
        """
        moved: dict[int, Tensor] = {}

        def to_card(tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                copy = torch.empty_like(tensor)
                if isinstance(tensor, nn.Parameter):
                    copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                moved[id(tensor)] = copy
            return moved[id(tensor)]

        def move(part: nn.Module) -> None:
            for child in part.children():
                move(child)
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = to_card(tensor)  # type: ignore[assignment]

        kept = [*module.parameters(), *module.buffers()]  # an id must not be used twice
        with torch.no_grad():
            move(module)
        del kept
        return module

    @property
    def context_bytes(self) -> int:
        """What the CUDA context takes of the card; 0 where it isn't known."""
        return (self.gpu.context_bytes or 0) if self.gpu is not None else 0

    @property
    def live_bytes(self) -> int:
        """What is alive on the card now, as requested."""
        return self._meter.live_bytes

    def replay(self, *, order: str = "split", limited: bool = False) -> Replay:
        """What the card's caching allocator did: allocated, reserved and process bytes, by phase and in all.

        order: where the driver puts segments (`allocator.ORDERS`). limited: with the card's capacity.
        """
        trace = self.trace
        return replay(
            trace.events, trace.sizes, self.config, marks=trace.marks, context=self.context_bytes,
            capacity=self.capacity if limited and self.gpu is not None else None, order=order,
            empty_cache=trace.info.get("empty_cache", ()),
        )  # fmt: skip

    def trace_of(self, place: str) -> Trace:
        """What was recorded in one place (inside the block: so far): 'card' or 'host'.

        The host is main memory: what is made in `host()`, what a rule or an offload keeps there, and tensors
        on the 'meta' device. Nothing of it counts against the card's capacity or `limit`.
        Raises UnknownNameError for any other place.
        """
        if place not in ("card", "host"):
            raise unknown_name("place", place, ("card", "host"))
        return self.trace if place == "card" else self._meter.trace_of(_HOST.type)

    @property
    def trace(self) -> Trace:
        """What was recorded of the card (inside the block: so far)."""
        trace = self._meter.trace
        trace.info["device"] = self.gpu.name if self.gpu is not None else "cpu (fake)"
        if self.gpu is not None and self._emulation is not None:
            notes = [
                "scratch of sorting, reduction and indexing kernels isn't counted (as a rule below 1 MiB)",
                *self._emulation.caveats,
            ]
            if self.gpu.context_bytes is None:
                notes.append(f"the CUDA context of {self.gpu.name} isn't known (0.14 to 2 GB): 0 is counted")
            trace.caveats += [note for note in notes if note not in trace.caveats]
        return trace


@contextmanager
def _cuda_functions(gpu: VirtualGPU) -> Iterator[None]:
    """torch.cuda's memory functions answer for the card: a script that measures itself runs as it is."""
    allocator = gpu._meter._allocator
    assert allocator is not None

    def answer(name: str) -> Any:
        return lambda device=None: getattr(allocator, name)

    functions: dict[str, Any] = {
        "memory_allocated": answer("allocated"),
        "memory_reserved": answer("reserved"),
        "max_memory_allocated": answer("peak_allocated"),
        "max_memory_reserved": answer("peak_reserved"),
        "reset_peak_memory_stats": lambda device=None: allocator.reset_peaks(),
        "synchronize": lambda device=None: None,
        "empty_cache": gpu._meter.empty_cache,
        "mem_get_info": lambda device=None: (gpu.capacity - allocator.process, gpu.capacity),
    }
    before = {name: getattr(torch.cuda, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(torch.cuda, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cuda, name, function)


@contextmanager
def _fake_modules_move() -> Iterator[None]:
    """`module.half()` and `.to(dtype)` on fake tensors: torch 2.13 refuses them ("couldn't swap")."""
    apply: Any = nn.Module._apply

    def fake_apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if not any(isinstance(p, FakeTensor) for p in self._parameters.values()):
            result: nn.Module = apply(self, fn, recurse)
            return result
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter is not None:
                    gradient = parameter.grad
                    parameter.grad = None
                    parameter.data = fn(parameter)
                    if gradient is not None:
                        parameter.grad = fn(gradient)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = fake_apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _batch_norm(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Statistics of a 16-bit batch are fp32 where weight or running mean are; the shape rule says 16-bit.

    Source: ATen/native/Normalization.cpp (is_mixed_type), checked against a real step.
    """
    out, *statistics = func(x, *args, **kwargs)
    if any(isinstance(a, Tensor) and a.dtype == torch.float32 for a in args):
        statistics = [s.float() for s in statistics]
    return (out, *statistics)


def _arrived(func: Any, tensor: Tensor) -> Tensor:
    """Waiting for a collective gives back its result; the shape rule makes a new tensor.

    Source: torch/csrc/distributed/c10d/Functional.cpp, wait_tensor.
    """
    return tensor


#: Where PyTorch's shape rule differs from what the kernel allocates, on every device: operator -> correction.
RULES = {"_c10d_functional.wait_tensor": _arrived}
#: The same for kernels of the CPU.
CPU_RULES = {"aten.native_batch_norm": _batch_norm}


class _Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A deep copy of a fake model (nn.TransformerEncoder makes them) stays in the same mode."""

    def __deepcopy__(self, memo: object) -> _Mode:
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper costs a tenth of a trace


#: Tensors of main memory are recorded under this device, so that a trace of the card leaves them out.
_HOST = torch.device("meta")


class _CardMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter of fake tensors that speaks as CUDA does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._allocator: Allocator | None = None
        self._placed: dict[int, BlockOf] = {}
        self._emptied: list[int] = []
        self._hosting = False
        self._host_scalars = False
        self._composed: dict[str, Any] = {}

    def _classify(self, func: Any) -> Any:
        kind, name, call = super()._classify(func)
        if self._allocator is not None:
            if (kernel := self._composed.get(str(getattr(func, "_overloadpacket", "")))) is not None:
                if composed_of_others(func):
                    call = partial(self._seen_inside, kernel)
            elif _DATA_DEPENDENT & set(getattr(func, "tags", ())):
                call = partial(self._valueless, func)
        known = self._kinds[func] = (kind, name, call)
        return known

    def _seen_inside(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            return kernel(*args, **kwargs)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _valueless(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """An optimizer reads its step counter, torch.nn.init whether a draw is out of range.

        Neither decides a size. Whatever else reads a value is refused with its line.
        """
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if func is torch.ops.aten._local_scalar_dense.default:
                if self._optimizing:
                    return 1.0
                if _called_from(_INIT):
                    return args[0].dtype.is_floating_point and 0.0  # "is any value out of range": no
            raise DataDependentError(func, self._users_line()) from error

    def _users_line(self) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_NOT_USER):
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    # what lies on the host

    def on_host(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._host_block(storage, storage.nbytes(), tuple(tensor.shape), tensor.dtype, 0)

    def _host_block(
        self, storage: torch.UntypedStorage, size: int, shape: Any, dtype: torch.dtype, operator: int
    ) -> None:
        self._events.append(len(self._sizes))
        self._add(storage, storage._cdata, size, shape, dtype, _HOST, operator, self._module, 4, 0)

    def _taken(
        self, storage: torch.UntypedStorage, size: int, shape: Any, dtype: Any, device: Any, operator: int
    ) -> None:
        counter = self._host_scalars and self._optimizing and not shape
        if self._hosting or (counter and self._record.names[operator] == "aten.lift_fresh"):
            self._host_block(storage, size, shape, dtype, operator)
            return
        super()._taken(storage, size, shape, dtype, device, operator)

    # scratch and workspaces

    @property
    def in_backward(self) -> bool:
        return self._task != -1

    def seen(self, tensor: Tensor, operator: str) -> None:
        self._allocated(tensor, self._record.intern(operator))

    def scratch(self, size: int, name: str) -> None:
        self.release(self.workspace(size, name))

    def release(self, block: int) -> None:
        self._events.append(~block)
        self._free(block)
        self._live["cpu"] -= self._sizes[block]

    def workspace(self, size: int, name: str) -> int:
        block, record = len(self._sizes), self._record
        self._events.append(block)
        self._sizes.append(size)
        self._owners.append(4)
        record.shapes.append(())
        self._modules.append(self._module)
        self._operators.append(record.intern(name))
        self._phases.append(self._phase_index)
        self._dtypes.append(record.intern("uint8"))
        self._lines.append(0)
        self._devices.append(torch.device("cpu"))
        try:
            self._place(block, size)
        except torch.OutOfMemoryError:
            self._forget_last()
            raise
        self._live["cpu"] += size
        return block

    def _forget_last(self) -> None:
        """The newest block was never given out by the card."""
        if self._events and self._events[-1] == len(self._sizes) - 1:
            self._events.pop()
        for column in (self._sizes, self._owners, self._record.shapes, self._devices):
            column.pop()
        for column in self._record.columns.values():
            column.pop()

    # the card's allocator

    def empty_cache(self) -> None:
        if self._allocator is not None:
            self._allocator.empty_cache()
            self._emptied.append(len(self._events))

    def trace_of(self, device: str) -> Trace:
        trace = super().trace_of(device)
        if self._emptied:
            chosen = [d.type == device for d in self._devices]
            late = [p for p, block in self._late if chosen[block]]
            trace.info["empty_cache"] = [
                sum(chosen[e if e >= 0 else ~e] for e in self._events[:position])
                + sum(p <= position for p in late)
                for position in self._emptied
            ]
        return trace

    def _add(
        self, storage: Any, key: int, size: int, shape: Any, dtype: Any, device: Any, operator: int,
        module: int, owner: int, line: int,
    ) -> None:  # fmt: skip
        super()._add(storage, key, size, shape, dtype, device, operator, module, owner, line)
        if self._allocator is not None and device != _HOST:
            try:
                self._place(len(self._sizes) - 1, size)
            except torch.OutOfMemoryError:
                if self._alive.pop(key, None) is not None:
                    self._live[device.type] -= size
                self._forget_last()
                raise

    def _refuse(self, *call: Any) -> None:
        if not self._hosting:
            super()._refuse(*call)

    def _place(self, block: int, size: int) -> None:
        if self._allocator is None:
            return
        try:
            self._placed[block] = self._allocator.malloc(size)
        except OutOfMemory as error:
            names = self._record.names
            where = names[self._operators[block]]
            if names[self._modules[block]]:
                where += f" in {names[self._modules[block]]}"
            raise torch.OutOfMemoryError(f"{error} Allocation: {where} ({self._phase}).") from None

    def _free(self, block: int) -> None:
        placed = self._placed.pop(block, None)
        if placed is not None and self._allocator is not None:
            self._allocator.free(placed)

    def _died(self, alive: Any) -> None:
        super()._died(alive)
        if self._allocator is not None:
            self._free(alive.block)

    def _resized(self, storage: torch.UntypedStorage, *args: Any) -> None:
        old = self._alive[storage._cdata].block
        super()._resized(storage, *args)
        current = self._alive.get(storage._cdata)
        if self._allocator is not None and (current is None or current.block != old):
            self._free(old)

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


_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INIT = str(Path(torch.nn.init.__file__))


def _called_from(path: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == path:
            return True
        frame = frame.f_back
    return False


_NOT_USER = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")


class DataDependentError(DataDependentOutputException):
    """A step reads a value, which a fake tensor doesn't have: what follows could depend on it."""

    def __init__(self, func: Any, line: str) -> None:
        super().__init__(func)
        self.line = line

    def __str__(self) -> str:
        return (
            f"{self.line} reads a tensor's value ({self.func}), and the tensors of a virtual GPU have none:"
            " leave that out of the step, or give the number by hand"
        )
