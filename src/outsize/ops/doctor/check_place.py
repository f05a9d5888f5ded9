"""Says where a check runs, and holds what it found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

import torch

from outsize.device.accelerators import current_device, synchronize
from outsize.train.world.world import World

LAPS: Final = 5


@final
@dataclass(frozen=True, slots=True)
class CheckPlace:
    """Holds the place of one process of a check; `width` scales all models and tensors."""

    world: World
    device: torch.device
    width: int

    @classmethod
    def here(cls, world: World, width: int) -> CheckPlace:
        """Returns the place of this process on its current device."""
        return cls(world, current_device(), width)

    @property
    def is_alone(self) -> bool:
        """Returns whether the check has one process."""
        return self.world.world_size == 1

    def seconds(self, work: Callable[[], object], laps: int = LAPS) -> float:
        """Returns the median seconds of `work` from an idle device to an idle device, after one warm-up."""
        taken = []
        for _ in range(1 + laps):
            synchronize(self.device)
            start = time.perf_counter()
            work()
            synchronize(self.device)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])


@final
@dataclass(frozen=True, slots=True)
class CheckAnswer:
    """Holds the figures of a check, with units in their names.

    `wrong` names what is not as it should be; it is None where nothing is judged. `missing` says what this
    machine lacks for the check.
    """

    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    wrong: tuple[str, ...] | None = None
    missing: str | None = None
