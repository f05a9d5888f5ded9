"""Records when the actions of a row ran: numbers while they run, named spans when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        self._is_lent = False

    def drop(self) -> None:
        """Gives the marks back to their clock, unless they are lent; afterwards there are no spans."""
        if not self._is_lent:
            self._clock.free(self.times)
        self.times, self._is_lent = [0.0] * len(self.times), False

    def lend(self) -> Callable[[], tuple[float, float, list[float]] | None]:
        """Returns a function for another thread that reads, once, the seconds of compute actions, those of
        them in which the thread waited for a core, and the marks in seconds since any moment before.

        It returns None as long as the device has not passed all marks. They are no longer the clock's to
        record again before that.
        """
        times, clock, names = self.times, self._clock, self._names
        self._is_lent = True

        def read() -> tuple[float, float, list[float]] | None:
            offsets = clock.offsets(times)
            if offsets is None:
                return None
            ran = [at for at in computes if offsets[3 * at + 2]]
            starts = [3 * at + bool(offsets[3 * at + 1]) for at in ran]
            ends, waited = [3 * at + 2 for at in ran], clock.core_waits(times)
            of_all = (
                sum(row[end] - row[start] for start, end in zip(starts, ends, strict=True))
                for row in (offsets, waited)
            )
            compute_s, core_wait_s = of_all
            return compute_s, core_wait_s, offsets

        computes = [at for at, (_, lane) in enumerate(names) if lane == "compute"]
        return read

    def spans(self) -> Iterator[tuple[str, Lane, float, float]]:
        """Yields action, lane, start and end of each action that has run."""
        times = self._clock.seconds(self.times)
        for at, (text, lane) in enumerate(self._names):
            asked, start, end = times[3 * at : 3 * at + 3]
            if start:
                yield text, "wait", asked, start
            if end:
                yield text, lane, start or asked, end
