"""Problem: how fast can a step be on groups of several kinds of devices, and which group takes which run?

These are bounds/step_time.py's critical paths with memory, as in bounds/chain.py, but for unequal stages:
built from the last stage, with the kinds that are used in the state (probe.py). A stage of kind t with d
stages after it, in one of its options (kept or recomputed: seconds F, B and bytes, summed over units), may be
a run [first, end) within L if

    alone    before[first] + m ((F + B)[end] - (F + B)[first])    <= L
    row      P + G[end] - G[first]                                <= L
    bytes    held[end] - held[first]                              <= room

where G = (m - 1) B + (m - w) F under 1f1b, and (m - 1) (F + B) under gpipe.

`before` is the fastest kind's, and P is a lower bound of the seconds of one microbatch on all stages. For P
each stage of kind t may at best do some work v in once_t seconds, and all v has to be done: for any price x
of a unit of work

    P >= x V + sum over kinds of the `count` most negative of  min over runs within L of (once_t - x v)

(a Lagrangian relaxation, Fisher, Management Science 27(1), 1981; x: what the work costs on a kind). The least
L for which the runs get from the end to the beginning is found by bisection. With a lower bound of the bytes
and every block of depths as lenient as its most lenient depth, L is a lower bound over all orders of groups,
all numbers of idle groups, and all cuts; with an upper bound of the bytes and strict blocks it is reached,
apart from links. The exact account decides what memory does to a run in between (evaluate/pricing.py).

Symbols: m -> microbatches, w = min(d + 1, m) -> in flight. Depths below FEW have a block each, then blocks
grow with depth. Complexity: O(b k n log n + S k) for each L: n units, k kinds, b blocks, S states. Oracle:
tests/unit/planner/heterogeneous/test_heterogeneous_bounds.py tries all orders and cuts, and all idle groups.
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
from outsize.planner.bounds.step_time import PrefixTimes, prefix
from outsize.planner.costs.stage_edges import crossing_bytes, flows
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.planner.heterogeneous.probe import Cuts, Probe, fractional_s
from outsize.schedules.families import family_of

Index = NDArray[np.integer]
# Bisection stops at these relative widths, the second after the paths are better known. The search begins
# FIRST above the work alone, and goes FURTHER each time.
PRECISE: Final = (5e-3, 5e-4)
FIRST: Final = 1.02
FURTHER: Final = 1.1
# Rounding of sums must not forbid a run.
SAME: Final = 1 + 1e-10
# The bound of what all stages take is refined this often, each time with the bound before.
ROUNDS: Final = 3
# Depths below FEW have a block of their own; a later block is 1 / PART of its depth, 1 / WIDE for the paths.
FEW: Final = 12
PART: Final = 8
WIDE: Final = 2


@final
@dataclass(frozen=True, slots=True, eq=False)
class GroupBytes:
    """Holds bytes on one device of a group, of shape (n + 1,).

    Summed over units: `fixed` is permanent, `graded` includes gradients, `saved` is per microbatch,
    `updating` is at the optimizer's step. For a stage that begins or ends at a cut, for each microbatch in
    flight: at least `received` and `sent`, at most `crossing`. `acting_bytes` bounds everything else from
    above.
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
    """Holds `count` groups of one kind: seconds of a microbatch, summed over units, and what peaks
    may take.
    """

    count: int
    forward: Seconds
    backward: Seconds
    room_bytes: float

    @classmethod
    def of(cls, count: int, seconds: UnitSeconds, room_bytes: float) -> Self:
        """Builds the sums from the seconds of each unit."""
        return cls(count, prefix(seconds.forward), prefix(seconds.backward), room_bytes)


