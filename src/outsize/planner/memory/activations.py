"""Problem: what does the microbatch being computed hold at its worst moment, for all runs of units?

Its forward visits the units first..end-1 in order, its backward in reverse. At unit k it holds

    forward      what units first..k have saved, values made here with users at k or later, workspace of k
    backward     what units first..k have saved, gradients that are on their way past k, gradients of the
                 weights of k; what crosses the stage's ends stays until the backward is over: the received
                 values, the sent ones (roots), the gradients that came in

A received or sent value that autograd saves is one memory, counted once. In the first backward of a step the
weights' gradients are made along the way: those of units after k exist at k, and those of k are being made.
Later backwards hold all gradients, to which the new ones of k are added; in a loop of the user's own, whose
autograd gets all gradients of a microbatch at once, the new ones are made along the way in each backward.

Method: a value is alive for a range of k that depends on `end` alone (backward) or on `first` alone
(forward), so it adds a rectangle to a table over (k, end) or (first, k); a running maximum along k makes
tables over (first, end). Memory that crosses `end` and is saved at u is counted twice from k = u on; where u
< first it never was, which a term in (first, end) corrects.

Deviations: a received value saved at u counts for k < u as freed with the saved ones. Complexity: O(n^2 +
users of all values). Oracle: tests/unit/planner/memory/test_memory_activations.py, which visits every run
unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph, Unit, Value
from outsize.ir.profile import UnitCost

Bytes = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class Storage:
    """Describes a memory made by unit `made`, used last by the last of `used`, and saved by autograd from
    unit `saved` on (None: never). `gradient`: its gradient is computed.
    """

    size_bytes: int
    made: int
    used: tuple[int, ...]
    saved: int | None
    gradient: bool

    @property
    def last(self) -> int:
        """Returns the last unit that uses it."""
        return self.used[-1]


@final
@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Holds bytes per unit, each array of shape (n,).

    `backward_workspace`: what the unit's backward holds at its worst moment besides saved tensors: the
    gradients of an op's outputs and inputs, and of weights. `single_op`: the unit is one op, so the gradient
    that its backward takes in is that of the unit's own result.
    """

    saved: Bytes
    workspace: Bytes
    gradients: Bytes
    backward_workspace: Bytes
    single_op: NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ActivationTables:
    """Holds tables over (first, end) of shape (n + 1, n + 1), in bytes per microbatch.

    saved_boundary   received and sent values that are among the saved ones
    saved_sent       the sent ones of them, of which a recompute makes a second copy in the backward
    forward          what the forward of a microbatch holds besides the received values
    backward         what its backward holds, the weights' gradients included, besides received values,
                     sent values and the gradients that were received
    first_backward   the same in the first backward of a step, which finds no gradients of weights
    """

    saved_boundary: Bytes
    saved_sent: Bytes
    forward: Bytes
    backward: Bytes
    first_backward: Bytes

    @classmethod
    def of(cls, graph: ModelGraph, units: UnitBytes) -> Self:
        """Computes the tables of a graph."""
        n = len(graph.units)
        values, memories = [v for v in graph.values if v.consumers], storages_of(graph.values)
        saved, gradients = _prefix(units.saved), _prefix(units.gradients)
        saved_beyond = _saved_beyond(n, values)
        saved_beyond_before = np.zeros_like(saved_beyond)
        saved_beyond_before[1:] = saved_beyond[:-1]
        received_saved, sent_saved = _saved_inside(n, values), _at_end(saved_beyond) - saved_beyond_before
        held = held_backward(n, memories, units, saved) - saved_beyond
        fixed = saved_beyond_before - received_saved - saved[:, None]
        after = np.append(gradients[1:], gradients[-1])
        first_backward = _worst_backward(held - after[:, None]) + fixed + gradients
        backward = _worst_backward(held) + fixed
        if graph.in_loop:
            backward = first_backward
        return cls(
            saved_boundary=sent_saved + received_saved,
            saved_sent=sent_saved,
            forward=_worst_forward(_held_forward(n, memories, values, units, saved)) - saved[:, None],
            backward=backward + gradients - gradients[:, None],
            first_backward=first_backward,
        )


def storages_of(values: Iterable[Value]) -> list[Storage]:
    """Returns one storage for all values that are views of one memory."""
    return [storage_of(views) for views in by_storage(v for v in values if v.consumers)]


def by_storage(values: Iterable[Value]) -> list[list[Value]]:
    """Groups the values that are views of one memory."""
    groups: dict[int, list[Value]] = {}
    for value in values:
        groups.setdefault(value.storage if value.storage >= 0 else -1 - value.id, []).append(value)
    return list(groups.values())


def own_bytes(units: Sequence[Unit], costs: Sequence[UnitCost]) -> Bytes:
    """Returns the bytes that autograd saves of each unit's own tensors, without those that other
    units made.
    """
    own = (c.saved_bytes - u.saved_input_bytes for c, u in zip(costs, units, strict=True))
    return np.array([*own], np.int64)


def storage_of(views: Sequence[Value]) -> Storage:
    """Combines the views of one memory, all of which have users."""
    together = sum(v.size_bytes for v in views)
    return Storage(
        size_bytes=min(together, views[0].storage_bytes or together),
        made=min(v.producer for v in views),
        used=tuple(sorted({c for v in views for c in v.consumers})),
        saved=_saved_by(views[0]),
        gradient=any(v.requires_grad for v in views),
    )


