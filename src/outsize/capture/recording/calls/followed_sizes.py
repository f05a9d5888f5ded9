"""Follows the lengths of tensors for which a forward asks, so that they can be inputs of a program.

b, n, _ = x.shape                 n is symbolic where the lengths of the slot of x vary
x.size(1), x.numel(), x.stride()  the same
x.nbytes                          a number that nobody knows at another length: Unfollowed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from outsize.capture.guards.symbolic_numbers import PlantedNumbers
from outsize.capture.recording.slots import Slots
from outsize.program.python_reads import SizeOf
from outsize.program.tree import leaves

_SIZES: Final = frozenset({Tensor.shape.__get__, Tensor.size})  # pyright: ignore[reportAttributeAccessIssue]
_COUNTS: Final = frozenset({Tensor.numel, Tensor.nelement, torch.numel})
# They return numbers that are the same at all lengths.
_FIXED: Final = frozenset(
    {Tensor.dim, Tensor.ndimension, Tensor.ndim.__get__, Tensor.element_size, Tensor.itemsize.__get__}  # pyright: ignore[reportAttributeAccessIssue]
    | {Tensor.get_device, Tensor.data_ptr, Tensor._version.__get__}  # pyright: ignore[reportAttributeAccessIssue]
)


@final
class FollowedSizes:
    """Makes lengths symbolic where they vary."""

    def __init__(self, numbers: PlantedNumbers, slots: Slots) -> None:
        self._numbers, self._slots = numbers, slots
        self._varying = {size.slot for size in numbers.sizes}

    def of(self, function: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> Any:
        """Returns what a call has returned, with symbolic lengths. Raises Unfollowed for another number that
        may be a length.
        """
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        slot = None if tensor is None else self._slots.slot_of(tensor)
        if slot not in self._varying or tensor is None or slot is None:
            return out
        if function in _SIZES:
            return self._asked(slot, "size", tuple(tensor.shape), out, (*args[1:], *kwargs.values()))
        if function is Tensor.stride:
            return self._asked(slot, "stride", tensor.stride(), out, (*args[1:], *kwargs.values()))
        if function in _COUNTS:
            return math.prod(self._all(slot, "size", tuple(tensor.shape)))
        if function is Tensor.__len__:
            return self._all(slot, "size", tuple(tensor.shape))[0]
        if function not in _FIXED and any(type(leaf) is int for leaf in leaves(out)):
            self._numbers.refuse_all()
        return out

    def _asked(self, slot: int, kind: Any, numbers: tuple[int, ...], out: Any, dims: tuple[Any, ...]) -> Any:
        found = self._all(slot, kind, numbers)
        if dims and dims[0] is not None:
            return found[dims[0]]
        return torch.Size(found) if kind == "size" else type(out)(found)

    def _all(self, slot: int, kind: Literal["size", "stride"], numbers: tuple[int, ...]) -> list[Any]:
        return [
            self._numbers.symbolic_size(SizeOf(slot, dim, kind, number)) for dim, number in enumerate(numbers)
        ]
