"""Random transformers over two processes with cp and with ep; more of them with --all."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import said_by

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

FEW = {"cp": range(6), "ep": range(3)}
MORE = {"cp": range(6, 120), "ep": range(3, 60)}


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MORE, marks=pytest.mark.full)], ids=["few", "more"])
@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_gradients_are_those_of_one_process(axis: str, seeds: dict[str, range], tmp_path: Path) -> None:
    text = ",".join(map(str, seeds[axis]))
    for rank in said_by("sequence_fuzz_worker.py", 2, tmp_path, axis, text):
        assert len(rank) == len(seeds[axis])
        assert {seed: found for seed, found in rank.items() if "refused" in found} == {}
        assert {seed: found for seed, found in rank.items() if found["gradients"] > 1e-12} == {}
        assert {seed: found for seed, found in rank.items() if found["loss"] > 1e-12} == {}
