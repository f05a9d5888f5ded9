"""The law of ordered queues: what hangs is refused with its circle, and a player of queues agrees."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.schedules.builders import build
from outsize.schedules.check import check, check_queues
from outsize.schedules.families import built
from outsize.schedules.lower import lower
from outsize.schedules.message import Ends, Message, Wire, message_of
from outsize.schedules.queues import QueueOf, bound, circle_of, pairs

Edges = frozenset[tuple[int, int]]
SENDING = {Kind.SEND_F, Kind.SEND_B}
MOVING = SENDING | {Kind.RECV_F, Kind.RECV_B}


def chain(stages: int) -> tuple[Edges, Edges]:
    down = frozenset((s, s + 1) for s in range(stages - 1))
    return down, frozenset((b, a) for a, b in down)


def with_edge(name: str, stages: int, microbatches: int, *, tied: bool) -> Schedule:
    """A chain, and a tied weight or a skip from the first to the last stage."""
    down, up = chain(stages)
    far = frozenset({(0, stages - 1)})
    forward, step = (down, far) if tied else (down | far, frozenset[tuple[int, int]]())
    back = up | {(stages - 1, 0)}
    schedule = build(name, stages, microbatches)
    lowered = lower(schedule, forward, back, step)
    check(lowered, forward, back, step)
    return lowered


@pytest.mark.parametrize(("stages", "tied"), [(3, True), (4, True), (4, False)])
def test_tied_weights_and_skips_hang_where_all_peers_share_a_queue(stages: int, tied: bool) -> None:
    """They end where each pair of ranks has a queue."""
    schedule = with_edge("1f1b", stages, 8, tied=tied)
    circle = circle_of(schedule, bound)
    assert len({waiting.rank for waiting in circle}) > 1
    with pytest.raises(
        InvalidSchedule, match=r"messages wait for each other in their queues.*waits for rank"
    ):
        check_queues(schedule, bound)
    assert circle_of(schedule) == ()


def test_a_chain_ends_in_bound_groups() -> None:
    for name in built():
        down, up = chain(4)
        assert circle_of(lower(build(name, 4, 8), down, up), bound) == (), name


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(built()),
    stages=st.integers(2, 5),
    count=st.integers(1, 6),
    seed=st.integers(0, 9999),
)
def test_pairs_always_end(name: str, stages: int, count: int, seed: int) -> None:
    assert circle_of(random_lowered(name, stages, count, random.Random(seed)), pairs) == ()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(name=st.sampled_from(built()), seed=st.integers(0, 99_999))
def test_a_player_of_queues_agrees(name: str, seed: int) -> None:
    dice = random.Random(seed)
    schedule = random_lowered(name, dice.randint(2, 4), dice.randint(1, 4), dice)
    if dice.random() < 0.5:
        schedule = edited(schedule, dice)
    queue_of = random_queues(dice)
    ahead = dice.choice([None, 1, 2])
    circle = circle_of(schedule, queue_of, ahead)
    assert (not circle) == Player(schedule, queue_of, dice, ahead).ends()
    assert len(set(circle)) == len(circle) != 1


def test_the_player_meets_both_ends() -> None:
    """Without this the test above could agree on one answer alone."""
    found = set[bool]()
    for seed in range(40):
        dice = random.Random(seed)
        schedule = random_lowered("1f1b", 4, 4, dice)
        found.add(Player(schedule, random_queues(dice), dice).ends())
    assert found == {True, False}


def random_lowered(name: str, stages: int, microbatches: int, dice: random.Random) -> Schedule:
    down, up = chain(stages)
    far = [(a, b) for a in range(stages) for b in range(a + 2, stages) if dice.random() < 0.5]
    forward, step = down | {*far[::2]}, frozenset(far[1::2])
    back = up | {(b, a) for a, b in far if dice.random() < 0.5}
    return lower(build(name, stages, microbatches), forward, frozenset(back), step)


def edited(schedule: Schedule, dice: random.Random) -> Schedule:
    """Two messages of a row change places."""
    rows = [list(row) for row in schedule.actions]
    row = rows[dice.randrange(len(rows))]
    moving = [at for at, action in enumerate(row) if action.kind in MOVING]
    if len(moving) > 1:
        first, second = dice.sample(moving, 2)
        row[first], row[second] = row[second], row[first]
    return Schedule(schedule.name, schedule.microbatches, tuple(map(tuple, rows)))


def random_queues(dice: random.Random) -> QueueOf:
    names, count = dict[Wire, int](), dice.randint(1, 6)
    chosen = dice.choice([pairs, bound, None])
    return chosen or (lambda wire: names.setdefault(wire, dice.randrange(count)))


class Player:
    """Ranks and queues that move one at a time, in any order, until nothing can."""

    def __init__(
        self, schedule: Schedule, queue_of: QueueOf, dice: random.Random, ahead: int | None = None
    ) -> None:
        self.ahead = ahead
        self.rows, self.rank_of, self.dice = [list(row) for row in schedule.actions], schedule.rank_of, dice
        self.queue_of, self.ends_of = queue_of, Ends(schedule)
        self.queues: dict[tuple[int, Hashable], deque[Message]] = {}
        self.arrived, self.sent = set[Message](), set[Message]()

    def ends(self) -> bool:
        while moves := self.moves():
            self.move(*self.dice.choice(moves))
        return not any(self.rows) and not any(self.queues.values())

    def moves(self) -> list[tuple[int, Message | None]]:
        """A rank whose next action can run, or a message at both heads with its rank None."""
        runs: list[tuple[int, Message | None]] = [
            (rank, None) for rank, row in enumerate(self.rows) if row and self.can_run(row[0])
        ]
        heads = [(rank, queue[0]) for (rank, _), queue in self.queues.items() if queue]
        met = {m for rank, m in heads if all((r, m) in heads for r in self.ranks(m))}
        return runs + [(-1, message) for message in met]

    def can_run(self, action: Action) -> bool:
        waits = [m for m in self.received(action) if m not in self.arrived]
        if action.kind in SENDING and self.ahead is not None:
            message = message_of(action)
            sent = [m for queue in self.queues.values() for m in queue if m[:3] == message[:3]]
            own = [m for m in dict.fromkeys(sent) if m in self.sent]
            return len(own) < self.ahead
        return action.kind in MOVING or not waits

    def received(self, action: Action) -> list[Message]:
        return self.all_received.get(action, [])

    @property
    def all_received(self) -> dict[Action, list[Message]]:
        if not hasattr(self, "_received"):
            self._received: dict[Action, list[Message]] = {}
            for row in self.rows:
                for m in (message_of(a) for a in row if a.kind in MOVING - SENDING):
                    self._received.setdefault(self.ends_of.consumer(m), []).append(m)
        return self._received

    def ranks(self, message: Message) -> tuple[int, int]:
        return self.rank_of[message.source], self.rank_of[message.destination]

    def queue(self, rank: int, message: Message) -> deque[Message]:
        name = self.queue_of((*self.ranks(message), message.kind))
        return self.queues.setdefault((rank, name), deque())

    def move(self, rank: int, message: Message | None) -> None:
        if message is not None:
            self.arrived.add(message)
            for end in self.ranks(message):
                self.queue(end, message).popleft()
            return
        action = self.rows[rank].pop(0)
        if action.kind in SENDING:
            self.sent.add(message_of(action))
        if action.kind in MOVING:
            self.queue(rank, message_of(action)).append(message_of(action))


def test_a_circle_is_named_action_by_action() -> None:
    """The gradient of the tied weight leaves first, and rank 0 receives that of the activations first."""
    schedule = with_edge("1f1b", 3, 4, tied=True)
    assert [f"rank {waiting.rank} {waiting.action}" for waiting in circle_of(schedule, bound)] == [
        "rank 0 0RECV_B0",
        "rank 1 1SEND_B0",
        "rank 1 1B0",
        "rank 1 1RECV_B0",
        "rank 2 2SEND_B0",
        "rank 2 2SEND_B0@0",
        "rank 0 0RECV_B0@2",
    ]
    with pytest.raises(InvalidSchedule) as caught:
        check_queues(schedule, bound)
    assert "rank 2's 2SEND_B0@0 waits for rank 0's 0RECV_B0@2, rank 0's 0RECV_B0@2 waits" in str(caught.value)


def test_a_rank_that_may_not_send_ahead_hangs_where_stages_run_one_after_the_other() -> None:
    """Rank 0 receives for its second stage when its first has sent everything, and rank 1 the same."""
    turns = [["0F", "2F", "2B", "0B"], ["1F", "3F", "3B", "1B"]]
    rows = [",".join(f"{turn}{microbatch}" for turn in row for microbatch in range(8)) for row in turns]
    down, up = chain(4)
    schedule = lower(Schedule.from_csv("\n".join(rows)), down, up)
    assert circle_of(schedule) == circle_of(schedule, ahead=8) == ()
    circle = circle_of(schedule, ahead=2)
    assert {waiting.rank for waiting in circle} == {0, 1}
    assert any(waiting.action.kind is Kind.SEND_F for waiting in circle)
