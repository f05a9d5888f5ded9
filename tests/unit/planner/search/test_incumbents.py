"""A search tells of each better plan, and ends with the best one when its time is over; its clock counts."""

from __future__ import annotations

from itertools import count, pairwise
from math import inf

import pytest
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile
from outsize.planner.search.incumbents import Incumbent, Incumbents, Limits
from outsize.planner.search.search import search

BATCH = 16
SECONDS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
FOUR = parse_cluster("4xcpu")
EXACT, MESHES = PlanRequest(batch_size=BATCH, exact=True), PlanRequest(batch_size=BATCH)


def models(saved_bytes: int = 4096) -> dict[int, tuple[ModelGraph, Profile]]:
    return {
        m: chain([s / m for s in SECONDS], 8, saved_bytes=saved_bytes // m, batch_size=BATCH // m)
        for m in (1, 2, 4, 8, 16)
    }


def after(limit_s: float | None, told: list[Incumbent] | None = None) -> Incumbents:
    """Each look at the clock is a second after the one before."""
    ticks = count()
    return Incumbents(limit_s, None if told is None else told.append, clock=lambda: next(ticks))


def planned(request: PlanRequest, incumbents: Incumbents, cluster: Cluster = FOUR) -> Plan:
    return search(request, models(), cluster, limits=Limits(incumbents=incumbents))


def step_and_gap(plan: Plan) -> tuple[float, float]:
    assert plan.expected is not None
    assert plan.expected.gap is not None
    return plan.expected.step_s, plan.expected.gap


@pytest.mark.parametrize("request_", [EXACT, MESHES], ids=["pipelines", "meshes"])
def test_each_better_plan_is_told_and_the_plan_is_the_same(request_: PlanRequest) -> None:
    told: list[Incumbent] = []
    plan = planned(request_, after(None, told))
    assert plan.to_json() == search(request_, models(), FOUR).to_json()
    assert told
    assert all(later.step_s < earlier.step_s for earlier, later in pairwise(told))
    assert [found.after_s for found in told] == [*range(1, len(told) + 1)]
    assert all(found.gap is None or found.gap >= 0 for found in told)
    assert all(found.axes.world_size <= 4 for found in told)


@pytest.mark.parametrize("limit_s", [1, 2, 4])
@pytest.mark.parametrize("request_", [EXACT, MESHES], ids=["pipelines", "meshes"])
def test_a_limit_ends_with_the_best_plan_so_far_whose_gap_holds(
    request_: PlanRequest, limit_s: float
) -> None:
    incumbents = after(limit_s)
    step_s, gap = step_and_gap(planned(request_, incumbents))
    best_s, _ = step_and_gap(search(request_, models(), FOUR))
    assert incumbents.ended
    assert step_s / (1 + gap) <= best_s * (1 + 1e-9)


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    incumbents = after(1e9)
    plan = planned(MESHES, incumbents)
    assert not incumbents.ended
    assert incumbents.told(plan) is plan
    assert plan.to_json() == search(MESHES, models(), FOUR).to_json()


def test_without_a_plan_a_limit_ends_nothing() -> None:
    """The refusal says what it says without a limit."""
    tiny = make_cluster("2xcpu", "cpu", 1, 2, 2**10)
    with pytest.raises(NoFeasiblePlan) as without:
        search(EXACT, models(), tiny)
    incumbents = after(1)
    with pytest.raises(NoFeasiblePlan) as limited:
        planned(EXACT, incumbents, tiny)
    assert not incumbents.ended
    assert str(limited.value) == str(without.value)


def test_only_what_is_better_is_told_with_its_gap_to_the_bound() -> None:
    told: list[Incumbent] = []
    incumbents = after(None, told)
    axes = Axes(pp=4)
    for step_s, floor_s in ((2.0, 1.6), (2.0, 1.9), (1.9, 0.0), (3.0, inf), (1.8, 2.0)):
        incumbents.found(axes, step_s, floor_s)
    assert [(found.step_s, found.gap) for found in told] == [
        (2.0, pytest.approx(0.25)),
        (1.9, None),
        (1.8, 0.0),
    ]
