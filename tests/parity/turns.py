"""A slice of a product for `make test`: each row meets a few columns, all columns by turns.

The rest of the product is marked `full` and runs in `make parity`.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def _name(value: Any) -> str:
    if isinstance(value, ParameterSet):
        return str(value.id)
    return str(getattr(value, "name", value)).replace(" ", "_")
