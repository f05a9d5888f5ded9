"""Problem: compute the seconds of a step for very many cuts of one schedule, without the spans of each.

Which action waits for which depends on the schedule alone, so the simulator's network of events (simulate.py)
is built once, as arrays:

    compute      waits for the action before it on its rank, and for its messages
    message      waits for the action that made it, for the message before it on its wire, and until its
                 receive is posted: one action before the one that needs it, or with a later message of
                 the wire that is needed sooner (lower.py)

For a cut only the durations differ, and the step is the longest path: each node starts when the last node it
waits for has ended. Nodes at equal distance from a start form one level, and in a wide network a level is one
array operation.

The maxima and sums are those of the simulator, so the seconds are equal, bit by bit. This is a critical path
(Kelley 1961) by levels; the order is Kahn's (CACM 5(11), 1962), a frontier at a time. Complexity: O(actions +
messages) for each step; there are about 4 (m + p) levels. Oracle:
tests/unit/planner/simulation/test_critical_path.py compares with `simulate` for all schedules, skips and tied
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Kind, Schedule

Cost = tuple[Kind, int, int]
"""(kind, stage, -1) of a compute action; (F or B, source, destination) of a transfer."""
Edges = Set[tuple[int, int]]
Nodes = NDArray[np.int64]
CODES: Final = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}
NOBODY: Final = -1
# Array operations pay from this many nodes a level, and from this many in all.
WIDE: Final = 24
MANY: Final = 30_000
# A message waits for up to three: its producer, the message before it, and its receive.
FEWEST: Final = 3


@final
@dataclass(frozen=True, eq=False)
class Network:
    """Holds the nodes by level; `kinds[node]` is the index of its cost in `costs`.

    `waits`, of shape (largest number of predecessors, nodes), lists what a node waits for; `nodes` pads it.
    """

    costs: tuple[Cost, ...]
    kinds: Nodes
    waits: Nodes
    levels: tuple[int, ...]

    @classmethod
    def of(
        cls, schedule: Schedule, forward: Edges, backward: Edges, step: Edges = frozenset[tuple[int, int]]()
    ) -> Self:
        """Builds the network of a schedule of compute actions, with messages over these edges between stages.

        Raises InvalidSchedule when it hangs.
        """
        return cls._leveled(*_nodes_and_arcs(schedule, forward, backward, step))

    @classmethod
    def _leveled(cls, costs: tuple[Cost, ...], kinds: Nodes, arcs: Nodes) -> Self:
        order, levels = _by_level(len(kinds), arcs)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(costs, kinds[order], _table(len(kinds), place[arcs]), levels)

    def step_s(self, seconds: Mapping[Cost, float]) -> float:
        """Returns when the last node ends."""
        durations = [seconds[cost] for cost in self.costs]
        wide = len(self.kinds) > WIDE * len(self.levels) or len(self.waits) > FEWEST
        return self._by_levels(np.array(durations)) if wide else self._by_nodes(durations)

    def _by_levels(self, durations: NDArray[np.float64]) -> float:
        lasting, latest = durations[self.kinds], np.maximum.reduce
        ends = np.zeros(len(lasting) + 1)
        for first, end in pairwise(self.levels):
            np.add(latest(ends[self.waits[:, first:end]]), lasting[first:end], out=ends[first:end])
        return float(ends.max())

    def _by_nodes(self, durations: Sequence[float]) -> float:
        """Returns the same for narrow levels, where array operations would do little."""
        ends = [0.0] * (len(self.kinds) + 1)
        for node, (kind, a, b, c) in enumerate(self.rows):
            start, other = ends[a], ends[b]
            if other > start:
                start = other
            other = ends[c]
            if other > start:
                start = other
            ends[node] = start + durations[kind]
        return max(ends)

    @cached_property
    def rows(self) -> list[list[int]]:
        """Lists the cost's index of each node, and what it waits for."""
        return np.vstack([self.kinds, self.waits]).T.tolist()


def _nodes_and_arcs(
    schedule: Schedule, forward: Edges, backward: Edges, step: Edges
) -> tuple[tuple[Cost, ...], Nodes, Nodes]:
    """Returns the costs, the cost's index of each node, and arcs of shape (2, number): what is waited for,
    who waits.
    """
    rows = _Rows(schedule)
    messages = list(_messages(rows, forward, backward, step))
    costs = [(kind, stage, NOBODY) for stage in range(schedule.stages) for kind in CODES]
    kinds, arcs, nodes = [rows.stage * len(CODES) + rows.code], [rows.chain()], len(rows.stage)
    for wire in _wires(rows, messages):
        numbers = nodes + np.arange(wire.shape[1])
        producers, consumers, _, place = wire
        kinds.append(len(costs) + place)
        posted = _posted(rows, consumers)
        arcs += [
            np.array([producers, numbers]),
            np.array([numbers[:-1], numbers[1:]]),
            np.array([numbers, consumers]),
        ]
        arcs.append(np.array([posted, numbers])[:, posted != NOBODY])
        nodes += len(numbers)
    costs += [(kind, *edge) for kind, edge, _ in messages]
    return tuple(costs), np.concatenate(kinds), np.concatenate(arcs, axis=1)


