"""How writes into memory are seen: by version counters, and by name where these do not count."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outsize.program.tree import leaves


def written_by(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an ATen op writes and that no version tells of: running statistics of batch
    normalisation, whose kernels count none, and whatever an inference region makes.
    """
    if "batch_norm" in str(op) and "backward" not in str(op) and len(args) > 5:
        trains = "with_update" in str(op) or args[5] is True
        return [t for t in args[3:5] if trains and isinstance(t, Tensor)]
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**{a.name: value for a, value in zip(schema.arguments, args, strict=False)}, **kwargs}
    found = (given.get(a.name) for a in schema.arguments if a.is_write)
    return [t for t in leaves(tuple(found)) if isinstance(t, Tensor) and t.is_inference()]


def version(tensor: Tensor) -> int:
    """How often the memory was written; unknown for tensors of an inference region."""
    return -1 if tensor.is_inference() else tensor._version
