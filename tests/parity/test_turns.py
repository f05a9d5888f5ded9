"""The slices of `make test`: what they hold, and that the rest stays in `make parity`."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from turns import covering_rows, in_pairs, in_turns


def usual(params: list[Any]) -> list[tuple[Any, ...]]:
    """The rows that run without --all."""
    return [p.values for p in params if not any(mark.name == "full" for mark in p.marks)]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2, 2), (4, 3, 3), (6, 4, 2), (5, 4, 3, 2), (2, 2, 2, 2, 2)])
def test_each_two_values_of_two_factors_stand_together(sizes: tuple[int, ...]) -> None:
    rows = covering_rows(sizes)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(
            product(range(sizes[one]), range(sizes[other]))
        )
    largest, second = sorted(sizes)[-1:-3:-1]
    assert largest * second <= len(rows) <= 1.5 * largest * second + 2
    assert rows == covering_rows(sizes)


def test_a_row_that_is_left_out_is_missed() -> None:
    """The rows of the smallest array are all needed."""
    rows = covering_rows((2, 2, 2))
    for left_out in rows:
        pairs = {pair for row in rows if row != left_out for pair in combinations(enumerate(row), 2)}
        assert len(pairs) < 12


def test_the_whole_product_stays_reachable() -> None:
    params = in_pairs(["a", "b", "c"], [1, 2], [True, False])
    assert [p.values for p in params] == list(product(["a", "b", "c"], [1, 2], [True, False]))
    assert params[0].id == "a-1-True"
    assert len(usual(params)) == 6
    assert {row[::2] for row in usual(params)} == set(product(["a", "b", "c"], [True, False]))


def test_each_row_meets_columns_by_turns() -> None:
    params = in_turns(["a", "b"], [1, 2, 3], each=2)
    assert len(params) == 6
    assert usual(params) == [("a", 1), ("a", 2), ("b", 1), ("b", 3)]
