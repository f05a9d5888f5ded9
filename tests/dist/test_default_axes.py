"""What no pipeline of two devices holds is planned on other axes by itself, and trains as in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

HERE = Path(__file__).parent
DRIVER = "import sys; from outsize.train.launch import run_script; sys.exit(run_script(sys.argv[1:], 2))"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("axes")
    command = [sys.executable, "-c", DRIVER, str(HERE / "axes_worker.py"), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=190, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("model", "axis"), [("tagger", "tp"), ("filter", "dp_shard")])
def test_it_is_planned_by_itself_and_trains(
    ranks: list[dict[str, dict[str, Any]]], model: str, axis: str
) -> None:
    for rank in ranks:
        found = rank[model]
        assert "NoFeasiblePlan" in found["refused"]
        assert any(why.startswith("no pipeline fits, so every axis that runs") for why in found["why"])
        assert found["axes"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1} | {axis: 2}
        assert found["loss_off"] < 1e-12
        assert found["weights_off"] < 1e-10
    assert any("BatchNorm (1 of them)" in why for why in ranks[0]["filter"]["why"])
