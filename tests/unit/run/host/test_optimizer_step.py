"""An optimizer's step in parts: the same bits, in a thread or not, and only where parts are the whole."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from patience import PATIENCE_S
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from outsize.device.streams import StreamEvent
from outsize.run.host.optimizer_step import HostOptimizerStep, steps_in_parts


class Later(StreamEvent):
    """Landed when somebody says so."""

    def __init__(self) -> None:
        self.said, self.waited_in = threading.Event(), ""

    def done(self) -> bool:
        return self.said.is_set()

    def wait(self) -> None:
        self.waited_in = threading.current_thread().name
        assert self.said.wait(PATIENCE_S)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(3, 4)) for _ in range(4)]
    for parameter in found:
        parameter.grad = torch.randn(3, 4)
    return found


def grouped(own: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": own[:1], "lr": 0.1}, {"params": own[1:], "lr": 0.3}]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("kind", [AdamW, Adam, SGD])
def test_parts_are_the_whole(kind: Any, threaded: bool) -> None:
    whole, parts = parameters(), parameters()
    plain, ours = kind(grouped(whole)), kind(grouped(parts))
    landing = HostOptimizerStep(threaded=threaded)
    landing.use(ours)
    plain.step()
    event = Later()
    if not threaded:
        event.said.set()
    landing(parts[2:], event)
    landing(parts[:2], event)
    event.said.set()
    landing.finish()
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))
    assert event.waited_in.startswith("outsize-optimizer") == threaded
    assert [p.grad for p in parts] == [None] * 4
    assert [len(group["params"]) for group in ours.param_groups] == [1, 3]
    ours.step()
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True)), "nothing is left to do"


def test_without_an_optimizer_gradients_stay() -> None:
    own, landing = parameters(), HostOptimizerStep(threaded=True)
    landing(own, Later())
    landing.finish()
    assert all(p.grad is not None for p in own)


def test_what_the_step_raises_is_raised_at_the_end() -> None:
    own, landing, event = parameters(), HostOptimizerStep(threaded=True), Later()
    optimizer = SGD(own, lr=0.1)
    landing.use(optimizer)
    optimizer.param_groups[0]["lr"] = "much"
    event.said.set()
    landing(own, event)
    with pytest.raises(TypeError):
        landing.finish()
    assert len(optimizer.param_groups[0]["params"]) == 4
    landing.finish()


class Own(Optimizer):
    """Of somebody's own: it may look at all parameters together."""

    def __init__(self, given: Any) -> None:
        super().__init__(given, {})


def test_where_a_part_is_not_the_whole_it_steps_once() -> None:
    hooked = SGD(parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    assert not any(map(steps_in_parts, (LBFGS(parameters()), Own(parameters()), hooked)))
    assert steps_in_parts(AdamW(parameters()))
