"""Says how unevenly a router has sent rows to the ranks that divide experts."""

from __future__ import annotations

from outsize.ir.plan import EXPERT_MARGIN


def imbalance_text(imbalance: float) -> str:
    """Returns how many times the mean rank's rows of experts the fullest has, beside what a plan counts."""
    return f"{imbalance:.2f} times the mean rank's rows, {EXPERT_MARGIN} planned"
