"""One weight, one module or one value at several places, over 2, 3 and 4 stages and random cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import pytest
import torch
import torch.nn.functional as F
from situations import BARE, Note, Situation, Trainer, insist_on_parity, step
from torch import Tensor, nn
from turns import in_turns
from zoo import case
from zoo_case import Case, classes, cross_entropy, features, squared_error, tokens

import outsize
from outsize.ir.answers.verdict import Verdict
from outsize.train.batch.batch import Batch

pytestmark = pytest.mark.usefixtures("shared_recordings")


def linear(a: int = 8, b: int = 8) -> nn.Linear:
    return nn.Linear(a, b)


@final
class TiedAutoencoder(nn.Module):
    """The decoder's weights are the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.middle = linear(8, 6), linear(6, 4), linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.middle(torch.tanh(self.second(torch.tanh(self.first(x))))))
        wide = torch.tanh(F.linear(code, self.second.weight.T))
        return F.linear(wide, self.first.weight.T)


@final
class CalledThrice(nn.Module):
    """One block between others, as ALBERT shares its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(linear(), nn.Tanh(), nn.BatchNorm1d(8, track_running_stats=False))
        self.first, self.second, self.last = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.block(x))
        x = self.second(self.block(torch.tanh(x)))
        return self.last(self.block(x))


@final
class TwoNames(nn.Module):
    """One module registered under two names, and one parameter under two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.again = self.a
        self.c.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


@final
class Siamese(nn.Module):
    """Both halves of the features through one encoder, and a loss on the difference."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(linear(4, 8), nn.Tanh(), linear(), nn.Dropout(0.2), linear())
        self.head = linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, :4], x[:, 4:]
        return self.head((self.encoder(left) - self.encoder(right)).abs())


@final
class Skips(nn.Module):
    """The first value and the first weight are used by every later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.layers = nn.ModuleList([linear() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        first = y = torch.tanh(self.first(x))
        for layer in self.layers:
            y = torch.tanh(layer(y) + first + F.linear(y, self.first.weight))
        return y


@final
class TiedHead(nn.Module):
    """Input and output embeddings, of which a part of the rows is used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(128, 8), nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, ids: Tensor) -> Tensor:
        return (self.body(self.embedding(ids)).mean(1) @ self.embedding.weight.T)[:, :5]


def wide(make: Callable[[], nn.Module]) -> Case:
    return Case(
        make.__name__, make, lambda n: ((features(n, 8),), {}), squared_error, lambda n: features(n, 8)
    )


OWN = tuple(
    replace(wide(kind), smallest_microbatch=2)
    for kind in (TiedAutoencoder, CalledThrice, TwoNames, Siamese, Skips)
)
HEAD = Case("TiedHead", TiedHead, lambda n: ((tokens(n),), {}), cross_entropy, classes)
ZOO = tuple(case(name) for name in ("gpt2", "qwen3", "t5", "bart", "bert", "whisper"))
# With --all alone at random cuts: like GPT-2 or T5, and the planner's cuts have them.
ZOO_AT_RANDOM = [
    pytest.param(known, id=known.name, marks=[] if known.name in ("gpt2", "t5") else [pytest.mark.full])
    for known in ZOO
]


@pytest.mark.parametrize(("known", "stages"), in_turns([*OWN, HEAD, *ZOO], [3, 4, 2], each=1))
@pytest.mark.sample(
    "TiedAutoencoder", "CalledThrice", "Siamese", "Skips", "TiedHead", "TwoNames", "gpt2", "t5"
)
def test_tied_and_shared_over_stages(known: Case, stages: int) -> None:
    insist_on_parity(replace(BARE, stages=stages), known)


@pytest.mark.parametrize(("known", "seed"), in_turns([*OWN, HEAD, *ZOO_AT_RANDOM], [1, 2, 3], each=1))
@pytest.mark.sample("TiedAutoencoder", "CalledThrice", "Siamese", "Skips", "TiedHead", "TwoNames", "gpt2")
def test_tied_and_shared_at_random_cuts(known: Case, seed: int) -> None:
    insist_on_parity(replace(BARE, stages=4, cuts=seed, dropout=True, schedule="gpipe"), known)


@pytest.mark.parametrize(("known", "stages"), in_turns([*OWN, HEAD, *ZOO[:3]], [2, 3], each=1))
@pytest.mark.sample("TiedAutoencoder", "CalledThrice", "Siamese", "Skips", "TiedHead", "TwoNames", "gpt2")
def test_shared_under_autocast_without_its_cache(known: Case, stages: int) -> None:
    """With the cache one process adds the gradients of a weight's uses in bfloat16, before they are cast."""

    def loop(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                result = step(trainer, batch, update=False)
            note(result.loss)
            trainer.update()

    insist_on_parity(Situation("autocast", loop=loop, stages=stages, changes=False), known)


@final
class ReadTwoWays(nn.Module):
    """The first layer's weight is multiplied in bfloat16 there, and in float32 and bfloat16 at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.last(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return x @ self.first.weight + x.float() * self.first.weight.sum(0)


def checked(model: nn.Module, *, cache: bool, processes: bool = False) -> Verdict:
    x = features(8, 8)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        return outsize.check(model, (x,), stages=3, loss_fn=F.mse_loss, target=x, processes=processes)


def test_check_says_when_the_cache_of_autocast_is_not_shared() -> None:
    verdict = checked(ReadTwoWays(), cache=True)
    assert not verdict.bit_equal
    assert verdict.grad_diff < 2**-5  # a few roundings to bfloat16
    assert any("first.weight, cast or not" in note for note in verdict.notes)
    assert any("cache_enabled=False) is bit-equal" in note for note in verdict.notes)
    assert checked(ReadTwoWays(), cache=False).bit_equal


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_check_is_under_the_autocast_of_its_caller(processes: bool, cache: bool) -> None:
    """Ranks work in other threads than the caller's, where autocast is off. All stages read one cast."""
    verdict = checked(CalledThrice(), cache=cache, processes=processes)
    assert verdict.bit_equal
    assert not any("autocast" in note for note in verdict.notes)
