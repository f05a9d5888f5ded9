"""`simccl`: the process group of the simulated devices, which torch.distributed makes under this name.

    dist.init_process_group("cpu:gloo,sim:simccl", ..)    it is also the default of the device type

csrc/group.cpp says how it orders work. Tensors of the host go over gloo, which the other name asks for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

BACKEND = "simccl"


def register(device_type: str) -> None:
    """Makes it the backend of a device type."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        inside = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        inside._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        inside._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        torch.ops.simdev.add_group(inside.boxed())
        return inside._get_backend(torch.device(device_type))

    dist.Backend.register_backend(BACKEND, make, devices=[device_type])
    # torch splits groups by two names that the classes of its own backends have, and their base does not.
    Backend.options = property(lambda _: None)
    Backend.perform_nocolor_split = lambda *_: None
