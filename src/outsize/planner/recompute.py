"""Problem: which units of a stage should be recomputed, so that it fits and loses least time?

    minimise    sum of forward_s over the chosen units
    subject to  fixed + waiting x kept + acting <= room      at every moment of the stage (Limit)

`kept` and `acting` are anew.py's: what a choice keeps of a microbatch, and what the one at work holds at its
worst moment. Units are taken in order, one as it is or a segment of them at a time: a knapsack along a path.
What the rest costs depends on what has been kept of the memories that later units use (the state), so in
each state those choices stay that no other beats in seconds, in bytes kept and in the worst moments so far
(Nemhauser and Ullmann, Management Science 15(9), 1969). A worst moment that could not matter counts as the
largest that never does. A choice is dropped when its seconds, and what the rest must lose in fractions to
fit (Dantzig; each unit keeps all or nothing), reach the best whole choice known; the first one known is of a
narrow search with the WIDTH most promising at each unit.

Exact among segments of at most LONGEST units, unless MOST choices were looked at (`proven` says so).
Kellerer, Pferschy, Pisinger, *Knapsack Problems*, 2004, ch. 2. Complexity: units x segments x choices;
exponential at worst, as the problem is. Oracle: tests/unit/planner/test_recompute_choice.py, all subsets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Final, final

from outsize.planner.anew import StageBytes

LONGEST: Final = 32
WIDTH: Final = 12
MOST: Final = 4_000
# What the microbatch at work does: its place among the worst moments.
FORWARD, BACKWARD, FIRST_BACKWARD, NOTHING = range(4)


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """A moment: `fixed_bytes`, `waiting` microbatches that keep what they keep, one at work in `phase`.

    `phase` is FORWARD, BACKWARD, FIRST_BACKWARD, or NOTHING.
    """

    fixed_bytes: int
    waiting: int
    phase: int


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The units to recompute and what that costs; `proven`: no choice that fits costs less."""

    units: frozenset[int]
    extra_s: float
    proven: bool


State = tuple[frozenset[int], bool]
"""(stores that are kept and still in use, whether a segment of this block has just ended)."""


@final
@dataclass(frozen=True, slots=True)
class _Arc:
    """One unit as it is, or a segment: what it keeps, and its worst moments beside all that is kept."""

    end: int
    extra_s: float
    kept: int
    worst: tuple[int, int, int]
    state: State
    segment: bool


@final
@dataclass(frozen=True, slots=True)
class _Partial:
    """Choices for the first units, linked backward."""

    seconds: float
    kept: int
    worst: tuple[int, int, int]
    start: int = 0
    segment: bool = False
    before: _Partial | None = None

    def beats(self, other: _Partial) -> bool:
        """In everything, or equals it."""
        w, o = self.worst, other.worst
        return self.kept <= other.kept and w[0] <= o[0] and w[1] <= o[1] and w[2] <= o[2]


def choose(
    stage: StageBytes, forward_s: Sequence[float], limits: Sequence[Limit], room: int
) -> Choice | None:
    """The cheapest choice that fits; None where none was found. `forward_s` of each unit."""
    search = _Search(stage, forward_s, limits, room)
    search.run(WIDTH)
    search.run(None)
    return search.choice()


