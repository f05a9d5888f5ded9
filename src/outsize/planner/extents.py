"""Problem: can p stages hold a chain of n units within their memories, said in O(p n) where that is possible?

`peak_s(first, end)` are the peak bytes of stage s with the units first..end-1 (memory.py). From the front,
each stage takes as many units as its memory holds:

    witness      with the real peaks: cuts that get to the end fit
    refutation   with peaks that leave out what crosses the cuts: these only grow with more units, so
                 taking the most is best, and not getting to the end proves that nothing fits

Between the two stands the exact dynamic program (split.py), O(p n^2), asked only when neither speaks.
The least full cut is found by bisection over how full a device may be, to a thousandth; it is the least full
one among those that the front takes greedily, and shown as an example, not as an optimum.

Probing of chains-on-chains partitioning (Pinar and Aykanat, JPDC 64(8), 2004, sec. 3.3). Symbols: their
bottleneck value B -> share x memory. Oracle: tests/unit/planner/test_extents.py tries every cut.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import final

import numpy as np

from outsize.ir.cluster import Cluster
from outsize.ir.plan import ScheduleName
from outsize.planner.memory import Alive, moments, peak_table
from outsize.planner.ranges import Ranges
from outsize.planner.split import Case, fits, leanest
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

# Of the device's memory: where bisection stops.
PRECISE = 1e-3


@final
@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """One case under one schedule on the first `stages` devices of a cluster."""

    case: Case
    schedule: ScheduleName
    stages: int
    cluster: Cluster
    worst: tuple[tuple[Alive, ...], ...]

    @classmethod
    def of(cls, case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> Extents:
        """With the moments of each stage in a chain."""
        chain = range(stages)
        forward, backward = frozenset(pairwise(chain)), frozenset(pairwise(reversed(chain)))
        lowered = lower(build(schedule, stages, case.microbatches), forward, backward)
        return cls(case, schedule, stages, cluster, tuple(moments(lowered, stage) for stage in chain))

    def fits(self) -> bool:
        """Whether any cut does; exact."""
        if self._greedy(self.case.ranges, 1.0) is not None:
            return True
        if self._greedy(self.case.ranges.bare(), 1.0) is None:
            return False
        return fits(self.case, self.schedule, self.stages, self.cluster)

    def lean(self) -> tuple[int, ...]:
        """A cut whose fullest device is nearly as little full as it can be; it fits if any cut does."""
        low, high = 0.0, 1.0
        while (found := self._greedy(self.case.ranges, high)) is None:
            low, high = high, 2 * high
        if low >= 1.0 and self.fits():
            return leanest(self.case, self.schedule, self.stages, self.cluster)
        while high - low > PRECISE * high:
            middle = (low + high) / 2
            better = self._greedy(self.case.ranges, middle)
            low, high, found = (middle, high, found) if better is None else (low, middle, better)
        return found

    def _greedy(self, ranges: Ranges, share: float) -> tuple[int, ...] | None:
        """First unit of each stage when each takes all that `share` of its memory holds; None when stuck."""
        bounds = [0]
        for stage in range(self.stages):
            last = self.case.units - (self.stages - 1 - stage)  # one unit at least for each stage to come
            peaks = peak_table(_row(ranges, bounds[-1]), self.worst[stage])
            ends = np.flatnonzero(peaks[: last + 1] <= share * self.cluster.devices[stage].memory_bytes)
            if not len(ends) or ends[-1] <= bounds[-1]:
                return None
            bounds.append(int(ends[-1]))
        return tuple(bounds) if bounds[-1] == self.case.units else None


def _row(ranges: Ranges, first: int) -> Ranges:
    """The runs that begin with one unit, each table of shape (n + 1,)."""
    return replace(ranges, **{f.name: getattr(ranges, f.name)[first] for f in fields(ranges)})
