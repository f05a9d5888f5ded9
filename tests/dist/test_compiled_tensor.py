"""Two processes: tensor parallelism with compiled stages has the numbers of the same layout as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = pytest.mark.dist
ROUNDING = {"aot_eager": 0.0, "inductor": 2e-5}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_ranks_that_share_layers_compile_between_their_collectives(backend: str, tmp_path: Path) -> None:
    ranks = said_by("compiled_tensor_worker.py", 2, tmp_path, backend)
    for said in ranks:
        for recompute, (worst, graphs) in said.items():
            assert worst <= ROUNDING[backend], (recompute, worst)
            assert graphs >= 2, recompute  # A collective ends a graph.
