"""Refuses arguments of another kind before anything is done with them: paths, whole numbers, numbers.

    engine.save(None)            no path
    checkpoint(..., keep="all")  no whole number
    clip_grad_norm(-1)           no number above 0

Python's own TypeError would come from deep inside, or later, or never.
"""

from __future__ import annotations

import math
from collections.abc import Sized
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from outsize.errors import BadOption

_SHOWN = 60  # characters of a value; a dict of weights would fill the screen


def shown(value: Any) -> str:
    """Returns a value as one short line; of a large container its size alone."""
    text = " ".join(repr(value).split())
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}...".strip() if not isinstance(value, Sized) else f"<{len(value)} items>"


def path_of(value: Any, name: str, example: str) -> Path:
    """Returns a path. Raises BadOption, with `example` as the next step, for what is none or is empty."""
    if isinstance(value, str | PathLike) and str(value):
        return Path(value)
    kind = "is empty" if value == "" else f"is a {type(value).__name__}, no path"
    raise BadOption(f"{name}={shown(value)} {kind}", next_step=example)


def insist_on_whole_number(value: Any, name: str, least: int, next_step: str) -> None:
    """Raises BadOption for what is no whole number from `least` on."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise BadOption(
            f"{name}={shown(value)} makes no sense",
            numbers=f"a whole number from {least} on",
            next_step=next_step,
        )


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that is not NaN; a flag is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
