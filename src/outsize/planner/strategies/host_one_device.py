"""Problem: weights are copied to one device stage by stage. Which stages, and what does such a plan cost?

    degree    of ir/offload.py, from least to most; the fastest that fits, by the predicted step
    stages    the blocks of offload/host_traffic.py: neighbouring units of about equal work, 64 at most
    schedule  gpipe, layer by layer; naive where boundaries of all microbatches do not fit besides two stages
    seconds   the search compares those of offload/host_traffic.py; the stages' own are played with their
              copies (evaluate/hosted_step.py)
    bytes     of the device, divided evenly over its stages, so that they add up to what it holds
    bound     max(compute, copies to the device, copies to the host, the optimizer on the host)

No order of these four beats the bound; the plan says all four, of each degree. Gradient offload is no degree
of its own: layer by layer gradients leave anyway when their stage's last backward ends, and one microbatch at
a time they stay until the last one. Complexity: that of offload/host_traffic.py. Oracle:
tests/unit/planner/strategies/test_host_one_device.py adds the four up by hand, and a plan is priced as it was
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import Bottleneck, FullestDevice, HostRoofline, SlowestStage
from outsize.ir.formatting import bytes_text, microbatches_text
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.offload import Bound, Degree
from outsize.ir.plan import Expected, Plan, StageFigures, stages_from_bounds, unsupported
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.coarsening import coarse_graph, coarse_profile
from outsize.planner.costs.stage_edges import Edges
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate, check_enough, expected
from outsize.planner.evaluate.hosted_step import HostedStep
from outsize.planner.evaluate.plan_findings import fullest_device, shortages
from outsize.planner.evaluate.played_step import stage_cost
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.fit.nearest import parts_text, recomputed_text, stage_needs_text
from outsize.planner.layout.layout import Layout, rank_named
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.offload.boundary_traffic import in_lists, waiting_reasons
from outsize.planner.offload.disk import spill_reasons, with_disk
from outsize.planner.offload.host_traffic import (
    BLOCKS,
    Host,
    StreamedBlocks,
    block_ends,
    host_states,
    layerwise,
)
from outsize.planner.simulation.host_copies import CopyCosts
from outsize.planner.simulation.simulate import StageCost
from outsize.policies.activations import KEEP, RECOMPUTE, Recompute, activation_policy
from outsize.policies.weights import DEGREES, RESIDENT, weight_policy
from outsize.schedules.families import DEFAULT, LAYER_BY_LAYER, SEQUENTIAL, families, family_of

# These numbers of blocks are tried; the fewest within NEAR of the fastest are taken, because each is a stage
# to read.
MOST: Final = (16, 32, BLOCKS)
NEAR: Final = 1.02
_BYTES: Final = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")


def check_hosted(request: PlanRequest, graphs: Sequence[ModelGraph], cluster: Cluster) -> None:
    """Raises BadOption where the degree asked for makes no sense, or runs only in another setting."""
    if any(host_link(device) is None for device in cluster.devices):
        raise BadOption(
            "weights on the host want a device with a memory of its own",
            numbers=f"cluster {cluster.name!r} computes in the host's",
            next_step="--cluster 1x12GB, which runs on a CPU as well",
        )
    modules = next((graph.model for graph in graphs if graph.form == "modules"), None)
    if modules is not None:
        raise BadOption(
            f"{modules} runs by modules, in its own Python, and its weights stay where they are",
            next_step=f"leave out weights={request.weights!r}",
        )
    axes, weights = request.mesh(request.stages or 1), request.weights or RESIDENT.name
    if unsupported(axes, weights):
        policy = weight_policy(weights)
        ranks = "a pipeline with one device a rank" if policy.on_host else "one device"
        raise BadOption(
            f"{policy.text}: that is for {ranks}",
            numbers=f"asked for: {', '.join(f'{name} {size}' for name, size in axes.used.items())}",
            next_step=f"leave these out, or weights={weights!r}",
        )
    allowed = (f for f in families() if (f.layer_by_layer if axes.pp > 1 else f.on_host_as))
    orders = [f.name for f in sorted(allowed, key=lambda f: (not f.layer_by_layer, f.preference))]
    if request.schedule not in (None, *orders):
        raise BadOption(
            f"schedule {request.schedule!r} is none in which weights come and go",
            numbers=f"pp {axes.pp}, weights {weights!r}: {', '.join(orders)}",
            next_step=f"--schedule {LAYER_BY_LAYER.name}",
        )


def too_small(layouts: Iterable[Layout], pricing: Pricing, recompute: Recompute) -> NoFeasiblePlan:
    """Returns the error where no requested degree fits: what the one that fills the device least lacks."""
    tried = [pipeline for layout in layouts if (pipeline := pricing.pipeline(layout, (recompute,)))]
    priced = [Candidate.of(pipeline, (0, pipeline.case.units), (0,)) for pipeline in tried]
    smallest = min(priced, key=lambda candidate: candidate.peak_bytes)
    (memory,), policy, m = smallest.memories, smallest.layout.weight_policy, smallest.layout.microbatches
    name, size = memory.largest[0]
    steps = [f"--microbatches {2 * m}"] * (smallest.graph.batch_size > 1)
    steps += [f"--weights {policy.leaner}"] if policy.leaner else []
    return NoFeasiblePlan(
        f"{policy.text}, {microbatches_text(m)}{recomputed_text(activation_policy(recompute))}: "
        + stage_needs_text(0, memory, smallest.pipeline.room.devices[0]),
        numbers=f"{parts_text(memory)}; the largest unit there is {name} with {bytes_text(size)}",
        next_step=", or ".join([*steps, "devices with more memory"]),
    )


def in_blocks(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """Divides the one stage of a plan with weights on the host into a stage for each block.

    `profile` is of the cluster's first device.
    """
    cuts = dict.fromkeys(block_ends(graph, UnitSeconds.of(profile), most) for most in MOST)
    made = [_cut(plan, graph, cut) for cut in cuts]
    costs = [_estimate_and_bound(stages_plan, graph, profile, cluster) for stages_plan in made]
    fitting = [at for at, (candidate, _) in enumerate(costs) if candidate.fits] or [len(cuts) - 1]
    least_s = min(costs[at][0].step_s for at in fitting)
    chosen = next(at for at in fitting if costs[at][0].step_s <= NEAR * least_s)
    return _shown(made[chosen], plan, graph, *costs[chosen])


def fastest(
    plans: Sequence[Plan], models: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster
) -> Plan:
    """Returns the fastest plan that fits of several degrees (the least first), with what each
    degree costs.
    """
    rows = [_degree(plan, *models[plan.microbatches], cluster) for plan in plans]
    at = min(range(len(plans)), key=lambda at: (not rows[at].fits, rows[at].step_s))
    return _with_degrees(plans[at], rows, *models[plans[at].microbatches], cluster)


def _with_degrees(
    plan: Plan, known: Sequence[Degree], graph: ModelGraph, profile: Profile, cluster: Cluster
) -> Plan:
    """Adds what each degree costs: as it is known, or otherwise if all but the degree is as in this plan."""
    assert plan.expected is not None
    rows = {degree.weights: degree for degree in known}
    for weights in DEGREES:
        if weights not in rows:
            recompute = weight_policy(weights).activations or plan.recompute
            other = plan.model_copy(update={"weights": weights, "recompute": recompute})
            rows[weights] = _degree(other, graph, profile, cluster)
    disk = tuple(with_disk(rows[plan.weights], graph, plan, cluster))
    changed: dict[str, object] = {"degrees": (*(rows[weights] for weights in DEGREES), *disk)}
    for row in disk:
        changed |= {"step_s": row.step_s, "samples_per_s": plan.batch_size / row.step_s}
    figures = plan.expected.model_copy(update=changed)
    why = (*plan.why, *waiting_reasons(graph, plan), *spill_reasons(graph, plan, cluster))
    return plan.model_copy(update={"expected": figures, "why": why})


def _degree(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Degree:
    candidate, bound = _estimate_and_bound(plan, graph, profile, cluster)
    return Degree(
        weights=plan.weights,
        microbatches=plan.microbatches,
        recompute=candidate.cases[0].activation_policy.recomputes,
        bound=bound,
        step_s=candidate.step_s,
        peak_bytes=candidate.peak_bytes,
        fits=candidate.fits,
    )


def _cut(plan: Plan, graph: ModelGraph, cut: Sequence[int]) -> Plan:
    device = plan.stages[0].device
    return plan.model_copy(
        update={
            "stages": stages_from_bounds(graph, cut, (device,) * (len(cut) - 1)),
            "schedule": plan.schedule if family_of(plan.schedule).layer_by_layer else SEQUENTIAL.name,
            "recompute": KEEP.name if plan.activation_policy(0).keeps_all else RECOMPUTE.name,
        }
    )


def _shown(made: Plan, plan: Plan, graph: ModelGraph, candidate: Candidate, bound: Bound) -> Plan:
    figures, before = _figures(made, candidate, graph), plan.expected
    bounds: dict[str, object] = {} if before is None else {"gap": before.gap}
    bounds["limited_by"] = _limited_by(candidate)
    fullest = fullest_device(
        candidate.memories, candidate.devices, candidate.layout.ranks, candidate.layout.group
    )
    # The findings of the one-stage plan are of other blocks than these stages.
    others = (reason for reason in plan.why if not isinstance(reason, (SlowestStage, FullestDevice)))
    why = (fullest, *others, host_states(graph, made), HostRoofline(bound=bound))
    return made.model_copy(update={"expected": figures.model_copy(update=bounds), "why": why})


def priced(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """Prices a plan whose weights are streamed, as planner/search/evaluate_plan.py does; raises as
    that does.
    """
    candidate, bound = _estimate_and_bound(plan, graph, profile, cluster)
    figures = _figures(plan, candidate, graph).model_copy(update={"limited_by": _limited_by(candidate)})
    room_devices = [candidate.pipeline.room.devices[rank] for rank in candidate.pipeline.ranks]
    fullest = fullest_device(
        candidate.memories, candidate.devices, candidate.layout.ranks, candidate.layout.group
    )
    shortage_findings = shortages(candidate.memories, room_devices)
    why = (*shortage_findings, fullest, host_states(graph, plan), HostRoofline(bound=bound))
    made = plan.model_copy(update={"expected": figures, "why": why})
    return _with_degrees(made, (), graph, profile, cluster)


def _limited_by(candidate: Candidate) -> Bottleneck:
    work = PrefixTimes.of(candidate.graph, candidate.cases[0].seconds)
    return limited_by(candidate, work, candidate.graph, candidate.bounds)


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """Returns the predicted Timeline of one step, with its copies."""
    candidate, _ = _estimate_and_bound(plan, graph, profile, cluster)
    blocks = StreamedBlocks.of_stages(candidate.graph, candidate.cases[0].base, plan.optimizer)
    return _hosted_step(candidate, blocks, cluster, plan.optimizer).timeline()


def _estimate_and_bound(
    plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster
) -> tuple[Candidate, Bound]:
    """Prices the whole model as one stage, whose units are the plan's stages."""
    check_enough(plan.batch_size, plan.microbatches)
    (name,) = {stage.device for stage in plan.stages}
    device, m, bounds = rank_named(name, cluster), plan.microbatches, plan.bounds(graph)
    coarse = coarse_graph(graph, bounds), coarse_profile(profile, bounds)
    schedule = plan.schedule if family_of(plan.schedule).layer_by_layer else DEFAULT.name
    layout = Layout(plan.axes, 1, schedule, m, m, plan.weights)
    recompute = KEEP.name if plan.keeps_activations else RECOMPUTE.name
    pricing = Pricing({m: coarse}, cluster, plan.optimizer, most=len(bounds))
    pipeline = pricing.pipeline(layout, (recompute,), (device,))
    assert pipeline is not None, "one device always exists"
    candidate = Candidate.of(pipeline, (0, len(bounds) - 1), (0,))
    blocks = StreamedBlocks.of_stages(*coarse, plan.optimizer)
    if layout.hosted:
        candidate = _computing(candidate)
        candidate = replace(candidate, hosted=_hosted_step(candidate, blocks, cluster, plan.optimizer))
    return candidate, _bound(candidate, blocks, layout, cluster)


