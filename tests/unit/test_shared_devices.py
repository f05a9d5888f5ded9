"""Runs that share devices: planned for a part of them, held to it, and what is left beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_states import LAUNCH, STATE
from torch import nn

import outsize
from outsize.api import memory_share
from outsize.errors import BadOption
from outsize.ir.answers.run_state import RunDevice, RunOnMachine, room_beside
from outsize.ir.cluster import parse_cluster

X, Y = torch.ones(8, 4), torch.arange(8) % 3
GB = 10**9


def engine_of(**options: Any) -> outsize.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options = {"loss_fn": F.cross_entropy, "optimizer": torch.optim.AdamW, **options}
    return outsize.parallelize(model, (X,), target=Y, **options)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, int]]:
    """What is limited, in place of this process."""
    given: list[tuple[torch.device, int]] = []

    def limit(device: torch.device, limit_bytes: int) -> bool:
        given.append((device, limit_bytes))
        return True

    monkeypatch.setattr(memory_share, "limit_memory", limit)
    monkeypatch.setattr(memory_share, "device_bytes", lambda device: 80 * GB)
    return given


def test_a_run_is_planned_for_its_share_and_held_to_it(limits: list[tuple[torch.device, int]]) -> None:
    engine = engine_of(stages=2, devices=outsize.Ranks(memory_share=0.25))
    whole = engine_of(stages=2)
    assert limits == [(torch.device("cpu"), 20 * GB)]
    assert engine.plan.cluster == f"{whole.plan.cluster}:25%"
    assert engine.plan.expected is not None
    assert whole.plan.expected is not None
    rows = zip(engine.plan.expected.stages, whole.plan.expected.stages, strict=True)
    assert all(abs(4 * part.device_bytes - all_of_it.device_bytes) < 8 for part, all_of_it in rows)


def test_a_plan_brings_its_share(limits: list[tuple[torch.device, int]]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    plan = outsize.plan(model, (X,), loss_fn=F.cross_entropy, target=Y, cluster="2xcpu:10%", stages=2)
    outsize.parallelize(model, (X,), loss_fn=F.cross_entropy, target=Y, plan=plan)
    assert limits == [(torch.device("cpu"), 8 * GB)]


def test_a_plan_that_needs_more_is_refused(
    limits: list[tuple[torch.device, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_share, "device_bytes", lambda device: 100)
    with pytest.raises(BadOption, match=r"needs more of a device than 50 %.*P95.*Next: outsize plan"):
        engine_of(stages=2, devices=outsize.Ranks(memory_share=0.5))
    with pytest.raises(BadOption, match="memory_share=nan makes no sense"):
        engine_of(devices=outsize.Ranks(memory_share=float("nan")))
    assert limits == []


def on(*devices: RunDevice) -> RunOnMachine:
    return RunOnMachine(launch=LAUNCH, state=STATE.model_copy(update={"devices": devices}))


def test_what_a_run_leaves() -> None:
    """cuda:0 is measured above what is reserved; cuda:1 is full, and left out."""
    cluster = parse_cluster("3x80GB")
    taken = on(
        RunDevice(rank=0, name="cuda:0", memory_bytes=30 * GB, reserved_bytes=20 * GB),
        RunDevice(rank=1, name="cuda:1", reserved_bytes=80 * GB),
    )
    left = room_beside(cluster, taken)
    assert [(d.name, d.memory_bytes) for d in left.devices] == [("cuda:0", 50 * GB), ("cuda:2", 80 * GB)]
    assert (left.devices_per_node, left.nodes) == (2, 1)
    halves = on(RunDevice(rank=0, name="cuda:0, cuda:2", reserved_bytes=100 * GB))
    assert [d.memory_bytes // GB for d in room_beside(cluster, halves).devices] == [30, 80, 30]


def test_processes_on_a_cpu_share_the_hosts_memory() -> None:
    cluster = parse_cluster("4xcpu")
    each = cluster.devices[0].memory_bytes
    run = on(*(RunDevice(rank=n, name=f"cpu:{n}", memory_bytes=each) for n in range(2)))
    assert {d.memory_bytes for d in room_beside(cluster, run).devices} == {each - 2 * each // 4}


def test_nothing_is_left_or_known() -> None:
    cluster = parse_cluster("1x80GB")
    with pytest.raises(BadOption, match="leaves no memory on any device"):
        room_beside(cluster, on(RunDevice(rank=0, name="cuda:0", reserved_bytes=80 * GB)))
    with pytest.raises(BadOption, match="has not told yet what it needs"):
        room_beside(cluster, RunOnMachine(launch=LAUNCH))
