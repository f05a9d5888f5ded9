"""The composition root: the only module that sees the thinking and the doing wing.

graph  = capture(model, args, kwargs)                    what is it made of
costs  = estimate(graph, cluster) | measure(model, ...)  what does each unit cost
plan   = plan(model, args, kwargs, cluster="2xcpu")      how to split it
report = check(model, args, kwargs, stages=3)            does the split compute the same
engine = parallelize(model, args, kwargs, plan=plan)     run it
"""

from __future__ import annotations

import copy
import functools
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.amp.grad_scaler import GradScaler

from outsize.capture.by_modules import capture_model
from outsize.capture.cluster import find_cluster
from outsize.capture.graph import Captured
from outsize.capture.ladder import LossFn
from outsize.capture.measure import Progress, measure_units
from outsize.capture.precision import check_precision
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.fit import Fit, Precision
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import BatchNormMode, Plan, Recompute, ScheduleName
from outsize.ir.profile import Profile
from outsize.ir.timeline import Timeline
from outsize.ir.verdict import Verdict
from outsize.planner import fit as fitting
from outsize.planner import price as pricing
from outsize.planner.fit import Ask
from outsize.planner.roofline import roofline
from outsize.planner.search import Request, search
from outsize.run.load import load_weights
from outsize.run.statistics import of_one_replica
from outsize.run.weight_files import WeightFiles
from outsize.train.batch_dims import Asked
from outsize.train.engine import Engine, MakeOptimizer
from outsize.train.launch import join
from outsize.train.parallel import agreed, make_engine
from outsize.train.subject import Subject, as_batch
from outsize.train.verify import Question, verify

Kwargs = dict[str, Any]
Wishes = TypeVar("Wishes", Ask, Request)
# How many microbatch counts the search looks at when none is given, as multiples of the stages.
_MULTIPLES = (1, 2, 4, 8)


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
) -> ModelGraph:
    """The model as units and values, for this example batch. Weights may be on meta.

    `loss_fn(output, *target)` is captured with the model; without it the loss inside the output counts.
    A model whose own forward cannot be written down (it decides on activations) comes as whole modules,
    `form="modules"`, with the reason and file:line among its notes.
    Raises NotCapturable (with file:line) and ExampleRejected (with the model's own error).
    """
    batch = as_batch(args, kwargs, target)
    return capture_model(model, batch.args, batch.kwargs, loss_fn, batch.target).graph


def estimate(graph: ModelGraph, cluster: str | Cluster = "local") -> Profile:
    """Costs per unit by roofline, for the graph's batch size as one microbatch."""
    return roofline(graph, _cluster(cluster).devices[0])


def measure(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    progress: Progress | None = None,
) -> Profile:
    """Costs per unit, timed on this machine with the example batch as one microbatch.

    Those of a model that runs by modules are estimated by roofline.
    """
    batch = as_batch(args, kwargs, target)
    captured = capture_model(model, batch.args, batch.kwargs, loss_fn, batch.target)
    if captured.graph.form == "modules":
        return estimate(captured.graph)
    return measure_units(captured, model, batch.tensors(), progress=progress)


def plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    cluster: str | Cluster = "local",
    batch_size: int | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: ScheduleName | None = None,
    optimizer: str = "adamw",
    recompute: Recompute = "none",
    bn: BatchNormMode = "micro",
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    measured: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """The fastest split that fits the cluster, by predicted step time.

    `batch_size` is the global batch (default: the example's); what is not given is searched. `measured`
    times the units on this machine instead of estimating them. `recompute="full"` trades time for memory;
    `bn` is how BatchNorm keeps its running statistics (see Plan). `batch_dims` maps an argument's name or
    position, or "target", to the dim along which its samples lie (None: it holds none); what is not given
    follows from the shapes, and where these leave it open from a trial with one sample more.
    Raises NoFeasiblePlan, TooManyStages, TooFewSamples, UnknownDevice.
    """
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    where = _cluster(cluster)
    size = found.batch.size if batch_size is None else batch_size
    request = _request(
        batch_size=size,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        optimizer=optimizer,
        recompute=recompute,
        bn=bn,
    )
    counts = _counts(size, stages or len(where.devices), request.microbatches)
    candidates = {}
    for count in counts:
        captured = found.taken(-(-size // count), size // (microbatches or 1))
        if captured is not None:
            candidates[count] = (captured.graph, _profile(found, captured, where, measured, progress))
    return search(request, candidates, where)


# `parallelize` and `check` take a plan under the name `plan`.
make_plan = plan


def fit(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    cluster: str | Cluster = "local",
    batch_size: int | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: ScheduleName | None = None,
    optimizer: str = "adamw",
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
) -> Fit:
    """Whether a training step fits the cluster, on each device by cause, and what to change if it does not.

    Weights may be on meta; nothing is allocated and no device needs to be there. What is not given is free.
    Raises as `plan`, but what does not fit is an answer and no error.
    """
    check_precision(precision)
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    where = _cluster(cluster)

    request = _checked(
        Ask,
        batch_size=found.batch.size if batch_size is None else batch_size,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        optimizer=optimizer,
        precision=precision,
        recompute=recompute,
    )

    least = request.batch_size // (request.microbatches or 1)

    @functools.cache
    def at(samples: int, precision: str) -> tuple[ModelGraph, Profile] | None:
        taken = found.under(precision).taken(samples, least)
        return (taken.graph, roofline(taken.graph, where.devices[0])) if taken else None

    return fitting.fit(request, at, where)


def price(
    chosen: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    measured: bool = False,
) -> tuple[Plan, ModelGraph, Timeline]:
    """A plan (perhaps edited by hand) checked against the model and priced as it is, with its timeline.

    Raises ModelMismatch for another model's plan and BadPlan for stages that do not cover the model.
    """
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    captured = found.captured(chosen.microbatch_size)
    cluster = _cluster(chosen.cluster)
    profile = _profile(found, captured, cluster, measured, None)
    priced = pricing.price(chosen, captured.graph, profile, cluster)
    return priced, captured.graph, pricing.timeline(chosen, captured.graph, profile, cluster)


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
    seed: int = 0,
    weights: str | Path | None = None,
    batch_dims: Asked | None = None,
    scaler: GradScaler | None = None,
    **wishes: Any,
) -> Engine:
    """An engine that trains by the plan: under torchrun one process per stage, else all stages here.

    Every rank builds the same model (same seed) and passes the same batches; weights of other stages are
    freed. `optimizer` gets this rank's parameters and returns an ordinary torch optimizer
    (`engine.optimizer`). Without a plan one is made on rank 0; `wishes` are keyword arguments of `plan`.
    `weights` (a .safetensors file, an index, or a folder with one) is for a model on meta: every rank
    reads its own tensors only.
    Raises WorldMismatch, ModelMismatch, BadPlan, BadOption, BadWeights.
    """
    _insist_on_plan(plan, wishes)
    files = WeightFiles(weights) if weights is not None else None
    cuda = torch.cuda.is_available() and (plan is None or plan.stages[0].device.startswith("cuda"))
    world = join("cuda" if cuda else "cpu")
    if world.group is not None:
        of_one_replica(model)
    if plan is None:
        cluster = "local" if cuda else f"{max(world.world_size, wishes.get('stages') or 1)}xcpu"
        given = {"loss_fn": loss_fn, "target": target, "batch_dims": batch_dims}
        wishes = {"cluster": cluster, **given, **wishes}
        plan = agreed(world.group, lambda: make_plan(model, args, kwargs, **wishes))
    engine = make_engine(
        model,
        plan,
        world.group,
        loss_fn=loss_fn,
        optimizer=optimizer,
        clip_norm=clip_norm,
        seed=seed,
        weights=files,
        batch_dims=batch_dims,
        scaler=scaler,
    )
    example = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims).batch
    engine.prepare(example.resized(plan.batch_size))
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
    `weights` as in `parallelize`; a copy of the model gets all of them.
    """
    model = model if weights is None else _loaded(model, weights)
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    batch = found.batch
    count = microbatches if microbatches is not None else 1 if bn == "sync" else 4
    how = {"schedule": schedule, "recompute": recompute, "bn": bn}
    request = _request(batch_size=batch.size, microbatches=count, stages=stages, **how)
    start = time.perf_counter()
    captured = found.captured(-(-batch.size // count) if plan is None else plan.microbatch_size)
    capture_s = time.perf_counter() - start
    if plan is None:
        where = find_cluster(f"{stages}xcpu")
        plan = search(request, {count: (captured.graph, roofline(captured.graph, where.devices[0]))}, where)
    plan.bounds(captured.graph)  # a plan of another model, or with other units, must not pass
    question = Question(model, batch, loss_fn, plan, captured, capture_s, steps, seed)
    return verify(question, processes=processes)


def _loaded(model: nn.Module, weights: str | Path) -> nn.Module:
    """A copy of the model with all its weights."""
    model = copy.deepcopy(model)
    load_weights(model, WeightFiles(weights), torch.device("cpu"), set())
    return model


def _profile(
    found: Subject, captured: Captured, cluster: Cluster, measured: bool, progress: Progress | None
) -> Profile:
    """Costs of the captured units: timed here, or by roofline for the cluster's device."""
    if not measured or captured.graph.form == "modules":
        return roofline(captured.graph, cluster.devices[0])
    batch = found.batch.resized(captured.graph.batch_size)
    return measure_units(captured, found.module, batch.tensors(), progress=progress)


