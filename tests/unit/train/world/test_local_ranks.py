"""Forks that compute: what they find of the process that they were made of."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from outsize.train.world.local_ranks import run_in_forks


def test_generators_of_python_and_numpy_go_on_in_each_fork(tmp_path: Path) -> None:
    random.seed(7)
    np.random.seed(7)

    def draw() -> None:
        drawn = f"{random.random()} {np.random.rand()}"
        (tmp_path / f"{drawn}").touch()

    run_in_forks(1, draw, joins=False)
    run_in_forks(1, draw, joins=False)
    assert [path.name for path in tmp_path.iterdir()] == [f"{random.random()} {np.random.rand()}"]
