"""Composed models of tests/parity/test_fuzz.py over two processes: a few seeds, and more with --all."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

FEW = (0, 3)
MORE = (1, 2, 5, 7, *range(20, 80))


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MORE, marks=pytest.mark.full)])
def test_composed_models_over_two_processes(seeds: tuple[int, ...], tmp_path: Path) -> None:
    for wrong in said_by("fuzz_worker.py", 2, tmp_path, ",".join(map(str, seeds))):
        assert len(wrong) >= len(seeds) * 3 / 4
        assert {case: gaps for case, gaps in wrong.items() if gaps} == {}
