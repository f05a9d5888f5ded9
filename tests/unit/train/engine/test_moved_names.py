"""Names that engines had go on working, say what they are called now, and stand on no page any more."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.errors.names import ENGINE, MOVED
from outsize.train.engine.engine import Engine, MovedName
from outsize.train.engine.state import EngineState
from outsize.train.engine.weights import EngineWeights

ROOT = Path(__file__).resolve().parents[4]
PLACES = {"state": EngineState, "weights": EngineWeights}
OLD = re.compile(rf"\bengine\.({'|'.join(MOVED)})\b")


@pytest.fixture(scope="module")
def engine() -> Engine:
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    how: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "stages": 1, "microbatches": 2}
    return outsize.parallelize(nn.Sequential(nn.Linear(4, 2)), (x,), target=y, **how)


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_is_what_it_is_now(engine: Engine, name: str) -> None:
    place, now = MOVED[name].split(".")
    assert callable(getattr(PLACES[place], now)) or isinstance(vars(PLACES[place])[now], property)
    with pytest.warns(MovedName, match=rf"engine.{name} has moved. Next: engine.{place}.{now}$") as said:
        found = getattr(engine, name)
    assert found == getattr(getattr(engine, place), now)
    assert [Path(one.filename).name for one in said] == [Path(__file__).name], "the line that names it"


def test_what_is_set_is_set_where_it_is_now(engine: Engine) -> None:
    told: list[Any] = []
    with pytest.warns(MovedName, match=r"Next: engine.state.on_saving$"):
        engine.on_saving = told.append
    assert engine.state.on_saving == told.append


def test_names_of_today_say_nothing(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for place, kind in PLACES.items():
            for name in (name for name in vars(kind) if not name.startswith("_")):
                getattr(getattr(engine, place), name)
        engine.steps = 3
        assert (engine.steps, engine.state.steps, engine.clip_norm, engine.rank) == (3, 3, None, 0)


def test_no_name_has_moved_and_is_of_others() -> None:
    assert not MOVED.keys() & ENGINE.keys()
    assert not [name for name in MOVED if hasattr(Engine, name)]


def test_pages_and_examples_say_the_names_of_today() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    pages += [path for path in (ROOT / "src").rglob("*.py") if path.name != "names.py"]
    assert [f"{path.name} {found}" for path in pages for found in OLD.findall(path.read_text())] == []
    assert OLD.findall("engine.load_weights(FOLDER); engine.state.resume('run')") == ["load_weights"]
