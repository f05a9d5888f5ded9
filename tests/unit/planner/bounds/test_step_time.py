"""Floors against the computed step of every cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.partition.stage_prices import Pipeline, StagePrices
from outsize.planner.simulation.simulate import StageCost, bound_s
from outsize.policies.activations import Recompute
from outsize.schedules.builders import build

Model = tuple[ModelGraph, Profile]
SCHEDULES: tuple[ScheduleName, ...] = ("naive", "gpipe", "1f1b", "1f1b-overlap", "zero-bubble")
WAYS: tuple[Recompute, ...] = ("none", "full")


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Rows that break off, skips over the break, and passes of all proportions."""
    graph, profile = draw(graphs(max_units=6))
    if draw(st.booleans()):
        row = chain([1.0] * len(graph.units))[0].values
        joined = [v for v in row if draw(st.integers(0, 4))]
        values = [v.model_copy(update={"id": at}) for at, v in enumerate((*joined, *graph.values))]
        graph = graph.model_copy(update={"values": tuple(values)})
    seconds = st.integers(0, 9)
    fields = ("forward_s", "backward_input_s", "backward_weight_s")
    units = [u.model_copy(update={f: draw(seconds) / 8 for f in fields}) for u in profile.units]
    units[0] = units[0].model_copy(update={"forward_s": 0.5})
    return graph, profile.model_copy(update={"units": tuple(units)})


def cuts(units: int, stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *inner, units) for inner in combinations(range(1, units), stages - 1))


def work_of(graph: ModelGraph, profile: Profile) -> PrefixTimes:
    return PrefixTimes.of(graph, UnitSeconds.of(profile))


def computed_s(model: Model, schedule: str, bounds: Sequence[int], microbatches: int) -> float:
    """Of a step whose links cost nothing."""
    graph, profile = model
    costs = [
        StageCost(
            sum(u.forward_s for u in profile.units[a:b]),
            sum(u.backward_s for u in profile.units[a:b]),
            sum(u.backward_weight_s for u in profile.units[a:b]),
        )
        for a, b in pairwise(bounds)
    ]
    built = build(schedule, len(costs), microbatches)
    return bound_s(edges_between(graph, bounds).lowered(built), costs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(models(), st.integers(1, 4), st.integers(1, 6))
def test_no_cut_is_below_the_floor(
    schedule: ScheduleName, model: Model, stages: int, microbatches: int
) -> None:
    units = len(model[0].units)
    floor_s = work_of(*model).floor_s(schedule, stages, stages, microbatches)
    assert floor_s >= work_of(*model).least_s(stages, microbatches)
    for bounds in cuts(units, stages):
        assert floor_s <= computed_s(model, schedule, bounds, microbatches) * (1 + 1e-9), bounds


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (2, 6), (3, 2), (3, 3), (4, 6)])
def test_equal_stages_meet_the_floor(schedule: ScheduleName, stages: int, microbatches: int) -> None:
    """(m + p - 1)(f + b), with two units of 3/8 seconds on each stage."""
    model = chain([0.125] * 2 * stages)
    floor_s = work_of(*model).floor_s(schedule, stages, stages, microbatches)
    assert floor_s == pytest.approx((microbatches + stages - 1) * 0.75, rel=2e-5)
    equal = tuple(range(0, 2 * stages + 1, 2))
    assert floor_s == pytest.approx(computed_s(model, schedule, equal, microbatches), rel=2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=2, max_size=4), st.integers(1, 6))
def test_no_row_is_below_its_floor(
    schedule: ScheduleName, passes: list[tuple[int, int, int]], microbatches: int
) -> None:
    """One cut only, so that the floor is that of its stages."""
    graph, profile = chain([1.0] * len(passes))
    names = "forward_s", "backward_input_s", "backward_weight_s"
    pairs = zip(profile.units, passes, strict=True)
    units = [u.model_copy(update=dict(zip(names, map(float, each), strict=True))) for u, each in pairs]
    model = graph, profile.model_copy(update={"units": tuple(units)})
    floor_s = work_of(*model).floor_s(schedule, len(passes), len(passes), microbatches)
    step_s = computed_s(model, schedule, tuple(range(len(passes) + 1)), microbatches)
    assert floor_s <= step_s * (1 + 1e-9)


