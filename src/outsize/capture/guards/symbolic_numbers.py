"""Problem: find out how a program depends on a Python number, so that the number can be an input of it.

    self.alpha = 0.3                  a SymbolicFloat is put there while the forward is recorded
    1 - self.alpha                    another SymbolicFloat: 0.7, with the expression that gave it
    h * (1 - self.alpha)              torch gets 0.7; on the tape there is the expression (NumberInput)
    if self.alpha > 0.5:              Python gets False; the decision is noted, and compared before each step
    float(self.alpha), range(self.n)  cannot be followed: Unfollowed ends the recording

Source: the tracing numbers of torch.fx.experimental.sym_node, which cannot be used as they are: they take
part in shapes, and `isinstance(x, float)` is False for them. Torch accepts objects of torch.SymFloat and
torch.SymInt wherever it accepts numbers, and hands them to the recorder before it looks into them.
Deviations: `__class__` is that of the number, so that `isinstance` answers as for the number. `type(x)` does
not; the trace of Python reads notices that it is called (`refuse_all`). C code that would read the number
(`float`, functions of `math` that were imported by name) asks for `__float__` or `__index__`, which are
refused.
What is accepted is compared with plain recordings of two different numbers (train/variants/number_inputs.py).
Oracle: tests/parity/test_number_inputs.py.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import BuiltinFunctionType
from typing import Any, Final, NamedTuple, NoReturn, final

import numpy as np
import torch

from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import NumberDecision, NumberInput, Place, SizeOf, ValuePlace
from outsize.program.tree import leaves, map_leaves, map_parts

_OPERANDS: Final = (bool, int, float, np.number)


@final
class Unfollowed(BaseException):
    """Says that a use of a symbolic number cannot be followed. User code does not catch it by `Exception`."""


@final
class _Symbol(NamedTuple):
    """Holds the expression that a symbolic number stands for, and its present value."""

    numbers: PlantedNumbers
    input: NumberInput
    number: Any


def is_number(value: Any) -> bool:
    """Returns whether a value can be an input of a program: a float or an int, of Python or of NumPy."""
    return type(value) in (float, int) or isinstance(value, np.floating | np.integer)


def is_symbolic(value: Any) -> bool:
    """Returns whether a value is a symbolic number, which pretends to be a number."""
    return type(value) in (SymbolicFloat, SymbolicInt)


def has_symbolic(tree: Any) -> bool:
    """Returns whether there is a symbolic number in the tree."""
    return any(is_symbolic(leaf) for leaf in leaves(tree))


def number_of(value: Any) -> Any:
    """Returns the number for which a value stands, where it is symbolic."""
    return _symbol(value).number if is_symbolic(value) else value


def input_of(value: Any) -> NumberInput:
    """Returns the expression of a symbolic number."""
    return _symbol(value).input


def with_numbers(tree: Any) -> Any:
    """Returns the tree with the numbers in place of symbolic ones."""
    return map_leaves(number_of, tree)


@final
class PlantedNumbers:
    """Numbers that are put into their places while a forward is recorded: as they are, or to be followed."""

    def __init__(
        self,
        numbers: Mapping[ValuePlace, Any],
        *,
        follows: bool,
        sizes: Collection[SizeOf] = (),
    ) -> None:
        """`sizes` are lengths that are followed as well: of tensors, where the forward asks for them, and
        whole numbers among its arguments.
        """
        self.numbers, self.follows = numbers, follows
        self.sizes = frozenset(sizes)
        self._varying: dict[int, list[tuple[str, int]]] = {}
        for size in sizes:
            self._varying.setdefault(size.slot, []).append((size.kind, size.dim))
        # While a leaf or a torch function runs: the instruction runs the same code at each replay.
        self.is_live = False
        self._decisions: list[NumberDecision] = []
        self.unfollowed: set[Place] = set()
        self._planted = {
            place: _symbolic(_Symbol(self, NumberInput(None, (place,)), number)) if follows else number
            for place, number in numbers.items()
        }

    def varying_dims(self, slot: int) -> tuple[tuple[str, int], ...]:
        """Returns the kinds and dims of the lengths of a slot that are followed."""
        return tuple(sorted(self._varying.get(slot, ())))

    def with_given(self, batch: Any) -> Any:
        """Returns the batch with symbolic numbers for the whole numbers in it that are followed."""
        counter = itertools.count()

        def number(_: Any, part: Any) -> Any:
            return self.symbolic_size(SizeOf(-1, next(counter), "given", part)) if type(part) is int else part

        return map_parts(number, batch)

    def symbolic_size(self, size: SizeOf) -> Any:
        """Returns what stands for a length; the number itself where it is not followed."""
        if size not in self.sizes:
            return size.recorded
        return _symbolic(_Symbol(self, NumberInput(None, (size,)), size.recorded))

    def set_live(self, is_live: bool) -> None:
        """Says whether a leaf or a torch function runs, whose reads are repeated at each replay."""
        self.is_live = is_live

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Has the numbers in their places within the context. Raises Unfollowed where one cannot be put."""
        self._decisions.clear()
        before: list[tuple[ValuePlace, Any]] = []
        try:
            for place, number in self._planted.items():
                # The forward may put another container into the place's parent.
                fixed = replace(place, holder=place.holder_now(), parent=None)
                before.append((fixed, fixed.value()))
                self._put(place, number)
            with _followed_math() if self.follows else nullcontext():
                yield
        finally:
            for fixed, value in before:
                if fixed.value() is not value:
                    fixed.put(value)

    def _put(self, place: ValuePlace, number: Any) -> None:
        if isinstance(place.holder_now(), threading.local):  # A stage may run in another thread.
            self.refuse([place])
        try:
            place.put(number)
        except Exception as error:
            raise_interruption(error)
            self.refuse([place])
        if place.value() is not number:
            self.refuse([place])

    @property
    def decisions(self) -> tuple[NumberDecision, ...]:
        """Returns what Python has decided on the numbers."""
        # By their text as well: 1 and 1.0 are equal.
        return tuple({(decision, repr(decision)): decision for decision in self._decisions}.values())

    @property
    def decided(self) -> Sequence[NumberDecision]:
        """Returns all decisions in their order, also those that were made several times."""
        return self._decisions

    def decide(self, decision: NumberDecision) -> None:
        """Notes that Python decides on a number."""
        self._decisions.append(decision)

    def refuse(self, places: Any) -> NoReturn:
        """Says that a use of these numbers cannot be followed. Raises Unfollowed."""
        self.unfollowed |= set(places)
        raise Unfollowed

    def refuse_in(self, tree: Any) -> None:
        """Says so of the symbolic numbers in a tree, if there are any. Raises Unfollowed."""
        symbolic = [leaf for leaf in leaves(tree) if is_symbolic(leaf)]
        if symbolic:
            self.refuse(place for leaf in symbolic for place in input_of(leaf).places())

    def refuse_all(self) -> NoReturn:
        """Says so of all numbers. Raises Unfollowed."""
        self.refuse([*self.numbers, *self.sizes])


