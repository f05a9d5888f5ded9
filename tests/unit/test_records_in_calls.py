"""A record in a keyword that does not take it, and keywords that take any iterable, each in a call as users
make it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outsize
from outsize.api.old_spellings import OldSpelling
from outsize.errors import BadOption

X, Y = torch.ones(4, 3), torch.zeros(4, 3)
LOSS: dict[str, Any] = {"loss_fn": F.mse_loss, "target": Y}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def engine(**options: Any) -> Any:
    return outsize.parallelize(net(), (X,), stages=2, **LOSS, **options)


class Told(outsize.Callback):
    """Counts the steps that it is told of."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, facts: Any) -> None:
        self.steps += 1


def test_callbacks_may_be_any_iterable() -> None:
    told = Told(), Told()
    made = engine(callbacks=(each for each in (*told, outsize.Watch(hang_timeout=0))))
    made.step(X, target=Y)
    assert [each.steps for each in told] == [1, 1]


def test_a_set_of_callbacks_beside_an_old_keyword_keeps_both() -> None:
    with pytest.warns(OldSpelling), pytest.raises(BadOption, match="a hang timeout of -5 s"):
        engine(callbacks={Told()}, hang_timeout=-5)


def test_two_watches_are_refused() -> None:
    watches = [outsize.Watch(hang_timeout=60), outsize.Watch(total_steps=7)]
    with pytest.raises(BadOption, match=r"2 records of outsize\.Watch.*with all fields in one"):
        engine(callbacks=watches)


def test_a_run_goes_on_and_saves_elsewhere(tmp_path: Path) -> None:
    first = engine()
    first.step(X, target=Y)
    first.save(tmp_path / "run")
    beside = outsize.Checkpoint(saves_in=tmp_path / "other")
    again = outsize.resume(tmp_path / "run", net(), (X,), stages=2, **LOSS, resume=beside)
    assert again.steps == 1
    with pytest.raises(BadOption, match="has the folder as its first argument"):
        outsize.resume(tmp_path / "run", net(), (X,), **LOSS, resume="elsewhere")


def test_a_check_takes_no_request() -> None:
    asked: Any = outsize.Request(stages=2)
    with pytest.raises(BadOption, match="plan is a Request, no Plan"):
        outsize.check(net(), (X,), **LOSS, plan=asked)


@pytest.mark.parametrize("asked", ["2xcpu", {"stages": 2}, outsize.Request])
def test_a_request_is_a_record(asked: Any) -> None:
    with pytest.raises(BadOption, match=r"no outsize\.Request.*Next: request=outsize\.Request"):
        outsize.plan(net(), (X,), **LOSS, request=asked)


def test_capture_takes_a_loss_as_every_function_does() -> None:
    loss = outsize.Loss(F.mse_loss)
    found = outsize.capture(net(), (X,), loss_fn=loss, target=Y)
    assert found == outsize.capture(net(), (X,), loss_fn=F.mse_loss, target=Y)


def test_an_old_axis_where_no_other_is_searched_says_so() -> None:
    with pytest.warns(OldSpelling, match=r"axes=\{'tp': 1, 'others': 1\}"):
        outsize.plan(net(), (X,), **LOSS, cluster="2xcpu", axes="pp", tp=1)
