"""Problem: which layout and which cuts make a step on this cluster fastest?

For every layout (layout.py: schedule, microbatches, stages on a rank; with `what_if` every mesh of pp,
dp_replicate, dp_shard, cp and tp under 1f1b, the best of them interleaved, and weights on the host where
nothing else fits): the exact partition (split.py), its
memory account, its simulated step. Layouts are tried best first, by a floor that no cut of them can beat
(floor.py), until the next floor is above what was found. The fastest that fits wins; among those within one
percent of it, less than a prediction can tell apart, one that runs today before a what-if, then the one
with least memory on its fullest device, then fewer microbatches, then 1f1b before gpipe before naive. A
stage that does not fit recomputes, or has what waits on the host (aside.py), if that was left open.

The gap says how far the plan is from the least floor: no layout and no cut that was allowed makes a step
shorter by more than that, but for interleaved layouts that were not chosen, of which the balanced cut counts.
It includes what the floors leave out: links, and memory where a layout was not tried. No randomness and no
clock: equal input, equal plan.

Plan enumeration with a cost model as in PipeDream (arXiv 1806.03377, sec. 3.1) and Alpa (arXiv 2201.12023,
sec. 5), best first with a bound (Land and Doig 1960). Complexity: layouts x O(p n^2), for those that are
tried. Oracles: tests/unit/planner/test_search.py prices every cut of small models, test_joint.py every
layout as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import inf
from typing import Final, final

from outsize.errors import BadOption, TooManyStages
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import HOSTED, Weights
from outsize.ir.plan import (
    Axes,
    BatchNormMode,
    Count,
    Expected,
    Plan,
    Precision,
    Recompute,
    ScheduleName,
    stages_from_bounds,
)
from outsize.ir.profile import Profile
from outsize.planner.aside import check_recompute, offload_reasons, offloaded, offloads, or_offloaded
from outsize.planner.best_first import Found, Hunt
from outsize.planner.beyond import beyond_reasons, costly
from outsize.planner.branched import branched
from outsize.planner.context import context
from outsize.planner.divided import divides, tensor_reasons
from outsize.planner.estimate import Estimate, check_enough, expected, reasons
from outsize.planner.given import with_schedule
from outsize.planner.infeasible import device_part, no_feasible_plan, rejections
from outsize.planner.layout import Layout, counts_for, everything, grouped, hosted, pipelines
from outsize.planner.limits import limited_by
from outsize.planner.margin import rooms
from outsize.planner.menu import Menu
from outsize.planner.polish import polish
from outsize.planner.reasons import kind_reasons, microbatches_text
from outsize.planner.rivals import alternative, choose, compared_with, rivals, shown
from outsize.planner.selective import by_blocks, counted, selective_reasons, written
from outsize.planner.streamed import check_hosted, fastest, in_blocks
from outsize.planner.tight import selective

# zero-bubble only where it is asked for, or on CPUs from measured times: what splitting costs is known there.
SCHEDULES: Final[tuple[ScheduleName, ...]] = ("1f1b", "gpipe", "naive", "interleaved")
# Of a what-if, that are tried with several stages on a device.
MESHES: Final = 3
REJECTIONS: Final = 6
# A gap that no prediction could see.
OPTIMAL: Final = 1e-4
# What a plan says of all its stages at once, where they do.
ALIKE: Final[tuple[set[Recompute], ...]] = {"full"}, {"offload"}


@final
class Request(Record):
    """What is asked for; None leaves the choice to the search (stages: one per device, or group of devices).

    `dp_replicate`, `dp_shard`, `tp`: the sizes of these axes; microbatches are those of each replica.
    `sequence_parallel`: whether tp divides what lies between layers; left open, both are priced beside `tp`.
    `weights`: where they are; left open they are sharded over dp_shard, and on the host where one device is
    too small for all else.
    `what_if`: also layouts that nothing runs yet. `actions` are those of the schedule "custom".
    """

    batch_size: Count
    microbatches: Count | None = None
    stages: Count | None = None
    schedule: ScheduleName | None = None
    optimizer: str = "adamw"
    precision: Precision = "fp32"
    recompute: Recompute | None = None
    bn: BatchNormMode = "micro"
    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    sequence_parallel: bool | None = None
    weights: Weights | None = None
    what_if: bool = False
    actions: tuple[str, ...] = ()

    def axes(self, pp: int) -> Axes:
        """With so many ranks in a pipeline."""
        return Axes(pp=pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=self.tp)

    @property
    def meshed(self) -> bool:
        """Is more asked for than a pipeline?"""
        return self.axes(1).group_size > 1

    @property
    def count(self) -> int | None:
        """Microbatches of the whole batch, where they are asked for."""
        return self.microbatches and self.microbatches * self.axes(1).replicas


def search(request: Request, candidates: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster) -> Plan:
    """The fastest plan that fits. `candidates`: microbatches -> model at batch / microbatches samples.

    Raises TooFewSamples, TooManyStages, NoFeasiblePlan, and BadOption when there are fewer devices
    than stages, or when nothing was captured for the microbatches asked for.
    """
    if request.schedule == "custom":
        plain = _by_runs(request.model_copy(update={"schedule": "1f1b"}), candidates, cluster)
        taken = candidates[plain.microbatches * plain.axes.replicas]
        return with_schedule(plain, request.actions, *taken, cluster)
    if request.schedule == "auto" and request.meshed:
        raise BadOption(
            "the schedule 'auto' is built for a pipeline alone",
            numbers=request.axes(1).beyond_pp,
            next_step="leave the schedule out: the best one by name is chosen",
        )
    if request.schedule not in (None, "auto") or request.what_if or request.meshed:
        return _by_runs(request, candidates, cluster)
    plan = _by_runs(request.model_copy(update={"schedule": None}), candidates, cluster)
    if plan.weights in HOSTED or offloads(plan):
        return plan
    asked = {count: candidates[count] for count in _asked(request, candidates)}
    return branched(plan, asked, cluster, anyhow=request.schedule == "auto")


def _by_runs(
    request: Request, candidates: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster
) -> Plan:
    """The fastest plan whose stages are runs of the model's own order."""
    if request.weights in HOSTED:
        graphs = [graph for graph, _ in candidates.values()]
        check_hosted(graphs, cluster, request.weights, request.what_if)
        check_recompute(request.recompute, request.weights)
    asked = {count: candidates[count] for count in _asked(request, candidates)}
    for count in asked:
        check_enough(request.batch_size, count)
    layouts = tuple(_layouts(request, asked, cluster))
    menu = Menu(candidates, cluster, request.optimizer, idle=request.what_if and request.stages is None)
    hunt = Hunt(menu, _recompute(request))
    found = hunt.run(() if request.weights in HOSTED else layouts)
    if request.what_if and request.schedule is None:
        found = hunt.run(tuple(_interleaved(found, menu)))
    if found.estimates:
        return _plan(request, found, menu, cluster)
    on_host = _degrees(request, tuple(_layouts(request, asked, cluster, True)), menu)
    runs = (request.what_if or len(cluster.devices) == 1) and request.recompute != "offload"
    if not (runs and on_host) or request.weights not in (None, *HOSTED):
        elsewhere = bool(on_host) and len(cluster.devices) > 1
        raise _nothing_fits(request, candidates, layouts, menu, cluster, elsewhere)
    made = [
        _plan(request, replace(each, rejected=found.rejected), menu, cluster) for each in on_host.values()
    ]
    plans = [in_blocks(plan, *candidates[plan.microbatches], cluster) for plan in made if plan.streams]
    return fastest(plans, candidates, cluster) if plans else made[-1]


