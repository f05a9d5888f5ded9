"""Below every cut of an interleaved layout that fits in any way, and by hand where nothing is short."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, combinations_with_replacement, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes
from outsize.ir.profile import Profile
from outsize.ir.schedule import Kind
from outsize.planner.bounds.chain import Room
from outsize.planner.bounds.interleaved import InterleavedBound, RankShape
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.activations import Recompute
from outsize.schedules.families import family_of, interleaved_row

WAYS: tuple[Recompute, ...] = ("none", "full")


def held_at_one_moment(rank: int, ranks: int, chunks: int, microbatches: int, graded: bool) -> int:
    """The most that a rank has of each of its stages after a forward, where each has been backward before."""
    own, most = range(rank, ranks * chunks, ranks), 0
    held, back = Counter[int](), set[int]()
    for action in interleaved_row(rank, ranks * chunks, microbatches, ranks):
        held[action.stage] += 1 if action.kind == Kind.F else -1
        back |= {action.stage} if action.kind == Kind.B else set()
        if action.kind == Kind.F and (not graded or back >= {*own}):
            most = max(most, min(held[stage] for stage in own))
    return most


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_rank_has_as_much_of_each_of_its_stages_at_one_moment(ranks: int) -> None:
    law = family_of("interleaved").of_each_chunk
    assert law is not None
    for rank, chunks, m in product(range(ranks), (1, 2, 3, 4), range(1, 4 * ranks + 2)):
        least = law(ranks - rank, ranks, m)
        assert least <= held_at_one_moment(rank, ranks, chunks, m, graded=False)
        if m % ranks == 0 and m >= 3 * ranks:
            assert least <= held_at_one_moment(rank, ranks, chunks, m, graded=True)


def bound_s(units: int, chunks: int, microbatches: int, room_bytes: int) -> float:
    """The bound of units of a second forward and two back on four ranks: 1 byte to last, 1 that is saved."""
    ones = np.arange(units + 1.0)
    seconds = UnitSeconds(*np.array([[1.0, 1.0, 1.0]] * units).T)
    work = PrefixTimes.of(chain([1.0] * units)[0], seconds)
    room = Room(ones, ones, ones, ones, 0 * ones, room_bytes)
    held = [min(4, 2 * depth - 1, microbatches) for depth in (4, 3, 2, 1)]
    shape = RankShape(chunks, microbatches, held, graded=False)
    return InterleavedBound(work, room, shape, by_unit=False).floor_s()


def test_where_all_fits_the_step_is_the_work_and_some_of_the_fill() -> None:
    """Sixteen units on four ranks, four microbatches: 48 seconds of work, 9 of fill in equal chunks."""
    assert 48 < bound_s(16, 4, 4, 1 << 20) <= 48 + 9
    assert 12 * 64 < bound_s(16, 2, 64, 1 << 20) <= 12 * 64 + 18


def test_what_does_not_fit_is_recomputed() -> None:
    """With room for 5 bytes a rank of 4 units keeps a fourth, a third or all of one unit in flight."""
    m = 64
    shares = [bound_s(16, 2, m, room) / m for room in (1 << 20, 12, 8, 5)]
    assert shares == sorted(shares)
    assert 12 < shares[0] < 12.2
    assert shares[-1] > 0.95 * 16 - 0.5
    assert max(shares) <= 16 + 18 / m, "all of it may be recomputed"


passes = st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=4, max_size=6)


shapes = st.sampled_from([(1, 2), (2, 2), (2, 3), (3, 2)]).flatmap(
    lambda shape: st.tuples(st.just(shape[0]), st.just(shape[1]), st.integers(1, 3 * shape[0] + 1))
)
models = given(passes, shapes, st.integers(100, 1500), graphs(max_units=6))


@settings(max_examples=40, derandomize=True, deadline=None)
@models
def test_no_cut_that_fits_is_below_the_bound(
    rows: list[tuple[int, int, int]],
    shape: tuple[int, int, int],
    memory_bytes: int,
    model: tuple[ModelGraph, Profile],
) -> None:
    drawn, profile = model
    rows = (rows * 3)[: len(drawn.units)]
    row = [v.model_copy(update={"id": len(drawn.values) + v.id}) for v in chain([1.0] * len(rows))[0].values]
    graph = drawn.model_copy(update={"values": (*drawn.values, *row)})
    names = "forward_s", "backward_input_s", "backward_weight_s"
    timed = [
        u.model_copy(update=dict(zip(names, map(float, each), strict=True)))
        for u, each in zip(profile.units, rows, strict=True)
    ]
    ranks, chunks, m = shape
    n, stages = len(rows), ranks * chunks
    if stages > n:
        return
    menu = Pricing(
        {m: (graph, profile.model_copy(update={"units": tuple(timed)}))},
        make_cluster("4xcpu", "cpu", 1, ranks, memory_bytes),
        "adamw",
    )
    layout = Layout(Axes(pp=ranks), stages, "interleaved", m, m)
    pipeline = menu.pipeline(layout, WAYS)
    assert pipeline is not None
    cuts = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    found = [Candidate.of(pipeline, c, each) for c in cuts for each in product(range(2), repeat=stages)]
    fastest = min((each.step_s for each in found if each.fits), default=float("inf"))
    assert menu.bounds.interleaved_s(layout, WAYS) <= fastest * (1 + 1e-9)


sizes = st.lists(st.tuples(*[st.integers(1, 9)] * 4), min_size=2, max_size=5)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(sizes, st.sampled_from([(1, 2), (2, 1), (2, 2)]), st.integers(1, 6), st.integers(8, 90), st.booleans())
def test_no_choice_of_units_and_cut_beats_the_bound(
    rows: list[tuple[int, int, int, int]], shape: tuple[int, int], m: int, room_bytes: int, by_unit: bool
) -> None:
    """Of units with seconds forward and back, bytes that last and bytes that are saved."""
    (ranks, chunks), n = shape, len(rows)
    held = [min(ranks, 2 * (ranks - rank) - 1, m) for rank in range(ranks)]
    forward, backward, fixed, saved = np.array(rows, float).T
    work = PrefixTimes.of(chain([1.0] * n)[0], UnitSeconds(forward, backward, 0 * backward))
    sums = [np.concatenate(([0.0], np.cumsum(each))) for each in (fixed, saved)]
    room = Room(sums[0], sums[0], sums[0], sums[1], 0 * sums[1], room_bytes)
    named = RankShape(chunks, m, held, graded=False)
    found_s = InterleavedBound(work, room, named, by_unit=by_unit).floor_s()
    for inner in combinations_with_replacement(range(n + 1), ranks * chunks - 1):
        runs = list(pairwise((0, *inner, n)))
        for again in product((0.0, 1.0), repeat=n):
            if not by_unit and any(len({*again[first:end]}) > 1 for first, end in runs):
                continue
            each_s, kept = forward + backward + forward * again, saved * (1 - np.array(again))
            stages_s = [each_s[first:end].sum() for first, end in runs]
            of_ranks = [
                sum(fixed[a:b].sum() + held[rank] * kept[a:b].sum() for a, b in runs[rank::ranks])
                for rank in range(ranks)
            ]
            if max(of_ranks) <= room_bytes:
                paths = (
                    sum(stages_s[:stage]) + m * sum(stages_s[stage::ranks]) for stage in range(len(runs))
                )
                assert found_s <= max(paths) * (1 + 1e-9)
