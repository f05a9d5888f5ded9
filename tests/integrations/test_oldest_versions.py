"""The oldest promised version of each optional package passes tests that the newest one passes, too.

`make test-integrations` fills `.venv-oldest` where the Python is the oldest promised one: packages of that
age have no wheels for newer ones. The tests run in interpreters that have this folder first on their path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import oldest_versions
import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version
from patience import PATIENCE_S

HERE = "tests/integrations/test_"
SPLIT = "test_a_split_{}_has_the_digits_of_the_plain_one"
TWO = "test_so_has_one_over_two_processes"
ZOO = "tests/parity/test_coverage.py::test_the_zoo"
LOADERS = "tests/unit/train/checkpoint/test_checkpoints.py::test_loaders_go_on_behind_what_was_used"
# transformers, accelerate, peft; lightning; tensorboard, wandb, mlflow; pyyaml, highspy, torchdata. Together,
# because each start imports torch, the packages and the tests.
OF_MOST = (
    f"{HERE}transformers_trainer.py::{SPLIT.format('trainer')}[gpt2 by epochs]",
    f"{HERE}transformers_trainer.py::{TWO}[gpt2 with LoRA]",
    f"{HERE}transformers_trainer.py::test_a_run_goes_on_at_another_number_of_stages",
    f"{HERE}accelerate_recipe.py",
    f"{HERE}lightning.py::{SPLIT.format('module')}[bfloat16, a dict, early stopping]",
    f"{HERE}lightning.py::{TWO}[manual, two optimizers]",
    f"{HERE}loggers.py",
    "tests/unit/ops/jobs/test_published_fields.py",
    "tests/benchmarks/test_integer_program.py",
    f"{LOADERS}[7-stateful]",
)
# matplotlib, without what imports pyplot; torchvision, diffusers, timm: these models run with --all alone.
OF_MODELS = (
    "--all",
    "tests/unit/report/test_plots.py",
    *(f"{ZOO}[{name}]" for name in ("timm_vit", "diffusers_autoencoder", "mobilenet_v2")),
)
AT_START = {**os.environ}
"""Before any test: the newest wandb leaves the address of its service there, which the oldest cannot read."""
pytestmark = pytest.mark.skipif(
    not oldest_versions.FOLDER.is_dir(),
    reason="`make test-integrations` fills .venv-oldest with Python 3.11, for which old versions have wheels",
)


def test_the_folder_has_the_oldest_promised_versions() -> None:
    here = distributions(path=[str(oldest_versions.FOLDER)])
    found = {canonicalize_name(package.name): Version(package.version) for package in here}
    promised = oldest_versions.promised()
    assert {"transformers", "wandb", "timm"} <= set(promised)
    wanted = {canonicalize_name(name): Version(version) for name, version in promised.items()}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.interpreters
@pytest.mark.parametrize("asked", [OF_MOST, OF_MODELS], ids=["most", "models"])
def test_the_oldest_versions_pass(asked: tuple[str, ...]) -> None:
    path = os.pathsep.join([str(oldest_versions.FOLDER), str(oldest_versions.ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked],
        env={**AT_START, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=oldest_versions.ROOT,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
