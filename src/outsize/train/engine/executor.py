"""Defines Executor: how the microbatches of a batch become loss, gradients and outputs.

Engine ── Executor ─┬─ Pipelined    stages of a cut tape, overlapping as the schedule says
                    └─ ByModules    the model's own Python, each module called where its weights live
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from outsize.errors import BadOption
from outsize.ir.answers.compilation import StageGraphs
from outsize.train.batch.batch import Batch
from outsize.train.variants.results import BatchLoss, EvalResult

EvaluationGather = bool | Literal["losses"]
"""Says what every rank gets of an evaluation: outputs, the losses of the microbatches alone, or neither."""


class Executor(ABC):
    """Runs a plan. The engine keeps the random generators; what a step draws follows from `step`."""

    @property
    def recorded(self) -> tuple[StageGraphs, ...]:
        """Returns what was recorded as graphs of devices, by stage."""
        return ()

    def verify(self, every: int) -> None:
        """Lets ranks repeat each other's work in every `every`-th step; 0 ends that. All ranks call this.

        Raises BadOption where there are no stages to repeat.
        """
        raise BadOption(
            "ranks cannot repeat the work of each other where the model runs by modules, in its own Python",
            next_step="leave engine.verify() out",
        )

    @abstractmethod
    def prepare(self, parts: Sequence[Batch]) -> None:
        """Gives every weight its owner."""

    @abstractmethod
    def train(
        self,
        parts: Sequence[Batch],
        scale: float,
        step: int,
        optimizer: Optimizer | None = None,
        grad_scale: Tensor | None = None,
        *,
        outputs: bool = False,
    ) -> BatchLoss:
        """Returns the batch's loss, on every rank; gradients, times `scale`, add up in the parameters.

        With `outputs` the model's outputs are in it, too. `grad_scale` (0-dim) multiplies gradients as well.
        `optimizer` may step for gradients as they land on the host; None: the step comes later.
        Raises BadOption when there is no loss to train, and whatever the model raises.
        """

    @abstractmethod
    def evaluate(self, parts: Sequence[Batch], step: int, *, gather: EvaluationGather = False) -> EvalResult:
        """Returns loss and outputs; called in eval mode without grad. With `gather` outputs are on every
        rank, or the losses of the microbatches.
        """
