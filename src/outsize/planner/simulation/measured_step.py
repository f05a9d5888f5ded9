"""Problem: a measured Timeline has spans; which schedule was that, and how long did its actions last?

The row of a rank is its spans by their start. A step of several groups (a short last microbatch has its own
programs) has every action several times: the microbatches of later groups are numbered after those before.
Complexity: O(k log k) for k spans. Oracle: tests/unit/planner/advice/test_advice_utilisation.py replays
simulated steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import final

from outsize.ir.cluster import Link
from outsize.ir.schedule import COMPUTE, TRANSFER, Action, Kind, Schedule
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, message_of

Row = list[tuple[Action, Span]]


@final
@dataclass(frozen=True)
class Replay:
    """Describes a step that ran: its schedule with sends and receives, and the spans by action."""

    schedule: Schedule
    computes: dict[Action, Span]
    waits: dict[Action, Span]
    messages_s: float  # Counts sends, posted receives, and weights that come and go, over all ranks.

    @classmethod
    def of(cls, timeline: Timeline) -> Replay:
        """Reads the rows off the spans."""
        rows = [list(numbered(s for s in timeline.spans if s.rank == r)) for r in range(timeline.ranks)]
        ran = [tuple(a for a, span in row if span.lane != "wait") for row in rows]
        count = 1 + max((a.microbatch for row in ran for a in row), default=-1)
        spans = {lane: _by_action(rows, lane) for lane in ("compute", "wait")}
        moved = sum(s.duration_s for s in timeline.spans if s.lane in ("send", "recv", "load"))
        return cls(Schedule("ran", count, tuple(ran)), spans["compute"], spans["wait"], moved)

    @cached_property
    def durations_s(self) -> dict[Action, float]:
        """Returns the seconds of each compute action."""
        return {action: span.duration_s for action, span in self.computes.items()}

    @cached_property
    def messages(self) -> list[Message]:
        """Returns all messages that were sent."""
        return [message_of(a) for row in self.schedule.actions for a in row if a.kind in SENDS]

    def edges(self, kind: Kind) -> frozenset[tuple[int, int]]:
        """Returns the stage pairs with a message for each microbatch, of activations (F) or gradients (B)."""
        counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        for m in self.messages:
            counts[m.source, m.destination] += m.kind is kind
        return frozenset(edge for edge, count in counts.items() if count == self.schedule.microbatches)

    def late_s(self) -> float:
        """Returns the seconds of all waits whose message had been made already and was in transfer."""
        ends, total_s = Ends(self.schedule), 0.0
        made: defaultdict[Action, float] = defaultdict(float)
        for row in self.schedule.actions:
            for message in (message_of(a) for a in row if a.kind in RECEIVES):
                producer = self.computes.get(ends.producer(message))
                if producer is not None:
                    consumer = ends.consumer(message)
                    made[consumer] = max(made[consumer], producer.end_s)
        for action, wait in self.waits.items():
            total_s += max(0.0, wait.end_s - max(wait.start_s, made.get(action, wait.end_s)))
        return total_s

    def message_s(self) -> float:
        """Returns the mean seconds that devices spend on one message."""
        return (self.messages_s + self.late_s()) / max(1, len(self.messages))

    def simulated_s(self, schedule: Schedule, costs: Sequence[StageCost]) -> float:
        """Simulates another schedule over the same edges with other costs; messages are as slow as in this
        step.
        """
        link = Link(name="measured", latency_s=self.message_s(), bytes_per_s=math.inf)
        small = {(m.source, m.destination): 1 for m in self.messages}
        return simulate(schedule, costs, small, small, lambda _a, _b: link).duration_s

    def costs(self, middle: Callable[[list[float]], float] = fmean) -> list[StageCost]:
        """Returns the mean (or another average) seconds of one microbatch on each stage."""
        durations: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
        for action, seconds in self.durations_s.items():
            durations[action.stage, action.kind].append(seconds)
        middles = {key: middle(seconds) for key, seconds in durations.items()}

        def of(stage: int, *kinds: Kind) -> float:
            return sum(middles.get((stage, kind), 0.0) for kind in kinds)

        stages = range(self.schedule.stages)
        return [StageCost(of(s, Kind.F), of(s, Kind.B, Kind.I, Kind.W), of(s, Kind.W)) for s in stages]


def numbered(spans: Iterable[Span]) -> Iterator[tuple[Action, Span]]:
    """Yields one rank's spans by their start; microbatch numbers continue where a new group of them
    begins.
    """
    seen: set[tuple[Lane, Action]] = set()
    offset = count = 0
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        action = Action.parse(span.action)
        if action.kind not in COMPUTE | TRANSFER:
            continue
        if (span.lane, action) in seen:
            offset, count = offset + count, 0
            seen.clear()
        seen.add((span.lane, action))
        count = max(count, action.microbatch + 1)
        yield replace(action, microbatch=action.microbatch + offset), span


def _by_action(rows: Iterable[Row], lane: Lane) -> dict[Action, Span]:
    return {action: span for row in rows for action, span in row if span.lane == lane}
