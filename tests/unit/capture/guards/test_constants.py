"""A tensor that came with the batch, in what cannot be looked into, is an error and no constant."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.errors import BadOption

X = torch.randn(4, 6)
TABLE = torch.randn(6)
WITH_READS = TapeOptions(live=frozenset())


@final
class Reading(nn.Module):
    """Computes with what `read` finds."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(6, 6), nn.Linear(6, 1), read
        self.rows = np.arange(6.0, dtype=np.float32)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.last(self.first(x) * self.read(other)).sum()


def generated(tensors: list[Tensor]) -> Iterator[Tensor]:
    yield from tensors


def with_default(table: Tensor = TABLE) -> Callable[[Any], Tensor]:
    def read(_: Any, table: Tensor = table) -> Tensor:
        return table

    return read


def queued() -> Any:
    values: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    for _ in range(4):
        values.put(torch.randn(6))
    return values


UNSEEN = {
    "an iterator": (iter, next, "list_iterator"),
    "a generator": (generated, next, "generator"),
    "a queue": (lambda _: queued(), lambda q: q.get(), "SimpleQueue"),
    "an exception": (lambda tensors: ValueError(*tensors), lambda error: error.args[0], "ValueError"),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_tensor_from_where_nobody_looks_is_an_error_that_says_where(kind: str) -> None:
    make, read, name = UNSEEN[kind]
    words = rf"\(perhaps it is in args\[1\], a {name}\).*shape \(6,\).*test_constants.py:\d+.*as an argument"
    with pytest.raises(BadOption, match=words):
        record(Reading(read), (X, make([torch.randn(6)])), {}, options=WITH_READS)


def test_so_it_is_in_the_loss() -> None:
    target = iter([torch.randn(4)])
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    with pytest.raises(BadOption, match=r"in loss_fn .* target\[0\], a list_iterator"):
        record(model, (X,), {}, lambda out, given: (out * next(given)).sum(), (target,), WITH_READS)


@functools.cache
def frequencies(count: int) -> Tensor:
    return torch.arange(float(count))


def closing_over(tensor: Tensor) -> Callable[[Any], Tensor]:
    return lambda _: tensor


class Tables:
    """An object of the model's, with a tensor."""

    shared = torch.randn(6)

    def __init__(self) -> None:
        self.own = {"rows": [torch.randn(6)]}


HELD = Tables()
SEEN: dict[str, Callable[[Any], Tensor]] = {
    "a global": lambda _: TABLE,
    "an object in a global": lambda _: HELD.own["rows"][0],
    "a class": lambda _: Tables.shared,
    "a closure": closing_over(torch.randn(6)),
    "a default": with_default(),
    "a cache": lambda _: frequencies(6),
    "an array that the forward makes": lambda _: torch.from_numpy(np.linspace(0, 1, 6, dtype=np.float32)),
    "a value of the forward": lambda _: torch.tensor([1.0] * 6),
    "an argument in an object": lambda other: other.own["rows"][0],
}


@pytest.mark.parametrize("kind", SEEN)
def test_what_is_found_again_is_no_error(kind: str) -> None:
    tape = record(Reading(SEEN[kind]), (X, Tables()), {}, options=WITH_READS)
    assert tape.loss is not None
    assert len(tape.inputs) == 2  # x, and the tensor in the object


def test_an_array_of_the_model_is_no_error() -> None:
    model = Reading(lambda _: torch.ones(()))
    model.read = lambda _: torch.from_numpy(model.rows)
    assert record(model, (X, None), {}, options=WITH_READS).loss is not None
