"""A plan at work: train by it, and check that its numbers are those of one process."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from outsize.api.asking import request_of
from outsize.api.planning import Kwargs
from outsize.api.planning import plan as make_plan
from outsize.capture.cluster import find_cluster
from outsize.capture.ladder import LossFn
from outsize.errors import BadOption
from outsize.ir.devices import places_in
from outsize.ir.plan import BatchNormMode, Plan, Recompute, ScheduleName
from outsize.ir.verdict import Verdict
from outsize.planner.roofline import roofline
from outsize.planner.search import search
from outsize.planner.utilisation import utilisation
from outsize.run.load import load_weights
from outsize.run.statistics import of_one_replica
from outsize.run.weight_files import WeightFiles
from outsize.schedules.refine import by_blocks
from outsize.train.batch_dims import Asked
from outsize.train.devices import cluster_of, places_for, places_of
from outsize.train.engine import Engine, MakeOptimizer
from outsize.train.handshake import shake_hands
from outsize.train.launch import World, join
from outsize.train.norm import Clipping
from outsize.train.parallel import agreed, make_engine
from outsize.train.subject import Subject, as_batch
from outsize.train.tensor_ranks import insist_on_bits
from outsize.train.variant import KEPT
from outsize.train.verify import Question, verify


def parallelize(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | None = None,
    loss_fn: LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    target: Any = None,
    clip_norm: float | None = None,
    clipping: Clipping = "exact",
    seed: int = 0,
    weights: str | Path | None = None,
    batch_dims: Asked | None = None,
    scaler: GradScaler | None = None,
    devices: Sequence[str | torch.device] | None = None,
    captures: int = KEPT,
    own_batches: bool = False,
    offload_folder: str | Path | None = None,
    compiled: str | None = None,
    backend: str | None = None,
    **wishes: Any,
) -> Engine:
    """An engine that trains by the plan: under torchrun one process per stage, else all stages here.

    `devices=["cuda:0", "cuda:1"]`: here, in one process, a rank on each of them (or all on one, named as
    often). A plan that was made for such devices needs no `devices`. Batches may be anywhere.

    Each shape of a microbatch is captured when first met; the `captures` used last are kept. `compiled` is a
    backend of torch.compile for the stages' functions: "inductor" fuses kernels, "aot_eager" keeps every bit.

    Every rank builds the same model (same seed) and passes the same batches, or under `own_batches` its own
    replica's samples alone (`engine.batch_sampler`); weights of other stages are freed. `optimizer` gets
    this rank's parameters and returns an ordinary torch optimizer (`engine.optimizer`). Without a plan one is
    made on rank 0; `wishes` are keyword arguments of `plan`. `clip_norm` clips by the norm of all gradients,
    for which an optimizer on the host waits; with `clipping="speculative"` it does not, and takes its step
    back where the norm was too large: the same bits, for 12 bytes of the host more per parameter (AdamW).
    `weights` (a .safetensors file, an index, or a folder with one) is for a model on meta: every rank
    reads its own tensors only. `offload_folder`: where a plan with `weights="host"` or another degree has
    weights, gradients and states, as files and not in memory. `backend` is torch's name of what joins the
    processes ("mpi", "nccl"), when it shall not be gloo for CPUs and the device's own; a group that is there
    already is taken as it is.
    Raises WorldMismatch, ModelMismatch, BadPlan, WhatIfPlan, BadOption, BadWeights, UnknownDevice.
    """
    _insist_on_plan(plan, wishes)
    named = None if devices is None else places_of(devices)
    files = WeightFiles(weights) if weights is not None else None
    cuda = torch.cuda.is_available() and (plan is None or plan.stages[0].device.startswith("cuda"))
    world = join("cuda" if cuda else "cpu", backend=backend)
    group = world.group
    if world.world_size == 1 and (named or (plan is not None and places_in(plan.cluster))):
        group = None  # one process, started by a launcher
    if group is not None:
        _insist_on_no_devices(named, world)
        of_one_replica(model)
        shake_hands(group, plan, model)
    if plan is None:
        cluster = "local" if cuda else f"{max(world.world_size, wishes.get('stages') or 1)}xcpu"
        cluster = cluster if named is None else _cluster_of(named, wishes)
        given = {"loss_fn": loss_fn, "target": target, "batch_dims": batch_dims}
        wishes = {"cluster": cluster, **given, **wishes}
        plan = agreed(group, lambda: make_plan(model, args, kwargs, **wishes))
    subject = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    if plan.shards and group is not None:
        plan = by_blocks(plan, subject.captured(plan.microbatch_size).graph)
    engine = make_engine(
        model,
        plan,
        group,
        loss_fn=loss_fn,
        optimizer=optimizer,
        clip_norm=clip_norm,
        clipping=clipping,
        seed=seed,
        weights=files,
        batch_dims=batch_dims,
        scaler=scaler,
        explain=utilisation,
        captures=captures,
        compiled=compiled,
        places=places_for(plan, named) if group is None else None,
        own_batches=own_batches,
        offload_folder=offload_folder,
    )
    times = engine.crew.replicas.count if engine.crew.replicas.own_batches else 1
    engine.prepare(subject.batch.resized(max(1, plan.batch_size // times)))
    return engine


def check(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    stages: int = 2,
    microbatches: int | None = None,
    schedule: ScheduleName = "1f1b",
    recompute: Recompute = "none",
    bn: BatchNormMode = "micro",
    processes: bool = False,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    plan: Plan | None = None,
    steps: int = 1,
    seed: int = 0,
    weights: str | Path | None = None,
) -> Verdict:
    """Run the model split and plain on the same batch, and compare loss, gradients, buffers, parameters.

    The cuts are the planner's unless a plan is given; four microbatches, but one with `bn="sync"`. The
    model itself is not changed.
    `weights` as in `parallelize`; a copy of the model gets all of them. Raises WhatIfPlan.
    """
    if plan is not None:
        plan.check_runs()
    if plan is not None and not processes:
        insist_on_bits(plan)
    model = model if weights is None else _loaded(model, weights)
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    batch = found.batch
    count = microbatches if microbatches is not None else 1 if bn == "sync" else 4
    how = {"schedule": schedule, "recompute": recompute, "bn": bn}
    request = request_of(batch_size=batch.size, microbatches=count, stages=stages, **how)
    start = time.perf_counter()
    captured = found.captured(-(-batch.size // count) if plan is None else plan.microbatch_size)
    capture_s = time.perf_counter() - start
    if plan is None:
        where = find_cluster(f"{stages}xcpu")
        plan = search(request, {count: (captured.graph, roofline(captured.graph, where.devices[0]))}, where)
    plan.owners(captured.graph)  # a plan of another model, or with other units, must not pass
    question = Question(model, batch, loss_fn, plan, captured, capture_s, steps, seed)
    return verify(question, processes=processes)


def _loaded(model: nn.Module, weights: str | Path) -> nn.Module:
    """A copy of the model with all its weights."""
    model = copy.deepcopy(model)
    load_weights(model, WeightFiles(weights), torch.device("cpu"), set())
    return model


def _cluster_of(places: tuple[str, ...], wishes: Kwargs) -> str:
    if "cluster" in wishes:
        raise BadOption(
            f"cluster={wishes['cluster']!r} beside devices, which are the cluster", next_step="leave it out"
        )
    return cluster_of(places, wishes.get("stages"))


def _insist_on_no_devices(places: tuple[str, ...] | None, world: World) -> None:
    if places is not None:
        raise BadOption(
            "devices= is for one process, and this is one of several",
            numbers=f"rank {world.rank} of {world.world_size}; devices {', '.join(places)}",
            next_step="leave out devices= (each process has its own), or start the script with python alone",
        )


def _insist_on_plan(chosen: Plan | None, wishes: Kwargs) -> None:
    if not isinstance(chosen, Plan | None):
        raise BadOption(
            f"plan is a {type(chosen).__name__}, no Plan",
            next_step="plan=outsize.plan(...), or outsize.Plan.load('plan.json')",
        )
    if chosen is not None:
        chosen.check_runs()
    if chosen is not None and wishes:
        raise BadOption(
            f"{', '.join(wishes)} cannot be asked for beside a plan, which says it already",
            next_step="leave them out, or leave out plan=",
        )
