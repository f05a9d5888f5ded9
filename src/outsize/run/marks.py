"""When the actions of a row ran: numbers while they run, spans with names when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from outsize.ir.timeline import Lane


@final
class Marks:
    """Three times per action, in seconds: it asked for its messages, had them (0: needs none), ended."""

    def __init__(self, names: Sequence[tuple[str, Lane]], times: list[float] | None = None) -> None:
        self._names = names
        self.times = times or [0.0] * (3 * len(names))

    def spans(self) -> Iterator[tuple[str, Lane, float, float]]:
        """Action, lane, start, end; of actions that have not run, nothing."""
        for at, (text, lane) in enumerate(self._names):
            asked, start, end = self.times[3 * at : 3 * at + 3]
            if start:
                yield text, "wait", asked, start
            if end:
                yield text, lane, start or asked, end
