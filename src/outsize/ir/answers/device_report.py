"""Records what `outsize doctor --gpu` found out about the accelerators of a machine."""

from __future__ import annotations

from typing import Literal, final

from pydantic import Field

from outsize.ir.answers.health import Health
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster

Outcome = Literal["holds", "fails", "measured", "skipped"]


@final
class CheckResult(Record):
    """Holds what one check found. `figures` have their units in their names; `detail` is an error's text, or
    what is missing for a check that was skipped.
    """

    name: str
    question: str
    outcome: Outcome
    processes: int
    figures: dict[str, float] = Field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0


@final
class DeviceReport(Record):
    """Holds all results, in the order in which they ran, and what was measured as a cluster.

    `--cluster FILE` of other commands reads the cluster from the report's file; it is None where the device
    was not measured.
    """

    health: Health
    device_type: str
    processes: int
    results: tuple[CheckResult, ...]
    cluster: Cluster | None = None

    @property
    def failed(self) -> tuple[str, ...]:
        """Returns the names of the checks that failed."""
        return tuple(result.name for result in self.results if result.outcome == "fails")
