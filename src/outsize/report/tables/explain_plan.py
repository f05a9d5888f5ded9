"""Builds the tables of `outsize explain-plan`: why a plan is as it is, where the seconds of its step go, what
was not chosen, what is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.ir.answers.advice import Advice, Lever
from outsize.ir.answers.utilisation import Spent, StepSeconds
from outsize.ir.findings import Foresight
from outsize.ir.formatting import percent_text, seconds_text
from outsize.ir.plan import Plan
from outsize.report.tables import table_style
from outsize.report.tables.placement import recomputed_texts
from outsize.report.tables.plan_tables import plan_table
from outsize.report.wording import advised, sentences

NO_REASONS: Final = "the plan file contains no reasons"
SECONDS_TITLE: Final = "Where the seconds of a step go"
COARSE: Final = "With MODEL behind the plan file it is told by kinds of operations and of communication."
SPENT: Final[Mapping[Spent, str]] = {
    "products": "matrix products",
    "attention": "fused attention",
    "convolutions": "convolutions",
    "normalisations": "normalisations",
    "elementwise": "other elementwise operations",
    "computing": "computing",
    "again": "forwards once more (recompute)",
    "optimizer": "optimizer",
    "update-on-host": "optimizer on the host",
    "weights": "collectives of weights and gradients",
    "messages": "messages between stages",
    "within-layers": "collectives within layers (tp, cp, ep)",
    "copies": "copies of activations to the host and back",
    "launching": "waits for the host to launch",
    "waits": "waits for other stages (bubble)",
}


def why_table(
    plan: Plan,
    levers: Sequence[Lever],
    advice: Sequence[Advice] = (),
    seconds: StepSeconds | None = None,
    foresight: Foresight | None = None,
) -> Group:
    """Returns the plan, then where its seconds go, its reasons, alternatives, levers and advice; empty ones
    are left out.
    """
    bare = plan.model_copy(update={"why": ()})
    parts: list[RenderableType] = [
        *seconds_table(seconds),
        *table_style.listed("Recomputed units", recomputed_texts(plan)),
        *table_style.listed("Why this one", sentences(plan.reasons) or [NO_REASONS]),
        *table_style.listed("Not chosen", sentences(plan.rejections)),
        *table_style.listed("What would make it faster", list(map(advised, levers))),
        *table_style.listed("Advice", list(map(advised, advice))),
    ]
    return Group(plan_table(bare, foresight=foresight), *table_style.spaced(*parts))


def seconds_table(seconds: StepSeconds | None) -> Iterator[RenderableType]:
    """Yields a table of the parts of a step, whose sum is the step, and the sources of their constants."""
    if seconds is None or not seconds.parts:
        return
    table = table_style.table((seconds_title(seconds), "left"), *table_style.rights("takes", "of the step"))
    for row in seconds_rows(seconds):
        table.add_row(*row)
    table.add_row(*(Text(cell, "bold") for cell in ("step", seconds_text(seconds.step_s), "100 %")))
    yield Group(table, Text(COARSE, "dim")) if seconds.coarse else table
    yield from table_style.listed("Constants behind these seconds", constants(seconds))


def seconds_title(seconds: StepSeconds) -> str:
    """Returns the heading, with the device whose seconds they are."""
    return f"{SECONDS_TITLE}, {seconds.device}"


def seconds_rows(seconds: StepSeconds) -> list[tuple[str, str, str]]:
    """Returns name, seconds and share of each part."""
    whole_s = seconds.step_s or 1.0
    return [
        (SPENT[part.spent], seconds_text(part.seconds), percent_text(part.seconds / whole_s))
        for part in seconds.parts
    ]


def constants(seconds: StepSeconds) -> list[str]:
    """Returns each source once, with the parts that it is behind."""
    parts_of: dict[str, list[str]] = {}
    for part in seconds.parts:
        for source in part.sources:
            parts_of.setdefault(source, []).append(SPENT[part.spent])
    return [f"{', '.join(parts)}: {source}" for source, parts in parts_of.items()]
