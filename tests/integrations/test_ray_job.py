"""The driver for Ray on a local Ray: it places the launcher, and starts again a run that has saved itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S
from test_slurm import check_the_digits, emitted

PYTHON = Path(__file__).parents[2] / ".venv-clusters" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not (PYTHON.parent / "ray").exists(), reason="Ray is not installed: make test-integrations"
)


def test_the_driver_runs_a_script_over_two_ranks_until_it_has_ended(tmp_path: Path) -> None:
    """The script's first attempt asks itself to end after a few steps; the second takes ten more."""
    (tmp_path / "job.py").write_text(emitted(tmp_path, "ray", "--signal"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    variables["RAY_ADDRESS"] = "local"  # another test's may be there, and end meanwhile
    done = subprocess.run(
        [str(PYTHON), str(tmp_path / "job.py")],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_the_digits(tmp_path)
    assert len((tmp_path / "losses").read_text().splitlines()) > 10
