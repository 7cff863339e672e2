"""Checkpointing equals the plain step bitwise and saves what its closed form says."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memlab.meter import Meter
from memlab.techniques import checkpointing as ck
from memlab.virtual import VirtualGPU
from tests.memlab.witness import resident_peak
from tests.techniques.awkward import HIDDEN, Batch, Block, batches, differences, loss_of, make, train

LAYERS, ROWS, WIDTH = 64, 4096, 64
UNIT = ROWS * WIDTH * 4  # one activation, 1 MiB; the weights of a layer are 1/64 of it

WAYS = {
    "whole": partial(ck.run, every=4),
    "per block": partial(ck.run, every=1),
    "last segment shorter": partial(ck.run, every=3),
    "from scratch": partial(ck.run, every=2, checkpoint=ck.recompute),
    "from scratch, whole": partial(ck.run, every=4, checkpoint=ck.recompute),
    "selective": partial(ck.run, checkpoint=ck.selective()),
    "selective by hand": partial(ck.run, checkpoint=ck.selective_by_hand()),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def frozen_tanh() -> nn.ModuleList:
    """The input needs the gradient, so the chain saves each layer's output and nothing else."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    return nn.ModuleList(layers).requires_grad_(False)


def trained_relu() -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))


def measured(blocks: nn.ModuleList, every: int | None, checkpoint=ck.by_torch, kept: bool = False) -> int:
    """Peak bytes over parameters and gradients; `kept`: over the batch too, while the output is alive."""
    x = torch.randn(ROWS, WIDTH, requires_grad=not any(p.requires_grad for p in blocks.parameters()))
    with Meter(blocks) as meter:
        if kept:
            y = ck.run(blocks, x, every, checkpoint)
            y.sum().backward()
        else:
            ck.run(blocks, x, every, checkpoint).sum().backward()
    trace = meter.trace
    at_peak = trace.consumers_at_peak()
    weights = sum(p.numel() * 4 for p in blocks.parameters())
    return trace.peak_bytes - weights - at_peak["gradients"] - (0 if kept else UNIT)


# -- equal to the plain step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_plain_step_bitwise(way):
    plain, other = make(), make(run=WAYS[way])
    assert train(plain, batches(4)) == train(other, batches(4))
    assert differences(plain, other) == {}


def test_without_the_random_state_the_gradients_are_wrong():
    plain, other = make(), make(run=partial(ck.run, checkpoint=partial(ck.recompute, preserve_rng=False)))
    data = batches(1)
    assert train(plain, data) == train(other, data)  # the forward is the same
    assert max(differences(plain, other).values()) > 1e-3


@pytest.mark.parametrize("way", ["per block", "from scratch", "selective by hand"])
def test_autocast_is_brought_back(way):
    plain, other = make(), make(run=WAYS[way])
    for model in (plain, other):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batches(1)[0])
        loss.backward()
    assert differences(plain, other) == {}


def test_the_random_stream_goes_on_as_without():
    after = {}
    for name, run in {"plain": None, **WAYS}.items():
        train(make(run=run), batches(1))
        after[name] = torch.rand(1).item()
    assert len(set(after.values())) == 1


def test_from_scratch_works_where_the_input_needs_no_gradient():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    ck.recompute(layer, x).sum().backward()
    (by_grad,) = torch.autograd.grad(ck.recompute(layer, x).sum(), layer.weight)
    assert torch.equal(layer.weight.grad, by_grad)


def test_the_reentrant_default_loses_the_gradients_there():
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    assert not out.requires_grad


def test_batch_norm_counts_twice():
    x = torch.randn(8, 4)
    plain, again = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
    again.load_state_dict(plain.state_dict())
    plain(x).sum().backward()
    ck.run([again], x).sum().backward()
    assert (plain[1].num_batches_tracked.item(), again[1].num_batches_tracked.item()) == (1, 2)
    assert not torch.equal(plain[1].running_mean, again[1].running_mean)


def test_plain_functions_and_bad_lengths():
    x = torch.randn(3, requires_grad=True)
    y = ck.run([torch.tanh, torch.sin], x, every=2, checkpoint=ck.recompute)
    assert torch.equal(y, x.tanh().sin())
    with pytest.raises(ValueError, match="at least one block, not 0"):
        ck.run([torch.tanh], x, every=0)


# -- saves what the formula says -----------------------------------------------------------------------------


