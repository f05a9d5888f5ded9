"""Problem: which layout and which cuts make a step on this cluster fastest?

For every layout (layout/layout.py: schedule, microbatches, stages on a rank; where axes are open every mesh
of pp, dp_replicate, dp_shard, cp and tp under 1f1b, the best of them interleaved, and weights on the host
where nothing else fits) it computes the exact partition (partition/stage_prices.py), its memory account, and
its simulated step. Layouts are tried by ascending lower bound (bounds/step_time.py), until the next bound
exceeds the best step. The fastest that fits wins; among those within one percent of it, less than the error
of a prediction, the one with least memory on its fullest device,
then fewer microbatches, then 1f1b before gpipe before naive. A stage that does not fit recomputes, or has its
waiting activations on the host (strategies/activation_offload.py), if that is open.

Pipelines and meshes are searched one after the other, each to its end (which units recompute is decided for
a winner alone), and a mesh has to be faster by more than the error of a prediction (evaluate/ranking.py),
because the results of a pipeline are bit-identical to one device. `exact` leaves out the meshes.

What is tried: the families of layouts (layouts.py:LayoutFamily), which are asked by name below; the finer
choices for the best of them, a table (improvements.py:IMPROVEMENTS); and what is given up where no pipeline
fits, a table as well (RELAXATIONS, below).

The gap says how far the plan is from the least lower bound: no allowed layout and cut makes a step shorter by
more than that, except interleaved layouts that were not chosen, for which the balanced cut counts. It
includes what the bounds leave out: links, and memory where a layout was not tried. There is no randomness and
no clock: equal input, equal plan. Only a time limit that is asked for ends a search by the clock
(incumbents.py), and the plan says so.

Source: plan enumeration with a cost model as in PipeDream (arXiv 1806.03377, sec. 3.1) and Alpa (arXiv
2201.12023, sec. 5), best first with a bound (Land and Doig 1960). Complexity: layouts x O(p n^2), for those
that are tried. Oracles: tests/unit/planner/search/test_search.py prices every cut of small models,
test_joint.py every layout as well, test_all_axes.py every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import inf
from operator import not_
from typing import Final, final

from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.formatting import microbatches_text
from outsize.ir.plan import Axes, Plan, ScheduleName
from outsize.planner.evaluate.candidate import check_enough
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import BITS, choose, faster, no_pipeline
from outsize.planner.evaluate.unit_prices import Models
from outsize.planner.fit.nearest import no_feasible_plan, or_other_axes
from outsize.planner.layout.layout import Layout, counts_for
from outsize.planner.layout.tensor_parallel import tensor_reasons
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.offload.host_traffic import layerwise
from outsize.planner.search.branch_and_bound import BranchAndBound, SearchResult
from outsize.planner.search.caveats import order_reasons
from outsize.planner.search.custom_schedule import with_schedule
from outsize.planner.search.improvements import improved
from outsize.planner.search.incumbents import Incumbents, Limits
from outsize.planner.search.layouts import MESHES, ON_HOST, PIPELINES, interleaved, no_layout, too_few_pieces
from outsize.planner.search.relaxations import Relaxation, relaxed
from outsize.planner.search.sliced import in_slices, or_in_slices
from outsize.planner.search.written_plan import written_plan
from outsize.planner.strategies.activation_offload import check_recompute, offloads
from outsize.planner.strategies.host_computed import host_computed, no_host_stages
from outsize.planner.strategies.host_one_device import check_hosted, fastest, in_blocks, too_small
from outsize.planner.strategies.host_round_robin import or_round_robin
from outsize.planner.strategies.parallel_branches import branched
from outsize.policies.activations import KEEP, RECOMPUTE, Recompute, activation_policy, searched_for
from outsize.policies.weights import HOSTED, weight_policy
from outsize.schedules.families import CHUNKED, COMPOSED, CUSTOM, DEFAULT


@final
@dataclass(frozen=True, eq=False)
class Attempt:
    """Is a request whose meshes were searched: `mesh` is the best of them, None where none fits.

    `smallest` captures the model at its smallest microbatches.
    """

    request: PlanRequest
    pricing: Pricing
    meshes: SearchResult
    mesh: Plan | None
    smallest: Callable[[], Models]
    limits: Limits

    @property
    def most_s(self) -> float:
        """Returns the seconds above which a pipeline loses to the mesh, or to another plan."""
        mesh = self.mesh
        if mesh is None or mesh.expected is None:
            return self.limits.loses_s
        return min(self.limits.loses_s, BITS * mesh.expected.step_s)


def search(
    request: PlanRequest,
    candidates: Models,
    cluster: Cluster,
    smallest: Callable[[], Models] = dict,
    limits: Limits | None = None,
) -> Plan:
    """Returns the fastest plan that fits; `candidates` map microbatches -> model at batch / microbatches
    samples.

    `smallest` returns the model at its smallest microbatches, which are tried before the host. Where `limits`
    end the search, the plan is the best so far. Raises TooFewSamples, TooManyStages, NoFeasiblePlan, and
    BadOption when there are fewer devices than stages, or when nothing was captured for the microbatches
    asked for.
    """
    limits = limits or Limits()
    pricing = Pricing(candidates, cluster, request.optimizer, idle=request.may_idle)
    plan = _of_whole_sequences(request, pricing, smallest, limits)
    return or_in_slices(request, plan, pricing, limits)


def _of_whole_sequences(
    request: PlanRequest, pricing: Pricing, smallest: Callable[[], Models], limits: Limits
) -> Plan:
    """Returns the fastest plan that fits, in slices where these are what is relaxed; raises as `search`."""
    candidates, cluster = pricing.units.models, pricing.cluster
    meshes = _meshes(request, pricing, limits.incumbents)
    mesh = _best_mesh(request, meshes, pricing, limits)
    if mesh is not None and limits.incumbents.end_search():
        return mesh
    attempt = Attempt(request, pricing, meshes, mesh, smallest, limits)
    # Devices may be left out in meshes alone, so where that matters pipelines have prices of their own.
    pipelines = Pricing(candidates, cluster, request.optimizer) if cluster.unequal else pricing
    try:
        given_plan = _with_given_axes(
            request.without_axis_search,
            pipelines,
            replace(limits, loses_s=attempt.most_s, unread_s=limits.loses_s),
        )
    except (BadOption, NoFeasiblePlan, TooManyStages) as refused:
        # Pipelines whose search was ended are not known to fit nowhere.
        return _instead(attempt, refused) if mesh is None or not limits.incumbents.ended else mesh
    return given_plan if mesh is None else faster(given_plan, mesh)


def _instead(attempt: Attempt, refused: OutsizeError) -> Plan:
    """Returns the plan of the first relaxed request that has one, because pipelines were `refused`; raises
    the refusal where none has.
    """
    instead = relaxed(RELAXATIONS, attempt, refused)
    if instead is None:
        closed = len(attempt.pricing.cluster.devices) > 1 and not attempt.request.searches_axes
        raise or_other_axes(refused) if closed and isinstance(refused, NoFeasiblePlan) else refused
    if not instead.by.tells_why:
        return instead.found
    return instead.found.model_copy(update={"why": (*instead.found.why, no_pipeline(refused))})


# -- pipelines on the given axes ---------------------------------------------------------------------------


def _with_given_axes(request: PlanRequest, pricing: Pricing, limits: Limits) -> Plan:
    """Searches only the axes that were given, and parallel branches where the graph has any."""
    if request.weight_policy.lists_stages:
        return _with_host_stages(request, pricing)
    most_s, whole = limits.loses_s, replace(limits, loses_s=inf)
    if request.schedule == CUSTOM.name:
        run_plan = _by_runs(request.model_copy(update={"schedule": DEFAULT.name}), pricing, whole)
        model = pricing.units.models[run_plan.microbatches * run_plan.axes.replicas]
        return with_schedule(run_plan, request.actions, *model, pricing.cluster)
    is_open = request.schedule is None and request.chunks is None
    free = is_open and not request.has_group_axes and not request.inference
    if request.schedule != COMPOSED.name and not free:
        return _by_runs(request, pricing, limits)
    named = request.model_copy(update={"schedule": None})
    plan = _by_runs(named, pricing, limits)
    composed = _composed(request, plan, pricing, most_s)
    if composed is plan or _takes_longer(composed, most_s) or not _takes_longer(plan, most_s):
        return composed
    if limits.incumbents.end_search():
        return composed
    # Composed it may be chosen after all, so it needs the alternatives that a plan above `most_s` is without.
    return _composed(request, _by_runs(named, pricing, whole), pricing)


def _with_host_stages(request: PlanRequest, pricing: Pricing) -> Plan:
    """Returns the fastest plan in which the host computes stages; raises NoFeasiblePlan."""
    models, cluster = pricing.units.models, pricing.cluster
    asked = {count: models[count] for count in _asked(request, models)}
    made = host_computed(request, asked, cluster, searched_for(request.recompute))
    if made is None:
        raise no_host_stages(request, cluster)
    return made


def _takes_longer(plan: Plan, most_s: float) -> bool:
    return plan.expected is not None and plan.expected.step_s > most_s


def _composed(request: PlanRequest, plan: Plan, pricing: Pricing, most_s: float = inf) -> Plan:
    """Replaces the schedule by a composed one where branches run in parallel and a step is no longer than
    `most_s`, or where one is asked for.
    """
    asked_whole = request.activation_policy.recomputes_all
    in_blocks = asked_whole and not activation_policy(plan.recompute).recomputes_all
    if plan.weight_policy.on_host or offloads(plan) or in_blocks:
        return plan  # Composed stages keep all, or recompute as one piece.
    models = pricing.units.models
    asked = {m: models[c] for m, c in counts_for(models, plan.axes) if request.microbatches in (None, m)}
    always = request.schedule == COMPOSED.name
    composed = branched(plan, asked, pricing.cluster, always=always, most_s=most_s)
    graph, layout = asked[composed.microbatches][0], Layout.of_plan(composed)
    if composed is plan:
        return plan
    sums = order_reasons(graph, layout, request.bn)
    products = tensor_reasons(graph, layout.axes.product_parts, layout.sequence)
    return composed.model_copy(update={"why": (*composed.why, *sums, *products)})


def _by_runs(request: PlanRequest, pricing: Pricing, limits: Limits) -> Plan:
    """Returns the fastest plan whose stages are runs of the model's own order.

    Raises NoFeasiblePlan, which says what would fit where that is to be explained.
    """
    models, cluster = pricing.units.models, pricing.cluster
    most_s, incumbents = limits.loses_s, limits.incumbents
    if request.weight_policy.on_host:
        check_hosted(request, [graph for graph, _ in models.values()], cluster)
        check_recompute(request.recompute, request.weights)
    asked = {count: models[count] for count in _asked(request, models)}
    for count in asked:
        check_enough(request.batch_size, count)
    layouts = tuple(PIPELINES.layouts(request, asked, cluster))
    searched, compares = layouts if PIPELINES.helps(request, cluster) else (), most_s == inf
    if searched and not any(map(pricing.has_pieces, searched)):
        raise too_few_pieces(searched, pricing)
    loses = not compares and not _below(searched, pricing, most_s)
    options, tried = searched_for(request.recompute), _below(searched, pricing, limits.unread_s) or searched
    result = BranchAndBound(pricing, options, compares=compares, any_fits=loses, incumbents=incumbents).run(
        tried
    )
    if result.candidates:
        improves = partial(improved, request, result, pricing, incumbents, limits.unread_s)
        best = choose(result.candidates) if loses else improves()
        # A plan above `most_s` loses to a mesh, and nobody reads what it is compared with. This one may be
        # chosen, so it is searched again with its alternatives; what was priced is still in the cache.
        if not compares and best.step_s <= most_s and not incumbents.end_search():
            result = BranchAndBound(pricing, options, incumbents=incumbents).run(searched)
        return written_plan(request, result, best, pricing)
    last = not request.inference and (len(cluster.devices) == 1 or request.weight_policy.on_host)
    plan = _hosted(request, asked, result, pricing, incumbents) if last else None
    if plan is not None:
        return plan
    named = request.schedule or (CHUNKED.name if request.chunks else None)
    if named is not None and not request.weight_policy.on_host and not layouts:
        raise no_layout(named, request, asked, cluster)
    if incumbents.ended or not limits.explains:
        raise NoFeasiblePlan(
            "no pipeline fits these devices",
            numbers=f"cluster {cluster.name!r} has {len(cluster.devices)} devices",
            next_step="outsize fit, which says what would have to change",
        )
    raise _nothing_fits(request, layouts, pricing)


def _below(layouts: Sequence[Layout], pricing: Pricing, most_s: float) -> Sequence[Layout]:
    """Returns the layouts of which some step may take at most so long, whatever their stages hold."""
    if pricing.unequal or most_s == inf:
        return layouts
    return [layout for layout in layouts if pricing.bounds.floor_without_memory_s(layout) <= most_s]


def _asked(request: PlanRequest, models: Models) -> list[int]:
    if request.total_microbatches is None:
        return sorted(models)
    check_enough(request.batch_size, request.total_microbatches)
    if request.total_microbatches not in models:
        raise BadOption(
            f"the model was not captured for {microbatches_text(request.total_microbatches)}",
            numbers=f"captured: {', '.join(map(str, sorted(models))) or 'none'}",
            next_step=f"capture it with {-(-request.batch_size // request.total_microbatches)} samples",
        )
    return [request.total_microbatches]


def _most_ranks(models: Models, cluster: Cluster) -> int:
    """Returns the ranks of the longest pipeline of one stage on each."""
    return min(len(cluster.devices), *(len(graph.units) for graph, _ in models.values()))


def _nothing_fits(request: PlanRequest, layouts: Sequence[Layout], pricing: Pricing) -> NoFeasiblePlan:
    """Returns the error: which stage lacks how much, and what would fit."""
    models, cluster = pricing.units.models, pricing.cluster
    streaming = tuple(ON_HOST.layouts(request, models, cluster)) if request.weight_policy.on_host else ()
    if streaming:
        keeps = request.recompute is not None and request.activation_policy.keeps_all
        return too_small(streaming, pricing, KEEP.name if keeps else RECOMPUTE.name)
    # What is lacking is told of one stage on each rank, where ranks have several as well.
    one_stage_layouts = (
        [layout for layout in layouts if layout.chunks == 1]
        or [replace(layout, stages=layout.axes.pp, schedule=DEFAULT.name) for layout in layouts]
        or [Layout(Axes(pp=(most := _most_ranks(models, cluster))), most, DEFAULT.name, n, n) for n in models]
    )
    schedules: list[ScheduleName] = list(dict.fromkeys(layout.schedule for layout in one_stage_layouts))
    counts = {layout.captured: layout for layout in one_stage_layouts}
    spare = {c: replace(one_stage_layouts[0], microbatches=c, captured=c) for c in models if c not in counts}
    options = searched_for(request.recompute)
    device = cluster.devices[0]
    asked = [pricing.stages.case(layout, device, option) for layout in counts.values() for option in options]
    more = [pricing.stages.case(layout, device, option) for layout in spare.values() for option in options]
    if not request.inference:
        more += [
            pricing.stages.case(layout, device, RECOMPUTE.name)
            for layout in (*counts.values(), *spare.values())
        ]
    return no_feasible_plan(asked, more, schedules, one_stage_layouts[0].axes.pp, with_usable_memory(cluster))


# -- meshes of all open axes -------------------------------------------------------------------------------


def _meshes(request: PlanRequest, pricing: Pricing, incumbents: Incumbents) -> SearchResult:
    """Prices the meshes of all axes that the request leaves open."""
    cluster = pricing.cluster
    search_loop = BranchAndBound(pricing, searched_for(request.recompute), incumbents=incumbents)
    if not MESHES.helps(request, cluster):
        return search_loop.run(())
    if request.schedule == COMPOSED.name:
        request = request.model_copy(update={"schedule": None})
    layouts = tuple(MESHES.layouts(request, pricing.units.models, cluster))
    # A mesh without groups is a pipeline, which `_with_given_axes` prices, with branches besides; here its
    # bound alone counts, so that the gap holds for all layouts.
    is_grouped = [layout.group > 1 or cluster.unequal for layout in layouts]
    grouped_layouts = tuple(compress(layouts, is_grouped))
    if request.schedule is None and request.chunks is None and not request.inference:
        grouped_layouts += tuple(interleaved(request, search_loop.floors, pricing, grouped_layouts))
    result = search_loop.run(grouped_layouts)
    least_s = search_loop.floor_s(compress(layouts, map(not_, is_grouped)))
    return replace(result, floor_s=min(result.floor_s, least_s))


def _best_mesh(request: PlanRequest, meshes: SearchResult, pricing: Pricing, limits: Limits) -> Plan | None:
    """Returns the plan of the best mesh, its schedule composed where that is asked for."""
    if not meshes.candidates:
        return None
    if request.schedule != COMPOSED.name:
        return _plan(request, meshes, pricing, limits)
    named = request.model_copy(update={"schedule": None})
    return _composed(request, _plan(named, meshes, pricing, limits), pricing)


def _plan(request: PlanRequest, result: SearchResult, pricing: Pricing, limits: Limits) -> Plan:
    best = improved(request, result, pricing, limits.incumbents, limits.loses_s)
    return written_plan(request, result, best, pricing)


# -- weights on the host -----------------------------------------------------------------------------------


def _hosted(
    request: PlanRequest, models: Models, result: SearchResult, pricing: Pricing, incumbents: Incumbents
) -> Plan | None:
    """Returns a plan with weights on the host in the fastest degree of offload, on one device or on several
    in round-robin.
    """
    options, cluster = searched_for(request.recompute), pricing.cluster

    def on_one_device() -> Plan | None:
        layouts = tuple(ON_HOST.layouts(request, models, cluster)) if ON_HOST.helps(request, cluster) else ()
        degrees = [
            _streamed([layout for layout in layouts if layout.weights == w], pricing, own, incumbents)
            for w in HOSTED
            if (own := weight_policy(w).allowed(options))
        ]
        results = [replace(degree, rejected=result.rejected) for degree in degrees if degree.candidates]
        made = [_plan(request, degree, pricing, Limits(incumbents=incumbents)) for degree in results]
        plans = [in_blocks(plan, *models[plan.microbatches], cluster) for plan in made]
        return fastest(plans, models, cluster) if plans else None

    copying = or_round_robin(on_one_device, request, models, cluster, options)
    if request.weights is not None:
        return copying
    most_s = inf if copying is None else _step_s(copying)
    computing = host_computed(request, models, cluster, options, most_s)
    return min((plan for plan in (copying, computing) if plan is not None), key=_step_s, default=None)


def _step_s(plan: Plan) -> float:
    assert plan.expected is not None, "it was priced"
    return plan.expected.step_s


def _streamed(
    layouts: Sequence[Layout], pricing: Pricing, options: Sequence[Recompute], incumbents: Incumbents
) -> SearchResult:
    """Prices layer by layer, and microbatch by microbatch only where that does not fit."""
    by_layers = BranchAndBound(pricing, options, incumbents=incumbents)
    result = by_layers.run([layout for layout in layouts if layerwise(layout)])
    if result.candidates:
        return result
    return BranchAndBound(pricing, options, incumbents=incumbents).run(layouts)


# -- where no pipeline fits --------------------------------------------------------------------------------


def _finer(attempt: Attempt) -> Plan | None:
    """Returns a pipeline of the smallest microbatches; None where it does not fit."""
    cluster, asked = attempt.pricing.cluster, attempt.request.without_axis_search
    for count, model in attempt.smallest().items():
        finer = asked.model_copy(update={"microbatches": count})
        with suppress(NoFeasiblePlan):
            pricing = Pricing({count: model}, cluster, asked.optimizer)
            return _with_given_axes(finer, pricing, replace(attempt.limits, explains=False, loses_s=inf))
    return None


def _on_hosts(attempt: Attempt) -> Plan | None:
    incumbents, models = attempt.limits.incumbents, attempt.pricing.units.models
    return _hosted(attempt.request, models, attempt.meshes, attempt.pricing, incumbents)


RELAXATIONS: Final[tuple[Relaxation[Attempt, Plan], ...]] = (
    Relaxation(
        name="a mesh of other axes, whose sums are rounded in another order",
        relaxes=frozenset({"axes"}),
        answers=(BadOption, NoFeasiblePlan, TooManyStages),
        helps=lambda attempt: attempt.mesh is not None,
        finds=lambda attempt: attempt.mesh,
        tells_why=True,
    ),
    Relaxation(
        name="the smallest microbatches",
        relaxes=frozenset({"microbatches"}),
        answers=(NoFeasiblePlan,),
        helps=lambda _: True,
        finds=_finer,
    ),
    Relaxation(
        name="slices of sequences, which hold hardly more than one microbatch",
        relaxes=frozenset({"slices"}),
        answers=(NoFeasiblePlan,),
        helps=lambda attempt: attempt.request.opens_slices,
        finds=lambda attempt: in_slices(attempt.request, attempt.pricing, attempt.limits),
        tells_why=True,
    ),
    Relaxation(
        name="weights on the host",
        relaxes=frozenset({"weights"}),
        answers=(BadOption, NoFeasiblePlan, TooManyStages),
        helps=lambda attempt: attempt.request.may_use_hosts(attempt.pricing.cluster),
        finds=_on_hosts,
        tells_why=True,
    ),
)
"""Lists what is given up where no pipeline fits the given axes, in order; the first that has a plan is taken.

A loss in pieces is tried after all of these, because the model is captured again for it
(api/loss_pieces.py:RELAXATIONS).
"""
