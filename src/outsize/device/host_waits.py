"""Counts how often the host waits for a device, by torch's own watch (`set_sync_debug_mode`).

torch sees waits within its operators (`.item()`, `.cpu()`, a copy to pageable memory), and not those that a
program asks for by name (`synchronize`).
Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def count_host_waits(device: torch.device, work: Callable[[], object]) -> int | None:
    """Returns how often the host waited while `work` ran; None where the device's module has no watch."""
    module = torch.get_device_module(device)
    watch = getattr(module, "set_sync_debug_mode", None)
    if watch is None:
        return None
    before = module.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watch("warn")
        try:
            work()
        finally:
            watch(before)
    return sum("synchronizing" in str(each.message) for each in said)
