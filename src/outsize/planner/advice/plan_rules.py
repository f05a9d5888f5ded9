"""Problem: which facts about a plan would its reader want to know before running it?

    data-parallelism   the model fits on one device, and replicas are predicted to be faster than the pipeline
                       (or it does not, and replicas that share weights and states are)
    slow-links         splitting matrix products over the devices costs more on the links than it saves
    other-kernels      devices wait for their host, and kernels that are compiled or replayed would not
    small-stage        a stage has less than half of an even share of the work
    fat-boundary       what crosses a cut takes a quarter of the slowest stage's time, or more
    heavy-unit         one unit alone has more than an even share: no cut can balance that
    branches           stages that are not runs of the model's order would be lighter (dag/balance_gain.py)
    optimizer-state    a nearly full device holds mostly optimizer state while another has room for it
    unused-devices     devices without a stage
    idle-devices       devices are idle for more than a third of the step

Each rule is a function of the plan, its graph and the cluster; nothing is decided here, and nothing is
planned again, except that replicas which shard weights are one stage with one cut, priced as the search does.
Replicas: the batch in microbatches of the same size over all devices, then one all-reduce of the gradients,
priced as in the search (costs/collectives.py), not overlapped. Matrix products split in pairs, by columns and
then by rows (Megatron, arXiv 1909.08053, sec. 3): every second result is all-reduced in the forward and once
more in the backward, against (n - 1) / n of the compute saved. Complexity: O(units + values). Oracle:
tests/unit/planner/advice/test_plan_rules.py computes the figures by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

from outsize.ir.answers.advice import (
    Advice,
    BranchOrder,
    FatBoundary,
    HeavyUnit,
    IdleDevices,
    OptimizerStates,
    OtherKernels,
    ReplicasFaster,
    SlowLinks,
    SmallStage,
    UnusedDevices,
)
from outsize.ir.cluster import Cluster, Link
from outsize.ir.findings import CheapestDevices, DoesNotFit, NotChosen
from outsize.ir.graph import ModelGraph, Value
from outsize.ir.plan import Axes, Expected, Kernels, Plan, StageFigures
from outsize.ir.profile import Profile
from outsize.planner.advice.compilation import LEAST_WAITING, waiting_share
from outsize.planner.costs.collectives import collective_s
from outsize.planner.costs.kernel_stacks import EAGER, KernelStack, kernel_stack, stacks_of_runs
from outsize.planner.costs.roofline import passes_of, roofline
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.dag.balance_gain import branches
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import BITS
from outsize.planner.layout.layout import Layout
from outsize.planner.partition.feasibility import ChainFeasibility
from outsize.planner.partition.stage_prices import PricedModel
from outsize.planner.search.branch_and_bound import BranchAndBound
from outsize.planner.search.evaluate_plan import in_plans_order, price
from outsize.policies.activations import OPEN
from outsize.policies.weights import SHARDED
from outsize.schedules.families import DEFAULT, SEQUENTIAL

SMALL: Final = 0.5
FAT: Final = 0.25
IDLE: Final = 1 / 3
MUCH: Final = 1.05
FULL: Final = 0.8
SOMEWHAT_FULL: Final = 0.5
MOSTLY: Final = 0.4
# This many values at a cut are named.
VALUES_NAMED: Final = 2
PRODUCTS: Final = frozenset({"Linear", "NonDynamicallyQuantizableLinear", "Conv1D"})


@final
@dataclass(frozen=True, slots=True)
class _View:
    """Holds a priced plan and what it was made from."""

    plan: Plan
    expected: Expected
    graph: ModelGraph
    profile: Profile
    cluster: Cluster
    bounds: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.plan.stages)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Returns forward and backward of each stage for one microbatch."""
        return tuple(f.forward_s + f.backward_s for f in self.expected.stages)

    def link(self, source: int, destination: int) -> Link:
        """Returns the link between the devices of two stages."""
        group, ranks = self.plan.axes.group_size, self.plan.ranks
        return self.cluster.link(ranks[source] * group, ranks[destination] * group)

    def unit(self, index: int) -> str:
        return self.graph.units[index].name


