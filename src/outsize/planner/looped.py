"""Problem: weights live on the hosts of p devices. Whose is which stage, and what do step and device cost?

    stages    v p blocks (offload.py) of about equal work, stage s on device s mod p, breadth first: gpipe
              with several stages on a rank (schedules/builders.py; Lamy-Poirier, arXiv 2211.05953)
    seconds   offload.py's moves of each device's own stages, whose weights come over its own link, in the
              costs of its actions; then the schedule is played with its messages, as of any pipeline
    bytes     those of the pipeline, and for weights and gradients two of the device's own stages (all weights
              where they stay), shared out evenly to them, so that they add up to what it holds; what several
              stages use stays with its owner
    choice    p (divisors of the number of devices), v, microbatches, degree, recompute of all or nothing:
              those whose bound is below what was found are priced, and the fastest that fits is taken

Deviations: gradients count from the first forward on, and what loads wait for is spread evenly over a stage's
microbatches. Only devices that are alike. Complexity: choices x O(actions).
Oracle: tests/unit/planner/test_looped.py adds bytes and seconds up by hand; such plans run in
tests/dist/test_hosted_processes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from operator import itemgetter
from typing import Final, NamedTuple, Self, final

import numpy as np

from outsize.ir.cluster import Cluster
from outsize.ir.devices import host_link
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import OF_SEVERAL, Bound, Degree, Weights
from outsize.ir.plan import Axes, Plan, Recompute, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.text import bytes_text, seconds_text
from outsize.ir.timeline import Timeline
from outsize.planner.coarse import coarse_graph, coarse_profile
from outsize.planner.estimate import Estimate, check_enough, estimate, expected, play
from outsize.planner.floor import Work
from outsize.planner.layout import Layout, rank_named
from outsize.planner.limits import limited_by
from outsize.planner.margin import rooms
from outsize.planner.offload import (
    BLOCKS,
    Host,
    block_ends,
    host_reason,
    landing_reason,
    staying,
    streamed,
    two_places,
    updated,
)
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import Bytes, Ranges
from outsize.planner.reasons import fullest_reason
from outsize.planner.request import Request
from outsize.planner.rivals import CLOSE
from outsize.planner.seconds import Seconds, UnitSeconds
from outsize.planner.sharding import each
from outsize.planner.split import Case, Pipeline

# Stages of all devices that are tried.
MOST: Final = (16, 32, BLOCKS)
Model = tuple[ModelGraph, Profile]
Held = tuple[Bytes, Bytes]
"""Weights and gradients of each stage, shape (stages,)."""


@final
class Blocks(NamedTuple):
    """A model whose units are stages; weights and gradients of each, and what its optimizer moves."""

    whole: Case
    held: Held
    updated: Seconds

    @classmethod
    def of(cls, graph: ModelGraph, profile: Profile, bounds: Sequence[int], optimizer: str) -> Self:
        """First unit of each stage, then their number."""
        coarse = coarse_graph(graph, bounds)
        whole = Case.of(coarse, coarse_profile(profile, bounds), 1, optimizer)
        held = each(whole.ranges.weights - whole.ranges.buffers), each(whole.ranges.gradients)
        return cls(whole, held, updated(coarse, optimizer_bytes(optimizer)))


# -- the choice ------------------------------------------------------------------------------------------


def or_in_turns(
    alone: Plan | None,
    request: Request,
    candidates: Mapping[int, Model],
    cluster: Cluster,
    recompute: Sequence[Recompute],
) -> Plan | None:
    """The plan of one device, or of several where that step is shorter by more than a prediction can tell.

    `recompute`: the ways that are open, of which all stages take none or all.
    """
    again = [how == "full" for how in recompute if how in ("none", "full")]
    row = _in_turns(request, candidates, cluster, again)
    if alone is None or row is None:
        return alone or row
    assert alone.expected is not None
    assert row.expected is not None
    times = seconds_text(alone.expected.step_s), seconds_text(row.expected.step_s)
    both = f"one device would take {times[0]} a step, {row.axes.pp} in turns {times[1]}"
    best = row if CLOSE * row.expected.step_s < alone.expected.step_s else alone
    return best.model_copy(update={"why": (*best.why, both)})


def _in_turns(
    request: Request, candidates: Mapping[int, Model], cluster: Cluster, again: Sequence[bool]
) -> Plan | None:
    """The fastest that fits, of those as fast the one with fewest devices and stages."""
    known = cache(lambda count, cut: Blocks.of(*candidates[count], cut, request.optimizer))
    found, best_s = list[tuple[float, Plan]](), inf
    for least_s, plan, cut in sorted(_plans(request, candidates, cluster, again), key=itemgetter(0)):
        if least_s > CLOSE * best_s:
            break
        here, _ = _found(plan, known(plan.microbatches, cut), cluster)
        if here.fits:
            found.append((here.step_s, plan))
            best_s = min(best_s, here.step_s)
    close = [plan for step_s, plan in found if step_s <= CLOSE * best_s]
    if not close:
        return None
    plan = min(close, key=lambda plan: (plan.axes.pp, len(plan.stages), OF_SEVERAL.index(plan.weights)))
    return priced(plan, *candidates[plan.microbatches], cluster)


def _plans(
    request: Request, candidates: Mapping[int, Model], cluster: Cluster, again: Sequence[bool]
) -> Iterator[tuple[float, Plan, tuple[int, ...]]]:
    """Each with seconds that it takes at least, all devices computing, and its cut."""
    devices = len(cluster.devices)
    degrees: list[Weights] = [w for w in OF_SEVERAL if request.weights in (None, w)]
    wanted = request.schedule in (None, "gpipe") and not request.meshed and not cluster.unequal
    if not wanted or any(host_link(device) is None for device in cluster.devices):
        return
    sizes = [p for p in range(2, devices + 1) if request.stages == p or not (request.stages or devices % p)]
    for pp, (count, model) in product(sizes, candidates.items()):
        if model[0].form == "tape" and request.count in (None, count):
            seconds, cuts = UnitSeconds.of(model[1]), dict.fromkeys(_cut(*model, pp, most) for most in MOST)
            for cut in filter(None, cuts):
                made = _plan(request, model[0], cluster, (pp, count, cut))
                for weights, anew in product(degrees, again):
                    compute = seconds.recomputed() if anew else seconds
                    how = {"weights": weights, "recompute": "full" if anew else "none"}
                    yield count * float(compute.total.sum()) / pp, made.model_copy(update=how), cut


def _cut(graph: ModelGraph, profile: Profile, pp: int, most: int) -> tuple[int, ...]:
    """Blocks, as many for each device: of too many the lightest neighbours are one. None: ()."""
    seconds = UnitSeconds.of(profile)
    cut = list(block_ends(graph, seconds, max(most, pp)))
    while len(cut) > pp and (len(cut) - 1) % pp:
        work = seconds.merged(cut).total
        del cut[int(np.argmin(work[1:] + work[:-1])) + 1]
    return tuple(cut) if len(cut) > pp else ()


def _plan(
    request: Request, graph: ModelGraph, cluster: Cluster, how: tuple[int, int, tuple[int, ...]]
) -> Plan:
    pp, count, cut = how
    names = [cluster.devices[stage % pp].name for stage in range(len(cut) - 1)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=Axes(pp=pp),
        batch_size=request.batch_size,
        microbatches=count,
        schedule="gpipe",
        stages=stages_from_bounds(graph, cut, names),
        optimizer=request.optimizer,
        precision=request.precision,
        bn=request.bn,
    )


# -- the price -------------------------------------------------------------------------------------------


def priced(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """As planner/price.py's, of a pipeline whose weights come and go. Raises as that does."""
    bounds = plan.bounds(graph)
    blocks = Blocks.of(graph, profile, bounds, plan.optimizer)
    found, bound = _found(plan, blocks, cluster)
    whole = expected(found, plan.batch_size, bounds)
    # What is counted as the optimizer's are gradients on their way to it (`_on_device`).
    rows = (
        r.model_copy(update={"gradients_bytes": r.optimizer_bytes, "optimizer_bytes": 0})
        for r in whole.stages
    )
    limit = limited_by(found, Work.of(graph, UnitSeconds.of(profile)), graph, bounds)
    figures = whole.model_copy(
        update={
            "stages": tuple(rows),
            "limited_by": limit,
            "degrees": tuple(_degrees(plan, blocks, cluster)),
        }
    )
    why = (
        *_over(found),
        fullest_reason(found.memories, found.devices, found.layout.ranks),
        landing_reason(graph, plan),
        str(bound),
        host_reason(graph, found.layout, cluster, plan.optimizer),
    )
    return plan.model_copy(update={"expected": figures, "why": why})


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """The predicted Timeline of one step; what a stage waits for is in its actions."""
    blocks = Blocks.of(graph, profile, plan.bounds(graph), plan.optimizer)
    found, _ = _found(plan, blocks, cluster)
    return play(found.pipeline, found.bounds, found.costs)


