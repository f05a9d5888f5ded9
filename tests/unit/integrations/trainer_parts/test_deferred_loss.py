"""What is done with a deferred loss is done with its value, when that is known or asked for."""

from __future__ import annotations

import torch
from torch import nn

from outsize.integrations.trainer_parts.deferred_loss import DeferredLoss, value_of

HOST = torch.device("cpu")


def refuse() -> None:
    raise AssertionError("nobody has asked for a value")


def test_what_a_training_step_does_is_noted_and_done_later() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 5.0]))
    deferred = DeferredLoss.on(HOST, refuse)
    scaled = deferred.mean() / 3
    assert (scaled.device, scaled.dtype, scaled.ndim, scaled.requires_grad) == (HOST, torch.float32, 0, True)
    scaled.backward()
    returned = scaled.detach()
    assert weight.grad is None
    loss = weight.square().sum()
    deferred.fill(loss)
    assert torch.equal(value_of(returned), (loss / 3).detach())
    assert not value_of(returned).requires_grad
    expected = torch.autograd.grad(weight.square().sum() / 3, weight)[0]
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_a_look_at_the_value_settles_it() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    asked = list[int]()

    def settle() -> None:
        asked.append(1)
        deferred.fill(weight * 4)

    deferred = DeferredLoss.on(HOST, settle)
    assert float(deferred) == 8.0
    (deferred * 2).backward()
    assert weight.grad is not None
    assert float(weight.grad) == 8.0
    assert asked == [1]
    assert value_of(3) == 3
