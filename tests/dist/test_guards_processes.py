"""Two processes: a Python value changes between two steps, in forward or in the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.full)])
def test_values_of_forward_and_loss_change_over_two_processes(every: int, tmp_path: Path) -> None:
    """Every second of each kind of change, and all with --all; tests/parity has all in one process."""
    for wrong in said_by("guards_worker.py", 2, tmp_path, str(every)):
        assert len(wrong) > 10
        assert wrong == {key: [] for key in wrong}
