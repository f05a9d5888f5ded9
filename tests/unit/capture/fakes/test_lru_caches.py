"""What stands behind functools' caches: recorded as constants, and never left full of fakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, final

import pytest
import torch
from small_models import batch, two
from splits import captured, check_every_cut
from torch import Tensor, nn

from outsize.capture.fakes.fake_model import is_fake

Make = Callable[[], nn.Module]


def limited() -> nn.Module:
    @lru_cache(maxsize=4)
    def table(width: int, *, scale: float) -> tuple[Tensor, str]:
        return torch.arange(width) * scale, "table"

    return two(lambda m, x: m.b(m.a(x) + table(4, scale=2.0)[0]))


def unlimited() -> nn.Module:
    @cache
    def table(width: int) -> Tensor:
        return torch.arange(width) * 2.0

    return two(lambda m, x: m.b(m.a(x) + table(4)))


@final
class Own(nn.Module):
    """The cache of a method, whose key holds the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    @lru_cache(maxsize=2)  # noqa: B019
    def table(self, width: int) -> Tensor:
        return torch.arange(width) * 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.table(4))


def evicting() -> nn.Module:
    @lru_cache(maxsize=1)
    def table(width: int) -> Tensor:
        return torch.arange(width) * 2.0

    return two(lambda m, x: m.b(m.a(x) + table(4)) * table(2).sum() + table(4).sum())


@pytest.mark.parametrize("make", [limited, unlimited, Own, evicting])
def test_a_recording_leaves_no_fakes_in_caches(make: Make) -> None:
    model = make()
    captured(model, batch())
    assert not is_fake(model(batch()))


@pytest.mark.parametrize("make", [limited, unlimited, Own])
def test_the_tape_is_the_same_before_and_after_an_eager_run(make: Make) -> None:
    model = make()
    calls = [[i.name for i in captured(model, batch()).tape.instructions]]
    model(batch())
    calls.append([i.name for i in captured(model, batch()).tape.instructions])
    assert calls[0] == calls[1]
    assert not any("arange" in name for name in calls[0])


@pytest.mark.parametrize("make", [limited, unlimited, Own, evicting])
def test_cached_tables_run_at_every_cut(make: Make) -> None:
    check_every_cut(make(), batch())


def test_other_caches_keep_what_they_have() -> None:
    made: list[int] = []

    @lru_cache
    def other(width: int) -> Tensor:
        made.append(width)
        return torch.ones(width)

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x))

    other(3)
    captured(two(run), batch())
    other(3)
    assert made == [3]
