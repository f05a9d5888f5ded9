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

The gap says how far the plan is from the least lower bound: no allowed layout and cut makes a step shorter by
more than that, except interleaved layouts that were not chosen, for which the balanced cut counts. It
includes what the bounds leave out: links, and memory where a layout was not tried. There is no randomness and
no clock: equal input, equal plan.

Source: plan enumeration with a cost model as in PipeDream (arXiv 1806.03377, sec. 3.1) and Alpa (arXiv
2201.12023, sec. 5), best first with a bound (Land and Doig 1960). Complexity: layouts x O(p n^2), for those
that are tried. Oracles: tests/unit/planner/search/test_search.py prices every cut of small models,
test_joint.py every layout as well, test_all_axes.py every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, compress, islice
from math import inf
from operator import not_
from typing import Final, NamedTuple, final

from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import CaptureNote, CutsBetweenBlocks, Reason
from outsize.ir.formatting import microbatches_text
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Expected, Plan, ScheduleName, stages_from_bounds
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.estimate import Estimate, check_enough, expected, reasons, whole_tensor_updates
from outsize.planner.evaluate.local_search import polish
from outsize.planner.evaluate.plan_findings import device_kinds
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import (
    BITS,
    alternative,
    choose,
    compared_with,
    faster,
    no_pipeline,
    rivals,
    shown,
)
from outsize.planner.fit.nearest import no_feasible_plan, or_other_axes, rejections
from outsize.planner.layout.layout import Layout, counts_for, pipelines
from outsize.planner.layout.tensor_parallel import tensor_reasons
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.offload.host_traffic import layerwise
from outsize.planner.search.branch_and_bound import BranchAndBound, SearchResult, polished
from outsize.planner.search.candidates import (
    Candidates,
    meshes,
    no_layout,
    on_host,
    pipeline_layouts,
    too_few_pieces,
)
from outsize.planner.search.caveats import beyond_reasons, order_reasons, slow_options
from outsize.planner.search.custom_schedule import with_schedule
from outsize.planner.strategies.activation_offload import (
    check_recompute,
    offload_reasons,
    offloaded,
    offloads,
    or_offloaded,
)
from outsize.planner.strategies.host_one_device import check_hosted, fastest, in_blocks, too_small
from outsize.planner.strategies.host_round_robin import or_round_robin
from outsize.planner.strategies.parallel_branches import branched
from outsize.planner.strategies.recompute_and_cut import selective
from outsize.planner.strategies.selective_recompute import (
    Units,
    by_blocks,
    counted,
    selective_reasons,
    written,
)
from outsize.policies.activations import KEEP, RECOMPUTE, Recompute, activation_policy, searched_for
from outsize.policies.weights import HOSTED, weight_policy
from outsize.schedules.families import CHUNKED, COMPOSED, CUSTOM, DEFAULT

# This many meshes are tried with several stages on a device as well.
MESHES: Final = 3
REJECTIONS: Final = 6
# A smaller gap is below the error of a prediction.
OPTIMAL: Final = 1e-4
# Stages are cut between repeated blocks where that costs less than this.
BLOCKS: Final = 1.02
# Recompute makes a step at most this many times as long: a second forward, of three parts.
MOST_AGAIN: Final = 4 / 3
# What a smaller share of a step is given up for is not told.
TOLD: Final = 5e-4


