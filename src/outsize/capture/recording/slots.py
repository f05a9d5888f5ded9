"""Identifies values while recording: which slot, weight or constant a tensor is.

A tensor is identified by Python identity first (everything seen is referenced, so ids stay unique), then by
memory layout, for views that C code returns as new objects. A fake that no call returned has no slot:
`UnknownTensor`, never a baked constant. A real tensor that existed before recording is a constant, by
reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor

from outsize.capture.fakes.fake_model import is_fake
from outsize.program.tape import Meta, Ref, Weight
from outsize.program.tree import leaves


@final
class UnknownTensor(Exception):
    """Says that a tensor was made during recording by code that was not watched."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(f"{tuple(tensor.shape)} {tensor.dtype}")
        self.tensor = tensor


@final
class Slots:
    """Allocates slots and looks them up."""

    def __init__(self, weights: dict[int, Weight], strays: list[Tensor]) -> None:
        self.weights, self._strays = weights, strays
        self.metas: list[Meta] = []
        self.constants: dict[int, Tensor] = {}
        self.storages = 0  # Counts the storages that have a number.
        # The tensors of each storage, with their slots; references to them keep ids unique.
        self._kept: dict[int, list[tuple[int, Tensor]]] = {}
        self._slot_of: dict[int, int] = {}
        self._by_layout: dict[Any, int] = {}
        self._storages: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def define(self, tensor: Tensor) -> Ref:
        """Defines a new slot for a tensor, also when the tensor has one already."""
        slot = len(self.metas)
        self.metas.append(self._meta(tensor))
        self.stand_for(slot, tensor)
        return Ref(slot)

    def define_leaf(self, leaf: Any) -> Any:
        """Defines a slot for a leaf of a result that is a tensor, and returns any other leaf as it is."""
        return self.define(leaf) if isinstance(leaf, Tensor) else leaf

    def stand_for(self, slot: int, tensor: Tensor) -> None:
        """Assigns the tensor to a slot from now on."""
        storage = self.metas[slot].storage
        self._kept.setdefault(storage, []).append((slot, tensor))
        self._slot_of[id(tensor)] = slot
        self._by_layout[_layout(tensor)] = slot
        self.know(tensor, storage)

    def note_write(self, storage: int) -> None:
        """Corrects the metas of tensors that require a gradient since their storage was written."""
        for slot, tensor in self._kept.get(storage, ()):
            if tensor.requires_grad and not self.metas[slot].requires_grad:
                self.metas[slot] = replace(self.metas[slot], requires_grad=True)
                self._by_layout[_layout(tensor)] = slot

    def extend(self, metas: Iterable[Meta], storages: int) -> None:
        """Adds slots of tensors that were never made, and `storages` numbers of their memory."""
        self.metas += metas
        self.storages += storages

    def slot_of(self, tensor: Tensor) -> int | None:
        """Returns the slot that was assigned to this very tensor, if any."""
        return self._slot_of.get(id(tensor))

    def assigned(self) -> tuple[dict[int, int], dict[Any, int]]:
        """Returns which slots tensors have now, by their ids and by their layouts."""
        return dict(self._slot_of), dict(self._by_layout)

    def assign(self, assigned: tuple[dict[int, int], dict[Any, int]]) -> None:
        """Gives tensors the slots that they had (`assigned`)."""
        self._slot_of, self._by_layout = (dict(each) for each in assigned)

    def refer(self, tensor: Tensor) -> Ref | Weight:
        """Returns the reference for an argument. Raises UnknownTensor."""
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
        """Returns the number of a tensor's storage, a new one if it has none."""
        if tensor.layout is not torch.strided:
            return -id(tensor)
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            self._number(tensor, self.storages)
            self.storages += 1
        return self._storages[key]

    def number_of(self, tensor: Tensor) -> int | None:
        """Returns the number of a tensor's storage if it has one."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def know(self, tensor: Tensor, number: int | None) -> None:
        """Assigns a number to a tensor's storage."""
        if number is not None and tensor.layout is torch.strided:
            self._number(tensor, number)

    def _number(self, tensor: Tensor, number: int) -> None:
        """Assigns a number to a storage for as long as it lives; another one may get its address then."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        self._storages[key] = number
        self._alive[key] = weakref.ref(memory, partial(_drop, key, self._storages, self._alive))

    def will_require_grad(self, slot: int) -> None:
        """Corrects the meta of a floating tensor that autograd has not seen yet."""
        meta = self.metas[slot]
        if meta.dtype.is_floating_point or meta.dtype.is_complex:
            self.metas[slot] = replace(meta, requires_grad=True)

    def knows_storage(self, tensor: Tensor) -> bool:
        """Returns whether this memory has a number."""
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


def _drop(key: int, numbers: dict[int, int], alive: dict[int, weakref.ref[Any]], _: Any) -> None:
    """Forgets the number of a storage that has died."""
    del numbers[key], alive[key]


def _layout(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    place = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns tensors that an ATen op writes without a version counter that shows it.

    These are running statistics of batch normalisation, whose kernels count none, and whatever an inference
    region makes.
    """
    name = _text_of(op)
    if "batch_norm" in name and "backward" not in name and len(args) > 5:
        trains = "with_update" in name or args[5] is True
        return [t for t in args[3:5] if trains and isinstance(t, Tensor)]
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {**{a.name: value for a, value in zip(schema.arguments, args, strict=False)}, **kwargs}
    written = (values.get(a.name) for a in schema.arguments if a.is_write)
    return [t for t in leaves(tuple(written)) if isinstance(t, Tensor) and t.is_inference()]


# An op makes its text anew each time, and a recording asks at each call of one.
_text_of = lru_cache(maxsize=1024)(str)


def version(tensor: Tensor) -> int:
    """Returns how often the memory was written; -1 for tensors of an inference region."""
    return -1 if tensor.is_inference() else tensor._version
