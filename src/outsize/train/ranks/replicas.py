"""Defines replicas: pipelines that run at the same time, each with its part of the batch's microbatches.

    batch of 2 x 3 microbatches     replica 0 runs 0 1 2      replica 1 runs 3 4 5

Microbatches keep the numbers of the whole batch, which seed them, and their shares of its loss. So losses and
gradients are added up over replicas and nothing is divided: the sum is what one process gets. Every replica
runs the same number of microbatches; one that has fewer repeats its last one with a share of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.device.accelerators import widest_float
from outsize.run.transport.control_messages import all_gather_values, gather_values
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.schedules.sharded import BUCKET_BYTES
from outsize.train.batch.loss_weights import Counted, PartWeights, weights_of
from outsize.train.ranks.gradient_allreduce import ByStage, GradientSum


@final
class Piece(NamedTuple):
    """A microbatch to run: its place among the rank's parts, its number in the whole batch, its share of the
    loss.

    `counts` is False for a repeated one. `ratios` are those of the loss's terms, where its program weighs
    them.
    """

    part: int
    number: int
    share: float
    counts: bool = True
    ratios: tuple[float, ...] = ()


class Replicas(ABC):
    """The ranks that hold one stage for different parts of the batch; this one is `index` of `count`.

    `holder`: the number of this rank among all that hold the same weights, also for other rows of sequences;
    `expert_holder`: among those that hold the same experts.
    `own_batches`: every replica is given its own samples alone, not the whole batch.
    """

    index: int
    count: int
    holder: int = 0
    expert_holder: int = 0
    own_batches: bool = False

    @abstractmethod
    def pieces(
        self, counted: Sequence[Counted], written: frozenset[str]
    ) -> tuple[list[Piece], frozenset[str]]:
        """Returns what this replica runs of the counted parts, and which buffers any replica's programs
        write.
        """

    def running(self, parts: int) -> list[int]:
        """Returns which replica runs each of so many parts, all of which every replica knows."""
        return [part // _parts_of_each(parts, self.count) for part in range(parts)]

    @abstractmethod
    def total(self, value: Tensor) -> Tensor:
        """Returns the sum over replicas of a number (0-dim), the same on all."""

    @abstractmethod
    def on_first(self, values: Sequence[Any]) -> list[Any] | None:
        """Returns all replicas' values, in order, on the first; None on the others.

        Under `own_batches` each replica gets its own values.
        """

    @abstractmethod
    def of_all(self, values: Any) -> list[Any]:
        """Returns the values of each replica, on all of them."""

    @abstractmethod
    def spread(self, tensors: Iterable[Tensor], *, of_experts: bool = False) -> None:
        """Copies the first replica's values to all others, in place; `of_experts` to those with the same
        experts.
        """

    @abstractmethod
    def begin_round(self, *, last: bool) -> None:
        """Announces that microbatches of one wiring are about to run, `last` the last ones of the step."""

    @abstractmethod
    def summing(self, weights: Callable[[], ByStage]) -> AbstractContextManager[object]:
        """Returns a context around a step's backwards; at its end gradients are summed over replicas."""


@final
class SingleReplica(Replicas):
    """A single pipeline, which runs the whole batch."""

    index, count = 0, 1

    def pieces(
        self, counted: Sequence[Counted], written: frozenset[str]
    ) -> tuple[list[Piece], frozenset[str]]:
        return pieces_of(0, 1, counted), written

    def total(self, value: Tensor) -> Tensor:
        return value

    def on_first(self, values: Sequence[Any]) -> list[Any] | None:
        return list(values)

    def of_all(self, values: Any) -> list[Any]:
        return [values]

    def spread(self, tensors: Iterable[Tensor], *, of_experts: bool = False) -> None:
        """Does nothing: there is no other replica."""

    def begin_round(self, *, last: bool) -> None:
        """Does nothing: there are no sums to finish."""

    def summing(self, weights: Callable[[], ByStage]) -> AbstractContextManager[object]:
        return nullcontext()


