"""Imports torchvision, transformers and peft, also where torchvision's compiled part does not load.

A torchvision wheel built for CUDA does not load its `_C` library with a CPU-only torch. torchvision then
stops at registering a meta kernel for `torchvision::nms`, an operator that is not defined, and transformers,
which imports torchvision when it is installed, stops with it. Every other operator of torchvision is only
looked up when it is called; so a definition of the two (a name and a schema, no kernel) is enough for all
models that do not suppress boxes.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

import torch

from outsize.errors import ModelNotImportable

_NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS_WANTED_AT_IMPORT = ("nms", "qnms")


def import_torchvision() -> ModuleType:
    """Imports torchvision; warns once per process when its compiled part does not load.

    Raises ModelNotImportable when torchvision is not installed or does not import for another reason.
    """
    _define_missing_operators()
    return _import("torchvision", extra="vision")


def import_transformers() -> ModuleType:
    """Imports transformers, after torchvision when that is installed, since transformers imports it.

    Raises ModelNotImportable when transformers is not installed or does not import.
    """
    _define_missing_operators()
    return _import("transformers", extra="hf")


def import_peft() -> ModuleType:
    """Imports peft, which imports transformers.

    Raises ModelNotImportable when one of them is not installed or does not import.
    """
    import_transformers()
    return _import("peft")


def import_package(name: str, *, extra: str) -> ModuleType:
    """Imports a package that comes with an extra of outsize, and may import torchvision.

    Raises ModelNotImportable, which names the extra, when it is not installed or does not import.
    """
    _define_missing_operators()
    return _import(name, extra=extra)


def _import(name: str, *, extra: str = "") -> ModuleType:
    """Imports a package that comes with an extra of outsize, or by its own name."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ModelNotImportable(
            f"{name} does not import",
            numbers=f"{type(error).__name__}: {error}",
            next_step=f"pip install 'outsize[{extra}]'" if extra else f"pip install {name}",
        ) from error


def _define_missing_operators() -> None:
    """Defines what `import torchvision` looks up and the compiled part lacks; does nothing the
    second time.
    """
    package = find_spec("torchvision")
    if package is None or _is_defined("nms"):
        return
    reason = _load_compiled_part(list(package.submodule_search_locations or ()))
    if not reason:
        return  # It has what its own import looks up; in torchvision 0.26 that is nms alone.
    missing = [name for name in _OPERATORS_WANTED_AT_IMPORT if not _is_defined(name)]
    for name in missing:
        torch.library.define(f"torchvision::{name}", _NMS_SCHEMA)
    if missing:
        warnings.warn(
            f"torchvision's compiled part does not load ({reason}); its models work, "
            "its compiled operators (nms, roi_align, deform_conv2d and the like) do not",
            RuntimeWarning,
            stacklevel=3,
        )


def _load_compiled_part(folders: list[str]) -> str:
    """Loads `torchvision/_C` as torchvision itself will; returns '' or the reason why it does not load."""
    library = PathFinder.find_spec("_C", folders)
    if library is None or library.origin is None:
        return "there is none"
    try:
        torch.ops.load_library(library.origin)
    except OSError as error:
        return str(error)
    return ""


def _is_defined(operator: str) -> bool:
    return hasattr(torch.ops.torchvision, operator)