@contextmanager
def _followed_math() -> Iterator[None]:
    """Makes the functions of the module `math` follow symbolic numbers within the context."""
    functions = {k: f for k, f in vars(math).items() if isinstance(f, BuiltinFunctionType)}
    math.__dict__.update({name: _following(function) for name, function in functions.items()})
    try:
        yield
    finally:
        math.__dict__.update(functions)


def _following(function: Callable[..., Any]) -> Callable[..., Any]:
    def follow(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not any(is_symbolic(arg) for arg in args):
            return function(*args, **kwargs)
        return _computed(function, *args)

    return follow


# -- what symbolic numbers do -------------------------------------------------------------------------


def _symbol(value: Any) -> _Symbol:
    return object.__getattribute__(value, "_symbol")


def _symbolic(symbol: _Symbol) -> Any:
    kind = SymbolicInt if isinstance(symbol.number, int | np.integer) else SymbolicFloat
    value = kind.__new__(kind)
    object.__setattr__(value, "_symbol", symbol)
    return value


def _computed(operation: Callable[..., Any], *operands: Any) -> Any:
    """Returns the result of an operation on numbers, some of them symbolic; it is symbolic as well, unless it
    is a decision.
    """
    numbers = next(_symbol(operand).numbers for operand in operands if is_symbolic(operand))
    plain = [number_of(operand) for operand in operands]
    if numbers.is_live:
        return operation(*plain)
    if not all(isinstance(operand, _OPERANDS) for operand in plain):
        numbers.refuse_in(operands)
    expression = NumberInput(operation, tuple(input_of(o) if is_symbolic(o) else o for o in operands))
    try:
        value = operation(*plain)
    except Exception as error:
        raise_interruption(error)
        numbers.refuse_in(operands)
        raise
    if isinstance(value, bool | np.bool_):
        numbers.decide(NumberDecision(expression, value))
        return value
    # The power of two whole numbers may be a fraction.
    if not is_number(value) or (operation is operator.pow and not isinstance(value, float)):
        numbers.refuse_in(operands)
    return _symbolic(_Symbol(numbers, expression, value))


def _decided(operation: Callable[..., Any], value: Any) -> Any:
    """Returns the result of an operation, which the program depends on from then on."""
    symbol = _symbol(value)
    result = operation(symbol.number)
    if not symbol.numbers.is_live:
        symbol.numbers.decide(NumberDecision(NumberInput(operation, (symbol.input,)), result))
    return result


def _binary(operation: Callable[[Any, Any], Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not is_symbolic(other) and not isinstance(other, _OPERANDS):
            return NotImplemented
        return _computed(operation, other, self) if reflected else _computed(operation, self, other)

    return method


def _unary(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        return _computed(operation, self, *others)

    return method


def _deciding(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any) -> Any:
        return _decided(operation, self)

    return method


def _refusing(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        numbers = _symbol(self).numbers
        if not numbers.is_live:
            numbers.refuse_in(self)
        return operation(_symbol(self).number, *others)

    return method


_ARITHMETIC: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_BITS: Final = ("and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")
_METHODS: Final[dict[str, Any]] = {
    **{f"__{name}__": _binary(getattr(operator, name)) for name in (*_ARITHMETIC, *_COMPARISONS)},
    **{f"__{n.strip('_')}__": _binary(getattr(operator, n)) for n in _OF_BITS},
    **{
        f"__r{n.strip('_')}__": _binary(getattr(operator, n), reflected=True)
        for n in (*_ARITHMETIC, *_OF_BITS)
    },
    **{f"__{name}__": _unary(getattr(operator, name)) for name in ("neg", "pos", "abs", "invert")},
    **{f"__{name}__": _unary(getattr(math, name)) for name in ("floor", "ceil", "trunc")},
    "__round__": _unary(round),
    "__divmod__": _unary(divmod),
    **{f"__{kind.__name__}__": _deciding(kind) for kind in (bool, int)},
    **{f"__{kind.__name__}__": _refusing(kind) for kind in (float, complex, hash, repr, str, format)},
    "__index__": _refusing(operator.index),
    "__reduce_ex__": _refusing(object.__reduce_ex__),
    "__copy__": lambda self: self,
    "__deepcopy__": lambda self, _memo: self,
    # NumPy's scalars leave operations to this class.
    "__array_ufunc__": None,
}


def _attribute(self: Any, name: str) -> Any:
    """Returns special methods alone: other attributes would be another use of the number."""
    if name.startswith("__") and name.endswith("__"):
        return object.__getattribute__(self, name)
    symbol = _symbol(self)
    if name == "node" or (hasattr(symbol.number, name) and not symbol.numbers.is_live):
        symbol.numbers.refuse_in(self)
    return getattr(symbol.number, name)


_METHODS["__getattribute__"] = _attribute
_CLASS: Final[Any] = property(lambda self: type(_symbol(self).number))


@final
class SymbolicFloat(torch.SymFloat):
    """Stands for a float."""

    __class__ = _CLASS  # pyright: ignore[reportIncompatibleMethodOverride]


@final
class SymbolicInt(torch.SymInt):
    """Stands for an int."""

    __class__ = _CLASS  # pyright: ignore[reportIncompatibleMethodOverride]


for _kind in (SymbolicFloat, SymbolicInt):
    for _name, _method in _METHODS.items():
        setattr(_kind, _name, _method)
