"""A few hundred damaged notebooks; `make stress` tries twenty thousand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.submissions import fuzz


@pytest.fixture(scope="module")
def marked() -> tuple[Any, Any]:
    return fuzz.base()


def test_the_undamaged_notebook_is_left_as_it_is(marked: tuple[Any, Any]) -> None:
    import json

    notebook, release = marked
    assert fuzz.fault(json.dumps(notebook).encode(), release) == ""


def test_a_doctor_that_loses_code_would_be_found(
    marked: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    notebook, release = marked

    def careless(submitted: Any, original: Any) -> Any:
        fixed, repairs = repair(submitted, original)
        next(c for c in fixed.cells if c.id == "ex-1-2").source += " "
        return fixed, repairs

    repair = fuzz.repair
    monkeypatch.setattr(fuzz, "repair", careless)
    assert fuzz.fault(json.dumps(notebook).encode(), release) == ""  # blanks at the end are nobody's answer

    def lossy(submitted: Any, original: Any) -> Any:
        fixed, repairs = repair(submitted, original)
        next(c for c in fixed.cells if c.id == "ex-1-2").source = "pass"
        return fixed, repairs

    monkeypatch.setattr(fuzz, "repair", lossy)
    assert "changed or lost" in fuzz.fault(json.dumps(notebook).encode(), release)


def test_damaged_notebooks(marked: tuple[Any, Any]) -> None:
    faults, counts = fuzz.campaign(400, seed=random.Random(1).randrange(100))
    assert faults == [] and counts["right"] == 400


@pytest.mark.parametrize("damage", fuzz.DAMAGE, ids=lambda d: d.__name__.strip("_"))
def test_each_kind_of_damage_alone(marked: tuple[Any, Any], damage: Any) -> None:
    import copy
    import json

    notebook, release = marked
    for seed in range(6):
        broken = copy.deepcopy(notebook)
        damage(broken, random.Random(seed))
        data = json.dumps(broken).encode("utf-8", "surrogatepass")
        assert fuzz.fault(data, release) == "", seed
