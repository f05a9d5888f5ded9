"""Problem: a search is not over yet; what is its best plan so far, and may it end with that?

Each candidate that the search prices is a whole plan, so there is an answer from the first one on (an
incumbent, in the words of integer programming). Whoever asked is told of each better one with its gap, and
the search ends with the best one where the time that was asked for is over. Before there is one it goes on:
a limit never turns a plan into a refusal.

    Incumbents(limit_s, listener)   one for each question; its seconds count from when it is made
    Limits                          what ends a search before all of it was searched, and what it leaves out

A search without a limit reads no clock but for the seconds that its listener is told. Oracle:
tests/unit/planner/search/test_incumbents.py, whose clock is a list of seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import final

from outsize.ir.findings import TimeLimitEnded
from outsize.ir.plan import Axes, Plan


@final
@dataclass(frozen=True)
class Incumbent:
    """Is the best plan of a search so far: its axes, the seconds of its step, and after how many seconds of
    the search it was found.

    `gap` is how far the step is from the least bound of what is searched at that time, None without a bound.
    """

    axes: Axes
    step_s: float
    gap: float | None
    after_s: float


Listener = Callable[[Incumbent], None]
"""Is told of each plan that is better than all before."""


@final
class Incumbents:
    """Follows the searches for one question: what is their best plan, and is their time over?"""

    def __init__(
        self,
        limit_s: float | None = None,
        listener: Listener | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._limit_s, self._listener, self._clock = limit_s, listener, clock
        self._best_s, self._ended, self._started_s = inf, False, clock()

    def found(self, axes: Axes, step_s: float, floor_s: float) -> None:
        """Takes a candidate, and the least bound of what is searched; tells of it where it is the best."""
        if step_s >= self._best_s:
            return
        self._best_s = step_s
        if self._listener is not None:
            gap = max(0.0, step_s / floor_s - 1) if 0 < floor_s < inf else None
            self._listener(Incumbent(axes, step_s, gap, self._clock() - self._started_s))

    def end_search(self) -> bool:
        """Returns whether the search is to end now, because its time is over and it has a plan.

        It is asked where something would be searched next, so that `ended` is true only of a search that
        the limit has cut short.
        """
        if self._limit_s is None or self._best_s == inf:
            return False
        self._ended = self._ended or self._clock() - self._started_s >= self._limit_s
        return self._ended

    @property
    def ended(self) -> bool:
        """Returns whether the time limit has ended a search."""
        return self._ended

    def told(self, plan: Plan) -> Plan:
        """Returns the plan, which says so where the time limit has ended its search."""
        if not self._ended or self._limit_s is None:
            return plan
        gap = None if plan.expected is None else plan.expected.gap
        ended = TimeLimitEnded(limit_s=self._limit_s, gap=gap)
        return plan.model_copy(update={"why": (*plan.why, ended)})


@final
@dataclass(frozen=True, eq=False)
class Limits:
    """Says what a search may leave out.

    Above `loses_s` the caller takes another plan, so pipelines there are not compared with others; above
    `unread_s` nobody reads of a pipeline either, so it is not improved, and layouts that no cut brings below
    it are left out. Unless it `explains`, what pipelines lack that do not fit is not looked for: neither the
    plan nor NoFeasiblePlan says it. `incumbents` end it when its time is over.
    """

    explains: bool = True
    loses_s: float = inf
    unread_s: float = inf
    incumbents: Incumbents = field(default_factory=Incumbents)
