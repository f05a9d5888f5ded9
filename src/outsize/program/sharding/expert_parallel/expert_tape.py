"""Writes the tape of a rank that has some of the experts: each call of experts becomes one over all ranks.

    v9 = model.layers.0.mlp.experts(x, index, weight)      v9 = experts(call, x, index, weight)

Everything else is the tape of one device, on the rank's own tokens. Complexity: O(instructions). Oracle:
tests/dist/test_experts.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from outsize.program.sharding.expert_parallel.experts import Experts
from outsize.program.sharding.share import RankPosition
from outsize.program.sharding.tensor_parallel.local_tape import renumbered
from outsize.program.tape import Cost, Instruction, Tape


@final
@dataclass(frozen=True)
class ExpertCall:
    """Holds a module of which this rank has some experts, what was found of it, and its result's dtype."""

    __tape_leaf__: ClassVar[bool] = True
    module: nn.Module
    experts: Experts
    dtype: torch.dtype


class ExpertCollectives(ABC):
    """Defines what ranks compute together of which each has some experts; `place` is this rank's position."""

    place: RankPosition

    @abstractmethod
    def experts(self, call: ExpertCall, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """Returns what the experts of all ranks make of this rank's tokens x (tokens, width).

        `index` and `weight` (tokens, choices) say which experts each token has chosen, and how much each
        counts. A choice that is no expert is dropped. Every rank calls this alike, with tokens of its own.
        """


def expert_tape(
    tape: Tape, found: Mapping[int, Experts], modules: Mapping[str, nn.Module], together: ExpertCollectives
) -> Tape:
    """Returns the tape of the rank at `together.place`."""

    def own(instruction: Instruction) -> Instruction:
        experts = found.get(instruction.index)
        if experts is not None:
            (result,) = instruction.defines()
            call = ExpertCall(modules[experts.name], experts, tape.metas[result].dtype)
            instruction = replace(
                instruction, target=together.experts, args=(call, *instruction.args), cost=Cost()
            )
        return renumbered(instruction, instruction.index)

    return replace(tape, instructions=tuple(map(own, tape.instructions)))