def _request(**fields: Any) -> Request:
    if fields["bn"] == "sync":
        fields["microbatches"] = _the_whole_batch(fields["microbatches"])
    return _checked(Request, **fields)


def _checked(kind: type[Wishes], **fields: Any) -> Wishes:
    """What is asked for, or BadOption for a value that makes no sense."""
    try:
        return kind(**fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = problem["loc"][0]
        raise BadOption(
            f"{name}={problem['input']!r} makes no sense",
            numbers=problem["msg"],
            next_step=f"another {name}, or none",
        ) from None


def _the_whole_batch(microbatches: int | None) -> int:
    """Statistics of the whole batch want it in one piece."""
    if microbatches in (None, 1):
        return 1
    raise BadOption(
        f"bn='sync' takes the statistics of the whole batch, which {microbatches} microbatches tear apart",
        next_step="microbatches=1, where stages do not overlap, or bn='deferred'",
    )


def _insist_on_plan(chosen: Plan | None, wishes: Kwargs) -> None:
    if not isinstance(chosen, Plan | None):
        raise BadOption(
            f"plan is a {type(chosen).__name__}, no Plan",
            next_step="plan=outsize.plan(...), or outsize.Plan.load('plan.json')",
        )
    if chosen is not None and wishes:
        raise BadOption(
            f"{', '.join(wishes)} cannot be asked for beside a plan, which says it already",
            next_step="leave them out, or leave out plan=",
        )


def _cluster(cluster: str | Cluster) -> Cluster:
    return find_cluster(cluster) if isinstance(cluster, str) else cluster


def _counts(batch_size: int, stages: int, microbatches: int | None) -> list[int]:
    """Microbatch counts worth a capture: the one asked for, or divisors of the batch near multiples of p."""
    if microbatches is not None:
        return [microbatches] if 0 < microbatches <= batch_size else []
    wanted = [stages * factor for factor in _MULTIPLES]
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    near = {min(divisors, key=lambda d, w=w: abs(d - w)) for w in wanted}
    return sorted({1, *near})
