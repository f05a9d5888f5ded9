"""Problem: what does a stage need when some of its units are recomputed in the backward?

The chosen units run in segments (ir/units/recompute_segments.py). A segment keeps what it reads of the units
before it; what autograd would save inside it exists again from its second forward until its own backward has
used it. So a memory that crosses units is kept from its first keeper on, and its keepers are the units
outside segments that autograd saves it for and the segments that read it without having made it. Let saved(k)
be all that units and segments up to k keep. At unit k the stage holds

    forward    saved(k), values made here with users at k or later, workspace of k
    backward   saved(k), what the segment of k has saved again up to k, gradients passing k
    again      saved(k), the segment's second forward at its worst moment, gradients of what it has made

Received and sent values exist all the time (account.py counts them) and are no part of saved(k).

Deviations: values that every stage computes for itself (masks) count as freed with the first unit that keeps
them. Complexity: O(units x memories). Oracles: tests/unit/planner/memory/test_recomputed_stage.py counts
tensor by tensor and, where no unit is recomputed, equals activations.py; benchmarks/memory runs real steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph, Unit, Value
from outsize.ir.profile import Profile
from outsize.ir.units.recompute_segments import Run, segments
from outsize.planner.memory.activations import UnitBytes, by_storage, held_backward, own_bytes, storages_of

# This number stands for a moment that does not occur.
NOTHING: Final = -(1 << 62)


@final
@dataclass(frozen=True, slots=True)
class StageStorage:
    """Describes a memory that crosses units of the stage: made by unit `made` (-1: received), last used by
    `last` (n: sent), saved by autograd for `keepers`.
    """

    size_bytes: int
    made: int
    last: int
    used: tuple[int, ...]
    keepers: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class MicrobatchBytes:
    """Holds the bytes of one microbatch without received and sent values: kept until its backward, and at the
    worst moment of each kind.

    The backward includes the gradients of weights, as in activations.py.
    """

    saved_bytes: int
    forward: int
    backward: int
    first_backward: int


@final
@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Holds the bytes of a segment at the worst moment of its backward, its second forward included."""

    backward: int
    first_backward: int


