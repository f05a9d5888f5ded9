"""Problem: how fast can a step be on groups of devices of several kinds, and which group takes which run?

floor.py's critical paths with memory, as in reach.py, but for stages that differ: laid from the back, with
the kinds that are used in the state (unequal.py). A stage of kind t with d stages behind it, in one of its
ways (kept or recomputed: seconds F, B and bytes, summed over units), may be a run [first, end) within L if

    alone    before[first] + m ((F + B)[end] - (F + B)[first])    <= L
    row      P + G[end] - G[first]                                <= L
    bytes    held[end] - held[first]                              <= room

where G = (m - 1) B + (m - w) F under 1f1b, and (m - 1) (F + B) under gpipe.

`before` is the fastest kind's, P below the seconds of one microbatch on all stages. For P each stage of kind
t may at best do some work v at once_t seconds, and all v has to be done: for any price x of a unit of work

    P >= x V + sum over kinds of the `count` most negative of  min over runs within L of (once_t - x v)

(a Lagrangian relaxation, Fisher, Management Science 27(1), 1981; x: what the work costs on a kind). The
least L for which the runs get from the end to the beginning is found by bisection. With bytes bounded from
below and every block of depths as lenient as its most lenient depth, L is a floor of all orders of groups,
all numbers of groups left idle, and all cuts; with bytes bounded from above and strict blocks it is reached,
but for links. What memory does to a run in between, the exact account decides (menu.py).

Symbols: m -> microbatches, w = min(d + 1, m) -> in flight. Depths below FEW have a block each, then blocks
grow with depth. Complexity: O(b k n log n + S k) for each L: n units, k kinds, b blocks, S states.
Oracle: tests/unit/planner/test_fleet.py tries all orders and cuts, and all groups left idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import ScheduleName
from outsize.planner.edges import flows
from outsize.planner.floor import Work, prefix
from outsize.planner.seconds import Seconds, UnitSeconds
from outsize.planner.unequal import Cuts, Probe, fractional_s

Index = NDArray[np.intp]
# Where bisection stops, relatively: the paths are known better the second time. How far above the work alone
# it is looked for first, and then each time.
PRECISE: Final = (5e-3, 5e-4)
FIRST: Final = 1.02
FURTHER: Final = 1.1
# Rounding of sums is no reason to forbid a run.
SAME: Final = 1 + 1e-10
# Of the bound of what all stages take: each knows that of the one before.
ROUNDS: Final = 3
# Depths with a block of their own; behind them a block is that part of its depth, and wider for the paths.
FEW: Final = 12
PART: Final = 8
WIDE: Final = 2


@final
@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Bytes on one device of a group, of shape (n + 1,). Summed over units: `fixed` for good, `graded` with
    gradients too, `saved` for a microbatch, `updating` at the optimizer's step.

    Of a stage that begins or ends at a cut, for each microbatch in flight: `received` and `sent` at least,
    `crossing` at most; `acting_bytes` at most beside all these.
    """

    fixed: Seconds
    graded: Seconds
    saved: Seconds
    updating: Seconds
    received: Seconds
    sent: Seconds
    crossing: Seconds
    acting_bytes: float


@final
@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """`count` groups of one kind: seconds of a microbatch, summed over units, and what peaks may take."""

    count: int
    forward: Seconds
    backward: Seconds
    room_bytes: float

    @classmethod
    def of(cls, count: int, seconds: UnitSeconds, room_bytes: float) -> Self:
        """From the seconds of each unit."""
        return cls(count, prefix(seconds.forward), prefix(seconds.backward), room_bytes)


