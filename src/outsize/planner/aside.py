"""Problem: a stage lacks memory for its activations. Are they sooner back from the host than computed again?

What waits for its backward leaves in a forward and comes back in a backward, of b bytes for each microbatch:

    F' = max(F, b / link) + b / link / m      B' = max(B, b / link) + b / link / m

against B + F for all that is recomputed (recompute.py chooses what). The link is the device's to its host, by
itself: devices that share one are not slowed down by each other here. A CPU copies within its own memory,
which nothing hides, so there it is only asked for.

The layouts that were fastest with recompute are cut again, each stage as it is where that fits and with its
activations on the host where not. What is taken is faster by more than a prediction can tell, so nothing is
ever slower for this; of layouts that were not cut again nobody knows, and such a plan has no gap.
Complexity: TRIED partitions. Oracle: tests/unit/planner/test_aside.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.devices import host_link
from outsize.ir.offload import Weights
from outsize.ir.plan import Plan, Recompute
from outsize.ir.text import bytes_text
from outsize.planner.estimate import Estimate, estimate
from outsize.planner.layout import Layout
from outsize.planner.menu import Menu
from outsize.planner.polish import polish
from outsize.planner.reasons import stages_text
from outsize.planner.rivals import CLOSE, choose
from outsize.planner.split import Tables

TRIED: Final = 8


def or_offloaded(best: Estimate, priced: Sequence[Estimate], menu: Menu, cluster: Cluster) -> Estimate | None:
    """A faster way than the best one, which recomputes; None where there is none."""
    links = all(host_link(device) is not None for device in cluster.devices)
    here = links and not menu.unequal and best.graph.form == "tape"
    if not here or all(case.recompute == "none" for case in best.cases):
        return None
    layouts = dict.fromkeys(found.layout for found in sorted(priced, key=lambda found: found.step_s))
    tried = [way for layout in list(layouts)[:TRIED] for way in _ways(layout, menu)]
    if not tried:
        return None
    found = polish(choose(tried))
    return found if CLOSE * found.step_s < best.step_s else None


def offloads(plan: Plan) -> bool:
    """Whether activations of any stage go to the host."""
    return any(plan.recompute_of(stage) == "offload" for stage in range(len(plan.stages)))


def check_recompute(recompute: Recompute | None, weights: Weights | None) -> None:
    """Raise BadOption for activations on the host in two ways, or for what is not recomputed there."""
    if weights == "host-activations" and recompute not in (None, "full"):
        raise BadOption(
            "what is on the host of activations is what stages receive, and the rest is computed anew",
            numbers=f"weights {weights!r}, recompute {recompute!r}",
            next_step="--recompute full, or --weights host",
        )
    if recompute == "offload":
        raise BadOption(
            "weights and activations on the host at once are not run",
            numbers=f"weights {weights!r}, recompute 'offload'",
            next_step="--weights host-activations, or weights that stay on their devices",
        )


def offloaded(found: Estimate) -> list[int]:
    """Those whose activations go to the host."""
    return [stage for stage, case in enumerate(found.cases) if case.aside is not None]


def offload_reasons(found: Estimate) -> Iterator[str]:
    """What moves, and over what."""
    for stage in offloaded(found)[:1]:
        case, run = found.cases[stage], (found.bounds[stage], found.bounds[stage + 1])
        assert case.aside is not None
        moved, stages = bytes_text(int(case.ranges.away[run])), stages_text(offloaded(found))
        yield (
            f"activations go to the host: {stages}; on stage {stage} {moved} leave in a forward and come in "
            f"a backward, over {case.aside.link.name}"
        )


def _ways(layout: Layout, menu: Menu) -> Iterator[Estimate]:
    """The best cuts of a layout that fit."""
    if layout.hosted:
        return
    for pipeline in menu.pipelines(layout, ("none", "offload")):
        cut = Tables(pipeline).split()
        found = None if cut is None else estimate(pipeline, cut.bounds, cut.ways)
        if found is not None and found.fits:
            yield found
