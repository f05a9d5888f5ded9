"""Numbers as people read them: one spelling of bytes, seconds and shares everywhere."""

from __future__ import annotations

GIB, MIB, KIB = 1024**3, 1024**2, 1024


def gib_text(size_bytes: float) -> str:
    """Bytes in GiB without the unit: `31.4`; small sizes keep two significant digits: `0.012`."""
    gib = size_bytes / GIB
    return f"{gib:.1f}" if gib >= 1 or gib == 0 else f"{gib:.2g}"


def bytes_text(size_bytes: float) -> str:
    """`31.4 GiB`, `12.0 MiB`, `3.1 KiB`, `17 B`: the largest unit that gives at least one."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """`2.41 s`, `103 ms`, `12.4 us`: three significant digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def percent_text(share: float) -> str:
    """`0.234` -> `23 %`."""
    return f"{share * 100:.0f} %"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else f"{number:.0f}"
