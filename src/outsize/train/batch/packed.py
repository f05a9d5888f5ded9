"""Tensors whose rows belong to samples, to each another number of them.

    pixel_values [patches of all images, width]     image_grid_thw [samples, 3]: t, h, w of each image
    nodes [nodes of all graphs, width]              sizes [samples]

How many rows a sample has is said by another tensor of the batch, as a number or as the product of a row, or
by a function of the model's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from outsize.errors import BadOption

CountRows = Callable[..., Any]


@final
@dataclass(frozen=True, slots=True)
class PackedRows:
    """The numbers of rows that the samples of one batch have, in order, and the rule that gave them."""

    counts: tuple[int, ...]
    by: PackedBy

    def rows_of(self, samples: slice | Tensor) -> Tensor:
        """Returns the numbers of the rows of these samples."""
        ends = list(accumulate(self.counts))
        spans = [torch.arange(end - count, end) for end, count in zip(ends, self.counts, strict=True)]
        return torch.cat([torch.arange(0), *(spans[sample] for sample in self._numbers(samples))])

    def taken(self, samples: slice | Tensor) -> PackedRows:
        """Returns the counts of these samples alone."""
        return PackedRows(tuple(self.counts[sample] for sample in self._numbers(samples)), self.by)

    def _numbers(self, samples: slice | Tensor) -> Sequence[int]:
        whole = range(len(self.counts))
        return whole[samples] if isinstance(samples, slice) else samples.tolist()


@final
@dataclass(frozen=True, slots=True)
class PackedBy:
    """The rule by which the rows of a tensor are counted: the place of another tensor, or a function."""

    counter: int | CountRows

    def counts(self, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> PackedRows:
        """Returns the counts of one batch."""
        if isinstance(self.counter, int):
            return PackedRows(tuple(_numbers_in(tensors[self.counter])), self)
        counts = torch.as_tensor(self.counter(*args, **kwargs))
        return PackedRows(tuple(int(count) for count in counts), self)


def packed_by_one_of(tensors: Sequence[Tensor], place: int) -> PackedBy | None:
    """Returns the rule for a tensor whose rows are as many as an integer tensor of the batch says."""
    tensor = tensors[place]
    for counter, other in enumerate(tensors):
        integers = not other.is_floating_point() and not other.is_complex() and other.dtype != torch.bool
        if counter == place or not integers or other.ndim not in (1, 2) or other.is_meta or not tensor.ndim:
            continue
        counts = _numbers_in(other)
        if len(counts) != tensor.shape[0] == sum(counts) and min(counts) > 0:
            return PackedBy(counter)
    return None


def insist_on_rows(name: str | int, tensor: Tensor, packed: PackedRows) -> None:
    """Raises BadOption when the counts that the user's `batch_dims` gives are not those of the tensor."""
    if sum(packed.counts) != tensor.shape[0]:
        raise BadOption(
            f"the counts that batch_dims gives for {name!r} are not those of its rows",
            numbers=f"{tensor.shape[0]} rows; the counts of {len(packed.counts)} samples add up to "
            f"{sum(packed.counts)}",
            next_step="name the argument that has a count, or the sizes to multiply, for each sample",
        )


def _numbers_in(counter: Tensor) -> list[int]:
    counts = counter.prod(1) if counter.ndim == 2 else counter
    return [int(count) for count in counts.tolist()]
