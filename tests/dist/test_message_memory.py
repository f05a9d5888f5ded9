"""Two processes map memory for their messages once, and use it again in every step, also a tied weight's."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist


def test_no_step_maps_more_memory_than_the_first_ones(tmp_path: Path) -> None:
    """A rank that is late may have one more message on its way than before; memory that is mapped for each
    message would be more in every step.
    """
    for counts in said_by("message_memory_worker.py", 2, tmp_path):
        assert counts[0] > 0
        assert len(counts) == 8
        assert counts[-1] - counts[2] <= 1
