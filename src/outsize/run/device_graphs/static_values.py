"""Holds values in memory that stays where it is, for graphs, which read and write fixed addresses.

A value keeps its strides, and its place within 16 bytes: kernels choose by both, and sums have another order
then. So the span of its memory is copied, from its first element to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

_WIDEST: Final = 16  # Bytes that a kernel reads at once, where an address is a multiple of it.


@final
class ValueLayout(NamedTuple):
    """Says how a tensor lies in memory; `start` is its place within 16 bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: int


def layout_of(tensor: Tensor) -> ValueLayout:
    """Returns how the tensor lies in memory."""
    start = tensor.data_ptr() % _WIDEST
    return ValueLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, start)


def is_plain(tensor: object) -> bool:
    """Returns whether a span of memory is all of the tensor."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def empty_as(tensor: Tensor) -> Tensor:
    """Returns new memory for a tensor, with its layout."""
    ahead = tensor.data_ptr() % _WIDEST // tensor.element_size()
    memory = torch.empty(ahead + _span(tensor), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), ahead)


@torch.no_grad()
def copy_values(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies values into tensors of their layouts, with few launches."""
    pairs = [(a, b) for a, b in zip(into, values, strict=True) if b.numel()]
    if pairs:
        torch.ops.aten._foreach_copy_.default([_flat(a) for a, _ in pairs], [_flat(b) for _, b in pairs])


def copies_of(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies with the layouts of the values."""
    copies = [empty_as(value) for value in values]
    copy_values(copies, values)
    return copies


def _span(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: Tensor) -> Tensor:
    # What autograd has saved while a graph was recorded may be written: the graph computes it anew.
    return tensor.data.as_strided((_span(tensor),), (1,), tensor.storage_offset())
