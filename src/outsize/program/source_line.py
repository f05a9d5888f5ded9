"""Locates events in the user's code as `file:line`, with the frames of outsize, torch and Python left out.

A frame is outsize's own when its file lies below the folder of this package, whatever that folder's parents
are called: a user may work in a clone or a folder named `outsize` or `torch`. torch is located, not imported.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"


def is_outsize_file(filename: str) -> bool:
    """Returns whether a frame's file belongs to the installed package `outsize`."""
    return filename.startswith(_PACKAGE)


def line_of(function: object) -> str:
    """Returns the `file:line` where a function begins; "?" for what is no function of Python's."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else "?"


def calling_line() -> str:
    """Returns the `file:line` of the nearest caller outside torch, Python and outsize; "?" where there is
    none.
    """
    frame = sys._getframe(1)
    while frame is not None and _is_passed_through(frame.f_code.co_filename, "<"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns as `warnings.warn`, at the nearest line outside torch, Python and outsize.

    It is looked for because a fixed `stacklevel` is wrong as soon as another function lies between.
    """
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_passed_through(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def frames_outside_outsize(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of an error's traceback that are not outsize's own, the outermost first."""
    return [f for f in traceback.extract_tb(error.__traceback__) if not is_outsize_file(f.filename)]


def raising_line(error: BaseException) -> str:
    """Returns the `file:line` of the user's code that raised, or of torch's where no user frame is left."""
    last = users_frame(frames_outside_outsize(error))
    return f"{last.filename}:{last.lineno}" if last is not None else "the call itself"


def users_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's code, or of torch's and Python's where there is none."""
    outside = [f for f in frames if not is_outsize_file(f.filename)]
    users = [f for f in outside if not _is_passed_through(f.filename)]
    return next(reversed(users or outside), None)


def _is_passed_through(filename: str, *starts: str) -> bool:
    """Returns whether a file is one that users' code calls, and that calls theirs: a context manager's frame
    of Python's library stands below the `with` of whoever raised.

    Code without a file (`<stdin>`) may be the user's; `starts` are other beginnings that are passed through.
    """
    of_python = filename.startswith(_PYTHON) and "site-packages" not in filename
    return of_python or filename.startswith((_PACKAGE, _torch_folder(), "<frozen ", *starts))


@cache
def _torch_folder() -> str:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return _PACKAGE
    return f"{Path(spec.origin).parent}{os.sep}"
