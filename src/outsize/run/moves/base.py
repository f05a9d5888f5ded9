"""Defines what brings a stage's weights to the device, takes them away, and reduces their gradients.

    2UNSHARD   2RESHARD   2REDUCE_GRAD      weights that replicas share (run/moves/fsdp.py)
    2LOAD      2UNLOAD                  weights in host memory

A move only begins; a compute action waits for what `arrival` returns before it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch.optim import Optimizer

from outsize.errors import InvalidSchedule
from outsize.ir.schedule import Action, Schedule
from outsize.run.host.speculative_step import Speculation
from outsize.run.stage.cut import Cut
from outsize.run.stage.outer_graph import GatheredWeights
from outsize.run.stage.stage import Saving, identity
from outsize.run.transport.base import Pending

# The fields are the boundary, the stage that takes it, the microbatch, and whether it is a gradient.
ValueKey = tuple[int, int, int, bool]
Receiver = Callable[[Pending], Pending]


class Moves(ABC):
    """Moves the weights of one rank; its methods are called once, when a row is bound to its handlers."""

    @abstractmethod
    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        """Returns the lowered schedule of these programs with its moves."""

    def of(self, cuts: Sequence[Cut]) -> Moves:
        """Returns the moves of a step whose microbatches have these programs."""
        return self

    def of_call(self, cuts: Sequence[Cut]) -> Moves:
        """Returns the moves of a call whose backward the user begins.

        Weights stay, and gradients are added up where the user's backward ends.
        """
        return Resident()

    @property
    def gathered(self) -> GatheredWeights | None:
        """Returns the weights that are divided between their uses; None where there are none."""
        return None

    def gathered_all(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has whole weights of this rank's stages, for its own Python;
        all ranks enter it alike.
        """
        return nullcontext()

    def abandon(self) -> None:
        """Takes away what a call has brought that has ended in its middle."""
        return

    @abstractmethod
    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Returns the function that performs `row[at]`, an action without a microbatch."""

    @abstractmethod
    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """Returns the function that waits for what the compute action `row[at]` needs, or None."""

    def step_context(self, optimizer: Optimizer | None) -> AbstractContextManager[None]:
        """Returns the context around a run of microbatches.

        With an optimizer, which implies all microbatches of a step, gradients may be stepped as they arrive
        on the host.
        """
        return nullcontext()

    def speculation(self) -> Speculation | None:
        """Makes steps that begin as gradients arrive reversible; returns None where there are no
        such steps.
        """
        return None


@final
class Resident(Moves):
    """Moves nothing, because all weights are where they are used."""

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        return schedule

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        """Raises InvalidSchedule, because there is no such action."""
        raise InvalidSchedule(
            f"{row[at]} moves weights, which this plan leaves on their devices",
            numbers=f"cell {at + 1} of {len(row)}",
            next_step="leave it out of the schedule",
        )

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        return None


class PassedValues(ABC):
    """Passes values and gradients between the stages of one rank, by way of their message slots, and says how
    values of other ranks are held there.
    """

    @property
    def saving(self) -> Saving | None:
        """Returns what replaces what autograd saves of a microbatch; None where it saves as usual."""
        return None

    def receiver(self, key: ValueKey) -> Receiver:
        """Returns what a posted receive of a value from another rank goes through."""
        return identity

    @abstractmethod
    def pends(self, giver: int, taker: int) -> bool:
        """Returns whether a slot holds a Pending of what one stage of the rank passes to another one."""

    @abstractmethod
    def wrapper(self, key: ValueKey, giver: int, *, is_sent: bool) -> Callable[[Any], Any]:
        """Returns the function that prepares what stage `giver` passes on for its slot; `is_sent` to another
        rank.
        """

    def output(self, value: Any) -> Any:
        """Returns what the run keeps of an output of the model, which outlives the weights of its stage."""
        return value

    def combined_with(self, moves: Moves, cuts: Sequence[Cut]) -> Moves:
        """Returns other moves of the same rank, for microbatches with these programs, together with these."""
        return moves

    def end(self) -> None:
        """Ends a step: what has left may be freed."""
        return

    @abstractmethod
    def forget(self) -> None:
        """Drops what an unfinished step left."""
