"""A split model in a loop of the user's has the bits of the plain model, called once for each microbatch."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption
from outsize.train.split.calls import SplitByModules
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave


class _Net(nn.Module):
    """A layer is used twice in the second stage, and the input is read by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.third, self.last = nn.Linear(16, 16), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.second(torch.relu(self.first(x))))
        h = self.third(torch.relu(self.third(h))) + h
        return self.last(torch.cat([h, x], 1))


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.tensor_split(4)])


@pytest.mark.parametrize("penalty", [0.0, 0.01])
@pytest.mark.parametrize("samples", [13, 16])
def test_bits_of_loss_gradients_and_inputs(samples: int, penalty: float) -> None:
    torch.manual_seed(0)
    plain = _Net()
    x, y = torch.randn(samples, 8), torch.randn(samples, 4)
    split = outsize.split(copy.deepcopy(plain), (x,), stages=2, microbatches=4)
    models = (split, lambda value: _plain(plain, value))
    weights = [list(split.parameters()), list(plain.parameters())]
    optimizers = [torch.optim.AdamW(each) for each in weights]
    for _ in range(3):
        seen = []
        for model, own, optimizer in zip(models, weights, optimizers, strict=True):
            taken = x.clone().requires_grad_()
            loss = (model(taken) - y).square().mean() + penalty * sum(w.square().sum() for w in own)
            loss.backward()
            seen.append([loss.detach(), taken.grad, *(w.grad for w in own)])
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert split.state_dict().keys() == plain.state_dict().keys()


def test_a_dropped_call_leaves_nothing() -> None:
    x = torch.randn(8, 8)
    split = outsize.split(_Net(), (x,), stages=2, microbatches=4)
    split(x)
    gc.collect()
    split(x).sum().backward()
    assert not split.engine.calls._seats


def test_what_cannot_be_is_said() -> None:
    x = torch.randn(8, 8)
    split = outsize.split(_Net(), (x,), stages=2, microbatches=4)
    loss = split(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(BadOption, match="backward of this call has run"):
        loss.backward()
    with pytest.raises(BadOption, match="gradients of gradients"):
        torch.autograd.grad(split(x).sum(), list(split.parameters()), create_graph=True)
    split(x).sum().backward()


class _Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return h @ h.T


def test_a_rank_with_several_stages_gets_the_gradients_of_each_microbatch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())))
    x = torch.randn(16, 8)
    plan = outsize.plan(plain, (x,), cluster="2xcpu", stages=2, microbatches=4, schedule="interleaved")
    assert len(plan.stages) == 4
    split = outsize.split(copy.deepcopy(plain), (x,), plan=plan)
    split(x).square().sum().backward()
    _plain(plain, x).square().sum().backward()
    pairs = zip(split.parameters(), plain.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def test_an_output_of_all_pairs_is_refused_and_leaves_nothing() -> None:
    x = torch.randn(8, 8)
    split = outsize.split(_Pairs(), (x,), stages=2, microbatches=4)
    with pytest.raises(BadOption, match="samples along several dims"):
        split(x)
    assert not split.engine.calls._seats


class _Cache:
    """Holds tensors as caches of transformers do: in an object."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class _Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"y": self.second(self.first(x)), "cache": _Cache(x * 2), "scale": self.first.bias}


@pytest.mark.parametrize("stages", [1, 2])
def test_an_object_with_tensors_says_that_it_is_not_returned(stages: int) -> None:
    x, net = torch.randn(8, 8), _Caching()
    split = outsize.split(net, (x,), stages=stages, microbatches=4)
    for outputs in (split(x), split.engine.evaluate(x, gather=True).outputs[0]):
        assert outputs["scale"] is split.first.bias
        assert copy.deepcopy(outputs["cache"]) is not None
        with pytest.raises(BadOption, match="tensors in the model's _Cache"):
            _ = outputs["cache"].keys


class _Deciding(nn.Module):
    """A decision on activations cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h * 2 if h.sum() > 0 else h)


def _deciding_steps(model: nn.Module) -> list[Tensor]:
    """The outputs of two steps, and of a call without gradients."""
    torch.manual_seed(1)
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for _ in range(2):
        outputs.append(model(torch.randn(8, 8)))
        outputs[-1].square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [output.detach() for output in outputs] + [model(torch.ones(8, 8))]


def _deciding() -> _Deciding:
    torch.manual_seed(0)
    return _Deciding()


