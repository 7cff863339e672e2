"""The fitting game: what a move measures, which moves are refused, and the file that keeps the best."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlab import game
from memlab.footprint import footprint
from memlab.game import LEVELS, Move, leaderboard, play, twin_loss
from memlab.recipe import Recipe
from memlab.units import GB


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMLAB_HOME", str(tmp_path))
    monkeypatch.delenv("MEMLAB_GRADING", raising=False)
    return tmp_path


def move(**changes: object) -> Move:
    fields = {"level": LEVELS[1], "recipe": Recipe(micro_batch=1, accumulation=32, sequence=1024),
              "peak_bytes": 20 * GB, "loss": 0.7, "seconds": 9.0}  # fmt: skip
    return Move(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_move_of_level_1_is_traced_trained_and_kept(home: Path) -> None:
    recipe = Recipe(
        precision="amp-fp16", micro_batch=1, accumulation=32, optimizer_impl="fused", sequence=1024
    )
    done = play(1, recipe, "Ada")
    assert done.fits and done.learns and 900 < done.score <= 1000
    assert 5 * GB < done.peak_bytes < 10 * GB
    assert "Ada" in leaderboard(1) and str(done.score) in str(done)


@pytest.mark.parametrize(
    ("level", "fields", "words"),
    [
        (1, {"precision": "amp-bf16"}, "T4 has no bf16 arithmetic"),
        (1, {"precision": "fp32", "accumulation": 16}, "a step of level 1 has 32 texts"),
        (1, {"precision": "fp32", "sequence": 512}, "have 1024 tokens"),
        (4, {"precision": "bf16"}, "set world_size=8"),
        (4, {"precision": "bf16", "world_size": 8, "tensor_parallel": 8}, "no tensor parallel"),
        (9, {}, "unknown level"),
    ],
)
def test_what_isnt_a_move_is_refused_in_one_line(level: int, fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        play(level, Recipe(**{"micro_batch": 1, "accumulation": 32, "sequence": 1024, **fields}))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_the_twin_tells_recipes_apart() -> None:
    exact = twin_loss("fp32", "adamw")
    assert exact < 0.60 and twin_loss("bf16-master", "adamw") < 0.60
    assert twin_loss("bf16-master", "adamw-8bit") < 0.60
    for optimizer in ("adamw", "adamw-8bit"):  # some updates are smaller than half a step of the weights
        assert 0.60 < twin_loss("bf16", optimizer) < 0.75
    assert twin_loss("bf16", "sgd") > 3


def test_a_move_that_doesnt_fit_or_learn_scores_nothing() -> None:
    assert move().score > 0
    assert move(peak_bytes=25 * GB).score == 0 and "too much" in str(move(peak_bytes=25 * GB))
    assert move(loss=0.8).score == 0 and "not reached" in str(move(loss=0.8))
    slower = move(seconds=18.0)
    assert slower.score == round(move().score / 2)


def test_the_best_come_first_then_the_smaller(home: Path) -> None:
    for name, fields in (("slow", {"seconds": 18.0}), ("large", {}), ("small", {"peak_bytes": 19 * GB})):
        game._remember(move(**fields), name)
    lines = leaderboard(2).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["small", "large", "slow"]
    assert "nobody yet" in leaderboard(3)
    assert list(home.iterdir()) == [home / "leaderboard.json"]  # no half-written file stays


@pytest.mark.parametrize("text", ["[{", "{}", '[{"level": 1}]', "\x00"])
def test_a_damaged_file_is_explained_and_set_aside(
    text: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "leaderboard.json").write_text(text)
    assert "can't be read" in leaderboard() and "\n" not in leaderboard()
    game._remember(move(), "Grace")
    assert "kept as leaderboard.damaged.json" in capsys.readouterr().out
    assert (home / "leaderboard.damaged.json").read_text() == text
    assert "Grace" in leaderboard(2)


def test_a_file_that_cant_be_written_doesnt_cost_the_move(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("MEMLAB_HOME", str(home / "file" / "below"))
    game._remember(move(), "Lin")
    assert "can't be written" in capsys.readouterr().out


def test_nothing_is_written_while_being_graded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMLAB_GRADING", "1")
    game._remember(move(), "x")
    assert not (home / "leaderboard.json").exists()


WINNING = {
    1: {"precision": "amp-fp16", "optimizer_impl": "fused", "micro_batch": 1, "accumulation": 32},
    2: {"precision": "bf16", "optimizer_impl": "fused", "micro_batch": 1, "accumulation": 32},
    3: {"precision": "amp-bf16", "optimizer_impl": "fused", "micro_batch": 1, "accumulation": 64,
        "checkpointing": "full", "offload": ("optimizer_states:cpu",)},
    4: {"precision": "bf16", "optimizer": "adamw-8bit", "micro_batch": 1, "accumulation": 128,
        "checkpointing": "full", "zero_stage": 3, "world_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("number", WINNING)
def test_each_level_can_be_won_and_plain_fp32_does_not_win_it(number: int) -> None:
    level = LEVELS[number - 1]
    recipe = Recipe(**WINNING[number], sequence=level.sequence)  # type: ignore[arg-type]
    game._allowed(level, recipe)
    assert footprint(level.model, recipe, level.gpu).peak_bytes < 0.95 * level.budget
    assert twin_loss(recipe.precision, recipe.optimizer) <= level.target
    plain = Recipe(precision="fp32", micro_batch=level.batch // level.cards, sequence=level.sequence)
    assert footprint(level.model, plain, level.gpu).peak_bytes > level.budget
