"""Describes which elements of a tensor travel and how the receiver lays them out (rule 14).

Reductions depend on memory order, so strides travel: a permuted dense tensor (channels_last, a transpose)
travels in its own memory order, an expanded dimension (stride 0) travels once. A slice with holes is made
dense in the order of its strides, as `clone` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
HEADER = 20  # present, dtype, dims, unused, 8 sizes, 8 strides
_MAX_DIMS = 8


@final
@dataclass(frozen=True, slots=True)
class WireLayout:
    """Holds shape, strides and dtype of the tensor that the receiver makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Returns the layout under which a tensor travels."""
        core = _core(tensor)
        dense = core if _is_dense(core) else torch.empty_like(core, device="meta")
        stride = tuple(new if old else 0 for old, new in zip(tensor.stride(), dense.stride(), strict=True))
        return cls(tuple(tensor.shape), stride, tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Allocates a tensor of this layout to receive into."""
        flat = torch.empty(self._count(), dtype=self.dtype, device=device)
        return flat.as_strided(self.shape, self.stride)

    def memory(self, tensor: Tensor) -> Tensor:
        """Returns the distinct elements of a tensor that `empty` made as a flat view, in memory order."""
        return tensor.as_strided((self._count(),), (1,))

    @property
    def size_bytes(self) -> int:
        """Returns the bytes of the distinct elements."""
        return self._count() * self.dtype.itemsize

    def _count(self) -> int:
        return math.prod(_distinct(self.shape, self.stride))

    def encode(self) -> Tensor:
        """Encodes the layout as HEADER int64 numbers."""
        pad = [0] * (_MAX_DIMS - len(self.shape))
        body = [*self.shape, *pad, *self.stride, *pad]
        return torch.tensor([1, _DTYPES.index(self.dtype), len(self.shape), 0, *body])

    @classmethod
    def decode(cls, header: Tensor) -> Self | None:
        """Decodes a header; None says that there is no tensor because no gradient flows."""
        numbers = [int(n) for n in header.tolist()]
        if not numbers[0]:
            return None
        dims = numbers[2]
        shape, stride = numbers[4 : 4 + dims], numbers[4 + _MAX_DIMS : 4 + _MAX_DIMS + dims]
        return cls(tuple(shape), tuple(stride), _DTYPES[numbers[1]])


NOTHING = torch.zeros(HEADER, dtype=torch.int64)


def copied(tensor: Tensor) -> Tensor:
    """Returns the tensor in memory of its own, laid out as it would arrive."""
    layout = WireLayout.of(tensor)
    copy = layout.empty(tensor.device)
    layout.memory(copy).copy_(pack(tensor))
    return copy


def pack(tensor: Tensor) -> Tensor:
    """Returns the distinct elements as one flat tensor in memory order; copies where the tensor has holes."""
    core = _core(tensor.detach())
    dense = core if _is_dense(core) else core.clone()
    return dense.as_strided((dense.numel(),), (1,))


def packed_bytes(tensor: Tensor) -> Tensor:
    """Returns the elements of `pack` as bytes."""
    flat = pack(tensor)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)


def _core(tensor: Tensor) -> Tensor:
    """Cuts each expanded dimension to one element."""
    return tensor.as_strided(_distinct(tensor.shape, tensor.stride()), tensor.stride())


def _distinct(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [size if step else min(size, 1) for size, step in zip(shape, stride, strict=True)]


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the tensor has no overlap and no holes, in any order of its dimensions."""
    expected = 1
    for step, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1
    ):
        if step != expected:
            return False
        expected *= size
    return True
