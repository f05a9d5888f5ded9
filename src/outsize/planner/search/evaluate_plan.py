"""Prices a plan as it is, perhaps edited by a person: it is checked against the model, and its cuts are not
moved. The search prices its own cuts by the same `Candidate.of`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from outsize.errors import BadPlan
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.kernel_stacks import takes_turns
from outsize.planner.costs.unit_times import fastest
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate, check_enough, expected, reasons
from outsize.planner.evaluate.plan_findings import shortages, step_memory
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout, grouped, rank_named
from outsize.planner.memory.memory_samples import with_memory_samples
from outsize.planner.search.caveats import with_narrow_sums
from outsize.planner.search.sliced import model_of_slice
from outsize.planner.strategies import host_computed, host_one_device, host_round_robin
from outsize.planner.strategies.activation_offload import check_recompute, offload_reasons
from outsize.planner.strategies.selective_recompute import Units, counted, recomputing, selective_reasons
from outsize.policies.activations import OPEN, WHOLE_STAGE, Recompute
from outsize.schedules.families import DEFAULT


def price(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan with `expected` and `why` of its present content; its cuts stay, even if they do not
    fit.

    `graph` and `profile` are of one microbatch of the plan. Raises ModelMismatch, BadPlan, TooFewSamples, and
    UnknownDevice when the cluster lacks a device of the plan.
    """
    return with_narrow_sums(_price(plan, graph, profile, cluster))


def _price(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    if plan.host_stages:
        return host_computed.priced(plan, *in_plans_order(plan, graph, profile), cluster)
    if plan.streams:
        away: list[Recompute] = [policy.name for policy in plan.activation_policies if policy.uses_host]
        check_recompute(away[0] if away else None, plan.weights)
        hosts = host_one_device.priced if plan.axes.pp == 1 else host_round_robin.priced
        return hosts(plan, *in_plans_order(plan, graph, profile), cluster)
    graph, profile = in_plans_order(plan, graph, profile)
    candidate = candidate_of(plan, graph, profile, cluster)
    chosen = _chosen(plan, graph)
    figures = counted(expected(candidate, plan.batch_size, candidate.bounds), chosen)
    work = PrefixTimes.of(graph, fastest([case.least for case in candidate.cases]))
    limit = limited_by(candidate, work, graph, candidate.bounds)
    room_devices = [candidate.pipeline.room.devices[rank] for rank in candidate.pipeline.ranks]
    recompute_findings = (
        *selective_reasons(candidate, chosen, candidate.bounds),
        *offload_reasons(candidate),
    )
    why = (
        *shortages(candidate.memories, room_devices),
        *reasons(candidate, graph, candidate.bounds),
        *recompute_findings,
    )
    return plan.model_copy(update={"expected": figures.model_copy(update={"limited_by": limit}), "why": why})


def with_step_memory(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan of a loop of the user's own, which says what a step of an engine would save.

    `graph` and `profile` are as for `price`.
    """
    if not graph.in_loop or plan.expected is None or plan.streams:
        return plan
    as_step = plan.model_copy(update={"schedule": DEFAULT.name})
    step = price(as_step, graph.of_step(), profile, cluster).expected
    assert step is not None, "it has just been priced"
    loop, instead = ([stage.peak_bytes for stage in each.stages] for each in (plan.expected, step))
    return plan.model_copy(update={"why": (*plan.why, *step_memory(graph, loop, instead))})


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """Returns the predicted Timeline of one step of the plan, or of its first microbatches, with the bytes
    that the plan expects; raises as `price`.
    """
    model = in_plans_order(plan, graph, profile)
    if plan.host_stages:
        played, stage_of = host_computed.timeline(plan, *model, cluster), tuple(range(len(plan.stages)))
    elif plan.streams:
        hosts = host_one_device.timeline if plan.axes.pp == 1 else host_round_robin.timeline
        played, stage_of = hosts(plan, *model, cluster), tuple(range(len(plan.stages)))
    else:
        step = candidate_of(plan, *model, cluster).step
        played, stage_of = step.timeline(), step.stage_of
    return played if plan.expected is None else with_memory_samples(played, plan.expected, stage_of)


def in_plans_order(plan: Plan, graph: ModelGraph, profile: Profile) -> tuple[ModelGraph, Profile]:
    """Returns the model with its units stage after stage, so that stages are runs; raises as
    `Plan.owners`.
    """
    order = plan.in_order(graph)
    return graph.in_order(order), profile.in_order(order)


def candidate_of(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Candidate:
    """Returns the candidate that a plan without weights on the host is; `graph` and `profile` are in the
    plan's order. Raises as `price`.
    """
    check_enough(plan.batch_size, plan.microbatches)
    layout, bounds = replace(Layout.of_plan(plan), turns=takes_turns(plan)), plan.bounds(graph)
    model = graph, profile
    if plan.slices > 1:
        model = model_of_slice(model, plan.slices, cluster)
    pricing = Pricing({layout.captured: model}, cluster, plan.optimizer, most=len(graph.units))
    groups = grouped(cluster, layout.group)
    if groups is None:
        raise _no_groups(plan, cluster)
    places = tuple(rank_named(stage.device, groups) for stage in plan.stages)
    chosen = _chosen(plan, graph)
    by_blocks = {s for s, units in chosen.items() if len(units) == bounds[s + 1] - bounds[s]}
    policies = plan.activation_policies
    offered = OPEN if by_blocks else WHOLE_STAGE
    away: list[Recompute] = [policy.name for policy in policies if policy.uses_host]
    offered = (*offered, *dict.fromkeys(away))
    pipeline = pricing.pipeline(layout, offered, places)
    assert pipeline is not None, "there are groups"
    choices = [
        offered.index(policy.name) if not policy.lists_units or s in by_blocks else 0
        for s, policy in enumerate(policies)
    ]
    some = {stage: units for stage, units in chosen.items() if stage not in by_blocks}
    return recomputing(pipeline, bounds, choices, some, pricing, plan.optimizer)


def _chosen(plan: Plan, graph: ModelGraph) -> dict[int, Units]:
    """Returns the units that stages recompute, where these are only some of theirs."""
    names, runs = [unit.name for unit in graph.units], enumerate(pairwise(plan.bounds(graph)))
    some = [(s, run) for s, run in runs if plan.activation_policy(s).lists_units]
    return {s: plan.recomputed(s, names).intersection(range(*run)) for s, run in some}


def _no_groups(plan: Plan, cluster: Cluster) -> BadPlan:
    return BadPlan(
        f"cluster {cluster.name!r} cannot be laid out as the plan says",
        numbers=f"{len(cluster.devices)} devices, {cluster.devices_per_node} in a node, for {plan.axes}",
        next_step="outsize plan MODEL with this cluster",
    )
