"""Microbatches of several shapes over two processes; a cache of three captures, so that some go and come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shapes_worker import FAR, NEAR
from test_parity_processes import launched

pytestmark = pytest.mark.dist


@pytest.mark.timeout(300)
def test_two_processes_hold_the_numbers_of_the_plain_loop(tmp_path: Path) -> None:
    done = launched("shapes_worker.py", 2, str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(report) == len(NEAR) + len(FAR)
        assert {case: wrong for case, wrong in report.items() if wrong} == {}
