"""Writes the tape of a rank that has some of the experts: each call of experts becomes one over all ranks.

    v9 = model.layers.0.mlp.experts(x, index, weight)      v9 = experts(call, x, index, weight)

Everything else is the tape of one device, on the rank's own tokens. Complexity: O(instructions). Oracle:
tests/dist/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import nn

from outsize.program.sharding.axis_group import AxisGroup
from outsize.program.sharding.expert_parallel.experts import Experts
from outsize.program.sharding.rank_step import CallSite, RankCall, RankStep
from outsize.program.sharding.rank_tape import RankTapeWriter
from outsize.program.sharding.share import Share
from outsize.program.tape import Instruction, Tape


@final
@dataclass(frozen=True)
class ExpertCall:
    """Holds a module of which this rank has some experts, what was found of it, and its result's dtype."""

    __tape_leaf__: ClassVar[bool] = True
    module: nn.Module
    experts: Experts
    dtype: torch.dtype


@final
@dataclass(frozen=True)
class OfAllRanks(RankCall):
    """A call of experts, of which each rank has some.

    The collective `experts` gets an ExpertCall, this rank's tokens x (tokens, width), `index` and `weight`
    (tokens, choices), and returns what the experts of all ranks make of the tokens.
    """

    experts: Experts

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        (result,) = site.results
        assert site.module is not None
        call = ExpertCall(site.module, self.experts, result.dtype)
        return replace(instruction, target=site.group.call("experts"), args=(call, *instruction.args))


@final
@dataclass(frozen=True)
class ExpertSteps:
    """Holds the steps of the calls of experts; no value of the tape is divided."""

    steps: Mapping[int, RankStep]
    shares: Mapping[int, Share]


def expert_tape(
    tape: Tape, found: Mapping[int, Experts], modules: Mapping[str, nn.Module], group: AxisGroup
) -> Tape:
    """Returns the tape of the rank at `group.place`."""
    steps = {index: RankStep((None,), call=OfAllRanks(experts)) for index, experts in found.items()}
    return _ExpertTapeWriter(tape, ExpertSteps(steps, {}), modules, group).write()


@final
class _ExpertTapeWriter(RankTapeWriter):
    def _finished(self) -> Tape:
        return self._written()
