"""Read slots of a tape straight from the inputs: for guards and for the denominators of losses.

    reader = slot_reader(tape, model, slots)
    values = reader(inputs)          # {slot: tensor}, no gradients, a few microseconds of Python

The slots must follow from inputs, constants and buffers through glue alone; the slice is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.tape import Tape, backward_slice

Reader = Callable[[Sequence[Tensor]], dict[int, Tensor]]


def slot_reader(tape: Tape, model: nn.Module, slots: Iterable[int]) -> Reader:
    """A function from the tape's input tensors to the values of the slots."""
    wanted = tuple(dict.fromkeys(slots))
    needs = [tape.instructions[i] for i in backward_slice(tape.instructions, tape.metas, wanted)]
    reads = {*wanted, *(s for i in needs for s in i.reads())}
    constants = {s: t for s, t in tape.constants.items() if s in reads}
    function = compile_slice(
        SliceSpec("read", needs, tape.inputs, wanted, constants=constants), model, tape.modes
    )

    def read(inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        with torch.no_grad():
            return dict(zip(wanted, function(*inputs, torch.manual_seed), strict=True))

    return read
