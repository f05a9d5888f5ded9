"""`check` over processes that share layers, weights and batches: parts are put together and compared."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patience import PATIENCE_S
from torch import nn

import outsize
from outsize.cli.model_input import make_model_input
from outsize.ir.answers.verdict import WITHIN, WITHIN_DOUBLE

pytestmark = pytest.mark.dist

LLAMA = (
    "transformers:LlamaConfig?num_hidden_layers=2&hidden_size=32&intermediate_size=48&num_attention_heads=4"
)
LLAMA += "&vocab_size=64"
MESHES = {
    "tp2": {"axes": {"tp": 2}},
    "sharded2": {"axes": {"dp_shard": 2}, "weights": "sharded"},
    "states2": {"axes": {"dp_shard": 2}},
    "tp2-sharded2": {"axes": {"tp": 2, "dp_shard": 2}, "weights": "sharded"},
}


def encoder() -> nn.Module:
    """With a bias of keys, whose gradient is zero but for rounding."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.sample("tp2-sharded2", "states2")
def test_every_mesh_has_the_numbers_of_one_process(mesh: str) -> None:
    double = mesh == "sharded2"
    dtype = torch.float64 if double else torch.float32
    model, x = encoder().to(dtype), torch.randn(8, 5, 16, dtype=dtype)
    wishes: dict[str, Any] = {"loss_fn": F.mse_loss, "target": torch.randn_like(x)}
    axes: Any = MESHES[mesh]
    ranks = math.prod(axes["axes"].values())
    plan = outsize.plan(model, (x,), cluster=f"{ranks}xcpu", stages=1, microbatches=2, **axes, **wishes)
    verdict = outsize.check(model, (x,), plan=plan, processes=True, steps=2, **wishes)
    assert verdict.holds, verdict
    assert verdict.processes == ranks
    assert verdict.relative_diff is not None
    assert verdict.relative_diff <= verdict.within == (WITHIN_DOUBLE if double else WITHIN)
    assert verdict.first_divergence is None
    assert verdict.parameter_diff < 1e-3, "a missing or divided one would be infinitely far"
    assert plan.axes.beyond_pp in verdict.notes[-1]


def test_the_command_says_what_was_compared(tmp_path: Path) -> None:
    subject = make_model_input(LLAMA, "8", 4)
    plan = outsize.plan(
        *subject.call, cluster="2xcpu", stages=1, microbatches=2, axes={"tp": 2}, **subject.loss
    )
    plan.save(tmp_path / "plan.json")
    code = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
    call = ("check", LLAMA, "--plan", "plan.json", "--processes", "--input", "8")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *call],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal within 1e-06 to the plain loop in one process" in said
    assert "ranks add up in another order than one process (tp 2), so loss and gradients count" in said
    assert "each rank's parts are gathered first" in said