def _split_deciding() -> int:
    """Splits and trains it; returns how often the reason was said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        split = outsize.split(_deciding(), (torch.ones(8, 8),), stages=2, microbatches=4)
        found = _deciding_steps(split)
    assert split.plan.form == "modules"
    assert all(map(torch.equal, found, _deciding_steps(_deciding())))
    said = [str(each.message) for each in told if issubclass(each.category, SplitByModules)]
    words = ("stages of the split _Deciding take turns", "a decision on activations", "test_split_model.py:")
    assert all(word in text for text in said for word in words)
    return len(said)


def test_a_model_that_cannot_be_recorded_is_split_by_modules_with_the_reason() -> None:
    assert _split_deciding() == 1


@pytest.mark.dist
def test_over_processes_the_first_says_the_reason() -> None:
    def rank() -> None:
        world = join()
        assert _split_deciding() == (world.rank == 0)
        leave(world)

    run_in_forks(2, rank)


class _Filling(nn.Module):
    """Puts what it computes into an object that it is given, as decoders do with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: _Store | None = None) -> Tensor:
        h = self.first(x)
        if cache is not None:
            cache.layers.append(h)
            h = h + sum(cache.layers)
        return self.second(h)


class _Store:
    def __init__(self, *layers: Tensor) -> None:
        self.layers = list(layers)


@pytest.mark.parametrize("held", [(), (torch.ones(8, 8),)], ids=["empty", "filled"])
def test_an_argument_that_a_forward_fills_is_left_as_it_is_and_told(held: tuple[Tensor, ...]) -> None:
    x, cache = torch.randn(8, 8), _Store(*held)
    split = outsize.split(_Filling(), (x,), stages=2, microbatches=4)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"puts tensors into an argument .*layers\[\d\]"):
        found = split(x, cache=cache)
    assert len(cache.layers) == len(held)
    assert all(a is b for a, b in zip(cache.layers, held, strict=True))
    with torch.no_grad():
        parts = zip(x.chunk(4), *(tensor.chunk(4) for tensor in held), strict=True)
        expected = [split.module(part, _Store(*own)) for part, *own in parts]
        assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("each", [1, 2])
def test_calls_together_have_the_bits_of_calls_one_after_the_other(each: int) -> None:
    """Each has a loss of its own, and their backwards come in the order of the calls."""
    torch.manual_seed(0)
    plain = _Net()
    batches = [torch.randn(4 if number else 6, 8) for number in range(3)]
    split = outsize.split(copy.deepcopy(plain), (torch.randn(12, 8),), stages=2, microbatches=3 * each)
    for _ in range(2):
        losses = [
            out.square().mean() for out in split.engine.calls.together([((x,), {}) for x in batches], each)
        ]
        for loss in losses:
            loss.backward()
        expected = [torch.cat([plain(p) for p in x.tensor_split(each)]).square().mean() for x in batches]
        for loss in expected:
            loss.backward()
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        for (name, weight), other in zip(split.named_parameters(), plain.parameters(), strict=True):
            assert weight.grad is not None
            assert other.grad is not None
            assert torch.equal(weight.grad, other.grad), name
    with torch.no_grad():
        found = split.engine.calls.together([((x,), {}) for x in batches], each)
    assert all(torch.equal(a, plain(x)) for a, x in zip(found, batches, strict=True) if each == 1)


def test_a_backward_before_those_of_earlier_calls_is_refused() -> None:
    x = torch.randn(4, 8)
    split = outsize.split(_Net(), (torch.randn(8, 8),), stages=2, microbatches=2)
    outputs = split.engine.calls.together([((x,), {}), ((x,), {})])
    with pytest.raises(BadOption, match=r"come in the order of the calls; one is missing; microbatch 1 of 2"):
        outputs[1].sum().backward()
    outputs = split.engine.calls.together([((x,), {}), ((x,), {})])
    del outputs
    gc.collect()
    assert not split.engine.calls._seats


class WantingInputs(nn.Module):
    """Sets the flag of each layer's input by hand, as LLaMA-Factory does for its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x.requires_grad_(True)
            x = layer(x)
        return x


def test_a_flag_that_is_set_by_hand_means_nothing_without_gradients() -> None:
    plain, model, x = WantingInputs(), WantingInputs(), torch.randn(4, 4)
    split = outsize.split(model, (x.clone(),), stages=2)
    with torch.no_grad():
        assert torch.equal(split(x.clone()), plain(x.clone()))
    for each in (split, plain):
        each(x.clone()).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