def _over(found: Estimate) -> Iterator[str]:
    for rank in range(found.layout.axes.pp):
        held, room = found.held_bytes(rank), found.pipeline.room.devices[found.pipeline.ranks[rank]]
        if held > room.memory_bytes:
            yield f"{room.name} needs {bytes_text(held)} and has room for {bytes_text(room.memory_bytes)}"


def _degrees(plan: Plan, blocks: Blocks, cluster: Cluster) -> Iterator[Degree]:
    """What each would cost if all else were as in this plan."""
    degrees: tuple[Weights, ...] = ("resident", *OF_SEVERAL)
    for weights in degrees:
        here, bound = _found(plan.model_copy(update={"weights": weights}), blocks, cluster)
        yield Degree(
            weights=weights,
            microbatches=plan.microbatches,
            recompute=plan.recompute != "none",
            bound=bound,
            step_s=here.step_s,
            peak_bytes=here.peak_bytes,
            fits=here.fits,
        )


def _found(plan: Plan, blocks: Blocks, cluster: Cluster) -> tuple[Estimate, Bound]:
    """Each stage is a unit."""
    check_enough(plan.batch_size, plan.microbatches)
    layout = Layout.of_plan(plan)
    case = _case(plan, layout, blocks, cluster)
    places, stages = tuple(rank_named(stage.device, cluster) for stage in plan.stages), layout.stages
    pipeline = Pipeline(layout, cluster, rooms(cluster), places, ((case,),) * stages, (cluster,) * stages)
    found = estimate(pipeline, range(stages + 1), (0,) * stages)
    return found, _bound(layout, case, blocks.held, cluster)