@pytest.mark.parametrize("make_chain", [frozen_tanh, trained_relu])
@pytest.mark.parametrize("every", [None, 1, 2, 4, 6, 8, 10, 16, 32, 64])
def test_peak_is_the_closed_form(make_chain, every):
    said = ck.peak_bytes(LAYERS, every, boundary=UNIT, inside=UNIT)
    assert measured(make_chain(), every) == pytest.approx(said, rel=0.02)


def test_64_layers_go_from_65_units_to_16_and_from_67_to_18():
    assert ck.best_every(LAYERS) == 8
    assert [measured(frozen_tanh(), every) // UNIT for every in (None, 8)] == [65, 16]
    kept = [round(measured(trained_relu(), every, kept=True) / UNIT, 1) for every in (None, 8)]
    assert kept == [67, 18]


def test_the_whole_model_in_one_segment_saves_nothing_at_the_peak():
    assert measured(frozen_tanh(), LAYERS) == measured(frozen_tanh(), None)
    with Meter() as meter:  # but after the forward nothing is left but the output
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        y = ck.run(frozen_tanh(), x, LAYERS)
        live = meter.live_bytes
    assert y.requires_grad
    assert live < 3 * UNIT + LAYERS * WIDTH * (WIDTH + 1) * 4 + 8192


@pytest.mark.parametrize("every", [None, 2, 3, 4, 6, 12])
def test_peak_of_transformer_blocks_is_the_closed_form(every):
    layers, shape = 12, (8, 64, 128)
    boundary = 4 * 8 * 64 * 128

    def step(every):
        blocks, x = nn.ModuleList(Block(128, 4, dropout=0.0) for _ in range(layers)), torch.randn(shape)
        weights = sum(p.numel() * 4 for p in blocks.parameters())
        with Meter(blocks) as meter:
            y = ck.run(blocks, x, every)
            live = meter.live_bytes - weights - boundary
            y.sum().backward()
        return meter.trace.peak_bytes - weights - boundary - meter.trace.consumers_at_peak()[
            "gradients"
        ], live

    inside = step(None)[1] // layers
    peak, live = step(every)
    assert inside > 15 * boundary
    assert peak == pytest.approx(ck.peak_bytes(layers, every, boundary=boundary, inside=inside), rel=0.04)
    if every is not None:  # after the forward: the segments' inputs and the output, without the batch
        assert live == layers // every * boundary


def test_from_scratch_holds_two_units_more():
    for every in (2, 8, 32):
        assert measured(frozen_tanh(), every, ck.recompute) - measured(frozen_tanh(), every) == 2 * UNIT


def test_selective_lies_between_all_and_nothing():
    peaks = {}
    for way in ("whole", "per block", "selective", "selective by hand"):
        model = make(run=WAYS[way], hidden=4 * HIDDEN)
        with Meter(model) as meter:
            loss = loss_of(model, batches(1, batch=8, tokens=32)[0])
            peaks[way] = meter.live_bytes
            loss.backward()
    with Meter(make(hidden=4 * HIDDEN)) as meter:
        loss = loss_of(meter._model, batches(1, batch=8, tokens=32)[0])
        peaks["none"] = meter.live_bytes
    assert peaks["whole"] < peaks["per block"] < peaks["selective"] < peaks["none"]
    assert peaks["selective"] == peaks["selective by hand"]


@pytest.mark.parametrize(
    ("activation", "trainable", "plain", "in_eights"),
    # The second is chapter 3's step: batch and output are its own, so the peak has them, too.
    [("Tanh", False, 65, 16), ("ReLU", True, 67, 18)],
)
def test_resident_memory_of_the_process_says_the_same(activation, trainable, plain, in_eights):
    program = f"""
import torch
from torch import nn
from memlab.techniques.checkpointing import run
torch.set_num_threads(1)
layers = (nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.{activation}()) for _ in range({LAYERS}))
blocks = nn.ModuleList(layers).requires_grad_({trainable})
x = None if {trainable} else torch.randn({ROWS}, {WIDTH}, requires_grad=True)

def step(every):
    batch = torch.randn({ROWS}, {WIDTH}) if x is None else x
    output = run(blocks, batch, every)
    loss = output.sum()
    if x is not None:
        del output
    loss.backward()

found = {{}}
for every in (None, 8, 64):
    for repeat in range(2):  # the first fills the libraries' caches
        blocks.zero_grad()
        if x is not None:
            x.grad = None
        reset()
        before = now()
        step(every)
        found[str(every)] = high() - before
print(json.dumps(found))
"""
    units = {every: high / UNIT for every, high in resident_peak(program).items()}
    assert units["None"] == pytest.approx(plain, rel=0.03)
    assert units["8"] == pytest.approx(in_eights, rel=0.05)
    assert units["64"] == pytest.approx(plain, rel=0.03)


@given(
    layers=st.integers(1, 200),
    every=st.integers(1, 250),
    boundary=st.integers(1, 9),
    inside=st.integers(1, 99),
)
def test_no_segment_length_beats_the_best(layers, every, boundary, inside):
    sizes = {"boundary": boundary, "inside": inside}
    best = ck.best_every(layers, **sizes)
    assert 1 <= best <= layers
    assert ck.peak_bytes(layers, best, **sizes) <= ck.peak_bytes(layers, every, **sizes)


def test_a_block_that_saves_much_wants_short_segments():
    assert ck.best_every(24, boundary=1, inside=21) == 1
    assert ck.best_every(64, boundary=1, inside=1) == 8


# -- costs what it must --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "again"),
    [(ck.by_torch, 56), (ck.recompute, 64)],  # torch stops each segment before its last layer
)
def test_recomputation_counted_in_operators(checkpoint, again):
    x = torch.randn(2, WIDTH)
    with ck.Operators() as count:
        ck.run(trained_relu(), x, 8, checkpoint).sum().backward()
    assert count.forward["addmm"] == LAYERS
    assert count.recomputed["addmm"] == LAYERS  # a ReLU's own output is what its backward asks for
    assert count.recomputed["relu"] in (again, LAYERS)
    assert count.backward["addmm"] == 0
    with ck.Operators() as count:
        ck.run(trained_relu(), x, None).sum().backward()
    assert not count.recomputed
    assert count.backward["mm"] > 0


