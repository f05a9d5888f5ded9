"""A batch of plain tensors is answered without a walk, as the walk would answer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import BatchDims


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(24.0).reshape(6, 4), torch.arange(6), torch.arange(30).reshape(5, 6)


CASES: dict[str, Callable[[], Batch]] = {
    "one": lambda: Batch((tensors()[0],), {}),
    "keywords and a target": lambda: Batch((), {"ids": tensors()[0], "mask": tensors()[1]}, (tensors()[1],)),
    "a table": lambda: Batch((tensors()[0], torch.ones(3, 2)), {}),
    "a scalar": lambda: Batch((tensors()[0], torch.tensor(2.0)), {}),
    "dims": lambda: Batch((tensors()[0], tensors()[2]), {}, dims=(0, 1), listed=()),
    "one tensor twice": lambda: Batch((), {"ids": (x := tensors()[0]), "labels": x}),
    "transposed": lambda: Batch((tensors()[0].T.contiguous().T,), {}, (tensors()[1],)),
}
OTHERS: dict[str, Callable[[], Batch]] = {
    "a number": lambda: Batch((tensors()[0], 3), {}),
    "a list of tensors": lambda: Batch(([tensors()[0]],), {}),
    "nothing for a keyword": lambda: Batch((tensors()[0],), {"mask": None}),
    "a nested tensor": lambda: Batch((torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),), {}),
    "a sparse tensor": lambda: Batch((torch.eye(6).to_sparse(),), {}),
    "a parameter": lambda: Batch((torch.nn.Parameter(tensors()[0]),), {}),
}
ROWS: tuple[Any, ...] = (slice(0, 2), slice(4, 6), torch.tensor([5, 0, 0]))


def answers(batch: Batch) -> list[Any]:
    """All that a step asks of a batch, tensors with their layouts."""
    found: list[Any] = [batch.in_lists(), batch.is_inside(), batch.batch_dims(), batch.size]
    for part in (*(batch.take(rows) for rows in ROWS), *batch.split(4), BatchDims(never).of(batch)):
        found += [part.dims, part.listed, list(part.kwargs), len(part.args), len(part.target)]
        found += [(t.shape, t.stride(), t.dtype, t.tolist()) for t in part.tensors()]
    return found


def never(batch: Batch, *, is_trial: bool = True) -> Exception | None:
    """A model that takes every batch."""
    return None


def walked(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patches:
        patches.setattr(Batch, "plain", lambda _: None)
        return ask()


@pytest.mark.parametrize("case", CASES)
def test_a_walk_says_the_same(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    assert CASES[case]().plain() is not None
    assert answers(CASES[case]()) == walked(monkeypatch, lambda: answers(CASES[case]()))


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_plain_tensor_is_walked(case: str) -> None:
    assert OTHERS[case]().plain() is None


def test_signatures_differ_where_those_of_a_walk_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[Hashable]:
        x, y, _ = tensors()
        one, wide = x.clone().requires_grad_(), x.double()
        args = [Batch(given, {}) for given in ((x,), (x.clone(),), (x, y), (wide,), (x.T,), (one,))]
        named = [Batch((), given) for given in ({"x": x}, {"y": x}, {"x": x, "y": y}, {"y": y, "x": x})]
        more = [*args, Batch((x.T.contiguous(),), {}), *named, Batch((x,), {}, (y,))]
        return [batch.signature() for batch in more]

    def groups(found: list[Hashable]) -> list[int]:
        return [found.index(key) for key in found]

    assert groups(keys()) == groups(walked(monkeypatch, keys))
    assert len(set(groups(keys()))) > 8
