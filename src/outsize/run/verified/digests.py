"""Problem: do two ranks have the same bits, without sending them?

    digest(x) = sum over words w_i of x's bytes of mix(w_i * m_i), modulo 2^64, for odd m_i

A word is multiplied by an odd factor and mixed as splitmix64 ends (Steele et al., OOPSLA 2014); both can be
undone, so one word that differs always changes the sum. For several the chance to stay equal is that of a
random hash of 64 bits; without the mixing, two signs that flip would cancel each other. Sums of integers do
not depend on their order, so a digest is computed on the device where the tensor is, in any number of
threads, and its 8 bytes travel. It is no protection against a person who wants two equal ones.

Blocks of BLOCK words share their factors; after each block the sum so far is multiplied, so that blocks do
not change places unseen. Complexity: one pass; three blocks of memory. Oracle:
tests/unit/run/verified/test_digests.py flips every bit, and every pair of bits of a few words.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from outsize.program.values.tensor_bits import flat_bytes

BLOCK: Final = 1 << 18
_WORD_BYTES: Final = 8
# Odd, of 2^64 divided by the golden ratio (Knuth 1973, sec. 6.4), and its like for the step between blocks.
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_BETWEEN: Final = 0xD1342543DE82EF95 - (1 << 64)
_MIX: Final = 0xBF58476D1CE4E5B9 - (1 << 64)  # of splitmix64


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Returns the digest of a tensor's bits, in the order of its elements: 0-dim int64 on its device."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    words = _words(flat_bytes(dense))
    total = torch.full((), dense.numel(), dtype=torch.int64, device=words.device)
    for block in words.split(BLOCK):
        total = total * _BETWEEN + _mixed(block * _factors(str(words.device))[: len(block)]).sum()
    return total


def _mixed(words: Tensor) -> Tensor:
    """Mixes each word by itself, in place; shifts are of unsigned words."""
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _MIX
    words ^= (words >> 29) & 0x7FFFFFFFF
    return words


def _words(data: Tensor) -> Tensor:
    """Returns bytes as words of 64 bits; the last one is filled up with zeros."""
    missing = -len(data) % _WORD_BYTES
    if missing:
        data = pad(data, (0, missing))
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    return data.view(torch.int64)


@lru_cache(maxsize=16)
def _factors(device: str) -> Tensor:
    return torch.arange(1, 2 * BLOCK, 2, dtype=torch.int64, device=device) * _FACTOR | 1


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
