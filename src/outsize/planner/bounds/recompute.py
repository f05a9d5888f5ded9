"""Problem: how many seconds of forward must be recomputed, whatever the cuts are, because of memory?

On a device of R bytes, of which f are weights and states, and whose stage has w microbatches in flight, at
most (R - f) / w of the bytes that a microbatch saves for its backward fit. Which stage holds how much of the
weights is open: the least is lost where most microbatches are in flight. What all devices of a pipeline
cannot hold has to be recomputed, at least the part with the fewest seconds per byte: a fractional knapsack
(Dantzig 1957). It is a lower bound, because gradients and temporaries need memory as well.

Symbols: w = min(p - s, m) under 1f1b, zero-bubble and interleaved, m under gpipe, 1 under naive. Complexity:
O(n log n). Oracle: tests/unit/planner/bounds/test_bounds_recompute.py, and test_joint.py: no plan is faster
than its lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outsize.planner.layout.layout import Layout
from outsize.schedules.families import family_of


def storable_bytes(layout: Layout, rooms: Sequence[int], fixed: int = 0) -> float:
    """Returns how many saved bytes of one microbatch all devices of the pipeline can hold besides `fixed`
    bytes.

    `rooms`: usable bytes of the devices, or of more.
    """
    p, m = layout.axes.pp, layout.microbatches
    family = family_of(layout.schedule)
    in_flight = [family.in_flight(p - rank, m) for rank in range(p)]
    ranked, counts = sorted(rooms, reverse=True)[:p], sorted(in_flight)
    held = sum(room / count for room, count in zip(ranked, counts, strict=True))
    for room, count in zip(ranked, reversed(counts), strict=True):
        taken = min(room, fixed)
        held, fixed = held - taken / count, fixed - taken
    return held


def recompute_s(forward_s: NDArray[np.float64], saved: NDArray[np.int64], held: float) -> float:
    """Returns the forward seconds that a microbatch needs again when only `held` of its saved bytes fit.

    `forward_s` and `saved` have shape (n,).
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
