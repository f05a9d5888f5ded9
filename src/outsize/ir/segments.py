"""Segments: the pieces in which a stage recomputes those of its units that it does not keep.

    units     h.0.ln  h.0.fc  h.0.gelu  h.0.proj  h.1.ln  h.1.fc  head
    chosen            x       x         x         x       x
    segments         [h.0.fc .. h.0.proj]        [h.1.ln .. fc]

A segment is a longest run of chosen units within one block, so that little is computed anew at a time. A
block is the deepest numbered module around a unit that holds several units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from outsize.ir.names import prefixes

Run = tuple[int, int]


def blocks(names: Sequence[str]) -> list[str]:
    """The block of each unit, by its name; empty where it is in none. O(units x depth)."""
    around = [[p for p in prefixes(name) if p[-1].isdigit() and p != name] for name in names]
    sizes = Counter(p for found in around for p in found)
    return [next((p for p in found if sizes[p] > 1), "") for found in around]


def segments(block_of: Sequence[str], chosen: Collection[int]) -> tuple[Run, ...]:
    """(first, end) of each segment, in order; `block_of` as of `blocks`."""
    found: list[Run] = []
    for unit in sorted(chosen):
        if found and found[-1][1] == unit and block_of[unit] == block_of[unit - 1]:
            found[-1] = found[-1][0], unit + 1
        else:
            found.append((unit, unit + 1))
    return tuple(found)
