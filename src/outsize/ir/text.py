"""Numbers as people read them: one spelling of bytes, seconds and shares everywhere."""

from __future__ import annotations

_UNITS = (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024), ("B", 1))


def bytes_text(size_bytes: float) -> str:
    """`31.4 GiB`, `12.0 MiB`, `17 B`: the largest unit that gives at least one."""
    unit, size = byte_unit(size_bytes)
    return f"{size_bytes / size:.{0 if size == 1 else 1}f} {unit}"


def byte_unit(size_bytes: float) -> tuple[str, int]:
    """Name and bytes of the largest unit that gives at least one; for several sizes in one unit."""
    return next((unit for unit in _UNITS if abs(size_bytes) >= unit[1]), _UNITS[-1])


def seconds_text(seconds: float) -> str:
    """`2.41 s`, `103 ms`, `12.4 us`: three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def percent_text(share: float) -> str:
    """`0.234` -> `23 %`."""
    return f"{share * 100:.0f} %"


def count_text(number: float) -> str:
    """`812`, `5.10 M`, `7.24 B` (billion): three significant digits from a thousand on."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size:
            return f"{_three_digits(number / size)} {unit}"
    return f"{number:.0f}"


def flops_text(flops: float) -> str:
    """`84.0 MFLOP`, `1.20 TFLOP`: SI prefixes, as the literature has them."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(flops) >= size:
            return f"{_three_digits(flops / size)} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def rate_text(per_s: float) -> str:
    """Things per second without their name: `2.82`, `48.0`, `12900`."""
    return _three_digits(per_s)


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else f"{number:.0f}"
