"""A tape whose lengths are inputs of it, and the same tape with lengths put in.

    followed         view(2, size of v3 along 1, 8, 32)       v7 [2, 72, 256]
    lengths at 96    view(2, 96, 8, 32)                       v7 [2, 96, 256]

What a stage runs of it is one function for all lengths: its numbers are an argument of it (generate.py).
Complexity: O(values whose shapes vary) for each set of lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, final

from outsize.program.python_reads import NumberInput, SizeOf
from outsize.program.tape import Instruction, Meta, Tape
from outsize.program.tree import leaves, map_leaves


def length_inputs(instructions: Iterable[Instruction]) -> tuple[NumberInput, ...]:
    """Returns the distinct numbers among the arguments that follow from lengths alone, in order."""
    found = (leaf for i in instructions for leaf in leaves((i.args, i.kwargs)) if is_length(leaf))
    return tuple(dict.fromkeys(found))


def is_length(leaf: Any) -> bool:
    """Returns whether an argument is a number that follows from lengths alone."""
    return isinstance(leaf, NumberInput) and all(isinstance(place, SizeOf) for place in leaf.places())


@final
class Lengths(NamedTuple):
    """The lengths of one batch: `numbers[places[size]]` is that of a size; one without a place is fixed."""

    places: Mapping[SizeOf, int]
    numbers: Sequence[int]

    def __getitem__(self, size: Any) -> Any:
        """Returns a length."""
        return self.numbers[self.places[size]] if size in self.places else size.recorded

    def of(self, inputs: Iterable[NumberInput]) -> tuple[Any, ...]:
        """Returns the values of numbers that follow from lengths."""
        return tuple(number.value(self) for number in inputs)  # pyright: ignore[reportArgumentType]


@final
class _Layout(NamedTuple):
    """The shape and stride of a slot: for each dim the place of its length, or None, and what it was."""

    shape: tuple[tuple[int | None, int], ...]
    stride: tuple[tuple[int | None, int], ...]


@final
class LengthTape:
    """A tape with lengths as inputs; `places` are those of the lengths that vary among the numbers of
    `Lengths`.
    """

    def __init__(self, tape: Tape, places: Mapping[SizeOf, int]) -> None:
        self._tape, self._places = tape, places

    @cached_property
    def _changing(self) -> list[int]:
        """The instructions that have lengths among their arguments."""
        return [i.index for i in self._tape.instructions if length_inputs([i])]

    @cached_property
    def _layouts(self) -> dict[int, _Layout]:
        """The layouts of the slots that vary."""
        found: dict[int, _Layout] = {}
        for slot, meta in enumerate(self._tape.metas):
            layout = _Layout(self._dims(slot, "size", meta.shape), self._dims(slot, "stride", meta.stride))
            if any(place is not None for place, _ in (*layout.shape, *layout.stride)):
                found[slot] = layout
        return found

    def _dims(self, slot: int, kind: Any, recorded: Sequence[int]) -> tuple[tuple[int | None, int], ...]:
        return tuple((self._places.get(SizeOf(slot, d, kind, n)), n) for d, n in enumerate(recorded))

    def at(self, lengths: Lengths) -> Tape:
        """Returns the tape with these lengths put in."""
        instructions = list(self._tape.instructions)
        for index in self._changing:
            instructions[index] = with_lengths(instructions[index], lengths)
        metas = self._metas(lengths)
        return replace(self._tape, instructions=tuple(instructions), metas=metas, decisions=(), of_lengths=())

    def _metas(self, lengths: Lengths) -> tuple[Meta, ...]:
        metas, known = list(self._tape.metas), dict[_Layout, tuple[Any, Any]]()
        for slot, layout in self._layouts.items():
            if layout not in known:
                shape, stride = (
                    tuple(n if place is None else lengths.numbers[place] for place, n in dims)
                    for dims in layout
                )
                known[layout] = shape, stride
            old = metas[slot]
            metas[slot] = Meta(*known[layout], old.dtype, old.device, old.requires_grad, old.storage)
        return tuple(metas)


@final
class FormAtLengths:
    """A form of a followed tape: with calls and slots more (aliases, ratios), and other targets."""

    def __init__(self, form: Tape, followed: Tape) -> None:
        """The slots of `followed` come first; a slot that is more has the very meta of one, or no lengths."""
        self._form, self._calls, self._slots = form, followed.instructions, len(followed.metas)
        first = {id(meta): slot for slot, meta in enumerate(followed.metas)}
        self._more = [(first.get(id(meta)), meta) for meta in form.metas[self._slots :]]
        self._is_followed = form.instructions is followed.instructions
        self._changing = [i.index for i in form.instructions if length_inputs([i])]

    def at(self, tape: Tape, lengths: Lengths) -> Tape:
        """Returns the form with lengths put in; `tape` is the followed one with them."""
        metas = (*tape.metas, *(meta if slot is None else tape.metas[slot] for slot, meta in self._more))
        if self._is_followed:
            return replace(self._form, instructions=tape.instructions, metas=metas, decisions=())
        instructions = list(self._form.instructions)
        for index in self._changing:
            own = instructions[index]
            is_same = own is self._calls[own.origin]
            instructions[index] = tape.instructions[own.origin] if is_same else with_lengths(own, lengths)
        return replace(self._form, instructions=tuple(instructions), metas=metas, decisions=())


def with_lengths(instruction: Instruction, lengths: Lengths) -> Instruction:
    """Returns an instruction with lengths put in."""

    args, kwargs = put_in((instruction.args, instruction.kwargs), lengths)
    return replace(instruction, args=args, kwargs=kwargs)


def put_in(arguments: Any, lengths: Lengths) -> Any:
    """Returns arguments with lengths put in."""
    return map_leaves(lambda leaf: leaf.value(lengths) if is_length(leaf) else leaf, arguments)
