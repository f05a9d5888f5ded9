"""Degrees of offload: what the host keeps of weights, gradients and optimizer states, and what a step costs.

    resident           nothing
    host-optimizer     states and the weights that are updated; gradients go there, weights come once a step
    host               weights and gradients as well: they come stage by stage
    host-activations   and what stages hand to each other, each of which computes the rest anew

The roofline of a degree is max(compute, copies to the device, copies to the host, the host's optimizer): the
four may all be at work at the same time, so no step is shorter than the longest.
"""

from __future__ import annotations

from typing import Final, Literal, final

from outsize.ir.base import Record
from outsize.ir.text import seconds_text

Weights = Literal["resident", "sharded", "host-optimizer", "host", "host-activations"]
# The degrees in which the host keeps something, the least first.
HOSTED: Final[tuple[Weights, ...]] = ("host-optimizer", "host", "host-activations")
# Of them those of a pipeline of several devices.
OF_SEVERAL: Final[tuple[Weights, ...]] = ("host-optimizer", "host")
_TEXTS: Final[dict[Weights, str]] = {
    "resident": "",
    "sharded": "weights sharded",
    "host-optimizer": "optimizer on the host",
    "host": "weights on the host",
    "host-activations": "weights and activations on the host",
}


def weights_text(weights: Weights) -> str:
    """Where they are, in words; empty where a stage's devices have them and all that belongs to them."""
    return _TEXTS[weights]


@final
class Bound(Record):
    """Seconds of a step that each of four takes, and a disk if there is one; all may be at work at once."""

    compute_s: float
    to_device_s: float
    to_host_s: float
    optimizer_s: float
    disk_s: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Each with its name."""
        return {
            "compute": self.compute_s,
            "copies to the device": self.to_device_s,
            "copies to the host": self.to_host_s,
            "the optimizer on the host": self.optimizer_s,
            **({"the disk": self.disk_s} if self.disk_s else {}),
        }

    @property
    def step_s(self) -> float:
        """No step is shorter."""
        return max(self.parts.values())

    @property
    def longest(self) -> str:
        """The name of what sets it."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        each = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in self.parts.items())
        return f"no step is shorter than its longest part, {self.longest}: {each}"


@final
class Degree(Record):
    """One degree on one device: its bound, its predicted step, and the bytes of the device at its peak.

    `recompute`: in its backward a stage computes its forward anew. `disk`: what the host lacks is on a disk.
    """

    weights: Weights
    microbatches: int
    recompute: bool
    bound: Bound
    step_s: float
    peak_bytes: int
    fits: bool
    disk: bool = False
