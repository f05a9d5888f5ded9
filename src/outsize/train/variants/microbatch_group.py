"""Defines a group of microbatches with one wiring: what a pipeline needs to run them, and what they
return.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor

from outsize.run.moves.base import Moves
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.rng import Seed
from outsize.train.ranks.replicas import Piece
from outsize.train.variants.variant import Variant

T = TypeVar("T")


@final
@dataclass(frozen=True)
class GroupOutputs:
    """The results of one run of microbatches: losses where they are computed, outputs on the last stage."""

    variants: Sequence[Variant]  # one for each microbatch
    loss_dtype: torch.dtype | None  # None when there is no loss
    loss_rank: int
    losses: list[Tensor]
    outputs: list[tuple[Any, ...]]
    pieces: list[Piece] = field(default_factory=list)


class VerifiedWork(Protocol):
    """Holds what one step shows to other ranks, and repeats of theirs (train/verify/places.py)."""

    @property
    def key(self) -> Hashable:
        """Returns what tells it from that of other steps."""
        ...

    def shown(self, stage: RunnableStage, number: int, microbatch: int) -> RunnableStage:
        """Returns the stage of this number, which notes its work if it is the one that is shown."""
        ...

    def moves(self, inner: Moves) -> Moves:
        """Returns the moves of a step together with what is shown and verified."""
        ...


@final
class PipelineInputs(NamedTuple):
    """Microbatches of one wiring for one replica's pipeline, each with its variant, share and seed.

    `channels` are the numbers of the variants' channels, which are the same on all ranks. `grad_scale` is the
    factor of a GradScaler, on a device. `seat` has the stages of one call of a split model, whose backward
    the user begins, microbatch by microbatch in this `order`; None: of a step.
    """

    variants: Sequence[Variant]
    inputs: Sequence[Any]
    weights: Sequence[float]
    seeds: Sequence[Seed]
    channels: Sequence[int]
    replica: int = 0  # its number among the replicas in this process
    grad_scale: Tensor | None = None
    seat: int | None = None
    order: tuple[int, ...] = ()
    verified: VerifiedWork | None = None  # what is shown to other ranks, and what of theirs is repeated

    @property
    def slices(self) -> int:
        """Returns in how many slices each microbatch goes through the stages; lists are of slices then."""
        of = self.variants[0].slice
        return 1 if of is None else of.keeper.slices

    def in_slices(self) -> PipelineInputs:
        """Returns the same with the slices of each microbatch, first to last, in its place."""
        counts = [len(variant.slices) for variant in self.variants]
        return self._replace(
            variants=[unit for variant in self.variants for unit in variant.slices],
            inputs=_repeated(self.inputs, counts),
            weights=_repeated(self.weights, counts),
            seeds=_repeated(self.seeds, counts),
            channels=_repeated(self.channels, counts),
        )


def _repeated(values: Sequence[T], counts: Sequence[int]) -> list[T]:
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


# Takes the variant, the stage's program, the number of the local replica, and its device (None: the model's).
MakeStage = Callable[[Variant, StageProgram, int, torch.device | None], RunnableStage]
