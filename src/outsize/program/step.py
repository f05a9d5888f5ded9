"""What a rule of follow.py gets and gives: an instruction with the shares of its operands, and a Step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, final

from outsize.program.share import Place, Share
from outsize.program.tape import Instruction, Meta, Ref, Weight
from outsize.program.tree import leaves

Operand = Ref | Weight
Shape = tuple[int, ...]
Rewrite = Callable[[Place], tuple[tuple[Any, ...], dict[str, Any]]]


@final
class Lost(Exception):
    """The divided dim cannot be followed through this instruction; `gather` would help."""


@final
class Parted(Exception):
    """The origins have to be divided in parts, between these points of the dim."""

    def __init__(self, share: Share, points: Sequence[Fraction]) -> None:
        super().__init__(f"parts at {points}")
        self.share, self.points = share, points


@final
@dataclass(frozen=True)
class Step:
    """What follows for an instruction. `out`: a Share for each slot that it defines, in their order."""

    out: tuple[Share | None, ...]
    cut: Mapping[Operand, Share] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    dropout: Share | None = None  # its mask is drawn for the whole value


@final
@dataclass(frozen=True)
class Call:
    """An instruction with what is known of its operands."""

    instruction: Instruction
    metas: Sequence[Meta]
    shares: Mapping[int, Share]
    weights: Mapping[str, Shape]

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return self.instruction.args

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        given = self.instruction.args
        return given[place] if len(given) > place else self.instruction.kwargs.get(name, default)

    def operands(self) -> Iterator[Operand]:
        """Tensors among the arguments."""
        everything = leaves((self.instruction.args, self.instruction.kwargs))
        return (leaf for leaf in everything if isinstance(leaf, Ref | Weight))

    def share(self, operand: Any) -> Share | None:
        """How it is divided."""
        return self.shares.get(operand.slot) if isinstance(operand, Ref) else None

    def shape(self, operand: Operand) -> Shape:
        """On one device."""
        return self.metas[operand.slot].shape if isinstance(operand, Ref) else self.weights[operand.name]

    def results(self) -> list[Shape]:
        """Shapes of the slots that it defines."""
        return [self.metas[slot].shape for slot in self.instruction.defines()]

    def divided(self) -> dict[Operand, Share]:
        """The operands that are."""
        found = ((operand, self.share(operand)) for operand in self.operands())
        return {operand: share for operand, share in found if share is not None}

    def alone(self) -> Share:
        """Of the first argument, when no other one is divided. Raises Lost."""
        divided = self.divided()
        if len(divided) != 1 or self.share(self.args[0]) is None:
            raise Lost("more than its first argument is divided")
        return next(iter(divided.values()))

    def same(self, share: Share | None, **more: Any) -> Step:
        """Every result divided like this."""
        return Step(tuple(share for _ in self.instruction.defines()), **more)


def op_name(instruction: Instruction) -> str:
    """`add` for torch.add, Tensor.add_, Tensor.__add__ and aten.add.Tensor."""
    name = getattr(instruction.target, "__name__", type(instruction.target).__name__)
    return name.split(".")[0].strip("_")
