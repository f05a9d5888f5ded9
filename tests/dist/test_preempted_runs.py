"""SIGTERM and SIGUSR1 end a run after its step, saved, with code 75; it goes on with the same losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from launches import launched
from preempted_worker import losses

from outsize.errors import Preempted

pytestmark = pytest.mark.dist


def test_a_run_that_is_asked_to_end_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    codes, said = [], []
    for _ in range(3):
        done = launched("preempted_worker.py", 2, str(tmp_path))
        codes.append(done.returncode)
        said.append(done.stderr)
    assert codes == [Preempted.exit_code, Preempted.exit_code, 0], said
    assert "SIGUSR1 has asked the run to end, and it is saved; step 3" in said[0]
    assert "stopped by SIGTERM; the run is saved, the same command goes on" in said[1]
    parts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("losses-*.json"))]
    assert [[int(step) for step in part] for part in parts] == [[1, 2, 3], [4, 5], [6, 7]]
    whole = losses(None, 1, 7)
    assert {int(step): loss for part in parts for step, loss in part.items()} == whole
