"""Bounds what layouts hold and recompute from sums over units, divided over devices; no table is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.bounds.chain import Room
from outsize.planner.bounds.recompute import recompute_s, storable_bytes
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.cache import Cache
from outsize.planner.layout.expert_parallel import of_expert_rank
from outsize.planner.layout.layout import Layout
from outsize.planner.layout.tensor_parallel import SavedBytes
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.memory.optimizer_states import OptimizerBytes
from outsize.planner.memory.range_tables import Bytes, bytes_of_units
from outsize.policies.activations import Recompute, any_in_blocks, saves_memory

# This index selects all entries of sums over the units before each.
EACH: Final = slice(None)


def exceeds_all_devices(
    graph: ModelGraph, profile: Profile, optimizer: OptimizerBytes, cluster: Cluster
) -> bool:
    """Returns whether the devices have less room together than the model's weights, gradients and states, so
    that without the host no layout fits.
    """
    sizes = bytes_of_units(graph, profile, optimizer)
    held = sizes["weights"] - sizes["buffers"] + sizes["gradients"] + sizes["optimizer"]
    if not cluster.unequal:  # Temporaries of the optimizer's step are known for all devices.
        held = held + sizes["update"]
    return int(held.sum()) > sum(map(room_bytes, cluster.devices))


@final
class LeastBytes(NamedTuple):
    """Holds bytes that a device has at least of some units: numbers, or arrays over the units before each.

    `saved` is that of a microbatch. `whole` is on every device for the whole step, in addition to the
    weights; of that `casts` are gone when the optimizer works.
    """

    weights: Any
    gradients: Any
    states: Any
    saved: Any
    whole: Any
    casts: Any

    @property
    def fixed(self) -> Any:
        """Returns what lasts from the first forward to the last backward."""
        return self.weights + self.states + self.whole


@final
class MemoryBounds:
    """Bounds the memory of one model at some microbatch sizes; `together`: an optimizer's temporaries are
    known for all devices.
    """

    def __init__(
        self,
        candidates: Mapping[int, tuple[ModelGraph, Profile]],
        optimizer: OptimizerBytes,
        cache: Cache,
        *,
        together: bool,
    ) -> None:
        self._candidates, self._optimizer, self._together = candidates, optimizer, together
        self._cache = cache

    def bytes_of(self, layout: Layout, units: int | slice = -1) -> LeastBytes:
        """Returns what devices hold of the units before each; of all units, or of shape (n + 1,)."""
        axes, held = layout.axes, self._sums(layout)
        parts, shards = axes.product_parts, axes.product_parts * layout.weight_parts
        divided = ("weights", shards), ("gradients", shards), ("optimizer", parts * layout.shards)
        weights, gradients, states = (held[name][units] / by for name, by in divided)
        saved = self._saved_of_rank(layout)[units] / axes.token_parts
        ranked = parts > 1 and self._candidates[layout.captured][0].tensor is not None
        casts = 0 * held["casts"][units] if ranked else held["casts"][units]
        return LeastBytes(weights, gradients, states, saved, held["kept"][units] + casts, casts)

    def may_fit(self, layout: Layout, recompute: Sequence[Recompute], rooms: Sequence[int]) -> bool:
        """Returns whether all devices together hold weights, gradients, states, and what one microbatch saves
        in the stage that computes, unless that may be recomputed block by block.
        """
        if layout.hosted:
            return True
        least = self.bytes_of(layout)
        acting = 0.0 if any_in_blocks(recompute) else least.saved / layout.chunks
        updating = self._updating(layout, -1) - least.casts
        return least.fixed + least.gradients + max(acting, updating) <= sum(rooms)

    def room(self, layout: Layout, recompute: Sequence[Recompute], room_bytes: int) -> Room:
        """Returns what each stage may hold in these options."""
        least = self.bytes_of(layout, EACH)
        graded, options = least.fixed + least.gradients, saves_memory(recompute)
        anew = 0.0 * least.saved if any_in_blocks(recompute) else least.saved
        updating = graded - least.casts + self._updating(layout, EACH)
        return Room(least.fixed, graded, updating, least.saved, anew, room_bytes, options)

    def recompute_s(self, layout: Layout, work: PrefixTimes, rooms: Sequence[int]) -> float:
        """Returns a lower bound of the forward seconds of a microbatch that memory forces to be
        recomputed.
        """
        if layout.hosted:
            return 0.0  # A second forward may overlap with the weights that are loaded.
        least = self.bytes_of(layout, EACH)
        held = storable_bytes(layout, rooms, int(least.fixed[-1]))
        return recompute_s(np.diff(work.forward), np.diff(least.saved), held)

    def _updating(self, layout: Layout, units: int | slice) -> Any:
        """Returns the temporaries of the optimizer's step; 0 where it goes tensor by tensor, or devices
        differ.
        """
        if not self._together:
            return 0.0
        return self._sums(layout)["update"][units] / (layout.axes.product_parts * layout.shards)

    def _saved_of_rank(self, layout: Layout) -> Any:
        """Returns what a tensor-parallel rank saves of a microbatch, whose sequences are not divided, as sums
        over units.
        """
        axes, sums = layout.axes, self._sums(layout)["saved"]
        model = self._candidates[layout.captured]
        if axes.product_parts == 1 or axes.expert_parts > 1 or model[0].tensor is None:
            return sums / axes.product_parts
        whole = layout.captured, layout.sequence

        def summed() -> Bytes:
            units = self._cache.once(("saved", *whole), lambda: SavedBytes.of(*model, layout.sequence))
            return np.append(0, np.cumsum(units.of_rank(axes.product_parts)))

        return self._cache.once(("sums of saved", *whole, axes.product_parts), summed)

    def _sums(self, layout: Layout) -> dict[str, Bytes]:
        """Returns sums over units, of shape (n + 1,), of a rank that may have some of the experts alone;
        weights without what every device has all of (`kept`), and copies of weights.
        """
        key = layout.captured, layout.axes.expert_parts
        return self._cache.once(("sums of bytes", *key), lambda: self._summed(*key))

    def _summed(self, captured: int, ep: int) -> dict[str, Bytes]:
        sizes = bytes_of_units(*of_expert_rank(self._candidates[captured], ep), self._optimizer)
        sizes["weights"] = sizes["weights"] - sizes["buffers"]
        sizes["kept"] = sizes["buffers"] - sizes["casts"]
        return {name: np.append(0, np.cumsum(part)) for name, part in sizes.items()}