@final
class _Search:
    """Partial choices from unit to unit."""

    def __init__(
        self, stage: StageBytes, forward_s: Sequence[float], limits: Sequence[Limit], room: int
    ) -> None:
        self._stage, self._forward_s, self._n = stage, tuple(forward_s), stage.units
        self._limits = [(room - at.fixed_bytes, at.waiting, at.phase) for at in limits]
        self._most_kept = min((self._kept_at_most(*limit) for limit in self._limits), default=1 << 62)
        never = self._never_matters
        self._harmless = never(FORWARD), never(BACKWARD), never(FIRST_BACKWARD)
        self._rest = [self._relaxed_from(k) for k in range(self._n + 1)]
        self._arcs: dict[tuple[int, State], list[_Arc]] = {}
        self._best: _Partial | None = None
        self._proven = True

    def choice(self) -> Choice | None:
        """What was found."""
        if self._best is None:
            return None
        units: set[int] = set()
        here, end = self._best, self._n
        while here.before is not None:
            units |= set(range(here.start, end)) if here.segment else set()
            here, end = here.before, here.start
        return Choice(frozenset(units), self._best.seconds, self._proven)

    def run(self, width: int | None) -> None:
        """With the best few at each unit, or with all."""
        first: State = frozenset(), False
        fronts: list[dict[State, list[_Partial]]] = [{} for _ in range(self._n + 1)]
        fronts[0][first] = [_Partial(0.0, 0, self._harmless)]
        looked_at = 0
        for k in range(self._n):
            labels = [(state, p) for state, found in fronts[k].items() for p in _undominated(found)]
            labels = [(state, p) for state, p in labels if self._hope_s(p, k) < self._known_s()]
            labels.sort(key=lambda label: (self._hope_s(label[1], k), label[1].kept))
            for state, partial in labels[:width]:
                for arc in self._arcs_from(k, state):
                    longer = self._extended(partial, k, arc)
                    if longer is not None:
                        fronts[arc.end].setdefault(arc.state, []).append(longer)
                looked_at += 1
            fronts[k] = {}
            if width is None and looked_at > MOST:
                self._proven = False
                return
        done = [p for found in fronts[self._n].values() for p in found]
        best = min(done, key=lambda p: (p.seconds, p.kept), default=None)
        if best is not None and best.seconds < self._known_s():
            self._best = best

    def _known_s(self) -> float:
        return inf if self._best is None else self._best.seconds * (1 - 1e-12)

    def _hope_s(self, partial: _Partial, k: int) -> float:
        return partial.seconds + self._rest[k].seconds(self._most_kept - partial.kept)

    def _extended(self, partial: _Partial, k: int, arc: _Arc) -> _Partial | None:
        kept = partial.kept + arc.kept
        a, b, c = (
            max(before, kept + moment) for before, moment in zip(partial.worst, arc.worst, strict=True)
        )
        found = _Partial(partial.seconds + arc.extra_s, kept, (a, b, c), k, arc.segment, partial)
        if kept > self._most_kept or self._hope_s(found, arc.end) >= self._known_s():
            return None
        acting = (a, b, c, 0)
        fits = all(waiting * kept + acting[at] <= room for room, waiting, at in self._limits)
        return found if fits else None

    def _kept_at_most(self, room: int, waiting: int, phase: int) -> int:
        """Of one microbatch, by one limit: the last unit's moment comes on top of all that is kept."""
        if phase != NOTHING:
            stage = self._stage
            own = (stage.workspace, stage.backward, stage.first_backward)[phase]
            room, waiting = room - own[-1], waiting + 1
        return room // waiting if waiting else (1 << 62 if room >= 0 else -1)

    def _never_matters(self, phase: int) -> int:
        """A worst moment of so many bytes fits whatever is kept."""
        return min((room - w * self._most_kept for room, w, p in self._limits if p == phase), default=1 << 62)

    def _relaxed_from(self, k: int) -> _Rest:
        """The units from k on, each of which keeps what is its own and made behind k, or nothing."""
        keeps = list(self._stage.own)
        for store in map(self._stage.stores.__getitem__, self._stage.inner):
            if store.made >= k and store.keepers:
                keeps[store.keepers[0]] += store.size_bytes
        pairs = zip(keeps[k:], self._forward_s[k:], strict=True)
        return _Rest(pairs)

    def _arcs_from(self, k: int, state: State) -> list[_Arc]:
        if (k, state) not in self._arcs:
            self._arcs[k, state] = list(self._new_arcs(k, state))
        return self._arcs[k, state]

    def _new_arcs(self, k: int, state: State) -> Iterator[_Arc]:
        kept, just_ended = state
        stage, block = self._stage, self._stage.block
        more = {i for i in stage.inner if k in stage.stores[i].keepers} - kept
        size = stage.own[k] + sum(stage.stores[i].size_bytes for i in more)
        there = kept | more
        worst = self._held_forward(k, there), stage.backward[k], stage.first_backward[k]
        yield _Arc(k + 1, 0.0, size, worst, (self._used_from(k + 1, there), False), segment=False)
        for end in range(k + 1, min(self._n, k + LONGEST) + 1):
            if block[end - 1] != block[k] or (just_ended and block[k] == block[k - 1]):
                return
            yield self._segment(k, end, kept)

    def _segment(self, k: int, end: int, kept: frozenset[int]) -> _Arc:
        stage = self._stage
        entries = {i for i in stage.inner if stage.stores[i].made < k} - kept
        entries = {i for i in entries if any(k <= u < end for u in stage.stores[i].used)}
        there = kept | entries
        acting = stage.segment(k, end)
        return _Arc(
            end,
            sum(self._forward_s[k:end]),
            sum(stage.stores[i].size_bytes for i in entries),
            (
                max(self._held_forward(u, there) for u in range(k, end)),
                acting.backward,
                acting.first_backward,
            ),
            (self._used_from(end, there), True),
            segment=True,
        )

    def _held_forward(self, k: int, kept: frozenset[int]) -> int:
        """Beside what is kept."""
        stage = self._stage
        waiting = (stage.stores[i] for i in stage.inner if i not in kept)
        alive = sum(s.size_bytes for s in waiting if s.made <= k <= s.last)
        return alive + stage.leaving[k] + stage.workspace[k]

    def _used_from(self, k: int, kept: frozenset[int]) -> frozenset[int]:
        """Those that a unit from k on still uses, or would keep."""
        stores = self._stage.stores
        return frozenset(i for i in kept if max((stores[i].last, *stores[i].keepers)) >= k)


def _undominated(found: Sequence[_Partial]) -> list[_Partial]:
    """By ascending seconds, those that no other beats."""
    left: list[_Partial] = []
    for partial in sorted(found, key=lambda p: (p.seconds, p.kept, p.worst)):
        if not any(other.beats(partial) for other in left):
            left.append(partial)
    return left


@final
class _Rest:
    """The least seconds of some units when each may be recomputed in fractions.

    Of each unit (bytes it keeps, seconds); those that are cheapest by the byte are recomputed first.
    """

    def __init__(self, units: Iterable[tuple[int, float]]) -> None:
        ranked = sorted((s / size, size, s) for size, s in units if size)
        self._slopes = [slope for slope, _, _ in ranked]
        self._saved = [0, *accumulate(size for _, size, _ in ranked)]
        self._seconds = [0.0, *accumulate(s for _, _, s in ranked)]

    def seconds(self, room: int) -> float:
        """Infinite when even nothing does not fit."""
        excess = self._saved[-1] - room
        if excess <= 0 or room < 0:
            return 0.0 if excess <= 0 else inf
        step = bisect_left(self._saved, excess)
        return self._seconds[step - 1] + self._slopes[step - 1] * (excess - self._saved[step - 1])
