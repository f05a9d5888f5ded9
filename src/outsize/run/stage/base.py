"""Defines what an interpreter calls of a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

from torch import Tensor

from outsize.run.stage.cut import StageProgram
from outsize.run.stage.outer_graph import OuterGraph
from outsize.run.stage.rng import Seed

Gradients = dict[int, Tensor | None]  # The key is a boundary.


@final
class Result(NamedTuple):
    """Holds a forward's exits: values to send by boundary key, the loss, the outputs."""

    sent: dict[int, Tensor]
    loss: Tensor | None
    outputs: tuple[Any, ...]


class RunnableStage(ABC):
    """Runs one StageProgram on the user's modules; `outer` is the user's graph, where the stage's graph is a
    part of it.
    """

    program: StageProgram
    outer: OuterGraph | None = None

    @property
    def alternates(self) -> bool:
        """Returns whether its forward, and its backward of another microbatch, may give way to others."""
        return False

    @abstractmethod
    def begin(self, grad_scale: Tensor | None = None) -> None:
        """Reads the caller's modes, which hold for a whole step, as `grad_scale` does."""

    @abstractmethod
    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        """Runs the forward of a microbatch; `inputs` are all its input tensors, `received` follow
        `program.received`.
        """

    @abstractmethod
    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """Runs the backward; turns incoming gradients by boundary key into gradients of the
        received values.
        """

    @abstractmethod
    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        """Runs the backward without the weight gradients that can wait for `backward_weight`."""

    @abstractmethod
    def backward_weight(self, microbatch: int) -> None:
        """Computes the weight gradients that `backward_input` of this microbatch has left."""

    @abstractmethod
    def tied_parameter(self, key: int) -> Tensor:
        """Returns the tied parameter that this stage owns."""

    @abstractmethod
    def forget_casts(self) -> None:
        """Drops the copies of the stage's weights in lower precision, before the weights leave."""

    @abstractmethod
    def forget(self) -> None:
        """Drops what an unfinished step left."""


_Inner = TypeVar("_Inner", bound=RunnableStage)


class StageAround(RunnableStage, ABC, Generic[_Inner]):
    """Runs another stage as it is; subclasses add to some of its calls."""

    def __init__(self, stage: _Inner) -> None:
        self._stage, self.program, self.outer = stage, stage.program, stage.outer

    def begin(self, grad_scale: Tensor | None = None) -> None:
        self._stage.begin(grad_scale)

    def forward(
        self, microbatch: int, inputs: Sequence[Tensor], received: Sequence[Tensor], seed: Seed
    ) -> Result:
        return self._stage.forward(microbatch, inputs, received, seed)

    def backward(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._stage.backward(microbatch, weight, gradients)

    def backward_input(self, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        return self._stage.backward_input(microbatch, weight, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self._stage.backward_weight(microbatch)

    def tied_parameter(self, key: int) -> Tensor:
        return self._stage.tied_parameter(key)

    def forget_casts(self) -> None:
        self._stage.forget_casts()

    def forget(self) -> None:
        self._stage.forget()
