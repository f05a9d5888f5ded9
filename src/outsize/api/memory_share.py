"""Plans a run for a share of its devices' memory, and holds its processes to that (decision 132)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, final

import torch

from outsize.device.accelerators import CPU, is_accelerator
from outsize.device.memory_limit import device_bytes, limit_memory
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.formatting import bytes_text, percent_text
from outsize.ir.hardware.memory_share import checked_share, split_share, with_share
from outsize.ir.plan import Plan
from outsize.program.source_line import warn_user
from outsize.train.crew.crew import Crew
from outsize.train.world.world import World


@final
class ShareNote(UserWarning):
    """Says that a share of memory is planned, and that nothing here enforces it."""


@final
@dataclass(frozen=True)
class MemoryShare:
    """The share of each device's memory that a run may have; None: all of it, or what its plan says."""

    share: float | None = None

    @classmethod
    def of(cls, share: float | None, world: World) -> Self:
        """Returns the share that the call or the launcher asks for. Raises BadOption."""
        if share is not None:
            return cls(checked_share(share, "memory_share"))
        return cls(world.memory_share)

    def of_cluster(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with so much of its memory; one with a share of its own as it is."""
        if self.share is None or split_share(cluster.name)[1] is not None:
            return cluster
        return cluster.shared(self.share, with_share(cluster.name, self.share))

    def enforce(self, plan: Plan, crew: Crew, world: World) -> int:
        """Holds this process to its share of its devices; returns the bytes of each, 0 where it may have all.

        The devices of a plan with a share of its own get that. Raises BadOption for a plan that needs more.
        """
        fraction = self.share or split_share(plan.cluster)[1]
        if fraction is None or fraction == 1:
            return 0
        rows = () if plan.expected is None else plan.expected.stages
        devices = {crew.device_of(stage) or torch.device(CPU) for stage in crew.stages}
        allowed_bytes = 0
        for device in devices:
            on_cpu = not is_accelerator(device)
            allowed_bytes = int(fraction * device_bytes(device) / (world.world_size if on_cpu else 1))
            needed_bytes = max((row.p95_bytes for row in rows), default=0)
            if needed_bytes > allowed_bytes:
                raise BadOption(
                    f"the plan needs more of a device than {percent_text(fraction)} of its memory",
                    numbers=f"{bytes_text(needed_bytes)} (P95) of {bytes_text(allowed_bytes)}",
                    next_step=f"outsize plan MODEL --cluster {with_share(plan.cluster, fraction)}",
                )
            context_bytes = 0 if on_cpu else max((row.context_bytes for row in rows), default=0)
            if not limit_memory(device, max(1, allowed_bytes - context_bytes)):
                warn_user(
                    f"{percent_text(fraction)} of {device} is planned, and nothing here holds the run to it",
                    ShareNote,
                )
        return allowed_bytes