def _saved_by(value: Value) -> int | None:
    return value.saved_by if value.saved_by >= 0 else None


def _prefix(per_unit: Bytes) -> Bytes:
    """Returns the sum over the units before each one, of shape (n + 1,)."""
    return np.concatenate(([0], np.cumsum(per_unit)))


def _square(n: int) -> Bytes:
    return np.zeros((n + 2, n + 2), np.int64)


def add(table: Bytes, rows: tuple[int, int], columns: tuple[int, int], size: int) -> None:
    """Adds `size` to a rectangle (both ends inclusive) of a table that `filled` will sum."""
    (a, b), (c, d) = rows, columns
    if a > b or c > d:
        return
    table[a, c] += size
    table[a, d + 1] -= size
    table[b + 1, c] -= size
    table[b + 1, d + 1] += size


def filled(table: Bytes) -> Bytes:
    """Returns the sums of the rectangles, computed in the table's own memory."""
    np.cumsum(table, axis=0, out=table)
    return np.cumsum(table, axis=1, out=table)[:-1, :-1]


def _saved_beyond(n: int, values: Iterable[Value]) -> Bytes:
    """Fills [k, end]: values made before `end`, used at `end` or later, saved at k or before."""
    table = _square(n)
    for v in values:
        saved = _saved_by(v)
        if saved is not None:
            add(table, (saved, n), (v.producer + 1, v.consumers[-1]), v.size_bytes)
    return filled(table)


def _at_end(table: Bytes) -> Bytes:
    """Maps [k, end] to its row at k = end - 1, as a table over (first, end)."""
    n = len(table) - 1
    row = np.append(0, table[np.arange(n), np.arange(1, n + 1)])
    return np.broadcast_to(row, table.shape)


def _saved_inside(n: int, values: Iterable[Value]) -> Bytes:
    """Fills [first, end]: values made before `first`, used inside and not later, saved inside."""
    table = _square(n)
    for v in values:
        saved = _saved_by(v)
        if saved is not None:
            latest = max((c for c in v.consumers if c <= saved), default=-1)
            add(table, (v.producer + 1, latest), (max(v.consumers[-1], saved) + 1, n), v.size_bytes)
    return filled(table)


def _held_forward(
    n: int, memories: Iterable[Storage], values: Iterable[Value], units: UnitBytes, saved: Bytes
) -> Bytes:
    """Fills [first, k]: the saved bytes of all units up to k (also before `first`), values made in the run,
    and workspace; received values that are saved count once.
    """
    table = _square(n)
    for m in memories:
        stop = m.last if m.saved is None else min(m.last, m.saved - 1)
        # Row `first` <= made: one sum from the diagonal, by rectangles of all earlier rows.
        add(table, (0, m.made), (m.made, stop), m.size_bytes)
    for v in values:
        saved_at = _saved_by(v)
        if saved_at is not None:
            latest = max((c for c in v.consumers if c <= saved_at), default=-1)
            add(table, (v.producer + 1, latest), (saved_at, n), -v.size_bytes)
    held = filled(table)
    held[:, :-1] += saved[1:] + units.workspace
    return held


def held_backward(n: int, memories: Iterable[Storage], units: UnitBytes, saved: Bytes) -> Bytes:
    """Fills [k, end]: the saved bytes of units up to k, gradients passing k, and what the backward of k
    holds.

    A unit without a known backward workspace (it has no costs) counts the gradients of its inputs, outputs
    and weights.
    """
    own, passing = _square(n), _square(n)
    for m in (m for m in memories if m.gradient):
        for last, after in pairwise((*m.used, n + 1)):
            ends = last + 1, min(after, n)
            add(own, (m.made, last), ends, m.size_bytes)
            add(passing, (m.made + 1, last - 1), ends, m.size_bytes)
        if units.single_op[
            m.made
        ]:  # The gradient of a single op's result was received, and is counted there.
            add(passing, (m.made, m.made), (m.made + 1, m.used[0]), -m.size_bytes)
    held, inside = filled(own), filled(passing)
    held[:-1] += units.gradients[:, None]
    inside[:-1] += units.backward_workspace[:, None]
    known = np.append(units.backward_workspace > 0, False)
    held[known] = np.maximum(inside[known], 0)
    held[:-1] += saved[1:, None]
    return held


def _worst_forward(held: Bytes) -> Bytes:
    """Takes the maximum over k = first..end-1 of [first, k]; zero for empty runs."""
    n = len(held) - 1
    table = np.zeros_like(held)
    table[:, 1:] = np.maximum.accumulate(np.where(_upper(n), held[:, :-1], 0), axis=1)
    return table


def _worst_backward(held: Bytes) -> Bytes:
    """Takes the maximum over k = first..end-1 of [k, end]; a very negative number where there is no
    such k.
    """
    n = len(held) - 1
    inside = np.arange(n + 1)[:, None] < np.arange(n + 1)
    table = np.where(inside, held, np.iinfo(np.int64).min // 4)
    return np.maximum.accumulate(table[::-1], axis=0)[::-1]


def _upper(n: int) -> NDArray[np.bool_]:
    return np.arange(n + 1)[:, None] <= np.arange(n)
