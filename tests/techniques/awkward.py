"""The model on which each technique has to equal the plain step: small, and awkward where real models are.

* the output layer is the token embedding (tied weights);
* one bias is frozen, one parameter is never used (and has 3 elements, which no even world size divides);
* dropout draws random numbers in every block.

    model = make(); for batch in batches(5): loss_of(model, batch).backward()
    assert differences(a, b) == {}     # bitwise equal
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, BLOCKS = 64, 32, 4, 4


class Batch(NamedTuple):
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -100 where there is nothing to predict


class Block(nn.Module):
    """Pre-norm attention and MLP, each with dropout and a residual. (B, T, C) -> (B, T, C)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(b, t, c)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Awkward(nn.Module):
    """Tokens (B, T) -> logits (B, T, V). `run(blocks, x)` may be replaced, to checkpoint for example."""

    def __init__(
        self,
        hidden: int = HIDDEN,
        blocks: int = BLOCKS,
        vocabulary: int = VOCABULARY,
        heads: int = HEADS,
        dropout: float = 0.1,
        run: Callable[[nn.ModuleList, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[0].down.bias.requires_grad_(False)  # frozen
        self.run = run or plain

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.blocks, self.embedding(tokens))))


def plain(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def make(seed: int = 0, **options) -> Awkward:
    """The same weights for the same seed, whatever `run` is."""
    torch.manual_seed(seed)
    return Awkward(**options)


def batches(
    steps: int, batch: int = 4, tokens: int = 8, vocabulary: int = VOCABULARY, seed: int = 1
) -> list[Batch]:
    """`steps` batches of random tokens; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens)
    return [
        Batch(*(torch.randint(vocabulary, shape, generator=generator) for _ in range(2)))
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy over the targets that aren't -100."""
    return F.cross_entropy(model(batch.tokens).float().flatten(0, 1), batch.targets.flatten())


def train(
    model: nn.Module,
    data: list[Batch],
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 2,
) -> list[float]:
    """The plain step on each batch; dropout is drawn from `seed` + the step's number. Returns the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for number, batch in enumerate(data):
        torch.manual_seed(seed + number)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def differences(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> dict[str, float]:
    """Name -> largest absolute difference where it exceeds the tolerance; gradients are 'name.grad'."""
    found = {}
    others = dict(b.named_parameters())
    for name, p in a.named_parameters():
        pairs = {name: (p.detach(), others[name].detach()), f"{name}.grad": (p.grad, others[name].grad)}
        for what, (x, y) in pairs.items():
            if (x is None) != (y is None):
                found[what] = float("inf")
            elif x is not None and y is not None:
                apart = (x.double() - y.double()).abs().max().item()
                if not apart <= tolerance:
                    found[what] = apart
    return found
