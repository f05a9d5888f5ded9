"""Moves numbers between the host and devices, so that the host waits as rarely as it can.

host_numbers([3, a, b])      one wait for all tensors of a device
flag = HostCopy(tensor)      none: the copy is launched, and `value` is there once the device was that far
launched_to(device, host)    none: the copy is launched from page-locked memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from outsize.device.accelerators import is_accelerator, lacks


def host_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Returns numbers and 0-dim tensors as numbers of Python; what counts is an int.

    All tensors of a device are copied to the host at once, as float64, which holds every count.
    """
    numbers: list[float] = [0.0 if isinstance(value, Tensor) else value for value in values]
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            places.setdefault(value.device, []).append(place)
    for device, members in places.items():
        tensors = [value for place in members if isinstance(value := values[place], Tensor)]
        if not is_accelerator(device) or lacks(device, "float64"):
            read = [tensor.item() for tensor in tensors]
        else:
            read = torch.stack([tensor.detach().double() for tensor in tensors]).tolist()
        for place, tensor, number in zip(members, tensors, read, strict=True):
            is_count = not tensor.is_floating_point()
            numbers[place] = int(number) if is_count else float(number)
    return numbers


def launched_to(device: str | torch.device, values: Tensor) -> Tensor:
    """Returns a copy of the host's tensor on a device; an accelerator copies it while the host goes on."""
    if not is_accelerator(device) or lacks(device, "streams"):
        return values.to(device)
    staging = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return staging.to(device, non_blocking=True)


@final
class HostCopy:
    """Holds a copy of a small tensor on the host, which is launched here and awaited by nobody."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._copy = tensor.detach()
        if is_accelerator(tensor.device) and not lacks(tensor.device, "streams"):
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.accelerator.current_stream(tensor.device).record_event()

    def is_there(self) -> bool:
        """Returns whether `value` can be read without waiting; it does not wait itself."""
        return self._event is None or self._event.query()

    @property
    def value(self) -> Tensor:
        """Returns the copy; where `is_there` is false its values are not known yet."""
        return self._copy
