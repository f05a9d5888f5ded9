"""Implements `outsize bench tutorial`: the experiments of PyTorch's model-parallel tutorial, with
outsize's plan.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from outsize.cli import options
from outsize.cli.model_input import write_text
from outsize.cli.processes.bench_experiment import TutorialJob, TutorialOutcome
from outsize.cli.processes.launch import LaunchPlace, run_worker
from outsize.cli.screen import Screen
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType


@final
class Experiment(StrEnum):
    """What can be measured."""

    tutorial = "tutorial"


Name = Annotated[Experiment, typer.Argument(help="Which experiment.", metavar="tutorial", show_default=False)]
Input = Annotated[str, typer.Option("--input", metavar="SHAPE", help="Shape of one image.")]
Batch = Annotated[int, typer.Option("--batch", min=2, help="Images in a batch.")]
Splits = Annotated[
    str | None,
    typer.Option("--splits", metavar="1,3,6", help="Split sizes (default: all divisors of the batch)."),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Laps of each system; laps alternate.")]
Trials = Annotated[int, typer.Option("--trials", min=1, help="Real steps that tuning may take.")]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where PNGs and tutorial.json go.")]


def bench(
    name: Name,
    input: Input = "3x96x96",
    batch: Batch = 24,
    splits: Splits = None,
    repeats: Repeats = 5,
    trials: Trials = 5,
    out: Out = Path("tutorial"),
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Measure an experiment on this machine: `outsize bench tutorial`.

    As in PyTorch's tutorial, ResNet-50 runs on one device, split over two, and pipelined by split size.

    Then it runs by the plan that outsize tunes. There are two processes, with one thread each on CPUs.
    """
    screen = Screen(json)
    divisors = tuple(size for size in range(1, batch) if batch % size == 0)
    sizes = divisors if splits is None else options.sizes_in(splits, "--splits", divisors)
    job = TutorialJob(
        input=input, batch=batch, splits=sizes, repeats=repeats, trials=trials, seed=seed, as_json=json
    )
    text = run_worker("bench_worker", job, 2, LaunchPlace(), screen, shown_as="outsize bench tutorial")
    if text is not None:
        _deliver(screen, TutorialOutcome.model_validate_json(text), out)


def _deliver(screen: Screen, outcome: TutorialOutcome, out: Path) -> None:
    from outsize.report.plots import laps_bars_png, laps_curve_png

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption(
            f"cannot write {out}", numbers=str(error.strerror), next_step="another --out"
        ) from error
    document = outcome.document()
    write_text(out / "tutorial.json", json_text.dumps(document, indent=2) + "\n")
    laps_bars_png(outcome.bars, out / "bars.png")
    levels = {name: outcome.bars[name] for name in outcome.bars if name != "pipelined"}
    laps_curve_png(outcome.pipelined_s, levels, "split size", out / "splits.png")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.measured import tutorial_table

        job = outcome.job
        heading = f"{job.model}, {job.batch} images of {job.input} on {', '.join(outcome.devices)}"
        yield tutorial_table(heading, outcome.bars, outcome.pipelined_s, outcome.plan)

    screen.result(document, tables)
    screen.note(f"{out}: bars.png, splits.png, tutorial.json")
