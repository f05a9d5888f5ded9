"""A tape whose lengths are inputs, at other lengths: what a recording there is, to the last argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_transformers import built as tiny
from torch import Tensor, nn

from outsize.capture.guards.symbolic_numbers import PlantedNumbers, Unfollowed
from outsize.capture.recording.fallbacks import TapeOptions, record
from outsize.capture.shapes.dynamic_tape import DynamicTape, SizedTape, varying_sizes
from outsize.program.tape import Tape

WIDTH = 32
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Convolutions(nn.Module):
    """Halves an image, and puts it back together by its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(torch.relu(self.down(x)))
        y = y[..., : x.shape[-2], : x.shape[-1]]
        return self.last(torch.cat([x, y], 1)).flatten(2).mean(-1)


class Counted(nn.Module):
    """Takes a number beside a sequence: how much of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, length: int) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (torch.arange(x.shape[1]) < length)[:, None]
        return x[:, :length].sum(1) / length


def _tokens(n: int, samples: int = 2) -> Inputs:
    ids = torch.arange(samples * n).view(samples, n) % 30 + 3
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "llama": (lambda: tiny("llama"), _tokens),
    "gpt2": (lambda: tiny("gpt2"), _tokens),
    "t5": (lambda: tiny("t5"), lambda n: _tokens(n, 3)),
    "images": (Convolutions, lambda n: ((torch.zeros(2, 3, n, n + 4),), {})),
    "number": (Counted, lambda n: ((torch.zeros(2, n, WIDTH), n - 3), {})),
    "samples": (Counted, lambda n: ((torch.zeros(n, 12, WIDTH), 7), {})),
}


def _recorded(model: nn.Module, inputs: Inputs, numbers: PlantedNumbers | None = None) -> SizedTape:
    args, kwargs = inputs
    tape = record(model, args, kwargs, options=TapeOptions(live=frozenset(), numbers=numbers))
    return SizedTape(tape, tuple(value for value in args if type(value) is int))


def _text(tape: Tape) -> list[Any]:
    calls = [(str(i.target), repr(i.args), repr(i.kwargs), repr(i.out), i.writes) for i in tape.instructions]
    return [*calls, tape.metas, tape.inputs, tape.loss, tape.guards]


def followed(model: nn.Module, first: Inputs, second: Inputs, third: Inputs) -> DynamicTape | None:
    """Returns the third's tape with lengths as inputs, that of two others."""
    pair = _recorded(model, first), _recorded(model, second)
    varying = varying_sizes(*pair)
    assert varying
    tape = _recorded(model, third, PlantedNumbers({}, follows=True, sizes=varying))
    return DynamicTape.of(tape, pair, model, None)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_tape_that_a_recording_makes(name: str) -> None:
    make, inputs = MODELS[name]
    model = make()
    dynamic = followed(model, inputs(12), inputs(9), inputs(14))
    assert dynamic is not None
    for n in (9, 12, 14, 10, 17, 24):
        expected = _recorded(model, inputs(n))
        found = dynamic.at(expected.sizes)
        assert found is not None
        assert _text(found.tape) == _text(expected.tape), n
    assert dynamic.at([(1, *shape[1:]) for shape in _recorded(model, inputs(9)).sizes[:-1]] + [(9,)]) is None


def test_a_size_that_did_not_vary_is_fixed() -> None:
    model, inputs = Counted(), MODELS["number"][1]
    dynamic = followed(model, inputs(12), inputs(9), inputs(14))
    assert dynamic is not None
    assert dynamic.at([(3, 10, WIDTH), (7,)]) is None
    assert dynamic.at([(2, 10, WIDTH + 1), (7,)]) is None
    assert dynamic.at([(2, 10, WIDTH), (7,)]) is not None


def test_each_of_equal_blocks_decides_on_its_own_lengths() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scale = 2.0 if x.shape[1] > 3 else 1.0
            return self.inner(x).view(-1, x.shape[1], WIDTH) * scale + x

    model = nn.Sequential(*(Block() for _ in range(12)))
    sizes = [((torch.zeros(2, n, WIDTH),), dict[str, Any]()) for n in (8, 6, 10)]
    dynamic = followed(model, *sizes)
    assert dynamic is not None
    assert len(dynamic.followed.decisions) == 12, "each block's own"
    expected = _recorded(model, ((torch.zeros(2, 20, WIDTH),), {}))
    found = dynamic.at(expected.sizes)
    assert found is not None
    assert _text(found.tape) == _text(expected.tape)
    assert dynamic.at([(2, 3, WIDTH), ()]) is None, "each of them decides otherwise"


def test_what_cannot_be_followed_says_so() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return sum((self.layer(x[:, n]) for n in range(x.shape[1])), torch.zeros(()))

    model = Looped()
    pair = [_recorded(model, ((torch.zeros(2, n, WIDTH),), {})) for n in (8, 6)]
    assert varying_sizes(*pair) is None, "the tapes have other numbers of values"
    one = _recorded(Counted(), MODELS["number"][1](8)), _recorded(Counted(), MODELS["number"][1](9))
    varying = varying_sizes(*one)
    assert varying
    numbers = PlantedNumbers({}, follows=True, sizes=varying)
    with pytest.raises(Unfollowed):
        _recorded(model, ((torch.zeros(2, 7, WIDTH),), {}), numbers)
