"""Reads the bits of a tensor as integers.

A conjugate or a negative (`x.conj()`, `x.conj().imag`) is a view whose memory has not been changed yet, and
torch refuses to read such memory as another type.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """Returns the same values detached, contiguous, and with no conjugate or negative left to compute.

    It is a copy only where that is needed.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of the values in one dimension, as uint8 on the tensor's device."""
    return dense(tensor).reshape(-1).view(torch.uint8)
