"""Two processes: gradients on their way share no memory with a `.grad` that the next microbatch writes.

Real transports copy soon, so a lost mechanism may pass here; tests/parity/test_gradient_storage.py always
finds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_every_sharing_operation_over_two_processes(tmp_path: Path) -> None:
    for wrong in said_by("gradient_storage_worker.py", 2, tmp_path):
        assert len(wrong) > 20
        assert wrong == {key: [] for key in wrong}
