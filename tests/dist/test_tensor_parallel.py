"""Unmodified models divided between two processes give the numbers of one, gradients and training too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensor_models import MODELS, NO_DOUBLE

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
DRIVER = "import sys; from outsize.train.launch import run_script; "
DRIVER += "sys.exit(run_script(sys.argv[2:], int(sys.argv[1])))"
FLOAT32, FLOAT64 = "torch.float32", "torch.float64"

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each of two ranks found, by model and dtype."""
    folder = tmp_path_factory.mktemp("tensor")
    command = [sys.executable, "-c", DRIVER, "2", str(HERE / "tensor_worker.py"), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def of(rank: Found, name: str, dtype: str) -> dict[str, Any]:
    assert "error" not in rank[name], rank[name]["error"]
    return rank[name][dtype]


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_one_process(found: list[Found], name: str) -> None:
    for rank in found:
        in_32 = of(rank, name, FLOAT32)
        assert in_32["loss"] < 1e-6
        # Where one process is itself further from the numbers in double, rounding cannot be told from it.
        assert in_32["gradients"] < max(1e-6, min(in_32["rounding"], 3e-6))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in NO_DOUBLE])
def test_only_rounding_separates_three_clipped_steps_of_adamw(found: list[Found], name: str) -> None:
    for rank in found:
        in_64 = of(rank, name, FLOAT64)
        assert max(in_64["loss"], in_64["gradients"]) < 1e-13
        assert in_64["trained"] < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_has_half_of_what_is_divided(found: list[Found], name: str) -> None:
    numbers = of(found[0], name, FLOAT32)
    assert 0.5 < numbers["share"] < 0.63  # of tiny models norms and positions are much
    assert {"row", "column"} <= set(numbers["styles"].values())
