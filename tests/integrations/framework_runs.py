"""Runs a fine-tuning framework in an environment of its own, which `make test-trainers` builds."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TIMES = ("runtime", "per_second", "per_sec", "memory")


def environment_of(framework: str) -> Path:
    """The folder with the framework's programs."""
    folder = ROOT / f".venv-{framework}" / "bin"
    if not folder.is_dir():
        pytest.skip(f"{framework} is not installed: make test-trainers")
    return folder


def run(folder: Path, *arguments: str) -> None:
    """Runs a program of this environment."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{HERE}"}
    command = [str(folder / arguments[0]), *arguments[1:]]
    done = subprocess.run(
        command, env=os.environ | quiet | paths, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def logs_in(state: Path) -> list[dict[str, Any]]:
    """What a trainer has logged, without times."""
    logs = json.loads(state.read_text())["log_history"]
    return [{k: v for k, v in log.items() if not any(time in k for time in TIMES)} for log in logs]


def same_weights(one: Path, two: Path) -> bool:
    """Whether two folders have the same weights, bit for bit."""
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files
    assert files == sorted(path.name for path in two.glob("*.safetensors"))
    pairs = [(load_file(one / name), load_file(two / name)) for name in files]
    return all(a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in pairs)