def test_selective_recomputes_no_matrix_product():
    for checkpoint, expected in (
        (ck.by_torch, True),
        (ck.selective(), False),
        (ck.selective_by_hand(), False),
    ):
        model = make(run=partial(ck.run, checkpoint=checkpoint))
        with ck.Operators() as count:
            loss_of(model, batches(1)[0]).backward()
        assert (count.recomputed["addmm"] > 0) is expected
        assert count.recomputed["native_layer_norm"] > 0


@pytest.mark.parametrize("checkpoint", [ck.selective(), ck.selective_by_hand()])
def test_a_kept_output_that_changes_in_place_is_refused(checkpoint):
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"mutated|changed in place"):
        ck.run([layer], x, checkpoint=checkpoint).sum().backward()


# -- elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_virtual_gpu_sees_the_same_bytes(way):
    def step() -> None:
        tokens = torch.zeros(4, 8, dtype=torch.int64)
        loss_of(make(run=WAYS[way]), Batch(tokens, tokens)).backward()

    with Meter() as real:
        step()
    with VirtualGPU(None) as virtual:
        step()
    assert virtual.trace.peak_bytes == real.trace.peak_bytes


class CompiledMeter(Meter):
    """Sees the operators of compiled code; otherwise torch.compile does nothing inside a dispatch mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def test_the_compiler_keeps_to_a_budget():
    model = make(hidden=2 * HIDDEN, dropout=0.0, blocks=2)
    batch = batches(1, batch=8, tokens=32)[0]
    live, peaks, gradients = {}, {}, {}
    for budget in (1.0, 0.3, 0.0):
        torch.compiler.reset()
        model.zero_grad()
        function = ck.budgeted(partial(loss_of, model), budget)
        function(batch).backward()
        model.zero_grad()
        with CompiledMeter(model) as meter:
            loss = function(batch)
            live[budget] = meter.live_bytes
            loss.backward()
        peaks[budget] = meter.trace.peak_bytes
        gradients[budget] = model.blocks[0].qkv.weight.grad.clone()
    torch.compiler.reset()
    parameters = sum(p.numel() * 4 for p in model.parameters())
    assert live[0.3] - parameters < 0.4 * (live[1.0] - parameters)
    assert live[0.0] - parameters < 1024 + batch.tokens.numel() * 16  # the batch, nothing saved
    assert peaks[0.3] < peaks[0.0] == peaks[1.0]
    assert torch.allclose(gradients[0.3], gradients[1.0], atol=1e-6)
    with pytest.raises(ValueError, match="0 to 1, not 2"):
        ck.budgeted(model, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    plain, other = make().cuda(), make(run=WAYS["from scratch"]).cuda()
    for model in (plain, other):
        torch.manual_seed(0)
        tokens = batches(1)[0].tokens.cuda()
        loss_of(model, Batch(tokens, tokens)).backward()
    assert differences(plain, other) == {}
