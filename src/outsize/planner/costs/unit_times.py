"""Holds the seconds of all units for one microbatch as arrays, because a search prices one model on many
meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.profile import Profile

Seconds = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class UnitSeconds:
    """Holds seconds of shape (n,) each: forward, backward of the input (`backward_input`) and of the weights
    (`backward_weight`).

    `waits` are those of the forward and of the backward in which ranks that divide a unit exchange values,
    and the device could compute something else; None: there are none.
    """

    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    waits: tuple[Seconds, Seconds] | None = None

    @classmethod
    def of(cls, profile: Profile) -> Self:
        """Returns the seconds of a profile."""
        return cls.from_rows([(u.forward_s, u.backward_input_s, u.backward_weight_s) for u in profile.units])

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float]]) -> Self:
        """Returns the seconds of units given as (forward, backward_input, backward_weight)."""
        forward, backward_input, backward_weight = np.array(rows, np.float64).reshape(-1, 3).T.copy()
        return cls(forward, backward_input, backward_weight)

    def rows(self) -> list[tuple[float, float, float]]:
        """Returns (forward, backward_input, backward_weight) of each unit."""
        passes = (self.forward, self.backward_input, self.backward_weight)
        return list(zip(*(times.tolist() for times in passes), strict=True))

    def taken(self, places: NDArray[np.int64]) -> Self:
        """Returns the seconds of units in these places, which may repeat."""
        return self._mapped(lambda seconds: seconds[places])

    def behind_host(self, host: UnitSeconds, blocks: Sequence[int], late: float = 0.0) -> Self:
        """Returns the seconds of a device that waits where its host needs longer to launch.

        `blocks` are the first units of blocks, ascending from 0. A host that is late in one pass of a block
        may have been early in another: in each block the device waits as long as the host needs more time
        than the device, and this is spread over the passes that are late.

        Neither hides the other wholly, as both take now more and now less time than in the mean. `late` is
        the share of the shorter of both that is lost where they need equally long. It is lost too where the
        host needs longer; a device that needs longer has a queue of launched work, so it loses less, in
        proportion to host over device. Each unit of a block loses the same share.
        """
        own, launching = (np.stack([t.forward, t.backward_input, t.backward_weight]) for t in (self, host))
        late_seconds, more = np.maximum(0.0, launching - own), launching - own
        late_s, more_s = (np.add.reduceat(seconds.sum(axis=0), blocks) for seconds in (late_seconds, more))
        fraction = _ratio(more_s, late_s).clip(min=0.0)
        lengths = np.diff([*blocks, own.shape[1]])
        behind = own + np.repeat(fraction, lengths) * late_seconds
        if late:
            own_s: Seconds = np.add.reduceat(own.sum(axis=0), blocks)
            host_s: Seconds = np.add.reduceat(launching.sum(axis=0), blocks)
            ahead = _ratio(host_s, own_s).clip(max=1.0)
            lost = late * ahead * _ratio(np.minimum(own_s, host_s), np.maximum(own_s, host_s))
            behind *= 1 + np.repeat(lost, lengths)
        forward, backward_input, backward_weight = behind
        return type(self)(forward, backward_input, backward_weight)

    @property
    def backward(self) -> Seconds:
        """Returns both parts of the backward."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> Seconds:
        """Returns forward and backward."""
        return self.forward + self.backward

    def times(
        self, forward: Seconds | float, backward_input: Seconds | float, backward_weight: Seconds | float
    ) -> Self:
        """Returns the seconds with each pass multiplied by a factor."""
        return replace(
            self,
            forward=self.forward * forward,
            backward_input=self.backward_input * backward_input,
            backward_weight=self.backward_weight * backward_weight,
        )

    def plus(self, forward: Seconds, backward_input: Seconds) -> Self:
        """Returns the seconds with time added to each pass."""
        return replace(
            self, forward=self.forward + forward, backward_input=self.backward_input + backward_input
        )

    def waiting(self, forward: Seconds, backward: Seconds) -> Self:
        """Returns the seconds of which so many more are spent waiting."""
        known = self.waits or (np.zeros_like(self.forward), np.zeros_like(self.forward))
        return replace(self, waits=(known[0] + forward, known[1] + backward))

    def recomputed(self, kept: Seconds | float = 0.0) -> Self:
        """Returns the seconds when a backward begins with a second forward, but for so many seconds of it."""
        waits = self.waits and (self.waits[0], self.waits[0] + self.waits[1])
        return replace(self, backward_input=self.backward_input + self.forward - kept, waits=waits)

    def paired(self) -> Self:
        """Returns the least seconds of units whose backwards run beside forwards of other microbatches.

        A pair of a stage hides at most what both wait, what both compute meanwhile, and the shorter of both:
        sums over its units, of which the one with the least total is taken off here.
        """
        if self.waits is None:
            return self
        waits = np.minimum(self.waits[0] + self.waits[1], self.total)
        hidden = min((waits, self.total - waits, self.forward, self.backward), key=np.sum)
        of_input = np.minimum(hidden, self.backward_input)
        of_weight = np.minimum(hidden - of_input, self.backward_weight)
        return type(self)(
            np.maximum(0.0, self.forward - (hidden - of_input - of_weight)),
            self.backward_input - of_input,
            self.backward_weight - of_weight,
        )

    def merged(self, ends: Sequence[int]) -> Self:
        """Returns the seconds of pieces of units; `ends` begins with 0 and ends with n."""
        first = np.array(ends[:-1])
        return self._mapped(lambda seconds: np.add.reduceat(seconds, first))

    def _mapped(self, change: Callable[[Seconds], Seconds]) -> Self:
        waits = self.waits and (change(self.waits[0]), change(self.waits[1]))
        forward, backward_input = change(self.forward), change(self.backward_input)
        return type(self)(forward, backward_input, change(self.backward_weight), waits)

    def written(self, profile: Profile) -> Profile:
        """Returns the profile with these seconds."""
        rows = zip(
            self.forward.tolist(), self.backward_input.tolist(), self.backward_weight.tolist(), strict=True
        )
        names = "forward_s", "backward_input_s", "backward_weight_s"
        units = zip(profile.units, rows, strict=True)
        changed = (unit.model_copy(update=dict(zip(names, row, strict=True))) for unit, row in units)
        return profile.model_copy(update={"units": tuple(changed)})


def _ratio(above: Seconds, below: Seconds) -> Seconds:
    """Returns above / below, and zero where there is nothing below."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def fastest(kinds: Sequence[UnitSeconds]) -> UnitSeconds:
    """Returns for each unit the seconds of the kind of device that is fastest there."""
    if len(kinds) == 1:
        return kinds[0]
    chosen = np.argmin(np.stack([kind.total for kind in kinds]), axis=0)
    units = np.arange(len(chosen))

    def of_chosen(rows: Sequence[Seconds]) -> Seconds:
        return np.stack(rows)[chosen, units]

    made = UnitSeconds(
        of_chosen([kind.forward for kind in kinds]),
        of_chosen([kind.backward_input for kind in kinds]),
        of_chosen([kind.backward_weight for kind in kinds]),
    )
    if not any(kind.waits for kind in kinds):
        return made
    nothing = np.zeros_like(made.forward)
    waits = [kind.waits or (nothing, nothing) for kind in kinds]
    return made.waiting(of_chosen([each[0] for each in waits]), of_chosen([each[1] for each in waits]))
