"""Problem: which layout and which cuts make a step on this cluster fastest?

For every layout (layout.py: schedule, microbatches, stages on a rank; where axes are open every mesh of pp,
dp_replicate, dp_shard, cp and tp under 1f1b, the best of them interleaved, and weights on the host where
nothing else fits): the exact partition (split.py), its memory account, its simulated step. Layouts are tried
best first, by a floor that no cut of them can beat (floor.py), until the next floor is above what was found.
The fastest that fits wins; among those within one percent of it, less than a prediction can tell apart, one
that runs today before a what-if, then the one with least memory on its fullest device, then fewer
microbatches, then 1f1b before gpipe before naive. A stage that does not fit recomputes, or has what
waits on the host (aside.py), if that is open.

Where axes are open, pipelines and meshes are searched one after the other, each to its end (which units
recompute is settled for a winner alone), and a mesh has to be faster by more than that percent: a pipeline
gives one device's bits.

The gap says how far the plan is from the least floor: no layout and no cut that was allowed makes a step
shorter by more than that, but for interleaved layouts that were not chosen, of which the balanced cut counts.
It includes what the floors leave out: links, and memory where a layout was not tried. No randomness and no
clock: equal input, equal plan.

Plan enumeration with a cost model as in PipeDream (arXiv 1806.03377, sec. 3.1) and Alpa (arXiv 2201.12023,
sec. 5), best first with a bound (Land and Doig 1960). Complexity: layouts x O(p n^2), for those that are
tried. Oracles: tests/unit/planner/test_search.py prices every cut of small models, test_joint.py every
layout as well, test_all_axes.py every mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import inf
from typing import Final

from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.ir.cluster import Cluster
from outsize.ir.offload import HOSTED, Weights
from outsize.ir.plan import Axes, Expected, Plan, Recompute, ScheduleName, stages_from_bounds
from outsize.planner.aside import check_recompute, offload_reasons, offloaded, offloads, or_offloaded
from outsize.planner.best_first import Found, Hunt
from outsize.planner.beyond import beyond_reasons, costly, order_reasons
from outsize.planner.branched import branched
from outsize.planner.divided import tensor_reasons
from outsize.planner.either import faster, no_row_reason
from outsize.planner.estimate import Estimate, check_enough, expected, reasons
from outsize.planner.given import with_schedule
from outsize.planner.infeasible import no_feasible_plan, rejections
from outsize.planner.layout import Layout, counts_for, pipelines
from outsize.planner.limits import limited_by
from outsize.planner.looped import or_in_turns
from outsize.planner.margin import rooms
from outsize.planner.menu import Menu
from outsize.planner.polish import polish
from outsize.planner.reasons import kind_reasons, microbatches_text
from outsize.planner.request import Request
from outsize.planner.rivals import alternative, choose, compared_with, rivals, shown
from outsize.planner.selective import by_blocks, counted, selective_reasons, written
from outsize.planner.space import Candidates, in_a_row, meshes, on_host
from outsize.planner.streamed import check_hosted, fastest, in_blocks, too_small
from outsize.planner.tight import selective

# Meshes that are tried with several stages on a device.
MESHES: Final = 3
REJECTIONS: Final = 6
# A gap that no prediction could see.
OPTIMAL: Final = 1e-4
# What a plan says of all its stages at once, where they do.
ALIKE: Final[tuple[set[Recompute], ...]] = {"full"}, {"offload"}


def search(request: Request, candidates: Candidates, cluster: Cluster) -> Plan:
    """The fastest plan that fits. `candidates`: microbatches -> model at batch / microbatches samples.

    Raises TooFewSamples, TooManyStages, NoFeasiblePlan, and BadOption when there are fewer devices
    than stages, or when nothing was captured for the microbatches asked for.
    """
    if not request.open:
        return _as_given(request, candidates, cluster)
    try:
        row = _as_given(request.given, candidates, cluster)
    except (BadOption, NoFeasiblePlan, TooManyStages) as refused:
        return instead(refused, request, candidates, cluster)
    mesh = _open(request, candidates, cluster)
    return row if mesh is None else faster(row, mesh)


def instead(refused: OutsizeError, request: Request, candidates: Candidates, cluster: Cluster) -> Plan:
    """The fastest plan with open axes, and on the host where no mesh fits, since a pipeline was `refused`.

    Raises that where nothing fits.
    """
    plan = _open(request, candidates, cluster, last=True)
    if plan is None:
        raise refused
    return plan.model_copy(update={"why": (*plan.why, no_row_reason(refused))})


def _as_given(request: Request, candidates: Candidates, cluster: Cluster) -> Plan:
    """No axes but those that were given; branches at the same time, where there are any."""
    if request.schedule == "custom":
        plain = _by_runs(request.model_copy(update={"schedule": "1f1b"}), candidates, cluster)
        taken = candidates[plain.microbatches * plain.axes.replicas]
        return with_schedule(plain, request.actions, *taken, cluster)
    if request.schedule not in (None, "auto") or (request.schedule is None and request.meshed):
        return _by_runs(request, candidates, cluster)
    plan = _by_runs(request.model_copy(update={"schedule": None}), candidates, cluster)
    return _composed(request, plan, candidates, cluster)


def _composed(request: Request, plan: Plan, candidates: Candidates, cluster: Cluster) -> Plan:
    """With branches at the same time, or where "auto" is asked for a schedule of its own."""
    if plan.weights in HOSTED or offloads(plan):
        return plan
    counts = counts_for(candidates, plan.axes)
    asked = {m: candidates[c] for m, c in counts if request.microbatches in (None, m)}
    found = branched(plan, asked, cluster, anyhow=request.schedule == "auto")
    graph, layout = asked[found.microbatches][0], Layout.of_plan(found)
    sums = order_reasons(graph, layout, request.bn), tensor_reasons(graph, layout.axes.tp, layout.sequence)
    return found if found is plan else found.model_copy(update={"why": (*found.why, *chain(*sums))})


def _by_runs(request: Request, candidates: Candidates, cluster: Cluster) -> Plan:
    """The fastest plan whose stages are runs of the model's own order."""
    if request.weights in HOSTED:
        check_hosted(request, [graph for graph, _ in candidates.values()], cluster)
        check_recompute(request.recompute, request.weights)
    asked = {count: candidates[count] for count in _asked(request, candidates)}
    for count in asked:
        check_enough(request.batch_size, count)
    layouts = tuple(in_a_row(request, asked, cluster))
    menu = Menu(candidates, cluster, request.optimizer)
    found = Hunt(menu, _recompute(request)).run(() if request.weights in HOSTED else layouts)
    if found.estimates:
        return _plan(request, found, menu, cluster)
    last = len(cluster.devices) == 1 or request.weights in HOSTED
    plan = _hosted(request, asked, found, menu, cluster) if last else None
    if plan is None:
        raise _nothing_fits(request, candidates, layouts, menu, cluster)
    return plan


