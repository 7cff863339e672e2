"""ZeRO: N ranks that train the same model needn't all keep the same states.

Data parallel ranks hold equal copies of parameters (4 B each in fp32), gradients (4 B) and Adam's moments
(8 B). ZeRO gives each rank one N-th to own and fetches the rest when it is used:

| stage | owned in N-ths                      | sent per rank and step, P bytes of parameters       |
|-------|-------------------------------------|-----------------------------------------------------|
| 0     | nothing (data parallel)             | all-reduce of the gradients: 2 P (N-1)/N             |
| 1     | optimizer states                    | reduce-scatter + all-gather: 2 P (N-1)/N, no more    |
| 2     | and gradients                       | the same                                            |
| 3     | and parameters                      | all-gather twice, reduce-scatter: up to 3 P (N-1)/N  |

What it saves: `states` (the ZeRO paper's formula) and `share` (to the byte, padding included). What it costs:
the bytes of `sent`, counted by `Traffic`; stage 3 waits for weights in every layer unless they are fetched
ahead. What it never shards: activations. What is whole for a moment comes on top: in stage 2 the gradient
that is being reduced, in stage 3 that and the weights of the unit at work.

`Zero` is stage 1, 2 and 3 from scratch, collective by collective. `torch_zero1` and `torch_fsdp` are
PyTorch's own, which put many tensors into one collective and send while they compute. Gradients are summed
over ranks in another order than one process would take, so equal means to rounding; with the same batch on
two ranks it means bitwise.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5 (memory) and 7 (communication).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Traffic", "Zero", "sent", "share", "states", "torch_fsdp", "torch_zero1"]


# torch 2.13 renamed them.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


# Closed forms


def states(
    parameters: int, world_size: int, stage: int, bytes_each: tuple[int, int, int] = (2, 2, 12)
) -> dict[str, int]:
    """Bytes per rank by consumer, as the ZeRO paper counts: what is sharded is divided by `world_size`.

    `bytes_each`: bytes per parameter of (parameters, gradients, optimizer_states). (2, 2, 12) is the paper's
    16-bit training with fp32 master weights and Adam; fp32 Adam is (4, 4, 8).
    """
    _check(stage, world_size)
    first_sharded = {"parameters": 3, "gradients": 2, "optimizer_states": 1}
    return {
        consumer: -(-parameters * each // (world_size if stage >= first else 1))
        for (consumer, first), each in zip(first_sharded.items(), bytes_each, strict=True)
    }


def share(numels: Iterable[int], world_size: int, stage: int) -> dict[str, int]:
    """What each rank of `Zero` holds in fp32 with Adam, to the byte. `numels`: elements of each tensor.

    A piece is ceil(n / N) elements. Stages 1 and 2 pad the parameters to N whole pieces. Adam's step counter
    (4 B a tensor) isn't divided. The gradients are those between backward and step, all tensors trained.
    """
    _check(stage, world_size)
    counts = list(numels)
    pieces = sum(_piece_size(n, world_size) for n in counts)
    full, padded = sum(counts), pieces * world_size
    return {
        "parameters": 4 * (full, padded, padded, pieces)[stage],
        "gradients": 4 * (full, full, pieces, pieces)[stage],
        "optimizer_states": 8 * (full if stage == 0 else pieces) + 4 * len(counts),
    }


def sent(parameter_bytes: int, world_size: int, stage: int) -> int:
    """Bytes that each rank sends in a step by ring collectives; in stage 3 each weight is fetched twice.

    `Zero` and FSDP stay below it where the backward needs no weight (biases, embeddings), or keeps it.
    """
    _check(stage, world_size)
    return (3 if stage == 3 else 2) * parameter_bytes * (world_size - 1) // world_size


def _check(stage: int, world_size: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has the stages 0 (data parallel), 1, 2 and 3, not {stage!r}")
    if world_size < 1:
        raise ValueError(f"a world has at least one rank, not {world_size}")


def _piece_size(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


# From scratch


class _Owned(NamedTuple):
    """One parameter: the piece of it that this rank owns, and what it takes to make the whole again."""

    name: str
    piece: nn.Parameter  # ceil(n / N) elements, fp32 (the master weight of a 16-bit parameter)
    shape: torch.Size
    dtype: torch.dtype
    parameter: nn.Parameter | None  # stages 1 and 2: the whole, which stays
    padded: Tensor | None  # its storage: N pieces in a row


class Zero:
    """A model and its optimizer, sharded by ZeRO over the ranks of `group`.

    model: the same on all ranks; it is changed in place. Called as before: `loss = f(model(batch))`.
    optimizer: makes the optimizer of this rank's pieces, `lambda pieces: torch.optim.AdamW(pieces, lr=1e-3)`.
        It must treat elements one by one, as SGD and Adam do: a norm of a piece isn't the norm of the whole.
    units: stage 3 gathers the parameters of one of these modules at a time, for example `model.blocks`; what
        no unit holds is gathered for the whole forward.
    A step: `zero_grad()`, forward, `backward()`, `step()`. Gradients are averaged over the ranks.
    Parameters that a backward doesn't reach must be the same on all ranks. A parameter shared by two units is
    refused with ValueError. Modules that keep references to their weights (nn.LSTM) can't be sharded by it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        stage: int,
        group: dist.ProcessGroup | None = None,
        units: Iterable[nn.Module] = (),
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"Zero runs the stages 1, 2 and 3, not {stage!r}")
        self.model, self.stage, self.group = model, stage, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.owned: list[_Owned] = []
        if stage == 3:
            self._shard_units(list(units))
        else:
            for name, parameter in model.named_parameters():  # a tied one once
                self._split(name, parameter)
        trained = [o.piece for o in self.owned if o.piece.requires_grad]
        self.optimizer = optimizer(trained)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for owned in self.owned:
            owned.piece.grad = None
            if owned.parameter is not None:
                owned.parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the pieces of this rank, then make the parameters whole again (not in stage 3)."""
        if self.stage == 1:
            for o in self.owned:
                if o.parameter is not None and o.parameter.grad is not None:
                    o.piece.grad = self._my_mean(o.parameter.grad).to(o.piece.dtype)
        self.optimizer.step()
        if self.stage == 3:
            return
        for o in self.owned:
            if o.piece.grad is None or o.padded is None:
                continue
            mine = o.padded.view(self.world_size, -1)[self.rank]
            mine.copy_(o.piece)  # from the fp32 master; an fp32 piece is `mine` itself
            _all_gather(o.padded, mine, self.group)
            if self.stage == 1:
                o.piece.grad = None  # the whole gradient is kept, its mean was a temporary

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters, whole, by name: on every rank."""
        return {o.name: self._whole(o.piece, o.shape, o.dtype).clone() for o in self.owned}

    def held(self) -> dict[str, int]:
        """Bytes of this rank's states by consumer, now: each storage once."""
        tensors: dict[str, list[Tensor | None]] = {
            "parameters": [*self.model.parameters(), *(o.padded for o in self.owned)],
            "gradients": [p.grad for p in (*self.model.parameters(), *(o.piece for o in self.owned))],
            "optimizer_states": [o.piece for o in self.owned if o.piece.dtype != o.dtype and self.stage < 3],
        }
        for state in self.optimizer.state.values():
            tensors["optimizer_states"] += [t for t in state.values() if isinstance(t, Tensor)]
        return {consumer: _bytes(t for t in ts if t is not None) for consumer, ts in tensors.items()}

    # stages 1 and 2: the parameters stay whole

    def _split(self, name: str, parameter: nn.Parameter) -> None:
        size = _piece_size(parameter.numel(), self.world_size)
        padded = torch.zeros(self.world_size * size, dtype=parameter.dtype, device=parameter.device)
        padded[: parameter.numel()] = parameter.detach().flatten()
        parameter.data = padded[: parameter.numel()].view(parameter.shape)
        # A view into `padded`: for fp32 the piece costs nothing; for 16 bit it is the master, fp32.
        piece = nn.Parameter(padded.view(self.world_size, size)[self.rank].float(), parameter.requires_grad)
        owned = _Owned(name, piece, parameter.shape, parameter.dtype, parameter, padded)
        self.owned.append(owned)
        if self.stage == 2 and parameter.requires_grad:
            hook = partial(self._keep_mine, owned)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _keep_mine(self, owned: _Owned, parameter: Tensor) -> None:
        """Stage 2: as soon as a gradient is there, keep one N-th of the mean and free the whole."""
        assert parameter.grad is not None
        mine = self._my_mean(parameter.grad).to(owned.piece.dtype)
        parameter.grad = None
        owned.piece.grad = mine if owned.piece.grad is None else owned.piece.grad.add_(mine)

    # stage 3: a unit's parameters are whole while its forward runs

    def _shard_units(self, units: list[nn.Module]) -> None:
        taken: dict[int, nn.Module] = {}
        for unit in [*units, self.model]:
            inner = {id(m) for other in units if other is not unit for m in _inside(unit, other)}
            places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
            for owner in unit.modules():
                if id(owner) in inner:
                    continue
                for name, parameter in owner._parameters.items():
                    if parameter is None or any(parameter is o.piece for o in self.owned):
                        continue  # a nested unit has it already
                    if taken.setdefault(id(parameter), unit) is not unit:
                        raise ValueError(
                            f"parameter {name!r} is shared by two units: leave one of them out of `units`"
                        )
                    places.setdefault(parameter, []).append((owner, name))
            self._shard(unit, places)

    def _shard(self, unit: nn.Module, places: dict[nn.Parameter, list[tuple[nn.Module, str]]]) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        mine: list[tuple[_Owned, list[tuple[nn.Module, str]]]] = []
        for parameter, homes in places.items():
            size = _piece_size(parameter.numel(), self.world_size)
            flat = parameter.detach().flatten()[self.rank * size : (self.rank + 1) * size].float()
            piece = nn.Parameter(F.pad(flat, (0, size - flat.numel())).clone(), parameter.requires_grad)
            owned = _Owned(names[id(parameter)], piece, parameter.shape, parameter.dtype, None, None)
            self.owned.append(owned)
            mine.append((owned, homes))
            for owner, name in homes:
                owner._parameters[name] = piece
        forward, gather = unit.forward, cast(Callable[..., Tensor], _Gather.apply)

        @wraps(forward)
        def gathered_forward(*args: Any, **kwargs: Any) -> Any:
            whole: dict[int, tuple[_Owned, Tensor]] = {}  # storage -> what it is the whole of
            for owned, homes in mine:
                tensor = gather(self, owned.piece, owned.shape, owned.dtype)
                whole[tensor.untyped_storage()._cdata] = (owned, tensor)
                for owner, name in homes:
                    owner.__dict__[name] = tensor  # found before the parameter of that name

            def pack(saved: Tensor) -> Any:
                """Autograd keeps the recipe of a gathered weight, not the weight."""
                found = whole.get(saved.untyped_storage()._cdata)
                if found is None:
                    return saved.detach()
                return found[0], saved.size(), saved.stride(), saved.storage_offset()

            try:
                with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                    return forward(*args, **kwargs)
            finally:
                whole.clear()
                for _, homes in mine:
                    for owner, name in homes:
                        del owner.__dict__[name]

        unit.forward = gathered_forward

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        owned, size, stride, offset = packed
        with torch.no_grad():
            return self._whole(owned.piece, owned.shape, owned.dtype).as_strided(size, stride, offset)

    # the two collectives

    def _whole(self, piece: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """All-gather: every rank sends its piece, every rank gets them all."""
        padded = torch.empty(self.world_size * piece.numel(), dtype=dtype, device=piece.device)
        _all_gather(padded, piece.detach().to(dtype), self.group)
        return padded[: math.prod(shape)].view(shape)

    def _my_mean(self, gradient: Tensor) -> Tensor:
        """Reduce-scatter: every rank gets the sum, over ranks, of the piece that it owns; then the mean."""
        size = _piece_size(gradient.numel(), self.world_size)
        flat, missing = gradient.flatten(), self.world_size * size - gradient.numel()
        if missing:
            flat = F.pad(flat, (0, missing))
        mine = torch.empty(size, dtype=gradient.dtype, device=gradient.device)
        _reduce_scatter(mine, flat, group=self.group)
        return mine.div_(self.world_size)


class _Gather(torch.autograd.Function):
    """Forward: all-gather. Its transpose is reduce-scatter, so that is its backward."""

    @staticmethod
    def forward(ctx: Any, zero: Zero, piece: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.zero, ctx.dtype = zero, piece.dtype
        return zero._whole(piece, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.zero._my_mean(gradients[0]).to(ctx.dtype), None, None


def _inside(unit: nn.Module, other: nn.Module) -> Iterable[nn.Module]:
    """The modules of `other`, if `unit` holds it."""
    return other.modules() if any(m is other for m in unit.modules()) else ()


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


# PyTorch's own


def torch_zero1(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    group: dist.ProcessGroup | None = None,
    find_unused_parameters: bool = False,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    """DistributedDataParallel and ZeroRedundancyOptimizer: stage 1. `options` go to the optimizer.

    It deals out whole parameters, largest first, so the ranks' shares are equal only nearly.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
    )
    optimizer = ZeroRedundancyOptimizer(
        [p for p in model.parameters() if p.requires_grad], optimizer_class, process_group=group, **options
    )
    return wrapped, optimizer


def torch_fsdp(
    model: nn.Module, units: Iterable[nn.Module] = (), stage: int = 3, mesh: Any = None, **options: Any
) -> nn.Module:
    """`fully_shard` on each unit and the rest: stage 3, or 2 (units stay whole until their backward is done).

    Make the optimizer afterwards, of `model.parameters()`. `mesh` is a DeviceMesh (default: all ranks);
    `options` go to `fully_shard` (`mp_policy`, `offload_policy`).
    """
    if stage not in (2, 3):
        raise ValueError(f"fully_shard is stage 3, or 2 if asked to keep units whole, not {stage!r}")
    from torch.distributed.fsdp import fully_shard

    for module in (*units, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=stage == 3, **options)
    return model


# What is sent


class Traffic(TorchDispatchMode):
    """Counts the collectives that run inside it, whoever calls them: `Zero`, DDP, FSDP, DTensor.

    `calls[name]` and `sent[name]`: how often, and the bytes that this rank sends by the ring algorithm, for
    all_gather, reduce_scatter, all_reduce, broadcast and others. Of a tensor of S bytes over N ranks the
    first two send S (N-1)/N; an all-reduce is one of each and sends twice that. (What gloo or NCCL really
    send depends on the algorithm that they pick; the ring sends the least.) `total` is the sum.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = _COLLECTIVES.get(func._opname)
            if name is not None:
                size = _group_size(args)
                # The whole tensor: an all-gather is given one N-th, all others all of it.
                second = func.namespace == "c10d" and name in ("all_gather", "reduce_scatter")
                given = args[1] if second else args[0]  # those two name their output first
                whole = _total(given) * (size if name == "all_gather" else 1)
                self.calls[name] += 1
                self.sent[name] += (2 if name == "all_reduce" else 1) * whole * (size - 1) // size
        return func(*args, **(kwargs or {}))


_COLLECTIVES = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce", "all_reduce_": "all_reduce",
    "broadcast_": "broadcast", "broadcast": "broadcast",
    "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "all_to_all_single": "all_to_all",
}  # fmt: skip


def _group_size(args: Any) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except RuntimeError:
                continue  # the reduce operation is one too
    return torch._C._distributed_c10d._resolve_process_group(args[-1]).size()


def _total(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_total(item) for item in value) if isinstance(value, (list, tuple)) else 0
