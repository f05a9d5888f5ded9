"""An alarm that rings within code of a user's, whose errors are expected, is passed on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.errors.interruptions import raise_interruption, suppressed


class Rang(Exception):
    """What the handler of an alarm raises."""


def ring(*_: Any) -> None:
    raise Rang


class Bell:
    def ring(self, *_: Any) -> None:
        raise Rang

    def __call__(self, *_: Any) -> None:
        raise Rang


@contextmanager
def handled_by(handler: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("handler", [ring, Bell().ring, Bell(), partial(ring, 1)])
def test_what_a_handler_raises_is_passed_on(handler: Callable[..., None]) -> None:
    with handled_by(handler), pytest.raises(Rang), suppressed():
        signal.raise_signal(signal.SIGALRM)


def test_a_cause_is_passed_on_as_well() -> None:
    def wraps() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except Rang as error:
            raise ValueError("something else") from error

    with handled_by(ring), pytest.raises(Rang), suppressed():
        wraps()


def test_an_error_of_the_code_itself_is_none() -> None:
    raise_interruption(ValueError("never raised"))
    with handled_by(ring), suppressed():
        raise Rang


class Ringing(nn.Module):
    """Rings the alarm in its forward, in a leaf that is probed if it `decides` on an activation."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.layer, self.decides = nn.Linear(4, 4), decides

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.decides and y.sum() > 0:
            y = y * 2
        signal.raise_signal(signal.SIGALRM)
        return y


@pytest.mark.parametrize("decides", [False, True], ids=["recorded", "probed"])
@pytest.mark.parametrize("ask", [outsize.capture, outsize.plan], ids=["capture", "plan"])
def test_an_alarm_ends_a_capture(ask: Callable[..., Any], decides: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Ringing(decides=decides))
    with handled_by(ring), pytest.raises(Rang):
        ask(model, (torch.zeros(2, 4),), loss_fn=lambda y: y.sum())
