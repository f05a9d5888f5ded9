"""Problem: when does each action of a step begin and end, for very many cuts of one schedule?

Which action waits for which depends on the schedule alone, so the network of events is built once, as arrays:

    compute      waits for the action before it on its rank, for its messages, for the weights that it uses,
                 and a backward for its activations
    message      waits for the action that made it, for the message before it on its wire, and until its
                 receive is posted: one action before the one that needs it, or with a later message of
                 the wire that is needed sooner (lower.py)
    collective   UNSHARD and REDUCE_GRAD (schedules/sharded.py): waits for the compute action before it on
                 its rank, and for the collective before it there, since a communicator has one queue
    pair         a forward and a backward that run together: the first waits for the messages of both, and
                 what the forward makes leaves behind the second, which lasts what both take beyond the first
    copy         OFFLOAD_F and FETCH_B (schedules/offload.py): waits for the compute action before it on its
                 rank, and for the copy before it in its direction. Compute waits until the copies that leave
                 have left before more are launched, and before it sends more, for those that the next
                 backward needs (run/host/copy_lane.py)

For a cut only the durations differ, and the step is the longest path: each node starts when the last node it
waits for has ended. Nodes at equal distance from a start form one level, and in a wide network a level is one
array operation.

FSDP2 waits in each REDUCE_GRAD until no more than `ahead` earlier ones run, since their inputs take memory;
on a CPU a rank waits for each, and for each copy (`MoveWaits`). This is a critical path (Kelley 1961) by
levels; the order is Kahn's (CACM 5(11), 1962), a frontier at a time. Complexity: O(actions + messages) for
each step; there are about 4 (m + p) levels. Oracles: tests/unit/planner/simulation/test_critical_path.py
compares with `simulate` for all schedules, skips and tied weights, test_collective_nodes.py with events that
are played one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule, together
from outsize.ir.timeline import Lane, Span
from outsize.schedules.message import PRODUCERS, Edges, Message, edge_messages

Cost = tuple[Kind, int, int]
"""(kind, stage, -1) of an action, (REDUCE_GRAD, stage, LAST) of a stage's last one, (B or I, stage,
behind(s)) of a backward that runs together with a forward of stage s; (F or B, source, destination) of a
transfer."""
Label = tuple[int, Lane, Action]
Nodes = NDArray[np.int64]
CODES: Final = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}
COLLECTIVES: Final = frozenset({Kind.UNSHARD, Kind.REDUCE_GRAD})
COPIES: Final = frozenset({Kind.OFFLOAD_F, Kind.FETCH_B})
MOVES: Final = COLLECTIVES | COPIES
NOBODY: Final = -1
LAST: Final = -2
_PAIRED: Final = -3
# Array operations pay from this many nodes a level, and from this many in all.
WIDE: Final = 24
MANY: Final = 30_000
# A message waits for up to three: its producer, the message before it, and its receive.
FEWEST: Final = 3


def behind(stage: int) -> int:
    """Returns the third number of the cost of a backward that runs together with a forward of a stage."""
    return _PAIRED - stage


def paired_with(cost: Cost) -> int | None:
    """Returns the stage of the forward that a backward of this cost runs together with, or None."""
    return _PAIRED - cost[-1] if cost[-1] <= _PAIRED else None


@final
@dataclass(frozen=True, eq=False)
class MoveWaits:
    """Says what waits for collectives and copies: a compute action of stage s for the weights of `needs[s]`,
    what follows a REDUCE_GRAD for all before it but the last `ahead`, and what follows a copy for it, unless
    it `overlaps` with compute.
    """

    needs: Mapping[int, Set[int]]
    ahead: int
    overlaps: bool = True


@final
@dataclass(frozen=True, eq=False)
class Network:
    """Holds the nodes by level; `kinds[node]` is the index of its cost in `costs`.

    `waits`, of shape (largest number of predecessors, nodes), lists what a node waits for; `nodes` pads it.
    `place[k]` is the node of what was added as k-th: compute actions row after row, then `labels()`'s others.
    """

    costs: tuple[Cost, ...]
    kinds: Nodes
    waits: Nodes
    levels: tuple[int, ...]
    place: Nodes
    labels: Callable[[], list[Label]]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        forward: Edges,
        backward: Edges,
        step: Edges = frozenset[tuple[int, int]](),
        waits: MoveWaits | None = None,
    ) -> Self:
        """Builds the network of a schedule of compute actions, collectives and copies, with messages over
        these edges between stages.

        Raises InvalidSchedule when it hangs.
        """
        building = _Building(schedule, forward, backward, step)
        if waits is not None:
            building.add(waits)
        kinds, arcs = np.concatenate(building.kinds), np.concatenate(building.arcs, axis=1)
        order, levels = _by_level(len(kinds), arcs)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        before = _table(len(kinds), place[arcs])
        return cls(tuple(building.costs), kinds[order], before, levels, place, building.labels)

    def step_s(self, seconds: Mapping[Cost, float]) -> float:
        """Returns when the last node ends."""
        return float(max(self.ends_s(seconds)))

    def ends_s(self, seconds: Mapping[Cost, float]) -> Sequence[float]:
        """Returns when each node ends, and 0 behind them."""
        durations = [seconds[cost] for cost in self.costs]
        wide = len(self.kinds) > WIDE * len(self.levels)
        if wide:
            return self._by_levels(np.array(durations))
        return self._by_nodes(durations) if len(self.waits) == FEWEST else self._by_many(durations)

    def path(self, ends: Sequence[float], node: int) -> Counter[Cost]:
        """Returns how often each cost is on a longest path to the end of a node; `ends` are those of all."""
        counts, nobody = Counter[Cost](), len(self.kinds)
        while node != nobody:
            counts[self.costs[self.kinds[node]]] += 1
            node = max(self.waits[:, node].tolist(), key=ends.__getitem__)
        return counts

    def spans(self, seconds: Mapping[Cost, float]) -> list[Span]:
        """Returns the span of each node."""
        ends, labels = self.ends_s(seconds), self.labels()
        starts = np.maximum.reduce(np.asarray(ends)[self.waits]).tolist()
        return [
            Span(rank=rank, lane=lane, action=str(action), start_s=starts[node], end_s=float(ends[node]))
            for (rank, lane, action), node in zip(labels, self.place.tolist(), strict=True)
        ]

    def _by_levels(self, durations: NDArray[np.float64]) -> Sequence[float]:
        lasting, latest = durations[self.kinds], np.maximum.reduce
        ends = np.zeros(len(lasting) + 1)
        for first, end in pairwise(self.levels):
            np.add(latest(ends[self.waits[:, first:end]]), lasting[first:end], out=ends[first:end])
        return ends.tolist()

    def _by_nodes(self, durations: Sequence[float]) -> Sequence[float]:
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
        return ends

    def _by_many(self, durations: Sequence[float]) -> Sequence[float]:
        """Returns the same where nodes wait for more than three."""
        ends = [0.0] * (len(self.kinds) + 1)
        for node, (kind, *before) in enumerate(self.rows):
            ends[node] = max([ends[other] for other in before]) + durations[kind]
        return ends

    @cached_property
    def paired(self) -> dict[Cost, int]:
        """Returns the costs of backwards that run together with a forward, and the stage of that."""
        return {cost: stage for cost in self.costs if (stage := paired_with(cost)) is not None}

    @cached_property
    def rows(self) -> list[list[int]]:
        """Lists the cost's index of each node, and what it waits for."""
        return np.vstack([self.kinds, self.waits]).T.tolist()


