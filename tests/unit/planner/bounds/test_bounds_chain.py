"""How far stages get: as floor.py says where all fits, and below every cut that fits in any way."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.bounds.chain import ChainBound, ChainShape, Room
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.activations import Recompute

SCHEDULES: tuple[ScheduleName, ...] = ("naive", "gpipe", "1f1b", "1f1b-overlap", "zero-bubble")
WAYS: tuple[Recompute, ...] = ("none", "full")
passes = st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=2, max_size=6)


def work(rows: list[tuple[int, int, int]]) -> PrefixTimes:
    seconds = UnitSeconds(*np.array(rows, float).T)
    return PrefixTimes.of(chain([1.0] * len(rows))[0], seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=40, derandomize=True, deadline=None)
@given(passes, st.integers(1, 4), st.integers(1, 6))
def test_without_memory_a_row_is_as_the_critical_path_of_each_stage(
    schedule: ScheduleName, rows: list[tuple[int, int, int]], stages: int, microbatches: int
) -> None:
    """The least largest path over all cuts, each path as floor.py has it."""
    found, n = work(rows), len(rows)
    stages = min(stages, n)
    cuts = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]

    def path(stage: int, run: tuple[int, int]) -> float:
        first, end = map(np.intp, run)
        return float(found.stage_s(schedule, first, end, (stage, stages - 1 - stage), microbatches))

    best = min(max(path(s, run) for s, run in enumerate(pairwise(bounds))) for bounds in cuts)
    assert found.floor_s(schedule, stages, stages, microbatches) == pytest.approx(best, rel=2e-5)


def test_bytes_end_a_stage() -> None:
    """Four units of a second each way; 3 bytes a unit in flight, 2 for good. Two stages, gpipe with m = 2:
    8 bytes of a unit that keeps, 5 of one that is recomputed.
    """
    sums = np.arange(5.0)

    def reaches(limit_s: float, room_bytes: int) -> bool:
        room = Room(2 * sums, 2 * sums, 2 * sums, 3 * sums, 3 * sums, room_bytes)
        return ChainBound(2 * sums, (sums, sums), 0.0, ChainShape("gpipe", 2, 2), room).reaches(limit_s)

    assert reaches(12.0, 16)
    assert not reaches(11.9, 16)
    assert not reaches(12.0, 15)
    assert reaches(16.0, 15), "one stage keeps nothing: (m + 1) (2 + 1) seconds for each of two units"
    assert not reaches(np.inf, 9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=15, derandomize=True, deadline=None)
@given(passes, st.integers(1, 3), st.integers(1, 5), st.integers(100, 1500), graphs(max_units=6))
def test_no_cut_that_fits_is_below_the_floor(
    schedule: ScheduleName,
    rows: list[tuple[int, int, int]],
    stages: int,
    m: int,
    memory_bytes: int,
    model: tuple[ModelGraph, Profile],
) -> None:
    drawn, profile = model
    rows = [*rows, *rows, *rows][: len(drawn.units)]
    row = [v.model_copy(update={"id": len(drawn.values) + v.id}) for v in chain([1.0] * len(rows))[0].values]
    graph = drawn.model_copy(update={"values": (*drawn.values, *row)})
    names = "forward_s", "backward_input_s", "backward_weight_s"
    timed = [
        u.model_copy(update=dict(zip(names, map(float, each), strict=True)))
        for u, each in zip(profile.units, rows, strict=True)
    ]
    stages, n = min(stages, len(rows)), len(rows)
    menu = Pricing(
        {m: (graph, profile.model_copy(update={"units": tuple(timed)}))},
        make_cluster("4xcpu", "cpu", 1, stages, memory_bytes),
        "adamw",
    )
    layout = Layout(Axes(pp=stages), stages, schedule, m, m)
    pipeline = menu.pipeline(layout, WAYS)
    assert pipeline is not None
    cuts = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    found = [Candidate.of(pipeline, c, ways) for c in cuts for ways in product(range(2), repeat=stages)]
    fastest = min((each.step_s for each in found if each.fits), default=float("inf"))
    assert menu.bounds.floor_s(layout, WAYS) <= fastest * (1 + 1e-9)
