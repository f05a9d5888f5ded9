"""Problem: what does a stage need that is recomputed block by block, for all runs of units at once?

All units of the run are recomputed, so its segments (ir/units/recompute_segments.py) are the model's blocks,
cut off at its ends. A memory made in the run is kept once a later segment of it reads it; a memory that only
its own segment uses is freed in the forward. Let K(first, a, end) be the bytes of the memories that are made
and last used inside and are read by a segment that begins at a or before. Then

    saved      K(first, end, end)
    forward    max over k: memories made in the run up to k that are used or read later; workspace
    backward   max over segments a..b-1: K(first, a, end) + the worst of
                   its units k: saved by a..k + H(k, end)           gradients in the backward of k
                   its second forward + C(b, end)                  gradients that exist after unit b went back

Where blocks are streamed (policies/activations.py), a memory that one later segment alone reads is on the
host between its use in the forward and that segment's backward, and so is what attention has returned. Beside
each segment the device then holds what one other segment keeps there, which leaves or comes, and in a
backward what the segment itself has received.

H and C depend on `end` alone, and what a segment saves depends on where it begins: so a segment adds one row
of numbers over `end` to a rectangle of K. Sums over memories are corners of a table, then cumulative sums.

The result equals recomputed_stage.py, which computes one stage for any choice of units; where only some views
of one memory are in a run, that memory counts whole. Complexity: O(units x ends + blocks x ends^2). Oracle:
tests/unit/planner/memory/test_recomputed_blocks.py compares with recomputed_stage.py for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Final, Self, final

import numpy as np

from outsize.ir.graph import SMALL_BYTES, ModelGraph, Unit
from outsize.ir.profile import Profile
from outsize.ir.units.recompute_segments import Run, blocks, segments
from outsize.planner.memory.activations import (
    Storage,
    add,
    by_storage,
    filled,
    own_bytes,
    storage_of,
    storages_of,
)
from outsize.planner.memory.range_tables import Bytes, RangeTables

LEAST: Final = -(1 << 60)


@final
@dataclass(frozen=True, slots=True)
class _BlockStorage:
    """Describes a memory of the model: the unit that makes it, its users, and the unit whose saved bytes
    include it (`saved_by`, -1: none).

    `since`: the first unit that autograd saves it for. `read`: where the first later segment that uses it
    begins. Both are n where there is none. `away`: it waits for that segment on the host.
    """

    size_bytes: int
    made: int
    used: tuple[int, ...]
    saved_by: int
    since: int
    read: int
    away: bool = False


@final
@dataclass(frozen=True, slots=True, eq=False)
class StreamedBytes:
    """Holds for each segment of a model what it keeps on the host: what it has received, and what attention
    returns in it.
    """

    parts: tuple[Run, ...]
    received: Bytes
    results: Bytes

    @classmethod
    def of(cls, graph: ModelGraph) -> Self:
        """Returns those of a graph all of whose units are recomputed block by block."""
        parts = segments(blocks([u.name for u in graph.units]), range(len(graph.units)))
        part_of = np.repeat(np.arange(len(parts)), [b - a for a, b in parts])
        first_of = {a: place for place, (a, _) in enumerate(parts)}
        received, results = (np.zeros(len(parts), np.int64) for _ in range(2))
        for store in _stores(graph, parts, streams=True):
            if store.away:
                received[first_of[store.read]] += store.size_bytes
            if _attends(graph.units[store.made]):
                results[part_of[store.made]] += store.size_bytes
        return cls(parts, received, results)

    @property
    def kept(self) -> Bytes:
        """Returns all that each segment keeps on the host."""
        return self.received + self.results


def _attends(unit: Unit) -> bool:
    """Returns whether a unit computes attention, whose results are kept."""
    return any(work.family == "attention" for work in unit.forward)


def block_ranges(
    whole: RangeTables, graph: ModelGraph, profile: Profile, gradients: Bytes, ends: Sequence[int]
) -> RangeTables:
    """Returns the tables of runs of pieces, each recomputed block by block; `whole` are those without
    recompute.

    `gradients` of the weights that each unit owns; `ends`: first unit of each piece, then their number.
    """
    return _with_blocks(whole, _Tables(graph, profile, gradients, np.array(ends)))


def streamed_ranges(
    whole: RangeTables, graph: ModelGraph, profile: Profile, gradients: Bytes, ends: Sequence[int]
) -> RangeTables:
    """Returns the same where the host has what blocks keep."""
    tables, away = _Tables(graph, profile, gradients, np.array(ends), streams=True), StreamedBytes.of(graph)
    made, moving = _with_blocks(whole, tables), int(away.kept.max())
    behind = moving + int(away.received.max())
    # A segment counts for the run that it begins in.
    first = np.searchsorted(np.array(ends), [a for a, _ in away.parts], side="right") - 1
    kept = np.zeros(len(ends), np.int64)
    np.add.at(kept, first, away.kept)
    sums = np.append(0, np.cumsum(kept[:-1]))
    return replace(
        made,
        forward=made.forward + moving,
        backward=made.backward + behind,
        first_backward=made.first_backward + behind,
        on_host=np.triu(sums[None, :] - sums[:, None]),
    )


def _with_blocks(whole: RangeTables, tables: _Tables) -> RangeTables:
    names = ("saved", "backward", "first_backward")
    changed = dict(zip(names, tables.backward(), strict=True), forward=tables.forward())
    nothing = dict.fromkeys(("saved_boundary", "saved_sent"), np.zeros_like(whole.saved))
    return replace(whole, **changed, **nothing).backward_in_one_piece()


@final
class _Tables:
    """Computes the tables of all runs; rows are first pieces, columns are end pieces."""

    def __init__(
        self, graph: ModelGraph, profile: Profile, gradients: Bytes, ends: Bytes, *, streams: bool = False
    ) -> None:
        self._n, self._ends, self._in_loop = len(graph.units), ends, graph.in_loop
        self._parts = segments(blocks([u.name for u in graph.units]), range(self._n))
        self._stores = _stores(graph, self._parts, streams=streams)
        self._workspace = np.array([c.workspace_bytes for c in profile.units], np.int64)
        own = own_bytes(graph.units, profile.units)
        for store in (s for s in self._stores if s.saved_by >= 0):
            own[store.saved_by] -= store.size_bytes
        self._own: list[int] = np.maximum(own, 0).tolist()
        self._weights = np.append(0, np.cumsum(gradients))
        self._held, self._past = self._in_backward(graph, gradients)

    def forward(self) -> Bytes:
        """Returns the bytes at the worst unit of the forward."""
        table = self._corners(self._n + 1, len(self._ends))
        for s in self._stores:
            last = self._n if s.read < self._n and not s.away else s.used[-1]
            add(table, (s.made, last), (0, self._starting(s.made)), s.size_bytes)
        held = filled(table)[: self._n] + self._workspace[:, None]
        inside = np.arange(self._n)[:, None] >= self._ends
        worst = np.maximum.accumulate(np.where(inside, held, 0), axis=0)
        table = np.zeros((len(self._ends), len(self._ends)), np.int64)
        table[:, 1:] = worst[self._ends[1:] - 1].T
        return table

    def backward(self) -> tuple[Bytes, Bytes, Bytes]:
        """Returns what is kept, and the worst moment of a later and of a first backward."""
        size = len(self._ends)
        saved, later, first = (np.full((size, size), fill, np.int64) for fill in (0, LEAST, LEAST))
        reading = {at: list(group) for at, group in groupby(self._by_reader(), key=lambda s: s.read)}
        made = {at: list(group) for at, group in groupby(self._stores, key=lambda s: s.made)}
        for a, b in self._parts:
            for s in (store for store in reading.get(a, ()) if not store.away):
                saved[: self._starting(s.made) + 1, self._behind(s.used[-1]) :] += s.size_bytes
            rows = self._starting(a) + 1
            inner: list[int] = self._ends[rows : self._behind(b - 1)].tolist()
            made_here = [s for unit in range(a, b) for s in made.get(unit, ())]
            for start in (a, *inner):
                columns, acting = self._behind(start), self._segment((start, b), made_here)
                place = slice(0, rows) if start == a else self._starting(start)
                for table, worst in zip((later, first), acting, strict=True):
                    np.maximum(
                        table[place, columns:],
                        (saved[place, columns:] if start == a else 0) + worst,
                        out=table[place, columns:],
                    )
        weights = self._weights[self._ends]
        first += weights  # Those of a user's own loop are made anew in each backward (activations.py).
        return saved, (first if self._in_loop else later) + weights - weights[:, None], first

    def _by_reader(self) -> list[_BlockStorage]:
        return sorted((s for s in self._stores if s.read < self._n), key=lambda s: s.read)

    def _segment(self, part: Run, stores: Sequence[_BlockStorage]) -> tuple[Bytes, Bytes]:
        """Returns the worst moment of a segment for each end after its start: of a later backward without the
        weights' gradients, and of a first backward, which lacks some of them.
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

    def _again(self, a: int, b: int, made: Sequence[_BlockStorage], saved: Bytes) -> int:
        """Returns the worst moment of the second forward of a..b-1."""
        until = [max((u for u in s.used if u < b), default=-1) for s in made]
        spans = list(zip(made, until, strict=True))
        alive = (
            sum(s.size_bytes for s, end in spans if s.made <= k <= end and s.since > k) for k in range(a, b)
        )
        return max(
            int(saved[k]) + alive_bytes + int(self._workspace[a + k]) for k, alive_bytes in enumerate(alive)
        )

    def _in_backward(self, graph: ModelGraph, gradients: Bytes) -> tuple[Bytes, Bytes]:
        """Returns H of each unit and C at each cut, for all ends, as `activations.held_backward` defines
        them.
        """
        n, columns = self._n, len(self._ends)
        own, inside, passing = (self._corners(n + 1, columns) for _ in range(3))
        alone = [sum(w.launches for w in u.forward) <= 1 for u in graph.units]
        for m in (m for m in storages_of(graph.values) if m.gradient):
            for last, span in self._spans(m):
                add(own, (m.made, last), span, m.size_bytes)
                add(inside, (m.made + 1, last - 1), span, m.size_bytes)
                add(passing, (m.made + 1, last), span, m.size_bytes)
            if alone[m.made]:
                span = self._behind(m.made), self._starting(m.used[0])
                add(inside, (m.made, m.made), span, -m.size_bytes)
        backward_workspace = np.array([u.backward_workspace_bytes for u in graph.units], np.int64)
        held, known = filled(own)[:n], backward_workspace > 0
        held += gradients[:, None]
        held[known] = np.maximum(filled(inside)[:n][known] + backward_workspace[known, None], 0)
        return held, filled(passing)

    def _spans(self, m: Storage) -> Iterable[tuple[int, tuple[int, int]]]:
        """Yields the last use before an end, and the first and last column of such ends."""
        for last, after in pairwise((*m.used, self._n)):
            yield last, (self._behind(last), self._starting(after))

    def _corners(self, rows: int, columns: int) -> Bytes:
        return np.zeros((rows + 1, columns + 1), np.int64)

    def _starting(self, unit: int) -> int:
        """Returns the last piece that begins with this unit or before it."""
        return int(np.searchsorted(self._ends, unit, side="right")) - 1

    def _behind(self, unit: int) -> int:
        """Returns the first piece that begins after this unit."""
        return self._starting(unit) + 1


def _stores(graph: ModelGraph, parts: Sequence[Run], *, streams: bool) -> list[_BlockStorage]:
    """Returns the memories in the order of the units that make them; `streams` says that some go away."""
    n = len(graph.units)
    start_of = np.repeat([a for a, _ in parts], [b - a for a, b in parts]).tolist()
    storages: list[_BlockStorage] = []
    for views in by_storage(v for v in graph.values if v.consumers):
        storage, first_view = storage_of(views), views[0]
        keepers = (first_view.saved_by, *first_view.also_saved_by) if first_view.saved_by >= 0 else ()
        read = (start_of[unit] for unit in storage.used if start_of[unit] > storage.made)
        since, first = min(keepers, default=n), next(read, n)
        readers = {start_of[unit] for unit in storage.used}
        away = streams and first < n and readers == {first} and storage.size_bytes >= SMALL_BYTES
        storages.append(
            _BlockStorage(
                storage.size_bytes, storage.made, storage.used, first_view.saved_by, since, first, away
            )
        )
    return sorted(storages, key=lambda store: store.made)


def _running(sizes: Sequence[int]) -> Bytes:
    return np.cumsum(np.array(sizes, np.int64))
