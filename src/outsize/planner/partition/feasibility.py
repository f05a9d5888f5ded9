"""Problem: can p stages hold a chain of n units within their memories? It takes O(p n) in most cases.

`peak_s(first, end)` are the peak bytes of stage s with the units first..end-1 (memory/account.py). From the
front, each stage takes as many units as its memory holds:

    witness      with the real peaks: a cut that reaches the end fits
    refutation   with peaks that leave out what crosses the cuts: these only grow with more units, so
                 taking the most is best, and not reaching the end proves that nothing fits

Where neither decides, an exact answer is computed: the units that can be the first of each stage, from those
of the stage before, in O(p n w) where w of them remain. Units are excluded from which the other devices
cannot hold the remaining units (the refutation, run from the end).
The least full cut is found by bisection over how full a device may be, to a thousandth. It is the least full
one of the greedy cuts, and is shown as an example, not as an optimum.

Source: probing of chains-on-chains partitioning (Pinar and Aykanat, JPDC 64(8), 2004, sec. 3.3). Symbols:
their bottleneck value B -> share x memory. Oracle: tests/unit/planner/partition/test_feasibility.py tries
every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, final

import numpy as np

from outsize.ir.cluster import Cluster, Device
from outsize.ir.plan import ScheduleName
from outsize.planner.memory.account import InFlightState, peak_table
from outsize.planner.memory.in_flight_states import states_by_stage
from outsize.planner.memory.range_tables import RangeTables
from outsize.planner.memory.sharded import WholeBytes
from outsize.planner.partition.least_full import least_full_cut
from outsize.planner.partition.stage_prices import Pipeline, PricedModel

# Bisection stops at this share of the device's memory.
PRECISE = 1e-3
# A share times a memory may be rounded to less than the bytes that it is of.
ROUNDED = 1 + 1e-9


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChainFeasibility:
    """Decides feasibility for one case under one schedule on the first `stages` devices of a cluster."""

    case: PricedModel
    schedule: ScheduleName
    stages: int
    cluster: Cluster

    @property
    def states(self) -> tuple[tuple[InFlightState, ...], ...]:
        """Returns the in-flight states of each stage in a chain."""
        return self.case.states(self.schedule, self.stages)

    def fits(self) -> bool:
        """Returns whether any cut fits; exact."""
        if self._greedy(self._row, 1.0) is not None:
            return True
        return self._greedy(self._bare, 1.0) is not None and self._reaches_end(self._earliest())

    def may_fill_less(self, share: float) -> bool:
        """Returns whether a cut may fill its fullest device to this share at most; False is certain."""
        return self._greedy(self._bare, share * ROUNDED) is not None

    def least_full_cut(self) -> tuple[int, ...]:
        """Returns a cut whose fullest device is nearly as little full as possible; it fits if any
        cut does.
        """
        low, high = 0.0, 1.0
        while (bounds := self._greedy(self._row, high)) is None:
            low, high = high, 2 * high
        if low >= 1.0 and self.fits():
            return least_full_cut(self.case, self.schedule, self.stages, self.cluster)
        while high - low > PRECISE * high:
            middle = (low + high) / 2
            less_full = self._greedy(self._row, middle)
            low, high, bounds = (middle, high, bounds) if less_full is None else (low, middle, less_full)
        return bounds

    def _row(self, first: int) -> RangeTables:
        return _part(self.case.ranges, first)

    def _bare(self, first: int) -> RangeTables:
        return self._row(first).without_crossing()

    def _greedy(self, rows: Callable[[int], RangeTables], share: float) -> tuple[int, ...] | None:
        """Returns the first unit of each stage when each takes all that `share` of its memory holds; None if
        that fails.
        """
        limits = [share * d.memory_bytes for d in self.cluster.devices[: self.stages]]
        return _taking_most([[rows]] * self.stages, self.case.units, self.states, limits)

    def _earliest(self) -> list[int]:
        """Returns for each stage a lower bound of its first unit, computed from the end."""
        end, earliest = self.case.units, list[int]()
        for stage in reversed(range(self.stages)):
            column = _part(self.case.ranges, (slice(None), end)).without_crossing()
            peaks = peak_table(column, self.states[stage])
            holds = np.flatnonzero(peaks[:end] <= self.cluster.devices[stage].memory_bytes)
            end = int(holds[0]) if len(holds) else end
            earliest.append(end)
        return earliest[::-1]

    def _reaches_end(self, earliest: Sequence[int]) -> bool:
        """Returns whether the last stage can end with the last unit; exact."""
        starts, ends = np.array([0]), np.arange(self.case.units + 1)
        for stage, device in enumerate(self.cluster.devices[: self.stages]):
            starts = starts[starts >= earliest[stage]]
            if not len(starts):
                return False
            peaks = peak_table(_part(self.case.ranges, starts), self.states[stage])
            fits = (peaks <= device.memory_bytes) & (ends > starts[:, None])
            starts = np.flatnonzero(fits.any(axis=0))
        return self.case.units in starts


def refuted(
    rows: Callable[[int], RangeTables], schedule: ScheduleName, microbatches: int, devices: Sequence[Device]
) -> bool:
    """Returns whether even peaks without what crosses the cuts exceed the devices' memories.

    `rows` are those of `rows_without_crossing`.
    """
    states = states_by_stage(schedule, len(devices), microbatches, len(devices))
    room = [device.memory_bytes for device in devices]
    return _taking_most([[rows]] * len(room), len(rows(0).saved) - 1, states, room) is None


def none_fits(
    cases: Sequence[PricedModel], schedule: ScheduleName, room: Sequence[int], whole: WholeBytes | None = None
) -> bool:
    """Returns whether no cut fits, whichever of the cases each stage is in, by the same refutation.

    `room`: the bytes that each stage may take. All cases are of the same units and microbatches; `whole` is
    what they have whole for a moment.
    """
    rows = [partial(_row_without_crossing, case.ranges, whole) for case in cases]
    states = cases[0].states(schedule, len(room))
    return _taking_most([rows] * len(room), cases[0].units, states, room) is None


def fits_nowhere(pipeline: Pipeline, whole: WholeBytes | None = None) -> bool:
    """Returns whether no cut of a pipeline fits in the options that it tries: no run with the first unit is a
    first stage, none with the last unit a last one, or by the same refutation.
    """
    layout, m, last = pipeline.layout, pipeline.case.microbatches, pipeline.stages - 1
    rows = {
        id(case): partial(_row_without_crossing, case.ranges, whole)
        for options in pipeline.options
        for case in options
    }
    options = [[rows[id(case)] for case in own[pipeline.first_option :]] for own in pipeline.options]
    states = states_by_stage(layout.schedule, layout.stages, m, layout.axes.pp)
    room = list(map(pipeline.room_bytes, range(pipeline.stages)))
    for stage, runs in ((0, (0, slice(1, None))), (last, (slice(-1), -1))):
        cases = pipeline.options[stage][pipeline.first_option :]
        peaks = (peak_table(_part(case.ranges, runs), states[stage]) for case in cases)
        if all(int(peak.min()) > room[stage] for peak in peaks):
            return True
    return _taking_most(options, pipeline.case.units, states, room) is None


def _row_without_crossing(ranges: RangeTables, whole: WholeBytes | None, first: int) -> RangeTables:
    row = _part(ranges, first).without_crossing()
    return row if whole is None else whole.beside(row, first)


def _taking_most(
    options: Sequence[Sequence[Callable[[int], RangeTables]]],
    units: int,
    states: Sequence[tuple[InFlightState, ...]],
    limits: Sequence[float],
) -> tuple[int, ...] | None:
    """Returns the cut in which each stage takes the most that its limit holds in any of its options; None
    where that does not reach the end.
    """
    bounds = [0]
    for stage, limit in enumerate(limits):
        last = units - (len(limits) - 1 - stage)  # Each later stage needs at least one unit.
        peaks = np.min([peak_table(rows(bounds[-1]), states[stage]) for rows in options[stage]], axis=0)
        ends = np.flatnonzero(peaks[: last + 1] <= limit)
        if not len(ends) or ends[-1] <= bounds[-1]:
            return None
        bounds.append(int(ends[-1]))
    return tuple(bounds) if bounds[-1] == units else None


def _part(ranges: RangeTables, index: Any) -> RangeTables:
    """Returns every table at this index: an int gives the runs that begin with one unit, of shape
    (n + 1,).
    """
    return replace(ranges, **{f.name: getattr(ranges, f.name)[index] for f in fields(ranges)})
