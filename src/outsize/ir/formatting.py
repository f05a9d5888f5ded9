"""Formats numbers for people: one spelling of bytes, seconds, shares and counts everywhere. Reads counts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))
_WHOLE = re.compile(r"[0-9]{1,18}\Z")


def bytes_text(size_bytes: float) -> str:
    """Returns `31.4 GiB`, `12.0 MiB` or `17 B`: the largest unit that gives at least one."""
    unit, size = byte_unit(size_bytes)
    return f"{size_bytes / size:.{0 if size == 1 else 1}f} {unit}"


def byte_unit(size_bytes: float) -> tuple[str, int]:
    """Returns name and bytes of the largest unit that gives at least one, to write several sizes in
    one unit.
    """
    return next((unit for unit in _UNITS if abs(size_bytes) >= unit[1]), _UNITS[-1])


def seconds_text(seconds: float) -> str:
    """Returns `2.41 s`, `103 ms` or `12.4 us`, with three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def percent_text(share: float) -> str:
    """Returns `23 %` for 0.234."""
    return f"{share * 100:.0f} %"


def count_text(number: float) -> str:
    """Returns `812`, `5.10 M` or `7.24 B` (billion), with three significant digits from a thousand on."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f}"


def flops_text(flops: float) -> str:
    """Returns `84.0 MFLOP` or `1.20 TFLOP`, with SI prefixes as in the literature."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(flops) >= size:
            return f"{_three_digits(flops / size)} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def rate_text(per_s: float) -> str:
    """Returns a rate per second without its unit: `2.82`, `48.0`, `12900`."""
    return _three_digits(per_s)


def price_text(price: float) -> str:
    """Returns a price with cents, or with three digits below one."""
    return f"{price:.2f}" if price >= 1 or not price else f"{price:.3g}"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else f"{number:.0f}"


def microbatches_text(count: int) -> str:
    """Returns `1 microbatch` or `8 microbatches`."""
    return f"{count} microbatch{'' if count == 1 else 'es'}"


def axes_text(sizes: Mapping[str, int]) -> str:
    """Returns `pp 4 x tp 2`, or `one device` without any axis."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items()) or "one device"


def stages_text(stages: Sequence[int]) -> str:
    """Returns `stage 3` or `stages 0-2, 5` for ascending numbers."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"stage{'' if len(stages) == 1 else 's'} {ranges}"


def needs_text(who: str, needs_bytes: int, device: str, room_bytes: int) -> str:
    """Returns `stage 2 needs 31.4 GiB, cpu:1 has room for 23.8`, with enough digits to tell the numbers
    apart.
    """
    name, unit = byte_unit(needs_bytes)
    needs, room = needs_bytes / unit, room_bytes / unit
    digits = next((d for d in (1, 3, 6) if f"{needs:.{d}f}" != f"{room:.{d}f}"), 9)
    return f"{who} needs {needs:.{digits}f} {name}, {device} has room for {room:.{digits}f}"


def whole_number(text: str) -> int | None:
    """Returns the number that a text is in digits from 0 to 9, at most 18 of them; None for any other text.

    `int` alone also reads signs and digits of other scripts, and raises ValueError for very long ones, as for
    `str.isdigit()`'s superscripts.
    """
    return int(text) if _WHOLE.match(text) else None
