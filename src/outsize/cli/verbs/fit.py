"""Implements `outsize fit MODEL`: does a training step fit the devices, and what is the least to change if
not?
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options, uncollected
from outsize.cli.model_input import ModelInput, batch_size, make_model_input
from outsize.cli.model_size import ModelSize
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.api.options import FitOptions
    from outsize.ir.answers.fit import Fit

FITS_NOT = 1
Max = Annotated[
    str | None,
    typer.Option(
        "--max",
        metavar="batch|sequence|layers|NAME[:STEP]",
        help="Find the largest batch, sequence length, number of layers, or value of an option of MODEL "
        "that fits, in steps of STEP.",
    ),
]


@uncollected()
def fit(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: options.Cluster = "local",
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    microbatches: options.Microbatches = None,
    stages: options.Stages = None,
    schedule: options.ScheduleByName = None,
    recompute: options.Recompute = None,
    axes: options.Axes = None,
    exact: options.Exact = False,
    dp_replicate: options.Replicas = None,
    dp_shard: options.Shards = None,
    tp: options.Tensor = None,
    weights: options.WeightPlace = None,
    max: Max = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Say whether training MODEL fits the devices: YES, NO, or YES IF, with the cheapest change.

    No weights are made and no device is needed. Exits with 0 for YES and with 1 for NO and YES IF. With --max
    it says how large a batch, a sequence or the model may be.
    """
    from outsize.capture.models.lazy_imports import stand_in

    screen = Screen(json)
    asked: FitOptions = {
        "cluster": cluster,
        "optimizer": optimizer,
        "precision": precision,
        "microbatches": microbatches,
        "stages": stages,
        "schedule": schedule,
        "recompute": recompute,
        "axes": axes,
        "exact": exact,
        "dp_replicate": dp_replicate,
        "dp_shard": dp_shard,
        "tp": tp,
        "weights": weights,
    }
    stand_in(model.partition(":")[0])
    if max is not None:
        _deliver_largest(screen, max, ModelSize(model, input, batch, seed), asked)
        return
    with screen.working(f"{model} on {cluster}"):
        inputs = make_model_input(model, input, batch_size(batch, None), meta=True, seed=seed)
        answer = _answer(inputs, asked)
    _deliver(screen, answer)
    if answer.answer != "YES":
        raise typer.Exit(FITS_NOT)


def _answer(inputs: ModelInput, asked: FitOptions) -> Fit:
    from outsize import api

    options_with_loss: FitOptions = {**asked, **inputs.loss}
    return api.fit(*inputs.call, **options_with_loss)


def _deliver(screen: Screen, answer: Fit) -> None:
    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import fit

        yield fit.fit_table(answer)

    screen.result(answer.model_dump(mode="json"), tables)


def _deliver_largest(screen: Screen, max: str, size: ModelSize, asked: FitOptions) -> None:
    """Shows the largest size that fits; leaves with FITS_NOT where the least does not."""
    from outsize.ir.answers.largest import Largest

    with screen.working(f"the largest {max}"):
        found: Largest = size.largest(max, asked)

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import largest

        yield largest.largest_table(found)

    screen.result(found.model_dump(mode="json"), tables)
    if not found.value:
        raise typer.Exit(FITS_NOT)
