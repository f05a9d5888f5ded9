"""Answers questions without running anything: what is the model made of, does it fit, how to split it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, Unpack

from torch import nn

from outsize.api.cheapest import cheapest
from outsize.api.loss_pieces import with_best_loss
from outsize.api.options import (
    FitOptions,
    MeasureOptions,
    OutlookOptions,
    PlanOptions,
    PriceOptions,
    reads_options,
)
from outsize.api.problem import (
    Profiler,
    SearchedPlan,
    adapted_case,
    asked_cluster,
    asked_in,
    asked_of,
    case_of,
    cluster_of,
    styled,
)
from outsize.api.records import Loss
from outsize.capture.fakes.precision import check_precision
from outsize.capture.graph.by_modules import capture_model
from outsize.capture.recording.fallbacks import LossFn
from outsize.device.accelerators import type_of
from outsize.errors import BadOption, NoFeasiblePlan, OutsizeError, TooManyStages
from outsize.ir.answers.fit import Fit
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile, ProfileSet
from outsize.ir.timeline import Timeline
from outsize.planner.advice import overview as outlooking
from outsize.planner.advice.overview import Outlook
from outsize.planner.costs.kernel_stacks import kernel_stack
from outsize.planner.costs.roofline import roofline
from outsize.planner.fit import fit as fitting
from outsize.planner.fit.from_plan import as_asked, with_plan
from outsize.planner.search import evaluate_plan as pricing
from outsize.planner.search.caveats import with_narrow_sums
from outsize.planner.search.incumbents import Incumbents, Limits
from outsize.planner.search.search import search
from outsize.planner.search.sliced import search_in_slices
from outsize.policies.precisions import FP32, precision_policy
from outsize.run.stage.to_device import no_common_casts
from outsize.train.measure.training_case import TrainingCase, as_batch, bare_graph
from outsize.train.measure.units import measure_sizes

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@reads_options()
def capture(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | Loss | None = None,
    target: Any = None,
) -> ModelGraph:
    """Returns the model as units and values, for this example batch. Weights may be on meta.

    `loss_fn(output, *target)` is captured with the model; without it the loss inside the output counts. A
    model whose own forward cannot be recorded (it decides on activations) is returned as whole modules,
    `form="modules"`, with the reason and file:line among its notes. Raises NotCapturable (with file:line) and
    ExampleRejected (with the model's own error).
    """
    batch = as_batch(args, kwargs, target)
    return capture_model(
        model, batch.args, batch.kwargs, Loss.of(loss_fn, "loss_fn").function, batch.target
    ).graph


@reads_options()
def estimate(graph: ModelGraph, cluster: str | Cluster = "local") -> Profile:
    """Returns the costs of each unit by roofline, for the graph's batch size as one microbatch."""
    if not isinstance(graph, ModelGraph):
        raise BadOption(
            f"graph is a {type(graph).__name__}, no captured model",
            next_step="outsize.estimate(outsize.capture(model, (x,)), cluster='2xh100-80gb')",
        )
    return roofline(graph, cluster_of(cluster).devices[0])


@reads_options(MeasureOptions)
def measure(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[MeasureOptions]
) -> ProfileSet:
    """Returns the costs of each unit, timed on this machine at each microbatch size.

    `sizes` are the microbatch sizes (default: the example batch as one), `how` the number of laps and
    threads, and `progress(done, total)` is called after each lap; `loss_fn`, `target`, `batch_dims` as for
    `plan`. `plan(..., measured=...)` takes the result. Raises BadOption for weights on meta or a model that
    runs by modules.
    """
    case = case_of(model, args, kwargs, options)
    sizes = options.get("sizes")
    sizes = [case.batch.size] if sizes is None else sizes
    return measure_sizes(case, sizes, options.get("how"), options.get("progress"))


@reads_options(PlanOptions)
def plan(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[PlanOptions]
) -> Plan:
    """Returns the fastest split that fits the cluster, by predicted step time.

    What is not given is searched, unless its line says something else. The options:

    - `request`: an `outsize.Request`, whose fields are all that can be asked for (`help(outsize.Request)`).
      These fields are options by themselves as well, each given once: `cluster`, `batch_size`,
      `microbatches`, `stages`, `schedule`, `optimizer`, `precision`, `recompute`, `weights`, `axes`, `exact`,
      `measured`. The rare ones are fields alone: `bn`, `sequence_parallel`, `loss_pieces`,
      `module_pieces`, `objective`, `inference`, `lora`, `time_limit_s`, `on_better` and `progress`.
    - `axes`: {"tp": 2, "dp_shard": 4}, sizes of the mesh; other axes are searched, but with "others": 1.
      "all" (the default) searches every axis that runs; "pp" searches none.
    - `exact`: True keeps to layouts whose results are bit-identical to one device's.
    - `loss_fn`, `target`: the loss is `loss_fn(output, *target)`; without it the output holds the loss.
    - `batch_dims`: maps an argument's name or position, or "target", to the dim along which its samples lie
      (None: it holds none). Where each sample has rows of its own, the name of the argument that counts them,
      or a function of the model's arguments that does. By default this follows from the shapes, and where
      these are ambiguous from a trial with one more sample.

    Raises BadOption, NoFeasiblePlan, TooManyStages, TooFewSamples, UnknownDevice, InvalidSchedule.
    """
    asked = asked_in(options)
    incumbents = Incumbents(asked.time_limit_s, asked.on_better)
    case = adapted_case(model, args, kwargs, options, asked)
    request = asked_of(case, asked)
    return plan_case(case, request, asked_cluster(asked), Profiler.of(asked), incumbents=incumbents).plan


def plan_case(
    case: TrainingCase,
    request: PlanRequest,
    cluster: Cluster,
    profiler: Profiler,
    *,
    explains: bool = True,
    incumbents: Incumbents | None = None,
) -> SearchedPlan:
    """Returns the best plan, with what it was searched in; `search` says what is tried in which order.

    Unless it `explains`, nothing says what pipelines lack that do not fit. `incumbents` are told of the best
    plan so far, and end the search with it where its time is over. Raises as `search`.
    """
    limits = Limits(explains=explains, incumbents=incumbents or Incumbents())
    if request.objective == "cost":
        found = _cheapest_case(case, request, cluster, profiler, limits)
    else:
        found = _fastest_case(case, request, cluster, profiler, limits)
    return replace(found, plan=limits.incumbents.told(found.plan))


def _fastest_case(
    case: TrainingCase, request: PlanRequest, cluster: Cluster, profiler: Profiler, limits: Limits
) -> SearchedPlan:
    """Returns the plan with the shortest step."""
    cluster = kernel_stack(request.kernels).on(cluster)
    _insist_on_common_casts(request, cluster)
    searched = None if request.opens_slices and len(cluster.devices) > 1 else 1
    case = replace(case, slices=request.slices or searched)

    def solve(case: TrainingCase, request: PlanRequest, loses_s: float = inf) -> SearchedPlan:
        if limits.incumbents.end_search():
            raise NoFeasiblePlan(
                "the time limit is over, and there is a plan already",
                numbers="nothing more is searched",
                next_step="a longer time_limit_s (--time-limit)",
            )
        models = profiler.models(case, request, cluster)
        if request.in_slices:
            plan = search_in_slices(request, models, cluster, limits)
            return SearchedPlan(plan, request, models)
        smallest = functools.partial(profiler.add_smallest, models, case, request, cluster)
        plan = search(request, models, cluster, smallest, replace(limits, loses_s=loses_s))
        return SearchedPlan(plan, request, models)

    found = with_best_loss(case, request, cluster, solve)
    plan = with_narrow_sums(pricing.with_step_memory(found.plan, *found.model, cluster))
    return replace(found, plan=plan)


def _cheapest_case(
    case: TrainingCase, request: PlanRequest, cluster: Cluster, profiler: Profiler, limits: Limits
) -> SearchedPlan:
    """Returns the plan that costs least per sample; its models have the costs of the whole cluster."""
    fastest = request.model_copy(update={"objective": "time"})
    searched = cheapest(cluster, lambda part: _fastest_case(case, fastest, part, profiler, limits))
    cluster = kernel_stack(request.kernels).on(cluster)
    there, models = case.under(request.precision).on(cluster), searched.models.items()
    whole = {count: (graph, profiler.profile(there, graph, cluster)) for count, (graph, _) in models}
    return SearchedPlan(searched.plan, fastest, whole)


def _insist_on_common_casts(request: PlanRequest, cluster: Cluster) -> None:
    """Raises BadOption for autocast on devices of several types."""
    kinds = list(dict.fromkeys(type_of(device.name.partition("/")[0]) for device in cluster.devices))
    if len(kinds) > 1 and precision_policy(request.precision).is_mixed:
        raise no_common_casts(kinds, f"precision {request.precision}, cluster {cluster.name}")


@reads_options(OutlookOptions)
def outlook(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[OutlookOptions]
) -> Outlook:
    """Returns a plan with its graph, predicted timeline and advice; `curves` adds what other choices give.

    A `plan` that is given is priced as it is; without one a plan is made by the other options, which are
    those of `plan`. Raises as `plan` and `price`.
    """
    asked, chosen = asked_in(options), options.get("plan")
    incumbents = Incumbents(asked.time_limit_s, asked.on_better)
    case, profiler = adapted_case(model, args, kwargs, options, asked), Profiler.of(asked)
    if chosen is not None:
        return _priced(chosen, case, profiler)
    request, cluster = asked_of(case, asked), asked_cluster(asked)
    searched = plan_case(case, request, cluster, profiler, incumbents=incumbents)
    cluster = kernel_stack(request.kernels).on(cluster)
    seen = outlooking.outlook(searched.plan, *searched.model, cluster)
    if not options.get("curves", False):
        return seen
    return outlooking.with_curves(seen, searched.request, searched.models, cluster)


@reads_options(FitOptions)
def fit(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[FitOptions]
) -> Fit:
    """Returns whether a training step fits the cluster, on each device by cause, and what to change if not.

    Weights may be on meta; nothing is allocated and no device needs to be there. The options are those of
    `plan`. Options that are not given are free, except `recompute`: to recompute a stage's forward counts as
    a change. Where no pipeline fits, the answer is what `plan` would do, unless `axes="pp"`: a mesh of other
    axes, or weights on the host. Given axes, `weights`, schedule "auto" and recompute "selective" or
    "offload" are answered by the plan that `plan` makes for them. Raises as `plan`, but what does not fit is
    an answer and no error.
    """
    asked = asked_in(options, "fit")
    check_precision(asked.precision or FP32.name)
    case, cluster = adapted_case(model, args, kwargs, options, asked), asked_cluster(asked)
    request = asked_of(case, asked)
    is_account = fitting.is_named_pipeline(request) and not request.in_slices
    judged = _judged(case, request, cluster) if is_account else None
    if judged is not None and judged.fits:
        return judged
    try:
        # The account of pipelines is `judged` already, and says more than a refusal.
        plan = plan_case(case, request, cluster, Profiler(), explains=judged is None).plan
    except (NoFeasiblePlan, TooManyStages) as refused:
        return judged or _fitted(case, request, refused, cluster)
    return with_plan(judged, plan, cluster) if judged else _fitted(case, request, plan, cluster)


def asked_alone(case: TrainingCase, request: PlanRequest, cluster: Cluster, *, searched: bool) -> Fit:
    """Returns YES where `fit` does, else NO; no change and no other axis is looked for.

    Unless `searched`, a pipeline is judged by the quick account alone, which may say NO where the search
    finds a cut or an order of devices that fits.
    """
    named = fitting.is_named_pipeline(request) and not request.in_slices
    judged = _judged(case, request, cluster, fitting.without_changes) if named else None
    # On one device the quick account knows the only cut.
    recomputes_all = request.activation_policy.recomputes_all
    single = len(cluster.devices) == 1 and not recomputes_all
    if judged is not None and (judged.fits or single or not searched):
        return judged
    told = judged is None or recomputes_all
    asked = request.without_axis_search if named else request
    try:
        plan = plan_case(case, asked, cluster, Profiler(), explains=told).plan
    except (NoFeasiblePlan, TooManyStages) as refused:
        return judged if judged and not told else _fitted(case, request, refused, cluster)
    if judged is None:
        return _fitted(case, request, plan, cluster)
    answer = with_plan(judged, plan, cluster)
    return answer if answer.answer == "YES" else judged


def _judged(
    case: TrainingCase,
    request: PlanRequest,
    cluster: Cluster,
    judge: Callable[[PlanRequest, fitting.At, Cluster], Fit] = fitting.fit,
) -> Fit:
    """Returns the answer about pipelines, each of whose stages keeps all, or recomputes all."""
    least = request.batch_size // (request.microbatches or 1)

    @functools.cache
    def graphs(precision: str) -> tuple[TrainingCase, Callable[[int], ModelGraph]]:
        there = case.under(precision).on(cluster)
        stack = kernel_stack(request.kernels, cluster.devices[0].kind)
        return there, Profiler().graphs(there, stack)

    @functools.cache
    def at(samples: int, precision: str) -> tuple[ModelGraph, Profile] | None:
        there, graph_at = graphs(precision)
        graph = there.taken(samples, least, graph_at)
        return (graph, roofline(graph, cluster.devices[0])) if graph else None

    return judge(request, at, cluster)


def _fitted(case: TrainingCase, request: PlanRequest, answer: Plan | OutsizeError, cluster: Cluster) -> Fit:
    graph = bare_graph(case.under(request.precision).on(cluster), request.batch_size)
    return as_asked(request, answer, graph, cluster)


@reads_options(PriceOptions)
def price(
    chosen: Plan,
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    **options: Unpack[PriceOptions],
) -> tuple[Plan, ModelGraph, Timeline]:
    """Returns a plan (perhaps edited by hand) priced as it is for the model, its graph and its timeline.

    Raises ModelMismatch for another model's plan and BadPlan for stages that do not cover the model.
    """
    case = case_of(model, args, kwargs, options)
    seen = _priced(chosen, case, Profiler(options.get("measured", False)))
    return seen.plan, seen.graph, seen.timeline


def _priced(chosen: Plan, case: TrainingCase, profiler: Profiler) -> Outlook:
    cluster = cluster_of(chosen.cluster)
    stack = kernel_stack(chosen.kernels, cluster.devices[0].kind)
    cluster = stack.on(cluster)
    case = case.under(chosen.precision).on(cluster).in_pieces(chosen.loss_pieces, chosen.module_pieces)
    case = replace(case, slices=chosen.slices)
    captured = case.captured(chosen.microbatch_size)
    graph = stack.of_graph(styled(case, captured, chosen.axes))
    profile = profiler.profile(case, graph, cluster)
    return outlooking.outlook(pricing.price(chosen, graph, profile, cluster), graph, profile, cluster)
