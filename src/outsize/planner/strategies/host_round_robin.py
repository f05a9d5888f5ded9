"""Problem: weights are on the hosts of p devices. Which device has which stage, and what does a step cost?

    stages    v p blocks (offload/host_traffic.py) of about equal work, where devices differ in proportion to
              their speeds, stage s on device s mod p, breadth first: gpipe with several stages on a rank
              (schedules/families.py; Lamy-Poirier, arXiv 2211.05953)
    seconds   the schedule is played with its messages and with each device's copies over its own link
              (evaluate/hosted_step.py)
    bytes     those of the pipeline, and for weights and gradients two of the device's own stages (all weights
              where they stay), divided evenly over them, so that they add up to what it holds; weights that
              several stages use stay with their owner. Where inputs of stages go to the host, the device has
              those of a few microbatches, and m - p messages that wait for the next stage, whose device is at
              an earlier one
    choice    p (divisors of the number of devices), v, microbatches, degree, recompute of all or nothing:
              those whose bound is below the best step and whose sums of bytes fit are priced, and the fastest
              that fits is taken

No other order is tried: stages are a chain, so a queue of them gives them out in turns, too (decision 263).

Deviations: gradients count from the first forward on; of devices that differ the first p are taken, and all
have the slowest link. Complexity: choices x
O(actions). Oracle:
tests/unit/planner/strategies/test_host_round_robin.py adds bytes and seconds up by hand; such plans run in
tests/dist/test_hosted_processes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from math import inf
from operator import itemgetter
from typing import Final, final

import numpy as np

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import DevicesInTurns, HostRoofline, MemoryShortage
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.offload import Bound, Degree
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.planner.bounds.best_first import BestFirst, Bounded
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.coarsening import coarse_graph, coarse_profile
from outsize.planner.costs.device_scaling import on_kind
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.costs.stage_edges import edges_of
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate, check_enough, expected
from outsize.planner.evaluate.hosted_step import HostedStep
from outsize.planner.evaluate.plan_findings import fullest_device
from outsize.planner.evaluate.ranking import CLOSE
from outsize.planner.layout.layout import Layout, rank_named
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import Bytes, RangeTables, bytes_of_units
from outsize.planner.memory.sharded import single_units
from outsize.planner.offload.boundary_traffic import BoundaryTraffic, in_lists, waiting_reasons
from outsize.planner.offload.host_traffic import (
    BLOCKS,
    Host,
    block_ends,
    host_reason,
    host_states,
    two_places,
    updated,
)
from outsize.planner.partition.stage_prices import ChainCut, Pipeline, PricedModel
from outsize.planner.simulation.host_copies import CopyCosts
from outsize.policies.activations import KEEP, RECOMPUTE, WHOLE_STAGE, Recompute, activation_policy
from outsize.policies.weights import DEGREES, HOST, HOSTED, Weights, weight_policy
from outsize.schedules.families import LAYER_BY_LAYER

# These numbers of stages of all devices are tried.
MOST: Final = (16, 32, BLOCKS)
# Of devices that differ a stage has so many blocks in the mean, since one block is no proportion.
PARTS: Final = (8, 4, 2)
# What all stages of a plan do with their activations.
OPTIONS: Final = (KEEP.name, RECOMPUTE.name)
Model = tuple[ModelGraph, Profile]
WeightAndGradientBytes = tuple[Bytes, Bytes]
"""Holds weights and gradients of each stage, shape (stages,)."""


@final
@dataclass(frozen=True, eq=False)
class _Turns:
    """Knows the costs of a model where `pp` devices of the cluster take its stages in turns."""

    graph: ModelGraph
    profile: Profile
    cluster: Cluster
    pp: int

    @cached_property
    def kinds(self) -> tuple[UnitSeconds, ...]:
        """Returns the seconds of units on each device."""
        devices = self.cluster.devices
        known = {d.kind: on_kind(self.graph, self.profile, devices[0], d) for d in devices[: self.pp]}
        return tuple(known[device.kind] for device in devices[: self.pp])

    @property
    def fastest_s(self) -> float:
        """Returns the seconds of a microbatch on the fastest device."""
        return min(float(seconds.total.sum()) for seconds in self.kinds)

    @property
    def alike(self) -> bool:
        """Returns whether all devices are of one kind."""
        return all(seconds is self.kinds[0] for seconds in self.kinds)

    def seconds(self, cut: Sequence[int]) -> UnitSeconds:
        """Returns the seconds of units, each on the device that has its stage."""
        if self.alike:
            return self.kinds[0]
        turn = np.repeat(np.arange(len(cut) - 1) % self.pp, np.diff(cut))
        rows = np.array([seconds.rows() for seconds in self.kinds])
        return UnitSeconds.from_rows(rows[turn, np.arange(cut[-1])].tolist())

    def in_stages(self, cut: Sequence[int], optimizer: str) -> PricedModel:
        """Returns the model with its stages as units; `cut` has the first unit of each, then their number."""
        profile = self.profile if self.alike else self.seconds(cut).written(self.profile)
        return PricedModel.of(coarse_graph(self.graph, cut), coarse_profile(profile, cut), 1, optimizer)

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """Yields cuts of several numbers of stages, the same number for each device."""
        fastest = min(self.kinds, key=lambda seconds: float(seconds.total.sum()))
        if self.alike:
            for most in MOST:
                yield _cut(block_ends(self.graph, fastest, max(most, self.pp)), fastest, self.pp)
            return
        ends = block_ends(self.graph, fastest, BLOCKS)
        speeds = [1 / float(seconds.total.sum()) for seconds in self.kinds]
        for parts in PARTS:
            yield _in_proportion(ends, fastest, speeds * ((len(ends) - 1) // (parts * self.pp)))


def _copied_bytes(whole: PricedModel) -> WeightAndGradientBytes:
    """Returns what comes from the host, and what goes there, of each stage."""
    ranges = whole.ranges
    weights = single_units(ranges.weights - ranges.buffers - ranges.cast_alone)
    return weights, single_units(ranges.gradients)


# Plans of the same cut differ in their degrees. The last models stay alive.
@lru_cache(maxsize=128)
def _updated_bytes(whole: PricedModel, optimizer: str) -> Seconds:
    """Returns the bytes that the optimizer's step moves of each stage."""
    return updated(whole.graph, optimizer_bytes(optimizer))


