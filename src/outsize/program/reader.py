"""Computes slots of a tape straight from the inputs: for guards and for the denominators of losses.

    reader = slot_reader(tape, model, slots)
    values = reader(inputs)          # {slot: tensor}, no gradients, a few microseconds of Python

The slots must depend on inputs, constants and buffers through glue alone; the slice is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from outsize.program.generate import SliceSpec, compile_slice
from outsize.program.tape import Tape, backward_slice
from outsize.program.weight_lookup import CopiedWeights

Reader = Callable[[Sequence[Tensor]], dict[int, Tensor]]


def buffers_behind(tape: Tape, slots: Iterable[int]) -> frozenset[str]:
    """Returns the buffers from which the values of the slots follow."""
    needs = backward_slice(tape.instructions, tape.metas, tuple(dict.fromkeys(slots)))
    return frozenset(w.name for i in needs for w in tape.instructions[i].weights if w.kind == "buffer")


def slot_reader(
    tape: Tape, model: nn.Module, slots: Iterable[int], home: torch.device | None = None
) -> Reader:
    """Returns a function from the tape's input tensors to the values of the slots, computed at `home` if
    given.
    """
    wanted = tuple(dict.fromkeys(slots))
    needs = [tape.instructions[i] for i in backward_slice(tape.instructions, tape.metas, wanted)]
    reads = {*wanted, *(s for i in needs for s in i.reads())}
    constants = {s: t for s, t in tape.constants.items() if s in reads}
    places = [place for place, slot in enumerate(tape.inputs) if slot in reads]
    buffers = {w.name for i in needs for w in i.weights if w.kind == "buffer"} if home is not None else ()
    spec = SliceSpec(
        "read",
        needs,
        [tape.inputs[place] for place in places],
        wanted,
        constants=constants,
        copied=CopiedWeights(model, buffers, home),
    )
    function = compile_slice(spec, model, tape.modes)

    def read(inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        used_inputs = [inputs[place] for place in places]
        with torch.no_grad():
            here = used_inputs if home is None else [t.to(home) for t in used_inputs]
            return dict(zip(wanted, function(*here, torch.manual_seed), strict=True))

    return read
