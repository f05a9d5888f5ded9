"""Problem: how many seconds of forward have to be computed twice, whatever the cuts are, because of memory?

On a device of R bytes, of which f are weights and states, and whose stage has w microbatches in flight, at
most (R - f) / w of the bytes that a microbatch keeps for its backward can be there. Which stage has how much
of the weights is open: least is lost where most are in flight. What all devices of a pipeline cannot hold has
to be computed anew, at least the part that is cheapest by the byte: a knapsack in fractions (Dantzig 1957). A
bound from below, for gradients and all that comes and goes take room as well.

Symbols: w = min(p - s, m) under 1f1b, zero-bubble and interleaved, m under gpipe, 1 under naive.
Complexity: O(n log n). Oracle: tests/unit/planner/test_twice.py, and test_joint.py: no plan is faster than
its floor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outsize.planner.layout import Layout


def held_bytes(layout: Layout, rooms: Sequence[int], fixed: int = 0) -> float:
    """Of what a microbatch keeps, the most that all devices of the pipeline can hold beside `fixed` bytes.

    `rooms` of the devices, or of more.
    """
    p, m = layout.axes.pp, layout.microbatches
    flying = {"naive": [1] * p, "gpipe": [m] * p}.get(layout.schedule, [min(p - r, m) for r in range(p)])
    ranked, counts = sorted(rooms, reverse=True)[:p], sorted(flying)
    held = sum(room / count for room, count in zip(ranked, counts, strict=True))
    for room, count in zip(ranked, reversed(counts), strict=True):
        taken = min(room, fixed)
        held, fixed = held - taken / count, fixed - taken
    return held


def twice_s(forward_s: NDArray[np.float64], saved: NDArray[np.int64], held: float) -> float:
    """Seconds of the units' forwards that a microbatch needs twice when only `held` of its bytes fit.

    Both of shape (n,).
    """
    excess = float(saved.sum()) - held
    keeping = saved > 0
    if excess <= 0 or not keeping.any():
        return 0.0
    seconds, sizes = forward_s[keeping], saved[keeping].astype(float)
    order = np.argsort(seconds / sizes, kind="stable")
    reached = np.concatenate(([0.0], np.cumsum(sizes[order])))
    spent = np.concatenate(([0.0], np.cumsum(seconds[order])))
    return float(np.interp(min(excess, reached[-1]), reached, spent))
