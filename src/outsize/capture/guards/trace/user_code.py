"""Tells which code is the user's, whose frames are followed while a model is recorded."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sysconfig
from importlib.metadata import PackageNotFoundError, requires
from types import CodeType, FrameType
from typing import Final

import numpy as np
import torch
from torch import nn

from outsize.program.source_line import is_outsize_file

_STDLIB: Final = sysconfig.get_path("stdlib")
_FOLDERS: Final = tuple(
    f"{folder}{os.sep}"
    for folder in (pathlib.Path(torch.__file__).parent, pathlib.Path(np.__file__).parent, _STDLIB)
)
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH_MODULES: Final = f"{pathlib.Path(nn.__file__).parent / 'modules'}{os.sep}"
# The files of outsize that call a model, a loss function or a region of torch.utils.checkpoint.
_CALLERS: Final = (
    *("fallbacks.py", "recorder.py", "intercept.py"),
    *("loss_trials.py", "by_modules.py", "reference.py"),
    *(f"integrations{os.sep}{name}.py" for name in ("transformers", "training_step")),
)
# Look-ups in these classes are those of the objects that they wrap: UserDict, os.environ.
_TRANSPARENT: Final = frozenset(("<frozen os>", "<frozen _collections_abc>"))
_TRANSPARENT_FILES: Final = tuple(
    f"{_STDLIB}{os.sep}{name}" for name in (f"collections{os.sep}__init__.py", "weakref.py", "queue.py")
)


def is_torchs(code: CodeType) -> bool:
    """Tells whether a function is one of torch's modules, whose weak references are to their own weights.

    An exchanged weight is seen by the check of modules and parameters; that the former one was freed since,
    at a moment that the garbage collector chooses, changes nothing.
    """
    return code.co_filename.startswith(_TORCH_MODULES)


def is_user_code(code: CodeType) -> bool:
    """Returns whether frames of this code are followed: not those of libraries, but for torch's layers."""
    name = code.co_filename
    if name.startswith("<"):
        return name in _TRANSPARENT or not name.startswith(("<frozen", "<outsize"))
    if is_outsize_file(name) or code.co_name in ("<module>", "__getattribute__"):
        return False
    if name.startswith(_TORCH_MODULES):
        return not name.endswith("module.py")
    if any(folder in name for folder in _INSTALLED):
        return not name.startswith(_FOLDERS[:2])
    return not name.startswith(_FOLDERS) or name in _TRANSPARENT_FILES


def calls_users(frame: FrameType | None) -> bool:
    """Returns whether a frame that is not traced hands control to the user: not what outsize calls inside."""
    name = "" if frame is None else frame.f_code.co_filename
    return not is_outsize_file(name) or name.endswith(_CALLERS)


def serves_others(file: str) -> bool:
    """Returns whether code that a frame which is not traced has called works for that frame and not for the
    user: the packages that torch requires (its compiler computes with sympy), and parts of the standard
    library.
    """
    is_library = file in _TRANSPARENT or file in _TRANSPARENT_FILES
    return is_library or any(folder in file for folder in _required_by_torch())


def is_users_frame(frame: FrameType) -> bool:
    """Returns whether a frame's globals are the user's: what dataclasses generate has those of its class."""
    return not str(frame.f_globals.get("__name__", "")).startswith("outsize.")


@functools.cache
def _required_by_torch() -> tuple[str, ...]:
    """Returns the folders of the packages that torch requires, as parts of paths."""
    try:
        lines = requires("torch") or []
    except PackageNotFoundError:
        lines = []
    names = (re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines)
    return tuple(f"{os.sep}site-packages{os.sep}{name.replace('-', '_').lower()}{os.sep}" for name in names)
