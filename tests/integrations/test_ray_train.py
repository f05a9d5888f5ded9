"""The script for Ray Train on docs/clusters.md: a worker dies, a node comes and goes, the digits stay."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from patience import WHOLE_S
from ray_nodes import lines_in
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


# The run goes on until it has had all numbers of workers, and looks for nodes every second.
CHANGES = {
    'engine.steps < config["steps"]': 'not os.path.exists(config["enough"])',
    '"steps": 6': '"enough": f"{folder}/enough", "losses": f"{folder}/losses"',
    "elastic_resize_monitor_interval_s=60": "elastic_resize_monitor_interval_s=1",
    "max_failures=1": "max_failures=5",
    "import sys\n": "import os\nimport sys\nimport time\n",
    "        checkpoint = None\n": """        time.sleep(0.3)
        if engine.rank == 0:
            with open(config["losses"], "a") as losses:
                print(engine.steps, engine.plan.axes.world_size, loss.hex(), file=losses)
        checkpoint = None
""",
}


def losses_of_one_process(steps: int) -> list[float]:
    """The losses of the plain loop over the same microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for _ in range(steps):
        total = torch.zeros(())
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = nn.functional.mse_loss(model(a), b) * 0.25
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def run_with_ray(folder: Path, *command: str) -> str:
    """Runs Python with Ray and the packages of this one; returns what it has printed."""
    source, packages = Path(__file__).parents[2] / "src", Path(torch.__file__).parents[1]
    variables = {
        "PYTHONPATH": f"{source}:{packages}", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_ADDRESS": "local",  # another test's may be there, and end meanwhile
    }  # fmt: skip
    done = subprocess.run(
        [str(PYTHON), *command],
        env=os.environ | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WHOLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_worker_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        changed({"        checkpoint = None\n": DIES + "        checkpoint = None\n"})
    )
    said = run_with_ray(tmp_path, "train.py", str(tmp_path))
    metrics = ast.literal_eval(said.strip().splitlines()[-1])
    assert metrics["step"] == 6
    assert metrics["loss"] == losses_of_one_process(6)[-1]
    steps = (tmp_path / "saved.steps").read_text().split()
    assert steps[: steps.index("6") + 1] == ["1", "2", "3", "3", "4", "5", "6"]


def test_a_healthy_run_grows_with_ray_and_goes_on_without_the_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(changed(CHANGES))
    run_with_ray(tmp_path, str(Path(__file__).parent / "ray_nodes.py"), "train.py", str(tmp_path))
    lines = lines_in(tmp_path)
    workers = [int(line[1]) for line in lines]
    assert [n for n, before in zip(workers, [0, *workers], strict=False) if n != before] == [1, 2, 1]
    expected = losses_of_one_process(max(int(line[0]) for line in lines))
    assert [float.fromhex(line[2]) for line in lines] == [expected[int(line[0]) - 1] for line in lines]
    for (step, count, _), (following, now, _) in pairwise(lines):
        # Ray goes on from a checkpoint that was reported, and one is made after every second step.
        goes_on = int(following) == int(step) + 1
        assert goes_on if count == now else int(following) <= int(step) + 1 and int(following) % 2 == 1


def changed(parts: dict[str, str]) -> str:
    """The page's script with each of these parts, which it has once, replaced."""
    assert CODE is not None
    code = CODE[1]
    for part, new in parts.items():
        assert code.count(part) == 1, part
        code = code.replace(part, new)
    return code
