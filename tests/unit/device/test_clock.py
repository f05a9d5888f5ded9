"""Marks on a device that works behind its host, played: each costs the device a second, the host nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from time import perf_counter, thread_time
from typing import Any

import pytest
import torch

from outsize.device.clock import HOST, CoreClock, EventClock, clock_of
from outsize.run.interpreter.trace import Marks


class Played:
    """A device that comes past its n-th event n seconds after it was begun, however long the host takes."""

    def __init__(self) -> None:
        self.past_s, self.idled = 0.0, 0

    def record(self, event: PlayedEvent) -> None:
        self.past_s += 1.0
        event.at_s = self.past_s

    def idle(self) -> None:
        self.idled += 1


class PlayedEvent:
    def __init__(self) -> None:
        self.at_s = 0.0

    def elapsed_time(self, end_event: Any, /) -> float:
        return (end_event.at_s - self.at_s) * 1000


def test_spans_are_the_devices_not_the_launches() -> None:
    device = Played()
    clock = EventClock(PlayedEvent, device.record, device.idle)
    marks = Marks([("0F0", "compute"), ("0B0", "compute")], clock=clock)
    marks.times[:] = [clock.mark(), clock.mark(), clock.mark(), clock.mark(), 0.0, clock.mark()]
    assert device.idled == 0, "marking must not make the host wait"
    before_s = perf_counter()
    found = list(marks.spans())
    assert [(action, lane) for action, lane, _, _ in found] == [
        ("0F0", "wait"),
        ("0F0", "compute"),
        ("0B0", "compute"),
    ]
    assert [end - start for _, _, start, end in found] == pytest.approx([1.0, 1.0, 1.0])
    last_s = found[-1][3]  # the reading of the clocks is one event later
    assert before_s - 1.0 <= last_s <= perf_counter() - 1.0
    assert device.idled == 2, "idle before the clocks are read, and until the last event is past"


def test_the_cpu_is_its_own_clock() -> None:
    clock = clock_of(torch.device("cpu"))
    assert clock is HOST
    start_s, mark, end_s = perf_counter(), clock.mark(), perf_counter()
    assert start_s <= clock.seconds([mark])[0] <= end_s


def test_a_gpu_has_events() -> None:
    assert isinstance(clock_of(torch.device("cuda", 0)), EventClock)


def test_events_are_recorded_again_once_nobody_reads_them() -> None:
    device, made = Played(), list[PlayedEvent]()

    def make() -> PlayedEvent:
        made.append(PlayedEvent())
        return made[-1]

    clock = EventClock(make, device.record, device.idle)
    for step in range(3):
        marks = Marks([("0F0", "compute")], clock=clock)
        marks.times[:] = [clock.mark(), 0.0, clock.mark()]
        first_s, end_s = clock.seconds(marks.times)[::2]
        assert end_s - first_s == pytest.approx(1.0), "an event that is recorded again has its new time"
        assert len(made) == 3, f"step {step}"
        marks.drop()
        assert list(marks.spans()) == []


def test_lent_marks_are_read_without_waiting_and_are_not_recorded_again() -> None:
    device = Played()
    passed = [False]

    class LateEvent(PlayedEvent):
        def query(self) -> bool:
            return passed[0]

    made = list[LateEvent]()

    def make() -> LateEvent:
        made.append(LateEvent())
        return made[-1]

    clock = EventClock(make, device.record, device.idle)
    marks = Marks([("0F0", "compute"), ("0SEND_F0", "send"), ("0B0", "compute")], clock=clock)
    marks.times[:] = [clock.mark(), clock.mark(), clock.mark(), clock.mark(), 0.0, clock.mark()]
    marks.times += [clock.mark(), 0.0, clock.mark()]
    read = marks.lend()
    marks.drop()
    assert read() is None, "the device has not passed them"
    passed[0] = True
    read_s = read()
    assert read_s is not None
    assert read_s[0] == pytest.approx(2.0), "the forward without its wait, and the backward"
    assert device.idled == 0
    assert clock.mark() not in made[:7], "they were not given back"


def test_marks_of_the_host_are_read_at_once() -> None:
    marks = Marks([("0F0", "compute")])
    marks.times[:] = [5.0, 6.0, 8.0]
    assert marks.lend()() == (2.0, 0.0, [5.0, 6.0, 8.0])


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the system does not tell")
def test_a_clock_of_cores_counts_what_the_thread_waits_for_one() -> None:
    """Another process takes half of the core to which this thread is bound."""
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile os.getppid() > 1: pass"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    clock = CoreClock()
    try:
        os.sched_setaffinity(0, {core})
        marks = Marks([("0F0", "compute")], clock=clock)
        marks.times[0], end_s = clock.mark(), thread_time() + 0.2
        while thread_time() < end_s:
            pass
        marks.times[2] = clock.mark()
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.communicate()
        clock.close()
    read = marks.lend()()
    assert read is not None
    compute_s, waited_s, _ = read
    assert waited_s > 0.05
    assert compute_s - waited_s == pytest.approx(0.2, rel=0.2)
