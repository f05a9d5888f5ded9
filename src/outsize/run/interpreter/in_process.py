"""Defines how the ranks of one process reach each other, where each computes, and how they take turns.

SingleDevice     puts all ranks on the device where model and batch are, and passes tensors by reference
MultiDevice  puts each rank on its own device (multi_device.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.device.streams import Streams
from outsize.errors import InvalidSchedule
from outsize.run.interpreter.interpreter import Interpreter, StepOutputs
from outsize.run.transport.base import Transport
from outsize.run.transport.local import LocalTransport, Mailboxes

Used = Callable[[int], set[int]]


class InProcessRanks(ABC):
    """Places the ranks of one process and runs them."""

    @abstractmethod
    def transport(self, seat: int) -> Transport:
        """Returns the transport of one seat (a rank, where there is one pipeline); all transports share
        mailboxes.
        """

    @abstractmethod
    def device(self, seat: int) -> torch.device | None:
        """Returns the device on which a seat computes; None means the device of the model."""

    @abstractmethod
    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        """Returns the microbatches on the seat's device; `used(microbatch)` gives the positions that it
        reads.
        """

    @abstractmethod
    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        """Runs one step of all ranks, given by seat. Raises InvalidSchedule when no rank can proceed."""

    @abstractmethod
    def reset(self) -> None:
        """Drops an unfinished step."""


@final
class SingleDevice(InProcessRanks):
    """Runs all stages in turn on one device."""

    def __init__(self) -> None:
        self._boxes = Mailboxes()

    def transport(self, seat: int) -> Transport:
        return LocalTransport(seat, self._boxes)

    def device(self, seat: int) -> torch.device | None:
        return None

    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        return microbatches

    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        return run_round_robin(list(interpreters.values()))

    def reset(self) -> None:
        self._boxes.boxes.clear()


def own_inputs(
    streams: Streams, place: str | torch.device, microbatches: Sequence[Sequence[Tensor]], used: Used
) -> list[list[Tensor]]:
    """Returns the microbatches with the inputs that a rank reads on its place; the others are where they
    were.
    """
    wanted = [(mb, p) for mb in range(len(microbatches)) for p in sorted(used(mb))]
    brought = streams.move_inputs([microbatches[mb][p] for mb, p in wanted], str(place))
    moved = [list(tensors) for tensors in microbatches]
    for (mb, p), tensor in zip(wanted, brought, strict=True):
        # A copy is no part of the graph of what it copies; its gradient is wanted all the same.
        wants_gradient = microbatches[mb][p].requires_grad and not tensor.requires_grad
        moved[mb][p] = tensor.detach().requires_grad_() if wants_gradient else tensor
    return moved


def run_round_robin(interpreters: Sequence[Interpreter]) -> list[StepOutputs]:
    """Runs all ranks in turn, each until its next action lacks a message. Raises InvalidSchedule on a
    deadlock.
    """
    left = list(interpreters)
    while left:
        moved = False
        for interpreter in list(left):
            while (state := interpreter.advance()) is True:
                moved = True
            if state is None:
                left.remove(interpreter)
                moved = True
        if not moved:
            raise deadlock(left)
    return [i.outputs for i in interpreters]


def deadlock(left: Sequence[Interpreter]) -> InvalidSchedule:
    """Returns the error that says at which action each of these ranks is deadlock."""
    waiting = ", ".join(f"rank {i.rank} at {i.current()}" for i in left)
    return InvalidSchedule(
        "no rank can continue: the schedule deadlocks",
        numbers=waiting,
        next_step="check the schedule: outsize plan",
    )
