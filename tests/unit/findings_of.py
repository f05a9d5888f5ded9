"""The findings of one kind in a plan: tests read figures, not sentences."""

from __future__ import annotations

from typing import TypeVar

from outsize.ir.findings import Finding
from outsize.ir.plan import Plan

Kind = TypeVar("Kind", bound=Finding)


def findings(plan: Plan, kind: type[Kind]) -> list[Kind]:
    """All of a kind, in the plan's order."""
    return [finding for finding in plan.why if isinstance(finding, kind)]