@final
class _Rows:
    """Holds all compute actions, row after row: rank, index in the row, stage and kind of each."""

    def __init__(self, schedule: Schedule) -> None:
        actions = [action for row in schedule.actions for action in row]
        self.lengths = np.array([len(row) for row in schedule.actions])
        self.code = np.array([CODES[a.kind] for a in actions])
        self.stage = np.array([a.stage for a in actions])
        self.place = np.concatenate([np.arange(n) for n in self.lengths])
        self.rank_of, self._microbatch = schedule.rank_of, np.array([a.microbatch for a in actions])
        self._at = np.full((len(CODES), schedule.stages, schedule.microbatches), NOBODY)
        self._at[self.code, self.stage, self._microbatch] = np.arange(len(actions))

    def at(self, kind: Kind, stage: int) -> Nodes:
        """Returns who makes or uses the messages of each microbatch; the gradients of a split backward belong
        to I.
        """
        actions = self._at[CODES[kind], stage]
        return (
            np.where(actions == NOBODY, self._at[CODES[Kind.I], stage], actions)
            if kind is Kind.B
            else actions
        )

    def chain(self) -> Nodes:
        """Returns the arcs along the rows."""
        second = np.flatnonzero(self.place)
        return np.array([second - 1, second])


Sent = tuple[Kind, tuple[int, int], Nodes]
"""Holds the messages of one kind over one edge: who makes them and who uses them, of shape (2, number)."""


def _messages(rows: _Rows, forward: Edges, backward: Edges, step: Edges) -> Iterator[Sent]:
    """Yields messages between ranks; step edges carry one, with microbatch 0, unless a forward edge covers
    them.
    """
    down, up = [(Kind.F, edge) for edge in sorted(forward | step)], [(Kind.B, e) for e in sorted(backward)]
    for kind, (source, destination) in down + up:
        if rows.rank_of[source] != rows.rank_of[destination]:
            ends = np.array([rows.at(kind, source), rows.at(kind, destination)])
            once = kind is Kind.F and (source, destination) not in forward
            yield kind, (source, destination), ends[:, :1] if once else ends


def _wires(rows: _Rows, messages: list[Sent]) -> Iterator[Nodes]:
    """Yields each wire in the order of the sends: producer, consumer, destination, the edge's index."""
    wires: dict[tuple[int, int, Kind], list[Nodes]] = {}
    for place, (kind, (source, destination), ends) in enumerate(messages):
        more = np.array([[destination], [place]]).repeat(ends.shape[1], axis=1)
        key = rows.rank_of[source], rows.rank_of[destination], kind
        wires.setdefault(key, []).append(np.concatenate([ends, more]))
    for parts in wires.values():
        wire = np.concatenate(parts, axis=1)
        yield wire[:, np.lexsort((wire[2], wire[0]))]


def _posted(rows: _Rows, consumers: Nodes) -> Nodes:
    """Returns the last action of the rank before each receive of a wire is posted; NOBODY at the
    row's start.
    """
    soonest = np.minimum.accumulate(consumers[::-1])[::-1]
    return np.where(rows.place[soonest] >= 2, soonest - 2, NOBODY)


def _by_level(nodes: int, arcs: Nodes) -> tuple[Nodes, tuple[int, ...]]:
    """Returns the nodes level by level, and the index at which each level begins, then their number."""
    order, levels = (_by_arrays if nodes > MANY else _one_by_one)(nodes, arcs)
    if len(order) < nodes:
        raise _hangs(nodes - len(order), nodes)
    return order, tuple(levels)


def _by_arrays(nodes: int, arcs: Nodes) -> tuple[Nodes, list[int]]:
    """Sorts a frontier at a time, for many nodes, of which many are free at once."""
    arcs = arcs[:, np.argsort(arcs[0], kind="stable")]
    first = np.searchsorted(arcs[0], np.arange(nodes + 1))
    remaining = np.bincount(arcs[1], minlength=nodes)
    frontier, order, levels = np.flatnonzero(remaining == 0), list[Nodes](), [0]
    while len(frontier):
        order.append(frontier)
        levels.append(levels[-1] + len(frontier))
        reached = arcs[1, _spans(first[frontier], first[frontier + 1])]
        np.subtract.at(remaining, reached, 1)
        frontier = np.unique(reached[remaining[reached] == 0])
    return np.concatenate(order), levels


def _spans(firsts: Nodes, ends: Nodes) -> Nodes:
    """Returns all numbers from each first to its end."""
    lengths = ends - firsts
    return np.arange(lengths.sum()) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)


def _one_by_one(nodes: int, arcs: Nodes) -> tuple[Nodes, list[int]]:
    after: list[list[int]] = [[] for _ in range(nodes)]
    for before, waiting in arcs.T.tolist():
        after[before].append(waiting)
    remaining: list[int] = np.bincount(arcs[1], minlength=nodes).tolist()
    frontier, order, levels = [n for n in range(nodes) if not remaining[n]], list[int](), [0]
    while frontier:
        order += frontier
        levels.append(len(order))
        frontier = _freed(frontier, after, remaining)
    return np.array(order, np.int64), levels


def _freed(done: Sequence[int], after: Sequence[Sequence[int]], remaining: list[int]) -> list[int]:
    """Returns the nodes that wait for nothing else, now that those in `done` are done."""
    freed: list[int] = []
    for node in done:
        for waiting in after[node]:
            remaining[waiting] -= 1
            if not remaining[waiting]:
                freed.append(waiting)
    return freed


def _table(nodes: int, arcs: Nodes) -> Nodes:
    """Returns for each node what it waits for, padded with `nodes`."""
    before, after = arcs[:, np.argsort(arcs[1], kind="stable")]
    first = np.searchsorted(after, np.arange(nodes + 1))
    waits = np.full((max(FEWEST, int(np.diff(first).max(initial=0))), nodes), nodes)
    waits[np.arange(len(after)) - first[after], after] = before
    return waits


def _hangs(left: int, nodes: int) -> InvalidSchedule:
    return InvalidSchedule(
        "the schedule hangs: actions wait for each other",
        numbers=f"{left} of {nodes} actions and messages never start",
        next_step="outsize.schedules.check.check says where",
    )
