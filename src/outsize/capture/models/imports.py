"""Imports torchvision, transformers and peft, also where torchvision's compiled part does not load.

Who imports torchvision needs the finder of torchvision_operators.py then, and all of these may import it. The
user is told where a model of torchvision is asked for (`TorchvisionNote`), and by `outsize doctor`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import final

import torch

from outsize.capture.models import torchvision_operators
from outsize.errors import ModelNotImportable
from outsize.errors.interruptions import raise_interruption
from outsize.program.source_line import warn_user


@final
class TorchvisionNote(UserWarning):
    """Says that torchvision's compiled operators cannot be used."""


def import_torchvision() -> ModuleType:
    """Imports torchvision; warns (TorchvisionNote) when its compiled part does not load.

    Raises ModelNotImportable when torchvision is not installed or does not import for another reason.
    """
    package = import_package("torchvision", extra="vision")
    unfit = unfit_torchvision()
    if unfit is not None:
        warn_user(f"{unfit}. Next: outsize doctor", TorchvisionNote)
    return package


def unfit_torchvision() -> str | None:
    """Returns what does not work in a torchvision that is built for another torch; None where all does, or
    there is none.
    """
    package = find_spec("torchvision")
    if package is None or torchvision_operators.loads_compiled_part(package.submodule_search_locations or ()):
        return None
    return (
        f"torchvision {version('torchvision')} is built for another torch than {torch.__version__}: its "
        "models work, its compiled operators (nms, roi_align, deform_conv2d and the like) do not"
    )


def import_transformers() -> ModuleType:
    """Imports transformers, which imports torchvision where that is installed.

    Raises ModelNotImportable when transformers is not installed or does not import.
    """
    return import_package("transformers", extra="hf")


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
    torchvision_operators.install()
    return _import(name, extra=extra)


def _import(name: str, *, extra: str = "") -> ModuleType:
    """Imports a package that comes with an extra of outsize, or by its own name."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise_interruption(error)
        raise ModelNotImportable(
            f"{name} does not import",
            numbers=f"{type(error).__name__}: {error}",
            next_step=f"pip install 'outsize[{extra}]'" if extra else f"pip install {name}",
        ) from error
