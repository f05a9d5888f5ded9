"""Which rows of a product does `make test` run? The rest is marked `full` and runs in `make parity`.

`in_turns` lets each row meet a few columns, all columns by turns. `in_pairs` runs a covering array of
strength two: each value of a factor meets each value of each other factor at least once.

Source: the greedy construction, one row at a time, of D. M. Cohen, S. R. Dalal, M. L. Fredman and
G. C. Patton, "The AETG System: An Approach to Testing Based on Combinatorial Design", IEEE TSE 23(7), 1997,
https://doi.org/10.1109/32.605761. Deviation: each
new row is the best of the whole product, and the first of equals, so that the rows are always the same.
Complexity: O(r p f^2) for r chosen rows, p rows of the product and f factors; products here have less than a
thousand rows. Oracle: tests/parity/test_turns.py counts the pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def in_turns(rows: Iterable[Any], columns: Iterable[Any], each: int) -> list[Any]:
    """Returns all pairs for `parametrize(("row", "column"), ...)`; all but `each` of every row are `full`.

    A row may be a `pytest.param` of one value, whose marks its pairs have.
    """
    known = tuple(columns)
    pairs = []
    for number, row in enumerate(rows):
        taken = {(number * each + turn) % len(known) for turn in range(each)}
        for place, column in enumerate(known):
            marks = [*getattr(row, "marks", ()), *([] if place in taken else [pytest.mark.full])]
            value = row.values[0] if isinstance(row, ParameterSet) else row
            pairs.append(pytest.param(value, column, id=f"{_name(row)}-{_name(column)}", marks=marks))
    return pairs


def covering_rows(sizes: Iterable[int]) -> list[tuple[int, ...]]:
    """Returns rows of places, one place below each size, in which each two places of two factors stand
    together at least once.
    """
    rows = list(product(*map(range, sizes)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def in_pairs(*factors: Iterable[Any]) -> list[Any]:
    """Returns the product for `parametrize(("first", "second", ...), ...)`; rows outside of the covering
    array are `full`.
    """
    known = [tuple(values) for values in factors]
    taken = set(covering_rows(map(len, known)))
    rows = []
    for places in product(*(range(len(values)) for values in known)):
        row = [values[place] for values, place in zip(known, places, strict=True)]
        marks = [] if places in taken else [pytest.mark.full]
        rows.append(pytest.param(*row, id="-".join(map(_name, row)), marks=marks))
    return rows


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """The pairs of a row, each place with the number of its factor."""
    return set(combinations(enumerate(row), 2))


def _name(value: Any) -> str:
    if isinstance(value, ParameterSet):
        return str(value.id)
    named = getattr(value, "name", getattr(value, "__name__", value))
    return str(named).replace(" ", "_")
