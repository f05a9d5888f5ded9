"""Describes where weights come from: tensors by name, of which any box can be read.

A source is files (`safetensors.WeightFiles`), a checkpoint, or another source whose tensors are computed from
(`dequantized`, `pretrained_names`). What a box costs to read is that box alone, where the source allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from torch import Tensor

Sizes = Sequence[int]


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

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns what a user should know about how the tensors are made."""
        ...


def copy_weight(source: WeightSource, name: str, into: Tensor, part: TensorPart | None = None) -> None:
    """Copies a tensor into one of the same shape, in its dtype.

    With `part`, only its ranges are read, which `into` holds one after the other.
    """
    if part is None:
        into.copy_(source.box(name))
        return
    shape, done = part.whole(into.shape), 0
    for start, stop in part.ranges:
        offsets = (*((0,) * part.dim), start, *((0,) * (len(shape) - part.dim - 1)))
        sizes = (*shape[: part.dim], stop - start, *shape[part.dim + 1 :])
        into.narrow(part.dim, done, stop - start).copy_(source.box(name, offsets, sizes))
        done += stop - start


def few(names: Sequence[str]) -> str:
    """Returns the first names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
