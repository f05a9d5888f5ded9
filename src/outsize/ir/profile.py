"""Profile: what each unit costs on one kind of device, per microbatch, and where the number is from."""

from __future__ import annotations

from typing import Literal, Self, final

from outsize.ir.base import Record

Source = Literal["measured", "roofline"]


@final
class UnitCost(Record):
    """Seconds and bytes of one unit for one microbatch."""

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    saved_bytes: int
    workspace_bytes: int
    flops: int
    source: Source

    @property
    def backward_s(self) -> float:
        """Input gradient and weight gradient together."""
        return self.backward_input_s + self.backward_weight_s


@final
class Profile(Record):
    """Costs of all units of a graph, in its order; `device` names the kind they hold for."""

    fingerprint: str
    device: str
    microbatch_size: int
    units: tuple[UnitCost, ...]

    def recomputed(self) -> Self:
        """The costs when a backward begins with a second forward."""
        later = ({"backward_input_s": u.backward_input_s + u.forward_s} for u in self.units)
        units = (u.model_copy(update=more) for u, more in zip(self.units, later, strict=True))
        return self.model_copy(update={"units": tuple(units)})

    @property
    def step_compute_s(self) -> float:
        """Forward and backward of all units for one microbatch, in seconds."""
        return sum(u.forward_s + u.backward_s for u in self.units)