def search(
    request: PlanRequest,
    candidates: Candidates,
    cluster: Cluster,
    smallest: Callable[[], Candidates] = dict,
    *,
    explains: bool = True,
) -> Plan:
    """Returns the fastest plan that fits; `candidates` map microbatches -> model at batch / microbatches
    samples.

    `smallest` returns the model at its smallest microbatches, which are tried before the host. Unless it
    `explains`, what pipelines lack that do not fit is not looked for: neither the plan nor NoFeasiblePlan
    says it. Raises TooFewSamples, TooManyStages, NoFeasiblePlan, and BadOption when there are fewer devices
    than stages, or when nothing was captured for the microbatches asked for.
    """
    found = _open(request, candidates, cluster)
    mesh = _mesh(request, found, candidates, cluster)
    most_s = inf if mesh is None or mesh.expected is None else BITS * mesh.expected.step_s
    # Pipelines have the same prices, unless devices may be left out, which meshes alone do.
    pricing = None if cluster.unequal else found[1]
    try:
        given_plan = _with_given_axes(
            request.without_axis_search, candidates, cluster, most_s, pricing, explains=explains
        )
    except (BadOption, NoFeasiblePlan, TooManyStages) as refused:
        if mesh is not None:
            return _refusing_pipelines(mesh, refused)
        finer = _finer(request, smallest(), cluster) if isinstance(refused, NoFeasiblePlan) else None
        return finer or _instead(refused, request, candidates, found, cluster)
    return given_plan if mesh is None else faster(given_plan, mesh)


def _finer(request: PlanRequest, candidates: Candidates, cluster: Cluster) -> Plan | None:
    """Returns a pipeline of these microbatches; None where it does not fit."""
    for count, model in candidates.items():
        finer = request.without_axis_search.model_copy(update={"microbatches": count})
        with suppress(NoFeasiblePlan):
            return _with_given_axes(finer, {count: model}, cluster, explains=False)
    return None


def _instead(
    refused: OutsizeError,
    request: PlanRequest,
    candidates: Candidates,
    found: tuple[SearchResult, Pricing],
    cluster: Cluster,
) -> Plan:
    """Returns a plan with weights on the host, because pipelines were `refused` and no mesh was `found`.

    Raises the refusal where nothing fits.
    """
    plan = _hosted(request, candidates, *found, cluster) if request.may_use_hosts(cluster) else None
    if plan is None:
        closed = len(cluster.devices) > 1 and not request.searches_axes
        raise or_other_axes(refused) if closed and isinstance(refused, NoFeasiblePlan) else refused
    return _refusing_pipelines(plan, refused)


def _refusing_pipelines(plan: Plan, refused: OutsizeError) -> Plan:
    """Returns the plan with why it is no pipeline."""
    return plan.model_copy(update={"why": (*plan.why, no_pipeline(refused))})


def _with_given_axes(
    request: PlanRequest,
    candidates: Candidates,
    cluster: Cluster,
    most_s: float = inf,
    pricing: Pricing | None = None,
    *,
    explains: bool = True,
) -> Plan:
    """Searches only the axes that were given, and parallel branches where the graph has any.

    A plan that takes longer than `most_s` is not compared with others. What stages lack where nothing fits is
    said where it `explains`.
    """
    if request.schedule == CUSTOM.name:
        run_plan = _by_runs(request.model_copy(update={"schedule": DEFAULT.name}), candidates, cluster)
        model = candidates[run_plan.microbatches * run_plan.axes.replicas]
        return with_schedule(run_plan, request.actions, *model, cluster)
    free = request.schedule is None and not request.has_group_axes and not request.inference
    if request.schedule != COMPOSED.name and not free:
        return _by_runs(request, candidates, cluster, most_s, pricing, explains=explains)
    named = request.model_copy(update={"schedule": None})
    plan = _by_runs(named, candidates, cluster, most_s, pricing, explains=explains)
    composed = _composed(request, plan, candidates, cluster)
    if composed is plan or _takes_longer(composed, most_s) or not _takes_longer(plan, most_s):
        return composed
    # Composed it may be chosen after all, so it needs the alternatives that a plan above `most_s` is without.
    return _composed(request, _by_runs(named, candidates, cluster, inf, pricing), candidates, cluster)


def _takes_longer(plan: Plan, most_s: float) -> bool:
    return plan.expected is not None and plan.expected.step_s > most_s


