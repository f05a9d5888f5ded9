"""Problem: how short can a step be at best once it is known which rank computes which unit?

Stages and schedules need not be known, nor links and memory. Every unit has a forward (F), a backward of its
inputs (I) and one of its weights (W). Whatever the stages, for one microbatch

    head     F waits for the F of what makes its inputs; I for its own F and the I of all users that send a
             gradient; W for its own I
    tail     after F come the F of its users and its own I, after I the I of what made its inputs

and each rank does one thing at a time. So for any part of a rank's work, with m microbatches,

    least head of the part  +  m x seconds of the part  +  least tail of the part  <=  step

(the bound of one machine with heads and tails: Carlier, EJOR 11, 1982). The parts that are tried are the work
of a rank whose head is at least that of one of its units, with and without W, which may come last of all and
so has no tail. In a chain of equal stages this is a part of the fill, which sums of work leave out:

    four ranks, m = 4, F, I and W of one second      each rank works for 4 x 3 = 12
                                                     the last one begins at 3, so a step takes 15 at least

A stage computes its units in one go, once it has all inputs, so it is only later than its units could be, and
with recompute backwards are longer. Complexity: O(units + users) once, then O(units + ranks) in array
operations for each assignment. Oracle: tests/unit/planner/bounds/test_bounds_placement.py, where no composed
schedule of random graphs is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph
from outsize.planner.costs.unit_times import Seconds, UnitSeconds


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlacementBound:
    """Holds all work of a microbatch by ascending head: the unit it is of, its seconds, its head and tail.

    `tailed_s` are the seconds without those of W, which has no tail.
    """

    unit: NDArray[np.int64]
    work_s: Seconds
    tailed_s: Seconds
    head_s: Seconds
    tail_s: Seconds

    @classmethod
    def of(cls, graph: ModelGraph, seconds: UnitSeconds) -> Self:
        """Returns the bound of a model whose units take these seconds at least."""
        passes = seconds.forward, seconds.backward_input, seconds.backward_weight
        forward, inputs, weights = (times.tolist() for times in passes)
        receives, sends = _senders(graph)
        units = range(len(forward))
        forward_head, input_tail = [0.0 for _ in units], [0.0 for _ in units]
        for unit in units:
            forward_head[unit] = max((forward_head[v] + forward[v] for v in receives[unit]), default=0.0)
            input_tail[unit] = max((input_tail[v] + inputs[v] for v in sends[unit]), default=0.0)
        input_head = [head + own for head, own in zip(forward_head, forward, strict=True)]
        forward_tail = [tail + own for tail, own in zip(input_tail, inputs, strict=True)]
        for unit in reversed(units):
            for v in sends[unit]:
                input_head[v] = max(input_head[v], input_head[unit] + inputs[unit])
            for v in receives[unit]:
                forward_tail[v] = max(forward_tail[v], forward_tail[unit] + forward[unit])
        weight_head = [head + own for head, own in zip(input_head, inputs, strict=True)]
        nothing = [0.0 for _ in units]
        head_s = np.array([*forward_head, *input_head, *weight_head])
        order = np.argsort(head_s, kind="stable")
        rows = (
            [*forward, *inputs, *weights],
            [*forward, *inputs, *nothing],
            head_s,
            # W is left out of the part with a tail, so its own never is the least there.
            [*forward_tail, *input_tail, *(np.inf for _ in units)],
        )
        return cls(np.tile(np.array(units), 3)[order], *(np.array(row, np.float64)[order] for row in rows))

    def least_s(self, rank_of: NDArray[np.int64], microbatches: int) -> float:
        """Returns the seconds of a step at least where `rank_of[unit]` computes each unit."""
        rank_of_work, least_s = rank_of[self.unit], 0.0
        for rank in range(int(rank_of.max()) + 1):
            own = np.flatnonzero(rank_of_work == rank)
            head_s, tail_s = self.head_s[own], _least_from(self.tail_s[own])
            all_s, tailed_s = _sum_from(self.work_s[own]), _sum_from(self.tailed_s[own])
            ends_s = np.maximum(
                microbatches * all_s,
                np.where(np.isinf(tail_s), 0.0, microbatches * tailed_s + tail_s),
            )
            least_s = max(least_s, float(np.max(head_s + ends_s, initial=0.0)))
        return least_s


def _senders(graph: ModelGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Returns for each unit those that make something for it, and those to which it sends gradients."""
    receives: list[list[int]] = [[] for _ in graph.units]
    sends: list[list[int]] = [[] for _ in graph.units]
    for value in graph.values:
        for user in value.consumers:
            receives[user].append(value.producer)
            if value.requires_grad:
                sends[user].append(value.producer)
    return receives, sends


def _sum_from(row: Seconds) -> Seconds:
    """Returns for each place the sum from there to the end."""
    return np.cumsum(row[::-1])[::-1]


def _least_from(row: Seconds) -> Seconds:
    """Returns for each place the least from there to the end."""
    return np.minimum.accumulate(row[::-1])[::-1]
