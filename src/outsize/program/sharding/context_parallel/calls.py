"""Defines what a rank that holds rows calls in place of attention, losses and sums over rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

from outsize.program.sharding.products import Product
from outsize.program.sharding.rank_step import CallSite, RankCall, RankStep, RuleInput
from outsize.program.sharding.scaled_linear import SCALED
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction, Weight

Method = Literal["attention", "attention_by_heads", "cross_entropy", "average", "mean", "sum", "add_up"]
IN_PIECES: Final[Method] = "attention_by_heads"
"""Attention that gathers keys and values itself, some heads at a time."""
_ATTENTION: Final = frozenset[Method]({"attention", IN_PIECES})
FunctionAt = Callable[[RankPosition], Callable[..., Any]]


@final
@dataclass(frozen=True)
class OverRows(RankCall):
    """A function of all rows, which ranks compute together by a `method` of their group.

    `share` says how rows are divided; `function_at` returns the function of the rank at a place, where it is
    not the model's own.
    """

    method: Method
    share: Share
    function_at: FunctionAt | None = None

    @property
    def adds_rows_up(self) -> bool:
        """Returns whether the result is a sum over rows, or a quotient of such sums."""
        return not self.attends

    @property
    def attends(self) -> bool:
        """Returns whether the function is attention, of which each rank has its rows."""
        return self.method in _ATTENTION

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        target = instruction.target
        function = target if self.function_at is None else self.function_at(site.group.place)
        assert not isinstance(function, str)
        return replace(instruction, target=site.group.call(self.method, self.share, function))


@final
@dataclass(frozen=True)
class OnRows(RankCall):
    """A function that each rank calls with its rows alone, and which is another one on each."""

    function_at: FunctionAt

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        return replace(instruction, target=self.function_at(site.group.place))


@final
@dataclass(frozen=True)
class ScaledOverRows(RankCall):
    """A linear layer whose scales are of all rows, which ranks ask each other for."""

    product: Product

    def written(self, instruction: Instruction, site: CallSite) -> Instruction:
        names = (self.product.weight, self.product.bias)
        weights = (None if name is None else Weight(name, "parameter") for name in names)
        args = (self.product.input, *weights, site.module)
        return replace(instruction, target=site.group.call(SCALED), args=args, kwargs={})


class AddsUpOverRows(ABC):
    """Defines a target whose results are quotients of parts that add up over rows."""

    @abstractmethod
    def parts(self, *operands: Any) -> tuple[Any, ...]:
        """Returns what adds up."""

    @abstractmethod
    def finish(self, parts: Sequence[Any]) -> Any:
        """Returns the results of the sums of their parts."""

    @abstractmethod
    def follow_rows(self, call: RuleInput, ranks: int) -> RankStep:
        """Returns how ranks that have rows of a sequence compute a call. Raises NotPropagated."""
