"""The fitting game: a model, a card's bytes and a target loss; find the recipe that takes the least time.

    from memlab.game import play
    print(play(2, Recipe(precision="bf16-master", optimizer="adamw-8bit", checkpointing="full")))

A move is a `Recipe`. Its bytes are measured: one card's step is traced by the card's rules. Its loss is that
of a small twin of the model, trained for real on the CPU with the recipe's precision and optimizer: who saves
bytes with SGD or with weights that swallow their updates doesn't reach the target. Its time is counted:
arithmetic with what is recomputed, bytes over the links (`exercises.combined.step_seconds`).

Score: 1000 x the time that the arithmetic alone would take / the time counted. The best moves are kept in
`leaderboard.json` in MEMLAB_HOME (default ~/.memlab).
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from memlab import hardware, units
from memlab.exercises.combined import CONTEXT, step_seconds, traced_peak, transformer
from memlab.files import write_whole
from memlab.recipe import Recipe
from memlab.units import format_bytes

__all__ = ["LEVELS", "Level", "Move", "leaderboard", "play"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """What is asked: `batch` texts of `sequence` tokens in one optimizer step, on all cards together."""

    number: int
    model: str
    gpu: str
    cards: int
    batch: int
    sequence: int
    target: float

    @property
    def budget(self) -> int:
        """Bytes of tensors that each card has: its memory without 2 GB for the CUDA context."""
        return hardware.gpu(self.gpu).memory_bytes - CONTEXT

    def __str__(self) -> str:
        cards = f"{self.cards} x {self.gpu}" if self.cards > 1 else self.gpu
        return (
            f"level {self.number}: {self.model} on {cards}, {self.batch} x {self.sequence} tokens a step,"
            f" {format_bytes(self.budget)} a card, the twin's loss at most {self.target:.2f}"
        )


LEVELS = (
    Level(number=1, model="gpt2-medium", gpu="T4", cards=1, batch=32, sequence=1024, target=0.60),
    Level(number=2, model="gpt2-xl", gpu="RTX-3090", cards=1, batch=32, sequence=1024, target=0.75),
    Level(number=3, model="llama2-7b", gpu="A100-80GB", cards=1, batch=64, sequence=4096, target=0.60),
    Level(number=4, model="llama2-70b", gpu="A100-80GB", cards=8, batch=1024, sequence=4096, target=0.75),
)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A recipe tried at a level, and what came out."""

    level: Level
    recipe: Recipe
    peak_bytes: int
    loss: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.level.budget

    @property
    def learns(self) -> bool:
        return self.loss <= self.level.target

    @property
    def score(self) -> int:
        """0 for a move that doesn't fit or doesn't learn; else up to 1000."""
        if not (self.fits and self.learns):
            return 0
        return round(1000 * _useful(self.level, self.recipe) / self.seconds)

    def __str__(self) -> str:
        room = self.level.budget - self.peak_bytes
        bytes_say = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
        loss_say = "reached" if self.learns else f"not reached: {self.level.target:.2f} is asked"
        useful = units_seconds(_useful(self.level, self.recipe))
        lines = [
            str(self.level),
            *self.recipe.describe().splitlines(),
            f"bytes  {format_bytes(self.peak_bytes)} at the peak of a card, traced: {bytes_say}",
            f"loss   {self.loss:.3f}: {loss_say}",
            f"time   {units_seconds(self.seconds)} a step; forward and backward in 16 bit take {useful}",
            f"score  {self.score}",
        ]
        return "\n".join(lines)


def units_seconds(value: float) -> str:
    """'4.21 s', '35 min'."""
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def play(level: int, recipe: Recipe, player: str = "you") -> Move:
    """Try a recipe at a level, 1 to 4; a move that fits and learns goes to the leaderboard.

    The recipe must train the level's batch: micro_batch x accumulation x cards. Raises ValueError, one line,
    for a level that doesn't exist, another batch or sequence, or arithmetic that the card hasn't got.
    A trace takes seconds (level 4: half a minute).
    """
    asked = _level(level)
    model, card = transformer(asked.model), hardware.gpu(asked.gpu)
    recipe = recipe.resolve(model)
    _allowed(asked, recipe)
    move = Move(
        level=asked,
        recipe=recipe,
        peak_bytes=traced_peak(model, recipe, card),
        loss=twin_loss(recipe.precision, recipe.optimizer),
        seconds=step_seconds(model, recipe, card),
    )
    if move.score:
        _remember(move, player)
    return move


def _level(number: int) -> Level:
    for level in LEVELS:
        if level.number == number:
            return level
    raise units.unknown_name("level", str(number), [str(level.number) for level in LEVELS])


