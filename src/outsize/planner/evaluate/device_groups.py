"""Groups the devices of a cluster into the ranks of pipelines: which groups there are, of which kinds, and
what the peak of a stage may take of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from outsize.ir.cluster import Cluster, Device
from outsize.planner.costs.cache import Cache
from outsize.planner.heterogeneous.assignment import first_of
from outsize.planner.layout.layout import grouped, of_kind
from outsize.planner.memory.headroom import with_usable_memory


@final
class DeviceGroups:
    """Answers what a cluster has for layouts whose ranks are groups of so many devices."""

    def __init__(self, cluster: Cluster, cache: Cache) -> None:
        self.cluster, self._cache = cluster, cache
        self.unequal = cluster.unequal
        self.kinds: Sequence[Device] = tuple({device.kind: device for device in cluster.devices}.values())
        self._with_room = with_usable_memory(cluster)

    def of_size(self, group: int) -> Cluster | None:
        """Returns the first device of each group with all its memory; None where there are no such groups."""
        return grouped(self.cluster, group)

    def room(self, group: int) -> Cluster | None:
        """Returns the first device of each group, with the memory that a peak may take."""
        return self._cache.once(("groups", group), lambda: grouped(self._with_room, group))

    def room_bytes(self, group: int) -> tuple[int, ...]:
        """Returns the bytes that peaks may take of the first device of each group, in descending order."""
        return self._cache.once(("room of groups", group), lambda: self._room_bytes(group))

    def _room_bytes(self, group: int) -> tuple[int, ...]:
        groups = self.room(group)
        devices = self._with_room.devices[::group] if groups is None else groups.devices
        return tuple(sorted((device.memory_bytes for device in devices), reverse=True))

    def kinds_of(self, group: int) -> Sequence[Device]:
        """Returns a device of each kind that has such groups."""
        groups = self.of_size(group) if self.unequal else None
        return self.kinds if groups is None else first_of(groups)

    def alike(self, device: Device) -> Cluster:
        """Returns all devices of the same kind: a group is among them."""
        if not self.unequal:
            return self.cluster
        kind = device.kind, device.memory_bytes
        return self._cache.once(("devices of a kind", *kind), lambda: of_kind(self.cluster, *kind))
