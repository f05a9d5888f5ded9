"""Calibration finds multipliers that it knows to be there, and nothing that it cannot know."""

from __future__ import annotations

import numpy as np
import pytest
from calibrate import Vector, fit

PARTS = np.array([[1.0, 0.1], [0.2, 1.0], [0.7, 0.7], [2.0, 0.3], [0.1, 3.0], [1.5, 1.0]])
TRUE = np.array([1.4, 0.6])
PRIOR, WIDE = np.ones(2), np.full(2, 1.0)


def seconds(multipliers: Vector) -> Vector:
    """A cost model of two parts."""
    return PARTS @ multipliers


def test_known_multipliers_are_found() -> None:
    assert fit(seconds, seconds(TRUE), PRIOR, WIDE).multipliers == pytest.approx(TRUE, rel=2e-3)


def test_one_wrong_measurement_moves_little() -> None:
    measured = seconds(TRUE)
    measured[2] *= 3
    assert fit(seconds, measured, PRIOR, WIDE).multipliers == pytest.approx(TRUE, rel=0.06)


def test_what_no_row_informs_stays_at_the_prior() -> None:
    blind = np.array([[1.0, 0.0], [2.0, 0.0]])
    found = fit(lambda x: blind @ x, blind @ TRUE, np.array([1.0, 0.9]), WIDE).multipliers
    assert found == pytest.approx([1.4, 0.9], rel=2e-3)
    assert fit(seconds, np.zeros(0), PRIOR, WIDE).multipliers == pytest.approx(PRIOR)


def test_a_spread_of_zero_keeps_a_multiplier() -> None:
    found = fit(seconds, seconds(TRUE), np.array([1.4, 1.0]), np.array([1.0, 0.0])).multipliers
    assert found[1] == 1.0


def test_few_rows_with_a_narrow_prior_do_not_overfit() -> None:
    noisy = seconds(TRUE) * np.array([1.02, 0.98, 1.03, 0.97, 1.01, 0.99])
    near = fit(lambda x: PARTS[:1] @ x, noisy[:1], TRUE, np.full(2, 0.05)).multipliers
    assert near == pytest.approx(TRUE, rel=0.05)


def test_the_better_reading_has_the_lower_cost() -> None:
    right = fit(seconds, seconds(TRUE), PRIOR, WIDE).cost
    wrong = fit(lambda x: PARTS[::-1] @ x, seconds(TRUE), PRIOR, WIDE).cost
    assert right < wrong
