"""Keeps how much of the devices' memory the next plan of a run may fill, after a plan that ran out of it.

A plan that did not fit in practice was wrong about its memory by an unknown amount. The next one has to be
predicted (P95) at no more than `SHRUNK` of what that one was predicted at, as a share of the device; so each
attempt holds less than the one before, until one fits or none can be planned. The record lies in the folder
of the run's checkpoints.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from outsize.errors import BadOption
from outsize.files.replace import replace_bytes
from outsize.files.sealed_json import DamagedFile, seal, unseal
from outsize.ir.cluster import Cluster
from outsize.ir.formatting import percent_text
from outsize.ir.plan import Plan

FILE: Final = "memory-room.json"
SHRUNK: Final = 0.9


@final
@dataclass(frozen=True)
class MemoryRoom:
    """The share of each device's memory, above 0 and at most 1, that plans of the run in `folder` may fill;
    `whole` has the devices with all of it.
    """

    folder: Path
    whole: Cluster
    share: float = 1.0

    @classmethod
    def of(cls, folder: str | Path | None, whole: Cluster) -> Self:
        """Reads the record of a run; 1 where there is none, or it is damaged. Raises BadOption without a
        folder.
        """
        if folder is None:
            raise BadOption(
                "on_oom='replan' goes on from a checkpoint, and there is no folder of checkpoints",
                next_step="parallelize(..., resume=FOLDER, devices=outsize.Ranks(on_oom='replan')), and "
                "engine.state.checkpoint(FOLDER)",
            )
        fraction: object = None
        with suppress(OSError, DamagedFile):
            fraction = unseal((Path(folder) / FILE).read_bytes()).get("share")
        if isinstance(fraction, float) and 0 < fraction <= 1:
            return cls(Path(folder), whole, fraction)
        return cls(Path(folder), whole)

    def of_cluster(self, cluster: Cluster) -> Cluster:
        """Returns a cluster with so much of its devices' memory."""
        devices = (
            d.model_copy(update={"memory_bytes": int(self.share * d.memory_bytes)}) for d in cluster.devices
        )
        return cluster if self.share == 1 else cluster.model_copy(update={"devices": tuple(devices)})

    def holds(self, plan: Plan) -> bool:
        """Returns whether a plan is predicted to fill no more than the share."""
        return self.share == 1 or _filled(plan, self.whole) <= self.share

    def shrink(self, plan: Plan) -> str:
        """Records that a plan did not fit; returns what the next start does, as a sentence."""
        fraction = SHRUNK * min(self.share, _filled(plan, self.whole))
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(self.folder / FILE, seal({"share": fraction}))
        return (
            f"outsize: the next start plans again, for at most {percent_text(fraction)} of each device's "
            f"memory, and goes on from the newest checkpoint in {self.folder}"
        )


def _filled(plan: Plan, whole: Cluster) -> float:
    """Returns the largest share of a device's memory that a plan was predicted to fill (P95); 1 where it
    says nothing.
    """
    rows = () if plan.expected is None else plan.expected.stages
    sizes = {device.name: device.memory_bytes for device in whole.devices}
    fractions = [
        row.p95_bytes / sizes.get(stage.device, row.device_bytes)
        for row, stage in zip(rows, plan.stages, strict=True)
        if row.p95_bytes and sizes.get(stage.device, row.device_bytes)
    ]
    return min(1.0, max(fractions, default=1.0))
