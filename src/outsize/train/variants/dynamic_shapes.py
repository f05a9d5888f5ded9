"""Problem: a batch has lengths that none had before. Which program runs it, without another recording?

    length 64, 80      recorded
    length 72          recorded while its lengths are followed: with 64 and with 80 put in, it has to be the
                       program that was recorded there
    length 93          the followed program with 93 put in, where Python and torch decide as before

Batches of one kind (dtypes, numbers of dims, Python values) are a family. A followed program is tried where
everything that it read in Python is unchanged and its decisions on values of the batch fall as they did.
Complexity: one recording and one replay on fakes more for a family, a few milliseconds for each new length.
Oracle: tests/parity/test_dynamic_shapes.py, against recordings and the plain loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.capture.guards.check import ReadGuards
from outsize.capture.guards.symbolic_numbers import PlantedNumbers, Unfollowed
from outsize.capture.shapes.dynamic_tape import DynamicTape, SizedTape, varying_sizes
from outsize.capture.shapes.symbolic_shapes import Sizes
from outsize.errors.interruptions import raise_interruption
from outsize.program.lengths import Lengths
from outsize.program.python_reads import SizeOf
from outsize.program.tape import Tape
from outsize.program.tree import key_of, map_parts, parts
from outsize.train.batch.batch import Batch
from outsize.train.variants.input_guards import InputGuards
from outsize.train.variants.number_inputs import agree

Record = Callable[[PlantedNumbers | None], Tape]
# A family whose programs could not be followed so often is recorded at each length.
_MOST_FAILURES: Final = 3
_FAMILIES: Final = 16
_RECORDED: Final = 4


@final
@dataclass(slots=True)
class _Family:
    """The programs of batches of one kind: those that are followed, and the last that were recorded."""

    followed: list[tuple[DynamicTape, ReadGuards]] = field(default_factory=list)
    recorded: list[SizedTape] = field(default_factory=list)
    failures: int = 0


@final
class FoundTape(NamedTuple):
    """The tape of a microbatch with its guards; where it is a followed one, that and its lengths."""

    tape: Tape
    guards: InputGuards
    dynamic: DynamicTape | None = None
    lengths: Lengths | None = None


@final
class DynamicShapes:
    """Makes tapes of a model for batches of new lengths from those of others."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()

    def tape(self, part: Batch, kind: Hashable, home: torch.device | None, record: Record) -> FoundTape:
        """Returns the tape of a microbatch. `kind` says what else it depends on; `record` records it."""
        tensors = part.tensors()
        if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
            return self._as_recorded(record(None), home)
        given = tuple(value for _, value in parts(part.tree()) if type(value) is int)
        key = key_of(map_parts(_without_numbers, part.tree()), _kind_of), kind
        family = self._families.setdefault(key, _Family())
        self._families.move_to_end(key)
        if len(self._families) > _FAMILIES:
            self._families.popitem(last=False)
        for found in self._found_in(family, part, given, home):
            return found
        sizes = [*(tuple(tensor.shape) for tensor in tensors), given]
        pairs = _pairs(family.recorded, sizes) if family.failures < _MOST_FAILURES else iter(())
        for pair, varying in pairs:
            made = self._followed(pair, varying, home, lambda n: SizedTape(record(n), given))
            if made is not None:
                family.followed.append((made, ReadGuards(made.followed.reads, ())))
                for found in self._found_in(family, part, given, home):
                    return found
            family.failures += 1
            break
        tape = record(None)
        if tape.loss_detail is None and not tape.decisions:
            family.recorded = [SizedTape(tape, given), *family.recorded][:_RECORDED]
        return self._as_recorded(tape, home)

    def _as_recorded(self, tape: Tape, home: torch.device | None) -> FoundTape:
        return FoundTape(tape, InputGuards(tape, self._model, home))

    def _found_in(
        self, family: _Family, part: Batch, given: tuple[int, ...], home: torch.device | None
    ) -> Iterator[FoundTape]:
        """Yields the followed tapes that are for a microbatch, with its lengths."""
        for dynamic, reads in family.followed:
            found = dynamic.of_inputs(part.tensors(), given) if reads.hold() else None
            if found is None:
                continue
            guards = InputGuards(found.tape, self._model, home)
            if guards.hold(part):
                yield FoundTape(found.tape, guards, dynamic, found.lengths)

    def _followed(
        self,
        pair: tuple[SizedTape, SizedTape],
        varying: frozenset[SizeOf],
        home: torch.device | None,
        record: Callable[[PlantedNumbers], SizedTape],
    ) -> DynamicTape | None:
        """Returns the tape of this batch with lengths as inputs, if it is that of others at their lengths."""
        try:
            followed = record(PlantedNumbers({}, follows=True, sizes=varying))
        except Unfollowed:
            return None
        except Exception as error:  # What a symbolic number broke in the user's code.
            raise_interruption(error)
            return None
        made = DynamicTape.of(followed, pair, self._model, home)
        if made is None:
            return None
        for one in pair:
            again = made.at(one.sizes)
            if again is None or not agree(again.tape, one.tape, {}):
                return None
        return made


def _pairs(
    recorded: list[SizedTape], wanted: Sizes
) -> Iterator[tuple[tuple[SizedTape, SizedTape], frozenset[SizeOf]]]:
    """Yields two tapes of other lengths that may be one program, with the lengths that vary: at least those
    in which what is wanted differs from either.
    """
    for place, first in enumerate(recorded):
        for second in recorded[place + 1 :]:
            sizes = zip(chain(*wanted), chain(*first.sizes), chain(*second.sizes), strict=True)
            varying = varying_sizes(first, second)
            is_one = len(first.tape.instructions) == len(second.tape.instructions)
            if varying and is_one and all(a != b or n == a for n, a, b in sizes):
                yield (first, second), varying


def _without_numbers(_: Any, part: Any) -> Any:
    return int if type(part) is int else part


def _kind_of(tensor: Tensor) -> Hashable:
    """Returns what the batches of a family have in common of a tensor."""
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.ndim
