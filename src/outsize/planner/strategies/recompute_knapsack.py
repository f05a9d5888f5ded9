"""Problem: which units of a stage should be recomputed, so that it fits and loses least time?

    minimise    sum of forward_s over the chosen units
    subject to  fixed + awaiting x saved + acting <= room      at every moment of the stage (Limit)

`saved` and `acting` are bytes of memory/recomputed_stage.py: what a choice keeps of a microbatch, and what
the one being computed holds at its worst moment. Units are taken in order, one without recompute or a segment
of them at a time: a knapsack along a path. The cost of the later units depends on which memories they use
have been saved (the state), so in each state those choices stay that no other beats in seconds, in bytes kept
and in the worst moments so far (Nemhauser and Ullmann, Management Science 15(9), 1969). A worst moment that
cannot matter counts as the largest that never does.

Bound: at a price of p seconds for a saved byte, the cheapest continuation of a state is a shortest path; its
cost above p x the bytes that may still be saved is a lower bound of the remaining seconds (a Lagrangian
relaxation, Fisher, Management Science 27(1), 1981). p is where two paths cost the same of which one keeps too
much (Handler and Zang, Networks 10(4), 1980); shortest paths are also the first complete choices, and where
the computed microbatch does not fit besides them, p is raised until it does. Layers that are alike are chosen
alike at any price, so the beginning of one of the two paths is joined with the end of the other. A choice
whose bound reaches the best known one is dropped.

It is exact among segments of at most LONGEST units, unless there were more states or choices than MOST: then
the bound says by how much (`least_s`). Complexity: states x segments x choices; exponential at worst, as the
problem is. Oracle: tests/unit/planner/strategies/test_recompute_choice.py, all subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, final

from outsize.planner.memory.recomputed_stage import SegmentBytes, StageBytes

LONGEST: Final = 12
WIDTH: Final = 6
MOST: Final = 200
MOST_STATES: Final = 64
# Sums of seconds that differ by a smaller share are equal but for rounding.
SAME: Final = 1e-12
# These number what the computed microbatch does, as indices of the worst moments.
FORWARD, BACKWARD, FIRST_BACKWARD, NOTHING = range(4)


@final
@dataclass(frozen=True, slots=True)
class Limit:
    """Describes a moment: `fixed_bytes`, `awaiting_backward` microbatches with what they keep, and one being
    computed in `phase`.

    `phase` is FORWARD, BACKWARD, FIRST_BACKWARD, or NOTHING.
    """

    fixed_bytes: int
    awaiting_backward: int
    phase: int


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """Holds the units to recompute and their cost; no choice that fits costs less than `least_s`."""

    units: frozenset[int]
    extra_s: float
    least_s: float


State = tuple[frozenset[int], bool]
"""Holds (storages that are kept and still in use, whether a segment of this block has just ended)."""
START: Final[State] = frozenset(), False


@final
@dataclass(frozen=True, slots=True)
class _Arc:
    """Describes one unit without recompute, or a segment: what it keeps, and its worst moments besides all
    that is kept.
    """

    end: int
    extra_s: float
    saved_bytes: int
    worst: tuple[int, int, int]
    state: State
    segment: bool


_Path = list[_Arc]
_Remaining = list[dict[State, tuple[float, _Arc | None]]]
"""Holds the cheapest path to the end from each state of each unit, and its first step."""


@final
@dataclass(frozen=True, slots=True)
class _Partial:
    """Describes choices for the units before `end`, linked backward; the last began with unit `start`."""

    seconds: float
    saved_bytes: int
    worst: tuple[int, int, int]
    start: int = 0
    end: int = 0
    segment: bool = False
    before: _Partial | None = None

    def beats(self, other: _Partial) -> bool:
        """Returns whether this is better than the other in everything, or equal."""
        w, o = self.worst, other.worst
        return self.saved_bytes <= other.saved_bytes and w[0] <= o[0] and w[1] <= o[1] and w[2] <= o[2]


def choose(
    stage: StageBytes, forward_s: Sequence[float], limits: Sequence[Limit], room: int
) -> Choice | None:
    """Returns the cheapest choice that fits, None where none was found; `forward_s` is per unit."""
    search = _KnapsackSearch(stage, _Paths(stage, forward_s), limits, room)
    search.run(WIDTH)
    search.run(None)
    return search.choice()


@final
class _Paths:
    """Holds all paths through a stage: the states at each unit, and the next steps."""

    def __init__(self, stage: StageBytes, forward_s: Sequence[float]) -> None:
        self._stage, self._forward_s = stage, tuple(forward_s)
        inner, stores = stage.inner, stage.stores
        self._segments: list[list[tuple[SegmentBytes, float]] | None] = [None] * stage.units
        self._used_by: list[list[int]] = [[] for _ in range(stage.units)]
        self._kept_for: list[list[int]] = [[] for _ in range(stage.units)]
        for i in inner:
            for unit in stores[i].used:
                self._used_by[unit].append(i)
            for unit in stores[i].keepers:
                self._kept_for[unit].append(i)
        self._forward = [
            sum(sizes) for sizes in zip(stage.alive, stage.leaving, stage.workspace, strict=True)
        ]
        self.arcs: list[dict[State, list[_Arc]]] = [{} for _ in range(stage.units + 1)]
        self.arcs[0][START] = []
        self.complete = True
        for k in range(stage.units):
            self.complete &= len(self.arcs[k]) <= MOST_STATES
            for state in list(self.arcs[k])[:MOST_STATES]:
                self.arcs[k][state] = list(self._from(k, state))
                for arc in self.arcs[k][state]:
                    self.arcs[arc.end].setdefault(arc.state, [])

    def priced(self, second_per_byte: float, *, seconds: float = 1.0) -> _Remaining:
        """Returns the cheapest path to the end from each state, and its first step."""
        cheapest: _Remaining = [{} for _ in self.arcs]
        cheapest[-1] = dict.fromkeys(self.arcs[-1], (0.0, None))
        for k in reversed(range(len(self.arcs) - 1)):
            for state, arcs in self.arcs[k].items():
                continuations = (
                    (seconds * a.extra_s + second_per_byte * a.saved_bytes + cheapest[a.end][a.state][0], n)
                    for n, a in enumerate(arcs)
                )
                best = min(continuations, default=(inf, 0))
                cheapest[k][state] = best[0], arcs[best[1]] if arcs else None
        return cheapest

    def _from(self, k: int, state: State) -> Iterator[_Arc]:
        saved, just_ended = state
        stage, block = self._stage, self._stage.block
        saved_here = saved.union(self._kept_for[k])
        size = stage.own[k] + self._size(saved_here - saved)
        worst = self._held_forward(k, saved_here), stage.backward[k], stage.first_backward[k]
        yield _Arc(k + 1, 0.0, size, worst, (self._used_from(k + 1, saved_here), False), segment=False)
        read = set[int]()
        for end in range(k + 1, min(stage.units, k + LONGEST) + 1):
            if block[end - 1] != block[k] or (just_ended and block[k] == block[k - 1]):
                return
            read.update(i for i in self._used_by[end - 1] if stage.stores[i].made < k)
            yield self._segment(k, end, saved, saved | read)

    def _segment(self, k: int, end: int, saved: frozenset[int], saved_with_reads: frozenset[int]) -> _Arc:
        """Builds the step of a segment; `saved_with_reads`: the saved storages and those that the segment
        reads.
        """
        acting, seconds = self._segments_from(k)[end - k - 1]
        forward = max(self._held_forward(u, saved_with_reads) for u in range(k, end))
        return _Arc(
            end,
            seconds,
            self._size(saved_with_reads - saved),
            (forward, acting.backward, acting.first_backward),
            (self._used_from(end, saved_with_reads), True),
            segment=True,
        )

    def _segments_from(self, k: int) -> list[tuple[SegmentBytes, float]]:
        """Returns the bytes and the seconds of the segments that begin with unit k, the shortest first."""
        if (known := self._segments[k]) is None:
            ends = range(k + 1, min(self._stage.units, k + LONGEST) + 1)
            parts = self._stage.segments_from(k, ends[-1])
            known = [(part, sum(self._forward_s[k:end])) for part, end in zip(parts, ends, strict=True)]
            self._segments[k] = known
        return known

    def _size(self, places: Iterable[int]) -> int:
        return sum(self._stage.stores[i].size_bytes for i in places)

    def _held_forward(self, k: int, saved: frozenset[int]) -> int:
        """Returns the forward's bytes besides what is kept."""
        stores = self._stage.stores
        return self._forward[k] - self._size(i for i in saved if stores[i].made <= k <= stores[i].last)

    def _used_from(self, k: int, saved: frozenset[int]) -> frozenset[int]:
        """Returns the storages that a unit from k on still uses, or would keep."""
        stores = self._stage.stores
        return frozenset(i for i in saved if max((stores[i].last, *stores[i].keepers)) >= k)


