"""Accumulated gradients equal those of the whole batch, where the shares are right, and only there."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memlab.meter import Meter
from memlab.techniques import accumulation as acc
from memlab.techniques.precision import LossScaler
from memlab.virtual import VirtualGPU
from tests.techniques.awkward import Batch, batches, differences, loss_of, make, train

WHOLE = batches(1, batch=8)[0]


def parts(batch: Batch, size: int) -> list[Batch]:
    return [Batch(*pair) for pair in zip(batch.tokens.split(size), batch.targets.split(size), strict=True)]


def tokens_in(batch: Batch) -> int:
    return int((batch.targets != -100).sum())


def padded(batch: Batch) -> Batch:
    """Of sample i only the first i % 9 targets count; sample 0 has none."""
    targets = batch.targets.clone()
    for i, row in enumerate(targets):
        row[i:] = -100
    return Batch(batch.tokens, targets)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(a: nn.Module, b: nn.Module) -> float:
    """Largest difference of two models' gradients, relative to the largest gradient."""
    x, y = gradients(a), gradients(b)
    assert x.keys() == y.keys()
    largest = max(g.abs().max() for g in x.values())
    return float(max((x[n] - y[n]).abs().max() for n in x) / largest)


# -- the gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])  # 3: the last micro-batch is smaller
@pytest.mark.parametrize("whole", [WHOLE, padded(WHOLE)], ids=["all tokens", "padded"])
def test_token_weights_give_the_whole_batch(size, whole):
    plain, other = make(dropout=0.0), make(dropout=0.0)
    loss = loss_of(plain, whole)
    loss.backward()
    group = parts(whole, size)
    found = acc.accumulate(partial(loss_of, other), group, [tokens_in(b) for b in group])
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert apart(plain, other) < 2e-6


def test_equal_shares_give_short_micro_batches_too_much():
    whole = padded(WHOLE)
    plain, other = make(dropout=0.0), make(dropout=0.0)
    loss_of(plain, whole).backward()
    acc.accumulate(partial(loss_of, other), parts(whole, 2))
    assert apart(plain, other) > 0.05


def test_without_shares_the_gradient_is_as_many_times_too_large():
    plain, other = make(dropout=0.0), make(dropout=0.0)
    loss_of(plain, WHOLE).backward()
    for part in parts(WHOLE, 1):
        loss_of(other, part).backward()
    ratio = gradients(other)["norm.weight"].norm() / gradients(plain)["norm.weight"].norm()
    assert ratio.item() == pytest.approx(8, rel=1e-5)


def test_the_worked_example():
    """3 tokens of mean loss 4 and 100 of mean loss 2: 2.06, not 3.0."""
    means = torch.tensor([4.0, 2.0], requires_grad=True)
    assert acc.accumulate(lambda i: means[i], [0, 1], [3, 100]).item() == pytest.approx(2.058, abs=1e-3)
    assert acc.accumulate(lambda i: means[i], [0, 1]).item() == 3.0


def test_batch_norm_is_not_equal():
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    other.load_state_dict(plain.state_dict())
    F.mse_loss(plain(x), y).backward()
    acc.accumulate(lambda xy: F.mse_loss(other(xy[0]), xy[1]), list(zip(x.split(8), y.split(8), strict=True)))
    assert apart(plain, other) > 0.05


