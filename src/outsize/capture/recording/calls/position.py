"""Says in whose code the recording is: a module, a leaf, or the loss.

model.forward             frame ""                  instructions are written
  self.block(x)           frame "block"
    self.linear(x)        inside "block.linear"     muted: the leaf runs as it is
loss_fn(output)           LOSS
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.recording.python_random import is_seeded, mark_seed
from outsize.program.python_reads import LOSS


@final
class Position:
    """Where the recording is in the user's code.

    inside       the leaf that runs
    is_muted     a call is being recorded, so nothing below it becomes an instruction
    runs_loss    the model has returned, and the loss function runs
    runs_live    the loss function runs as one instruction
    """

    def __init__(self, numbers: PlantedNumbers | None) -> None:
        """`numbers` are those that are followed, if any: their arithmetic is not, below a recorded call."""
        self.inside: str | None = None
        self.is_muted = self.runs_loss = self.runs_live = False
        self._frames = [""]
        self._numbers = numbers

    @property
    def frame(self) -> str:
        """Returns the module whose forward runs, by name."""
        return self._frames[-1]

    def running(self) -> str:
        """Returns whose code runs: the loss, the leaf, or the module."""
        return LOSS if self.runs_loss else self.inside or self.frame

    def end_model(self) -> None:
        """Notes that the model has returned, so that what runs from now on is the loss function."""
        self.runs_loss = True

    def begin_live(self) -> None:
        """Notes that the loss function runs as one instruction from now on."""
        self.runs_live = True

    @contextmanager
    def entered(self, fqn: str) -> Iterator[None]:
        """Returns a context within which the forward of a module runs, whose calls are recorded."""
        self._frames.append(fqn)
        try:
            yield
        finally:
            self._frames.pop()

    @contextmanager
    def within(self, fqn: str) -> Iterator[None]:
        """Returns a context within which a leaf runs."""
        self.inside = fqn
        try:
            yield
        finally:
            self.inside = None
            if is_seeded():  # A leaf seeds as it likes, since it runs as it is.
                mark_seed()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Returns a context within which nothing becomes an instruction."""
        self._set_muted(True)
        try:
            yield
        finally:
            self._set_muted(False)

    def _set_muted(self, muted: bool) -> None:
        self.is_muted = muted
        if self._numbers is not None:
            self._numbers.set_live(muted)
