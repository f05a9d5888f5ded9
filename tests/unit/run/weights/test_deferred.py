"""Boxes of deferred results against the same boxes of the results, and which elements are read for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.run.weights.deferred import DeferredTensor, ReadBox

SHAPE = (4, 6, 2)
Make = Callable[[list[Any]], Any]
NOT_BY_ROWS = (
    *("every other", "transposed", "permuted", "a view of what was transposed"),
    "any other operator",
)
CASES: dict[str, Make] = {
    "merged": lambda t: torch.cat([torch.stack([t[0], t[1]]), torch.stack([t[2], t[3]])], 1),
    "cat last": lambda t: torch.cat(t, -1),
    "stack inside": lambda t: torch.stack(t, dim=1),
    "chunk": lambda t: torch.chunk(t[0], 3, dim=1)[2].contiguous(),
    "split by sizes": lambda t: torch.split(t[0], [1, 2, 3], dim=1)[1],
    "transposed": lambda t: torch.transpose(t[0], 0, 1).contiguous(),
    "permuted": lambda t: t[0].permute(2, 0, 1),
    "sliced": lambda t: t[0][1:3, ..., -1:],
    "every other": lambda t: t[0][:, 1::2],
    "one of": lambda t: t[0].unbind(1)[-2],
    "selected": lambda t: t[0][2],
    "squeezed": lambda t: t[0][:, :1].squeeze(1).unsqueeze(-1),
    "cast": lambda t: t[0].to(torch.bfloat16)[...],
    "a view of what was transposed": lambda t: t[0].transpose(0, 1).contiguous().view(3, -1).t(),
    "any other operator": lambda t: t[0].reshape(2, -1, 3).flip(0),
}


def deferred(values: Tensor, name: str, read: list[tuple[str, int]]) -> DeferredTensor:
    def box_of(box: ReadBox) -> Tensor:
        found = values[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
        read.append((name, found.numel()))
        return found

    return DeferredTensor(values.to("meta"), box_of, frozenset((name,)))


def boxes(shape: torch.Size) -> list[ReadBox]:
    last = ReadBox(tuple(n - 1 for n in shape), (1,) * len(shape))
    half = ReadBox(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape))
    return [ReadBox((0,) * len(shape), tuple(shape)), last, half]


@pytest.mark.parametrize("case", CASES)
def test_a_box_of_a_result_has_its_values(case: str) -> None:
    values = [torch.randn(SHAPE) for _ in range(4)]
    tensors = [deferred(v, str(i), []) for i, v in enumerate(values)]
    made, wanted = CASES[case](tensors), CASES[case](values)
    assert (made.shape, made.stride()) == (wanted.shape, wanted.stride())
    for box in boxes(wanted.shape):
        expected = wanted[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
        assert torch.equal(made.read(box).to(wanted.dtype), expected), box


def test_only_the_box_is_read() -> None:
    read: list[tuple[str, int]] = []
    tensors = [deferred(torch.randn(SHAPE), str(i), read) for i in range(4)]
    merged = CASES["merged"](tensors)  # (2, 8, 6, 2): experts, gate and up, ...
    merged.read(ReadBox((1, 4, 0, 0), (1, 4, 6, 1)))
    assert read == [("3", 24)]
    read.clear()
    CASES["any other operator"](tensors).read(ReadBox((0, 0, 0), (1, 1, 1)))
    assert read == [("0", 48)]


def test_a_result_knows_from_which_tensors_it_is_made() -> None:
    tensors = [deferred(torch.randn(SHAPE), str(i), []) for i in range(4)]
    assert CASES["merged"](tensors).leaves == set("0123")
    assert torch.cat(tensors[1:3]).leaves == set("12")


def test_a_parameter_of_it_is_one_as_well() -> None:
    made = torch.nn.Parameter(deferred(torch.ones(SHAPE), "w", []))
    assert isinstance(made, DeferredTensor)
    assert torch.equal(made.read(made.whole()), torch.ones(SHAPE))


@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_alone_where_it_says_so(case: str) -> None:
    read: list[tuple[str, int]] = []
    plain = [deferred(torch.randn(SHAPE), str(n), read) for n in range(4)]
    by_rows = [deferred(torch.randn(SHAPE), str(n), read) for n in range(4)]
    for tensor in by_rows:
        tensor.divides = True
    made = CASES[case](by_rows)
    assert made.divides == (case not in NOT_BY_ROWS)
    whole = made.whole()
    made.read(ReadBox(whole.offsets, (1, *whole.sizes[1:])))
    assert not made.divides or sum(elements for _, elements in read) == made.twin[:1].numel()
    assert not CASES[case](plain).divides
