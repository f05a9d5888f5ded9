"""Digests of tensors: every bit counts, and nothing but bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outsize.run.verified import digests
from outsize.run.verified.digests import Noted, different, digest

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def of(tensor: Tensor) -> int:
    return int(digest(tensor))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of these tests are of several blocks."""
    digests._factors.cache_clear()
    monkeypatch.setattr(digests, "BLOCK", 8)
    yield
    digests._factors.cache_clear()


@pytest.mark.parametrize("count", [1, 2, 7, 16, 17, 45])
def test_each_flipped_bit_is_seen(count: int) -> None:
    drawn = torch.Generator().manual_seed(count)
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=drawn)
    known = {of(words.view(torch.float32))}
    for place in range(count):
        for bit in range(32):
            words[place] ^= 1 << bit if bit < 31 else -(2**31)
            known.add(of(words.view(torch.float32)))
            words[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert len(known) == 1 + 32 * count


def test_each_pair_of_flipped_bits_is_seen() -> None:
    """Two signs that flip do not cancel each other."""
    words = torch.tensor([7, -5, 2**40])
    flips = [(place, bit) for place in range(3) for bit in range(64)]
    known = set[int]()
    for at, (place, bit) in enumerate(flips):
        for other, another in flips[:at]:
            flipped = words.clone()
            flipped[place] ^= 1 << bit if bit < 63 else -(2**63)
            flipped[other] ^= 1 << another if another < 63 else -(2**63)
            known.add(of(flipped))
    assert len(known | {of(words)}) == 1 + len(flips) * (len(flips) - 1) // 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_digest_of_their_values(dtype: torch.dtype) -> None:
    whole = (torch.arange(60) % 7).to(dtype).reshape(6, 10)
    for view in (whole[1:], whole[:, 3:], whole.t(), whole[::2, 1], whole[2, 3], whole[:0]):
        assert of(view) == of(view.clone(memory_format=torch.contiguous_format))


def test_order_and_number_count() -> None:
    x = torch.arange(64.0)
    assert len({of(x), of(x.flip(0)), of(x.roll(8)), of(x.roll(16)), of(x[:63]), of(x[:62])}) == 6
    zeros = [of(torch.zeros(count, dtype=torch.uint8)) for count in range(20)]
    assert len(set(zeros)) == 20


def test_nan_and_signed_zero_are_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert of(nan) == of(nan.clone())
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))


def test_a_sparse_gradient_has_the_digest_of_its_values() -> None:
    dense = torch.zeros(5, 3)
    dense[2] = 1.5
    assert of(dense.to_sparse(1)) == of(dense)


def test_notes_say_what_differs() -> None:
    one, other = Noted(), Noted()
    for noted in (one, other):
        noted.add("a", torch.ones(3))
        noted.add("b", None)
    assert different(one.numbers(), other.numbers()) == []
    one.add("a", torch.zeros(1))
    other.add("a", torch.zeros(2))
    other.add("c", torch.ones(1))
    assert different(one.numbers(), other.numbers()) == ["a", "c"]
    assert Noted().numbers() == {}
