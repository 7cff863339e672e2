"""Records the `Trace` of a real piece of training: every tensor storage, when it comes and when it goes.

    with Meter(model, optimizer) as meter:
        step()
    print(meter.trace)

A dispatch mode sees every operator that PyTorch runs, in the forward, the backward and the optimizer step. A
new storage among its outputs is an allocation; a weak reference to that storage tells of its end. So views,
slices, tied weights and shared storages count once, in-place operators count nothing, nothing is kept alive.

Who owns a block is decided by what becomes of it, so it is known at the end and not when the block is made:

* parameters: parameters and buffers of modules, leaves that gradients are accumulated into;
* gradients: what is stored in `.grad`;
* optimizer_states: what stands in `optimizer.state`, and master weights that belong to an optimizer alone;
* activations: what the forward leaves alive when the backward begins (saved tensors, autocast's
  saved copies of weights, logits, loss, the batch), and what recomputation leaves alive in the backward;
* temporaries: all the rest.

What no dispatch mode can see is memory that a kernel takes and gives back inside one operator (library
workspaces, layout copies). `profiled` reads the allocator's own log for that.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memlab.trace import SETUP, Trace
from memlab.units import CONSUMERS, format_bytes

__all__ = ["AllocatorLog", "Meter", "profiled", "torch_size"]

PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, TEMPORARIES = range(len(CONSUMERS))
#: The sequence number of the node that stores a gradient: it belongs to no operator of the forward.
_ACCUMULATE = 2**64 - 1

_NEW, _ALIAS, _DETACH, _RESIZING, _FRESH, _NOTHING = range(6)
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::set_", "inductor::resize_storage_bytes_"}
#: How `torch.tensor` and `torch.from_numpy` hand over memory that no operator has made.
_FRESHENS = {"aten::lift_fresh", "aten::lift"}
#: Operators whose output size stands in their arguments: a budget refuses them before they run.
_SIZED = {"empty", "zeros", "ones", "full", "rand", "randn", "empty_strided", "randint"}
_SIZED |= {f"new_{name}" for name in ("empty", "zeros", "ones", "full", "empty_strided")}
_LIKE = {f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")} | {"clone"}

#: Tensors that hold their own memory. Wrappers (DTensor, a quantised tensor) unwrap themselves, and the
#: operators on their parts come back to the meter.
_PLAIN = {Tensor, FakeTensor, nn.Parameter}
_NO_DISPATCH = Tensor.__torch_dispatch__

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its block."""

    __slots__ = ("block", "device", "key", "size")
    block: int
    device: str
    key: int
    size: int


