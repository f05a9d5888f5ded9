"""Two processes: microbatches weigh by what the whole batch's loss is divided by."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_the_loss_and_the_weights_are_those_of_the_undivided_batch(tmp_path: Path) -> None:
    for wrong in said_by("loss_weights_worker.py", 2, tmp_path):
        assert len(wrong) == 48
        assert wrong == {key: [] for key in wrong}
