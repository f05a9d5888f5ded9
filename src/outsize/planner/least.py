"""What layouts hold, and compute twice, at least: sums over units, shared out; no table is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute
from outsize.ir.profile import Profile
from outsize.planner.floor import Work
from outsize.planner.layout import Layout
from outsize.planner.optimizer import OptimizerBytes
from outsize.planner.ranges import Bytes, bare_units
from outsize.planner.reach import Room
from outsize.planner.twice import held_bytes, twice_s

# Of sums over the units before each: all of them.
EACH: Final = slice(None)


@final
class Least:
    """Of one model at some microbatch sizes; `together`: whether an optimizer's temporaries are known for all
    devices.
    """

    def __init__(
        self, candidates: Mapping[int, tuple[ModelGraph, Profile]], optimizer: OptimizerBytes, together: bool
    ) -> None:
        self._candidates, self._optimizer, self._together = candidates, optimizer, together
        self._held: dict[int, dict[str, Bytes]] = {}

    def bytes_of(self, layout: Layout, units: int | slice = -1) -> tuple[Any, Any, Any, Any]:
        """What devices hold of the units before each: weights, gradients, states with master copies, what a
        microbatch keeps. Of all units, or of shape (n + 1,).
        """
        axes, held = layout.axes, self._sums(layout.captured)
        ways = axes.tp * (axes.dp_shard if layout.weights == "sharded" else 1)
        divided = ("weights", ways), ("gradients", ways), ("optimizer", axes.tp * axes.dp_shard)
        weights, gradients, states = (held[name][units] / by for name, by in divided)
        return weights, gradients, states, held["saved"][units] / layout.ways

    def may_fit(self, layout: Layout, recompute: Sequence[Recompute], rooms: Sequence[int]) -> bool:
        """Whether all devices together hold weights, gradients, states, and what one microbatch keeps in the
        stage that acts, unless that may go block by block.
        """
        if layout.hosted:
            return True
        *fixed, saved = self.bytes_of(layout)
        acting = 0.0 if "selective" in recompute else saved / layout.chunks
        return sum(fixed) + max(acting, self._updating(layout, -1)) <= sum(rooms)

    def room(self, layout: Layout, recompute: Sequence[Recompute], room_bytes: int) -> Room:
        """What each stage may hold in these ways."""
        weights, gradients, states, saved = self.bytes_of(layout, EACH)
        fixed, ways = weights + states, tuple(dict.fromkeys(again != "none" for again in recompute))
        anew = 0.0 * saved if "selective" in recompute else saved
        updating = fixed + gradients + self._updating(layout, EACH)
        return Room(fixed, fixed + gradients, updating, saved, anew, room_bytes, ways)

    def twice_s(self, layout: Layout, work: Work, rooms: Sequence[int]) -> float:
        """Seconds of a microbatch's forward that memory wants computed twice, at least."""
        if layout.hosted:
            return 0.0  # a second forward may hide behind the weights that come
        weights, _, states, saved = self.bytes_of(layout, EACH)
        held = held_bytes(layout, rooms, int(weights[-1] + states[-1]))
        return twice_s(np.diff(work.forward), np.diff(saved), held)

    def _updating(self, layout: Layout, units: int | slice) -> Any:
        """Temporaries of the optimizer's step; 0 where it goes tensor by tensor, or devices differ."""
        if not self._together:
            return 0.0
        return self._sums(layout.captured)["update"][units] / (layout.axes.tp * layout.axes.dp_shard)

    def _sums(self, captured: int) -> dict[str, Bytes]:
        """Summed over units, of shape (n + 1,); weights without buffers, of which every device has all."""
        if captured not in self._held:
            found = bare_units(*self._candidates[captured], self._optimizer)
            found["weights"] = found["weights"] - found["buffers"]
            self._held[captured] = {name: np.append(0, np.cumsum(part)) for name, part in found.items()}
        return self._held[captured]
