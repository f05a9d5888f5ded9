"""Holds what a rank writes: parts of named tensors, each a box of indices, and the arithmetic of such
boxes.

A file has complex numbers for which safetensors has no word as pairs of real ones, in one more dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, final

import torch
from torch import Tensor

from outsize.run.weights.safetensors import DTYPES

_PAIRS: Final = {"C128": torch.complex128, "C32": torch.complex32}
STORED_DTYPES: Final = {**DTYPES, **_PAIRS}


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Is one rank's part of one named tensor.

    Args:
        name: "GROUP/NAME", as in "model/layers.0.weight"; tensors of a group share files.
        shape: shape of the whole tensor.
        offsets: where the part begins, in each dimension.
        tensor: the part, on any device, contiguous or not.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def is_whole(self) -> bool:
        """Tells whether the part is the tensor."""
        return tuple(self.tensor.shape) == tuple(self.shape)


def as_stored(tensor: Tensor) -> Tensor:
    """Returns a tensor as a file has it."""
    is_pairs = tensor.dtype in _PAIRS.values()
    return torch.view_as_real(tensor.detach().resolve_conj()) if is_pairs else tensor


@final
@dataclass(frozen=True, slots=True)
class Box:
    """Is a range of indices in each dimension: [offsets, offsets + sizes)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Returns the number of elements."""
        return prod(self.sizes)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Tells whether all indices are those of a tensor of this shape."""
        return (
            len(self.offsets) == len(self.sizes) == len(shape)
            and min((*self.offsets, *self.sizes), default=0) >= 0
            and all(o + s <= n for o, s, n in zip(self.offsets, self.sizes, shape, strict=True))
        )

    def overlap(self, other: Box) -> Box | None:
        """Returns the indices of both, or None where there are none."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, sizes) if min(sizes, default=1) > 0 else None

    def slices_from(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Returns the slices of the box in a tensor whose first element has the indices `origin`."""
        return tuple(
            slice(o - b, o - b + s) for o, s, b in zip(self.offsets, self.sizes, origin, strict=True)
        )


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Says why boxes do not hold each element of a tensor exactly once; empty where they do.

    They do if and only if all lie inside, no two overlap, and the volumes add up. Boxes are compared with
    those that begin before they end along the dimension with most borders: n log n for parts of rows.
    """
    outside = next((box for box in boxes if not box.is_inside(shape)), None)
    if outside is not None:
        return f"a part at {list(outside.offsets)} of {list(outside.sizes)} is not inside {list(shape)}"
    pair = _overlapping(shape, [box for box in boxes if box.volume])
    if pair is not None:
        return f"the parts at {list(pair[0].offsets)} and {list(pair[1].offsets)} overlap"
    missing = prod(shape) - sum(box.volume for box in boxes)
    return f"{missing} of {prod(shape)} elements are in no part" if missing else ""


def _overlapping(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    if len(boxes) < 2:
        return None
    if not shape:
        return boxes[0], boxes[1]
    along = max(range(len(shape)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offsets[along])
    for place, box in enumerate(ordered):
        end = box.offsets[along] + box.sizes[along]
        for other in itertools.islice(ordered, place + 1, None):
            if other.offsets[along] >= end:
                break
            if box.overlap(other) is not None:
                return box, other
    return None
