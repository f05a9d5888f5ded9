"""A new way to divide the batch is one record and its line of the registry, as for a real axis.

`dp_pod` has replicas of the batch on groups of machines. It is added to a copy of the package, by the file
POD and two lines of the registry (its import and its place), and nothing else. Then it is planned as
dp_replicate is, to the digit; a plan with it is written and read; and it trains over processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from patience import WHOLE_S

import outsize
from outsize.errors import BadPlan
from outsize.ir.plan import Plan

pytestmark = pytest.mark.interpreters

WORKER = Path(__file__).with_name("toy_axis_worker.py")
POD = '''"""Defines the axis dp_pod: groups of machines that each have their part of the batch."""

from outsize.axes.axis import Axis

POD = Axis(
    name="dp_pod",
    paper="a toy",
    title="data parallelism over pods",
    listed=6,
    divides_batch=True,
    same_weights=True,
    same_experts=True,
    by_modules=True,
    help="Number of groups of machines, each with its part of the batch.",
)
'''


def with_the_toy(folder: Path) -> Path:
    """A copy of the package, with its compiled files, with one axis more, outside of dp_replicate."""
    package = folder / "outsize"
    shutil.copytree(Path(outsize.__file__).parent, package)
    (package / "axes" / "pod.py").write_text(POD, encoding="utf-8")
    registry = package / "axes" / "registry.py"
    text = registry.read_text(encoding="utf-8")
    for line, more in {
        "from outsize.axes.pipeline import PIPELINE\n": "from outsize.axes.pod import POD\n",
        "    PIPELINE,\n": "    POD,\n",
    }.items():
        assert text.count(line) == 1
        text = text.replace(line, line + more)
    registry.write_text(text, encoding="utf-8")
    return package


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    with_the_toy(folder)
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder)],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WHOLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@cache
def told_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("alone", {"dp_pod": 2}),
        ("searched", {"pp": 2, "dp_pod": 2}),
        ("composed", {"dp_shard": 2, "tp": 2, "dp_pod": 2}),
    ],
)
def test_it_is_planned_and_priced_as_the_other_replicas(
    folder: Path, name: str, axes: dict[str, int]
) -> None:
    toy, real = told_in(folder)[name]
    assert toy["axes"] == axes
    assert real["axes"] == {name.replace("pod", "replicate"): size for name, size in axes.items()}
    toy, real = ({**told, "axes": {}} for told in (toy, real))
    assert toy == real
    assert toy["step_s"] > 0
    assert not toy["bits"]
    assert not toy["unsupported"]


@pytest.mark.parametrize(
    ("name", "axes"), [("run alone", {"dp_pod": 2}), ("run sharded", {"dp_pod": 2, "dp_shard": 2})]
)
def test_it_trains_over_processes_as_one_process_does(folder: Path, name: str, axes: dict[str, int]) -> None:
    verdict = told_in(folder)[name]
    assert verdict["axes"] == axes
    assert verdict["processes"] == len(axes) * 2
    assert verdict["relative_diff"] < 1e-14
    assert verdict["parameter_diff"] < 1e-15
    assert any("dp_pod 2" in note for note in verdict["notes"])


def test_a_plan_file_has_it(folder: Path) -> None:
    axes = json.loads((folder / "plan.json").read_text())["axes"]
    assert [*axes][-1] == "dp_pod"
    assert axes["dp_pod"] == 2


def test_without_the_record_the_plan_is_refused(folder: Path) -> None:
    with pytest.raises(BadPlan, match=r"axes\.dp_pod"):
        Plan.load(folder / "plan.json")
