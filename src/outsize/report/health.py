"""What a machine offers, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.ir.health import Health
from outsize.ir.text import bytes_text


def health_tables(found: Health) -> Group:
    """One line for each thing that is there, then what is missing with what to do."""
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(found):
        table.add_row(Text(name, "bold"), Text(value))
    if not found.missing:
        return Group(table, Text("nothing is missing"))
    return Group(table, Text("missing", "bold"), *(Text(f"  {line}") for line in found.missing))


def _rows(found: Health) -> Iterator[tuple[str, str]]:
    for name, version in found.versions.items():
        if version is not None:
            yield name, version
    yield "python", f"{found.python} on {found.system}"
    for device in found.devices:
        yield device.name, f"{device.kind}, {bytes_text(device.memory_bytes)}"
    yield "threads", f"{found.threads} in each process, {found.cores} cores may be used"
    yield "backends", ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in found.backends.items())
    yield "shared memory", "between processes of this machine" if found.shared_memory else "no"
    yield "captures", f"an engine keeps {found.captures} shapes (parallelize(captures=...))"
