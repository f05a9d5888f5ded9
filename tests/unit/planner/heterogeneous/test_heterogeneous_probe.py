"""Oracle: all orders of devices and all cuts of small chains, with memory by position and fat boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outsize.planner.heterogeneous.probe import Arrangement, balance, lowest_first

few = settings(max_examples=30, derandomize=True, deadline=None)


@dataclass(frozen=True)
class Fleet:
    """A chain and unequal devices; stage with d behind it holds min(m, d + 1) microbatches."""

    counts: tuple[int, ...]
    seconds: NDArray[np.float64]
    boundary: NDArray[np.float64]
    fixed: NDArray[np.int64]
    held: NDArray[np.int64]
    rooms: tuple[int, ...]
    microbatches: int

    @property
    def units(self) -> int:
        return self.seconds.shape[1]

    def floor(self, kind: int, behind: int) -> NDArray[np.int32]:
        return lowest_first(self.fixed, self.held, self.rooms[kind], min(self.microbatches, behind + 1))

    def planned(self, boundary: bool = False) -> Arrangement | None:
        return balance(self.counts, self.seconds, self.boundary if boundary else None, self.floor)

    def price(self, kinds: tuple[int, ...], cuts: tuple[int, ...], boundary: bool) -> float:
        """Seconds of the slowest stage, infinite when one does not fit."""
        slowest = 0.0
        for s, (kind, (a, b)) in enumerate(zip(kinds, pairwise(cuts), strict=True)):
            flight = min(self.microbatches, len(kinds) - s)
            peak = sum(int(self.fixed[u]) + flight * int(self.held[u]) for u in range(a, b))
            if peak > self.rooms[kind]:
                return float("inf")
            moved = self.boundary[kind, a] + self.boundary[kind, b] if boundary else 0.0
            slowest = max(slowest, sum(float(self.seconds[kind, u]) for u in range(a, b)) + moved)
        return slowest

    def brute_force(self, boundary: bool) -> float:
        devices = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        return min(
            self.price(kinds, (0, *inner, self.units), boundary)
            for stages in range(1, min(len(devices), self.units) + 1)
            for kinds in set(permutations(devices, stages))
            for inner in combinations(range(1, self.units), stages - 1)
        )


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    counts = draw(st.sampled_from([(1,), (3,), (1, 1), (2, 1), (1, 3), (2, 2), (1, 1, 2), (1, 2, 1)]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    units = draw(st.integers(1, 7))
    scale = draw(st.sampled_from([8, 20, 200]))
    boundary = generator.integers(0, 5, (len(counts), units + 1)).astype(float)
    boundary[:, [0, -1]] = 0
    return Fleet(
        counts,
        generator.integers(1, 10, (len(counts), units)).astype(float),
        boundary,
        generator.integers(0, 5, units),
        generator.integers(0, 4, units),
        tuple((scale + generator.integers(0, scale, len(counts))).tolist()),
        draw(st.sampled_from([1, 2, 8])),
    )


@settings(max_examples=80, derandomize=True, deadline=None)
@given(fleets())
def test_same_as_trying_all_orders_and_cuts(fleet: Fleet) -> None:
    found, best = fleet.planned(), fleet.brute_force(boundary=False)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert found.gap == 0
        assert found.seconds == pytest.approx(best, rel=1e-6)
        assert fleet.price(found.kinds, found.bounds, boundary=False) == pytest.approx(
            found.seconds, rel=1e-12
        )


@settings(max_examples=80, derandomize=True, deadline=None)
@given(fleets())
def test_with_fat_boundaries_the_optimum_lies_between_bound_and_answer(fleet: Fleet) -> None:
    found, best = fleet.planned(boundary=True), fleet.brute_force(boundary=True)
    if found is not None:
        assert found.bound_s <= best * (1 + 1e-6)
        assert best <= found.seconds * (1 + 1e-9)
        assert fleet.price(found.kinds, found.bounds, boundary=True) == pytest.approx(found.seconds)


@few
@given(fleets(), st.integers(0, 2))
def test_one_more_device_or_more_memory_never_hurts(fleet: Fleet, kind: int) -> None:
    at = kind % len(fleet.counts)
    plain = fleet.planned()
    counts = tuple(c + (t == at) for t, c in enumerate(fleet.counts))
    rooms = tuple(r + 7 * (t == at) for t, r in enumerate(fleet.rooms))
    for changes in ({"counts": counts}, {"rooms": rooms}):
        more = Fleet(**{**vars(fleet), **changes}).planned()
        if plain is not None:
            assert more is not None
            assert more.seconds <= plain.seconds * (1 + 1e-9)


@few
@given(fleets(), st.sampled_from([0.25, 1024.0]))
def test_scaling_times_scales(fleet: Fleet, factor: float) -> None:
    plain = fleet.planned()
    scaled = Fleet(**{**vars(fleet), "seconds": fleet.seconds * factor}).planned()
    assert (plain is None) == (scaled is None)
    if plain is not None and scaled is not None:
        assert scaled.seconds == pytest.approx(plain.seconds * factor, rel=1e-8)


@few
@given(fleets())
def test_the_names_of_kinds_do_not_matter(fleet: Fleet) -> None:
    turned = Fleet(
        fleet.counts[::-1],
        fleet.seconds[::-1],
        fleet.boundary,
        fleet.fixed,
        fleet.held,
        fleet.rooms[::-1],
        fleet.microbatches,
    ).planned()
    plain = fleet.planned()
    assert (plain is None) == (turned is None)
    if plain is not None and turned is not None:
        assert turned.seconds == pytest.approx(plain.seconds, rel=1e-8)


def test_the_device_with_most_memory_comes_first_when_activations_pile_up() -> None:
    """Two equal units, 4 in flight on the first stage of 2: only the larger device can hold two there."""
    units = np.array([10, 10])
    found = balance(
        (1, 1),
        np.ones((2, 2)),
        floor=lambda kind, behind: lowest_first(np.zeros(2, np.int64), units, (12, 20)[kind], behind + 1),
    )
    assert found is not None
    assert found.kinds == (1, 0)


def test_hundreds_of_devices_of_three_kinds_without_a_gap() -> None:
    seconds = np.random.default_rng(1).random(200) + 0.5
    found = balance((30, 30, 30), np.stack([seconds, 1.7 * seconds, 2.3 * seconds]), tolerance=1e-4)
    assert found is not None
    assert found.gap <= 1e-4
    assert sorted(found.bounds) == list(found.bounds)
