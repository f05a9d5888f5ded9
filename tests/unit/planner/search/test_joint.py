"""The search against all there is: each cut, schedule, number of microbatches and choice of recompute."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import graphs

from outsize.errors import NoFeasiblePlan, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.policies.activations import Recompute

Model = tuple[ModelGraph, Profile]


def small(devices: int, memory_bytes: int, free: bool = True) -> Cluster:
    """Devices that memory makes small, and links that cost nothing or as they are."""
    cluster = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    link = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e30}) if free else cluster.inner
    return cluster.model_copy(update={"inner": link, "outer": link})


def everything(models: dict[int, Model], cluster: Cluster, ways: tuple[Recompute, ...]) -> Iterator[Plan]:
    """All plans with a stage for each device."""
    p = len(cluster.devices)
    names = tuple(d.name for d in cluster.devices)
    for count, (graph, profile) in models.items():
        cuts = combinations(range(1, len(graph.units)), p - 1)
        for inner, again in product(cuts, product(ways, repeat=p)):
            plain = stages_from_bounds(graph, (0, *inner, len(graph.units)), names)
            stages = tuple(s.model_copy(update={"recompute": a}) for s, a in zip(plain, again, strict=True))
            for schedule in ("1f1b", "gpipe", "naive"):
                plan = Plan(
                    model="toy",
                    fingerprint="f0",
                    cluster=cluster.name,
                    axes=Axes(pp=p),
                    batch_size=4,
                    microbatches=count,
                    schedule=schedule,
                    stages=stages,
                )
                yield price(plan, graph, profile, cluster)


def fits(plan: Plan, cluster: Cluster) -> bool:
    assert plan.expected is not None
    return all(s.peak_bytes <= room_bytes(cluster.devices[0]) for s in plan.expected.stages)


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


questions = given(graphs(max_units=5), st.integers(2, 3), st.integers(100, 900), st.booleans())


@settings(max_examples=9, derandomize=True, deadline=None)
@questions
def test_nothing_beats_the_plan_by_more_than_its_gap(
    model: Model, devices: int, memory_bytes: int, free: bool
) -> None:
    insist_on_the_best(model, devices, memory_bytes, free)


@pytest.mark.full
@settings(max_examples=60, derandomize=True, deadline=None)
@questions
def test_nothing_beats_more_plans_by_more_than_their_gaps(
    model: Model, devices: int, memory_bytes: int, free: bool
) -> None:
    insist_on_the_best(model, devices, memory_bytes, free)


def insist_on_the_best(model: Model, devices: int, memory_bytes: int, free: bool) -> None:
    models, cluster = {2: model, 4: model}, small(devices, memory_bytes, free)
    ways: tuple[Recompute, ...] = ("none", "full")
    fitting = [plan for plan in everything(models, cluster, ways) if fits(plan, cluster)]
    try:
        found = search(PlanRequest(exact=True, batch_size=4), models, cluster)
    except (NoFeasiblePlan, TooManyStages):
        assert not fitting
        return
    assert found.expected is not None
    assert found.expected.gap is not None
    best = min(map(step_s, fitting), default=float("inf"))
    assert step_s(found) / (1 + found.expected.gap) <= best * (1 + 1e-4)
    assert step_s(found) <= best * 1.01, "it is not only within its gap, it is the best but for ties"
    if found.schedule == "auto":
        assert fits(found, cluster)
        assert step_s(found) < best, "branches are at work at the same time only where that is faster"
    elif found.schedule != "interleaved":
        assert fits(found, cluster)
        # Only stages that recompute some of their units can beat those that recompute all or none.
        some = any(stage.recomputed for stage in found.stages)
        assert some or step_s(found) >= best * (1 - 1e-9)
