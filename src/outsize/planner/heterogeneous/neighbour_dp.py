"""Problem: cut n units into runs on unequal devices, where the cost of a run depends on its neighbours too.

Links between two kinds of devices differ, so a run's price takes the kinds before and behind it:

    minimise  max over stages of  price(before, kind, behind, stages behind)[first, end]

over all orders of at most `counts[t]` devices of kind t and all cuts. The state is how many of each kind are
used by the stages placed so far, from the last one; the kind of the foremost of them; and the kind that will
be before it. For each state a vector over cuts holds the least bottleneck, so a longer run whose cut carries
more bytes is remembered at no cost and the result is exact for any price.

It is Bokhari's dynamic program (IEEE Trans. Computers 37(1), 1988) with the devices' kinds in the state. For
hundreds of devices see probe.py. Complexity: O(S k^3 n^2) for S = product of (count + 1) and k kinds. Oracle:
tests/unit/planner/heterogeneous/test_neighbour_dp.py tries all orders and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.heterogeneous.probe import Arrangement

NOBODY = -1
"""Stands for the kind before the first stage and after the last."""
PairPrice = Callable[[int, int, int, int], NDArray[np.float64]]
"""Maps (kind before, kind, kind after, stages after) to the seconds of run [first, end), infinite where it
does not fit; shape (n + 1, n + 1).
"""


@final
@dataclass(frozen=True)
class _State:
    """Identifies a state: `used[t]` devices of kind t; the foremost stage is of kind `front`, the next one
    will be of kind `promised`.
    """

    used: tuple[int, ...]
    promised: int
    front: int


@final
@dataclass(frozen=True, eq=False)
class _DpEntry:
    """Holds for each cut the least bottleneck of the stages after it, the state it comes from, and the run's
    end.
    """

    best: NDArray[np.float64]
    source: _State | None
    end: NDArray[np.intp]


def arrange(
    counts: Sequence[int], units: int, price: PairPrice, stages: int | None = None
) -> Arrangement | None:
    """Returns the order of kinds and the cuts with the fastest slowest stage; None when none is finite.

    `stages`: exactly this many; None: as many as is best.
    """
    table = lru_cache(maxsize=64)(price)
    entries: dict[_State, list[_DpEntry]] = {}
    for state in _starts(counts, units, entries):
        _extend(state, counts, entries, table)
    complete = [s for s in entries if s.promised == NOBODY and sum(s.used) and stages in (None, sum(s.used))]
    best = min(complete, key=lambda s: float(_least(entries[s])[0]), default=None)
    if best is None or not np.isfinite(_least(entries[best])[0]):
        return None
    kinds, bounds = _trace(best, entries)
    seconds = float(_least(entries[best])[0])
    return Arrangement(kinds, bounds, seconds, seconds)


def _starts(counts: Sequence[int], units: int, entries: dict[_State, list[_DpEntry]]) -> Iterator[_State]:
    """Yields all states, those with fewer devices first; the first ones have no stages."""
    nothing = np.full(units + 1, np.inf)
    nothing[units] = 0.0
    kinds = range(len(counts))
    for promised in kinds:
        state = _State((0,) * len(counts), promised, NOBODY)
        entries[state] = [_DpEntry(nothing, None, np.zeros(units + 1, np.intp))]
    for used in sorted(product(*(range(c + 1) for c in counts)), key=sum):
        fronts = [t for t in kinds if used[t]] if any(used) else [NOBODY]
        for promised, front in product(kinds, fronts):
            state = _State(used, promised, front)
            if state in entries:
                yield state


def _extend(
    state: _State, counts: Sequence[int], entries: dict[_State, list[_DpEntry]], price: PairPrice
) -> None:
    """Places the promised stage, before which any remaining kind comes, or none."""
    kind = state.promised
    if state.used[kind] == counts[kind]:
        return
    used = tuple(u + (t == kind) for t, u in enumerate(state.used))
    later_s = _least(entries[state])
    for before in (NOBODY, *(t for t in range(len(counts)) if used[t] < counts[t])):
        slowest = np.maximum(later_s[None, :], price(before, kind, state.front, sum(state.used)))
        slowest[np.tril_indices(len(later_s))] = np.inf
        end = np.argmin(slowest, axis=1)
        best = slowest[np.arange(len(later_s)), end]
        entries.setdefault(_State(used, before, kind), []).append(_DpEntry(best, state, end))


def _least(entries: Sequence[_DpEntry]) -> NDArray[np.float64]:
    return np.min([entry.best for entry in entries], axis=0)


def _trace(state: _State, entries: dict[_State, list[_DpEntry]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kinds: list[int] = []
    bounds = [0]
    while state.front != NOBODY:
        entry = min(entries[state], key=lambda w: float(w.best[bounds[-1]]))
        assert entry.source is not None, "a stage has been placed"
        kinds.append(state.front)
        bounds.append(int(entry.end[bounds[-1]]))
        state = entry.source
    return tuple(kinds), tuple(bounds)
