"""Moves: what brings a stage's weights where it computes, takes them away, and reduces their gradients.

    2UNSHARD   2RESHARD   2REDUCE_GRAD      weights that replicas share (run/sharded.py)
    2LOAD      2UNLOAD                      weights that the host keeps

A move only begins; `arrival` is what a compute action waits for before it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action


class Moves(ABC):
    """One rank's; both are asked once, when a row is bound to its handlers."""

    @abstractmethod
    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """What `row[at]`, an action without a microbatch, does."""

    @abstractmethod
    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """What the compute action `row[at]` waits for; None: nothing."""


@final
class Resident(Moves):
    """Weights are where they are used: nothing moves."""

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Raises InvalidSchedule: there is no such action."""
        raise InvalidSchedule(
            f"{row[at]} moves weights that stay where they are",
            numbers=f"cell {at + 1} of {len(row)}",
            next_step="leave it out of the schedule",
        )

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return None
