"""Together: how the ranks of one process reach each other, and where each of them is.

OnePlace     all on the device where model and batch are: tensors are handed over
Places       each on a device of its own (device_transport.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.run.interpreter import Interpreter, StepOutputs
from outsize.run.transport import LocalTransport, Mailboxes, Transport
from outsize.run.turns import run_together

Used = Callable[[int], set[int]]


class Together(ABC):
    """The ranks of one process."""

    @abstractmethod
    def transport(self, seat: int) -> Transport:
        """That of one seat (a rank, where there is one pipeline); all of them share mailboxes."""

    @abstractmethod
    def device(self, seat: int) -> torch.device | None:
        """Where a seat computes; None: where the model is."""

    @abstractmethod
    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        """The microbatches where the seat computes; `used(microbatch)`: positions of what it reads."""

    @abstractmethod
    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        """One step of all ranks, by their seats. Raises InvalidSchedule when nobody can go on."""

    @abstractmethod
    def reset(self) -> None:
        """Forget an unfinished step."""


@final
class OnePlace(Together):
    """Stages take turns on one device."""

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
        return run_together(list(interpreters.values()))

    def reset(self) -> None:
        self._boxes.boxes.clear()