def _open(request: Request, candidates: Candidates, cluster: Cluster, last: bool = False) -> Plan | None:
    """The fastest mesh of all axes; where none fits None, or as the `last` way with weights on the host."""
    if request.actions:
        return None  # written for a pipeline
    if request.schedule == "auto":
        named = _open(request.model_copy(update={"schedule": None}), candidates, cluster, last)
        return named and _composed(request, named, candidates, cluster)
    menu = Menu(candidates, cluster, request.optimizer, idle=request.stages is None)
    hunt = Hunt(menu, _recompute(request))
    layouts = tuple(meshes(request, candidates, cluster))
    wide = tuple(layout for layout in layouts if layout.group > 1 or cluster.unequal)
    found = hunt.run(wide)
    if request.schedule is None:
        found = hunt.run(tuple(_interleaved(found, menu)))
    least_s = hunt.floor_s(layout for layout in layouts if layout not in wide)
    found = replace(found, floor_s=min(found.floor_s, least_s))
    if found.estimates:
        return _plan(request, found, menu, cluster)
    return _hosted(request, candidates, found, menu, cluster) if last else None


def _hosted(
    request: Request, candidates: Candidates, found: Found, menu: Menu, cluster: Cluster
) -> Plan | None:
    """With weights on the host, by the fastest degree of offload: on one device, or on several in turns."""
    layouts, ways = tuple(on_host(request, candidates, cluster)), _recompute(request)
    degrees = [
        _streamed([each for each in layouts if each.weights == w], menu, own)
        for w in HOSTED
        if (own := _with(w, ways))
    ]
    made = [
        _plan(request, replace(d, rejected=found.rejected), menu, cluster) for d in degrees if d.estimates
    ]
    plans = [in_blocks(plan, *candidates[plan.microbatches], cluster) for plan in made]
    alone = fastest(plans, candidates, cluster) if plans else None
    return or_in_turns(alone, request, candidates, cluster, ways)