def _composed(request: PlanRequest, plan: Plan, candidates: Candidates, cluster: Cluster) -> Plan:
    """Replaces the schedule by a composed one where branches run in parallel, or where one is asked for."""
    asked_whole = request.activation_policy.recomputes_all
    in_blocks = asked_whole and not activation_policy(plan.recompute).recomputes_all
    if plan.weight_policy.on_host or offloads(plan) or in_blocks:
        return plan  # Composed stages keep all, or recompute as one piece.
    counts = counts_for(candidates, plan.axes)
    asked = {m: candidates[c] for m, c in counts if request.microbatches in (None, m)}
    composed = branched(plan, asked, cluster, always=request.schedule == COMPOSED.name)
    graph, layout = asked[composed.microbatches][0], Layout.of_plan(composed)
    if composed is plan:
        return plan
    sums = order_reasons(graph, layout, request.bn)
    products = tensor_reasons(graph, layout.axes.tp, layout.sequence)
    return composed.model_copy(update={"why": (*composed.why, *sums, *products)})


def _by_runs(
    request: PlanRequest,
    candidates: Candidates,
    cluster: Cluster,
    most_s: float = inf,
    pricing: Pricing | None = None,
    *,
    explains: bool = True,
) -> Plan:
    """Returns the fastest plan whose stages are runs of the model's own order.

    Where it takes longer than `most_s` its layout is not compared with others. Raises NoFeasiblePlan, which
    says what would fit where it `explains`.
    """
    if request.weight_policy.on_host:
        check_hosted(request, [graph for graph, _ in candidates.values()], cluster)
        check_recompute(request.recompute, request.weights)
    asked = {count: candidates[count] for count in _asked(request, candidates)}
    for count in asked:
        check_enough(request.batch_size, count)
    layouts = tuple(pipeline_layouts(request, asked, cluster))
    pricing = pricing or Pricing(candidates, cluster, request.optimizer)
    searched, compares = () if request.weight_policy.on_host else layouts, most_s == inf
    if searched and not any(map(pricing.has_pieces, searched)):
        raise too_few_pieces(searched, pricing)
    result = BranchAndBound(pricing, searched_for(request.recompute), compares=compares).run(searched)
    if result.estimates:
        improved = _improved(request, result, pricing, cluster)
        # A plan above `most_s` loses to a mesh, and nobody reads what it is compared with. This one may be
        # chosen, so it is searched again with its alternatives; what was priced is still in its cache.
        if not compares and improved.estimate.step_s <= most_s:
            result = BranchAndBound(pricing, searched_for(request.recompute)).run(searched)
        return _written(request, result, improved, cluster)
    last = not request.inference and (len(cluster.devices) == 1 or request.weight_policy.on_host)
    plan = _hosted(request, asked, result, pricing, cluster) if last else None
    if plan is not None:
        return plan
    if request.schedule is not None and not request.weight_policy.on_host and not layouts:
        raise no_layout(request.schedule, request, asked, cluster)
    if not explains:
        raise NoFeasiblePlan(
            "no pipeline fits these devices",
            numbers=f"cluster {cluster.name!r} has {len(cluster.devices)} devices",
            next_step="outsize fit, which says what would have to change",
        )
    raise _nothing_fits(request, candidates, layouts, pricing, cluster)


def _mesh(
    request: PlanRequest, found: tuple[SearchResult, Pricing], candidates: Candidates, cluster: Cluster
) -> Plan | None:
    """Returns the plan of the best mesh that was found, its schedule composed where that is asked for."""
    result, pricing = found
    if not result.estimates:
        return None
    if request.schedule != COMPOSED.name:
        return _plan(request, result, pricing, cluster)
    named = request.model_copy(update={"schedule": None})
    return _composed(request, _plan(named, result, pricing, cluster), candidates, cluster)


