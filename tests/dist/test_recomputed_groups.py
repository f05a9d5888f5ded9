"""Stages of several devices that recompute some of their units give the numbers of the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by
from recomputed_groups_worker import CASES

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_that_recompute_some_units_train_as_the_plain_loop(case: str, tmp_path: Path) -> None:
    for rank in said_by("recomputed_groups_worker.py", 2, tmp_path, case):
        assert rank["recomputed"] > 1
        assert rank["moved"] > 1e-4
        assert rank["far"] < (1e-5 if case == "experts" else 1e-10)
