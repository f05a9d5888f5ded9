"""Problem: do two ranks have the same bits, without sending them?

    digest(x) = sum over words w of x's bytes of w * a + (w >> 32) * b, modulo 2^64, for odd a and b

It is the multilinear hash of Carter and Wegman (1979), with a factor a and b for each place that looks
random (splitmix64; Steele et al., OOPSLA 2014). A word of which one half differs always changes the sum,
since odd factors can be undone; for more the chance to stay equal is 2^-33 or below. Without the second
product two signs that flip would cancel each other. Sums of integers do not depend on their order, so a
digest is computed on the device where the tensor is, in any number of threads, and its 8 bytes travel. It is
no protection against a person who wants two equal ones.

Blocks of BLOCK words share their factors; after each block the sum so far is multiplied, so that blocks do
not change places unseen. Complexity: one pass, for which a few blocks stay in the core's cache; accelerators
take ROWS blocks in one call, and have as many in memory thrice.

Oracle: tests/unit/run/verified/test_digests.py flips every bit, and every pair of bits of a few words.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from outsize.device.accelerators import is_accelerator
from outsize.program.values.tensor_bits import flat_bytes

BLOCK: Final = 1 << 15
ROWS: Final = 1 << 7
_HOST_ROWS: Final = 4
_WORD_BYTES: Final = 8
# Odd, of 2^64 divided by the golden ratio (Knuth 1973, sec. 6.4), and its like for the step between blocks.
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_BETWEEN: Final = 0xD1342543DE82EF95 - (1 << 64)
_MIX: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns the digest of a tensor's bits, in the order of its elements: 0-dim int64 on its device."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    words = _words(flat_bytes(dense))
    factors, powers = _factors(str(words.device))
    total = torch.full((), dense.numel(), dtype=torch.int64, device=words.device)
    whole, at_once = len(words) // BLOCK, ROWS if is_accelerator(words.device) else _HOST_ROWS
    for first in range(0, whole, at_once):
        rows = words[first * BLOCK : min(first + at_once, whole) * BLOCK].view(-1, BLOCK)
        behind = powers[-len(rows) :]
        total = total * (behind[0] * _BETWEEN) + (_sums(rows, factors) * behind).sum()
    if whole * BLOCK < len(words):
        rest = words[whole * BLOCK :]
        total = total * _BETWEEN + _sums(rest.view(1, -1), factors[:, : len(rest)])[0]
    return total


def _sums(rows: Tensor, factors: Tensor) -> Tensor:
    """Returns the sum of each row."""
    low, high = factors
    if is_accelerator(rows.device):  # It has no products of matrices of integers.
        return (rows * low).sum(1) + ((rows >> 32) * high).sum(1)
    return rows.mv(low) + (rows >> 32).mv(high)


def _words(data: Tensor) -> Tensor:
    """Returns bytes as words of 64 bits; the last one is filled up with zeros."""
    missing = -len(data) % _WORD_BYTES
    if missing:
        data = pad(data, (0, missing))
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


@lru_cache(maxsize=16)
def _factors(device: str) -> tuple[Tensor, Tensor]:
    """Returns the factors of the words of a block, and powers of the factor between blocks."""
    mixed = torch.arange(1, 2 * BLOCK + 1, dtype=torch.int64, device=device) * _FACTOR
    for shift, factor in zip((30, 27, 31), (*_MIX, 1), strict=True):
        mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)  # Shifts are of unsigned words.
        mixed *= factor
    powers = torch.full((ROWS,), _BETWEEN, dtype=torch.int64, device=device)
    powers[-1] = 1
    return (mixed | 1).view(2, BLOCK), powers.flip(0).cumprod(0).flip(0)


@final
class Noted:
    """Digests of values by their names, on their devices until they are read."""

    def __init__(self) -> None:
        self._digests: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor | None) -> None:
        """Notes a value, behind those of the same name; None is a value, too."""
        new = torch.full((), -1, dtype=torch.int64) if tensor is None else digest(tensor)
        known = self._digests.get(name)
        self._digests[name] = new if known is None else known.to(new.device) * _BETWEEN + new

    def numbers(self) -> dict[str, int]:
        """Returns all digests; the host waits for the device once."""
        if not self._digests:
            return {}
        home = max((d.device for d in self._digests.values()), key=lambda device: device.type != "cpu")
        numbers = torch.stack([d.to(home) for d in self._digests.values()]).tolist()
        return dict(zip(self._digests, numbers, strict=True))


def different(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Returns the names of the values whose digests differ, in their order, or that only one has."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if one.get(name) != other.get(name)]
