"""Groups the recomputed units of a stage into segments, which are recomputed one at a time.

    units     h.0.ln  h.0.fc  h.0.gelu  h.0.proj  h.1.ln  h.1.fc  head
    chosen            x       x         x         x       x
    segments         [h.0.fc .. h.0.proj]        [h.1.ln .. fc]

A segment is a longest run of chosen units within one block, so that little is recomputed at a time. A block
is the deepest numbered module around a unit that holds several units. Where more than LONG units follow each
other in one, or outside of all, about the square root of them form one block (Chen et al. 2016, arXiv
1604.06174, sec. 4.1): so many boundaries are saved, and so many units recomputed at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from math import isqrt
from typing import Final

from outsize.ir.units.names import prefixes

Run = tuple[int, int]
LONG: Final = 24


def blocks(names: Sequence[str]) -> list[str]:
    """Returns the block of each unit of a model, by its name; empty where it is in none. O(units x depth)."""
    return [part for module, row in groupby(numbered(names)) for part in _parts(module, len(list(row)))]


def numbered(names: Sequence[str]) -> list[str]:
    """Returns the deepest numbered module of several units around each unit; empty where none is."""
    around = [[p for p in prefixes(name) if p[-1:].isdigit() and p != name] for name in names]
    sizes = Counter(p for candidates in around for p in candidates)
    return [next((p for p in candidates if sizes[p] > 1), "") for candidates in around]


def _parts(module: str, units: int) -> list[str]:
    """Returns the blocks of a row of units in one module."""
    if units <= LONG:
        return [module] * units
    return [f"{module}#{unit // (isqrt(units - 1) + 1)}" for unit in range(units)]


def segments(block_of: Sequence[str], chosen: Collection[int]) -> tuple[Run, ...]:
    """Returns (first, end) of each segment, in order; `block_of` is what `blocks` returns."""
    runs: list[Run] = []
    for unit in sorted(chosen):
        if runs and runs[-1][1] == unit and block_of[unit] == block_of[unit - 1]:
            runs[-1] = runs[-1][0], unit + 1
        else:
            runs.append((unit, unit + 1))
    return tuple(runs)
