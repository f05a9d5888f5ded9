"""Builds the tables of `outsize explain-plan`: why a plan is as it is, what was not chosen, what is
faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType

from outsize.ir.answers.advice import Advice, Lever
from outsize.ir.plan import Plan
from outsize.report.tables import table_style
from outsize.report.tables.placement import recomputed_texts
from outsize.report.tables.plan_tables import plan_table
from outsize.report.wording import advised, sentences

NO_REASONS: Final = "the plan file contains no reasons"


def why_table(plan: Plan, levers: Sequence[Lever], advice: Sequence[Advice] = ()) -> Group:
    """Returns the plan, then its reasons, alternatives, levers and advice; empty ones are left out."""
    bare = plan.model_copy(update={"why": ()})
    parts: list[RenderableType] = [
        *table_style.listed("Recomputed units", recomputed_texts(plan)),
        *table_style.listed("Why this one", sentences(plan.reasons) or [NO_REASONS]),
        *table_style.listed("Not chosen", sentences(plan.rejections)),
        *table_style.listed("What would make it faster", list(map(advised, levers))),
        *table_style.listed("Advice", list(map(advised, advice))),
    ]
    return Group(plan_table(bare), *table_style.spaced(*parts))
