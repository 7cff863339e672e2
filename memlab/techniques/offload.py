"""Offload: what isn't needed just now waits in the host's memory or on a disk, and comes back over a link.

| what waits      | where | over the link per step                          | here            |
|-----------------|-------|-------------------------------------------------|-----------------|
| saved tensors   | host, disk | each storage out once, back once           | `offload_saved` |
| optimizer states| host  | gradients down, parameters up: the step is there | `HostOptimizer` |
| optimizer states| disk  | all states in and out, memory-mapped            | `DiskOptimizer` |
| parameters      | host  | up twice, gradients down                        | `HostParameters`|

PyTorch's own: `torch_offload_saved` (save_on_cpu) and `torch_fsdp_offload` (states and parameters).

What goes first is what is touched least (`touches`): optimizer states, once a step, and 12 of 16 B per
parameter with 16-bit weights; then gradients; parameters last. What it costs is time: `seconds` of the bytes
moved, unless the copy hides behind computing. Each class counts its bytes in `out` (leaving the device) and
`back` (coming to it).

The device is where the model is. On CUDA the host is the CPU, by pinned buffers. On fake tensors (a virtual
GPU) the host is the 'meta' device, so that a trace of the device shows what is left there and one of 'meta'
shows what waits. On a CPU device and host are the same memory: saved tensors go to a buffer that isn't
torch's, so that the device's side can be measured though the machine saves nothing; a disk does save it.

Source: Ren et al., ZeRO-Offload, arXiv:2101.06840; Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim import Optimizer

from memlab.units import KIB, unknown_name

__all__ = [
    "DiskOptimizer",
    "HostOptimizer",
    "HostParameters",
    "moved",
    "offload_saved",
    "seconds",
    "torch_fsdp_offload",
    "torch_offload_saved",
    "touches",
]


# Closed forms


def seconds(moved_bytes: int, bandwidth: int) -> float:
    """The least time for `moved_bytes` one way; `bandwidth` in bytes per second (of a `Link`)."""
    if bandwidth <= 0:
        raise ValueError(f"a bandwidth is a positive number of bytes per second, not {bandwidth}")
    return moved_bytes / bandwidth


def moved(
    parameters: int,
    what: str,
    *,
    parameter: int = 4,
    gradient: int = 4,
    states: int = 8,
    accumulation: int = 1,
) -> dict[str, int]:
    """Bytes that leave the device ('out') and come to it ('back') per step, for each way to offload.

    what: 'optimizer' (HostOptimizer), 'states' (DiskOptimizer) or 'parameters' (HostParameters, at most:
    a weight that the backward doesn't need comes back once). parameter, gradient, states: bytes of each for
    one parameter. Saved tensors have no formula of their own: each storage goes out and back once.
    """
    ways = {
        "optimizer": (gradient, parameter),
        "states": (states, states),
        "parameters": (accumulation * gradient, 2 * accumulation * parameter),
    }
    if what not in ways:
        raise unknown_name("offload", what, ways)
    out, back = ways[what]
    return {"out": parameters * out, "back": parameters * back}


def touches(accumulation: int = 1) -> dict[str, int]:
    """How often a step reads or writes each consumer: the one that is touched least is offloaded first.

    Per micro-batch: parameters in the forward and the backward, gradients added to, activations written and
    read. Per step: the update touches parameters, gradients and optimizer states.
    """
    return {
        "optimizer_states": 1,
        "gradients": accumulation + 1,
        "parameters": 2 * accumulation + 1,
        "activations": 2 * accumulation,
    }


def _host_of(tensor: Tensor) -> torch.device:
    return torch.device("meta" if isinstance(tensor, FakeTensor) else "cpu")


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Saved tensors


class offload_saved(saved_tensors_hooks):
    """Inside it, what autograd saves for the backward leaves the device, and comes back when it is used.

        with offload_saved(model, "disk") as moved:
            loss = model(x).sum()
        loss.backward()

    where: 'host' or 'disk' (files in `folder`, default a temporary one; they go with the tensors).
    minimum: bytes; a smaller storage stays, since a copy has a price of its own.
    Parameters and buffers of `model` stay: they are in memory anyway. So does what the caller still holds,
    the batch for example: its copy is moved, its memory isn't freed. A storage saved by several operators, or
    by views of it, moves once; it is back until the last of them has used it.
    """

    def __init__(
        self, model: nn.Module, where: str = "host", *, minimum: int = 64 * KIB, folder: Path | None = None
    ) -> None:
        if where not in ("host", "disk"):
            raise unknown_name("place to offload to", where, ("host", "disk"))
        self.out = self.back = 0
        self._where, self._minimum, self._folder = where, minimum, folder
        self._kept = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        self._known: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> offload_saved:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, saved: Tensor) -> Any:
        storage = saved.untyped_storage()
        if (
            saved.layout != torch.strided
            or storage.nbytes() < max(1, self._minimum)
            or storage._cdata in self._kept
        ):
            return saved.detach()  # not `saved`: an operator that keeps its own output would never be freed
        away = self._known.get(storage._cdata)
        if away is None or away.storage() is not storage or away.version != saved._version:
            away = self._known[storage._cdata] = _Away(saved, self._where, self._folder)
            self.out += away.bytes
        away.uses += 1
        return away, saved.dtype, saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, dtype, size, stride, offset = packed
        with torch.no_grad():
            whole = away.here
            if whole is None:
                whole = away.load()
                self.back += away.bytes
            away.uses -= 1
            away.here = whole if away.uses > 0 else None  # the next operator will want it at once
            tensor: Tensor = whole.view(dtype).as_strided(size, stride, offset)
            return tensor


class _Away:
    """One storage that has left: where it is, and how many operators still want it."""

    def __init__(self, saved: Tensor, where: str, folder: Path | None) -> None:
        storage = saved.untyped_storage()
        self.storage, self.version = weakref.ref(storage), saved._version
        self.bytes, self.dtype, self.device = storage.nbytes(), saved.dtype, saved.device
        self.uses, self.here = 0, None
        self.fake = isinstance(saved, FakeTensor)
        self.home: Tensor | mmap.mmap | Path | None = None
        with torch.no_grad():
            whole = saved.detach().as_strided((self.bytes // saved.element_size(),), (1,), 0)
            if where == "disk":
                if self.fake:
                    return  # a file takes no memory, and there is nothing to write
                with tempfile.NamedTemporaryFile(dir=folder, prefix="memlab-saved-", delete=False) as file:
                    on_cpu = whole.cpu()  # has to live as long as its buffer is read
                    file.write(_buffer(on_cpu))
                self.home = Path(file.name)
                weakref.finalize(self, self.home.unlink, missing_ok=True)
            elif self.fake or self.device.type != "cpu":
                pinned = self.device.type == "cuda" and not self.fake
                self.home = torch.empty(
                    whole.shape, dtype=self.dtype, device=_host_of(saved), pin_memory=pinned
                )
                self.home.copy_(whole, non_blocking=pinned)
            else:
                self.home = mmap.mmap(-1, self.bytes)
                self.home[:] = _buffer(whole)

    def load(self) -> Tensor:
        """A new tensor on the device."""
        numel = self.bytes // self.dtype.itemsize
        if isinstance(self.home, Path):  # a private mapping: pages are read when they are touched
            mapped = torch.from_file(str(self.home), shared=False, size=numel, dtype=self.dtype)
            return mapped.to(self.device)
        whole = torch.empty(numel, dtype=self.dtype, device=self.device)
        if isinstance(self.home, Tensor):
            whole.copy_(self.home, non_blocking=True)
        elif self.home is not None:
            ctypes.memmove(whole.data_ptr(), (ctypes.c_char * self.bytes).from_buffer(self.home), self.bytes)
        return whole


def _buffer(whole: Tensor) -> Any:
    """The bytes of a dense CPU tensor, without a copy."""
    return memoryview((ctypes.c_char * _size(whole)).from_address(whole.data_ptr())).cast("B")


def torch_offload_saved() -> save_on_cpu:
    """`torch.autograd.graph.save_on_cpu`: what is saved goes to the host, by pinned memory on CUDA.

    It moves parameters too, and a tensor twice that two operators save. On a CPU it does nothing.
    """
    return save_on_cpu(pin_memory=torch.cuda.is_available())


# Optimizer states


class HostOptimizer:
    """ZeRO-Offload: fp32 masters and optimizer states live on the host, and the step runs there.

    optimizer: makes the optimizer of the masters, `lambda ps: torch.optim.AdamW(ps, lr=1e-3)`.
    A step copies the gradients down (and frees them on the device) and the new parameters up.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        self.out = self.back = 0
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in parameters:
            if parameter.requires_grad:
                master = torch.empty(parameter.shape, dtype=torch.float32, device=_host_of(parameter))
                self._pairs.append((parameter, nn.Parameter(master.copy_(parameter.detach()))))
        self.optimizer = optimizer([master for _, master in self._pairs])

    def zero_grad(self) -> None:
        """Free the gradients on the device."""
        for parameter, _ in self._pairs:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Gradients down, one step on the host, parameters up."""
        for parameter, master in self._pairs:
            if parameter.grad is not None:
                down = torch.empty(parameter.shape, dtype=parameter.grad.dtype, device=master.device)
                master.grad = down.copy_(parameter.grad).float()
                self.out += _size(parameter.grad)
                parameter.grad = None
        self.optimizer.step()
        for parameter, master in self._pairs:
            if master.grad is not None:
                parameter.copy_(master)  # rounds to the parameter's dtype; real code rounds before it sends
                self.back += _size(parameter)
                master.grad = None


class DiskOptimizer:
    """ZeRO-Infinity's way: the states wait in memory-mapped files, but those of the parameter in work.

    optimizer: makes the optimizer of one parameter, `lambda ps: torch.optim.AdamW(ps, lr=1e-3)`. The device
    never holds more states than those of its largest parameter.
    folder: where the files go (default: a temporary folder, removed with this object).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        folder: Path | None = None,
    ) -> None:
        self.out = self.back = 0
        self._temporary = tempfile.TemporaryDirectory(dir=folder, prefix="memlab-states-")
        self._optimizers = [(p, optimizer([p])) for p in parameters if p.requires_grad]
        self._files: dict[tuple[int, str], tuple[torch.Size, torch.dtype]] = {}

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter, _ in self._optimizers:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """For each parameter: map its states, update, let them go."""
        for index, (parameter, optimizer) in enumerate(self._optimizers):
            if parameter.grad is None:
                continue
            state, mapped = optimizer.state[parameter], {}
            for (owner, name), (shape, dtype) in self._files.items():
                if owner == index:
                    mapped[name] = self._map(parameter, index, name, shape, dtype)
                    state[name] = mapped[name].to(parameter.device)  # on a CPU: the mapping itself
                    self.back += _size(state[name])
            optimizer.step()
            for name, tensor in list(state.items()):
                if isinstance(tensor, Tensor) and tensor.dim():  # Adam's step counter stays
                    if name not in mapped:
                        mapped[name] = self._map(parameter, index, name, tensor.shape, tensor.dtype)
                        self._files[index, name] = tensor.shape, tensor.dtype
                    if mapped[name] is not tensor:
                        mapped[name].copy_(tensor)
                    self.out += _size(tensor)
                    del state[name], tensor

    def _map(self, parameter: Tensor, index: int, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if isinstance(parameter, FakeTensor):
            return torch.empty(shape, dtype=dtype, device="meta")
        path = Path(self._temporary.name) / f"{index}.{name}"
        return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


# Parameters


class HostParameters:
    """The parameters of `units` live on the host; one unit's are on the device while it computes.

    units: modules, changed in place. Make the optimizer afterwards, of `model.parameters()`: its states are
    then on the host too, and its step runs there. Forward and backward each fetch a unit's weights; gradients
    go down as they come. A parameter that two modules share is fetched for each.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        self.out = self.back = 0
        hosted: dict[nn.Parameter, nn.Parameter] = {}
        for unit in units:
            places = [
                (owner, name, parameter)
                for owner in unit.modules()
                for name, parameter in owner._parameters.items()
                if parameter is not None
            ]
            for owner, name, parameter in places:
                if parameter not in hosted:
                    host = torch.empty(parameter.shape, dtype=parameter.dtype, device=_host_of(parameter))
                    master = nn.Parameter(host.copy_(parameter.detach()), parameter.requires_grad)
                    hosted[parameter] = master
                    if master.requires_grad:
                        master.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
                owner._parameters[name] = hosted[parameter]
            self._wrap(unit, [(owner, name, hosted[p], p.device) for owner, name, p in places])

    def _count(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.out += _size(parameter.grad)

    def _wrap(self, unit: nn.Module, places: list[tuple[nn.Module, str, nn.Parameter, torch.device]]) -> None:
        forward = unit.forward

        @wraps(forward)
        def fetching_forward(*args: Any, **kwargs: Any) -> Any:
            fetched: dict[int, tuple[nn.Parameter, Tensor]] = {}
            for owner, name, master, device in places:
                tensor = self._fetch(master, device)
                fetched[tensor.untyped_storage()._cdata] = master, tensor
                owner.__dict__[name] = tensor  # found before the parameter of that name

            def pack(saved: Tensor) -> Any:
                found = fetched.get(saved.untyped_storage()._cdata)
                if found is None:
                    return saved.detach()
                return found[0], saved.device, saved.size(), saved.stride(), saved.storage_offset()

            try:
                with saved_tensors_hooks(pack, self._unpack):
                    return forward(*args, **kwargs)
            finally:
                fetched.clear()
                for owner, name, *_ in places:
                    del owner.__dict__[name]

        unit.forward = fetching_forward

    def _fetch(self, master: Tensor, device: torch.device) -> Tensor:
        self.back += _size(master)
        fetched: Tensor = _Fetch.apply(master, device)  # type: ignore[no-untyped-call]
        return fetched

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        master, device, size, stride, offset = packed
        with torch.no_grad():
            return self._fetch(master, device).as_strided(size, stride, offset)


class _Fetch(torch.autograd.Function):
    """Forward: a copy on the device. Backward: the gradient goes to the host."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, device: torch.device) -> Tensor:
        ctx.host = master.device
        return torch.empty(master.shape, dtype=master.dtype, device=device).copy_(master)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0]
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=ctx.host).copy_(gradient), None


def torch_fsdp_offload(model: nn.Module, units: Iterable[nn.Module] = (), mesh: Any = None) -> nn.Module:
    """`fully_shard` with CPUOffloadPolicy: sharded parameters, gradients and states live on the host.

    Needs a process group (of one rank at least); `mesh` is a DeviceMesh, default all ranks. Make the
    optimizer afterwards. On a CPU the policy changes no byte.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for module in (*units, model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    return model
