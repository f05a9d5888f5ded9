"""Answers how large a batch, a sequence or a model may be that still fits, by few questions to `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Unpack

from torch import nn

from outsize.api.options import FitOptions, LossOptions, reads_options
from outsize.api.planning import asked_alone
from outsize.api.problem import adapted_case, asked_cluster, asked_in, asked_of
from outsize.errors import BadOption, ExampleRejected, NotCapturable
from outsize.errors.arguments import insist_on_whole_number
from outsize.ir.answers.fit import Fit
from outsize.ir.answers.largest import Largest
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.planner.fit.largest import Filled, largest_fitting
from outsize.train.measure.training_case import TrainingCase

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Make = Callable[[int], tuple[nn.Module, Args, Kwargs, LossOptions]]
"""Maps a size to a model, its example batch, and the loss; weights may be on meta."""
# More samples than these are not looked for.
MOST_SAMPLES: Final = 1 << 20
MOST_SIZE: Final = 1 << 24
Answer = Callable[[int, bool], Fit]


@reads_options(FitOptions)
def largest_batch(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[FitOptions]
) -> Largest:
    """Returns the largest batch with which a training step fits the cluster, as it is asked for.

    The options are those of `fit`. Without `microbatches` a batch has one for each stage, so one on one
    device: more microbatches take a larger batch in parts. Sizes are multiples of microbatches and replicas.
    Raises as `fit`, and BadOption for a `batch_size`, which it looks for.
    """
    asked = asked_in(options, "fit")
    if asked.batch_size is not None:
        raise BadOption(
            "largest_batch looks for batch_size, and was given one",
            numbers=f"{asked.batch_size!r}",
            next_step="leave it out; outsize.fit(model, ..., batch_size=32) says whether 32 samples fit",
        )
    case, cluster = adapted_case(model, args, kwargs, options, asked), asked_cluster(asked)
    request = asked_of(case, asked)
    if request.microbatches is None:
        stages = request.stages or max(1, len(cluster.devices) // request.mesh(1).group_size)
        request = request.model_copy(update={"microbatches": stages})
    step = request.total_microbatches or 1

    def answer(size: int, searched: bool) -> Fit:
        sized = request.model_copy(update={"batch_size": size})
        return asked_alone(case, sized, cluster, searched=searched)

    return _largest("batch", answer, step, MOST_SAMPLES)


@reads_options(FitOptions)
def largest(
    make: Make,
    quantity: str = "sequence",
    *,
    step: int = 1,
    most: int = MOST_SIZE,
    **options: Unpack[FitOptions],
) -> Largest:
    """Returns the largest size, a multiple of `step` and at most `most`, whose training step fits.

    `make(size)` returns `(model, args, kwargs, loss)`: a longer example for a sequence, a deeper model for
    layers; `loss` holds `loss_fn` and `target`, or nothing. `quantity` is its name in the answer. A size that
    the model rejects ends the search. The other options are those of `fit`. Raises as `fit`.
    """
    insist_on_whole_number(step, "step", 1, "step=1, the default")
    insist_on_whole_number(most, "most", step, f"most={MOST_SIZE}, the default")
    question = asked_in(options, "fit")
    cluster = asked_cluster(question)

    @functools.lru_cache(maxsize=2)
    def asked(size: int) -> tuple[TrainingCase, PlanRequest, Cluster]:
        model, args, kwargs, loss = _example(make, size)
        case = adapted_case(model, args, kwargs, {**options, **loss}, question)
        return case, asked_of(case, question), cluster

    return _largest(quantity, lambda size, searched: asked_alone(*asked(size), searched=searched), step, most)


def _example(make: Any, size: int) -> tuple[nn.Module, Args, Kwargs, LossOptions]:
    """Returns what the user's function makes. Raises BadOption where it makes something else."""
    is_function = callable(make) and not isinstance(make, nn.Module)
    made = make(size) if is_function else None
    if not (isinstance(made, tuple) and len(made) == len(("model", "args", "kwargs", "loss"))):
        raise BadOption(
            f"make({size}) returns a {type(made).__name__}, not a model with its example"
            if is_function
            else f"make is a {type(make).__name__}, no function of a size",
            numbers="it makes (model, args, kwargs, loss)",
            next_step="make=lambda size: (model, (torch.randn(8, size),), {}, {'loss_fn': F.mse_loss})",
        )
    return made


def _largest(quantity: str, answer: Answer, step: int, most: int) -> Largest:
    """Searches by quick answers, then goes on from there by those of `fit`, which may know more cuts."""
    answers = dict[tuple[int, bool], Fit | None]()

    def filled(count: int, searched: bool) -> Filled:
        key = count, searched
        if key not in answers:
            answers[key] = _taken(answer, count * step, searched, least=count == 1)
        made = answers[key]
        devices = made.devices if made is not None else ()
        fraction = max((device.least_bytes / device.memory_bytes for device in devices), default=float("inf"))
        return Filled(made is not None and made.answer == "YES", fraction)

    counts = max(1, most // step)
    quick = largest_fitting(functools.partial(filled, searched=False), counts)
    if quick:
        answers[quick, True] = answers[quick, False]
    count = largest_fitting(functools.partial(filled, searched=True), counts, known=quick)
    beyond = answers.get((count + 1, True))
    return Largest(
        quantity=quantity,
        value=count * step,
        fit=answers[count, True] if count else None,
        next_value=(count + 1) * step if beyond is not None else None,
        beyond=beyond,
        tried=len({size for size, _ in answers}),
    )


def _taken(answer: Answer, size: int, searched: bool, *, least: bool) -> Fit | None:
    """Returns the answer for a size; None where the model rejects it, unless it is the `least`."""
    try:
        return answer(size, searched)
    except (ExampleRejected, NotCapturable):
        if least:
            raise
        return None
