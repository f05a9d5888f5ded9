"""Problem: which stages can be made of a DAG, and what does each of them cost, as tables?

A stage is the difference of two downsets (dag.py). Listed in a row, smaller ones first, downsets are to a
DAG what cuts are to a chain: entry [i, j] of a table is the stage that makes downset j out of downset i,
and where i is not inside j there is none. So everything that is exact for any table over runs of a chain
(partition.py, options.py) is exact for convex stages of a DAG: memory by position, ways to run, transfers.

    sum over a stage = sum over downset j - sum over downset i          for whatever adds up over units

Complexity: O(N^2) per table for N downsets; more than `most` of them are refused, never sampled: for the
bottleneck alone downsets.py goes further, and says how far from the optimum it stopped.
Oracle: tests/benchmarks/test_convex.py tries all splits of small graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self, final

import numpy as np
from numpy.typing import NDArray
from options import Choice, Way

from outsize.errors import BadOption
from outsize.planner.dag.dag import Dag, Units, members
from outsize.planner.dag.ideals import between

MOST_DOWNSETS = 3000
NEVER = np.iinfo(np.int64).max // 4


@final
@dataclass(frozen=True, eq=False)
class Convex:
    """`downsets`, smaller ones first. `member[i, u]`: unit u is in downset i. `inside[i, j]`: i is in j."""

    dag: Dag
    downsets: tuple[Units, ...]
    member: NDArray[np.float64]
    inside: NDArray[np.bool_]

    @classmethod
    def of(cls, dag: Dag, most: int = MOST_DOWNSETS) -> Self:
        """List them; BadOption when there are more than `most`."""
        lattice = between(dag, dag, (), 0, dag.everything, most)
        if lattice is None:
            raise BadOption(
                "this graph has too many convex stages for tables",
                numbers=f"{len(dag.weights)} units, more than {most} downsets",
                next_step="planner.dag.partition.split_dag, which answers with a gap",
            )
        member = np.zeros((len(lattice.downsets), len(dag.weights)))
        for i, downset in enumerate(lattice.downsets):
            member[i, list(members(downset))] = 1.0
        inside = member @ (1.0 - member).T < 0.5
        np.fill_diagonal(inside, val=False)
        return cls(dag, tuple(lattice.downsets), member, inside)

    def seconds(self, per_unit: Sequence[float], boundary: Sequence[float] = ()) -> NDArray[np.float64]:
        """Table of sums, and `boundary[u]` on both sides of every boundary that unit u's output crosses.

        Infinite where there is no stage.
        """
        sums = self.member @ np.asarray(per_unit, np.float64)
        crossing = self.crossing(boundary) if len(boundary) else np.zeros_like(sums)
        table = sums[None, :] - sums[:, None] + crossing[None, :] + crossing[:, None]
        return np.where(self.inside, table, np.inf)

    def bytes(self, per_unit: Sequence[int]) -> NDArray[np.int64]:
        """Table of sums; more than any memory where there is no stage."""
        sums = np.array([sum(per_unit[u] for u in members(d)) for d in self.downsets], np.int64)
        return np.where(self.inside, sums[None, :] - sums[:, None], NEVER)

    def crossing(self, per_unit: Sequence[float]) -> NDArray[np.float64]:
        """For each downset the sum over members that somebody outside uses."""
        after = self.dag.after
        return np.array(
            [sum(per_unit[u] for u in members(d) if after[u] & ~d) for d in self.downsets], np.float64
        )

    def way(
        self,
        name: str,
        steady_s: Sequence[float],
        fixed_bytes: Sequence[int],
        held_bytes: Sequence[int],
        boundary_s: Sequence[float] = (),
        once_s: Sequence[float] | None = None,
    ) -> Way:
        """A Way of options.py from figures per unit; `once_s` None: a microbatch alone is as fast."""
        steady = self.seconds(steady_s, boundary_s)
        once = steady if once_s is None else self.seconds(once_s, boundary_s)
        return Way(
            name, steady, once, self.bytes(fixed_bytes), np.where(self.inside, self.bytes(held_bytes), 0)
        )

    def stages(self, choice: Choice) -> tuple[Units, ...]:
        """The units of each stage of a choice over these tables."""
        chain = [self.downsets[i] for i in choice.bounds]
        return tuple(high & ~low for low, high in pairwise(chain))
