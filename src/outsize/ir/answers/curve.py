"""Records what one choice does to the predicted throughput, everything else as asked."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record


@final
class ThroughputCurve(Record):
    """Holds samples per second by value of the choice; None where nothing fits. `chosen` is the plan's value.

    Where other axes are used, `pp` counts the stages that follow each other, all devices used.
    """

    choice: Literal["microbatches", "devices", "pp"]
    values: tuple[int, ...]
    samples_per_s: tuple[float | None, ...]
    chosen: int
