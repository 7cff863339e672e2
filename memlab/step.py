"""One training step of a recipe, as plain code would write it.

    work = workload("gpt2", Recipe(micro_batch=4, sequence=512, precision="fp32"))
    loss = work.step()

The step is: zero the gradients; for each micro-batch forward, loss, backward; update. Nothing in it is
special to measuring. `step(mark)` calls `mark("forward")`, `mark("backward")` and `mark("optimizer")` as
those phases begin.

One process, one device: ZeRO, tensor parallelism and offload are computed (`footprint`), not run, and
refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import models
from memlab.models import ConvConfig, TransformerConfig
from memlab.nets import DTYPES, Net, build
from memlab.recipe import BLOCK_8BIT, MIN_8BIT, Recipe, RecipeError
from memlab.techniques.precision import MasterWeights

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def workload(
    model: str | TransformerConfig | ConvConfig,
    recipe: Recipe | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Workload:
    """Model, batch and optimizer of a recipe on `device` ('cpu', 'cuda', 'meta'), ready to step.

    Parameters and batch are drawn after `torch.manual_seed(seed)`. Under FakeTensorMode nothing takes memory.
    Raises UnknownNameError for a model, RecipeError for what can't be run, each in one line.
    """
    config = models.model(model) if isinstance(model, str) else model
    recipe = (recipe or Recipe()).resolve(config)
    device = torch.device(device)
    _refuse(recipe, device)
    torch.manual_seed(seed)
    net = build(config, recipe, device)
    inputs, targets = _batch(config, recipe, device)
    scaler = torch.amp.GradScaler(device.type) if recipe.grad_scaler else None
    trained: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
    return Workload(net, inputs, targets, make_optimizer(recipe, trained), recipe, config, scaler)


@dataclass
class Workload:
    """A training step that can be repeated: `step()`.

    `inputs` is (B, T) int64 tokens or (B, channels, S, S) images, `targets` int64: (B, T) for a language
    model, (B,) for BERT and classifiers. With accumulation the same micro-batch is used again, as if a
    loader had put the next one in its place.
    """

    model: Net
    inputs: Tensor
    targets: Tensor
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    config: TransformerConfig | ConvConfig
    scaler: torch.amp.GradScaler | None = None

    def step(self, mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        """One optimizer step over `recipe.accumulation` micro-batches; returns the last one's loss, a scalar.

        `mark` is told each phase ('forward', 'backward', 'optimizer') as it begins. `logits` and `loss` are
        local variables of this function: they live until the next micro-batch replaces them, else until it
        returns.
        """
        self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none)
        for _ in range(self.recipe.accumulation):
            mark("forward")
            with self._autocast():
                logits = self.model(self.inputs)
                loss = self.model.loss(logits, self.targets)
            mark("backward")
            share = loss if self.recipe.accumulation == 1 else loss / self.recipe.accumulation
            share = share if self.scaler is None else self.scaler.scale(share)
            share.backward()  # type: ignore[no-untyped-call]
        mark("optimizer")
        local = getattr(loss, "_local_tensor", loss)  # the loss on split logits is a DTensor
        with valueless_reads() if isinstance(local, FakeTensor) or loss.is_meta else nullcontext():
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self.recipe.autocast:
            return nullcontext()
        return torch.autocast(self.inputs.device.type, DTYPES[self.recipe.compute_dtype])


def _refuse(recipe: Recipe, device: torch.device) -> None:
    """What the formula knows and one process on one device doesn't run."""
    for what, asked in (
        ("tensor_parallel", recipe.tensor_parallel > 1),
        ("zero_stage", recipe.zero_stage > 0),
        ("world_size", recipe.world_size > 1),
        ("offload", bool(recipe.offload)),
    ):
        if asked:
            raise RecipeError(
                f"a step runs in one process on one device, so {what} can't be run here: "
                "memlab.compute gives its formula"
            )
    if recipe.autocast and device.type == "meta":
        raise RecipeError(
            f"precision {recipe.precision}: torch has no autocast for the meta device; trace it on fake "
            "tensors (memlab.trace_step) or use fp32 or bf16"
        )
    if recipe.optimizer_impl == "fused" and device.type == "meta":
        raise RecipeError(
            "optimizer_impl fused: torch has no fused optimizers for the meta device; use foreach"
        )


def _batch(
    config: TransformerConfig | ConvConfig, recipe: Recipe, device: torch.device
) -> tuple[Tensor, Tensor]:
    batch = recipe.micro_batch
    draw = partial(torch.randint, device=device)
    if isinstance(config, ConvConfig):
        assert recipe.image is not None  # filled in by resolve
        shape = (batch, config.channels, recipe.image, recipe.image)
        images = torch.randn(shape, device=device, dtype=DTYPES[recipe.parameter_dtype])
        return images, draw(config.classes, (batch,))
    assert recipe.sequence is not None
    tokens = draw(config.vocab, (batch, recipe.sequence))
    if config.family == "bert":
        return tokens, draw(config.hidden, (batch,))
    return tokens, draw(config.vocab, (batch, recipe.sequence))


