"""Tiled attention equals eager attention and takes the bytes that its closed form says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memlab.meter import Meter
from memlab.techniques import attention as at
from memlab.units import UnknownNameError
from memlab.virtual import VirtualGPU
from tests.techniques.awkward import batches, differences, make, train


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(
    tokens=32,
    head=16,
    batch=1,
    heads=1,
    kv_heads=None,
    keys=None,
    dtype=torch.float32,
    device="cpu",
    size=1.0,
):
    """q, k, v that need gradients, and a gradient of the output."""
    torch.manual_seed(0)
    shapes = [(batch, n, t, head) for n, t in ((heads, tokens), (kv_heads or heads, keys or tokens))]
    q, k, v = (torch.randn(shapes[i > 0], dtype=dtype, device=device) * size for i in range(3))
    gradient = torch.randn(shapes[0], dtype=dtype, device=device)
    return (*(t.requires_grad_() for t in (q, k, v)), gradient)


def forward_backward(attention, q, k, v, gradient, *more):
    out = attention(q, k, v, *more)
    return out, *torch.autograd.grad(out, (q, k, v), gradient)


def assert_equal(a, b, tolerance):
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() <= tolerance * max(1.0, y.abs().max())


# -- equal ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    keys=st.integers(1, 40),
    head=st.integers(1, 20),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    causal=st.booleans(),
    block=st.integers(1, 50),
)
def test_equals_eager_for_any_shape(tokens, keys, head, batch, kv_heads, groups, causal, block):
    q, k, v, gradient = inputs(tokens, head, batch, kv_heads * groups, kv_heads, keys, torch.float64)
    expected = forward_backward(at.eager, q, k, v, gradient, causal)
    assert_equal(forward_backward(at.tiled, q, k, v, gradient, causal, block), expected, 1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_eager_and_sdpa_with_large_scores(causal):
    q, k, v, gradient = inputs(100, 32, 2, 4, 2, size=8.0)  # scores of hundreds: exp of one overflows fp32
    exact = forward_backward(at.eager, *(t.double() for t in (q, k, v, gradient)), causal)
    for attention in (at.eager, at.tiled, at.sdpa):  # fp32 rounds a score of 300 at its fifth decimal
        assert_equal(forward_backward(attention, q, k, v, gradient, causal), exact, 3e-4)


def test_plain_sums_of_softmaxed_blocks_are_wrong():
    def naive(q, k, v, block=8):
        tiles = range(0, k.size(-2), block)
        return sum(at.eager(q, k[..., i : i + block, :], v[..., i : i + block, :]) for i in tiles)

    q, k, v, _ = inputs(32)
    expected = at.eager(q, k, v)
    assert (naive(q, k, v) - expected).abs().max() > 0.5
    assert (at.tiled(q, k, v, False, 8) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_is_as_exact_as_the_fused_kernel(dtype):
    q, k, v, gradient = inputs(64, 16, 1, 4, 2, dtype=dtype)
    exact = forward_backward(at.eager, *(t.double() for t in (q, k, v, gradient)), True)
    found = forward_backward(at.tiled, q, k, v, gradient, True, 16)
    assert {t.dtype for t in found} == {dtype}
    assert_equal([t.double() for t in found], exact, 4 * torch.finfo(dtype).eps)


def test_gradcheck():
    q, k, v, _ = inputs(5, 3, 1, 2, 1, dtype=torch.float64)
    torch.autograd.gradcheck(lambda *qkv: at.tiled(*qkv, True, 2), (q, k, v))


def test_trains_the_awkward_model_like_the_plain_step(monkeypatch):
    plain, other = make(), make()
    losses = train(plain, batches(5), torch.optim.SGD(plain.parameters(), lr=0.1))

    def attention(q, k, v, is_causal):
        return at.tiled(q, k, v, is_causal, 4)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    others = train(other, batches(5), torch.optim.SGD(other.parameters(), lr=0.1))
    assert losses == pytest.approx(others, abs=1e-5)
    assert differences(plain, other, 1e-5) == {}


def test_inputs_that_are_views_or_need_no_gradient():
    q, k, v, gradient = inputs(20, 8, 2, 4)
    heads_last = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    expected = forward_backward(at.eager, q, k, v, gradient)
    found = forward_backward(at.tiled, *heads_last, gradient.transpose(1, 2).contiguous().transpose(1, 2))
    assert_equal(found, expected, 1e-5)
    at.tiled(q, k.detach(), v.detach()).sum().backward()
    assert q.grad is not None


def test_bad_input():
    q, k, v, _ = inputs(heads=3, kv_heads=2)
    for attention in (at.eager, at.tiled, at.sdpa):
        with pytest.raises(ValueError, match="3 query heads can't share 2 key heads"):
            attention(q, k, v)
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match="at least one row, not 0"):
        at.tiled(q, k, v, block=0)
    with pytest.raises(ValueError, match="at least one key"):
        at.tiled(q, k[..., :0, :], v[..., :0, :])


# -- which kernel --------------------------------------------------------------------------------------------


def test_which_backend_ran():
    q, k, v, _ = inputs()
    assert at.backend_that_ran(q, k, v) == "flash" if q.device.type == "cpu" else "efficient"
    assert at.backend_that_ran(q, k, v, backend="math") == "math"
    assert_equal([at.sdpa(q, k, v, backend="math")], [at.sdpa(q, k, v, backend="flash")], 1e-6)
    with pytest.raises(UnknownNameError, match="did you mean flash"):
        at.sdpa(q, k, v, backend="flsh")
    with VirtualGPU(None):
        assert at.backend_that_ran(*inputs()[:3], causal=True) == "flash"


def test_flash_attn_says_why_it_cannot_run():
    q, k, v, _ = inputs()
    if at.flash_unavailable(q) is not None:
        with pytest.raises(RuntimeError, match=r"flash_attn can't run: it .*; use sdpa or tiled"):
            at.flash(q, k, v)


@pytest.mark.parametrize(
    ("head", "dtype", "reason"),
    [(64, torch.float32, "fp16 and bf16"), (512, torch.bfloat16, "at most 256"), (64, torch.bfloat16, None)],
)
def test_what_flash_attn_can_take(monkeypatch, head, dtype, reason):
    class OnACard:
        is_cuda, device = True, torch.device("cuda", 0)

        def __init__(self):
            self.dtype = dtype

        def size(self, _):
            return head

    monkeypatch.setattr(at, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    said = at.flash_unavailable(OnACard())
    assert said is None if reason is None else reason in said
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert "Ampere or newer and this is Tesla T4" in at.flash_unavailable(OnACard())


# -- bytes ---------------------------------------------------------------------------------------------------


def measured(attention, *more, virtual=False, **shape) -> int:
    """Peak of forward + backward beyond q, k, v and the output's gradient; any size on the virtual GPU."""
    with VirtualGPU(None) if virtual else Meter() as meter:
        q, k, v, gradient = inputs(**shape)
        given_bytes = sum(t.numel() * t.element_size() for t in (q, k, v, gradient))
        forward_backward(attention, q, k, v, gradient, *more)
    return meter.trace.peak_bytes - given_bytes


