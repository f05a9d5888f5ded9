"""Problem: a rank with rows of long sequences recomputes its blocks. Is it faster to have what they keep on
the host, so that attention is computed once?

Of long sequences attention is nearly all of a second forward, and memory is what their blocks keep. Streamed
blocks (policies/activations.py) keep nothing on the device and compute all but attention again. They are
tried for the layout that was chosen, in one stage on each rank; a pipeline of few ranks with short sequences
recomputes for less than its copies take. The result must be faster by more than the error of a prediction.
Complexity: one partition. Oracle: tests/unit/planner/evaluate/test_streamed_plans.py.
"""

from __future__ import annotations

from outsize.ir.hardware.devices import host_link
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import CLOSE
from outsize.policies.activations import STREAMED


def may_stream(best: Candidate, pricing: Pricing) -> bool:
    """Returns whether ranks share sequences and recompute, each device with a link to its host."""
    layout = best.layout
    if layout.hosted or layout.chunks > 1 or pricing.unequal or best.graph.form != "tape":
        return False
    links = all(host_link(device) is not None for device in pricing.cluster.devices)
    recomputes = any(case.activation_policy.recomputes for case in best.cases)
    return links and layout.axes.token_parts > 1 and recomputes


def or_streamed(best: Candidate, pricing: Pricing) -> Candidate | None:
    """Returns a faster candidate of the same layout than the best one, of which `may_stream` holds; None
    where there is none.
    """
    found = list[Candidate]()
    for pipeline in pricing.pipelines(best.layout, (STREAMED.name,)):
        cut = pricing.stage_prices(pipeline).split()
        if cut is not None:
            found.append(Candidate.of(pipeline, cut.bounds, cut.choices))
    fitting = [candidate for candidate in found if candidate.may_be_chosen]
    fastest = min(fitting, key=lambda candidate: candidate.step_s, default=best)
    return fastest if CLOSE * fastest.step_s < best.step_s else None
