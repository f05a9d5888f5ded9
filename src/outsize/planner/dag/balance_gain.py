"""Problem: would stages that are not runs of the model's own order be lighter?

A plan cuts the order in which the model computes. Branches (towers that are fused late, experts, skips) allow
other orders: every split of the graph into stages of which none waits for a later one, a chain of downsets
(dag.py). The least slowest stage of those is found by partition.py, exactly or with a bound, and compared
with the least slowest run. Only compute counts: neither links nor memory. The search prices such stages
(strategies/parallel_branches.py); under a schedule that needs runs it is advice.

Symbols: n -> units, p -> stages. Complexity: O(n log n) where the runs are balanced already; otherwise that
of partition.py, for at most MOST downsets. Oracle: tests/unit/planner/dag/test_balance_gain.py, by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.planner.dag.dag import Dag, members
from outsize.planner.dag.partition import split_dag
from outsize.planner.partition.chain_dp import SAME

# These limit the units of a model, the downsets that are listed, and the whole ticks of all the work.
MOST_UNITS: Final = 1500
MOST: Final = 20_000
TICKS: Final = 100_000
# A smaller gain of the slowest stage is no reason to change a model.
WORTH: Final = 0.02


@final
@dataclass(frozen=True, slots=True)
class Branches:
    """Holds the seconds of a microbatch on the slowest stage, with runs and with any stages, and the units of
    the latter.
    """

    runs_s: float
    stages_s: float
    stages: tuple[tuple[int, ...], ...]


def branches(graph: ModelGraph, seconds: UnitSeconds, stages: int) -> Branches | None:
    """Returns stages that are not runs where they are lighter by WORTH or more, otherwise None."""
    total = np.concatenate(([0.0], np.cumsum(seconds.total)))
    runs_s = _slowest_run_s(total, stages)
    least_s = max(float(total[-1]) / stages, float(seconds.total.max(initial=0.0)))
    if runs_s * (1 - WORTH) <= least_s or not stages <= len(graph.units) <= MOST_UNITS:
        return None
    stage_units = _split(graph, seconds.total, stages)
    stages_s = max(float(seconds.total[list(stage)].sum()) for stage in stage_units)
    return Branches(runs_s, stages_s, stage_units) if stages_s < runs_s * (1 - WORTH) else None


def _slowest_run_s(total: Seconds, stages: int) -> float:
    """Bisects the slowest run: each run takes as many units as the limit allows."""
    low, high = float(total[-1]) / stages, float(total[-1])
    while high > low * SAME:
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches(total, stages, middle) else (middle, high)
    return high


def _reaches(total: Seconds, stages: int, limit_s: float) -> bool:
    first = 0
    for _ in range(stages):
        first = int(np.searchsorted(total, total[first] + limit_s, side="right")) - 1
    return first == len(total) - 1


def _split(graph: ModelGraph, seconds: Seconds, stages: int) -> tuple[tuple[int, ...], ...]:
    ticks = np.ceil(seconds * (TICKS / float(seconds.sum())) / SAME).astype(int).tolist()
    edges = {(value.producer, user) for value in graph.values for user in value.consumers}
    dag = Dag.of(ticks, ((a, b) for a, b in sorted(edges) if a != b))
    return tuple(tuple(members(stage)) for stage in split_dag(dag, stages, most_downsets=MOST).stages)
