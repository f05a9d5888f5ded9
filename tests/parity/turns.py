"""A slice of a product for `make test`: each row meets a few columns, all columns by turns.

The rest of the product is marked `full` and runs in `make parity`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turns(rows: Iterable[Any], columns: Iterable[Any], each: int) -> list[Any]:
    """Returns all pairs for `parametrize(("row", "column"), ...)`; all but `each` of every row are `full`."""
    known = tuple(columns)
    pairs = []
    for number, row in enumerate(rows):
        taken = {(number * each + turn) % len(known) for turn in range(each)}
        for place, column in enumerate(known):
            marks = [] if place in taken else [pytest.mark.full]
            pairs.append(pytest.param(row, column, id=f"{_name(row)}-{_name(column)}", marks=marks))
    return pairs


def _name(value: Any) -> str:
    return str(getattr(value, "name", value)).replace(" ", "_")
