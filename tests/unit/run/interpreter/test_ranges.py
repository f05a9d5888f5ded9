"""A trace of torch.profiler has each action of the schedule as a range, and the kernels within it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import outsize
from outsize.device import profiler
from outsize.ir.schedule import Action, Kind
from outsize.run.interpreter.ranges import WORDS, range_name
from outsize.train.engine.engine import Engine

ACTION = re.compile(
    r"^([0-9]+[A-Z_]+[0-9]*(?:@[0-9]+)?): ([a-z ]+), stage ([0-9]+)(?:, microbatch ([0-9]+))?$"
)

LAYERS = 4


def engine_of(**how: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    x = torch.randn(8, 8)
    how = {"microbatches": 2, "optimizer": torch.optim.SGD, "loss_fn": nn.functional.mse_loss, **how}
    return outsize.parallelize(model, (x,), target=x, cluster="2xcpu", **how)


def traced(engine: Engine, path: Path) -> list[dict[str, Any]]:
    """The events with a duration of one step's trace, after a step that nobody looks at."""
    x = torch.randn(8, 8)
    engine.step(x, target=x)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        engine.step(x, target=x)
    trace.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_each_action_is_one_range(schedule: Any, tmp_path: Path) -> None:
    engine = engine_of(stages=2, schedule=schedule)
    events = traced(engine, tmp_path / "trace.json")
    ranges = Counter(e["name"] for e in events if e["cat"] == "user_annotation")
    rows = [s.action for s in engine.timeline().spans if s.lane != "wait"]
    wanted = Counter(range_name(Action.parse(text)) for text in rows)
    assert {WORDS[Action.parse(text).kind] for text in rows} >= {"forward", "send activations"}
    assert ("weight gradients" in " ".join(ranges)) is (schedule == "zero-bubble")
    matched = {name: n for name, n in ranges.items() if ACTION.match(name) and ": wait" not in name}
    assert matched == wanted
    assert ranges["1F0: wait, stage 1, microbatch 0"] == 1
    assert ranges["outsize.step 1"] == 1


def test_kernels_are_within_the_ranges_of_their_actions(tmp_path: Path) -> None:
    events = traced(engine_of(stages=2, schedule="1f1b"), tmp_path / "trace.json")

    def layers(name: str) -> int:
        (action,) = (e for e in events if e["name"] == name)
        begin, end = action["ts"], action["ts"] + action["dur"]
        inside = [e["name"] for e in events if e["tid"] == action["tid"] and begin <= e["ts"] < end]
        return inside.count("aten::linear")

    each = [layers(f"{stage}F1: forward, stage {stage}, microbatch 1") for stage in (0, 1)]
    assert all(each)
    assert sum(each) == LAYERS


def test_weights_on_the_host_have_ranges(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    how: Any = {"loss_fn": nn.functional.mse_loss, "target": x}
    plan = outsize.plan(model, (x,), cluster="1xh200", weights="host", microbatches=2, **how)
    engine = outsize.parallelize(model, (x,), plan=plan, devices=["cpu"], optimizer=torch.optim.SGD, **how)
    names = {e["name"] for e in traced(engine, tmp_path / "trace.json")}
    assert "0LOAD: load weights, stage 0" in names


def test_every_kind_of_action_has_a_word() -> None:
    assert set(WORDS) == set(Kind)


def test_nothing_is_recorded_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def recorded(name: str) -> Any:
        made.append(name)
        return profiler._NO_RANGE

    monkeypatch.setattr(profiler, "record_function", recorded)
    engine, x = engine_of(stages=2), torch.randn(8, 8)
    engine.step(x, target=x)
    assert not made
    with profile(activities=[ProfilerActivity.CPU]):
        engine.step(x, target=x)
    assert "outsize.step 1" in made
    assert "0F0: forward, stage 0, microbatch 0" in made