def test_autograds_sum_is_the_one_by_hand():
    group = parts(padded(WHOLE), 3)
    weights = [tokens_in(b) for b in group]
    model = make(dropout=0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    by_hand = acc.by_hand(partial(loss_of, model), group, trained, weights)
    acc.accumulate(partial(loss_of, model), group, weights)
    for p, g in zip(trained, by_hand, strict=True):
        assert (p.grad is None) == (g is None)
        assert g is None or torch.equal(p.grad, g)
    assert sum(g is None for g in by_hand) == 1  # the unused parameter


# -- the step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_with_clipping_equal_the_plain_ones(make_optimizer):
    data = [padded(b) for b in batches(5, batch=8)]
    plain, other = make(dropout=0.0), make(dropout=0.0)
    a, b = (make_optimizer(m.parameters(), lr=0.01, eps=1e-4) if make_optimizer is torch.optim.AdamW
            else make_optimizer(m.parameters(), lr=0.1) for m in (plain, other))  # fmt: skip
    for batch in data:
        a.zero_grad()
        loss = loss_of(plain, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        a.step()
        group = parts(batch, 3)
        found = acc.step(
            partial(loss_of, other), group, b, weights=[tokens_in(g) for g in group], max_norm=0.5
        )
        assert norm > 0.5  # it clips
        assert found.item() == pytest.approx(loss.item(), rel=1e-4)
    assert differences(plain, other, 1e-4) == {}


def test_one_micro_batch_is_the_plain_step_bitwise():
    plain, other = make(), make()
    train(plain, batches(3), torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for i, batch in enumerate(batches(3)):
        torch.manual_seed(2 + i)
        acc.step(partial(loss_of, other), [batch], optimizer)
    assert differences(plain, other) == {}


@pytest.mark.parametrize("scaler", [LossScaler, partial(torch.amp.GradScaler, "cpu")])
def test_a_scaler_changes_nothing_as_gradients_are_unscaled_before_clipping(scaler):
    plain, other = make(dropout=0.0), make(dropout=0.0)
    for model, more in ((plain, {}), (other, {"scaler": scaler()})):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(3):
            acc.step(partial(loss_of, model), parts(batch, 2), optimizer, max_norm=0.5, **more)
    assert differences(plain, other) == {}  # the scale is a power of two


def test_clipping_each_micro_batch_or_before_unscaling_is_something_else():
    plain, each, scaled = make(dropout=0.0), make(dropout=0.0), make(dropout=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    acc.step(partial(loss_of, plain), parts(WHOLE, 2), optimizer, max_norm=0.5)
    for part in parts(WHOLE, 2):
        (loss_of(each, part) / 4).backward()
        nn.utils.clip_grad_norm_(each.parameters(), 0.5)
    assert apart(plain, each) > 0.01
    scaler = LossScaler()
    acc.accumulate(partial(loss_of, scaled), parts(WHOLE, 2), scaler=scaler)
    nn.utils.clip_grad_norm_(scaled.parameters(), 0.5)
    scaler.unscale_(torch.optim.SGD(scaled.parameters(), lr=0.1))
    assert apart(plain, scaled) > 0.99  # clipped to nothing


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0.01, 100))
def test_clip_by_hand_is_torchs(values, max_norm):
    mine = [torch.tensor(values), None, torch.tensor(values[:1])]
    theirs = [torch.zeros_like(t) for t in (mine[0], mine[2])]
    for p, g in zip(theirs, (mine[0], mine[2]), strict=True):
        p.grad = g.clone()
    assert torch.equal(acc.clip_by_hand(mine, max_norm), nn.utils.clip_grad_norm_(theirs, max_norm))
    assert torch.equal(mine[0], theirs[0].grad)


# -- parts ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9))
def test_groups_lose_nothing(n, size):
    found = list(acc.groups(range(n), size))
    assert [i for group in found for i in group] == list(range(n))
    assert len(found) == math.ceil(n / size)
    assert all(len(group) == size for group in found[:-1])


@given(st.lists(st.integers(0, 1000), min_size=1).filter(any))
def test_shares_sum_to_one(weights):
    assert math.fsum(acc.shares(weights)) == pytest.approx(1)


def test_bad_input():
    with pytest.raises(ValueError, match="at least one micro-batch, not 0"):
        list(acc.groups([1], 0))
    for weights in ([], [0, 0], [1, -1]):
        with pytest.raises(ValueError, match="counts of samples or tokens"):
            acc.shares(weights)
    with pytest.raises(ValueError, match="2 micro-batches need as many weights, not 1"):
        acc.accumulate(lambda b: b, [1, 2], [1])
    with pytest.raises(ValueError, match="make 1 to 4 micro-batches, not 5"):
        acc.saved_bytes(1, 4, 5)


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 5])
@pytest.mark.parametrize("virtual", [False, True])
def test_activations_are_those_of_one_micro_batch(micro_batches, virtual):
    width, layers, batch, rows = 32, 6, 16, 128  # a sample: `rows` vectors
    with VirtualGPU(None) if virtual else Meter() as meter:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        x = torch.randn(batch, rows, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = x.split(math.ceil(batch / micro_batches))
        acc.step(lambda part: model(part).mean(), group, optimizer, weights=[len(p) for p in group])
    given_bytes = batch * rows * width * 4
    peaks = meter.trace.consumer_peaks()
    said = acc.saved_bytes(layers * rows * width * 4, batch, micro_batches)
    assert peaks["activations"] - given_bytes == pytest.approx(said, rel=0.02)
    # what does not shrink
    assert peaks["parameters"] == peaks["gradients"] == layers * width * (width + 1) * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    plain, other = make(dropout=0.0).cuda(), make(dropout=0.0).cuda()
    whole = Batch(*(t.cuda() for t in WHOLE))
    loss_of(plain, whole).backward()
    acc.accumulate(partial(loss_of, other), parts(whole, 2))
    assert apart(plain, other) < 1e-5