def _case(plan: Plan, layout: Layout, blocks: Blocks, cluster: Cluster) -> Case:
    whole = replace(blocks.whole, microbatches=plan.microbatches)
    if any(plan.recompute_of(stage) != "none" for stage in range(layout.stages)):
        whole = whole.anew()
    if not layout.hosted:
        return whole
    host, after_s = Host.of(cluster, layout.axes.pp), np.zeros(layout.stages)
    for own in _own(layout):
        after_s[own] = blocks.updated[own].sum() / host.bytes_per_s
    case = replace(whole, ranges=_on_device(whole, blocks.held, layout), after_s=np.diag(after_s, 1))
    return case.lasting(_waiting(whole.seconds, blocks.held, layout, host))


def _own(layout: Layout) -> list[list[int]]:
    """The stages of each rank."""
    return [list(layout.stages_on(rank)) for rank in range(layout.axes.pp)]


def _waiting(compute: UnitSeconds, held: Held, layout: Layout, host: Host) -> UnitSeconds:
    """With what each device waits for of its own stages."""
    how = streamed if layout.weights == "host" else staying
    forward, given = np.zeros_like(compute.forward), np.zeros_like(compute.given)
    for own in _own(layout):
        here = UnitSeconds(*(seconds[own] for seconds in (compute.forward, compute.given, compute.weight)))
        weights, gradients = (size[own].tolist() for size in held)
        late = how(here, range(len(own) + 1), weights, gradients, layout, host)
        forward[own], given[own] = late.forward, late.given
    return UnitSeconds(forward, given, compute.weight)


def _on_device(whole: Case, held: Held, layout: Layout) -> Ranges:
    """Bytes of each stage, of which those that its device has for all of them in turn are even shares.

    Gradients stand where the optimizer's bytes do, which are there all the time.
    """
    ranges, (weights, gradients) = whole.ranges, (np.zeros_like(size) for size in held)
    kept, landing = (np.zeros_like(size) for size in held)
    for flow in whole.flows:
        if flow.step:
            kept[flow.producer] += flow.size_bytes
            landing[flow.producer] += flow.size_bytes * flow.gradient
    for own in _own(layout):
        alone, graded = (held[0] - kept)[own], (held[1] - landing)[own]
        places = two_places(alone) if layout.weights == "host" else int(alone.sum())
        weights[own] = _shares(places + int(kept[own].sum()), len(own))
        pair = max((graded + np.append(graded[1:], 0)).tolist())
        gradients[own] = _shares(pair + int(landing[own].sum()), len(own))
    nothing, backward = np.zeros_like(ranges.saved), ranges.backward - ranges.gradients
    return replace(
        ranges,
        weights=np.diag(weights, 1) + ranges.buffers,
        optimizer=np.diag(gradients, 1),
        backward=backward,
        first_backward=backward,
        **dict.fromkeys(("gradients", "master", "update", "again"), nothing),
    )


def _shares(total: int, count: int) -> list[int]:
    return [total * (at + 1) // count - total * at // count for at in range(count)]


def _bound(layout: Layout, case: Case, held: Held, cluster: Cluster) -> Bound:
    """Of the device that takes longest with each."""
    link, again = Host.of(cluster, layout.axes.pp).link, 1 if case.recompute == "none" else 2
    costs = np.array([again * c.forward_s + c.backward_s for c in case.base.units])
    come, go = {"host": (2, 1), "host-optimizer": (1, 1)}.get(layout.weights, (0, 0))
    weights, gradients = (max(int(size[own].sum()) for own in _own(layout)) for size in held)
    return Bound(
        compute_s=layout.microbatches * max(float(costs[own].sum()) for own in _own(layout)),
        to_device_s=come * link.seconds(weights),
        to_host_s=go * link.seconds(gradients),
        optimizer_s=0.0 if case.after_s is None else float(case.after_s.max()),
    )