# -- the choice ------------------------------------------------------------------------------------------


def or_round_robin(
    on_one_device: Callable[[], Plan | None],
    request: PlanRequest,
    models: Mapping[int, Model],
    cluster: Cluster,
    recompute: Sequence[Recompute],
) -> Plan | None:
    """Returns the plan of one device, or of several where that step is shorter by more than a prediction's
    error; that of one device is not made where computing alone takes it longer.

    `recompute`: the open options; all stages take the same one.
    """
    recomputes = [activation_policy(option).recomputes for option in recompute if option in WHOLE_STAGE]
    several = _round_robin(request, models, cluster, recomputes)
    if several is None or several.expected is None:
        return on_one_device()
    step_s, least_s = several.expected.step_s, _one_device_least_s(request, models, cluster)
    comparison = DevicesInTurns(
        one_device_step_s=least_s, is_bound=True, devices=several.axes.pp, step_s=step_s
    )
    best = several
    if CLOSE * step_s >= least_s:
        if (one_device := on_one_device()) is None or one_device.expected is None:
            return several
        one_device_s = one_device.expected.step_s
        comparison = comparison.model_copy(update={"one_device_step_s": one_device_s, "is_bound": False})
        best = several if CLOSE * step_s < one_device_s else one_device
    return best.model_copy(update={"why": (*best.why, comparison)})


def _one_device_least_s(request: PlanRequest, models: Mapping[int, Model], cluster: Cluster) -> float:
    """Returns the seconds in which the fastest device computes a step, in the best number of microbatches."""
    counts = [count for count in models if request.total_microbatches in (None, count)]
    devices = len(cluster.devices)
    return min(count * _Turns(*models[count], cluster, devices).fastest_s for count in counts)


