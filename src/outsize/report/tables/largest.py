"""Builds the answer of `outsize fit --max` as text: the largest size, what the next lacks, devices."""

from __future__ import annotations

from typing import Final

from rich.console import Group
from rich.text import Text

from outsize.ir.answers.fit import Fit
from outsize.ir.answers.largest import Largest
from outsize.ir.formatting import byte_unit, bytes_text
from outsize.report.tables import table_style
from outsize.report.tables.fit import COLOURS, devices_table, parameters_text, setting_text
from outsize.report.wording import refusal_text

# Other quantities are called as they were asked for.
NAMES: Final = {"layers": "number of layers", "sequence": "sequence length"}


def largest_table(found: Largest) -> Group:
    """Returns the whole answer."""
    shown = found.fit or found.beyond
    assert shown is not None, "the least size is answered, or its error is raised"
    fits = found.fit is not None
    answer = "YES" if fits else "NO"
    name = NAMES.get(found.quantity, found.quantity)
    text = f"the largest {name} is {found.value:,}" if fits else f"no {name} fits"
    heading = Text.assemble(
        (answer, COLOURS[answer]),
        "  ",
        (shown.model, "bold"),
        f" ({parameters_text(shown)}) on {shown.cluster}: {text}",
    )
    lines = [heading, Text(setting_text(shown)), Text(_why(found))]
    return Group(*lines, *(table_style.spaced(devices_table(shown.devices)) if shown.devices else ()))


def _why(found: Largest) -> str:
    """Returns how full the fullest device is, and what the next size lacks."""
    held = _fullest_device(found.fit) if found.fit is not None else ""
    if found.next_value is None:
        return f"{held}; larger sizes were not tried, or the model does not take them"
    lacking = found.lacking_bytes
    if lacking is None:
        refused = found.beyond.refused if found.beyond is not None else None
        reason = "does not fit" if refused is None else f"does not fit: {refusal_text(refused)}"
    else:
        reason = f"lacks {bytes_text(lacking)}"
    return "; ".join(filter(None, (held, f"{found.next_value:,} {reason}")))


def _fullest_device(fit: Fit) -> str:
    """Returns `P95 78.1 of 79.2 GiB on cuda:0`, of the fullest device."""
    fullest = max(fit.devices, key=lambda device: device.share)
    unit, size = byte_unit(fullest.memory_bytes)
    of = f"{fullest.p95_bytes / size:.1f} of {fullest.memory_bytes / size:.1f} {unit}"
    return f"P95 {of} on {fullest.device}"
