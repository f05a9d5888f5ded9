"""Holds messages of a rank between two of its actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from outsize.run.transport.base import Pending

MISSING: Final = object()


@final
class MessageSlot:
    """Holds one message: a tensor that came in or is about to leave, a Pending, or MISSING."""

    __slots__ = ("content",)

    def __init__(self) -> None:
        self.content: Any = MISSING


def take(slot: MessageSlot, pends: bool, keep: bool, pendings: list[Pending]) -> Any:
    """Returns the message; `pends` says that it must be waited for, and adds the receive to `pendings`.

    Unless the message is to stay (`keep`), the slot is emptied.
    """
    message = slot.content
    if pends:
        pending, message = message, message.wait()
        pendings.append(pending)
    slot.content = message if keep else MISSING
    return message


def ready(wanted: Sequence[tuple[MessageSlot, bool]]) -> Callable[[], bool]:
    """Returns a function that says whether all messages are present or can be waited for."""
    return lambda: all(s.content is not MISSING and (not pends or s.content.ready()) for s, pends in wanted)


def identity(value: Any) -> Any:
    """Returns the value; for messages that are not moved to the host."""
    return value
