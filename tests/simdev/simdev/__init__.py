"""A simulated accelerator: a device type `sim` of torch, whose queues run only as far as somebody waits.

    import simdev
    simdev.load()                          builds the C++ part once, and registers the device type `sim`
    x = torch.ones(3, device="sim:1")
    simdev.mode("lazy")                    a stream runs when somebody waits for it; finds each missing wait
    simdev.mode(seed=7)                    streams also run ahead by chance; the same seed, the same order
    simdev.mode("eager")                   each kernel runs at its launch
    simdev.host_waits()                    how often the host has waited since `reset_counters()`

A process loads it before its first backward, because torch's autograd engine counts the devices once, and
cannot fork into processes that use autograd afterwards. tests/simdev/README.md has the design.

Environment: SIMDEV_DEVICES (4), SIMDEV_MODE (lazy, eager or a seed), SIMDEV_MEMORY (bytes of each device).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from simdev import build, device_module, group

__all__ = [
    "capacity",
    "host_waits",
    "launches",
    "load",
    "mode",
    "pending",
    "reset_counters",
    "set_capacity",
    "waits_by_name",
]

NAME = "sim"


@cache
def load() -> None:
    """Registers the device type, and builds the library first where that has not been done."""
    torch.ops.load_library(str(build.library()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module.make())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    group.register(NAME)
    # Kernels run on a thread of their own; with one thread each their sums have the order of the CPU's.
    torch.set_num_threads(1)


def _control() -> Any:
    load()
    return torch.ops.simdev


def mode(kind: str = "random", *, seed: int | None = None) -> None:
    """Chooses how far streams run: `lazy`, `eager`, or by chance with a seed."""
    _control().set_mode("random" if seed is not None else kind, seed or 0)


def host_waits() -> int:
    """Returns how often the host has waited for a device since the counters were reset."""
    return _control().host_waits()


def waits_by_name() -> dict[str, int]:
    """Returns the host's waits by what has waited: a call such as `item`, or an operator without shapes."""
    lines = (line.rpartition(" ") for line in _control().waits_by_name())
    return {name: int(count) for name, _, count in lines}


def launches() -> int:
    """Returns how many kernels and copies were launched since the counters were reset."""
    return _control().launches()


def reset_counters() -> None:
    """Sets the counts of waits and launches to zero."""
    _control().reset_counters()


def pending(device: int = 0) -> int:
    """Returns how many jobs of a device's streams have not run."""
    return _control().pending(device)


def set_capacity(size_bytes: int, device: int = 0) -> None:
    """Limits the memory of a device; an allocation beyond it raises torch.OutOfMemoryError."""
    _control().set_capacity(device, size_bytes)


def capacity(device: int = 0) -> int:
    """Returns the bytes of memory that a device has."""
    return _control().capacity(device)
