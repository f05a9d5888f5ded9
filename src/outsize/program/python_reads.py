"""A Python value that code read while it was recorded, and where that value can be read again.

    self.temperature     item       the instance's dict, "temperature"      1.0
    self.rates[2]        item       the instance's dict, "rates"            the whole list, by content
    SCALE                item       the globals of a file, "SCALE"          0.5
    self.slope           class      the class that has it, "slope"          0.1
    beta in a closure    cell       the cell                                4.0
    self.width (slots)   attribute  the object, "width"                     8
    MODE.get()           context    the ContextVar                          "eval"
    self.owner()         referent   the weak reference                      whether its object lives

A tape is valid only while all of them are unchanged (capture/guards/check.py). A number that changes at each
step can be an input of the program instead: an annealed factor, a rate.

    self.alpha          NumberInput(None, (place,))
    1 - self.alpha      NumberInput(operator.sub, (1, NumberInput(None, (place,))))

A NumberInput stands among the arguments of an instruction, where a recording would have frozen a number. It
is evaluated by Python itself, from the user's own values, in the process that runs the instruction. A
NumberDecision is what Python decided on such a number (`if self.alpha > 0.5`): the program is valid only
while it falls the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, final

from outsize.program.objects import ABSENT

ReadKind = Literal["item", "element", "class", "cell", "attribute", "context", "referent"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class PythonRead:
    """Describes one read: `holder` is where `key` was looked up, by the way that `kind` says.

    `value` is what was there, or ABSENT. `parent` is the number of the read whose value is the holder, a
    container: where another container takes its place, the key is looked up there. `content`: code looked
    into the value, a container, so that what is in it counts as well. `is_live`: it is a tensor that the
    program itself reads again at each call. `frames` are the modules whose code read it: FQNs, or LOSS.
    `is_input`: it is a number that the program reads again at each call, so that only its type counts.
    `instead` is what the look-up went on to find where there was nothing: the value of a class attribute.
    """

    kind: ReadKind
    holder: Any
    key: Any
    value: Any
    parent: int | None
    content: bool
    is_live: bool
    label: str  # The expression, as the user wrote it.
    where: str  # file:line
    frames: frozenset[str]
    is_input: bool = False
    instead: Any = ABSENT


LOSS: Final = "loss_fn"  # The frame of a read by the loss function.


def _item(holder: Any, key: Any) -> Any:
    return dict.get(holder, key, ABSENT)


def _element(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except IndexError:
        return ABSENT


def _class(holder: Any, key: Any) -> Any:
    return holder.__dict__.get(key, ABSENT)


def _cell(holder: Any, _key: Any) -> Any:
    try:
        return holder.cell_contents
    except ValueError:
        return ABSENT


def _attribute(holder: Any, key: Any) -> Any:
    return getattr(holder, key, ABSENT)


def _context(holder: Any, _key: Any) -> Any:
    return holder.get(ABSENT)


def _referent(holder: Any, _key: Any) -> bool:
    # The object itself would live on in a guard.
    return holder() is not None


LOOK_UP: Final[Mapping[ReadKind, Callable[[Any, Any], Any]]] = {
    "item": _item,
    "element": _element,
    "class": _class,
    "cell": _cell,
    "attribute": _attribute,
    "context": _context,
    "referent": _referent,
}


# -- numbers that are inputs ---------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ValuePlace:
    """Says where a Python value is: `holder` and `key` as in PythonRead; one place is equal to itself alone.

    With a `parent`, a place that has the container, the key is looked up in what is there now.
    """

    kind: ReadKind
    holder: Any
    key: Any
    parent: ValuePlace | None
    label: str

    def __repr__(self) -> str:
        """Returns the expression that the user wrote, and which place it is."""
        return f"{self.label}@{id(self):x}"

    def holder_now(self) -> Any:
        """Returns the object in which the key is looked up."""
        return self.holder if self.parent is None else self.parent.value()

    def route(self) -> tuple[Any, ...]:
        """Returns what is equal for all descriptions of the place, also where it is in another container by
        now.
        """
        start = id(self.holder) if self.parent is None else self.parent.route()
        return self.kind, start, self.key

    def identity(self) -> tuple[str, int, Any]:
        """Returns what is equal for all descriptions of the place that has the value now."""
        return self.kind, id(self.holder_now()), self.key

    def value(self) -> Any:
        """Returns what is there now, or ABSENT."""
        return LOOK_UP[self.kind](self.holder_now(), self.key)

    def put(self, value: Any) -> None:
        """Puts another value there. Raises whatever the holder raises where that cannot be done."""
        holder: Any = self.holder_now()
        if self.kind == "item":
            dict.__setitem__(holder, self.key, value)
        elif self.kind == "element":
            holder[self.key] = value
        elif self.kind == "cell":
            holder.cell_contents = value
        else:
            setattr(holder, self.key, value)


@final
@dataclass(frozen=True, slots=True)
class SizeOf:
    """Says where a length is: the size of a dim of a slot, or its stride there; or a whole number that is an
    argument of the model's (`given`), the `dim`-th in its batch, of no slot. `recorded` is what it was.
    """

    slot: int
    dim: int
    kind: Literal["size", "stride", "given"]
    recorded: int = field(compare=False)


Place = ValuePlace | SizeOf


@final
@dataclass(frozen=True, slots=True)
class NumberInput:
    """Holds an expression: `operation(*operands)`, or the value of the one place where there is no operation.

    Operands are numbers, other NumberInputs, places, and lengths of tensors.
    """

    __tape_leaf__: ClassVar[bool] = True
    operation: Callable[..., Any] | None
    operands: tuple[Any, ...]

    def value(self, values: Mapping[Any, Any] | None = None) -> Any:
        """Returns the number as Python computes it now, or with these `values` at its places."""
        operands = [_operand(operand, values) for operand in self.operands]
        return operands[0] if self.operation is None else self.operation(*operands)

    def places(self) -> Iterator[Place]:
        """Yields the places and lengths that the number depends on, possibly repeated."""
        for operand in self.operands:
            if isinstance(operand, ValuePlace | SizeOf):
                yield operand
            elif isinstance(operand, NumberInput):
                yield from operand.places()


def _operand(operand: Any, values: Mapping[Any, Any] | None) -> Any:
    if isinstance(operand, NumberInput):
        return operand.value(values)
    if isinstance(operand, ValuePlace):
        return operand.value() if values is None else values[operand]
    if isinstance(operand, SizeOf):
        return operand.recorded if values is None else values[operand]
    return operand


@final
@dataclass(frozen=True, slots=True)
class NumberDecision:
    """Holds what Python decided on a number when the program was recorded."""

    number: NumberInput
    outcome: Any

    def holds(self, values: Mapping[Any, Any] | None = None) -> bool:
        """Returns whether it falls the same way now, or with these `values`; not where it cannot be made."""
        try:
            value = self.number.value(values)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return False
        return type(value) is type(self.outcome) and bool(value == self.outcome)