@final
class Fleet:
    """Bounds and arranges all groups for one layout; `recompute`: the options of a stage (recompute or not),
    the preferred first.
    """

    def __init__(
        self,
        kinds: Sequence[Groups],
        held: GroupBytes,
        work: PrefixTimes,
        how: tuple[ScheduleName, int],
        recompute: Sequence[bool] = (False, True),
    ) -> None:
        self._kinds, self._held, self._work = tuple(kinds), held, work
        self._family, self._m, self._recompute = family_of(how[0]), how[1], tuple(recompute)
        self._counts = [kind.count for kind in kinds]
        self._rooms = self._spared = [kind.room_bytes for kind in kinds]
        self._floor_s, self._sharp = 0.0, False
        self._rooms_known: dict[tuple[int, bool, int, float, bool], Index] = {}
        self._limit_s, self._work_known = inf, dict[tuple[int, bool], Index]()
        self._stages = sum(self._counts)
        self._units = len(work.forward) - 1
        self._blocks, self._wide = _blocks(self._stages, PART), _blocks(self._stages, WIDE)
        self._slack_s = work.slack_s * (self._stages - 1)
        self._fast = work.forward + work.backward
        before = work.before_forward if self._family.forwards_lead else work.before
        self._before = np.maximum(0.0, before - self._slack_s)

    @property
    def counts(self) -> list[int]:
        """Returns the number of groups of each kind."""
        return self._counts

    @property
    def options(self) -> tuple[bool, ...]:
        """Returns whether a stage may recompute, the preferred option first."""
        return self._recompute

    def once_s(self, kind: int, recompute: bool) -> Seconds:
        """Returns the seconds of a microbatch, summed over units."""
        return self._seconds(kind, recompute, 1)[0]

    def first_in_room(self, kind: int, recompute: bool, stages_after: int) -> Index:
        """Returns for each end the first unit from which a run is sure to fit."""
        _, deep = self._blocks[stages_after]
        return self._in_room(kind, recompute, deep + 1, lenient=False)

    def surely_fit(
        self, kind: int, recompute: bool, stages_after: int, runs: tuple[int | slice, int]
    ) -> NDArray[np.bool_]:
        """Returns whether these runs (first units, end) are sure to fit, which begin no earlier than one that
        is: more bytes may cross at a later cut.
        """
        held, (first, end) = self._held, runs
        in_flight = self._family.in_flight(self._blocks[stages_after][1] + 1, self._m)
        saved = 1 if recompute else in_flight
        inside = held.graded[end] - held.graded[first] + saved * (held.saved[end] - held.saved[first])
        at_cuts = in_flight * (held.crossing[first] + held.crossing[end])
        return inside + at_cuts <= self._spared[kind] - held.acting_bytes

    @cached_property
    def least_s(self) -> float:
        """Returns a lower bound of every step: work alone, if it could be divided at will."""
        return self._m * self._shared_s(self._recompute[0])

    @cached_property
    def likely_s(self) -> float:
        """Returns about what a step takes if work could be divided at will and memory needs the
        last option.
        """
        return (self._m + self._stages - 1) * self._shared_s(self._recompute[-1])

    def _shared_s(self, recompute: bool) -> float:
        seconds = [np.diff(self._seconds(kind, recompute, 1)[0]) for kind in range(len(self._kinds))]
        return fractional_s(self._counts, np.stack(seconds))

    def floor_s(self, most_s: float = inf) -> float:
        """Returns a lower bound over all orders and cuts; infinite when nothing fits. It is not sought above
        `most_s`.
        """
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
        """Returns the kind of each stage and the bounds of a step near the least, None when nothing is sure
        to fit.

        `least_s`: a lower bound of the step. `over`: bytes by kind that were too many.
        """
        self.spare(over)
        if not self.surely_fits:
            return None
        _, *met = self._bisected(least_s, inf, lenient=False)
        return self._probe(*met, lenient=False, keep=True).trace()

    @property
    def surely_fits(self) -> bool:
        """Returns whether some arrangement is sure to fit, however long it takes."""
        return self._probe(inf, -inf, lenient=False).met

    def spare(self, over: Mapping[int, float]) -> None:
        """Leaves so many bytes by kind unused in what is arranged from now on."""
        self._spared = [room - over.get(kind, 0.0) for kind, room in enumerate(self._rooms)]

    def _bisected(self, low: float, high: float, lenient: bool) -> tuple[float, float, float]:
        """Returns (infeasible seconds, feasible seconds, the latter's path); `high` is feasible, or
        infinite.
        """
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
        """Returns whether some order and cut has no stage above the limit, if all stages take at least
        `path_s`.
        """
        known: dict[tuple[int, int], Cuts] = {}

        def reach(kind: int, stages_after: int) -> Cuts:
            low, high = self._blocks[stages_after]
            if (kind, low) not in known:
                shallow, deep = (low, high) if lenient else (high, low)
                options = (
                    np.maximum(
                        self._in_time(kind, recompute, limit_s, path_s, deep + 1),
                        self._in_room(kind, recompute, shallow + 1, lenient),
                    )
                    for recompute in self._recompute
                )
                first = _least(options, self._units)
                # A stage of a longer chain may seem to reach less far, where more bytes cross the cut.
                known[kind, low] = np.minimum.accumulate(first[::-1])[::-1] if lenient else first
            return known[kind, low]

        return Probe(self._counts, self._units, reach, keep)

    def _in_time(self, kind: int, recompute: bool, limit_s: float, path_s: float, ahead: int) -> Index:
        """Returns for each end the first unit from which a run takes no longer."""
        by_work = self._by_work(kind, recompute, limit_s)
        if path_s == -inf:
            return by_work
        (once, row), limit_s = self._seconds(kind, recompute, ahead), limit_s * SAME
        within = np.searchsorted(row, row + path_s - limit_s)
        if self._slack_s:  # A stage within the slack may have nothing after it.
            within = np.minimum(within, np.searchsorted(once, once - self._work.slack_s))
        return np.maximum(by_work, within)

    def _by_work(self, kind: int, recompute: bool, limit_s: float) -> Index:
        """Returns the same for the work of a run alone, which is the same after any number of stages."""
        if limit_s != self._limit_s:
            self._limit_s, self._work_known = limit_s, {}
        if (kind, recompute) not in self._work_known:
            work = self._m * self._seconds(kind, recompute, 1)[0]
            self._work_known[kind, recompute] = np.searchsorted(work - self._before, work - limit_s * SAME)
        return self._work_known[kind, recompute]

    def _seconds(self, kind: int, recompute: bool, ahead: int) -> tuple[Seconds, Seconds]:
        """Returns the seconds of a microbatch, and G of the module's text."""
        groups, m = self._kinds[kind], self._m
        backward = groups.backward + groups.forward if recompute else groups.backward
        once = groups.forward + backward
        if (law := self._family.chain) is None:
            return once, np.zeros_like(once)
        row = law.beyond_s(groups.forward, backward, m, self._family.in_flight(ahead, m))
        # Its path counts each stage with the fastest kind's seconds.
        return once, row + m * (once - self._fast) if self._family.sequential else row

    def _in_room(self, kind: int, recompute: bool, depth: int, lenient: bool) -> Index:
        """Returns for each end the first unit from which a run fits."""
        room = (self._rooms if lenient else self._spared)[kind]
        key = kind, recompute, depth, room, lenient
        if key not in self._rooms_known:
            self._rooms_known[key] = self._first_within(room, recompute, depth, lenient).astype(np.int32)
        return self._rooms_known[key]

    def _first_within(self, room: float, recompute: bool, depth: int, lenient: bool) -> NDArray[np.intp]:
        held = self._held
        in_flight = self._family.in_flight(depth, self._m)
        saved = held.saved if recompute else in_flight * held.saved
        if not lenient:
            cuts = in_flight * held.crossing, in_flight * held.crossing
            acting = _fits(held.graded + saved, max(0.0, room - held.acting_bytes), *cuts)
            return np.maximum(acting, _fits(held.updating, max(0.0, room)))
        steady = self._family.refills and self._m > (1 if recompute else in_flight)
        held_bytes = held.graded if steady else held.fixed
        # Received or sent values may be among the saved ones.
        return _fits(
            held_bytes + saved,
            room,
            *((in_flight * held.received, in_flight * held.sent) if recompute else ()),
        )

    def _path_s(self, limit_s: float) -> float:
        """Returns a lower bound of what all stages of a step within the limit take for one microbatch."""
        if not self._work.unbroken or self._family.chain is None:
            return -inf
        if self._family.sequential:
            return self._m * (float(self._fast[-1]) - self._slack_s)
        path_s = -inf
        for _ in range(ROUNDS):
            path_s = max(self._path_at(limit_s, path_s)) - self._slack_s
        return path_s

    def _path_at(self, limit_s: float, path_s: float) -> list[float]:
        """Returns the bound of P, at the cost of the work on each of the kinds; `path_s` is one bound."""
        bests = self._firsts(limit_s, path_s)
        prices = [
            float(self._seconds(t, self._recompute[-1], 1)[0][-1] / self._fast[-1]) for t in range(len(bests))
        ]
        return [price * float(self._fast[-1]) + sum(self._gains(bests, price)) for price in prices]

    def _gains(self, firsts: Sequence[Sequence[dict[int, Index]]], price: float) -> list[float]:
        """Returns by kind what all its groups gain by the work they do."""
        gains: list[float] = []
        for kind, options in enumerate(firsts):
            gain: dict[int, float] = {}
            for recompute, of in zip(self._recompute, options, strict=True):
                gain_per_unit = np.diff(self._seconds(kind, recompute, 1)[0] - price * self._fast)
                total = np.append(0.0, np.cumsum(np.minimum(0.0, gain_per_unit)))
                for low, first in of.items():
                    gain[low] = min(gain.get(low, 0.0), float((total - total[first]).min()))
            gains.append(sum(sorted(gain[low] for low, _ in self._wide)[: self._counts[kind]]))
        return gains

    def _firsts(self, limit_s: float, path_s: float) -> list[list[dict[int, Index]]]:
        """Returns by kind, option and block, for each end, the first unit of a run within the limit."""
        ends = np.arange(self._units + 1)

        def first(kind: int, recompute: bool, block: tuple[int, int]) -> Index:
            in_time = self._in_time(kind, recompute, limit_s, path_s, block[1] + 1)
            in_room = self._in_room(kind, recompute, block[0] + 1, lenient=True)
            return np.minimum(np.maximum(in_time, in_room), ends)

        blocks = tuple(dict.fromkeys(self._wide))
        return [
            [{block[0]: first(kind, recompute, block) for block in blocks} for recompute in self._recompute]
            for kind in range(len(self._kinds))
        ]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """Holds for a graph the bytes that stages beginning or ending at a cut receive and send at least, what
    crosses the cut, of shape (n + 1,), and an upper bound of what a stage holds besides sums over units.
    """

    received: Seconds
    sent: Seconds
    crossing: Seconds
    acting_bytes: float

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Computes the bytes of one microbatch, on one device."""
        units = len(graph.units)
        received, sent = np.zeros(units + 1), np.zeros(units + 1)
        for value in (v for v in graph.values if v.consumers):
            sent[value.producer + 1] += value.size_bytes
            received[list(value.consumers)] += value.size_bytes
        tied = sum(flow.size_bytes for flow in flows(graph) if flow.step)
        largest_workspace = max(
            (u.workspace_bytes + u.backward_workspace_bytes for u in graph.units), default=0
        )
        crossing = crossing_bytes(graph).astype(np.float64)
        return cls(
            received, sent, crossing, largest_workspace + tied + 4 * float(crossing.max()) + graph.input_bytes
        )

    def shared(
        self, ranks: int, fixed: Seconds, graded: Seconds, saved: Seconds, updating: Seconds
    ) -> GroupBytes:
        """Returns all bytes on one of the `ranks` devices that share values."""
        return GroupBytes(
            fixed,
            graded,
            saved,
            updating,
            self.received / ranks,
            self.sent / ranks,
            self.crossing / ranks,
            self.acting_bytes / ranks,
        )


def _fits(
    held: Seconds, room: float, first: Seconds | float = 0.0, end: Seconds | float = 0.0
) -> NDArray[np.intp]:
    """Returns for each end the first unit from which a run takes no more: summed over units, and at its two
    cuts.
    """
    least = np.maximum.accumulate(held - first)
    return np.searchsorted(least, held + end - room)


def _least(options: Iterable[Index], units: int) -> Cuts:
    """Returns the first unit of the option that reaches furthest; the end itself where no unit is allowed."""
    first = np.arange(units + 1)
    for option in options:
        first = np.minimum(first, option)
    return first.astype(np.int32)


def _blocks(stages: int, part: int) -> list[tuple[int, int]]:
    """Returns for each number of stages after a stage the first and last number in the same block."""
    blocks: list[tuple[int, int]] = []
    while len(blocks) < stages:
        low = len(blocks)
        high = min(low + (max(1, low // part) if low >= FEW else 1), stages) - 1
        blocks += [(low, high)] * (high + 1 - low)
    return blocks
