"""Tracks which memory is alive while an instruction runs, to find what its temporaries need at the peak.

Fakes have storages without memory, and a weak reference to one tells when nothing, autograd included, refers
to it any more. The excess of an instruction is its peak less its end: what is alive at the end are results
and saved tensors, which are counted elsewhere.

    born      a   b   c            a: temporary of 8, b: saved, 8, c: result, 4
    alive     8  16  (a dies) 12   worst 16, end 12: excess 4

Complexity: O(results) per op. Oracle: tests/unit/capture/costs/test_workspace.py counts by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor


@final
class Storages:
    """Tracks storages made in the running instruction; `died(storage)` is called at the end of each one's
    life.
    """

    def __init__(self, died: Callable[[int], None]) -> None:
        self._died = died
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}  # The sizes are those of this instruction's storages.
        self._now = self._worst = 0

    def start(self) -> None:
        """Begins an instruction, which does not count what is alive by now."""
        self._sizes.clear()
        self._now = self._worst = 0

    def born(self, results: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Counts the results of an op whose memory is new and no argument's."""
        for tensor in results:
            key = storage_key(tensor)
            if key not in self._alive and tensor.layout is torch.strided and not _among(key, inputs):
                self._begin(tensor.untyped_storage())
        self._worst = max(self._worst, self._now)

    def _begin(self, memory: torch.UntypedStorage) -> None:
        key = memory._cdata
        self._alive[key] = weakref.ref(memory, partial(self._end, key))
        self._sizes[key] = memory.nbytes()
        self._now += self._sizes[key]

    def excess_bytes(self) -> int:
        """Returns the peak so far less what is alive now."""
        return self._worst - self._now

    @property
    def worst_bytes(self) -> int:
        """Returns the peak so far."""
        return self._worst

    def _end(self, key: int, _: Any) -> None:
        del self._alive[key]
        self._now -= self._sizes.pop(key, 0)
        self._died(key)


def storage_key(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, or of the tensor where it has no strides; unique while it
    lives.
    """
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def kept_storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Returns the storages of tensors by their `storage_key`.

    Whoever holds the dict keeps them: a library may put another storage into a weight while it runs, and the
    address of one that died may be that of any tensor.
    """
    return {storage_key(t): t.untyped_storage() if t.layout is torch.strided else t for t in tensors}


def storage_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's storage, or of its elements where it has no strides."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.dtype.itemsize


def _among(key: int, tensors: Iterable[Tensor]) -> bool:
    return any(storage_key(t) == key for t in tensors)
