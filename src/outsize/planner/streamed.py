"""Problem: weights come to one device stage by stage. Which stages, and what does such a plan cost?

    degree    of ir/offload.py, from least to most; the fastest that fits, by the predicted step
    stages    the blocks of offload.py: neighbouring units of about equal work, 64 at most
    schedule  gpipe, layer by layer; naive where boundaries of all microbatches do not fit beside two stages
    seconds   those of offload.py, which the device's timeline has stage by stage
    bytes     of the device, shared out evenly to its stages, so that they add up to what it holds
    bound     max(compute, copies to the device, copies to the host, the optimizer on the host)

The bound is what no order of these four can beat; the plan says all four, of each degree. Gradients out are
no degree of their own: layer by layer they leave anyway when their stage's last backward ends, and one
microbatch at a time they stay until the last one. Complexity: that of offload.py.
Oracle: tests/unit/planner/test_streamed.py adds the four up by hand, and a plan is priced as it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.cluster import Cluster
from outsize.ir.devices import host_link
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import HOSTED, OF_SEVERAL, Bound, Degree, weights_text
from outsize.ir.plan import Expected, Plan, Recompute, ScheduleName, StageFigures, beyond, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.text import bytes_text
from outsize.ir.timeline import Timeline
from outsize.planner.coarse import coarse_graph, coarse_profile
from outsize.planner.estimate import Estimate, check_enough, estimate, expected, stage_cost
from outsize.planner.floor import Work
from outsize.planner.handed import waiting_reasons
from outsize.planner.infeasible import ANEW
from outsize.planner.layout import Layout, rank_named
from outsize.planner.limits import limited_by
from outsize.planner.menu import Menu
from outsize.planner.offload import BLOCKS, Blocks, Host, block_ends, landing_reason, layerwise
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.reasons import fullest_reason, microbatches_text, needs_text, over_memory, parts_text
from outsize.planner.request import Request
from outsize.planner.seconds import UnitSeconds
from outsize.planner.simulate import StageCost, simulate
from outsize.planner.spill import spill_reasons, with_disk
from outsize.schedules.planned import planned

# Blocks that are tried; the fewest within NEAR of the fastest are taken, since each is a stage to read.
MOST: Final = (16, 32, BLOCKS)
NEAR: Final = 1.02
# Schedules with weights on the host; one device has the last two, which are one there, as well.
ORDERS: Final[tuple[ScheduleName, ...]] = ("gpipe", "1f1b", "naive")
_BYTES: Final = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "boundary_bytes")


def check_hosted(request: Request, graphs: Sequence[ModelGraph], cluster: Cluster) -> None:
    """Raise BadOption where the degree asked for makes no sense, or runs in another way alone."""
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
    axes, weights = request.mesh(request.stages or 1), request.weights or "resident"
    if beyond(axes, weights):
        ranks = "a pipeline with one device a rank" if weights in OF_SEVERAL else "one device"
        raise BadOption(
            f"{weights_text(weights)}: that is for {ranks}",
            numbers=f"asked for: {axes.used_besides(())}",
            next_step=f"leave these out, or weights={weights!r}",
        )
    orders = ORDERS[: len(ORDERS) if axes.pp == 1 else 1]
    if request.schedule not in (None, *orders):
        raise BadOption(
            f"schedule {request.schedule!r} is none in which weights come and go",
            numbers=f"pp {axes.pp}, weights {weights!r}: {', '.join(orders)}",
            next_step="--schedule gpipe",
        )


def too_small(layouts: Iterable[Layout], menu: Menu, recompute: Recompute) -> NoFeasiblePlan:
    """The error where no degree fits that was asked for: what the one lacks that fills the device least."""
    tried = [each for layout in layouts if (each := menu.pipeline(layout, (recompute,)))]
    priced = [estimate(each, (0, each.case.units), (0,)) for each in tried]
    found = min(priced, key=lambda found: found.peak_bytes)
    (memory,), weights, m = found.memories, found.layout.weights, found.layout.microbatches
    name, size = memory.largest[0]
    steps = [f"--microbatches {2 * m}"] * (found.graph.batch_size > 1)
    steps += ["--weights host-activations"] * (weights == "host")
    return NoFeasiblePlan(
        f"{weights_text(weights)}, {microbatches_text(m)}{ANEW[recompute]}: "
        + needs_text(0, memory, found.pipeline.room.devices[0]),
        numbers=f"{parts_text(memory)}; the largest unit there is {name} with {bytes_text(size)}",
        next_step=", or ".join([*steps, "devices with more memory"]),
    )


def in_blocks(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """The plan of one stage whose weights are on the host, with a stage for each block; `profile` is of the
    cluster's first device.
    """
    cuts = dict.fromkeys(block_ends(graph, UnitSeconds.of(profile), most) for most in MOST)
    made = [_cut(plan, graph, cut) for cut in cuts]
    costs = [_found(each, graph, profile, cluster) for each in made]
    fitting = [at for at, (found, _) in enumerate(costs) if found.fits] or [len(cuts) - 1]
    least_s = min(costs[at][0].step_s for at in fitting)
    chosen = next(at for at in fitting if costs[at][0].step_s <= NEAR * least_s)
    return _shown(made[chosen], plan, graph, *costs[chosen])


def fastest(
    plans: Sequence[Plan], candidates: Mapping[int, tuple[ModelGraph, Profile]], cluster: Cluster
) -> Plan:
    """Of plans of several degrees, the least first, the fastest that fits, with what each degree costs."""
    rows = [_degree(plan, *candidates[plan.microbatches], cluster) for plan in plans]
    at = min(range(len(plans)), key=lambda at: (not rows[at].fits, rows[at].step_s))
    return _with_degrees(plans[at], rows, *candidates[plans[at].microbatches], cluster)


def _with_degrees(
    plan: Plan, known: Sequence[Degree], graph: ModelGraph, profile: Profile, cluster: Cluster
) -> Plan:
    """What each degree costs: as it is known, or else if all but the degree is as in this plan."""
    assert plan.expected is not None
    rows = {degree.weights: degree for degree in known}
    for weights in ("resident", *HOSTED):
        if weights not in rows:
            how = "full" if weights == "host-activations" else plan.recompute
            other = plan.model_copy(update={"weights": weights, "recompute": how})
            rows[weights] = _degree(other, graph, profile, cluster)
    disk = tuple(with_disk(rows[plan.weights], graph, plan, cluster))
    changed: dict[str, object] = {"degrees": (*(rows[weights] for weights in ("resident", *HOSTED)), *disk)}
    for row in disk:
        changed |= {"step_s": row.step_s, "samples_per_s": plan.batch_size / row.step_s}
    figures = plan.expected.model_copy(update=changed)
    why = (*plan.why, *waiting_reasons(graph, plan), *spill_reasons(graph, plan, cluster))
    return plan.model_copy(update={"expected": figures, "why": why})


def _degree(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Degree:
    found, bound = _found(plan, graph, profile, cluster)
    return Degree(
        weights=plan.weights,
        microbatches=plan.microbatches,
        recompute=found.cases[0].recompute != "none",
        bound=bound,
        step_s=found.step_s,
        peak_bytes=found.peak_bytes,
        fits=found.fits,
    )


def _cut(plan: Plan, graph: ModelGraph, cut: Sequence[int]) -> Plan:
    device = plan.stages[0].device
    return plan.model_copy(
        update={
            "stages": stages_from_bounds(graph, cut, (device,) * (len(cut) - 1)),
            "schedule": "gpipe" if plan.schedule == "gpipe" else "naive",
            "recompute": "none" if plan.recompute_of(0) == "none" else "full",
        }
    )


def _shown(made: Plan, plan: Plan, graph: ModelGraph, found: Estimate, bound: Bound) -> Plan:
    figures, before = _figures(made, found, graph), plan.expected
    kept = {} if before is None else {"gap": before.gap, "limited_by": before.limited_by}
    full = fullest_reason(found.memories, found.devices, found.layout.ranks, found.layout.group)
    # The first two are of the blocks before: which of them sets the pace, how full the device is.
    why = (full, *plan.why[2:], landing_reason(graph, made), str(bound))
    return made.model_copy(update={"expected": figures.model_copy(update=kept), "why": why})


def priced(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """As planner/price.py's, of a plan whose weights come and go. Raises as that does."""
    found, bound = _found(plan, graph, profile, cluster)
    work = Work.of(found.graph, found.cases[0].seconds)
    limit = limited_by(found, work, found.graph, found.bounds)
    figures = _figures(plan, found, graph).model_copy(update={"limited_by": limit})
    rooms = [found.pipeline.room.devices[rank] for rank in found.pipeline.ranks]
    full = fullest_reason(found.memories, found.devices, found.layout.ranks, found.layout.group)
    why = (*over_memory(found.memories, rooms), full, landing_reason(graph, plan), str(bound))
    made = plan.model_copy(update={"expected": figures, "why": why})
    return _with_degrees(made, (), graph, profile, cluster)


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """The predicted Timeline of one step; what a stage waits for is in its actions."""
    costs = _costs(_found(plan, graph, profile, cluster)[0])
    schedule = planned(plan.schedule, len(plan.stages), plan.microbatches, 1, plan.actions)
    return simulate(schedule, costs, {}, {}, cluster.link)