def test_one_after_the_other_takes_the_sum() -> None:
    model = chain([0.5, 0.125, 0.25])
    assert work_of(*model).floor_s("naive", 2, 2, 3) == pytest.approx(3 * 3 * 0.875, rel=2e-5)


def test_a_bound_is_sharpened_step_by_step() -> None:
    """It never falls, and ends at the floor."""
    work = work_of(*chain([1.0, 3.0, 2.0, 2.0]))
    bound, seen = work.bound("1f1b", 2, 2, 4), list[float]()
    while not bound.sharp:
        seen.append(bound.low_s)
        bound.sharpen()
    assert len(seen) > 2
    assert [*seen, bound.low_s] == sorted([*seen, bound.low_s])
    assert bound.low_s == work.floor_s("1f1b", 2, 2, 4)


def test_a_branch_begins_at_once_and_a_row_waits() -> None:
    """Two units in a row: the second waits. Without their value, both begin at once."""
    graph, profile = chain([1.0, 1.0])
    apart = graph.model_copy(update={"values": ()})
    assert work_of(graph, profile).floor_s("1f1b", 2, 2, 1) == pytest.approx(6.0, rel=2e-5)
    assert work_of(apart, profile).floor_s("1f1b", 2, 2, 1) == pytest.approx(3.0, rel=2e-5)


def test_the_fastest_of_each_unit() -> None:
    slow, quick = (UnitSeconds.of(chain(costs)[1]) for costs in ([1.0, 4.0], [2.0, 3.0]))
    assert fastest([slow, quick]).forward.tolist() == [1.0, 3.0]
    assert fastest([slow]) is slow


# -- with memory -------------------------------------------------------------------------------------------


def small(memory_bytes: int) -> Cluster:
    return make_cluster("4xcpu", "cpu", 1, 4, memory_bytes)


def every(pipeline: Pipeline) -> Iterator[Candidate]:
    """All cuts in all ways that fit, and whose stages have a weight each, as split insists."""
    for bounds in cuts(pipeline.case.units, pipeline.stages):
        for ways in product(range(2), repeat=pipeline.stages):
            found = Candidate.of(pipeline, bounds, ways)
            if found.may_be_chosen:
                yield found


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(models(), st.integers(1, 3), st.integers(1, 5), st.integers(100, 900))
def test_no_cut_that_fits_is_below_the_floor_of_split(
    schedule: ScheduleName, model: Model, stages: int, microbatches: int, memory_bytes: int
) -> None:
    layout = Layout(Axes(pp=stages), stages, schedule, microbatches, microbatches)
    pipeline = Pricing({microbatches: model}, small(memory_bytes), "sgd").pipeline(layout, WAYS)
    assert pipeline is not None
    prices, fitting = StagePrices(pipeline), list(every(pipeline))
    cut = prices.split()
    if cut is None:
        assert not fitting
        return
    assert Candidate.of(pipeline, cut.bounds, cut.choices).fits
    assert prices.floor_s <= min(found.step_s for found in fitting) * (1 + 1e-9)
    floor_s = work_of(*model).floor_s(schedule, stages, stages, microbatches)
    assert floor_s <= prices.floor_s * (1 + 2e-5), "memory makes nothing faster"


def test_memory_raises_the_floor() -> None:
    """Stage 0 holds two microbatches of each unit, stage 1 one: one unit fits there, three here."""
    model, layout = chain([1.0] * 4, saved_bytes=1000), Layout(Axes(pp=2), 2, "1f1b", 2, 2)
    tight = Pricing({2: model}, small(4000), "sgd").pipeline(layout, ("none",))
    roomy = Pricing({2: model}, small(9000), "sgd").pipeline(layout, ("none",))
    assert tight is not None
    assert roomy is not None
    for pipeline, bounds, floor_s in ((roomy, (0, 2, 4), 3 * 6.0), (tight, (0, 1, 4), 3.0 + 2 * 9.0)):
        prices = StagePrices(pipeline)
        cut = prices.split()
        assert cut is not None
        assert (cut.bounds, prices.floor_s) == (bounds, floor_s)
