"""Simulated steps as the interpreter would have measured them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from outsize.ir.cluster import Link
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Span, Timeline
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.schedules.builders import build
from outsize.schedules.lower import lower


@cache
def lowered(name: str, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """A chain of stages."""
    pairs = [(s, s + 1) for s in range(stages - 1)]
    edges = frozenset(pairs), frozenset((b, a) for a, b in pairs)
    return lower(build(name, stages, microbatches, ranks), *edges)


def step_s(schedule: Schedule, costs: Sequence[StageCost], message_s: float) -> float:
    """Returns the seconds of the step that `measured` gives, without its spans."""
    return max(span.end_s for span in _simulated(schedule, costs, message_s) if span.lane == "compute")


def _simulated(schedule: Schedule, costs: Sequence[StageCost], message_s: float) -> Sequence[Span]:
    link = Link(name="wire", latency_s=message_s, bytes_per_s=1e9)
    pairs = {(a, b): 1 for a in range(len(costs)) for b in (a - 1, a + 1)}
    return simulate(schedule, costs, pairs, pairs, lambda _a, _b: link).spans


def measured(schedule: Schedule, costs: Sequence[StageCost], message_s: float) -> Timeline:
    """Sends and posted receives take no time of the rank; waits are spans."""
    played = _simulated(schedule, costs, message_s)
    done = {Action.parse(s.action): s for s in played if s.lane == "compute"}
    spans = list(done.values())
    for rank, row in enumerate(schedule.actions):
        at = 0.0
        for action in row:
            found = done.get(action)
            if found is None:
                lane = "send" if action.kind in (Kind.SEND_F, Kind.SEND_B) else "recv"
                spans.append(Span(rank=rank, lane=lane, action=str(action), start_s=at, end_s=at))
                continue
            if found.start_s > at:
                waited = {"lane": "wait", "start_s": at, "end_s": found.start_s}
                spans.append(found.model_copy(update=waited))
            at = found.end_s
    return Timeline(source="measured", ranks=schedule.ranks, spans=tuple(spans))
