"""Frames of other threads are none of the forward's, though Python 3.12 sends their events as well."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from outsize.capture.guards.notes import Notes
from outsize.capture.guards.trace.read_trace import ReadTrace


def is_followed(trace: ReadTrace) -> bool:
    return trace.follows(sys._getframe())


def test_a_frame_of_another_thread_is_not_followed() -> None:
    trace = ReadTrace(Notes({}, []), str)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_followed, trace).result()
    assert is_followed(trace)