@final
class _Building:
    """Collects the nodes of a network: `costs`, the cost's index of each node (`kinds`), and `arcs` of shape
    (2, number): what is waited for, who waits.
    """

    def __init__(self, schedule: Schedule, forward: Edges, backward: Edges, step: Edges) -> None:
        self._schedule, self._rows = schedule, _Rows(schedule)
        rows, messages = self._rows, list(_messages(self._rows, forward, backward, step))
        self.costs: list[Cost] = [(kind, s, NOBODY) for s in range(schedule.stages) for kind in CODES]
        own = rows.stage * len(CODES) + rows.code
        for second, cost in rows.paired():
            if cost not in self.costs:
                self.costs.append(cost)
            own[second] = self.costs.index(cost)
        self.kinds, self.arcs = [own], [rows.chain()]
        self._nodes, self._messages, self._wires = len(rows.stage), messages, list[Nodes]()
        self._moves: list[Label] = []
        for wire in _wires(rows, messages):
            numbers = self._nodes + np.arange(wire.shape[1])
            producers, consumers, _, place, _ = wire
            self.kinds.append(len(self.costs) + place)
            posted = rows.posted(consumers)
            self.arcs += [
                np.array([producers, numbers]),
                np.array([numbers[:-1], numbers[1:]]),
                np.array([numbers, consumers]),
            ]
            self.arcs.append(np.array([posted, numbers])[:, posted != NOBODY])
            self._nodes += len(numbers)
            self._wires.append(wire)
        self.costs += [(kind, *edge) for kind, edge, _ in messages]

    def add(self, waits: MoveWaits) -> None:
        """Adds the collectives and copies of the schedule's rows."""
        place, kinds = dict[Cost, int](), list[int]()
        arcs, compute = list[tuple[int, int]](), 0
        for rank, row in enumerate(self._schedule.actions):
            queues = _MoveQueues(waits, arcs)
            last = {action.stage: at for at, action in enumerate(row) if action.kind is Kind.REDUCE_GRAD}
            for at, (action, following) in enumerate(_with_following(row)):
                if action.kind in COMPUTE:
                    queues.compute(action, compute)
                    compute += 1
                elif action.kind in MOVES:
                    queues.launch(action, following, self._nodes)
                    self._moves.append((rank, "load", action))
                    is_last = action.kind is Kind.REDUCE_GRAD and last[action.stage] == at
                    cost = action.kind, action.stage, LAST if is_last else NOBODY
                    kinds.append(len(self.costs) + place.setdefault(cost, len(place)))
                    self._nodes += 1
        self.costs += place
        self.kinds.append(np.array(kinds, np.int64))
        self.arcs.append(np.array(arcs, np.int64).reshape(-1, 2).T)

    def labels(self) -> list[Label]:
        """Returns rank, lane and action of each node, in the order in which they were added."""
        rows = [[a for a in row if a.kind in COMPUTE] for row in self._schedule.actions]
        computed: list[Label] = [(rank, "compute", a) for rank, row in enumerate(rows) for a in row]
        rank_of, sent = self._schedule.rank_of, list[Label]()
        for _, _, _, places, microbatches in (wire.tolist() for wire in self._wires):
            for place, microbatch in zip(places, microbatches, strict=True):
                kind, (source, destination), _ = self._messages[place]
                message = Message(kind, source, destination, microbatch)
                sent.append((rank_of[source], "send", message.send))
        return computed + sent + self._moves


