"""A block of a recording, and the same with the names and slots of another call (see repeats.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from outsize.capture.holders import Path
from outsize.program.tape import Cost, Instruction, Meta, Ref, Weight
from outsize.program.tree import map_leaves

Read = tuple[str, str]  # module, relative to its block; attribute


@final
class Unlike(Exception):
    """It cannot be compared, or not be copied."""


@final
@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block. `key` is what calls that are alike have in common."""

    fqn: str
    key: Any
    inputs: tuple[Tensor, ...]
    objects: list[Any]  # other arguments, which may hold tensors
    weights: tuple[Tensor, ...]
    slots_of_inputs: tuple[int, ...]
    known: tuple[int | None, ...]  # numbers of the memory of inputs and weights, before
    slots: int  # how many there are before
    storages: int


@final
@dataclass(slots=True)
class Block:
    """What a call has recorded; `marks` is what the meter knows of inputs, weights and results after it."""

    call: Call
    instructions: list[Instruction]
    metas: list[Meta]
    storages: int
    numbers: tuple[int | None, ...]  # as `known`, after
    slots_of_inputs: tuple[int, ...]  # after: a call of Identity gives a tensor another one
    out: Any  # with what it has put into `objects`
    put: dict[Path, Any]  # path of that -> what was there before
    marks: list[Any]
    reads: dict[Read, Any]
    indices: dict[Read, Any]  # attributes used as indices alone
    proven: bool = False


@final
class Renamed:
    """A block in the place of another call of its kind. Raises Unlike for what is of neither."""

    def __init__(self, block: Block, call: Call) -> None:
        self._block, self._call = block, call
        self._slots = dict(zip(block.call.slots_of_inputs, call.slots_of_inputs, strict=True))
        self._known = dict(zip(block.call.known, call.known, strict=True))

    def instructions(self, first: int) -> list[Instruction]:
        """From index `first` on."""
        return [self._instruction(first + n, i) for n, i in enumerate(self._block.instructions)]

    def metas(self) -> list[Meta]:
        """Of the new slots."""
        return [replace(m, storage=self.storage(m.storage)) for m in self._block.metas]

    def out(self) -> Any:
        """The result, tensors as references."""
        return map_leaves(self._leaf, self._block.out)

    def storage(self, number: int | None) -> Any:
        """The number of the same memory."""
        if number is None:
            return None
        if number >= (old := self._block.call.storages):
            return number - old + self._call.storages
        return _of(self._known, number)

    def slot(self, slot: int) -> int:
        """The slot in its place."""
        new = slot - self._block.call.slots
        return new + self._call.slots if new >= 0 else _of(self._slots, slot)

    def _instruction(self, index: int, one: Instruction) -> Instruction:
        return Instruction(
            index=index,
            target=self._name(one.target) if isinstance(one.target, str) else one.target,
            args=map_leaves(self._leaf, one.args),
            kwargs=map_leaves(self._leaf, one.kwargs),
            out=map_leaves(self._leaf, one.out),
            frame=self._name(one.frame),
            modes=one.modes,
            random=one.random,
            writes=frozenset(map(self.storage, one.writes)),
            weights=tuple(map(self._leaf, one.weights)),
            written_weights=tuple(map(self._leaf, one.written_weights)),
            where=one.where,
            cost=self._cost(one.cost),
        )

    def _cost(self, cost: Cost) -> Cost:
        return replace(cost, kept=frozenset(map(self.storage, cost.kept))) if cost.kept else cost

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return Ref(self.slot(leaf.slot))
        return Weight(self._name(leaf.name), leaf.kind) if isinstance(leaf, Weight) else leaf

    def _name(self, name: str) -> str:
        old = self._block.call.fqn
        if name != old and not name.startswith(f"{old}."):
            raise Unlike
        return self._call.fqn + name[len(old) :]


def _of(table: dict[Any, Any], key: Any) -> Any:
    if key not in table:
        raise Unlike
    return table[key]
