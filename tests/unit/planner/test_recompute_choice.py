"""Oracle: all choices of an option for each unit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.recompute import Option, cheapest

Units = list[list[Option]]


@st.composite
def stages(draw: st.DrawFn) -> tuple[Units, int, int]:
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    units: Units = []
    for _ in range(draw(st.integers(1, 7))):
        saved = int(generator.integers(0, 20))
        keep = Option(0.0, saved)
        full = Option(float(generator.integers(1, 9)), int(generator.integers(0, 4)), saved, "full")
        half = Option(full.extra_s / 2, saved // 2, saved // 2, "selective")
        units.append(
            [keep, half, full][: 1 + int(generator.integers(1, 3))] if generator.random() < 0.9 else [keep]
        )
    if draw(st.booleans()):
        units = [units[0]] * len(units)
    return units, draw(st.integers(1, 4)), draw(st.integers(0, 200))


def brute_force(units: Units, held: int, budget: int) -> float:
    return min(
        (
            sum(o.extra_s for o in taken)
            for taken in product(*units)
            if held * sum(o.kept_bytes for o in taken) + max(o.anew_bytes for o in taken) <= budget
        ),
        default=float("inf"),
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(stages())
def test_same_as_trying_all_choices(stage: tuple[Units, int, int]) -> None:
    units, held, budget = stage
    found, best = cheapest(units, held, budget), brute_force(units, held, budget)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        taken = [unit[pick] for unit, pick in zip(units, found.picks, strict=True)]
        assert found.extra_s == pytest.approx(best)
        assert sum(o.extra_s for o in taken) == pytest.approx(best)
        assert found.peak_bytes(held) <= budget
        peak = held * sum(o.kept_bytes for o in taken) + max(o.anew_bytes for o in taken)
        assert found.peak_bytes(held) == peak


@settings(max_examples=60, derandomize=True, deadline=None)
@given(stages(), st.integers(1, 60))
def test_more_memory_never_hurts(stage: tuple[Units, int, int], more: int) -> None:
    units, held, budget = stage
    plain, roomy = cheapest(units, held, budget), cheapest(units, held, budget + more)
    if plain is not None:
        assert roomy is not None
        assert roomy.extra_s <= plain.extra_s


def test_nothing_is_recomputed_when_all_fits() -> None:
    units = [[Option(0.0, 10), Option(1.0, 0, 10, "full")]] * 3
    found = cheapest(units, held=2, budget_bytes=60)
    assert found is not None
    assert found.picks == (0, 0, 0)


def test_a_transformer_of_eighty_layers_with_ten_units_each() -> None:
    """800 units of ten sorts: the lists stay short since equal units make equal sums."""
    layer = [[Option(0.0, 100 + 7 * i), Option(1.0 + i, 3, 100 + 7 * i, "full")] for i in range(10)]
    found = cheapest(layer * 80, held=4, budget_bytes=160_000)
    assert found is not None
    assert 0 < found.extra_s < 80 * sum(1.0 + i for i in range(10))
    assert found.peak_bytes(4) <= 160_000


def test_two_hundred_different_units() -> None:
    generator = np.random.default_rng(0)
    units = [
        [Option(0.0, int(s)), Option(float(t), 0, int(s) // 4, "full")]
        for s, t in zip(generator.integers(10**6, 10**7, 200), generator.random(200), strict=True)
    ]
    total = sum(unit[0].kept_bytes for unit in units)
    found = cheapest(units, held=1, budget_bytes=total // 2)
    assert found is not None
    assert found.peak_bytes(1) <= total // 2
