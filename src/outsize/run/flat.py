"""Flat: weights one behind the other in one buffer of the host, so that one copy moves them all.

    values     | layer.weight ...... | bias . | norm . |      the model's own parameters are views of it
    gradients  | layer.weight ...... | bias . | norm . |      made when the first gradient lands that is kept

Each begins at a multiple of ALIGN bytes, as torch's allocations do. The memory is what was asked for: torch's
own allocator of page-locked memory rounds each piece up to a power of two, which takes up to twice as much.
Strides are kept (run/layout.py), since kernels choose by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.layout import Layout

ALIGN: Final = 64
Room = Callable[[int], Tensor]
Berth = tuple[Tensor, Tensor]  # as a tensor, and its bytes


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A weight's place in a buffer, in bytes."""

    first: int
    layout: Layout

    def bytes_in(self, buffer: Tensor, base: int = 0) -> Tensor:
        """Its bytes in a buffer in which the whole begins at `base`."""
        return buffer[base + self.first : base + self.first + self.layout.size_bytes]

    def within(self, buffer: Tensor, base: int = 0) -> Tensor:
        """The weight there, with a version counter of its own."""
        flat = self.bytes_in(buffer, base).view(self.layout.dtype)
        return flat.as_strided(self.layout.shape, self.layout.stride).data

    def berth(self, buffer: Tensor) -> Berth:
        """Both of a buffer."""
        return self.within(buffer), self.bytes_in(buffer)


@final
class Block:
    """Weights that come and go together; `masters` are the model's own parameters."""

    def __init__(self, masters: Mapping[str, nn.Parameter], room: Room) -> None:
        self.masters, self._room = dict(masters), room
        parts, self.size_bytes = packed(map(Layout.of, masters.values()))
        self.parts, self.values = dict(zip(masters, parts, strict=True)), room(self.size_bytes)
        self.gradients: Tensor | None = None
        for name, master in masters.items():
            self.adopt(name, master)

    @property
    def host_bytes(self) -> int:
        """Of weights, and of gradients if they were ever kept."""
        return self.values.numel() + (0 if self.gradients is None else self.gradients.numel())

    @torch.no_grad()
    def adopt(self, name: str, master: nn.Parameter) -> None:
        """Make the model's parameter a view of the buffer, with the values it has.

        Raises BadOption when it is another tensor than the one that the buffer was made for.
        """
        part = self.parts[name]
        view = part.within(self.values)
        if master.data_ptr() != view.data_ptr() or master.device != view.device:
            if Layout.of(master) != part.layout:
                raise BadOption(
                    f"{name} has changed its shape or dtype, and its place on the host has not",
                    numbers=f"{list(part.layout.shape)} {part.layout.dtype} before, "
                    f"{list(master.shape)} {master.dtype} now",
                    next_step="outsize.parallelize(...) anew",
                )
            view.copy_(master)
            gradient, master.grad = master.grad, None
            master.data = view
            master.grad = None if gradient is None else gradient.to(view.device)
        self.masters[name] = master

    def kept(self, name: str, gradient: Tensor) -> Berth:
        """Where a gradient of this layout lies that nobody takes."""
        if self.gradients is None:
            self.gradients = self._room(self.size_bytes)
        return Part(self.parts[name].first, Layout.of(gradient)).berth(self.gradients)


def heap(size_bytes: int) -> Tensor:
    """Ordinary memory."""
    return torch.empty(size_bytes, dtype=torch.uint8)


Going = tuple[Block, str, Tensor]  # a gradient that leaves the device, and the weight that it is of


def kept(gradients: Sequence[Going]) -> list[Berth]:
    """Each beside its weight, until somebody drops it."""
    return [block.kept(name, gradient) for block, name, gradient in gradients]


def packed(layouts: Iterable[Layout]) -> tuple[list[Part], int]:
    """One behind the other, and the bytes of all."""
    parts, size = list[Part](), 0
    for layout in layouts:
        parts.append(Part(size, layout))
        size += -(-layout.size_bytes // ALIGN) * ALIGN
    return parts, size
