"""Adapts a stage's program to another device than the one that its tape was recorded on.

    recorded on cpu                              for a stage on cuda:1
    torch.arange(9, device=cpu)                  torch.arange(9, device=cuda:1)
    mask.to("cpu")                               mask.to(cuda:1)
    a constant on cpu                            a copy on cuda:1, made once
    a frozen weight that lives with stage 0   copied, and copied again when the weight has changed

Where a tape names its home, the device of model and inputs during recording, the program names the stage's
device; other devices that the user's code names are unchanged. A trained weight of two stages is a boundary
value and not handled here. Complexity: O(instructions), once per program. Oracle:
tests/unit/run/stage/test_to_device.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.tape import Instruction, Tape
from outsize.program.tree import map_leaves
from outsize.program.weight_lookup import CopiedWeights
from outsize.run.stage.cut import StageProgram

_MOVES: Final = frozenset({Tensor.cpu, Tensor.cuda})
# These functions create tensors, on the CPU unless `device` is given.
_FACTORIES: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.logspace, torch.ones),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tensor, torch.zeros),
        *(torch.tril_indices, torch.triu_indices, torch.scalar_tensor, torch.empty_strided, torch.as_tensor),
    }
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
        instructions=tuple(_moved(i, tape, home, device) for i in program.spec.instructions),
        constants=_constants(program.spec, home, device),
        copied=CopiedWeights(model, away, device),
    )
    return replace(program, spec=spec, function=compile_slice(spec, model, tape.modes))


def _constants(spec: SliceSpec, home: torch.device, device: torch.device) -> dict[int, Tensor]:
    return {slot: t.to(device) if t.device == home else t for slot, t in spec.constants.items()}


def _moved(instruction: Instruction, tape: Tape, home: torch.device, device: torch.device) -> Instruction:
    if instruction.is_leaf:
        return instruction

    def swap(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) and _is(leaf, home) else leaf

    target, kwargs = instruction.target, dict(instruction.kwargs)
    args: tuple[Any, ...] = tuple(instruction.args)
    at_home = all(tape.metas[slot].device == home for slot in instruction.defines())
    if target in _MOVES and at_home:
        return replace(instruction, target=Tensor.to, args=(args[0], device), kwargs={})
    if isinstance(kwargs.get("device"), str | int):
        kwargs["device"] = torch.device(kwargs["device"])
    if target is Tensor.to and len(args) > 1 and isinstance(args[1], str | int):
        args = (args[0], torch.device(args[1]), *args[2:])
    if target in _FACTORIES and at_home and kwargs.get("device") is None:
        kwargs["device"] = device
    return replace(instruction, args=map_leaves(swap, args), kwargs=map_leaves(swap, kwargs))


def _is(named: torch.device, home: torch.device) -> bool:
    """Returns whether the device is the tape's home; `cuda` names the current GPU, which home is."""
    return named.type == home.type and (named.index is None or named.index == (home.index or 0))
