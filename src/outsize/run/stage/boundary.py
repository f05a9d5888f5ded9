"""Describes the values that cross cuts between stages, and in which order gradients come back.

    value of stage 0, used by stages 1 and 3            tied weight of stage 0, used by stage 3
    forward   0 --> 1,  0 --> 3   per microbatch        0 --> 3   once per step
    gradient  3 --> 1 --> 0       per microbatch        3 --> 0   per microbatch

Law 2 (exactness): in one process autograd adds the gradients of a value from its last consumer to its first.
So the partial sum is threaded: the last consumer sends its part to the one before, where it enters the
backward as a root, and so on down to the producer. Adding parts at the end differs by 1e-6. Law 3: a tied
parameter is a boundary value owned by the stage that uses it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from outsize.program.tape import Instruction, Meta, Tape

Edge = tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class Boundary:
    """Describes a value between stages: a slot of the tape, or a tied parameter (`weight`, slot -1)."""

    key: int
    slot: int
    weight: str | None
    meta: Meta | None
    producer: int
    consumers: tuple[int, ...]
    requires_grad: bool

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
    tape: Tape, owner: Sequence[int], reads: Sequence[Iterable[int]], trainable: frozenset[str]
) -> tuple[Boundary, ...]:
    """Finds the values and trainable weights that more than one stage needs.

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
    for name, stages in _tied(tape.instructions, owner).items():
        if name in trainable and len(stages) > 1:
            boundaries.append(Boundary(len(boundaries), -1, name, None, stages[0], tuple(stages[1:]), True))
    return tuple(boundaries)


def _tied(instructions: Sequence[Instruction], owner: Sequence[int]) -> dict[str, list[int]]:
    """Maps each parameter to the stages that use it, in order."""
    stages: dict[str, list[int]] = {}
    for instruction in instructions:
        stage = owner[instruction.index]
        for name in instruction.parameters():
            if stage >= 0 and stage not in stages.setdefault(name, []):
                stages[name].append(stage)
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
