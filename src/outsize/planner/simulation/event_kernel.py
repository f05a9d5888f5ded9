"""Problem: let several processes wait for each other in simulated time.

A process is a generator: it yields seconds to sleep or an Event to wait for, and is resumed at that moment.
The kernel keeps the resumptions in a heap.

    def worker(ready: Event) -> Process:
        yield ready          # until another process fires it
        yield 2.0            # two seconds

Source: the process-interaction view of SimPy's core (simpy.readthedocs.io, "Simulation Basics"), cut
down to sleeping and waiting: no values, no interrupts, no failures, no resources.
Ties run in the order in which they were scheduled, so a run is deterministic.
Complexity: O(k log k) for k resumptions. Oracle: tests/unit/planner/simulation/test_event_kernel.py.
"""

from __future__ import annotations

from collections.abc import Generator
from heapq import heappop, heappush
from itertools import count
from typing import final


@final
class Event:
    """Happens at most once; waiting processes are resumed at that moment, later ones at once."""

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []


Process = Generator["Event | float", None, None]


@final
class Kernel:
    """Is the clock and the queue of processes; `now_s` is simulated time in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Process]] = []
        self._tickets = count()

    def start(self, process: Process, delay_s: float = 0.0) -> None:
        """Resumes a process `delay_s` from now; raises ValueError when that is in the past."""
        if delay_s < 0:
            raise ValueError(f"a process cannot sleep {delay_s} s")
        heappush(self._queue, (self.now_s + delay_s, next(self._tickets), process))

    def fire(self, event: Event) -> None:
        """Lets the event happen now."""
        event.fired = True
        for process in event.waiting:
            self.start(process)
        event.waiting.clear()

    def run(self) -> None:
        """Runs until no process has anything left to do; those that wait for what never happens are
        dropped.
        """
        while self._queue:
            self.now_s, _, process = heappop(self._queue)
            self._resume(process)

    def _resume(self, process: Process) -> None:
        for request in process:
            if not isinstance(request, Event):
                return self.start(process, request)
            if not request.fired:
                return request.waiting.append(process)
        return None