def _degrees(request: Request, layouts: Sequence[Layout], menu: Menu) -> dict[Weights, Found]:
    """What fits of each degree of offload, the least first."""
    found = dict[Weights, Found]()
    for weights in HOSTED:
        if request.weights == weights or request.weights not in HOSTED:
            found[weights] = _on_host(request, [each for each in layouts if each.weights == weights], menu)
    return {weights: each for weights, each in found.items() if each.estimates}


def _on_host(request: Request, layouts: Sequence[Layout], menu: Menu) -> Found:
    """Layer by layer on one device, and microbatch by microbatch only where that does not fit."""
    alone = [layout for layout in layouts if layout.axes.world_size == 1 and layout.schedule == "gpipe"]
    found = Hunt(menu, _recompute(request)).run(alone)
    return found if found.estimates else Hunt(menu, _recompute(request)).run(layouts)


def _recompute(request: Request) -> tuple[Recompute, ...]:
    """The ways a stage may run, the one to be preferred first."""
    return ("none", "full", "selective") if request.recompute in (None, "selective") else (request.recompute,)


# -- what there is to try --------------------------------------------------------------------------------


def _asked(request: Request, candidates: Mapping[int, tuple[ModelGraph, Profile]]) -> list[int]:
    if request.count is None or request.what_if:
        return sorted(candidates)
    check_enough(request.batch_size, request.count)
    if request.count not in candidates:
        raise BadOption(
            f"the model was not captured for {microbatches_text(request.count)}",
            numbers=f"captured: {', '.join(map(str, sorted(candidates))) or 'none'}",
            next_step=f"capture it with {-(-request.batch_size // request.count)} samples",
        )
    return [request.count]


