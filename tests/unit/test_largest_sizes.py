"""`largest_batch` and `largest` agree with an ordinary `fit` of the largest size and of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from torch import Tensor, nn

import outsize
from outsize.api.options import FitOptions, LossOptions
from outsize.errors import BadOption
from outsize.ir.answers.fit import Fit
from outsize.ir.answers.largest import Largest


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


class Words(nn.Module):
    """Activations grow with the samples and the tokens, weights with the layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 32)
        parts = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(layers))
        self.h = nn.ModuleList(parts)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for part in self.h:
            x = x + part(x)
        return x.square().mean((1, 2))


def made(samples: int = 2, tokens: int = 128, layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.device("meta"):
        return Words(layers), (torch.zeros(samples, tokens, dtype=torch.long),)


def with_loss(**sizes: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], LossOptions]:
    model, args = made(**sizes)
    return model, args, {}, {}


def of_batch(size: int, options: FitOptions) -> Fit:
    asked: FitOptions = {**options, "batch_size": size}
    return outsize.fit(*made(), **asked)


def check(found: Largest, fit: Fit, beyond: Fit) -> None:
    """`fit` and `beyond` are the ordinary answers at the largest size and one step further."""
    assert (fit.answer, beyond.answer == "YES") == ("YES", False)
    assert found.fit is not None
    assert found.fit.devices == fit.devices
    assert found.lacking_bytes == max(d.p95_bytes - d.memory_bytes for d in beyond.devices)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"cluster": "1x0.42GB"}, 1),
        ({"cluster": "1x0.42GB", "microbatches": 3}, 3),
        ({"cluster": "2x0.42GB"}, 2),
    ],
    ids=["one", "microbatches", "stages"],
)
def test_the_largest_batch(options: FitOptions, step: int) -> None:
    found = outsize.largest_batch(*made(), **options)
    assert found.value % step == 0
    assert found.next_value == found.value + step
    options = {"microbatches": step, **options, "axes": "pp"}
    check(found, *(of_batch(size, options) for size in (found.value, found.next_value)))
    assert found.tried <= 10


def test_the_largest_batch_of_a_mesh() -> None:
    options: FitOptions = {"cluster": "2x0.42GB", "axes": {"dp_shard": 2}, "microbatches": 1}
    found = outsize.largest_batch(*made(), **options)
    assert found.next_value == found.value + 2
    answers = [of_batch(size, options).answer for size in (found.value, found.next_value)]
    assert answers == ["YES", "NO"]


def test_the_longest_sequence_and_the_deepest_model() -> None:
    options: FitOptions = {"cluster": "1x0.42GB", "axes": "pp"}
    long = outsize.largest(lambda n: with_loss(tokens=n), step=32, **options)
    assert long.quantity == "sequence"
    check(long, *(outsize.fit(*made(tokens=n), **options) for n in (long.value, long.value + 32)))
    deep = outsize.largest(lambda n: with_loss(layers=n), "layers", most=4, **options)
    assert (deep.value, deep.next_value, deep.beyond) == (4, None, None)


def test_nothing_fits() -> None:
    found = outsize.largest_batch(*made(tokens=4096), cluster="1x0.395GB")
    assert (found.value, found.fit, found.next_value) == (0, None, 1)
    assert found.lacking_bytes


def test_a_bad_option_is_refused_at_once() -> None:
    with pytest.raises(BadOption, match="no option `clusters`"):
        outsize.largest_batch(*made(), clusters="1x1GB")  # pyright: ignore[reportCallIssue]
