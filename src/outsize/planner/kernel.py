"""Problem: let several processes wait for each other in simulated time.

A process is a generator: it yields seconds to sleep or an Event to wait for, and goes on at that
moment. The kernel keeps who is to go on when in a heap.

    def worker(ready: Event) -> Process:
        yield ready          # until somebody fires it
        yield 2.0            # two seconds

Source: the process-interaction view of SimPy's core (simpy.readthedocs.io, "Simulation Basics"), cut
down to sleeping and waiting: no values, no interrupts, no failures, no resources.
Ties run in the order in which they were scheduled, so a run is deterministic.
Complexity: O(k log k) for k resumptions. Oracle: tests/unit/planner/test_kernel.py.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from itertools import count
from typing import final


@final
class Event:
    """Happens at most once; those who wait for it go on at that moment, later comers at once."""

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []


Process = Generator["Event | float", None, None]


@final
class Kernel:
    """The clock. `now_s` is simulated time in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Process]] = []
        self._tickets = count()

    def start(self, process: Process, delay_s: float = 0.0) -> None:
        """Let a process go on `delay_s` from now; ValueError when that is in the past."""
        if delay_s < 0:
            raise ValueError(f"a process cannot sleep {delay_s} s")
        heappush(self._queue, (self.now_s + delay_s, next(self._tickets), process))

    def fire(self, event: Event) -> None:
        """Let the event happen now."""
        event.fired = True
        for process in event.waiting:
            self.start(process)
        event.waiting.clear()

    def run(self) -> None:
        """Until nobody has anything left to do; those who wait for what never happens stay behind."""
        while self._queue:
            self.now_s, _, process = heappop(self._queue)
            self._resume(process)

    def _resume(self, process: Process) -> None:
        for wish in process:
            if not isinstance(wish, Event):
                return self.start(process, wish)
            if not wish.fired:
                return wish.waiting.append(process)
        return None
