"""Oracle: all cuts and all ways of small chains. (DAGs: test_convex.py.)"""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from options import Choice, Way, fastest, frontier

Chain = tuple[int, int, list[Way], list[int]]


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Any tables; (stages, microbatches, ways, rooms)."""
    units, stages = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = units + 1, units + 1

    def table(high: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return generator.integers(1, high, shape)

    ways = [
        Way(f"w{i}", table(20) * 1.0, table(20) * 1.0, table(9), table(9))
        for i in range(draw(st.integers(1, 3)))
    ]
    return stages, draw(st.sampled_from([1, 3, 50])), ways, generator.integers(8, 40, stages).tolist()


def step(chain: Chain, cuts: tuple[int, ...], picks: tuple[int, ...]) -> float:
    """Seconds, infinite when it does not fit."""
    stages, microbatches, ways, rooms = chain
    runs = [(ways[w], run) for w, run in zip(picks, pairwise(cuts), strict=True)]
    peaks = [
        int(w.fixed_bytes[r] + min(microbatches, stages - s) * w.held_bytes[r])
        for s, (w, r) in enumerate(runs)
    ]
    if any(peak > room for peak, room in zip(peaks, rooms, strict=True)):
        return float("inf")
    pace = max(float(w.steady_s[r]) for w, r in runs)
    return sum(float(w.once_s[r]) for w, r in runs) + (microbatches - 1) * pace


def planned(chain: Chain) -> Choice | None:
    stages, microbatches, ways, rooms = chain
    return fastest(stages, ways, microbatches, lambda s: min(microbatches, stages - s), rooms.__getitem__)


@settings(max_examples=120, derandomize=True, deadline=None)
@given(chains())
def test_same_as_trying_all_cuts_and_ways(chain: Chain) -> None:
    stages, _, ways, _ = chain
    units = len(ways[0].steady_s) - 1
    best = min(
        (
            step(chain, (0, *inner, units), picks)
            for inner in combinations(range(1, units), stages - 1)
            for picks in product(range(len(ways)), repeat=stages)
        ),
        default=float("inf"),
    )
    found = planned(chain)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert found.step_s == pytest.approx(best)
        assert step(chain, found.bounds, found.ways) == pytest.approx(best)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(chains())
def test_a_way_off_the_frontier_is_never_missed(chain: Chain) -> None:
    """For every run alone, under any number in flight and any room, the frontier holds a best way."""
    _, _, ways, _ = chain
    for run in combinations(range(len(ways[0].steady_s)), 2):
        kept = frontier(ways, *run)
        assert kept
        for held, room in product((1, 4), (6, 15, 40)):
            fits = [i for i, w in enumerate(ways) if w.fixed_bytes[run] + held * w.held_bytes[run] <= room]
            for table in ("steady_s", "once_s"):
                best = min((float(getattr(ways[i], table)[run]) for i in fits), default=None)
                among = min((float(getattr(ways[i], table)[run]) for i in fits if i in kept), default=None)
                assert best == among


def test_ways_that_another_beats_in_all_four_are_dropped() -> None:
    def way(*point: int) -> Way:
        a, b, c, d = (np.full((2, 2), x) for x in point)
        return Way("w", a * 1.0, b * 1.0, c, d)

    ways = [way(1, 1, 5, 5), way(2, 2, 5, 5), way(2, 2, 5, 1), way(1, 1, 5, 5)]
    assert frontier(ways, 0, 1) == (0, 2)
