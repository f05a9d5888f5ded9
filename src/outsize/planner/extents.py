"""Problem: can p stages hold a chain of n units within their memories, said in O(p n) where that is possible?

`peak_s(first, end)` are the peak bytes of stage s with the units first..end-1 (memory.py). From the front,
each stage takes as many units as its memory holds:

    witness      with the real peaks: cuts that get to the end fit
    refutation   with peaks that leave out what crosses the cuts: these only grow with more units, so
                 taking the most is best, and not getting to the end proves that nothing fits

Between the two stands the exact answer, asked only when neither speaks: the units that can be the first of
each stage, given those of the stage before, O(p n w) where w of them are left. Left out are those from which
the other devices cannot hold the rest of the model (the refutation from behind).
The least full cut is found by bisection over how full a device may be, to a thousandth; it is the least full
one among those that the front takes greedily, and shown as an example, not as an optimum.

Probing of chains-on-chains partitioning (Pinar and Aykanat, JPDC 64(8), 2004, sec. 3.3). Symbols: their
bottleneck value B -> share x memory. Oracle: tests/unit/planner/test_extents.py tries every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import numpy as np

from outsize.ir.cluster import Cluster, Device
from outsize.ir.plan import ScheduleName
from outsize.planner.lean import leanest
from outsize.planner.memory import Alive, peak_table
from outsize.planner.moments import moments_by_stage
from outsize.planner.ranges import Ranges
from outsize.planner.split import Case

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
        worst = moments_by_stage(schedule, stages, case.microbatches, stages)
        return cls(case, schedule, stages, cluster, worst)

    def fits(self) -> bool:
        """Whether any cut does; exact."""
        if self._greedy(self._row, 1.0) is not None:
            return True
        return self._greedy(self._bare, 1.0) is not None and self._reaches_end(self._earliest())

    def lean(self) -> tuple[int, ...]:
        """A cut whose fullest device is nearly as little full as it can be; it fits if any cut does."""
        low, high = 0.0, 1.0
        while (found := self._greedy(self._row, high)) is None:
            low, high = high, 2 * high
        if low >= 1.0 and self.fits():
            return leanest(self.case, self.schedule, self.stages, self.cluster)
        while high - low > PRECISE * high:
            middle = (low + high) / 2
            better = self._greedy(self._row, middle)
            low, high, found = (middle, high, found) if better is None else (low, middle, better)
        return found

    def _row(self, first: int) -> Ranges:
        return _part(self.case.ranges, first)

    def _bare(self, first: int) -> Ranges:
        return self._row(first).bare()

    def _greedy(self, rows: Callable[[int], Ranges], share: float) -> tuple[int, ...] | None:
        """First unit of each stage when each takes all that `share` of its memory holds; None when stuck."""
        limits = [share * d.memory_bytes for d in self.cluster.devices[: self.stages]]
        return _taking_most(rows, self.case.units, self.worst, limits)

    def _earliest(self) -> list[int]:
        """Of each stage: no unit before this one can be its first, seen from behind."""
        end, found = self.case.units, list[int]()
        for stage in reversed(range(self.stages)):
            column = _part(self.case.ranges, (slice(None), end)).bare()
            peaks = peak_table(column, self.worst[stage])
            holds = np.flatnonzero(peaks[:end] <= self.cluster.devices[stage].memory_bytes)
            end = int(holds[0]) if len(holds) else end
            found.append(end)
        return found[::-1]

    def _reaches_end(self, earliest: Sequence[int]) -> bool:
        """Exact: whether the last stage can end with the last unit."""
        starts, ends = np.array([0]), np.arange(self.case.units + 1)
        for stage, device in enumerate(self.cluster.devices[: self.stages]):
            starts = starts[starts >= earliest[stage]]
            if not len(starts):
                return False
            peaks = peak_table(_part(self.case.ranges, starts), self.worst[stage])
            fits = (peaks <= device.memory_bytes) & (ends > starts[:, None])
            starts = np.flatnonzero(fits.any(axis=0))
        return self.case.units in starts


def refuted(
    rows: Callable[[int], Ranges], schedule: ScheduleName, microbatches: int, devices: Sequence[Device]
) -> bool:
    """Whether peaks that leave out what crosses the cuts are too much already; rows as of `bare_rows`."""
    worst = moments_by_stage(schedule, len(devices), microbatches, len(devices))
    return _taking_most(rows, len(rows(0).saved) - 1, worst, [d.memory_bytes for d in devices]) is None


def _taking_most(
    rows: Callable[[int], Ranges], units: int, worst: Sequence[tuple[Alive, ...]], limits: Sequence[float]
) -> tuple[int, ...] | None:
    bounds = [0]
    for stage, limit in enumerate(limits):
        last = units - (len(limits) - 1 - stage)  # one unit at least for each stage to come
        peaks = peak_table(rows(bounds[-1]), worst[stage])
        ends = np.flatnonzero(peaks[: last + 1] <= limit)
        if not len(ends) or ends[-1] <= bounds[-1]:
            return None
        bounds.append(int(ends[-1]))
    return tuple(bounds) if bounds[-1] == units else None


def _part(ranges: Ranges, index: Any) -> Ranges:
    """Every table at this index: an int gives the runs that begin with one unit, of shape (n + 1,)."""
    return replace(ranges, **{f.name: getattr(ranges, f.name)[index] for f in fields(ranges)})
