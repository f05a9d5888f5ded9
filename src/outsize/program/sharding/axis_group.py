"""Defines what the ranks of an axis compute together, and how a rank's tape calls it.

    tensor parallelism     v23 = row(v22, o_proj.weight, None)     a product, each rank has some summands
    context parallelism    v31 = gather(v30)                       all rows of a value
    expert parallelism     v9 = experts(call, x, index, weight)    the experts of all ranks

An axis has a group, whose methods are its collectives with their gradients (run/collectives, a file for each
axis). The steps of the axis name them, and its tape holds them as calls. So nothing that cuts, counts or
replays a tape knows an axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from outsize.program.replaying.replay import Relocatable
from outsize.program.sharding.share import RankPosition, Share
from outsize.program.tape import Instruction


class AxisGroup(ABC):
    """Defines the ranks of one axis; `place` is this rank's position among them.

    `computes_for_others`: in a call, weights of this rank compute what others have. So they have gradients
    although the rank's own microbatch may have no share in the loss. `gathered` is what a gather returns of a
    value; None: all of it.
    """

    place: RankPosition
    computes_for_others: ClassVar[bool] = False
    gathered: RankPosition | None = None

    @abstractmethod
    def collective(self, name: str) -> Callable[..., Any]:
        """Returns what the ranks of the group compute together by this name."""

    def call(
        self, name: str, share: Share | None = None, function: Callable[..., Any] | None = None
    ) -> CollectiveCall:
        """Returns the call of a collective, as a tape holds it."""
        return CollectiveCall(self, name, self.collective(name), share, function)


@final
@dataclass(frozen=True)
class CollectiveCall(Relocatable):
    """A call of what ranks compute together, such as `run(x, share)`.

    With `function`, the model's own, of which each rank computes its part, it is `run(share, function,
    *arguments of the model's call)`.
    """

    group: AxisGroup
    name: str
    run: Callable[..., Any]
    share: Share | None = None
    function: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", self.name)  # A function has it, and an instruction shows it.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is not None:
            return self.run(self.share, self.function, *args, **kwargs)
        return self.run(*args, **kwargs) if self.share is None else self.run(*args, self.share, **kwargs)

    def relocated(self, move: Callable[[Instruction], Instruction]) -> CollectiveCall:
        """Returns the call whose function is that of another device."""
        function = self.function
        return replace(self, function=function.relocated(move)) if isinstance(function, Relocatable) else self

    def around(self, function: Callable[..., Any]) -> CollectiveCall:
        """Returns the call of another function."""
        return replace(self, function=function)


@final
class CountedGroup(AxisGroup):
    """Stands in a tape for the ranks of an axis, whose collectives are counted there and never run."""

    def __init__(self, place: RankPosition) -> None:
        self.place = place

    def collective(self, name: str) -> Callable[..., Any]:
        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{name}: this tape is counted, not run")

        return never


def collective_of(instruction: Instruction) -> CollectiveCall | None:
    """Returns the call of a collective that an instruction is; None for any other."""
    target = instruction.target
    return target if isinstance(target, CollectiveCall) else None


def inner_call(instruction: Instruction) -> Instruction:
    """Returns the call of the model's own function that a collective runs; any other instruction as it is."""
    call = collective_of(instruction)
    if call is None or call.function is None:
        return instruction
    return replace(instruction, target=call.function)
