"""Nothing but a step changes the model (law 11): not its weights, nor what hangs on them or on its modules.

`capture`, `fit`, `plan`, `check` and `parallelize` run each model; its fingerprint before and after is the
same, with the attributes of parameters, the contents of containers and the objects that modules hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fingerprints import changes, fingerprint
from torch import Tensor, nn
from zoo import case, everything

import outsize
from outsize.errors import BadOption

SAMPLE = ("toy", "lstm", "gpt2", "mixtral", "vit")
REFUSED = ("reformer",)  # it takes a seed from the operating system
FEATURES = 8


class Scale:
    value: Tensor | None = None


class Moved(nn.Module):
    """The first forward moves what a weight carries to an object, as 8-bit layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.weight.scale = torch.rand(FEATURES, 1) + 0.5  # pyright: ignore[reportAttributeAccessIssue]
        self.state = Scale()

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.scale is not None:
            self.state.value, weight.scale = weight.scale, None
        scale = self.state.value
        return F.linear(x, self.weight if scale is None else self.weight * scale)


class Carried(Moved):
    """The scale is in a dict on the weight, and is removed from there."""

    def __init__(self) -> None:
        super().__init__()
        weight: Any = self.weight
        weight.of_quantization = {"scale": weight.scale, "used": []}
        del weight.scale

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight.of_quantization  # pyright: ignore[reportAttributeAccessIssue]
        held["used"].append(len(x))
        if "scale" in held:
            self.state.value = held.pop("scale")
        scale = self.state.value
        return F.linear(x, self.weight if scale is None else self.weight * scale)


class Read(nn.Module):
    """The model's own forward reads what hangs on a weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.inner.weight.gain = torch.rand(FEATURES)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.weight.gain  # pyright: ignore[reportAttributeAccessIssue]


class Logged(nn.Module):
    """A layer notes its calls in containers of every kind, and in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.rows, self.latest = list[int](), deque[int](maxlen=2)
        self.sizes, self.seen = dict[int, int](), set[int]()
        self.state = Scale()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        self.latest.append(len(x))
        self.sizes[len(self.rows)] = len(x)
        self.seen.add(len(self.rows))
        self.state.value = x.detach().mean()
        return self.inner(x) * (1 + 0.1 * len(self.rows))


class Renormed(nn.Module):
    """An embedding that writes into its weight, and buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, FEATURES, max_norm=0.1)
        self.norm = nn.BatchNorm1d(FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.table((x > 0).long()).sum(1))


class Decides(nn.Module):
    """The model's own forward decides on an activation, so that the model runs by modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return self.last(y) if y.sum() > 0 else self.last(-y)


LAYERS = (Moved, Carried, Read, Logged, Renormed)


def net(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), layer(), nn.Tanh(), nn.Linear(FEATURES, FEATURES))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, FEATURES, generator=draw), torch.randn(8, FEATURES, generator=draw)


def ask_everything(model: nn.Module, args: Any, kwargs: Any, **loss: Any) -> None:
    """Asks what needs no training step."""
    of_loss = {name: value for name, value in loss.items() if value is not None}
    outsize.capture(model, args, kwargs, **of_loss)
    outsize.fit(model, args, kwargs, cluster="2xcpu", **of_loss)
    outsize.plan(model, args, kwargs, stages=2, microbatches=2, cluster="2xcpu", **of_loss)
    outsize.check(model, args, kwargs, stages=2, microbatches=2, **of_loss)
    outsize.parallelize(model, args, kwargs, stages=2, microbatches=2, optimizer=sgd, **of_loss)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("by_modules", [False, True], ids=["tape", "modules"])
@pytest.mark.sample("tape-Moved", "tape-Carried", "tape-Renormed", "modules-Read", "modules-Logged")
def test_what_hangs_on_weights_and_modules_stays(layer: Any, by_modules: bool) -> None:
    model = net(layer)
    if by_modules:
        model = Decides(model)
    x, y = batch()
    before = fingerprint(model)
    ask_everything(model, (x,), {}, loss_fn=F.mse_loss, target=y)
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("layer", LAYERS, ids=lambda kind: kind.__name__)
def test_what_the_first_forward_moves_is_moved_once_by_the_first_step(layer: Any) -> None:
    x, y = batch()
    model, plain = net(layer), net(layer)
    optimizer = sgd(plain.parameters())
    engine = outsize.parallelize(
        model, (x,), target=y, loss_fn=F.mse_loss, stages=2, microbatches=2, optimizer=sgd
    )
    for _ in range(2):
        losses = [F.mse_loss(plain(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step(x, target=y).loss == sum(loss.detach() for loss in losses)
    for name, value in plain.state_dict().items():
        assert torch.equal(engine.weights.full_state_dict()[name], value), name


def test_a_check_compares_what_hangs_on_the_weights() -> None:
    """Its copies carry the attributes: without its scale this model has another loss."""
    x, y = batch()
    report = outsize.check(net(Moved), (x,), target=y, loss_fn=F.mse_loss, stages=2, microbatches=2)
    assert report.bit_equal
    copied = outsize.program.objects.model_copy(net(Moved))
    assert torch.equal(copied(x), net(Moved)(x))


def test_a_rejected_example_leaves_the_model_as_it_was() -> None:
    model = net(Renormed)
    before = fingerprint(model)
    with pytest.raises(outsize.OutsizeError):
        outsize.capture(model, (torch.randn(8, FEATURES + 1),), {})
    assert changes(before, fingerprint(model)) == []


def test_the_fingerprint_sees_each_kind_of_change() -> None:
    for layer, change in (
        (Moved, lambda m: setattr(m[1].weight, "scale", None)),
        (Moved, lambda m: setattr(m[1].state, "value", 1.0)),
        (Carried, lambda m: m[1].weight.of_quantization["used"].append(1)),
        (Logged, lambda m: m[1].latest.append(1)),
        (Logged, lambda m: m[1].seen.add(1)),
        (Renormed, lambda m: m[1].norm.running_mean.add_(1)),
        (Renormed, lambda m: m[1].table.weight.data.mul_(2)),
        (Renormed, lambda m: setattr(m[1].table.weight, "data", m[1].table.weight.data.clone())),
    ):
        model = net(layer)
        before = fingerprint(model)
        change(model)
        assert changes(before, fingerprint(model)), layer


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.sample("toy", "lstm", "mixtral")
def test_the_zoo_stays_as_it_is(name: str) -> None:
    _insist_on_untouched(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [found.name for found in everything() if found.name not in SAMPLE])
def test_the_whole_zoo_stays_as_it_is(name: str) -> None:
    _insist_on_untouched(name)


def _insist_on_untouched(name: str) -> None:
    found = case(name)
    model = found.build(dropout=True)
    args, kwargs = found.batch(4 * found.smallest_microbatch)
    target = found.target(4 * found.smallest_microbatch)
    before = fingerprint(model)
    refusal = pytest.raises(BadOption) if name in REFUSED else nullcontext()
    with refusal:
        ask_everything(model, args, kwargs, loss_fn=found.loss, target=target)
    assert changes(before, fingerprint(model)) == []
