"""The script for Ray Train on docs/clusters.md: a worker dies, the digits stay those of one process."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from test_ray_job import PYTHON
from torch import nn

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
CODE = re.search(r"^## Ray Train$.*?^```python\n(.*?)^```", PAGE, re.M | re.S)
# The worker dies once, when Ray's controller has seen the checkpoint of step 2.
DIES = """        import os, time
        died = config["folder"] + ".died"
        if engine.rank == 0:
            with open(config["folder"] + ".steps", "a") as steps:
                print(engine.steps, end=" ", file=steps)
        if engine.rank == 1 and engine.steps == 3 and not os.path.exists(died):
            open(died, "w").close()
            time.sleep(3)
            os._exit(1)
"""
pytestmark = pytest.mark.skipif(
    not (PYTHON.parent / "ray").exists(), reason="Ray is not installed: make test-integrations"
)


def loss_of_one_process(steps: int) -> float:
    """The loss of the last step of the plain loop over the same microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    optimizer, total = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.zeros(())
    for _ in range(steps):
        total = torch.zeros(())
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = nn.functional.mse_loss(model(a), b) * 0.25
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return float(total)


def test_a_worker_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    assert CODE is not None
    line = "        checkpoint = None\n"
    assert CODE[1].count(line) == 1
    (tmp_path / "train.py").write_text(CODE[1].replace(line, DIES + line))
    packages = f"{Path(torch.__file__).parents[1]}"
    source = str(Path(__file__).parents[2] / "src")
    variables = {
        "PYTHONPATH": f"{source}:{packages}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), "train.py", str(tmp_path)],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert metrics["step"] == 6
    assert metrics["loss"] == loss_of_one_process(6)
    steps = (tmp_path / "saved.steps").read_text().split()
    assert steps[: steps.index("6") + 1] == ["1", "2", "3", "3", "4", "5", "6"]
