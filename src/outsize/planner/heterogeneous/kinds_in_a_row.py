"""Problem: in which order of the kinds, all groups of a kind in a row, and with which cuts, is the slowest
stage fastest, if stages wait for the messages of their neighbours?

Groups of a kind are neighbours in the cluster, so their messages stay in their node as far as they can. A
stage with the units [first, end) has the period

    F + B (or 2 F + B, recomputed) + message(first, stage before) + message(end, stage after)

and the first one waits for the gradients of weights that it shares with the last one instead of a message,
because under 1f1b the round trips through a chain of stages are paced by the mean of these sums. For a period
T stages are placed from the last one: of the first units that T and memory allow, the one from which the
stage before has least to do, its own message included. The least T is found by bisection, for each order of
the kinds.

Deviations: greedy, no optimum; how long a step takes to fill the pipeline is the same for all orders.
Complexity: O(orders p w) for each T: p stages, w units of the longest one. Oracle:
tests/unit/planner/heterogeneous/test_kinds_in_a_row.py tries all cuts of all orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, permutations
from math import inf
from typing import Final, NamedTuple, final

import numpy as np

from outsize.ir.hardware.links import Link
from outsize.planner.costs.collectives import messages_s
from outsize.planner.costs.unit_times import Seconds
from outsize.planner.heterogeneous.bounds import Fleet

# Bisection stops at this relative width, and gives up this many times above the first period.
PRECISE: Final = 1e-3
MOST: Final = 4.0
GROWTH: Final = 1.1


@final
class InARow(NamedTuple):
    """Holds the kind of each stage, the bounds, and the period of the slowest one."""

    kinds: tuple[int, ...]
    bounds: tuple[int, ...]
    period_s: float


@final
class KindsInARow:
    """Places the stages of one layout: `links` maps the kinds of stages to the link of each to the stage
    before it, which is the last one for the first; `message_bytes`, of shape (n + 1,), cross each cut, and
    come back to the first stage.
    """

    def __init__(
        self, fleet: Fleet, links: Callable[[Sequence[int]], Sequence[Link]], message_bytes: Seconds
    ) -> None:
        self._fleet, self._links, self._bytes = fleet, links, message_bytes
        self._known: dict[tuple[float, float, float], Seconds] = {}

    def best(self, least_s: float) -> InARow | None:
        """Returns the shortest period of all orders, from `least_s` on; None where none fits."""
        found = None
        for kinds in self._orders():
            hops, most_s = self._hops(kinds), inf if found is None else found.period_s * (1 - PRECISE)
            if most_s < inf and self._placed(kinds, hops, most_s) is None:
                continue
            found = self._shortest(kinds, hops, least_s, most_s) or found
        return found

    def period_s(self, kinds: Sequence[int], bounds: Sequence[int]) -> float:
        """Returns the period of the slowest stage of any arrangement; infinite where one does not fit."""
        hops, periods = self._hops(kinds), list[float]()
        for stage, (first, end) in enumerate(pairwise(bounds)):
            after = len(kinds) - 1 - stage
            options = (
                float(self._once(kinds[stage], again)[end] - self._once(kinds[stage], again)[first])
                for again in self._fleet.options
                if self._fleet.first_in_room(kinds[stage], again, after)[end] <= first
                and self._fleet.surely_fit(kinds[stage], again, after, (first, end))
            )
            waits_s = hops[stage][first] + hops[stage + 1][end]
            periods.append(float(min(options, default=inf) + waits_s))
        return max(periods)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Yields the kinds of the stages, all groups of a kind in a row."""
        counts = self._fleet.counts
        for order in permutations(kind for kind, count in enumerate(counts) if count):
            yield tuple(kind for kind in order for _ in range(counts[kind]))

    def _hops(self, kinds: Sequence[int]) -> list[Seconds]:
        """Returns the seconds of a message at each cut, before each stage and behind the last one."""
        closing, *others = self._links(kinds)
        back_s = float(self._message_s(closing, 0.0)[0])
        hops = (self._message_s(link, back_s) for link in others)
        return [self._message_s(closing, back_s), *hops, np.zeros_like(self._bytes)]

    def _message_s(self, link: Link, back_s: float) -> Seconds:
        """Returns the seconds of a message at each cut; at the first one `back_s`, or 0.0 for its own."""
        key = link.latency_s, link.bytes_per_s, back_s
        if key not in self._known:
            seconds = messages_s(link, self._bytes)
            seconds[0] = back_s or seconds[0]
            self._known[key] = seconds
        return self._known[key]

    def _once(self, kind: int, again: bool) -> Seconds:
        return self._seconds[kind, again]

    @cached_property
    def _seconds(self) -> dict[tuple[int, bool], Seconds]:
        kinds = range(len(self._fleet.counts))
        return {(t, again): self._fleet.once_s(t, again) for t in kinds for again in self._fleet.options}

    def _shortest(
        self, kinds: tuple[int, ...], hops: Sequence[Seconds], low_s: float, high_s: float
    ) -> InARow | None:
        """Returns the arrangement of one order with the least period; `high_s` can be met, or is infinite."""
        if high_s == inf:
            most_s, high_s = MOST * low_s, low_s
            while self._placed(kinds, hops, high_s) is None:
                low_s, high_s = high_s, high_s * GROWTH
                if high_s > most_s:
                    return None
        while high_s > low_s * (1 + PRECISE):
            middle_s = (low_s + high_s) / 2
            met = self._placed(kinds, hops, middle_s) is not None
            low_s, high_s = (low_s, middle_s) if met else (middle_s, high_s)
        placed = self._placed(kinds, hops, high_s)
        assert placed is not None, "this period can be met"
        return placed

    def _placed(self, kinds: Sequence[int], hops: Sequence[Seconds], period_s: float) -> InARow | None:
        """Returns the stages where none has a longer period; groups at the front may be idle, and those of a
        kind of which one takes no unit where it stands, since those before it have less room.
        """
        bounds = [len(self._bytes) - 1]
        for stage in reversed(range(len(kinds))):
            first = self._first(kinds, stage, hops, bounds[-1], period_s)
            if first is None:
                rest = [kind for kind in kinds[: stage + 1] if kind != kinds[stage]] + [*kinds[stage + 1 :]]
                return self._placed(rest, self._hops(rest), period_s) if rest else None
            bounds.append(first)
            if first == 0:
                return InARow(tuple(kinds[stage:]), tuple(reversed(bounds)), period_s)
        return None

    def _first(
        self, kinds: Sequence[int], stage: int, hops: Sequence[Seconds], end: int, period_s: float
    ) -> int | None:
        """Returns the first unit of a stage that ends with this one; None where it has room for none."""
        kind, after, arriving = kinds[stage], len(kinds) - 1 - stage, hops[stage]
        limit_s, best = period_s - float(hops[stage + 1][end]), None
        before = self._once(kinds[max(0, stage - 1)], self._fleet.options[-1])
        for again in self._fleet.options:
            once = self._once(kind, again)
            nearest = int(np.searchsorted(once, once[end] - limit_s))
            low = max(nearest, int(self._fleet.first_in_room(kind, again, after)[end]))
            window = slice(low, end)
            allowed = once[end] - once[window] + arriving[window] <= limit_s
            allowed &= self._fleet.surely_fit(kind, again, after, (window, end))
            if not allowed.any():
                continue
            left_s = np.where(allowed, before[window] + arriving[window], inf)
            place = 0 if low == 0 and allowed[0] else int(np.argmin(left_s))
            reached = (float(before[low + place]), low + place)
            best = reached if best is None else min(best, reached)
        return None if best is None else best[1]
