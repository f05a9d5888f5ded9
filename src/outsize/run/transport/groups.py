"""Makes the process groups of a run: one for tensors of the device, one for those of the host, one per queue.

    RankGroup.device   collectives of device tensors, in the backend of the run (NCCL)
    RankGroup.host     numbers, layouts and objects on the host: gloo, unless the run's group takes them
    queues             messages between two ranks: values and gradients, to higher and to lower ranks

An ordered backend (NCCL) executes the operations of a communicator one after the other, so a message that
nobody receives yet holds up all behind it. In a group that is bound to a device (`device_id`) all ranks share
one communicator; in any other each pair of ranks has its own, made when both send or receive for the first
time. The groups of queues are therefore never bound:

    one queue for all peers (bound)                     a queue per pair, direction and kind
    rank 0   SEND tied@3  SEND F0@1  SEND F1@1 ...      0:3  SEND tied       0:1  SEND F0  SEND F1
    rank 1   RECV F0@0    RECV F1@0  SEND F0@2 ...      0:1  RECV F0 RECV F1 1:2  SEND F0
    rank 2   RECV F0@1    waits for rank 1, which waits for rank 0, which waits for rank 3, which
    rank 3   has no receive yet: it waits for rank 2

The receives of a queue are posted in the order of its sends (schedules/lower.py), so an operation waits for
nothing but its own message.

torch keeps a group until the default group is destroyed, with its threads, its sockets and, over NCCL, memory
of the device. So engines that are made one after another in one process share what they need alike
(`made_once`): a sweep or a notebook has as many groups as layouts, not as engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from outsize.device.accelerators import is_accelerator

Made = TypeVar("Made")

# Backends that match messages by their tags and take tensors of the host.
HOST_BACKENDS: Final = frozenset({"gloo", "mpi", "ucc"})


# What was made over a default group, by its store, which torch alone holds: when the group is destroyed, by
# anyone, all of it goes. (By the group itself it would stay, since what is made refers to the group.)
_MADE: Final[WeakKeyDictionary[Any, dict[Hashable, Any]]] = WeakKeyDictionary()


def made_once(key: Hashable, make: Callable[[], Made]) -> Made:
    """Returns what `make` has made for this key since the default group exists, and calls it the first time.

    Ranks of one program ask in the same order, so all of them call it or none.
    """
    known = _MADE.setdefault(dist.distributed_c10d._get_default_store() or dist.group.WORLD, {})
    if key not in known:
        known[key] = make()
    made: Made = known[key]
    return made


@final
@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that talk to each other: over `device` with tensors of their device, over `host` with others."""

    device: dist.ProcessGroup
    host: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Self:
        """Returns the ranks of a group; a collective over it where it does not take both kinds of tensors."""
        host = host_group(group)
        if backend_of(group, device.type) is not None:
            return cls(group, host)
        backend = device_backend(group, device)
        return cls(host if backend == "gloo" else unbound_group(group, backend, "device"), host)

    def of_tensor(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Returns the group whose collectives take this tensor."""
        return self.device if is_accelerator(tensor.device) else self.host

    def rank(self) -> int:
        """Returns the number of this process among the ranks."""
        return self.device.rank()

    def size(self) -> int:
        """Returns the number of ranks."""
        return self.device.size()


def backend_of(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Returns the backend of a group for tensors of a device type; None where it has none."""
    pairs = (part.split(":") for part in dist.get_backend_config(group).lower().split(","))
    return dict(pair for pair in pairs if len(pair) == 2).get(device_type)


def device_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the backend for tensors of a device: the group's own, or else the usual one of the device.

    A group with a backend for the host alone (gloo, MPI) does not move messages of an accelerator.
    """
    own = backend_of(group, device.type)
    is_for_host = own in HOST_BACKENDS and device.type != "cpu"
    return dist.get_default_backend_for_device(device.type) if own is None or is_for_host else own


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group where it takes tensors of the host, else one over gloo: a collective over it."""
    takes_host = backend_of(group, "cpu") in HOST_BACKENDS
    return group if takes_host else unbound_group(group, "gloo", "host")


def unbound_group(group: dist.ProcessGroup, backend: str, use: str) -> dist.ProcessGroup:
    """Returns the group of the same ranks for a use, bound to no device; a collective over `group`."""
    ranks, is_subgroup = dist.get_process_group_ranks(group), group.size() < dist.get_world_size()

    def make() -> dist.ProcessGroup:
        with _unbound():
            made = dist.new_group(ranks, backend=backend, use_local_synchronization=is_subgroup)
        assert isinstance(made, dist.ProcessGroup)
        return made

    return made_once((use, backend, *ranks), make)


@contextmanager
def _unbound() -> Iterator[None]:
    """Lets new groups have communicators of their own, which are not split from the default group's.

    A split is a collective over all ranks of the run, and a group that is made of it has one communicator.
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device
