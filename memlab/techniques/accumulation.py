"""Gradient accumulation: a large batch as several micro-batches, one optimizer step.

    for group in groups(loader, 8):                       # the last group may be shorter
        step(loss_of, group, optimizer, weights=[count(micro_batch) for micro_batch in group])

What it saves. Activations are those of one micro-batch: `saved_bytes` = per sample x samples in the largest
micro-batch. Parameters, gradients and optimizer states stay: the gradients *must* live from the first
backward to the step, where a step without accumulation may free each as soon as it is used.

What it costs. Smaller matrix products, which keep a GPU less busy: take the largest micro-batch that fits.

What makes it exact. `.grad` adds up, and a loss is usually a *mean*, so each micro-batch's loss must be
multiplied by its share of the whole:

    gradient of the whole = sum over micro-batches of  (w_i / sum of w) * gradient of mean loss i

with w_i the number of things that loss i averages over: samples, or tokens that aren't padding. Without it,
n micro-batches give n times the gradient: SGD steps n times too far; Adam doesn't show it, until clipping or
weight decay does. With equal shares but unequal token counts, tokens of short micro-batches weigh more.

What it can't make equal: BatchNorm, whose statistics are the micro-batch's, and dropout's masks.

Clipping belongs after the last backward, on the whole gradient, and, with a loss scaler, after unscaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

__all__ = ["Scaler", "accumulate", "by_hand", "clip_by_hand", "groups", "saved_bytes", "shares", "step"]

T = TypeVar("T")


class Scaler(Protocol):
    """What a step asks of a loss scaler: `torch.amp.GradScaler` and `precision.LossScaler` have it."""

    def scale(self, outputs: Tensor, /) -> Tensor: ...
    def unscale_(self, optimizer: torch.optim.Optimizer, /) -> None: ...
    def step(self, optimizer: torch.optim.Optimizer, /) -> Any: ...
    def update(self) -> None: ...


def groups(micro_batches: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` micro-batches, the last one with what is left: it is a step like the others."""
    if size < 1:
        raise ValueError(f"a group has at least one micro-batch, not {size}")
    stream = iter(micro_batches)
    while group := list(islice(stream, size)):
        yield group


def shares(weights: Sequence[float]) -> list[float]:
    """What each micro-batch's mean loss is multiplied by: w_i / sum of w."""
    total = math.fsum(weights)
    if any(w < 0 for w in weights) or not total > 0:
        raise ValueError(
            f"weights are counts of samples or tokens, at least one of them > 0: {list(weights)}"
        )
    return [w / total for w in weights]


def accumulate(
    loss_of: Callable[[T], Tensor],
    group: Sequence[T],
    weights: Sequence[float] | None = None,
    scaler: Scaler | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Tensor:
    """Adds the gradient of the group's mean loss to `.grad`, one micro-batch at a time; returns that loss.

    loss_of: micro-batch -> scalar *mean* loss. weights: what each mean is over (samples, tokens); default:
    equal. A micro-batch of weight 0 is left out, since the mean over nothing is NaN.
    dtype, device: autocast for forward and loss, e.g. torch.bfloat16 on 'cuda'; None: none.
    """
    if weights is None:
        weights = [1] * len(group)
    if len(weights) != len(group):
        raise ValueError(f"{len(group)} micro-batches need as many weights, not {len(weights)}")
    total: Tensor | None = None
    for micro_batch, share in zip(group, shares(weights), strict=True):
        if share == 0:
            continue
        with nullcontext() if dtype is None else torch.autocast(device, dtype):
            loss = loss_of(micro_batch) * share
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
        del loss  # it holds the graph: else two micro-batches' activations would meet
    assert total is not None  # some share is > 0
    return total


def step(
    loss_of: Callable[[T], Tensor],
    group: Sequence[T],
    optimizer: torch.optim.Optimizer,
    *,
    weights: Sequence[float] | None = None,
    max_norm: float | None = None,
    scaler: Scaler | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Tensor:
    """One optimizer step over a group of micro-batches; returns the group's mean loss.

    In this order: zero, all backwards, unscale, clip the whole gradient to `max_norm`, step, new scale.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = accumulate(loss_of, group, weights, scaler, dtype, device)
    if max_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)  # else the scaled gradient would be clipped, to almost nothing
        clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return loss


# -- from scratch: without autograd's own sum --------------------------------------------------------------


def by_hand(
    loss_of: Callable[[T], Tensor],
    group: Sequence[T],
    parameters: Sequence[Tensor],
    weights: Sequence[float] | None = None,
) -> list[Tensor | None]:
    """The sum that `.backward()` builds in `.grad`, written out. None for a parameter that no loss uses."""
    sums: list[Tensor | None] = [None] * len(parameters)
    for micro_batch, share in zip(group, shares(weights or [1] * len(group)), strict=True):
        if share == 0:
            continue
        found = torch.autograd.grad(loss_of(micro_batch) * share, parameters, allow_unused=True)
        for i, gradient in enumerate(found):
            before = sums[i]
            if before is None:
                sums[i] = gradient  # the first is kept as it is: no buffer of zeros
            elif gradient is not None:
                before.add_(gradient)
    return sums


def clip_by_hand(gradients: Iterable[Tensor | None], max_norm: float) -> Tensor:
    """Scales gradients in place so that their common 2-norm is at most `max_norm`; returns what it was."""
    present = [g for g in gradients if g is not None]
    norm: Tensor = torch.stack([torch.linalg.vector_norm(g) for g in present]).norm()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in present:
        g.mul_(factor)
    return norm


# -- what it saves -----------------------------------------------------------------------------------------


def saved_bytes(per_sample: int, batch: int, micro_batches: int) -> int:
    """Activation bytes at the peak: those of the largest of `micro_batches` parts of `batch` samples."""
    if not 1 <= micro_batches <= batch:
        raise ValueError(f"{batch} samples make 1 to {batch} micro-batches, not {micro_batches}")
    return per_sample * math.ceil(batch / micro_batches)
