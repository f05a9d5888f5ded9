"""Page-locked memory of just the size that is asked for.

torch's own (`pin_memory=True`) rounds each piece up to a power of two: 9 GiB of weights would take 16. Here a
mapping of the system is registered with CUDA, and unregistered before it is unmapped.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor

from outsize.errors import BadOption


@final
class _Locked(mmap.mmap):
    """Registered while it lives; a tensor from `torch.frombuffer` keeps it alive."""

    address: int | None = None

    def __del__(self) -> None:
        if self.address is not None:
            with suppress(Exception):  # CUDA may be gone when Python ends
                _cudart().cudaHostUnregister(self.address)


def page_locked(size_bytes: int) -> Tensor:
    """Bytes of the host that CUDA copies without the host's help. Raises BadOption where none are left."""
    room = _Locked(-1, max(size_bytes, 1))
    found = torch.frombuffer(room, dtype=torch.uint8)
    status = int(_cudart().cudaHostRegister(found.data_ptr(), len(room), 0))
    if status:
        raise BadOption(
            "the host's memory for weights cannot be page-locked",
            numbers=f"{len(room):,} bytes; cudaHostRegister gives {status}",
            next_step="ulimit -l unlimited, or a host with more memory",
        )
    room.address = found.data_ptr()
    return found[:size_bytes]


def _cudart() -> Any:
    return torch.cuda.cudart()
