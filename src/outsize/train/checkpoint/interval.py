"""Reads how often a run saves: every so many steps, or every so many seconds, minutes or hours.

    500   every 500 steps      90s   10m   2h   every so long, at the end of a step

It imports no torch, since the command line checks its options with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, final

from outsize.errors import BadOption

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


@final
@dataclass(frozen=True, slots=True)
class SaveInterval:
    """An interval in steps, or in seconds where `steps` is None."""

    steps: int | None
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str | int) -> SaveInterval:
        """Reads `500` or `10m`. Raises BadOption."""
        text = str(text)
        found = re.fullmatch(r"([0-9]{1,9})([smh]?)", text.strip())
        if found is None or not int(found[1]):
            raise BadOption(f"every {text!r} is no interval", next_step="500 (steps), 90s, 10m or 2h")
        number, unit = int(found[1]), found[2]
        return cls(None, number * _SECONDS[unit]) if unit else cls(number)