def _computing(candidate: Candidate) -> Candidate:
    """Returns the candidate with the seconds that the device computes, without its waits."""
    (case,) = candidate.cases
    seconds = UnitSeconds.of(case.base)
    case = case.with_seconds(seconds.recomputed() if case.activation_policy.recomputes else seconds)
    return replace(candidate, cases=(case,), costs=(stage_cost(case, 0, case.units),))


def _hosted_step(
    candidate: Candidate, blocks: StreamedBlocks, cluster: Cluster, optimizer: str
) -> HostedStep:
    """Returns the step of the blocks, each a stage of its own."""
    host, layout = Host.of(cluster, 1), candidate.layout
    schedule = layout.schedule if layerwise(layout) else SEQUENTIAL.name
    copies = CopyCosts(
        host.link,
        host.bytes_per_s,
        blocks.traffic.weights,
        blocks.traffic.gradients,
        fetched=in_lists(blocks.boundary.comes),
        offloaded=in_lists(blocks.boundary.goes),
        cast=blocks.traffic.cast,
    )
    of_blocks = replace(layout, stages=len(blocks.traffic.weights), schedule=schedule)
    return HostedStep(
        of_blocks,
        _costs(candidate),
        copies,
        Edges({}, {}, {}),
        cluster.link,
        updates=blocks.updated.astype(int).tolist(),
        in_parts=optimizer_bytes(optimizer).in_parts,
    )


