"""Says after each step whether to save; where the clock decides, it is rank 0's, told to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import torch.distributed as dist

from outsize.run.transport.control_messages import broadcast_json
from outsize.train.checkpoint.interval import SaveInterval


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
        due = self._clock() - self._last_s >= self._interval.seconds
        if self._group is not None:
            due = bool(broadcast_json(due, self._group))
        if due:
            self._last_s = self._clock()
        return due
