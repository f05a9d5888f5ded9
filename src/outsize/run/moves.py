"""Moves: what brings a stage's weights where it computes, takes them away, and reduces their gradients.

    2UNSHARD   2RESHARD   2REDUCE_GRAD      weights that replicas share (run/sharded.py)
    2LOAD      2UNLOAD                      weights that the host keeps

A move only begins; `arrival` is what a compute action waits for before it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch.optim import Optimizer

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Schedule
from outsize.run.cut import Cut
from outsize.run.speculation import Speculation


class Moves(ABC):
    """One rank's; all are asked once, when a row is made and bound to its handlers."""

    @abstractmethod
    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        """The lowered schedule of these programs with its moves."""

    def of(self, cuts: Sequence[Cut]) -> Moves:
        """Those of a step whose microbatches have these programs."""
        return self

    @abstractmethod
    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """What `row[at]`, an action without a microbatch, does."""

    @abstractmethod
    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """What the compute action `row[at]` waits for; None: nothing."""

    def at_work(self, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Around a run of microbatches, all of a step where there is an optimizer: it may take gradients as
        they land on the host.
        """
        return nullcontext()

    def speculation(self) -> Speculation | None:
        """From now on steps that begin as gradients land may be taken back; None: there are none."""
        return None


@final
class Resident(Moves):
    """Weights are where they are used: nothing moves."""

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return schedule

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Raises InvalidSchedule: there is no such action."""
        raise InvalidSchedule(
            f"{row[at]} moves weights that stay where they are",
            numbers=f"cell {at + 1} of {len(row)}",
            next_step="leave it out of the schedule",
        )

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return None
