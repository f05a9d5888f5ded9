"""Defines what a degree of offload costs: what bounds the time of a step, and the bytes of the device.

The degrees are the policies of weights with something on the host (policies/weights.py).

The roofline of a degree is max(compute, copies to the device, copies to the host, the host's optimizer), and
the compute of stages on the host where there are some: all may run at the same time, so no step is shorter
than the longest.
"""

from __future__ import annotations

from typing import final

from outsize.ir.base import Record
from outsize.policies.weights import Weights


@final
class Bound(Record):
    """Holds the seconds of a step that each resource takes; all may be busy at the same time. `host_s` are
    those in which the host computes stages.
    """

    compute_s: float
    to_device_s: float
    to_host_s: float
    optimizer_s: float
    disk_s: float = 0.0
    host_s: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds of each resource by name."""
        return {
            "compute": self.compute_s,
            "copies to the device": self.to_device_s,
            "copies to the host": self.to_host_s,
            "the optimizer on the host": self.optimizer_s,
            **({"the disk": self.disk_s} if self.disk_s else {}),
            **({"compute on the host": self.host_s} if self.host_s else {}),
        }

    @property
    def step_s(self) -> float:
        """Returns the longest of them; no step is shorter."""
        return max(self.parts.values())

    @property
    def longest(self) -> str:
        """Returns the name of the longest."""
        return max(self.parts, key=lambda name: self.parts[name])


@final
class Degree(Record):
    """Describes one degree on one device: its bound, its predicted step, and the bytes of the device at its
    peak.

    `recompute` says that stages recompute their forward in the backward; `disk` says that what the host lacks
    is on a disk.
    """

    weights: Weights
    microbatches: int
    recompute: bool
    bound: Bound
    step_s: float
    peak_bytes: int
    fits: bool
    disk: bool = False
