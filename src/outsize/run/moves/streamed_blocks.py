"""Problem: blocks are recomputed one at a time, yet what all of them have received fills the device.

    forward    block k computes      what block k - 1 keeps leaves
    backward   block k computes      what block k - 1 keeps comes back

A block keeps what it receives and what attention has returned in it; the rest is computed again
(run/stage/recompute.py). It leaves when its forward is launched, and is fetched when the block behind it
begins its backward, so the device holds what two blocks keep, however many there are. Copies are those of a
lane (run/host/copy_lane.py), behind and before computes by events.

Oracle: tests/parity/test_streamed_blocks.py, the plain loop to the bit, and real storages of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from outsize.run.host.copy_lane import CopyLane, Handle
from outsize.run.moves.activations import SavedTensors

LaneOf = Callable[[torch.device], CopyLane]


@final
class BlocksOnHost:
    """Holds what the blocks of one microbatch keep."""

    def __init__(self, lane_of: LaneOf, device: torch.device) -> None:
        self._lane = lane_of(device)
        self._last: BlockOnHost | None = None

    def begin(self, staying: Sequence[Tensor]) -> BlockOnHost:
        """Begins the forward of a block; the tensors of `staying` remain on the device."""
        self._last = BlockOnHost(self._lane, staying, self._last)
        return self._last


@final
class BlockOnHost:
    """Holds what one block keeps; `before` is the block that comes back next."""

    def __init__(self, lane: CopyLane, staying: Sequence[Tensor], before: BlockOnHost | None) -> None:
        self._lane, self._saved, self._before = lane, SavedTensors(lane, staying), before

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """Returns a handle, or the tensor itself where it stays on the device."""
        return self._saved.pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor on the device, and lets what the block before this one keeps come back."""
        tensor = self._saved.unpack(packed)
        self._lane.arrive(self._saved)
        if self._before is not None:
            self._before.fetch()
            self._before = None
        return tensor

    def leave(self) -> None:
        """Launches the copies to the host."""
        self._lane.send(self._saved)

    def fetch(self) -> None:
        """Launches the copies back."""
        self._lane.fetch(self._saved)
