"""Problem: make numbers that keep changing inputs of a program, and be sure that it is the same program.

    plain      recorded with the number of now                     mul(h, 0.3)
    followed   recorded while the number is followed               mul(h, 1 - alpha)
    other      recorded with another number                        mul(h, 0.4)

The followed tape is accepted only where it is the plain one with the number of now put in, and the other one
with the other number put in: the same instructions with the same constants. The plain tape then takes its
arguments over. A use that cannot be followed ends the recording (capture/guards/symbolic_numbers.py).
Complexity: two recordings more, once for each program.
Oracle: tests/parity/test_number_inputs.py, against the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.capture.guards.symbolic_numbers import PlantedNumbers, Unfollowed
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import NumberInput, ValuePlace
from outsize.program.tape import Instruction, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves

_VALUES: Final = (Ref, Weight, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device)
Numbers = Mapping[ValuePlace, Any]
Record = Callable[[PlantedNumbers], Tape]


@final
@dataclass(frozen=True, slots=True)
class FollowedTape:
    """A tape, and the places whose numbers are inputs of it."""

    tape: Tape
    places: Collection[ValuePlace] = ()


def with_number_inputs(plain: Tape, now: Numbers, others: Numbers, record: Record) -> FollowedTape:
    """Returns the plain tape with the numbers of `now` as inputs, as far as they can be followed.

    `others` are numbers of the same types, with which the tape is recorded for comparison.
    """
    followed: Tape | None = None
    while now:
        planted = PlantedNumbers(now, follows=True)
        followed = _recorded(record, planted)
        if not planted.unfollowed:
            break
        followed, now = None, {p: n for p, n in now.items() if p not in planted.unfollowed}
    if followed is None or not agree(followed, plain, now):
        return FollowedTape(plain)
    if all(decision.holds({**now, **others}) for decision in followed.decisions):
        other = _recorded(record, PlantedNumbers({place: others[place] for place in now}, follows=False))
        if other is None or not agree(followed, other, others):
            return FollowedTape(plain)
    return FollowedTape(_merged(plain, followed, now), frozenset(now))


def another_number(number: Any, former: Any) -> Any:
    """Returns a number of the same type that is another one: the former one if it can be."""
    if type(former) is type(number) and former != number:
        return former
    return type(number)(number + 1 if isinstance(number, int) else 0.75 * number + 0.03125)


def _recorded(record: Record, planted: PlantedNumbers) -> Tape | None:
    try:
        return record(planted)
    except Unfollowed:
        return None
    except (
        Exception
    ) as error:  # What a symbolic number broke, or what the user's code says of another number.
        raise_interruption(error)
        return None


def _merged(plain: Tape, followed: Tape, places: Iterable[ValuePlace]) -> Tape:
    """Returns the plain tape with the arguments of the followed one."""
    identities = {place.identity() for place in places}
    pairs = zip(plain.instructions, followed.instructions, strict=True)
    detail = plain.loss_detail
    if detail is not None and followed.loss_detail is not None:
        detail = _merged(detail, followed.loss_detail, places)
    return replace(
        plain,
        instructions=tuple(replace(a, args=b.args, kwargs=b.kwargs) if _is_input(b) else a for a, b in pairs),
        reads=tuple(
            replace(read, is_input=True) if (read.kind, id(read.holder), read.key) in identities else read
            for read in plain.reads
        ),
        decisions=followed.decisions,
        loss_detail=detail,
    )


def _is_input(instruction: Instruction) -> bool:
    return any(isinstance(leaf, NumberInput) for leaf in leaves((instruction.args, instruction.kwargs)))


def agree(followed: Tape, plain: Tape, numbers: Numbers) -> bool:
    """Returns whether the plain tape is the followed one with these numbers put in."""
    if len(followed.instructions) != len(plain.instructions):
        return False
    pairs = zip(followed.instructions, plain.instructions, strict=True)
    if not all(_is_same_call(a, b, numbers) for a, b in pairs):
        return False
    details = followed.loss_detail, plain.loss_detail
    if (details[0] is None) != (details[1] is None):
        return False
    parts = [
        (
            tape.inputs,
            tape.metas,
            map_leaves(_without_objects, tape.output),
            tape.loss,
            tape.modes,
            tape.opaque,
            tape.live,
            tape.keepers,
        )
        for tape in (followed, plain)
    ]
    return (
        _is_same(parts[0], parts[1], numbers)
        and _is_same(followed.guards, plain.guards, numbers)
        and followed.constants.keys() == plain.constants.keys()
        and all(tensor is plain.constants[slot] for slot, tensor in followed.constants.items())
        and (details[0] is None or details[1] is None or agree(details[0], details[1], numbers))
    )


def _without_objects(leaf: Any) -> Any:
    """Returns the type of an object that a forward has made and returned: it is of that recording alone."""
    return leaf if isinstance(leaf, _VALUES) else type(leaf)


def _is_same_call(a: Instruction, b: Instruction, numbers: Numbers) -> bool:
    """Compares all but costs and lines: that of a loss of torch's own is where the step was called."""
    settings = [
        (i.index, i.target, i.out, i.frame, i.modes, i.random, i.weights, i.written_weights) for i in (a, b)
    ]
    return (
        _is_same(settings[0], settings[1], numbers)
        and (a.writes, a.serves, a.writes_twice) == (b.writes, b.serves, b.writes_twice)
        and _is_same((a.args, a.kwargs), (b.args, b.kwargs), numbers)
        and _shape(a.args) == _shape(b.args)
        and _shape(a.kwargs) == _shape(b.kwargs)
    )


def _is_same(first: Any, second: Any, numbers: Numbers) -> bool:
    one, two = list(leaves(first)), list(leaves(second))
    return len(one) == len(two) and all(_is_same_leaf(a, b, numbers) for a, b in zip(one, two, strict=True))


def _is_same_leaf(a: Any, b: Any, numbers: Numbers) -> bool:
    if isinstance(a, NumberInput):
        a = a.value(numbers)
    if a is b:
        return True
    if isinstance(a, Tensor) or type(a) is not type(b):
        return False
    # The text of a number tells -0.0 from 0.0, and equals that of another NaN.
    return repr(a) == repr(b) if isinstance(a, int | float | complex) else bool(a == b)


def _shape(tree: Any) -> Any:
    """Returns the containers of a tree, without its leaves."""
    if isinstance(tree, dict):
        return dict, tuple((key, _shape(value)) for key, value in tree.items())
    return (type(tree), tuple(map(_shape, tree))) if isinstance(tree, tuple | list) else None
