"""The keyword arguments of the public functions, and the record that they make.

Type checkers and editors read the keyword arguments from the TypedDicts below. `reads_options` shows them in
`help()` and names the nearest one when a keyword is misspelt. `request_of` is the only place where keyword
arguments become a `PlanRequest`; the command line goes through it as well. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from pydantic import ValidationError

from outsize.api.old_spellings import in_new_spelling, unknown_keyword
from outsize.axes.registry import GROUP
from outsize.errors import BadOption
from outsize.errors.words import value_here
from outsize.ir.answers.request import NONE_SEARCHED, LayoutOptions, PlanRequest
from outsize.ir.base import first_problem
from outsize.ir.schedule import CUSTOM_NAME, Schedule
from outsize.policies.activations import KEEP
from outsize.schedules.builders import read, written
from outsize.schedules.families import FORWARD, GPIPE

if TYPE_CHECKING:
    import torch

    from outsize.api.records import AxisSizes, Checkpoint, Clip, Compile, Loss, Ranks, Request, Watch
    from outsize.capture.measure.units import Progress, UnitTimingOptions
    from outsize.capture.recording.fallbacks import LossFn
    from outsize.ir.answers.tuned import Trial
    from outsize.ir.cluster import Cluster
    from outsize.ir.plan import BatchNormMode, Plan, Precision, ScheduleName
    from outsize.ir.profile import ProfileSet
    from outsize.policies.activations import Recompute
    from outsize.policies.weights import Weights
    from outsize.train.batch.batch import Batch
    from outsize.train.batch.batch_dims import Asked
    from outsize.train.check.trainers import CheckedTrainer
    from outsize.train.context.callback import Callback
    from outsize.train.context.options import MakeOptimizer
    from outsize.train.split.outputs import Outputs

P = ParamSpec("P")
R = TypeVar("R")


class LossOptions(TypedDict, total=False):
    """The loss of the example batch, `loss_fn(output, *target)`; without `loss_fn` the output holds it."""

    loss_fn: LossFn | None
    target: Any


class CaseOptions(TypedDict, total=False):
    """Holds what belongs to the example batch: the loss, and the dims along which samples lie."""

    loss_fn: LossFn | Loss | None
    target: Any
    batch_dims: Asked | None


class FitOptions(CaseOptions, total=False):
    """The options of `fit`: those fields of a Request that are used daily, and a Request with any of them."""

    request: Request | None
    cluster: str | Cluster | None
    batch_size: int | None
    microbatches: int | None
    stages: int | None
    schedule: ScheduleName | Schedule | None
    optimizer: str | None
    precision: Precision | None
    recompute: Recompute | None
    weights: Weights | None
    axes: AxisSizes | None
    exact: bool | None


class PlanOptions(FitOptions, total=False):
    """The options of `plan`: those of `fit`, and the source of its units' costs."""

    measured: bool | ProfileSet | None


class OutlookOptions(PlanOptions, total=False):
    """The options of `outlook`: those of `plan`, an existing plan, and whether curves are drawn."""

    plan: Plan | None
    curves: bool


class MeasureOptions(CaseOptions, total=False):
    """The options of `measure`."""

    sizes: Sequence[int] | None
    how: UnitTimingOptions | None
    progress: Progress | None


class PriceOptions(CaseOptions, total=False):
    """The options of `price`."""

    measured: bool | ProfileSet


class CheckOptions(CaseOptions, total=False):
    """The options of `check`."""

    plan: Plan | None
    stages: int | None
    microbatches: int | None
    schedule: ScheduleName | None
    recompute: Recompute | None
    bn: BatchNormMode | None
    processes: bool
    steps: int | None
    seed: int
    weight_files: str | Path | None
    second_batch: Batch | None
    trainer: CheckedTrainer | None


class TuneOptions(FitOptions, total=False):
    """The options of `tune`: those of `fit`, and how plans are tried."""

    trials: int
    how: UnitTimingOptions | None
    progress: Progress | None
    tried: Callable[[Trial], None] | None
    seed: int


class ParallelizeOptions(CaseOptions, total=False):
    """The options of `parallelize` besides `plan`; `optimizer` is the run's and no option of a plan."""

    cluster: str | Cluster | None
    stages: int | None
    microbatches: int | None
    schedule: ScheduleName | Schedule | None
    axes: AxisSizes | None
    optimizer: MakeOptimizer | None
    clip_norm: float | Clip | None
    devices: Sequence[str | torch.device] | Ranks | None
    resume: str | Path | Checkpoint | None
    weight_files: str | Path | None
    compiled: bool | str | Compile
    callbacks: Sequence[Callback | Watch]


