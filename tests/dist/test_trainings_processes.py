"""Whole trainings over two processes: a GAN, diffusion, graphs, experts that drop tokens, PPO and DPO."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist

NAMES = ["graphs", "gan", "diffusion", "experts", "ppo", "dpo"]


def test_trainings_over_two_processes(tmp_path: Path) -> None:
    for wrong in said_by("trainings_worker.py", 2, tmp_path):
        assert wrong == {name: [] for name in NAMES}