def _open(request: PlanRequest, candidates: Candidates, cluster: Cluster) -> tuple[SearchResult, Pricing]:
    """Prices the meshes of all axes that the request leaves open."""
    pricing = Pricing(candidates, cluster, request.optimizer, idle=request.may_idle)
    search_loop = BranchAndBound(pricing, searched_for(request.recompute))
    if not request.opens_axes(cluster):
        return search_loop.run(()), pricing
    if request.schedule == COMPOSED.name:
        request = request.model_copy(update={"schedule": None})
    layouts = tuple(meshes(request, candidates, cluster))
    # A mesh without groups is a pipeline, which `_with_given_axes` prices, with branches besides; here its
    # bound alone counts, so that the gap holds for all layouts.
    is_grouped = [layout.group > 1 or cluster.unequal for layout in layouts]
    grouped_layouts = tuple(compress(layouts, is_grouped))
    if request.schedule is None and not request.inference:
        grouped_layouts += tuple(_interleaved(search_loop, pricing, grouped_layouts))
    result = search_loop.run(grouped_layouts)
    least_s = search_loop.floor_s(compress(layouts, map(not_, is_grouped)))
    return replace(result, floor_s=min(result.floor_s, least_s)), pricing


def _hosted(
    request: PlanRequest, candidates: Candidates, result: SearchResult, pricing: Pricing, cluster: Cluster
) -> Plan | None:
    """Returns a plan with weights on the host in the fastest degree of offload, on one device or on several
    in round-robin.
    """
    options = searched_for(request.recompute)

    def on_one_device() -> Plan | None:
        layouts = tuple(on_host(request, candidates, cluster))
        degrees = [
            _streamed([layout for layout in layouts if layout.weights == w], pricing, own)
            for w in HOSTED
            if (own := weight_policy(w).allowed(options))
        ]
        results = [replace(degree, rejected=result.rejected) for degree in degrees if degree.estimates]
        made = [_plan(request, degree, pricing, cluster) for degree in results]
        plans = [in_blocks(plan, *candidates[plan.microbatches], cluster) for plan in made]
        return fastest(plans, candidates, cluster) if plans else None

    return or_round_robin(on_one_device, request, candidates, cluster, options)


def _streamed(layouts: Sequence[Layout], pricing: Pricing, options: Sequence[Recompute]) -> SearchResult:
    """Prices layer by layer, and microbatch by microbatch only where that does not fit."""
    result = BranchAndBound(pricing, options).run([layout for layout in layouts if layerwise(layout)])
    return result if result.estimates else BranchAndBound(pricing, options).run(layouts)


def _asked(request: PlanRequest, candidates: Candidates) -> list[int]:
    if request.total_microbatches is None:
        return sorted(candidates)
    check_enough(request.batch_size, request.total_microbatches)
    if request.total_microbatches not in candidates:
        raise BadOption(
            f"the model was not captured for {microbatches_text(request.total_microbatches)}",
            numbers=f"captured: {', '.join(map(str, sorted(candidates))) or 'none'}",
            next_step=f"capture it with {-(-request.batch_size // request.total_microbatches)} samples",
        )
    return [request.total_microbatches]


def _interleaved(
    search_loop: BranchAndBound, pricing: Pricing, layouts: Sequence[Layout]
) -> Iterator[Layout]:
    """Yields the meshes again with several stages on a device whose balanced cut is shortest that way: such
    cuts take long to price. Meshes that do not fit with one stage on a device are left out.
    """
    found: list[tuple[float, int, tuple[Layout, ...]]] = []
    for place, layout in enumerate(layouts):
        counts, units = [(layout.microbatches, layout.captured)], len(pricing.units.graph(layout).units)
        chunked = tuple(
            replace(each, weights=layout.weights, sequence=layout.sequence)
            for each in pipelines(layout.axes, counts, (CHUNKED.name,), units)
        )
        if chunked:
            found.append((min(map(search_loop.likely_s, chunked)), place, chunked))
    in_order = sorted(each for each in found if each[0] < inf)
    fitting = (chunked for _, place, chunked in in_order if not search_loop.refuted(layouts[place]))
    yield from chain.from_iterable(islice(fitting, MESHES))