def _round_robin(
    request: PlanRequest, models: Mapping[int, Model], cluster: Cluster, recomputes: Sequence[bool]
) -> Plan | None:
    """Returns the fastest that fits; of those as fast, the one with fewest devices and stages.

    A plan's bound is its compute, then its step without copies; only what may win is played with them.
    """
    turns = cache(lambda count, pp: _Turns(*models[count], cluster, pp))
    known = cache(lambda count, pp, bounds: turns(count, pp).in_stages(bounds, request.optimizer))
    planned = cache(lambda pp, count, bounds: _plan(request, models[count][0], cluster, pp, count, bounds))
    bounded = sorted(_layouts_and_cuts(request, models, cluster, recomputes), key=itemgetter(0))
    least_s, choices = [s for s, _, _ in bounded], [(layout, cut) for _, layout, cut in bounded]
    unplayed, fitting, best_s = dict[int, Candidate](), list[tuple[int, float]](), inf

    def plan_at(place: int) -> Plan:
        layout, cut = choices[place]
        changes = {"weights": layout.weights, "recompute": OPTIONS[cut.choices[0]]}
        return planned(layout.axes.pp, layout.microbatches, cut.bounds).model_copy(update=changes)

    def stages_at(place: int) -> PricedModel:
        layout, cut = choices[place]
        return known(layout.microbatches, layout.axes.pp, cut.bounds)

    def without_copies(choice: Bounded, _: float) -> Bounded:
        place = choice.number
        candidate = _without_copies(plan_at(place), stages_at(place), cluster)
        if not candidate.fits:
            return Bounded(inf, True, place)
        unplayed[place] = candidate
        # The host's optimizer may be beside all of it.
        return Bounded(max(choice.least_s, candidate.pipeline_s), True, place)

    queue = BestFirst(least_s, without_copies)
    while queue.least_s < inf and queue.least_s <= CLOSE * best_s:
        if (least := queue.pop()) is not None:
            place = least.number
            played = _with_copies(unplayed.pop(place), stages_at(place), cluster, request.optimizer)
            fitting.append((place, played.step_s))
            best_s = min(best_s, played.step_s)
    close = [plan_at(place) for place, step_s in sorted(fitting) if step_s <= CLOSE * best_s]
    if not close:
        return None
    plan = min(close, key=lambda plan: (plan.axes.pp, len(plan.stages), HOSTED.index(plan.weights)))
    return priced(plan, *models[plan.microbatches], cluster)


def _layouts_and_cuts(
    request: PlanRequest, models: Mapping[int, Model], cluster: Cluster, recomputes: Sequence[bool]
) -> Iterator[tuple[float, Layout, ChainCut]]:
    """Yields the layouts that the request allows, each with a lower bound of its seconds and a cut, whose
    stages are in one of the OPTIONS: all devices compute, then their hosts update an equal share.
    """
    devices = len(cluster.devices)
    degrees: list[Weights] = [w for w in HOSTED if request.weights in (None, w)]
    applicable = request.schedule in (None, LAYER_BY_LAYER.name) and not request.has_group_axes
    if not applicable or any(host_link(device) is None for device in cluster.devices):
        return
    sizes = [p for p in range(2, devices + 1) if request.stages == p or not (request.stages or devices % p)]
    optimizer = optimizer_bytes(request.optimizer)
    moved_bytes = cache(lambda count: float(updated(models[count][0], optimizer).sum()))
    least_bytes = cache(lambda count: _least_bytes(*models[count], count, request.optimizer))
    room_bytes = max(device.memory_bytes for device in with_usable_memory(cluster).devices)
    for pp, (count, (graph, _)) in product(sizes, models.items()):
        if graph.form == "tape" and request.total_microbatches in (None, count):
            turns = _Turns(*models[count], cluster, pp)
            update_s = moved_bytes(count) / pp / Host.of(cluster, pp).bytes_per_s
            cuts = dict.fromkeys(turns.cuts())
            for cut, weights, recomputed in product(filter(None, cuts), degrees, recomputes):
                if not weight_policy(weights).allows(OPTIONS[recomputed]):
                    continue
                loaded_bytes, kept_bytes = least_bytes(count)
                held_bytes = loaded_bytes if weight_policy(weights).stays_loaded else 0
                if held_bytes + (0 if recomputed else kept_bytes) > pp * room_bytes:
                    continue
                compute_s, filled_s = _compute_s(turns.seconds(cut), cut, pp, count, recomputed=recomputed)
                least_s = max(compute_s, (filled_s if optimizer.in_parts else compute_s) + update_s)
                stages = len(cut) - 1
                layout = Layout(Axes(pp=pp), stages, LAYER_BY_LAYER.name, count, count, weights)
                yield least_s, layout, ChainCut(cut, (int(recomputed),) * stages)


