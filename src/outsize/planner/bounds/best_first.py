"""Problem: of many choices with lower bounds, which is looked at next, if a sharper bound costs more time?

Choices wait by their lower bounds. The one with the least bound has it sharpened; where it then exceeds
another's it waits on, and where it is sharp and still the least it is taken. So a bound is sharpened only
while its choice could be the best one, and the choices that are taken come by ascending sharp bounds. Who
takes them stops when `least_s` exceeds the best that was found.

Source: best-first branch and bound, Land and Doig, Econometrica 28(3), 1960. Deviation: bounds in stages.
Complexity: O(log n) for each bound. Oracle:
tests/unit/planner/bounds/test_best_first.py sharpens all bounds and sorts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple, final


@final
class Bounded(NamedTuple):
    """Is a choice, by its number, with a lower bound of its seconds; `is_sharp`: it is sharpened no further.

    Of equal bounds a blunt one comes first, since what is sharp may be taken only where nothing else is less.
    """

    least_s: float
    is_sharp: bool
    number: int


Sharpened = Callable[[Bounded, float], Bounded]
"""Maps a choice and the least bound of the others to the choice with a bound that is no less."""


@final
class BestFirst:
    """Holds choices that wait, by their lower bounds."""

    def __init__(self, least_s: Sequence[float], sharpened: Sharpened) -> None:
        """Takes the first bounds of all choices, and the function that sharpens one."""
        self._sharpened = sharpened
        self._queue = [Bounded(bound_s, False, number) for number, bound_s in enumerate(least_s)]
        heapify(self._queue)

    @property
    def is_empty(self) -> bool:
        """Returns whether nothing waits."""
        return not self._queue

    @property
    def least_s(self) -> float:
        """Returns the least bound; infinite where nothing waits."""
        return self._queue[0].least_s if self._queue else inf

    @property
    def waiting(self) -> Sequence[Bounded]:
        """Returns all that wait, in no order."""
        return tuple(self._queue)

    def pop(self) -> Bounded | None:
        """Takes the choice with the least bound where that is sharp; otherwise sharpens it and returns None,
        so that who asks can stop in between.
        """
        least = heappop(self._queue)
        if least.is_sharp:
            return least
        heappush(self._queue, self._sharpened(least, self.least_s))
        return None
