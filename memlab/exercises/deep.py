"""Exercises 3.1 to 3.6: ResNet counted, the residual gradient, vanishing, checkpointing, segments, freezing.

Ten of the fifteen points come from bytes that `memlab.Meter` measures while the student's code trains small
chains on the CPU; each such check also measures its twin, the plain step, which has to fail it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.exercises import (
    Evidence,
    Exercise,
    Score,
    Tally,
    answers_to,
    call,
    close,
    exactly,
    is_number,
    one_line,
    plain,
    several,
    watched,
)
from memlab.exercises.limits import contained
from memlab.models import model as model_config
from memlab.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.multiprocessing.reductions import StorageWeakRef


def _value(case: Evidence) -> Any:
    return case.get("value")


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if is_number(value) else repr(value)[:80]


# -- 3.1 ResNet-152, counted -------------------------------------------------------------------------------


def resnet_saved_bytes(depths: Sequence[int], batch: int, side: int) -> int:
    """What a bottleneck ResNet saves for its backward, fp32, images of `side` pixels (a multiple of 32).

    Convolutions save their input, batch norms their input and two statistics per channel, ReLUs their output
    (in place on the norm's output, and the next convolution's input: one tensor), the pooling int64 indices.
    """
    stem, pooled = (side // 2) ** 2, (side // 4) ** 2
    images = 3 * side**2 + 2 * 64 * stem + 64 * pooled + 2 * 64 * pooled  # indices are two words each
    channels = 64
    pixels = pooled
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for block in range(depth):
            after = pixels // 4 if stage and not block else pixels
            images += 2 * width * pixels + 2 * width * after + 2 * 4 * width * after
            channels += width + width + 4 * width
            if not block:
                images += 4 * width * after  # the norm of the projection on the shortcut
                channels += 4 * width
            pixels = after
    images += 64 * 2 ** (len(depths) - 1) * 4  # the input of the last layer
    total: int = 4 * (batch * images + 2 * channels)
    return total


class _ResNetCase(NamedTuple):
    name: str
    batch: int
    side: int

    def expected(self) -> tuple[int, int]:
        if self.name == _SLICES:
            # the images, as the convolution's input, and its whole result, of which a part is squared
            return 8 * 3 * 9 + 8, 4 * self.batch * (3 + 8) * self.side**2
        depths = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}[self.name]
        return model_config(self.name).parameter_count, resnet_saved_bytes(depths, self.batch, self.side)


_SLICES = "a convolution, a slice of its result squared, times a buffer"


def _resnets(seed: int) -> list[_ResNetCase]:
    rng = random.Random(f"3.1 {seed}")
    hidden = _ResNetCase("resnet50", rng.randrange(3, 40), 32 * rng.randrange(3, 12))
    slices = _ResNetCase(_SLICES, rng.randrange(3, 40), rng.randrange(20, 90))
    return [slices, hidden, _ResNetCase("resnet152", 32, 224)]


def _slices() -> nn.Module:
    """A model that saves a view (its storage is four times as large) and a buffer of many bytes.

    One parameter is frozen.
    """
    import torch
    from torch import nn

    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filters = nn.Conv2d(3, 8, 3, padding=1, device="meta")
            self.filters.get_parameter("bias").requires_grad_(False)
            self.register_buffer("gain", torch.empty(2, 1, 1, 4096, device="meta"))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            part: torch.Tensor = self.filters(images)[:, :2].square().mean((2, 3), keepdim=True)
            return part * self.get_buffer("gain")[:, 0, 0, 0].view(1, 2, 1, 1)

    return Slices()


def _count_evidence(answer: Any, seed: int) -> Evidence:
    import torch
    from torch import nn

    from memlab import nets

    cases: list[Evidence] = []
    hidden = _resnets(seed)
    for case in hidden:
        model = _slices() if case.name == _SLICES else nets.build(model_config(case.name), device="meta")
        images = torch.empty(case.batch, 3, case.side, case.side, device="meta")
        made: list[StorageWeakRef] = []
        for part in model.modules():
            if isinstance(part, nn.Conv2d):
                part.register_forward_hook(lambda *a, made=made: made.append(_weak(a[2])))
        cases.append(call(answer, model, images))
        cases[-1]["left"] = sum(not storage.expired() for storage in made)  # type: ignore[no-untyped-call]
        if type(_value(cases[0])) is not list:  # spare the other counts, which take seconds
            return {"cases": cases * len(hidden)}
    return {"cases": cases}


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _count_score(evidence: Evidence, seed: int) -> Score:
    cases = _resnets(seed)
    tally = Tally()
    parameters = saved = left = ""
    for case, entry in answers_to(cases, evidence["cases"]):
        if "error" in entry:
            return Score(0, (f"count stopped with {entry['error']}",))
        value = _value(entry)
        if type(value) is not list or len(value) != 2:
            return Score(0, ("count returns two ints: (parameters, saved bytes)",))
        right, right_bytes = case.expected()
        where = f"{case.name}, {case.batch} x 3 x {case.side} x {case.side}"
        if value[0] != right or type(value[0]) is not int:
            parameters = parameters or (
                f"{where}: it has {right:,} parameters, you counted {_shown(value[0])}: "
                "sum p.numel() over model.parameters(), frozen or not; buffers (running statistics) are none"
            )
        if not (type(value[1]) is int and value[1] == right_bytes):
            saved = saved or _saved_hint(where, value[1], case, right_bytes)
        if entry["left"]:
            left = left or (
                f"{where}: {entry['left']} results of convolutions are alive when count has returned: a pack "
                "hook that returns t itself ties a knot (the graph holds t, t the graph): return t.detach()"
            )
    tally.award(0.5, not parameters, parameters)
    if tally.award(1, not saved, saved):
        tally.award(0.5, not left, left)
    return tally.score()


def _saved_hint(where: str, said: Any, case: _ResNetCase, right: int) -> str:
    text = f"{where}: autograd saves {right:,} B, you counted {_shown(said)}: "
    if type(said) is not int:
        return text + ("return bytes" if is_number(said) and said < right / 1e3 else "return bytes as an int")
    if close(said, right / 4, 0.01):
        return text + "that is elements; an fp32 number has 4 bytes"
    if case.name != _SLICES and said < right / 20:
        return (
            text + "on the meta device every data_ptr() is 0: tell storages apart by untyped_storage()._cdata"
        )
    if case.name == _SLICES and right - said == 4 * case.batch * 6 * case.side**2:
        return (
            text + "a slice keeps its whole storage alive: count t.untyped_storage().nbytes(), not t.nbytes"
        )
    if right < said < 1.01 * right or (case.name == _SLICES and said - right == 4 * 2 * 4096):
        return (
            text + "the model's own buffers (running statistics) are in there: leave them out as the weights"
        )
    if said > right:
        return (
            text
            + "count each storage once (a ReLU's output is the next convolution's input), weights never; "
            "ids are reused, use the storage's _cdata"
        )
    return (
        text
        + "every tensor that the pack hook is given counts, except parameters and buffers; ids of tensors "
        "are reused, use the storage's _cdata"
    )


# -- 3.2 the residual gradient -----------------------------------------------------------------------------


class _Vjp(NamedTuple):
    """A block y = F(x) + x, or F(x) + P x with F(x) = tanh(W x), at one x; g is the gradient at y."""

    w: list[list[float]]
    x: list[float]
    g: list[float]
    projection: list[list[float]] | None

    def jacobian(self) -> list[list[float]]:
        slopes = [1 - math.tanh(math.fsum(map(operator.mul, row, self.x))) ** 2 for row in self.w]
        return [[slope * v for v in row] for slope, row in zip(slopes, self.w, strict=True)]

    def right(self) -> list[float]:
        """J^T g, and g or P^T g for the shortcut."""
        skip = self.g if self.projection is None else _transposed(self.projection, self.g)
        return [a + b for a, b in zip(_transposed(self.jacobian(), self.g), skip, strict=True)]


def _transposed(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The transposed matrix times the vector."""
    return [math.fsum(map(operator.mul, column, vector)) for column in zip(*matrix, strict=True)]


