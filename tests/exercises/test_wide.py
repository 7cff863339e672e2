"""The checks of chapter 4: the solution earns all, the untouched version nothing, wrong answers less."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memlab import nets, widgets
from memlab.exercises import collect, exercises, rate, wide
from memlab.meter import Meter
from memlab.models import model
from memlab.techniques import sharding, tensor_parallel
from memlab.units import GIB
from tests.exercises import mutant, of_mutant, score
from tests.exercises.mutants_4 import CHAPTER, MUTANTS

IDS = list(exercises(4))
WRONG = [(exercise, name) for exercise, names in MUTANTS.items() for name in names]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[comm.rank].clone()", "[comm.rank]", "clone() it"),
        ("make_optimizer([self.piece])", "make_optimizer(self.parameters)", "made for your piece"),
        ("with torch.no_grad():", "if True:", "under torch.no_grad()"),
    ],
)
def test_a_slip_in_zero1_is_named(old: str, new: str, words: str) -> None:
    got = score(CHAPTER, "4.6", mutant(CHAPTER, "4.6", [(old, new)]), 5)
    assert got.points < 5 and any(words in line for line in got.messages), got.messages


def test_the_blocks_alone_are_not_the_model() -> None:
    edits = [("h, L = cfg.hidden, cfg.layers", "return 12 * cfg.layers * cfg.hidden**2")]
    assert score(CHAPTER, "4.1", mutant(CHAPTER, "4.1", edits)).points == 0


@pytest.mark.parametrize(
    ("exercise", "name", "words"),
    [
        ("4.1", "the article's 2Lh^2 + 2Lh", "counts two matrices a block"),
        ("4.1", "keys and values for every head", "key and value have kv_heads"),
        ("4.1", "no pooler", "short by exactly the pooler"),
        ("4.1", "an untied head forgotten", "the head, its own matrix"),
        ("4.1", "heads that make up h", "the heads needn't make up h"),
        ("4.2", "the article's b x h x h", "adds up in registers"),
        ("4.2", "no bias", "the bias is missing"),
        ("4.2", "MiB", "right size in MiB"),
        ("4.2", "always 4 bytes", "use `size`"),
        ("4.3", "one layer", "times layers"),
        ("4.3", "linear in s", "s x s"),
        ("4.3", "no mask", "one byte per score"),
        ("4.4", "the softmaxes of blocks added", "can't be added"),
        ("4.4", "never rescaled", "the output so far and the sum so far"),
        ("4.4", "only the sum rescaled", "the output so far is not"),
        ("4.4", "no running maximum", "subtract the running maximum"),
        ("4.4", "no scale", "divide the scores by sqrt(d)"),
        ("4.4", "the mask forgotten", "as without the mask"),
        ("4.4", "the last block dropped", "its keys are left out"),
        ("4.4", "the whole matrix", "s x s is still there"),
        ("4.4", "torch's fused kernel", "write the loop"),
        ("4.5", "the bias on every rank", "add it after the sum"),
        ("4.5", "no sum", "comm.sum(part)"),
        ("4.5", "no copy", "start with comm.copy(x)"),
        ("4.5", "views of the whole weight", "clone() it"),
        ("4.5", "the whole layers in a list", "in no list either"),
        ("4.5", "columns only, joined", "don't join the slices"),
        ("4.5", "one rank alone", "not every rank calls"),
        ("4.6", "the article's 4, 8 and N", "limits for very many ranks"),
        ("4.6", "stage 1 shards gradients", "stage 2 does"),
        ("4.6", "the sum for the mean", "divide by the number of ranks"),
        ("4.6", "its own gradient alone", "its own gradient alone"),
        ("4.6", "whole gradients on every rank", "needs only its piece"),
        ("4.6", "whole states on every rank", "whole on every rank"),
        ("4.6", "not gathered", "all_gather the parts"),
    ],
)
def test_the_message_names_the_mistake(exercise: str, name: str, words: str) -> None:
    got = of_mutant(CHAPTER, exercise, name)[1]
    assert any(words in line for line in got.messages), got.messages


@pytest.mark.parametrize("answer", [True, None, "4", math.nan, [1], {}])
def test_only_plain_ints_count(answer: object) -> None:
    for name in ("4.1", "4.2", "4.3"):
        assert rate(exercises(4)[name], collect(exercises(4)[name], lambda *_: answer, 0)).points == 0


# -- what is right by the library -----------------------------------------------------------------------


def test_parameters_are_those_of_the_modules() -> None:
    small = wide._configs(3)["bert"][1]
    assert sum(p.numel() for p in nets.build(small, device="meta").parameters()) == small.parameter_count
    assert model("llama2-70b").parameter_count == 68_976_648_192  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("b", "h_in", "h_out", "dtype"), [(7, 96, 40, torch.float32), (3, 24, 88, torch.bfloat16)]
)
def test_linear_is_what_the_meter_measures(b: int, h_in: int, h_out: int, dtype: torch.dtype) -> None:
    right = wide.linear_expected(b, h_in, h_out, dtype.itemsize)
    layer, x = nn.Linear(h_in, h_out, dtype=dtype), torch.randn(b, h_in, dtype=dtype, requires_grad=True)
    assert sum(p.nbytes for p in layer.parameters()) == right["parameters"]
    kept: list[Tensor] = []
    with (
        Meter() as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = layer(x)
    new = [block.bytes for block in forward.trace.blocks() if block.operator]
    assert sum(new) == right["forward"]
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    assert sum(t.nbytes for t in kept if t.untyped_storage().data_ptr() not in weights) == right["saved"]
    gradient = torch.ones_like(y)
    with Meter() as backward:
        y.backward(gradient)
    assert sum(block.bytes for block in backward.trace.blocks() if block.operator) == right["backward"]


def test_the_techniques_formulas_agree() -> None:
    case = wide._Split(4, 30, 16, 64)
    formula = tensor_parallel.mlp_bytes(30, 16, 64, 4)
    assert (case.held, case.saved) == (formula["parameters"], formula["activations"])
    for stage in range(4):
        assert wide.zero_expected(64 * 7, 64, stage, (2, 2, 12)) == sharding.states(64 * 7, 64, stage)


# -- other right answers, and twins that must fail ----------------------------------------------------------


def all_queries_at_once(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    """Tiles of all queries by one block of keys: the most that the check allows."""
    s, d = q.shape[-2:]
    top = torch.full_like(q[..., :1], -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for j in range(0, s, block):
        scores = q @ k[..., j : j + block, :].transpose(-2, -1) / d**0.5
        if causal:
            hidden = torch.arange(j, j + scores.shape[-1]) > torch.arange(s)[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        new = torch.maximum(top, scores.max(-1, keepdim=True).values)
        p, shrink = torch.exp(scores - new), torch.exp(top - new)
        total, out, top = (
            total * shrink + p.sum(-1, keepdim=True),
            out * shrink + p @ v[..., j : j + block, :],
            new,
        )
    return out / total, (top + total.log()).squeeze(-1)


def eager(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    scores = q @ k.mT / q.size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def keys_by_queries(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    """The tiles turned round, block x s, and the pair as a list."""
    s, d = q.shape[-2:]
    q = (q / d**0.5).mT.contiguous()
    top = torch.full_like(q[..., :1, :], -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values, numbers in zip(
        k.split(block, -2), v.split(block, -2), torch.arange(s).split(block), strict=True
    ):
        scores = keys @ q
        if causal:
            scores.masked_fill_(numbers[:, None] > torch.arange(s), -math.inf)
        new = torch.maximum(top, scores.amax(-2, keepdim=True))
        p, shrink = (scores - new).exp(), (top - new).exp()
        total, out, top = total * shrink + p.sum(-2, keepdim=True), out * shrink + values.mT @ p, new
    return [(out / total).mT, (top + total.log())[..., 0, :]]


def workspace(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    """One tile, made once and written again; keys scaled and copied; lse in place of a maximum and a sum."""
    s, d = q.shape[-2:]
    k, tile, out = k * d**-0.5, torch.empty(*q.shape[:-1], block), torch.zeros_like(q)
    lse = torch.full(q.shape[:-1], -math.inf)
    for j in range(0, s, block):
        values = v[..., j : j + block, :]
        scores = tile[..., : values.shape[-2]]
        scores.copy_(torch.einsum("bhqd,bhkd->bhqk", q, k[..., j : j + block, :]))
        if causal:
            scores.masked_fill_(torch.arange(j, j + scores.shape[-1]) > torch.arange(s)[:, None], -math.inf)
        new = torch.logaddexp(lse, scores.logsumexp(-1))
        out.mul_((lse - new).exp()[..., None]).add_(scores.sub_(new[..., None]).exp_() @ values)
        lse = new
    return out, lse


@pytest.mark.parametrize("answer", [all_queries_at_once, keys_by_queries, workspace])
@pytest.mark.parametrize("seed", [3, 4])
def test_other_tiles_are_right_too(answer: Any, seed: int) -> None:
    exercise = exercises(4)["4.4"]
    assert rate(exercise, collect(exercise, answer, seed), seed) == (5, (), "")


def tiles_of_queries(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    """No online softmax: all keys at once, for a block of queries."""
    out, lse = [], []
    for i in range(0, q.size(-2), block):
        scores = q[..., i : i + block, :] @ k.mT / q.size(-1) ** 0.5
        if causal:
            hidden = torch.arange(k.size(-2)) > torch.arange(i, i + scores.size(-2))[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        out.append(scores.softmax(-1) @ v)
        lse.append(scores.logsumexp(-1))
    return torch.cat(out, -2), torch.cat(lse, -1)


def query_by_query(q: Tensor, k: Tensor, v: Tensor, block: int, causal: bool = False) -> Any:
    out, lse = torch.empty_like(q), torch.empty_like(q[..., 0])
    for i in range(q.size(-2)):
        seen = i + 1 if causal else q.size(-2)
        scores = k[..., :seen, :] @ q[..., i, :, None] / q.size(-1) ** 0.5
        out[..., i, :] = (scores.softmax(-2).mT @ v[..., :seen, :])[..., 0, :]
        lse[..., i] = scores.logsumexp(-2)[..., 0]
    return out, lse


@pytest.mark.parametrize("answer", [tiles_of_queries, query_by_query])
@pytest.mark.parametrize("seed", [0, 3])
def test_tiles_of_queries_alone_are_no_tiles_of_keys(answer: Any, seed: int) -> None:
    exercise = exercises(4)["4.4"]
    got = rate(exercise, collect(exercise, answer, seed), seed)
    assert got.points == 3 and "Take `block` keys at a time" in got.messages[0]


@pytest.mark.parametrize("seed", [0])
def test_the_plain_way_exceeds_the_bound_at_every_length(seed: int) -> None:
    for case in wide._long(seed):
        assert wide._peak(eager, case, seed)["peak"] > 1.5 * wide.tiles_bound(case)
        assert wide._peak(all_queries_at_once, case, seed)["peak"] < 0.95 * wide.tiles_bound(case)


class LinearPart(nn.Module):
    """Two nn.Linear layers, the second one's bias on rank 0 alone."""

    def __init__(self, up: nn.Linear, down: nn.Linear, comm: wide.Comm) -> None:
        super().__init__()
        part = up.out_features // comm.world_size
        mine = slice(comm.rank * part, (comm.rank + 1) * part)
        self.up, self.down = (
            nn.Linear(up.in_features, part),
            nn.Linear(part, down.out_features, comm.rank == 0),
        )
        with torch.no_grad():
            self.up.weight.copy_(up.weight[mine])
            self.up.bias.copy_(up.bias[mine])
            self.down.weight.copy_(down.weight[:, mine])
            if comm.rank == 0:
                self.down.bias.copy_(down.bias)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.sum(self.down(F.gelu(self.up(self.comm.copy(x)))))


