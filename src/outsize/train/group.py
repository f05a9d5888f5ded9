"""A group: microbatches of one wiring, what a pipeline needs to run them, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from outsize.run.cut import StageProgram
from outsize.run.rng import Seed
from outsize.run.stage import Stage
from outsize.train.replicas import Piece
from outsize.train.variant import Variant


@final
@dataclass
class GroupOutputs:
    """What one run of microbatches gave: losses where they are computed, outputs on the last stage."""

    variants: Sequence[Variant]  # of each microbatch
    loss_dtype: torch.dtype | None  # None when there is no loss
    loss_rank: int
    losses: list[Tensor]
    outputs: list[tuple[Any, ...]]
    pieces: list[Piece] = field(default_factory=list)


@final
class Load(NamedTuple):
    """Microbatches of one wiring for one replica's pipeline, each with its variant, share and seed."""

    variants: Sequence[Variant]
    inputs: Sequence[Any]
    weights: Sequence[float]
    seeds: Sequence[Seed]
    replica: int = 0  # of those in this process


MakeStage = Callable[[Variant, StageProgram, int], Stage]  # and the replica of this process
