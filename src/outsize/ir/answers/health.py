"""Records what this machine offers outsize, as data."""

from __future__ import annotations

from typing import final

from outsize.ir.base import Record


@final
class FoundDevice(Record):
    """Describes a device that stages can run on, under the name that `devices=` takes."""

    name: str
    kind: str
    memory_bytes: int


@final
class Health(Record):
    """Holds what `outsize doctor` shows.

    `versions` has None where a package is not installed. `captures` is how many shapes an engine stores;
    `missing` lists what does not work here, and what to do about it.
    """

    versions: dict[str, str | None]
    python: str
    system: str
    cores: int
    threads: int
    devices: tuple[FoundDevice, ...]
    backends: dict[str, bool]
    shared_memory: bool
    captures: int
    missing: tuple[str, ...]
