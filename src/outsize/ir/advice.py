"""Advice: something that a plan shows and that its reader may want to change, with the numbers behind it."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record

AdviceCode = Literal[
    "data-parallelism",
    "slow-links",
    "small-stage",
    "fat-boundary",
    "heavy-unit",
    "branches",
    "optimizer-state",
    "idle-devices",
    "balance",
    "microbatches",
    "recompute",
    "memory",
]


@final
class Advice(Record):
    """One piece: what is so (`sentence`), the figures in it by name, and what to type or to change."""

    code: AdviceCode
    sentence: str
    numbers: dict[str, float]
    next_step: str
