"""Defines the interface through which boundary values travel from rank to rank.

    sender                                     receiver
    send(peer, channel, mb, tensor)            post(peer, channel, mb) -> Pending     (does not block)
                                               pending.wait() -> tensor               (when it is needed)

A channel is one boundary value in one direction between two stages; its number is the same at both ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

# Each program has so many channels; the channels of the next program follow them.
CHANNELS = 1 << 16


class Pending(ABC):
    """Represents a receive that was posted."""

    @abstractmethod
    def ready(self) -> bool:
        """Returns whether `wait` can be called without blocking for ever when all ranks share one thread."""

    @abstractmethod
    def wait(self) -> Tensor | None:
        """Returns the tensor, or None when no gradient flows on this channel."""

    @abstractmethod
    def release(self) -> None:
        """Allows the memory to be received into again as soon as no other tensor lives in it.

        A tensor that is never released is freed like any other tensor when its last reference goes.
        """


class Transport(ABC):
    """Moves tensors between ranks."""

    @abstractmethod
    def send(self, peer: int, channel: int, microbatch: int, tensor: Tensor | None) -> None:
        """Starts to send; it never blocks compute."""

    @abstractmethod
    def post(self, peer: int, channel: int, microbatch: int) -> Pending:
        """Starts to receive."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until everything that was sent has left."""
