"""Records when the actions of a row ran: numbers while they run, named spans when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from outsize.device.clock import HOST, Clock
from outsize.ir.timeline import Lane


@final
class Marks:
    """Holds three marks per action: when it asked for its messages, had them (0: needs none) and ended."""

    def __init__(
        self, names: Sequence[tuple[str, Lane]], times: list[Any] | None = None, clock: Clock = HOST
    ) -> None:
        self._names, self._clock = names, clock
        self.times = times or [0.0] * (3 * len(names))

    def drop(self) -> None:
        """Gives the marks back to their clock; afterwards there are no spans."""
        self._clock.free(self.times)
        self.times = [0.0] * len(self.times)

    def spans(self) -> Iterator[tuple[str, Lane, float, float]]:
        """Yields action, lane, start and end of each action that has run."""
        times = self._clock.seconds(self.times)
        for at, (text, lane) in enumerate(self._names):
            asked, start, end = times[3 * at : 3 * at + 3]
            if start:
                yield text, "wait", asked, start
            if end:
                yield text, lane, start or asked, end