class ByTensor:
    """Each tensor in N pieces, each padded."""

    def __init__(self, parameters: Any, make: Any, comm: wide.Comm) -> None:
        self.parameters, self.comm = list(parameters), comm
        self.pieces = [
            self.padded(p.detach()).chunk(comm.world_size)[comm.rank].clone() for p in self.parameters
        ]
        self.optimizer = make(self.pieces)

    def padded(self, t: Tensor) -> Tensor:
        return F.pad(t.flatten(), (0, -t.numel() % self.comm.world_size))

    @torch.no_grad()
    def step(self) -> None:
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            piece.grad = self.comm.reduce_scatter(self.padded(p.grad)) / self.comm.world_size
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            p.copy_(self.comm.all_gather(piece)[: p.numel()].view_as(p))


@pytest.mark.parametrize("seed", [0, 4])
def test_other_ways_to_split_are_right_too(seed: int) -> None:
    split, zero = exercises(4)["4.5"], exercises(4)["4.6"]
    assert rate(split, collect(split, LinearPart, seed), seed) == (4, (), "")
    assert rate(zero, collect(zero, (wide.zero_expected, ByTensor), seed), seed) == (5, (), "")


def test_a_dict_may_hold_more_than_is_asked_for() -> None:
    def linear(*case: int) -> Any:
        right = wide.linear_expected(*case)
        return {**right, "total": sum(right.values())}

    def zero(*case: Any) -> Any:
        right = wide.zero_expected(*case)
        return {**right, "total": sum(right.values())}

    assert rate(exercises(4)["4.2"], collect(exercises(4)["4.2"], linear, 3), 3).points == 2
    assert rate(exercises(4)["4.6"], collect(exercises(4)["4.6"], (zero, ByTensor), 3), 3).points == 5


