"""Transport between the ranks of one process that live on different devices, and how they take turns.

One thread walks the schedule. A launch on CUDA does not block, so the thread is ahead of the devices; and it
seeds process-wide generators before each random instruction (law 6) and hangs tied weights into modules,
which threads would do to each other. Ranks take turns of one compute action each, so that every device gets
its first work early; what the CPU computes runs within its turn, so the CPU goes on only when its message is
there or nobody else has anything to launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from outsize.run.interpreter import Interpreter, StepOutputs
from outsize.run.links import Link, Parcel, checked_link
from outsize.run.streams import Streams
from outsize.run.together import Together, Used
from outsize.run.transport import Pending, Transport
from outsize.run.turns import stuck

Key = tuple[int, int, int, int]  # seats of source and destination, channel, microbatch
Box = dict[Key, Tensor | Parcel | None]


@final
class Places(Together):
    """The place of each seat, and the links between places that differ, each tried once.

    Several pipelines may run side by side: rank p of replica r of n has seat p * n + r, as on a mesh.
    """

    def __init__(self, streams: Streams, of_seat: Sequence[str], replicas: int = 1) -> None:
        self.streams, self.of_seat, self.replicas = streams, tuple(of_seat), replicas
        distinct = dict.fromkeys(of_seat)
        self._links = {(a, b): checked_link(streams, a, b) for a in distinct for b in distinct if a != b}
        self._boxes: Box = {}
        self._to_host: deque[Parcel] = deque()

    def transport(self, seat: int) -> Transport:
        return _DeviceTransport(seat, self)

    def device(self, seat: int) -> torch.device | None:
        return self.streams.device(self.of_seat[seat])

    def inputs(
        self, seat: int, microbatches: Sequence[Sequence[Tensor]], used: Used
    ) -> Sequence[Sequence[Tensor]]:
        wanted = [(mb, p) for mb in range(len(microbatches)) for p in sorted(used(mb))]
        brought = self.streams.bring([microbatches[mb][p] for mb, p in wanted], self.of_seat[seat])
        found = [list(tensors) for tensors in microbatches]
        for (mb, p), tensor in zip(wanted, brought, strict=True):
            found[mb][p] = tensor
        return found

    def run(self, interpreters: Mapping[int, Interpreter]) -> list[StepOutputs]:
        """One compute action of each seat in turn."""
        left = dict(interpreters)
        while left:
            moved = False
            for seat, interpreter in tuple(left.items()):
                with self.streams.working(self.of_seat[seat]):
                    state = _turn(interpreter)
                moved = moved or state is not False
                if state is None:
                    del left[seat]
            if not moved and not self._wait_for_one():
                raise stuck(list(left.values()))
        self.flush()
        return [i.outputs for i in interpreters.values()]

    def link(self, seat: int, peer: int) -> Link | None:
        """Between two seats; None on one place."""
        return self._links.get((self.of_seat[seat], self.of_seat[peer]))

    @property
    def buffers_made(self) -> int:
        """Receive buffers since the beginning."""
        return sum(link.pool.made for link in self._links.values())

    def put(self, key: Key, tensor: Tensor | None) -> None:
        """Launch it on its way."""
        link = self.link(key[0], key[1])
        found = tensor if link is None or tensor is None else link.carry(tensor)
        if isinstance(found, Parcel) and not found.there():
            self._to_host.append(found)
        self._boxes[key] = found

    def at(self, key: Key) -> bool:
        """Can it be taken without making the host wait?"""
        if key not in self._boxes:
            return False
        found = self._boxes[key]
        return not isinstance(found, Parcel) or found.there()

    def take(self, key: Key) -> Tensor | Parcel | None:
        """What was put there."""
        return self._boxes.pop(key)

    def _wait_for_one(self) -> bool:
        """The host waits for the oldest copy to it; False when none is under way."""
        while self._to_host:
            parcel = self._to_host.popleft()
            if not parcel.there():
                parcel.copied.wait()
                return True
        return False

    def flush(self) -> None:
        """The end of a step: what was sent may be freed."""
        for link in self._links.values():
            link.flush()
        self._to_host.clear()

    def reset(self) -> None:
        self.streams.synchronize()
        self._boxes.clear()
        self.flush()


@final
class _DeviceTransport(Transport):
    def __init__(self, seat: int, places: Places) -> None:
        self._seat, self._places = seat, places

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        self._places.put((self._seat, self._of(peer), channel, microbatch), tensor)

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _Coming(self._places, (self._of(peer), self._seat, channel, microbatch))

    def _of(self, rank: int) -> int:
        """The seat of this replica's rank."""
        return rank * self._places.replicas + self._seat % self._places.replicas

    def flush(self) -> None:
        self._places.flush()


@final
class _Coming(Pending):
    __slots__ = ("_key", "_parcel", "_places")

    def __init__(self, places: Places, key: Key) -> None:
        self._places, self._key = places, key
        self._parcel: Parcel | None = None

    def ready(self) -> bool:
        return self._places.at(self._key)

    def wait(self) -> Tensor | None:
        found = self._places.take(self._key)
        if not isinstance(found, Parcel):
            return found
        self._parcel = found
        return found.open()

    def release(self) -> None:
        if self._parcel is not None:
            self._parcel.give_back()
            self._parcel = None


def _turn(interpreter: Interpreter) -> bool | None:
    """Up to and with a compute action and what it sends: True if anything ran, None at the end of the row."""
    computed = moved = False
    while not (computed and interpreter.computes()):
        computes = interpreter.computes()
        state = interpreter.advance()
        if state is not True:
            return None if state is None else moved
        moved, computed = True, computed or computes
    return True
