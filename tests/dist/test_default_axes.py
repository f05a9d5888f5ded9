"""What no pipeline of two devices holds is planned on other axes by itself, and trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return said_by("axes_worker.py", 2, tmp_path_factory.mktemp("axes"))


@pytest.mark.parametrize(("model", "axis"), [("tagger", "tp"), ("filter", "dp_shard")])
def test_it_is_planned_by_itself_and_trains(
    ranks: list[dict[str, dict[str, Any]]], model: str, axis: str
) -> None:
    for rank in ranks:
        found = rank[model]
        assert "NoFeasiblePlan" in found["refused"]
        assert "no-pipeline-fits" in found["why"]
        alone = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp", "cp", "ep"), 1)
        assert found["axes"] == alone | {axis: 2}
        assert found["loss_off"] < 1e-12
        assert found["weights_off"] < 1e-10
    assert "first-replica-statistics" in ranks[0]["filter"]["why"]
