"""The loss of a model that returns none: which tensors, which target, and that it can be pickled."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.capture.models.losses import AUXILIARY_WEIGHT, Objective, default_loss, objective, sum_of_losses
from outsize.errors import BadOption

GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])


@dataclass
class Features:
    """An output of a user's own."""

    hidden: Tensor
    logits: Tensor


class Gives(nn.Module):
    """Gives what `shape_output` makes of [N, 5] scores."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


def of(make: Any, *shape: int) -> Objective:
    return objective(Gives(make), (torch.randn(*(shape or (4, 3))),), {})


def test_a_loss_inside_needs_nothing() -> None:
    assert of(lambda y: {"loss": y.mean()}) == Objective()
    assert of(lambda y: y.mean()) == Objective()


def test_classes_of_the_outputs_shape() -> None:
    found = of(lambda y: y)
    assert found.loss_fn is default_loss
    assert found.target is not None
    assert (found.target.shape, found.target.dtype) == ((4,), torch.int64)
    assert 0 <= int(found.target.min()) <= int(found.target.max()) < 5


def test_a_class_for_each_pixel() -> None:
    found = of(lambda y: {"out": y.movedim(-1, 1), "aux": y.movedim(-1, 1)}, 2, 6, 7, 3)
    assert found.target is not None
    assert found.target.shape == (2, 6, 7)


def test_the_seed_decides() -> None:
    draw = [objective(Gives(lambda y: y), (torch.ones(64, 3),), {}, seed).target for seed in (0, 0, 1)]
    assert draw[0] is not None
    assert draw[2] is not None
    assert torch.equal(draw[0], draw[1])  # type: ignore[arg-type]
    assert not torch.equal(draw[0], draw[2])


@pytest.mark.parametrize(
    ("wrap", "auxiliary"),
    [
        (lambda m, a: m, 0),
        (lambda m, a: OrderedDict(out=m, aux=a), 1),
        (lambda m, a: OrderedDict(aux=a, out=m), 1),
        (lambda m, a: GoogLeNetOutputs(m, a, a), 2),
        (lambda m, a: GoogLeNetOutputs(m, None, None), 0),
        (lambda m, a: (m, a), 0),
        (lambda m, a: Features(a, m), 0),
    ],
)
def test_the_main_tensor_and_its_auxiliary_heads(wrap: Any, auxiliary: int) -> None:
    main, aux, target = torch.randn(4, 5), torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    expected = F.cross_entropy(main, target)
    for _ in range(auxiliary):
        expected = expected + 0.4 * F.cross_entropy(aux, target)
    assert torch.equal(default_loss(wrap(main, aux), target), expected)


def test_an_output_without_classes_is_refused() -> None:
    with pytest.raises(BadOption, match="no loss can be made up for an output of type Tensor"):
        of(lambda y: y.sum(1))


def test_it_travels_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(default_loss)) is default_loss


def on_meta(make: Any) -> Objective:
    return objective(Gives(make).to("meta"), (torch.randn(4, 3),), {})


@pytest.mark.parametrize("make", [lambda y: y, lambda y: y.mean(), lambda y: {"loss": y.sum(), "logits": y}])
def test_on_meta_the_answer_is_the_same(make: Any) -> None:
    found, expected = on_meta(make), of(make)
    assert found.loss_fn is expected.loss_fn
    assert (found.target is None) == (expected.target is None)
    assert found.target is None or torch.equal(found.target, expected.target)  # type: ignore[arg-type]


def test_on_meta_a_forward_that_asks_for_values_is_recorded() -> None:
    def branching(y: Tensor) -> Tensor:
        return y if bool(torch.zeros(3).sum() == 0) else y.mean()

    assert on_meta(branching).loss_fn is default_loss


def test_on_meta_the_model_stays_as_it_is() -> None:
    model: Any = nn.Sequential(Gives(lambda y: y), nn.BatchNorm1d(5)).to("meta")
    model.seen = []
    model.register_forward_hook(lambda module, args, out: module.seen.append(out))
    before = dict(model[1].named_buffers())
    objective(model, (torch.randn(4, 3),), {})
    assert model.seen == []
    assert all(after is before[name] for name, after in model[1].named_buffers())


def test_a_list_of_equal_tensors_refines_one_answer() -> None:
    first, last = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    target = torch.randint(0, 3, (2, 4))
    expected = F.cross_entropy(last, target) + AUXILIARY_WEIGHT * F.cross_entropy(first, target)
    assert torch.equal(default_loss([first, last], target), expected)
    assert torch.equal(default_loss([first, last[:1]], target), F.cross_entropy(first, target))


class Detector(nn.Module):
    """Returns its losses by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.head(x)
        return {"classification": out[:, 0].mean(), "boxes": out[:, 1].abs().mean()}


def test_losses_by_name_are_added_up() -> None:
    model, x = Detector(), torch.randn(3, 2)
    assert objective(model, (x,), {}) == Objective(sum_of_losses)
    losses = model(x)
    assert torch.allclose(sum_of_losses(losses), losses["classification"] + losses["boxes"])
