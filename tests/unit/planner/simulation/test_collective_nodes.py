"""Collectives and copies in a step, against rows that are played event by event, and their laws."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.ir.timeline import Lane, Span
from outsize.planner.simulation.critical_path import LAST, Cost, MoveWaits, Network
from outsize.schedules.builders import build
from outsize.schedules.lower import lower
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, Wire, message_of
from outsize.schedules.offload import with_activation_copies
from outsize.schedules.refine import divided
from outsize.schedules.sharded import with_gathers

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
few = settings(max_examples=40, deadline=None, derandomize=True)


class Step:
    """A schedule of random blocks on two or three ranks, tied weights among them, with random seconds."""

    def __init__(self, name: str, once: bool, ahead: int, seed: int) -> None:
        dice = random.Random(seed)
        ranks, microbatches = dice.randint(1, 3), dice.randint(1, 4)
        stages = ranks * (2 if name == "interleaved" else 1)
        whole = build(name, stages, microbatches, ranks)
        compute = divided(whole, [dice.randint(1, 4) for _ in range(stages)])
        parts, rank_of = compute.stages, compute.rank_of
        chain = {(part, part + 1) for part in range(parts - 1)}
        skips = {(a, b) for b in range(parts) for a in range(b) if dice.random() < 0.1}
        forward, backward = chain | skips, {(b, a) for a, b in chain | skips if dice.random() < 0.9}
        uses = {(part, part) for part in range(parts) if dice.random() < 0.9}
        uses |= {(0, part) for part in range(1, parts) if dice.random() < 0.2}
        self.needs: defaultdict[int, set[int]] = defaultdict(set)
        for owner, user in uses:
            if rank_of[owner] == rank_of[user]:
                self.needs[user].add(owner)
        self.ahead, self.overlaps = ahead, dice.random() < 0.7
        away = {part for part in range(parts) if dice.random() < 0.5}
        lowered = with_gathers(lower(compute, forward, backward), uses, once=once)
        self.row = with_activation_copies(lowered, away)
        moving = with_activation_copies(with_gathers(compute, uses, once=once), away)
        waits = MoveWaits(self.needs, ahead, self.overlaps)
        self.network = Network.of(moving, forward, backward, waits=waits)
        self.seconds: dict[Cost, float] = {
            cost: dice.choice((0.0, 1.0)) * dice.random() for cost in self.network.costs
        }


class Rows:
    """Plays lowered rows: whoever can go on does so, until nobody can."""

    def __init__(self, step: Step) -> None:
        self.step, self.rows, self.ends = step, step.row.actions, Ends(step.row)
        self.rank_of = step.row.rank_of
        self.sent: dict[Message, float] = {}
        self.posted: dict[Message, float] = {}
        self.arrived: dict[Message, float] = {}
        self.wires: defaultdict[Wire, list[Message]] = defaultdict(list)
        for message in (message_of(a) for row in self.rows for a in row if a.kind in SENDS):
            self.wires[self.rank_of[message.source], self.rank_of[message.destination], message.kind].append(
                message
            )
        self.wire_s: defaultdict[Wire, float] = defaultdict(float)
        self.whole_s: defaultdict[int, float] = defaultdict(float)
        self.at, self.now_s = [0] * len(self.rows), [0.0] * len(self.rows)
        self.queue_s = [0.0] * len(self.rows)
        self.reduced_s: list[list[float]] = [[] for _ in self.rows]
        self.left_s, self.back_s = [0.0] * len(self.rows), [0.0] * len(self.rows)
        self.fetched_s: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.spans: list[Span] = []

    def play(self) -> list[Span]:
        """Returns all spans."""
        while any([*map(self.deliver, self.wires), *map(self.advance, range(len(self.rows)))]):
            pass
        assert all(done == len(row) for done, row in zip(self.at, self.rows, strict=True))
        return self.spans

    def deliver(self, wire: Wire) -> bool:
        """Moves the next message of a wire."""
        queue = self.wires[wire]
        if not queue or queue[0] not in self.sent or queue[0] not in self.posted:
            return False
        message = queue.pop(0)
        start_s = max(self.wire_s[wire], self.sent[message], self.posted[message])
        end_s = start_s + self.step.seconds[message.kind, message.source, message.destination]
        self.wire_s[wire] = self.arrived[message] = end_s
        self.note(wire[0], "send", message.send, (start_s, end_s))
        return True

    def advance(self, rank: int) -> bool:
        """Runs the next action of a rank."""
        if self.at[rank] == len(self.rows[rank]):
            return False
        action = self.rows[rank][self.at[rank]]
        if action.kind in SENDS:
            self.sent[message_of(action)] = self.now_s[rank]
        elif action.kind in RECEIVES:
            self.posted[message_of(action)] = self.now_s[rank]
        elif action.kind in COMPUTE:
            if not self.computed(rank, action):
                return False
        elif action.kind in (Kind.OFFLOAD_F, Kind.FETCH_B):
            self.copied(rank, action)
        elif action.kind is not Kind.RESHARD:
            self.collected(rank, action)
        self.at[rank] += 1
        return True

    def computed(self, rank: int, action: Action) -> bool:
        """Computes if all messages have come."""
        before = (message_of(a) for a in self.rows[rank][: self.at[rank]] if a.kind in RECEIVES)
        inbox = [message for message in before if self.ends.consumer(message) == action]
        if not all(message in self.arrived for message in inbox):
            return False
        waits = [self.arrived[message] for message in inbox]
        waits += [self.whole_s[owner] for owner in self.step.needs[action.stage]]
        if action.kind in (Kind.B, Kind.I):
            waits.append(self.fetched_s[action.stage, action.microbatch])
        gone = self.reduced_s[rank][: len(self.reduced_s[rank]) - self.step.ahead]
        start_s = max([self.now_s[rank], *gone, *waits])
        self.now_s[rank] = start_s + self.step.seconds[action.kind, action.stage, -1]
        self.note(rank, "compute", action, (start_s, self.now_s[rank]))
        return True

    def copied(self, rank: int, action: Action) -> None:
        """Launches a copy behind those that leave, and behind what the next backward waits for."""
        leaves = action.kind is Kind.OFFLOAD_F
        following = next(a for a in self.rows[rank][self.at[rank] :] if a.kind in COMPUTE)
        gone = self.reduced_s[rank][: len(self.reduced_s[rank]) - self.step.ahead]
        behind = [self.now_s[rank], self.left_s[rank], *gone]
        if leaves and following.kind in (Kind.B, Kind.I):
            behind.append(self.fetched_s[following.stage, following.microbatch])
        self.now_s[rank] = max(behind)
        start_s = max(self.now_s[rank], self.left_s[rank] if leaves else self.back_s[rank])
        end_s = start_s + self.step.seconds[action.kind, action.stage, -1]
        if leaves:
            self.left_s[rank] = end_s
        else:
            self.back_s[rank] = self.fetched_s[action.stage, action.microbatch] = end_s
        if not self.step.overlaps:
            self.now_s[rank] = end_s
        self.note(rank, "load", action, (start_s, end_s))

    def collected(self, rank: int, action: Action) -> None:
        """Launches a collective."""
        last = action.kind is Kind.REDUCE_GRAD and action not in self.rows[rank][self.at[rank] + 1 :]
        start_s = max(self.now_s[rank], self.queue_s[rank])
        end_s = start_s + self.step.seconds[action.kind, action.stage, LAST if last else -1]
        self.queue_s[rank] = end_s
        self.note(rank, "load", action, (start_s, end_s))
        if action.kind is Kind.UNSHARD:
            self.whole_s[action.stage] = end_s
        else:
            self.reduced_s[rank].append(end_s)

    def note(self, rank: int, lane: Lane, action: Action, times: tuple[float, float]) -> None:
        """Adds a span."""
        start_s, end_s = times
        self.spans.append(Span(rank=rank, lane=lane, action=str(action), start_s=start_s, end_s=end_s))


def in_order(spans: list[Span]) -> list[tuple[object, ...]]:
    return sorted((s.rank, s.lane, s.start_s, s.end_s, s.action) for s in spans)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("once", [False, True])
@few
@given(ahead=st.integers(0, 2), seed=st.integers(0, 10_000))
def test_every_span_is_that_of_rows_played_event_by_event(
    name: str, once: bool, ahead: int, seed: int
) -> None:
    step = Step(name, once, ahead, seed)
    spans = step.network.spans(step.seconds)
    assert in_order(spans) == in_order(Rows(step).play())
    assert step.network.step_s(step.seconds) == max(span.end_s for span in spans)


@pytest.mark.parametrize("once", [False, True])
@few
@given(ahead=st.integers(0, 2), seed=st.integers(0, 10_000))
def test_nothing_in_a_queue_overlaps_and_no_queue_is_longer_than_the_step(
    once: bool, ahead: int, seed: int
) -> None:
    step = Step("1f1b", once, ahead, seed)
    spans, step_s = step.network.spans(step.seconds), step.network.step_s(step.seconds)
    lanes: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        kind = Action.parse(span.action).kind
        if kind in COMPUTE | {Kind.OFFLOAD_F, Kind.FETCH_B}:
            lanes[span.rank, "compute" if kind in COMPUTE else str(kind)].append(span)
        elif span.lane == "load":
            lanes[span.rank, "collectives"].append(span)
    for own in lanes.values():
        ordered = sorted(own, key=lambda span: (span.start_s, span.end_s))
        assert all(before.end_s <= after.start_s for before, after in pairwise(ordered))
        assert sum(span.duration_s for span in own) <= step_s * (1 + 1e-12)


@few
@given(seed=st.integers(0, 10_000))
def test_without_moves_the_step_is_that_of_whole_weights(seed: int) -> None:
    """And with them it is no longer than the sum of both."""
    step = Step("1f1b", False, 0, seed)
    moves = {Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.OFFLOAD_F, Kind.FETCH_B}
    free = {cost: 0.0 if cost[0] in moves else s for cost, s in step.seconds.items()}
    spans = step.network.spans(step.seconds)
    apart_s = step.network.step_s(free)
    assert apart_s == pytest.approx(max(s.end_s for s in step.network.spans(free) if s.lane == "compute"))
    moved_s = sum(s.duration_s for s in spans if s.lane == "load")
    assert apart_s <= step.network.step_s(step.seconds) <= (apart_s + moved_s) * (1 + 1e-12)


def test_blocks_that_nothing_hides_take_the_sum_and_hidden_ones_the_longest() -> None:
    """Three equal blocks on one rank, one microbatch: five gathers (the last block is whole where the pass
    turns) and three sums.
    """
    row = with_gathers(divided(build("1f1b", 1, 1), [3]), {(part, part) for part in range(3)})
    network = Network.of(row, set(), set(), waits=MoveWaits({p: {p} for p in range(3)}, 1))

    def step_s(forward_s: float, gather_s: float, reduce_s: float) -> float:
        seconds = dict.fromkeys(network.costs, forward_s)
        seconds |= {c: gather_s for c in network.costs if c[0] is Kind.UNSHARD}
        seconds |= {c: reduce_s for c in network.costs if c[0] is Kind.REDUCE_GRAD}
        return network.step_s(seconds)

    assert step_s(0.0, 2.0, 3.0) == 5 * 2.0 + 3 * 3.0
    assert step_s(4.0, 2.0, 0.0) == 2.0 + 6 * 4.0, "the first gather alone is seen"
    assert step_s(4.0, 0.0, 3.0) == 6 * 4.0 + 3.0, "the last sum alone is seen"
    assert [str(a) for a in row.actions[0]][:5] == ["0UNSHARD", "1UNSHARD", "0F0", "0RESHARD", "2UNSHARD"]


def test_a_rank_of_a_cpu_waits_for_each_sum() -> None:
    """Two blocks, one microbatch: backwards of 4 s, sums of 3 s, one after the other."""
    row = Schedule("custom", 1, with_gathers(divided(build("1f1b", 1, 1), [2]), {(0, 0), (1, 1)}).actions)
    found: list[float] = []
    for ahead in (0, 1):
        network = Network.of(row, set(), set(), waits=MoveWaits({p: {p} for p in range(2)}, ahead))
        seconds = dict.fromkeys(network.costs, 0.0)
        seconds |= {(Kind.B, p, -1): 4.0 for p in range(2)}
        seconds |= {c: 3.0 for c in network.costs if c[0] is Kind.REDUCE_GRAD}
        found.append(network.step_s(seconds))
    assert found == [4.0 + 3.0 + 4.0 + 3.0, 4.0 + 4.0 + 3.0]
