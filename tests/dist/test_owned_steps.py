"""Optimizers that couple elements or weights train on every layout as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import on_ranks
from owned_steps_worker import Found, Make, compared, plain, plan_of

# owned_steps_worker has put the folder of these on the path.
from coupled_optimizers import ALL_WEIGHTS, DRAWS, ELEMENTWISE, PER_WEIGHT  # isort: skip

EVERY: dict[str, Make] = {**ELEMENTWISE, **PER_WEIGHT, **ALL_WEIGHTS, **DRAWS}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "stages": (2, {"stages": 2}),
    "tp": (2, {"tp": 2}),
    "shards": (2, {"dp_shard": 2}),
    "replicas": (2, {"dp_replicate": 2}),
    "stages and shards": (4, {"stages": 2, "dp_shard": 2}),
    "stages and tp": (4, {"stages": 2, "tp": 2}),
    "shards and tp": (4, {"dp_shard": 2, "tp": 2}),
}
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def expected() -> dict[str, Found]:
    return {name: plain(make) for name, make in EVERY.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_one_process(tmp_path: Path, expected: dict[str, Found], layout: str) -> None:
    """Bits but for tp, where gradients are rounded; also hyperparameters that a step changes, and draws."""
    ranks, axes = LAYOUTS[layout]
    plan = plan_of(ranks, **axes)
    most = 2e-6 if "tp" in axes else 0.0

    def work(group: Any) -> dict[str, Any]:
        return compared(EVERY, plan, expected, group)

    for said in on_ranks(tmp_path, ranks, work):
        wrong = {name: each for name, each in said.items() if each[0] > most or not all(each[1:])}
        assert not wrong