def advise(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> tuple[Advice, ...]:
    """Returns the advice, the most important first; none for a plan without expectations.

    `graph` and `profile` are of one microbatch of the plan. Raises as `Plan.owners`.
    """
    if plan.expected is None:
        return ()
    graph, profile = in_plans_order(plan, graph, profile)
    view = _View(plan, plan.expected, graph, profile, cluster, plan.bounds(graph))
    # One stage has no neighbours to wait for or to send to.
    cuts = (_heavy, _branches, _small, _fat) if plan.axes.pp > 1 else ()
    rules = (_replicas, _slow_links, _other_kernels, *cuts, _states, _spare, _waiting)
    return tuple(advice for rule in rules for advice in rule(view))


# -- another way to use the devices -----------------------------------------------------------------------


def _replicas(view: _View) -> Iterator[ReplicasFaster]:
    """Compares with replicas on all devices. A group is of one kind of device, and who asks for the least
    money does not ask for the most speed.
    """
    devices, plan = len(view.cluster.devices), view.plan
    kinds = {device.kind for device in view.cluster.devices}
    if devices < 2 or len(kinds) > 1 or plan.axes.group_size > 1:
        return
    if any(isinstance(found, CheapestDevices) for found in plan.why):
        return
    case = _case(view)
    if not ChainFeasibility(case, SEQUENTIAL.name, 1, view.cluster).fits():
        yield from _sharded(view)
        return
    yield from _faster(view, _replicated_s(view, case), BITS, sharded=False)


def _sharded(view: _View) -> Iterator[ReplicasFaster]:
    """Compares with replicas that shard weights, on microbatches of the same size, divided evenly."""
    devices, plan, count = len(view.cluster.devices), view.plan, view.plan.microbatches
    if count % devices or plan.form != "tape":
        return
    pricing = Pricing({count: (view.graph, view.profile)}, view.cluster, plan.optimizer)
    layout = Layout(Axes(dp_shard=devices), 1, DEFAULT.name, count // devices, count, SHARDED.name)
    estimates = BranchAndBound(pricing, OPEN).run([layout]).candidates
    if estimates:
        yield from _faster(view, estimates[0].step_s, MUCH, sharded=True)


def _faster(view: _View, step_s: float, least: float, *, sharded: bool) -> Iterator[ReplicasFaster]:
    """Yields replicas on all devices, if that makes a step more than `least` times as fast."""
    ratio = view.expected.step_s / step_s if step_s else 0.0
    if ratio > least:
        yield ReplicasFaster(
            cluster=view.plan.cluster,
            replicas=len(view.cluster.devices),
            sharded=sharded,
            samples_per_s=view.plan.batch_size / step_s,
            pipeline_samples_per_s=view.expected.samples_per_s,
            ratio=ratio,
        )


def _case(view: _View) -> PricedModel:
    plan = view.plan
    return PricedModel.of(view.graph, view.profile, plan.microbatches, plan.optimizer, plan.recompute)


def _replicated_s(view: _View, case: PricedModel) -> float:
    """Returns the seconds of a step with the batch divided over all devices."""
    devices = len(view.cluster.devices)
    rounds = -(-view.plan.microbatches // devices)
    gradients = int(case.ranges.gradients[0, -1])
    summed_s = collective_s("all_reduce", gradients, range(devices), view.cluster)
    return rounds * view.profile.step_compute_s + summed_s


def _slow_links(view: _View) -> Iterator[SlowLinks]:
    """Considers all matrix products together, as if each pair was split over the devices of one node."""
    devices = min(view.cluster.domain, len(view.cluster.devices))
    products = [u for u in view.graph.units if u.kind in PRODUCTS]
    if devices < 2 or len(products) < 2:
        return
    made = {v.producer: v.size_bytes for v in view.graph.values}
    link = view.cluster.link(0, 1)
    reduced = [made.get(u.index, 0) for u in products[1::2]]
    sent_s = sum(2 * collective_s("all_reduce", size, range(devices), view.cluster) for size in reduced)
    costs = [view.profile.units[u.index] for u in products]
    saved_s = sum(c.forward_s + c.backward_s for c in costs) * (devices - 1) / devices
    if not saved_s or sent_s <= saved_s:
        return
    ratio = sent_s / saved_s
    yield SlowLinks(
        link=link.name,
        devices=devices,
        sent_s=sent_s,
        saved_s=saved_s,
        ratio=ratio,
        enough_bytes_per_s=ratio * link.bytes_per_s,
    )


def _other_kernels(view: _View) -> Iterator[OtherKernels]:
    """Prices the plan with each stack that this version runs, where the share of a device's work is launched
    more slowly than it is computed, or casts are more kernels than another stack has.
    """
    plan, device = view.plan, view.cluster.devices[0]
    estimated = all(cost.source == "roofline" for cost in view.profile.units)
    if plan.form != "tape" or plan.kernels != EAGER or not (device.is_accelerator and estimated):
        return
    waiting = waiting_share(view.graph, device, plan.axes.product_parts * plan.axes.token_parts)
    if waiting < LEAST_WAITING:
        if not _has_unfused_casts(view.graph):
            return
        waiting = 0.0  # Not the host is the cause.
    steps = dict[Kernels, float]()
    for other in stacks_of_runs():
        steps[other] = _step_s(view, kernel_stack(other))
    name = min(steps, key=steps.__getitem__)
    other_step_s = steps[name]
    if other_step_s * (1 + LEAST_WAITING) < view.expected.step_s:
        stack = kernel_stack(name)
        yield OtherKernels(
            kernels=name,
            compiled=stack.is_compiled,
            device_graphs=stack.is_replayed,
            step_s=view.expected.step_s,
            other_step_s=other_step_s,
            waiting=waiting,
        )


def _has_unfused_casts(graph: ModelGraph) -> bool:
    works = (work for unit in graph.units for passed in passes_of(unit) for work in passed)
    return any(work.launches > work.fused_launches > 0 for work in works)


def _step_s(view: _View, stack: KernelStack) -> float:
    """Returns the seconds of the plan's step with a stack of kernels."""
    graph, cluster = stack.of_graph(view.graph), stack.on(view.cluster)
    priced = price(view.plan, graph, roofline(graph, cluster.devices[0]), cluster)
    return view.expected.step_s if priced.expected is None else priced.expected.step_s


# -- what limits this one ---------------------------------------------------------------------------------


def _heavy(view: _View) -> Iterator[HeavyUnit]:
    """Yields a unit with more than an even share of the seconds, or of the bytes of weights and states."""
    seconds = [c.forward_s + c.backward_s for c in view.profile.units]
    case = _case(view)
    state_table = case.ranges.weights + case.ranges.gradients + case.ranges.optimizer
    held = [int(state_table[u, u + 1]) for u in range(len(seconds))]
    yield from _heaviest(view, seconds, "compute")
    if max(map(_share, view.expected.stages)) >= SOMEWHAT_FULL:
        yield from _heaviest(view, held, "memory")


def _heaviest(
    view: _View, amounts: Sequence[float], amount: Literal["compute", "memory"]
) -> Iterator[HeavyUnit]:
    heaviest = max(range(len(amounts)), key=amounts.__getitem__)
    total, even = sum(amounts), 1 / view.stages
    fraction = amounts[heaviest] / total if total else 0.0
    if fraction > even:
        name = view.unit(heaviest)
        yield HeavyUnit(unit=name, amount=amount, share=fraction, even_share=even, stages=view.stages)


def _branches(view: _View) -> Iterator[BranchOrder]:
    """Considers devices of one kind with a stage each; a model with a placement of its own has its
    own order.
    """
    if view.stages > view.plan.axes.pp or view.cluster.unequal:
        return
    balanced = branches(view.graph, UnitSeconds.of(view.profile), view.stages)
    if balanced is None:
        return
    first = [view.unit(unit) for unit in balanced.stages[0] if unit >= view.bounds[1]]
    yield BranchOrder(runs_s=balanced.runs_s, stages_s=balanced.stages_s, moved=first[0] if first else "")


def _small(view: _View) -> Iterator[SmallStage]:
    total = sum(view.compute_s)
    even = total / view.stages
    for stage, seconds in enumerate(view.compute_s):
        alone = view.plan.ranks.count(view.plan.ranks[stage]) == 1
        if alone and seconds < SMALL * even:
            yield SmallStage(
                stage=stage,
                stages=view.stages,
                share=seconds / total,
                even_share=1 / view.stages,
                memory_full=_share(view.expected.stages[stage]) >= FULL,
            )


def _fat(view: _View) -> Iterator[FatBoundary]:
    slowest_s, ranks = max(view.compute_s), view.plan.ranks
    if view.plan.actions:
        return  # Stages that are neighbours by number may send each other nothing.
    for stage, cut in enumerate(view.bounds[1:-1]):
        if ranks[stage] == ranks[stage + 1]:
            continue
        crossing = view.graph.crossing(cut)
        size = sum(v.size_bytes * (2 if v.requires_grad else 1) for v in crossing)
        link = view.link(stage, stage + 1)
        seconds = link.seconds(size)
        if slowest_s and seconds >= FAT * slowest_s:
            yield FatBoundary(
                unit=view.unit(cut),
                moved_bytes=size,
                moved_s=seconds,
                link=link.name,
                slowest_stage_s=slowest_s,
                largest=_largest(view, crossing),
                more_values=max(0, len(crossing) - VALUES_NAMED),
            )


def _largest(view: _View, crossing: tuple[Value, ...]) -> tuple[tuple[str, int], ...]:
    """Returns the producers of the largest values with their bytes."""
    ranked = sorted(crossing, key=lambda v: (-v.size_bytes, v.id))
    return tuple((view.unit(v.producer), v.size_bytes) for v in ranked[:VALUES_NAMED])


def _states(view: _View) -> Iterator[OptimizerStates]:
    figures = view.expected.stages
    stage = max(range(len(figures)), key=lambda s: _share(figures[s]))
    fullest, emptiest = figures[stage], min(figures, key=_share)
    mostly = fullest.peak_bytes and fullest.optimizer_bytes / fullest.peak_bytes
    room = emptiest.device_bytes - emptiest.peak_bytes
    if _share(fullest) < FULL or mostly < MOSTLY or room < fullest.optimizer_bytes / 2:
        return
    yield OptimizerStates(
        device=view.plan.stages[stage].device,
        full_share=_share(fullest),
        states_share=mostly,
        room_bytes=room,
    )


def _spare(view: _View) -> Iterator[UnusedDevices]:
    spare = len(view.cluster.devices) - view.plan.axes.world_size
    chosen = view.cluster.unequal or view.plan.weight_policy.on_host  # The search left them out, and says so.
    if spare > 0 and not chosen:
        yield UnusedDevices(unused=spare, devices=len(view.cluster.devices))


def _waiting(view: _View) -> Iterator[IdleDevices]:
    if view.plan.axes.pp > 1 and view.expected.bubble > IDLE:
        yield _more_microbatches(view)


def _more_microbatches(view: _View) -> IdleDevices:
    plan, count = view.plan, view.plan.microbatches
    target = min(plan.batch_size, 4 * plan.axes.pp)
    more = count < target and not _others_tried(plan)
    return IdleDevices(
        bubble=view.expected.bubble,
        microbatches=count,
        devices=plan.axes.pp,
        try_microbatches=target if more else None,
    )


def _others_tried(plan: Plan) -> bool:
    """Returns whether the search tried other numbers of microbatches."""
    trials = [reason for reason in plan.why if isinstance(reason, (NotChosen, DoesNotFit))]
    return any(trial.microbatches != plan.microbatches for trial in trials)


def _share(figures: StageFigures) -> float:
    return figures.peak_bytes / figures.device_bytes if figures.device_bytes else 0.0
