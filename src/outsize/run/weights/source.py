"""Describes where weights come from: tensors by name, of which any box can be read.

A source is files (`safetensors.WeightFiles`), a checkpoint, or another source whose tensors are computed from
(`dequantized`, `pretrained_names`). What a box costs to read is that box alone, where the source allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Protocol, final

import torch
from torch import Tensor

Sizes = Sequence[int]

PIECE_BYTES: Final = 8 << 20
"""Bounds how much of a tensor is in memory twice while it is copied, where its source divides it."""


@final
@dataclass(frozen=True)
class TensorPart:
    """Selects the ranges [start, stop) along `dim` of a tensor whose `dim` is `size` long."""

    dim: int
    size: int
    ranges: Sequence[tuple[int, int]]

    def whole(self, shape: Sizes) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, given the shape of the part."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


class WeightSource(Protocol):
    """Where the weights of a model come from; `path` is its name in messages."""

    path: Path

    def __contains__(self, name: str) -> bool:
        """Tells whether it has a tensor of this name."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all tensors."""
        ...

    def described(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Maps names to tensors on meta, with the shape and dtype of the whole tensor; reads no values."""
        ...

    def box(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        """Returns a box of a tensor, or all of it, on the CPU."""
        ...

    def divides(self, name: str) -> bool:
        """Tells whether rows of a tensor are read without the others."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what a user should know about how the tensors are made."""
        ...


def copy_weight(source: WeightSource, name: str, into: Tensor, part: TensorPart | None = None) -> None:
    """Copies a tensor into one of the same shape, in its dtype, piece by piece where its source divides it.

    With `part`, only its ranges are read, which `into` holds one after the other.
    """
    if part is None:
        for rows in _pieces(source, name, into):
            _rows_of(into, rows).copy_(_box(source, name, into.shape, rows))
        return
    done = 0
    for start, stop in part.ranges:
        box = into.narrow(part.dim, done, stop - start)
        for rows in _pieces(source, name, box):
            first = rows.start if rows is not None else 0
            piece = _rows_of(box, rows)
            offsets = [0] * box.ndim
            offsets[0] += first
            offsets[part.dim] += start
            piece.copy_(source.box(name, offsets, tuple(piece.shape)))
        done += stop - start


def have_one_value(source: WeightSource, name: str, other: str) -> bool:
    """Tells whether two tensors of a source are equal."""
    one, two = source.described((name, other)).values()
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return torch.equal(source.box(name), source.box(other))
    pieces = _pieces(source, name, one) if source.divides(other) else (None,)
    return all(torch.equal(*(_box(source, n, one.shape, rows) for n in (name, other))) for rows in pieces)


def _pieces(source: WeightSource, name: str, into: Tensor) -> Iterator[slice | None]:
    """Yields the rows of each piece in which a tensor of this shape is read; None: it is read at once."""
    row_bytes = prod(into.shape[1:]) * into.element_size()
    if into.ndim == 0 or into.shape[0] * row_bytes <= PIECE_BYTES or not source.divides(name):
        yield None
        return
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, into.shape[0], step):
        yield slice(first, min(first + step, into.shape[0]))


def _rows_of(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _box(source: WeightSource, name: str, shape: Sizes, rows: slice | None) -> Tensor:
    """Returns these rows of a tensor of this shape, or all of it."""
    if rows is None:
        return source.box(name)
    return source.box(name, (rows.start, *(0 for _ in shape[1:])), (rows.stop - rows.start, *shape[1:]))


def few(names: Sequence[str]) -> str:
    """Returns the first names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
