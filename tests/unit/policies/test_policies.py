"""A policy's record against what rows, plans and tables make of it."""

from __future__ import annotations

from typing import get_args

import pytest

from outsize.ir.plan import Axes, state_shards
from outsize.ir.schedule import Kind, Schedule
from outsize.policies.activations import (
    KEEP,
    OFFLOAD,
    OPEN,
    RECOMPUTE,
    SELECTIVE,
    ActivationPolicy,
    Recompute,
    activation_policies,
    activation_policy,
    saves_memory,
    searched_for,
)
from outsize.policies.weights import (
    DEGREES,
    HOST,
    HOST_ACTIVATIONS,
    HOST_COMPUTED,
    HOST_OPTIMIZER,
    HOSTED,
    RESIDENT,
    SHARDED,
    WeightPolicy,
    Weights,
    weight_policies,
)
from outsize.schedules.builders import build
from outsize.schedules.offload import with_activation_copies, with_loads, with_value_copies
from outsize.schedules.sharded import with_gathers

STAGES = 4


def added(policy: ActivationPolicy | WeightPolicy) -> Schedule:
    """Four stages on one device, layer by layer, with the actions of a policy."""
    schedule = build("gpipe", STAGES, 3, 1)
    if policy in (RESIDENT, SHARDED):
        return with_gathers(schedule, {(s, s) for s in range(STAGES)}, once=policy is RESIDENT)
    if policy is OFFLOAD:
        return with_activation_copies(schedule, range(STAGES))
    if isinstance(policy, ActivationPolicy) or policy is HOST_COMPUTED:
        return schedule  # What moves are values, where stages leave them.
    loaded = with_loads(schedule, STAGES if policy.stays_loaded else 2)
    return with_value_copies(loaded) if policy.values_on_host else loaded


@pytest.mark.parametrize("policy", [*activation_policies(), *weight_policies()], ids=lambda each: each.name)
def test_a_row_has_the_actions_of_its_record(policy: ActivationPolicy | WeightPolicy) -> None:
    kinds = {action.kind for row in added(policy).actions for action in row}
    assert kinds - {Kind.F, Kind.B} == policy.actions


@pytest.mark.parametrize("policy", [each for each in weight_policies() if each.on_host])
def test_a_row_loads_stages_as_often_as_the_record_says(policy: WeightPolicy) -> None:
    """What is still there when the pass turns need not come again."""
    loads = [action.kind for action in added(policy).actions[0]].count(Kind.LOAD)
    kept = 0 if policy.stays_loaded else 2
    assert loads == policy.loads * STAGES - kept


def test_each_name_has_a_record() -> None:
    assert {policy.name for policy in activation_policies()} == set(get_args(Recompute))
    assert {policy.name for policy in weight_policies()} == set(get_args(Weights))
    assert activation_policy("full") is RECOMPUTE


def test_the_degrees_of_offload_put_ever_more_on_the_host() -> None:
    assert (RESIDENT.name, *HOSTED) == DEGREES
    assert (HOST_OPTIMIZER.name, HOST.name, HOST_ACTIVATIONS.name) == HOSTED
    assert HOST_OPTIMIZER.actions == HOST.actions < HOST_ACTIVATIONS.actions


def test_a_stage_that_keeps_nothing_else_is_searched_as_it_is_asked_for() -> None:
    assert searched_for(None) == searched_for(SELECTIVE.name) == OPEN == ("none", "full", "selective")
    assert searched_for(RECOMPUTE.name) == ("full", "selective")
    assert searched_for(OFFLOAD.name) == ("offload",)
    assert saves_memory(OPEN) == (False, True)
    assert saves_memory(searched_for(KEEP.name)) == (False,)


def test_a_second_forward_takes_its_seconds() -> None:
    seconds = {policy.name: policy.compute_s(1.0, 2.0) for policy in activation_policies()}
    assert seconds == {"none": 3.0, "selective": 4.0, "full": 4.0, "offload": 3.0, "streamed": 4.0}


def test_states_are_divided_over_replicas_and_over_ranks_that_share_sequences() -> None:
    axes = Axes(dp_shard=2, cp=3)
    assert [state_shards(axes, policy.name) for policy in weight_policies()] == [6, 6, 1, 1, 1, 6]
    alone = Axes(cp=3)
    assert [state_shards(alone, policy.name) for policy in weight_policies()] == [1, 3, 1, 1, 1, 1]


def test_copies_of_a_step() -> None:
    copies = {policy.name: (policy.copies(1), policy.copies(3)) for policy in weight_policies()}
    nothing = ((0, 0), (0, 0))
    stream = ((2, 1), (6, 3))
    assert copies == {
        "resident": nothing,
        "sharded": nothing,
        "host-optimizer": ((1, 1), (1, 1)),
        "host": stream,
        "host-activations": stream,
        "host-computed": nothing,
    }


def test_what_runs_together() -> None:
    names = [policy.name for policy in activation_policies()]
    assert RESIDENT.allowed(names) == SHARDED.allowed(names) == tuple(names)
    assert HOST.allowed(names) == HOST_OPTIMIZER.allowed(names) == ("none", "full", "selective")
    assert HOST_ACTIVATIONS.allowed(names) == ("full",)
