"""A training step of many GPUs, as one of its ranks sees it, in one process and with no cluster.

    trace = trace_sharded("llama2-70b", zero_stage=3, world_size=8, precision="bf16", checkpointing="full")
    print(trace)

PyTorch's own `fully_shard`, DistributedDataParallel, ZeroRedundancyOptimizer and DTensor run as written, over
a process group whose collectives return at once (torch's "fake" backend) and on fake tensors. What a rank
allocates doesn't depend on what the others send, so the trace is that of the real group, to the byte.

What a recipe's fields stand for here:

* tensor_parallel: the split of Megatron-LM (Shoeybi et al., arXiv:1909.08053) by DTensor. Queries, keys,
  values and the first MLP layers by columns, the layers after them by rows, embedding and head by vocabulary,
  with the loss computed on the split logits. Norms are replicated.
* zero_stage 0: DistributedDataParallel. Beside the gradients it keeps buckets of the same size.
* zero_stage 1: the same with ZeroRedundancyOptimizer: each rank keeps the states of whole parameters, about
  1/N of them, so ranks differ a little.
* zero_stage 3: `fully_shard` (FSDP2) on each block and on the whole model.
* zero_stage 2: `fully_shard` with reshard_after_forward=False. Gradients and states are sharded as in ZeRO-2.
  Not equal to it: between steps the parameters are sharded too, and from forward to backward a rank holds its
  shard beside the whole parameters.
* precision bf16-master with zero_stage 2 or 3: fp32 shards and a MixedPrecisionPolicy that gathers and
  computes in bf16. The fp32 shard is the master copy and counts as parameter; gradients are kept in fp32.
* optimizer adafactor and adamw-8bit: work on each rank's shard as on a tensor of its own, since DTensor lacks
  some of their operators.
* offload parameters: CPUOffloadPolicy, which keeps gradients and optimizer states on the host too. offload
  optimizer_states: an fp32 copy of the parameters and the states stay on the host, which steps, as in
  ZeRO-Offload (Ren et al., arXiv:2101.06840). offload gradients: they go there as soon as they are reduced.

Whole weights gathered from other ranks, and whole gradients not yet reduced, count as temporaries.

Everything that is changed for this is undone when `fake_process_group` ends, after an exception too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memlab import hardware, models
from memlab.hardware import GPU
from memlab.meter import GRADIENTS, _local, _tensors
from memlab.models import ConvConfig, TransformerConfig
from memlab.nets import DTYPES, Net, build
from memlab.recipe import Recipe, RecipeError
from memlab.step import Workload, _batch, make_optimizer, valueless_reads
from memlab.trace import Trace
from memlab.virtual import VirtualGPU

__all__ = ["Sharding", "fake_process_group", "sharded_workload", "trace_sharded"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a recipe doesn't say about a sharded step. The defaults are PyTorch's.

    rank: whose memory is traced.
    reshard_after_forward: free a block's gathered weights after its forward; None: as zero_stage says.
    reduce_dtype: 'fp32' or 'bf16' for the reduction of gradients under bf16-master; None: as computed, bf16.
    fp32_gradients: with precision bf16, keep each reduced gradient in fp32, beside fp32 master weights and
        moments: 2 + 4 + 12 = 18 bytes per parameter, DeepSpeed's bookkeeping.
    master: with precision bf16, keep fp32 master weights for the optimizer (10 bytes with 8-bit AdamW).
    gradient_as_bucket_view: DistributedDataParallel's switch: gradients are views of its buckets.
    prepare: called with the model before it is sharded; may change it in place (adapters, frozen layers).
    """

    rank: int = 0
    reshard_after_forward: bool | None = None
    reduce_dtype: str | None = None
    fp32_gradients: bool = False
    master: bool = False
    gradient_as_bucket_view: bool = False
    prepare: Callable[[nn.Module], None] | None = None


