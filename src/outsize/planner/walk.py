"""Problem: what does the microbatch that a stage works on hold at its worst moment, for all runs of units?

Its forward goes through the units first..end-1, its backward back. At unit k it holds

    forward      what units first..k have saved, values made here with users at k or later, workspace of k
    backward     what units first..k have saved, gradients that are on their way past k, gradients of the
                 weights of k; what crosses the stage's ends stays until the backward is over: the received
                 values, the sent ones (roots), the gradients that came in

A received or sent value that autograd keeps is one memory, counted once. In the first backward of a step
the weights' gradients come into being on the way: those after k are there at k, and those of k are made.
Later ones hold all gradients, to which the new ones of k are added.

Method: a value is alive for a range of k that depends on `end` alone (backward) or on `first` alone
(forward), so it adds a rectangle to a table over (k, end) or (first, k); a running maximum along k makes
tables over (first, end). Memory that crosses `end` and is saved at u is counted twice from k = u on; that of
u < first never was, which a term in (first, end) puts right.

Deviations: of a received value saved at u, k < u counts it as freed with the saved ones. Complexity:
O(n^2 + users of all values). Oracle: tests/unit/planner/test_walk.py, which walks every run unit by unit.
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
class Memory:
    """A memory made by unit `made`, last used by the units `used`, kept by autograd from unit `saved` on."""

    size_bytes: int
    made: int
    used: tuple[int, ...]
    saved: int | None
    gradient: bool

    @property
    def last(self) -> int:
        """The last unit that uses it."""
        return self.used[-1]


@final
@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What the units hold by themselves, each of shape (n,).

    `rising`: what its backward holds beside saved tensors at the worst moment: the gradients out of an op and
    into it, those of weights too. `alone`: it is one op, so the gradient into it is the unit's own result's.
    """

    saved: Bytes
    workspace: Bytes
    gradients: Bytes
    rising: Bytes
    alone: NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """Tables over (first, end) of shape (n + 1, n + 1).

    twice            bytes of received and sent values that are among the saved ones, per microbatch
    again            the sent ones of them, of which a recompute makes a second copy in the backward
    forward          beside the received values: what the microbatch that acts holds in its forward
    backward         beside received and sent values and the gradients that came in; `weights`' gradients too
    first_backward   the same where no gradients of weights are there yet
    """

    twice: Bytes
    again: Bytes
    forward: Bytes
    backward: Bytes
    first_backward: Bytes

    @classmethod
    def of(cls, graph: ModelGraph, units: UnitBytes) -> Self:
        """The tables of a graph."""
        n = len(graph.units)
        values, memories = [v for v in graph.values if v.consumers], memories_of(graph.values)
        saved, gradients = _prefix(units.saved), _prefix(units.gradients)
        crossing_kept = _kept_beyond(n, values)
        before = np.zeros_like(crossing_kept)
        before[1:] = crossing_kept[:-1]
        received_kept, sent_kept = _kept_inside(n, values), _at_end(crossing_kept) - before
        held = held_backward(n, memories, units, saved) - crossing_kept
        fixed = before - received_kept - saved[:, None]
        after = np.append(gradients[1:], gradients[-1])
        return cls(
            twice=sent_kept + received_kept,
            again=sent_kept,
            forward=_worst_forward(_held_forward(n, memories, values, units, saved)) - saved[:, None],
            backward=_worst_backward(held) + fixed + gradients - gradients[:, None],
            first_backward=_worst_backward(held - after[:, None]) + fixed + gradients,
        )


def memories_of(values: Iterable[Value]) -> list[Memory]:
    """One for all values that are views of one memory."""
    return [memory_of(views) for views in by_storage(v for v in values if v.consumers)]


def by_storage(values: Iterable[Value]) -> list[list[Value]]:
    """The views of each memory."""
    groups: dict[int, list[Value]] = {}
    for value in values:
        groups.setdefault(value.storage if value.storage >= 0 else -1 - value.id, []).append(value)
    return list(groups.values())


def own_bytes(units: Sequence[Unit], costs: Sequence[UnitCost]) -> Bytes:
    """What autograd keeps of each unit, beside what others have made."""
    kept = (c.saved_bytes - u.saved_input_bytes for c, u in zip(costs, units, strict=True))
    return np.array([*kept], np.int64)


def memory_of(views: Sequence[Value]) -> Memory:
    """Of all its views, which are used."""
    together = sum(v.size_bytes for v in views)
    return Memory(
        size_bytes=min(together, views[0].storage_bytes or together),
        made=min(v.producer for v in views),
        used=tuple(sorted({c for v in views for c in v.consumers})),
        saved=_saved_by(views[0]),
        gradient=any(v.requires_grad for v in views),
    )


def _saved_by(value: Value) -> int | None:
    return value.saved_by if value.saved_by >= 0 else None


