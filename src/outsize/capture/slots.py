"""Identity of values while recording: which slot, weight or constant a tensor is.

By Python identity first (everything seen is kept alive, so ids stay unique), then by memory layout, for
views that C code hands out anew. A fake that nobody produced has no slot: `UnknownTensor`, never a
baked constant. A real tensor that existed before recording is a constant, by reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from outsize.capture.fakes import is_fake
from outsize.program.tape import Meta, Ref, Weight


@final
class UnknownTensor(Exception):
    """A tensor that was born during recording by something that nobody watched."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(f"{tuple(tensor.shape)} {tensor.dtype}")
        self.tensor = tensor


@final
class Slots:
    """Allocates slots and finds them again."""

    def __init__(self, weights: dict[int, Weight], strays: list[Tensor]) -> None:
        self.weights, self._strays = weights, strays
        self.metas: list[Meta] = []
        self.constants: dict[int, Tensor] = {}
        self.storages = 0  # how many have a number
        self._kept: list[Tensor] = []  # what keeps ids unique
        self._slot_of: dict[int, int] = {}
        self._by_layout: dict[Any, int] = {}
        self._storages: dict[int, int] = {}

    def define(self, tensor: Tensor) -> Ref:
        """A new slot for a tensor, also when the tensor has one already."""
        slot = len(self.metas)
        self.metas.append(self._meta(tensor))
        self.stand_for(slot, tensor)
        return Ref(slot)

    def stand_for(self, slot: int, tensor: Tensor) -> None:
        """From now on the tensor is what this slot holds."""
        self._kept.append(tensor)
        self._slot_of[id(tensor)] = slot
        self._by_layout[_layout(tensor)] = slot
        self.know(tensor, self.metas[slot].storage)

    def extend(self, metas: Iterable[Meta], storages: int) -> None:
        """Slots of tensors that were never made, and so many numbers of their memory."""
        self.metas += metas
        self.storages += storages

    def slot_of(self, tensor: Tensor) -> int | None:
        """Its slot, of a tensor that has one itself."""
        return self._slot_of.get(id(tensor))

    def refer(self, tensor: Tensor) -> Ref | Weight:
        """The reference for an argument; raises UnknownTensor."""
        weight = self.weights.get(id(tensor))
        if weight is not None:
            return weight
        slot = self._slot_of.get(id(tensor))
        slot = self._by_layout.get(_layout(tensor)) if slot is None else slot
        if slot is not None:
            return Ref(slot)
        if is_fake(tensor) or any(tensor is stray for stray in self._strays):
            raise UnknownTensor(tensor)
        ref = self.define(tensor)
        self.constants[ref.slot] = tensor
        return ref

    def storage(self, tensor: Tensor) -> int:
        """Small number of the memory that a tensor lives in."""
        if tensor.layout is not torch.strided:
            return -id(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            self._storages[key] = self.storages
            self.storages += 1
        return self._storages[key]

    def number_of(self, tensor: Tensor) -> int | None:
        """The same where it has a number by now."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def know(self, tensor: Tensor, number: int | None) -> None:
        """Its memory has this number."""
        if number is not None and tensor.layout is torch.strided:
            self._storages[tensor.untyped_storage()._cdata] = number

    def will_require_grad(self, slot: int) -> None:
        """Correct the meta of a floating tensor that autograd has not seen yet."""
        meta = self.metas[slot]
        if meta.dtype.is_floating_point or meta.dtype.is_complex:
            self.metas[slot] = replace(meta, requires_grad=True)

    def knows_storage(self, tensor: Tensor) -> bool:
        """Has this memory been seen?"""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def _meta(self, tensor: Tensor) -> Meta:
        return Meta(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if tensor.layout is torch.strided else (),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            storage=self.storage(tensor),
        )


def _layout(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)
