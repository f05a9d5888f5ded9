"""A tape whose lengths are inputs: the tape at other lengths, without a recording.

recorded at n = 64 and 80, followed at 72     view(2, n, 8, 32), decisions `n > 1`, shapes in n
at n = 96                                     view(2, 96, 8, 32)
at n = 1                                      None: it has to be recorded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.capture.costs.real_runs import TooLarge, limited
from outsize.capture.recording.guards import signature_of
from outsize.capture.shapes.opaque_calls import OpaqueCalls
from outsize.capture.shapes.symbolic_shapes import InputSymbols, Sizes, SymbolicShapes, symbolic_shapes
from outsize.program.lengths import Lengths, LengthTape, put_in
from outsize.program.python_reads import SizeOf
from outsize.program.replaying.replay import evaluate, resolve
from outsize.program.tape import Guard, Ref, Tape, backward_slice
from outsize.program.tree import leaves

_KINDS: Final[tuple[tuple[Literal["size", "stride"], str], ...]] = (("size", "shape"), ("stride", "stride"))


@final
class SizedTape(NamedTuple):
    """A tape, and the whole numbers among the arguments of the model when it was recorded."""

    tape: Tape
    given: tuple[int, ...]

    @property
    def sizes(self) -> Sizes:
        """Returns the shapes of the tape's inputs, and the numbers."""
        return [*(self.tape.metas[slot].shape for slot in self.tape.inputs), self.given]


def varying_sizes(one: SizedTape, other: SizedTape) -> frozenset[SizeOf] | None:
    """Returns the lengths in which two tapes of as many values differ; None where these have other dims."""
    first, second = one.tape, other.tape
    if len(first.metas) != len(second.metas):
        return None
    numbers = zip(one.given, other.given, strict=True)
    found = [SizeOf(-1, place, "given", a) for place, (a, b) in enumerate(numbers) if a != b]
    for slot, metas in enumerate(zip(first.metas, second.metas, strict=True)):
        if len(metas[0].shape) != len(metas[1].shape) or len(metas[0].stride) != len(metas[1].stride):
            return None
        for kind, name in _KINDS:
            pairs = zip(*(getattr(meta, name) for meta in metas), strict=True)
            found += [SizeOf(slot, dim, kind, a) for dim, (a, b) in enumerate(pairs) if a != b]
    return frozenset(found)


@final
class TapeAtLengths(NamedTuple):
    """A followed tape with lengths put in."""

    tape: Tape
    lengths: Lengths


@final
class DynamicTape:
    """A tape whose arguments follow lengths (`followed`), with the shapes of its values."""

    def __init__(
        self, followed: Tape, inputs: InputSymbols, shapes: SymbolicShapes, opaque: OpaqueCalls
    ) -> None:
        self.followed, self._opaque = followed, opaque
        self._inputs, self._shapes = inputs, shapes
        self._form = LengthTape(followed, shapes.places)

    @classmethod
    def of(
        cls, followed: SizedTape, known: Sequence[SizedTape], model: nn.Module, home: torch.device | None
    ) -> DynamicTape | None:
        """Returns the tape that was `followed` with its shapes, where all of them can be followed.

        `known` are recordings at other lengths.
        """
        inputs = InputSymbols.of([*(one.sizes for one in known), followed.sizes])
        tape, others = followed.tape, [one.tape for one in known]
        shapes = symbolic_shapes(tape, others, model, inputs, home)
        if shapes is None:
            return None
        return cls(tape, inputs, shapes, OpaqueCalls(tape, model, shapes.opaque))

    def of_inputs(self, tensors: Sequence[Tensor], given: tuple[int, ...]) -> TapeAtLengths | None:
        """Returns the tape for these inputs and whole numbers; None where it is not for them."""
        found = self.at([*(tuple(tensor.shape) for tensor in tensors), given])
        if found is None:
            return None
        pairs = zip(found.tape.inputs, tensors, strict=True)
        strides = all(found.tape.metas[slot].stride == tensor.stride() for slot, tensor in pairs)
        return found if strides else None

    def at(self, sizes: Sizes) -> TapeAtLengths | None:
        """Returns the tape at these shapes of its inputs; None where Python or torch would decide
        otherwise.
        """
        symbols = self._inputs.numbers(sizes)
        numbers = None if symbols is None else self._shapes.at(symbols)
        if numbers is None:
            return None
        lengths = Lengths(self._shapes.places, numbers)
        if not all(decision.holds(lengths) for decision in self.followed.decisions):  # pyright: ignore[reportArgumentType]
            return None
        tape = self._form.at(lengths)
        if not all(_falls_alike(guard, tape, lengths) for guard in self.followed.of_lengths):
            return None
        return TapeAtLengths(tape, lengths) if self._opaque.hold(tape) else None


def _falls_alike(guard: Guard, tape: Tape, lengths: Lengths) -> bool:
    """Returns whether a decision on values that follow from lengths alone falls with these as it did."""
    args, kwargs = put_in((guard.args, guard.kwargs), lengths)
    reads = [leaf.slot for leaf in leaves((args, kwargs)) if isinstance(leaf, Ref)]
    needs, values = backward_slice(tape.instructions, tape.metas, reads), dict[int, Any]()
    try:
        with limited(), torch.no_grad():
            evaluate([tape.instructions[i] for i in needs], values, {})
            out = guard.target(*resolve(args, values, {}), **resolve(kwargs, values, {}))
    except TooLarge:
        return False
    return bool(signature_of(out) == guard.value)
