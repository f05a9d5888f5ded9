"""Holds a process to a part of a device's memory, so that another run can have the rest.

    accelerator   torch's allocator raises OutOfMemoryError above the limit (set_per_process_memory_fraction)
    CPU           the kernel refuses memory above RLIMIT_DATA, and torch raises "can't allocate memory"

The limit of an accelerator is of what torch allocates: the driver's context comes on top. That of a CPU is of
all data of the process, the interpreter's and its libraries' included.
"""

from __future__ import annotations

from typing import Any

import psutil
import torch

from outsize.device.accelerators import is_accelerator, properties


def device_bytes(device: torch.device) -> int:
    """Returns all memory of an accelerator's device, or of the host."""
    return properties(device).memory_bytes if is_accelerator(device) else psutil.virtual_memory().total


def free_bytes(device: torch.device) -> int:
    """Returns what is free of an accelerator's device, or of the host, kept memory of torch included."""
    if not is_accelerator(device):
        return psutil.virtual_memory().available
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def limit_memory(device: torch.device, limit_bytes: int) -> bool:
    """Lets this process have so many bytes of the device; returns whether anything here can hold it to that.

    A later call replaces the limit. What a process has already is not taken away.
    """
    if is_accelerator(device):
        limit: Any = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
        if limit is None:
            return False
        limit(min(1.0, limit_bytes / device_bytes(device)), device)
        return True
    return _limit_data(limit_bytes)


def _limit_data(limit_bytes: int) -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))
    return True
