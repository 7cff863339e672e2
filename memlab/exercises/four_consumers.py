"""Exercises of chapter 2: what parameters, gradients, optimizer states and activations take.

Hidden inputs come from the seed alone, so `score` works out for itself what is right: evidence holds nothing
but the seed and what the answers returned. Bytes of states and of saved tensors are exact.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memlab.exercises import (
    NOT_WRITTEN,
    Evidence,
    Exercise,
    Score,
    Tally,
    answers_to,
    call,
    close,
    guarded,
    is_number,
    several,
    unwritten,
)
from memlab.exercises.limits import in_child
from memlab.units import GB, GIB, KB, KIB, MB, MIB, format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

STATES = ("parameters", "gradients", "optimizer_states")


def _random(exercise: str, seed: int) -> random.Random:
    return random.Random(f"{exercise}/{seed}")


def _value(entry: Evidence) -> Any:
    """What one call returned; None when it raised."""
    return entry.get("value")


def _error(function: str, entry: Evidence) -> str | None:
    """What went wrong in one call, in the same words for each input, or None."""
    error = entry.get("error")
    if error is None or error == NOT_WRITTEN:
        return error and f"{function}: {error}"
    return f"{function} stopped with {error}"


def _unit_slip(value: Any, expected: float) -> str | None:
    """'GB', 'MiB', … when `value` is `expected` in that unit."""
    for name, size in (("GB", GB), ("GiB", GIB), ("MB", MB), ("MiB", MIB), ("KB", KB), ("KiB", KIB)):
        if expected and is_number(value) and close(value * size, expected, 0.01):
            return name
    return None


def _wrong_type(function: str, value: Any, expected: float) -> str | None:
    """One line on a value that is no number of bytes; the same for each input, so that it is said once."""
    if type(value) is int:
        return None
    if type(value) is not float:
        return f"{function}: return a number of bytes, an int; you returned {_kind(value)}"
    if unit := _unit_slip(value, expected):
        return f"{function}: that is the right size in {unit}; return bytes, a whole number"
    return f"{function}: bytes are whole numbers, you returned a float: compute with ints"


def _wrong_count(function: str, case: str, value: Any, expected: int, hint: str) -> str:
    """One line on a byte count that isn't right."""
    if wrong := _wrong_type(function, value, expected):
        return wrong
    if unit := _unit_slip(value, expected):
        return f"{case}: that is the right size in {unit}; return bytes"
    return f"{case}: you said {value:,} B, it is {expected:,} B: {hint}"


def _wrong_keys(function: str, value: Any) -> str | None:
    """One line on a value that isn't a dict with the three consumers; the same for each input."""
    if type(value) is dict and set(STATES) <= set(value):
        return None
    yours = (
        f"yours has {', '.join(sorted(value)[:6])}" if type(value) is dict else f"you returned {_kind(value)}"
    )
    return f"{function}: return a dict with the keys {', '.join(STATES)} (values in bytes); {yours}"


