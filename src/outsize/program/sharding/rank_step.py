"""Defines the interface of propagate.py's rules: an instruction with shares of its operands, and a Step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar, final

from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Meta, Ref, Weight
from outsize.program.tree import leaves

T = TypeVar("T")
Operand = Ref | Weight
Shape = tuple[int, ...]
Rewrite = Callable[[RankPosition], tuple[tuple[Any, ...], dict[str, Any]]]


@final
class NotPropagated(Exception):
    """Says that the sharded dim cannot be followed through this instruction, so the value must be
    gathered.
    """


@final
class NeedsParts(Exception):
    """Says that the origins have to be sharded in parts, split at these points of the dim."""

    def __init__(self, share: Share, points: Sequence[Fraction]) -> None:
        super().__init__(f"parts at {points}")
        self.share, self.points = share, points


@final
@dataclass(frozen=True)
class Step:
    """Holds the result of a rule; `out` has a Share for each slot that the instruction defines, in their
    order.
    """

    out: tuple[Share | None, ...]
    cut: Mapping[Operand, Share] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    dropout: Share | None = None  # The dropout mask is drawn for the whole value.


@final
@dataclass(frozen=True)
class RuleInput:
    """Describes an instruction with what is known of its operands."""

    instruction: Instruction
    metas: Sequence[Meta]
    shares: Mapping[int, Share]
    weights: Mapping[str, Shape]

    @property
    def args(self) -> tuple[Any, ...]:
        """Returns the positional arguments."""
        return self.instruction.args

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument by position or name."""
        args = self.instruction.args
        return args[place] if len(args) > place else self.instruction.kwargs.get(name, default)

    def operands(self) -> Iterator[Operand]:
        """Yields the tensors among the arguments."""
        everything = leaves((self.instruction.args, self.instruction.kwargs))
        return (leaf for leaf in everything if isinstance(leaf, Ref | Weight))

    def share(self, operand: Any) -> Share | None:
        """Returns how an operand is sharded."""
        return self.shares.get(operand.slot) if isinstance(operand, Ref) else None

    def shape(self, operand: Operand) -> Shape:
        """Returns the shape of an operand on one device. Raises NotPropagated where it is not known."""
        if isinstance(operand, Ref):
            return self.metas[operand.slot].shape
        if not isinstance(operand, Weight) or operand.name not in self.weights:
            raise NotPropagated(f"{operand!r} is no tensor whose shape is known")
        return self.weights[operand.name]

    def results(self) -> list[Shape]:
        """Returns the shapes of the slots that the instruction defines."""
        return [self.metas[slot].shape for slot in self.instruction.defines()]

    def divided(self) -> dict[Operand, Share]:
        """Returns the operands that are sharded."""
        shares = ((operand, self.share(operand)) for operand in self.operands())
        return {operand: share for operand, share in shares if share is not None}

    def alone(self) -> Share:
        """Returns the share of the first argument, when no other one is sharded. Raises NotPropagated."""
        divided = self.divided()
        if len(divided) != 1 or not self.args or self.share(self.args[0]) is None:
            raise NotPropagated("more than its first argument is divided")
        return next(iter(divided.values()))

    def same(self, share: Share | None, **more: Any) -> Step:
        """Returns a step in which every result has this share."""
        return Step(tuple(share for _ in self.instruction.defines()), **more)


class WrappedCall(ABC):
    """Defines a target that runs a function on the part of its arguments that other ranks leave to this one,
    such as its rows of a sequence (context_parallel/row_tape.py).

    Tensor parallelism divides what is left, and asks here how.
    """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the call."""

    @abstractmethod
    def inner(self, instruction: Instruction) -> Instruction | None:
        """Returns the call of the function alone; None where the target runs no function of the model."""

    @abstractmethod
    def around(self, function: Callable[..., Any]) -> WrappedCall:
        """Returns the target with another function within."""

    @abstractmethod
    def follow(self, call: RuleInput) -> Step:
        """Returns the step of the call with some sharded operands. Raises NotPropagated."""


def ruled(rule: Callable[[RuleInput], T], call: RuleInput) -> T:
    """Returns what a rule says of a call. Raises NotPropagated, also for a form of the call that it does not
    know.
    """
    try:
        return rule(call)
    except (IndexError, TypeError, ValueError) as error:
        # Functions are called in many forms: an argument by its name is not at its place, None is no dim, and
        # fewer are unpacked than there are. What else a rule raises is a bug in it, which must be seen.
        raise NotPropagated(f"there is no rule for such a {op_name(call.instruction)}") from error


def inner_call(instruction: Instruction) -> Instruction:
    """Returns the call of the function that a wrapped call runs; any other instruction as it is."""
    target = instruction.target
    return (target.inner(instruction) if isinstance(target, WrappedCall) else None) or instruction


def op_name(instruction: Instruction) -> str:
    """Returns `add` for torch.add, Tensor.add_, Tensor.__add__ and aten.add.Tensor."""
    name = getattr(instruction.target, "__name__", type(instruction.target).__name__)
    return name.split(".")[0].strip("_")
