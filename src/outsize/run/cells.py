"""Cells: where messages of a rank wait between two of its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from outsize.run.transport import Pending

Cell = list[Any]  # one item: what came in or is about to leave, a Pending, or MISSING
MISSING: Final = object()


def take(cell: Cell, pends: bool, keep: bool, held: list[Pending]) -> Any:
    """The message; one that `pends` is waited for, and its receive goes to `held` unless it is to stay."""
    found = cell[0]
    if pends:
        pending, found = found, found.wait()
        if not keep:
            held.append(pending)
    cell[0] = found if keep else MISSING
    return found


def ready(wanted: Sequence[tuple[Cell, bool]]) -> Callable[[], bool]:
    """Whether all of these are there, or may be waited for."""
    return lambda: all(c[0] is not MISSING and (not pends or c[0].ready()) for c, pends in wanted)


def as_it_is(given: Any) -> Any:
    """Of what stays."""
    return given
