"""Problem: messages wait in ordered queues; does the step end, or do ranks wait for each other for ever?

An ordered backend (NCCL) matches messages by their order and has no tags:

    SEND, RECV   go to the end of a queue of their rank, and the rank goes on
    match        a SEND and its RECV are done once both are at the heads of their queues
    compute      waits until the RECVs that it needs are done
    ahead        a SEND waits for that of its edge `ahead` microbatches before it, where there is such a bound

Which queue a message is in is the layout of the run's groups. Three stages with a tied weight of stage 0 in
stage 2, one queue for all gradients that go up (`bound`), 1f1b: each of these waits for the next, and the
last for the first:

    rank 0   0RECV_B0     from rank 1, which needs the gradient of rank 2
    rank 2   2SEND_B0     to rank 1, behind the gradient of the tied weight:
    rank 2   2SEND_B0@0   to rank 0, whose receive is behind 0RECV_B0

With a queue for each pair of ranks, direction and kind (`pairs`, which run/transport/groups.py makes) there
is no such circle.

Why `pairs` ends whenever the rows end (`check` plays them): the receives of a queue have the order of its
sends, so the first n operations at both ends are the same n messages, and all are done once both ranks have
come so far. An operation waits for nothing but its own partner.

Complexity: O(actions). Oracle: tests/unit/schedules/test_queues.py plays queues in random order; over real
processes, tests/dist/test_strict_engine.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, final

from outsize.ir.schedule import TRANSFER, Action, Kind, Schedule
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, Wire, message_of
from outsize.schedules.verified import shown_for, verified_stage

QueueOf = Callable[[Wire], Hashable]
"""The name of the queue of a wire; a rank has one queue for all its wires of one name."""


def pairs(wire: Wire) -> Hashable:
    """A queue for each pair of ranks, direction and kind."""
    return wire


def bound(wire: Wire) -> Hashable:
    """A queue for each direction and kind, in groups that are bound to a device: all peers share it."""
    source, destination, kind = wire
    return source < destination, kind


@final
class Waiting(NamedTuple):
    """An action of a rank that waits for the next one of a circle."""

    rank: int
    action: Action


def circle_of(schedule: Schedule, queue_of: QueueOf = pairs, ahead: int | None = None) -> tuple[Waiting, ...]:
    """Returns actions that wait for each other, the last one for the first; empty for a schedule that ends.

    `schedule` is a lowered one whose sends and receives are pairs. `ahead` is how many messages of an edge
    may be under way; None: any number.
    """
    game = _Game(schedule, queue_of, ahead)
    while any(game.advance(rank) for rank in range(schedule.ranks)):
        pass
    stuck = game.stuck()
    if stuck is None:
        return ()
    met = dict[Waiting, int]()
    while stuck not in met:
        met[stuck] = len(met)
        stuck = game.waits_for(stuck)
    return tuple(met)[met[stuck] :]


@final
@dataclass(eq=False)
class _Game:
    """The ranks' rows as far as they have come, and their queues."""

    schedule: Schedule
    queue_of: QueueOf
    ahead: int | None
    _sent: dict[tuple[Kind, int, int], list[Message]] = field(default_factory=lambda: defaultdict(list))
    _column: list[int] = field(default_factory=list[int])
    _queues: dict[tuple[int, Hashable], deque[Action]] = field(default_factory=lambda: defaultdict(deque))
    _done: set[Message] = field(default_factory=set[Message])
    _needs: dict[Action, set[Message]] = field(default_factory=lambda: defaultdict(set))
    _shown: set[Action] = field(default_factory=set[Action])

    def __post_init__(self) -> None:
        self._column = [0] * self.schedule.ranks
        self._rank_of, ends = self.schedule.rank_of, Ends(self.schedule)
        for row in self.schedule.actions:
            for message in (message_of(action) for action in row if action.kind in RECEIVES):
                self._needs[ends.consumer(message)].add(message)

    def advance(self, rank: int) -> bool:
        """Runs a rank until it waits, and ends the messages that it makes possible; tells if it moved."""
        row, start = self.schedule.actions[rank], self._column[rank]
        while self._column[rank] < len(row) and self._can_run(row[self._column[rank]]):
            action = row[self._column[rank]]
            self._column[rank] += 1
            if action.kind in TRANSFER:
                message = message_of(action)
                if action.kind in SENDS:
                    self._sent[message[:3]].append(message)
                self._queue(action).append(action)
                self._match(message)
            elif action.kind is Kind.SHOW:
                self._shown.add(action)
        return self._column[rank] > start

    def _can_run(self, action: Action) -> bool:
        if action.kind in TRANSFER:
            return self._too_early(action) is None
        if action.kind is Kind.VERIFY:
            return shown_for(action) in self._shown
        return self._needs.get(action, set()) <= self._done

    def _too_early(self, action: Action) -> Message | None:
        """Returns the message that has to end before a SEND may begin."""
        if self.ahead is None or action.kind not in SENDS:
            return None
        before = self._sent[message_of(action)[:3]][-self.ahead :]
        is_full = len(before) == self.ahead and before[0] not in self._done
        return before[0] if is_full else None

    def _match(self, message: Message) -> None:
        """Ends messages whose operations are at both heads, from this one on."""
        waiting = [message]
        while waiting:
            message = waiting.pop()
            ends = [(self._queue(end), end) for end in (message.send, message.receive)]
            if message in self._done or any(not queue or queue[0] != action for queue, action in ends):
                continue
            self._done.add(message)
            for queue, _ in ends:
                queue.popleft()
            waiting += [message_of(queue[0]) for queue, _ in ends if queue]

    def stuck(self) -> Waiting | None:
        """Returns the action of a rank that has not come to its end, or an operation that is not done."""
        for rank, row in enumerate(self.schedule.actions):
            if self._column[rank] < len(row):
                return Waiting(rank, row[self._column[rank]])
        return next((Waiting(rank, queue[0]) for (rank, _), queue in self._queues.items() if queue), None)

    def waits_for(self, waiting: Waiting) -> Waiting:
        """Returns what an action waits for, where nothing can go on."""
        rank, action = waiting
        if action.kind is Kind.VERIFY:
            return Waiting(self._rank_of[verified_stage(action)], shown_for(action))
        if action.kind not in TRANSFER:
            missing = min(self._needs[action] - self._done)
            return Waiting(rank, missing.receive)
        message, queue, row = message_of(action), self._queue(action), self.schedule.actions[rank]
        if action not in queue:  # the rank has not come to it, or may not begin it
            now = row[self._column[rank]]
            before = self._too_early(action) if now == action else None
            return Waiting(rank, now if before is None else before.send)
        if queue[0] != action:
            return Waiting(rank, queue[0])
        partner = message.receive if action.kind in SENDS else message.send
        return Waiting(self._rank_of[partner.stage], partner)

    def _queue(self, action: Action) -> deque[Action]:
        """Returns the queue of a transfer, on its rank."""
        message, rank_of = message_of(action), self._rank_of
        wire = rank_of[message.source], rank_of[message.destination], message.kind
        return self._queues[rank_of[action.stage], self.queue_of(wire)]
