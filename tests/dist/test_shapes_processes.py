"""Microbatches of several shapes over two processes; a cache of three captures, so that some go and come."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by
from shapes_worker import FAR, NEAR

pytestmark = pytest.mark.dist


def test_two_processes_hold_the_numbers_of_the_plain_loop(tmp_path: Path) -> None:
    for report in said_by("shapes_worker.py", 2, tmp_path):
        assert len(report) == len(NEAR) + len(FAR) + 1
        assert {case: wrong for case, wrong in report.items() if wrong} == {}
