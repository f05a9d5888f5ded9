"""Where in the user's code something happens."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

_MACHINERY = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/", "<")


def here() -> str:
    """file:line of the nearest caller outside torch and outsize; "?" where there is none."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
