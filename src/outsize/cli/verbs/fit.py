"""Implements `outsize fit MODEL`: does a training step fit the devices, and what is the least to change if
not?
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import collected, model_input, options, uncollected
from outsize.cli.flags import with_records
from outsize.cli.model_input import ModelInput, batch_size, make_model_input
from outsize.cli.model_size import ModelSize
from outsize.cli.screen import Screen
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.api.options import FitOptions
    from outsize.ir.answers.fit import Fit
    from outsize.ir.answers.ranking import ClusterRanking
    from outsize.ir.cluster import Cluster

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

Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="KIND,...",
        help="Rank devices to rent: kinds, of which 1, 2, 4 and 8 are tried, or clusters: l4,2x8xh100-80gb.",
    ),
]
Beside = Annotated[
    str | None,
    typer.Option(
        "--beside",
        metavar="RUN",
        help="Say what fits next to this run of `outsize top`, on what it leaves of the devices.",
    ),
]
Prices = Annotated[
    str | None,
    typer.Option(
        "--prices", metavar="KIND=PRICE,...", help="Prices per hour and device, for --devices: l4=0.8."
    ),
]
Top = Annotated[int, typer.Option("--top", min=1, help="Number of clusters that --devices shows.")]


@with_records
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
    mesh: options.MeshFlags = options.NO_MESH,
    weights: options.WeightPlace = None,
    inference: options.Inference = False,
    loop: options.Loop = False,
    lora: options.LoraOption = options.NO_LORA,
    lora_rank: options.LoraRank = None,
    lora_targets: options.LoraTargets = None,
    quantize: options.QuantizeOption = options.NO_QUANTIZE,
    max: Max = None,
    devices: Devices = None,
    prices: Prices = None,
    top: Top = 5,
    beside: Beside = None,
    recordings: options.Recordings = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Say whether training MODEL fits the devices: YES, NO, or YES IF, with the cheapest change.

    With --inference it is about running MODEL, with --loop about a loop of your own, with --lora about
    training adapters, with --quantize about frozen weights in few bits. No weights are made and no device is
    needed. Exits with 0 for YES and with 1 for NO and YES IF. With --max it says how large a batch, a
    sequence or the model may be, with --devices which devices to rent.
    """
    from outsize.api.records import Request
    from outsize.capture.models.lazy_imports import stand_in

    screen = Screen(json)
    asked: FitOptions = {
        "cluster": cluster if beside is None else _left_beside(beside, cluster),
        "optimizer": optimizer,
        "precision": precision,
        "microbatches": microbatches,
        "stages": stages,
        "schedule": schedule,
        "recompute": recompute,
        "axes": mesh.asked,
        "exact": mesh.exact,
        "weights": weights,
        "request": Request(
            inference=inference or None,
            loop=loop or None,
            lora=options.lora_asked(lora, lora_rank, lora_targets),
            quantize=options.quantize_asked(quantize),
            recordings=model_input.recordings(recordings),
        ),
    }
    stand_in(model.partition(":")[0])
    if max is not None:
        _deliver_largest(screen, max, ModelSize(model, input, batch, seed), asked)
        return
    if devices is not None:
        with screen.working(f"{model} on {devices}"):
            inputs = make_model_input(model, input, batch_size(batch, None), meta=True, seed=seed)
            with collected():
                ranking = _ranked(inputs, asked, devices, prices)
        _deliver_ranking(screen, ranking, top)
        return
    with screen.working(f"{model} on {cluster}"):
        inputs = make_model_input(model, input, batch_size(batch, None), meta=True, seed=seed)
        answer = _answer(inputs, asked)
    _deliver(screen, answer)
    if answer.answer != "YES":
        raise typer.Exit(FITS_NOT)


def _left_beside(run: str, cluster: str) -> Cluster:
    """Returns what a run leaves of this machine's devices. Raises BadOption."""
    from outsize.capture.measure.local_cluster import find_cluster
    from outsize.ir.answers.run_state import room_beside, run_of

    if cluster != "local":
        raise BadOption(
            "--beside is about this machine, and --cluster names another one",
            numbers=f"--beside {run}, --cluster {cluster}",
            next_step=f"outsize fit MODEL --beside {run}",
        )
    return room_beside(find_cluster(cluster), run_of(run))


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

    with screen.working(f"the largest {max}"), collected():
        found: Largest = size.largest(max, asked)

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables import largest

        yield largest.largest_table(found)

    screen.result(found.model_dump(mode="json"), tables)
    if not found.value:
        raise typer.Exit(FITS_NOT)


def _ranked(inputs: ModelInput, asked: FitOptions, devices: str, prices: str | None) -> ClusterRanking:
    from outsize.ops.renting import rank_clusters

    wanted: FitOptions = {**asked, **inputs.loss}
    wanted.pop("cluster", None)
    named = [name.strip() for name in devices.split(",") if name.strip()]
    return rank_clusters(*inputs.call, devices=named, prices=options.prices_in(prices), **wanted)


def _deliver_ranking(screen: Screen, ranking: ClusterRanking, top: int) -> None:
    """Shows the clusters in order; leaves with FITS_NOT where nothing fits any of them."""

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.ranking import ranking_table

        yield ranking_table(ranking, top)

    document = ranking.model_dump(mode="json")
    for row, cluster in zip(document["clusters"], ranking.clusters, strict=True):
        row |= {"samples_per_s": cluster.samples_per_s, "price_per_million": cluster.price_per_million}
    screen.result(document, tables)
    if not ranking.fitting:
        raise typer.Exit(FITS_NOT)