@final
class _MoveQueues:
    """Collects what the collectives and copies of one rank wait for, and what waits for them."""

    def __init__(self, waits: MoveWaits, arcs: list[tuple[int, int]]) -> None:
        self._waits, self._arcs = waits, arcs
        self._compute, self._ends = NOBODY, dict[Kind, int]()
        self._gathered: dict[int, int] = {}
        self._fetched: dict[tuple[int, int], int] = {}
        self._reduced: list[int] = []
        self._awaited: list[int] = []  # What the rank's compute is behind, besides the last compute action.

    def compute(self, action: Action, node: int) -> None:
        """Lets a compute action wait for what it needs, and for what has to be gone."""
        needs = self._waits.needs.get(action.stage, ())
        own = [self._gathered.pop(owner, NOBODY) for owner in needs]
        if action.kind in (Kind.B, Kind.I):
            own.append(self._fetched.pop((action.stage, action.microbatch), NOBODY))
        self._wait(node, *own, *self._awaited)
        self._compute, self._awaited = node, []

    def launch(self, action: Action, following: Action | None, node: int) -> None:
        """Lets a collective or a copy wait for compute and for its queue."""
        kind = action.kind
        if kind in COPIES:
            self._awaited.append(self._ends.get(Kind.OFFLOAD_F, NOBODY))
        if kind is Kind.OFFLOAD_F and following is not None and following.kind in (Kind.B, Kind.I):
            self._awaited.append(self._fetched.get((following.stage, following.microbatch), NOBODY))
        queue = Kind.UNSHARD if kind in COLLECTIVES else kind
        self._wait(node, self._compute, self._ends.get(queue, NOBODY), *self._awaited)
        self._ends[queue] = node
        if kind is Kind.UNSHARD:
            self._gathered[action.stage] = node
        elif kind is Kind.REDUCE_GRAD:
            self._reduced.append(node)
            self._awaited += self._reduced[: len(self._reduced) - self._waits.ahead][-1:]
        else:
            if kind is Kind.FETCH_B:
                self._fetched[action.stage, action.microbatch] = node
            self._awaited += [] if self._waits.overlaps else [node]

    def _wait(self, node: int, *others: int) -> None:
        self._arcs += [(other, node) for other in dict.fromkeys(others) if other != NOBODY]