SHAPES = [
    {"tokens": 512, "head": 64},
    {"tokens": 512, "head": 40, "batch": 2, "heads": 3},
    {"tokens": 512, "head": 64, "heads": 4, "kv_heads": 2},
    {"tokens": 512, "head": 64, "heads": 4, "kv_heads": 1, "dtype": torch.bfloat16},
    {"tokens": 2048, "head": 64, "dtype": torch.bfloat16},
    {"tokens": 2048, "head": 128, "heads": 32, "virtual": True},
    {"tokens": 100_000, "head": 64, "virtual": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_closed_forms_are_exact(shape):
    form = {n: size for n, size in shape.items() if n not in ("dtype", "virtual")}
    form["itemsize"] = shape.get("dtype", torch.float32).itemsize
    block = 8192 if shape["tokens"] > 10_000 else 128
    for attention, said, more in (
        (at.eager, at.eager_bytes(**form, causal=True), ()),
        (at.sdpa, at.sdpa_bytes(**form), ()),
        (at.tiled, at.tiled_bytes(**form, block=block), (block,)),
    ):
        assert measured(attention, True, *more, **shape) == pytest.approx(said, rel=0.005), attention.__name__


def test_at_8192_tokens_tiles_take_80_times_less_than_eager_and_as_much_as_sdpa():
    shape = {"tokens": 8192, "head": 64}
    tiled, sdpa = (measured(attention, True, **shape) for attention in (at.tiled, at.sdpa))
    eager = measured(at.eager, True, virtual=True, **shape)
    assert eager > 80 * tiled
    assert tiled < 1.3 * sdpa


def test_eager_grows_with_the_square_and_tiles_do_not():
    growth = {}
    for attention in (at.eager, at.tiled):
        peaks = [measured(attention, True, virtual=True, tokens=t, head=64) for t in (2048, 4096)]
        growth[attention.__name__] = peaks[1] / peaks[0]
    assert growth["eager"] > 3.9
    assert growth["tiled"] < 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda():
    q, k, v, gradient = inputs(300, 64, 2, 4, 2, device="cuda")
    expected = forward_backward(at.eager, q, k, v, gradient, True)
    assert_equal(forward_backward(at.tiled, q, k, v, gradient, True), expected, 1e-4)