def _allowed(level: Level, recipe: Recipe) -> None:
    """Raises ValueError for a move that isn't one of this level."""
    texts = recipe.micro_batch * recipe.accumulation * recipe.world_size
    card = hardware.gpu(level.gpu)
    if recipe.tensor_parallel > 1:
        raise ValueError("the game's clock knows no tensor parallel: set tensor_parallel=1")
    if recipe.world_size != level.cards:
        raise ValueError(f"level {level.number} has {level.cards} cards: set world_size={level.cards}")
    if recipe.sequence != level.sequence:
        raise ValueError(
            f"texts of level {level.number} have {level.sequence} tokens: set sequence={level.sequence}"
        )
    if texts != level.batch:
        raise ValueError(
            f"cards x micro_batch x accumulation is {texts}, a step of level {level.number} has"
            f" {level.batch} texts"
        )
    if recipe.compute_dtype not in card.flops:
        raise ValueError(f"{card.name} has no {recipe.compute_dtype} arithmetic: use {', '.join(card.flops)}")


def _useful(level: Level, recipe: Recipe) -> float:
    """Seconds of forward and backward alone, in 16 bit: what can't be saved."""
    card, tokens = hardware.gpu(level.gpu), level.batch // level.cards * level.sequence
    plain = Recipe(precision="amp-fp16" if "bf16" not in card.flops else "bf16", sequence=tokens)
    return step_seconds(transformer(level.model), plain, card)


@cache
def twin_loss(precision: str, optimizer: str, steps: int = 60) -> float:
    """The loss of a LLaMA of 2 x 64 after 60 steps on the same 4 texts, trained on the CPU."""
    import torch

    from memlab.step import workload

    twin = replace(
        transformer("llama2-7b"), name="twin", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128,
        vocab=64, context=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        work = workload(twin, Recipe(precision=precision, optimizer=optimizer, micro_batch=4, sequence=32))
        for optimizer_ in (work.optimizer, getattr(work.optimizer, "inner", work.optimizer)):
            for group in optimizer_.param_groups:
                group["lr"] = 1e-3
        for _ in range(steps):
            loss = work.step()
    return float(loss)


# -- the leaderboard ---------------------------------------------------------------------------------------


def _file() -> Path:
    return Path(os.environ.get("MEMLAB_HOME", Path.home() / ".memlab")) / "leaderboard.json"


def _read() -> tuple[list[dict[str, Any]], str]:
    """The rows of the file, and what is wrong with it ('' if nothing is)."""
    try:
        data = json.loads(_file().read_text("utf-8"))
    except FileNotFoundError:
        return [], ""
    except (OSError, ValueError) as error:
        return [], f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not isinstance(data, list) or not all(map(_is_row, data)):
        return [], "it isn't a list of moves"
    return data, ""


def _is_row(row: Any) -> bool:
    kinds = {"level": int, "player": str, "score": int, "peak_bytes": int, "loss": float, "recipe": dict}
    return isinstance(row, dict) and all(type(row.get(key)) is kind for key, kind in kinds.items())


def _remember(move: Move, player: str) -> None:
    """Adds a move, atomically; never while being graded. A damaged file is set aside, not overwritten."""
    if os.environ.get("MEMLAB_GRADING"):
        return
    rows, fault = _read()
    path = _file()
    if fault:
        aside = path.with_suffix(".damaged.json")
        with contextlib.suppress(OSError):
            path.replace(aside)
        print(f"note: {path} can't be read ({fault}); it is kept as {aside.name}, a new leaderboard begins")
    row = {
        "level": move.level.number, "player": str(player)[:40], "score": move.score,
        "peak_bytes": move.peak_bytes, "loss": move.loss, "recipe": move.recipe.to_dict(),
    }  # fmt: skip
    if row in rows:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([*rows, row], indent=1))
    except OSError as error:
        print(f"note: the move counts, but {path} can't be written ({error.strerror})")


def leaderboard(level: int | None = None) -> str:
    """The best moves of a level (all levels: None) as a table: higher score first, then fewer bytes."""
    rows, fault = _read()
    if fault:
        return (
            f"{_file()} can't be read ({fault}). Mend it or delete it; the next move sets it aside and"
            " begins a new one"
        )
    numbers = [_level(level).number] if level is not None else [each.number for each in LEVELS]
    lines = []
    for number in numbers:
        best = sorted((r for r in rows if r["level"] == number), key=lambda r: (-r["score"], r["peak_bytes"]))
        lines.append(str(_level(number)))
        lines += [
            f"  {place}. {row['score']:>4}  {format_bytes(row['peak_bytes']):>10}  loss {row['loss']:.3f}  "
            f"{row['player']}"
            for place, row in enumerate(best[:5], 1)
        ] or ["  nobody yet"]
    return "\n".join(lines)