def _with_following(row: Sequence[Action]) -> list[tuple[Action, Action | None]]:
    """Returns each action with the next compute action behind it."""
    pairs, following = list[tuple[Action, Action | None]](), None
    for action in reversed(row):
        pairs.append((action, following))
        following = action if action.kind in COMPUTE else following
    return pairs[::-1]


@final
class _Rows:
    """Holds all compute actions, row after row: rank, index in the row, stage and kind of each."""

    def __init__(self, schedule: Schedule) -> None:
        cells = [[cell for cell in together(row) if cell[0].kind in COMPUTE] for row in schedule.actions]
        rows = [[action for cell in row for action in cell] for row in cells]
        actions = [action for row in rows for action in row]
        lengths = [len(cell) for row in cells for cell in row]
        # The first and the last action of each cell, for each action; of each cell its number in the row.
        self._first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        self._last = np.repeat(np.cumsum(lengths) - 1, lengths)
        self._cell = np.repeat(np.concatenate([np.arange(len(row)) for row in cells]), lengths)
        self._actions = actions
        self.lengths = np.array([len(row) for row in rows])
        self.code = np.array([CODES[a.kind] for a in actions])
        self.stage = np.array([a.stage for a in actions])
        self.place = np.concatenate([np.arange(n) for n in self.lengths])
        self.rank_of, self._microbatch = schedule.rank_of, np.array([a.microbatch for a in actions])
        self._at = np.full((len(CODES), schedule.stages, schedule.microbatches), NOBODY)
        self._at[self.code, self.stage, self._microbatch] = np.arange(len(actions))

    def at(self, kind: Kind, stage: int) -> Nodes:
        """Returns who makes or uses the messages of each microbatch."""
        whole, *halves = PRODUCERS[kind]
        actions = self._at[CODES[whole], stage]
        for half in halves:
            actions = np.where(actions == NOBODY, self._at[CODES[half], stage], actions)
        return actions

    def paired(self) -> Iterator[tuple[int, Cost]]:
        """Yields each backward that runs together with a forward, and its cost."""
        for second in np.flatnonzero(self._first != np.arange(len(self._first))).tolist():
            first, action = self._actions[second - 1], self._actions[second]
            yield second, (action.kind, action.stage, behind(first.stage))

    def leaving(self, producers: Nodes) -> Nodes:
        """Returns behind which actions what these have made leaves."""
        return self._last[producers]

    def begins(self, consumers: Nodes) -> Nodes:
        """Returns before which actions what these need has to be there."""
        return self._first[consumers]

    def posted(self, consumers: Nodes) -> Nodes:
        """Returns the last action of the rank before each receive of a wire is posted; NOBODY at the row's
        start.
        """
        soonest = np.minimum.accumulate(consumers[::-1])[::-1]
        before = self._first[np.maximum(self._first[soonest] - 1, 0)] - 1
        return np.where(self._cell[soonest] >= 2, before, NOBODY)

    def chain(self) -> Nodes:
        """Returns the arcs along the rows."""
        second = np.flatnonzero(self.place)
        return np.array([second - 1, second])


Sent = tuple[Kind, tuple[int, int], Nodes]
"""Holds the messages of one kind over one edge: who makes them and who uses them, of shape (2, number)."""


def _messages(rows: _Rows, forward: Edges, backward: Edges, step: Edges) -> Iterator[Sent]:
    """Yields the messages of each edge between ranks."""
    for kind, source, destination, once in edge_messages(forward, backward, step):
        if rows.rank_of[source] != rows.rank_of[destination]:
            ends = np.array([rows.leaving(rows.at(kind, source)), rows.begins(rows.at(kind, destination))])
            yield kind, (source, destination), ends[:, :1] if once else ends


def _wires(rows: _Rows, messages: list[Sent]) -> Iterator[Nodes]:
    """Yields each wire in the order of the sends: producer, consumer, destination, the edge's index,
    microbatch.
    """
    wires: dict[tuple[int, int, Kind], list[Nodes]] = {}
    for place, (kind, (source, destination), ends) in enumerate(messages):
        more = np.array([[destination], [place]]).repeat(ends.shape[1], axis=1)
        more = np.concatenate([more, np.arange(ends.shape[1])[None]])
        key = rows.rank_of[source], rows.rank_of[destination], kind
        wires.setdefault(key, []).append(np.concatenate([ends, more]))
    for parts in wires.values():
        wire = np.concatenate(parts, axis=1)
        yield wire[:, np.lexsort((wire[2], wire[0]))]


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