def _nothing_fits(
    request: PlanRequest,
    candidates: Candidates,
    layouts: Sequence[Layout],
    pricing: Pricing,
    cluster: Cluster,
) -> NoFeasiblePlan:
    """Returns the error: which stage lacks how much, and what would fit."""
    streaming = tuple(on_host(request, candidates, cluster)) if request.weight_policy.on_host else ()
    if streaming:
        keeps = request.recompute is not None and request.activation_policy.keeps_all
        return too_small(streaming, pricing, KEEP.name if keeps else RECOMPUTE.name)
    one_stage_layouts = [layout for layout in layouts if layout.chunks == 1] or [
        Layout(Axes(pp=len(cluster.devices)), len(cluster.devices), DEFAULT.name, count, count)
        for count in candidates
    ]
    schedules: list[ScheduleName] = list(dict.fromkeys(layout.schedule for layout in one_stage_layouts))
    counts = {layout.captured: layout for layout in one_stage_layouts}
    spare = {
        c: replace(one_stage_layouts[0], microbatches=c, captured=c) for c in candidates if c not in counts
    }
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


# -- what comes out --------------------------------------------------------------------------------------


@final
class _Improved(NamedTuple):
    """Holds the best estimate after moves of its cut and finer recompute; the prices whose pieces its bounds
    count, and the recomputed units by stage.
    """

    pricing: Pricing
    estimate: Estimate
    recomputed: dict[int, Units]


def _plan(request: PlanRequest, result: SearchResult, pricing: Pricing, cluster: Cluster) -> Plan:
    return _written(request, result, _improved(request, result, pricing, cluster), cluster)


def _written(request: PlanRequest, result: SearchResult, improved: _Improved, cluster: Cluster) -> Plan:
    """Returns the best of a search as a plan that is compared with what else was priced."""
    pricing, best, recomputed = improved
    layout, piece_ends = best.layout, pricing.stages.ends(best.layout)
    bounds = tuple(piece_ends[b] for b in best.bounds)
    recomputed = by_blocks(best, bounds) | recomputed
    graph = pricing.units.graph(layout)
    first, one = best.cases[0].activation_policy, len({case.recompute for case in best.cases}) == 1
    overall = first.name if one and not first.lists_units else KEEP.name
    stages = stages_from_bounds(graph, bounds, tuple(device.name for device in best.devices))
    not_chosen = rivals(layout, result.estimates)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=layout.axes,
        batch_size=request.batch_size,
        microbatches=layout.microbatches,
        schedule=layout.schedule,
        stages=written(stages, best.cases, overall, recomputed, graph),
        optimizer=request.optimizer,
        precision=request.precision,
        weights=layout.weights,
        sequence_parallel=layout.sequence,
        loss_pieces=request.loss_pieces or 1,
        module_pieces=request.module_pieces or 1,
        recompute=overall,
        bn=request.bn,
        expected=counted(_expected(request, best, result, bounds, pricing), recomputed),
        alternatives=tuple(alternative(request.batch_size, rival) for rival in shown(not_chosen)),
        why=(
            *_why_best(request, best, graph, bounds, cluster),
            *selective_reasons(best, recomputed, bounds),
            *offload_reasons(best),
            *_why_axes(request, layout, graph, cluster),
            *compared_with(best, not_chosen),
            *islice(rejections(result.rejected), REJECTIONS),
        ),
    )


def _improved(request: PlanRequest, result: SearchResult, pricing: Pricing, cluster: Cluster) -> _Improved:
    best, all_tables = polished(choose(result.estimates), pricing), pricing
    if not (pricing.stages.exact(best.layout) or pricing.unequal):
        pricing, best = _refined(request, pricing, best)
    best, recomputed = selective(best, pricing, request.optimizer)
    pricing, best, recomputed = _between_blocks(request, pricing, best, recomputed)
    if request.recompute is None and (other := or_offloaded(best, result.layouts, all_tables, cluster)):
        return _Improved(all_tables, other, {})
    return _Improved(pricing, best, recomputed)