def _layouts(
    request: Request,
    candidates: Mapping[int, tuple[ModelGraph, Profile]],
    cluster: Cluster,
    on_host: bool = False,
) -> Iterator[Layout]:
    units = min(len(graph.units) for graph, _ in candidates.values())
    schedules: tuple[ScheduleName, ...] = (request.schedule,) if request.schedule else SCHEDULES
    if any(graph.form == "modules" for graph, _ in candidates.values()):
        schedules = ("naive",)  # its modules wait for each other
    if on_host:
        yield from filter(partial(_as_wished, request), hosted(cluster, candidates, schedules, units))
        return
    if request.what_if:
        wanted = (request.schedule,) if request.schedule else ("1f1b",)
        contexts = context(candidates[max(candidates)][0]).ways(len(cluster.devices))
        graph = candidates[max(candidates)][0]
        found = everything(cluster, candidates, wanted, units, contexts)
        found = (_sequential(layout, request) for layout in found if divides(graph, layout.axes.tp))
        yield from filter(partial(_as_wished, request), found)
        return
    ranks = _ranks(request, units, cluster)
    if request.schedule is None and cluster.devices[0].kind == "cpu":
        # What twice as many messages cost two CPU processes is not in the simulation.
        schedules = tuple(name for name in schedules if name != "interleaved")
        timed = all(u.source == "measured" for _, found in candidates.values() for u in found.units[:1])
        schedules = (*schedules, "zero-bubble") if timed else schedules
    whole = request.dp_shard == 1 or request.weights == "resident"
    axes, weights = request.axes(ranks), "resident" if whole else "sharded"
    for layout in pipelines(axes, counts_for(candidates, axes), schedules, units):
        for sequence in _ways_between(request, candidates[layout.captured][0]):
            yield replace(layout, weights=weights, sequence=sequence)


def _sequential(layout: Layout, request: Request) -> Layout:
    """A mesh of a what-if, as it is asked for."""
    return replace(layout, sequence=layout.axes.tp > 1 and request.sequence_parallel is True)


def _ways_between(request: Request, graph: ModelGraph) -> tuple[bool, ...]:
    """Whether what lies between layers is divided: both where that makes a difference and nobody said."""
    differs = any(unit.in_sequence != unit.divided for unit in graph.units)
    if request.tp == 1 or not differs:
        return (False,)
    return (False, True) if request.sequence_parallel is None else (request.sequence_parallel,)


def _interleaved(found: Found, menu: Menu) -> Iterator[Layout]:
    """The best meshes again with several stages on a device: such cuts take long to price."""
    for each in sorted(found.estimates, key=lambda e: e.step_s)[:MESHES]:
        layout = each.layout
        counts, units = [(layout.microbatches, layout.captured)], len(menu.graph(layout).units)
        for chunked in pipelines(layout.axes, counts, ("interleaved",), units):
            yield replace(chunked, weights=layout.weights, sequence=layout.sequence)


def _as_wished(request: Request, layout: Layout) -> bool:
    """What was fixed stays fixed: stages are ranks of the pipeline, microbatches those of a replica."""
    stages, count, meshed = request.stages, request.microbatches, not request.meshed
    meshed = meshed or request.axes(layout.axes.pp) == layout.axes
    meshed = meshed and request.weights in (None, layout.weights)
    return meshed and stages in (None, layout.axes.pp) and count in (None, layout.microbatches)


def _ranks(request: Request, units: int, cluster: Cluster) -> int:
    group, count = request.axes(1).group_size, len(cluster.devices)
    stages = request.stages or max(1, count // group)
    devices = f"cluster {cluster.name!r} has {count} devices"
    if grouped(cluster, group) is None or stages * group > count:
        raise BadOption(
            f"{stages} stages want {'as many devices' if group == 1 else f'{group} devices each'}",
            numbers=f"{request.axes(stages).beyond_pp}; {devices}" if group > 1 else devices,
            next_step=f"--cluster {stages * group}x{device_part(cluster)}",
        )
    if stages > units:
        raise TooManyStages(
            f"{stages} stages were asked for, the model has {units} units to put into them",
            numbers=f"one unit is the smallest stage; {devices}",
            next_step=f"--stages {units}",
        )
    return stages


def _nothing_fits(
    request: Request,
    candidates: Mapping[int, tuple[ModelGraph, Profile]],
    layouts: Sequence[Layout],
    menu: Menu,
    cluster: Cluster,
    hosted: bool,
) -> Exception:
    """Who lacks how much, and what would fit, as a pipeline over all devices, or `hosted`."""
    plain = [layout for layout in layouts if layout.chunks == 1 and (layout.group == 1 or request.meshed)]
    plain = plain or [_over_all(cluster, count) for count in candidates]
    schedules: list[ScheduleName] = list(dict.fromkeys(layout.schedule for layout in plain))
    counts = {layout.captured: layout for layout in plain}
    spare = {c: replace(plain[0], microbatches=c, captured=c) for c in candidates if c not in counts}
    ways = _recompute(request)
    device = cluster.devices[0]
    asked = [menu.case(layout, device, way) for layout in counts.values() for way in ways]
    more = [menu.case(layout, device, way) for layout in spare.values() for way in ways]
    more += [menu.case(layout, device, "full") for layout in (*counts.values(), *spare.values())]
    return no_feasible_plan(asked, more, schedules, plain[0].axes.pp, rooms(cluster), hosted)


def _over_all(cluster: Cluster, count: int) -> Layout:
    return Layout(Axes(pp=len(cluster.devices)), len(cluster.devices), "1f1b", count, count)


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
