"""Lists the layouts to try for a request, by strategy: those of the given axes, those of all axes, and those
with weights on the host. Each is a `LayoutFamily`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain, islice, product
from math import inf
from typing import Final, final

from outsize.axes.registry import those
from outsize.errors import BadOption, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName, unsupported
from outsize.planner.costs.context_parallel import context_sizes
from outsize.planner.costs.kernel_stacks import stacks_of_runs, takes_turns
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.unit_prices import Models
from outsize.planner.fit.nearest import device_part
from outsize.planner.layout.expert_parallel import expert_sizes
from outsize.planner.layout.layout import (
    MOST_STAGES,
    AxisChoices,
    Layout,
    all_layouts,
    counts_for,
    grouped,
    host_layouts,
    pipelines,
    weight_modes,
)
from outsize.planner.layout.tensor_parallel import divides
from outsize.planner.search.step_floors import StepFloors
from outsize.policies.weights import SHARDED, Weights
from outsize.schedules.families import CHUNKED, DEFAULT, FORWARD, SEQUENTIAL, family_of, searched

# This many meshes are tried with several stages on a device as well.
MOST_MESHES: Final = 3
# Of this many meshes a balanced cut is looked at in pairs.
MOST_PAIRED: Final = 6


def _pipelines(request: PlanRequest, models: Models, cluster: Cluster) -> Iterator[Layout]:
    """Yields pipelines, each rank with the axes that were given; raises BadOption, TooManyStages."""
    measured = all(u.source == "measured" for _, profile in models.values() for u in profile.units[:1])
    usual = searched(on_cpu=cluster.devices[0].kind == "cpu", measured=measured)
    schedules = _schedules(request, models, usual)
    ranks = _ranks(request, _units(models), cluster)
    axes = request.mesh(ranks)
    for layout in pipelines(axes, counts_for(models, axes), schedules, _units(models), request.chunks):
        options = _sequence_options(request, layout, models[layout.captured][0])
        for sequence, weights in product(options, _weight_options(request, axes)):
            made = replace(layout, weights=weights, sequence=sequence, turns=takes_turns(request))
            if _is_worth(request, made):
                yield made


def _meshes(request: PlanRequest, models: Models, cluster: Cluster) -> Iterator[Layout]:
    """Yields all meshes that are allowed, pp alone among them, under one schedule; unequal devices may stay
    idle.

    Who names a schedule asks for a pipeline, which one rank is not.
    """
    if not models:
        return  # Nothing was captured for what was asked for, which the search of pipelines tells.
    graph = models[max(models)][0]
    on_cpu = cluster.devices[0].kind == "cpu"
    paired = (name for name in searched(on_cpu, measured=False) if family_of(name).overlaps)
    usual = DEFAULT.name, *(name for name in paired if not family_of(name).interleaves)
    schedules, asked = _schedules(request, models, usual), request.mesh(1)
    choices = AxisChoices(
        contexts=(asked.token_parts,)
        if asked.token_parts > 1
        else context_sizes(graph, len(cluster.devices)),
        experts=expert_sizes(graph, len(cluster.devices)),
        given=asked.with_one(those(lambda axis: axis.is_searched)),
        chunks=request.chunks,
    )
    turns = takes_turns(request)
    for found in all_layouts(cluster, models, schedules, _units(models), choices):
        layout = replace(found, turns=turns)
        for sequence in _sequence_options(request, layout, graph):
            ordered = request.schedule is None or layout.axes.pp > 1
            if ordered and _allows(request, layout, graph) and _is_worth(request, layout):
                yield replace(layout, sequence=sequence)


def _on_host(request: PlanRequest, models: Models, cluster: Cluster) -> Iterator[Layout]:
    """Yields layouts with weights in host memory."""
    graph = models[max(models)][0]
    schedules = _schedules(request, models, searched(on_cpu=False, measured=False))
    for layout in host_layouts(cluster, models, schedules, _units(models)):
        if _allows(request, layout, graph):
            yield layout


def no_layout(
    schedule: ScheduleName, request: PlanRequest, models: Models, cluster: Cluster
) -> BadOption | TooManyStages:
    """Returns the error for a schedule that has no pipeline of the model over these devices."""
    units, family = _units(models), family_of(schedule)
    ranks = _ranks(request, units, cluster)
    counts = [microbatches for microbatches, _ in counts_for(models, request.mesh(ranks))]
    tried = (family.chunk_counts(ranks, count) for count in counts)
    stages = [ranks * (request.chunks or chunks) for some in tried for chunks in some]
    if stages:
        return TooManyStages(
            f"{schedule} makes {min(stages)} stages on {ranks} devices, the model has {units} units for them",
            numbers=f"one unit is the smallest stage; of at most {MOST_STAGES} stages",
            next_step=f"--stages {max(1, min(units, MOST_STAGES) * ranks // min(stages))}",
        )
    return BadOption(
        f"{schedule} has no pipeline of {ranks} device{'' if ranks == 1 else 's'}",
        numbers=f"{max(counts, default=0)} microbatches; it wants several devices, and as many microbatches",
        next_step="--stages 2" if ranks == 1 else f"--microbatches {ranks}",
    )


def too_few_pieces(layouts: Sequence[Layout], pricing: Pricing) -> TooManyStages:
    """Returns the error for pipelines that have more stages than pieces between which the search cuts."""
    fewest = min(layouts, key=lambda layout: layout.stages)
    pieces = len(pricing.stages.ends(fewest)) - 1
    return TooManyStages(
        f"a pipeline of {fewest.stages} stages is not searched: the model is cut in {pieces} pieces",
        numbers=f"it has {len(pricing.units.graph(fewest).units)} units, and each stage needs a piece",
        next_step=f"--stages {pieces}, or other axes beside pp",
    )


def _allows(request: PlanRequest, layout: Layout, graph: ModelGraph) -> bool:
    """Returns whether a layout has what the request fixes, and runs.

    Stages are ranks of the pipeline, and microbatches those of a replica.
    """
    fixed, axes = request.mesh(layout.axes.pp).model_dump(), layout.axes.model_dump()
    has_fixed = all(axes[name] == size for name, size in fixed.items() if size > 1)
    has_fixed &= request.stages in (None, layout.axes.pp) and request.chunks in (None, layout.chunks)
    has_fixed &= request.microbatches in (None, layout.microbatches)
    has_fixed &= request.weights in (None, layout.weights) and (request.bn != "sync" or layout.replicas == 1)
    has_fixed &= not request.exact or layout.group == 1
    runs = not unsupported(layout.axes, layout.weights, graph.form)
    return has_fixed and runs and divides(graph, layout.axes.product_parts)


def _is_worth(request: PlanRequest, layout: Layout) -> bool:
    """Returns whether a layout is tried: one whose schedule was asked for is; otherwise a schedule of pairs
    only where two microbatches can be a pair, in steps that outsize runs.
    """
    if request.schedule is not None or not family_of(layout.schedule).overlaps:
        return True
    return layout.pairs and layout.microbatches > 1 and request.kernels in stacks_of_runs()


def _sequence_options(request: PlanRequest, layout: Layout, graph: ModelGraph) -> tuple[bool, ...]:
    """Returns whether to divide activations between layers: both options where it matters and none was asked
    for. Where ranks of tp divide experts, which gather their tokens, it is only done when asked for.
    """
    same = all(unit.in_sequence == unit.divided for unit in graph.units)
    if layout.axes.product_parts == 1 or same:
        return (False,)
    if layout.axes.expert_parts > 1:
        return (bool(request.sequence_parallel),)
    return (False, True) if request.sequence_parallel is None else (request.sequence_parallel,)


def _weight_options(request: PlanRequest, axes: Axes) -> tuple[Weights, ...]:
    """Returns how to hold a rank's weights: sharded where dp_shard was asked for; over cp alone, both."""
    modes = weight_modes(axes)
    if request.weights in modes:
        return (request.weights,)
    return (SHARDED.name,) if axes.divides_states else modes


