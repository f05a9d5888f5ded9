"""Loops and forwards that a plain training script may have, each against that script written out here.

The judge is `plain`: one process, microbatches in order, the user's own model and optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import cached
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.checkpoint import checkpoint
from turns import in_turns

import outsize
from outsize.errors import BadOption
from outsize.ir.units.names import compress_units, expand
from outsize.train.engine.engine import Engine

_RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 4, generator=_RANDOM), torch.randint(0, 3, (8,), generator=_RANDOM)
MICROBATCHES = 4


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


def engine(model: nn.Module, x: Tensor = X, **options: Any) -> Engine:
    wanted = {"loss_fn": F.cross_entropy, "target": Y, "stages": 2, "microbatches": MICROBATCHES}
    return outsize.parallelize(model, (x,), **{"optimizer": sgd, **wanted, **options})


def accumulate(model: nn.Module, x: Tensor = X) -> Tensor:
    """Adds up the gradients of the microbatches and returns the batch's loss."""
    total = torch.zeros(())
    for part, target in zip(x.split(2), Y.split(2), strict=True):
        loss = F.cross_entropy(model(part), target)
        (loss * 0.25).backward()
        total = total + loss.detach() * 0.25
    return total


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Says whether parameters, gradients and buffers are bit-equal."""
    pairs = [(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    grads = all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad))
        for a, b in pairs
    )
    buffers = zip(one.buffers(), other.buffers(), strict=True)
    return grads and all(torch.equal(a, b) for a, b in [*pairs, *buffers])


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_optimizer_that_wants_a_closure_gets_one(clip_norm: float | None) -> None:
    def make(parameters: Any) -> Optimizer:
        return LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    model = mlp()
    reference = copy.deepcopy(model)
    optimizer, built = make(reference.parameters()), engine(model, optimizer=make, clip_norm=clip_norm)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = accumulate(reference)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        return loss

    for _ in range(2):
        expected: Any = optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        assert torch.equal(built.step(X, target=Y).loss, expected)
        optimizer.zero_grad()
        assert alike(model, reference)


@final
class SharpnessAware(Optimizer):
    """SAM (arXiv 2010.01412) in the form of a step that follows a backward: it climbs by the gradients that
    are there, and asks for those at the top.
    """

    def __init__(self, parameters: Any, *, through_data: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.through_data = through_data

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ways = [0.05 * p.grad for p in weights]
        for p, way in zip(weights, ways, strict=True):
            (p.data if self.through_data else p).add_(way)
        if not self.through_data:
            self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, way in zip(weights, ways, strict=True):
            p.sub_(way).sub_(0.1 * p.grad)
        return loss


@pytest.mark.parametrize("through_data", [False, True])
def test_an_optimizer_that_moves_before_it_asks_gets_the_gradients_there(through_data: bool) -> None:
    """A change through `.data` counts in no version of the weight."""
    model = mlp()
    reference = copy.deepcopy(model)
    optimizer = SharpnessAware(reference.parameters(), through_data=through_data)
    built = engine(model, optimizer=lambda weights: SharpnessAware(weights, through_data=through_data))

    def closure() -> Tensor:
        optimizer.zero_grad()
        return accumulate(reference)

    for _ in range(3):
        expected = accumulate(reference)
        optimizer.step(closure)
        optimizer.zero_grad()
        assert torch.equal(built.step(X, target=Y).loss, expected)
        assert alike(model, reference)


# -- gradients within the forward ----------------------------------------------------------------------


@final
class Forces(nn.Module):
    """Two layers, and the gradient of the energy that they give by `torch.func`, of each sample or of all."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.inner, self.energy, self.each = nn.Linear(4, 6), nn.Linear(6, 1), each

    def of(self, x: Tensor) -> Tensor:
        return self.energy(torch.tanh(self.inner(x))).sum()

    def forward(self, x: Tensor) -> Tensor:
        forces = torch.func.grad(self.of)
        return torch.func.vmap(forces)(x) if self.each else forces(x)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_forward_with_gradients_of_torch_func_is_cut(stages: int, each: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Forces(each), nn.Linear(4, 3))
    verdict = outsize.check(
        model, (X,), loss_fn=F.cross_entropy, target=Y, stages=stages, microbatches=MICROBATCHES
    )
    assert verdict.bit_equal


# -- forwards that no tape holds ---------------------------------------------------------------------


@final
class Body(nn.Module):
    """Two layers, with `change(hidden, x)` between them and `enter(x)` before."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], enter: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.change, self.enter = change, enter

    def forward(self, x: Tensor) -> Tensor:
        self.enter(x)
        return self.last(self.change(self.first(x).tanh(), x))


def by_numpy(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden * float(np.abs(x.numpy()).sum())


def by_numpy_of_activations(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden * torch.from_numpy(np.sign(hidden.detach().numpy()))


def unchanged(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden


def doubled(x: Tensor) -> None:
    x.mul_(2)


FORWARDS = {
    "numpy of an input": lambda: Body(by_numpy, id),
    "numpy of activations": lambda: Body(by_numpy_of_activations, id),
    "an input written in place": lambda: Body(unchanged, doubled),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_no_tape_holds_has_the_numbers_of_the_plain_loop(name: str) -> None:
    model, x, same_x = FORWARDS[name](), X.clone(), X.clone()
    reference = copy.deepcopy(model)
    built = engine(model, x)
    assert torch.equal(x, X), "planning has written into the example"
    for _ in range(2):
        assert torch.equal(built.step(x, target=Y, update=False).loss, accumulate(reference, same_x))
    assert alike(model, reference)
    assert torch.equal(x, same_x)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_check_of_it_sees_what_the_engine_sees(name: str) -> None:
    x = X.clone()
    verdict = outsize.check(FORWARDS[name](), (x,), loss_fn=F.cross_entropy, target=Y, steps=2)
    assert verdict.bit_equal, verdict
    assert torch.equal(x, X)


# -- regions of torch.utils.checkpoint that write buffers -----------------------------------------------


class Counting(nn.Module):
    """Writes a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Region(nn.Module):
    """A checkpointed region around `inner`, which may be called after it, too."""

    def __init__(
        self, inner: nn.Module, *, reentrant: bool, after: bool = False, hooked: bool = False
    ) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant, self.after = nn.Linear(4, 4), inner, reentrant, after
        if hooked:
            self.register_forward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda z: self.inner(self.first(z)).tanh(), x, use_reentrant=self.reentrant)
        return self.inner(x) if self.after else x


