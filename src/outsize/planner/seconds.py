"""Seconds of all units for one microbatch, as arrays: a search looks at the same model on many meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.devices import Device, host_link
from outsize.ir.links import Link
from outsize.ir.profile import Profile

Seconds = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitSeconds:
    """Of shape (n,) each: forward, backward of the input (`given`) and of the weights (`weight`)."""

    forward: Seconds
    given: Seconds
    weight: Seconds

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """What a profile says."""
        rows = [(u.forward_s, u.backward_input_s, u.backward_weight_s) for u in profile.units]
        return cls(*np.array(rows).reshape(-1, 3).T.copy())

    @property
    def backward(self) -> Seconds:
        """Both parts."""
        return self.given + self.weight

    @property
    def total(self) -> Seconds:
        """Forward and backward."""
        return self.forward + self.backward

    def times(self, forward: Seconds | float, given: Seconds | float, weight: Seconds | float) -> Self:
        """Each pass as much slower."""
        return type(self)(self.forward * forward, self.given * given, self.weight * weight)

    def plus(self, forward: Seconds, given: Seconds) -> Self:
        """Each pass as much later."""
        return replace(self, forward=self.forward + forward, given=self.given + given)

    def recomputed(self) -> Self:
        """When a backward begins with a second forward."""
        return replace(self, given=self.given + self.forward)

    def merged(self, ends: Sequence[int]) -> Self:
        """Of pieces of units; `ends` begins with 0 and ends with n."""
        first = np.array(ends[:-1])
        return type(self)(*(np.add.reduceat(each, first) for each in (self.forward, self.given, self.weight)))

    def written(self, profile: Profile) -> Profile:
        """The profile with these seconds."""
        rows = zip(self.forward.tolist(), self.given.tolist(), self.weight.tolist(), strict=True)
        names = "forward_s", "backward_input_s", "backward_weight_s"
        units = zip(profile.units, rows, strict=True)
        changed = (unit.model_copy(update=dict(zip(names, row, strict=True))) for unit, row in units)
        return profile.model_copy(update={"units": tuple(changed)})


@final
@dataclass(frozen=True, slots=True)
class Aside:
    """Copies between a device and its host: beside its kernels; between them on a CPU, which is its host."""

    link: Link
    beside: bool

    @classmethod
    def of(cls, device: Device) -> Self:
        """The device's link to its host; a CPU reads and writes its own memory."""
        link = host_link(device)
        own = Link(name="memory", latency_s=0.0, bytes_per_s=device.bytes_per_s / 2)
        return cls(own if link is None else link, link is not None)

    def slowed_s(self, passed_s: float, size_bytes: int, microbatches: int) -> float:
        """Seconds of a forward or backward while so much leaves or comes.

        Twice in a step, at the turns from forwards to backwards and back, compute waits for one of them.
        """
        moved_s = self.link.seconds(size_bytes)
        return max(passed_s, moved_s) + moved_s / microbatches if self.beside else passed_s + moved_s


def fastest(kinds: Sequence[UnitSeconds]) -> UnitSeconds:
    """For each unit the seconds of the kind of device that is fastest there."""
    if len(kinds) == 1:
        return kinds[0]
    chosen = np.argmin(np.stack([each.total for each in kinds]), axis=0)
    units = np.arange(len(chosen))
    passes = ([k.forward for k in kinds], [k.given for k in kinds], [k.weight for k in kinds])
    return UnitSeconds(*(np.stack(rows)[chosen, units] for rows in passes))
