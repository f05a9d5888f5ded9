"""Problem: replicas run microbatches of their own, and a weight's gradient is the sum over all of them.

    whole weights on each rank     an all-reduce; each rank has the sum
    parts of weights (dp_shard)    a reduce-scatter; each rank has its part of the sum

Both run once for a call, when the user's backward has come through all its microbatches, or once for calls
that have run together, behind the last of them: then the whole gradients of the stage are in memory. What
else the user's graph adds to a weight, such as a penalty, is not summed: each rank computes it for what it
has of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.run.stage.outer_graph import GatheredWeights
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives


@final
class BackwardArrivals:
    """Knows of which calls that have run together the backward has come.

    A call whose outputs need no gradients, as those of a target, has none.
    """

    def __init__(self, calls: int) -> None:
        self._calls = list(range(calls))
        self._come = self._waiting = 0

    def leave_out(self, call: int) -> None:
        """Expects no backward of a call, by its place."""
        self._calls.remove(call)

    def arrive(self, call: int) -> None:
        """Notes the backward of a call, by its place. Raises BadOption where one before it is missing."""
        if call not in self._calls[self._come : self._come + 1]:
            raise BadOption(
                "backwards of calls that have run together come in the order of the calls; one is missing",
                numbers=f"call {call}, and {self._come} of {len(self._calls)} have come",
                next_step="a backward of each call's loss, in their order",
            )
        self._come += 1

    def more_come(self) -> bool:
        """Tells whether a sum waits for further calls."""
        waits = self._come < len(self._calls)
        self._waiting = self._come if waits else 0
        return waits

    def insist_on_sums(self) -> None:
        """Raises BadOption where gradients have waited for a backward that has not come."""
        if self._waiting:
            raise BadOption(
                "ranks have not added up their gradients, since the backward of a call is missing",
                numbers=f"{self._waiting} of {len(self._calls)} calls that have run together had one",
                next_step="a backward of each call's loss, in their order, before the optimizer steps",
            )


@final
class WholeSums:
    """Sums over the ranks of a group, each of which has the whole weights."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def stand_ins(self, names: Sequence[str], weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns the weights themselves, as others see them."""
        return [weight.view_as(weight) for weight in weights]

    def add_up(
        self, names: Sequence[str], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns the sums, in one message for each dtype; None for a weight without a gradient anywhere."""
        present = torch.tensor([float(gradient is not None) for gradient in gradients])
        RankCollectives.of(self._group.of_tensor(present)).all_reduce(present)
        pairs = list(zip(gradients, weights, present.tolist(), strict=True))
        own = [torch.zeros_like(weight) if g is None else g for g, weight, count in pairs if count]
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at, gradient in enumerate(own):
            by_kind.setdefault((gradient.dtype, gradient.device), []).append(at)
        for places in by_kind.values():
            flat = torch.cat([own[at].reshape(-1) for at in places])
            RankCollectives.of(self._group.of_tensor(flat)).all_reduce(flat)
            sums = flat.split([own[at].numel() for at in places])
            for at, total in zip(places, sums, strict=True):
                own[at] = total.view(own[at].shape)
        left = iter(own)
        return [next(left) if count else None for _, _, count in pairs]


@final
class PartSums:
    """Sums over the ranks that have parts of the weights; each gets those of its parts."""

    def __init__(self, gathered: GatheredWeights) -> None:
        self._gathered = gathered

    def stand_ins(self, names: Sequence[str], weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors with the shapes of whole weights, which have memory while stages compute."""
        return [self._gathered.whole(name).detach() for name in names]

    def add_up(
        self, names: Sequence[str], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Returns this rank's parts of the sums."""
        return self._gathered.scattered(names, gradients)
