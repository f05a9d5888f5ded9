"""Sums over a timeline, against numbers added up by hand."""

from __future__ import annotations

import pytest

from outsize.ir.timeline import Lane, Sample, Span, Timeline


def span(rank: int, lane: Lane, start_s: float, end_s: float) -> Span:
    return Span(rank=rank, lane=lane, action="0F0", start_s=start_s, end_s=end_s)


TIMELINE = Timeline(
    source="predicted",
    ranks=2,
    spans=(span(0, "compute", 0, 3), span(0, "send", 3, 4), span(1, "wait", 0, 3), span(1, "compute", 3, 4)),
    samples=(Sample(rank=0, time_s=0, alive_bytes=5), Sample(rank=0, time_s=1, alive_bytes=9)),
)


def test_only_computing_is_busy() -> None:
    assert TIMELINE.duration_s == 4
    assert TIMELINE.busy_s(0) == 3
    assert TIMELINE.utilisation(1) == 0.25
    assert TIMELINE.bubble == pytest.approx(1 - (0.75 + 0.25) / 2)


def test_the_peak_is_the_largest_sample() -> None:
    assert TIMELINE.peak_bytes(0) == 9
    assert TIMELINE.peak_bytes(1) == 0


def test_an_empty_timeline_has_no_length() -> None:
    empty = Timeline(source="measured", ranks=0, spans=())
    assert empty.duration_s == 0
    assert empty.bubble == 0


def test_json_round_trip() -> None:
    assert Timeline.model_validate_json(TIMELINE.to_json()) == TIMELINE
