"""`outsize fit --beside RUN` asks about what a run leaves of this machine's devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_states import STATE as RUNNING

from outsize.files.run_folders import LAUNCH, STATE, run_folder
from outsize.ir.answers.run_state import RunDevice, RunLaunch

Outsize = Callable[..., Any]


@pytest.mark.parametrize(("reserved", "fits"), [(0.25, True), (0.9999999, False)])
def test_what_fits_next_to_a_run(
    outsize: Outsize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserved: float, fits: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    total = psutil.virtual_memory().total
    device = RunDevice(rank=0, name="cpu:0", reserved_bytes=int(reserved * total))
    with run_folder() as folder:
        launch = RunLaunch(pid=folder.pid, command="t.py", started_unix_s=folder.started_unix_s)
        folder.put(LAUNCH, launch.to_json())
        folder.put(STATE, RUNNING.model_copy(update={"devices": (device,)}).to_json())
        said = outsize("fit", "toy:build", "--input", "8", "--beside", str(folder.pid), "--json")
        document = json.loads(said.out)
        assert (document["answer"] == "YES") == fits
        left = sum(row["memory_bytes"] for row in document["devices"])
        assert left <= (1 - reserved) * total + 64
        other = outsize("fit", "toy:build", "--beside", str(folder.pid), "--cluster", "2xcpu")
        assert (other.code, "--cluster names another one" in other.err) == (2, True)
