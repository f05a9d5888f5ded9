"""Every schedule on four processes: bit-equal to the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_every_schedule_over_four_processes(tmp_path: Path) -> None:
    for found in said_by("schedules_worker.py", 4, tmp_path):
        assert found == dict.fromkeys(found, "ok")
        assert len(found) == 11