# -- optimizers ------------------------------------------------------------------------------------------


def make_optimizer(recipe: Recipe, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The recipe's optimizer over `parameters`; implementation (foreach, fused, for-loop) passed explicitly.

    torch would choose for itself: foreach on CUDA, the loop on CPU. That choice moves a copy of all
    parameters.
    """
    impl: dict[str, Any] = {"foreach": recipe.optimizer_impl == "foreach"}
    if recipe.optimizer != "adafactor":
        impl["fused"] = recipe.optimizer_impl == "fused"
    make: dict[str, Make] = {
        "sgd": partial(torch.optim.SGD, lr=0.01, **impl),
        "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, **impl),
        "adam": partial(torch.optim.Adam, lr=1e-4, **impl),
        "adamw": partial(torch.optim.AdamW, lr=1e-4, **impl),
        "adamw-8bit": partial(AdamW8bit, lr=1e-4),
        "adafactor": partial(torch.optim.Adafactor, **impl),
    }
    if recipe.master_dtype is None:
        return make[recipe.optimizer](parameters)
    return MasterWeights(parameters, make[recipe.optimizer])


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose two moments take one byte per value, plus one fp32 scale per 256 values and moment.

    A byte holds a root of value / (the block's largest), rounded to the nearest level: the square root of the
    first moment, with its sign, the fourth root of the second. So small values get more of the levels, as in
    the table of Dettmers et al. (arXiv:2110.02861), which bitsandbytes rounds to as well; the levels differ,
    the bytes don't. A second moment takes at least the lowest level above 0, 2.4e-10 of its block's largest.
    Tensors under 4096 values keep fp32 moments, as in bitsandbytes. During
    `step` the fp32 moments of one parameter at a time exist, and one more tensor of its size.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], **{k: group[k] for k in self.defaults})

    def _update(
        self,
        p: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        if not state:
            _make_moments(p, state)
        small = p.numel() < MIN_8BIT
        if small:
            m, v = state["exp_avg"], state["exp_avg_sq"]
        else:
            m_blocks = _from_bytes(state["exp_avg"], state["exp_avg_scale"], signed=True)
            v_blocks = _from_bytes(state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False)
            m, v = (x.flatten()[: p.numel()].view_as(p) for x in (m_blocks, v_blocks))
        grad = grad.float()
        m.lerp_(grad, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        step_size = lr / (1 - betas[0] ** self.steps)
        update = (v / (1 - betas[1] ** self.steps)).sqrt_().add_(eps)
        torch.div(m, update, out=update)
        p.mul_(1 - lr * weight_decay).add_(update, alpha=-step_size)
        del update
        if not small:
            _to_bytes(m_blocks, state["exp_avg"], state["exp_avg_scale"], signed=True)
            _to_bytes(v_blocks, state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False)


def _make_moments(p: Tensor, state: dict[str, Tensor]) -> None:
    for moment in ("exp_avg", "exp_avg_sq"):
        if p.numel() < MIN_8BIT:
            state[moment] = torch.zeros_like(p, dtype=torch.float32)
        else:
            state[moment] = torch.zeros_like(p, dtype=torch.uint8)
            blocks = math.ceil(p.numel() / BLOCK_8BIT)
            state[moment + "_scale"] = torch.zeros(blocks, device=p.device, dtype=torch.float32)


def _from_bytes(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """(n,) bytes and (blocks,) scales -> (blocks, 256) fp32, the last block filled up with zeros."""
    codes = codes.flatten()
    if missing := -codes.numel() % BLOCK_8BIT:
        codes = F.pad(codes, (0, missing))
    x = codes.view(-1, BLOCK_8BIT).float()
    if signed:
        x.sub_(128).div_(127)
        x.mul_(x.abs())
    else:
        x.div_(255).pow_(4)
    return x.mul_(scale[:, None])


def _to_bytes(x: Tensor, codes: Tensor, scale: Tensor, signed: bool) -> None:
    """The way back; x is used up."""
    scale.copy_(torch.linalg.vector_norm(x, float("inf"), dim=1))
    x.div_(scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    if signed:
        x = x.abs().sqrt_().copysign_(x).mul_(127).add_(128).round_()
    else:
        x.sqrt_().sqrt_().mul_(255).round_().clamp_(min=1)  # never 0: an update is divided by its root
    codes.copy_(x.flatten()[: codes.numel()].view_as(codes))


# -- fake tensors ----------------------------------------------------------------------------------------


class _ValuelessReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0.0
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return 0.0


def valueless_reads() -> AbstractContextManager[Any]:
    """Lets an optimizer read a number (`.item()`) from a fake or meta tensor, which holds none: it reads 0.

    Adafactor reads norms and GradScaler whether a gradient overflowed; neither decides a tensor's size.
    """
    return _ValuelessReads()  # type: ignore[no-untyped-call]