def _compute_s(
    seconds: UnitSeconds, cut: Sequence[int], pp: int, count: int, *, recomputed: bool
) -> tuple[float, float]:
    """Returns lower bounds of what the devices compute, and of that until the first gradients leave.

    Each device waits for the stages before its first one in both directions, and both passes are as long as a
    microbatch through all stages and the others through the longest stage. Gradients leave behind all
    forwards.
    """
    stages = seconds.merged(cut)
    stages = stages.recomputed() if recomputed else stages
    waited_s = np.cumsum(stages.total[:pp]) - stages.total[:pp]
    own_s = stages.total.reshape(-1, pp).sum(axis=0)
    passes = (stages.forward, stages.backward)
    forward_s, backward_s = (float(times.sum() + (count - 1) * times.max()) for times in passes)
    return max(forward_s + backward_s, float((count * own_s + waited_s).max())), forward_s


def _least_bytes(graph: ModelGraph, profile: Profile, count: int, optimizer: str) -> tuple[int, int]:
    """Returns what all devices hold together, whatever the cut: of weights that stay, and of activations that
    wait for the end of the forwards, which do all microbatches of a stage before the next one.
    """
    sizes = bytes_of_units(graph, profile, optimizer_bytes(optimizer))
    moved = sizes["weights"] - sizes["buffers"] - sizes["cast_alone"]
    return int(moved.sum()), count * int(sizes["saved"].sum())


def _cut(ends: Sequence[int], seconds: UnitSeconds, pp: int) -> tuple[int, ...]:
    """Returns blocks, the same number for each device: the lightest neighbours are merged; () where that
    fails.
    """
    cut = list(ends)
    while len(cut) > pp and (len(cut) - 1) % pp:
        work = seconds.merged(cut).total
        del cut[int(np.argmin(work[1:] + work[:-1])) + 1]
    return tuple(cut) if len(cut) > pp else ()


