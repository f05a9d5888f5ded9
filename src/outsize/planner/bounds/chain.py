"""Problem: how many units can the stages of a chain cover if none takes longer than T or exceeds its device?

In a chain, where every unit depends on the one before, the critical paths of step_time.py are differences of
sums over units. Let P, F, B be the sums up to each unit of all work, of forwards and of backwards in the
option that a stage runs (with recompute, B includes its forwards):

    alone    before + m ((F + B)[end] - (F + B)[first])         <= T
    row      P[n] + G[end] - G[first]                           <= T
    bytes    fixed + w saved without recompute; fixed + saved at once with it; and the optimizer's step

    1f1b     G = F + B - P + (m - 1) B + (m - w) F              w = min(p - s, m)
    gpipe    G = m (F + B) - P
    naive    G = m (F + B - P), and m P[n]

All of them rise with `end`, so the furthest end of a stage is the least of three bisections, in the option
that reaches furthest; and a later begin never hurts. Under 1f1b G and bytes differ from stage to stage, so
they are computed where a bisection looks. Each cut may take `slack` of a chain (step_time.py).
What else a stage holds (values sent and received, temporaries) is left out, so this is a lower bound.

The collectives of sharded weights are a second chain: a rank runs them one after the other, so the forward of
a stage takes at least as long as its gathers do, and its backward as long as gathers and sums. Both of the
chains have to reach the end within T, stage by stage. A rank gathers one block ahead and lets one sum run
beside the next block, so of the pass that a path goes through, a stage may hide the gathers of its first two
blocks and the sums of its last two: the slack of this chain. In each other pass it may find its first block
gathered, before the pass or because a pass turns in it.

Symbols: p -> stages, m -> microbatches, w -> in flight. Complexity: O(p log n) for each T, and O(n).
Oracle: tests/unit/planner/bounds/test_bounds_chain.py, the paths of step_time.py, and every cut
in all options.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Final, NamedTuple, final

import numpy as np

from outsize.ir.plan import ScheduleName
from outsize.planner.costs.unit_times import Seconds
from outsize.schedules.families import family_of
from outsize.schedules.family import ChainLaw

# Sums of floats differ by less than this, whatever their order is.
ROUNDED: Final = 1 + 1e-9


@final
class ChainShape(NamedTuple):
    """Names what a chain's step is made of: its schedule, its stages and its microbatches."""

    schedule: ScheduleName
    stages: int
    microbatches: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Says how many bytes stages may hold: `room_bytes`, and sums over units of shape (n + 1,) on one device.

    `fixed` lasts; `graded` includes gradients of weights; `updating` includes the optimizer's temporaries
    too. `saved` is that of a microbatch; `anew` is held while one is recomputed. `recompute`: the options
    of a stage, whether it recomputes.
    """

    fixed: Seconds
    graded: Seconds
    updating: Seconds
    saved: Seconds
    anew: Seconds
    room_bytes: int
    recompute: tuple[bool, ...] = (False, True)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """Holds the seconds of the collectives of sharded weights in a microbatch's forward and backward, as sums
    over units of shape (n + 1,).

    A stage may hide `slack_s` of a microbatch's, and `spared_s` of each further pass.
    """

    forward: Seconds
    backward: Seconds
    slack_s: float
    spared_s: float


Sum = Callable[[int], float]
"""Maps a number of units to a sum over the units before, which rises."""


@final
@dataclass(frozen=True, slots=True)
class _Option:
    """Holds, for one option, sums over units up to each: seconds alone, G, bytes of some moments."""

    alone: list[float]
    row: Sum
    held: Sequence[Sum]


def _furthest(total: Sum, limit: float, first: int, end: int) -> int:
    """Returns the last unit from `first` to `end` up to which a sum is within the limit."""
    if total(end) <= limit:
        return end
    return max(first, bisect_right(range(end), limit, first, end, key=total) - 1)


@final
class ChainBound:
    """Bounds the stages of an unbroken chain: sums of `before`, of `forward` and `backward`, of shape (n +
    1,); then of backwards that begin with a second forward, where these are not the sum of both.
    """

    def __init__(
        self,
        before: Seconds,
        passes: tuple[Seconds, ...],
        slack_s: float,
        shape: ChainShape,
        room: Room | None = None,
        queue: Queue | None = None,
    ) -> None:
        self._forward, self._backward, *again = passes
        schedule, self._stages, self._m = shape
        self._family = family_of(schedule)
        self._total = self._forward + self._backward
        self._again = again[0] if again else self._total
        self._before: list[float] = before.tolist()
        self._slack_s, self._room = slack_s, room
        self._units = len(self._before) - 1
        law = self._family.chain
        self._collectives = None if queue is None or law is None else _Collectives(queue, law, shape)

    def reaches(self, limit_s: float) -> bool:
        """Returns whether the last stage reaches the end."""
        if limit_s == inf and self._room is not None and True in self._room.recompute:
            return self._reaches_recomputed
        first, alone = 0, self._alone[False]
        most_s = limit_s / self._m * ROUNDED
        for stage in range(self._stages):
            # The stages that are left are too short for the units that are left.
            if alone[-1] - alone[first] > (self._stages - stage) * most_s:
                return False
            end = max(self._end(option, stage, first, limit_s) for option in self._both(stage))
            if self._collectives is not None:
                end = min(end, self._collectives.end(stage, first, limit_s))
            first = end
            if first == self._units:
                return True
        return False

    @cached_property
    def _reaches_recomputed(self) -> bool:
        """Returns whether there is room for stages that recompute, which hold least, however long they take.

        They hold the same in each place of the pipeline.
        """
        assert self._room is not None
        nearest = np.full(self._units + 1, self._units)
        for held in self._recomputed_bytes(self._room):
            nearest = np.minimum(nearest, np.searchsorted(held, held + self._room.room_bytes, "right") - 1)
        ends: list[int] = np.maximum(nearest, np.arange(self._units + 1)).tolist()
        first = 0
        for _ in range(self._stages):
            first = ends[first]
        return first == self._units

    def _end(self, option: _Option, stage: int, first: int, limit_s: float) -> int:
        lead_s = max(0.0, self._before[first] - stage * self._slack_s)
        alone, row = option.alone, option.row
        alone_end = max(first, bisect_right(alone, alone[first] + (limit_s - lead_s) / self._m) - 1)
        end = _furthest(row, row(first) + limit_s - self._whole_s, first, alone_end)
        if self._slack_s:  # A stage within the slack may have nothing after it.
            within = bisect_right(alone, alone[first] + self._slack_s) - 1
            end = min(alone_end, max(end, within))
        if self._room is not None:
            for held in option.held:
                end = _furthest(held, held(first) + self._room.room_bytes, first, end)
        return end

    @cached_property
    def _whole_s(self) -> float:
        """Returns the passes over the whole chain, without what the cuts may take of it."""
        law = self._family.chain
        passes = law.passes(self._m) if law is not None else 0
        return passes * (float(self._total[-1]) - (self._stages - 1) * self._slack_s)

    def _both(self, stage: int) -> list[_Option]:
        in_flight = self._family.in_flight(self._stages - stage, self._m)
        if in_flight not in self._made:
            options = self._room.recompute if self._room is not None else (False,)
            self._made[in_flight] = [self._way(in_flight, recompute) for recompute in options]
        return self._made[in_flight]

    @cached_property
    def _made(self) -> dict[int, list[_Option]]:
        return {}

    def _way(self, in_flight: int, recompute: bool) -> _Option:
        forward, backward, total = self._rows
        m, law = self._m, self._family.chain
        if recompute:
            backward = self._again_rows
        held = self._moments_of_a_stage(in_flight, recompute)
        if law is None:
            return _Option(self._alone[recompute], _nothing, held)
        passes, beyond_s = law.passes(m), law.beyond_s

        def row(k: int) -> float:
            f, b = forward[k], backward[k]
            return passes * (f + b - total[k]) + beyond_s(f, b, m, in_flight)

        return _Option(self._alone[recompute], row, held)

    @cached_property
    def _rows(self) -> tuple[list[float], list[float], list[float]]:
        return self._forward.tolist(), self._backward.tolist(), self._total.tolist()

    @cached_property
    def _alone(self) -> tuple[list[float], list[float]]:
        """Returns the seconds of a microbatch, without and with recompute."""
        return self._rows[2], (self._forward + self._again).tolist()

    @cached_property
    def _again_rows(self) -> list[float]:
        return self._again.tolist()

    def _moments_of_a_stage(self, in_flight: int, recompute: bool) -> Sequence[Sum]:
        """Returns the moments of a stage; a second backward finds gradients of weights, and under 1f1b as
        much in flight.
        """
        if self._room is None:
            return ()
        if recompute:
            return self._recomputed_sums
        steady = self._family.chain is not None and self._m > in_flight
        fixed, graded, saved = self._kept
        lasting = graded if steady else fixed
        return (lambda k: lasting[k] + in_flight * saved[k]), self._recomputed_sums[1]

    @cached_property
    def _kept(self) -> tuple[list[float], list[float], list[float]]:
        assert self._room is not None
        return self._room.fixed.tolist(), self._room.graded.tolist(), self._room.saved.tolist()

    @cached_property
    def _recomputed_sums(self) -> tuple[Sum, Sum]:
        assert self._room is not None
        held, updating = self._recomputed_bytes(self._room)
        return held.tolist().__getitem__, updating.tolist().__getitem__

    def _recomputed_bytes(self, room: Room) -> tuple[Seconds, Seconds]:
        """Returns what a stage that recomputes holds, in the backward and in the optimizer's step."""
        return room.fixed + room.anew, room.updating


