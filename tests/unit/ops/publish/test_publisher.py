"""A run publishes its state about once a second, on the steps that all ranks agree on."""

from __future__ import annotations

import math
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.files.run_folders import STATE
from outsize.ir.answers.run_state import RunState, SlowRank, runs_on_machine
from outsize.ops.publish.publisher import Publisher
from outsize.run.progress import Straggler
from outsize.train.context.callback import EvaluationFacts, StartFacts, StepFacts
from outsize.train.engine.callbacks import _Clock
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.variables import PUBLISHED
from outsize.train.world.world import World, leave

X, Y = torch.ones(8, 4), torch.arange(8) % 3


def engine_of(**options: Any) -> outsize.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options = {"loss_fn": F.cross_entropy, "microbatches": 4, "optimizer": torch.optim.AdamW, **options}
    return outsize.parallelize(model, (X,), target=Y, stages=2, **options)


def start_of(engine: outsize.Engine, variables: dict[str, str]) -> StartFacts:
    return StartFacts(engine.plan, World(0, 1, 0, None, variables=variables), engine.crew.progress)


def state_in(folder: Path) -> RunState:
    return RunState.read(folder / STATE)


def test_the_state_is_that_of_the_run(tmp_path: Path) -> None:
    engine = engine_of()
    folder = tmp_path / "1-0.0"
    folder.mkdir()
    publisher = Publisher(total_steps=10)
    publisher.on_start(start_of(engine, {PUBLISHED: str(folder)}))
    publisher.on_evaluate(EvaluationFacts(4, 0.25))
    straggler = Straggler(1, (1,), "compute", 2.0, 1.0, 3)
    publisher.on_step(StepFacts(4, math.nan, step_s=0.5, memory_bytes=(7,), stragglers=(straggler,)))
    state = state_in(folder)
    assert (state.step, state.total_steps, state.left_s) == (4, 10, 3.0)
    assert (state.loss, state.evaluation_loss) == (None, 0.25)
    assert state.samples_per_s == 16.0
    assert state.slow_ranks == (SlowRank(rank=1, cause="compute", own=2.0, others=1.0, step=3),)
    (device,) = state.devices
    expected = engine.plan.expected
    assert expected is not None
    assert device.memory_bytes == 7
    assert device.planned_bytes == sum(row.p50_bytes for row in expected.stages)
    assert sum(device.planned_by_cause) == sum(row.peak_bytes for row in expected.stages)


def test_a_run_goes_on_without_its_folder(tmp_path: Path) -> None:
    engine = engine_of()
    folder = tmp_path / "1-0.0"
    folder.mkdir()
    publisher = Publisher()
    publisher.on_start(start_of(engine, {PUBLISHED: str(folder)}))
    shutil.rmtree(folder)
    publisher.on_step(StepFacts(1, 0.5, step_s=0.1))


@pytest.mark.parametrize(("variables", "is_told"), [({}, False), ({PUBLISHED: ""}, True)])
def test_steps_are_gathered_on_all_ranks_or_on_none(variables: dict[str, str], is_told: bool) -> None:
    """Also where the launcher could make no folder: another machine of the run may have one."""
    engine = engine_of()
    publisher = Publisher()
    publisher.on_start(start_of(engine, variables))
    assert bool(publisher.every) is is_told


def test_a_process_of_its_own_is_published_where_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = engine_of(callbacks=[outsize.Watch(publish=True, total_steps=3)])
    engine.step(X, target=Y)
    (run,) = runs_on_machine()
    assert run.state is not None
    assert (run.state.step, run.state.total_steps, run.state.model) == (1, 3, "Sequential")
    assert run.state.devices[0].busy is not None


def test_a_clock_chooses_steps_that_are_a_second_apart_and_cost_a_hundredth() -> None:
    clock, told = _Clock(1.0), []
    for step in range(1, 2001):
        if clock.is_due(step):
            told.append(step)
            clock.told(step, step_s=0.01, telling_s=0.002)
    assert told[:8] == [1, 3, 7, 15, 31, 63, 127, 227]  # doubles, up to a second of steps
    assert {b - a for a, b in pairwise(told[7:])} == {100}
    clock.told(2000, step_s=0.01, telling_s=0.03)  # three seconds lie between tellings that take 30 ms
    assert [clock.is_due(2000 + n) for n in (199, 200)] == [False, True]
    clock.told(2200, step_s=0.01, telling_s=0.03)
    assert [clock.is_due(2200 + n) for n in (299, 300)] == [False, True]
    assert clock.is_due(5)  # the run went back to a checkpoint


@final
class Seen(outsize.Callback):
    """Keeps the steps that it is told."""

    every_s = 0.05

    def __init__(self) -> None:
        self.steps: list[StepFacts] = []

    def on_step(self, facts: StepFacts) -> None:
        self.steps.append(facts)


@pytest.mark.dist
def test_ranks_agree_on_the_steps_that_a_clock_chooses(tmp_path: Path) -> None:
    """One of them is slow between steps; else a gather would wait for ever."""

    def work() -> None:
        world, seen = join(), Seen()
        engine = engine_of(callbacks=[seen])
        for _ in range(40):
            engine.step(X, target=Y)
            time.sleep(0.002 * world.rank)
        clock: Any = engine._callbacks._clocks[0][1]
        (tmp_path / str(world.rank)).write_text(f"{clock._next} {len(seen.steps)}")
        leave(world)

    run_in_forks(2, work)
    first, second = ((tmp_path / str(rank)).read_text().split() for rank in range(2))
    assert first[0] == second[0]
    assert 1 < int(first[1]) < 40
    assert second[1] == "0"