def _with(weights: Weights, ways: tuple[Recompute, ...]) -> tuple[Recompute, ...]:
    """Stages whose activations are on the host compute anew what they do not receive."""
    return tuple(way for way in ways if way == "full") if weights == "host-activations" else ways


def _streamed(layouts: Sequence[Layout], menu: Menu, ways: Sequence[Recompute]) -> Found:
    """Layer by layer, and microbatch by microbatch only where that does not fit."""
    found = Hunt(menu, ways).run([layout for layout in layouts if layout.schedule == "gpipe"])
    return found if found.estimates else Hunt(menu, ways).run(layouts)


def _recompute(request: Request) -> tuple[Recompute, ...]:
    """The ways a stage may run, the one to be preferred first."""
    return ("none", "full", "selective") if request.recompute in (None, "selective") else (request.recompute,)


def _asked(request: Request, candidates: Candidates) -> list[int]:
    if request.count is None:
        return sorted(candidates)
    check_enough(request.batch_size, request.count)
    if request.count not in candidates:
        raise BadOption(
            f"the model was not captured for {microbatches_text(request.count)}",
            numbers=f"captured: {', '.join(map(str, sorted(candidates))) or 'none'}",
            next_step=f"capture it with {-(-request.batch_size // request.count)} samples",
        )
    return [request.count]


def _interleaved(found: Found, menu: Menu) -> Iterator[Layout]:
    """The best meshes again with several stages on a device: such cuts take long to price."""
    for each in sorted(found.estimates, key=lambda e: e.step_s)[:MESHES]:
        layout = each.layout
        counts, units = [(layout.microbatches, layout.captured)], len(menu.graph(layout).units)
        for chunked in pipelines(layout.axes, counts, ("interleaved",), units):
            yield replace(chunked, weights=layout.weights, sequence=layout.sequence)


def _nothing_fits(
    request: Request, candidates: Candidates, layouts: Sequence[Layout], menu: Menu, cluster: Cluster
) -> NoFeasiblePlan:
    """Who lacks how much, and what would fit."""
    streaming = tuple(on_host(request, candidates, cluster)) if request.weights in HOSTED else ()
    if streaming:
        return too_small(streaming, menu, _recompute(request)[:2][-1])
    plain = [layout for layout in layouts if layout.chunks == 1] or [
        Layout(Axes(pp=len(cluster.devices)), len(cluster.devices), "1f1b", count, count)
        for count in candidates
    ]
    schedules: list[ScheduleName] = list(dict.fromkeys(layout.schedule for layout in plain))
    counts = {layout.captured: layout for layout in plain}
    spare = {c: replace(plain[0], microbatches=c, captured=c) for c in candidates if c not in counts}
    ways = _recompute(request)
    device = cluster.devices[0]
    asked = [menu.case(layout, device, way) for layout in counts.values() for way in ways]
    more = [menu.case(layout, device, way) for layout in spare.values() for way in ways]
    more += [menu.case(layout, device, "full") for layout in (*counts.values(), *spare.values())]
    devices = len(cluster.devices)
    others = devices > 1 and not request.further(devices)
    return no_feasible_plan(asked, more, schedules, plain[0].axes.pp, rooms(cluster), others)


