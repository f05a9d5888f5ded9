"""Stages that are no runs, on two processes: bit-equal to the plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_parity_processes import launched

pytestmark = pytest.mark.dist


def test_branches_composed_schedules_and_a_v_over_two_processes(tmp_path: Path) -> None:
    done = launched("branched_worker.py", 2, str(tmp_path), timeout_s=200)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == dict.fromkeys(found, "ok")
        assert len(found) == 11
