"""Problem: what does a stage hold that is recomputed block by block, for all runs of units at once?

All units of the run are chosen, so its segments (ir/segments.py) are the model's blocks, cut off at its ends.
A memory made in the run stays once it is read by a later segment of it; what only its own segment uses goes
with the forward. With K(first, a, end) the sizes of those that are made and last used inside and read by a
segment that begins at a or before,

    saved      K(first, end, end)
    forward    max over k: memories made in the run up to k that will be read later, or still are; workspace
    backward   max over segments a..b-1: K(first, a, end) + the worst of
                   its units k: what a..k save + H(k, end)           gradients in the backward of k
                   its second forward + C(b, end)                    gradients that are there behind b

H and C depend on `end` alone, what a segment saves on where it begins: so a segment adds one row of numbers
over `end` to a rectangle of K. Sums over memories are corners of a table, then cumulative sums.

The same bytes as anew.py, which walks one stage with any choice of units; where views of one memory are not
all in a run, that memory counts whole. Complexity: O(units x ends + blocks x ends^2). Oracle:
tests/unit/planner/test_blockwise.py: anew.py for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.ir.segments import Run, blocks, segments
from outsize.planner.ranges import Bytes, Ranges
from outsize.planner.walk import Memory, add, by_storage, filled, memories_of, memory_of, own_bytes

LEAST: Final = -(1 << 60)


@final
@dataclass(frozen=True, slots=True)
class _Store:
    """A memory of the model: made by a unit, used by some, among the bytes of `saved_by` (-1: of none).

    `since`: the first unit that autograd keeps it for; `read`: where the first later segment that uses it
    begins. Both n where there is none.
    """

    size_bytes: int
    made: int
    used: tuple[int, ...]
    saved_by: int
    since: int
    read: int


def block_ranges(
    whole: Ranges, graph: ModelGraph, profile: Profile, gradients: Bytes, ends: Sequence[int]
) -> Ranges:
    """The tables of runs of pieces when each is recomputed block by block; `whole`: as it is.

    `gradients` of the weights that each unit owns; `ends`: first unit of each piece, then their number.
    """
    found = _Tables(graph, profile, gradients, np.array(ends))
    names = ("saved", "backward", "first_backward")
    changed = dict(zip(names, found.backward(), strict=True), forward=found.forward())
    nothing = dict.fromkeys(("twice", "again"), np.zeros_like(whole.saved))
    return replace(whole, **changed, **nothing).undivided()


@final
class _Tables:
    """What the runs hold; rows are first pieces, columns end pieces."""

    def __init__(self, graph: ModelGraph, profile: Profile, gradients: Bytes, ends: Bytes) -> None:
        self._n, self._ends = len(graph.units), ends
        self._parts = segments(blocks([u.name for u in graph.units]), range(self._n))
        self._stores = _stores(graph, self._parts)
        self._workspace = np.array([c.workspace_bytes for c in profile.units], np.int64)
        own = own_bytes(graph.units, profile.units)
        for store in (s for s in self._stores if s.saved_by >= 0):
            own[store.saved_by] -= store.size_bytes
        self._own: list[int] = np.maximum(own, 0).tolist()
        self._weights = np.append(0, np.cumsum(gradients))
        self._held, self._past = self._in_backward(graph, gradients)

    def forward(self) -> Bytes:
        """At the worst unit."""
        table = self._corners(self._n + 1, len(self._ends))
        for s in self._stores:
            last = self._n if s.read < self._n else s.used[-1]
            add(table, (s.made, last), (0, self._starting(s.made)), s.size_bytes)
        held = filled(table)[: self._n] + self._workspace[:, None]
        inside = np.arange(self._n)[:, None] >= self._ends
        worst = np.maximum.accumulate(np.where(inside, held, 0), axis=0)
        found = np.zeros((len(self._ends), len(self._ends)), np.int64)
        found[:, 1:] = worst[self._ends[1:] - 1].T
        return found

    def backward(self) -> tuple[Bytes, Bytes, Bytes]:
        """What is kept; the worst moments, with gradients of weights and in a first backward."""
        size = len(self._ends)
        kept, later, first = (np.full((size, size), least, np.int64) for least in (0, LEAST, LEAST))
        reading = {at: list(group) for at, group in groupby(self._by_reader(), key=lambda s: s.read)}
        made = {at: list(group) for at, group in groupby(self._stores, key=lambda s: s.made)}
        for a, b in self._parts:
            for s in reading.get(a, ()):
                kept[: self._starting(s.made) + 1, self._behind(s.used[-1]) :] += s.size_bytes
            rows = self._starting(a) + 1
            inner: list[int] = self._ends[rows : self._behind(b - 1)].tolist()
            here = [s for unit in range(a, b) for s in made.get(unit, ())]
            for start in (a, *inner):
                columns, acting = self._behind(start), self._segment((start, b), here)
                place = slice(0, rows) if start == a else self._starting(start)
                for table, worst in zip((later, first), acting, strict=True):
                    np.maximum(
                        table[place, columns:],
                        (kept[place, columns:] if start == a else 0) + worst,
                        out=table[place, columns:],
                    )
        weights = self._weights[self._ends]
        return kept, later + weights - weights[:, None], first + weights

    def _by_reader(self) -> list[_Store]:
        return sorted((s for s in self._stores if s.read < self._n), key=lambda s: s.read)

    def _segment(self, part: Run, stores: Sequence[_Store]) -> tuple[Bytes, Bytes]:
        """The worst of its moments for each end behind its start: beside weights' gradients, and with those
        that a first backward lacks taken off.
        """
        (a, b), ends = part, self._ends[self._behind(part[0]) :]
        made = [s for s in stores if s.made >= a]
        saved = _running(
            [self._own[u] + sum(s.size_bytes for s in made if s.since == u) for u in range(a, b)]
        )
        inside = np.where(np.arange(a, b)[:, None] < ends, 0, LEAST)
        held = self._held[a:b, -len(ends) :] + saved[:, None] + inside
        later, first = held.max(axis=0), (held - self._weights[a + 1 : b + 1, None]).max(axis=0)
        until = np.minimum(ends, b)
        worst = {int(e): self._again(a, int(e), made, saved) for e in np.unique(until)}
        again = np.array([worst[int(e)] for e in until]) + self._past[until, np.arange(-len(ends), 0)]
        return np.maximum(later, again), np.maximum(first, again - self._weights[until])

    def _again(self, a: int, b: int, made: Sequence[_Store], saved: Bytes) -> int:
        """The second forward of a..b-1 at its worst moment."""
        until = [max((u for u in s.used if u < b), default=-1) for s in made]
        spans = list(zip(made, until, strict=True))
        alive = (
            sum(s.size_bytes for s, end in spans if s.made <= k <= end and s.since > k) for k in range(a, b)
        )
        return max(int(saved[k]) + there + int(self._workspace[a + k]) for k, there in enumerate(alive))

    def _in_backward(self, graph: ModelGraph, gradients: Bytes) -> tuple[Bytes, Bytes]:
        """H of each unit and C at each cut, for all ends; as `walk.held_backward`."""
        n, columns = self._n, len(self._ends)
        own, inside, past = (self._corners(n + 1, columns) for _ in range(3))
        alone = [sum(w.launches for w in u.forward) <= 1 for u in graph.units]
        for m in (m for m in memories_of(graph.values) if m.gradient):
            for last, span in self._spans(m):
                add(own, (m.made, last), span, m.size_bytes)
                add(inside, (m.made + 1, last - 1), span, m.size_bytes)
                add(past, (m.made + 1, last), span, m.size_bytes)
            if alone[m.made]:
                span = self._behind(m.made), self._starting(m.used[0])
                add(inside, (m.made, m.made), span, -m.size_bytes)
        rising = np.array([u.backward_workspace_bytes for u in graph.units], np.int64)
        held, told = filled(own)[:n], rising > 0
        held += gradients[:, None]
        held[told] = np.maximum(filled(inside)[:n][told] + rising[told, None], 0)
        return held, filled(past)

    def _spans(self, m: Memory) -> Iterable[tuple[int, tuple[int, int]]]:
        """The last use before an end, and the first and last column of such ends."""
        for last, after in pairwise((*m.used, self._n)):
            yield last, (self._behind(last), self._starting(after))

    def _corners(self, rows: int, columns: int) -> Bytes:
        return np.zeros((rows + 1, columns + 1), np.int64)

    def _starting(self, unit: int) -> int:
        """The last piece that begins with this unit or before."""
        return int(np.searchsorted(self._ends, unit, side="right")) - 1

    def _behind(self, unit: int) -> int:
        """The first piece that begins after this unit."""
        return self._starting(unit) + 1


def _stores(graph: ModelGraph, parts: Sequence[Run]) -> list[_Store]:
    """In the order of their makers."""
    n = len(graph.units)
    start_of = np.repeat([a for a, _ in parts], [b - a for a, b in parts]).tolist()
    found: list[_Store] = []
    for views in by_storage(v for v in graph.values if v.consumers):
        memory, kept = memory_of(views), views[0]
        keepers = (kept.saved_by, *kept.also_saved_by) if kept.saved_by >= 0 else ()
        read = (start_of[unit] for unit in memory.used if start_of[unit] > memory.made)
        since, first = min(keepers, default=n), next(read, n)
        found.append(_Store(memory.size_bytes, memory.made, memory.used, kept.saved_by, since, first))
    return sorted(found, key=lambda store: store.made)


def _running(sizes: Sequence[int]) -> Bytes:
    return np.cumsum(np.array(sizes, np.int64))