# -- a process group that isn't there --------------------------------------------------------------------


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Inside it this process is rank `rank` of `world_size`; collectives return at once and move nothing.

    Sharded code runs as written, also inside a `VirtualGPU`: `init_device_mesh("cpu", ...)`, `fully_shard`,
    `parallelize_module`, `DistributedDataParallel`, `ZeroRedundancyOptimizer`.
    Raises ValueError for a rank that doesn't exist, RuntimeError if there is a process group already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} doesn't exist in a world of {world_size}: ranks are 0 to {world_size - 1}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "a process group exists already: call torch.distributed.destroy_process_group() first"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        stack.callback(
            setattr, sys, "excepthook", sys.excepthook
        )  # a group puts its rank before error messages
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.callback(_forget_meshes)
        for target, name, replacement in _patches():
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    """What stands in the way of fake tensors, and of a thousand ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # A mesh is a table of ranks whose numbers are read: it must be real.
    for name in ("__init__", "_concatenate", "_flatten", "_unflatten", "__getitem__"):
        if (method := DeviceMesh.__dict__.get(name)) is not None:
            yield DeviceMesh, name, _without_modes(method)
    # DTensor runs each operator once on the whole shape to learn its strides: that is nobody's memory.
    name = "_propagate_tensor_meta_non_cached"
    yield ShardingPropagator, name, _without_modes(ShardingPropagator.__dict__[name])
    from torch.distributed.tensor import _sharding_prop

    name = "_propagate_use_strided_shard_flag"
    if hasattr(_sharding_prop, name):
        yield _sharding_prop, name, _once_per_operator(getattr(_sharding_prop, name))
    # fully_shard cuts a parameter into one piece per rank, and uses two of the pieces.
    yield _fsdp_param, "_chunk_with_empty", _Chunks
    # DistributedDataParallel's reducer is C++ and reads addresses.
    yield dist, "Reducer", _Reducer
    yield dist, "Logger", _Logger
    yield dist, "_broadcast_coalesced", lambda *args, **kwargs: None
    yield dist, "_verify_params_across_processes", lambda *args, **kwargs: None


def _without_modes(method: Any) -> Any:
    """The same function or method, run with neither fake tensors nor a meter."""
    if isinstance(method, staticmethod):
        return staticmethod(_without_modes(method.__func__))

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            if isinstance(
                ranks := kwargs.get("_rank_map"), FakeTensor
            ):  # init_device_mesh numbers them 0, 1, ...
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int)
            return method(*args, **kwargs)

    return call


def _once_per_operator(propagate: Any) -> Any:
    """An operator on n parameters looks for strided shards n times through n specs: once will do."""
    from torch.distributed.tensor.placement_types import _StridedShard

    without: list[Any] = [None]

    def call(strategy: Any, schema: Any) -> None:
        if schema is without[0]:
            return
        if any(isinstance(p, _StridedShard) for spec in schema.args_spec for p in spec.placements):
            propagate(strategy, schema)
        else:
            without[0] = schema

    return call


def _after_gradient(parameter: Tensor, call: Callable[[Tensor], None]) -> Any:
    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _forget_meshes() -> None:
    """Empty DTensor's caches: they hold meshes of the group that is ending."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    caches = [propagator.propagate_op_sharding, type(propagator)._propagate_tensor_meta_cached]
    for cache in caches:
        if hasattr(cache, "cache_clear"):
            cache.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()


class _Chunks:
    """`torch.chunk` padded with empty pieces to `count`, each made when it is asked for.

    The same pieces as those of torch's `_chunk_with_empty`: all but the last of size ceil(n / count).
    """

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self.tensor, self.count, self.dim = tensor, count, dim

    def __getitem__(self, index: int) -> Tensor:
        length = self.tensor.size(self.dim)
        each = -(-length // self.count)
        start = index * each
        if index > 0 and start >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(each, length - start))


