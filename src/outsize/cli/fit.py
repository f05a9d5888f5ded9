"""`outsize fit MODEL`: does a training step fit the devices, and what is the least to change if not?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from outsize.cli import options, uncollected
from outsize.cli.screen import Screen
from outsize.cli.subject import batch_size, make_subject

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.fit import Fit

FITS_NOT = 1


@uncollected()
def fit(
    model: options.Model,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: options.Cluster = "local",
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = options.PrecisionOption.fp32,
    microbatches: options.Microbatches = None,
    stages: options.Stages = None,
    schedule: options.Schedule = None,
    recompute: options.Recompute = None,
    axes: options.Space = None,
    dp_replicate: options.Replicas = None,
    dp_shard: options.Shards = None,
    tp: options.Tensor = None,
    weights: options.Where = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Say whether training MODEL fits the devices: YES, NO, or YES IF, with the cheapest change.

    No weights are made and no device is needed. Exits with 0 for YES and with 1 for NO and YES IF.
    """
    screen, wishes = Screen(json), {"stages": stages, "microbatches": microbatches, "schedule": schedule}
    wishes |= {"recompute": recompute, "optimizer": optimizer, "precision": precision, "cluster": cluster}
    wishes |= {"axes": axes, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp, "weights": weights}
    with screen.working(f"{model} on {cluster}"):
        answer = _answer(model, input, batch_size(batch, None), seed, options.given(wishes))
    _deliver(screen, answer)
    if answer.answer != "YES":
        raise typer.Exit(FITS_NOT)


def _answer(model: str, shape: str | None, batch: int, seed: int, wishes: dict[str, object]) -> Fit:
    from outsize.capture.standins import stand_in

    stand_in(model.partition(":")[0])
    subject = make_subject(model, shape, batch, meta=True, seed=seed)
    from outsize import api

    return api.fit(*subject.call, **subject.loss, **wishes)  # pyright: ignore[reportArgumentType]


def _deliver(screen: Screen, answer: Fit) -> None:
    def tables() -> Iterable[RenderableType]:
        from outsize.report import fit

        yield fit.fit_table(answer)

    screen.result(answer.model_dump(mode="json"), tables)
