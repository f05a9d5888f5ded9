"""The events against the rules of the Trace Event Format, one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import samples

from outsize.ir.schedule import Action, Kind
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.report.trace import apart, arrows, perfetto

Event = dict[str, Any]
TRACE = perfetto(samples.predicted(), samples.measured())
EVENTS: list[Event] = TRACE["traceEvents"]
BY_SOURCE = {1: samples.predicted(), 2: samples.measured()}
KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
}


def phase(ph: str) -> list[Event]:
    return [e for e in EVENTS if e["ph"] == ph]


def spans() -> list[Event]:
    """All slices but the steps in which they lie."""
    return [e for e in phase("X") if e["cat"] != "step"]


def test_it_is_json_without_nan() -> None:
    assert json.loads(json.dumps(TRACE, allow_nan=False)) == TRACE
    assert set(TRACE) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert TRACE["displayTimeUnit"] == "ms"


@pytest.mark.parametrize("ph", KEYS)
def test_each_event_has_the_keys_of_its_phase(ph: str) -> None:
    assert phase(ph)
    for event in phase(ph):
        assert set(event) == KEYS[ph]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert {e["ph"] for e in EVENTS} == set(KEYS)


def test_one_process_for_each_source_and_every_track_has_a_name() -> None:
    processes = {e["pid"]: e["args"]["name"] for e in phase("M") if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in phase("M") if e["name"] == "thread_name"}
    assert processes == {1: "predicted", 2: "measured"}
    assert {(e["pid"], e["tid"]) for e in phase("X")} == set(threads)
    names = [name for (pid, _), name in sorted(threads.items()) if pid == 1]
    ranks = [name.split(" (")[0] for name in names]
    assert list(dict.fromkeys(ranks)) == [
        f"rank {r} {lane}" for r in range(3) for lane in ("compute", "send")
    ]


def test_every_span_is_a_complete_event_in_microseconds() -> None:
    for pid, timeline in BY_SOURCE.items():
        found = sorted((e["name"], e["cat"], e["ts"], e["ts"] + e["dur"]) for e in spans() if e["pid"] == pid)
        wanted = sorted((s.action, s.lane, s.start_s * 1e6, s.end_s * 1e6) for s in timeline.spans)
        assert [f[:2] for f in found] == [w[:2] for w in wanted]
        assert [f[2:] for f in found] == [pytest.approx(w[2:], abs=2e-3) for w in wanted]


def test_slices_of_one_track_nest() -> None:
    """Begin and end are balanced: no slice ends after one that it began in."""
    for track in {(e["pid"], e["tid"]) for e in phase("X")}:
        open_until: list[float] = []
        for event in (e for e in phase("X") if (e["pid"], e["tid"]) == track):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_a_lane_is_nested_in_its_step() -> None:
    steps = {(e["pid"], e["tid"]): e for e in phase("X") if e["cat"] == "step"}
    assert set(steps) == {(e["pid"], e["tid"]) for e in spans()}
    for event in spans():
        step = steps[event["pid"], event["tid"]]
        assert step["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1e-6
        assert step["args"]["lane"] == event["cat"]
    busy = [e["args"]["seconds"] for e in steps.values() if e["pid"] == 1 and e["args"]["lane"] == "compute"]
    assert busy == [pytest.approx(samples.predicted().busy_s(rank)) for rank in range(3)]


def test_timestamps_ascend() -> None:
    times = [e["ts"] for e in EVENTS if e["ph"] != "M"]
    assert times == sorted(times)
    assert [e["ph"] for e in EVENTS[: len(phase("M"))]] == ["M"] * len(phase("M"))


def test_an_arrow_goes_from_each_send_to_what_it_feeds() -> None:
    starts, ends = ({(e["cat"], e["name"], e["id"]): e for e in phase(p)} for p in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == len(phase("s")) == len([e for e in spans() if e["cat"] == "send"])
    for key, start in starts.items():
        source, goal = Action.parse(_under(start)["name"]), Action.parse(_under(ends[key])["name"])
        assert source.kind == Kind(key[1])
        assert goal.kind is (Kind.F if source.kind is Kind.SEND_F else Kind.B)
        assert (goal.stage, goal.microbatch) == (source.peer, source.microbatch)
        assert ends[key]["bp"] == "e"
        assert start["ts"] <= ends[key]["ts"]


def _under(flow: Event) -> Event:
    """The slice that the viewer binds the arrow's end to."""
    (only,) = [
        e for e in spans() if (e["pid"], e["tid"]) == (flow["pid"], flow["tid"]) and e["ts"] == flow["ts"]
    ]
    return only


def test_counters_are_the_samples() -> None:
    found = [(e["name"], e["args"]) for e in phase("C")]
    by_time = sorted(samples.measured().samples, key=lambda s: s.time_s)
    assert found == [(f"memory rank {s.rank}", {"alive_bytes": s.alive_bytes}) for s in by_time]


def test_overlapping_spans_get_tracks_of_their_own() -> None:
    def span(start_s: float, end_s: float) -> Span:
        return Span(rank=0, lane="send", action="0SEND_F0", start_s=start_s, end_s=end_s)

    spans = [span(0, 2), span(1, 3), span(2, 4)]
    assert apart(spans) == [[spans[0], spans[2]], [spans[1]]]
    trace = perfetto(Timeline(source="measured", ranks=1, spans=tuple(spans)), None)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["rank 0 send", "rank 0 send (2)"]


def test_no_arrow_back_in_time_and_none_to_nowhere() -> None:
    send = Span(rank=0, lane="send", action="0SEND_F0", start_s=1.0, end_s=2.0)
    early = Span(rank=1, lane="compute", action="1F0", start_s=0.5, end_s=3.0)
    late = Span(rank=1, lane="compute", action="1F0", start_s=1.0, end_s=3.0)
    assert arrows([send]) == []
    assert arrows([send, early]) == []
    assert arrows([send, late]) == [(send, late)]


def test_a_second_group_of_microbatches_has_arrows_of_its_own() -> None:
    """Two groups of one microbatch each have the same actions."""
    times: tuple[tuple[int, Lane, str], ...] = ((0, "send", "0SEND_F0"), (1, "compute", "1F0"))
    both = [
        Span(rank=rank, lane=lane, action=action, start_s=start + rank, end_s=start + rank + 0.5)
        for start in (0.0, 10.0)
        for rank, lane, action in times
    ]
    assert arrows(both) == [(both[0], both[1]), (both[2], both[3])]


def test_nothing_gives_an_empty_trace() -> None:
    assert perfetto(None, None)["traceEvents"] == []
