"""Finds weights that share memory under several tensors, as after `decoder.data = encoder.data.t()`.

One tensor under two names is a tie, which torch and outsize see. Two tensors over one storage are not: each
has a gradient and an optimizer state of its own, and a copy of one of them ends what they have in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn


def overlapping(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Returns the pairs of names of distinct tensors that have bytes in common."""
    by_storage: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.numel() and type(tensor) in (Tensor, nn.Parameter):
            by_storage[tensor.untyped_storage()._cdata].append(name)
    pairs = (pair for names in by_storage.values() for pair in combinations(names, 2))
    return [(a, b) for a, b in pairs if tensors[a] is not tensors[b] and _overlap(tensors[a], tensors[b])]


def _overlap(one: Tensor, other: Tensor) -> bool:
    (first, end), (other_first, other_end) = _span(one), _span(other)
    if end <= other_first or other_end <= first:
        return False
    if one.dtype != other.dtype or (first, end) == (other_first, other_end):
        return True
    taken = torch.zeros(max(end, other_end) // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first byte of a tensor in its storage, and the byte after its last one."""
    last = sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def copies_that_share(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Returns, by id, copies of those of these tensors that share memory, which share memory alike."""
    named = {str(number): tensor for number, tensor in enumerate({id(t): t for t in tensors}.values())}
    sharing = dict.fromkeys(name for pair in overlapping(named) for name in pair)
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    for tensor in map(named.__getitem__, sharing):
        storage = tensor.untyped_storage()
        memory = storages.setdefault(storage._cdata, storage.clone())
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made = made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = made
    return copies
