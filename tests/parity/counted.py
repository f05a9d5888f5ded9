"""A device with a counter: bytes of the tensors that are made under it, but for those that are the host's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Device(TorchDispatchMode):
    """Counts them at their birth and end. `host`: tensors that count as being elsewhere."""

    def __init__(self, host: Callable[[], Iterable[Tensor]] = tuple) -> None:
        super().__init__()
        self._host, self._known, self.alive, self.peak = host, dict[int, int](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(found):
            if tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or storage.data_ptr() in {tensor.data_ptr() for tensor in self._host()}:
            return
        self._known[key] = storage.nbytes()
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.alive -= self._known.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
