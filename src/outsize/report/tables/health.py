"""Builds the table of what a machine offers, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.ir.answers.health import Health
from outsize.ir.formatting import bytes_text


def health_tables(health: Health) -> Group:
    """Returns one line for each thing that works, then what is missing with what to do."""
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(health):
        table.add_row(Text(name, "bold"), Text(value))
    if not health.missing:
        return Group(table, Text("nothing is missing"))
    return Group(table, Text("missing", "bold"), *(Text(f"  {line}") for line in health.missing))


def _rows(health: Health) -> Iterator[tuple[str, str]]:
    for name, version in health.versions.items():
        if version is not None:
            yield name, version
    yield "python", f"{health.python} on {health.system}"
    for device in health.devices:
        yield device.name, f"{device.kind}, {bytes_text(device.memory_bytes)}"
    yield "threads", f"{health.threads} in each process, of {health.cores} usable cores"
    yield "backends", ", ".join(f"{name} {'yes' if on else 'no'}" for name, on in health.backends.items())
    yield "shared memory", "between processes of this machine" if health.shared_memory else "no"
    yield "captures", f"an engine stores the programs of {health.captures} shapes (captures=)"
