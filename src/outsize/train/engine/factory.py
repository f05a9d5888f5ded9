"""Builds an Engine for a plan: one process for all stages, or one process per stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch import nn

from outsize.errors import BadOption, OutsizeError, UnsupportedPlan, error_of
from outsize.ir.plan import Plan
from outsize.policies.slices import SLICES
from outsize.run.interpreter.in_process import InProcessRanks
from outsize.run.stage.batchnorm import use_local_statistics
from outsize.run.transport.control_messages import broadcast_json
from outsize.train.context.options import DEFAULTS, EngineOptions, RankOptions
from outsize.train.context.run_context import RunContext
from outsize.train.crew.devices import concurrent_replicas, in_process_ranks
from outsize.train.crew.hosted import hosted, ranks_beside_host, ranks_on_one_device, with_host_stages
from outsize.train.engine.engine import Engine

ONE_PLACE: Final = RankOptions()


def make_run(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    options: EngineOptions = DEFAULTS,
    ranks: RankOptions = ONE_PLACE,
) -> RunContext:
    """Returns what is known of a run before its first step; without a group all ranks are in this process.

    Raises UnsupportedPlan, BadOption and WorldMismatch before anything is done.
    """
    plan.check_runs()
    if plan.slices > 1 and options.compiled is not None:
        raise UnsupportedPlan(
            "stages of a plan in slices of sequences are not compiled: Python keeps what slices read",
            numbers=f"slices {plan.slices}, compiled={options.compiled!r}",
            next_step=f"leave out compiled=, or {SLICES.typed(1)}",
        )
    _insist_on_devices(plan, group, ranks)
    if group is None:
        together, replicas = _local_ranks(plan, ranks.places)
        run = RunContext.of_one_process(model, plan, options, together, replicas)
    else:
        run = RunContext.of_process(model, plan, group, options, own_batches=ranks.own_batches)
    if plan.host_stages:
        return with_host_stages(run)
    return hosted(run, ranks.offload_folder) if plan.streams else run


def make_engine(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    options: EngineOptions = DEFAULTS,
    ranks: RankOptions = ONE_PLACE,
) -> Engine:
    """Returns an engine of the plan, as `make_run` has it."""
    run = make_run(model, plan, group, options, ranks)
    if group is not None:
        use_local_statistics(model)
    return Engine(run)


def _local_ranks(plan: Plan, places: tuple[str, ...] | None) -> tuple[InProcessRanks, int]:
    """Returns the runner of one process's ranks on their devices, and how many pipelines run there."""
    if plan.streams:
        return ranks_on_one_device(plan, places), 1
    if plan.host_stages:
        return ranks_beside_host(plan, places), 1
    local_replicas = len(places or ()) // plan.axes.pp or 1
    if local_replicas > 1:
        _insist_on_local_replicas(plan, places or ())
    return in_process_ranks(places, local_replicas), local_replicas


def _insist_on_devices(plan: Plan, group: dist.ProcessGroup | None, ranks: RankOptions) -> None:
    """Raises BadOption for places and folders that the plan has no use for."""
    places, offload_folder = ranks.places or (), ranks.offload_folder
    several = len(set(places)) > 1
    if offload_folder is not None and not plan.streams:
        raise BadOption(
            "offload_folder= is for a plan whose weights or optimizer the host keeps",
            numbers=f"this one has weights {plan.weights!r}",
            next_step='plan(..., weights="host"), or leave it out',
        )
    if plan.form == "modules" and several:
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, and that needs a process for each device",
            numbers=f"devices {', '.join(places)}",
            next_step=f"outsize run --nproc-per-node {plan.axes.pp} train.py, without devices=",
        )
    if group is None and concurrent_replicas(plan) < plan.axes.group_size and several:
        raise BadOption(
            "one process has a device for each rank of its pipelines, and the plan needs several for each",
            numbers=f"pp {plan.axes.pp}, {plan.axes.beyond_pp}; devices {', '.join(places)}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py, without devices=",
        )


def _insist_on_local_replicas(plan: Plan, places: tuple[str, ...]) -> None:
    """Raises BadOption for what replicas in one process cannot do at the same time."""
    policies = plan.activation_policies
    if plan.bn == "deferred" or any(policy.uses_host for policy in policies):
        names = ", ".join(sorted({policy.name for policy in policies}))
        raise BadOption(
            "replicas on devices of one process each have their own statistics and activations",
            numbers=f"bn {plan.bn!r}, recompute {names}; devices {', '.join(places)}",
            next_step='bn="micro" and recompute="full", or a process per device (outsize run)',
        )


def agreed(
    group: dist.ProcessGroup | None, make: Callable[[], Plan], meanwhile: Callable[[], object] | None = None
) -> Plan:
    """Returns the plan that rank 0 makes, on all ranks, so that they cannot disagree (measured times differ);
    `meanwhile` is what the others do until it is there.

    An error of outsize is raised on all of them, too.
    """
    if group is None:
        return make()
    made = _made(make) if group.rank() == 0 else None
    if made is None and meanwhile is not None:
        meanwhile()
    is_error = isinstance(made, OutsizeError)
    known = broadcast_json(made.fields() if is_error else made and made.model_dump_json(), group)
    if made is None:
        made = error_of(known) if isinstance(known, dict) else Plan.model_validate_json(known)
    if isinstance(made, OutsizeError):
        raise made
    return made


def _made(make: Callable[[], Plan]) -> Plan | OutsizeError:
    try:
        return make()
    except OutsizeError as error:
        return error.on_all_ranks()
