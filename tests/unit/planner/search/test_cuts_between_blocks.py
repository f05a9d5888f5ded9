"""Stages begin and end with repeated blocks, where a step takes at most two percent longer for it."""

from __future__ import annotations

import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import CutsBetweenBlocks
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.costs.coarsening import between_blocks
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.report.wording import sentence

COUNT = 16


def model(blocks: int) -> tuple[ModelGraph, Profile]:
    """Blocks of a short and a long unit, and a head: the even cut is behind a short unit."""
    graph, profile = chain([*(0.1, 0.9) * blocks, 0.18], value_bytes=8, weight_bytes=4, batch_size=1)
    names = [*(f"layers.{n}.{part}" for n in range(blocks) for part in ("norm", "mlp")), "head"]
    units = zip(graph.units, names, strict=True)
    renamed = tuple(unit.model_copy(update={"name": name}) for unit, name in units)
    costs = zip(profile.units, names, strict=True)
    return (
        graph.model_copy(update={"units": renamed}),
        profile.model_copy(update={"units": tuple(c.model_copy(update={"name": n}) for c, n in costs)}),
    )


def cluster() -> Cluster:
    found = make_cluster("2xcpu", "cpu", 1, 2, 10**9)
    return found.model_copy(update={"inner": found.inner.model_copy(update={"latency_s": 0.0})})


def planned(blocks: int) -> tuple[ModelGraph, Plan]:
    request = PlanRequest(batch_size=COUNT, microbatches=COUNT, schedule="1f1b", exact=True)
    graph, profile = model(blocks)
    return graph, search(request, {COUNT: (graph, profile)}, cluster())


def test_a_cut_that_costs_less_than_two_percent_is_between_blocks_and_that_is_said() -> None:
    graph, plan = planned(20)
    assert plan.bounds(graph) == (0, 20, 41)
    (said,) = findings(plan, CutsBetweenBlocks)
    assert plan.expected is not None
    assert said.step_s == plan.expected.step_s
    assert 1 < said.step_s / said.fastest_step_s < 1.02
    assert sentence(said) == "stages are cut between blocks; cuts inside of them would save 0.7 % of a step"
    assert plan.expected.gap is not None
    assert plan.expected.gap >= said.step_s / said.fastest_step_s - 1 - 1e-4, "the gap has what was given up"


def test_split_backwards_cost_as_much_for_whole_blocks_as_for_their_units() -> None:
    graph, profile = model(20)
    request = PlanRequest(batch_size=COUNT, microbatches=COUNT, schedule="zero-bubble", exact=True)
    plan = search(request, {COUNT: (graph, profile)}, cluster())
    again = price(plan, graph, profile, cluster())
    assert plan.expected is not None
    assert again.expected is not None
    assert plan.expected.step_s == pytest.approx(again.expected.step_s)


def test_a_cut_that_costs_more_is_inside_of_a_block() -> None:
    graph, plan = planned(4)
    assert plan.bounds(graph) == (0, 5, 9)
    assert not findings(plan, CutsBetweenBlocks)


@pytest.mark.parametrize(
    ("names", "cuts"),
    [
        (("embed", "layers.0.a", "layers.0.b:add", "layers.1.a", "norm", "head"), (0, 1, 3, 4, 5, 6)),
        (("0", "1", "2#1", "10"), (0, 1, 2, 3, 4)),
        (("h.1.mlp.0", "h.1.mlp.2", "h.10.mlp.0", "conv1.x"), (0, 2, 3, 4)),
    ],
)
def test_blocks_by_the_names_of_units(names: tuple[str, ...], cuts: tuple[int, ...]) -> None:
    graph, _ = chain([1.0] * len(names))
    units = tuple(u.model_copy(update={"name": name}) for u, name in zip(graph.units, names, strict=True))
    assert between_blocks(graph.model_copy(update={"units": units})) == cuts