@final
@dataclass(frozen=True)
class StageBytes:
    """Describes the units 0..n-1 of one stage: the bytes of each, and the memories that cross them.

    `own`: what autograd saves for the unit alone. `workspace`: temporaries of its forward. `backward`,
    `first_backward`: gradients in its backward, those of weights included. `passing[b]`, `first_passing[b]`:
    gradients that exist when all units from b on have gone back; n + 1 entries.
    """

    block: tuple[str, ...]
    own: tuple[int, ...]
    workspace: tuple[int, ...]
    backward: tuple[int, ...]
    first_backward: tuple[int, ...]
    passing: tuple[int, ...]
    first_passing: tuple[int, ...]
    stores: tuple[StageStorage, ...]

    @classmethod
    def of(
        cls, graph: ModelGraph, profile: Profile, gradients: Sequence[int], run: Run, block_of: Sequence[str]
    ) -> Self:
        """Builds the stage with the units of a run; `gradients`: bytes for the weights that each of its units
        owns; `block_of`: the block of each unit of the graph (ir/units/recompute_segments.py:blocks).
        """
        first, end = run
        n, units = end - first, graph.units[first:end]
        values = [view for v in graph.values if (view := _within(v, first, end)) is not None]
        memories, costs = by_storage(values), profile.units[first:end]
        stores, own = [_store(views, n) for views in memories], own_bytes(units, costs)
        for views, store in zip(memories, stores, strict=True):
            if 1 <= views[0].saved_by <= n:
                own[views[0].saved_by - 1] -= store.size_bytes
        held, crossing = _gradients(values, units, gradients)
        weights = np.array(gradients, np.int64)
        weights_behind = np.append(weights[::-1].cumsum()[::-1], 0)
        # In a user's own loop gradients are made anew in each backward, beside those that are there.
        at_unit, passing = (weights_behind[1:], weights_behind) if graph.in_loop else (0, 0)
        return cls(
            block=tuple(block_of[first:end]),
            own=tuple(np.maximum(own, 0).tolist()),
            workspace=tuple(c.workspace_bytes for c in costs),
            backward=tuple((held + at_unit + weights.sum()).tolist()),
            first_backward=tuple((held + weights_behind[1:]).tolist()),
            passing=tuple((crossing + passing + weights.sum()).tolist()),
            first_passing=tuple((crossing + weights_behind).tolist()),
            stores=tuple(stores),
        )

    @property
    def units(self) -> int:
        """Returns the number of units, n."""
        return len(self.own)

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """Returns the indices of the storages that are neither received nor sent."""
        return tuple(i for i, s in enumerate(self.stores) if s.made >= 0 and s.last < self.units)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """Returns for each unit the bytes of the inner storages that are made by then and still used."""
        inner = [self.stores[place] for place in self.inner]
        return tuple(_sum_of_spans(self.units, ((s.made, s.last + 1, s.size_bytes) for s in inner)).tolist())

    @cached_property
    def leaving(self) -> tuple[int, ...]:
        """Returns for each unit the bytes of the values made up to it that will be sent."""
        sent = [s for s in self.stores if s.made >= 0 and s.last >= self.units]
        return tuple(_sum_of_spans(self.units, ((s.made, self.units, s.size_bytes) for s in sent)).tolist())

    @cached_property
    def _first_kept(self) -> list[list[Run]]:
        """Returns for each unit the memories (made by, bytes) that are kept for it and for none before."""
        kept: list[list[Run]] = [[] for _ in range(self.units)]
        for store in (s for s in self.stores if s.made >= 0 and s.keepers):
            kept[store.keepers[0]].append((store.made, store.size_bytes))
        return kept

    @cached_property
    def _held_for(self) -> list[list[tuple[int, int, int, int]]]:
        """Returns for each unit the memories (made by, first unit, end, bytes) that it uses, and the units at
        which a second forward holds them for it and for none before, until autograd saves them.
        """
        held_for: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.units)]
        for store in (s for s in self.stores if s.made >= 0):
            since = min(store.keepers, default=self.units)
            for before, unit in pairwise((store.made - 1, *(u for u in store.used if u >= store.made))):
                first, end = max(before + 1, store.made), min(unit + 1, since)
                if first < end:
                    held_for[unit].append((store.made, first, end, store.size_bytes))
        return held_for

    def held(self, chosen: Collection[int]) -> MicrobatchBytes:
        """Returns the bytes of the stage when the units `chosen` are recomputed."""
        n, parts = self.units, segments(self.block, chosen)
        start_of = {unit: a for a, b in parts for unit in range(a, b)}
        inner = [self.stores[place] for place in self.inner]
        pairs = [(store, _saved_from(store, start_of, n)) for store in inner]
        own = np.array([0 if k in start_of else self.own[k] for k in range(n)], np.int64)
        saved_bytes = np.cumsum(own) + _sum_of_spans(n, ((at, n, s.size_bytes) for s, at in pairs))
        alive = _sum_of_spans(n, ((s.made, min(s.last + 1, at), s.size_bytes) for s, at in pairs))
        forward = saved_bytes + alive + np.array(self.leaving) + np.array(self.workspace)
        acting = {
            k: SegmentBytes(self.backward[k], self.first_backward[k]) for k in range(n) if k not in start_of
        }
        acting |= {a: self.segment(a, b) for a, b in parts}
        return MicrobatchBytes(
            int(saved_bytes[-1]),
            max(0, int(forward.max())),
            max(int(saved_bytes[k]) + at.backward for k, at in acting.items()),
            max(int(saved_bytes[k]) + at.first_backward for k, at in acting.items()),
        )

    def segment(self, a: int, b: int) -> SegmentBytes:
        """Returns what the segment holds in its second forward and in its backward, besides what is kept."""
        return list(self.segments_from(a, b))[-1]

    def segments_from(self, a: int, most: int) -> Iterator[SegmentBytes]:
        """Yields the same for all segments that begin with unit a, the shortest first, up to end `most`.

        The second forward ends with the last tensor that is saved: tensors made only for other segments do
        not exist. So a unit more adds what it saves, and what is held for it since it was made or last used.
        """
        saved_bytes, held = 0, list[int]()
        again, backward, first_backward = 0, NOTHING, NOTHING
        for k in range(a, most):
            saved_bytes += self.own[k] + sum(size for made, size in self._first_kept[k] if made >= a)
            held.append(saved_bytes + self.workspace[k])
            again = max(again, held[-1])
            for made, first, end, size_bytes in self._held_for[k]:
                for unit in range(first, end) if made >= a else ():
                    held[unit - a] += size_bytes
                    again = max(again, held[unit - a])
            backward = max(backward, saved_bytes + self.backward[k])
            first_backward = max(first_backward, saved_bytes + self.first_backward[k])
            yield SegmentBytes(
                max(backward, again + self.passing[k + 1]),
                max(first_backward, again + self.first_passing[k + 1]),
            )


