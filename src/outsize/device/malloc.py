"""Problem: freed gradients and activations go back to the kernel, and come again as zeroed pages.

    default                  a tensor of 128 KiB to 32 MiB may be its own mapping, a larger one always is:
                             free -> munmap, malloc -> mmap, and a page fault for every 4 KiB touched
    after keep_freed_memory  all tensors live in the heap, which never shrinks: no fault in a steady step

A training step allocates the same tensors again and again. ResNet-50 on one core: 1 % of a step's CPU seconds
with microbatches of 6 x 96 x 96, where glibc's own adaptation does most of it, 12 % with 24 x 128 x 128; the
peak of resident memory grows by at most 11 % (`benchmarks/bound/lever.py`). An engine whose stages compute on
the host calls it, in one process as well. Numbers are the same to the bit:
only addresses differ. A large tensor that comes and goes between small ones that stay may find its place
taken each time, and the heap grows by as much again: what is large and needed once is a `mapped_tensor`. On
CUDA torch's caching allocator keeps what is freed by itself.
glibc's mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD. Oracles: tests/unit/device/test_malloc.py asks
glibc where a tensor lies; benchmarks/bound/lever.py counts page faults.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4


def keep_freed_memory() -> bool:
    """Makes this process's malloc retain freed memory; returns False where the C library is not glibc.

    It should be called after everything that is not needed again (other ranks' weights) has been freed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def mapped_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros on the host whose memory goes back to the kernel when it is freed."""
    count = math.prod(shape)
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))
