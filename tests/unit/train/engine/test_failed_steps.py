"""A step that fails in its middle leaves nothing behind: the next one is as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_gradients_of_a_failed_step_do_not_reach_the_next_one() -> None:
    x, y, engines = torch.randn(8, 4), torch.randn(8, 4), list[outsize.Engine]()
    for _ in range(2):
        given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y, "stages": 2, "microbatches": 4}
        engines.append(outsize.parallelize(build(), (x,), optimizer=sgd, devices=["cpu", "cpu"], **given))
    whole, failing = engines
    left = [2]

    def arrived(_: Tensor) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("on purpose")

    hook = dict(failing.weights.named_parameters())["0.weight"].register_post_accumulate_grad_hook(arrived)
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        failing.step(x, target=y)
    hook.remove()
    assert "outsize: the step was dropped with all gradients" in caught.value.__notes__[-1]
    assert all(p.grad is None for _, p in failing.weights.named_parameters())
    assert torch.equal(whole.step(x, target=y).loss, failing.step(x, target=y).loss)
    pairs = zip(whole.weights.named_parameters(), failing.weights.named_parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
