"""Bounds of schedules in which exchanges hide: below every cut as it is played, in any policy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph, ShardedFraction
from outsize.ir.plan import Axes
from outsize.ir.profile import Profile
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.partition.stage_prices import ChainCut
from outsize.planner.search.step_floors import StepFloors
from outsize.planner.simulation.simulate import StageCost, bound_s
from outsize.policies.activations import Recompute
from outsize.schedules.builders import build

WAYS: tuple[Recompute, ...] = ("none", "full")
GIB = 1 << 30
few = settings(max_examples=25, derandomize=True, deadline=None)
# Eighths of a second of a unit's forward, of both parts of its backward, and which parts of both passes wait.
units = st.lists(
    st.tuples(*[st.integers(0, 9)] * 3, *[st.sampled_from((0.0, 0.2, 0.5, 0.9, 1.0))] * 2),
    min_size=2,
    max_size=5,
)


def waiting(rows: Sequence[tuple[float, ...]]) -> UnitSeconds:
    forward, backward_input, backward_weight, f, b = np.array(rows, float).T
    seconds = UnitSeconds(forward / 8, backward_input / 8, backward_weight / 8)
    return seconds.waiting(f * seconds.forward, b * seconds.backward)


def cost(seconds: UnitSeconds, run: tuple[int, int]) -> StageCost:
    assert seconds.waits is not None
    own = slice(*run)
    forward_s, backward_s, weight_s, forward_wait_s, backward_wait_s = (
        float(each[own].sum())
        for each in (seconds.forward, seconds.backward, seconds.backward_weight, *seconds.waits)
    )
    return StageCost(forward_s, backward_s, weight_s, 0.0, forward_wait_s, backward_wait_s)


def played_s(
    model: ModelGraph, seconds: UnitSeconds, bounds: Sequence[int], row: tuple[str, int, int]
) -> float:
    """Of a cut under a schedule of so many microbatches on so many ranks, if links cost nothing."""
    schedule, microbatches, ranks = row
    built = build(schedule, len(bounds) - 1, microbatches, ranks)
    lowered = edges_between(model, bounds).lowered(built)
    return bound_s(lowered, [cost(seconds, run) for run in pairwise(bounds)])


def cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]


@few
@given(units, st.integers(1, 3), st.integers(1, 8))
def test_no_cut_with_a_stage_on_each_rank_is_below_the_floor(
    rows: list[tuple[float, ...]], stages: int, microbatches: int
) -> None:
    seconds, (model, _) = waiting(rows), chain([1.0] * len(rows))
    work = PrefixTimes.of(model, seconds.paired())
    stages = min(stages, len(rows))
    floor_s = work.floor_s("1f1b-overlap", stages, stages, microbatches)
    for bounds in cuts(len(rows), stages):
        step_s = played_s(model, seconds, bounds, ("1f1b-overlap", microbatches, stages))
        paths = [
            work.stage_s("1f1b-overlap", np.intp(a), np.intp(b), (s, stages - 1 - s), microbatches)
            for s, (a, b) in enumerate(pairwise(bounds))
        ]
        assert max(floor_s, *map(float, paths)) <= step_s * (1 + 1e-9), bounds


@few
@given(units, st.integers(1, 2), st.integers(1, 8))
def test_no_cut_in_a_v_is_below_the_work_that_is_left(
    rows: list[tuple[float, ...]], ranks: int, microbatches: int
) -> None:
    rows = [*rows, *rows]
    seconds, (model, _) = waiting(rows), chain([1.0] * len(rows))
    least_s = PrefixTimes.of(model, seconds.paired()).least_s(ranks, microbatches)
    for bounds in cuts(len(rows), 2 * ranks)[:40]:
        assert least_s <= played_s(model, seconds, bounds, ("dualpipe-v", microbatches, ranks)) * (1 + 1e-9)


def test_without_what_hides_a_cut_would_be_below_its_bound() -> None:
    """The bound of sums that know no pairs, which the properties above would find."""
    rows = [(4.0, 4.0, 4.0, 0.5, 0.5)] * 4
    seconds, (model, _) = waiting(rows), chain([1.0] * 4)
    step_s = played_s(model, seconds, (0, 2, 4), ("1f1b-overlap", 16, 2))
    assert PrefixTimes.of(model, seconds).floor_s("1f1b-overlap", 2, 2, 16) > 1.2 * step_s
    least_s = PrefixTimes.of(model, seconds.paired()).floor_s("1f1b-overlap", 2, 2, 16)
    assert 0.85 * step_s < least_s <= step_s


def exchanging(model: tuple[ModelGraph, Profile], sums: Sequence[int]) -> tuple[ModelGraph, Profile]:
    """The model whose units exchange so many tenths of a second's bytes."""
    graph, profile = model
    shares = [ShardedFraction(work=1.0, forward_sum=own * 10**10, backward_sum=own * 10**10) for own in sums]
    made = tuple(
        unit.model_copy(update={"divided": share, "in_sequence": share})
        for unit, share in zip(graph.units, shares, strict=False)
    )
    return graph.model_copy(update={"units": made}), profile


def accelerators(memory_bytes: int) -> Cluster:
    """Four whose peaks may be so many bytes."""
    cluster = make_cluster("4xa100", "a100-80gb", 1, 4, 80 * GIB)
    device = cluster.devices[0]
    low, high = 0, 80 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        enough = room_bytes(device.model_copy(update={"memory_bytes": middle})) >= memory_bytes
        low, high = (low, middle) if enough else (middle, high)
    devices = tuple(each.model_copy(update={"memory_bytes": high}) for each in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


@pytest.mark.parametrize("schedule", ["1f1b-overlap", "1f1b"])
@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    graphs(max_units=5),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.integers(1, 6),
    st.integers(200, 1500),
)
def test_no_candidate_that_fits_is_below_a_bound(
    schedule: str, model: tuple[ModelGraph, Profile], sums: list[int], m: int, room: int
) -> None:
    """All bounds of a layout, in the order of their sharpness, and those of its tables."""
    pricing = Pricing({m: exchanging(model, sums)}, accelerators(room), "adamw")
    layout, count = Layout(Axes(pp=2, tp=2), 2, schedule, m, m), len(model[0].units)
    assert layout.pairs == (schedule == "1f1b-overlap")
    pipeline = pricing.pipeline(layout, WAYS)
    assert pipeline is not None
    found = [
        Candidate.of(pipeline, bounds, ways)
        for bounds in cuts(count, 2)
        for ways in product(range(2), repeat=2)
    ]
    least_s = min((each.step_s for each in found if each.fits), default=float("inf")) * (1 + 1e-9)
    floors, tables = StepFloors(pricing, WAYS), pricing.stage_prices(pipeline)
    assert floors.least_s(layout) <= least_s
    assert floors.together_s(layout, floors.bound(layout).sharpened()) <= least_s
    assert tables.floor_s <= least_s
    assert tables.least_busy_s() <= least_s
    for each in found:
        assert pipeline.busy_s(ChainCut(each.bounds, each.choices)) <= each.step_s * (1 + 1e-9)