def _saved_from(store: StageStorage, start_of: Mapping[int, int], never: int) -> int:
    """Returns the unit from which on the storage is kept; `start_of` maps units to the start of their
    segment.
    """
    outside = (unit for unit in store.keepers if unit not in start_of)
    reading = (start_of[unit] for unit in store.used if unit in start_of)
    return min((*outside, *(a for a in reading if store.made < a)), default=never)


def _sum_of_spans(n: int, spans: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Returns for each of n units the sum of the sizes whose span (first, end, size) covers it."""
    steps = np.zeros(n + 1, np.int64)
    for first, end, size in spans:
        steps[first] += size
        steps[end] -= size
    return np.cumsum(steps)[:-1]


def _within(value: Value, first: int, end: int) -> Value | None:
    """Renumbers a value for the stage: unit 0 stands for all before it, 1..n are its own, n + 1 for all after
    it.
    """
    if value.producer >= end or value.consumers[-1:] < (first,):
        return None

    def place(unit: int) -> int:
        return min(max(unit - first + 1, 0), end - first + 1)

    users = sorted({place(u) for u in value.consumers} - {0})
    keepers = [place(u) for u in (value.saved_by, *value.also_saved_by) if first <= u < end]
    return value.model_copy(
        update={
            "producer": place(value.producer),
            "consumers": tuple(users),
            "saved_by": place(value.saved_by) if value.saved_by >= 0 else -1,
            "also_saved_by": tuple(keepers),
        }
    )


def _store(views: Sequence[Value], n: int) -> StageStorage:
    total_bytes = sum(v.size_bytes for v in views)
    used = sorted({u - 1 for v in views for u in v.consumers})
    return StageStorage(
        size_bytes=min(total_bytes, views[0].storage_bytes or total_bytes),
        made=min(v.producer for v in views) - 1,
        last=min(used[-1], n),
        used=tuple(u for u in used if u < n),
        keepers=tuple(sorted({u - 1 for u in views[0].also_saved_by})),
    )


def _gradients(
    values: Sequence[Value], units: Sequence[Unit], weights: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns, without the weights' gradients, what the backward of each unit holds and what exists between
    units.
    """
    n, memories = len(units), storages_of(values)
    unit_bytes = UnitBytes(
        saved=np.zeros(n + 2, np.int64),
        workspace=np.zeros(n + 2, np.int64),
        gradients=np.pad(np.array(weights, np.int64), 1),
        backward_workspace=np.pad(np.array([u.backward_workspace_bytes for u in units], np.int64), 1),
        single_op=np.pad(np.array([sum(w.launches for w in u.forward) <= 1 for u in units]), 1),
    )
    held = held_backward(n + 2, memories, unit_bytes, np.zeros(n + 3, np.int64))[1 : n + 1, n + 1]
    ends = ((m, max((u for u in m.used if u <= n), default=-1)) for m in memories if m.gradient)
    crossing = _sum_of_spans(n + 1, ((m.made, last, m.size_bytes) for m, last in ends if m.made < last))
    return held, crossing
