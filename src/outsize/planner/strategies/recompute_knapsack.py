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
relaxation, Fisher, Management Science 27(1), 1981). p is bisected; its shortest paths are also the first
complete choices, and where the computed microbatch does not fit besides them, p is raised until it does. A
choice whose bound reaches the best known one is dropped.

It is exact among segments of at most LONGEST units, unless there were more states or choices than MOST: then
the bound says by how much (`least_s`). Complexity: states x segments x choices; exponential at worst, as the
problem is. Oracle: tests/unit/planner/strategies/test_recompute_choice.py, all subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, final

from outsize.ir.units.recompute_segments import Run
from outsize.planner.memory.recomputed_stage import SegmentBytes, StageBytes

LONGEST: Final = 12
WIDTH: Final = 6
MOST: Final = 200
MOST_STATES: Final = 64
# Above HIGHEST seconds per byte only bytes count; HALVINGS is the precision of the price.
HIGHEST: Final = 1e6
HALVINGS: Final = 24
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


@final
@dataclass(frozen=True, slots=True)
class _Partial:
    """Describes choices for the first units, linked backward."""

    seconds: float
    saved_bytes: int
    worst: tuple[int, int, int]
    start: int = 0
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
        self._segments = dict[Run, tuple[SegmentBytes, float]]()
        self._used_by: list[list[int]] = [[] for _ in range(stage.units)]
        for i in inner:
            for unit in stores[i].used:
                self._used_by[unit].append(i)
        alive = [
            sum(stores[i].size_bytes for i in inner if stores[i].made <= k <= stores[i].last)
            for k in range(stage.units)
        ]
        self._forward = [a + b + c for a, b, c in zip(alive, stage.leaving, stage.workspace, strict=True)]
        self.arcs: list[dict[State, list[_Arc]]] = [{} for _ in range(stage.units + 1)]
        self.arcs[0][START] = []
        self.complete = True
        for k in range(stage.units):
            self.complete &= len(self.arcs[k]) <= MOST_STATES
            for state in list(self.arcs[k])[:MOST_STATES]:
                self.arcs[k][state] = list(self._from(k, state))
                for arc in self.arcs[k][state]:
                    self.arcs[arc.end].setdefault(arc.state, [])

    def priced(
        self, second_per_byte: float, *, seconds: float = 1.0
    ) -> list[dict[State, tuple[float, _Arc | None]]]:
        """Returns the cheapest path to the end from each state, and its first step."""
        cheapest: list[dict[State, tuple[float, _Arc | None]]] = [{} for _ in self.arcs]
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
        saved_here = saved | {i for i in stage.inner if k in stage.stores[i].keepers}
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
        if (k, end) not in self._segments:
            self._segments[k, end] = self._stage.segment(k, end), sum(self._forward_s[k:end])
        acting, seconds = self._segments[k, end]
        forward = max(self._held_forward(u, saved_with_reads) for u in range(k, end))
        return _Arc(
            end,
            seconds,
            self._size(saved_with_reads - saved),
            (forward, acting.backward, acting.first_backward),
            (self._used_from(end, saved_with_reads), True),
            segment=True,
        )

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
            self._bisect()

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

    def _bisect(self) -> None:
        """Finds the price at which the cheapest path keeps about as much as allowed, and one at which it
        fits.
        """
        self._price = self._least_price(lambda path: path.saved_bytes <= self._most_saved_bytes)
        self._remaining = self._paths.priced(self._price)
        # The computed microbatch does not fit besides what is kept.
        if not self._fits(self._cheapest_path(self._price)):
            self._least_price(self._fits)

    def _least_price(self, enough: Callable[[_Partial], bool]) -> float:
        """Returns about the least price whose path is `enough`; each path that fits is a complete choice."""
        low, high = 0.0, 1.0
        while not enough(self._cheapest_path(high)) and high < HIGHEST:
            low, high = high, high * 16
        for _ in range(HALVINGS):
            middle = (low + high) / 2 if low else high / 16
            low, high = (low, middle) if enough(self._cheapest_path(middle)) else (middle, high)
        return high

    def _cheapest_path(self, price: float) -> _Partial:
        """Returns the cheapest path at this price, and records it if it fits."""
        remaining, partial, k, state = self._paths.priced(price), self._first, 0, START
        while (arc := remaining[k][state][1]) is not None:
            partial = _extended(partial, k, arc)
            k, state = arc.end, arc.state
        if k == self._n and self._fits(partial):
            self._consider([partial])
        return partial

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
    return _Partial(partial.seconds + arc.extra_s, saved_bytes, worst, k, arc.segment, partial)


def _undominated(partials: Sequence[_Partial]) -> list[_Partial]:
    """Returns, by ascending seconds, the choices that no other beats."""
    undominated: list[_Partial] = []
    for partial in sorted(partials, key=lambda p: (p.seconds, p.saved_bytes, p.worst)):
        if not any(other.beats(partial) for other in undominated):
            undominated.append(partial)
    return undominated
