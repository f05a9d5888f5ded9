"""A Timeline as trace events that https://ui.perfetto.dev and chrome://tracing read.

    process predicted            process measured
      rank 0 compute  [step           ]      ...
                       [0F0][0F1]
      rank 0 send     [step           ]
                          [0SEND_F0]
                                \\  flow arrow
      rank 1 compute             [1F0]
      memory rank 0   counter

Format: "Trace Event Format" (Google, 2016): metadata `M`, complete events `X`, flows `s` -> `f`, counters
`C`; times in microseconds, ascending. Complete events of one track must nest, so spans of a lane that overlap
get tracks of their own; within its track all that a lane does is nested in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from outsize.ir.schedule import Action, Kind
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.planner.simulation.measured_step import numbered
from outsize.schedules.message import SENDS, message_of

Event = dict[str, Any]
LANES: tuple[Lane, ...] = get_args(Lane)
MICRO = 1e6
DIGITS = 3
# The order of events at one moment: a slice comes before the arrows that belong to it.
ORDER = "MXsfC"
# Track ids leave room for this many tracks of a lane, and for all lanes of a rank.
TRACKS = 64


def perfetto(predicted: Timeline | None, measured: Timeline | None) -> dict[str, Any]:
    """Returns the trace of one step: a process for each source, a track for each rank and lane, arrows for
    sends.

    An arrow goes from a SEND to the compute action that waits for it, if that starts no earlier than the
    SEND; clocks of several machines may disagree.
    """
    both = [timeline for timeline in (predicted, measured) if timeline is not None]
    events = [event for pid, timeline in enumerate(both, start=1) for event in _process(pid, timeline)]
    events.sort(key=lambda e: (e.get("ts", -1.0), ORDER.index(e["ph"]), -e.get("dur", 0.0)))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "outsize"}}


def _process(pid: int, timeline: Timeline) -> Iterator[Event]:
    yield _name(pid, 0, "process", timeline.source)
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}}
    tracks = _tracks(timeline)
    for (rank, lane, number), spans in tracks.items():
        tid = _tid(rank, lane, number)
        again = f" ({number + 1})" if number else ""
        yield _name(pid, tid, "thread", f"rank {rank} {lane}{again}")
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        yield _step(pid, tid, timeline, rank, lane)
        yield from (_complete(pid, tid, span) for span in spans)
    yield from _flows(pid, {id(s): _tid(*key) for key, spans in tracks.items() for s in spans}, timeline)
    yield from (_counter(pid, s.rank, s.time_s, s.alive_bytes) for s in timeline.samples)


def _tid(rank: int, lane: Lane, number: int) -> int:
    return 1 + (rank * len(LANES) + LANES.index(lane)) * TRACKS + number


def _tracks(timeline: Timeline) -> dict[tuple[int, Lane, int], list[Span]]:
    """Returns (rank, lane, number) -> spans that do not overlap, by their start."""
    tracks: dict[tuple[int, Lane, int], list[Span]] = {}
    for rank in range(timeline.ranks):
        for lane in LANES:
            own = [s for s in timeline.spans if s.rank == rank and s.lane == lane]
            for number, spans in enumerate(apart(own)):
                tracks[rank, lane, number] = spans
    return tracks


def apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Returns the fewest rows in which no two spans overlap (interval colouring by start)."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _name(pid: int, tid: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}


def _step(pid: int, tid: int, timeline: Timeline, rank: int, lane: Lane) -> Event:
    """Returns the slice that contains all others of a lane, with the share of it that they fill."""
    start = _micro(min(s.start_s for s in timeline.spans))
    duration = round(_micro(max(s.end_s for s in timeline.spans)) - start, DIGITS)
    seconds = sum(s.duration_s for s in timeline.spans if s.rank == rank and s.lane == lane)
    details = {"rank": rank, "lane": lane, "seconds": seconds, "step_s": timeline.duration_s}
    where = {"pid": pid, "tid": tid, "ts": start, "dur": duration}
    return {"ph": "X", "name": "step", "cat": "step", **where, "args": details}


def _complete(pid: int, tid: int, span: Span) -> Event:
    start = _micro(span.start_s)
    # Both ends are rounded before the difference, so that neighbours that touch still touch.
    duration = round(_micro(span.end_s) - start, DIGITS)
    where = {"pid": pid, "tid": tid, "ts": start, "dur": duration}
    return {"ph": "X", "name": span.action, "cat": span.lane, **where, "args": _details(span)}


def _details(span: Span) -> dict[str, Any]:
    action = Action.parse(span.action)
    return {
        "rank": span.rank,
        "stage": action.stage,
        "kind": str(action.kind),
        "microbatch": action.microbatch,
    }


def _flows(pid: int, tid_of: dict[int, int], timeline: Timeline) -> Iterator[Event]:
    for number, (send, consumer) in enumerate(arrows(timeline.spans)):
        kind = str(Action.parse(send.action).kind)
        # Flows are identified by their ids, which must differ between the two processes.
        common = {"cat": "transfer", "name": kind, "id": pid * 1_000_000 + number, "pid": pid}
        yield {"ph": "s", **common, "tid": tid_of[id(send)], "ts": _micro(send.start_s)}
        yield {"ph": "f", "bp": "e", **common, "tid": tid_of[id(consumer)], "ts": _micro(consumer.start_s)}


def arrows(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Returns each SEND with the compute span that waits for its message, where both are known and in
    order.
    """
    ranks = sorted({span.rank for span in spans})
    pairs = [pair for rank in ranks for pair in numbered(s for s in spans if s.rank == rank)]
    computes = {_whole_backward(action): span for action, span in pairs if span.lane == "compute"}
    pairs_of_spans: list[tuple[Span, Span]] = []
    for action, span in pairs:
        if span.lane != "send" or action.kind not in SENDS:
            continue
        message = message_of(action)
        consumer = computes.get(Action(message.destination, message.kind, message.microbatch))
        if consumer is not None and consumer.start_s >= span.start_s:
            pairs_of_spans.append((span, consumer))
    return pairs_of_spans


def _whole_backward(action: Action) -> Action:
    """Returns B for I: of a split backward the input gradient is what waits for the message."""
    return replace(action, kind=Kind.B) if action.kind is Kind.I else action


def _counter(pid: int, rank: int, time_s: float, alive_bytes: int) -> Event:
    where = {"pid": pid, "tid": 0, "ts": _micro(time_s)}
    return {"ph": "C", "name": f"memory rank {rank}", **where, "args": {"alive_bytes": alive_bytes}}


def _micro(seconds: float) -> float:
    return round(seconds * MICRO, DIGITS)
