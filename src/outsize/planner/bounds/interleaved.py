"""Problem: what is the step of an interleaved schedule never below, whatever the cuts are?

The model is cut into v p stages, of which rank r has r, r + p, ... A stage keeps or recomputes what its
backward needs. For the step T of m microbatches, and every rank,

    room   fixed + n saved <= R            n: how many microbatches each of the rank's stages has in flight at
                                           one moment (families.py), so that it does not matter which stage
                                           has how much
    path   before / m + later <= T / m     before: the work of all stages before one of the rank's own; later:
                                           that of this one and of the rank's own after it

Each inequality may be multiplied by a price >= 0 and all be added: w[k] for the seconds of stage k, b[r] for
the bytes of rank r. With prices of paths that add up to 1,

    T / m >= (the least price of all units over all cuts and options) - sum of b[r] R

holds for any prices (Lagrange relaxation: Geoffrion, Math. Programming Study 2, 1974), and the least price is
that of a shortest path through v p stages, for which sums over units are enough: the price of a stage is a
difference of them, so the best begin for each end is a running minimum.

Good prices are those of a model whose units are all alike, for which each rank has two inequalities and two
unknowns (what it keeps and what it recomputes), and prices of paths follow from each other. A stage costs the
same wherever it is then. The best prices of the model itself would raise the bound by a few parts in a
thousand only (docs/decisions/0231-interleaved-bounds.md).

Symbols: p -> ranks, v -> chunks, m -> microbatches. Complexity: O(v p n). Oracle:
tests/unit/planner/bounds/test_bounds_interleaved.py, every cut in all options.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

import numpy as np

from outsize.planner.bounds.chain import Room
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.unit_times import Seconds

# Halvings until a share of the step is known to what floats can tell.
HALVINGS: Final = 60


@final
class RankShape(NamedTuple):
    """Names the chunks of a rank, its microbatches, and how many each rank has of every chunk at one moment,
    when all its gradients of weights may be `graded`.
    """

    chunks: int
    microbatches: int
    in_flight: Sequence[int]
    graded: bool


@final
class _Share(NamedTuple):
    """Is what part of a model of equal units a rank can do, and by how much it rises with seconds and with
    its whole room.
    """

    part: float
    by_seconds: float
    by_room: float


@final
class InterleavedBound:
    """Bounds the step of one interleaved layout; `by_unit`: a stage may recompute some of its units."""

    def __init__(self, work: PrefixTimes, room: Room, shape: RankShape, *, by_unit: bool) -> None:
        self._work, self._shape, self._options = work, shape, room.recompute
        self._by_unit = by_unit
        self._forward, self._total = work.forward, work.forward + work.backward
        self._fixed = (room.graded if shape.graded else room.fixed) / room.room_bytes
        self._saved = room.saved / room.room_bytes
        self._ranks = len(shape.in_flight)

    def floor_s(self) -> float:
        """Returns a lower bound of the seconds of all microbatches."""
        shares = self._shares
        by_seconds = np.array([share.by_seconds for share in shares])
        if by_seconds.sum() <= 0:
            return 0.0
        by_room = np.array([share.by_room for share in shares]) / by_seconds.sum()
        alone = np.zeros((self._shape.chunks, self._ranks))
        alone[0] = by_seconds / by_seconds.sum()
        floors = [self._priced_s(alone, by_room)]
        if (paths := self._paths(by_seconds)) is not None:
            weight = self._weights(paths).mean() / self._weights(alone).mean()
            floors.append(self._priced_s(paths, by_room * weight))
        return max(0.0, *floors)

    def _priced_s(self, paths: Seconds, by_room: Seconds) -> float:
        """Returns the bound at these prices, of paths through each chunk of each rank, and of rooms."""
        work, m = self._work, self._shape.microbatches
        # A cut may take so much of each stage before.
        spared_s = work.slack_s * float((paths.ravel() * np.arange(paths.size)).sum()) / m
        cheapest = self._cheapest(self._weights(paths), by_room)
        return m * (cheapest - float(by_room.sum()) - spared_s)

    def _weights(self, paths: Seconds) -> Seconds:
        """Returns the price of a second of each stage: of paths through the rank's own, and of later ones."""
        m, flat = self._shape.microbatches, paths.ravel()
        later = flat.sum() - np.cumsum(flat)
        if not self._work.unbroken:
            later = 0.0 * later  # What is before a stage may be done at the same time.
        return np.cumsum(paths, axis=0) + later.reshape(paths.shape) / m

    def _cheapest(self, weights: Seconds, by_room: Seconds) -> float:
        """Returns the least price of all units, in as many stages as there are."""
        least = np.full(len(self._total), np.inf)
        least[0] = 0.0
        for row in weights:
            for rank, weight in enumerate(row):
                prices = self._prices(float(weight), float(by_room[rank]), self._shape.in_flight[rank])
                least = np.minimum.reduce([np.minimum.accumulate(least - each) + each for each in prices])
        return float(least[-1])

    def _prices(self, weight: float, by_room: float, in_flight: int) -> list[Seconds]:
        """Returns the price of the units of a stage in each option, as sums over units."""
        fixed = by_room * self._fixed
        kept = weight * self._total + fixed + by_room * in_flight * self._saved
        again = weight * (self._total + self._forward) + fixed
        priced = [again if recompute else kept for recompute in self._options]
        if not self._by_unit or len(priced) == 1:
            return priced
        each = np.minimum.reduce([np.diff(row) for row in priced])
        return [np.concatenate(([0.0], np.cumsum(each)))]

    @cached_property
    def _shares(self) -> list[_Share]:
        """Returns the shares of the ranks in the shortest step of a model of equal units."""
        low_s, high_s = 0.0, float(self._total[-1] + self._forward[-1])
        for _ in range(HALVINGS):
            middle_s = (low_s + high_s) / 2
            if sum(self._share(middle_s, count).part for count in self._shape.in_flight) >= 1:
                high_s = middle_s
            else:
                low_s = middle_s
        return [self._share(high_s, count) for count in self._shape.in_flight]

    def _share(self, limit_s: float, in_flight: int) -> _Share:
        """Returns what a rank can do within seconds: it keeps all, recomputes some, or its room is full."""
        total, forward = float(self._total[-1]), float(self._forward[-1])
        fixed, saved = float(self._fixed[-1]), in_flight * float(self._saved[-1])
        if True not in self._options or (False in self._options and (fixed + saved) * limit_s <= total):
            return _Share(limit_s / total, 1 / total, 0.0)
        again = total + forward
        if fixed * limit_s > again:
            return _Share(1 / fixed, 0.0, 1 / fixed)
        if False not in self._options or saved * again + forward * fixed <= 0:
            return _Share(limit_s / again, 1 / again, 0.0)
        # Both are tight: what is kept and what is recomputed have the same price.
        whole = again * saved + forward * fixed
        by_seconds, by_room = saved / whole, forward / whole
        return _Share(by_seconds * limit_s + by_room, by_seconds, by_room)

    def _paths(self, by_seconds: Seconds) -> Seconds | None:
        """Returns the prices of paths by which a second of each of a rank's stages costs `by_seconds`, times
        a factor that makes the prices add up to 1; None where a path is no more than its rank's work.

        A price is the work of the later stages that it stands for, so each follows from those of the p - 1
        stages before: it is affine in the factor.
        """
        chunks, m, _, _ = self._shape
        if m == 1 or not self._work.unbroken:
            return None
        prices = np.zeros((chunks * self._ranks, 2))
        for stage in range(len(prices)):
            before = prices[max(0, stage - self._ranks + 1) : stage].sum(axis=0) / m
            first = (-1 / m, by_seconds[stage]) if stage < self._ranks else (0.0, 0.0)
            prices[stage] = (before + first) * m / (m - 1)
        constant, rising = prices.sum(axis=0)
        found = np.maximum(0.0, prices @ (1.0, (1 - constant) / rising)) if rising > 0 else None
        if found is None or found.sum() <= 0:
            return None
        return (found / found.sum()).reshape(chunks, self._ranks)
