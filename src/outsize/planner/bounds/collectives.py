"""Problem: how long is a step at least because of its collectives of weights and gradients, whatever the cuts
are?

A rank runs its collectives one after the other. `average_s` is what an average rank has to do: sums of whole
weights begin within a last backward, behind all forwards; where weights are sharded, each pass of a stage may
find those of its first block gathered. `queue` says how the collectives of sharded weights pace the stages of
a pipeline (chain.py): it needs seconds that add up over units, so a part of the weights takes its share of
the seconds in which all are gathered at once, which is less than it takes alone.

Complexity: O(units). Oracle: tests/unit/planner/evaluate/test_played_step.py plays every cut of small models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.bounds.chain import Queue
from outsize.planner.bounds.memory import EACH, MemoryBounds
from outsize.planner.bounds.step_time import PrefixTimes, losses
from outsize.planner.costs.cache import Cache
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.layout.layout import Layout
from outsize.schedules.families import family_of
from outsize.schedules.refine import pieces_of


@final
class CollectiveBounds:
    """Bounds the collectives of one model at some microbatch sizes, of which `held` has the bytes."""

    def __init__(
        self, candidates: Mapping[int, tuple[ModelGraph, Profile]], held: MemoryBounds, cache: Cache
    ) -> None:
        self._candidates, self._held, self._cache = candidates, held, cache

    def average_s(self, layout: Layout, work: PrefixTimes, prices: WeightCollectives) -> float:
        """Returns a lower bound of a step: the collectives on an average rank."""
        m, pp = layout.microbatches, layout.axes.pp
        weights, gradients, *_ = (int(size) for size in self._held.bytes_of(layout))
        if not layout.weight_policy.shards_weights:
            passed_s = m * work.forward[-1] + ((m - 1) * work.backward[-1] if pp == 1 else 0.0)
            return float(passed_s) / pp + prices.reduce_s(gradients // pp, last=True)
        shards, tp = layout.shards, layout.axes.product_parts
        kept_s = max(
            sum(prices.gather_s(size // tp) for size in sizes)
            for sizes in self._gathered_together(layout.captured)
        )
        gathers_s = max(0.0, prices.gather_s(weights * shards) - layout.stages * kept_s)
        scatter_s, last_s = (prices.reduce_s(gradients * shards, last=last) for last in (False, True))
        return (m * 2 * gathers_s + (m - 1) * scatter_s + last_s) / pp

    def queue(
        self, layout: Layout, prices: WeightCollectives, ends: Sequence[int], made: NDArray[np.int64]
    ) -> Queue | None:
        """Returns the collectives of sharded weights along a chain; None where no law of them is known.

        `ends` are the pieces between which the model may be cut, `made` that of `made_for`.
        """
        family = family_of(layout.schedule)
        if not layout.weight_policy.shards_weights or not (family.plain and family.trains):
            return None
        shards = layout.shards
        weights, gradients, *_ = (shards * sums for sums in self._held.bytes_of(layout, EACH))
        gather_s = prices.gather_s(int(weights[-1])) / max(float(weights[-1]), 1.0)
        reduce_s = prices.reduce_s(int(gradients[-1]), last=False) / max(float(gradients[-1]), 1.0)
        forward, summed = gather_s * weights, reduce_s * gradients
        lost = losses(made, 2 * forward + summed)
        # A block that is gathered has the rest of a piece that begins in it.
        largest = max(map(sum, self._gathered_together(layout.captured))) / layout.axes.product_parts
        largest += max(float(weights[end] - weights[first + 1]) for first, end in pairwise(ends))
        spared_s = gather_s * largest
        summing_s = reduce_s * largest * float(gradients[-1]) / max(float(weights[-1]), 1.0)
        slack_s = float(lost[1:-1].max(initial=0.0)) + 4 * spared_s + 2 * summing_s
        return Queue(forward, forward + summed, slack_s, spared_s)

    def _gathered_together(self, captured: int) -> Sequence[tuple[int, ...]]:
        """Returns, for each block, the weight bytes of the blocks whose weights it uses: its own, and those
        that own tied ones.
        """
        graph = self._candidates[captured][0]
        return self._cache.once(("gathered together", captured), lambda: _gathered_together(graph))


def _gathered_together(graph: ModelGraph) -> Sequence[tuple[int, ...]]:
    piece, owners = pieces_of(graph), defaultdict[int, set[int]](set)
    sizes = defaultdict[int, int](int)
    for name, unit in graph.owner_of.items():
        sizes[piece[unit]] += graph.parameter_of[name].size_bytes
    for unit in graph.units:
        names = (graph.parameter_of[name].name for name in unit.parameters)
        owners[piece[unit.index]] |= {piece[graph.owner_of[name]] for name in names}
    return sorted({tuple(sizes[owner] for owner in sorted(own)) for own in owners.values()})