def _vjp_cases(seed: int) -> dict[str, list[_Vjp]]:
    """Two square blocks, and two with a projection."""
    rng = random.Random(f"3.2 {seed}")

    def block(outputs: int, inputs: int) -> _Vjp:
        def matrix() -> list[list[float]]:
            return [vector(inputs) for _ in range(outputs)]

        def vector(n: int) -> list[float]:
            return [rng.gauss(0, 1) for _ in range(n)]

        return _Vjp(matrix(), vector(inputs), vector(outputs), None if outputs == inputs else matrix())

    n, m = rng.randrange(3, 8), rng.randrange(3, 8)
    wide, tall = block(n, n + rng.randrange(1, 4)), block(m + rng.randrange(1, 4), m)
    return {"identity": [block(n, n), block(m, m)], "projection": [wide, tall]}


def _vjp_evidence(answer: Any, seed: int) -> Evidence:
    import torch

    def given(case: _Vjp) -> list[torch.Tensor]:
        parts = [case.jacobian(), case.g] + ([] if case.projection is None else [case.projection])
        return [torch.tensor(part, dtype=torch.float64) for part in parts]

    return {kind: [call(answer, *given(case)) for case in cases] for kind, cases in _vjp_cases(seed).items()}


def _vjp_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    for kind, cases in _vjp_cases(seed).items():
        faults = [_vjp_fault(kind, case, entry) for case, entry in answers_to(cases, evidence[kind])]
        fault = next(filter(None, faults), "")
        tally.award(0.5, not fault, f"{kind} shortcut: {fault}")
    return tally.score()


