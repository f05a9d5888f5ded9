"""The largest size that fits equals that of asking every size, by few answers."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.planner.fit.largest import Filled, largest_fitting


class Asked:
    """Counts the sizes that were asked for; `shares[size - 1]` is how full the device is."""

    def __init__(self, shares: list[float], known: bool = True) -> None:
        self.shares, self.known, self.sizes = shares, known, list[int]()

    def __call__(self, size: int) -> Filled:
        self.sizes.append(size)
        share = self.shares[size - 1]
        return Filled(share <= 1, share if self.known or share <= 1 else inf)

    @property
    def largest(self) -> int:
        return sum(share <= 1 for share in self.shares)


@given(st.lists(st.floats(0.001, 3), min_size=1, max_size=60).map(sorted), st.booleans(), st.data())
def test_every_monotone_question(shares: list[float], known: bool, data: st.DataObject) -> None:
    asked = Asked(shares, known)
    start = data.draw(st.integers(0, asked.largest))
    assert largest_fitting(asked, len(shares), known=start) == asked.largest
    if 0 < asked.largest < len(shares):
        assert {asked.largest, asked.largest + 1} <= {*asked.sizes, start}


@pytest.mark.parametrize(
    ("fixed", "each", "most"), [(0.2, 0.0083, 4096), (0.9, 0.001, 4096), (0.0, 1e-5, 1 << 20)]
)
def test_affine_bytes_take_few_answers(fixed: float, each: float, most: int) -> None:
    asked = Asked([fixed + each * size for size in range(1, most + 1)])
    assert largest_fitting(asked, most) == asked.largest
    assert len(asked.sizes) <= 7


def test_where_the_least_does_not_fit() -> None:
    assert largest_fitting(Asked([1.5, 2.0]), 2) == 0


def test_bytes_that_jump_take_no_more_than_halving_twice_as_often() -> None:
    asked = Asked([0.5 + 1e-9 * size + (size > 777) for size in range(1, 4097)])
    assert largest_fitting(asked, 4096) == 777
    assert len(asked.sizes) <= 2 * 12 + 12
