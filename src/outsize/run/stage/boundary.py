"""Describes the values that cross cuts between stages, and in which order gradients come back.

    value of stage 0, used by stages 1 and 3            tied weight of stage 0, used by stage 3
    forward   0 --> 1,  0 --> 3   per microbatch        0 --> 3   once per step
    gradient  3 --> 1 --> 0       per microbatch        3 --> 0   per microbatch

Law 2 (exactness): in one process autograd adds the gradients of a value from its last consumer to its first.
So the partial sum is threaded: the last consumer sends its part to the one before, where it enters the
backward as a root, and so on down to the producer. Adding parts at the end differs by 1e-6. Law 3: a tied
parameter is a boundary value owned by the stage that uses it first.

Threading has the order of one process where the stages of the uses ascend. A use that a use in an earlier
stage follows gets an alias of the value instead, made in the stage of the value at the place of that use:

    h of stage 0, used by      an exit in 1         a layer in 0     an add in 0
    one process adds           (add + layer) + exit
    threaded                   (exit + add) + layer
    with h' = alias(h)         exit takes h', and its gradient enters there: autograd runs what was computed
                               last first, so it is added behind those of layer and add

A call that uses such a value several times inside of itself is added as one sum. A program that is met later
finds weights where the first one has put them (`WeightHomes`): the owner of a weight that another stage uses
now sends it there, and comes first among its users or does not use it at all.

Oracle: tests/parity/test_other_programs.py, by bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from outsize.program.tape import Cost, Instruction, Meta, Ref, Tape
from outsize.program.tree import map_leaves

Edge = tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class WeightHomes:
    """Says where weights live already: `owner` has the stage that owns each weight which a program has used,
    and `holders` the stages that have its values, unless all have them.
    """

    owner: Mapping[str, int] = field(default_factory=dict[str, int])
    holders: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])

    def first_holder(self, name: str) -> int:
        """Returns the first stage that has the values of the weight; 0 where all have them."""
        return min(self.holders.get(name, (0,)))


NO_HOMES: Final = WeightHomes()


@final
@dataclass(frozen=True, slots=True)
class Boundary:
    """Describes a value between stages: a slot of the tape, or a weight (`weight`, slot -1).

    `cast` is the dtype in which all calls read the parameter under autocast, and in no other way.
    """

    key: int
    slot: int
    weight: str | None
    meta: Meta | None
    producer: int
    consumers: tuple[int, ...]
    requires_grad: bool
    cast: torch.dtype | None = None

    @property
    def chain(self) -> tuple[int, ...]:
        """Returns producer and consumers in stage order; gradients travel in reverse."""
        return (self.producer, *self.consumers)

    def previous(self, stage: int) -> int:
        """Returns the stage to which a consumer sends its partial gradient."""
        return self.chain[self.chain.index(stage) - 1]

    def following(self, stage: int) -> int | None:
        """Returns the stage from which a partial gradient comes; None for the last consumer."""
        place = self.chain.index(stage)
        return self.chain[place + 1] if place + 1 < len(self.chain) else None


def find_boundaries(
    tape: Tape,
    owner: Sequence[int],
    reads: Sequence[Iterable[int]],
    trainable: frozenset[str],
    homes: WeightHomes = NO_HOMES,
) -> tuple[Boundary, ...]:
    """Finds the values and weights that more than one stage needs, or another than the one that has them.

    `owner[i]` is the stage of instruction i, or -1 when it is dead or replicated; `reads[s]` are the slots
    that stage s needs and does not compute.
    """
    boundaries: list[Boundary] = []
    users: dict[int, list[int]] = {}
    for stage, slots in enumerate(reads):
        for slot in slots:
            users.setdefault(slot, []).append(stage)
    for slot in sorted(users):
        producer = owner[tape.producer[slot]]
        meta = tape.metas[slot]
        boundaries.append(
            Boundary(len(boundaries), slot, None, meta, producer, tuple(users[slot]), meta.requires_grad)
        )
    for name, stages in _users_of_weights(tape.instructions, owner).items():
        is_trained = name in trainable
        if is_trained:
            producer = homes.owner.get(name, stages[0])
            consumers = tuple(stage for stage in stages if stage != producer)
        else:
            producer = homes.first_holder(name)
            consumers = tuple(stage for stage in stages if stage not in homes.holders.get(name, (stage,)))
        if consumers:
            key, cast = len(boundaries), _cast_of(name, tape.instructions, owner) if is_trained else None
            boundaries.append(Boundary(key, -1, name, None, producer, consumers, is_trained, cast))
    return tuple(boundaries)


def _cast_of(name: str, instructions: Sequence[Instruction], owner: Sequence[int]) -> torch.dtype | None:
    """Returns the dtype in which all calls read a parameter; None where one of them reads it otherwise."""
    users = [i for i in instructions if owner[i.index] >= 0 and name in i.parameters()]
    dtypes = {dict(i.casts).get(name) for i in users}
    return dtypes.pop() if len(dtypes) == 1 else None


def _users_of_weights(instructions: Sequence[Instruction], owner: Sequence[int]) -> dict[str, list[int]]:
    """Maps each parameter, and each buffer that no call writes, to the stages that use it, in order."""
    written = {weight.name for instruction in instructions for weight in instruction.written_weights}
    stages: dict[str, set[int]] = {}
    for instruction in instructions:
        stage = owner[instruction.index]
        names = (w.name for w in instruction.weights if w.kind != "attribute" and w.name not in written)
        for name in names if stage >= 0 else ():
            stages.setdefault(name, set()).add(stage)
    return {name: sorted(users) for name, users in stages.items()}


def forward_edges(boundaries: Iterable[Boundary]) -> frozenset[Edge]:
    """Returns the (source, destination) pairs over which activations go with every microbatch."""
    return frozenset((b.producer, c) for b in boundaries if b.weight is None for c in b.consumers)


def step_edges(boundaries: Iterable[Boundary]) -> frozenset[Edge]:
    """Returns the (source, destination) pairs over which tied weights go, once per step."""
    return frozenset((b.producer, c) for b in boundaries if b.weight is not None for c in b.consumers)


def backward_edges(boundaries: Iterable[Boundary]) -> frozenset[Edge]:
    """Returns the (source, destination) pairs over which partial gradients go."""
    return frozenset((c, b.previous(c)) for b in boundaries if b.requires_grad for c in b.consumers)


@final
class _SlotUse(NamedTuple):
    """A slot that an instruction takes, and the number of the instruction."""

    slot: int
    instruction: int


def alias_for_one_use(value: Tensor) -> Tensor:
    """Returns an alias whose gradient is added to that of the value where the alias was made."""
    return torch.ops.aten.alias.default(value)


def with_ordered_uses(tape: Tape, owner: Sequence[int]) -> tuple[Tape, list[int]]:
    """Returns the tape with aliases for uses out of order, and the stage of each of its instructions.

    `owner[i]` is the stage of instruction i, or -1 where it is dead or replicated.
    """
    apart = _uses_out_of_order(tape, owner)
    if not apart:
        return tape, list(owner)
    instructions: list[Instruction] = []
    stages: list[int] = []
    metas = list(tape.metas)
    for instruction in tape.instructions:
        aliases: dict[int, int] = {}
        for slot in dict.fromkeys(instruction.reads()):
            if _SlotUse(slot, instruction.index) in apart:
                aliases[slot] = len(metas)
                metas.append(tape.metas[slot])
                instructions.append(_alias(instruction, slot, aliases[slot], len(instructions)))
                stages.append(owner[tape.producer[slot]])
        taken = _with_slots(instruction, aliases)
        instructions.append(replace(taken, index=len(instructions), serves=instruction.origin))
        stages.append(owner[instruction.index])
    return replace(tape, instructions=tuple(instructions), metas=tuple(metas)), stages


def _uses_out_of_order(tape: Tape, owner: Sequence[int]) -> set[_SlotUse]:
    """Returns the uses outside of the value's stage that a use in an earlier stage follows."""
    apart: set[_SlotUse] = set()
    following: dict[int, int] = {}  # Maps a slot to the first stage among the uses that come later.
    for instruction in reversed(tape.instructions):
        stage = owner[instruction.index]
        if stage < 0 or not instruction.modes.grad:
            continue
        for slot in dict.fromkeys(instruction.reads()):
            if slot not in tape.producer or not tape.metas[slot].requires_grad:
                continue
            first = following.setdefault(slot, stage)
            following[slot] = min(first, stage)
            if stage > first and stage != owner[tape.producer[slot]]:
                apart.add(_SlotUse(slot, instruction.index))
    return apart


def _alias(user: Instruction, slot: int, alias: int, index: int) -> Instruction:
    return Instruction(
        index=index,
        target=alias_for_one_use,
        args=(Ref(slot),),
        kwargs={},
        out=Ref(alias),
        frame=user.frame,
        modes=user.modes,
        random=False,
        writes=frozenset(),
        weights=(),
        written_weights=(),
        where=user.where,
        cost=Cost(),
        serves=user.origin,
    )


def _with_slots(instruction: Instruction, slots: dict[int, int]) -> Instruction:
    if not slots:
        return instruction

    def moved(leaf: object) -> object:
        return Ref(slots.get(leaf.slot, leaf.slot)) if isinstance(leaf, Ref) else leaf

    return replace(
        instruction, args=map_leaves(moved, instruction.args), kwargs=map_leaves(moved, instruction.kwargs)
    )
