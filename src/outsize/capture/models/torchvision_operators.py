"""Lets torchvision be imported where its compiled part does not load.

A torchvision that is built for CUDA does not load its `_C` library with a torch that is built for CPUs.
torchvision then stops at registering a meta kernel for `torchvision::nms`, an operator that is not defined,
and so does all that imports it where it is installed: transformers, lightning, timm. Every other operator of
torchvision is only looked up when it is called; so a definition of the two (a name and a schema, no kernel)
is enough for all models that do not suppress boxes.

`install` puts a finder before Python's own, which defines them when torchvision is imported, whoever does it;
until then it costs nothing. This file needs nothing of outsize: `make` copies it into the site-packages of
`.venv` with a `.pth` file, so that scripts there that know nothing of outsize import torchvision too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import final

_PACKAGE = "torchvision"
_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_WANTED_AT_IMPORT = ("nms", "qnms")


def install() -> None:
    """Puts the finder before Python's own, once."""
    if not any(isinstance(finder, OperatorsFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, OperatorsFirst())


@final
class OperatorsFirst(MetaPathFinder):
    """Finds torchvision as Python does, and has its operators defined before it runs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of torchvision; None for every other module."""
        if fullname != _PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@final
class _Loader(SourceFileLoader):
    """Runs torchvision's own code after its operators are defined."""

    def exec_module(self, module: ModuleType) -> None:
        """Defines what is missing, and runs the module."""
        if not loads_compiled_part(module.__path__):
            _define_missing()
        super().exec_module(module)


def loads_compiled_part(folders: Iterable[str]) -> bool:
    """Loads torchvision's `_C` library from the package's folders, as torchvision will; tells whether that is
    possible.
    """
    import torch

    library = PathFinder.find_spec("_C", [*folders])
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except OSError:
        return False
    return True


def _define_missing() -> None:
    import torch

    for name in _WANTED_AT_IMPORT:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"{_PACKAGE}::{name}", _NMS_SCHEMA)
