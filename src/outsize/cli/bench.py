"""`outsize bench tutorial`: the experiments of PyTorch's model-parallel tutorial, here, and our plan."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from outsize.cli import options
from outsize.cli.experiment import TutorialJob, TutorialOutcome
from outsize.cli.launching import Place, run_worker
from outsize.cli.screen import Screen
from outsize.cli.subject import write_text
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
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Laps of each, taken in turns.")]
Trials = Annotated[int, typer.Option("--trials", min=1, help="Real steps that tuning our plan may take.")]
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

    As in PyTorch's tutorial: ResNet-50 on one device, split over two, pipelined by several split sizes.

    Then the same on the plan that outsize tunes. Two processes, one thread each on CPUs.
    """
    screen = Screen(json)
    sizes = _sizes(splits, batch)
    job = TutorialJob(
        input=input, batch=batch, splits=sizes, repeats=repeats, trials=trials, seed=seed, as_json=json
    )
    text = run_worker("bench_worker", job, 2, Place(), screen, shown_as="outsize bench tutorial")
    if text is not None:
        _deliver(screen, TutorialOutcome.model_validate_json(text), out)


def _sizes(text: str | None, batch: int) -> tuple[int, ...]:
    """`1,3,6` -> (1, 3, 6), divisors of the batch but for the whole of it."""
    divisors = [size for size in range(1, batch) if batch % size == 0]
    if text is None:
        return tuple(divisors)
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) in divisors for part in parts):
        raise BadOption(
            f"--splits {text!r} are no split sizes of a batch of {batch}",
            numbers=f"possible: {', '.join(map(str, divisors))}",
            next_step=f"--splits {','.join(map(str, divisors[:3]))}",
        )
    return tuple(sorted({int(part) for part in parts}))


def _deliver(screen: Screen, found: TutorialOutcome, out: Path) -> None:
    from outsize.report.plots import laps_bars_png, laps_curve_png

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadOption(
            f"cannot write {out}", numbers=str(error.strerror), next_step="another --out"
        ) from error
    document = found.document()
    write_text(out / "tutorial.json", json_text.dumps(document, indent=2) + "\n")
    laps_bars_png(found.bars, out / "bars.png")
    levels = {name: found.bars[name] for name in found.bars if name != "pipelined"}
    laps_curve_png(found.pipelined_s, levels, "split size", out / "splits.png")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.measured import tutorial_table

        job = found.job
        heading = f"{job.model}, {job.batch} images of {job.input} on {', '.join(found.devices)}"
        yield tutorial_table(heading, found.bars, found.pipelined_s, found.plan)

    screen.result(document, tables)
    screen.note(f"{out}: bars.png, splits.png, tutorial.json")
