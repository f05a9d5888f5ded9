"""Problem: a stage lacks memory for its activations. Is copying them from the host faster than recomputing?

Activations that wait for their backward leave in a forward and return in a backward, as OFFLOAD_F and FETCH_B
of the row that runs, which is played (evaluate/played_step.py); against a second forward where everything is
recomputed (recompute_knapsack.py chooses the units). The link is the device's own to its host: devices that
share one are not slowed down by each other here. A CPU copies within its own memory, which no compute
overlaps, so there it must be asked for.

The layouts that were fastest with recompute are cut again, each stage without it where that fits and
otherwise with its activations on the host. Of those that are played within NEAR of what they have to beat the
best one is moved unit by unit; moves of one unit do not bring others below it. The result must be faster by
more than the error of a prediction, so no plan becomes slower; layouts that were not cut again are unknown,
and such a plan has no gap.
Complexity: TRIED partitions. Oracle: tests/unit/planner/strategies/test_strategies_activation_offload.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from outsize.errors import BadOption
from outsize.ir.findings import ActivationsOffloaded
from outsize.ir.hardware.devices import host_link
from outsize.ir.plan import Plan
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import polish, with_first_options
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import CLOSE, choose
from outsize.planner.layout.layout import Layout
from outsize.planner.partition.stage_prices import copy_link
from outsize.policies.activations import KEEP, OFFLOAD, Recompute, activation_policy
from outsize.policies.weights import Weights, weight_policy

TRIED: Final = 8
# A cut whose step is this many times as long as what it has to beat is not moved.
NEAR: Final = 1.2


def may_offload(best: Candidate, pricing: Pricing) -> bool:
    """Returns whether some stages do not keep all, and each device has a link to its host."""
    links = all(host_link(device) is not None for device in pricing.cluster.devices)
    possible = links and not pricing.unequal and best.graph.form == "tape"
    return possible and not all(case.activation_policy.keeps_all for case in best.cases)


def or_offloaded(best: Candidate, layouts: Sequence[Layout], pricing: Pricing) -> Candidate | None:
    """Returns a faster candidate than the best one, of which `may_offload` holds; None where there is none.

    `layouts` are those that were searched, the fastest first.
    """
    most_s = best.step_s / CLOSE
    options = (option for layout in layouts[:TRIED] for option in _offload_options(layout, pricing, most_s))
    tried = [with_first_options(option) for option in options]
    if not tried:
        return None
    candidate = polish(choose(tried))
    return candidate if CLOSE * candidate.step_s < best.step_s else None


def offloads(plan: Plan) -> bool:
    """Returns whether activations of any stage go to the host."""
    return any(policy.uses_host for policy in plan.activation_policies)


def check_recompute(recompute: Recompute | None, weights: Weights | None) -> None:
    """Raises BadOption for activations on the host in two forms, or for what is not recomputed there."""
    needed = None if weights is None else weight_policy(weights).activations
    if needed is not None and recompute not in (None, needed):
        raise BadOption(
            "what is on the host of activations is what stages receive, and the rest is computed anew",
            numbers=f"weights {weights!r}, recompute {recompute!r}",
            next_step="--recompute full, or --weights host",
        )
    if recompute is not None and activation_policy(recompute).uses_host:
        raise BadOption(
            "weights and activations on the host at once are not run",
            numbers=f"weights {weights!r}, recompute {recompute!r}",
            next_step="--weights host-activations, or weights that stay on their devices",
        )


def offloaded(candidate: Candidate) -> list[int]:
    """Returns the stages whose activations go to the host."""
    return [stage for stage, case in enumerate(candidate.cases) if case.activation_policy.uses_host]


def offload_reasons(candidate: Candidate) -> Iterator[ActivationsOffloaded]:
    """Yields which stages send activations to the host; the bytes and the link are those of the first one."""
    stages = offloaded(candidate)
    for stage in stages[:1]:
        case, run = candidate.cases[stage], (candidate.bounds[stage], candidate.bounds[stage + 1])
        yield ActivationsOffloaded(
            stages=tuple(stages),
            stage=stage,
            moved_bytes=int(case.ranges.on_host[run]),
            link=copy_link(candidate.devices[stage]).name,
        )


def _offload_options(layout: Layout, pricing: Pricing, most_s: float) -> Iterator[Candidate]:
    """Yields the best cuts of a layout that fit, where a step may be as short as `most_s` and is near it."""
    if layout.hosted or pricing.bounds.floor_without_memory_s(layout) > most_s:
        return
    near_s = NEAR * most_s
    for pipeline in pricing.pipelines(layout, (KEEP.name, OFFLOAD.name)):
        prices = pricing.stage_prices(pipeline)
        if max(prices.least_busy_s(), prices.floor_below(most_s)) > most_s:
            continue
        if layout.chunks > 1 and prices.price_below(near_s) > near_s:
            continue  # Where several stages share a device there is no floor, and perhaps no cut at all.
        cut = prices.split()
        if cut is None or pipeline.busy_s(cut) > near_s:
            continue
        candidate = Candidate.of(pipeline, cut.bounds, cut.choices)
        if candidate.may_be_chosen and candidate.least_s <= near_s and candidate.step_s <= near_s:
            yield candidate
