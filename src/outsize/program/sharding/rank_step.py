"""Defines what rules say of an instruction, whatever divides its operands: a RankStep.

    tensor parallelism     v18 = view(v17, 2, 9, 32, 64)    out: dim 3      rewrite: (2, 9, 16, 64)
                           v23 = o_proj(v22)                out: whole      call: ByRows
    context parallelism    v40 = sdpa(q, k, v)              out: dim 2      gather: k, v   call: OverRows
    expert parallelism     v9 = experts(x, index, weight)   out: whole      call: OfExperts

A rule is given the instruction with the shares of its operands. The tape of a rank is written from the steps
(rank_tape.py), and the planner counts by them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, TypeVar, final

from torch import nn

from outsize.program.sharding.axis_group import AxisGroup
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
class CallSite:
    """Says where a rank's call is written: the group of the axis, the module that the instruction calls if it
    calls one, and what its results are on one device.
    """

    group: AxisGroup
    module: nn.Module | None
    results: tuple[Meta, ...]


class RankCall(ABC):
    """Defines what a rank calls in place of an instruction's function, such as a product of some columns.

    `computes_part`: of whole operands, it computes a part of the result, and so a part of their gradients.
    `adds_up`: the result is the sum of what the ranks have, of which each may keep its part alone.
    `is_added`: the rank calls what one device does, and the sum comes after it. `splits_work`: the ranks
    share its work.
    """

    computes_part: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    is_added: ClassVar[bool] = False
    splits_work: ClassVar[bool] = False

    @abstractmethod
    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        """Returns the instruction as the rank runs it, with the operands of the whole tape."""


@final
@dataclass(frozen=True, slots=True)
class OwnPart:
    """Stands in rewritten arguments for this rank's part of a value that another argument is all of."""

    __tape_leaf__: ClassVar[bool] = True
    value: Ref


@final
@dataclass(frozen=True)
class RankStep:
    """Says what an axis makes of an instruction on each of its ranks.

    `out` has a Share for each slot that the instruction defines, in their order; None: all ranks have the
    whole. `cut`: whole operands of which a rank reads its part. `gather`: divided operands that it reads
    whole. `rewrite` returns the arguments with a rank's sizes. `dropout`: its mask is drawn for the whole
    value. `call`: what ranks compute together in its place. `scatter`: each rank keeps this part of the sum.
    """

    out: tuple[Share | None, ...]
    cut: Mapping[Operand, Share] = field(default_factory=dict)
    gather: Mapping[Operand, Share] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    dropout: Share | None = None
    call: RankCall | None = None
    scatter: Share | None = None

    @property
    def computes_part(self) -> bool:
        """Returns whether a rank computes a part of the result of whole operands, and so a part of their
        gradients.
        """
        if self.call is not None:
            return self.call.computes_part
        return any(share is not None for share in self.out)

    @property
    def splits_work(self) -> bool:
        """Returns whether the ranks share the work of the instruction."""
        return self.computes_part or (self.call is not None and self.call.splits_work)


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

    def same(self, share: Share | None, **more: Any) -> RankStep:
        """Returns a step in which every result has this share."""
        return RankStep(tuple(share for _ in self.instruction.defines()), **more)


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


def op_name(instruction: Instruction) -> str:
    """Returns `add` for torch.add, Tensor.add_, Tensor.__add__ and aten.add.Tensor."""
    name = getattr(instruction.target, "__name__", type(instruction.target).__name__)
    return name.split(".")[0].strip("_")
