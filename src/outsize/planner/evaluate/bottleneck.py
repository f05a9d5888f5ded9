"""Finds the one thing that would have to change for a step to get shorter.

    a unit       the slowest stage is a single unit, which no cut divides
    the host     holds the weights: which share of the step the devices compute, and which the host does
    memory       without the devices' limits another cut, or no recompute, would be faster by SEEN or more
    collectives  of replicas' weights and gradients that no compute overlaps take that share of the step
    links        transfers that no compute overlaps do
    bubble       devices wait for that share: more microbatches or fewer stages would be faster
    compute      none of these: the stage that sets the pace, with the share of the step for which it computes

The first one that applies is returned. Shares are of the predicted step. Oracle:
tests/unit/planner/evaluate/test_bottleneck.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from outsize.ir.findings import (
    Bottleneck,
    BubbleBound,
    CollectiveBound,
    ComputeBound,
    HostBound,
    LinkBound,
    MemoryBound,
    SingleUnit,
)
from outsize.ir.graph import ModelGraph
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import keeping_all
from outsize.planner.evaluate.played_step import is_collective, is_message

SEEN: Final = 0.02
MUCH: Final = 0.25


def limited_by(
    candidate: Candidate, work: PrefixTimes, graph: ModelGraph, bounds: Sequence[int]
) -> Bottleneck:
    """Returns the bottleneck; `work` and `bounds` are of the graph's units."""
    seconds = [c.forward_s + c.backward_s for c in candidate.costs]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    first, layout, step_s = bounds[slowest], candidate.layout, candidate.step_s
    if layout.hosted:
        return _on_host(candidate)
    if layout.stages > 1 and bounds[slowest + 1] - first == 1:
        return SingleUnit(unit=graph.units[first].name, stage=slowest)
    shorter_s = _memory_costs_s(work, candidate)
    if shorter_s > SEEN * step_s:
        return MemoryBound(shorter_s=shorter_s)
    collectives_s = candidate.step.exposed_s(is_collective)
    if collectives_s > SEEN * step_s:
        return CollectiveBound(replicas=layout.replicas, share=collectives_s / step_s)
    links_s = candidate.step.exposed_s(is_message)
    if links_s > SEEN * step_s:
        return LinkBound(share=links_s / step_s)
    if candidate.bubble > MUCH:
        return BubbleBound(share=candidate.bubble)
    return ComputeBound(stage=slowest, share=candidate.busy(slowest))


def _on_host(candidate: Candidate) -> HostBound | ComputeBound:
    """Returns the bottleneck with weights on the host; a case's `base` is what the device computes without
    waiting.
    """
    computed_s = 0.0
    for case, (first, end) in zip(candidate.cases, pairwise(candidate.bounds), strict=True):
        compute_s = case.activation_policy.compute_s
        computed_s += sum(compute_s(c.forward_s, c.backward_s) for c in case.base.units[first:end])
    busy = computed_s * candidate.layout.microbatches / (candidate.step_s * candidate.layout.axes.pp)
    if 1 - busy <= SEEN:
        return ComputeBound(stage=None, share=busy)
    return HostBound(compute_share=busy, optimizer_share=candidate.after_s / candidate.step_s)


def _memory_costs_s(work: PrefixTimes, candidate: Candidate) -> float:
    """Returns the seconds between the least step within this memory and the least one without limits."""
    layout = candidate.layout
    if not candidate.floor_s:
        return 0.0
    floor_s = work.floor_s(layout.schedule, layout.stages, layout.axes.pp, layout.microbatches)
    costs_s = candidate.floor_s - floor_s
    # A floor of chosen units also has what collectives slow and the optimizer's seconds.
    return min(costs_s, candidate.step_s - keeping_all(candidate).step_s) if candidate.recomputed else costs_s