class Copied(LinearPart):
    def __init__(self, up: nn.Linear, down: nn.Linear, comm: wide.Comm) -> None:
        super().__init__(up, down, comm)
        self.whole = {"down": [copy.deepcopy(down)]}


class Kept(LinearPart):
    def __init__(self, up: nn.Linear, down: nn.Linear, comm: wide.Comm) -> None:
        super().__init__(up, down, comm)
        object.__setattr__(self, "whole", up)


class Closed(LinearPart):
    def __init__(self, up: nn.Linear, down: nn.Linear, comm: wide.Comm) -> None:
        super().__init__(up, down, comm)
        self.again = lambda: up


@pytest.mark.parametrize("answer", [Copied, Kept, Closed])
def test_whole_layers_are_held_wherever_they_are(answer: Any) -> None:
    got = rate(exercises(4)["4.5"], collect(exercises(4)["4.5"], answer, 3), 3)
    assert got.points == 3 and any("a rank holds" in line for line in got.messages)


class Unsplit(nn.Module):
    def __init__(self, up: nn.Linear, down: nn.Linear, comm: wide.Comm) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def test_everything_on_every_rank_earns_the_output_alone() -> None:
    got = rate(exercises(4)["4.5"], collect(exercises(4)["4.5"], Unsplit, 0))
    assert got.points == 1
    assert any("the whole layers are among its parameters" in line for line in got.messages)
    assert any("the ranks send nothing" in line for line in got.messages)


