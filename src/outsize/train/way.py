"""Way: how the microbatches of a batch become loss, gradients and outputs.

Engine ── Way ─┬─ Pipelined    stages of a cut tape, overlapping as the schedule says
               └─ ByModules    the model's own Python, each module called where its weights live
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from outsize.train.batch import Batch
from outsize.train.results import EvalResult


class Way(ABC):
    """One way to run a plan. Generators are the engine's to keep; what a step draws follows from `step`."""

    @abstractmethod
    def prepare(self, parts: Sequence[Batch]) -> None:
        """See to it that every weight has its owner."""

    @abstractmethod
    def train(self, parts: Sequence[Batch], scale: float, step: int) -> Tensor:
        """The batch's loss, on every rank; gradients, times `scale`, add up in the parameters.

        Raises BadOption when there is no loss to train, and whatever the model raises.
        """

    @abstractmethod
    def evaluate(self, parts: Sequence[Batch], step: int) -> EvalResult:
        """Loss and outputs; called in eval mode without grad."""
