from __future__ import annotations

import pytest

from outsize.report.ticks import ticks


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.623, [0, 0.2, 0.4, 0.6]),
        (2.4, 5.6, [3, 4, 5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3]),
        (1, 60, [20, 40, 60]),
    ],
)
def test_round_numbers(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)
