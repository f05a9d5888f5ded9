"""Imports go downward only: the contracts of pyproject.toml hold, and each of them can be broken.

The proof that a contract can fail uses the very contracts: pyproject.toml is copied into a tiny package of
the same shape (named `tiny`), one import is planted, and lint-imports has to name the broken contract.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from house import ROOT

LINT = "from importlinter.cli import lint_imports_command as main; main(['--no-cache', '--no-logo'])"
PACKAGES = (
    *(
        "api",
        "train",
        "report",
        "integrations",
        "ops",
        "planner",
        "capture",
        "run",
        "program",
        "device",
        "schedules",
        "ir",
        "files",
        "axes",
        "policies",
    ),
)
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "tool"
]["importlinter"]["contracts"]
ROOMS = [contract for contract in CONTRACTS if contract["id"].startswith("layers-of-")]
FLOORS = "Imports go downward only; every module stands on a floor"
ACYCLIC = "No two neighbours import each other"
NO_TORCH = "The thinking wing never reaches torch"
THINKING = "The thinking wing never imports the doing wing"
DOING = "The doing wing never imports the planner or the report"
CORE = "What plans and trains never imports the operations software"
PYTHONS = "What depends on the version of Python stays behind the trace of reads"
PLOTTER = "matplotlib is imported by report/plots.py alone"

# (files to plant, the contract they break)
PLANTS = [
    ({"ir/low.py": "import tiny.schedules"}, FLOORS),
    ({"planner/side.py": "import tiny.capture"}, FLOORS),
    ({"errors.py": "from tiny import ir"}, FLOORS),
    ({"loose.py": ""}, FLOORS),
    ({"run/a.py": "import tiny.run.b", "run/b.py": "import tiny.run.a"}, ACYCLIC),
    ({"schedules/direct.py": "import torch"}, NO_TORCH),
    ({"report/near.py": "import tiny.run.far", "run/far.py": "import torch.nn"}, NO_TORCH),
    ({"report/near.py": "import tiny.run"}, THINKING),
    ({"train/near.py": "def late():\n    import tiny.planner"}, DOING),
    ({"train/near.py": "import tiny.run.far", "run/far.py": "import tiny.ops.watchdog"}, CORE),
    ({"train/near.py": "import tiny.capture.guards.trace.opcodes"}, PYTHONS),
    ({"report/tables/plan_tables.py": "import matplotlib.pyplot"}, PLOTTER),
]


def room_of(contract: dict[str, Any]) -> str:
    """`outsize.program.sharding` -> `program.sharding`, of a contract about what a room or a folder holds."""
    return contract["containers"][0].removeprefix("outsize.")


def upward(contract: dict[str, Any]) -> dict[str, str]:
    """An import from the lowest package of a room into its highest one."""
    room, layers = room_of(contract), contract["layers"]
    low, high = (layer.split(" | ")[0] for layer in (layers[-1], layers[0]))
    return {f"{folder_of(room)}/{low}/low.py": f"import tiny.{room}.{high}"}


def folder_of(room: str) -> str:
    """`program.sharding` -> `program/sharding`."""
    return room.replace(".", "/")


PLANTS += [(upward(contract), contract["name"]) for contract in ROOMS]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports in `folder`, with the packages there first on the path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "src")])}
    command = [sys.executable, "-c", LINT]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """An empty package of outsize's shape under outsize's contracts."""
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace("outsize", "tiny")
    (tmp_path / "pyproject.toml").write_text(contracts, encoding="utf-8")
    plant(tmp_path, {"__init__.py": "", "errors.py": ""})
    plant(tmp_path, {f"{package}/__init__.py": "" for package in (*PACKAGES, "cli")})
    inner = [
        (room_of(room), name) for room in ROOMS for layer in room["layers"] for name in layer.split(" | ")
    ]
    plant(tmp_path, {f"{folder_of(room)}/{name}/__init__.py": "" for room, name in inner})
    kinds = ("protected_modules", "allowed_importers")
    named = [module for contract in CONTRACTS for kind in kinds for module in contract.get(kind, ())]
    files = [Path(*module.split(".")[1:]).with_suffix(".py") for module in named]
    plant(tmp_path, {f"{folder}/__init__.py": "" for file in files for folder in file.parents[:-1]})
    plant(tmp_path, {str(file): "" for file in files})
    return tmp_path


def plant(folder: Path, files: dict[str, str]) -> None:
    """Write modules into the tiny package."""
    for name, text in files.items():
        path = folder / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_the_house_stands() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_empty_house_stands(tiny: Path) -> None:
    plant(tiny, {"report/plots/__init__.py": "import matplotlib"})
    plant(tiny, {"train/batch/up.py": "import tiny.run, torch"})
    done = lint(tiny)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("files", "contract"), PLANTS, ids=[next(iter(files)) for files, _ in PLANTS])
def test_a_contract_can_break(tiny: Path, files: dict[str, str], contract: str) -> None:
    plant(tiny, files)
    done = lint(tiny)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout


def test_every_contract_is_broken_by_a_plant() -> None:
    assert {contract for _, contract in PLANTS} == {contract["name"] for contract in CONTRACTS}