class Meter(TorchDispatchMode):
    """Measures the live tensor bytes of what runs inside it, on CPU, on CUDA or with fake tensors.

    model, optimizer: name what exists already; both may also be made inside. Without them modules, gradients
        and optimizer states are still recognised when they are used.
    budget: bytes on the metered device. The allocation that would exceed it raises
        `torch.OutOfMemoryError`: before the operator runs when the size stands in its arguments, else right
        after.
    lines: also record the line of the caller's source for each block (a few microseconds per block).
    device: 'cpu' or 'cuda', whose memory `trace` shows. Default: that of the first block that is not on the
        CPU, else the CPU.

    `trace` is the result (after the `with` block; inside it, what has been seen so far). `trace_of(device)`
    gives another device's. On CUDA `trace.info["cuda"]` holds the caching allocator's own peaks beside it;
    its peak counters are reset at each change of phase for that.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is measured as it runs; without this torch.compile would give up inside a meter."""
        return True

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        budget: int | None = None,
        *,
        lines: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if budget is not None and budget <= 0:
            raise ValueError(f"a budget is a positive number of bytes, not {budget}")
        self.budget, self.lines = budget, lines
        self._model, self._optimizer = model, optimizer
        self._device = None if device is None else torch.device(device).type
        self._live: defaultdict[str, int] = defaultdict(int)  # device type -> bytes

        self._record = Trace()
        self._sizes, self._owners, self._events = (
            self._record.sizes,
            self._record.consumers_of,
            self._record.events,
        )
        self._modules, self._operators, self._phases, self._dtypes, self._lines = (
            self._record.columns[name] for name in ("module", "operator", "phase", "dtype", "line")
        )
        self._devices: list[torch.device] = []
        self._marks: list[tuple[int, str]] = [(0, SETUP)]
        self._steps: list[int] = [0]
        self._late: list[tuple[int, int]] = []  # (position, block): was alive there, seen only afterwards
        self._alive: dict[int, _Alive] = {}  # storage address -> its block; insertion order is block order
        self._shrunk: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.device] = (
            weakref.WeakKeyDictionary()
        )  # storages resized to nothing, and where they were
        self._handles: list[Any] = []
        self._trace: Trace | None = None
        self._state = "new"

        self._phase, self._phase_index = SETUP, self._record.intern(SETUP)
        self._resizing = self._record.intern("UntypedStorage.resize_")
        self._manual = False
        self._task = -1  # the autograd engine's current run, -1 outside of a backward
        self._sequence = -1
        self._optimizing = 0
        self._worked = False  # has anything but setup happened since the step began
        self._thread = 0

        self._kinds: dict[
            Any, tuple[int, int, Callable[..., Any]]
        ] = {}  # -> kind, interned name, what to call
        self._rules: dict[
            str, Callable[..., Any]
        ] = {}  # operator's name -> what stands for it (fake tensors)
        self._dtype_index: dict[torch.dtype, int] = {}
        self._user_code: dict[CodeType, bool] = {}
        self._module_index: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[int, int]] = []  # (id of the module, its interned name)
        self._module = 0
        self._recomputed_from = 0
        # Autograd numbers its nodes: the module that was active when a node was made is found by its number.
        self._node_numbers: list[int] = []
        self._node_modules: list[int] = []
        self._line_numbers: list[int] = []
        self._line_names: list[int] = []
        self._cuda: dict[str, Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper would cost more than the meter does

    # begin and end

    def __enter__(self) -> Meter:
        if self._state != "new":
            raise RuntimeError("a Meter measures once: make a new one")
        self._state = "running"
        self._thread = threading.get_ident()
        try:
            self._handles = [
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
                _ResizePatch(self),
            ]
            if self._model is not None:
                self._scan_model(self._model)
            if self._optimizer is not None:
                self._scan_optimizer(self._optimizer)
            self._begin_cuda()
            self._sequence = _sequence()
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]
        finally:
            self._keep_activations()
            self._end_cuda_phase()
            self._release()

    def _release(self) -> None:
        """Leave no hook, no patch and no reference behind."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._alive.clear()
        self._shrunk.clear()
        self._stack.clear()
        self._module_index = weakref.WeakKeyDictionary()
        self._model = self._optimizer = None
        self._user_code.clear()
        self._kinds.clear()
        self._state = "done"

    @property
    def live_bytes(self) -> int:
        """What is alive now on the metered device; without accelerator and choice, on all."""
        device = self._device or next((d for d in self._live if d not in ("cpu", "meta")), None)
        return sum(self._live.values()) if device is None else self._live[device]

    def _counts(self, device: str) -> bool:
        """Whether bytes on this device are held against the budget."""
        if self._device is not None:
            return device == self._device
        return device not in ("cpu", "meta") or all(d in ("cpu", "meta") for d in self._live)

    # the dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not _PLAIN.issuperset(types):
            return NotImplemented  # a wrapper unwraps itself: its parts come back here
        known = self._kinds.get(func) or self._classify(func)
        kind = known[0]
        task = _graph_task()
        if task == -1:
            if self._task != -1:
                self._task = -1
                self._sequence = _sequence()
            if not self._optimizing:
                if self._phase != "forward" and not self._manual and _sequence() != self._sequence:
                    self._set_phase("forward")  # autograd has made a node: something is being computed
                if kind != _FRESH:
                    self._see(args)
        elif task != self._task:
            self._task = task
            if not self._manual and self._phase != "backward":
                self._set_phase("backward")

        if self.budget is not None and kind == _NEW:
            self._refuse(func, args, kwargs or {})
        out = known[2](*args, **kwargs) if kwargs else known[2](*args)

        if kind == _ALIAS:
            return out
        if kind == _NEW:
            if isinstance(out, Tensor):
                self._allocated(out, known[1])
            else:
                for item in out:
                    if isinstance(item, Tensor):
                        self._allocated(item, known[1])
                    elif isinstance(item, (list, tuple)):
                        for tensor in item:
                            if isinstance(tensor, Tensor):
                                self._allocated(tensor, known[1])
        elif kind == _DETACH:
            # The engine hands a gradient to `.grad` by a detach under the node that accumulates.
            if task != -1 and (node := _node()) is not None and node._sequence_nr() == _ACCUMULATE:
                self._see_gradient(node.variable, out)
        elif kind == _FRESH:
            self._allocated(out, known[1])
        elif kind == _RESIZING:
            for tensor in _tensors((args, kwargs, out)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._alive:
                    self._allocated(tensor, known[1])
                else:
                    self._resized(storage, known[1], tensor.shape, tensor.dtype)
        return out

    def _classify(self, func: Any) -> tuple[int, int, Callable[..., Any]]:
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator
            known = self._kinds[func] = (_NEW, self._record.intern(str(func)), func)
            return known
        returned = schema.returns
        if schema.name in _FRESHENS:
            kind = _FRESH
        elif schema.name in _RESIZES or any(a.is_out for a in schema.arguments):
            kind = _RESIZING
        elif schema.name == "aten::detach":
            kind = _DETACH
        elif not returned:
            kind = _NOTHING
        elif all(r.alias_info is not None for r in returned) or not _holds_tensors(returned):
            kind = _ALIAS
        else:
            kind = _NEW
        name = str(func._overloadpacket)
        rule = self._rules.get(name)
        call = func if rule is None else partial(rule, func)
        if rule is None and composed_of_others(func):
            call = partial(self._decomposed, func)
        known = self._kinds[func] = (kind, self._record.intern(name), call)
        return known

    def _decomposed(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _allocated(self, tensor: Tensor, operator: int) -> None:
        """Register the storage of an operator's output, unless it is known."""
        if type(tensor) not in _PLAIN and type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
            return  # a wrapper has no memory of its own
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        if not size:
            return
        self._taken(storage, size, tensor.shape, tensor.dtype, tensor.device, operator)

    def _taken(
        self,
        storage: torch.UntypedStorage,
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        operator: int,
    ) -> None:
        """A new block begins: find its module and line, note it, and hold it against the budget."""
        module, owner, line = self._module, TEMPORARIES, 0
        if self._task != -1:
            node = _node()
            if node is not None:
                number = node._sequence_nr()
                if number != _ACCUMULATE:
                    if not self._stack:
                        at = bisect_right(self._node_numbers, number) - 1
                        module = self._module = self._node_modules[at] if at >= 0 else 0
                        if self.lines:
                            at = bisect_right(self._line_numbers, number) - 1
                            line = self._line_names[at] if at >= 0 else 0
                elif self._takes_gradient(node.variable):
                    owner = GRADIENTS
        elif self.lines:
            line = self._user_line()
        self._events.append(len(self._sizes))
        self._add(storage, storage._cdata, size, shape, dtype, device, operator, module, owner, line)
        if self.budget is not None and self._counts(device.type) and self.live_bytes > self.budget:
            self._raise_out_of_memory(size, self.live_bytes - size, operator, module)

    def _add(
        self,
        storage: torch.UntypedStorage,
        key: int,
        size: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        operator: int,
        module: int,
        owner: int,
        line: int,
    ) -> None:
        alive = _Alive(storage, self._died)
        alive.block, alive.key, alive.size, alive.device = len(self._sizes), key, size, device.type
        self._alive[key] = alive
        self._live[alive.device] += size
        dtype_index = self._dtype_index.get(dtype)
        if dtype_index is None:
            dtype_index = self._dtype_index[dtype] = self._record.intern(str(dtype).removeprefix("torch."))
        self._sizes.append(size)
        self._owners.append(owner)
        self._record.shapes.append(shape)
        self._modules.append(module)
        self._operators.append(operator)
        self._phases.append(self._phase_index)
        self._dtypes.append(dtype_index)
        self._lines.append(line)
        self._devices.append(device)

    def _died(self, alive: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(alive, _Alive)
        if self._alive.get(alive.key) is alive:
            del self._alive[alive.key]
            self._events.append(~alive.block)
            self._live[alive.device] -= alive.size

    def _see(self, values: Any) -> None:
        """Register what was made out of sight: before the meter began, in another thread, by NumPy."""
        for value in values:
            if isinstance(value, Tensor):
                if value.untyped_storage()._cdata not in self._alive:
                    self._found(value)
            elif isinstance(value, (list, tuple)):
                self._see(value)

    def _found(self, tensor: Tensor, owner: int = TEMPORARIES) -> _Alive | None:
        """The block of a tensor; one that isn't known counts as alive since the step began."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        alive = self._alive.get(key)
        if alive is None:
            size = storage.nbytes()
            if not size:
                return None
            self._late.append((self._steps[-1], len(self._sizes)))
            before, self._phase_index = self._phase_index, self._record.intern(SETUP)
            self._add(storage, key, size, tensor.shape, tensor.dtype, tensor.device, 0, 0, TEMPORARIES, 0)
            self._phase_index = before
            alive = self._alive[key]
        if owner != TEMPORARIES:
            self._owners[alive.block] = owner
        return alive

    def _resized(
        self, storage: torch.UntypedStorage, operator: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """A known storage whose size may have changed: new memory is taken before the old is given back."""
        alive, size = self._alive[storage._cdata], storage.nbytes()
        if alive.size == size:
            return
        old = alive.block
        self._live[alive.device] -= alive.size
        if size:
            self._add(
                storage, alive.key, size, shape, dtype, self._devices[old], operator,
                self._modules[old], self._owners[old], self._lines[old],
            )  # fmt: skip
            self._events.append(len(self._sizes) - 1)
        else:
            del self._alive[alive.key]
            self._shrunk[storage] = self._devices[old]
        self._events.append(~old)
        if self.budget is None or not size or not self._counts(alive.device):
            return
        live = self.live_bytes - size + alive.size
        if live + size > self.budget:
            self._raise_out_of_memory(size, live, operator, self._modules[old])

    # phases and steps

    def phase(self, name: str) -> _Phase:
        """From here on the phase is `name`; in `with meter.phase(name):`, nothing changes it inside.

        For steps written by hand: what a `with meter.phase("optimizer")` leaves alive is an optimizer state,
        and its end closes a step. Raises UnknownNameError for a phase that isn't one.
        """
        Trace().mark(name)
        return _Phase(self, name)

    def _set_phase(self, name: str) -> None:
        if name == self._phase:
            return
        if name in ("backward", "forward"):
            self._keep_activations()
        self._end_cuda_phase()
        self._marks.append((len(self._events), name))
        self._phase, self._phase_index = name, self._record.intern(name)
        self._sequence = _sequence()
        self._worked = self._worked or name != SETUP

    def _end_step(self) -> None:
        self._set_phase(SETUP)
        self._steps.append(len(self._events))
        self._worked = False

    def _keep_activations(self) -> None:
        """What the forward, or the time before it, has left alive without another owner is an activation."""
        kept = {self._record.intern("forward"), self._record.intern(SETUP)}
        for alive in self._alive.values():
            if self._phases[alive.block] in kept:
                self._keep(alive.block)

    def _keep(self, block: int) -> None:
        # Weights gathered by a resize that live from forward to backward (FSDP) are no activations.
        if self._owners[block] == TEMPORARIES and self._operators[block] != self._resizing:
            self._owners[block] = ACTIVATIONS

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            if _graph_task() != -1:
                self._recomputed_from = len(self._sizes)
            else:
                self._task = -1
                self._scan_model(module)
                if not self._manual and not self._optimizing:
                    self._set_phase("forward")
        index = self._module_index.get(module)
        if index is None:
            self._name_modules(module)
            index = self._module_index[module]
        self._stack.append((id(module), index))
        self._now_in(index)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if not any(entry == id(module) for entry, _ in self._stack):
            return
        while self._stack.pop()[0] != id(module):
            pass
        self._now_in(self._stack[-1][1] if self._stack else 0)
        if not self._stack and _graph_task() != -1:
            for alive in reversed(self._alive.values()):
                if alive.block < self._recomputed_from:
                    break
                self._keep(alive.block)

    def _now_in(self, index: int) -> None:
        self._module = index
        if threading.get_ident() != self._thread:
            return  # CUDA recomputes in the engine's thread, which numbers its nodes anew
        number = _sequence()
        if self._node_numbers and self._node_numbers[-1] == number:
            self._node_modules[-1] = index
        else:
            self._node_numbers.append(number)
            self._node_modules.append(index)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._optimizing and not self._manual:
            if not self._worked and len(self._steps) > 1:
                self._steps.pop()  # a second optimizer belongs to the same step
            self._set_phase("optimizer")
        self._optimizing += 1
        self._task = -1
        self._module = 0
        self._scan_optimizer(optimizer)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizing = max(0, self._optimizing - 1)
        self._scan_optimizer(optimizer)
        if not self._optimizing and not self._manual and _graph_task() == -1:
            self._end_step()

    # who owns what

    def _name_modules(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            if module not in self._module_index:
                self._module_index[module] = self._record.intern(name or type(module).__name__)

    def _scan_model(self, root: nn.Module) -> None:
        if root not in self._module_index:
            self._name_modules(root)
        for module in root.modules():
            index = self._module_index.get(module)
            if index is None:
                self._name_modules(root)
                index = self._module_index[module]
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._own(parameter, PARAMETERS, index)
                    if parameter.grad is not None:
                        self._own(parameter.grad, GRADIENTS, index)
            for buffer in module._buffers.values():
                if buffer is not None:
                    self._own(buffer, PARAMETERS, index)

    def _scan_optimizer(self, optimizer: Optimizer) -> None:
        of_modules = of_optimizer = False
        unknown: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                alive = self._found(_local(parameter))
                if alive is not None:
                    owner = self._owners[alive.block]
                    of_modules |= owner == PARAMETERS
                    of_optimizer |= owner == STATES
                    if owner not in (PARAMETERS, STATES):
                        unknown.append(parameter)
                # The gradient of a master weight is a copy that lives for one optimizer step.
                if parameter.grad is not None and (alive is None or self._owners[alive.block] != STATES):
                    self._own(parameter.grad, GRADIENTS)
        # Tensors that no module knows, beside modules that are known, are an optimizer's own master weights.
        masters = of_optimizer or (not of_modules and PARAMETERS in self._owners)
        for parameter in unknown:
            self._own(parameter, STATES if masters else PARAMETERS)
        for state in optimizer.state.values():
            for tensor in _tensors(state):
                alive = self._found(_local(tensor))
                if alive is not None and self._owners[alive.block] not in (PARAMETERS, GRADIENTS):
                    self._owners[alive.block] = STATES

    def _own(self, tensor: Tensor, owner: int, module: int | None = None) -> None:
        alive = self._found(_local(tensor), owner)
        if alive is not None and module is not None and not self._modules[alive.block]:
            self._modules[alive.block] = module

    def _takes_gradient(self, leaf: Tensor) -> bool:
        """A leaf made before the forward is a parameter; one made within (reentrant checkpointing) is not."""
        alive = self._found(_local(leaf))
        if alive is None or self._owners[alive.block] in (PARAMETERS, STATES):
            return alive is not None
        if self._record.names[self._phases[alive.block]] != SETUP:
            return False
        self._owners[alive.block] = PARAMETERS
        return True

    def _see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        if self._takes_gradient(leaf):
            self._own(gradient, GRADIENTS)

    def _user_line(self) -> int:
        """The innermost line that is neither torch's nor the meter's."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            mine = self._user_code.get(code)
            if mine is None:
                mine = self._user_code[code] = not code.co_filename.startswith(_NOT_USER)
            if mine:
                name = self._record.intern(f"{Path(code.co_filename).name}:{frame.f_lineno}")
                number = _sequence()
                if not self._line_numbers or self._line_numbers[-1] < number:
                    # A node is numbered before its operator runs: it lies one below the present number.
                    self._line_numbers.append(number - 1)
                    self._line_names.append(name)
                return name
            frame = frame.f_back
        return 0

    # the budget

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise before the operator runs, if its output's size can be read from its arguments."""
        assert self.budget is not None
        name = func._overloadpacket.__name__
        base = next((a for a in args if isinstance(a, Tensor)), None)
        if name in _LIKE and base is not None:
            count = base.numel()
        elif name in _SIZED:
            shape = next((a for a in args if isinstance(a, (list, tuple))), None)
            if shape is None or not all(isinstance(n, int) for n in shape):
                return
            count = math.prod(shape)
        else:
            return
        device = kwargs.get("device")
        if device is None:
            device = torch.get_default_device() if base is None else base.device
        if not self._counts(torch.device(device).type):
            return
        dtype = kwargs.get("dtype")
        if dtype is None:
            dtype = torch.int64 if name == "randint" else torch.get_default_dtype()
            dtype = base.dtype if base is not None else dtype
        size = count * dtype.itemsize
        if self.live_bytes + size > self.budget:
            self._raise_out_of_memory(size, self.live_bytes, self._kinds[func][1], self._module)

    def _raise_out_of_memory(self, size: int, live: int, operator: int, module: int) -> None:
        assert self.budget is not None
        where = self._record.names[operator]
        if self._record.names[module]:
            where += f" in {self._record.names[module]}"
        raise self._out_of_memory(size, live, self.budget, f"{where} ({self._phase})")

    def _out_of_memory(self, size: int, live: int, budget: int, where: str) -> torch.OutOfMemoryError:
        """The error in the form of PyTorch's own message."""
        return torch.OutOfMemoryError(
            f"out of memory. Tried to allocate {torch_size(size)}."
            f" The budget has a total capacity of {torch_size(budget)} of which"
            f" {torch_size(max(0, budget - live))} is free."
            f" Of the allocated memory {torch_size(live)} is allocated by PyTorch. Allocation: {where}."
        )

    # CUDA's own figures

    def _begin_cuda(self) -> None:
        if not torch.cuda.is_available() or self._device == "cpu":
            return
        index = torch.cuda.current_device()
        self._cuda = {
            "name": torch.cuda.get_device_name(index),
            "allocated_before_bytes": torch.cuda.memory_allocated(index),
            "reserved_before_bytes": torch.cuda.memory_reserved(index),
            "allocated_peak_bytes": 0,
            "reserved_peak_bytes": 0,
            "phases": {},
        }
        torch.cuda.reset_peak_memory_stats(index)

    def _end_cuda_phase(self) -> None:
        """Read the peaks since the last change of phase. The allocator counts on the host: no waiting."""
        if self._cuda is None:
            return
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        entry = self._cuda["phases"].setdefault(
            self._phase, {"allocated_peak_bytes": 0, "reserved_peak_bytes": 0}
        )
        for figures in (self._cuda, entry):
            figures["allocated_peak_bytes"] = max(figures["allocated_peak_bytes"], allocated)
            figures["reserved_peak_bytes"] = max(figures["reserved_peak_bytes"], reserved)

    # the result

    @property
    def trace(self) -> Trace:
        """What was recorded on the metered device."""
        if self._trace is not None:
            return self._trace
        device = self._device
        if device is None:
            kinds = [d.type for d in self._devices]
            device = next((k for k in kinds if k not in ("cpu", "meta")), None)
            device = device or max(kinds, key=kinds.count, default="cpu")
        trace = self.trace_of(device)
        if self._state == "done":
            self._trace = trace
        return trace

    def trace_of(self, device: str) -> Trace:
        """What was recorded on the devices of one type ('cpu', 'cuda')."""
        whole, source = Trace(), self._record
        chosen = [d.type == device for d in self._devices]
        renamed: dict[int, int] = {}
        blocks: list[int] = []
        for block, mine in enumerate(chosen):
            if mine:
                renamed[block] = len(blocks)
                blocks.append(block)
        whole.sizes = array("q", [source.sizes[b] for b in blocks])
        whole.consumers_of = bytearray(source.consumers_of[b] for b in blocks)
        whole.shapes = [tuple(source.shapes[b]) for b in blocks]
        whole.columns = {k: array("l", [c[b] for b in blocks]) for k, c in source.columns.items()}
        whole.names, whole._name_index = list(source.names), dict(source._name_index)

        late = sorted((p, b) for p, b in self._late if chosen[b])
        whole.before = sum(1 for p, _ in late if p == 0)
        marks = sorted({(p, 1, i, "") for i, p in enumerate(self._steps)}, key=lambda m: m[:3])
        stops = [(p, 0, i, name) for i, (p, name) in enumerate(self._marks)] + marks
        stops += [(p, 2 if p else -1, b, "") for p, b in late]
        stops.sort(key=lambda stop: stop[:3])
        whole.marks, at = [(0, SETUP)], 0
        for position, kind, index, name in stops:
            whole.events.extend(self._mapped(at, position, renamed))
            at = position
            if kind == 0:
                whole.mark(name)
            elif kind == 1:
                whole.begin_step()
            else:
                whole.events.append(renamed[index])
        whole.events.extend(self._mapped(at, len(self._events), renamed))
        whole.info["device"] = device
        if self._cuda is not None and device == "cuda":
            whole.info["cuda"] = {**self._cuda, "phases": dict(self._cuda["phases"])}
        whole.caveats = [
            "counts tensors: what a kernel takes and gives back inside one operator isn't seen, nor are"
            " operators run in other Python threads"
        ]
        unseen = sum(self._sizes[b] for p, b in late if p)
        if unseen:
            whole.caveats.append(
                f"{format_bytes(unseen)} of tensors were made out of sight during recording (another thread,"
                " a loader, NumPy): they count from the beginning of the step that first uses them"
            )
        return whole

    def _mapped(self, start: int, stop: int, renamed: dict[int, int]) -> Iterator[int]:
        for event in self._events[start:stop]:
            if event >= 0:
                if event in renamed:
                    yield renamed[event]
            elif ~event in renamed:
                yield ~renamed[~event]


class _Phase:
    """The result of `Meter.phase`: the phase is set at once, and set back if used with `with`."""

    def __init__(self, meter: Meter, name: str) -> None:
        self._meter, self._name = meter, name
        self._outer = meter._manual
        self._first = len(meter._sizes)
        meter._set_phase(name)

    def __enter__(self) -> _Phase:
        self._meter._manual = True
        return self

    def __exit__(self, *_: object) -> None:
        meter = self._meter
        meter._manual = self._outer
        if self._name == "optimizer":
            for alive in meter._alive.values():
                if alive.block >= self._first and meter._owners[alive.block] == TEMPORARIES:
                    meter._owners[alive.block] = STATES
            meter._end_step()
        else:
            meter._set_phase(self._name)
        meter._sequence = _sequence()


class _ResizePatch:
    """`UntypedStorage.resize_` is no operator, so it is wrapped while a meter runs (FSDP2 frees by it)."""

    _meters: ClassVar[list[Meter]] = []

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        if not self._meters:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[assignment, method-assign]
        self._meters.append(meter)

    def remove(self) -> None:
        self._meters.remove(self._meter)
        if not self._meters:
            del torch.UntypedStorage.resize_  # the method of the base class shows again


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = super(torch.UntypedStorage, storage).resize_(size)
    for meter in _ResizePatch._meters:
        if storage._cdata in meter._alive:
            meter._resized(storage, meter._resizing, (size,), torch.uint8)
        elif size:
            device = meter._shrunk.get(storage) or storage.device
            if device.type == "meta" and meter._device is not None:
                device = torch.device(meter._device)  # a fake storage says that it is on the meta device
            meter._taken(storage, size, (size,), torch.uint8, device, meter._resizing)
    return result


def composed_of_others(func: Any) -> bool:
    """Whether PyTorch's C++ makes this operator of others. Such a one arrives only in inference mode."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and not has(name, "CPU")


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's local shard; any other tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _holds_tensors(returned: Any) -> bool:
    return any("Tensor" in str(r.type) for r in returned)


_HERE = Path(__file__)
_NOT_USER = (
    str(Path(torch.__file__).parent),
    *(str(_HERE.with_name(name)) for name in ("meter.py", "virtual.py", "cuda_rules.py")),
    "<frozen",
)


def torch_size(size: int) -> str:
    """A size as PyTorch's messages write it: '2.00 GiB', '512.00 MiB', '10 bytes'."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size > unit - 1:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


# the allocator's own log


class AllocatorLog(NamedTuple):
    """What the CPU allocator did during a step, by PyTorch's profiler. All relative to the beginning."""

    peak_bytes: int  # most bytes above the level at the beginning
    end_bytes: int  # level at the end, above that at the beginning
    events: int  # allocations and frees


def profiled(step: Callable[[], Any]) -> AllocatorLog:
    """Run `step` under the profiler and read every call of PyTorch's CPU allocator.

    This is an independent witness: it also sees the scratch that kernels take inside one operator. Frees of
    blocks made before `step` aren't logged, so nothing old may be freed inside it: drop gradients before
    (`zero_grad(set_to_none=True)`). Other threads aren't in it. The log is a private interface of torch
    (as in 2.13).
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler reports its progress on stderr
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = step()  # held: what the step returns is freed by its caller, not by the step
    results = profiler.profiler.kineto_results
    log: list[tuple[int, int]] = []
    pending = list(results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            log.append((event.start_time_ns, event.extra_fields.alloc_size))
    log.sort(key=lambda entry: entry[0])
    level = peak = 0
    for _, size in log:
        level += size
        peak = max(peak, level)
    del kept
    return AllocatorLog(peak, level, len(log))
