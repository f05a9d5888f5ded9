"""Problem: a compute-only schedule says when stages run; a run also needs to know when data moves.

`lower` puts a SEND right behind the action that produces and a RECV one compute action ahead of the
action that needs it (before the preceding one; at the start of the row for the first). RECV means
"post the receive"; the compute action itself waits for it. So while a rank computes, its next inputs
are on their way and its buffers are known. Two stages, gpipe, two microbatches:

    cell   1        2        3        4   5        6        7   8
    rank 0 0F0      0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
    rank 1 1RECV_F0 1RECV_F1 1F0      1F1 1B0      1SEND_B0 1B1 1SEND_B1

Skip edges are like any other. Gradients do not simply run back along the forward edges: the partial
sum of a value's gradient is handed from its last consumer to the one before and at last to the
producer, because that is the order in which one process adds them up (docs/rooms/numbers.md, law 2).
A value of stage 0 that stages 1 and 2 use, one microbatch, forward edges (0,1) (0,2) and backward
edges (2,1) (1,0); stage 2 takes stage 1's output too, edge (1,2):

    cell   1          2        3        4          5        6
    rank 0 0RECV_B0   0F0      0SEND_F0 0SEND_F0@2 0B0
    rank 1 1RECV_F0   1RECV_B0 1F0      1SEND_F0   1B0      1SEND_B0
    rank 2 2RECV_F0@0 2RECV_F0 2F0      2B0        2SEND_B0

Actions that run together (ir/schedule.py) are one cell: the receives of both are before it, their sends
behind it.
Step edges carry values that are the same for all microbatches (tied parameters): one message a step,
with microbatch 0. Stages of one rank hand over locally and get no transfer cells.
Receives follow the order of the sends on their wire: where a message for another stage of the rank was sent
before the one that is waited for (a skip edge under interleaved), its receive is posted along with it.

Source: one pass for all schedules, as `_add_send_recv` of torch.distributed.pipelining; that one puts a
receive where its send becomes possible, this one by its consumer, so that only what is needed next waits.
On a transport with one queue for both directions of a pair (one NCCL communicator) a posted receive
would hold up the sends behind it: give each direction its own queue.
Complexity: O(actions + messages). Oracle: `check` (schedules/check.py), and the pictures above, which
tests/unit/schedules/test_lower.py draws again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from outsize.ir.schedule import Action, Kind, Schedule, together
from outsize.schedules.message import RECEIVES, SENDS, Edges, Ends, Message, Wire, message_of, messages


def lower(
    schedule: Schedule, forward_edges: Edges, backward_edges: Edges, step_edges: Edges = frozenset()
) -> Schedule:
    """Returns the compute-only `schedule` with its sends and receives.

    Edges are (source stage, destination stage). Raises InvalidSchedule when one names no stage of the
    schedule.
    """
    rank_of, ends = schedule.rank_of, Ends(schedule)
    arriving: defaultdict[Action, list[Action]] = defaultdict(list)
    leaving: defaultdict[Action, list[Action]] = defaultdict(list)
    for message in messages(schedule, forward_edges, backward_edges, step_edges):
        if rank_of[message.source] != rank_of[message.destination]:
            arriving[ends.consumer(message)].append(message.receive)
            leaving[ends.producer(message)].append(message.send)
    rows = [tuple(_lower_row(row, arriving, leaving)) for row in schedule.actions]
    sent = _wires(rows, rank_of)
    rows = [tuple(_in_order(row, rank_of, sent)) for row in rows]
    return schedule.with_rows(rows)


def in_chain(row: Sequence[Action], stages: int) -> tuple[Action, ...]:
    """Returns one row as `lower` does, where each rank has one stage, which talks only to its neighbours."""
    arriving: dict[Action, list[Action]] = {}
    leaving: dict[Action, list[Action]] = {}
    for action in row:
        before, behind = action.stage - 1, action.stage + 1
        forward = action.kind is Kind.F
        source, destination = (before, behind) if forward else (behind, before)
        receive, send = (Kind.RECV_F, Kind.SEND_F) if forward else (Kind.RECV_B, Kind.SEND_B)
        for peer, kind, cells in ((source, receive, arriving), (destination, send, leaving)):
            if action.kind is not Kind.W and 0 <= peer < stages:
                cells[action] = [Action.transfer(action.stage, kind, action.microbatch, peer)]
    return tuple(_lower_row(row, arriving, leaving))


def _lower_row(
    row: Sequence[Action], arriving: dict[Action, list[Action]], leaving: dict[Action, list[Action]]
) -> Iterable[Action]:
    cells = [*together(row)]
    for first in cells[:1]:
        yield from _of(first, arriving)
    for cell, upcoming in zip_longest(cells, cells[1:], fillvalue=()):
        yield from _of(upcoming, arriving)
        yield from cell
        yield from _of(cell, leaving)


def _of(cell: tuple[Action, ...], transfers: dict[Action, list[Action]]) -> Iterable[Action]:
    return (transfer for action in cell for transfer in transfers.get(action, ()))


def _wires(rows: Sequence[Sequence[Action]], rank_of: dict[int, int]) -> dict[Wire, deque[Message]]:
    """Returns (sending rank, receiving rank, F or B) -> messages in the order of their sends."""
    sent: defaultdict[Wire, deque[Message]] = defaultdict(deque)
    for row in rows:
        for message in (message_of(action) for action in row if action.kind in SENDS):
            sent[_wire(message, rank_of)].append(message)
    return sent


def _wire(message: Message, rank_of: dict[int, int]) -> Wire:
    return rank_of[message.source], rank_of[message.destination], message.kind


def _in_order(
    row: Sequence[Action], rank_of: dict[int, int], sent: dict[Wire, deque[Message]]
) -> Iterable[Action]:
    """Yields the row with a receive posted earlier where a message sent later is needed sooner."""
    for action in row:
        if action.kind not in RECEIVES:
            yield action
            continue
        message = message_of(action)
        queue = sent[_wire(message, rank_of)]
        while message in queue:
            yield queue.popleft().receive