def _between_blocks(
    request: PlanRequest, pricing: Pricing, best: Estimate, recomputed: dict[int, Units]
) -> tuple[Pricing, Estimate, dict[int, Units]]:
    """Returns the best cut between repeated blocks, where its step is at most BLOCKS times as long; else what
    was given.

    Its floor is that of all cuts.
    """
    layout, given = best.layout, (pricing, best, recomputed)
    blocks = pricing.between_blocks(layout)
    cuts, all_ends = blocks.stages.ends(layout), pricing.stages.ends(layout)
    inside = any(all_ends[bound] not in cuts for bound in best.bounds)
    if not inside or len(cuts) <= layout.stages or pricing.unequal or layout.hosted:
        return given
    most_s = BLOCKS * best.step_s
    searched = BranchAndBound(
        blocks, searched_for(request.recompute), compares=False, most_s=MOST_AGAIN * most_s
    )
    estimates = searched.run([layout]).estimates
    if not estimates or estimates[0].step_s > MOST_AGAIN * most_s:
        return given
    neat, neat_recomputed = selective(polish(estimates[0]), blocks, request.optimizer)
    if neat.step_s > most_s:
        return given
    return blocks, replace(neat, floor_s=best.floor_s, fastest_step_s=best.step_s), neat_recomputed


def _why_best(
    request: PlanRequest, best: Estimate, graph: ModelGraph, bounds: Sequence[int], cluster: Cluster
) -> Iterator[Reason]:
    """Yields what the cut and its order follow from."""
    layout = best.layout
    yield from (CaptureNote(note=note) for note in graph.notes if graph.form == "modules")
    yield from reasons(best, graph, bounds)
    yield from whole_tensor_updates(best, request.optimizer)
    if best.step_s > best.fastest_step_s * (1 + TOLD) > 0:
        yield CutsBetweenBlocks(step_s=best.step_s, fastest_step_s=best.fastest_step_s)
    yield from device_kinds(graph, bounds, best.devices, cluster, layout.group)
    yield from slow_options(request.bn, best)
    yield from order_reasons(graph, layout, request.bn)


def _why_axes(request: PlanRequest, layout: Layout, graph: ModelGraph, cluster: Cluster) -> Iterator[Reason]:
    """Yields what the axes besides pp, and the host's memory, follow from."""
    yield from tensor_reasons(graph, layout.axes.tp, layout.sequence)
    yield from beyond_reasons(graph, layout, cluster, request.optimizer)


def _refined(request: PlanRequest, pricing: Pricing, best: Estimate) -> tuple[Pricing, Estimate]:
    """Searches the winner again with every cut near its bounds instead of pieces; one stage has none."""
    if best.layout.stages == 1:
        return pricing, best
    ends = pricing.stages.ends(best.layout)
    finer = pricing.finer(best.layout, [ends[bound] for bound in best.bounds])
    searched = BranchAndBound(finer, searched_for(request.recompute), compares=False, most_s=best.step_s)
    estimates = searched.run([best.layout]).estimates
    better = polish(estimates[0]) if estimates else best
    return (finer, better) if better.step_s < best.step_s else (pricing, best)


def _expected(
    request: PlanRequest, best: Estimate, result: SearchResult, bounds: Sequence[int], pricing: Pricing
) -> Expected:
    figures, units = expected(best, request.batch_size, bounds), pricing.units
    floor_s = min(result.floor_s, best.floor_s or inf)
    # The other cuts of an interleaved layout are not among those that were priced.
    if best.layout.chunks > 1:
        floor_s = min(floor_s, pricing.bounds.least_s(best.layout))
    gap = max(0.0, best.step_s / floor_s - 1) if floor_s > 0 and not offloaded(best) else None
    return figures.model_copy(
        update={
            "gap": 0.0 if gap is not None and gap < OPTIMAL else gap,
            "limited_by": limited_by(best, units.work(best.layout), units.graph(best.layout), bounds),
        }
    )
