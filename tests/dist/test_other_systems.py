"""Where /proc, anonymous memory or futexes lack, processes exchange values over gloo, with the same bits.

Each case hides one of them from two forks, and the last all that macOS lacks from real interpreters, their
launcher among them. On Windows one process trains: its imports and its steps are tried without all that
Windows lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks
from gradient_storage_worker import differing
from launches import run
from other_systems import hide_proc
from patience import PATIENCE_S

from outsize.device import futex
from outsize.ops.doctor.health import doctor
from outsize.run.transport.groups import RankGroup
from outsize.run.transport.process_group import TransportGroups
from outsize.run.transport.same_host import SameHostTransport, connect

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]


def hide_memory() -> None:
    """As a Python that was built for an old C library."""
    del os.memfd_create


def refuse_memory() -> None:
    """As a sandbox that allows no such call."""

    def refused(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    os.memfd_create = refused


def hide_futex() -> None:
    futex.AVAILABLE = False  # pyright: ignore[reportAttributeAccessIssue]


CASES: dict[str, Callable[[], None]] = {
    "all is there": lambda: None,
    "no memfd_create": hide_memory,
    "memfd_create is refused": refuse_memory,
    "no /proc": hide_proc,
    "no futex": hide_futex,
}


@pytest.mark.parametrize(
    ("hidden", "hides"), [*((name, {0, 1}) for name in CASES), ("no memfd_create", {1})], ids=str
)
@pytest.mark.sample("all is there", "no memfd_create", "no futex")
def test_two_processes_give_the_same_bits(tmp_path: Path, hidden: str, hides: set[int]) -> None:
    cpu = torch.device("cpu")

    def rank(group: dist.ProcessGroup) -> Any:
        if dist.get_rank(group) in hides:
            CASES[hidden]()
        near = connect(TransportGroups.make(RankGroup.of(group, cpu), cpu), cpu)
        shares = isinstance(near, SameHostTransport), doctor().shared_memory
        return shares, differing("add", "1f1b", group)

    for number, ((shares, can_share), wrong) in enumerate(on_ranks(tmp_path, 2, rank)):
        assert wrong == []
        assert shares is (hidden == "all is there")
        assert can_share is (hidden == "all is there" or number not in hides)


SITE = """
import sys
sys.path.insert(0, {folder!r})
import other_systems
other_systems.hide_macos_lacks()
"""


@pytest.mark.interpreters
def test_a_run_without_what_macos_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE.format(folder=str(ROOT / "tests" / "unit")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    script = ROOT / "examples" / "05_train_script.py"
    main = "from outsize.cli import main; main()"
    command = (sys.executable, "-c", main, "run", "--nproc-per-node", "2", "--max-restarts", "1", str(script))
    done = run([*command])
    assert done.returncode == 0, done.stderr
    assert done.stdout == script.with_suffix(".out").read_text(encoding="utf-8")


WITHOUT_WINDOWS_LACKS = """
import sys
sys.path.insert(0, {folder!r})
import numpy, psutil, pydantic, rich.console, rich.progress, safetensors.torch, torch, typer.testing
import asyncio, concurrent.futures.process, multiprocessing.connection, torch.distributed.run, torch._dynamo
import other_systems
other_systems.hide_windows_lacks()
import pkgutil
import outsize
for module in pkgutil.walk_packages(outsize.__path__, "outsize."):
    if not module.name.startswith("outsize.integrations."):  # of other packages
        __import__(module.name)
from outsize.errors import BadOption
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
x, y = torch.randn(8, 8), torch.randint(3, (8,))
engine = outsize.parallelize(
    model, (x,), target=y, loss_fn=nn.functional.cross_entropy, stages=2, microbatches=4,
    optimizer=lambda weights: torch.optim.AdamW(weights),
)
losses = [engine.step(x, target=y).loss.item() for _ in range(3)]
assert losses[2] < losses[0]
engine.save("saved")
import copy
again = outsize.parallelize(
    copy.deepcopy(model), (x,), target=y, loss_fn=nn.functional.cross_entropy, stages=2, microbatches=4,
    optimizer=lambda weights: torch.optim.AdamW(weights), resume="saved",
)
assert again.step(x, target=y).loss == engine.step(x, target=y).loss
from outsize.ops.doctor.health import doctor
print(doctor().system)
from outsize.ops.launch.launch import run_script
try:
    run_script(["train.py"], 2)
except BadOption as error:
    print(error)
"""


@pytest.mark.interpreters
def test_one_process_trains_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code = WITHOUT_WINDOWS_LACKS.format(folder=str(ROOT / "tests" / "unit"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    system, error = done.stdout.splitlines()
    assert system == "Linux arm64"
    assert error.startswith("BadOption [E106]: processes are started on Linux and macOS alone; linux has no")
    assert "Next: python train.py (all stages in one process), or outsize run inside WSL" in error
