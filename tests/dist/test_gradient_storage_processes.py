"""Two processes: gradients on their way share no memory with a `.grad` that the next microbatch writes.

Real transports copy soon, so a lost mechanism may pass here; tests/parity/test_gradient_storage.py always
finds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


@pytest.mark.full
@pytest.mark.parametrize("turns", [4, 1])
def test_every_sharing_operation_over_two_processes(turns: int, tmp_path: Path) -> None:
    """By turns each operation under one of four schedules, and each under all of them."""
    for wrong in said_by("gradient_storage_worker.py", 2, tmp_path, str(turns)):
        assert len(wrong) == (14 if turns == 4 else 56)
        assert wrong == {key: [] for key in wrong}
