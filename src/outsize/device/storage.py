"""Finds out whether other tensors live in a tensor's memory, by torch's count of a storage's holders."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def shares_storage(tensor: Tensor) -> bool:
    """Returns whether another live tensor, in Python or in the autograd engine, has the same storage.

    A sparse tensor has no storage of its own, so the answer is False.
    """
    return tensor.layout is torch.strided and _holders(tensor) > _holders_of_a_new_tensor()


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _holders_of_a_new_tensor() -> int:
    """Returns the count for a tensor that is alone; some torch versions count the storage's Python object."""
    return _holders(torch.empty(1))
