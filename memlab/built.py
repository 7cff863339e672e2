"""A plan for a model that has no closed form: any `nn.Module`, judged by traces alone.

    memlab plan mypackage.models:make --gpu T4 --effective-batch 64

`make()` returns (module, batch), where batch(n) gives the inputs of n samples: a tensor, a tuple or a dict.
The loss is the output's `.loss` if it has one, the output itself if it is a number, else its mean.

What differs from `planner`: only levers outside the model are tried (micro-batch, precision, optimizer), on
one card; checkpointing, attention and sharding are the module's own code. Every verdict is a trace's, so
nothing is held back for a formula. FLOPs are counted on the traced operators (torch's FlopCounterMode).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from memlab.hardware import GPU
from memlab.planner import ASSUMED_CONTEXT
from memlab.recipe import Recipe
from memlab.report import trace_step
from memlab.step import make_optimizer
from memlab.units import GB, format_gb

__all__ = ["BuiltPlan", "Way", "load", "plan_built"]

Build = Callable[[], tuple[nn.Module, Callable[[int], Any]]]


@dataclass(frozen=True)
class Way:
    """Precision and optimizer with the largest micro-batch that runs (0: none), its traced peak, its time."""

    precision: str
    optimizer: str
    micro_batch: int
    peak_bytes: int | None
    seconds: float
    numerics: str


@dataclass(frozen=True)
class BuiltPlan:
    """Ways that run, cheapest first; those that change training last."""

    name: str
    gpu: GPU
    effective_batch: int
    flops: int
    mfu: float
    ways: tuple[Way, ...]

    @property
    def best(self) -> Way | None:
        return next((way for way in self.ways if way.micro_batch), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; sizes are integers in bytes."""
        return {
            "model": self.name, "gpu": self.gpu.name, "effective_batch": self.effective_batch,
            "flops_per_effective_batch": self.flops, "mfu": self.mfu,
            "ways": [vars(way) for way in self.ways], "best": vars(self.best) if self.best else None,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{self.name} on one {self.gpu.name} ({format_gb(self.gpu.memory_bytes)}), effective batch "
            f"{self.effective_batch}; every line is a trace",
            f"{'precision, optimizer':<38}{'micro-batch':>14}{'peak GB':>10}{'a batch':>12}",
        ]
        for way in self.ways:
            turns = self.effective_batch // max(way.micro_batch, 1)
            size = f"{way.micro_batch} x {turns}" if way.micro_batch else "none runs"
            peak = f"{way.peak_bytes / GB:.2f}" if way.peak_bytes else ""
            what = f"{way.precision}, {way.optimizer}"
            lines.append(f"  {what:<36}{size:>14}{peak:>10}{way.seconds:>10.3g} s")
            if way.numerics:
                lines.append(f"      {way.numerics}")
        lines.append(f"time: counted FLOPs at {self.mfu:.0%} of the dense peak; levers inside the model")
        lines.append("(checkpointing, attention, sharding) aren't tried: they are its own code")
        return "\n".join(lines)


def load(name: str) -> Build:
    """'package.module:function' -> the function. Raises ValueError, one line, if there is no such thing."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise ValueError(f"{name}: can't be imported: {_said(error)}") from None
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ValueError(f"{name} isn't a function")
    return found  # type: ignore[no-any-return]


def _said(error: BaseException) -> str:
    """'ValueError: no weights (mine.py, line 12)': the innermost line that isn't torch's or ours."""
    rooms = (__file__, torch.__file__, importlib.__file__)
    ours = tuple(str(Path(file).parent) for file in rooms)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*ours, "<"))]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


@contextlib.contextmanager
def _blamed(name: str) -> Iterator[None]:
    """What the user's own code raises becomes one line that says so."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, ValueError) and last == __file__:
            raise  # ours: it says what to return
        raise ValueError(f"{name} failed: {_said(error)}") from None


def plan_built(
    name: str, build: Build, gpu: GPU, effective_batch: int = 1, *, mfu: float = 0.4,
    says: Callable[[str], None] = lambda text: None,
) -> BuiltPlan:  # fmt: skip
    """Trace `build` on `gpu` with each precision and optimizer, from the whole batch down to one sample.

    says: told what is traced next. Raises ValueError where `build` doesn't return (module, batch).
    """
    sixteen = "amp-bf16" if "bf16" in gpu.dtypes else "amp-fp16"
    with _blamed(name):
        flops = _flops(name, build, effective_batch)
    sizes = [b for b in range(effective_batch, 0, -1) if effective_batch % b == 0]
    ways = []
    for precision, optimizer, numerics in (
        (sixteen, "adamw", ""),
        ("fp32", "adamw", ""),
        (sixteen, "adamw-8bit", "optimizer states in 8 bits"),
        ("bf16", "adamw", "weights and moments in bf16: small updates are rounded away"),
    ):
        recipe = Recipe(precision=precision, optimizer=optimizer).replace(
            optimizer_impl="fused" if optimizer == "adamw" else ""
        )
        rate = gpu.flops.get(recipe.compute_dtype) or gpu.flops["fp32"]
        micro, peak = 0, None
        for size in sizes:
            says(f"tracing {precision}, {optimizer}, micro-batch {size} ...")
            with _blamed(name):
                peak = _traced(build, recipe, gpu, size, effective_batch // size)
            if peak is not None:
                micro = size
                break
        ways.append(Way(precision, optimizer, micro, peak, flops / (rate * mfu), numerics))
    ways.sort(key=lambda way: (bool(way.numerics), not way.micro_batch, way.seconds))
    return BuiltPlan(name, gpu, effective_batch, flops, mfu, tuple(ways))


def _made(name: str, build: Build) -> tuple[nn.Module, Callable[[int], Any]]:
    made: Any = build()
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])
    ):
        raise ValueError(f"{name}() must return (module, batch), batch(n) giving the inputs of n samples")
    return made[0], made[1]


def _loss(module: nn.Module, inputs: Any) -> Tensor:
    if isinstance(inputs, dict):
        out = module(**inputs)
    else:
        out = module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)
    loss = out if getattr(out, "loss", None) is None else out.loss
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the model returns a {type(out).__name__}: return a tensor, or something with a .loss"
        )
    return loss if loss.dim() == 0 else loss.float().mean()


def _traced(build: Build, recipe: Recipe, gpu: GPU, micro: int, turns: int) -> int | None:
    def make() -> Callable[[], None]:
        module, batch = _made("the function", build)
        if recipe.precision == "bf16":
            module = module.bfloat16()
        inputs = batch(micro)
        if recipe.precision == "bf16":
            inputs = _cast(inputs)
        optimizer = make_optimizer(recipe, [p for p in module.parameters() if p.requires_grad])
        dtype = torch.float16 if recipe.compute_dtype == "fp16" else torch.bfloat16

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            for _ in range(min(turns, 2)):
                with torch.autocast("cpu", dtype, enabled=recipe.autocast):
                    loss = _loss(module, inputs)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    limit = None if gpu.context_bytes is not None else gpu.memory_bytes - ASSUMED_CONTEXT
    try:
        return trace_step(make, gpu=gpu, limit=limit).peak_bytes
    except torch.OutOfMemoryError:
        return None


def _cast(inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {key: _cast(value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_cast(value) for value in inputs)
    return inputs.bfloat16() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def _flops(name: str, build: Build, samples: int) -> int:
    """Of forward and backward, counted on fake tensors for one sample and scaled."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        module, batch = _made(name, build)
        _loss(module, batch(2)).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) * samples // 2
