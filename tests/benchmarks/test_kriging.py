"""Kriging says what one solve says, looks at no more rows than it may, and at those that decide."""

from __future__ import annotations

import numpy as np
import pytest
from kriging import covariance, expected_loss, krige
from numpy.typing import NDArray

NOISE = 0.01
POINTS = np.random.default_rng(7).uniform(0, 3, (12, 2))
TRUE = np.random.default_rng(8).normal(0, 0.1, 12)
MEAN = np.linspace(0, 0.3, 12)


def doubt(spread: NDArray[np.float64] | float = 0.1) -> NDArray[np.float64]:
    """Of twelve rows in two dimensions."""
    return covariance(POINTS, (1.0, 2.0), np.broadcast_to(spread, 12))


def test_rows_alike_in_all_dimensions_vary_together() -> None:
    points = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 4.0], [99.0, 0.0]])
    found = covariance(points, (1.0, 2.0), np.array([1.0, 2.0, 1.0, 1.0, 1.0]))[0]
    assert found == pytest.approx([1.0, 2.0, np.exp(-1), np.exp(-2), 0.0])


def test_the_mean_is_that_of_one_solve() -> None:
    told, seen = krige(MEAN, doubt(), [range(6), range(6, 12)], lambda i: MEAN[i] + TRUE[i], 4, NOISE)
    whole, among = doubt()[:, seen], doubt()[np.ix_(seen, seen)] + NOISE**2 * np.eye(4)
    assert told == pytest.approx(MEAN + whole @ np.linalg.solve(among, TRUE[seen]))
    assert np.abs(told - MEAN - TRUE)[seen] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize(("count", "looked"), [(0, 0), (3, 3), (99, 12)])
def test_no_row_is_looked_at_but_those_it_names(count: int, looked: int) -> None:
    asked: list[int] = []

    def measure(row: int) -> float:
        asked.append(row)
        return 0.0

    told, seen = krige(MEAN, doubt(), [range(12)], measure, count, NOISE)
    assert seen == asked
    assert len(set(seen)) == looked
    assert (told == MEAN).all() == (count == 0)


def test_a_close_choice_is_measured_and_a_clear_one_is_not() -> None:
    mean = np.array([0.0, 0.01, 0.0, 9.0])
    apart = 0.01 * np.eye(4)
    assert sorted(krige(mean, apart, [[0, 1], [2, 3]], lambda i: mean[i], 2, NOISE)[1]) == [0, 1]


def test_of_equal_choices_the_doubtful_one_is_measured() -> None:
    sure_and_not = np.diag([0.001, 0.001, 0.1, 0.1])
    assert krige(np.zeros(4), sure_and_not, [[0, 1], [2, 3]], lambda _: 0.0, 1, NOISE)[1][0] in (2, 3)


def test_many_rivals_do_not_outweigh_a_closer_one() -> None:
    mean = np.array([0.0, 0.02, *[0.0] * 1, *[0.03] * 9])
    seen = krige(mean, 0.01 * np.eye(12), [[0, 1], range(2, 12)], lambda i: mean[i], 1, NOISE)[1]
    assert seen[0] in (0, 1)


def test_without_a_choice_the_row_that_tells_most_is_measured() -> None:
    points = np.array([[0.0], [1.0], [2.0], [50.0]])
    alike = covariance(points, (2.0,), np.full(4, 0.1))
    assert krige(np.zeros(4), alike, [], lambda _: 0.0, 1, NOISE)[1] == [1]


def test_rows_that_differ_in_nothing_decide_nothing() -> None:
    told, seen = krige(np.zeros(3), np.full((3, 3), 0.01), [range(3)], lambda _: 0.2, 2, NOISE)
    assert len(seen) == 2
    assert told == pytest.approx(0.2, rel=0.01)


def test_the_expected_loss_is_the_mean_of_sampled_losses() -> None:
    ahead, spread = np.array([0.0, 0.1, 0.3]), np.array([0.1, 0.1, 0.2])
    drawn = np.random.default_rng(9).normal(ahead, spread, (200_000, 3))
    assert expected_loss(ahead, spread) == pytest.approx(np.maximum(-drawn, 0).mean(axis=0), rel=0.02)
