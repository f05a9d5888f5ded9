"""Problem: is a pipeline faster whose microbatches go through the stages in slices of their sequences?

A slice is to a schedule what a microbatch is. So a layout in slices is one of n times as many microbatches of
the model of a mean slice (layout/slice_model.py), and is cut, bounded and priced as any other one, along the
rows of its schedule. What slices have beside that is in its tables (evaluate/stage_tables.py):

    kept rows      keys and values of a microbatch, and the sums of their gradients
    last slices    attention of slice k reads k + 1 slices, so the last one computes nearly twice the mean.
                   The first stage waits for it to go through all others and back: `Candidate.late_s`

The bounds are those of the schedule without slices: a stage of 1f1b has w = n + p - s - 1 slices in flight in
place of p - s, and its first backward follows n forwards, so

    before + n f + behind + m b + (m - w) f  =  before + (f + b) + behind + (m - 1) b + (m - (p - s)) f

with m slices in all; what is kept, and the last slices, come on top.

Who searches axes has slices searched too (`PlanRequest.opens_slices`), where the program is computed in order
(`RowFacts.in_order`): in slices of LEAST_TOKENS, as few tokens as a rank of cp has, because fewer and longer
slices only make the bubble larger. They round otherwise than whole sequences, so they are taken for more than
BITS. Source: SlimPipe, arXiv 2504.14519. Complexity: that of the search of meshes of pp, dp_replicate and tp.
Oracles: tests/unit/planner/search/test_sliced.py, test_sliced_unasked.py (every cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import DoesNotFit
from outsize.ir.formatting import bytes_text
from outsize.ir.plan import Plan
from outsize.planner.costs.context_parallel import LEAST_TOKENS
from outsize.planner.costs.device_scaling import of_slice
from outsize.planner.costs.kernel_stacks import takes_turns
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import BITS, instead_of
from outsize.planner.evaluate.unit_prices import Model, Models
from outsize.planner.fit.nearest import rejections
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.slice_model import graph_of_slice
from outsize.planner.search.branch_and_bound import BranchAndBound
from outsize.planner.search.improvements import improved
from outsize.planner.search.incumbents import Limits
from outsize.planner.search.layouts import MESHES, PIPELINES
from outsize.planner.search.written_plan import written_plan
from outsize.policies.activations import searched_for
from outsize.policies.slices import SLICES, most_slices
from outsize.schedules.families import DEFAULT, family_of

_NO_LIMITS: Final = Limits()


def model_of_slice(model: Model, slices: int, cluster: Cluster) -> Model:
    """Returns the model of a mean slice, of one with costs on the first device of a cluster."""
    return of_slice(model, graph_of_slice(model[0], slices), slices, cluster.devices[0])


def search_in_slices(
    request: PlanRequest, models: Models, cluster: Cluster, limits: Limits = _NO_LIMITS
) -> Plan:
    """Returns the fastest plan in the slices that are asked for; raises NoFeasiblePlan where none fits, and
    as the search of pipelines.
    """
    slices = request.slices or 1
    asked = {count: models[count] for count in models if request.total_microbatches in (None, count)}
    named = request.model_copy(update={"schedule": request.schedule or DEFAULT.name})
    layouts = [layout.in_slices(slices) for layout in PIPELINES.layouts(named, asked, cluster)]
    pricing = _pricing(request, asked, cluster, slices)
    search_loop = BranchAndBound(pricing, searched_for(request.recompute), incumbents=limits.incumbents)
    result = search_loop.run(layouts)
    if not result.candidates:
        raise _none_fits(slices, rejections(result.rejected), cluster)
    return written_plan(request, result, improved(request, result, pricing, limits.incumbents), pricing)


def or_in_slices(request: PlanRequest, plan: Plan, pricing: Pricing, limits: Limits) -> Plan:
    """Returns the plan, or one in slices whose step is shorter by more than BITS; the other plan becomes an
    alternative. `pricing` is that of whole sequences.
    """
    assert plan.expected is not None, "the search has priced it"
    if plan.slices > 1:
        return plan
    most_s = min(plan.expected.step_s, BITS * limits.loses_s) / BITS
    made = in_slices(request, pricing, replace(limits, loses_s=most_s))
    return plan if made is None else instead_of(plan, made, ("slices",))


def in_slices(request: PlanRequest, pricing: Pricing, limits: Limits) -> Plan | None:
    """Returns the fastest plan in slices whose step is below `limits.loses_s`; None where there is none, or
    none is searched.
    """
    cluster, models = pricing.cluster, pricing.units.models
    slices = _searched(request, models, cluster)
    most_s = limits.loses_s
    layouts = [layout for layout in _layouts(request, pricing, slices) if _work_s(layout, pricing) <= most_s]
    if not layouts or limits.incumbents.end_search():
        return None
    counts = {layout.captured for layout in layouts}
    sliced = _pricing(request, {count: models[count] for count in counts}, cluster, slices)
    options = searched_for(request.recompute)
    search_loop = BranchAndBound(sliced, options, compares=False, most_s=most_s, incumbents=limits.incumbents)
    result = search_loop.run([layout.in_slices(slices) for layout in layouts])
    if not result.candidates:
        return None
    best = improved(request, result, sliced, limits.incumbents, most_s)
    return written_plan(request, result, best, sliced) if best.step_s < most_s else None


def _searched(request: PlanRequest, models: Models, cluster: Cluster) -> int:
    """Returns in how many slices layouts are searched; 1 where none are."""
    knows = family_of(request.schedule or DEFAULT.name).sliced_row is not None
    runs = knows and takes_turns(request)  # Neither compiled stages nor graphs of a device have slices.
    if not models or cluster.unequal or not request.opens_slices or not runs:
        return 1
    rows = [graph.rows for graph, _ in models.values()]
    if not all(facts is not None and facts.in_order for facts in rows):
        return 1
    tokens = min(facts.tokens for facts in rows if facts is not None)
    return most_slices(tokens, tokens // LEAST_TOKENS)


def _layouts(request: PlanRequest, pricing: Pricing, slices: int) -> Iterator[Layout]:
    """Yields the layouts of whole microbatches that may be better in slices: of several stages."""
    if slices == 1:
        return
    models, cluster = pricing.units.models, pricing.cluster
    named = request.model_copy(update={"schedule": request.schedule or DEFAULT.name})
    family = MESHES if MESHES.helps(named, cluster) else PIPELINES
    for layout in family.layouts(named, models, cluster):
        resident = layout.shards == 1 and not layout.weight_policy.shards_weights
        if layout.axes.pp > 1 and layout.chunks == 1 and resident and not layout.sequence:
            yield from () if layout.axes.beside_slices else (layout,)


def _work_s(layout: Layout, pricing: Pricing) -> float:
    """Returns the seconds that all work of whole microbatches takes on all devices: slices need no less."""
    return pricing.units.work(layout).total_s * layout.microbatches / layout.axes.pp


def _pricing(request: PlanRequest, models: Models, cluster: Cluster, slices: int) -> Pricing:
    """Returns the prices of the models in slices, by how many slices make a batch."""
    of = {count * slices: model_of_slice(model, slices, cluster) for count, model in models.items()}
    return Pricing(of, cluster, request.optimizer)


def _none_fits(slices: int, lacking: Iterable[DoesNotFit], cluster: Cluster) -> NoFeasiblePlan:
    short = [each.shortage for each in lacking if each.shortage is not None]
    least = min(short, key=lambda each: each.needs_bytes, default=None)
    return NoFeasiblePlan(
        f"no pipeline fits these devices in {slices} slices of sequences",
        numbers=f"cluster {cluster.name!r} has {len(cluster.devices)} devices"
        if least is None
        else f"at best a stage needs {bytes_text(least.needs_bytes)} of {bytes_text(least.room_bytes)}",
        next_step=f"more slices ({SLICES.typed(2 * slices)}), or pieces of the loss (--loss-pieces 64)",
    )
