"""The checks of `outsize doctor --gpu` on the simulated device, and the command as a user types it there.

pytest tests/device                   # on the simulated device, and on CUDA where torch sees it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerators import everywhere

from outsize.device.accelerators import count_host_waits
from outsize.ir.cluster_file import load_cluster
from outsize.ops.doctor import figures
from outsize.ops.doctor.check_place import CheckPlace
from outsize.ops.doctor.table import CHECKS
from outsize.train.world.world import World

SIMDEV = Path(__file__).parents[1] / "simdev"
LONG = {"schedules_alone", "steps", "features"}  # features: on the CPU in test_doctor_gpu.py
BELOW = {"host_waits"}  # test_waits_of_the_host_are_counted runs it, and looks at its figures
NOT_HERE = {"compilation"}  # inductor has no code for the simulated device
ALONE = [
    pytest.param(check, id=check.name, marks=[pytest.mark.full] if check.name in LONG | BELOW else [])
    for check in CHECKS
    if not check.is_joint and check.name not in NOT_HERE
]


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
@pytest.mark.parametrize("check", ALONE)
def test_a_check_of_one_process(check: object, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated device, whose seconds mean nothing, with two laps of shallow models."""
    if device.startswith("sim"):
        monkeypatch.setattr(figures, "DEPTHS", (1, 3))
        monkeypatch.setattr(CheckPlace.seconds, "__defaults__", (2,))
    found = check.run(CheckPlace(World(0, 1, 0, None), torch.device(device), 16))  # pyright: ignore[reportAttributeAccessIssue]
    assert not found.wrong
    assert found.figures or found.missing


@pytest.mark.sim
def test_waits_of_the_host_are_counted() -> None:
    """Those within operators, as torch.cuda tells them; what waits by name is meant to."""
    device, values = torch.device("sim:0"), torch.ones(3, device="sim:0")
    assert count_host_waits(device, lambda: values + 1) == 0
    assert count_host_waits(device, lambda: (values.sum().item(), values.cpu())) == 2
    assert count_host_waits(device, lambda: torch.accelerator.synchronize()) == 0
    check = next(check for check in CHECKS if check.run is figures.host_waits)
    found = check.run(CheckPlace(World(0, 1, 0, None), device, 16))
    assert set(found.figures) == {"waits_at_4_microbatches", "waits_at_16_microbatches"}
    assert max(found.figures.values()) <= 1


@pytest.mark.sim
def test_the_command(tmp_path: Path) -> None:
    """torch finds the device by itself in each process, as it finds a vendor's plug-in."""
    paths = [str(SIMDEV), str(SIMDEV / "autoload"), os.environ.get("PYTHONPATH", "")]
    chosen = ["--only", "rates,links", "--width", "16", "--nproc", "1"]
    command = str(Path(sys.executable).with_name("outsize"))
    done = subprocess.run(
        [command, "doctor", "--gpu", *chosen, "--json", "--out", "report.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device_type"] == "sim"
    assert [each["outcome"] for each in report["results"]] == ["measured", "skipped"]
    assert len(load_cluster(tmp_path / "report.json").devices) == torch.accelerator.device_count()
