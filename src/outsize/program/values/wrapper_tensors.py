"""Takes tensors apart that are made of other tensors, and puts them together again.

Quantized weights and states of optimizers (torchao's, for example) are subclasses of Tensor: they look like
one tensor of 16 or 32 bits and hold codes and scales. torch's own protocol for them is `__tensor_flatten__`,
which names the inner tensors and returns a context, and `__tensor_unflatten__`, which makes the tensor of
both. What stores, sends, compares or counts tensors does so with the inner ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn


def is_wrapper(tensor: Tensor) -> bool:
    """Tells whether a tensor is made of others, and follows torch's protocol for that.

    A tensor that ranks divide (DTensor, which has `to_local`) does so too, and is not meant.
    """
    kind = type(tensor)
    follows = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return follows and not hasattr(kind, "to_local")


def plain_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of which a tensor is made, by their path in it; a plain one has itself, as ""."""
    if not is_wrapper(tensor):
        return {"": tensor}
    names, _ = _flattened(tensor)
    return {
        f"{name}.{path}".removesuffix("."): part
        for name in names
        for path, part in plain_parts(getattr(tensor, name)).items()
    }


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of all that a tensor is made of."""
    return sum(part.numel() * part.element_size() for part in plain_parts(tensor).values())


def copied_by_parts(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor that is made of others, with copies of these."""
    parts = {path: part.detach().clone() for path, part in plain_parts(tensor).items()}
    made = WrapperStructure.of(tensor).built(parts)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


@final
@dataclass(frozen=True, slots=True)
class WrapperStructure:
    """Says how a tensor is made of others, without their values; a plain tensor is its `twin` on meta."""

    twin: Tensor
    kind: type[Any] | None = None
    context: Any = None
    inner: Mapping[str, WrapperStructure] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> WrapperStructure:
        """Returns the structure of a tensor."""
        plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if not is_wrapper(tensor):
            return cls(plain)
        names, context = _flattened(tensor)
        return cls(plain, type(tensor), context, {name: cls.of(getattr(tensor, name)) for name in names})

    def twins(self) -> dict[str, Tensor]:
        """Returns tensors on meta for the plain parts, by their path, as `plain_parts` has them."""
        if self.inner is None:
            return {"": self.twin}
        return {
            f"{name}.{path}".removesuffix("."): twin
            for name, structure in self.inner.items()
            for path, twin in structure.twins().items()
        }

    def built(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns the tensor that is made of these plain parts."""
        if self.kind is None or self.inner is None:
            return parts[""]
        inner = {}
        for name, structure in self.inner.items():
            own = {path.removeprefix(name).removeprefix("."): part for path, part in parts.items()
                   if path == name or path.startswith(f"{name}.")}  # fmt: skip
            inner[name] = structure.built(own)
        return self.kind.__tensor_unflatten__(inner, self.context, self.twin.shape, self.twin.stride())


def _flattened(tensor: Any) -> tuple[list[str], Any]:
    return tensor.__tensor_flatten__()
