"""Defines MicrobatchSplit: the batch that the user passes becomes the microbatches of the plan.

    engine.step(x, target=y)                                  as many as the plan says, or fewer
    engine.step([outsize.microbatch(x1, target=y1), ...])     as they are

A batch that does not divide has microbatches that differ by one sample; a short batch has fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, final

from outsize.run.stage.to_device import TapeHome
from outsize.train.batch.batch import Batch, as_target, microbatches_in
from outsize.train.batch.batch_dims import BatchDims, rejection
from outsize.train.batch.sampler import ReplicaBatches
from outsize.train.context.run_context import RunContext
from outsize.train.ranks.batch_check import insist_on_one_batch, is_checked
from outsize.train.ranks.divided_weights import DividedWeights


@final
class MicrobatchSplit:
    """Splits the batches of one engine; with `own_batches` these are this replica's samples alone."""

    def __init__(self, run: RunContext, home: TapeHome | None, tensor: DividedWeights | None) -> None:
        self._plan, self._replicas, self._group = run.plan, run.replicas, run.host_group
        rejects = rejection(run.model, run.options.loss_fn, home)
        rejects = rejects if tensor is None else tensor.whole()(rejects)
        self.dims = BatchDims(rejects, run.options.batch_dims)
        self._compared = Counter[str]()
        self._counts: dict[int, int] = {}  # microbatches of this replica, by samples

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Batch]:
        """Returns the user's microbatches when they are passed as a list, else the plan's."""
        microbatches = microbatches_in(args, kwargs, target)
        if microbatches is not None:
            return [self.dims.of(part, divides=False) for part in microbatches if part.size]
        return self.of_batch(Batch(args, kwargs, as_target(target)))

    def of_batch(self, batch: Batch, count: int | None = None) -> list[Batch]:
        """Returns the plan's microbatches, or so many; a short batch has as many as keep the planned size."""
        if count == 1:
            return [self.dims.of(batch, divides=False)]
        sized_batch = self.dims.of(batch)
        if count is not None:
            return sized_batch.split(count)
        samples = sized_batch.size
        if samples not in self._counts:
            replicas = self._replicas.count if self._replicas.own_batches else 1
            self._counts[samples] = self._plan.microbatches_of(samples * replicas) // replicas
        return sized_batch.split(self._counts[samples])

    def compare(self, parts: Sequence[Batch], step: int) -> None:
        """A collective. Raises WorldMismatch where ranks that must be given one batch are given several."""
        if self._group is not None:
            replica = self._replicas.index if self._replicas.own_batches else 0
            insist_on_one_batch(self._group, parts, step, replica)

    def compare_rarely(self, what: str, parts: Sequence[Batch]) -> None:
        """Compares as `compare` does, in the first of such calls and then in ever rarer ones."""
        number = self._compared[what]
        self._compared[what] += 1
        if is_checked(number):
            self.compare(parts, number)

    def sampler(self, dataset: Any, *, shuffle: bool, seed: int, drop_last: bool) -> ReplicaBatches:
        """Returns what yields the indices of this rank's batches."""
        place = (self._replicas.index, self._replicas.count) if self._replicas.own_batches else (0, 1)
        return ReplicaBatches(
            dataset, self._plan.batch_size, *place, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
