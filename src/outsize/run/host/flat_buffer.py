"""Packs weights one behind the other into one buffer of the host, so that one copy moves them all.

    values     | layer.weight ...... | bias . |      the model's own parameters are views of it
    gradients  | layer.weight ...... | bias . |   made when a gradient is first stored here
    cast       | layer.w. | b. |                  where devices have the weights as autocast casts them alone

Each weight begins at a multiple of ALIGN bytes, as torch's allocations do. Exactly the needed memory is
allocated: torch's own allocator of page-locked memory rounds each piece up to a power of two, which takes up
to twice as much. Strides are unchanged (run/transport/wire_layout.py), since kernels choose by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.transport.wire_layout import WireLayout

ALIGN: Final = 64
Allocate = Callable[[int], Tensor]  # size in bytes -> flat bytes
Destination = tuple[Tensor, Tensor]  # where a gradient goes, as a tensor and as flat bytes


@final
@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Locates one weight in a buffer, in bytes."""

    first: int
    layout: WireLayout

    def bytes_in(self, buffer: Tensor, base: int = 0) -> Tensor:
        """Returns the weight's bytes in a buffer in which the block begins at `base`."""
        return buffer[base + self.first : base + self.first + self.layout.size_bytes]

    def within(self, buffer: Tensor, base: int = 0) -> Tensor:
        """Returns the weight in the buffer as a tensor with its own version counter."""
        flat = self.bytes_in(buffer, base).view(self.layout.dtype)
        return flat.as_strided(self.layout.shape, self.layout.stride).data

    def destination(self, buffer: Tensor) -> Destination:
        """Returns the weight's tensor and bytes in a buffer."""
        return self.within(buffer), self.bytes_in(buffer)


@final
class WeightBlock:
    """Holds weights that move together in one host buffer; `masters` are the model's own parameters."""

    def __init__(self, masters: Mapping[str, nn.Parameter], room: Allocate) -> None:
        self.masters, self._room = dict(masters), room
        parts, self.size_bytes = packed(map(WireLayout.of, masters.values()))
        self.parts, self.values = dict(zip(masters, parts, strict=True)), room(self.size_bytes)
        self.gradients: Tensor | None = None
        self._cast: dict[torch.dtype, HostCast] = {}
        for name, master in masters.items():
            self.adopt(name, master)

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the weights, and of the gradients and casts if buffers for them were made."""
        made = [cast.values for cast in self._cast.values() if cast.values is not None]
        return sum(buffer.numel() for buffer in (self.values, self.gradients, *made) if buffer is not None)

    def cast(self, dtype: torch.dtype) -> HostCast:
        """Returns the block as autocast casts its weights."""
        if dtype not in self._cast:
            self._cast[dtype] = HostCast(self, dtype, self._room)
        return self._cast[dtype]

    def casts(self) -> Iterable[HostCast]:
        """Returns all that were made."""
        return self._cast.values()

    @torch.no_grad()
    def adopt(self, name: str, master: nn.Parameter) -> None:
        """Makes the model's parameter a view of the buffer and copies its values there.

        Raises BadOption when its shape or dtype differs from what the buffer was made for.
        """
        part = self.parts[name]
        view = part.within(self.values)
        if master.data_ptr() != view.data_ptr() or master.device != view.device:
            if WireLayout.of(master) != part.layout:
                raise BadOption(
                    f"{name} has changed its shape or dtype, and its buffer on the host has not",
                    numbers=f"{list(part.layout.shape)} {part.layout.dtype} before, "
                    f"{list(master.shape)} {master.dtype} now",
                    next_step="call outsize.parallelize(...) again",
                )
            view.copy_(master)
            gradient, master.grad = master.grad, None
            master.data = view
            master.grad = None if gradient is None else gradient.to(view.device)
        self.masters[name] = master

    def gradient_destination(self, name: str, gradient: Tensor) -> Destination:
        """Returns where a gradient of this layout is stored until the caller drops it."""
        if self.gradients is None:
            self.gradients = self._room(self.size_bytes)
        return BufferSlice(self.parts[name].first, WireLayout.of(gradient)).destination(self.gradients)


@final
class HostCast:
    """Holds the weights of a block in a lower precision, cast anew in each step.

    A weight may have changed between steps in a way that no counter tells, so the values of the last step
    are never used.
    """

    def __init__(self, block: WeightBlock, dtype: torch.dtype, room: Allocate) -> None:
        """Makes no buffer yet."""
        self._block, self._room = block, room
        layouts = (replace(part.layout, dtype=dtype) for part in block.parts.values())
        parts, self.size_bytes = packed(layouts)
        self.parts = dict(zip(block.parts, parts, strict=True))
        self.values: Tensor | None = None
        self._casting: Future[Tensor] | None = None

    def begin(self, caster: Executor) -> None:
        """Begins to cast for a step."""
        self._casting = caster.submit(self._cast)

    def of_this_step(self) -> Tensor:
        """Returns the bytes; where nothing has begun, the first call of a step casts the weights."""
        if self._casting is None:
            self._casting = Future[Tensor]()
            self._casting.set_result(self._cast())
        return self._casting.result()

    def end(self) -> None:
        """Ends a step: weights may change from now on."""
        casting, self._casting = self._casting, None
        if casting is not None:
            casting.result()

    @torch.no_grad()
    def _cast(self) -> Tensor:
        if self.values is None:
            self.values = self._room(self.size_bytes)
        for name, part in self.parts.items():
            part.within(self.values).copy_(self._block.masters[name].detach())
        return self.values


def heap(size_bytes: int) -> Tensor:
    """Allocates ordinary, pageable memory."""
    return torch.empty(size_bytes, dtype=torch.uint8)


OutgoingGradient = tuple[
    WeightBlock, str, Tensor
]  # the block of the weight, its name, the gradient on the device


def block_destinations(gradients: Sequence[OutgoingGradient]) -> list[Destination]:
    """Returns a destination in its weight's block for each gradient."""
    return [block.gradient_destination(name, gradient) for block, name, gradient in gradients]


def packed(layouts: Iterable[WireLayout]) -> tuple[list[BufferSlice], int]:
    """Packs layouts one behind the other; returns their slices and the bytes of all."""
    parts, size = list[BufferSlice](), 0
    for layout in layouts:
        parts.append(BufferSlice(size, layout))
        size += -(-layout.size_bytes // ALIGN) * ALIGN
    return parts, size
