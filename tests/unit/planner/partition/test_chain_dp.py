"""Oracle: all cuts of small chains, one by one."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise
from types import FrameType

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outsize.planner.partition.chain_dp import Price, bottleneck, partition

Tables = NDArray[np.float64]


def cuts_of(units: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]


def brute_force(stages: int, prices: Tables, traffic: NDArray[np.int64]) -> tuple[int, ...] | None:
    """Least (bottleneck, traffic, cuts) over all cuts; None when all are infinite."""
    ranked = [
        (
            max(float(prices[stage, a, b]) for stage, (a, b) in enumerate(pairwise(cuts))),
            sum(int(traffic[a, b]) for a, b in pairwise(cuts)),
            cuts,
        )
        for cuts in cuts_of(prices.shape[1] - 1, stages)
    ]
    best = min(ranked, default=(np.inf, 0, ()))
    return best[2] if np.isfinite(best[0]) else None


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, Tables, NDArray[np.int64]]:
    """Prices that are no sums at all: any table is allowed. One in four runs does not fit."""
    units, stages = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    shape = (stages, units + 1, units + 1)
    prices = generator.integers(1, draw(st.sampled_from([3, 50])), shape).astype(np.float64)
    prices[generator.random(shape) < draw(st.sampled_from([0.0, 0.25, 0.6]))] = np.inf
    return stages, prices, generator.integers(0, 4, shape[1:], dtype=np.int64)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(problems())
def test_same_as_trying_all_cuts(problem: tuple[int, Tables, NDArray[np.int64]]) -> None:
    stages, prices, traffic = problem
    assert partition(stages, prices.__getitem__, traffic) == brute_force(stages, prices, traffic)


def sums(seconds: NDArray[np.float64]) -> Tables:
    prefix = np.concatenate([[0.0], np.cumsum(seconds)])
    return prefix[None, :] - prefix[:, None]


def limited(table: Tables, limit: float) -> Price:
    """A price whose runs may not hold more than `limit` of the table."""
    return lambda _stage: np.where(table <= limit, table, np.inf)


chains = st.lists(st.integers(1, 20), min_size=2, max_size=10).map(lambda s: np.array(s, np.float64))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chains, st.integers(1, 4), st.integers(1, 40), st.integers(0, 40))
def test_more_room_never_hurts(seconds: Tables, stages: int, limit: int, more: int) -> None:
    table, units = sums(seconds), len(seconds)
    tight = bottleneck(stages, limited(table, limit), units)
    assert bottleneck(stages, limited(table, limit + more), units) <= tight


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chains, st.integers(1, 4), st.sampled_from([2.0, 0.25, 1024.0]))
def test_scaling_all_times_moves_no_cut(seconds: Tables, stages: int, factor: float) -> None:
    traffic = np.zeros((len(seconds) + 1,) * 2, np.int64)
    plain = partition(stages, limited(sums(seconds), np.inf), traffic)
    assert partition(stages, limited(sums(seconds * factor), np.inf), traffic) == plain


@settings(max_examples=50, derandomize=True, deadline=None)
@given(chains, st.integers(1, 4))
def test_one_more_stage_never_hurts_when_transfers_are_free(seconds: Tables, stages: int) -> None:
    price, units = limited(sums(seconds), np.inf), len(seconds)
    if stages < units:
        assert bottleneck(stages + 1, price, units) <= bottleneck(stages, price, units)


def test_equal_units_are_cut_evenly_in_spite_of_rounding() -> None:
    seconds = np.full(30, 0.1)
    bounds = partition(3, lambda _stage: sums(seconds), np.zeros((31, 31), np.int64))
    assert bounds == (0, 10, 20, 30)


def test_less_traffic_then_the_earlier_cut_break_a_tie() -> None:
    table = sums(np.array([4.0, 1.0, 1.0, 3.0]))
    traffic = np.zeros((5, 5), np.int64)
    assert partition(2, lambda _stage: table, traffic) == (0, 1, 4)
    traffic[1, 4] = 5
    assert partition(2, lambda _stage: table, traffic) == (0, 2, 4)


def test_nothing_fits() -> None:
    table = sums(np.array([1.0, 9.0, 1.0]))
    assert partition(2, limited(table, 8.0), np.zeros((4, 4), np.int64)) is None
    assert bottleneck(2, limited(table, 8.0), 3) == np.inf


def test_more_stages_than_units_have_no_cut() -> None:
    assert partition(3, lambda _stage: sums(np.ones(2)), np.zeros((3, 3), np.int64)) is None


def calls_for(units: int) -> int:
    """How many functions are called to cut so many units into eight stages."""
    table, traffic = sums(np.random.default_rng(0).random(units)), np.zeros((units + 1,) * 2, np.int64)
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        bounds = partition(8, lambda _stage: table, traffic)
    finally:
        sys.setprofile(before)
    assert bounds is not None
    return calls


def test_more_units_are_more_work_for_numpy_alone() -> None:
    """A thousand units in eight stages take about a second."""
    assert calls_for(1000) == calls_for(500)
