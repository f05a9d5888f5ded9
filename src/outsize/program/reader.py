"""Computes slots of a tape straight from the inputs: for guards and for the denominators of losses.

    reader = SlotReader(tape, model, slots)
    values = reader.read(inputs).slots          # {slot: tensor}, no gradients, a few microseconds of Python

The slots must depend on inputs, constants and buffers through glue alone; the slice is compiled once for each
device that inputs come on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.replaying.replay import relocated, relocated_constants
from outsize.program.tape import Tape, backward_slice
from outsize.program.weights.lookup import CopiedWeights


def buffers_behind(tape: Tape, slots: Iterable[int]) -> frozenset[str]:
    """Returns the buffers from which the values of the slots follow."""
    needs = backward_slice(tape.instructions, tape.metas, tuple(dict.fromkeys(slots)))
    return frozenset(w.name for i in needs for w in tape.instructions[i].weights if w.kind == "buffer")


@final
class SlotValues(NamedTuple):
    """Values of slots by their numbers, and the buffers beside them by name, all on one device."""

    slots: dict[int, Tensor]
    buffers: Mapping[str, Tensor]


@final
class SlotReader:
    """Computes slots from the tape's inputs.

    `home` is the device that the tape was made for, where inputs may be elsewhere; values are computed where
    the inputs are, so nothing waits for a device that has no part in them. `buffers` are wanted beside them.
    """

    def __init__(
        self,
        tape: Tape,
        model: nn.Module,
        slots: Iterable[int],
        buffers: Iterable[str] = (),
        home: torch.device | None = None,
    ) -> None:
        self._tape, self._model, self._home = tape, model, home
        self._wanted, self._beside = tuple(dict.fromkeys(slots)), tuple(buffers)
        needs = backward_slice(tape.instructions, tape.metas, self._wanted)
        self._needs = [tape.instructions[i] for i in needs]
        self._slots = {*self._wanted, *(s for i in self._needs for s in i.reads())}
        self._places = [place for place, slot in enumerate(tape.inputs) if slot in self._slots]
        self._functions: dict[torch.device | None, Callable[..., tuple[Any, ...]]] = {}
        self._buffers: dict[torch.device | None, CopiedWeights] = {}

    @property
    def places(self) -> Sequence[int]:
        """Returns the places of the inputs from which the slots follow."""
        return self._places

    def read(self, inputs: Sequence[Tensor]) -> SlotValues:
        """Returns the values of the slots, and the buffers."""
        own = [inputs[place] for place in self._places]
        at = self._device(own)
        if at not in self._functions:
            self._functions[at] = self._compiled(at)
            self._buffers[at] = CopiedWeights(self._model, self._beside, at)
        with torch.no_grad():
            here = own if at is None else [t.to(at) for t in own]
            values = self._functions[at](*here, torch.manual_seed)
        return SlotValues(dict(zip(self._wanted, values, strict=True)), self._buffers[at])

    def _device(self, inputs: Sequence[Tensor]) -> torch.device | None:
        """Returns where to compute: the device of all inputs, else the tape's; None: where everything is."""
        if self._home is None:
            return None
        devices = {tensor.device for tensor in inputs}
        return devices.pop() if len(devices) == 1 else self._home

    def _compiled(self, at: torch.device | None) -> Callable[..., tuple[Any, ...]]:
        home, tape, needs = self._home, self._tape, self._needs
        constants = {s: t for s, t in tape.constants.items() if s in self._slots}
        if home is not None and at is not None and at != home:
            needs = [relocated(instruction, tape, home, at) for instruction in needs]
            constants = relocated_constants(constants, home, at)
        buffers = {w.name for i in needs for w in i.weights if w.kind == "buffer"} if at is not None else ()
        spec = SliceSpec(
            "read",
            needs,
            [tape.inputs[place] for place in self._places],
            self._wanted,
            constants=constants,
            copied=CopiedWeights(self._model, buffers, at),
        )
        return compile_slice(spec, self._model, tape.modes)
