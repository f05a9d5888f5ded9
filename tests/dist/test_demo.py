"""The demo in tiny: the same path with real processes, and the files it promises."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from outsize.cli.demo import main
from outsize.cli.demo.job import TrainingRecipe
from outsize.cli.demo.show import check_extras
from outsize.errors import ModelNotImportable
from outsize.ir.formatting import seconds_text
from outsize.ir.plan import Plan

pytestmark = pytest.mark.dist
LINES = ("GPT2LMHeadModel: bit-equal", "ResNet: bit-equal", "2 stages bit-equal, 3 stages bit-equal", "goal")
FILES = ("report.html", "timeline.png", "memory.png", "loss.png", "measured.json")


@pytest.mark.slow
@pytest.mark.parametrize("recordings", ["shared", pytest.param("of each engine", marks=pytest.mark.full)])
def test_quick_shows_everything_and_leaves_its_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recordings: str, request: pytest.FixtureRequest
) -> None:
    if recordings == "shared":
        request.getfixturevalue("shared_recordings")
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
    assert_one_prediction(folder)
    with (folder / "losses.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0]


def assert_one_prediction(folder: Path) -> None:
    """The plan, the trace and the report show one predicted step time; the report shows the cuts."""
    expected = Plan.load(folder / "plan.json").expected
    assert expected is not None
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    steps_us = [event["dur"] for event in events if event["name"] == "step" and event["pid"] == 1]
    assert steps_us == pytest.approx([1e6 * expected.step_s] * len(steps_us), abs=0.01)
    report = (folder / "report.html").read_text()
    assert report.count(f"{seconds_text(expected.step_s)} predicted") == 1
    assert f"ranks, {seconds_text(expected.step_s)}, bubble" in report
    assert [h for h in ("The cuts in the network", "Instead") if f">{h}<" not in report] == []


def test_what_is_not_installed_is_named_with_the_command() -> None:
    with pytest.raises(
        ModelNotImportable, match=r"not installed: nowhere_\. Next: pip install 'outsize\[hf\]'"
    ):
        check_extras({"torch": "base", "nowhere_": "hf"})


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    recipe = TrainingRecipe(batch_size=1, steps=50, learning_rate=1.0, warmup=5)
    factors = [recipe.factor(step) for step in range(51)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) == factors[5] == pytest.approx(1.0)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[50] == pytest.approx(0.1)