# -- what comes out --------------------------------------------------------------------------------------


def _plan(request: Request, found: Found, menu: Menu, cluster: Cluster) -> Plan:
    best, whole = polish(choose(found.estimates)), menu
    if not (menu.exact(best.layout) or menu.unequal):
        menu, best = _refined(request, menu, best)
    best, anew = selective(best, menu, request.optimizer)
    other = or_offloaded(best, found.estimates, whole, cluster) if request.recompute is None else None
    if other is not None:
        menu, best, anew = whole, other, {}
    layout, ends = best.layout, menu.ends(best.layout)
    bounds = tuple(ends[b] for b in best.bounds)
    anew = by_blocks(best, bounds) | anew
    graph = menu.graph(layout)
    overall = best.cases[0].recompute if {c.recompute for c in best.cases} in ALIKE else "none"
    stages = stages_from_bounds(graph, bounds, tuple(device.name for device in best.devices))
    others = rivals(layout, found.estimates)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=layout.axes,
        batch_size=request.batch_size,
        microbatches=layout.microbatches,
        schedule=layout.schedule,
        stages=written(stages, best.cases, overall, anew, graph),
        optimizer=request.optimizer,
        precision=request.precision,
        weights=layout.weights,
        sequence_parallel=layout.sequence,
        recompute=overall,
        bn=request.bn,
        what_if=layout.what_if,
        expected=counted(_expected(request, best, found, bounds, menu), anew),
        alternatives=tuple(alternative(request.batch_size, rival) for rival in shown(others)),
        why=(
            *(graph.notes if graph.form == "modules" else ()),
            *reasons(best, graph, bounds),
            *kind_reasons(graph, bounds, best.devices, cluster, layout.group),
            *costly(request.bn, best),
            *order_reasons(graph, layout, request.bn),
            *selective_reasons(best, anew, bounds),
            *offload_reasons(best),
            *tensor_reasons(graph, layout.axes.tp, layout.sequence),
            *(
                beyond_reasons(graph, layout, cluster, request.optimizer)
                if request.what_if or layout.hosted
                else ()
            ),
            *compared_with(best, others),
            *islice(rejections(found.rejected), REJECTIONS),
        ),
    )


def _refined(request: Request, menu: Menu, best: Estimate) -> tuple[Menu, Estimate]:
    """The winner again, with every cut near the ones that were found between pieces."""
    ends = menu.ends(best.layout)
    finer = menu.finer(best.layout, [ends[bound] for bound in best.bounds])
    again = Hunt(finer, _recompute(request)).run([best.layout]).estimates
    better = polish(again[0]) if again else best
    return (finer, better) if better.step_s < best.step_s else (menu, best)


def _expected(request: Request, best: Estimate, found: Found, bounds: Sequence[int], menu: Menu) -> Expected:
    figures = expected(best, request.batch_size, bounds)
    floor_s = min(found.floor_s, best.floor_s or inf)
    if best.layout.chunks > 1:  # its other cuts are not among those that were priced
        floor_s = min(floor_s, menu.least_s(best.layout))
    gap = max(0.0, best.step_s / floor_s - 1) if floor_s > 0 and not offloaded(best) else None
    return figures.model_copy(
        update={
            "gap": 0.0 if gap is not None and gap < OPTIMAL else gap,
            "limited_by": limited_by(best, menu.work(best.layout), menu.graph(best.layout), bounds),
        }
    )
