"""The clock: sleeping, waiting, ties."""

from __future__ import annotations

import pytest

from outsize.planner.simulation.event_kernel import Event, Kernel, Process


def test_sleepers_wake_in_time_order_and_ties_in_start_order() -> None:
    kernel, log = Kernel(), list[tuple[str, float]]()

    def sleeper(name: str, *naps: float) -> Process:
        for nap in naps:
            yield nap
            log.append((name, kernel.now_s))

    kernel.start(sleeper("a", 2.0, 1.0))
    kernel.start(sleeper("b", 1.0, 1.0))
    kernel.start(sleeper("c", 2.0))
    kernel.run()
    assert log == [("b", 1.0), ("a", 2.0), ("c", 2.0), ("b", 2.0), ("a", 3.0)]


def test_waiters_go_on_when_the_event_happens_and_late_comers_at_once() -> None:
    kernel, event, log = Kernel(), Event(), list[tuple[str, float]]()

    def waiter(name: str, nap: float) -> Process:
        yield nap
        yield event
        log.append((name, kernel.now_s))

    def trigger() -> Process:
        yield 2.0
        kernel.fire(event)

    for name, nap in (("early", 0.0), ("late", 3.0)):
        kernel.start(waiter(name, nap))
    kernel.start(trigger())
    kernel.run()
    assert log == [("early", 2.0), ("late", 3.0)]


def test_what_never_happens_leaves_its_waiters_behind() -> None:
    kernel, event = Kernel(), Event()

    def waiter() -> Process:
        yield event
        raise AssertionError("must not go on")

    kernel.start(waiter())
    kernel.run()
    assert len(event.waiting) == 1


def test_nobody_sleeps_into_the_past() -> None:
    def hasty() -> Process:
        yield -1.0

    kernel = Kernel()
    kernel.start(hasty())
    with pytest.raises(ValueError, match=r"-1\.0"):
        kernel.run()
