"""Questions that are answered without running anything: what is it made of, does it fit, how to split it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from outsize.api.asking import Question, ask, checked, cluster_of, finest, profile_of, request_of, styled
from outsize.capture.by_modules import capture_model
from outsize.capture.ladder import LossFn
from outsize.capture.measure import How, Progress
from outsize.capture.precision import check_precision
from outsize.errors import NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.ir.cluster import Cluster
from outsize.ir.fit import Fit
from outsize.ir.graph import ModelGraph
from outsize.ir.offload import Weights
from outsize.ir.plan import BatchNormMode, Plan, Precision, Recompute, ScheduleName
from outsize.ir.profile import Profile, ProfileSet
from outsize.ir.schedule import Schedule
from outsize.ir.timeline import Timeline
from outsize.planner import fit as fitting
from outsize.planner import outlook as outlooking
from outsize.planner import price as pricing
from outsize.planner.fit import Ask
from outsize.planner.fitted import as_asked, otherwise
from outsize.planner.outlook import Outlook
from outsize.planner.request import Request, Space
from outsize.planner.roofline import roofline
from outsize.planner.search import instead, search
from outsize.train.batch_dims import Asked
from outsize.train.measuring import measure_sizes
from outsize.train.subject import Subject, as_batch

Kwargs = dict[str, Any]


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
    return roofline(graph, cluster_of(cluster).devices[0])


def measure(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    sizes: Sequence[int] | None = None,
    how: How | None = None,
    progress: Progress | None = None,
) -> ProfileSet:
    """Costs per unit, timed on this machine at each microbatch size (default: the example batch as one).

    `plan(..., measured=...)` takes it. Raises BadOption for weights on meta or a model that runs by modules.
    """
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    return measure_sizes(found, [found.batch.size] if sizes is None else sizes, how, progress)


def plan(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    cluster: str | Cluster = "local",
    batch_size: int | None = None,
    microbatches: int | None = None,
    stages: int | None = None,
    schedule: ScheduleName | Schedule | None = None,
    optimizer: str = "adamw",
    precision: Precision = "fp32",
    recompute: Recompute | None = None,
    bn: BatchNormMode = "micro",
    axes: Space | None = None,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    sequence_parallel: bool | None = None,
    weights: Weights | None = None,
    what_if: bool = False,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    measured: bool | ProfileSet = False,
    progress: Progress | None = None,
) -> Plan:
    """The fastest split that fits the cluster, by predicted step time.

    `batch_size` is the global batch (default: the example's); what is not given is searched. `schedule` may
    be one of your own (`outsize.Schedule.from_csv(text)`), which says stages and microbatches. `measured`
    times the units on this machine instead of estimating them, or is what `measure` found; then only the
    microbatch sizes that it covers are looked at. `precision` is that of training ("mixed": autocast);
    weights are left as they are, so a model that is bf16 by itself needs none. `recompute="full"` trades time
    for memory on every stage, "offload" has what waits for its backward on the host; not given, the faster of
    both where a stage would not fit. `bn` is how BatchNorm keeps its running statistics (see Plan).
    `dp_replicate`, `dp_shard` (FSDP) and `tp` give every stage that many devices; `microbatches` are then
    those of a replica. `sequence_parallel`: whether ranks of tp divide what lies
    between layers, too; not given, what is faster, or as fast and smaller. `what_if` is `axes="all"` with
    what this version only plans; a plan that has some of it says so (`Plan.beyond`). `batch_dims` maps
    an argument's name or position, or "target", to the dim along which its samples lie (None: it holds none);
    what is not given follows from the shapes, and where these leave it open from a trial with one sample
    more.
    `axes="all"` searches every axis that is not given, of those that run; not given, that is done where no
    pipeline fits (a pipeline has one device's bits, sums over replicas or tp are rounded otherwise), unless
    `axes="pp"`.
    `weights="host-optimizer"` keeps the optimizer and its states on the host, `weights="host"` weights and
    gradients as well and brings stage after stage to one device, `weights="host-activations"` also what
    stages hand to each other; not given, the fastest of the three is for a model that fits in no other way.
    `weights="resident"` beside `dp_shard` has weights and gradients whole during a step, and sends less.
    Raises NoFeasiblePlan, TooManyStages, TooFewSamples, UnknownDevice, InvalidSchedule.
    """
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    return _planned(
        found,
        cluster_of(cluster),
        measured=measured,
        progress=progress,
        batch_size=batch_size,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        optimizer=optimizer,
        precision=precision,
        recompute=recompute,
        bn=bn,
        axes=axes,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        tp=tp,
        sequence_parallel=sequence_parallel,
        weights=weights,
        what_if=what_if,
    )[1]


def _planned(found: Subject, cluster: Cluster, **wishes: Any) -> tuple[Question, Plan]:
    """The best plan, and what was asked for it: a pipeline, with the smallest microbatches where none with
    larger ones fits; of all axes that run where none does and nobody has said that it should be one.
    """
    asked = ask(found, cluster, **wishes)
    try:
        return asked, search(asked.request, asked.candidates, cluster)
    except (NoFeasiblePlan, TooManyStages) as refused:
        finer = _finer(found, asked, wishes) if isinstance(refused, NoFeasiblePlan) else None
        if finer is not None:
            return finer
        if asked.request.open or not asked.request.further(len(cluster.devices)):
            raise
        more = ask(found, cluster, **{**wishes, "axes": "all"})
        return more, instead(refused, more.request, more.candidates, cluster)


def _finer(found: Subject, asked: Question, wishes: Kwargs) -> tuple[Question, Plan] | None:
    """With the most microbatches that the model takes, where they were not looked at."""
    count = None if isinstance(wishes["measured"], ProfileSet) else finest(found, asked)
    if count is None:
        return None
    more = ask(found, asked.cluster, **{**wishes, "microbatches": count})
    with suppress(NoFeasiblePlan):
        return more, search(more.request, more.candidates, more.cluster)
    return None


def outlook(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | None = None,
    curves: bool = False,
    cluster: str | Cluster = "local",
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    measured: bool | ProfileSet = False,
    progress: Progress | None = None,
    **wishes: Any,
) -> Outlook:
    """A plan with its graph, predicted timeline and advice; `curves` adds what other choices would do.

    Without `plan` one is made, as by the function of that name, whose other keyword arguments are the
    `wishes`; a given one is priced as it is. Raises as `plan` and `price`.
    """
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    if plan is not None:
        return _priced(plan, found, measured)
    asked, made = _planned(found, cluster_of(cluster), measured=measured, progress=progress, **wishes)
    taken = asked.candidates[made.microbatches * made.axes.replicas]
    seen = outlooking.outlook(made, *taken, asked.cluster)
    return outlooking.with_curves(seen, asked.request, asked.candidates, asked.cluster) if curves else seen


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
    recompute: Recompute | None = None,
    axes: Space | None = None,
    dp_replicate: int = 1,
    dp_shard: int = 1,
    tp: int = 1,
    weights: Weights | None = None,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
) -> Fit:
    """Whether a training step fits the cluster, on each device by cause, and what to change if it does not.

    Weights may be on meta; nothing is allocated and no device needs to be there. What is not given is free,
    but for `recompute`: that a stage should compute its forwards anew is a change. Where no pipeline fits,
    it is asked what `plan` would do, unless `axes="pp"`: a mesh of other axes, or weights on the host.
    `axes="all"`, further axes, `weights`, schedule "auto" and recompute "selective" or "offload" are answered
    by the plan that `plan` makes for them. Raises as `plan`, but what does not fit is an answer and no error.
    """
    check_precision(precision)
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    wishes = {
        "batch_size": found.batch.size if batch_size is None else batch_size,
        "microbatches": microbatches,
        "stages": stages,
        "schedule": schedule,
        "optimizer": optimizer,
        "precision": precision,
        "recompute": recompute,
        "axes": axes,
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "tp": tp,
        "weights": weights,
    }
    request, where = request_of(**wishes), cluster_of(cluster)
    judged = _judged(found, request, where) if request.plain else None
    if judged is not None and judged.fits:
        return judged
    try:
        _, plan = _planned(found, where, measured=False, progress=None, **wishes)
    except (NoFeasiblePlan, TooManyStages) as refused:
        return judged or _fitted(found, request, refused, where)
    return otherwise(judged, plan, where) if judged else _fitted(found, request, plan, where)


def _judged(found: Subject, request: Request, cluster: Cluster) -> Fit:
    """About pipelines, each of whose stages keeps all, or recomputes all."""
    wanted = checked(Ask, **request.model_dump(include=set(Ask.model_fields)))
    least = wanted.batch_size // (wanted.microbatches or 1)

    @functools.cache
    def at(samples: int, precision: str) -> tuple[ModelGraph, Profile] | None:
        taken = found.under(precision).taken(samples, least)
        return (taken.graph, roofline(taken.graph, cluster.devices[0])) if taken else None

    return fitting.fit(wanted, at, cluster)


def _fitted(found: Subject, request: Request, answer: Plan | OutsizeError, cluster: Cluster) -> Fit:
    graph = found.under(request.precision).captured(request.batch_size).graph
    return as_asked(request, answer, graph, cluster)


def price(
    chosen: Plan,
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    measured: bool | ProfileSet = False,
) -> tuple[Plan, ModelGraph, Timeline]:
    """A plan (perhaps edited by hand) checked against the model and priced as it is, with its timeline.

    Raises ModelMismatch for another model's plan and BadPlan for stages that do not cover the model.
    """
    seen = _priced(chosen, Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims), measured)
    return seen.plan, seen.graph, seen.timeline


def _priced(chosen: Plan, found: Subject, measured: bool | ProfileSet) -> Outlook:
    found, cluster = found.under(chosen.precision), cluster_of(chosen.cluster)
    captured = found.captured(chosen.microbatch_size)
    graph = styled(found, captured, chosen.axes.tp)
    profile = profile_of(found, captured, cluster, measured, None)
    return outlooking.outlook(pricing.price(chosen, graph, profile, cluster), graph, profile, cluster)
