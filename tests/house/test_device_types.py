"""Only the device layer names types of devices: all other code asks it, so that any accelerator can run.

Examples in messages and docstrings (`devices=["cuda:0", "cpu"]`) name devices, not types.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from house import PACKAGE, parse, sources

LAYER = PACKAGE / "device"
ACCELERATORS = LAYER / "accelerators.py"
# The catalogue of data sheets calls its devices "cuda:0" and so on; engines of others have a method `cuda`.
DATA = {PACKAGE / "ir" / "hardware" / "devices.py", PACKAGE / "errors" / "names.py"}
TYPES = re.compile(r"(cuda|xpu|npu|hpu|mps|nccl|xccl|hccl)")
OF_TORCH = {"torch", "Tensor", "torch.Tensor", "nn.Module", "torch.nn.Module"}


def named(path: Path) -> list[str]:
    """`file:line what` for each attribute of torch or of a class of its, or text, that is a type of devices
    or a backend.
    """
    found = []
    for node in ast.walk(parse(path)):
        what = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        is_torch = not isinstance(node, ast.Attribute) or ast.unparse(node.value) in OF_TORCH
        if isinstance(what, str) and TYPES.fullmatch(what) and is_torch:
            found.append(f"{path.name}:{getattr(node, 'lineno', 0)} {what}")
    return found


def naming_cuda(paths: Iterable[Path]) -> list[str]:
    """The files whose text names torch's module for one type, in code, comments or docstrings."""
    return [path.name for path in paths if "torch.cuda" in path.read_text(encoding="utf-8")]


def test_one_file_names_the_module_of_a_type() -> None:
    assert naming_cuda(sources()) == [ACCELERATORS.name]


def test_types_of_devices_are_named_in_one_layer() -> None:
    outside = [p for p in sorted(PACKAGE.rglob("*.py")) if LAYER not in p.parents and p not in DATA]
    assert [line for path in outside for line in named(path)] == []


def test_a_name_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        'import torch\ntorch.cuda.synchronize()\nkind = "cuda"\nself.cuda()\nexample = "cuda:0"\n'
        "moves = {Tensor.xpu}\n"
    )
    assert naming_cuda([wrong]) == ["wrong.py"]
    assert sorted(named(wrong)) == ["wrong.py:2 cuda", "wrong.py:3 cuda", "wrong.py:6 xpu"]
