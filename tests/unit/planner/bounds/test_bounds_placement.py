"""The least step where ranks are known: by hand, and below every schedule that is composed on these ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.bounds.placement import PlacementBound
from outsize.planner.costs.stage_edges import edges_among, flows
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.dag.stage_levels import Placed, StageLevels
from outsize.schedules.compose import compose
from outsize.schedules.job import Job, StageCost

Model = tuple[ModelGraph, Profile]


def bound_of(model: Model) -> PlacementBound:
    graph, profile = model
    return PlacementBound.of(graph, UnitSeconds.of(profile))


def composed_s(model: Model, placed: Placed, microbatches: int) -> float:
    """The shortest of all composed schedules, with links and memory that cost nothing."""
    graph, profile = model
    seconds, units = UnitSeconds.of(profile), placed.units
    passes = seconds.forward, seconds.backward, seconds.backward_weight
    costs = tuple(StageCost(*(float(times[own].sum()) for times in passes)) for own in units)
    edges = edges_among(flows(graph), placed.owners.__getitem__)
    forward, backward = dict.fromkeys(edges.forward, 0.0), dict.fromkeys(edges.backward, 0.0)
    nothing = (0,) * len(units)
    room = (1.0,) * (max(placed.ranks) + 1)
    job = Job(placed.ranks, microbatches, costs, forward, backward, nothing, room)
    return compose(job)[0].step_s


@pytest.mark.parametrize(("count", "least_s"), [(1, 9.0), (4, 15.0), (8, 27.0)])
def test_the_last_rank_of_a_chain_begins_when_the_others_are_through(count: int, least_s: float) -> None:
    """One microbatch takes all forwards, all backwards of inputs, and last the weights of the first unit."""
    assert bound_of(chain([1.0] * 4)).least_s(np.arange(4), count) == pytest.approx(least_s)


def test_one_rank_does_one_after_the_other() -> None:
    model = chain([1.0] * 4)
    assert bound_of(model).least_s(np.zeros(4, np.int64), 2) == pytest.approx(24.0)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(graphs(max_units=7), st.lists(st.integers(0, 2), min_size=7, max_size=7), st.integers(1, 4))
def test_no_composed_schedule_is_shorter(model: Model, ranks: list[int], count: int) -> None:
    graph, _ = model
    own = ranks[: len(graph.units)]
    placed = StageLevels(graph).stages(own)
    assume(placed is not None and set(own) == set(range(max(own) + 1)))
    assert placed is not None
    least_s = bound_of(model).least_s(np.array(own), count)
    assert least_s <= composed_s(model, placed, count) * (1 + 1e-9)
