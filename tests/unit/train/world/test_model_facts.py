"""Facts tell models apart that have the same weights, and are the same in every process."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.train.world.model_facts import digest_of, facts_of, text_of


class Block(nn.Module):
    """Holds whatever it is given as an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(2, 2), value

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        return x.sum() * factor

    return loss


def sum_of(x: Tensor) -> Tensor:
    return x.sum()


def mean_of(x: Tensor) -> Tensor:
    return x.mean()


class Halved(torch.autograd.Function):
    """A function of the user."""


class Doubled(torch.autograd.Function):
    """Another one."""


PAIRS: list[tuple[Any, Any]] = [
    (nn.ReLU(), nn.GELU()),
    (nn.Dropout(0.1), nn.Dropout(0.5)),
    (nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3)),
    (Block(1), Block(2)),
    (Block([1, 2]), Block([1, 3])),
    (Block({"a": 1}), Block({"a": 2})),
    (Block({1, 2}), Block({1, 3})),
    (Block(F.gelu), Block(F.relu)),
    (Block(functools.partial(F.gelu, approximate="tanh")), Block(functools.partial(F.gelu))),
    (Block(SimpleNamespace(p=0.1)), Block(SimpleNamespace(p=0.2))),
    (Block(lambda x: x + 1), Block(lambda x: x + 2)),
    (Block(Halved.apply), Block(Doubled.apply)),
    (Block(torch.zeros(2)), Block(torch.zeros(3))),
    (nn.Linear(2, 2), nn.Linear(2, 2).eval()),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_models_that_compute_differently_differ(one: nn.Module, other: nn.Module) -> None:
    assert facts_of(one, None) != facts_of(other, None)


@pytest.mark.parametrize("model", [model for pair in PAIRS for model in pair])
def test_a_copy_has_equal_facts(model: nn.Module) -> None:
    values = dict(vars(model))
    copy = type(model).__new__(type(model))
    copy.__dict__.update(values)
    assert facts_of(model, None) == facts_of(copy, None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sum_of, mean_of),
        (scaled(0.5), scaled(2.0)),
        (nn.MSELoss(), nn.L1Loss()),
        (nn.MSELoss(), nn.MSELoss(reduction="sum")),
    ],
)
def test_loss_functions_that_differ_differ(one: Any, other: Any) -> None:
    model = nn.Linear(2, 2)
    assert facts_of(model, one) != facts_of(model, other)
    assert facts_of(model, one) == facts_of(model, one)


def test_private_attributes_of_objects_are_no_facts() -> None:
    """GenerationConfig of transformers holds the hash of an object, which every process has of its own."""
    one, other = (Block(SimpleNamespace(p=0.1, _hash=number)) for number in (1, 2))
    assert facts_of(one, None) == facts_of(other, None)


def with_addresses() -> nn.Module:
    """Returns a module that keeps what is another number in every process, in each way that libraries do."""
    block = Block(None)
    block.own_id, block.keys = id(block), {id(p): 1 for p in block.parameters()}  # type: ignore[assignment]
    block.memory, block.text = block.linear.weight.data_ptr(), object.__repr__(block)  # type: ignore[assignment]
    return block


def test_addresses_are_no_facts() -> None:
    """torch.compile keeps the address of what it wraps."""
    one, other = with_addresses(), with_addresses()
    assert one.own_id != other.own_id
    assert facts_of(one, None) == facts_of(other, None)
    assert facts_of(torch.compile(one), None) == facts_of(torch.compile(other), None)


def test_large_numbers_that_are_no_addresses_are_facts() -> None:
    assert facts_of(Block(2**40 + 1), None) != facts_of(Block(2**40 + 2), None)


def test_lists_of_names_may_have_been_made_of_sets() -> None:
    assert facts_of(Block(["a", "b"]), None) == facts_of(Block(["b", "a"]), None)
    assert facts_of(Block([1, 2]), None) != facts_of(Block([2, 1]), None)


def test_weights_are_no_facts() -> None:
    assert facts_of(nn.Linear(2, 2), None) == facts_of(nn.Linear(2, 2), None)


@pytest.mark.interpreters
def test_a_digest_is_the_same_under_another_hash_seed() -> None:
    code = (
        "from torch import nn; from outsize.train.world.model_facts import digest_of, facts_of\n"
        "model = nn.TransformerEncoderLayer(4, 2); model.names = {'a', 'b', 'c', 'd'}; model.o = object()\n"
        "print(digest_of(facts_of(model, lambda x: x in {'p', 'q', 'r'})))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_digest_follows_the_facts() -> None:
    assert digest_of({"a": "1"}) == digest_of({"a": "1"}) != digest_of({"a": "2"})


def test_another_thread_may_fill_a_tuple() -> None:
    """Python cannot shorten a tuple that a list of all objects holds as well."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            text_of(1 << 40)

    def numbers() -> Iterator[int]:
        yield 1
        time.sleep(0)
        yield 2

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert tuple(numbers()) == (1, 2)
    finally:
        ends.set()
        asking.join()