def _prefix(per_unit: Bytes) -> Bytes:
    """Sum over the units before each one, of shape (n + 1,)."""
    return np.concatenate(([0], np.cumsum(per_unit)))


def _square(n: int) -> Bytes:
    return np.zeros((n + 2, n + 2), np.int64)


def add(table: Bytes, rows: tuple[int, int], columns: tuple[int, int], size: int) -> None:
    """Add `size` to a rectangle, both ends inclusive, of a table that will be summed by `filled`."""
    (a, b), (c, d) = rows, columns
    if a > b or c > d:
        return
    table[a, c] += size
    table[a, d + 1] -= size
    table[b + 1, c] -= size
    table[b + 1, d + 1] += size


def filled(table: Bytes) -> Bytes:
    """The sums of the rectangles, in the table's own memory."""
    np.cumsum(table, axis=0, out=table)
    return np.cumsum(table, axis=1, out=table)[:-1, :-1]


def _kept_beyond(n: int, values: Iterable[Value]) -> Bytes:
    """[k, end]: values made before `end`, used at `end` or later, saved at k or before."""
    table = _square(n)
    for v in values:
        saved = _saved_by(v)
        if saved is not None:
            add(table, (saved, n), (v.producer + 1, v.consumers[-1]), v.size_bytes)
    return filled(table)


def _at_end(table: Bytes) -> Bytes:
    """[k, end] -> its row at k = end - 1, as a table over (first, end)."""
    n = len(table) - 1
    row = np.append(0, table[np.arange(n), np.arange(1, n + 1)])
    return np.broadcast_to(row, table.shape)


def _kept_inside(n: int, values: Iterable[Value]) -> Bytes:
    """[first, end]: values made before `first`, used inside and not later, saved inside."""
    table = _square(n)
    for v in values:
        saved = _saved_by(v)
        if saved is not None:
            latest = max((c for c in v.consumers if c <= saved), default=-1)
            add(table, (v.producer + 1, latest), (max(v.consumers[-1], saved) + 1, n), v.size_bytes)
    return filled(table)


def _held_forward(
    n: int, memories: Iterable[Memory], values: Iterable[Value], units: UnitBytes, saved: Bytes
) -> Bytes:
    """[first, k]: saved by units before `first` too, values made here, workspace; received ones once."""
    table = _square(n)
    for m in memories:
        stop = m.last if m.saved is None else min(m.last, m.saved - 1)
        # Row `first` <= made: one sum from the diagonal, by rectangles of all earlier rows.
        add(table, (0, m.made), (m.made, stop), m.size_bytes)
    for v in values:
        kept = _saved_by(v)
        if kept is not None:
            latest = max((c for c in v.consumers if c <= kept), default=-1)
            add(table, (v.producer + 1, latest), (kept, n), -v.size_bytes)
    held = filled(table)
    held[:, :-1] += saved[1:] + units.workspace
    return held


def held_backward(n: int, memories: Iterable[Memory], units: UnitBytes, saved: Bytes) -> Bytes:
    """[k, end]: saved by units up to k, gradients on their way past k, what k's backward holds beside them.

    Of a unit that does not tell (it has no costs): the gradients into it, out of it, and its weights'.
    """
    own, past = _square(n), _square(n)
    for m in (m for m in memories if m.gradient):
        for last, after in pairwise((*m.used, n + 1)):
            ends = last + 1, min(after, n)
            add(own, (m.made, last), ends, m.size_bytes)
            add(past, (m.made + 1, last - 1), ends, m.size_bytes)
        if units.alone[m.made]:  # its gradient came in, and is counted as such
            add(past, (m.made, m.made), (m.made + 1, m.used[0]), -m.size_bytes)
    held, inside = filled(own), filled(past)
    held[:-1] += units.gradients[:, None]
    inside[:-1] += units.rising[:, None]
    told = np.append(units.rising > 0, False)
    held[told] = np.maximum(inside[told], 0)
    held[:-1] += saved[1:, None]
    return held


def _worst_forward(held: Bytes) -> Bytes:
    """Maximum over k = first..end-1 of [first, k]; zero for empty runs."""
    n = len(held) - 1
    table = np.zeros_like(held)
    table[:, 1:] = np.maximum.accumulate(np.where(_upper(n), held[:, :-1], 0), axis=1)
    return table


def _worst_backward(held: Bytes) -> Bytes:
    """Maximum over k = first..end-1 of [k, end]; far below every sum where there is no such k."""
    n = len(held) - 1
    inside = np.arange(n + 1)[:, None] < np.arange(n + 1)
    table = np.where(inside, held, np.iinfo(np.int64).min // 4)
    return np.maximum.accumulate(table[::-1], axis=0)[::-1]


def _upper(n: int) -> NDArray[np.bool_]:
    return np.arange(n + 1)[:, None] <= np.arange(n)
