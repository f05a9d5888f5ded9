"""Which samples a rank passes to `step`: batch by batch, as indices into a dataset.

    DataLoader(dataset, batch_sampler=engine.batch_sampler(dataset, shuffle=True, seed=0))

With `own_batches` every replica gets a run of each batch's samples, the first ones one more where they do not
divide; without, every rank gets whole batches. Ranks of one replica get the same. A last batch with fewer
samples than replicas is left out. As in torch's DistributedSampler, `set_epoch` shuffles anew; other than
there no sample is taken twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import final

import torch
from torch.utils.data import Sampler


@final
class ReplicaBatches(Sampler[list[int]]):
    """Of replica `index` of `count`; `batch_size` is that of all together."""

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

    def set_epoch(self, epoch: int) -> None:
        """Another order, the same on all ranks."""
        self._epoch = epoch

    def __len__(self) -> int:
        whole, left = divmod(self._samples, self._batch_size)
        return whole + (left >= self._least)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._samples)
        if self._shuffle:
            draw = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._samples, generator=draw)
        for batch in order.split(self._batch_size)[: len(self)]:
            each, more = divmod(len(batch), self._count)
            first = self._index * each + min(self._index, more)
            yield batch[first : first + each + (self._index < more)].tolist()