class SplitOptions(TypedDict, total=False):
    """The options of `split` besides `plan`."""

    cluster: str | Cluster | None
    stages: int | None
    microbatches: int | None
    axes: AxisSizes | None
    batch_dims: Asked | None
    devices: Sequence[str | torch.device] | Ranks | None
    weight_files: str | Path | None
    compiled: bool | str | Compile
    callbacks: Sequence[Callback | Watch]
    outputs: Outputs


def request_of(options: LayoutOptions, batch_size: int) -> PlanRequest:
    """Returns the request that the options make; `batch_size` counts where they have none.

    Options that are None or no part of a request are left out. Raises BadOption for a value that makes no
    sense, or contradicts another one, and InvalidSchedule.
    """
    fields = {n: v for n, v in options.items() if n in PlanRequest.model_fields and v is not None}
    for name, value in fields.items():
        if isinstance(value, bool) and "bool" not in str(PlanRequest.model_fields[name].annotation):
            instead = value_here(name, value)
            raise BadOption(
                f"{name}={value} makes no sense",
                numbers="it says yes or no",
                next_step=f"{name}={2 if instead is None else instead!r}, or none",
            )
    fields.setdefault("batch_size", batch_size)
    if isinstance(schedule := fields.get("schedule"), Schedule):
        fields |= _own_schedule(schedule, fields)
    if fields.get("inference"):
        fields.setdefault("recompute", KEEP.name)
    elif fields.get("schedule") == FORWARD.name:
        raise BadOption(
            f"schedule={FORWARD.name!r} has no backwards, and a training step wants them",
            numbers="inference=False",
            next_step="outsize.Request(inference=True), without schedule",
        )
    if fields.get("loop"):
        fields = _forwards_first(fields)
    if fields.get("bn") == "sync":
        fields.setdefault("microbatches", 1)  # statistics of the whole batch want it in one piece
    try:
        return PlanRequest.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = problem["loc"][0]
        raise BadOption(
            f"{name}={problem['input']!r} makes no sense",
            numbers=first_problem(error)[1],
            next_step=_value_instead(str(name), problem),
        ) from None


def _forwards_first(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with the schedule of a loop of the user's own, and stages alone where no axis is
    named.
    """
    if fields.get("schedule") not in (None, GPIPE.name):
        raise BadOption(
            "a split model runs all forwards of a call before its backwards",
            numbers=f"schedule={fields['schedule']!r}",
            next_step="leave schedule out, or outsize.parallelize(...) and engine.step(x, target=y)",
        )
    alone = {} if any(axis.name in fields for axis in GROUP) else {"axes": NONE_SEARCHED}
    return {**alone, **fields, "schedule": GPIPE.name}


def _value_instead(name: str, problem: Any) -> str:
    """Returns what to type in the place of a value: what other tools call so, or an example."""
    here = value_here(name, problem["input"])
    if here is not None:
        return f"{name}={here!r}"
    first = re.search(r"'([^']+)'", problem.get("ctx", {}).get("expected", ""))
    return f"{name}={first[1]!r}, another of these, or none" if first else f"{name}=2, or none"


def _own_schedule(schedule: Schedule, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that a user's own schedule fixes: ranks, microbatches and actions."""
    schedule = read(written(schedule))
    fixed = {"stages": schedule.ranks, "microbatches": schedule.microbatches}
    for name, value in fixed.items():
        if fields.get(name) not in (None, value):
            raise BadOption(
                f"{name}={fields[name]} contradicts the schedule, which has {value}",
                numbers=f"{schedule.ranks} rows with {schedule.microbatches} microbatches",
                next_step=f"leave out {name}",
            )
    return {**fixed, "schedule": CUSTOM_NAME, "actions": written(schedule)}


def reads_options(options: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for a function whose `**options` are those of a TypedDict.

    The function's signature shows each option. An old spelling becomes the new one, with a warning, and
    an unknown keyword raises BadOption with the nearest one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        shown = _with_options(inspect.signature(function), options)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            read = in_new_spelling(function.__name__, kwargs, shown.parameters)
            for name in read:
                if name not in shown.parameters:
                    raise unknown_keyword(name, function.__name__, shown.parameters)
            kwargs.clear()
            kwargs.update(read)
            return function(*args, **kwargs)

        vars(checked)["__signature__"] = shown
        return checked

    return decorate


def _with_options(signature: inspect.Signature, options: Any) -> inspect.Signature:
    """Returns the signature with a keyword for each option in place of `**options`."""
    if options is None:
        return signature
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind.__forward_arg__)
        for name, kind in options.__annotations__.items()
    ]
    return signature.replace(parameters=[*named, *shown])
