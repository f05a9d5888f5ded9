"""Seconds that memory wants computed twice: by hand, and below every choice of units."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.ir.plan import Axes, ScheduleName
from outsize.planner.bounds.recompute import recompute_s, storable_bytes
from outsize.planner.layout.layout import Layout


@pytest.mark.parametrize(
    ("schedule", "held"), [("1f1b", 12 * (1 + 1 / 2 + 1 / 3)), ("gpipe", 3 * 12 / 8), ("naive", 36)]
)
def test_what_three_devices_hold_of_a_microbatch(schedule: ScheduleName, held: float) -> None:
    layout = Layout(Axes(pp=3), 3, schedule, 8, 8)
    assert storable_bytes(layout, [12, 12, 12]) == pytest.approx(held)


def test_the_largest_room_counts_where_least_is_in_flight() -> None:
    assert storable_bytes(Layout(Axes(pp=2), 2, "1f1b", 4, 4), [10, 30]) == 30 + 10 / 2


def test_the_cheapest_by_the_byte_go_first() -> None:
    seconds, saved = np.array([1.0, 1.0, 5.0]), np.array([10, 40, 50])
    assert recompute_s(seconds, saved, 100.0) == 0.0
    assert recompute_s(seconds, saved, 80.0) == pytest.approx(0.5)
    assert recompute_s(seconds, saved, 55.0) == pytest.approx(1.5)
    assert recompute_s(seconds, saved, -1.0) == pytest.approx(7.0)


units = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6)


@given(units, st.integers(0, 40))
def test_no_choice_of_units_is_cheaper(rows: list[tuple[int, int]], held: int) -> None:
    seconds, saved = np.array([float(s) for s, _ in rows]), np.array([b for _, b in rows])
    fitting = (
        sum(s for (s, _), again in zip(rows, choice, strict=True) if again)
        for choice in product((False, True), repeat=len(rows))
        if sum(b for (_, b), again in zip(rows, choice, strict=True) if not again) <= held
    )
    assert recompute_s(seconds, saved, held) <= min(fitting) + 1e-9
