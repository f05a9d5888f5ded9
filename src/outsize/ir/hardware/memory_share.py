"""Reads how much of its devices' memory a run may have: the end of a cluster's name, `2x80GB:50%`.

A share is a number above 0 and at most 1. It is of each device's whole memory, and holds for planning and,
when the plan runs, for the device itself (device/memory_limit.py).
"""

from __future__ import annotations

import math
import re
from typing import Final

from outsize.errors import BadOption

_NAME: Final = re.compile(r"(?P<before>.*):(?P<percent>[^:@+,]*)%(?P<network>@.*)?", re.DOTALL)
_PERCENT: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")


def split_share(name: str) -> tuple[str, float | None]:
    """Returns the cluster's name without its share, and the share or None. Raises BadOption."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        return name, None
    percent, rest = match["percent"].strip(), match["before"] + (match["network"] or "")
    if _PERCENT.fullmatch(percent) is None or not 0 < float(percent) <= 100:
        raise BadOption(
            f"cluster {name!r} has a share of memory that makes no sense",
            numbers=f"{percent!r} %; a share is above 0 % and at most 100 %",
            next_step=f"--cluster {match['before']}:50%{match['network'] or ''}",
        )
    return rest, float(percent) / 100


def with_share(name: str, share: float) -> str:
    """Returns a cluster's name with a share, which replaces the one that it has. Raises BadOption."""
    before, at, network = split_share(name)[0].partition("@")
    return f"{before}:{100 * checked_share(share):.6g}%{at}{network}"


def checked_share(share: float, option: str = "memory_share") -> float:
    """Returns the share. Raises BadOption for one that makes no sense."""
    if not (isinstance(share, int | float) and math.isfinite(share) and 0 < share <= 1):
        raise BadOption(
            f"{option}={share} makes no sense",
            numbers="a share of each device's memory is above 0 and at most 1",
            next_step=f"{option}=0.5",
        )
    return float(share)
