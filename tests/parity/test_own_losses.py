"""The loss is the last part of the program: its weights are trained and saved, its buffers written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_losses import (
    CLASSES,
    CLIP,
    CRITERIA,
    FEATURES,
    FORMS,
    Memory,
    adamw,
    batch,
    model,
    plain_loop,
    tensors_of,
)
from torch import Tensor, nn

import outsize

CASES = [(kind, "module") for kind in CRITERIA] + [("memory", form) for form in FORMS if form != "module"]


def made(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return model(), CRITERIA[kind]()


def engine_of(net: nn.Module, criterion: nn.Module, loss_fn: Any, **options: Any) -> Any:
    x, y = batch(0)
    given = {"stages": 2, "microbatches": 2, "clip_norm": CLIP, "optimizer": lambda ps: adamw(ps, criterion)}
    return outsize.parallelize(net, (x,), target=y, loss_fn=loss_fn, **{**given, **options})


def insist_on_equal(expected: nn.Module, found: nn.Module) -> None:
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(tensor, tensors_of(found)[name]), name


@pytest.mark.parametrize(("kind", "form"), CASES)
@pytest.mark.sample(
    "memory-module", "centers-module", "rebound-module", "counting-module", "memory-closure", "memory-object"
)
def test_the_loss_is_trained_as_in_the_plain_loop(kind: str, form: str) -> None:
    (net, criterion), (plain, plain_criterion) = made(kind), made(kind)
    losses = plain_loop(plain, plain_criterion, FORMS[form](plain_criterion), range(3))
    loss_fn = FORMS[form](criterion)
    x, y = batch(0)
    assert outsize.check(net, (x,), target=y, loss_fn=loss_fn, stages=2, microbatches=2).bit_equal
    engine = engine_of(net, criterion, loss_fn)
    for step, loss in enumerate(losses):
        x, y = batch(step)
        assert float(engine.step(x, target=y).loss) == loss
    insist_on_equal(plain, net)
    insist_on_equal(plain_criterion, criterion)
    assert engine.weights.full_state_dict().keys() == plain.state_dict().keys()
    saved = engine.weights.loss_state_dict()
    assert len(saved) == len(plain_criterion.state_dict())
    if form == "module":
        assert all(torch.equal(saved[n], t) for n, t in plain_criterion.state_dict().items())


def test_a_loss_in_no_optimizer_is_neither_trained_nor_clipped_with() -> None:
    (net, criterion), (plain, plain_criterion) = made("centers"), made("centers")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engine_of(net, criterion, criterion, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    for step in range(2):
        for x, y in zip(*(t.chunk(2) for t in batch(step)), strict=True):
            (plain_criterion(plain(x), y) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        x, y = batch(step)
        assert torch.equal(engine.step(x, target=y).grad_norm, norm)
    insist_on_equal(plain, net)
    insist_on_equal(plain_criterion, criterion)


def test_a_run_that_goes_on_has_the_weights_and_buffers_of_the_loss(tmp_path: Path) -> None:
    plain, plain_criterion = made("memory")
    losses = plain_loop(plain, plain_criterion, plain_criterion, range(4))
    net, criterion = made("memory")
    engine = engine_of(net, criterion, criterion)
    for step in range(2):
        x, y = batch(step)
        engine.step(x, target=y)
    engine.save(tmp_path)
    net, criterion = made("memory")
    engine = engine_of(net, criterion, criterion, resume=tmp_path, stages=3)
    for step in range(2, 4):
        x, y = batch(step)
        assert float(engine.step(x, target=y).loss) == losses[step]
    insist_on_equal(plain_criterion, criterion)


def test_planning_counts_the_weights_of_the_loss_and_leaves_them_alone() -> None:
    net, criterion = made("memory")
    x, y = batch(0)
    before = {name: tensor.clone() for name, tensor in tensors_of(criterion).items()}
    graph = outsize.capture(net, (x,), {}, loss_fn=criterion, target=y)
    outsize.plan(net, (x,), loss_fn=criterion, target=y, stages=2, microbatches=2, cluster="2xcpu")
    names = {name for parameter in graph.parameters for name in parameter.names}
    assert {"loss_fn.classifier.weight", "0.weight"} <= names
    assert all(torch.equal(before[n], t) for n, t in tensors_of(criterion).items())
    assert all(parameter.grad is None for parameter in criterion.parameters())


class HasALoss(nn.Module):
    """The model has a part that is called as the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.loss_fn = model(), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss_fn(self.body(x))


class Shared(nn.Module):
    """The loss holds a layer of the model, and one of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.own = layer, nn.Linear(FEATURES, CLASSES)

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.own(self.layer(output)), y)


@pytest.mark.parametrize("shares", [False, True])
def test_what_model_and_loss_have_in_common_has_the_names_of_the_model(shares: bool) -> None:
    def both() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        net = HasALoss()
        return net, Shared(net.loss_fn) if shares else Memory()

    (net, criterion), (plain, plain_criterion) = both(), both()
    of_model = {id(p) for p in (*net.parameters(), *plain.parameters())}

    def sgd(own: Any, loss: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*own, *(p for p in loss.parameters() if id(p) not in of_model)], lr=0.1)

    optimizer = sgd(plain.parameters(), plain_criterion)
    engine = engine_of(net, criterion, criterion, clip_norm=None, optimizer=lambda ps: sgd(ps, criterion))
    for step in range(2):
        for x, y in zip(*(t.chunk(2) for t in batch(step)), strict=True):
            (plain_criterion(plain(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        x, y = batch(step)
        engine.step(x, target=y)
    insist_on_equal(plain, net)
    insist_on_equal(plain_criterion, criterion)
    assert engine.weights.full_state_dict().keys() == plain.state_dict().keys()


def test_a_check_begins_without_the_gradients_of_the_loss_and_leaves_them() -> None:
    net, criterion = made("memory")
    x, y = batch(0)
    criterion(net(x), y).backward()
    found = {name: p.grad.clone() for name, p in criterion.named_parameters() if p.grad is not None}
    assert found
    assert outsize.check(net, (x,), target=y, loss_fn=criterion, stages=2, microbatches=2).bit_equal
    for name, gradient in found.items():
        assert torch.equal(criterion.get_parameter(name).grad, gradient), name


class OverAxes(nn.Module):
    """Takes a mean over axes that it lists by `tolist`, which a fake tensor computes element by element."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        axes = torch.arange(1, output.dim()).tolist()
        return (output - target).square().mean(axes).mean()


def test_a_check_follows_a_loss_that_makes_a_list_of_a_tensor() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4))
    x, y = torch.randn(8, 6), torch.randn(8, 4)
    report = outsize.check(net, (x,), target=y, loss_fn=OverAxes(), stages=2, microbatches=4)
    assert report.bit_equal