def _in_proportion(ends: Sequence[int], seconds: UnitSeconds, speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns stages of as much work as the devices are fast that have them, between these blocks; () where
    these are too few.
    """
    if len(ends) - 1 < len(speeds) or not speeds:
        return ()
    done = np.concatenate(([0.0], np.cumsum(seconds.merged(ends).total)))
    wanted, cut = done[-1] * np.cumsum(speeds) / sum(speeds), [0]
    for stage, upto_s in enumerate(wanted[:-1]):
        left = len(speeds) - stage - 1
        nearest = int(np.argmin(np.abs(done - upto_s)))
        cut.append(min(max(nearest, cut[-1] + 1), len(ends) - 1 - left))
    return tuple(ends[at] for at in (*cut, len(ends) - 1))


def _plan(
    request: PlanRequest, graph: ModelGraph, cluster: Cluster, pp: int, count: int, cut: tuple[int, ...]
) -> Plan:
    names = [cluster.devices[stage % pp].name for stage in range(len(cut) - 1)]
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=Axes(pp=pp),
        batch_size=request.batch_size,
        microbatches=count,
        schedule=LAYER_BY_LAYER.name,
        stages=stages_from_bounds(graph, cut, names),
        optimizer=request.optimizer,
        precision=request.precision,
        loss_pieces=request.loss_pieces or 1,
        module_pieces=request.module_pieces or 1,
        kernels=request.kernels,
        bn=request.bn,
    )


# -- the price -------------------------------------------------------------------------------------------


def priced(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """Prices a pipeline whose weights are streamed, as planner/search/evaluate_plan.py does; raises as that
    does.
    """
    bounds = plan.bounds(graph)
    stages = _Turns(graph, profile, cluster, plan.axes.pp).in_stages(bounds, plan.optimizer)
    candidate, bound = _estimate_and_bound(plan, stages, cluster)
    whole = expected(candidate, plan.batch_size, bounds)
    # Bytes counted as the optimizer's are gradients on their way to it (`_on_device`).
    rows = (
        r.model_copy(update={"gradients_bytes": r.optimizer_bytes, "optimizer_bytes": 0})
        for r in whole.stages
    )
    limit = limited_by(candidate, PrefixTimes.of(graph, UnitSeconds.of(profile)), graph, bounds)
    figures = whole.model_copy(
        update={
            "stages": tuple(rows),
            "limited_by": limit,
            "degrees": tuple(_degrees(plan, stages, cluster, (candidate, bound))),
        }
    )
    why = (
        *device_shortages(candidate),
        fullest_device(candidate.memories, candidate.devices, candidate.layout.ranks),
        host_states(graph, plan),
        *waiting_reasons(graph, plan),
        HostRoofline(bound=bound),
        host_reason(graph, candidate.layout, cluster, plan.optimizer),
    )
    return plan.model_copy(update={"expected": figures, "why": why})


def copied(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> tuple[Degree, ...]:
    """Returns what each degree would cost a plan of other weights on the same devices in as many
    microbatches; nothing where the model has too few blocks for them.
    """
    turns, pp = _Turns(graph, profile, cluster, plan.axes.pp), plan.axes.pp
    *_, cut = turns.cuts()
    if not cut:
        return ()
    first = {rank: stage.device for stage, rank in zip(plan.stages[::-1], plan.ranks[::-1], strict=True)}
    names = [first[stage % pp] for stage in range(len(cut) - 1)]
    again = activation_policy(plan.recompute).recomputes
    changes = {
        "weights": HOST.name,
        "schedule": LAYER_BY_LAYER.name,
        "actions": (),
        "stages": stages_from_bounds(graph, cut, names),
        "recompute": RECOMPUTE.name if again else KEEP.name,
    }
    other, stages = plan.model_copy(update=changes), turns.in_stages(cut, plan.optimizer)
    return tuple(_degrees(other, stages, cluster, _estimate_and_bound(other, stages, cluster)))


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """Returns the predicted Timeline of one step, with its copies."""
    turns = _Turns(graph, profile, cluster, plan.axes.pp)
    stages = turns.in_stages(plan.bounds(graph), plan.optimizer)
    candidate, _ = _estimate_and_bound(plan, stages, cluster)
    return _hosted_step(candidate, stages, cluster, plan.optimizer).timeline()


def device_shortages(candidate: Candidate) -> Iterator[MemoryShortage]:
    """Yields devices whose stages together need more than their usable memory."""
    for rank in range(candidate.layout.axes.pp):
        held, room = (
            candidate.held_bytes(rank),
            candidate.pipeline.room.devices[candidate.pipeline.ranks[rank]],
        )
        if held > room.memory_bytes:
            yield MemoryShortage(stage=None, device=room.name, needs_bytes=held, room_bytes=room.memory_bytes)


def _degrees(
    plan: Plan, stages: PricedModel, cluster: Cluster, own: tuple[Candidate, Bound]
) -> Iterator[Degree]:
    """Yields what each degree would cost if all else were as in this plan, whose `own` price is known."""
    for weights in DEGREES:
        recompute = weight_policy(weights).activations or plan.recompute
        other = plan.model_copy(update={"weights": weights, "recompute": recompute})
        is_own = weights == plan.weights
        candidate, bound = own if is_own else _estimate_and_bound(other, stages, cluster)
        yield Degree(
            weights=weights,
            microbatches=plan.microbatches,
            recompute=activation_policy(recompute).recomputes,
            bound=bound,
            step_s=candidate.step_s,
            peak_bytes=candidate.peak_bytes,
            fits=candidate.fits,
        )


def _estimate_and_bound(plan: Plan, stages: PricedModel, cluster: Cluster) -> tuple[Candidate, Bound]:
    """Prices a plan; each stage is a unit of `stages`."""
    check_enough(plan.batch_size, plan.microbatches)
    candidate = _with_copies(_without_copies(plan, stages, cluster), stages, cluster, plan.optimizer)
    return candidate, _bound(candidate.layout, candidate.cases[0], stages, cluster)


def _without_copies(plan: Plan, whole: PricedModel, cluster: Cluster) -> Candidate:
    """Prices a plan whose copies take no time: no step with them is shorter."""
    layout = Layout.of_plan(plan)
    case = _case(plan, layout, whole, cluster)
    places, stages = tuple(rank_named(stage.device, cluster) for stage in plan.stages), layout.stages
    room, collectives = with_usable_memory(cluster), WeightCollectives(layout, cluster)
    bounds = tuple(range(stages + 1))  # Each stage is one piece.
    pipeline = Pipeline(layout, cluster, room, places, ((case,),) * stages, (collectives,) * stages, bounds)
    return Candidate.of(pipeline, bounds, (0,) * stages)


def _with_copies(candidate: Candidate, whole: PricedModel, cluster: Cluster, optimizer: str) -> Candidate:
    """Returns the estimate with the seconds of the step that is played with its copies."""
    if not candidate.layout.hosted:
        return candidate
    return replace(candidate, hosted=_hosted_step(candidate, whole, cluster, optimizer))


def _hosted_step(candidate: Candidate, whole: PricedModel, cluster: Cluster, optimizer: str) -> HostedStep:
    layout, pipeline = candidate.layout, candidate.pipeline
    host = Host.of(cluster, layout.axes.pp)
    weights, gradients = (size.tolist() for size in _copied_bytes(whole))
    values = _values_moved(whole, layout)
    copies = CopyCosts(
        host.link,
        host.bytes_per_s,
        weights,
        gradients,
        fetched=in_lists(values.comes),
        offloaded=in_lists(values.goes),
        cast=whole.graph.cast_alone_bytes,
    )
    edges = edges_of(pipeline.case.flows, candidate.bounds)
    return HostedStep(
        layout,
        candidate.costs,
        copies,
        edges,
        pipeline.link,
        updates=_updated_bytes(whole, optimizer).astype(int).tolist(),
        in_parts=optimizer_bytes(optimizer).in_parts,
    )


def _case(plan: Plan, layout: Layout, whole: PricedModel, cluster: Cluster) -> PricedModel:
    moved_bytes, held = _updated_bytes(whole, plan.optimizer), _copied_bytes(whole)
    whole = replace(whole, microbatches=plan.microbatches)
    if not plan.keeps_activations:
        whole = whole.fully_recomputed()
    if not layout.hosted:
        return whole
    host, after_s = Host.of(cluster, layout.axes.pp), np.zeros(layout.stages)
    for own in _stages_of_each_rank(layout):
        after_s[own] = moved_bytes[own].sum() / host.bytes_per_s
    return replace(whole, ranges=_on_device(whole, held, layout), after_s=np.diag(after_s, 1))


def _values_moved(whole: PricedModel, layout: Layout) -> BoundaryTraffic:
    """Returns what of the values between stages moves between the devices and their hosts."""
    return BoundaryTraffic.of_turns(whole.graph, layout.ranks)


def _stages_of_each_rank(layout: Layout) -> list[list[int]]:
    """Returns the stages of each rank."""
    return [list(layout.stages_on(rank)) for rank in range(layout.axes.pp)]


def _on_device(whole: PricedModel, held: WeightAndGradientBytes, layout: Layout) -> RangeTables:
    """Returns the bytes of each stage; what a device holds for all of them in turn is divided evenly.

    Gradients take the place of the optimizer's bytes, which exist all the time. Recomputed stages drop what
    they have sent (run/stage/stage.py): an output exists while it is made, and one is on its way.
    """
    ranges, stay = whole.ranges, layout.weight_policy.stays_loaded
    weights, gradients = (np.zeros_like(size) for size in held)
    tied_weights, tied_gradients = (np.zeros_like(size) for size in held)
    for flow in whole.flows:
        if flow.step:
            tied_weights[flow.producer] += flow.size_bytes
            tied_gradients[flow.producer] += flow.size_bytes * flow.gradient
    for own in _stages_of_each_rank(layout):
        own_weights, own_gradients = (held[0] - tied_weights)[own], (held[1] - tied_gradients)[own]
        places = int(own_weights.sum()) if stay else two_places(own_weights)
        weights[own] = _shares(places + int(tied_weights[own].sum()), len(own))
        pair = max((own_gradients + np.append(own_gradients[1:], 0)).tolist())
        gradients[own] = _shares(pair + int(tied_gradients[own].sum()), len(own))
    nothing, backward = np.zeros_like(ranges.saved), ranges.backward - ranges.gradients
    sent, forward, away = ranges.sent, ranges.forward, ranges.saved_boundary
    if whole.activation_policy.recomputes:
        sent, backward, forward = (
            nothing,
            backward + sent,
            forward + np.diag(_largest_sent(ranges, layout), 1),
        )
    if layout.weight_policy.values_on_host:
        moved, waiting = _values_moved(whole, layout), max(0, layout.microbatches - layout.axes.pp)
        away = ranges.received - np.diag(moved.small, 1)
        forward = forward + np.diag(moved.moving[0], 1) + waiting * ranges.sent
        backward = backward + np.diag(moved.moving[1], 1) + waiting * ranges.gradient_out
    casts = single_units(ranges.casts - ranges.cast_alone).copy()
    if whole.activation_policy.recomputes and not stay:  # They leave with the weights.
        for own in _stages_of_each_rank(layout):
            casts[own] = _shares(two_places(casts[own]), len(own))
    return replace(
        ranges,
        weights=np.diag(weights, 1) + ranges.buffers - ranges.casts + np.diag(casts, 1),
        saved_boundary=away,
        casts=np.diag(casts, 1),
        optimizer=np.diag(gradients, 1),
        sent=sent,
        forward=forward,
        backward=backward,
        first_backward=backward,
        **dict.fromkeys(("gradients", "master", "update", "saved_sent"), nothing),
    )


def _largest_sent(ranges: RangeTables, layout: Layout) -> Bytes:
    """Returns for each stage the largest output of its rank's stages."""
    sent, largest = single_units(ranges.sent), np.zeros(layout.stages, np.int64)
    for own in _stages_of_each_rank(layout):
        largest[own] = sent[own].max()
    return largest


def _shares(total: int, count: int) -> list[int]:
    return [total * (at + 1) // count - total * at // count for at in range(count)]


def _bound(layout: Layout, case: PricedModel, stages: PricedModel, cluster: Cluster) -> Bound:
    """Returns the bound of the device that takes longest with each of the four."""
    held, moved, m = _copied_bytes(stages), _values_moved(stages, layout), layout.microbatches
    values = layout.weight_policy.values_on_host
    rows = [moved.moved_by(own) if values else (0, 0) for own in _stages_of_each_rank(layout)]
    comes, goes = (m * max(row[way] for row in rows) for way in (0, 1))
    link, compute_s = Host.of(cluster, layout.axes.pp).link, case.activation_policy.compute_s
    costs = np.array([compute_s(c.forward_s, c.backward_s) for c in case.base.units])
    copies_in, copies_out = layout.weight_policy.copies(1)  # Layer by layer.
    weights, gradients = (max(int(size[own].sum()) for own in _stages_of_each_rank(layout)) for size in held)
    return Bound(
        compute_s=layout.microbatches * max(float(costs[own].sum()) for own in _stages_of_each_rank(layout)),
        to_device_s=copies_in * link.seconds(weights) + link.seconds(comes),
        to_host_s=copies_out * link.seconds(gradients) + link.seconds(goes),
        optimizer_s=0.0 if case.after_s is None else float(case.after_s.max()),
    )