@final
class _KnapsackSearch:
    """Extends partial choices from unit to unit."""

    def __init__(self, stage: StageBytes, paths: _Paths, limits: Sequence[Limit], room: int) -> None:
        self._stage, self._paths, self._n = stage, paths, stage.units
        self._limits = [(room - at.fixed_bytes, at.awaiting_backward, at.phase) for at in limits]
        self._most_saved_bytes = min((self._saved_at_most(*limit) for limit in self._limits), default=1 << 62)
        never = self._never_matters
        self._first = _Partial(0.0, 0, (never(FORWARD), never(BACKWARD), never(FIRST_BACKWARD)))
        self._least = paths.priced(1.0, seconds=0.0)
        self._price, self._best = 0.0, None
        self._remaining = paths.priced(0.0)
        self._proven = paths.complete
        if self._least[0][START][0] <= self._most_saved_bytes:
            self._price_bytes()

    def choice(self) -> Choice | None:
        """Returns the best choice, None where there is none."""
        if self._best is None:
            return None
        units: set[int] = set()
        partial, end = self._best, self._n
        while partial.before is not None:
            units |= set(range(partial.start, end)) if partial.segment else set()
            partial, end = partial.before, partial.start
        least_s = self._best.seconds if self._proven else self._bound_s(0.0, 0, 0, START)
        return Choice(frozenset(units), self._best.seconds, min(least_s, self._best.seconds))

    def run(self, width: int | None) -> None:
        """Extends the most promising `width` choices at each unit, or all."""
        fronts: list[dict[State, list[_Partial]]] = [{} for _ in range(self._n + 1)]
        fronts[0][START] = [self._first]
        extended_count = 0
        for k in range(self._n):
            labels = [(state, p) for state, partials in fronts[k].items() for p in _undominated(partials)]
            labels = [
                (self._bound_s(p.seconds, p.saved_bytes, k, state), p.saved_bytes, n, state, p)
                for n, (state, p) in enumerate(labels)
            ]
            for bound_s, _, _, state, partial in sorted(labels)[:width]:
                if bound_s < self._known_s():
                    extended_count += 1
                    for arc in self._paths.arcs[k][state]:
                        longer = self._longer(partial, k, arc)
                        if longer is not None:
                            fronts[arc.end].setdefault(arc.state, []).append(longer)
            fronts[k] = {}
            if width is None and extended_count > MOST:
                self._proven = False
                return
        self._consider(p for partials in fronts[self._n].values() for p in partials)

    def _consider(self, done: Iterable[_Partial]) -> None:
        best = min(done, key=lambda p: (p.seconds, p.saved_bytes), default=None)
        if best is not None and best.seconds < self._known_s():
            self._best = best

    def _known_s(self) -> float:
        return inf if self._best is None else self._best.seconds * (1 - 1e-12)

    def _price_bytes(self) -> None:
        """Finds the price at which the cheapest path keeps about as much as allowed, and one at which it
        fits.
        """
        low, high = self._followed(self._remaining), self._followed(self._least)
        low, high, self._price, self._remaining = self._at_price(
            low, high, lambda path: path.saved_bytes <= self._most_saved_bytes
        )
        # The computed microbatch does not fit besides what is kept.
        if not self._fits(self._begun(high)[-1]):
            low, high, _, _ = self._at_price(high, self._followed(self._least), self._fits)
        self._join(low, high)

    def _at_price(
        self, low: _Path, high: _Path, enough: Callable[[_Partial], bool]
    ) -> tuple[_Path, _Path, float, _Remaining]:
        """Returns two paths that are both cheapest at one price, of which the second is `enough`, that price,
        and the cheapest paths at it; the paths are equal where `low` is enough.

        What a path costs is a line over the price. Where the lines of two paths cross, another path is
        cheaper, and takes the place of one of them; or none is, and this is the price.
        """
        a, b = self._begun(low)[-1], self._begun(high)[-1]
        if enough(a):
            return low, low, self._price, self._remaining
        while True:
            freed_bytes = a.saved_bytes - b.saved_bytes
            price = max(0.0, b.seconds - a.seconds) / freed_bytes if freed_bytes > 0 else 0.0
            remaining = self._paths.priced(price)
            path = self._followed(remaining)
            middle = self._begun(path)[-1]
            reached_s = a.seconds + price * a.saved_bytes
            if middle.seconds + price * middle.saved_bytes >= reached_s * (1 - SAME):
                return low, high, price, remaining
            if enough(middle):
                high, b = path, middle
            else:
                low, a = path, middle

    def _followed(self, remaining: _Remaining) -> _Path:
        """Returns the cheapest path."""
        path, k, state = list[_Arc](), 0, START
        while (arc := remaining[k][state][1]) is not None:
            path.append(arc)
            k, state = arc.end, arc.state
        return path

    def _begun(self, path: _Path, first: _Partial | None = None) -> list[_Partial]:
        """Returns the choices along a path, after its first 0, 1, 2, ... steps; the last is recorded if it is
        complete and fits.
        """
        begun, k = [first or self._first], first.end if first else 0
        for arc in path:
            begun.append(_extended(begun[-1], k, arc))
            k = arc.end
        if k == self._n and self._fits(begun[-1]):
            self._consider(begun[-1:])
        return begun

    def _join(self, low: _Path, high: _Path) -> None:
        """Tries choices that begin as one path and end as the other, with as much of `low` as fits.

        At one price layers that are alike are chosen alike: all or none. So some are as in one path.
        """
        for begin, end in ((low, high), (high, low)):
            begun, places = self._begun(begin), {node: place for place, node in enumerate(_nodes(end))}
            joints = [(at, places[node]) for at, node in enumerate(_nodes(begin)) if node in places]
            joints = joints if begin is low else joints[::-1]
            first, last = 0, len(joints) - 1
            while first <= last:
                middle = (first + last) // 2
                at, place = joints[middle]
                tried = self._begun(end[place:], begun[at])[-1]
                first, last = (middle + 1, last) if self._fits(tried) else (first, middle - 1)

    def _bound_s(self, seconds: float, saved_bytes: int, k: int, state: State) -> float:
        """Returns the least seconds of a complete choice that begins with these seconds and bytes."""
        keepable = self._most_saved_bytes - saved_bytes
        if self._least[k][state][0] > keepable:
            return inf
        return seconds + max(0.0, self._remaining[k][state][0] - self._price * keepable)

    def _longer(self, partial: _Partial, k: int, arc: _Arc) -> _Partial | None:
        """Returns the longer choice; None where it does not fit, or cannot beat the best known one."""
        saved_bytes, seconds = partial.saved_bytes + arc.saved_bytes, partial.seconds + arc.extra_s
        if self._bound_s(seconds, saved_bytes, arc.end, arc.state) >= self._known_s():
            return None
        longer = _extended(partial, k, arc)
        return longer if self._fits(longer) else None

    def _fits(self, partial: _Partial) -> bool:
        acting = (*partial.worst, 0)
        return all(waiting * partial.saved_bytes + acting[at] <= room for room, waiting, at in self._limits)

    def _saved_at_most(self, room: int, waiting: int, phase: int) -> int:
        """Returns what one microbatch may keep under one limit; the last unit's moment adds to all that is
        kept.
        """
        if phase != NOTHING:
            stage = self._stage
            own = (stage.workspace, stage.backward, stage.first_backward)[phase]
            room, waiting = room - own[-1], waiting + 1
        return room // waiting if waiting else (1 << 62 if room >= 0 else -1)

    def _never_matters(self, phase: int) -> int:
        """Returns the size of a worst moment that fits whatever is kept."""
        return min(
            (room - w * self._most_saved_bytes for room, w, p in self._limits if p == phase), default=1 << 62
        )


def _extended(partial: _Partial, k: int, arc: _Arc) -> _Partial:
    saved_bytes, (a, b, c), (x, y, z) = partial.saved_bytes + arc.saved_bytes, partial.worst, arc.worst
    worst = max(a, saved_bytes + x), max(b, saved_bytes + y), max(c, saved_bytes + z)
    return _Partial(partial.seconds + arc.extra_s, saved_bytes, worst, k, arc.end, arc.segment, partial)


def _nodes(path: _Path) -> list[tuple[int, State]]:
    """Returns the units and states between the steps of a path, its ends included."""
    return [(0, START), *((arc.end, arc.state) for arc in path)]


def _undominated(partials: Sequence[_Partial]) -> list[_Partial]:
    """Returns, by ascending seconds, the choices that no other beats."""
    undominated: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.seconds, p.saved_bytes, p.worst)):
        if not any(other.beats(partial) for other in undominated):
            undominated.append(partial)
    return undominated
