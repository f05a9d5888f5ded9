"""Implements `outsize rehearse MODEL --plan FILE`: would the ranks of a plan for many devices run?"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.flags import with_records
from outsize.cli.model_input import load_plan_to_run
from outsize.cli.screen import Screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.ir.answers.runs.rehearsal import Rehearsal

FAILED = 1
MOST_RANKS = 8

Plan = Annotated[Path, typer.Option("--plan", help="The plan that is rehearsed.", show_default=False)]
MostRanks = Annotated[
    int, typer.Option("--ranks", min=2, max=MOST_RANKS, help="Number of processes at once, at most.")
]


@with_records
def rehearse(
    model: options.Model,
    plan: Plan,
    input: options.Input = None,
    batch: options.Batch = None,
    ranks: MostRanks = MOST_RANKS,
    lora: options.LoraOption = options.NO_LORA,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Rehearse a plan for many devices here, with a small model: before they are rented.

    The plan's stages, schedule and axes run over processes of this machine, with fewer and narrower layers
    of the same kinds. Messages, collectives, numbers against one process, a checkpoint, a rank that is
    killed and the restart are proven; speed and memory are not. Where --ranks processes cannot hold all
    axes at once, several small worlds run one after the other.

    Exits with 0 when everything holds and with 1 when anything does not, and names the rank and its action.
    """
    screen, chosen = Screen(json), load_plan_to_run(plan)
    assert chosen is not None
    from outsize.cli.processes.rehearsals import RehearsedModel

    with screen.working(f"building {model}") as tell:
        adapters = options.lora_asked(lora, None, None)
        rehearsal = RehearsedModel(model, input, batch, chosen, ranks, seed, adapters).rehearsed(tell)
    _deliver(screen, rehearsal)
    if not rehearsal.holds:
        raise typer.Exit(FAILED)


def _deliver(screen: Screen, rehearsal: Rehearsal) -> None:
    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.rehearsal import rehearsal_table

        yield rehearsal_table(rehearsal)

    screen.result(rehearsal.model_dump(mode="json") | {"holds": rehearsal.holds}, tables)
