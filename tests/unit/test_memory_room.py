"""A plan that runs out of memory is followed by one that is predicted to hold less, until one fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outsize
from outsize.api.memory_room import FILE, SHRUNK, MemoryRoom
from outsize.errors import BadOption, NoFeasiblePlan
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.formatting import percent_text
from outsize.ir.plan import Plan

SAMPLES, WIDTH = 4096, 2048
X, Y = (torch.empty(SAMPLES, WIDTH, device="meta") for _ in range(2))


def model() -> nn.Sequential:
    """A model that is never run, so its weights are nowhere."""
    with torch.device("meta"):
        return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def device(memory_mib: int = 3000) -> Cluster:
    """A device of so much memory: room for the weights, their states and all activations."""
    whole = parse_cluster("1x12GB")
    small = (d.model_copy(update={"memory_bytes": memory_mib << 20}) for d in whole.devices)
    return whole.model_copy(update={"devices": tuple(small)})


def planned(cluster: Cluster) -> Plan:
    return outsize.plan(model(), (X,), target=Y, loss_fn=F.mse_loss, cluster=cluster)


def filled(plan: Plan, cluster: Cluster) -> float:
    assert plan.expected is not None
    return max(row.p95_bytes for row in plan.expected.stages) / cluster.devices[0].memory_bytes


def failing(folder: Path, whole: Cluster) -> Iterator[Plan]:
    """Plans that are all said not to have fitted, until there is none."""
    while True:
        room = MemoryRoom.of(folder, whole)
        try:
            plan = planned(room.of_cluster(whole))
        except NoFeasiblePlan:
            return
        assert room.holds(plan)
        text, after = room.shrink(plan), MemoryRoom.of(folder, whole)
        assert f"for at most {percent_text(after.share)} of each device's memory" in text
        assert not after.holds(plan)
        yield plan


def test_each_plan_holds_less_than_the_one_before(tmp_path: Path) -> None:
    whole = device()
    assert MemoryRoom.of(tmp_path / "run", whole).share == 1
    plans = list(islice(failing(tmp_path / "run", whole), 4))
    sizes = [filled(plan, whole) for plan in plans]
    assert [(plan.microbatches, plan.weights) for plan in plans] == [
        (1, "resident"),
        (2, "resident"),
        (4, "resident"),
        (2, "host-optimizer"),
    ]
    assert all(after <= SHRUNK * before + 1e-9 for before, after in pairwise(sizes))


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    MemoryRoom.of(tmp_path, device()).shrink(planned(device()))
    file = tmp_path / FILE
    assert MemoryRoom.of(tmp_path, device()).share < 1
    file.write_bytes(file.read_bytes().replace(b"share", b"shape"))
    assert MemoryRoom.of(tmp_path, device()).share == 1


def test_it_needs_a_folder_and_a_known_choice() -> None:
    with pytest.raises(BadOption, match="no folder"):
        outsize.parallelize(
            model(), (X,), target=Y, loss_fn=F.mse_loss, devices=outsize.Ranks(on_oom="replan")
        )
    with pytest.raises(BadOption, match="on_oom='cry' makes no sense"):
        outsize.parallelize(model(), (X,), target=Y, loss_fn=F.mse_loss, devices=outsize.Ranks(on_oom="cry"))  # pyright: ignore[reportArgumentType]
