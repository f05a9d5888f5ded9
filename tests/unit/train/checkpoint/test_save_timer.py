"""How often a run saves: by steps and by the clock."""

from __future__ import annotations

import pytest

from outsize.errors import BadOption
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.timer import SaveTimer


def test_intervals_are_steps_or_times() -> None:
    assert SaveInterval.parse("500") == SaveInterval(500)
    assert [SaveInterval.parse(text).seconds for text in ("90s", "10m", "2h")] == [90, 600, 7200]


@pytest.mark.parametrize("text", ["0", "", "-1", "ten", "1d", "1.5m", "0m", "9" * 30, "١٠"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="is no interval"):
        SaveInterval.parse(text)


def test_the_clock_begins_again_with_each_save() -> None:
    now = [0.0]
    timer, away = (
        SaveTimer(SaveInterval(None, 10), has_clock=has_clock, clock=lambda: now[0])
        for has_clock in (True, False)
    )
    due = []
    for now[0] in (4, 9, 12, 21, 23):
        due.append(timer.is_due(1))
        if due[-1]:
            timer.begin_again()
    assert due == [False, False, True, False, True]
    assert not away.is_due(1), "rank 0 alone looks at the clock"
    assert [SaveTimer(SaveInterval(2)).is_due(step) for step in (1, 2, 3, 4)] == [False, True] * 2
