"""Passes tensors between the ranks of one process by reference."""

from __future__ import annotations

from typing import final

from torch import Tensor

from outsize.run.transport.base import Pending, Transport


@final
class Mailboxes:
    """Holds the messages under way between the LocalTransports of one process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int, int], Tensor | None] = {}


@final
class LocalTransport(Transport):
    """Stores each tensor under (source, destination, channel, microbatch) until the receiver takes it."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        self._rank, self._boxes = rank, mailboxes.boxes

    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        self._boxes[self._rank, peer, channel, microbatch] = tensor

    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        return _LocalPending(self._boxes, (peer, self._rank, channel, microbatch))

    def flush(self) -> None:
        """Returns at once, since nothing is under way."""


@final
class _LocalPending(Pending):
    def __init__(
        self, boxes: dict[tuple[int, int, int, int], Tensor | None], key: tuple[int, int, int, int]
    ) -> None:
        self._boxes, self._key = boxes, key

    def ready(self) -> bool:
        return self._key in self._boxes

    def wait(self) -> Tensor | None:
        return self._boxes.pop(self._key)

    def release(self) -> None:
        """Does nothing, since no buffer was used."""
