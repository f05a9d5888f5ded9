"""Every schedule on four processes: bit-equal to the plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_parity_processes import launched

pytestmark = pytest.mark.dist


def test_every_schedule_over_four_processes(tmp_path: Path) -> None:
    done = launched("schedules_worker.py", 4, str(tmp_path), timeout_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(4):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == dict.fromkeys(found, "ok")
        assert len(found) == 9
