"""Problem: a stage without weights keeps a device busy with nothing that is trained there, as where a cut
leaves the loss alone. Which runs of units may be a stage?

    demand            a stage needs                         it is asked for where
    trainable         a unit with trainable weights         there are enough such units for all ranks
    any               a unit with weights                   ... or the step is much shorter with it
    none              nothing                               nothing else fits the devices' memory

Tied weights count in each unit that uses them. A run [first, end) has such a unit if and only if
`before[end] > before[first]`: a difference of sums, which a dynamic program over runs may ask for.
Where a rank has several stages, one of them needs such a unit.

Complexity: O(units) for a demand. Oracle: tests/unit/planner/partition/test_stage_weights.py tries every cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph


@final
@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Says which weights a stage needs: `before[u]` counts the units before piece u that have such weights,
    `pieces` the pieces with any.
    """

    before: NDArray[np.int64]
    pieces: int

    @classmethod
    def of(cls, graph: ModelGraph, ends: Sequence[int], *, frozen: bool) -> Self:
        """Counts the units with trainable weights, or with `frozen` ones too; `ends` are those of pieces."""
        has = [
            any(frozen or graph.parameter_of[name].trainable for name in unit.parameters)
            for unit in graph.units
        ]
        before = np.cumsum([0, *has])[list(ends)]
        return cls(before, int(np.count_nonzero(np.diff(before))))

    def met(self, first: Any, end: Any) -> Any:
        """Returns whether the runs have such a unit; for one run, or for arrays of them."""
        return self.before[end] > self.before[first]

    def met_by(self, bounds: Sequence[int], ranks: Sequence[int]) -> bool:
        """Returns whether each rank has one, in any of its stages."""
        runs = zip(ranks, pairwise(bounds), strict=True)
        return {rank for rank, run in runs if self.met(*run)} == set(ranks)


def demands(graph: ModelGraph, ends: Sequence[int], ranks: int) -> tuple[Demand | None, ...]:
    """Returns what stages on so many ranks need, the preferred demand first; None is no demand."""
    trainable = Demand.of(graph, ends, frozen=False)
    either = Demand.of(graph, ends, frozen=True)
    asked = (trainable,) if trainable.pieces == either.pieces else (trainable, either)
    return (*(demand for demand in asked if demand.pieces >= ranks > 1), None)