REGIONS: dict[str, Callable[[bool], nn.Module]] = {
    "statistics": lambda reentrant: Region(nn.BatchNorm1d(4), reentrant=reentrant),
    "shared statistics": lambda reentrant: Region(nn.BatchNorm1d(4), reentrant=reentrant, after=True),
    "a buffer that is read": lambda reentrant: Region(Counting(), reentrant=reentrant),
    "a leaf's own region": lambda reentrant: Region(nn.BatchNorm1d(4), reentrant=reentrant, hooked=True),
    "a region in a region": lambda reentrant: Region(
        Region(nn.BatchNorm1d(4), reentrant=reentrant), reentrant=reentrant
    ),
}


@pytest.mark.parametrize(("name", "reentrant"), in_turns(REGIONS, [False, True], each=1))
def test_buffers_of_a_checkpointed_region_are_written_as_often_as_in_the_plain_loop(
    name: str, reentrant: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), REGIONS[name](reentrant), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    verdict = outsize.check(model, (X,), loss_fn=F.cross_entropy, target=Y, steps=2)
    assert verdict.bit_equal, verdict
    built = engine(model)
    for _ in range(2):
        built.step(X, target=Y, update=False)
        accumulate(reference)
    assert alike(model, reference)
    built.evaluate(X)
    assert alike(model, reference)


def test_a_region_with_dropout_and_statistics_checks() -> None:
    inner = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = nn.Sequential(Region(inner, reentrant=False), nn.Linear(4, 3))
    verdict = outsize.check(model, (X,), loss_fn=F.cross_entropy, target=Y, steps=2)
    assert verdict.bit_equal, verdict


# -- one module, its own weights and others ------------------------------------------------------------


@final
class Adapted(nn.Module):
    """MAML: calls a network with its weights, and again with weights that a step of SGD has changed."""

    def __init__(self, *, second_order: bool) -> None:
        super().__init__()
        self.net, self.second_order = mlp(), second_order

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        out = functional_call(self.net, weights, (x,))
        if self.second_order:
            slopes = torch.autograd.grad(out.square().mean(), list(weights.values()), create_graph=True)
        else:
            slopes = tuple(weights.values())
        adapted = {name: w - 0.1 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
        return functional_call(self.net, adapted, (x,)) + out


@pytest.mark.parametrize("second_order", [False, True])
def test_a_module_called_with_its_weights_and_with_others(second_order: bool) -> None:
    for stages in (2, 3):
        model = Adapted(second_order=second_order)
        reference = copy.deepcopy(model)
        built = engine(model, stages=stages)
        assert torch.equal(built.step(X, target=Y, update=False).loss, accumulate(reference))
        assert alike(model, reference)


def test_each_cut_of_it_is_a_plan() -> None:
    graph = outsize.capture(Adapted(second_order=False), (X,), loss_fn=F.cross_entropy, target=Y)
    names = [unit.name for unit in graph.units]
    for cut in range(1, len(names)):
        sides = compress_units(names, range(cut)), compress_units(names, range(cut, len(names)))
        assert [expand(side, names) for side in sides] == [
            list(range(cut)),
            list(range(cut, len(names))),
        ]


# -- parametrized weights that are computed once ---------------------------------------------------------


@final
class Cached(nn.Module):
    """Calls a parametrized layer twice, and computes its weight once."""

    def __init__(self, parametrization: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer, self.last = parametrization(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with cached():
            x = self.layer(self.layer(x).tanh())
        return self.last(x)


def cached_models(parametrization: Callable[[nn.Module], nn.Module]) -> Iterator[nn.Module]:
    """Yields models whose cache is opened in a part, and in the model itself."""
    for make in (lambda part: nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 4)), lambda part: part):
        torch.manual_seed(0)
        yield make(Cached(parametrization))


@pytest.mark.parametrize("parametrization", [spectral_norm, weight_norm])
def test_weights_in_a_cache_are_computed_once(parametrization: Callable[[nn.Module], nn.Module]) -> None:
    for model in cached_models(parametrization):
        reference = copy.deepcopy(model)
        verdict = outsize.check(model, (X,), loss_fn=F.cross_entropy, target=Y, steps=2)
        assert verdict.bit_equal, verdict
        built = engine(model)
        for _ in range(2):
            assert torch.equal(built.step(X, target=Y, update=False).loss, accumulate(reference))
        assert alike(model, reference)
        with cached():
            outputs = built.evaluate(X).outputs
            assert outputs is not None
            with torch.no_grad():
                assert torch.equal(torch.cat(outputs), torch.cat([reference.eval()(x) for x in X.split(2)]))
            with pytest.raises(BadOption, match="cached"):
                built.step(X, target=Y)
