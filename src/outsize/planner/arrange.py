"""Problem: cut n units into runs on unequal devices, where what a run costs depends on its neighbours too.

Links between two kinds of devices differ, so a run's price takes the kinds before and behind it:

    minimise  max over stages of  price(before, kind, behind, stages behind)[first, end]

over all orders of at most `counts[t]` devices of kind t and all cuts. The state is how many of each kind are
used by the stages laid so far, from the back; the kind of the foremost of them; and the kind promised to be
before it. For each state a vector over cuts holds the least bottleneck, so a further cut with a fatter
boundary costs nothing to remember and the result is exact for any price.

Bokhari's dynamic program (IEEE Trans. Computers 37(1), 1988) with the devices' kinds in the state. For
hundreds of devices see unequal.py. Complexity: O(S k^3 n^2) for S = product of (count + 1) and k kinds.
Oracle: tests/unit/planner/test_arrange.py tries all orders and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.planner.unequal import Arrangement

NOBODY = -1
"""The kind before the first stage and behind the last."""
PairPrice = Callable[[int, int, int, int], NDArray[np.float64]]
"""(kind before, kind, kind behind, stages behind) -> seconds of run [first, end), infinite where it does not
fit; shape (n + 1, n + 1)."""


@final
@dataclass(frozen=True)
class _State:
    """`used[t]` devices of kind t; the foremost stage is of kind `front`, the next one of kind `promised`."""

    used: tuple[int, ...]
    promised: int
    front: int


@final
@dataclass(frozen=True, eq=False)
class _Found:
    """For each cut the least bottleneck of the stages behind it; from which state, and the end of the run."""

    best: NDArray[np.float64]
    source: _State | None
    end: NDArray[np.intp]


def arrange(
    counts: Sequence[int], units: int, price: PairPrice, stages: int | None = None
) -> Arrangement | None:
    """The order of kinds and the cuts with the fastest slowest stage; None when none is finite.

    `stages`: exactly so many; None: as many as is best.
    """
    table = lru_cache(maxsize=64)(price)
    found: dict[_State, list[_Found]] = {}
    for state in _starts(counts, units, found):
        _extend(state, counts, found, table)
    wanted = [s for s in found if s.promised == NOBODY and sum(s.used) and stages in (None, sum(s.used))]
    best = min(wanted, key=lambda s: float(_least(found[s])[0]), default=None)
    if best is None or not np.isfinite(_least(found[best])[0]):
        return None
    kinds, bounds = _trace(best, found)
    seconds = float(_least(found[best])[0])
    return Arrangement(kinds, bounds, seconds, seconds)


def _starts(counts: Sequence[int], units: int, found: dict[_State, list[_Found]]) -> Iterator[_State]:
    """All states, those with fewer devices first; nothing is laid in the first ones."""
    nothing = np.full(units + 1, np.inf)
    nothing[units] = 0.0
    kinds = range(len(counts))
    for promised in kinds:
        state = _State((0,) * len(counts), promised, NOBODY)
        found[state] = [_Found(nothing, None, np.zeros(units + 1, np.intp))]
    for used in sorted(product(*(range(c + 1) for c in counts)), key=sum):
        fronts = [t for t in kinds if used[t]] if any(used) else [NOBODY]
        for promised, front in product(kinds, fronts):
            state = _State(used, promised, front)
            if state in found:
                yield state


def _extend(
    state: _State, counts: Sequence[int], found: dict[_State, list[_Found]], price: PairPrice
) -> None:
    """Lay the promised stage, before which comes any kind that is left, or nobody."""
    kind = state.promised
    if state.used[kind] == counts[kind]:
        return
    used = tuple(u + (t == kind) for t, u in enumerate(state.used))
    behind = _least(found[state])
    for before in (NOBODY, *(t for t in range(len(counts)) if used[t] < counts[t])):
        slowest = np.maximum(behind[None, :], price(before, kind, state.front, sum(state.used)))
        slowest[np.tril_indices(len(behind))] = np.inf
        end = np.argmin(slowest, axis=1)
        best = slowest[np.arange(len(behind)), end]
        found.setdefault(_State(used, before, kind), []).append(_Found(best, state, end))


def _least(ways: Sequence[_Found]) -> NDArray[np.float64]:
    return np.min([way.best for way in ways], axis=0)


def _trace(state: _State, found: dict[_State, list[_Found]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    kinds: list[int] = []
    bounds = [0]
    while state.front != NOBODY:
        way = min(found[state], key=lambda w: float(w.best[bounds[-1]]))
        assert way.source is not None, "a stage has been laid"
        kinds.append(state.front)
        bounds.append(int(way.end[bounds[-1]]))
        state = way.source
    return tuple(kinds), tuple(bounds)