class _Reducer:
    """DistributedDataParallel's reducer as far as memory goes, in Python (torch/csrc/.../reducer.cpp).

    One flat buffer per bucket, made once and kept. A gradient is scaled into its place there; after the
    all-reduce it is copied back, or becomes a view of the bucket (`gradient_as_bucket_view`). The buckets are
    in the order in which gradients arrive, to which the true reducer changes early in its second step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: Sequence[Sequence[int]],
        limits: Sequence[int],
        group: Any,
        sparse: Sequence[bool],
        cap: int,
        find_unused: bool = False,
        gradient_as_bucket_view: bool = False,
        names: Any = None,
        first_cap: int = 2**20,
        *rest: Any,
    ) -> None:
        self.parameters, self.as_view = list(parameters), gradient_as_bucket_view
        self.share = 1.0 / group.size()
        self.caps = [first_cap, cap]
        self.views: dict[Tensor, Tensor] = {}
        self.buckets: list[Tensor] = []
        self.active, self.rebuilt = False, False
        self.arrived: list[Tensor] = []
        self._fill([[self.parameters[i] for i in indices] for indices in buckets])
        self.handles = [_after_gradient(p, self._ready) for p in self.parameters]

    def _fill(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        self.buckets.clear()
        self.views.clear()
        for members in buckets:
            flat = members[0].new_empty(sum(p.numel() for p in members), requires_grad=False)
            self.buckets.append(flat)
            start = 0
            for p in members:
                self.views[p] = flat[start : start + p.numel()].view(p.shape)
                start += p.numel()

    def _ready(self, parameter: Tensor) -> None:
        if not self.active:
            return
        view, grad = self.views[parameter], parameter.grad
        assert grad is not None
        with torch.no_grad():
            if grad.untyped_storage()._cdata != view.untyped_storage()._cdata:
                torch.mul(grad, self.share, out=view)
                if self.as_view:
                    parameter.grad = view
            self.arrived.append(parameter)
            if len(self.arrived) == len(self.parameters):
                for p in () if self.as_view else self.parameters:
                    assert p.grad is not None
                    p.grad.copy_(self.views[p])
                self.active = False
                del view  # the old bucket goes first
                if not self.rebuilt and not self.as_view:
                    self._rebuild()

    def _rebuild_buckets(self) -> bool:
        late = not self.rebuilt and len(self.arrived) == len(self.parameters)
        if late:
            self._rebuild()
        return late

    def _rebuild(self) -> None:
        order = self.arrived
        indices, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            order, self.caps, [False] * len(order), []
        )
        self._fill([[order[i] for i in bucket] for bucket in indices])
        self.rebuilt = True

    def prepare_for_backward(self, outputs: Any) -> None:
        self.active, self.arrived = True, []

    def prepare_for_forward(self) -> None: ...

    def set_logger(self, logger: Any) -> None: ...


class _Logger:
    """DistributedDataParallel's log of statistics, not kept."""

    def __init__(self, reducer: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


# -- host memory -----------------------------------------------------------------------------------------


class _Host:
    """The memory of the machine around the card: on a virtual card, what is made inside `place`."""

    def __init__(self, card: VirtualGPU | None = None) -> None:
        self.card = card

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.card is None else self.card.host()

    def take(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy on the host."""
        with self.place():
            copied: Tensor = tensor.to("cpu", dtype or tensor.dtype, copy=True)
        if self.card is not None:
            self.card._meter.on_host(copied)
        return copied

    def saving(self) -> AbstractContextManager[Any]:
        """Saved tensors wait on the host, except weights and what is smaller than a kilobyte."""

        def pack(tensor: Tensor) -> Any:
            whole = tensor if tensor._base is None else tensor._base
            if isinstance(whole, nn.Parameter) or tensor.nbytes < 1024:
                return tensor.detach()
            return tensor.device, self.take(tensor.detach())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, tensor = packed
            back: Tensor = tensor.to(device, copy=True)
            return back

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# -- optimizers --------------------------------------------------------------------------------------------


def _local_gradient(parameter: Any) -> Tensor:
    """This rank's part of a gradient; that of an embedding split by vocabulary may come whole."""
    grad = parameter.grad
    if getattr(grad, "placements", None) != getattr(parameter, "placements", None):
        grad = grad.redistribute(parameter.device_mesh, parameter.placements)
    return _local(grad)


class _OnShards(torch.optim.Optimizer):
    """An optimizer of plain tensors on the local shards of DTensors: `make(shards)` builds it."""

    def __init__(
        self, parameters: Sequence[Tensor], make: Callable[[list[Any]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        self.parameters = list(parameters)
        self.shards = [nn.Parameter(_local(p).detach()) for p in self.parameters]
        self.inner = make(list(self.shards))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if p.grad is None else _local_gradient(p)
        self.inner.step()
        for p, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None
            self.state[p].update(self.inner.state[shard])


class _Masters(torch.optim.Optimizer):
    """An optimizer on fp32 copies of the local shards; it steps where they are, on the card or the host.

    copy: makes such a copy. early: gradients are copied, and dropped where they were, as soon as they are
    reduced; else one after the other at the step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        make: Callable[[list[Any]], torch.optim.Optimizer],
        copy: Callable[[Tensor], Tensor],
        place: Callable[[], AbstractContextManager[Any]],
        early: bool,
    ) -> None:
        super().__init__(parameters, {})
        self.parameters, self.copy, self.place = list(parameters), copy, place
        self.masters = {p: copy(_local(p).detach()) for p in self.parameters}
        for p, master in self.masters.items():
            self.state[p]["master"] = master
        self.inner = make(list(self.masters.values()))
        self.early = early
        if early:
            for p in self.parameters:
                _after_gradient(p, self.collect)

    def collect(self, parameter: Tensor) -> None:
        master, grad = self.masters[parameter], parameter.grad
        assert grad is not None
        copied = self.copy(_local_gradient(parameter))
        master.grad = copied if master.grad is None else master.grad.add_(copied)
        parameter.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        late = [p for p in self.parameters if p.grad is not None]
        for p in late:
            self.masters[p].grad = self.copy(_local_gradient(p))
        with self.place():
            self.inner.step()
        for p in late:
            self.masters[p].grad = None
        for p, master in self.masters.items():
            _local(p).copy_(master)
            self.state[p].update(self.inner.state[master])


def _optimizer(recipe: Recipe, sharding: Sharding, net: nn.Module, host: _Host) -> torch.optim.Optimizer:
    from torch.distributed.tensor import DTensor

    parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    fully = recipe.zero_stage >= 2
    exact = recipe.replace(precision="fp32", attention="sdpa")  # flash has no fp32, and no optimizer asks
    # Under FSDP2 the fp32 shard is the master copy.
    plain = exact if recipe.master_dtype and fully else recipe
    to_host = recipe.offloaded("optimizer_states") is not None and recipe.offloaded("parameters") is None
    if to_host or sharding.fp32_gradients:
        inner = partial(make_optimizer, exact)
        copy = partial(host.take, dtype=torch.float32) if to_host else partial(torch.Tensor.float)
        early = sharding.fp32_gradients or recipe.offloaded("gradients") is not None
        return _Masters(parameters, inner, copy, host.place if to_host else nullcontext, early)
    if recipe.zero_stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ZeroRedundancyOptimizer(parameters, optimizer_class=partial(_make, recipe))  # type: ignore[arg-type]
    # These have no operators for DTensors: each rank's shard is a tensor of its own for them.
    own = recipe.optimizer in ("adamw-8bit", "adafactor") or plain.master_dtype is not None
    if own and any(isinstance(p, DTensor) for p in parameters):
        return _OnShards(parameters, partial(make_optimizer, plain))
    # Operators on lists of tensors take one mesh at a time.
    groups: dict[Any, list[Tensor]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    if len(groups) == 1:
        return make_optimizer(plain, parameters)
    return make_optimizer(plain, [{"params": group} for group in groups.values()])  # type: ignore[misc]


def _make(recipe: Recipe, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return make_optimizer(recipe, parameters)


# -- the model on its ranks --------------------------------------------------------------------------------


class _DataParallel(nn.parallel.DistributedDataParallel):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.module.loss(logits, targets)
        return loss


_COLUMNS = {"qkv", "query", "key", "value", "up", "gate"}
_ROWS = {"out", "down"}


def _split(net: Net, mesh: Any) -> None:
    """Tensor parallel: each rank of `mesh` keeps its part of every layer, as Megatron-LM splits them."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, module in net.named_modules():
        last = name.rpartition(".")[2]
        if name == "embed.token":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif name == "head":
            plan[name] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        elif isinstance(module, nn.Linear) and last in _COLUMNS:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in _ROWS:
            plan[name] = RowwiseParallel()
    parallelize_module(net, mesh, plan)
    if isinstance(net.config, TransformerConfig) and net.config.tied and hasattr(net, "head"):
        net.get_submodule("head").weight = net.get_parameter("embed.token.weight")


def _fully_shard(net: Net, recipe: Recipe, sharding: Sharding, mesh: Any, host: _Host) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    reshard = sharding.reshard_after_forward
    if reshard is None and recipe.zero_stage == 2:
        reshard = False
    policy = MixedPrecisionPolicy()
    if recipe.master_dtype:
        reduce = DTYPES[sharding.reduce_dtype] if sharding.reduce_dtype else None
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[recipe.compute_dtype], reduce_dtype=reduce)
    offloaded = recipe.offloaded("parameters") is not None
    offload = CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()
    for module in (*_blocks(net), net):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
        )
    if offloaded and host.card is not None:
        for module in net.modules():
            _host_parameters(module, host)


def _blocks(net: Net) -> list[nn.Module]:
    blocks = getattr(net, "blocks", None)
    if blocks is not None:
        return list(blocks)
    return [block for stage in getattr(net, "stages", ()) for block in stage]


def _host_parameters(module: nn.Module, host: _Host) -> None:
    """Make `CPUOffloadPolicy` on fake CPU tensors what it is on a card: shards and gradients on the host.

    Gathering copies a shard to the card first; a reduced gradient is copied to the host.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.tensor import DTensor

    class HostedParam(FSDPParam):
        @property
        def all_gather_inputs(self) -> list[Tensor]:
            inputs = super().all_gather_inputs
            mine = self._sharded_param_data.untyped_storage()._cdata
            return [t.clone() if t.untyped_storage()._cdata == mine else t for t in inputs]

    def collect(parameter: Tensor) -> None:
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        parameter.grad = DTensor.from_local(  # the copy that `.to("cpu")` makes on a card
            host.take(grad._local_tensor), grad.device_mesh, grad.placements, shape=grad.shape,
            stride=grad.stride(), run_check=False,
        )  # fmt: skip

    assert host.card is not None
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else ():
            host.card._meter.on_host(parameter._sharded_param_data)
            parameter.__class__ = HostedParam
            _after_gradient(parameter.sharded_param, collect)


@dataclass
class ShardedWorkload(Workload):
    """A training step on one rank. `around` is what a step runs in: the split loss, offloaded activations."""

    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)

    def step(self, mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        with self.around():
            loss = super().step(mark)
        return _local(loss)


def sharded_workload(
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    sharding: Sharding | None = None,
    _host: _Host | None = None,
) -> ShardedWorkload:
    """Model, batch and optimizer of this rank in the current process group, ready to step.

    The group is a real one (gloo, NCCL) or a `fake_process_group`. Parameters are drawn after
    `torch.manual_seed(seed)` on every rank, batches differ between data-parallel ranks.
    Raises RecipeError for what PyTorch doesn't combine or a group of another size.
    """
    config = models.model(model) if isinstance(model, str) else model
    recipe = recipe.resolve(config)
    sharding, host = sharding or Sharding(), _host or _Host()
    device = torch.device(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != recipe.world_size:
        raise RecipeError(
            f"the process group has {world} ranks, the recipe a world_size of {recipe.world_size}"
        )
    _refuse(recipe, sharding)

    torch.manual_seed(seed)
    net = build(config, recipe, device)
    if recipe.master_dtype and recipe.zero_stage >= 2:
        for p in net.parameters():
            p.data = p.data.float()
    if sharding.prepare is not None:
        sharding.prepare(net)
    stepped: Any = net
    rank = 0
    if recipe.world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh

        shape, names = (recipe.data_parallel, recipe.tensor_parallel), ("data", "tensor")
        if recipe.tensor_parallel == 1:
            mesh = init_device_mesh(device.type, (recipe.world_size,), mesh_dim_names=("data",))
        else:
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            _split(net, mesh["tensor"])
        rank = mesh["data"].get_local_rank() if recipe.data_parallel > 1 else 0
        if recipe.zero_stage >= 2:
            _fully_shard(net, recipe, sharding, mesh["data"], host)
        elif recipe.data_parallel > 1:
            stepped = _DataParallel(net, gradient_as_bucket_view=sharding.gradient_as_bucket_view)
    optimizer = _optimizer(recipe, sharding, net, host)
    if recipe.offloaded("parameters") is not None:
        _step_on_host(optimizer, host)
    torch.manual_seed(seed + 1 + rank)
    inputs, targets = _batch(config, recipe, device)
    scaler = torch.amp.GradScaler(device.type) if recipe.grad_scaler else None
    return ShardedWorkload(
        stepped, inputs, targets, optimizer, recipe, config, scaler, partial(_around, recipe, host)
    )


def _step_on_host(optimizer: torch.optim.Optimizer, host: _Host) -> None:
    """Parameters, gradients and states are there: so is what a step makes."""
    step = optimizer.step

    def there(closure: Any = None) -> Any:
        with host.place():
            return step(closure)

    optimizer.step = there  # type: ignore[method-assign]


@contextmanager
def _around(recipe: Recipe, host: _Host) -> Iterator[None]:
    with ExitStack() as stack:
        if recipe.tensor_parallel > 1:
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        if recipe.offloaded("activations") is not None:
            stack.enter_context(host.saving())
        yield


def _refuse(recipe: Recipe, sharding: Sharding) -> None:
    if recipe.tensor_parallel > 1 and recipe.data_parallel > 1 and recipe.zero_stage < 2:
        raise RecipeError(
            f"tensor parallel with zero_stage {recipe.zero_stage}: PyTorch combines tensor parallel with"
            " fully_shard only; set zero_stage to 2 or 3"
        )
    if recipe.tensor_parallel > 1 and recipe.grad_scaler and recipe.zero_stage < 2:
        raise RecipeError(
            "tensor parallel with amp-fp16: PyTorch's GradScaler takes no plain gradients (the norms') beside"
            " split ones; use bf16 or amp-bf16, or set zero_stage to 2 or 3"
        )
    if recipe.offloaded("parameters") is not None and recipe.zero_stage != 3:
        raise RecipeError("offload parameters is a policy of fully_shard: set zero_stage to 3")
    if recipe.offloaded("gradients") is not None and (
        recipe.offloaded("optimizer_states") is None and recipe.offloaded("parameters") is None
    ):
        raise RecipeError("offload gradients serves an optimizer on the host: offload optimizer_states too")
    if recipe.offload and recipe.zero_stage == 1:
        raise RecipeError("ZeroRedundancyOptimizer steps on the card: offload with zero_stage 0, 2 or 3")
    if sharding.fp32_gradients and (recipe.precision != "bf16" or recipe.zero_stage < 2):
        raise RecipeError(
            "fp32_gradients keeps bf16 shards beside fp32 masters: precision bf16, zero_stage 2 or 3"
        )


def _whose_states(work: ShardedWorkload) -> str:
    """Which parameter's states the optimizer was making when memory ended; '' if none."""
    states = list(work.optimizer.state.items())
    count = sum(len(group["params"]) for group in work.optimizer.param_groups)
    if not states or (len(states) == count and len(states[-1][1]) == len(states[0][1])):
        return ""
    last = states[-1][0]
    names = [name for name, p in work.model.named_parameters() if p is last]
    return f" The optimizer was making the states of {names[0]}." if names else ""


def _gradients_elsewhere(work: ShardedWorkload) -> list[Tensor]:
    """Gradients that stand in no parameter's `.grad`: DistributedDataParallel's buckets, fp32 copies."""
    found = list(getattr(getattr(work.model, "reducer", None), "buckets", ()))
    if isinstance(work.optimizer, _Masters) and work.optimizer.early:
        found += [master.grad for master in work.optimizer.masters.values() if master.grad is not None]
    return found


def _settle(work: ShardedWorkload, host: _Host) -> None:
    """What the first step leaves, without running it: optimizer states, and fully_shard's buffers."""
    net: Any = work.model
    for module in net.modules():
        if hasattr(module, "unshard"):
            module.unshard()
            module.reshard()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = work.optimizer
    for p in parameters:
        p.grad = torch.zeros_like(p)
        if isinstance(optimizer, _Masters) and optimizer.early:
            optimizer.collect(p)
    with valueless_reads():
        optimizer.step()
    optimizer.zero_grad()
    if {"optimizer_states", "parameters"} & {item.partition(":")[0] for item in work.recipe.offload}:
        assert host.card is not None
        for tensor in _tensors(list(optimizer.state.values())):
            host.card._meter.on_host(_local(tensor))


#: A limit above this is none.
_ENDLESS = 2**50


# -- the trace -----------------------------------------------------------------------------------------------


def trace_sharded(
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe | None = None,
    *,
    sharding: Sharding | None = None,
    gpu: str | GPU | None = None,
    limit: int | None = None,
    lines: bool = False,
    warm: bool | None = None,
    **fields: Any,
) -> Trace:
    """The trace of one rank's training step among `recipe.world_size`, with neither cluster nor memory.

    model, recipe, **fields, gpu, limit, lines: as for `report.trace_step`.
    sharding: the rank, and what else a recipe doesn't say.
    warm: begin with optimizer states made and trace one step, in place of two steps of which the second is
        returned. The two agree; None: do so unless memory is limited, where the first step may be what fails.
    The model is built and sharded before the trace begins, as on the meta device. With offload
    `trace.info["host"]` says what stands in host memory.
    Raises torch.OutOfMemoryError where the card would, naming the layer.
    """
    config = models.model(model) if isinstance(model, str) else model
    recipe = (recipe or Recipe()).replace(**fields) if fields else recipe or Recipe()
    card = hardware.gpu(gpu) if isinstance(gpu, str) else gpu
    recipe = recipe.resolve(config)
    sharding = sharding or Sharding()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if recipe.world_size > 1:
            stack.enter_context(fake_process_group(recipe.world_size, sharding.rank))
        virtual_gpu = VirtualGPU(card, limit=limit, lines=lines)
        meter = virtual_gpu._meter
        with virtual_gpu._mode:
            host = _Host(virtual_gpu)
            work = sharded_workload(config, recipe, sharding=sharding, _host=host)
            capacity = limit if limit is not None or card is None else card.memory_bytes
            warm = (capacity is None or capacity > _ENDLESS) if warm is None else warm
            warm = warm and recipe.zero_stage >= 2 and recipe.set_to_none
            if warm:
                _settle(work, host)
        meter._model, meter._optimizer = work.model, work.optimizer
        with virtual_gpu:
            try:
                for _ in range(1 if warm else 2):
                    work.step()
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(f"{error}{_whose_states(work)}") from None
            for tensor in _gradients_elsewhere(work):
                meter._own(tensor, GRADIENTS)
        del work
    trace = virtual_gpu.trace.last_step()
    trace.info |= {"model": config.name, "recipe": recipe.to_dict(), "rank": sharding.rank}
    if recipe.offload:
        there = virtual_gpu.trace_of("host").last_step()
        trace.info["host"] = {"peak_bytes": there.peak_bytes}
    return trace