def _found(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> tuple[Estimate, Bound]:
    """The whole model as one stage, whose units are the plan's stages."""
    check_enough(plan.batch_size, plan.microbatches)
    (name,) = {stage.device for stage in plan.stages}
    device, m, bounds = rank_named(name, cluster), plan.microbatches, plan.bounds(graph)
    coarse = coarse_graph(graph, bounds), coarse_profile(profile, bounds)
    how = "gpipe" if plan.schedule == "gpipe" else "1f1b"
    layout = Layout(plan.axes, 1, how, m, m, plan.weights)
    again = any(plan.recompute_of(stage) != "none" for stage in range(len(plan.stages)))
    menu = Menu({m: coarse}, cluster, plan.optimizer, most=len(bounds))
    pipeline = menu.pipeline(layout, ("full" if again else "none",), (device,))
    assert pipeline is not None, "one device is always there"
    found = estimate(pipeline, (0, len(bounds) - 1), (0,))
    return found, _bound(found, coarse, plan.optimizer, layout, cluster)


def _bound(
    found: Estimate, coarse: tuple[ModelGraph, Profile], optimizer: str, layout: Layout, cluster: Cluster
) -> Bound:
    host, m, case = Host.of(cluster, 1), layout.microbatches, found.cases[0]
    blocks = Blocks.of(*coarse, UnitSeconds.of(coarse[1]), optimizer_bytes(optimizer))
    passes = 1 if layerwise(layout) else m
    streams = {"resident": (0, 0), "host-optimizer": (1, 1)}
    come, go = streams.get(layout.weights, (2 * passes, passes))
    handed = blocks.handed.moved_bytes if layout.weights == "host-activations" else (0, 0)
    again = 1 if case.recompute == "none" else 2
    return Bound(
        compute_s=m * sum(again * c.forward_s + c.backward_s for c in case.base.units),
        to_device_s=come * host.link.seconds(sum(blocks.taken)) + host.link.seconds(m * handed[0]),
        to_host_s=go * host.link.seconds(sum(blocks.given)) + host.link.seconds(m * handed[1]),
        optimizer_s=found.sync_s,
    )


def _costs(found: Estimate) -> list[StageCost]:
    """Of each block."""
    return [stage_cost(found.cases[0], block, block + 1) for block in range(found.bounds[-1])]


def _figures(plan: Plan, found: Estimate, graph: ModelGraph) -> Expected:
    """With a row for each stage; bytes are those of the device, shared out evenly."""
    whole = expected(found, plan.batch_size, (0, len(graph.units)))
    (device,), count = whole.stages, len(plan.stages)
    rows = list[StageFigures]()
    for stage, (cost, (first, end)) in enumerate(
        zip(_costs(found), pairwise(plan.bounds(graph)), strict=True)
    ):
        own = {name: getattr(device, name) * (stage + 1) // count for name in _BYTES}
        before = {name: getattr(device, name) * stage // count for name in _BYTES}
        changed = {name: own[name] - before[name] for name in _BYTES}
        changed |= {"units": end - first, "forward_s": cost.forward_s, "backward_s": cost.backward_s}
        changed |= {"parameters": sum(p.numel for p in graph.owned_parameters(first, end - 1))}
        rows.append(device.model_copy(update=changed))
    return whole.model_copy(update={"stages": tuple(rows)})
