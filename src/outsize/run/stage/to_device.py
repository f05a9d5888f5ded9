"""Adapts a stage's program to another device than the one that its tape was recorded on.

    recorded on cpu                              for a stage on cuda:1
    torch.arange(9, device=cpu)                  torch.arange(9, device=cuda:1)
    a constant on cpu                            a copy on cuda:1, made once
    a frozen weight that lives with stage 0      copied, and copied again when the weight has changed

Where a tape names its home, the device of model and inputs during recording, the program names the stage's
device; other devices that the user's code names are unchanged. A trained weight of two stages is a boundary
value and not handled here. Complexity: O(instructions), once per program. Oracle:
tests/unit/run/stage/test_to_device.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import final

import torch
from torch import nn

from outsize.errors import BadOption
from outsize.program.generate import compile_slice
from outsize.program.replaying.modes import casting_devices
from outsize.program.replaying.replay import relocated, relocated_constants
from outsize.program.tape import Tape
from outsize.program.weights.lookup import CopiedWeights
from outsize.run.stage.cut import StageProgram


@final
@dataclass(frozen=True, slots=True)
class TapeHome:
    """Says which device tapes are made for, where stages compute on others than the model's.

    The user's code may name the device that the model had (`model`), or none, and means the stage's; so tapes
    are made for that one. But autocast chooses types by the device that computes: where it is on for the
    devices of stages, tapes are made for the first of these. Stages on devices of several types would choose
    different types for what they send each other, and are refused under autocast.
    """

    model: torch.device
    stages: tuple[torch.device, ...]

    def now(self) -> torch.device:
        """Returns the device that a tape is made for under the caller's modes.

        Raises BadOption where autocast would choose other types on some stages than on others.
        """
        casting = casting_devices()
        kinds = list(dict.fromkeys(device.type for device in self.stages))
        if len(kinds) > 1 and not set(kinds).isdisjoint(casting):
            raise no_common_casts(kinds, f"autocast is on for {', '.join(casting)}")
        if self.model in self.stages or self.model.type in casting:
            return self.model
        return next((device for device in self.stages if device.type in casting), self.model)


def no_common_casts(kinds: Sequence[str], where: str) -> BadOption:
    """Returns the error that devices of these types cannot share a model under autocast."""
    return BadOption(
        f"autocast chooses types by the device, so stages on {' and '.join(kinds)} send what the others do "
        "not expect",
        numbers=where,
        next_step="devices of one type, or model.bfloat16() and no autocast",
    )


def device_of_model(model: nn.Module) -> torch.device:
    """Returns the device of the model's weights; the CPU where none has values."""
    weights = chain(model.parameters(), model.buffers())
    return next((t.device for t in weights if not t.is_meta), torch.device("cpu"))


def program_on_device(
    program: StageProgram, tape: Tape, model: nn.Module, home: torch.device, device: torch.device
) -> StageProgram:
    """Returns the program on `device`, or the same program where nothing of it is elsewhere."""
    known = dict(chain(model.named_parameters(), model.named_buffers()))
    weights = [(name, known[name]) for name in sorted(program.weights) if name in known]
    away = [name for name, weight in weights if weight.device != device and not weight.requires_grad]
    if device == home and not away:
        return program
    spec = replace(
        program.spec,
        instructions=tuple(relocated(i, tape, home, device) for i in program.spec.instructions),
        constants=relocated_constants(program.spec.constants, home, device),
        copied=CopiedWeights(model, away, device),
    )
    return replace(program, spec=spec, function=compile_slice(spec, model, tape.modes))