@final
class Fleet:
    """All groups for one layout. `ways` of a stage: whether it recomputes, the one to be preferred first."""

    def __init__(
        self,
        kinds: Sequence[Groups],
        held: Held,
        work: Work,
        how: tuple[ScheduleName, int],
        ways: Sequence[bool] = (False, True),
    ) -> None:
        self._kinds, self._held, self._work = tuple(kinds), held, work
        (self._schedule, self._m), self._ways = how, tuple(ways)
        self._counts = [kind.count for kind in kinds]
        self._rooms = self._spared = [kind.room_bytes for kind in kinds]
        self._floor_s, self._sharp = 0.0, False
        self._stages = sum(self._counts)
        self._units = len(work.forward) - 1
        self._blocks, self._wide = _blocks(self._stages, PART), _blocks(self._stages, WIDE)
        self._slack_s = work.slack_s * (self._stages - 1)
        self._fast = work.forward + work.backward
        before = work.before_forward if self._schedule == "zero-bubble" else work.before
        self._before = np.maximum(0.0, before - self._slack_s)

    @cached_property
    def least_s(self) -> float:
        """Below every step: work alone, if it could be divided at will."""
        return self._m * self._shared_s(self._ways[0])

    @cached_property
    def likely_s(self) -> float:
        """About what a step takes if work could be divided at will and memory wants the last way."""
        return (self._m + self._stages - 1) * self._shared_s(self._ways[-1])

    def _shared_s(self, again: bool) -> float:
        seconds = [np.diff(self._seconds(kind, again, 1)[0]) for kind in range(len(self._kinds))]
        return fractional_s(self._counts, np.stack(seconds))

    def floor_s(self, most_s: float = inf) -> float:
        """No order, no cut makes a shorter step; infinite when nothing fits. Not sought above `most_s`."""
        if self._floor_s == 0.0:
            self._floor_s = self.least_s if self._probe(inf, -inf).met else inf
        if self._floor_s < most_s and not self._sharp:
            if most_s < inf and not self._probe(most_s, self._path_s(most_s)).met:
                self._floor_s = most_s
            else:
                self._floor_s, self._sharp = self._bisected(self._floor_s, most_s, lenient=True)[0], True
        return self._floor_s

    def arranged(
        self, least_s: float, over: Mapping[int, float] = MappingProxyType({})
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The kind of each stage, and bounds, of a step near the least: None when nothing is sure to fit.

        `least_s`: a floor of it; `over`: bytes by kind that were too many.
        """
        self._spared = [room - over.get(kind, 0.0) for kind, room in enumerate(self._rooms)]
        if not self._probe(inf, -inf, lenient=False).met:
            return None
        _, *met = self._bisected(least_s, inf, lenient=False)
        return self._probe(*met, lenient=False, keep=True).trace()

    def _bisected(self, low: float, high: float, lenient: bool) -> tuple[float, float, float]:
        """(what cannot be, what can be, with which path); `high` can be, or is infinite."""
        path_s, further = -inf, FIRST
        for precise in PRECISE:
            if high == inf:
                high = low * further
            while not self._probe(high, path_s := self._path_s(high), lenient).met:
                low, high, further = high, high * further, FURTHER
            while high > low * (1 + precise):
                middle = (low + high) / 2
                low, high = (low, middle) if self._probe(middle, path_s, lenient).met else (middle, high)
            further = 1 + precise
        return low, high, path_s

    def _probe(self, limit_s: float, path_s: float, lenient: bool = True, keep: bool = False) -> Probe:
        """Whether some order and cut has no stage above the limit, if all stages take `path_s` at least."""
        known: dict[tuple[int, int], Cuts] = {}

        def reach(kind: int, behind: int) -> Cuts:
            low, high = self._blocks[behind]
            if (kind, low) not in known:
                flying, ahead = (low, high) if lenient else (high, low)
                ways = (
                    np.maximum(
                        self._in_time(kind, again, limit_s, path_s, ahead + 1),
                        self._in_room(kind, again, flying + 1, lenient),
                    )
                    for again in self._ways
                )
                first = _least(ways, self._units)
                # Of a longer row a stage may seem to get less far, where the cut is fatter.
                known[kind, low] = np.minimum.accumulate(first[::-1])[::-1] if lenient else first
            return known[kind, low]

        return Probe(self._counts, self._units, reach, keep)

    def _in_time(self, kind: int, again: bool, limit_s: float, path_s: float, ahead: int) -> Index:
        """For each end the first unit from which a run takes no longer."""
        (once, row), m, limit_s = self._seconds(kind, again, ahead), self._m, limit_s * SAME
        alone = np.searchsorted(m * once - self._before, m * once - limit_s)
        if path_s == -inf:
            return alone
        within = np.searchsorted(row, row + path_s - limit_s)
        if self._slack_s:  # so little may have nothing behind it
            within = np.minimum(within, np.searchsorted(once, once - self._work.slack_s))
        return np.maximum(alone, within)

    def _seconds(self, kind: int, again: bool, ahead: int) -> tuple[Seconds, Seconds]:
        """Of a microbatch, and G of the file's text."""
        groups, m = self._kinds[kind], self._m
        backward = groups.backward + groups.forward if again else groups.backward
        once = groups.forward + backward
        if self._schedule == "naive":
            return once, m * (once - self._fast)
        if self._schedule == "gpipe":
            return once, (m - 1) * once
        return once, (m - 1) * backward + (m - min(ahead, m)) * groups.forward

    def _in_room(self, kind: int, again: bool, depth: int, lenient: bool) -> Index:
        """For each end the first unit from which a run fits."""
        held, room = self._held, (self._rooms if lenient else self._spared)[kind]
        flying = {"naive": 1, "gpipe": self._m}.get(self._schedule, min(depth, self._m))
        saved = held.saved if again else flying * held.saved
        if not lenient:
            cuts = flying * held.crossing, flying * held.crossing
            acting = _fits(held.graded + saved, max(0.0, room - held.acting_bytes), *cuts)
            return np.maximum(acting, _fits(held.updating, max(0.0, room)))
        steady = self._schedule != "interleaved" and self._m > (1 if again else flying)
        stays = held.graded if steady else held.fixed
        # What is received or sent may be among the saved.
        return _fits(stays + saved, room, *((flying * held.received, flying * held.sent) if again else ()))

    def _path_s(self, limit_s: float) -> float:
        """What all stages of a step within the limit take for one microbatch, at least."""
        if not self._work.unbroken or self._schedule not in ("1f1b", "gpipe", "naive"):
            return -inf
        if self._schedule == "naive":
            return self._m * (float(self._fast[-1]) - self._slack_s)
        path_s = -inf
        for _ in range(ROUNDS):
            path_s = max(self._path_at(limit_s, path_s)) - self._slack_s
        return path_s

    def _path_at(self, limit_s: float, path_s: float) -> list[float]:
        """The bound of P, at what the work costs on each of the kinds; `path_s` is one."""
        bests = self._firsts(limit_s, path_s)
        prices = [
            float(self._seconds(t, self._ways[-1], 1)[0][-1] / self._fast[-1]) for t in range(len(bests))
        ]
        return [price * float(self._fast[-1]) + sum(self._gains(bests, price)) for price in prices]

    def _gains(self, firsts: Sequence[Sequence[dict[int, Index]]], price: float) -> list[float]:
        """Of each kind, what all its groups gain by the work they do."""
        found: list[float] = []
        for kind, ways in enumerate(firsts):
            gain: dict[int, float] = {}
            for again, of in zip(self._ways, ways, strict=True):
                each = np.diff(self._seconds(kind, again, 1)[0] - price * self._fast)
                total = np.append(0.0, np.cumsum(np.minimum(0.0, each)))
                for low, first in of.items():
                    gain[low] = min(gain.get(low, 0.0), float((total - total[first]).min()))
            found.append(sum(sorted(gain[low] for low, _ in self._wide)[: self._counts[kind]]))
        return found

    def _firsts(self, limit_s: float, path_s: float) -> list[list[dict[int, Index]]]:
        """By kind, way and block, for each end the first unit of a run within the limit."""
        ends = np.arange(self._units + 1)

        def first(kind: int, again: bool, block: tuple[int, int]) -> Index:
            in_time = self._in_time(kind, again, limit_s, path_s, block[1] + 1)
            in_room = self._in_room(kind, again, block[0] + 1, lenient=True)
            return np.minimum(np.maximum(in_time, in_room), ends)

        blocks = tuple(dict.fromkeys(self._wide))
        return [
            [{block[0]: first(kind, again, block) for block in blocks} for again in self._ways]
            for kind in range(len(self._kinds))
        ]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Of a graph: bytes that stages beginning or ending at a cut receive and send at least, what crosses it,
    of shape (n + 1,), and the most that a stage holds beside what adds up over units.
    """

    received: Seconds
    sent: Seconds
    crossing: Seconds
    acting_bytes: float

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Of one microbatch, on one device."""
        units = len(graph.units)
        received, sent, steps = np.zeros(units + 1), np.zeros(units + 1), np.zeros(units + 2)
        for value in (v for v in graph.values if v.consumers):
            sent[value.producer + 1] += value.size_bytes
            received[list(value.consumers)] += value.size_bytes
            steps[value.producer + 1] += value.size_bytes
            steps[value.consumers[-1] + 1] -= value.size_bytes
        tied = sum(flow.size_bytes for flow in flows(graph) if flow.step)
        most = max((u.workspace_bytes + u.backward_workspace_bytes for u in graph.units), default=0)
        crossing = np.cumsum(steps)[:-1]
        return cls(received, sent, crossing, most + tied + 4 * float(crossing.max()) + graph.input_bytes)

    def shared(self, ways: int, fixed: Seconds, graded: Seconds, saved: Seconds, updating: Seconds) -> Held:
        """Beside what units hold, on one of the devices that share values."""
        mine = self.received / ways, self.sent / ways, self.crossing / ways, self.acting_bytes / ways
        return Held(fixed, graded, saved, updating, *mine)


def _fits(held: Seconds, room: float, first: Seconds | float = 0.0, end: Seconds | float = 0.0) -> Index:
    """For each end the first unit from which a run takes no more: summed over units, and at its two cuts."""
    least = np.maximum.accumulate(held - first)
    return np.searchsorted(least, held + end - room)


def _least(ways: Iterable[Index], units: int) -> Cuts:
    """The way that gets furthest; the end itself where no unit is allowed."""
    found = np.arange(units + 1)
    for way in ways:
        found = np.minimum(found, way)
    return found.astype(np.int32)


def _blocks(stages: int, part: int) -> list[tuple[int, int]]:
    """For each number of stages behind, the first and last of those that count alike."""
    found: list[tuple[int, int]] = []
    while len(found) < stages:
        low = len(found)
        high = min(low + (max(1, low // part) if low >= FEW else 1), stages) - 1
        found += [(low, high)] * (high + 1 - low)
    return found
