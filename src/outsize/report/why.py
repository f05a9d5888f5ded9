"""`outsize explain-plan`: why a plan is as it is, what else there was, and what would make it faster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from outsize.ir.advice import Advice
from outsize.ir.plan import Plan
from outsize.report import pieces
from outsize.report.placement import recomputed_texts
from outsize.report.tables import is_rejection, plan_table


def why_table(plan: Plan, levers: Sequence[Advice], advice: Sequence[Advice] = ()) -> Group:
    """The plan, then its reasons, alternatives, levers and advice; those that are empty are left out."""
    bare = plan.model_copy(update={"why": ()})
    reasons = [w for w in plan.why if not is_rejection(w)]
    rejected = [w.removeprefix("not ") for w in plan.why if is_rejection(w)]
    parts: list[RenderableType] = [
        *pieces.listed("Recomputed units", recomputed_texts(plan)),
        *pieces.listed("Why this one", reasons or ["the file does not say: it has no reasons in it"]),
        *pieces.listed("Not chosen", rejected),
        *pieces.listed("What would make it faster", [pieces.said(lever) for lever in levers]),
        *pieces.listed("Advice", [pieces.said(a) for a in advice]),
    ]
    return Group(plan_table(bare), *pieces.spaced(*parts))
