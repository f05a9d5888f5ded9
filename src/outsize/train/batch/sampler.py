"""Chooses the samples that a rank passes to `step`: batch by batch, as indices into a dataset.

    DataLoader(dataset, batch_sampler=engine.batch_sampler(dataset, shuffle=True, seed=0))

With `own_batches` every replica gets a contiguous part of each batch's samples; where the batch does not
divide, the first replicas get one more. Without it every rank gets whole batches. The ranks of one replica
get the same samples. A last batch with fewer samples than replicas is left out. As in torch's
DistributedSampler, `set_epoch` changes the order; other than there, no sample appears twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import final

import torch
from torch.utils.data import Sampler


@final
class ReplicaBatches(Sampler[list[int]]):
    """Yields the batches of replica `index` of `count`; `batch_size` counts the samples of all replicas
    together.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        index: int,
        count: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._samples, self._batch_size, self._index, self._count = len(data), batch_size, index, count
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        self._least = batch_size if drop_last else count
        self._left_out = 0

    def set_epoch(self, epoch: int) -> None:
        """Selects another order, the same on all ranks."""
        self._epoch = epoch

    @property
    def epoch(self) -> int:
        """Returns the epoch whose order is selected."""
        return self._epoch

    @property
    def batch_size(self) -> int:
        """Returns the samples of a batch, those of all replicas together."""
        return self._batch_size

    def leave_out(self, samples: int) -> None:
        """Begins the next pass, and no other, behind so many samples of the whole batch's order."""
        self._left_out = samples

    def __len__(self) -> int:
        whole, remainder = divmod(self._samples, self._batch_size)
        return whole + (remainder >= self._least)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._samples, generator=generator)
        used, self._left_out = self._left_out, 0
        left = max(len(self) - used // self._batch_size, 0)
        for batch in order[used:].split(self._batch_size)[:left]:
            part_size, remainder = divmod(len(batch), self._count)
            first = self._index * part_size + min(self._index, remainder)
            yield batch[first : first + part_size + (self._index < remainder)].tolist()