def _vjp_fault(kind: str, case: _Vjp, entry: Evidence) -> str:
    path = ": the identity path becomes P^T g" if kind == "projection" else ""
    if "error" in entry:
        return f"it stopped with {entry['error']}{path}"
    truth, got = case.right(), _value(entry)
    if type(got) is not list or len(got) != len(truth) or not all(map(is_number, got)):
        return f"return a tensor with {len(truth)} numbers, one for each input of the block{path}"
    error = math.dist(truth, got)
    if error <= 1e-5 * (1 + math.hypot(*truth)):
        return ""
    if len(case.g) == len(got) and math.dist(got, [2 * v for v in case.g]) < 1e-6:
        return (
            f"that is 2g whatever the block computes, off by {error:.3g}: dL/dF is g, and must pass through J"
        )
    return f"off by {error:.3g} from autograd: J[i, j] is dF_i/dx_j; what is the gradient of g . F(x)?"


# -- 3.3 gradients through depth ---------------------------------------------------------------------------

_Stack = tuple[int, bool, str | None, str]


def _stacks(seed: int) -> dict[str, _Stack]:
    """Depth, skip, norm and init; the depths come from the seed."""
    rng = random.Random(f"3.3 {seed}")

    def deep() -> int:
        return rng.randrange(40, 53)

    return {
        "no layer": (0, False, None, "default"),
        "default, few layers": (rng.randrange(3, 10), False, None, "default"),
        "default, some layers": (rng.randrange(12, 31), False, None, "default"),
        "default, many layers": (deep(), False, None, "default"),
        "Xavier": (deep(), False, None, "xavier"),
        "LayerNorm": (deep(), False, "layer", "default"),
        "skip": (deep(), True, None, "default"),
        "skip, Xavier": (deep(), True, None, "xavier"),
    }


#: Logarithm (base 10) of the norm as start + slope x depth, and how far it may be off: share + more x depth.
#: Lines through what networks of 1 to 60 layers give; 12 seeds of each are off by half as much at most.
_LINES = {
    (False, None, "default"): (1.70, -0.245, 0.5, 0.020),
    (False, None, "xavier"): (1.45, -0.0125, 0.3, 0.020),
    (False, "layer", "default"): (1.33, 0.0270, 0.3, 0.012),
    (True, None, "default"): (1.95, 0.0185, 0.5, 0.0),
    (True, None, "xavier"): (2.35, 0.0208, 0.5, 0.0),
}


def _norm_bounds(stack: _Stack) -> tuple[float, float]:
    """Between what the norm of the input's gradient must lie: without a layer it is that of 64 x 64 ones."""
    depth, *kind = stack
    if not depth:
        return 64.0, 64.0
    start, slope, share, more = _LINES[kind[0], kind[1], kind[2]]  # type: ignore[index]
    middle, off = start + slope * depth, share + more * depth
    return 10 ** (middle - off), 10 ** (middle + off)


