"""Moves tensors between ranks of one process on different devices, and lets the ranks take turns.

One thread walks the schedule. A launch on CUDA does not block, so the thread runs ahead of the devices. It
also seeds process-wide generators before each random instruction (law 6) and puts tied weights into modules,
where several threads would interfere. Each rank runs one compute action per turn, so that every device gets
its first work early. The CPU computes within its turn, so a CPU rank proceeds only when its message is
present or no other rank has anything to launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.device.streams import Streams
from outsize.run.interpreter.in_process import InProcessRanks, Used, deadlock, own_inputs
from outsize.run.interpreter.interpreter import Interpreter, StepOutputs
from outsize.run.transport.base import Pending, Transport
from outsize.run.transport.device_copies import DeviceCopy, DeviceLink, checked_link

Key = tuple[int, int, int, int]  # The fields are the seats of source and destination, channel and microbatch.
Box = dict[Key, Tensor | DeviceCopy | None]


@final
class MultiDevice(InProcessRanks):
    """MultiDevice each seat on a device and links devices that differ; each link is tested once.

    Several pipelines may run at once: rank p of replica r of n has seat p * n + r, as on a mesh.
    """

    def __init__(self, streams: Streams, of_seat: Sequence[str], replicas: int = 1) -> None:
        self.streams, self.of_seat, self.replicas = streams, tuple(of_seat), replicas
        distinct = dict.fromkeys(of_seat)
        self._links = {(a, b): checked_link(streams, a, b) for a in distinct for b in distinct if a != b}
        self._boxes: Box = {}
        self._to_host: deque[DeviceCopy] = deque()

    def transport(self, seat: int) -> Transport:
        return _DeviceTransport(seat, self)

    def device(self, seat: int) -> torch.device | None:
        return self.streams.device(self.of_seat[seat])

    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        return own_inputs(self.streams, self.of_seat[seat], microbatches, used)

    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        """Runs one compute action of each seat in turn until all rows are done."""
        left = dict(interpreters)
        while left:
            moved = False
            for seat, interpreter in tuple(left.items()):
                with self.streams.device_context(self.of_seat[seat]):
                    state = _turn(interpreter)
                moved = moved or state is not False
                if state is None:
                    del left[seat]
            if not moved and not self._wait_for_one():
                raise deadlock(list(left.values()))
        self.flush()
        return [i.outputs for i in interpreters.values()]

    def link(self, seat: int, peer: int) -> DeviceLink | None:
        """Returns the link between two seats; None when they share a device."""
        return self._links.get((self.of_seat[seat], self.of_seat[peer]))

    @property
    def buffers_made(self) -> int:
        """Counts the receive buffers that were made since the beginning."""
        return sum(link.pool.made for link in self._links.values())

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Stores a tensor for its receiver, after launching its copy where the devices differ."""
        link = self.link(key[0], key[1])
        message = tensor if link is None or tensor is None else link.carry(tensor)
        if isinstance(message, DeviceCopy) and not message.is_ready():
            self._to_host.append(message)
        self._boxes[key] = message

    def at(self, key: Key) -> bool:
        """Returns whether a message can be taken without blocking the host."""
        if key not in self._boxes:
            return False
        message = self._boxes[key]
        return not isinstance(message, DeviceCopy) or message.is_ready()

    def take(self, key: Key) -> Tensor | DeviceCopy | None:
        """Removes and returns the message."""
        return self._boxes.pop(key)

    def _wait_for_one(self) -> bool:
        """Blocks the host until the oldest copy to it is done; returns False when there is none.

        A copy may have ended since its receiver last looked, so its receiver looks again in any case.
        """
        if not self._to_host:
            return False
        device_copy = self._to_host.popleft()
        if not device_copy.is_ready():
            device_copy.copied.wait()
        return True

    def flush(self) -> None:
        """Ends a step: the sources of its copies may be freed."""
        for link in self._links.values():
            link.flush()
        # What another call waits for, in whose backward this one has run, stays.
        self._to_host = deque(copy for copy in self._to_host if not copy.is_ready())

    def reset(self) -> None:
        self.streams.synchronize()
        self._boxes.clear()
        self.flush()
        self._to_host.clear()


@final
class _DeviceTransport(Transport):
    def __init__(self, seat: int, places: MultiDevice) -> None:
        self._seat, self._places = seat, places

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        self._places.put((self._seat, self._of(peer), channel, microbatch), tensor)

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _Coming(self._places, (self._of(peer), self._seat, channel, microbatch))

    def _of(self, rank: int) -> int:
        """Returns the seat of another rank of this replica."""
        return rank * self._places.replicas + self._seat % self._places.replicas

    def flush(self) -> None:
        self._places.flush()


@final
class _Coming(Pending):
    __slots__ = ("_copy", "_key", "_places")

    def __init__(self, places: MultiDevice, key: Key) -> None:
        self._places, self._key = places, key
        self._copy: DeviceCopy | None = None

    def ready(self) -> bool:
        return self._places.at(self._key)

    def wait(self) -> Tensor | None:
        message = self._places.take(self._key)
        if not isinstance(message, DeviceCopy):
            return message
        self._copy = message
        return message.open()

    def release(self) -> None:
        if self._copy is not None:
            self._copy.release()
            self._copy = None


def _turn(interpreter: Interpreter) -> bool | None:
    """Runs up to and with one compute action and its sends: True if anything ran, None at the end
    of the row.
    """
    computed = moved = False
    while not (computed and interpreter.computes()):
        computes = interpreter.computes()
        state = interpreter.advance()
        if state is not True:
            return None if state is None else moved
        moved, computed = True, computed or computes
    return True