@final
class ReplicaGroup(Replicas):
    """The replicas of a process group."""

    def __init__(
        self,
        group: RankGroup,
        holders: RankGroup,
        expert_holders: RankGroup | None = None,
        *,
        own_batches: bool = False,
    ) -> None:
        """Joins the replicas of `group`, whose gradients are added up over `holders`, those of experts over
        `expert_holders`.
        """
        self.group, self.index, self.count = group, group.rank(), group.size()
        self.holder, self.own_batches = holders.rank(), own_batches
        self.expert_holder = 0 if expert_holders is None else expert_holders.rank()
        self.gradients, self._expert_holders = GradientSum(holders, expert_holders), expert_holders

    def pieces(
        self, counted: Sequence[Counted], written: frozenset[str]
    ) -> tuple[list[Piece], frozenset[str]]:
        if not self.own_batches:
            return pieces_of(self.index, self.count, counted), written
        gathered = self.of_all((list(counted), written))
        all_counted = [counted_parts for counted_parts, _ in gathered]
        return own_pieces(self.index, all_counted), frozenset().union(*(names for _, names in gathered))

    def total(self, value: Tensor) -> Tensor:
        wire = value.detach().to(widest_float(value.device), copy=True).reshape(1)
        RankCollectives.of(self.group.of_tensor(wire)).all_reduce(wire)
        return wire[0].to(value.dtype)

    def on_first(self, values: Sequence[Any]) -> list[Any] | None:
        if self.own_batches:
            return list(values)
        gathered = gather_values(list(values), self.group.host, "outputs")
        return (
            None if gathered is None else [value for replica_values in gathered for value in replica_values]
        )

    def of_all(self, values: Any) -> list[Any]:
        return all_gather_values(values, self.group.host, "outputs")

    def spread(self, tensors: Iterable[Tensor], *, of_experts: bool = False) -> None:
        written_tensors = [_as_sent(tensor.detach()) for tensor in tensors if _is_written_to(tensor)]
        group = self._expert_holders if of_experts else self.group
        if written_tensors and group is not None:
            dist._broadcast_coalesced(group.device, written_tensors, BUCKET_BYTES, 0)  # pyright: ignore[reportPrivateImportUsage]

    def begin_round(self, *, last: bool) -> None:
        self.gradients.begin_round(last=last)

    @contextmanager
    def summing(self, weights: Callable[[], ByStage]) -> Iterator[None]:
        self.gradients.begin(weights())
        try:
            yield
        except BaseException:
            self.gradients.cancel()
            raise
        self.gradients.finish()


def _is_written_to(tensor: Tensor) -> bool:
    """Tells whether a tensor can be written in place: not one on meta, nor an expanded one."""
    return not tensor.is_meta and all(s or n < 2 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _as_sent(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor as a type that every backend sends: gloo has no floats of 8 bits."""
    is_narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if is_narrow else tensor


def pieces_of(index: int, count: int, counted: Sequence[Counted]) -> list[Piece]:
    """Returns the pieces of replica `index` of `count`, which all know the whole batch."""
    weights, each = weights_of(counted), _parts_of_each(len(counted), count)
    last = len(weights) - 1
    numbers = range(index * each, (index + 1) * each)
    return [
        Piece(n, n, weights[n].share, ratios=weights[n].ratios) if n <= last else _repeated(last, n, weights)
        for n in numbers
    ]


def _parts_of_each(parts: int, replicas: int) -> int:
    return -(-parts // replicas)


def own_pieces(index: int, everyones: Sequence[Sequence[Counted]]) -> list[Piece]:
    """Returns the pieces of replica `index`, which has its own parts alone; `everyones` are those of all
    replicas.
    """
    weights = weights_of([counted for replica_parts in everyones for counted in replica_parts])
    before, own = sum(map(len, everyones[:index])), len(everyones[index])
    each, own_weights = max(map(len, everyones)), weights[before : before + own]
    pieces = [Piece(n, before + n, of.share, ratios=of.ratios) for n, of in enumerate(own_weights)]
    return pieces + [_repeated(own - 1, len(weights), own_weights)] * (each - own)


def _repeated(part: int, number: int, weights: Sequence[PartWeights]) -> Piece:
    """Returns a piece that runs the last part once more, and does not count."""
    return Piece(part, number, 0.0, counts=False, ratios=weights[-1].ratios)