def _units(models: Models) -> int:
    return min(len(graph.units) for graph, _ in models.values())


def _schedules(
    request: PlanRequest, models: Models, usual: tuple[ScheduleName, ...]
) -> tuple[ScheduleName, ...]:
    if any(graph.form == "modules" for graph, _ in models.values()):
        return (SEQUENTIAL.name,)  # Modules of a model that runs by modules wait for each other.
    if request.inference:
        return (FORWARD.name,)
    several = (request.chunks or 1) > 1
    if request.schedule is None:
        return (CHUNKED.name,) if several else usual
    if several and not family_of(request.schedule).several_stages:
        raise BadOption(
            f"{request.schedule} has one stage on each rank, and chunks asks for several",
            numbers=f"chunks={request.chunks}, schedule={request.schedule!r}",
            next_step=f"schedule={CHUNKED.name!r} (--schedule {CHUNKED.name}), or leave out chunks",
        )
    return (request.schedule,)


def _ranks(request: PlanRequest, units: int, cluster: Cluster) -> int:
    group, count = request.mesh(1).group_size, len(cluster.devices)
    stages = request.stages or max(1, count // group)
    devices = f"cluster {cluster.name!r} has {count} devices"
    if grouped(cluster, group) is None or stages * group > count:
        raise BadOption(
            f"{stages} stages want {'as many devices' if group == 1 else f'{group} devices each'}",
            numbers=f"{request.mesh(stages).beyond_pp}; {devices}" if group > 1 else devices,
            next_step=f"--cluster {stages * group}x{device_part(cluster)}",
        )
    if stages > units:
        raise TooManyStages(
            f"{stages} stages were asked for, the model has {units} units to put into them",
            numbers=f"one unit is the smallest stage; {devices}",
            next_step=f"--stages {units}",
        )
    return stages


def interleaved(
    request: PlanRequest, floors: StepFloors, pricing: Pricing, layouts: Sequence[Layout]
) -> Iterator[Layout]:
    """Yields the meshes again with several stages on a device whose balanced cut is shortest that way: such
    cuts take long to price. Meshes that do not fit with one stage on a device are left out.

    In pairs these are meshes that are among the shortest in pairs with one stage, whatever their cuts are.
    """
    tried = searched(on_cpu=pricing.cluster.devices[0].kind == "cpu", measured=False)
    plain, paired = ([layout for layout in layouts if layout.pairs == pairs] for pairs in (False, True))
    for name in dict.fromkeys((CHUNKED.name, *filter(lambda name: family_of(name).interleaves, tried))):
        few = nsmallest(MOST_PAIRED, paired, floors.least_s) if family_of(name).overlaps else plain
        yield from _interleaved(request, floors, pricing, few, name)


def _interleaved(
    request: PlanRequest,
    floors: StepFloors,
    pricing: Pricing,
    layouts: Sequence[Layout],
    schedule: ScheduleName,
) -> Iterator[Layout]:
    """Yields the layouts under one schedule."""
    found: list[tuple[float, int, tuple[Layout, ...]]] = []
    for place, layout in enumerate(layouts):
        counts, units = [(layout.microbatches, layout.captured)], len(pricing.units.graph(layout).units)
        made = (
            replace(each, weights=layout.weights, sequence=layout.sequence, turns=layout.turns)
            for each in pipelines(layout.axes, counts, (schedule,), units)
        )
        chunked = tuple(each for each in made if each.chunks > 1 and _is_worth(request, each))
        if chunked:
            found.append((min(map(floors.likely_s, chunked)), place, chunked))
    in_order = sorted(each for each in found if each[0] < inf)
    fitting = (chunked for _, place, chunked in in_order if not floors.refuted(layouts[place]))
    yield from chain.from_iterable(islice(fitting, MOST_MESHES))


@final
@dataclass(frozen=True, kw_only=True)
class LayoutFamily:
    """Is one family of layouts.

    name     what its layouts have in common
    helps    whether it may hold a plan of a request on a cluster
    layouts  yields them, from the request, the models by microbatches, and the cluster
    bound    what no step of such a layout is below, in words
    """

    name: str
    helps: Callable[[PlanRequest, Cluster], bool]
    layouts: Callable[[PlanRequest, Models, Cluster], Iterator[Layout]]
    bound: str


PIPELINES: Final = LayoutFamily(
    name="pipelines of the given axes",
    helps=lambda request, _: not request.weight_policy.on_host,
    layouts=_pipelines,
    bound="the critical path through its stages, with the recompute that memory forces",
)
MESHES: Final = LayoutFamily(
    name="meshes of all axes that the request leaves open",
    helps=lambda request, cluster: request.opens_axes(cluster),
    layouts=_meshes,
    bound="that of pipelines, and the queue of its collectives of weights",
)
ON_HOST: Final = LayoutFamily(
    name="weights on the host of one device",
    # Activations that are offloaded would share the link with weights, and no stage runs both.
    helps=lambda request, _: not request.activation_policy.uses_host,
    layouts=_on_host,
    bound="the compute of all units, with the waits for their weights",
)
