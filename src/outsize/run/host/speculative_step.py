"""Steps an optimizer before the norm of all gradients is known, and rolls back where clipping was needed.

    try     a snapshot of a stage's weights and states is taken, then it steps as if nothing were clipped
    settle  the norm is within its limit: the step stands. Otherwise the snapshot is restored to the bit, new
            states are dropped, and a step with scaled gradients follows

Speculation, then validation, follows SuperOffload (arXiv 2509.21271). Deviations: bytes are restored, which
serves every optimizer that steps in parts (optimizer_step.py); gradients stay until the step is settled. So
the host holds 4 + 8 bytes a parameter more with AdamW in fp32, once it has states. Norms are computed in the
thread that steps. Complexity: a copy of what a step writes. Oracle: tests/parity/test_offload_parity.py, with
norms that are under, over, and both, against the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.run.host.flat_buffer import Allocate, heap, packed
from outsize.run.transport.wire_layout import WireLayout


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """Records parameters before their step: tensors with their values, and which states existed."""

    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    states: dict[nn.Parameter, dict[str, Any]]
    values: list[tuple[Tensor, Tensor]]

    def restore(self) -> None:
        """Restores values and states."""
        for tensor, value in self.values:
            tensor.copy_(value)
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        for parameter, state in self.states.items():
            self.optimizer.state[parameter] = state


@final
class Speculation:
    """Takes steps that can be rolled back; `steps` were settled, of which `taken_back` were rolled back."""

    def __init__(self, room: Allocate) -> None:
        """Creates the speculation; `room` allocates host memory for snapshots."""
        self._room = room
        self._rooms: list[Tensor] = []
        self._tried: list[_Snapshot] = []
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.steps = self.taken_back = 0

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the snapshots."""
        return sum(room.numel() for room in self._rooms)

    @contextmanager
    def trying(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Runs a reversible step of these parameters within the context; their norms go to `norms`."""
        with torch.no_grad():
            self._tried.append(self._snapshot(optimizer, parameters))
            for parameter in parameters:
                assert parameter.grad is not None
                self.norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        yield

    @torch.no_grad()
    def settle(self, *, stands: bool) -> None:
        """Ends all tried steps: their gradients are dropped if they stand, and they are rolled back
        otherwise.
        """
        for snapshot in self._tried:
            if not stands:
                snapshot.restore()
            for parameter in snapshot.parameters if stands else ():
                parameter.grad = None
        self.steps += bool(self._tried)
        self.taken_back += bool(self._tried) and not stands
        self._tried.clear()
        self.norms.clear()

    def _snapshot(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> _Snapshot:
        states = {p: dict(optimizer.state[p]) for p in parameters if p in optimizer.state}
        state_values = (value for state in states.values() for value in state.values())
        tensors = [*parameters, *(value for value in state_values if isinstance(value, Tensor))]
        parts, size = packed(map(WireLayout.of, tensors))
        buffer = self._buffer(len(self._tried), size)
        values = [part.within(buffer) for part in parts]
        for value, tensor in zip(values, tensors, strict=True):
            value.copy_(tensor)
        return _Snapshot(optimizer, parameters, states, list(zip(tensors, values, strict=True)))

    def _buffer(self, number: int, size_bytes: int) -> Tensor:
        """Returns the snapshot buffer of the n-th step of a row; it grows once there are states."""
        if number == len(self._rooms):
            self._rooms.append(heap(0))
        if self._rooms[number].numel() < size_bytes:
            self._rooms[number] = heap(0)  # The old buffer is freed first, so that both never exist at once.
            self._rooms[number] = self._room(size_bytes)
        return self._rooms[number]
