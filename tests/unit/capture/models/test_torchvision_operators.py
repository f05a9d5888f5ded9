"""torchvision is imported where its compiled part does not load, in a venv as `make` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy

from outsize.capture.models import torchvision_operators

STUB = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold):
    return dets
"""


def imported(folder: Path, *, with_hook: bool) -> str:
    """The last line of stderr of a script that knows nothing of outsize and imports a torchvision without its
    compiled part, which lies in the folder.
    """
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(STUB)
    if with_hook:
        copy(torchvision_operators.__file__, folder)
        line = "import torchvision_operators; torchvision_operators.install()\n"
        (folder / "torchvision_operators.pth").write_text(line)
    code = f"import site; site.addsitedir({str(folder)!r})\nimport torchvision"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode == 0) == (not ran.stderr.strip())
    return ran.stderr.strip().rpartition("\n")[2]


def test_the_hook_of_the_venv_defines_what_the_import_looks_up(tmp_path: Path) -> None:
    assert imported(tmp_path, with_hook=True) == ""


def test_without_definitions_such_a_torchvision_does_not_import(tmp_path: Path) -> None:
    """The first test could not fail otherwise: in a venv that `make` built, the hook is there already."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'OperatorsFirst']\n"
    )
    assert "torchvision::nms does not exist" in imported(tmp_path, with_hook=False)
