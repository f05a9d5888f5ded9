"""Problem: a stage runs slices of several microbatches in turn. Which rows of earlier ones does a slice read?

    0F0     begin(0)   keys and values of slice 0 of microbatch 0 are kept
    0F1     begin(0)   those of slice 1 behind them; attention reads both
    0F2     begin(1)   microbatch 1 begins
    0B1     begin(0)   a second forward of recompute, and the backward, read those of microbatch 0
    0B0     begin(0)   end(0): all of them go

Two slices in a microbatch. What is kept, and how gradients of it add up, is in
collectives/sequence_slices.py. Oracle: tests/parity/test_slices.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outsize.run.collectives.sequence_slices import SequenceSlice
from outsize.run.stage.base import Gradients, Result, RunnableStage, StageAround
from outsize.run.stage.rng import Seed


@final
class SlicedStage(StageAround[RunnableStage]):
    """Runs a stage of one slice, with the weights of a model; its microbatches are slices."""

    def __init__(self, stage: RunnableStage, of: SequenceSlice, model: object) -> None:
        super().__init__(stage)
        self._keeper, self._number = of.keeper, of.number
        self._kept = of.keeper.of(stage.program.stage, model)

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        self._enter(microbatch)
        result = self._stage.forward(microbatch, inputs, received, seed)
        if not torch.is_grad_enabled() and self._number == self._keeper.slices - 1:
            self._end(microbatch)
        return result

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        self._enter(microbatch)
        back = self._stage.backward(microbatch, weight, gradients)
        if self._number == 0:
            self._end(microbatch)
        return back

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        self._enter(microbatch)
        return self._stage.backward_input(microbatch, weight, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._enter(microbatch)
        self._stage.backward_weight(microbatch)

    def forget(self) -> None:
        self._kept.clear()
        self._stage.forget()

    def _enter(self, microbatch: int) -> None:
        self._keeper.enter(self._kept, microbatch // self._keeper.slices)

    def _end(self, microbatch: int) -> None:
        self._kept.end(microbatch // self._keeper.slices)