def _as_returned(answer: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, where a tensor of one number is no float; a number of NumPy's is one."""
    value = answer(*arguments)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        value = value.item()
    return value if type(value) in (float, int) else f"a {type(value).__name__}"


def _norms_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        import torch
        from torch import nn
        from torch.nn.modules.module import register_module_forward_pre_hook

        found = []
        for arguments in _stacks(seed).values():
            torch.manual_seed(seed % 2**32 + 33)
            bias, norms = 0.0, list[torch.Tensor]()

            def look(part: nn.Module, _: Any) -> None:
                nonlocal bias
                if isinstance(part, nn.Linear) and part.bias is not None:
                    bias = max(bias, float(part.bias.detach().abs().max()))

            def keep_norm(_: Any, t: torch.Tensor, norms: list[torch.Tensor] = norms) -> None:
                if t.is_floating_point() and t.numel() > 1:
                    norms.append(t.detach().double().norm())

            handle = register_module_forward_pre_hook(look)
            try:
                with watched(keep_norm):
                    found.append(call(_as_returned, answer, *arguments))
            finally:
                handle.remove()
            value = _value(found[-1])
            found[-1]["bias"] = plain(bias)  # the largest that a Linear had when it ran
            found[-1]["measured"] = any(close(value, float(n), 1e-3) for n in norms)  # of a tensor made there
        return {"norms": found}

    return contained(work, seconds=30)


def _norms_score(evidence: Evidence, seed: int) -> Score:
    stacks = _stacks(seed)
    norms = dict(answers_to(stacks, evidence["norms"]))
    tally = Tally()
    stopped = next((case["error"] for case in norms.values() if "error" in case), None)
    if stopped and all("error" in case for case in norms.values()):
        return Score(0, (f"input_grad_norm stopped with {stopped}",))

    def fault(*names: str) -> str:
        for name in names:
            depth, skip, norm, init = stacks[name]
            low, high = _norm_bounds(stacks[name])
            asked = f"input_grad_norm({depth}, skip={skip}, norm={norm!r}, init={init!r})"
            if "error" in norms[name]:
                return f"{asked} stopped with {norms[name]['error']}"
            value = _value(norms[name])
            if not is_number(value):
                said = value if type(value) is str else _shown(value)
                return f"{asked} returned {said}; return a float: .norm().item()"
            if init == "xavier" and norms[name]["bias"]:
                most = f"{norms[name]['bias']:.2g}"
                return f"{asked}: biases of up to {most} are added, all should be 0 with 'xavier'"
            if not low * 0.9999 <= value <= high * 1.0001:
                wanted = f"{low:.3g}" if low == high else f"between {low:.2g} and {high:.2g}"
                return f"{asked} is {value:.3g}, should be {wanted}: {_NORM_HINTS[name]}"
            if depth and norms[name]["measured"] is not True:
                return (
                    f"{asked} returned {value:.3g}, and no tensor that was computed has that norm: build the "
                    "layers, run the backward, and return the norm of the gradient at x0"
                )
        return ""

    plain_stack = fault(*[name for name in stacks if name.startswith(("no", "default"))])
    if not tally.award(0.5, not plain_stack, plain_stack):
        return tally.score()
    for names in (("Xavier",), ("LayerNorm",), ("skip", "skip, Xavier")):
        found = fault(*names)
        tally.award(0.5, not found, found)
    return tally.score()


_NORM_HINTS = {
    "no layer": "without a layer L is x.sum(): 64 x 64 ones have norm 64",
    "default, few layers": "x -> tanh(Linear(x)) for each layer, then the gradient at the first x",
    "default, some layers": "every layer must shrink it: a fresh nn.Linear each, tanh after it",
    "default, many layers": "every layer must shrink it: a fresh nn.Linear each, tanh after it",
    "Xavier": "nn.init.xavier_normal_ on the weight of every layer, zeros on its bias",
    "LayerNorm": "norm='layer' puts an nn.LayerNorm between the Linear and the tanh of every layer",
    "skip": "skip=True adds the layer's input to its output",
    "skip, Xavier": "skip=True adds the layer's input to its output, with either init",
}


# -- what is measured in 3.4 to 3.6 ------------------------------------------------------------------------


class _Run(NamedTuple):
    """One measured forward and backward. Bytes are live tensors beyond the parameters."""

    kept: int  # at the end of the forward, the input included
    peak: int
    left: int  # after the backward and del: gradients not counted
    calls: list[int]  # forwards of each counted module
    gradients: list[torch.Tensor | None]  # of the parameters
    input_gradient: torch.Tensor | None
    output: torch.Tensor


def _measured(
    modules: Sequence[nn.Module], forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> _Run:
    """Runs forward(x) and the backward of its sum under the meter, counting the modules' forwards."""
    import torch
    from torch import nn

    from memlab.meter import Meter

    calls = [0] * len(modules)

    def count(i: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[i] += 1

        return hook

    parent = nn.ModuleList(modules)
    parent.zero_grad()
    handles = [m.register_forward_pre_hook(count(i)) for i, m in enumerate(modules)]
    x = x.detach().clone().requires_grad_(x.requires_grad)
    gc.collect()
    try:
        with Meter(parent) as meter:
            before = meter.live_bytes
            out = forward(x)
            kept = meter.live_bytes - before
            gradient = torch.ones_like(out)
            out.backward(gradient)  # type: ignore[no-untyped-call]
            output, input_gradient = out.detach().clone(), x.grad
            held = {p.grad for p in parent.parameters() if p.grad is not None}
            grads = sum(g.untyped_storage().nbytes() for g in held)
            extra = sum(t.untyped_storage().nbytes() for t in (output, input_gradient, x) if t is not None)
            del out, gradient
            gc.collect()
            left = meter.live_bytes - before - grads - extra
        peak = meter.trace.peak_bytes - before
    finally:
        for handle in handles:
            handle.remove()
    gradients = [p.grad for p in parent.parameters()]
    parent.zero_grad()
    return _Run(kept, peak, left, calls, gradients, input_gradient, output)


def _difference(first: Iterable[torch.Tensor | None], second: Iterable[torch.Tensor | None]) -> float:
    """The largest absolute difference; inf where one of two gradients is missing."""
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if (a is None) != (b is None):
            return math.inf
        if a is not None and b is not None:
            worst = max(worst, float((a - b).abs().max()) if a.shape == b.shape else math.inf)
    return worst


# -- 3.4 my_checkpoint -------------------------------------------------------------------------------------

_SEGMENTS, _LAYERS, _ROWS, _WIDTH = 8, 4, 512, 32  # one activation is 64 KiB, one weight 4 KiB


def _segments(dropout: float, seed: int) -> list[nn.Module]:
    import torch
    from torch import nn

    torch.manual_seed(seed % 2**32 + 34)

    def layer() -> list[nn.Module]:
        extra = [nn.Dropout(dropout)] if dropout else []
        return [nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), *extra]

    return [nn.Sequential(*itertools.chain(*(layer() for _ in range(_LAYERS)))) for _ in range(_SEGMENTS)]


def _checkpoint_evidence(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        import torch

        def through(
            wrap: Callable[[Any, torch.Tensor], Any], segments: list[nn.Module]
        ) -> Callable[..., Any]:
            def forward(x: torch.Tensor) -> torch.Tensor:
                for segment in segments:
                    x = wrap(segment, x)
                return x

            return forward

        def bare(segment: nn.Module, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = segment(x)
            return out

        segments = _segments(0.0, seed)
        batch = torch.randn(_ROWS, _WIDTH)
        probe = answer(segments[0], batch.clone().requires_grad_())
        if not isinstance(probe, torch.Tensor):
            return {"error": f"TypeError: my_checkpoint returned {type(probe).__name__}, not module(x)"}
        maker = getattr(type(probe.grad_fn), "_forward_cls", None)
        made_by = "" if maker is None else str(maker.__module__)
        del probe

        found: Evidence = {"made_by": made_by, "own": maker is not None}
        hooks: list[int] = []

        def hooked(segment: nn.Module, x: torch.Tensor) -> Any:
            out = answer(segment, x)
            out.register_hook(lambda _: hooks.append(1))
            return out

        with contextlib.suppress(RuntimeError):  # what stops it is told by the runs below
            through(hooked, segments[:2])(batch.clone().requires_grad_()).sum().backward()
        found["hooks"] = len(hooks)
        for name, dropout, needs in (
            ("plain x", 0.0, False),
            ("x with gradient", 0.0, True),
            ("dropout", 0.3, True),
        ):
            segments = _segments(dropout, seed)
            x = batch.clone().requires_grad_(needs)
            runs, after = [], []
            for wrap in (bare, answer):
                torch.manual_seed(seed % 2**32 + 35)
                try:
                    runs.append(_measured(segments, through(wrap, segments), x))
                except NotImplementedError:
                    raise
                except Exception as error:
                    found[name] = {"error": one_line(error)}
                    break
                after.append(float(torch.rand(())))
            else:
                twin, own = runs
                pairs = [own.output, *own.gradients, own.input_gradient]
                wanted = [twin.output, *twin.gradients, twin.input_gradient]
                found[name] = {
                    "difference": plain(_difference(pairs, wanted)),
                    "calls": own.calls,
                    "kept": own.kept,
                    "peak": own.peak,
                    "left": own.left,
                    "plain_kept": twin.kept,
                    "plain_peak": twin.peak,
                    "stream": after[0] == after[1],
                }
        return found

    return contained(work)


def _stopped(error: str) -> str:
    """The error of a backward, with what usually causes it."""
    if "does not require grad" in error:
        return f"{error}: run the second forward with torch.enable_grad(), on an x that requires a gradient"
    if "retain_graph" in error:
        return f"{error}: detach x before the second forward, or its gradient runs into the earlier segments"
    return error


def _checkpoint_score(evidence: Evidence, seed: int) -> Score:
    """Kept: x and the segments' inputs and output; the twin keeps every layer's output."""
    unit = _ROWS * _WIDTH * 4
    if evidence["own"] is not True:
        return Score(
            0, ("my_checkpoint(module, x) must return what your own autograd.Function's apply gives",)
        )
    if evidence["made_by"].startswith(("torch.", "memlab.")):
        return Score(0, (f"that is {evidence['made_by']}'s Function: write your own, it takes ten lines",))
    tally = Tally()
    runs = {name: evidence[name] for name in ("x with gradient", "plain x", "dropout")}
    main = runs["x with gradient"]
    if "error" in main:
        return Score(
            0, (f"a forward and backward through 8 segments stopped with {_stopped(main['error'])}",)
        )

    # 8 segments keep 8 inputs and the last output; what a generator's state takes is below 0.1 of a unit.
    most = (_SEGMENTS + 1) * unit + _SEGMENTS * unit // 4
    kept = main["kept"] <= most < main["plain_kept"]
    again = main["calls"] == [2] * _SEGMENTS
    tally.award(
        1,
        kept,
        f"bytes: {main['kept'] / unit:.1f} activations are alive at the end of the forward, "
        f"{_SEGMENTS + 1} should be (the segments' inputs and the output; the plain step has "
        f"{main['plain_kept'] / unit:.0f}): run the module under torch.no_grad(), save its input only",
    )
    tally.award(
        0.5,
        again,
        f"forwards of each segment in a step: {sorted(set(main['calls']))}, should be 2: one in the forward, "
        "one in the backward",
    )
    if not (kept and again):
        return Score(tally.points, (*tally.messages, "the other points count once these two are right"))
    bound = most + (_LAYERS + 4) * unit
    tally.award(
        0.5,
        main["peak"] <= bound < main["plain_peak"] and main["left"] < unit / 2,
        f"bytes: the peak is {main['peak'] / unit:.1f} activations, at most {bound / unit:.0f} should be; "
        f"{main['left'] / unit:.1f} are left after the backward, 0 should be: one segment's graph at a time, "
        "and nothing of it kept on ctx",
    )

    def same(name: str) -> tuple[bool, str]:
        run = runs[name]
        if "error" in run:
            return False, f"{name}: it stopped with {_stopped(run['error'])}"
        off = run["difference"]
        text = "a gradient is missing" if off == "inf" else f"gradients differ from the plain step's by {off}"
        return off == 0, f"{name}: {text}"

    basic, text = same("x with gradient")
    if basic and evidence["hooks"] > 2:
        tally.award(
            0.5,
            False,
            "a hook on a segment's input runs twice in a backward, it should run once: the second forward "
            "starts from the same x, whose hooks belong to the outer backward; start it from x.detach()",
        )
    else:
        tally.award(0.5, basic, text + ": one gradient for each tensor that apply was given, in its order")
    right, text = same("plain x")
    tally.award(
        0.5, right, text + ": a batch needs no gradient, the weights do: hand them to apply as tensors"
    )
    right, text = same("dropout")
    tally.award(
        0.5,
        right,
        text + ": the second forward must draw the same numbers (torch.get_rng_state, set_rng_state)"
        if basic
        else "dropout: counts once the gradients without dropout are right",
    )
    there = runs["dropout"].get("stream") is True
    tally.award(
        0.5,
        there and right,
        "dropout: the generator's place after the backward counts once the gradients are right"
        if there or "error" in runs["dropout"]
        else "dropout: after the backward the generator isn't where the plain step leaves it: put back the "
        "state that you found (torch.random.fork_rng() does)",
    )
    return tally.score()


# -- 3.5 the best segments ---------------------------------------------------------------------------------


class _Chain(NamedTuple):
    """`blocks` equal blocks Linear(w, inner*w) + Tanh + Linear(inner*w, w): one saves 1 + inner units."""

    blocks: int
    inner: int
    extra: int

    @property
    def boundary(self) -> int:
        return 256 * 8 * 4  # rows x width x fp32

    @property
    def inside(self) -> int:
        return (1 + self.inner) * self.boundary if self.inner else self.boundary


def _chains(seed: int) -> dict[str, _Chain]:
    """inner = 0 is a single Linear + Tanh, which saves one tensor."""
    rng = random.Random(f"3.5 {seed}")
    one, many, few = rng.choice([36, 49, 64]), rng.randrange(30, 40), rng.randrange(20, 30) * 2
    return {
        "one tensor a block": _Chain(one, 0, one),
        "many tensors a block": _Chain(many, rng.randrange(6, 9), many),
        "few forwards to spare": _Chain(few, 0, few // 2 + rng.randrange(4)),
    }


def _segments_evidence(answer: Any, seed: int) -> Evidence:
    chains = _chains(seed)
    plans = {name: call(answer, c.blocks, c.boundary, c.inside, c.extra) for name, c in chains.items()}

    def work() -> Evidence:
        measured: Evidence = {"plans": plans, "peaks": {}, "best": {}, "plain": {}}
        for name, chain in chains.items():
            blocks = _blocks(chain)
            plan = _value(plans[name])
            if not _plan_fault(chain, plan):
                measured["peaks"][name] = _plan_peak(chain, blocks, plan)
            measured["best"][name] = min(_plan_peak(chain, blocks, p) for p in _candidates(chain))
            measured["plain"][name] = _plan_peak(chain, blocks, [])
        return measured

    return contained(work)


def _candidates(chain: _Chain) -> list[list[int]]:
    """Equal segments in a few numbers, the tail plain: the best of them by measure is what counts.

    The closed form isn't asked here: what collects evidence must not know the answer.
    """
    plans = []
    for count in (-(-chain.blocks // 3), -(-chain.blocks // 2)) if chain.inner else (2, 7, 8):
        length = -(-chain.extra // count)
        plans.append(_equal(chain.blocks - max(chain.blocks - chain.extra, length), length))
    return plans


def _equal(blocks: int, length: int) -> list[int]:
    return [length] * (blocks // length) + ([blocks % length] if blocks % length else [])


def uniform_segments(blocks: int, boundary: int, inside: int, extra: int) -> list[int]:
    """Equal segments (their lengths, from the first block) with the lowest peak; later blocks stay plain.

    peak = segments x boundary + the longer of a segment and the plain tail x inside. At most `extra` blocks
    lie in segments, since each of those runs forward twice.
    """
    best: tuple[int, int, list[int]] | None = None
    for length in range(1, blocks + 1):
        for tail in range(max(blocks - extra, 0), blocks + 1):
            segments = _equal(blocks - tail, length)
            peak = len(segments) * boundary + max([tail, *segments]) * inside
            if best is None or (peak, sum(segments)) < best[:2]:
                best = (peak, sum(segments), segments)
    assert best is not None
    return best[2]


def _blocks(chain: _Chain) -> list[nn.Module]:
    from torch import nn

    def block() -> nn.Module:
        if not chain.inner:
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        return nn.Sequential(nn.Linear(8, 8 * chain.inner), nn.Tanh(), nn.Linear(8 * chain.inner, 8))

    return [block() for _ in range(chain.blocks)]


def _plan_fault(chain: _Chain, plan: Any) -> str:
    if type(plan) is not list or not all(type(k) is int and k > 0 for k in plan):
        return "return a list of segment lengths, ints above 0, such as [8, 8, 8]"
    if sum(plan) > chain.blocks:
        return f"your segments hold {sum(plan)} blocks, there are {chain.blocks}"
    if sum(plan) > chain.extra:
        return (
            f"your segments hold {sum(plan)} blocks, which run forward twice; at most {chain.extra} may: "
            "leave the last blocks plain"
        )
    return ""


def _plan_peak(chain: _Chain, blocks: list[nn.Module], plan: Sequence[int]) -> int:
    """Measured peak, in bytes beyond the parameters, of a step whose segments are PyTorch's checkpoints."""
    import torch
    from torch import nn

    from memlab.meter import Meter
    from memlab.techniques.checkpointing import Segment, by_torch

    model = nn.ModuleList(blocks)
    model.zero_grad()
    x = torch.ones(256, 8, requires_grad=True)  # needs a gradient as what enters a block always does
    gc.collect()
    with Meter(model) as meter:
        before = meter.live_bytes
        start = 0
        for length in plan:
            x = by_torch(Segment(blocks[start : start + length]), x)
            start += length
        for block in blocks[start:]:
            x = block(x)
        x.backward(torch.ones_like(x))  # type: ignore[no-untyped-call]
        grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return meter.trace.peak_bytes - before - grads


def _segments_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    for name, chain in _chains(seed).items():
        asked = f"best_segments({chain.blocks}, {chain.boundary}, {chain.inside}, {chain.extra})"
        entry = evidence["plans"][name]
        if "error" in entry:
            tally.award(1, False, f"{asked} stopped with {entry['error']}")
            continue
        fault = _plan_fault(chain, _value(entry))
        if fault:
            tally.award(1, False, f"{asked}: {fault}")
            continue
        peak, best, bare = (evidence[key][name] for key in ("peaks", "best", "plain"))
        text = (
            f"{name}: {asked}: your segments peak at {format_bytes(peak)}, {format_bytes(best)} is possible "
            f"(plain: {format_bytes(bare)}): " + _plan_hint(chain, _value(entry))
        )
        tally.award(1, peak <= 1.1 * best < bare, text)
    return tally.score()


def _plan_hint(chain: _Chain, plan: list[int]) -> str:
    if not plan:
        return "no block is in a segment"
    ideal = uniform_segments(chain.blocks, chain.boundary, chain.inside, chain.extra)
    tail = chain.blocks - sum(plan)
    if tail > max(max(plan), chain.blocks - chain.extra) and tail * chain.inside > len(plan) * chain.boundary:
        return f"the {tail} plain blocks at the end are the peak: put more blocks in segments"
    if max(plan) < ideal[0]:
        rest = f" and the {tail} plain blocks at the end" if tail > max(plan) else ""
        return f"many short segments: their {len(plan)} inputs{rest} are the peak"
    if max(plan) > ideal[0]:
        return "one long segment is recomputed with everything that it saves"
    return "what is alive at once: the segments' inputs, and the longer of a segment and the plain tail"


# -- 3.6 the snippet repaired, and freezing ----------------------------------------------------------------

_DEPTH_6, _BATCH_6, _TOKENS_6, _HIDDEN_6, _HEADS_6 = 12, 8, 64, 32, 2


def _transformer(seed: int) -> list[nn.Module]:
    """Pre-norm blocks with eager attention, whose scores take as many bytes as four activations."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            h = _HIDDEN_6
            self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
            self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, h = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, _HEADS_6, -1).permute(2, 0, 3, 1, 4)
            scores = torch.softmax(q @ k.mT / (h / _HEADS_6) ** 0.5, dim=-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(b, s, h))
            y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
            return y

    torch.manual_seed(seed % 2**32 + 36)
    return [Block() for _ in range(_DEPTH_6)]


def _frozen_cases(seed: int) -> dict[str, list[tuple[int, list[int]]]]:
    """(layers, trained layers): the course's own sets and hidden ones, one of them in falling order."""
    rng = random.Random(f"3.6 {seed}")
    n = rng.randrange(6, 20)
    low = rng.randrange(1, n - 2)
    gaps = sorted(rng.sample(range(1, n), 3))
    return {
        "neighbours": [(5, [0, 1]), (5, [3, 4]), (n, [low, low + 1]), (n, [n - 1]), (n, list(range(n)))],
        "others": [(n, gaps[::-1]), (n, [0, n - 1]), (n, [])],
    }


def _repair_evidence(answer: Any, seed: int) -> Evidence:
    repaired, saved_units = several(answer, "3.6", "run_repaired", "saved_units")
    not_written = []
    units: Evidence = {}
    for name, cases in _frozen_cases(seed).items():
        try:
            units[name] = [call(saved_units, n, list(trained)) for n, trained in cases]
        except NotImplementedError as error:
            units[name] = [{"error": "it isn't written yet"}] * len(cases)
            not_written.append(str(error))

    def work() -> Evidence:
        import torch

        blocks = _transformer(seed)
        x = torch.randn(_BATCH_6, _TOKENS_6, _HIDDEN_6)
        touched = []

        def own_forward(y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = repaired(blocks, y)
            touched.append(y.requires_grad or not torch.equal(y, x))
            return out

        def bare(y: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                y = block(y)
            return y

        twin = _measured(blocks, bare, x)
        found: Evidence = {"plain_peak": twin.peak}
        for name, rule in (("free", "always"), ("strict", "error")):
            with warnings.catch_warnings(record=rule == "always") as seen:
                warnings.simplefilter(rule)  # type: ignore[arg-type]
                try:
                    own = _measured(blocks, own_forward, x)
                except NotImplementedError:
                    raise
                except Exception as error:
                    found[name] = {"error": one_line(error)}
                    continue
            found[name] = {
                "peak": own.peak,
                "calls": own.calls,
                "difference": plain(
                    _difference([own.output, *own.gradients], [twin.output, *twin.gradients])
                ),
                "touched": touched[-1],
                "warnings": "; ".join(sorted({str(w.message)[:120] for w in seen or ()})),
            }
        return found

    try:
        run = contained(work)
    except NotImplementedError:
        if not_written:
            raise
        run = {"error": "it isn't written yet"}
    return {"units": units, "run": run}


def frozen_units(layers: int, trained: Iterable[int]) -> int:
    """Activations that a chain of Linear + ReLU saves when only the layers `trained` train.

    From the lowest trained layer up: its input, and each ReLU's output on the gradient's way.
    """
    chosen = list(trained)
    return layers - min(chosen) + 1 if chosen else 0


def _repair_score(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    run = evidence["run"]
    if "error" in run:
        tally.award(2, False, f"run_repaired: {run['error']}")
    else:
        _repaired_points(tally, run)
    for name, cases in _frozen_cases(seed).items():
        wrong = ""
        for (n, trained), entry in answers_to(cases, evidence["units"][name]):
            right = frozen_units(n, trained)
            if not wrong and not (type(_value(entry)) is int and _value(entry) == right):
                said = entry.get("error") or f"you said {_shown(_value(entry))}"
                wrong = (
                    f"saved_units({n}, {trained}) is {right}: {said}. A trained Linear keeps its input; a "
                    "ReLU that the gradient passes keeps its output; it goes down to the lowest trained layer"
                )
        tally.award(0.5, not wrong, wrong)
    return tally.score()


def _repaired_points(tally: Tally, run: Evidence) -> None:
    free, strict, plain_peak = run["free"], run["strict"], run["plain_peak"]
    if "error" in free:
        hint = (
            ": checkpoint(..., use_reentrant=False) finds the weights by itself"
            if "does not require grad" in free["error"]
            else ""
        )
        tally.award(2, False, f"run_repaired: forward and backward stopped with {free['error']}{hint}")
        return
    if exactly(free["calls"], _DEPTH_6) == [1] * _DEPTH_6:
        tally.award(2, False, "run_repaired: no block ran a second time, so nothing was checkpointed")
        return
    share = free["peak"] / plain_peak
    tally.award(
        1,
        share < 0.25,
        f"run_repaired: the peak is {share:.0%} of the plain step's ({format_bytes(plain_peak)}), below 25% "
        "is asked for: one segment around the whole model is recomputed with everything saved",
    )
    same = free["difference"] == 0
    tally.award(
        0.5,
        same and free["touched"] is False,
        "run_repaired: it changes the caller's x in place (its numbers, or requires_grad): the batch must "
        "stay as it is"
        if same
        else "run_repaired: output or gradients differ from the plain step's by "
        f"{_shown(free['difference'])} (inf: one is missing): x needs no gradient here, the weights do",
    )
    warned = free["warnings"] or str(strict.get("error", ""))
    tally.award(
        0.5,
        "error" not in strict and strict["calls"] == free["calls"] and not free["warnings"],
        f"run_repaired: it warns, and with warnings as errors it stops: {warned[:160]}",
    )


EXERCISES = (
    Exercise("3.1", "count ResNet-152", 2, _count_evidence, _count_score, "3.1 What depth costs"),
    Exercise("3.2", "the residual gradient", 1, _vjp_evidence, _vjp_score, "3.2 The way down"),
    Exercise("3.3", "gradients through depth", 2, _norms_evidence, _norms_score, "3.2 The way down"),
    Exercise(
        "3.4", "write a checkpoint", 4, _checkpoint_evidence, _checkpoint_score, "3.3 Forget and recompute"
    ),
    Exercise("3.5", "the best segments", 3, _segments_evidence, _segments_score, "3.4 How long a segment"),
    Exercise("3.6", "repair and freeze", 3, _repair_evidence, _repair_score, "3.5 and 3.6"),
)
