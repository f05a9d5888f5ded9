"""What is played of replicas is what runs: the actions of real steps, rank by rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks
from layouts_worker import made
from parity_runs import SEED, Combination, captured, planned
from recorded_once import recorded_once
from zoo import case

from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Axes, Plan
from outsize.ir.timeline import Lane, Timeline
from outsize.planner.costs.roofline import roofline
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.played_step import PlayedStep
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.weights import Weights
from outsize.schedules.refine import by_blocks
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

MICROBATCHES = 4
Row = list[str]


@pytest.fixture(autouse=True)
def _recorded_once() -> Iterator[None]:
    with recorded_once():
        yield


def plan_of(name: str, axes: Axes, weights: Weights) -> Plan:
    """Not yet in blocks, as the planner has it."""
    plan = planned(Combination(name, MICROBATCHES, axes.pp, "1f1b"))
    microbatches = MICROBATCHES // axes.replicas
    return plan.model_copy(update={"axes": axes, "weights": weights, "microbatches": microbatches})


def step_of(name: str, plan: Plan) -> PlayedStep:
    """What the planner plays of it."""
    cluster = parse_cluster(f"{plan.axes.world_size}xcpu")
    graph = captured(name, MICROBATCHES).graph
    tables = Pricing({MICROBATCHES: (graph, roofline(graph, cluster.devices[0]))}, cluster, "sgd")
    layout = Layout(plan.axes, plan.axes.pp, plan.schedule, plan.microbatches, MICROBATCHES, plan.weights)
    pipeline = tables.pipeline(layout, ("none",))
    assert pipeline is not None
    return Candidate.of(pipeline, plan.bounds(graph), [0] * plan.axes.pp).step


def measured(name: str, plan: Plan, group: dist.ProcessGroup) -> Timeline:
    """The second step; a pipeline rank is the first of its two replicas."""
    model, batch = made(name, torch.float32)
    engine = make_engine(model, plan, group, EngineOptions(loss_fn=case(name).loss, seed=SEED))
    for _ in range(2):
        engine.step(*batch.args, target=batch.target or None, **batch.kwargs)
    return engine.timeline()


def actions(timeline: Timeline, rank: int, lanes: tuple[Lane, ...]) -> Row:
    return [span.action for span in timeline.spans if span.rank == rank and span.lane in lanes]


@pytest.mark.parametrize(
    ("name", "pp", "weights"),
    [
        ("gpt2", 1, "sharded"),
        ("llama", 1, "resident"),
        ("unet", 2, "sharded"),
        pytest.param("gpt2", 2, "resident", marks=pytest.mark.full),
        pytest.param("t5", 1, "sharded", marks=pytest.mark.full),
    ],
)
def test_blocks_gather_and_reduce_as_they_are_played(
    tmp_path: Path, name: str, pp: int, weights: Weights
) -> None:
    plan = plan_of(name, Axes(pp=pp, dp_shard=2), weights)
    refined = by_blocks(plan, captured(name, MICROBATCHES).graph)
    found = on_ranks(tmp_path, 2 * pp, lambda group: measured(name, refined, group))
    rows = step_of(name, plan).schedule(plan.microbatches).actions
    for rank, row in enumerate(rows):
        assert actions(found[0], 2 * rank, ("compute", "load")) == [str(action) for action in row]


def test_whole_weights_are_summed_in_the_order_that_is_played(tmp_path: Path) -> None:
    plan = plan_of("gpt2", Axes(pp=2, dp_replicate=2), "resident")
    found = on_ranks(tmp_path, 4, lambda group: measured("gpt2", plan, group))
    predicted = step_of("gpt2", plan).timeline()
    for rank in range(2):
        assert actions(predicted, rank, ("compute",)) == actions(found[0], 2 * rank, ("compute",))
        sums = [action for action, _ in groupby(actions(predicted, rank, ("load",)))]
        assert sums == actions(found[0], 2 * rank, ("load",)) != []
