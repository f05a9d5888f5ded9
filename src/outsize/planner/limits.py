"""Which one thing would have to change for a step to get shorter?

    a unit       the slowest stage is a single unit, which no cut divides
    the host     has the weights: how much of the step is the devices', how much its own
    memory       without the devices' limits another cut, or no recompute, would be faster by SEEN or more
    links        transfers that nothing hides are that share of the step, or the replicas' gradients are
    bubble       devices wait for that share: more microbatches or fewer stages would be faster
    compute      none of these: the stage that sets the pace, with the share of the step for which it computes

The first that applies. Shares are of the predicted step. Oracle: tests/unit/planner/test_limits.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from outsize.ir.graph import ModelGraph
from outsize.ir.text import percent_text, seconds_text
from outsize.planner.estimate import Estimate, waits_s
from outsize.planner.floor import Work

SEEN: Final = 0.02
MUCH: Final = 0.25


def limited_by(found: Estimate, work: Work, graph: ModelGraph, bounds: Sequence[int]) -> str:
    """The binding term in a few words; `work` and `bounds` are of the graph's units."""
    seconds = [c.forward_s + c.backward_s for c in found.costs]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    first, layout = bounds[slowest], found.layout
    if layout.hosted:
        return _of_host(found)
    if layout.stages > 1 and bounds[slowest + 1] - first == 1:
        return f"{graph.units[first].name}, one unit, alone on stage {slowest}"
    less_s = _less(work, found)
    if less_s > SEEN * found.step_s:
        return f"memory: with more of it a step could be {seconds_text(less_s)} shorter"
    if found.sync_s > SEEN * found.step_s:
        share = percent_text(found.sync_s / found.step_s)
        return f"gradients of {layout.replicas} replicas: {share} of the step"
    links_s = waits_s(found)
    if links_s > SEEN * found.step_s:
        return f"links: {percent_text(links_s / found.step_s)} of the step are transfers that nothing hides"
    if found.bubble > MUCH:
        return f"the bubble: devices wait for {percent_text(found.bubble)} of the step"
    return f"compute on stage {slowest}, busy for {percent_text(found.busy(slowest))} of the step"


def _of_host(found: Estimate) -> str:
    """A case's `base` is what the device computes, whatever it waits for."""
    computed_s = 0.0
    for case, (first, end) in zip(found.cases, pairwise(found.bounds), strict=True):
        again = 0 if case.recompute == "none" else 1
        computed_s += sum((1 + again) * c.forward_s + c.backward_s for c in case.base.units[first:end])
    busy = computed_s * found.layout.microbatches / (found.step_s * found.layout.axes.pp)
    if 1 - busy <= SEEN:
        return f"compute, for {percent_text(busy)} of the step"
    optimizer = percent_text(found.sync_s / found.step_s)
    return f"the host: devices compute for {percent_text(busy)} of the step, its optimizer takes {optimizer}"


def _less(work: Work, found: Estimate) -> float:
    """Seconds between the least step within this memory and the least one without limits."""
    layout = found.layout
    if not found.floor_s:
        return 0.0
    floor_s = work.floor_s(layout.schedule, layout.stages, layout.axes.pp, layout.microbatches)
    return found.floor_s - floor_s
