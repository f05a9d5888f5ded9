"""Stages that are no runs, on two processes: bit-equal to the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from branched import captured
from launches import said_by
from recorded_once import recorded_once

pytestmark = pytest.mark.dist


def test_branches_composed_schedules_and_a_v_over_two_processes(tmp_path: Path) -> None:
    with recorded_once():
        for name in ("fusion", "siamese", "vision-text", "inception", "unet"):
            captured(name, 4)
    for found in said_by("branched_worker.py", 2, tmp_path):
        assert found == dict.fromkeys(found, "ok")
        assert len(found) == 11
