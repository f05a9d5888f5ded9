"""Says when a run saves: every so many steps, or every so many seconds, minutes or hours.

    500   every 500 steps      90s   10m   2h   every so long, at the end of a step

Ranks have clocks of their own, so rank 0's decides, in one small collective after each step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
import torch.distributed as dist

from outsize.errors import BadOption

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@final
@dataclass(frozen=True, slots=True)
class SaveInterval:
    """An interval in steps, or in seconds where `steps` is None."""

    steps: int | None
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> SaveInterval:
        """Reads `500` or `10m`. Raises BadOption."""
        found = re.fullmatch(r"(\d{1,9})([smh]?)", text.strip())
        if found is None or not int(found[1]):
            raise BadOption(
                f"--every {text!r} is no interval", next_step="--every 500 (steps), 90s, 10m or 2h"
            )
        number, unit = int(found[1]), found[2]
        return cls(None, number * _SECONDS[unit]) if unit else cls(number)


@final
class SaveTimer:
    """Tells after each step whether to save; `group` has all ranks of the run."""

    def __init__(
        self,
        interval: SaveInterval,
        group: dist.ProcessGroup | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval, self._group, self._clock = interval, group, clock
        self._last_s = clock()

    def is_due(self, steps: int) -> bool:
        """Tells whether to save after so many steps; the same on all ranks, which call this together."""
        if self._interval.steps is not None:
            return steps % self._interval.steps == 0
        due = torch.tensor([self._clock() - self._last_s >= self._interval.seconds])
        if self._group is not None:
            dist.broadcast(due, group=self._group, group_src=0)
        if due.item():
            self._last_s = self._clock()
        return bool(due.item())
