"""When the actions of a row ran: numbers while they run, spans with names when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from outsize.ir.timeline import Lane
from outsize.run.clock import HOST, Clock


@final
class Marks:
    """Three marks of a clock per action: it asked for its messages, had them (0: needs none), ended."""

    def __init__(
        self, names: Sequence[tuple[str, Lane]], times: list[Any] | None = None, clock: Clock = HOST
    ) -> None:
        self._names, self._clock = names, clock
        self.times = times or [0.0] * (3 * len(names))

    def spans(self) -> Iterator[tuple[str, Lane, float, float]]:
        """Action, lane, start, end; of actions that have not run, nothing."""
        times = self._clock.seconds(self.times)
        for at, (text, lane) in enumerate(self._names):
            asked, start, end = times[3 * at : 3 * at + 3]
            if start:
                yield text, "wait", asked, start
            if end:
                yield text, lane, start or asked, end
