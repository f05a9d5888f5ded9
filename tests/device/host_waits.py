"""Counts how often the host waits for a simulated device, and says where in the code each wait is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import outsize
import simdev

_PACKAGE: Final = str(Path(outsize.__file__).parent)


def host_waits(run: Callable[[], Any]) -> Counter[str]:
    """Returns the waits of a call: `what waited at file:line`, with the innermost line of outsize.

    After each call of a C function the device's counter is compared, so a wait is seen where it happened.
    """
    found, seen = Counter[str](), 0

    def look(frame: FrameType, _event: str, _: Any) -> None:
        nonlocal seen
        # The package's own modes must not see the operators that ask the device.
        with torch._C.DisableTorchFunction():
            waits = simdev.host_waits()
            if waits > seen:
                found[f"{_names(found)} at {_place(frame)}"] += waits - seen
                seen = waits

    simdev.reset_counters()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _names(found: Counter[str]) -> str:
    """Returns the names whose count has grown since the last look."""
    before = Counter[str]()
    for text, count in found.items():
        before[text.partition(" at ")[0]] += count
    return " and ".join(sorted(n for n, count in simdev.waits_by_name().items() if count > before[n]))


def _place(frame: FrameType | None) -> str:
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "the caller"
    return f"{Path(frame.f_code.co_filename).relative_to(_PACKAGE)}:{frame.f_lineno}"
