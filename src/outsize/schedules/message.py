"""Defines Message, what a send and its receive share, and which messages a schedule needs.

The rule of what is sent over an edge, and which actions make and use it, is in this file alone: the passes
over rows of actions and the planner's network of arrays (planner/simulation/critical_path.py) ask it. Which
values cross an edge is the question of planner/costs/stage_edges.py.

Message(Kind.F, 0, 2, 5)   activations of microbatch 5 from stage 0 to stage 2
producer  0F5              .send     0SEND_F5@2      on the rank of stage 0
consumer  2F5              .receive  2RECV_F5@0      on the rank of stage 2

The producer and consumer of a gradient follow from the schedule: B, or I where the backward is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final, NamedTuple, final

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Kind, Schedule

Edges = Set[tuple[int, int]]
Wire = tuple[int, int, Kind]
"""The rank that sends, the rank that receives, and what: F (activations) or B (gradients)."""

SENDS = {Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
RECEIVES = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
PRODUCERS: Final[Mapping[Kind, tuple[Kind, ...]]] = {Kind.F: (Kind.F,), Kind.B: (Kind.B, Kind.I)}
"""Maps the kind of a message to the kinds of action that make it, and use it: a stage has one of them for a
microbatch. Gradients of weights (W) are not sent.
"""


@final
class EdgeMessages(NamedTuple):
    """What goes over one edge in a step: a message for each microbatch, or one with microbatch 0 (`once`)."""

    kind: Kind
    source: int
    destination: int
    once: bool


def edge_messages(forward_edges: Edges, backward_edges: Edges, step_edges: Edges) -> Iterator[EdgeMessages]:
    """Yields what is sent over each edge (source stage, destination stage), sorted.

    Forward and backward edges carry one message for each microbatch, step edges one for microbatch 0 unless a
    forward edge covers them.
    """
    for edge in sorted({*forward_edges, *step_edges}):
        yield EdgeMessages(Kind.F, *edge, edge not in forward_edges)
    for edge in sorted(backward_edges):
        yield EdgeMessages(Kind.B, *edge, False)


@final
class Message(NamedTuple):
    """All values of one microbatch that go over one edge; `kind` is F (activations) or B (gradients)."""

    kind: Kind
    source: int
    destination: int
    microbatch: int

    @property
    def send(self) -> Action:
        """Returns the action that sends it, on the source's rank."""
        kind = Kind.SEND_F if self.kind is Kind.F else Kind.SEND_B
        return Action.transfer(self.source, kind, self.microbatch, self.destination)

    @property
    def receive(self) -> Action:
        """Returns the action that receives it, on the destination's rank."""
        kind = Kind.RECV_F if self.kind is Kind.F else Kind.RECV_B
        return Action.transfer(self.destination, kind, self.microbatch, self.source)


def wires(schedule: Schedule) -> frozenset[Wire]:
    """Returns (sending rank, receiving rank, F or B) of all messages of a lowered schedule."""
    rank_of = schedule.rank_of
    sent = (message_of(action) for row in schedule.actions for action in row if action.kind in SENDS)
    return frozenset((rank_of[m.source], rank_of[m.destination], m.kind) for m in sent)


@final
class Ends:
    """The compute actions at both ends of the messages of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._split = {a for row in schedule.actions for a in row if a.kind is Kind.I}

    def producer(self, message: Message) -> Action:
        """Returns the action that makes the values."""
        return self._at(message.source, message)

    def consumer(self, message: Message) -> Action:
        """Returns the action that waits for the values."""
        return self._at(message.destination, message)

    def _at(self, stage: int, message: Message) -> Action:
        whole, *halves = PRODUCERS[message.kind]
        for half in halves if self._split else ():
            split = Action(stage, half, message.microbatch)
            if split in self._split:
                return split
        return Action(stage, whole, message.microbatch)


def message_of(action: Action) -> Message:
    """Returns the message that a SEND or RECV action moves; KeyError for any other action."""
    if action.kind in SENDS:
        return Message(SENDS[action.kind], action.stage, action.peer, action.microbatch)
    return Message(RECEIVES[action.kind], action.peer, action.stage, action.microbatch)


def messages(
    schedule: Schedule, forward_edges: Edges, backward_edges: Edges, step_edges: Edges
) -> tuple[Message, ...]:
    """Returns every message of a step, sorted; those between stages of one rank too.

    What an edge carries is said by `edge_messages`. Raises InvalidSchedule when an edge names a stage that
    the schedule does not have, or joins one to itself.
    """
    for edge in sorted({*forward_edges, *backward_edges, *step_edges}):
        _check_edge(schedule, edge)
    sent = (
        Message(kind, source, destination, microbatch)
        for kind, source, destination, once in edge_messages(forward_edges, backward_edges, step_edges)
        for microbatch in range(1 if once else schedule.microbatches)
    )
    return tuple(sorted(sent))


def _check_edge(schedule: Schedule, edge: tuple[int, int]) -> None:
    source, destination = edge
    if source != destination and {source, destination} <= schedule.rank_of.keys():
        return
    raise InvalidSchedule(
        f"the edge {source} -> {destination} does not join two stages of the schedule",
        numbers=f"stages: {', '.join(map(str, sorted(schedule.rank_of)))}",
        next_step="take schedule and edges from the same plan",
    )
