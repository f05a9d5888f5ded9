"""Defines what `outsize bench` passes to its processes, and what they return."""

from __future__ import annotations

import statistics
from typing import Any, Final, final

from outsize.ir.base import Record
from outsize.ir.plan import Plan

SINGLE: Final = "single device"
SPLIT: Final = "model parallel"
PIPELINED: Final = "pipelined"
OURS: Final = "outsize"


@final
class TutorialJob(Record):
    """The PyTorch model-parallel tutorial: `model` is cut before the module `cut`, by several split sizes."""

    model: str = "torchvision:resnet50"
    cut: str = "layer3"
    input: str
    batch: int
    splits: tuple[int, ...]
    repeats: int
    trials: int
    seed: int = 0
    as_json: bool = False


@final
class TutorialOutcome(Record):
    """The seconds of each lap of all systems, whose laps alternate."""

    job: TutorialJob
    devices: tuple[str, ...]
    torch: str
    single_s: tuple[float, ...]
    split_s: tuple[float, ...]
    pipelined_s: dict[int, tuple[float, ...]]
    outsize_s: tuple[float, ...]
    plan: Plan

    @property
    def best_split(self) -> int:
        """Returns the split size with the least mean."""
        return min(self.pipelined_s, key=lambda size: statistics.fmean(self.pipelined_s[size]))

    @property
    def bars(self) -> dict[str, tuple[float, ...]]:
        """Returns the laps of the tutorial's three systems and of outsize, by name."""
        best = self.pipelined_s[self.best_split]
        return {SINGLE: self.single_s, SPLIT: self.split_s, PIPELINED: best, OURS: self.outsize_s}

    def document(self) -> dict[str, Any]:
        """Returns what --json gives and tutorial.json holds: laps, and means with standard deviations."""
        summary = {
            name: {"mean_s": statistics.fmean(laps), "std_s": deviation(laps)}
            for name, laps in self.bars.items()
        }
        return {"bars": summary, "best_split": self.best_split, **self.model_dump(mode="json")}


def deviation(laps: tuple[float, ...]) -> float:
    """Returns the standard deviation of a sample; 0 for one lap."""
    return statistics.stdev(laps) if len(laps) > 1 else 0.0
