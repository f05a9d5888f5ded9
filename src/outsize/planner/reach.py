"""Problem: how far do the stages of a row get when none may take longer than T, or hold more than a device?

In a row, where every unit hangs on the one before, the critical paths of floor.py are differences of sums
over units. With P, F, B sums of all work, of forwards and of backwards of the way a stage runs in (where it
recomputes, B has its forwards too), up to each unit:

    alone    before + m ((F + B)[end] - (F + B)[first])         <= T
    row      P[n] + G[end] - G[first]                           <= T
    bytes    fixed + w saved, as it is; fixed + saved at once, recomputed; and the optimizer's step

    1f1b     G = F + B - P + (m - 1) B + (m - w) F              w = min(p - s, m)
    gpipe    G = m (F + B) - P
    naive    G = m (F + B - P), and m P[n]

All of them rise with `end`, so the furthest a stage gets is the least of three bisections, in the way in
which it gets furthest; and who begins later is never worse off. Each cut may take `slack` of a row
(floor.py). What else a stage holds (values sent and received, temporaries) is left out: a bound from below.

Symbols: p -> stages, m -> microbatches, w -> in flight. Complexity: O(p log n) for each T, O(n) for each
different w. Oracle: tests/unit/planner/test_reach.py, the paths of floor.py, and every cut in all ways.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from outsize.ir.plan import ScheduleName
from outsize.planner.seconds import Seconds


@final
@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What stages may hold: `room_bytes`. Summed over units, of shape (n + 1,), on a device: `fixed` for
    good, `graded` with gradients of weights, `updating` with an optimizer's temporaries too; `saved` for a
    microbatch, `anew` while one is recomputed. `ways` of a stage: whether it recomputes.
    """

    fixed: Seconds
    graded: Seconds
    updating: Seconds
    saved: Seconds
    anew: Seconds
    room_bytes: int
    ways: tuple[bool, ...] = (False, True)


@final
@dataclass(frozen=True, slots=True)
class _Way:
    """Sums over units up to each: seconds alone, G, bytes of some moments."""

    alone: list[float]
    row: list[float]
    held: list[list[float]]


@final
class Row:
    """The stages of an unbroken row: sums of `before`, of `forward` and `backward`, of shape (n + 1,)."""

    def __init__(
        self,
        before: Seconds,
        passes: tuple[Seconds, Seconds],
        slack_s: float,
        how: tuple[ScheduleName, int, int],
        room: Room | None = None,
    ) -> None:
        self._forward, self._backward = passes
        self._schedule, self._stages, self._m = how
        self._total = self._forward + self._backward
        self._before: list[float] = before.tolist()
        self._slack_s, self._room = slack_s, room
        self._ways = [self._both(stage) for stage in range(self._stages)]

    def reaches(self, limit_s: float) -> bool:
        """Whether the last stage gets to the end."""
        first = 0
        for stage, ways in enumerate(self._ways):
            first = max(self._end(way, stage, first, limit_s) for way in ways)
        return first == len(self._before) - 1

    def _end(self, way: _Way, stage: int, first: int, limit_s: float) -> int:
        lead_s = max(0.0, self._before[first] - stage * self._slack_s)
        alone, row = way.alone, way.row
        end = bisect_right(alone, alone[first] + (limit_s - lead_s) / self._m)
        within = bisect_right(row, row[first] + limit_s - self._whole_s)
        if self._slack_s:  # so little may have nothing behind it
            within = max(within, bisect_right(alone, alone[first] + self._slack_s))
        end = min(end, within) - 1
        if self._room is not None:
            for held in way.held:
                end = min(end, bisect_right(held, held[first] + self._room.room_bytes) - 1)
        return max(first, end)

    @cached_property
    def _whole_s(self) -> float:
        """Of the row, without what the cuts may take of it."""
        times = {"naive": self._m, "gpipe": 1, "1f1b": 1}.get(self._schedule, 0)
        return times * (float(self._total[-1]) - (self._stages - 1) * self._slack_s)

    def _both(self, stage: int) -> list[_Way]:
        flying = {"naive": 1, "gpipe": self._m}.get(self._schedule, min(self._stages - stage, self._m))
        if flying not in self._made:
            again = self._room.ways if self._room is not None else (False,)
            self._made[flying] = [self._way(flying, each) for each in again]
        return self._made[flying]

    @cached_property
    def _made(self) -> dict[int, list[_Way]]:
        return {}

    def _way(self, flying: int, again: bool) -> _Way:
        forward, m = self._forward, self._m
        backward = self._total if again else self._backward
        once = forward + backward
        row = {
            "1f1b": once - self._total + (m - 1) * backward + (m - flying) * forward,
            "gpipe": m * once - self._total,
            "naive": m * (once - self._total),
        }.get(self._schedule, np.zeros_like(once))
        return _Way(once.tolist(), row.tolist(), self._held(flying, again))

    def _held(self, flying: int, again: bool) -> list[list[float]]:
        """A second backward finds the gradients of weights, and under 1f1b as much in flight as the first."""
        if (room := self._room) is None:
            return []
        steady = self._schedule in ("1f1b", "naive") and self._m > flying
        kept = (
            room.fixed + room.anew if again else (room.graded if steady else room.fixed) + flying * room.saved
        )
        return [kept.tolist(), room.updating.tolist()]
