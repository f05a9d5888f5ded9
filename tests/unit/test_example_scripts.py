"""Each example prints what stands beside it in its .out; `--update-golden` writes these anew.

The training script prints the same alone, over two processes of `outsize run` and under torchrun.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

# With --all alone: two whole ResNets, planned and checked twice. test_parallel_branches.py has the plans of
# such towers, and test_branched_stages.py runs narrow ones.
LONG = ("04_two_resnets.py",)
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = "05_train_script.py"
OUTSIZE_RUN = (
    "import sys; from outsize.ops.launch.launch import run_script; sys.exit(run_script(sys.argv[2:], 2))"
)
LAUNCHERS = {
    "outsize run": ("-c", OUTSIZE_RUN, "--"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2"),
}

pytestmark = pytest.mark.usefixtures("forked_python")


def printed(*command: str) -> str:
    """What python prints for these arguments, in the folder of the examples."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = (sys.executable, *command)
    done = subprocess.run(
        command, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(str(path.relative_to(EXAMPLES)), marks=[pytest.mark.full] if path.name in LONG else [])
        for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("split/*.py")])
    ],
)
def test_an_example_prints_its_out(name: str, request: pytest.FixtureRequest) -> None:
    out, said = (EXAMPLES / name).with_suffix(".out"), printed(name)
    if request.config.getoption("--update-golden"):
        out.write_text(said, encoding="utf-8")
    assert out.exists(), f"no {out.name}; write it with pytest --update-golden"
    assert said == out.read_text(encoding="utf-8")


@pytest.mark.dist
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.sample("outsize run")
def test_the_script_prints_the_same_over_processes(launcher: str) -> None:
    assert printed(*LAUNCHERS[launcher], SCRIPT) == (EXAMPLES / SCRIPT).with_suffix(".out").read_text(
        encoding="utf-8"
    )


def test_a_failing_example_is_seen(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)", encoding="utf-8")
    with pytest.raises(AssertionError):
        printed(str(broken))