def test_one_of_two_answers_written() -> None:
    def unwritten(*_: Any) -> Any:
        raise NotImplementedError("exercise 4.6")

    exercise = exercises(4)["4.6"]
    assert rate(exercise, collect(exercise, (wide.zero_expected, unwritten), 0)).points == 2
    assert rate(exercise, collect(exercise, (unwritten, ByTensor), 0)).points == 3
    got = rate(exercise, collect(exercise, (unwritten, unwritten), 0))
    assert got.points == 0 and "not written yet" in got.messages[0]


# -- the explorer ----------------------------------------------------------------------------------------


def test_the_explorer_counts_as_zero_does() -> None:
    explorer = widgets.zero_stages("llama2-70b", "A100-80GB", ranks=16)
    assert "stage 3 leaves room" in explorer.twin.finding
    count = model("llama2-70b").parameter_count
    for stage, row in enumerate(explorer.twin.rows):
        assert row[4] == f"{sum(sharding.states(count, 16, stage).values()) / GIB:,.2f} GiB"
    changed = explorer.show({**explorer.start, "ranks": 8}, explorer.start)
    assert "no stage's states fit" in changed.finding and "→" in changed.note
    with pytest.raises(ValueError, match="at least one rank"):
        widgets.zero_stages(ranks=0)


# -- the ranks ------------------------------------------------------------------------------------------


def test_collectives_are_the_mathematical_ones() -> None:
    def work(comm: wide.Comm) -> Any:
        t = torch.arange(6.0) * (comm.rank + 1)
        x = torch.full((2, 1), float(comm.rank), requires_grad=True)
        comm.join(comm.copy(x)).sum().backward()
        return comm.all_reduce(t), comm.reduce_scatter(t), comm.all_gather(t[:1]), x.grad, dict(comm.sent)

    ranks = wide.run_ranks(work, 3)
    for rank, (summed, part, joined, gradient, sent) in enumerate(ranks):
        assert torch.equal(summed, torch.arange(6.0) * 6)
        assert torch.equal(part, summed[2 * rank : 2 * rank + 2])
        assert torch.equal(joined, torch.zeros(3))
        assert torch.equal(gradient, torch.full((2, 1), 3.0))  # its slice of ones, summed by copy
        # bytes of the whole tensor x (N-1)/N, twice for an all_reduce: of t (24 B) and of a gradient (8 B)
        assert sent == {"all_gather": 24 * 2 // 3 + 12 * 2 // 3, "all_reduce": 32 + 10, "reduce_scatter": 16}


def test_a_rank_that_fails_is_told_of_and_no_one_waits_for_ever() -> None:
    def fails(comm: wide.Comm) -> Any:
        if comm.rank:
            raise ValueError("rank one is wrong")
        return comm.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank one is wrong"):
        wide.run_ranks(fails, 2)
    with pytest.raises(RuntimeError, match="must call the same collectives"):
        wide.run_ranks(lambda comm: comm.rank or comm.all_reduce(torch.ones(1)), 2, wait=0.2)
    with pytest.raises(RuntimeError, match="different calls"):
        wide.run_ranks(lambda comm: comm.all_reduce(torch.ones(1 + comm.rank)), 2)
    with pytest.raises(ValueError, match="pad them"):
        wide.run_ranks(lambda comm: comm.reduce_scatter(torch.ones(5)), 2)
