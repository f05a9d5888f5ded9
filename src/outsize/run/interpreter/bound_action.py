"""Defines what an action of a row is bound to: how it waits for its messages, and what then runs.

    0F3            gather its values         run its forward
    (0F3;0B1)      gather values and         run both: where one waits for other ranks, the other computes
                   gradients                 (device/alternation.py)

A pair remains two actions of the row, of which the first runs both; its marks then have the seconds of both.
What runs in a pair has the bits of what runs one after the other: a forward and a backward of two
microbatches share weights, which neither writes, and nothing else. Where stages do not alternate (no
ranks divide them, or a second forward would meet the first one), both run in their own places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from outsize.device.alternation import Alternation
from outsize.ir.timeline import Lane


@final
@dataclass(slots=True)
class BoundAction:
    """Represents an action with its handler: `gather` waits for its messages, or is None; `run`
    acts on them.
    """

    text: str
    lane: Lane
    run: Callable[[Any], None]
    gather: Callable[[], Any] | None = None
    ready: Callable[[], bool] | None = None
    at: int = 0  # The index of its first mark.

    def behind(self, arrival: Callable[[], None]) -> BoundAction:
        """Returns the action that waits for `arrival`, too."""
        gather = self.gather

        def both() -> Any:
            arrival()
            return gather() if gather is not None else None

        return replace(self, gather=both)


@final
class ActionPair:
    """A forward and a backward that run together where `alternates` says so."""

    def __init__(
        self, forward: BoundAction, backward: BoundAction, alternates: Callable[[], bool], helper: Alternation
    ) -> None:
        self._forward, self._backward, self._alternates = forward, backward, alternates
        self._helper = helper
        self._gradients: Any = None
        self._has_run = False

    def bound(self) -> tuple[BoundAction, BoundAction]:
        """Returns both actions, of which the first waits for the messages of both."""
        both = (self._forward, self._backward)
        asked = [op.ready for op in both if op.ready is not None]
        return (
            replace(
                self._forward,
                run=self._begin,
                gather=self._gather if any(op.gather is not None for op in both) else None,
                ready=(lambda: all(ready() for ready in asked)) if asked else None,
            ),
            replace(self._backward, run=self._end, gather=None, ready=None),
        )

    def _gather(self) -> Any:
        messages = None if self._forward.gather is None else self._forward.gather()
        if self._backward.gather is not None:
            self._gradients = self._backward.gather()
        return messages

    def _begin(self, messages: Any) -> None:
        self._has_run = self._alternates()
        if self._has_run:
            self._helper.run(partial(self._forward.run, messages), self._run_backward)
        else:
            self._forward.run(messages)

    def _end(self, _: Any) -> None:
        if not self._has_run:
            self._run_backward()

    def _run_backward(self) -> None:
        gradients, self._gradients = self._gradients, None
        self._backward.run(gradients)
