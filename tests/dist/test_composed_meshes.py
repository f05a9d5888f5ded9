"""A schedule composed for a pipeline runs on every device of a group, with the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from composed_worker import MESHES, composed, halved
from launches import said_by

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "halves",
    [("dp_replicate", "tp"), pytest.param(MESHES, marks=pytest.mark.full)],
    ids=["some halves", "all halves"],
)
def test_composed_schedules_on_meshes_train_as_one_process(tmp_path: Path, halves: tuple[str, ...]) -> None:
    """pp 2 with replicas, sharded weights and tp; with halves, sums wait for the last W of the row."""
    for axis in MESHES:
        plan = composed(axis)
        assert (plan.schedule, plan.axes.pp, plan.axes.world_size) == ("auto", 2, 4)
        if axis not in halves or len(halves) == len(MESHES):
            plan.save(tmp_path / f"plan-{axis}.json")
        assert all("I" in row and "W" in row for row in halved(plan).actions)
        if axis in halves:
            halved(plan).save(tmp_path / f"plan-{axis}-halved.json")
    plans = len(list(tmp_path.glob("plan-*.json")))
    for rank in said_by("composed_worker.py", 4, tmp_path):
        assert len(rank) == plans
        for mesh, found in rank.items():
            assert max(found.values()) < 1e-10, (mesh, found)
