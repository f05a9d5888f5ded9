"""Oracle: all orders of devices and all cuts, with prices that know the neighbours' kinds."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outsize.planner.heterogeneous.neighbour_dp import NOBODY, PairPrice, arrange

Case = tuple[tuple[int, ...], int, PairPrice]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any table for any neighbours and position; a quarter of the runs does not fit."""
    counts = draw(st.sampled_from([(1,), (3,), (1, 1), (2, 1), (2, 2), (1, 1, 1)]))
    units, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**32 - 1))

    def price(before: int, kind: int, behind: int, stages_behind: int) -> NDArray[np.float64]:
        generator = np.random.default_rng([seed, before + 1, kind, behind + 1, stages_behind])
        table = generator.integers(1, 40, (units + 1, units + 1)).astype(float)
        table[generator.random(table.shape) < 0.25] = np.inf
        return table

    return counts, units, price


def slowest(case: Case, kinds: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    _, _, price = case
    around = (NOBODY, *kinds, NOBODY)
    return max(
        float(price(around[s], kind, around[s + 2], len(kinds) - 1 - s)[a, b])
        for s, (kind, (a, b)) in enumerate(zip(kinds, pairwise(cuts), strict=True))
    )


def brute_force(case: Case, wanted: int | None) -> float:
    counts, units, _ = case
    devices = [kind for kind, count in enumerate(counts) for _ in range(count)]
    return min(
        (
            slowest(case, kinds, (0, *inner, units))
            for stages in range(1, min(len(devices), units) + 1)
            if wanted in (None, stages)
            for kinds in set(permutations(devices, stages))
            for inner in combinations(range(1, units), stages - 1)
        ),
        default=float("inf"),
    )


@settings(max_examples=80, derandomize=True, deadline=None)
@given(cases(), st.sampled_from([None, 1, 2, 3]))
def test_same_as_trying_all_orders_and_cuts(case: Case, stages: int | None) -> None:
    counts, units, price = case
    found, best = arrange(counts, units, price, stages), brute_force(case, stages)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert found.seconds == best == slowest(case, found.kinds, found.bounds)
        assert stages in (None, len(found.kinds))


def test_a_slow_link_between_two_kinds_keeps_them_apart() -> None:
    """Kinds 0, 1, 2 on equal runs, but 0 and 1 hardly reach each other: 2 comes between them."""

    def price(before: int, kind: int, behind: int, _stages_behind: int) -> NDArray[np.float64]:
        slow = {0, 1} in ({before, kind}, {kind, behind})
        return np.subtract.outer(range(4), range(4)).T + (10.0 if slow else 0.0)

    found = arrange((1, 1, 1), 3, price, stages=3)
    assert found is not None
    assert found.kinds[1] == 2
    assert found.seconds == pytest.approx(1.0)