def _kind(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type"}:
        return f"an object of type {value['type']}"
    name = type(value).__name__
    return "None" if value is None else f"an {name}" if name == "int" else f"a {name}"


def _award(tally: Tally, points: float, wrong: str | None) -> bool:
    """`points` when nothing is wrong, else the message."""
    return tally.award(points, wrong is None, wrong or "")


def _first(messages: Iterable[str | None]) -> str | None:
    return next((message for message in messages if message), None)


def _score(tally: Tally) -> Score:
    """The points, and each message once: an error is the same on every input."""
    return Score(tally.points, tuple(dict.fromkeys(tally.messages)))


# -- 2.1 states: bytes per parameter -----------------------------------------------------------------------

PRECISIONS = ("fp32", "amp-bf16", "bf16", "bf16-master")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw-8bit")


def state_bytes(parameters: int, precision: str, optimizer: str, offload: bool = False) -> dict[str, int]:
    """What `states` has to return: bytes on the card for each consumer that scales with the parameters."""
    weight = 4 if precision in ("fp32", "amp-bf16") else 2
    moment = 1 if optimizer == "adamw-8bit" else (2 if precision == "bf16" else 4)
    moments = {"sgd": 0, "momentum": 1}.get(optimizer, 2) * moment
    master = 4 if precision == "bf16-master" else 0
    sizes = (weight, weight, 0 if offload else moments + master)
    return {name: parameters * size for name, size in zip(STATES, sizes, strict=True)}


def _recipes_2_1(seed: int) -> list[tuple[int, str, str, bool]]:
    rng = _random("2.1", seed)
    return [
        (rng.randrange(10**6, 3 * 10**11), precision, optimizer, offload)
        for offload in (False, True)
        for precision, optimizer in itertools.product(PRECISIONS, OPTIMIZERS)
    ]


def _evidence_2_1(answer: Any, seed: int) -> Evidence:
    answers = [call(answer, *recipe) for recipe in _recipes_2_1(seed)]
    return {"answers": answers}


def _group_2_1(precision: str, optimizer: str, offload: bool) -> str:
    """The rule that a recipe tests."""
    if offload or optimizer == "adamw-8bit":
        return "8 bit and offload"
    if precision == "fp32":
        return "adamw" if optimizer == "adamw" else "sgd"
    return precision


#: Points of each rule: that autocast halves nothing is the point of the section.
_GROUPS_2_1 = {
    "adamw": 0.25, "sgd": 0.25, "amp-bf16": 1, "bf16": 0.5, "bf16-master": 0.5, "8 bit and offload": 0.5,
}  # fmt: skip


def _score_2_1(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    recipes = _recipes_2_1(seed)
    wrong = [_wrong_2_1(recipe, entry) for recipe, entry in answers_to(recipes, evidence["answers"])]
    autocast = False
    for group, points in _GROUPS_2_1.items():
        found = (
            m for recipe, m in zip(recipes, wrong, strict=True) if m and _group_2_1(*recipe[1:]) == group
        )
        first = next(found, None)
        if (
            group == "bf16" and first is None and not autocast
        ):  # who halves everything is right here by accident
            first = "bf16: right, and it counts only when autocast passes: halving everything would earn it"
        earned = _award(tally, points, first)
        autocast = autocast or (group == "amp-bf16" and earned)
    return _score(tally)


def _wrong_2_1(recipe: tuple[int, str, str, bool], entry: Any) -> str | None:
    """The first thing wrong with the answer for one recipe, or None."""
    parameters, precision, optimizer, offload = recipe
    name = f"{precision}, {optimizer}" + (", offload=True" if offload else "")
    if error := _error("states", entry):
        return error
    value = _value(entry)
    if wrong := _wrong_keys("states", value):
        return wrong
    right = state_bytes(*recipe)
    for consumer in STATES:
        said, expected = value[consumer], right[consumer]
        if type(said) is int and said == expected:
            continue
        if type(said) is not int or _unit_slip(said, expected):
            return _wrong_count("states", f"{name}, {consumer}", said, expected, "")
        return (
            f"{name}, {consumer}: you said {said / parameters:.3g} B per parameter, "
            f"it keeps {expected // parameters}: {_hint_2_1(consumer, said / parameters, recipe)}"
        )
    return None


def _hint_2_1(consumer: str, said: float, recipe: tuple[int, str, str, bool]) -> str:
    _, precision, optimizer, offload = recipe
    if consumer == "parameters":
        if precision == "amp-bf16":
            return "autocast computes in bf16, but what is the dtype of model.parameters()?"
        if precision == "bf16-master" and said == 6:
            return "the master copy belongs to the optimizer states: the optimizer updates it"
        return "one number per parameter, in the dtype in which the model holds it"
    if consumer == "gradients":
        return "a gradient has the shape and the dtype of its parameter"
    if offload:
        return "the states live in host memory, none is left on the card"
    if optimizer == "sgd" and precision != "bf16-master":
        return "plain SGD keeps nothing from one step to the next"
    if precision == "bf16-master" and abs(said - (state_bytes(1, *recipe[1:])[consumer] - 4)) < 1e-9:
        return "where is the fp32 master copy that the optimizer updates?"
    if optimizer == "adamw-8bit":
        return "two moments of one byte each, whatever the precision of the weights"
    if optimizer == "adamw" and said in (2, 4) and precision != "bf16-master":
        return "which second tensor is missing? AdamW keeps exp_avg and exp_avg_sq"
    if optimizer == "momentum":
        return "one tensor, momentum_buffer, of the dtype that the optimizer updates"
    return "count the tensors in optimizer.state and the dtype of each"


# -- 2.2 measure_states, step_peak -------------------------------------------------------------------------


class _Model(NamedTuple):
    """A hidden model and optimizer: an embedding, two linear layers with a norm, a head that may be tied.

    `flat` names a consumer whose tensors are views of one buffer, with padding at its end; `cut` makes one
    weight the upper half of a larger matrix; `outside` gives the embedding a gradient and no optimizer.
    """

    label: str
    optimizer: str
    vocab: int
    width: int
    hidden: int
    tied: bool = False
    frozen: bool = False
    flat: str = ""
    cut: bool = False
    freed: bool = False
    buffer: bool = False
    outside: bool = False
    dtype: str = "float32"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters; a tied head appears once."""
        v, h, k = self.vocab, self.width, self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (v, h), "up": (k, h), "up_bias": (k,), "down": (h, k), "scale": (h,), "head": (v, h),
        }  # fmt: skip
        if self.tied:
            del shapes["head"]
        return shapes

    def trained(self) -> list[tuple[int, ...]]:
        return [s for name, s in self.shapes().items() if not (self.frozen and name == "embedding")]

    def optimized(self) -> list[tuple[int, ...]]:
        return self.trained()[1:] if self.outside else self.trained()

    @property
    def padding(self) -> int:
        """Elements at the end of a flat buffer that no tensor uses."""
        return self.hidden

    def expected(self) -> dict[str, int]:
        size = 2 if self.dtype == "bfloat16" else 4
        held = self.viewed()
        if self.flat:
            held[self.flat] += self.padding * size
        if self.cut:
            held["parameters"] += self.hidden * self.width * size
        return held

    def viewed(self) -> dict[str, int]:
        """The bytes of all tensors, whatever the storages behind them: what t.nbytes adds up to."""
        size = 2 if self.dtype == "bfloat16" else 4
        numbers = sum(map(math.prod, self.trained()))
        everything = sum(map(math.prod, self.shapes().values()))
        return {
            "parameters": everything * size + (self.hidden if self.buffer else 0),  # a bool mask
            "gradients": 0 if self.freed else numbers * size,
            "optimizer_states": sum(_optimizer_state(self.optimizer, s, size) for s in self.optimized()),
        }


def _optimizer_state(optimizer: str, shape: tuple[int, ...], size: int) -> int:
    """Bytes that torch's optimizer keeps for one parameter; `step` is one fp32 number."""
    n, step = math.prod(shape), 4
    if optimizer == "adafactor":
        return step + size * (shape[0] + shape[1] if len(shape) > 1 else n)
    return {
        "sgd": 0, "momentum": n * size, "adam": step + 2 * n * size, "amsgrad": step + 3 * n * size,
        "history": 2 * n * size,
    }[optimizer]  # fmt: skip


def _models_2_2(seed: int) -> list[tuple[float, list[_Model]]]:
    """The hidden cases, in the groups that earn points together."""
    rng = _random("2.2", seed)

    def sizes() -> tuple[int, int, int]:
        return rng.randrange(300, 500), 8 * rng.randrange(4, 9), rng.randrange(70, 130)

    plain = ("sgd", "momentum", "adam", "amsgrad", "adafactor")
    return [
        (0.5, [_Model(f"fp32, {name}", name, *sizes()) for name in plain]),
        (
            0.5,
            [
                _Model("Adam, head tied to the embedding", "adam", *sizes(), tied=True),
                _Model("Adam, embedding frozen", "adam", *sizes(), frozen=True),
                _Model(
                    "Adam for all but the embedding, which has a gradient", "adam", *sizes(), outside=True
                ),
                _Model("Adam, after zero_grad(set_to_none=True)", "adam", *sizes(), freed=True),
                _Model(
                    "bf16 model with a bool buffer that isn't saved (persistent=False), Adam",
                    "adam",
                    *sizes(),
                    buffer=True,
                    dtype="bfloat16",
                ),
            ],
        ),
        (
            1,
            [
                _Model("a weight that is one half of a larger matrix", "momentum", *sizes(), cut=True),
                _Model("parameters in one buffer, padded", "sgd", *sizes(), flat="parameters"),
                _Model("gradients in one buffer, padded", "momentum", *sizes(), flat="gradients"),
                _Model("Adam's moments in one buffer, padded", "adam", *sizes(), flat="optimizer_states"),
            ],
        ),
        (0.5, [_Model("an optimizer with a list in its state", "history", *sizes())]),
    ]


def _build(case: _Model) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The live model and optimizer after two steps. Gradients are set by hand: no backward in a fork."""
    import torch
    from torch import nn

    dtype = getattr(torch, case.dtype)

    def views(shapes: Iterable[tuple[int, ...]], flat: bool) -> list[torch.Tensor]:
        """Tensors of these shapes: cut from one padded buffer, or each for itself."""
        shapes = list(shapes)
        buffer = torch.full((sum(map(math.prod, shapes)) + case.padding,), 0.01, dtype=dtype)
        parts = torch.split(buffer[: -case.padding], [math.prod(shape) for shape in shapes])
        found = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return found if flat else [view.clone() for view in found]

    model = nn.Module()
    weights = views(case.shapes().values(), case.flat == "parameters")
    for (name, (first, *rest)), weight in zip(case.shapes().items(), weights, strict=True):
        if case.cut and name == "up":
            weight = torch.full((2 * first, *rest), 0.01, dtype=dtype)[:first]
        model.register_parameter(name, nn.Parameter(weight))
    if case.tied:
        model.register_parameter("head", model.get_parameter("embedding"))
    if case.buffer:
        model.register_buffer("mask", torch.ones(case.hidden, dtype=torch.bool), persistent=False)
    if case.frozen:
        model.get_parameter("embedding").requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(case.optimizer, trained[1:] if case.outside else trained)
    gradients = views([tuple(p.shape) for p in trained], case.flat == "gradients")
    for p, gradient in zip(trained, gradients, strict=True):
        p.grad = gradient
    optimizer.step()
    optimizer.step()
    if case.flat == "optimizer_states":
        moments = views([tuple(p.shape) for p in trained for _ in range(2)], True)
        for p, mean, square in zip(trained, moments[::2], moments[1::2], strict=True):
            optimizer.state[p].update(exp_avg=mean, exp_avg_sq=square)
    if case.freed:
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    if name == "adafactor":
        return torch.optim.Adafactor(parameters)
    if name == "history":
        return _history(parameters)
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "momentum" else 0, foreach=False)
    return torch.optim.Adam(parameters, amsgrad=name == "amsgrad", foreach=False)


def _history(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that remembers its last gradients in a list, as L-BFGS does."""
    import torch

    class History(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[p]["gradients"] = [*self.state[p].get("gradients", []), p.grad.clone()][-2:]

    return History(parameters, {"lr": 1e-3})


IMPLEMENTATIONS = ("foreach", "for-loop", "fused")


def adam_step_peak(sizes: Sequence[int], implementation: str, *, exact: bool = False) -> int:
    """What `step_peak` has to return, within 1%: fp32 weights, gradients and moments, and the temporaries.

    In the for-loop `exact` adds what is left of the tensor before: its denominator lives until the loop's
    variable is overwritten (torch/optim/adam.py, `denom`).
    """
    extra = {"foreach": sum(sizes), "for-loop": 2 * max(sizes), "fused": 0}[implementation]
    if exact and implementation == "for-loop":
        extra = max(2 * n + before for n, before in zip(sizes, [0, *sizes], strict=False))
    return 16 * sum(sizes) + 4 * extra


def _sizes_2_2(seed: int) -> list[list[int]]:
    """Numbers of elements per tensor: one list with a largest tensor in its midst, one of equal tensors."""
    rng = _random("2.2 peak", seed)
    uneven = [rng.randrange(10**4, 10**5) for _ in range(rng.randrange(5, 9))]
    uneven.insert(rng.randrange(1, len(uneven)), rng.randrange(10**6, 10**7))
    return [uneven, [rng.randrange(10**5, 10**6)] * rng.randrange(12, 30)]


def _evidence_2_2(answer: Any, seed: int) -> Evidence:
    measure_states, step_peak = several(answer, "2.2", "measure_states", "step_peak")

    # Built before the fork: the first optimizer step of a process imports for a second or two.
    built = [_build(case) for _, group in _models_2_2(seed) for case in group]

    def work() -> Evidence:
        measured = [guarded(measure_states, model, optimizer) for model, optimizer in built]
        asked = itertools.product(IMPLEMENTATIONS, _sizes_2_2(seed))
        peaks = [guarded(step_peak, list(sizes), implementation) for implementation, sizes in asked]
        if unwritten([*measured, *peaks]):
            raise NotImplementedError("exercise 2.2")
        return {"measured": measured, "peaks": peaks}

    return in_child(work, seconds=30, memory=2 * GIB)


def _score_2_2(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    groups = _models_2_2(seed)
    measured = iter(answers_to([case for _, group in groups for case in group], evidence["measured"]))
    for points, group in groups:
        _award(tally, points, _first([_wrong_2_2(*next(measured)) for _ in group]))
    peaks = answers_to(itertools.product(IMPLEMENTATIONS, _sizes_2_2(seed)), evidence["peaks"])
    for name in IMPLEMENTATIONS:
        _award(tally, 0.5, _first(_wrong_peak(sizes, i, e) for (i, sizes), e in peaks if i == name))
    return _score(tally)


def _wrong_2_2(case: _Model, entry: Any) -> str | None:
    if error := _error("measure_states", entry):
        return error
    value = _value(entry)
    if wrong := _wrong_keys("measure_states", value):
        return wrong
    for consumer, expected in case.expected().items():
        said = value[consumer]
        if type(said) is not int or said != expected:
            hint = _hint_2_2(case, consumer, said, expected)
            return _wrong_count("measure_states", f"{case.label}: {consumer}", said, expected, hint)
    return None


_KEPT_2_2 = {
    "sgd": "plain SGD keeps nothing from one step to the next: optimizer.state is empty",
    "momentum": "one momentum_buffer for each parameter",
    "adam": "exp_avg, exp_avg_sq and step of each parameter that is trained",
    "amsgrad": "exp_avg, exp_avg_sq, max_exp_avg_sq and step of each parameter: add up what is there",
    "adafactor": "row_var and col_var of a matrix, variance of a bias, and step: add up what is there",
    "history": "its tensors lie in a list: look inside, too (torch.utils._pytree.tree_leaves finds them all)",
}


def _hint_2_2(case: _Model, consumer: str, said: Any, expected: int) -> str:
    if case.flat == consumer or (case.cut and consumer == "parameters"):
        if said == case.viewed()[consumer]:
            return "views keep their whole storage alive: add up t.untyped_storage().nbytes(), not t.nbytes"
        if is_number(said) and said > expected:
            return "several tensors lie in one storage: count each storage once, by its data_ptr()"
        return "count storages, t.untyped_storage(): each once, in full"
    if consumer == "parameters":
        if case.tied:
            return "two names, one tensor: count each storage once"
        if case.frozen and is_number(said) and said < expected:
            return "a frozen parameter is held as well: only its gradient and its states are missing"
        return (
            "buffers count with the parameters (model.buffers()), and each element has its own size in bytes"
        )
    if consumer == "gradients":
        if case.freed or case.frozen:
            return "a parameter without a gradient has p.grad None and holds nothing"
        return "p.grad of every parameter of the model that has one, in the optimizer or not"
    if said == expected - 4 * len(case.optimized()):
        return "every tensor in optimizer.state counts, the `step` counters too"
    if case.frozen or case.outside:
        return "look at what is in optimizer.state: not every parameter is there"
    if case.dtype == "bfloat16":
        return "states follow the dtype of their parameter, only `step` stays fp32"
    return _KEPT_2_2[case.optimizer]


def _wrong_peak(sizes: Sequence[int], implementation: str, entry: Any) -> str | None:
    if error := _error("step_peak", entry):
        return error
    name = f"step_peak, {implementation}"
    value, expected = _value(entry), adam_step_peak(sizes, implementation)
    if close(value, expected, 0.01) or close(value, adam_step_peak(sizes, implementation, exact=True), 0.01):
        return None
    if not is_number(value):
        return f"{name}: return a number of bytes, you returned {_kind(value)}"
    if unit := _unit_slip(value, expected):
        return f"{name}: that is the right size in {unit}; return bytes"
    states = 16 * sum(sizes)
    hint = {
        "foreach": "foreach works on all tensors at once: which temporary has the size of all parameters?",
        "for-loop": "one parameter at a time: sqrt(exp_avg_sq) and its scaled copy live together, and "
        "most for the largest tensor",
        "fused": "one kernel reads and writes in place: no temporary at all",
    }[implementation]
    if implementation == "for-loop" and close(value, states + 12 * max(sizes), 0.01):
        hint = (
            "what is left of the tensor before has that one's size, not this one's: count it or leave it out"
        )
    if value < states * 0.99:
        hint = "weights, gradients and both moments are all alive while step() runs"
    return f"{name}: you said {format_bytes(round(value))}, it peaks at {format_bytes(expected)}: {hint}"


# -- 2.3 saved_bytes ---------------------------------------------------------------------------------------

#: Hidden modules by the points they earn together, and what the message asks.
_GROUPS_2_3: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("linear", "frozen linear"),
        "a Linear saves its input, for the weight's gradient; its weight is a parameter and isn't counted",
    ),
    (("relu", "softmax", "tanh"), "these save their output and nothing else"),
    (("add and scale",), "adding and scaling need no tensor in backward: nothing is saved"),
    (("layer norm", "batch norm"), "the input, and two statistics per row (or channel); buffers don't count"),
    (("relu between", "in-place relu between"), "two operators save one tensor: count its storage once"),
    (("three views", "slice"), "views keep their whole storage alive: count storages, not shapes"),
    (("dropout mask", "embedding"), "masks are bool and indices int64: take the storage's bytes, not 4 x n"),
)
_CASES_2_3 = tuple(name for names, _ in _GROUPS_2_3 for name in names)


def _dims_2_3(seed: int) -> dict[str, tuple[int, int, int]]:
    rng = _random("2.3", seed)
    return {
        name: (rng.randrange(20, 40), rng.randrange(41, 60), rng.randrange(61, 90)) for name in _CASES_2_3
    }


def saved_by(name: str, n: int, d: int, k: int) -> int:
    """Bytes that the hidden module saves, parameters and buffers excluded; the input is (n, d) fp32."""
    return {
        "linear": 4 * n * d,
        "frozen linear": 0,
        "relu": 4 * n * d,
        "softmax": 4 * n * d,
        "tanh": 4 * n * d,
        "add and scale": 0,
        "layer norm": 4 * n * d + 8 * n,
        "batch norm": 4 * n * d + 8 * d,
        "relu between": 4 * n * d + 4 * n * k,
        "in-place relu between": 4 * n * d + 4 * n * k,
        "three views": 4 * n * d + 4 * n * 3 * k + 4 * n * k,
        "slice": 4 * n * d,
        "dropout mask": n * d,
        "embedding": 8 * n,
    }[name]


def _case_2_3(name: str, n: int, d: int, k: int) -> tuple[nn.Module, torch.Tensor]:
    """A hidden module and its input."""
    import torch
    from torch import nn

    class Apply(nn.Module):
        def __init__(self, function: Callable[..., torch.Tensor], **modules: nn.Module) -> None:
            super().__init__()
            self.function = function
            for key, module in modules.items():
                self.add_module(key, module)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.function(x, *self.children())
            return y

    def three_views(x: torch.Tensor, project: nn.Module) -> torch.Tensor:
        q, key, v = project(x).chunk(3, dim=-1)
        y: torch.Tensor = q * key * v
        return y

    modules: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(d, k),
        "frozen linear": lambda: nn.Linear(d, k).requires_grad_(False),
        "relu": nn.ReLU,
        "softmax": lambda: nn.Softmax(dim=-1),
        "tanh": nn.Tanh,
        "add and scale": lambda: Apply(lambda x: (x + x) * 0.5 - x),
        "layer norm": lambda: nn.LayerNorm(d),
        "batch norm": lambda: nn.BatchNorm1d(d),
        "relu between": lambda: nn.Sequential(nn.Linear(d, k), nn.ReLU(), nn.Linear(k, d)),
        "in-place relu between": lambda: nn.Sequential(
            nn.Linear(d, k), nn.ReLU(inplace=True), nn.Linear(k, d)
        ),
        "three views": lambda: Apply(three_views, project=nn.Linear(d, 3 * k)),
        "slice": lambda: Apply(lambda x, linear: linear(x[:, : d // 3]), linear=nn.Linear(d // 3, k)),
        "dropout mask": lambda: Apply(lambda x: torch.native_dropout(x, 0.25, True)[0]),
        "embedding": lambda: nn.Embedding(k, d),
    }
    x = torch.arange(n) if name == "embedding" else torch.randn(n, d)
    needs_grad = name not in (
        "linear",
        "relu between",
        "in-place relu between",
        "three views",
        "slice",
        "embedding",
    )
    return modules[name](), x.requires_grad_() if needs_grad else x


def _evidence_2_3(answer: Any, seed: int) -> Evidence:
    def work() -> Evidence:
        import torch

        torch.manual_seed(seed % 2**32)
        saved = [call(answer, *_case_2_3(name, *dims)) for name, dims in _dims_2_3(seed).items()]
        return {"saved": saved, "leaks": _leaks(answer)}

    return in_child(work, seconds=30, memory=2 * GIB)


def _leaks(answer: Any) -> bool:
    """The output of a module, and with it the graph, is still alive after the answer returned."""
    import torch
    from torch import nn

    outputs: list[weakref.ref[torch.Tensor]] = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            outputs.append(weakref.ref(y))
            return y

    call(answer, Watched(), torch.ones(8, 8, requires_grad=True))
    if any(output() is not None for output in outputs):
        gc.collect()  # what a cycle of Python objects holds is no leak
    return any(output() is not None for output in outputs)


def _score_2_3(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    dims = _dims_2_3(seed)
    saved = dict(answers_to(dims, evidence["saved"]))
    linear = False
    for names, hint in _GROUPS_2_3:
        wrong = _first(_wrong_2_3(name, dims[name], saved[name], hint) for name in names)
        if names[0] == "add and scale" and not linear:  # a function that always returns 0 isn't right here
            wrong = wrong or (
                "add and scale: 0 B is right, and this point counts only when the Linear passes: a function "
                "that always says 0 would earn it"
            )
        earned = _award(tally, 0.5, wrong)
        linear = linear or (names[0] == "linear" and earned)
    if linear:
        tally.award(
            0.5,
            evidence["leaks"] is False,
            "after your function returned, tanh's output was still alive: return t.detach() from the pack "
            "hook (an output that keeps itself is never freed), and keep byte counts, not tensors",
        )
    return _score(tally)


def _wrong_2_3(name: str, dims: tuple[int, int, int], entry: Any, hint: str) -> str | None:
    if error := _error("saved_bytes", entry):
        return error
    value, expected = _value(entry), saved_by(name, *dims)
    if type(value) is int and value == expected:
        return None
    n, d, k = dims
    if name == "frozen linear":
        hint = "no gradient of the weight is asked for, so the input isn't kept"
    return _wrong_count("saved_bytes", f"{name}, n = {n}, d = {d}, k = {k}", value, expected, hint)


# -- 2.4 act_bytes -----------------------------------------------------------------------------------------


def block_activation_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    layers: int,
    ffn: int | None = None,
    dropout: bool = True,
    fused: bool = False,
) -> int:
    """Saved bytes of `layers` transformer blocks in 16 bit with an MLP of width `ffn` (None: 4h).

    With dropout and eager attention s*b*h*(34 + 5*a*s/h) each (Korthikanti et al., arXiv:2205.05198).
    Statistics of the norms, embeddings, logits and the loss not included. Fused attention keeps one fp32
    number per row and head in place of the scores, and no mask.
    """
    linear = s * b * ((18 if dropout else 16) * h + 4 * (4 * h if ffn is None else ffn))
    scores = 4 * a * b * s if fused else (5 if dropout else 2) * a * b * s * s
    return layers * (linear + scores)


#: (dropout, fused) of the four blocks that `act_bytes` is asked for, half a point each.
_KINDS_2_4 = ((True, False), (False, False), (True, True), (False, True))
_FACTORS_2_4 = (1, 2, 4)


def _shapes_2_4(seed: int) -> list[tuple[int, int, int, int, int, int]]:
    """Three configurations (s, b, h, a, f, L); `act_bytes` is asked at s, 2s and 4s."""
    rng = _random("2.4", seed)
    shapes = []
    for _ in range(3):
        heads = rng.randrange(6, 40)
        h = heads * rng.choice((48, 80, 96, 112))
        f = 16 * rng.randrange(h // 8, h // 3)
        shapes.append(
            (32 * rng.randrange(3, 30) + 1, rng.randrange(2, 20), h, heads, f, rng.randrange(4, 90))
        )
    return shapes


def _evidence_2_4(answer: Any, seed: int) -> Evidence:
    asked = itertools.product(_KINDS_2_4, _shapes_2_4(seed), _FACTORS_2_4)
    answers = [
        call(answer, factor * s, b, h, a, f, layers, *kind) for kind, (s, b, h, a, f, layers), factor in asked
    ]
    return {"answers": answers}


def _score_2_4(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    shapes = _shapes_2_4(seed)
    asked = list(itertools.product(_KINDS_2_4, shapes, _FACTORS_2_4))
    entries = [entry for _, entry in answers_to(asked, evidence["answers"])]
    for kind in _KINDS_2_4:
        wrong = []
        for shape in shapes:
            own = [e for (k, s, _), e in zip(asked, entries, strict=True) if (k, s) == (kind, shape)]
            wrong.append(_wrong_2_4(shape, kind, own))
        _award(tally, 0.5, _first(wrong))
    return _score(tally)


def _wrong_2_4(
    shape: tuple[int, int, int, int, int, int], kind: tuple[bool, bool], entries: list[Any]
) -> str | None:
    """The first thing wrong with one kind of block, at s, 2s and 4s, or None."""
    s, b, h, a, f, layers = shape
    dropout, fused = kind

    def right(factor: int, ffn: int = f, dropout: bool = dropout, fused: bool = fused) -> int:
        return block_activation_bytes(factor * s, b, h, a, layers, ffn, dropout, fused)

    if error := _first(_error("act_bytes", entry) for entry in entries):
        return error
    factors, values = _FACTORS_2_4, [_value(entry) for entry in entries]
    if wrong := _first(_wrong_type("act_bytes", v, right(n)) for n, v in zip(factors, values, strict=True)):
        if "float" in wrong:
            wrong += " (s*b*h times 5*a*s/h is 5*a*b*s*s)"
        return wrong

    def said(what: Callable[[int], float]) -> bool:
        return all(v == what(n) for n, v in zip(factors, values, strict=True))

    norms = 16 * b * s * layers  # two norms, two fp32 numbers per token each
    if said(right) or said(lambda n: right(n) + n * norms):
        return None
    name = f"{'eager' if not fused else 'fused'} attention, {'dropout' if dropout else 'no dropout'}"
    at = f"{name}, s={s}, b={b}, h={h}, a={a}, f={f}, L={layers}"
    if unit := _unit_slip(values[0], right(1)):
        return f"act_bytes: that is the right size in {unit}; return bytes"
    width = "act_bytes: the MLP is f wide, not always 4h: which rows have f?"
    slips: tuple[tuple[Callable[[int], float], str], ...] = (
        (lambda n: right(n) / layers, "act_bytes: that is one block: multiply by L"),
        (lambda n: right(n) / b, "act_bytes: that is one sequence: multiply by b"),
        (lambda n: 2 * right(n), "act_bytes: those are fp32's bytes; in 16 bit a number takes 2, a mask 1"),
        (lambda n: right(n, dropout=not dropout), f"{name}: that is right for dropout={not dropout}"),
        (lambda n: right(n, fused=not fused), f"{name}: that is right for fused={not fused}"),
        *((lambda n, kind=kind: right(n, 4 * h, *kind), width) for kind in _KINDS_2_4),
    )
    for what, hint in slips:
        if said(what):
            return hint
    # values = A*n + B*n*n at n = 1, 2, 4: A is what is linear in s, B what grows with its square
    square = (values[1] - 2 * values[0]) / 2
    linear = values[0] - square
    element = s * b * h * layers
    scores = 0 if fused else (5 if dropout else 2)
    expected = (right(1) - scores * layers * b * a * s * s) / element
    whole = (linear / element).is_integer() and abs(linear / element - expected) < 2
    if whole or not close(values[2], 4 * linear + 16 * square, 1e-12):
        return (
            "act_bytes: does a // cut a fraction off? Multiply first: s*b*h times 5*a*s/h is 5*a*b*s*s, and "
            "nothing is left to divide"
        )
    if not close(linear / element, expected, 1e-12):
        statistic = " and one fp32 number per row and head" if fused else ""
        return (
            f"{at}: the part linear in s is {linear / element:.4g} B per element of (s, b, h) and block, "
            f"it keeps {expected:.4g}: go through the rows of shape (b, s, h) and (b, s, f){statistic}"
        )
    asked = {
        0: "a fused kernel stores none of the three tensors of shape (b, a, s, s)",
        2: "without dropout there is no mask, and softmax's output is what the product with V keeps",
        5: "which three tensors have the shape (b, a, s, s), and how wide are they?",
    }[scores]
    per_score = square / (layers * b * a * s * s)
    return f"{at}: the part quadratic in s is {per_score:.3g} B per score, it keeps {scores}: {asked}"


# -- 2.5 min_cards, train_days -----------------------------------------------------------------------------


def _cards_2_5(seed: int) -> list[tuple[int, int, int]]:
    """(parameters, bytes per parameter, bytes of a card); the last one fills its cards exactly."""
    rng = _random("2.5 cards", seed)
    sizes = rng.sample((24, 40, 48, 80), 4)  # each once: no seed asks for one size of card alone
    cases = [(rng.randrange(10**10, 10**12), rng.choice((6, 8, 16, 18)), size * GB) for size in sizes]
    card = 24 * GB
    cases.append((rng.randrange(10**9, 10**11), 16, 85_198_045_184))
    return [*cases, (rng.randrange(3, 90) * card // 16, 16, card)]


def _runs_2_5(seed: int) -> list[tuple[int, int, int, float, bool]]:
    """(parameters, tokens, cards, FLOP/s of one card, recompute); every second takes days and a half."""
    rng = _random("2.5 days", seed)
    runs = []
    for recompute in (True, False):
        parameters, cards, flops = (
            rng.randrange(10**9, 10**12),
            rng.randrange(8, 4096),
            rng.randrange(60, 500),
        )
        runs.append((parameters, rng.randrange(10**11, 10**13), cards, flops * 1e12, recompute))
        parameters, cards, flops = (
            rng.randrange(10**9, 10**12),
            rng.randrange(8, 4096),
            rng.randrange(60, 500),
        )
        days = rng.randrange(5, 40) + rng.uniform(0.3, 0.7)
        tokens = round(days * 86_400 * cards * flops * 1e12 / ((8 if recompute else 6) * parameters))
        runs.append((parameters, tokens, cards, flops * 1e12, recompute))
    return runs


def _evidence_2_5(answer: Any, seed: int) -> Evidence:
    min_cards, train_days = several(answer, "2.5", "min_cards", "train_days")
    cards = [guarded(min_cards, *case) for case in _cards_2_5(seed)]
    days = [guarded(train_days, *case) for case in _runs_2_5(seed)]
    if unwritten([*cards, *days]):
        raise NotImplementedError("exercise 2.5")
    return {"cards": cards, "days": days}


def _score_2_5(evidence: Evidence, seed: int) -> Score:
    tally = Tally()
    wrong = [_wrong_cards(case, entry) for case, entry in answers_to(_cards_2_5(seed), evidence["cards"])]
    _award(tally, 1, _first(wrong))
    runs = list(answers_to(_runs_2_5(seed), evidence["days"]))
    for recompute in (True, False):
        found = _first(_wrong_days(case, entry) for case, entry in runs if case[4] is recompute)
        _award(tally, 0.5, found)
    return _score(tally)


def _wrong_cards(case: tuple[int, int, int], entry: Any) -> str | None:
    if error := _error("min_cards", entry):
        return error
    value = _value(entry)
    parameters, size, card = case
    expected = -(-parameters * size // card)
    if type(value) is int and value == expected:
        return None
    if type(value) is not int:
        return f"min_cards: cards are whole: return an int, you returned {_kind(value)}"
    if parameters * size % card == 0:
        filled = f"{parameters * size:,} B fill {expected} cards of {card:,} B exactly"
        return f"min_cards: {filled}, you said {value}"
    hint = "round up: a part of a card is a card" if value == expected - 1 else "states / card, rounded up"
    asked = f"{parameters:,} x {size} B on cards of {card:,} B"
    return f"min_cards: {asked}: you said {value}, it takes {expected}: {hint}"


def _wrong_days(case: tuple[int, int, int, float, bool], entry: Any) -> str | None:
    if error := _error("train_days", entry):
        return error
    value = _value(entry)
    parameters, tokens, cards, flops, recompute = case
    expected = (8 if recompute else 6) * parameters * tokens / (cards * flops) / 86_400
    if close(value, expected):
        return None
    if not is_number(value):
        return f"train_days: return a number of days, you returned {_kind(value)}"
    name = f"train_days, recompute={recompute}"
    if abs(value - expected) < 1 and value == int(value):
        return f"{name}: you said {value:.4g} days, it is {expected:.4g}: don't round, a part of a day counts"
    for factor, hint in (
        (86_400, "those are seconds: a day has 86,400"),
        (24, "those are hours"),
        (cards, "divide by the number of cards: they work at the same time"),
        (0.25, "2 FLOP per parameter and token is the forward alone; backward takes twice that"),
        (1 / 3, "2 FLOP per parameter and token is the forward alone; backward takes twice that"),
        (0.75, "recomputing the activations is one more forward: 8 FLOP per parameter and token"),
        (4 / 3, "without recomputation it is 6 FLOP per parameter and token"),
    ):
        if close(value, expected * factor):
            return f"{name}: {hint}"
    return f"{name}: you said {value:.4g} days, it is {expected:.4g}: FLOP of the run / FLOP/s of all cards"


EXERCISES: tuple[Exercise, ...] = (
    Exercise("2.1", "states", 3, _evidence_2_1, _score_2_1, "section 2, 'Sixteen bytes for every parameter'"),
    Exercise("2.2", "measure_states, step_peak", 4, _evidence_2_2, _score_2_2, "sections 3 and 4"),
    Exercise("2.3", "saved_bytes", 4, _evidence_2_3, _score_2_3, "section 5, 'What autograd keeps'"),
    Exercise("2.4", "act_bytes", 2, _evidence_2_4, _score_2_4, "section 6, 'One block, tensor by tensor'"),
    Exercise("2.5", "min_cards, train_days", 2, _evidence_2_5, _score_2_5, "section 8, 'How many cards'"),
)