@final
class _Collectives:
    """Bounds the stages of an unbroken chain by the collectives of their weights."""

    def __init__(self, queue: Queue, law: ChainLaw, shape: ChainShape) -> None:
        schedule, self._stages, self._m = shape
        self._family, self._law, self._queue = family_of(schedule), law, queue
        self._total: list[float] = (queue.forward + queue.backward).tolist()
        # The stage of a path may hide as much again at its end.
        self._whole_s = law.passes(self._m) * (self._total[-1] - (self._stages + 1) * queue.slack_s)
        self._passes: tuple[list[float], list[float]] = queue.forward.tolist(), queue.backward.tolist()

    def end(self, stage: int, first: int, limit_s: float) -> int:
        """Returns the furthest end of a stage within the limit."""
        total, queue = self._total, self._queue
        lead_s = max(0.0, total[first] - stage * queue.slack_s) - queue.slack_s
        alone_s = (limit_s - lead_s) / self._m + 2 * queue.spared_s
        alone_end = max(first, bisect_right(total, total[first] + alone_s) - 1)
        row, spared_s = self._row(stage)
        end = _furthest(row, row(first) + limit_s - self._whole_s + spared_s, first, alone_end)
        within = bisect_right(total, total[first] + queue.slack_s) - 1
        return min(alone_end, max(end, within))

    def _row(self, stage: int) -> tuple[Sum, float]:
        """Returns the seconds beyond the path of a microbatch, and what is spared of them."""
        m, in_flight = self._m, self._family.in_flight(self._stages - stage, self._m)
        (forward, backward), beyond_s = self._passes, self._law.beyond_s
        spared_s = float(beyond_s(1.0, 1.0, m, in_flight)) * self._queue.spared_s
        return (lambda k: beyond_s(forward[k], backward[k], m, in_flight)), spared_s


def _nothing(_: int) -> float:
    return 0.0
