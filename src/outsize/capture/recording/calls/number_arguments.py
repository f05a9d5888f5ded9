"""Problem: a torch function gets a number that is another one at the next step. Is its result of one kind?

    x * 0.3                          one shape, dtype and memory whatever the number
    F.dropout(x, 0.3)                the same, except at 0.0, where the result is x itself: the program is not
                                     for that number
    F.interpolate(x, scale_factor=2.0), x[:3], torch.arange(0.3)      the number gives a shape: Unfollowed

The function is called again on the fakes, with other numbers in place of each symbolic one. A whole number is
replaced by fractions: where they are accepted it is a factor, and no size, dimension or index.
Complexity: seven calls on fakes for each symbolic argument, once for each program.
Oracle: tests/parity/test_number_inputs.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor

from outsize.capture.costs.meter import CostMeter
from outsize.capture.guards.symbolic_numbers import (
    PlantedNumbers,
    has_symbolic,
    input_of,
    is_symbolic,
    number_of,
    with_numbers,
)
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import NumberDecision, NumberInput, SizeOf
from outsize.program.tree import leaves, map_leaves

_SPECIAL: Final = (0.0, 1.0)
_OTHERS: Final = (0.37, 2.6)
_NEAR: Final = 0.25


@final
@dataclass(frozen=True, slots=True)
class _ResultKind:
    """Describes a result: shapes and strides, whose memory each tensor shares, and whether it draws."""

    shapes: tuple[Any, ...]
    shared: tuple[int, ...]
    draws: bool


def without_symbolic(
    numbers: PlantedNumbers, meter: CostMeter, function: Callable[..., Any] | None, given: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Returns arguments with numbers for symbolic ones. Raises Unfollowed where the instruction could not
    take others: `function` is None where it runs code that nobody has looked into.
    """
    if not has_symbolic(given):
        return given
    if function is None:
        numbers.refuse_in(given)
    else:
        insist_on_one_kind(numbers, meter, function, *given)
    return with_numbers(given)


def insist_on_one_kind(
    numbers: PlantedNumbers, meter: CostMeter, function: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """Notes at which numbers the result is of another kind. Raises Unfollowed where that is so in general."""
    symbolic = {id(leaf): leaf for leaf in leaves((args, kwargs)) if is_symbolic(leaf)}
    for one in symbolic.values():
        if isinstance(number_of(one), int) and all(isinstance(p, SizeOf) for p in input_of(one).places()):
            continue  # A whole number that follows from lengths may give one: capture/shapes proves it.
        _insist_on_number(numbers, one, partial(_kind_with, meter, (function, args, kwargs), one))


def _kind_with(meter: CostMeter, call: Any, one: Any, other: Any) -> _ResultKind | None:
    """Returns the kind of the result with `other` in place of `one`; None where the function refuses it."""
    function, args, kwargs = call

    def swap(leaf: Any) -> Any:
        return other if leaf is one else number_of(leaf)

    meter.start()
    try:
        return _kind_of(function, map_leaves(swap, args), map_leaves(swap, kwargs), meter)
    except Exception as error:
        raise_interruption(error)
        return None


def _insist_on_number(
    numbers: PlantedNumbers, one: Any, kind_at: Callable[[Any], _ResultKind | None]
) -> None:
    number = number_of(one)
    special = [type(number)(other) for other in _SPECIAL]
    others = [*_OTHERS, float(number) + _NEAR, float(number) - _NEAR]
    kinds = {kind_at(other) for other in others if other not in special} - {None}
    if len(kinds) != 1:
        numbers.refuse_in(one)
    (usual,) = kinds
    if number not in special and kind_at(number) != usual:
        numbers.refuse_in(one)
    for other in special:
        kind = kind_at(other)
        if kind is not None and kind != usual:
            is_other = NumberInput(operator.ne, (input_of(one), other))
            numbers.decide(NumberDecision(is_other, bool(number != other)))


@torch.no_grad()
def _kind_of(function: Callable[..., Any], args: Any, kwargs: Any, meter: CostMeter) -> _ResultKind:
    # It may write into its arguments.
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    copies = {id(tensor): tensor.detach().clone() for tensor in tensors}

    def copied(leaf: Any) -> Any:
        return copies.get(id(leaf), leaf)

    args, kwargs = map_leaves(copied, args), map_leaves(copied, kwargs)
    memory = [tensor.untyped_storage()._cdata for tensor in copies.values()]
    results = [leaf for leaf in leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
    places = (tensor.untyped_storage()._cdata for tensor in results)
    return _ResultKind(
        tuple((tensor.shape, tensor.stride()) for tensor in results),
        tuple(memory.index(place) if place in memory else -1 for place in places),
        meter.random,
    )
