"""Defines a job to be scheduled: stages on ranks, their seconds, the messages between them, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from outsize.ir.schedule import Action, Kind

Edge = tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class StageCost:
    """The seconds that a stage computes for one microbatch.

    `weight_s` of the backward are the weights' gradient, which a split backward (I, W) postpones; the split
    takes `split_s` longer. In `forward_wait_s` and `backward_wait_s` of them ranks that divide the stage's
    layers exchange values, and the stage waits. `show_s` and `verify_s` are those in which its work is shown
    to another rank, and repeated there; None: its forward and backward.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    split_s: float = 0.0
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    show_s: float = 0.0
    verify_s: float | None = None

    def beside_s(self, kind: Kind, forward: StageCost) -> float:
        """Returns how much longer a backward of this kind makes the forward of a stage that it runs together
        with: each computes while the other waits, and their exchanges follow each other.
        """
        own_s, waits_s = self.seconds(kind), forward.forward_wait_s + self.backward_wait_s
        computed_s = forward.forward_s + own_s - waits_s
        return own_s - min(waits_s, computed_s, own_s, forward.forward_s)

    def seconds(self, kind: Kind) -> float:
        """Returns the seconds of a compute action."""
        match kind:
            case Kind.F:
                return self.forward_s
            case Kind.B:
                return self.backward_s
            case Kind.W:
                return self.weight_s
            case _:
                return self.backward_s - self.weight_s + self.split_s


@final
@dataclass(frozen=True, eq=False)
class Job:
    """Stages with `ranks[stage]` and `costs[stage]`, and the seconds of a message over each edge (source,
    destination).

    A microbatch in flight holds `held[stage]` bytes, and `waiting[stage]` more between the halves of its
    backward; a rank has `room[rank]` bytes.
    """

    ranks: tuple[int, ...]
    microbatches: int
    costs: tuple[StageCost, ...]
    forward: Mapping[Edge, float]
    backward: Mapping[Edge, float]
    held: tuple[int, ...]
    room: tuple[float, ...]
    waiting: tuple[int, ...] = ()

    @cached_property
    def before_forward(self) -> list[list[tuple[int, float]]]:
        """Returns, for each stage, which stages send it values, and the seconds of each message."""
        return self._into(self.forward)

    @cached_property
    def before_backward(self) -> list[list[tuple[int, float]]]:
        """Returns, for each stage, which stages send it gradients, and the seconds of each message."""
        return self._into(self.backward)

    def _into(self, edges: Mapping[Edge, float]) -> list[list[tuple[int, float]]]:
        senders: list[list[tuple[int, float]]] = [[] for _ in self.ranks]
        for (source, destination), seconds in sorted(edges.items()):
            senders[destination].append((source, seconds))
        return senders

    @cached_property
    def on_rank(self) -> list[list[int]]:
        """Returns the stages of each rank."""
        return [[s for s, at in enumerate(self.ranks) if at == rank] for rank in range(max(self.ranks) + 1)]

    @cached_property
    def listening(self) -> dict[Kind, dict[int, set[int]]]:
        """Returns the ranks that wait for a stage's F, I (or B) and W."""
        listening_ranks: dict[Kind, dict[int, set[int]]] = {Kind.F: {}, Kind.I: {}, Kind.W: {}}
        for kind, edges in ((Kind.F, self.forward), (Kind.I, self.backward)):
            for source, destination in edges:
                listening_ranks[kind].setdefault(source, set()).add(self.ranks[destination])
        return listening_ranks

    @cached_property
    def ways_s(self) -> dict[Kind, list[float]]:
        """Returns, for each stage, the seconds from the start of its F, and of its B, to the end of a
        microbatch.
        """
        backward, forward = [0.0] * len(self.ranks), [0.0] * len(self.ranks)
        after: dict[int, list[tuple[int, float]]] = {}
        for (source, destination), seconds in self.backward.items():
            after.setdefault(source, []).append((destination, seconds))
        for stage in range(len(self.ranks)):
            onward = (s + backward[to] for to, s in after.get(stage, ()))
            backward[stage] = self.costs[stage].backward_s + max(onward, default=0.0)
        after.clear()
        for (source, destination), seconds in self.forward.items():
            after.setdefault(source, []).append((destination, seconds))
        for stage in reversed(range(len(self.ranks))):
            onward = [s + forward[to] for to, s in after.get(stage, ())]
            forward[stage] = self.costs[stage].forward_s + max([*onward, backward[stage]])
        return {Kind.F: forward, Kind.B: backward}

    @cached_property
    def busiest_s(self) -> float:
        """Returns the seconds that a microbatch takes on the rank with most work."""
        rank_work_s = (
            sum(self.costs[s].forward_s + self.costs[s].backward_s for s in own) for own in self.on_rank
        )
        return max(rank_work_s)

    def change(self, action: Action) -> int:
        """Returns the bytes of microbatches in flight that an action adds."""
        held_bytes = self.held[action.stage] * ((action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W)))
        half_bytes_sign = (action.kind is Kind.I) - (action.kind is Kind.W)
        return held_bytes + half_bytes_sign * (self.waiting[action.stage] if self.waiting else 0)
