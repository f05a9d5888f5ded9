"""`recompute="full"` never refuses what a plan without it recomputes block by block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from shared_captures import each_model_captured_once
from torch import Tensor, nn

import outsize
from outsize.api.options import FitOptions
from outsize.errors import NoFeasiblePlan
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.plan import Plan
from outsize.planner.memory.headroom import least

LAYERS = 5


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


class Layers(nn.Module):
    """Activations are many times the weights, and all layers are alike."""

    def __init__(self) -> None:
        super().__init__()
        parts = ((nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(LAYERS))
        self.h = nn.Sequential(*(nn.Sequential(*part) for part in parts))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(x).square().mean(dim=(1, 2))


@cache
def subject() -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Layers(), (torch.empty(8, 256, 16),)


def planned(cluster: Cluster | str, **options: Any) -> Plan | None:
    try:
        return outsize.plan(*subject(), cluster=cluster, schedule="1f1b", microbatches=2, **options)
    except NoFeasiblePlan:
        return None


def peak(plan: Plan | None) -> int:
    assert plan is not None
    assert plan.expected is not None
    return max(stage.peak_bytes for stage in plan.expected.stages)


def recomputed_whole(plan: Plan) -> bool:
    """Whether every unit of every stage is recomputed."""
    units = [unit.name for unit in outsize.capture(*subject()).units]
    return set().union(*(plan.recomputed(s, units) for s in range(len(plan.stages)))) == set(
        range(len(units))
    )


@pytest.mark.parametrize(
    ("devices", "axes"),
    [(1, {"stages": 1}), (2, {"stages": 2}), (2, {"axes": {"tp": 2}})],
    ids=["alone", "stages", "tp"],
)
@pytest.mark.sample("alone", "tp")
def test_full_fits_where_it_may_be_recomputed_block_by_block(devices: int, axes: dict[str, Any]) -> None:
    most = peak(planned(f"{devices}xcpu", recompute="none", **axes))
    blockwise = 0
    for share in (0.25, 0.4, 0.6):
        room = least(int(share * most), parse_cluster("1xcpu").devices[0])
        cluster = make_cluster(f"{devices}xcpu", "cpu", 1, devices, room)
        free, full = planned(cluster, **axes), planned(cluster, recompute="full", **axes)
        if free is not None:
            assert full is not None, f"{share:.0%} of {most} bytes"
        if full is not None:
            assert recomputed_whole(full)
            assert peak(full) <= share * most
            blockwise += full.recompute_of(0) == "selective"
    assert blockwise, "some budget is too small for whole stages"


def test_fit_says_what_plan_does() -> None:
    most = peak(planned("1xcpu", recompute="none", stages=1))
    room = least(most * 3 // 5, parse_cluster("1xcpu").devices[0])
    cluster = make_cluster("1xcpu", "cpu", 1, 1, room)
    asked: FitOptions = {"recompute": "full", "schedule": "1f1b", "microbatches": 2, "stages": 1}
    plan = planned(cluster, recompute="full", stages=1)
    answer = outsize.fit(*subject(), cluster=cluster, **asked)
    assert plan is not None
    assert (plan.recompute_of(0), answer.answer, answer.changes) == ("selective", "YES", ())
    assert answer.devices[0].p50_bytes == peak(plan) + answer.devices[0].context_bytes
