"""Freezing: training some layers only. What it saves depends on which, and on what the layers store.

States go either way: a frozen parameter needs no gradient and no optimizer states, 12 of fp32 Adam's 16 B
(`state_bytes`). Activations do not: the gradient still travels from the loss down to the lowest layer that
trains, through all frozen layers above it, and a frozen layer on that path must keep what its own derivative
needs. Only what lies below the lowest trained layer keeps nothing.

    5 layers, units of one activation     all   {0,1}  {1,2}  {3,4}
    Linear + ReLU         `chain_units`    6      6      5      3
    transformer, eager    `block_units`  105     84     70     42     (scores of 5 units a block)
    transformer, SDPA     `block_units`   80     62     52     32

Freezing the upper layers of the chain saves nothing: their ReLUs keep the outputs that the Linears would
have kept as inputs. A frozen transformer block saves a third or so: a frozen Linear needs no input (that is
for its weight's gradient), but attention, GELU and the norms need theirs. So freeze the bottom: {3,4} is what
fine-tuning the top layers means. What it costs: what isn't trained doesn't learn.

The trap: `requires_grad_(False)` in the middle of training frees nothing. The gradient and the moments stay,
and the optimizer goes on moving the frozen weights by them. `freeze` does it whole.

Source: counted by what each operator saves for its backward (`saved_bytes`); the blocks are pre-norm with a
4 h MLP, no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

__all__ = ["block_units", "chain_units", "freeze", "progressive", "saved_bytes", "state_bytes"]


# Closed forms


def chain_units(layers: int, trained: Iterable[int]) -> int:
    """Activations that a chain of Linear + ReLU saves, in units of one (batch, width) tensor.

    A trained Linear saves its input (for its weight's gradient); a ReLU on the gradient's path saves its
    output. Layer i's output is layer i+1's input: it counts once.
    """
    chosen = _chosen(layers, trained)
    saved = set(chosen)  # tensor i is layer i's input and layer i - 1's output
    if chosen:
        saved |= {i + 1 for i in range(min(chosen), layers)}
    return len(saved)


def block_units(layers: int, trained: Iterable[int], scores: float = 0.0) -> float:
    """The same for transformer blocks, in units of (batch, sequence, h).

    scores: units of the stored score matrices of a block, heads x sequence / h with eager attention, 0 with
        SDPA (which keeps its output instead).
    A trained block keeps 16 + scores: both norms' inputs (2) and outputs (2), q, k, v (3), the attention's
    output (1), the MLP's hidden features before and after GELU (4 + 4). A frozen one on the gradient's path
    doesn't keep the four Linears' inputs: 10 with SDPA, which needs its own output, 9 + scores without.
    """
    chosen = _chosen(layers, trained)
    if not chosen:
        return 0.0
    frozen_above = sum(1 for i in range(min(chosen), layers) if i not in chosen)
    return len(chosen) * (16 + scores) + frozen_above * (9 + scores if scores else 10)


def state_bytes(
    parameters: int, trained: int, bytes_each: tuple[int, int, int] = (4, 4, 8)
) -> dict[str, int]:
    """Bytes of the states when `trained` of the `parameters` train, wherever they lie.

    `bytes_each`: bytes per parameter of (parameters, gradients, optimizer_states), by default fp32 Adam's.
    """
    if not 0 <= trained <= parameters:
        raise ValueError(f"{trained} of {parameters} parameters can't be trained")
    weights, gradients, states = bytes_each
    return {
        "parameters": parameters * weights,
        "gradients": trained * gradients,
        "optimizer_states": trained * states,
    }


def _chosen(layers: int, trained: Iterable[int]) -> set[int]:
    chosen = set(trained)
    if not chosen <= set(range(layers)):
        raise ValueError(f"the layers are 0 to {layers - 1}: {sorted(chosen - set(range(layers)))} aren't")
    return chosen


# Doing it


def freeze(model: nn.Module, trained: Iterable[nn.Module], optimizer: Optimizer | None = None) -> list[str]:
    """Train the parameters of the modules `trained` and no others; returns the names of those that train.

    Frees what the frozen ones leave behind: gradients, and their states in `optimizer`. A parameter that a
    trained module shares (tied weights) trains.
    """
    chosen = {id(p) for module in trained for p in module.parameters()}
    names = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(id(parameter) in chosen)
        if parameter.requires_grad:
            names.append(name)
            continue
        parameter.grad = None
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
    return names


def progressive(
    model: nn.Module,
    stages: Iterable[tuple[Iterable[nn.Module], int]],
    optimizer: Optimizer,
    step: Callable[[], Any],
) -> list[list[Any]]:
    """Train in stages, each (modules to train, number of steps); what `step()` returned, by stage.

    `step` is a whole training step: zero_grad, forward, backward, `optimizer.step()`. `optimizer` holds all
    parameters from the start; it skips those without a gradient. A module that thaws begins with new moments.
    """
    returned = []
    for modules, steps in stages:
        freeze(model, modules, optimizer)
        returned.append([step() for _ in range(steps)])
    return returned


# Counting


def saved_bytes(forward: Callable[[], Any], model: nn.Module | None = None) -> int:
    """Bytes of the tensors that autograd saves while `forward()` runs, each storage once.

    Parameters and buffers of `model` don't count: they are in memory anyway.
    """
    kept: set[int] = set()
    if model is not None:
        kept = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}  # holds them, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in kept:
            saved[key] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(pack, _same):
        result = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del result
    return total


def _same(tensor: Tensor) -> Tensor:
    return tensor
