"""The demo in tiny: the same path with real processes, and the files it promises."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from outsize.demo import main
from outsize.demo.job import Recipe
from outsize.demo.needs import check_needs
from outsize.errors import ModelNotImportable
from outsize.ir.plan import Plan

pytestmark = pytest.mark.dist
LINES = ("GPT2LMHeadModel: bit-equal", "ResNet: bit-equal", "2 stages bit-equal, 3 stages bit-equal", "goal")
FILES = ("report.html", "timeline.png", "memory.png", "loss.png", "measured.json")


@pytest.mark.slow
def test_quick_shows_everything_and_leaves_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(tmp_path / "out", quick=True) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert [line for line in LINES if line not in shown] == ["goal"]
    assert shown.count("3 stages bit-equal") == 2
    for folder in (tmp_path / "out", tmp_path / "out" / "resnet"):
        assert_complete(folder)


def assert_complete(folder: Path) -> None:
    """Every file of a run, none of them empty; the loss fell."""
    assert [name for name in FILES if not (folder / name).stat().st_size] == []
    assert Plan.load(folder / "plan.json").expected is not None
    assert {event["ph"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"]} >= {
        "X",
        "s",
    }
    with (folder / "losses.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0]


def test_what_is_not_installed_is_named_with_the_command() -> None:
    with pytest.raises(
        ModelNotImportable, match=r"not installed: nowhere_\. Next: pip install 'outsize\[hf\]'"
    ):
        check_needs({"torch": "base", "nowhere_": "hf"})


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    recipe = Recipe(batch_size=1, steps=50, learning_rate=1.0, warmup=5)
    factors = [recipe.factor(step) for step in range(51)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) == factors[5] == pytest.approx(1.0)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[50] == pytest.approx(0.1)
