"""Allocates page-locked memory of exactly the size that is asked for.

torch's own (`pin_memory=True`) rounds each piece up to a power of two: 9 GiB of weights would take 16. Here a
mapping of the system is registered with CUDA (or HIP), and unregistered before it is unmapped. Where an
accelerator has no such call, torch's own is used.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor

from outsize.device.accelerators import accelerator_type
from outsize.errors import BadOption


@final
class _Locked(mmap.mmap):
    """Holds a mapping that is registered with CUDA while it lives; a tensor from `torch.frombuffer`
    references it.
    """

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            with suppress(Exception):  # CUDA may be gone when Python ends.
                _cuda_runtime().cudaHostUnregister(self.address)


def page_locked(size_bytes: int) -> Tensor:
    """Allocates bytes of the host that the accelerator copies asynchronously. Raises BadOption where none are
    left.
    """
    runtime = _cuda_runtime()
    if runtime is None:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    mapping = _Locked(-1, max(size_bytes, 1))
    locked = torch.frombuffer(mapping, dtype=torch.uint8)
    status = int(runtime.cudaHostRegister(locked.data_ptr(), len(mapping), 0))
    if status:
        raise BadOption(
            "the host's memory for weights cannot be page-locked",
            numbers=f"{len(mapping):,} bytes; cudaHostRegister gives {status}",
            next_step="ulimit -l unlimited, or a host with more memory",
        )
    mapping.address = locked.data_ptr()
    return locked[:size_bytes]


def _cuda_runtime() -> Any:
    """Returns torch's binding of the CUDA or HIP runtime, which registers memory; None elsewhere."""
    kind = accelerator_type()
    make = None if kind is None else getattr(torch.get_device_module(kind), "cudart", None)
    return None if make is None else make()