def _bound(candidate: Candidate, blocks: StreamedBlocks, layout: Layout, cluster: Cluster) -> Bound:
    host, m, case = Host.of(cluster, 1), layout.microbatches, candidate.cases[0]
    policy, compute_s = layout.weight_policy, case.activation_policy.compute_s
    copies_in, copies_out = policy.copies(1 if layerwise(layout) else m)
    boundary_bytes = blocks.boundary.moved_bytes if policy.values_on_host else (0, 0)
    return Bound(
        compute_s=m * sum(compute_s(c.forward_s, c.backward_s) for c in case.base.units),
        to_device_s=copies_in * host.link.seconds(sum(blocks.traffic.weights))
        + host.link.seconds(m * boundary_bytes[0]),
        to_host_s=copies_out * host.link.seconds(sum(blocks.traffic.gradients))
        + host.link.seconds(m * boundary_bytes[1]),
        optimizer_s=candidate.after_s,
    )


def _costs(candidate: Candidate) -> list[StageCost]:
    """Returns the costs of each block."""
    return [stage_cost(candidate.cases[0], block, block + 1) for block in range(candidate.bounds[-1])]


def _figures(plan: Plan, candidate: Candidate, graph: ModelGraph) -> Expected:
    """Returns the figures with a row for each stage; bytes are those of the device, divided evenly."""
    whole = expected(candidate, plan.batch_size, (0, len(graph.units)))
    (device,), count = whole.stages, len(plan.stages)
    rows = list[StageFigures]()
    for stage, (cost, (first, end)) in enumerate(
        zip(_costs(candidate), pairwise(plan.bounds(graph)), strict=True)
    ):
        own = {name: getattr(device, name) * (stage + 1) // count for name in _BYTES}
        before = {name: getattr(device, name) * stage // count for name in _BYTES}
        changed = {name: own[name] - before[name] for name in _BYTES}
        changed |= {"units": end - first, "forward_s": cost.forward_s, "backward_s": cost.backward_s}
        changed |= {"parameters": sum(p.count for p in graph.owned_parameters(first, end - 1))}
        rows.append(device.model_copy(update=changed))
    return whole.model_copy(update={"stages": tuple(rows)})
