"""Build an Engine for a plan: one process for all stages, or one process per stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outsize.capture.ladder import LossFn
from outsize.errors import BadOption, OutsizeError
from outsize.ir.plan import Plan
from outsize.run.statistics import of_one_replica
from outsize.train.crew import Crew, LocalCrew, ProcessCrew, device_of
from outsize.train.devices import replicas_beside, together_on
from outsize.train.engine import Engine, MakeOptimizer
from outsize.train.hosting import hosted_crew
from outsize.train.mesh import Mesh


def make_crew(
    plan: Plan,
    group: dist.ProcessGroup | None,
    device: torch.device,
    places: tuple[str, ...] | None = None,
    *,
    own_batches: bool = False,
) -> Crew:
    """LocalCrew without a group, its ranks on `places`; ProcessCrew with one, that of the whole run.

    Raises WorldMismatch when the sizes differ; BadOption.
    """
    if group is None:
        beside = len(places or ()) // plan.axes.pp or 1
        if beside > 1:
            _insist_on_beside(plan, places or ())
        return LocalCrew(plan, together_on(places, beside), beside)
    return ProcessCrew(plan, Mesh(plan.axes, group, device), device, own_batches=own_batches)


def make_engine(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    places: tuple[str, ...] | None = None,
    own_batches: bool = False,
    offload_folder: str | Path | None = None,
    **options: Any,
) -> Engine:
    """An engine of the plan, without a group with its ranks on `places`; options are those of Engine.

    Raises WhatIfPlan and BadOption before anything is done.
    """
    plan.check_runs()
    if offload_folder is not None and not plan.streams:
        raise BadOption(
            "offload_folder= is for a plan whose weights or optimizer the host keeps",
            numbers=f"this one has weights {plan.weights!r}",
            next_step='plan(..., weights="host"), or leave it out',
        )
    if plan.form == "modules" and len(set(places or ())) > 1:
        raise BadOption(
            f"{plan.model} runs by modules, in its own Python, and that needs a process for each device",
            numbers=f"devices {', '.join(places or ())}",
            next_step=f"outsize run --nproc-per-node {plan.axes.pp} train.py, without devices=",
        )
    if group is None and replicas_beside(plan) < plan.axes.group_size and len(set(places or ())) > 1:
        raise BadOption(
            "one process has a device for each rank of its pipelines, and the plan wants several for each",
            numbers=f"pp {plan.axes.pp}, {plan.axes.beyond_pp}; devices {', '.join(places or ())}",
            next_step=f"outsize run --nproc-per-node {plan.axes.world_size} train.py, without devices=",
        )
    crew = (
        hosted_crew(model, plan, group, places, offload_folder)
        if plan.streams
        else make_crew(plan, group, device_of(plan), places, own_batches=own_batches)
    )
    if group is not None:
        of_one_replica(model)
    return Engine(model, plan, crew, loss_fn=loss_fn, optimizer=optimizer, **options)


def _insist_on_beside(plan: Plan, places: tuple[str, ...]) -> None:
    """Raise BadOption for what replicas in one process do not do side by side."""
    ways = {plan.recompute_of(stage) for stage in range(len(plan.stages))}
    if plan.bn == "deferred" or ways - {"none", "selective", "full"}:
        raise BadOption(
            "replicas on devices of one process each have their own statistics and activations",
            numbers=f"bn {plan.bn!r}, recompute {', '.join(sorted(ways))}; devices {', '.join(places)}",
            next_step='bn="micro" and recompute="full", or a process per device (outsize run)',
        )


def agreed(group: dist.ProcessGroup | None, make: Callable[[], Plan]) -> Plan:
    """Made on rank 0 and sent to all, so that ranks cannot disagree (measured times differ).

    An error of outsize is raised on all of them, too.
    """
    if group is None:
        return make()
    box: list[Any] = [_made(make) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], OutsizeError):
        raise box[0]
    return box[0]


def _made(make: Callable[[], Plan]) -> Plan | OutsizeError:
    try:
        return make()
    except OutsizeError as error:
        error.shared = True
        return error
