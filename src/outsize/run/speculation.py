"""Speculation: a norm of all gradients is known only at the end, and the optimizer is to step before.

    try       a stage's weights and states are put by, then it steps as if nothing were clipped
    settle    the norm is not over its limit: that was the step. Over it: all is put back, to the bit, states
              that were not there are dropped, and a step follows with gradients that are scaled

Speculation, then validation, of SuperOffload (arXiv 2509.21271). Deviations: bytes are put back, which
serves every optimizer that steps in parts (landing.py); gradients are kept until they are settled. So the
host has 4 + 8 bytes a parameter more with AdamW in fp32, once states are there. Norms are taken in the
thread that steps. Complexity: a copy of what a step writes.
Oracle: tests/parity/test_offload_parity.py, norms that are under, over, and both, against the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.run.flat import Room, heap, packed
from outsize.run.layout import Layout


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """Parameters before their step: tensors with their values, and which states there were."""

    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    states: dict[nn.Parameter, dict[str, Any]]
    values: list[tuple[Tensor, Tensor]]

    def put_back(self) -> None:
        """All as it was."""
        for tensor, value in self.values:
            tensor.copy_(value)
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        for parameter, state in self.states.items():
            self.optimizer.state[parameter] = state


@final
class Speculation:
    """Steps that may be taken back; `steps` were settled, of which `taken_back` were."""

    def __init__(self, room: Room) -> None:
        """`room`: the host's memory for what is put by."""
        self._room = room
        self._rooms: list[Tensor] = []
        self._tried: list[_Before] = []
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.steps = self.taken_back = 0

    @property
    def host_bytes(self) -> int:
        """Of what is put by."""
        return sum(room.numel() for room in self._rooms)

    @contextmanager
    def trying(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A step of these parameters, which keep their gradients; `norms` has those."""
        with torch.no_grad():
            self._tried.append(self._put_by(optimizer, parameters))
            for parameter in parameters:
                assert parameter.grad is not None
                self.norms[parameter] = torch.linalg.vector_norm(parameter.grad)
        yield

    @torch.no_grad()
    def settle(self, *, stands: bool) -> None:
        """What was tried is done, and its gradients are dropped; or it is as if it had not been."""
        for before in self._tried:
            if not stands:
                before.put_back()
            for parameter in before.parameters if stands else ():
                parameter.grad = None
        self.steps += bool(self._tried)
        self.taken_back += bool(self._tried) and not stands
        self._tried.clear()
        self.norms.clear()

    def _put_by(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> _Before:
        states = {p: dict(optimizer.state[p]) for p in parameters if p in optimizer.state}
        kept = (value for state in states.values() for value in state.values())
        tensors = [*parameters, *(value for value in kept if isinstance(value, Tensor))]
        parts, size = packed(map(Layout.of, tensors))
        room = self._of(len(self._tried), size)
        values = [part.within(room) for part in parts]
        for value, tensor in zip(values, tensors, strict=True):
            value.copy_(tensor)
        return _Before(optimizer, parameters, states, list(zip(tensors, values, strict=True)))

    def _of(self, number: int, size_bytes: int) -> Tensor:
        """Room for the step of this number in a row; larger once there are states."""
        if number == len(self._rooms):
            self._rooms.append(heap(0))
        if self._rooms[number].numel() < size_bytes:
            self._rooms[number] = heap(0)  # not both at once
            self._rooms[number] = self._room(size_bytes)
        return self._rooms[number]
