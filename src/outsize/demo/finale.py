"""The last part: models that others refuse, one line each, and the table of what holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

import outsize
from outsize.demo.guests import Guest
from outsize.demo.outcome import Outcome
from outsize.demo.screen import Screen
from outsize.ir.text import seconds_text
from outsize.ir.verdict import Verdict

CUTS = (2, 3)


def cut_and_check(guest: Guest, screen: Screen) -> list[Verdict]:
    """Plan the guest for two and for three devices and compare a step; shows one line."""
    with screen.working(f"{guest.title}: planning and checking {CUTS[0]} and {CUTS[1]} stages"):
        model, batch = guest.model(), guest.batch()
        verdicts = [
            outsize.check(
                model,
                batch.args,
                batch.kwargs,
                loss_fn=guest.loss_fn,
                target=batch.target,
                stages=stages,
                microbatches=guest.microbatches,
            )
            for stages in CUTS
        ]
    cuts = [Text.assemble(f"{len(v.stages)} stages ", verdict_word(v.bit_equal)) for v in verdicts]
    screen.line(Text.assemble(guest.title, ": ", Text(", ").join(cuts)))
    return verdicts


def verdict_word(bit_equal: bool) -> Text:
    """The verdict; colour is not its only carrier."""
    return Text("bit-equal", "green") if bit_equal else Text("NOT bit-equal", "bold red")


def summary(outcomes: Sequence[Outcome], guests: Sequence[tuple[Guest, Sequence[Verdict]]]) -> Table:
    """One row for each model: the verdict on all its cuts, and the way of the loss."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("model", "against one process", "loss"):
        table.add_column(column, no_wrap=column != "model")
    for outcome in outcomes:
        table.add_row(outcome.job.title, verdict_word(outcome.verdict.bit_equal), _loss(outcome))
    for guest, verdicts in guests:
        table.add_row(guest.title, verdict_word(all(v.bit_equal for v in verdicts)), "-")
    return table


def _loss(outcome: Outcome) -> Text:
    goal = f", goal {outcome.job.goal:.1f}" if outcome.job.goal is not None else ""
    text = f"{outcome.losses[0]:.2f} -> {outcome.end_loss:.2f} ({len(outcome.losses)} steps{goal})"
    return Text(text, "" if outcome.learned else "bold red")


def files_lines(files: Sequence[Path], seconds: float, *, holds: bool) -> Group:
    """The written files, the time, and the verdict on the whole."""
    word = Text("All of it holds", "bold green") if holds else Text("NOT all of it holds", "bold red")
    written = [Text(str(file), overflow="fold") for file in files]
    return Group(*written, Text(), Text.assemble(word, f", in {seconds_text(seconds)}."))
