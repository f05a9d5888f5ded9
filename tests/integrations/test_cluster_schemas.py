"""Job files are what the engines' own packages take; a field that they do not have is refused.

The packages are in `.venv-clusters` (make test-integrations), apart from torch and its pinned versions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clusters" / "bin" / "python"
JUDGE = Path(__file__).parent / "cluster_judge.py"
JOBS = ROOT / "tests" / "golden" / "jobs"
SCHEDULERS = ("kubeflow", "kai", "kueue", "volcano")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="kubeflow-trainer-api, skypilot and dstack are not here: make test-integrations",
)


def judged(engine: str, *paths: Path) -> list[str]:
    """What the package says of job files."""
    command = [str(PYTHON), str(JUDGE), engine, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(JOBS.glob("*.yaml")):
        name = path.name.partition("-")[0]
        yield ("kubernetes" if name in SCHEDULERS else name), path


WRONG = (
    ("kubeflow-elastic.yaml", "numProcPerNode: 8", "numProcsPerNode: 8"),
    ("kubeflow-elastic.yaml", "terminationGracePeriodSeconds", "terminationGraceSeconds"),
    ("kueue-elastic.yaml", "podFailurePolicy", "podFailurePolicies"),
    ("volcano-elastic.yaml", "workingDir", "workDir"),
    ("kai-elastic.yaml", "publishNotReadyAddresses", "publishNotReady"),
    ("skypilot-elastic.yaml", "use_spot: true", "use_spots: true"),
    ("skypilot-elastic.yaml", "num_nodes", "nodes"),
    ("dstack-elastic.yaml", "stop_duration", "stop_after"),
    ("dstack-elastic.yaml", "memory: 80GB..", "memori: 80GB.."),
)


@pytest.mark.parametrize("engine", ["kubernetes", "skypilot", "dstack"])
def test_the_engines_own_packages_take_every_job_file_and_refuse_a_wrong_field(
    engine: str, tmp_path: Path
) -> None:
    """In one start of the packages, which takes seconds."""
    right = [path for name, path in files() if name == engine]
    assert len(right) >= 5
    wrong = [path for name, path in changed_files(tmp_path) if name == engine]
    assert len(wrong) >= 2
    said = judged(engine, *right, *wrong)
    assert [line for line in said if line.startswith(tuple(path.name for path in right))] == []
    assert [path.name for path in wrong if not any(line.startswith(path.name) for line in said)] == []


def changed_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Writes each file of WRONG, whose name begins with a number."""
    for number, (file, right, wrong) in enumerate(WRONG):
        name = file.partition("-")[0]
        text = (JOBS / file).read_text(encoding="utf-8")
        assert right in text
        path = folder / f"{number}-{file}"
        path.write_text(text.replace(right, wrong, 1), encoding="utf-8")
        yield ("kubernetes" if name in SCHEDULERS else name), path


@pytest.mark.parametrize("path", sorted(JOBS.glob("slurm-*.sh")), ids=lambda path: path.name)
def test_a_shell_can_read_the_batch_script(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.parametrize("path", sorted(JOBS.glob("ray-*.txt")), ids=lambda path: path.name)
def test_python_can_read_the_driver(path: Path) -> None:
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    assert sys.version_info >= (3, 11)
